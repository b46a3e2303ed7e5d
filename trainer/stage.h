/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The work of one pipeline stage: a schedule's operations, one after the other, over a model's
 * passes, with messages between the stages under way meanwhile. One stage is a pipeline too: its
 * forwards and backwards alternate and nothing is sent.
 *
 *     receive k operations ahead -> forward or backward -> send, awaited when its buffer is next
 *
 * A message is the residual stream of a micro-batch between two virtual stages, or its gradient:
 * tag (kind, virtual stage that sends, micro-batch).
 */
#ifndef TRAIN_TRAINER_STAGE_H
#define TRAIN_TRAINER_STAGE_H

#include <stdint.h>

#include "base/error.h"
#include "kernels/backend.h"
#include "trainer/comm.h"
#include "trainer/grid.h"
#include "trainer/model.h"
#include "trainer/pipeline.h"

struct train_stage;

struct train_stage_config {
    struct train_model *model; /* kept; the grid's part of it */
    struct kern *kern;         /* kept; where streams are */
    struct train_grid grid;
    uint32_t chunks, sets; /* the model's */
    uint64_t tokens;       /* of a micro-batch */
    uint64_t stream_elems; /* of a micro-batch's residual stream on this rank */
};

/* What a run does besides the passes. Errors end it. */
struct train_work {
    void *ctx;
    struct train_hooks hooks; /* their poke is the run's own: leave it NULL */
    /* Fills tokens and targets[tokens] of a micro-batch: on the first and the last virtual stage,
     * before the forward pass there. */
    int (*read)(void *ctx, uint32_t micro, uint32_t vstage, int32_t *tokens, int32_t *targets,
                struct bl_errmsg *msg);
    /* Before an operation's pass: sets flow->add (whether its gradient adds) of a backward, and
     * flow->loss of a forward. */
    int (*begin)(void *ctx, const struct train_pipe_op *op, struct train_flow *flow,
                 struct bl_errmsg *msg);
    /* After it. */
    int (*end)(void *ctx, const struct train_pipe_op *op, struct bl_errmsg *msg);
    /* Between the units of passes; NULL: nothing to do then. */
    int (*poke)(void *ctx, struct bl_errmsg *msg);
};

/* Takes the buffers of messages and tokens. *ret is owned. -ENOMEM. */
BL_MUST_CHECK int train_stage_new(struct train_stage **ret, const struct train_stage_config *config,
                                  struct bl_errmsg *msg);
void train_stage_free(struct train_stage *stage); /* NULL is fine */

/* Bytes that train_stage_new takes: of the back end's memory for messages, of the host's for
 * tokens. */
uint64_t train_stage_bytes(const struct train_stage_config *config);
uint64_t train_stage_token_bytes(const struct train_stage_config *config);

/* Bytes of messages that may arrive before this rank asks for them (comm_config.early_bytes_max):
 * what the neighbours can be ahead by the bounds of the schedule. */
uint64_t train_stage_early_bytes(const struct train_stage_config *config);

/* Runs all operations of `pipeline` (the config's stage and chunks; no more sets). `comm` NULL:
 * a world of one. The errors of passes, work and communicator; BL_EABORTED soon after an abort.
 * After an error the communicator is of no use. */
BL_MUST_CHECK int train_stage_run(struct train_stage *stage, const struct train_pipeline *pipeline,
                                  const struct train_work *work, struct comm *comm,
                                  struct bl_errmsg *msg);

/* Share of the last run's time in which this rank waited for messages; 0 with one stage. The first
 * stage begins first and ends last, so its share is the pipeline's bubble. */
double train_stage_idle(const struct train_stage *stage);

#endif
