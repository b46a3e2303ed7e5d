/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine over NCCL: what moves. Collectives are called on the compute stream. An ordered sum
 * goes by pieces that fit in the scratch: every member gets the others' addends of its slice (one
 * group of sends and receives), adds them in the members' order (one kernel, sum_parts), and hands
 * the sum to all.
 */
#include <errno.h>
#include <stdlib.h>

#include "trainer/comm_nccl.h"

/* The first failure of a group of calls. */
static ncclResult_t worse(ncclResult_t result, ncclResult_t one)
{
    return result == ncclSuccess && one != ncclInProgress ? one : result;
}

/* ---- the frame of a collective ---- */

static int begin(struct comm_engine_group *g, struct bl_errmsg *msg)
{
    int rc = nccl_enter(g->engine, msg);
    if (rc == 0) {
        BL_IGNORE(ncclGroupStart() != ncclSuccess, "the group's end tells");
    }
    return rc;
}

static int end(struct comm_engine_group *g, ncclResult_t result, const char *what,
               struct bl_errmsg *msg)
{
    ncclResult_t last = ncclGroupEnd();
    nccl_leave(g->engine);
    result = result == ncclSuccess ? last : result;
    int rc = nccl_settle(g->engine, g->comm, result, what, msg);
    if (rc == 0) {
        nccl_watch(g->engine);
    }
    return rc;
}

static ncclDataType_t type_of(uint32_t type)
{
    return type == KERN_BF16 ? ncclBfloat16 : ncclFloat32;
}

static uint64_t bytes_of(uint32_t type)
{
    return type == KERN_BF16 ? 2 : 4;
}

/* ---- bytes ---- */

int nccl_exchange(struct comm_engine_group *g, const struct comm_part *sends,
                  const struct comm_part *recvs, struct bl_errmsg *msg)
{
    cudaStream_t stream = g->engine->compute;
    ncclResult_t result = ncclSuccess;
    int rc = begin(g, msg);
    if (rc != 0) {
        return rc;
    }
    for (uint32_t k = 1; k < g->count; k++) {
        uint32_t to = (g->me + k) % g->count, from = (g->me + g->count - k) % g->count;
        if (sends[to].bytes > 0) {
            result = worse(result, ncclSend(sends[to].data, sends[to].bytes, ncclUint8, (int)to,
                                            g->comm, stream));
        }
        if (recvs[from].bytes > 0) {
            result = worse(result, ncclRecv(recvs[from].data, recvs[from].bytes, ncclUint8,
                                            (int)from, g->comm, stream));
        }
    }
    return end(g, result, "an exchange", msg);
}

static int is_even(const uint64_t *bounds, uint32_t count)
{
    for (uint32_t m = 1; m < count; m++) {
        if (bounds[m + 1] - bounds[m] != bounds[1] - bounds[0]) {
            return 0;
        }
    }
    return 1;
}

int nccl_allgather(struct comm_engine_group *g, void *base, const uint64_t *bounds,
                   struct bl_errmsg *msg)
{
    cudaStream_t stream = g->engine->compute;
    ncclResult_t result = ncclSuccess;
    uint8_t *data = base;
    if (bounds[g->count] == bounds[0]) {
        return 0;
    }
    int rc = begin(g, msg);
    if (rc != 0) {
        return rc;
    }
    if (is_even(bounds, g->count)) {
        result = worse(result, ncclAllGather(data + bounds[g->me], data + bounds[0],
                                             bounds[1] - bounds[0], ncclUint8, g->comm, stream));
        return end(g, result, "an all-gather", msg);
    }
    for (uint32_t m = 0; m < g->count; m++) {
        if (bounds[m + 1] > bounds[m]) {
            result = worse(result, ncclBroadcast(data + bounds[m], data + bounds[m],
                                                 bounds[m + 1] - bounds[m], ncclUint8, (int)m,
                                                 g->comm, stream));
        }
    }
    return end(g, result, "an all-gather", msg);
}

