/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/lane_sum.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/lanes.h"
#include "base/mem.h"

struct lane_sum {
    const struct train_shard *shard; /* kept */
    struct bl_lane_plan plan;
    uint64_t grad_elems, tied_elems, buffer_elems;
    uint32_t rounds; /* the most pieces that one rank has */
    float *memory;   /* buffers, then received slices */
    uint64_t memory_bytes;
    uint32_t buffer_count, buffer_next; /* whole gradients; a stack */
    float **roots;                      /* by piece: the own sum, or NULL */
    float **slices;                     /* by piece: own range of the parameters */
    float **tied_slices;                /* by piece: own range of the head's region */
    struct comm_part *parts;            /* 2 * world */
};

static uint64_t clip(uint64_t at, uint64_t limit)
{
    return at < limit ? at : limit;
}

static uint32_t pieces_of(const struct bl_lane_plan *plan, uint32_t rank)
{
    return plan->rank_first[rank + 1] - plan->rank_first[rank];
}

/* The `k`th piece of a rank, or UINT32_MAX. */
static uint32_t piece_at(const struct bl_lane_plan *plan, uint32_t rank, uint32_t k)
{
    return k < pieces_of(plan, rank) ? plan->rank_pieces[plan->rank_first[rank] + k] : UINT32_MAX;
}

/* Whole-gradient buffers that a rank needs: sums of its pieces so far, and the one in work. */
static uint32_t buffers_needed(const struct bl_lane_plan *plan, uint32_t rank)
{
    uint32_t most = 1;
    for (uint32_t k = 0; k < pieces_of(plan, rank); k++) {
        uint32_t now = k + bl_lanes_stack(plan->pieces[piece_at(plan, rank, k)].n);
        most = now > most ? now : most;
    }
    return most;
}

/* Elements of one received slice, both parts. */
static uint64_t slice_elems(const struct train_shard *shard)
{
    uint64_t tied = train_model_tied_elems(shard->model);
    return shard->own_hi - shard->own_lo + clip(shard->own_hi, tied) - clip(shard->own_lo, tied);
}

static uint64_t memory_needed(const struct train_shard *shard, const struct bl_lane_plan *plan)
{
    uint64_t received = plan->piece_count - pieces_of(plan, shard->rank);
    uint64_t elems = buffers_needed(plan, shard->rank) * train_model_grad_elems(shard->model) +
                     received * slice_elems(shard);
    return elems * sizeof(float);
}

uint64_t lane_sum_bytes(const struct train_shard *shard, uint32_t lanes)
{
    struct bl_lane_plan plan;
    if (bl_lanes_plan(&plan, lanes, shard->world, NULL) != 0) {
        return 0;
    }
    uint64_t bytes = memory_needed(shard, &plan);
    bl_lanes_close(&plan);
    return bytes;
}

static void place_slices(struct lane_sum *s)
{
    uint64_t own = s->shard->own_hi - s->shard->own_lo;
    float *at = s->memory + s->buffer_count * s->grad_elems;
    for (uint32_t i = 0; i < s->plan.piece_count; i++) {
        if (s->plan.pieces[i].rank != s->shard->rank) {
            s->slices[i] = at;
            s->tied_slices[i] = at + own;
            at += slice_elems(s->shard);
        }
    }
}

static int take_memory(struct lane_sum *s, struct bl_errmsg *msg)
{
    size_t pieces = s->plan.piece_count;
    s->roots = calloc(pieces, sizeof *s->roots);
    s->slices = calloc(pieces, sizeof *s->slices);
    s->tied_slices = calloc(pieces, sizeof *s->tied_slices);
    s->parts = calloc(2 * (size_t)s->shard->world, sizeof *s->parts);
    s->memory_bytes = memory_needed(s->shard, &s->plan);
    s->memory = bl_mem_alloc(s->memory_bytes);
    if (s->roots == NULL || s->slices == NULL || s->tied_slices == NULL || s->parts == NULL ||
        s->memory == NULL) {
        return bl_err_code(msg, -ENOMEM, "%llu bytes for gradients",
                           (unsigned long long)s->memory_bytes);
    }
    return 0;
}

int lane_sum_new(struct lane_sum **ret, const struct train_shard *shard, uint32_t lanes,
                 struct bl_errmsg *msg)
{
    struct lane_sum *s = calloc(1, sizeof *s);
    if (s == NULL) {
        return bl_err_code(msg, -ENOMEM, "gradients");
    }
    s->shard = shard;
    s->grad_elems = train_model_grad_elems(shard->model);
    s->tied_elems = train_model_tied_elems(shard->model);
    s->buffer_elems = train_model_buffer_elems(shard->model);
    int rc = bl_lanes_plan(&s->plan, lanes, shard->world, msg);
    if (rc != 0) {
        free(s);
        return rc;
    }
    for (uint32_t r = 0; r < shard->world; r++) {
        uint32_t n = pieces_of(&s->plan, r);
        s->rounds = n > s->rounds ? n : s->rounds;
    }
    s->buffer_count = buffers_needed(&s->plan, shard->rank);
    rc = take_memory(s, msg);
    if (rc != 0) {
        lane_sum_free(s);
        return rc;
    }
    place_slices(s);
    *ret = s;
    return 0;
}

void lane_sum_free(struct lane_sum *sum)
{
    if (sum == NULL) {
        return;
    }
    bl_mem_free(sum->memory, sum->memory_bytes);
    bl_lanes_close(&sum->plan);
    free(sum->roots);
    free(sum->slices);
    free(sum->tied_slices);
    free(sum->parts);
    free(sum);
}

