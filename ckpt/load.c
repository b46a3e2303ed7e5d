/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fills destinations from one copy of a checkpoint. Extents are planned in the order in which files
 * hold them, as many as the memory allows; then each part is read once from front to back, every
 * wanted chunk once, and handed to all who want bytes of it:
 *
 *     chunks      |.......|.......|.......|.......|
 *     spans          |--| |-------------------|          by where they begin
 *                  |-  -  -  -  -  -  -|                 rows a stride apart: one span
 *     active      those that began and are not over: a chunk looks at no others
 *
 * What a bad chunk, a bad part, or a part that cannot be read on would have given becomes a list of
 * extents again, the holes, which the next copy is asked for.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/copy.h"
#include "ckpt/part.h"
#include "ckpt/queue.h"

#define LOAD_MEMORY_DEFAULT (256u * 1024 * 1024)
#define LOAD_PLAN_MIN       (16u * 1024) /* bytes of plan that are always allowed */

struct load_order { /* a wanted extent, for sorting into file order */
    const struct bl_tensor *tensor;
    uint32_t want, extent;
};

struct loading {
    const struct ckpt_copy *copy;
    const struct ckpt_want *wants;
    const struct ckpt_reader_config *config;
    struct ckpt_holes *holes; /* NULL: a fault ends it */
    struct ckpt_load_result *result;
    struct bl_spans spans; /* src_extent is the number of the want */
    struct bl_spans lost;  /* scratch */
    bool *noted;           /* owned: bad parts that are among the holes */
    /* The part that is read. */
    uint32_t part;
    const struct bl_span *part_spans;
    size_t part_count;
    size_t asked, given;       /* spans [0, x) were put into the list of active ones */
    uint32_t *asking, *giving; /* owned: active spans of `wanted` and of `window` */
    size_t asking_count, giving_count, active_room;
    struct ckpt_range *bad; /* owned: chunks that nobody gets, ascending */
    size_t bad_count, bad_room, bad_next;
    uint64_t passed; /* what lies before was handed over */
};

static uint64_t span_end(const struct bl_span *span)
{
    return span->src_offset + (span->rows - 1u) * span->src_stride + span->bytes;
}

/* The first row that ends behind `lo`. */
static uint64_t span_row(const struct bl_span *span, uint64_t lo)
{
    if (span->rows == 1 || lo < span->src_offset + span->bytes) {
        return 0;
    }
    return (lo - span->src_offset - span->bytes) / span->src_stride + 1;
}

static bool span_meets(const struct bl_span *span, uint64_t lo, uint64_t hi)
{
    uint64_t row = span_row(span, lo);

    return row < span->rows && span->src_offset + row * span->src_stride < hi &&
           span_end(span) > lo;
}

/* ---- a part, chunk by chunk ---- */

/* Puts the spans that begin before `hi` into an active list. */
static void active_admit(const struct loading *load, uint32_t *active, size_t *count, size_t *next,
                         uint64_t hi)
{
    while (*next < load->part_count && load->part_spans[*next].src_offset < hi) {
        active[(*count)++] = (uint32_t)(*next)++;
    }
}

static bool load_wanted(void *arg, uint64_t lo, uint64_t hi)
{
    struct loading *load = arg;

    active_admit(load, load->asking, &load->asking_count, &load->asked, hi);
    for (size_t i = 0; i < load->asking_count;) {
        const struct bl_span *span = &load->part_spans[load->asking[i]];

        if (span_end(span) <= lo) {
            load->asking[i] = load->asking[--load->asking_count];
            continue;
        }
        if (span_meets(span, lo, hi)) {
            return true;
        }
        i++;
    }
    return false;
}

