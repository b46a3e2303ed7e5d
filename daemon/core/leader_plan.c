/* SPDX-License-Identifier: Apache-2.0 */
/*
 * PLANNED: members, ranks, step and sources are fixed; ranks load and connect. When all are ready
 * and their digests add up to the plan's, go.
 */
#include "daemon/core/leader_state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int leader_proc_is_member(const struct core_leader *l, const struct leader_proc *p)
{
    return l->record.plan.world > 0 && p->seat_generation == l->record.plan.generation;
}

void leader_plan_seat(struct core_leader *l)
{
    const struct wire_plan *plan = &l->record.plan;
    for (uint32_t i = 0; i < plan->world; i++) {
        struct leader_proc *p = leader_proc_find(l, plan->members[i].incarnation);
        if (p) {
            p->seat = i;
            p->seat_generation = plan->generation;
        }
    }
}

/* ---- who sits where ---- */

struct leader_layout_job leader_job_layout(const struct core_leader *l)
{
    const struct core_leader_config *c = &l->config;
    struct leader_layout_job job = {.tp = c->tp ? c->tp : 1, .pp = c->pp ? c->pp : 1};

    job.pp_min = c->pp_min < job.pp ? c->pp_min : job.pp;
    job.pp_min = job.pp_min ? job.pp_min : 1;
    job.dp_max = c->ranks / (job.tp * job.pp);
    job.dp_max = c->lanes && c->lanes < job.dp_max ? c->lanes : job.dp_max;
    return job;
}

struct leader_layout leader_plan_layout(const struct core_leader *l)
{
    const struct wire_plan *plan = &l->record.plan;
    struct leader_layout layout = {.tp = plan->tp ? plan->tp : 1, .pp = plan->pp ? plan->pp : 1};
    layout.dp = plan->world / (layout.tp * layout.pp);
    return layout;
}

void leader_layout_text(char ret[LEADER_LAYOUT_TEXT], const struct leader_layout *layout)
{
    snprintf(ret, LEADER_LAYOUT_TEXT, "dp %u x tp %u x pp %u", layout->dp, layout->tp, layout->pp);
}

int leader_plan_takes(const struct core_leader *l, const struct leader_proc *p)
{
    return leader_proc_is_reachable(l, p) && !p->refused && p->report.state == WIRE_RANK_PARKED &&
           p->report.generation >= l->record.generation;
}

struct plan_seat {
    const struct leader_proc *proc;
    const char *node;
};

static int seat_by_node(const void *a, const void *b)
{
    const struct plan_seat *x = a;
    const struct plan_seat *y = b;
    int by_node = strcmp(x->node, y->node);
    if (by_node) {
        return by_node;
    }
    return x->proc->incarnation < y->proc->incarnation
               ? -1
               : x->proc->incarnation > y->proc->incarnation;
}

/* Parked processes in order of rank, as many as the layout takes. NULL: not enough for any. */
static const struct leader_proc **plan_seats(const struct core_leader *l,
                                             struct leader_layout *ret_shape)
{
    struct leader_layout_job job = leader_job_layout(l);
    struct leader_layout former = {.tp = job.tp, .pp = l->shape.dp ? l->shape.pp : job.pp};
    struct plan_seat *found = core_alloc(l->proc_count, sizeof(*found));
    struct leader_layout_proc *procs = core_alloc(l->proc_count, sizeof(*procs));
    const struct leader_proc **seats = NULL;
    uint32_t count = 0;

    for (uint32_t i = 0; i < l->proc_count; i++) {
        if (leader_plan_takes(l, &l->procs[i])) {
            found[count++] = (struct plan_seat){&l->procs[i], l->nodes[l->procs[i].node].name};
        }
    }
    qsort(found, count, sizeof(*found), seat_by_node);
    for (uint32_t i = 0; i < count; i++) {
        const struct leader_proc *p = found[i].proc;
        int is_same = i > 0 && p->node == found[i - 1].proc->node;
        procs[i].node = i == 0 ? 0 : procs[i - 1].node + !is_same;
        procs[i].rank = p->rank;
        procs[i].held = l->ran_generation && p->ran_generation == l->ran_generation;
    }
    *ret_shape = leader_layout_shape(&job, count);
    uint32_t world = leader_layout_world(ret_shape);
    if (world) {
        uint32_t *order = core_alloc(world, sizeof(*order));
        seats = core_alloc(world, sizeof(struct leader_proc *));
        leader_layout_seats(&job, &former, ret_shape, procs, count, order);
        for (uint32_t rank = 0; rank < world; rank++) {
            seats[rank] = found[order[rank]].proc;
        }
        free(order);
    }
    free(procs);
    free(found);
    return seats;
}

