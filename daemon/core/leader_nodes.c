/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The leader's view of nodes and processes, made of their reports.
 *
 * A process is LIVE while its node's newest report names it as alive. It is DEAD, confirmed, when
 * the report says that it exited, or when a report of its daemon (that has looked for its shims
 * first) does not name it though an earlier one did. Of a node that is away nothing new is known:
 * its processes stay what they were.
 */
#include "daemon/core/leader_state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

uint64_t leader_random(struct core_leader *l)
{
    uint64_t value = 0;
    do {
        l->random += 0x9e3779b97f4a7c15ull;
        value = bl_mix64(l->random);
    } while (value == 0);
    return value;
}

/* ---- the map ---- */

static void map_put(struct leader_map *map, uint64_t key, uint32_t value)
{
    if (map->capacity == 0 || map->count * 2 >= map->capacity) {
        struct leader_map grown = {.capacity = map->capacity ? map->capacity * 2 : 64};
        grown.keys = core_alloc(grown.capacity, sizeof(*grown.keys));
        grown.values = core_alloc(grown.capacity, sizeof(*grown.values));
        for (size_t i = 0; i < map->capacity; i++) {
            if (map->keys[i]) {
                map_put(&grown, map->keys[i], map->values[i]);
            }
        }
        free(map->keys);
        free(map->values);
        *map = grown;
    }
    size_t at = bl_mix64(key) & (map->capacity - 1);
    while (map->keys[at] && map->keys[at] != key) {
        at = (at + 1) & (map->capacity - 1);
    }
    map->count += map->keys[at] == 0;
    map->keys[at] = key;
    map->values[at] = value;
}

struct leader_proc *leader_proc_find(const struct core_leader *l, uint64_t incarnation)
{
    const struct leader_map *map = &l->map;
    if (map->capacity == 0 || incarnation == 0) {
        return NULL;
    }
    size_t at = bl_mix64(incarnation) & (map->capacity - 1);
    while (map->keys[at]) {
        if (map->keys[at] == incarnation) {
            return &l->procs[map->values[at]];
        }
        at = (at + 1) & (map->capacity - 1);
    }
    return NULL;
}

static void map_rebuild(struct core_leader *l)
{
    free(l->map.keys);
    free(l->map.values);
    memset(&l->map, 0, sizeof(l->map));
    for (uint32_t i = 0; i < l->proc_count; i++) {
        map_put(&l->map, l->procs[i].incarnation, i);
    }
}

/* ---- nodes ---- */

struct leader_node *leader_node_find(struct core_leader *l, const char *name)
{
    for (uint32_t i = 0; i < l->node_count; i++) {
        if (strcmp(l->nodes[i].name, name) == 0) {
            return &l->nodes[i];
        }
    }
    return NULL;
}

struct leader_node *leader_node_get(struct core_leader *l, const char *name)
{
    struct leader_node *node = leader_node_find(l, name);
    if (node) {
        return node;
    }
    l->nodes = core_grow(l->nodes, l->node_count, sizeof(*l->nodes));
    node = &l->nodes[l->node_count++];
    memset(node, 0, sizeof(*node));
    snprintf(node->name, sizeof(node->name), "%s", name);
    node->away_ms = l->now_ms;
    return node;
}

void leader_dirty_all(struct core_leader *l)
{
    for (uint32_t i = 0; i < l->node_count; i++) {
        l->nodes[i].dirty = 1;
    }
}

void leader_nodes_close(struct core_leader *l)
{
    for (uint32_t i = 0; i < l->node_count; i++) {
        wire_report_close(&l->nodes[i].report);
        free(l->nodes[i].keys);
    }
    free(l->nodes);
    free(l->procs);
    free(l->map.keys);
    free(l->map.values);
}

const struct wire_arena_info *leader_arena_find(const struct core_leader *l, uint32_t node,
                                                uint64_t arena)
{
    const struct wire_report *report = &l->nodes[node].report;
    for (uint32_t i = 0; i < report->arena_count; i++) {
        if (report->arenas[i].arena == arena) {
            return &report->arenas[i];
        }
    }
    return NULL;
}

/* ---- processes ---- */

struct leader_proc *leader_proc_add(struct core_leader *l, uint64_t incarnation, uint32_t node)
{
    l->procs = core_grow(l->procs, l->proc_count, sizeof(*l->procs));
    struct leader_proc *p = &l->procs[l->proc_count];
    memset(p, 0, sizeof(*p));
    p->incarnation = incarnation;
    p->report.incarnation = incarnation;
    p->node = node;
    p->rank = CORE_NO_RANK;
    p->ordered_ms = l->now_ms;
    map_put(&l->map, incarnation, l->proc_count++);
    return p;
}

