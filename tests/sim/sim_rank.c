/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A rank: a real session, a main thread that trains, a thread that seals. The main thread's course
 * is a chain of events that carry a token; whatever turns it (a new generation, an error) takes a
 * new token, so that what was planned before does not happen.
 */
#include "tests/sim/sim.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct sim_rank *sim_rank_find(struct sim *sim, uint64_t incarnation)
{
    for (uint32_t i = sim->rank_count; i-- > 0;) {
        if (sim->ranks[i]->incarnation == incarnation) {
            return sim->ranks[i];
        }
    }
    return NULL;
}

void sim_rank_free(struct sim_rank *rank)
{
    wire_session_free(rank->session);
    free(rank);
}

/* ---- the main thread ---- */

void sim_main_later(struct sim *sim, struct sim_rank *rank, uint64_t delay, sim_fn fn)
{
    sim_later(sim, delay, fn, rank->index, rank->token);
}

/* The rank of a main-thread event, or NULL when it does not count any more (or not yet: a stopped
 * rank's events come later). */
struct sim_rank *sim_main_of(struct sim *sim, struct sim_event *event)
{
    struct sim_rank *rank = sim->ranks[event->a];
    if (!rank->alive || rank->token != event->b) {
        return NULL;
    }
    if (rank->stopped || rank->hung) {
        sim_later(sim, 20, event->fn, event->a, event->b);
        return NULL;
    }
    return rank;
}

void sim_rank_progress(struct sim *sim, struct sim_rank *rank, uint32_t section, uint32_t waiting)
{
    rank->section = section;
    rank->waiting = waiting;
    rank->progress_ms = sim->now;
}

static void rank_goto(struct sim_rank *rank, enum sim_main at)
{
    rank->at = at;
    rank->token++;
}

int sim_rank_in(const struct sim_generation *g, const struct sim_rank *rank)
{
    for (uint32_t i = 0; i < g->world; i++) {
        if (g->incarnations[i] == rank->incarnation) {
            return (int)i;
        }
    }
    return -1;
}

static void main_vote(struct sim *sim, struct sim_rank *rank)
{
    uint32_t flags = rank->step >= sim->profile.steps ? BELAY_VOTE_FINAL : 0;
    rank->at = SIM_VOTE;
    int rc = wire_session_vote(rank->session, rank->step, flags, sim->now);
    struct sim_generation *g = sim_generation_of(sim, rank->generation);
    int at = g && rc == 0 ? sim_rank_in(g, rank) : -1;
    if (at >= 0) {
        g->voted[at] = rank->step;
    }
    rank->waiting = rc == 0;
    if (rc == BL_EGEN) {
        sim_rank_park(sim, rank);
    } else if (rc == BL_ESTOPPED) {
        sim_rank_leave(sim, rank);
    } else if (rc != 0 && rc != -EAGAIN) {
        sim_fail(sim, "vote for %llu: %d", (unsigned long long)rank->step, rc);
    }
}

static void on_collective_done(struct sim *sim, struct sim_event *event)
{
    struct sim_rank *rank = sim_main_of(sim, event);
    if (rank && rank->at == SIM_COLLECTIVE) {
        sim_rank_progress(sim, rank, BELAY_SECTION_STEP, 0);
        main_vote(sim, rank);
        sim_rank_drain(sim, rank);
    }
}

static void on_connected(struct sim *sim, struct sim_event *event)
{
    struct sim_rank *rank = sim_main_of(sim, event);
    if (!rank || rank->at != SIM_CONNECT || sim_aimed(sim, rank, SIM_AT_CONNECT)) {
        return;
    }
    int rc = wire_session_ready(rank->session);
    rank->at = SIM_READY;
    if (rc == BL_EGEN) {
        sim_rank_park(sim, rank);
    } else if (rc == BL_ESTOPPED) {
        sim_rank_leave(sim, rank);
    } else if (rc < 0) {
        sim_fail(sim, "ready: %d", rc);
    }
    if (sim_aimed(sim, rank, SIM_AT_READY)) {
        return;
    }
    sim_rank_drain(sim, rank);
}

/* Do all members of the generation wait in the same place, and hear each other? */
static int barrier_is_full(struct sim *sim, const struct sim_generation *g, enum sim_main at,
                           uint64_t step)
{
    for (uint32_t i = 0; i < g->world; i++) {
        struct sim_rank *rank = sim_rank_find(sim, g->incarnations[i]);
        uint64_t there = at == SIM_CONNECT ? g->connected[i] : g->entered[i];
        if (!rank || !rank->alive || there < step || rank->generation != g->generation ||
            !sim_can_hear(sim, rank->node, g->nodes[0])) {
            return 0;
        }
    }
    return 1;
}

