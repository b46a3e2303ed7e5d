/* SPDX-License-Identifier: Apache-2.0 */
/* Token shards in both layouts, mixtures, files for evaluation, and what is refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "train_bench.h"
#include "trainer/data.h"
#include "trainer/token_file.h"

#define TOKENS 41u /* of the small shards: token i is 3 i + 5 */

static uint32_t value_at(uint64_t i)
{
    return (uint32_t)(3 * i + 5);
}

static void write_file(const char *path, const void *head, size_t head_bytes, const void *data,
                       size_t bytes)
{
    FILE *f = fopen(path, "we");
    assert_non_null(f);
    assert_true(head_bytes == 0 || fwrite(head, head_bytes, 1, f) == 1);
    assert_true(bytes == 0 || fwrite(data, bytes, 1, f) == 1);
    assert_int_equal(fclose(f), 0);
}

/* `width` bytes for each token. Returns the bytes. */
static size_t put_tokens(uint8_t *to, uint32_t width)
{
    for (uint64_t i = 0; i < TOKENS; i++) {
        uint64_t value = value_at(i);
        memcpy(to + i * width, &value, width);
    }
    return (size_t)TOKENS * width;
}

static void write_llmc(const char *path, uint32_t magic, uint32_t version, uint32_t count)
{
    uint32_t head[256] = {magic, version, count};
    uint8_t data[TOKENS * 8];
    write_file(path, head, sizeof head, data,
               put_tokens(data, magic == TOKEN_LLMC_MAGIC_U32 ? 4 : 2));
}

/* NAME.bin and NAME.idx with three sequences in two documents. */
static void write_megatron(const char *name, uint8_t type, uint32_t width)
{
    static const uint32_t lengths[3] = {10, 0, TOKENS - 10};
    uint8_t head[34] = "MMIDIDX\0", rest[3 * 12 + 3 * 8], data[TOKENS * 8];
    uint64_t version = 1, sequences = 3, documents = 3, place = 0;
    char path[256];
    memcpy(head + 9, &version, 8);
    head[17] = type;
    memcpy(head + 18, &sequences, 8);
    memcpy(head + 26, &documents, 8);
    memcpy(rest, lengths, sizeof lengths);
    for (uint64_t i = 0; i < 3; i++) {
        uint64_t document = i;
        memcpy(rest + 12 + i * 8, &place, 8);
        memcpy(rest + 36 + i * 8, &document, 8);
        place += (uint64_t)lengths[i] * width;
    }
    snprintf(path, sizeof path, "%s.idx", name);
    write_file(path, head, sizeof head, rest, sizeof rest);
    snprintf(path, sizeof path, "%s.bin", name);
    write_file(path, NULL, 0, data, put_tokens(data, width));
}

static void check_tokens(const char *path, uint64_t mask)
{
    struct token_file file;
    struct bl_errmsg msg = {{0}};
    if (token_file_open(&file, path, 1, &msg) != 0) {
        fail_msg("%s", msg.text);
    }
    assert_int_equal(file.count, TOKENS);
    for (uint64_t i = 0; i < TOKENS; i++) {
        assert_int_equal(token_file_at(&file, i), value_at(i) & mask);
    }
    assert_int_equal(token_file_check(&file, value_at(TOKENS), &msg), 0);
    token_file_close(&file);
}

