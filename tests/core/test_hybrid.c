/* SPDX-License-Identifier: Apache-2.0 */
/* The leader with tensor and pipeline parallel ranks: dissolved, cut, waiting, grown, and hangs. */
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

/* dp x tp x pp ranks run, with room for `room` on each node. */
static void hybrid_run(struct cluster *c, uint32_t nodes, uint32_t room, uint32_t dp, uint32_t tp,
                       uint32_t pp)
{
    cluster_init(c, nodes, dp * tp * pp, room);
    c->config.tp = tp;
    c->config.pp = pp;
    c->config.lanes = dp;
    cluster_pass(c, 300);
    cluster_step(c);
    cluster_step(c);
}

static void layout_is(struct cluster *c, enum wire_phase phase, uint32_t dp, uint32_t tp,
                      uint32_t pp)
{
    struct core_status status;
    core_leader_status(c->leader, &status, c->now);
    assert_int_equal(status.phase, phase);
    assert_int_equal(status.dp, dp);
    assert_int_equal(status.tp, tp);
    assert_int_equal(status.pp, pp);
    assert_int_equal(status.world, dp * tp * pp);
    core_status_close(&status);
}

static void waits_for(struct cluster *c, const char *text)
{
    struct core_status status;
    core_leader_status(c->leader, &status, c->now);
    assert_int_equal(status.wait, CORE_WAIT_NODES);
    assert_non_null(strstr(status.wait_text, text));
    core_status_close(&status);
}

static void test_ranks_start_in_groups_on_their_nodes(void **state)
{
    struct cluster c;
    (void)state;
    hybrid_run(&c, 4, 4, 2, 2, 4);
    layout_is(&c, WIRE_PHASE_RUNNING, 2, 2, 4);
    for (uint32_t r = 0; r < 16; r++) {
        assert_int_equal(cluster_rank(&c, r)->node, r / 4); /* neighbours, evenly spread */
    }
    cluster_close(&c);
}

static void test_a_killed_rank_comes_back_in_its_place(void **state)
{
    struct cluster c;
    uint64_t was[8];
    (void)state;
    hybrid_run(&c, 2, 4, 2, 2, 2);
    for (uint32_t r = 0; r < 8; r++) {
        was[r] = cluster_rank(&c, r)->incarnation;
    }
    cluster_die(&c, cluster_rank(&c, 5), -1, SIGKILL);
    cluster_pass(&c, 300);
    layout_is(&c, WIRE_PHASE_RUNNING, 2, 2, 2);
    for (uint32_t r = 0; r < 8; r++) {
        assert_int_equal(cluster_rank(&c, r)->incarnation == was[r], r != 5);
        assert_int_equal(cluster_rank(&c, r)->step, 2);
    }
    assert_int_equal(c.events[CORE_EVENT_RESHAPED], 0);
    cluster_close(&c);
}

static void test_a_lost_node_dissolves_its_replica_and_the_run_grows_back(void **state)
{
    struct cluster c;
    uint64_t kept[4];
    (void)state;
    hybrid_run(&c, 4, 2, 2, 1, 4); /* replica 0 on nodes 0 and 1 */
    for (uint32_t r = 0; r < 4; r++) {
        kept[r] = cluster_rank(&c, 4 + r)->incarnation;
    }
    cluster_node_down(&c, 1);
    cluster_pass(&c, 4000);
    layout_is(&c, WIRE_PHASE_RUNNING, 1, 1, 4);
    assert_string_equal(c.reshaped, "dp 2 x tp 1 x pp 4 -> dp 1 x tp 1 x pp 4; 4 of 8 ranks");
    for (uint32_t r = 0; r < 4; r++) {
        assert_int_equal(cluster_rank(&c, r)->incarnation, kept[r]); /* the same (t, p) */
    }
    uint32_t generations = c.opens;
    for (int i = 0; i < 5; i++) {
        cluster_step(&c); /* two spares make no replica: nobody asks to grow */
    }
    assert_int_equal(c.opens, generations);
    cluster_node_up(&c, 1);
    cluster_pass(&c, 500);
    for (uint32_t i = 0; i < c.proc_count; i++) { /* the vote came back with GROW */
        c.procs[i].stop_flags = c.procs[i].state == WIRE_RANK_RUNNING ? BELAY_VOTE_GROW : 0;
    }
    cluster_pass(&c, 500);
    layout_is(&c, WIRE_PHASE_RUNNING, 2, 1, 4);
    assert_string_equal(c.reshaped, "dp 1 x tp 1 x pp 4 -> dp 2 x tp 1 x pp 4");
    for (uint32_t r = 0; r < 4; r++) {
        assert_int_equal(cluster_rank(&c, r)->incarnation, kept[r]);
    }
    cluster_close(&c);
}

