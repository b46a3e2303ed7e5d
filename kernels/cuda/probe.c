/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The numeric probe of a GPU: every operation of the table on counter-made input, with the bits
 * that come out digested. Two devices that may work in one run get the same number; one with
 * another library or with a fault does not. Products are tried on a part, planned for the probe
 * alone: which algorithm the whole ones have is in the build name from here on.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/device.h"
#include "kernels/cuda/ops.h"
#include "kernels/probe_input.h"

#define ROWS   80U
#define HEADS  4U
#define DIM    32U /* of a head */
#define WIDTH  (HEADS * DIM)
#define COUNT  ((uint64_t)ROWS * WIDTH)
#define VOCAB  5003U /* ends in a part of a vector */
#define SMALL  (8ULL << 20)
#define ALIGN  256U
#define EPS    1e-5f
#define DECAY  0.1f
#define FACTOR 0.3f

struct probe {
    struct kern *k;
    char *memory; /* of the device */
    float *host;  /* what inputs are made in and results come to */
    uint64_t bytes, used;
    uint64_t digest, key;
    struct bl_errmsg *msg;
    int rc;
};

/* ---- memory, inputs, results ---- */

static void *place(struct probe *p, uint64_t bytes)
{
    void *here = p->memory + p->used;
    p->used += (bytes + ALIGN - 1) / ALIGN * ALIGN;
    BL_ASSERT(p->used <= p->bytes);
    return here;
}

static void sync_all(struct probe *p)
{
    int rc = kern_cuda_sync(p->k, p->msg);
    p->rc = p->rc != 0 ? p->rc : rc;
}

static float *floats(struct probe *p, uint64_t count)
{
    float *x = place(p, count * sizeof *x);
    kern_probe_fill(p->host, count, ++p->key);
    kern_cuda_upload(p->k, x, p->host, count * sizeof *x);
    sync_all(p); /* the host's array is used again */
    return x;
}

static kern_real *reals_empty(struct probe *p, uint64_t count)
{
    return place(p, count * p->k->real_bytes);
}

static kern_real *reals(struct probe *p, uint64_t count)
{
    kern_real *x = reals_empty(p, count);
    kern_cuda_round(p->k, x, floats(p, count), count);
    return x;
}

static void take(struct probe *p, const void *from, uint64_t bytes)
{
    kern_cuda_download(p->k, p->host, from, bytes);
    sync_all(p);
    p->digest = p->rc == 0 ? kern_probe_mix(p->digest, p->host, bytes) : 0;
}

static void take_reals(struct probe *p, const kern_real *x, uint64_t count)
{
    take(p, x, count * p->k->real_bytes);
}

static void take_floats(struct probe *p, const float *x, uint64_t count)
{
    take(p, x, count * sizeof *x);
}

/* ---- operations ---- */

static void probe_matmul(struct probe *p, struct kern_matmul_shape s)
{
    uint64_t nx = (uint64_t)s.n * s.i, nw = (uint64_t)s.o * s.i, ny = (uint64_t)s.n * s.o;
    int rc = kern_cuda_matmul_plan(p->k, &s, 1, p->msg);
    p->rc = p->rc != 0 ? p->rc : rc;
    p->used = 0;
    kern_real *x = reals(p, nx), *w = reals(p, nw), *dy = reals(p, ny), *bias = reals(p, s.o);
    kern_real *y = reals_empty(p, ny), *dx = reals_empty(p, nx);
    float *dw = place(p, nw * sizeof *dw);
    kern_cuda_matmul_forward(p->k, y, x, w, NULL, s);
    take_reals(p, y, ny);
    kern_cuda_matmul_forward(p->k, y, x, w, bias, s);
    kern_cuda_matmul_dx(p->k, dx, dy, w, s, 0);
    kern_cuda_matmul_dx(p->k, dx, dy, w, s, 1);
    kern_cuda_matmul_dw(p->k, dw, dy, x, s, 0);
    kern_cuda_matmul_dw(p->k, dw, dy, x, s, 1);
    take_reals(p, y, ny);
    take_reals(p, dx, nx);
    take_floats(p, dw, nw);
}

