/* SPDX-License-Identifier: Apache-2.0 */
/* A small job on made-up text, and runs of it, for the trainer's tests. */
#ifndef TESTS_TRAINER_TRAIN_BENCH_H
#define TESTS_TRAINER_TRAIN_BENCH_H

#include <stdint.h>

#include "base/digest.h"
#include "base/job.h"
#include "trainer/alone.h"

#define TRAIN_BENCH_TEXT 6000 /* bytes of the text */

struct train_bench {
    char dir[64]; /* temporary */
    struct bl_job job;
};

/* Makes a directory with text and a job of `lanes` lanes, two micro-batches each. */
void train_bench_open(struct train_bench *bench, uint32_t lanes, uint32_t tied);
void train_bench_close(struct train_bench *bench);

/* Runs alone in a child process and returns the text after "digest " that it prints; fails the test
 * on any other end. The loss lines go to `losses` (bytes_max, may be NULL), without tok/s. */
void train_bench_run(const struct train_alone *how, char digest[BL_STATE_DIGEST_TEXT_BYTES],
                     char *losses, size_t bytes_max);

/* Exit code of a run alone, with what it says on standard error. */
int train_bench_fails(const struct train_alone *how, char *text, size_t bytes_max);

#endif
