/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plays kernels/cuda/mma.cuh on the CPU: each lane is a fibre, and what the hardware moves between
 * lanes goes through gpusim_warp_exchange.
 *
 * An asynchronous copy is done when it is waited for, not before: until then its 16 bytes of shared
 * memory hold a NaN pattern, so that a kernel that reads too early gives NaN. Memory of other lanes
 * is visible at once here, so a missing __syncthreads behind a wait is seen only in those thread
 * orders in which the reader runs before the copier has waited.
 */
#ifndef GPUSIM_MMA_H
#define GPUSIM_MMA_H

#include <assert.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

static inline uint32_t gpusim_lane()
{
    return gpusim_now->lane;
}

/* Half `half` of a register with two bf16. */
static inline float gpusim_half(uint32_t pair, uint32_t half)
{
    uint32_t bits = half != 0 ? pair & 0xffff0000u : pair << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t gpusim_bf16_bits(kern_bf16 x)
{
    uint16_t bits;
    static_assert(sizeof x == sizeof bits, "bf16 has two bytes");
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline uint32_t kern_pack_bf16(float low, float high)
{
    return gpusim_bf16_bits(__float2bfloat16_rn(low)) | gpusim_bf16_bits(__float2bfloat16_rn(high))
                                                            << 16;
}

static inline float kern_exp2(float x)
{
    float y = exp2f(x);
    return y < 1.17549435e-38f ? 0.0f : y;
}

/* Every lane reads its own row before any lane goes on, as in the instruction. */
static inline void kern_ldmatrix(uint32_t r[4], const kern_bf16 *row)
{
    uint32_t mine[4], all[KERN_WARP][4];
    assert((uintptr_t)row % 16 == 0);
    memcpy(mine, row, sizeof mine);
    gpusim_warp_exchange(mine, sizeof mine, all);
    uint32_t g = gpusim_lane() / 4, t = gpusim_lane() % 4;
    for (uint32_t tile = 0; tile < 4; tile++) {
        r[tile] = all[8 * tile + g][t];
    }
}

static inline void kern_ldmatrix_trans(uint32_t r[4], const kern_bf16 *row)
{
    uint32_t mine[4];
    uint16_t all[KERN_WARP][8];
    assert((uintptr_t)row % 16 == 0);
    memcpy(mine, row, sizeof mine);
    gpusim_warp_exchange(mine, sizeof mine, all);
    uint32_t g = gpusim_lane() / 4, t = gpusim_lane() % 4;
    for (uint32_t tile = 0; tile < 4; tile++) {
        r[tile] = all[8 * tile + 2 * t][g] | (uint32_t)all[8 * tile + 2 * t + 1][g] << 16;
    }
}

static inline void kern_mma(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    uint32_t mine[6] = {a[0], a[1], a[2], a[3], b0, b1}, all[KERN_WARP][6];
    gpusim_warp_exchange(mine, sizeof mine, all);
    uint32_t g = gpusim_lane() / 4, t = gpusim_lane() % 4;
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t lower = i / 2, column = 2 * t + i % 2;
        for (uint32_t k = 0; k < 16; k++) {
            float x = gpusim_half(all[4 * g + k % 8 / 2][lower + 2 * (k / 8)], k % 2);
            float y = gpusim_half(all[4 * column + k % 8 / 2][4 + k / 8], k % 2);
            c[i] += x * y;
        }
    }
}

/* ---- asynchronous copies ---- */

#define GPUSIM_COPIES 256 /* under way of one thread */

struct gpusim_copy {
    void *to;
    const void *from; /* NULL: zeros */
};

/* Of one thread of the block that runs: copies in order, and where each group ends. */
struct gpusim_copies {
    struct gpusim_copy copies[GPUSIM_COPIES];
    uint32_t group_of[GPUSIM_COPIES];
    uint32_t count, group;
};

/* One block runs at a time in a process. */
static inline struct gpusim_copies *gpusim_copies_mine()
{
    static struct gpusim_copies of_thread[GPUSIM_THREADS_MAX];
    assert(blockDim.y == 1 && blockDim.z == 1);
    return &of_thread[threadIdx.x];
}

static inline void kern_copy_async(void *shared, const void *global, int there)
{
    struct gpusim_copies *mine = gpusim_copies_mine();
    assert(mine->count < GPUSIM_COPIES);
    assert((uintptr_t)shared % 16 == 0 && (uintptr_t)global % 16 == 0);
    memset(shared, 0xff, 16);
    mine->group_of[mine->count] = mine->group;
    mine->copies[mine->count++] = {shared, there ? global : nullptr};
}

static inline void kern_copy_commit()
{
    gpusim_copies_mine()->group++;
}

template <int N> static inline void kern_copy_wait()
{
    struct gpusim_copies *mine = gpusim_copies_mine();
    uint32_t done = 0;
    while (done < mine->count && mine->group_of[done] + N < mine->group) {
        const struct gpusim_copy *copy = &mine->copies[done++];
        if (copy->from != nullptr) {
            memcpy(copy->to, copy->from, 16);
        } else {
            memset(copy->to, 0, 16);
        }
    }
    mine->count -= done;
    memmove(mine->copies, mine->copies + done, mine->count * sizeof mine->copies[0]);
    memmove(mine->group_of, mine->group_of + done, mine->count * sizeof mine->group_of[0]);
}

#endif
