/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A file system whose block device fails, is full or is slow: each write and flush that the device
 * sees during a save is answered with EIO in turn (--every N: each N-th, from a random one on); the
 * file system has room for this much of a save, then for that much; each write takes its time. Each
 * time: an error that names the path, or a good save; the checkpoint before is whole; once the
 * trouble is over the next save works.
 *
 *     test_crash_disk_error [CODEC] [--every N] [--seed N] [--fs ext4|xfs]
 *
 * Needs root, /dev/fuse, loop devices and mkfs, else 77.
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tests/crash/forget_disk.h"
#include "tests/crash/scene.h"

#define OPERATIONS_MAX 1000
#define BEFORE         3u /* steps saved before: the next has something to recycle */

static char root[300];
static struct forget_disk disk;
static uint64_t seed, every = 4;
static const char *type = "ext4";
static uint64_t step; /* of the newest checkpoint */

static void must(int rc, const char *why)
{
    if (rc < 0) {
        fail_msg("%s", why);
    }
}

static void save_well(void)
{
    struct bl_errmsg why = {0};

    step++;
    if (scene_save(root, NULL, step, (uint32_t)step, NULL, &why) != 0) {
        fail_msg("save of step %llu: %s", (unsigned long long)step, why.text);
    }
}

static int setup(void **state)
{
    char why[FORGET_WHY_MAX] = "";

    (void)state;
    sample_scale = 8;
    must(forget_disk_open(&disk, type, why), why);
    snprintf(root, sizeof(root), "%s/root", disk.target);
    for (step = 0; step < BEFORE;) {
        save_well();
    }
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    forget_disk_close(&disk);
    return 0;
}

/* Unmounts and mounts again; nothing is lost by it. */
static void mount_again(void)
{
    char why[FORGET_WHY_MAX] = "";

    must(forget_disk_unmount(&disk, why), why);
    forget_disk_restore(&disk, UINT64_MAX);
    must(forget_disk_mount(&disk, why), why);
}

/* The newest is the old one, or the new one; the new one when it was acknowledged. Takes it over
 * as the newest. */
static void check(bool acknowledged, const char *what)
{
    uint64_t newest = scene_newest(root, what);

    if (newest != step + 1 && (newest != step || acknowledged)) {
        fail_msg("%s: step %llu is the newest, %s step %llu", what, (unsigned long long)newest,
                 acknowledged ? "acknowledged was" : "the last good one was",
                 (unsigned long long)(acknowledged ? step + 1 : step));
    }
    step = newest;
}

static void test_disk_with_eio_at_any_write_leaves_the_old_checkpoint(void **state)
{
    uint64_t failed = 0, tried = 0, at;

    (void)state;
    for (at = 1 + seed % every; at < OPERATIONS_MAX; at += every) {
        uint64_t count = atomic_load(&disk.shared->count);
        struct bl_errmsg why = {0};
        bool acknowledged, reached;
        char what[64];
        int rc;

        snprintf(what, sizeof(what), "EIO at operation %llu of the disk", (unsigned long long)at);
        atomic_store(&disk.shared->fail, count + at);
        rc = scene_save(root, NULL, step + 1, (uint32_t)step, &acknowledged, &why);
        reached = atomic_load(&disk.shared->count) >= count + at;
        atomic_store(&disk.shared->fail, 0);
        if (rc < 0 && strstr(why.text, root) == NULL) {
            fail_msg("%s: %d %s", what, rc, why.text);
        }
        failed += rc < 0;
        tried++;
        mount_again(); /* a file system whose journal failed wants that */
        check(acknowledged, what);
        if (!reached) {
            assert_int_equal(rc, 0);
            break;
        }
        save_well();
    }
    printf("%s: up to operation %llu of the disk, %llu tried, %llu saves failed\n", disk.type,
           (unsigned long long)at, (unsigned long long)tried, (unsigned long long)failed);
    assert_true(at > 20 && at < OPERATIONS_MAX);
    assert_true(failed > tried / 2);
}

