/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slots of a rank: which one the next step goes to, what stays.
 *
 * A slot may be taken when it is free, void or old: not the newest state (the step that is applied
 * upon), not pinned, not a source of the plan. There is one slot for each root's save beside the
 * two that rotate, so that with a save under way on every root there still is one.
 */
#include "wire/session_state.h"

#include <errno.h>

void wire_session_arena_set(struct wire_session *s, uint64_t arena, struct wire_slot_header *slots,
                            uint32_t count)
{
    if (s->arena != arena) {
        s->begun = -1;
    }
    s->arena = arena;
    s->slots = slots;
    s->slot_count = count;
    session_slots_void(s);
    session_slots_unpin(s);
    s->report_due = 1;
}

static int slot_is_kept(const struct wire_session *s, uint64_t step)
{
    for (uint32_t i = 0; i < WIRE_SAVES_MAX; i++) {
        if (step && s->saves_kept[i] == step) {
            return 1;
        }
    }
    return 0;
}

void session_slots_unpin(struct wire_session *s)
{
    for (uint32_t i = 0; i < s->slot_count; i++) {
        struct wire_slot_info info;
        wire_slot_read(&s->slots[i], &info);
        int is_over = info.step <= s->unpin_through ||
                      (info.step <= s->saves_through && !slot_is_kept(s, info.step));
        if (info.pinned && info.state == WIRE_SLOT_SEALED && is_over) {
            wire_slot_pin(&s->slots[i], 0);
        }
    }
}

void session_slots_void(struct wire_session *s)
{
    for (uint32_t i = 0; s->has_plan && i < s->slot_count; i++) {
        struct wire_slot_info info;
        wire_slot_read(&s->slots[i], &info);
        if (info.pinned && info.step > s->plan.step && info.generation < s->plan.generation) {
            wire_slot_pin(&s->slots[i], 0);
        }
    }
}

int session_slots_busy(const struct wire_session *s)
{
    uint32_t pinned = 0;
    for (uint32_t i = 0; i < s->slot_count; i++) {
        struct wire_slot_info info;
        wire_slot_read(&s->slots[i], &info);
        pinned += info.pinned ? 1 : 0;
    }
    return pinned + 3 > s->slot_count;
}

/* Does the plan name this slot as a source? */
static int slot_is_source(const struct wire_session *s, uint32_t index)
{
    for (uint32_t i = 0; s->has_plan && i < s->plan.copy_count; i++) {
        if (s->plan.copies[i].arena == s->arena && s->plan.copies[i].slot == index) {
            return 1;
        }
    }
    return 0;
}

/* Does the slot hold (present line, step)? Of a step behind the plan's only what this generation
 * wrote counts; of the plan's own step also the sources, which an older one wrote. */
static int slot_holds(const struct wire_session *s, uint32_t index, uint64_t step)
{
    struct wire_slot_info info;
    wire_slot_read(&s->slots[index], &info);
    if (info.state != WIRE_SLOT_SEALED || info.step != step || !s->has_plan) {
        return 0;
    }
    return info.generation == s->plan.generation ||
           (step == s->plan.step && !s->plan.fresh && slot_is_source(s, index));
}

int wire_session_slot_find(const struct wire_session *s, uint64_t step)
{
    for (uint32_t i = 0; i < s->slot_count; i++) {
        if ((int)i != s->begun && slot_holds(s, i, step)) {
            return (int)i;
        }
    }
    return -ENOENT;
}

