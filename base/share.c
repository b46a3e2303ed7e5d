/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sharing in four steps: all extents sorted by tensor, box and range; cut into pieces of which
 * every element has the same holders; each piece given to holders; each node's pieces made a list.
 */
#include "base/share.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define CUT_BYTES 4096u /* pieces are cut at multiples of it */

struct held { /* an extent of a holding */
    uint64_t key;
    const struct bl_tensor *tensor;
    const struct bl_extent *extent;
    uint32_t node;
};

struct piece { /* elements that the same nodes hold */
    const struct held *like;
    uint64_t lo, hi;
    size_t holders; /* first of them */
    uint32_t holder_count;
    uint32_t number; /* in file order of names */
};

struct given {
    const struct piece *piece;
    uint64_t lo, hi;
    uint32_t node;
};

struct sharer {
    struct held *held;
    size_t held_count;
    struct piece *pieces;
    size_t piece_count, piece_room;
    uint32_t *holders;
    size_t holder_count, holder_room;
    struct given *given;
    size_t given_count, given_room;
    uint64_t *loads;   /* bytes, by node */
    uint32_t *by_load; /* holders of a piece, while it is given */
    uint32_t node_count;
};

/* Room for one more element. */
static int room_for(void *array_, size_t count, size_t *room, size_t size)
{
    void **array = array_;
    size_t wanted = *room == 0 ? 64 : 2 * *room;
    void *grown;

    if (count < *room) {
        return 0;
    }
    grown = realloc(*array, wanted * size);
    if (grown == NULL) {
        return -ENOMEM;
    }
    *array = grown;
    *room = wanted;
    return 0;
}

/* ---- sorting ---- */

static int same_box(const struct held *a, const struct held *b)
{
    size_t bytes = a->tensor->dims * sizeof(uint64_t);

    return a->key == b->key && strcmp(a->tensor->name, b->tensor->name) == 0 &&
           a->tensor->dims == b->tensor->dims && memcmp(a->extent->lo, b->extent->lo, bytes) == 0 &&
           memcmp(a->extent->hi, b->extent->hi, bytes) == 0;
}

static int held_order(const void *a_, const void *b_)
{
    const struct held *a = a_, *b = b_;
    int order = strcmp(a->tensor->name, b->tensor->name);

    if (order != 0) {
        return order;
    }
    if (a->key != b->key) {
        return a->key < b->key ? -1 : 1;
    }
    order = memcmp(a->extent->lo, b->extent->lo, a->tensor->dims * sizeof(uint64_t));
    order = order != 0 ? order
                       : memcmp(a->extent->hi, b->extent->hi, a->tensor->dims * sizeof(uint64_t));
    if (order != 0) {
        return order; /* two boxes with one key */
    }
    if (a->extent->flat_lo != b->extent->flat_lo) {
        return a->extent->flat_lo < b->extent->flat_lo ? -1 : 1;
    }
    return a->node < b->node ? -1 : a->node > b->node;
}

static int tensor_is_same(const struct bl_tensor *a, const struct bl_tensor *b)
{
    return a->dtype == b->dtype && a->kind == b->kind && a->dims == b->dims &&
           memcmp(a->shape, b->shape, a->dims * sizeof(uint64_t)) == 0;
}

static int gather_one(struct sharer *s, const struct bl_holding *holding, struct bl_errmsg *msg)
{
    const struct bl_extent_list *list = holding->list;
    int rc = holding->node < s->node_count ? 0 : bl_err(msg, -EINVAL, "a holder of no node");

    for (uint32_t i = 0; rc == 0 && i < list->extent_count; i++) {
        const struct bl_extent *extent = &list->extents[i];
        const struct bl_tensor *tensor = &list->tensors[extent->tensor];
        uint64_t box[2 * BL_TENSOR_DIMS_MAX] = {0};

        rc = bl_extent_check(extent, tensor, msg);
        if (rc == 0 && bl_extent_elems(extent) > 0) {
            memcpy(box, extent->lo, tensor->dims * sizeof(uint64_t));
            memcpy(box + BL_TENSOR_DIMS_MAX, extent->hi, tensor->dims * sizeof(uint64_t));
            s->held[s->held_count++] =
                (struct held){bl_xxh3(box, sizeof(box)), tensor, extent, holding->node};
        }
    }
    return rc;
}

