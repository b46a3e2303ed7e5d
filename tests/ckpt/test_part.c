/* SPDX-License-Identifier: Apache-2.0 */
/* Parts by themselves: how they are synced, which files they are written into. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "base/digest.h"
#include "ckpt/queue.h"
#include "ckpt/repair.h"
#include "ckpt/store.h"
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

/* ---- no fsync covers more than it should ---- */

static struct ckpt_io_ops sync_ops;
static uint32_t sync_writes, sync_writes_max, sync_flushes; /* transfers since the last fsync */

static int sync_fsync(struct ckpt_io *io, int fd)
{
    sync_writes = 0;
    return ckpt_io_real()->ops->fsync(io, fd);
}

static int sync_gate(struct ckpt_io *io, enum ckpt_op op)
{
    (void)io;
    sync_writes += op == CKPT_OP_WRITE;
    sync_writes_max = sync_writes > sync_writes_max ? sync_writes : sync_writes_max;
    return 0;
}

static int sync_flush(struct ckpt_io *io, int fd, uint64_t offset, uint64_t bytes)
{
    assert_true(offset % CKPT_QUEUE_BYTES == 0);
    sync_flushes++;
    return ckpt_io_real()->ops->flush(io, fd, offset, bytes);
}

static int sync_flush_missing(struct ckpt_io *io, int fd, uint64_t offset, uint64_t bytes)
{
    (void)io, (void)fd, (void)offset, (void)bytes;
    return -ENOSYS;
}

/* The most transfers between two fsyncs of a save of about 40 MB in two parts. */
static uint32_t transfers_unsynced(uint64_t sync_bytes, uint64_t step)
{
    struct ckpt_io io = *ckpt_io_real();
    struct ckpt_store *store;

    io.ops = &sync_ops;
    io.disable = CKPT_IO_NO_DIRECT;
    io.sync_bytes = sync_bytes;
    sync_writes = sync_writes_max = sync_flushes = 0;
    OK(sample_open(&store, root, &io, msg));
    OK(sample_save(store, SAMPLE_FLAT, 4, step, 1, 1, msg));
    ckpt_store_close(store);
    return sync_writes_max;
}

static void test_part_is_synced_as_it_is_written(void **state)
{
    (void)state;
    sample_scale = 900;
    sync_ops = *ckpt_io_real()->ops;
    sync_ops.fsync = sync_fsync;
    sync_ops.gate = sync_gate;
    sync_ops.flush = sync_flush;
    assert_true(transfers_unsynced(0, 1) >= 5);
    assert_true(sync_flushes >= 2); /* one for 16 MB of each part */
    assert_int_equal(transfers_unsynced(CKPT_QUEUE_BYTES, 2), 1);
    sync_ops.flush = sync_flush_missing;
    assert_int_equal(transfers_unsynced(2 * CKPT_QUEUE_BYTES, 3), 2);
}

/* ---- files that are used again ---- */

static void store_open(struct ckpt_store **ret, struct ckpt_io *io)
{
    OK(sample_open(ret, root, io, msg));
}

/* Saves step 1 and retires it: its part files lie in .trash. */
static void trash_fill(struct ckpt_store *store)
{
    OK(sample_save(store, SAMPLE_FLAT, 4, 1, 1, 1, msg));
    OK(ckpt_trash_move(store, "step-000000000001.g1", msg));
}

/* The first part file in .trash, its path in `ret`. */
static bool trash_file(char ret[CKPT_PATH_MAX])
{
    struct ckpt_io *io = ckpt_io_real();
    struct ckpt_names dirs = {0}, files = {0};
    char trash[CKPT_PATH_MAX];
    bool found = false;

    snprintf(trash, sizeof(trash), "%s/.trash", root);
    OK(io->ops->list(io, trash, 100, &dirs));
    for (uint32_t d = 0; d < dirs.count && !found; d++) {
        char dir[CKPT_PATH_MAX];

        OK(ckpt_path_join(dir, trash, dirs.names[d], NULL, msg));
        OK(io->ops->list(io, dir, 100, &files));
        for (uint32_t f = 0; f < files.count && !found; f++) {
            found = strcmp(files.names[f], "part-0000.safetensors") == 0;
            OK(ckpt_path_join(ret, dir, files.names[f], NULL, msg));
        }
        ckpt_names_close(&files);
    }
    ckpt_names_close(&dirs);
    return found;
}

