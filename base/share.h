/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who writes what, where several nodes hold the same: each element once, and the bytes spread as
 * evenly as the holdings allow.
 *
 *     node 0   | W ....... |  m0         W is held by three nodes, m0 to m2 by one each:
 *     node 1   | W ....... |  m1         node 0 writes m0 and the first third of W, ...
 *     node 2   | W ....... |  m2
 *
 * What only one node holds is its own. The rest goes, what fewest hold first and large before
 * small, to those of its holders that have least so far; what is large is cut between them.
 */
#ifndef BL_BASE_SHARE_H
#define BL_BASE_SHARE_H

#include <stdint.h>

#include "base/error.h"
#include "base/extent.h"

/* Nothing is cut into pieces smaller than this. */
#define BL_SHARE_BYTES_MIN (1024u * 1024)

struct bl_holding { /* what one holder (a rank's arena) of a node has */
    uint32_t node;
    const struct bl_extent_list *list; /* borrowed for the call */
};

/* Shares out all that the holdings have over nodes 0 to node_count - 1: ret[node] (uninitialised
 * before; node_count of them) is what it writes, each extent inside one of its holdings, offsets 0;
 * close each by bl_extent_list_close. Boxes of one tensor must be the same or disjoint, as layouts
 * make them; flat ranges in a box may overlap in any way. Tensors are matched by name; a shape,
 * dtype or kind that differs is BL_EFORMAT, an extent that does not fit its tensor too. The same
 * holdings give the same shares. Cost: O(n log n) in extents, counting for each piece all its
 * holders. */
BL_MUST_CHECK int bl_share_make(struct bl_extent_list *ret, uint32_t node_count,
                                const struct bl_holding *holdings, uint32_t holding_count,
                                struct bl_errmsg *msg);

#endif
