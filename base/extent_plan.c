/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The intersection planner.
 *
 * Tensors of all lists are matched by sorting their names. Then, tensor by tensor, every extent is
 * taken apart into its rows (intervals of the tensor's row-major order); source rows are first
 * clipped to the bounding box of what is wanted. One sweep over the source rows, with a heap by
 * (source, extent), leaves disjoint segments, each with its nearest holder; each wanted row then
 * walks the segments that it meets. All is sorts, one heap and output: O(E log E) in the rows.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/extent.h"
#include "base/extent_rows.h"

/* Rows of one tensor over all lists: more is refused before memory is taken for it. */
#define PLAN_ROWS_MAX ((size_t)1 << 26)
#define PLAN_UNWANTED UINT32_MAX

struct plan_interval { /* one row, or one segment of a row, of one extent */
    uint64_t lo;       /* in the tensor's row-major order */
    uint64_t hi;
    uint64_t local; /* elements from the extent's offset to `lo` */
    uint32_t list;  /* 0 is the wanted list, s + 1 is source s */
    uint32_t extent;
};

struct plan_intervals {
    struct plan_interval *at;
    size_t count;
    size_t capacity;
};

struct plan_name {
    const char *name;
    uint32_t list;
    uint32_t tensor;
};

struct plan_ref { /* an extent of a wanted tensor */
    uint32_t group;
    uint32_t list;
    uint32_t extent;
};

struct plan_work {
    const struct bl_extent_list **lists; /* [0] wanted, [s + 1] source s */
    uint32_t list_count;
    uint32_t **groups;     /* by list and tensor: the wanted tensor it is, or PLAN_UNWANTED */
    struct plan_ref *refs; /* sorted by (group, list, extent) */
    size_t ref_count;
    struct plan_intervals wanted;
    struct plan_intervals held;
    struct plan_intervals segments;
    size_t *heap; /* indices in `held`, nearest holder on top */
    size_t heap_count;
    size_t heap_capacity;
    struct bl_plan plan;
    size_t run_capacity;
    uint32_t missing_tensor; /* lowest index in the wanted table, or UINT32_MAX */
};

static int plan_reserve(void **array, size_t *capacity, size_t count, size_t elem_bytes)
{
    if (count <= *capacity) {
        return 0;
    }
    size_t grown = *capacity > 0 ? *capacity : 64;
    while (grown < count) {
        grown *= 2;
    }
    void *fresh = realloc(*array, grown * elem_bytes);
    if (fresh == NULL) {
        return -ENOMEM;
    }
    *array = fresh;
    *capacity = grown;
    return 0;
}

static int intervals_push(struct plan_intervals *list, const struct plan_interval *interval)
{
    if (list->count >= PLAN_ROWS_MAX) {
        return BL_ELIMIT;
    }
    void *array = list->at;
    int rc = plan_reserve(&array, &list->capacity, list->count + 1, sizeof(*list->at));
    list->at = array;
    if (rc == 0) {
        list->at[list->count++] = *interval;
    }
    return rc;
}

static int name_order(const void *a, const void *b)
{
    const struct plan_name *x = a;
    const struct plan_name *y = b;
    int by_name = strcmp(x->name, y->name);
    if (by_name != 0) {
        return by_name;
    }
    if (x->list != y->list) {
        return x->list < y->list ? -1 : 1;
    }
    return x->tensor < y->tensor ? -1 : x->tensor > y->tensor;
}

static int ref_order(const void *a, const void *b)
{
    const struct plan_ref *x = a;
    const struct plan_ref *y = b;
    if (x->group != y->group) {
        return x->group < y->group ? -1 : 1;
    }
    if (x->list != y->list) {
        return x->list < y->list ? -1 : 1;
    }
    return x->extent < y->extent ? -1 : x->extent > y->extent;
}

static int interval_order(const void *a, const void *b)
{
    const struct plan_interval *x = a;
    const struct plan_interval *y = b;
    if (x->lo != y->lo) {
        return x->lo < y->lo ? -1 : 1;
    }
    if (x->list != y->list) {
        return x->list < y->list ? -1 : 1;
    }
    return x->extent < y->extent ? -1 : x->extent > y->extent;
}

static int run_order(const void *a, const void *b)
{
    const struct bl_run *x = a;
    const struct bl_run *y = b;
    if (x->src != y->src) {
        return x->src < y->src ? -1 : 1;
    }
    if (x->src_offset != y->src_offset) {
        return x->src_offset < y->src_offset ? -1 : 1;
    }
    return x->dst_offset < y->dst_offset ? -1 : x->dst_offset > y->dst_offset;
}

static int plan_same_tensor(const struct bl_tensor *a, const struct bl_tensor *b)
{
    return a->dtype == b->dtype && a->dims == b->dims &&
           memcmp(a->shape, b->shape, a->dims * sizeof(a->shape[0])) == 0;
}

static int plan_check_lists(const struct plan_work *work, struct bl_errmsg *msg)
{
    for (uint32_t l = 0; l < work->list_count; l++) {
        const struct bl_extent_list *list = work->lists[l];
        for (uint32_t t = 0; t < list->tensor_count; t++) {
            if (memchr(list->tensors[t].name, '\0', BL_TENSOR_NAME_MAX) == NULL ||
                list->tensors[t].dims > BL_TENSOR_DIMS_MAX) {
                return bl_err(msg, BL_EFORMAT, "tensor %u: bad name or dimensions", t);
            }
        }
        for (uint32_t e = 0; e < list->extent_count; e++) {
            uint32_t tensor = list->extents[e].tensor;
            if (tensor >= list->tensor_count) {
                return bl_err(msg, BL_EFORMAT, "extent %u names tensor %u of %u", e, tensor,
                              list->tensor_count);
            }
            int rc = bl_extent_check(&list->extents[e], &list->tensors[tensor], msg);
            if (rc < 0) {
                return bl_err_in(msg, rc, "extent %u", e);
            }
        }
    }
    return 0;
}

/* Gives every tensor of every list the index of the wanted tensor of its name. */
static int plan_match_names(struct plan_work *work, struct bl_errmsg *msg)
{
    size_t count = 0;
    for (uint32_t l = 0; l < work->list_count; l++) {
        count += work->lists[l]->tensor_count;
        work->groups[l] = calloc(work->lists[l]->tensor_count + (size_t)1, sizeof(uint32_t));
        if (work->groups[l] == NULL) {
            return -ENOMEM;
        }
    }
    struct plan_name *names = calloc(count + 1, sizeof(*names));
    if (names == NULL) {
        return -ENOMEM;
    }
    size_t n = 0;
    for (uint32_t l = 0; l < work->list_count; l++) {
        for (uint32_t t = 0; t < work->lists[l]->tensor_count; t++) {
            names[n++] = (struct plan_name){work->lists[l]->tensors[t].name, l, t};
        }
    }
    qsort(names, count, sizeof(*names), name_order);
    int rc = 0;
    const struct plan_name *head = NULL; /* the first of this name */
    for (size_t i = 0; i < count && rc == 0; i++) {
        if (head == NULL || strcmp(head->name, names[i].name) != 0) {
            head = &names[i];
        }
        uint32_t group = head->list == 0 ? head->tensor : PLAN_UNWANTED;
        work->groups[names[i].list][names[i].tensor] = group;
        if (group != PLAN_UNWANTED &&
            !plan_same_tensor(&work->lists[0]->tensors[group],
                              &work->lists[names[i].list]->tensors[names[i].tensor])) {
            rc = bl_err(msg, BL_EFORMAT, "%s: shape or dtype differs between the two sides",
                        names[i].name);
        }
    }
    free(names);
    return rc;
}

static int plan_collect_refs(struct plan_work *work)
{
    size_t count = 0;
    for (uint32_t l = 0; l < work->list_count; l++) {
        count += work->lists[l]->extent_count;
    }
    work->refs = calloc(count + 1, sizeof(*work->refs));
    if (work->refs == NULL) {
        return -ENOMEM;
    }
    for (uint32_t l = 0; l < work->list_count; l++) {
        for (uint32_t e = 0; e < work->lists[l]->extent_count; e++) {
            uint32_t group = work->groups[l][work->lists[l]->extents[e].tensor];
            if (group != PLAN_UNWANTED) {
                work->refs[work->ref_count++] = (struct plan_ref){group, l, e};
            }
        }
    }
    qsort(work->refs, work->ref_count, sizeof(*work->refs), ref_order);
    return 0;
}

static int plan_collect_rows(struct plan_intervals *into, struct bl_extent_rows *rows,
                             const struct plan_ref *ref)
{
    struct bl_extent_row row;
    int rc = 0;
    while (rc == 0 && bl_extent_rows_next(rows, &row)) {
        struct plan_interval interval = {
            row.logical, row.logical + row.count, row.local, ref->list, ref->extent,
        };
        rc = intervals_push(into, &interval);
    }
    return rc;
}

/* Fills `wanted` and `held` with the rows of refs [first, end), which are one tensor's. */
static int plan_collect_tensor(struct plan_work *work, size_t first, size_t end)
{
    uint64_t lo[BL_TENSOR_DIMS_MAX];
    uint64_t hi[BL_TENSOR_DIMS_MAX] = {0};
    memset(lo, 0xff, sizeof(lo));
    work->wanted.count = 0;
    work->held.count = 0;
    const struct bl_tensor *tensor = &work->lists[0]->tensors[work->refs[first].group];
    for (size_t i = first; i < end; i++) {
        const struct plan_ref *ref = &work->refs[i];
        const struct bl_extent *extent = &work->lists[ref->list]->extents[ref->extent];
        struct bl_extent_rows rows;
        bl_extent_rows_init(&rows, extent, tensor, ref->list > 0 ? lo : NULL, hi);
        if (ref->list == 0 && rows.left > 0) {
            for (uint32_t d = 0; d < rows.dims; d++) {
                lo[d] = rows.lo[d] < lo[d] ? rows.lo[d] : lo[d];
                hi[d] = rows.hi[d] > hi[d] ? rows.hi[d] : hi[d];
            }
        }
        int rc = plan_collect_rows(ref->list > 0 ? &work->held : &work->wanted, &rows, ref);
        if (rc < 0) {
            return rc;
        }
    }
    if (work->held.count > 1) {
        qsort(work->held.at, work->held.count, sizeof(*work->held.at), interval_order);
    }
    return 0;
}

/* Is held interval `a` nearer than `b`? */
static int held_is_nearer(const struct plan_work *work, size_t a, size_t b)
{
    const struct plan_interval *x = &work->held.at[a];
    const struct plan_interval *y = &work->held.at[b];
    if (x->list != y->list) {
        return x->list < y->list;
    }
    return x->extent != y->extent ? x->extent < y->extent : a < b;
}

static void heap_swap(struct plan_work *work, size_t i, size_t j)
{
    size_t keep = work->heap[i];
    work->heap[i] = work->heap[j];
    work->heap[j] = keep;
}

static int heap_push(struct plan_work *work, size_t index)
{
    void *array = work->heap;
    int rc = plan_reserve(&array, &work->heap_capacity, work->heap_count + 1, sizeof(*work->heap));
    work->heap = array;
    if (rc < 0) {
        return rc;
    }
    size_t i = work->heap_count++;
    work->heap[i] = index;
    while (i > 0 && held_is_nearer(work, work->heap[i], work->heap[(i - 1) / 2])) {
        heap_swap(work, i, (i - 1) / 2);
        i = (i - 1) / 2;
    }
    return 0;
}

static void heap_pop(struct plan_work *work)
{
    work->heap[0] = work->heap[--work->heap_count];
    for (size_t i = 0;;) {
        size_t best = i;
        for (size_t child = 2 * i + 1; child <= 2 * i + 2; child++) {
            if (child < work->heap_count &&
                held_is_nearer(work, work->heap[child], work->heap[best])) {
                best = child;
            }
        }
        if (best == i) {
            return;
        }
        heap_swap(work, i, best);
        i = best;
    }
}

/* Adds [lo, hi) of the held interval to the segments; joins it to the last where it goes on. */
static int segment_push(struct plan_work *work, const struct plan_interval *held, uint64_t lo,
                        uint64_t hi)
{
    struct plan_interval segment = *held;
    segment.lo = lo;
    segment.hi = hi;
    segment.local += lo - held->lo;
    if (work->segments.count > 0) {
        struct plan_interval *last = &work->segments.at[work->segments.count - 1];
        if (last->hi == lo && last->list == held->list && last->extent == held->extent &&
            last->local + (last->hi - last->lo) == segment.local) {
            last->hi = hi;
            return 0;
        }
    }
    return intervals_push(&work->segments, &segment);
}

/* The sweep: `held`, which overlap, become `segments`, which do not. */
static int plan_resolve(struct plan_work *work)
{
    const struct plan_interval *held = work->held.at;
    size_t next = 0;
    uint64_t at = 0;
    work->segments.count = 0;
    work->heap_count = 0;
    while (next < work->held.count || work->heap_count > 0) {
        if (work->heap_count == 0) {
            at = held[next].lo;
        }
        for (; next < work->held.count && held[next].lo <= at; next++) {
            int rc = heap_push(work, next);
            if (rc < 0) {
                return rc;
            }
        }
        while (work->heap_count > 0 && held[work->heap[0]].hi <= at) {
            heap_pop(work);
        }
        if (work->heap_count == 0) {
            continue;
        }
        const struct plan_interval *top = &held[work->heap[0]];
        uint64_t end = top->hi;
        if (next < work->held.count && held[next].lo < end) {
            end = held[next].lo;
        }
        int rc = segment_push(work, top, at, end);
        if (rc < 0) {
            return rc;
        }
        at = end;
    }
    return 0;
}

static int plan_push_run(struct plan_work *work, const struct plan_interval *wanted,
                         const struct plan_interval *segment, uint64_t lo, uint64_t hi)
{
    void *array = work->plan.runs;
    int rc = plan_reserve(&array, &work->run_capacity, work->plan.run_count + 1,
                          sizeof(*work->plan.runs));
    work->plan.runs = array;
    if (rc < 0) {
        return rc;
    }
    const struct bl_extent *dst = &work->lists[0]->extents[wanted->extent];
    const struct bl_extent *src = &work->lists[segment->list]->extents[segment->extent];
    uint64_t elem_bytes = bl_dtype_bytes(work->lists[0]->tensors[dst->tensor].dtype);
    work->plan.runs[work->plan.run_count++] = (struct bl_run){
        .dst_extent = wanted->extent,
        .src = segment->list - 1,
        .src_extent = segment->extent,
        .dst_offset = dst->offset + (wanted->local + (lo - wanted->lo)) * elem_bytes,
        .src_offset = src->offset + (segment->local + (lo - segment->lo)) * elem_bytes,
        .bytes = (hi - lo) * elem_bytes,
    };
    return 0;
}

static void plan_note_missing(struct plan_work *work, uint32_t tensor, uint64_t elems)
{
    work->plan.missing_elems += elems;
    if (tensor < work->missing_tensor) {
        work->missing_tensor = tensor;
    }
}

/* First segment that ends behind `at`. */
static size_t plan_find_segment(const struct plan_work *work, uint64_t at)
{
    size_t lo = 0;
    size_t hi = work->segments.count;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (work->segments.at[mid].hi <= at) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo;
}

/* Walks the segments that one wanted row meets. */
static int plan_fill_row(struct plan_work *work, const struct plan_interval *wanted,
                         uint32_t tensor)
{
    uint64_t at = wanted->lo;
    for (size_t s = plan_find_segment(work, at);
         s < work->segments.count && work->segments.at[s].lo < wanted->hi; s++) {
        const struct plan_interval *segment = &work->segments.at[s];
        uint64_t lo = segment->lo > at ? segment->lo : at;
        uint64_t hi = segment->hi < wanted->hi ? segment->hi : wanted->hi;
        if (lo > at) {
            plan_note_missing(work, tensor, lo - at);
        }
        int rc = plan_push_run(work, wanted, segment, lo, hi);
        if (rc < 0) {
            return rc;
        }
        at = hi;
    }
    if (at < wanted->hi) {
        plan_note_missing(work, tensor, wanted->hi - at);
    }
    return 0;
}

static int plan_all_tensors(struct plan_work *work, struct bl_errmsg *msg)
{
    for (size_t first = 0, end; first < work->ref_count; first = end) {
        uint32_t tensor = work->refs[first].group;
        for (end = first + 1; end < work->ref_count && work->refs[end].group == tensor; end++) {
        }
        if (work->refs[first].list != 0) {
            continue; /* in the wanted table, but no extent of it is wanted */
        }
        int rc = plan_collect_tensor(work, first, end);
        if (rc == 0) {
            rc = plan_resolve(work);
        }
        for (size_t i = 0; i < work->wanted.count && rc == 0; i++) {
            rc = plan_fill_row(work, &work->wanted.at[i], tensor);
        }
        if (rc < 0) {
            return bl_err_code(msg, rc, "%s: planning", work->lists[0]->tensors[tensor].name);
        }
    }
    return 0;
}

static void plan_merge_runs(struct bl_plan *plan)
{
    size_t out = 0;
    if (plan->run_count == 0) {
        return;
    }
    qsort(plan->runs, plan->run_count, sizeof(*plan->runs), run_order);
    for (size_t i = 1; i < plan->run_count; i++) {
        struct bl_run *last = &plan->runs[out];
        const struct bl_run *run = &plan->runs[i];
        if (last->src == run->src && last->src_extent == run->src_extent &&
            last->dst_extent == run->dst_extent &&
            last->src_offset + last->bytes == run->src_offset &&
            last->dst_offset + last->bytes == run->dst_offset) {
            last->bytes += run->bytes;
        } else {
            plan->runs[++out] = *run;
        }
    }
    plan->run_count = out + 1;
}

static void plan_work_close(struct plan_work *work)
{
    for (uint32_t l = 0; work->groups != NULL && l < work->list_count; l++) {
        free(work->groups[l]);
    }
    free(work->groups);
    free(work->lists);
    free(work->refs);
    free(work->wanted.at);
    free(work->held.at);
    free(work->segments.at);
    free(work->heap);
    bl_plan_close(&work->plan);
}

int bl_plan_make(struct bl_plan *ret, const struct bl_extent_list *wanted,
                 const struct bl_extent_list *const *sources, uint32_t source_count,
                 struct bl_errmsg *msg)
{
    struct plan_work work = {.list_count = source_count + 1, .missing_tensor = UINT32_MAX};
    int rc = -ENOMEM;
    work.lists = calloc(work.list_count, sizeof(struct bl_extent_list *));
    work.groups = calloc(work.list_count, sizeof(*work.groups));
    if (work.lists == NULL || work.groups == NULL) {
        goto out;
    }
    work.lists[0] = wanted;
    for (uint32_t s = 0; s < source_count; s++) {
        work.lists[s + 1] = sources[s];
    }
    rc = plan_check_lists(&work, msg);
    if (rc == 0) {
        rc = plan_match_names(&work, msg);
    }
    if (rc == 0) {
        rc = plan_collect_refs(&work);
    }
    if (rc == 0) {
        rc = plan_all_tensors(&work, msg);
    }
    if (rc == 0) {
        plan_merge_runs(&work.plan);
        if (work.missing_tensor != UINT32_MAX) {
            memcpy(work.plan.missing_name, wanted->tensors[work.missing_tensor].name,
                   BL_TENSOR_NAME_MAX);
        }
        *ret = work.plan;
        memset(&work.plan, 0, sizeof(work.plan));
    }
out:
    plan_work_close(&work);
    if (rc == -ENOMEM) {
        return bl_err_code(msg, rc, "plan");
    }
    return rc;
}

void bl_plan_close(struct bl_plan *plan)
{
    if (plan != NULL) {
        free(plan->runs);
        memset(plan, 0, sizeof(*plan));
    }
}
