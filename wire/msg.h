/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Messages as plain structs. The pure machines (daemon/core, wire/session) speak only these;
 * codec.c turns them into protobuf (belay.proto) and back.
 *
 * The protocol is level-triggered: a message carries the sender's whole present view of what
 * concerns the receiver, not a change. Lost, repeated, delayed and reordered messages are therefore
 * harmless: `sequence` grows by one per message of a sender's incarnation, a receiver drops what is
 * older than what it has, and everybody repeats its view on a timer and whenever it changes.
 *
 *      leader --directive--> member --rank_directive--> rank (session)
 *      leader <---report---- member <---rank_report---- rank
 *                                     rank <---vote---> rank
 */
#ifndef WIRE_MSG_H
#define WIRE_MSG_H

#include <stddef.h>
#include <stdint.h>

#include "base/digest.h"
#include "base/error.h"
#include "base/extent.h"

#define WIRE_NODE_MAX     64    /* bytes of a node's name, with the NUL */
#define WIRE_ENDPOINT_MAX 256   /* of a trainer's endpoint string */
#define WIRE_ADDR_MAX     64    /* of "address:port" */
#define WIRE_TEXT_MAX     256   /* of an error text */
#define WIRE_DIR_MAX      128   /* of a checkpoint directory's name */
#define WIRE_ROOT_MAX     1024  /* of a root's path */
#define WIRE_RANKS_MAX    16384 /* of a job */
#define WIRE_SLOTS_MAX    8     /* of an arena */
#define WIRE_SAVES_MAX    8     /* attempts that a message names */
#define WIRE_JOB_ROOTS    4     /* roots of a job */
#define WIRE_HOLDINGS_MAX 8192  /* of a node, over its own roots */
#define WIRE_HOLDERS_MAX  4096  /* nodes that a checkpoint lies on */

/* Former incarnations of a partner, newest first: what they said is dropped, however late. */
#define WIRE_FORMER_MAX 8
struct wire_former {
    uint64_t incarnations[WIRE_FORMER_MAX];
};
void wire_former_add(struct wire_former *former, uint64_t incarnation);
int wire_former_has(const struct wire_former *former, uint64_t incarnation);

/* Where a generation stands. OPEN, PLANNED and RUNNING are compare-and-swaps in the store before
 * any message carries them. */
enum wire_phase {
    WIRE_PHASE_NONE = 0,    /* no generation yet */
    WIRE_PHASE_OPEN = 1,    /* the former generation is being ended: park, report */
    WIRE_PHASE_PLANNED = 2, /* members, step and sources are fixed: load, report ready */
    WIRE_PHASE_RUNNING = 3, /* go */
    WIRE_PHASE_DONE = 4     /* the run ended (finished, stopped or given up): leave */
};

/* How a run ended. */
enum wire_verdict {
    WIRE_VERDICT_NONE = 0,
    WIRE_VERDICT_FINISHED = 1,    /* last step done, last save committed */
    WIRE_VERDICT_STOPPED = 2,     /* by request; resumable */
    WIRE_VERDICT_SAVE_FAILED = 3, /* last step done or stopped, but the last save failed */
    WIRE_VERDICT_NO_PROGRESS = 4, /* the same crash at the same step three times */
    WIRE_VERDICT_REFUSED = 5      /* could not start: text says why */
};

struct wire_member { /* one rank of a plan; its index in the plan is its rank */
    uint64_t incarnation;
    char node[WIRE_NODE_MAX];
    char endpoint[WIRE_ENDPOINT_MAX]; /* of the trainer's communicator */
    char vote_addr[WIRE_ADDR_MAX];    /* where its session listens for votes */
};

struct wire_copy { /* a sealed slot with (line, step) of the plan, a source for loading */
    uint64_t arena;
    uint32_t slot;
    char node[WIRE_NODE_MAX];      /* whose memory holds it */
    char bulk_addr[WIRE_ADDR_MAX]; /* of that node's bulk port */
};

