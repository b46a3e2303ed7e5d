/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where a rank's passes find weights and leave gradients, and which lanes the rank works on: both
 * depend on its ZeRO stage.
 *
 *     weights     the working buffer; ZeRO 3 on one stage: each unit from the owners' slots
 *     gradients   whole, in the lanes' stack (lane_sum.h); ZeRO 2 and 3 on one stage with lanes of
 *                 one micro-batch: unit by unit to the owners (lane_rounds.h)
 */
#ifndef TRAIN_TRAINER_RANK_HOOKS_H
#define TRAIN_TRAINER_RANK_HOOKS_H

#include <stdint.h>

#include "trainer/step.h"

struct train_rank_hooks {
    struct train_rank *rank; /* kept */
    float *grads;            /* of the lane in work, with whole gradients; NULL: passes go idle */
    struct train_plain plain;
};

/* Hooks of a placed and joined rank; `state` is filled, and kept by the hooks. */
struct train_hooks train_rank_hooks(struct train_rank_hooks *state, struct train_rank *rank);

/* Whether the ranks of a dp group must make the same passes: their hooks exchange. */
int train_rank_is_in_step(const struct train_rank *rank);

/* Makes the calls of `count` forward (and backward) passes without work, so that all ranks of the
 * dp group make the same ones. Errors of the hooks. */
BL_MUST_CHECK int train_rank_idle(struct train_rank *rank, uint32_t count, int backward,
                                  struct bl_errmsg *msg);

/* Lanes of this rank's replica, in the order of work; those of the replica that has most; which. */
uint32_t train_rank_lanes(const struct train_rank *rank);
uint32_t train_rank_lanes_max(const struct train_rank *rank);
uint32_t train_rank_lane(const struct train_rank *rank, uint32_t k);
int train_rank_has_lane(const struct train_rank *rank, uint32_t d, uint32_t lane);

#endif
