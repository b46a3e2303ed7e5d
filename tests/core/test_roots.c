/* SPDX-License-Identifier: Apache-2.0 */
/* Saves to several roots: their own pace, their own faults. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "tests/core/cluster.h"

#define LOCAL  0
#define SHARED 1

static const struct core_root two_roots[] = {{"/local", 1}, {"/shared", 2}};

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

static void roots_leave(struct cluster *c, uint32_t flags)
{
    for (uint32_t i = 0; i < c->proc_count; i++) {
        if (c->procs[i].state == WIRE_RANK_RUNNING) {
            c->procs[i].state = WIRE_RANK_LEAVING;
            c->procs[i].stop_flags = flags;
            c->procs[i].arena_pinned = 1;
        }
    }
}

static struct core_status_root root_status(struct cluster *c, uint32_t root)
{
    struct core_status status;
    core_leader_status(c->leader, &status, c->now);
    struct core_status_root ret = status.roots[root];
    core_status_close(&status);
    return ret;
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
    assert_int_equal(root_status(&c, LOCAL).committed_step, 4);
    assert_int_equal(root_status(&c, LOCAL).committed, 4);
    assert_true(root_status(&c, SHARED).committed_step == UINT64_MAX);
    assert_int_equal(root_status(&c, SHARED).skipped, 1); /* step 4: that of 2 is being written */
    assert_int_equal(c.nodes[0].directive.saves_through, 4);
    assert_true(is_kept(&c, 2));
    assert_int_equal(c.nodes[0].directive.unpin_through,
                     1); /* for who knows nothing of kept ones */
    c.held_roots = 0;
    cluster_pass(&c, 500);
    assert_int_equal(root_status(&c, SHARED).committed_step, 2);
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
    assert_int_equal(root_status(&c, SHARED).stuck, 1);
    assert_int_equal(root_status(&c, SHARED).skipped, 1);
    assert_int_equal(root_status(&c, LOCAL).committed_step, 2);
    core_leader_on_root(c.leader, SHARED, 0, "", c.now);
    roots_step(&c);
    roots_step(&c);
    assert_int_equal(c.events[CORE_EVENT_ROOT_BACK], 1);
    assert_int_equal(root_status(&c, SHARED).committed_step, 4);
    cluster_close(&c);
}

static void test_end_does_not_wait_for_a_stuck_root_when_another_has_it(void **state)
{
    struct cluster c;
    (void)state;
    roots_init(&c);
    roots_step(&c);
    core_leader_on_root(c.leader, SHARED, 1, "", c.now);
    roots_leave(&c, BELAY_VOTE_FINAL);
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
    roots_leave(&c, BELAY_VOTE_FINAL);
    cluster_pass(&c, 2000);
    assert_false(c.finished);
    core_leader_on_root(c.leader, SHARED, 0, "", c.now);
    cluster_pass(&c, 1000);
    assert_true(c.finished);
    assert_int_equal(c.verdict, WIRE_VERDICT_FINISHED);
    cluster_close(&c);
}

static void test_end_goes_to_all_roots(void **state)
{
    struct cluster c;
    (void)state;
    roots_init(&c);
    roots_step(&c);
    roots_leave(&c, BELAY_VOTE_STOP);
    cluster_pass(&c, 1000);
    assert_true(c.finished);
    assert_int_equal(c.verdict, WIRE_VERDICT_STOPPED);
    assert_int_equal(root_status(&c, SHARED).committed_step, 1);
    assert_int_equal(root_status(&c, LOCAL).replicated, 1);
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
    assert_int_equal(root_status(&c, SHARED).committed_step, 1);
    core_leader_status(c.leader, &status, c.now);
    assert_int_equal(status.save_asked, 0);
    core_status_close(&status);
    cluster_close(&c);
}

/* What a scan finds: step 6 on both roots. */
static void disk_fill(struct core_checkpoint disk[2])
{
    for (uint32_t i = 0; i < 2; i++) {
        disk[i] = (struct core_checkpoint){.root = i,
                                           .complete = 1,
                                           .step = 6,
                                           .generation = 1,
                                           .line = 1,
                                           .digest_known = 1,
                                           .digest = {{80, 80 * 7}},
                                           .state_elems = 80};
        strcpy(disk[i].dir, "step-6");
    }
}

/* A leader over a record with step 6 on both roots. */
static void record_fill(struct wire_record *record)
{
    *record = (struct wire_record){.run = 7,
                                   .name = "job",
                                   .head_epoch = 1,
                                   .generation = 1,
                                   .line = 1,
                                   .phase = WIRE_PHASE_NONE,
                                   .state_elems = 80,
                                   .committed_step = 6,
                                   .committed_generation = 1,
                                   .root_count = 2};
    for (uint32_t i = 0; i < 2; i++) {
        record->roots[i] =
            (struct wire_record_root){.path = bl_xxh3(two_roots[i].path, strlen(two_roots[i].path)),
                                      .committed_step = 6,
                                      .committed_generation = 1};
    }
}

