/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Cross-entropy over rows of logits[N,V]: loss = log(sum exp(x - top)) - (x[target] - top); the
 * gradient softmax - onehot replaces the logits, rounded once. A block takes a row:
 *
 *     whole     top and sum in one reading (a thread's sum is scaled when its top grows), then the
 *               gradient in a second, which mostly finds the row in the cache; no probabilities are
 *               stored
 *     top, sum, finish   the phases of ranks that have columns [lo, lo + columns); the logits stay
 *               as they are until finish
 *
 * A thread adds its packs in fp32, in the order of the row; threads add in fp64 as block_sum says.
 * expf is the device's (2 ulp), log its fp64 one.
 */
#include "kernels/cuda/pack.cuh"
#include "kernels/cuda/tokens.h"

#include <float.h>

namespace
{

enum { ROW_THREADS = 512, ROW_WARPS = ROW_THREADS / KERN_WARP };

/* Largest and sum over the block, the same in each thread: lanes as kern_warp_sum, then the warps'
 * results in order. `shared` is free again behind the next __syncthreads of the caller. */
__device__ __forceinline__ float block_max(float x, float *shared)
{
    x = kern_warp_max(x);
    if (threadIdx.x % KERN_WARP == 0) {
        shared[threadIdx.x / KERN_WARP] = x;
    }
    __syncthreads();
    x = shared[0];
    for (int w = 1; w < ROW_WARPS; w++) {
        x = fmaxf(x, shared[w]);
    }
    return x;
}

__device__ __forceinline__ double block_sum(double x, double *shared)
{
    for (int step = KERN_WARP / 2; step > 0; step /= 2) {
        x += __shfl_xor_sync(KERN_FULL, x, step);
    }
    if (threadIdx.x % KERN_WARP == 0) {
        shared[threadIdx.x / KERN_WARP] = x;
    }
    __syncthreads();
    x = shared[0];
    for (int w = 1; w < ROW_WARPS; w++) {
        x += shared[w];
    }
    return x;
}

template <typename T> struct rows {
    enum { W = kern_width<T>::W };
    T *logits;
    const int32_t *targets;
    uint32_t lo, columns;
    int backward, whole;

    /* The place of a target in the row's slice, or -1. */
    __device__ __forceinline__ int64_t place_of(uint64_t n) const
    {
        int64_t at = (int64_t)targets[n] - lo;
        return targets[n] >= 0 && at >= 0 && at < columns ? at : -1;
    }

    /* Elements behind the row are -infinity, whose exponential is 0. */
    __device__ __forceinline__ void load(float (&v)[W], const T *x, uint64_t at) const
    {
        kern_load_row(v, x, (uint32_t)at, columns, whole, -INFINITY);
    }

    /* Starts at the lowest number rather than at -infinity: no infinity is taken from another. */
    __device__ __forceinline__ void top_and_sum(const T *x, float *ret_top, float *ret_sum) const
    {
        float top = -FLT_MAX, sum = 0.0f;
        for (uint64_t at = threadIdx.x * W; at < columns; at += ROW_THREADS * W) {
            float v[W];
            load(v, x, at);
            float here = v[0];
#pragma unroll
            for (int i = 1; i < W; i++) {
                here = fmaxf(here, v[i]);
            }
            if (here > top) {
                sum *= expf(top - here);
                top = here;
            }
#pragma unroll
            for (int i = 0; i < W; i++) {
                sum += expf(v[i] - top);
            }
        }
        *ret_top = top;
        *ret_sum = sum;
    }

    __device__ __forceinline__ float top_of(const T *x) const
    {
        float top = -INFINITY;
        for (uint64_t at = threadIdx.x * W; at < columns; at += ROW_THREADS * W) {
            float v[W];
            load(v, x, at);
#pragma unroll
            for (int i = 0; i < W; i++) {
                top = fmaxf(top, v[i]);
            }
        }
        return top;
    }

    __device__ __forceinline__ float sum_of(const T *x, float top) const
    {
        float sum = 0.0f;
        for (uint64_t at = threadIdx.x * W; at < columns; at += ROW_THREADS * W) {
            float v[W];
            load(v, x, at);
#pragma unroll
            for (int i = 0; i < W; i++) {
                sum += expf(v[i] - top);
            }
        }
        return sum;
    }

    __device__ __forceinline__ void gradient(T *x, float top, double sum, int64_t target) const
    {
        float inverse = (float)(1.0 / sum);
        for (uint64_t at = threadIdx.x * W; at < columns; at += ROW_THREADS * W) {
            float v[W];
            load(v, x, at);
#pragma unroll
            for (int i = 0; i < W; i++) {
                v[i] = expf(v[i] - top) * inverse;
                if ((int64_t)at + i == target) {
                    v[i] -= 1.0f;
                }
            }
            kern_store_row(x, v, (uint32_t)at, columns, whole);
        }
    }

    /* A row whose target does not count. */
    __device__ __forceinline__ void ignore(T *x, double *loss) const
    {
        if (threadIdx.x == 0) {
            *loss = 0.0;
        }
        for (uint64_t at = threadIdx.x * W; backward && at < columns; at += ROW_THREADS * W) {
            float zeros[W] = {};
            kern_store_row(x, zeros, (uint32_t)at, columns, whole);
        }
    }
};

template <typename T>
__global__ void __launch_bounds__(ROW_THREADS)
    whole_kernel(struct rows<T> rows, double *losses, uint32_t n)
{
    __shared__ float tops[ROW_WARPS];
    __shared__ double sums[ROW_WARPS];
    for (uint64_t row = blockIdx.x; row < n; row += gridDim.x) {
        T *x = rows.logits + row * rows.columns;
        if (rows.targets[row] < 0) {
            rows.ignore(x, losses + row);
            continue;
        }
        int64_t target = rows.place_of(row);
        float at_target = target < 0 ? 0.0f : kern_wide(x[target]);
        float mine, sum;
        rows.top_and_sum(x, &mine, &sum);
        float top = block_max(mine, tops);
        double all = block_sum((double)(sum * expf(mine - top)), sums);
        if (threadIdx.x == 0) {
            losses[row] = log(all) - (target < 0 ? 0.0 : (double)(at_target - top));
        }
        if (rows.backward) {
            rows.gradient(x, top, all, target);
        }
        __syncthreads();
    }
}

template <typename T>
__global__ void __launch_bounds__(ROW_THREADS)
    top_kernel(struct rows<T> rows, float *ret_tops, uint32_t n)
{
    __shared__ float tops[ROW_WARPS];
    for (uint64_t row = blockIdx.x; row < n; row += gridDim.x) {
        float top = 0.0f;
        if (rows.targets[row] >= 0) {
            top = block_max(rows.top_of(rows.logits + row * rows.columns), tops);
        }
        if (threadIdx.x == 0) {
            ret_tops[row] = top;
        }
        __syncthreads();
    }
}

template <typename T>
__global__ void __launch_bounds__(ROW_THREADS)
    sum_kernel(struct rows<T> rows, double *ret_sums, const float *tops, uint32_t n)
{
    __shared__ double sums[ROW_WARPS];
    for (uint64_t row = blockIdx.x; row < n; row += gridDim.x) {
        const T *x = rows.logits + row * rows.columns;
        double all = 0.0, of_target = 0.0;
        if (rows.targets[row] >= 0) {
            int64_t target = rows.place_of(row);
            of_target = target < 0 ? 0.0 : (double)(kern_wide(x[target]) - tops[row]);
            all = block_sum((double)rows.sum_of(x, tops[row]), sums);
        }
        if (threadIdx.x == 0) {
            ret_sums[2 * row] = all;
            ret_sums[2 * row + 1] = of_target;
        }
        __syncthreads();
    }
}

template <typename T>
__global__ void __launch_bounds__(ROW_THREADS)
    finish_kernel(struct rows<T> rows, double *losses, const float *tops, const double *sums,
                  uint32_t n)
{
    for (uint64_t row = blockIdx.x; row < n; row += gridDim.x) {
        T *x = rows.logits + row * rows.columns;
        if (rows.targets[row] < 0) {
            rows.ignore(x, losses + row);
            continue;
        }
        if (threadIdx.x == 0) {
            losses[row] = log(sums[2 * row]) - sums[2 * row + 1];
        }
        if (rows.backward) {
            rows.gradient(x, tops[row], sums[2 * row], rows.place_of(row));
        }
    }
}

template <typename T>
struct rows<T> rows_of(const kern_real *logits, const struct kern_tokens *t, uint32_t first,
                       uint32_t lo, uint32_t columns, int backward) {
    struct rows<T> rows = {
        (T *)logits, (const int32_t *)t->memory + first, lo, columns, backward, 0
    };
    rows.whole = kern_is_whole_rows(rows.logits, columns);
    return rows;
}

unsigned
blocks_of(uint32_t n)
{
    return n < KERN_BLOCKS_MAX ? n : KERN_BLOCKS_MAX;
}

template <typename T>
void whole(struct kern *k, kern_real *logits, double *losses, const struct kern_tokens *t,
           uint32_t first, uint32_t n, uint32_t vocab, int backward)
{
    KERN_LAUNCH((whole_kernel<T>), blocks_of(n), ROW_THREADS, 0, kern_cuda_of(k)->compute,
                rows_of<T>(logits, t, first, 0, vocab, backward), losses, n);
    kern_cuda_launched(k, "cross_entropy");
}

template <typename T>
void top(struct kern *k, float *tops, const kern_real *logits, const struct kern_tokens *t,
         uint32_t first, uint32_t n, uint32_t columns)
{
    KERN_LAUNCH((top_kernel<T>), blocks_of(n), ROW_THREADS, 0, kern_cuda_of(k)->compute,
                rows_of<T>(logits, t, first, 0, columns, 0), tops, n);
    kern_cuda_launched(k, "cross_entropy_top");
}

template <typename T>
void sum(struct kern *k, double *sums, const kern_real *logits, const float *tops,
         const struct kern_tokens *t, uint32_t first, uint32_t n, uint32_t lo, uint32_t columns)
{
    KERN_LAUNCH((sum_kernel<T>), blocks_of(n), ROW_THREADS, 0, kern_cuda_of(k)->compute,
                rows_of<T>(logits, t, first, lo, columns, 0), sums, tops, n);
    kern_cuda_launched(k, "cross_entropy_sum");
}

template <typename T>
void finish(struct kern *k, kern_real *logits, double *losses, const float *tops,
            const double *sums, const struct kern_tokens *t, uint32_t first, uint32_t n,
            uint32_t lo, uint32_t columns, int backward)
{
    KERN_LAUNCH((finish_kernel<T>), blocks_of(n), ROW_THREADS, 0, kern_cuda_of(k)->compute,
                rows_of<T>(logits, t, first, lo, columns, backward), losses, tops, sums, n);
    kern_cuda_launched(k, "cross_entropy_finish");
}

} // namespace

extern "C" void kern_cuda_cross_entropy(struct kern *k, kern_real *logits, double *losses,
                                        const struct kern_tokens *t, uint32_t first, uint32_t n,
                                        uint32_t vocab, int backward)
{
    if (n > 0) {
        KERN_BY_TYPE(k, whole, k, logits, losses, t, first, n, vocab, backward);
    }
}

extern "C" void kern_cuda_cross_entropy_top(struct kern *k, float *tops, const kern_real *logits,
                                            const struct kern_tokens *t, uint32_t first, uint32_t n,
                                            uint32_t columns)
{
    if (n > 0) {
        KERN_BY_TYPE(k, top, k, tops, logits, t, first, n, columns);
    }
}

extern "C" void kern_cuda_cross_entropy_sum(struct kern *k, double *sums, kern_real *logits,
                                            const float *tops, const struct kern_tokens *t,
                                            uint32_t first, uint32_t n, uint32_t lo,
                                            uint32_t columns, int backward)
{
    (void)backward;
    if (n > 0) {
        KERN_BY_TYPE(k, sum, k, sums, logits, tops, t, first, n, lo, columns);
    }
}

extern "C" void kern_cuda_cross_entropy_finish(struct kern *k, kern_real *logits, double *losses,
                                               const float *tops, const double *sums,
                                               const struct kern_tokens *t, uint32_t first,
                                               uint32_t n, uint32_t lo, uint32_t columns,
                                               int backward)
{
    if (n > 0) {
        KERN_BY_TYPE(k, finish, k, logits, losses, tops, sums, t, first, n, lo, columns, backward);
    }
}
