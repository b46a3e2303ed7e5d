/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/core/cluster.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/error.h"

/* Of this process's own time: others on the machine do not count. */
static double cluster_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

void cluster_init(struct cluster *c, uint32_t nodes, uint32_t ranks, uint32_t ranks_max)
{
    memset(c, 0, sizeof(*c));
    c->now = 1000;
    c->probe = 12;
    c->elems = 40ull * ranks;
    c->nodes = calloc(nodes, sizeof(*c->nodes));
    BL_ASSERT(c->nodes);
    c->node_count = nodes;
    for (uint32_t i = 0; i < nodes; i++) {
        snprintf(c->nodes[i].name, sizeof(c->nodes[i].name), "n%04u", i);
        c->nodes[i].incarnation = 1000 + i;
        c->nodes[i].ranks_max = ranks_max;
        c->nodes[i].up = 1;
    }
    c->config = (struct core_leader_config){.run = 7,
                                            .name = "job",
                                            .head_epoch = 1,
                                            .incarnation = 55,
                                            .seed = 3,
                                            .secret = 4,
                                            .ranks = ranks,
                                            .lanes = ranks,
                                            .nodes_min = nodes,
                                            .deadlines = {.beat = 100,
                                                          .lease = 1000,
                                                          .step_floor = 2000,
                                                          .step_ceil = 20000,
                                                          .init_floor = 4000,
                                                          .load = 4000,
                                                          .save = 5000,
                                                          .join = 3000,
                                                          .restart = 2000,
                                                          .grace = 1000},
                                            .job_json = "{}"};
}

static void cluster_start(struct cluster *c)
{
    if (!c->leader) {
        c->leader = core_leader_new(&c->config, c->now);
        BL_ASSERT(c->leader);
    }
}

void cluster_close(struct cluster *c)
{
    core_leader_free(c->leader);
    wire_record_close(&c->stored);
    for (uint32_t i = 0; i < c->node_count; i++) {
        wire_directive_close(&c->nodes[i].directive);
    }
    free(c->nodes);
    free(c->procs);
}

struct cluster_proc *cluster_rank(struct cluster *c, uint32_t rank)
{
    for (uint32_t i = c->proc_count; i-- > 0;) {
        struct cluster_proc *p = &c->procs[i];
        if (p->rank == rank && p->state >= WIRE_RANK_LOADING && p->state < WIRE_RANK_EXITED &&
            c->nodes[p->node].up) {
            return p;
        }
    }
    return NULL;
}

static struct cluster_proc *proc_find(struct cluster *c, uint64_t incarnation, uint32_t node)
{
    for (uint32_t i = 0; i < c->proc_count; i++) {
        if (c->procs[i].incarnation == incarnation && c->procs[i].node == node) {
            return &c->procs[i];
        }
    }
    return NULL;
}

/* ---- reports ---- */

/* The elements that the process holds: from *ret_lo up to the returned one. */
static uint64_t proc_part(const struct cluster *c, const struct cluster_proc *p, uint64_t *ret_lo)
{
    uint32_t parts = c->whole_replicas && p->copy ? p->copy : p->world;
    uint32_t part = p->rank % parts;
    uint64_t hi = c->elems * (part + 1) / parts + c->overlap;
    *ret_lo = c->elems * part / parts;
    return hi < c->elems ? hi : c->elems;
}

/* Adds up over any cut, as state digests do. */
static struct bl_state_digest proc_digest(const struct cluster *c, const struct cluster_proc *p,
                                          uint64_t step)
{
    uint64_t lo = 0;
    uint64_t count = proc_part(c, p, &lo) - lo;
    return (struct bl_state_digest){{count, count * (step + 1)}};
}

static void arena_fill(const struct cluster *c, struct cluster_proc *p,
                       struct wire_arena_info *info)
{
    struct bl_tensor tensor = {
        .kind = BL_KIND_PARAM, .dtype = BL_F32, .dims = 1, .shape = {c->elems}};
    struct bl_extent extent;
    uint32_t index = 0;
    strcpy(tensor.name, "w");
    memset(info, 0, sizeof(*info));
    info->arena = p->arena;
    info->incarnation = p->incarnation;
    info->slot_count = 3;
    info->slots[0] = (struct wire_slot_info){.state = WIRE_SLOT_SEALED,
                                             .pinned = (uint32_t)p->arena_pinned,
                                             .generation = p->arena_generation,
                                             .line = 1,
                                             .step = p->arena_step,
                                             .digest = proc_digest(c, p, p->arena_step)};
    if (p->told == p->arena) {
        return; /* extents travel once */
    }
    p->told = p->arena;
    int rc = bl_extent_list_tensor(&info->extents, &tensor, &index, NULL);
    uint64_t lo = 0;
    uint64_t hi = proc_part(c, p, &lo);
    bl_extent_whole(&extent, &tensor, index, lo, hi);
    rc = rc < 0 ? rc : bl_extent_list_add(&info->extents, &extent);
    BL_ASSERT(rc == 0);
}

