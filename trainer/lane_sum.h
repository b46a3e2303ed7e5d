/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The sum over lanes, in an order that depends on lanes alone (ordered reduce-scatter).
 *
 * Lanes add as T(lo, n) = T(lo, p) + T(lo + p, n - p), p the largest power of two below n. The
 * planner (base/lanes.h) hands whole subtrees, the pieces, to the dp replicas. A rank makes the
 * sums of its replica's pieces, of its own part of the model, in a stack of gradients; then the
 * pieces' slices are exchanged among the replicas' ranks of the same part, each getting from every
 * piece the range of elements that is its own in the cut (shard.h), and finishing the tree over
 * them:
 *
 *     lanes 0..6 on 3 replicas        replica 0     replica 1    replica 2
 *     T(0,7) = T(0,4) + T(4,3)        T(0,2)        T(2,2)       T(4,3)
 *              |                        \            /             |
 *              T(0,2) + T(2,2)           + (each owner, its slice) +
 *
 * A stage with several chunks works on lanes chunk by chunk, and a chunk may be on the next lane
 * while another still has backwards of the last one to come: each chunk has its own place in the
 * stack, over its own elements of the buffers.
 *
 * With a tied head the slices come in two parts: those of the local order, and of the head's own
 * region, which has the cut of the embedding, on the first stage. There both are added, once.
 */
#ifndef TRAINER_LANE_SUM_H
#define TRAINER_LANE_SUM_H

#include <stdint.h>

#include "base/error.h"
#include "kernels/backend.h"
#include "trainer/comm.h"
#include "trainer/shard.h"

struct lane_sum;

/* Takes all buffers for `lanes` lanes on the shard's replicas, of a stage with `chunks` chunks, in
 * the back end's memory; `dp` below moves it. Keeps `shard` and `kern`. *ret is owned. BL_ELIMIT
 * for more replicas than lanes, -ENOMEM. */
BL_MUST_CHECK int lane_sum_new(struct lane_sum **ret, const struct train_shard *shard,
                               struct kern *kern, uint32_t lanes, uint32_t chunks,
                               struct bl_errmsg *msg);
void lane_sum_free(struct lane_sum *sum); /* NULL is fine */

/* Bytes that lane_sum_new takes for the rank of `shard`. */
uint64_t lane_sum_bytes(const struct train_shard *shard, uint32_t lanes);

/* The lanes of this rank's replica (bl_lanes_load of them), in the order in which they must be
 * done.
 */
uint32_t lane_sum_lane(const struct lane_sum *sum, uint32_t k);
/* Whether the lane is one of replica d's. */
int lane_sum_has(const struct lane_sum *sum, uint32_t d, uint32_t lane);

/* Begins a step: nothing is summed yet. */
void lane_sum_begin(struct lane_sum *sum);

/* Where the gradient of the chunk's next lane goes, as grads[grad_elems] of the model: the same
 * until lane_sum_done. Only the chunk's units of it may be written. */
float *lane_sum_grads(struct lane_sum *sum, uint32_t chunk);

/* The chunk's gradient of that lane is complete: adds what the tree adds now. */
void lane_sum_done(struct lane_sum *sum, uint32_t chunk);

/* All chunks have done all lanes: exchanges slices and finishes the tree. `dp` is the group of the
 * ranks with the same part, in the order of replicas (NULL with one); `comm` leads to the first and
 * the last stage (NULL with one stage). Errors of the communicator. */
BL_MUST_CHECK int lane_sum_finish(struct lane_sum *sum, struct comm_group *dp, struct comm *comm,
                                  struct bl_errmsg *msg);

/* The reduced gradient, head and embedding added, after lane_sum_finish until the next step: of
 * elements [cut_lo, cut_hi) of the local order; with ZeRO 0 of all of it. */
float *lane_sum_slice(struct lane_sum *sum);

#endif
