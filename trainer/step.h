/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One rank's part of a training step.
 *
 *     train_step_gradient   forward and backward of the own lanes, lane tree, norm, clip scale: all
 *                           that must be complete before the vote. Touches no state.
 *     (vote)
 *     train_step_apply      AdamW from the slot of step n - 1 into the slot of step n; cannot fail.
 *                           On a device: in place, then out into the slot while training goes on
 *     train_step_gather     everybody's new weights into the working buffer
 *
 * The bits of all results are functions of job, data and step: not of rank, world, stages, ZeRO
 * stage or threads. tp is part of the job.
 *
 * Life: train_rank_open; for each generation train_rank_place (memory, what is owned), then
 * train_rank_join with the generation's communicator, steps, train_rank_leave; train_rank_close.
 */
#ifndef TRAINER_STEP_H
#define TRAINER_STEP_H

#include <stdint.h>
#include <stdio.h>

#include "base/error.h"
#include "base/job.h"
#include "kernels/backend.h"
#include "trainer/backend.h"
#include "trainer/comm.h"
#include "trainer/data.h"
#include "trainer/fetch.h"
#include "trainer/gather.h"
#include "trainer/grid.h"
#include "trainer/lane_rounds.h"
#include "trainer/lane_sum.h"
#include "trainer/model.h"
#include "trainer/norm.h"
#include "trainer/pipeline.h"
#include "trainer/shard.h"
#include "trainer/stage.h"
#include "trainer/state.h"

struct train_rank {
    const struct bl_job *job; /* kept */
    uint32_t threads;
    struct kern_pool *pool;
    struct train_backend backend;
    struct kern *kern;         /* the CPU's: on the pool; a device's may change with the place */
    uint64_t arena_bytes;      /* of a device; 0: it gives memory piece by piece */
    struct train_model *model; /* until train_rank_place: the table alone, of the first tp rank;
                                  NULL after one that failed */
    uint32_t has_passes;       /* the model is that of `part`, with its memory */
    struct train_data *data;
    double *losses;         /* of lanes or of evaluation batches */
    double *pass_losses;    /* the same in the back end's memory, where passes add */
    uint32_t loss_count;    /* room of both */
    uint32_t micro_batches; /* of a lane in one step */
    FILE *ledger;           /* "step lane sample" lines; NULL: none; owned by the caller */
    /* Of the present place: */
    struct train_grid grid;
    struct train_part part;
    struct train_pipeline pipeline; /* the order of a step's passes */
    struct train_shard shard;
    struct train_stage *stage;
    struct lane_sum *sum;       /* one of the two; neither: no place yet */
    struct lane_rounds *rounds; /* ZeRO 2 and 3, where no whole gradients are needed */
    struct train_fetch fetch;   /* ZeRO 3 on one stage, else zeros */
    struct train_norm norm;
    struct train_gather gather;
    struct train_state state; /* on a device; else not in use, and slots are the state */
    kern_real *params; /* working buffer: the part's weights of the newest gathered step; NULL with
                          `fetch` */
    uint64_t params_bytes;
    /* Of the present generation; groups are NULL where there is one member: */
    struct comm *comm;                  /* borrowed; NULL in a world of one without peers */
    struct comm_group *tp, *dp;         /* of the back end's memory */
    struct comm_group *tp_host, *plane; /* of the host's */
    /* On a device the newest slot is complete some time after train_step_apply: called (NULL: not)
     * between passes with `must` 0, and with 1 before the host waits for the device. */
    int (*slot_ready)(void *ctx, int must, struct bl_errmsg *msg);
    void *slot_ctx;
};

/* The reduced gradient of what the rank owns, from train_step_gradient to the next one: elements
 * [shard.own_lo, own_hi) of the local order. */
float *train_rank_slice(struct train_rank *rank);

struct train_step_result {
    uint64_t step;
    double loss;      /* mean over the step's tokens */
    double grad_norm; /* of the mean loss, before clipping */
    double lr;
    uint64_t tokens;
    float grad_scale; /* 1 / tokens times the clip factor */
    double idle;      /* share of the passes' time that this rank waited for its neighbours */
};

/* Opens data and checks the model for a job. `rank` is caller's memory, ended by
 * train_rank_close, also after an error. BL_ECONFIG for a job that cannot work; -ENOMEM; errors of
 * train_backend_choose, which `local_rank` is for. `threads` 0: the job's. */
BL_MUST_CHECK int train_rank_open(struct train_rank *rank, const struct bl_job *job,
                                  uint32_t local_rank, uint32_t threads, struct bl_errmsg *msg);
void train_rank_close(struct train_rank *rank);

