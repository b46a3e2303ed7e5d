/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CPU as a back end: the table over kern_* (kernels/kern.h), in fp32, each done when it
 * returns. What has a function of its own there is only handed on here.
 */
#include "kernels/backend.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

struct cpu_block {
    struct cpu_block *next;
    void *memory;
    uint64_t bytes;
};

struct kern_cpu {
    struct kern base;
    struct kern_pool *pool;   /* the caller's */
    uint32_t threads;         /* that scratch is for */
    struct cpu_block *blocks; /* what was allocated, newest first */
};

static struct kern_cpu *cpu_of(struct kern *k)
{
    return (struct kern_cpu *)k;
}

static struct kern_pool *pool_of(const struct kern *k)
{
    return ((const struct kern_cpu *)k)->pool;
}

/* Storage is an array of float here. */
static float *f32(kern_real *p)
{
    return kern_real_floats(p);
}

static const float *view(const kern_real *p)
{
    return kern_real_floats_view(p);
}

/* ---- life and memory ---- */

static void cpu_close(struct kern *k)
{
    struct kern_cpu *cpu = cpu_of(k);
    while (cpu->blocks != NULL) {
        struct cpu_block *block = cpu->blocks;
        cpu->blocks = block->next;
        bl_mem_free(block->memory, block->bytes);
        free(block);
    }
    free(cpu);
}

static int cpu_sync(struct kern *k, struct bl_errmsg *msg)
{
    (void)k, (void)msg;
    return 0;
}

static void *cpu_alloc(struct kern *k, uint64_t bytes)
{
    struct kern_cpu *cpu = cpu_of(k);
    struct cpu_block *block = malloc(sizeof *block);
    if (block == NULL) {
        return NULL;
    }
    *block = (struct cpu_block){cpu->blocks, bl_mem_alloc(bytes), bytes};
    if (block->memory == NULL) {
        free(block);
        return NULL;
    }
    cpu->blocks = block;
    return block->memory;
}

static void cpu_free(struct kern *k, void *p, uint64_t bytes)
{
    struct cpu_block **at = &cpu_of(k)->blocks;
    if (p == NULL) {
        return;
    }
    while (*at != NULL && (*at)->memory != p) {
        at = &(*at)->next;
    }
    struct cpu_block *block = *at;
    BL_ASSERT(block != NULL && block->bytes == bytes);
    *at = block->next;
    bl_mem_free(block->memory, block->bytes);
    free(block);
}

static void cpu_copy(struct kern *k, void *to, const void *from, uint64_t bytes)
{
    (void)k;
    memcpy(to, from, bytes);
}

static void cpu_zero(struct kern *k, void *to, uint64_t bytes)
{
    (void)k;
    memset(to, 0, bytes);
}

static int cpu_publish_done(struct kern *k)
{
    (void)k;
    return 1;
}

static int cpu_host_register(struct kern *k, void *host, uint64_t bytes, struct bl_errmsg *msg)
{
    (void)k, (void)host, (void)bytes, (void)msg;
    return 0;
}

static void cpu_host_unregister(struct kern *k, void *host, uint64_t bytes)
{
    (void)k, (void)host, (void)bytes;
}

/* ---- identity and types ---- */

static const char *cpu_build_name(struct kern *k)
{
    (void)k;
    return kern_build_name();
}

static int cpu_probe(struct kern *k, const struct kern_matmul_shape *shapes, uint32_t count,
                     uint64_t *ret_digest, struct bl_errmsg *msg)
{
    return kern_probe(pool_of(k), shapes, count, ret_digest, msg);
}

static void cpu_round(struct kern *k, kern_real *out, const float *a, uint64_t count)
{
    kern_copy(pool_of(k), f32(out), a, count);
}

static void cpu_widen(struct kern *k, float *out, const kern_real *a, uint64_t count)
{
    kern_copy(pool_of(k), out, view(a), count);
}

/* ---- tokens and embedding ---- */

