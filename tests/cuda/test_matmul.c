/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Matrix products and the numeric probe over the stand-ins: the mapping of row-major arrays, the
 * rule by which algorithms are chosen, what the build name says.
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

#include "kernels/cuda/device.h"
#include "kernels/cuda/ops.h"
#include "kernels/probe_input.h"
#include "tests/gpusim/gpusim_control.h"

#define ARENA (64ULL << 20)

static struct kern *open_device(enum kern_type type)
{
    struct bl_errmsg msg = {{0}};
    struct kern *k = NULL;
    int rc = kern_cuda_open(&k, 0, type, ARENA, &msg);
    if (rc != 0) {
        print_error("%s\n", msg.text);
    }
    assert_int_equal(rc, 0);
    return k;
}

static void sync_good(struct kern *k)
{
    struct bl_errmsg msg = {{0}};
    int rc = kern_cuda_sync(k, &msg);
    if (rc != 0) {
        print_error("%s\n", msg.text);
    }
    assert_int_equal(rc, 0);
}

/* ---- values against sums in fp64 ---- */

/* An array on both sides; the host's are the numbers that the device has. */
struct array {
    float *host;
    kern_real *device;
    uint64_t count;
};

static struct array array_of(struct kern *k, uint64_t count, uint64_t key)
{
    struct array a = {malloc(count * sizeof(float)), kern_cuda_alloc(k, count * k->real_bytes),
                      count};
    float *wide = kern_cuda_alloc(k, count * sizeof *wide);
    assert_non_null(a.host);
    assert_non_null(wide);
    kern_probe_fill(a.host, count, key);
    kern_cuda_upload(k, wide, a.host, count * sizeof *wide);
    kern_cuda_round(k, a.device, wide, count);
    kern_cuda_widen(k, wide, a.device, count);
    kern_cuda_download(k, a.host, wide, count * sizeof *wide);
    sync_good(k);
    kern_cuda_free(k, wide, count * sizeof *wide);
    return a;
}

static void array_end(struct kern *k, struct array *a)
{
    kern_cuda_free(k, a->device, a->count * k->real_bytes);
    free(a->host);
}

/* sum_l p[i * pi + l * pl] q[j * qj + l * ql] */
static double sum_of(const float *p, uint64_t pl, const float *q, uint64_t ql, uint32_t count)
{
    double sum = 0;
    for (uint32_t l = 0; l < count; l++) {
        sum += (double)p[l * pl] * q[l * ql];
    }
    return sum;
}

/* Device's numbers are within rounding of want[rows, columns]. */
static void check_near(struct kern *k, const void *device, int is_real, const double *want,
                       uint64_t count, uint32_t terms, const char *what)
{
    float *wide = kern_cuda_alloc(k, count * sizeof *wide), *got = malloc(count * sizeof *got);
    double bound = sqrt(terms) * 1e-6 + (is_real && k->type == KERN_BF16 ? 0 : 1e-6);
    if (is_real) {
        kern_cuda_widen(k, wide, device, count);
    } else {
        kern_cuda_copy(k, wide, device, count * sizeof *wide);
    }
    kern_cuda_download(k, got, wide, count * sizeof *got);
    sync_good(k);
    for (uint64_t i = 0; i < count; i++) {
        double here = bound + (is_real && k->type == KERN_BF16 ? fabs(want[i]) / 256 : 0);
        if (!(fabs(got[i] - want[i]) <= here)) {
            fail_msg("%s: element %llu is %g, not %g", what, (unsigned long long)i, got[i],
                     want[i]);
        }
    }
    kern_cuda_free(k, wide, count * sizeof *wide);
    free(got);
}

