/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Each operation's forward against the same formula in fp64, and its backward against central
 * differences of that formula: with random weights r, d(sum r out)/d(input) must be what backward
 * makes of dout = r.
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

#define ELEMS 8192

static struct kern_pool *g_pool;
static float g_in[4][ELEMS], g_out[ELEMS], g_r[ELEMS], g_d[4][ELEMS], g_stats[ELEMS];
static double g_in64[4][ELEMS], g_out64[ELEMS];

/* fp64 forward: g_in64 to g_out64. */
typedef void forward64_fn(void);

static void fill(double stddev)
{
    for (uint64_t k = 0; k < 4; k++) {
        kern_rng_normal(NULL, g_in[k], 10 + k, 0, ELEMS, stddev);
        kern_rng_normal(NULL, g_d[k], 20 + k, 0, ELEMS, 1.0);
        for (size_t i = 0; i < ELEMS; i++) {
            g_in64[k][i] = (double)g_in[k][i];
        }
    }
    kern_rng_normal(NULL, g_r, 30, 0, ELEMS, 1.0);
}

static void check_forward(forward64_fn *forward, size_t count)
{
    forward();
    for (size_t i = 0; i < count; i++) {
        assert_true(fabs((double)g_out[i] - g_out64[i]) <= 2e-6 + 4e-6 * fabs(g_out64[i]));
    }
}

static double weighed(forward64_fn *forward, size_t count)
{
    double sum = 0;
    forward();
    for (size_t i = 0; i < count; i++) {
        sum += (double)g_r[i] * g_out64[i];
    }
    return sum;
}

/* Input k, `count_in` of its elements from `first`, against gradient `d`. */
static void check_backward(forward64_fn *forward, size_t count_out, int k, size_t count_in,
                           const float *d)
{
    for (size_t i = 0; i < count_in; i++) {
        double keep = g_in64[k][i], h = 1e-5;
        g_in64[k][i] = keep + h;
        double above = weighed(forward, count_out);
        g_in64[k][i] = keep - h;
        double below = weighed(forward, count_out);
        g_in64[k][i] = keep;
        double gradient = (above - below) / (2 * h);
        assert_true(fabs((double)d[i] - gradient) <= 2e-5 + 2e-5 * fabs(gradient));
    }
}

/* ---- embedding: V 11, C 77 (crosses a column block), N 13 ---- */

enum { EV = 11, EC = 77, EN = 13 };
static const int32_t TOKENS[EN] = {3, 1, 3, 0, 10, 10, 3, 5, 2, 8, 8, 1, 4};

static void embedding64(void)
{
    for (int n = 0; n < EN; n++) {
        memcpy(g_out64 + n * EC, g_in64[0] + TOKENS[n] * EC, EC * sizeof(double));
    }
}

static void test_embedding(void **state)
{
    (void)state;
    fill(1.0);
    kern_embedding_forward(g_pool, g_out, TOKENS, g_in[0], EN, EC);
    check_forward(embedding64, EN * EC);
    kern_embedding_backward(g_pool, g_d[0], g_r, TOKENS, EN, EC, EV, 0);
    check_backward(embedding64, EN * EC, 0, EV * EC, g_d[0]);
    memcpy(g_d[1], g_d[0], sizeof g_d[1]);
    kern_embedding_backward(g_pool, g_d[1], g_r, TOKENS, EN, EC, EV, 1);
    for (int i = 0; i < EV * EC; i++) {
        assert_true(fabsf(g_d[1][i] - 2 * g_d[0][i]) < 1e-5f);
    }
}

/* ---- RMSNorm: N 9, C 75 ---- */

enum { NN = 9, NC = 75 };

static void rmsnorm64(void)
{
    for (int n = 0; n < NN; n++) {
        double mean = 0;
        for (int i = 0; i < NC; i++) {
            mean += g_in64[0][n * NC + i] * g_in64[0][n * NC + i] / NC;
        }
        for (int i = 0; i < NC; i++) {
            g_out64[n * NC + i] = g_in64[0][n * NC + i] / sqrt(mean + (double)1e-5f) * g_in64[1][i];
        }
    }
}