/* Lower is better; 0: not to be taken. */
static uint64_t slot_rank_for(const struct wire_session *s, uint32_t index, uint64_t step)
{
    struct wire_slot_info info;
    wire_slot_read(&s->slots[index], &info);
    int keep_sources = session_has_rule(s, WIRE_RULE_KEEP_SOURCES);

    if ((int)index == s->begun || (info.pinned && session_has_rule(s, WIRE_RULE_KEEP_PINNED)) ||
        (step > 0 && step > s->plan.step && slot_holds(s, index, step - 1))) {
        return 0;
    }
    /* Until the first step of this generation is sealed everywhere (two votes on), what the plan
     * reads from stays. */
    if (keep_sources && slot_is_source(s, index) && step <= s->plan.step + 1) {
        return 0;
    }
    if (!session_has_rule(s, WIRE_RULE_KEEP_PINNED) && info.pinned) {
        return 1;
    }
    if (!keep_sources && slot_is_source(s, index)) {
        return 1;
    }
    if (info.state != WIRE_SLOT_SEALED) {
        return 2;
    }
    if (info.generation < s->plan.generation && info.step > s->plan.step) {
        return 3; /* void */
    }
    return 4 + (info.step < UINT64_MAX / 2 ? info.step : UINT64_MAX / 2);
}

int session_slots_room(const struct wire_session *s, uint64_t step)
{
    for (uint32_t i = 0; i < s->slot_count; i++) {
        if (slot_rank_for(s, i, step)) {
            return 1;
        }
    }
    return 0;
}

int wire_session_slot_begin(struct wire_session *s, uint64_t step, uint32_t *ret_index)
{
    uint64_t best = 0;
    uint32_t index = 0;

    if (s->begun >= 0) {
        return -EPROTO;
    }
    if (s->state == WIRE_RANK_LOADING ? session_is_over(s) : !s->has_plan) {
        return BL_EGEN;
    }
    if (s->state == WIRE_RANK_LOADING) {
        if (step != s->plan.step || s->loaded) {
            return -EPROTO;
        }
    } else if (s->state != WIRE_RANK_RUNNING || step != s->vote.done_step || step <= s->plan.step ||
               s->applied_step >= step) {
        return -EPROTO;
    }
    for (uint32_t i = 0; i < s->slot_count; i++) {
        uint64_t rank = slot_rank_for(s, i, step);
        if (rank && (!best || rank < best)) {
            best = rank;
            index = i;
        }
    }
    if (!best) {
        return -EBUSY;
    }
    wire_slot_begin(&s->slots[index], s->config.run, s->config.incarnation, s->plan.generation,
                    s->plan.line, step);
    if (!session_has_rule(s, WIRE_RULE_PUBLISH_LAST)) {
        struct bl_state_digest early = {{0, 0}};
        wire_slot_publish(&s->slots[index], &early);
    }
    s->begun = (int)index;
    s->begun_step = step;
    *ret_index = index;
    return 0;
}

/* Only when PARK_WAITS_SEAL is off: a seal that ends after its rank parked. */
static int slot_find_writing(const struct wire_session *s, uint64_t step)
{
    for (uint32_t i = 0; i < s->slot_count; i++) {
        struct wire_slot_info info;
        wire_slot_read(&s->slots[i], &info);
        if (info.state == WIRE_SLOT_WRITING && info.step == step) {
            return (int)i;
        }
    }
    return -1;
}

int wire_session_sealed(struct wire_session *s, uint64_t step, const struct bl_state_digest *digest)
{
    int index = s->begun;

    if (index < 0 && !session_has_rule(s, WIRE_RULE_PARK_WAITS_SEAL)) {
        index = slot_find_writing(s, step);
    } else if (s->begun_step != step) {
        index = -1;
    }
    if (index < 0) {
        return -EPROTO;
    }
    struct wire_slot_header *slot = &s->slots[index];
    if (s->pin_step == step && s->state != WIRE_RANK_LOADING) {
        wire_slot_pin(slot, 1); /* before it is sealed: sealed and pinned are seen together */
        s->pin_step = 0;
    }
    wire_slot_publish(slot, digest);
    s->begun = -1;
    if (s->state != WIRE_RANK_LOADING && s->has_plan) {
        s->applied_step = step;
    }
    session_slots_unpin(s);
    if (s->leave_wanted && s->state == WIRE_RANK_RUNNING) {
        s->state = WIRE_RANK_LEAVING;
    }
    s->report_due = 1;
    return 0;
}
