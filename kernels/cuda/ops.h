/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The functions behind the CUDA back end's struct kern_ops: what each does is said there, in
 * kernels/backend.h; table.c fills the table with them. device.c has life and memory, matmul.c the
 * products, probe.c (CUDA's) the identity, *.cu the rest.
 */
#ifndef KERN_KERNELS_CUDA_OPS_H
#define KERN_KERNELS_CUDA_OPS_H

#include "kernels/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- life and memory ---- */

void kern_cuda_close(struct kern *k);
int kern_cuda_sync(struct kern *k, struct bl_errmsg *msg);
void *kern_cuda_alloc(struct kern *k, uint64_t bytes);
void kern_cuda_free(struct kern *k, void *p, uint64_t bytes);
void kern_cuda_upload(struct kern *k, void *to, const void *host, uint64_t bytes);
void kern_cuda_download(struct kern *k, void *host, const void *from, uint64_t bytes);
void kern_cuda_copy(struct kern *k, void *to, const void *from, uint64_t bytes);
void kern_cuda_zero(struct kern *k, void *to, uint64_t bytes);
void kern_cuda_publish(struct kern *k, void *host, const void *from, uint64_t bytes);
int kern_cuda_publish_wait(struct kern *k, struct bl_errmsg *msg);
int kern_cuda_publish_done(struct kern *k);
int kern_cuda_host_register(struct kern *k, void *host, uint64_t bytes, struct bl_errmsg *msg);
void kern_cuda_host_unregister(struct kern *k, void *host, uint64_t bytes);

/* ---- identity ---- */

const char *kern_cuda_build_name(struct kern *k);
int kern_cuda_probe(struct kern *k, const struct kern_matmul_shape *shapes, uint32_t count,
                    uint64_t *ret_digest, struct bl_errmsg *msg);

/* ---- types ---- */

void kern_cuda_round(struct kern *k, kern_real *out, const float *a, uint64_t count);
void kern_cuda_widen(struct kern *k, float *out, const kern_real *a, uint64_t count);

/* ---- tokens and embedding ---- */

uint64_t kern_cuda_tokens_bytes(struct kern *k, uint32_t n);
void kern_cuda_tokens_set(struct kern *k, struct kern_tokens *t, const int32_t *host, uint32_t n,
                          uint32_t lo, uint32_t hi);
void kern_cuda_embedding_forward(struct kern *k, kern_real *out, const struct kern_tokens *t,
                                 const kern_real *weight, uint32_t c, uint32_t lo, uint32_t hi);
void kern_cuda_embedding_backward(struct kern *k, float *dweight, const kern_real *dout,
                                  const struct kern_tokens *t, uint32_t c, uint32_t lo, uint32_t hi,
                                  int add);
void kern_cuda_position_forward(struct kern *k, kern_real *out, const kern_real *weight, uint32_t n,
                                uint32_t c, uint32_t t_count, uint32_t pos);
void kern_cuda_position_backward(struct kern *k, float *dweight, const kern_real *dout, uint32_t n,
                                 uint32_t c, uint32_t t_count, uint32_t rows, int add);

/* ---- norms ---- */

void kern_cuda_rmsnorm_forward(struct kern *k, kern_real *out, float *rstd, const kern_real *x,
                               const kern_real *weight, uint32_t n, uint32_t c, float eps);
void kern_cuda_rmsnorm_backward(struct kern *k, kern_real *dx, float *dweight,
                                const kern_real *dout, const kern_real *x, const kern_real *weight,
                                const float *rstd, void *scratch, uint32_t n, uint32_t c, int add);
void kern_cuda_layernorm_forward(struct kern *k, kern_real *out, float *mean, float *rstd,
                                 const kern_real *x, const kern_real *weight, const kern_real *bias,
                                 uint32_t n, uint32_t c, float eps);
void kern_cuda_layernorm_backward(struct kern *k, kern_real *dx, float *dweight, float *dbias,
                                  const kern_real *dout, const kern_real *x,
                                  const kern_real *weight, const float *mean, const float *rstd,
                                  void *scratch, uint32_t n, uint32_t c, int add);
uint64_t kern_cuda_norm_scratch(struct kern *k, uint32_t n, uint32_t c);

/* ---- rotary positions ---- */

void kern_cuda_rope_forward(struct kern *k, kern_real *x, const float *table, uint32_t n,
                            uint32_t t_count, uint32_t heads, uint32_t head_dim, uint32_t pos);
void kern_cuda_rope_backward(struct kern *k, kern_real *dx, const float *table, uint32_t n,
                             uint32_t t_count, uint32_t heads, uint32_t head_dim);

/* ---- attention ---- */

uint64_t kern_cuda_attention_scratch(struct kern *k, const struct kern_attention_shape *shape);
void kern_cuda_attention_forward(struct kern *k, kern_real *out, float *stats, const kern_real *q,
                                 const kern_real *kk, const kern_real *v, void *scratch,
                                 const struct kern_attention_shape *shape);
void kern_cuda_attention_backward(struct kern *k, kern_real *dq, kern_real *dk, kern_real *dv,
                                  const kern_real *dout, const kern_real *out, const float *stats,
                                  const kern_real *q, const kern_real *kk, const kern_real *v,
                                  void *scratch, const struct kern_attention_shape *shape);

/* ---- matrix products ---- */

void kern_cuda_matmul_forward(struct kern *k, kern_real *y, const kern_real *x, const kern_real *w,
                              const kern_real *bias, struct kern_matmul_shape shape);
void kern_cuda_matmul_dx(struct kern *k, kern_real *dx, const kern_real *dy, const kern_real *w,
                         struct kern_matmul_shape shape, int add);
void kern_cuda_matmul_dw(struct kern *k, float *dw, const kern_real *dy, const kern_real *x,
                         struct kern_matmul_shape shape, int add);
int kern_cuda_matmul_plan(struct kern *k, const struct kern_matmul_shape *shapes, uint32_t count,
                          struct bl_errmsg *msg);
void kern_cuda_bias_forward(struct kern *k, kern_real *y, const kern_real *bias, uint32_t n,
                            uint32_t o);
void kern_cuda_bias_backward(struct kern *k, float *dbias, const kern_real *dy, void *scratch,
                             uint32_t n, uint32_t o, int add);

/* ---- elementwise ---- */

void kern_cuda_swiglu_forward(struct kern *k, kern_real *out, const kern_real *gate,
                              const kern_real *up, uint64_t count);
void kern_cuda_swiglu_backward(struct kern *k, kern_real *dgate, kern_real *dup,
                               const kern_real *dout, const kern_real *gate, const kern_real *up,
                               uint64_t count);
void kern_cuda_gelu_forward(struct kern *k, kern_real *out, const kern_real *x, uint64_t count);
void kern_cuda_gelu_backward(struct kern *k, kern_real *dx, const kern_real *dout,
                             const kern_real *x, uint64_t count);
void kern_cuda_add_real(struct kern *k, kern_real *out, const kern_real *a, const kern_real *b,
                        uint64_t count);

/* ---- cross-entropy ---- */

void kern_cuda_cross_entropy(struct kern *k, kern_real *logits, double *losses,
                             const struct kern_tokens *t, uint32_t first, uint32_t n,
                             uint32_t vocab, int backward);
void kern_cuda_cross_entropy_top(struct kern *k, float *tops, const kern_real *logits,
                                 const struct kern_tokens *t, uint32_t first, uint32_t n,
                                 uint32_t columns);
void kern_cuda_cross_entropy_sum(struct kern *k, double *sums, kern_real *logits, const float *tops,
                                 const struct kern_tokens *t, uint32_t first, uint32_t n,
                                 uint32_t lo, uint32_t columns, int backward);
void kern_cuda_cross_entropy_finish(struct kern *k, kern_real *logits, double *losses,
                                    const float *tops, const double *sums,
                                    const struct kern_tokens *t, uint32_t first, uint32_t n,
                                    uint32_t lo, uint32_t columns, int backward);
void kern_cuda_loss_total(struct kern *k, double *total, const double *losses, uint32_t n, int add);
void kern_cuda_tops_merge(struct kern *k, float *tops, const float *parts, uint32_t count,
                          uint32_t n);
void kern_cuda_sums_merge(struct kern *k, double *sums, const double *parts, uint32_t count,
                          uint32_t n);

/* ---- flat ---- */

void kern_cuda_add(struct kern *k, float *out, const float *a, const float *b, uint64_t count);
void kern_cuda_scale(struct kern *k, float *x, float factor, uint64_t count);
void kern_cuda_sumsq_blocks(struct kern *k, double *sums, const float *x, uint64_t count);
void kern_cuda_sum_parts(struct kern *k, void *out, const void *parts, uint32_t type,
                         uint32_t count, uint64_t n);
void kern_cuda_adamw(struct kern *k, const struct kern_adamw_part *parts, uint32_t part_count,
                     const struct kern_adamw_step *step);

#ifdef __cplusplus
}
#endif

#endif
