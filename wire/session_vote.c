/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Votes, on a tree over ranks:
 *
 *              0                 up:   "my whole subtree voted for n", OR of its flags
 *         /    |    \            down: "all voted for n", OR of all flags
 *        1 ... 8
 *      / | \
 *     9 ...16
 *
 * A rank repeats an unanswered vote to its parent; a parent that has the result answers with it.
 * Nobody repeats downwards by itself: who lost a result asks again.
 */
#include "wire/session_state.h"

#include <errno.h>
#include <string.h>

static uint32_t vote_parent(uint32_t rank)
{
    return (rank - 1) / WIRE_VOTE_FANOUT;
}

/* Children of the session's rank: [first, first + count). */
static uint32_t vote_children(const struct wire_session *s, uint32_t *ret_first)
{
    uint64_t first = (uint64_t)s->rank * WIRE_VOTE_FANOUT + 1;
    uint64_t world = s->plan.world;

    *ret_first = (uint32_t)first;
    if (first >= world) {
        return 0;
    }
    return (uint32_t)(world - first < WIRE_VOTE_FANOUT ? world - first : WIRE_VOTE_FANOUT);
}

static struct wire_vote vote_make(const struct wire_session *s, uint64_t step, uint32_t flags,
                                  uint32_t is_result)
{
    struct wire_vote vote = {.run = s->config.run,
                             .generation = s->plan.generation,
                             .line = s->plan.line,
                             .step = step,
                             .from = s->rank,
                             .flags = flags,
                             .is_result = is_result};
    return vote;
}

void session_vote_reset(struct wire_session *s)
{
    memset(&s->vote, 0, sizeof(s->vote));
    s->vote.done_step = s->plan.step;
}

/* All have voted for the next step: the result is known here. */
static void vote_conclude(struct wire_session *s, uint64_t step, uint32_t flags)
{
    struct session_vote *v = &s->vote;
    uint32_t first = 0;
    uint32_t children = vote_children(s, &first);
    struct wire_vote result = vote_make(s, step, flags, 1);
    const uint32_t last = BELAY_VOTE_STOP | BELAY_VOTE_FINAL;

    v->done_step = step;
    v->done_flags = flags;
    if (v->own_request) {
        s->request_done = v->own_request;
    }
    v->own_step = 0;
    v->own_request = 0;
    v->sent = 0;
    if (flags & (last | BELAY_VOTE_GROW)) {
        v->held = 1;
        s->stop_step = step;
        s->stop_flags = flags & (last | BELAY_VOTE_GROW);
    }
    /* The last step needs no slot behind it, so it can always be pinned. */
    if (flags & last || (flags & (BELAY_VOTE_SAVE | BELAY_VOTE_BUSY)) == BELAY_VOTE_SAVE) {
        s->pin_step = step;
    } else if (flags & BELAY_VOTE_SAVE) {
        s->skipped_save = step;
    }
    for (uint32_t i = 0; i < children; i++) {
        session_effect_vote(s, first + i, &result);
    }
    session_effect_push(s, WIRE_EFFECT_VOTE_DONE);
    s->effects[(s->effect_first + s->effect_count - 1) % s->effect_capacity].vote = result;
    if (s->stop_flags || s->request_done) {
        s->report_due = 1;
    }
}

static void vote_send(struct wire_session *s, uint32_t flags, uint64_t now_ms)
{
    struct wire_vote vote = vote_make(s, s->vote.own_step, flags, 0);
    session_effect_vote(s, vote_parent(s->rank), &vote);
    s->vote.sent = 1;
    s->vote.sent_ms = now_ms;
}

/* Has the whole subtree voted for the pending step? Then up, or at the root: the result. */
static void vote_advance(struct wire_session *s, uint64_t now_ms)
{
    struct session_vote *v = &s->vote;
    uint32_t first = 0;
    uint32_t children = vote_children(s, &first);
    uint32_t flags = v->own_flags;

    /* Without a slot for it the vote waits. It happens only when the last step of a stop was pinned
     * beside another save and then a recovery goes on beyond it. */
    if (v->own_step == 0 || v->held || !session_slots_room(s, v->own_step)) {
        return;
    }
    for (uint32_t i = 0; i < children; i++) {
        if (v->child_step[i] < v->own_step) {
            return;
        }
        flags |= v->child_flags[i];
    }
    if (s->rank == 0) {
        vote_conclude(s, v->own_step, flags);
    } else {
        vote_send(s, flags, now_ms);
    }
}

