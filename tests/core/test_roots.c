/* SPDX-License-Identifier: Apache-2.0 */
/* Saves to several roots: their own pace, their own faults. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/core/leader_state.h"
#include "tests/core/cluster.h"

#define LOCAL  0
#define SHARED 1

static const struct core_root two_roots[] = {{"/local", 1, 0}, {"/shared", 2, 0}};

static void roots_init(struct cluster *c)
{
    cluster_init(c, 1, 2, 2);
    c->config.root_count = 2;
    c->config.roots = two_roots;
    cluster_pass(c, 300);
}

/* One step, whose slots are pinned as the vote would have it. */
static void roots_step(struct cluster *c)
{
    for (uint32_t i = 0; i < c->proc_count; i++) {
        c->procs[i].arena_pinned = 1;
    }
    cluster_step(c);
    cluster_pass(c, 300);
}

static int is_kept(const struct cluster *c, uint64_t step)
{
    for (uint32_t i = 0; i < WIRE_SAVES_MAX; i++) {
        if (c->nodes[0].directive.saves_kept[i] == step) {
            return 1;
        }
    }
    return 0;
}

static void test_slow_root_holds_its_step_and_not_the_other_root(void **state)
{
    struct cluster c;
    (void)state;
    roots_init(&c);
    c.held_roots = 1u << SHARED;
    for (int i = 0; i < 4; i++) {
        roots_step(&c);
    }
    assert_int_equal(cluster_root_status(&c, LOCAL).committed_step, 4);
    assert_int_equal(cluster_root_status(&c, LOCAL).committed, 4);
    assert_true(cluster_root_status(&c, SHARED).committed_step == UINT64_MAX);
    assert_int_equal(cluster_root_status(&c, SHARED).skipped,
                     1); /* step 4: that of 2 is being written */
    assert_int_equal(c.nodes[0].directive.saves_through, 4);
    assert_true(is_kept(&c, 2));
    assert_int_equal(c.nodes[0].directive.unpin_through,
                     1); /* for who knows nothing of kept ones */
    c.held_roots = 0;
    cluster_pass(&c, 500);
    assert_int_equal(cluster_root_status(&c, SHARED).committed_step, 2);
    assert_false(is_kept(&c, 2));
    assert_int_equal(c.nodes[0].directive.unpin_through, 4);
    cluster_close(&c);
}

static void test_intervals_of_all_roots_are_told(void **state)
{
    struct cluster c;
    (void)state;
    roots_init(&c);
    assert_int_equal(c.nodes[0].directive.every[LOCAL], 1);
    assert_int_equal(c.nodes[0].directive.every[SHARED], 2);
    assert_int_equal(c.nodes[0].directive.plan.slots, 4);
    cluster_close(&c);
}

static void test_stuck_root_is_left_out_and_comes_back(void **state)
{
    struct cluster c;
    (void)state;
    roots_init(&c);
    core_leader_on_root(c.leader, SHARED, 1, "", c.now);
    roots_step(&c);
    roots_step(&c);
    assert_int_equal(c.events[CORE_EVENT_ROOT_STUCK], 1);
    assert_int_equal(cluster_root_status(&c, SHARED).stuck, 1);
    assert_int_equal(cluster_root_status(&c, SHARED).skipped, 1);
    assert_int_equal(cluster_root_status(&c, LOCAL).committed_step, 2);
    core_leader_on_root(c.leader, SHARED, 0, "", c.now);
    roots_step(&c);
    roots_step(&c);
    assert_int_equal(c.events[CORE_EVENT_ROOT_BACK], 1);
    assert_int_equal(cluster_root_status(&c, SHARED).committed_step, 4);
    cluster_close(&c);
}

static void test_end_does_not_wait_for_a_stuck_root_when_another_has_it(void **state)
{
    struct cluster c;
    (void)state;
    roots_init(&c);
    roots_step(&c);
    core_leader_on_root(c.leader, SHARED, 1, "", c.now);
    cluster_leave(&c, BELAY_VOTE_FINAL);
    cluster_pass(&c, 1500);
    assert_true(c.finished);
    assert_int_equal(c.verdict, WIRE_VERDICT_FINISHED);
    cluster_close(&c);
}

