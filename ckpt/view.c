/* SPDX-License-Identifier: Apache-2.0 */
#include "ckpt/view.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

void ckpt_view_close(struct ckpt_view *view)
{
    if (view != NULL) {
        view->ops->close(view);
    }
}

static int order_of_name(const void *name, const void *tensor)
{
    return strcmp(name, ((const struct bl_tensor *)tensor)->name);
}

int64_t ckpt_view_find(const struct ckpt_view *view, const char *name)
{
    const struct bl_tensor *found =
        bsearch(name, view->tensors, view->tensor_count, sizeof(*view->tensors), order_of_name);

    return found == NULL ? -1 : found - view->tensors;
}

static int order_by_name(const void *a, const void *b)
{
    return strcmp(((const struct bl_tensor *)a)->name, ((const struct bl_tensor *)b)->name);
}

int ckpt_view_sort(struct ckpt_view *view, struct bl_errmsg *msg)
{
    qsort(view->tensors, view->tensor_count, sizeof(*view->tensors), order_by_name);
    for (uint32_t i = 1; i < view->tensor_count; i++) {
        if (strcmp(view->tensors[i - 1].name, view->tensors[i].name) == 0) {
            return bl_err(msg, BL_EFORMAT, "tensor \"%s\" is there twice", view->tensors[i].name);
        }
    }
    return 0;
}

int ckpt_view_read(struct ckpt_view *view, const struct bl_extent *extent, void *dest,
                   struct bl_errmsg *msg)
{
    int rc = extent->tensor >= view->tensor_count
                 ? bl_err(msg, BL_EFORMAT, "no tensor %u", extent->tensor)
                 : bl_extent_check(extent, &view->tensors[extent->tensor], msg);

    return rc < 0 ? rc : view->ops->read(view, extent, dest, msg);
}

int ckpt_view_read_flat(struct ckpt_view *view, uint32_t tensor, uint64_t lo, uint64_t hi,
                        void *dest, struct bl_errmsg *msg)
{
    struct bl_extent extent;

    if (lo == hi) {
        return 0;
    }
    bl_extent_whole(&extent, &view->tensors[tensor], tensor, lo, hi);
    return ckpt_view_read(view, &extent, dest, msg);
}

/* ---- A checkpoint ---- */

struct checkpoint_view {
    struct ckpt_view view;
    struct ckpt_reader *reader; /* owned */
};

static int checkpoint_read(struct ckpt_view *base, const struct bl_extent *extent, void *dest,
                           struct bl_errmsg *msg)
{
    struct checkpoint_view *view = (struct checkpoint_view *)base;
    struct bl_extent want = *extent;
    const struct bl_extent_list list = {&base->tensors[extent->tensor], 1, &want, 1};
    const struct ckpt_dest to = {&list, dest};
    struct ckpt_load_result result;

    want.tensor = 0;
    want.offset = 0;
    return ckpt_reader_load(view->reader, &to, 1, &result, msg);
}

static void checkpoint_close(struct ckpt_view *base)
{
    struct checkpoint_view *view = (struct checkpoint_view *)base;

    ckpt_reader_close(view->reader);
    free(base->tensors);
    free(view);
}

/* The tensors of all parts, each once; equal names are known to be the same tensor. */
static int checkpoint_tensors(struct ckpt_view *view, const struct ckpt_manifest *manifest,
                              struct bl_errmsg *msg)
{
    size_t count = 0;
    uint32_t kept = 0;

    for (uint32_t p = 0; p < manifest->part_count; p++) {
        count += manifest->parts[p].held.tensor_count;
    }
    view->tensors = calloc(count + 1, sizeof(*view->tensors));
    if (view->tensors == NULL) {
        return bl_err_code(msg, -ENOMEM, "%zu tensors", count);
    }
    for (uint32_t p = 0; p < manifest->part_count; p++) {
        const struct bl_extent_list *held = &manifest->parts[p].held;

        memcpy(view->tensors + view->tensor_count, held->tensors,
               held->tensor_count * sizeof(*held->tensors));
        view->tensor_count += held->tensor_count;
    }
    qsort(view->tensors, view->tensor_count, sizeof(*view->tensors), order_by_name);
    for (uint32_t i = 0; i < view->tensor_count; i++) {
        if (kept == 0 || strcmp(view->tensors[kept - 1].name, view->tensors[i].name) != 0) {
            view->tensors[kept++] = view->tensors[i];
        }
    }
    view->tensor_count = kept;
    return 0;
}

int ckpt_view_checkpoint(struct ckpt_view **ret, const struct ckpt_place *places,
                         uint32_t place_count, const struct ckpt_reader_config *config,
                         struct bl_errmsg *msg)
{
    static const struct ckpt_view_ops ops = {checkpoint_read, checkpoint_close};
    struct checkpoint_view *view = calloc(1, sizeof(*view));
    int rc;

    if (view == NULL) {
        return bl_err_code(msg, -ENOMEM, "%s", places[0].dir);
    }
    view->view.ops = &ops;
    rc = ckpt_reader_open(&view->reader, places, place_count, config, msg);
    if (rc == 0) {
        rc = checkpoint_tensors(&view->view, ckpt_reader_manifest(view->reader), msg);
    }
    if (rc < 0) {
        checkpoint_close(&view->view);
        return rc;
    }
    *ret = &view->view;
    return 0;
}

const struct ckpt_manifest *ckpt_view_manifest(const struct ckpt_view *view)
{
    return ckpt_reader_manifest(((const struct checkpoint_view *)view)->reader);
}
