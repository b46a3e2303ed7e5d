/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The sum over lanes, in an order that depends on lanes alone (ordered reduce-scatter).
 *
 * Lanes add as T(lo, n) = T(lo, p) + T(lo + p, n - p), p the largest power of two below n. The
 * planner (base/lanes.h) hands whole subtrees, the pieces, to ranks. A rank makes the sums of its
 * pieces depth first, in a stack of whole-gradient buffers; then the pieces' slices are exchanged,
 * each rank getting from every piece the range of elements that it owns, and it finishes the tree
 * over them:
 *
 *     lanes 0..6 on 3 ranks           rank 0        rank 1       rank 2
 *     T(0,7) = T(0,4) + T(4,3)        T(0,2)        T(2,2)       T(4,3)
 *              |                        \            /             |
 *              T(0,2) + T(2,2)           + (each owner, its slice) +
 *
 * With a tied head the slices come in two parts, of the parameters and of the head's own region.
 */
#ifndef TRAINER_LANE_SUM_H
#define TRAINER_LANE_SUM_H

#include <stdint.h>

#include "base/error.h"
#include "kernels/kern.h"
#include "trainer/comm.h"
#include "trainer/shard.h"

struct lane_sum;

/* Writes the whole gradient of one lane into grads[grad_elems]; an error ends the step. */
typedef int lane_grad_fn(void *ctx, uint32_t lane, float *grads, struct bl_errmsg *msg);

/* Takes all buffers for `lanes` lanes on the shard's world. Keeps `shard`. *ret is owned. */
BL_MUST_CHECK int lane_sum_new(struct lane_sum **ret, const struct train_shard *shard,
                               uint32_t lanes, struct bl_errmsg *msg);
void lane_sum_free(struct lane_sum *sum); /* NULL is fine */

/* Bytes that lane_sum_new takes for the rank of `shard`. */
uint64_t lane_sum_bytes(const struct train_shard *shard, uint32_t lanes);

/* Whether the lane is one of this rank's. */
int lane_sum_has(const struct lane_sum *sum, uint32_t lane);

/* Runs `grad` for each of this rank's lanes in order, and reduces. Afterwards the slice holds the
 * sum over all lanes, head and embedding added once. comm may be NULL in a world of one. Errors of
 * `grad` and of the communicator. */
BL_MUST_CHECK int lane_sum_run(struct lane_sum *sum, lane_grad_fn *grad, void *ctx,
                               struct comm *comm, struct kern_pool *pool, struct bl_errmsg *msg);

/* The reduced gradient of elements [own_lo, own_hi) of the flat buffer; valid until the next run.
 */
float *lane_sum_slice(struct lane_sum *sum);

#endif
