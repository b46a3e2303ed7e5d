/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cuda/plugin.h"

#include <stdio.h>

#include "base/human.h"
#include "kernels/cuda/device.h"

static int plugin_describe(uint32_t device, char *text, size_t bytes_max, struct bl_errmsg *msg)
{
    struct kern_plugin_device d;
    char memory[BL_HUMAN_MAX];
    int rc = kern_cuda_identify(&d, device, msg);
    if (rc == 0) {
        snprintf(text, bytes_max, "%s (compute capability %u.%u, %u SMs, %s, at %s)", d.name,
                 d.major, d.minor, d.sm_count, bl_human_bytes(memory, d.memory_bytes), d.bus_id);
    }
    return rc;
}

static uint64_t plugin_overhead(enum kern_type type)
{
    (void)type;
    return KERN_CUDA_WORKSPACE;
}

static int plugin_memory(struct kern *k, uint64_t *ret_free, uint64_t *ret_total,
                         struct bl_errmsg *msg)
{
    size_t free_bytes, total_bytes;
    cudaError_t error = cudaMemGetInfo(&free_bytes, &total_bytes);
    if (error != cudaSuccess) {
        return kern_cuda_error(kern_cuda_of(k), error, "memory", msg);
    }
    *ret_free = free_bytes;
    *ret_total = total_bytes;
    return 0;
}

static void plugin_on_wait(struct kern *k, int (*check)(void *arg, struct bl_errmsg *msg),
                           void *arg)
{
    kern_cuda_of(k)->check = check;
    kern_cuda_of(k)->check_arg = arg;
}

static int plugin_matmul_line(struct kern *k, uint32_t index, char *text, size_t bytes_max)
{
    return kern_cuda_matmul_line(kern_cuda_of(k), index, text, bytes_max);
}

__attribute__((visibility("default"))) const struct kern_plugin *belay_cuda_kernels(void);

const struct kern_plugin *belay_cuda_kernels(void)
{
    static struct kern_plugin plugin = {
        .abi = KERN_PLUGIN_ABI,
#ifdef KERN_GPUSIM
        .needs_driver = 0,
#else
        .needs_driver = 1,
#endif
        .name = "cuda",
        .count = kern_cuda_count,
        .describe = plugin_describe,
        .identify = kern_cuda_identify,
        .open = kern_cuda_open,
        .overhead_bytes = plugin_overhead,
        .memory = plugin_memory,
        .on_wait = plugin_on_wait,
        .matmul_line = plugin_matmul_line,
    };
    plugin.built = kern_cuda_built();
    return &plugin;
}