static void test_both_layouts_are_read_in_every_type(void **state)
{
    (void)state;
    static const struct {
        uint8_t type;
        uint32_t width;
    } types[] = {{TOKEN_U8, 1}, {TOKEN_I16, 2}, {TOKEN_U16, 2}, {TOKEN_I32, 4}, {TOKEN_I64, 8}};
    struct train_bench bench;
    char name[128], path[160];
    train_bench_open(&bench, 1, 0);
    snprintf(name, sizeof name, "%s/shard", bench.dir);
    snprintf(path, sizeof path, "%s.bin", name);
    write_llmc(path, TOKEN_LLMC_MAGIC_U16, 1, TOKENS);
    check_tokens(path, UINT16_MAX);
    write_llmc(path, TOKEN_LLMC_MAGIC_U32, 7, TOKENS);
    check_tokens(path, UINT32_MAX);
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        write_megatron(name, types[i].type, types[i].width);
        check_tokens(path, types[i].width == 1 ? UINT8_MAX : UINT32_MAX);
        snprintf(path, sizeof path, "%s.idx", name);
        check_tokens(path, types[i].width == 1 ? UINT8_MAX : UINT32_MAX);
        snprintf(path, sizeof path, "%s.bin", name);
    }
    train_bench_close(&bench);
}

static void refused(const char *path, const char *part)
{
    struct token_file file;
    struct bl_errmsg msg = {{0}};
    int rc = token_file_open(&file, path, 1, &msg);
    rc = rc != 0 ? rc : token_file_check(&file, 100, &msg);
    token_file_close(&file);
    assert_int_equal(rc, BL_ECONFIG);
    if (strstr(msg.text, part) == NULL) {
        fail_msg("\"%s\" does not say \"%s\"", msg.text, part);
    }
}

static void poke(const char *path, long at, uint8_t byte)
{
    FILE *f = fopen(path, "r+e");
    assert_non_null(f);
    assert_int_equal(fseek(f, at, SEEK_SET), 0);
    fputc(byte, f);
    assert_int_equal(fclose(f), 0);
}

static void test_bad_shards_are_refused_with_file_and_offset(void **state)
{
    (void)state;
    struct train_bench bench;
    char name[128], path[160], index[160];
    train_bench_open(&bench, 1, 0);
    snprintf(name, sizeof name, "%s/bad", bench.dir);
    snprintf(path, sizeof path, "%s.bin", name);
    snprintf(index, sizeof index, "%s.idx", name);
    refused(path, "bad.bin: No such file");
    write_llmc(path, 20240521, 1, TOKENS);
    refused(path, "bad.bin: offset 0: magic 20240521 is none");
    write_llmc(path, TOKEN_LLMC_MAGIC_U16, 2, TOKENS);
    refused(path, "offset 4: version 2");
    write_llmc(path, TOKEN_LLMC_MAGIC_U16, 1, TOKENS + 1);
    refused(path, "offset 8: the header says 42 tokens, that is a file of 1108 bytes; there are "
                  "1106: it was cut");
    write_llmc(path, TOKEN_LLMC_MAGIC_U16, 1, TOKENS - 1);
    refused(path, "there are 1106: something was added");
    write_llmc(path, TOKEN_LLMC_MAGIC_U16, 1, TOKENS);
    refused(path, "offset 1088: token 32 is 101, outside the vocabulary of 100");
    assert_int_equal(truncate(path, 1000), 0);
    refused(path, "1000 bytes are too few for a shard's header of 1024");

    write_megatron(name, TOKEN_U16, 2);
    assert_int_equal(truncate(path, 80), 0);
    refused(path, "80 bytes; its index says 82: it was cut");
    write_megatron(name, TOKEN_I32, 4);
    poke(path, 4 * 4 + 3, 0x80);
    refused(path, "offset 16: token 4 is negative, outside the vocabulary of 100");
    poke(index, 17, 7);
    refused(path, "bad.idx: offset 17: tokens of type 7");
    poke(index, 9, 2);
    refused(path, "bad.idx: offset 9: version 2");
    poke(index, 0, 'm');
    refused(path, "bad.idx: offset 0: does not begin with MMIDIDX");
    write_megatron(name, TOKEN_U16, 2);
    poke(index, 34 + 12 + 8, 1);
    refused(path, "bad.idx: offset 54: sequence 1 does not begin where the one before ends");
    write_megatron(name, TOKEN_U16, 2);
    poke(index, 18 + 7, 0xff); /* 2^63 sequences and more */
    refused(path, "bad.idx: offset 18: says");
    write_megatron(name, TOKEN_U16, 2);
    assert_int_equal(truncate(index, 34 + 12 + 24 + 23), 0);
    refused(path, "too few: it was cut");
    assert_int_equal(truncate(index, 33), 0);
    refused(path, "33 bytes are too few for its head of 34");
    train_bench_close(&bench);
}

