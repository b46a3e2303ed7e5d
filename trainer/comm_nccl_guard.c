/* SPDX-License-Identifier: Apache-2.0 */
/* The engine over NCCL: waiting for it, watching over it, and ending it. */
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "trainer/comm_nccl.h"

#define SPINS    200 /* polls of a settling call before it sleeps between them */
#define SLEEP_US 50

/* ---- the state ---- */

static int ended_locked(const struct comm_engine *e, struct bl_errmsg *msg)
{
    if (e->failed != 0) {
        return bl_err(msg, e->failed, "%s", e->why.text);
    }
    return e->is_asked ? bl_err_code(msg, BL_EABORTED, "NCCL") : 0;
}

int nccl_ended(struct comm_engine *e, struct bl_errmsg *msg)
{
    pthread_mutex_lock(&e->lock);
    int rc = ended_locked(e, msg);
    pthread_mutex_unlock(&e->lock);
    return rc;
}

void nccl_abort(struct comm_engine *e)
{
    pthread_mutex_lock(&e->lock);
    e->is_asked = 1;
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
}

int nccl_fail(struct comm_engine *e, int rc, struct bl_errmsg *msg, const char *fmt, ...)
{
    struct bl_errmsg why = {{0}};
    va_list args;
    va_start(args, fmt);
    vsnprintf(why.text, sizeof why.text, fmt, args);
    va_end(args);
    pthread_mutex_lock(&e->lock);
    if (e->failed == 0 && !e->is_asked) { /* errors behind an abort are its own */
        e->failed = rc;
        e->why = why;
    }
    e->is_asked = 1;
    pthread_cond_broadcast(&e->changed);
    rc = ended_locked(e, msg);
    pthread_mutex_unlock(&e->lock);
    return rc;
}

int nccl_enter(struct comm_engine *e, struct bl_errmsg *msg)
{
    pthread_mutex_lock(&e->inside);
    int rc = nccl_ended(e, msg);
    if (rc != 0) {
        pthread_mutex_unlock(&e->inside);
    }
    return rc;
}

void nccl_leave(struct comm_engine *e)
{
    pthread_mutex_unlock(&e->inside);
}

/* ---- waiting ---- */

/* Our code for one of NCCL's. */
static int code_of(ncclResult_t result)
{
    switch (result) {
    case ncclRemoteError:
        return BL_EPEER;
    case ncclUnhandledCudaError:
        return BL_EDEVICE;
    default:
        return BL_ELIBRARY;
    }
}

int nccl_cuda(struct comm_engine *e, cudaError_t error, const char *what, struct bl_errmsg *msg)
{
    return error == cudaSuccess ? 0
                                : nccl_fail(e, BL_EDEVICE, msg, "%s: %s (%s)", what,
                                            cudaGetErrorString(error), cudaGetErrorName(error));
}

/* The first that is not ncclSuccess, of all; ended by another thread: BL_EABORTED in *ret_ended. */
static ncclResult_t state_of(struct comm_engine *e, const ncclComm_t *comms, uint32_t count,
                             char *text, size_t bytes, int *ret_ended)
{
    ncclResult_t state = ncclSuccess;
    *ret_ended = nccl_enter(e, NULL);
    if (*ret_ended != 0) {
        return ncclSuccess;
    }
    for (uint32_t i = 0; i < count && state == ncclSuccess; i++) {
        ncclResult_t result = ncclCommGetAsyncError(comms[i], &state);
        state = result != ncclSuccess ? result : state;
        if (state != ncclSuccess && state != ncclInProgress) {
            const char *last = ncclGetLastError(comms[i]);
            snprintf(text, bytes, "%s%s%.200s", ncclGetErrorString(state),
                     last != NULL && *last != 0 ? ": " : "", last != NULL ? last : "");
        }
    }
    nccl_leave(e);
    return state;
}

int nccl_settle_all(struct comm_engine *e, const ncclComm_t *comms, uint32_t count,
                    ncclResult_t result, const char *what, uint32_t deadline_ms,
                    struct bl_errmsg *msg)
{
    char text[300];
    uint64_t until = bl_now_ns() + (uint64_t)deadline_ms * 1000000u;
    snprintf(text, sizeof text, "%s", ncclGetErrorString(result));
    for (uint32_t polls = 0; result == ncclInProgress; polls++) {
        int ended;
        result = state_of(e, comms, count, text, sizeof text, &ended);
        if (ended != 0) {
            return nccl_ended(e, msg);
        }
        if (comm_is_aborted(e->comm)) {
            nccl_abort(e);
            return nccl_ended(e, msg);
        }
        if (result == ncclInProgress && bl_now_ns() > until) {
            return nccl_fail(e, BL_EDEADLINE, msg, "NCCL: %s is not over after %u ms", what,
                             deadline_ms);
        }
        if (result == ncclInProgress && polls > SPINS) {
            usleep(SLEEP_US);
        } else if (result == ncclInProgress) {
            sched_yield();
        }
    }
    return result == ncclSuccess ? 0
                                 : nccl_fail(e, code_of(result), msg, "NCCL: %s: %s", what, text);
}

