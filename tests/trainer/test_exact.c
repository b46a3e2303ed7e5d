/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The main promise of the trainer: the bits of a run do not depend on the number of ranks, of
 * stages or of threads, on the ZeRO stage, on recomputation, or on how ranks speak with each other.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <string.h>

#include "exact_run.h"
#include "train_bench.h"

#define COUNT_OF(array) (sizeof(array) / sizeof *(array))

#define LAYOUT(dp_, threads_, nodes_, pp_, interleave_, zero_)                                     \
    {                                                                                              \
        .dp = dp_, .threads = threads_, .nodes = nodes_, .pp = pp_, .interleave = interleave_,     \
        .zero = zero_                                                                              \
    }
#define AGAIN(dp_, pp_, interleave_, recompute_)                                                   \
    {                                                                                              \
        .dp = dp_, .threads = 1, .pp = pp_, .interleave = interleave_, .zero = 1,                  \
        .recompute = recompute_                                                                    \
    }

static const struct exact_layout to_four[] = {LAYOUT(1, 1, 0, 1, 1, 1), LAYOUT(2, 2, 0, 1, 1, 1),
                                              LAYOUT(3, 1, 2, 1, 1, 1), LAYOUT(4, 1, 0, 1, 1, 1),
                                              LAYOUT(4, 3, 4, 1, 1, 1)};
static const struct exact_layout to_seven[] = {LAYOUT(1, 3, 0, 1, 1, 1), LAYOUT(2, 1, 0, 1, 1, 1),
                                               LAYOUT(3, 1, 0, 1, 1, 1), LAYOUT(5, 1, 2, 1, 1, 1),
                                               LAYOUT(7, 1, 0, 1, 1, 1)};

static void test_four_lanes_give_one_digest_for_all_ranks(void **state)
{
    (void)state;
    exact_compare(NULL, 4, 0, 2, to_four, COUNT_OF(to_four));
}

static void test_twelve_lanes_give_one_digest_for_all_ranks(void **state)
{
    (void)state;
    exact_compare(NULL, 12, 1, 2, to_four, COUNT_OF(to_four));
}

static void test_seven_lanes_give_one_digest_for_all_ranks(void **state)
{
    (void)state;
    exact_compare(NULL, 7, 1, 2, to_seven, COUNT_OF(to_seven));
}

static void test_gpt2_gives_one_digest_for_all_ranks(void **state)
{
    (void)state;
    exact_compare(exact_gpt2(), 12, 0, 2, to_four, COUNT_OF(to_four));
}

/* More lanes than go into one message of losses, some ranks with several pieces. */
static void test_many_lanes_give_one_digest_for_all_ranks(void **state)
{
    (void)state;
    static const struct exact_layout layouts[] = {
        LAYOUT(1, 1, 0, 1, 1, 1), LAYOUT(3, 1, 0, 1, 1, 1), LAYOUT(6, 1, 3, 1, 1, 1)};
    exact_compare(NULL, 70, 0, 2, layouts, COUNT_OF(layouts));
}

static void test_stages_and_zero_0_give_the_digest_of_one_rank(void **state)
{
    (void)state;
    static const struct exact_layout layouts[] = {
        LAYOUT(1, 1, 0, 1, 1, 1), LAYOUT(1, 1, 0, 2, 1, 1), LAYOUT(2, 1, 0, 2, 2, 0),
        LAYOUT(3, 1, 0, 1, 1, 0), LAYOUT(1, 2, 5, 5, 1, 1), LAYOUT(2, 1, 2, 3, 1, 1)};
    exact_compare(exact_llama(), 4, 0, 2, layouts, COUNT_OF(layouts));
    exact_compare(exact_gpt2(), 7, 0, 1, layouts, COUNT_OF(layouts));
}

/* Lanes of one micro-batch, dealt round-robin, and of two. */
static void test_zero_2_and_3_give_the_digest_of_one_rank(void **state)
{
    (void)state;
    static const struct exact_layout layouts[] = {
        LAYOUT(1, 1, 0, 1, 1, 1), LAYOUT(1, 1, 0, 1, 1, 3), LAYOUT(2, 1, 0, 1, 1, 2),
        LAYOUT(3, 2, 3, 1, 1, 3), LAYOUT(4, 1, 0, 1, 1, 2), LAYOUT(2, 1, 0, 2, 1, 3)};
    exact_compare(exact_gpt2(), 7, 0, 1, layouts, COUNT_OF(layouts));
    exact_compare(NULL, 5, 0, 1, layouts, COUNT_OF(layouts) - 1);
    exact_compare(exact_llama(), 5, 0, 2, layouts, COUNT_OF(layouts));
}

static void test_recomputation_changes_no_bit(void **state)
{
    (void)state;
    static const struct exact_layout layouts[] = {
        AGAIN(1, 1, 1, BL_RECOMPUTE_NONE), AGAIN(1, 1, 1, BL_RECOMPUTE_FULL),
        AGAIN(2, 2, 2, BL_RECOMPUTE_SELECTIVE), AGAIN(1, 2, 2, BL_RECOMPUTE_FULL)};
    exact_compare(exact_llama(), 4, 0, 2, layouts, COUNT_OF(layouts));
}

/* Of 16 rows of logits five at a time; stages have several sets, which share them. */
static void test_logits_in_chunks_give_one_digest_for_all_ranks(void **state)
{
    (void)state;
    static const struct exact_layout layouts[] = {
        {.dp = 1, .threads = 1, .pp = 1, .interleave = 1, .zero = 1, .head_chunk = 5},
        {.dp = 2, .threads = 2, .pp = 2, .interleave = 1, .zero = 1, .head_chunk = 5},
        {.dp = 3, .threads = 1, .pp = 1, .interleave = 1, .zero = 3, .head_chunk = 5}};
    exact_compare(exact_llama(), 4, 0, 2, layouts, COUNT_OF(layouts));
}

static void test_another_seed_gives_another_digest(void **state)
{
    (void)state;
    struct train_bench bench;
    char a[BL_STATE_DIGEST_TEXT_BYTES], b[BL_STATE_DIGEST_TEXT_BYTES];
    train_bench_open(&bench, 2, 0);
    const struct train_alone how = {.job = &bench.job, .ranks = 1, .steps = 1, .digest = 1};
    train_bench_run(&how, a, NULL, 0);
    bench.job.train.seed++;
    train_bench_run(&how, b, NULL, 0);
    assert_string_not_equal(a, b);
    train_bench_close(&bench);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_four_lanes_give_one_digest_for_all_ranks),
        cmocka_unit_test(test_twelve_lanes_give_one_digest_for_all_ranks),
        cmocka_unit_test(test_seven_lanes_give_one_digest_for_all_ranks),
        cmocka_unit_test(test_gpt2_gives_one_digest_for_all_ranks),
        cmocka_unit_test(test_many_lanes_give_one_digest_for_all_ranks),
        cmocka_unit_test(test_stages_and_zero_0_give_the_digest_of_one_rank),
        cmocka_unit_test(test_zero_2_and_3_give_the_digest_of_one_rank),
        cmocka_unit_test(test_recomputation_changes_no_bit),
        cmocka_unit_test(test_logits_in_chunks_give_one_digest_for_all_ranks),
        cmocka_unit_test(test_another_seed_gives_another_digest),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