int nccl_broadcast(struct comm_engine_group *g, uint32_t root, void *data, uint64_t bytes,
                   struct bl_errmsg *msg)
{
    if (bytes == 0) {
        return 0;
    }
    int rc = begin(g, msg);
    if (rc != 0) {
        return rc;
    }
    ncclResult_t result =
        ncclBroadcast(data, data, bytes, ncclUint8, (int)root, g->comm, g->engine->compute);
    return end(g, worse(ncclSuccess, result), "a broadcast", msg);
}

/* ---- ordered sums ---- */

/* Elements of one slice that all members' addends fit in the scratch of. */
static uint64_t slice_max(const struct comm_engine_group *g, uint32_t type)
{
    return COMM_ENGINE_SCRATCH_BYTES / bytes_of(type) / g->count / NCCL_SUM_ALIGN * NCCL_SUM_ALIGN;
}

/* Every member gets all addends of its slice, lo and hi by member, and adds them in place. */
static int sum_slices(struct comm_engine_group *g, uint8_t *data, uint32_t type, const uint64_t *lo,
                      const uint64_t *hi, struct bl_errmsg *msg)
{
    struct comm_engine *e = g->engine;
    uint64_t size = bytes_of(type), own = hi[g->me] - lo[g->me];
    uint8_t *scratch = e->scratch;
    ncclResult_t result = ncclSuccess;
    int rc = begin(g, msg);
    if (rc != 0) {
        return rc;
    }
    for (uint32_t k = 1; k < g->count; k++) {
        uint32_t to = (g->me + k) % g->count, from = (g->me + g->count - k) % g->count;
        if (hi[to] > lo[to]) {
            result = worse(result, ncclSend(data + lo[to] * size, (hi[to] - lo[to]) * size,
                                            ncclUint8, (int)to, g->comm, e->compute));
        }
        if (own > 0) {
            result = worse(result, ncclRecv(scratch + from * own * size, own * size, ncclUint8,
                                            (int)from, g->comm, e->compute));
        }
    }
    rc = end(g, result, "a sum", msg);
    if (rc == 0 && own > 0) {
        const struct kern_ops *ops = e->kern->ops;
        uint8_t *mine = data + lo[g->me] * size;
        ops->copy(e->kern, scratch + g->me * own * size, mine, own * size);
        ops->sum_parts(e->kern, mine, scratch, type, g->count, own);
    }
    return rc;
}

/* Few elements: all go to all, and every member adds them. */
static int sum_small(struct comm_engine_group *g, void *data, uint32_t type, uint64_t count,
                     struct bl_errmsg *msg)
{
    struct comm_engine *e = g->engine;
    int rc = begin(g, msg);
    if (rc != 0) {
        return rc;
    }
    ncclResult_t result =
        ncclAllGather(data, e->scratch, count * bytes_of(type), ncclUint8, g->comm, e->compute);
    rc = end(g, worse(ncclSuccess, result), "a small sum", msg);
    if (rc == 0) {
        e->kern->ops->sum_parts(e->kern, data, e->scratch, type, g->count, count);
    }
    return rc;
}

/* bounds: count + 1 of its own, then lo and hi of a piece. */
static uint64_t *bounds_new(const struct comm_engine_group *g, struct bl_errmsg *msg)
{
    uint64_t *bounds = calloc(3 * ((size_t)g->count + 1), sizeof *bounds);
    if (bounds == NULL) {
        bl_err_code(msg, -ENOMEM, "NCCL");
    }
    return bounds;
}

static int sum_ordered(struct comm_engine_group *g, uint8_t *data, uint32_t type, uint64_t count,
                       struct bl_errmsg *msg)
{
    uint64_t size = bytes_of(type), piece = slice_max(g, type) * g->count;
    uint64_t *bounds = bounds_new(g, msg);
    if (bounds == NULL) {
        return -ENOMEM;
    }
    uint64_t *bytes = bounds + g->count + 1;
    int rc = 0;
    for (uint64_t at = 0; rc == 0 && at < count; at += piece) {
        uint64_t n = count - at < piece ? count - at : piece;
        uint64_t slice = (n + g->count - 1) / g->count;
        slice = (slice + NCCL_SUM_ALIGN - 1) / NCCL_SUM_ALIGN * NCCL_SUM_ALIGN;
        for (uint32_t m = 0; m <= g->count; m++) {
            bounds[m] = at + (m * slice < n ? m * slice : n);
            bytes[m] = bounds[m] * size;
        }
        rc = sum_slices(g, data, type, bounds, bounds + 1, msg);
        if (rc == 0) {
            rc = nccl_allgather(g, data, bytes, msg);
        }
    }
    free(bounds);
    return rc;
}

