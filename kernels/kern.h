/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Kernels: every operation of a training step, with its shapes, formula and accumulation.
 *
 * The bits of a result are a function of the arguments alone: not of the number of threads, of the
 * optimisation level or of the compiler. Therefore
 *  - work is cut into tasks by shape only, and no element's sum ever spans two tasks;
 *  - a reduction runs over eight explicit lanes (element i goes to lane i mod 8) that are combined
 *    as ((0+4)+(2+6)) + ((1+5)+(3+7)), unless said otherwise;
 *  - exp, log, sin and cos are our own (kernels/fmath.h); no multiply-add is fused;
 *  - matrix products call the single-threaded BLAS on tiles that the shape fixes, so the bits of
 *    these depend also on the BLAS build and the core it picked: see kern_build_name.
 * Subnormal numbers are flushed to zero on every thread that computes.
 *
 * All arrays are row-major fp32 unless said otherwise; borrowed for the call; need no alignment
 * beyond their type's; do not overlap unless said otherwise. N is the number of tokens (batch
 * times sequence length). B T C H: batch, sequence, channels, heads; d<name> is a gradient. `add`:
 * 0 overwrites the output, 1 adds to it. `pool` may be NULL: the caller's thread does all.
 * Functions here cannot fail once kern_start has succeeded, and take any size.
 */
#ifndef KERN_KERNELS_KERN_H
#define KERN_KERNELS_KERN_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "kernels/adamw.h"

/* ---- start and identity ---- */

/* Checks that this CPU has the instructions that the kernels were compiled for (BL_ENOTBUILT with
 * text if not) and sets the BLAS to one thread. Idempotent; kern_pool_new calls it. */
BL_MUST_CHECK int kern_start(struct bl_errmsg *msg);

/* What the bits depend on beside the arguments: kernel version, our instruction set, the BLAS
 * build and the core it chose ("belay-kern-2 avx2 OpenBLAS 0.3.21 ... Zen"). A view of a static
 * string, valid after kern_start. Goes into the function id of a run. */
const char *kern_build_name(void);
/* The core alone ("Zen"), by which golden digests are filed. */
const char *kern_core_name(void);

/* Y[n,o] = X[n,i] W[o,i]^T: one matrix product of a model, with its two backward products. */
struct kern_matmul_shape {
    uint32_t n, i, o;
};

/* ---- threads ---- */

struct kern_pool;

#define KERN_THREADS_MAX 256

/* Makes a pool of `threads` (1 to KERN_THREADS_MAX) including the caller's, so it starts
 * threads - 1. Owned by the caller, who ends it with kern_pool_free. Workers spin at most some
 * microseconds for work, then sleep. */
BL_MUST_CHECK int kern_pool_new(struct kern_pool **ret, uint32_t threads, struct bl_errmsg *msg);
void kern_pool_free(struct kern_pool *pool);              /* NULL is fine */
uint32_t kern_pool_threads(const struct kern_pool *pool); /* 1 for NULL */

/* `task` counts up to the `count` given to kern_pool_run; `worker` is below kern_pool_threads and
 * no two tasks run under one number at a time: for scratch memory only, never for arithmetic. */
typedef void kern_task_fn(void *arg, uint32_t task, uint32_t worker);

/* Runs fn for every task in [0, count) on all threads, in any order, and returns when all are done.
 * One caller at a time; not from inside a task. Sets flush-to-zero on the caller's thread and
 * leaves it set. count is at most KERN_TASKS_MAX. */
#define KERN_TASKS_MAX ((1U << 20) - 1)
void kern_pool_run(struct kern_pool *pool, kern_task_fn *fn, void *arg, uint32_t count);

/* ---- embedding ---- */

/* out[N,C] = weight[token[n],:]. Tokens must be below the rows of weight: the caller checks. */
void kern_embedding_forward(struct kern_pool *pool, float *out, const int32_t *tokens,
                            const float *weight, uint32_t n, uint32_t c);
/* dweight[V,C]: row token[n] += dout[n,:], in the order of n, after zeroing all rows unless add. */
void kern_embedding_backward(struct kern_pool *pool, float *dweight, const float *dout,
                             const int32_t *tokens, uint32_t n, uint32_t c, uint32_t vocab,
                             int add);

/* The same for ranks that have rows [lo, hi) of the table, of which `weight` and `dweight` are the
 * first: a token of another rank gives a row of zeros, and no gradient. Any token of 0 or more. */
