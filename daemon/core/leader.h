/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The leader: decides for the whole run, as a pure machine. No clock, no file, no socket, no
 * thread: inputs go in by core_leader_on_*, effects come out of core_leader_next_effect. One caller
 * at a time (belayd: its loop thread). `now_ms` is CLOCK_BOOTTIME (or virtual) and never goes back.
 *
 *      reports, node up/down, store/scan/commit done, requests, ticks
 *              |
 *              v                        DIRECTIVE(node): build by core_leader_directive, send
 *        +-----------+   effects        STORE: put core_leader_record by compare-and-swap
 *        |  leader   | ------------->   SCAN / COMMIT: by the head's engine
 *        +-----------+                  EVENT: core/event.h;  FINISHED: the verdict
 *
 * The rules (docs/protocol.md) that live here: the store first (6), fencing (7), what is
 * admissible and the choice of s* (words, 8), requests repeated until their effect is seen (9),
 * deadlines (10), nothing trusts a pointer (11): the disk is scanned at the start and whenever
 * memory does not hold the newest state.
 *
 * Out of memory is not survivable for a leader and asserts.
 */
#ifndef CORE_LEADER_H
#define CORE_LEADER_H

#include "daemon/core/event.h"
#include "wire/msg.h"
#include "wire/session.h" /* enum wire_rule, for the simulator */

struct core_deadlines {  /* ms, already scaled */
    uint64_t beat;       /* members repeat reports, the leader unanswered directives */
    uint64_t lease;      /* a node away while no step progresses */
    uint64_t step_floor; /* a step is never called hung before */
    uint64_t step_ceil;  /* nor allowed to take longer; also evaluation and own saves */
    uint64_t init_floor; /* until a started rank has joined */
    uint64_t load;       /* PLANNED to all READY */
    uint64_t save;       /* one save from pin to commit */
    uint64_t join;       /* all wanted ranks present in a new generation, else reshape */
    uint64_t restart;    /* how long recovery waits for an away daemon */
    uint64_t grace;      /* park and leave before a kill */
};

#define CORE_EVERY_AUTO UINT64_MAX

struct core_root {    /* where checkpoints go; earlier ones are nearer and preferred for loading */
    const char *path; /* copied */
    uint64_t every;   /* steps between saves; 0: by request and at the end; CORE_EVERY_AUTO: as
                         measured costs and failures say (core/interval.h) */
    uint32_t apart;   /* each node has this directory for itself */
};

struct core_leader_config {
    uint64_t run;
    const char *name; /* of the job; copied */
    const char *node; /* that this leader runs on; copied; NULL: no root is apart */
    uint64_t head_epoch, incarnation;
    uint64_t seed, secret; /* random: of ids; of generation and file keys */
    uint32_t ranks, lanes, nodes_min;
    uint32_t tp, pp, pp_min; /* of the job's layout: leader_layout.h; 0: 1 */
    uint64_t steps;          /* of the job: at this step it is finished; 0 no end */
    struct core_deadlines deadlines;
    uint32_t root_count;              /* at most WIRE_JOB_ROOTS */
    const struct core_root *roots;    /* copied */
    uint32_t recoveries_per_hour;     /* above: HOLD; 0 no brake */
    const char *job_json;             /* frozen; copied */
    const struct wire_record *record; /* from the store, NULL for none; copied */
    uint64_t record_version;          /* its version in the store; 0 with NULL */
    uint32_t resume;    /* a record that is DONE is opened again (belay run after a stop) */
    uint32_t rules_off; /* enum wire_rule; 0 outside the simulator */
};

struct core_checkpoint { /* found by a scan */
    uint32_t root;
    uint32_t complete; /* committed and its manifest is sound */
    uint64_t step, generation, line;
    uint64_t function_id;
    uint64_t attempt; /* nonce; 0 unknown */
    uint64_t manifest_digest;
    uint32_t digest_known;
    struct bl_state_digest digest; /* of the state */
    uint64_t state_elems;          /* elements of all tensors; 0 unknown */
    uint32_t verified;             /* marked so */
    uint32_t prepared;             /* not complete: an attempt that every node has prepared */
    char dir[WIRE_DIR_MAX];
};

enum core_leader_effect_kind {
    CORE_LEADER_NONE = 0,
    CORE_LEADER_DIRECTIVE, /* core_leader_directive(node) and send it */
    CORE_LEADER_STORE,     /* core_leader_record(): put it if the store's version is `expected`;
                              answer on_store_done. One at a time. */
    CORE_LEADER_SCAN,      /* list checkpoints of all roots that are not apart; on_scan_done */
    CORE_LEADER_COMMIT,    /* core_leader_commit(attempt): manifest and rename; on_commit_done. Of
                              a save that is apart the manifest only, here */
    CORE_LEADER_RETAIN,    /* a commit stands: old checkpoints may go by the root's rules */
    CORE_LEADER_EVENT,     /* `event` */
    CORE_LEADER_FINISHED,  /* DONE is stored and all processes are gone or late: `verdict` */
    CORE_LEADER_DEPOSED    /* somebody else leads: free this leader, be a member only */
};

