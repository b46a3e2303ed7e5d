/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lanes: the fixed order in which gradients are added, whatever the number of ranks.
 *
 * V lanes add up as the tree
 *
 *     T(lo, 1) = lane lo
 *     T(lo, n) = T(lo, p) + T(lo + p, n - p),   p the largest power of two below n
 *
 * and a rank is handed whole subtrees ("pieces"), so that only the place of an addition changes
 * with the number of ranks, never its operands. V = 7 on 3 ranks:
 *
 *                    (0,7)
 *             (0,4)        (4,3)             rank 0: (0,2)   rank 1: (2,2)   rank 2: (4,3)
 *         (0,2)   (2,2)   (4,2) 6            merges: 0 += 1, 0 += 2  (indexes of pieces)
 *         0   1   2   3   4   5
 *
 * The planner makes first the largest load as small as possible, ceil(V / P) lanes, then the number
 * of pieces: every piece beyond one per rank is sent over the wire by itself.
 */
#ifndef BL_BASE_LANES_H
#define BL_BASE_LANES_H

#include <stdint.h>

#include "base/error.h"

#define BL_LANES_MAX 65536

struct bl_lane_piece { /* the subtree T(lo, n) */
    uint32_t lo;
    uint32_t n;
    uint32_t rank; /* who computes it */
};

/* One addition across pieces: sum[left] = sum[left] + sum[right]. */
struct bl_lane_merge {
    uint32_t left;
    uint32_t right;
};

struct bl_lane_plan {
    uint32_t lanes;
    uint32_t ranks;
    uint32_t piece_count;
    struct bl_lane_piece *pieces; /* owned; ascending lo: together they are lanes 0 to V - 1 */
    struct bl_lane_merge *merges; /* owned; piece_count - 1 of them, in the order to be done; after
                                     all of them pieces[0] holds T(0, V) */
    uint32_t *rank_first;  /* owned; ranks + 1: rank r has rank_pieces[rank_first[r]] up to, not
                              with,  rank_pieces[rank_first[r + 1]] */
    uint32_t *rank_pieces; /* owned; piece indexes, ascending lo within a rank */
    uint32_t load_max;     /* lanes of the most loaded rank */
};

/* Lanes of the left part of T(lo, n), n at least 2. */
uint32_t bl_lanes_split(uint32_t n);

/* Plans `lanes` (1 to BL_LANES_MAX) on `ranks` (1 to lanes). Every rank gets at least one lane;
 * ranks are numbered by their lowest lane. Deterministic; O(V log V). BL_ELIMIT for other numbers.
 */
BL_MUST_CHECK int bl_lanes_plan(struct bl_lane_plan *ret, uint32_t lanes, uint32_t ranks,
                                struct bl_errmsg *msg);
void bl_lanes_close(struct bl_lane_plan *plan);

/* Lanes that `rank` has in all. */
uint32_t bl_lanes_load(const struct bl_lane_plan *plan, uint32_t rank);

/* How a piece is summed with a stack: for each lane from lo to lo + n - 1 push its gradient, then
 * this many times replace the top two, `under` and `top`, by under + top. At the end one is left,
 * T(lo, n). The stack never holds more than bl_lanes_stack(n). */
uint32_t bl_lanes_merges_after(uint32_t lo, uint32_t n, uint32_t lane);

/* The deepest the stack gets for a piece of n lanes: at most ceil(log2 n) + 1. */
uint32_t bl_lanes_stack(uint32_t n);

#endif
