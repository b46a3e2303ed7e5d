/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The thread pool: one job at a time, its tasks handed out by a counter.
 *
 * The word `claim` holds the job's generation, its task count and the next task. A thread takes a
 * task by compare-and-swap on the whole word; if that succeeds, the job is not done (this task is
 * not) and so `fn` and `arg` are its own. A worker that wakes late finds another generation or no
 * task left and does no harm, so nobody waits for a worker that never woke: with more ranks than
 * cores, the caller finishes a small job alone.
 *
 *     claim:  | generation 24 | count 20 | next 20 |
 *
 * Waiting is SPIN_US of spinning, then sleep: ranks share cores, and a spinning thread takes from
 * the rank that the others wait for.
 */
#include "kernels/kern.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#define SPIN_US    20
#define NEXT_BITS  20
#define FIELD_MASK ((1ULL << NEXT_BITS) - 1)

struct worker {
    struct kern_pool *pool;
    pthread_t thread;
    uint32_t number;
};

struct kern_pool {
    uint32_t threads;
    uint32_t started;
    struct worker *workers;     /* threads - 1 */
    _Atomic uint64_t claim;     /* see above; seq_cst against `sleepers` */
    _Atomic uint32_t done;      /* tasks of this job that are finished */
    _Atomic uint32_t sleepers;  /* workers that wait on `work`, or are about to */
    _Atomic int stop;           /* set once, under lock */
    _Atomic(kern_task_fn *) fn; /* of this job; written before claim */
    void *_Atomic arg;          /* of this job; written before claim */
    pthread_mutex_t lock;
    pthread_cond_t work; /* a job came, or stop */
    pthread_cond_t idle; /* the last task is finished */
};

static void flush_subnormals(void)
{
#if defined(__x86_64__)
    unsigned state = _mm_getcsr();
    if ((state & 0x8040U) != 0x8040U) {
        _mm_setcsr(state | 0x8040U);
    }
#elif defined(__aarch64__)
    uint64_t state;
    __asm__ volatile("mrs %0, fpcr" : "=r"(state));
    __asm__ volatile("msr fpcr, %0" : : "r"(state | (1ULL << 24)));
#endif
}

static void relax(void)
{
#if defined(__x86_64__)
    _mm_pause();
#endif
}

static uint64_t now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000U + (uint64_t)t.tv_nsec / 1000U;
}

static int has_task(uint64_t claim)
{
    return (claim & FIELD_MASK) < ((claim >> NEXT_BITS) & FIELD_MASK);
}

/* Does tasks of the current job until none is left to take. */
static void work_off(struct kern_pool *pool, uint32_t number)
{
    uint64_t claim = atomic_load(&pool->claim);
    while (has_task(claim)) {
        if (!atomic_compare_exchange_weak(&pool->claim, &claim, claim + 1)) {
            continue;
        }
        uint32_t count = (uint32_t)((claim >> NEXT_BITS) & FIELD_MASK);
        kern_task_fn *fn = atomic_load_explicit(&pool->fn, memory_order_relaxed);
        void *arg = atomic_load_explicit(&pool->arg, memory_order_relaxed);
        fn(arg, (uint32_t)(claim & FIELD_MASK), number);
        if (atomic_fetch_add(&pool->done, 1) + 1 == count && number != 0) {
            pthread_mutex_lock(&pool->lock);
            pthread_cond_signal(&pool->idle);
            pthread_mutex_unlock(&pool->lock);
        }
        claim = atomic_load(&pool->claim);
    }
}

static void *worker_main(void *opaque)
{
    struct worker *worker = opaque;
    struct kern_pool *pool = worker->pool;
    flush_subnormals();
    while (!atomic_load(&pool->stop)) {
        work_off(pool, worker->number);
        uint64_t until = now_us() + SPIN_US;
        while (!has_task(atomic_load(&pool->claim)) && !atomic_load(&pool->stop) &&
               now_us() < until) {
            relax();
        }
        pthread_mutex_lock(&pool->lock);
        atomic_fetch_add(&pool->sleepers, 1);
        while (!has_task(atomic_load(&pool->claim)) && !atomic_load(&pool->stop)) {
            pthread_cond_wait(&pool->work, &pool->lock);
        }
        atomic_fetch_sub(&pool->sleepers, 1);
        pthread_mutex_unlock(&pool->lock);
    }
    return NULL;
}

