/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A node: what belayd's edge does around the member. The machine holds ranks, their shims (exit
 * records) and arenas; the daemon is a member that comes and goes.
 */
#include "tests/sim/sim.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SIM_BEAT_MS 50

/* ---- arenas ---- */

/* Three tensors of about a third of all elements each, cut flat over the world. */
static void arena_extents(struct sim *sim, struct bl_extent_list *list, uint32_t rank,
                          uint32_t world)
{
    uint32_t total = sim->profile.elems;
    uint32_t lo = (uint32_t)((uint64_t)total * rank / world);
    uint32_t hi = (uint32_t)((uint64_t)total * (rank + 1) / world);
    uint32_t first = 0;
    uint64_t offset = 0;

    for (uint32_t t = 0; t < 3; t++) {
        uint32_t count = t < 2 ? total / 3 : total - first;
        struct bl_tensor tensor = {
            .kind = BL_KIND_PARAM, .dtype = BL_I64, .dims = 1, .shape = {count}};
        uint32_t index = 0;
        snprintf(tensor.name, sizeof(tensor.name), "tensor.%u", t);
        int rc = bl_extent_list_tensor(list, &tensor, &index, NULL);
        uint32_t from = lo > first ? lo : first;
        uint32_t to = hi < first + count ? hi : first + count;
        if (rc == 0 && from < to) {
            struct bl_extent extent;
            bl_extent_whole(&extent, &tensor, index, from - first, to - first);
            extent.offset = offset;
            offset += 8ull * (to - from);
            rc = bl_extent_list_add(list, &extent);
        }
        BL_ASSERT(rc == 0);
        first += count;
    }
}

struct sim_arena *sim_arena_make(struct sim *sim, struct sim_node *node, uint64_t incarnation,
                                 uint32_t rank, const struct wire_plan *plan)
{
    struct sim_arena *arena = sim_alloc(1, sizeof(*arena));
    arena->id = sim_random(sim);
    arena->incarnation = incarnation;
    arena->node = node->index;
    if (sim->profile.is_hybrid) {
        sim_hybrid_extents(sim, &arena->extents, rank, plan);
    } else {
        arena_extents(sim, &arena->extents, rank, plan->world);
    }
    for (uint32_t i = 0; i < arena->extents.extent_count; i++) {
        arena->elems += (uint32_t)bl_extent_elems(&arena->extents.extents[i]);
    }
    for (uint32_t k = 0; k < SIM_SLOTS; k++) {
        arena->data[k] = sim_alloc(arena->elems, sizeof(uint64_t));
    }
    node->arenas = realloc(node->arenas, (node->arena_count + 1) * sizeof(struct sim_arena *));
    BL_ASSERT(node->arenas);
    node->arenas[node->arena_count++] = arena;
    return arena;
}

void sim_arena_free(struct sim_arena *arena)
{
    for (uint32_t k = 0; k < SIM_SLOTS; k++) {
        free(arena->data[k]);
    }
    bl_extent_list_close(&arena->extents);
    free(arena);
}

struct sim_arena *sim_arena_find(struct sim *sim, uint64_t id)
{
    for (uint32_t n = 0; n < sim->profile.nodes; n++) {
        for (uint32_t i = 0; i < sim->nodes[n].arena_count; i++) {
            if (sim->nodes[n].arenas[i]->id == id) {
                return sim->nodes[n].arenas[i];
            }
        }
    }
    return NULL;
}

void sim_arenas_tell(struct sim *sim, struct sim_node *node)
{
    struct wire_arena_info *infos = sim_alloc(node->arena_count, sizeof(*infos));
    for (uint32_t i = 0; i < node->arena_count; i++) {
        struct sim_arena *arena = node->arenas[i];
        sim_check_arena(sim, arena);
        infos[i].arena = arena->id;
        infos[i].incarnation = arena->incarnation;
        infos[i].slot_count = 2 + sim->profile.roots;
        for (uint32_t k = 0; k < SIM_SLOTS; k++) {
            wire_slot_read(&arena->slots[k], &infos[i].slots[k]);
        }
        int rc = bl_extent_list_copy(&infos[i].extents, &arena->extents);
        BL_ASSERT(rc == 0);
    }
    core_member_on_arenas(node->member, infos, node->arena_count, sim->now);
    free(infos);
}

