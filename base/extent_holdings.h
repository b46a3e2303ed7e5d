/* SPDX-License-Identifier: Apache-2.0 */
/* Inside base: what extent_holdings.c builds and extent_plan.c sweeps over. */
#ifndef BL_BASE_EXTENT_HOLDINGS_H
#define BL_BASE_EXTENT_HOLDINGS_H

#include "base/extent_plan.h"

/* An extent as a place in its tensor's row-major order: [first, last). */
struct holding_ref {
    uint64_t first, last;
    uint64_t reach; /* the largest `last` of this and all before it in the group */
    uint32_t list, extent;
};

/* All that is held of one tensor: refs [from, to), by `first`. */
struct holding_group {
    const struct bl_tensor *tensor; /* the nearest holder's */
    size_t from, to;
    bool differs; /* holders disagree on shape or dtype */
};

struct bl_holdings {
    const struct bl_extent_list **lists; /* owned array; NULL entries hold nothing */
    uint32_t list_count;
    struct holding_group *groups; /* owned */
    uint32_t group_count;
    uint32_t *slots; /* owned: a hash table of names, group + 1, 0 is free */
    size_t slot_count;
    struct holding_ref *refs; /* owned */
    size_t ref_count;
};

/* The group of a name, or NULL. */
const struct holding_group *holding_find(const struct bl_holdings *holdings, const char *name);
bool holding_same_tensor(const struct bl_tensor *a, const struct bl_tensor *b);
/* Where the extent (not empty) begins and ends in its tensor's row-major order. */
void holding_range(const struct bl_extent *extent, const struct bl_tensor *tensor,
                   uint64_t *ret_first, uint64_t *ret_last);
/* Tensor table and extents of a list fit together? */
BL_MUST_CHECK int holding_check(const struct bl_extent_list *list, struct bl_errmsg *msg);

#endif
