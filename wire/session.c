/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The session's life: directives in, the state diagram of docs/protocol.md, effects out. Votes are
 * in session_vote.c, slots in session_slots.c.
 *
 * Two counters say where this process stands. `called_generation` is the newest generation that it
 * heard of; `ack_generation` the one that it acknowledges in reports: parked for, or member of.
 * Between the two lies the way to the safe point, which nothing may cut short.
 */
#include "wire/session_state.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SESSION_REPORT_MS 500 /* a report is repeated, in case one was lost */

struct wire_session *wire_session_new(const struct wire_session_config *config)
{
    struct wire_session *s = calloc(1, sizeof(*s));
    if (!s) {
        return NULL;
    }
    s->config = *config;
    s->state = WIRE_RANK_JOINED;
    s->begun = -1;
    s->report_due = 1;
    return s;
}

void wire_session_free(struct wire_session *s)
{
    if (!s) {
        return;
    }
    wire_plan_close(&s->plan);
    free(s->effects);
    free(s);
}

/* ---- effects ---- */

static struct wire_session_effect *effect_slot(struct wire_session *s)
{
    if (s->effect_count == s->effect_capacity) {
        size_t capacity = s->effect_capacity ? s->effect_capacity * 2 : 32;
        struct wire_session_effect *grown = malloc(capacity * sizeof(*grown));
        BL_ASSERT(grown);
        for (size_t i = 0; i < s->effect_count; i++) {
            grown[i] = s->effects[(s->effect_first + i) % s->effect_capacity];
        }
        free(s->effects);
        s->effects = grown;
        s->effect_capacity = capacity;
        s->effect_first = 0;
    }
    return &s->effects[(s->effect_first + s->effect_count++) % s->effect_capacity];
}

void session_effect_push(struct wire_session *s, enum wire_session_effect_kind kind)
{
    *effect_slot(s) = (struct wire_session_effect){.kind = kind};
}

void session_effect_vote(struct wire_session *s, uint32_t to, const struct wire_vote *vote)
{
    *effect_slot(s) =
        (struct wire_session_effect){.kind = WIRE_EFFECT_VOTE, .to = to, .vote = *vote};
}

void session_effect_purge(struct wire_session *s)
{
    for (size_t i = 0; i < s->effect_count; i++) {
        struct wire_session_effect *e = &s->effects[(s->effect_first + i) % s->effect_capacity];
        if (e->kind == WIRE_EFFECT_VOTE || e->kind == WIRE_EFFECT_VOTE_DONE) {
            e->kind = WIRE_EFFECT_NONE;
        }
    }
}

int wire_session_next_effect(struct wire_session *s, struct wire_session_effect *ret)
{
    while (s->effect_count > 0) {
        *ret = s->effects[s->effect_first];
        s->effect_first = (s->effect_first + 1) % s->effect_capacity;
        s->effect_count--;
        if (ret->kind != WIRE_EFFECT_NONE) {
            return 1;
        }
    }
    if (s->report_due) {
        s->report_due = 0;
        s->report_ms = s->now_ms;
        *ret = (struct wire_session_effect){.kind = WIRE_EFFECT_REPORT};
        return 1;
    }
    return 0;
}

/* ---- directives ---- */

static void session_plan_take(struct wire_session *s, const struct wire_rank_directive *d)
{
    struct wire_plan plan;
    if (wire_plan_copy(&plan, &d->plan) < 0) {
        return; /* out of memory: the daemon repeats it */
    }
    wire_plan_close(&s->plan);
    s->plan = plan;
    s->has_plan = 1;
    s->rank = d->rank;
    s->loaded = 0;
    s->left = 0;
    s->state = WIRE_RANK_LOADING;
    s->stop_flags = 0;
    s->pin_step = 0;
    s->request_done = 0;
    memset(&s->ready_digest, 0, sizeof(s->ready_digest));
    session_vote_reset(s);
    session_slots_void(s);
    session_effect_push(s, WIRE_EFFECT_PLAN);
    s->report_due = 1;
}

/* A generation newer than any heard of. */
static void session_called(struct wire_session *s, uint64_t generation)
{
    s->called_generation = generation;
    s->request_id = 0;
    if (s->state == WIRE_RANK_JOINED || s->state == WIRE_RANK_PARKED) {
        s->state = WIRE_RANK_PARKED;
        s->ack_generation = generation > s->ack_generation ? generation : s->ack_generation;
    } else if (s->has_plan || s->state == WIRE_RANK_LEAVING) {
        session_effect_purge(s);
        session_effect_push(s, WIRE_EFFECT_GENERATION);
    }
    s->report_due = 1;
}

