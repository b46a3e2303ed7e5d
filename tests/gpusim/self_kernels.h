/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Launches of the kernels in self_kernels.cc; arrays are of the device.
 */
#ifndef GPUSIM_SELF_KERNELS_H
#define GPUSIM_SELF_KERNELS_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "kernels/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

/* x[count] *= factor; no barrier. */
void self_scale(float *x, float factor, uint64_t count, cudaStream_t stream);
/* sums[rows] of x[rows, c]; static shared memory, shuffles, a barrier. */
void self_rows(float *sums, const float *x, uint32_t rows, int c, cudaStream_t stream);
/* out[blocks, threads] = (thread + 1) % threads; without the barrier a race; `beyond` is added to
 * the index that is written. */
void self_shift(int *out, uint32_t blocks, uint32_t threads, int with_barrier, int beyond,
                cudaStream_t stream);
/* out[blocks, 64]: static shared memory, which blocks leave dirty; 1 where
 * `writes` is 1; 2 writes one element further, beyond the end. */
void self_static(float *out, uint32_t blocks, int writes, cudaStream_t stream);
/* One of the mistakes that end the process. */
void self_diverge(int *out, int how, cudaStream_t stream);
/* out[thread]: when it came. */
void self_race(int *out, unsigned int *next, uint32_t threads, cudaStream_t stream);
/* out[threads, 8]. */
void self_warp(int *out, uint32_t threads, cudaStream_t stream);
/* out[12, 30] = 100 block + thread. */
void self_shape(uint32_t *out, cudaStream_t stream);
void self_empty(uint32_t blocks, uint32_t threads, uint64_t shared_bytes, cudaStream_t stream);
/* cudaFuncSetAttribute of that kernel's dynamic shared memory. */
int self_allow(int bytes);
/* Of struct kern_ops, for the harness. */
void self_op_scale(struct kern *k, float *x, float factor, uint64_t count);
void self_op_round(struct kern *k, kern_real *out, const float *a, uint64_t count);
/* Wrong on purpose: the sum of x in the order of arrival; one element is not written. */
void self_op_racy(struct kern *k, float *x, float factor, uint64_t count);
void self_op_short(struct kern *k, float *x, float factor, uint64_t count);
uint16_t self_narrow(float x);
float self_wide(uint16_t bits);

#ifdef __cplusplus
}
#endif

#endif
