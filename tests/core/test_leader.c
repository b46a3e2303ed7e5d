/* SPDX-License-Identifier: Apache-2.0 */
/* The leader's judgements: crashes, hangs, nodes away, refusals, the brake, the end. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/error.h"
#include "tests/core/cluster.h"

static void status_is(struct cluster *c, enum wire_phase phase, uint64_t generation, uint32_t world)
{
    struct core_status status;
    core_leader_status(c->leader, &status, c->now);
    assert_int_equal(status.phase, phase);
    assert_int_equal(status.generation, generation);
    assert_int_equal(status.world, world);
    core_status_close(&status);
}

static void cluster_run(struct cluster *c, uint32_t nodes, uint32_t ranks, uint32_t steps)
{
    cluster_init(c, nodes, ranks, ranks);
    cluster_pass(c, 200);
    status_is(c, WIRE_PHASE_RUNNING, 1, ranks);
    for (uint32_t i = 0; i < steps; i++) {
        cluster_step(c);
    }
}

static void test_run_starts_when_its_nodes_are_there(void **state)
{
    struct cluster c;
    (void)state;
    cluster_init(&c, 2, 4, 4);
    c.nodes[1].up = 0;
    cluster_pass(&c, 5000);
    status_is(&c, WIRE_PHASE_NONE, 0, 0);
    c.nodes[1].up = 1;
    cluster_pass(&c, 300);
    status_is(&c, WIRE_PHASE_RUNNING, 1, 4);
    uint32_t on_first = 0;
    for (uint32_t r = 0; r < 4; r++) {
        on_first += cluster_rank(&c, r)->node == 0;
    }
    assert_int_equal(on_first, 2); /* spread evenly */
    cluster_close(&c);
}

static void test_killed_rank_is_replaced_and_others_stay(void **state)
{
    struct cluster c;
    uint64_t kept[4];
    (void)state;
    cluster_run(&c, 2, 4, 5);
    for (uint32_t r = 0; r < 4; r++) {
        kept[r] = cluster_rank(&c, r)->incarnation;
    }
    cluster_die(&c, cluster_rank(&c, 2), -1, SIGKILL);
    cluster_pass(&c, 200);
    status_is(&c, WIRE_PHASE_RUNNING, 2, 4);
    for (uint32_t r = 0; r < 4; r++) {
        assert_int_equal(cluster_rank(&c, r)->incarnation == kept[r], r != 2);
        assert_int_equal(cluster_rank(&c, r)->step, 5); /* nothing is lost */
    }
    cluster_close(&c);
}

static void test_same_crash_three_times_ends_the_run(void **state)
{
    struct cluster c;
    (void)state;
    cluster_run(&c, 1, 2, 3);
    for (int i = 0; i < 3; i++) {
        assert_false(c.finished);
        cluster_die(&c, cluster_rank(&c, 1), -1, SIGSEGV);
        cluster_pass(&c, 200);
    }
    cluster_pass(&c, 500);
    assert_true(c.finished);
    assert_int_equal(c.verdict, WIRE_VERDICT_NO_PROGRESS);
    cluster_close(&c);
}

static void test_kills_from_outside_do_not_count_however_many(void **state)
{
    struct cluster c;
    (void)state;
    cluster_run(&c, 1, 2, 3);
    for (int i = 0; i < 20; i++) {
        cluster_die(&c, cluster_rank(&c, 1), -1, i % 2 ? SIGKILL : SIGTERM);
        cluster_pass(&c, 200);
    }
    assert_false(c.finished);
    status_is(&c, WIRE_PHASE_RUNNING, 21, 2);
    cluster_close(&c);
}

static void test_crash_at_other_steps_goes_on(void **state)
{
    struct cluster c;
    (void)state;
    cluster_run(&c, 1, 2, 3);
    for (int i = 0; i < 6; i++) {
        cluster_die(&c, cluster_rank(&c, 1), -1, SIGSEGV);
        cluster_pass(&c, 200);
        cluster_step(&c);
    }
    assert_false(c.finished);
    cluster_close(&c);
}

