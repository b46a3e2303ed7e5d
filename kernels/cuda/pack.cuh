/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How elementwise and row-wise kernels walk through memory: in packs of 16 bytes of the storage
 * type, or element by element where a pointer or a row's length does not allow it.
 *
 * The walk changes who computes an element, never the order of a sum: sums are defined on packs
 * (element i is in pack i / W), whether a pack is loaded at once or piece by piece.
 */
#ifndef KERN_KERNELS_CUDA_PACK_CUH
#define KERN_KERNELS_CUDA_PACK_CUH

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ops.h"

#define KERN_THREADS    256 /* of a block */
#define KERN_WARPS      (KERN_THREADS / KERN_WARP)
#define KERN_BLOCKS_MAX 0x40000000u /* of a launch; behind them threads take more than one item */

template <typename T> struct kern_width {
    enum { W = 16 / sizeof(T) };
};

/* ---- N elements as fp32: at once when N is above 1, from an address of 16 bytes ---- */

template <int N> static __device__ __forceinline__ void kern_load(float (&to)[N], const float *from)
{
    if constexpr (N == 1) {
        to[0] = from[0];
    } else {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            float4 four = *reinterpret_cast<const float4 *>(from + i);
            to[i] = four.x;
            to[i + 1] = four.y;
            to[i + 2] = four.z;
            to[i + 3] = four.w;
        }
    }
}

static __device__ __forceinline__ void kern_unpack(float *to, unsigned two)
{
    to[0] = __uint_as_float(two << 16);
    to[1] = __uint_as_float(two & 0xffff0000u);
}

template <int N>
static __device__ __forceinline__ void kern_load(float (&to)[N], const kern_bf16 *from)
{
    if constexpr (N == 1) {
        to[0] = kern_wide(from[0]);
    } else {
#pragma unroll
        for (int i = 0; i < N; i += 8) {
            uint4 eight = *reinterpret_cast<const uint4 *>(from + i);
            kern_unpack(to + i, eight.x);
            kern_unpack(to + i + 2, eight.y);
            kern_unpack(to + i + 4, eight.z);
            kern_unpack(to + i + 6, eight.w);
        }
    }
}

template <int N> static __device__ __forceinline__ void kern_store(float *to, const float (&x)[N])
{
    if constexpr (N == 1) {
        to[0] = x[0];
    } else {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            *reinterpret_cast<float4 *>(to + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
        }
    }
}

static __device__ __forceinline__ unsigned kern_pair(float low, float high)
{
    __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
    unsigned bits;
    memcpy(&bits, &two, sizeof bits);
    return bits;
}

template <int N>
static __device__ __forceinline__ void kern_store(kern_bf16 *to, const float (&x)[N])
{
    if constexpr (N == 1) {
        to[0] = kern_narrow<kern_bf16>(x[0]);
    } else {
#pragma unroll
        for (int i = 0; i < N; i += 8) {
            uint4 eight;
            eight.x = kern_pair(x[i], x[i + 1]);
            eight.y = kern_pair(x[i + 2], x[i + 3]);
            eight.z = kern_pair(x[i + 4], x[i + 5]);
            eight.w = kern_pair(x[i + 6], x[i + 7]);
            *reinterpret_cast<uint4 *>(to + i) = eight;
        }
    }
}

/* Elements [at, at + N) of a row of `count`; those behind it are `fill`. `whole`: rows begin at
 * addresses of 16 bytes. */
template <int N, typename T>
static __device__ __forceinline__ void kern_load_row(float (&to)[N], const T *row, uint32_t at,
                                                     uint32_t count, int whole, float fill)
{
    if (whole && count - at >= N) {
        kern_load(to, row + at);
        return;
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        to[i] = (uint32_t)i < count - at ? kern_wide(row[at + i]) : fill;
    }
}

template <int N, typename T>
static __device__ __forceinline__ void kern_store_row(T *row, const float (&x)[N], uint32_t at,
                                                      uint32_t count, int whole)
{
    if (whole && count - at >= N) {
        kern_store(row + at, x);
        return;
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        if ((uint32_t)i < count - at) {
            row[at + i] = kern_narrow<T>(x[i]);
        }
    }
}

/* ---- elementwise: op.run<N>(at) does elements [at, at + N) ---- */

template <typename Op>
static __global__ void __launch_bounds__(KERN_THREADS)
    kern_map_kernel(Op op, uint64_t packs, uint64_t count)
{
    uint64_t first = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    uint64_t stride = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t i = first; i < packs; i += stride) {
        op.template run<Op::W>(i * Op::W);
    }
    for (uint64_t i = packs * Op::W + first; i < count; i += stride) {
        op.template run<1>(i);
    }
}

static inline int kern_is_whole(const void *p)
{
    return (uintptr_t)p % 16 == 0;
}

/* `whole`: all arrays begin at addresses of 16 bytes. */
template <typename Op>
static void kern_map(struct kern *k, const char *name, Op op, uint64_t count, int whole)
{
    if (count == 0) {
        return;
    }
    uint64_t packs = whole ? count / Op::W : 0;
    uint64_t items = packs > count - packs * Op::W ? packs : count - packs * Op::W;
    uint64_t blocks = (items + KERN_THREADS - 1) / KERN_THREADS;
    /* As many as fill the device some times over: elements do not depend on each other. */
    uint64_t most = (uint64_t)kern_cuda_of(k)->sm_count * 32 + 1;
    KERN_LAUNCH((kern_map_kernel<Op>), (unsigned)(blocks < most ? blocks : most), KERN_THREADS, 0,
                kern_cuda_of(k)->compute, op, packs, count);
    kern_cuda_launched(k, name);
}

/* ---- row-wise: a warp takes a row; op.row(row, lane) does it ---- */

template <typename Op>
static __global__ void __launch_bounds__(KERN_THREADS) kern_rows_kernel(Op op, uint64_t n)
{
    uint64_t stride = (uint64_t)gridDim.x * KERN_WARPS;
    for (uint64_t row = (uint64_t)blockIdx.x * KERN_WARPS + threadIdx.x / KERN_WARP; row < n;
         row += stride) {
        op.row(row, threadIdx.x % KERN_WARP);
    }
}

template <typename Op> static void kern_rows(struct kern *k, const char *name, Op op, uint64_t n)
{
    if (n == 0) {
        return;
    }
    uint64_t blocks = (n - 1) / KERN_WARPS + 1;
    KERN_LAUNCH((kern_rows_kernel<Op>),
                (unsigned)(blocks < KERN_BLOCKS_MAX ? blocks : KERN_BLOCKS_MAX), KERN_THREADS, 0,
                kern_cuda_of(k)->compute, op, n);
    kern_cuda_launched(k, name);
}

/* 1: rows of c elements that begin at p all begin at addresses of 16 bytes. */
template <typename T> static int kern_is_whole_rows(const T *p, uint32_t c)
{
    return kern_is_whole(p) && c % kern_width<T>::W == 0;
}

/* Calls function<T>(...) for the storage type of k. */
#define KERN_BY_TYPE(k, function, ...)                                                             \
    do {                                                                                           \
        if ((k)->type == KERN_BF16) {                                                              \
            function<kern_bf16>(__VA_ARGS__);                                                      \
        } else {                                                                                   \
            function<float>(__VA_ARGS__);                                                          \
        }                                                                                          \
    } while (0)

#endif
