/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/comm_staged.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "base/mem.h"
#include "trainer/comm_host.h"

struct staged_message;

struct comm_engine {
    struct kern *kern; /* kept */
    struct comm *comm; /* kept */
    atomic_int is_aborted;
    char *host; /* staging of one call */
    uint64_t host_bytes;
    void *scratch; /* of the back end: addends of a sum */
    struct staged_message *messages;
};

struct comm_engine_group {
    struct comm_engine *engine;
    struct comm_group *group; /* of the host */
    uint32_t rank, size;
    struct comm_part *parts; /* 2 * size */
    uint64_t *bounds;        /* size + 1 */
};

struct staged_message {
    struct staged_message *next;
    struct comm_request *request;
    void *staging, *to; /* `to` NULL: a send */
    uint64_t bytes;
};

/* ---- life ---- */

static void message_free(struct comm_engine *e, struct staged_message *m)
{
    struct staged_message **at = &e->messages;
    while (*at != m) {
        at = &(*at)->next;
    }
    *at = m->next;
    free(m->staging);
    free(m);
}

static void staged_close(struct comm_engine *engine)
{
    struct kern *k = engine->kern;
    while (engine->messages != NULL) { /* of a generation that was aborted */
        message_free(engine, engine->messages);
    }
    if (engine->scratch != NULL) {
        k->ops->free(k, engine->scratch, COMM_ENGINE_SCRATCH_BYTES);
    }
    bl_mem_free(engine->host, engine->host_bytes);
    free(engine);
}

static int staged_open(struct comm_engine **ret, struct kern *kern, struct comm *comm,
                       uint32_t deadline_ms, struct bl_errmsg *msg)
{
    struct comm_engine *e = calloc(1, sizeof *e);
    (void)deadline_ms; /* those who connected are there */
    if (e == NULL) {
        return bl_err_code(msg, -ENOMEM, "engine");
    }
    e->kern = kern;
    e->comm = comm;
    e->scratch = kern->ops->alloc(kern, COMM_ENGINE_SCRATCH_BYTES);
    if (e->scratch == NULL) {
        staged_close(e);
        return bl_err_code(msg, -ENOMEM, "%u bytes of the device for sums",
                           COMM_ENGINE_SCRATCH_BYTES);
    }
    *ret = e;
    return 0;
}

/* The host's connections are aborted beside this, and nothing else is waited for. */
static void staged_abort(struct comm_engine *engine)
{
    atomic_store(&engine->is_aborted, 1);
}

static int staged_check(struct comm_engine *engine, struct bl_errmsg *msg)
{
    return atomic_load(&engine->is_aborted) ? bl_err_code(msg, BL_EABORTED, "engine") : 0;
}

static int sync(struct comm_engine *e, struct bl_errmsg *msg)
{
    return e->kern->ops->sync(e->kern, msg);
}

/* Staging of at least so many bytes. */
static int need(struct comm_engine *e, uint64_t bytes, struct bl_errmsg *msg)
{
    if (bytes <= e->host_bytes) {
        return 0;
    }
    bl_mem_free(e->host, e->host_bytes);
    e->host_bytes = 0;
    e->host = bl_mem_alloc(bytes);
    if (e->host == NULL) {
        return bl_err_code(msg, -ENOMEM, "%llu bytes to move a device's memory",
                           (unsigned long long)bytes);
    }
    e->host_bytes = bytes;
    return 0;
}

static void download(struct comm_engine *e, void *host, const void *from, uint64_t bytes)
{
    if (bytes != 0) {
        e->kern->ops->download(e->kern, host, from, bytes);
    }
}

static void upload(struct comm_engine *e, void *to, const void *host, uint64_t bytes)
{
    if (bytes != 0) {
        e->kern->ops->upload(e->kern, to, host, bytes);
    }
}

/* ---- groups ---- */

static void staged_group_close(struct comm_engine_group *group)
{
    comm_group_free(group->group);
    free(group->parts);
    free(group->bounds);
    free(group);
}

static int staged_group_open(struct comm_engine *engine, const uint32_t *ranks, uint32_t count,
                             struct comm_engine_group **ret, struct bl_errmsg *msg)
{
    struct comm_engine_group *g = calloc(1, sizeof *g);
    if (g == NULL) {
        return bl_err_code(msg, -ENOMEM, "group of %u ranks", count);
    }
    g->engine = engine;
    g->size = count;
    g->parts = calloc(2 * (size_t)count, sizeof *g->parts);
    g->bounds = calloc((size_t)count + 1, sizeof *g->bounds);
    int rc = g->parts == NULL || g->bounds == NULL
                 ? bl_err_code(msg, -ENOMEM, "group of %u ranks", count)
                 : comm_group_new(&g->group, engine->comm, ranks, count, msg);
    if (rc != 0) {
        staged_group_close(g);
        return rc;
    }
    g->rank = comm_group_rank(g->group);
    *ret = g;
    return 0;
}

