/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/lane_sum.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/lanes.h"

#define TIED_TAG                                                                                   \
    0x7469656400000000u /* "tied": the head's sum, from the last stage to the first                \
                         */

struct lane_range { /* of elements of a gradient buffer */
    uint64_t lo, hi;
};

struct lane_chunk {
    struct lane_range units, tied; /* the chunk's; the last virtual stage has the tied head's */
    uint32_t depth;                /* buffers that hold sums of it */
    uint32_t next;                 /* of the replica's lanes */
};

struct lane_sum {
    const struct train_shard *shard; /* kept */
    struct kern *kern;               /* kept */
    struct bl_lane_plan plan;
    uint64_t local_elems, grad_elems;
    uint64_t tied_elems; /* of the region that this rank has in its gradient */
    uint32_t rounds;     /* the most pieces that one replica has */
    float *memory;       /* of the back end: buffers, then received slices */
    uint64_t memory_bytes;
    uint32_t buffer_count;     /* whole gradients; a stack */
    struct lane_chunk *chunks; /* chunk_count */
    uint32_t chunk_count;
    uint32_t *lanes;  /* of the replica, in order */
    uint32_t *merges; /* after each, so many times the top two */
    uint32_t lane_count;
    float **slices;          /* by piece: own range of the cut */
    float **tied_slices;     /* by piece: own range of the head's region */
    float *tied_from;        /* on the first stage: where the last one's sum is received, or NULL */
    struct comm_part *parts; /* 2 * dp */
};

static uint32_t pieces_of(const struct bl_lane_plan *plan, uint32_t d)
{
    return plan->rank_first[d + 1] - plan->rank_first[d];
}

/* The `k`th piece of a replica, or UINT32_MAX. */
static uint32_t piece_at(const struct bl_lane_plan *plan, uint32_t d, uint32_t k)
{
    return k < pieces_of(plan, d) ? plan->rank_pieces[plan->rank_first[d] + k] : UINT32_MAX;
}

/* ---- sizes ---- */

/* Whole-gradient buffers that a rank needs: sums of its pieces so far, and the one in work. */
static uint32_t buffers_needed(const struct bl_lane_plan *plan, uint32_t d)
{
    uint32_t most = 1;
    for (uint32_t k = 0; k < pieces_of(plan, d); k++) {
        uint32_t now = k + bl_lanes_stack(plan->pieces[piece_at(plan, d, k)].n);
        most = now > most ? now : most;
    }
    return most;
}

/* The own range of the head's region: of those who have it in their gradient, and of the first
 * stage, where it is added. */
static uint64_t tied_own(const struct train_shard *shard)
{
    uint32_t d = shard->grid.d;
    return shard->tied_bounds == NULL ? 0 : shard->tied_bounds[d + 1] - shard->tied_bounds[d];
}

/* Of one received slice, both parts. */
static uint64_t slice_elems(const struct train_shard *shard)
{
    uint64_t tied = train_model_tied_elems(shard->model) != 0 ? tied_own(shard) : 0;
    return shard->cut_hi - shard->cut_lo + tied;
}

/* The head's sum comes from another stage. */
static int is_tied_receiver(const struct train_shard *shard)
{
    return shard->grid.pp > 1 && shard->grid.p == 0 && shard->tied_bounds != NULL;
}

static uint64_t memory_needed(const struct train_shard *shard, const struct bl_lane_plan *plan)
{
    uint32_t d = shard->grid.d;
    uint64_t received = plan->piece_count - pieces_of(plan, d);
    uint64_t elems = buffers_needed(plan, d) * train_model_grad_elems(shard->model) +
                     received * slice_elems(shard) +
                     (is_tied_receiver(shard) ? tied_own(shard) : 0);
    return elems * sizeof(float);
}

uint64_t lane_sum_bytes(const struct train_shard *shard, uint32_t lanes)
{
    struct bl_lane_plan plan;
    if (bl_lanes_plan(&plan, lanes, shard->grid.dp, NULL) != 0) {
        return 0;
    }
    uint64_t bytes = memory_needed(shard, &plan);
    bl_lanes_close(&plan);
    return bytes;
}

/* ---- life ---- */

