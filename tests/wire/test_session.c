/* SPDX-License-Identifier: Apache-2.0 */
/* The session: votes on the tree, slots, parking. The simulator has the long tests. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "wire/belay.h"
#include "wire/session.h"

#define RANKS_MAX 100

struct fake {             /* a world of sessions whose votes are carried by hand */
    uint32_t world, lose; /* lose: every lose-th vote is lost, 0 none */
    uint64_t now, carried;
    struct wire_session *sessions[RANKS_MAX];
    struct wire_slot_header slots[RANKS_MAX][4];
    uint32_t result[RANKS_MAX];
    uint64_t result_step[RANKS_MAX];
    uint32_t called[RANKS_MAX], gone[RANKS_MAX], left[RANKS_MAX], stopped[RANKS_MAX];
    struct wire_member members[RANKS_MAX];
};

static void fake_effects(struct fake *f)
{
    int busy = 1;
    while (busy) {
        busy = 0;
        for (uint32_t i = 0; i < f->world; i++) {
            struct wire_session_effect e;
            while (wire_session_next_effect(f->sessions[i], &e)) {
                busy = 1;
                if (e.kind == WIRE_EFFECT_VOTE && !(f->lose && ++f->carried % f->lose == 0)) {
                    wire_session_on_vote(f->sessions[e.to], &e.vote, f->now);
                } else if (e.kind == WIRE_EFFECT_VOTE_DONE) {
                    f->result[i] = e.vote.flags;
                    f->result_step[i] = e.vote.step;
                }
                f->called[i] += e.kind == WIRE_EFFECT_GENERATION;
                f->gone[i] += e.kind == WIRE_EFFECT_GO;
                f->left[i] += e.kind == WIRE_EFFECT_LEAVE;
                f->stopped[i] += e.kind == WIRE_EFFECT_STOPPED;
            }
        }
    }
}

static void fake_say(struct fake *f, uint64_t generation, enum wire_phase phase, uint64_t sequence,
                     uint64_t save_every, uint32_t request)
{
    for (uint32_t i = 0; i < f->world; i++) {
        struct wire_rank_directive d = {.run = 1,
                                        .incarnation = 100 + i,
                                        .node_incarnation = 9,
                                        .sequence = sequence,
                                        .generation = generation,
                                        .phase = phase,
                                        .leave = phase == WIRE_PHASE_DONE};
        if (phase == WIRE_PHASE_PLANNED || phase == WIRE_PHASE_RUNNING) {
            d.has_plan = 1;
            d.rank = i;
            d.plan = (struct wire_plan){.generation = generation,
                                        .line = 1,
                                        .fresh = 1,
                                        .world = f->world,
                                        .members = f->members,
                                        .save_every = save_every};
            d.request_id = request ? sequence : 0;
            d.request_flags = request;
        }
        wire_session_on_directive(f->sessions[i], &d, f->now);
    }
    fake_effects(f);
}

static void fake_seal(struct fake *f, uint32_t i, uint64_t step)
{
    uint32_t slot = 0;
    struct bl_state_digest digest = {{step, i}};
    assert_int_equal(wire_session_slot_begin(f->sessions[i], step, &slot), 0);
    assert_int_equal(wire_session_sealed(f->sessions[i], step, &digest), 0);
}

static void fake_init_slots(struct fake *f, uint32_t world, uint64_t save_every, uint32_t slots)
{
    struct bl_state_digest digest = {{0, 0}};
    memset(f, 0, sizeof(*f));
    f->world = world;
    for (uint32_t i = 0; i < world; i++) {
        struct wire_session_config config = {.run = 1, .incarnation = 100 + i};
        f->sessions[i] = wire_session_new(&config);
        f->members[i].incarnation = 100 + i;
        assert_non_null(f->sessions[i]);
    }
    fake_say(f, 1, WIRE_PHASE_OPEN, 1, 0, 0);
    fake_say(f, 1, WIRE_PHASE_PLANNED, 2, save_every, 0);
    for (uint32_t i = 0; i < world; i++) {
        assert_non_null(wire_session_plan(f->sessions[i], NULL));
        wire_session_arena_set(f->sessions[i], 5 + i, f->slots[i], slots);
        fake_seal(f, i, 0);
        assert_int_equal(wire_session_loaded(f->sessions[i], 0, "", &digest), 0);
        assert_int_equal(wire_session_ready(f->sessions[i]), 0);
    }
    fake_say(f, 1, WIRE_PHASE_RUNNING, 3, save_every, 0);
    for (uint32_t i = 0; i < world; i++) {
        assert_int_equal(f->gone[i], 1);
    }
}