static void test_exit_two_at_the_start_is_refused(void **state)
{
    struct cluster c;
    (void)state;
    cluster_init(&c, 1, 2, 2);
    c.no_start = 1;
    cluster_pass(&c, 200);
    cluster_die(&c, &c.procs[0], 2, 0);
    cluster_pass(&c, 3000);
    assert_true(c.finished);
    assert_int_equal(c.verdict, WIRE_VERDICT_REFUSED);
    cluster_close(&c);
}

static void test_stopped_rank_is_killed_with_stacks_and_victims_are_not(void **state)
{
    struct cluster c;
    (void)state;
    cluster_run(&c, 2, 4, 5);
    struct cluster_proc *p = cluster_rank(&c, 3);
    uint64_t hung = p->incarnation;
    p->stuck = 1;
    cluster_pass(&c, 1900); /* shorter than the floor: a stop of 2 s is no hang */
    assert_int_equal(c.opens, 1);
    cluster_rank(&c, 3)->beat.alive_age_ms = 2500;
    for (uint32_t r = 0; r < 3; r++) {
        cluster_rank(&c, r)->beat.waiting = 1;
        cluster_rank(&c, r)->beat.step = 6;
    }
    cluster_pass(&c, 600);
    assert_int_equal(c.events[CORE_EVENT_RANK_HUNG], 1);
    assert_int_equal(c.events[CORE_EVENT_RANK_KILLED], 1);
    status_is(&c, WIRE_PHASE_RUNNING, 2, 4);
    assert_true(cluster_rank(&c, 3)->incarnation != hung);
    cluster_close(&c);
}

static void test_rank_that_never_came_is_the_culprit(void **state)
{
    struct cluster c;
    (void)state;
    cluster_run(&c, 1, 3, 5);
    uint64_t hung = cluster_rank(&c, 1)->incarnation;
    for (uint32_t r = 0; r < 3; r++) {
        struct cluster_proc *p = cluster_rank(&c, r);
        p->beat = (struct wire_beat){.step = 6, .collective = r == 1 ? 20 : 21, .waiting = r != 1};
    }
    cluster_pass(&c, 5000);
    assert_int_equal(c.events[CORE_EVENT_RANK_KILLED], 1);
    assert_true(cluster_rank(&c, 1)->incarnation != hung);
    cluster_close(&c);
}

static void test_hang_without_culprit_kills_only_the_second_time(void **state)
{
    struct cluster c;
    (void)state;
    cluster_run(&c, 1, 3, 5);
    for (uint32_t r = 0; r < 3; r++) {
        cluster_rank(&c, r)->beat = (struct wire_beat){.step = 6, .collective = 21, .waiting = 1};
    }
    cluster_pass(&c, 2500);
    assert_int_equal(c.events[CORE_EVENT_HANG_UNKNOWN], 1);
    assert_int_equal(c.events[CORE_EVENT_RANK_KILLED], 0);
    status_is(&c, WIRE_PHASE_RUNNING, 2, 3);
    cluster_pass(&c, 5000);
    assert_int_equal(c.events[CORE_EVENT_RANK_KILLED], 1);
    cluster_close(&c);
}

static void test_daemon_away_is_nothing_while_steps_progress(void **state)
{
    struct cluster c;
    (void)state;
    cluster_run(&c, 2, 4, 5);
    cluster_node_down(&c, 1);
    for (int i = 0; i < 50; i++) {
        cluster_step(&c);
    }
    assert_int_equal(c.opens, 1);
    cluster_node_up(&c, 1);
    c.nodes[1].incarnation += 100; /* a new daemon that found its ranks */
    c.nodes[1].sequence = 0;
    cluster_step(&c);
    assert_int_equal(c.opens, 1);
    status_is(&c, WIRE_PHASE_RUNNING, 1, 4);
    cluster_close(&c);
}

