/* SPDX-License-Identifier: Apache-2.0 */
/* The rules of recovery, looked at from outside: what no single machine can see. */
#include "tests/sim/sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- truth ---- */

uint64_t sim_next_value(uint64_t value, uint64_t step, uint32_t elem)
{
    return bl_mix64(value + step * 0x100000001b3ull + elem);
}

uint64_t sim_value(struct sim *sim, uint64_t step, uint32_t elem)
{
    BL_ASSERT(step < SIM_STEPS_MAX && elem < SIM_ELEMS_MAX);
    if (!sim->truth) {
        sim->truth = sim_alloc(SIM_STEPS_MAX * SIM_ELEMS_MAX, sizeof(*sim->truth));
        for (uint32_t e = 0; e < SIM_ELEMS_MAX; e++) {
            uint64_t value = bl_mix64(e + 1);
            for (uint64_t s = 0; s < SIM_STEPS_MAX; s++) {
                value = s ? sim_next_value(value, s, e) : value;
                sim->truth[s * SIM_ELEMS_MAX + e] = value;
            }
        }
    }
    return sim->truth[step * SIM_ELEMS_MAX + elem];
}

/* ---- generations ---- */

struct sim_generation *sim_generation_of(struct sim *sim, uint64_t generation)
{
    for (uint32_t i = sim->generation_count; i-- > 0;) {
        if (sim->generations[i].generation == generation) {
            return &sim->generations[i];
        }
    }
    return NULL;
}

static uint64_t plan_print(const struct wire_plan *plan)
{
    uint64_t print = bl_mix64(plan->step + 1) ^ plan->world ^ plan->comm_key[0];
    for (uint32_t i = 0; i < plan->world; i++) {
        print = bl_mix64(print ^ plan->members[i].incarnation);
    }
    return print;
}

static int rank_of(const struct sim_generation *g, uint64_t incarnation)
{
    for (uint32_t i = 0; i < g->world; i++) {
        if (g->incarnations[i] == incarnation) {
            return (int)i;
        }
    }
    return -1;
}

/* A replica all of whose ranks are members again: do they have the places that they had? */
static void check_places(struct sim *sim, const struct sim_generation *g,
                         const struct sim_generation *was)
{
    uint32_t copy = was->tp * was->pp;
    for (uint32_t d = 0; d < was->world / copy; d++) {
        uint32_t members = 0;
        uint32_t moved = 0;
        for (uint32_t i = 0; i < copy; i++) {
            int rank = rank_of(g, was->incarnations[d * copy + i]);
            members += rank >= 0;
            moved += rank >= 0 && (uint32_t)rank % copy != i;
        }
        if (members == copy && moved) {
            sim_fail(sim, "layout: generation %llu moves %u ranks of replica %u, which is whole",
                     (unsigned long long)g->generation, moved, d);
        }
    }
}

static void check_layout(struct sim *sim, const struct sim_generation *g)
{
    const struct sim_profile *p = &sim->profile;
    const struct sim_generation *was = sim_generation_of(sim, sim->store.running_generation);
    uint32_t copy = g->tp * g->pp;

    if (g->tp != p->tp || g->pp < 1 || g->pp > p->pp || g->world % copy ||
        (g->pp < p->pp && g->world != copy)) {
        sim_fail(sim, "layout: generation %llu has %u ranks in copies of %u x %u, the job %u x %u",
                 (unsigned long long)g->generation, g->world, g->tp, g->pp, p->tp, p->pp);
    }
    /* A leader that found a plan on its way knows less of who holds what. */
    if (was && was->generation < g->generation && was->pp == g->pp && was->leaders == g->leaders) {
        check_places(sim, g, was);
    }
}

/* Where nothing but hangs goes wrong, who is named has hung since the step began. */
void sim_check_hung(struct sim *sim, const struct core_event *event)
{
    const struct sim_rank *rank = sim_rank_find(sim, event->incarnation);
    if (sim->profile.only_hangs && rank && !rank->hung && sim->now - rank->stopped_ms > 3000) {
        sim_fail(sim, "hang: rank %u is named (%s), and did not hang", event->rank, event->text);
    }
}

