/* SPDX-License-Identifier: Apache-2.0 */
/* The device that is none as a plug-in. It has no engine: the trainer's own serves. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_device.h"
#include "kernels/cuda/plugin.h"

#define DEVICES 8u

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
    (void)device;
    (void)msg;
    memset(ret, 0, sizeof *ret); /* no address: nobody takes it */
    snprintf(ret->name, sizeof ret->name, "none");
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