static void test_node_lost_without_progress_reshapes_after_restart(void **state)
{
    struct cluster c;
    (void)state;
    cluster_init(&c, 2, 4, 2); /* no room elsewhere */
    cluster_pass(&c, 200);
    cluster_step(&c);
    cluster_node_down(&c, 1);
    cluster_pass(&c, 900);
    assert_int_equal(c.opens, 1);
    cluster_pass(&c, 400);
    assert_int_equal(c.opens, 2);
    cluster_pass(&c, 3000);
    assert_int_equal(c.events[CORE_EVENT_NODE_LOST], 1);
    assert_int_equal(c.events[CORE_EVENT_RESHAPED], 1);
    status_is(&c, WIRE_PHASE_RUNNING, 2, 2);
    cluster_close(&c);
}

static void test_fence_holds_until_contact_or_abandon(void **state)
{
    struct cluster c;
    (void)state;
    cluster_init(&c, 2, 2, 2);
    c.nodes[0].ranks_max = 0;
    c.config.nodes_min = 1;
    cluster_pass(&c, 300);
    status_is(&c, WIRE_PHASE_RUNNING, 1, 2);
    cluster_step(&c);
    cluster_node_down(&c, 1); /* all ranks are there: nothing proves that they ended */
    c.nodes[0].ranks_max = 2;
    cluster_pass(&c, 20000);
    assert_int_equal(c.events[CORE_EVENT_FENCE_WAIT], 1);
    status_is(&c, WIRE_PHASE_OPEN, 2, 0);
    assert_int_equal(core_leader_on_request(c.leader, CORE_REQUEST_ABANDON, c.now), 0);
    cluster_pass(&c, 500);
    status_is(&c, WIRE_PHASE_RUNNING, 2, 2);
    cluster_close(&c);
}

static void test_other_probe_is_refused_by_name(void **state)
{
    struct cluster c;
    (void)state;
    cluster_run(&c, 1, 3, 2);
    c.probe = 99; /* as on a processor with other kernels */
    cluster_die(&c, cluster_rank(&c, 1), -1, SIGKILL);
    cluster_pass(&c, 500);
    assert_int_equal(c.events[CORE_EVENT_RANK_REFUSED], 1);
    status_is(&c, WIRE_PHASE_RUNNING, 2, 2); /* without it, rather than with other bits */
    cluster_close(&c);
}

static void test_brake_holds_and_is_released(void **state)
{
    struct cluster c;
    (void)state;
    cluster_init(&c, 1, 2, 2);
    c.config.recoveries_per_hour = 3;
    cluster_pass(&c, 200);
    for (int i = 0; i < 4; i++) {
        cluster_step(&c);
        cluster_die(&c, cluster_rank(&c, 0), -1, SIGKILL);
        cluster_pass(&c, 300);
    }
    assert_int_equal(c.events[CORE_EVENT_HOLD], 1);
    status_is(&c, WIRE_PHASE_OPEN, 5, 0);
    assert_int_equal(core_leader_on_request(c.leader, CORE_REQUEST_RESUME, c.now), 0);
    cluster_pass(&c, 300);
    status_is(&c, WIRE_PHASE_RUNNING, 5, 2);
    cluster_close(&c);
}

static void test_digest_that_differs_never_runs(void **state)
{
    struct cluster c;
    (void)state;
    cluster_run(&c, 1, 2, 4);
    c.spoil = 1;
    cluster_die(&c, cluster_rank(&c, 0), -1, SIGKILL);
    cluster_pass(&c, 400);
    assert_int_equal(c.events[CORE_EVENT_DIGEST_DIFFERS], 1);
    status_is(&c, WIRE_PHASE_RUNNING, 3, 2); /* the next one was sound */
    cluster_close(&c);
}

