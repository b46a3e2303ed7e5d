/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/gather.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/failpoint.h"

#define EMBED_TAG                                                                                  \
    0x656d626400000000u /* "embd": the embedding, from the first stage to the last                 \
                         */

/* ---- what tensor parallel ranks have alike ---- */

/* Whether rank `owner` gives the tensor to rank `other`, which has it as `theirs`. */
static int gives(const struct train_tensor *theirs, uint32_t owner, uint32_t other)
{
    return owner != other && theirs->local != TRAIN_NOT_HERE && theirs->owner == owner;
}

/* Lists what goes to (`to` 1) or comes from each peer; returns the elements of it. */
static uint64_t list_tensors(struct train_gather *g, struct train_model *const *tables, int to,
                             uint32_t *used)
{
    uint32_t count, t = g->shard->grid.t, *first = to ? g->to : g->from;
    const struct train_tensor *mine = train_model_tensors(g->shard->model, &count);
    uint64_t elems = 0;
    for (uint32_t r = 0; r < g->shard->grid.tp; r++) {
        const struct train_tensor *theirs = train_model_tensors(tables[r], &count);
        first[r] = *used;
        for (uint32_t i = 0; i < count; i++) {
            if (to ? gives(&theirs[i], t, r) : gives(&mine[i], r, t)) {
                g->lists[(*used)++] = i;
                elems += mine[i].elems;
            }
        }
    }
    first[g->shard->grid.tp] = *used;
    return elems;
}

static uint64_t pack_bytes(const struct train_gather *g)
{
    return (g->pack_elems + 1) * g->kern->real_bytes;
}

static int plan_replicas(struct train_gather *g, struct train_model *const *tables,
                         struct bl_errmsg *msg)
{
    uint32_t tensors, used = 0, tp = g->shard->grid.tp;
    train_model_tensors(g->shard->model, &tensors);
    g->lists = calloc(2 * (size_t)tp * tensors, sizeof *g->lists);
    g->to = calloc((size_t)tp + 1, sizeof *g->to);
    g->from = calloc((size_t)tp + 1, sizeof *g->from);
    g->parts = calloc(2 * (size_t)tp, sizeof *g->parts);
    if (g->lists == NULL || g->to == NULL || g->from == NULL || g->parts == NULL) {
        return bl_err_code(msg, -ENOMEM, "lists of replicated tensors");
    }
    g->pack_elems = list_tensors(g, tables, 1, &used);
    g->pack_elems += list_tensors(g, tables, 0, &used);
    g->pack = g->kern->ops->alloc(g->kern, pack_bytes(g));
    return g->pack != NULL ? 0
                           : bl_err_code(msg, -ENOMEM, "%llu bytes for replicated tensors",
                                         (unsigned long long)pack_bytes(g));
}

/* Which tensors, and where they are. */
struct gather_scope {
    uint32_t unit;     /* or ALL_UNITS */
    kern_real *params; /* of the local order's element `base` */
    uint64_t base;
};

#define ALL_UNITS UINT32_MAX

/* Copies the tensors of a list between their places and the pack at `at`; returns behind them.
 * `out` 1: into the pack, 0: out of it, -1: only counts. */
static kern_real *pack_list(const struct train_gather *g, const struct gather_scope *scope,
                            uint32_t first, uint32_t end, kern_real *at, int out)
{
    uint32_t tensor_count;
    struct kern *k = g->kern;
    const struct train_tensor *tensors = train_model_tensors(g->shard->model, &tensor_count);
    for (uint32_t i = first; i < end; i++) {
        const struct train_tensor *t = &tensors[g->lists[i]];
        if (scope->unit != ALL_UNITS && scope->unit != t->unit) {
            continue;
        }
        kern_real *here = kern_real_at(k, scope->params, t->local - scope->base);
        if (out >= 0) {
            k->ops->copy(k, out ? at : here, out ? here : at, t->elems * k->real_bytes);
        }
        at = kern_real_at(k, at, t->elems);
    }
    return at;
}

static int share_replicas(struct train_gather *g, const struct gather_scope *scope,
                          struct comm_group *tp, struct bl_errmsg *msg)
{
    uint32_t size = g->shard->grid.tp;
    struct comm_part *sends = g->parts, *recvs = g->parts + size;
    kern_real *at = g->pack;
    for (uint32_t r = 0; r < size; r++) {
        kern_real *end = pack_list(g, scope, g->to[r], g->to[r + 1], at, 1);
        sends[r] = (struct comm_part){at, (uint64_t)((char *)end - (char *)at)};
        at = end;
    }
    kern_real *received = at;
    for (uint32_t r = 0; r < size; r++) {
        kern_real *end = pack_list(g, scope, g->from[r], g->from[r + 1], at, -1);
        recvs[r] = (struct comm_part){at, (uint64_t)((char *)end - (char *)at)};
        at = end;
    }
    int rc = comm_group_exchange(tp, sends, recvs, msg);
    for (uint32_t r = 0; rc == 0 && r < size; r++) {
        received = pack_list(g, scope, g->from[r], g->from[r + 1], received, 0);
    }
    return rc;
}

