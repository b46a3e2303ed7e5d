/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stand-in for libbelay and belayd, to try the trainer's supervised life by itself: the calls of
 * belay.h over one piece of shared memory, and a leader in the test's own process that starts
 * ranks, sees them die, and plans the next generation. It keeps the rules that the trainer relies
 * on (unanimous votes, sealed slots, sources that stay) and nothing of the protocol. Waits poll.
 */
#ifndef TESTS_TRAINER_FAKE_BELAY_H
#define TESTS_TRAINER_FAKE_BELAY_H

#include <stdint.h>

#include "base/digest.h"

#define FAKE_PROCS_MAX 8
#define FAKE_RUN_MS    60000 /* until a run that hangs fails the test */

struct fake_run {
    const char *job_path;
    uint32_t ranks;     /* processes at the start */
    uint32_t tp, pp;    /* the job's layout; 0: 1. What makes no copy of the model waits as a spare;
                           with fewer ranks than a copy pp shrinks to what there is */
    uint32_t respawn;   /* 1: a dead one is started again; 0: the others go on without it */
    const char *fail;   /* BELAY_FAIL of the ranks, or NULL */
    const char *once;   /* BELAY_FAIL_ONCE_DIR */
    const char *ledger; /* BELAY_TRAIN_LEDGER, or NULL */
    int kill_at;        /* SIGKILL to the highest rank when this step is sealed; 0: none */
};

struct fake_result {
    uint64_t step; /* of the newest complete state */
    uint32_t generations, deaths;
    struct bl_state_digest digest;
};

/* Runs to the end; fails the test on a hang or a rank that ends otherwise than planned. */
void fake_belay_run(const struct fake_run *run, struct fake_result *ret);

#endif
