/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpusim itself: what good kernels make, and that bad ones are found.
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
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/gpusim/gpusim_control.h"
#include "tests/gpusim/self_kernels.h"

static void *device(size_t bytes)
{
    void *p = NULL;
    assert_int_equal(cudaMalloc(&p, bytes), cudaSuccess);
    return p;
}

static void finish(void)
{
    assert_int_equal(cudaGetLastError(), cudaSuccess);
    assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);
}

/* ---- good kernels, in every order of threads ---- */

static void test_gpusim_plain_kernel_reaches_every_element(void **state)
{
    (void)state;
    float *x = device(1000 * sizeof *x);
    for (int i = 0; i < 1000; i++) {
        x[i] = (float)i;
    }
    for (uint64_t seed = 0; seed < 4; seed++) {
        gpusim_seed(seed);
        self_scale(x, 2, 1000, NULL);
    }
    finish();
    for (int i = 0; i < 1000; i++) {
        assert_true(x[i] == (float)(16 * i));
    }
    cudaFree(x);
}

static void test_gpusim_sums_have_the_same_bits_in_every_order(void **state)
{
    (void)state;
    enum { ROWS = 5, C = 333 };
    float *x = device(ROWS * C * sizeof *x), *sums = device(ROWS * sizeof *sums), first[ROWS];
    for (int i = 0; i < ROWS * C; i++) {
        x[i] = sinf((float)i);
    }
    for (uint64_t seed = 0; seed < 10; seed++) {
        gpusim_seed(seed);
        self_rows(sums, x, ROWS, C, NULL);
        finish();
        if (seed == 0) {
            memcpy(first, sums, sizeof first);
        }
        assert_memory_equal(first, sums, sizeof first);
    }
    for (int r = 0; r < ROWS; r++) {
        double sum = 0;
        for (int i = 0; i < C; i++) {
            sum += (double)x[r * C + i];
        }
        assert_true(fabs(sum - (double)sums[r]) < 1e-4);
    }
    cudaFree(x);
    cudaFree(sums);
}

static void test_gpusim_barrier_separates_writing_from_reading(void **state)
{
    (void)state;
    enum { BLOCKS = 3, N = 1024 };
    int *out = device(BLOCKS * N * sizeof *out);
    for (uint64_t seed = 0; seed < 5; seed++) {
        gpusim_seed(seed);
        self_shift(out, BLOCKS, N, 1, 0, NULL);
        finish();
        for (int i = 0; i < BLOCKS * N; i++) {
            assert_int_equal(out[i], (i + 1) % N);
        }
    }
    cudaFree(out);
}

static void test_gpusim_warp_operations_move_what_the_guide_says(void **state)
{
    (void)state;
    enum { N = 96 };
    int *out = device(N * 8 * sizeof *out);
    for (uint64_t seed = 0; seed < 5; seed++) {
        gpusim_seed(seed);
        self_warp(out, N, NULL);
        finish();
        for (int i = 0; i < N; i++) {
            int lane = i % 32;
            assert_int_equal(out[i * 8], 310);
            assert_int_equal(out[i * 8 + 1], lane ? lane - 1 : 0);
            assert_int_equal(out[i * 8 + 2], lane % 8 < 7 ? lane + 1 : lane);
            assert_int_equal(out[i * 8 + 3], lane ^ 5);
            assert_int_equal(out[i * 8 + 4], (int)0xaaaaaaaa);
            assert_int_equal(out[i * 8 + 5], lane < 16 ? 3 : 0);
            assert_int_equal(out[i * 8 + 6], (lane + 9) % 32);
            assert_int_equal(out[i * 8 + 7], 1);
        }
    }
    cudaFree(out);
}

static void test_gpusim_blocks_and_threads_have_three_dimensions(void **state)
{
    (void)state;
    uint32_t *out = device(12 * 30 * sizeof *out);
    gpusim_seed(3);
    self_shape(out, NULL);
    finish();
    for (uint32_t i = 0; i < 12 * 30; i++) {
        assert_int_equal(out[i], i / 30 * 100 + i % 30);
    }
    cudaFree(out);
}

