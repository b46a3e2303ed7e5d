/* SPDX-License-Identifier: Apache-2.0 */
/* Which layout a generation has and who sits where, without a leader. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>

#include "base/digest.h"
#include "base/error.h"
#include "daemon/core/leader_layout.h"

#define PROCS_MAX 64

struct table { /* processes of a run, by hand */
    struct leader_layout_job job;
    struct leader_layout former, shape;
    struct leader_layout_proc procs[PROCS_MAX];
    uint32_t count, seats[PROCS_MAX];
};

/* A full world of the job's, `per_node` ranks on each node, rank r at procs[r]. */
static void table_full(struct table *t, uint32_t dp, uint32_t tp, uint32_t pp, uint32_t per_node)
{
    memset(t, 0, sizeof(*t));
    t->job = (struct leader_layout_job){.tp = tp, .pp = pp, .pp_min = 1, .dp_max = dp};
    t->former = (struct leader_layout){dp, tp, pp};
    t->count = dp * tp * pp;
    for (uint32_t i = 0; i < t->count; i++) {
        t->procs[i] = (struct leader_layout_proc){.node = i / per_node, .rank = i, .held = 1};
    }
}

/* The process that had this rank is gone. */
static void table_lose(struct table *t, uint32_t rank)
{
    for (uint32_t i = 0; i < t->count; i++) {
        if (t->procs[i].held && t->procs[i].rank == rank) {
            memmove(&t->procs[i], &t->procs[i + 1], (--t->count - i) * sizeof(t->procs[0]));
            return;
        }
    }
    fail_msg("nobody has rank %u", rank);
}

static void table_join(struct table *t, uint32_t node, uint32_t rank)
{
    t->procs[t->count++] = (struct leader_layout_proc){.node = node, .rank = rank};
}

static void table_seat(struct table *t)
{
    uint8_t used[PROCS_MAX] = {0};
    t->shape = leader_layout_shape(&t->job, t->count);
    if (t->shape.dp == 0) {
        return;
    }
    leader_layout_seats(&t->job, &t->former, &t->shape, t->procs, t->count, t->seats);
    for (uint32_t r = 0; r < leader_layout_world(&t->shape); r++) {
        assert_true(t->seats[r] < t->count);
        assert_false(used[t->seats[r]]);
        used[t->seats[r]] = 1;
    }
}

static void shape_is(const struct table *t, uint32_t dp, uint32_t tp, uint32_t pp)
{
    assert_int_equal(t->shape.dp, dp);
    assert_int_equal(t->shape.tp, tp);
    assert_int_equal(t->shape.pp, pp);
}

/* The former ranks of the new ones, in order; LEADER_NO_RANK: nobody who held one. */
static void seats_are(const struct table *t, const uint32_t *former)
{
    for (uint32_t r = 0; r < leader_layout_world(&t->shape); r++) {
        const struct leader_layout_proc *p = &t->procs[t->seats[r]];
        assert_int_equal(p->held ? p->rank : LEADER_NO_RANK, former[r]);
    }
}
#define SEATS_ARE(t, ...) seats_are(t, (const uint32_t[]){__VA_ARGS__})
#define NEW               LEADER_NO_RANK

static void test_a_hole_is_filled_and_survivors_keep_their_rank(void **state)
{
    struct table t;
    (void)state;
    table_full(&t, 2, 2, 2, 4);
    table_lose(&t, 5);
    table_join(&t, 0, 5); /* the one that was started for it */
    table_seat(&t);
    shape_is(&t, 2, 2, 2);
    SEATS_ARE(&t, 0, 1, 2, 3, 4, NEW, 6, 7);
    t.procs[t.count - 1].rank = LEADER_NO_RANK; /* a spare does as well */
    table_seat(&t);
    SEATS_ARE(&t, 0, 1, 2, 3, 4, NEW, 6, 7);
}

static void test_the_replica_that_lost_a_rank_is_dissolved(void **state)
{
    struct table t;
    (void)state;
    table_full(&t, 3, 1, 2, 2);
    table_lose(&t, 3);
    table_seat(&t);
    shape_is(&t, 2, 1, 2);
    SEATS_ARE(&t, 0, 1, 4, 5);
    table_full(&t, 3, 1, 2, 2); /* the first one: the others close up in their order */
    table_lose(&t, 0);
    table_seat(&t);
    SEATS_ARE(&t, 2, 3, 4, 5);
}

static void test_two_broken_replicas_make_one(void **state)
{
    struct table t;
    (void)state;
    table_full(&t, 2, 1, 4, 8);
    table_lose(&t, 1);
    table_lose(&t, 6);
    table_seat(&t);
    shape_is(&t, 1, 1, 4);
    SEATS_ARE(&t, 0, 5, 2, 3); /* rank 5 had stage 1 as well: it loads least */
}

