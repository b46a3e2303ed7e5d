/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Cross-entropy for CUDA against the CPU's: at once, and in the phases of ranks that have a slice
 * of the vocabulary; sums of losses and what ranks gathered, which must have the CPU's bits.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>

#include "kernels/cuda/device.h"
#include "kernels/cuda/ops.h"
#include "tests/gpusim/harness.h"

static void close_gpu(struct kern *k)
{
    kern_cuda_staging_close(kern_cuda_of(k));
}

static const struct kern_ops OPS = {
    .close = close_gpu,
    .tokens_bytes = kern_cuda_tokens_bytes,
    .tokens_set = kern_cuda_tokens_set,
    .cross_entropy = kern_cuda_cross_entropy,
    .cross_entropy_top = kern_cuda_cross_entropy_top,
    .cross_entropy_sum = kern_cuda_cross_entropy_sum,
    .cross_entropy_finish = kern_cuda_cross_entropy_finish,
    .loss_total = kern_cuda_loss_total,
    .tops_merge = kern_cuda_tops_merge,
    .sums_merge = kern_cuda_sums_merge,
};

enum { TOKENS_MAX = 16 };

struct shape {
    uint32_t first, n, vocab;
    uint32_t lo, columns; /* of a rank */
    int backward, add;
    uint32_t shift;
    int32_t targets[TOKENS_MAX];
};

/* Columns below a pack, below a warp's, odd, above a block's 512 packs. */
static const uint32_t SHAPES[][3] = {{0, 1, 1},    {2, 3, 5},    {1, 8, 256},
                                     {0, 1, 1031}, {3, 2, 5000}, {0, 1, 4608}};

static kern_real *real(const struct harness_run *r, uint32_t i)
{
    return kern_real_at(r->k, r->p[i], ((const struct shape *)r->arg)->shift);
}

/* Every fourth target does not count. */
static struct shape shape_of(uint32_t i, uint32_t turn)
{
    struct shape s = {.first = SHAPES[i][0],
                      .n = SHAPES[i][1],
                      .vocab = SHAPES[i][2],
                      .columns = SHAPES[i][2],
                      .backward = turn < 2,
                      .add = turn == 1,
                      .shift = turn % 2};
    for (uint32_t t = 0; t < s.first + s.n; t++) {
        uint64_t random = kern_rng_bits(i, t);
        s.targets[t] = t % 4 == 3 ? -1 : (int32_t)(random % s.vocab);
    }
    return s;
}

static void tokens_open(struct harness_run *r, struct kern_tokens *t)
{
    const struct shape *s = r->arg;
    t->memory = harness_scratch(r, r->ops->tokens_bytes(r->k, s->first + s->n));
    r->ops->tokens_set(r->k, t, s->targets, s->first + s->n, 0, 0);
}

static void whole(struct harness_run *r)
{
    const struct shape *s = r->arg;
    struct kern_tokens t;
    tokens_open(r, &t);
    r->ops->cross_entropy(r->k, real(r, 0), r->p[1], &t, s->first, s->n, s->vocab, s->backward);
}

/* What the gradient, which is at most 1, and the loss may differ by. */
static struct harness_case whole_case(const struct shape *s, enum kern_type type)
{
    uint64_t all = (uint64_t)s->n * s->vocab + s->shift;
    return (struct harness_case){
        .name = "cross_entropy",
        .call = whole,
        .arg = s,
        .seed = s->vocab,
        .arrays = {{HARNESS_INOUT, HARNESS_REAL, all, .stddev = 3,
                    .ulps = type == KERN_BF16 ? 0.52 : 0, .relative = 2e-6, .absolute = 1e-7},
                   {HARNESS_OUT, HARNESS_F64, s->n, .absolute = 1e-6}}};
}

typedef void check_fn(struct harness *h, const struct shape *s, enum kern_type type);

static void for_shapes(check_fn *check)
{
    for (uint32_t type = KERN_F32; type <= KERN_BF16; type++) {
        struct harness *h = harness_open((enum kern_type)type, &OPS);
        /* Turns: gradients from whole and from odd addresses; losses alone. */
        for (uint32_t i = 0; i < sizeof SHAPES / sizeof SHAPES[0]; i++) {
            struct shape s = shape_of(i, (i + type) % 3);
            check(h, &s, (enum kern_type)type);
            s = shape_of(i, (i + type + 1) % 3);
            check(h, &s, (enum kern_type)type);
        }
        harness_close(h);
    }
}

static void check_whole(struct harness *h, const struct shape *s, enum kern_type type)
{
    struct harness_case c = whole_case(s, type);
    harness_check(h, &c);
}

static void test_cross_entropy_is_the_cpus(void **state)
{
    (void)state;
    for_shapes(check_whole);
}

/* Logits far apart, in rising order: each pack scales what a thread has. An infinity below all is
 * a column that is masked. */
static void test_cross_entropy_of_far_logits(void **state)
{
    (void)state;
    enum { ROWS = 2, VOCAB = 9000 };
    static float logits[ROWS * VOCAB];
    struct shape s = {.n = ROWS, .vocab = VOCAB, .backward = 1, .targets = {8999, 17}};
    for (uint32_t i = 0; i < VOCAB; i++) {
        logits[i] = (float)(i / 16) * 0.5f - 100.0f;
        logits[VOCAB + i] = i == 17 ? 2000.0f : i % 3 == 0 ? -INFINITY : -2000.0f;
    }
    for (uint32_t type = KERN_F32; type <= KERN_BF16; type++) {
        struct harness *h = harness_open((enum kern_type)type, &OPS);
        struct harness_case c = whole_case(&s, (enum kern_type)type);
        c.arrays[0].from = logits;
        harness_check(h, &c);
        harness_close(h);
    }
}