static void arena_drop(struct sim *sim, struct sim_node *node, uint64_t id)
{
    for (uint32_t i = 0; i < node->arena_count; i++) {
        struct sim_arena *arena = node->arenas[i];
        if (arena->id != id) {
            continue;
        }
        struct sim_rank *rank = sim_rank_find(sim, arena->incarnation);
        if (rank && rank->arena == arena) {
            if (rank->alive) {
                sim_fail(sim, "rule 8: the present arena of a live rank is dropped");
            }
            rank->arena = NULL;
        }
        sim_arena_free(arena);
        node->arenas[i] = node->arenas[--node->arena_count];
        return;
    }
}

/* ---- effects ---- */

static void on_start(struct sim *sim, struct sim_event *event)
{
    struct sim_node *node = &sim->nodes[event->a];
    if (node->member && node->up && event->c == node->incarnation) {
        sim_rank_start(sim, node->index, event->b);
        core_member_on_proc_started(node->member, event->b, 1000, sim->now);
        sim_member_drain(sim, node);
    }
}

static void on_kill(struct sim *sim, struct sim_event *event)
{
    struct sim_rank *rank = sim_rank_find(sim, event->a);
    if (rank) {
        sim_rank_die(sim, rank, 0, SIGKILL, 1);
    }
}

void sim_on_rank_exit(struct sim *sim, struct sim_event *event)
{
    struct sim_rank *rank = sim->ranks[event->a];
    struct sim_node *node = &sim->nodes[rank->node];
    if (node->member && node->incarnation == event->b) {
        sim_arenas_tell(sim, node);
        core_member_on_proc_exit(node->member, rank->incarnation, &rank->status, "", sim->now);
        sim_member_drain(sim, node);
    }
}

static void directive_free(void *payload)
{
    wire_rank_directive_close(payload);
    free(payload);
}

static void *directive_copy(const void *from)
{
    struct wire_rank_directive *copy = sim_alloc(1, sizeof(*copy));
    const struct wire_rank_directive *d = from;
    *copy = *d;
    int rc = wire_plan_copy(&copy->plan, &d->plan);
    BL_ASSERT(rc == 0);
    return copy;
}

static void on_rank_directive(struct sim *sim, struct sim_event *event)
{
    struct sim_rank *rank = sim_rank_find(sim, event->a);
    if (rank && rank->alive && rank->session && !rank->stopped) {
        wire_session_on_directive(rank->session, event->payload, sim->now);
        sim_rank_drain(sim, rank);
    }
}

static void member_send_rank(struct sim *sim, struct sim_node *node, uint64_t incarnation)
{
    struct wire_rank_directive *d = sim_alloc(1, sizeof(*d));
    if (core_member_rank_directive(node->member, incarnation, d) < 0) {
        free(d);
        return;
    }
    sim_send(sim, node->index, node->index, on_rank_directive, incarnation, 0, 0, d, directive_copy,
             directive_free);
}

static void report_free(void *payload)
{
    wire_report_close(payload);
    free(payload);
}

static void *report_copy(const void *from)
{
    struct wire_report *copy = sim_alloc(1, sizeof(*copy));
    int rc = wire_report_copy(copy, from);
    BL_ASSERT(rc == 0);
    return copy;
}

