/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Planning grows with the extents, not with their square: ten times as many cost about ten times as
 * much processor time. tests/bench/bench_plan.c has the figures.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <cmocka.h>

#include "base/extent_plan.h"

#define TENSORS 50u
#define ROWS    600u
#define COLS    512u
#define TRIES   3
/* Of ten times the time: n log n gives about twelve, squares a hundred; caches and sanitizers blur
 * it. */
#define LIMIT 40

enum cut {
    CUT_FLAT,
    CUT_COLUMNS,
    CUT_REPLICAS /* half of the ranks hold the other half's extents again */
};

static struct bl_tensor tensor_of(uint32_t index)
{
    struct bl_tensor tensor = {
        .kind = BL_KIND_PARAM, .dtype = BL_F32, .dims = 2, .shape = {ROWS, COLS}};
    snprintf(tensor.name, sizeof(tensor.name), "layers.%u.weight", index);
    return tensor;
}

static void rank_list(struct bl_extent_list *list, enum cut cut, uint32_t world, uint32_t rank)
{
    const uint64_t elems = (uint64_t)ROWS * COLS;
    memset(list, 0, sizeof(*list));
    if (cut == CUT_REPLICAS) {
        world /= 2;
        rank %= world;
    }
    for (uint32_t t = 0; t < TENSORS; t++) {
        struct bl_tensor tensor = tensor_of(t);
        struct bl_extent extent;
        uint32_t index;
        assert_int_equal(bl_extent_list_tensor(list, &tensor, &index, NULL), 0);
        if (cut == CUT_COLUMNS) {
            bl_extent_whole(&extent, &tensor, index, 0,
                            ROWS * ((rank + 1) * COLS / world) - ROWS * (rank * COLS / world));
            extent.lo[1] = rank * COLS / world;
            extent.hi[1] = (rank + 1) * COLS / world;
        } else {
            bl_extent_whole(&extent, &tensor, index, elems * rank / world,
                            elems * (rank + 1) / world);
        }
        assert_int_equal(bl_extent_list_add(list, &extent), 0);
    }
}

/* Processor time of planning what `world` + 1 ranks want from what `world` ranks hold. */
static double plan_time(enum cut cut, uint32_t world)
{
    struct bl_extent_list *held = calloc(world, sizeof(*held));
    const struct bl_extent_list **lists = calloc(world, sizeof(*lists));
    struct bl_holdings *holdings = NULL;
    struct bl_spans spans = {0};
    struct timespec from, to;
    for (uint32_t r = 0; r < world; r++) {
        rank_list(&held[r], cut, world, r);
        lists[r] = &held[r];
    }
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &from);
    assert_int_equal(bl_holdings_new(&holdings, lists, world, NULL), 0);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &to);
    double sum = (double)(to.tv_sec - from.tv_sec) + (double)(to.tv_nsec - from.tv_nsec) * 1e-9;
    for (uint32_t r = 0; r < world + 2; r++) {
        struct bl_extent_list wanted;
        rank_list(&wanted, cut == CUT_REPLICAS ? CUT_FLAT : cut, world + 2, r);
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &from);
        assert_int_equal(bl_holdings_plan(holdings, &wanted, 0, wanted.extent_count, &spans, NULL),
                         0);
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &to);
        sum += (double)(to.tv_sec - from.tv_sec) + (double)(to.tv_nsec - from.tv_nsec) * 1e-9;
        bl_extent_list_close(&wanted);
    }
    assert_int_equal(spans.missing_elems, 0);
    bl_spans_close(&spans);
    bl_holdings_free(holdings);
    for (uint32_t r = 0; r < world; r++) {
        bl_extent_list_close(&held[r]);
    }
    free(held);
    free(lists);
    return sum;
}

/* The least of some tries: others use the machine too. */
static double plan_least(enum cut cut, uint32_t world)
{
    double least = plan_time(cut, world);
    for (int i = 1; i < TRIES; i++) {
        double time = plan_time(cut, world);
        least = time < least ? time : least;
    }
    return least;
}

static void grows(enum cut cut, uint32_t world, double limit)
{
    double small = plan_least(cut, world);
    double large = plan_least(cut, 10 * world);
    printf("%u extents in %.2f ms, %u in %.2f ms: %.1f times\n", TENSORS * world, small * 1e3,
           10 * TENSORS * world, large * 1e3, large / small);
    assert_true(large < limit * small);
}

static void test_plan_of_ten_times_as_many_ranges_takes_ten_times_as_long(void **state)
{
    (void)state;
    grows(CUT_FLAT, 100, LIMIT);
    grows(CUT_REPLICAS, 100, LIMIT);
}

/* Columns: every rank's rows meet every rank's, so that pieces grow by rank while rows stay. */
static void test_plan_of_columns_grows_with_the_pieces(void **state)
{
    (void)state;
    grows(CUT_COLUMNS, 8, LIMIT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plan_of_ten_times_as_many_ranges_takes_ten_times_as_long),
        cmocka_unit_test(test_plan_of_columns_grows_with_the_pieces),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