static void test_a_whole_replica_is_kept_before_one_that_spares_would_complete(void **state)
{
    struct table t;
    (void)state;
    table_full(&t, 2, 2, 1, 2);
    table_lose(&t, 0);
    table_seat(&t);
    shape_is(&t, 1, 2, 1);
    SEATS_ARE(&t, 2, 3);
}

static void test_the_run_grows_back_behind_those_that_are_there(void **state)
{
    struct table t;
    (void)state;
    table_full(&t, 1, 2, 2, 4);
    t.job.dp_max = 2;
    for (uint32_t i = 0; i < 4; i++) {
        table_join(&t, 1, LEADER_NO_RANK);
    }
    table_seat(&t);
    shape_is(&t, 2, 2, 2);
    SEATS_ARE(&t, 0, 1, 2, 3, NEW, NEW, NEW, NEW);
}

static void test_the_pipeline_is_recut_when_no_replica_is_left(void **state)
{
    struct table t;
    (void)state;
    table_full(&t, 1, 1, 3, 1);
    table_lose(&t, 1);
    table_seat(&t);
    shape_is(&t, 1, 1, 2);
    SEATS_ARE(&t, 0, 2);
    table_full(&t, 1, 2, 4, 2); /* a node with a stage goes, half of another one too */
    table_lose(&t, 2);
    table_lose(&t, 3);
    table_lose(&t, 7);
    table_seat(&t);
    shape_is(&t, 1, 2, 2);
    SEATS_ARE(&t, 0, 1, 4, 5);
}

static void test_a_recut_pipeline_gets_its_stages_back(void **state)
{
    struct table t;
    (void)state;
    table_full(&t, 1, 1, 2, 1);
    t.job.pp = 3;
    table_join(&t, 2, 2);
    table_seat(&t);
    shape_is(&t, 1, 1, 3);
    SEATS_ARE(&t, 0, NEW, 1); /* the ends hold most of what they will need */
}

static void test_too_few_ranks_are_no_layout(void **state)
{
    struct table t;
    (void)state;
    table_full(&t, 1, 2, 4, 2);
    t.job.pp_min = 3;
    t.count = 6;
    table_seat(&t);
    shape_is(&t, 1, 2, 3);
    t.count = 5;
    table_seat(&t);
    assert_int_equal(t.shape.dp, 0);
    assert_int_equal(leader_layout_least(&t.job), 6);
    t.job.pp_min = 1;
    t.count = 1; /* below tp */
    table_seat(&t);
    assert_int_equal(t.shape.dp, 0);
}

static void test_lanes_bound_the_replicas(void **state)
{
    struct table t;
    (void)state;
    table_full(&t, 4, 2, 2, 4);
    t.job.dp_max = 3;
    table_seat(&t);
    shape_is(&t, 3, 2, 2);
    SEATS_ARE(&t, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11);
}

/* Three processes on each of four nodes, groups of two: four groups on one node, two on two. */
static void test_groups_stay_on_a_node_where_that_can_be(void **state)
{
    struct table t;
    uint32_t torn = 0;
    (void)state;
    table_full(&t, 3, 2, 2, 3);
    for (uint32_t i = 0; i < t.count; i++) {
        t.procs[i].rank = LEADER_NO_RANK;
        t.procs[i].held = 0;
    }
    table_seat(&t);
    for (uint32_t r = 0; r < 12; r += 2) {
        torn += t.procs[t.seats[r]].node != t.procs[t.seats[r + 1]].node;
    }
    assert_int_equal(torn, 2);
    t.count = 9; /* one replica fewer: none has to be torn but one */
    t.job.dp_max = 1;
    table_seat(&t);
    shape_is(&t, 1, 2, 2);
    for (uint32_t r = 0; r < 4; r += 2) {
        assert_int_equal(t.procs[t.seats[r]].node, t.procs[t.seats[r + 1]].node);
    }
}

static void test_a_hole_is_filled_from_the_groups_own_node(void **state)
{
    struct table t;
    (void)state;
    table_full(&t, 2, 2, 1, 2);
    table_lose(&t, 2);
    table_join(&t, 0, LEADER_NO_RANK);
    table_join(&t, 1, LEADER_NO_RANK);
    table_seat(&t);
    SEATS_ARE(&t, 0, 1, NEW, 3);
    assert_int_equal(t.procs[t.seats[2]].node, 1);
}

/* ---- at random ---- */

