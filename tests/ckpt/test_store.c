/* SPDX-License-Identifier: Apache-2.0 */
/* Whole checkpoints: saved in one cut, found, loaded in another, byte by byte. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
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

static int setup_disk(void **state)
{
    (void)state;
    sample_dir_make(root, NULL);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    sample_dir_remove(root);
    return 0;
}

static void check_newest(struct ckpt_store *store, uint64_t step)
{
    struct ckpt_scan scan;
    const struct ckpt_entry *entry;
    struct bl_state_digest digest = sample_digest(step);

    OK(ckpt_scan(store, &scan, msg));
    entry = ckpt_scan_newest(&scan, NULL, 0);
    assert_non_null(entry);
    assert_int_equal(entry->step, step);
    assert_true(bl_state_digest_equal(&entry->digest, &digest));
    sample_load_check(store, entry->dir, SAMPLE_FLAT, 1, step);
    ckpt_scan_close(&scan);
}

static void test_store_loads_the_same_bytes_in_any_other_cut(void **state)
{
    static const uint32_t worlds[] = {1, 2, 3, 4, 7};
    struct ckpt_store *store;

    (void)state;
    OK(sample_open(&store, root, NULL, msg));
    for (uint32_t c = 0; c < 3; c++) {
        for (uint32_t w = 0; w < 5; w++) {
            uint64_t step = 100 + c * 10 + w;
            char dir[CKPT_DIR_MAX];

            OK(sample_save(store, (enum sample_cut)c, worlds[w], step, 7, 1, msg));
            snprintf(dir, sizeof(dir), "step-%012llu.g7", (unsigned long long)step);
            for (uint32_t c2 = 0; c2 < 3; c2++) {
                for (uint32_t w2 = 0; w2 < 5; w2++) {
                    sample_load_check(store, dir, (enum sample_cut)c2, worlds[w2], step);
                }
            }
        }
    }
    check_newest(store, 124);
    ckpt_store_close(store);
}

static void test_store_works_on_every_path_of_io(void **state)
{
    static const unsigned disable[] = {0, CKPT_IO_NO_URING, CKPT_IO_NO_DIRECT, CKPT_IO_NO_REGISTER,
                                       CKPT_IO_NO_URING | CKPT_IO_NO_DIRECT};

    (void)state;
    sample_scale = 150; /* several buffers, an end that is not aligned */
    for (uint32_t i = 0; i < 5; i++) {
        struct ckpt_io io = *ckpt_io_real();
        struct ckpt_store *store;

        io.disable = disable[i];
        io.queue_depth = i == 1 ? 1 : 3;
        OK(sample_open(&store, root, &io, msg));
        OK(sample_save(store, SAMPLE_FLAT, 3, 10 + i, 1, 1, msg));
        check_newest(store, 10 + i);
        ckpt_store_close(store);
    }
}

static void test_store_commit_twice_is_once(void **state)
{
    struct ckpt_store *store;
    struct ckpt_scan scan;

    (void)state;
    OK(sample_open(&store, root, NULL, msg));
    OK(sample_save(store, SAMPLE_FLAT, 4, 5, 1, 1, msg));
    OK(sample_save(store, SAMPLE_ROWS, 3, 5, 1, 2, msg));
    OK(ckpt_scan(store, &scan, msg));
    assert_int_equal(scan.count, 1);
    assert_int_equal(scan.entries[0].part_count, 2);
    ckpt_scan_close(&scan);
    check_newest(store, 5);
    ckpt_store_close(store);
}

static void test_store_of_another_run_is_refused_by_its_id(void **state)
{
    struct ckpt_store_config config = {.path = root, .run = "other", .node = "n0", .create = true};
    struct ckpt_store *store = NULL;
    struct bl_errmsg why = {0};
    char path[300];

    (void)state;
    OK(sample_open(&store, root, NULL, msg));
    OK(sample_save(store, SAMPLE_FLAT, 1, 5, 1, 1, msg));
    ckpt_store_close(store);
    assert_int_equal(ckpt_store_open(&store, &config, &why), BL_EFOREIGN);
    assert_non_null(strstr(why.text, SAMPLE_RUN));
    assert_non_null(strstr(why.text, "--recover"));
    snprintf(path, sizeof(path), "%s/BELAY", root);
    assert_int_equal(unlink(path), 0); /* even then: the manifests tell */
    assert_int_equal(ckpt_store_open(&store, &config, &why), BL_EFOREIGN);
    OK(sample_open(&store, root, NULL, msg)); /* its own run makes it anew */
    check_newest(store, 5);
    ckpt_store_close(store);
}

