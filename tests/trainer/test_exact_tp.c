/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs of two, three and four tensor parallel ranks: one digest each, whatever the other axes are.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "exact_run.h"

#define COUNT_OF(array) (sizeof(array) / sizeof *(array))

#define LAYOUT(tp_, sequence_, dp_, pp_, interleave_, zero_, nodes_, threads_)                     \
    {                                                                                              \
        .tp = tp_, .sequence = sequence_, .dp = dp_, .pp = pp_, .interleave = interleave_,         \
        .zero = zero_, .nodes = nodes_, .threads = threads_                                        \
    }

static const struct exact_layout two[] = {
    LAYOUT(2, 0, 1, 1, 1, 1, 0, 1), LAYOUT(2, 0, 2, 1, 1, 0, 2, 1), LAYOUT(2, 0, 3, 1, 1, 1, 0, 2),
    LAYOUT(2, 0, 1, 2, 1, 1, 4, 1), LAYOUT(2, 0, 2, 2, 2, 1, 0, 1), LAYOUT(2, 0, 1, 3, 1, 0, 0, 1),
};
static const struct exact_layout two_in_rounds[] = {
    LAYOUT(2, 0, 1, 1, 1, 1, 0, 1),
    LAYOUT(2, 0, 2, 1, 1, 2, 0, 1),
    LAYOUT(2, 0, 2, 1, 1, 3, 2, 1),
    LAYOUT(2, 0, 1, 2, 1, 3, 0, 1),
};
static const struct exact_layout four_sharing[] = {
    LAYOUT(4, 1, 1, 1, 1, 1, 0, 1),
    LAYOUT(4, 1, 2, 1, 1, 1, 0, 1),
    LAYOUT(4, 1, 1, 2, 1, 1, 2, 1),
    LAYOUT(4, 1, 2, 1, 1, 3, 0, 1),
};
static const struct exact_layout three[] = {
    LAYOUT(3, 0, 1, 1, 1, 1, 0, 1),
    LAYOUT(3, 0, 2, 1, 1, 0, 0, 1),
    LAYOUT(3, 0, 1, 2, 1, 1, 0, 2),
};

static void test_two_slices_give_one_digest_over_dp_pp_and_zero(void **state)
{
    (void)state;
    exact_compare(exact_llama(), 4, 0, 2, two, COUNT_OF(two));
    exact_compare(exact_gpt2(), 3, 0, 1, two_in_rounds, COUNT_OF(two_in_rounds));
}

/* Two kv heads for four ranks, and the stream cut by rows. */
static void test_four_sequence_parallel_ranks_that_share_heads_give_one_digest(void **state)
{
    (void)state;
    exact_compare(exact_llama(), 2, 0, 1, four_sharing, COUNT_OF(four_sharing));
}

/* Four heads over three ranks. */
static void test_three_uneven_slices_give_one_digest(void **state)
{
    (void)state;
    exact_compare(exact_gpt2(), 2, 0, 2, three, COUNT_OF(three));
}

/* Seven rows of logits at a time, each chunk exchanged. */
static void test_slices_with_logits_in_chunks_give_one_digest(void **state)
{
    (void)state;
    static const struct exact_layout layouts[] = {
        {.tp = 2, .dp = 1, .threads = 1, .pp = 1, .interleave = 1, .zero = 1, .head_chunk = 7},
        {.tp = 2, .dp = 2, .threads = 1, .pp = 2, .interleave = 1, .zero = 1, .head_chunk = 7}};
    exact_compare(exact_llama(), 2, 0, 2, layouts, COUNT_OF(layouts));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_two_slices_give_one_digest_over_dp_pp_and_zero),
        cmocka_unit_test(test_four_sequence_parallel_ranks_that_share_heads_give_one_digest),
        cmocka_unit_test(test_three_uneven_slices_give_one_digest),
        cmocka_unit_test(test_slices_with_logits_in_chunks_give_one_digest),
    };
    return cmocka_run_group_tests_name("trainer/exact_tp", tests, NULL, NULL);
}