void sim_check_plan(struct sim *sim, const struct wire_plan *plan)
{
    const struct wire_record *record = &sim->store.record;
    struct sim_generation *g = sim_generation_of(sim, plan->generation);

    if (record->generation < plan->generation ||
        (record->generation == plan->generation && record->phase < WIRE_PHASE_PLANNED)) {
        sim_fail(sim, "rule 6: plan of generation %llu is out before the store has it",
                 (unsigned long long)plan->generation);
    }
    if (g) {
        if (g->print != plan_print(plan)) {
            sim_fail(sim, "rule 6: two plans of generation %llu",
                     (unsigned long long)plan->generation);
        }
        return;
    }
    sim->generations =
        realloc(sim->generations, (sim->generation_count + 1) * sizeof(*sim->generations));
    BL_ASSERT(sim->generations && plan->world <= 64);
    g = &sim->generations[sim->generation_count++];
    memset(g, 0, sizeof(*g));
    g->generation = plan->generation;
    g->step = plan->step;
    g->fresh = plan->fresh;
    g->world = plan->world;
    g->tp = plan->tp;
    g->pp = plan->pp;
    g->leaders = sim->leaders_begun;
    g->print = plan_print(plan);
    g->begun_max = plan->step;
    g->started_ms = sim->now;
    for (uint32_t i = 0; i < plan->world; i++) {
        g->incarnations[i] = plan->members[i].incarnation;
        g->nodes[i] = (uint32_t)strtoul(plan->members[i].node + 1, NULL, 10);
        g->sealed[i] = plan->step;
    }
    check_layout(sim, g);
}

void sim_check_go(struct sim *sim, uint64_t generation)
{
    if (sim->store.running_generation < generation) {
        sim_fail(sim, "rule 6: go of generation %llu before the store has it",
                 (unsigned long long)generation);
    }
}

/* A rank may have voted before it left, and its vote may count after a later generation runs: one
 * step, void by the line's end. Anything beyond is two generations at once. */
void sim_check_unanimous(struct sim *sim, uint64_t generation, uint64_t step)
{
    const struct sim_generation *g = sim_generation_of(sim, generation);
    if (g && g->over && step > g->voted_max) {
        sim_fail(sim, "rule 7: generation %llu steps to %llu though %llu runs",
                 (unsigned long long)generation, (unsigned long long)step,
                 (unsigned long long)sim->store.running_generation);
    }
}

static void generations_end(struct sim *sim, uint64_t before)
{
    for (uint32_t i = 0; i < sim->generation_count; i++) {
        struct sim_generation *g = &sim->generations[i];
        if (g->over || g->generation >= before) {
            continue;
        }
        g->over = 1;
        for (uint32_t k = 0; k < g->world; k++) {
            g->voted_max = g->voted[k] > g->voted_max ? g->voted[k] : g->voted_max;
        }
    }
}

void sim_check_begin(struct sim *sim, const struct sim_rank *rank, uint64_t generation,
                     uint64_t step)
{
    struct sim_generation *g = sim_generation_of(sim, generation);
    if (!g) {
        sim_fail(sim, "a rank applies in a generation that nobody planned");
        return;
    }
    for (uint32_t i = 0; i < g->world; i++) {
        if (g->sealed[i] + 1 < step) {
            sim_fail(sim,
                     "rule 3: rank %llx applies %llu in generation %llu, rank %u has sealed %llu",
                     (unsigned long long)rank->incarnation, (unsigned long long)step,
                     (unsigned long long)generation, i, (unsigned long long)g->sealed[i]);
        }
    }
    for (uint32_t i = 0; i < g->world; i++) {
        if (g->voted[i] < step) {
            sim_fail(sim, "rule 3: rank %llx applies %llu in generation %llu, rank %u never voted",
                     (unsigned long long)rank->incarnation, (unsigned long long)step,
                     (unsigned long long)generation, i);
        }
    }
    g->begun_max = step > g->begun_max ? step : g->begun_max;
}

void sim_check_parked(struct sim *sim, const struct sim_rank *rank)
{
    if (rank->sealing) {
        sim_fail(sim, "rule 8: rank %llx parks while step %llu is being sealed",
                 (unsigned long long)rank->incarnation, (unsigned long long)rank->sealing_step);
    }
}

/* ---- memory ---- */

