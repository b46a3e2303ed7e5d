/* SPDX-License-Identifier: Apache-2.0 */
/*
 * device.c, stream_copy.c and arena.c over the stand-in of CUDA's runtime: refusals, memory,
 * copies, errors that come late, waits that are given up.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <time.h>

#include "kernels/cuda/device.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/plugin.h"
#include "tests/gpusim/gpusim_control.h"

#define MIB          (1ULL << 20)
#define MEMORY_MIB   "256"
#define COUNT        4096U
#define DEADLINE_SEC 20

const struct kern_plugin *belay_cuda_kernels(void);

static struct kern *open_device(uint64_t arena_bytes)
{
    struct bl_errmsg msg = {{0}};
    struct kern *k = NULL;
    int rc = kern_cuda_open(&k, 0, KERN_BF16, arena_bytes, &msg);
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

/* ---- the arena ---- */

static void test_arena_gives_the_first_gap_that_fits(void **state)
{
    (void)state;
    struct kern_arena a;
    uint64_t at[4];
    kern_arena_init(&a, 1024 + 100); /* the rest is no whole part */
    for (int i = 0; i < 4; i++) {
        assert_int_equal(kern_arena_take(&a, i == 0 ? 0 : 256, &at[i]), 0);
        assert_int_equal(at[i], 256 * i);
    }
    assert_true(kern_arena_take(&a, 1, &at[0]) != 0);
    kern_arena_give(&a, 256);
    kern_arena_give(&a, 512);
    assert_true(kern_arena_take(&a, 513, &at[0]) != 0);
    assert_int_equal(kern_arena_take(&a, 257, &at[1]), 0);
    assert_int_equal(at[1], 256);
    kern_arena_give(&a, 0);
    assert_int_equal(kern_arena_take(&a, 100, &at[0]), 0);
    assert_int_equal(at[0], 0);
    assert_int_equal(a.used, 1024);
    assert_int_equal(a.used_max, 1024);
    kern_arena_close(&a);
}

static void test_arena_survives_many_parts_in_random_order(void **state)
{
    (void)state;
    enum { PARTS = 300 };
    struct kern_arena a;
    uint64_t at[PARTS], bytes[PARTS];
    uint32_t seed = 1;
    print_message("seed %u\n", seed);
    srand(seed);
    kern_arena_init(&a, PARTS * 4096ULL);
    memset(bytes, 0, sizeof bytes);
    for (int round = 0; round < 20000; round++) {
        int i = rand() % PARTS;
        if (bytes[i] != 0) {
            kern_arena_give(&a, at[i]);
            bytes[i] = 0;
        } else if (kern_arena_take(&a, 1 + (uint64_t)(rand() % 8000), &at[i]) == 0) {
            bytes[i] = 1;
        }
        for (uint32_t j = 0; j + 1 < a.count; j++) {
            assert_true(a.parts[j].offset + a.parts[j].bytes <= a.parts[j + 1].offset);
        }
    }
    for (int i = 0; i < PARTS; i++) {
        if (bytes[i] != 0) {
            kern_arena_give(&a, at[i]);
        }
    }
    assert_int_equal(a.used, 0);
    assert_int_equal(a.count, 0);
    kern_arena_close(&a);
}

/* ---- refusals ---- */

static void test_device_with_too_little_memory_is_refused_with_the_sum(void **state)
{
    (void)state;
    struct bl_errmsg msg = {{0}};
    struct kern *k = NULL;
    assert_int_equal(kern_cuda_open(&k, 0, KERN_BF16, 240 * MIB, &msg), BL_ECONFIG);
    assert_null(k);
    assert_non_null(strstr(msg.text, "272.0 MiB of memory are wanted"));
    assert_non_null(strstr(msg.text, "240.0 MiB planned, 32.0 MiB beside it"));
    assert_non_null(strstr(msg.text, "of 256.0 MiB are free"));
}

static void test_device_number_past_those_visible_is_refused(void **state)
{
    (void)state;
    struct bl_errmsg msg = {{0}};
    struct kern *k = NULL;
    assert_int_equal(kern_cuda_open(&k, 2, KERN_BF16, MIB, &msg), BL_ECONFIG);
    assert_string_equal(msg.text, "device 2 is wanted, 2 are visible");
}