static void test_shards_over_4_gib_are_read_to_their_end(void **state)
{
    (void)state;
    struct train_bench bench;
    struct token_file file;
    struct bl_errmsg msg = {{0}};
    char path[160];
    const uint32_t count = 1200000000u; /* of 4 bytes: 4.5 GiB, nearly all of them a hole */
    uint32_t head[256] = {TOKEN_LLMC_MAGIC_U32, 7, count}, last = 4242;
    train_bench_open(&bench, 1, 0);
    snprintf(path, sizeof path, "%s/large.bin", bench.dir);
    write_file(path, head, sizeof head, NULL, 0);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    off_t bytes = (off_t)sizeof head + (off_t)count * 4;
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, bytes), 0);
    assert_int_equal(pwrite(fd, &last, 4, bytes - 4), 4);
    close(fd);
    assert_int_equal(token_file_open(&file, path, 1, &msg), 0);
    assert_int_equal(token_file_at(&file, count - 1), 4242);
    assert_int_equal(token_file_at(&file, count - 2), 0);
    token_file_close(&file);
    train_bench_close(&bench);
}

/* Text files A, BB and CCC: 100, 200, 300 samples of four tokens. */
static void open_mixture(struct train_bench *bench)
{
    train_bench_open(bench, 1, 0);
    struct bl_job *job = &bench->job;
    for (uint32_t i = 0; i < 3; i++) {
        char text[1204];
        snprintf(job->data_files[i], BL_PATH_MAX, "%s/mix%u", bench->dir, i);
        memset(text, 'A' + (int)i, sizeof text);
        write_file(job->data_files[i], NULL, 0, text, 400u * (i + 1) + 1);
    }
    job->data_file_count = 3;
    job->train.seq_len = 4;
    job->train.eval_split = 0;
    job->train.eval_every = 0;
}

static void test_mixture_keeps_its_shares_and_each_files_epochs(void **state)
{
    (void)state;
    struct train_bench bench;
    struct train_data *data;
    struct bl_errmsg msg = {{0}};
    uint64_t drawn[3] = {0};
    uint32_t seen[600] = {0};
    open_mixture(&bench);
    static const double weights[] = {5, 3, 2};
    memcpy(bench.job.data_weights, weights, sizeof weights);
    bench.job.data_weight_count = 3;
    assert_int_equal(train_data_open(&data, &bench.job, &msg), 0);
    for (uint64_t position = 0; position < 3 * TRAIN_MIX_SLOTS; position++) {
        uint64_t sample = train_data_at(data, position);
        uint32_t file = sample < 100 ? 0 : sample < 300 ? 1 : 2;
        static const uint32_t first[] = {0, 100, 300};
        uint64_t samples = 100u * (file + 1);
        assert_true(sample < 600);
        /* Each of a file's samples once before any comes again. */
        assert_int_equal(seen[sample], drawn[file] / samples);
        seen[first[file] + (sample - first[file])]++;
        drawn[file]++;
        for (uint32_t i = 0; i < 3; i++) { /* never more than a few away from its share */
            double share = weights[i] / 10 * (double)(position + 1);
            assert_true((double)drawn[i] > share - 4 && (double)drawn[i] < share + 4);
        }
        if (position % 1000 == 0) {
            int32_t tokens[4], targets[4];
            assert_int_equal(train_data_read(data, sample, tokens, targets, &msg), 0);
            assert_int_equal(tokens[0], 'A' + (int)file);
        }
    }
    train_data_close(data);
    bench.job.train.eval_split = 0.1; /* of each file */
    assert_int_equal(train_data_open(&data, &bench.job, &msg), 0);
    assert_int_equal(train_data_eval_samples(data), 10 + 20 + 30);
    int32_t tokens[4], targets[4];
    assert_int_equal(train_data_read(data, 540 + 9, tokens, targets, &msg), 0);
    assert_int_equal(tokens[0], 'A');
    assert_int_equal(train_data_read(data, 540 + 10, tokens, targets, &msg), 0);
    assert_int_equal(tokens[0], 'B');
    train_data_close(data);
    bench.job.train.seq_len = 500; /* the first file has no sample left */
    assert_int_equal(train_data_open(&data, &bench.job, &msg), BL_ECONFIG);
    assert_non_null(strstr(msg.text, "mix0: holds 401 tokens, no sample of 500 for training"));
    train_bench_close(&bench);
}

