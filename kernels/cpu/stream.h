/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stores that go past the cache: what they replace need not be read first. For large outputs that
 * are not read again soon.
 */
#ifndef KERN_KERNELS_CPU_STREAM_H
#define KERN_KERNELS_CPU_STREAM_H

#include <stdint.h>

#include "kernels/kern.h"
#include "kernels/vec.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* From so many elements on it pays. */
#define KERN_STREAM_MIN (64U * KERN_BLOCK)

/* `to` is aligned for kern_stream_store? */
KERN_INLINE int kern_stream_fits(const float *to)
{
    return (uintptr_t)to % sizeof(kern_v8f) == 0;
}

KERN_INLINE void kern_stream_store(float *to, kern_v8f v)
{
#if defined(__x86_64__)
    _mm256_stream_ps(to, (__m256)v);
#else
    kern_v8f_store(to, v);
#endif
}

/* Other threads see the stores only after this. */
KERN_INLINE void kern_stream_end(void)
{
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

#endif
