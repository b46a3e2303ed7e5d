/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Cuts a table of tensors by a layout. One (tp, pp) place walks the tensors of its stage in table
 * order; each gives up to a few boxes, and each box whole or the flat ranges that ZeRO makes of it.
 * What is stored is what all places give together, sorted by tensor and box and swept, so that what
 * several hold is there once.
 */
#include "ckpt/layout.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/ckpt.h"
#include "ckpt/layout_internal.h"

#define MEMORY_ALIGN 64u
#define KINDS        (BL_KIND_OTHER + 1u)

struct ckpt_layout_cutter {
    struct ckpt_layout layout;
    struct layout_tensor *tensors; /* owned; in table order */
    uint32_t count;
    uint32_t layers;
};

static uint64_t min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t max_u64(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* ---- The table ---- */

/* Before the layers, layer by layer, behind the layers. */
static uint64_t table_section(const struct layout_tensor *tensor)
{
    return tensor->layer != UINT32_MAX        ? 1 + (uint64_t)tensor->layer
           : tensor->stage == CKPT_STAGE_LAST ? UINT64_MAX
                                              : 0;
}

static int table_order(const void *a_, const void *b_)
{
    const struct layout_tensor *a = a_, *b = b_;
    uint64_t a_at = table_section(a), b_at = table_section(b);

    if (a_at != b_at) {
        return a_at < b_at ? -1 : 1;
    }
    if (a->rule != b->rule) {
        return a->rule < b->rule ? -1 : 1;
    }
    return strcmp(a->tensor.name, b->tensor.name);
}

static int layout_check(struct ckpt_layout *layout, struct bl_errmsg *msg)
{
    uint64_t world = (uint64_t)layout->dp * layout->tp * layout->pp;

    if (layout->world == 0) {
        layout->world = (uint32_t)min_u64(world, UINT32_MAX);
    }
    if (layout->dp == 0 || layout->tp == 0 || layout->pp == 0 || layout->zero > 3 ||
        layout->dp > CKPT_LAYOUT_WORLD_MAX || layout->tp > CKPT_LAYOUT_WORLD_MAX ||
        layout->world > CKPT_LAYOUT_WORLD_MAX || layout->world != world) {
        return bl_err(msg, BL_ECONFIG,
                      "layout: %u ranks as dp %u, tp %u, pp %u, zero %u: dp * tp * pp, at most %u, "
                      "with zero 0 to 3",
                      layout->world, layout->dp, layout->tp, layout->pp, layout->zero,
                      CKPT_LAYOUT_WORLD_MAX);
    }
    return 0;
}

int ckpt_layout_new(struct ckpt_layout_cutter **ret, const struct ckpt_layout *layout,
                    const struct ckpt_layout_model *model, const struct bl_tensor *tensors,
                    uint32_t tensor_count, struct bl_errmsg *msg)
{
    struct ckpt_layout_cutter *cutter = calloc(1, sizeof(*cutter));
    struct bl_extent whole;
    int rc;

    if (cutter == NULL) {
        return bl_err_code(msg, -ENOMEM, "layout");
    }
    cutter->layout = *layout;
    cutter->tensors = calloc(tensor_count + 1u, sizeof(*cutter->tensors));
    rc = cutter->tensors == NULL ? bl_err_code(msg, -ENOMEM, "layout of %u tensors", tensor_count)
                                 : layout_check(&cutter->layout, msg);
    for (uint32_t i = 0; rc == 0 && i < tensor_count; i++) {
        bl_extent_whole(&whole, &tensors[i], 0, 0, bl_tensor_elems(&tensors[i]));
        rc = bl_extent_check(&whole, &tensors[i], msg);
        if (rc == 0 && (tensors[i].kind < BL_KIND_PARAM || tensors[i].kind > BL_KIND_OTHER)) {
            rc = bl_err(msg, BL_EFORMAT, "%s: unknown kind", tensors[i].name);
        }
        rc = rc < 0 ? rc
                    : layout_tensor_resolve(&cutter->tensors[i], &tensors[i], &cutter->layout,
                                            model, msg);
        if (rc == 0 && cutter->tensors[i].layer != UINT32_MAX) {
            cutter->layers = (uint32_t)max_u64(cutter->layers, cutter->tensors[i].layer + 1u);
        }
    }
    if (rc < 0) {
        ckpt_layout_free(cutter);
        return rc;
    }
    cutter->count = tensor_count;
    qsort(cutter->tensors, tensor_count, sizeof(*cutter->tensors), table_order);
    *ret = cutter;
    return 0;
}

void ckpt_layout_free(struct ckpt_layout_cutter *cutter)
{
    if (cutter != NULL) {
        free(cutter->tensors);
        free(cutter);
    }
}

/* Does stage `stage` hold the tensor? Stage s has layers [L s / pp, L (s + 1) / pp). */
static bool on_stage(const struct ckpt_layout_cutter *cutter, const struct layout_tensor *tensor,
                     uint32_t stage)
{
    uint64_t pp = cutter->layout.pp, layers = cutter->layers;

    if (tensor->layer != UINT32_MAX) {
        return tensor->layer >= layers * stage / pp && tensor->layer < layers * (stage + 1) / pp;
    }
    return (tensor->stage != CKPT_STAGE_LAST && stage == 0) ||
           (tensor->stage != CKPT_STAGE_FIRST && stage == pp - 1);
}

/* The range of the dimension that is cut which tp rank `tp_rank` holds of one sub-parameter. */
static void span_range(const struct layout_span *span, uint64_t tp_rank, uint64_t tp,
                       uint64_t *ret_lo, uint64_t *ret_hi)
{
    uint64_t units = span->width / span->unit, lo, hi;

    if (units < tp && span->heads) { /* heads: nobody is without, some share one */
        lo = units * tp_rank / tp;
        hi = lo + 1;
    } else {
        lo = units * tp_rank / tp;
        hi = units * (tp_rank + 1) / tp;
    }
    *ret_lo = span->lo + lo * span->unit;
    *ret_hi = span->lo + hi * span->unit;
}

/* The boxes of a tensor that a tp rank holds, into `ret`; how many. */
static uint32_t tensor_boxes(const struct ckpt_layout_cutter *cutter, uint32_t index,
                             uint32_t tp_rank, struct bl_extent ret[CKPT_LAYOUT_PIECES_MAX])
{
    const struct layout_tensor *tensor = &cutter->tensors[index];
    uint64_t tp = cutter->layout.tp, lo, hi, each;
    uint32_t spans = tensor->cut == CKPT_CUT_REPLICATED || tensor->cut == CKPT_CUT_VOCABULARY
                         ? 1
                         : tensor->span_count;
    uint32_t count = 0;

    for (uint32_t i = 0; i < spans; i++) {
        struct bl_extent *box = &ret[count];

        bl_extent_whole(box, &tensor->tensor, index, 0, bl_tensor_elems(&tensor->tensor));
        if (tensor->cut == CKPT_CUT_REPLICATED) {
            return 1;
        }
        if (tensor->cut == CKPT_CUT_VOCABULARY) {
            each = tensor->padded / tp;
            lo = min_u64(each * tp_rank, tensor->tensor.shape[tensor->dim]);
            hi = min_u64(each * (tp_rank + 1), tensor->tensor.shape[tensor->dim]);
        } else {
            span_range(&tensor->spans[i], tp_rank, tp, &lo, &hi);
        }
        if (lo < hi) {
            box->flat_hi = box->flat_hi / tensor->tensor.shape[tensor->dim] * (hi - lo);
            box->lo[tensor->dim] = lo;
            box->hi[tensor->dim] = hi;
            count++;
        }
    }
    return count;
}

/* ---- Walking one (tp, pp) place ---- */

typedef int place_fn(void *arg, const struct bl_extent *extent);

struct place {
    const struct ckpt_layout_cutter *cutter;
    uint32_t tp_rank, stage;
    bool cut[KINDS];        /* by kind: cut flat over dp? */
    uint64_t blocks[KINDS]; /* of the flat order of that kind */
    place_fn *emit;         /* each extent, in table order; its tensor is the table's index */
    void *arg;
    /* One dp rank's share, or all shares one behind the other. */
    bool all;
    uint32_t dp_rank;
};

static uint64_t align_block(uint64_t elems)
{
    return (elems + CKPT_LAYOUT_BLOCK - 1) / CKPT_LAYOUT_BLOCK * CKPT_LAYOUT_BLOCK;
}

/* Where dp rank d's range of a kind begins, in elements of its flat order. */
static uint64_t border(const struct place *place, enum bl_tensor_kind kind, uint64_t d)
{
    unsigned __int128 blocks = place->blocks[kind];

    return (uint64_t)(blocks * d / place->cutter->layout.dp) * CKPT_LAYOUT_BLOCK;
}

/* The dp rank whose range holds place `at`. */
static uint64_t owner_of(const struct place *place, enum bl_tensor_kind kind, uint64_t at)
{
    uint64_t lo = 0, hi = place->cutter->layout.dp - 1;

    while (lo < hi) { /* the last d with border(d) <= at */
        uint64_t d = (lo + hi + 1) / 2;

        if (border(place, kind, d) <= at) {
            lo = d;
        } else {
            hi = d - 1;
        }
    }
    return lo;
}

/* Emits a box that begins at `at` in its kind's flat order: whole, or what ZeRO makes of it. */
static int emit_box(const struct place *place, const struct bl_extent *box,
                    enum bl_tensor_kind kind, uint64_t at)
{
    uint64_t end = at + bl_extent_elems(box), lo = at, hi;
    struct bl_extent part = *box;
    int rc = 0;

    if (!place->cut[kind]) {
        return place->emit(place->arg, box);
    }
    if (!place->all) {
        lo = max_u64(at, border(place, kind, place->dp_rank));
        end = min_u64(end, border(place, kind, place->dp_rank + 1ull));
    }
    while (rc == 0 && lo < end) {
        hi = min_u64(end, border(place, kind, owner_of(place, kind, lo) + 1));
        part.flat_lo = lo - at;
        part.flat_hi = hi - at;
        rc = place->emit(place->arg, &part);
        lo = hi;
    }
    return rc;
}

static uint64_t boxes_elems(const struct bl_extent *boxes, uint32_t count)
{
    uint64_t elems = 0;

    for (uint32_t i = 0; i < count; i++) {
        elems += bl_extent_elems(&boxes[i]);
    }
    return elems;
}

static int place_walk(struct place *place)
{
    const struct ckpt_layout_cutter *cutter = place->cutter;
    struct bl_extent boxes[CKPT_LAYOUT_PIECES_MAX];
    uint64_t at[KINDS] = {0};
    int rc = 0;

    memset(place->blocks, 0, sizeof(place->blocks));
    for (uint32_t i = 0; i < cutter->count; i++) {
        if (on_stage(cutter, &cutter->tensors[i], place->stage)) {
            uint64_t elems = boxes_elems(boxes, tensor_boxes(cutter, i, place->tp_rank, boxes));

            place->blocks[cutter->tensors[i].tensor.kind] += align_block(elems) / CKPT_LAYOUT_BLOCK;
        }
    }
    for (uint32_t i = 0; rc == 0 && i < cutter->count; i++) {
        enum bl_tensor_kind kind = cutter->tensors[i].tensor.kind;
        uint32_t count;
        uint64_t inside = at[kind];

        if (!on_stage(cutter, &cutter->tensors[i], place->stage)) {
            continue;
        }
        count = tensor_boxes(cutter, i, place->tp_rank, boxes);
        for (uint32_t b = 0; rc == 0 && b < count; b++) {
            rc = emit_box(place, &boxes[b], kind, inside);
            inside += bl_extent_elems(&boxes[b]);
        }
        at[kind] += align_block(boxes_elems(boxes, count));
    }
    return rc;
}

/* ---- What a rank holds ---- */

struct holder {
    const struct ckpt_layout_cutter *cutter;
    struct bl_extent_list list;
    uint32_t last; /* table index of the tensor added last */
    uint64_t bytes;
};

static int hold(void *arg, const struct bl_extent *extent)
{
    struct holder *holder = arg;
    const struct bl_tensor *tensor = &holder->cutter->tensors[extent->tensor].tensor;
    struct bl_extent own = *extent;

    if (holder->list.tensor_count == 0 || holder->last != extent->tensor) {
        holder->list.tensors[holder->list.tensor_count++] = *tensor;
        holder->last = extent->tensor;
    }
    own.tensor = holder->list.tensor_count - 1;
    own.offset = holder->bytes;
    holder->bytes += bl_extent_elems(extent) * bl_dtype_bytes(tensor->dtype);
    holder->bytes = (holder->bytes + MEMORY_ALIGN - 1) / MEMORY_ALIGN * MEMORY_ALIGN;
    return bl_extent_list_add(&holder->list, &own);
}

int ckpt_layout_rank(const struct ckpt_layout_cutter *cutter, uint32_t rank,
                     struct bl_extent_list *ret, uint64_t *ret_bytes, struct bl_errmsg *msg)
{
    const struct ckpt_layout *layout = &cutter->layout;
    struct holder holder = {.cutter = cutter};
    struct place place = {
        .cutter = cutter,
        .tp_rank = rank % layout->tp,
        .stage = rank / layout->tp % layout->pp,
        .dp_rank = rank / layout->tp / layout->pp,
        .emit = hold,
        .arg = &holder,
    };
    int rc;

    if (rank >= layout->world) {
        return bl_err(msg, BL_ECONFIG, "layout: rank %u of %u", rank, layout->world);
    }
    place.cut[BL_KIND_MOMENT1] = place.cut[BL_KIND_MOMENT2] = layout->zero >= 1;
    place.cut[BL_KIND_PARAM] = layout->zero == 3;
    holder.list.tensors = calloc(cutter->count + 1u, sizeof(struct bl_tensor));
    rc = holder.list.tensors == NULL ? -ENOMEM : place_walk(&place);
    if (rc < 0) {
        bl_extent_list_close(&holder.list);
        return bl_err_code(msg, rc, "layout of rank %u", rank);
    }
    *ret = holder.list;
    if (ret_bytes != NULL) {
        *ret_bytes = holder.bytes;
    }
    return 0;
}

/* ---- What is stored ---- */

struct stored {
    const struct ckpt_layout_cutter *cutter;
    struct bl_extent *extents; /* owned */
    size_t count, room;
};

static int stored_add(void *arg, const struct bl_extent *extent)
{
    struct stored *stored = arg;

    if (stored->count == stored->room) {
        size_t room = stored->room == 0 ? 1024 : stored->room * 2;
        struct bl_extent *grown = realloc(stored->extents, room * sizeof(*grown));

        if (grown == NULL) {
            return -ENOMEM;
        }
        stored->extents = grown;
        stored->room = room;
    }
    stored->extents[stored->count++] = *extent;
    return stored->count > CKPT_EXTENTS_MAX ? BL_ELIMIT : 0;
}

static int box_order(const struct bl_extent *a, const struct bl_extent *b)
{
    if (a->tensor != b->tensor) {
        return a->tensor < b->tensor ? -1 : 1;
    }
    for (uint32_t d = 0; d < BL_TENSOR_DIMS_MAX; d++) {
        if (a->lo[d] != b->lo[d]) {
            return a->lo[d] < b->lo[d] ? -1 : 1;
        }
        if (a->hi[d] != b->hi[d]) {
            return a->hi[d] < b->hi[d] ? -1 : 1;
        }
    }
    return 0;
}

static int sweep_order(const void *a_, const void *b_)
{
    const struct bl_extent *a = a_, *b = b_;
    int order = box_order(a, b);

    if (order != 0) {
        return order;
    }
    return a->flat_lo != b->flat_lo ? (a->flat_lo < b->flat_lo ? -1 : 1) : 0;
}

/* Leaves every element once. Boxes of one tensor are equal or disjoint, so overlaps are of flat
 * ranges of one box. */
static void stored_sweep(struct stored *stored)
{
    uint64_t covered = 0;
    size_t kept = 0;

    qsort(stored->extents, stored->count, sizeof(*stored->extents), sweep_order);
    for (size_t i = 0; i < stored->count; i++) {
        struct bl_extent extent = stored->extents[i];

        if (kept == 0 || box_order(&stored->extents[kept - 1], &extent) != 0) {
            covered = 0;
        }
        extent.flat_lo = max_u64(extent.flat_lo, covered);
        if (extent.flat_lo < extent.flat_hi) {
            covered = extent.flat_hi;
            stored->extents[kept++] = extent;
        }
    }
    stored->count = kept;
}

/* Is a stretch of the box's flat order scattered in the tensor's? */
static bool is_strided(const struct bl_extent *extent, const struct bl_tensor *tensor)
{
    for (uint32_t d = 1; d < tensor->dims; d++) {
        if (extent->lo[d] != 0 || extent->hi[d] != tensor->shape[d]) {
            return true;
        }
    }
    return false;
}

/* Adds slabs [lo, hi) of the box's first dimension as a box of their own, elements [from, to) of
 * it. */
static int add_slabs(struct bl_extent_list *list, const struct bl_extent *extent, uint64_t lo,
                     uint64_t hi, uint64_t from, uint64_t to)
{
    struct bl_extent slabs = *extent;

    slabs.lo[0] = lo;
    slabs.hi[0] = hi;
    slabs.flat_lo = from;
    slabs.flat_hi = to;
    return from < to ? bl_extent_list_add(list, &slabs) : 0;
}

/* A strided box of a large tensor goes into bands of whole rows, the same bands for all boxes of
 * the tensor; what a flat cut leaves of a row at either end is a box of that row. */
static int add_banded(struct bl_extent_list *list, const struct bl_extent *extent,
                      const struct bl_tensor *tensor)
{
    uint64_t bytes = bl_tensor_elems(tensor) * bl_dtype_bytes(tensor->dtype), row, band, at, end;
    int rc = 0;

    if (tensor->dims < 2 || bytes <= CKPT_LAYOUT_BAND_BYTES || !is_strided(extent, tensor)) {
        return bl_extent_list_add(list, extent);
    }
    band = max_u64(1, CKPT_LAYOUT_BAND_BYTES / (bytes / tensor->shape[0]));
    row = 1;
    for (uint32_t d = 1; d < tensor->dims; d++) {
        row *= extent->hi[d] - extent->lo[d];
    }
    at = extent->flat_lo;
    end = extent->flat_hi;
    while (rc == 0 && at < end) {
        uint64_t first = at / row, lo = extent->lo[0] + first, hi, stop;

        hi = at % row != 0 || end - at < row
                 ? lo + 1 /* a piece of a row */
                 : min_u64((lo / band + 1) * band, extent->lo[0] + end / row);
        stop = min_u64(end, (hi - extent->lo[0]) * row);
        rc = add_slabs(list, extent, lo, hi, at - first * row, stop - first * row);
        at = stop;
    }
    return rc;
}

/* The swept extents as a list with the tensors that they are of, in file order. */
static int stored_list(const struct stored *stored, struct bl_extent_list *list)
{
    int rc = 0;

    list->tensors = calloc(stored->cutter->count + 1u, sizeof(struct bl_tensor));
    if (list->tensors == NULL) {
        return -ENOMEM;
    }
    for (size_t i = 0; rc == 0 && i < stored->count; i++) {
        struct bl_extent extent = stored->extents[i];
        const struct bl_tensor *tensor = &stored->cutter->tensors[extent.tensor].tensor;

        if (i == 0 || stored->extents[i - 1].tensor != extent.tensor) {
            list->tensors[list->tensor_count++] = *tensor;
        }
        extent.tensor = list->tensor_count - 1;
        rc = add_banded(list, &extent, tensor);
    }
    return rc < 0 ? rc : ckpt_part_sort(list);
}

int ckpt_layout_stored(const struct ckpt_layout_cutter *cutter, struct bl_extent_list *ret,
                       struct bl_errmsg *msg)
{
    const struct ckpt_layout *layout = &cutter->layout;
    struct stored stored = {.cutter = cutter};
    struct bl_extent_list list = {0};
    int rc = 0;

    for (uint32_t stage = 0; rc == 0 && stage < layout->pp; stage++) {
        for (uint32_t tp_rank = 0; rc == 0 && tp_rank < layout->tp; tp_rank++) {
            struct place place = {
                .cutter = cutter,
                .tp_rank = tp_rank,
                .stage = stage,
                .all = true,
                .emit = stored_add,
                .arg = &stored,
            };

            for (uint32_t kind = BL_KIND_PARAM; kind <= BL_KIND_MOMENT2; kind++) {
                place.cut[kind] = layout->zero >= 1;
            }
            rc = place_walk(&place);
        }
    }
    if (rc == 0 && stored.count > 0) {
        stored_sweep(&stored);
    }
    rc = rc < 0 ? rc : stored_list(&stored, &list);
    free(stored.extents);
    if (rc < 0) {
        bl_extent_list_close(&list);
        return bl_err_code(msg, rc, "layout of %u ranks", layout->world);
    }
    *ret = list;
    return 0;
}
