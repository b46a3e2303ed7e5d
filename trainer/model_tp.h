/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the ranks of a tensor parallel group do together inside a pass. With one rank nothing.
 *
 *               column parallel        row parallel
 *     x [N,C]   q k v, gate up         o, down
 *     whole -->  [N, own outputs]  -->  [N,C] parts -- sum over tp --> whole
 *
 * and backward the same lines the other way: parts of the gradient of x, summed. Between the
 * products of layers the stream is whole on every rank, or with part.sequence cut by rows: rank r
 * has rows [r S, (r + 1) S) of N = tp S, the sum leaves each rank its rows, and before a column
 * parallel product they are gathered.
 *
 * All sums are made in fp32, in the order of the group's ranks: ((r0 + r1) + r2) + ..., and rounded
 * to the storage type once; what every rank then computes from them is the same on all. These are
 * collectives of hooks->tp: all ranks of the group make the same passes. On a device the group is
 * one on its engine (comm_group_on_engine), and what is exchanged lies in the back end's memory.
 * Errors are the communicator's.
 */
#ifndef TRAIN_TRAINER_MODEL_TP_H
#define TRAIN_TRAINER_MODEL_TP_H

#include "trainer/model_internal.h"

/* The stream's rows of this rank in an array of all rows [N,C]. */
kern_real *model_tp_own(const struct train_model *model, kern_real *whole);
/* The first of them. */
uint32_t model_tp_first_row(const struct train_model *model);

/* Parts [N,C] to their sum: of all rows on every rank, with part.sequence of the own rows in their
 * place (the others' are then of no use). */
BL_MUST_CHECK int model_tp_sum(const struct model_pass *p, kern_real *parts, struct bl_errmsg *msg);

/* With part.sequence: own rows in their place to all rows. */
BL_MUST_CHECK int model_tp_gather(const struct model_pass *p, kern_real *whole,
                                  struct bl_errmsg *msg);

/* *ret: all rows of the stream's gradient model->dx; a view, until the next call of a pass. */
BL_MUST_CHECK int model_tp_whole_dx(const struct model_pass *p, const kern_real **ret,
                                    struct bl_errmsg *msg);

/* A row parallel product and its bias, added once, behind the sum: y = sum over tp of x w^T, + b,
 * over the rows of the stream. */
BL_MUST_CHECK int model_tp_row_product(const struct model_pass *p, enum model_layer_tensor which,
                                       kern_real *y, const kern_real *x, struct bl_errmsg *msg);

/* Ranks that share a key and value head each have the gradients dk and dv from their own queries:
 * adds them over the sharers, in the order of ranks. */
BL_MUST_CHECK int model_tp_sum_shared(const struct model_pass *p, struct bl_errmsg *msg);

/* With part.sequence the gradients of a norm are of the own rows: adds them over all ranks, into
 * `dweight` and `dbias` (may be NULL) as the pass says. `parts`: [2,C], weight and bias. */
BL_MUST_CHECK int model_tp_norm_grads(const struct model_pass *p, float *dweight, float *dbias,
                                      float *parts, struct bl_errmsg *msg);

/* Cross-entropy of rows [first, first + n), whose logits are model->logits, over the columns of all
 * ranks: every rank gets the losses, at their place in model->losses. */
BL_MUST_CHECK int model_tp_cross_entropy(const struct model_pass *p, uint32_t first, uint32_t n,
                                         int backward, struct bl_errmsg *msg);

#endif