struct core_leader_effect {
    enum core_leader_effect_kind kind;
    char node[WIRE_NODE_MAX]; /* DIRECTIVE */
    uint64_t op, expected;    /* STORE */
    uint64_t attempt;         /* COMMIT */
    enum wire_verdict verdict;
    struct core_event event;
};

struct core_commit_part {
    char node[WIRE_NODE_MAX];
    char bulk_addr[WIRE_ADDR_MAX]; /* where its files are read */
    const char *part_json;         /* view, until the next call into the leader */
};

struct core_commit { /* what COMMIT writes */
    uint64_t attempt, step, generation, line;
    uint32_t root;
    const char *root_path, *dir; /* views */
    struct bl_state_digest digest;
    uint64_t state_elems, function_id;
    uint32_t world;      /* ranks at the step */
    uint32_t dp, tp, pp; /* their layout */
    uint32_t apart;      /* parts lie on their nodes */
    uint32_t part_count;
    struct core_commit_part *parts; /* owned by the caller after the call: free() */
    uint32_t line_end_count;
    const struct wire_line_end *line_ends; /* of the run: view */
};

enum core_request {
    CORE_REQUEST_SAVE = 1,
    CORE_REQUEST_STOP = 2,    /* stop after a step, save, end resumable */
    CORE_REQUEST_ABANDON = 3, /* go on without proof that the former generation is over */
    CORE_REQUEST_RESUME = 4   /* release HOLD */
};

struct core_leader; /* opaque */

/* Owned by the caller; NULL when out of memory. Everything in `config` is copied. */
struct core_leader *core_leader_new(const struct core_leader_config *config, uint64_t now_ms);
void core_leader_free(struct core_leader *leader);

/* Inputs. Reports of older sequence or of a former incarnation of the node are dropped. The report
 * is borrowed. */
void core_leader_on_report(struct core_leader *leader, const struct wire_report *report,
                           uint64_t now_ms);
/* The node's connection stands / is gone. A report counts as up. */
void core_leader_on_node_up(struct core_leader *leader, const char *node, uint64_t now_ms);
void core_leader_on_node_down(struct core_leader *leader, const char *node, uint64_t now_ms);
/* The put of `op`: 0 stored, durable; BL_ECONFLICT: another version stands (the leader deposes
 * itself); other errors: not stored, it will try again. `version` of the stored value. */
void core_leader_on_store_done(struct core_leader *leader, uint64_t op, int rc, uint64_t version,
                               uint64_t now_ms);
/* rc < 0: the roots of `failed` (bits; 0: all) could not be looked at; what the others have is in
 * `found` all the same. */
void core_leader_on_scan_done(struct core_leader *leader, int rc, uint32_t failed,
                              const struct core_checkpoint *found, uint32_t count, uint64_t now_ms);
/* A checkpoint was read back whole: rc 0; BL_EDIGEST or BL_EFORMAT: it is damaged and is not loaded
 * any more; others: it could not be looked at. */
void core_leader_on_verified(struct core_leader *leader, uint32_t root, uint64_t step,
                             const char *dir, int rc, const char *text, uint64_t elapsed_ms,
                             uint64_t now_ms);
/* The head's engine for this root does not answer any more, or does again. While it is stuck no
 * save goes there and nobody waits for it. */
void core_leader_on_root(struct core_leader *leader, uint32_t root, int is_stuck, const char *text,
                         uint64_t now_ms);
void core_leader_on_commit_done(struct core_leader *leader, uint64_t attempt, int rc,
                                const char *text, uint64_t manifest_digest, uint64_t now_ms);
/* Repeating a request is harmless. -EALREADY when the run is over. */
BL_MUST_CHECK int core_leader_on_request(struct core_leader *leader, enum core_request request,
                                         uint64_t now_ms);
/* Fires what is due; returns when it wants to be called again (ms, absolute). Call it after any
 * batch of inputs too. */
uint64_t core_leader_on_tick(struct core_leader *leader, uint64_t now_ms);

/* 1 and the next effect, or 0. */
int core_leader_next_effect(struct core_leader *leader, struct core_leader_effect *ret);

/* Builds what an effect names. `ret` is owned by the caller (wire_*_close). */
void core_leader_directive(struct core_leader *leader, const char *node,
                           struct wire_directive *ret);
/* The value to be stored: view, until the next call into the leader. */
const struct wire_record *core_leader_record(const struct core_leader *leader);
/* -ENOENT when the attempt is no longer wanted. */
BL_MUST_CHECK int core_leader_commit(const struct core_leader *leader, uint64_t attempt,
                                     struct core_commit *ret);

/* ---- status ---- */

