/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Eight fp32 or fp64 lanes, as the compilers' vector extension: elementwise IEEE operations with
 * the same bits at every optimisation level, whatever the hardware's width.
 */
#ifndef KERN_KERNELS_VEC_H
#define KERN_KERNELS_VEC_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define KERN_LANES  8U
#define KERN_INLINE static inline __attribute__((always_inline))

typedef float kern_v8f __attribute__((vector_size(32)));
typedef int32_t kern_v8i __attribute__((vector_size(32)));
typedef double kern_v4d __attribute__((vector_size(32)));
/* The same at any address of their element's alignment. */
typedef float kern_v8f_any __attribute__((vector_size(32), aligned(4), may_alias));
typedef float kern_v4f_any __attribute__((vector_size(16), aligned(4), may_alias));

KERN_INLINE kern_v8f kern_v8f_all(float x)
{
    return (kern_v8f){x, x, x, x, x, x, x, x};
}

KERN_INLINE kern_v8f kern_v8f_load(const float *p)
{
    return *(const kern_v8f_any *)p;
}

KERN_INLINE void kern_v8f_store(float *p, kern_v8f v)
{
    *(kern_v8f_any *)p = v;
}

/* The first `count` (below 8) lanes from p, the others `fill`. */
KERN_INLINE kern_v8f kern_v8f_load_part(const float *p, size_t count, float fill)
{
    kern_v8f v = kern_v8f_all(fill);
    for (size_t i = 0; i < count; i++) {
        v[i] = p[i];
    }
    return v;
}

KERN_INLINE void kern_v8f_store_part(float *p, kern_v8f v, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        p[i] = v[i];
    }
}

/* mask lanes are all ones or all zeros: a where ones, b where zeros. */
KERN_INLINE kern_v8f kern_v8f_select(kern_v8i mask, kern_v8f a, kern_v8f b)
{
    return (kern_v8f)(((kern_v8i)a & mask) | ((kern_v8i)b & ~mask));
}

/* The lanes' sum: ((0+4)+(2+6)) + ((1+5)+(3+7)). */
KERN_INLINE float kern_v8f_sum(kern_v8f v)
{
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

KERN_INLINE kern_v8f kern_v8f_max(kern_v8f a, kern_v8f b)
{
    return kern_v8f_select(a > b, a, b);
}

KERN_INLINE float kern_v8f_top(kern_v8f v)
{
    float top = v[0];
    for (int i = 1; i < 8; i++) {
        top = v[i] > top ? v[i] : top;
    }
    return top;
}

/* Four floats widened. */
KERN_INLINE kern_v4d kern_v4d_load_f32(const float *p)
{
    return __builtin_convertvector(*(const kern_v4f_any *)p, kern_v4d);
}

#endif