static void test_rmsnorm(void **state)
{
    (void)state;
    fill(1.0);
    kern_rmsnorm_forward(g_pool, g_out, g_stats, g_in[0], g_in[1], NN, NC, 1e-5f);
    check_forward(rmsnorm64, NN * NC);
    memset(g_d[0], 0, sizeof g_d[0]);
    kern_rmsnorm_backward(g_pool, g_d[0], g_d[1], g_r, g_in[0], g_in[1], g_stats, NN, NC, 0);
    check_backward(rmsnorm64, NN * NC, 0, NN * NC, g_d[0]);
    check_backward(rmsnorm64, NN * NC, 1, NC, g_d[1]);
    /* dx is added to, dweight when asked. */
    memcpy(g_d[2], g_d[0], sizeof g_d[2]);
    memcpy(g_d[3], g_d[1], sizeof g_d[3]);
    kern_rmsnorm_backward(g_pool, g_d[2], g_d[3], g_r, g_in[0], g_in[1], g_stats, NN, NC, 1);
    for (int i = 0; i < NN * NC; i++) {
        assert_true(g_d[2][i] == 2 * g_d[0][i]);
    }
    for (int i = 0; i < NC; i++) {
        assert_true(g_d[3][i] == 2 * g_d[1][i]);
    }
}

/* ---- LayerNorm: the same shape, inputs 0 x, 1 weight, 2 bias ---- */

static int g_has_bias;

static void layernorm64(void)
{
    for (int n = 0; n < NN; n++) {
        const double *x = g_in64[0] + n * NC;
        double mean = 0, var = 0;
        for (int i = 0; i < NC; i++) {
            mean += x[i] / NC;
        }
        for (int i = 0; i < NC; i++) {
            var += (x[i] - mean) * (x[i] - mean) / NC;
        }
        for (int i = 0; i < NC; i++) {
            g_out64[n * NC + i] = (x[i] - mean) / sqrt(var + (double)1e-5f) * g_in64[1][i] +
                                  (g_has_bias ? g_in64[2][i] : 0);
        }
    }
}

static void check_layernorm(int has_bias)
{
    const float *bias = has_bias ? g_in[2] : NULL;
    float *dbias = has_bias ? g_d[2] : NULL, *mean = g_stats, *rstd = g_stats + NN;
    g_has_bias = has_bias;
    fill(1.0);
    for (int i = 0; i < NN * NC; i++) { /* a mean that is not near 0 */
        g_in[0][i] += 3.0f;
        g_in64[0][i] = (double)g_in[0][i];
    }
    kern_layernorm_forward(g_pool, g_out, mean, rstd, g_in[0], g_in[1], bias, NN, NC, 1e-5f);
    check_forward(layernorm64, NN * NC);
    memset(g_d[0], 0, sizeof g_d[0]);
    kern_layernorm_backward(g_pool, g_d[0], g_d[1], dbias, g_r, g_in[0], g_in[1], mean, rstd, NN,
                            NC, 0);
    check_backward(layernorm64, NN * NC, 0, NN * NC, g_d[0]);
    check_backward(layernorm64, NN * NC, 1, NC, g_d[1]);
    if (has_bias) {
        check_backward(layernorm64, NN * NC, 2, NC, g_d[2]);
    }
    memcpy(g_out, g_d[1], sizeof g_out);
    kern_layernorm_backward(g_pool, g_d[0], g_d[1], dbias, g_r, g_in[0], g_in[1], mean, rstd, NN,
                            NC, 1);
    for (int i = 0; i < NC; i++) {
        assert_true(g_d[1][i] == 2 * g_out[i]);
    }
}

static void test_layernorm(void **state)
{
    (void)state;
    check_layernorm(1);
    check_layernorm(0);
}

/* ---- biases and positions: B 3, T 5, rows 8, C 77 ---- */

enum { PB = 3, PT = 5, PROWS = 8, PC = 77, PN = PB * PT };

static void position64(void)
{
    for (int n = 0; n < PN; n++) {
        for (int i = 0; i < PC; i++) {
            g_out64[n * PC + i] = g_in64[0][n * PC + i] + g_in64[1][n % PT * PC + i];
        }
    }
}

static void bias64(void)
{
    for (int i = 0; i < PN * PC; i++) {
        g_out64[i] = g_in64[0][i] + g_in64[1][i % PC];
    }
}