static void test_files_for_evaluation_hold_nothing_out(void **state)
{
    (void)state;
    struct train_bench bench;
    struct train_data *data;
    struct bl_errmsg msg = {{0}};
    int32_t tokens[4], targets[4];
    open_mixture(&bench);
    memcpy(bench.job.eval_files[0], bench.job.data_files[2], BL_PATH_MAX);
    bench.job.data_file_count = 2;
    bench.job.eval_file_count = 1;
    bench.job.train.eval_split = 0.3;
    assert_int_equal(train_data_open(&data, &bench.job, &msg), 0);
    assert_int_equal(train_data_samples(data), 300);
    assert_int_equal(train_data_eval_samples(data), 300);
    assert_int_equal(train_data_read(data, 300, tokens, targets, &msg), 0);
    assert_int_equal(tokens[0], 'C');
    train_data_close(data);
    train_bench_close(&bench);
}

static void test_a_file_that_changes_under_the_run_is_named(void **state)
{
    (void)state;
    struct train_bench bench;
    struct train_data *data;
    struct bl_errmsg msg = {{0}};
    uint64_t digest;
    const struct timespec old[2] = {{.tv_sec = 1000}, {.tv_sec = 1000}};
    open_mixture(&bench);
    assert_int_equal(train_data_open(&data, &bench.job, &msg), 0);
    assert_int_equal(train_data_digest(data, &digest, &msg), 0);
    assert_int_equal(train_data_unchanged(data, &msg), 0);
    /* Touched, but the same bytes. */
    assert_int_equal(utimensat(AT_FDCWD, bench.job.data_files[1], old, 0), 0);
    assert_int_equal(train_data_unchanged(data, &msg), 0);
    poke(bench.job.data_files[1], 7, 'x');
    assert_int_equal(utimensat(AT_FDCWD, bench.job.data_files[1], NULL, 0), 0);
    assert_int_equal(train_data_unchanged(data, &msg), BL_ECONFIG);
    assert_non_null(strstr(msg.text, "mix1: changed under the run"));
    poke(bench.job.data_files[1], 7, 'B');
    assert_int_equal(train_data_unchanged(data, &msg), 0);
    poke(bench.job.data_files[0], 401, 'A');
    assert_int_equal(train_data_unchanged(data, &msg), BL_ECONFIG);
    assert_non_null(strstr(msg.text, "401 bytes when it began, 402 now"));
    train_data_close(data);
    train_bench_close(&bench);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_both_layouts_are_read_in_every_type),
        cmocka_unit_test(test_bad_shards_are_refused_with_file_and_offset),
        cmocka_unit_test(test_shards_over_4_gib_are_read_to_their_end),
        cmocka_unit_test(test_mixture_keeps_its_shares_and_each_files_epochs),
        cmocka_unit_test(test_files_for_evaluation_hold_nothing_out),
        cmocka_unit_test(test_a_file_that_changes_under_the_run_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