struct wire_place { /* a checkpoint below a root */
    char root[WIRE_ROOT_MAX];
    char dir[WIRE_DIR_MAX];
};

struct wire_holder { /* a node with parts of checkpoints in its own directory */
    char node[WIRE_NODE_MAX];
    char bulk_addr[WIRE_ADDR_MAX]; /* where other nodes read them */
};

struct wire_plan {
    uint64_t generation;
    uint64_t line;
    uint64_t step;  /* s*: continue at step + 1 */
    uint32_t fresh; /* nothing exists yet: step 0 is initialised by the trainer */
    uint32_t world;
    struct wire_member *members; /* owned; world entries */
    uint32_t copy_count;
    struct wire_copy *copies;      /* owned; nearest-first choice is the loader's */
    char disk_root[WIRE_ROOT_MAX]; /* a committed checkpoint of s*, or "" */
    char disk_dir[WIRE_DIR_MAX];
    uint32_t digest_known;
    struct bl_state_digest digest; /* of the whole state at s*, where known */
    uint64_t comm_key[2];
    uint64_t
        save_every; /* steps, of root 0; 0 none. A directive's `every` counts where it is given */
    uint32_t slots; /* of an arena: two that rotate and one for each root; 0: as the rank likes */
    uint32_t place_count;
    struct wire_place
        places[WIRE_JOB_ROOTS - 1]; /* further checkpoints of s* with the same state */
    uint32_t holder_count;
    struct wire_holder *holders; /* owned; who has parts of these checkpoints for itself */
    uint32_t tp, pp; /* ranks are (d * pp + p) * tp + t; world is a multiple of pp * tp. 0 in what
                        was stored before there were layouts: 1 */
};

void wire_plan_close(struct wire_plan *plan); /* frees the arrays; NULL is fine */
BL_MUST_CHECK int wire_plan_copy(struct wire_plan *ret, const struct wire_plan *from);

/* ---- what a slot says of itself (read from its header, see slot.h) ---- */

enum wire_slot_state { WIRE_SLOT_FREE = 0, WIRE_SLOT_WRITING = 1, WIRE_SLOT_SEALED = 2 };

struct wire_slot_info {
    enum wire_slot_state state;
    uint32_t pinned; /* held for a save of its step */
    uint64_t generation, line, step;
    struct bl_state_digest digest; /* of this slot's extents */
};

struct wire_arena_info {  /* one memfd with slots, of a live or dead rank */
    uint64_t arena;       /* random id */
    uint64_t incarnation; /* of the rank that writes or wrote it */
    uint32_t slot_count;
    struct wire_slot_info slots[WIRE_SLOTS_MAX];
    struct bl_extent_list extents; /* owned; same for every slot; offsets from the slot's start */
};

/* ---- rank <-> its daemon ---- */

enum wire_rank_state {
    WIRE_RANK_STARTING = 0, /* process made, not yet heard of */
    WIRE_RANK_JOINED = 1,   /* in no generation; waits for a plan */
    WIRE_RANK_PARKED = 2,  /* left `generation - 1` or older for `generation`; inventory is valid */
    WIRE_RANK_LOADING = 3, /* has the plan of `generation` */
    WIRE_RANK_READY = 4,   /* loaded, communicators stand */
    WIRE_RANK_RUNNING = 5, /* had go */
    WIRE_RANK_LEAVING = 6, /* wants to leave; slots sealed */
    WIRE_RANK_EXITED = 7   /* said by the daemon, never by the rank */
};

