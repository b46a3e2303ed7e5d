/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The leader: start, inputs, effects. The phases live in leader_open.c, leader_plan.c and
 * leader_run.c; inputs are followed by leader_step, which looks at everything that is known and
 * does what follows from it. Nothing depends on which input came last.
 */
#include "daemon/core/leader_state.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char *text_copy(const char *text)
{
    char *copy = strdup(text ? text : "");
    BL_ASSERT(copy);
    return copy;
}

/* Members of a plan that an earlier leader made: they live until their daemon says otherwise. */
static void leader_adopt_plan(struct core_leader *l)
{
    for (uint32_t i = 0; i < l->record.plan.world; i++) {
        const struct wire_member *member = &l->record.plan.members[i];
        struct leader_node *node = leader_node_get(l, member->node);
        struct leader_proc *p =
            leader_proc_add(l, member->incarnation, (uint32_t)(node - l->nodes));
        p->life = LEADER_LIVE;
        p->rank = i;
        p->ran_generation = l->record.plan.generation;
    }
    if (l->record.plan.world) {
        l->shape = leader_plan_layout(l);
        l->ran_generation = l->record.plan.generation;
    }
    leader_plan_seat(l);
}

struct core_leader *core_leader_new(const struct core_leader_config *config, uint64_t now_ms)
{
    struct core_leader *l = calloc(1, sizeof(*l));
    if (!l) {
        return NULL;
    }
    l->config = *config;
    l->config.record = NULL;
    l->name = text_copy(config->name);
    l->job_json = text_copy(config->job_json);
    l->node = config->node ? text_copy(config->node) : NULL;
    l->config.name = l->name;
    l->config.node = l->node;
    l->config.job_json = l->job_json;
    l->random = bl_mix64(config->seed ^ bl_mix64(config->incarnation));
    l->now_ms = now_ms;
    l->start_ms = now_ms;
    l->phase_ms = now_ms;
    l->scan_wanted = config->root_count > 0;
    l->is_beginning = !config->record || config->resume;
    l->scan_done = config->root_count == 0;
    core_ring_init(&l->effects, sizeof(struct core_leader_effect));
    if (config->record) {
        int rc = wire_record_copy(&l->record, config->record);
        BL_ASSERT(rc == 0);
        l->version = config->record_version;
        if (config->resume) { /* the job may have other ranks, layout or roots than before */
            free(l->record.job_json);
            l->record.job_json = text_copy(config->job_json);
        }
        if (l->record.phase != WIRE_PHASE_DONE) {
            leader_adopt_plan(l);
        }
        uint64_t committed = l->record.committed_step;
        l->step = committed == UINT64_MAX ? 0 : committed;
        l->step = l->step < l->record.plan.step ? l->record.plan.step : l->step;
        /* What the leader before had decided: pins of it may go at any moment. */
        l->saves_through = committed == UINT64_MAX ? 0 : committed;
    } else {
        l->record.run = config->run;
        l->record.line = 1;
        l->record.committed_step = UINT64_MAX;
        snprintf(l->record.name, sizeof(l->record.name), "%s", l->name);
    }
    uint64_t secret[3] = {l->config.secret, l->config.run, l->config.incarnation};
    l->file_key[0] = bl_xxh3(secret, sizeof(secret));
    l->file_key[1] = bl_xxh3(secret, sizeof(secret) - 8) ^ bl_mix64(l->file_key[0]);
    leader_roots_init(l, config);
    leader_event(l, CORE_EVENT_RUN_STARTED);
    leader_stir(l);
    return l;
}

void core_leader_free(struct core_leader *l)
{
    if (!l) {
        return;
    }
    leader_roots_close(l);
    free(l->name);
    free(l->node);
    free(l->job_json);
    leader_saves_close(l);
    leader_apart_close(l);
    leader_nodes_close(l);
    wire_record_close(&l->record);
    wire_record_close(&l->next);
    free(l->checkpoints);
    core_ring_close(&l->effects);
    free(l);
}

/* ---- effects ---- */

struct core_event *leader_event(struct core_leader *l, enum core_event_code code)
{
    struct core_leader_effect *e = core_ring_push(&l->effects);
    e->kind = CORE_LEADER_EVENT;
    e->event.code = code;
    e->event.time_ms = l->now_ms;
    e->event.generation = l->record.generation;
    e->event.step = l->step;
    e->event.rank = CORE_NO_RANK;
    e->event.phase = (uint32_t)l->record.phase;
    return &e->event;
}

void leader_event_proc(struct core_leader *l, enum core_event_code code,
                       const struct leader_proc *p, const char *text)
{
    struct core_event *e = leader_event(l, code);
    e->rank = p->rank;
    e->incarnation = p->incarnation;
    e->exit_code = p->status.code;
    e->signal = p->status.signal;
    e->step = p->report.applied_step;
    memcpy(e->node, l->nodes[p->node].name, sizeof(e->node));
    snprintf(e->text, sizeof(e->text), "%s", text);
}