static int directive_is_stale(const struct wire_session *s, const struct wire_rank_directive *d)
{
    if (d->run != s->config.run || d->incarnation != s->config.incarnation) {
        return 1;
    }
    if (d->node_incarnation == s->directive_node) {
        if (d->sequence <= s->directive_sequence) {
            return 1;
        }
    } else if (wire_former_has(&s->nodes_former, d->node_incarnation)) {
        return 1;
    }
    return d->generation < s->called_generation ||
           (d->generation == s->called_generation && d->phase < s->called_phase);
}

/* Which saves are under way, and how often there are some. Pins that are not needed any more go. */
static void directive_saves(struct wire_session *s, const struct wire_rank_directive *d)
{
    memcpy(s->every, d->every, sizeof(s->every));
    if (d->unpin_through == s->unpin_through && d->saves_through == s->saves_through &&
        memcmp(d->saves_kept, s->saves_kept, sizeof(s->saves_kept)) == 0) {
        return;
    }
    s->unpin_through = d->unpin_through; /* the newest word counts: a plan may have gone back */
    s->saves_through = d->saves_through;
    memcpy(s->saves_kept, d->saves_kept, sizeof(s->saves_kept));
    session_slots_unpin(s);
    session_vote_again(s, s->now_ms);
}

static void directive_end(struct wire_session *s, const struct wire_rank_directive *d)
{
    if (d->refused && !s->refused) {
        s->refused = 1;
        session_effect_push(s, WIRE_EFFECT_REFUSED);
    }
    if (d->phase == WIRE_PHASE_DONE && !s->stop_said) {
        s->stop_said = 1;
        session_effect_push(s, WIRE_EFFECT_STOPPED);
    }
    if (d->leave && !s->leave_said) {
        s->leave_said = 1;
        if (s->state == WIRE_RANK_LEAVING) {
            session_effect_push(s, WIRE_EFFECT_LEAVE);
        }
    }
}

void wire_session_on_directive(struct wire_session *s, const struct wire_rank_directive *d,
                               uint64_t now_ms)
{
    s->now_ms = now_ms;
    if (directive_is_stale(s, d)) {
        return;
    }
    if (d->node_incarnation != s->directive_node) {
        wire_former_add(&s->nodes_former, s->directive_node);
        s->directive_node = d->node_incarnation;
    }
    s->directive_sequence = d->sequence;
    s->report_due = 1; /* carries the acknowledgement */
    snprintf(s->text, sizeof(s->text), "%s", d->text);
    if (d->generation > s->called_generation && d->phase != WIRE_PHASE_DONE) {
        session_called(s, d->generation);
    }
    s->called_phase = d->phase;
    s->request_id = d->request_id;
    s->request_flags = d->request_flags;
    directive_saves(s, d);
    if (d->phase == WIRE_PHASE_PLANNED && d->has_plan && s->state == WIRE_RANK_PARKED &&
        s->ack_generation == d->generation && d->plan.generation == d->generation &&
        d->rank < d->plan.world) {
        session_plan_take(s, d);
    }
    if (d->phase == WIRE_PHASE_RUNNING && d->has_plan && s->state == WIRE_RANK_READY &&
        s->has_plan && s->plan.generation == d->generation && !s->left) {
        s->state = WIRE_RANK_RUNNING;
        session_effect_push(s, WIRE_EFFECT_GO);
    }
    directive_end(s, d);
}

void wire_session_on_link_up(struct wire_session *s)
{
    s->report_due = 1;
}

uint64_t wire_session_on_tick(struct wire_session *s, uint64_t now_ms)
{
    s->now_ms = now_ms;
    uint64_t next = session_vote_tick(s, now_ms);
    if (now_ms - s->report_ms >= SESSION_REPORT_MS) {
        s->report_due = 1;
    }
    uint64_t report = s->report_due ? now_ms + SESSION_REPORT_MS : s->report_ms + SESSION_REPORT_MS;
    return next < report ? next : report;
}

/* ---- the main thread's calls ---- */

