/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The main promise of the trainer: the bits of a run do not depend on the number of ranks, of
 * threads, or on how ranks speak with each other.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <string.h>

#include "train_bench.h"

struct variant {
    uint32_t ranks, threads;
    int nodes;
};

/* `model` NULL: the bench's Llama. */
static void one_digest_of(const struct bl_job_model *model, uint32_t lanes, uint32_t tied,
                          const struct variant *variants, size_t count)
{
    struct train_bench bench;
    char first[BL_STATE_DIGEST_TEXT_BYTES] = "", digest[BL_STATE_DIGEST_TEXT_BYTES];
    static char first_losses[4096], losses[4096];
    train_bench_open(&bench, lanes, tied);
    if (model != NULL) {
        bench.job.model = *model;
    }
    for (size_t i = 0; i < count; i++) {
        const struct train_alone how = {.job = &bench.job,
                                        .ranks = variants[i].ranks,
                                        .threads = variants[i].threads,
                                        .nodes = variants[i].nodes,
                                        .digest = 1};
        train_bench_run(&how, digest, losses, sizeof losses);
        printf("lanes %u ranks %u threads %u nodes %d: %s\n", lanes, how.ranks, how.threads,
               how.nodes, digest);
        if (i == 0) {
            memcpy(first, digest, sizeof first);
            memcpy(first_losses, losses, sizeof first_losses);
        }
        assert_string_equal(digest, first);
        assert_string_equal(losses, first_losses);
    }
    train_bench_close(&bench);
}

static void one_digest(uint32_t lanes, uint32_t tied, const struct variant *variants, size_t count)
{
    one_digest_of(NULL, lanes, tied, variants, count);
}

static const struct variant to_four[] = {{1, 1, 0}, {2, 2, 0}, {3, 1, 2}, {4, 1, 0}, {4, 3, 4}};
static const struct variant to_seven[] = {{1, 3, 0}, {2, 1, 0}, {3, 1, 0}, {5, 1, 2}, {7, 1, 0}};

static void test_four_lanes_give_one_digest_for_all_ranks(void **state)
{
    (void)state;
    one_digest(4, 0, to_four, sizeof to_four / sizeof *to_four);
}

static void test_twelve_lanes_give_one_digest_for_all_ranks(void **state)
{
    (void)state;
    one_digest(12, 1, to_four, sizeof to_four / sizeof *to_four);
}

static void test_seven_lanes_give_one_digest_for_all_ranks(void **state)
{
    (void)state;
    one_digest(7, 1, to_seven, sizeof to_seven / sizeof *to_seven);
}

static void test_gpt2_gives_one_digest_for_all_ranks(void **state)
{
    (void)state;
    const struct bl_job_model gpt2 = {.arch = BL_ARCH_GPT2,
                                      .layers = 2,
                                      .dim = 36,
                                      .hidden = 144,
                                      .heads = 4,
                                      .kv_heads = 4,
                                      .vocab = 256,
                                      .tied = 1,
                                      .bias = 1,
                                      .context = 24,
                                      .rope_theta = 1,
                                      .norm_eps = 1e-5};
    one_digest_of(&gpt2, 12, 0, to_four, sizeof to_four / sizeof *to_four);
}

/* More lanes than go into one message of losses, some ranks with several pieces. */
static void test_many_lanes_give_one_digest_for_all_ranks(void **state)
{
    (void)state;
    static const struct variant variants[] = {{1, 1, 0}, {3, 1, 0}, {6, 1, 3}};
    one_digest(70, 0, variants, sizeof variants / sizeof *variants);
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
        cmocka_unit_test(test_another_seed_gives_another_digest),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
