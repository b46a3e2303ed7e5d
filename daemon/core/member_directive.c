/* SPDX-License-Identifier: Apache-2.0 */
/* The member's other half: what the leader says, carried out and handed to the ranks. */
#include "daemon/core/member_state.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- to the ranks ---- */

void member_ranks_dirty(struct core_member *m)
{
    for (uint32_t i = 0; i < m->proc_count; i++) {
        m->procs[i].dirty = 1;
    }
}

static int proc_has_newest(const struct core_member *m, const struct member_proc *p)
{
    return p->need != 0 && p->rank_report.directive_node == m->config.node_incarnation &&
           p->rank_report.directive_sequence >= p->need;
}

void member_ranks_flush(struct core_member *m, uint64_t now_ms)
{
    for (uint32_t i = 0; m->has_directive && i < m->proc_count; i++) {
        struct member_proc *p = &m->procs[i];
        int is_late = !proc_has_newest(m, p) && now_ms - p->sent_ms >= m->config.beat_ms;
        if (!member_proc_is_live(p) || !p->heard || (!p->dirty && !is_late)) {
            continue;
        }
        if (p->dirty) {
            p->need = p->sequence + 1;
            p->dirty = 0;
        }
        p->sent_ms = now_ms;
        member_effect(m, CORE_MEMBER_SEND_RANK)->incarnation = p->incarnation;
    }
}

static int directive_refuses(const struct wire_directive *d, uint64_t incarnation)
{
    for (uint32_t i = 0; i < d->refused_count; i++) {
        if (d->refused[i] == incarnation) {
            return 1;
        }
    }
    return 0;
}

int core_member_rank_directive(struct core_member *m, uint64_t incarnation,
                               struct wire_rank_directive *ret)
{
    struct member_proc *p = member_proc_find(m, incarnation);
    const struct wire_directive *d = &m->directive;

    if (!p || !m->has_directive) {
        return -ENOENT;
    }
    struct wire_rank_directive rank = {.run = m->config.run,
                                       .incarnation = incarnation,
                                       .node_incarnation = m->config.node_incarnation,
                                       .generation = d->generation,
                                       .phase = d->phase,
                                       .unpin_through = d->unpin_through,
                                       .leave = d->leave,
                                       .refused = (uint32_t)directive_refuses(d, incarnation)};
    rank.saves_through = d->saves_through;
    memcpy(rank.saves_kept, d->saves_kept, sizeof(rank.saves_kept));
    memcpy(rank.every, d->every, sizeof(rank.every));
    memcpy(rank.text, d->text, sizeof(rank.text));
    if (rank.refused) {
        snprintf(rank.text, sizeof(rank.text),
                 "its function id or numeric probe is not that of the run: another binary, library "
                 "or processor");
    }
    if (d->phase == WIRE_PHASE_PLANNED || d->phase == WIRE_PHASE_RUNNING) {
        for (uint32_t i = 0; i < d->plan.world && !rank.has_plan; i++) {
            if (d->plan.members[i].incarnation == incarnation) {
                rank.has_plan = 1;
                rank.rank = i;
            }
        }
    }
    if (rank.has_plan) {
        int rc = wire_plan_copy(&rank.plan, &d->plan);
        if (rc < 0) {
            return rc;
        }
        if (rank.rank == 0) {
            rank.request_id = d->request_id;
            rank.request_flags = d->request_flags;
        }
    }
    rank.sequence = ++p->sequence;
    *ret = rank;
    return 0;
}

/* ---- from the leader ---- */

/* The newest generation whose plan one of this node's ranks has: a daemon that was restarted may
 * know less than its ranks, and must not lead them back. */
static uint64_t member_generation_min(const struct core_member *m)
{
    uint64_t min = m->has_directive ? m->directive.generation : 0;
    for (uint32_t i = 0; i < m->proc_count; i++) {
        const struct wire_rank_report *r = &m->procs[i].rank_report;
        if (r->state >= WIRE_RANK_LOADING && r->state < WIRE_RANK_EXITED && r->generation > min) {
            min = r->generation;
        }
    }
    return min;
}

static int directive_is_stale(const struct core_member *m, const struct wire_directive *d)
{
    if (d->run != m->config.run || d->head_epoch < m->head_epoch) {
        return 1;
    }
    if (d->head_epoch == m->head_epoch) {
        if (wire_former_has(&m->leaders_former, d->leader_incarnation)) {
            return 1;
        }
        if (d->leader_incarnation == m->leader && d->sequence <= m->leader_sequence) {
            return 1;
        }
    }
    if (d->generation < member_generation_min(m)) {
        return 1;
    }
    return m->has_directive && d->generation == m->directive.generation &&
           d->phase < m->directive.phase;
}

