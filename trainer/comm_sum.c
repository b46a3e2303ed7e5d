/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ordered sums of floats. Member m owns a slice and adds it up for all: it gets the others' addends
 * of it piece by piece (stream SUM_RAW), adds a piece when all have come, in the members' order,
 * and hands the sum out at once while it is in the cache (stream SUM_DONE). A member overwrites its
 * own addends of a piece with the sum only when it comes back, which is after they were sent. At
 * most two pieces of a stream are under way with a peer, so memory is bounded and whoever is behind
 * is waited for.
 *
 * Where all members may read each other's memory, large sums do without streams: each member reads
 * the addends of its slice where they lie, and after all have added, the others' sums.
 *
 * Few bytes go to all at once, and every member adds them itself: the same sums, one wait less.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/comm_host.h"

#define SUM_RAW         0u
#define SUM_DONE        1u
#define SUM_SLOTS       2u           /* pieces of a stream under way with a peer */
#define SUM_PIECE_BYTES (64u * 1024) /* stays in the second cache with its sum */
#define SUM_LEAST_BYTES (4u * 1024)  /* the same of very many members */
#define SUM_WINDOW      (8u << 20)   /* memory of all pieces that come in */
#define SUM_SMALL_BYTES (64u * 1024) /* of all members' addends: each adds them itself */
#define SUM_BLOCK       512u         /* elements added at once; in the first cache */
#define SUM_ALIGN       16u          /* slices begin at whole cache lines */

/* Pieces of one direction of one stream with one peer. */
struct sum_flow {
    struct comm_request slots[SUM_SLOTS];
    uint64_t next, count; /* pieces that were started; in all */
};

struct sum_peer {
    struct sum_flow raw_out, raw_in, done_out, done_in;
};

struct comm_sum {
    struct comm_group *group;
    uint64_t piece;         /* elements */
    struct sum_peer *peers; /* by member */
    float *window;          /* SUM_SLOTS pieces of each member */
    const float **addends;  /* by member; scratch */
    /* of the running sum */
    float *data;
    uint64_t *bounds; /* count + 1 */
    uint64_t added;   /* pieces of the own slice */
    int is_shared;    /* the sums go to all */
};

void comm_sum_free(struct comm_sum *sum)
{
    if (sum != NULL) {
        free(sum->peers);
        free(sum->window);
        free(sum->bounds);
        free(sum->addends);
        free(sum);
    }
}

static uint64_t piece_elems(uint32_t count)
{
    uint64_t bytes = SUM_WINDOW / (SUM_SLOTS * (uint64_t)count);
    bytes = bytes > SUM_PIECE_BYTES ? SUM_PIECE_BYTES : bytes;
    bytes = bytes < SUM_LEAST_BYTES ? SUM_LEAST_BYTES : bytes;
    return bytes / sizeof(float) / SUM_ALIGN * SUM_ALIGN;
}

/* The group's memory for sums, made by the first one. */
static int sum_open(struct comm_group *g, struct bl_errmsg *msg)
{
    if (g->sum != NULL) {
        return 0;
    }
    struct comm_sum *s = calloc(1, sizeof *s);
    if (s != NULL) {
        s->group = g;
        s->piece = piece_elems(g->count);
        s->peers = calloc(g->count, sizeof *s->peers);
        s->addends = calloc(g->count, sizeof *s->addends);
        s->bounds = calloc(g->count + 1, sizeof *s->bounds);
        s->window = aligned_alloc(64, g->count * SUM_SLOTS * s->piece * sizeof(float));
    }
    if (s == NULL || s->peers == NULL || s->addends == NULL || s->window == NULL ||
        s->bounds == NULL) {
        comm_sum_free(s);
        return bl_err_code(msg, -ENOMEM, "sums of %u ranks", g->count);
    }
    g->sum = s;
    return 0;
}

/* ---- adding ---- */

/* out[n] = ((addends[0] + addends[1]) + addends[2]) + ...; out may be one of them. */
static void add_block(float *out, const float *const *addends, uint32_t count, uint64_t at,
                      uint64_t n)
{
    float acc[SUM_BLOCK];
    memcpy(acc, addends[0] + at, n * sizeof *acc);
    for (uint32_t m = 1; m < count; m++) {
        const float *x = addends[m] + at;
        if (n == SUM_BLOCK) {
            for (uint32_t i = 0; i < SUM_BLOCK; i++) {
                acc[i] += x[i];
            }
        } else {
            for (uint64_t i = 0; i < n; i++) {
                acc[i] += x[i];
            }
        }
    }
    memcpy(out + at, acc, n * sizeof *acc);
}

static void add_all(float *out, const float *const *addends, uint32_t count, uint64_t elems)
{
    for (uint64_t at = 0; at < elems; at += SUM_BLOCK) {
        uint64_t n = elems - at < SUM_BLOCK ? elems - at : SUM_BLOCK;
        add_block(out, addends, count, at, n);
    }
}

