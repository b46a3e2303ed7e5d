/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside of the CUDA back end: one GPU, its streams, and how its kernels are written.
 *
 *     device.c       which devices there are, opening one, closing it   (C, CUDA's runtime)
 *     stream_copy.c  errors, sync, memory, copies                       (C, CUDA's runtime)
 *     arena.c        who has which part of the memory                   (C)
 *     matmul.c       matrix products by cuBLASLt                        (C)
 *     tokens.c       tokens, and the order in which the embedding's gradient adds them  (C)
 *     probe.c        every operation on known input, digested           (C)
 *     table.c        struct kern_ops, filled with kern_cuda_* of ops.h  (C)
 *     plugin.c       what the trainer sees of it                        (C)
 *     *.cu           kernels, one operation a file, forward and backward side by side, with the
 *                    function of the table that launches them
 *
 * Kernel files compile three ways: by nvcc, and as C++ for the CPU in the tests (KERN_GPUSIM),
 * where a fibre plays each thread. So they use what launch.cuh names, and launch by KERN_LAUNCH.
 * nvcc compiles with -ftz=true, since the CPU's kernels too take subnormal numbers for zero, and
 * with -fmad=false: a multiply-add is fused where it is written (fmaf, mma) and nowhere else.
 *
 *     compute   kernels, products, copies in and out -----------+-------------> sync
 *     out                                             made (wait) \--> copies --> copied
 */
#ifndef KERN_KERNELS_CUDA_DEVICE_H
#define KERN_KERNELS_CUDA_DEVICE_H

#include <cuda_runtime_api.h>

#include "kernels/backend.h"
#include "kernels/cuda/arena.h"

#ifdef __cplusplus
extern "C" {
#endif

struct kern_cuda_matmul;  /* matmul.c: handle, workspace, table of algorithms */
struct kern_cuda_staging; /* tokens.c: host memory that uploads read from */

/* Raised by every change of a kernel that changes bits. */
#define KERN_CUDA_VERSION 1

#define KERN_CUDA_LANDING_BYTES 65536U
#define KERN_CUDA_LANDING_MAX   64U

/* A small download on its way: its bytes lie in `landing` until the sync. */
struct kern_cuda_landing {
    void *host;
    uint32_t at, bytes;
};

struct kern_cuda {
    struct kern base;
    int ordinal;         /* of the device, among those visible */
    uint32_t sm_count;   /* of the device; launches may depend on it, sums may not */
    uint32_t capability; /* 90: 9.0 */
    uint32_t driver_version;
    cudaStream_t compute; /* all operations */
    cudaStream_t out;     /* publish */
    cudaEvent_t made;     /* compute's work that `out` waits for */
    cudaEvent_t copied;   /* the newest publish */
    cudaError_t failed;   /* the first error since the last sync; cudaSuccess: none */
    char failed_in[64];   /* the operation that met it */
    const char *newest;   /* the operation launched last, for an error that comes later */
    struct kern_cuda_matmul *matmul;
    struct kern_cuda_staging *staging; /* NULL until tokens_set needs it */
    void *memory;                      /* the arena's; NULL: alloc asks the device */
    struct kern_arena arena;
    cudaError_t out_failed;                         /* of publish, until publish_wait */
    int is_lost;                                    /* a wait was given up: only close is left */
    int (*check)(void *arg, struct bl_errmsg *msg); /* asked while waiting; NULL: none */
    void *check_arg;
    /* Downloads that fit go through page-locked memory: into any other the runtime waits in the
     * call itself, where nothing can end it. */
    char *landing; /* owned */
    struct kern_cuda_landing landings[KERN_CUDA_LANDING_MAX];
    uint32_t landing_used, landing_count;
    char device_name[64];
    /* Of the algorithms of all products that the run's ranks do: those that the probe was given. A
     * rank's own are fewer, where tensor parallel slices differ. 0 before the probe. */
    uint64_t algorithms;
    char build_name[256];
};

static inline struct kern_cuda *kern_cuda_of(struct kern *k)
{
    return (struct kern_cuda *)k;
}

/* Keeps the first error; `what` names the operation. */
void kern_cuda_note(struct kern *k, cudaError_t error, const char *what);
/* Ends `staging`, when nothing runs any more; NULL inside is fine. */
void kern_cuda_staging_close(struct kern_cuda *cuda);
/* Behind a launch; `what` is a string that stays. */
static inline void kern_cuda_launched(struct kern *k, const char *what)
{
    kern_cuda_of(k)->newest = what;
    kern_cuda_note(k, cudaGetLastError(), what);
}
/* One of ours: text and code of an error of the runtime, "device 0 (NVIDIA H100): adamw: ...". */
int kern_cuda_error(const struct kern_cuda *cuda, cudaError_t error, const char *what,
                    struct bl_errmsg *msg);
/* Waits for all of both streams; without text. Not when a wait was given up. */
void kern_cuda_drain(struct kern_cuda *cuda);

/* ---- device.c, for plugin.c ---- */

struct kern_plugin_device;

int kern_cuda_count(uint32_t *ret, struct bl_errmsg *msg);
int kern_cuda_identify(struct kern_plugin_device *ret, uint32_t device, struct bl_errmsg *msg);
int kern_cuda_open(struct kern **ret, int device, enum kern_type type, uint64_t arena_bytes,
                   struct bl_errmsg *msg);
/* "CUDA 13.0, sm_80 sm_90 compute_90". View, constant. */
const char *kern_cuda_built(void);

/* ---- table.c ---- */

extern const struct kern_ops kern_cuda_ops;

/* ---- matmul.c, for device.c and plugin.c ---- */

#define KERN_CUDA_WORKSPACE (32ULL << 20) /* of products; what cuBLAS itself takes on Hopper */

/* Handle and workspace. Sets cuda->matmul. */
int kern_cuda_matmul_open(struct kern_cuda *cuda, struct bl_errmsg *msg);
void kern_cuda_matmul_close(struct kern_cuda *cuda); /* NULL inside is fine */
/* Lines that are planned behind a mark can be taken out again. */
uint32_t kern_cuda_matmul_mark(const struct kern_cuda *cuda);
void kern_cuda_matmul_forget(struct kern_cuda *cuda, uint32_t mark);
/* Over the lines of these shapes; what was not planned counts for nothing. */
uint64_t kern_cuda_matmul_digest(struct kern_cuda *cuda, const struct kern_matmul_shape *shapes,
                                 uint32_t count);
/* Of cuBLASLt as it is loaded. */
uint64_t kern_cuda_matmul_version(void);
/* Line `index` of the table; -ENOENT behind the last. */
int kern_cuda_matmul_line(struct kern_cuda *cuda, uint32_t index, char *text, size_t bytes_max);

#ifdef __cplusplus
}
#endif

#endif