static void test_last_save_is_committed_before_leaving(void **state)
{
    static const struct core_root roots[] = {{"/r", 0, 0}};
    struct cluster c;
    (void)state;
    cluster_init(&c, 2, 4, 4);
    c.config.root_count = 1;
    c.config.roots = roots;
    cluster_pass(&c, 200);
    for (int i = 0; i < 3; i++) {
        cluster_step(&c);
    }
    cluster_leave(&c, BELAY_VOTE_FINAL);
    cluster_pass(&c, 1000);
    assert_true(c.finished);
    assert_int_equal(c.verdict, WIRE_VERDICT_FINISHED);
    assert_int_equal(c.events[CORE_EVENT_SAVE_COMMITTED], 1);
    cluster_close(&c);
}

/* The daemon that leads is killed right after the end: who asks its successor still hears what the
 * run ended in, though no node has connected yet. */
static void test_digest_of_the_end_outlives_the_leader(void **state)
{
    struct cluster c;
    struct core_status status;
    (void)state;
    cluster_init(&c, 2, 4, 4);
    cluster_pass(&c, 200);
    cluster_step(&c);
    cluster_leave(&c, BELAY_VOTE_FINAL);
    cluster_pass(&c, 1000);
    assert_true(c.finished);
    const struct wire_record *end = &c.stored;
    assert_true(end->end_digest_known && end->phase == WIRE_PHASE_DONE);
    struct core_leader_config config = c.config;
    config.record = end;
    config.record_version = c.version;
    struct core_leader *successor = core_leader_new(&config, c.now);
    assert_non_null(successor);
    core_leader_status(successor, &status, c.now);
    assert_true(status.digest_known && status.digest_step == end->end_step);
    assert_true(bl_state_digest_equal(&status.digest, &end->end_digest));
    core_status_close(&status);
    core_leader_free(successor);
    cluster_close(&c);
}

static void test_last_save_that_fails_three_times_says_so(void **state)
{
    static const struct core_root roots[] = {{"/r", 0, 0}};
    struct cluster c;
    (void)state;
    cluster_init(&c, 1, 2, 2);
    c.config.root_count = 1;
    c.config.roots = roots;
    c.commit_rc = -28;
    cluster_pass(&c, 200);
    cluster_step(&c);
    cluster_leave(&c, BELAY_VOTE_STOP);
    cluster_pass(&c, 5000);
    assert_true(c.finished);
    assert_int_equal(c.verdict, WIRE_VERDICT_SAVE_FAILED);
    assert_int_equal(c.events[CORE_EVENT_SAVE_FAILED], 3);
    cluster_close(&c);
}

static const struct core_root one_root[] = {{"/r", 0, 0}};

/* A run on two ranks that did three steps; both are killed and nobody may be started again. */
static void cluster_strand(struct cluster *c)
{
    cluster_init(c, 1, 2, 2);
    c->config.root_count = 1;
    c->config.roots = one_root;
    cluster_pass(c, 200);
    for (int i = 0; i < 3; i++) {
        cluster_step(c);
    }
    c->nodes[0].ranks_max = 0;
    cluster_die(c, cluster_rank(c, 0), -1, SIGKILL);
    cluster_die(c, cluster_rank(c, 1), -1, SIGKILL);
}

static void test_stop_without_ranks_saves_their_memory(void **state)
{
    struct cluster c;
    (void)state;
    cluster_strand(&c);
    cluster_pass(&c, 5000);
    status_is(&c, WIRE_PHASE_OPEN, 2, 0);
    assert_int_equal(core_leader_on_request(c.leader, CORE_REQUEST_STOP, c.now), 0);
    cluster_pass(&c, 1000);
    assert_true(c.finished);
    assert_int_equal(c.verdict, WIRE_VERDICT_STOPPED);
    assert_int_equal(c.events[CORE_EVENT_SAVE_COMMITTED], 1);
    struct core_status status;
    core_leader_status(c.leader, &status, c.now);
    assert_int_equal(status.disk_step, 3);
    assert_int_equal(status.step, 3);
    core_status_close(&status);
    cluster_close(&c);
}