static void test_device_of_another_architecture_is_refused(void **state)
{
    (void)state;
    struct bl_errmsg msg = {{0}};
    struct kern *k = NULL;
    setenv("GPUSIM_CAPABILITY", "75", 1);
    assert_int_equal(kern_cuda_open(&k, 0, KERN_BF16, MIB, &msg), BL_ECONFIG);
    assert_non_null(strstr(msg.text, "compute capability 7.5"));
    assert_non_null(strstr(msg.text, kern_cuda_built()));
    assert_non_null(strstr(msg.text, "-Dgpu_archs=75"));
    const char *const good[] = {"86", "89", "100", "121"}; /* machine code of 8.0; PTX of 9.0 */
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        setenv("GPUSIM_CAPABILITY", good[i], 1);
        kern_cuda_close(open_device(MIB));
    }
    unsetenv("GPUSIM_CAPABILITY");
}

static void test_environment_that_changes_products_is_refused(void **state)
{
    (void)state;
    static const char *const names[] = {"NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG",
                                        "CUBLASLT_ANYTHING"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        struct bl_errmsg msg = {{0}};
        struct kern *k = NULL;
        setenv(names[i], "1", 1);
        assert_int_equal(kern_cuda_open(&k, 0, KERN_BF16, MIB, &msg), BL_ECONFIG);
        assert_non_null(strstr(msg.text, names[i]));
        unsetenv(names[i]);
    }
}

static void test_device_that_cannot_give_its_memory_leaves_nothing_behind(void **state)
{
    (void)state;
    uint64_t before, after, total;
    struct kern *k = open_device(MIB), *other = NULL;
    const struct kern_plugin *plugin = belay_cuda_kernels();
    assert_int_equal(plugin->memory(k, &before, &total, NULL), 0);
    for (int nth = 1; nth <= 2; nth++) { /* the arena, the workspace */
        char fault[16];
        struct bl_errmsg msg = {{0}};
        snprintf(fault, sizeof fault, "malloc@%d", nth);
        gpusim_fault_set(fault);
        int rc = kern_cuda_open(&other, 0, KERN_BF16, MIB, &msg);
        gpusim_fault_set(NULL);
        assert_true(rc != 0);
        assert_non_null(strstr(msg.text, "cudaErrorMemoryAllocation"));
        assert_int_equal(plugin->memory(k, &after, &total, NULL), 0);
        assert_int_equal(before, after);
    }
    kern_cuda_close(k);
}

/* ---- memory and copies ---- */

static void test_memory_comes_from_the_arena_and_no_more(void **state)
{
    (void)state;
    struct kern *k = open_device(MIB);
    void *a = kern_cuda_alloc(k, MIB / 2), *b = kern_cuda_alloc(k, MIB / 2);
    assert_non_null(a);
    assert_non_null(b);
    assert_int_equal((uintptr_t)a % KERN_ARENA_ALIGN, 0);
    assert_null(kern_cuda_alloc(k, 1));
    kern_cuda_free(k, a, MIB / 2);
    assert_ptr_equal(kern_cuda_alloc(k, 1000), a);
    kern_cuda_close(k);
    k = open_device(0); /* no arena: from the device */
    a = kern_cuda_alloc(k, 2 * MIB);
    assert_non_null(a);
    assert_null(kern_cuda_alloc(k, 300 * MIB));
    sync_good(k);
    kern_cuda_free(k, a, 2 * MIB);
    kern_cuda_close(k);
}

