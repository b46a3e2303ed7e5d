/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/fetch.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

int train_fetch_init(struct train_fetch *fetch, const struct train_shard *shard,
                     struct train_gather *gather, struct bl_errmsg *msg)
{
    uint32_t count;
    const struct train_unit *units = train_model_units(shard->model, &count);
    memset(fetch, 0, sizeof *fetch);
    fetch->shard = shard;
    fetch->gather = gather;
    for (uint32_t u = 0; u < count; u++) {
        uint64_t bytes = units[u].elems * sizeof(float);
        fetch->unit_bytes = bytes > fetch->unit_bytes ? bytes : fetch->unit_bytes;
    }
    fetch->bounds = calloc((size_t)shard->grid.dp + 1, sizeof *fetch->bounds);
    fetch->unit = bl_mem_alloc(fetch->unit_bytes);
    if (fetch->unit == NULL || fetch->bounds == NULL) {
        uint64_t bytes = fetch->unit_bytes;
        train_fetch_close(fetch);
        return bl_err_code(msg, -ENOMEM, "%llu bytes for a layer's weights",
                           (unsigned long long)bytes);
    }
    return 0;
}

void train_fetch_close(struct train_fetch *fetch)
{
    bl_mem_free(fetch->unit, fetch->unit_bytes);
    free(fetch->bounds);
    memset(fetch, 0, sizeof *fetch);
}

/* The own part of the unit, from the slot. */
static void copy_own(struct train_fetch *fetch, const struct train_unit *unit)
{
    const struct train_shard *shard = fetch->shard;
    for (uint32_t i = 0; i < shard->extent_count; i++) {
        const struct train_extent *e = &shard->extents[i];
        if (e->at >= unit->local && e->at < unit->local + unit->elems) {
            memcpy(fetch->unit + (e->at - unit->local),
                   train_extent_view(fetch->slot, e, TRAIN_WEIGHT),
                   (e->flat_hi - e->flat_lo) * sizeof(float));
        }
    }
}

int train_fetch_unit(struct train_fetch *fetch, uint32_t unit, struct comm_group *dp,
                     struct comm_group *tp, const float **ret, struct bl_errmsg *msg)
{
    const struct train_shard *shard = fetch->shard;
    uint32_t count;
    const struct train_unit *units = train_model_units(shard->model, &count);
    if (units[unit].local >= train_model_local_elems(shard->model)) {
        unit = 0; /* a tied head's weights are the embedding's */
    }
    const struct train_unit *u = &units[unit];
    copy_own(fetch, u);
    for (uint32_t d = 0; d <= shard->grid.dp; d++) {
        uint64_t at = shard->bounds[d] < u->local ? u->local : shard->bounds[d];
        at = at > u->local + u->elems ? u->local + u->elems : at;
        fetch->bounds[d] = (at - u->local) * sizeof(float);
    }
    int rc = dp == NULL ? 0 : comm_group_allgather(dp, fetch->unit, fetch->bounds, msg);
    if (rc == 0 && tp != NULL) {
        rc = train_gather_unit(fetch->gather, unit, fetch->unit, tp, msg);
    }
    if (rc == 0) {
        *ret = fetch->unit;
    }
    return rc;
}
