/* SPDX-License-Identifier: Apache-2.0 */
/* A disk that is really full: a small tmpfs in a mount namespace of its own. Needs root, else 77.
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <unistd.h>

#include "tests/ckpt/sample.h"

static char root[256];

static int setup(void **state)
{
    (void)state;
    sample_scale = 40; /* a checkpoint of 3 MB */
    sample_dir_make(root, NULL);
    assert_int_equal(mount("belay-test", root, "tmpfs", 0, "size=8m"), 0);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    umount2(root, MNT_DETACH);
    rmdir(root);
    return 0;
}

static void path_of(char *ret, const char *name)
{
    snprintf(ret, 512, "%s/%s", root, name);
}

/* Takes all the space that is left but `spare` bytes. */
static void fill(uint64_t spare)
{
    char path[512];
    int fd;

    path_of(path, "filler");
    fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    for (off_t at = 0;; at += 4096) {
        if (fallocate(fd, 0, at, 4096) != 0) {
            assert_int_equal(errno, ENOSPC);
            assert_int_equal(ftruncate(fd, at > (off_t)spare ? at - (off_t)spare : 0), 0);
            break;
        }
    }
    close(fd);
}

static void unfill(void)
{
    char path[512];

    path_of(path, "filler");
    assert_int_equal(unlink(path), 0);
}

static void check_newest(struct ckpt_store *store, uint64_t step)
{
    struct ckpt_scan scan;

    assert_int_equal(ckpt_scan(store, &scan, NULL), 0);
    assert_non_null(ckpt_scan_newest(&scan, NULL, 0));
    assert_int_equal(ckpt_scan_newest(&scan, NULL, 0)->step, step);
    sample_load_check(store, ckpt_scan_newest(&scan, NULL, 0)->dir, SAMPLE_FLAT, 2, step);
    ckpt_scan_close(&scan);
}

static void test_full_disk_is_named_and_the_old_checkpoint_stays(void **state)
{
    struct bl_errmsg why = {0};
    struct ckpt_store *store;
    char path[512];

    (void)state;
    assert_int_equal(sample_open(&store, root, NULL, NULL), 0);
    assert_int_equal(sample_save(store, SAMPLE_FLAT, 2, 1, 1, 1, NULL), 0);
    fill(1000000);
    assert_int_equal(sample_save(store, SAMPLE_FLAT, 2, 2, 1, 1, &why), -ENOSPC);
    assert_non_null(strstr(why.text, "part-0000.safetensors"));
    assert_non_null(strstr(why.text, " bytes"));
    check_newest(store, 1);
    path_of(path, ".step-000000000002.g1.a1.000000abcdef0002.tmp/part-0000.safetensors");
    assert_int_equal(access(path, F_OK), -1); /* its space is free again at once */
    unfill();
    assert_int_equal(ckpt_sweep(store, 1, UINT64_MAX, NULL), 0);
    assert_int_equal(sample_save(store, SAMPLE_FLAT, 2, 2, 1, 2, NULL), 0);
    check_newest(store, 2);
    ckpt_store_close(store);
}

static void test_full_disk_at_the_commit_uses_the_reserve(void **state)
{
    const struct ckpt_attempt attempt = {5, 1, 1, 42};
    struct ckpt_manifest manifest = {.run = SAMPLE_RUN, .generation = 1, .step = 5};
    struct ckpt_commit_result committed;
    struct ckpt_part_result part;
    struct ckpt_part parts[1] = {0};
    struct sample_shard shard;
    struct ckpt_source source;
    struct ckpt_part_job job = {.name = "part-0000", .sources = &source, .source_count = 1};
    struct bl_errmsg why = {0};
    struct ckpt_store *store;

    (void)state;
    assert_int_equal(sample_open(&store, root, NULL, NULL), 0);
    sample_shard_init(&shard, SAMPLE_FLAT, 1, 0, 5, true);
    source = (struct ckpt_source){.list = &shard.list, .base = shard.data};
    assert_int_equal(ckpt_attempt_begin(store, &attempt, NULL), 0);
    assert_int_equal(ckpt_save_part(store, &attempt, &job, &part, NULL), 0);
    fill(0); /* the last free byte goes between part and commit */
    snprintf(parts[0].name, sizeof(parts[0].name), "%s", part.name);
    parts[0].bytes = part.bytes;
    parts[0].index_digest = part.index_digest;
    manifest.parts = parts;
    manifest.part_count = 1;
    if (ckpt_commit(store, &attempt, &manifest, &committed, &why) != 0) {
        fail_msg("%s", why.text);
    }
    assert_true(committed.reserve_used);
    check_newest(store, 5);
    bl_extent_list_close(&parts[0].held);
    sample_shard_close(&shard);
    ckpt_store_close(store);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_full_disk_is_named_and_the_old_checkpoint_stays, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_full_disk_at_the_commit_uses_the_reserve, setup,
                                        teardown),
    };

    if (geteuid() != 0 || unshare(CLONE_NEWNS) != 0 ||
        mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0) {
        fprintf(stderr, "skipped: needs root for a mount namespace\n");
        return 77;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
