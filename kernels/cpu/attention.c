/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Causal attention with grouped queries, in blocks of QUERIES rows:
 *
 *     S[bq, keys] = Q K^T (BLAS)   P = softmax(S / sqrt(D)) up to the diagonal, 0 beyond
 *     O[bq, D] = P V (BLAS)
 *
 * A block reads the keys up to its own last row only. Forward tasks are (batch, head, block);
 * backward tasks are (batch, kv head), whose loop over the group's heads and their blocks fixes the
 * order in which dK and dV add up.
 */
#include "kernels/kern.h"

#include <cblas.h>
#include <string.h>

#include "kernels/cpu/split.h"
#include "kernels/fmath.h"

#define QUERIES 64U

struct attention_job {
    const struct kern_attention_shape *shape;
    float *out, *stats_out, *dq, *dk, *dv;
    const float *dout, *out_in, *stats, *q, *k, *v;
    float *scratch;      /* of all workers */
    size_t scratch_each; /* floats */
    float scale;
};

/* Where one block of one head lies. */
struct block {
    uint32_t batch, head, kv_head;
    uint32_t first, rows; /* queries [first, first + rows) */
    uint32_t keys;        /* keys that its last row sees */
};

static size_t scratch_each(const struct kern_attention_shape *shape)
{
    return 2 * (size_t)QUERIES * (((size_t)shape->kv_len + 7) & ~(size_t)7);
}

size_t kern_attention_scratch(const struct kern_attention_shape *shape, uint32_t threads)
{
    return scratch_each(shape) * threads;
}

static uint32_t block_count(const struct kern_attention_shape *shape)
{
    return (shape->q_len + QUERIES - 1) / QUERIES;
}

static struct block block_make(const struct kern_attention_shape *shape, uint32_t batch,
                               uint32_t head, uint32_t index)
{
    struct block block = {.batch = batch, .head = head, .first = index * QUERIES};
    block.kv_head = head / (shape->heads / shape->kv_heads);
    uint32_t rest = shape->q_len - block.first;
    block.rows = rest < QUERIES ? rest : QUERIES;
    block.keys = shape->kv_len - shape->q_len + block.first + block.rows;
    return block;
}

/* Offsets of a block's first row in q-like, k-like and stats arrays. */
static size_t q_at(const struct kern_attention_shape *s, const struct block *b)
{
    return (((size_t)b->batch * s->q_len + b->first) * s->heads + b->head) * s->head_dim;
}

static size_t k_at(const struct kern_attention_shape *s, const struct block *b)
{
    return ((size_t)b->batch * s->kv_len * s->kv_heads + b->kv_head) * s->head_dim;
}

static size_t stats_at(const struct kern_attention_shape *s, const struct block *b)
{
    return (((size_t)b->batch * s->heads + b->head) * s->q_len + b->first) * 2;
}

/* c[m,n] = alpha a b + beta c, row-major */
static void gemm(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, size_t m, size_t n, size_t k,
                 const float *a, size_t lda, const float *b, size_t ldb, float beta, float *c,
                 size_t ldc)
{
    cblas_sgemm(CblasRowMajor, ta, tb, (int)m, (int)n, (int)k, 1.0f, a, (int)lda, b, (int)ldb, beta,
                c, (int)ldc);
}

/* x[i] = exp(x[i] * scale - top) for i < count, zeros up to `width`; returns the lanes' sum. */
static float exp_row(float *x, size_t count, size_t width, float scale, float top)
{
    kern_v8f sum = kern_v8f_all(0.0f), vscale = kern_v8f_all(scale), vtop = kern_v8f_all(top);
    size_t i = 0;
    for (; i + KERN_LANES <= count; i += KERN_LANES) {
        kern_v8f e = kern_v8f_exp(kern_v8f_load(x + i) * vscale - vtop);
        kern_v8f_store(x + i, e);
        sum += e;
    }
    if (i < count) {
        kern_v8f e = kern_v8f_exp(kern_v8f_load_part(x + i, count - i, 0.0f) * vscale - vtop);
        for (size_t j = 0; i + j < count; j++) {
            x[i + j] = e[j];
            sum[j] += e[j];
        }
    }
    memset(x + count, 0, (width - count) * sizeof *x);
    return kern_v8f_sum(sum);
}