static void proc_report(const struct cluster *c, struct cluster_proc *p, struct wire_proc_report *r)
{
    memset(r, 0, sizeof(*r));
    r->beat = p->beat;
    r->beat.step = p->beat.step ? p->beat.step : p->step + 1;
    r->beat.section = BELAY_SECTION_STEP;
    r->exit = p->status;
    r->pid = 77;
    r->rank = (struct wire_rank_report){.run = 7,
                                        .incarnation = p->incarnation,
                                        .sequence = ++p->sequence,
                                        .state = p->state,
                                        .generation = p->generation,
                                        .applied_step = p->step,
                                        .arena = p->has_arena ? p->arena : 0,
                                        .function_id = p->function_id,
                                        .probe = p->probe,
                                        .failed_generation = p->failed_generation,
                                        .failed_code = p->failed_code,
                                        .failed_text = "a peer was lost",
                                        .stop_flags = p->stop_flags,
                                        .request_done = p->request_done,
                                        .ready_digest = proc_digest(c, p, p->step)};
    if (p->state == WIRE_RANK_STARTING) {
        r->rank.sequence = 0;
    }
    if (c->spoil > 0) {
        r->rank.ready_digest.sum[0] += 1;
    }
}

static void node_report(struct cluster *c, uint32_t index)
{
    struct cluster_node *node = &c->nodes[index];
    struct wire_report report = {.node_incarnation = node->incarnation,
                                 .run = 7,
                                 .sequence = ++node->sequence,
                                 .generation = node->directive.generation,
                                 .phase = node->directive.phase,
                                 .leader_incarnation = node->directive.leader_incarnation,
                                 .directive_sequence = node->directive.sequence,
                                 .ranks_max = node->ranks_max};
    uint32_t count = 0;
    for (uint32_t i = 0; i < c->proc_count; i++) {
        count += c->procs[i].node == index;
    }
    snprintf(report.node, sizeof(report.node), "%s", node->name);
    report.procs = calloc(count + 1, sizeof(*report.procs));
    report.arenas = calloc(count + 1, sizeof(*report.arenas));
    BL_ASSERT(report.procs && report.arenas);
    for (uint32_t i = 0; i < c->proc_count; i++) {
        struct cluster_proc *p = &c->procs[i];
        if (p->node != index) {
            continue;
        }
        proc_report(c, p, &report.procs[report.proc_count++]);
        if (p->has_arena) {
            arena_fill(c, p, &report.arenas[report.arena_count++]);
        }
    }
    for (uint32_t k = 0; k < node->directive.save_count; k++) {
        if (node->directive.saves[k].state == WIRE_SAVE_WRITE &&
            !(c->held_roots >> node->directive.saves[k].root & 1)) {
            report.saves[report.save_count].attempt = node->directive.saves[k].attempt;
            report.saves[report.save_count++].state = WIRE_SAVE_WRITTEN;
        }
    }
    double start = cluster_seconds();
    core_leader_on_report(c->leader, &report, c->now);
    c->leader_s += cluster_seconds() - start;
    wire_report_close(&report);
}

/* ---- directives ---- */

static void node_order(struct cluster *c, uint32_t index, const struct wire_proc_order *order)
{
    struct cluster_proc *p = proc_find(c, order->incarnation, index);
    if (order->forget) {
        if (p && p->state == WIRE_RANK_EXITED) {
            *p = c->procs[--c->proc_count];
        }
        return;
    }
    if (!p && !order->kill) {
        if (c->proc_count == c->proc_capacity) {
            c->proc_capacity = c->proc_capacity ? c->proc_capacity * 2 : 64;
            c->procs = realloc(c->procs, c->proc_capacity * sizeof(*c->procs));
            BL_ASSERT(c->procs);
        }
        p = &c->procs[c->proc_count++];
        memset(p, 0, sizeof(*p));
        p->incarnation = order->incarnation;
        p->node = index;
        p->rank = order->rank;
        p->world = 1;
        p->function_id = 11;
        p->probe = c->probe;
        p->state = c->no_start ? WIRE_RANK_STARTING : WIRE_RANK_JOINED;
    }
    if (p && order->kill && p->state != WIRE_RANK_EXITED) {
        p->killed = 1;
        p->stacks = order->stacks;
        cluster_die(c, p, -1, 9);
        p->status.by_us = 1;
    }
}