static void test_store_without_a_root_is_not_made_for_reading(void **state)
{
    struct ckpt_store_config config = {.path = root};
    struct ckpt_store *store = NULL;
    struct bl_errmsg why = {0};
    char deep[300];

    (void)state;
    assert_int_equal(ckpt_store_open(&store, &config, &why), -ENOENT);
    snprintf(deep, sizeof(deep), "%s/not/there", root);
    config.path = deep;
    assert_int_equal(ckpt_store_open(&store, &config, &why), -ENOENT);
    OK(sample_open(&store, deep, NULL, msg));
    ckpt_store_close(store);
}

static void test_store_refuses_what_is_not_built(void **state)
{
    struct ckpt_store_config config = {
        .path = root, .run = SAMPLE_RUN, .node = "n0", .create = true};
    struct ckpt_part_job job = {.name = "part-0000", .codec = "planes"};
    const struct ckpt_attempt attempt = {1, 1, 1, 1};
    struct ckpt_part_result result;
    struct ckpt_store *store = NULL;
    struct bl_errmsg why = {0};

    (void)state;
    OK(ckpt_store_open(&store, &config, msg));
    OK(ckpt_attempt_begin(store, &attempt, msg));
    assert_int_equal(ckpt_save_part(store, &attempt, &job, &result, &why), BL_ENOTBUILT);
    assert_non_null(strstr(why.text, "planes"));
    ckpt_store_close(store);
}

static void test_store_retains_the_newest_and_recycles_the_rest(void **state)
{
    struct ckpt_retain_result result;
    struct ckpt_store *store;
    struct ckpt_scan scan;

    (void)state;
    OK(sample_open(&store, root, NULL, msg));
    for (uint64_t step = 1; step <= 6; step++) {
        OK(sample_save(store, SAMPLE_FLAT, 4, step, 1, 1, msg));
        OK(ckpt_retain(store, 3, NULL, 0, &result, msg));
        OK(ckpt_sweep(store, 1, UINT64_MAX, msg));
        assert_int_equal(result.kept, step < 3 ? step : 3);
        assert_int_equal(result.removed, step > 3 ? 1 : 0);
    }
    OK(ckpt_scan(store, &scan, msg));
    assert_int_equal(scan.count, 3);
    for (uint32_t i = 0; i < 3; i++) {
        sample_load_check(store, scan.entries[i].dir, SAMPLE_ROWS, 3, 6 - i);
    }
    ckpt_scan_close(&scan);
    OK(ckpt_retain(store, 0, NULL, 0, &result, msg)); /* never fewer than two */
    assert_int_equal(result.kept, 2);
    ckpt_store_close(store);
}

static void test_store_walks_back_over_cut_lines_and_broken_ones(void **state)
{
    const struct ckpt_cut cuts[] = {{3, 20}};
    struct ckpt_store *store;
    struct ckpt_scan scan;
    char path[300];

    (void)state;
    OK(sample_open(&store, root, NULL, msg));
    OK(sample_save(store, SAMPLE_FLAT, 2, 10, 1, 1, msg));
    OK(sample_save(store, SAMPLE_FLAT, 2, 20, 2, 1, msg));
    OK(sample_save(store, SAMPLE_FLAT, 2, 30, 2, 1, msg)); /* a plan of generation 3 ended it */
    OK(ckpt_scan(store, &scan, msg));
    assert_int_equal(ckpt_scan_newest(&scan, NULL, 0)->step, 30);
    assert_int_equal(ckpt_scan_newest(&scan, cuts, 1)->step, 20);
    ckpt_scan_close(&scan);
    snprintf(path, sizeof(path), "%s/step-000000000030.g2/part-0000.safetensors", root);
    assert_int_equal(truncate(path, 100), 0);
    snprintf(path, sizeof(path), "%s/step-000000000020.g2/manifest.json", root);
    assert_int_equal(unlink(path), 0);
    OK(ckpt_scan(store, &scan, msg));
    assert_int_equal(scan.count, 3);
    assert_int_equal(ckpt_scan_newest(&scan, NULL, 0)->step, 10);
    assert_int_equal(scan.entries[0].state, CKPT_BROKEN);
    assert_non_null(strstr(scan.entries[0].why, "part-0000.safetensors: 100 bytes"));
    ckpt_scan_close(&scan);
    ckpt_store_close(store);
}

