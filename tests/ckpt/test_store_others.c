/* SPDX-License-Identifier: Apache-2.0 */
/* A store is not alone: two engines at one commit, people who keep files, disks that fail. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/ckpt/sample.h"

static char root[256];

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

/* ---- two commits at once ---- */

static struct ckpt_io_ops race_ops, refuse_ops;
static const struct ckpt_manifest *race_ours; /* of the first engine; NULL: nothing happens */
static bool race_whole;                       /* the second engine comes to its end, and first */

static bool is_final_name(const char *path)
{
    return strstr(path, "/step-") != NULL && strcmp(path + strlen(path) - 3, ".g1") == 0;
}

static int refuse_rename(struct ckpt_io *io, const char *from, const char *to)
{
    return is_final_name(to) ? -EIO : ckpt_io_real()->ops->rename(io, from, to);
}

/* Another engine at the same commit, with a manifest of its own. */
static void race_commit(void)
{
    const struct ckpt_attempt attempt = {5, 1, 1, 77};
    const struct ckpt_manifest *ours = race_ours;
    struct ckpt_io io = *ckpt_io_real();
    struct ckpt_commit_result result;
    struct ckpt_manifest manifest;
    struct ckpt_store *store;

    race_ours = NULL;
    refuse_ops = *io.ops;
    refuse_ops.rename = refuse_rename;
    io.ops = race_whole ? io.ops : &refuse_ops;
    OK(sample_open(&store, root, &io, msg));
    sample_manifest_init(&manifest, &attempt, 4);
    for (uint32_t p = 0; p < manifest.part_count; p++) {
        manifest.parts[p] = ours->parts[p];
        memset(&manifest.parts[p].held, 0, sizeof(manifest.parts[p].held));
    }
    snprintf(manifest.writer, sizeof(manifest.writer), "the other");
    assert_int_equal(ckpt_commit(store, &attempt, &manifest, &result, NULL), race_whole ? 0 : -EIO);
    ckpt_manifest_close(&manifest);
    ckpt_store_close(store);
}

static int race_rename(struct ckpt_io *io, const char *from, const char *to)
{
    if (race_ours != NULL && is_final_name(to)) {
        race_commit();
    }
    return ckpt_io_real()->ops->rename(io, from, to);
}

/* Whoever wins: what is told is the digest of the manifest that stands. */
static void check_race(bool whole)
{
    const struct ckpt_attempt attempt = {5, 1, 1, 77};
    struct ckpt_io io = *ckpt_io_real();
    struct ckpt_commit_result result;
    struct ckpt_manifest manifest, stands;
    struct ckpt_store *store;
    struct ckpt_scan scan;

    race_ops = *io.ops;
    race_ops.rename = race_rename;
    io.ops = &race_ops;
    OK(sample_open(&store, root, &io, msg));
    sample_manifest_init(&manifest, &attempt, 4);
    OK(ckpt_attempt_begin(store, &attempt, msg));
    for (uint32_t p = 0; p < manifest.part_count; p++) {
        OK(sample_save_part(store, &attempt, SAMPLE_FLAT, 4, p, &manifest.parts[p], msg));
    }
    race_ours = &manifest;
    race_whole = whole;
    OK(ckpt_commit(store, &attempt, &manifest, &result, msg));
    assert_null(race_ours);
    assert_int_equal(result.already, whole);
    OK(ckpt_scan(store, &scan, msg));
    assert_int_equal(scan.count, 1);
    assert_int_equal(scan.entries[0].state, CKPT_GOOD);
    assert_int_equal(scan.entries[0].manifest_digest, result.manifest_digest);
    OK(ckpt_manifest_load(store, result.dir, &stands, msg));
    assert_string_equal(stands.writer, "the other");
    ckpt_manifest_close(&stands);
    ckpt_scan_close(&scan);
    ckpt_manifest_close(&manifest);
    ckpt_store_close(store);
}

static void test_store_commit_tells_the_manifest_that_stands(void **state)
{
    (void)state;
    check_race(false);
    sample_dir_remove(root);
    check_race(true);
}

