/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The state of step 0: random weights, or those of a checkpoint (train.init), and zero moments.
 * Each rank reads what it owns, so the state is the same in every layout.
 */
#ifndef TRAIN_TRAINER_START_H
#define TRAIN_TRAINER_START_H

#include "base/digest.h"
#include "trainer/step.h"

/* Writes the own part of the first state into `slot`, whose extents have their places. With
 * train.init: BL_ECONFIG for another model than the job's, otherwise as ckpt_load. */
BL_MUST_CHECK int train_start(const struct train_rank *rank, void *slot, struct bl_errmsg *msg);

/* The state digest of the checkpoint that train.init names; zeros when it names none. The function
 * id depends on it: other weights, other run. */
BL_MUST_CHECK int train_start_digest(const struct bl_job *job, struct bl_state_digest *ret,
                                     struct bl_errmsg *msg);

#endif