void kern_embedding_slice_forward(struct kern_pool *pool, float *out, const int32_t *tokens,
                                  const float *weight, uint32_t n, uint32_t c, uint32_t lo,
                                  uint32_t hi);
void kern_embedding_slice_backward(struct kern_pool *pool, float *dweight, const float *dout,
                                   const int32_t *tokens, uint32_t n, uint32_t c, uint32_t lo,
                                   uint32_t hi, int add);

/* ---- RMSNorm (Zhang and Sennrich 2019) ---- */

/* rstd[n] = 1 / sqrt(sum_c x^2 / C + eps); out[n,c] = x[n,c] * rstd[n] * weight[c]. fp32 sums. */
void kern_rmsnorm_forward(struct kern_pool *pool, float *out, float *rstd, const float *x,
                          const float *weight, uint32_t n, uint32_t c, float eps);
/* With g = dout * weight, h = x * rstd: dx[n,c] += rstd * (g - h * (sum_c g h) / C), always added:
 * it joins the residual stream's gradient. dweight[c] = sum_n dout * h in the order of n, then
 * overwritten or added. */
void kern_rmsnorm_backward(struct kern_pool *pool, float *dx, float *dweight, const float *dout,
                           const float *x, const float *weight, const float *rstd, uint32_t n,
                           uint32_t c, int add);

/* ---- LayerNorm (Ba, Kiros and Hinton 2016) ---- */

/* mean[n] = sum_c x / C; rstd[n] = 1 / sqrt(sum_c (x - mean)^2 / C + eps);
 * out[n,c] = (x - mean) * rstd * weight[c] + bias[c]. fp32 sums. bias NULL: none. */
void kern_layernorm_forward(struct kern_pool *pool, float *out, float *mean, float *rstd,
                            const float *x, const float *weight, const float *bias, uint32_t n,
                            uint32_t c, float eps);
/* With g = dout * weight, h = (x - mean) * rstd: dx[n,c] += rstd * (g - sum_c g / C - h * (sum_c g
 * h) / C), always added. dweight[c] = sum_n dout * h and dbias[c] = sum_n dout in the order of n,
 * then overwritten or added. dbias NULL: no bias. */
void kern_layernorm_backward(struct kern_pool *pool, float *dx, float *dweight, float *dbias,
                             const float *dout, const float *x, const float *weight,
                             const float *mean, const float *rstd, uint32_t n, uint32_t c, int add);

/* ---- biases and learned positions ---- */

/* y[N,O] += bias[O]. */
void kern_bias_forward(struct kern_pool *pool, float *y, const float *bias, uint32_t n, uint32_t o);
/* dbias[o] = sum_n dy[n,o] in the order of n, overwritten or added. */
void kern_bias_backward(struct kern_pool *pool, float *dbias, const float *dy, uint32_t n,
                        uint32_t o, int add);
/* out[n,:] += weight[pos + n mod t_count,:]. */
void kern_position_forward(struct kern_pool *pool, float *out, const float *weight, uint32_t n,
                           uint32_t c, uint32_t t_count, uint32_t pos);
/* dweight[rows,C]: row t below t_count = the sum of dout's rows n with n mod t_count = t, in the
 * order of n, overwritten (the rows behind with zeros) or added. n is a multiple of t_count, which
 * is at most rows. */
void kern_position_backward(struct kern_pool *pool, float *dweight, const float *dout, uint32_t n,
                            uint32_t c, uint32_t t_count, uint32_t rows, int add);

/* ---- rotary positions (Su et al. 2021), the two halves of a head rotated against each other as
 * in the Hugging Face weights ---- */

/* Llama 3's stretching of the frequencies (https://arxiv.org/abs/2407.21783, section 3.4.2; the
 * formula as in Hugging Face transformers' modeling_rope_utils): with the wavelength w = 2 pi / f,
 * f becomes f / factor where w > context / low, stays where w < context / high, and between the two
 * (1 - s) f / factor + s f with s = (context / w - low) / (high - low). */
struct kern_rope_scaling {
    double factor, low, high; /* factor 1: none */
    uint32_t context;         /* tokens that the model was made for before */
};

/* table[T, 2, D/2]: cosines, then sines of t * f_i, f_i = theta^(-2i/D), scaled unless `scaling` is
 * NULL, in fp64, rounded once. D even. */
void kern_rope_table(float *table, uint32_t t_count, uint32_t head_dim, double theta,
                     const struct kern_rope_scaling *scaling);
