/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/data.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/digest.h"
#include "trainer/token_file.h"

#define FEISTEL_ROUNDS 6
#define FILES_MAX      (2 * BL_JOB_FILES_MAX) /* for training, then for evaluation */

/* Samples that follow one another in a file and in their numbering. A file has at most two: its
 * training part and its held-out part. */
struct segment {
    uint64_t first_sample, samples;
    uint64_t first_row; /* sample of the file */
    uint32_t file;
};

struct mix_slot {
    uint32_t rank; /* slots of the same file before this one */
    uint8_t file;
};

struct train_data {
    struct token_file files[FILES_MAX];
    uint64_t rows[FILES_MAX]; /* samples that a file holds */
    uint32_t file_count, train_file_count;
    struct segment segments[FILES_MAX]; /* those for training first */
    uint32_t segment_count, train_segment_count;
    struct mix_slot *mix;                 /* owned: TRAIN_MIX_SLOTS; NULL: no mixture */
    uint32_t mix_slots[BL_JOB_FILES_MAX]; /* of each file */
    uint32_t seq_len, vocab;
    uint64_t seed;
    uint64_t tokens, samples, eval_samples;
};

static int files_open(struct train_data *data, const struct bl_job *job, struct bl_errmsg *msg)
{
    int shards = strcmp(job->tokenizer, "shards") == 0;
    uint32_t count = job->data_file_count + job->eval_file_count;
    data->train_file_count = job->data_file_count;
    for (uint32_t i = 0; i < count; i++) {
        struct token_file *file = &data->files[i];
        const char *path = i < job->data_file_count ? job->data_files[i]
                                                    : job->eval_files[i - job->data_file_count];
        int rc = token_file_open(file, path, shards, msg);
        data->file_count = i + 1;
        if (rc != 0) {
            return rc;
        }
        data->rows[i] = file->count == 0 ? 0 : (file->count - 1) / data->seq_len;
        data->tokens += i < job->data_file_count ? file->count : 0;
    }
    return 0;
}

static void segment_add(struct train_data *data, uint32_t file, uint64_t first_row, uint64_t rows)
{
    struct segment *segment = &data->segments[data->segment_count];
    if (rows != 0) {
        *segment = (struct segment){.first_sample = data->samples + data->eval_samples,
                                    .samples = rows,
                                    .first_row = first_row,
                                    .file = file};
        data->segment_count++;
    }
}

/* Numbers the samples. Of the training files' rows the first ones train; `held_out` of each file's
 * end do not. */
static void segments_make(struct train_data *data, const uint64_t held_out[BL_JOB_FILES_MAX])
{
    for (uint32_t i = 0; i < data->train_file_count; i++) {
        segment_add(data, i, 0, data->rows[i] - held_out[i]);
        data->samples += data->rows[i] - held_out[i];
    }
    data->train_segment_count = data->segment_count;
    for (uint32_t i = 0; i < data->file_count; i++) {
        uint64_t rows = i < data->train_file_count ? held_out[i] : data->rows[i];
        segment_add(data, i, i < data->train_file_count ? data->rows[i] - rows : 0, rows);
        data->eval_samples += rows;
    }
}

/* How many rows at the end of each training file are for evaluation. */
static void hold_out(const struct train_data *data, const struct bl_job *job,
                     uint64_t ret[BL_JOB_FILES_MAX])
{
    uint64_t all = 0;
    memset(ret, 0, BL_JOB_FILES_MAX * sizeof *ret);
    if (job->eval_file_count != 0) {
        return;
    }
    for (uint32_t i = 0; i < data->train_file_count; i++) {
        all += data->rows[i];
        if (job->data_weight_count != 0) {
            ret[i] = (uint64_t)((double)data->rows[i] * job->train.eval_split);
        }
    }
    uint64_t left =
        job->data_weight_count != 0 ? 0 : (uint64_t)((double)all * job->train.eval_split);
    for (uint32_t i = data->train_file_count; left > 0 && i-- > 0;) {
        ret[i] = left < data->rows[i] ? left : data->rows[i];
        left -= ret[i];
    }
}

