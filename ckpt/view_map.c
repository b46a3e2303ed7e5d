/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A view through a table of names: Belay's tensors out of somebody else's, or theirs out of
 * Belay's. A plain tensor is one range read and converted in slices; rotary rows are read row by
 * row; a transposed one is read in panels, boxes of so many columns that both forms fit the
 * scratch memory.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/view.h"

#define SLICE_ELEMS (1u << 18)           /* converted at once */
#define PANEL_BYTES (64ul * 1024 * 1024) /* of a transposed tensor that is read at once */
#define BLOCK       16u                  /* elements on a side of what is transposed at once */

/* Where a tensor of the view comes from: maps[first .. first + count) of the table. */
struct origin {
    uint32_t first, count;
    uint32_t inner[3]; /* index in the inner view, for each map */
};

#define ORIGIN_MAX 3u

struct map_view {
    struct ckpt_view view;
    struct ckpt_view *inner;     /* borrowed */
    const struct ckpt_map *maps; /* borrowed */
    struct origin *origins;      /* owned; parallel to view.tensors */
    enum bl_dtype dtype;         /* of what is given */
    enum ckpt_overflow overflow;
    void *raw;    /* owned, SLICE_ELEMS as stored by the inner view */
    float *slice; /* owned, SLICE_ELEMS */
    size_t panel_bytes;
    void *panel;   /* owned once needed, panel_bytes */
    float *square; /* owned once needed: a panel in F32 */
};

static void map_view_close(struct ckpt_view *base)
{
    struct map_view *view = (struct map_view *)base;

    free(base->tensors);
    free(view->origins);
    free(view->raw);
    free(view->slice);
    free(view->panel);
    free(view->square);
    free(view);
}

/* Elements to F32 through `raw`: flat range [lo, hi) of the inner tensor. */
static int read_plain_f32(struct map_view *view, uint32_t inner, uint64_t lo, uint64_t hi,
                          float *dest, struct bl_errmsg *msg)
{
    enum bl_dtype from = view->inner->tensors[inner].dtype;
    int rc = 0;

    if (from == BL_F32) {
        return ckpt_view_read_flat(view->inner, inner, lo, hi, dest, msg);
    }
    while (rc == 0 && lo < hi) {
        uint64_t count = hi - lo < SLICE_ELEMS ? hi - lo : SLICE_ELEMS;

        rc = ckpt_view_read_flat(view->inner, inner, lo, lo + count, view->raw, msg);
        if (rc == 0) {
            ckpt_widen(dest, view->raw, from, count);
        }
        dest += count;
        lo += count;
    }
    return rc;
}

/* ---- Ours out of theirs ---- */

static int read_rotary(struct map_view *view, const struct ckpt_map *map, uint32_t inner,
                       uint64_t lo, uint64_t hi, float *dest, struct bl_errmsg *msg)
{
    uint64_t columns = map->tensor.shape[1];
    int rc = 0;

    while (rc == 0 && lo < hi) {
        uint64_t row = lo / columns, in = lo % columns;
        uint64_t count = columns - in < hi - lo ? columns - in : hi - lo;
        uint64_t from = (map->shift + ckpt_rotary_to_pairs(row, map->rotary_dim)) * columns + in;

        rc = read_plain_f32(view, inner, from, from + count, dest, msg);
        dest += count;
        lo += count;
    }
    return rc;
}

/* dest[c * dest_pitch + r] = src[r * columns + c] for a whole src[rows, columns]. */
static void transpose(float *dest, uint64_t dest_pitch, const float *src, uint64_t rows,
                      uint64_t columns)
{
    for (uint64_t r0 = 0; r0 < rows; r0 += BLOCK) {
        uint64_t r1 = r0 + BLOCK < rows ? r0 + BLOCK : rows;

        for (uint64_t c0 = 0; c0 < columns; c0 += BLOCK) {
            uint64_t c1 = c0 + BLOCK < columns ? c0 + BLOCK : columns;

            for (uint64_t c = c0; c < c1; c++) {
                for (uint64_t r = r0; r < r1; r++) {
                    dest[c * dest_pitch + r] = src[r * columns + c];
                }
            }
        }
    }
}

