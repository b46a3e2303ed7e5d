/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <errno.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "base/mem.h"
#include "tests/wire/fake_daemon.h"
#include "wire/belay.h"
#include "wire/slot.h"

static struct fake fake;

static void start(uint64_t steps, int ranks)
{
    fake_open(&fake, steps);
    for (int i = 0; i < ranks; i++) {
        fake_rank_start(&fake);
    }
}

static int all_leaving(struct fake *f, uint64_t unused)
{
    (void)unused;
    for (uint32_t i = 0; i < f->rank_count; i++) {
        if (!f->ranks[i].dead && f->ranks[i].report.state != WIRE_RANK_LEAVING) {
            return 0;
        }
    }
    return 1;
}

/* Everybody who is a member has voted `step`. */
static int all_voted(struct fake *f, uint64_t step)
{
    for (uint32_t i = 0; i < f->rank_count; i++) {
        if (!f->ranks[i].dead && atomic_load(&f->shared->voted[i]) < step) {
            return 0;
        }
    }
    return 1;
}

static int all_applied(struct fake *f, uint64_t step)
{
    for (uint32_t i = 0; i < f->rank_count; i++) {
        if (!f->ranks[i].dead && f->ranks[i].report.applied_step < step) {
            return 0;
        }
    }
    return 1;
}

static int is_gone(struct fake *f, uint64_t index)
{
    return f->ranks[index].dead;
}

static void limit_all(uint64_t step)
{
    for (uint32_t i = 0; i < FAKE_RANKS_MAX; i++) {
        atomic_store(&fake.shared->limit[i], step);
    }
}

