/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What tests and other stand-ins ask of the simulated device (C).
 *
 * Environment, read when the first call comes:
 *
 *     CUDA_VISIBLE_DEVICES   as on a real machine: which of the devices, "" for none
 *     GPUSIM_DEVICES         how many there are (8)
 *     GPUSIM_MEMORY_MIB      memory of each (81920)
 *     GPUSIM_STREAMS         async: a thread for each stream; sync: within the call (async)
 *     GPUSIM_GUARD           1: the host may not touch device memory (0), see runtime_memory.c
 *     GPUSIM_MEMORY_HELD_MIB of it taken by others (0)
 *     GPUSIM_DRIVER          version of the driver (13000); GPUSIM_CAPABILITY: of the device (90)
 *     GPUSIM_SEED            order of threads, see gpusim_run.h (0)
 *     GPUSIM_FAULT           as gpusim_fault_set
 */
#ifndef GPUSIM_GPUSIM_CONTROL_H
#define GPUSIM_GPUSIM_CONTROL_H

#include <cuda_runtime_api.h>
#include <stdint.h>

/* 1: built with ASan, which sees what the bytes around allocations are for otherwise. */
#if defined(__SANITIZE_ADDRESS__)
#define GPUSIM_HAS_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define GPUSIM_HAS_ASAN 1
#endif
#endif
#ifndef GPUSIM_HAS_ASAN
#define GPUSIM_HAS_ASAN 0
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The order of threads of launches from now on, as GPUSIM_SEED. */
void gpusim_seed(uint64_t seed);

/*
 * Faults to come, replacing those before: "NAME@N,..." where the N-th occasion from now on (1 is
 * the next) is hit, or NULL or "" for none:
 *
 *     malloc   cudaMalloc finds no memory
 *     launch   a launch is refused (cudaErrorLaunchOutOfResources)
 *     late     a launch goes wrong as it runs: cudaErrorIllegalAddress from then on for ever
 *     ecc      the same, cudaErrorECCUncorrectable
 *     stuck    a launch never ends, until gpusim_unstick
 *     copy     a copy goes wrong as it runs: cudaErrorIllegalAddress for ever
 *
 * A text that is not of this form ends the process.
 */
void gpusim_fault_set(const char *text);
void gpusim_unstick(void);
/* As after the start of a process: no sticky error (a real device has no such call). */
void gpusim_revive(void);

/* Queues run(arg) behind what the stream has to do. It is called by the stream's thread and may
 * take its time; `drop` (may be NULL) frees arg behind it, also where an error kept it from
 * running. Another stand-in's kernels are made of it. */
cudaError_t gpusim_stream_submit(cudaStream_t stream, void (*run)(void *arg),
                                 void (*drop)(void *arg), void *arg);

/* Launches so far, of all streams. */
uint64_t gpusim_launch_count(void);

#ifdef __cplusplus
}
#endif

#endif