struct wire_rank_report { /* rank -> daemon */
    uint64_t run, incarnation, sequence;
    enum wire_rank_state state;
    uint64_t generation;   /* the newest one that it acknowledges */
    uint64_t applied_step; /* newest step applied and sealed in its own extents */
    uint64_t voted_step;   /* newest step whose vote came back unanimous */
    uint64_t arena;        /* its present arena, 0 none */
    uint64_t function_id, probe;
    char endpoint[WIRE_ENDPOINT_MAX];
    char vote_addr[WIRE_ADDR_MAX];
    uint64_t
        failed_generation; /* loading, connecting or communicating failed in this one (0 none) */
    int32_t failed_code;   /* a bl_error */
    char failed_text[WIRE_TEXT_MAX];
    struct bl_state_digest ready_digest; /* of its extents at s*, when READY */
    uint64_t request_done;               /* newest request id whose flags came back in a vote */
    uint64_t skipped_save; /* newest step whose save was skipped because no slot could be pinned */
    uint32_t stop_flags; /* BELAY_VOTE_STOP / FINAL / GROW that came back at applied_step, else 0 */
    int32_t leave_code;  /* when LEAVING */
    uint64_t directive_node, directive_sequence; /* of the newest directive accepted; 0 none */
};

struct wire_rank_directive { /* daemon -> rank */
    uint64_t run, incarnation, sequence;
    uint64_t node_incarnation; /* of the daemon that numbers these */
    uint64_t generation;
    enum wire_phase phase;
    uint32_t
        has_plan; /* PLANNED and RUNNING, when this process is a member; else it waits as a spare */
    uint32_t rank;
    struct wire_plan plan;  /* owned */
    uint64_t request_id;    /* flags wanted in the next vote; given to rank 0 only */
    uint32_t request_flags; /* BELAY_VOTE_SAVE, STOP, GROW */
    uint64_t unpin_through; /* saves of steps up to this one are over: their pins go (0 none) */
    uint32_t leave;         /* belay_leave may return */
    uint32_t refused;       /* never to be a member: text says why */
    char text[WIRE_TEXT_MAX];
    uint64_t saves_through; /* which saves there are of steps up to this one is decided: */
    uint64_t saves_kept[WIRE_SAVES_MAX]; /* pins of these stay, of all others go; 0 none */
    uint64_t every[WIRE_JOB_ROOTS]; /* steps between saves, of each root; all 0: as the plan says */
};

void wire_rank_directive_close(struct wire_rank_directive *directive);

/* ---- rank <-> rank ---- */

struct wire_vote {
    uint64_t run, generation, line, step;
    uint32_t from;      /* rank */
    uint32_t flags;     /* OR over the sender's subtree (up) or over all ranks (down) */
    uint32_t is_result; /* down: every rank has voted */
};

/* ---- member daemon <-> leader ---- */

struct wire_beat {    /* what the daemon reads in a rank's page */
    uint32_t section; /* enum belay_section */
    uint32_t waiting; /* inside a collective, waiting for others */
    uint64_t step;
    uint64_t collective;      /* sequence number of the newest collective entered */
    uint64_t progress_age_ms; /* since section, step or collective last changed */
    uint64_t alive_age_ms;    /* since its control thread last showed life */
};

struct wire_exit {
    int32_t code;   /* exit status, or -1 when killed by a signal or unknown */
    int32_t signal; /* 0 none */
    uint32_t core;  /* dumped core */
    uint32_t by_us; /* the daemon killed it on the leader's word */
};

struct wire_proc_report {         /* one process of a node */
    struct wire_rank_report rank; /* the newest it sent; state as the daemon knows it */
    uint32_t pid;
    struct wire_beat beat;
    struct wire_exit exit; /* when EXITED */
    uint64_t started_ms;   /* age of the process */
};

enum wire_save_state {
    WIRE_SAVE_NONE = 0,
    WIRE_SAVE_WRITE = 1,     /* leader: write your part; member: is writing */
    WIRE_SAVE_WRITTEN = 2,   /* member: part durable, `part_json` describes it */
    WIRE_SAVE_FAILED = 3,    /* member: failed, text says why */
    WIRE_SAVE_COMMITTED = 4, /* leader */
    WIRE_SAVE_CANCELLED = 5, /* leader: given up; remove leftovers */
    /* Of roots that each node has for itself (`apart`): */
    WIRE_SAVE_PREPARE = 6,   /* leader: take the manifest; member: is taking it */
    WIRE_SAVE_PREPARED = 7,  /* member: parts and manifest are durable, the name is not final */
    WIRE_SAVE_PUBLISHED = 8, /* member: has the final name; is reading it back */
    WIRE_SAVE_VERIFIED = 9,  /* member: what it has was read back; leader: so it was everywhere */
    WIRE_SAVE_DAMAGED = 10   /* member: reading back found damage, text says which */
};