/* Refuses what cannot work. */
static int data_check(const struct train_data *data, const struct bl_job *job,
                      struct bl_errmsg *msg)
{
    if (data->samples < job->train.global_batch) {
        return bl_err(msg, BL_ECONFIG,
                      "data.files hold %llu tokens, that is %llu samples of %u for training; one "
                      "step takes %u: add text, or lower train.seq_len or train.global_batch",
                      (unsigned long long)data->tokens, (unsigned long long)data->samples,
                      data->seq_len, job->train.global_batch);
    }
    if (job->train.eval_every != 0 && data->eval_samples < job->train.micro_batch) {
        if (job->eval_file_count != 0) {
            return bl_err(msg, BL_ECONFIG,
                          "data.eval_files hold %llu samples of %u; evaluation takes at least %u",
                          (unsigned long long)data->eval_samples, data->seq_len,
                          job->train.micro_batch);
        }
        return bl_err(msg, BL_ECONFIG,
                      "train.eval_split %g holds out %llu of %llu samples; evaluation takes at "
                      "least %u: raise it, or set train.eval_every to 0",
                      job->train.eval_split, (unsigned long long)data->eval_samples,
                      (unsigned long long)(data->samples + data->eval_samples),
                      job->train.micro_batch);
    }
    for (uint32_t i = 0; i < job->data_weight_count; i++) {
        if (data->rows[i] == 0 || data->segments[i].file != i) {
            return bl_err(msg, BL_ECONFIG,
                          "data file %s: holds %llu tokens, no sample of %u for training: leave it "
                          "out of the mixture",
                          data->files[i].path, (unsigned long long)data->files[i].count,
                          data->seq_len);
        }
    }
    return 0;
}

/* ---- mixture ---- */

/* Slots by weight: at least one each, the rest by largest remainder (the first of equals). */
static void mix_deal(struct train_data *data, const double *weights, uint32_t count)
{
    double sum = 0, remainder[BL_JOB_FILES_MAX];
    uint32_t dealt = 0;
    for (uint32_t i = 0; i < count; i++) {
        sum += weights[i];
    }
    for (uint32_t i = 0; i < count; i++) {
        double share = weights[i] / sum * (TRAIN_MIX_SLOTS - count);
        data->mix_slots[i] = 1 + (uint32_t)share;
        remainder[i] = share - (uint32_t)share;
        dealt += data->mix_slots[i];
    }
    for (; dealt < TRAIN_MIX_SLOTS; dealt++) {
        uint32_t best = 0;
        for (uint32_t i = 1; i < count; i++) {
            best = remainder[i] > remainder[best] ? i : best;
        }
        data->mix_slots[best]++;
        remainder[best] -= 1;
    }
}

/* Spreads each file's slots evenly: the next is of the file that is furthest behind its share. All
 * in whole numbers, so the same on every machine. */
static int mix_make(struct train_data *data, const struct bl_job *job, struct bl_errmsg *msg)
{
    uint32_t count = job->data_weight_count, used[BL_JOB_FILES_MAX] = {0};
    data->mix = calloc(TRAIN_MIX_SLOTS, sizeof *data->mix);
    if (data->mix == NULL) {
        return bl_err_code(msg, -ENOMEM, "data mixture");
    }
    mix_deal(data, job->data_weights, count);
    for (uint32_t slot = 0; slot < TRAIN_MIX_SLOTS; slot++) {
        int64_t most = INT64_MIN;
        uint32_t next = 0;
        for (uint32_t i = 0; i < count; i++) {
            int64_t behind =
                (int64_t)(slot + 1) * data->mix_slots[i] - (int64_t)used[i] * TRAIN_MIX_SLOTS;
            if (used[i] < data->mix_slots[i] && behind > most) {
                most = behind;
                next = i;
            }
        }
        data->mix[slot] = (struct mix_slot){.rank = used[next]++, .file = (uint8_t)next};
    }
    return 0;
}

/* ---- all ---- */

int train_data_open(struct train_data **ret, const struct bl_job *job, struct bl_errmsg *msg)
{
    if (strcmp(job->tokenizer, "bytes") == 0 && job->model.vocab < TRAIN_BYTE_VOCAB) {
        return bl_err(msg, BL_ECONFIG, "model.vocab %u is below the %u tokens of bytes",
                      job->model.vocab, TRAIN_BYTE_VOCAB);
    }
    struct train_data *data = calloc(1, sizeof *data);
    if (data == NULL) {
        return bl_err_code(msg, -ENOMEM, "data");
    }
    data->seq_len = job->train.seq_len;
    data->vocab = job->model.vocab;
    data->seed = job->train.seed;
    int rc = files_open(data, job, msg);
    if (rc == 0) {
        uint64_t held_out[BL_JOB_FILES_MAX];
        hold_out(data, job, held_out);
        segments_make(data, held_out);
        rc = data_check(data, job, msg);
    }
    if (rc == 0 && job->data_weight_count != 0) {
        rc = mix_make(data, job, msg);
    }
    if (rc != 0) {
        train_data_close(data);
        return rc;
    }
    *ret = data;
    return 0;
}