static uint64_t cpu_tokens_bytes(struct kern *k, uint32_t n)
{
    (void)k, (void)n;
    return 0;
}

static void cpu_tokens_set(struct kern *k, struct kern_tokens *t, const int32_t *host, uint32_t n,
                           uint32_t lo, uint32_t hi)
{
    (void)k, (void)lo, (void)hi;
    t->host = host;
    t->n = n;
    t->segments = 0;
}

static void cpu_embedding_forward(struct kern *k, kern_real *out, const struct kern_tokens *t,
                                  const kern_real *weight, uint32_t c, uint32_t lo, uint32_t hi)
{
    kern_embedding_slice_forward(pool_of(k), f32(out), t->host, view(weight), t->n, c, lo, hi);
}

static void cpu_embedding_backward(struct kern *k, float *dweight, const kern_real *dout,
                                   const struct kern_tokens *t, uint32_t c, uint32_t lo,
                                   uint32_t hi, int add)
{
    kern_embedding_slice_backward(pool_of(k), dweight, view(dout), t->host, t->n, c, lo, hi, add);
}

static void cpu_position_forward(struct kern *k, kern_real *out, const kern_real *weight,
                                 uint32_t n, uint32_t c, uint32_t t_count, uint32_t pos)
{
    kern_position_forward(pool_of(k), f32(out), view(weight), n, c, t_count, pos);
}

static void cpu_position_backward(struct kern *k, float *dweight, const kern_real *dout, uint32_t n,
                                  uint32_t c, uint32_t t_count, uint32_t rows, int add)
{
    kern_position_backward(pool_of(k), dweight, view(dout), n, c, t_count, rows, add);
}

/* ---- norms ---- */

static void cpu_rmsnorm_forward(struct kern *k, kern_real *out, float *rstd, const kern_real *x,
                                const kern_real *weight, uint32_t n, uint32_t c, float eps)
{
    kern_rmsnorm_forward(pool_of(k), f32(out), rstd, view(x), view(weight), n, c, eps);
}

static void cpu_rmsnorm_backward(struct kern *k, kern_real *dx, float *dweight,
                                 const kern_real *dout, const kern_real *x, const kern_real *weight,
                                 const float *rstd, void *scratch, uint32_t n, uint32_t c, int add)
{
    (void)scratch;
    kern_rmsnorm_backward(pool_of(k), f32(dx), dweight, view(dout), view(x), view(weight), rstd, n,
                          c, add);
}

static void cpu_layernorm_forward(struct kern *k, kern_real *out, float *mean, float *rstd,
                                  const kern_real *x, const kern_real *weight,
                                  const kern_real *bias, uint32_t n, uint32_t c, float eps)
{
    kern_layernorm_forward(pool_of(k), f32(out), mean, rstd, view(x), view(weight), view(bias), n,
                           c, eps);
}

static void cpu_layernorm_backward(struct kern *k, kern_real *dx, float *dweight, float *dbias,
                                   const kern_real *dout, const kern_real *x,
                                   const kern_real *weight, const float *mean, const float *rstd,
                                   void *scratch, uint32_t n, uint32_t c, int add)
{
    (void)scratch;
    kern_layernorm_backward(pool_of(k), f32(dx), dweight, dbias, view(dout), view(x), view(weight),
                            mean, rstd, n, c, add);
}

static uint64_t cpu_norm_scratch(struct kern *k, uint32_t n, uint32_t c)
{
    (void)k, (void)n, (void)c;
    return 0;
}

/* ---- rotary positions and attention ---- */

static void cpu_rope_forward(struct kern *k, kern_real *x, const float *table, uint32_t n,
                             uint32_t t_count, uint32_t heads, uint32_t head_dim, uint32_t pos)
{
    kern_rope_forward(pool_of(k), f32(x), table, n, t_count, heads, head_dim, pos);
}

static void cpu_rope_backward(struct kern *k, kern_real *dx, const float *table, uint32_t n,
                              uint32_t t_count, uint32_t heads, uint32_t head_dim)
{
    kern_rope_backward(pool_of(k), f32(dx), table, n, t_count, heads, head_dim);
}

