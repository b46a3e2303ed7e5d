/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention on the simulated device against the CPU's: the path of plain multiply-adds in fp32 and
 * bf16, and the one on tensor cores, over odd lengths, groups of heads, queries that are only the
 * last positions, and scores far from 0; several orders of threads give the same bits.
 *
 * Bounds: the root mean square of the error and the largest, beside those of the CPU's result.
 * fp32: sums in another order and another exponential. bf16: p, ds and results are rounded to 8
 * bits, 2^-9 of an element, and ds is a difference.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/device.h"
#include "kernels/cuda/ops.h"
#include "kernels/kern.h"
#include "tests/gpusim/gpusim_control.h"

enum { Q, K, V, DOUT, OUT, DQ, DK, DV, ARRAYS };

static const char *const g_names[ARRAYS] = {"q", "k", "v", "dout", "out", "dq", "dk", "dv"};

static struct kern_cuda g_cuda;
static struct kern_attention_shape g_shape;
static size_t g_counts[ARRAYS], g_rows; /* elements; rows of stats */
static float *g_host[ARRAYS], *g_cpu[ARRAYS], *g_stats, *g_cpu_stats;
static float g_spread; /* of q: how far scores are from 0 */

/* ---- numbers ---- */

/* Uniform in -1 .. 1. */
static float number(uint64_t key, uint64_t i)
{
    return (float)(2.0 * kern_rng_uniform(key, i) - 1.0);
}

