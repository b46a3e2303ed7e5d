/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The numeric probe: every kernel on counter-made input, digested. Nodes that compute alike get the
 * same number whatever their threads; a node with another BLAS core or library does not.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/probe_input.h"

#define SMALL      96U /* width of the small operations */
#define SMALL_ROWS 80U
#define VOCAB      5003U /* crosses a block of the cross-entropy and ends in a part of a vector */

struct probe {
    struct kern_pool *pool;
    uint64_t digest;
    float *memory; /* owned */
};

static void take(struct probe *probe, const void *data, size_t bytes)
{
    probe->digest = kern_probe_mix(probe->digest, data, bytes);
}

static int probe_matmul(struct probe *probe, struct kern_matmul_shape s)
{
    size_t nx = (size_t)s.n * s.i, nw = (size_t)s.o * s.i, ny = (size_t)s.n * s.o;
    float *memory = malloc(2 * (nx + nw + ny) * sizeof(float));
    if (memory == NULL) {
        return -ENOMEM;
    }
    float *x = memory, *w = x + nx, *y = w + nw, *dx = y + ny, *dw = dx + nx, *dy = dw + nw;
    kern_probe_fill(x, nx, 1);
    kern_probe_fill(w, nw, 2);
    kern_probe_fill(dy, ny, 3);
    kern_matmul_forward(probe->pool, y, x, w, s, 0);
    kern_matmul_dx(probe->pool, dx, dy, w, s, 0);
    kern_matmul_dw(probe->pool, dw, dy, x, s, 0);
    kern_matmul_dw(probe->pool, dw, dy, x, s, 1);
    take(probe, y, ny * sizeof(float));
    take(probe, dx, nx * sizeof(float));
    take(probe, dw, nw * sizeof(float));
    free(memory);
    return 0;
}

static void probe_norm_rope(struct probe *probe)
{
    size_t count = (size_t)SMALL_ROWS * SMALL;
    float *x = probe->memory, *out = x + count, *dx = out + count, *w = dx + count;
    float *dw = w + SMALL, *rstd = dw + SMALL, *table = rstd + SMALL_ROWS;
    kern_probe_fill(x, count, 4);
    kern_probe_fill(w, SMALL, 5);
    kern_probe_fill(dx, count, 6);
    kern_rmsnorm_forward(probe->pool, out, rstd, x, w, SMALL_ROWS, SMALL, 1e-5f);
    kern_rmsnorm_backward(probe->pool, dx, dw, out, x, w, rstd, SMALL_ROWS, SMALL, 0);
    const struct kern_rope_scaling scaling = {8.0, 1.0, 4.0, 64};
    kern_rope_table(table, SMALL_ROWS, SMALL / 4, 10000.0, &scaling);
    kern_rope_forward(probe->pool, out, table, SMALL_ROWS, SMALL_ROWS, 4, SMALL / 4, 0);
    kern_rope_backward(probe->pool, dx, table, SMALL_ROWS, SMALL_ROWS, 4, SMALL / 4);
    take(probe, out, count * sizeof(float));
    take(probe, dx, count * sizeof(float));
    take(probe, dw, SMALL * sizeof(float));
}

static void probe_gpt2(struct probe *probe)
{
    size_t count = (size_t)SMALL_ROWS * SMALL;
    float *x = probe->memory, *out = x + count, *dx = out + count, *w = dx + count, *b = w + SMALL;
    float *dw = b + SMALL, *db = dw + SMALL, *mean = db + SMALL, *rstd = mean + SMALL_ROWS;
    kern_probe_fill(x, count, 14);
    kern_probe_fill(w, 2 * SMALL, 15);
    kern_probe_fill(dx, count, 16);
    kern_position_forward(probe->pool, x, dx, SMALL_ROWS, SMALL, SMALL_ROWS / 2, 1);
    kern_layernorm_forward(probe->pool, out, mean, rstd, x, w, b, SMALL_ROWS, SMALL, 1e-5f);
    kern_layernorm_backward(probe->pool, dx, dw, db, out, x, w, mean, rstd, SMALL_ROWS, SMALL, 0);
    kern_gelu_forward(probe->pool, x, out, count);
    kern_gelu_backward(probe->pool, dx, dx, out, count);
    kern_bias_forward(probe->pool, x, b, SMALL_ROWS, SMALL);
    take(probe, x, count * sizeof(float));
    take(probe, dx, count * sizeof(float));
    take(probe, dw, 2 * SMALL * sizeof(float)); /* and db */
    kern_bias_backward(probe->pool, db, dx, SMALL_ROWS, SMALL, 0);
    kern_position_backward(probe->pool, x, dx, SMALL_ROWS, SMALL, SMALL_ROWS / 2, SMALL_ROWS, 0);
    take(probe, x, count * sizeof(float));
    take(probe, db, SMALL * sizeof(float));
}