int lane_sum_has(const struct lane_sum *sum, uint32_t lane)
{
    uint32_t i = 0;
    while (lane - sum->plan.pieces[i].lo >= sum->plan.pieces[i].n) {
        i++;
    }
    return sum->plan.pieces[i].rank == sum->shard->rank;
}

float *lane_sum_slice(struct lane_sum *sum)
{
    return sum->slices[0]; /* where the merges of a plan end */
}

/* ---- sums of own pieces ---- */

struct lane_run {
    lane_grad_fn *grad;
    void *ctx;
    struct kern_pool *pool;
};

/* T(lo, n) into the next buffer of the stack, which stays taken. Depth is log2 of the lanes. */
static int piece_sum(struct lane_sum *s, const struct lane_run *run, uint32_t lo, uint32_t n,
                     float **ret, struct bl_errmsg *msg)
{
    if (n == 1) {
        BL_ASSERT(s->buffer_next < s->buffer_count);
        *ret = s->memory + s->buffer_next++ * s->grad_elems;
        return run->grad(run->ctx, lo, *ret, msg);
    }
    uint32_t p = bl_lanes_split(n);
    float *right;
    int rc = piece_sum(s, run, lo, p, ret, msg);
    if (rc == 0) {
        rc = piece_sum(s, run, lo + p, n - p, &right, msg);
    }
    if (rc == 0) {
        kern_add(run->pool, *ret, *ret, right, s->grad_elems);
        s->buffer_next--;
    }
    return rc;
}

/* ---- the exchange ---- */

/* One round: every rank sends the slices of one of its pieces. tied: of the head's region. */
static int exchange_round(struct lane_sum *s, struct comm *comm, uint32_t round, int tied,
                          struct bl_errmsg *msg)
{
    const struct train_shard *shard = s->shard;
    struct comm_part *sends = s->parts, *recvs = s->parts + shard->world;
    uint64_t limit = tied ? s->tied_elems : s->buffer_elems;
    uint64_t base = tied ? s->buffer_elems : 0;
    uint32_t mine = piece_at(&s->plan, shard->rank, round);
    uint64_t own = clip(shard->own_hi, limit) - clip(shard->own_lo, limit);
    for (uint32_t r = 0; r < shard->world; r++) {
        uint64_t lo = clip(shard->bounds[r], limit), hi = clip(shard->bounds[r + 1], limit);
        uint32_t theirs = piece_at(&s->plan, r, round);
        sends[r] = recvs[r] = (struct comm_part){NULL, 0};
        if (mine != UINT32_MAX) {
            sends[r] = (struct comm_part){s->roots[mine] + base + lo, (hi - lo) * sizeof(float)};
        }
        if (theirs != UINT32_MAX && r != shard->rank) {
            float *to = tied ? s->tied_slices[theirs] : s->slices[theirs];
            recvs[r] = (struct comm_part){to, own * sizeof(float)};
        }
    }
    return comm_exchange(comm, sends, recvs, msg);
}

static int exchange_pieces(struct lane_sum *s, struct comm *comm, struct bl_errmsg *msg)
{
    for (uint32_t round = 0; round < s->rounds; round++) {
        int rc = exchange_round(s, comm, round, 0, msg);
        if (rc == 0 && s->tied_elems != 0) {
            rc = exchange_round(s, comm, round, 1, msg);
        }
        if (rc != 0) {
            return rc;
        }
    }
    return 0;
}

/* ---- the tree over pieces ---- */

static void merge_slices(const struct lane_sum *s, float **slices, uint64_t count,
                         struct kern_pool *pool)
{
    for (uint32_t i = 0; i + 1 < s->plan.piece_count; i++) {
        const struct bl_lane_merge *m = &s->plan.merges[i];
        kern_add(pool, slices[m->left], slices[m->left], slices[m->right], count);
    }
}

int lane_sum_run(struct lane_sum *sum, lane_grad_fn *grad, void *ctx, struct comm *comm,
                 struct kern_pool *pool, struct bl_errmsg *msg)
{
    const struct train_shard *shard = sum->shard;
    const struct lane_run run = {grad, ctx, pool};
    uint64_t tied_lo = clip(shard->own_lo, sum->tied_elems);
    uint64_t tied_count = clip(shard->own_hi, sum->tied_elems) - tied_lo;
    sum->buffer_next = 0;
    for (uint32_t k = 0; k < pieces_of(&sum->plan, shard->rank); k++) {
        uint32_t i = piece_at(&sum->plan, shard->rank, k);
        const struct bl_lane_piece *piece = &sum->plan.pieces[i];
        int rc = piece_sum(sum, &run, piece->lo, piece->n, &sum->roots[i], msg);
        if (rc != 0) {
            return rc;
        }
        sum->slices[i] = sum->roots[i] + shard->own_lo;
        sum->tied_slices[i] = sum->roots[i] + sum->buffer_elems + tied_lo;
    }
    int rc = shard->world == 1 ? 0 : exchange_pieces(sum, comm, msg);
    if (rc != 0) {
        return rc;
    }
    merge_slices(sum, sum->slices, shard->own_hi - shard->own_lo, pool);
    if (tied_count != 0) { /* the head's region begins with the embedding's, at element 0 */
        merge_slices(sum, sum->tied_slices, tied_count, pool);
        train_model_tied_finish(pool, sum->slices[0], sum->tied_slices[0], tied_count);
    }
    return 0;
}
