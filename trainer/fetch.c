/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/fetch.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define FETCH_TAG 0x6674000000000000u /* "ft", and the number of the fetch below */
#define NO_UNIT   UINT32_MAX

/* ---- life ---- */

static uint64_t largest_unit(const struct train_model *model)
{
    uint32_t count;
    const struct train_unit *units = train_model_units(model, &count);
    uint64_t most = 0;
    for (uint32_t u = 0; u < count; u++) {
        most = units[u].elems > most ? units[u].elems : most;
    }
    return most;
}

uint64_t train_fetch_elems(const struct train_model *model, uint32_t dp)
{
    return largest_unit(model) * (dp > 1 ? 2 : 1);
}

int train_fetch_init(struct train_fetch *fetch, const struct train_shard *shard, struct kern *kern,
                     struct train_gather *gather, struct bl_errmsg *msg)
{
    uint32_t dp = shard->grid.dp;
    memset(fetch, 0, sizeof *fetch);
    fetch->shard = shard;
    fetch->kern = kern;
    fetch->gather = gather;
    fetch->next = NO_UNIT;
    fetch->buffer_elems = largest_unit(shard->model);
    fetch->memory_bytes = train_fetch_elems(shard->model, dp) * kern->real_bytes;
    fetch->memory = kern->ops->alloc(kern, fetch->memory_bytes);
    fetch->parts = calloc(2 * (size_t)dp, sizeof *fetch->parts);
    fetch->ranks = calloc(dp, sizeof *fetch->ranks);
    fetch->requests = calloc(2 * (size_t)dp, sizeof *fetch->requests);
    if (fetch->memory == NULL || fetch->ranks == NULL || fetch->requests == NULL ||
        fetch->parts == NULL) {
        uint64_t bytes = fetch->memory_bytes;
        train_fetch_close(fetch);
        return bl_err_code(msg, -ENOMEM, "%llu bytes for a layer's weights",
                           (unsigned long long)bytes);
    }
    if (kern->is_device) { /* what no owner has stays zero; the host's is */
        kern->ops->zero(kern, fetch->memory, fetch->memory_bytes);
    }
    train_grid_dp_group(&shard->grid, fetch->ranks);
    return 0;
}

void train_fetch_close(struct train_fetch *fetch)
{
    if (fetch->memory != NULL) {
        fetch->kern->ops->free(fetch->kern, fetch->memory, fetch->memory_bytes);
    }
    free(fetch->parts);
    free(fetch->ranks);
    free(fetch->requests);
    memset(fetch, 0, sizeof *fetch);
}

void train_fetch_begin(struct train_fetch *fetch, const struct train_state *state, const void *slot)
{
    fetch->state = state;
    fetch->slot = slot;
    fetch->next = NO_UNIT; /* requests of a pass that failed went with its communicator */
    fetch->request_count = 0;
    fetch->sequence = 0; /* a rank that has just come counts with the others */
}

/* ---- a unit ---- */

/* A tied head's weights are the embedding's. */
static uint32_t weights_of(const struct train_fetch *fetch, uint32_t unit)
{
    uint32_t count;
    const struct train_unit *units = train_model_units(fetch->shard->model, &count);
    return units[unit].local >= train_model_local_elems(fetch->shard->model) ? 0 : unit;
}

static kern_real *buffer_of(const struct train_fetch *fetch)
{
    return kern_real_at(fetch->kern, fetch->memory, fetch->turn * fetch->buffer_elems);
}

/* The own part, from the state or the slot. */
static void copy_own(const struct train_fetch *fetch, const struct train_unit *unit, kern_real *to)
{
    const struct train_shard *shard = fetch->shard;
    struct kern *k = fetch->kern;
    for (uint32_t i = 0; i < shard->extent_count; i++) {
        const struct train_extent *e = &shard->extents[i];
        if (e->at >= unit->local && e->at < unit->local + unit->elems) {
            k->ops->round(k, kern_real_at(k, to, e->at - unit->local),
                          fetch->state->kern != NULL
                              ? train_state_weights(fetch->state, i)
                              : train_extent_view(fetch->slot, e, TRAIN_WEIGHT),
                          e->flat_hi - e->flat_lo);
        }
    }
}

/* What replica d owns of the unit begins so many elements behind its first. */
static uint64_t border(const struct train_fetch *fetch, const struct train_unit *unit, uint32_t d)
{
    uint64_t at = fetch->shard->bounds[d], end = unit->local + unit->elems;
    return (at < unit->local ? unit->local : at > end ? end : at) - unit->local;
}

