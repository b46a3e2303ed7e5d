/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the leader: its state, and the functions that its files share. */
#ifndef CORE_LEADER_STATE_H
#define CORE_LEADER_STATE_H

#include "daemon/core/effects.h"
#include "daemon/core/interval.h"
#include "daemon/core/leader.h"
#include "daemon/core/leader_layout.h"
#include "daemon/core/leader_saves.h"
#include "wire/belay.h"

#define LEADER_STEPS_LEARNED  64 /* newest step times that deadlines are learned from */
#define LEADER_CHECKPOINTS    256
#define LEADER_BAD_MAX        32
#define LEADER_CRASHES        3 /* the same crash so often in a row: no progress */
#define LEADER_STORE_RETRY_MS 1000
#define LEADER_LAYOUT_TEXT    64

enum leader_life {
    LEADER_ORDERED = 0, /* wanted, not yet in a report */
    LEADER_LIVE = 1,
    LEADER_DEAD = 2 /* confirmed: exited, or its daemon does not hold it */
};

struct leader_proc {
    uint64_t incarnation;
    uint32_t node; /* index */
    uint32_t seat; /* rank in the plan of seat_generation */
    uint64_t seat_generation;
    uint32_t rank;           /* hint: the rank that it had or is to replace; CORE_NO_RANK none */
    uint64_t ran_generation; /* newest that ran with it as a member: `rank` was its rank there */
    enum leader_life life;
    struct wire_rank_report report; /* newest of its session */
    struct wire_beat beat;
    struct wire_exit status;
    uint32_t pid;
    uint64_t ordered_ms, joined_ms, kill_ms;
    uint64_t stamp;       /* of the node report that last named it */
    uint32_t kill;        /* ordered to be killed */
    uint32_t stacks;      /* with stacks first */
    uint32_t forget;      /* accounted for: the daemon may forget it */
    uint32_t counted;     /* its death was told and judged */
    uint32_t refused;     /* may never be a member */
    uint32_t was_leaving; /* it had said that its work is done */
};

struct leader_node {
    char name[WIRE_NODE_MAX];
    uint64_t incarnation;
    struct wire_former former;
    uint32_t connected, lost, refused, has_report;
    char refused_text[WIRE_TEXT_MAX];
    uint32_t up;               /* its daemon is there, whether it has reported or not */
    uint64_t connected_ms;     /* since when, while connected */
    uint64_t away_ms;          /* since when, while not connected */
    struct wire_report report; /* newest; owned */
    uint64_t *keys;            /* of its arenas' extents: equal for equal lists, 0 none; owned */
    uint64_t stamp;            /* of it */
    uint32_t dirty;
    uint64_t sequence, need, sent_ms; /* of directives */
    uint64_t drops_told;              /* digest of the arenas last named to be dropped */
    uint64_t fill_ms;                 /* no process is started before */
    uint64_t scan_id;                 /* whose answer is in the next two; 0 none */
    uint32_t scan_failed;             /* bits of roots */
    struct wire_holding *holdings;    /* owned; what it has in its own roots */
    uint32_t holding_count;
};

struct leader_map { /* incarnation -> index, open addressing */
    uint64_t *keys;
    uint32_t *values;
    size_t capacity, count;
};

struct leader_crash { /* what a generation died of */
    uint32_t rank, section;
    int32_t code, signal;
    uint64_t step;
    uint32_t count; /* generations in a row */
};

enum leader_change { /* kinds of compare-and-swap */
                     LEADER_CLAIM = 1,
                     LEADER_OPEN,
                     LEADER_PLAN,
                     LEADER_GO,
                     LEADER_COMMITTING,
                     LEADER_COMMITTED,
                     LEADER_COMMIT_FAILED,
                     LEADER_END
};

struct leader_bad { /* a checkpoint that could not be loaded */
    uint32_t root;  /* UINT32_MAX: of a root that the job does not have any more */
    char dir[WIRE_DIR_MAX];
};

struct core_leader {
    struct core_leader_config config; /* pointers inside are owned copies */
    struct leader_root roots[WIRE_JOB_ROOTS];
    char *name, *node, *job_json;
    uint64_t random; /* state of the generator */
    uint64_t now_ms, start_ms;
    uint32_t stirred; /* leader_step is due */

