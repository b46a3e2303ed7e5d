/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The intersection planner.
 *
 * Each wanted extent is walked row by row (rows are contiguous in the tensor's row-major order and
 * in the buffer). The held extents that can meet it are taken in when the walk comes to where they
 * begin, so that few are open at a time, each with its own row:
 *
 *     wanted    |------ row ------|              |------ row ------|
 *     held a  |----|    |-------------|    |-------|
 *     held b      |---------|                      |------------------|      (b is nearer)
 *             \____pending____/ \_____ active: a heap by nearness; rows that are over seek on
 *
 * Pieces that follow each other at one distance on both sides become one span.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/extent_holdings.h"
#include "base/extent_rows.h"

#define NO_SPAN SIZE_MAX

struct live { /* a held extent with rows that the walk has not passed */
    struct bl_extent_rows rows;
    struct bl_extent_row row; /* the one it stands at */
    uint32_t list, extent;
    uint64_t offset; /* of the extent, in its holder's buffer */
    size_t span;     /* its newest in this walk, or NO_SPAN */
};

struct heap {
    uint32_t *at; /* owned; places in `live` */
    size_t count, room;
};

struct sweep {
    const struct bl_holdings *held;
    const struct bl_extent_list *wanted;
    struct bl_spans *spans;
    struct live *live; /* owned */
    size_t live_room;
    uint32_t live_count, *unused; /* owned: places of `live` that are free again */
    size_t unused_count, unused_room;
    struct heap pending; /* by where their row begins, which is ahead of the walk */
    struct heap active;  /* nearest first; rows may be over or, when they surface, ahead */
    /* The wanted extent that is walked. */
    const struct holding_group *group;
    const struct bl_tensor *tensor;
    const struct bl_extent *extent;
    uint32_t index, elem_bytes;
    size_t next; /* ref that was not taken in yet */
};

static int array_reserve(void **array, size_t *room, size_t count, size_t elem_bytes)
{
    if (count <= *room) {
        return 0;
    }
    size_t grown = *room > 0 ? *room : 16;
    while (grown < count) {
        grown *= 2;
    }
    void *fresh = realloc(*array, grown * elem_bytes);
    if (fresh == NULL) {
        return -ENOMEM;
    }
    *array = fresh;
    *room = grown;
    return 0;
}

/* ---- heaps of live extents ---- */

static bool live_nearer(const struct live *a, const struct live *b)
{
    return a->list != b->list ? a->list < b->list : a->extent < b->extent;
}

static bool heap_before(const struct sweep *s, const struct heap *heap, uint32_t a, uint32_t b)
{
    const struct live *x = &s->live[a];
    const struct live *y = &s->live[b];
    if (heap == &s->pending && x->row.logical != y->row.logical) {
        return x->row.logical < y->row.logical;
    }
    return live_nearer(x, y);
}

static int heap_push(struct sweep *s, struct heap *heap, uint32_t place)
{
    void *array = heap->at;
    int rc = array_reserve(&array, &heap->room, heap->count + 1, sizeof(*heap->at));
    heap->at = array;
    if (rc < 0) {
        return rc;
    }
    size_t i = heap->count++;
    for (; i > 0 && heap_before(s, heap, place, heap->at[(i - 1) / 2]); i = (i - 1) / 2) {
        heap->at[i] = heap->at[(i - 1) / 2];
    }
    heap->at[i] = place;
    return 0;
}

static uint32_t heap_pop(struct sweep *s, struct heap *heap)
{
    uint32_t top = heap->at[0];
    uint32_t last = heap->at[--heap->count];
    size_t i = 0;
    for (;;) {
        size_t child = 2 * i + 1;
        if (child + 1 < heap->count && heap_before(s, heap, heap->at[child + 1], heap->at[child])) {
            child++;
        }
        if (child >= heap->count || !heap_before(s, heap, heap->at[child], last)) {
            break;
        }
        heap->at[i] = heap->at[child];
        i = child;
    }
    heap->at[i] = last;
    return top;
}

/* ---- taking held extents in ---- */

