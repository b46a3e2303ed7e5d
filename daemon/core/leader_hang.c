/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hangs: no step for longer than steps take. The culprit is the rank whose control thread is silent
 * (it is stopped, or its machine is), else the one that never entered what the others wait in. If
 * none stands out, the first time a new generation is opened without a kill; the second time the
 * likeliest one is killed.
 *
 *      deadline = 5 x the longest of the newest step times, at least step_floor, at most step_ceil
 *
 * Who waits is a victim, whatever it waits in: a collective, a message of another stage, the vote.
 * Of the ranks in the oldest step the only one that does not wait is the culprit. When several do
 * not, sequence numbers tell, but only between ranks of one pipeline stage: those do the same calls
 * in the same order, while another stage's count differs by what a stage has to do.
 *
 *      stage 0   F F F F . . . . .       . waits for a gradient from stage 1
 *      stage 1   . F F #                 # hangs inside its third pass: it alone does not wait
 *      stage 2   . . F F B . . . .       . waits for an activation from stage 1
 */
#include "daemon/core/leader_state.h"

#include <stdio.h>
#include <stdlib.h>

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

/* Of one stage: is `a` further behind than `b` in what they both do? */
static int proc_is_behind(const struct leader_proc *a, const struct leader_proc *b)
{
    if (a->beat.collective != b->beat.collective) {
        return a->beat.collective < b->beat.collective;
    }
    return a->beat.waiting < b->beat.waiting;
}

struct hang_stage {
    struct leader_proc *last; /* furthest behind, of the ranks in the oldest step; NULL none */
    uint32_t equals;          /* as far behind as it, itself included */
    uint32_t count;
};

struct hang_view {
    uint32_t tp, pp, world;
    int is_load;   /* steps and numbers are of before, or of nothing: they tell nothing */
    uint64_t step; /* the oldest that a suspect is in */
    uint32_t busy; /* suspects in it that do not wait */
    struct leader_proc *first; /* one of those */
    struct leader_proc *likely;
    struct hang_stage *stages; /* [pp]; owned */
};

static uint32_t hang_stage_of(const struct hang_view *v, const struct leader_proc *p)
{
    return p->seat / v->tp % v->pp;
}

/* Who is killed when nobody stands out again. */
static int hang_is_likelier(const struct hang_view *v, const struct leader_proc *a,
                            const struct leader_proc *b)
{
    if (a->beat.waiting != b->beat.waiting) {
        return !a->beat.waiting;
    }
    if (!v->is_load && hang_stage_of(v, a) == hang_stage_of(v, b) &&
        a->beat.collective != b->beat.collective) {
        return a->beat.collective < b->beat.collective;
    }
    return a->beat.progress_age_ms > b->beat.progress_age_ms;
}

/* The member of this seat, when it may be what the others wait for. */
static struct leader_proc *hang_suspect(const struct core_leader *l, uint32_t seat,
                                        int only_unready)
{
    const struct wire_plan *plan = &l->record.plan;
    struct leader_proc *p = leader_proc_find(l, plan->members[seat].incarnation);

    if (!p || p->life != LEADER_LIVE || !l->nodes[p->node].connected ||
        (only_unready && p->report.state == WIRE_RANK_READY &&
         p->report.generation == plan->generation)) {
        return NULL;
    }
    return p;
}

static void hang_look(const struct core_leader *l, int only_unready, struct hang_view *v)
{
    struct leader_layout layout = leader_plan_layout(l);

    *v = (struct hang_view){.tp = layout.tp,
                            .pp = layout.pp,
                            .world = l->record.plan.world,
                            .is_load = only_unready,
                            .step = UINT64_MAX,
                            .stages = core_alloc(layout.pp, sizeof(*v->stages))};
    for (uint32_t i = 0; i < v->world; i++) {
        const struct leader_proc *p = hang_suspect(l, i, only_unready);
        v->step = p && p->beat.step < v->step ? p->beat.step : v->step;
    }
    for (uint32_t i = 0; i < v->world; i++) {
        struct leader_proc *p = hang_suspect(l, i, only_unready);
        if (!p || (p->beat.step != v->step && !v->is_load)) {
            continue;
        }
        struct hang_stage *stage = &v->stages[hang_stage_of(v, p)];
        stage->count++;
        if (!stage->last || proc_is_behind(p, stage->last)) {
            stage->last = p;
            stage->equals = 1;
        } else if (!proc_is_behind(stage->last, p)) {
            stage->equals++;
        }
        v->busy += !p->beat.waiting;
        v->first = p->beat.waiting ? v->first : p;
        v->likely = !v->likely || hang_is_likelier(v, p, v->likely) ? p : v->likely;
    }
}

/* The one that never entered what the others wait in, or NULL: nobody stands out. */
static struct leader_proc *hang_culprit(const struct hang_view *v)
{
    struct leader_proc *culprit = NULL;
    uint32_t found = 0;

    if (v->world < 2) {
        return NULL;
    }
    if (v->busy == 1) {
        return v->first;
    }
    for (uint32_t s = 0; s < v->pp && !v->is_load; s++) {
        const struct hang_stage *stage = &v->stages[s];
        if (stage->count > 1 && stage->equals == 1 && !stage->last->beat.waiting) {
            culprit = stage->last;
            found++;
        }
    }
    return found == 1 ? culprit : NULL;
}

/* Kills silent ranks; without any, the culprit, if one stands out (or, if `force`, the likeliest).
 * How many were killed. */
static uint32_t hang_culprits(struct core_leader *l, uint64_t age, int only_unready, int force)
{
    struct hang_view view;
    uint32_t killed = 0;

    for (uint32_t i = 0; i < l->record.plan.world; i++) {
        struct leader_proc *p = hang_suspect(l, i, only_unready);
        if (p && proc_is_silent(l, p)) {
            leader_event_proc(l, CORE_EVENT_RANK_HUNG, p, "no sign of life");
            leader_cause(l, age, "rank %u on %s hangs: no sign of life", p->rank,
                         l->nodes[p->node].name);
            leader_proc_kill(l, p, 1);
            killed++;
        }
    }
    if (killed) {
        return killed;
    }
    hang_look(l, only_unready, &view);
    struct leader_proc *culprit = hang_culprit(&view);
    int stands_out = culprit != NULL;
    culprit = !culprit && force ? view.likely : culprit;
    free(view.stages);
    if (culprit) {
        leader_event_proc(l, CORE_EVENT_RANK_HUNG, culprit,
                          stands_out ? "it never came to where others wait"
                                     : "nobody stands out again: it is the likeliest");
        leader_cause(l, age, "rank %u on %s hangs at step %llu, collective %llu", culprit->rank,
                     l->nodes[culprit->node].name, (unsigned long long)culprit->beat.step,
                     (unsigned long long)culprit->beat.collective);
        leader_proc_kill(l, culprit, 1);
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
    if (age < deadline || !leader_change_is_free(l)) {
        return; /* what was judged is on its way to the store: not twice */
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

    if (age < l->config.deadlines.load || !leader_change_is_free(l)) {
        return;
    }
    if (hang_culprits(l, age, 1, l->load_hangs > 0) == 0) {
        leader_event(l, CORE_EVENT_HANG_UNKNOWN)->value_ms = age;
        leader_cause(l, age, "loading takes longer than %llu ms", (unsigned long long)age);
    }
    l->load_hangs++;
}