/* Starts the workers with all signals blocked: signals are the program's own threads' business. */
static int start_workers(struct kern_pool *pool)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    int rc = 0;
    for (uint32_t i = 0; i + 1 < pool->threads && rc == 0; i++) {
        struct worker *worker = &pool->workers[i];
        worker->pool = pool;
        worker->number = i + 1;
        rc = -pthread_create(&worker->thread, NULL, worker_main, worker);
        pool->started += rc == 0;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return rc;
}

int kern_pool_new(struct kern_pool **ret, uint32_t threads, struct bl_errmsg *msg)
{
    int rc = kern_start(msg);
    if (rc < 0) {
        return rc;
    }
    if (threads == 0 || threads > KERN_THREADS_MAX) {
        return bl_err(msg, BL_ELIMIT, "%u threads: at least 1, at most %u", threads,
                      KERN_THREADS_MAX);
    }
    struct kern_pool *pool = calloc(1, sizeof *pool);
    if (pool == NULL) {
        return bl_err_code(msg, -ENOMEM, "thread pool");
    }
    pool->threads = threads;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->idle, NULL);
    pool->workers = calloc(threads, sizeof *pool->workers);
    rc = pool->workers == NULL ? -ENOMEM : start_workers(pool);
    if (rc < 0) {
        kern_pool_free(pool);
        return bl_err_code(msg, rc, "starting %u threads", threads - 1);
    }
    flush_subnormals();
    *ret = pool;
    return 0;
}

void kern_pool_free(struct kern_pool *pool)
{
    if (pool == NULL) {
        return;
    }
    pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->stop, 1);
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (uint32_t i = 0; i < pool->started; i++) {
        pthread_join(pool->workers[i].thread, NULL);
    }
    pthread_cond_destroy(&pool->idle);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->lock);
    free(pool->workers);
    free(pool);
}

uint32_t kern_pool_threads(const struct kern_pool *pool)
{
    return pool == NULL ? 1 : pool->threads;
}

/* The caller's part is done; the last tasks may still run in workers. */
static void wait_done(struct kern_pool *pool, uint32_t count)
{
    uint64_t until = now_us() + SPIN_US;
    while (atomic_load(&pool->done) < count && now_us() < until) {
        relax();
    }
    if (atomic_load(&pool->done) == count) {
        return;
    }
    pthread_mutex_lock(&pool->lock);
    while (atomic_load(&pool->done) < count) {
        pthread_cond_wait(&pool->idle, &pool->lock);
    }
    pthread_mutex_unlock(&pool->lock);
}

void kern_pool_run(struct kern_pool *pool, kern_task_fn *fn, void *arg, uint32_t count)
{
    BL_ASSERT(count <= KERN_TASKS_MAX);
    flush_subnormals();
    if (pool == NULL || pool->threads == 1 || count <= 1) {
        for (uint32_t task = 0; task < count; task++) {
            fn(arg, task, 0);
        }
        return;
    }
    atomic_store_explicit(&pool->fn, fn, memory_order_relaxed);
    atomic_store_explicit(&pool->arg, arg, memory_order_relaxed);
    atomic_store_explicit(&pool->done, 0, memory_order_relaxed);
    uint64_t generation = (atomic_load(&pool->claim) >> (2 * NEXT_BITS)) + 1;
    atomic_store(&pool->claim, generation << (2 * NEXT_BITS) | (uint64_t)count << NEXT_BITS);
    if (atomic_load(&pool->sleepers) > 0) {
        pthread_mutex_lock(&pool->lock);
        pthread_cond_broadcast(&pool->work);
        pthread_mutex_unlock(&pool->lock);
    }
    work_off(pool, 0);
    wait_done(pool, count);
}
