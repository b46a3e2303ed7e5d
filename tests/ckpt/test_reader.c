/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A checkpoint opened once and loaded many times, in many layouts; and what happens when one of its
 * copies is damaged: the bytes come from another, and each healing is told.
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
#include <sys/stat.h>
#include <unistd.h>

#include "ckpt/reader.h"
#include "tests/ckpt/sample.h"

#define DIR    "step-000000000005.g1"
#define STEP   5
#define COPIES 3

/* The same state three times: twice the same, once cut otherwise and with the other codec. */
static bool is_zstd; /* the first two; else the third */
static char roots[COPIES][256];
static struct ckpt_store *stores[COPIES];
static struct ckpt_io_fault fault; /* under stores[0] */
static struct ckpt_io plain;       /* under the others */

static int setup_codec(bool zstd)
{
    is_zstd = zstd;
    sample_scale = 80; /* parts of two chunks */
    ckpt_io_fault_init(&fault, CKPT_FAULT_NONE, 0, 0);
    fault.reads = true;
    plain = *ckpt_io_real();
    plain.disable = CKPT_IO_NO_URING | CKPT_IO_NO_DIRECT; /* hundreds of small looks */
    plain.queue_depth = 1;
    plain.codec_threads = 1;
    fault.io.disable = CKPT_IO_NO_REGISTER;
    fault.io.queue_depth = 2;
    for (int c = 0; c < COPIES; c++) {
        sample_dir_make(roots[c], access("/dev/shm", W_OK) == 0 ? "/dev/shm" : NULL);
        assert_int_equal(sample_open(&stores[c], roots[c], c == 0 ? &fault.io : &plain, NULL), 0);
        sample_codec = (c < 2) == zstd ? "zstd" : "none";
        assert_int_equal(sample_save(stores[c], c < 2 ? SAMPLE_COLS : SAMPLE_FLAT, c < 2 ? 6 : 3,
                                     STEP, 1, 1, NULL),
                         0);
    }
    return 0;
}

static int setup_none(void **state)
{
    (void)state;
    return setup_codec(false);
}

static int setup_zstd(void **state)
{
    (void)state;
    return setup_codec(true);
}

static int teardown(void **state)
{
    (void)state;
    for (int c = 0; c < COPIES; c++) {
        ckpt_store_close(stores[c]);
        sample_dir_remove(roots[c]);
    }
    return 0;
}

/* ---- what was told ---- */

struct told {
    uint32_t count;
    char file[512], tensor[128], from[512]; /* of the newest */
    uint32_t chunk;
};

static void on_healed(void *arg, const char *file, uint32_t chunk, const char *tensor,
                      const char *from)
{
    struct told *told = arg;

    told->count++;
    told->chunk = chunk;
    snprintf(told->file, sizeof(told->file), "%s", file);
    snprintf(told->tensor, sizeof(told->tensor), "%s", tensor);
    snprintf(told->from, sizeof(told->from), "%s", from);
}

static int reader_open(struct ckpt_reader **ret, const int *order, uint32_t count,
                       struct told *told, uint64_t memory_max, struct bl_errmsg *why)
{
    struct ckpt_reader_config config = {.memory_max = memory_max, .healed = on_healed, .arg = told};
    struct ckpt_place places[COPIES];

    memset(told, 0, sizeof(*told));
    for (uint32_t i = 0; i < count; i++) {
        places[i] = (struct ckpt_place){stores[order[i]], DIR};
    }
    return ckpt_reader_open(ret, places, count, &config, why);
}

static int load_as(struct ckpt_reader *reader, enum sample_cut cut, uint32_t world,
                   struct ckpt_load_result *result, struct bl_errmsg *why)
{
    struct sample_shard shards[8];
    struct ckpt_dest dests[8];
    int rc;

    memset(result, 0, sizeof(*result));
    for (uint32_t rank = 0; rank < world; rank++) {
        sample_shard_init(&shards[rank], cut, world, rank, 0, false);
        dests[rank] = (struct ckpt_dest){&shards[rank].list, shards[rank].data};
    }
    rc = ckpt_reader_load(reader, dests, world, result, why);
    for (uint32_t rank = 0; rank < world; rank++) {
        if (rc == 0) {
            sample_shard_check(&shards[rank], STEP);
        }
        sample_shard_close(&shards[rank]);
    }
    return rc;
}