/* In place on x[B,T,H,D]: position of row n is pos + n mod t_count; (a, b) = (x[i], x[i + D/2])
 * becomes (a cos - b sin, b cos + a sin). */
void kern_rope_forward(struct kern_pool *pool, float *x, const float *table, uint32_t n,
                       uint32_t t_count, uint32_t heads, uint32_t head_dim, uint32_t pos);
/* The inverse rotation of the gradient, in place. */
void kern_rope_backward(struct kern_pool *pool, float *dx, const float *table, uint32_t n,
                        uint32_t t_count, uint32_t heads, uint32_t head_dim);

/* ---- causal attention with grouped queries (Ainslie et al. 2023) ---- */

struct kern_attention_shape {
    uint32_t batch;
    uint32_t q_len;  /* queries: the last q_len positions of the keys */
    uint32_t kv_len; /* keys and values; training: q_len == kv_len */
    uint32_t heads;  /* multiple of kv_heads; head h reads kv head h / (heads / kv_heads) */
    uint32_t kv_heads;
    uint32_t head_dim; /* D */
};

/* Floats of scratch that both directions need, for a pool of this many threads. */
size_t kern_attention_scratch(const struct kern_attention_shape *shape, uint32_t threads);

/* q[B,q_len,H,D], k and v[B,kv_len,KV,D], out[B,q_len,H,D]. s = q k^T / sqrt(D) over keys up to the
 * query's own position, p = softmax(s), out = p v; by blocks of 64 queries. stats[B,H,q_len,2] =
 * the row's largest score and one over its sum of exponentials, for backward. B * H * ceil(q_len /
 * 64) is at most KERN_TASKS_MAX. */
void kern_attention_forward(struct kern_pool *pool, float *out, float *stats, const float *q,
                            const float *k, const float *v, float *scratch,
                            const struct kern_attention_shape *shape);
/* Overwrites dq, dk, dv. Scores are computed again as forward did. dk and dv add over the group's
 * heads in order and, inside a head, over the query blocks in order. */
void kern_attention_backward(struct kern_pool *pool, float *dq, float *dk, float *dv,
                             const float *dout, const float *out, const float *stats,
                             const float *q, const float *k, const float *v, float *scratch,
                             const struct kern_attention_shape *shape);

/* ---- matrix products, on BLAS tiles ---- */

/* y[N,O] = x[N,I] w[O,I]^T (+ y if add). */
void kern_matmul_forward(struct kern_pool *pool, float *y, const float *x, const float *w,
                         struct kern_matmul_shape shape, int add);
/* dx[N,I] = dy[N,O] w[O,I] (+ dx if add). */
void kern_matmul_dx(struct kern_pool *pool, float *dx, const float *dy, const float *w,
                    struct kern_matmul_shape shape, int add);
/* dw[O,I] = dy[N,O]^T x[N,I] (+ dw if add). */
void kern_matmul_dw(struct kern_pool *pool, float *dw, const float *dy, const float *x,
                    struct kern_matmul_shape shape, int add);

/* ---- SwiGLU (Shazeer 2020), elementwise over count ---- */

/* out = gate / (1 + exp(-gate)) * up; out may be gate or up. */
void kern_swiglu_forward(struct kern_pool *pool, float *out, const float *gate, const float *up,
                         size_t count);
/* With s = 1 / (1 + exp(-gate)): dup = dout * gate * s; dgate = dout * up * s * (1 + gate * (1 -
 * s)). dgate may be gate and dup may be up. */
void kern_swiglu_backward(struct kern_pool *pool, float *dgate, float *dup, const float *dout,
                          const float *gate, const float *up, size_t count);

/* ---- GELU, tanh form (Hendrycks and Gimpel 2016), elementwise over count ---- */

/* out = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))). */
void kern_gelu_forward(struct kern_pool *pool, float *out, const float *x, size_t count);
/* dx = dout times the derivative at x; dx may be dout. */
void kern_gelu_backward(struct kern_pool *pool, float *dx, const float *dout, const float *x,
                        size_t count);

/* ---- cross-entropy ---- */

/* logits[N,V] become their own gradient with the constant seed 1: softmax - onehot(target), or stay
 * as they are when `backward` is 0. A target below 0 is ignored (gradient row 0). losses[N] (fp64,
 * scratch) = log(sum exp) - logit[target]: exponentials in fp32 lanes, summed in fp64 every 4,096
 * elements. Returns the losses' sum in the order of n; *ret_count: targets that counted. */
