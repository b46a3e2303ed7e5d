/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Back ends: where the kernels of a training step run, and the queue that they run in.
 *
 *     trainer --> struct kern_ops --> kernels/cpu/    threads of this process
 *                                 \-> kernels/cuda/   a GPU, in a plug-in of its own
 *
 * A back end has memory of its own (the CPU's is the process's), a storage type for what passes
 * make (weights, activations and their gradients: `real`), and a queue: operations run in the order
 * of the calls, and may run after the call returns. What the host reads is there after `sync`. Sums
 * are made in fp32 or wider whatever the storage type, in an order that shapes alone fix; a result
 * is rounded to the storage type once, to the nearest, ties to even.
 *
 * The formulas are those of kernels/kern.h, whose functions the CPU's table calls; kernel pointers
 * are of the back end's memory unless said otherwise. Launches return nothing: an error is kept,
 * and comes out of the next `sync`. One thread at a time uses a back end.
 */
#ifndef KERN_KERNELS_BACKEND_H
#define KERN_KERNELS_BACKEND_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "kernels/adamw.h"
#include "kernels/kern.h"

/* An array of the storage type; only kern_real_at moves in it. */
typedef struct kern_real kern_real;

enum kern_type { KERN_F32 = 0, KERN_BF16 = 1 };

struct kern_ops;

/* A back end, first member of what it keeps for itself. */
struct kern {
    const struct kern_ops *ops;
    uint32_t type;       /* enum kern_type, of kern_real */
    uint32_t real_bytes; /* of one element: 4 or 2 */
    uint32_t is_device;  /* its memory is not the host's */
};

static inline kern_real *kern_real_at(const struct kern *k, kern_real *p, uint64_t elems)
{
    return (kern_real *)((char *)p + elems * k->real_bytes);
}

static inline const kern_real *kern_real_view(const struct kern *k, const kern_real *p,
                                              uint64_t elems)
{
    return (const kern_real *)((const char *)p + elems * k->real_bytes);
}

/* Storage of fp32 is an array of float. */
static inline kern_real *kern_real_f32(float *p)
{
    return (kern_real *)(void *)p;
}

static inline const kern_real *kern_real_f32_view(const float *p)
{
    return (const kern_real *)(const void *)p;
}

static inline float *kern_real_floats(kern_real *p)
{
    return (float *)(void *)p;
}

static inline const float *kern_real_floats_view(const kern_real *p)
{
    return (const float *)(const void *)p;
}

/* Tokens or targets of a pass, and, on a device, the order in which the embedding's gradient adds
 * them. Filled by tokens_set; the memory is that of tokens_bytes. */
struct kern_tokens {
    const int32_t *host; /* kept: unchanged until the pass is over */
    void *memory;        /* of the back end; NULL where it needs none */
    uint32_t n;
    uint32_t segments; /* distinct rows within [lo, hi) of tokens_set */
};

/* A range of the optimizer's work: `count` elements of fp32 state and gradient. */
struct kern_adamw_part {
    float *out_param, *out_m, *out_v; /* each may be its input */
    const float *param, *m, *v, *grad;
    uint64_t count;
    float weight_decay;
};

struct kern_ops {
    const char *name; /* "cpu", "cuda" */

    /* ---- life and memory ---- */

    void (*close)(struct kern *k); /* everything allocated is gone too */
    /* All that was called is done; the first error since the last sync, with text. */
    int (*sync)(struct kern *k, struct bl_errmsg *msg);
    /* NULL: no memory left. 256-byte aligned; contents undefined (CPU: zeros). */
    void *(*alloc)(struct kern *k, uint64_t bytes);
    void (*free)(struct kern *k, void *p, uint64_t bytes); /* waits; NULL is fine */
    /* Between host and back end; the host's side is left alone until the next sync. */
    void (*upload)(struct kern *k, void *to, const void *host, uint64_t bytes);
    void (*download)(struct kern *k, void *host, const void *from, uint64_t bytes);
    void (*copy)(struct kern *k, void *to, const void *from, uint64_t bytes);
    void (*zero)(struct kern *k, void *to, uint64_t bytes);
    /* Copy-out on a queue of its own, behind all that was called before: later operations that only
     * read `from` run beside it. Ends by publish_wait, which also waits for nothing else; it fails,
     * too, where an operation called before publish could not be started since the last sync. */
    void (*publish)(struct kern *k, void *host, const void *from, uint64_t bytes);
    int (*publish_wait)(struct kern *k, struct bl_errmsg *msg);
    int (*publish_done)(struct kern *k); /* 1: publish_wait would return at once */
    /* Host memory that publish and download copy to at full speed (page-locked); a hint. */
    int (*host_register)(struct kern *k, void *host, uint64_t bytes, struct bl_errmsg *msg);
    void (*host_unregister)(struct kern *k, void *host, uint64_t bytes);