/* Copies what of bytes [lo, hi) of the part, which lie at `data`, belongs to the span. */
static void span_copy(struct loading *load, const struct bl_span *span, uint64_t lo, uint64_t hi,
                      const uint8_t *data)
{
    uint8_t *base = load->wants[span->src_extent].base;

    for (uint64_t row = span_row(span, lo); row < span->rows; row++) {
        uint64_t src = span->src_offset + row * span->src_stride;
        uint64_t from = src > lo ? src : lo;
        uint64_t to = src + span->bytes < hi ? src + span->bytes : hi;

        if (src >= hi) {
            break;
        }
        if (from < to) {
            memcpy(base + span->dst_offset + row * span->dst_stride + (from - src),
                   data + (from - lo), (size_t)(to - from));
            load->result->bytes_wanted += to - from;
        }
    }
}

static void load_give(struct loading *load, uint64_t lo, uint64_t hi, const uint8_t *data)
{
    active_admit(load, load->giving, &load->giving_count, &load->given, hi);
    for (size_t i = 0; i < load->giving_count;) {
        const struct bl_span *span = &load->part_spans[load->giving[i]];

        if (span_end(span) > lo) {
            span_copy(load, span, lo, hi, data);
        }
        if (span_end(span) <= hi) {
            load->giving[i] = load->giving[--load->giving_count];
        } else {
            i++;
        }
    }
}

static int load_window(void *arg, uint64_t offset, const uint8_t *data, uint32_t bytes,
                       struct bl_errmsg *msg)
{
    struct loading *load = arg;
    uint64_t end = offset + bytes, at = offset;

    (void)msg;
    while (load->bad_next < load->bad_count && load->bad[load->bad_next].lo < end) {
        const struct ckpt_range *bad = &load->bad[load->bad_next];

        if (bad->lo > at) {
            load_give(load, at, bad->lo, data + (at - offset));
        }
        at = bad->hi > at ? bad->hi : at;
        if (bad->hi > end) {
            break;
        }
        load->bad_next++;
    }
    if (at < end) {
        load_give(load, at, end, data + (at - offset));
    }
    load->passed = end;
    return 0;
}

/* ---- holes ---- */

/* What the span would have got from bytes [lo, hi) of the part, as extents of its want. */
static int span_hole(struct loading *load, const struct bl_span *span, uint64_t lo, uint64_t hi,
                     struct bl_errmsg *msg)
{
    const struct bl_extent_list *list = &load->wants[span->src_extent].list;
    const struct bl_extent *dst = &list->extents[span->dst_extent];
    uint64_t each = bl_dtype_bytes(list->tensors[dst->tensor].dtype);
    int rc = 0;

    for (uint64_t row = span_row(span, lo); rc == 0 && row < span->rows; row++) {
        uint64_t src = span->src_offset + row * span->src_stride;
        uint64_t first = span->dst_offset + row * span->dst_stride - dst->offset;
        uint64_t from = lo > src ? (lo - src) / each : 0;
        uint64_t to = hi < src + span->bytes ? (hi - src + each - 1) / each : span->bytes / each;
        struct bl_extent hole = *dst;

        if (src >= hi) {
            break;
        }
        if (from < to) {
            hole.flat_lo = dst->flat_lo + first / each + from;
            hole.flat_hi = dst->flat_lo + first / each + to;
            hole.offset = dst->offset + first + from * each;
            rc = ckpt_holes_want(load->holes, span->src_extent, &hole, msg);
        }
    }
    return rc;
}

static int part_hole(struct loading *load, uint64_t lo, uint64_t hi, struct bl_errmsg *msg)
{
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < load->part_count && load->part_spans[i].src_offset < hi;
         i++) {
        if (span_end(&load->part_spans[i]) > lo) {
            rc = span_hole(load, &load->part_spans[i], lo, hi, msg);
        }
    }
    return rc;
}

/* Where a chunk stands in the part's file. */
static struct ckpt_range chunk_stored(const struct ckpt_index *index, uint32_t chunk)
{
    struct ckpt_range range;