/* ---- sums in NCCL's own order ---- */

static int sum_fast(struct comm_engine_group *g, void *data, uint32_t type, uint64_t count,
                    struct bl_errmsg *msg)
{
    int rc = begin(g, msg);
    if (rc != 0) {
        return rc;
    }
    ncclResult_t result =
        ncclAllReduce(data, data, count, type_of(type), ncclSum, g->comm, g->engine->compute);
    return end(g, worse(ncclSuccess, result), "a fast sum", msg);
}

static int scatter_fast(struct comm_engine_group *g, uint8_t *data, uint32_t type,
                        const uint64_t *bounds, struct bl_errmsg *msg)
{
    cudaStream_t stream = g->engine->compute;
    uint64_t size = bytes_of(type);
    ncclResult_t result = ncclSuccess;
    int rc = begin(g, msg);
    if (rc != 0) {
        return rc;
    }
    if (is_even(bounds, g->count)) {
        result = worse(result, ncclReduceScatter(data + bounds[0] * size,
                                                 data + bounds[g->me] * size, bounds[1] - bounds[0],
                                                 type_of(type), ncclSum, g->comm, stream));
        return end(g, result, "a fast reduce-scatter", msg);
    }
    for (uint32_t m = 0; m < g->count; m++) {
        uint8_t *slice = data + bounds[m] * size;
        if (bounds[m + 1] > bounds[m]) {
            result = worse(result, ncclReduce(slice, slice, bounds[m + 1] - bounds[m],
                                              type_of(type), ncclSum, (int)m, g->comm, stream));
        }
    }
    return end(g, result, "a fast reduce-scatter", msg);
}

/* ---- sums ---- */

int nccl_sum(struct comm_engine_group *g, void *data, uint32_t type, uint64_t count, int is_fast,
             struct bl_errmsg *msg)
{
    if (count == 0) {
        return 0;
    }
    if (is_fast) {
        return sum_fast(g, data, type, count, msg);
    }
    return count * bytes_of(type) * g->count <= NCCL_SMALL_BYTES
               ? sum_small(g, data, type, count, msg)
               : sum_ordered(g, data, type, count, msg);
}

int nccl_reduce_scatter(struct comm_engine_group *g, void *data, uint32_t type,
                        const uint64_t *bounds, int is_fast, struct bl_errmsg *msg)
{
    if (bounds[g->count] == bounds[0]) {
        return 0;
    }
    if (is_fast) {
        return scatter_fast(g, data, type, bounds, msg);
    }
    uint64_t most = 0, step = slice_max(g, type);
    uint64_t *lo = bounds_new(g, msg);
    if (lo == NULL) {
        return -ENOMEM;
    }
    uint64_t *hi = lo + g->count + 1;
    int rc = 0;
    for (uint32_t m = 0; m < g->count; m++) {
        most = bounds[m + 1] - bounds[m] > most ? bounds[m + 1] - bounds[m] : most;
    }
    for (uint64_t at = 0; rc == 0 && at < most; at += step) {
        for (uint32_t m = 0; m < g->count; m++) {
            uint64_t n = bounds[m + 1] - bounds[m];
            lo[m] = bounds[m] + (at < n ? at : n);
            hi[m] = bounds[m] + (at + step < n ? at + step : n);
        }
        rc = sum_slices(g, data, type, lo, hi, msg);
    }
    free(lo);
    return rc;
}

/* ---- messages ---- */