static void test_end_waits_for_stuck_roots_when_none_has_it(void **state)
{
    struct cluster c;
    (void)state;
    roots_init(&c);
    core_leader_on_root(c.leader, LOCAL, 1, "", c.now);
    core_leader_on_root(c.leader, SHARED, 1, "", c.now);
    roots_step(&c);
    cluster_leave(&c, BELAY_VOTE_FINAL);
    cluster_pass(&c, 2000);
    assert_false(c.finished);
    core_leader_on_root(c.leader, SHARED, 0, "", c.now);
    cluster_pass(&c, 1000);
    assert_true(c.finished);
    assert_int_equal(c.verdict, WIRE_VERDICT_FINISHED);
    cluster_close(&c);
}

/* A commit there failed, and nobody can look how it ended: errors instead of silence. */
static void test_end_does_not_wait_for_a_root_that_gives_errors(void **state)
{
    struct cluster c;
    (void)state;
    roots_init(&c);
    c.commit_failed = 1u << SHARED;
    c.scan_failed = 1u << SHARED;
    roots_step(&c);
    roots_step(&c);
    assert_int_equal(cluster_root_status(&c, LOCAL).committed_step, 2);
    assert_int_equal(cluster_root_status(&c, SHARED).failing, 1);
    cluster_leave(&c, BELAY_VOTE_FINAL);
    cluster_pass(&c, 2000);
    assert_true(c.finished);
    assert_int_equal(c.verdict, WIRE_VERDICT_FINISHED);
    assert_string_equal(c.stored.cause, "all steps are done; root /shared does not have step 2");
    cluster_close(&c);
}

static void test_commit_without_an_answer_is_looked_for_rarely(void **state)
{
    struct cluster c;
    (void)state;
    roots_init(&c);
    c.commit_failed = 1u << SHARED;
    c.scan_failed = 1u << SHARED;
    roots_step(&c);
    roots_step(&c);
    uint32_t before = c.scans;
    for (int i = 0; i < 60; i++) { /* 24 s */
        roots_step(&c);
    }
    assert_in_range(c.scans - before, 1, 3);
    core_leader_on_root(c.leader, SHARED, 1, "", c.now);
    before = c.scans;
    for (int i = 0; i < 60; i++) {
        roots_step(&c);
    }
    assert_int_equal(c.scans, before);
    cluster_close(&c);
}

/* Memory is gone while a commit is under way; the root was read before its rename. */
static void test_commit_while_roots_are_scanned_is_not_forgotten(void **state)
{
    struct cluster c;
    (void)state;
    roots_init(&c);
    c.hold_commit = 1;
    c.hold_scan = 1;
    roots_step(&c);
    assert_true(c.held_commit != 0);
    uint32_t before = c.scans;
    for (uint32_t i = 0; i < c.proc_count; i++) {
        c.procs[i].has_arena = 0;
        cluster_die(&c, &c.procs[i], -1, 9);
    }
    cluster_pass(&c, 500);
    assert_int_equal(c.scans, before + 1);
    core_leader_on_commit_done(c.leader, c.held_commit, 0, "", 1, c.now);
    cluster_pass(&c, 200);
    assert_int_equal(c.nodes[0].directive.phase, WIRE_PHASE_OPEN);
    core_leader_on_scan_done(c.leader, 0, 0, NULL, 0, c.now);
    cluster_pass(&c, 500);
    assert_int_equal(c.nodes[0].directive.phase, WIRE_PHASE_RUNNING);
    assert_int_equal(c.nodes[0].directive.plan.fresh, 0);
    assert_int_equal(c.nodes[0].directive.plan.step, 1);
    assert_int_equal(c.leader->disk_failures, 1);
    cluster_close(&c);
}

