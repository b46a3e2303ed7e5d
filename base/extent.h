/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Extents: how state is described everywhere, in memory, on the wire and on disk.
 *
 * A logical tensor has a name, a kind, a dtype and a global shape. An extent is a part of it: the
 * box that a shard holds and, where ZeRO cuts that box flat, the range [flat_lo, flat_hi) of the
 * box's own row-major order. Who holds an extent never appears in its name, so that any tier can
 * restore any layout. This is the one intersection planner for memory, peers, files and tools.
 */
#ifndef BL_BASE_EXTENT_H
#define BL_BASE_EXTENT_H

#include <stddef.h>
#include <stdint.h>

#include "base/digest.h"
#include "base/error.h"

#define BL_TENSOR_NAME_MAX 128 /* bytes, with the NUL */
#define BL_TENSOR_DIMS_MAX 6

enum bl_dtype {
    BL_F32 = 1,
    BL_BF16 = 2,
    BL_F16 = 3,
    BL_F64 = 4,
    BL_U8 = 5,
    BL_I32 = 6,
    BL_I64 = 7
};

/* Bytes of one element; 0 for an unknown dtype. */
uint32_t bl_dtype_bytes(enum bl_dtype dtype);
/* safetensors' name ("F32", "BF16", ...); NULL for an unknown dtype. */
const char *bl_dtype_name(enum bl_dtype dtype);
/* The dtype of a safetensors name, or 0. */
enum bl_dtype bl_dtype_parse(const char *name);

enum bl_tensor_kind {
    BL_KIND_PARAM = 1,
    BL_KIND_MOMENT1 = 2,
    BL_KIND_MOMENT2 = 3,
    BL_KIND_OTHER = 4
};

struct bl_tensor {
    char name[BL_TENSOR_NAME_MAX];
    enum bl_tensor_kind kind;
    enum bl_dtype dtype;
    uint32_t dims;                      /* 0 is a scalar */
    uint64_t shape[BL_TENSOR_DIMS_MAX]; /* of the whole logical tensor */
};

/* Elements of the whole tensor, or 0 if a dimension is 0 or the product overflows. */
uint64_t bl_tensor_elems(const struct bl_tensor *tensor);

struct bl_extent {
    uint32_t tensor;                 /* index in the table that goes with this list */
    uint64_t lo[BL_TENSOR_DIMS_MAX]; /* box, inclusive */
    uint64_t hi[BL_TENSOR_DIMS_MAX]; /* box, exclusive */
    uint64_t flat_lo;                /* within the box's row-major order, inclusive */
    uint64_t flat_hi;                /* exclusive; the box's element count when not cut flat */
    uint64_t offset; /* bytes: where its first element lies in the holder's buffer */
};

/* Sets `extent` to the flat range [flat_lo, flat_hi) of the whole tensor, offset 0. */
void bl_extent_whole(struct bl_extent *extent, const struct bl_tensor *tensor, uint32_t index,
                     uint64_t flat_lo, uint64_t flat_hi);

/* Elements in the extent (flat_hi - flat_lo). */
uint64_t bl_extent_elems(const struct bl_extent *extent);

/* Checks box and flat range against the tensor's shape. BL_EFORMAT with text if it does not fit. */
BL_MUST_CHECK int bl_extent_check(const struct bl_extent *extent, const struct bl_tensor *tensor,
                                  struct bl_errmsg *msg);

/* A list of extents with its tensor table: what a slot, a part or a rank holds. */
struct bl_extent_list {
    struct bl_tensor *tensors; /* owned */
    uint32_t tensor_count;
    struct bl_extent *extents; /* owned */
    uint32_t extent_count;
};

void bl_extent_list_close(struct bl_extent_list *list);
/* Deep copy into an uninitialised `ret`. */
BL_MUST_CHECK int bl_extent_list_copy(struct bl_extent_list *ret,
                                      const struct bl_extent_list *from);
/* Appends the tensor unless one of that name is there; returns its index in *ret_index. A tensor of
 * the same name with other shape, dtype or kind: BL_EFORMAT. */
BL_MUST_CHECK int bl_extent_list_tensor(struct bl_extent_list *list, const struct bl_tensor *tensor,
                                        uint32_t *ret_index, struct bl_errmsg *msg);
BL_MUST_CHECK int bl_extent_list_add(struct bl_extent_list *list, const struct bl_extent *extent);
/* Lists with the same tensors and extents (offsets included) in the same order. */
int bl_extent_list_equal(const struct bl_extent_list *a, const struct bl_extent_list *b);
/* Adds the state digest of all extents, whose elements lie at base + extent.offset. */
void bl_extent_list_digest(const struct bl_extent_list *list, const void *base,
                           struct bl_state_digest *digest);

/* One contiguous copy from a source buffer to a destination buffer. */
struct bl_run {
    uint32_t dst_extent; /* index in the wanted list */
    uint32_t src;        /* which source */
    uint32_t src_extent; /* index in that source's list */
    uint64_t dst_offset; /* bytes in the destination buffer */
    uint64_t src_offset; /* bytes in the source's buffer */
    uint64_t bytes;
};

struct bl_plan {
    struct bl_run *runs; /* owned; sorted by (src, src_offset) */
    size_t run_count;
    uint64_t missing_elems;                /* wanted elements that no source holds */
    char missing_name[BL_TENSOR_NAME_MAX]; /* the first tensor with a missing element, or "" */
};

/* Plans the copies that fill `wanted` from `sources` (source_count lists, nearest first: an element
 * held by several is taken from the first). Every wanted element is read exactly once. Tensors are
 * matched by name; a shape or dtype that differs is BL_EFORMAT. Adjacent runs are merged.
 * Cost: O(E log E) in the number of extents over all lists plus the runs produced. */
BL_MUST_CHECK int bl_plan_make(struct bl_plan *ret, const struct bl_extent_list *wanted,
                               const struct bl_extent_list *const *sources, uint32_t source_count,
                               struct bl_errmsg *msg);
void bl_plan_close(struct bl_plan *plan);

#endif