static void test_store_finishes_a_cut_off_commit_forward(void **state)
{
    const struct ckpt_store_config reading = {.path = root};
    struct ckpt_store *store;
    struct ckpt_scan scan;
    char from[400], to[400];

    (void)state;
    OK(sample_open(&store, root, NULL, msg));
    OK(sample_save(store, SAMPLE_FLAT, 2, 10, 1, 1, msg));
    snprintf(from, sizeof(from), "%s/step-000000000010.g1", root);
    snprintf(to, sizeof(to), "%s/.step-000000000010.g1.a1.00000000000000aa.tmp", root);
    assert_int_equal(rename(from, to), 0);
    ckpt_store_close(store);
    OK(ckpt_store_open(&store, &reading, msg));
    OK(ckpt_scan(store, &scan, msg));
    assert_int_equal(scan.entries[0].state, CKPT_FORWARD); /* a reader only says so */
    assert_null(ckpt_scan_newest(&scan, NULL, 0));
    ckpt_scan_close(&scan);
    ckpt_store_close(store);
    OK(sample_open(&store, root, NULL, msg));
    check_newest(store, 10);
    ckpt_store_close(store);
}

static void test_store_commit_refuses_an_incomplete_state(void **state)
{
    const struct ckpt_attempt attempt = {1, 1, 1, 1};
    struct ckpt_manifest manifest = {.run = SAMPLE_RUN, .generation = 1, .step = 1};
    struct ckpt_part_result part;
    struct ckpt_commit_result result;
    struct sample_shard shards[2];
    struct ckpt_part parts[2] = {0};
    struct bl_errmsg why = {0};
    struct ckpt_store *store;

    (void)state;
    OK(sample_open(&store, root, NULL, msg));
    OK(ckpt_attempt_begin(store, &attempt, msg));
    for (uint32_t i = 0; i < 2; i++) {
        char name[16];
        struct ckpt_source source;
        struct ckpt_part_job job = {.name = name, .sources = &source, .source_count = 1};

        snprintf(name, sizeof(name), "part-%u", i);
        sample_shard_init(&shards[i], SAMPLE_FLAT, 2, i, 1, true);
        source = (struct ckpt_source){.list = &shards[i].list, .base = shards[i].data};
        OK(ckpt_save_part(store, &attempt, &job, &part, msg));
        snprintf(parts[i].name, sizeof(parts[i].name), "%s", name);
        parts[i].bytes = part.bytes;
        parts[i].index_digest = part.index_digest;
        sample_shard_close(&shards[i]);
    }
    manifest.parts = parts;
    manifest.part_count = 1;
    assert_int_equal(ckpt_commit(store, &attempt, &manifest, &result, &why), BL_ENOSTATE);
    manifest.part_count = 2;
    manifest.state.sum[0] = 1;
    assert_int_equal(ckpt_commit(store, &attempt, &manifest, &result, &why), BL_EDIGEST);
    manifest.state.sum[0] = 0; /* not known: taken from the parts */
    parts[1].index_digest ^= 1;
    assert_int_equal(ckpt_commit(store, &attempt, &manifest, &result, &why), BL_EDIGEST);
    parts[1].index_digest ^= 1;
    OK(ckpt_commit(store, &attempt, &manifest, &result, msg));
    assert_false(result.already);
    for (uint32_t i = 0; i < 2; i++) {
        bl_extent_list_close(&parts[i].held);
    }
    check_newest(store, 1);
    ckpt_store_close(store);
}