    /* ---- identity ---- */

    /* What bits depend on besides the arguments, as kern_build_name; on a device, from the probe
     * on, with the algorithms of the products that it was given. */
    const char *(*build_name)(struct kern *k);
    /* As kern_probe. */
    int (*probe)(struct kern *k, const struct kern_matmul_shape *shapes, uint32_t count,
                 uint64_t *ret_digest, struct bl_errmsg *msg);

    /* ---- types ---- */

    void (*round)(struct kern *k, kern_real *out, const float *a, uint64_t count);
    void (*widen)(struct kern *k, float *out, const kern_real *a, uint64_t count);

    /* ---- tokens and embedding ---- */

    uint64_t (*tokens_bytes)(struct kern *k, uint32_t n);
    /* host[n]; rows [lo, hi) of the table are here. */
    void (*tokens_set)(struct kern *k, struct kern_tokens *t, const int32_t *host, uint32_t n,
                       uint32_t lo, uint32_t hi);
    /* kern_embedding_slice_*; dweight in fp32. */
    void (*embedding_forward)(struct kern *k, kern_real *out, const struct kern_tokens *t,
                              const kern_real *weight, uint32_t c, uint32_t lo, uint32_t hi);
    void (*embedding_backward)(struct kern *k, float *dweight, const kern_real *dout,
                               const struct kern_tokens *t, uint32_t c, uint32_t lo, uint32_t hi,
                               int add);
    void (*position_forward)(struct kern *k, kern_real *out, const kern_real *weight, uint32_t n,
                             uint32_t c, uint32_t t_count, uint32_t pos);
    void (*position_backward)(struct kern *k, float *dweight, const kern_real *dout, uint32_t n,
                              uint32_t c, uint32_t t_count, uint32_t rows, int add);

    /* ---- norms: statistics and gradients of weights in fp32 ---- */

    void (*rmsnorm_forward)(struct kern *k, kern_real *out, float *rstd, const kern_real *x,
                            const kern_real *weight, uint32_t n, uint32_t c, float eps);
    /* scratch: norm_scratch bytes. */
    void (*rmsnorm_backward)(struct kern *k, kern_real *dx, float *dweight, const kern_real *dout,
                             const kern_real *x, const kern_real *weight, const float *rstd,
                             void *scratch, uint32_t n, uint32_t c, int add);
    void (*layernorm_forward)(struct kern *k, kern_real *out, float *mean, float *rstd,
                              const kern_real *x, const kern_real *weight, const kern_real *bias,
                              uint32_t n, uint32_t c, float eps);
    void (*layernorm_backward)(struct kern *k, kern_real *dx, float *dweight, float *dbias,
                               const kern_real *dout, const kern_real *x, const kern_real *weight,
                               const float *mean, const float *rstd, void *scratch, uint32_t n,
                               uint32_t c, int add);
    /* Of any norm and of bias_backward, for rows n and columns c; 0: none. */
    uint64_t (*norm_scratch)(struct kern *k, uint32_t n, uint32_t c);

    /* ---- rotary positions: table in fp32, made on the host, uploaded ---- */

    void (*rope_forward)(struct kern *k, kern_real *x, const float *table, uint32_t n,
                         uint32_t t_count, uint32_t heads, uint32_t head_dim, uint32_t pos);
    void (*rope_backward)(struct kern *k, kern_real *dx, const float *table, uint32_t n,
                          uint32_t t_count, uint32_t heads, uint32_t head_dim);

    /* ---- attention; stats in fp32, [B,H,q_len,2] ---- */

    uint64_t (*attention_scratch)(struct kern *k, const struct kern_attention_shape *shape);
    void (*attention_forward)(struct kern *k, kern_real *out, float *stats, const kern_real *q,
                              const kern_real *kk, const kern_real *v, void *scratch,
                              const struct kern_attention_shape *shape);
    void (*attention_backward)(struct kern *k, kern_real *dq, kern_real *dk, kern_real *dv,
                               const kern_real *dout, const kern_real *out, const float *stats,
                               const kern_real *q, const kern_real *kk, const kern_real *v,
                               void *scratch, const struct kern_attention_shape *shape);

    /* ---- matrix products ---- */

    /* y = x w^T + bias (NULL: none), rounded once behind the bias on a device, before and behind it
     * on the CPU (fp32). */
    void (*matmul_forward)(struct kern *k, kern_real *y, const kern_real *x, const kern_real *w,
                           const kern_real *bias, struct kern_matmul_shape shape);
    void (*matmul_dx)(struct kern *k, kern_real *dx, const kern_real *dy, const kern_real *w,
                      struct kern_matmul_shape shape, int add);
    void (*matmul_dw)(struct kern *k, float *dw, const kern_real *dy, const kern_real *x,
                      struct kern_matmul_shape shape, int add);
    /* For shapes that passes will use: on a device chooses algorithms and takes workspace, before
     * any of them is called. BL_ELIMIT for one that cannot be. */
    int (*matmul_plan)(struct kern *k, const struct kern_matmul_shape *shapes, uint32_t count,
                       struct bl_errmsg *msg);
    void (*bias_forward)(struct kern *k, kern_real *y, const kern_real *bias, uint32_t n,
                         uint32_t o);
    void (*bias_backward)(struct kern *k, float *dbias, const kern_real *dy, void *scratch,
                          uint32_t n, uint32_t o, int add);