uint32_t sim_arena_elem(const struct sim_arena *arena, uint32_t e)
{
    uint32_t base = 0;
    for (uint32_t i = 0; i < arena->extents.extent_count; i++) {
        const struct bl_extent *extent = &arena->extents.extents[i];
        uint32_t count = (uint32_t)bl_extent_elems(extent);
        if (e < base + count) {
            uint32_t first = 0;
            for (uint32_t t = 0; t < extent->tensor; t++) {
                first += (uint32_t)bl_tensor_elems(&arena->extents.tensors[t]);
            }
            if (arena->extents.tensors[extent->tensor].dims == 1) {
                return first + (uint32_t)extent->flat_lo + (e - base);
            }
            uint64_t wide = extent->hi[1] - extent->lo[1];
            uint64_t at = extent->flat_lo + (e - base);
            uint64_t row = extent->lo[0] + at / wide;
            uint64_t columns = arena->extents.tensors[extent->tensor].shape[1];
            return first + (uint32_t)(row * columns + extent->lo[1] + at % wide);
        }
        base += count;
    }
    return 0;
}

void sim_check_arena(struct sim *sim, struct sim_arena *arena)
{
    for (uint32_t k = 0; k < SIM_SLOTS; k++) {
        struct wire_slot_info info;
        wire_slot_read(&arena->slots[k], &info);
        uint64_t check = arena->slots[k].check;
        if (info.state != WIRE_SLOT_SEALED || arena->checked[k] == check) {
            continue;
        }
        for (uint32_t e = 0; e < arena->elems; e++) {
            if (arena->data[k][e] != sim_value(sim, info.step, sim_arena_elem(arena, e))) {
                sim_fail(sim,
                         "rule 5: slot %u of arena %llx says (g%llu, %llu) and holds other bytes",
                         k, (unsigned long long)arena->id, (unsigned long long)info.generation,
                         (unsigned long long)info.step);
                return;
            }
        }
        arena->checked[k] = check;
    }
}

/* A source that a plan in force names must be there, unless its machine lost its memory. */
void sim_check_source(struct sim *sim, const struct wire_copy *copy, uint64_t generation)
{
    const struct sim_generation *g = sim_generation_of(sim, generation);
    const struct sim_node *node = &sim->nodes[strtoul(copy->node + 1, NULL, 10)];
    if (g && sim->store.record.generation == generation && node->up && node->member &&
        node->crashed_ms < g->started_ms) {
        sim_fail(sim, "rule 8: a source of generation %llu on %s is gone",
                 (unsigned long long)generation, copy->node);
    }
}

/* ---- the store ---- */

static int generation_is_over(struct sim *sim, const struct wire_plan *plan)
{
    for (uint32_t i = 0; i < plan->world; i++) {
        struct sim_rank *rank = sim_rank_find(sim, plan->members[i].incarnation);
        if (!rank || !rank->alive) {
            return 1;
        }
        if (rank->session && wire_session_generation(rank->session) > plan->generation) {
            return 1;
        }
    }
    return 0;
}

/* Did all memory of the former generation survive, and can it be reached? */
static int memory_is_whole(struct sim *sim, const struct sim_generation *g)
{
    for (uint32_t i = 0; i < g->world; i++) {
        const struct sim_node *node = &sim->nodes[g->nodes[i]];
        if (!node->up || !node->member || node->crashed_ms >= g->started_ms ||
            !sim_can_hear(sim, g->nodes[i], sim->head) || !node->connection ||
            sim->now - node->linked_ms < 500) {
            return 0;
        }
    }
    return 1;
}

static int is_admissible(const struct wire_record *record, uint64_t generation, uint64_t step)
{
    for (uint32_t i = 0; i < record->line_end_count; i++) {
        if (record->line_ends[i].generation > generation && step > record->line_ends[i].step) {
            return 0;
        }
    }
    return 1;
}

/* Copies that a plan names must not be of a line that ended before them. */
static void check_copies(struct sim *sim, const struct wire_record *was,
                         const struct wire_plan *plan)
{
    for (uint32_t i = 0; i < plan->copy_count; i++) {
        const struct sim_arena *arena = sim_arena_find(sim, plan->copies[i].arena);
        struct wire_slot_info info;
        if (!arena) {
            continue;
        }
        wire_slot_read(&arena->slots[plan->copies[i].slot], &info);
        if (info.state == WIRE_SLOT_SEALED && info.step == plan->step &&
            !is_admissible(was, info.generation, info.step)) {
            sim_fail(sim, "lines: generation %llu loads (g%llu, %llu), which a plan voided",
                     (unsigned long long)plan->generation, (unsigned long long)info.generation,
                     (unsigned long long)info.step);
        }
    }
}

