/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a plug-in with a back end exports. The trainer loads it by name, so this header is the
 * whole border: plain C, no symbol of either side in the other.
 *
 *     const struct kern_plugin *belay_cuda_kernels(void);
 *     const struct comm_engine_ops *belay_cuda_comm(void);     (trainer/comm_engine.h)
 *
 * All calls from one thread.
 */
#ifndef KERN_KERNELS_CUDA_PLUGIN_H
#define KERN_KERNELS_CUDA_PLUGIN_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "kernels/backend.h"

/* Changes with kern_ops, comm_engine_ops or this: plug-in and trainer are built together. */
#define KERN_PLUGIN_ABI         2u
#define KERN_PLUGIN_KERNELS     "belay_cuda_kernels"
#define KERN_PLUGIN_COMM        "belay_cuda_comm"
#define KERN_PLUGIN_DEVICES_MAX 64u

/* What tells a device from others, without a context on it. */
struct kern_plugin_device {
    char name[128];        /* "NVIDIA H100 80GB HBM3" */
    char bus_id[32];       /* "0000:1b:00.0": the same for one device in every process */
    uint32_t major, minor; /* compute capability */
    uint32_t sm_count;
    uint32_t driver_version, runtime_version; /* CUDA's numbers: 13000 is 13.0 */
    uint64_t memory_bytes;                    /* in all */
};

struct kern_plugin {
    uint32_t abi;          /* KERN_PLUGIN_ABI */
    uint32_t needs_driver; /* 1: libcuda.so.1 must load before this plug-in does anything */
    const char *name;      /* "cuda" */
    const char *built;     /* "CUDA 13.0, sm_80 sm_90 compute_90" */
    /* Devices of this process that can be used, 0 too. BL_EDEVICE when the driver does not answer
     * or is too old, with its version and the one that is needed. Initialises the driver: not
     * before a fork. */
    int (*count)(uint32_t *ret, struct bl_errmsg *msg);
    /* One line on a device: name, capability, memory, bus. */
    int (*describe)(uint32_t device, char *text, size_t bytes_max, struct bl_errmsg *msg);
    int (*identify)(struct kern_plugin_device *ret, uint32_t device, struct bl_errmsg *msg);
    /* Takes the device and `arena_bytes` of its memory, out of which alloc gives and never more
     * (0: alloc asks the device every time). *ret is owned (ops->close). BL_ECONFIG for a device of
     * another architecture than the binary has, or with less memory free, with the sum, and for an
     * environment that would change the arithmetic; BL_EDEVICE for one that fails. */
    int (*open)(struct kern **ret, int device, enum kern_type type, uint64_t arena_bytes,
                struct bl_errmsg *msg);
    /* What `open` takes beside the arena: the workspace of products and kernels' own scratch; the
     * context's memory is not in it. */
    uint64_t (*overhead_bytes)(enum kern_type type);
    /* Memory of k's device now. */
    int (*memory)(struct kern *k, uint64_t *ret_free, uint64_t *ret_total, struct bl_errmsg *msg);
    /* `check` is called about every millisecond while a sync or publish_wait waits; what it returns
     * ends the wait when it is not 0. After that k serves close alone, which then leaves the memory
     * to the end of the process. NULL: none. */
    void (*on_wait)(struct kern *k, int (*check)(void *arg, struct bl_errmsg *msg), void *arg);
    /* A line of matmul_plan's table of algorithms, in the order of planning; -ENOENT behind the
     * last. */
    int (*matmul_line)(struct kern *k, uint32_t index, char *text, size_t bytes_max);
};

#endif
