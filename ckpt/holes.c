/* SPDX-License-Identifier: Apache-2.0 */
/* What one copy of a checkpoint could not give: places for people, extents for the next copy. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/copy.h"

int ckpt_reserve(void **array, size_t *room, size_t count, size_t elem_bytes, struct bl_errmsg *msg)
{
    size_t grown = *room > 0 ? *room : 16;
    void *fresh;

    if (count <= *room) {
        return 0;
    }
    while (grown < count) {
        grown *= 2;
    }
    fresh = realloc(*array, grown * elem_bytes);
    if (fresh == NULL) {
        return bl_err_code(msg, -ENOMEM, "load");
    }
    *array = fresh;
    *room = grown;
    return 0;
}

int ckpt_holes_init(struct ckpt_holes *holes, const struct ckpt_want *wants, uint32_t want_count,
                    struct bl_errmsg *msg)
{
    memset(holes, 0, sizeof(*holes));
    holes->wants = calloc(want_count + 1u, sizeof(*holes->wants));
    holes->rooms = calloc(want_count + 1u, sizeof(*holes->rooms));
    if (holes->wants == NULL || holes->rooms == NULL) {
        ckpt_holes_close(holes);
        return bl_err_code(msg, -ENOMEM, "load");
    }
    holes->want_count = want_count;
    for (uint32_t w = 0; w < want_count; w++) {
        holes->wants[w].base = wants[w].base;
        holes->wants[w].list.tensors = wants[w].list.tensors;
        holes->wants[w].list.tensor_count = wants[w].list.tensor_count;
    }
    return 0;
}

void ckpt_holes_close(struct ckpt_holes *holes)
{
    for (uint32_t w = 0; w < holes->want_count; w++) {
        free(holes->wants[w].list.extents);
    }
    free(holes->wants);
    free(holes->rooms);
    free(holes->at);
    memset(holes, 0, sizeof(*holes));
}

int ckpt_holes_note(struct ckpt_holes *holes, const struct ckpt_hole *hole, int code,
                    const char *why, struct bl_errmsg *msg)
{
    void *array = holes->at;
    int rc = ckpt_reserve(&array, &holes->room, holes->count + 1, sizeof(*holes->at), msg);

    holes->at = array;
    if (rc < 0) {
        return rc;
    }
    holes->at[holes->count++] = *hole;
    if (holes->rc == 0) {
        holes->rc = bl_err(&holes->why, code, "%s", why);
    }
    return 0;
}

int ckpt_holes_want(struct ckpt_holes *holes, uint32_t want, const struct bl_extent *extent,
                    struct bl_errmsg *msg)
{
    struct bl_extent_list *list = &holes->wants[want].list;
    struct bl_extent *last = list->extent_count > 0 ? &list->extents[list->extent_count - 1] : NULL;
    uint64_t each = bl_dtype_bytes(list->tensors[extent->tensor].dtype);
    void *array = list->extents;
    int rc;

    if (last != NULL && last->tensor == extent->tensor && last->flat_hi == extent->flat_lo &&
        last->offset + bl_extent_elems(last) * each == extent->offset &&
        memcmp(last->lo, extent->lo, sizeof(last->lo)) == 0 &&
        memcmp(last->hi, extent->hi, sizeof(last->hi)) == 0) {
        last->flat_hi = extent->flat_hi;
        return 0;
    }
    if (list->extent_count == UINT32_MAX) {
        return bl_err_code(msg, BL_ELIMIT, "load");
    }
    rc = ckpt_reserve(&array, &holes->rooms[want], list->extent_count + (size_t)1,
                      sizeof(*list->extents), msg);
    list->extents = array;
    if (rc == 0) {
        list->extents[list->extent_count++] = *extent;
    }
    return rc;
}