static void test_downloads_are_there_after_the_sync(void **state)
{
    (void)state;
    enum { MANY = 3 * KERN_CUDA_LANDING_MAX };
    static uint32_t up[COUNT], small[MANY], large[COUNT];
    struct kern *k = open_device(MIB);
    uint32_t *p = kern_cuda_alloc(k, sizeof up), *q = kern_cuda_alloc(k, sizeof up);
    for (int round = 0; round < 3; round++) {
        for (uint32_t i = 0; i < COUNT; i++) {
            up[i] = i * 7 + (uint32_t)round;
        }
        kern_cuda_upload(k, p, up, sizeof up);
        kern_cuda_zero(k, q, sizeof up);
        kern_cuda_copy(k, q + 1, p + 1, sizeof up - sizeof *up);
        for (uint32_t i = 0; i < MANY; i++) { /* more than may be on their way */
            kern_cuda_download(k, &small[i], q + i, sizeof *small);
        }
        kern_cuda_download(k, large, q, sizeof large);
        sync_good(k);
        for (uint32_t i = 0; i < MANY; i++) {
            assert_int_equal(small[i], i == 0 ? 0 : up[i]);
        }
        assert_int_equal(large[0], 0);
        assert_memory_equal(large + 1, up + 1, sizeof up - sizeof *up);
    }
    kern_cuda_close(k);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* While a wait lasts: a kernel that is stuck, or gets stuck later, is let go. */
static int let_go(void *arg, struct bl_errmsg *msg)
{
    (void)arg;
    (void)msg;
    gpusim_unstick();
    return 0;
}

/* What is copied out is what was made before, and it is out while compute is still at work. */
static void test_publish_takes_what_was_made_and_waits_for_nothing_later(void **state)
{
    (void)state;
    static float up[COUNT], out[COUNT];
    struct bl_errmsg msg = {{0}};
    struct kern *k = open_device(MIB);
    float *x = kern_cuda_alloc(k, sizeof up), *y = kern_cuda_alloc(k, sizeof up);
    for (uint32_t i = 0; i < COUNT; i++) {
        up[i] = (float)i;
    }
    assert_int_equal(kern_cuda_host_register(k, out, sizeof out, &msg), 0);
    assert_int_equal(kern_cuda_publish_done(k), 1);
    kern_cuda_upload(k, x, up, sizeof up);
    kern_cuda_scale(k, x, 2, COUNT);
    kern_cuda_publish(k, out, x, sizeof out / 2);
    kern_cuda_publish(k, out + COUNT / 2, x + COUNT / 2, sizeof out / 2);
    sync_good(k);
    gpusim_fault_set("stuck@1");
    kern_cuda_scale(k, y, 3, COUNT);
    for (double end = now() + DEADLINE_SEC; !kern_cuda_publish_done(k);) {
        assert_true(now() < end);
    }
    assert_int_equal(kern_cuda_publish_wait(k, &msg), 0);
    for (uint32_t i = 0; i < COUNT; i++) {
        assert_true(out[i] == (float)(2 * i));
    }
    belay_cuda_kernels()->on_wait(k, let_go, NULL);
    sync_good(k);
    kern_cuda_host_unregister(k, out, sizeof out);
    kern_cuda_close(k);
}

/* `out` waits for compute. */
static void test_publish_is_not_done_before_what_it_copies_is(void **state)
{
    (void)state;
    static float out[COUNT];
    struct kern *k = open_device(MIB);
    float *x = kern_cuda_alloc(k, sizeof out);
    kern_cuda_zero(k, x, sizeof out);
    sync_good(k);
    gpusim_fault_set("stuck@1");
    kern_cuda_scale(k, x, 3, COUNT);
    kern_cuda_publish(k, out, x, sizeof out);
    for (int i = 0; i < 1000; i++) {
        assert_int_equal(kern_cuda_publish_done(k), 0);
    }
    belay_cuda_kernels()->on_wait(k, let_go, NULL);
    assert_int_equal(kern_cuda_publish_wait(k, NULL), 0);
    assert_int_equal(kern_cuda_publish_done(k), 1);
    kern_cuda_close(k);
}

/* ---- errors ---- */

static void test_refused_launch_is_told_by_the_sync_with_its_name(void **state)
{
    (void)state;
    struct bl_errmsg msg = {{0}};
    struct kern *k = open_device(MIB);
    float *x = kern_cuda_alloc(k, COUNT * sizeof *x);
    uint32_t here = 5;
    kern_cuda_zero(k, x, COUNT * sizeof *x);
    gpusim_fault_set("launch@1");
    kern_cuda_scale(k, x, 3, COUNT);
    kern_cuda_zero(k, x, COUNT * sizeof *x);
    kern_cuda_download(k, &here, x, sizeof here);
    assert_int_equal(kern_cuda_sync(k, &msg), BL_EDEVICE);
    assert_non_null(strstr(msg.text, "device 0 ("));
    assert_non_null(strstr(msg.text, "scale: cudaErrorLaunchOutOfResources"));
    assert_int_equal(here, 5); /* no number of a step that failed */
    sync_good(k);              /* told once */
    kern_cuda_close(k);
}

static void test_error_that_comes_late_is_told_with_a_name(void **state)
{
    (void)state;
    struct bl_errmsg msg = {{0}};
    struct kern *k = open_device(MIB);
    float *x = kern_cuda_alloc(k, COUNT * sizeof *x);
    gpusim_fault_set("late@1");
    kern_cuda_scale(k, x, 3, COUNT);
    assert_int_equal(kern_cuda_sync(k, &msg), BL_EDEVICE);
    assert_non_null(strstr(msg.text, "scale"));
    assert_non_null(strstr(msg.text, "cudaErrorIllegalAddress"));
    assert_int_equal(kern_cuda_sync(k, NULL), BL_EDEVICE); /* for ever */
    kern_cuda_close(k);
    gpusim_revive();
}

static void test_copy_out_that_goes_wrong_is_told_by_publish_wait(void **state)
{
    (void)state;
    static float out[COUNT];
    struct bl_errmsg msg = {{0}};
    struct kern *k = open_device(MIB);
    float *x = kern_cuda_alloc(k, sizeof out);
    gpusim_fault_set("copy@1");
    kern_cuda_publish(k, out, x, sizeof out);
    assert_int_equal(kern_cuda_publish_wait(k, &msg), BL_EDEVICE);
    assert_non_null(strstr(msg.text, "copy out: cudaErrorIllegalAddress"));
    kern_cuda_close(k);
    gpusim_revive();
}

/* What was not launched is not in what is copied: a slot of it must not be sealed, and the sync
 * that tells comes after the seal. */
static void test_publish_behind_a_refused_launch_fails(void **state)
{
    (void)state;
    static float out[COUNT];
    struct bl_errmsg msg = {{0}};
    struct kern *k = open_device(MIB);
    float *x = kern_cuda_alloc(k, sizeof out);
    kern_cuda_zero(k, x, sizeof out);
    gpusim_fault_set("launch@1");
    kern_cuda_scale(k, x, 3, COUNT);
    kern_cuda_publish(k, out, x, sizeof out / 2);
    kern_cuda_publish(k, out + COUNT / 2, x + COUNT / 2, sizeof out / 2);
    assert_int_equal(kern_cuda_publish_wait(k, &msg), BL_EDEVICE);
    assert_non_null(strstr(msg.text, "cudaErrorLaunchOutOfResources"));
    assert_int_equal(kern_cuda_sync(k, NULL), BL_EDEVICE);
    kern_cuda_close(k);
}

static int give_up(void *arg, struct bl_errmsg *msg)
{
    uint32_t *left = arg;
    return --*left > 0 ? 0 : bl_err(msg, BL_EABORTED, "a peer is gone");
}

/* As when a collective never ends: last, since it leaves a device that is never closed. */
static void test_wait_for_a_stuck_stream_can_be_given_up(void **state)
{
    (void)state;
    static float out[COUNT];
    static struct kern *left; /* stays reachable */
    struct bl_errmsg msg = {{0}};
    uint32_t asked = 3;
    struct kern *k = left = open_device(MIB);
    float *x = kern_cuda_alloc(k, sizeof out);
    belay_cuda_kernels()->on_wait(k, give_up, &asked);
    gpusim_fault_set("stuck@1");
    kern_cuda_scale(k, x, 3, COUNT);
    kern_cuda_publish(k, out, x, sizeof out);
    assert_int_equal(kern_cuda_sync(k, &msg), BL_EABORTED);
    assert_string_equal(msg.text, "a peer is gone");
    assert_int_equal(asked, 0);
    assert_int_equal(kern_cuda_sync(k, &msg), BL_EDEVICE); /* at once */
    assert_non_null(strstr(msg.text, "given up"));
    assert_int_equal(kern_cuda_publish_wait(k, NULL), BL_EDEVICE);
    kern_cuda_free(k, x, sizeof out);
    kern_cuda_close(k); /* returns */
    gpusim_unstick();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_arena_gives_the_first_gap_that_fits),
        cmocka_unit_test(test_arena_survives_many_parts_in_random_order),
        cmocka_unit_test(test_device_with_too_little_memory_is_refused_with_the_sum),
        cmocka_unit_test(test_device_number_past_those_visible_is_refused),
        cmocka_unit_test(test_device_of_another_architecture_is_refused),
        cmocka_unit_test(test_environment_that_changes_products_is_refused),
        cmocka_unit_test(test_device_that_cannot_give_its_memory_leaves_nothing_behind),
        cmocka_unit_test(test_memory_comes_from_the_arena_and_no_more),
        cmocka_unit_test(test_downloads_are_there_after_the_sync),
        cmocka_unit_test(test_publish_takes_what_was_made_and_waits_for_nothing_later),
        cmocka_unit_test(test_publish_is_not_done_before_what_it_copies_is),
        cmocka_unit_test(test_refused_launch_is_told_by_the_sync_with_its_name),
        cmocka_unit_test(test_error_that_comes_late_is_told_with_a_name),
        cmocka_unit_test(test_copy_out_that_goes_wrong_is_told_by_publish_wait),
        cmocka_unit_test(test_publish_behind_a_refused_launch_fails),
        cmocka_unit_test(test_wait_for_a_stuck_stream_can_be_given_up),
    };
    setenv("GPUSIM_MEMORY_MIB", MEMORY_MIB, 1);
    setenv("GPUSIM_DEVICES", "2", 1);
    unsetenv("CUDA_VISIBLE_DEVICES");
    return cmocka_run_group_tests(tests, NULL, NULL);
}