int nccl_settle(struct comm_engine *e, ncclComm_t comm, ncclResult_t result, const char *what,
                struct bl_errmsg *msg)
{
    return nccl_settle_all(e, &comm, 1, result, what, e->deadline_ms, msg);
}

/* ---- the monitor ---- */

void nccl_watch(struct comm_engine *e)
{
    if (e->op_deadline_ms == 0) {
        return;
    }
    pthread_mutex_lock(&e->lock);
    if (e->watched_ns == 0 && cudaEventRecord(e->watched, e->compute) == cudaSuccess) {
        e->watched_ns = bl_now_ns();
    }
    pthread_mutex_unlock(&e->lock);
}

/* Whether what was watched is late. */
static int is_late(struct comm_engine *e)
{
    int is = 0;
    pthread_mutex_lock(&e->lock);
    if (e->watched_ns != 0) {
        if (cudaEventQuery(e->watched) != cudaErrorNotReady) {
            e->watched_ns = 0;
        } else {
            is = bl_now_ns() - e->watched_ns > (uint64_t)e->op_deadline_ms * 1000000u;
        }
    }
    pthread_mutex_unlock(&e->lock);
    return is;
}

/* Asks NCCL how all communicators are; ends the engine when one is not well. */
static int look(struct comm_engine *e, struct bl_errmsg *msg)
{
    char text[300] = "";
    ncclResult_t bad = ncclSuccess;
    int rc = nccl_enter(e, msg);
    if (rc != 0) {
        return rc;
    }
    for (uint32_t i = 0; i < e->comm_count && bad == ncclSuccess; i++) {
        ncclResult_t state = ncclSuccess, result = ncclCommGetAsyncError(e->comms[i], &state);
        state = result != ncclSuccess ? result : state;
        if (state != ncclSuccess && state != ncclInProgress) {
            const char *last = ncclGetLastError(e->comms[i]);
            bad = state;
            snprintf(text, sizeof text, "%s%s%.200s", ncclGetErrorString(bad),
                     last != NULL && *last != 0 ? ": " : "", last != NULL ? last : "");
        }
    }
    nccl_leave(e);
    return bad == ncclSuccess
               ? 0
               : nccl_fail(e, code_of(bad), msg, "NCCL: an asynchronous error: %s", text);
}

int nccl_check(struct comm_engine *e, struct bl_errmsg *msg)
{
    return look(e, msg);
}

static void until_ms(struct timespec *ret, uint64_t ms)
{
    clock_gettime(CLOCK_MONOTONIC, ret);
    ret->tv_sec += (time_t)(ms / 1000);
    ret->tv_nsec += (long)(ms % 1000) * 1000000;
    if (ret->tv_nsec >= 1000000000) {
        ret->tv_sec++;
        ret->tv_nsec -= 1000000000;
    }
}

/* The helper has the communicators in hand: it ends, or the process does. With the lock held. */
static void await_abort(struct comm_engine *e)
{
    struct timespec until;
    uint64_t ms = bl_time_scaled_ms(NCCL_ABORT_MS);
    until_ms(&until, ms);
    int rc = 0;
    while (!e->is_aborted && rc == 0) {
        rc = pthread_cond_timedwait(&e->changed, &e->lock, &until);
    }
    if (!e->is_aborted) {
        char line[BL_ERRMSG_BYTES + 160];
        int n = snprintf(line, sizeof line,
                         "belay-train: NCCL's communicators cannot be aborted (%llu ms): this "
                         "process ends with exit code %d, for another to take its place%s%s\n",
                         (unsigned long long)ms, NCCL_EXIT_STUCK,
                         e->failed != 0 ? "; before: " : "", e->failed != 0 ? e->why.text : "");
        ssize_t written = write(STDERR_FILENO, line, (size_t)n);
        (void)written; /* nothing is left to do about it */
        _exit(NCCL_EXIT_STUCK);
    }
}