static void resume_init(struct cluster *c, struct wire_record *record,
                        struct core_checkpoint disk[2])
{
    cluster_init(c, 1, 2, 2);
    record_fill(record);
    disk_fill(disk);
    c->version = 1;
    c->disk = disk;
    c->disk_count = 2;
    c->config.root_count = 2;
    c->config.roots = two_roots;
    c->config.record = record;
    c->config.record_version = 1;
    c->config.resume = 1;
}

static void test_resume_reads_one_root_and_names_the_other(void **state)
{
    struct core_checkpoint disk[2];
    struct wire_record record;
    struct cluster c;
    (void)state;
    resume_init(&c, &record, disk);
    cluster_pass(&c, 1000);
    const struct wire_plan *plan = &c.nodes[0].directive.plan;
    assert_int_equal(plan->step, 6);
    assert_string_equal(plan->disk_root, "/local");
    assert_int_equal(plan->place_count, 1);
    assert_string_equal(plan->places[0].root, "/shared");
    assert_string_equal(plan->places[0].dir, "step-6");
    cluster_close(&c);
}

static void test_damaged_checkpoint_is_not_chosen(void **state)
{
    struct core_checkpoint disk[2];
    struct wire_record record;
    struct cluster c;
    (void)state;
    resume_init(&c, &record, disk);
    c.leader = core_leader_new(&c.config, c.now);
    assert_non_null(c.leader);
    core_leader_on_verified(c.leader, LOCAL, 6, "step-6", BL_EDIGEST, "chunk 3", 1, c.now);
    assert_int_equal(root_status(&c, LOCAL).verify_failed_step, 6);
    cluster_pass(&c, 1000);
    assert_int_equal(c.events[CORE_EVENT_VERIFY_FAILED], 1);
    assert_string_equal(c.nodes[0].directive.plan.disk_root, "/shared");
    assert_int_equal(c.nodes[0].directive.plan.place_count, 0);
    cluster_close(&c);
}

/* The record knows of a newer checkpoint on a root that cannot be looked at: it is waited for, then
 * the older one is used. */
static void test_root_that_cannot_be_scanned_is_waited_for_a_while(void **state)
{
    struct core_checkpoint disk[2];
    struct wire_record record;
    struct cluster c;
    (void)state;
    resume_init(&c, &record, disk);
    record.roots[SHARED].committed_step = 9;
    record.committed_step = 9;
    c.disk_count = 1;
    c.scan_failed = 1u << SHARED;
    cluster_pass(&c, 2500);
    assert_int_equal(c.nodes[0].directive.phase, WIRE_PHASE_OPEN);
    assert_int_equal(c.events[CORE_EVENT_SCAN_FAILED], 1);
    cluster_pass(&c, 4000);
    assert_int_equal(c.nodes[0].directive.plan.step, 6);
    cluster_close(&c);
}

/* Nothing is found, and one root cannot be looked at: never a new start over what may be there. */
static void test_nothing_found_and_a_root_unscanned_waits(void **state)
{
    struct core_checkpoint disk[2];
    struct wire_record record;
    struct cluster c;
    (void)state;
    resume_init(&c, &record, disk);
    c.disk_count = 0;
    c.scan_failed = 1u << SHARED;
    cluster_pass(&c, 20000);
    assert_int_equal(c.nodes[0].directive.phase, WIRE_PHASE_OPEN);
    c.scan_failed = 0;
    c.disk = &disk[1];
    c.disk_count = 1;
    cluster_pass(&c, 3000);
    assert_int_equal(c.nodes[0].directive.plan.step, 6);
    assert_int_equal(c.nodes[0].directive.plan.fresh, 0);
    cluster_close(&c);
}

static void test_record_of_one_root_is_taken_over(void **state)
{
    struct core_checkpoint disk[2];
    struct wire_record record;
    struct cluster c;
    (void)state;
    resume_init(&c, &record, disk);
    memset(record.roots, 0, sizeof(record.roots));
    record.root_count = 0;
    cluster_pass(&c, 1000);
    assert_int_equal(root_status(&c, LOCAL).committed_step, 6);
    assert_true(root_status(&c, SHARED).committed_step == UINT64_MAX);
    cluster_close(&c);
}

static void test_interval_is_chosen_from_what_is_measured(void **state)
{
    static const struct core_root roots[] = {{"/local", CORE_EVERY_AUTO}};
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
    assert_int_equal(root_status(&c, 0).is_auto, 1);
    assert_int_equal(c.nodes[0].directive.every[0], root_status(&c, 0).every);
    assert_true(root_status(&c, 0).every != 100);
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
        cmocka_unit_test(test_resume_reads_one_root_and_names_the_other),
        cmocka_unit_test(test_damaged_checkpoint_is_not_chosen),
        cmocka_unit_test(test_root_that_cannot_be_scanned_is_waited_for_a_while),
        cmocka_unit_test(test_nothing_found_and_a_root_unscanned_waits),
        cmocka_unit_test(test_record_of_one_root_is_taken_over),
        cmocka_unit_test(test_interval_is_chosen_from_what_is_measured),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
