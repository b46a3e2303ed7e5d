/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What kernel files are written with: one vocabulary for nvcc and for the CPU stand-in of the
 * tests.
 *
 *     static __global__ void scale_kernel(float *x, float factor, uint64_t count) { ... }
 *     KERN_LAUNCH(scale_kernel, blocks, threads, shared_bytes, stream, x, factor, count);
 *
 * A kernel's name with commas in it (two template arguments) goes in parentheses. Dynamic shared
 * memory is declared by KERN_SHARED_DYNAMIC(name), an array of 16-byte aligned bytes. Sums have one
 * order, fixed by the shape: no atomics on numbers, nothing that depends on sm_count.
 */
#ifndef KERN_KERNELS_CUDA_LAUNCH_CUH
#define KERN_KERNELS_CUDA_LAUNCH_CUH

#ifdef KERN_GPUSIM
#include "gpusim.h"
#else
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#define KERN_UNPAREN(...) __VA_ARGS__
#define KERN_LAUNCH(kernel, blocks, threads, shared_bytes, stream, ...)                            \
    kernel<<<(blocks), (threads), (shared_bytes), (stream)>>>(__VA_ARGS__)
#define KERN_SHARED_DYNAMIC(name) extern __shared__ __align__(16) unsigned char name[]
#endif

#include "kernels/cuda/device.h"

#define KERN_WARP 32
#define KERN_FULL 0xffffffffu
typedef __nv_bfloat16 kern_bf16;

/* Storage to fp32 and back, to the nearest, ties to even. */
static __device__ __forceinline__ float kern_wide(float x)
{
    return x;
}
static __device__ __forceinline__ float kern_wide(kern_bf16 x)
{
    return __bfloat162float(x);
}
template <typename T> static __device__ __forceinline__ T kern_narrow(float x);
template <> __device__ __forceinline__ float kern_narrow<float>(float x)
{
    return x;
}
template <> __device__ __forceinline__ kern_bf16 kern_narrow<kern_bf16>(float x)
{
    return __float2bfloat16_rn(x);
}

/* The sum over a warp's 32 lanes, the same bits in each: lane i with i ^ 16, then ^ 8, 4, 2, 1. */
static __device__ __forceinline__ float kern_warp_sum(float x)
{
    for (int step = KERN_WARP / 2; step > 0; step /= 2) {
        x += __shfl_xor_sync(KERN_FULL, x, step);
    }
    return x;
}
static __device__ __forceinline__ float kern_warp_max(float x)
{
    for (int step = KERN_WARP / 2; step > 0; step /= 2) {
        x = fmaxf(x, __shfl_xor_sync(KERN_FULL, x, step));
    }
    return x;
}

#endif