static void place_slices(struct lane_sum *s)
{
    uint64_t own = s->shard->cut_hi - s->shard->cut_lo;
    float *at = s->memory + s->buffer_count * s->grad_elems;
    for (uint32_t i = 0; i < s->plan.piece_count; i++) {
        if (s->plan.pieces[i].rank != s->shard->grid.d) {
            s->slices[i] = at;
            s->tied_slices[i] = at + own;
            at += slice_elems(s->shard);
        }
    }
    s->tied_from = is_tied_receiver(s->shard) ? at : NULL;
    for (uint32_t k = 0; k < pieces_of(&s->plan, s->shard->grid.d); k++) {
        /* Where the stack leaves the sum of the replica's k-th piece. */
        float *root = s->memory + k * s->grad_elems;
        uint32_t i = piece_at(&s->plan, s->shard->grid.d, k);
        s->slices[i] = root + s->shard->cut_lo;
        s->tied_slices[i] = s->tied_elems != 0
                                ? root + s->local_elems + s->shard->tied_bounds[s->shard->grid.d]
                                : NULL;
    }
}

/* The lanes of the replica's pieces, one piece after the other. */
static void list_lanes(struct lane_sum *s)
{
    for (uint32_t k = 0; k < pieces_of(&s->plan, s->shard->grid.d); k++) {
        const struct bl_lane_piece *p = &s->plan.pieces[piece_at(&s->plan, s->shard->grid.d, k)];
        for (uint32_t lane = p->lo; lane < p->lo + p->n; lane++) {
            s->lanes[s->lane_count] = lane;
            s->merges[s->lane_count++] = bl_lanes_merges_after(p->lo, p->n, lane);
        }
    }
}

/* Which elements each chunk has: its units follow one another in the local order. */
static void range_chunks(struct lane_sum *s)
{
    const struct train_grid *g = &s->shard->grid;
    uint32_t count;
    const struct train_unit *units = train_model_units(s->shard->model, &count);
    for (uint32_t u = 0; u < count; u++) {
        if (units[u].local == TRAIN_NOT_HERE) {
            continue;
        }
        struct lane_chunk *c = &s->chunks[units[u].vstage / g->pp];
        struct lane_range *r = units[u].local < s->local_elems ? &c->units : &c->tied;
        uint64_t hi = units[u].local + units[u].elems;
        r->lo = units[u].local < r->lo || r->hi == 0 ? units[u].local : r->lo;
        r->hi = hi > r->hi ? hi : r->hi;
    }
    for (uint32_t c = 0; c < s->chunk_count; c++) {
        BL_ASSERT(s->chunks[c].units.lo < s->chunks[c].units.hi); /* a chunk has a layer */
    }
}

static int take_memory(struct lane_sum *s, struct bl_errmsg *msg)
{
    size_t pieces = s->plan.piece_count, lanes = bl_lanes_load(&s->plan, s->shard->grid.d);
    s->chunks = calloc(s->chunk_count, sizeof *s->chunks);
    s->lanes = calloc(lanes, sizeof *s->lanes);
    s->merges = calloc(lanes, sizeof *s->merges);
    s->slices = calloc(pieces, sizeof *s->slices);
    s->tied_slices = calloc(pieces, sizeof *s->tied_slices);
    s->parts = calloc(2 * (size_t)s->shard->grid.dp, sizeof *s->parts);
    s->memory_bytes = memory_needed(s->shard, &s->plan);
    s->memory = s->kern->ops->alloc(s->kern, s->memory_bytes);
    if (s->chunks == NULL || s->lanes == NULL || s->merges == NULL || s->slices == NULL ||
        s->tied_slices == NULL || s->parts == NULL || s->memory == NULL) {
        return bl_err_code(msg, -ENOMEM, "%llu bytes for gradients",
                           (unsigned long long)s->memory_bytes);
    }
    if (s->kern->is_device) { /* what no lane writes is summed too; the host's is zero */
        s->kern->ops->zero(s->kern, s->memory, s->memory_bytes);
    }
    return 0;
}