static void barrier_check(struct sim *sim, const struct sim_generation *g, enum sim_main at,
                          uint64_t step)
{
    if (!barrier_is_full(sim, g, at, step)) {
        return;
    }
    for (uint32_t i = 0; i < g->world; i++) {
        struct sim_rank *rank = sim_rank_find(sim, g->incarnations[i]);
        if (rank->at == at && (at == SIM_CONNECT || rank->step == step)) {
            sim_main_later(sim, rank, 1 + sim_below(sim, sim_chance(sim, 100) ? 30 : 2),
                           at == SIM_CONNECT ? on_connected : on_collective_done);
        }
    }
}

void sim_barriers(struct sim *sim)
{
    for (uint32_t i = 0; i < sim->rank_count; i++) {
        struct sim_rank *rank = sim->ranks[i];
        const struct sim_generation *g = sim_generation_of(sim, rank->generation);
        if (rank->alive && g && rank->at == SIM_COLLECTIVE) {
            barrier_check(sim, g, SIM_COLLECTIVE, rank->step);
        } else if (rank->alive && g && rank->at == SIM_CONNECT) {
            barrier_check(sim, g, SIM_CONNECT, 1);
        } else if (rank->alive && g && rank->at == SIM_RECEIVE) {
            sim_pipe_wake(sim, g);
        }
    }
}

void sim_rank_enter(struct sim *sim, struct sim_rank *rank)
{
    struct sim_generation *g = sim_generation_of(sim, rank->generation);
    int at = g ? sim_rank_in(g, rank) : -1;
    rank->at = SIM_COLLECTIVE;
    rank->collective++;
    sim_rank_progress(sim, rank, BELAY_SECTION_STEP, 1);
    if (at >= 0) {
        g->entered[at] = rank->step;
        barrier_check(sim, g, SIM_COLLECTIVE, rank->step);
        /* Somebody's end may have been missed before: then the connection is broken. */
        sim_peers_gone(sim, rank, g);
    }
}

static void on_computed(struct sim *sim, struct sim_event *event)
{
    struct sim_rank *rank = sim_main_of(sim, event);
    if (rank && rank->at == SIM_COMPUTE) {
        sim_rank_enter(sim, rank);
    }
}

void sim_rank_compute(struct sim *sim, struct sim_rank *rank)
{
    rank_goto(rank, SIM_COMPUTE);
    sim_rank_progress(sim, rank, BELAY_SECTION_STEP, 0);
    const struct sim_generation *g = sim_generation_of(sim, rank->generation);
    if (g && g->pp > 1) {
        sim_pipe_begin(sim, rank);
        return;
    }
    sim_main_later(sim, rank, (3 + sim_below(sim, 10)) * sim->profile.slow, on_computed);
}

/* ---- apply and seal ---- */

static void rank_write(struct sim *sim, struct sim_rank *rank, uint32_t from, uint32_t to)
{
    struct sim_arena *arena = rank->arena;
    (void)sim;
    for (uint32_t e = from; e < to; e++) {
        arena->data[rank->next_slot][e] =
            sim_next_value(arena->data[rank->prev_slot][e], rank->step, sim_arena_elem(arena, e));
    }
}

static void on_sealed(struct sim *sim, struct sim_event *event)
{
    struct sim_rank *rank = sim->ranks[event->a];
    if (!rank->alive || !rank->sealing || rank->sealing_step != event->b) {
        return;
    }
    if (rank->stopped) {
        sim_later(sim, 20, on_sealed, event->a, event->b);
        return;
    }
    struct bl_state_digest digest = {{0, 0}};
    if (sim_aimed(sim, rank, SIM_AT_UNSEALED)) {
        return;
    }
    bl_extent_list_digest(&rank->arena->extents, rank->arena->data[rank->sealing_slot], &digest);
    rank->sealing = 0;
    int rc = wire_session_sealed(rank->session, rank->sealing_step, &digest);
    if (rc < 0) {
        sim_fail(sim, "sealed %llu: %d", (unsigned long long)rank->sealing_step, rc);
    }
    struct sim_generation *g = sim_generation_of(sim, rank->generation);
    int at = g ? sim_rank_in(g, rank) : -1;
    if (at >= 0 && rank->sealing_step > g->sealed[at]) {
        g->sealed[at] = rank->sealing_step;
    }
    if (sim_aimed(sim, rank, SIM_AT_SEALED)) {
        return;
    }
    if (rank->at == SIM_VOTE && !rank->hung) {
        main_vote(sim, rank);
    } else if (rank->at == SIM_PARK && !rank->hung) {
        sim_rank_park(sim, rank);
    }
    sim_rank_drain(sim, rank);
}