/* Ranks go on without a lost node; a save that it was to write a part of does not hold its root. */
static void test_lost_node_ends_the_saves_that_need_it(void **state)
{
    struct cluster c;
    (void)state;
    cluster_init(&c, 2, 2, 2);
    c.config.root_count = 2;
    c.config.roots = two_roots;
    cluster_pass(&c, 300);
    c.held_roots = 1u << LOCAL;
    roots_step(&c);
    assert_int_equal(c.events[CORE_EVENT_SAVE_STARTED], 1);
    cluster_node_down(&c, 1);
    cluster_pass(&c, 1500);
    assert_int_equal(c.events[CORE_EVENT_SAVE_FAILED], 0);
    cluster_pass(&c, 1500);
    assert_int_equal(c.events[CORE_EVENT_NODE_LOST], 1);
    assert_int_equal(c.events[CORE_EVENT_SAVE_FAILED], 1);
    cluster_close(&c);
}

static void test_request_waits_while_no_root_answers(void **state)
{
    struct cluster c;
    (void)state;
    roots_init(&c);
    core_leader_on_root(c.leader, LOCAL, 1, "", c.now);
    core_leader_on_root(c.leader, SHARED, 1, "", c.now);
    assert_int_equal(core_leader_on_request(c.leader, CORE_REQUEST_SAVE, c.now), 0);
    cluster_pass(&c, 300);
    assert_int_equal(c.nodes[0].directive.request_flags, 0);
    core_leader_on_root(c.leader, SHARED, 0, "", c.now);
    cluster_pass(&c, 300);
    assert_int_equal(c.nodes[0].directive.request_flags, BELAY_VOTE_SAVE);
    cluster_close(&c);
}

static void test_end_goes_to_all_roots(void **state)
{
    struct cluster c;
    (void)state;
    roots_init(&c);
    roots_step(&c);
    cluster_leave(&c, BELAY_VOTE_STOP);
    cluster_pass(&c, 1000);
    assert_true(c.finished);
    assert_int_equal(c.verdict, WIRE_VERDICT_STOPPED);
    assert_int_equal(cluster_root_status(&c, SHARED).committed_step, 1);
    assert_int_equal(cluster_root_status(&c, LOCAL).replicated, 1);
    cluster_close(&c);
}

static void test_save_on_request_goes_to_all_roots(void **state)
{
    struct cluster c;
    struct core_status status;
    (void)state;
    roots_init(&c);
    assert_int_equal(core_leader_on_request(c.leader, CORE_REQUEST_SAVE, c.now), 0);
    c.held_roots = 1u << SHARED;
    roots_step(&c);
    core_leader_status(c.leader, &status, c.now);
    assert_int_equal(status.save_asked, 1); /* the shared root is still at it */
    assert_int_equal(status.save_count, 1);
    assert_int_equal(status.saves[0].root, SHARED);
    assert_int_equal(status.saves[0].state, CORE_SAVE_STAGED);
    core_status_close(&status);
    c.held_roots = 0;
    cluster_pass(&c, 500);
    assert_int_equal(cluster_root_status(&c, SHARED).committed_step, 1);
    core_leader_status(c.leader, &status, c.now);
    assert_int_equal(status.save_asked, 0);
    core_status_close(&status);
    cluster_close(&c);
}

static uint64_t picked(const struct cluster *c, uint32_t node)
{
    const struct wire_directive *directive = &c->nodes[node].directive;
    uint64_t elems = 0;

    assert_int_equal(directive->save_count, 1);
    for (uint32_t i = 0; i < directive->saves[0].pick.extent_count; i++) {
        elems += bl_extent_elems(&directive->saves[0].pick.extents[i]);
    }
    return elems;
}