static uint64_t cpu_attention_scratch(struct kern *k, const struct kern_attention_shape *shape)
{
    return kern_attention_scratch(shape, cpu_of(k)->threads) * sizeof(float);
}

static void cpu_attention_forward(struct kern *k, kern_real *out, float *stats, const kern_real *q,
                                  const kern_real *kk, const kern_real *v, void *scratch,
                                  const struct kern_attention_shape *shape)
{
    kern_attention_forward(pool_of(k), f32(out), stats, view(q), view(kk), view(v), scratch, shape);
}

static void cpu_attention_backward(struct kern *k, kern_real *dq, kern_real *dk, kern_real *dv,
                                   const kern_real *dout, const kern_real *out, const float *stats,
                                   const kern_real *q, const kern_real *kk, const kern_real *v,
                                   void *scratch, const struct kern_attention_shape *shape)
{
    kern_attention_backward(pool_of(k), f32(dq), f32(dk), f32(dv), view(dout), view(out), stats,
                            view(q), view(kk), view(v), scratch, shape);
}

/* ---- matrix products ---- */

static void cpu_matmul_forward(struct kern *k, kern_real *y, const kern_real *x, const kern_real *w,
                               const kern_real *bias, struct kern_matmul_shape shape)
{
    kern_matmul_forward(pool_of(k), f32(y), view(x), view(w), shape, 0);
    if (bias != NULL) {
        kern_bias_forward(pool_of(k), f32(y), view(bias), shape.n, shape.o);
    }
}

static void cpu_matmul_dx(struct kern *k, kern_real *dx, const kern_real *dy, const kern_real *w,
                          struct kern_matmul_shape shape, int add)
{
    kern_matmul_dx(pool_of(k), f32(dx), view(dy), view(w), shape, add);
}

static void cpu_matmul_dw(struct kern *k, float *dw, const kern_real *dy, const kern_real *x,
                          struct kern_matmul_shape shape, int add)
{
    kern_matmul_dw(pool_of(k), dw, view(dy), view(x), shape, add);
}

static int cpu_matmul_plan(struct kern *k, const struct kern_matmul_shape *shapes, uint32_t count,
                           struct bl_errmsg *msg)
{
    (void)k, (void)shapes, (void)count, (void)msg;
    return 0;
}

static void cpu_bias_forward(struct kern *k, kern_real *y, const kern_real *bias, uint32_t n,
                             uint32_t o)
{
    kern_bias_forward(pool_of(k), f32(y), view(bias), n, o);
}

static void cpu_bias_backward(struct kern *k, float *dbias, const kern_real *dy, void *scratch,
                              uint32_t n, uint32_t o, int add)
{
    (void)scratch;
    kern_bias_backward(pool_of(k), dbias, view(dy), n, o, add);
}

/* ---- elementwise ---- */

static void cpu_swiglu_forward(struct kern *k, kern_real *out, const kern_real *gate,
                               const kern_real *up, uint64_t count)
{
    kern_swiglu_forward(pool_of(k), f32(out), view(gate), view(up), count);
}

static void cpu_swiglu_backward(struct kern *k, kern_real *dgate, kern_real *dup,
                                const kern_real *dout, const kern_real *gate, const kern_real *up,
                                uint64_t count)
{
    kern_swiglu_backward(pool_of(k), f32(dgate), f32(dup), view(dout), view(gate), view(up), count);
}

static void cpu_gelu_forward(struct kern *k, kern_real *out, const kern_real *x, uint64_t count)
{
    kern_gelu_forward(pool_of(k), f32(out), view(x), count);
}

static void cpu_gelu_backward(struct kern *k, kern_real *dx, const kern_real *dout,
                              const kern_real *x, uint64_t count)
{
    kern_gelu_backward(pool_of(k), f32(dx), view(dout), view(x), count);
}

