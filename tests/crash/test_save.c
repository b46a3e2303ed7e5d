/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every single operation of a save as the last one, or as the one that fails: enumerated, not
 * sampled. One iteration saves a second checkpoint, with retention and sweeping, over a root that
 * holds a good one and trash to recycle; then the root must give the old or the new one, complete,
 * every byte checked, and the next save must work.
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/crash/scene.h"

#define OPERATIONS_MAX 2000

static char root[256];
static uint32_t attempts; /* each try has a number of its own */

static int setup(void **state)
{
    (void)state;
    sample_scale = 1;
    /* Memory is as good as a disk here: the page cache survives a process. */
    sample_dir_make(root, access("/dev/shm", W_OK) == 0 ? "/dev/shm" : NULL);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    sample_dir_remove(root);
    return 0;
}

static int save(struct ckpt_io *io, uint64_t step, struct bl_errmsg *msg)
{
    return scene_save(root, io, step, ++attempts, NULL, msg);
}

static void save_well(uint64_t step)
{
    struct bl_errmsg why = {0};

    if (save(NULL, step, &why) != 0) {
        fail_msg("save of step %llu: %s", (unsigned long long)step, why.text);
    }
}

/* The newest is `old` or `new`, whole; which. */
static uint64_t check_newest(uint64_t old, uint64_t new, uint64_t at)
{
    char what[64];
    uint64_t step;

    snprintf(what, sizeof(what), "after operation %llu", (unsigned long long)at);
    step = scene_newest(root, what);
    if (step != old && step != new) {
        fail_msg("%s: neither step %llu nor %llu", what, (unsigned long long)old,
                 (unsigned long long)new);
    }
    return step;
}

/* A child saves with the fault; true when it was killed, false when it came through. */
static bool child_dies(enum ckpt_fault_kind kind, uint64_t at, uint64_t step, unsigned disable)
{
    int status = 0;
    pid_t pid;

    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct ckpt_io_fault fault;

        ckpt_io_fault_init(&fault, kind, at, 0);
        fault.io.disable = disable;
        _exit(save(&fault.io, step, NULL) == 0 ? 0 : 1);
    }
    attempts++; /* the child's */
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (WIFSIGNALED(status)) {
        assert_int_equal(WTERMSIG(status), SIGKILL);
        return true;
    }
    assert_int_equal(WEXITSTATUS(status), 0);
    return false;
}

static void enumerate_kills(enum ckpt_fault_kind kind, unsigned disable)
{
    uint64_t step = 10, at, old_seen = 0, new_seen = 0;

    for (uint64_t s = 1; s <= step; s++) { /* trash to recycle, two kept */
        save_well(s);
    }
    for (at = 1; at < OPERATIONS_MAX; at++) {
        bool died = child_dies(kind, at, step + 1, disable);
        uint64_t newest = check_newest(step, step + 1, at);

        old_seen += newest == step;
        new_seen += newest == step + 1;
        if (!died) {
            assert_int_equal(newest, step + 1);
            break;
        }
        step += 2;
        save_well(step);
        assert_int_equal(check_newest(step, step, at), step);
    }
    printf("%llu operations, after them: the old one %llu times, the new one %llu times\n",
           (unsigned long long)at - 1, (unsigned long long)old_seen, (unsigned long long)new_seen);
    assert_true(at > 30 && at < OPERATIONS_MAX); /* else nothing was enumerated */
    assert_true(old_seen > 10 && new_seen > 5);
}

static void test_save_killed_before_any_operation_leaves_old_or_new(void **state)
{
    (void)state;
    enumerate_kills(CKPT_FAULT_KILL, 0);
}

static void test_save_killed_after_any_operation_leaves_old_or_new(void **state)
{
    (void)state;
    enumerate_kills(CKPT_FAULT_AFTER, 0);
}

static void test_save_killed_without_io_uring_leaves_old_or_new(void **state)
{
    (void)state;
    enumerate_kills(CKPT_FAULT_KILL, CKPT_IO_NO_URING | CKPT_IO_NO_DIRECT);
}

static void test_first_save_killed_anywhere_is_repeated(void **state)
{
    uint64_t at;

    (void)state;
    for (at = 1; at < OPERATIONS_MAX; at++) {
        if (!child_dies(CKPT_FAULT_KILL, at, 1, 0)) {
            break;
        }
        save_well(1);
        check_newest(1, 1, at);
        sample_dir_remove(root);
    }
    assert_true(at > 30 && at < OPERATIONS_MAX);
}

