/* SPDX-License-Identifier: Apache-2.0 */
/* The order of samples, what is refused, and the ledger: each sample once an epoch, on any ranks.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "train_bench.h"
#include "trainer/data.h"

static void test_order_is_a_bijection_for_every_count(void **state)
{
    (void)state;
    static const uint64_t counts[] = {1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000, 4097};
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        for (uint64_t key = 0; key < 3; key++) {
            uint8_t *seen = calloc(counts[c], 1);
            assert_non_null(seen);
            for (uint64_t i = 0; i < counts[c]; i++) {
                uint64_t image = train_permute(key, i, counts[c]);
                assert_true(image < counts[c]);
                assert_int_equal(seen[image], 0);
                seen[image] = 1;
            }
            free(seen);
        }
    }
}

static void test_order_differs_between_keys_and_from_the_file(void **state)
{
    (void)state;
    uint64_t same_key = 0, same_place = 0;
    for (uint64_t i = 0; i < 1000; i++) {
        same_key += train_permute(1, i, 1000) == train_permute(2, i, 1000);
        same_place += train_permute(1, i, 1000) == i;
    }
    assert_true(same_key < 20);
    assert_true(same_place < 20);
}

static void test_samples_do_not_cross_files(void **state)
{
    (void)state;
    struct train_bench bench;
    struct train_data *data;
    struct bl_errmsg msg = {{0}};
    int32_t tokens[4], targets[4];
    train_bench_open(&bench, 1, 0);
    struct bl_job *job = &bench.job;
    static const char *const texts[] = {"abcdefghij", "", "klmnopqrstuvwxyz"};
    for (uint32_t i = 0; i < 3; i++) {
        snprintf(job->data_files[i], BL_PATH_MAX, "%s/part%u", bench.dir, i);
        FILE *f = fopen(job->data_files[i], "we");
        assert_non_null(f);
        fputs(texts[i], f);
        fclose(f);
    }
    job->data_file_count = 3;
    job->train.seq_len = 4;
    job->train.eval_split = 0.2;
    assert_int_equal(train_data_open(&data, job, &msg), 0);
    assert_int_equal(train_data_tokens(data), 26);
    assert_int_equal(train_data_samples(data) + train_data_eval_samples(data), 2 + 3);
    assert_int_equal(train_data_eval_samples(data), 1);
    assert_int_equal(train_data_read(data, 1, tokens, targets, &msg), 0); /* e f g h -> f g h i */
    assert_int_equal(tokens[0], 'e');
    assert_int_equal(targets[3], 'i');
    assert_int_equal(train_data_read(data, 2, tokens, targets, &msg),
                     0); /* the first of the next file that has any */
    assert_int_equal(tokens[0], 'k');
    assert_int_equal(train_data_read(data, 4, tokens, targets, &msg), 0);
    assert_int_equal(targets[3], 'w');
    train_data_close(data);
    train_bench_close(&bench);
}

static void refused(const struct bl_job *job, const char *part)
{
    struct train_data *data;
    struct bl_errmsg msg = {{0}};
    assert_int_equal(train_data_open(&data, job, &msg), BL_ECONFIG);
    if (strstr(msg.text, part) == NULL) {
        fail_msg("\"%s\" does not say \"%s\"", msg.text, part);
    }
}

static void test_data_that_cannot_work_is_refused_in_one_line(void **state)
{
    (void)state;
    struct train_bench bench;
    train_bench_open(&bench, 1, 0);
    struct bl_job *job = &bench.job;
    job->train.seq_len = 100000;
    refused(job, "0 samples of 100000 for training; one step takes 2");
    job->train.seq_len = 16;
    job->train.eval_split = 0;
    refused(job, "train.eval_split 0 holds out 0");
    job->train.eval_split = 0.05;
    job->model.vocab = 128;
    refused(job, "model.vocab 128");
    job->model.vocab = 256;
    snprintf(job->data_files[0], BL_PATH_MAX, "%s/missing", bench.dir);
    refused(job, "missing: No such file");
    snprintf(job->data_files[0], BL_PATH_MAX, "%s", bench.dir);
    refused(job, "not a regular file");
    char text[1024];
    const struct train_alone how = {.job = job, .ranks = 1};
    assert_int_equal(train_bench_fails(&how, text, sizeof text), 2);
    assert_non_null(strstr(text, "not a regular file"));
    train_bench_close(&bench);
}

