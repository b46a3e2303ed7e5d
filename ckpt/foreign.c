/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A view over files: tensors with their places. Reading goes by the longest runs that lie together
 * both in the box and in the file, through one open file at a time.
 */
#include "ckpt/foreign.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void foreign_close(struct ckpt_view *base)
{
    struct ckpt_foreign *foreign = (struct ckpt_foreign *)base;

    for (uint32_t i = 0; i < foreign->file_count; i++) {
        free(foreign->files[i]);
    }
    if (foreign->fd >= 0) {
        close(foreign->fd);
    }
    free(foreign->files);
    free(foreign->places);
    free(base->tensors);
    free(foreign);
}

/* Makes foreign->fd that of `file`. */
static int foreign_aim(struct ckpt_foreign *foreign, uint32_t file, struct bl_errmsg *msg)
{
    if (foreign->fd >= 0 && foreign->fd_file == file) {
        return 0;
    }
    if (foreign->fd >= 0) {
        close(foreign->fd);
    }
    foreign->fd_file = file;
    foreign->fd = open(foreign->files[file], O_RDONLY | O_CLOEXEC);
    return foreign->fd < 0 ? bl_err_code(msg, -errno, "%s", foreign->files[file]) : 0;
}

static int read_at(struct ckpt_foreign *foreign, uint64_t offset, void *dest, uint64_t bytes,
                   struct bl_errmsg *msg)
{
    const char *path = foreign->files[foreign->fd_file];
    uint8_t *at = dest;

    while (bytes > 0) {
        size_t want = bytes < (1u << 30) ? (size_t)bytes : 1u << 30;
        ssize_t n = pread(foreign->fd, at, want, (off_t)offset);

        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            return bl_err_code(msg, -errno, "%s: byte %llu", path, (unsigned long long)offset);
        }
        if (n == 0) {
            return bl_err(msg, BL_EFORMAT, "%s ends at byte %llu, while it is read", path,
                          (unsigned long long)offset);
        }
        at += n;
        offset += (uint64_t)n;
        bytes -= (uint64_t)n;
    }
    return 0;
}

/* Elements of the box that lie together in the tensor: *ret_run of them each time. */
static void box_runs(const struct bl_extent *extent, const struct bl_tensor *tensor,
                     uint64_t *ret_run)
{
    uint64_t run = 1;

    for (uint32_t d = tensor->dims; d-- > 0;) {
        run *= extent->hi[d] - extent->lo[d];
        if (extent->lo[d] != 0 || extent->hi[d] != tensor->shape[d]) {
            break;
        }
    }
    *ret_run = run;
}

/* Where element `index` of the box's own order lies in the tensor's. */
static uint64_t box_place(const struct bl_extent *extent, const struct bl_tensor *tensor,
                          uint64_t index)
{
    uint64_t place = 0, pitch = 1;

    for (uint32_t d = tensor->dims; d-- > 0;) {
        uint64_t width = extent->hi[d] - extent->lo[d];

        place += (extent->lo[d] + index % width) * pitch;
        index /= width;
        pitch *= tensor->shape[d];
    }
    return place;
}

static int foreign_read(struct ckpt_view *base, const struct bl_extent *extent, void *dest,
                        struct bl_errmsg *msg)
{
    struct ckpt_foreign *foreign = (struct ckpt_foreign *)base;
    const struct bl_tensor *tensor = &base->tensors[extent->tensor];
    const struct ckpt_foreign_place *place = &foreign->places[extent->tensor];
    uint32_t bytes = bl_dtype_bytes(tensor->dtype);
    uint64_t run, at = extent->flat_lo;
    uint8_t *to = dest;
    int rc = foreign_aim(foreign, place->file, msg);

    box_runs(extent, tensor, &run);
    while (rc == 0 && at < extent->flat_hi) {
        uint64_t count = run - at % run;

        count = count < extent->flat_hi - at ? count : extent->flat_hi - at;
        rc = read_at(foreign, place->offset + box_place(extent, tensor, at) * bytes, to,
                     count * bytes, msg);
        to += count * bytes;
        at += count;
    }
    return rc < 0 ? bl_err_in(msg, rc, "%s", tensor->name) : 0;
}