/* The run ends: all leave, all exit with 0, and the arenas hold the right last state. */
static void finish(void)
{
    limit_all(UINT64_MAX);
    fake_until(&fake, all_leaving, 0, "all leaving");
    struct bl_state_digest sum = {{0, 0}};
    for (uint32_t i = 0; i < fake.arena_count; i++) {
        struct wire_arena_info info;
        assert_int_equal(wire_arena_read(&info, fake.arenas[i].map, fake.arenas[i].bytes, NULL), 0);
        for (uint32_t k = 0; k < info.slot_count; k++) {
            if (info.slots[k].state == WIRE_SLOT_SEALED &&
                info.slots[k].step == fake.shared->steps) {
                bl_state_digest_merge(&sum, &info.slots[k].digest);
                assert_int_equal(info.slots[k].pinned, 1);
            }
        }
        bl_extent_list_close(&info.extents);
    }
    struct bl_state_digest want = fake_state_digest(fake.shared->steps);
    assert_true(bl_state_digest_equal(&sum, &want));
    fake.leave = 1;
    fake.phase = WIRE_PHASE_DONE;
    fake_directive(&fake);
    fake_until(&fake, fake_all_exited, 0, "all exited");
    for (uint32_t i = 0; i < fake.rank_count; i++) {
        int status = fake.ranks[i].exit_status;
        assert_true(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
    }
    fake_close(&fake);
}

static void test_three_ranks_run_to_the_end(void **state)
{
    (void)state;
    start(200, 3);
    fake_generation_open(&fake);
    fake_generation_run(&fake);
    assert_int_equal(fake.plan.fresh, 1);
    fake_until(&fake, all_voted, 200, "all voted");
    uint64_t ns = atomic_load(&fake.shared->vote_ns[0]);
    printf("a vote of 3 ranks takes %.1f us at rank 0\n",
           (double)ns / 1e3 / (double)atomic_load(&fake.shared->votes[0]));
    assert_true(atomic_load(&fake.ranks[1].page->alive_ns) != 0);
    assert_int_equal(fake.ranks[1].page->pid, (uint32_t)fake.ranks[1].pid);
    finish();
}

/* It waited for the daemon to repeat the directive, a quarter of a second of each recovery. */
static void test_a_directive_that_comes_with_the_hello_is_heard(void **state)
{
    (void)state;
    start(20, 2);
    fake.early = 1;
    fake_generation_open(&fake);
    fake_generation_run(&fake);
    finish();
}

static void test_a_tree_of_eleven_ranks_votes(void **state)
{
    (void)state;
    start(30, 11);
    fake_generation_open(&fake);
    fake_generation_run(&fake);
    finish();
}

static void test_one_rank_alone_votes(void **state)
{
    (void)state;
    start(20, 1);
    fake_generation_open(&fake);
    fake_generation_run(&fake);
    finish();
}

/* Rank 1 dies in its step while the others wait in the vote. */
static void kill_and_recover(int replace)
{
    start(40, 3);
    atomic_store(&fake.shared->limit[1], 10);
    fake_generation_open(&fake);
    fake_generation_run(&fake);
    fake_until(&fake, all_voted, 10, "step 10");
    fake_until(&fake, all_applied, 10, "step 10 sealed");
    fake_kill(&fake, 1);
    if (replace) {
        fake_rank_start(&fake);
    }
    fake_generation_open(&fake);
    fake_generation_run(&fake);
    assert_int_equal(fake.plan.fresh, 0);
    assert_int_equal(fake.plan.step, 10);
    assert_int_equal(fake.plan.world, replace ? 3 : 2);
    assert_int_equal(atomic_load(&fake.shared->egen[0]), 1);
    finish();
}

static void test_a_killed_ranks_state_is_loaded_from_its_arena(void **state)
{
    (void)state;
    kill_and_recover(1);
}

static void test_two_ranks_take_over_the_state_of_three(void **state)
{
    (void)state;
    kill_and_recover(0);
}

static int one_failed(struct fake *f, uint64_t generation)
{
    return f->ranks[0].report.failed_generation == generation &&
           f->ranks[0].report.state == WIRE_RANK_PARKED;
}

static void test_a_broken_vote_connection_is_reported_without_being_told(void **state)
{
    (void)state;
    start(40, 2);
    atomic_store(&fake.shared->limit[1], 5);
    fake_generation_open(&fake);
    fake_generation_run(&fake);
    fake_until(&fake, all_applied, 5, "step 5");
    fake_kill(&fake, 1);
    /* Rank 0 hears nothing from its daemon, sees the connection break, and parks by itself. */
    fake_until(&fake, one_failed, fake.generation, "failure reported");
    assert_non_null(strstr(fake.ranks[0].report.failed_text, "rank 1"));
    fake_rank_start(&fake);
    fake_generation_open(&fake);
    fake_generation_run(&fake);
    finish();
}

static void test_copies_of_another_node_are_read_in_ranges(void **state)
{
    (void)state;
    start(40, 3);
    limit_all(7);
    fake_generation_open(&fake);
    fake_generation_run(&fake);
    fake_until(&fake, all_applied, 7, "step 7");
    fake.copies_remote = 1;
    fake.bulk_denials = 7;
    fake_kill(&fake, 0);
    fake_generation_open(&fake);
    fake_generation_run(&fake);
    assert_int_equal(fake.plan.step, 7);
    assert_true(fake.bulk_reads > 0);
    assert_int_equal(fake.bulk_denials, 0);
    assert_int_equal(fake.copy_opens, 0);
    finish();
}

static void test_state_is_loaded_from_disk_when_memory_has_none(void **state)
{
    (void)state;
    start(40, 3);
    fake.disk_only = 1;
    fake.disk_step = 12;
    fake_generation_open(&fake);
    fake_generation_run(&fake);
    assert_int_equal(fake.disk_loads, 3);
    finish();
}

static void test_a_generation_that_only_stops_and_goes_on_copies_nothing(void **state)
{
    (void)state;
    start(40, 3);
    limit_all(9);
    fake_generation_open(&fake);
    fake_generation_run(&fake);
    fake_until(&fake, all_applied, 9, "step 9");
    fake_generation_open(&fake);
    fake_generation_run(&fake);
    assert_int_equal(fake.plan.step, 9);
    assert_int_equal(fake.copy_opens, 0);
    assert_int_equal(fake.arena_makes, 3);
    finish();
}

static void test_generations_called_while_one_loads_end_in_the_newest(void **state)
{
    (void)state;
    start(40, 3);
    fake_generation_open(&fake);
    for (int i = 0; i < 5; i++) {
        fake_plan(&fake);
        fake_directive(&fake);
        fake_generation_open(&fake);
    }
    fake_generation_run(&fake);
    finish();
}

static int all_back(struct fake *f, uint64_t unused)
{
    (void)unused;
    for (uint32_t i = 0; i < f->rank_count; i++) {
        if (!f->ranks[i].dead && !f->ranks[i].report.incarnation) {
            return 0;
        }
    }
    return 1;
}

static void test_ranks_train_on_while_the_daemon_is_away_and_come_back(void **state)
{
    (void)state;
    start(60, 3);
    limit_all(10);
    fake_generation_open(&fake);
    fake_generation_run(&fake);
    fake_until(&fake, all_voted, 10, "step 10");
    for (uint64_t i = 1; i <= 3; i++) {
        fake_down(&fake);
        limit_all(10 + 10 * i);
        fake_until(&fake, all_voted, 10 + 10 * i, "steps without a daemon");
        fake_up(&fake);
        fake_until(&fake, all_back, 0, "all back");
        fake_until(&fake, all_applied, 10 + 10 * i, "reports after the return");
    }
    assert_int_equal(atomic_load(&fake.shared->egen[0]), 0);
    finish();
}

static int all_stopped(struct fake *f, uint64_t unused)
{
    (void)unused;
    for (uint32_t i = 0; i < f->rank_count; i++) {
        if (!(f->ranks[i].report.stop_flags & BELAY_VOTE_STOP)) {
            return 0;
        }
    }
    return 1;
}

static void test_a_request_to_stop_stops_all_after_the_same_step(void **state)
{
    (void)state;
    start(1000000, 3);
    limit_all(15);
    fake_generation_open(&fake);
    fake_generation_run(&fake);
    fake_until(&fake, all_applied, 15, "step 15");
    fake.request_id = 99;
    fake.request_flags = BELAY_VOTE_STOP;
    fake_directive(&fake);
    limit_all(UINT64_MAX);
    fake_until(&fake, all_stopped, 0, "all stopped");
    for (uint32_t i = 1; i < 3; i++) {
        assert_int_equal(fake.ranks[i].report.applied_step, fake.ranks[0].report.applied_step);
    }
    fake.shared->steps = fake.ranks[0].report.applied_step;
    finish();
}

static void test_strangers_on_the_vote_port_change_nothing(void **state)
{
    (void)state;
    start(40, 2);
    limit_all(5);
    fake_generation_open(&fake);
    fake_generation_run(&fake);
    fake_until(&fake, all_applied, 5, "step 5");
    struct wire_vote_hello hello = {
        .run = FAKE_RUN, .generation = fake.generation, .comm_key = {1, 2}, .rank = 1};
    struct wire_sock stranger[3];
    for (int i = 0; i < 3; i++) {
        int fd = wire_tcp_connect(fake.ranks[0].report.vote_addr, 1000, NULL);
        assert_true(fd >= 0);
        wire_sock_init(&stranger[i], fd);
    }
    struct wire_frame frame;
    assert_int_equal(
        wire_sock_send(&stranger[0], WIRE_TYPE_VOTE_HELLO, &hello, 0, 0, NULL, 0, 1000, NULL), 0);
    assert_int_equal(send(stranger[1].fd, "GET / HTTP/1.1\r\n\r\nand so on, forty bytes", 41, 0),
                     41);
    assert_int_equal(wire_sock_recv(&stranger[0], &frame, 5000, NULL), BL_EPEER);
    assert_int_equal(wire_sock_recv(&stranger[1], &frame, 5000, NULL), BL_EPEER);
    finish();
    for (int i = 0; i < 3; i++) {
        wire_sock_close(&stranger[i]);
    }
}

static void need_failpoints(void)
{
#ifndef BELAY_FAILPOINTS
    skip();
#endif
}

static void test_a_rank_killed_after_its_seal_lost_nothing(void **state)
{
    (void)state;
    need_failpoints();
    fake_open(&fake, 40);
    fake_rank_start(&fake);
    fake.fail = "sealed-unsent:kill:6"; /* steps 0 to 5 */
    fake_rank_start(&fake);
    fake.fail = NULL;
    fake_generation_open(&fake);
    fake_generation_run(&fake);
    fake_died(&fake, 1);
    assert_true(fake.ranks[1].report.applied_step < 5);
    fake_rank_start(&fake);
    fake_generation_open(&fake);
    fake_generation_run(&fake);
    assert_int_equal(fake.plan.step, 5); /* by the slot's header; no message said so */
    finish();
}

/* A rank dies while it loads; then the next one loads. */
static void die_while_loading(const char *fail)
{
    need_failpoints();
    start(40, 3);
    atomic_store(&fake.shared->limit[1], 10);
    fake_generation_open(&fake);
    fake_generation_run(&fake);
    fake_until(&fake, all_applied, 10, "step 10");
    fake_kill(&fake, 1);
    fake.fail = fail;
    int second = fake_rank_start(&fake);
    fake.fail = NULL;
    fake_generation_open(&fake);
    fake_generation_plan(&fake);
    fake_died(&fake, second);
    fake_rank_start(&fake);
    fake_generation_open(&fake);
    fake_generation_run(&fake);
    assert_int_equal(fake.plan.step, 10);
    finish();
}

static void test_a_rank_killed_in_the_middle_of_a_copy_is_replaced(void **state)
{
    (void)state;
    die_while_loading("mid-copy:kill:1");
}

static void test_a_rank_killed_while_it_loads_is_replaced(void **state)
{
    (void)state;
    die_while_loading("mid-load:kill:1");
}

static void test_a_rank_killed_before_ready_is_replaced(void **state)
{
    (void)state;
    die_while_loading("before-ready:kill:1");
}

static int load_failed(struct fake *f, uint64_t index)
{
    return f->ranks[index].report.failed_generation == f->generation;
}

static void test_a_load_that_fails_is_reported_and_tried_again(void **state)
{
    (void)state;
    need_failpoints();
    start(40, 2);
    limit_all(5);
    fake_generation_open(&fake);
    fake_generation_run(&fake);
    fake_until(&fake, all_applied, 5, "step 5");
    fake.fail = "mid-copy:error:1";
    int third = fake_rank_start(&fake);
    fake_generation_open(&fake);
    fake_generation_plan(&fake);
    fake_until(&fake, load_failed, (uint64_t)third, "failure reported");
    assert_non_null(strstr(fake.ranks[third].report.failed_text, "mid-copy"));
    fake_generation_open(&fake);
    fake_generation_run(&fake);
    assert_int_equal(fake.plan.world, 3);
    finish();
}

static int one_load_failed(struct fake *f, uint64_t unused)
{
    (void)unused;
    return load_failed(f, 0) || load_failed(f, 1);
}

static void test_questions_are_asked_again_when_the_connection_breaks(void **state)
{
    (void)state;
    start(40, 3);
    fake.hang_ups = 4; /* arenas */
    limit_all(5);
    fake_generation_open(&fake);
    fake_generation_run(&fake);
    assert_int_equal(fake.hang_ups, 0);
    fake_until(&fake, all_applied, 5, "step 5");
    fake_kill(&fake, 2);
    fake.hang_ups = 5; /* arenas and copies */
    fake_generation_open(&fake);
    fake_generation_run(&fake);
    assert_int_equal(fake.hang_ups, 0);
    assert_int_equal(fake.plan.step, 5);
    finish();
}

static void test_an_arena_over_the_budget_is_a_failure_with_the_sum(void **state)
{
    (void)state;
    start(20, 2);
    fake.refusals = 1;
    fake_generation_open(&fake);
    fake_generation_plan(&fake);
    fake_until(&fake, one_load_failed, 0, "failure reported");
    uint64_t refused = load_failed(&fake, 0) ? 0 : 1;
    assert_int_equal(fake.ranks[refused].report.failed_code, BL_ELIMIT);
    assert_non_null(strstr(fake.ranks[refused].report.failed_text, "5 left"));
    fake_generation_open(&fake);
    fake_generation_run(&fake);
    finish();
}

static void test_a_rank_of_another_function_is_refused_with_the_reason(void **state)
{
    (void)state;
    start(20, 2);
    fake.foreign = 1;
    int third = fake_rank_start(&fake);
    fake.foreign = 0;
    fake_until(&fake, is_gone, (uint64_t)third, "refused");
    assert_true(WIFEXITED(fake.ranks[third].exit_status));
    assert_int_equal(WEXITSTATUS(fake.ranks[third].exit_status), 2);
    fake.ranks[third].exit_status = 0; /* as it should be */
    fake_generation_open(&fake);
    fake_generation_run(&fake);
    assert_int_equal(fake.plan.world, 2);
    finish();
}

static void test_join_fails_with_a_reason_when_nothing_listens(void **state)
{
    (void)state;
    struct belay *job;
    struct belay_plan plan = {.size = sizeof(plan)};
    struct belay_config config = {.size = sizeof(config)};
    setenv("BELAY_TIME_SCALE", "0.001", 1);
    unsetenv("BELAY_SOCKET");
    assert_int_equal(belay_is_supervised(), 0);
    assert_int_equal(belay_join(&config, &job, &plan), BELAY_EREFUSED);
    assert_null(job);
    setenv("BELAY_SOCKET", "/nonexistent/socket", 1);
    setenv("BELAY_INCARNATION", "12", 1);
    assert_int_equal(belay_join(&config, &job, &plan), -ENOENT);
    assert_non_null(strstr(belay_error(NULL), "/nonexistent/socket"));
    unsetenv("BELAY_TIME_SCALE");
    unsetenv("BELAY_SOCKET");
}

static int teardown(void **state)
{
    (void)state;
    fake_close(&fake);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_join_fails_with_a_reason_when_nothing_listens, teardown),
        cmocka_unit_test_teardown(test_three_ranks_run_to_the_end, teardown),
        cmocka_unit_test_teardown(test_a_directive_that_comes_with_the_hello_is_heard, teardown),
        cmocka_unit_test_teardown(test_a_tree_of_eleven_ranks_votes, teardown),
        cmocka_unit_test_teardown(test_one_rank_alone_votes, teardown),
        cmocka_unit_test_teardown(test_a_killed_ranks_state_is_loaded_from_its_arena, teardown),
        cmocka_unit_test_teardown(test_two_ranks_take_over_the_state_of_three, teardown),
        cmocka_unit_test_teardown(test_a_broken_vote_connection_is_reported_without_being_told,
                                  teardown),
        cmocka_unit_test_teardown(test_copies_of_another_node_are_read_in_ranges, teardown),
        cmocka_unit_test_teardown(test_state_is_loaded_from_disk_when_memory_has_none, teardown),
        cmocka_unit_test_teardown(test_a_generation_that_only_stops_and_goes_on_copies_nothing,
                                  teardown),
        cmocka_unit_test_teardown(test_generations_called_while_one_loads_end_in_the_newest,
                                  teardown),
        cmocka_unit_test_teardown(test_ranks_train_on_while_the_daemon_is_away_and_come_back,
                                  teardown),
        cmocka_unit_test_teardown(test_a_request_to_stop_stops_all_after_the_same_step, teardown),
        cmocka_unit_test_teardown(test_a_rank_killed_after_its_seal_lost_nothing, teardown),
        cmocka_unit_test_teardown(test_a_rank_killed_in_the_middle_of_a_copy_is_replaced, teardown),
        cmocka_unit_test_teardown(test_a_rank_killed_while_it_loads_is_replaced, teardown),
        cmocka_unit_test_teardown(test_a_rank_killed_before_ready_is_replaced, teardown),
        cmocka_unit_test_teardown(test_a_load_that_fails_is_reported_and_tried_again, teardown),
        cmocka_unit_test_teardown(test_questions_are_asked_again_when_the_connection_breaks,
                                  teardown),
        cmocka_unit_test_teardown(test_an_arena_over_the_budget_is_a_failure_with_the_sum,
                                  teardown),
        cmocka_unit_test_teardown(test_a_rank_of_another_function_is_refused_with_the_reason,
                                  teardown),
        cmocka_unit_test_teardown(test_strangers_on_the_vote_port_change_nothing, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
