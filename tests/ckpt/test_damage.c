/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One flipped bit or a cut anywhere, in every kind of file: verify must find it and name the file;
 * a load that needs the bytes must refuse them and name file, chunk and tensor; a scan must walk
 * back to the older checkpoint when it can see the damage without reading the parts.
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ckpt/part.h"
#include "tests/ckpt/sample.h"

#define DIR "step-000000000002.g1"

static char root[256];
static struct ckpt_io io;

/* Two checkpoints in a fresh root. */
static int root_make(void)
{
    struct ckpt_store *store;

    io = *ckpt_io_real();
    io.disable = CKPT_IO_NO_URING | CKPT_IO_NO_DIRECT; /* thousands of small looks */
    io.queue_depth = 1;
    io.codec_threads = 1;
    sample_dir_make(root, access("/dev/shm", W_OK) == 0 ? "/dev/shm" : NULL);
    assert_int_equal(sample_open(&store, root, &io, NULL), 0);
    for (uint64_t step = 1; step <= 2; step++) {
        assert_int_equal(sample_save(store, SAMPLE_FLAT, 4, step, 1, 1, NULL), 0);
    }
    ckpt_store_close(store);
    return 0;
}

static int setup(void **state)
{
    (void)state;
    sample_scale = 1;
    sample_codec = "none";
    return root_make();
}

static int setup_zstd(void **state)
{
    (void)state;
    sample_scale = 1;
    sample_codec = "zstd";
    return root_make();
}

static int teardown(void **state)
{
    (void)state;
    sample_dir_remove(root);
    return 0;
}

struct found {
    const char *file;
    bool named;
};

static void on_finding(void *arg, const char *file, const char *text)
{
    struct found *found = arg;

    (void)file;
    found->named = found->named || strstr(text, found->file) != NULL;
}

/* Whether the full verification finds something in `file`; a look from outside. */
static bool is_found(const char *file)
{
    const struct ckpt_store_config config = {.path = root, .io = &io};
    struct found found = {file, false};
    const struct ckpt_verify_job job = {.full = true, .finding = on_finding, .arg = &found};
    struct ckpt_verify_result result;
    struct ckpt_store *store;
    struct bl_errmsg why = {0};

    if (ckpt_store_open(&store, &config, &why) != 0) {
        return strstr(why.text, file) != NULL;
    }
    assert_int_equal(ckpt_verify(store, DIR, &job, &result, NULL), 0);
    if (strcmp(file, "BELAY") == 0) {
        found.named = strstr(ckpt_store_damage(store), file) != NULL;
    } else {
        assert_string_equal(ckpt_store_damage(store), "");
        assert_true(!found.named || result.findings > 0);
    }
    ckpt_store_close(store);
    return found.named;
}

static void path_of(char ret[600], const char *file)
{
    snprintf(ret, 600, "%s/%s%s", root, strcmp(file, "BELAY") == 0 ? "" : DIR "/", file);
}

static void flip(const char *file, uint64_t at, uint8_t bit)
{
    char path[600];
    uint8_t byte;
    int fd;

    path_of(path, file);
    fd = open(path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, (off_t)at), 1);
    byte ^= bit;
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)at), 1);
    close(fd);
}

static uint64_t file_bytes(const char *file)
{
    char path[600];
    struct stat st;

    path_of(path, file);
    assert_int_equal(stat(path, &st), 0);
    return (uint64_t)st.st_size;
}

static void flip_range(const char *file, uint64_t from, uint64_t to, uint64_t stride)
{
    for (uint64_t at = from; at < to; at += stride) {
        uint8_t bit = (uint8_t)(1u << (at % 8));

        flip(file, at, bit);
        if (!is_found(file)) {
            fail_msg("%s: bit flipped in byte %llu was not found", file, (unsigned long long)at);
        }
        flip(file, at, bit);
    }
}

static void flip_everywhere(const char *file, uint64_t stride)
{
    uint64_t bytes = file_bytes(file);

    assert_true(is_found(file) == false);
    flip_range(file, 0, bytes, stride);
    flip(file, bytes - 1, 128);
    assert_true(is_found(file));
    flip(file, bytes - 1, 128);
    assert_false(is_found(file));
}