enum core_wait { /* what the run waits for */
                 CORE_WAIT_NOTHING = 0,
                 CORE_WAIT_STORE, /* a compare-and-swap under way or failing */
                 CORE_WAIT_NODES, /* fewer daemons than nodes_min, or no room for one rank */
                 CORE_WAIT_PARK,  /* ranks of the old generation to park or be gone */
                 CORE_WAIT_JOIN,  /* started ranks to join */
                 CORE_WAIT_FENCE, /* proof that the former generation is over (recover --abandon) */
                 CORE_WAIT_STATE, /* a node that alone holds the newest state, or any at all */
                 CORE_WAIT_SCAN,  /* the scan of the roots */
                 CORE_WAIT_LOAD,  /* members to load and connect */
                 CORE_WAIT_SAVE,  /* the last save to be committed */
                 CORE_WAIT_LEAVE, /* processes to leave */
                 CORE_WAIT_HOLD,  /* a person: too many recoveries in an hour */
                 CORE_WAIT_RETRY  /* a pause: generations fail again and again before they run */
};

struct core_times {     /* one recovery, in ms since the cause was seen (cause itself: 0) */
    uint64_t cause_ms;  /* absolute: when the leader heard of it */
    uint64_t detect_ms; /* age of the cause when it was heard (hang: time without progress) */
    uint64_t open_ms, parked_ms, planned_ms, ready_ms, running_ms, step_ms; /* 0 not yet */
    uint64_t steps_lost;
    uint64_t generation;
    char cause[WIRE_TEXT_MAX];
};

struct core_status_proc {
    uint64_t incarnation;
    uint32_t rank;   /* in the present plan; UINT32_MAX none */
    uint32_t member; /* of the present plan */
    uint32_t pid;
    enum wire_rank_state state;
    struct wire_beat beat;
    uint64_t applied_step;
};

struct core_status_node {
    char node[WIRE_NODE_MAX];
    uint64_t incarnation;
    uint32_t connected, lost;
    uint64_t away_ms;                           /* since when, 0 connected */
    uint32_t refused;                           /* takes no ranks */
    char refused_text[WIRE_TEXT_MAX];           /* why */
    uint32_t ranks_max, proc_count, proc_first; /* in procs[] */
};

enum core_save_state {                       /* of a save under way */
                       CORE_SAVE_STAGED = 0, /* its slots are pinned, parts are being written */
                       CORE_SAVE_WRITTEN = 1 /* all parts are durable, the commit is under way */
};

struct core_status_save {
    uint64_t attempt, step, age_ms;
    uint32_t root;
    enum core_save_state state;
    uint32_t nodes, written; /* parts wanted and durable */
};

struct core_status_root {
    char path[WIRE_ROOT_MAX];
    uint64_t every; /* steps between saves in force; 0: by request and at the end */
    uint32_t is_auto, stuck;
    uint64_t committed_step;             /* UINT64_MAX none */
    char dir[WIRE_DIR_MAX];              /* of it */
    uint32_t replicated;                 /* another root has the same step */
    uint64_t verified_step;              /* newest that was read back; UINT64_MAX none */
    uint64_t verify_failed_step;         /* newest damaged or unreadable; UINT64_MAX none */
    uint64_t committed, failed, skipped; /* saves, since this leader began */
    uint32_t failing;                    /* saves in a row that failed */
    uint64_t last_ms, last_bytes, last_raw_bytes; /* of the newest commit; 0 none yet */
    uint64_t stall_ms;  /* training time that one save costs, as measured */
    uint32_t inflation; /* step time while saves are written / without, in 1/1000; 0 unknown */
};

struct core_status {
    enum wire_phase phase;
    enum wire_verdict verdict;
    uint64_t generation, line;
    uint32_t world, ranks, lanes;
    uint32_t dp, tp, pp;           /* of `world` ranks; 0 without a plan */
    uint32_t dp_wanted, pp_wanted; /* what the run grows back to */
    uint64_t step;                 /* newest that every member has sealed */
    uint64_t memory_step;          /* newest consistent in memory; UINT64_MAX none */
    uint64_t disk_step;            /* newest committed; UINT64_MAX none */
    char disk_dir[WIRE_DIR_MAX];
    enum core_wait wait;
    char wait_text[WIRE_TEXT_MAX]; /* for people: names what is waited for */
    uint32_t stop_asked, save_asked;
    char save_failed_text[WIRE_TEXT_MAX]; /* why the newest save that failed did */
    uint64_t step_deadline_ms;            /* learned */
    uint64_t since_progress_ms;           /* since a step was last finished */
    struct core_times last;               /* newest recovery */
    uint64_t recoveries, kills, saves_committed, saves_failed, saves_skipped, steps_lost;
    uint32_t digest_known; /* of `digest_step` over all members */
    uint64_t digest_step;
    struct bl_state_digest digest;
    uint32_t save_count;
    struct core_status_save saves[WIRE_SAVES_MAX];
    uint32_t root_count;
    struct core_status_root roots[WIRE_JOB_ROOTS];
    uint32_t node_count, proc_count;
    struct core_status_node *nodes; /* owned */
    struct core_status_proc *procs; /* owned */
    char text[WIRE_TEXT_MAX];       /* first cause, with NO_PROGRESS and REFUSED */
};

/* A copy of how the run stands, for people; close it with core_status_close. Loop thread only. */
void core_leader_status(const struct core_leader *leader, struct core_status *ret, uint64_t now_ms);
void core_status_close(struct core_status *status);

#endif