static void fake_init(struct fake *f, uint32_t world, uint64_t save_every)
{
    fake_init_slots(f, world, save_every, 3);
}

static void fake_close(struct fake *f)
{
    for (uint32_t i = 0; i < f->world; i++) {
        wire_session_free(f->sessions[i]);
    }
}

static void fake_step(struct fake *f, uint64_t step, uint32_t flags_of_last)
{
    for (uint32_t i = 0; i < f->world; i++) {
        uint32_t flags = i + 1 == f->world ? flags_of_last : 0;
        assert_int_equal(wire_session_vote(f->sessions[i], step, flags, f->now), 0);
        fake_effects(f);
        if (i + 1 < f->world) {
            assert_int_not_equal(f->result_step[0], step); /* not before all */
        }
    }
    for (uint32_t k = 0; k < 200; k++) {
        f->now += WIRE_VOTE_RESEND_MS;
        for (uint32_t i = 0; f->lose && i < f->world; i++) {
            wire_session_on_tick(f->sessions[i], f->now);
        }
        fake_effects(f);
    }
    for (uint32_t i = 0; i < f->world; i++) {
        assert_int_equal(f->result_step[i], step);
        fake_seal(f, i, step);
    }
    fake_effects(f);
}

static void test_vote_is_unanimous_on_any_world(void **state)
{
    static const uint32_t worlds[] = {1, 2, 3, 8, 9, 10, 73, 100};
    (void)state;
    for (size_t w = 0; w < sizeof(worlds) / sizeof(worlds[0]); w++) {
        struct fake f;
        fake_init(&f, worlds[w], 0);
        for (uint64_t step = 1; step <= 5; step++) {
            fake_step(&f, step, 0);
        }
        fake_close(&f);
    }
}

static void test_vote_arrives_when_every_third_message_is_lost(void **state)
{
    struct fake f;
    (void)state;
    fake_init(&f, 20, 0);
    f.lose = 3;
    for (uint64_t step = 1; step <= 10; step++) {
        fake_step(&f, step, 0);
    }
    fake_close(&f);
}

static void test_vote_carries_flags_of_one_to_all(void **state)
{
    struct fake f;
    (void)state;
    fake_init(&f, 12, 0);
    fake_step(&f, 1, BELAY_VOTE_SAVE);
    for (uint32_t i = 0; i < 12; i++) {
        struct wire_slot_info info;
        assert_int_equal(f.result[i], BELAY_VOTE_SAVE);
        int slot = wire_session_slot_find(f.sessions[i], 1);
        assert_true(slot >= 0);
        wire_slot_read(&f.slots[i][slot], &info);
        assert_int_equal(info.pinned, 1);
    }
    fake_close(&f);
}

static void test_vote_waits_for_own_seal(void **state)
{
    struct fake f;
    uint32_t slot = 0;
    struct bl_state_digest digest = {{1, 1}};
    (void)state;
    fake_init(&f, 1, 0);
    assert_int_equal(wire_session_vote(f.sessions[0], 1, 0, 0), 0);
    fake_effects(&f);
    assert_int_equal(wire_session_slot_begin(f.sessions[0], 1, &slot), 0);
    assert_int_equal(wire_session_vote(f.sessions[0], 2, 0, 0), -EAGAIN);
    assert_int_equal(wire_session_park(f.sessions[0]), -EAGAIN);
    assert_int_equal(wire_session_sealed(f.sessions[0], 1, &digest), 0);
    assert_int_equal(wire_session_vote(f.sessions[0], 3, 0, 0), -EPROTO);
    assert_int_equal(wire_session_vote(f.sessions[0], 2, 0, 0), 0);
    fake_close(&f);
}