static void check_forward(struct kern *k, struct kern_matmul_shape s, const struct array *x,
                          const struct array *w, const struct array *bias, struct array *y)
{
    double *want = malloc(y->count * sizeof *want);
    for (int with = 0; with < 2; with++) {
        for (uint32_t n = 0; n < s.n; n++) {
            for (uint32_t o = 0; o < s.o; o++) {
                want[(uint64_t)n * s.o + o] =
                    sum_of(x->host + (uint64_t)n * s.i, 1, w->host + (uint64_t)o * s.i, 1, s.i) +
                    (with ? (double)bias->host[o] : 0);
            }
        }
        kern_cuda_matmul_forward(k, y->device, x->device, w->device, with ? bias->device : NULL, s);
        check_near(k, y->device, 1, want, y->count, s.i, with ? "forward+bias" : "forward");
    }
    free(want);
}

static void check_dx(struct kern *k, struct kern_matmul_shape s, const struct array *dy,
                     const struct array *w, struct array *dx)
{
    double *want = malloc(dx->count * sizeof *want);
    for (int add = 1; add >= 0; add--) {
        for (uint32_t n = 0; n < s.n; n++) {
            for (uint32_t i = 0; i < s.i; i++) {
                uint64_t at = (uint64_t)n * s.i + i;
                want[at] = sum_of(dy->host + (uint64_t)n * s.o, 1, w->host + i, s.i, s.o) +
                           (add ? (double)dx->host[at] : 0);
            }
        }
        kern_cuda_matmul_dx(k, dx->device, dy->device, w->device, s, add);
        check_near(k, dx->device, 1, want, dx->count, s.o, add ? "dx added" : "dx");
    }
    free(want);
}

static void check_dw(struct kern *k, struct kern_matmul_shape s, const struct array *dy,
                     const struct array *x)
{
    uint64_t count = (uint64_t)s.o * s.i;
    double *want = malloc(count * sizeof *want);
    float *dw = kern_cuda_alloc(k, count * sizeof *dw);
    for (uint32_t o = 0; o < s.o; o++) {
        for (uint32_t i = 0; i < s.i; i++) {
            want[(uint64_t)o * s.i + i] = sum_of(dy->host + o, s.o, x->host + i, s.i, s.n);
        }
    }
    kern_cuda_matmul_dw(k, dw, dy->device, x->device, s, 0);
    check_near(k, dw, 0, want, count, s.n, "dw");
    kern_cuda_matmul_dw(k, dw, dy->device, x->device, s, 1);
    for (uint64_t i = 0; i < count; i++) {
        want[i] *= 2;
    }
    check_near(k, dw, 0, want, count, 4 * s.n, "dw added");
    kern_cuda_free(k, dw, count * sizeof *dw);
    free(want);
}

static void check_products(enum kern_type type)
{
    static const struct kern_matmul_shape shapes[] = {
        {1, 1, 1}, {5, 7, 3}, {64, 48, 32}, {33, 16, 101}, {3, 130, 8}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        struct kern_matmul_shape s = shapes[i];
        struct kern *k = open_device(type);
        assert_int_equal(kern_cuda_matmul_plan(k, &s, 1, NULL), 0);
        struct array x = array_of(k, (uint64_t)s.n * s.i, 1), w = array_of(k, s.o * s.i, 2);
        struct array dy = array_of(k, (uint64_t)s.n * s.o, 3), bias = array_of(k, s.o, 4);
        struct array y = array_of(k, dy.count, 5), dx = array_of(k, x.count, 6);
        check_forward(k, s, &x, &w, &bias, &y);
        check_dx(k, s, &dy, &w, &dx);
        check_dw(k, s, &dy, &x);
        struct array *all[] = {&x, &w, &dy, &bias, &y, &dx};
        for (size_t j = 0; j < sizeof all / sizeof *all; j++) {
            array_end(k, all[j]);
        }
        kern_cuda_close(k);
    }
}

static void test_products_in_bf16_are_those_of_their_arrays(void **state)
{
    (void)state;
    check_products(KERN_BF16);
}

static void test_products_in_fp32_are_those_of_their_arrays(void **state)
{
    (void)state;
    check_products(KERN_F32);
}

/* ---- the table ---- */