static void test_a_nan_among_logits_reaches_the_gradient(void **state)
{
    (void)state;
    enum { VOCAB = 9000 };
    static float logits[VOCAB];
    struct harness *h = harness_open(KERN_BF16, &OPS);
    struct shape s = {.n = 1, .vocab = VOCAB, .backward = 1, .targets = {1}};
    for (uint32_t at = 0; at < VOCAB; at += 4111) {
        for (uint32_t i = 0; i < VOCAB; i++) {
            logits[i] = i == at ? NAN : 1.0f;
        }
        struct harness_case c = whole_case(&s, KERN_BF16);
        c.arrays[0].from = logits;
        /* The CPU's loss of it is a number: a logarithm of what is none. */
        c.arrays[1] = (struct harness_array){.role = HARNESS_SCRATCH, .count = sizeof(double)};
        harness_check(h, &c);
    }
    harness_close(h);
}

/* ---- phases, over two or three ranks, of which one has no columns when there are few ---- */

/* One call plays all ranks: arrays are the logits of rank 0, 1, 2, one behind the other; the
 * losses; the sums as ranks merge them. */
static void phases(struct harness_run *r)
{
    const struct shape *s = r->arg;
    enum { RANKS = 3 };
    struct kern_tokens t;
    tokens_open(r, &t);
    uint32_t cut[RANKS + 1] = {0, s->vocab / 3, s->vocab / 3 + s->vocab / 2, s->vocab};
    float *tops = harness_scratch(r, (RANKS + 1) * (uint64_t)s->n * sizeof(float));
    double *sums = harness_scratch(r, (RANKS + 1) * 2 * (uint64_t)s->n * sizeof(double));
    float *top = tops + RANKS * s->n;
    double *sum = sums + RANKS * 2 * s->n;
    for (uint32_t i = 0; i < RANKS; i++) {
        r->ops->cross_entropy_top(r->k, tops + i * s->n,
                                  kern_real_at(r->k, real(r, 0), (uint64_t)s->n * cut[i]), &t,
                                  s->first, s->n, cut[i + 1] - cut[i]);
    }
    r->ops->tops_merge(r->k, top, tops, RANKS, s->n);
    for (uint32_t i = 0; i < RANKS; i++) {
        r->ops->cross_entropy_sum(r->k, sums + i * 2 * s->n,
                                  kern_real_at(r->k, real(r, 0), (uint64_t)s->n * cut[i]), top, &t,
                                  s->first, s->n, cut[i], cut[i + 1] - cut[i], s->backward);
    }
    r->ops->sums_merge(r->k, sum, sums, RANKS, 2 * s->n);
    for (uint32_t i = 0; i < RANKS; i++) {
        r->ops->cross_entropy_finish(r->k, kern_real_at(r->k, real(r, 0), (uint64_t)s->n * cut[i]),
                                     r->p[1], top, sum, &t, s->first, s->n, cut[i],
                                     cut[i + 1] - cut[i], s->backward);
    }
}

static void check_phases(struct harness *h, const struct shape *s, enum kern_type type)
{
    struct harness_case c = whole_case(s, type);
    c.name = "cross_entropy in phases";
    c.call = phases;
    harness_check(h, &c);
}

static void test_phases_are_the_cpus(void **state)
{
    (void)state;
    for_shapes(check_phases);
}

/* ---- sums ---- */

static void loss_total(struct harness_run *r)
{
    const struct shape *s = r->arg;
    r->ops->loss_total(r->k, r->p[0], r->p[1], s->n, s->add);
}

static void merge(struct harness_run *r)
{
    const struct shape *s = r->arg;
    r->ops->tops_merge(r->k, r->p[0], r->p[1], s->first, s->n);
    r->ops->sums_merge(r->k, r->p[2], r->p[3], s->first, s->n);
}

static void test_sums_have_the_cpus_bits(void **state)
{
    (void)state;
    static const uint32_t counts[] = {0, 1, 255, 2048, 2049, 5000};
    struct harness *h = harness_open(KERN_BF16, &OPS);
    for (uint32_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        struct shape s = {.n = counts[i], .add = i % 2, .first = 1 + i % 4};
        harness_check(
            h, &(struct harness_case){
                   .name = "loss_total",
                   .call = loss_total,
                   .arg = &s,
                   .seed = i,
                   .arrays = {{s.add ? HARNESS_INOUT : HARNESS_OUT, HARNESS_F64, 1, .mean = 1},
                              {HARNESS_IN, HARNESS_F64, s.n, .stddev = 2, .mean = 5}}});
        uint64_t parts = (uint64_t)s.first * s.n;
        harness_check(
            h, &(struct harness_case){.name = "merge",
                                      .call = merge,
                                      .arg = &s,
                                      .seed = i,
                                      .arrays = {{HARNESS_OUT, HARNESS_F32, s.n},
                                                 {HARNESS_IN, HARNESS_F32, parts, .stddev = 1},
                                                 {HARNESS_OUT, HARNESS_F64, s.n},
                                                 {HARNESS_IN, HARNESS_F64, parts, .stddev = 1}}});
    }
    harness_close(h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cross_entropy_is_the_cpus),
        cmocka_unit_test(test_cross_entropy_of_far_logits),
        cmocka_unit_test(test_a_nan_among_logits_reaches_the_gradient),
        cmocka_unit_test(test_phases_are_the_cpus),
        cmocka_unit_test(test_sums_have_the_cpus_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