int core_leader_next_effect(struct core_leader *l, struct core_leader_effect *ret)
{
    if (core_ring_pop(&l->effects, ret)) {
        return 1;
    }
    if (l->stirred) {
        leader_step(l);
        if (core_ring_pop(&l->effects, ret)) {
            return 1;
        }
    }
    memset(ret, 0, sizeof(*ret));
    if (leader_directive_due(l, ret->node)) {
        ret->kind = CORE_LEADER_DIRECTIVE;
        return 1;
    }
    return 0;
}

/* ---- the disk ---- */

static void leader_scan_step(struct core_leader *l)
{
    if (l->scan_wanted && !l->scan_pending && l->now_ms >= l->scan_retry_ms) {
        l->scan_wanted = 0;
        l->scan_pending = 1;
        l->scan_answered = 0;
        l->scan_from = l->checkpoint_count;
        leader_apart_scan(l);
        ((struct core_leader_effect *)core_ring_push(&l->effects))->kind = CORE_LEADER_SCAN;
    }
}

/* ---- the step ---- */

static uint32_t nodes_connected(const struct core_leader *l)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < l->node_count; i++) {
        count += l->nodes[i].connected && l->nodes[i].report.ranks_max > 0;
    }
    return count;
}

/* Nothing has been decided for this run yet: wait for its daemons, then open its first generation.
 */
static void leader_start_step(struct core_leader *l)
{
    uint32_t wanted = l->config.nodes_min ? l->config.nodes_min : 1;
    uint32_t connected = nodes_connected(l);

    if (l->stop_asked) {
        leader_end_send(l, WIRE_VERDICT_STOPPED, "stopped before it began");
        return;
    }
    struct leader_pick none = {0};
    int lacks = l->scan_done ? leader_scan_lacks(l, &none) : -1;
    if (lacks >= 0) {
        leader_scan_wait(l, (uint32_t)lacks);
        return;
    }
    if (!l->scan_done) {
        leader_wait_set(l, CORE_WAIT_SCAN, "the first scan of the roots");
        leader_scan_want(l);
        return;
    }
    if (connected < wanted) {
        leader_wait_set(l, CORE_WAIT_NODES, "%u of %u nodes", connected, wanted);
        return;
    }
    leader_cause(l, 0, "the run starts");
    leader_open_send(l);
}

/* A record was found: say who leads now, and open a new generation where one was half made. */
static void leader_claim_step(struct core_leader *l)
{
    if (l->record.phase == WIRE_PHASE_DONE && !l->config.resume) {
        l->claimed = 1;
        return;
    }
    if (!leader_change_is_free(l)) {
        return;
    }
    if (l->record.phase == WIRE_PHASE_RUNNING) {
        leader_change_begin(l, LEADER_CLAIM);
        leader_change_send(l);
        return;
    }
    uint32_t wanted = l->config.nodes_min ? l->config.nodes_min : 1;
    uint32_t connected = nodes_connected(l);

    int is_resumed = l->record.phase == WIRE_PHASE_DONE || l->record.phase == WIRE_PHASE_NONE;

    if (is_resumed && connected < wanted && !l->stop_asked) {
        leader_wait_set(l, CORE_WAIT_NODES, "%u of %u nodes", connected, wanted);
        return;
    }
    leader_cause(l, 0, "%s", is_resumed ? "the run is resumed" : "the leader was started anew");
    leader_open_send(l);
}

void leader_stir(struct core_leader *l)
{
    l->stirred = 1;
}

void leader_step(struct core_leader *l)
{
    l->stirred = 0;
    if (l->deposed || l->finished) {
        return;
    }
    leader_scan_step(l);
    leader_scan_finish(l);
    if (!l->claimed) {
        if (l->version) {
            leader_claim_step(l);
        } else if (leader_change_is_free(l)) {
            leader_start_step(l);
        }
        return;
    }
    leader_saves_step(l);
    switch (l->record.phase) {
    case WIRE_PHASE_OPEN:
        leader_open_step(l);
        break;
    case WIRE_PHASE_PLANNED:
        leader_plan_step(l);
        break;
    case WIRE_PHASE_RUNNING:
        leader_run_step(l);
        break;
    case WIRE_PHASE_DONE:
        leader_end_step(l);
        break;
    case WIRE_PHASE_NONE:
        break;
    }
    leader_drops_step(l);
    leader_procs_sweep(l);
}

uint64_t core_leader_on_tick(struct core_leader *l, uint64_t now_ms)
{
    l->now_ms = now_ms;
    leader_step(l);
    return now_ms + l->config.deadlines.beat;
}

int core_leader_on_request(struct core_leader *l, enum core_request request, uint64_t now_ms)
{
    l->now_ms = now_ms;
    if (l->record.phase == WIRE_PHASE_DONE) {
        return -EALREADY;
    }
    switch (request) {
    case CORE_REQUEST_SAVE:
        l->save_asked = 1;
        l->save_asked_done = 0;
        l->save_asked_step = l->step;
        l->save_asked_tries = 0;
        break;
    case CORE_REQUEST_STOP:
        l->stop_asked = 1;
        break;
    case CORE_REQUEST_ABANDON:
        l->abandon = 1;
        break;
    case CORE_REQUEST_RESUME:
        l->hold = 0;
        l->recover_count = 0;
        break;
    }
    leader_stir(l);
    return 0;
}
