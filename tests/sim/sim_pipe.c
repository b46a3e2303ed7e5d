/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hybrids: state that is cut into boxes over tensor-parallel ranks and into stages, and steps whose
 * passes go through a pipeline, each stage waiting for its neighbours' messages.
 *
 *      six tensors of ROWS x 4; stage p has tensors 6 p / pp up to 6 (p + 1) / pp
 *      tensors 0 and 3 are whole on the first tensor-parallel rank, of the others each has columns
 *      what a (t, p) has is cut flat over the replicas, or every replica has all of it (ZeRO 0)
 */
#include "tests/sim/sim.h"

#include <stdio.h>

#define HYBRID_TENSORS 6
#define HYBRID_ROWS    2
#define HYBRID_COLUMNS 4
#define PIPE_MICROS    2 /* micro-batches of a step */

/* ---- state ---- */

struct hybrid_cut {
    uint64_t lo, hi;       /* the part of this replica, in what its (t, p) has */
    uint64_t base, offset; /* of the tensor there; bytes so far */
};

static void extent_add(struct bl_extent_list *list, uint32_t tensor, uint32_t t, uint32_t tp,
                       struct hybrid_cut *cut)
{
    int is_whole = tp == 1 || tensor % 3 == 0;
    struct bl_extent extent;

    if (is_whole && t > 0) {
        return;
    }
    bl_extent_whole(&extent, &list->tensors[tensor], tensor, 0, HYBRID_ROWS * HYBRID_COLUMNS);
    if (!is_whole) {
        extent.lo[1] = HYBRID_COLUMNS * t / tp;
        extent.hi[1] = HYBRID_COLUMNS * (t + 1) / tp;
    }
    uint64_t elems = HYBRID_ROWS * (extent.hi[1] - extent.lo[1]);
    uint64_t from = cut->lo > cut->base ? cut->lo - cut->base : 0;
    uint64_t to = cut->hi > cut->base ? cut->hi - cut->base : 0;
    to = to < elems ? to : elems;
    cut->base += elems;
    if (from < to) {
        extent.flat_lo = from;
        extent.flat_hi = to;
        extent.offset = cut->offset;
        cut->offset += 8 * (to - from);
        int rc = bl_extent_list_add(list, &extent);
        BL_ASSERT(rc == 0);
    }
}

static uint64_t hybrid_elems(uint32_t first, uint32_t last, uint32_t t, uint32_t tp)
{
    uint64_t elems = 0;
    for (uint32_t i = first; i < last; i++) {
        int is_whole = tp == 1 || i % 3 == 0;
        elems +=
            is_whole ? (t == 0) * HYBRID_ROWS * HYBRID_COLUMNS : HYBRID_ROWS * HYBRID_COLUMNS / tp;
    }
    return elems;
}

void sim_hybrid_extents(struct sim *sim, struct bl_extent_list *list, uint32_t rank,
                        const struct wire_plan *plan)
{
    uint32_t dp = plan->world / (plan->tp * plan->pp);
    uint32_t t = rank % plan->tp;
    uint32_t p = rank / plan->tp % plan->pp;
    uint32_t d = rank / plan->tp / plan->pp;
    uint32_t first = HYBRID_TENSORS * p / plan->pp;
    uint32_t last = HYBRID_TENSORS * (p + 1) / plan->pp;
    uint64_t elems = hybrid_elems(first, last, t, plan->tp);
    struct hybrid_cut cut = {.lo = sim->profile.same ? 0 : elems * d / dp,
                             .hi = sim->profile.same ? elems : elems * (d + 1) / dp};

    for (uint32_t i = 0; i < HYBRID_TENSORS; i++) {
        struct bl_tensor tensor = {.kind = BL_KIND_PARAM,
                                   .dtype = BL_I64,
                                   .dims = 2,
                                   .shape = {HYBRID_ROWS, HYBRID_COLUMNS}};
        uint32_t index = 0;
        snprintf(tensor.name, sizeof(tensor.name), "tensor.%u", i);
        int rc = bl_extent_list_tensor(list, &tensor, &index, NULL);
        BL_ASSERT(rc == 0 && index == i);
    }
    for (uint32_t i = first; i < last; i++) {
        extent_add(list, i, t, plan->tp, &cut);
    }
}

void sim_hybrid_draw(struct sim *sim)
{
    struct sim_profile *p = &sim->profile;
    uint32_t dp = 1 + (uint32_t)sim_below(sim, 3);
    p->is_hybrid = 1;
    p->tp = 1 + (uint32_t)sim_below(sim, 2);
    p->pp = 1 + (uint32_t)sim_below(sim, 3);
    p->ranks = dp * p->tp * p->pp;
    p->elems = HYBRID_TENSORS * HYBRID_ROWS * HYBRID_COLUMNS;
    p->same = sim_chance(sim, 400);
    p->is_tight = sim->only_hybrids || sim_chance(sim, 500);
    p->head_ranks = !p->is_tight && sim_chance(sim, 500) ? p->ranks : 0;
    if (p->is_tight && (sim->only_hybrids ||
                        sim_chance(sim, 600))) { /* nodes go for long: dissolved, cut, grown back */
        p->kinds = SIM_MACHINE | SIM_KILL | (p->kinds & SIM_PARTITION);
        p->steps = 120;
        p->slow = 4;
        p->faults += 2;
        p->fault_ms = 4500;
    }
    if (!sim->only_hybrids &&
        sim_chance(sim, 250)) { /* who is named must hang: nothing else goes wrong */
        p->only_hangs = 1;
        p->kinds = SIM_HANG;
        p->loss = p->repeat = p->late = 0;
    }
}