double kern_cross_entropy(struct kern_pool *pool, float *logits, double *losses,
                          const int32_t *targets, uint32_t n, uint32_t vocab, int backward,
                          uint64_t *ret_count);

/* The same in three phases for ranks that have columns [lo, lo + columns) of each row (none, too):
 * between them the ranks exchange what is theirs. Where one rank has all columns the bits are those
 * of kern_cross_entropy. Rows with a target below 0 give zeros.
 * tops[N] = the row's largest logit here, -infinity of no columns. */
void kern_cross_entropy_top(struct kern_pool *pool, float *tops, const float *logits,
                            const int32_t *targets, uint32_t n, uint32_t columns);
/* Given the largest of all ranks: sums[N,2] = the sum of exp(logit - top) over the columns here,
 * and logit[target] - top where the target is here, else 0. With `backward` the exponentials
 * replace the logits. */
void kern_cross_entropy_sum(struct kern_pool *pool, double *sums, float *logits, const float *tops,
                            const int32_t *targets, uint32_t n, uint32_t lo, uint32_t columns,
                            int backward);
/* Given all ranks' sums, added: losses, their sum (equal on all ranks) and the gradient, as
 * kern_cross_entropy does; `logits` holds the exponentials. */
double kern_cross_entropy_finish(struct kern_pool *pool, float *logits, double *losses,
                                 const double *sums, const int32_t *targets, uint32_t n,
                                 uint32_t lo, uint32_t columns, int backward, uint64_t *ret_count);

/* ---- flat operations of the lane tree and the optimizer ---- */

#define KERN_BLOCK 4096U /* elements; ZeRO's borders lie on it */

/* out = a; large copies go past the cache. */
void kern_copy(struct kern_pool *pool, float *out, const float *a, size_t count);
/* out = 0. */
void kern_zero(struct kern_pool *pool, float *out, size_t count);
/* out = a + b; out may be a or b. */
void kern_add(struct kern_pool *pool, float *out, const float *a, const float *b, size_t count);
/* x *= factor */
void kern_scale(struct kern_pool *pool, float *x, float factor, size_t count);
/* sums[i] = fp64 sum of x^2 over block i of KERN_BLOCK elements (the last may be short; then as
 * if padded with zeros); eight lanes. sums holds ceil(count / KERN_BLOCK). */
void kern_sumsq_blocks(struct kern_pool *pool, double *sums, const float *x, size_t count);
/* T(0, count) with T(lo, n) = T(lo, p) + T(lo + p, n - p), p the largest power of two below n: the
 * tree of the lanes, here over numbers. 0 for count 0. */
double kern_tree_sum(const double *values, size_t count);
/* kern_adamw_element (kernels/adamw.h) for count elements. Each out_ array may be its input. */
void kern_adamw(struct kern_pool *pool, float *out_param, float *out_m, float *out_v,
                const float *param, const float *m, const float *v, const float *grad, size_t count,
                const struct kern_adamw_step *step, float weight_decay);

/* ---- random numbers: pure functions of their key and a counter ---- */

/* Key of a stream: of a seed and a name's hash (bl_xxh3), or any two numbers. */
uint64_t kern_rng_key(uint64_t seed, uint64_t name_hash);
/* 64 random bits of a stream at a counter. */
uint64_t kern_rng_bits(uint64_t key, uint64_t counter);
/* Uniform in [0, 1) with 53 bits. */
double kern_rng_uniform(uint64_t key, uint64_t counter);
/* out[j] = stddev * normal number `first + j` of the stream (Box-Muller on counters 2k, 2k + 1 for
 * the numbers 2k, 2k + 1; fp64, rounded once), so any range can be made alone. */
void kern_rng_normal(struct kern_pool *pool, float *out, uint64_t key, uint64_t first, size_t count,
                     double stddev);

/* ---- numeric probe ---- */

/* XXH3 over the output bits of every kernel and of every given product (forward and both
 * backwards) on counter-made input: nodes that may work in one run get the same number. Rows above
 * 512 and products above the size limit are probed on a part that has the same tiling rule.
 * -ENOMEM. */
BL_MUST_CHECK int kern_probe(struct kern_pool *pool, const struct kern_matmul_shape *shapes,
                             uint32_t shape_count, uint64_t *ret_digest, struct bl_errmsg *msg);

#endif