static void cpu_add_real(struct kern *k, kern_real *out, const kern_real *a, const kern_real *b,
                         uint64_t count)
{
    kern_add(pool_of(k), f32(out), view(a), view(b), count);
}

/* ---- cross-entropy ---- */

static void cpu_cross_entropy(struct kern *k, kern_real *logits, double *losses,
                              const struct kern_tokens *t, uint32_t first, uint32_t n,
                              uint32_t vocab, int backward)
{
    uint64_t counted;
    (void)kern_cross_entropy(pool_of(k), f32(logits), losses, t->host + first, n, vocab, backward,
                             &counted);
}

static void cpu_cross_entropy_top(struct kern *k, float *tops, const kern_real *logits,
                                  const struct kern_tokens *t, uint32_t first, uint32_t n,
                                  uint32_t columns)
{
    kern_cross_entropy_top(pool_of(k), tops, view(logits), t->host + first, n, columns);
}

static void cpu_cross_entropy_sum(struct kern *k, double *sums, kern_real *logits,
                                  const float *tops, const struct kern_tokens *t, uint32_t first,
                                  uint32_t n, uint32_t lo, uint32_t columns, int backward)
{
    kern_cross_entropy_sum(pool_of(k), sums, f32(logits), tops, t->host + first, n, lo, columns,
                           backward);
}

static void cpu_cross_entropy_finish(struct kern *k, kern_real *logits, double *losses,
                                     const float *tops, const double *sums,
                                     const struct kern_tokens *t, uint32_t first, uint32_t n,
                                     uint32_t lo, uint32_t columns, int backward)
{
    uint64_t counted;
    (void)tops;
    (void)kern_cross_entropy_finish(pool_of(k), f32(logits), losses, sums, t->host + first, n, lo,
                                    columns, backward, &counted);
}

static void cpu_loss_total(struct kern *k, double *total, const double *losses, uint32_t n, int add)
{
    double sum = 0.0;
    (void)k;
    for (uint32_t i = 0; i < n; i++) {
        sum += losses[i];
    }
    *total = (add ? *total : 0.0) + sum;
}

static void cpu_tops_merge(struct kern *k, float *tops, const float *parts, uint32_t count,
                           uint32_t n)
{
    (void)k;
    for (uint32_t i = 0; i < n; i++) {
        float top = parts[i];
        for (size_t r = 1; r < count; r++) {
            float other = parts[r * n + i];
            top = other > top ? other : top;
        }
        tops[i] = top;
    }
}

static void cpu_sums_merge(struct kern *k, double *sums, const double *parts, uint32_t count,
                           uint32_t n)
{
    (void)k;
    for (uint32_t i = 0; i < n; i++) {
        double sum = parts[i];
        for (size_t r = 1; r < count; r++) {
            sum += parts[r * n + i];
        }
        sums[i] = sum;
    }
}

/* ---- flat ---- */

static void cpu_add(struct kern *k, float *out, const float *a, const float *b, uint64_t count)
{
    kern_add(pool_of(k), out, a, b, count);
}

static void cpu_scale(struct kern *k, float *x, float factor, uint64_t count)
{
    kern_scale(pool_of(k), x, factor, count);
}

static void cpu_sumsq_blocks(struct kern *k, double *sums, const float *x, uint64_t count)
{
    kern_sumsq_blocks(pool_of(k), sums, x, count);
}

static void cpu_sum_parts(struct kern *k, void *out, const void *parts, uint32_t type,
                          uint32_t count, uint64_t n)
{
    const float *from = parts;
    BL_ASSERT(type == KERN_F32);
    if (out != parts) {
        memcpy(out, parts, n * sizeof *from);
    }
    for (uint32_t r = 1; r < count; r++) {
        kern_add(pool_of(k), out, out, from + r * n, n);
    }
}

