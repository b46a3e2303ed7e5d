/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tensor cores, as one warp sees them: the instructions of sm_80 and later that the matrix kernels
 * are written with, each a function that all 32 lanes call together.
 *
 *     kern_ldmatrix        four 8x8 tiles of bf16 out of shared memory     ldmatrix.x4
 *     kern_ldmatrix_trans  the same, each tile transposed                  ldmatrix.x4.trans
 *     kern_mma             c[16,8] += a[16,16] b[16,8], fp32 sums          mma.m16n8k16
 *     kern_copy_async      16 bytes from global to shared memory           cp.async.cg
 *
 * Where a lane's elements lie (PTX ISA, "Matrix Fragments for mma.m16n8k16", "ldmatrix"), with
 * g = lane / 4 and t = lane % 4, two bf16 in a register, the lower column or row first:
 *
 *     a[0]  rows g      columns 2t, 2t+1       b[0]  rows 2t, 2t+1     column g
 *     a[1]  rows g + 8  columns 2t, 2t+1       b[1]  rows 2t+8, 2t+9   column g
 *     a[2]  rows g      columns 2t+8, 2t+9     c[0], c[1]  row g      columns 2t, 2t+1
 *     a[3]  rows g + 8  columns 2t+8, 2t+9     c[2], c[3]  row g + 8  columns 2t, 2t+1
 *
 * ldmatrix: lane i's address is row i % 8 of tile i / 8 (8 bf16, 16-byte aligned); r[tile] gets of
 * that tile row g, columns 2t, 2t+1, or transposed rows 2t, 2t+1 of column g. So c of two
 * neighbouring n-tiles, packed, is the a of a following product: no lane needs another's elements.
 *
 * The order in which the hardware adds the 16 products of a step is fixed but not documented; the
 * CPU stand-in adds them one by one behind c.
 *
 * cp.async: a lane sees its own copies after kern_copy_wait, the other lanes of the block only
 * after a __syncthreads behind that. kern_copy_commit closes a group, also an empty one;
 * kern_copy_wait<n> waits until at most the n newest groups are under way.
 */
#ifndef KERN_KERNELS_CUDA_MMA_CUH
#define KERN_KERNELS_CUDA_MMA_CUH

#include <stdint.h>

#include "kernels/cuda/launch.cuh"

#ifdef KERN_GPUSIM
#include "gpusim_mma.h"
#else

static __device__ __forceinline__ uint32_t kern_shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* "memory": what the lanes stored there before, and the barriers, stay before it. */
static __device__ __forceinline__ void kern_ldmatrix(uint32_t r[4], const kern_bf16 *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(kern_shared_address(row))
                 : "memory");
}

static __device__ __forceinline__ void kern_ldmatrix_trans(uint32_t r[4], const kern_bf16 *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(kern_shared_address(row))
                 : "memory");
}

static __device__ __forceinline__ void kern_mma(float c[4], const uint32_t a[4], uint32_t b0,
                                                uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Copies 16 bytes, or, where `there` is 0, writes zeros and reads nothing; both 16-byte aligned. */
static __device__ __forceinline__ void kern_copy_async(void *shared, const void *global, int there)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(kern_shared_address(shared)), "l"(__cvta_generic_to_global(global)),
                   "r"(there ? 16 : 0)
                 : "memory");
}

static __device__ __forceinline__ void kern_copy_commit()
{
    asm volatile("cp.async.commit_group;" : : : "memory");
}

template <int N> static __device__ __forceinline__ void kern_copy_wait()
{
    asm volatile("cp.async.wait_group %0;" : : "n"(N) : "memory");
}

/* Two floats rounded to bf16, to the nearest, ties to even; `low` in the low half. */
static __device__ __forceinline__ uint32_t kern_pack_bf16(float low, float high)
{
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

/* 2^x within 2 ulp, subnormal results as 0; 0 of -infinity. */
static __device__ __forceinline__ float kern_exp2(float x)
{
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

#endif

#endif
