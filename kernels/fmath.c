/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/fmath.h"

static uint64_t bits_of(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static double double_of(uint64_t bits)
{
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Adding and taking away 1.5 * 2^52 rounds to an integer; volatile so that nothing folds it. */
static double round_to_int(double x)
{
    volatile double t = x + 6755399441055744.0;
    return t - 6755399441055744.0;
}

/* c[0] x^(count-1) + ... + c[count-1] */
KERN_INLINE double horner(double x, const double *c, int count)
{
    double p = c[0];
    for (int i = 1; i < count; i++) {
        p = p * x + c[i];
    }
    return p;
}

#define LN2_HIGH 0x1.62e42feep-1       /* 32 bits: n times it is exact */
#define LN2_LOW  0x1.a39ef35793c76p-33 /* the rest */

double kern_exp(double x)
{
    if (x < -708.0) {
        return 0.0;
    }
    if (x > 709.0) {
        x = 709.0;
    }
    double n = round_to_int(x * 1.4426950408889634);
    double r = (x - n * LN2_HIGH) - n * LN2_LOW;
    /* Taylor's polynomial of degree 14; the remainder is below 1e-17. */
    static const double c[] = {1.0 / 87178291200.0,
                               1.0 / 6227020800.0,
                               1.0 / 479001600.0,
                               1.0 / 39916800.0,
                               1.0 / 3628800.0,
                               1.0 / 362880.0,
                               1.0 / 40320.0,
                               1.0 / 5040.0,
                               1.0 / 720.0,
                               1.0 / 120.0,
                               1.0 / 24.0,
                               1.0 / 6.0,
                               0.5,
                               1.0};
    double p = 1.0 + horner(r, c, 14) * r;
    return p * double_of((uint64_t)(1023 + (int64_t)n) << 52);
}

/* x = 2^e m with m in [sqrt(1/2), sqrt(2)); log m = 2 atanh(s), s = (m - 1) / (m + 1), by its
 * series: s^2 is below 0.0295, so 12 terms reach 1e-19. */
double kern_log(double x)
{
    if (x != x) { /* else its bits make a number, and a lost loss looks sound */
        return x;
    }
    uint64_t bits = bits_of(x);
    int64_t e = (int64_t)(bits >> 52) - 1023;
    double m = double_of((bits & 0xfffffffffffffULL) | 0x3ff0000000000000ULL);
    if (m > 1.4142135623730951) {
        m = m * 0.5;
        e = e + 1;
    }
    double f = m - 1.0;
    double s = f / (2.0 + f);
    double z = s * s;
    static const double c[] = {2.0 / 25, 2.0 / 23, 2.0 / 21, 2.0 / 19, 2.0 / 17, 2.0 / 15,
                               2.0 / 13, 2.0 / 11, 2.0 / 9,  2.0 / 7,  2.0 / 5,  2.0 / 3};
    double p = horner(z, c, 12) * z;
    /* log m = f - s (f - p'): the leading term f is exact, so little is lost near 1. */
    double log_m = f - s * (f - p);
    double n = (double)e;
    return n * LN2_HIGH + (log_m + n * LN2_LOW);
}

#define PIO2_1 0x1.921fb544p+0 /* pi / 2 in parts of 33 bits: n up to 2^20 times them is exact */
#define PIO2_2 0x1.0b4611a6p-34
#define PIO2_3 0x1.3198a2e037073p-69

/* r = x - n pi/2 with |r| <= pi/4; returns n mod 4. */
static unsigned reduce(double x, double *ret_r)
{
    double n = round_to_int(x * 0.6366197723675814);
    *ret_r = ((x - n * PIO2_1) - n * PIO2_2) - n * PIO2_3;
    return (unsigned)((int64_t)n & 3);
}

/* Taylor again, |r| <= pi/4: to r^17 for the sine, r^16 for the cosine. */
static double sin_poly(double r)
{
    static const double c[] = {
        1.0 / 355687428096000.0, -1.0 / 1307674368000.0, 1.0 / 6227020800.0, -1.0 / 39916800.0,
        1.0 / 362880.0,          -1.0 / 5040.0,          1.0 / 120.0,        -1.0 / 6.0};
    double z = r * r;
    return r + r * (z * horner(z, c, 8));
}

static double cos_poly(double r)
{
    static const double c[] = {
        1.0 / 20922789888000.0, -1.0 / 87178291200.0, 1.0 / 479001600.0, -1.0 / 3628800.0,
        1.0 / 40320.0,          -1.0 / 720.0,         1.0 / 24.0,        -0.5};
    double z = r * r;
    return 1.0 + z * horner(z, c, 8);
}

static double quadrant(unsigned q, double r)
{
    switch (q & 3) {
    case 0:
        return sin_poly(r);
    case 1:
        return cos_poly(r);
    case 2:
        return -sin_poly(r);
    default:
        return -cos_poly(r);
    }
}

double kern_sin(double x)
{
    double r;
    unsigned q = reduce(x, &r);
    return quadrant(q, r);
}

double kern_cos(double x)
{
    double r;
    unsigned q = reduce(x, &r);
    return quadrant(q + 1, r);
}

double kern_powi(double x, uint64_t n)
{
    double result = 1.0;
    while (n != 0) {
        if (n & 1) {
            result = result * x;
        }
        x = x * x;
        n >>= 1;
    }
    return result;
}