static void test_bias_and_positions(void **state)
{
    (void)state;
    fill(1.0);
    memcpy(g_out, g_in[0], sizeof g_out);
    kern_bias_forward(g_pool, g_out, g_in[1], PN, PC);
    check_forward(bias64, PN * PC);
    kern_bias_backward(g_pool, g_d[1], g_r, PN, PC, 0);
    check_backward(bias64, PN * PC, 1, PC, g_d[1]);

    memcpy(g_out, g_in[0], sizeof g_out);
    kern_position_forward(g_pool, g_out, g_in[1], PN, PC, PT, 0);
    check_forward(position64, PN * PC);
    kern_position_backward(g_pool, g_d[1], g_r, PN, PC, PT, PROWS, 0);
    check_backward(position64, PN * PC, 1, PROWS * PC, g_d[1]);
    memcpy(g_d[2], g_d[1], sizeof g_d[2]);
    kern_position_backward(g_pool, g_d[2], g_r, PN, PC, PT, PROWS, 1);
    for (int i = 0; i < PROWS * PC; i++) {
        assert_true(fabsf(g_d[2][i] - 2 * g_d[1][i]) < 1e-5f);
    }
    /* One row at a position is that row of the whole. */
    memcpy(g_d[0], g_in[0] + 3 * PC, PC * sizeof(float));
    kern_position_forward(g_pool, g_d[0], g_in[1], 1, PC, 1, 3);
    assert_memory_equal(g_d[0], g_out + 3 * PC, PC * sizeof(float));
}

/* ---- rotary positions: B 2, T 7, H 3, D 10 ---- */

enum { RB = 2, RT = 7, RH = 3, RD = 10 };

static void rope64(void)
{
    for (int row = 0; row < RB * RT * RH; row++) {
        int t = row / RH % RT;
        for (int i = 0; i < RD / 2; i++) {
            double angle = t * pow(500.0, -2.0 * i / RD);
            double a = g_in64[0][row * RD + i], b = g_in64[0][row * RD + i + RD / 2];
            g_out64[row * RD + i] = a * cos(angle) - b * sin(angle);
            g_out64[row * RD + i + RD / 2] = b * cos(angle) + a * sin(angle);
        }
    }
}

static void test_rope(void **state)
{
    (void)state;
    enum { ROWS = RB * RT, COUNT = ROWS * RH * RD };
    float table[(RT + 5) * RD], one[RH * RD];
    fill(1.0);
    kern_rope_table(table, RT + 5, RD, 500.0, NULL);
    memcpy(g_out, g_in[0], sizeof g_out);
    kern_rope_forward(g_pool, g_out, table, ROWS, RT, RH, RD, 0);
    check_forward(rope64, COUNT);
    memcpy(g_d[0], g_r, sizeof g_d[0]);
    kern_rope_backward(g_pool, g_d[0], table, ROWS, RT, RH, RD);
    check_backward(rope64, COUNT, 0, COUNT, g_d[0]);
    /* One row at a position is that row of the whole. */
    memcpy(one, g_in[0] + 4 * RH * RD, sizeof one);
    kern_rope_forward(g_pool, one, table, 1, 1, RH, RD, 4);
    assert_memory_equal(one, g_out + 4 * RH * RD, sizeof one);
}

/* Frequencies of theta 500 over 10 dimensions: 1, .288, .083, .024, .0069; with a context of 100
 * their wavelengths are 6.3, 22, 75, 261, 906. */
static void test_rope_scaling(void **state)
{
    (void)state;
    const struct kern_rope_scaling scaling = {8.0, 1.0, 4.0, 100}, none = {1.0, 1.0, 4.0, 100};
    float plain[2 * RD], same[2 * RD], table[2 * RD];
    kern_rope_table(plain, 2, RD, 500.0, NULL);
    kern_rope_table(same, 2, RD, 500.0, &none);
    kern_rope_table(table, 2, RD, 500.0, &scaling);
    assert_memory_equal(plain, same, sizeof plain);
    for (int i = 0; i < RD / 2; i++) {
        double f = pow(500.0, -2.0 * i / RD), wave = 2 * M_PI / f;
        double s = (100 / wave - 1) / 3;
        double want = wave < 25 ? f : wave > 100 ? f / 8 : (1 - s) * f / 8 + s * f;
        assert_true(fabs((double)table[RD + i] - cos(want)) < 1e-7);
        assert_true(fabs((double)table[RD + RD / 2 + i] - sin(want)) < 1e-7);
        assert_int_equal(plain[RD + RD / 2 + i] == table[RD + RD / 2 + i], i < 2);
    }
}

