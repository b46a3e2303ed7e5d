/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/lane_rounds.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/lanes.h"

struct rounds_unit {
    uint32_t depth; /* slices on its stack */
    uint32_t round; /* the next */
};

struct lane_rounds {
    const struct train_shard *shard; /* kept */
    struct kern *kern;               /* kept */
    uint32_t lanes, round_count, stack_count;
    uint64_t local_elems, own_elems, slice_elems; /* of the cut; with the head's own range */
    uint64_t part_max;                            /* the largest own part of a unit */
    float *memory;                                /* of the back end: unit, received parts, stack */
    uint64_t memory_bytes;
    float *unit;     /* the gradient in work */
    float *received; /* [dp][part_max] */
    float *stack;    /* [stack_count][slice_elems] */
    struct rounds_unit *units;
    uint32_t unit_count;
    struct comm_part *parts; /* 2 * dp */
};

struct rounds_range { /* of elements */
    uint64_t lo, hi;
};

/* ---- places ---- */

/* What replica d owns of a unit, in elements from the unit's first. */
static struct rounds_range part_of(const struct train_shard *shard, uint32_t unit, uint32_t d)
{
    uint32_t count;
    const struct train_unit *u = &train_model_units(shard->model, &count)[unit];
    int tied = u->local >= train_model_local_elems(shard->model);
    const uint64_t *bounds = tied ? shard->tied_bounds : shard->bounds;
    uint64_t at = tied ? 0 : u->local, end = at + u->elems;
    uint64_t lo = bounds[d] > at ? bounds[d] : at, hi = bounds[d + 1] < end ? bounds[d + 1] : end;
    return lo < hi ? (struct rounds_range){lo - at, hi - at} : (struct rounds_range){0, 0};
}

/* Where the own part of a unit stands in a slice: the cut's range, then the head's. */
static uint64_t place_of(const struct lane_rounds *r, uint32_t unit)
{
    uint32_t count;
    const struct train_unit *u = &train_model_units(r->shard->model, &count)[unit];
    struct rounds_range part = part_of(r->shard, unit, r->shard->grid.d);
    if (u->local >= r->local_elems) {
        return r->own_elems;
    }
    return part.lo == part.hi ? 0 : u->local + part.lo - r->shard->cut_lo;
}

/* ---- life ---- */

static uint64_t measure(struct lane_rounds *r, const struct train_shard *shard, uint32_t lanes)
{
    uint32_t d = shard->grid.d;
    const struct train_unit *units = train_model_units(shard->model, &r->unit_count);
    uint64_t unit_max = 0;
    r->shard = shard;
    r->lanes = lanes;
    r->round_count = (lanes + shard->grid.dp - 1) / shard->grid.dp;
    r->stack_count = bl_lanes_stack(lanes);
    r->local_elems = train_model_local_elems(shard->model);
    r->own_elems = shard->cut_hi - shard->cut_lo;
    r->slice_elems =
        r->own_elems +
        (shard->tied_bounds == NULL ? 0 : shard->tied_bounds[d + 1] - shard->tied_bounds[d]);
    for (uint32_t u = 0; u < r->unit_count; u++) {
        struct rounds_range part = part_of(shard, u, d);
        unit_max = units[u].elems > unit_max ? units[u].elems : unit_max;
        r->part_max = part.hi - part.lo > r->part_max ? part.hi - part.lo : r->part_max;
    }
    uint64_t received = shard->grid.dp > 1 ? shard->grid.dp * r->part_max : 0;
    r->memory_bytes =
        (unit_max + received + r->stack_count * r->slice_elems + 1) * sizeof *r->memory;
    return unit_max;
}

uint64_t lane_rounds_bytes(const struct train_shard *shard, uint32_t lanes)
{
    struct lane_rounds r = {0};
    measure(&r, shard, lanes);
    return r.memory_bytes;
}

int lane_rounds_new(struct lane_rounds **ret, const struct train_shard *shard, struct kern *kern,
                    uint32_t lanes, struct bl_errmsg *msg)
{
    if (shard->grid.dp > lanes) {
        return bl_err(msg, BL_ELIMIT, "%u lanes for %u replicas: each needs at least one", lanes,
                      shard->grid.dp);
    }
    struct lane_rounds *r = calloc(1, sizeof *r);
    if (r == NULL) {
        return bl_err_code(msg, -ENOMEM, "gradients");
    }
    uint64_t unit_max = measure(r, shard, lanes);
    r->kern = kern;
    r->memory = kern->ops->alloc(kern, r->memory_bytes);
    r->units = calloc(r->unit_count, sizeof *r->units);
    r->parts = calloc(2 * (size_t)shard->grid.dp, sizeof *r->parts);
    if (r->memory == NULL || r->units == NULL || r->parts == NULL) {
        uint64_t bytes = r->memory_bytes;
        lane_rounds_free(r);
        return bl_err_code(msg, -ENOMEM, "%llu bytes for gradients", (unsigned long long)bytes);
    }
    if (kern->is_device) { /* what no unit writes is summed too; the host's is zero */
        kern->ops->zero(kern, r->memory, r->memory_bytes);
    }
    r->unit = r->memory;
    r->received = r->unit + unit_max;
    r->stack = r->received + (shard->grid.dp > 1 ? shard->grid.dp * r->part_max : 0);
    *ret = r;
    return 0;
}