static void proc_plan(struct cluster *c, struct cluster_proc *p, const struct wire_plan *plan)
{
    for (uint32_t r = 0; r < plan->world; r++) {
        if (plan->members[r].incarnation != p->incarnation || p->state == WIRE_RANK_READY) {
            continue;
        }
        uint32_t copy = plan->tp * plan->pp;
        if (!p->has_arena || p->rank != r || p->world != plan->world || p->copy != copy) {
            p->arena = bl_mix64(p->incarnation + plan->generation);
            p->arena_generation = plan->generation;
        }
        if (p->arena_step != plan->step) {
            p->arena_generation = plan->generation;
        }
        p->has_arena = 1;
        p->arena_step = plan->step;
        p->rank = r;
        p->world = plan->world;
        p->copy = copy;
        p->stop_flags = 0;
        p->step = plan->step;
        p->generation = plan->generation;
        p->failed_generation = c->unready ? plan->generation : 0;
        p->state = c->unready ? WIRE_RANK_LOADING : WIRE_RANK_READY;
    }
}

static void proc_told(struct cluster *c, struct cluster_proc *p, const struct wire_directive *d)
{
    if (p->state == WIRE_RANK_EXITED || p->state == WIRE_RANK_STARTING || p->stuck) {
        return;
    }
    if (d->phase == WIRE_PHASE_DONE) {
        cluster_die(c, p, 0, 0);
    } else if (d->generation > p->generation) {
        p->state = WIRE_RANK_PARKED;
        p->generation = d->generation;
    }
    if (d->phase == WIRE_PHASE_PLANNED && p->state == WIRE_RANK_PARKED &&
        p->generation == d->generation) {
        proc_plan(c, p, &d->plan);
    } else if (d->phase == WIRE_PHASE_RUNNING && p->state == WIRE_RANK_READY &&
               p->generation == d->generation) {
        p->state = WIRE_RANK_RUNNING;
    }
}

static void node_told(struct cluster *c, uint32_t index)
{
    struct cluster_node *node = &c->nodes[index];
    wire_directive_close(&node->directive);
    core_leader_directive(c->leader, node->name, &node->directive);
    const struct wire_directive *d = &node->directive;
    if (!node->up) {
        return;
    }
    for (uint32_t i = 0; d->node_incarnation == node->incarnation && i < d->order_count; i++) {
        node_order(c, index, &d->orders[i]);
    }
    for (uint32_t i = 0; i < c->proc_count; i++) {
        struct cluster_proc *p = &c->procs[i];
        for (uint32_t k = 0; k < d->drop_count; k++) {
            if (p->node == index && p->has_arena && p->arena == d->drop_arenas[k]) {
                p->has_arena = 0;
            }
        }
        if (p->node == index) {
            proc_told(c, p, d);
            p->arena_pinned = p->arena_pinned && p->arena_step > d->unpin_through;
        }
    }
    node->told = 1;
}