static void test_data_digest_tells_contents_and_order(void **state)
{
    (void)state;
    struct train_bench bench;
    struct train_data *data;
    struct bl_errmsg msg = {{0}};
    uint64_t digests[2];
    train_bench_open(&bench, 1, 0);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(train_data_open(&data, &bench.job, &msg), 0);
        assert_int_equal(train_data_digest(data, &digests[i], &msg), 0);
        train_data_close(data);
        FILE *f = fopen(bench.job.data_files[0], "r+e");
        assert_non_null(f);
        fputc('X', f);
        fclose(f);
    }
    assert_true(digests[0] != digests[1]);
    train_bench_close(&bench);
}

/* Reads all ranks' ledgers into samples[position], as step and lane give it. */
static uint64_t read_ledger(const struct train_bench *bench, const char *prefix, uint32_t ranks,
                            uint64_t *samples, uint64_t count)
{
    uint32_t per_lane = bench->job.train.global_batch / bench->job.lanes;
    uint64_t lines = 0;
    memset(samples, 0xff, count * sizeof *samples);
    for (uint32_t r = 0; r < ranks; r++) {
        char path[128];
        unsigned long long step, lane, sample;
        snprintf(path, sizeof path, "%s.%u", prefix, r);
        FILE *f = fopen(path, "re");
        assert_non_null(f);
        while (fscanf(f, "%llu %llu %llu", &step, &lane, &sample) == 3) {
            uint64_t at = (step - 1) * bench->job.train.global_batch + lane * per_lane;
            while (at < count && samples[at] != UINT64_MAX) { /* the next of this lane */
                at++;
            }
            assert_true(at < count);
            samples[at] = sample;
            lines++;
        }
        fclose(f);
    }
    return lines;
}

static void test_ledger_has_each_sample_once_an_epoch_on_any_ranks(void **state)
{
    (void)state;
    struct train_bench bench;
    char prefix[96];
    train_bench_open(&bench, 4, 0);
    bench.job.train.steps = 95;
    bench.job.train.eval_every = 0;
    snprintf(prefix, sizeof prefix, "%s/ledger", bench.dir);
    struct train_data *data;
    struct bl_errmsg msg = {{0}};
    assert_int_equal(train_data_open(&data, &bench.job, &msg), 0);
    uint64_t epoch = train_data_samples(data);
    train_data_close(data);
    uint64_t count = bench.job.train.steps * bench.job.train.global_batch;
    assert_true(count >= 2 * epoch);
    uint64_t *first = calloc(count, sizeof *first), *other = calloc(count, sizeof *other);
    uint8_t *seen = calloc(epoch, 1);
    assert_true(first != NULL && other != NULL && seen != NULL);
    char digest[BL_STATE_DIGEST_TEXT_BYTES];
    for (uint32_t ranks = 1; ranks <= 3; ranks += 2) {
        const struct train_alone how = {
            .job = &bench.job, .ranks = ranks, .digest = 1, .ledger = prefix};
        train_bench_run(&how, digest, NULL, 0);
        uint64_t *into = ranks == 1 ? first : other;
        assert_int_equal(read_ledger(&bench, prefix, ranks, into, count), count);
    }
    assert_memory_equal(first, other, count * sizeof *first);
    for (uint64_t at = 0; at < 2 * epoch; at++) { /* two whole epochs */
        if (at == epoch) {
            memset(seen, 0, epoch);
        }
        assert_true(first[at] < epoch);
        assert_int_equal(seen[first[at]], 0);
        seen[first[at]] = 1;
    }
    assert_memory_not_equal(first, first + epoch, epoch * sizeof *first);
    free(first);
    free(other);
    free(seen);
    train_bench_close(&bench);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order_is_a_bijection_for_every_count),
        cmocka_unit_test(test_order_differs_between_keys_and_from_the_file),
        cmocka_unit_test(test_samples_do_not_cross_files),
        cmocka_unit_test(test_data_that_cannot_work_is_refused_in_one_line),
        cmocka_unit_test(test_data_digest_tells_contents_and_order),
        cmocka_unit_test(test_ledger_has_each_sample_once_an_epoch_on_any_ranks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
