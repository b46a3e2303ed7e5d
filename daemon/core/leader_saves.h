/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the leader: roots and the saves that go to them. */
#ifndef CORE_LEADER_SAVES_H
#define CORE_LEADER_SAVES_H

#include "daemon/core/leader.h"
#include "daemon/core/leader_layout.h"

#define LEADER_SAVE_TRIES 3 /* of a run's last save, on each root */

struct leader_part {
    uint32_t node;
    uint32_t first, arena_count; /* of the save's arenas, those on this node */
    uint32_t bare;               /* apart: the head's, which gets the manifest and writes nothing */
    uint32_t written, prepared, published, verified;
    uint64_t bytes;  /* on disk */
    char *part_json; /* owned */
    struct bl_extent_list
        pick; /* owned; of what others hold too, what this node writes; empty: all */
};

struct leader_save {
    struct wire_save save; /* as told to members; owned arenas */
    uint64_t started_ms;
    struct bl_state_digest digest;
    uint32_t world;
    struct leader_layout layout; /* of them */
    uint64_t raw_bytes;          /* of the state */
    struct leader_part *parts;   /* owned; by node */
    uint32_t part_count;
    enum {
        LEADER_SAVE_WRITING,
        LEADER_SAVE_STORING,    /* COMMITTING on its way to the store */
        LEADER_SAVE_COMMITTING, /* the engine writes the manifest */
        LEADER_SAVE_PREPARING,  /* apart: the nodes take the manifest */
        LEADER_SAVE_RECORDING,  /* COMMITTED on its way to the store */
        LEADER_SAVE_ENDED       /* told to the nodes until none names it */
    } stage;
    uint64_t manifest_digest;
    uint32_t is_found; /* apart: committed earlier, only to be given its name */
};

struct leader_root {     /* of the job; its index is the record's too */
    char *path;          /* owned */
    uint64_t every;      /* as the job says */
    uint32_t apart;      /* each node has it for itself */
    uint64_t cancelled;  /* attempt of the newest save there that failed: nodes drop it */
    uint64_t doubted;    /* attempt whose commit had no answer, and counts as failed; 0 none */
    uint32_t incomplete; /* apart: the newest committed one was not whole at the newest scan */
    char lacks[WIRE_TEXT_MAX]; /* what it lacks */
    uint64_t interval;         /* steps between saves in force; 0: on request and at the end */
    uint32_t stuck;            /* the head's engine for it does not answer */
    uint32_t scan_failed;      /* the newest scan could not look at it */
    uint32_t tries;            /* of the run's last save that failed */
    uint64_t committed, failed, skipped;
    uint32_t failing;                             /* saves in a row that failed */
    uint64_t last_ms, last_bytes, last_raw_bytes; /* of the newest commit */
    uint64_t verified_step;                       /* newest; UINT64_MAX none */
    uint64_t verify_failed_step;                  /* newest; UINT64_MAX none */
    uint64_t save_ms;                             /* learned: how long a save takes */
    uint64_t steps_saving, ms_saving;             /* seen while a save to it was written */
};

struct core_leader;
struct leader_pick;
struct leader_set;
enum leader_change;

/* leader_save.c, leader_save_parts.c */
void leader_saves_step(struct core_leader *l);
void leader_saves_report(struct core_leader *l, uint32_t node);
/* A plan resumed at `step`: saves of later steps are void. */
void leader_saves_void(struct core_leader *l, uint64_t step);
/* The save of root `root` that is under way, or NULL. */
struct leader_save *leader_save_of(struct core_leader *l, uint32_t root);
/* The node's part of it, or NULL. */
struct leader_part *leader_part_find(const struct leader_save *s, uint32_t node);
/* Is a save of any root, or of this one, under way? */
int leader_saves_any(const struct core_leader *l);
int leader_save_holds(const struct core_leader *l, uint64_t arena);
void leader_saves_stored(struct core_leader *l, enum leader_change change);
/* The change was not stored. */
void leader_saves_unstored(struct core_leader *l, enum leader_change change);
/* Step of a commit that nothing can stop any more, or 0: a plan below it waits for it. */
uint64_t leader_saves_committing(const struct core_leader *l);
void leader_saves_close(struct core_leader *l);
/* It ends without a checkpoint; `text` says why. */
void leader_save_fail(struct core_leader *l, struct leader_save *s, const char *text);
/* Its nodes are not told of it any more. */
void leader_save_forget(struct core_leader *l, struct leader_save *s);
void leader_save_dirty(struct core_leader *l, const struct leader_save *s);

