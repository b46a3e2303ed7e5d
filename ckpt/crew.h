/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A few threads that work on numbered jobs while their owner does something else; the owner lends a
 * hand when it waits for a job that nobody has begun. With one thread (the owner) all is done in
 * ckpt_crew_wait. The threads take no signals and have the owner's priority.
 */
#ifndef BL_CKPT_CREW_H
#define BL_CKPT_CREW_H

#include <stdint.h>

#include "base/error.h"

#define CKPT_CREW_THREADS_MAX 16u
#define CKPT_CREW_JOBS_MAX    64u
#define CKPT_CREW_THREADS_FEW 4u

struct ckpt_crew;

/* Does job `job` as worker `worker` (0 is the owner); each worker does one job at a time. */
typedef void ckpt_crew_work_fn(void *arg, uint32_t job, uint32_t worker);

/* Threads that a crew has when nobody says how many, the owner included: one less than the cores,
 * but two where there are two, and at most CKPT_CREW_THREADS_FEW. */
uint32_t ckpt_crew_threads_default(void);

/* For jobs 0 to jobs - 1 (at most CKPT_CREW_JOBS_MAX). `threads` counts the owner, 1 to
 * CKPT_CREW_THREADS_MAX; when a thread cannot be started there are fewer. *ret is owned. -ENOMEM.
 */
BL_MUST_CHECK int ckpt_crew_new(struct ckpt_crew **ret, uint32_t threads, uint32_t jobs,
                                ckpt_crew_work_fn *work, void *arg, struct bl_errmsg *msg);
/* Waits for jobs that were begun; others are never done. NULL is fine. */
void ckpt_crew_free(struct ckpt_crew *crew);

/* Owner: hands a job to the crew; it must not be in its hands already. Begun in this order. */
void ckpt_crew_submit(struct ckpt_crew *crew, uint32_t job);
/* Owner: returns when the job is done; what it wrote is seen then. */
void ckpt_crew_wait(struct ckpt_crew *crew, uint32_t job);

#endif