/* ---- bf16 ---- */

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static void test_gpusim_bf16_rounds_to_nearest_even(void **state)
{
    (void)state;
    static const struct {
        uint32_t from;
        uint16_t to;
    } cases[] = {
        {0x3f800000, 0x3f80}, {0x3f808000, 0x3f80}, {0x3f808001, 0x3f81}, {0x3f818000, 0x3f82},
        {0x3f817fff, 0x3f81}, {0x00000000, 0x0000}, {0x80000000, 0x8000}, {0x7f800000, 0x7f80},
        {0xff800000, 0xff80}, {0x7f7fffff, 0x7f80}, {0x7f7f7fff, 0x7f7f}, {0xff7fffff, 0xff80},
        {0x7fc00000, 0x7fff}, {0xffc00001, 0x7fff}, {0x7f800001, 0x7fff}, {0x00000001, 0x0000},
        {0x00008000, 0x0000}, {0x00008001, 0x0001}, {0x00018000, 0x0002}, {0x807fffff, 0x8080},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        assert_int_equal(self_narrow(float_of(cases[i].from)), cases[i].to);
    }
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        float x = self_wide((uint16_t)bits);
        assert_int_equal(bits_of(x), bits << 16);
        assert_int_equal(self_narrow(x), isnan(x) ? 0x7fff : bits);
    }
}

/* ---- what is wrong is found ---- */

/* Runs `mistake` in a child; 1: it ended by a signal or a sanitizer, saying `text`. */
static int dies_saying(void (*mistake)(void), const char *text)
{
    char said[65536];
    size_t used = 0;
    int pipes[2], status;
    assert_int_equal(pipe(pipes), 0);
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        dup2(pipes[1], STDERR_FILENO);
        close(pipes[0]);
        close(pipes[1]);
        mistake();
        _exit(0);
    }
    close(pipes[1]);
    for (ssize_t n; (n = read(pipes[0], said + used, sizeof said - 1 - used)) > 0;) {
        used += (size_t)n;
    }
    close(pipes[0]);
    said[used] = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    int died = !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    if (!died || !strstr(said, text)) {
        print_message("expected '%s', status %x, said: %s\n", text, (unsigned)status, said);
    }
    return died && strstr(said, text) != NULL;
}

static int g_how;

static void diverge(void)
{
    int *out = device(64 * sizeof *out);
    self_diverge(out, g_how, NULL);
    cudaDeviceSynchronize();
}

static void test_gpusim_divergent_barriers_end_the_process(void **state)
{
    (void)state;
    static const char *const texts[] = {
        "kernel diverge_kernel, block (0,0,0), thread (0,0,0): waits at the barrier of line",
        "while others wait at that of line",
        "lane 7 of mask ffffffff has ended",
        "the lane is not in its mask 000000ff",
        "waits at the",
    };
    for (g_how = 0; g_how < 5; g_how++) {
        assert_true(dies_saying(diverge, texts[g_how]));
    }
}

static void write_beyond_shared(void)
{
    int *out = device(64 * sizeof *out);
    self_shift(out, 1, 64, 1, 1, NULL);
    cudaDeviceSynchronize();
}

#if GPUSIM_HAS_ASAN
static void write_beyond_static(void)
{
    float *out = device(64 * sizeof *out);
    self_static(out, 1, 2, NULL);
    cudaDeviceSynchronize();
}
#endif

static void write_beyond_device(void)
{
    int *out = device(64 * sizeof *out);
    self_shift(out, 1, 65, 1, 0, NULL);
    cudaDeviceSynchronize();
    cudaFree(out);
}

static void test_gpusim_writing_beyond_memory_ends_the_process(void **state)
{
    (void)state;
#if GPUSIM_HAS_ASAN
    assert_true(dies_saying(write_beyond_shared, "heap-buffer-overflow"));
    assert_true(dies_saying(write_beyond_static, "global-buffer-overflow"));
    assert_true(dies_saying(write_beyond_device, "heap-buffer-overflow"));
#else
    assert_true(dies_saying(write_beyond_shared, "wrote beyond its 256 bytes"));
    assert_true(dies_saying(write_beyond_device, "behind an allocation of 256 bytes"));
#endif
}

static void test_gpusim_missing_barrier_shows_in_some_order(void **state)
{
    (void)state;
    enum { N = 64 };
    int *out = device(N * sizeof *out), wrong = 0;
    for (uint64_t seed = 0; seed < 5; seed++) {
        gpusim_seed(seed);
        self_shift(out, 1, N, 0, 0, NULL);
        finish();
        for (int i = 0; i < N; i++) {
            wrong += out[i] != (i + 1) % N;
        }
    }
    assert_true(wrong > 0);
    cudaFree(out);
}

