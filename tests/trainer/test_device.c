/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Training on a device has the digests of the CPU, whose arithmetic the device that is none has: in
 * every layout, in memory that the host may not touch, within the arena that the dry run says. And
 * the CUDA back end over gpusim has one digest in every layout.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "train_bench.h"

struct layout {
    const char *name;
    uint32_t ranks, tp, pp, zero, interleave, sequence, tied, recompute, micros;
};

static void bench_open(struct train_bench *b, const struct layout *l)
{
    train_bench_open(b, 4, l->tied);
    struct bl_job *job = &b->job;
    job->ranks = l->ranks;
    job->tp = l->tp != 0 ? l->tp : 1;
    job->pp = l->pp != 0 ? l->pp : 1;
    job->zero = l->zero;
    job->interleave = l->interleave != 0 ? l->interleave : 1;
    job->sequence = l->sequence;
    job->train.recompute = l->recompute;
    job->train.global_batch = 4 * l->micros;
}

static void compare(const struct layout *l)
{
    struct train_bench b;
    char digests[2][BL_STATE_DIGEST_TEXT_BYTES], losses[2][1024];
    bench_open(&b, l);
    b.job.model.layers = l->interleave > 1 ? 4 : 2;
    b.job.train.steps = 2;
    b.job.train.precision = BL_PRECISION_FP32;
    for (int on_device = 0; on_device <= 1; on_device++) {
        const struct train_alone how = {.job = &b.job, .ranks = l->ranks, .digest = 1};
        snprintf(b.job.backend, sizeof b.job.backend, "%s", on_device ? "cuda" : "cpu");
        train_bench_run(&how, digests[on_device], losses[on_device], sizeof losses[on_device]);
    }
    printf("%-24s %s\n", l->name, digests[1]);
    assert_string_equal(digests[0], digests[1]);
    assert_string_equal(losses[0], losses[1]);
    train_bench_close(&b);
}

static void test_every_layout_has_the_bits_of_the_cpu(void **state)
{
    (void)state;
    static const struct layout layouts[] = {
        {.name = "one rank", .ranks = 1, .zero = 1, .micros = 2},
        {.name = "three replicas", .ranks = 3, .zero = 1, .micros = 2},
        {.name = "ZeRO 0", .ranks = 2, .zero = 0, .micros = 1},
        {.name = "ZeRO 2", .ranks = 3, .zero = 2, .micros = 1, .tied = 1},
        {.name = "ZeRO 3", .ranks = 3, .zero = 3, .micros = 1},
        {.name = "ZeRO 3, two micro-batches", .ranks = 2, .zero = 3, .micros = 2},
        {.name = "two stages, tied", .ranks = 4, .pp = 2, .zero = 1, .micros = 2, .tied = 1},
        {.name = "interleaved", .ranks = 2, .pp = 2, .interleave = 2, .zero = 1, .micros = 2},
        {.name = "two slices", .ranks = 4, .tp = 2, .zero = 1, .micros = 1},
        {.name = "two slices by rows", .ranks = 2, .tp = 2, .sequence = 1, .micros = 1},
        {.name = "slices and stages", .ranks = 4, .tp = 2, .pp = 2, .zero = 1, .micros = 1},
        {.name = "recomputed", .ranks = 2, .zero = 1, .micros = 2, .recompute = 2},
    };
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        compare(&layouts[i]);
    }
}

/* The first is what the others must end in. */
static void compare_on_gpusim(const struct layout *layouts, size_t count)
{
    char first[BL_STATE_DIGEST_TEXT_BYTES], digest[BL_STATE_DIGEST_TEXT_BYTES];
    for (size_t i = 0; i < count; i++) {
        struct train_bench b;
        bench_open(&b, &layouts[i]);
        b.job.train.steps = 2;
        b.job.train.eval_every = 0;
        snprintf(b.job.backend, sizeof b.job.backend, "cuda");
        const struct train_alone how = {.job = &b.job, .ranks = b.job.ranks, .digest = 1};
        train_bench_run(&how, digest, NULL, 0);
        printf("%-24s %s\n", layouts[i].name, digest);
        if (i == 0) {
            memcpy(first, digest, sizeof first);
        }
        assert_string_equal(digest, first);
        train_bench_close(&b);
    }
}

static void test_cuda_over_gpusim_has_one_digest_in_every_layout(void **state)
{
    (void)state;
    static const struct layout whole[] = {
        {.name = "bf16, one rank", .ranks = 1, .zero = 1, .micros = 1},
        {.name = "bf16, four replicas", .ranks = 4, .zero = 1, .micros = 1},
        {.name = "bf16, ZeRO 0", .ranks = 2, .zero = 0, .micros = 1},
        {.name = "bf16, ZeRO 2", .ranks = 3, .zero = 2, .micros = 1},
        {.name = "bf16, ZeRO 3", .ranks = 3, .zero = 3, .micros = 1},
        {.name = "bf16, two stages", .ranks = 2, .pp = 2, .zero = 1, .micros = 1},
        {.name = "bf16, recomputed", .ranks = 1, .zero = 1, .micros = 1, .recompute = 2},
    };
    static const struct layout slices[] = {
        {.name = "bf16, two slices", .ranks = 2, .tp = 2, .zero = 1, .micros = 1},
        {.name = "bf16, twice two slices", .ranks = 4, .tp = 2, .zero = 1, .micros = 1},
    };
    const char *sim = getenv("BELAY_CUDA_SIM"), *fake = getenv("BELAY_CUDA_PLUGIN");
    if (sim == NULL || access(sim, R_OK) != 0) {
        skip();
    }
    char plugin[512];
    snprintf(plugin, sizeof plugin, "%s", fake);
    setenv("BELAY_CUDA_PLUGIN", sim, 1);
    setenv("BELAY_CUDA_ENGINE", "staged", 1);
    setenv("BELAY_CUDA_SHARED", "1", 1); /* all ranks on the one device that there is */
    compare_on_gpusim(whole, sizeof whole / sizeof *whole);
    compare_on_gpusim(slices, sizeof slices / sizeof *slices);
    setenv("BELAY_CUDA_PLUGIN", plugin, 1);
    unsetenv("BELAY_CUDA_ENGINE");
    unsetenv("BELAY_CUDA_SHARED");
}

static void test_a_device_without_bf16_is_refused_by_name(void **state)
{
    (void)state;
    struct train_bench b;
    char text[1024];
    train_bench_open(&b, 2, 0);
    snprintf(b.job.backend, sizeof b.job.backend, "cuda");
    const struct train_alone how = {.job = &b.job, .ranks = 1};
    assert_int_equal(train_bench_fails(&how, text, sizeof text), 2);
    assert_non_null(strstr(text, "train.precision fp32"));
    train_bench_close(&b);
}

int main(void)
{
    char plugin[512];
    const char *build = getenv("BELAY_BUILD");
    snprintf(plugin, sizeof plugin, "%s/tests/trainer/libfake_device.so", build ? build : ".");
    setenv("BELAY_CUDA_PLUGIN", plugin, 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_layout_has_the_bits_of_the_cpu),
        cmocka_unit_test(test_cuda_over_gpusim_has_one_digest_in_every_layout),
        cmocka_unit_test(test_a_device_without_bf16_is_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
