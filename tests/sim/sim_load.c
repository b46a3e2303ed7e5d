/* SPDX-License-Identifier: Apache-2.0 */
/* Loading: own slot, copies in memory near and far, the disk. Half of it now, half later, so that a
 * source that changes meanwhile is noticed. */
#include "tests/sim/sim.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Element by logical index out of the plan's copies. 0, or what went wrong. */
static int load_elem(struct sim *sim, const struct sim_rank *rank, const struct wire_plan *plan,
                     uint32_t logical, uint64_t *ret)
{
    for (uint32_t i = 0; i < plan->copy_count; i++) {
        const struct wire_copy *copy = &plan->copies[i];
        struct sim_arena *arena = sim_arena_find(sim, copy->arena);
        uint32_t node = (uint32_t)strtoul(copy->node + 1, NULL, 10);
        struct wire_slot_info info;
        if (!arena) {
            sim_check_source(sim, copy, plan->generation);
            continue;
        }
        wire_slot_read(&arena->slots[copy->slot], &info);
        if (info.state != WIRE_SLOT_SEALED || info.step != plan->step) {
            sim_check_source(sim, copy, plan->generation);
            continue;
        }
        if (!sim_can_hear(sim, rank->node, node) || !sim->nodes[node].member) {
            continue;
        }
        for (uint32_t e = 0; e < arena->elems; e++) {
            if (sim_arena_elem(arena, e) == logical) {
                *ret = arena->data[copy->slot][e];
                return 0;
            }
        }
    }
    return BL_EPEER;
}

static int load_range(struct sim *sim, struct sim_rank *rank, uint32_t from, uint32_t to)
{
    const struct wire_plan *plan = wire_session_plan(rank->session, NULL);
    struct sim_arena *arena = rank->arena;
    int rc = 0;

    for (uint32_t e = from; e < to && rc == 0; e++) {
        uint32_t logical = sim_arena_elem(arena, e);
        uint64_t *out = &arena->data[rank->next_slot][e];
        if (plan->fresh) {
            *out = sim_value(sim, 0, logical);
        } else if (plan->copy_count) {
            rc = load_elem(sim, rank, plan, logical, out);
        }
    }
    if (!plan->fresh && plan->copy_count == 0) {
        sim_disk_load(sim, plan, arena, (uint32_t)rank->next_slot, &rc);
    }
    return rc;
}

static void load_connect(struct sim *sim, struct sim_rank *rank, int rc)
{
    struct bl_state_digest digest = {{0, 0}};
    if (rc == 0) {
        bl_extent_list_digest(&rank->arena->extents, rank->arena->data[rank->next_slot], &digest);
    }
    rank->prev_slot = rank->next_slot;
    int said = wire_session_loaded(rank->session, rc, "loading failed", &digest);
    if (said == BL_EGEN || rc < 0) {
        sim_rank_park(sim, rank);
        return;
    }
    if (said < 0) {
        sim_fail(sim, "loaded: %d", said);
        return;
    }
    uint32_t index = 0;
    struct sim_generation *g = sim_generation_of(sim, rank->generation);
    wire_session_plan(rank->session, &index);
    rank->at = SIM_CONNECT;
    rank->progress_ms = sim->now;
    rank->waiting = 1;
    g->connected[index] = 1;
    sim_barriers(sim);
    for (uint32_t i = 0; i < g->world; i++) {
        struct sim_rank *peer = sim_rank_find(sim, g->incarnations[i]);
        if (!peer || !peer->alive) {
            sim_comm_error(sim, rank, "a peer is gone");
            return;
        }
    }
}

static void on_loaded(struct sim *sim, struct sim_event *event)
{
    struct sim_rank *rank = sim_main_of(sim, event);
    if (!rank || rank->at != SIM_LOAD || sim_aimed(sim, rank, SIM_AT_MID_LOAD)) {
        return;
    }
    const struct wire_plan *plan = wire_session_plan(rank->session, NULL);
    if (!plan) {
        return;
    }
    int rc = load_range(sim, rank, rank->arena->elems / 2, rank->arena->elems);
    if (rc == 0) {
        struct bl_state_digest digest = {{0, 0}};
        bl_extent_list_digest(&rank->arena->extents, rank->arena->data[rank->next_slot], &digest);
        rc = wire_session_sealed(rank->session, plan->step, &digest);
    }
    load_connect(sim, rank, rc);
    sim_rank_drain(sim, rank);
}

static void on_found(struct sim *sim, struct sim_event *event)
{
    struct sim_rank *rank = sim_main_of(sim, event);
    if (rank && rank->at == SIM_LOAD && wire_session_plan(rank->session, NULL)) {
        load_connect(sim, rank, 0);
        sim_rank_drain(sim, rank);
    }
}

void sim_rank_load(struct sim *sim, struct sim_rank *rank)
{
    uint32_t index = 0;
    const struct wire_plan *plan = wire_session_plan(rank->session, &index);
    struct sim_node *node = &sim->nodes[rank->node];
    struct sim_arena *fresh = sim_arena_make(sim, node, rank->incarnation, index, plan);

    if (rank->arena && bl_extent_list_equal(&rank->arena->extents, &fresh->extents)) {
        node->arena_count--; /* the layout is unchanged: the arena stays */
        sim_arena_free(fresh);
    } else {
        rank->arena = fresh;
    }
    wire_session_arena_set(rank->session, rank->arena->id, rank->arena->slots,
                           2 + sim->profile.roots);
    int found = plan->fresh ? -ENOENT : wire_session_slot_find(rank->session, plan->step);
    if (found >= 0) {
        rank->next_slot = found;
        sim_main_later(sim, rank, 1 + sim_below(sim, 5), on_found);
        return;
    }
    uint32_t slot = 0;
    int rc = wire_session_slot_begin(rank->session, plan->step, &slot);
    if (rc < 0) {
        sim_fail(sim, "rank %llx: no slot to load %llu: %d", (unsigned long long)rank->incarnation,
                 (unsigned long long)plan->step, rc);
        return;
    }
    rank->next_slot = (int)slot;
    rc = load_range(sim, rank, 0, rank->arena->elems / 2);
    if (rc < 0) {
        load_connect(sim, rank, rc);
        return;
    }
    sim_main_later(sim, rank, 2 + sim_below(sim, sim_chance(sim, 200) ? 200 : 30), on_loaded);
}