/* Opens the copies in this order, loads once, closes. */
static int load_from(const int *order, uint32_t count, struct told *told, struct bl_errmsg *why)
{
    struct ckpt_load_result result;
    struct ckpt_reader *reader = NULL;
    int rc = reader_open(&reader, order, count, told, 0, why);

    if (rc == 0) {
        rc = load_as(reader, SAMPLE_ROWS, 3, &result, why);
        assert_true(rc != 0 || result.healed <= told->count); /* a manifest's counts at opening */
    }
    ckpt_reader_close(reader);
    return rc;
}

static const int copy_01[] = {0, 1}, copy_02[] = {0, 2}, copy_012[] = {0, 1, 2};

/* ---- damage ---- */

static const char *path_of(int copy, const char *file)
{
    static char path[600];

    snprintf(path, sizeof(path), "%s/" DIR "/%s", roots[copy], file);
    return path;
}

static void flip(int copy, const char *file, uint64_t at)
{
    int fd = open(path_of(copy, file), O_RDWR | O_CLOEXEC);
    uint8_t byte;

    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, (off_t)at), 1);
    byte ^= 8;
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)at), 1);
    close(fd);
}

static uint64_t size_of(int copy, const char *file)
{
    struct stat st;

    assert_int_equal(stat(path_of(copy, file), &st), 0);
    return (uint64_t)st.st_size;
}

/* Of the first two copies. */
static const char *part_file(uint32_t part)
{
    static char file[64];

    snprintf(file, sizeof(file), "part-%04u.safetensors%s", part, is_zstd ? ".zst" : "");
    return file;
}

/* ---- tests ---- */

static void test_reader_opened_once_loads_every_layout(void **state)
{
    struct ckpt_load_result result;
    struct ckpt_reader *reader = NULL;
    struct told told;

    (void)state;
    assert_int_equal(reader_open(&reader, copy_012, 3, &told, 0, NULL), 0);
    assert_int_equal(ckpt_reader_manifest(reader)->part_count, 3);
    assert_true(ckpt_reader_manifest(reader)->parts[2].held.extents[0].offset >= 4096);
    for (enum sample_cut cut = SAMPLE_FLAT; cut <= SAMPLE_COLS; cut++) {
        for (uint32_t world = 1; world <= 7; world += 3) {
            assert_int_equal(load_as(reader, cut, world, &result, NULL), 0);
        }
    }
    assert_int_equal(told.count, 0);
    ckpt_reader_close(reader);
}

/* Two ranks' ranges of a tensor, one behind the other, are one extent of their part. */
static void test_part_joins_ranges_that_go_on_from_rank_to_rank(void **state)
{
    static const int copy_2[] = {2};
    const struct bl_extent_list *held;
    struct ckpt_reader *reader = NULL;
    struct told told;

    (void)state;
    assert_int_equal(reader_open(&reader, copy_2, 1, &told, 0, NULL), 0);
    held = &ckpt_reader_manifest(reader)->parts[0].held;
    assert_int_equal(held->extent_count, held->tensor_count);
    for (uint32_t e = 0; e < held->extent_count; e++) {
        const struct bl_tensor *tensor = &held->tensors[held->extents[e].tensor];

        assert_int_equal(held->extents[e].flat_lo, 0);
        assert_int_equal(held->extents[e].flat_hi, bl_tensor_elems(tensor) * 2 / 3);
    }
    ckpt_reader_close(reader);
}