static void test_spares_fill_a_hole_at_once(void **state)
{
    struct cluster c;
    (void)state;
    hybrid_run(&c, 4, 2, 2, 1, 4);
    cluster_node_down(&c, 1);
    cluster_pass(&c, 4000);
    layout_is(&c, WIRE_PHASE_RUNNING, 1, 1, 4); /* nodes 2 and 3; two spares on node 0 */
    cluster_step(&c);
    cluster_node_down(&c, 2);
    cluster_pass(&c, 4000);
    layout_is(&c, WIRE_PHASE_RUNNING, 1, 1, 4);
    uint32_t on_first = 0;
    for (uint32_t r = 0; r < 4; r++) {
        on_first += cluster_rank(&c, r)->node == 0;
    }
    assert_int_equal(on_first, 2);
    cluster_close(&c);
}

static void test_the_pipeline_is_cut_and_regrown(void **state)
{
    struct cluster c;
    (void)state;
    hybrid_run(&c, 3, 1, 1, 1, 3);
    cluster_node_down(&c, 1);
    cluster_pass(&c, 4000);
    layout_is(&c, WIRE_PHASE_RUNNING, 1, 1, 2);
    assert_string_equal(c.reshaped, "dp 1 x tp 1 x pp 3 -> dp 1 x tp 1 x pp 2; 2 of 3 ranks");
    assert_int_equal(cluster_rank(&c, 0)->node, 0);
    assert_int_equal(cluster_rank(&c, 1)->node, 2);
    cluster_step(&c);
    cluster_node_down(&c, 2);
    cluster_pass(&c, 4000);
    layout_is(&c, WIRE_PHASE_RUNNING, 1, 1, 1);
    cluster_node_up(&c, 1);
    cluster_node_up(&c, 2);
    cluster_pass(&c, 500);
    cluster_step(&c);
    for (uint32_t i = 0; i < c.proc_count; i++) { /* the vote came back with GROW */
        c.procs[i].stop_flags = c.procs[i].state == WIRE_RANK_RUNNING ? BELAY_VOTE_GROW : 0;
    }
    cluster_pass(&c, 500);
    layout_is(&c, WIRE_PHASE_RUNNING, 1, 1, 3);
    cluster_close(&c);
}

static void test_below_the_least_layout_it_waits_with_numbers(void **state)
{
    struct cluster c;
    (void)state;
    cluster_init(&c, 3, 6, 2);
    c.config.tp = 2;
    c.config.pp = 3;
    c.config.pp_min = 2;
    c.whole_replicas = 1;
    cluster_pass(&c, 300);
    cluster_step(&c);
    layout_is(&c, WIRE_PHASE_RUNNING, 1, 2, 3);
    cluster_node_down(&c, 1);
    cluster_node_down(&c, 2);
    cluster_pass(&c, 6000);
    layout_is(&c, WIRE_PHASE_OPEN, 0, 0, 0);
    waits_for(&c, "room for 2 more ranks: 2 are here, one replica takes 4 at least (tp 2 x pp 2)");
    assert_true(c.events[CORE_EVENT_WAITING] > 0);
    cluster_node_up(&c, 1); /* its ranks and their memory are still there */
    cluster_node_up(&c, 2);
    cluster_pass(&c, 3000);
    layout_is(&c, WIRE_PHASE_RUNNING, 1, 2, 3);
    cluster_close(&c);
}

/* ---- replicas that hold the same ---- */

static void test_equal_replicas_count_once(void **state)
{
    struct cluster c;
    struct core_status status;
    (void)state;
    cluster_init(&c, 2, 4, 2);
    c.config.pp = 2;
    c.whole_replicas = 1;
    cluster_pass(&c, 300);
    cluster_step(&c);
    core_leader_status(c.leader, &status, c.now);
    assert_int_equal(status.digest_known, 1);
    assert_int_equal(status.digest.sum[0], c.elems); /* every element once */
    core_status_close(&status);
    cluster_die(&c, cluster_rank(&c, 3), -1, SIGKILL);
    cluster_pass(&c, 300);
    layout_is(&c, WIRE_PHASE_RUNNING, 2, 1, 2);
    assert_int_equal(c.events[CORE_EVENT_DIGEST_DIFFERS], 0);
    /* A whole replica with its node: nothing is lost, as the other one holds all. */
    cluster_step(&c);
    cluster_node_down(&c, 1);
    cluster_pass(&c, 4000);
    layout_is(&c, WIRE_PHASE_RUNNING, 1, 1, 2);
    assert_int_equal(cluster_rank(&c, 0)->step, 2);
    cluster_close(&c);
}

static void test_extents_that_overlap_otherwise_are_refused(void **state)
{
    struct cluster c;
    (void)state;
    cluster_init(&c, 1, 2, 2);
    c.overlap = 3;
    cluster_pass(&c, 5000);
    assert_true(c.finished);
    assert_int_equal(c.verdict, WIRE_VERDICT_REFUSED);
    assert_non_null(strstr(c.stored.cause, "name 83 elements of a state that has 80"));
    cluster_close(&c);
}