/* Does any root want a save of this step? Ranks may have heard of other intervals for a while: the
 * result is the OR of what all say, so that all pin the same steps. */
static int vote_is_due(const struct wire_session *s, uint64_t step)
{
    uint64_t given = 0;
    for (uint32_t i = 0; i < WIRE_JOB_ROOTS; i++) {
        given |= s->every[i];
        if (s->every[i] && step % s->every[i] == 0) {
            return 1;
        }
    }
    return !given && s->plan.save_every && step % s->plan.save_every == 0;
}

int wire_session_vote(struct wire_session *s, uint64_t step, uint32_t flags, uint64_t now_ms)
{
    struct session_vote *v = &s->vote;

    if (s->stop_said) {
        return BL_ESTOPPED;
    }
    if (session_is_over(s)) {
        return BL_EGEN;
    }
    if (s->state != WIRE_RANK_RUNNING || step != v->done_step + 1) {
        return -EPROTO;
    }
    if (session_has_rule(s, WIRE_RULE_VOTE_NEEDS_SEAL) && s->applied_step != step - 1) {
        return -EAGAIN;
    }
    if (vote_is_due(s, step)) {
        flags |= BELAY_VOTE_SAVE;
    }
    if (s->rank == 0 && s->request_id && s->request_id != s->request_done) {
        flags |= s->request_flags;
        v->own_request = s->request_id;
    }
    if (session_slots_busy(s)) {
        flags |= BELAY_VOTE_BUSY;
    }
    v->own_step = step;
    v->own_flags = flags;
    if (!session_has_rule(s, WIRE_RULE_APPLY_NEEDS_VOTE) && !v->held) {
        vote_send(s, flags, now_ms);
        vote_conclude(s, step, flags);
        return 0;
    }
    vote_advance(s, now_ms);
    return 0;
}

static void vote_from_child(struct wire_session *s, const struct wire_vote *vote, uint32_t child,
                            uint64_t now_ms)
{
    struct session_vote *v = &s->vote;

    if (vote->step <= v->done_step) {
        /* It lost the result: tell it again. It can only lack the newest. */
        if (vote->step == v->done_step && vote->step > s->plan.step) {
            struct wire_vote result = vote_make(s, v->done_step, v->done_flags, 1);
            session_effect_vote(s, vote->from, &result);
        }
        return;
    }
    if (vote->step == v->done_step + 1 && v->child_step[child] < vote->step) {
        v->child_step[child] = vote->step;
        v->child_flags[child] = vote->flags;
        vote_advance(s, now_ms);
    }
}

void wire_session_on_vote(struct wire_session *s, const struct wire_vote *vote, uint64_t now_ms)
{
    uint32_t first = 0;

    if (vote->run != s->config.run || session_is_over(s) ||
        (s->state != WIRE_RANK_RUNNING && s->state != WIRE_RANK_READY &&
         s->state != WIRE_RANK_LEAVING && s->state != WIRE_RANK_LOADING)) {
        return;
    }
    if (session_has_rule(s, WIRE_RULE_GENERATION_STAMP) &&
        (vote->generation != s->plan.generation || vote->line != s->plan.line)) {
        return;
    }
    uint32_t children = vote_children(s, &first);
    if (vote->is_result) {
        if (s->rank > 0 && vote->from == vote_parent(s->rank) && vote->step == s->vote.own_step &&
            vote->step == s->vote.done_step + 1 && s->vote.sent) {
            vote_conclude(s, vote->step, vote->flags);
        }
        return;
    }
    if (vote->from >= first && vote->from < first + children) {
        vote_from_child(s, vote, vote->from - first, now_ms);
    }
}

void session_vote_again(struct wire_session *s, uint64_t now_ms)
{
    if (s->vote.own_step && !s->vote.sent && !session_is_over(s)) {
        vote_advance(s, now_ms);
    }
}

uint64_t session_vote_tick(struct wire_session *s, uint64_t now_ms)
{
    struct session_vote *v = &s->vote;

    if (v->own_step == 0 || session_is_over(s)) {
        return UINT64_MAX;
    }
    if (!v->sent) {
        return now_ms + WIRE_VOTE_RESEND_MS; /* for children, or for a slot */
    }
    if (now_ms - v->sent_ms >= WIRE_VOTE_RESEND_MS) {
        v->sent = 0;
        vote_advance(s, now_ms);
    }
    return v->sent_ms + WIRE_VOTE_RESEND_MS;
}
