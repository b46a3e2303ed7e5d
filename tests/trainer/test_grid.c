/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "trainer/grid.h"

static void test_ranks_and_coordinates_agree_in_every_grid(void **state)
{
    (void)state;
    for (uint32_t tp = 1; tp <= 4; tp++) {
        for (uint32_t pp = 1; pp <= 5; pp++) {
            for (uint32_t dp = 1; dp <= 3; dp++) {
                uint32_t rank = 0;
                for (uint32_t i = 0; i < tp * pp * dp; i++, rank++) {
                    struct train_grid g;
                    assert_int_equal(train_grid_make(&g, rank, tp * pp * dp, tp, pp, NULL), 0);
                    assert_int_equal(g.dp, dp);
                    assert_int_equal(g.t, rank % tp);
                    assert_int_equal(train_grid_at(&g, g.t, g.p, g.d), rank);
                    assert_int_equal((g.d * pp + g.p) * tp + g.t, rank);
                }
            }
        }
    }
}

static void test_groups_hold_the_rank_at_its_place_and_are_the_same_for_all_members(void **state)
{
    (void)state;
    static void (*const group_of[3])(const struct train_grid *, uint32_t *) = {
        train_grid_tp_group, train_grid_pp_group, train_grid_dp_group};
    const uint32_t world = 2 * 3 * 4;
    for (uint32_t rank = 0; rank < world; rank++) {
        struct train_grid g;
        assert_int_equal(train_grid_make(&g, rank, world, 2, 3, NULL), 0);
        const uint32_t size[3] = {g.tp, g.pp, g.dp}, place[3] = {g.t, g.p, g.d};
        for (int kind = 0; kind < 3; kind++) {
            uint32_t mine[4], theirs[4];
            group_of[kind](&g, mine);
            assert_int_equal(mine[place[kind]], rank);
            for (uint32_t i = 0; i < size[kind]; i++) {
                struct train_grid other;
                assert_true(i == 0 || mine[i] > mine[i - 1]);
                assert_int_equal(train_grid_make(&other, mine[i], world, 2, 3, NULL), 0);
                group_of[kind](&other, theirs);
                assert_memory_equal(mine, theirs, size[kind] * sizeof *mine);
            }
        }
    }
}

static void test_worlds_that_are_no_grid_are_refused_with_the_numbers(void **state)
{
    (void)state;
    struct train_grid g = {.rank = 77};
    struct bl_errmsg msg = {{0}};
    assert_int_equal(train_grid_make(&g, 0, 7, 2, 2, &msg), BL_ECONFIG);
    assert_string_equal(msg.text,
                        "7 ranks are no whole number of copies of the model on tp 2 x pp 2 ranks");
    assert_int_equal(train_grid_make(&g, 8, 8, 2, 2, &msg), BL_ECONFIG);
    assert_int_equal(train_grid_make(&g, 0, 0, 1, 1, &msg), BL_ECONFIG);
    assert_int_equal(train_grid_make(&g, 0, 4, 0, 1, &msg), BL_ECONFIG);
    assert_int_equal(train_grid_make(&g, 0, 1, 65536, 65536, &msg), BL_ECONFIG);
    assert_int_equal(g.rank, 77);
}

static void test_interleave_holds_where_every_chunk_gets_a_layer(void **state)
{
    (void)state;
    struct train_grid g;
    assert_int_equal(train_grid_make(&g, 0, 4, 1, 4, NULL), 0);
    assert_int_equal(train_grid_chunks(&g, 2, 8), 2);
    assert_int_equal(train_grid_chunks(&g, 2, 7), 1);
    assert_int_equal(train_grid_chunks(&g, 1, 100), 1);
    assert_int_equal(train_grid_make(&g, 0, 4, 1, 1, NULL), 0);
    assert_int_equal(train_grid_chunks(&g, 2, 8), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ranks_and_coordinates_agree_in_every_grid),
        cmocka_unit_test(test_groups_hold_the_rank_at_its_place_and_are_the_same_for_all_members),
        cmocka_unit_test(test_worlds_that_are_no_grid_are_refused_with_the_numbers),
        cmocka_unit_test(test_interleave_holds_where_every_chunk_gets_a_layer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