static void test_reader_reads_each_byte_once_for_all_who_want_it(void **state)
{
    struct sample_shard shards[4];
    struct ckpt_dest dests[4];
    struct ckpt_load_result result;
    struct ckpt_reader *reader = NULL;
    struct told told;
    uint64_t stored = 0;

    (void)state;
    for (uint32_t i = 0; i < 4; i++) { /* replicas of the whole state */
        sample_shard_init(&shards[i], SAMPLE_FLAT, 1, 0, 0, false);
        dests[i] = (struct ckpt_dest){&shards[i].list, shards[i].data};
    }
    assert_int_equal(reader_open(&reader, copy_01, 1, &told, 0, NULL), 0);
    assert_int_equal(ckpt_reader_load(reader, dests, 4, &result, NULL), 0);
    for (uint32_t p = 0; p < 3; p++) {
        stored += size_of(0, part_file(p));
    }
    assert_int_equal(result.bytes_read, stored);
    for (uint32_t i = 0; i < 4; i++) {
        sample_shard_check(&shards[i], STEP);
        sample_shard_close(&shards[i]);
    }
    ckpt_reader_close(reader);
}

static void test_reader_plans_in_pieces_when_memory_is_small(void **state)
{
    struct ckpt_load_result result;
    struct ckpt_reader *reader = NULL;
    struct told told;

    (void)state;
    assert_int_equal(reader_open(&reader, copy_01, 1, &told, 1, NULL), 0);
    assert_int_equal(load_as(reader, SAMPLE_FLAT, 8, &result, NULL), 0);
    assert_int_equal(load_as(reader, SAMPLE_COLS, 8, &result, NULL), 0);
    ckpt_reader_close(reader);
}

static void test_load_heals_every_chunk_of_every_part_from_another_copy(void **state)
{
    struct told told;
    uint32_t chunks = 0;

    (void)state;
    for (uint32_t p = 0; p < 3; p++) {
        uint64_t bytes = size_of(0, part_file(p));

        for (uint32_t c = 0; (uint64_t)c << 20 < bytes; c++, chunks++) {
            uint64_t lo = (uint64_t)c << 20, hi = lo + (1 << 20) < bytes ? lo + (1 << 20) : bytes;

            flip(0, part_file(p), lo + (hi - lo) / 2);
            for (int other = 1; other < COPIES; other++) {
                assert_int_equal(load_from(other == 1 ? copy_01 : copy_02, 2, &told, NULL), 0);
                assert_int_equal(told.count, 1);
                assert_int_equal(told.chunk, c);
                assert_string_equal(told.file, path_of(0, part_file(p)));
                assert_true(told.tensor[0] != '\0');
                /* The same part by name, or the copy where its parts are others. */
                assert_int_equal(strncmp(told.from, roots[other], strlen(roots[other])), 0);
                assert_int_equal(strstr(told.from, part_file(p)) != NULL, other == 1);
            }
            flip(0, part_file(p), lo + (hi - lo) / 2);
        }
    }
    assert_true(chunks >= 6);
}

/* Of codec zstd: header frame, planes, index and seek table. */
static void test_load_heals_a_flip_anywhere_in_a_compressed_part(void **state)
{
    struct told told;
    uint64_t bytes = size_of(0, part_file(1));

    (void)state;
    for (uint64_t at = 1; at < bytes; at += bytes / 16) {
        flip(0, part_file(1), at);
        assert_int_equal(load_from(at % 2 == 0 ? copy_01 : copy_02, 2, &told, NULL), 0);
        assert_int_equal(told.count, at < 4096 ? told.count : 1); /* nobody wants the header */
        flip(0, part_file(1), at);
    }
    flip(0, part_file(1), bytes - 1);
    assert_int_equal(load_from(copy_02, 2, &told, NULL), 0);
    assert_int_equal(told.count, 1);
    assert_string_equal(told.file, path_of(0, part_file(1)));
}

static void test_load_heals_when_nothing_of_the_first_copy_is_good(void **state)
{
    struct told told;

    (void)state;
    for (uint32_t p = 0; p < 3; p++) {
        for (uint64_t at = 5000; at < size_of(0, part_file(p)); at += 1 << 20) {
            flip(0, part_file(p), at);
        }
    }
    assert_int_equal(load_from(copy_01, 2, &told, NULL), 0);
    assert_true(told.count >= 3);
    assert_int_equal(load_from(copy_02, 2, &told, NULL), 0);
}