static void cpu_adamw(struct kern *k, const struct kern_adamw_part *parts, uint32_t part_count,
                      const struct kern_adamw_step *step)
{
    for (uint32_t i = 0; i < part_count; i++) {
        const struct kern_adamw_part *p = &parts[i];
        kern_adamw(pool_of(k), p->out_param, p->out_m, p->out_v, p->param, p->m, p->v, p->grad,
                   p->count, step, p->weight_decay);
    }
}

/* ---- the table ---- */

static const struct kern_ops CPU_OPS = {
    .name = "cpu",
    .close = cpu_close,
    .sync = cpu_sync,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .upload = cpu_copy,
    .download = cpu_copy,
    .copy = cpu_copy,
    .zero = cpu_zero,
    .publish = cpu_copy,
    .publish_wait = cpu_sync,
    .publish_done = cpu_publish_done,
    .host_register = cpu_host_register,
    .host_unregister = cpu_host_unregister,
    .build_name = cpu_build_name,
    .probe = cpu_probe,
    .round = cpu_round,
    .widen = cpu_widen,
    .tokens_bytes = cpu_tokens_bytes,
    .tokens_set = cpu_tokens_set,
    .embedding_forward = cpu_embedding_forward,
    .embedding_backward = cpu_embedding_backward,
    .position_forward = cpu_position_forward,
    .position_backward = cpu_position_backward,
    .rmsnorm_forward = cpu_rmsnorm_forward,
    .rmsnorm_backward = cpu_rmsnorm_backward,
    .layernorm_forward = cpu_layernorm_forward,
    .layernorm_backward = cpu_layernorm_backward,
    .norm_scratch = cpu_norm_scratch,
    .rope_forward = cpu_rope_forward,
    .rope_backward = cpu_rope_backward,
    .attention_scratch = cpu_attention_scratch,
    .attention_forward = cpu_attention_forward,
    .attention_backward = cpu_attention_backward,
    .matmul_forward = cpu_matmul_forward,
    .matmul_dx = cpu_matmul_dx,
    .matmul_dw = cpu_matmul_dw,
    .matmul_plan = cpu_matmul_plan,
    .bias_forward = cpu_bias_forward,
    .bias_backward = cpu_bias_backward,
    .swiglu_forward = cpu_swiglu_forward,
    .swiglu_backward = cpu_swiglu_backward,
    .gelu_forward = cpu_gelu_forward,
    .gelu_backward = cpu_gelu_backward,
    .add_real = cpu_add_real,
    .cross_entropy = cpu_cross_entropy,
    .cross_entropy_top = cpu_cross_entropy_top,
    .cross_entropy_sum = cpu_cross_entropy_sum,
    .cross_entropy_finish = cpu_cross_entropy_finish,
    .loss_total = cpu_loss_total,
    .tops_merge = cpu_tops_merge,
    .sums_merge = cpu_sums_merge,
    .add = cpu_add,
    .scale = cpu_scale,
    .sumsq_blocks = cpu_sumsq_blocks,
    .sum_parts = cpu_sum_parts,
    .adamw = cpu_adamw,
};

static int open_cpu(struct kern **ret, struct kern_pool *pool, uint32_t threads,
                    struct bl_errmsg *msg)
{
    struct kern_cpu *cpu = calloc(1, sizeof *cpu);
    if (cpu == NULL) {
        return bl_err_code(msg, -ENOMEM, "back end cpu");
    }
    cpu->base = (struct kern){&CPU_OPS, KERN_F32, sizeof(float), 0};
    cpu->pool = pool;
    cpu->threads = threads;
    *ret = &cpu->base;
    return 0;
}

int kern_cpu_open(struct kern **ret, struct kern_pool *pool, struct bl_errmsg *msg)
{
    return open_cpu(ret, pool, kern_pool_threads(pool), msg);
}

int kern_cpu_open_sizes(struct kern **ret, uint32_t threads, struct bl_errmsg *msg)
{
    return open_cpu(ret, NULL, threads, msg);
}

struct kern_pool *kern_cpu_pool(const struct kern *k)
{
    return k->ops == &CPU_OPS ? pool_of(k) : NULL;
}
