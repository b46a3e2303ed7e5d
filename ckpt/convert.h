/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Floats of other widths. Widening is exact, NaNs keep their bits. Narrowing rounds to the nearest,
 * ties to even (IEEE 754), keeps infinities and makes NaNs quiet. Any thread.
 */
#ifndef BL_CKPT_CONVERT_H
#define BL_CKPT_CONVERT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/extent.h"

/* F32, BF16 or F16? */
bool ckpt_is_float(enum bl_dtype dtype);

/* dest[count] from `count` elements of F32, BF16 or F16. The buffers do not overlap. */
void ckpt_widen(float *dest, const void *src, enum bl_dtype from, uint64_t count);

enum ckpt_overflow {                       /* a finite value that would become an infinity: */
                     CKPT_OVERFLOW_REFUSE, /* stop there */
                     CKPT_OVERFLOW_INF,    /* let it */
                     CKPT_OVERFLOW_CLAMP   /* the largest finite value instead */
};

/* Writes src[count] as F32, BF16 or F16 to dest. Returns `count`, or the index of the first element
 * that overflows under CKPT_OVERFLOW_REFUSE (those before it are written). */
uint64_t ckpt_narrow(void *dest, enum bl_dtype to, const float *src, uint64_t count,
                     enum ckpt_overflow overflow);

#endif
