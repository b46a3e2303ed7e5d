/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Planning against the same holders again and again, in memory that follows the number of extents
 * and not that of their rows. bl_plan_make (extent.h) is this for one time, with every row written
 * out; loading from files uses it as it is.
 *
 *     bl_holdings_new(&holdings, lists, count, msg)        sorts what is held, by tensor and place
 *     bl_holdings_plan(holdings, wanted, 0, n, &spans)     as often as one likes
 *     bl_spans_sort(&spans); ...; bl_spans_close(&spans)
 *     bl_holdings_free(holdings)
 *
 * Threads: holdings may be planned against by many at a time.
 */
#ifndef BL_BASE_EXTENT_PLAN_H
#define BL_BASE_EXTENT_PLAN_H

#include <stdbool.h>

#include "base/extent.h"

/* `rows` copies of `bytes` bytes, a stride apart on both sides: what two boxes have in common. */
struct bl_span {
    uint32_t dst_extent; /* index in the wanted list */
    uint32_t src;        /* which holder */
    uint32_t src_extent; /* index in that holder's list */
    uint32_t rows;       /* at least 1 */
    uint64_t dst_offset; /* bytes in the destination buffer, of the first row */
    uint64_t src_offset; /* bytes in the holder's buffer, of the first row */
    uint64_t bytes;      /* of one row */
    uint64_t dst_stride; /* bytes from row to row; 0 with one row */
    uint64_t src_stride; /* at least `bytes` with several rows */
};

struct bl_spans {
    struct bl_span *at; /* owned */
    size_t count, room;
    uint64_t missing_elems;  /* wanted elements that no holder has */
    uint32_t missing_tensor; /* the lowest in the wanted table with one */
    bool keep_missing;       /* set by the caller before planning: fill `missing` too */
    /* Owned: what is missing, as extents of the wanted list's tensors; offset as in the wanted. */
    struct bl_extent *missing;
    size_t missing_count, missing_room;
};

/* Frees what it owns and zeroes it. */
void bl_spans_close(struct bl_spans *spans);
/* By (src, src_offset, dst_offset): the order in which files are read. */
void bl_spans_sort(struct bl_spans *spans);

struct bl_holdings;

/* Takes in what `count` holders hold, nearest first; lists[i] may be NULL (holds nothing) and all
 * are borrowed until bl_holdings_free. Extents that do not fit their tensors: BL_EFORMAT. *ret is
 * owned. Cost: O(E log E), or O(E) where the lists are in order; about 40 bytes an extent. */
BL_MUST_CHECK int bl_holdings_new(struct bl_holdings **ret,
                                  const struct bl_extent_list *const *lists, uint32_t count,
                                  struct bl_errmsg *msg);
void bl_holdings_free(struct bl_holdings *holdings);

/* Plans wanted->extents[lo, hi), appending to `spans` (zeroed before the first call). An element
 * that several hold comes from the nearest; every wanted element is in one span or is missing. A
 * tensor whose shape or dtype differs from a holder's of the same name: BL_EFORMAT. Spans of a call
 * are not sorted. Cost: O(log E) for each wanted extent and for each row in which it meets held
 * ones. */
BL_MUST_CHECK int bl_holdings_plan(const struct bl_holdings *holdings,
                                   const struct bl_extent_list *wanted, uint32_t lo, uint32_t hi,
                                   struct bl_spans *spans, struct bl_errmsg *msg);

#endif