static int staged_exchange(struct comm_engine_group *group, const struct comm_part *sends,
                           const struct comm_part *recvs, struct bl_errmsg *msg)
{
    struct comm_engine *e = group->engine;
    struct comm_part *from = group->parts, *to = group->parts + group->size;
    uint64_t bytes = 0;
    for (uint32_t r = 0; r < group->size; r++) {
        bytes += r == group->rank ? 0 : sends[r].bytes + recvs[r].bytes;
    }
    int rc = need(e, bytes, msg);
    char *at = e->host;
    for (uint32_t r = 0; rc == 0 && r < group->size; r++) {
        from[r] = to[r] = (struct comm_part){NULL, 0};
        if (r != group->rank) {
            from[r] = (struct comm_part){at, sends[r].bytes};
            to[r] = (struct comm_part){at + sends[r].bytes, recvs[r].bytes};
            at += sends[r].bytes + recvs[r].bytes;
            download(e, from[r].data, sends[r].data, sends[r].bytes);
        }
    }
    rc = rc == 0 ? sync(e, msg) : rc;
    rc = rc == 0 ? comm_group_exchange(group->group, from, to, msg) : rc;
    for (uint32_t r = 0; rc == 0 && r < group->size; r++) {
        upload(e, recvs[r].data, to[r].data, to[r].bytes);
    }
    return rc == 0 ? sync(e, msg) : rc; /* staging is the next call's */
}

static int staged_allgather(struct comm_engine_group *group, void *base, const uint64_t *bounds,
                            struct bl_errmsg *msg)
{
    struct comm_engine *e = group->engine;
    uint64_t lo = bounds[group->rank], hi = bounds[group->rank + 1], end = bounds[group->size];
    int rc = need(e, end, msg);
    if (rc == 0) {
        download(e, e->host + lo, (char *)base + lo, hi - lo);
        rc = sync(e, msg);
    }
    rc = rc == 0 ? comm_group_allgather(group->group, e->host, bounds, msg) : rc;
    if (rc == 0) {
        upload(e, (char *)base + bounds[0], e->host + bounds[0], lo - bounds[0]);
        upload(e, (char *)base + hi, e->host + hi, end - hi);
        rc = sync(e, msg);
    }
    return rc;
}

static int staged_broadcast(struct comm_engine_group *group, uint32_t root, void *data,
                            uint64_t bytes, struct bl_errmsg *msg)
{
    struct comm_engine *e = group->engine;
    int rc = need(e, bytes, msg), is_root = root == group->rank;
    if (rc == 0 && is_root) {
        download(e, e->host, data, bytes);
        rc = sync(e, msg);
    }
    rc = rc == 0 ? comm_group_broadcast(group->group, root, e->host, bytes, msg) : rc;
    if (rc == 0 && !is_root) {
        upload(e, data, e->host, bytes);
        rc = sync(e, msg);
    }
    return rc;
}

/* ---- sums ---- */

static uint64_t type_bytes(uint32_t type)
{
    return type == KERN_BF16 ? 2 : 4;
}

/* Elements of each member's addend that the scratch takes at once. */
static uint64_t piece_elems(const struct comm_engine_group *group, uint32_t type)
{
    return COMM_ENGINE_SCRATCH_BYTES / (group->size * type_bytes(type));
}

/* Adds what lies in staging, `size` arrays of n elements, into `data`. */
static int add_staged(struct comm_engine_group *group, void *data, uint32_t type, uint64_t n,
                      struct bl_errmsg *msg)
{
    struct comm_engine *e = group->engine;
    if (n == 0) {
        return 0;
    }
    upload(e, e->scratch, e->host, group->size * n * type_bytes(type));
    e->kern->ops->sum_parts(e->kern, data, e->scratch, type, group->size, n);
    return sync(e, msg);
}

static int staged_sum(struct comm_engine_group *group, void *data, uint32_t type, uint64_t count,
                      int is_fast, struct bl_errmsg *msg)
{
    struct comm_engine *e = group->engine;
    uint64_t piece = piece_elems(group, type), bytes = type_bytes(type);
    int rc = 0;
    (void)is_fast; /* this order is as fast as any */
    for (uint64_t at = 0; rc == 0 && at < count; at += piece) {
        uint64_t n = count - at < piece ? count - at : piece;
        char *here = (char *)data + at * bytes;
        rc = need(e, group->size * n * bytes, msg);
        for (uint32_t r = 0; r <= group->size; r++) {
            group->bounds[r] = r * n * bytes;
        }
        if (rc == 0) {
            download(e, e->host + group->bounds[group->rank], here, n * bytes);
            rc = sync(e, msg);
        }
        rc = rc == 0 ? comm_group_allgather(group->group, e->host, group->bounds, msg) : rc;
        rc = rc == 0 ? add_staged(group, here, type, n, msg) : rc;
    }
    return rc;
}

/* Elements of member m's slice in a piece that begins `at` behind its first. */
static uint64_t slice_elems(const uint64_t *bounds, uint32_t m, uint64_t at, uint64_t piece)
{
    uint64_t all = bounds[m + 1] - bounds[m];
    return at >= all ? 0 : all - at < piece ? all - at : piece;
}