static void test_damage_bit_flip_anywhere_is_found_and_named(void **state)
{
    (void)state;
    flip_everywhere("BELAY", 1);
    flip_everywhere("manifest.json", 1);
    flip_everywhere("part-0000.index", 1);
    flip_everywhere("part-0001.index", 7);
    flip_everywhere("part-0000.safetensors", 31);
    flip_everywhere("part-0001.safetensors", 97);
}

/* Frames, the index's frame, the seek table: no byte of the file is free. */
static void test_damage_bit_flip_in_a_coded_part_is_found_and_named(void **state)
{
    const char *file = "part-0000.safetensors.zst";
    uint64_t bytes = file_bytes(file);

    (void)state;
    flip_everywhere("manifest.json", 13);
    flip_everywhere(file, 23);
    flip_everywhere("part-0001.safetensors.zst", 97);
    flip_range(file, 0, 64, 1);
    flip_range(file, bytes - 2500, bytes, 1);
}

static void cut_at(const char *file, uint64_t length)
{
    char path[600];
    char *data = NULL;
    size_t bytes = 0;
    int fd;

    path_of(path, file);
    assert_int_equal(ckpt_io_read_file(&io, path, 1 << 20, &data, &bytes, NULL), 0);
    assert_int_equal(truncate(path, (off_t)length), 0);
    if (!is_found(file)) {
        fail_msg("%s: cut to %llu bytes was not found", file, (unsigned long long)length);
    }
    fd = open(path, O_WRONLY | O_CLOEXEC);
    assert_int_equal(pwrite(fd, data, bytes, 0), bytes);
    close(fd);
    free(data);
}

static void cut_everywhere(const char *file, uint64_t stride)
{
    char path[600];
    char *data = NULL;
    size_t bytes = 0;
    int fd;

    path_of(path, file);
    assert_int_equal(ckpt_io_read_file(&io, path, 1 << 20, &data, &bytes, NULL), 0);
    for (uint64_t length = 0; length < bytes; length += stride) {
        assert_int_equal(truncate(path, (off_t)length), 0);
        if (!is_found(file)) {
            fail_msg("%s: cut to %llu bytes was not found", file, (unsigned long long)length);
        }
        fd = open(path, O_WRONLY | O_CLOEXEC);
        assert_int_equal(pwrite(fd, data, bytes, 0), bytes);
        close(fd);
    }
    assert_int_equal(truncate(path, (off_t)bytes + 1), 0); /* longer is as wrong */
    assert_true(is_found(file));
    assert_int_equal(truncate(path, (off_t)bytes), 0);
    assert_false(is_found(file));
    assert_int_equal(rename(path, "/dev/shm/belay-test-away"), 0); /* not there at all */
    assert_true(is_found(file));
    assert_int_equal(rename("/dev/shm/belay-test-away", path), 0);
    free(data);
}

static void test_damage_truncation_anywhere_is_found_and_named(void **state)
{
    (void)state;
    if (strncmp(root, "/dev/shm", 8) != 0) {
        skip();
    }
    cut_everywhere("BELAY", 1);
    cut_everywhere("manifest.json", 1);
    cut_everywhere("part-0000.index", 1);
    cut_everywhere("part-0000.safetensors", 64);
    cut_everywhere("part-0001.safetensors", 509);
}

static void test_damage_truncation_of_a_coded_part_is_found_and_named(void **state)
{
    struct ckpt_index index;
    char dir[600];

    (void)state;
    if (strncmp(root, "/dev/shm", 8) != 0) {
        skip();
    }
    cut_everywhere("part-0000.safetensors.zst", 61);
    path_of(dir, "");
    assert_int_equal(
        ckpt_part_index_load(&io, dir, "part-0001", CKPT_CODEC_ZSTD, NULL, &index, NULL), 0);
    for (uint32_t i = 0; i < index.frame_count; i++) { /* at the border of every frame */
        cut_at("part-0001.safetensors.zst", index.frames[i].at);
    }
    ckpt_index_close(&index);
}