static uint16_t bf16_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float float_of(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* ---- memory ---- */

static void *device_new(const void *from, size_t bytes)
{
    void *p = NULL;
    assert_int_equal(cudaMalloc(&p, bytes), cudaSuccess);
    if (from != NULL) {
        assert_int_equal(cudaMemcpy(p, from, bytes, cudaMemcpyHostToDevice), cudaSuccess);
    } else {
        assert_int_equal(cudaMemset(p, 0xff, bytes),
                         cudaSuccess); /* NaN where nothing is written */
    }
    return p;
}

static void device_take(void *host, void *p, size_t bytes)
{
    assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);
    assert_int_equal(cudaMemcpy(host, p, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
    assert_int_equal(cudaFree(p), cudaSuccess);
}

/* An array of the storage type on the device. */
static void *real_new(const float *from, size_t count)
{
    if (g_cuda.base.type == KERN_F32 || from == NULL) {
        return device_new(from, count * g_cuda.base.real_bytes);
    }
    uint16_t *bits = malloc(count * sizeof *bits);
    for (size_t i = 0; i < count; i++) {
        bits[i] = bf16_of(from[i]);
    }
    void *p = device_new(bits, count * sizeof *bits);
    free(bits);
    return p;
}

static void real_take(float *to, void *p, size_t count)
{
    if (g_cuda.base.type == KERN_F32) {
        device_take(to, p, count * sizeof *to);
        return;
    }
    uint16_t *bits = malloc(count * sizeof *bits);
    device_take(bits, p, count * sizeof *bits);
    for (size_t i = 0; i < count; i++) {
        to[i] = float_of(bits[i]);
    }
    free(bits);
}

/* ---- one case ---- */

static void case_start(enum kern_type type, struct kern_attention_shape shape)
{
    g_shape = shape;
    memset(&g_cuda, 0, sizeof g_cuda);
    g_cuda.base.type = type;
    g_cuda.base.real_bytes = type == KERN_BF16 ? 2 : 4;
    g_cuda.base.is_device = 1;
    g_rows = (size_t)shape.batch * shape.heads * shape.q_len;
    size_t q = g_rows * shape.head_dim;
    size_t k = (size_t)shape.batch * shape.kv_heads * shape.kv_len * shape.head_dim;
    g_stats = malloc(2 * g_rows * sizeof *g_stats);
    g_cpu_stats = malloc(2 * g_rows * sizeof *g_stats);
    for (int a = 0; a < ARRAYS; a++) {
        g_counts[a] = a == K || a == V || a == DK || a == DV ? k : q;
        g_host[a] = malloc(g_counts[a] * sizeof(float));
        g_cpu[a] = malloc(g_counts[a] * sizeof(float));
        for (size_t i = 0; a <= DOUT && i < g_counts[a]; i++) {
            float x = number((uint64_t)a + 1, i) * (a == Q ? g_spread : 1.0f);
            g_host[a][i] = type == KERN_BF16 ? float_of(bf16_of(x)) : x;
        }
    }
}

static void case_end(void)
{
    for (int a = 0; a < ARRAYS; a++) {
        free(g_host[a]);
        free(g_cpu[a]);
    }
    free(g_stats);
    free(g_cpu_stats);
}

static void run_device(int backward)
{
    void *d[ARRAYS];
    for (int a = 0; a < ARRAYS; a++) {
        d[a] = real_new(a <= DOUT ? g_host[a] : NULL, g_counts[a]);
    }
    struct kern *k = &g_cuda.base;
    void *stats = device_new(NULL, 2 * g_rows * sizeof(float));
    void *scratch = device_new(NULL, kern_cuda_attention_scratch(k, &g_shape));
    kern_cuda_attention_forward(k, d[OUT], stats, d[Q], d[K], d[V], scratch, &g_shape);
    if (backward) {
        kern_cuda_attention_backward(k, d[DQ], d[DK], d[DV], d[DOUT], d[OUT], stats, d[Q], d[K],
                                     d[V], scratch, &g_shape);
    }
    for (int a = 0; a < ARRAYS; a++) {
        real_take(g_host[a], d[a], g_counts[a]);
    }
    device_take(g_stats, stats, 2 * g_rows * sizeof(float));
    assert_int_equal(cudaFree(scratch), cudaSuccess);
    assert_int_equal(g_cuda.failed, cudaSuccess);
}

static void run_cpu(int backward)
{
    float *scratch = malloc(kern_attention_scratch(&g_shape, 1) * sizeof *scratch);
    kern_attention_forward(NULL, g_cpu[OUT], g_cpu_stats, g_host[Q], g_host[K], g_host[V], scratch,
                           &g_shape);
    if (backward) {
        kern_attention_backward(NULL, g_cpu[DQ], g_cpu[DK], g_cpu[DV], g_host[DOUT], g_cpu[OUT],
                                g_cpu_stats, g_host[Q], g_host[K], g_host[V], scratch, &g_shape);
    }
    free(scratch);
}

/* Root mean square within rms of that of `want`, each within most of the largest. */
static void check_close(const char *name, const float *got, const float *want, size_t count,
                        double rms, double most)
{
    double errors = 0.0, squares = 0.0, worst = 0.0, top = 0.0;
    for (size_t i = 0; i < count; i++) {
        double error = (double)got[i] - (double)want[i];
        if (!isfinite(error)) {
            fail_msg("%s[%zu] is %g, not %g", name, i, (double)got[i], (double)want[i]);
        }
        errors += error * error;
        squares += (double)want[i] * (double)want[i];
        worst = fmax(worst, fabs(error));
        top = fmax(top, fabs((double)want[i]));
    }
    double is = sqrt(errors / (squares + 1e-30));
    if (getenv("BELAY_TEST_VERBOSE") != NULL) {
        print_message("  %-6s rms %.2e of %.0e, largest %.2e of %.0e\n", name, is, rms,
                      worst / (top + 1e-30), most);
    }
    if (is > rms || worst > most * top) {
        fail_msg("%s: error %g of its root mean square (bound %g), largest %g of %g (bound %g)",
                 name, is, rms, worst, top, most);
    }
}

static void check_case(enum kern_type type, struct kern_attention_shape shape, int backward)
{
    if (getenv("BELAY_TEST_VERBOSE") != NULL) {
        print_message("%s %u x %u of %u, heads %u of %u, D %u\n",
                      type == KERN_BF16 ? "bf16" : "fp32", shape.batch, shape.q_len, shape.kv_len,
                      shape.heads, shape.kv_heads, shape.head_dim);
    }
    case_start(type, shape);
    run_device(backward);
    run_cpu(backward);
    double rms = type == KERN_BF16 ? 4e-3 : 2e-6, most = type == KERN_BF16 ? 8e-3 : 1e-5;
    for (int a = OUT; a < (backward ? ARRAYS : OUT + 1); a++) {
        check_close(g_names[a], g_host[a], g_cpu[a], g_counts[a], rms, most);
    }
    check_close("stats", g_stats, g_cpu_stats, 2 * g_rows, 1e-5, 1e-5);
    case_end();
}

/* ---- tests ---- */

static void test_fp32_is_the_cpus(void **state)
{
    (void)state;
    check_case(KERN_F32, (struct kern_attention_shape){2, 11, 11, 4, 2, 6}, 1);
    check_case(KERN_F32, (struct kern_attention_shape){1, 67, 67, 2, 1, 40}, 1);
    check_case(KERN_F32, (struct kern_attention_shape){1, 33, 33, 2, 2, 66}, 1);
    check_case(KERN_F32, (struct kern_attention_shape){1, 19, 19, 1, 1, 256}, 1);
    check_case(KERN_F32, (struct kern_attention_shape){1, 21, 21, 3, 1, 5}, 1);
    check_case(KERN_F32, (struct kern_attention_shape){1, 1, 1, 1, 1, 2}, 1);
}

static void test_bf16_of_other_head_sizes_is_the_cpus(void **state)
{
    (void)state;
    check_case(KERN_BF16, (struct kern_attention_shape){1, 45, 45, 2, 1, 80}, 1);
    check_case(KERN_BF16, (struct kern_attention_shape){1, 18, 18, 1, 1, 130}, 1);
}

static void test_tensor_cores_give_the_cpus(void **state)
{
    (void)state;
    check_case(KERN_BF16, (struct kern_attention_shape){2, 75, 75, 2, 1, 64}, 1);
    check_case(KERN_BF16, (struct kern_attention_shape){1, 64, 64, 1, 1, 64}, 1);
    check_case(KERN_BF16, (struct kern_attention_shape){1, 133, 133, 1, 1, 32}, 1);
    check_case(KERN_BF16, (struct kern_attention_shape){1, 67, 67, 1, 1, 96}, 1);
    check_case(KERN_BF16, (struct kern_attention_shape){1, 79, 79, 3, 1, 128}, 1);
    check_case(KERN_BF16, (struct kern_attention_shape){1, 65, 65, 1, 1, 256}, 1);
    check_case(KERN_BF16, (struct kern_attention_shape){1, 1, 1, 1, 1, 64}, 1);
}

static void test_queries_may_be_the_last_positions_only(void **state)
{
    (void)state;
    check_case(KERN_F32, (struct kern_attention_shape){1, 1, 39, 6, 3, 8}, 1);
    check_case(KERN_F32, (struct kern_attention_shape){2, 35, 70, 2, 2, 64}, 1);
    check_case(KERN_BF16, (struct kern_attention_shape){1, 1, 77, 2, 1, 64}, 1);
    check_case(KERN_BF16, (struct kern_attention_shape){2, 37, 101, 2, 1, 64}, 1);
    check_case(KERN_BF16, (struct kern_attention_shape){1, 66, 130, 1, 1, 128}, 0);
}

/* Largest scores of some 40: exponentials of what is far below are 0, of the largest 1. */
static void test_large_scores_do_not_overflow(void **state)
{
    (void)state;
    g_spread = 100.0f;
    check_case(KERN_F32, (struct kern_attention_shape){1, 50, 50, 1, 1, 64}, 0);
    check_case(KERN_BF16, (struct kern_attention_shape){1, 70, 70, 1, 1, 64}, 0);
    g_spread = 1.0f;
}

static void check_orders(enum kern_type type, struct kern_attention_shape shape)
{
    case_start(type, shape);
    float *first[ARRAYS];
    for (uint64_t seed = 0; seed < 4; seed++) {
        gpusim_seed(seed);
        run_device(1);
        for (int a = OUT; a < ARRAYS; a++) {
            size_t bytes = g_counts[a] * sizeof(float);
            if (seed == 0) {
                first[a] = malloc(bytes);
                memcpy(first[a], g_host[a], bytes);
            } else if (memcmp(first[a], g_host[a], bytes) != 0) {
                fail_msg("%s: other bits with the thread order of seed %llu", g_names[a],
                         (unsigned long long)seed);
            }
        }
    }
    gpusim_seed(0);
    for (int a = OUT; a < ARRAYS; a++) {
        free(first[a]);
    }
    case_end();
}

static void test_bits_do_not_depend_on_the_order_of_threads(void **state)
{
    (void)state;
    check_orders(KERN_F32, (struct kern_attention_shape){1, 43, 43, 2, 1, 34});
    check_orders(KERN_BF16, (struct kern_attention_shape){1, 70, 70, 2, 1, 64});
    /* More than two tiles of keys: a buffer is filled again. */
    check_orders(KERN_BF16, (struct kern_attention_shape){1, 20, 220, 1, 1, 32});
    check_orders(KERN_BF16, (struct kern_attention_shape){1, 35, 35, 1, 1, 128});
}

static void test_heads_too_large_are_an_error(void **state)
{
    (void)state;
    case_start(KERN_F32, (struct kern_attention_shape){1, 2, 2, 1, 1, 258});
    kern_cuda_attention_forward(&g_cuda.base, NULL, NULL, NULL, NULL, NULL, NULL, &g_shape);
    assert_int_equal(g_cuda.failed, cudaErrorInvalidValue);
    assert_non_null(strstr(g_cuda.failed_in, "more than 256"));
    case_end();
}

int main(void)
{
    g_spread = 1.0f;
    assert_int_equal(kern_start(NULL), 0);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fp32_is_the_cpus),
        cmocka_unit_test(test_bf16_of_other_head_sizes_is_the_cpus),
        cmocka_unit_test(test_tensor_cores_give_the_cpus),
        cmocka_unit_test(test_queries_may_be_the_last_positions_only),
        cmocka_unit_test(test_large_scores_do_not_overflow),
        cmocka_unit_test(test_bits_do_not_depend_on_the_order_of_threads),
        cmocka_unit_test(test_heads_too_large_are_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