/* Appends the end of all older lines at `step`. Ends that the new one covers go, so that both
 * columns ascend. */
static void plan_line_end(struct wire_record *record, uint64_t generation, uint64_t step)
{
    uint32_t kept = record->line_end_count;
    while (kept > 0 && record->line_ends[kept - 1].step >= step) {
        kept--;
    }
    struct wire_line_end *ends = core_alloc(kept + 1, sizeof(*ends));
    if (kept) {
        memcpy(ends, record->line_ends, kept * sizeof(*ends));
    }
    ends[kept] = (struct wire_line_end){.generation = generation, .step = step};
    free(record->line_ends);
    record->line_ends = ends;
    record->line_end_count = kept + 1;
}

static void plan_members(const struct core_leader *l, const struct leader_proc *const *seats,
                         const struct leader_layout *shape, struct wire_plan *plan)
{
    plan->world = leader_layout_world(shape);
    plan->tp = shape->tp;
    plan->pp = shape->pp;
    plan->members = core_alloc(plan->world, sizeof(*plan->members));
    for (uint32_t i = 0; i < plan->world; i++) {
        const struct wire_rank_report *r = &seats[i]->report;
        struct wire_member *member = &plan->members[i];
        member->incarnation = seats[i]->incarnation;
        memcpy(member->node, l->nodes[seats[i]->node].name, sizeof(member->node));
        memcpy(member->endpoint, r->endpoint, sizeof(member->endpoint));
        memcpy(member->vote_addr, r->vote_addr, sizeof(member->vote_addr));
    }
}

static void plan_source(const struct core_leader *l, const struct leader_pick *pick,
                        struct wire_plan *plan)
{
    plan->step = pick->step;
    plan->copy_count = pick->copy_count;
    plan->copies = core_alloc(pick->copy_count, sizeof(*plan->copies));
    if (pick->copy_count) {
        memcpy(plan->copies, pick->copies, pick->copy_count * sizeof(*plan->copies));
    }
    if (pick->checkpoint && pick->checkpoint->root < l->config.root_count) {
        snprintf(plan->disk_root, sizeof(plan->disk_root), "%s",
                 l->roots[pick->checkpoint->root].path);
        memcpy(plan->disk_dir, pick->checkpoint->dir, sizeof(plan->disk_dir));
        for (uint32_t i = 0; i < pick->other_count; i++) {
            struct wire_place *place = &plan->places[plan->place_count++];
            snprintf(place->root, sizeof(place->root), "%s", l->roots[pick->others[i]->root].path);
            memcpy(place->dir, pick->others[i]->dir, sizeof(place->dir));
        }
    }
    if (plan->disk_dir[0]) {
        plan->holder_count = leader_apart_holders(l, &plan->holders);
    }
    plan->digest_known = (uint32_t)pick->digest_known;
    plan->digest = pick->digest;
}

/* The newest step that any arena holds a sealed part of: with it a leader that was started anew,
 * and never saw the steps, knows what is lost. */
static uint64_t plan_newest(const struct core_leader *l)
{
    uint64_t newest = l->lost_from;
    for (uint32_t i = 0; i < l->node_count; i++) {
        const struct wire_report *report = &l->nodes[i].report;
        for (uint32_t a = 0; a < report->arena_count; a++) {
            for (uint32_t k = 0; k < report->arenas[a].slot_count; k++) {
                const struct wire_slot_info *slot = &report->arenas[a].slots[k];
                if (slot->state == WIRE_SLOT_SEALED && slot->step > newest &&
                    leader_copy_is_admissible(&l->record, slot->generation, slot->step)) {
                    newest = slot->step;
                }
            }
        }
    }
    return newest;
}

void leader_plan_send(struct core_leader *l, const struct leader_pick *pick, int fresh)
{
    struct leader_layout shape;
    const struct leader_proc **seats = plan_seats(l, &shape);
    BL_ASSERT(seats);

    struct wire_record *next = leader_change_begin(l, LEADER_PLAN);
    struct wire_plan plan = {.generation = next->generation,
                             .line = next->line,
                             .fresh = fresh ? 1 : 0,
                             .save_every = l->config.root_count ? l->roots[0].interval : 0,
                             .slots = 2 + (l->config.root_count ? l->config.root_count : 1)};
    plan_members(l, seats, &shape, &plan);
    if (!fresh) {
        plan_source(l, pick, &plan);
        next->state_elems = next->state_elems ? next->state_elems : pick->state_elems;
    }
    uint64_t secret[4] = {l->config.secret, leader_random(l), plan.generation,
                          l->config.incarnation};
    plan.comm_key[0] = bl_xxh3(secret, sizeof(secret));
    plan.comm_key[1] = bl_xxh3(secret, sizeof(secret) - 8) ^ plan.comm_key[0];
    wire_plan_close(&next->plan);
    next->plan = plan;
    next->phase = WIRE_PHASE_PLANNED;
    next->function_id = seats[0]->report.function_id;
    next->probe = seats[0]->report.probe;
    plan_line_end(next, plan.generation, plan.step);
    leader_record_newest(next);
    l->times.parked_ms = l->now_ms - l->times.cause_ms;
    uint64_t newest = plan_newest(l);
    l->times.steps_lost = newest > plan.step ? newest - plan.step : 0;
    l->abandon = 0;
    free(seats);
    leader_change_send(l);
}