static int live_place(struct sweep *s, uint32_t *ret)
{
    if (s->unused_count > 0) {
        *ret = s->unused[--s->unused_count];
        return 0;
    }
    void *array = s->live;
    int rc = array_reserve(&array, &s->live_room, s->live_count + (size_t)1, sizeof(*s->live));
    s->live = array;
    if (rc < 0) {
        return rc;
    }
    array = s->unused;
    rc = array_reserve(&array, &s->unused_room, s->live_room, sizeof(*s->unused));
    s->unused = array;
    *ret = rc < 0 ? 0 : s->live_count++;
    return rc;
}

/* Moves to the row at or behind `at`; puts the extent where it belongs, or drops it at its end. */
static int live_move(struct sweep *s, uint32_t place, uint64_t at)
{
    struct live *live = &s->live[place];
    bl_extent_rows_seek(&live->rows, at);
    do {
        if (!bl_extent_rows_next(&live->rows, &live->row)) {
            s->unused[s->unused_count++] = place;
            return 0;
        }
    } while (live->row.logical + live->row.count <= at);
    return heap_push(s, live->row.logical <= at ? &s->active : &s->pending, place);
}

static int live_add(struct sweep *s, const struct holding_ref *ref, uint64_t at)
{
    const struct bl_extent *extent = &s->held->lists[ref->list]->extents[ref->extent];
    uint32_t place = 0;
    for (uint32_t d = 0; d < s->tensor->dims; d++) {
        if (extent->lo[d] >= s->extent->hi[d] || extent->hi[d] <= s->extent->lo[d]) {
            return 0;
        }
    }
    int rc = live_place(s, &place);
    if (rc < 0) {
        return rc;
    }
    struct live *live = &s->live[place];
    live->list = ref->list;
    live->extent = ref->extent;
    live->offset = extent->offset;
    live->span = NO_SPAN;
    bl_extent_rows_init(&live->rows, extent, s->tensor, s->extent->lo, s->extent->hi);
    return live_move(s, place, at);
}

/* Takes in what begins before `end` (at least at `at`, where the walk stands). */
static int sweep_admit(struct sweep *s, uint64_t at, uint64_t end)
{
    const struct holding_ref *refs = s->held->refs;
    int rc = 0;
    for (; rc == 0 && s->next < s->group->to && refs[s->next].first < end; s->next++) {
        if (refs[s->next].last > at) {
            rc = live_add(s, &refs[s->next], at);
        }
    }
    return rc;
}

/* The nearest that holds element `at`, in *ret; none: s->active is empty then. */
static int sweep_nearest(struct sweep *s, uint64_t at, struct live **ret)
{
    int rc = 0;
    *ret = NULL;
    while (rc == 0 && s->pending.count > 0 && s->live[s->pending.at[0]].row.logical <= at) {
        rc = heap_push(s, &s->active, heap_pop(s, &s->pending));
    }
    while (rc == 0 && s->active.count > 0) {
        struct live *top = &s->live[s->active.at[0]];
        if (top->row.logical <= at && top->row.logical + top->row.count > at) {
            *ret = top;
            return 0;
        }
        uint32_t place = heap_pop(s, &s->active);
        rc = top->row.logical > at ? heap_push(s, &s->pending, place) : live_move(s, place, at);
    }
    return rc;
}

/* How far the nearest holder stays the nearest: up to *io_end at most. */
static int sweep_limit(struct sweep *s, const struct live *top, uint64_t *io_end)
{
    int rc = 0;
    while (rc == 0 && s->pending.count > 0) {
        const struct live *first = &s->live[s->pending.at[0]];
        if (first->row.logical >= *io_end) {
            break;
        }
        if (live_nearer(first, top)) {
            *io_end = first->row.logical;
            break;
        }
        /* It may be nearer than those after `top`: found out when it surfaces. */
        rc = heap_push(s, &s->active, heap_pop(s, &s->pending));
    }
    return rc;
}

/* ---- what comes out ---- */

/* Adds `bytes` from `live` to its newest span when they go on there, at once or a stride on. */
static bool span_extend(struct bl_span *span, uint64_t dst, uint64_t src, uint64_t bytes)
{
    uint64_t last = span->rows - 1;
    if (span->rows == 1 && span->dst_offset + span->bytes == dst &&
        span->src_offset + span->bytes == src) {
        span->bytes += bytes;
        return true;
    }
    if (span->bytes != bytes || span->rows == UINT32_MAX) {
        return false;
    }
    if (span->rows == 1) {
        span->dst_stride = dst - span->dst_offset;
        span->src_stride = src - span->src_offset;
    } else if (dst - (span->dst_offset + last * span->dst_stride) != span->dst_stride ||
               src - (span->src_offset + last * span->src_stride) != span->src_stride) {
        return false;
    }
    span->rows++;
    return true;
}

