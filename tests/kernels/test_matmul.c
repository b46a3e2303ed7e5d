/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products against fp64, with the bound c sqrt(K) eps sum |a| |b| for each element, in shapes that
 * end inside tiles and vectors.
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

#define BOUND 4.0

static struct kern_pool *g_pool;

/* Strides by which an element of the product's operands is found. */
struct operand {
    const float *at;
    size_t row, inner;
};

static void check(const float *c, const float *before, struct operand a, struct operand b,
                  uint32_t m, uint32_t n, uint32_t k)
{
    for (uint32_t i = 0; i < m; i++) {
        for (uint32_t j = 0; j < n; j++) {
            double sum = before == NULL ? 0.0 : (double)before[(size_t)i * n + j];
            double size = fabs(sum);
            for (uint32_t l = 0; l < k; l++) {
                double p =
                    (double)a.at[i * a.row + l * a.inner] * (double)b.at[j * b.row + l * b.inner];
                sum += p;
                size += fabs(p);
            }
            double error = fabs((double)c[(size_t)i * n + j] - sum);
            assert_true(error <= BOUND * sqrt(k) * 0x1.0p-24 * size);
        }
    }
}

static void check_shape(struct kern_matmul_shape s)
{
    size_t nx = (size_t)s.n * s.i, nw = (size_t)s.o * s.i, ny = (size_t)s.n * s.o;
    size_t most = nx > nw ? nx : nw;
    most = most > ny ? most : ny;
    float *x = malloc(nx * sizeof *x), *w = malloc(nw * sizeof *w), *y = malloc(ny * sizeof *y);
    float *out = malloc(most * sizeof *out), *before = malloc(most * sizeof *before);
    assert_true(x && w && y && out && before);
    kern_rng_normal(NULL, x, 1, 0, nx, 1.0);
    kern_rng_normal(NULL, w, 2, 0, nw, 1.0);
    kern_rng_normal(NULL, y, 3, 0, ny, 1.0);
    kern_rng_normal(NULL, before, 4, 0, most, 1.0);
    for (int add = 0; add < 2; add++) {
        const float *old = add ? before : NULL;
        memcpy(out, before, most * sizeof *out);
        kern_matmul_forward(g_pool, out, x, w, s, add);
        check(out, old, (struct operand){x, s.i, 1}, (struct operand){w, s.i, 1}, s.n, s.o, s.i);
        memcpy(out, before, most * sizeof *out);
        kern_matmul_dx(g_pool, out, y, w, s, add);
        check(out, old, (struct operand){y, s.o, 1}, (struct operand){w, 1, s.i}, s.n, s.i, s.o);
        memcpy(out, before, most * sizeof *out);
        kern_matmul_dw(g_pool, out, y, x, s, add);
        check(out, old, (struct operand){y, 1, s.o}, (struct operand){x, 1, s.i}, s.o, s.i, s.n);
    }
    free(x), free(w), free(y), free(out), free(before);
}

static void test_products_stay_within_the_bound_of_fp64(void **state)
{
    (void)state;
    const struct kern_matmul_shape shapes[] = {{1, 1, 1},    {1, 64, 300},   {3, 5, 7},
                                               {33, 17, 40}, {130, 72, 517}, {300, 600, 72},
                                               {520, 40, 40}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        check_shape(shapes[i]);
    }
}

/* The probe of one shape: digests its three products. */
static uint64_t product_bits(uint32_t threads, struct kern_matmul_shape s)
{
    struct kern_pool *pool;
    uint64_t digest = 0;
    assert_int_equal(kern_pool_new(&pool, threads, NULL), 0);
    assert_int_equal(kern_probe(pool, &s, 1, &digest, NULL), 0);
    kern_pool_free(pool);
    return digest;
}

static void test_bits_do_not_depend_on_threads(void **state)
{
    (void)state;
    const struct kern_matmul_shape shapes[] = {{512, 128, 352}, {257, 300, 513}, {64, 64, 64}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        uint64_t one = product_bits(1, shapes[i]);
        assert_int_equal(one, product_bits(2, shapes[i]));
        assert_int_equal(one, product_bits(3, shapes[i]));
        assert_int_equal(one, product_bits(7, shapes[i]));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_products_stay_within_the_bound_of_fp64),
        cmocka_unit_test(test_bits_do_not_depend_on_threads),
    };
    if (kern_pool_new(&g_pool, 2, NULL) < 0) {
        return 1;
    }
    int failed = cmocka_run_group_tests_name("kernels/matmul", tests, NULL, NULL);
    kern_pool_free(g_pool);
    return failed;
}