    if (index->codec == CKPT_CODEC_ZSTD) {
        const struct ckpt_chunk *place = &index->layout[chunk];
        const struct ckpt_frame *last = &index->frames[place->frame + place->planes - 1];

        return (struct ckpt_range){index->frames[place->frame].at, last->at + last->stored};
    }
    ckpt_index_chunk_range(index, chunk, &range.lo, &range.hi);
    return range;
}

static int load_bad_chunk(void *arg, uint32_t chunk, const char *why, struct bl_errmsg *msg)
{
    struct loading *load = arg;
    const struct ckpt_index *index = &load->copy->opened.indexes[load->part];
    const struct ckpt_hole hole = {load->part, chunk, ckpt_index_chunk_tensor(index, chunk)};
    const struct ckpt_range stored = chunk_stored(index, chunk);
    struct ckpt_range range;
    struct bl_errmsg text = {0};
    char path[CKPT_PATH_MAX];
    void *array = load->bad;
    int rc = ckpt_copy_path(load->copy, load->part, path, msg);

    ckpt_index_chunk_range(index, chunk, &range.lo, &range.hi);
    rc = rc < 0
             ? rc
             : ckpt_reserve(&array, &load->bad_room, load->bad_count + 1, sizeof(*load->bad), msg);
    load->bad = array;
    if (rc < 0) {
        return rc;
    }
    load->bad[load->bad_count++] = range;
    rc = bl_err(&text, BL_EDIGEST, "%s: chunk %u (bytes %llu to %llu, tensor %s): %s", path, chunk,
                (unsigned long long)stored.lo, (unsigned long long)stored.hi, hole.tensor, why);
    rc = ckpt_holes_note(load->holes, &hole, rc, text.text, msg);
    return rc < 0 ? rc : part_hole(load, range.lo, range.hi, msg);
}

/* The part cannot be read on: all that was not handed over yet is a hole. */
static int part_broken(struct loading *load, int code, const char *why, struct bl_errmsg *msg)
{
    const struct ckpt_index *index = &load->copy->opened.indexes[load->part];
    uint64_t first = UINT64_MAX, lo = 0, hi = 0;
    struct ckpt_hole hole;
    uint32_t chunk = 0;
    int rc;

    for (size_t i = 0; i < load->part_count; i++) {
        const struct bl_span *span = &load->part_spans[i];
        uint64_t row = span_row(span, load->passed);
        uint64_t at = span->src_offset + row * span->src_stride;

        if (row < span->rows && span_end(span) > load->passed && at < first) {
            first = at > load->passed ? at : load->passed;
        }
    }
    for (; chunk + 1 < index->chunk_count; chunk++) {
        ckpt_index_chunk_range(index, chunk, &lo, &hi);
        if (hi > first) {
            break;
        }
    }
    hole = (struct ckpt_hole){load->part, chunk, ckpt_index_chunk_tensor(index, chunk)};
    rc = ckpt_holes_note(load->holes, &hole, code, why, msg);
    return rc < 0 ? rc : part_hole(load, load->passed, UINT64_MAX, msg);
}

/* ---- one part, all parts ---- */

static bool is_healable(int rc)
{
    return rc != -ENOMEM && rc != BL_EABORTED;
}

/* Reads the part for spans [from, to). */
static int load_part(struct loading *load, size_t from, size_t to, struct bl_errmsg *msg)
{
    char path[CKPT_PATH_MAX];
    struct ckpt_part_reader reader = {
        .io = load->copy->place.store->io,
        .path = path,
        .wanted = load_wanted,
        .window = load_window,
        .bad_chunk = load->holes != NULL ? load_bad_chunk : NULL,
        .arg = load,
        .cancel = load->config->cancel,
        .result = load->result,
    };
    struct bl_errmsg why = {0};
    int rc;

    load->part = load->spans.at[from].src;
    load->part_spans = &load->spans.at[from];
    load->part_count = to - from;
    load->asked = load->given = load->asking_count = load->giving_count = 0;
    load->bad_count = load->bad_next = 0;
    load->passed = 0;
    reader.index = &load->copy->opened.indexes[load->part];
    rc = ckpt_copy_path(load->copy, load->part, path, msg);
    if (rc < 0) {
        return rc;
    }
    rc = ckpt_part_read(&reader, &why);
    if (rc < 0 && load->holes != NULL && is_healable(rc)) {
        return part_broken(load, rc, why.text, msg);
    }
    return rc < 0 ? bl_err(msg, rc, "%s", why.text) : 0;
}

