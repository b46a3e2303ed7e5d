/* SPDX-License-Identifier: Apache-2.0 */
#include "ckpt/convert.h"

#include <string.h>

#include "base/error.h"

bool ckpt_is_float(enum bl_dtype dtype)
{
    return dtype == BL_F32 || dtype == BL_BF16 || dtype == BL_F16;
}

/* Sign, 5 bits of exponent (bias 15), 10 of fraction -> sign, 8 (bias 127), 23. */
static uint32_t widen_f16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, exponent = half >> 10 & 0x1fu;
    uint32_t fraction = half & 0x3ffu;

    if (exponent == 31) {
        return sign | 0x7f800000u | fraction << 13;
    }
    if (exponent != 0) {
        return sign | (exponent + 112) << 23 | fraction << 13;
    }
    if (fraction == 0) {
        return sign;
    }
    exponent = 113; /* a subnormal: fraction * 2^-24; shift its first bit to the hidden place */
    while ((fraction & 0x400u) == 0) {
        fraction <<= 1;
        exponent--;
    }
    return sign | exponent << 23 | (fraction & 0x3ffu) << 13;
}

void ckpt_widen(float *dest, const void *src, enum bl_dtype from, uint64_t count)
{
    const uint16_t *narrow = src;

    BL_ASSERT(ckpt_is_float(from));
    if (from == BL_F32) {
        memcpy(dest, src, count * sizeof(*dest));
        return;
    }
    for (uint64_t i = 0; i < count; i++) {
        uint32_t bits = from == BL_BF16 ? (uint32_t)narrow[i] << 16 : widen_f16(narrow[i]);

        memcpy(&dest[i], &bits, sizeof(bits));
    }
}

/* value / 2^shift to the nearest, ties to even; 0 < shift < 32. */
static uint32_t shift_to_even(uint32_t value, uint32_t shift)
{
    uint32_t kept = value >> shift, rest = value & ((1u << shift) - 1), half = 1u << (shift - 1);

    return kept + (rest > half || (rest == half && (kept & 1) != 0));
}

static uint16_t narrow_bf16(uint32_t bits)
{
    if ((bits & 0x7fffffffu) > 0x7f800000u) { /* NaN: rounding could carry it away */
        return (uint16_t)(bits >> 16 | 0x40u);
    }
    return (uint16_t)shift_to_even(bits, 16); /* a carry out of the fraction is the next exponent */
}

static uint16_t narrow_f16(uint32_t bits)
{
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000u);
    uint32_t size = bits & 0x7fffffffu, exponent = size >> 23;

    if (size > 0x7f800000u) {
        return (uint16_t)(sign | 0x7e00u | (size >> 13 & 0x3ffu));
    }
    if (size >= 0x47800000u) { /* 65536 and above, infinity */
        return sign | 0x7c00u;
    }
    if (exponent >= 113) {
        return (uint16_t)(sign | shift_to_even(size - (112u << 23), 13));
    }
    if (exponent < 102) { /* below half of the smallest subnormal, 2^-25 */
        return sign;
    }
    return (uint16_t)(sign | shift_to_even((size & 0x7fffffu) | 0x800000u, 126 - exponent));
}

uint64_t ckpt_narrow(void *dest, enum bl_dtype to, const float *src, uint64_t count,
                     enum ckpt_overflow overflow)
{
    uint16_t *narrow = dest, infinity = to == BL_BF16 ? 0x7f80u : 0x7c00u;

    BL_ASSERT(ckpt_is_float(to));
    if (to == BL_F32) {
        memcpy(dest, src, count * sizeof(*src));
        return count;
    }
    for (uint64_t i = 0; i < count; i++) {
        uint32_t bits;
        uint16_t value;

        memcpy(&bits, &src[i], sizeof(bits));
        value = to == BL_BF16 ? narrow_bf16(bits) : narrow_f16(bits);
        if ((value & 0x7fffu) == infinity && (bits & 0x7fffffffu) != 0x7f800000u) {
            if (overflow == CKPT_OVERFLOW_REFUSE) {
                return i;
            }
            value = (uint16_t)(value - (overflow == CKPT_OVERFLOW_CLAMP));
        }
        narrow[i] = value;
    }
    return count;
}