    struct wire_record record; /* durable; owned */
    uint64_t version;
    struct wire_record next; /* under way or about to be tried again; owned */
    enum leader_change change;
    uint32_t change_root; /* of COMMITTING and what follows from it */
    uint32_t change_pending;
    uint64_t op, change_retry_ms;
    uint32_t store_failed, claimed, deposed, finished;
    uint32_t is_beginning; /* started or resumed, and no generation has run yet */
    uint32_t begins;       /* so it was when the present times began */

    struct leader_node *nodes;
    uint32_t node_count;
    struct leader_proc *procs;
    uint32_t proc_count;
    struct leader_map map;
    uint64_t stamp;

    /* The disk. */
    struct core_checkpoint *checkpoints;
    uint32_t checkpoint_count;
    uint32_t scan_wanted, scan_pending, scan_done; /* done: at least once since wanted */
    uint32_t scan_from;  /* checkpoints from here on were committed since the scan was asked for */
    uint32_t scan_again; /* a commit failed since: the roots may have been read before it ended */
    uint64_t scan_retry_ms, settle_ms;
    uint64_t scan_id, scan_began_ms;    /* of the newest one */
    uint32_t scan_answered;             /* by the head; what it found is in the next three */
    struct core_checkpoint *scan_found; /* owned */
    uint32_t scan_found_count, scan_failed;
    int scan_rc;
    uint64_t file_key[2];                /* that opens files of checkpoints on all nodes */
    uint64_t lacks_told[LEADER_BAD_MAX]; /* manifests of incomplete checkpoints that were told */
    uint32_t lacks_told_count;
    struct leader_bad bad_dirs[LEADER_BAD_MAX];
    uint32_t bad_dir_count;
    uint64_t bad_steps[LEADER_BAD_MAX]; /* whose memory copies failed their digest */
    uint32_t bad_step_count;
    uint64_t digest_failed_step; /* failed once; a second time makes it bad */

    /* A cause not yet opened. */
    uint32_t cause_pending;
    uint32_t cause_is_victims; /* the cause is what somebody's loss looked like to its peers */
    char death[WIRE_TEXT_MAX]; /* that was behind it, when it is known */
    char cause[WIRE_TEXT_MAX];
    uint64_t cause_ms, cause_detect_ms;

    struct leader_layout shape; /* of the generation that ran last; dp 0: none */
    uint64_t ran_generation;    /* that one */

    /* OPEN and PLANNED. */
    uint64_t phase_ms;          /* since when the present phase is durable */
    uint64_t opened_ms;         /* since when the run is without a running generation */
    uint64_t opened_generation; /* then */
    uint32_t abandon, hold;
    uint32_t wait; /* enum core_wait */
    char wait_text[WIRE_TEXT_MAX];
    uint32_t fence_told, wait_told;
    uint32_t start_failures;  /* starts that failed in this OPEN */
    uint64_t recover_ms[128]; /* ring: when recoveries were opened */
    uint64_t recover_count;
    uint32_t load_hangs, step_hangs; /* in a row without a culprit */
    uint32_t planned;                /* this recovery has made a plan since its newest OPEN */
    uint32_t failed_plans;           /* in a row, that failed before they ran */

    /* RUNNING. */
    uint64_t step;    /* newest that every member has applied */
    uint64_t step_ms; /* when it was seen */
    uint64_t step_times[LEADER_STEPS_LEARNED];
    uint64_t step_time_count;
    uint64_t end_step, end_ms, last_ms; /* last: when the last save began */
    uint32_t first_sealed;              /* a step of this generation is sealed by all */
    uint64_t lost_from;                 /* newest step of the former generation */
    uint32_t ended;       /* all members leave with the same step, or no generation will run */
    uint32_t stop_saving; /* in OPEN: the last save is made without ranks */
    uint32_t stop_flags;  /* seen at the end */
    uint32_t stop_asked, save_asked, save_asked_done; /* done: one root has it */
    uint64_t save_asked_step;
    uint32_t save_asked_tries;            /* of it that failed */
    char save_failed_text[WIRE_TEXT_MAX]; /* of the newest save that failed */
    uint64_t request_id, request_generation, request_ms;
    uint32_t request_flags;
    struct leader_crash crash;
    char first_cause[WIRE_TEXT_MAX];

    struct leader_save saves[WIRE_SAVES_MAX];
    uint32_t save_count;
    uint64_t saves_through; /* steps up to this one are decided */
    uint64_t skipped_told;