struct wire_line_end { /* plan `generation` resumed at `step`: older generations' later copies are
                          void */
    uint64_t generation, step;
};

struct wire_save {    /* one attempt */
    uint64_t attempt; /* random id; also the nonce of its directory */
    uint64_t step, generation, line;
    uint32_t root; /* index in the job's roots */
    enum wire_save_state state;
    char dir[WIRE_DIR_MAX]; /* of the attempt, below the root */
    char *part_json;        /* owned, may be NULL; opaque to the machines */
    char text[WIRE_TEXT_MAX];
    uint32_t arena_count;
    uint64_t *arenas;    /* owned; WRITE: whose slots of `step` are the parts, over all nodes */
    uint64_t bytes;      /* WRITTEN: that this part takes on disk */
    uint64_t elapsed_ms; /* WRITTEN: that the engine took */
    uint32_t apart; /* each node has its own directory: PREPARE comes before COMMITTED, which the
                       nodes carry out themselves */
    uint64_t manifest_digest;   /* of PREPARE and what follows */
    char source[WIRE_ADDR_MAX]; /* PREPARE: bulk port of the node that has the manifest */
    uint32_t line_end_count;
    struct wire_line_end *line_ends; /* owned; VERIFIED: of the run, for retention */
    struct bl_extent_list pick; /* owned; WRITE: what this node writes of its arenas, where others
                                   hold the same; empty: all of it */
};

/* One part of a checkpoint, or of a prepared attempt, in a node's own root; its file and index are
 * there, its bytes were not looked at. A directory with a manifest and no part is a holding too. */
struct wire_holding {
    uint32_t root;    /* index in the job's roots */
    uint64_t attempt; /* nonce of an attempt; 0: the name is final */
    uint64_t step, generation, line, function_id;
    struct bl_state_digest digest;
    uint64_t manifest_digest;
    uint32_t part, part_count; /* in the manifest; part UINT32_MAX: only the manifest */
    uint32_t verified;         /* marked: it was read back on all nodes */
    char dir[WIRE_DIR_MAX];
    char node[WIRE_NODE_MAX]; /* that wrote the part; of the next one that is missing when there is
                                 none here */
};

struct wire_report { /* member -> leader */
    char node[WIRE_NODE_MAX];
    uint64_t node_incarnation, run, sequence;
    uint64_t generation; /* newest directive seen */
    enum wire_phase phase;
    uint64_t leader_incarnation, directive_sequence; /* of the newest directive accepted; 0 none */
    char bulk_addr[WIRE_ADDR_MAX];
    uint32_t ranks_max; /* processes that it will host */
    uint32_t proc_count;
    struct wire_proc_report *procs; /* owned */
    uint32_t arena_count;
    struct wire_arena_info *arenas; /* owned; all arenas held, of live and dead ranks; extents are
                                       left out (count 0) once the leader has them */
    uint32_t save_count;
    struct wire_save saves[WIRE_SAVES_MAX];
    uint64_t scan_id;     /* of the newest scan that was asked for and is done; 0 none */
    uint32_t scan_failed; /* bits: own roots that could not be looked at */
    uint32_t scan_told;   /* holdings are of this scan; else the leader has them */
    uint32_t holding_count;
    struct wire_holding *holdings; /* owned */
};

void wire_save_close(struct wire_save *save); /* frees what it owns */
BL_MUST_CHECK int wire_save_copy(struct wire_save *ret, const struct wire_save *from);

void wire_report_close(struct wire_report *report);
BL_MUST_CHECK int wire_report_copy(struct wire_report *ret, const struct wire_report *from);