static void test_stop_without_ranks_or_memory_says_what_is_given_up(void **state)
{
    struct cluster c;
    (void)state;
    cluster_strand(&c);
    for (uint32_t i = 0; i < c.proc_count; i++) {
        c.procs[i].has_arena = c.procs[i].rank == 0;
    }
    cluster_pass(&c, 5000);
    assert_int_equal(core_leader_on_request(c.leader, CORE_REQUEST_STOP, c.now), 0);
    cluster_pass(&c, 1000);
    assert_true(c.finished);
    assert_int_equal(c.verdict, WIRE_VERDICT_STOPPED);
    assert_int_equal(c.events[CORE_EVENT_SAVE_COMMITTED], 0);
    struct core_status status;
    core_leader_status(c.leader, &status, c.now);
    assert_non_null(strstr(status.text, "steps 1 to 3 are given up"));
    core_status_close(&status);
    cluster_close(&c);
}

static void test_stop_of_a_held_run_saves_and_ends(void **state)
{
    struct cluster c;
    (void)state;
    cluster_init(&c, 1, 2, 2);
    c.config.recoveries_per_hour = 1;
    c.config.root_count = 1;
    c.config.roots = one_root;
    cluster_pass(&c, 200);
    for (int i = 0; i < 2; i++) {
        cluster_step(&c);
        cluster_die(&c, cluster_rank(&c, 0), -1, SIGKILL);
        cluster_pass(&c, 300);
    }
    assert_int_equal(c.events[CORE_EVENT_HOLD], 1);
    assert_int_equal(core_leader_on_request(c.leader, CORE_REQUEST_STOP, c.now), 0);
    cluster_pass(&c, 2000);
    assert_true(c.finished);
    assert_int_equal(c.verdict, WIRE_VERDICT_STOPPED);
    assert_int_equal(c.events[CORE_EVENT_SAVE_COMMITTED], 1);
    cluster_close(&c);
}

static void test_loads_that_fail_for_ever_are_tried_ever_more_rarely(void **state)
{
    struct cluster c;
    struct core_status status;
    (void)state;
    cluster_run(&c, 1, 2, 3);
    c.unready = 1;
    cluster_die(&c, cluster_rank(&c, 0), -1, SIGKILL);
    cluster_pass(&c, 1000);
    assert_true(c.opens >= 4);
    cluster_pass(&c, 60000);
    assert_true(c.opens < 25);
    core_leader_status(c.leader, &status, c.now);
    assert_int_equal(status.wait, CORE_WAIT_RETRY);
    core_status_close(&status);
    c.unready = 0;
    cluster_pass(&c, 6000);
    core_leader_status(c.leader, &status, c.now);
    assert_int_equal(status.phase, WIRE_PHASE_RUNNING);
    core_status_close(&status);
    cluster_close(&c);
}

static void victim_and_death(uint64_t apart_ms)
{
    struct cluster c;
    cluster_run(&c, 1, 3, 3);
    for (uint32_t r = 0; r < 3; r += 2) {
        cluster_rank(&c, r)->failed_generation = 1;
        cluster_rank(&c, r)->failed_code = BL_EPEER;
    }
    uint64_t killed = cluster_rank(&c, 1)->incarnation;
    if (apart_ms) {
        cluster_rank(&c, 1)->stuck = 1; /* it has not parked: nothing is planned yet */
        cluster_pass(&c, apart_ms);
    }
    for (uint32_t i = 0; i < c.proc_count; i++) {
        if (c.procs[i].incarnation == killed) {
            cluster_die(&c, &c.procs[i], -1, SIGKILL);
        }
    }
    cluster_pass(&c, 200);
    cluster_step(&c);
    assert_string_equal(c.recovered, "rank 1 on n0000 killed by SIGKILL");
    cluster_close(&c);
}

