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

#include "tests/crash/forget.h"
#include "tests/crash/scene.h"

#define OPERATIONS_MAX 500
#define SEEDS          3 /* and the one that forgets everything */

static char root[256];
static struct forget forget;

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
    step = scene_newest(left, what);
    if (step != old + 1 && (step != old || must)) {
        fail_msg("%s: step %llu is the newest", what, (unsigned long long)step);
    }
    *olds += step == old;
    if (scene_save(left, NULL, old + 2, 3, NULL, &why) != 0) {
        fail_msg("%s: the next save: %s", what, why.text);
    }
    assert_int_equal(scene_newest(left, what), old + 2);
    sample_dir_remove(left);
}

/* At operation `at`; false when the save came through before. */
static bool lose_power(uint64_t at, uint64_t first_seed, uint64_t *olds)
{
    char live[300];
    uint64_t step = 5;
    bool reached, must = false;
    int rc;

    snprintf(live, sizeof(live), "%s/live", root);
    for (uint64_t s = 1; s <= step; s++) {
        assert_int_equal(scene_save(live, NULL, s, 1, NULL, NULL), 0);
    }
    forget_init(&forget, live, at);
    rc = scene_save(live, &forget.io, step + 1, 2, &must, NULL);
    reached = forget.dark;
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

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_power_lost_at_any_operation_leaves_old_or_new, setup,
                                        teardown),
    };

    if (!scene_has_codec(argc, argv)) {
        return 77;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