static void test_slot_of_a_save_stays_until_it_is_over(void **state)
{
    struct fake f;
    (void)state;
    fake_init(&f, 2, 2); /* saves at 2, 4, 6 ... by the plan */
    fake_step(&f, 1, 0);
    fake_step(&f, 2, 0);
    int pinned = wire_session_slot_find(f.sessions[0], 2);
    for (uint64_t step = 3; step <= 9; step++) {
        fake_step(&f, step, 0);
        /* The save of 2 is still going on: those of 4, 6, 8 are skipped by all alike. */
        assert_int_equal(f.result[0], step % 2 ? BELAY_VOTE_BUSY : BELAY_VOTE_BUSY | 1);
        assert_int_equal(f.slots[0][pinned].step, 2);
    }
    struct wire_rank_directive d = {.run = 1,
                                    .incarnation = 100,
                                    .node_incarnation = 9,
                                    .sequence = 50,
                                    .generation = 1,
                                    .phase = WIRE_PHASE_RUNNING,
                                    .unpin_through = 2};
    wire_session_on_directive(f.sessions[0], &d, f.now);
    d.incarnation = 101;
    wire_session_on_directive(f.sessions[1], &d, f.now);
    fake_step(&f, 10, 0);
    assert_int_equal(f.result[0], BELAY_VOTE_SAVE);
    fake_close(&f);
}

/* Two roots: the pin of a step whose save goes on stays, those of later steps that are over go. */
static void test_slot_of_a_slow_save_stays_while_later_ones_go(void **state)
{
    struct fake f;
    (void)state;
    fake_init_slots(&f, 1, 0, 4);
    struct wire_rank_directive d = {.run = 1,
                                    .incarnation = 100,
                                    .node_incarnation = 9,
                                    .sequence = 50,
                                    .generation = 1,
                                    .phase = WIRE_PHASE_RUNNING,
                                    .every = {2, 3}};
    wire_session_on_directive(f.sessions[0], &d, f.now);
    for (uint64_t step = 1; step <= 4; step++) {
        fake_step(&f, step, 0);
        /* 2 and 4 by the first root's interval, 3 by the second's; 4 finds two slots pinned. */
        assert_int_equal(f.result[0] & BELAY_VOTE_SAVE, step > 1 ? BELAY_VOTE_SAVE : 0);
        assert_int_equal(f.result[0] & BELAY_VOTE_BUSY, step > 3 ? BELAY_VOTE_BUSY : 0);
    }
    int slow = wire_session_slot_find(f.sessions[0], 2);
    int fast = wire_session_slot_find(f.sessions[0], 3);
    assert_true(slow >= 0 && fast >= 0);
    d.sequence++;
    d.unpin_through = 1;
    d.saves_through = 4;
    d.saves_kept[0] = 2;
    wire_session_on_directive(f.sessions[0], &d, f.now);
    struct wire_slot_info info;
    wire_slot_read(&f.slots[0][slow], &info);
    assert_int_equal(info.pinned, 1);
    wire_slot_read(&f.slots[0][fast], &info);
    assert_int_equal(info.pinned, 0);
    fake_step(&f, 5, 0);
    fake_step(&f, 6, 0); /* a slot is free again: pinned beside that of 2 */
    assert_int_equal(f.result[0], BELAY_VOTE_SAVE);
    wire_slot_read(&f.slots[0][slow], &info);
    assert_int_equal(info.step, 2);
    d.sequence++;
    d.saves_kept[0] = 0;
    wire_session_on_directive(f.sessions[0], &d, f.now);
    wire_slot_read(&f.slots[0][slow], &info);
    assert_int_equal(info.pinned, 0);
    fake_close(&f);
}