static void test_load_heals_when_each_copy_has_another_bad_part(void **state)
{
    struct told told;
    struct bl_errmsg why = {0};

    (void)state;
    flip(0, part_file(0), 6000);
    flip(1, part_file(1), 6000);
    assert_int_equal(load_from(copy_012, 3, &told, NULL), 0);
    assert_int_equal(told.count, 1);
    flip(1, part_file(0), 7000); /* the same chunk: on to the third */
    assert_int_equal(load_from(copy_012, 3, &told, NULL), 0);
    assert_int_equal(told.count, 2);
    flip(2, is_zstd ? "part-0000.safetensors" : "part-0000.safetensors.zst", 6000); /* nobody */
    assert_int_equal(load_from(copy_012, 3, &told, &why), BL_EDIGEST);
    assert_non_null(strstr(why.text, path_of(0, part_file(0))));
    assert_non_null(strstr(why.text, "chunk 0"));
    assert_non_null(strstr(why.text, ", tensor "));
    assert_non_null(strstr(why.text, "no copy has it"));
    assert_int_equal(told.count, 0);
}

static void test_load_heals_a_part_that_is_missing_or_cut(void **state)
{
    struct told told;
    uint64_t bytes = size_of(0, part_file(1));

    (void)state;
    for (uint64_t length = 0; length < bytes; length += bytes / 5 + 1) {
        assert_int_equal(truncate(path_of(0, part_file(1)), (off_t)length), 0);
        assert_int_equal(load_from(copy_02, 2, &told, NULL), 0);
        assert_int_equal(told.count, 1);
        assert_string_equal(told.file, path_of(0, part_file(1)));
    }
    assert_int_equal(unlink(path_of(0, part_file(1))), 0);
    assert_int_equal(load_from(copy_01, 2, &told, NULL), 0);
    assert_int_equal(load_from(copy_01, 1, &told, NULL), -ENOENT);
    flip(0, "part-0002.index", 100); /* and the index of another */
    assert_int_equal(load_from(copy_01, 2, &told, NULL), 0);
    assert_int_equal(told.count, 2);
    assert_int_equal(load_from(copy_02, 2, &told, NULL), 0);
    flip(0, "manifest.json", 100); /* and what says what is there */
    assert_int_equal(load_from(copy_02, 2, &told, NULL), 0);
    assert_int_equal(told.count, 1);
    assert_string_equal(told.file, path_of(0, "manifest.json"));
}

/* A part may be damaged after it was opened; reads may fail at any point. */
static void test_load_heals_any_read_that_fails(void **state)
{
    struct ckpt_load_result result;
    struct ckpt_reader *reader = NULL;
    struct told told;
    uint64_t healed = 0;

    (void)state;
    assert_int_equal(reader_open(&reader, copy_02, 2, &told, 0, NULL), 0);
    for (uint64_t at = 1;; at++) {
        fault.kind = CKPT_FAULT_ERROR;
        fault.at = fault.count + at;
        fault.error = -EIO;
        fault.hit = 0;
        assert_int_equal(load_as(reader, SAMPLE_FLAT, 2, &result, NULL), 0);
        healed += result.healed;
        if (fault.hit == 0) {
            break;
        }
        assert_int_equal(result.healed, 1);
    }
    assert_true(healed >= 3); /* each part is one transfer at least */
    assert_int_equal(told.count, healed);
    ckpt_reader_close(reader);
}

static void test_load_takes_nothing_from_a_copy_of_another_state(void **state)
{
    struct told told;
    struct bl_errmsg why = {0};

    (void)state;
    sample_dir_remove(roots[1]);
    ckpt_store_close(stores[1]);
    assert_int_equal(mkdir(roots[1], 0700), 0);
    assert_int_equal(sample_open(&stores[1], roots[1], &plain, NULL), 0);
    sample_scale = 79;
    assert_int_equal(sample_save(stores[1], SAMPLE_COLS, 6, STEP, 1, 1, NULL), 0);
    sample_scale = 80;
    flip(0, part_file(0), 6000);
    assert_int_equal(load_from(copy_01, 2, &told, &why), BL_EDIGEST);
    assert_non_null(strstr(why.text, "the state differs"));
    assert_int_equal(load_from(copy_012, 3, &told, NULL), 0); /* the third has it */
}