static void probe_norms(struct probe *p)
{
    struct kern *k = p->k;
    p->used = 0;
    kern_real *x = reals(p, COUNT), *w = reals(p, WIDTH), *b = reals(p, WIDTH);
    kern_real *dx = reals(p, COUNT), *out = reals_empty(p, COUNT);
    float *dw = place(p, WIDTH * sizeof *dw), *db = place(p, WIDTH * sizeof *db);
    float *mean = place(p, ROWS * sizeof *mean), *rstd = place(p, ROWS * sizeof *rstd);
    void *scratch = place(p, kern_cuda_norm_scratch(k, ROWS, WIDTH));
    kern_cuda_rmsnorm_forward(k, out, rstd, x, w, ROWS, WIDTH, EPS);
    kern_cuda_rmsnorm_backward(k, dx, dw, out, x, w, rstd, scratch, ROWS, WIDTH, 0);
    take_reals(p, out, COUNT);
    take_floats(p, dw, WIDTH);
    kern_cuda_layernorm_forward(k, out, mean, rstd, x, w, b, ROWS, WIDTH, EPS);
    kern_cuda_layernorm_backward(k, dx, dw, db, out, x, w, mean, rstd, scratch, ROWS, WIDTH, 1);
    take_reals(p, out, COUNT);
    take_reals(p, dx, COUNT);
    take_floats(p, dw, WIDTH);
    kern_cuda_bias_forward(k, out, b, ROWS, WIDTH);
    kern_cuda_bias_backward(k, db, dx, scratch, ROWS, WIDTH, 1);
    take_reals(p, out, COUNT);
    take_floats(p, db, WIDTH);
}

static void probe_places(struct probe *p)
{
    static const int32_t tokens[ROWS] = {17, 60, 17, 4000, 0, 12, 17};
    const uint32_t lo = 10, hi = ROWS;
    struct kern *k = p->k;
    p->used = 0;
    struct kern_tokens t = {.memory = place(p, kern_cuda_tokens_bytes(k, ROWS))};
    kern_real *weight = reals(p, COUNT), *out = reals_empty(p, COUNT);
    float *dweight = floats(p, COUNT), *table = floats(p, ROWS * DIM);
    kern_cuda_tokens_set(k, &t, tokens, ROWS, lo, hi);
    kern_cuda_embedding_forward(k, out, &t, weight, WIDTH, lo, hi);
    kern_cuda_position_forward(k, out, weight, ROWS, WIDTH, ROWS / 2, 1);
    kern_cuda_rope_forward(k, out, table, ROWS, ROWS / 2, HEADS, DIM, 1);
    take_reals(p, out, COUNT);
    kern_cuda_rope_backward(k, out, table, ROWS, ROWS, HEADS, DIM);
    kern_cuda_embedding_backward(k, dweight, out, &t, WIDTH, lo, hi, 1);
    take_floats(p, dweight, COUNT);
    kern_cuda_position_backward(k, dweight, out, ROWS, WIDTH, ROWS / 2, ROWS, 0);
    take_floats(p, dweight, COUNT);
}

static void probe_attention(struct probe *p)
{
    const struct kern_attention_shape shape = {1, ROWS, ROWS, HEADS, HEADS / 2, DIM};
    struct kern *k = p->k;
    p->used = 0;
    kern_real *q = reals(p, COUNT), *kk = reals(p, COUNT / 2), *v = reals(p, COUNT / 2);
    kern_real *dout = reals(p, COUNT), *out = reals_empty(p, COUNT), *dq = reals_empty(p, COUNT);
    kern_real *dk = reals_empty(p, COUNT / 2), *dv = reals_empty(p, COUNT / 2);
    float *stats = place(p, 2ULL * ROWS * HEADS * sizeof *stats);
    void *scratch = place(p, kern_cuda_attention_scratch(k, &shape));
    kern_cuda_attention_forward(k, out, stats, q, kk, v, scratch, &shape);
    kern_cuda_attention_backward(k, dq, dk, dv, dout, out, stats, q, kk, v, scratch, &shape);
    take_reals(p, out, COUNT);
    take_reals(p, dq, COUNT);
    take_reals(p, dk, COUNT / 2);
    take_reals(p, dv, COUNT / 2);
}