/* ---- what retention must not destroy ---- */

static void test_store_writes_over_no_file_that_has_a_second_name(void **state)
{
    char path[300], kept[300], *before = NULL, *after = NULL;
    size_t bytes = 0, bytes_after = 0;
    struct ckpt_retain_result result;
    struct ckpt_store *store;

    (void)state;
    OK(sample_open(&store, root, NULL, msg));
    for (uint64_t step = 1; step <= 3; step++) {
        OK(sample_save(store, SAMPLE_FLAT, 2, step, 1, 1, msg));
    }
    snprintf(path, sizeof(path), "%s/step-000000000001.g1/part-0000.safetensors", root);
    snprintf(kept, sizeof(kept), "%s/kept", root);
    assert_int_equal(link(path, kept), 0); /* as cp -al does */
    OK(ckpt_io_read_file(ckpt_io_real(), kept, 1 << 24, &before, &bytes, msg));
    OK(ckpt_retain(store, 2, NULL, 0, &result, msg));
    assert_int_equal(result.removed, 1);
    OK(sample_save(store, SAMPLE_FLAT, 2, 4, 1, 1, msg));
    OK(ckpt_io_read_file(ckpt_io_real(), kept, 1 << 24, &after, &bytes_after, msg));
    assert_int_equal(bytes_after, bytes);
    assert_memory_equal(after, before, bytes);
    sample_load_check(store, "step-000000000004.g1", SAMPLE_ROWS, 3, 4);
    free(before);
    free(after);
    ckpt_store_close(store);
}

static struct ckpt_io_ops dark_ops;

static int dark_size(struct ckpt_io *io, const char *path, uint64_t *ret_bytes)
{
    return strstr(path, "/step-000000000001.g1") != NULL
               ? -EIO
               : ckpt_io_real()->ops->size(io, path, ret_bytes);
}

static void test_store_retention_leaves_what_it_cannot_read(void **state)
{
    struct ckpt_io io = *ckpt_io_real();
    struct ckpt_retain_result result;
    struct ckpt_store *store;

    (void)state;
    OK(sample_open(&store, root, &io, msg));
    for (uint64_t step = 1; step <= 4; step++) {
        OK(sample_save(store, SAMPLE_FLAT, 2, step, 1, 1, msg));
    }
    dark_ops = *io.ops;
    dark_ops.size = dark_size;
    io.ops = &dark_ops;
    OK(ckpt_retain(store, 2, NULL, 0, &result, msg));
    assert_int_equal(result.removed, 1);
    io = *ckpt_io_real();
    sample_load_check(store, "step-000000000001.g1", SAMPLE_ROWS, 2, 1);
    ckpt_store_close(store);
}

/* A good checkpoint that cannot be read at the moment makes way for no commit. */
static void test_store_commit_moves_nothing_that_it_cannot_read(void **state)
{
    struct ckpt_io io = *ckpt_io_real();
    struct bl_errmsg why = {0};
    struct ckpt_store *store;

    (void)state;
    OK(sample_open(&store, root, &io, msg));
    OK(sample_save(store, SAMPLE_FLAT, 2, 1, 1, 1, msg));
    dark_ops = *io.ops;
    dark_ops.size = dark_size;
    io.ops = &dark_ops;
    assert_int_equal(sample_save(store, SAMPLE_FLAT, 2, 1, 1, 2, &why), -EIO);
    assert_non_null(strstr(why.text, "step-000000000001.g1"));
    io = *ckpt_io_real();
    sample_load_check(store, "step-000000000001.g1", SAMPLE_ROWS, 2, 1);
    OK(sample_save(store, SAMPLE_FLAT, 2, 1, 1, 3,
                   msg)); /* and it is told as being there already */
    ckpt_store_close(store);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
        TEST(test_store_commit_tells_the_manifest_that_stands),
        TEST(test_store_writes_over_no_file_that_has_a_second_name),
        TEST(test_store_commit_moves_nothing_that_it_cannot_read),
        TEST(test_store_retention_leaves_what_it_cannot_read),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
