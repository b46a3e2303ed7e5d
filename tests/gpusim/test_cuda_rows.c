/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Row-wise operations for CUDA against the CPU's: embedding, positions, norms, biases, rotary
 * positions. Every shape is tried in both storage types, and with arrays that begin at an address
 * of 16 bytes and one element behind it. What adds in the CPU's order must give its bits.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

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
    .embedding_forward = kern_cuda_embedding_forward,
    .embedding_backward = kern_cuda_embedding_backward,
    .position_forward = kern_cuda_position_forward,
    .position_backward = kern_cuda_position_backward,
    .rmsnorm_forward = kern_cuda_rmsnorm_forward,
    .rmsnorm_backward = kern_cuda_rmsnorm_backward,
    .layernorm_forward = kern_cuda_layernorm_forward,
    .layernorm_backward = kern_cuda_layernorm_backward,
    .norm_scratch = kern_cuda_norm_scratch,
    .rope_forward = kern_cuda_rope_forward,
    .rope_backward = kern_cuda_rope_backward,
    .bias_forward = kern_cuda_bias_forward,
    .bias_backward = kern_cuda_bias_backward,
};

struct shape {
    uint32_t n, c, t_count, rows, heads, pos, lo, hi;
    int add, has_bias;
    uint32_t shift; /* elements that arrays of the storage type begin behind their memory */
    const int32_t *tokens;
};

/* Rows below and above a warp's, a chunk's (64) and two chunks'; columns below a pack, odd, of many
 * packs, above a warp's 32 packs. */
static const uint32_t SHAPES[][2] = {{1, 1},    {3, 7},   {5, 64},  {66, 33},
                                     {130, 24}, {2, 520}, {9, 271}, {1, 2056}};

/* ---- plumbing ---- */

static kern_real *real(const struct harness_run *r, uint32_t i)
{
    return kern_real_at(r->k, r->p[i], ((const struct shape *)r->arg)->shift);
}

typedef void check_fn(struct harness *h, const struct shape *s, enum kern_type type);

/* Calls check for all shapes, types, shifts and both values of `add`. */
static void for_shapes(check_fn *check)
{
    for (uint32_t type = KERN_F32; type <= KERN_BF16; type++) {
        struct harness *h = harness_open((enum kern_type)type, &OPS);
        for (uint32_t i = 0; i < sizeof SHAPES / sizeof SHAPES[0]; i++) {
            for (uint32_t turn = 0; turn < 2; turn++) {
                struct shape s = {.n = SHAPES[i][0],
                                  .c = SHAPES[i][1],
                                  .shift = turn,
                                  .add = turn == 0,
                                  .has_bias = turn == 0};
                check(h, &s, (enum kern_type)type);
            }
        }
        harness_close(h);
    }
}

/* Half a unit of rounding to the storage type, and a little. */
static double ulps_of(enum kern_type type)
{
    return type == KERN_BF16 ? 0.55 : 8;
}

/* Of a sum over n rows, which the two sides add in other orders. */
static double lost_in(uint32_t n)
{
    return 1e-5 + 1e-7 * n;
}

/* ---- norms ---- */

static void rmsnorm_forward(struct harness_run *r)
{
    const struct shape *s = r->arg;
    r->ops->rmsnorm_forward(r->k, real(r, 0), r->p[1], real(r, 2), real(r, 3), s->n, s->c, 1e-5f);
}

static void rmsnorm_backward(struct harness_run *r)
{
    const struct shape *s = r->arg;
    void *scratch = harness_scratch(r, r->ops->norm_scratch(r->k, s->n, s->c));
    r->ops->rmsnorm_backward(r->k, real(r, 0), r->p[1], real(r, 2), real(r, 3), real(r, 4), r->p[5],
                             scratch, s->n, s->c, s->add);
}

static void check_rmsnorm(struct harness *h, const struct shape *s, enum kern_type type)
{
    uint64_t all = (uint64_t)s->n * s->c + s->shift, row = s->c + s->shift;
    harness_check(
        h, &(struct harness_case){
               .name = "rmsnorm_forward",
               .call = rmsnorm_forward,
               .arg = s,
               .seed = s->c,
               .arrays = {{HARNESS_OUT, HARNESS_REAL, all, .ulps = ulps_of(type), .absolute = 1e-6},
                          {HARNESS_OUT, HARNESS_F32, s->n, .ulps = 8},
                          {HARNESS_IN, HARNESS_REAL, all, .stddev = 2},
                          {HARNESS_IN, HARNESS_REAL, row, .stddev = 0.2, .mean = 1}}});
    harness_check(h, &(struct harness_case){
                         .name = "rmsnorm_backward",
                         .call = rmsnorm_backward,
                         .arg = s,
                         .seed = s->c,
                         .arrays = {{HARNESS_INOUT, HARNESS_REAL, all, .stddev = 1,
                                     .ulps = ulps_of(type), .absolute = 2e-6},
                                    {HARNESS_INOUT, HARNESS_F32, s->c, .stddev = 1, .ulps = 4,
                                     .absolute = lost_in(s->n)},
                                    {HARNESS_IN, HARNESS_REAL, all, .stddev = 1},
                                    {HARNESS_IN, HARNESS_REAL, all, .stddev = 2},
                                    {HARNESS_IN, HARNESS_REAL, row, .stddev = 0.2, .mean = 1},
                                    {HARNESS_IN, HARNESS_F32, s->n, .stddev = 0.05, .mean = 0.5}}});
}