/* ---- SwiGLU ---- */

enum { SN = 203 };

static void swiglu64(void)
{
    for (int i = 0; i < SN; i++) {
        double gate = g_in64[0][i];
        g_out64[i] = gate / (1 + exp(-gate)) * g_in64[1][i];
    }
}

static void test_swiglu(void **state)
{
    (void)state;
    fill(3.0);
    kern_swiglu_forward(g_pool, g_out, g_in[0], g_in[1], SN);
    check_forward(swiglu64, SN);
    kern_swiglu_backward(g_pool, g_d[0], g_d[1], g_r, g_in[0], g_in[1], SN);
    check_backward(swiglu64, SN, 0, SN, g_d[0]);
    check_backward(swiglu64, SN, 1, SN, g_d[1]);
    const float far[4] = {-200.0f, 200.0f, -88.5f, 0.0f}, up[4] = {1, 1, 1, 1};
    kern_swiglu_forward(g_pool, g_out, far, up, 4);
    assert_true(fabsf(g_out[0]) < 1e-30f && g_out[1] == 200.0f && g_out[3] == 0.0f);
}

/* ---- GELU ---- */

static void gelu64(void)
{
    for (int i = 0; i < SN; i++) {
        double x = g_in64[0][i];
        g_out64[i] = x / 2 * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    }
}

static void test_gelu(void **state)
{
    (void)state;
    fill(2.0);
    kern_gelu_forward(g_pool, g_out, g_in[0], SN);
    check_forward(gelu64, SN);
    kern_gelu_backward(g_pool, g_d[0], g_r, g_in[0], SN);
    check_backward(gelu64, SN, 0, SN, g_d[0]);
    const float far[4] = {-200.0f, 200.0f, -12.5f, 0.0f};
    kern_gelu_forward(g_pool, g_out, far, 4);
    assert_true(fabsf(g_out[0]) < 1e-30f && g_out[1] == 200.0f && g_out[3] == 0.0f);
}

/* ---- cross-entropy: N 5, V 43; row 2 ignored ---- */

enum { XN = 5, XV = 43 };
static const int32_t TARGETS[XN] = {4, 42, -1, 0, 17};

static void cross_entropy64(void)
{
    for (int n = 0; n < XN; n++) {
        double sum = 0;
        for (int i = 0; i < XV; i++) {
            sum += exp(g_in64[0][n * XV + i]);
        }
        g_out64[n] = TARGETS[n] < 0 ? 0 : log(sum) - g_in64[0][n * XV + TARGETS[n]];
    }
}

static void test_cross_entropy(void **state)
{
    (void)state;
    double losses[XN], sum, again;
    uint64_t count;
    fill(2.0);
    for (int n = 0; n < XN; n++) {
        g_r[n] = 1.0f; /* the constant seed */
    }
    memcpy(g_d[0], g_in[0], sizeof g_d[0]);
    again = kern_cross_entropy(g_pool, g_d[0], losses, TARGETS, XN, XV, 0, &count);
    assert_memory_equal(g_d[0], g_in[0], sizeof g_d[0]);
    sum = kern_cross_entropy(g_pool, g_d[0], losses, TARGETS, XN, XV, 1, &count);
    assert_true(count == 4 && sum == again);
    for (int n = 0; n < XN; n++) {
        g_out[n] = (float)losses[n];
    }
    check_forward(cross_entropy64, XN);
    check_backward(cross_entropy64, XN, 0, XN * XV, g_d[0]);
}

/* Wherever in the row it is, evaluation shows it too: it reads nothing but losses. */
static void test_cross_entropy_of_a_nan_is_nan(void **state)
{
    (void)state;
    double losses[XN];
    uint64_t count;
    fill(2.0);
    for (int at = 0; at < XV; at++) {
        memcpy(g_d[0], g_in[0], sizeof g_d[0]);
        g_d[0][at] = NAN;
        double sum = kern_cross_entropy(g_pool, g_d[0], losses, TARGETS, XN, XV, 0, &count);
        assert_true(isnan(sum) && isnan(losses[0]) && isfinite(losses[1]));
    }
}