void lane_rounds_free(struct lane_rounds *rounds)
{
    if (rounds == NULL) {
        return;
    }
    rounds->kern->ops->free(rounds->kern, rounds->memory, rounds->memory_bytes);
    free(rounds->units);
    free(rounds->parts);
    free(rounds);
}

/* ---- a step ---- */

void lane_rounds_begin(struct lane_rounds *rounds)
{
    memset(rounds->units, 0, rounds->unit_count * sizeof *rounds->units);
}

float *lane_rounds_grads(struct lane_rounds *rounds)
{
    return rounds->unit;
}

float *lane_rounds_slice(struct lane_rounds *rounds)
{
    return rounds->stack;
}

/* A lane's part goes on the unit's stack, and the tree adds what it adds after it. */
static void push(struct lane_rounds *r, uint32_t unit, uint32_t lane, const float *part,
                 uint64_t count)
{
    struct kern *k = r->kern;
    struct rounds_unit *u = &r->units[unit];
    uint32_t merges = bl_lanes_merges_after(0, r->lanes, lane);
    float *top = r->stack + place_of(r, unit) + u->depth * r->slice_elems; /* the free one */
    if (merges == 0) {
        BL_ASSERT(u->depth < r->stack_count);
        k->ops->copy(k, top, part, count * sizeof *part);
        u->depth++;
        return;
    }
    float *left = top - r->slice_elems;
    k->ops->add(k, left, left, part, count);
    for (uint32_t i = 1; i < merges; i++) {
        u->depth--;
        top = left;
        left -= r->slice_elems;
        k->ops->add(k, left, left, top, count);
    }
}

static int exchange(struct lane_rounds *r, uint32_t unit, uint32_t in_round, struct comm_group *dp,
                    struct bl_errmsg *msg)
{
    uint32_t size = r->shard->grid.dp, mine = r->shard->grid.d;
    struct comm_part *sends = r->parts, *recvs = r->parts + size;
    struct rounds_range own = part_of(r->shard, unit, mine);
    for (uint32_t d = 0; d < size; d++) {
        struct rounds_range part = part_of(r->shard, unit, d);
        sends[d] = recvs[d] = (struct comm_part){NULL, 0};
        if (mine < in_round) {
            sends[d] = (struct comm_part){r->unit + part.lo, (part.hi - part.lo) * sizeof *r->unit};
        }
        if (d < in_round && d != mine) {
            recvs[d] = (struct comm_part){r->received + d * r->part_max,
                                          (own.hi - own.lo) * sizeof *r->unit};
        }
    }
    return comm_group_exchange(dp, sends, recvs, msg);
}

int lane_rounds_done(struct lane_rounds *rounds, uint32_t unit, struct comm_group *dp,
                     struct bl_errmsg *msg)
{
    const struct train_grid *g = &rounds->shard->grid;
    uint32_t first = rounds->units[unit].round++ * g->dp;
    BL_ASSERT(first < rounds->lanes);
    uint32_t in_round = rounds->lanes - first < g->dp ? rounds->lanes - first : g->dp;
    struct rounds_range own = part_of(rounds->shard, unit, g->d);
    int rc = dp == NULL ? 0 : exchange(rounds, unit, in_round, dp, msg);
    if (rc != 0 || own.lo == own.hi) {
        return rc;
    }
    for (uint32_t d = 0; d < in_round; d++) {
        const float *part =
            d == g->d ? rounds->unit + own.lo : rounds->received + d * rounds->part_max;
        push(rounds, unit, first + d, part, own.hi - own.lo);
    }
    return 0;
}

void lane_rounds_finish(struct lane_rounds *rounds)
{
    for (uint32_t u = 0; u < rounds->unit_count; u++) {
        BL_ASSERT(rounds->units[u].round == rounds->round_count);
    }
    uint64_t tied = rounds->slice_elems - rounds->own_elems;
    if (tied != 0) { /* the embedding lies at element 0 */
        train_model_tied_finish(rounds->kern, rounds->stack, rounds->stack + rounds->own_elems,
                                tied);
    }
}