static int take_panels(struct map_view *view, struct bl_errmsg *msg)
{
    if (view->panel == NULL) {
        view->panel = malloc(view->panel_bytes);
    }
    if (view->square == NULL) {
        view->square = malloc(view->panel_bytes);
    }
    return view->panel == NULL || view->square == NULL
               ? bl_err_code(msg, -ENOMEM, "%zu bytes to transpose in", 2 * view->panel_bytes)
               : 0;
}

/* The box [0, rows) x [c0, c1) of an inner tensor into view->square, as F32. */
static int read_box_f32(struct map_view *view, uint32_t inner, uint64_t c0, uint64_t c1,
                        struct bl_errmsg *msg)
{
    const struct bl_tensor *tensor = &view->inner->tensors[inner];
    uint64_t elems = tensor->shape[0] * (c1 - c0);
    const struct bl_extent box = {
        .tensor = inner, .lo = {0, c0}, .hi = {tensor->shape[0], c1}, .flat_hi = elems};
    int rc;

    if (tensor->dtype == BL_F32) {
        return ckpt_view_read(view->inner, &box, view->square, msg);
    }
    rc = ckpt_view_read(view->inner, &box, view->panel, msg);
    if (rc == 0) {
        ckpt_widen(view->square, view->panel, tensor->dtype, elems);
    }
    return rc;
}

/* Columns that fit a panel when a column has `bytes`: at least 1, a row has at most 12 MiB. */
static uint64_t panel_columns(const struct map_view *view, uint64_t bytes)
{
    BL_ASSERT(bytes <= view->panel_bytes);
    return view->panel_bytes / bytes;
}

void ckpt_view_panel(struct ckpt_view *view, size_t bytes)
{
    ((struct map_view *)view)->panel_bytes = bytes;
}

static int read_transposed(struct map_view *view, const struct ckpt_map *map, uint32_t inner,
                           uint64_t lo, uint64_t hi, float *dest, struct bl_errmsg *msg)
{
    uint64_t columns = map->tensor.shape[1], step = panel_columns(view, columns * sizeof(float));
    int rc = take_panels(view, msg);

    while (rc == 0 && lo < hi) {
        uint64_t row = lo / columns, in = lo % columns, rows = (hi + columns - 1) / columns - row;
        uint64_t count;

        rows = rows < step ? rows : step;
        count = rows * columns - in < hi - lo ? rows * columns - in : hi - lo;
        /* theirs[0 .. columns, shift + row ..]; its transposed form has our rows. */
        rc = read_box_f32(view, inner, map->shift + row, map->shift + row + rows, msg);
        if (rc == 0 && in == 0 && count == rows * columns) {
            transpose(dest, columns, view->square, columns, rows);
        } else if (rc == 0) {
            transpose(view->panel, columns, view->square, columns, rows);
            memcpy(dest, (float *)view->panel + in, count * sizeof(float));
        }
        dest += count;
        lo += count;
    }
    return rc;
}

static bool is_whole_box(const struct bl_extent *extent, const struct bl_tensor *tensor)
{
    for (uint32_t d = 0; d < tensor->dims; d++) {
        if (extent->lo[d] != 0 || extent->hi[d] != tensor->shape[d]) {
            return false;
        }
    }
    return true;
}

static int ours_read(struct ckpt_view *base, const struct bl_extent *extent, void *dest,
                     struct bl_errmsg *msg)
{
    struct map_view *view = (struct map_view *)base;
    const struct origin *origin = &view->origins[extent->tensor];
    const struct ckpt_map *map = &view->maps[origin->first];
    uint64_t lo = extent->flat_lo, hi = extent->flat_hi, skip;
    int rc;

    if (!is_whole_box(extent, &map->tensor)) {
        return bl_err(msg, BL_ENOTBUILT, "%s: a box of a mapped tensor", map->tensor.name);
    }
    skip = map->shift * (map->tensor.dims == 2 ? map->tensor.shape[1] : 1);
    if (map->transposed) {
        rc = read_transposed(view, map, origin->inner[0], lo, hi, dest, msg);
    } else if (map->rotary_dim > 0) {
        rc = read_rotary(view, map, origin->inner[0], lo, hi, dest, msg);
    } else {
        rc = read_plain_f32(view, origin->inner[0], skip + lo, skip + hi, dest, msg);
    }
    return rc < 0 ? bl_err_in(msg, rc, "%s", map->tensor.name) : 0;
}

/* ---- Theirs out of ours ---- */

