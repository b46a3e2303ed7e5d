/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The planner. Whole trees are cut only where they must be: subtrees wait in order of size; the
 * largest goes to the rank with most room left under ceil(V / P) lanes; if it fits nowhere, its two
 * children wait in its place. As sizes are powers of two but for the right edge of the tree, it
 * does not matter which of the ranks with room takes a piece, and cutting as late as possible cuts
 * as little as possible. Ranks left empty then take one half of the largest piece.
 */
#include "base/lanes.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

uint32_t bl_lanes_split(uint32_t n)
{
    BL_ASSERT(n >= 2);
    return 1U << (31 - __builtin_clz(n - 1));
}

/* A binary heap of pairs, the largest `size` on top, among equals the smallest `index`. */
struct lane_heap_item {
    uint32_t size;
    uint32_t index; /* a piece's lo, or a rank */
    uint32_t rank;  /* of a placed piece */
};

struct lane_heap {
    struct lane_heap_item *at;
    uint32_t count;
};

static int lane_heap_before(const struct lane_heap_item *a, const struct lane_heap_item *b)
{
    return a->size != b->size ? a->size > b->size : a->index < b->index;
}

static void lane_heap_push(struct lane_heap *heap, uint32_t size, uint32_t index, uint32_t rank)
{
    struct lane_heap_item item = {size, index, rank};
    uint32_t i = heap->count++;
    while (i > 0 && lane_heap_before(&item, &heap->at[(i - 1) / 2])) {
        heap->at[i] = heap->at[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    heap->at[i] = item;
}

static struct lane_heap_item lane_heap_pop(struct lane_heap *heap)
{
    struct lane_heap_item top = heap->at[0];
    struct lane_heap_item item = heap->at[--heap->count];
    uint32_t i = 0;
    for (;;) {
        uint32_t child = 2 * i + 1;
        if (child >= heap->count) {
            break;
        }
        if (child + 1 < heap->count && lane_heap_before(&heap->at[child + 1], &heap->at[child])) {
            child++;
        }
        if (!lane_heap_before(&heap->at[child], &item)) {
            break;
        }
        heap->at[i] = heap->at[child];
        i = child;
    }
    heap->at[i] = item;
    return top;
}

/* Deals pieces: `waiting` is emptied into `placed`. */
static void lanes_deal(struct lane_heap *waiting, struct lane_heap *room, struct lane_heap *placed)
{
    while (waiting->count > 0) {
        struct lane_heap_item piece = lane_heap_pop(waiting);
        if (piece.size > room->at[0].size) {
            uint32_t left = bl_lanes_split(piece.size);
            lane_heap_push(waiting, left, piece.index, 0);
            lane_heap_push(waiting, piece.size - left, piece.index + left, 0);
            continue;
        }
        struct lane_heap_item rank = lane_heap_pop(room);
        lane_heap_push(placed, piece.size, piece.index, rank.index);
        lane_heap_push(room, rank.size - piece.size, rank.index, 0);
    }
}

/* Ranks that got nothing take the right half of the largest piece. */
static void lanes_fill_empty(struct lane_heap *room, struct lane_heap *placed, uint32_t load_max)
{
    while (room->at[0].size == load_max) {
        struct lane_heap_item rank = lane_heap_pop(room);
        struct lane_heap_item piece = lane_heap_pop(placed);
        uint32_t left = bl_lanes_split(piece.size);
        lane_heap_push(placed, left, piece.index, piece.rank);
        lane_heap_push(placed, piece.size - left, piece.index + left, rank.index);
        lane_heap_push(room, load_max - (piece.size - left), rank.index, 0);
    }
}

static int piece_order(const void *a, const void *b)
{
    const struct bl_lane_piece *x = a;
    const struct bl_lane_piece *y = b;
    return x->lo < y->lo ? -1 : x->lo > y->lo;
}

/* Numbers the ranks by their lowest lane; `names` is scratch of `ranks` words. */
static void lanes_name_ranks(struct bl_lane_plan *plan, uint32_t *names)
{
    uint32_t next = 0;
    memset(names, 0xff, plan->ranks * sizeof(*names));
    for (uint32_t i = 0; i < plan->piece_count; i++) {
        uint32_t rank = plan->pieces[i].rank;
        if (names[rank] == UINT32_MAX) {
            names[rank] = next++;
        }
        plan->pieces[i].rank = names[rank];
    }
    BL_ASSERT(next == plan->ranks);
}

/* The lists per rank, by counting; `cursor` is scratch of `ranks` words. */
static void lanes_index_ranks(struct bl_lane_plan *plan, uint32_t *cursor)
{
    for (uint32_t i = 0; i < plan->piece_count; i++) {
        plan->rank_first[plan->pieces[i].rank + 1]++;
    }
    for (uint32_t r = 0; r < plan->ranks; r++) {
        plan->rank_first[r + 1] += plan->rank_first[r];
        cursor[r] = plan->rank_first[r];
    }
    for (uint32_t i = 0; i < plan->piece_count; i++) {
        plan->rank_pieces[cursor[plan->pieces[i].rank]++] = i;
    }
    for (uint32_t r = 0; r < plan->ranks; r++) {
        uint32_t load = bl_lanes_load(plan, r);
        plan->load_max = load > plan->load_max ? load : plan->load_max;
    }
}

/* Right turns at the end of the path from T(lo, n) down to the subtree that begins at `at` with
 * `size` lanes: as many subtrees end with it. */
static uint32_t lanes_right_turns(uint32_t lo, uint32_t n, uint32_t at, uint32_t size)
{
    uint32_t turns = 0;
    while (n > size || lo != at) {
        uint32_t left = bl_lanes_split(n);
        if (at < lo + left) {
            n = left;
            turns = 0;
        } else {
            lo += left;
            n -= left;
            turns++;
        }
    }
    return turns;
}

/* Merges across pieces, as the stack of bl_lanes_merges_after would do them; `stack` is scratch. */
static void lanes_order_merges(struct bl_lane_plan *plan, uint32_t *stack)
{
    uint32_t depth = 0;
    uint32_t count = 0;
    for (uint32_t i = 0; i < plan->piece_count; i++) {
        const struct bl_lane_piece *piece = &plan->pieces[i];
        uint32_t turns = lanes_right_turns(0, plan->lanes, piece->lo, piece->n);
        stack[depth++] = i;
        for (uint32_t t = 0; t < turns; t++) {
            depth--;
            plan->merges[count++] = (struct bl_lane_merge){stack[depth - 1], stack[depth]};
        }
    }
    BL_ASSERT(depth == 1 && count == plan->piece_count - 1);
}

int bl_lanes_plan(struct bl_lane_plan *ret, uint32_t lanes, uint32_t ranks, struct bl_errmsg *msg)
{
    if (lanes < 1 || lanes > BL_LANES_MAX || ranks < 1 || ranks > lanes) {
        return bl_err(msg, BL_ELIMIT,
                      "%u lanes cannot be planned on %u ranks (1 to %d lanes, no "
                      "more ranks than lanes)",
                      lanes, ranks, BL_LANES_MAX);
    }
    struct bl_lane_plan plan = {.lanes = lanes, .ranks = ranks};
    uint32_t load_max = (lanes + ranks - 1) / ranks;
    struct lane_heap waiting = {calloc(lanes + 1, sizeof(struct lane_heap_item)), 0};
    struct lane_heap placed = {calloc(lanes + 1, sizeof(struct lane_heap_item)), 0};
    struct lane_heap room = {calloc(ranks + 1, sizeof(struct lane_heap_item)), 0};
    uint32_t *scratch = calloc(lanes + 1, sizeof(*scratch));
    plan.pieces = calloc(lanes, sizeof(*plan.pieces));
    plan.merges = calloc(lanes, sizeof(*plan.merges));
    plan.rank_first = calloc(ranks + 1, sizeof(*plan.rank_first));
    plan.rank_pieces = calloc(lanes, sizeof(*plan.rank_pieces));
    int rc = -ENOMEM;
    if (waiting.at != NULL && placed.at != NULL && room.at != NULL && scratch != NULL &&
        plan.pieces != NULL && plan.merges != NULL && plan.rank_first != NULL &&
        plan.rank_pieces != NULL) {
        for (uint32_t r = 0; r < ranks; r++) {
            lane_heap_push(&room, load_max, r, 0);
        }
        lane_heap_push(&waiting, lanes, 0, 0);
        lanes_deal(&waiting, &room, &placed);
        lanes_fill_empty(&room, &placed, load_max);
        for (uint32_t i = 0; i < placed.count; i++) {
            plan.pieces[i] =
                (struct bl_lane_piece){placed.at[i].index, placed.at[i].size, placed.at[i].rank};
        }
        plan.piece_count = placed.count;
        qsort(plan.pieces, plan.piece_count, sizeof(*plan.pieces), piece_order);
        lanes_name_ranks(&plan, scratch);
        lanes_index_ranks(&plan, scratch);
        lanes_order_merges(&plan, scratch);
        rc = 0;
    }
    free(waiting.at);
    free(placed.at);
    free(room.at);
    free(scratch);
    if (rc < 0) {
        bl_lanes_close(&plan);
        return bl_err_code(msg, rc, "plan of %u lanes", lanes);
    }
    *ret = plan;
    return 0;
}

void bl_lanes_close(struct bl_lane_plan *plan)
{
    if (plan != NULL) {
        free(plan->pieces);
        free(plan->merges);
        free(plan->rank_first);
        free(plan->rank_pieces);
        memset(plan, 0, sizeof(*plan));
    }
}

uint32_t bl_lanes_load(const struct bl_lane_plan *plan, uint32_t rank)
{
    BL_ASSERT(rank < plan->ranks);
    uint32_t load = 0;
    for (uint32_t i = plan->rank_first[rank]; i < plan->rank_first[rank + 1]; i++) {
        load += plan->pieces[plan->rank_pieces[i]].n;
    }
    return load;
}

uint32_t bl_lanes_merges_after(uint32_t lo, uint32_t n, uint32_t lane)
{
    BL_ASSERT(lane >= lo && lane - lo < n);
    return lanes_right_turns(lo, n, lane, 1);
}

uint32_t bl_lanes_stack(uint32_t n)
{
    uint32_t depth = 1;
    for (uint32_t left = 0; n > 1; n = left) {
        left = bl_lanes_split(n);
        /* The right part stacks on top of the one finished sum of the left part. */
        uint32_t right = 1 + bl_lanes_stack(n - left);
        depth = right > depth ? right : depth;
    }
    return depth;
}