static int gather(struct sharer *s, const struct bl_holding *holdings, uint32_t holding_count,
                  struct bl_errmsg *msg)
{
    size_t count = 0;
    int rc = 0;

    for (uint32_t h = 0; h < holding_count; h++) {
        count += holdings[h].list->extent_count;
    }
    s->held = calloc(count + 1, sizeof(*s->held));
    if (s->held == NULL) {
        return bl_err_code(msg, -ENOMEM, "%zu extents", count);
    }
    for (uint32_t h = 0; rc == 0 && h < holding_count; h++) {
        rc = gather_one(s, &holdings[h], msg);
    }
    if (rc == 0) {
        qsort(s->held, s->held_count, sizeof(*s->held), held_order);
    }
    for (size_t i = 1; rc == 0 && i < s->held_count; i++) {
        if (strcmp(s->held[i].tensor->name, s->held[i - 1].tensor->name) == 0 &&
            !tensor_is_same(s->held[i].tensor, s->held[i - 1].tensor)) {
            rc = bl_err(msg, BL_EFORMAT, "tensor %s has two shapes, dtypes or kinds",
                        s->held[i].tensor->name);
        }
    }
    return rc;
}

/* ---- cutting ---- */

static int holder_add(struct sharer *s, struct piece *piece, uint32_t node)
{
    int rc = room_for(&s->holders, s->holder_count, &s->holder_room, sizeof(*s->holders));

    if (rc == 0) {
        s->holders[s->holder_count++] = node;
        piece->holder_count++;
    }
    return rc;
}

static int node_order(const void *a_, const void *b_)
{
    const uint32_t *a = a_, *b = b_;

    return *a < *b ? -1 : *a > *b;
}

/* A node whose ranks hold the same counts once. */
static void holders_distinct(struct sharer *s, struct piece *piece)
{
    uint32_t *nodes = s->holders + piece->holders;
    uint32_t kept = 0;

    qsort(nodes, piece->holder_count, sizeof(*nodes), node_order);
    for (uint32_t i = 0; i < piece->holder_count; i++) {
        if (kept == 0 || nodes[kept - 1] != nodes[i]) {
            nodes[kept++] = nodes[i];
        }
    }
    s->holder_count -= piece->holder_count - kept;
    piece->holder_count = kept;
}

/* Cuts the extents [first, last) of one box, which stand by flat_lo. `active` are those that reach
 * beyond `at`; it is the front of the same array, compacted as we go. */
static int cut_box(struct sharer *s, size_t first, size_t last)
{
    size_t next = first, active = first;
    uint64_t at = s->held[first].extent->flat_lo;
    int rc = 0;

    while (rc == 0 && (next < last || active > first)) {
        struct piece piece = {.lo = at, .hi = UINT64_MAX, .holders = s->holder_count};
        size_t kept = first;

        for (; next < last && s->held[next].extent->flat_lo == at; next++) {
            s->held[active++] = s->held[next];
        }
        piece.like = &s->held[first];
        for (size_t i = first; i < active; i++) {
            uint64_t end = s->held[i].extent->flat_hi;

            piece.hi = end < piece.hi ? end : piece.hi;
        }
        if (next < last && s->held[next].extent->flat_lo < piece.hi) {
            piece.hi = s->held[next].extent->flat_lo;
        }
        for (size_t i = first; rc == 0 && i < active; i++) {
            rc = holder_add(s, &piece, s->held[i].node);
        }
        if (rc == 0 && active > first) {
            holders_distinct(s, &piece);
            rc = room_for(&s->pieces, s->piece_count, &s->piece_room, sizeof(*s->pieces));
        }
        if (rc == 0 && active > first) {
            piece.number = (uint32_t)s->piece_count;
            s->pieces[s->piece_count++] = piece;
        }
        at = piece.hi;
        for (size_t i = first; i < active; i++) {
            if (s->held[i].extent->flat_hi > at) {
                s->held[kept++] = s->held[i];
            }
        }
        active = kept;
    }
    return rc;
}