static void probe_elementwise(struct probe *p)
{
    struct kern *k = p->k;
    p->used = 0;
    kern_real *gate = reals(p, COUNT), *up = reals(p, COUNT), *dout = reals(p, COUNT);
    kern_real *out = reals_empty(p, COUNT);
    float *wide = place(p, COUNT * sizeof *wide);
    kern_cuda_swiglu_forward(k, out, gate, up, COUNT);
    take_reals(p, out, COUNT);
    kern_cuda_swiglu_backward(k, gate, up, dout, gate, up, COUNT);
    take_reals(p, gate, COUNT);
    kern_cuda_gelu_forward(k, out, up, COUNT);
    kern_cuda_gelu_backward(k, dout, dout, up, COUNT);
    kern_cuda_add_real(k, out, out, dout, COUNT);
    kern_cuda_widen(k, wide, out, COUNT);
    take_floats(p, wide, COUNT);
}

/* Rows of logits in two slices, as tensor parallel ranks have them, and whole. */
static void probe_loss(struct probe *p)
{
    enum { N = 4, CUT = VOCAB / 2, REST = VOCAB - CUT };
    static const int32_t targets[N] = {17, -1, 60, 4000};
    struct kern *k = p->k;
    p->used = 0;
    struct kern_tokens t = {.memory = place(p, kern_cuda_tokens_bytes(k, N))};
    kern_real *whole = reals(p, N * VOCAB), *slices[2] = {reals(p, N * CUT), reals(p, N * REST)};
    float *tops = place(p, 2 * N * sizeof *tops), *top = place(p, N * sizeof *top);
    double *sums = place(p, 4 * N * sizeof *sums), *sum = place(p, 2 * N * sizeof *sum);
    double *losses = place(p, N * sizeof *losses), *total = place(p, sizeof *total);
    kern_cuda_tokens_set(k, &t, targets, N, 0, VOCAB);
    kern_cuda_cross_entropy(k, whole, losses, &t, 0, N, VOCAB, 1);
    kern_cuda_loss_total(k, total, losses, N, 0);
    take_reals(p, whole, N * VOCAB);
    for (int i = 0; i < 2; i++) {
        kern_cuda_cross_entropy_top(k, tops + i * N, slices[i], &t, 0, N, i == 0 ? CUT : REST);
    }
    kern_cuda_tops_merge(k, top, tops, 2, N);
    for (int i = 0; i < 2; i++) {
        kern_cuda_cross_entropy_sum(k, sums + 2 * i * N, slices[i], top, &t, 0, N, i == 0 ? 0 : CUT,
                                    i == 0 ? CUT : REST, 1);
    }
    kern_cuda_sums_merge(k, sum, sums, 2, 2 * N);
    for (int i = 0; i < 2; i++) {
        kern_cuda_cross_entropy_finish(k, slices[i], losses, top, sum, &t, 0, N, i == 0 ? 0 : CUT,
                                       i == 0 ? CUT : REST, 1);
        take_reals(p, slices[i], (uint64_t)N * (i == 0 ? CUT : REST));
    }
    kern_cuda_loss_total(k, total, losses, N, 1);
    take(p, total, sizeof *total);
}

