/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention on tensor cores: what its three kernels share. Inputs bf16, sums fp32; p and ds are
 * rounded to bf16 before they are multiplied.
 *
 * A warp has 16 rows (queries; keys in the pass for dK and dV) and goes over tiles of N columns:
 *
 *     flash_scores    s[16,N] = rows[16,D] tile[N,D]^T          both read by ldmatrix
 *     (the kernel)    s becomes p or ds, in the lanes' own elements
 *     flash_product   sum[16,C] += s[16,N] tile[N,C]            s from registers, tile transposed
 *
 * Element (row, column) of a warp's matrix of 16 rows lies in lane 4 (row % 8) + column % 8 / 2, in
 * x[column / 8][2 (row / 8) + column % 2]: see mma.cuh.
 *
 * Rows in shared memory are D + 8 elements apart: 16 bytes more than a multiple of 64, so the eight
 * rows of an ldmatrix tile are in different banks.
 *
 * Order of memory, which the CPU stand-in cannot show. Tiles come in by cp.async into two buffers:
 *
 *     start:  issue tile 0 -> buffer 0, commit
 *     step i: issue tile i + 1 -> buffer (i + 1) % 2, commit (maybe nothing issued)
 *             kern_copy_wait<1>      this thread's copies of tile i have landed: at most the newest
 *                                    group, that of tile i + 1, is under way
 *             __syncthreads          so have those of the other threads: all may read buffer i % 2
 *             compute on buffer i % 2
 *             __syncthreads          all have read it: step i + 1 may issue tile i + 2 into it
 *
 * What a thread writes to shared memory by plain stores is read by its own warp only, behind a
 * __syncwarp.
 */
#ifndef KERN_KERNELS_CUDA_ATTENTION_FLASH_CUH
#define KERN_KERNELS_CUDA_ATTENTION_FLASH_CUH

#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/mma.cuh"

#define FLASH_ROWS 16U /* of a warp */
/* Blocks that an SM shall have room for: says how many registers a thread may use. */
#define FLASH_BLOCKS(d) ((d) <= 64 ? 3 : 2)

template <int D> struct flash_row {
    static constexpr int STEP = D + 8; /* elements from one row in shared memory to the next */
};

/* Issues copies of rows [first, first + ROWS) of one head, zeros behind `limit`. `x`: row 0;
 * `stride`: elements from a row to the next. */
template <int D, int ROWS, int THREADS>
static __device__ __forceinline__ void flash_load(kern_bf16 *tile, const kern_bf16 *x,
                                                  uint32_t first, uint32_t limit, size_t stride)
{
    constexpr int CHUNKS = ROWS * (D / 8);
    static_assert(CHUNKS % THREADS == 0 || CHUNKS < THREADS || D % 64 != 0, "even work");
#pragma unroll
    for (int at = 0; at < CHUNKS; at += THREADS) {
        int i = at + (int)threadIdx.x;
        if (CHUNKS % THREADS != 0 && i >= CHUNKS) {
            break;
        }
        uint32_t row = (uint32_t)i / (D / 8), column = (uint32_t)i % (D / 8) * 8;
        int there = first + row < limit;
        kern_copy_async(tile + row * flash_row<D>::STEP + column,
                        x + (there ? first + row : 0) * stride + column, there);
    }
}

/* The a of mma out of 16 rows: columns [column, column + 16). */
template <int D>
static __device__ __forceinline__ void flash_rows16(uint32_t a[4], const kern_bf16 *rows,
                                                    uint32_t lane, int column)
{
    kern_ldmatrix(a, rows + lane % 16 * flash_row<D>::STEP + lane / 16 * 8 + column);
}

/* s = rows tile^T: 16 by N over D. */
template <int D, int N>
static __device__ __forceinline__ void flash_scores(float s[N / 8][4], const kern_bf16 *rows,
                                                    const kern_bf16 *tile, uint32_t lane)
{
    /* Tiles 0, 1 are b[0], b[1] of columns 0 to 7, tiles 2, 3 of 8 to 15. */
    const kern_bf16 *from =
        tile + (lane % 8 + lane / 16 * 8) * flash_row<D>::STEP + lane / 8 % 2 * 8;
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
        s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
    }
#pragma unroll
    for (int d = 0; d < D; d += 16) {
        uint32_t a[4], b[4];
        flash_rows16<D>(a, rows, lane, d);
#pragma unroll
        for (int n = 0; n < N; n += 16) {
            kern_ldmatrix(b, from + n * flash_row<D>::STEP + d);
            kern_mma(s[n / 8], a, b[0], b[1]);
            kern_mma(s[n / 8 + 1], a, b[2], b[3]);
        }
    }
}

/* sum += p tile, tile's columns [first, first + C): 16 by C over N. */
template <int D, int C, int N>
static __device__ __forceinline__ void flash_product(float sum[C / 8][4], const float p[N / 8][4],
                                                     const kern_bf16 *tile, uint32_t first,
                                                     uint32_t lane)
{
    const kern_bf16 *from = tile + lane % 16 * flash_row<D>::STEP + lane / 16 * 8 + first;
#pragma unroll
    for (int n = 0; n < N; n += 16) {
        const float *low = p[n / 8], *high = p[n / 8 + 1];
        uint32_t b[4], a[4] = {kern_pack_bf16(low[0], low[1]), kern_pack_bf16(low[2], low[3]),
                               kern_pack_bf16(high[0], high[1]), kern_pack_bf16(high[2], high[3])};
#pragma unroll
        for (int column = 0; column < C; column += 16) {
            kern_ldmatrix_trans(b, from + n * flash_row<D>::STEP + column);
            kern_mma(sum[column / 8], a, b[0], b[1]);
            kern_mma(sum[column / 8 + 1], a, b[2], b[3]);
        }
    }
}

template <int C> static __device__ __forceinline__ void flash_clear(float sum[C / 8][4])
{
#pragma unroll
    for (int i = 0; i < C / 8; i++) {
        sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = 0.0f;
    }
}

/* sum, rows of it times low (rows 0 to 7) and high, through the warp's own 16 rows of shared memory
 * to out's rows that are below `limit`. `out`: of row `first`, column 0 of C. */
template <int D, int C>
static __device__ __forceinline__ void
flash_store(kern_bf16 *out, const float sum[C / 8][4], float low, float high, kern_bf16 *rows,
            uint32_t first, uint32_t limit, size_t stride, uint32_t lane)
{
    uint32_t g = lane / 4, t = lane % 4;
    __syncwarp(); /* the lanes have read what was there */
#pragma unroll
    for (int i = 0; i < C / 8; i++) {
        uint32_t *to = (uint32_t *)(rows + g * flash_row<D>::STEP + 8 * i + 2 * t);
        to[0] = kern_pack_bf16(sum[i][0] * low, sum[i][1] * low);
        to[8 * flash_row<D>::STEP / 2] = kern_pack_bf16(sum[i][2] * high, sum[i][3] * high);
    }
    __syncwarp();
    for (uint32_t i = lane; i < FLASH_ROWS * (C / 8); i += KERN_WARP) {
        uint32_t row = i / (C / 8), column = i % (C / 8) * 8;
        if (first + row < limit) {
            *(uint4 *)(out + row * stride + column) =
                *(const uint4 *)(rows + row * flash_row<D>::STEP + column);
        }
    }
}

#endif
