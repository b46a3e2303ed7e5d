/* SPDX-License-Identifier: Apache-2.0 */
/* Deals extents out to parts, and collects a manifest's tensors. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/layout_internal.h"

/* Adds elements [from, to) of an extent, counted from its own start. */
static int part_add(struct bl_extent_list *part, const struct bl_extent_list *list, uint32_t index,
                    uint64_t from, uint64_t to)
{
    struct bl_extent extent = list->extents[index];
    const struct bl_tensor *tensor = &list->tensors[extent.tensor];
    uint32_t count = part->tensor_count;

    if (count == 0 || strcmp(part->tensors[count - 1].name, tensor->name) != 0) {
        if (count == 0 || (count & (count - 1)) == 0) { /* room is the next power of two */
            size_t room = count == 0 ? 1 : 2 * (size_t)count;
            struct bl_tensor *grown = realloc(part->tensors, room * sizeof(*grown));

            if (grown == NULL) {
                return -ENOMEM;
            }
            part->tensors = grown;
        }
        part->tensors[part->tensor_count++] = *tensor;
    }
    extent.tensor = part->tensor_count - 1;
    extent.flat_hi = extent.flat_lo + to;
    extent.flat_lo += from;
    return bl_extent_list_add(part, &extent);
}

static uint64_t extent_bytes(const struct bl_extent_list *list, uint32_t index, uint32_t *ret_each)
{
    const struct bl_extent *extent = &list->extents[index];

    *ret_each = bl_dtype_bytes(list->tensors[extent->tensor].dtype);
    return bl_extent_elems(extent) * *ret_each;
}

int ckpt_layout_parts(const struct bl_extent_list *list, uint32_t part_count,
                      struct bl_extent_list *ret, struct bl_errmsg *msg)
{
    unsigned __int128 all = 0, at = 0; /* at: bytes before what is dealt out next */
    uint32_t each, part = 0;
    int rc = part_count == 0 || part_count > CKPT_PARTS_MAX
                 ? bl_err(msg, BL_ELIMIT, "%u parts: 1 to %d", part_count, CKPT_PARTS_MAX)
                 : 0;

    if (rc < 0) {
        return rc;
    }
    memset(ret, 0, part_count * sizeof(*ret));
    for (uint32_t i = 0; i < list->extent_count; i++) {
        all += extent_bytes(list, i, &each);
    }
    for (uint32_t i = 0; rc == 0 && i < list->extent_count; i++) {
        uint64_t bytes = extent_bytes(list, i, &each), from = 0, elems = bytes / each;

        while (rc == 0 && from < elems) {
            uint64_t end = (uint64_t)(all * (part + 1) / part_count); /* of this part */
            uint64_t to = elems;

            if (part + 1 < part_count && at + (elems - from) * each > end) {
                to = at >= end ? from : from + (uint64_t)(end - at) / each;
                to = to / CKPT_LAYOUT_BLOCK * CKPT_LAYOUT_BLOCK;
                to = to < from ? from : to;
            }
            if (from < to) {
                rc = part_add(&ret[part], list, i, from, to);
                at += (to - from) * each;
            }
            from = to;
            part += from < elems;
        }
    }
    for (uint32_t p = 0; rc < 0 && p < part_count; p++) {
        bl_extent_list_close(&ret[p]);
    }
    return rc < 0 ? bl_err_code(msg, rc, "%u parts", part_count) : 0;
}

static int tensor_order(const void *a_, const void *b_)
{
    const struct bl_tensor *const *a = a_, *const *b = b_;

    return strcmp((*a)->name, (*b)->name);
}

int ckpt_layout_tensors(const struct ckpt_manifest *manifest, struct bl_tensor **ret,
                        uint32_t *ret_count, struct bl_errmsg *msg)
{
    const struct bl_tensor **all;
    struct bl_tensor *tensors;
    size_t count = 0;
    uint32_t kept = 0;

    for (uint32_t p = 0; p < manifest->part_count; p++) {
        count += manifest->parts[p].held.tensor_count;
    }
    all = calloc(count + 1, sizeof(struct bl_tensor *));
    tensors = calloc(count + 1, sizeof(*tensors));
    if (all == NULL || tensors == NULL) {
        free(all);
        free(tensors);
        return bl_err_code(msg, -ENOMEM, "table of %zu tensors", count);
    }
    count = 0;
    for (uint32_t p = 0; p < manifest->part_count; p++) {
        for (uint32_t t = 0; t < manifest->parts[p].held.tensor_count; t++) {
            all[count++] = &manifest->parts[p].held.tensors[t];
        }
    }
    qsort(all, count, sizeof(struct bl_tensor *), tensor_order);
    for (size_t i = 0; i < count; i++) {
        if (kept == 0 || strcmp(tensors[kept - 1].name, all[i]->name) != 0) {
            tensors[kept++] = *all[i];
        }
    }
    free(all);
    *ret = tensors;
    *ret_count = kept;
    return 0;
}