/* One piece of every member's slice. */
static int scatter_piece(struct comm_engine_group *group, void *data, uint32_t type,
                         const uint64_t *bounds, uint64_t at, struct bl_errmsg *msg)
{
    struct comm_engine *e = group->engine;
    struct comm_part *sends = group->parts, *recvs = group->parts + group->size;
    uint64_t bytes = type_bytes(type), piece = piece_elems(group, type), out = 0;
    uint64_t mine = slice_elems(bounds, group->rank, at, piece) * bytes;
    for (uint32_t r = 0; r < group->size; r++) {
        out += slice_elems(bounds, r, at, piece) * bytes;
    }
    int rc = need(e, group->size * mine + out, msg);
    char *next = e->host + group->size * mine; /* the addends lie first, in the members' order */
    for (uint32_t r = 0; rc == 0 && r < group->size; r++) {
        uint64_t n = slice_elems(bounds, r, at, piece) * bytes;
        char *from = (char *)data + (bounds[r] + at) * bytes;
        recvs[r] = (struct comm_part){e->host + r * mine, mine};
        sends[r] = (struct comm_part){r == group->rank ? recvs[r].data : next, n};
        download(e, sends[r].data, from, n);
        next += r == group->rank ? 0 : n;
    }
    rc = rc == 0 ? sync(e, msg) : rc;
    rc = rc == 0 ? comm_group_exchange(group->group, sends, recvs, msg) : rc;
    char *own = (char *)data + (bounds[group->rank] + at) * bytes;
    return rc == 0 ? add_staged(group, own, type, mine / bytes, msg) : rc;
}

static int staged_reduce_scatter(struct comm_engine_group *group, void *data, uint32_t type,
                                 const uint64_t *bounds, int is_fast, struct bl_errmsg *msg)
{
    uint64_t piece = piece_elems(group, type), most = 0;
    int rc = 0;
    (void)is_fast;
    for (uint32_t r = 0; r < group->size; r++) {
        most = bounds[r + 1] - bounds[r] > most ? bounds[r + 1] - bounds[r] : most;
    }
    for (uint64_t at = 0; rc == 0 && at < most; at += piece) {
        rc = scatter_piece(group, data, type, bounds, at, msg);
    }
    return rc;
}

/* ---- messages ---- */

static int staged_channels_open(struct comm_engine *engine, const struct comm_channel *channels,
                                uint32_t count, struct bl_errmsg *msg)
{
    (void)engine;
    (void)channels; /* the host's messages find their way by tag */
    (void)count;
    (void)msg;
    return 0;
}

static int message_new(struct comm_engine *e, struct staged_message **ret, uint64_t bytes,
                       struct bl_errmsg *msg)
{
    struct staged_message *m = calloc(1, sizeof *m);
    if (m == NULL || (m->staging = malloc(bytes + 1)) == NULL) {
        free(m);
        return bl_err_code(msg, -ENOMEM, "message of %llu bytes", (unsigned long long)bytes);
    }
    m->bytes = bytes;
    m->next = e->messages;
    e->messages = m;
    *ret = m;
    return 0;
}

static int staged_send(struct comm_engine *engine, uint32_t to, uint64_t tag, const void *data,
                       uint64_t bytes, void **ret, struct bl_errmsg *msg)
{
    struct staged_message *m = NULL;
    int rc = message_new(engine, &m, bytes, msg);
    if (rc != 0) {
        return rc;
    }
    *ret = m;
    download(engine, m->staging, data, bytes);
    rc = sync(engine, msg);
    return rc == 0 ? comm_host_send(engine->comm, to, tag, m->staging, bytes, &m->request, msg)
                   : rc;
}

static int staged_recv(struct comm_engine *engine, uint32_t from, uint64_t tag, void *data,
                       uint64_t bytes, void **ret, struct bl_errmsg *msg)
{
    struct staged_message *m = NULL;
    int rc = message_new(engine, &m, bytes, msg);
    if (rc != 0) {
        return rc;
    }
    *ret = m;
    m->to = data;
    return comm_host_recv(engine->comm, from, tag, m->staging, bytes, &m->request, msg);
}

/* After an error the communicator may still use the staging, which goes with the engine. */
static int staged_wait(struct comm_engine *engine, void *token, struct bl_errmsg *msg)
{
    struct staged_message *m = token;
    int rc = comm_wait(engine->comm, m->request, msg);
    if (rc == 0 && m->to != NULL) {
        upload(engine, m->to, m->staging, m->bytes);
        rc = sync(engine, msg);
    }
    if (rc == 0) {
        message_free(engine, m);
    }
    return rc;
}

const struct comm_engine_ops *comm_staged_ops(void)
{
    static const struct comm_engine_ops ops = {
        .name = "staged",
        .version = "through the host's memory",
        .open = staged_open,
        .close = staged_close,
        .abort = staged_abort,
        .check = staged_check,
        .group_open = staged_group_open,
        .group_close = staged_group_close,
        .exchange = staged_exchange,
        .allgather = staged_allgather,
        .broadcast = staged_broadcast,
        .sum = staged_sum,
        .reduce_scatter = staged_reduce_scatter,
        .channels_open = staged_channels_open,
        .send = staged_send,
        .recv = staged_recv,
        .wait = staged_wait,
    };
    return &ops;
}
