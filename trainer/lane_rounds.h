/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The sum over lanes of ZeRO 2 and 3: as lane_sum.h, bit for bit, but no rank ever holds a whole
 * gradient. For lanes of one micro-batch on one stage.
 *
 * Lanes are dealt round-robin: in round r replica d works on lane r dp + d. As soon as a unit's
 * backward is done its gradient is exchanged: each owner gets its part of it from every lane of the
 * round, in the order of lanes, and adds what the tree adds then, in a stack of its own slices (at
 * most ceil(log2 V) + 1 of them). All ranks of the group make the same exchanges in the same order,
 * also those that have no lane in the last round.
 *
 *     lanes 0..6 on 3 replicas    round 0: 0 1 2    round 1: 3 4 5    round 2: 6 - -
 *     an owner's stack after      2, T(0,2)         T(4,2), T(0,4)    T(0,7)
 */
#ifndef TRAINER_LANE_ROUNDS_H
#define TRAINER_LANE_ROUNDS_H

#include <stdint.h>

#include "base/error.h"
#include "kernels/backend.h"
#include "trainer/comm.h"
#include "trainer/shard.h"

struct lane_rounds;

/* Takes all buffers, in the back end's memory; `dp` below moves it. Keeps `shard` and `kern`. *ret
 * is owned. -ENOMEM; BL_ELIMIT for more replicas than lanes. */
BL_MUST_CHECK int lane_rounds_new(struct lane_rounds **ret, const struct train_shard *shard,
                                  struct kern *kern, uint32_t lanes, struct bl_errmsg *msg);
void lane_rounds_free(struct lane_rounds *rounds); /* NULL is fine */

/* Bytes that lane_rounds_new takes for the rank of `shard`. */
uint64_t lane_rounds_bytes(const struct train_shard *shard, uint32_t lanes);

/* Begins a step: nothing is summed yet. */
void lane_rounds_begin(struct lane_rounds *rounds);

/* Where the unit's gradient of the round goes; one unit at a time. */
float *lane_rounds_grads(struct lane_rounds *rounds);

/* The unit's gradient of its next round is complete (or this rank has no lane in that round).
 * `dp`: the ranks with the same part, in the order of replicas; NULL with one. Errors of the
 * communicator. */
BL_MUST_CHECK int lane_rounds_done(struct lane_rounds *rounds, uint32_t unit, struct comm_group *dp,
                                   struct bl_errmsg *msg);

/* All units have done all rounds: head and embedding are added. */
void lane_rounds_finish(struct lane_rounds *rounds);

/* The reduced gradient of elements [cut_lo, cut_hi) of the local order, after lane_rounds_finish
 * until the next step. */
float *lane_rounds_slice(struct lane_rounds *rounds);

#endif
