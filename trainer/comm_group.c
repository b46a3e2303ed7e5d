/* SPDX-License-Identifier: Apache-2.0 */
/* Groups, and the collectives that add nothing but integers: all on one exchange of messages. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/comm_host.h"

/* ---- life ---- */

static int take_memory(struct comm_group *g)
{
    size_t count = g->count;
    g->ranks = calloc(count, sizeof *g->ranks);
    g->outs = calloc(count, sizeof *g->outs);
    g->ins = calloc(count, sizeof *g->ins);
    g->bounds = calloc(count + 1, sizeof *g->bounds);
    g->parts = calloc(2 * count, sizeof *g->parts);
    g->words = calloc(COMM_WORDS_MAX * count, sizeof *g->words);
    return g->ranks == NULL || g->outs == NULL || g->ins == NULL || g->bounds == NULL ||
                   g->parts == NULL || g->words == NULL
               ? -ENOMEM
               : 0;
}

/* The n-th group of a list has the n-th channel of the list, which no earlier group has. */
static int take_channel(struct comm_group *g)
{
    static const uint64_t key[2] = {0x67726f757073206full, 0x662072616e6b733aull};
    struct comm *c = g->comm;
    uint64_t *grown = realloc(c->channels, ((size_t)c->channel_count + 1) * sizeof *c->channels);
    if (grown == NULL) {
        return -ENOMEM;
    }
    c->channels = grown;
    uint64_t channel = comm_siphash(key, g->ranks, g->count * sizeof *g->ranks);
    for (uint32_t i = 0; i < c->channel_count; i++) {
        if (c->channels[i] == channel || channel == COMM_TAGGED) {
            channel = comm_siphash(key, &channel, sizeof channel);
            i = UINT32_MAX; /* from the start */
        }
    }
    g->channel = c->channels[c->channel_count++] = channel;
    return 0;
}

static int check_ranks(const struct comm *c, const uint32_t *ranks, uint32_t count,
                       uint32_t *ret_me, struct bl_errmsg *msg)
{
    *ret_me = UINT32_MAX;
    for (uint32_t i = 0; i < count; i++) {
        int is_twice = 0;
        for (uint32_t k = 0; k < i; k++) {
            is_twice |= ranks[k] == ranks[i];
        }
        if (ranks[i] >= c->world || is_twice) {
            return bl_err(msg, BL_ECONFIG, "rank %u %s of the group", ranks[i],
                          is_twice ? "is twice a member" : "is not in the world");
        }
        if (ranks[i] == c->rank) {
            *ret_me = i;
        }
    }
    return *ret_me != UINT32_MAX
               ? 0
               : bl_err(msg, BL_ECONFIG, "rank %u is no member of its group", c->rank);
}

int comm_group_new(struct comm_group **ret, struct comm *comm, const uint32_t *ranks,
                   uint32_t count, struct bl_errmsg *msg)
{
    uint32_t me;
    int rc = check_ranks(comm, ranks, count, &me, msg);
    if (rc != 0) {
        return rc;
    }
    struct comm_group *g = calloc(1, sizeof *g);
    if (g != NULL) {
        g->comm = comm;
        g->count = count;
        g->me = me;
        rc = take_memory(g);
    }
    if (g != NULL && rc == 0) {
        memcpy(g->ranks, ranks, count * sizeof *ranks);
        rc = take_channel(g);
    }
    if (g == NULL || rc != 0) {
        comm_group_free(g);
        return bl_err_code(msg, -ENOMEM, "group of %u ranks", count);
    }
    *ret = g;
    return 0;
}

void comm_group_free(struct comm_group *group)
{
    if (group != NULL) {
        if (group->engine != NULL) {
            group->comm->ops->group_close(group->engine);
        }
        comm_sum_free(group->sum);
        free(group->direct);
        free(group->ranks);
        free(group->outs);
        free(group->ins);
        free(group->bounds);
        free(group->parts);
        free(group->words);
        free(group);
    }
}

struct comm_group *comm_everyone(struct comm *comm)
{
    return comm->everyone;
}

uint32_t comm_group_rank(const struct comm_group *group)
{
    return group->me;
}

uint32_t comm_group_size(const struct comm_group *group)
{
    return group->count;
}

/* ---- the exchange ---- */

void comm_group_begin(struct comm_group *group)
{
    group->sequence++;
    group->open = 0;
}

void comm_group_message(struct comm_group *group, struct comm_request *request, uint32_t member,
                        uint32_t stream, void *data, uint64_t bytes)
{
    request->frame = (struct comm_frame){
        .channel = group->channel, .tag = group->sequence * COMM_STREAMS + stream, .bytes = bytes};
    request->data = data;
    request->open = &group->open;
    request->peer = group->ranks[member];
    request->is_wanted = 1;
    group->open++;
}

static int is_exchange_over(void *ctx, struct bl_errmsg *msg)
{
    const struct comm_group *g = ctx;
    (void)msg;
    return g->open == 0;
}

