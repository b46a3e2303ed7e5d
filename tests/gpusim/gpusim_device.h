/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside of the stand-in: what its files know of each other.
 *
 *     runtime_device.c   devices, errors, faults on demand
 *     runtime_memory.c   allocations, registered host memory
 *     runtime_stream.c   streams as queues with a thread each, events, copies
 *     gpusim_launch.cc   launches
 *     gpusim_run.cc      blocks and threads; gpusim_fibre.cc, gpusim_shared.cc below it
 */
#ifndef GPUSIM_GPUSIM_DEVICE_H
#define GPUSIM_GPUSIM_DEVICE_H

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#include "gpusim_control.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Fills with 0x7ff5: a NaN in bf16, fp32 and fp64, a large index as a number. */
void gpusim_poison(void *memory, size_t bytes);
/* 1: all of it lies in one allocation of the device. */
int gpusim_memory_is_device(const void *memory, size_t bytes);
/* Around each operation of a stream: see GPUSIM_GUARD. */
void gpusim_memory_enter(void);
void gpusim_memory_leave(void);
/* Bytes behind small allocations that must not change; none under ASan, which sees for itself. */
static inline size_t gpusim_tail_bytes(void)
{
    return GPUSIM_HAS_ASAN ? 0 : 256;
}

/* First line of each call: the error that ended the device, or that there is none. */
cudaError_t gpusim_enter(void);
/* Keeps it for cudaGetLastError, and returns it. */
cudaError_t gpusim_error(cudaError_t error);
/* The device is ended by it: from now on all calls return it. */
void gpusim_error_stick(cudaError_t error);
cudaError_t gpusim_error_stuck_to(void);

/* Counts an occasion; 1: the fault that GPUSIM_FAULT asked for is due. */
enum gpusim_fault {
    GPUSIM_FAULT_MALLOC,
    GPUSIM_FAULT_LAUNCH,
    GPUSIM_FAULT_LATE,
    GPUSIM_FAULT_ECC,
    GPUSIM_FAULT_STUCK,
    GPUSIM_FAULT_COPY,
    GPUSIM_FAULT_COUNT
};
int gpusim_fault_is_due(enum gpusim_fault fault);
/* A moment, of the launch; and waiting for the first gpusim_unstick after it, which may be never.
 * The launch's thread may come to the wait when that has been called already. */
uint64_t gpusim_stuck_since(void);
void gpusim_stuck_wait(uint64_t since);

/* A number from the environment, or `otherwise`; text behind it is a mistake that ends the process.
 */
uint64_t gpusim_env_u64(const char *name, uint64_t otherwise);

struct gpusim_grid;

#ifdef __cplusplus
}

/* All blocks, in the caller's thread. One at a time. */
void gpusim_grid_run(const struct gpusim_grid *grid, uint64_t seed);
#endif

#endif