/* Sends the own part to all and asks for theirs. */
static int ask_peers(struct train_fetch *fetch, const struct train_unit *u, struct comm *comm,
                     struct bl_errmsg *msg)
{
    const struct train_grid *g = &fetch->shard->grid;
    const struct kern *k = fetch->kern;
    uint64_t own = border(fetch, u, g->d), own_end = border(fetch, u, g->d + 1);
    uint64_t tag = FETCH_TAG | fetch->sequence++;
    int rc = 0;
    for (uint32_t d = 0; rc == 0 && d < g->dp; d++) {
        uint64_t lo = border(fetch, u, d), hi = border(fetch, u, d + 1);
        if (d != g->d && hi > lo) {
            rc = comm_recv_start(comm, fetch->ranks[d], tag, kern_real_at(k, buffer_of(fetch), lo),
                                 (hi - lo) * k->real_bytes, &fetch->requests[fetch->request_count],
                                 msg);
            fetch->request_count += rc == 0;
        }
        if (rc == 0 && d != g->d && own_end > own) {
            rc = comm_send_start(comm, fetch->ranks[d], tag, kern_real_at(k, buffer_of(fetch), own),
                                 (own_end - own) * k->real_bytes,
                                 &fetch->requests[fetch->request_count], msg);
            fetch->request_count += rc == 0;
        }
    }
    return rc;
}

/* The same in one call of the group. */
static int exchange(struct train_fetch *fetch, const struct train_unit *u, struct comm_group *dp,
                    struct bl_errmsg *msg)
{
    const struct train_grid *g = &fetch->shard->grid;
    const struct kern *k = fetch->kern;
    struct comm_part *sends = fetch->parts, *recvs = fetch->parts + g->dp;
    uint64_t own = border(fetch, u, g->d), own_end = border(fetch, u, g->d + 1);
    for (uint32_t d = 0; d < g->dp; d++) {
        uint64_t lo = border(fetch, u, d), hi = border(fetch, u, d + 1);
        sends[d] = (struct comm_part){kern_real_at(k, buffer_of(fetch), own),
                                      d == g->d ? 0 : (own_end - own) * k->real_bytes};
        recvs[d] = (struct comm_part){kern_real_at(k, buffer_of(fetch), lo),
                                      d == g->d ? 0 : (hi - lo) * k->real_bytes};
    }
    return comm_group_exchange(dp, sends, recvs, msg);
}

static int ask(struct train_fetch *fetch, uint32_t unit, struct comm *comm, struct comm_group *dp,
               struct bl_errmsg *msg)
{
    uint32_t count;
    const struct train_unit *u = &train_model_units(fetch->shard->model, &count)[unit];
    copy_own(fetch, u, buffer_of(fetch));
    fetch->next = unit;
    fetch->request_count = 0;
    if (dp == NULL) {
        return 0;
    }
    return fetch->kern->is_device ? exchange(fetch, u, dp, msg) : ask_peers(fetch, u, comm, msg);
}

/* The unit that is on its way has come: its buffer. */
static int take(struct train_fetch *fetch, struct comm *comm, kern_real **ret,
                struct bl_errmsg *msg)
{
    int rc = fetch->shard->grid.dp == 1 || fetch->kern->is_device
                 ? 0
                 : comm_wait_all(comm, fetch->requests, fetch->request_count, msg);
    fetch->request_count = 0;
    fetch->next = NO_UNIT;
    *ret = buffer_of(fetch);
    fetch->turn = fetch->shard->grid.dp > 1 ? 1 - fetch->turn : 0;
    return rc;
}

/* The unit after this one in its pass; NO_UNIT at the end. */
static uint32_t next_of(const struct train_fetch *fetch, uint32_t unit, int backward)
{
    uint32_t count;
    train_model_units(fetch->shard->model, &count);
    return backward ? (unit == 0 ? NO_UNIT : unit - 1) : unit + 1 < count ? unit + 1 : NO_UNIT;
}

int train_fetch_unit(struct train_fetch *fetch, uint32_t unit, int backward, struct comm *comm,
                     struct comm_group *dp, struct comm_group *tp, const kern_real **ret,
                     struct bl_errmsg *msg)
{
    uint32_t wanted = weights_of(fetch, unit), after = next_of(fetch, unit, backward);
    kern_real *weights = NULL;
    int rc = 0;
    BL_ASSERT(fetch->next == NO_UNIT || fetch->next == wanted); /* a pass has one order */
    if (fetch->next == NO_UNIT) {
        rc = ask(fetch, wanted, comm, dp, msg);
    }
    if (rc == 0) {
        rc = take(fetch, comm, &weights, msg);
    }
    if (rc == 0 && tp != NULL) {
        rc = train_gather_unit(fetch->gather, wanted, weights, tp, msg);
    }
    if (rc == 0 && fetch->shard->grid.dp > 1 && after != NO_UNIT) {
        rc = ask(fetch, weights_of(fetch, after), comm, dp, msg);
    }
    if (rc == 0) {
        *ret = weights;
    }
    return rc;
}