void sim_seal_start(struct sim *sim, struct sim_rank *rank, uint64_t step, int slot)
{
    rank->sealing = 1;
    rank->sealing_step = step;
    rank->sealing_slot = slot;
    sim_later(sim, 1 + sim_below(sim, sim_chance(sim, 100) ? 60 : 6), on_sealed, rank->index, step);
}

static void on_applied(struct sim *sim, struct sim_event *event)
{
    struct sim_rank *rank = sim_main_of(sim, event);
    if (!rank || rank->at != SIM_APPLY || sim_aimed(sim, rank, SIM_AT_MID_APPLY)) {
        return;
    }
    rank_write(sim, rank, rank->arena->elems / 2, rank->arena->elems);
    sim_seal_start(sim, rank, rank->step, rank->next_slot);
    rank->prev_slot = rank->next_slot;
    if (rank->want_park) {
        sim_rank_park(sim, rank);
    } else if (rank->want_leave || rank->result & (BELAY_VOTE_STOP | BELAY_VOTE_FINAL)) {
        sim_rank_leave(sim, rank);
    } else {
        rank->step++;
        sim_rank_compute(sim, rank);
    }
    sim_rank_drain(sim, rank);
}

static void rank_apply(struct sim *sim, struct sim_rank *rank)
{
    uint32_t pinned = 0;
    uint32_t index = 0;
    for (uint32_t k = 0; k < SIM_SLOTS; k++) {
        pinned |= rank->arena->slots[k].pinned ? 1u << k : 0;
    }
    int rc = wire_session_slot_begin(rank->session, rank->step, &index);
    if (rc < 0) {
        sim_fail(sim, "rule 3, 4: rank %llx: no slot for %llu: %d",
                 (unsigned long long)rank->incarnation, (unsigned long long)rank->step, rc);
        return;
    }
    if (pinned >> index & 1) {
        sim_fail(sim, "rule 4: rank %llx writes %llu over a pinned slot",
                 (unsigned long long)rank->incarnation, (unsigned long long)rank->step);
    }
    sim_check_begin(sim, rank, rank->generation, rank->step);
    rank_goto(rank, SIM_APPLY);
    rank->waiting = 0;
    rank->next_slot = (int)index;
    rank_write(sim, rank, 0, rank->arena->elems / 2);
    sim_main_later(sim, rank, 1 + sim_below(sim, 4), on_applied);
}

/* ---- turns ---- */

void sim_rank_park(struct sim *sim, struct sim_rank *rank)
{
    rank_goto(rank, SIM_PARK);
    rank->want_park = 0;
    int rc = wire_session_park(rank->session);
    if (rc == -EAGAIN) {
        return; /* on_sealed comes back to it */
    }
    if (rc < 0) {
        sim_fail(sim, "park: %d", rc);
    }
    sim_check_parked(sim, rank);
    rank_goto(rank, SIM_WAIT);
    rank->generation = 0;
    sim_rank_progress(sim, rank, BELAY_SECTION_LOAD, 0);
    if (sim_chance(sim, 500)) {
        sim_aimed(sim, rank, SIM_AT_PARKED);
    }
}

void sim_rank_leave(struct sim *sim, struct sim_rank *rank)
{
    rank_goto(rank, SIM_LEAVE);
    rank->want_leave = 0;
    sim_rank_progress(sim, rank, BELAY_SECTION_LEAVE, 0);
    wire_session_leave(rank->session, 0);
    sim_aimed(sim, rank, SIM_AT_LEAVE);
}

static void on_comm_error(struct sim *sim, struct sim_event *event)
{
    struct sim_rank *rank = sim_main_of(sim, event);
    if (rank &&
        (rank->at == SIM_COLLECTIVE || rank->at == SIM_CONNECT || rank->at == SIM_RECEIVE)) {
        wire_session_failed(rank->session, BL_EPEER, "a peer is gone");
        sim_rank_park(sim, rank);
        sim_rank_drain(sim, rank);
    }
}

void sim_comm_error(struct sim *sim, struct sim_rank *rank, const char *text)
{
    (void)text;
    sim_main_later(sim, rank, 1 + sim_below(sim, 30), on_comm_error);
}