int lane_sum_new(struct lane_sum **ret, const struct train_shard *shard, struct kern *kern,
                 uint32_t lanes, uint32_t chunks, struct bl_errmsg *msg)
{
    struct lane_sum *s = calloc(1, sizeof *s);
    if (s == NULL) {
        return bl_err_code(msg, -ENOMEM, "gradients");
    }
    s->shard = shard;
    s->kern = kern;
    s->chunk_count = chunks;
    s->local_elems = train_model_local_elems(shard->model);
    s->grad_elems = train_model_grad_elems(shard->model);
    s->tied_elems = train_model_tied_elems(shard->model);
    int rc = bl_lanes_plan(&s->plan, lanes, shard->grid.dp, msg);
    if (rc != 0) {
        free(s);
        return rc;
    }
    for (uint32_t d = 0; d < shard->grid.dp; d++) {
        uint32_t n = pieces_of(&s->plan, d);
        s->rounds = n > s->rounds ? n : s->rounds;
    }
    s->buffer_count = buffers_needed(&s->plan, shard->grid.d);
    rc = take_memory(s, msg);
    if (rc != 0) {
        lane_sum_free(s);
        return rc;
    }
    place_slices(s);
    list_lanes(s);
    range_chunks(s);
    *ret = s;
    return 0;
}

void lane_sum_free(struct lane_sum *sum)
{
    if (sum == NULL) {
        return;
    }
    sum->kern->ops->free(sum->kern, sum->memory, sum->memory_bytes);
    bl_lanes_close(&sum->plan);
    free(sum->chunks);
    free(sum->lanes);
    free(sum->merges);
    free(sum->slices);
    free(sum->tied_slices);
    free(sum->parts);
    free(sum);
}

uint32_t lane_sum_lane(const struct lane_sum *sum, uint32_t k)
{
    BL_ASSERT(k < sum->lane_count);
    return sum->lanes[k];
}

int lane_sum_has(const struct lane_sum *sum, uint32_t d, uint32_t lane)
{
    uint32_t i = 0;
    while (lane - sum->plan.pieces[i].lo >= sum->plan.pieces[i].n) {
        i++;
    }
    return sum->plan.pieces[i].rank == d;
}

float *lane_sum_slice(struct lane_sum *sum)
{
    /* Where the merges of a plan end; with ZeRO 0 everything is gathered in the first buffer. */
    return sum->shard->zero == 0 ? sum->memory : sum->slices[0];
}

/* ---- sums of own pieces ---- */

void lane_sum_begin(struct lane_sum *sum)
{
    for (uint32_t c = 0; c < sum->chunk_count; c++) {
        sum->chunks[c].depth = sum->chunks[c].next = 0;
    }
}

float *lane_sum_grads(struct lane_sum *sum, uint32_t chunk)
{
    const struct lane_chunk *c = &sum->chunks[chunk];
    BL_ASSERT(c->next < sum->lane_count && c->depth < sum->buffer_count);
    return sum->memory + c->depth * sum->grad_elems;
}

static void add_range(struct lane_sum *s, const struct lane_range *r, float *left,
                      const float *right)
{
    if (r->hi > r->lo) {
        s->kern->ops->add(s->kern, left + r->lo, left + r->lo, right + r->lo, r->hi - r->lo);
    }
}

void lane_sum_done(struct lane_sum *sum, uint32_t chunk)
{
    struct lane_chunk *c = &sum->chunks[chunk];
    BL_ASSERT(c->next < sum->lane_count && c->depth < sum->buffer_count);
    c->depth++;
    for (uint32_t i = 0; i < sum->merges[c->next]; i++) {
        float *right = sum->memory + (c->depth - 1) * sum->grad_elems;
        float *left = right - sum->grad_elems;
        add_range(sum, &c->units, left, right);
        add_range(sum, &c->tied, left, right);
        c->depth--;
    }
    c->next++;
}

/* ---- the exchange ---- */

/* One round: every replica sends the slices of one of its pieces. tied: of the head's region. */
static int exchange_round(struct lane_sum *s, struct comm_group *dp, uint32_t round, int tied,
                          struct bl_errmsg *msg)
{
    const struct train_shard *shard = s->shard;
    struct comm_part *sends = s->parts, *recvs = s->parts + shard->grid.dp;
    const uint64_t *bounds = tied ? shard->tied_bounds : shard->bounds;
    uint64_t base = tied ? s->local_elems : 0;
    uint64_t own = bounds[shard->grid.d + 1] - bounds[shard->grid.d];
    int has_piece = round < pieces_of(&s->plan, shard->grid.d);
    for (uint32_t d = 0; d < shard->grid.dp; d++) {
        uint32_t theirs = piece_at(&s->plan, d, round);
        sends[d] = recvs[d] = (struct comm_part){NULL, 0};
        if (has_piece) {
            float *root = s->memory + round * s->grad_elems + base;
            sends[d] =
                (struct comm_part){root + bounds[d], (bounds[d + 1] - bounds[d]) * sizeof(float)};
        }
        if (theirs != UINT32_MAX && d != shard->grid.d) {
            recvs[d] = (struct comm_part){tied ? s->tied_slices[theirs] : s->slices[theirs],
                                          own * sizeof(float)};
        }
    }
    return comm_group_exchange(dp, sends, recvs, msg);
}

