/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where a rank stands in the grid of tensor, pipeline and data parallel ranks.
 *
 *     rank = (d * pp + p) * tp + t        tp fastest, then pp, then dp
 *
 * Two replicas of a model on two stages, each cut over two tensor parallel ranks:
 *
 *                  stage p = 0     stage p = 1
 *     replica 0    0 (t 0)  1      2  3          tp group of 5: 4 5
 *     replica 1    4        5      6  7          pp group of 5: 5 7      dp group of 5: 1 5
 *
 * tp is the job's for ever; pp is the plan's (a re-cut pipeline has fewer stages). Pure.
 */
#ifndef TRAIN_TRAINER_GRID_H
#define TRAIN_TRAINER_GRID_H

#include <stdint.h>

#include "base/error.h"

struct train_grid {
    uint32_t rank, world;
    uint32_t tp, pp, dp; /* sizes; their product is world */
    uint32_t t, p, d;    /* coordinates of rank */
};

/* Rank `rank` of `world`. BL_ECONFIG, with the numbers, when world is no multiple of tp * pp or
 * the rank is not in it; *ret is untouched then. */
BL_MUST_CHECK int train_grid_make(struct train_grid *ret, uint32_t rank, uint32_t world,
                                  uint32_t tp, uint32_t pp, struct bl_errmsg *msg);

/* The rank at coordinates that lie in the grid. */
uint32_t train_grid_at(const struct train_grid *grid, uint32_t t, uint32_t p, uint32_t d);

/* The groups of the grid's rank: world ranks, ascending, into ranks[tp], [pp], [dp]. The own place
 * in them is t, p, d. */
void train_grid_tp_group(const struct train_grid *grid, uint32_t *ranks); /* same d, p */
void train_grid_pp_group(const struct train_grid *grid, uint32_t *ranks); /* same d, t */
void train_grid_dp_group(const struct train_grid *grid, uint32_t *ranks); /* same p, t */

/* Chunks of layers that each stage holds: `interleave` where there is more than one stage and
 * every chunk gets a layer, else 1. */
uint32_t train_grid_chunks(const struct train_grid *grid, uint32_t interleave, uint32_t layers);

#endif