/* The stand-in lists split ones first, one of them against what was asked for. */
static void test_no_algorithm_that_splits_sums_is_taken(void **state)
{
    (void)state;
    const struct kern_matmul_shape shape = {64, 48, 32};
    struct kern *k = open_device(KERN_BF16);
    char line[256];
    uint32_t count = 0;
    assert_int_equal(kern_cuda_matmul_plan(k, &shape, 1, NULL), 0);
    for (; kern_cuda_matmul_line(kern_cuda_of(k), count, line, sizeof line) == 0; count++) {
        print_message("%s\n", line);
        assert_non_null(strstr(line, "n 64 i 48 o 32: algo "));
    }
    assert_int_equal(count, 4);
    /* By what it does: the stand-in adds the parts of a split sum in another order each time. */
    struct array x = array_of(k, 64 * 48, 1), dy = array_of(k, 64 * 32, 2);
    float *dw = kern_cuda_alloc(k, 48 * 32 * sizeof *dw), first[48 * 32], again[48 * 32];
    for (int i = 0; i < 8; i++) {
        kern_cuda_matmul_dw(k, dw, dy.device, x.device, shape, 0);
        kern_cuda_download(k, i == 0 ? first : again, dw, sizeof first);
        sync_good(k);
        assert_memory_equal(i == 0 ? first : again, first, sizeof first);
    }
    array_end(k, &x);
    array_end(k, &dy);
    kern_cuda_close(k);
}

/* The same for ranks that are given the same products, whatever they planned for themselves. */
static void test_build_name_follows_the_products_that_were_probed(void **state)
{
    (void)state;
    const struct kern_matmul_shape shapes[] = {{64, 48, 32}, {16, 16, 16}, {48, 64, 32}};
    const struct kern_matmul_shape turned[] = {{16, 16, 16}, {64, 48, 32}};
    char names[4][256];
    for (int i = 0; i < 4; i++) { /* two; the same two, others planned; one; fp32 */
        struct bl_errmsg msg = {{0}};
        uint64_t digest;
        struct kern *k = open_device(i == 3 ? KERN_F32 : KERN_BF16);
        assert_int_equal(kern_cuda_matmul_plan(k, shapes, i == 1 ? 3 : 0, NULL), 0);
        int rc = kern_cuda_probe(k, i == 1 ? turned : shapes, i == 2 ? 1 : 2, &digest, &msg);
        if (rc != 0) {
            fail_msg("%s", msg.text);
        }
        snprintf(names[i], sizeof names[i], "%s", kern_cuda_build_name(k));
        kern_cuda_close(k);
    }
    print_message("%s\n", names[0]);
    assert_string_equal(names[0], names[1]);
    assert_string_not_equal(names[0], names[2]);
    assert_string_not_equal(names[0], names[3]);
    assert_non_null(strstr(names[0], "sm_90 x132 bf16 driver "));
}

static void expect_error(struct kern *k, const char *text)
{
    struct bl_errmsg msg = {{0}};
    assert_int_equal(kern_cuda_sync(k, &msg), BL_EDEVICE);
    if (strstr(msg.text, text) == NULL) {
        fail_msg("'%s' says nothing of '%s'", msg.text, text);
    }
}

static void test_product_that_was_not_planned_is_refused(void **state)
{
    (void)state;
    const struct kern_matmul_shape shape = {8, 8, 8}, other = {8, 8, 16};
    struct kern *k = open_device(KERN_BF16);
    assert_int_equal(kern_cuda_matmul_plan(k, &shape, 1, NULL), 0);
    struct array x = array_of(k, 64, 1), w = array_of(k, 129, 2), y = array_of(k, 128, 3);
    kern_cuda_matmul_forward(k, y.device, x.device, w.device, NULL, other);
    expect_error(k, "forward 8,8,16: not planned");
    /* An odd place in w: the algorithm was chosen for rows of 16 bytes. */
    kern_cuda_matmul_forward(k, y.device, x.device, kern_real_at(k, w.device, 1), NULL, shape);
    expect_error(k, "forward 8,8,8: not aligned");
    /* The bias, too, which is read as wide. */
    kern_cuda_matmul_forward(k, y.device, x.device, w.device, kern_real_at(k, w.device, 1), shape);
    expect_error(k, "forward+bias 8,8,8: not aligned");
    array_end(k, &x);
    array_end(k, &w);
    array_end(k, &y);
    kern_cuda_close(k);
}

