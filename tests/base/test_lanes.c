/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "base/digest.h"
#include "base/lanes.h"

#define LANES_TESTED 24

/* A sum written out: hash of the tree's shape and operands, so any other order shows. */
static uint64_t add(uint64_t left, uint64_t right)
{
    return bl_mix64(left * 3 + bl_mix64(right));
}

static uint64_t leaf(uint32_t lane)
{
    return bl_mix64(lane + 1);
}

static uint64_t tree(uint32_t lo, uint32_t n)
{
    if (n == 1) {
        return leaf(lo);
    }
    uint32_t p = 1;
    while (p * 2 < n) {
        p *= 2;
    }
    return add(tree(lo, p), tree(lo + p, n - p));
}

/* As a rank does it, with a stack. */
static uint64_t sum_piece(const struct bl_lane_piece *piece)
{
    uint64_t stack[40];
    uint32_t depth = 0;
    uint32_t deepest = 0;
    for (uint32_t lane = piece->lo; lane < piece->lo + piece->n; lane++) {
        stack[depth++] = leaf(lane);
        deepest = depth > deepest ? depth : deepest;
        for (uint32_t m = bl_lanes_merges_after(piece->lo, piece->n, lane); m > 0; m--) {
            assert_true(depth >= 2);
            depth--;
            stack[depth - 1] = add(stack[depth - 1], stack[depth]);
        }
    }
    assert_int_equal(depth, 1);
    assert_int_equal(deepest, bl_lanes_stack(piece->n));
    return stack[0];
}

static uint64_t sum_plan(const struct bl_lane_plan *plan)
{
    uint64_t *sums = calloc(plan->piece_count, sizeof(*sums));
    assert_non_null(sums);
    for (uint32_t i = 0; i < plan->piece_count; i++) {
        sums[i] = sum_piece(&plan->pieces[i]);
    }
    for (uint32_t m = 0; m + 1 < plan->piece_count; m++) {
        const struct bl_lane_merge *merge = &plan->merges[m];
        assert_true(merge->left < merge->right && merge->right < plan->piece_count);
        sums[merge->left] = add(sums[merge->left], sums[merge->right]);
    }
    uint64_t total = sums[0];
    free(sums);
    return total;
}

/* Each lane once; every rank at least one; no load over ceil(V / P); lists and pieces agree. */
static void check_plan(const struct bl_lane_plan *plan, uint32_t lanes, uint32_t ranks)
{
    uint32_t next = 0;
    for (uint32_t i = 0; i < plan->piece_count; i++) {
        assert_int_equal(plan->pieces[i].lo, next);
        assert_true(plan->pieces[i].rank < ranks);
        next += plan->pieces[i].n;
    }
    assert_int_equal(next, lanes);
    assert_int_equal(plan->load_max, (lanes + ranks - 1) / ranks);
    uint32_t listed = 0;
    uint32_t lowest = 0;
    for (uint32_t r = 0; r < ranks; r++) {
        uint32_t load = bl_lanes_load(plan, r);
        assert_true(load >= 1 && load <= plan->load_max);
        const struct bl_lane_piece *first = &plan->pieces[plan->rank_pieces[plan->rank_first[r]]];
        assert_true(r == 0 || first->lo > lowest);
        lowest = first->lo;
        for (uint32_t i = plan->rank_first[r]; i < plan->rank_first[r + 1]; i++, listed++) {
            assert_int_equal(plan->pieces[plan->rank_pieces[i]].rank, r);
            assert_true(i == plan->rank_first[r] ||
                        plan->rank_pieces[i] > plan->rank_pieces[i - 1]);
        }
    }
    assert_int_equal(listed, plan->piece_count);
}

static void test_lanes_add_up_as_one_tree_whatever_the_ranks(void **state)
{
    (void)state;
    for (uint32_t lanes = 1; lanes <= LANES_TESTED; lanes++) {
        uint64_t want = tree(0, lanes);
        for (uint32_t ranks = 1; ranks <= lanes; ranks++) {
            struct bl_lane_plan plan;
            assert_int_equal(bl_lanes_plan(&plan, lanes, ranks, NULL), 0);
            check_plan(&plan, lanes, ranks);
            assert_int_equal(sum_plan(&plan), want);
            bl_lanes_close(&plan);
        }
    }
}

/* Brute force: the fewest pieces with which bins of `cap` can be filled. */
static uint32_t bins[LANES_TESTED];

static int pack(const uint32_t *sizes, uint32_t count, uint32_t ranks, uint32_t cap)
{
    if (count == 0) {
        for (uint32_t r = 0; r < ranks; r++) {
            if (bins[r] == 0) {
                return 0;
            }
        }
        return 1;
    }
    for (uint32_t r = 0; r < ranks; r++) {
        if (bins[r] + sizes[0] <= cap) {
            int was_empty = bins[r] == 0;
            bins[r] += sizes[0];
            int good = pack(sizes + 1, count - 1, ranks, cap);
            bins[r] -= sizes[0];
            if (good || was_empty) { /* one empty bin stands for all of them */
                return good;
            }
        }
    }
    return 0;
}