/* ---- pieces ---- */

/* Piece `index` of member m's slice; its elements. */
static uint64_t piece_at(const struct comm_sum *s, uint32_t m, uint64_t index, float **ret)
{
    uint64_t at = s->bounds[m] + index * s->piece, left = s->bounds[m + 1] - at;
    *ret = s->data + at;
    return left < s->piece ? left : s->piece;
}

static uint64_t piece_count(const struct comm_sum *s, uint32_t m)
{
    return (s->bounds[m + 1] - s->bounds[m] + s->piece - 1) / s->piece;
}

static float *window_at(const struct comm_sum *s, uint32_t m, uint64_t index)
{
    return s->window + (m * SUM_SLOTS + index % SUM_SLOTS) * s->piece;
}

static void flow_init(struct sum_flow *flow, uint64_t count)
{
    flow->next = 0;
    flow->count = count;
    for (uint32_t i = 0; i < SUM_SLOTS; i++) {
        flow->slots[i].is_done = 1;
    }
}

/* The slot of the flow's next piece, if there is one and its slot is free; pieces from `end` on are
 * not ready. */
static struct comm_request *flow_slot(struct sum_flow *flow, uint64_t end)
{
    struct comm_request *slot = &flow->slots[flow->next % SUM_SLOTS];
    return flow->next < flow->count && flow->next < end && slot->is_done ? slot : NULL;
}

static void send_pieces(struct comm_sum *s, uint32_t m, uint32_t stream)
{
    struct sum_flow *flow = stream == SUM_RAW ? &s->peers[m].raw_out : &s->peers[m].done_out;
    uint64_t end = stream == SUM_RAW ? UINT64_MAX : s->added;
    struct comm_request *slot;
    while ((slot = flow_slot(flow, end)) != NULL) {
        float *from;
        uint64_t n = piece_at(s, stream == SUM_RAW ? m : s->group->me, flow->next++, &from);
        comm_group_message(s->group, slot, m, stream, from, n * sizeof *from);
        comm_send_post(s->group->comm, slot);
    }
}

static int receive_pieces(struct comm_sum *s, uint32_t m, uint32_t stream, struct bl_errmsg *msg)
{
    struct sum_flow *flow = stream == SUM_RAW ? &s->peers[m].raw_in : &s->peers[m].done_in;
    uint64_t end = stream == SUM_RAW ? s->added + SUM_SLOTS : UINT64_MAX;
    struct comm_request *slot;
    int rc = 0;
    while (rc == 0 && (slot = flow_slot(flow, end)) != NULL) {
        float *to;
        uint64_t n = piece_at(s, stream == SUM_RAW ? s->group->me : m, flow->next, &to);
        if (stream == SUM_RAW) {
            to = window_at(s, m, flow->next);
        }
        flow->next++;
        comm_group_message(s->group, slot, m, stream, to, n * sizeof *to);
        rc = comm_recv_post(s->group->comm, slot, msg);
    }
    return rc;
}

/* Whether all addends of the own slice's next piece are there. */
static int is_piece_ready(const struct comm_sum *s)
{
    const struct comm_group *g = s->group;
    for (uint32_t m = 0; m < g->count; m++) {
        const struct sum_flow *flow = &s->peers[m].raw_in;
        if (m != g->me && (flow->next <= s->added || !flow->slots[s->added % SUM_SLOTS].is_done)) {
            return 0;
        }
    }
    return s->added < piece_count(s, g->me);
}

static void add_piece(struct comm_sum *s)
{
    const struct comm_group *g = s->group;
    float *own;
    uint64_t n = piece_at(s, g->me, s->added, &own);
    for (uint32_t m = 0; m < g->count; m++) {
        s->addends[m] = m == g->me ? own : window_at(s, m, s->added);
    }
    add_all(own, s->addends, g->count, n);
    s->added++;
}

static int is_flow_over(const struct sum_flow *flow)
{
    return flow->next == flow->count;
}

/* Starts and adds what can be; whether all is done. */
static int sum_step(void *ctx, struct bl_errmsg *msg)
{
    struct comm_sum *s = ctx;
    const struct comm_group *g = s->group;
    int is_over = 1;
    while (is_piece_ready(s)) {
        add_piece(s);
    }
    for (uint32_t k = 1; k < g->count; k++) {
        uint32_t m = (g->me + k) % g->count;
        struct sum_peer *peer = &s->peers[m];
        int rc = receive_pieces(s, m, SUM_RAW, msg);
        if (rc == 0) {
            rc = receive_pieces(s, m, SUM_DONE, msg);
        }
        if (rc != 0) {
            return rc;
        }
        send_pieces(s, m, SUM_DONE);
        send_pieces(s, m, SUM_RAW);
        is_over &= is_flow_over(&peer->raw_in) && is_flow_over(&peer->raw_out) &&
                   is_flow_over(&peer->done_in) && is_flow_over(&peer->done_out);
    }
    return is_over && g->open == 0 && s->added == piece_count(s, g->me);
}

