/* SPDX-License-Identifier: Apache-2.0 */
/* A plug-in whose answers the environment gives: what the trainer makes of them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/plugin.h"

static uint32_t number(const char *name, uint32_t fallback)
{
    const char *text = getenv(name);
    return text == NULL ? fallback : (uint32_t)strtoul(text, NULL, 10);
}

static int plugin_count(uint32_t *ret, struct bl_errmsg *msg)
{
    if (getenv("FAKE_PLUGIN_OLD") != NULL) {
        return bl_err(msg, BL_EDEVICE, "the driver has CUDA 11.4, 13.0 is needed");
    }
    *ret = number("FAKE_PLUGIN_DEVICES", 1);
    return 0;
}

static int plugin_describe(uint32_t device, char *text, size_t bytes_max, struct bl_errmsg *msg)
{
    (void)msg;
    snprintf(text, bytes_max, "device of nothing %u", device);
    return 0;
}

/* Addresses of this test alone. */
static int plugin_identify(struct kern_plugin_device *ret, uint32_t device, struct bl_errmsg *msg)
{
    const char *bus = getenv("FAKE_PLUGIN_BUS");
    (void)msg;
    memset(ret, 0, sizeof *ret);
    if (bus != NULL) {
        snprintf(ret->bus_id, sizeof ret->bus_id, "%.20s:%u", bus, device);
    }
    return 0;
}

static int plugin_open(struct kern **ret, int device, enum kern_type type, uint64_t arena_bytes,
                       struct bl_errmsg *msg)
{
    (void)ret;
    (void)type;
    return bl_err(msg, BL_ECONFIG, "device %d has no %llu bytes", device,
                  (unsigned long long)arena_bytes);
}

__attribute__((visibility("default"))) const struct kern_plugin *belay_cuda_kernels(void);

const struct kern_plugin *belay_cuda_kernels(void)
{
    static struct kern_plugin plugin = {.name = "cuda",
                                        .count = plugin_count,
                                        .describe = plugin_describe,
                                        .identify = plugin_identify,
                                        .open = plugin_open};
    plugin.abi = number("FAKE_PLUGIN_ABI", KERN_PLUGIN_ABI);
    plugin.needs_driver = number("FAKE_PLUGIN_DRIVER", 0);
    return &plugin;
}