/* What must hold whatever happened. */
static void seats_check(const struct table *t)
{
    uint32_t copy = t->shape.pp * t->shape.tp;
    uint32_t whole[PROCS_MAX] = {0};
    uint32_t whole_count = 0;
    uint32_t stay = 0;

    if (t->former.pp != t->shape.pp) {
        return;
    }
    for (uint32_t i = 0; i < t->count; i++) {
        whole[t->procs[i].rank / copy] += t->procs[i].held;
    }
    for (uint32_t d = 0; d < t->former.dp; d++) {
        whole_count += whole[d] == copy;
    }
    for (uint32_t r = 0; r < leader_layout_world(&t->shape); r++) {
        const struct leader_layout_proc *p = &t->procs[t->seats[r]];
        stay += p->held && whole[p->rank / copy] == copy && p->rank % copy == r % copy;
        if (t->shape.dp == t->former.dp && p->held) {
            assert_int_equal(p->rank, r);
        }
    }
    whole_count = whole_count < t->shape.dp ? whole_count : t->shape.dp;
    assert_true(stay >= whole_count * copy);
}

static uint64_t random_below(uint64_t *random, uint64_t bound)
{
    *random += 0x9e3779b97f4a7c15ull;
    return bl_mix64(*random) % bound;
}

static void test_whole_replicas_keep_their_places_whatever_is_lost(void **state)
{
    const char *text = getenv("BELAY_TEST_SEED");
    uint64_t random = text ? strtoull(text, NULL, 0) : (uint64_t)time(NULL);
    (void)state;
    printf("layouts: BELAY_TEST_SEED=0x%llx\n", (unsigned long long)random);
    for (int round = 0; round < 3000; round++) {
        struct table t;
        uint32_t tp = 1 + (uint32_t)random_below(&random, 3);
        uint32_t pp = 1 + (uint32_t)random_below(&random, 4);
        uint32_t dp = 1 + (uint32_t)random_below(&random, 4);
        table_full(&t, dp, tp, pp, 1 + (uint32_t)random_below(&random, 6));
        for (uint64_t lost = random_below(&random, t.count); lost > 0; lost--) {
            uint32_t gone = (uint32_t)random_below(&random, t.count);
            struct leader_layout_proc was = t.procs[gone];
            if (!was.held) {
                continue;
            }
            table_lose(&t, was.rank);
            if (random_below(&random, 2)) {
                table_join(&t, was.node, was.rank);
            }
        }
        table_seat(&t);
        if (t.shape.dp) {
            seats_check(&t);
        }
    }
}

/* ---- many ---- */

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* tp 8, pp 10: nodes of 100 ranks; one node in 20 is gone. Best of a few. */
static double seats_time(uint32_t ranks)
{
    struct leader_layout_job job = {.tp = 8, .pp = 10, .pp_min = 1, .dp_max = ranks / 80};
    struct leader_layout former = {ranks / 80, 8, 10};
    struct leader_layout_proc *procs = calloc(ranks, sizeof(*procs));
    uint32_t *seats = calloc(ranks, sizeof(*seats));
    uint32_t count = 0;
    double best = 1e9;

    BL_ASSERT(procs && seats);
    for (uint32_t r = 0; r < ranks; r++) {
        if (r / 100 % 20 != 7) {
            procs[count++] = (struct leader_layout_proc){.node = r / 100, .rank = r, .held = 1};
        }
    }
    struct leader_layout shape = leader_layout_shape(&job, count);
    for (int i = 0; i < 5; i++) {
        double start = seconds();
        leader_layout_seats(&job, &former, &shape, procs, count, seats);
        double took = seconds() - start;
        best = took < best ? took : best;
    }
    free(procs);
    free(seats);
    return best;
}

static void test_ten_thousand_ranks_are_seated_in_n_log_n(void **state)
{
    (void)state;
    double first = seats_time(2000);
    double last = seats_time(16000);
    double exponent = log2(last / first) / 3;
    print_message("10000 ranks: %.1f ms; 16000: %.1f ms; grows as ranks^%.2f\n",
                  seats_time(10000) * 1e3, last * 1e3, exponent);
    assert_true(exponent < 1.6);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_hole_is_filled_and_survivors_keep_their_rank),
        cmocka_unit_test(test_the_replica_that_lost_a_rank_is_dissolved),
        cmocka_unit_test(test_two_broken_replicas_make_one),
        cmocka_unit_test(test_a_whole_replica_is_kept_before_one_that_spares_would_complete),
        cmocka_unit_test(test_the_run_grows_back_behind_those_that_are_there),
        cmocka_unit_test(test_the_pipeline_is_recut_when_no_replica_is_left),
        cmocka_unit_test(test_a_recut_pipeline_gets_its_stages_back),
        cmocka_unit_test(test_too_few_ranks_are_no_layout),
        cmocka_unit_test(test_lanes_bound_the_replicas),
        cmocka_unit_test(test_groups_stay_on_a_node_where_that_can_be),
        cmocka_unit_test(test_a_hole_is_filled_from_the_groups_own_node),
        cmocka_unit_test(test_whole_replicas_keep_their_places_whatever_is_lost),
        cmocka_unit_test(test_ten_thousand_ranks_are_seated_in_n_log_n),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