struct leader_proc *leader_proc_start(struct core_leader *l, uint32_t node, uint32_t rank)
{
    struct leader_proc *p = leader_proc_add(l, leader_random(l), node);
    p->rank = rank;
    l->nodes[node].dirty = 1;
    leader_event_proc(l, CORE_EVENT_RANK_STARTED, p, "");
    return p;
}

void leader_proc_kill(struct core_leader *l, struct leader_proc *p, uint32_t stacks)
{
    if (!p->kill && p->life != LEADER_DEAD) {
        p->kill = 1;
        p->kill_ms = l->now_ms;
        p->stacks = stacks;
        l->kills++;
        l->nodes[p->node].dirty = 1;
        leader_event_proc(l, CORE_EVENT_RANK_KILLED, p, "");
    }
}

uint32_t leader_node_load(const struct core_leader *l, uint32_t node)
{
    uint32_t load = 0;
    for (uint32_t i = 0; i < l->proc_count; i++) {
        load += l->procs[i].node == node && l->procs[i].life != LEADER_DEAD && !l->procs[i].refused;
    }
    return load;
}

int leader_proc_is_reachable(const struct core_leader *l, const struct leader_proc *p)
{
    return p->life == LEADER_LIVE && !p->kill && l->nodes[p->node].connected;
}

/* Takes out dead processes that nobody needs to know of any more. */
void leader_procs_sweep(struct core_leader *l)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < l->proc_count; i++) {
        struct leader_proc *p = &l->procs[i];
        const struct leader_node *node = &l->nodes[p->node];
        int is_named = node->has_report && p->stamp != 0 && p->stamp == node->stamp;
        int is_gone =
            p->life == LEADER_DEAD && p->counted && !is_named && !leader_proc_is_member(l, p);
        if (!is_gone) {
            l->procs[kept++] = *p;
        }
    }
    if (kept != l->proc_count) {
        l->proc_count = kept;
        map_rebuild(l);
    }
}

/* ---- reports ---- */

/* Extents travel once: takes those of the former report for arenas that come without, and their
 * keys; makes the keys of others. */
static void report_arenas_merge(struct leader_node *node, struct wire_report *is)
{
    struct wire_report *was = &node->report;
    uint64_t *keys = core_alloc(is->arena_count, sizeof(*keys));

    for (uint32_t i = 0; i < is->arena_count; i++) {
        struct wire_arena_info *arena = &is->arenas[i];
        keys[i] = arena->extents.extent_count ? leader_extents_key(&arena->extents) : 0;
        for (uint32_t k = 0; arena->extents.extent_count == 0 && k < was->arena_count; k++) {
            if (was->arenas[k].arena == arena->arena) {
                bl_extent_list_close(&arena->extents); /* empty lists may own memory too */
                arena->extents = was->arenas[k].extents;
                memset(&was->arenas[k].extents, 0, sizeof(was->arenas[k].extents));
                keys[i] = node->keys[k];
            }
        }
    }
    free(node->keys);
    node->keys = keys;
}

static void report_proc(struct core_leader *l, uint32_t node, const struct wire_proc_report *r,
                        uint64_t stamp)
{
    struct leader_proc *p = leader_proc_find(l, r->rank.incarnation);
    int is_dead = r->rank.state == WIRE_RANK_EXITED;

    if (!p) {
        if (r->rank.incarnation == 0) {
            return;
        }
        p = leader_proc_add(l, r->rank.incarnation, node);
        p->counted = (uint32_t)is_dead; /* it ended in an earlier leader's time */
    }
    if (p->report.sequence == 0 && r->rank.sequence > 0) {
        p->joined_ms = l->now_ms;
    }
    p->stamp = stamp;
    p->node = node;
    p->pid = r->pid;
    p->beat = r->beat;
    if (r->rank.sequence > p->report.sequence) {
        p->report = r->rank;
    }
    if (p->report.state == WIRE_RANK_LEAVING) {
        p->was_leaving = 1;
    } else if (p->report.state != WIRE_RANK_EXITED) {
        p->was_leaving = 0;
    }
    if (is_dead && p->life != LEADER_DEAD) {
        p->life = LEADER_DEAD;
        p->status = r->exit;
        if (r->rank.failed_text[0]) {
            memcpy(p->report.failed_text, r->rank.failed_text, sizeof(p->report.failed_text));
        }
    } else if (!is_dead && p->life == LEADER_ORDERED) {
        p->life = LEADER_LIVE;
    }
}