static uint64_t bytes_digest(int fd)
{
    static uint8_t data[1 << 20];
    ssize_t bytes = pread(fd, data, sizeof(data), 0);

    assert_true(bytes > 0);
    return bl_xxh3(data, (size_t)bytes);
}

/* What somebody writes into while it is retired is not used for another save. */
static void test_part_leaves_a_retired_file_that_a_repair_has_open(void **state)
{
    struct ckpt_store *store;
    char path[CKPT_PATH_MAX];
    uint64_t before;
    int fd;

    (void)state;
    store_open(&store, NULL);
    trash_fill(store);
    assert_true(trash_file(path));
    fd = open(path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(flock(fd, LOCK_EX), 0);
    before = bytes_digest(fd);
    OK(sample_save(store, SAMPLE_FLAT, 4, 2, 1, 1, msg));
    assert_true(bytes_digest(fd) == before);
    close(fd);
    sample_load_check(store, "step-000000000002.g1", SAMPLE_FLAT, 4, 2);
    ckpt_store_close(store);
}

static struct ckpt_io_ops trash_ops;
static int rename_lies; /* how many renames out of .trash say that they failed */
static bool trash_synced;

static int lying_rename(struct ckpt_io *io, const char *from, const char *to)
{
    int rc = ckpt_io_real()->ops->rename(io, from, to);

    if (strstr(from, "/.trash/") != NULL) {
        assert_true(trash_synced);
        if (rename_lies > 0) {
            rename_lies--;
            return -EIO;
        }
    }
    return rc;
}

static int noting_open(struct ckpt_io *io, const char *path, int flags, mode_t mode)
{
    const char *name = strrchr(path, '/');

    trash_synced = trash_synced || (name != NULL && strcmp(name, "/.trash") == 0);
    return ckpt_io_real()->ops->open(io, path, flags, mode);
}

/* A network file system may do a rename, and then, asked again, say that it cannot. And before a
 * file is used again its being retired is made durable, whoever retired it. */
static void test_part_recycles_when_the_rename_said_it_failed(void **state)
{
    struct ckpt_io io = *ckpt_io_real();
    struct ckpt_store *store;
    char path[CKPT_PATH_MAX];

    (void)state;
    store_open(&store, NULL);
    trash_fill(store);
    ckpt_store_close(store);
    trash_ops = *io.ops;
    trash_ops.rename = lying_rename;
    trash_ops.open = noting_open;
    io.ops = &trash_ops;
    rename_lies = 1;
    trash_synced = false;
    store_open(&store, &io);
    OK(sample_save(store, SAMPLE_FLAT, 4, 2, 1, 1, msg));
    assert_int_equal(rename_lies, 0);
    assert_true(trash_synced);
    assert_false(trash_file(path)); /* all are in use */
    sample_load_check(store, "step-000000000002.g1", SAMPLE_FLAT, 4, 2);
    ckpt_store_close(store);
}

/* ---- a repair beside a running job ---- */

static struct ckpt_io_ops retire_ops;
static struct ckpt_store *retire_from; /* NULL: it happened */

/* Between the repair's look and its open the checkpoint is retired, and its file used again. */
static int retiring_open(struct ckpt_io *io, const char *path, int flags, mode_t mode)
{
    int fd = ckpt_io_real()->ops->open(io, path, flags, mode);

    if (retire_from != NULL && (flags & O_ACCMODE) == O_WRONLY && strstr(path, "part-") != NULL) {
        OK(ckpt_trash_move(retire_from, "step-000000000001.g1", msg));
        OK(sample_save(retire_from, SAMPLE_FLAT, 4, 2, 1, 1, msg));
        retire_from = NULL;
    }
    return fd;
}

static void test_repair_does_not_write_into_a_file_that_was_used_again(void **state)
{
    struct ckpt_io io = *ckpt_io_real();
    struct ckpt_store *store = NULL, *job_store = NULL, *source = NULL;
    struct ckpt_repair_result result;
    struct ckpt_place copy = {.dir = "step-000000000001.g1"};
    struct bl_errmsg why = {0};
    char path[CKPT_PATH_MAX], out[CKPT_PATH_MAX];
    int fd;

    (void)state;
    snprintf(path, sizeof(path), "%s/source", root);
    OK(sample_open(&source, path, NULL, msg));
    OK(sample_save(source, SAMPLE_FLAT, 4, 1, 1, 1, msg));
    snprintf(out, sizeof(out), "%s/out", root);
    OK(sample_open(&job_store, out, NULL, msg));
    OK(sample_save(job_store, SAMPLE_FLAT, 4, 1, 1, 1, msg));
    OK(ckpt_path_join(path, out, "step-000000000001.g1", "part-0000.safetensors", msg));
    fd = open(path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, "damage", 6, 5000), 6);
    close(fd);
    retire_ops = *io.ops;
    retire_ops.open = retiring_open;
    io.ops = &retire_ops;
    retire_from = job_store;
    OK(sample_open(&store, out, &io, msg));
    copy.store = source;
    const struct ckpt_repair_job job = {
        .store = store, .dir = "step-000000000001.g1", .copies = &copy, .copy_count = 1};

    assert_int_equal(ckpt_repair(&job, &result, &why), BL_ECONFLICT);
    assert_null(retire_from);
    assert_non_null(strstr(why.text, "retired meanwhile"));
    sample_load_check(job_store, "step-000000000002.g1", SAMPLE_FLAT, 4, 2);
    ckpt_store_close(store);
    ckpt_store_close(job_store);
    ckpt_store_close(source);
}