/* ---- passes ---- */

/* Passes of a step: PIPE_MICROS forwards, then as many backwards. Has the neighbour sent what pass
 * `pass` of this rank begins with? */
static int pipe_has(struct sim *sim, const struct sim_generation *g, uint32_t at, uint64_t step,
                    uint32_t pass)
{
    uint32_t stage = at / g->tp % g->pp;
    int is_forward = pass < PIPE_MICROS;
    if (is_forward ? stage == 0 : stage + 1 == g->pp) {
        return 1;
    }
    uint32_t from = is_forward ? at - g->tp : at + g->tp;
    uint64_t done = (step - g->step - 1) * 2 * PIPE_MICROS + pass + 1;
    return g->passes[from] >= done && sim_can_hear(sim, g->nodes[at], g->nodes[from]);
}

int sim_peers_gone(struct sim *sim, struct sim_rank *rank, const struct sim_generation *g)
{
    for (uint32_t i = 0; i < g->world; i++) {
        struct sim_rank *peer = sim_rank_find(sim, g->incarnations[i]);
        if (!peer || !peer->alive || peer->generation != g->generation) {
            sim_comm_error(sim, rank, "a peer is gone");
            return 1;
        }
    }
    return 0;
}

static void on_pass(struct sim *sim, struct sim_event *event);

static void on_received(struct sim *sim, struct sim_event *event)
{
    struct sim_rank *rank = sim_main_of(sim, event);
    const struct sim_generation *g = rank ? sim_generation_of(sim, rank->generation) : NULL;
    int at = g ? sim_rank_in(g, rank) : -1;
    if (at >= 0 && rank->at == SIM_RECEIVE &&
        pipe_has(sim, g, (uint32_t)at, rank->step, rank->pass)) {
        rank->at = SIM_COMPUTE;
        sim_rank_progress(sim, rank, BELAY_SECTION_STEP, 0);
        sim_main_later(sim, rank, (1 + sim_below(sim, 3)) * sim->profile.slow, on_pass);
    }
}

/* The next pass, or the wait for what it begins with. */
static void pipe_next(struct sim *sim, struct sim_rank *rank, const struct sim_generation *g,
                      uint32_t at)
{
    if (rank->pass == 2 * PIPE_MICROS) {
        sim_rank_enter(sim, rank);
        return;
    }
    uint32_t stage = at / g->tp % g->pp;
    int waits = rank->pass < PIPE_MICROS ? stage > 0 : stage + 1 < g->pp;
    rank->collective += (uint64_t)waits;
    if (pipe_has(sim, g, at, rank->step, rank->pass)) {
        rank->at = SIM_COMPUTE;
        sim_rank_progress(sim, rank, BELAY_SECTION_STEP, 0);
        sim_main_later(sim, rank, (1 + sim_below(sim, 3)) * sim->profile.slow, on_pass);
        return;
    }
    rank->at = SIM_RECEIVE;
    sim_rank_progress(sim, rank, BELAY_SECTION_STEP, 1);
    sim_peers_gone(sim, rank, g);
}

void sim_pipe_wake(struct sim *sim, const struct sim_generation *g)
{
    for (uint32_t i = 0; i < g->world; i++) {
        struct sim_rank *peer = sim_rank_find(sim, g->incarnations[i]);
        if (peer && peer->alive && peer->at == SIM_RECEIVE && peer->generation == g->generation &&
            pipe_has(sim, g, i, peer->step, peer->pass)) {
            sim_main_later(sim, peer, 1 + sim_below(sim, 2), on_received);
        }
    }
}

static void on_pass(struct sim *sim, struct sim_event *event)
{
    struct sim_rank *rank = sim_main_of(sim, event);
    struct sim_generation *g = rank ? sim_generation_of(sim, rank->generation) : NULL;
    int at = g ? sim_rank_in(g, rank) : -1;
    if (at < 0 || rank->at != SIM_COMPUTE) {
        return;
    }
    rank->pass++;
    g->passes[at]++;
    pipe_next(sim, rank, g, (uint32_t)at);
    sim_pipe_wake(sim, g);
}

void sim_pipe_begin(struct sim *sim, struct sim_rank *rank)
{
    const struct sim_generation *g = sim_generation_of(sim, rank->generation);
    int at = sim_rank_in(g, rank);
    rank->pass = 0;
    if (at >= 0) {
        pipe_next(sim, rank, g, (uint32_t)at);
    }
}