/* The largest of x[i] * scale. */
static float top_of_row(const float *x, size_t count, float scale)
{
    kern_v8f top = kern_v8f_all(x[0]);
    size_t i = 0;
    for (; i + KERN_LANES <= count; i += KERN_LANES) {
        top = kern_v8f_max(kern_v8f_load(x + i), top);
    }
    if (i < count) {
        top = kern_v8f_max(kern_v8f_load_part(x + i, count - i, x[0]), top);
    }
    return kern_v8f_top(top) * scale;
}

static void scale_row(float *x, size_t count, float factor)
{
    for (size_t i = 0; i < count; i++) {
        x[i] *= factor;
    }
}

static void scores(const struct attention_job *job, const struct block *b, float *s)
{
    const struct kern_attention_shape *shape = job->shape;
    gemm(CblasNoTrans, CblasTrans, b->rows, b->keys, shape->head_dim, job->q + q_at(shape, b),
         (size_t)shape->heads * shape->head_dim, job->k + k_at(shape, b),
         (size_t)shape->kv_heads * shape->head_dim, 0.0f, s, b->keys);
}

static void forward_task(void *arg, uint32_t task, uint32_t worker)
{
    const struct attention_job *job = arg;
    const struct kern_attention_shape *shape = job->shape;
    uint32_t blocks = block_count(shape);
    uint32_t head = task / blocks % shape->heads, batch = task / blocks / shape->heads;
    struct block b = block_make(shape, batch, head, task % blocks);
    float *s = job->scratch + job->scratch_each * worker;
    float *stats = job->stats_out + stats_at(shape, &b);
    scores(job, &b, s);
    for (uint32_t row = 0; row < b.rows; row++) {
        float *p = s + (size_t)row * b.keys;
        size_t seen = b.keys - b.rows + row + 1;
        float top = top_of_row(p, seen, job->scale);
        float inverse = 1.0f / exp_row(p, seen, b.keys, job->scale, top);
        scale_row(p, seen, inverse);
        stats[2 * row] = top;
        stats[2 * row + 1] = inverse;
    }
    gemm(CblasNoTrans, CblasNoTrans, b.rows, shape->head_dim, b.keys, s, b.keys,
         job->v + k_at(shape, &b), (size_t)shape->kv_heads * shape->head_dim, 0.0f,
         job->out + q_at(shape, &b), (size_t)shape->heads * shape->head_dim);
}

void kern_attention_forward(struct kern_pool *pool, float *out, float *stats, const float *q,
                            const float *k, const float *v, float *scratch,
                            const struct kern_attention_shape *shape)
{
    struct attention_job job = {.shape = shape,
                                .out = out,
                                .stats_out = stats,
                                .q = q,
                                .k = k,
                                .v = v,
                                .scratch = scratch,
                                .scratch_each = scratch_each(shape),
                                .scale = 1.0f / __builtin_sqrtf((float)shape->head_dim)};
    kern_pool_run(pool, forward_task, &job, shape->batch * shape->heads * block_count(shape));
}

/* sum a b over one head's D channels */
static float dot(const float *a, const float *b, size_t count)
{
    kern_v8f sum = kern_v8f_all(0.0f);
    size_t i = 0;
    for (; i + KERN_LANES <= count; i += KERN_LANES) {
        sum += kern_v8f_load(a + i) * kern_v8f_load(b + i);
    }
    if (i < count) {
        sum +=
            kern_v8f_load_part(a + i, count - i, 0.0f) * kern_v8f_load_part(b + i, count - i, 0.0f);
    }
    return kern_v8f_sum(sum);
}