/* ---- an index that claims ---- */

/* More tensors than its bytes can hold, though each of the counts fits alone: 12 bytes of memory
 * for each byte of file were taken. */
static void test_index_that_claims_too_much_is_refused_before_memory_is_taken(void **state)
{
    const uint32_t bytes = 1u << 20;
    uint64_t none = 0, digest, size = bytes;
    struct ckpt_index index = {.part_bytes = 4096,
                               .raw_bytes = 4096,
                               .data_offset = 4096,
                               .chunk_bytes = 1u << 20,
                               .chunk_count = 1,
                               .chunks = &none};
    struct ckpt_index read = {0};
    struct bl_errmsg why = {0};
    uint8_t *data = NULL, *big = calloc(1, bytes);
    size_t small = 0;
    uint32_t claimed = bytes / 16; /* without the header: one too many at least */

    (void)state;
    assert_non_null(big);
    OK(ckpt_index_encode(&index, &data, &small, &digest, msg));
    OK(ckpt_index_decode(&read, data, small, msg)); /* as it is it is good */
    ckpt_index_close(&read);
    memcpy(big, data, small);
    memcpy(big + 16, &size, 8);
    memcpy(big + 56, &claimed, 4);
    digest = bl_xxh3(big, bytes - 8);
    memcpy(big + bytes - 8, &digest, 8);
    assert_int_equal(ckpt_index_decode(&read, big, bytes, &why), BL_EFORMAT);
    assert_non_null(strstr(why.text, "65536 tensors and 0 extents do not fit"));
    free(data);
    free(big);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
        TEST(test_part_is_synced_as_it_is_written),
        TEST(test_part_leaves_a_retired_file_that_a_repair_has_open),
        TEST(test_part_recycles_when_the_rename_said_it_failed),
        TEST(test_repair_does_not_write_into_a_file_that_was_used_again),
        TEST(test_index_that_claims_too_much_is_refused_before_memory_is_taken),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