/* ---- hangs ---- */

/* What ranks 0 to 3 (dp 2 x pp 2) are at: collectives entered, and whether they wait there. Who is
 * killed, or -1. */
static int hangs(const uint64_t collective[4], const uint32_t waiting[4])
{
    struct cluster c;
    uint64_t was[4];
    int killed = -1;

    hybrid_run(&c, 1, 4, 2, 1, 2);
    for (uint32_t r = 0; r < 4; r++) {
        struct cluster_proc *p = cluster_rank(&c, r);
        was[r] = p->incarnation;
        p->beat = (struct wire_beat){
            .step = 3, .collective = collective[r], .waiting = waiting[r], .progress_age_ms = r};
    }
    cluster_pass(&c, 2500);
    assert_int_equal(c.events[CORE_EVENT_RANK_KILLED] + c.events[CORE_EVENT_HANG_UNKNOWN], 1);
    for (uint32_t r = 0; r < 4; r++) {
        killed = cluster_rank(&c, r)->incarnation != was[r] ? (int)r : killed;
    }
    cluster_close(&c);
    return killed;
}
#define HANGS(c0, c1, c2, c3, w0, w1, w2, w3)                                                      \
    hangs((const uint64_t[]){c0, c1, c2, c3}, (const uint32_t[]){w0, w1, w2, w3})

static void test_the_only_one_that_does_not_wait_is_the_culprit(void **state)
{
    (void)state;
    /* Stage 1 counts more calls than stage 0: it is the one that hangs all the same. */
    assert_int_equal(HANGS(4, 9, 4, 12, 1, 0, 1, 1), 1);
    /* And fewer: stage 0 of the other replica waits at its first gradient. */
    assert_int_equal(HANGS(6, 2, 1, 9, 1, 1, 0, 1), 2);
}

static void test_victims_of_another_stage_are_never_named(void **state)
{
    (void)state;
    /* All wait: nobody stands out, however few calls a stage has counted. */
    assert_int_equal(HANGS(2, 9, 4, 9, 1, 1, 1, 1), -1);
    /* Two do not wait, each behind its own stage: it could be either. */
    assert_int_equal(HANGS(3, 9, 4, 12, 0, 0, 1, 1), -1);
}

static void test_numbers_tell_within_a_stage(void **state)
{
    (void)state;
    assert_int_equal(HANGS(4, 9, 4, 12, 1, 0, 1, 0), 1);
    assert_int_equal(HANGS(2, 12, 4, 12, 0, 1, 0, 1), 0);
}

/* The store takes its time with OPEN: the hang is not judged again meanwhile. */
static void test_a_hang_is_judged_once_while_the_store_is_slow(void **state)
{
    struct cluster c;
    (void)state;
    hybrid_run(&c, 1, 4, 2, 1, 2);
    for (uint32_t r = 0; r < 4; r++) {
        cluster_rank(&c, r)->beat = (struct wire_beat){.step = 3, .collective = 9, .waiting = 1};
    }
    c.hold_store = 1;
    cluster_pass(&c, 4000);
    assert_int_equal(c.events[CORE_EVENT_HANG_UNKNOWN], 1);
    assert_int_equal(c.events[CORE_EVENT_RANK_KILLED], 0);
    assert_true(c.held_put != 0);
    c.hold_store = 0;
    core_leader_on_store_done(c.leader, c.held_put, -28, 0, c.now); /* and then fails */
    cluster_pass(&c, 3000);
    layout_is(&c, WIRE_PHASE_RUNNING, 2, 1, 2);
    assert_int_equal(c.events[CORE_EVENT_RANK_KILLED], 0);
    cluster_close(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ranks_start_in_groups_on_their_nodes),
        cmocka_unit_test(test_a_killed_rank_comes_back_in_its_place),
        cmocka_unit_test(test_a_lost_node_dissolves_its_replica_and_the_run_grows_back),
        cmocka_unit_test(test_spares_fill_a_hole_at_once),
        cmocka_unit_test(test_the_pipeline_is_cut_and_regrown),
        cmocka_unit_test(test_below_the_least_layout_it_waits_with_numbers),
        cmocka_unit_test(test_equal_replicas_count_once),
        cmocka_unit_test(test_extents_that_overlap_otherwise_are_refused),
        cmocka_unit_test(test_the_only_one_that_does_not_wait_is_the_culprit),
        cmocka_unit_test(test_victims_of_another_stage_are_never_named),
        cmocka_unit_test(test_numbers_tell_within_a_stage),
        cmocka_unit_test(test_a_hang_is_judged_once_while_the_store_is_slow),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