static void member_beats(struct sim *sim, struct sim_node *node)
{
    for (uint32_t i = 0; i < sim->rank_count; i++) {
        const struct sim_rank *rank = sim->ranks[i];
        if (!rank->alive || rank->node != node->index) {
            continue;
        }
        struct wire_beat beat = {.section = rank->section,
                                 .waiting = rank->waiting,
                                 .step = rank->step,
                                 .collective = rank->collective,
                                 .progress_age_ms = sim->now - rank->progress_ms,
                                 .alive_age_ms = rank->stopped ? sim->now - rank->stopped_ms : 0};
        core_member_on_beat(node->member, rank->incarnation, &beat);
    }
}

static void member_send_report(struct sim *sim, struct sim_node *node)
{
    struct wire_report *report = sim_alloc(1, sizeof(*report));
    member_beats(sim, node);
    sim_arenas_tell(sim, node);
    core_member_report(node->member, report, sim->now);
    sim_send(sim, node->index, sim->head, sim_on_report, sim->head, node->connection, node->index,
             report, report_copy, report_free);
}

static void member_effect(struct sim *sim, struct sim_node *node, struct core_member_effect *e)
{
    switch (e->kind) {
    case CORE_MEMBER_START:
        sim_later_with(sim, 1 + sim_below(sim, 10), on_start, node->index, e->incarnation,
                       node->incarnation, NULL, NULL);
        break;
    case CORE_MEMBER_KILL:
        sim_later(sim, 1 + sim_below(sim, 5), on_kill, e->incarnation, 0);
        break;
    case CORE_MEMBER_RELEASE: {
        struct sim_rank *rank = sim_rank_find(sim, e->incarnation);
        if (rank) {
            rank->shim = 0;
        }
        break;
    }
    case CORE_MEMBER_DROP_ARENA:
        arena_drop(sim, node, e->arena);
        break;
    case CORE_MEMBER_SEND_RANK:
        member_send_rank(sim, node, e->incarnation);
        break;
    case CORE_MEMBER_SEND_REPORT:
        if (node->connection) {
            member_send_report(sim, node);
        }
        break;
    case CORE_MEMBER_ENGINE_WRITE:
        sim_engine_write(sim, node, e->attempt);
        break;
    case CORE_MEMBER_ENGINE_PREPARE:
    case CORE_MEMBER_ENGINE_PUBLISH:
    case CORE_MEMBER_ENGINE_RETAIN:
    case CORE_MEMBER_ENGINE_CANCEL:
    case CORE_MEMBER_SCAN:
        sim_apart_effect(sim, node, e);
        break;
    case CORE_MEMBER_ENGINE_DONE:
    case CORE_MEMBER_EPOCH:
    case CORE_MEMBER_DONE:
    case CORE_MEMBER_NONE:
        break;
    }
}

void sim_member_drain(struct sim *sim, struct sim_node *node)
{
    struct core_member_effect effect;
    while (node->member && core_member_next_effect(node->member, &effect)) {
        member_effect(sim, node, &effect);
    }
}

void sim_on_rank_report(struct sim *sim, struct sim_event *event)
{
    struct sim_node *node = &sim->nodes[event->a];
    if (node->member && node->incarnation == event->b) {
        core_member_on_rank_report(node->member, event->payload, sim->now);
        sim_member_drain(sim, node);
    }
}

/* ---- life ---- */

static void on_member_tick(struct sim *sim, struct sim_event *event)
{
    struct sim_node *node = &sim->nodes[event->a];
    if (!node->member || node->incarnation != event->b) {
        return;
    }
    core_member_on_tick(node->member, sim->now);
    sim_member_drain(sim, node);
    sim_later(sim, SIM_BEAT_MS, on_member_tick, event->a, event->b);
}