static int span_push(struct sweep *s, struct live *live, uint64_t dst, uint64_t src, uint64_t bytes)
{
    struct bl_spans *spans = s->spans;
    if (live->span != NO_SPAN && span_extend(&spans->at[live->span], dst, src, bytes)) {
        return 0;
    }
    void *array = spans->at;
    int rc = array_reserve(&array, &spans->room, spans->count + 1, sizeof(*spans->at));
    spans->at = array;
    if (rc < 0) {
        return rc;
    }
    live->span = spans->count;
    spans->at[spans->count++] = (struct bl_span){
        .dst_extent = s->index,
        .src = live->list,
        .src_extent = live->extent,
        .rows = 1,
        .dst_offset = dst,
        .src_offset = src,
        .bytes = bytes,
    };
    return 0;
}

/* Notes elements [lo, hi), counted from the wanted extent's own first, as missing. */
static int missing_push(struct sweep *s, uint64_t lo, uint64_t hi)
{
    struct bl_spans *spans = s->spans;
    uint64_t flat_lo = s->extent->flat_lo + lo;
    uint64_t flat_hi = s->extent->flat_lo + hi;
    if (spans->missing_elems == 0 || s->extent->tensor < spans->missing_tensor) {
        spans->missing_tensor = s->extent->tensor;
    }
    spans->missing_elems += hi - lo;
    if (!spans->keep_missing) {
        return 0;
    }
    struct bl_extent *newest =
        spans->missing_count > 0 ? &spans->missing[spans->missing_count - 1] : NULL;
    uint64_t offset = s->extent->offset + lo * s->elem_bytes;
    if (newest != NULL && lo > 0 && newest->flat_hi == flat_lo &&
        newest->tensor == s->extent->tensor &&
        newest->offset + (newest->flat_hi - newest->flat_lo) * s->elem_bytes == offset) {
        newest->flat_hi = flat_hi;
        return 0;
    }
    void *array = spans->missing;
    int rc = array_reserve(&array, &spans->missing_room, spans->missing_count + 1,
                           sizeof(*spans->missing));
    spans->missing = array;
    if (rc < 0) {
        return rc;
    }
    newest = &spans->missing[spans->missing_count++];
    *newest = *s->extent;
    newest->flat_lo = flat_lo;
    newest->flat_hi = flat_hi;
    newest->offset = offset;
    return 0;
}

/* ---- the walk ---- */

/* The piece of the wanted row that begins at `at` and ends where the holder changes: *ret_end. */
static int sweep_piece(struct sweep *s, const struct bl_extent_row *row, uint64_t at,
                       uint64_t *ret_end)
{
    uint64_t local = row->local + (at - row->logical);
    uint64_t end = row->logical + row->count;
    struct live *top = NULL;
    int rc = sweep_admit(s, at, at + 1);
    rc = rc < 0 ? rc : sweep_nearest(s, at, &top);
    if (rc < 0) {
        return rc;
    }
    if (top == NULL) {
        if (s->next < s->group->to && s->held->refs[s->next].first < end) {
            end = s->held->refs[s->next].first;
        }
        if (s->pending.count > 0 && s->live[s->pending.at[0]].row.logical < end) {
            end = s->live[s->pending.at[0]].row.logical;
        }
        *ret_end = end;
        return missing_push(s, local, local + (end - at));
    }
    uint32_t place = s->active.at[0];
    end = top->row.logical + top->row.count < end ? top->row.logical + top->row.count : end;
    rc = sweep_admit(s, at, end);
    rc = rc < 0 ? rc : sweep_limit(s, &s->live[place], &end);
    if (rc < 0) {
        return rc;
    }
    top = &s->live[place]; /* taking others in may have moved it */
    *ret_end = end;
    return span_push(s, top, s->extent->offset + local * s->elem_bytes,
                     top->offset + (top->row.local + (at - top->row.logical)) * s->elem_bytes,
                     (end - at) * s->elem_bytes);
}

