/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Add, scale, block sums, tree, AdamW, random numbers.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#include "kernels/kern.h"

#define COUNT 20011 /* some blocks and a part of a vector */

static struct kern_pool *g_pool;
static float g_a[COUNT], g_b[COUNT], g_c[COUNT], g_d[COUNT];

static int setup(void **state)
{
    (void)state;
    kern_rng_normal(g_pool, g_a, 1, 0, COUNT, 1.0);
    kern_rng_normal(g_pool, g_b, 2, 0, COUNT, 1.0);
    return 0;
}

static void test_add_and_scale_round_once(void **state)
{
    (void)state;
    kern_add(g_pool, g_c, g_a, g_b, COUNT);
    memcpy(g_d, g_a, sizeof g_d);
    kern_add(g_pool, g_d, g_d, g_b, COUNT); /* in place */
    assert_memory_equal(g_c, g_d, sizeof g_c);
    kern_scale(g_pool, g_d, 0.3f, COUNT);
    for (size_t i = 0; i < COUNT; i++) {
        assert_true(g_c[i] == g_a[i] + g_b[i] && g_d[i] == g_c[i] * 0.3f);
    }
}

static void test_copy_and_zero_write_all_and_no_more(void **state)
{
    (void)state;
    enum { MOST = 70 * KERN_BLOCK + 13 };
    static float from[MOST], to[MOST + 8];
    static const size_t counts[] = {0, 1, 13, KERN_BLOCK + 5, MOST};
    kern_rng_normal(g_pool, from, 7, 0, MOST, 1.0);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        for (size_t at = 0; at < 2; at++) { /* aligned or not */
            to[at + counts[i]] = 3.0f;
            kern_copy(g_pool, to + at, from, counts[i]);
            assert_memory_equal(to + at, from, counts[i] * sizeof *to);
            assert_true(to[at + counts[i]] == 3.0f);
            kern_zero(g_pool, to + at, counts[i]);
            for (size_t j = 0; j < counts[i]; j++) {
                assert_true(to[at + j] == 0.0f);
            }
            assert_true(to[at + counts[i]] == 3.0f);
        }
    }
}

static void test_block_sums_do_not_depend_on_the_cut(void **state)
{
    (void)state;
    enum { BLOCKS = (COUNT + KERN_BLOCK - 1) / KERN_BLOCK };
    double whole[BLOCKS], one, exact = 0, total;
    kern_sumsq_blocks(g_pool, whole, g_a, COUNT);
    for (size_t i = 0; i < BLOCKS; i++) {
        size_t first = i * KERN_BLOCK, rest = COUNT - first;
        kern_sumsq_blocks(NULL, &one, g_a + first, rest < KERN_BLOCK ? rest : KERN_BLOCK);
        assert_true(one == whole[i]);
    }
    for (size_t i = 0; i < COUNT; i++) {
        exact += (double)g_a[i] * (double)g_a[i];
    }
    total = kern_tree_sum(whole, BLOCKS);
    assert_true(fabs(total / exact - 1.0) < 1e-13);
    /* A short block counts as if zeros followed. */
    float padded[KERN_BLOCK] = {0};
    memcpy(padded, g_a, 13 * sizeof *padded);
    kern_sumsq_blocks(NULL, &one, g_a, 13);
    kern_sumsq_blocks(NULL, &total, padded, KERN_BLOCK);
    assert_true(one == total);
}

static void test_tree_splits_at_the_largest_power_of_two_below(void **state)
{
    (void)state;
    const double v[7] = {1.0, 0x1.0p-53, 0x1.0p-53, 3.0, 0x1.0p-52, 7.0, 0.1};
    double expect = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + v[6]);
    assert_true(kern_tree_sum(v, 7) == expect);
    assert_true(kern_tree_sum(v, 0) == 0.0 && kern_tree_sum(v + 3, 1) == 3.0);
}