/* Walks every way to cut the subtrees that are still `open` (a stack of sizes). */
static void cut(uint32_t *open, uint32_t open_count, uint32_t *sizes, uint32_t count,
                uint32_t ranks, uint32_t cap, uint32_t *best)
{
    if (count + open_count >= *best) {
        return;
    }
    if (open_count == 0) {
        if (pack(sizes, count, ranks, cap)) {
            *best = count;
        }
        return;
    }
    uint32_t n = open[open_count - 1];
    if (n <= cap) {
        sizes[count] = n;
        cut(open, open_count - 1, sizes, count + 1, ranks, cap, best);
    }
    if (n >= 2) {
        uint32_t left = bl_lanes_split(n);
        open[open_count - 1] = left;
        open[open_count] = n - left;
        cut(open, open_count + 1, sizes, count, ranks, cap, best);
        open[open_count - 1] = n;
    }
}

static void test_lanes_plan_has_the_fewest_pieces_possible(void **state)
{
    (void)state;
    for (uint32_t lanes = 1; lanes <= 16; lanes++) {
        for (uint32_t ranks = 1; ranks <= lanes; ranks++) {
            struct bl_lane_plan plan;
            assert_int_equal(bl_lanes_plan(&plan, lanes, ranks, NULL), 0);
            uint32_t open[64] = {lanes};
            uint32_t sizes[64];
            uint32_t best = lanes + 1;
            cut(open, 1, sizes, 0, ranks, (lanes + ranks - 1) / ranks, &best);
            if (plan.piece_count != best) {
                printf("V=%u P=%u: %u pieces, best %u\n", lanes, ranks, plan.piece_count, best);
            }
            assert_int_equal(plan.piece_count, best);
            bl_lanes_close(&plan);
        }
    }
}

static void test_lanes_plan_of_the_documented_cases(void **state)
{
    (void)state;
    struct bl_lane_plan plan;
    assert_int_equal(bl_lanes_plan(&plan, 7, 3, NULL), 0);
    assert_int_equal(plan.piece_count, 3);
    assert_int_equal(plan.pieces[2].lo, 4);
    assert_int_equal(plan.pieces[2].n, 3);
    assert_int_equal(plan.pieces[2].rank, 2);
    assert_int_equal(plan.merges[0].left, 0);
    assert_int_equal(plan.merges[0].right, 1);
    assert_int_equal(plan.merges[1].left, 0);
    assert_int_equal(plan.merges[1].right, 2);
    bl_lanes_close(&plan);
    const uint32_t pieces_of_12[] = {0, 1, 4, 3, 8};
    for (uint32_t ranks = 1; ranks <= 4; ranks++) {
        assert_int_equal(bl_lanes_plan(&plan, 12, ranks, NULL), 0);
        assert_int_equal(plan.piece_count, pieces_of_12[ranks]);
        bl_lanes_close(&plan);
    }
}

static void test_lanes_plan_stays_fast_and_good_when_large(void **state)
{
    (void)state;
    struct bl_lane_plan plan;
    assert_int_equal(bl_lanes_plan(&plan, BL_LANES_MAX, 16383, NULL), 0);
    check_plan(&plan, BL_LANES_MAX, 16383);
    assert_int_equal(sum_plan(&plan), tree(0, BL_LANES_MAX));
    bl_lanes_close(&plan);
}

static void test_lanes_plan_refuses_impossible_numbers(void **state)
{
    (void)state;
    struct bl_lane_plan plan;
    struct bl_errmsg msg = {{0}};
    assert_int_equal(bl_lanes_plan(&plan, 4, 5, &msg), BL_ELIMIT);
    assert_non_null(strstr(msg.text, "4 lanes cannot be planned on 5 ranks"));
    assert_int_equal(bl_lanes_plan(&plan, 0, 0, NULL), BL_ELIMIT);
    assert_int_equal(bl_lanes_plan(&plan, 4, 0, NULL), BL_ELIMIT);
    assert_int_equal(bl_lanes_plan(&plan, BL_LANES_MAX + 1, 1, NULL), BL_ELIMIT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lanes_add_up_as_one_tree_whatever_the_ranks),
        cmocka_unit_test(test_lanes_plan_has_the_fewest_pieces_possible),
        cmocka_unit_test(test_lanes_plan_of_the_documented_cases),
        cmocka_unit_test(test_lanes_plan_stays_fast_and_good_when_large),
        cmocka_unit_test(test_lanes_plan_refuses_impossible_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
