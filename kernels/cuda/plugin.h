/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a plug-in with a back end exports. The trainer loads it by name, so this header is the
 * whole border: plain C, no symbol of either side in the other.
 *
 *     const struct kern_plugin *belay_cuda_kernels(void);
 *     const struct comm_engine_ops *belay_cuda_comm(void);     (trainer/comm_engine.h)
 */
#ifndef KERN_KERNELS_CUDA_PLUGIN_H
#define KERN_KERNELS_CUDA_PLUGIN_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "kernels/backend.h"

/* Changes with kern_ops, comm_engine_ops or this: plug-in and trainer are built together. */
#define KERN_PLUGIN_ABI         1u
#define KERN_PLUGIN_KERNELS     "belay_cuda_kernels"
#define KERN_PLUGIN_COMM        "belay_cuda_comm"
#define KERN_PLUGIN_DEVICES_MAX 64u

struct kern_plugin {
    uint32_t abi;          /* KERN_PLUGIN_ABI */
    uint32_t needs_driver; /* 1: libcuda.so.1 must load before this plug-in does anything */
    const char *name;      /* "cuda" */
    /* Devices of this process that can be used, 0 too. BL_EDEVICE when the driver does not answer
     * or is too old, with its version and the one that is needed. Initialises the driver: not
     * before a fork. */
    int (*count)(uint32_t *ret, struct bl_errmsg *msg);
    /* One line on a device: name, capability, memory free of all, who holds the rest. */
    int (*describe)(uint32_t device, char *text, size_t bytes_max, struct bl_errmsg *msg);
    /* Takes the device and `arena_bytes` of its memory, out of which alloc gives. *ret is owned
     * (ops->close). BL_ECONFIG for a device of another architecture than the binary has, or with
     * less memory free, with the sum; BL_EDEVICE for one that fails. */
    int (*open)(struct kern **ret, int device, enum kern_type type, uint64_t arena_bytes,
                struct bl_errmsg *msg);
};

#endif