static void test_products_of_nothing_do_nothing(void **state)
{
    (void)state;
    const struct kern_matmul_shape none = {0, 4, 4};
    struct kern *k = open_device(KERN_F32);
    float *dw = kern_cuda_alloc(k, 64), got[16];
    memset(got, 1, sizeof got);
    assert_int_equal(kern_cuda_matmul_plan(k, &none, 1, NULL), 0);
    kern_cuda_upload(k, dw, got, sizeof got);
    kern_cuda_matmul_forward(k, NULL, NULL, (kern_real *)dw, NULL, none);
    kern_cuda_matmul_dx(k, NULL, NULL, (kern_real *)dw, none, 0);
    kern_cuda_matmul_dw(k, dw, NULL, NULL, none, 0);
    kern_cuda_download(k, got, dw, sizeof got);
    sync_good(k);
    for (int i = 0; i < 16; i++) {
        assert_true(got[i] == 0);
    }
    kern_cuda_close(k);
}

/* ---- the probe ---- */

static uint64_t probe_of(enum kern_type type, uint64_t seed, uint32_t count)
{
    const struct kern_matmul_shape shapes[] = {{1024, 40, 24}, {40, 24, 72}};
    struct bl_errmsg msg = {{0}};
    uint64_t digest = 0;
    struct kern *k = open_device(type);
    char line[256];
    gpusim_seed(seed);
    int rc = kern_cuda_probe(k, shapes, count, &digest, &msg);
    if (rc != 0) {
        fail_msg("%s", msg.text);
    }
    /* Its own plans, of parts, are gone again; those of the whole products stay. */
    assert_int_equal(kern_cuda_matmul_line(kern_cuda_of(k), 4 * count - 1, line, sizeof line), 0);
    assert_true(kern_cuda_matmul_line(kern_cuda_of(k), 4 * count, line, sizeof line) != 0);
    kern_cuda_close(k);
    gpusim_seed(0);
    return digest;
}

static void test_probe_is_one_number_in_every_order_of_threads(void **state)
{
    (void)state;
    uint64_t bf16 = probe_of(KERN_BF16, 0, 2), fp32 = probe_of(KERN_F32, 0, 2);
    assert_int_equal(bf16, probe_of(KERN_BF16, 3, 2));
    assert_int_equal(fp32, probe_of(KERN_F32, 4, 2));
    assert_int_not_equal(bf16, fp32);
    assert_int_not_equal(bf16, probe_of(KERN_BF16, 0, 1));
}

static void test_probe_of_a_device_that_fails_says_so(void **state)
{
    (void)state;
    struct bl_errmsg msg = {{0}};
    uint64_t digest = 5;
    struct kern *k = open_device(KERN_BF16);
    gpusim_fault_set("late@4");
    assert_int_equal(kern_cuda_probe(k, NULL, 0, &digest, &msg), BL_EDEVICE);
    assert_int_equal(digest, 5);
    assert_non_null(strstr(msg.text, "numeric probe: device 0"));
    kern_cuda_close(k);
    gpusim_revive();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_products_in_bf16_are_those_of_their_arrays),
        cmocka_unit_test(test_products_in_fp32_are_those_of_their_arrays),
        cmocka_unit_test(test_no_algorithm_that_splits_sums_is_taken),
        cmocka_unit_test(test_build_name_follows_the_products_that_were_probed),
        cmocka_unit_test(test_product_that_was_not_planned_is_refused),
        cmocka_unit_test(test_products_of_nothing_do_nothing),
        cmocka_unit_test(test_probe_is_one_number_in_every_order_of_threads),
        cmocka_unit_test(test_probe_of_a_device_that_fails_says_so),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