int comm_host_exchange(struct comm_group *group, const struct comm_part *sends,
                       const struct comm_part *recvs, struct bl_errmsg *msg)
{
    struct bl_errmsg why = {{0}};
    int rc = comm_broken(group->comm, msg);
    if (rc != 0) {
        return rc;
    }
    comm_group_begin(group);
    for (uint32_t k = 1; k < group->count && rc == 0; k++) {
        uint32_t m = (group->me + k) % group->count;
        if (sends[m].bytes > 0) {
            comm_group_message(group, &group->outs[m], m, 0, sends[m].data, sends[m].bytes);
            comm_send_post(group->comm, &group->outs[m]);
        }
        if (recvs[m].bytes > 0) {
            comm_group_message(group, &group->ins[m], m, 0, recvs[m].data, recvs[m].bytes);
            rc = comm_recv_post(group->comm, &group->ins[m], &why);
        }
    }
    if (rc != 0) {
        return comm_fail(group->comm, rc, &why, msg);
    }
    return comm_drive(group->comm, is_exchange_over, group, msg);
}

int comm_group_exchange(struct comm_group *group, const struct comm_part *sends,
                        const struct comm_part *recvs, struct bl_errmsg *msg)
{
    return group->is_engines ? comm_attached_exchange(group, sends, recvs, msg)
                             : comm_host_exchange(group, sends, recvs, msg);
}

/* The others' parts, from where they lie. */
static int gather_direct(struct comm_group *g, uint8_t *base, const uint64_t *bounds,
                         struct bl_errmsg *msg)
{
    int rc = 0;
    for (uint32_t k = 1; rc == 0 && k < g->count; k++) {
        uint32_t m = (g->me + k) % g->count;
        rc = comm_direct_read(g, m, bounds[m], base + bounds[m], bounds[m + 1] - bounds[m], msg);
    }
    return rc == 0 ? comm_direct_part(g, msg) : rc;
}

int comm_group_gather_sent(struct comm_group *group, void *base, const uint64_t *bounds,
                           struct bl_errmsg *msg)
{
    struct comm_part *sends = group->parts, *recvs = group->parts + group->count;
    uint8_t *bytes = base;
    uint32_t me = group->me;
    for (uint32_t m = 0; m < group->count; m++) {
        sends[m] = (struct comm_part){bytes + bounds[me], bounds[me + 1] - bounds[me]};
        recvs[m] = (struct comm_part){bytes + bounds[m], bounds[m + 1] - bounds[m]};
    }
    return comm_host_exchange(group, sends, recvs, msg);
}

int comm_group_allgather(struct comm_group *group, void *base, const uint64_t *bounds,
                         struct bl_errmsg *msg)
{
    int is_direct = 0;
    if (group->is_engines) {
        return comm_attached_allgather(group, base, bounds, msg);
    }
    if (bounds[group->count] - bounds[0] >= COMM_DIRECT_BYTES) {
        int rc = comm_direct_meet(group, base, &is_direct, msg);
        if (rc != 0 || is_direct) {
            return rc != 0 ? rc : gather_direct(group, base, bounds, msg);
        }
    }
    return comm_group_gather_sent(group, base, bounds, msg);
}

int comm_group_broadcast(struct comm_group *group, uint32_t root, void *data, uint64_t bytes,
                         struct bl_errmsg *msg)
{
    struct comm_part *sends = group->parts, *recvs = group->parts + group->count;
    if (group->is_engines) {
        return comm_attached_broadcast(group, root, data, bytes, msg);
    }
    for (uint32_t m = 0; m < group->count; m++) {
        sends[m] = (struct comm_part){data, group->me == root ? bytes : 0};
        recvs[m] = (struct comm_part){data, m == root ? bytes : 0};
    }
    return comm_host_exchange(group, sends, recvs, msg);
}

int comm_group_sum_u64(struct comm_group *group, uint64_t *values, uint32_t count,
                       struct bl_errmsg *msg)
{
    BL_ASSERT(count <= COMM_WORDS_MAX);
    uint64_t row = count * sizeof *values;
    for (uint32_t m = 0; m <= group->count; m++) {
        group->bounds[m] = m * row;
    }
    memcpy(group->words + group->me * count, values, row);
    int rc = comm_group_gather_sent(group, group->words, group->bounds, msg);
    for (uint32_t i = 0; rc == 0 && i < count; i++) {
        values[i] = 0;
        for (uint32_t m = 0; m < group->count; m++) {
            values[i] += group->words[m * count + i];
        }
    }
    return rc;
}

/* ---- the same of all ranks ---- */

int comm_exchange(struct comm *comm, const struct comm_part *sends, const struct comm_part *recvs,
                  struct bl_errmsg *msg)
{
    return comm_group_exchange(comm->everyone, sends, recvs, msg);
}

int comm_allgather(struct comm *comm, void *base, const uint64_t *bounds, struct bl_errmsg *msg)
{
    return comm_group_allgather(comm->everyone, base, bounds, msg);
}

int comm_broadcast(struct comm *comm, uint32_t root, void *data, uint64_t bytes,
                   struct bl_errmsg *msg)
{
    return comm_group_broadcast(comm->everyone, root, data, bytes, msg);
}

int comm_sum_u64(struct comm *comm, uint64_t *values, uint32_t count, struct bl_errmsg *msg)
{
    return comm_group_sum_u64(comm->everyone, values, count, msg);
}

int comm_barrier(struct comm *comm, struct bl_errmsg *msg)
{
    uint64_t zero = 0;
    return comm_sum_u64(comm, &zero, 1, msg);
}