void sim_daemon_start(struct sim *sim, struct sim_node *node)
{
    if (node->member || !node->up) {
        return;
    }
    node->incarnation = sim_random(sim);
    struct core_member_config config = {.node = node->name,
                                        .run = SIM_RUN,
                                        .node_incarnation = node->incarnation,
                                        .ranks_max = node->ranks_max,
                                        .bulk_addr = node->name,
                                        .beat_ms = SIM_BEAT_MS,
                                        .rules_off = sim->rules_off};
    node->member = core_member_new(&config);
    BL_ASSERT(node->member);
    for (uint32_t i = 0; i < sim->rank_count; i++) {
        const struct sim_rank *rank = sim->ranks[i];
        if (rank->node != node->index || !rank->shim) {
            continue;
        }
        core_member_on_proc_adopted(node->member, rank->incarnation, CORE_NO_RANK, 1000, sim->now);
        if (!rank->alive) {
            core_member_on_proc_exit(node->member, rank->incarnation, &rank->status, "", sim->now);
        } else if (rank->session) {
            core_member_on_rank_up(node->member, rank->incarnation, sim->now);
            wire_session_on_link_up(rank->session);
        }
    }
    sim_arenas_tell(sim, node);
    core_member_start(node->member, sim->now);
    sim_trace(sim, "n%u: daemon starts", node->index);
    sim_links(sim);
    sim_member_drain(sim, node);
    sim_later(sim, SIM_BEAT_MS, on_member_tick, node->index, node->incarnation);
}

void sim_daemon_crash(struct sim *sim, struct sim_node *node)
{
    if (!node->member) {
        return;
    }
    sim_trace(sim, "n%u: daemon crashes", node->index);
    core_member_free(node->member);
    node->member = NULL;
    struct sim_leader *leader = sim_leader_at(sim, node->index);
    if (leader) {
        sim_leader_stop(sim, leader);
    }
    sim_links(sim);
}

void sim_machine_crash(struct sim *sim, struct sim_node *node)
{
    if (!node->up) {
        return;
    }
    sim_trace(sim, "n%u: machine crashes", node->index);
    sim_daemon_crash(sim, node);
    node->up = 0;
    node->crashed_ms = sim->now;
    for (uint32_t i = 0; i < sim->rank_count; i++) {
        struct sim_rank *rank = sim->ranks[i];
        if (rank->node == node->index) {
            sim_rank_die(sim, rank, 0, SIGKILL, 0);
            rank->arena = NULL;
            rank->shim = 0;
        }
    }
    for (uint32_t i = 0; i < node->arena_count; i++) {
        sim_arena_free(node->arenas[i]);
    }
    node->arena_count = 0;
}

/* ---- connections to the head ---- */

static void on_unlinked(struct sim *sim, struct sim_event *event)
{
    struct sim_node *node = &sim->nodes[event->a];
    for (uint32_t i = 0; i < sim->leader_count; i++) {
        struct sim_leader *leader = &sim->leaders[i];
        if (leader->in_use && leader->core && leader->id == event->b && !node->connection) {
            core_leader_on_node_down(leader->core, node->name, sim->now);
        }
    }
}

/* A member is connected when its daemon and the head's leader run and hear each other. The end of a
 * connection is noticed late when nobody says so (partition, power). */
void sim_links(struct sim *sim)
{
    struct sim_leader *leader = sim_leader_at(sim, sim->head);
    for (uint32_t i = 0; i < sim->profile.nodes; i++) {
        struct sim_node *node = &sim->nodes[i];
        int can = leader && node->member && sim_can_hear(sim, i, sim->head);
        uint64_t is = can ? leader->id : 0;
        if (is == node->connection) {
            continue;
        }
        if (node->connection && node->member) {
            core_member_on_link_down(node->member, sim->now);
        }
        if (node->connection) {
            uint64_t delay = node->up && sim_can_hear(sim, i, sim->head) ? 1 : 200;
            sim_later(sim, delay, on_unlinked, i, node->connection);
        }
        node->connection = is;
        node->linked_ms = sim->now;
        if (is) {
            core_member_on_link_up(node->member, sim->now);
            core_leader_on_node_up(leader->core, node->name, sim->now);
        }
    }
    for (uint32_t i = 0; i < sim->profile.nodes; i++) {
        sim_member_drain(sim, &sim->nodes[i]);
    }
}