static void test_store_load_lists_what_is_not_there(void **state)
{
    struct sample_shard shard;
    struct ckpt_dest dest;
    struct ckpt_load_result result;
    struct bl_errmsg why = {0};
    struct ckpt_store *store;
    struct bl_tensor extra = {"extra.weight", BL_KIND_PARAM, BL_F32, 1, {5}};
    struct bl_extent extent;
    uint32_t index;

    (void)state;
    OK(sample_open(&store, root, NULL, msg));
    OK(sample_save(store, SAMPLE_FLAT, 2, 10, 1, 1, msg));
    sample_shard_init(&shard, SAMPLE_FLAT, 1, 0, 0, false);
    OK(bl_extent_list_tensor(&shard.list, &extra, &index, msg));
    bl_extent_whole(&extent, &extra, index, 0, 5);
    OK(bl_extent_list_add(&shard.list, &extent));
    dest = (struct ckpt_dest){&shard.list, shard.data};
    assert_int_equal(ckpt_load(store, "step-000000000010.g1", &dest, 1, &result, &why),
                     BL_ENOSTATE);
    assert_non_null(strstr(why.text, "extra.weight"));
    shard.list.extent_count--;
    shard.list.tensors[0].shape[0]++;
    assert_int_equal(ckpt_load(store, "step-000000000010.g1", &dest, 1, &result, &why), BL_EFORMAT);
    sample_shard_close(&shard);
    ckpt_store_close(store);
}

static void test_store_sweep_leaves_the_save_of_a_later_step_alone(void **state)
{
    const struct ckpt_attempt dead[] = {{4, 1, 1, 9}, {5, 2, 1, 8}};
    const struct ckpt_attempt live[] = {{6, 2, 1, 7}, {5, 3, 1, 6}};
    struct ckpt_store *store;
    struct ckpt_scan scan;

    (void)state;
    OK(sample_open(&store, root, NULL, msg));
    for (uint32_t i = 0; i < 2; i++) {
        OK(ckpt_attempt_begin(store, &dead[i], msg));
        OK(ckpt_attempt_begin(store, &live[i], msg));
    }
    OK(ckpt_sweep(store, 2, 5, msg));
    OK(ckpt_scan(store, &scan, msg));
    assert_int_equal(scan.count, 2);
    assert_int_equal(scan.entries[0].step, 6);
    assert_int_equal(scan.entries[1].generation, 3);
    assert_int_equal(scan.entries[0].state, CKPT_LEFTOVER);
    ckpt_scan_close(&scan);
    ckpt_store_close(store);
}

static atomic_int saver_done;

static void *saver(void *arg)
{
    struct ckpt_store *store = arg;
    struct ckpt_retain_result result;
    int rc = 0;

    for (uint64_t step = 3; rc == 0 && step < 40; step++) {
        rc = sample_save(store, SAMPLE_FLAT, 2, step, 1, 1, NULL);
        rc = rc < 0 ? rc : ckpt_retain(store, 2, NULL, 0, &result, NULL);
        rc = rc < 0 ? rc : ckpt_sweep(store, 1, step, NULL);
    }
    atomic_store(&saver_done, 1);
    return rc < 0 ? NULL : arg;
}

static void test_store_is_looked_at_while_somebody_saves(void **state)
{
    const struct ckpt_store_config reading = {.path = root};
    struct ckpt_store *store, *reader;
    pthread_t thread;
    void *result = NULL;

    (void)state;
    OK(sample_open(&store, root, NULL, msg));
    OK(sample_save(store, SAMPLE_FLAT, 2, 1, 1, 1, msg));
    OK(sample_save(store, SAMPLE_FLAT, 2, 2, 1, 1, msg));
    OK(ckpt_store_open(&reader, &reading, msg));
    atomic_store(&saver_done, 0);
    assert_int_equal(pthread_create(&thread, NULL, saver, store), 0);
    while (atomic_load(&saver_done) == 0) {
        struct ckpt_scan scan;

        OK(ckpt_scan(reader, &scan, msg));
        assert_non_null(ckpt_scan_newest(&scan, NULL, 0));
        for (uint32_t i = 0; i < scan.count; i++) {
            assert_int_not_equal(scan.entries[i].state, CKPT_BROKEN);
        }
        ckpt_scan_close(&scan);
    }
    assert_int_equal(pthread_join(thread, &result), 0);
    assert_ptr_equal(result, store);
    ckpt_store_close(reader);
    ckpt_store_close(store);
}

