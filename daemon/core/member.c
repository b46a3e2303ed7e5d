/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The member's inputs: what processes, ranks, arenas and engine say, and the reports made of it.
 * The leader's directives are in member_directive.c.
 */
#include "daemon/core/member_state.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct core_member *core_member_new(const struct core_member_config *config)
{
    struct core_member *m = calloc(1, sizeof(*m));
    if (!m) {
        return NULL;
    }
    m->config = *config;
    snprintf(m->node, sizeof(m->node), "%s", config->node);
    snprintf(m->bulk_addr, sizeof(m->bulk_addr), "%s", config->bulk_addr ? config->bulk_addr : "");
    m->config.node = m->node;
    m->config.bulk_addr = m->bulk_addr;
    m->head_epoch = config->head_epoch_min;
    core_ring_init(&m->effects, sizeof(struct core_member_effect));
    return m;
}

void core_member_free(struct core_member *m)
{
    if (!m) {
        return;
    }
    wire_directive_close(&m->directive);
    for (uint32_t i = 0; i < m->arena_count; i++) {
        bl_extent_list_close(&m->arenas[i].info.extents);
    }
    for (uint32_t i = 0; i < m->save_count; i++) {
        wire_save_close(&m->saves[i]);
    }
    free(m->holdings);
    free(m->arenas);
    free(m->dropped);
    free(m->procs);
    core_ring_close(&m->effects);
    free(m);
}

struct core_member_effect *member_effect(struct core_member *m, enum core_member_effect_kind kind)
{
    struct core_member_effect *e = core_ring_push(&m->effects);
    e->kind = kind;
    return e;
}

struct member_proc *member_proc_find(struct core_member *m, uint64_t incarnation)
{
    for (uint32_t i = 0; i < m->proc_count; i++) {
        if (m->procs[i].incarnation == incarnation) {
            return &m->procs[i];
        }
    }
    return NULL;
}

int member_proc_is_live(const struct member_proc *p)
{
    return p->rank_report.state != WIRE_RANK_EXITED;
}

/* ---- processes ---- */

void core_member_on_proc_adopted(struct core_member *m, uint64_t incarnation, uint32_t rank,
                                 uint32_t pid, uint64_t now_ms)
{
    if (member_proc_find(m, incarnation)) {
        return;
    }
    m->procs = core_grow(m->procs, m->proc_count, sizeof(*m->procs));
    struct member_proc *p = &m->procs[m->proc_count++];
    memset(p, 0, sizeof(*p));
    p->incarnation = incarnation;
    p->rank_report.incarnation = incarnation;
    p->rank_report.run = m->config.run;
    p->rank = rank;
    p->pid = pid;
    p->started_ms = now_ms;
    p->dirty = 1;
    m->report_due = 1;
}

void core_member_start(struct core_member *m, uint64_t now_ms)
{
    m->started = 1;
    m->report_due = 1;
    m->report_ms = now_ms;
}

void core_member_on_proc_started(struct core_member *m, uint64_t incarnation, uint32_t pid,
                                 uint64_t now_ms)
{
    struct member_proc *p = member_proc_find(m, incarnation);
    if (p) {
        p->pid = pid;
        p->started_ms = now_ms;
        m->report_due = 1;
    }
}

void core_member_on_proc_exit(struct core_member *m, uint64_t incarnation,
                              const struct wire_exit *status, const char *text, uint64_t now_ms)
{
    struct member_proc *p = member_proc_find(m, incarnation);
    (void)now_ms;
    if (!p || !member_proc_is_live(p)) {
        return;
    }
    p->rank_report.state = WIRE_RANK_EXITED;
    p->status = *status;
    p->status.by_us = status->by_us || p->kill_sent;
    if (text && text[0]) {
        snprintf(p->rank_report.failed_text, sizeof(p->rank_report.failed_text), "%s", text);
    }
    m->report_due = 1;
}

void core_member_on_beat(struct core_member *m, uint64_t incarnation, const struct wire_beat *beat)
{
    struct member_proc *p = member_proc_find(m, incarnation);
    if (p) {
        p->beat = *beat;
    }
}

void core_member_on_rank_up(struct core_member *m, uint64_t incarnation, uint64_t now_ms)
{
    struct member_proc *p = member_proc_find(m, incarnation);
    if (p && member_proc_is_live(p)) {
        p->heard = 1;
        p->dirty = 1;
        member_ranks_flush(m, now_ms);
    }
}

/* Does the leader want to know at once, or is the next beat soon enough? */
static int report_is_news(const struct core_member *m, const struct wire_rank_report *was,
                          const struct wire_rank_report *is)
{
    return was->state != is->state || was->generation != is->generation ||
           was->failed_generation != is->failed_generation || was->arena != is->arena ||
           was->request_done != is->request_done || was->stop_flags != is->stop_flags ||
           was->skipped_save != is->skipped_save ||
           (was->applied_step != is->applied_step && m->has_directive &&
            is->applied_step <= m->directive.plan.step + 1);
}

void core_member_on_rank_report(struct core_member *m, const struct wire_rank_report *report,
                                uint64_t now_ms)
{
    struct member_proc *p = member_proc_find(m, report->incarnation);
    if (!p || report->run != m->config.run || !member_proc_is_live(p) ||
        report->sequence <= p->rank_report.sequence || report->state == WIRE_RANK_EXITED) {
        return;
    }
    if (report_is_news(m, &p->rank_report, report)) {
        m->report_due = 1;
    }
    p->rank_report = *report;
    if (!p->heard) {
        p->heard = 1;
        p->dirty = 1;
    }
    member_ranks_flush(m, now_ms);
}