static void *monitor_main(void *arg)
{
    struct comm_engine *e = arg;
    cudaSetDevice(e->device);
    pthread_mutex_lock(&e->lock);
    while (!e->is_asked && !e->is_closing) {
        struct timespec until;
        until_ms(&until, NCCL_POLL_MS);
        pthread_cond_timedwait(&e->changed, &e->lock, &until);
        if (e->is_asked || e->is_closing) {
            break;
        }
        pthread_mutex_unlock(&e->lock);
        if (look(e, NULL) == 0 && is_late(e)) {
            nccl_fail(e, BL_EDEADLINE, NULL, "NCCL: what was called is not over after %u ms",
                      e->op_deadline_ms);
        }
        pthread_mutex_lock(&e->lock);
    }
    int is_failure = e->is_asked && e->failed != 0;
    if (e->is_asked) {
        pthread_mutex_unlock(&e->lock);
        if (is_failure) {
            comm_abort(e->comm); /* who waits for a peer on the host must hear of it */
        }
        pthread_mutex_lock(&e->lock);
        await_abort(e);
    }
    pthread_mutex_unlock(&e->lock);
    return NULL;
}

/* ---- the helper ---- */

static void abort_all(struct comm_engine *e)
{
    pthread_mutex_lock(&e->inside);
    BL_IGNORE(ncclGroupStart() != ncclSuccess, "the end shows in what the monitor waits for");
    for (uint32_t i = 0; i < e->comm_count; i++) {
        BL_IGNORE(ncclCommAbort(e->comms[i]) != ncclSuccess, "the same");
    }
    BL_IGNORE(ncclGroupEnd() != ncclSuccess, "the same");
    e->comm_count = 0;
    pthread_mutex_unlock(&e->inside);
}

static void *helper_main(void *arg)
{
    struct comm_engine *e = arg;
    cudaSetDevice(e->device);
    pthread_mutex_lock(&e->lock);
    while (!e->is_asked && !e->is_closing) {
        pthread_cond_wait(&e->changed, &e->lock);
    }
    if (e->is_asked) {
        pthread_mutex_unlock(&e->lock);
        abort_all(e);
        pthread_mutex_lock(&e->lock);
        e->is_aborted = 1;
        pthread_cond_broadcast(&e->changed);
    }
    pthread_mutex_unlock(&e->lock);
    return NULL;
}

/* ---- a good end ---- */

/* All flushed: gives them back. With `inside` held. */
static void destroy_all(struct comm_engine *e)
{
    while (e->comm_count > 0) {
        BL_IGNORE(ncclCommDestroy(e->comms[--e->comm_count]) != ncclSuccess, "it is over");
    }
}

/* How many there are is the helper's to change, too. */
void nccl_finalize(struct comm_engine *e)
{
    struct bl_errmsg why = {{0}};
    for (uint32_t i = 0;; i++) {
        int rc = nccl_enter(e, &why);
        if (rc != 0) {
            return;
        }
        if (i == e->comm_count) {
            destroy_all(e);
            nccl_leave(e);
            return;
        }
        ncclComm_t comm = e->comms[i];
        ncclResult_t result = ncclCommFinalize(comm);
        nccl_leave(e);
        rc = nccl_settle_all(e, &comm, 1, result, "finalizing", NCCL_FINALIZE_MS, &why);
        if (rc != 0) {
            return; /* it failed, so it is aborted */
        }
    }
}

/* ---- both ---- */

int nccl_guard_start(struct comm_engine *e, struct bl_errmsg *msg)
{
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&e->inside, NULL);
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->changed, &attr);
    pthread_condattr_destroy(&attr);
    int rc = pthread_create(&e->helper, NULL, helper_main, e);
    if (rc != 0) {
        return bl_err_code(msg, -rc, "NCCL's helper thread");
    }
    rc = pthread_create(&e->monitor, NULL, monitor_main, e);
    if (rc != 0) {
        e->is_closing = 1; /* nobody else looks yet but the helper */
        nccl_abort(e);
        pthread_join(e->helper, NULL);
        return bl_err_code(msg, -rc, "NCCL's monitor thread");
    }
    e->has_threads = 1;
    return 0;
}

void nccl_guard_stop(struct comm_engine *e)
{
    if (e->has_threads) {
        pthread_mutex_lock(&e->lock);
        e->is_closing = 1;
        pthread_cond_broadcast(&e->changed);
        pthread_mutex_unlock(&e->lock);
        pthread_join(e->helper, NULL);
        pthread_join(e->monitor, NULL);
    }
    pthread_mutex_destroy(&e->inside);
    pthread_mutex_destroy(&e->lock);
    pthread_cond_destroy(&e->changed);
}