/* ---- Pull sources ---- */

struct puller {
    const struct bl_extent_list *list;
    const uint8_t *data;
    uint64_t calls, fail_at; /* fail_at: the call that fails, 0 none */
    uint32_t extent;
    uint64_t next; /* the element that must come next in `extent` */
    bool out_of_order;
};

static int pull(void *arg, uint32_t extent, uint64_t lo, uint64_t hi, void *dest,
                struct bl_errmsg *msg)
{
    struct puller *puller = arg;
    const struct bl_extent *from = &puller->list->extents[extent];
    uint64_t each = bl_dtype_bytes(puller->list->tensors[from->tensor].dtype);

    if (++puller->calls == puller->fail_at) {
        return bl_err(msg, -EIO, "read elsewhere");
    }
    if (extent != puller->extent) { /* the list is sorted: the part's order is the list's */
        puller->out_of_order |= extent != puller->extent + 1 || lo != 0;
        puller->extent = extent;
        puller->next = 0;
    }
    puller->out_of_order |= lo != puller->next || hi <= lo || hi > bl_extent_elems(from);
    puller->next = hi;
    memcpy(dest, puller->data + from->offset + lo * each, (size_t)((hi - lo) * each));
    return 0;
}

static void test_store_pull_sources_give_the_same_part(void **state)
{
    const struct ckpt_attempt attempt = {5, 1, 1, 1};
    struct sample_shard shard;
    struct puller puller;
    struct ckpt_source pushed, pulled;
    struct ckpt_part_job job = {.name = "part-0000", .sources = &pushed, .source_count = 1};
    struct ckpt_part_result results[2];
    struct ckpt_store *store;
    struct bl_errmsg why = {0};

    (void)state;
    sample_scale = 100; /* extents over several transfers */
    sample_shard_init(&shard, SAMPLE_COLS, 2, 0, 5, true);
    assert_int_equal(ckpt_part_sort(&shard.list), 0);
    puller = (struct puller){.list = &shard.list, .data = shard.data};
    pushed = (struct ckpt_source){.list = &shard.list, .base = shard.data};
    pulled = (struct ckpt_source){.list = &shard.list, .fetch = pull, .arg = &puller};
    OK(sample_open(&store, root, NULL, msg));
    OK(ckpt_attempt_begin(store, &attempt, msg));
    OK(ckpt_save_part(store, &attempt, &job, &results[0], msg));
    job.name = "part-0001";
    job.sources = &pulled;
    job.expect = &results[0].state;
    OK(ckpt_save_part(store, &attempt, &job, &results[1], msg));
    assert_false(puller.out_of_order);
    assert_int_equal(puller.extent, shard.list.extent_count - 1);
    assert_int_equal(results[0].bytes, results[1].bytes);
    assert_int_equal(results[0].index_digest, results[1].index_digest);
    assert_true(bl_state_digest_equal(&results[0].state, &results[1].state));

    puller.fail_at = puller.calls + 3;
    job.name = "part-0002";
    assert_int_equal(ckpt_save_part(store, &attempt, &job, &results[1], &why), -EIO);
    assert_non_null(strstr(why.text, "tensor "));
    assert_non_null(strstr(why.text, "read elsewhere"));
    puller.fail_at = 0;
    results[0].state.sum[0] ^= 1; /* other than expected: told, and nothing stays */
    assert_int_equal(ckpt_save_part(store, &attempt, &job, &results[1], &why), BL_EDIGEST);
    results[0].state.sum[0] ^= 1;
    OK(ckpt_save_part(store, &attempt, &job, &results[1], msg));
    ckpt_store_close(store);
    sample_shard_close(&shard);
}