/* ---- arenas ---- */

static struct member_arena *arena_find(struct core_member *m, uint64_t arena)
{
    for (uint32_t i = 0; i < m->arena_count; i++) {
        if (m->arenas[i].info.arena == arena) {
            return &m->arenas[i];
        }
    }
    return NULL;
}

static int arena_is_dropped(const struct core_member *m, uint64_t arena)
{
    for (uint32_t i = 0; i < m->dropped_count; i++) {
        if (m->dropped[i] == arena) {
            return 1;
        }
    }
    return 0;
}

void core_member_on_arenas(struct core_member *m, struct wire_arena_info *arenas, uint32_t count,
                           uint64_t now_ms)
{
    struct member_arena *fresh = core_alloc(count, sizeof(*fresh));
    uint32_t kept = 0;

    (void)now_ms;
    for (uint32_t i = 0; i < count; i++) {
        if (arena_is_dropped(m, arenas[i].arena)) {
            bl_extent_list_close(&arenas[i].extents);
            continue;
        }
        struct member_arena *old = arena_find(m, arenas[i].arena);
        fresh[kept].info = arenas[i];
        fresh[kept].told = old ? old->told : 0;
        memset(&arenas[i].extents, 0, sizeof(arenas[i].extents));
        m->report_due |= !old;
        kept++;
    }
    for (uint32_t i = 0; i < m->arena_count; i++) {
        bl_extent_list_close(&m->arenas[i].info.extents);
    }
    free(m->arenas);
    m->arenas = fresh;
    m->arena_count = kept;
}

/* ---- reports ---- */

void core_member_report(struct core_member *m, struct wire_report *ret, uint64_t now_ms)
{
    memset(ret, 0, sizeof(*ret));
    memcpy(ret->node, m->node, sizeof(ret->node));
    ret->node_incarnation = m->config.node_incarnation;
    ret->run = m->config.run;
    ret->sequence = ++m->sequence;
    ret->leader_incarnation = m->leader;
    ret->directive_sequence = m->leader_sequence;
    if (m->has_directive) {
        ret->generation = m->directive.generation;
        ret->phase = m->directive.phase;
    }
    memcpy(ret->bulk_addr, m->bulk_addr, sizeof(ret->bulk_addr));
    ret->ranks_max = m->config.ranks_max;
    ret->procs = core_alloc(m->proc_count, sizeof(*ret->procs));
    ret->proc_count = m->proc_count;
    for (uint32_t i = 0; i < m->proc_count; i++) {
        const struct member_proc *p = &m->procs[i];
        struct wire_proc_report *r = &ret->procs[i];
        r->rank = p->rank_report;
        r->pid = p->pid;
        r->beat = p->beat;
        r->exit = p->status;
        r->started_ms = now_ms - p->started_ms;
    }
    ret->arenas = core_alloc(m->arena_count, sizeof(*ret->arenas));
    ret->arena_count = m->arena_count;
    for (uint32_t i = 0; i < m->arena_count; i++) {
        struct member_arena *a = &m->arenas[i];
        ret->arenas[i] = a->info;
        memset(&ret->arenas[i].extents, 0, sizeof(ret->arenas[i].extents));
        if (!a->told || a->told > m->report_acked) {
            int rc = bl_extent_list_copy(&ret->arenas[i].extents, &a->info.extents);
            BL_ASSERT(rc == 0);
            a->told = a->told ? a->told : m->sequence;
        }
    }
    member_saves_report(m, ret);
}

void core_member_on_link_up(struct core_member *m, uint64_t now_ms)
{
    (void)now_ms;
    m->linked = 1;
    m->report_due = 1;
    m->report_acked = 0;
    m->scan_told = 0;
    for (uint32_t i = 0; i < m->arena_count; i++) {
        m->arenas[i].told = 0;
    }
}

void core_member_on_link_down(struct core_member *m, uint64_t now_ms)
{
    (void)now_ms;
    m->linked = 0;
}

uint64_t core_member_on_tick(struct core_member *m, uint64_t now_ms)
{
    if (m->started && now_ms - m->report_ms >= m->config.beat_ms) {
        m->report_due = 1;
    }
    if (m->report_due && m->started) {
        m->report_ms = now_ms;
    }
    member_ranks_flush(m, now_ms);
    member_saves_retry(m);
    return now_ms + m->config.beat_ms;
}

int core_member_next_effect(struct core_member *m, struct core_member_effect *ret)
{
    if (core_ring_pop(&m->effects, ret)) {
        return 1;
    }
    memset(ret, 0, sizeof(*ret));
    if (m->report_due && m->started && m->linked) {
        m->report_due = 0;
        ret->kind = CORE_MEMBER_SEND_REPORT;
        return 1;
    }
    return 0;
}

const struct wire_directive *core_member_directive(const struct core_member *m)
{
    return m->has_directive ? &m->directive : NULL;
}

int core_member_has_live(const struct core_member *m, uint64_t incarnation)
{
    for (uint32_t i = 0; i < m->proc_count; i++) {
        if (m->procs[i].incarnation == incarnation) {
            return member_proc_is_live(&m->procs[i]);
        }
    }
    return 0;
}

int core_member_has_key(const struct core_member *m, uint64_t generation, const uint64_t key[2])
{
    const struct wire_plan *plan = &m->directive.plan;
    return m->has_directive && generation != 0 && plan->generation == generation &&
           ((plan->comm_key[0] ^ key[0]) | (plan->comm_key[1] ^ key[1])) == 0;
}
