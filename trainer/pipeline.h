/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The order in which a pipeline stage works: 1F1B and interleaved 1F1B, for any number of
 * micro-batches. Pure.
 *
 * Stage p of pp holds `chunks` chunks of layers; chunk c of stage p is virtual stage c pp + p. A
 * micro-batch goes forward (F) through the virtual stages in order and backward (B) in reverse. All
 * micro-batches that a replica has in a step, of all its lanes, go one behind the other without a
 * flush. pp 4, one chunk, a forward one column wide and a backward two:
 *
 *     stage 0   0 1 2 3 - - - - - - 0 0 4 1 1 5 2 2 3 3 ...
 *     stage 1     0 1 2 - - - - 0 0 3 1 1 4 2 2 5 3 3 ...
 *     stage 2       0 1 - - 0 0 2 1 1 3 2 2 4 3 3 ...
 *     stage 3         0 0 0 1 1 1 2 2 2 3 3 3 ...
 *
 * Forwards of a stage come in groups of pp micro-batches: the group through chunk 0, through chunk
 * 1, ...; backwards in the same groups, the last chunk first. Within a chunk both come in the order
 * of micro-batches, whatever the layout: sums over micro-batches have one order. What remains, how
 * a stage's forwards and backwards interleave, is found by running all stages with unit costs (1
 * and 2). A stage begins a forward when its input is there and fewer than
 *
 *     pp - p                                 (one chunk)
 *     2 (pp - p - 1) + (chunks - 1) pp + 1   (more: Narayanan et al. 2021, arXiv:2104.04473)
 *
 * micro-batches, counted by chunk, are between forward and backward on it; else a backward when its
 * gradient is there. Where groups are full all stages idle 3 (pp - 1) units in all, the least.
 *
 * It cannot lock up: an order that a run has gone through can be gone through again, with any
 * costs. And the run itself always goes on: let B(g, c, j) be the first backward, in the order
 * (group, chunk from last to first, micro-batch, stage from last to first), that is not done. If c
 * is not the last chunk, the forwards of j are all done, and so is the backward before it: it can
 * begin. If c is the last, take the first forward not done in the order (group, chunk, micro-batch,
 * stage), if it comes before B's own: its input is there, and on its stage at most (chunks - 1) pp
 * forwards lie between it and the backwards done: less than the bound. Otherwise B can begin.
 */
#ifndef TRAIN_TRAINER_PIPELINE_H
#define TRAIN_TRAINER_PIPELINE_H

#include <stdint.h>

#include "base/error.h"

#define TRAIN_PIPELINE_STAGES_MAX 1024u      /* virtual ones: stages times chunks */
#define TRAIN_PIPELINE_OPS_MAX    (1u << 26) /* of a stage in one step */

struct train_pipe_op {
    uint32_t micro; /* from 0, over all lanes of the replica */
    uint16_t chunk;
    uint16_t backward; /* 0: forward */
    uint32_t set;      /* that keeps the activations between forward and backward */
};

struct train_pipeline {
    uint32_t pp, stage, chunks, micros;
    struct train_pipe_op *ops; /* owned; in the order of work */
    uint64_t op_count;         /* chunks * micros, twice with backwards */
    uint32_t sets;             /* that the stage needs: the most in flight at once */
    uint64_t span;             /* unit-cost time from the first operation to the last, all stages */
    uint64_t busy;             /* of which this stage works */
};

/* The operations of `stage`. `backward` 0: forwards only (evaluation), all in set 0. -ENOMEM;
 * BL_ELIMIT for no stage, no chunk, no micro-batch, or more operations than
 * TRAIN_PIPELINE_OPS_MAX. Takes time in proportion to the operations of all stages. *ret is ended
 * by train_pipeline_close and untouched after an error. */
BL_MUST_CHECK int train_pipeline_make(struct train_pipeline *ret, uint32_t pp, uint32_t stage,
                                      uint32_t chunks, uint32_t micros, int backward,
                                      struct bl_errmsg *msg);
void train_pipeline_close(struct train_pipeline *pipeline); /* a zeroed one is fine */

/* Micro-batches that may be between forward and backward on a stage, counted by chunk. */
uint32_t train_pipeline_bound(uint32_t pp, uint32_t stage, uint32_t chunks);

/* Share of the span in which the stage has nothing to do; of one chunk in theory
 * (pp - 1) / (micros + pp - 1). */
double train_pipeline_bubble(const struct train_pipeline *pipeline);

#endif