/* ---- attention: odd lengths; more than a block of 64 queries in the second shape ---- */

static struct kern_attention_shape g_shape;

static void attention64_row(double *out, const double *q, const double *k, const double *v,
                            uint32_t keys)
{
    uint32_t d = g_shape.head_dim, stride = g_shape.kv_heads * d;
    double sum = 0, p[128];
    for (uint32_t j = 0; j < keys; j++) {
        double s = 0;
        for (uint32_t i = 0; i < d; i++) {
            s += q[i] * k[j * stride + i];
        }
        p[j] = exp(s / sqrt(d));
        sum += p[j];
    }
    for (uint32_t i = 0; i < d; i++) {
        out[i] = 0;
        for (uint32_t j = 0; j < keys; j++) {
            out[i] += p[j] / sum * v[j * stride + i];
        }
    }
}

static void attention64(void)
{
    uint32_t d = g_shape.head_dim, group = g_shape.heads / g_shape.kv_heads;
    for (uint32_t b = 0; b < g_shape.batch; b++) {
        for (uint32_t t = 0; t < g_shape.q_len; t++) {
            for (uint32_t h = 0; h < g_shape.heads; h++) {
                size_t q = ((b * g_shape.q_len + t) * g_shape.heads + h) * d;
                size_t k = (b * g_shape.kv_len * g_shape.kv_heads + h / group) * d;
                attention64_row(g_out64 + q, g_in64[0] + q, g_in64[1] + k, g_in64[2] + k,
                                g_shape.kv_len - g_shape.q_len + t + 1);
            }
        }
    }
}

static void check_attention(int differences)
{
    size_t nq = (size_t)g_shape.batch * g_shape.q_len * g_shape.heads * g_shape.head_dim;
    size_t nk = (size_t)g_shape.batch * g_shape.kv_len * g_shape.kv_heads * g_shape.head_dim;
    float *scratch = malloc(kern_attention_scratch(&g_shape, 3) * sizeof *scratch);
    assert_true(scratch != NULL && nq <= ELEMS && nk <= ELEMS);
    fill(1.0);
    kern_attention_forward(g_pool, g_out, g_stats, g_in[0], g_in[1], g_in[2], scratch, &g_shape);
    check_forward(attention64, nq);
    if (differences) {
        kern_attention_backward(g_pool, g_d[0], g_d[1], g_d[2], g_r, g_out, g_stats, g_in[0],
                                g_in[1], g_in[2], scratch, &g_shape);
        check_backward(attention64, nq, 0, nq, g_d[0]);
        check_backward(attention64, nq, 1, nk, g_d[1]);
        check_backward(attention64, nq, 2, nk, g_d[2]);
    }
    free(scratch);
}

static void test_attention(void **state)
{
    (void)state;
    g_shape = (struct kern_attention_shape){2, 11, 11, 4, 2, 6};
    check_attention(1);
    g_shape = (struct kern_attention_shape){1, 67, 67, 2, 1, 4};
    check_attention(1);
    g_shape = (struct kern_attention_shape){1, 1, 19, 6, 3, 8};
    check_attention(0);
    g_shape = (struct kern_attention_shape){1, 70, 90, 2, 2, 10};
    check_attention(0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_embedding),     cmocka_unit_test(test_rmsnorm),
        cmocka_unit_test(test_layernorm),     cmocka_unit_test(test_bias_and_positions),
        cmocka_unit_test(test_gelu),          cmocka_unit_test(test_rope),
        cmocka_unit_test(test_rope_scaling),  cmocka_unit_test(test_swiglu),
        cmocka_unit_test(test_cross_entropy), cmocka_unit_test(test_cross_entropy_of_a_nan_is_nan),
        cmocka_unit_test(test_attention),
    };
    if (kern_pool_new(&g_pool, 3, NULL) < 0) {
        return 1;
    }
    int failed = cmocka_run_group_tests_name("kernels/ops", tests, NULL, NULL);
    kern_pool_free(g_pool);
    return failed;
}
