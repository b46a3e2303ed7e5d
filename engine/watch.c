/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/watch.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/digest.h"

struct engine_watched {
    uint64_t key;  /* of name, box and range */
    uint64_t some; /* digest of some of its bytes */
    uint64_t all;  /* of all; only if has_all */
    bool has_all;
    bool same;                      /* as at the look before */
    const struct bl_tensor *tensor; /* borrowed during a look */
};

void engine_names_close(struct engine_names *names)
{
    free(names->names);
    memset(names, 0, sizeof(*names));
}

int engine_names_add(struct engine_names *names, const char *name)
{
    void *grown = realloc(names->names, (names->count + 1u) * sizeof(*names->names));

    if (grown == NULL) {
        return -ENOMEM;
    }
    names->names = grown;
    snprintf(names->names[names->count++], BL_TENSOR_NAME_MAX, "%s", name);
    return 0;
}

static void watch_forget(struct engine_watch *watch)
{
    free(watch->extents);
    watch->extents = NULL;
    watch->count = 0;
    engine_names_close(&watch->unchanged);
}

void engine_watch_close(struct engine_watch *watch)
{
    watch_forget(watch);
    watch->step = 0;
}

uint64_t engine_extent_key(const struct bl_extent *extent, const struct bl_tensor *tensor)
{
    uint64_t words[3 + 2 * BL_TENSOR_DIMS_MAX] = {bl_xxh3(tensor->name, strlen(tensor->name)),
                                                  extent->flat_lo, extent->flat_hi};

    memcpy(words + 3, extent->lo, tensor->dims * sizeof(uint64_t));
    memcpy(words + 3 + BL_TENSOR_DIMS_MAX, extent->hi, tensor->dims * sizeof(uint64_t));
    return bl_xxh3(words, sizeof(words));
}

/* The first and the last block, and others evenly between. */
static uint64_t digest_some(const uint8_t *data, uint64_t bytes)
{
    uint64_t sums[ENGINE_WATCH_BLOCKS];
    uint64_t blocks = bytes / ENGINE_WATCH_BLOCK;

    for (uint64_t i = 0; i < ENGINE_WATCH_BLOCKS; i++) {
        uint64_t block = (blocks - 1) * i / (ENGINE_WATCH_BLOCKS - 1);

        sums[i] = bl_xxh3(data + block * ENGINE_WATCH_BLOCK, ENGINE_WATCH_BLOCK);
    }
    return bl_xxh3(sums, sizeof(sums));
}

static int watched_order(const void *a_, const void *b_)
{
    const struct engine_watched *a = a_, *b = b_;

    return a->key < b->key ? -1 : a->key > b->key;
}

static int watched_by_name(const void *a_, const void *b_)
{
    const struct engine_watched *const *a = a_, *const *b = b_;

    return strcmp((*a)->tensor->name, (*b)->tensor->name);
}

/* Digests an extent, compared with what it was. */
static void look_at(struct engine_watched *ret, const struct engine_watch *before,
                    const struct bl_extent *extent, const struct bl_tensor *tensor,
                    const uint8_t *data)
{
    uint64_t bytes = bl_extent_elems(extent) * bl_dtype_bytes(tensor->dtype);
    const struct engine_watched *last;

    *ret = (struct engine_watched){.key = engine_extent_key(extent, tensor), .tensor = tensor};
    last = before->count == 0 ? NULL
                              : bsearch(ret, before->extents, before->count,
                                        sizeof(*before->extents), watched_order);
    if (bytes <= ENGINE_WATCH_SMALL) {
        ret->some = ret->all = bl_xxh3(data, (size_t)bytes);
        ret->has_all = true;
    } else {
        ret->some = digest_some(data, bytes);
        ret->has_all = last != NULL && last->some == ret->some;
        ret->all = ret->has_all ? bl_xxh3(data, (size_t)bytes) : 0;
    }
    ret->same = last != NULL && last->has_all && ret->has_all && last->all == ret->all;
}

static bool is_watched(const struct bl_tensor *tensor)
{
    return tensor->kind == BL_KIND_PARAM || tensor->kind == BL_KIND_MOMENT1 ||
           tensor->kind == BL_KIND_MOMENT2;
}

static uint32_t gather(struct engine_watched *ret, const struct engine_watch *before,
                       const struct ckpt_source *sources, uint32_t source_count)
{
    uint32_t count = 0;

    for (uint32_t s = 0; s < source_count; s++) {
        const struct bl_extent_list *list = sources[s].list;

        for (uint32_t i = 0; sources[s].base != NULL && i < list->extent_count; i++) {
            const struct bl_extent *extent = &list->extents[i];
            const struct bl_tensor *tensor = &list->tensors[extent->tensor];

            if (is_watched(tensor) && bl_extent_elems(extent) > 0) {
                look_at(&ret[count++], before, extent, tensor,
                        (const uint8_t *)sources[s].base + extent->offset);
            }
        }
    }
    return count;
}

/* Names the tensors all of whose extents are the same. */
static int name_unchanged(struct engine_names *ret, struct engine_watched *extents, uint32_t count)
{
    struct engine_watched **sorted = calloc(count + 1u, sizeof(*sorted));
    int rc = sorted == NULL ? -ENOMEM : 0;

    for (uint32_t i = 0; rc == 0 && i < count; i++) {
        sorted[i] = &extents[i];
    }
    if (rc == 0) {
        qsort(sorted, count, sizeof(*sorted), watched_by_name);
    }
    for (uint32_t lo = 0, hi = 0; rc == 0 && lo < count; lo = hi) {
        bool same = true;

        for (hi = lo; hi < count && watched_by_name(&sorted[lo], &sorted[hi]) == 0; hi++) {
            same = same && sorted[hi]->same;
        }
        if (same && ret->count < ENGINE_WATCH_NAMES_MAX) {
            rc = engine_names_add(ret, sorted[lo]->tensor->name);
        }
    }
    free(sorted);
    return rc;
}

int engine_watch_look(struct engine_watch *watch, uint64_t step, const struct ckpt_source *sources,
                      uint32_t source_count, struct bl_errmsg *msg)
{
    struct engine_watch now = {.step = step};
    size_t count = 0;
    int rc = 0;

    for (uint32_t s = 0; s < source_count; s++) {
        count += sources[s].list->extent_count;
    }
    if (step == watch->step && watch->count > 0) {
        return 0; /* the same save again, or for another root */
    }
    if (step < watch->step || count > ENGINE_WATCH_MAX) {
        watch_forget(watch); /* the run went back */
    }
    if (count > ENGINE_WATCH_MAX) {
        return 0;
    }
    now.extents = calloc(count + 1u, sizeof(*now.extents));
    rc = now.extents == NULL ? -ENOMEM : 0;
    if (rc == 0) {
        now.count = gather(now.extents, watch, sources, source_count);
        rc = name_unchanged(&now.unchanged, now.extents, now.count);
    }
    if (rc == 0 && now.count > 0) {
        qsort(now.extents, now.count, sizeof(*now.extents), watched_order);
    }
    watch_forget(watch);
    if (rc < 0) {
        watch_forget(&now);
        return bl_err_code(msg, rc, "watch on %zu extents", count);
    }
    *watch = now;
    return 0;
}
