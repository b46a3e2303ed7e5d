/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What tensor-parallel ranks do of embedding and cross-entropy: slices put together are the whole,
 * in fp64's eyes and, for one slice, bit for bit.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#include "kernels/kern.h"

#define RANKS_MAX 4

static struct kern_pool *g_pool;

/* ---- embedding: V 11, C 77 (crosses a column block), N 13 ---- */

enum { EV = 11, EC = 77, EN = 13 };
static const int32_t TOKENS[EN] = {3, 1, 3, 0, 10, 10, 3, 5, 2, 8, 8, 1, 4};

struct table {
    float rows[EV * EC + 1]; /* and one behind, which must stay */
};

static void test_embedding_slices_are_the_whole(void **state)
{
    (void)state;
    static const uint32_t cut[] = {0, 3, 3, 9, EV};
    static float dout[EN * EC], whole[EN * EC], sum[EN * EC], part[EN * EC];
    static struct table weight, want[2], got;
    kern_rng_normal(NULL, weight.rows, 10, 0, EV * EC, 1.0);
    kern_rng_normal(NULL, dout, 11, 0, EN * EC, 1.0);
    kern_rng_normal(NULL, want[1].rows, 12, 0, EV * EC, 1.0);
    kern_embedding_forward(g_pool, whole, TOKENS, weight.rows, EN, EC);
    for (int add = 0; add < 2; add++) {
        kern_embedding_backward(g_pool, want[add].rows, dout, TOKENS, EN, EC, EV, add);
    }
    for (size_t r = 0; r + 1 < sizeof cut / sizeof *cut; r++) {
        uint32_t lo = cut[r], hi = cut[r + 1], elems = (hi - lo) * EC;
        kern_embedding_slice_forward(g_pool, part, TOKENS, weight.rows + lo * EC, EN, EC, lo, hi);
        for (int i = 0; i < EN * EC; i++) {
            assert_true(part[i] == 0.0f || sum[i] == 0.0f);
            sum[i] += part[i];
        }
        for (int add = 0; add < 2; add++) {
            kern_rng_normal(NULL, got.rows, 12, lo * EC, elems, 1.0);
            got.rows[elems] = 7.0f;
            kern_embedding_slice_backward(g_pool, got.rows, dout, TOKENS, EN, EC, lo, hi, add);
            assert_memory_equal(got.rows, want[add].rows + lo * EC, elems * sizeof(float));
            assert_true(got.rows[elems] == 7.0f);
        }
    }
    assert_memory_equal(sum, whole, sizeof sum);
}

/* ---- cross-entropy: N 5, row 2 ignored ---- */

enum { XN = 5, XV = 4103 }; /* over a block's border, and a part of a vector */
static const int32_t TARGETS[XN] = {4, XV - 1, -1, 0, 2052};
static float g_logits[XN * XV], g_grad[XN * XV];
static double g_losses[XN];

/* What `ranks` ranks of ceil(v / ranks) columns make of g_logits[XN,v]: g_grad and g_losses; the
 * sum of the losses. */
static double in_slices(const int32_t *targets, uint32_t v, uint32_t ranks, int backward)
{
    static float part[RANKS_MAX][XN * XV];
    float tops[RANKS_MAX][XN];
    double sums[RANKS_MAX][2 * XN], result = 0;
    uint32_t per = (v + ranks - 1) / ranks, lo[RANKS_MAX + 1];
    uint64_t count;
    for (uint32_t r = 0; r <= ranks; r++) {
        lo[r] = r * per < v ? r * per : v;
    }
    for (uint32_t r = 0; r < ranks; r++) {
        uint32_t columns = lo[r + 1] - lo[r];
        for (uint32_t n = 0; n < XN; n++) {
            memcpy(part[r] + n * columns, g_logits + n * v + lo[r], columns * sizeof(float));
        }
        kern_cross_entropy_top(g_pool, tops[r], part[r], targets, XN, columns);
        for (int n = 0; n < XN; n++) {
            tops[0][n] = tops[r][n] > tops[0][n] ? tops[r][n] : tops[0][n];
        }
    }
    for (uint32_t r = 0; r < ranks; r++) {
        kern_cross_entropy_sum(g_pool, sums[r], part[r], tops[0], targets, XN, lo[r],
                               lo[r + 1] - lo[r], backward);
        for (int i = 0; r > 0 && i < 2 * XN; i++) {
            sums[0][i] += sums[r][i];
        }
    }
    for (uint32_t r = 0; r < ranks; r++) {
        uint32_t columns = lo[r + 1] - lo[r];
        result = kern_cross_entropy_finish(g_pool, part[r], g_losses, sums[0], targets, XN, lo[r],
                                           columns, backward, &count);
        for (uint32_t n = 0; n < XN; n++) {
            memcpy(g_grad + n * v + lo[r], part[r] + n * columns, columns * sizeof(float));
        }
    }
    return result;
}

