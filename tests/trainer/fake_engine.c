/* SPDX-License-Identifier: Apache-2.0 */
/* An engine for the device that is none, over the host's own connections; and both as a plug-in. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_device.h"
#include "trainer/comm_host.h"

#define DEVICES 8u

struct comm_engine {
    struct kern *kern;
    struct comm *comm;
    _Atomic int aborted;
};

struct comm_engine_group {
    struct comm_engine *engine;
    struct comm_group *group; /* of the host */
};

struct message { /* through memory of the host: the device's is there within calls only */
    struct comm_request *request;
    void *staging, *to; /* `to` NULL: a send */
    uint64_t bytes;
};

static int fake_open(struct comm_engine **ret, struct kern *kern, struct comm *comm,
                     uint32_t deadline_ms, struct bl_errmsg *msg)
{
    struct comm_engine *e = calloc(1, sizeof *e);
    (void)deadline_ms;
    BL_ASSERT(e != NULL);
    e->kern = kern;
    e->comm = comm;
    int rc = comm_barrier(comm, msg);
    if (rc != 0) {
        free(e);
        return rc;
    }
    *ret = e;
    return 0;
}

static void fake_close(struct comm_engine *engine)
{
    free(engine);
}

static void fake_abort(struct comm_engine *engine)
{
    engine->aborted = 1;
}

static int fake_check(struct comm_engine *engine, struct bl_errmsg *msg)
{
    return engine->aborted ? bl_err_code(msg, BL_EABORTED, "engine") : 0;
}

/* ---- groups ---- */

static int fake_group_open(struct comm_engine *engine, const uint32_t *ranks, uint32_t count,
                           struct comm_engine_group **ret, struct bl_errmsg *msg)
{
    struct comm_engine_group *g = calloc(1, sizeof *g);
    BL_ASSERT(g != NULL);
    g->engine = engine;
    int rc = comm_group_new(&g->group, engine->comm, ranks, count, msg);
    if (rc != 0) {
        free(g);
        return rc;
    }
    *ret = g;
    return 0;
}

static void fake_group_close(struct comm_engine_group *group)
{
    comm_group_free(group->group);
    free(group);
}

#define MAPPED(call)                                                                               \
    fake_device_map(group->engine->kern);                                                          \
    int rc = call;                                                                                 \
    fake_device_unmap(group->engine->kern);                                                        \
    return rc

static int fake_exchange(struct comm_engine_group *group, const struct comm_part *sends,
                         const struct comm_part *recvs, struct bl_errmsg *msg)
{
    MAPPED(comm_group_exchange(group->group, sends, recvs, msg));
}

static int fake_allgather(struct comm_engine_group *group, void *base, const uint64_t *bounds,
                          struct bl_errmsg *msg)
{
    MAPPED(comm_group_allgather(group->group, base, bounds, msg));
}

static int fake_broadcast(struct comm_engine_group *group, uint32_t root, void *data,
                          uint64_t bytes, struct bl_errmsg *msg)
{
    MAPPED(comm_group_broadcast(group->group, root, data, bytes, msg));
}

static int fake_sum(struct comm_engine_group *group, void *data, uint32_t type, uint64_t count,
                    int is_fast, struct bl_errmsg *msg)
{
    (void)is_fast;
    BL_ASSERT(type == KERN_F32);
    MAPPED(comm_group_sum_f32(group->group, data, count, msg));
}

static int fake_reduce_scatter(struct comm_engine_group *group, void *data, uint32_t type,
                               const uint64_t *bounds, int is_fast, struct bl_errmsg *msg)
{
    (void)is_fast;
    BL_ASSERT(type == KERN_F32);
    MAPPED(comm_group_reduce_scatter_f32(group->group, data, bounds, msg));
}

/* ---- messages ---- */

static int fake_channels_open(struct comm_engine *engine, const struct comm_channel *channels,
                              uint32_t count, struct bl_errmsg *msg)
{
    (void)engine;
    (void)channels;
    (void)count;
    (void)msg;
    return 0;
}

static struct message *message_new(uint64_t bytes)
{
    struct message *m = calloc(1, sizeof *m);
    BL_ASSERT(m != NULL);
    m->staging = malloc(bytes + 1);
    m->bytes = bytes;
    BL_ASSERT(m->staging != NULL);
    return m;
}

static int fake_send(struct comm_engine *engine, uint32_t to, uint64_t tag, const void *data,
                     uint64_t bytes, void **ret, struct bl_errmsg *msg)
{
    struct message *m = message_new(bytes);
    fake_device_map(engine->kern);
    memcpy(m->staging, data, bytes);
    fake_device_unmap(engine->kern);
    *ret = m;
    return comm_host_send(engine->comm, to, tag, m->staging, bytes, &m->request, msg);
}

