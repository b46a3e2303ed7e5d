/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Training without a daemon: the same arithmetic and communicator, state in ordinary memory, no
 * recovery. Ranks are child processes of this one; if one fails the others are ended.
 */
#ifndef TRAINER_ALONE_H
#define TRAINER_ALONE_H

#include <stdint.h>

#include "base/error.h"
#include "base/job.h"

struct train_alone {
    const struct bl_job *job; /* borrowed */
    uint32_t ranks;           /* 1: in this process */
    uint32_t threads;         /* per rank; 0: the job's */
    uint64_t steps;           /* at most; 0: the job's. The schedule stays the job's */
    int digest;               /* print the state digest at the end */
    int nodes;                /* ranks play this many nodes, between which they use TCP; 0: one */
    const char *ledger;       /* NULL, or ranks write LEDGER.RANK */
    const char *metrics;      /* NULL, or the file that rank 0 appends to */
    const char *tensorboard;  /* NULL, or the directory for rank 0's event files */
};

/* Runs to the end; says on standard error what went wrong. Returns the exit code: 0, 2 for a job
 * that cannot work, 3. */
int train_alone_run(const struct train_alone *how);

#endif
