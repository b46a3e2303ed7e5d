/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Training data: tokens of the job's files (trainer/token_file.h), mapped into memory.
 *
 * Sample i of a file is its T + 1 tokens [iT, iT + T]: inputs are the first T, targets the last T.
 * Samples for training are numbered through all files in the job's order, those for evaluation come
 * after them: the samples of data.eval_files, or else a last part (train.eval_split) of all files,
 * in a mixture of each file.
 *
 * The order of an epoch is a keyed permutation, a pure function of (seed, epoch, index): a
 * six-round Feistel network on the smallest even number of bits that holds the samples, walked
 * again while it leaves the range. Without data.weights[] the samples of all files are one epoch.
 * With them each file has epochs of its own, and a fixed table of TRAIN_MIX_SLOTS slots, dealt to
 * the files by weight and as evenly as whole numbers allow, says which file the next sample is of.
 * So there is nothing to save but the position.
 */
#ifndef TRAINER_DATA_H
#define TRAINER_DATA_H

#include <stdint.h>

#include "base/error.h"
#include "base/job.h"

#define TRAIN_BYTE_VOCAB 256u   /* tokens of the tokenizer "bytes" */
#define TRAIN_MIX_SLOTS  65536u /* a weight below 1 / this still gets one slot */

struct train_data;

/* Maps the job's files and checks that they hold enough. *ret is owned. BL_ECONFIG with one line
 * that names the file or the number that does not fit. */
BL_MUST_CHECK int train_data_open(struct train_data **ret, const struct bl_job *job,
                                  struct bl_errmsg *msg);
void train_data_close(struct train_data *data); /* NULL is fine */

uint64_t train_data_tokens(const struct train_data *data);       /* in data.files */
uint64_t train_data_samples(const struct train_data *data);      /* for training, in all files */
uint64_t train_data_eval_samples(const struct train_data *data); /* for evaluation */

/* Reads all files: XXH3 over the sizes and contents of data.files, in order; every token of these
 * and of data.eval_files must lie below model.vocab. BL_ECONFIG names file and offset. */
BL_MUST_CHECK int train_data_digest(struct train_data *data, uint64_t *ret, struct bl_errmsg *msg);

/* Are the files what they were when they were opened? BL_ECONFIG names the one that is not. A
 * system call a file: once a step. One thread at a time. */
BL_MUST_CHECK int train_data_unchanged(struct train_data *data, struct bl_errmsg *msg);

/* The sample at a position, counted from the start of the run over all epochs. */
uint64_t train_data_at(const struct train_data *data, uint64_t position);

/* Writes a sample's T inputs and T targets. `sample` is below samples + eval_samples; those for
 * evaluation come last. BL_ECONFIG for a token outside the vocabulary. Any thread. */
BL_MUST_CHECK int train_data_read(const struct train_data *data, uint64_t sample, int32_t *tokens,
                                  int32_t *targets, struct bl_errmsg *msg);

/* Image of `index` under the permutation of [0, count) that belongs to `key`; a bijection for each
 * key. index < count. */
uint64_t train_permute(uint64_t key, uint64_t index, uint64_t count);

#endif