/* leader_save_start.c: which steps are saved, and where to. */
void leader_saves_start(struct core_leader *l);
/* Steps up to this one are decided: pins of those without a save go. */
void leader_saves_decide(struct core_leader *l, uint64_t step);
/* What members and ranks are told of pins. */
void leader_saves_tell(const struct core_leader *l, struct wire_directive *ret);
/* Members said that a save was skipped because no slot was free. */
void leader_saves_skipped(struct core_leader *l);

/* How the last save of a run stands, over all roots. */
enum leader_last {
    LEADER_LAST_WAITS,  /* a root is still at it, or to be tried */
    LEADER_LAST_DONE,   /* on one root at least, and the others are over */
    LEADER_LAST_FAILED, /* on none */
};
enum leader_last leader_saves_last(const struct core_leader *l);
/* A root that does not have the run's last step, or -1. */
int leader_last_lacks(const struct core_leader *l);
/* The run has ended: its last save begins, with no try behind it. */
void leader_last_begin(struct core_leader *l);

/* leader_root.c */
void leader_roots_init(struct core_leader *l, const struct core_leader_config *config);
void leader_roots_close(struct core_leader *l);
/* The step after the newest one that is committed there and stands; 0: none. */
uint64_t leader_root_next(const struct core_leader *l, uint32_t root);
/* The record's newest commit over all roots, after a change to one of them. */
void leader_record_newest(struct wire_record *record);
/* Commits that an earlier leader, or a save given up, left in the record: the disk knows. */
void leader_roots_settle(struct core_leader *l);
/* Has the scan found all that may be newer than this pick? If not: the root that is waited for,
 * else -1. */
int leader_scan_lacks(const struct core_leader *l, const struct leader_pick *pick);
/* Says that this root is waited for, and has it looked at again. */
void leader_scan_wait(struct core_leader *l, uint32_t root);
/* Could a root not be looked at, or was its newest not whole? */
int leader_roots_unscanned(const struct core_leader *l);
/* Does some root answer? */
int leader_roots_answer(const struct core_leader *l);
/* Adds a checkpoint that stands, unless it is there. */
void leader_checkpoint_add(struct core_leader *l, const struct core_checkpoint *c);
/* Asks for a scan, or for another one when a root failed. */
void leader_scan_want(struct core_leader *l);
/* A checkpoint that is never loaded again. */
void leader_bad_add(struct core_leader *l, const char *root, const char *dir);
int leader_is_bad(const struct core_leader *l, uint32_t root, const char *dir);
/* Finishes a scan when all that it waits for has come. */
void leader_scan_finish(struct core_leader *l);
void leader_roots_status(const struct core_leader *l, struct core_status *ret, uint64_t now_ms);

/* leader_apart.c: roots that each node has for itself */
/* The head's own node, or NULL before it was heard of. */
struct leader_node *leader_head_node(struct core_leader *l);
int leader_has_apart(const struct core_leader *l);
/* A scan begins: nodes are asked what they have. */
void leader_apart_scan(struct core_leader *l);
/* Takes what a report says of the scan. The report's list moves. */
void leader_apart_report(struct core_leader *l, uint32_t node, struct wire_report *report);
/* Have all connected nodes answered, or is it too late for that? */
int leader_apart_is_scanned(const struct core_leader *l);
/* Puts together what the nodes said: appends to `found` (owned, *count of them) what is whole, or
 * prepared everywhere; begins to publish what is committed and not named so yet. Bits of roots that
 * a node could not look at. */
uint32_t leader_apart_assemble(struct core_leader *l, struct core_checkpoint **found,
                               uint32_t *count);
/* Nodes that have parts of checkpoints for themselves: `ret` is owned by the caller. */
uint32_t leader_apart_holders(const struct core_leader *l, struct wire_holder **ret);
void leader_apart_close(struct core_leader *l);

/* leader_interval.c */
/* Steps were done: `steps` of them in `ms`. */
void leader_interval_steps(struct core_leader *l, uint64_t steps, uint64_t ms);
/* State had to be taken from disk. */
void leader_interval_failure(struct core_leader *l);
/* Chooses intervals anew where the job leaves it to Belay, now and then. */
void leader_interval_step(struct core_leader *l);
/* Step time while saves to the root are written / without, in 1/1000; 0 not known. */
uint32_t leader_interval_inflation(const struct core_leader *l, uint32_t root);

#endif