static void on_turn(struct sim *sim, struct sim_event *event);

/* A new generation is called: whatever waits fails; what is being applied is finished first. */
static void rank_called(struct sim *sim, struct sim_rank *rank)
{
    if (rank->at == SIM_APPLY) {
        rank->want_park = 1;
    } else if (rank->at != SIM_WAIT && rank->at != SIM_PARK) {
        rank->token++;
        sim_main_later(sim, rank, sim_below(sim, 3), on_turn);
    }
}

static void on_turn(struct sim *sim, struct sim_event *event)
{
    struct sim_rank *rank = sim_main_of(sim, event);
    if (rank) {
        sim_rank_park(sim, rank);
        sim_rank_drain(sim, rank);
    }
}

static void rank_stopped(struct sim *sim, struct sim_rank *rank)
{
    if (rank->at == SIM_APPLY) {
        rank->want_leave = 1;
    } else if (rank->at != SIM_LEAVE && rank->at != SIM_INIT) {
        sim_rank_leave(sim, rank);
    }
}

/* ---- messages ---- */

static void *vote_copy(const void *from)
{
    struct wire_vote *copy = sim_alloc(1, sizeof(*copy));
    memcpy(copy, from, sizeof(*copy));
    return copy;
}

static void on_vote(struct sim *sim, struct sim_event *event)
{
    struct sim_rank *rank = sim_rank_find(sim, event->a);
    if (!rank || !rank->alive || !rank->session || rank->stopped) {
        return; /* who is stopped asks again when he goes on */
    }
    wire_session_on_vote(rank->session, event->payload, sim->now);
    sim_rank_drain(sim, rank);
}

static void rank_send_vote(struct sim *sim, struct sim_rank *rank,
                           const struct wire_session_effect *effect)
{
    const struct wire_plan *plan = wire_session_plan(rank->session, NULL);
    if (!plan || effect->to >= plan->world) {
        return;
    }
    struct sim_rank *to = sim_rank_find(sim, plan->members[effect->to].incarnation);
    if (to && to->alive) {
        sim->delay_next = sim_chance(sim, sim->profile.vote_late) ? sim_below(sim, 1500) : 0;
        sim_send(sim, rank->node, to->node, on_vote, to->incarnation, 0, 0,
                 vote_copy(&effect->vote), vote_copy, free);
        sim->delay_next = 0;
    }
}

static void *rank_report_copy(const void *from)
{
    struct wire_rank_report *copy = sim_alloc(1, sizeof(*copy));
    memcpy(copy, from, sizeof(*copy));
    return copy;
}

static void rank_send_report(struct sim *sim, struct sim_rank *rank)
{
    struct sim_node *node = &sim->nodes[rank->node];
    struct wire_rank_report *report = sim_alloc(1, sizeof(*report));
    wire_session_report(rank->session, report);
    if (!node->member) {
        free(report);
        return;
    }
    sim_send(sim, rank->node, rank->node, sim_on_rank_report, rank->node, node->incarnation, 0,
             report, rank_report_copy, free);
}

static void rank_effect(struct sim *sim, struct sim_rank *rank, const struct wire_session_effect *e)
{
    switch (e->kind) {
    case WIRE_EFFECT_REPORT:
        rank_send_report(sim, rank);
        break;
    case WIRE_EFFECT_VOTE:
        rank_send_vote(sim, rank, e);
        break;
    case WIRE_EFFECT_VOTE_DONE: {
        uint32_t index = 0;
        const struct wire_plan *plan = wire_session_plan(rank->session, &index);
        if (plan && index == 0) {
            sim_check_unanimous(sim, plan->generation, e->vote.step);
        }
        if (rank->at == SIM_VOTE && e->vote.step == rank->step) {
            rank->result = e->vote.flags;
            if (!sim_aimed(sim, rank, SIM_AT_VOTED)) {
                rank_apply(sim, rank);
            }
        }
        break;
    }
    case WIRE_EFFECT_GENERATION:
        rank_called(sim, rank);
        break;
    case WIRE_EFFECT_PLAN:
        rank->generation = wire_session_generation(rank->session);
        sim_check_plan(sim, wire_session_plan(rank->session, NULL));
        rank_goto(rank, SIM_LOAD);
        sim_rank_progress(sim, rank, BELAY_SECTION_LOAD, 0);
        sim_rank_load(sim, rank);
        break;
    case WIRE_EFFECT_GO:
        sim_check_go(sim, rank->generation);
        rank->step = wire_session_plan(rank->session, NULL)->step + 1;
        if (rank->step > sim->profile.steps) {
            sim_rank_leave(sim, rank); /* nothing is left to do */
        } else {
            sim_rank_compute(sim, rank);
        }
        break;
    case WIRE_EFFECT_LEAVE:
        if (rank->at == SIM_LEAVE) {
            sim_rank_die(sim, rank, 0, 0, 0);
        }
        break;
    case WIRE_EFFECT_STOPPED:
        rank_stopped(sim, rank);
        break;
    case WIRE_EFFECT_REFUSED:
        sim_rank_die(sim, rank, 3, 0, 0);
        break;
    case WIRE_EFFECT_NONE:
        break;
    }
}