static void test_generation_makes_calls_fail_and_parks(void **state)
{
    struct fake f;
    struct wire_rank_report report;
    (void)state;
    fake_init(&f, 3, 0);
    fake_step(&f, 1, 0);
    assert_int_equal(wire_session_vote(f.sessions[0], 2, 0, 0), 0);
    fake_say(&f, 2, WIRE_PHASE_OPEN, 10, 0, 0);
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(f.called[i], 1);
        assert_int_equal(wire_session_vote(f.sessions[i], 2, 0, 0), BL_EGEN);
        wire_session_report(f.sessions[i], &report);
        assert_int_equal(report.state, WIRE_RANK_RUNNING); /* not before it is at a safe point */
        assert_int_equal(report.generation, 1);
        assert_int_equal(wire_session_park(f.sessions[i]), 0);
        wire_session_report(f.sessions[i], &report);
        assert_int_equal(report.state, WIRE_RANK_PARKED);
        assert_int_equal(report.generation, 2);
        assert_int_equal(report.applied_step, 1);
    }
    fake_say(&f, 1, WIRE_PHASE_RUNNING, 11, 0, 0); /* of yesterday: nothing happens */
    wire_session_report(f.sessions[0], &report);
    assert_int_equal(report.generation, 2);
    fake_close(&f);
}

static void test_failure_is_reported_and_parks_for_the_next(void **state)
{
    struct fake f;
    struct wire_rank_report report;
    (void)state;
    fake_init(&f, 2, 0);
    wire_session_failed(f.sessions[1], BL_EPEER, "connection reset");
    assert_int_equal(wire_session_vote(f.sessions[1], 1, 0, 0), BL_EGEN);
    assert_int_equal(wire_session_park(f.sessions[1]), 0);
    wire_session_report(f.sessions[1], &report);
    assert_int_equal(report.failed_generation, 1);
    assert_int_equal(report.failed_code, BL_EPEER);
    assert_string_equal(report.failed_text, "connection reset");
    assert_int_equal(report.state, WIRE_RANK_PARKED);
    assert_int_equal(report.generation, 2);
    fake_close(&f);
}

static void test_leave_waits_for_seal_and_for_the_word(void **state)
{
    struct fake f;
    struct wire_rank_report report;
    uint32_t slot = 0;
    struct bl_state_digest digest = {{1, 1}};
    (void)state;
    fake_init(&f, 1, 0);
    assert_int_equal(wire_session_vote(f.sessions[0], 1, BELAY_VOTE_FINAL, 0), 0);
    fake_effects(&f);
    assert_int_equal(wire_session_slot_begin(f.sessions[0], 1, &slot), 0);
    wire_session_leave(f.sessions[0], 0);
    wire_session_report(f.sessions[0], &report);
    assert_int_equal(report.state, WIRE_RANK_RUNNING);
    assert_int_equal(wire_session_sealed(f.sessions[0], 1, &digest), 0);
    wire_session_report(f.sessions[0], &report);
    assert_int_equal(report.state, WIRE_RANK_LEAVING);
    assert_int_equal(report.stop_flags, BELAY_VOTE_FINAL);
    assert_int_equal(f.left[0], 0);
    fake_say(&f, 1, WIRE_PHASE_DONE, 20, 0, 0);
    assert_int_equal(f.left[0], 1);
    assert_int_equal(f.stopped[0], 1);
    fake_close(&f);
}

static void test_request_rides_in_rank_zeros_vote_once(void **state)
{
    struct fake f;
    struct wire_rank_report report;
    (void)state;
    fake_init(&f, 3, 0);
    fake_say(&f, 1, WIRE_PHASE_RUNNING, 30, 0, BELAY_VOTE_SAVE);
    fake_step(&f, 1, 0);
    assert_int_equal(f.result[2], BELAY_VOTE_SAVE);
    wire_session_report(f.sessions[0], &report);
    assert_int_equal(report.request_done, 30);
    fake_step(&f, 2, 0);
    assert_int_equal(f.result[2] & BELAY_VOTE_SAVE, 0);
    fake_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_vote_is_unanimous_on_any_world),
        cmocka_unit_test(test_vote_arrives_when_every_third_message_is_lost),
        cmocka_unit_test(test_vote_carries_flags_of_one_to_all),
        cmocka_unit_test(test_vote_waits_for_own_seal),
        cmocka_unit_test(test_slot_of_a_slow_save_stays_while_later_ones_go),
        cmocka_unit_test(test_slot_of_a_save_stays_until_it_is_over),
        cmocka_unit_test(test_generation_makes_calls_fail_and_parks),
        cmocka_unit_test(test_failure_is_reported_and_parks_for_the_next),
        cmocka_unit_test(test_leave_waits_for_seal_and_for_the_word),
        cmocka_unit_test(test_request_rides_in_rank_zeros_vote_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
