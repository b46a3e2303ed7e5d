/* SPDX-License-Identifier: Apache-2.0 */
/* A checkpoint opened once and loaded many times, in many layouts. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/reader.h"
#include "tests/ckpt/sample.h"

#define DIR "step-000000000005.g1"

static char root[256];

static int setup(void **state)
{
    struct ckpt_store *store;

    (void)state;
    sample_scale = 1;
    sample_dir_make(root, NULL);
    assert_int_equal(sample_open(&store, root, NULL, NULL), 0);
    assert_int_equal(sample_save(store, SAMPLE_COLS, 6, 5, 1, 1, NULL), 0);
    ckpt_store_close(store);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    sample_dir_remove(root);
    return 0;
}

static void load_as(struct ckpt_reader *reader, enum sample_cut cut, uint32_t world)
{
    struct sample_shard shards[8];
    struct ckpt_dest dests[8];
    struct ckpt_load_result result = {0};
    struct bl_errmsg why = {0};

    for (uint32_t rank = 0; rank < world; rank++) {
        sample_shard_init(&shards[rank], cut, world, rank, 0, false);
        dests[rank] = (struct ckpt_dest){&shards[rank].list, shards[rank].data};
    }
    if (ckpt_reader_load(reader, dests, world, &result, &why) != 0) {
        fail_msg("%s", why.text);
    }
    for (uint32_t rank = 0; rank < world; rank++) {
        sample_shard_check(&shards[rank], 5);
        sample_shard_close(&shards[rank]);
    }
}

static void test_reader_opened_once_loads_every_layout(void **state)
{
    struct ckpt_store *store;
    struct ckpt_reader *reader = NULL;
    struct ckpt_place place = {.dir = DIR};

    (void)state;
    assert_int_equal(sample_open(&store, root, NULL, NULL), 0);
    place.store = store;
    assert_int_equal(ckpt_reader_open(&reader, &place, 1, NULL, NULL), 0);
    assert_int_equal(ckpt_reader_manifest(reader)->part_count, 3);
    assert_true(ckpt_reader_manifest(reader)->parts[2].held.extents[0].offset >= 4096);
    for (enum sample_cut cut = SAMPLE_FLAT; cut <= SAMPLE_COLS; cut++) {
        for (uint32_t world = 1; world <= 7; world += 3) {
            load_as(reader, cut, world);
        }
    }
    ckpt_reader_close(reader);
    ckpt_store_close(store);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_reader_opened_once_loads_every_layout, setup,
                                        teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