    /* What saves cost. */
    uint64_t steps_calm, ms_calm; /* steps while nothing was saved */
    uint32_t was_saving;
    uint64_t disk_failures;                 /* recoveries from disk */
    uint64_t disk_failures_generation;      /* opened_generation of the newest of them */
    uint64_t interval_ms, interval_wait_ms; /* when it is thought of again */

    struct core_times times;
    uint64_t recoveries, kills, saves_committed, saves_failed, saves_skipped, steps_lost;
    struct core_ring effects;
};

/* What memory and disk hold at the newest consistent step. */
struct leader_pick {
    int found; /* 1: `step` is consistent */
    uint64_t step;
    int from_memory;
    const struct core_checkpoint *checkpoint;                 /* of that step, or NULL; view */
    const struct core_checkpoint *others[WIRE_JOB_ROOTS - 1]; /* the same on other roots; views */
    uint32_t other_count;
    struct wire_copy *copies; /* owned; admissible copies of the step */
    uint32_t copy_count;
    int digest_known;
    struct bl_state_digest digest;
    uint64_t state_elems; /* 0 unknown */
};

/* A set of arenas that hold each element of a step once. */
struct leader_set {
    uint64_t *arenas; /* owned */
    uint32_t arena_count;
    uint32_t *nodes; /* owned; index of the node of each arena */
    struct bl_state_digest digest;
    uint64_t generation, elems;
    uint64_t *twins; /* owned: arenas on other nodes that hold the very same as one of the set */
    uint32_t *twin_nodes; /* owned */
    uint32_t twin_count;
};

static inline int leader_has_rule(const struct core_leader *l, enum wire_rule rule)
{
    return (l->config.rules_off & (uint32_t)rule) == 0;
}

/* leader_nodes.c */
uint64_t leader_random(struct core_leader *l);
struct leader_node *leader_node_find(struct core_leader *l, const char *name);
struct leader_node *leader_node_get(struct core_leader *l, const char *name);
struct leader_proc *leader_proc_find(const struct core_leader *l, uint64_t incarnation);
struct leader_proc *leader_proc_add(struct core_leader *l, uint64_t incarnation, uint32_t node);
void leader_procs_sweep(struct core_leader *l);
struct leader_proc *leader_proc_start(struct core_leader *l, uint32_t node, uint32_t rank);
void leader_proc_kill(struct core_leader *l, struct leader_proc *p, uint32_t stacks);
/* Live processes that the node hosts or was told to host. */
uint32_t leader_node_load(const struct core_leader *l, uint32_t node);
int leader_proc_is_reachable(const struct core_leader *l, const struct leader_proc *p);
const struct wire_arena_info *leader_arena_find(const struct core_leader *l, uint32_t node,
                                                uint64_t arena);
void leader_dirty_all(struct core_leader *l);
void leader_nodes_close(struct core_leader *l);

/* leader.c */
struct core_event *leader_event(struct core_leader *l, enum core_event_code code);
void leader_event_proc(struct core_leader *l, enum core_event_code code,
                       const struct leader_proc *p, const char *text);
/* The record that messages speak of. */
const struct wire_record *leader_said(const struct core_leader *l);
void leader_step(struct core_leader *l);
/* Something new is known: leader_step before the next effect. Many inputs cost one step. */
void leader_stir(struct core_leader *l);

/* leader_store.c: changes of the record. `next` is prepared as a copy of the record; the caller
 * edits it and then sends. */
int leader_change_is_free(const struct core_leader *l);
struct wire_record *leader_change_begin(struct core_leader *l, enum leader_change change);
void leader_change_send(struct core_leader *l);
void leader_change_done(struct core_leader *l);

/* leader_open.c */
void leader_cause(struct core_leader *l, uint64_t detect_ms, const char *fmt, ...) BL_PRINTF(3, 4);
void leader_open_send(struct core_leader *l);
void leader_open_step(struct core_leader *l);
void leader_wait_set(struct core_leader *l, enum core_wait wait, const char *fmt, ...)
    BL_PRINTF(3, 4);

/* A member of the former or present plan died: that is the cause, where peers' errors were it. */
void leader_cause_death(struct core_leader *l, const struct leader_proc *p);

/* leader_fill.c */
/* Starts processes until as many live as are wanted; how many found no room. */
uint32_t leader_fill(struct core_leader *l);
/* Ranks of the job's whole layout, as far as its lanes reach. */
uint32_t leader_wanted(const struct core_leader *l);

