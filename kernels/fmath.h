/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Our own elementary functions: sequences of IEEE additions, multiplications and divisions that no
 * libm version, compiler or level can change. exp in eight fp32 lanes (within 2 ulp); exp, log, sin
 * and cos in fp64 (within 2 ulp; sine and cosine for |x| up to 2^20).
 */
#ifndef KERN_KERNELS_FMATH_H
#define KERN_KERNELS_FMATH_H

#include "kernels/vec.h"

/*
 * e^x = 2^n e^r with n = round(x / ln 2), |r| <= ln 2 / 2, and e^r by its Taylor polynomial of
 * degree 7 (remainder below 0.1 ulp). Rounding to an integer is by adding 1.5 * 2^23. Above 88 the
 * result stays e^88 (so 1 + e^x is finite), below -87 it is 0; NaN stays NaN.
 */
KERN_INLINE kern_v8f kern_v8f_exp(kern_v8f x)
{
    const kern_v8f magic = kern_v8f_all(12582912.0f);
    kern_v8i low = x < kern_v8f_all(-87.0f);
    x = kern_v8f_select(x > kern_v8f_all(88.0f), kern_v8f_all(88.0f), x);
    x = kern_v8f_select(low, kern_v8f_all(-87.0f), x);
    kern_v8f t = x * kern_v8f_all(1.44269504f) + magic;
    kern_v8i n = (kern_v8i)t - (kern_v8i)magic;
    kern_v8f nf = t - magic;
    /* ln 2 in two parts: the first has 9 bits, so n times it is exact. */
    kern_v8f r = (x - nf * kern_v8f_all(0.693359375f)) - nf * kern_v8f_all(-2.12194440e-4f);
    kern_v8f p = kern_v8f_all(1.0f / 5040.0f);
    p = p * r + kern_v8f_all(1.0f / 720.0f);
    p = p * r + kern_v8f_all(1.0f / 120.0f);
    p = p * r + kern_v8f_all(1.0f / 24.0f);
    p = p * r + kern_v8f_all(1.0f / 6.0f);
    p = p * r + kern_v8f_all(0.5f);
    p = (p * (r * r) + r) + kern_v8f_all(1.0f);
    kern_v8f scale = (kern_v8f)((n + 127) << 23);
    return kern_v8f_select(low, kern_v8f_all(0.0f), p * scale);
}

/* e^x; 0 below -708, e^709 above 709. */
double kern_exp(double x);
/* Natural logarithm of a positive normal number; NaN of NaN. */
double kern_log(double x);
double kern_sin(double x);
double kern_cos(double x);
/* x^n by repeated squaring. */
double kern_powi(double x, uint64_t n);

#endif