/* What this daemon was told to hold or held, and does not name. */
static void report_missing(struct core_leader *l, uint32_t node, uint64_t stamp, int is_new_daemon)
{
    uint32_t lost = 0;
    for (uint32_t i = 0; i < l->proc_count; i++) {
        struct leader_proc *p = &l->procs[i];
        if (p->node != node || p->stamp == stamp || p->life == LEADER_DEAD ||
            (p->life == LEADER_ORDERED && !is_new_daemon)) {
            continue;
        }
        lost += p->life == LEADER_LIVE;
        p->status = (struct wire_exit){.code = -1, .by_us = p->life == LEADER_ORDERED};
        p->life = LEADER_DEAD;
        snprintf(p->report.failed_text, sizeof(p->report.failed_text),
                 "its daemon came back without it");
    }
    if (lost) {
        struct core_event *e = leader_event(l, CORE_EVENT_NODE_MEMORY_LOST);
        memcpy(e->node, l->nodes[node].name, sizeof(e->node));
        e->count = lost;
    }
}

static int report_is_stale(const struct core_leader *l, const struct leader_node *node,
                           const struct wire_report *report)
{
    if (report->run != l->config.run) {
        return 1;
    }
    if (node->has_report && report->node_incarnation == node->incarnation) {
        return report->sequence <= node->report.sequence;
    }
    return wire_former_has(&node->former, report->node_incarnation);
}

/* Only a report makes a node connected: before it, what is known of it may be old. */
static void node_connected(struct core_leader *l, struct leader_node *node)
{
    if (node->connected) {
        return;
    }
    if (node->has_report || node->lost) {
        struct core_event *e = leader_event(l, CORE_EVENT_NODE_BACK);
        memcpy(e->node, node->name, sizeof(e->node));
        e->value_ms = l->now_ms - node->away_ms;
    }
    node->connected = 1;
    node->connected_ms = l->now_ms;
    node->lost = 0;
    node->away_ms = 0;
    node->dirty = 1;
    /* What it has may make checkpoints whole; a run that goes on does not need them now. */
    if (leader_has_apart(l) && l->record.phase != WIRE_PHASE_RUNNING) {
        l->scan_done &= l->scan_pending;
        leader_scan_want(l);
    }
}

void core_leader_on_report(struct core_leader *l, const struct wire_report *report, uint64_t now_ms)
{
    l->now_ms = now_ms;
    struct leader_node *node = leader_node_get(l, report->node);
    struct wire_report copy;
    if (report_is_stale(l, node, report) || wire_report_copy(&copy, report) < 0) {
        return;
    }
    int is_new_daemon = node->incarnation != report->node_incarnation;
    if (is_new_daemon) {
        wire_former_add(&node->former, node->incarnation);
        node->incarnation = report->node_incarnation;
        node->refused = 0;
        node->dirty = 1;
    }
    uint32_t index = (uint32_t)(node - l->nodes);
    for (uint32_t i = 0; i < report->arena_count; i++) {
        node->dirty |= report->arenas[i].extents.extent_count != 0; /* to acknowledge it */
    }
    leader_apart_report(l, index, &copy);
    report_arenas_merge(node, &copy);
    wire_report_close(&node->report);
    node->report = copy;
    node_connected(l, node);
    node->has_report = 1;
    node->stamp = ++l->stamp;
    for (uint32_t i = 0; i < report->proc_count; i++) {
        report_proc(l, index, &report->procs[i], node->stamp);
    }
    report_missing(l, index, node->stamp, is_new_daemon);
    leader_saves_report(l, index);
    leader_stir(l);
}

void core_leader_on_node_up(struct core_leader *l, const char *name, uint64_t now_ms)
{
    l->now_ms = now_ms;
    struct leader_node *node = leader_node_get(l, name);
    node->up = 1;
    node->dirty = 1;
}

void core_leader_on_node_down(struct core_leader *l, const char *name, uint64_t now_ms)
{
    l->now_ms = now_ms;
    struct leader_node *node = leader_node_find(l, name);
    if (node) {
        node->up = 0;
    }
    if (!node || !node->connected) {
        return;
    }
    node->connected = 0;
    node->away_ms = now_ms;
    struct core_event *e = leader_event(l, CORE_EVENT_NODE_AWAY);
    memcpy(e->node, node->name, sizeof(e->node));
    leader_stir(l);
}
