/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One rank's part of a training step.
 *
 *     train_step_gradient   forward and backward of the own lanes, lane tree, norm, clip scale: all
 *                           that must be complete before the vote. Touches no state.
 *     (vote)
 *     train_step_apply      AdamW from the slot of step n - 1 into the slot of step n; cannot fail
 *     train_step_gather     everybody's new weights into the working buffer
 *
 * The bits of all results are functions of job, data and step: not of rank, world or threads.
 */
#ifndef TRAINER_STEP_H
#define TRAINER_STEP_H

#include <stdint.h>
#include <stdio.h>

#include "base/error.h"
#include "base/job.h"
#include "kernels/kern.h"
#include "trainer/comm.h"
#include "trainer/data.h"
#include "trainer/lane_sum.h"
#include "trainer/model.h"
#include "trainer/shard.h"

struct train_rank {
    const struct bl_job *job; /* kept */
    struct kern_pool *pool;
    struct train_model *model;
    struct train_data *data;
    float *params; /* working buffer: all weights of the newest gathered step */
    uint64_t params_bytes;
    int32_t *tokens, *targets; /* [micro_batch, seq_len] */
    double *block_sums;        /* one for each block of the flat buffer */
    double *losses;            /* of lanes or of evaluation batches */
    uint32_t micro_batches;    /* of a lane in one step */
    FILE *ledger;              /* "step lane sample" lines; NULL: none; owned by the caller */
    /* Of the present generation: */
    struct comm *comm; /* borrowed; NULL in a world of one without peers */
    struct train_shard shard;
    struct lane_sum *sum;
    uint64_t *gather_bounds, *block_bounds; /* bytes; world + 1 entries */
};

struct train_step_result {
    uint64_t step;
    double loss;      /* mean over the step's tokens */
    double grad_norm; /* of the mean loss, before clipping */
    double lr;
    uint64_t tokens;
    float grad_scale; /* 1 / tokens times the clip factor */
};

/* Opens data, model and buffers for a job. `rank` is caller's memory, ended by train_rank_close,
 * also after an error. BL_ECONFIG for a job that cannot work; -ENOMEM. `threads` 0: the job's. */
BL_MUST_CHECK int train_rank_open(struct train_rank *rank, const struct bl_job *job,
                                  uint32_t threads, struct bl_errmsg *msg);
void train_rank_close(struct train_rank *rank);

/* Becomes rank `index` of `world`: cuts the state, takes the gradient buffers. Keeps what it has
 * when nothing changed. Sets no communicator. */
BL_MUST_CHECK int train_rank_place(struct train_rank *rank, uint32_t index, uint32_t world,
                                   struct bl_errmsg *msg);

/* BL_ENUMERIC with a text when the norm is not finite: then the step must not be voted. Errors of
 * the communicator as they are. */
BL_MUST_CHECK int train_step_gradient(struct train_rank *rank, uint64_t step,
                                      struct train_step_result *ret, struct bl_errmsg *msg);

/* `from` is the slot of step - 1, `to` that of step; all of the rank's extents are written. */
void train_step_apply(struct train_rank *rank, const struct train_step_result *step,
                      const void *from, void *to);

/* Fills rank->params with the weights that all ranks' slots hold. Errors of the communicator; then
 * rank->params is undefined until the next gather. */
BL_MUST_CHECK int train_step_gather(struct train_rank *rank, const void *slot,
                                    struct bl_errmsg *msg);

/* Mean loss over the held-out batches (train.eval_batches of micro_batch sequences). */
BL_MUST_CHECK int train_eval(struct train_rank *rank, double *ret_loss, struct bl_errmsg *msg);

/* State digest of what all ranks hold in their slots. */
BL_MUST_CHECK int train_digest(struct train_rank *rank, const void *slot,
                               struct bl_state_digest *ret, struct bl_errmsg *msg);

#endif