struct wire_proc_order { /* what the leader wants of one process */
    uint64_t incarnation;
    uint32_t rank;   /* hint for names of logs; the plan's rank is what counts */
    uint32_t kill;   /* else: run it (start it unless it ran before) */
    uint32_t stacks; /* take its stacks before the kill */
    uint32_t forget; /* exited and accounted for: release shim, forget */
};

struct wire_directive { /* leader -> member */
    uint64_t run, head_epoch, leader_incarnation, sequence;
    uint64_t generation;
    enum wire_phase phase;
    enum wire_verdict verdict; /* with DONE */
    struct wire_plan plan;     /* owned; PLANNED and RUNNING */
    uint32_t order_count;
    struct wire_proc_order *orders; /* owned; of this node's processes */
    uint64_t node_incarnation; /* of the daemon whose reports these orders answer; 0 none yet. A
                                  daemon of another incarnation ignores orders and drops */
    uint64_t report_sequence;  /* newest report of that incarnation that the leader has */
    uint32_t drop_count;
    uint64_t *drop_arenas; /* owned; arenas that are no longer needed: named one by one, so that
                              what the leader has not heard of is never dropped */
    uint64_t request_id;
    uint32_t request_flags;
    uint64_t unpin_through;
    uint32_t leave; /* ranks may leave */
    uint32_t save_count;
    struct wire_save saves[WIRE_SAVES_MAX];
    uint32_t refused_count;
    uint64_t *refused; /* owned; incarnations that may never be members (numeric probe) */
    char text[WIRE_TEXT_MAX];
    char *job_json; /* owned; the frozen job */
    uint64_t saves_through, saves_kept[WIRE_SAVES_MAX], every[WIRE_JOB_ROOTS]; /* for the ranks */
    uint64_t scan_id;     /* look at the roots that this node has for itself; 0: no need */
    uint64_t file_key[2]; /* who shows it may read the parts of this run on any node */
};

void wire_directive_close(struct wire_directive *directive);
BL_MUST_CHECK int wire_directive_copy(struct wire_directive *ret,
                                      const struct wire_directive *from);

/* ---- the store's record of a run: one value, changed only by compare-and-swap ---- */

struct wire_record_root {                         /* one root of the job; found again by its path */
    uint64_t path;                                /* XXH3 of it */
    uint64_t committing_attempt, committing_step; /* a commit under way; 0 none */
    uint64_t committed_step;                      /* its newest checkpoint; UINT64_MAX none */
    uint64_t committed_generation, committed_digest;
    char committed_dir[WIRE_DIR_MAX];
    uint64_t every; /* steps between saves where the leader chooses them; 0 not yet */
};

struct wire_record {
    uint64_t run;
    char name[64];
    uint64_t head_epoch, leader_incarnation;
    uint64_t generation;
    enum wire_phase phase;
    enum wire_verdict verdict;
    uint64_t line;
    struct wire_plan plan; /* owned; of PLANNED and RUNNING */
    uint32_t line_end_count;
    struct wire_line_end *line_ends; /* owned; oldest first, steps strictly increasing */
    uint64_t function_id, probe;     /* of the first generation; 0 not yet known */
    uint64_t state_elems;            /* elements of the whole state, all tensors; 0 not yet known */
    /* Over all roots; a record of before there were several has only these, and they are root 0's.
     */
    uint64_t committing_attempt, committing_step; /* a commit under way */
    uint64_t committed_step;                      /* newest committed checkpoint; UINT64_MAX none */
    uint64_t committed_generation;
    uint64_t committed_digest; /* of its manifest */
    char committed_dir[WIRE_DIR_MAX];
    char cause[WIRE_TEXT_MAX]; /* why the generation was opened, or the run ended */
    char *job_json;            /* owned */
    uint64_t end_step;         /* with DONE: the step that the run ended at */
    uint32_t end_digest_known;
    struct bl_state_digest end_digest; /* of the whole state at end_step */
    uint32_t root_count;
    struct wire_record_root roots[WIRE_JOB_ROOTS];
};

void wire_record_close(struct wire_record *record);
BL_MUST_CHECK int wire_record_copy(struct wire_record *ret, const struct wire_record *from);

#endif