/* ---- waiting for READY ---- */

/* Is the member ready, with its slot of s* seen in the newest report? */
static int member_is_ready(const struct core_leader *l, const struct leader_proc *p)
{
    const struct wire_plan *plan = &l->record.plan;
    if (!p || p->life != LEADER_LIVE || p->report.state != WIRE_RANK_READY ||
        p->report.generation != plan->generation) {
        return 0;
    }
    const struct wire_arena_info *arena = leader_arena_find(l, p->node, p->report.arena);
    for (uint32_t k = 0; arena && arena->extents.extent_count && k < arena->slot_count; k++) {
        if (arena->slots[k].state == WIRE_SLOT_SEALED && arena->slots[k].step == plan->step) {
            return 1;
        }
    }
    return 0;
}

/* Does what all members have loaded add up to the plan's digest? Replicas that hold the same (ZeRO
 * 0) count once, and must be the same. */
static int plan_digest_is_right(const struct core_leader *l)
{
    const struct wire_plan *plan = &l->record.plan;
    struct leader_piece *pieces = core_alloc(plan->world, sizeof(*pieces));
    struct bl_state_digest sum;

    for (uint32_t i = 0; i < plan->world; i++) {
        const struct leader_proc *p = leader_proc_find(l, plan->members[i].incarnation);
        const struct wire_arena_info *arena = leader_arena_find(l, p->node, p->report.arena);
        pieces[i] =
            (struct leader_piece){leader_arena_key(l, p->node, arena), p->report.ready_digest};
    }
    int is_right = leader_pieces_sum(pieces, plan->world, &sum) &&
                   (!plan->digest_known || bl_state_digest_equal(&sum, &plan->digest));
    free(pieces);
    return is_right;
}

static void plan_digest_differs(struct core_leader *l)
{
    const struct wire_plan *plan = &l->record.plan;
    leader_event(l, CORE_EVENT_DIGEST_DIFFERS)->step = plan->step;
    leader_cause(l, 0, "the loaded state's digest differs from step %llu's",
                 (unsigned long long)plan->step);
    if (l->digest_failed_step == plan->step + 1 && l->bad_step_count < LEADER_BAD_MAX) {
        l->bad_steps[l->bad_step_count++] = plan->step;
        leader_event(l, CORE_EVENT_MEMORY_BAD)->step = plan->step;
    }
    l->digest_failed_step = plan->step + 1;
}

static void plan_go(struct core_leader *l)
{
    uint64_t named = 0;
    uint64_t elems = l->record.state_elems ? 0 : leader_members_elems(l, &named);
    if (named > elems) {
        char text[WIRE_TEXT_MAX];
        snprintf(text, sizeof(text),
                 "ranks name %llu elements of a state that has %llu: parts may be the same on "
                 "several ranks, but not overlap otherwise",
                 (unsigned long long)named, (unsigned long long)elems);
        leader_end_send(l, WIRE_VERDICT_REFUSED, text);
        return;
    }
    struct wire_record *next = leader_change_begin(l, LEADER_GO);
    next->phase = WIRE_PHASE_RUNNING;
    next->state_elems = next->state_elems ? next->state_elems : elems;
    l->times.ready_ms = l->now_ms - l->times.cause_ms;
    leader_change_send(l);
}

void leader_plan_step(struct core_leader *l)
{
    const struct wire_plan *plan = &l->record.plan;
    uint32_t ready = 0;

    leader_members_watch(l);
    for (uint32_t i = 0; i < plan->world; i++) {
        const struct leader_proc *p = leader_proc_find(l, plan->members[i].incarnation);
        ready += (uint32_t)member_is_ready(l, p);
    }
    leader_wait_set(l, CORE_WAIT_LOAD, "%u of %u ranks to load and connect", plan->world - ready,
                    plan->world);
    if (!l->cause_pending && ready == plan->world && !plan_digest_is_right(l)) {
        plan_digest_differs(l);
    }
    if (!l->cause_pending && ready < plan->world) {
        leader_hang_load(l);
    }
    if (l->cause_pending) {
        leader_open_send(l);
    } else if (ready == plan->world && leader_change_is_free(l)) {
        plan_go(l);
    }
}
