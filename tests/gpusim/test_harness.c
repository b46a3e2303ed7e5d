/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The harness: passes what is right, and fails what is wrong. Also the example of its use.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/gpusim/harness.h"
#include "tests/gpusim/self_kernels.h"

enum { COUNT = 300 };

static const struct kern_ops OPS = {.scale = self_op_scale, .round = self_op_round};

static void call_scale(struct harness_run *r)
{
    r->ops->scale(r->k, r->p[0], 1.5f, COUNT);
}

static void call_round(struct harness_run *r)
{
    r->ops->round(r->k, r->p[0], r->p[1], COUNT);
}

static const struct harness_case SCALE = {
    .name = "scale",
    .call = call_scale,
    .arrays = {{HARNESS_INOUT, HARNESS_F32, COUNT, .stddev = 1}},
};

static void test_harness_passes_equal_bits(void **state)
{
    (void)state;
    struct harness *h = harness_open(KERN_F32, &OPS);
    harness_check(h, &SCALE);
    harness_close(h);
}

static void test_harness_compares_rounded_results(void **state)
{
    (void)state;
    struct harness *h = harness_open(KERN_BF16, &OPS);
    harness_check(h, &(struct harness_case){
                         .name = "round",
                         .call = call_round,
                         .arrays = {{HARNESS_OUT, HARNESS_REAL, COUNT, .ulps = 0},
                                    {HARNESS_IN, HARNESS_F32, COUNT, .stddev = 3, .mean = 1}}});
    harness_close(h);
}

/* 1: the case fails, in a child; its output is thrown away. */
static int case_fails(void (*scale)(struct kern *, float *, float, uint64_t))
{
    int status;
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        const struct kern_ops ops = {.scale = scale};
        assert_non_null(freopen("/dev/null", "w", stdout));
        assert_non_null(freopen("/dev/null", "w", stderr));
        struct harness *h = harness_open(KERN_F32, &ops);
        harness_check(h, &SCALE);
        _exit(0);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void test_harness_fails_an_order_of_arrival(void **state)
{
    (void)state;
    assert_true(case_fails(self_op_racy));
}

static void test_harness_fails_an_element_left_out(void **state)
{
    (void)state;
    assert_false(case_fails(self_op_scale));
    assert_true(case_fails(self_op_short));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_harness_fails_an_order_of_arrival),
        cmocka_unit_test(test_harness_fails_an_element_left_out),
        cmocka_unit_test(test_harness_passes_equal_bits),
        cmocka_unit_test(test_harness_compares_rounded_results),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
