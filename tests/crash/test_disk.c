/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Power cut at random points of saves, on a real file system over a disk that forgets what was not
 * flushed and tears what it keeps of the rest. After each cut the file system is mounted again, its
 * journal is replayed, and every checkpoint whose commit had been acknowledged must be there,
 * whole, every byte checked; the next saves go on from that. The test of the test: with an io that
 * leaves fsync out, acknowledged checkpoints do get lost.
 *
 *     test_crash_disk [CODEC] [--cuts N] [--seed N] [--fs ext4|xfs]
 *
 * Needs root, /dev/fuse, loop devices and mkfs, else 77.
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

#include "tests/crash/forget_disk.h"
#include "tests/crash/scene.h"

static char root[300];
static struct forget_disk disk;
static uint32_t cuts = 12;
static uint64_t seed;
static const char *type = "ext4";

struct tally {
    uint64_t acknowledged, kept_newer, unflushed, lost;
    uint64_t newest; /* step of the newest acknowledged checkpoint */
};

static uint64_t draw(void)
{
    seed = bl_mix64(seed + 1) | 1;
    return seed >> 16;
}

static void must(int rc, const char *why)
{
    if (rc < 0) {
        fail_msg("%s", why);
    }
}

/* Saves step `step`; was the commit acknowledged? */
static bool save(struct ckpt_io *io, uint64_t step, uint32_t attempt)
{
    bool acknowledged = false;

    BL_IGNORE(scene_save(root, io, step, attempt, &acknowledged, NULL), "after a cut all fails");
    return acknowledged;
}

/* Looks at what is left: false when an acknowledged checkpoint is lost. Step of the newest whole
 * one in *ret_newest (0: none). Whatever has a committed name must be whole. */
static bool survived(struct ckpt_io *io, uint64_t acknowledged, uint64_t *ret_newest)
{
    struct ckpt_store *store;
    struct ckpt_scan scan;
    bool good;

    *ret_newest = 0;
    if (sample_open(&store, root, io, NULL) != 0) {
        return false;
    }
    assert_int_equal(ckpt_scan(store, &scan, NULL), 0);
    /* The two newest are never removed. */
    good = scene_is_whole(store, &scan, acknowledged);
    good = good && (acknowledged < 2 || scene_is_whole(store, &scan, acknowledged - 1));
    for (uint32_t i = 0; i < scan.count; i++) {
        const struct ckpt_entry *entry = &scan.entries[i];

        good = good && entry->state != CKPT_BROKEN && entry->state != CKPT_FOREIGN;
        if (entry->state == CKPT_GOOD && entry->step > *ret_newest) {
            good = good && scene_is_whole(store, &scan, entry->step);
            *ret_newest = entry->step;
        }
    }
    ckpt_scan_close(&scan);
    ckpt_store_close(store);
    return good;
}

/* The power comes back: journal replay. How many writes were in the air. */
static uint32_t power_again(uint64_t with)
{
    char why[FORGET_WHY_MAX] = "";
    uint32_t unflushed;

    must(forget_disk_unmount(&disk, why), why);
    unflushed = forget_disk_restore(&disk, with);
    must(forget_disk_mount(&disk, why), why);
    return unflushed;
}

/* Saves step `step`, and the power goes at the moment when the commit is acknowledged. */
static void save_and_cut(struct tally *tally, uint64_t step, uint32_t attempt)
{
    struct ckpt_store *store;

    assert_int_equal(sample_open(&store, root, scene_io(NULL), NULL), 0);
    assert_int_equal(sample_save(store, SAMPLE_FLAT, 4, step, 1, attempt, NULL), 0);
    atomic_store(&disk.shared->dark, true);
    ckpt_store_close(store);
    tally->newest = step;
    tally->acknowledged++;
}