static void test_death_is_the_cause_not_what_its_peers_saw(void **state)
{
    (void)state;
    victim_and_death(0);
    victim_and_death(100);
    victim_and_death(500);
}

static void test_resume_where_no_node_fits_is_refused(void **state)
{
    struct wire_record record = {.run = 7,
                                 .phase = WIRE_PHASE_DONE,
                                 .verdict = WIRE_VERDICT_STOPPED,
                                 .generation = 3,
                                 .line = 1,
                                 .committed_step = 40,
                                 .function_id = 11,
                                 .probe = 13,
                                 .state_elems = 80};
    struct cluster c;
    struct core_status status;
    (void)state;
    cluster_init(&c, 1, 2, 2);
    c.config.record = &record;
    c.config.record_version = c.version = 5;
    c.config.resume = 1;
    cluster_pass(&c, 1000);
    core_leader_status(c.leader, &status, c.now);
    assert_int_equal(status.phase, WIRE_PHASE_OPEN);
    assert_int_equal(status.step, 40);
    assert_int_equal(status.nodes[0].refused, 1);
    core_status_close(&status);
    cluster_pass(&c, 4000);
    assert_true(c.finished);
    assert_int_equal(c.verdict, WIRE_VERDICT_REFUSED);
    core_leader_status(c.leader, &status, c.now);
    assert_non_null(strstr(status.text, "n0000: numeric probe differs"));
    assert_non_null(strstr(status.text, "unset OPENBLAS_CORETYPE"));
    core_status_close(&status);
    cluster_close(&c);
}

static void test_memory_of_a_run_under_way_is_known(void **state)
{
    struct cluster c;
    struct core_status status;
    (void)state;
    cluster_run(&c, 2, 4, 5);
    cluster_rank(&c, 2)->arena_step++; /* its report is newer than the others' */
    cluster_settle(&c);
    core_leader_status(c.leader, &status, c.now);
    assert_int_equal(status.memory_step, 5);
    core_status_close(&status);
    cluster_close(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_run_starts_when_its_nodes_are_there),
        cmocka_unit_test(test_killed_rank_is_replaced_and_others_stay),
        cmocka_unit_test(test_same_crash_three_times_ends_the_run),
        cmocka_unit_test(test_kills_from_outside_do_not_count_however_many),
        cmocka_unit_test(test_crash_at_other_steps_goes_on),
        cmocka_unit_test(test_exit_two_at_the_start_is_refused),
        cmocka_unit_test(test_stopped_rank_is_killed_with_stacks_and_victims_are_not),
        cmocka_unit_test(test_rank_that_never_came_is_the_culprit),
        cmocka_unit_test(test_hang_without_culprit_kills_only_the_second_time),
        cmocka_unit_test(test_daemon_away_is_nothing_while_steps_progress),
        cmocka_unit_test(test_node_lost_without_progress_reshapes_after_restart),
        cmocka_unit_test(test_fence_holds_until_contact_or_abandon),
        cmocka_unit_test(test_other_probe_is_refused_by_name),
        cmocka_unit_test(test_brake_holds_and_is_released),
        cmocka_unit_test(test_digest_that_differs_never_runs),
        cmocka_unit_test(test_last_save_is_committed_before_leaving),
        cmocka_unit_test(test_digest_of_the_end_outlives_the_leader),
        cmocka_unit_test(test_last_save_that_fails_three_times_says_so),
        cmocka_unit_test(test_resume_where_no_node_fits_is_refused),
        cmocka_unit_test(test_memory_of_a_run_under_way_is_known),
        cmocka_unit_test(test_stop_without_ranks_saves_their_memory),
        cmocka_unit_test(test_loads_that_fail_for_ever_are_tried_ever_more_rarely),
        cmocka_unit_test(test_death_is_the_cause_not_what_its_peers_saw),
        cmocka_unit_test(test_stop_without_ranks_or_memory_says_what_is_given_up),
        cmocka_unit_test(test_stop_of_a_held_run_saves_and_ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
