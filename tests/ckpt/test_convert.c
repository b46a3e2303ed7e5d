/* SPDX-License-Identifier: Apache-2.0 */
/* Floats of 16 bits against a search for the nearest among all of them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "ckpt/convert.h"

/* The value of a finite 16-bit float by its definition. */
static double value_of(enum bl_dtype dtype, uint16_t bits)
{
    int fraction_bits = dtype == BL_BF16 ? 7 : 10, bias = dtype == BL_BF16 ? 127 : 15;
    int exponent = (bits & 0x7fff) >> fraction_bits, fraction = bits & ((1 << fraction_bits) - 1);
    double size = exponent == 0
                      ? ldexp(fraction, 1 - bias - fraction_bits)
                      : ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);

    return (bits & 0x8000) != 0 ? -size : size;
}

static uint16_t infinity_of(enum bl_dtype dtype)
{
    return dtype == BL_BF16 ? 0x7f80 : 0x7c00;
}

static const enum bl_dtype narrow_types[] = {BL_BF16, BL_F16};

static void test_every_16_bit_float_widens_to_its_value_and_back(void **state)
{
    (void)state;
    for (int t = 0; t < 2; t++) {
        enum bl_dtype dtype = narrow_types[t];

        for (uint32_t bits = 0; bits < 65536; bits++) {
            uint16_t in = (uint16_t)bits, back = 0, size = in & 0x7fff;
            float wide;

            ckpt_widen(&wide, &in, dtype, 1);
            if (size < infinity_of(dtype)) {
                assert_true((double)wide == value_of(dtype, in));
                assert_true((signbit(wide) != 0) == ((in & 0x8000) != 0));
            } else {
                assert_true(size == infinity_of(dtype) ? isinf(wide) : isnan(wide));
            }
            assert_int_equal(ckpt_narrow(&back, dtype, &wide, 1, CKPT_OVERFLOW_REFUSE), 1);
            /* NaNs become quiet and are otherwise kept. */
            assert_int_equal(
                back, size > infinity_of(dtype) ? in | (dtype == BL_BF16 ? 0x40 : 0x200) : in);
        }
    }
}

/* The nearest finite 16-bit float of a size, ties to even; the infinity's bits when it is nearer to
 * what would follow the largest. By bisection over all of them. */
static uint16_t nearest(enum bl_dtype dtype, double size)
{
    uint32_t lo = 0, hi = infinity_of(dtype); /* value(lo) <= size < value(hi) */
    double below, above;

    while (hi - lo > 1) {
        uint32_t mid = (lo + hi) / 2;

        if (value_of(dtype, (uint16_t)mid) <= size) {
            lo = mid;
        } else {
            hi = mid;
        }
    }
    below = size - value_of(dtype, (uint16_t)lo);
    above = value_of(dtype, (uint16_t)hi) - size; /* the infinity reads as the next power of two */
    return (uint16_t)(below < above || (below == above && lo % 2 == 0) ? lo : hi);
}

static void check_narrow(enum bl_dtype dtype, uint32_t bits)
{
    uint16_t is = 0, want;
    float value;

    memcpy(&value, &bits, sizeof(value));
    want = (uint16_t)(nearest(dtype, fabs((double)value)) | (signbit(value) ? 0x8000 : 0));
    assert_int_equal(ckpt_narrow(&is, dtype, &value, 1, CKPT_OVERFLOW_INF), 1);
    if (is != want) {
        fail_msg("%08x as %s is %04x, not %04x", bits, bl_dtype_name(dtype), is, want);
    }
}

static void test_narrowing_takes_the_nearest_and_of_ties_the_even(void **state)
{
    uint64_t seed = bl_random_u64();

    (void)state;
    printf("seed %llu\n", (unsigned long long)seed);
    for (int t = 0; t < 2; t++) {
        enum bl_dtype dtype = narrow_types[t];

        for (uint32_t i = 0; i < 200000; i++) {
            uint32_t bits = (uint32_t)bl_mix64(seed + i);

            if ((bits & 0x7f800000u) != 0x7f800000u) {
                check_narrow(dtype, bits);
            }
        }
        /* Ties, and their neighbours, of every float that has some. */
        for (uint32_t in = 0; in + 1 < infinity_of(dtype); in += t == 0 ? 37 : 5) {
            float tie =
                (float)((value_of(dtype, (uint16_t)in) + value_of(dtype, (uint16_t)(in + 1))) / 2);
            uint32_t bits;

            memcpy(&bits, &tie, sizeof(bits));
            check_narrow(dtype, bits - (bits > 0));
            check_narrow(dtype, bits);
            check_narrow(dtype, bits + 1);
        }
    }
}

static void test_a_value_that_does_not_fit_is_refused_or_as_it_was_told(void **state)
{
    const float values[] = {1, -65519.0f, 65520.0f, -65520.0f, INFINITY, 3.4e38f};
    const float large = 3.4e38f; /* rounds up to 2^128 in BF16 */
    uint16_t out[6];

    (void)state;
    assert_int_equal(ckpt_narrow(out, BL_F16, values, 6, CKPT_OVERFLOW_REFUSE), 2);
    assert_int_equal(ckpt_narrow(out, BL_F16, values, 6, CKPT_OVERFLOW_INF), 6);
    assert_int_equal(out[1], 0xfbff);
    assert_int_equal(out[2], 0x7c00);
    assert_int_equal(out[3], 0xfc00);
    assert_int_equal(ckpt_narrow(out, BL_F16, values, 6, CKPT_OVERFLOW_CLAMP), 6);
    assert_int_equal(out[2], 0x7bff);
    assert_int_equal(out[3], 0xfbff);
    assert_int_equal(out[4], 0x7c00); /* it was infinite before */
    assert_int_equal(out[5], 0x7bff);
    assert_int_equal(ckpt_narrow(out, BL_BF16, &large, 1, CKPT_OVERFLOW_REFUSE), 0);
    assert_int_equal(ckpt_narrow(out, BL_BF16, &large, 1, CKPT_OVERFLOW_CLAMP), 1);
    assert_int_equal(out[0], 0x7f7f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_16_bit_float_widens_to_its_value_and_back),
        cmocka_unit_test(test_narrowing_takes_the_nearest_and_of_ties_the_even),
        cmocka_unit_test(test_a_value_that_does_not_fit_is_refused_or_as_it_was_told),
    };
    return cmocka_run_group_tests_name("ckpt/convert", tests, NULL, NULL);
}