/* ---- where all members' memory can be read ---- */

/* The own slice, piece by piece, from where the addends lie. */
static int direct_add(struct comm_sum *s, struct bl_errmsg *msg)
{
    const struct comm_group *g = s->group;
    int rc = 0;
    for (uint64_t end = piece_count(s, g->me); rc == 0 && s->added < end;) {
        float *own;
        uint64_t n = piece_at(s, g->me, s->added, &own);
        uint64_t offset = (uint64_t)(own - s->data) * sizeof *own;
        for (uint32_t m = 0; rc == 0 && m < g->count; m++) {
            if (m != g->me) {
                rc = comm_direct_read(s->group, m, offset, window_at(s, m, s->added),
                                      n * sizeof *own, msg);
            }
        }
        if (rc == 0) {
            add_piece(s);
        }
    }
    return rc;
}

/* The others' slices, from where their sums lie. */
static int direct_take(struct comm_sum *s, struct bl_errmsg *msg)
{
    const struct comm_group *g = s->group;
    int rc = 0;
    for (uint32_t k = 1; rc == 0 && k < g->count; k++) {
        uint32_t m = (g->me + k) % g->count;
        uint64_t bytes = (s->bounds[m + 1] - s->bounds[m]) * sizeof *s->data;
        rc = comm_direct_read(s->group, m, s->bounds[m] * sizeof *s->data, s->data + s->bounds[m],
                              bytes, msg);
    }
    return rc;
}

static int sum_direct(struct comm_group *g, struct bl_errmsg *msg)
{
    struct comm_sum *s = g->sum;
    int rc = direct_add(s, msg);
    if (rc == 0) {
        rc = comm_direct_part(g, msg);
    }
    if (rc == 0 && s->is_shared) {
        rc = direct_take(s, msg);
        rc = rc != 0 ? rc : comm_direct_part(g, msg);
    }
    return rc;
}

/* ---- either way ---- */

static int sum_run(struct comm_group *g, float *data, const uint64_t *bounds, int is_shared,
                   struct bl_errmsg *msg)
{
    struct comm_sum *s = g->sum;
    int is_direct = 0, rc = 0;
    memcpy(s->bounds, bounds, (g->count + 1) * sizeof *bounds);
    s->data = data;
    s->added = 0;
    s->is_shared = is_shared;
    if (bounds[g->count] - bounds[0] >= COMM_DIRECT_BYTES / sizeof *data) {
        rc = comm_direct_meet(g, data, &is_direct, msg);
    }
    if (rc != 0 || is_direct) {
        return rc != 0 ? rc : sum_direct(g, msg);
    }
    uint64_t own = piece_count(s, g->me);
    for (uint32_t m = 0; m < g->count; m++) {
        uint64_t theirs = m == g->me ? 0 : piece_count(s, m);
        flow_init(&s->peers[m].raw_out, theirs);
        flow_init(&s->peers[m].done_in, is_shared ? theirs : 0);
        flow_init(&s->peers[m].raw_in, m == g->me ? 0 : own);
        flow_init(&s->peers[m].done_out, m == g->me || !is_shared ? 0 : own);
    }
    comm_group_begin(g);
    return comm_drive(g->comm, sum_step, s, msg);
}

/* ---- calls ---- */

/* All addends go to all. */
static int sum_small(struct comm_group *g, float *data, uint64_t count, struct bl_errmsg *msg)
{
    struct comm_sum *s = g->sum;
    struct comm_part *sends = g->parts, *recvs = g->parts + g->count;
    for (uint32_t m = 0; m < g->count; m++) {
        float *theirs = s->window + m * count;
        sends[m] = (struct comm_part){data, count * sizeof *data};
        recvs[m] = (struct comm_part){theirs, count * sizeof *data};
        s->addends[m] = m == g->me ? data : theirs;
    }
    int rc = comm_host_exchange(g, sends, recvs, msg);
    if (rc == 0) {
        add_all(data, s->addends, g->count, count);
    }
    return rc;
}

int comm_group_sum_f32(struct comm_group *group, float *data, uint64_t count, struct bl_errmsg *msg)
{
    int rc = sum_open(group, msg);
    if (rc != 0) {
        return rc;
    }
    if (count * sizeof *data * group->count <= SUM_SMALL_BYTES) {
        return sum_small(group, data, count, msg);
    }
    for (uint32_t m = 0; m < group->count; m++) {
        group->bounds[m] = count * m / group->count / SUM_ALIGN * SUM_ALIGN;
    }
    group->bounds[group->count] = count;
    return sum_run(group, data, group->bounds, 1, msg);
}

int comm_group_reduce_scatter_f32(struct comm_group *group, float *data, const uint64_t *bounds,
                                  struct bl_errmsg *msg)
{
    int rc = sum_open(group, msg);
    return rc != 0 ? rc : sum_run(group, data, bounds, 0, msg);
}