static void test_damage_in_a_coded_part_is_refused_by_a_load(void **state)
{
    struct bl_errmsg why = {0};
    struct ckpt_store *store;
    struct ckpt_scan scan;
    uint64_t bytes = file_bytes("part-0001.safetensors.zst");

    (void)state;
    assert_int_equal(sample_open(&store, root, &io, NULL), 0);
    flip("part-0001.safetensors.zst", bytes / 2, 4);
    assert_int_equal(sample_load(store, DIR, SAMPLE_ROWS, 3, 2, &why), BL_EDIGEST);
    assert_non_null(strstr(why.text, "part-0001.safetensors.zst: chunk "));
    assert_non_null(strstr(why.text, "tensor "));
    assert_non_null(strstr(why.text, "digest differs"));
    flip("part-0001.safetensors.zst", bytes / 2, 4);
    sample_load_check(store, DIR, SAMPLE_ROWS, 3, 2);
    flip("part-0001.safetensors.zst", bytes - 3, 1); /* the seek table: seen without the data */
    assert_int_equal(ckpt_scan(store, &scan, NULL), 0);
    assert_int_equal(scan.entries[0].state, CKPT_BROKEN);
    assert_non_null(strstr(scan.entries[0].why, "part-0001.safetensors.zst"));
    assert_int_equal(ckpt_scan_newest(&scan, NULL, 0)->step, 1);
    ckpt_scan_close(&scan);
    ckpt_store_close(store);
}

static void test_damage_is_refused_by_a_load_and_passed_over_by_a_scan(void **state)
{
    struct bl_errmsg why = {0};
    struct ckpt_store *store;
    struct ckpt_scan scan;

    (void)state;
    assert_int_equal(sample_open(&store, root, &io, NULL), 0);
    flip("part-0001.safetensors", 9000, 4);
    assert_int_equal(sample_load(store, DIR, SAMPLE_ROWS, 3, 2, &why), BL_EDIGEST);
    assert_non_null(strstr(why.text, "part-0001.safetensors: chunk 0"));
    assert_non_null(strstr(why.text, "tensor "));
    flip("part-0001.safetensors", 9000, 4);
    sample_load_check(store, DIR, SAMPLE_ROWS, 3, 2);
    flip("part-0001.index", 200, 1);
    assert_int_equal(ckpt_scan(store, &scan, NULL), 0);
    assert_int_equal(scan.entries[0].state, CKPT_BROKEN);
    assert_non_null(strstr(scan.entries[0].why, "part-0001.index"));
    assert_int_equal(ckpt_scan_newest(&scan, NULL, 0)->step, 1);
    ckpt_scan_close(&scan);
    ckpt_store_close(store);
}

static void test_damage_in_a_large_part_names_chunk_and_tensor(void **state)
{
    struct found found = {"part-0000.safetensors", false};
    const struct ckpt_verify_job job = {.full = true, .finding = on_finding, .arg = &found};
    struct ckpt_verify_result result;
    struct bl_errmsg why = {0};
    struct ckpt_store *store;

    (void)state;
    sample_scale = 100;
    assert_int_equal(sample_open(&store, root, NULL, NULL), 0);
    assert_int_equal(sample_save(store, SAMPLE_FLAT, 2, 3, 1, 1, NULL), 0);
    for (uint32_t i = 0; i < 2; i++) {
        char path[600];
        uint8_t byte = 0;
        int fd;

        snprintf(path, sizeof(path), "%s/step-000000000003.g1/part-0000.safetensors", root);
        fd = open(path, O_RDWR | O_CLOEXEC);
        assert_true(fd >= 0);
        assert_int_equal(pread(fd, &byte, 1, 1500000 + 1500000 * i), 1);
        byte ^= 1;
        assert_int_equal(pwrite(fd, &byte, 1, 1500000 + 1500000 * i), 1);
        close(fd);
    }
    assert_int_equal(ckpt_verify(store, "step-000000000003.g1", &job, &result, &why), 0);
    assert_int_equal(result.findings, 2);
    assert_non_null(strstr(why.text, "chunk 1 (from byte 1048576, tensor tok_embeddings.weight"));
    ckpt_store_close(store);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
        TEST(test_damage_bit_flip_anywhere_is_found_and_named),
        TEST(test_damage_truncation_anywhere_is_found_and_named),
        TEST(test_damage_is_refused_by_a_load_and_passed_over_by_a_scan),
        TEST(test_damage_in_a_large_part_names_chunk_and_tensor),
#define ZSTD(name) cmocka_unit_test_setup_teardown(name, setup_zstd, teardown)
        ZSTD(test_damage_bit_flip_in_a_coded_part_is_found_and_named),
        ZSTD(test_damage_truncation_of_a_coded_part_is_found_and_named),
        ZSTD(test_damage_in_a_coded_part_is_refused_by_a_load),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