static void probe_attention(struct probe *probe)
{
    struct kern_attention_shape shape = {.batch = 1,
                                         .q_len = SMALL_ROWS,
                                         .kv_len = SMALL_ROWS,
                                         .heads = 4,
                                         .kv_heads = 2,
                                         .head_dim = SMALL / 4};
    size_t nq = (size_t)SMALL_ROWS * SMALL, nk = nq / 2;
    float *q = probe->memory, *k = q + nq, *v = k + nk, *out = v + nk, *dq = out + nq;
    float *dk = dq + nq, *dv = dk + nk, *stats = dv + nk, *scratch = stats + SMALL_ROWS * 8;
    kern_probe_fill(q, nq, 7);
    kern_probe_fill(k, nk, 8);
    kern_probe_fill(v, nk, 9);
    kern_attention_forward(probe->pool, out, stats, q, k, v, scratch, &shape);
    kern_attention_backward(probe->pool, dq, dk, dv, out, out, stats, q, k, v, scratch, &shape);
    take(probe, out, nq * sizeof(float));
    take(probe, dq, nq * sizeof(float));
    take(probe, dk, nk * sizeof(float));
    take(probe, dv, nk * sizeof(float));
}

static void probe_elementwise(struct probe *probe)
{
    size_t count = VOCAB;
    float *a = probe->memory, *b = a + count, *c = b + count, *d = c + count, *e = d + count;
    double sums[2], loss[1];
    int32_t target = 3;
    uint64_t counted;
    struct kern_adamw_step step;
    kern_probe_fill(a, count, 10);
    kern_probe_fill(b, count, 11);
    kern_probe_fill(e, count, 12);
    kern_swiglu_forward(probe->pool, c, a, b, count);
    kern_swiglu_backward(probe->pool, a, b, e, a, b, count);
    take(probe, c, count * sizeof(float));
    kern_add(probe->pool, d, a, b, count);
    kern_scale(probe->pool, d, 0.3f, count);
    kern_sumsq_blocks(probe->pool, sums, d, count);
    take(probe, sums, sizeof sums);
    kern_rng_normal(probe->pool, c, 13, 1, count, 0.02);
    kern_adamw_step_init(&step, 3, 1e-3, 0.9, 0.95, 1e-8, 0.7f);
    memset(b, 0, count * sizeof *b);
    memset(e, 0, count * sizeof *e);
    kern_adamw(probe->pool, c, b, e, c, b, e, d, count, &step, 0.1f);
    take(probe, c, count * sizeof(float));
    loss[0] = kern_cross_entropy(probe->pool, a, sums, &target, 1, VOCAB, 1, &counted);
    take(probe, loss, sizeof loss);
    take(probe, a, count * sizeof(float));
}

/* What tensor-parallel ranks do of embedding and cross-entropy, over two slices. */
static void probe_slices(struct probe *probe)
{
    static const int32_t tokens[4] = {17, 60, -1, 4000};
    enum { ROWS = 4, CUT = VOCAB / 2 };
    size_t count = (size_t)ROWS * (VOCAB - CUT);
    float *x = probe->memory, tops[ROWS];
    double sums[2 * ROWS], losses[ROWS];
    uint64_t counted;
    for (uint32_t slice = 0; slice < 2; slice++) {
        uint32_t lo = slice == 0 ? 0 : CUT, columns = slice == 0 ? CUT : VOCAB - CUT;
        kern_probe_fill(x, count, 17 + slice);
        kern_cross_entropy_top(probe->pool, tops, x, tokens, ROWS, columns);
        kern_cross_entropy_sum(probe->pool, sums, x, tops, tokens, ROWS, lo, columns, 1);
        losses[0] = kern_cross_entropy_finish(probe->pool, x, losses, sums, tokens, ROWS, lo,
                                              columns, 1, &counted);
        take(probe, losses, sizeof losses[0]);
        take(probe, x, (size_t)ROWS * columns * sizeof(float));
    }
    float *dweight = x + SMALL_ROWS * SMALL, *out = dweight + SMALL_ROWS * SMALL;
    kern_probe_fill(x, SMALL_ROWS * SMALL, 19);
    kern_embedding_slice_forward(probe->pool, out, tokens, x, 2, SMALL, 10, SMALL_ROWS);
    kern_embedding_slice_backward(probe->pool, dweight, out, tokens, 2, SMALL, 10, SMALL_ROWS, 0);
    take(probe, out, 2 * SMALL * sizeof(float));
    take(probe, dweight, (SMALL_ROWS - 10) * SMALL * sizeof(float));
}

int kern_probe(struct kern_pool *pool, const struct kern_matmul_shape *shapes, uint32_t shape_count,
               uint64_t *ret_digest, struct bl_errmsg *msg)
{
    struct kern_attention_shape widest = {.batch = 1,
                                          .q_len = SMALL_ROWS,
                                          .kv_len = SMALL_ROWS,
                                          .heads = 4,
                                          .kv_heads = 2,
                                          .head_dim = SMALL / 4};
    size_t elems = 8ULL * SMALL_ROWS * SMALL + 8ULL * SMALL_ROWS + 6ULL * VOCAB +
                   kern_attention_scratch(&widest, kern_pool_threads(pool));
    struct probe probe = {pool, 0, malloc(elems * sizeof(float))};
    int rc = probe.memory == NULL ? -ENOMEM : 0;
    for (uint32_t i = 0; i < shape_count && rc == 0; i++) {
        rc = probe_matmul(&probe, kern_probe_shape(shapes[i]));
    }
    if (rc == 0) {
        probe_norm_rope(&probe);
        probe_gpt2(&probe);
        probe_attention(&probe);
        probe_elementwise(&probe);
        probe_slices(&probe);
        *ret_digest = probe.digest;
    }
    free(probe.memory);
    return rc < 0 ? bl_err_code(msg, rc, "numeric probe") : 0;
}