static void probe_flat(struct probe *p)
{
    const struct kern_adamw_step step = {.lr = 1e-3f,
                                         .beta1 = 0.9f,
                                         .beta1_rest = 0.1f,
                                         .beta2 = 0.95f,
                                         .beta2_rest = 0.05f,
                                         .bc1_inv = 3.7f,
                                         .bc2_inv = 7.0f,
                                         .eps = 1e-8f,
                                         .grad_scale = 0.7f};
    const uint64_t half = COUNT / 2;
    struct kern *k = p->k;
    p->used = 0;
    float *a = floats(p, COUNT), *b = floats(p, COUNT), *grad = floats(p, COUNT);
    kern_real *parts = reals(p, COUNT);
    double *sums = place(p, (COUNT / KERN_BLOCK + 1) * sizeof *sums);
    kern_cuda_add(k, grad, grad, b, COUNT);
    kern_cuda_scale(k, grad, FACTOR, COUNT);
    kern_cuda_sumsq_blocks(k, sums, grad, COUNT);
    take(p, sums, (COUNT + KERN_BLOCK - 1) / KERN_BLOCK * sizeof *sums);
    kern_cuda_sum_parts(k, parts, parts, p->k->type, 2, half);
    take_reals(p, parts, half);
    float *v = grad + half; /* squares, or they had no root */
    kern_cuda_sum_parts(k, a, b, KERN_F32, 2, half);
    kern_cuda_zero(k, v, half * sizeof *v);
    const struct kern_adamw_part part = {a, b, v, a, b, v, grad, half, DECAY};
    kern_cuda_adamw(k, &part, 1, &step);
    take_floats(p, a, half);
    take_floats(p, b, half);
    take_floats(p, v, half);
}

/* ---- all of it ---- */

/* Inputs are there in fp32 and as reals. */
static uint64_t bytes_of(struct kern_matmul_shape s)
{
    uint64_t elems = (uint64_t)s.n * s.i + (uint64_t)s.o * s.i + (uint64_t)s.n * s.o + s.o;
    return 3 * sizeof(float) * elems + 32ULL * ALIGN;
}

static int take_room(struct probe *p, const struct kern_matmul_shape *shapes, uint32_t count)
{
    p->bytes = SMALL;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t bytes = bytes_of(kern_probe_shape(shapes[i]));
        p->bytes = bytes > p->bytes ? bytes : p->bytes;
    }
    cudaError_t error = cudaMalloc((void **)&p->memory, p->bytes);
    if (error != cudaSuccess) {
        cudaGetLastError();
        p->memory = NULL;
        return kern_cuda_error(kern_cuda_of(p->k), error, "memory of the numeric probe", p->msg);
    }
    p->host = malloc(p->bytes);
    return p->host != NULL ? 0 : bl_err_code(p->msg, -ENOMEM, "numeric probe");
}

int kern_cuda_probe(struct kern *k, const struct kern_matmul_shape *shapes, uint32_t count,
                    uint64_t *ret_digest, struct bl_errmsg *msg)
{
    struct kern_cuda *cuda = kern_cuda_of(k);
    struct probe p = {.k = k, .msg = msg};
    int rc = kern_cuda_matmul_plan(k, shapes, count, msg);
    uint64_t algorithms = rc == 0 ? kern_cuda_matmul_digest(cuda, shapes, count) : 0;
    uint32_t mark = kern_cuda_matmul_mark(cuda);
    p.rc = rc != 0 ? rc : take_room(&p, shapes, count);
    for (uint32_t i = 0; i < count && p.rc == 0; i++) {
        probe_matmul(&p, kern_probe_shape(shapes[i]));
    }
    void (*const rest[])(struct probe *) = {probe_norms,       probe_places, probe_attention,
                                            probe_elementwise, probe_loss,   probe_flat};
    for (size_t i = 0; i < sizeof rest / sizeof *rest && p.rc == 0; i++) {
        rest[i](&p);
    }
    kern_cuda_matmul_forget(cuda, mark);
    if (!cuda->is_lost) {
        cudaFree(p.memory);
    }
    free(p.host);
    if (p.rc != 0) {
        return bl_err_in(msg, p.rc, "numeric probe");
    }
    cuda->algorithms = algorithms;
    *ret_digest = p.digest;
    return 0;
}