static int exchange_pieces(struct lane_sum *s, struct comm_group *dp, struct bl_errmsg *msg)
{
    for (uint32_t round = 0; round < s->rounds; round++) {
        int rc = exchange_round(s, dp, round, 0, msg);
        if (rc == 0 && s->tied_elems != 0) {
            rc = exchange_round(s, dp, round, 1, msg);
        }
        if (rc != 0) {
            return rc;
        }
    }
    return 0;
}

/* ---- the tree over pieces ---- */

static void merge_slices(const struct lane_sum *s, float **slices, uint64_t count)
{
    for (uint32_t i = 0; count != 0 && i + 1 < s->plan.piece_count; i++) {
        const struct bl_lane_merge *m = &s->plan.merges[i];
        s->kern->ops->add(s->kern, slices[m->left], slices[m->left], slices[m->right], count);
    }
}

/* Head and embedding once; with several stages the head's sum goes to the embedding's rank. */
static int add_tied(struct lane_sum *s, struct comm *comm, struct bl_errmsg *msg)
{
    const struct train_grid *g = &s->shard->grid;
    uint64_t count = tied_own(s->shard);
    struct comm_request *request;
    const float *head = s->tied_from;
    int rc;
    if (g->pp == 1) {
        head = s->tied_slices[0];
    } else if (s->tied_elems != 0) {
        rc = comm_send_start(comm, train_grid_at(g, g->t, 0, g->d), TIED_TAG, s->tied_slices[0],
                             count * sizeof(float), &request, msg);
        return rc != 0 ? rc : comm_wait(comm, request, msg);
    } else if (head != NULL) {
        rc = comm_recv_start(comm, train_grid_at(g, g->t, g->pp - 1, g->d), TIED_TAG, s->tied_from,
                             count * sizeof(float), &request, msg);
        rc = rc != 0 ? rc : comm_wait(comm, request, msg);
        if (rc != 0) {
            return rc;
        }
    }
    if (head != NULL && count != 0) { /* the embedding lies at element 0 */
        train_model_tied_finish(s->kern, s->slices[0], head, count);
    }
    return 0;
}

/* ZeRO 0: everybody has all of it, in the first buffer. */
static int gather_slices(struct lane_sum *s, struct comm_group *dp, struct bl_errmsg *msg)
{
    const struct train_shard *shard = s->shard;
    uint64_t bounds_max = (uint64_t)shard->grid.dp + 1;
    float *own = s->memory + shard->cut_lo;
    if (s->slices[0] != own) {
        s->kern->ops->copy(s->kern, own, s->slices[0],
                           (shard->cut_hi - shard->cut_lo) * sizeof(float));
    }
    if (dp == NULL) {
        return 0;
    }
    uint64_t *bounds = calloc(bounds_max, sizeof *bounds);
    if (bounds == NULL) {
        return bl_err_code(msg, -ENOMEM, "%u borders", shard->grid.dp);
    }
    for (uint64_t d = 0; d < bounds_max; d++) {
        bounds[d] = shard->bounds[d] * sizeof(float);
    }
    int rc = comm_group_allgather(dp, s->memory, bounds, msg);
    free(bounds);
    return rc;
}

int lane_sum_finish(struct lane_sum *sum, struct comm_group *dp, struct comm *comm,
                    struct bl_errmsg *msg)
{
    const struct train_shard *shard = sum->shard;
    for (uint32_t c = 0; c < sum->chunk_count; c++) {
        BL_ASSERT(sum->chunks[c].next == sum->lane_count);
    }
    int rc = dp == NULL ? 0 : exchange_pieces(sum, dp, msg);
    if (rc != 0) {
        return rc;
    }
    merge_slices(sum, sum->slices, shard->cut_hi - shard->cut_lo);
    if (sum->tied_elems != 0) {
        merge_slices(sum, sum->tied_slices, tied_own(shard));
    }
    rc = shard->tied_bounds == NULL ? 0 : add_tied(sum, comm, msg);
    return rc == 0 && shard->zero == 0 ? gather_slices(sum, dp, msg) : rc;
}
