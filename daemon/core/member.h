/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The member: a node's side, as a pure machine. It carries out the leader's orders for processes,
 * hands generations and plans to the ranks, and tells the leader what there is: processes, arenas,
 * parts of saves. It decides nothing by itself; cut off from the leader it keeps everything as it
 * is. Same style as the leader: inputs, effects, one caller at a time.
 *
 * The start of a daemon: core_member_new; for each shim found core_member_on_proc_adopted; the
 * arenas found by core_member_on_arenas; then core_member_start. No report leaves before that: a
 * process that is missing from a report of a daemon that has started is dead.
 */
#ifndef CORE_MEMBER_H
#define CORE_MEMBER_H

#include "daemon/core/event.h"
#include "wire/msg.h"

struct core_member_config {
    const char *node; /* copied */
    uint64_t run;
    uint64_t node_incarnation; /* random, of this daemon process */
    uint32_t ranks_max;
    const char *bulk_addr;   /* copied */
    uint64_t beat_ms;        /* reports and unanswered directives are repeated */
    uint64_t head_epoch_min; /* newest head epoch that this node remembers */
    uint32_t rules_off;      /* enum wire_rule; 0 outside the simulator */
};

enum core_member_effect_kind {
    CORE_MEMBER_NONE = 0,
    CORE_MEMBER_START,         /* start process `incarnation` with hint `rank`; then
                                  on_proc_started or on_proc_exit */
    CORE_MEMBER_KILL,          /* kill it, with `stacks` first; on_proc_exit will come */
    CORE_MEMBER_RELEASE,       /* its shim may go, its exit is accounted for */
    CORE_MEMBER_DROP_ARENA,    /* close `arena`; leave it out of on_arenas from now on */
    CORE_MEMBER_SEND_RANK,     /* core_member_rank_directive(incarnation) and send it */
    CORE_MEMBER_SEND_REPORT,   /* core_member_report and send it to the leader */
    CORE_MEMBER_ENGINE_WRITE,  /* core_member_write(attempt); on_engine_written will come */
    CORE_MEMBER_ENGINE_CANCEL, /* stop writing `attempt` and remove its leftovers */
    CORE_MEMBER_ENGINE_DONE,   /* `attempt` is committed: its files may be closed */
    /* Of roots that this node has for itself; core_member_save says of what: */
    CORE_MEMBER_ENGINE_PREPARE, /* take the manifest; on_engine_stage */
    CORE_MEMBER_ENGINE_PUBLISH, /* give `attempt` its final name; on_engine_stage, later
                                   on_engine_verified */
    CORE_MEMBER_ENGINE_RETAIN,  /* it was read back on all nodes: mark it, retain */
    CORE_MEMBER_SCAN,           /* look at all own roots; on_scanned with `scan` */
    CORE_MEMBER_EPOCH,          /* remember `head_epoch` durably */
    CORE_MEMBER_DONE            /* the run is over and no process is left: `verdict` */
};

struct core_member_effect {
    enum core_member_effect_kind kind;
    uint64_t incarnation, arena, attempt, head_epoch, scan;
    uint32_t rank, stacks;
    enum wire_verdict verdict;
};

struct core_member_source { /* one slot to be written */
    uint64_t arena;
    uint32_t slot;
    struct bl_state_digest digest;
};

struct core_member_write {
    uint64_t attempt, step, generation, line;
    uint32_t root, apart;
    char dir[WIRE_DIR_MAX];
    const struct bl_extent_list *pick; /* view, until the next call */
    uint32_t source_count;
    struct core_member_source *sources; /* owned by the caller after the call: free() */
};

struct core_member; /* opaque */

/* Owned; `config` is copied. NULL without memory. */
struct core_member *core_member_new(const struct core_member_config *config);
void core_member_free(struct core_member *member);

/* Inputs. Borrowed unless said. `now_ms`: CLOCK_BOOTTIME or virtual. */
void core_member_on_proc_adopted(struct core_member *member, uint64_t incarnation, uint32_t rank,
                                 uint32_t pid, uint64_t now_ms);