/* leader_pick.c */
int leader_copy_is_admissible(const struct wire_record *record, uint64_t generation, uint64_t step);
void leader_pick_newest(const struct core_leader *l, struct leader_pick *ret);
void leader_pick_close(struct leader_pick *pick);
/* 1 and the set of sealed slots of `step` that holds each element once; pinned_only: of pinned
 * ones. */
int leader_set_find(const struct core_leader *l, uint64_t step, int pinned_only,
                    struct leader_set *ret);
void leader_set_close(struct leader_set *set);
/* Elements of the whole state as the members' present arenas hold it; 0 unknown. *ret_named: as
 * they are named, equal lists (ZeRO 0) once; more than the state where others overlap. */
uint64_t leader_members_elems(const struct core_leader *l, uint64_t *ret_named);
/* Key of an extent list. */
uint64_t leader_extents_key(const struct bl_extent_list *list);
/* Of this arena of the node's newest report. */
uint64_t leader_arena_key(const struct core_leader *l, uint32_t node,
                          const struct wire_arena_info *arena);
struct leader_piece { /* extents that somebody holds, and their digest */
    uint64_t key;
    struct bl_state_digest digest;
};
/* Sums digests, equal extents once; sorts the pieces. 0: two with equal extents differ. */
int leader_pieces_sum(struct leader_piece *pieces, uint32_t count, struct bl_state_digest *ret);

/* leader_plan.c */
void leader_plan_send(struct core_leader *l, const struct leader_pick *pick, int fresh);
/* What the job says of layouts. */
struct leader_layout_job leader_job_layout(const struct core_leader *l);
/* Of the plan in the record; dp 0 without one. */
struct leader_layout leader_plan_layout(const struct core_leader *l);
/* Could this process be a member of the next plan? */
int leader_plan_takes(const struct core_leader *l, const struct leader_proc *p);
/* "dp 2 x tp 1 x pp 2". */
void leader_layout_text(char ret[LEADER_LAYOUT_TEXT], const struct leader_layout *layout);
void leader_plan_step(struct core_leader *l);
/* Of the plan in the record. */
int leader_proc_is_member(const struct core_leader *l, const struct leader_proc *p);
/* Tells the processes of the record's plan so. */
void leader_plan_seat(struct core_leader *l);

/* leader_run.c */
void leader_run_begin(struct core_leader *l);
void leader_run_step(struct core_leader *l);
void leader_end_step(struct core_leader *l);
/* Judges deaths, failures and lost nodes of the present plan's members. */
void leader_members_watch(struct core_leader *l);
/* Counts what a process died of; may end the run. */
void leader_death_judge(struct core_leader *l, struct leader_proc *p);
/* Ends the run: DONE in the store. */
void leader_end_send(struct core_leader *l, enum wire_verdict verdict, const char *text);

/* leader_refuse.c */
int leader_proc_is_parked(const struct core_leader *l, const struct leader_proc *p);
/* The node takes no processes until its daemon is another one. `why` is for people. */
void leader_node_refuse(struct core_leader *l, uint32_t node, const char *why);
/* Function id and probe of the run, or of most of those that wait for its first plan. A run that is
 * recovered from a checkpoint alone knows its function id only. */
void leader_identity(const struct core_leader *l, uint64_t *function_id, uint64_t *probe);
/* Refuses parked processes whose function id or probe is another. */
void leader_refuse(struct core_leader *l, uint64_t function_id, uint64_t probe);
/* Ends a run that begins or is resumed when the nodes that are there were refused, all of them. */
void leader_refuse_start(struct core_leader *l);

/* leader_stop.c: in OPEN, when the former generation is over and a stop was asked for. 1: the run
 * ends without another generation; is_stuck: it is not to wait for one. */
int leader_stop_step(struct core_leader *l, int is_stuck);

/* leader_directive.c */
/* Has its daemon reported since it got what is newest for it? */
int leader_node_has_newest(const struct core_leader *l, const struct leader_node *node);
int leader_directive_due(struct core_leader *l, char node[WIRE_NODE_MAX]);
/* Marks nodes whose arenas to drop changed, and processes to forget. */
void leader_drops_step(struct core_leader *l);

/* leader_hang.c */
uint64_t leader_step_deadline(const struct core_leader *l);
void leader_hang_step(struct core_leader *l);
void leader_hang_load(struct core_leader *l);

#endif
