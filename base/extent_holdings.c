/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who holds what, by tensor: names are matched through a hash table, extents are counted into their
 * tensor's group and sorted there by where they begin. Extents that are the same (replicas) are
 * kept once, the nearest holder's.
 */
#include "base/extent_holdings.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

bool holding_same_tensor(const struct bl_tensor *a, const struct bl_tensor *b)
{
    return a->dtype == b->dtype && a->dims == b->dims &&
           memcmp(a->shape, b->shape, a->dims * sizeof(a->shape[0])) == 0;
}

int holding_check(const struct bl_extent_list *list, struct bl_errmsg *msg)
{
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
    return 0;
}

/* Row-major index in the tensor of element `flat` of the extent's box. */
static uint64_t holding_logical(const struct bl_extent *extent, const struct bl_tensor *tensor,
                                uint64_t flat)
{
    uint64_t index = 0;
    uint64_t weight = 1;
    for (uint32_t d = tensor->dims; d-- > 0;) {
        uint64_t width = extent->hi[d] - extent->lo[d];
        uint64_t rest = d > 0 ? flat / width : 0;
        index += (extent->lo[d] + (flat - rest * width)) * weight;
        weight *= tensor->shape[d];
        flat = rest;
    }
    return index;
}

void holding_range(const struct bl_extent *extent, const struct bl_tensor *tensor,
                   uint64_t *ret_first, uint64_t *ret_last)
{
    *ret_first = holding_logical(extent, tensor, extent->flat_lo);
    *ret_last = holding_logical(extent, tensor, extent->flat_hi - 1) + 1;
}

/* The slot where `name` is, or the free one where it would be. */
static size_t slot_find(const struct bl_holdings *h, const char *name)
{
    size_t mask = h->slot_count - 1;
    size_t slot = (size_t)bl_xxh3(name, strlen(name)) & mask;
    while (h->slots[slot] != 0 && strcmp(h->groups[h->slots[slot] - 1].tensor->name, name) != 0) {
        slot = (slot + 1) & mask;
    }
    return slot;
}

const struct holding_group *holding_find(const struct bl_holdings *holdings, const char *name)
{
    uint32_t group = holdings->slots[slot_find(holdings, name)];
    return group == 0 ? NULL : &holdings->groups[group - 1];
}

/* Twice the room for groups and names. */
static int groups_grow(struct bl_holdings *h)
{
    size_t room = h->slot_count; /* groups fill at most half of the slots */
    struct holding_group *groups = realloc(h->groups, room * sizeof(*groups));
    if (groups == NULL) {
        return -ENOMEM;
    }
    h->groups = groups;
    uint32_t *slots = calloc(2 * room, sizeof(*slots));
    if (slots == NULL) {
        return -ENOMEM;
    }
    free(h->slots);
    h->slots = slots;
    h->slot_count = 2 * room;
    for (uint32_t g = 0; g < h->group_count; g++) {
        h->slots[slot_find(h, h->groups[g].tensor->name)] = g + 1;
    }
    return 0;
}

/* The group of a holder's tensor, made when it is new. */
static int group_of(struct bl_holdings *h, const struct bl_tensor *tensor, uint32_t *ret)
{
    size_t slot = slot_find(h, tensor->name);
    if (h->slots[slot] == 0) {
        if (2 * ((size_t)h->group_count + 1) > h->slot_count) {
            int rc = groups_grow(h);
            if (rc < 0) {
                return rc;
            }
            slot = slot_find(h, tensor->name);
        }
        h->groups[h->group_count] = (struct holding_group){.tensor = tensor};
        h->slots[slot] = ++h->group_count;
    }
    *ret = h->slots[slot] - 1;
    h->groups[*ret].differs =
        h->groups[*ret].differs || !holding_same_tensor(h->groups[*ret].tensor, tensor);
    return 0;
}

/* The groups of a list's tensors, into `ret`. Most lists have the table of the one before: `hint`
 * is its groups, and a name is looked up only where it is not the same there. */
static int list_groups(struct bl_holdings *h, const struct bl_extent_list *list,
                       const uint32_t *hint, uint32_t hint_count, uint32_t *ret)
{
    for (uint32_t t = 0; t < list->tensor_count; t++) {
        const struct bl_tensor *tensor = &list->tensors[t];
        if (t < hint_count && strcmp(h->groups[hint[t]].tensor->name, tensor->name) == 0) {
            struct holding_group *group = &h->groups[hint[t]];
            group->differs = group->differs || !holding_same_tensor(group->tensor, tensor);
            ret[t] = hint[t];
            continue;
        }
        int rc = group_of(h, tensor, &ret[t]);
        if (rc < 0) {
            return rc;
        }
    }
    return 0;
}

/* Calls `each` for the groups of every list's tensors. */
static int lists_walk(struct bl_holdings *h, struct bl_errmsg *msg,
                      int (*each)(struct bl_holdings *h, uint32_t list, const uint32_t *groups))
{
    uint32_t *groups[2] = {NULL, NULL};
    uint32_t counts[2] = {0, 0};
    int rc = 0;
    for (uint32_t l = 0; rc == 0 && l < h->list_count; l++) {
        const struct bl_extent_list *list = h->lists[l];
        uint32_t now = l & 1;
        if (list == NULL) {
            counts[now] = 0;
            continue;
        }
        free(groups[now]);
        groups[now] = malloc((list->tensor_count + (size_t)1) * sizeof(uint32_t));
        rc = groups[now] == NULL ? -ENOMEM
                                 : list_groups(h, list, groups[!now], counts[!now], groups[now]);
        counts[now] = list->tensor_count;
        if (rc == 0) {
            rc = each(h, l, groups[now]);
        }
    }
    free(groups[0]);
    free(groups[1]);
    return rc < 0 ? bl_err_code(msg, rc, "plan") : 0;
}