static void test_rmsnorm_is_the_cpus(void **state)
{
    (void)state;
    for_shapes(check_rmsnorm);
}

static void layernorm_forward(struct harness_run *r)
{
    const struct shape *s = r->arg;
    r->ops->layernorm_forward(r->k, real(r, 0), r->p[1], r->p[2], real(r, 3), real(r, 4),
                              s->has_bias ? real(r, 5) : NULL, s->n, s->c, 1e-5f);
}

static void layernorm_backward(struct harness_run *r)
{
    const struct shape *s = r->arg;
    void *scratch = harness_scratch(r, r->ops->norm_scratch(r->k, s->n, s->c));
    r->ops->layernorm_backward(r->k, real(r, 0), r->p[1], s->has_bias ? r->p[2] : NULL, real(r, 3),
                               real(r, 4), real(r, 5), r->p[6], r->p[7], scratch, s->n, s->c,
                               s->add);
}

static void check_layernorm(struct harness *h, const struct shape *s, enum kern_type type)
{
    uint64_t all = (uint64_t)s->n * s->c + s->shift, row = s->c + s->shift;
    harness_check(
        h, &(struct harness_case){
               .name = "layernorm_forward",
               .call = layernorm_forward,
               .arg = s,
               .seed = s->c,
               .arrays = {{HARNESS_OUT, HARNESS_REAL, all, .ulps = ulps_of(type), .absolute = 4e-6},
                          {HARNESS_OUT, HARNESS_F32, s->n, .ulps = 4, .absolute = 1e-6},
                          {HARNESS_OUT, HARNESS_F32, s->n, .ulps = 8},
                          {HARNESS_IN, HARNESS_REAL, all, .stddev = 2, .mean = 0.5},
                          {HARNESS_IN, HARNESS_REAL, row, .stddev = 0.2, .mean = 1},
                          {HARNESS_IN, HARNESS_REAL, row, .stddev = 0.5}}});
    harness_check(h, &(struct harness_case){
                         .name = "layernorm_backward",
                         .call = layernorm_backward,
                         .arg = s,
                         .seed = s->c,
                         .arrays = {{HARNESS_INOUT, HARNESS_REAL, all, .stddev = 1,
                                     .ulps = ulps_of(type), .absolute = 4e-6},
                                    {HARNESS_INOUT, HARNESS_F32, s->c, .stddev = 1, .ulps = 4,
                                     .absolute = lost_in(s->n)},
                                    {HARNESS_INOUT, HARNESS_F32, s->c, .stddev = 1, .ulps = 4,
                                     .absolute = lost_in(s->n)},
                                    {HARNESS_IN, HARNESS_REAL, all, .stddev = 1},
                                    {HARNESS_IN, HARNESS_REAL, all, .stddev = 2},
                                    {HARNESS_IN, HARNESS_REAL, row, .stddev = 0.2, .mean = 1},
                                    {HARNESS_IN, HARNESS_F32, s->n, .stddev = 0.3},
                                    {HARNESS_IN, HARNESS_F32, s->n, .stddev = 0.05, .mean = 0.5}}});
}

static void test_layernorm_is_the_cpus(void **state)
{
    (void)state;
    for_shapes(check_layernorm);
}

/* ---- biases ---- */

static void bias_forward(struct harness_run *r)
{
    const struct shape *s = r->arg;
    r->ops->bias_forward(r->k, real(r, 0), real(r, 1), s->n, s->c);
}

static void bias_backward(struct harness_run *r)
{
    const struct shape *s = r->arg;
    void *scratch = harness_scratch(r, r->ops->norm_scratch(r->k, s->n, s->c));
    r->ops->bias_backward(r->k, r->p[0], real(r, 1), scratch, s->n, s->c, s->add);
}

