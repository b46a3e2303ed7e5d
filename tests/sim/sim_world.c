/* SPDX-License-Identifier: Apache-2.0 */
/* Time, chance and the network. */
#include "tests/sim/sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SIM_END_MS 900000u /* after the last fault the run must end within this */

void *sim_alloc(size_t count, size_t size)
{
    void *items = calloc(count ? count : 1, size);
    BL_ASSERT(items);
    return items;
}

uint64_t sim_random(struct sim *sim)
{
    sim->random += 0x9e3779b97f4a7c15ull;
    uint64_t value = bl_mix64(sim->random);
    return value ? value : 1;
}

uint64_t sim_below(struct sim *sim, uint64_t bound)
{
    return bound ? sim_random(sim) % bound : 0;
}

int sim_chance(struct sim *sim, uint32_t per_mille)
{
    return sim_below(sim, 1000) < per_mille;
}

void sim_trace(struct sim *sim, const char *fmt, ...)
{
    char text[600];
    va_list args;
    if (!sim->verbose && !sim->log_hash) {
        return;
    }
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    if (sim->log_hash) {
        *sim->log_hash = bl_mix64(*sim->log_hash ^ bl_xxh3(text, strlen(text)) ^ sim->now);
    }
    if (sim->verbose) {
        printf("%8llu  %s\n", (unsigned long long)sim->now, text);
    }
}

void sim_fail(struct sim *sim, const char *fmt, ...)
{
    va_list args;
    if (sim->failed) {
        return;
    }
    sim->failed = 1;
    va_start(args, fmt);
    vsnprintf(sim->why, sizeof(sim->why), fmt, args);
    va_end(args);
    sim_trace(sim, "FAILED: %s", sim->why);
}

/* ---- the heap ---- */

static int event_is_before(const struct sim_event *a, const struct sim_event *b)
{
    return a->time != b->time ? a->time < b->time : a->order < b->order;
}