static int cut(struct sharer *s)
{
    int rc = 0;

    for (size_t lo = 0, hi = 0; rc == 0 && lo < s->held_count; lo = hi) {
        for (hi = lo + 1; hi < s->held_count && same_box(&s->held[lo], &s->held[hi]); hi++) {
        }
        rc = cut_box(s, lo, hi);
    }
    return rc;
}

/* ---- giving ---- */

static uint64_t piece_bytes(const struct piece *piece)
{
    return (piece->hi - piece->lo) * bl_dtype_bytes(piece->like->tensor->dtype);
}

/* Few holders first: they have no choice. Large before small: small ones even out. */
static int piece_order(const void *a_, const void *b_)
{
    const struct piece *a = a_, *b = b_;
    uint64_t a_bytes = piece_bytes(a), b_bytes = piece_bytes(b);

    if (a->holder_count != b->holder_count) {
        return a->holder_count < b->holder_count ? -1 : 1;
    }
    if (a_bytes != b_bytes) {
        return a_bytes > b_bytes ? -1 : 1;
    }
    return a->number < b->number ? -1 : a->number > b->number;
}

static int load_order(const void *a_, const void *b_, void *loads_)
{
    const uint32_t *a = a_, *b = b_;
    const uint64_t *loads = loads_;

    if (loads[*a] != loads[*b]) {
        return loads[*a] < loads[*b] ? -1 : 1;
    }
    return *a < *b ? -1 : *a > *b;
}

static int give(struct sharer *s, const struct piece *piece, uint64_t lo, uint64_t hi,
                uint32_t node)
{
    int rc = room_for(&s->given, s->given_count, &s->given_room, sizeof(*s->given));

    if (rc == 0) {
        s->given[s->given_count++] = (struct given){piece, lo, hi, node};
        s->loads[node] += (hi - lo) * bl_dtype_bytes(piece->like->tensor->dtype);
    }
    return rc;
}

static uint32_t least_loaded(const struct sharer *s, const struct piece *piece)
{
    uint32_t least = s->holders[piece->holders];

    for (uint32_t i = 1; i < piece->holder_count; i++) {
        uint32_t node = s->holders[piece->holders + i];

        least = s->loads[node] < s->loads[least] ? node : least;
    }
    return least;
}

/* How many of the least loaded holders, by_load, take part, and the level that `bytes` more bring
 * them to, as water finds it. */
static uint32_t water_level(const struct sharer *s, uint32_t count, uint64_t bytes,
                            uint64_t *ret_level)
{
    uint64_t below = 0; /* loads of those that take part */
    uint32_t parts = 0;

    do {
        below += s->loads[s->by_load[parts++]];
        *ret_level = (below + bytes + parts - 1) / parts;
    } while (parts<count && * ret_level> s->loads[s->by_load[parts]] &&
             bytes / (parts + 1) >= BL_SHARE_BYTES_MIN);
    return parts;
}

/* Cuts a piece between its holders, so that those with least have about the same afterwards. */
static int give_cut(struct sharer *s, const struct piece *piece)
{
    uint64_t each = bl_dtype_bytes(piece->like->tensor->dtype), lo = piece->lo, level;
    uint64_t cut_elems = CUT_BYTES / each;
    uint32_t parts;
    int rc = 0;

    memcpy(s->by_load, s->holders + piece->holders, piece->holder_count * sizeof(uint32_t));
    qsort_r(s->by_load, piece->holder_count, sizeof(uint32_t), load_order, s->loads);
    parts = water_level(s, piece->holder_count, piece_bytes(piece), &level);
    for (uint32_t i = 0; rc == 0 && i < parts && lo < piece->hi; i++) {
        uint64_t has = s->loads[s->by_load[i]], elems = has < level ? (level - has) / each : 0;
        uint64_t left = piece->hi - lo;

        elems = (elems + cut_elems - 1) / cut_elems * cut_elems;
        elems = i + 1 == parts || elems > left ? left : elems;
        if (elems > 0) {
            rc = give(s, piece, lo, lo + elems, s->by_load[i]);
            lo += elems;
        }
    }
    return rc;
}

