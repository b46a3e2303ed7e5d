/* SPDX-License-Identifier: Apache-2.0 */
/* A run that is resumed: which of its roots it goes on from, and when it rather waits. */
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

/* Resumed with another layout or other roots: no member ever hears of the job as it was. */
static void test_resume_tells_the_new_job_from_the_first_directive_on(void **state)
{
    struct core_checkpoint disk[2];
    struct core_leader_effect effect;
    struct wire_record record;
    struct cluster c;
    char before[] = "{\"was\":1}";
    uint32_t told = 0;
    (void)state;
    resume_init(&c, &record, disk);
    record.job_json = before;
    c.config.job_json = "{\"is\":1}";
    c.leader = core_leader_new(&c.config, c.now);
    assert_non_null(c.leader);
    core_leader_on_node_up(c.leader, c.nodes[0].name, c.now);
    core_leader_on_tick(c.leader, c.now);
    while (core_leader_next_effect(c.leader, &effect)) {
        struct wire_directive directive;
        if (effect.kind == CORE_LEADER_DIRECTIVE) {
            core_leader_directive(c.leader, effect.node, &directive);
            assert_string_equal(directive.job_json, "{\"is\":1}");
            wire_directive_close(&directive);
            told++;
        }
    }
    assert_true(told > 0);
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
    assert_int_equal(cluster_root_status(&c, LOCAL).verify_failed_step, 6);
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

/* Roots that are not mounted look empty: no new start over what they hold. */
static void test_nothing_found_where_something_was_waits(void **state)
{
    struct core_checkpoint disk[2];
    struct wire_record record;
    struct cluster c;
    (void)state;
    resume_init(&c, &record, disk);
    c.disk_count = 0;
    cluster_pass(&c, 20000);
    assert_int_equal(c.nodes[0].directive.phase, WIRE_PHASE_OPEN);
    assert_in_range(c.scans, 2, 6);
    assert_int_equal(c.events[CORE_EVENT_WAITING], 1);
    c.disk_count = 2;
    cluster_pass(&c, 6000);
    assert_int_equal(c.nodes[0].directive.plan.step, 6);
    assert_int_equal(c.nodes[0].directive.plan.fresh, 0);
    cluster_close(&c);
}

static void test_what_could_not_be_loaded_is_tried_again_when_nothing_is_left(void **state)
{
    struct core_checkpoint disk[2];
    struct wire_record record;
    struct cluster c;
    (void)state;
    resume_init(&c, &record, disk);
    c.leader = core_leader_new(&c.config, c.now);
    assert_non_null(c.leader);
    core_leader_on_verified(c.leader, LOCAL, 6, "step-6", BL_EDIGEST, "", 1, c.now);
    core_leader_on_verified(c.leader, SHARED, 6, "step-6", BL_EDIGEST, "", 1, c.now);
    cluster_pass(&c, 3000);
    assert_int_equal(c.nodes[0].directive.phase, WIRE_PHASE_OPEN);
    cluster_pass(&c, 4000);
    assert_int_equal(c.nodes[0].directive.phase, WIRE_PHASE_RUNNING);
    assert_int_equal(c.nodes[0].directive.plan.step, 6);
    cluster_close(&c);
}

static void test_stop_of_a_run_without_its_roots_forgets_nothing(void **state)
{
    static const struct core_root other[] = {{"/elsewhere", 1, 0}};
    struct core_checkpoint disk[2];
    struct wire_record record;
    struct cluster c;
    (void)state;
    resume_init(&c, &record, disk);
    c.config.root_count = 1;
    c.config.roots = other;
    c.disk_count = 0;
    cluster_pass(&c, 1000);
    assert_int_equal(c.nodes[0].directive.phase, WIRE_PHASE_OPEN);
    assert_int_equal(core_leader_on_request(c.leader, CORE_REQUEST_STOP, c.now), 0);
    cluster_pass(&c, 3000);
    assert_true(c.finished);
    assert_int_equal(c.stored.end_step, 6);
    assert_int_equal(c.stored.committed_step, 6);
    cluster_close(&c);
}

/* Nothing is lost by an end: what is there is found when the run is resumed. */
static void test_stop_does_not_wait_for_ever_for_a_root_that_cannot_be_scanned(void **state)
{
    struct core_checkpoint disk[2];
    struct wire_record record;
    struct cluster c;
    (void)state;
    resume_init(&c, &record, disk);
    c.disk_count = 0;
    c.scan_failed = 1u << SHARED;
    cluster_pass(&c, 1000);
    assert_int_equal(core_leader_on_request(c.leader, CORE_REQUEST_STOP, c.now), 0);
    cluster_pass(&c, 1000);
    assert_false(c.finished);
    cluster_pass(&c, 8000);
    assert_true(c.finished);
    assert_int_equal(c.verdict, WIRE_VERDICT_STOPPED);
    assert_int_equal(c.stored.end_step, 6);
    assert_int_equal(c.stored.committed_step, 6);
    cluster_close(&c);
}

static void test_damaged_checkpoint_that_is_mended_counts_again(void **state)
{
    struct core_checkpoint disk[2];
    struct wire_record record;
    struct cluster c;
    (void)state;
    resume_init(&c, &record, disk);
    c.leader = core_leader_new(&c.config, c.now);
    assert_non_null(c.leader);
    core_leader_on_verified(c.leader, LOCAL, 6, "step-6", BL_EDIGEST, "chunk 3", 1, c.now);
    assert_int_equal(cluster_root_status(&c, SHARED).replicated, 0);
    core_leader_on_verified(c.leader, LOCAL, 6, "step-6", 0, "", 1, c.now);
    assert_true(cluster_root_status(&c, LOCAL).verify_failed_step == UINT64_MAX);
    assert_int_equal(cluster_root_status(&c, SHARED).replicated, 1);
    cluster_pass(&c, 1000);
    assert_string_equal(c.nodes[0].directive.plan.disk_root, "/local");
    assert_int_equal(c.leader->disk_failures, 0); /* resumed, not failed */
    cluster_close(&c);
}

static void test_newest_of_very_many_checkpoints_is_chosen(void **state)
{
    static struct core_checkpoint disk[LEADER_CHECKPOINTS + 50];
    const uint32_t count = LEADER_CHECKPOINTS + 50;
    struct core_checkpoint two[2];
    struct wire_record record;
    struct cluster c;
    (void)state;
    resume_init(&c, &record, two);
    for (uint32_t i = 0; i < count; i++) {
        disk[i] = two[i + 1 == count ? LOCAL : SHARED];
        disk[i].step = i + 1 == count ? count : count - 1 - i;
        snprintf(disk[i].dir, sizeof(disk[i].dir), "step-%u", (unsigned)disk[i].step);
        disk[i].digest.sum[1] = 80 * (disk[i].step + 1);
    }
    c.disk = disk;
    c.disk_count = count;
    cluster_pass(&c, 1000);
    assert_int_equal(c.nodes[0].directive.plan.step, count);
    assert_string_equal(c.nodes[0].directive.plan.disk_root, "/local");
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
    assert_int_equal(cluster_root_status(&c, LOCAL).committed_step, 6);
    assert_true(cluster_root_status(&c, SHARED).committed_step == UINT64_MAX);
    cluster_close(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_resume_reads_one_root_and_names_the_other),
        cmocka_unit_test(test_resume_tells_the_new_job_from_the_first_directive_on),
        cmocka_unit_test(test_damaged_checkpoint_is_not_chosen),
        cmocka_unit_test(test_root_that_cannot_be_scanned_is_waited_for_a_while),
        cmocka_unit_test(test_nothing_found_and_a_root_unscanned_waits),
        cmocka_unit_test(test_nothing_found_where_something_was_waits),
        cmocka_unit_test(test_what_could_not_be_loaded_is_tried_again_when_nothing_is_left),
        cmocka_unit_test(test_stop_of_a_run_without_its_roots_forgets_nothing),
        cmocka_unit_test(test_stop_does_not_wait_for_ever_for_a_root_that_cannot_be_scanned),
        cmocka_unit_test(test_damaged_checkpoint_that_is_mended_counts_again),
        cmocka_unit_test(test_newest_of_very_many_checkpoints_is_chosen),
        cmocka_unit_test(test_record_of_one_root_is_taken_over),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
