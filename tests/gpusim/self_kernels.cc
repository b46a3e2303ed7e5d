/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Kernels for the tests of gpusim itself, good and bad, written as those of kernels/cuda/ are.
 */
#include "tests/gpusim/self_kernels.h"

#include "kernels/cuda/launch.cuh"

static __global__ void scale_kernel(float *x, float factor, uint64_t count)
{
    uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) {
        x[i] *= factor;
    }
}

void self_scale(float *x, float factor, uint64_t count, cudaStream_t stream)
{
    KERN_LAUNCH(scale_kernel, static_cast<uint32_t>((count + 255) / 256), 256, 0, stream, x, factor,
                count);
}

/* One block per row: a tree in each warp, then over the warps. */
template <typename T, int WARPS> static __global__ void rows_kernel(float *sums, const T *x, int c)
{
    __shared__ float parts[WARPS];
    const T *row = x + static_cast<uint64_t>(blockIdx.x) * c;
    float sum = 0;
    for (int i = threadIdx.x; i < c; i += WARPS * KERN_WARP) {
        sum += kern_wide(row[i]);
    }
    sum = kern_warp_sum(sum);
    if (threadIdx.x % KERN_WARP == 0) {
        parts[threadIdx.x / KERN_WARP] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < WARPS; i++) {
            parts[0] += parts[i];
        }
        sums[blockIdx.x] = parts[0];
    }
}

void self_rows(float *sums, const float *x, uint32_t rows, int c, cudaStream_t stream)
{
    KERN_LAUNCH((rows_kernel<float, 4>), rows, 128, 0, stream, sums, x, c);
}

/* Each thread's value moves to its left neighbour, through dynamic shared memory. */
static __global__ void shift_kernel(int *out, int with_barrier, int beyond)
{
    KERN_SHARED_DYNAMIC(memory);
    int *x = reinterpret_cast<int *>(memory);
    int n = blockDim.x, i = threadIdx.x;
    x[i + beyond] = i;
    if (with_barrier) {
        __syncthreads();
    }
    out[blockIdx.x * n + i] = x[(i + 1) % n];
}

void self_shift(int *out, uint32_t blocks, uint32_t threads, int with_barrier, int beyond,
                cudaStream_t stream)
{
    KERN_LAUNCH(shift_kernel, blocks, threads, threads * 4, stream, out, with_barrier, beyond);
}

static __global__ void static_kernel(float *out, int writes)
{
    __shared__ float x[64];
    int i = threadIdx.x;
    if (writes) {
        float *to = x; /* by an index, UBSan would tell before ASan */
        to[i + writes - 1] = 1;
    }
    __syncthreads();
    out[blockIdx.x * 64 + i] = x[i ^ 1];
    __syncthreads();
    x[i] = 3;
}

void self_static(float *out, uint32_t blocks, int writes, cudaStream_t stream)
{
    KERN_LAUNCH(static_kernel, blocks, 64, 0, stream, out, writes);
}

static __global__ void diverge_kernel(int *out, int how)
{
    int i = threadIdx.x;
    switch (how) {
    case 0: /* some leave */
        if (i == 5) {
            return;
        }
        __syncthreads();
        break;
    case 1: /* two barriers */
        if (i < 32) {
            __syncthreads();
        } else {
            __syncthreads();
        }
        break;
    case 2: /* a lane is missing */
        if (i != 7) {
            out[i] = __shfl_xor_sync(KERN_FULL, i, 1);
        }
        break;
    case 3: /* not in the mask */
        out[i] = __shfl_sync(0xffu, i, 0);
        break;
    case 4: /* a warp waits for its lanes, the others for the block */
        if (i == 3) {
            __syncthreads();
        } else {
            __syncwarp();
        }
        break;
    default:
        break;
    }
    out[i] = i;
}

void self_diverge(int *out, int how, cudaStream_t stream)
{
    KERN_LAUNCH(diverge_kernel, 1, 64, 0, stream, out, how);
}

/* Order of arrival: what each thread finds. */
static __global__ void race_kernel(int *out, unsigned int *next)
{
    out[threadIdx.x] = static_cast<int>(atomicAdd(next, 1u));
}

