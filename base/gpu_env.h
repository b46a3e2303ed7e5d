/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The environment of ranks that compute on GPUs: what is set and what is taken away, by one table,
 * which the daemon applies to the ranks that it starts, a trainer to itself, and `belay doctor`
 * reports. Nothing here is for ranks on the CPU.
 */
#ifndef BL_BASE_GPU_ENV_H
#define BL_BASE_GPU_ENV_H

#include <stdint.h>

/* X(name, value; NULL: taken away, why). A name that ends in '*' stands for all that begin so. */
/* clang-format off */
#define BL_GPU_ENV(X)                                                                              \
    X("NCCL_COMM_BLOCKING", NULL,                                                                  \
      "it overrides nonblocking communicators: a hung peer could not be aborted any more")         \
    X("NCCL_HOSTID", NULL, "it makes NCCL take ranks of one machine for ranks of several")         \
    X("NCCL_ASYNC_ERROR_HANDLING", NULL, "PyTorch's, kept off: communicators are watched here")    \
    X("NVIDIA_TF32_OVERRIDE", NULL, "it changes the precision of matrix products, so all bits")    \
    X("CUBLAS*", NULL, "settings of cuBLAS change its choice of kernels, so bits")                 \
    X("CUDA_LAUNCH_BLOCKING", NULL, "each launch would wait for the GPU")                          \
    X("NCCL_RAS_ENABLE", "0", "no threads and ports of NCCL's own monitor")                        \
    X("NCCL_NVLS_ENABLE", "0", "multicast memory does not survive an abort in the process")        \
    X("CUDA_DEVICE_MAX_CONNECTIONS", "32",                                                         \
      "streams that share a queue of the GPU wait for one another's kernels, a channel's too")     \
    X("NCCL_SOCKET_RETRY_CNT", "12",                                                               \
      "gives up on a peer sooner than by default (a minute); how soon was not measured")
/* clang-format on */

/* Several ranks on one GPU, for tests only: without these NCCL refuses two ranks on one device, or
 * they wait for each other's kernels for ever. The rank's own NCCL_HOSTID comes beside them. */
/* clang-format off */
#define BL_GPU_ENV_SHARED(X)                                                                       \
    X("NCCL_NET", "Socket", "")                                                                    \
    X("NCCL_IB_DISABLE", "1", "")                                                                  \
    X("NCCL_SOCKET_IFNAME", "lo", "")                                                              \
    X("NCCL_ALGO", "Ring", "")                                                                     \
    X("NCCL_PROTO", "Simple", "")                                                                  \
    X("NCCL_MAX_CTAS", "1", "")
/* clang-format on */

struct bl_gpu_env {
    const char *name;
    const char *value; /* NULL: taken away */
    const char *why;
};

/* Row `index` of the table, those for a shared GPU too if is_shared; NULL behind its end. */
const struct bl_gpu_env *bl_gpu_env_at(uint32_t index, int is_shared);

/* The row that is about the variable in `text` ("NAME" or "NAME=VALUE"); NULL: none. */
const struct bl_gpu_env *bl_gpu_env_find(const char *text, int is_shared);

#endif
