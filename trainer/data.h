/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Training data: byte tokens of plain text files, mapped into memory.
 *
 * Each file is a shard. Its sample i is the T + 1 tokens [iT, iT + T]: inputs are the first T,
 * targets the last T. Samples are numbered through all shards in the order of the job's files. The
 * last part of them (train.eval_split) is held out for evaluation.
 *
 * The order of an epoch is a keyed permutation of the training samples, a pure function of (seed,
 * epoch, index): a six-round Feistel network on the smallest even number of bits that holds them,
 * walked again while it leaves the range. So there is nothing to save but the position.
 */
#ifndef TRAINER_DATA_H
#define TRAINER_DATA_H

#include <stdint.h>

#include "base/error.h"
#include "base/job.h"

#define TRAIN_BYTE_VOCAB 256u /* tokens of the tokenizer "bytes" */

struct train_data;

/* Maps the job's files and checks that they hold enough. *ret is owned. BL_ECONFIG with one line
 * that names the file or the number that does not fit. */
BL_MUST_CHECK int train_data_open(struct train_data **ret, const struct bl_job *job,
                                  struct bl_errmsg *msg);
void train_data_close(struct train_data *data); /* NULL is fine */

uint64_t train_data_tokens(const struct train_data *data);       /* in all files */
uint64_t train_data_samples(const struct train_data *data);      /* of an epoch, without held out */
uint64_t train_data_eval_samples(const struct train_data *data); /* held out */

/* XXH3 over the sizes and contents of the files, in order: reads all of them. */
uint64_t train_data_digest(const struct train_data *data);

/* The sample at a position, counted from the start of the run over all epochs. */
uint64_t train_data_at(const struct train_data *data, uint64_t position);

/* Writes a sample's T inputs and T targets. `sample` is below samples + eval_samples; the held-out
 * ones come last. Any thread. */
void train_data_read(const struct train_data *data, uint64_t sample, int32_t *tokens,
                     int32_t *targets);

/* Image of `index` under the permutation of [0, count) that belongs to `key`; a bijection for each
 * key. index < count. */
uint64_t train_permute(uint64_t key, uint64_t index, uint64_t count);

#endif