void train_data_close(struct train_data *data)
{
    if (data == NULL) {
        return;
    }
    for (uint32_t i = 0; i < data->file_count; i++) {
        token_file_close(&data->files[i]);
    }
    free(data->mix);
    free(data);
}

uint64_t train_data_tokens(const struct train_data *data)
{
    return data->tokens;
}

uint64_t train_data_samples(const struct train_data *data)
{
    return data->samples;
}

uint64_t train_data_eval_samples(const struct train_data *data)
{
    return data->eval_samples;
}

int train_data_digest(struct train_data *data, uint64_t *ret, struct bl_errmsg *msg)
{
    uint64_t words[2 * BL_JOB_FILES_MAX];
    for (uint32_t i = 0; i < data->file_count; i++) {
        int rc = token_file_check(&data->files[i], data->vocab, msg);
        if (rc != 0) {
            return rc;
        }
    }
    for (uint32_t i = 0; i < data->train_file_count; i++) {
        words[2 * i] = data->files[i].count;
        words[2 * i + 1] = token_file_digest(&data->files[i]);
    }
    *ret = bl_xxh3(words, 2 * data->train_file_count * sizeof words[0]);
    return 0;
}

int train_data_unchanged(struct train_data *data, struct bl_errmsg *msg)
{
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && i < data->file_count; i++) {
        rc = token_file_unchanged(&data->files[i], msg);
    }
    return rc;
}

uint64_t train_permute(uint64_t key, uint64_t index, uint64_t count)
{
    unsigned half = 1;
    while (half < 32 && (1ull << (2 * half)) < count) {
        half++;
    }
    const uint64_t mask = (1ull << half) - 1;
    uint64_t x = index;
    do {
        uint64_t left = x >> half, right = x & mask;
        for (uint64_t round = 0; round < FEISTEL_ROUNDS; round++) {
            uint64_t mixed = bl_mix64(bl_mix64(key + round) ^ right) & mask;
            uint64_t next = left ^ mixed;
            left = right;
            right = next;
        }
        x = left << half | right;
    } while (x >= count);
    return x;
}

uint64_t train_data_at(const struct train_data *data, uint64_t position)
{
    if (data->mix == NULL) {
        uint64_t epoch = position / data->samples;
        uint64_t key = bl_mix64(bl_mix64(data->seed) + epoch);
        return train_permute(key, position % data->samples, data->samples);
    }
    const struct mix_slot *slot = &data->mix[position % TRAIN_MIX_SLOTS];
    const struct segment *of = &data->segments[slot->file]; /* a mixture has no empty file */
    uint64_t index = position / TRAIN_MIX_SLOTS * data->mix_slots[slot->file] + slot->rank;
    uint64_t epoch = index / of->samples;
    uint64_t key = bl_mix64(bl_mix64(bl_mix64(data->seed) + epoch) + slot->file + 1);
    return of->first_sample + train_permute(key, index % of->samples, of->samples);
}

static const struct segment *segment_of(const struct train_data *data, uint64_t sample)
{
    uint32_t lo = 0, hi = data->segment_count;
    while (hi - lo > 1) {
        uint32_t mid = (lo + hi) / 2;
        *(data->segments[mid].first_sample <= sample ? &lo : &hi) = mid;
    }
    return &data->segments[lo];
}

int train_data_read(const struct train_data *data, uint64_t sample, int32_t *tokens,
                    int32_t *targets, struct bl_errmsg *msg)
{
    const struct segment *segment = segment_of(data, sample);
    const struct token_file *file = &data->files[segment->file];
    uint64_t first = (segment->first_row + sample - segment->first_sample) * data->seq_len;
    for (uint32_t t = 0; t <= data->seq_len; t++) {
        uint32_t token = token_file_at(file, first + t);
        if (token >= data->vocab) {
            return bl_err(msg, BL_ECONFIG,
                          "data file %s: token %llu is outside the vocabulary of %u (model.vocab)",
                          file->path, (unsigned long long)(first + t), data->vocab);
        }
        if (t < data->seq_len) {
            tokens[t] = (int32_t)token;
        }
        if (t > 0) {
            targets[t - 1] = (int32_t)token;
        }
    }
    return 0;
}
