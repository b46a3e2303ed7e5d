/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside of the CUDA back end: one GPU, its streams, and how its kernels are written.
 *
 *     device.c     the device, memory, streams, copies, errors         (C, CUDA's runtime)
 *     matmul.c     matrix products by cuBLASLt                         (C)
 *     tokens.c     tokens, and the order in which the embedding's gradient adds them  (C)
 *     table.c      struct kern_ops, filled with kern_cuda_* below      (C)
 *     *.cu         kernels, one operation a file, forward and backward side by side, with the
 *                  function of the table that launches them
 *
 * Kernel files compile three ways: by nvcc, and as C++ for the CPU in the tests (KERN_GPUSIM),
 * where a fibre plays each thread. So they use what launch.cuh names, and launch by KERN_LAUNCH.
 */
#ifndef KERN_KERNELS_CUDA_DEVICE_H
#define KERN_KERNELS_CUDA_DEVICE_H

#include <cuda_runtime_api.h>

#include "kernels/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

struct kern_cuda_matmul;  /* matmul.c: handle, workspace, table of algorithms */
struct kern_cuda_staging; /* tokens.c: host memory that uploads read from */

struct kern_cuda {
    struct kern base;
    int ordinal;          /* of the device, among those visible */
    uint32_t sm_count;    /* of the device; launches may depend on it, sums may not */
    cudaStream_t compute; /* all operations */
    cudaStream_t out;     /* publish */
    cudaEvent_t made;     /* compute's work that `out` waits for */
    cudaEvent_t copied;   /* the newest publish */
    cudaError_t failed;   /* the first error since the last sync; cudaSuccess: none */
    char failed_in[64];   /* the operation that met it */
    struct kern_cuda_matmul *matmul;
    struct kern_cuda_staging *staging; /* NULL until tokens_set needs it */
};

static inline struct kern_cuda *kern_cuda_of(struct kern *k)
{
    return (struct kern_cuda *)k;
}

/* Keeps the first error; `what` names the operation. */
void kern_cuda_note(struct kern *k, cudaError_t error, const char *what);
/* Ends `staging`, when nothing runs any more; NULL inside is fine. */
void kern_cuda_staging_close(struct kern_cuda *cuda);
/* Behind a launch. */
static inline void kern_cuda_launched(struct kern *k, const char *what)
{
    kern_cuda_note(k, cudaGetLastError(), what);
}

#ifdef __cplusplus
}
#endif

#endif
