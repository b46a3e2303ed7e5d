/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the numeric probes of all back ends compute on: numbers from counters, and the part of a
 * product that is tried.
 */
#ifndef KERN_KERNELS_PROBE_INPUT_H
#define KERN_KERNELS_PROBE_INPUT_H

#include <stddef.h>
#include <stdint.h>

#include "base/digest.h"
#include "kernels/kern.h"

#define KERN_PROBE_ROWS_MAX 512U
#define KERN_PROBE_WORK_MAX                                                                        \
    (48ULL << 20) /* multiply-adds of one product: on a CPU a millisecond                          \
                   */

/* Numbers in [-1, 1) with 23 bits: those of kern_rng_bits. */
static inline void kern_probe_fill(float *x, size_t count, uint64_t key)
{
    for (size_t i = 0; i < count; i++) {
        uint64_t bits = bl_mix64(key + i * 0x9e3779b97f4a7c15ULL);
        x[i] = (float)(int32_t)(bits >> 40) * 0x1.0p-23f - 1.0f;
    }
}

/* Fewer rows, then fewer outputs. */
static inline struct kern_matmul_shape kern_probe_shape(struct kern_matmul_shape s)
{
    s.n = s.n > KERN_PROBE_ROWS_MAX ? KERN_PROBE_ROWS_MAX : s.n;
    while (s.n > 32 && (uint64_t)s.n * s.i * s.o > KERN_PROBE_WORK_MAX) {
        s.n /= 2;
    }
    while (s.o > 64 && (uint64_t)s.n * s.i * s.o > KERN_PROBE_WORK_MAX) {
        s.o /= 2;
    }
    return s;
}

/* The digest of what came before, and then of these bytes. */
static inline uint64_t kern_probe_mix(uint64_t digest, const void *data, size_t bytes)
{
    return bl_mix64(digest ^ bl_xxh3(data, bytes));
}

#endif