int wire_session_loaded(struct wire_session *s, int rc, const char *text,
                        const struct bl_state_digest *digest)
{
    if (session_is_over(s)) {
        return BL_EGEN;
    }
    if (s->state != WIRE_RANK_LOADING) {
        return -EPROTO;
    }
    if (rc < 0) {
        wire_session_failed(s, rc, text);
        return 0;
    }
    if (s->begun >= 0) {
        return -EPROTO;
    }
    s->loaded = 1;
    s->ready_digest = *digest;
    s->applied_step = s->plan.step;
    return 0;
}

int wire_session_ready(struct wire_session *s)
{
    if (s->stop_said) {
        return BL_ESTOPPED;
    }
    if (session_is_over(s)) {
        return BL_EGEN;
    }
    if (s->state != WIRE_RANK_LOADING || !s->loaded) {
        return -EPROTO;
    }
    s->state = WIRE_RANK_READY;
    s->report_due = 1;
    return 0;
}

void wire_session_failed(struct wire_session *s, int code, const char *text)
{
    if (!s->has_plan || s->left) {
        return;
    }
    s->left = 1;
    s->failed_generation = s->plan.generation;
    s->failed_code = code;
    snprintf(s->failed_text, sizeof(s->failed_text), "%s", text ? text : "");
    session_effect_purge(s);
    s->report_due = 1;
}

int wire_session_park(struct wire_session *s)
{
    if (s->begun >= 0 && s->state == WIRE_RANK_LOADING) {
        wire_slot_free(&s->slots[s->begun]); /* half loaded: not a copy */
        s->begun = -1;
    }
    if (s->begun >= 0) {
        if (session_has_rule(s, WIRE_RULE_PARK_WAITS_SEAL)) {
            return -EAGAIN;
        }
        s->begun = -1;
    }
    uint64_t next = s->has_plan ? s->plan.generation + 1 : s->ack_generation;
    s->ack_generation = s->called_generation > next ? s->called_generation : next;
    s->state = WIRE_RANK_PARKED;
    s->has_plan = 0;
    s->left = 0;
    s->leave_wanted = 0;
    s->pin_step = 0;
    wire_plan_close(&s->plan);
    session_effect_purge(s);
    s->report_due = 1;
    return 0;
}

void wire_session_leave(struct wire_session *s, int code)
{
    s->leave_code = code;
    s->report_due = 1;
    if (s->begun >= 0 && s->state == WIRE_RANK_RUNNING) {
        s->leave_wanted = 1; /* LEAVING says that the slots are sealed */
        return;
    }
    s->state = WIRE_RANK_LEAVING;
    if (s->leave_said) {
        session_effect_push(s, WIRE_EFFECT_LEAVE);
    }
}

/* ---- views ---- */

void wire_session_report(struct wire_session *s, struct wire_rank_report *ret)
{
    memset(ret, 0, sizeof(*ret));
    ret->run = s->config.run;
    ret->incarnation = s->config.incarnation;
    ret->sequence = ++s->sequence;
    ret->state = s->state;
    ret->generation = s->has_plan ? s->plan.generation : s->ack_generation;
    ret->applied_step = s->applied_step;
    ret->voted_step = s->vote.done_step;
    ret->arena = s->arena;
    ret->function_id = s->config.function_id;
    ret->probe = s->config.probe;
    memcpy(ret->endpoint, s->config.endpoint, sizeof(ret->endpoint));
    memcpy(ret->vote_addr, s->config.vote_addr, sizeof(ret->vote_addr));
    ret->failed_generation = s->failed_generation;
    ret->failed_code = s->failed_code;
    memcpy(ret->failed_text, s->failed_text, sizeof(ret->failed_text));
    ret->ready_digest = s->ready_digest;
    ret->request_done = s->request_done;
    ret->skipped_save = s->skipped_save;
    ret->stop_flags = s->stop_flags && s->applied_step == s->stop_step ? s->stop_flags : 0;
    ret->leave_code = s->leave_code;
    ret->directive_node = s->directive_node;
    ret->directive_sequence = s->directive_sequence;
}

const struct wire_plan *wire_session_plan(const struct wire_session *s, uint32_t *ret_rank)
{
    if (!s->has_plan) {
        return NULL;
    }
    if (ret_rank) {
        *ret_rank = s->rank;
    }
    return &s->plan;
}

uint64_t wire_session_generation(const struct wire_session *s)
{
    return s->has_plan ? s->plan.generation : s->ack_generation;
}

const char *wire_session_text(const struct wire_session *s)
{
    return s->text;
}