/* First ref of the group that reaches behind `first`. */
static size_t group_find(const struct sweep *s, uint64_t first)
{
    size_t lo = s->group->from;
    size_t hi = s->group->to;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (s->held->refs[mid].reach <= first) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo;
}

static int sweep_extent(struct sweep *s)
{
    static const struct holding_group nothing = {.from = 0, .to = 0};
    struct bl_extent_rows rows;
    struct bl_extent_row row;
    uint64_t first, last;
    int rc = 0;
    if (bl_extent_elems(s->extent) == 0) {
        return 0;
    }
    s->group = s->group == NULL ? &nothing : s->group;
    holding_range(s->extent, s->tensor, &first, &last);
    s->next = group_find(s, first);
    s->pending.count = s->active.count = s->unused_count = 0;
    s->live_count = 0;
    bl_extent_rows_init(&rows, s->extent, s->tensor, NULL, NULL);
    while (rc == 0 && bl_extent_rows_next(&rows, &row)) {
        for (uint64_t at = row.logical; rc == 0 && at < row.logical + row.count;) {
            rc = sweep_piece(s, &row, at, &at);
        }
    }
    return rc;
}

static void sweep_close(struct sweep *s)
{
    free(s->live);
    free(s->unused);
    free(s->pending.at);
    free(s->active.at);
}

int bl_holdings_plan(const struct bl_holdings *holdings, const struct bl_extent_list *wanted,
                     uint32_t lo, uint32_t hi, struct bl_spans *spans, struct bl_errmsg *msg)
{
    struct sweep s = {.held = holdings, .wanted = wanted, .spans = spans};
    uint32_t tensor = UINT32_MAX;
    int rc = 0;
    for (uint32_t e = lo; rc == 0 && e < hi; e++) {
        s.index = e;
        s.extent = &wanted->extents[e];
        if (s.extent->tensor >= wanted->tensor_count) {
            rc = bl_err(msg, BL_EFORMAT, "extent %u names tensor %u of %u", e, s.extent->tensor,
                        wanted->tensor_count);
            break;
        }
        s.tensor = &wanted->tensors[s.extent->tensor];
        rc = bl_extent_check(s.extent, s.tensor, msg);
        if (rc < 0) {
            rc = bl_err_in(msg, rc, "extent %u", e);
            break;
        }
        s.elem_bytes = bl_dtype_bytes(s.tensor->dtype);
        if (s.extent->tensor != tensor || s.group == NULL) {
            tensor = s.extent->tensor;
            s.group = holding_find(holdings, s.tensor->name);
        }
        if (s.group != NULL && s.group->tensor != NULL &&
            (s.group->differs || !holding_same_tensor(s.group->tensor, s.tensor))) {
            rc = bl_err(msg, BL_EFORMAT, "%s: shape or dtype differs between the two sides",
                        s.tensor->name);
            break;
        }
        rc = sweep_extent(&s);
        if (rc < 0) {
            rc = bl_err_code(msg, rc, "%s: planning", s.tensor->name);
        }
    }
    sweep_close(&s);
    return rc;
}

static int span_order(const void *a, const void *b)
{
    const struct bl_span *x = a;
    const struct bl_span *y = b;
    if (x->src != y->src) {
        return x->src < y->src ? -1 : 1;
    }
    if (x->src_offset != y->src_offset) {
        return x->src_offset < y->src_offset ? -1 : 1;
    }
    return x->dst_offset < y->dst_offset ? -1 : x->dst_offset > y->dst_offset;
}

void bl_spans_sort(struct bl_spans *spans)
{
    bool sorted = true;
    for (size_t i = 1; sorted && i < spans->count; i++) {
        sorted = span_order(&spans->at[i - 1], &spans->at[i]) <= 0;
    }
    if (!sorted) {
        qsort(spans->at, spans->count, sizeof(*spans->at), span_order);
    }
}

void bl_spans_close(struct bl_spans *spans)
{
    if (spans != NULL) {
        free(spans->at);
        free(spans->missing);
        memset(spans, 0, sizeof(*spans));
    }
}
