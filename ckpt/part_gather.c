/* SPDX-License-Identifier: Apache-2.0 */
/* What goes into a part: the extents of all sources in file order, each once, and their bytes. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/part_write.h"

/* File order: wide types first, so that everything stays aligned; then name, box, range. */
static int file_order(const struct bl_extent *a, const struct bl_tensor *a_tensor,
                      const struct bl_extent *b, const struct bl_tensor *b_tensor)
{
    uint32_t a_bytes = bl_dtype_bytes(a_tensor->dtype), b_bytes = bl_dtype_bytes(b_tensor->dtype);

    if (a_bytes != b_bytes) {
        return a_bytes > b_bytes ? -1 : 1;
    }
    return ckpt_extent_order(a, a_tensor, b, b_tensor);
}

static int piece_order(const void *a_, const void *b_)
{
    const struct ckpt_piece *a = a_, *b = b_;

    return file_order(a->extent, a->tensor, b->extent, b->tensor);
}

static int list_order(const void *a_, const void *b_, void *arg)
{
    const struct bl_extent *a = a_, *b = b_;
    const struct bl_extent_list *list = arg;

    return file_order(a, &list->tensors[a->tensor], b, &list->tensors[b->tensor]);
}

int ckpt_part_sort(struct bl_extent_list *list)
{
    for (uint32_t i = 0; i < list->extent_count; i++) {
        if (list->extents[i].tensor >= list->tensor_count) {
            return BL_EFORMAT;
        }
    }
    if (list->extent_count > 1) {
        qsort_r(list->extents, list->extent_count, sizeof(*list->extents), list_order, list);
    }
    return 0;
}

void ckpt_pieces_close(struct ckpt_pieces *pieces)
{
    free(pieces->pieces);
    memset(pieces, 0, sizeof(*pieces));
}

/* Adds the non-empty extents of one source. */
static int gather_source(struct ckpt_pieces *pieces, const struct ckpt_source *source,
                         struct bl_errmsg *msg)
{
    const struct bl_extent_list *list = source->list;

    for (uint32_t i = 0; i < list->extent_count; i++) {
        const struct bl_extent *extent = &list->extents[i];
        const struct bl_tensor *tensor = &list->tensors[extent->tensor];
        int rc = bl_extent_check(extent, tensor, msg);

        if (rc < 0) {
            return rc;
        }
        if (!ckpt_name_is_plain(tensor->name)) {
            return bl_err(msg, BL_EFORMAT, "tensor name \"%s\" cannot stand in a checkpoint",
                          tensor->name);
        }
        if (bl_extent_elems(extent) == 0) {
            continue;
        }
        if (source->base == NULL && source->fetch == NULL) {
            return bl_err(msg, BL_EFORMAT, "tensor %s: a source without data", tensor->name);
        }
        pieces->pieces[pieces->count++] = (struct ckpt_piece){tensor, extent, source, i, 0};
    }
    return 0;
}

int ckpt_pieces_gather(struct ckpt_pieces *ret, const struct ckpt_part_job *job,
                       struct bl_errmsg *msg)
{
    struct ckpt_pieces pieces = {0};
    size_t count = 0;
    uint32_t kept = 0;
    int rc = 0;

    for (uint32_t s = 0; s < job->source_count; s++) {
        count += job->sources[s].list->extent_count;
    }
    if (count > CKPT_EXTENTS_MAX) {
        return bl_err(msg, BL_ELIMIT, "%zu extents, at most %d go into a part", count,
                      CKPT_EXTENTS_MAX);
    }
    pieces.pieces = calloc(count + 1, sizeof(*pieces.pieces));
    if (pieces.pieces == NULL) {
        return bl_err_code(msg, -ENOMEM, "list of %zu extents", count);
    }
    for (uint32_t s = 0; rc == 0 && s < job->source_count; s++) {
        rc = gather_source(&pieces, &job->sources[s], msg);
    }
    if (rc < 0) {
        ckpt_pieces_close(&pieces);
        return rc;
    }
    qsort(pieces.pieces, pieces.count, sizeof(*pieces.pieces), piece_order);
    for (uint32_t i = 0; i < pieces.count; i++) {
        if (kept == 0 || piece_order(&pieces.pieces[kept - 1], &pieces.pieces[i]) != 0) {
            pieces.pieces[kept++] = pieces.pieces[i];
        }
    }
    pieces.count = kept;
    *ret = pieces;
    return 0;
}

