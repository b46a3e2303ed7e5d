/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hangs: no step for longer than steps take. The culprit is the rank whose control thread is silent
 * (it is stopped, or its machine is), else the one that never entered what the others wait in. If
 * none stands out, the first time a new generation is opened without a kill; the second time the
 * one that is furthest behind is killed.
 *
 *      deadline = 5 x the longest of the newest step times, at least step_floor, at most step_ceil
 */
#include "daemon/core/leader_state.h"

#include <stdio.h>

#define HANG_FACTOR    5
#define HANG_SILENT    4    /* beats without a sign of life that make a control thread silent ... */
#define HANG_SILENT_MS 1000 /* ... and at least this long */

uint64_t leader_step_deadline(const struct core_leader *l)
{
    const struct core_deadlines *d = &l->config.deadlines;
    uint64_t longest = 0;
    uint64_t count =
        l->step_time_count < LEADER_STEPS_LEARNED ? l->step_time_count : LEADER_STEPS_LEARNED;
    for (uint64_t i = 0; i < count; i++) {
        longest = l->step_times[i] > longest ? l->step_times[i] : longest;
    }
    uint64_t deadline = HANG_FACTOR * longest;
    deadline = deadline > d->step_floor ? deadline : d->step_floor;
    return deadline < d->step_ceil ? deadline : d->step_ceil;
}

static int proc_is_silent(const struct core_leader *l, const struct leader_proc *p)
{
    uint64_t limit = HANG_SILENT * l->config.deadlines.beat;
    return p->beat.alive_age_ms >= (limit > HANG_SILENT_MS ? limit : HANG_SILENT_MS);
}

/* Is `a` further behind than `b`? */
static int proc_is_behind(const struct leader_proc *a, const struct leader_proc *b)
{
    if (a->beat.step != b->beat.step) {
        return a->beat.step < b->beat.step;
    }
    if (a->beat.collective != b->beat.collective) {
        return a->beat.collective < b->beat.collective;
    }
    return a->beat.waiting < b->beat.waiting;
}

/* Kills silent ranks; without any, the one behind all others, if there is one (or if `force`). How
 * many were killed. */
static uint32_t hang_culprits(struct core_leader *l, uint64_t age, int only_unready, int force)
{
    const struct wire_plan *plan = &l->record.plan;
    struct leader_proc *last = NULL;
    uint32_t killed = 0;
    uint32_t equals = 0;

    for (uint32_t i = 0; i < plan->world; i++) {
        struct leader_proc *p = leader_proc_find(l, plan->members[i].incarnation);
        if (!p || p->life != LEADER_LIVE || !l->nodes[p->node].connected) {
            continue;
        }
        if (only_unready && p->report.state == WIRE_RANK_READY &&
            p->report.generation == plan->generation) {
            continue;
        }
        if (proc_is_silent(l, p)) {
            leader_event_proc(l, CORE_EVENT_RANK_HUNG, p, "no sign of life");
            leader_cause(l, age, "rank %u on %s hangs: no sign of life", p->rank,
                         l->nodes[p->node].name);
            leader_proc_kill(l, p, 1);
            killed++;
        }
        if (!last || proc_is_behind(p, last)) {
            last = p;
            equals = 1;
        } else if (!proc_is_behind(last, p)) {
            equals++;
        }
    }
    int stands_out = last && equals == 1 && !last->beat.waiting && plan->world > 1;
    if (killed == 0 && last && (stands_out || force)) {
        leader_event_proc(l, CORE_EVENT_RANK_HUNG, last, "it never came to where others wait");
        leader_cause(l, age, "rank %u on %s hangs at step %llu, collective %llu", last->rank,
                     l->nodes[last->node].name, (unsigned long long)last->beat.step,
                     (unsigned long long)last->beat.collective);
        leader_proc_kill(l, last, 1);
        killed++;
    }
    return killed;
}

void leader_hang_step(struct core_leader *l)
{
    const struct wire_plan *plan = &l->record.plan;
    uint64_t deadline = leader_step_deadline(l);
    uint64_t age = l->now_ms - l->step_ms;

    if (!l->first_sealed && l->config.deadlines.init_floor > deadline) {
        deadline = l->config.deadlines.init_floor; /* first steps warm up */
        deadline =
            deadline < l->config.deadlines.step_ceil ? deadline : l->config.deadlines.step_ceil;
    }
    for (uint32_t i = 0; i < plan->world; i++) {
        const struct leader_proc *p = leader_proc_find(l, plan->members[i].incarnation);
        if (p && (p->beat.section == BELAY_SECTION_SAVE || p->beat.section == BELAY_SECTION_EVAL) &&
            !proc_is_silent(l, p)) {
            deadline = l->config.deadlines.step_ceil;
        }
        if (p && !l->nodes[p->node].connected) {
            return; /* leases rule over nodes that are away */
        }
    }
    if (age < deadline) {
        return;
    }
    if (hang_culprits(l, age, 0, l->step_hangs > 0) == 0) {
        leader_event(l, CORE_EVENT_HANG_UNKNOWN)->value_ms = age;
        leader_cause(l, age, "no step for %llu ms, and no rank stands out",
                     (unsigned long long)age);
        l->step_hangs++;
    }
}

void leader_hang_load(struct core_leader *l)
{
    uint64_t age = l->now_ms - l->phase_ms;

    if (age < l->config.deadlines.load) {
        return;
    }
    if (hang_culprits(l, age, 1, l->load_hangs > 0) == 0) {
        leader_event(l, CORE_EVENT_HANG_UNKNOWN)->value_ms = age;
        leader_cause(l, age, "loading takes longer than %llu ms", (unsigned long long)age);
    }
    l->load_hangs++;
}