/* Without its manifest nothing is known of the first place but its name and its root's run. */
static void test_load_takes_no_other_step_for_a_lost_manifest(void **state)
{
    const struct ckpt_place places[] = {{stores[0], DIR}, {stores[1], "step-000000000006.g1"}};
    struct ckpt_reader *reader = NULL;

    (void)state;
    sample_codec = "none";
    assert_int_equal(sample_save(stores[1], SAMPLE_COLS, 6, STEP + 1, 1, 1, NULL), 0);
    flip(0, "manifest.json", 100);
    assert_int_equal(ckpt_reader_open(&reader, places, 2, NULL, NULL), BL_EDIGEST);
}

static uint32_t opened; /* how often a copy's store was asked for */

static int on_open(void *arg, uint32_t place, struct ckpt_store **ret, struct bl_errmsg *msg)
{
    (void)arg;
    opened++;
    if (place == 1) {
        return bl_err(msg, -EIO, "the first copy is away");
    }
    *ret = stores[place];
    return 0;
}

/* A copy's root is opened when it is needed, and only then: it may hang. */
static void test_load_touches_no_copy_that_it_does_not_need(void **state)
{
    const struct ckpt_place places[] = {{stores[0], DIR}, {NULL, DIR}, {NULL, DIR}};
    struct told told = {0};
    const struct ckpt_reader_config config = {.healed = on_healed, .open = on_open, .arg = &told};
    struct ckpt_reader *reader = NULL;
    struct ckpt_load_result result;
    struct bl_errmsg why = {0};

    (void)state;
    opened = 0;
    assert_int_equal(ckpt_reader_open(&reader, places, 3, &config, &why), 0);
    assert_int_equal(load_as(reader, SAMPLE_ROWS, 3, &result, &why), 0);
    assert_int_equal(opened, 0);
    ckpt_reader_close(reader);
    flip(0, part_file(0), 6000);
    assert_int_equal(ckpt_reader_open(&reader, places, 3, &config, &why), 0);
    assert_int_equal(load_as(reader, SAMPLE_ROWS, 3, &result, &why), 0);
    assert_int_equal(load_as(reader, SAMPLE_COLS, 2, &result, &why), 0);
    assert_int_equal(opened, 2); /* each once */
    assert_int_equal(told.count, 2);
    ckpt_reader_close(reader);
    flip(0, "manifest.json", 100); /* then at once */
    assert_int_equal(ckpt_reader_open(&reader, places, 3, &config, &why), 0);
    assert_int_equal(opened, 4);
    assert_int_equal(load_as(reader, SAMPLE_ROWS, 3, &result, &why), 0);
    ckpt_reader_close(reader);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup_none, teardown)
#define ZSTD_TEST(name)                                                                            \
    {                                                                                              \
#name " (zstd)", name, setup_zstd, teardown, NULL                                          \
    }
    const struct CMUnitTest tests[] = {
        TEST(test_reader_opened_once_loads_every_layout),
        TEST(test_load_touches_no_copy_that_it_does_not_need),
        ZSTD_TEST(test_reader_opened_once_loads_every_layout),
        TEST(test_part_joins_ranges_that_go_on_from_rank_to_rank),
        ZSTD_TEST(test_part_joins_ranges_that_go_on_from_rank_to_rank),
        TEST(test_reader_reads_each_byte_once_for_all_who_want_it),
        TEST(test_reader_plans_in_pieces_when_memory_is_small),
        TEST(test_load_heals_every_chunk_of_every_part_from_another_copy),
        ZSTD_TEST(test_load_heals_a_flip_anywhere_in_a_compressed_part),
        TEST(test_load_heals_when_nothing_of_the_first_copy_is_good),
        ZSTD_TEST(test_load_heals_when_nothing_of_the_first_copy_is_good),
        TEST(test_load_heals_when_each_copy_has_another_bad_part),
        ZSTD_TEST(test_load_heals_when_each_copy_has_another_bad_part),
        TEST(test_load_heals_a_part_that_is_missing_or_cut),
        TEST(test_load_heals_any_read_that_fails),
        ZSTD_TEST(test_load_heals_any_read_that_fails),
        TEST(test_load_takes_nothing_from_a_copy_of_another_state),
        TEST(test_load_takes_no_other_step_for_a_lost_manifest),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