static int count_refs(struct bl_holdings *h, uint32_t l, const uint32_t *groups)
{
    const struct bl_extent_list *list = h->lists[l];
    for (uint32_t e = 0; e < list->extent_count; e++) {
        if (bl_extent_elems(&list->extents[e]) > 0) {
            h->groups[groups[list->extents[e].tensor]].to++;
            h->ref_count++;
        }
    }
    return 0;
}

static int place_refs(struct bl_holdings *h, uint32_t l, const uint32_t *groups)
{
    const struct bl_extent_list *list = h->lists[l];
    for (uint32_t e = 0; e < list->extent_count; e++) {
        const struct bl_extent *extent = &list->extents[e];
        struct holding_group *group = &h->groups[groups[extent->tensor]];
        /* Where holders disagree nobody may plan; their boxes are not of one shape. */
        if (bl_extent_elems(extent) == 0 || group->differs) {
            continue;
        }
        struct holding_ref *ref = &h->refs[group->to++];
        *ref = (struct holding_ref){.list = l, .extent = e};
        holding_range(extent, group->tensor, &ref->first, &ref->last);
    }
    return 0;
}

static int ref_order(const void *a, const void *b)
{
    const struct holding_ref *x = a;
    const struct holding_ref *y = b;
    if (x->first != y->first) {
        return x->first < y->first ? -1 : 1;
    }
    if (x->last != y->last) {
        return x->last < y->last ? -1 : 1;
    }
    if (x->list != y->list) {
        return x->list < y->list ? -1 : 1;
    }
    return x->extent < y->extent ? -1 : x->extent > y->extent;
}

static bool ref_same(const struct bl_holdings *h, const struct holding_ref *a,
                     const struct holding_ref *b, uint32_t dims)
{
    const struct bl_extent *x = &h->lists[a->list]->extents[a->extent];
    const struct bl_extent *y = &h->lists[b->list]->extents[b->extent];
    return a->first == b->first && a->last == b->last && x->flat_lo == y->flat_lo &&
           x->flat_hi == y->flat_hi && memcmp(x->lo, y->lo, dims * sizeof(x->lo[0])) == 0 &&
           memcmp(x->hi, y->hi, dims * sizeof(x->hi[0])) == 0;
}

/* Sorts a group, drops what is there twice, and notes how far its refs reach. */
static void group_finish(struct bl_holdings *h, struct holding_group *group)
{
    struct holding_ref *refs = h->refs + group->from;
    size_t count = group->to - group->from;
    size_t kept = 0;
    bool sorted = true;
    for (size_t i = 1; sorted && i < count; i++) {
        sorted = ref_order(&refs[i - 1], &refs[i]) < 0;
    }
    if (!sorted) {
        qsort(refs, count, sizeof(*refs), ref_order);
    }
    for (size_t i = 0; i < count; i++) {
        if (kept == 0 || !ref_same(h, &refs[kept - 1], &refs[i], group->tensor->dims)) {
            refs[kept++] = refs[i];
        }
    }
    group->to = group->from + kept;
    uint64_t reach = 0;
    for (size_t i = 0; i < kept; i++) {
        reach = refs[i].last > reach ? refs[i].last : reach;
        refs[i].reach = reach;
    }
}

void bl_holdings_free(struct bl_holdings *holdings)
{
    if (holdings != NULL) {
        free(holdings->lists);
        free(holdings->groups);
        free(holdings->slots);
        free(holdings->refs);
        free(holdings);
    }
}

static int holdings_build(struct bl_holdings *h, struct bl_errmsg *msg)
{
    int rc = 0;
    for (uint32_t l = 0; rc == 0 && l < h->list_count; l++) {
        rc = h->lists[l] == NULL ? 0 : holding_check(h->lists[l], msg);
    }
    if (rc == 0) {
        rc = lists_walk(h, msg, count_refs);
    }
    if (rc < 0) {
        return rc;
    }
    size_t at = 0;
    for (uint32_t g = 0; g < h->group_count; g++) {
        size_t count = h->groups[g].to;
        h->groups[g].from = h->groups[g].to = at;
        at += count;
    }
    h->refs = malloc((h->ref_count + 1) * sizeof(*h->refs));
    if (h->refs == NULL) {
        return bl_err_code(msg, -ENOMEM, "plan of %zu extents", h->ref_count);
    }
    rc = lists_walk(h, msg, place_refs);
    for (uint32_t g = 0; rc == 0 && g < h->group_count; g++) {
        group_finish(h, &h->groups[g]);
    }
    return rc;
}

#define HOLDINGS_SLOTS_FIRST 64u /* a power of two */

int bl_holdings_new(struct bl_holdings **ret, const struct bl_extent_list *const *lists,
                    uint32_t count, struct bl_errmsg *msg)
{
    struct bl_holdings *h = calloc(1, sizeof(*h));
    int rc = -ENOMEM;
    if (h != NULL) {
        h->list_count = count;
        h->lists = calloc(count + (size_t)1, sizeof(*h->lists));
        h->slot_count = HOLDINGS_SLOTS_FIRST;
        h->slots = calloc(h->slot_count, sizeof(*h->slots));
        h->groups = calloc(h->slot_count / 2, sizeof(*h->groups));
    }
    if (h == NULL || h->lists == NULL || h->slots == NULL || h->groups == NULL) {
        rc = bl_err_code(msg, rc, "plan");
    } else {
        if (count > 0) {
            memcpy(h->lists, lists, count * sizeof(*lists));
        }
        rc = holdings_build(h, msg);
    }
    if (rc < 0) {
        bl_holdings_free(h);
        return rc;
    }
    *ret = h;
    return 0;
}