/* F32 to the view's dtype; `at` is the first element's index in the tensor. */
static int give(struct map_view *view, const struct bl_tensor *tensor, uint64_t at, void *dest,
                const float *from, uint64_t count, struct bl_errmsg *msg)
{
    uint64_t done = ckpt_narrow(dest, view->dtype, from, count, view->overflow);
    char place[48];

    if (done == count) {
        return 0;
    }
    at += done;
    if (tensor->dims == 2) {
        snprintf(place, sizeof(place), "%llu,%llu", (unsigned long long)(at / tensor->shape[1]),
                 (unsigned long long)(at % tensor->shape[1]));
    } else {
        snprintf(place, sizeof(place), "%llu", (unsigned long long)at);
    }
    return bl_err(msg, BL_ELIMIT, "element [%s] is %g: over the largest %s", place,
                  (double)from[done], bl_dtype_name(view->dtype));
}

/* Theirs as they stand: each map has rows [shift, shift + rows) of them. */
static int give_plain(struct map_view *view, uint32_t index, uint64_t lo, uint64_t hi,
                      uint8_t *dest, struct bl_errmsg *msg)
{
    const struct bl_tensor *tensor = &view->view.tensors[index];
    const struct origin *origin = &view->origins[index];
    uint32_t bytes = bl_dtype_bytes(view->dtype);
    int rc = 0;

    memset(dest, 0, (hi - lo) * bytes); /* padding of the vocabulary, biases that ours has not */
    for (uint32_t m = 0; rc == 0 && m < origin->count; m++) {
        const struct ckpt_map *map = &view->maps[origin->first + m];
        uint64_t columns = map->tensor.dims == 2 ? map->tensor.shape[1] : 1;
        uint64_t start = map->shift * columns, end = start + bl_tensor_elems(&map->tensor);
        uint64_t from = lo > start ? lo : start, to = map->zeros ? 0 : hi < end ? hi : end;

        while (rc == 0 && from < to) {
            uint64_t count = to - from < SLICE_ELEMS ? to - from : SLICE_ELEMS;

            rc = read_plain_f32(view, origin->inner[m], from - start, from - start + count,
                                view->slice, msg);
            if (rc == 0) {
                rc = give(view, tensor, from, dest + (from - lo) * bytes, view->slice, count, msg);
            }
            from += count;
        }
    }
    return rc;
}

/* Whole rows [c0, c1) of theirs: row c is column c of every map's tensor, one behind the other. */
static int give_transposed(struct map_view *view, uint32_t index, uint64_t c0, uint64_t c1,
                           uint8_t *dest, struct bl_errmsg *msg)
{
    const struct bl_tensor *tensor = &view->view.tensors[index];
    const struct origin *origin = &view->origins[index];
    uint64_t width = tensor->shape[1], step = panel_columns(view, width * sizeof(float));
    float *rows = view->panel;
    int rc = 0;

    while (rc == 0 && c0 < c1) {
        uint64_t count = c1 - c0 < step ? c1 - c0 : step;

        for (uint32_t m = 0; rc == 0 && m < origin->count; m++) {
            const struct ckpt_map *map = &view->maps[origin->first + m];

            rc = read_box_f32(view, origin->inner[m], c0, c0 + count, msg);
            if (rc == 0) {
                transpose(rows + map->shift, width, view->square, map->tensor.shape[0], count);
            }
        }
        if (rc == 0) {
            rc = give(view, tensor, c0 * width, dest, rows, count * width, msg);
        }
        dest += count * width * bl_dtype_bytes(view->dtype);
        c0 += count;
    }
    return rc;
}

static int theirs_read(struct ckpt_view *base, const struct bl_extent *extent, void *dest,
                       struct bl_errmsg *msg)
{
    struct map_view *view = (struct map_view *)base;
    const struct bl_tensor *tensor = &base->tensors[extent->tensor];
    const struct ckpt_map *map = &view->maps[view->origins[extent->tensor].first];
    uint64_t lo = extent->flat_lo, hi = extent->flat_hi;
    int rc;