/* Becomes the grid's rank: takes its part of the model, cuts the state, takes the buffers. Keeps
 * what it has when nothing changed. Not while joined. On a device takes it anew when the place
 * wants more memory than it has; BL_ECONFIG with the sum when the device has less. */
BL_MUST_CHECK int train_rank_place(struct train_rank *rank, const struct train_grid *grid,
                                   struct bl_errmsg *msg);

/* Whether lanes are dealt round-robin (lane_rounds.h: ZeRO 2 and 3 where no whole gradient is
 * needed), and whether weights come unit by unit (fetch.h: ZeRO 3), in a layout of `pp` stages. */
int train_place_has_rounds(const struct bl_job *job, uint32_t pp);
int train_place_has_fetch(const struct bl_job *job, uint32_t pp);

/* Bytes for comm_config.early_bytes_max of a placed rank. */
uint64_t train_rank_early_bytes(const struct train_rank *rank);

/* Takes the groups of a placed rank; `comm` (NULL in a world of one) need not be connected yet. It
 * is borrowed until train_rank_leave, which comes before comm_free. -ENOMEM. */
BL_MUST_CHECK int train_rank_join(struct train_rank *rank, struct comm *comm,
                                  struct bl_errmsg *msg);
/* After comm_connect, by all ranks: on a device opens the engine, with its groups and channels,
 * which comm_free closes. Errors of the communicator; BL_ENOTBUILT without an engine. */
BL_MUST_CHECK int train_rank_attach(struct train_rank *rank, uint32_t deadline_ms,
                                    struct bl_errmsg *msg);
void train_rank_leave(struct train_rank *rank); /* one that did not join is fine */

/* Waits for the back end; what it was called to do, messages too, is good: else the error of
 * either.
 */
BL_MUST_CHECK int train_rank_sync(struct train_rank *rank, struct bl_errmsg *msg);

/* Passes add from now on to where train_rank_loss says; then waits for the back end and has the
 * first `count` on the host. Its errors. */
void train_losses_begin(struct train_rank *rank);
BL_MUST_CHECK int train_losses_end(struct train_rank *rank, uint32_t count, struct bl_errmsg *msg);
/* For a pass's flow.loss; NULL on the tensor parallel ranks but the first, which have the same. */
double *train_rank_loss(struct train_rank *rank, uint32_t at);

/* Makes each rank's losses everybody's: the `count` first, of which each is zero on all ranks but
 * one. */
BL_MUST_CHECK int train_share_losses(struct train_rank *rank, uint32_t count,
                                     struct bl_errmsg *msg);

/* BL_ENUMERIC with a text when the norm is not finite: then the step must not be voted. Errors of
 * the communicator as they are. */
BL_MUST_CHECK int train_step_gradient(struct train_rank *rank, uint64_t step,
                                      struct train_step_result *ret, struct bl_errmsg *msg);

/* Before the first gather of a generation, and after train_start: the state is what `slot` holds.
 * Errors of the back end. */
BL_MUST_CHECK int train_rank_load(struct train_rank *rank, const void *slot, struct bl_errmsg *msg);

/* Before slots' memory may go away: a device lets go of it. Not with a slot that is not complete.
 */
void train_rank_forget(struct train_rank *rank);

/* `from` is the slot of step - 1, `to` that of step; all of the rank's extents are written, on a
 * device not before train_rank_wait. */
void train_step_apply(struct train_rank *rank, const struct train_step_result *step,
                      const void *from, void *to);

/* Waits until the slot of the last train_step_apply is complete: before it is sealed or read.
 * Errors of the back end: then it must not be. */
BL_MUST_CHECK int train_rank_wait(struct train_rank *rank, struct bl_errmsg *msg);
/* Whether train_rank_wait would return at once. */
int train_rank_is_out(struct train_rank *rank);

/* Fills rank->params with the weights that all ranks' slots hold. Errors of the communicator; then
 * rank->params is undefined until the next gather. With ZeRO 3 on one stage only notes the slot,
 * which must stay until the next call: passes take weights from it. */
BL_MUST_CHECK int train_step_gather(struct train_rank *rank, const void *slot,
                                    struct bl_errmsg *msg);

/* Mean loss over the held-out batches (train.eval_batches of micro_batch sequences). */
BL_MUST_CHECK int train_eval(struct train_rank *rank, double *ret_loss, struct bl_errmsg *msg);

/* State digest of what all ranks hold in their slots. */
BL_MUST_CHECK int train_digest(struct train_rank *rank, const void *slot,
                               struct bl_state_digest *ret, struct bl_errmsg *msg);

#endif