/* Nothing to recycle: a save needs room of its own. */
static void drop_trash(void)
{
    char path[400];

    snprintf(path, sizeof(path), "%s/.trash", root);
    sample_dir_remove(path);
}

/* Takes all the space that is left but about `spare` bytes. */
static void fill(uint64_t spare)
{
    uint64_t piece = 1 << 20, at = 0;
    char path[400];
    int fd;

    snprintf(path, sizeof(path), "%s/filler", disk.target);
    fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    while (piece >= 4096) {
        if (fallocate(fd, 0, (off_t)at, (off_t)piece) == 0) {
            at += piece;
        } else {
            assert_int_equal(errno, ENOSPC);
            piece /= 2;
        }
    }
    assert_int_equal(ftruncate(fd, at > spare ? (off_t)(at - spare) : 0), 0);
    assert_int_equal(fsync(fd), 0);
    close(fd);
}

static void unfill(void)
{
    char path[400];

    snprintf(path, sizeof(path), "%s/filler", disk.target);
    assert_int_equal(unlink(path), 0);
}

static void test_disk_with_room_for_any_part_of_a_save_leaves_the_old_checkpoint(void **state)
{
    uint64_t failed = 0, tried = 0, spare = 0;
    int rc = -1;

    (void)state;
    while (rc < 0 && spare < 16u << 20) {
        struct bl_errmsg why = {0};
        bool acknowledged;
        char what[64];

        snprintf(what, sizeof(what), "%llu bytes free", (unsigned long long)spare);
        drop_trash();
        fill(spare);
        rc = scene_save(root, NULL, step + 1, (uint32_t)step, &acknowledged, &why);
        if (rc < 0 && (rc != -ENOSPC || strstr(why.text, root) == NULL)) {
            fail_msg("%s: %d %s", what, rc, why.text);
        }
        check(acknowledged, what);
        unfill();
        failed += rc < 0;
        tried++;
        spare += 64 * 1024;
        save_well();
    }
    printf("%s: %llu levels tried, %llu saves failed, enough are %llu KiB\n", disk.type,
           (unsigned long long)tried, (unsigned long long)failed, (unsigned long long)spare / 1024);
    assert_int_equal(rc, 0);
    assert_true(failed > 2);
}

static uint64_t now_us(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

static void test_disk_that_is_slow_takes_its_time(void **state)
{
    uint64_t count = atomic_load(&disk.shared->count), started = now_us();

    (void)state;
    atomic_store(&disk.shared->write_delay_us, 20000);
    save_well();
    atomic_store(&disk.shared->write_delay_us, 0);
    count = atomic_load(&disk.shared->count) - count;
    printf("%llu operations of the disk in %llu ms\n", (unsigned long long)count,
           (unsigned long long)(now_us() - started) / 1000);
    assert_true(now_us() - started > count / 4 * 20000); /* it was slow: not all of them write */
    assert_int_equal(scene_newest(root, "a slow disk"), step);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
        TEST(test_disk_with_eio_at_any_write_leaves_the_old_checkpoint),
        TEST(test_disk_with_room_for_any_part_of_a_save_leaves_the_old_checkpoint),
        TEST(test_disk_that_is_slow_takes_its_time),
    };

    seed = (uint64_t)time(NULL);
    for (int i = argc % 2 == 0 ? 2 : 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--every") == 0 && atoi(argv[i + 1]) > 0) {
            every = strtoull(argv[i + 1], NULL, 10);
        } else if (strcmp(argv[i], "--seed") == 0) {
            seed = strtoull(argv[i + 1], NULL, 10);
        } else if (strcmp(argv[i], "--fs") == 0) {
            type = argv[i + 1];
        }
    }
    printf("--seed %llu\n", (unsigned long long)seed);
    if (!scene_has_codec(argc % 2 == 0 ? 2 : 1, argv) || !forget_disk_is_possible(type)) {
        return 77;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