/* The file system reports space, and has none (or a quota is smaller): only allocating tells. */
static void test_store_refuses_a_save_early_when_space_is_not_there(void **state)
{
    struct ckpt_store *store, *full;
    struct ckpt_io_fault fault;
    uint32_t refused = 0;

    (void)state;
    OK(sample_open(&store, root, NULL, msg));
    OK(sample_save(store, SAMPLE_FLAT, 2, 5, 1, 1, msg));
    for (uint64_t at = 1; at < 40 && refused < 2; at++) {
        struct bl_errmsg why = {0};
        const char *said;
        int rc;

        ckpt_io_fault_init(&fault, CKPT_FAULT_ERROR, at, refused == 0 ? -ENOSPC : -EDQUOT);
        OK(sample_open(&full, root, &fault.io, msg));
        rc = sample_save(full, SAMPLE_FLAT, 2, 100 + at, 1, 1, &why);
        ckpt_store_close(full);
        if (fault.hit != CKPT_OP_ALLOCATE || rc == 0) {
            continue; /* another operation, or the reserve, which nobody needs yet */
        }
        refused++;
        at -= refused == 1; /* the same again, by quota */
        assert_int_equal(rc, fault.error);
        assert_non_null(strstr(why.text, "allocate "));
        assert_non_null(strstr(why.text, "part-0000.safetensors"));
        said = strstr(why.text, "reports ");
        assert_non_null(said);
        assert_true(strtoull(said + 8, NULL, 10) > 1000000);
        sample_load_check(store, "step-000000000005.g1", SAMPLE_FLAT, 3, 5);
    }
    assert_int_equal(refused, 2);
    ckpt_store_close(store);
}

/* ---- a file system that shows new files late ---- */

static struct ckpt_io_ops late_ops;
static int late_left; /* how often an index is not seen yet */

static int late_open(struct ckpt_io *io, const char *path, int flags, mode_t mode)
{
    const char *dot = strrchr(path, '.');

    if (dot != NULL && strcmp(dot, ".index") == 0 && (flags & O_CREAT) == 0 && late_left > 0) {
        late_left--;
        return -ENOENT;
    }
    return ckpt_io_real()->ops->open(io, path, flags, mode);
}

static void test_store_commit_waits_for_parts_that_are_seen_late(void **state)
{
    struct ckpt_io io = *ckpt_io_real();
    const struct ckpt_store_config config = {
        .path = root, .run = SAMPLE_RUN, .node = "n0", .create = true, .shared = true, .io = &io};
    struct ckpt_store *store;
    struct bl_errmsg why = {0};

    (void)state;
    late_ops = *io.ops;
    late_ops.open = late_open;
    io.ops = &late_ops;
    OK(ckpt_store_open(&store, &config, msg));
    late_left = 3;
    OK(sample_save(store, SAMPLE_FLAT, 4, 5, 1, 1, msg));
    assert_int_equal(late_left, 0);
    check_newest(store, 5);
    late_left = INT_MAX; /* for good: it ends, and names the file */
    assert_int_equal(sample_save(store, SAMPLE_FLAT, 4, 6, 1, 1, &why), -ENOENT);
    assert_non_null(strstr(why.text, "part-0000.index"));
    late_left = 0;
    check_newest(store, 5);
    ckpt_store_close(store);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
        TEST(test_store_loads_the_same_bytes_in_any_other_cut),
        cmocka_unit_test_setup_teardown(test_store_works_on_every_path_of_io, setup_disk, teardown),
        TEST(test_store_commit_twice_is_once),
        TEST(test_store_of_another_run_is_refused_by_its_id),
        TEST(test_store_without_a_root_is_not_made_for_reading),
        TEST(test_store_refuses_what_is_not_built),
        TEST(test_store_retains_the_newest_and_recycles_the_rest),
        TEST(test_store_walks_back_over_cut_lines_and_broken_ones),
        TEST(test_store_finishes_a_cut_off_commit_forward),
        TEST(test_store_commit_refuses_an_incomplete_state),
        TEST(test_store_load_lists_what_is_not_there),
        TEST(test_store_is_looked_at_while_somebody_saves),
        TEST(test_store_pull_sources_give_the_same_part),
        TEST(test_store_sweep_leaves_the_save_of_a_later_step_alone),
        TEST(test_store_refuses_a_save_early_when_space_is_not_there),
        TEST(test_store_commit_waits_for_parts_that_are_seen_late),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