void self_race(int *out, unsigned int *next, uint32_t threads, cudaStream_t stream)
{
    KERN_LAUNCH(race_kernel, 1, threads, 0, stream, out, next);
}

/* Every kind of warp operation, with and without a width. */
static __global__ void warp_kernel(int *out)
{
    int lane = threadIdx.x % 32, all[32];
    int *to = out + threadIdx.x * 8;
    to[0] = __shfl_sync(KERN_FULL, lane * 10, 31);
    to[1] = __shfl_up_sync(KERN_FULL, lane, 1);
    to[2] = __shfl_down_sync(KERN_FULL, lane, 1, 8);
    to[3] = __shfl_xor_sync(KERN_FULL, lane, 5);
    to[4] = static_cast<int>(__ballot_sync(KERN_FULL, lane & 1));
    to[5] = 0;
    if (lane < 16) {
        to[5] = __shfl_sync(0xffffu, lane, 3, 16);
        __syncwarp(0xffffu);
    }
    gpusim_warp_exchange(&lane, sizeof lane, all);
    to[6] = all[(lane + 9) % 32];
    to[7] = __all_sync(KERN_FULL, lane < 32) + 2 * __any_sync(KERN_FULL, lane > 32);
}

void self_warp(int *out, uint32_t threads, cudaStream_t stream)
{
    KERN_LAUNCH(warp_kernel, 1, threads, 0, stream, out);
}

static __global__ void shape_kernel(uint32_t *out)
{
    uint32_t block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    uint32_t thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    out[block * blockDim.x * blockDim.y * blockDim.z + thread] = block * 100 + thread;
}

void self_shape(uint32_t *out, cudaStream_t stream)
{
    KERN_LAUNCH(shape_kernel, dim3(3, 2, 2), dim3(5, 3, 2), 0, stream, out);
}

static __global__ void empty_kernel(int *out)
{
    if (out && threadIdx.x == 0) {
        out[0] = 1;
    }
}

void self_empty(uint32_t blocks, uint32_t threads, uint64_t shared_bytes, cudaStream_t stream)
{
    KERN_LAUNCH(empty_kernel, blocks, threads, shared_bytes, stream, static_cast<int *>(NULL));
}

int self_allow(int bytes)
{
    return cudaFuncSetAttribute(empty_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

uint16_t self_narrow(float x)
{
    return __bfloat16_as_ushort(kern_narrow<kern_bf16>(x));
}

float self_wide(uint16_t bits)
{
    return kern_wide(__ushort_as_bfloat16(bits));
}

void self_op_scale(struct kern *k, float *x, float factor, uint64_t count)
{
    self_scale(x, factor, count, kern_cuda_of(k)->compute);
    kern_cuda_launched(k, "scale");
}

static __global__ void round_kernel(kern_bf16 *out, const float *a, uint64_t count)
{
    uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) {
        out[i] = kern_narrow<kern_bf16>(a[i]);
    }
}

void self_op_round(struct kern *k, kern_real *out, const float *a, uint64_t count)
{
    KERN_LAUNCH(round_kernel, static_cast<uint32_t>((count + 127) / 128), 128, 0,
                kern_cuda_of(k)->compute, reinterpret_cast<kern_bf16 *>(out), a, count);
    kern_cuda_launched(k, "round");
}

/* A sum whose order is that of arrival, as an atomicAdd of floats would make it. */
static __global__ void racy_kernel(float *x, float factor, uint64_t count)
{
    uint64_t i = threadIdx.x;
    if (i > 0 && i < count) {
        x[0] += x[i] * factor;
    }
}

void self_op_racy(struct kern *k, float *x, float factor, uint64_t count)
{
    KERN_LAUNCH(racy_kernel, 1, 512, 0, kern_cuda_of(k)->compute, x, factor, count);
    kern_cuda_launched(k, "racy");
}

void self_op_short(struct kern *k, float *x, float factor, uint64_t count)
{
    self_scale(x, factor, count - 1, kern_cuda_of(k)->compute);
    kern_cuda_launched(k, "short");
}
