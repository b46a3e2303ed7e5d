/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bf16 as the device has it: the upper half of an fp32. Narrowing is to the nearest, ties to even;
 * values beyond the range become infinities, subnormals are kept, every NaN becomes 0x7fff.
 */
#ifndef GPUSIM_INCLUDE_CUDA_BF16_H
#define GPUSIM_INCLUDE_CUDA_BF16_H

#ifdef __cplusplus

#include <cuda_runtime.h>
#include <stdint.h>
#include <string.h>

struct __nv_bfloat16 {
    unsigned short gpusim_bits;
};

struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits)
{
    return __nv_bfloat16{bits};
}

static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x)
{
    return x.gpusim_bits;
}

static inline float __bfloat162float(__nv_bfloat16 x)
{
    uint32_t bits = static_cast<uint32_t>(x.gpusim_bits) << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

static inline __nv_bfloat16 __float2bfloat16_rn(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return __nv_bfloat16{0x7fff};
    }
    /* Half a unit of the last place, less one where the kept part is even: ties go there. */
    bits += 0x7fffu + ((bits >> 16) & 1u);
    return __nv_bfloat16{static_cast<unsigned short>(bits >> 16)};
}

static inline __nv_bfloat16 __float2bfloat16(float x)
{
    return __float2bfloat16_rn(x);
}

/* The lower address holds .x, which is the lower half of a 32-bit register. */
static inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y)
{
    return __nv_bfloat162{x, y};
}

static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y)
{
    return __nv_bfloat162{__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}

static inline __nv_bfloat162 __float22bfloat162_rn(float2 a)
{
    return __floats2bfloat162_rn(a.x, a.y);
}

static inline float2 __bfloat1622float2(__nv_bfloat162 a)
{
    return make_float2(__bfloat162float(a.x), __bfloat162float(a.y));
}

static inline float __low2float(__nv_bfloat162 a)
{
    return __bfloat162float(a.x);
}

static inline float __high2float(__nv_bfloat162 a)
{
    return __bfloat162float(a.y);
}

static inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 a)
{
    return a.x;
}

static inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 a)
{
    return a.y;
}

#endif

#endif
