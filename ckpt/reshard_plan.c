/* SPDX-License-Identifier: Apache-2.0 */
/* What goes where when a checkpoint is resharded: pure. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/digest.h"
#include "ckpt/part.h"
#include "ckpt/reshard.h"

#define HEADER_BYTES_OF_EXTENT 256u /* at most, about: an entry of a header and of an index */
#define HEADER_BYTES           (64u * 1024)
#define TOOL_NODE              "ckpt-tool" /* who wrote the parts */

static void part_close(struct ckpt_reshard_part *part)
{
    bl_extent_list_close(&part->list);
}

void ckpt_reshard_plan_close(struct ckpt_reshard_plan *plan)
{
    if (plan == NULL) {
        return;
    }
    for (uint32_t p = 0; plan->parts != NULL && p < plan->part_count; p++) {
        part_close(&plan->parts[p]);
    }
    free(plan->parts);
    ckpt_manifest_close(&plan->manifest);
    memset(plan, 0, sizeof(*plan));
}

static int name_order(const void *key, const void *tensor)
{
    return strcmp(key, ((const struct bl_tensor *)tensor)->name);
}

/* All extents of a manifest in one list, in file order. */
static int all_extents(struct bl_extent_list *ret, const struct ckpt_manifest *manifest,
                       struct bl_errmsg *msg)
{
    struct bl_extent_list list = {0};
    int rc = ckpt_layout_tensors(manifest, &list.tensors, &list.tensor_count, msg);

    for (uint32_t p = 0; rc == 0 && p < manifest->part_count; p++) {
        const struct bl_extent_list *held = &manifest->parts[p].held;

        for (uint32_t i = 0; rc == 0 && i < held->extent_count; i++) {
            struct bl_extent extent = held->extents[i];
            const struct bl_tensor *found =
                bsearch(held->tensors[extent.tensor].name, list.tensors, list.tensor_count,
                        sizeof(*list.tensors), name_order);

            BL_ASSERT(found != NULL); /* the table was made of these very names */
            extent.tensor = (uint32_t)(found - list.tensors);
            rc = bl_extent_list_add(&list, &extent);
        }
    }
    rc = rc < 0 ? rc : ckpt_part_sort(&list);
    if (rc < 0) {
        bl_extent_list_close(&list);
        return bl_err_code(msg, rc, "list of extents");
    }
    *ret = list;
    return 0;
}

static int laid_out_extents(struct bl_extent_list *ret, const struct ckpt_manifest *source,
                            const struct ckpt_reshard_how *how, struct bl_errmsg *msg)
{
    static const struct ckpt_layout_model nothing;
    struct ckpt_layout_cutter *cutter = NULL;
    struct bl_tensor *tensors = NULL;
    uint32_t count = 0;
    int rc = ckpt_layout_tensors(source, &tensors, &count, msg);

    rc = rc < 0 ? rc
                : ckpt_layout_new(&cutter, how->layout, how->model == NULL ? &nothing : how->model,
                                  tensors, count, msg);
    rc = rc < 0 ? rc : ckpt_layout_stored(cutter, ret, msg);
    ckpt_layout_free(cutter);
    free(tensors);
    return rc;
}

static uint64_t list_bytes(const struct bl_extent_list *list)
{
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < list->extent_count; i++) {
        bytes += bl_extent_elems(&list->extents[i]) *
                 bl_dtype_bytes(list->tensors[list->extents[i].tensor].dtype);
    }
    return bytes;
}

static int deal_out(struct ckpt_reshard_plan *plan, const struct bl_extent_list *list,
                    uint32_t part_count, struct bl_errmsg *msg)
{
    struct bl_extent_list *lists = calloc(part_count, sizeof(*lists));
    int rc;

    plan->parts = calloc(part_count, sizeof(*plan->parts));
    rc = lists == NULL || plan->parts == NULL ? bl_err_code(msg, -ENOMEM, "%u parts", part_count)
                                              : ckpt_layout_parts(list, part_count, lists, msg);
    for (uint32_t p = 0; rc == 0 && p < part_count; p++) {
        struct ckpt_reshard_part *part = &plan->parts[plan->part_count];

        if (lists[p].extent_count == 0) { /* more parts than there is to deal out */
            bl_extent_list_close(&lists[p]);
            continue;
        }
        part->list = lists[p];
        snprintf(part->name, sizeof(part->name), "part-%04u", plan->part_count);
        snprintf(part->node, sizeof(part->node), TOOL_NODE);
        plan->part_count++;
    }
    free(lists);
    return rc;
}