static struct nccl_channel *channel_find(struct comm_engine *e, uint32_t from, uint32_t to,
                                         uint64_t tag)
{
    uint32_t kind = comm_channel_kind(tag), i = 0;
    while (i < e->channel_count && (e->channels[i].at.from != from || e->channels[i].at.to != to ||
                                    e->channels[i].at.kind != kind)) {
        i++;
    }
    return i < e->channel_count ? &e->channels[i] : NULL;
}

static int token_take(struct comm_engine *e, struct nccl_token **ret, struct bl_errmsg *msg)
{
    struct nccl_token *t = e->spare;
    if (t != NULL) {
        e->spare = t->next;
        *ret = t;
        return 0;
    }
    t = calloc(1, sizeof *t);
    if (t == NULL) {
        return bl_err_code(msg, -ENOMEM, "NCCL");
    }
    int rc = nccl_cuda(e, cudaEventCreateWithFlags(&t->done, cudaEventDisableTiming),
                       "cudaEventCreate", msg);
    if (rc != 0) {
        free(t);
        return rc;
    }
    *ret = t;
    return 0;
}

/* The message, on the channel's stream, behind what compute was called to do. */
static int enqueue(struct comm_engine *e, struct nccl_channel *c, void *data, uint64_t bytes,
                   int is_send, struct bl_errmsg *msg)
{
    int rc = nccl_cuda(e, cudaEventRecord(c->ready, e->compute), "cudaEventRecord", msg);
    if (rc == 0) {
        rc = nccl_cuda(e, cudaStreamWaitEvent(c->stream, c->ready, 0), "cudaStreamWaitEvent", msg);
    }
    if (rc == 0 && bytes > 0) {
        rc = nccl_enter(e, msg);
        if (rc != 0) {
            return rc;
        }
        ncclResult_t result = is_send ? ncclSend(data, bytes, ncclUint8, 1, c->comm, c->stream)
                                      : ncclRecv(data, bytes, ncclUint8, 0, c->comm, c->stream);
        nccl_leave(e);
        rc = nccl_settle(e, c->comm, result, is_send ? "a send" : "a receive", msg);
    }
    return rc;
}

static int start(struct comm_engine *e, uint32_t from, uint32_t to, uint64_t tag, void *data,
                 uint64_t bytes, void **ret, struct bl_errmsg *msg)
{
    struct nccl_token *t = NULL;
    struct nccl_channel *c = channel_find(e, from, to, tag);
    if (c == NULL) {
        return nccl_fail(e, BL_ECONFIG, msg,
                         "no channel of kind %u from rank %u to rank %u was opened",
                         comm_channel_kind(tag), from, to);
    }
    int rc = token_take(e, &t, msg);
    if (rc != 0) {
        return rc;
    }
    rc = enqueue(e, c, data, bytes, from == comm_rank(e->comm), msg);
    if (rc == 0) {
        rc = nccl_cuda(e, cudaEventRecord(t->done, c->stream), "cudaEventRecord", msg);
    }
    if (rc != 0) {
        t->next = e->spare;
        e->spare = t;
        return rc;
    }
    *ret = t;
    return 0;
}

int nccl_send(struct comm_engine *e, uint32_t to, uint64_t tag, const void *data, uint64_t bytes,
              void **ret, struct bl_errmsg *msg)
{
    return start(e, comm_rank(e->comm), to, tag, (void *)(uintptr_t)data, bytes, ret, msg);
}

int nccl_recv(struct comm_engine *e, uint32_t from, uint64_t tag, void *data, uint64_t bytes,
              void **ret, struct bl_errmsg *msg)
{
    return start(e, from, comm_rank(e->comm), tag, data, bytes, ret, msg);
}

int nccl_wait(struct comm_engine *e, void *token, struct bl_errmsg *msg)
{
    struct nccl_token *t = token;
    int rc = nccl_cuda(e, cudaStreamWaitEvent(e->compute, t->done, 0), "cudaStreamWaitEvent", msg);
    t->next = e->spare; /* the wait has what it needs: the event may be recorded again */
    e->spare = t;
    if (rc == 0) {
        nccl_watch(e);
    }
    return rc;
}