/* ZeRO 0: both nodes hold all of it. */
static void test_equal_replicas_write_half_each(void **state)
{
    struct cluster c;
    (void)state;
    cluster_init(&c, 2, 2, 1);
    c.config.root_count = 1;
    c.config.roots = two_roots;
    c.whole_replicas = 1;
    c.elems = 4u << 20;
    cluster_pass(&c, 300);
    c.held_roots = 1u << LOCAL;
    roots_step(&c);
    assert_int_equal(picked(&c, 0) + picked(&c, 1), c.elems);
    assert_in_range(picked(&c, 0), c.elems * 45 / 100, c.elems * 55 / 100);
    c.held_roots = 0;
    cluster_pass(&c, 500);
    assert_int_equal(cluster_root_status(&c, LOCAL).committed_step, 1);
    cluster_close(&c);
}

static void test_request_that_fails_again_and_again_is_given_up(void **state)
{
    struct cluster c;
    struct core_status status;
    (void)state;
    roots_init(&c);
    c.commit_rc = -ENOSPC;
    assert_int_equal(core_leader_on_request(c.leader, CORE_REQUEST_SAVE, c.now), 0);
    for (int i = 0; i < 40; i++) {
        roots_step(&c);
        cluster_pass(&c, 500);
    }
    assert_int_equal(c.events[CORE_EVENT_SAVE_GIVEN_UP], 1);
    core_leader_status(c.leader, &status, c.now);
    assert_int_equal(status.save_asked, 0);
    assert_true(status.save_failed_text[0] != 0);
    core_status_close(&status);
    c.commit_rc = 0;
    assert_int_equal(core_leader_on_request(c.leader, CORE_REQUEST_SAVE, c.now), 0);
    roots_step(&c);
    cluster_pass(&c, 500);
    core_leader_status(c.leader, &status, c.now);
    assert_int_equal(status.save_asked, 0);
    assert_true(status.saves_committed > 0);
    core_status_close(&status);
    cluster_close(&c);
}

static void test_interval_is_chosen_from_what_is_measured(void **state)
{
    static const struct core_root roots[] = {{"/local", CORE_EVERY_AUTO, 0}};
    struct cluster c;
    (void)state;
    cluster_init(&c, 1, 2, 2);
    c.config.root_count = 1;
    c.config.roots = roots;
    cluster_pass(&c, 300);
    assert_int_equal(c.nodes[0].directive.every[0], 100);
    for (int i = 0; i < 120; i++) {
        cluster_step(&c);
        if (i == 99) {
            roots_step(&c);
        }
    }
    for (int i = 0; i < 200; i++) {
        cluster_step(&c);
    }
    assert_in_range(c.events[CORE_EVENT_SAVE_INTERVAL], 1, 2);
    assert_int_equal(cluster_root_status(&c, 0).is_auto, 1);
    assert_int_equal(c.nodes[0].directive.every[0], cluster_root_status(&c, 0).every);
    assert_true(cluster_root_status(&c, 0).every != 100);
    cluster_close(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_slow_root_holds_its_step_and_not_the_other_root),
        cmocka_unit_test(test_intervals_of_all_roots_are_told),
        cmocka_unit_test(test_stuck_root_is_left_out_and_comes_back),
        cmocka_unit_test(test_end_does_not_wait_for_a_stuck_root_when_another_has_it),
        cmocka_unit_test(test_end_waits_for_stuck_roots_when_none_has_it),
        cmocka_unit_test(test_end_goes_to_all_roots),
        cmocka_unit_test(test_save_on_request_goes_to_all_roots),
        cmocka_unit_test(test_equal_replicas_write_half_each),
        cmocka_unit_test(test_request_that_fails_again_and_again_is_given_up),
        cmocka_unit_test(test_end_does_not_wait_for_a_root_that_gives_errors),
        cmocka_unit_test(test_commit_without_an_answer_is_looked_for_rarely),
        cmocka_unit_test(test_commit_while_roots_are_scanned_is_not_forgotten),
        cmocka_unit_test(test_lost_node_ends_the_saves_that_need_it),
        cmocka_unit_test(test_request_waits_while_no_root_answers),
        cmocka_unit_test(test_interval_is_chosen_from_what_is_measured),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
