/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the session: its state, and the functions that its files share. */
#ifndef WIRE_SESSION_STATE_H
#define WIRE_SESSION_STATE_H

#include "wire/belay.h"
#include "wire/session.h"

struct session_vote {                      /* of the present generation */
    uint64_t own_step;                     /* voted for, unanswered; 0 none */
    uint32_t own_flags;                    /* as sent: own only */
    uint64_t own_request;                  /* request id that own_flags carry */
    uint32_t sent;                         /* to the parent at least once */
    uint64_t sent_ms;                      /* when last */
    uint64_t child_step[WIRE_VOTE_FANOUT]; /* newest step that child's subtree voted for */
    uint32_t child_flags[WIRE_VOTE_FANOUT];
    uint64_t done_step;  /* newest unanimous one */
    uint32_t done_flags; /* its result */
    uint32_t held;       /* no step may follow: STOP, FINAL or GROW came back */
};

struct wire_session {
    struct wire_session_config config;
    uint64_t sequence;
    enum wire_rank_state state;
    uint64_t ack_generation; /* reported: parked for, or of the plan in force */

    /* What the daemon last said. */
    uint64_t directive_node, directive_sequence;
    struct wire_former nodes_former;
    uint64_t called_generation; /* newest heard of */
    enum wire_phase called_phase;
    uint64_t request_id;
    uint32_t request_flags;
    uint64_t unpin_through;
    uint64_t saves_through, saves_kept[WIRE_SAVES_MAX], every[WIRE_JOB_ROOTS];
    uint32_t leave_said, stop_said, refused;
    char text[WIRE_TEXT_MAX];

    struct wire_plan plan; /* in force from PLAN to park */
    uint32_t has_plan, rank;
    uint32_t loaded, left; /* left: failed in this generation, on the way to the park */
    uint32_t leave_wanted;
    int32_t leave_code;

    uint64_t arena;
    struct wire_slot_header *slots; /* borrowed: the arena's memory */
    uint32_t slot_count;
    int begun; /* slot being written, -1 none */
    uint64_t begun_step;
    uint64_t pin_step; /* to be pinned when sealed, 0 none */

    struct session_vote vote;
    uint64_t applied_step, stop_step, skipped_save, request_done;
    uint32_t stop_flags;
    uint64_t failed_generation;
    int32_t failed_code;
    char failed_text[WIRE_TEXT_MAX];
    struct bl_state_digest ready_digest;

    uint32_t report_due;
    uint64_t report_ms; /* when last reported, for the repeat */
    uint64_t now_ms;
    struct wire_session_effect *effects; /* ring, grown when full */
    size_t effect_first, effect_count, effect_capacity;
};

static inline int session_has_rule(const struct wire_session *s, enum wire_rule rule)
{
    return (s->config.rules_off & (uint32_t)rule) == 0;
}

/* Is this generation over for the main thread's calls? */
static inline int session_is_over(const struct wire_session *s)
{
    return !s->has_plan || s->left || s->called_generation > s->plan.generation;
}

void session_effect_push(struct wire_session *s, enum wire_session_effect_kind kind);
void session_effect_vote(struct wire_session *s, uint32_t to, const struct wire_vote *vote);
/* Drops queued votes: they name ranks of a plan that is no more. */
void session_effect_purge(struct wire_session *s);
void session_vote_reset(struct wire_session *s);
/* Repeats the pending vote when it is due; when to look again. */
uint64_t session_vote_tick(struct wire_session *s, uint64_t now_ms);
/* Unpins what the daemon's word says: saves that are over, or that there are not. */
void session_slots_unpin(struct wire_session *s);
/* Pinned slots of steps behind the plan's are void: their step will be done again. */
void session_slots_void(struct wire_session *s);
/* Is there a slot that `step` could go to? */
int session_slots_room(const struct wire_session *s, uint64_t step);
/* Slots were unpinned: a vote that waited for one goes on. */
void session_vote_again(struct wire_session *s, uint64_t now_ms);
/* Is the session short of slots, were one more pinned? */
int session_slots_busy(const struct wire_session *s);

#endif