/* The fault at each operation in turn: an error with the root's path, or a good save. */
static void enumerate_errors(enum ckpt_fault_kind kind, int error, bool must_pass)
{
    uint64_t step = 10, at, failed = 0;

    for (uint64_t s = 1; s <= step; s++) {
        save_well(s);
    }
    for (at = 1; at < OPERATIONS_MAX; at++) {
        struct ckpt_io_fault fault;
        struct bl_errmsg why = {0};
        uint64_t newest;
        int rc;

        ckpt_io_fault_init(&fault, kind, at, error);
        rc = save(&fault.io, step + 1, &why);
        newest = check_newest(step, step + 1, at);
        if (rc == 0) {
            assert_int_equal(newest, step + 1);
        } else if (must_pass || strstr(why.text, root) == NULL) {
            fail_msg("operation %llu: %d %s", (unsigned long long)at, rc, why.text);
        } else {
            failed++;
            assert_int_equal(rc, error);
        }
        if (fault.hit == 0) {
            break;
        }
        step += 2;
        save_well(step);
    }
    printf("%llu operations, %llu of them made the save fail\n", (unsigned long long)at - 1,
           (unsigned long long)failed);
    assert_true(at > 30 && at < OPERATIONS_MAX);
    assert_true(must_pass || failed > 10);
}

static void test_save_with_eio_at_any_operation_leaves_the_old_intact(void **state)
{
    (void)state;
    enumerate_errors(CKPT_FAULT_ERROR, -EIO, false);
}

static void test_save_with_enospc_at_any_operation_leaves_the_old_intact(void **state)
{
    (void)state;
    enumerate_errors(CKPT_FAULT_ERROR, -ENOSPC, false);
}

static void test_save_on_a_disk_full_from_any_operation_on_leaves_the_old_intact(void **state)
{
    (void)state;
    enumerate_errors(CKPT_FAULT_FULL, -EDQUOT, false);
}

static void test_save_with_a_short_write_at_any_operation_is_whole(void **state)
{
    (void)state;
    enumerate_errors(CKPT_FAULT_SHORT, 0, true);
}

static void test_load_with_eio_at_any_read_says_where(void **state)
{
    uint64_t at;

    (void)state;
    save_well(1);
    for (at = 1; at < OPERATIONS_MAX; at++) {
        struct ckpt_io_fault fault;
        struct ckpt_store *store = NULL;
        struct bl_errmsg why = {0};
        int rc;

        ckpt_io_fault_init(&fault, CKPT_FAULT_ERROR, at, -EIO);
        fault.reads = true;
        rc = sample_open(&store, root, scene_io(&fault.io), &why);
        rc = rc < 0 ? rc : sample_load(store, "step-000000000001.g1", SAMPLE_COLS, 3, 1, &why);
        ckpt_store_close(store);
        if (fault.hit == 0) {
            assert_int_equal(rc, 0);
            break;
        }
        assert_int_equal(rc, -EIO);
        assert_non_null(strstr(why.text, root));
    }
    assert_true(at > 6 && at < OPERATIONS_MAX);
}

static void test_load_with_a_short_read_at_any_read_is_whole(void **state)
{
    uint64_t at;

    (void)state;
    save_well(1);
    for (at = 1; at < OPERATIONS_MAX; at++) {
        struct ckpt_io_fault fault;
        struct ckpt_store *store = NULL;

        ckpt_io_fault_init(&fault, CKPT_FAULT_SHORT, at, 0);
        fault.reads = true;
        assert_int_equal(sample_open(&store, root, scene_io(&fault.io), NULL), 0);
        sample_load_check(store, "step-000000000001.g1", SAMPLE_COLS, 3, 1);
        ckpt_store_close(store);
        if (fault.hit == 0) {
            break;
        }
    }
    assert_true(at > 6 && at < OPERATIONS_MAX);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
        TEST(test_save_killed_before_any_operation_leaves_old_or_new),
        TEST(test_save_killed_after_any_operation_leaves_old_or_new),
        TEST(test_save_killed_without_io_uring_leaves_old_or_new),
        TEST(test_first_save_killed_anywhere_is_repeated),
        TEST(test_save_with_eio_at_any_operation_leaves_the_old_intact),
        TEST(test_save_with_enospc_at_any_operation_leaves_the_old_intact),
        TEST(test_save_on_a_disk_full_from_any_operation_on_leaves_the_old_intact),
        TEST(test_save_with_a_short_write_at_any_operation_is_whole),
        TEST(test_load_with_eio_at_any_read_says_where),
        TEST(test_load_with_a_short_read_at_any_read_is_whole),
    };

    if (!scene_has_codec(argc, argv)) {
        return 77;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