int train_gather_unit(struct train_gather *gather, uint32_t unit, kern_real *unit_params,
                      struct comm_group *tp, struct bl_errmsg *msg)
{
    uint32_t count;
    const struct train_unit *units = train_model_units(gather->shard->model, &count);
    const struct gather_scope scope = {unit, unit_params, units[unit].local};
    return share_replicas(gather, &scope, tp, msg);
}

/* ---- life ---- */

int train_gather_init(struct train_gather *gather, const struct train_shard *shard,
                      struct kern *kern, struct train_model *const *tables, struct bl_errmsg *msg)
{
    uint32_t dp = shard->grid.dp;
    memset(gather, 0, sizeof *gather);
    gather->shard = shard;
    gather->kern = kern;
    gather->bounds = calloc((size_t)dp + 1, sizeof *gather->bounds);
    int rc = gather->bounds == NULL ? bl_err_code(msg, -ENOMEM, "%u borders", dp) : 0;
    if (rc == 0 && shard->grid.tp > 1) {
        rc = plan_replicas(gather, tables, msg);
    }
    if (rc != 0) {
        train_gather_close(gather);
        return rc;
    }
    for (uint32_t d = 0; d <= dp; d++) {
        gather->bounds[d] = shard->bounds[d] * kern->real_bytes;
    }
    return 0;
}

void train_gather_close(struct train_gather *gather)
{
    if (gather->pack != NULL) {
        gather->kern->ops->free(gather->kern, gather->pack, pack_bytes(gather));
    }
    free(gather->bounds);
    free(gather->lists);
    free(gather->to);
    free(gather->from);
    free(gather->parts);
    memset(gather, 0, sizeof *gather);
}

/* ---- weights ---- */

/* The last stage's copy of the embedding, which the first one has. */
static int share_embedding(const struct train_gather *gather, kern_real *params, struct comm *comm,
                           struct bl_errmsg *msg)
{
    const struct train_shard *shard = gather->shard;
    const struct kern *k = gather->kern;
    const struct train_grid *g = &shard->grid;
    uint64_t elems = train_shard_tied_elems(shard->model);
    struct comm_request *request = NULL;
    int rc = 0;
    if (g->pp == 1 || elems == 0) {
        return 0;
    }
    if (g->p == 0) {
        rc = comm_send_start(comm, train_grid_at(g, g->t, g->pp - 1, g->d), EMBED_TAG, params,
                             elems * k->real_bytes, &request, msg);
    } else if (train_model_copy_elems(shard->model) != 0) {
        rc = comm_recv_start(comm, train_grid_at(g, g->t, 0, g->d), EMBED_TAG,
                             kern_real_at(k, params, train_model_local_elems(shard->model)),
                             elems * k->real_bytes, &request, msg);
    }
    return rc == 0 && request != NULL ? comm_wait(comm, request, msg) : rc;
}

int train_gather_weights(struct train_gather *gather, const struct train_state *state,
                         const void *slot, kern_real *params, struct comm_group *dp,
                         struct comm_group *tp, struct comm *comm, struct bl_errmsg *msg)
{
    const struct train_shard *shard = gather->shard;
    struct kern *k = gather->kern;
    for (uint32_t i = 0; i < shard->extent_count; i++) {
        const struct train_extent *e = &shard->extents[i];
        k->ops->round(k, kern_real_at(k, params, e->at),
                      state->kern != NULL ? train_state_weights(state, i)
                                          : train_extent_view(slot, e, TRAIN_WEIGHT),
                      e->flat_hi - e->flat_lo);
    }
    int rc = BL_FAILPOINT("mid-gather");
    if (rc == 0 && dp != NULL && shard->zero != 0) {
        rc = comm_group_allgather(dp, params, gather->bounds, msg);
    }
    if (rc == 0 && tp != NULL) {
        const struct gather_scope all = {ALL_UNITS, params, 0};
        rc = share_replicas(gather, &all, tp, msg);
    }
    return rc == 0 ? share_embedding(gather, params, comm, msg) : rc;
}
