/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A rank's side of the protocol, as a pure machine: vote, seal, park, inventory. No clock, no file,
 * no socket, no thread: calls and messages go in, effects come out of wire_session_next_effect.
 * libbelay drives it with real memory and sockets, the simulator with modelled ones. The caller
 * serialises all calls (libbelay: one mutex).
 *
 * Votes travel on a tree over ranks with fan-out WIRE_VOTE_FANOUT: a rank sends its subtree's vote
 * to its parent when itself and all its children have voted; the root turns that into the result,
 * which travels down. Everything unacknowledged is repeated on a timer, so a lost vote costs a
 * delay only.
 *
 * What it guarantees (recovery.md's numbers): a vote for n + 1 leaves this rank only when the slot
 * of n is sealed (3); no slot is begun for n + 1, and none older reused, before the result of n + 1
 * (3); the newest sealed slot and pinned slots are never reused (4); the sources of a plan stay
 * until the first sealed step of its generation (8); nothing of an older generation is answered
 * (6).
 */
#ifndef WIRE_SESSION_H
#define WIRE_SESSION_H

#include "wire/msg.h"
#include "wire/slot.h"

#define WIRE_VOTE_FANOUT    8u
#define WIRE_VOTE_RESEND_MS 200u /* a vote unanswered for this long is sent again */

/* Rules that the simulator switches off, one at a time, to see its own checks fail. */
enum wire_rule {
    WIRE_RULE_VOTE_NEEDS_SEAL = 1u << 0,          /* 3 */
    WIRE_RULE_APPLY_NEEDS_VOTE = 1u << 1,         /* 3 */
    WIRE_RULE_KEEP_PINNED = 1u << 2,              /* 4 */
    WIRE_RULE_PUBLISH_LAST = 1u << 3,             /* 5 */
    WIRE_RULE_CAS_FIRST = 1u << 4,                /* 6 (leader) */
    WIRE_RULE_FENCE = 1u << 5,                    /* 7 (leader) */
    WIRE_RULE_PARK_WAITS_SEAL = 1u << 6,          /* 8 */
    WIRE_RULE_KEEP_SOURCES = 1u << 7,             /* 8 */
    WIRE_RULE_GENERATION_STAMP = 1u << 8,         /* 6: messages of other generations are dropped */
    WIRE_RULE_LINE_END = 1u << 9,                 /* words: admissible copies only (leader) */
    WIRE_RULE_COMMIT_NEEDS_GENERATION = 1u << 10, /* 7 (leader) */
    WIRE_RULE_KEEP_SAVED =
        1u << 11 /* 4: a pin stays until all saves of its step are over (leader) */
};

enum wire_session_effect_kind {
    WIRE_EFFECT_NONE = 0,
    WIRE_EFFECT_REPORT,     /* build with wire_session_report and send to the daemon */
    WIRE_EFFECT_VOTE,       /* send `vote` to rank `to` of the present plan */
    WIRE_EFFECT_VOTE_DONE,  /* `vote.step` is unanimous with `vote.flags`: the waiting call returns
                             */
    WIRE_EFFECT_GENERATION, /* a new generation is called: abort, make every call return BL_EGEN */
    WIRE_EFFECT_PLAN,       /* wire_session_plan() is the plan of a generation with this process */
    WIRE_EFFECT_GO,         /* belay_ready returns */
    WIRE_EFFECT_LEAVE,      /* belay_leave returns */
    WIRE_EFFECT_STOPPED,    /* the run is over: waiting calls return BL_ESTOPPED */
    WIRE_EFFECT_REFUSED     /* waiting calls return BL_ECONFIG with the directive's text */
};

struct wire_session_effect {
    enum wire_session_effect_kind kind;
    uint32_t to;
    struct wire_vote vote;
};

struct wire_session_config {
    uint64_t run, incarnation;
    uint64_t function_id, probe;
    uint32_t rules_off; /* enum wire_rule; 0 outside the simulator */
    char endpoint[WIRE_ENDPOINT_MAX];
    char vote_addr[WIRE_ADDR_MAX];
};

struct wire_session; /* opaque */

/* Owned by the caller; NULL when out of memory. */
struct wire_session *wire_session_new(const struct wire_session_config *config);
void wire_session_free(struct wire_session *session);

/* The slots that the session rules over from now on: `count` headers in an arena of this id. Called
 * after the arena of a plan's layout is made, or with the same arena when it stays. */
void wire_session_arena_set(struct wire_session *session, uint64_t arena,
                            struct wire_slot_header *slots, uint32_t count);

/* Messages. Stale ones (generation, sequence, incarnation) are dropped silently. */
void wire_session_on_directive(struct wire_session *session,
                               const struct wire_rank_directive *directive, uint64_t now_ms);
void wire_session_on_vote(struct wire_session *session, const struct wire_vote *vote,
                          uint64_t now_ms);
/* Repeats what is due. Returns when it wants to be called again, in ms of the caller's clock. */
uint64_t wire_session_on_tick(struct wire_session *session, uint64_t now_ms);

/* The connection to the daemon stands again: the report goes out now. */
void wire_session_on_link_up(struct wire_session *session);

/* The main thread's calls. BL_EGEN when a newer generation was called meanwhile. */
/* Loading is over: slot of plan.step is sealed (rc 0; digest of the extents loaded) or it failed.
 */
BL_MUST_CHECK int wire_session_loaded(struct wire_session *session, int rc, const char *text,
                                      const struct bl_state_digest *digest);
BL_MUST_CHECK int wire_session_ready(struct wire_session *session);
/* -EAGAIN while the slot of step - 1 is not sealed: call again after wire_session_sealed. -EPROTO
 * on a step that is not the next one. The result comes as WIRE_EFFECT_VOTE_DONE. */
BL_MUST_CHECK int wire_session_vote(struct wire_session *session, uint64_t step, uint32_t flags,
                                    uint64_t now_ms);
/* Chooses the slot for `step`, which must be the voted one (or plan.step with plan.fresh or while
 * loading), and begins its header. -EBUSY cannot happen with three slots: a vote for a step that no
 * slot is free for is held back until one is. */
BL_MUST_CHECK int wire_session_slot_begin(struct wire_session *session, uint64_t step,
                                          uint32_t *ret_index);
/* The slot of `step` is complete: publishes its header. */
BL_MUST_CHECK int wire_session_sealed(struct wire_session *session, uint64_t step,
                                      const struct bl_state_digest *digest);
/* Index of the sealed slot of (present line, step), or -ENOENT. */
int wire_session_slot_find(const struct wire_session *session, uint64_t step);
void wire_session_failed(struct wire_session *session, int code, const char *text);
/* The main thread is at a safe point: nothing is half applied. -EAGAIN while a seal is under way
 * (call again after wire_session_sealed); 0: parked, the report goes out. */
BL_MUST_CHECK int wire_session_park(struct wire_session *session);
void wire_session_leave(struct wire_session *session, int code);

/* 1 and the oldest effect not yet taken, or 0. */
int wire_session_next_effect(struct wire_session *session, struct wire_session_effect *ret);

void wire_session_report(struct wire_session *session, struct wire_rank_report *ret);
/* View of the plan in force (PLANNED or RUNNING), NULL without one; and this process's rank in it.
 */
const struct wire_plan *wire_session_plan(const struct wire_session *session, uint32_t *ret_rank);
uint64_t wire_session_generation(const struct wire_session *session);
/* Text of a refusal. */
const char *wire_session_text(const struct wire_session *session);

#endif