static int load_planned(struct loading *load, struct bl_errmsg *msg)
{
    size_t count = load->spans.count;
    int rc = 0;

    if (count > UINT32_MAX) {
        return bl_err(msg, BL_ELIMIT, "plan of %zu copies", count);
    }
    if (count > load->active_room) {
        free(load->asking);
        free(load->giving);
        load->active_room = count;
        load->asking = malloc(count * sizeof(*load->asking));
        load->giving = malloc(count * sizeof(*load->giving));
        if (load->asking == NULL || load->giving == NULL) {
            return bl_err_code(msg, -ENOMEM, "load");
        }
    }
    bl_spans_sort(&load->spans);
    for (size_t from = 0, to; rc == 0 && from < count; from = to) {
        for (to = from; to < count && load->spans.at[to].src == load->spans.at[from].src; to++) {
        }
        rc = load_part(load, from, to, msg);
    }
    load->spans.count = 0;
    return rc;
}

/* ---- planning ---- */

static int order_compare(const void *a_, const void *b_)
{
    const struct load_order *a = a_, *b = b_;
    uint32_t a_bytes = bl_dtype_bytes(a->tensor->dtype), b_bytes = bl_dtype_bytes(b->tensor->dtype);
    int by_name;

    if (a_bytes != b_bytes) {
        return a_bytes > b_bytes ? -1 : 1;
    }
    by_name = a->tensor == b->tensor ? 0 : strcmp(a->tensor->name, b->tensor->name);
    if (by_name != 0) {
        return by_name;
    }
    if (a->want != b->want) {
        return a->want < b->want ? -1 : 1;
    }
    return a->extent < b->extent ? -1 : a->extent > b->extent;
}

static int order_make(const struct ckpt_want *wants, uint32_t want_count, struct load_order **ret,
                      size_t *ret_count, struct bl_errmsg *msg)
{
    struct load_order *order;
    size_t count = 0, at = 0;

    for (uint32_t w = 0; w < want_count; w++) {
        count += wants[w].list.extent_count;
    }
    order = malloc((count + 1) * sizeof(*order));
    if (order == NULL) {
        return bl_err_code(msg, -ENOMEM, "load of %zu extents", count);
    }
    for (uint32_t w = 0; w < want_count; w++) {
        const struct bl_extent_list *list = &wants[w].list;

        for (uint32_t e = 0; e < list->extent_count; e++) {
            if (list->extents[e].tensor >= list->tensor_count) {
                free(order);
                return bl_err(msg, BL_EFORMAT, "extent %u of destination %u has no tensor", e, w);
            }
            order[at++] = (struct load_order){&list->tensors[list->extents[e].tensor], w, e};
        }
    }
    qsort(order, count, sizeof(*order), order_compare);
    *ret = order;
    *ret_count = count;
    return 0;
}