/* The parts of another checkpoint, as they are. */
static int parts_like(struct ckpt_reshard_plan *plan, const struct ckpt_manifest *source,
                      const struct ckpt_manifest *like, struct bl_errmsg *msg)
{
    struct bl_tensor *ours = NULL, *theirs = NULL;
    uint32_t count = 0, their_count = 0;
    int rc = ckpt_layout_tensors(source, &ours, &count, msg);

    rc = rc < 0 ? rc : ckpt_layout_tensors(like, &theirs, &their_count, msg);
    for (uint32_t i = 0; rc == 0 && (i < count || i < their_count); i++) {
        const struct bl_tensor *a = i < count ? &ours[i] : NULL;
        const struct bl_tensor *b = i < their_count ? &theirs[i] : NULL;
        bool same = a != NULL && b != NULL && strcmp(a->name, b->name) == 0;

        if (!same || a->kind != b->kind || a->dtype != b->dtype || a->dims != b->dims ||
            memcmp(a->shape, b->shape, a->dims * sizeof(a->shape[0])) != 0) {
            rc = bl_err(msg, BL_ECONFIG,
                        same ? "tensor %s: the other checkpoint has another shape, dtype or kind"
                             : "tensor %s is in one of the two checkpoints only",
                        a == NULL                                           ? b->name
                        : b == NULL || same || strcmp(a->name, b->name) < 0 ? a->name
                                                                            : b->name);
        }
    }
    free(ours);
    free(theirs);
    plan->parts = rc < 0 ? NULL : calloc(like->part_count + 1u, sizeof(*plan->parts));
    if (rc == 0 && plan->parts == NULL) {
        rc = bl_err_code(msg, -ENOMEM, "%u parts", like->part_count);
    }
    for (uint32_t p = 0; rc == 0 && p < like->part_count; p++) {
        struct ckpt_reshard_part *part = &plan->parts[p];

        memcpy(part->name, like->parts[p].name, sizeof(part->name));
        memcpy(part->node, like->parts[p].node, sizeof(part->node));
        rc = bl_extent_list_copy(&part->list, &like->parts[p].held);
        plan->part_count += rc == 0;
        rc = rc < 0 ? rc : ckpt_part_sort(&part->list);
        rc = rc < 0 ? bl_err_code(msg, rc, "%u parts", like->part_count) : 0;
    }
    return rc;
}

static int copy_manifest(struct ckpt_manifest *ret, const struct ckpt_manifest *source,
                         const struct ckpt_reshard_how *how, struct bl_errmsg *msg)
{
    *ret = *source;
    ret->parts = NULL;
    ret->part_count = 0;
    ret->writer[0] = '\0'; /* the commit's */
    ret->job = source->job == NULL ? NULL : strdup(source->job);
    if (source->job != NULL && ret->job == NULL) {
        return bl_err_code(msg, -ENOMEM, "manifest");
    }
    if (how->like != NULL) {
        ret->layout = how->like->layout;
        memcpy(ret->codec, how->like->codec, sizeof(ret->codec));
    } else if (how->layout != NULL) {
        ret->layout = *how->layout;
    }
    if (how->codec != NULL) {
        snprintf(ret->codec, sizeof(ret->codec), "%s",
                 strcmp(how->codec, "auto") == 0 ? "zstd" : how->codec);
    }
    return 0;
}

/* From what is read, and every place where it goes. */
static uint64_t plan_nonce(const struct ckpt_reshard_plan *plan)
{
    const struct ckpt_manifest *manifest = &plan->manifest;
    uint64_t nonce = bl_xxh3(&manifest->state, sizeof(manifest->state)) ^
                     bl_xxh3(manifest->codec, strlen(manifest->codec));

    nonce = bl_mix64(nonce ^ bl_xxh3(&manifest->layout, sizeof(manifest->layout)));
    for (uint32_t p = 0; p < plan->part_count; p++) {
        const struct ckpt_reshard_part *part = &plan->parts[p];

        nonce = bl_mix64(nonce ^ bl_xxh3(part->name, strlen(part->name)));
        for (uint32_t i = 0; i < part->list.extent_count; i++) {
            const struct bl_extent *extent = &part->list.extents[i];
            char key[CKPT_KEY_MAX];

            ckpt_part_key(key, extent, &part->list.tensors[extent->tensor]);
            nonce = bl_mix64(nonce ^ bl_xxh3(key, strlen(key)));
        }
    }
    return nonce;
}

int ckpt_reshard_plan_make(struct ckpt_reshard_plan *ret, const struct ckpt_manifest *source,
                           const struct ckpt_reshard_how *how, struct bl_errmsg *msg)
{
    struct ckpt_reshard_plan plan = {0};
    struct bl_extent_list list = {0};
    uint32_t part_count = how->parts == 0 ? source->part_count : how->parts;
    int rc = copy_manifest(&plan.manifest, source, how, msg);

    if (rc == 0 && how->like != NULL) {
        rc = parts_like(&plan, source, how->like, msg);
    } else if (rc == 0) {
        rc = part_count == 0 || part_count > CKPT_PARTS_MAX
                 ? bl_err(msg, BL_ECONFIG, "%u parts: 1 to %d", part_count, CKPT_PARTS_MAX)
             : how->layout == NULL ? all_extents(&list, source, msg)
                                   : laid_out_extents(&list, source, how, msg);
        rc = rc < 0 ? rc : deal_out(&plan, &list, part_count, msg);
        bl_extent_list_close(&list);
    }
    if (rc < 0) {
        ckpt_reshard_plan_close(&plan);
        return rc;
    }
    for (uint32_t p = 0; p < plan.part_count; p++) {
        plan.parts[p].bytes = list_bytes(&plan.parts[p].list);
        plan.bytes += plan.parts[p].bytes;
        plan.scratch_bytes += plan.parts[p].bytes + HEADER_BYTES +
                              (uint64_t)HEADER_BYTES_OF_EXTENT * plan.parts[p].list.extent_count;
    }
    plan.nonce = plan_nonce(&plan);
    *ret = plan;
    return 0;
}