static void check_bias(struct harness *h, const struct shape *s, enum kern_type type)
{
    (void)type;
    uint64_t all = (uint64_t)s->n * s->c + s->shift;
    harness_check(h, &(struct harness_case){
                         .name = "bias_forward",
                         .call = bias_forward,
                         .arg = s,
                         .seed = s->c,
                         .arrays = {{HARNESS_INOUT, HARNESS_REAL, all, .stddev = 1},
                                    {HARNESS_IN, HARNESS_REAL, s->c + s->shift, .stddev = 1}}});
    harness_check(h,
                  &(struct harness_case){.name = "bias_backward",
                                         .call = bias_backward,
                                         .arg = s,
                                         .seed = s->c,
                                         .arrays = {{HARNESS_INOUT, HARNESS_F32, s->c, .stddev = 1,
                                                     .ulps = 4, .absolute = lost_in(s->n)},
                                                    {HARNESS_IN, HARNESS_REAL, all, .stddev = 1}}});
}

static void test_bias_is_the_cpus(void **state)
{
    (void)state;
    for_shapes(check_bias);
}

/* So many rows that each warp of the second pass has chunks to add. */
static void test_columns_of_many_chunks(void **state)
{
    (void)state;
    struct shape s = {.n = 8 * 64 + 30, .c = 3, .add = 1, .has_bias = 1};
    struct harness *h = harness_open(KERN_BF16, &OPS);
    check_bias(h, &s, KERN_BF16);
    check_layernorm(h, &s, KERN_BF16);
    harness_close(h);
}

/* ---- learned positions ---- */

static void position_forward(struct harness_run *r)
{
    const struct shape *s = r->arg;
    r->ops->position_forward(r->k, real(r, 0), real(r, 1), s->n, s->c, s->t_count, s->pos);
}

static void position_backward(struct harness_run *r)
{
    const struct shape *s = r->arg;
    r->ops->position_backward(r->k, r->p[0], real(r, 1), s->n, s->c, s->t_count, s->rows, s->add);
}

static void check_position(struct harness *h, const struct shape *at, enum kern_type type)
{
    (void)type;
    struct shape s = *at;
    s.t_count = s.n;
    s.n *= s.c < 100 && s.n < 10 ? 11 : 2; /* sequences */
    s.rows = s.t_count + 3;
    s.pos = s.add ? 0 : 2;
    uint64_t all = (uint64_t)s.n * s.c + s.shift, table = (uint64_t)s.rows * s.c;
    harness_check(h, &(struct harness_case){
                         .name = "position_forward",
                         .call = position_forward,
                         .arg = &s,
                         .seed = s.c,
                         .arrays = {{HARNESS_INOUT, HARNESS_REAL, all, .stddev = 1},
                                    {HARNESS_IN, HARNESS_REAL, table + s.shift, .stddev = 1}}});
    harness_check(
        h, &(struct harness_case){.name = "position_backward",
                                  .call = position_backward,
                                  .arg = &s,
                                  .seed = s.c,
                                  .arrays = {{HARNESS_INOUT, HARNESS_F32, table, .stddev = 1},
                                             {HARNESS_IN, HARNESS_REAL, all, .stddev = 1}}});
}

static void test_position_has_the_cpus_bits(void **state)
{
    (void)state;
    for_shapes(check_position);
}

/* ---- rotary positions ---- */

static void rope_forward(struct harness_run *r)
{
    const struct shape *s = r->arg;
    r->ops->rope_forward(r->k, real(r, 0), r->p[1], s->n, s->t_count, s->heads, s->c, s->pos);
}

static void rope_backward(struct harness_run *r)
{
    const struct shape *s = r->arg;
    r->ops->rope_backward(r->k, real(r, 0), r->p[1], s->n, s->t_count, s->heads, s->c);
}

static void test_rope_has_the_cpus_bits(void **state)
{
    (void)state;
    /* n, t_count, heads, head_dim, pos: halves of packs, of one pair, of an odd number of them. */
    static const uint32_t shapes[][5] = {
        {1, 1, 1, 2, 0}, {6, 3, 5, 16, 2}, {4, 4, 3, 64, 0}, {5, 5, 2, 10, 7}, {9, 3, 9, 128, 1}};
    for (uint32_t type = KERN_F32; type <= KERN_BF16; type++) {
        struct harness *h = harness_open((enum kern_type)type, &OPS);
        for (uint32_t i = 0; i < 2 * sizeof shapes / sizeof shapes[0]; i++) {
            const uint32_t *f = shapes[i / 2];
            struct shape s = {
                .n = f[0], .t_count = f[1], .heads = f[2], .c = f[3], .pos = f[4], .shift = i % 2};
            uint64_t all = (uint64_t)s.n * s.heads * s.c + s.shift;
            uint64_t table = (uint64_t)(s.pos + s.t_count) * s.c;
            struct harness_case both = {.name = "rope_forward",
                                        .call = rope_forward,
                                        .arg = &s,
                                        .seed = i,
                                        .arrays = {{HARNESS_INOUT, HARNESS_REAL, all, .stddev = 1},
                                                   {HARNESS_IN, HARNESS_F32, table, .stddev = 1}}};
            harness_check(h, &both);
            both.name = "rope_backward";
            both.call = rope_backward;
            harness_check(h, &both);
        }
        harness_close(h);
    }
}

