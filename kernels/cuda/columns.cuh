/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sums over the rows of arrays [N,C], column by column, in two passes without atomics:
 *
 *     rows of a chunk (CHUNK) --> scratch[chunks][sums][C] --> out[C]
 *
 * In a block of the first pass, warp w adds rows w, w + 8, ... of its chunk, 32 packs of columns
 * wide; then the eight warps' sums are added in order. In the second, warp w adds chunks w, w + 8,
 * ... of 32 columns, and the eight sums again in order. So the order is a function of N alone.
 */
#ifndef KERN_KERNELS_CUDA_COLUMNS_CUH
#define KERN_KERNELS_CUDA_COLUMNS_CUH

#include "kernels/cuda/pack.cuh"

#define KERN_CHUNK 64u /* rows */

static __host__ __device__ __forceinline__ uint32_t kern_chunks(uint32_t n)
{
    return n / KERN_CHUNK + (n % KERN_CHUNK != 0);
}

/* Op has W, SUMS, and row(sums[SUMS][W], row, at): adds what row `row` has for columns [at, at +
 * W); of columns from c on anything. */
template <typename Op>
static __global__ void __launch_bounds__(KERN_THREADS)
    kern_columns_kernel(Op op, float *scratch, uint32_t n, uint32_t c, uint32_t tiles)
{
    enum { W = Op::W, SUMS = Op::SUMS };
    __shared__ float others[KERN_WARPS][SUMS][W][KERN_WARP];
    uint32_t lane = threadIdx.x % KERN_WARP, warp = threadIdx.x / KERN_WARP;
    uint32_t chunk = blockIdx.x / tiles;
    uint64_t at = ((uint64_t)(blockIdx.x % tiles) * KERN_WARP + lane) * W;
    uint64_t first = (uint64_t)chunk * KERN_CHUNK;
    uint64_t end = first + KERN_CHUNK < n ? first + KERN_CHUNK : n;
    float sums[SUMS][W] = {};
    if (at < c) {
#pragma unroll 4
        for (uint64_t row = first + warp; row < end; row += KERN_WARPS) {
            op.row(sums, row, (uint32_t)at);
        }
    }
#pragma unroll
    for (int s = 0; s < SUMS; s++) {
#pragma unroll
        for (int i = 0; i < W; i++) {
            others[warp][s][i][lane] = sums[s][i];
        }
    }
    __syncthreads();
    /* Column `column` of the tile was summed by lane column / W. */
    uint32_t base = blockIdx.x % tiles * (KERN_WARP * W);
    for (uint32_t j = threadIdx.x; j < SUMS * W * KERN_WARP; j += KERN_THREADS) {
        uint32_t s = j / (W * KERN_WARP), column = j % (W * KERN_WARP);
        if (base + (uint64_t)column < c) {
            float sum = 0.0f;
#pragma unroll
            for (uint32_t w = 0; w < KERN_WARPS; w++) {
                sum += others[w][s][column % W][column / W];
            }
            scratch[((uint64_t)chunk * SUMS + s) * c + base + column] = sum;
        }
    }
}

/* Adds sum `which` of `sums` over chunks. */
static __global__ void __launch_bounds__(KERN_THREADS)
    kern_columns_end_kernel(float *out, const float *scratch, uint32_t chunks, uint32_t c,
                            uint32_t sums, uint32_t which, int add)
{
    __shared__ float others[KERN_WARPS][KERN_WARP];
    uint32_t lane = threadIdx.x % KERN_WARP, warp = threadIdx.x / KERN_WARP;
    uint64_t column = (uint64_t)blockIdx.x * KERN_WARP + lane;
    float sum = 0.0f;
    if (column < c) {
#pragma unroll 8
        for (uint64_t chunk = warp; chunk < chunks; chunk += KERN_WARPS) {
            sum += scratch[(chunk * sums + which) * c + column];
        }
    }
    others[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && column < c) {
        for (int w = 1; w < KERN_WARPS; w++) {
            sum += others[w][lane];
        }
        out[column] = add ? out[column] + sum : sum;
    }
}

/* outs[SUMS]; one that is NULL is left out. scratch: kern_chunks(n) * SUMS * c floats. */
template <typename Op>
static void kern_columns(struct kern *k, const char *name, Op op, float *const *outs, void *scratch,
                         uint32_t n, uint32_t c, int add)
{
    const uint32_t columns = KERN_WARP * Op::W; /* of a tile */
    uint32_t chunks = kern_chunks(n), tiles = c / columns + (c % columns != 0);
    if (c == 0) {
        return;
    }
    if (chunks > 0) {
        KERN_LAUNCH((kern_columns_kernel<Op>), chunks * tiles, KERN_THREADS, 0,
                    kern_cuda_of(k)->compute, op, (float *)scratch, n, c, tiles);
        kern_cuda_launched(k, name);
    }
    for (uint32_t i = 0; i < Op::SUMS; i++) {
        if (outs[i] != NULL) {
            KERN_LAUNCH(kern_columns_end_kernel, (c - 1) / KERN_WARP + 1, KERN_THREADS, 0,
                        kern_cuda_of(k)->compute, outs[i], (const float *)scratch, chunks, c,
                        (uint32_t)Op::SUMS, i, add);
            kern_cuda_launched(k, name);
        }
    }
}

#endif
