/* SPDX-License-Identifier: Apache-2.0 */
/* One lock; jobs last long enough (a chunk each) for that to be no matter. */
#include "ckpt/crew.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum job_state { JOB_IDLE, JOB_WAITING, JOB_BEGUN, JOB_DONE };

struct crew_member {
    struct ckpt_crew *crew;
    uint32_t number;
    pthread_t thread;
};

struct ckpt_crew {
    ckpt_crew_work_fn *work;
    void *arg;
    pthread_mutex_t lock; /* guards all below but members */
    pthread_cond_t wake;  /* for members: a job waits, or it is over */
    pthread_cond_t done;  /* for the owner */
    enum job_state states[CKPT_CREW_JOBS_MAX];
    uint32_t queue[CKPT_CREW_JOBS_MAX]; /* jobs that wait, oldest first */
    uint32_t waiting;
    bool stop;
    uint32_t member_count;
    struct crew_member members[CKPT_CREW_THREADS_MAX];
};

uint32_t ckpt_crew_threads_default(void)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);

    return cores < 2 ? 1 : cores <= 3 ? 2 : cores == 4 ? 3 : CKPT_CREW_THREADS_FEW;
}

/* With the lock held: takes the job at `place` of the queue, works without the lock, ends it. */
static void do_job(struct ckpt_crew *crew, uint32_t place, uint32_t worker)
{
    uint32_t job = crew->queue[place];

    crew->waiting--;
    memmove(&crew->queue[place], &crew->queue[place + 1],
            (crew->waiting - place) * sizeof(crew->queue[0]));
    crew->states[job] = JOB_BEGUN;
    pthread_mutex_unlock(&crew->lock);
    crew->work(crew->arg, job, worker);
    pthread_mutex_lock(&crew->lock);
    crew->states[job] = JOB_DONE;
}

static void *member_main(void *arg)
{
    struct crew_member *member = arg;
    struct ckpt_crew *crew = member->crew;

    pthread_mutex_lock(&crew->lock);
    while (!crew->stop) {
        if (crew->waiting > 0) {
            do_job(crew, 0, member->number);
            pthread_cond_signal(&crew->done);
        } else {
            pthread_cond_wait(&crew->wake, &crew->lock);
        }
    }
    pthread_mutex_unlock(&crew->lock);
    return NULL;
}

int ckpt_crew_new(struct ckpt_crew **ret, uint32_t threads, uint32_t jobs, ckpt_crew_work_fn *work,
                  void *arg, struct bl_errmsg *msg)
{
    struct ckpt_crew *crew = calloc(1, sizeof(*crew));
    sigset_t all, before;

    BL_ASSERT(jobs <= CKPT_CREW_JOBS_MAX && threads <= CKPT_CREW_THREADS_MAX);
    if (crew == NULL) {
        return bl_err_code(msg, -ENOMEM, "threads");
    }
    crew->work = work;
    crew->arg = arg;
    pthread_mutex_init(&crew->lock, NULL);
    pthread_cond_init(&crew->wake, NULL);
    pthread_cond_init(&crew->done, NULL);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (crew->member_count + 1 < threads) {
        struct crew_member *member = &crew->members[crew->member_count];

        member->crew = crew;
        member->number = crew->member_count + 1;
        if (pthread_create(&member->thread, NULL, member_main, member) != 0) {
            break;
        }
        crew->member_count++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    *ret = crew;
    return 0;
}

void ckpt_crew_free(struct ckpt_crew *crew)
{
    if (crew == NULL) {
        return;
    }
    pthread_mutex_lock(&crew->lock);
    crew->stop = true;
    pthread_cond_broadcast(&crew->wake);
    pthread_mutex_unlock(&crew->lock);
    for (uint32_t i = 0; i < crew->member_count; i++) {
        pthread_join(crew->members[i].thread, NULL);
    }
    pthread_cond_destroy(&crew->wake);
    pthread_cond_destroy(&crew->done);
    pthread_mutex_destroy(&crew->lock);
    free(crew);
}

void ckpt_crew_submit(struct ckpt_crew *crew, uint32_t job)
{
    pthread_mutex_lock(&crew->lock);
    BL_ASSERT(job < CKPT_CREW_JOBS_MAX &&
              (crew->states[job] == JOB_IDLE || crew->states[job] == JOB_DONE));
    crew->states[job] = JOB_WAITING;
    crew->queue[crew->waiting++] = job;
    pthread_cond_signal(&crew->wake);
    pthread_mutex_unlock(&crew->lock);
}

void ckpt_crew_wait(struct ckpt_crew *crew, uint32_t job)
{
    pthread_mutex_lock(&crew->lock);
    BL_ASSERT(job < CKPT_CREW_JOBS_MAX && crew->states[job] != JOB_IDLE);
    while (crew->states[job] != JOB_DONE) {
        if (crew->states[job] == JOB_WAITING) {
            uint32_t place = 0;

            while (crew->queue[place] != job) {
                place++;
            }
            do_job(crew, place, 0);
        } else {
            pthread_cond_wait(&crew->done, &crew->lock);
        }
    }
    pthread_mutex_unlock(&crew->lock);
}