static void heap_push(struct sim *sim, const struct sim_event *event)
{
    if (sim->heap_count == sim->heap_capacity) {
        sim->heap_capacity = sim->heap_capacity ? sim->heap_capacity * 2 : 1024;
        sim->heap = realloc(sim->heap, sim->heap_capacity * sizeof(*sim->heap));
        BL_ASSERT(sim->heap);
    }
    size_t at = sim->heap_count++;
    while (at > 0 && event_is_before(event, &sim->heap[(at - 1) / 2])) {
        sim->heap[at] = sim->heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    sim->heap[at] = *event;
}

static int heap_pop(struct sim *sim, struct sim_event *ret)
{
    if (sim->heap_count == 0) {
        return 0;
    }
    *ret = sim->heap[0];
    struct sim_event last = sim->heap[--sim->heap_count];
    size_t at = 0;
    for (;;) {
        size_t child = 2 * at + 1;
        if (child >= sim->heap_count) {
            break;
        }
        if (child + 1 < sim->heap_count &&
            event_is_before(&sim->heap[child + 1], &sim->heap[child])) {
            child++;
        }
        if (!event_is_before(&sim->heap[child], &last)) {
            break;
        }
        sim->heap[at] = sim->heap[child];
        at = child;
    }
    sim->heap[at] = last;
    return 1;
}

void sim_later(struct sim *sim, uint64_t delay, sim_fn fn, uint64_t a, uint64_t b)
{
    sim_later_with(sim, delay, fn, a, b, 0, NULL, NULL);
}

void sim_later_with(struct sim *sim, uint64_t delay, sim_fn fn, uint64_t a, uint64_t b, uint64_t c,
                    void *payload, void (*drop)(void *))
{
    struct sim_event event = {.time = sim->now + delay,
                              .order = ++sim->order,
                              .fn = fn,
                              .a = a,
                              .b = b,
                              .c = c,
                              .payload = payload,
                              .drop = drop};
    heap_push(sim, &event);
}

/* ---- the network ---- */

int sim_can_hear(const struct sim *sim, uint32_t a, uint32_t b)
{
    return a == b || (sim->nodes[a].up && sim->nodes[b].up && sim->cut[a] == sim->cut[b]);
}

void sim_send(struct sim *sim, uint32_t from, uint32_t to, sim_fn fn, uint64_t a, uint64_t b,
              uint64_t c, void *payload, void *(*copy)(const void *), void (*drop)(void *))
{
    const struct sim_profile *p = &sim->profile;
    uint32_t count = sim_can_hear(sim, from, to) && !sim_chance(sim, p->loss);

    count += count && copy && sim_chance(sim, p->repeat + (sim->delay_next ? 500 : 0));
    if (count == 0 && payload && drop) {
        drop(payload);
    }
    for (uint32_t i = 0; i < count; i++) {
        struct sim_event event = {
            .order = ++sim->order, .fn = fn, .a = a, .b = b, .c = c, .drop = drop};
        uint64_t delay = from == to ? sim_below(sim, 2) : 1 + sim_below(sim, 3);
        if (sim_chance(sim, p->late)) {
            delay += sim_below(sim, p->late_ms);
        }
        event.time = sim->now + delay + (i ? 0 : sim->delay_next);
        event.payload = i + 1 == count ? payload : copy(payload);
        heap_push(sim, &event);
    }
}

/* ---- one run ---- */

static void sim_settle(struct sim *sim)
{
    for (uint32_t i = 0; i < sim->leader_count; i++) {
        if (sim->leaders[i].in_use) {
            sim_leader_drain(sim, &sim->leaders[i]);
        }
    }
}

static void sim_ended(struct sim *sim)
{
    if (!sim->finished || sim->failed) {
        return;
    }
    if (sim->verdict == WIRE_VERDICT_STOPPED && sim->profile.stop_resume && !sim->resumed) {
        uint32_t head = sim->head;
        sim->resumed = 1;
        sim->resumed_version = sim->store.version;
        sim->finished = 0;
        for (uint32_t i = 0; i < sim->leader_count; i++) {
            sim_leader_stop(sim, &sim->leaders[i]);
        }
        uint32_t copy = sim->profile.tp * sim->profile.pp;
        sim->ranks_wanted = copy * (1 + (uint32_t)sim_below(sim, sim->profile.ranks / copy));
        sim_trace(sim, "resume with %u ranks", sim->ranks_wanted);
        sim_leader_start(sim, head, sim->store.epoch);
        sim_links(sim);
    }
}

int sim_run(struct sim *sim)
{
    uint64_t limit = sim->profile.fault_ms + SIM_END_MS;
    sim->faults_over_ms = sim->profile.fault_ms;
    sim->ranks_wanted = sim->profile.ranks;
    sim->store.record.committed_step = UINT64_MAX;
    sim->store.epoch = 1;
    for (uint32_t i = 0; i < sim->profile.nodes; i++) {
        struct sim_node *node = &sim->nodes[i];
        node->index = i;
        node->up = 1;
        snprintf(node->name, sizeof(node->name), "n%u", i);
        node->ranks_max =
            i == 0 ? sim->profile.head_ranks
                   : (sim->profile.ranks + sim->profile.nodes - 2) / (sim->profile.nodes - 1) +
                         !sim->profile.is_tight;
    }
    sim_leader_start(sim, 0, 1);
    for (uint32_t i = 0; i < sim->profile.nodes; i++) {
        sim_daemon_start(sim, &sim->nodes[i]);
    }
    sim_faults_draw(sim);
    struct sim_event event;
    while (!sim->failed && !sim->finished && heap_pop(sim, &event)) {
        sim->now = event.time;
        sim->events++;
        if (sim->now > limit) {
            sim_fail(sim, "the run does not end: %llu ms after the last fault",
                     (unsigned long long)(sim->now - sim->faults_over_ms));
        } else {
            event.fn(sim, &event);
            sim_settle(sim);
        }
        if (event.drop && event.payload) {
            event.drop(event.payload);
        }
        sim_ended(sim);
    }
    if (!sim->failed && !sim->finished) {
        sim_fail(sim, "nothing happens any more");
    }
    if (!sim->failed) {
        sim_check_end(sim);
    }
    return sim->failed ? -1 : 0;
}

void sim_close(struct sim *sim)
{
    struct sim_event event;
    while (heap_pop(sim, &event)) {
        if (event.drop && event.payload) {
            event.drop(event.payload);
        }
    }
    free(sim->heap);
    for (uint32_t i = 0; i < sim->leader_count; i++) {
        core_leader_free(sim->leaders[i].core);
    }
    for (uint32_t i = 0; i < SIM_NODES_MAX; i++) {
        core_member_free(sim->nodes[i].member);
        for (uint32_t k = 0; k < sim->nodes[i].arena_count; k++) {
            sim_arena_free(sim->nodes[i].arenas[k]);
        }
        free(sim->nodes[i].arenas);
    }
    for (uint32_t i = 0; i < sim->rank_count; i++) {
        sim_rank_free(sim->ranks[i]);
    }
    free(sim->ranks);
    free(sim->disk);
    free(sim->attempts);
    free(sim->owns);
    free(sim->manifests);
    free(sim->generations);
    free(sim->truth);
    wire_record_close(&sim->store.record);
}
