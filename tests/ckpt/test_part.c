/* SPDX-License-Identifier: Apache-2.0 */
/* Parts by themselves: how they are synced, and what is read of them. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ckpt/queue.h"
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_part_is_synced_as_it_is_written, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
