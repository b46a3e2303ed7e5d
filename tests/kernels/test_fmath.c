/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Our elementary functions against the long double ones of libm.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>
#include <math.h>

#include "kernels/fmath.h"
#include "kernels/kern.h"

#define DRAWS 200000

/* |got - want| in units of want's last place, for a significand of `bits` bits. */
static double ulps(long double got, long double want, int bits)
{
    int exponent;
    frexpl(want, &exponent);
    return (double)fabsl((got - want) / ldexpl(1.0L, exponent - bits));
}

static double draw(uint64_t i, double low, double high)
{
    return low + (high - low) * kern_rng_uniform(42, i);
}

static void test_exp_lanes_are_within_two_ulp(void **state)
{
    (void)state;
    double worst = 0;
    for (uint64_t i = 0; i < DRAWS; i++) {
        float x = (float)draw(i, i % 2 ? -86.9 : -1.0, i % 2 ? 88.0 : 1.0);
        kern_v8f y = kern_v8f_exp(kern_v8f_all(x));
        worst = fmax(worst, ulps((long double)y[i % 8], expl((long double)x), 24));
    }
    printf("worst %.3f ulp\n", worst);
    assert_true(worst < 2.0);
}

static void test_exp_lanes_keep_to_their_ends(void **state)
{
    (void)state;
    kern_v8f x = {0.0f, -87.5f, -1e30f, -INFINITY, 89.0f, INFINITY, NAN, 88.0f};
    kern_v8f y = kern_v8f_exp(x);
    assert_true(y[0] == 1.0f && y[1] == 0.0f && y[2] == 0.0f && y[3] == 0.0f);
    assert_true(y[4] == y[7] && y[5] == y[7] && isfinite(y[7]) && 1.0f + y[7] > 1e38f);
    assert_true(isnan(y[6]));
}

static void test_fp64_functions_are_within_two_ulp(void **state)
{
    (void)state;
    double worst_exp = 0, worst_log = 0, worst_trig = 0;
    for (uint64_t i = 0; i < DRAWS; i++) {
        double x = draw(3 * i, -700.0, 700.0);
        worst_exp = fmax(worst_exp, ulps((long double)kern_exp(x), expl((long double)x), 53));
        double v = i % 2 ? kern_exp(x) : draw(3 * i + 1, 0.4, 2.5);
        worst_log = fmax(worst_log, ulps((long double)kern_log(v), logl((long double)v), 53));
        double angle = i % 2 ? draw(3 * i + 2, -1e6, 1e6) : draw(3 * i + 2, -7.0, 7.0);
        /* Near zero the error of reduction counts, not that of the last place. */
        long double s = (long double)kern_sin(angle) - sinl((long double)angle);
        long double c = (long double)kern_cos(angle) - cosl((long double)angle);
        worst_trig = fmax(worst_trig, (double)fmaxl(fabsl(s), fabsl(c)) * 0x1.0p53);
    }
    printf("worst exp %.3f log %.3f ulp, sin and cos %.3f of 2^-53\n", worst_exp, worst_log,
           worst_trig);
    assert_true(worst_exp < 2.0 && worst_log < 2.0 && worst_trig < 2.0);
    assert_true(kern_exp(0.0) == 1.0 && kern_log(1.0) == 0.0 && kern_cos(0.0) == 1.0);
    assert_true(isnan(kern_log(NAN)));
    assert_true(kern_exp(-1000.0) == 0.0 && isfinite(kern_exp(1000.0)));
}

static void test_powi_equals_repeated_products(void **state)
{
    (void)state;
    assert_true(kern_powi(0.5, 10) == 0x1.0p-10);
    assert_true(kern_powi(3.0, 0) == 1.0);
    assert_true(fabs(kern_powi(0.999, 100000) / pow(0.999, 100000) - 1.0) < 1e-11);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exp_lanes_are_within_two_ulp),
        cmocka_unit_test(test_exp_lanes_keep_to_their_ends),
        cmocka_unit_test(test_fp64_functions_are_within_two_ulp),
        cmocka_unit_test(test_powi_equals_repeated_products),
    };
    return cmocka_run_group_tests_name("kernels/fmath", tests, NULL, NULL);
}