/* One cut in the course of some saves. */
static void cut_once(struct tally *tally, uint32_t number, uint64_t per_save)
{
    uint64_t in = 1 + draw() % (3 * per_save), with = draw() | 1, newest;

    if (number % 4 == 0) {
        save_and_cut(tally, tally->newest + 1, 1 + number);
    } else {
        forget_disk_cut_in(&disk, in);
    }
    for (uint64_t step = tally->newest + 1; !forget_disk_is_dark(&disk); step++) {
        if (save(NULL, step, 1 + number)) {
            tally->newest = step;
            tally->acknowledged++;
        } else if (!forget_disk_is_dark(&disk)) {
            fail_msg("cut %u: the save of step %llu failed with the power on", number,
                     (unsigned long long)step);
        }
    }
    tally->unflushed += power_again(with);
    if (!survived(NULL, tally->newest, &newest)) {
        fail_msg("cut %u, %llu operations, seed %llu: step %llu was acknowledged and is not whole",
                 number, (unsigned long long)in, (unsigned long long)with,
                 (unsigned long long)tally->newest);
    }
    tally->kept_newer += newest > tally->newest;
    tally->newest = newest;
}

static void test_power_cut_anywhere_leaves_every_acknowledged_checkpoint(void **state)
{
    struct tally tally = {0};
    uint64_t per_save;

    (void)state;
    for (uint64_t step = 1; step <= 4; step++) {
        assert_true(save(NULL, step, 1));
    }
    per_save = atomic_load(&disk.shared->count);
    assert_true(save(NULL, 5, 1)); /* retires, recycles: as all to come */
    per_save = atomic_load(&disk.shared->count) - per_save;
    tally.newest = 5;
    for (uint32_t i = 1; i <= cuts; i++) {
        cut_once(&tally, i, per_save);
    }
    printf("%s, %u cuts, %llu operations of the disk a save, %llu checkpoints acknowledged, "
           "%llu writes unflushed, %llu times the unacknowledged one was whole\n",
           disk.type, cuts, (unsigned long long)per_save, (unsigned long long)tally.acknowledged,
           (unsigned long long)tally.unflushed, (unsigned long long)tally.kept_newer);
    assert_false(atomic_load(&disk.shared->overflowed));
    assert_true(tally.unflushed > 0 && tally.acknowledged > 0); /* something was at stake */
}

static int no_fsync(struct ckpt_io *io, int fd)
{
    (void)io;
    (void)fd;
    return 0;
}

static void test_power_cut_without_fsync_is_noticed(void **state)
{
    struct ckpt_io io = *ckpt_io_real();
    struct ckpt_io_ops ops = *io.ops;
    uint32_t lost = 0, tries = 6;

    (void)state;
    ops.fsync = no_fsync;
    io.ops = &ops;
    for (uint32_t i = 1; i <= tries; i++) {
        char why[FORGET_WHY_MAX] = "";
        uint64_t newest;

        must(forget_disk_unmount(&disk, why), why);
        must(forget_disk_format(&disk, why), why);
        must(forget_disk_mount(&disk, why), why);
        assert_true(save(&io, 1, 1) && save(&io, 2, 1));
        atomic_store(&disk.shared->dark, true);
        BL_IGNORE(save(&io, 3, 1), "the power is off");
        power_again(draw() | 1);
        lost += !survived(&io, 2, &newest);
    }
    printf("without fsync %u of %u acknowledged checkpoints were lost\n", lost, tries);
    assert_true(lost >= tries / 2);
}

static int setup(void **state)
{
    char why[FORGET_WHY_MAX] = "";

    (void)state;
    sample_scale = 20; /* 1.6 MB */
    must(forget_disk_open(&disk, type, why), why);
    snprintf(root, sizeof(root), "%s/root", disk.target);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    forget_disk_close(&disk);
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(
            test_power_cut_anywhere_leaves_every_acknowledged_checkpoint, setup, teardown),
        cmocka_unit_test_setup_teardown(test_power_cut_without_fsync_is_noticed, setup, teardown),
    };

    seed = (uint64_t)time(NULL);
    for (int i = argc % 2 == 0 ? 2 : 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--cuts") == 0) {
            cuts = (uint32_t)strtoul(argv[i + 1], NULL, 10);
        } else if (strcmp(argv[i], "--seed") == 0) {
            seed = strtoull(argv[i + 1], NULL, 10);
        } else if (strcmp(argv[i], "--fs") == 0) {
            type = argv[i + 1];
        }
    }
    printf("--seed %llu\n", (unsigned long long)seed);
    if (!scene_has_codec(argc % 2 == 0 ? 2 : 1, argv)) {
        return 77;
    }
    if (!forget_disk_is_possible(type)) {
        return 77;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