static void test_adamw_is_its_sequence_of_operations(void **state)
{
    (void)state;
    static float m[COUNT], v[COUNT], grad[COUNT], p[COUNT];
    struct kern_adamw_step s;
    kern_adamw_step_init(&s, 3, 1e-3, 0.9, 0.95, 1e-8, 0.7f);
    assert_true(s.beta1_rest == (float)(1.0 - 0.9));
    assert_true(s.bc1_inv == (float)(1.0 / (1.0 - 0.9 * 0.9 * 0.9)));
    kern_rng_normal(g_pool, m, 5, 0, COUNT, 0.1);
    kern_rng_normal(g_pool, grad, 6, 0, COUNT, 0.1);
    for (size_t i = 0; i < COUNT; i++) {
        v[i] = m[i] * m[i];
    }
    kern_adamw(g_pool, g_c, g_d, p, g_a, m, v, grad, COUNT, &s, 0.1f);
    for (size_t i = 0; i < COUNT; i++) {
        volatile float g = grad[i] * s.grad_scale, a = s.beta1 * m[i], b = s.beta1_rest * g;
        volatile float m1 = a + b, g2 = g * g;
        a = s.beta2 * v[i];
        b = s.beta2_rest * g2;
        volatile float v1 = a + b, over = m1 * s.bc1_inv, under = v1 * s.bc2_inv;
        under = sqrtf(under);
        under = under + s.eps;
        volatile float u = over / under, decay = 0.1f * g_a[i], d = u + decay;
        volatile float change = s.lr * d, p1 = g_a[i] - change;
        assert_true(g_c[i] == p1 && g_d[i] == m1 && p[i] == v1);
    }
    /* In place gives the same. */
    float first = g_a[COUNT - 1];
    kern_adamw(g_pool, g_a, m, v, g_a, m, v, grad, COUNT, &s, 0.1f);
    assert_memory_equal(g_a, g_c, sizeof g_c);
    assert_memory_equal(m, g_d, sizeof g_d);
    assert_memory_equal(v, p, sizeof p);
    assert_true(g_a[COUNT - 1] != first);
}

static void test_adamw_of_many_gives_the_bits_of_few(void **state)
{
    (void)state;
    enum { MANY = 64 * KERN_BLOCK + 77, PART = 1000 };
    float *mem = aligned_alloc(64, (7 * (size_t)(MANY + 3)) * sizeof *mem / 64 * 64 + 64);
    assert_non_null(mem);
    float *in[4], *out[3], part[3][PART];
    for (size_t i = 0; i < 7; i++) {
        float *at = mem + i * (MANY + 3);
        *(i < 4 ? &in[i] : &out[i - 4]) = at;
        kern_rng_normal(g_pool, at, i, 0, MANY, 0.1);
    }
    for (size_t i = 0; i < MANY; i++) {
        in[2][i] = fabsf(in[2][i]);
    }
    struct kern_adamw_step s;
    kern_adamw_step_init(&s, 3, 1e-3, 0.9, 0.95, 1e-8, 0.7f);
    kern_adamw(g_pool, out[0], out[1], out[2], in[0], in[1], in[2], in[3], MANY, &s, 0.1f);
    for (size_t i = 0; i < MANY; i += PART) {
        size_t n = MANY - i < PART ? MANY - i : PART;
        kern_adamw(NULL, part[0], part[1], part[2], in[0] + i, in[1] + i, in[2] + i, in[3] + i, n,
                   &s, 0.1f);
        for (int k = 0; k < 3; k++) {
            assert_memory_equal(out[k] + i, part[k], n * sizeof(float));
        }
    }
    free(mem);
}

static void test_normals_of_a_range_equal_those_of_the_whole(void **state)
{
    (void)state;
    kern_rng_normal(g_pool, g_c, 9, 0, COUNT, 0.5);
    kern_rng_normal(NULL, g_d, 9, 4097, 333, 0.5);
    assert_memory_equal(g_d, g_c + 4097, 333 * sizeof *g_d);
    double mean = 0, square = 0, fourth = 0;
    for (size_t i = 0; i < COUNT; i++) {
        double x = (double)g_c[i] / 0.5;
        mean += x / COUNT;
        square += x * x / COUNT;
        fourth += x * x * x * x / COUNT;
    }
    assert_true(fabs(mean) < 0.03 && fabs(square - 1.0) < 0.04 && fabs(fourth - 3.0) < 0.3);
}

static void test_streams_of_other_keys_differ(void **state)
{
    (void)state;
    assert_true(kern_rng_key(1, 2) != kern_rng_key(2, 1));
    assert_true(kern_rng_bits(1, 1) != kern_rng_bits(1, 2));
    for (uint64_t i = 0; i < 1000; i++) {
        double u = kern_rng_uniform(3, i);
        assert_true(u >= 0.0 && u < 1.0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_add_and_scale_round_once, setup),
        cmocka_unit_test_setup(test_block_sums_do_not_depend_on_the_cut, setup),
        cmocka_unit_test_setup(test_tree_splits_at_the_largest_power_of_two_below, setup),
        cmocka_unit_test_setup(test_adamw_of_many_gives_the_bits_of_few, setup),
        cmocka_unit_test_setup(test_copy_and_zero_write_all_and_no_more, setup),
        cmocka_unit_test_setup(test_adamw_is_its_sequence_of_operations, setup),
        cmocka_unit_test_setup(test_normals_of_a_range_equal_those_of_the_whole, setup),
        cmocka_unit_test_setup(test_streams_of_other_keys_differ, setup),
    };
    if (kern_pool_new(&g_pool, 3, NULL) < 0) {
        return 1;
    }
    int failed = cmocka_run_group_tests_name("kernels/flat", tests, NULL, NULL);
    kern_pool_free(g_pool);
    return failed;
}
