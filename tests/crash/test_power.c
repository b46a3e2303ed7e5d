/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Power lost at every operation of a save, on a disk that forgets what was not synced: nothing of
 * it, or any torn part of it, survives. Whatever is left gives the old or the new checkpoint,
 * complete, and the next save works. BELAY_SEED repeats one seed.
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tests/ckpt/sample.h"
#include "tests/crash/forget.h"

#define OPERATIONS_MAX 500
#define SEEDS          3 /* and the one that forgets everything */

static char root[256];
static struct forget forget;
static bool committed; /* the newest save's commit had been reported as done */

static int setup(void **state)
{
    (void)state;
    sample_scale = 1;
    sample_dir_make(root, access("/dev/shm", W_OK) == 0 ? "/dev/shm" : NULL);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    sample_dir_remove(root);
    return 0;
}

static int save(const char *path, struct ckpt_io *io, uint64_t step, uint32_t attempt,
                struct bl_errmsg *msg)
{
    struct ckpt_retain_result retained;
    struct ckpt_store *store = NULL;
    int rc = sample_open(&store, path, io, msg);

    committed = false;
    rc = rc < 0 ? rc : sample_save(store, SAMPLE_FLAT, 4, step, 1, attempt, msg);
    committed = rc == 0;
    rc = rc < 0 ? rc : ckpt_retain(store, 2, NULL, 0, &retained, msg);
    rc = rc < 0 ? rc : ckpt_sweep(store, 1, UINT64_MAX, msg);
    ckpt_store_close(store);
    return rc;
}

/* The newest in `path`, verified and loaded. */
static uint64_t newest(const char *path, const char *what)
{
    const struct ckpt_verify_job job = {.full = true};
    struct ckpt_verify_result verified;
    const struct ckpt_entry *entry;
    struct ckpt_store *store;
    struct ckpt_scan scan;
    struct bl_errmsg why = {0};
    uint64_t step;

    if (sample_open(&store, path, NULL, &why) != 0 || ckpt_scan(store, &scan, &why) != 0) {
        fail_msg("%s: %s", what, why.text);
    }
    entry = ckpt_scan_newest(&scan, NULL, 0);
    if (entry == NULL) {
        fail_msg("%s: no checkpoint is left", what);
        return 0;
    }
    step = entry->step;
    assert_int_equal(ckpt_verify(store, entry->dir, &job, &verified, &why), 0);
    if (verified.findings != 0) {
        fail_msg("%s: step %llu was called good, but %s", what, (unsigned long long)step, why.text);
    }
    sample_load_check(store, entry->dir, SAMPLE_ROWS, 3, step);
    ckpt_scan_close(&scan);
    ckpt_store_close(store);
    return step;
}

static void check_left(const char *live, uint64_t at, uint64_t seed, uint64_t old, bool must,
                       uint64_t *olds)
{
    char left[300], what[128];
    struct bl_errmsg why = {0};
    uint64_t step;

    snprintf(left, sizeof(left), "%s/left", root);
    snprintf(what, sizeof(what), "operation %llu, seed %llu", (unsigned long long)at,
             (unsigned long long)seed);
    forget_materialise(&forget, live, left, seed);
    step = newest(left, what);
    if (step != old + 1 && (step != old || must)) {
        fail_msg("%s: step %llu is the newest", what, (unsigned long long)step);
    }
    *olds += step == old;
    if (save(left, NULL, old + 2, 3, &why) != 0) {
        fail_msg("%s: the next save: %s", what, why.text);
    }
    assert_int_equal(newest(left, what), old + 2);
    sample_dir_remove(left);
}

/* At operation `at`; false when the save came through before. */
static bool lose_power(uint64_t at, uint64_t first_seed, uint64_t *olds)
{
    char live[300];
    uint64_t step = 5;
    bool reached, must;
    int rc;

    snprintf(live, sizeof(live), "%s/live", root);
    for (uint64_t s = 1; s <= step; s++) {
        assert_int_equal(save(live, NULL, s, 1, NULL), 0);
    }
    forget_init(&forget, live, at);
    rc = save(live, &forget.io, step + 1, 2, NULL);
    reached = forget.dark;
    must = committed;
    assert_true(reached || rc == 0);
    for (uint64_t s = 0; s <= SEEDS; s++) {
        check_left(live, at, s == 0 ? 0 : bl_mix64(first_seed + s * 1000 + at) | 1, step, must,
                   olds);
    }
    forget_close(&forget);
    sample_dir_remove(live);
    return reached;
}

static void test_power_lost_at_any_operation_leaves_old_or_new(void **state)
{
    const char *given = getenv("BELAY_SEED");
    uint64_t seed = given != NULL ? strtoull(given, NULL, 10) : (uint64_t)time(NULL);
    uint64_t at, olds = 0;

    (void)state;
    printf("BELAY_SEED=%llu\n", (unsigned long long)seed);
    for (at = 1; at < OPERATIONS_MAX && lose_power(at, seed, &olds); at++) {
    }
    printf("%llu operations, %llu states left, the old checkpoint in %llu of them\n",
           (unsigned long long)at - 1, (unsigned long long)at * (SEEDS + 1),
           (unsigned long long)olds);
    assert_true(at > 30 && at < OPERATIONS_MAX);
    assert_true(olds > at && olds < at * (SEEDS + 1));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_power_lost_at_any_operation_leaves_old_or_new, setup,
                                        teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