static int fake_recv(struct comm_engine *engine, uint32_t from, uint64_t tag, void *data,
                     uint64_t bytes, void **ret, struct bl_errmsg *msg)
{
    struct message *m = message_new(bytes);
    m->to = data;
    *ret = m;
    return comm_host_recv(engine->comm, from, tag, m->staging, bytes, &m->request, msg);
}

static int fake_wait(struct comm_engine *engine, void *token, struct bl_errmsg *msg)
{
    struct message *m = token;
    int rc = comm_wait(engine->comm, m->request, msg);
    if (rc == 0 && m->to != NULL) {
        fake_device_map(engine->kern);
        memcpy(m->to, m->staging, m->bytes);
        fake_device_unmap(engine->kern);
    }
    if (rc == 0) { /* else the communicator may still use it */
        free(m->staging);
        free(m);
    }
    return rc;
}

static const struct comm_engine_ops engine_ops = {
    .name = "fake",
    .version = "1",
    .open = fake_open,
    .close = fake_close,
    .abort = fake_abort,
    .check = fake_check,
    .group_open = fake_group_open,
    .group_close = fake_group_close,
    .exchange = fake_exchange,
    .allgather = fake_allgather,
    .broadcast = fake_broadcast,
    .sum = fake_sum,
    .reduce_scatter = fake_reduce_scatter,
    .channels_open = fake_channels_open,
    .send = fake_send,
    .recv = fake_recv,
    .wait = fake_wait,
};

/* ---- the plug-in ---- */

static int plugin_count(uint32_t *ret, struct bl_errmsg *msg)
{
    (void)msg;
    *ret = DEVICES;
    return 0;
}

static int plugin_describe(uint32_t device, char *text, size_t bytes_max, struct bl_errmsg *msg)
{
    (void)msg;
    snprintf(text, bytes_max, "the CPU behind the rules of a device (%u)", device);
    return 0;
}

static int plugin_identify(struct kern_plugin_device *ret, uint32_t device, struct bl_errmsg *msg)
{
    (void)msg;
    memset(ret, 0, sizeof *ret);
    snprintf(ret->name, sizeof ret->name, "none");
    snprintf(ret->bus_id, sizeof ret->bus_id, "0000:%02x:00.0", device);
    ret->memory_bytes = 1ull << 30;
    return 0;
}

static int plugin_open(struct kern **ret, int device, enum kern_type type, uint64_t arena_bytes,
                       struct bl_errmsg *msg)
{
    (void)device;
    if (type != KERN_F32) {
        return bl_err(msg, BL_ECONFIG, "this device has fp32 only (train.precision fp32)");
    }
    return fake_device_open(ret, arena_bytes, msg);
}

static uint64_t plugin_overhead_bytes(enum kern_type type)
{
    (void)type;
    return 0;
}

static int plugin_memory(struct kern *k, uint64_t *ret_free, uint64_t *ret_total,
                         struct bl_errmsg *msg)
{
    (void)msg;
    *ret_total = 1ull << 30;
    *ret_free = *ret_total - fake_device_used(k);
    return 0;
}

static void plugin_on_wait(struct kern *k, int (*check)(void *arg, struct bl_errmsg *msg),
                           void *arg)
{
    (void)k;
    (void)check;
    (void)arg;
}

static int plugin_matmul_line(struct kern *k, uint32_t index, char *text, size_t bytes_max)
{
    (void)k;
    (void)index;
    (void)text;
    (void)bytes_max;
    return -2; /* ENOENT */
}

__attribute__((visibility("default"))) const struct kern_plugin *belay_cuda_kernels(void);
__attribute__((visibility("default"))) const struct comm_engine_ops *belay_cuda_comm(void);

const struct kern_plugin *belay_cuda_kernels(void)
{
    static const struct kern_plugin plugin = {.abi = KERN_PLUGIN_ABI,
                                              .name = "fake",
                                              .built = "for tests",
                                              .count = plugin_count,
                                              .describe = plugin_describe,
                                              .identify = plugin_identify,
                                              .open = plugin_open,
                                              .overhead_bytes = plugin_overhead_bytes,
                                              .memory = plugin_memory,
                                              .on_wait = plugin_on_wait,
                                              .matmul_line = plugin_matmul_line};
    return &plugin;
}

const struct comm_engine_ops *belay_cuda_comm(void)
{
    return &engine_ops;
}