static void directive_order(struct core_member *m, const struct wire_proc_order *order,
                            uint64_t now_ms)
{
    struct member_proc *p = member_proc_find(m, order->incarnation);

    if (order->forget) {
        if (p && !member_proc_is_live(p)) {
            member_effect(m, CORE_MEMBER_RELEASE)->incarnation = p->incarnation;
            *p = m->procs[--m->proc_count];
            m->report_due = 1;
        }
        return;
    }
    if (!p) {
        core_member_on_proc_adopted(m, order->incarnation, order->rank, 0, now_ms);
        p = &m->procs[m->proc_count - 1];
        if (order->kill) { /* it never ran here */
            p->rank_report.state = WIRE_RANK_EXITED;
            p->status = (struct wire_exit){.code = -1, .by_us = 1};
            return;
        }
        struct core_member_effect *e = member_effect(m, CORE_MEMBER_START);
        e->incarnation = order->incarnation;
        e->rank = order->rank;
        return;
    }
    if (order->kill && !p->kill_sent && member_proc_is_live(p)) {
        p->kill_sent = 1;
        struct core_member_effect *e = member_effect(m, CORE_MEMBER_KILL);
        e->incarnation = p->incarnation;
        e->stacks = order->stacks;
    }
}

/* A live rank's present arena is never dropped, whoever says so. Of a rank that has not yet spoken
 * to this daemon any may be the present one. */
static int arena_is_in_use(const struct core_member *m, const struct wire_arena_info *arena)
{
    for (uint32_t i = 0; i < m->proc_count; i++) {
        const struct member_proc *p = &m->procs[i];
        if (member_proc_is_live(p) && p->incarnation == arena->incarnation &&
            (p->rank_report.sequence == 0 || p->rank_report.arena == arena->arena)) {
            return 1;
        }
    }
    return 0;
}

static void directive_drop(struct core_member *m, uint64_t arena)
{
    for (uint32_t i = 0; i < m->arena_count; i++) {
        if (m->arenas[i].info.arena != arena || arena_is_in_use(m, &m->arenas[i].info)) {
            continue;
        }
        bl_extent_list_close(&m->arenas[i].info.extents);
        m->arenas[i] = m->arenas[--m->arena_count];
        m->dropped = core_grow(m->dropped, m->dropped_count, sizeof(*m->dropped));
        m->dropped[m->dropped_count++] = arena;
        member_effect(m, CORE_MEMBER_DROP_ARENA)->arena = arena;
        m->report_due = 1;
        return;
    }
}

/* Is there anything in the new directive that ranks should know? */
static int directive_is_news(const struct core_member *m, const struct wire_directive *d)
{
    const struct wire_directive *was = &m->directive;
    return !m->has_directive || was->generation != d->generation || was->phase != d->phase ||
           was->request_id != d->request_id || was->request_flags != d->request_flags ||
           was->unpin_through != d->unpin_through || was->leave != d->leave ||
           was->saves_through != d->saves_through ||
           memcmp(was->saves_kept, d->saves_kept, sizeof(d->saves_kept)) != 0 ||
           memcmp(was->every, d->every, sizeof(d->every)) != 0 ||
           was->refused_count != d->refused_count || strcmp(was->text, d->text) != 0;
}

static void directive_adopt(struct core_member *m, const struct wire_directive *d)
{
    if (d->head_epoch > m->head_epoch) {
        m->head_epoch = d->head_epoch;
        member_effect(m, CORE_MEMBER_EPOCH)->head_epoch = d->head_epoch;
    }
    if (d->leader_incarnation != m->leader) {
        wire_former_add(&m->leaders_former, m->leader);
        m->leader = d->leader_incarnation;
        m->report_acked = 0;
        m->scan_told = 0;
        m->report_due = 1;
        for (uint32_t i = 0; i < m->arena_count; i++) {
            m->arenas[i].told = 0;
        }
    }
    m->leader_sequence = d->sequence;
    if (d->node_incarnation == m->config.node_incarnation && d->report_sequence > m->report_acked) {
        m->report_acked = d->report_sequence;
    }
}

void core_member_on_directive(struct core_member *m, const struct wire_directive *d,
                              uint64_t now_ms)
{
    if (directive_is_stale(m, d)) {
        return;
    }
    struct wire_directive copy;
    if (wire_directive_copy(&copy, d) < 0) {
        return; /* out of memory: the leader repeats it */
    }
    directive_adopt(m, d);
    if (directive_is_news(m, d)) {
        member_ranks_dirty(m);
        m->report_due = 1;
    }
    if (m->has_directive) {
        wire_directive_close(&m->directive);
    }
    m->directive = copy;
    m->has_directive = 1;
    if (d->node_incarnation == m->config.node_incarnation) {
        for (uint32_t i = 0; i < d->order_count; i++) {
            directive_order(m, &d->orders[i], now_ms);
        }
        for (uint32_t i = 0; i < d->drop_count; i++) {
            directive_drop(m, d->drop_arenas[i]);
        }
        member_saves_directive(m, d);
        member_scan_directive(m, d);
    }
    member_ranks_flush(m, now_ms);
    if (d->phase == WIRE_PHASE_DONE && d->leave && m->proc_count == 0 && !m->done) {
        m->done = 1;
        member_effect(m, CORE_MEMBER_SEND_REPORT); /* nothing is left here: the last one */
        member_effect(m, CORE_MEMBER_DONE)->verdict = d->verdict;
    }
}
