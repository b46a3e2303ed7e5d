/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/data.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/digest.h"

#define FEISTEL_ROUNDS 6

struct shard {
    const uint8_t *bytes; /* mapping; NULL when empty */
    uint64_t count;
    uint64_t first_sample;
    uint64_t samples;
};

struct train_data {
    struct shard shards[BL_JOB_FILES_MAX];
    uint32_t shard_count;
    uint32_t seq_len;
    uint64_t seed;
    uint64_t tokens, samples, eval_samples;
};

static int shard_open(struct shard *shard, const char *path, struct bl_errmsg *msg)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return bl_err(msg, BL_ECONFIG,
                      "data file %s: %s: data.files of the job names it, and it must be readable "
                      "on every node",
                      path, strerror(errno));
    }
    struct stat st;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        close(fd);
        return bl_err(msg, BL_ECONFIG,
                      "data file %s: not a regular file: data.files takes files, no folders", path);
    }
    shard->count = (uint64_t)st.st_size;
    if (shard->count > 0) {
        void *map = mmap(NULL, shard->count, PROT_READ, MAP_PRIVATE, fd, 0);
        if (map == MAP_FAILED) {
            int err = errno;
            close(fd);
            return bl_err(msg, BL_ECONFIG, "data file %s: %s", path, strerror(err));
        }
        shard->bytes = map;
    }
    close(fd);
    return 0;
}

/* Divides the samples into training and held out, and refuses what cannot work. */
static int data_split(struct train_data *data, const struct bl_job *job, struct bl_errmsg *msg)
{
    uint64_t all = data->samples;
    data->eval_samples = (uint64_t)((double)all * job->train.eval_split);
    data->samples = all - data->eval_samples;
    if (data->samples < job->train.global_batch) {
        return bl_err(msg, BL_ECONFIG,
                      "data.files hold %llu tokens, that is %llu samples of %u for training; one "
                      "step takes %u: add text, or lower train.seq_len or train.global_batch",
                      (unsigned long long)data->tokens, (unsigned long long)data->samples,
                      data->seq_len, job->train.global_batch);
    }
    if (job->train.eval_every != 0 && data->eval_samples < job->train.micro_batch) {
        return bl_err(msg, BL_ECONFIG,
                      "train.eval_split %g holds out %llu of %llu samples; evaluation takes at "
                      "least %u: raise it, or set train.eval_every to 0",
                      job->train.eval_split, (unsigned long long)data->eval_samples,
                      (unsigned long long)all, job->train.micro_batch);
    }
    return 0;
}

int train_data_open(struct train_data **ret, const struct bl_job *job, struct bl_errmsg *msg)
{
    if (strcmp(job->tokenizer, "bytes") != 0) {
        return bl_err(msg, BL_ECONFIG, "data.tokenizer %s is not built; there is: bytes",
                      job->tokenizer);
    }
    if (job->model.vocab < TRAIN_BYTE_VOCAB) {
        return bl_err(msg, BL_ECONFIG, "model.vocab %u is below the %u tokens of bytes",
                      job->model.vocab, TRAIN_BYTE_VOCAB);
    }
    struct train_data *data = calloc(1, sizeof *data);
    if (data == NULL) {
        return bl_err_code(msg, -ENOMEM, "data");
    }
    data->seq_len = job->train.seq_len;
    data->seed = job->train.seed;
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && i < job->data_file_count; i++) {
        struct shard *shard = &data->shards[i];
        rc = shard_open(shard, job->data_files[i], msg);
        data->shard_count = i + 1;
        shard->first_sample = data->samples;
        shard->samples = shard->count == 0 ? 0 : (shard->count - 1) / data->seq_len;
        data->samples += shard->samples;
        data->tokens += shard->count;
    }
    if (rc == 0) {
        rc = data_split(data, job, msg);
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
    for (uint32_t i = 0; data != NULL && i < data->shard_count; i++) {
        if (data->shards[i].bytes != NULL) {
            munmap((void *)(uintptr_t)data->shards[i].bytes, data->shards[i].count);
        }
    }
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

uint64_t train_data_digest(const struct train_data *data)
{
    uint64_t words[2 * BL_JOB_FILES_MAX];
    for (uint32_t i = 0; i < data->shard_count; i++) {
        words[2 * i] = data->shards[i].count;
        words[2 * i + 1] = bl_xxh3(data->shards[i].bytes, data->shards[i].count);
    }
    return bl_xxh3(words, 2 * data->shard_count * sizeof words[0]);
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
    uint64_t epoch = position / data->samples;
    uint64_t key = bl_mix64(bl_mix64(data->seed) + epoch);
    return train_permute(key, position % data->samples, data->samples);
}

void train_data_read(const struct train_data *data, uint64_t sample, int32_t *tokens,
                     int32_t *targets)
{
    const struct shard *shard = data->shards;
    while (sample >= shard->first_sample + shard->samples) {
        shard++;
    }
    const uint8_t *from = shard->bytes + (sample - shard->first_sample) * data->seq_len;
    for (uint32_t t = 0; t < data->seq_len; t++) {
        tokens[t] = from[t];
        targets[t] = from[t + 1];
    }
}