    /* ---- elementwise ---- */

    void (*swiglu_forward)(struct kern *k, kern_real *out, const kern_real *gate,
                           const kern_real *up, uint64_t count);
    void (*swiglu_backward)(struct kern *k, kern_real *dgate, kern_real *dup, const kern_real *dout,
                            const kern_real *gate, const kern_real *up, uint64_t count);
    void (*gelu_forward)(struct kern *k, kern_real *out, const kern_real *x, uint64_t count);
    void (*gelu_backward)(struct kern *k, kern_real *dx, const kern_real *dout, const kern_real *x,
                          uint64_t count);
    /* out = a + b of the storage type; out may be either. */
    void (*add_real)(struct kern *k, kern_real *out, const kern_real *a, const kern_real *b,
                     uint64_t count);

    /* ---- cross-entropy: kern_cross_entropy*, of rows whose targets are t's [first, first + n).
     * losses[n], sums[n,2] in fp64; tops[n] in fp32 ---- */

    void (*cross_entropy)(struct kern *k, kern_real *logits, double *losses,
                          const struct kern_tokens *t, uint32_t first, uint32_t n, uint32_t vocab,
                          int backward);
    void (*cross_entropy_top)(struct kern *k, float *tops, const kern_real *logits,
                              const struct kern_tokens *t, uint32_t first, uint32_t n,
                              uint32_t columns);
    void (*cross_entropy_sum)(struct kern *k, double *sums, kern_real *logits, const float *tops,
                              const struct kern_tokens *t, uint32_t first, uint32_t n, uint32_t lo,
                              uint32_t columns, int backward);
    /* tops as before sum: where sum leaves the logits as they are (a device, which stores nothing
     * rounded twice), finish makes the exponentials again. */
    void (*cross_entropy_finish)(struct kern *k, kern_real *logits, double *losses,
                                 const float *tops, const double *sums, const struct kern_tokens *t,
                                 uint32_t first, uint32_t n, uint32_t lo, uint32_t columns,
                                 int backward);
    /* *total = (add ? *total : 0) + (((0 + losses[0]) + losses[1]) + ...), one after the other in
     * the order of n (back end's memory); a row whose target is below 0 has the loss 0. */
    void (*loss_total)(struct kern *k, double *total, const double *losses, uint32_t n, int add);
    /* Of every element the largest, and the sum in order, over `count` arrays of n that lie one
     * behind the other: what tensor parallel ranks gathered. The result may be the first array. */
    void (*tops_merge)(struct kern *k, float *tops, const float *parts, uint32_t count, uint32_t n);
    void (*sums_merge)(struct kern *k, double *sums, const double *parts, uint32_t count,
                       uint32_t n);

    /* ---- flat, fp32: gradients, the lane tree, the optimizer ---- */

    void (*add)(struct kern *k, float *out, const float *a, const float *b, uint64_t count);
    void (*scale)(struct kern *k, float *x, float factor, uint64_t count);
    void (*sumsq_blocks)(struct kern *k, double *sums, const float *x, uint64_t count);
    /* out = ((parts[0] + parts[1]) + parts[2]) + ... in fp32, `count` arrays of n elements one
     * behind the other, `type` (enum kern_type) of parts and out, rounded once; out may be the
     * first array. */
    void (*sum_parts)(struct kern *k, void *out, const void *parts, uint32_t type, uint32_t count,
                      uint64_t n);
    /* kern_adamw_element over all parts, in few launches however many there are. */
    void (*adamw)(struct kern *k, const struct kern_adamw_part *parts, uint32_t part_count,
                  const struct kern_adamw_step *step);
};

/* The CPU as a back end, fp32, on a pool (NULL: the caller's thread), which stays the caller's and
 * outlives it. Ended by ops->close. Everything is done when a call returns. -ENOMEM. */
BL_MUST_CHECK int kern_cpu_open(struct kern **ret, struct kern_pool *pool, struct bl_errmsg *msg);
/* The same for sizes only (*_scratch, *_bytes), as with a pool of `threads`; nothing else is
 * called.
 */
BL_MUST_CHECK int kern_cpu_open_sizes(struct kern **ret, uint32_t threads, struct bl_errmsg *msg);
/* The pool of a CPU back end; NULL of another. */
struct kern_pool *kern_cpu_pool(const struct kern *k);

#endif