/* Is `b` the flat range right behind `a`, of the same box of the same tensor? */
static bool goes_on(const struct bl_extent *a, const struct bl_extent *b, uint32_t dims)
{
    return a->tensor == b->tensor && a->flat_hi == b->flat_lo &&
           memcmp(a->lo, b->lo, dims * sizeof(a->lo[0])) == 0 &&
           memcmp(a->hi, b->hi, dims * sizeof(a->hi[0])) == 0;
}

int ckpt_pieces_describe(const struct ckpt_pieces *pieces, struct bl_extent_list *held,
                         struct bl_errmsg *msg)
{
    held->tensors = calloc(pieces->count + 1u, sizeof(struct bl_tensor));
    held->extents = calloc(pieces->count + 1u, sizeof(struct bl_extent));
    if (held->tensors == NULL || held->extents == NULL) {
        return bl_err_code(msg, -ENOMEM, "list of %u extents", pieces->count);
    }
    for (uint32_t i = 0; i < pieces->count; i++) { /* equal tensors stand together */
        const struct bl_tensor *tensor = pieces->pieces[i].tensor;
        const struct bl_tensor *last =
            held->tensor_count == 0 ? NULL : &held->tensors[held->tensor_count - 1];
        struct bl_extent extent;

        if (last == NULL || strcmp(last->name, tensor->name) != 0) {
            held->tensors[held->tensor_count++] = *tensor;
        } else if (last->dtype != tensor->dtype || last->kind != tensor->kind ||
                   last->dims != tensor->dims ||
                   memcmp(last->shape, tensor->shape, sizeof(uint64_t) * tensor->dims) != 0) {
            return bl_err(msg, BL_EFORMAT, "tensor %s has two shapes, dtypes or kinds",
                          tensor->name);
        }
        extent = *pieces->pieces[i].extent;
        extent.tensor = held->tensor_count - 1;
        if (held->extent_count > 0 &&
            goes_on(&held->extents[held->extent_count - 1], &extent, tensor->dims)) {
            held->extents[held->extent_count - 1].flat_hi = extent.flat_hi;
        } else {
            held->extents[held->extent_count++] = extent;
        }
    }
    return 0;
}

void ckpt_piece_digest(const struct ckpt_piece *piece, uint64_t lo, uint64_t bytes,
                       const void *data, struct bl_state_digest *state)
{
    uint64_t each = bl_dtype_bytes(piece->tensor->dtype);
    struct bl_extent extent = *piece->extent;
    struct bl_tensor tensor = *piece->tensor;
    const struct bl_extent_list one = {&tensor, 1, &extent, 1};

    extent.tensor = 0;
    extent.flat_lo = piece->extent->flat_lo + lo / each;
    extent.flat_hi = extent.flat_lo + bytes / each;
    extent.offset = 0;
    bl_extent_list_digest(&one, data, state);
}

int ckpt_piece_take(const struct ckpt_piece *piece, uint64_t lo, uint64_t bytes, void *dest,
                    struct bl_errmsg *msg)
{
    const struct ckpt_source *source = piece->source;
    uint64_t each = bl_dtype_bytes(piece->tensor->dtype);
    int rc;

    BL_ASSERT(lo % each == 0 && bytes % each == 0);
    if (source->base != NULL) {
        memcpy(dest, (const uint8_t *)source->base + piece->extent->offset + lo, (size_t)bytes);
    } else {
        rc = source->fetch(source->arg, piece->number, lo / each, (lo + bytes) / each, dest, msg);
        if (rc < 0) {
            return bl_err_in(msg, rc, "tensor %s", piece->tensor->name);
        }
    }
    return 0;
}
