/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the member: its state, and the functions that its files share. */
#ifndef CORE_MEMBER_STATE_H
#define CORE_MEMBER_STATE_H

#include "daemon/core/effects.h"
#include "daemon/core/member.h"
#include "wire/session.h"

struct member_proc {
    uint64_t incarnation;
    uint32_t rank, pid;
    uint64_t started_ms;                 /* the machine's clock */
    struct wire_rank_report rank_report; /* state EXITED once it is */
    struct wire_beat beat;
    struct wire_exit status;
    uint32_t heard; /* a report came, or its connection stood: it can be told things */
    uint32_t kill_sent;
    uint32_t dirty;    /* its directive changed and is not sent yet */
    uint64_t sequence; /* of its directives */
    uint64_t need;     /* the sequence from which on it has the newest view; 0 not sent yet */
    uint64_t sent_ms;
};

struct member_arena {
    struct wire_arena_info info; /* owned extents */
    uint64_t told; /* report sequence from which on its extents were told; 0 not yet */
};

struct core_member {
    struct core_member_config config;
    char node[WIRE_NODE_MAX];
    char bulk_addr[WIRE_ADDR_MAX];

    uint32_t started, linked, done;
    uint64_t sequence;     /* of reports */
    uint64_t report_acked; /* by the present leader */
    uint32_t report_due;
    uint64_t report_ms;
    uint64_t head_epoch;
    uint64_t leader, leader_sequence;
    struct wire_former leaders_former;
    uint32_t has_directive;
    struct wire_directive directive; /* newest accepted; owned */

    struct member_proc *procs;
    uint32_t proc_count;
    struct member_arena *arenas;
    uint32_t arena_count;
    uint64_t *dropped; /* arenas that the edge was told to drop and may still name */
    uint32_t dropped_count;
    struct wire_save saves[WIRE_SAVES_MAX];
    uint32_t save_count;
    uint32_t save_tries[WIRE_SAVES_MAX]; /* at giving it its final name, that failed */
    uint32_t save_again[WIRE_SAVES_MAX];
    uint32_t save_over[WIRE_SAVES_MAX]; /* all is done here: not named in reports any more */
    uint64_t scan_id;                   /* of the newest scan that was asked for */
    uint32_t scan_done, scan_failed;
    uint64_t scan_told;            /* report that told its holdings first; 0 not yet */
    struct wire_holding *holdings; /* owned; what it found */
    uint32_t holding_count;
    struct core_ring effects;
};

struct member_proc *member_proc_find(struct core_member *m, uint64_t incarnation);
struct core_member_effect *member_effect(struct core_member *m, enum core_member_effect_kind kind);
/* Queues directives that are new or unanswered. */
void member_ranks_flush(struct core_member *m, uint64_t now_ms);
void member_ranks_dirty(struct core_member *m);
/* The save of this attempt, or NULL. */
struct wire_save *member_save_find(struct core_member *m, uint64_t attempt);
void member_saves_directive(struct core_member *m, const struct wire_directive *d);
void member_saves_report(struct core_member *m, struct wire_report *ret);
void member_saves_retry(struct core_member *m);
void member_scan_directive(struct core_member *m, const struct wire_directive *d);
int member_proc_is_live(const struct member_proc *p);

#endif