    if (!is_whole_box(extent, tensor) || map->rotary_dim > 0 ||
        (map->transposed && (lo % tensor->shape[1] != 0 || hi % tensor->shape[1] != 0))) {
        return bl_err(msg, BL_ENOTBUILT, "%s: such a range of a mapped tensor", tensor->name);
    }
    rc = map->transposed ? take_panels(view, msg) : 0;
    if (rc == 0) {
        rc = map->transposed ? give_transposed(view, extent->tensor, lo / tensor->shape[1],
                                               hi / tensor->shape[1], dest, msg)
                             : give_plain(view, extent->tensor, lo, hi, dest, msg);
    }
    return rc < 0 ? bl_err_in(msg, rc, "%s", tensor->name) : 0;
}

/* ---- Making one ---- */

/* Is the tensor of the inner view what the map takes it for? */
static bool fits(const struct bl_tensor *have, uint32_t dims, const uint64_t *shape)
{
    if (have->dims != dims || !ckpt_is_float(have->dtype)) {
        return false;
    }
    for (uint32_t d = 0; d < dims; d++) {
        if (have->shape[d] != shape[d]) {
            return false;
        }
    }
    return true;
}

/* How many maps from `first` on make one of their tensors. */
static uint32_t maps_of_one(const struct ckpt_map_list *maps, uint32_t first)
{
    uint32_t count = 1;

    while (first + count < maps->count && count < ORIGIN_MAX &&
           strcmp(maps->maps[first].theirs, maps->maps[first + count].theirs) == 0) {
        count++;
    }
    return count;
}

static bool origin_ours(struct map_view *view, const struct ckpt_map *map, struct origin *ret)
{
    int64_t inner = ckpt_view_find(view->inner, map->theirs);

    ret->count = 1;
    ret->inner[0] = (uint32_t)inner;
    return !map->zeros && inner >= 0 &&
           fits(&view->inner->tensors[inner], map->theirs_dims, map->theirs_shape);
}

static bool origin_theirs(struct map_view *view, const struct ckpt_map *maps, struct origin *ret)
{
    for (uint32_t m = 0; m < ret->count; m++) {
        int64_t inner = ckpt_view_find(view->inner, maps[m].tensor.name);

        if (maps[m].zeros) {
            continue;
        }
        if (inner < 0 || view->inner->tensors[inner].dtype != BL_F32 ||
            !fits(&view->inner->tensors[inner], maps[m].tensor.dims, maps[m].tensor.shape)) {
            return false;
        }
        ret->inner[m] = (uint32_t)inner;
    }
    return true;
}

/* Sorts tensors by name and the origins with them. */
static int sort_both(struct map_view *view, struct bl_errmsg *msg)
{
    uint32_t count = view->view.tensor_count;
    struct origin *sorted = calloc(count + 1u, sizeof(*sorted));
    int rc;

    if (sorted == NULL) {
        return bl_err_code(msg, -ENOMEM, "table of tensors");
    }
    for (uint32_t i = 0; i < count; i++) { /* the place before sorting */
        view->view.tensors[i].kind = (enum bl_tensor_kind)i;
    }
    rc = ckpt_view_sort(&view->view, msg);
    for (uint32_t i = 0; i < count; i++) {
        sorted[i] = view->origins[(uint32_t)view->view.tensors[i].kind];
        view->view.tensors[i].kind = BL_KIND_PARAM;
    }
    free(view->origins);
    view->origins = sorted;
    return rc;
}

static int map_view_make(struct ckpt_view **ret, struct ckpt_view *inner,
                         const struct ckpt_map_list *maps, bool ours, enum bl_dtype dtype,
                         enum ckpt_overflow overflow, struct bl_errmsg *msg)
{
    static const struct ckpt_view_ops ops[2] = {{theirs_read, map_view_close},
                                                {ours_read, map_view_close}};
    struct map_view *view = calloc(1, sizeof(*view));
    uint32_t step, n = 0;
    int rc;