void core_member_start(struct core_member *member, uint64_t now_ms);
/* Dropped: an older head epoch, an older sequence of the same leader, a generation that goes back.
 */
void core_member_on_directive(struct core_member *member, const struct wire_directive *directive,
                              uint64_t now_ms);
void core_member_on_rank_report(struct core_member *member, const struct wire_rank_report *report,
                                uint64_t now_ms);
/* The rank's connection stands: it is told at once what it should know. */
void core_member_on_rank_up(struct core_member *member, uint64_t incarnation, uint64_t now_ms);
void core_member_on_proc_started(struct core_member *member, uint64_t incarnation, uint32_t pid,
                                 uint64_t now_ms);
/* Also for one that could not be started: code 3, and the text. Also for an adopted one whose exit
 * record was found. */
void core_member_on_proc_exit(struct core_member *member, uint64_t incarnation,
                              const struct wire_exit *status, const char *text, uint64_t now_ms);
/* All arenas that the node holds, as wire_arena_read finds them now. Takes the extents (they are
 * moved out of the array). Call it before core_member_on_proc_exit of their rank, when a rank says
 * that it parked, loaded or sealed a step that is saved, and on each beat. */
void core_member_on_arenas(struct core_member *member, struct wire_arena_info *arenas,
                           uint32_t count, uint64_t now_ms);
void core_member_on_beat(struct core_member *member, uint64_t incarnation,
                         const struct wire_beat *beat);
/* rc 0: the part is durable, `part_json` describes it (copied), and it took so many bytes of disk
 * and so long. */
void core_member_on_engine_written(struct core_member *member, uint64_t attempt, int rc,
                                   const char *part_json, const char *text, uint64_t bytes,
                                   uint64_t elapsed_ms, uint64_t now_ms);
/* What PREPARE or PUBLISH asked for is done (rc 0) or failed. */
void core_member_on_engine_stage(struct core_member *member, uint64_t attempt, int rc,
                                 const char *text, uint64_t now_ms);
/* What this node has of a published attempt was read back. */
void core_member_on_engine_verified(struct core_member *member, uint64_t attempt, int rc,
                                    const char *text, uint64_t now_ms);
/* Scan `scan` is done: `failed` are the bits of roots that could not be looked at. Holdings are
 * copied. */
void core_member_on_scanned(struct core_member *member, uint64_t scan, uint32_t failed,
                            const struct wire_holding *holdings, uint32_t count, uint64_t now_ms);
/* The connection to the leader stands / is gone. */
void core_member_on_link_up(struct core_member *member, uint64_t now_ms);
void core_member_on_link_down(struct core_member *member, uint64_t now_ms);
/* Fires what is due; returns when it wants to be called again (ms, absolute). */
uint64_t core_member_on_tick(struct core_member *member, uint64_t now_ms);

/* 1 and the next effect, or 0. */
int core_member_next_effect(struct core_member *member, struct core_member_effect *ret);

/* Builds what an effect names; `ret` is owned by the caller (wire_*_close). */
void core_member_report(struct core_member *member, struct wire_report *ret, uint64_t now_ms);
/* -ENOENT when the process is not known any more. */
BL_MUST_CHECK int core_member_rank_directive(struct core_member *member, uint64_t incarnation,
                                             struct wire_rank_directive *ret);
BL_MUST_CHECK int core_member_write(const struct core_member *member, uint64_t attempt,
                                    struct core_member_write *ret);

/* The save of an attempt as this node has it: view, until the next call; NULL: nobody wants it. */
const struct wire_save *core_member_save(const struct core_member *member, uint64_t attempt);
/* May a reader with this key read files of checkpoints on this node? */
int core_member_has_file_key(const struct core_member *member, const uint64_t key[2]);

/* The newest directive: view, until the next call; NULL before the first. */
const struct wire_directive *core_member_directive(const struct core_member *member);
/* Is there a process of this incarnation that has not exited? */
int core_member_has_live(const struct core_member *member, uint64_t incarnation);
/* May a remote reader with this generation and key read this node's arenas? */
int core_member_has_key(const struct core_member *member, uint64_t generation,
                        const uint64_t key[2]);

#endif