static int give_all(struct sharer *s)
{
    int rc = 0;

    s->loads = calloc(s->node_count + 1u, sizeof(*s->loads));
    s->by_load = calloc(s->node_count + 1u, sizeof(*s->by_load));
    if (s->loads == NULL || s->by_load == NULL) {
        return -ENOMEM;
    }
    if (s->piece_count > 1) {
        qsort(s->pieces, s->piece_count, sizeof(*s->pieces), piece_order);
    }
    for (size_t i = 0; rc == 0 && i < s->piece_count; i++) {
        const struct piece *piece = &s->pieces[i];

        if (piece->holder_count > 1 && piece_bytes(piece) >= 2 * BL_SHARE_BYTES_MIN) {
            rc = give_cut(s, piece);
        } else {
            rc = give(s, piece, piece->lo, piece->hi, least_loaded(s, piece));
        }
    }
    return rc;
}

/* ---- the lists ---- */

static int given_order(const void *a_, const void *b_)
{
    const struct given *a = a_, *b = b_;

    if (a->node != b->node) {
        return a->node < b->node ? -1 : 1;
    }
    if (a->piece->number != b->piece->number) {
        return a->piece->number < b->piece->number ? -1 : 1;
    }
    return a->lo < b->lo ? -1 : a->lo > b->lo;
}

/* Neighbours in one box become one extent. */
static int goes_on(const struct given *a, const struct given *b)
{
    return a->hi == b->lo && same_box(a->piece->like, b->piece->like);
}

static int list_make(struct bl_extent_list *ret, const struct given *given, size_t count)
{
    ret->tensors = calloc(count + 1, sizeof(*ret->tensors));
    ret->extents = calloc(count + 1, sizeof(*ret->extents));
    if (ret->tensors == NULL || ret->extents == NULL) {
        return -ENOMEM;
    }
    for (size_t i = 0; i < count; i++) {
        const struct bl_tensor *tensor = given[i].piece->like->tensor;
        struct bl_extent *extent;

        if (i > 0 && goes_on(&given[i - 1], &given[i])) {
            ret->extents[ret->extent_count - 1].flat_hi = given[i].hi;
            continue;
        }
        if (ret->tensor_count == 0 ||
            strcmp(ret->tensors[ret->tensor_count - 1].name, tensor->name) != 0) {
            ret->tensors[ret->tensor_count++] = *tensor;
        }
        extent = &ret->extents[ret->extent_count++];
        *extent = *given[i].piece->like->extent;
        extent->tensor = ret->tensor_count - 1;
        extent->flat_lo = given[i].lo;
        extent->flat_hi = given[i].hi;
        extent->offset = 0;
    }
    return 0;
}

static int lists_make(struct bl_extent_list *ret, struct sharer *s)
{
    size_t lo = 0, hi;
    int rc = 0;

    if (s->given_count > 1) {
        qsort(s->given, s->given_count, sizeof(*s->given), given_order);
    }
    for (uint32_t node = 0; rc == 0 && node < s->node_count; node++, lo = hi) {
        for (hi = lo; hi < s->given_count && s->given[hi].node == node; hi++) {
        }
        rc = list_make(&ret[node], s->given + lo, hi - lo);
    }
    return rc;
}

int bl_share_make(struct bl_extent_list *ret, uint32_t node_count,
                  const struct bl_holding *holdings, uint32_t holding_count, struct bl_errmsg *msg)
{
    struct sharer s = {.node_count = node_count};
    int rc = gather(&s, holdings, holding_count, msg);

    memset(ret, 0, node_count * sizeof(*ret));
    if (rc == 0) {
        rc = cut(&s);
        rc = rc < 0 ? rc : give_all(&s);
        rc = rc < 0 ? rc : lists_make(ret, &s);
        rc = rc < 0 ? bl_err_code(msg, rc, "shares of %u nodes", node_count) : 0;
    }
    for (uint32_t i = 0; rc < 0 && i < node_count; i++) {
        bl_extent_list_close(&ret[i]);
    }
    free(s.held);
    free(s.pieces);
    free(s.holders);
    free(s.given);
    free(s.loads);
    free(s.by_load);
    return rc;
}