/* What no good part holds must be in a bad one; then it is a hole. */
static int plan_lost(struct loading *load, const struct load_order *order, struct bl_errmsg *msg)
{
    const struct bl_extent_list missing = {
        .tensors = load->wants[order->want].list.tensors,
        .tensor_count = load->wants[order->want].list.tensor_count,
        .extents = load->spans.missing,
        .extent_count = (uint32_t)load->spans.missing_count,
    };
    const struct ckpt_manifest *manifest = &load->copy->opened.manifest;
    uint64_t elems = load->spans.missing_elems;
    int rc = 0;

    load->lost.count = 0;
    load->lost.missing_elems = 0;
    if (load->copy->lost != NULL) {
        rc =
            bl_holdings_plan(load->copy->lost, &missing, 0, missing.extent_count, &load->lost, msg);
        elems = load->lost.missing_elems;
    }
    if (rc == 0 && elems > 0) {
        rc = bl_err(msg, BL_ENOSTATE, "%llu elements are not there, of tensor %s",
                    (unsigned long long)elems, order->tensor->name);
    }
    bl_spans_sort(&load->lost);
    for (size_t i = 0; rc == 0 && i < load->lost.count; i++) {
        uint32_t part = load->lost.at[i].src;

        if (load->holes == NULL) {
            rc = bl_err(msg, load->copy->bad_rc, "%s", load->copy->bad[part]);
        } else if (!load->noted[part]) {
            const struct ckpt_hole hole = {part, 0, manifest->parts[part].held.tensors[0].name};

            load->noted[part] = true;
            rc =
                ckpt_holes_note(load->holes, &hole, load->copy->bad_rc, load->copy->bad[part], msg);
        }
    }
    for (uint32_t e = 0; rc == 0 && e < missing.extent_count; e++) {
        rc = ckpt_holes_want(load->holes, order->want, &missing.extents[e], msg);
    }
    load->spans.missing_count = 0;
    load->spans.missing_elems = 0;
    return rc;
}

static int plan_extent(struct loading *load, const struct load_order *order, struct bl_errmsg *msg)
{
    size_t before = load->spans.count;
    int rc = bl_holdings_plan(load->copy->good, &load->wants[order->want].list, order->extent,
                              order->extent + 1, &load->spans, msg);

    for (size_t i = before; i < load->spans.count; i++) {
        load->spans.at[i].src_extent = order->want;
    }
    if (rc == 0 && load->spans.missing_elems > 0) {
        rc = plan_lost(load, order, msg);
    }
    return rc;
}

/* How many spans are planned before files are read: what the memory leaves after the buffers. An
 * active list, and the room that a growing array leaves, go with each span. */
static size_t plan_room(const struct ckpt_reader_config *config)
{
    uint64_t memory = config->memory_max > 0 ? config->memory_max : LOAD_MEMORY_DEFAULT;
    uint64_t buffers = (uint64_t)CKPT_QUEUE_DEPTH * CKPT_QUEUE_BYTES;
    uint64_t bytes = memory > 2 * buffers ? memory - 2 * buffers : LOAD_PLAN_MIN;

    return (size_t)(bytes / (3 * sizeof(struct bl_span)));
}

int ckpt_copy_load(const struct ckpt_copy *copy, const struct ckpt_want *wants, uint32_t want_count,
                   const struct ckpt_reader_config *config, struct ckpt_holes *holes,
                   struct ckpt_load_result *result, struct bl_errmsg *msg)
{
    struct loading load = {
        .copy = copy,
        .wants = wants,
        .config = config,
        .holes = holes,
        .result = result,
        .spans = {.keep_missing = true},
    };
    struct load_order *order = NULL;
    size_t count = 0, room = plan_room(config);
    int rc = order_make(wants, want_count, &order, &count, msg);

    load.noted = calloc(copy->opened.manifest.part_count + 1u, sizeof(*load.noted));
    if (rc == 0 && load.noted == NULL) {
        rc = bl_err_code(msg, -ENOMEM, "load");
    }
    for (size_t i = 0; rc == 0 && i < count;) {
        while (rc == 0 && i < count && load.spans.count < room) {
            rc = plan_extent(&load, &order[i++], msg);
        }
        rc = rc < 0 ? rc : load_planned(&load, msg);
    }
    free(order);
    free(load.asking);
    free(load.giving);
    free(load.bad);
    free(load.noted);
    bl_spans_close(&load.spans);
    bl_spans_close(&load.lost);
    return rc;
}