int ckpt_foreign_new(struct ckpt_foreign **ret, struct bl_errmsg *msg)
{
    static const struct ckpt_view_ops ops = {foreign_read, foreign_close};
    struct ckpt_foreign *foreign = calloc(1, sizeof(*foreign));

    if (foreign == NULL) {
        return bl_err_code(msg, -ENOMEM, "view of files");
    }
    foreign->view.ops = &ops;
    foreign->fd = -1;
    *ret = foreign;
    return 0;
}

int ckpt_foreign_add_file(struct ckpt_foreign *foreign, const char *path, struct bl_errmsg *msg)
{
    char **files;

    if (foreign->file_count >= CKPT_FOREIGN_FILES_MAX) {
        return bl_err(msg, BL_ELIMIT, "more than %u files", CKPT_FOREIGN_FILES_MAX);
    }
    files = realloc(foreign->files, (foreign->file_count + 1u) * sizeof(*files));
    if (files != NULL) {
        foreign->files = files;
        files[foreign->file_count] = strdup(path);
    }
    if (files == NULL || files[foreign->file_count] == NULL) {
        return bl_err_code(msg, -ENOMEM, "%s", path);
    }
    foreign->file_count++;
    return 0;
}

int ckpt_foreign_add(struct ckpt_foreign *foreign, const struct bl_tensor *tensor, uint32_t file,
                     uint64_t offset, struct bl_errmsg *msg)
{
    struct ckpt_view *view = &foreign->view;

    if (view->tensor_count >= CKPT_FOREIGN_TENSORS_MAX) {
        return bl_err(msg, BL_ELIMIT, "more than %u tensors", CKPT_FOREIGN_TENSORS_MAX);
    }
    if (view->tensor_count == foreign->room) {
        uint32_t room = foreign->room == 0 ? 256 : 2 * foreign->room;
        struct bl_tensor *tensors = realloc(view->tensors, room * sizeof(*tensors));
        struct ckpt_foreign_place *places;

        view->tensors = tensors != NULL ? tensors : view->tensors;
        places = realloc(foreign->places, room * sizeof(*places));
        foreign->places = places != NULL ? places : foreign->places;
        if (tensors == NULL || places == NULL) {
            return bl_err_code(msg, -ENOMEM, "table of %u tensors", room);
        }
        foreign->room = room;
    }
    view->tensors[view->tensor_count] = *tensor;
    foreign->places[view->tensor_count++] = (struct ckpt_foreign_place){file, offset};
    return 0;
}

int ckpt_foreign_finish(struct ckpt_foreign *foreign, struct bl_errmsg *msg)
{
    struct ckpt_view *view = &foreign->view;
    struct ckpt_foreign_place *sorted = calloc(view->tensor_count + 1u, sizeof(*sorted));
    enum bl_tensor_kind *kinds = calloc(view->tensor_count + 1u, sizeof(*kinds));
    int rc = sorted == NULL || kinds == NULL ? bl_err_code(msg, -ENOMEM, "table of tensors") : 0;

    for (uint32_t i = 0; rc == 0 && i < view->tensor_count; i++) { /* kind: the place before */
        kinds[i] = view->tensors[i].kind;
        view->tensors[i].kind = (enum bl_tensor_kind)i;
    }
    if (rc == 0) {
        rc = ckpt_view_sort(view, msg);
        for (uint32_t i = 0; i < view->tensor_count; i++) {
            sorted[i] = foreign->places[(uint32_t)view->tensors[i].kind];
            view->tensors[i].kind = kinds[(uint32_t)view->tensors[i].kind];
        }
        free(foreign->places);
        foreign->places = sorted;
        sorted = NULL;
    }
    free(kinds);
    free(sorted);
    return rc;
}
