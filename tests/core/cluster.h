/* SPDX-License-Identifier: Apache-2.0 */
/* A leader with a make-believe cluster around it: nodes that do at once what they are told. */
#ifndef TESTS_CORE_CLUSTER_H
#define TESTS_CORE_CLUSTER_H

#include "daemon/core/leader.h"
#include "wire/belay.h"

struct cluster_proc {
    uint64_t incarnation, arena, arena_step, arena_generation;
    uint32_t node, rank, world; /* of its newest plan */
    uint32_t copy;              /* ranks of a replica there */
    enum wire_rank_state state;
    uint64_t generation, step, failed_generation, function_id, probe;
    int32_t failed_code;
    uint32_t stop_flags, stuck; /* stuck: does not park, does not step */
    struct wire_beat beat;
    struct wire_exit status;
    uint64_t sequence, request_done;
    uint32_t killed, stacks;
    int has_arena, arena_pinned;
    uint64_t told; /* arena whose extents the leader has */
};

struct cluster_node {
    char name[WIRE_NODE_MAX];
    uint64_t incarnation, sequence;
    uint32_t up, ranks_max, told;
    struct wire_directive directive;
    uint64_t written; /* attempt */
};

struct cluster {
    struct core_leader *leader;
    struct core_leader_config config;
    struct wire_record stored; /* the newest, of `version` */
    uint64_t now, version, elems;
    int whole_replicas; /* replicas hold the same (ZeRO 0), else each rank a part of its own */
    uint32_t overlap;   /* elements that each rank names of the next one's, too */
    char reshaped[WIRE_TEXT_MAX]; /* text of the newest event RESHAPED or GROWN */
    uint64_t probe;               /* of processes started from now on */
    struct cluster_node *nodes;
    uint32_t node_count;
    struct cluster_proc *procs;
    uint32_t proc_count, proc_capacity;
    uint32_t events[256]; /* how often, by number */
    uint32_t opens;
    enum wire_verdict verdict;
    uint32_t finished, no_start;   /* no_start: processes stay STARTING */
    int unready;                   /* members fail to load */
    char recovered[WIRE_TEXT_MAX]; /* cause of the newest recovery */
    int spoil;                     /* ready digests are wrong so many times */
    int commit_rc;
    uint32_t commit_failed; /* bits: roots that commits fail on */
    int hold_commit, hold_scan;
    int hold_store;       /* puts are not answered while it is set */
    uint64_t held_put;    /* op of one that is not answered yet; 0 none */
    uint64_t held_commit; /* attempt that is not answered */
    uint32_t scans;
    uint32_t held_roots;                /* bits: their parts are not written */
    const struct core_checkpoint *disk; /* what a scan finds */
    uint32_t disk_count, scan_failed;
    double leader_s; /* processor seconds spent in the leader */
};

void cluster_init(struct cluster *c, uint32_t nodes, uint32_t ranks, uint32_t ranks_max);
void cluster_close(struct cluster *c);
/* Carries effects and reports until nothing happens any more. */
void cluster_settle(struct cluster *c);
/* Time passes, a beat at a time, with reports. */
void cluster_pass(struct cluster *c, uint64_t ms);
/* Every running rank does one step. */
void cluster_step(struct cluster *c);
/* Every running rank leaves with these BELAY_VOTE_ flags, its newest state pinned for the last
 * save. */
void cluster_leave(struct cluster *c, uint32_t flags);
/* What the leader's status says of a root. */
struct core_status_root cluster_root_status(struct cluster *c, uint32_t root);
struct cluster_proc *cluster_rank(struct cluster *c, uint32_t rank);
void cluster_die(struct cluster *c, struct cluster_proc *p, int code, int signal);
void cluster_node_down(struct cluster *c, uint32_t node);
void cluster_node_up(struct cluster *c, uint32_t node);

#endif
