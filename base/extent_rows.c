/* SPDX-License-Identifier: Apache-2.0 */
#include "base/extent_rows.h"

#include <string.h>

static uint64_t rows_max(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static uint64_t rows_min(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Narrows the walked box to the rows that the flat range can touch, from the outermost dimension
 * inwards for as long as first and last element share a coordinate. */
static void rows_narrow(struct bl_extent_rows *rows)
{
    uint64_t first = rows->extent->flat_lo;
    uint64_t last = rows->extent->flat_hi - 1;
    for (uint32_t d = 0; d < rows->dims; d++) {
        uint64_t q_first = first / rows->box_stride[d];
        uint64_t q_last = last / rows->box_stride[d];
        rows->lo[d] = rows_max(rows->lo[d], rows->box_lo[d] + q_first);
        rows->hi[d] = rows_min(rows->hi[d], rows->box_lo[d] + q_last + 1);
        if (q_first != q_last) {
            break;
        }
        first %= rows->box_stride[d];
        last %= rows->box_stride[d];
    }
}

/* The outermost dimension such that all behind it are walked over the tensor's full width. */
static uint32_t rows_find_dim(const struct bl_extent_rows *rows)
{
    uint32_t d = rows->dims - 1;
    while (d > 0 && rows->lo[d] == 0 && rows->hi[d] == rows->shape[d]) {
        d--;
    }
    return d;
}

void bl_extent_rows_init(struct bl_extent_rows *rows, const struct bl_extent *extent,
                         const struct bl_tensor *tensor, const uint64_t *clip_lo,
                         const uint64_t *clip_hi)
{
    memset(rows, 0, sizeof(*rows));
    rows->extent = extent;
    rows->tensor = tensor;
    rows->dims = tensor->dims > 0 ? tensor->dims : 1;
    for (uint32_t d = 0; d < rows->dims; d++) {
        rows->shape[d] = tensor->dims > 0 ? tensor->shape[d] : 1;
        rows->box_lo[d] = tensor->dims > 0 ? extent->lo[d] : 0;
        rows->lo[d] = rows->box_lo[d];
        rows->hi[d] = tensor->dims > 0 ? extent->hi[d] : 1;
    }
    uint64_t logical = 1;
    uint64_t box = 1;
    for (uint32_t d = rows->dims; d-- > 0;) {
        rows->logical_stride[d] = logical;
        rows->box_stride[d] = box;
        logical *= rows->shape[d];
        box *= rows->hi[d] - rows->lo[d];
    }
    if (extent->flat_lo >= extent->flat_hi) {
        return;
    }
    rows_narrow(rows);
    if (tensor->dims > 0 && clip_lo != NULL && clip_hi != NULL) {
        for (uint32_t d = 0; d < rows->dims; d++) {
            rows->lo[d] = rows_max(rows->lo[d], clip_lo[d]);
            rows->hi[d] = rows_min(rows->hi[d], clip_hi[d]);
        }
    }
    rows->row_dim = rows_find_dim(rows);
    uint64_t left = 1;
    for (uint32_t d = 0; d < rows->dims; d++) {
        if (rows->lo[d] >= rows->hi[d]) {
            return;
        }
        rows->at[d] = rows->lo[d];
        left *= d < rows->row_dim ? rows->hi[d] - rows->lo[d] : 1;
    }
    rows->left = left;
}

/* Steps `at` to the next row's first coordinate. */
static void rows_step(struct bl_extent_rows *rows)
{
    rows->left--;
    for (uint32_t d = rows->row_dim; d-- > 0;) {
        if (++rows->at[d] < rows->hi[d]) {
            return;
        }
        rows->at[d] = rows->lo[d];
    }
}

int bl_extent_rows_next(struct bl_extent_rows *rows, struct bl_extent_row *ret)
{
    while (rows->left > 0) {
        uint64_t logical = 0;
        uint64_t box = 0;
        for (uint32_t d = 0; d < rows->dims; d++) {
            logical += rows->at[d] * rows->logical_stride[d];
            box += (rows->at[d] - rows->box_lo[d]) * rows->box_stride[d];
        }
        uint64_t count = (rows->hi[rows->row_dim] - rows->lo[rows->row_dim]) *
                         rows->logical_stride[rows->row_dim];
        rows_step(rows);
        uint64_t lo = rows_max(box, rows->extent->flat_lo);
        uint64_t hi = rows_min(box + count, rows->extent->flat_hi);
        if (lo < hi) {
            ret->logical = logical + (lo - box);
            ret->local = lo - rows->extent->flat_lo;
            ret->count = hi - lo;
            return 1;
        }
    }
    return 0;
}

/* Rows from `at` to the end: `at` written with a digit for each dimension before row_dim. */
static uint64_t rows_left(const struct bl_extent_rows *rows)
{
    uint64_t passed = 0;
    uint64_t all = 1;
    for (uint32_t d = 0; d < rows->row_dim; d++) {
        uint64_t width = rows->hi[d] - rows->lo[d];
        passed = passed * width + (rows->at[d] - rows->lo[d]);
        all *= width;
    }
    return all - passed;
}

void bl_extent_rows_seek(struct bl_extent_rows *rows, uint64_t logical)
{
    uint64_t now = 0;
    for (uint32_t d = 0; d < rows->dims; d++) {
        now += rows->at[d] * rows->logical_stride[d];
    }
    if (rows->left == 0 || now >= logical) {
        return;
    }
    uint64_t rest = logical;
    uint32_t d = 0;
    for (; d <= rows->row_dim; d++) {
        uint64_t coord = rest / rows->logical_stride[d];
        rest -= coord * rows->logical_stride[d];
        if (coord < rows->lo[d]) {
            break; /* the first row with the coordinates so far is behind `logical` */
        }
        if (coord >= rows->hi[d]) { /* the last one with the coordinates before d is not */
            while (d > 0 && ++rows->at[d - 1] >= rows->hi[d - 1]) {
                d--;
            }
            if (d == 0) {
                rows->left = 0;
                return;
            }
            break;
        }
        if (d < rows->row_dim) {
            rows->at[d] = coord;
        }
    }
    for (; d < rows->row_dim; d++) {
        rows->at[d] = rows->lo[d];
    }
    rows->left = rows_left(rows);
}