/* Loss and gradient in fp64. */
static void check_against_fp64(const int32_t *targets, uint32_t v)
{
    for (uint32_t n = 0; n < XN; n++) {
        const float *x = g_logits + n * v;
        double sum = 0;
        for (uint32_t i = 0; i < v; i++) {
            sum += exp((double)x[i]);
        }
        double loss = targets[n] < 0 ? 0 : log(sum) - (double)x[targets[n]];
        assert_true(fabs(g_losses[n] - loss) <= 1e-6 * (1 + fabs(loss)));
        for (uint32_t i = 0; i < v; i++) {
            double want = targets[n] < 0 ? 0 : exp((double)x[i]) / sum;
            want -= targets[n] == (int32_t)i;
            assert_true(fabs((double)g_grad[n * v + i] - want) <= 1e-6 * fabs(want) + 1e-7);
        }
    }
}

static void test_cross_entropy_slices_are_the_whole(void **state)
{
    (void)state;
    kern_rng_normal(NULL, g_logits, 20, 0, XN * XV, 2.0);
    for (uint32_t ranks = 1; ranks <= RANKS_MAX; ranks++) {
        double sum = in_slices(TARGETS, XV, ranks, 1);
        check_against_fp64(TARGETS, XV);
        assert_true(in_slices(TARGETS, XV, ranks, 0) == sum);
        assert_memory_equal(g_grad, g_logits, sizeof g_grad); /* left alone */
    }
}

/* Four ranks of ceil(5 / 4) columns: the last has none. */
static void test_cross_entropy_of_a_rank_without_columns(void **state)
{
    (void)state;
    static const int32_t targets[XN] = {4, 0, -1, 3, 2};
    kern_rng_normal(NULL, g_logits, 21, 0, XN * 5, 2.0);
    BL_IGNORE(in_slices(targets, 5, 4, 1) < 0, "checked by row");
    check_against_fp64(targets, 5);
}

static void test_cross_entropy_of_one_slice_has_the_bits_of_the_whole(void **state)
{
    (void)state;
    static float whole[XN * XV];
    double losses[XN];
    uint64_t count;
    kern_rng_normal(NULL, g_logits, 22, 0, XN * XV, 3.0);
    memcpy(whole, g_logits, sizeof whole);
    double sum = kern_cross_entropy(g_pool, whole, losses, TARGETS, XN, XV, 1, &count);
    assert_true(in_slices(TARGETS, XV, 1, 1) == sum);
    assert_memory_equal(g_grad, whole, sizeof whole);
    assert_memory_equal(g_losses, losses, sizeof losses);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_embedding_slices_are_the_whole),
        cmocka_unit_test(test_cross_entropy_slices_are_the_whole),
        cmocka_unit_test(test_cross_entropy_of_a_rank_without_columns),
        cmocka_unit_test(test_cross_entropy_of_one_slice_has_the_bits_of_the_whole),
    };
    if (kern_pool_new(&g_pool, 2, NULL) < 0) {
        return 1;
    }
    int failed = cmocka_run_group_tests_name("kernels/slices", tests, NULL, NULL);
    kern_pool_free(g_pool);
    return failed;
}