static void test_gpusim_race_has_other_bits_in_another_order(void **state)
{
    (void)state;
    enum { N = 64 };
    int *out = device(N * sizeof *out), first[N], again[N];
    unsigned int *next = device(sizeof *next);
    for (uint64_t seed = 1; seed < 3; seed++) {
        int *keep = seed == 1 ? first : again;
        gpusim_seed(seed);
        cudaMemset(next, 0, sizeof *next);
        self_race(out, next, N, NULL);
        finish();
        memcpy(keep, out, sizeof first);
    }
    assert_memory_not_equal(first, again, sizeof first);
    cudaFree(out);
    cudaFree(next);
}

static void test_gpusim_shared_memory_left_by_another_block_is_a_nan(void **state)
{
    (void)state;
    enum { BLOCKS = 3 };
    float *out = device(BLOCKS * 64 * sizeof *out);
    self_static(out, BLOCKS, 1, NULL);
    finish();
    for (int i = 0; i < BLOCKS * 64; i++) {
        assert_true(out[i] == 1);
    }
    self_static(out, BLOCKS, 0, NULL);
    finish();
    for (int i = 0; i < BLOCKS * 64; i++) {
        assert_true(isnan(out[i]));
    }
    cudaFree(out);
}

static void test_gpusim_unwritten_device_memory_is_a_nan(void **state)
{
    (void)state;
    float *x = device(100 * sizeof *x);
    for (int i = 0; i < 100; i++) {
        assert_true(isnan(x[i]));
    }
    cudaFree(x);
}

static void test_gpusim_impossible_launches_are_refused(void **state)
{
    (void)state;
    self_empty(0, 32, 0, NULL);
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidConfiguration);
    self_empty(1, 1025, 0, NULL);
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidConfiguration);
    self_empty(1, 32, 49153, NULL);
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidValue);
    assert_int_equal(self_allow(232449), cudaErrorInvalidValue);
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidValue);
    assert_int_equal(self_allow(232448), cudaSuccess);
    self_empty(1, 32, 232448, NULL);
    finish();
}

/* No limit on time, which depends on the machine: only told. */
static void test_gpusim_speed_is_told(void **state)
{
    (void)state;
    enum { BLOCKS = 2000, N = 256 };
    struct timespec from, to;
    int *out = device(BLOCKS * N * sizeof *out);
    for (int with_barrier = 0; with_barrier < 2; with_barrier++) {
        clock_gettime(CLOCK_MONOTONIC, &from);
        self_shift(out, BLOCKS, N, with_barrier, 0, NULL);
        finish();
        clock_gettime(CLOCK_MONOTONIC, &to);
        double s = (double)(to.tv_sec - from.tv_sec) + (double)(to.tv_nsec - from.tv_nsec) * 1e-9;
        print_message("%s a barrier: %.1f million threads a second\n",
                      with_barrier ? "with" : "without", BLOCKS * N * 1e-6 / s);
    }
    cudaFree(out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gpusim_divergent_barriers_end_the_process),
        cmocka_unit_test(test_gpusim_writing_beyond_memory_ends_the_process),
        cmocka_unit_test(test_gpusim_plain_kernel_reaches_every_element),
        cmocka_unit_test(test_gpusim_sums_have_the_same_bits_in_every_order),
        cmocka_unit_test(test_gpusim_barrier_separates_writing_from_reading),
        cmocka_unit_test(test_gpusim_warp_operations_move_what_the_guide_says),
        cmocka_unit_test(test_gpusim_blocks_and_threads_have_three_dimensions),
        cmocka_unit_test(test_gpusim_bf16_rounds_to_nearest_even),
        cmocka_unit_test(test_gpusim_missing_barrier_shows_in_some_order),
        cmocka_unit_test(test_gpusim_race_has_other_bits_in_another_order),
        cmocka_unit_test(test_gpusim_shared_memory_left_by_another_block_is_a_nan),
        cmocka_unit_test(test_gpusim_unwritten_device_memory_is_a_nan),
        cmocka_unit_test(test_gpusim_impossible_launches_are_refused),
        cmocka_unit_test(test_gpusim_speed_is_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