    if (view == NULL) {
        return bl_err_code(msg, -ENOMEM, "view");
    }
    view->view.ops = &ops[ours];
    view->inner = inner;
    view->maps = maps->maps;
    view->dtype = dtype;
    view->overflow = overflow;
    view->panel_bytes = PANEL_BYTES;
    view->view.tensors = calloc(maps->count + 1u, sizeof(*view->view.tensors));
    view->origins = calloc(maps->count + 1u, sizeof(*view->origins));
    view->raw = malloc(SLICE_ELEMS * sizeof(double));
    view->slice = malloc(SLICE_ELEMS * sizeof(float));
    if (view->view.tensors == NULL || view->origins == NULL || view->raw == NULL ||
        view->slice == NULL) {
        map_view_close(&view->view);
        return bl_err_code(msg, -ENOMEM, "view of %u tensors", maps->count);
    }
    for (uint32_t i = 0; i < maps->count; i += step) {
        const struct ckpt_map *map = &maps->maps[i];
        struct origin origin = {.first = i};

        step = ours ? 1 : maps_of_one(maps, i);
        origin.count = step;
        if (ours ? !origin_ours(view, map, &origin) : !origin_theirs(view, map, &origin)) {
            continue;
        }
        view->view.tensors[n] = map->tensor;
        if (!ours) {
            view->view.tensors[n].dtype = dtype;
            view->view.tensors[n].dims = map->theirs_dims;
            memcpy(view->view.tensors[n].shape, map->theirs_shape, sizeof(map->theirs_shape));
            memcpy(view->view.tensors[n].name, map->theirs, sizeof(map->theirs));
        }
        view->origins[n++] = origin;
    }
    view->view.tensor_count = n;
    rc = sort_both(view, msg);
    if (rc < 0) {
        map_view_close(&view->view);
        return rc;
    }
    *ret = &view->view;
    return 0;
}

int ckpt_view_ours(struct ckpt_view **ret, struct ckpt_view *theirs,
                   const struct ckpt_map_list *maps, struct bl_errmsg *msg)
{
    return map_view_make(ret, theirs, maps, true, BL_F32, CKPT_OVERFLOW_REFUSE, msg);
}

int ckpt_view_theirs(struct ckpt_view **ret, struct ckpt_view *ours,
                     const struct ckpt_map_list *maps, enum bl_dtype dtype,
                     enum ckpt_overflow overflow, struct bl_errmsg *msg)
{
    return map_view_make(ret, ours, maps, false, dtype, overflow, msg);
}

/* ---- Comparing ---- */

static void shape_put(char *ret, size_t room, uint32_t dims, const uint64_t *shape)
{
    int n = snprintf(ret, room, "[");

    for (uint32_t d = 0; d < dims; d++) {
        n += snprintf(ret + n, room - (size_t)n, "%s%llu", d == 0 ? "" : ",",
                      (unsigned long long)shape[d]);
    }
    snprintf(ret + n, room - (size_t)n, "]");
}

static void compare_one(const struct ckpt_map *map, const struct bl_tensor *have,
                        void (*found)(void *arg, const char *kind, const char *name,
                                      const char *text),
                        void *arg)
{
    char is[160], wanted[160], text[400];

    if (!ckpt_is_float(have->dtype)) {
        snprintf(text, sizeof(text), "is %s: F32, BF16 and F16 are read",
                 bl_dtype_name(have->dtype));
        found(arg, "dtype", map->theirs, text);
    }
    if (have->dims != map->theirs_dims ||
        memcmp(have->shape, map->theirs_shape, map->theirs_dims * sizeof(*have->shape)) != 0) {
        shape_put(is, sizeof(is), have->dims, have->shape);
        shape_put(wanted, sizeof(wanted), map->theirs_dims, map->theirs_shape);
        snprintf(text, sizeof(text), "is %s: the model's sizes make it %s", is, wanted);
        found(arg, "shape", map->theirs, text);
    }
}

void ckpt_map_compare(const struct ckpt_map_list *maps, const struct ckpt_view *theirs,
                      void (*found)(void *arg, const char *kind, const char *name,
                                    const char *text),
                      void *arg)
{
    uint8_t *used = calloc(theirs->tensor_count + 1u, 1);
    uint32_t step;

    if (used == NULL) {
        found(arg, "memory", "-", "out of memory");
        return;
    }
    for (uint32_t i = 0; i < maps->count; i += step) {
        int64_t index = ckpt_view_find(theirs, maps->maps[i].theirs);

        step = maps_of_one(maps, i);
        if (index < 0) {
            found(arg, "missing", maps->maps[i].theirs, "is not there");
        } else {
            used[index] = 1;
            compare_one(&maps->maps[i], &theirs->tensors[index], found, arg);
        }
    }
    for (uint32_t i = 0; i < theirs->tensor_count; i++) {
        if (!used[i] && !ckpt_hf_is_buffer(theirs->tensors[i].name)) {
            found(arg, "extra", theirs->tensors[i].name, "is no tensor of such a model");
        }
    }
    free(used);
}