void sim_check_running(struct sim *sim, const struct wire_record *was, const struct wire_record *is)
{
    if (is->phase == WIRE_PHASE_PLANNED) {
        check_copies(sim, was, &is->plan);
    }
    if (is->phase == WIRE_PHASE_PLANNED && was->phase == WIRE_PHASE_OPEN && was->plan.world) {
        if (!generation_is_over(sim, &was->plan)) {
            sim_fail(sim, "rule 7: generation %llu is planned, and %llu may still step",
                     (unsigned long long)is->generation, (unsigned long long)was->plan.generation);
        }
        const struct sim_generation *g = sim_generation_of(sim, was->plan.generation);
        if (g && memory_is_whole(sim, g) && is->plan.step + 1 < g->begun_max) {
            sim_fail(sim, "promise: generation %llu goes back from %llu to %llu",
                     (unsigned long long)is->generation, (unsigned long long)g->begun_max,
                     (unsigned long long)is->plan.step);
        }
        if (g && g->begun_max > is->plan.step) {
            sim->steps_lost += g->begun_max - is->plan.step;
        }
    }
    if (is->phase == WIRE_PHASE_RUNNING && was->phase != WIRE_PHASE_RUNNING) {
        sim->recoveries += is->generation > 1;
        generations_end(sim, is->generation);
    }
}

void sim_check_commit(struct sim *sim, const struct core_commit *commit,
                      const struct sim_attempt *attempt, uint64_t epoch)
{
    const struct wire_record *record = &sim->store.record;
    /* A leader that was replaced after the store gave its word may still be at it: its checkpoint
     * is a true one, and line ends say whether it may be used. */
    int is_former = epoch < sim->store.epoch;
    int is_promised = commit->root < record->root_count &&
                      record->roots[commit->root].committing_attempt == commit->attempt;
    if (!attempt->worded || (!is_former && !is_promised)) {
        sim_fail(sim, "rule 7: step %llu is committed without the store's word",
                 (unsigned long long)commit->step);
    }
    if (!is_former && !is_admissible(record, commit->generation, commit->step)) {
        sim_fail(sim, "rule 7: step %llu of generation %llu is committed, a plan voided it",
                 (unsigned long long)commit->step, (unsigned long long)commit->generation);
    }
    for (uint32_t e = 0; attempt && e < sim->profile.elems; e++) {
        if (!attempt->has[e] || attempt->values[e] != sim_value(sim, commit->step, e)) {
            sim_fail(sim, "checkpoint of step %llu: element %u is %s",
                     (unsigned long long)commit->step, e, attempt->has[e] ? "wrong" : "missing");
            return;
        }
    }
}

void sim_check_end(struct sim *sim)
{
    const struct wire_record *record = &sim->store.record;
    if (sim->verdict == WIRE_VERDICT_SAVE_FAILED && sim->profile.engine_fail) {
        return; /* three tries met the engine's bad luck: said aloud, which is right */
    }
    for (uint32_t r = 0; r < sim->profile.roots; r++) {
        if (sim->verdict == WIRE_VERDICT_SAVE_FAILED && sim->now < sim->hang_until[r] + 10000) {
            return; /* so it is when a root hangs through all tries */
        }
    }
    if (sim->verdict != WIRE_VERDICT_FINISHED) {
        sim_fail(sim, "the run ends with verdict %d: %s", (int)sim->verdict, record->cause);
        return;
    }
    if (record->committed_step != sim->profile.steps) {
        sim_fail(sim, "the run ends at %u, committed is %lld", sim->profile.steps,
                 (long long)record->committed_step);
        return;
    }
    for (uint32_t r = 0; r < record->root_count && !sim->profile.engine_fail; r++) {
        if (record->roots[r].committed_step != sim->profile.steps &&
            sim->now > sim->hang_until[r] + 10000) {
            sim_fail(sim, "the run ends at %u, root %u has %lld", sim->profile.steps, r,
                     (long long)record->roots[r].committed_step);
            return;
        }
    }
    sim_apart_check_end(sim);
    for (uint32_t i = 0; i < sim->disk_count; i++) {
        const struct sim_checkpoint *c = &sim->disk[i];
        for (uint32_t e = 0; e < sim->profile.elems; e++) {
            if (c->values[e] != sim_value(sim, c->info.step, e)) {
                sim_fail(sim, "checkpoint %s holds other bytes", c->info.dir);
                return;
            }
        }
    }
}