/* ---- embedding ---- */

static void tokens_open(struct harness_run *r, struct kern_tokens *t)
{
    const struct shape *s = r->arg;
    t->memory = harness_scratch(r, r->ops->tokens_bytes(r->k, s->n));
    r->ops->tokens_set(r->k, t, s->tokens, s->n, s->lo, s->hi);
}

static void embedding_forward(struct harness_run *r)
{
    const struct shape *s = r->arg;
    struct kern_tokens t;
    tokens_open(r, &t);
    r->ops->embedding_forward(r->k, real(r, 0), &t, real(r, 1), s->c, s->lo, s->hi);
}

static void embedding_backward(struct harness_run *r)
{
    const struct shape *s = r->arg;
    struct kern_tokens t;
    tokens_open(r, &t);
    r->ops->embedding_backward(r->k, r->p[0], real(r, 1), &t, s->c, s->lo, s->hi, s->add);
}

static void check_embedding(struct harness *h, const struct shape *at, enum kern_type type)
{
    (void)type;
    struct shape s = *at;
    s.n = s.n * 3 + 5;
    int32_t *tokens = calloc(s.n, sizeof *tokens);
    assert_non_null(tokens);
    /* Rows that come once, often, never; rows of other ranks on both sides; slices of many rows,
     * so that sorting takes more than one digit. */
    s.lo = s.add ? 7 : 0;
    s.hi = s.lo + (s.c < 64 ? 700 : 12);
    for (uint32_t i = 0; i < s.n; i++) {
        uint64_t random = kern_rng_bits(s.c, i);
        tokens[i] = (int32_t)(random % 4 == 0   ? s.lo + 3
                              : random % 4 == 1 ? s.hi - 1
                                                : (random >> 8) % (s.hi + 9));
    }
    tokens[0] = (int32_t)s.hi;
    tokens[1] = (int32_t)(s.lo > 0 ? s.lo - 1 : 0);
    tokens[2] = (int32_t)s.lo;
    s.tokens = tokens;
    uint64_t all = (uint64_t)s.n * s.c + s.shift, table = (uint64_t)(s.hi - s.lo) * s.c;
    harness_check(h, &(struct harness_case){
                         .name = "embedding_forward",
                         .call = embedding_forward,
                         .arg = &s,
                         .seed = s.c,
                         .arrays = {{HARNESS_OUT, HARNESS_REAL, all},
                                    {HARNESS_IN, HARNESS_REAL, table + s.shift, .stddev = 1}}});
    harness_check(
        h, &(struct harness_case){.name = "embedding_backward",
                                  .call = embedding_backward,
                                  .arg = &s,
                                  .seed = s.c,
                                  .arrays = {{HARNESS_INOUT, HARNESS_F32, table, .stddev = 1},
                                             {HARNESS_IN, HARNESS_REAL, all, .stddev = 1}}});
    free(tokens);
}

static void test_embedding_has_the_cpus_bits(void **state)
{
    (void)state;
    for_shapes(check_embedding);
}

static void test_embedding_of_no_row_here_is_zero(void **state)
{
    (void)state;
    static const int32_t tokens[] = {40, 41, 50, 99};
    struct harness *h = harness_open(KERN_BF16, &OPS);
    struct shape s = {.n = 4, .c = 20, .lo = 10, .hi = 15, .tokens = tokens};
    harness_check(h,
                  &(struct harness_case){.name = "embedding_forward",
                                         .call = embedding_forward,
                                         .arg = &s,
                                         .arrays = {{HARNESS_OUT, HARNESS_REAL, 80},
                                                    {HARNESS_IN, HARNESS_REAL, 100, .stddev = 1}}});
    harness_check(h,
                  &(struct harness_case){.name = "embedding_backward",
                                         .call = embedding_backward,
                                         .arg = &s,
                                         .arrays = {{HARNESS_OUT, HARNESS_F32, 100},
                                                    {HARNESS_IN, HARNESS_REAL, 80, .stddev = 1}}});
    harness_close(h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rmsnorm_is_the_cpus),
        cmocka_unit_test(test_layernorm_is_the_cpus),
        cmocka_unit_test(test_bias_is_the_cpus),
        cmocka_unit_test(test_columns_of_many_chunks),
        cmocka_unit_test(test_position_has_the_cpus_bits),
        cmocka_unit_test(test_rope_has_the_cpus_bits),
        cmocka_unit_test(test_embedding_has_the_cpus_bits),
        cmocka_unit_test(test_embedding_of_no_row_here_is_zero),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
