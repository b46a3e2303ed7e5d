/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <time.h>

#include "kernels/kern.h"

#define TASKS 1000

struct counts {
    atomic_int done[TASKS];
    atomic_int busy[8];
    atomic_int clashes;
};

static void count_task(void *arg, uint32_t task, uint32_t worker)
{
    struct counts *counts = arg;
    if (atomic_fetch_add(&counts->busy[worker], 1) != 0) {
        atomic_fetch_add(&counts->clashes, 1);
    }
    atomic_fetch_add(&counts->done[task], 1);
    atomic_fetch_sub(&counts->busy[worker], 1);
}

static void test_every_task_runs_once_whatever_the_threads(void **state)
{
    (void)state;
    static struct counts counts;
    for (uint32_t threads = 1; threads <= 8; threads++) {
        struct kern_pool *pool;
        assert_int_equal(kern_pool_new(&pool, threads, NULL), 0);
        assert_int_equal(kern_pool_threads(pool), threads);
        for (uint32_t round = 0; round < 300; round++) {
            uint32_t count = round * 7 % TASKS;
            memset(&counts, 0, sizeof counts);
            kern_pool_run(pool, count_task, &counts, count);
            for (uint32_t i = 0; i < TASKS; i++) {
                assert_int_equal(atomic_load(&counts.done[i]), i < count);
            }
            assert_int_equal(atomic_load(&counts.clashes), 0);
        }
        kern_pool_free(pool);
    }
}

static void subnormal_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    volatile float small = 1e-38f;
    ((float *)arg)[task] = small * 0.1f; /* a subnormal, where those are kept */
}

static void test_subnormals_are_flushed_on_every_thread(void **state)
{
    (void)state;
    struct kern_pool *pool;
    float out[64];
    assert_int_equal(kern_pool_new(&pool, 4, NULL), 0);
    for (int round = 0; round < 50; round++) {
        memset(out, 0xff, sizeof out);
        kern_pool_run(pool, subnormal_task, out, 64);
        for (int i = 0; i < 64; i++) {
            assert_true(out[i] == 0.0f);
        }
    }
    kern_pool_free(pool);
}

static void test_no_pool_is_the_callers_thread(void **state)
{
    (void)state;
    static struct counts counts;
    memset(&counts, 0, sizeof counts);
    kern_pool_run(NULL, count_task, &counts, 10);
    assert_int_equal(atomic_load(&counts.done[9]), 1);
    assert_int_equal(kern_pool_threads(NULL), 1);
    kern_pool_free(NULL);
}

static double seconds(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void test_idle_workers_use_no_processor_time(void **state)
{
    (void)state;
    struct kern_pool *pool;
    static struct counts counts;
    assert_int_equal(kern_pool_new(&pool, 4, NULL), 0);
    kern_pool_run(pool, count_task, &counts, TASKS);
    double used = seconds(CLOCK_PROCESS_CPUTIME_ID);
    struct timespec pause = {0, 100000000}; /* the thing under test is what happens in it */
    nanosleep(&pause, NULL);
    used = seconds(CLOCK_PROCESS_CPUTIME_ID) - used;
    kern_pool_free(pool);
    assert_true(used < 0.02);
}

static void test_thread_count_out_of_bounds_is_refused(void **state)
{
    (void)state;
    struct kern_pool *pool;
    struct bl_errmsg msg = {0};
    assert_int_equal(kern_pool_new(&pool, 0, &msg), BL_ELIMIT);
    assert_string_equal(msg.text, "0 threads: at least 1, at most 256");
    assert_int_equal(kern_pool_new(&pool, KERN_THREADS_MAX + 1, &msg), BL_ELIMIT);
}

static void test_build_is_named_after_start(void **state)
{
    (void)state;
    assert_int_equal(kern_start(NULL), 0);
    assert_non_null(strstr(kern_build_name(), "belay-kern-"));
    assert_non_null(strstr(kern_build_name(), kern_core_name()));
    printf("%s\n", kern_build_name());
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_task_runs_once_whatever_the_threads),
        cmocka_unit_test(test_subnormals_are_flushed_on_every_thread),
        cmocka_unit_test(test_no_pool_is_the_callers_thread),
        cmocka_unit_test(test_idle_workers_use_no_processor_time),
        cmocka_unit_test(test_thread_count_out_of_bounds_is_refused),
        cmocka_unit_test(test_build_is_named_after_start),
    };
    return cmocka_run_group_tests_name("kernels/pool", tests, NULL, NULL);
}