/* ds = p (dp - delta) scale, into dp */
static void softmax_row_backward(float *dp, const float *p, size_t count, float delta, float scale)
{
    for (size_t i = 0; i < count; i++) {
        dp[i] = (p[i] * (dp[i] - delta)) * scale;
    }
}

static void backward_block(const struct attention_job *job, const struct block *b, float *p,
                           float *dp)
{
    const struct kern_attention_shape *shape = job->shape;
    size_t q_row = (size_t)shape->heads * shape->head_dim;
    size_t k_row = (size_t)shape->kv_heads * shape->head_dim, d = shape->head_dim;
    const float *dout = job->dout + q_at(shape, b), *out = job->out_in + q_at(shape, b);
    const float *stats = job->stats + stats_at(shape, b);
    scores(job, b, p);
    gemm(CblasNoTrans, CblasTrans, b->rows, b->keys, d, dout, q_row, job->v + k_at(shape, b), k_row,
         0.0f, dp, b->keys);
    for (uint32_t row = 0; row < b->rows; row++) {
        float *p_row = p + (size_t)row * b->keys, *dp_row = dp + (size_t)row * b->keys;
        size_t seen = b->keys - b->rows + row + 1;
        exp_row(p_row, seen, b->keys, job->scale, stats[2 * row]);
        scale_row(p_row, seen, stats[2 * row + 1]);
        float delta = dot(dout + row * q_row, out + row * q_row, d);
        softmax_row_backward(dp_row, p_row, seen, delta, job->scale);
        memset(dp_row + seen, 0, (b->keys - seen) * sizeof *dp_row);
    }
    gemm(CblasNoTrans, CblasNoTrans, b->rows, d, b->keys, dp, b->keys, job->k + k_at(shape, b),
         k_row, 0.0f, job->dq + q_at(shape, b), q_row);
    gemm(CblasTrans, CblasNoTrans, b->keys, d, b->rows, dp, b->keys, job->q + q_at(shape, b), q_row,
         1.0f, job->dk + k_at(shape, b), k_row);
    gemm(CblasTrans, CblasNoTrans, b->keys, d, b->rows, p, b->keys, dout, q_row, 1.0f,
         job->dv + k_at(shape, b), k_row);
}

static void backward_task(void *arg, uint32_t task, uint32_t worker)
{
    const struct attention_job *job = arg;
    const struct kern_attention_shape *shape = job->shape;
    uint32_t batch = task / shape->kv_heads, kv_head = task % shape->kv_heads;
    uint32_t group = shape->heads / shape->kv_heads;
    float *p = job->scratch + job->scratch_each * worker, *dp = p + job->scratch_each / 2;
    size_t k_row = (size_t)shape->kv_heads * shape->head_dim;
    size_t at = (size_t)batch * shape->kv_len * k_row + (size_t)kv_head * shape->head_dim;
    for (uint32_t t = 0; t < shape->kv_len; t++) {
        memset(job->dk + at + t * k_row, 0, shape->head_dim * sizeof(float));
        memset(job->dv + at + t * k_row, 0, shape->head_dim * sizeof(float));
    }
    for (uint32_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
        for (uint32_t i = 0; i < block_count(shape); i++) {
            struct block b = block_make(shape, batch, head, i);
            backward_block(job, &b, p, dp);
        }
    }
}

void kern_attention_backward(struct kern_pool *pool, float *dq, float *dk, float *dv,
                             const float *dout, const float *out, const float *stats,
                             const float *q, const float *k, const float *v, float *scratch,
                             const struct kern_attention_shape *shape)
{
    struct attention_job job = {.shape = shape,
                                .dq = dq,
                                .dk = dk,
                                .dv = dv,
                                .dout = dout,
                                .out_in = out,
                                .stats = stats,
                                .q = q,
                                .k = k,
                                .v = v,
                                .scratch = scratch,
                                .scratch_each = scratch_each(shape),
                                .scale = 1.0f / __builtin_sqrtf((float)shape->head_dim)};
    kern_pool_run(pool, backward_task, &job, shape->batch * shape->kv_heads);
}