void sim_rank_drain(struct sim *sim, struct sim_rank *rank)
{
    struct wire_session_effect effect;
    while (rank->alive && rank->session && wire_session_next_effect(rank->session, &effect)) {
        rank_effect(sim, rank, &effect);
    }
}

/* ---- life ---- */

static void on_rank_tick(struct sim *sim, struct sim_event *event)
{
    struct sim_rank *rank = sim->ranks[event->a];
    if (!rank->alive) {
        return;
    }
    if (!rank->stopped) {
        wire_session_on_tick(rank->session, sim->now);
        sim_rank_drain(sim, rank);
    }
    if (rank->alive) {
        sim_later(sim, 100, on_rank_tick, event->a, 0);
    }
}

static void on_rank_init(struct sim *sim, struct sim_event *event)
{
    struct sim_rank *rank = sim_main_of(sim, event);
    if (!rank) {
        return;
    }
    struct wire_session_config config = {.run = SIM_RUN,
                                         .incarnation = rank->incarnation,
                                         .function_id = 77,
                                         .probe = 88,
                                         .rules_off = sim->rules_off};
    rank->session = wire_session_new(&config);
    BL_ASSERT(rank->session);
    rank->at = SIM_WAIT;
    struct sim_node *node = &sim->nodes[rank->node];
    if (node->member) {
        core_member_on_rank_up(node->member, rank->incarnation, sim->now);
        sim_member_drain(sim, node);
    }
    sim_later(sim, 100, on_rank_tick, rank->index, 0);
    sim_rank_drain(sim, rank);
}

struct sim_rank *sim_rank_start(struct sim *sim, uint32_t node, uint64_t incarnation)
{
    if (sim_rank_find(sim, incarnation)) {
        sim_fail(sim, "process %llx is started twice", (unsigned long long)incarnation);
    }
    sim->ranks = realloc(sim->ranks, (sim->rank_count + 1) * sizeof(struct sim_rank *));
    BL_ASSERT(sim->ranks);
    struct sim_rank *rank = sim_alloc(1, sizeof(*rank));
    rank->index = sim->rank_count;
    sim->ranks[sim->rank_count++] = rank;
    rank->incarnation = incarnation;
    rank->node = node;
    rank->alive = 1;
    rank->shim = 1;
    rank->progress_ms = sim->now;
    sim_main_later(sim, rank, 20 + sim_below(sim, 150), on_rank_init);
    sim_trace(sim, "n%u starts %llx", node, (unsigned long long)incarnation);
    return rank;
}

void sim_rank_die(struct sim *sim, struct sim_rank *rank, int code, int signal, int by_us)
{
    if (!rank->alive) {
        return;
    }
    sim_trace(sim, "n%u: %llx ends, code %d signal %d%s (at %d, step %llu)", rank->node,
              (unsigned long long)rank->incarnation, code, signal, by_us ? " by us" : "",
              (int)rank->at, (unsigned long long)rank->step);
    rank->alive = 0;
    rank->status =
        (struct wire_exit){.code = signal ? -1 : code, .signal = signal, .by_us = (uint32_t)by_us};
    if (rank->arena) {
        sim_check_arena(sim, rank->arena);
    }
    for (uint32_t i = 0; i < sim->rank_count; i++) {
        struct sim_rank *peer = sim->ranks[i];
        if (peer->alive && peer->generation && peer->generation == rank->generation &&
            (peer->at == SIM_COLLECTIVE || peer->at == SIM_CONNECT || peer->at == SIM_RECEIVE) &&
            sim_chance(sim, 600)) {
            sim_comm_error(sim, peer, "a peer is gone");
        }
    }
    struct sim_node *node = &sim->nodes[rank->node];
    if (node->member) {
        sim_later(sim, 1 + sim_below(sim, 5), sim_on_rank_exit, rank->index, node->incarnation);
    }
}
