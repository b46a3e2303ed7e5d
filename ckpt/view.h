/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A view: named tensors that can be read range by range, wherever they lie: in a checkpoint, in
 * safetensors files, in a llama2.c file, or in another view under other names and orientations.
 * What compares, exports, imports or samples asks a view and knows no format. Memory is bounded: a
 * view never holds a tensor.
 *
 * A view belongs to one thread at a time.
 */
#ifndef BL_CKPT_VIEW_H
#define BL_CKPT_VIEW_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "base/extent.h"
#include "ckpt/convert.h"
#include "ckpt/hf.h"
#include "ckpt/reader.h"

struct ckpt_view;

struct ckpt_view_ops {
    /* `extent` was checked against its tensor. */
    int (*read)(struct ckpt_view *view, const struct bl_extent *extent, void *dest,
                struct bl_errmsg *msg);
    void (*close)(struct ckpt_view *view);
};

struct ckpt_view {
    const struct ckpt_view_ops *ops;
    struct bl_tensor *tensors; /* sorted by name, each name once */
    uint32_t tensor_count;
};

/* NULL is fine. */
void ckpt_view_close(struct ckpt_view *view);

/* Index of the tensor `name`, or -1. */
int64_t ckpt_view_find(const struct ckpt_view *view, const char *name);

/* Reads the elements of `extent` (tensor: index in the view; offset: not looked at) in its flat
 * order, as they are stored, to dest. BL_EFORMAT for an extent that does not fit its tensor;
 * otherwise what the source says. */
BL_MUST_CHECK int ckpt_view_read(struct ckpt_view *view, const struct bl_extent *extent, void *dest,
                                 struct bl_errmsg *msg);
/* The same for elements [lo, hi) of the whole tensor. */
BL_MUST_CHECK int ckpt_view_read_flat(struct ckpt_view *view, uint32_t tensor, uint64_t lo,
                                      uint64_t hi, void *dest, struct bl_errmsg *msg);

/* The tensors of a checkpoint, through a reader that is opened here with these arguments
 * (ckpt/reader.h says what is borrowed and healed). */
BL_MUST_CHECK int ckpt_view_checkpoint(struct ckpt_view **ret, const struct ckpt_place *places,
                                       uint32_t place_count,
                                       const struct ckpt_reader_config *config,
                                       struct bl_errmsg *msg);
/* The manifest of a view that ckpt_view_checkpoint made; view of it. */
const struct ckpt_manifest *ckpt_view_manifest(const struct ckpt_view *view);

/* Belay's tensors, in F32, out of a view with theirs. Both arguments are borrowed for the view's
 * life. A tensor whose source is not in `theirs`, or has another shape or a dtype that is no float,
 * is left out: ckpt_map_compare says which. Only ranges of whole tensors can be read. */
BL_MUST_CHECK int ckpt_view_ours(struct ckpt_view **ret, struct ckpt_view *theirs,
                                 const struct ckpt_map_list *maps, struct bl_errmsg *msg);

/* Their tensors, as `dtype`, out of a view with Belay's. Borrows as above. A tensor of theirs whose
 * parts are not all in `ours` is left out. Ranges of whole tensors, and of whole rows where they
 * are transposed, can be read; `overflow` says what is done with values that do not fit:
 * CKPT_OVERFLOW_REFUSE ends the read with BL_ELIMIT and tensor and value in the text. */
BL_MUST_CHECK int ckpt_view_theirs(struct ckpt_view **ret, struct ckpt_view *ours,
                                   const struct ckpt_map_list *maps, enum bl_dtype dtype,
                                   enum ckpt_overflow overflow, struct bl_errmsg *msg);

/* For tests: how much of a transposed tensor such a view reads at once, before the first read. A
 * row of theirs must fit. */
void ckpt_view_panel(struct ckpt_view *view, size_t bytes);

/* Compares what `maps` wants with what the view of theirs has: calls `found` for each difference
 * (kind "missing", "extra", "shape", "dtype"; the name; a sentence). Buffers are no extras. */
void ckpt_map_compare(const struct ckpt_map_list *maps, const struct ckpt_view *theirs,
                      void (*found)(void *arg, const char *kind, const char *name,
                                    const char *text),
                      void *arg);

/* For the implementations: sorts and checks names, which must differ. Takes nothing. */
BL_MUST_CHECK int ckpt_view_sort(struct ckpt_view *view, struct bl_errmsg *msg);

#endif