static int cluster_effect(struct cluster *c)
{
    struct core_leader_effect e;
    double start = cluster_seconds();
    int has_effect = core_leader_next_effect(c->leader, &e);
    c->leader_s += cluster_seconds() - start;
    if (!has_effect) {
        return 0;
    }
    switch (e.kind) {
    case CORE_LEADER_DIRECTIVE:
        node_told(c, (uint32_t)strtoul(e.node + 1, NULL, 10));
        break;
    case CORE_LEADER_STORE:
        if (c->hold_store) {
            c->held_put = e.op;
            break;
        }
        c->opens += core_leader_record(c->leader)->phase == WIRE_PHASE_OPEN;
        wire_record_close(&c->stored);
        BL_ASSERT(wire_record_copy(&c->stored, core_leader_record(c->leader)) == 0);
        core_leader_on_store_done(c->leader, e.op, 0, ++c->version, c->now);
        break;
    case CORE_LEADER_SCAN:
        c->scans++;
        if (c->hold_scan) {
            break;
        }
        core_leader_on_scan_done(c->leader, c->scan_failed ? -5 : 0, c->scan_failed, c->disk,
                                 c->disk_count, c->now);
        break;
    case CORE_LEADER_COMMIT: {
        struct core_commit commit;
        int rc = c->commit_rc;
        if (core_leader_commit(c->leader, e.attempt, &commit) == 0) {
            rc = c->commit_failed >> commit.root & 1 ? -5 : rc;
            free(commit.parts);
        }
        if (c->hold_commit) {
            c->held_commit = e.attempt;
            break;
        }
        core_leader_on_commit_done(c->leader, e.attempt, rc, "", 1, c->now);
        break;
    }
    case CORE_LEADER_EVENT:
        c->events[e.event.code]++;
        if (e.event.code == CORE_EVENT_RECOVERED) {
            memcpy(c->recovered, e.event.text, sizeof(c->recovered));
        }
        if (e.event.code == CORE_EVENT_RESHAPED || e.event.code == CORE_EVENT_GROWN) {
            memcpy(c->reshaped, e.event.text, sizeof(c->reshaped));
        }
        if (e.event.code == CORE_EVENT_DIGEST_DIFFERS) {
            c->spoil--;
        }
        break;
    case CORE_LEADER_FINISHED:
        c->finished = 1;
        c->verdict = e.verdict;
        break;
    case CORE_LEADER_RETAIN:
    case CORE_LEADER_DEPOSED:
    case CORE_LEADER_NONE:
        break;
    }
    return 1;
}

/* Effects, then the reports of all nodes that were told something, until nothing happens. */
static void cluster_drain(struct cluster *c)
{
    for (int busy = 1; busy;) {
        busy = 0;
        while (cluster_effect(c)) {
            busy = 1;
        }
        for (uint32_t i = 0; i < c->node_count; i++) {
            if (c->nodes[i].told) {
                c->nodes[i].told = 0;
                node_report(c, i);
            }
        }
    }
}

void cluster_settle(struct cluster *c)
{
    cluster_start(c);
    for (uint32_t i = 0; i < c->node_count; i++) {
        if (c->nodes[i].up) {
            node_report(c, i);
        }
    }
    cluster_drain(c);
}

void cluster_pass(struct cluster *c, uint64_t ms)
{
    for (uint64_t end = c->now + ms; c->now < end;) {
        c->now += 100;
        cluster_settle(c);
        core_leader_on_tick(c->leader, c->now);
        cluster_drain(c);
    }
}

void cluster_step(struct cluster *c)
{
    uint64_t step = UINT64_MAX;
    for (uint32_t i = 0; i < c->proc_count; i++) {
        if (c->procs[i].state == WIRE_RANK_RUNNING && c->procs[i].stuck) {
            return; /* unanimous or not at all */
        }
    }
    for (uint32_t i = 0; i < c->proc_count; i++) {
        struct cluster_proc *p = &c->procs[i];
        if (p->state == WIRE_RANK_RUNNING) {
            step = ++p->step;
            p->arena_step = step;
            p->arena_generation = p->generation;
        }
    }
    cluster_pass(c, 100);
}

void cluster_die(struct cluster *c, struct cluster_proc *p, int code, int signal)
{
    (void)c;
    p->state = WIRE_RANK_EXITED;
    p->status = (struct wire_exit){.code = signal ? -1 : code, .signal = signal};
}

void cluster_node_down(struct cluster *c, uint32_t node)
{
    c->nodes[node].up = 0;
    core_leader_on_node_down(c->leader, c->nodes[node].name, c->now);
}

void cluster_node_up(struct cluster *c, uint32_t node)
{
    c->nodes[node].up = 1;
    core_leader_on_node_up(c->leader, c->nodes[node].name, c->now);
}

void cluster_leave(struct cluster *c, uint32_t flags)
{
    for (uint32_t i = 0; i < c->proc_count; i++) {
        if (c->procs[i].state == WIRE_RANK_RUNNING) {
            c->procs[i].state = WIRE_RANK_LEAVING;
            c->procs[i].stop_flags = flags;
            c->procs[i].arena_pinned = 1;
        }
    }
}

struct core_status_root cluster_root_status(struct cluster *c, uint32_t root)
{
    struct core_status status;
    core_leader_status(c->leader, &status, c->now);
    struct core_status_root ret = status.roots[root];
    core_status_close(&status);
    return ret;
}
