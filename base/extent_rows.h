/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside base: the rows of an extent. A row is a longest run of elements that is contiguous both in
 * the logical tensor's row-major order and in the holder's buffer.
 *
 *        logical 4 x 6 tensor, box [1,3) x [2,5)       flat range [1, 6) of that box
 *          . . . . . .
 *          . . 0 1 2 .                                 rows: logical 9, local 0, count 2
 *          . . 3 4 5 .                                       logical 14, local 2, count 3
 *          . . . . . .
 */
#ifndef BL_BASE_EXTENT_ROWS_H
#define BL_BASE_EXTENT_ROWS_H

#include "base/extent.h"

struct bl_extent_row {
    uint64_t logical; /* first element's row-major index in the whole tensor */
    uint64_t local;   /* elements from extent.offset */
    uint64_t count;   /* elements, at least 1 */
};

struct bl_extent_rows {
    const struct bl_extent *extent;
    const struct bl_tensor *tensor;
    uint32_t dims;                      /* 1 for a scalar */
    uint32_t row_dim;                   /* a row spans this dimension's range and all behind it */
    uint64_t shape[BL_TENSOR_DIMS_MAX]; /* the tensor's, 1 for a scalar */
    uint64_t lo[BL_TENSOR_DIMS_MAX];    /* what is walked: box, clip and flat range together */
    uint64_t hi[BL_TENSOR_DIMS_MAX];
    uint64_t at[BL_TENSOR_DIMS_MAX]; /* next row's coordinate in dimensions before row_dim */
    uint64_t box_lo[BL_TENSOR_DIMS_MAX];
    uint64_t logical_stride[BL_TENSOR_DIMS_MAX];
    uint64_t box_stride[BL_TENSOR_DIMS_MAX];
    uint64_t left; /* rows still to look at */
};

/* Capacity of a list's arrays, which is a function of the count alone: the power of two at or above
 * it, at least 1. */
static inline size_t bl_extent_capacity(uint32_t count)
{
    size_t capacity = 1;
    while (capacity < count) {
        capacity *= 2;
    }
    return capacity;
}

/* Starts a walk of `extent` (checked before by bl_extent_check; borrowed with the tensor), clipped
 * to the box [clip_lo, clip_hi) of logical coordinates unless these are NULL. */
void bl_extent_rows_init(struct bl_extent_rows *rows, const struct bl_extent *extent,
                         const struct bl_tensor *tensor, const uint64_t *clip_lo,
                         const uint64_t *clip_hi);

/* Next row, ascending in both orders. Returns 1, or 0 at the end. */
int bl_extent_rows_next(struct bl_extent_rows *rows, struct bl_extent_row *ret);

/* Passes over the rows that end at or before `logical`. Cost: O(dims). */
void bl_extent_rows_seek(struct bl_extent_rows *rows, uint64_t logical);

#endif
