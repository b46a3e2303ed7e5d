/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stream is a queue and a thread that runs it, so that what is not ordered by an event is not
 * ordered. GPUSIM_STREAMS=sync runs each operation within its call instead.
 *
 * Copies read and write the host's memory when their turn comes, not when they are called, whatever
 * kind of memory it is: the latest that CUDA allows. The stream 0 waits for all streams that were
 * not made as non-blocking, and they for it.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/gpusim/gpusim_device.h"

struct op {
    struct op *next;
    void (*run)(void *arg);
    void (*drop)(void *arg);
    void *arg;
    int runs_always; /* also on a device that an error ended: events */
};

struct gpusim_stream {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct op *first, **last;
    uint64_t submitted, finished;
    int is_destroyed, is_blocking;
    uint32_t refs;              /* the list's and the thread's */
    struct gpusim_stream *next; /* of all that block */
};

struct gpusim_event {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t recorded, reached;
    double ms; /* when it was reached last */
    uint32_t refs;
};

static pthread_mutex_t g_lock = PTHREAD_MUTEX_INITIALIZER; /* all below */
static struct gpusim_stream *g_streams;
static struct gpusim_stream *g_default;
static int g_is_sync = -1;

static int streams_are_sync(void)
{
    pthread_mutex_lock(&g_lock);
    if (g_is_sync < 0) {
        const char *mode = getenv("GPUSIM_STREAMS");
        g_is_sync = mode && strcmp(mode, "sync") == 0;
        if (mode && !g_is_sync && strcmp(mode, "async") != 0) {
            fprintf(stderr, "gpusim: GPUSIM_STREAMS=%s is neither async nor sync\n", mode);
            abort();
        }
    }
    int is_sync = g_is_sync;
    pthread_mutex_unlock(&g_lock);
    return is_sync;
}

/* ---- the queue ---- */

static void op_run(struct op *op)
{
    if (op->runs_always || gpusim_error_stuck_to() == cudaSuccess) {
        if (!op->runs_always) {
            gpusim_memory_enter();
        }
        op->run(op->arg);
        if (!op->runs_always) {
            gpusim_memory_leave();
        }
    }
    if (op->drop) {
        op->drop(op->arg);
    }
    free(op);
}

static void stream_unref(struct gpusim_stream *s)
{
    pthread_mutex_lock(&s->lock);
    uint32_t left = --s->refs;
    pthread_mutex_unlock(&s->lock);
    if (left == 0) {
        pthread_mutex_destroy(&s->lock);
        pthread_cond_destroy(&s->changed);
        free(s);
    }
}

static void *stream_main(void *arg)
{
    struct gpusim_stream *s = arg;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (!s->first && !s->is_destroyed) {
            pthread_cond_wait(&s->changed, &s->lock);
        }
        struct op *op = s->first;
        if (!op) {
            break;
        }
        s->first = op->next;
        if (!s->first) {
            s->last = &s->first;
        }
        pthread_mutex_unlock(&s->lock);
        op_run(op);
        pthread_mutex_lock(&s->lock);
        s->finished++;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
    stream_unref(s);
    return NULL;
}

static struct gpusim_stream *stream_new(unsigned int flags)
{
    struct gpusim_stream *s = calloc(1, sizeof *s);
    pthread_attr_t attr;
    pthread_t thread;
    if (!s) {
        return NULL;
    }
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    s->last = &s->first;
    s->is_blocking = !(flags & cudaStreamNonBlocking);
    s->refs = 2;
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    int failed = pthread_create(&thread, &attr, stream_main, s);
    pthread_attr_destroy(&attr);
    if (failed) {
        free(s);
        return NULL;
    }
    pthread_mutex_lock(&g_lock);
    s->next = g_streams;
    g_streams = s;
    pthread_mutex_unlock(&g_lock);
    return s;
}

static cudaError_t queue(struct gpusim_stream *s, void (*run)(void *), void (*drop)(void *),
                         void *arg, int runs_always)
{
    struct op *op = calloc(1, sizeof *op);
    if (!op) {
        abort();
    }
    *op = (struct op){.run = run, .drop = drop, .arg = arg, .runs_always = runs_always};
    if (streams_are_sync()) {
        op_run(op);
        return cudaSuccess;
    }
    pthread_mutex_lock(&s->lock);
    *s->last = op;
    s->last = &op->next;
    s->submitted++;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    return cudaSuccess;
}

static void queue_wait(struct gpusim_stream *s)
{
    pthread_mutex_lock(&s->lock);
    uint64_t until = s->submitted;
    while (s->finished < until) {
        pthread_cond_wait(&s->changed, &s->lock);
    }
    pthread_mutex_unlock(&s->lock);
}

/* ---- events ---- */

struct event_op {
    struct gpusim_event *event;
    uint64_t version;
};

static void event_unref(struct gpusim_event *e)
{
    pthread_mutex_lock(&e->lock);
    uint32_t left = --e->refs;
    pthread_mutex_unlock(&e->lock);
    if (left == 0) {
        pthread_mutex_destroy(&e->lock);
        pthread_cond_destroy(&e->changed);
        free(e);
    }
}

static void event_op_drop(void *arg)
{
    struct event_op *op = arg;
    event_unref(op->event);
    free(op);
}

static void event_reach(void *arg)
{
    struct event_op *op = arg;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    pthread_mutex_lock(&op->event->lock);
    if (op->version > op->event->reached) {
        op->event->reached = op->version;
        op->event->ms = (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
    }
    pthread_cond_broadcast(&op->event->changed);
    pthread_mutex_unlock(&op->event->lock);
}

static void event_await(void *arg)
{
    struct event_op *op = arg;
    pthread_mutex_lock(&op->event->lock);
    while (op->event->reached < op->version) {
        pthread_cond_wait(&op->event->changed, &op->event->lock);
    }
    pthread_mutex_unlock(&op->event->lock);
}

/* Queues reaching (records) or awaiting the newest version. */
static cudaError_t event_queue(struct gpusim_stream *s, struct gpusim_event *e, int records)
{
    struct event_op *op = malloc(sizeof *op);
    if (!op) {
        abort();
    }
    pthread_mutex_lock(&e->lock);
    e->refs++;
    e->recorded += records;
    *op = (struct event_op){.event = e, .version = e->recorded};
    pthread_mutex_unlock(&e->lock);
    return queue(s, records ? event_reach : event_await, event_op_drop, op, 1);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags)
{
    cudaError_t error = gpusim_enter();
    (void)flags;
    if (error != cudaSuccess) {
        return gpusim_error(error);
    }
    struct gpusim_event *e = calloc(1, sizeof *e);
    if (!e) {
        return gpusim_error(cudaErrorMemoryAllocation);
    }
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->changed, NULL);
    e->refs = 1;
    *event = e;
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    event_unref(event);
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    pthread_mutex_lock(&event->lock);
    int is_reached = event->reached >= event->recorded;
    pthread_mutex_unlock(&event->lock);
    cudaError_t error = gpusim_enter();
    return gpusim_error(error != cudaSuccess ? error
                        : is_reached         ? cudaSuccess
                                             : cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    pthread_mutex_lock(&event->lock);
    uint64_t version = event->recorded;
    while (event->reached < version) {
        pthread_cond_wait(&event->changed, &event->lock);
    }
    pthread_mutex_unlock(&event->lock);
    return gpusim_error(gpusim_enter());
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end)
{
    cudaError_t error = cudaEventQuery(end);
    if (error != cudaSuccess) {
        return error;
    }
    pthread_mutex_lock(&start->lock);
    double from = start->ms;
    pthread_mutex_unlock(&start->lock);
    pthread_mutex_lock(&end->lock);
    *ms = (float)(end->ms - from);
    pthread_mutex_unlock(&end->lock);
    return cudaSuccess;
}

/* ---- streams ---- */

static struct gpusim_stream *stream_default(void)
{
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&once);
    if (!g_default) {
        g_default = stream_new(cudaStreamDefault);
        if (!g_default) {
            abort();
        }
    }
    pthread_mutex_unlock(&once);
    return g_default;
}

/* `s` goes on behind what `other` has to do now. */
static void stream_follow(struct gpusim_stream *s, struct gpusim_stream *other)
{
    cudaEvent_t event;
    if (s != other && cudaEventCreate(&event) == cudaSuccess) {
        event_queue(other, event, 1);
        event_queue(s, event, 0);
        cudaEventDestroy(event);
    }
}

/* The stream behind a handle, after the order of the stream 0 was kept. */
static struct gpusim_stream *stream_of(cudaStream_t stream)
{
    if (stream && !stream->is_blocking) {
        return stream;
    }
    if (stream) {
        if (g_default) {
            stream_follow(stream, g_default);
        }
        return stream;
    }
    struct gpusim_stream *s = stream_default(), *all[64];
    uint32_t count = 0;
    pthread_mutex_lock(&g_lock);
    for (struct gpusim_stream *i = g_streams; i && count < 64; i = i->next) {
        if (i->is_blocking) {
            all[count++] = i;
        }
    }
    pthread_mutex_unlock(&g_lock);
    for (uint32_t i = 0; i < count; i++) {
        stream_follow(s, all[i]);
    }
    return s;
}

cudaError_t gpusim_stream_submit(cudaStream_t stream, void (*run)(void *), void (*drop)(void *),
                                 void *arg)
{
    cudaError_t error = gpusim_enter();
    if (error != cudaSuccess) {
        if (drop) {
            drop(arg);
        }
        return gpusim_error(error);
    }
    return queue(stream_of(stream), run, drop, arg, 0);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags)
{
    cudaError_t error = gpusim_enter();
    if (error != cudaSuccess) {
        return gpusim_error(error);
    }
    *stream = stream_new(flags);
    return *stream ? cudaSuccess : gpusim_error(cudaErrorMemoryAllocation);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags, int priority)
{
    (void)priority;
    return cudaStreamCreateWithFlags(stream, flags);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return gpusim_error(gpusim_enter());
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    if (!stream) {
        return gpusim_error(cudaErrorInvalidResourceHandle);
    }
    pthread_mutex_lock(&g_lock);
    struct gpusim_stream **link = &g_streams;
    while (*link && *link != stream) {
        link = &(*link)->next;
    }
    int is_known = *link != NULL;
    if (is_known) {
        *link = stream->next;
    }
    pthread_mutex_unlock(&g_lock);
    if (!is_known) {
        return gpusim_error(cudaErrorInvalidResourceHandle);
    }
    pthread_mutex_lock(&stream->lock);
    stream->is_destroyed = 1;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    stream_unref(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    queue_wait(stream_of(stream));
    return gpusim_error(gpusim_enter());
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    struct gpusim_stream *s = stream_of(stream);
    pthread_mutex_lock(&s->lock);
    int is_idle = s->finished == s->submitted;
    pthread_mutex_unlock(&s->lock);
    cudaError_t error = gpusim_enter();
    return gpusim_error(error != cudaSuccess ? error : is_idle ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags)
{
    cudaError_t error = gpusim_enter();
    (void)flags;
    return error != cudaSuccess ? gpusim_error(error) : event_queue(stream_of(stream), event, 0);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    cudaError_t error = gpusim_enter();
    return error != cudaSuccess ? gpusim_error(error) : event_queue(stream_of(stream), event, 1);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void *arg)
{
    return gpusim_stream_submit(stream, fn, NULL, arg);
}

cudaError_t cudaDeviceSynchronize(void)
{
    struct gpusim_stream *all[64];
    uint32_t count = 0;
    pthread_mutex_lock(&g_lock);
    for (struct gpusim_stream *s = g_streams; s && count < 64; s = s->next) {
        pthread_mutex_lock(&s->lock);
        s->refs++;
        pthread_mutex_unlock(&s->lock);
        all[count++] = s;
    }
    pthread_mutex_unlock(&g_lock);
    for (uint32_t i = 0; i < count; i++) {
        queue_wait(all[i]);
        stream_unref(all[i]);
    }
    return gpusim_error(gpusim_enter());
}

cudaError_t cudaDeviceReset(void)
{
    return cudaDeviceSynchronize();
}

/* ---- copies ---- */

struct copy {
    char *to;
    const char *from; /* NULL: a fill */
    size_t bytes;
    int value, is_broken;
};

static void copy_run(void *arg)
{
    const struct copy *c = arg;
    if (c->is_broken) {
        gpusim_error_stick(cudaErrorIllegalAddress);
    } else if (c->from) {
        memmove(c->to, c->from, c->bytes);
    } else {
        memset(c->to, c->value, c->bytes);
    }
}

static cudaError_t copy_queue(struct copy copy, cudaStream_t stream)
{
    struct copy *c = malloc(sizeof *c);
    if (!c) {
        abort();
    }
    *c = copy;
    c->is_broken = gpusim_fault_is_due(GPUSIM_FAULT_COPY);
    return gpusim_stream_submit(stream, copy_run, free, c);
}

/* Memory that is of the device must be, and memory that is not, not. */
static int kind_fits(const void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    int to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    int from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    return kind == cudaMemcpyDefault || bytes == 0 ||
           (gpusim_memory_is_device(to, to_device ? bytes : 1) == to_device &&
            gpusim_memory_is_device(from, from_device ? bytes : 1) == from_device);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    if (!kind_fits(to, from, bytes, kind)) {
        fprintf(stderr, "gpusim: a copy of %zu bytes (kind %d) from %p to %p: not such memory\n",
                bytes, kind, from, to);
        return gpusim_error(cudaErrorInvalidValue);
    }
    return copy_queue((struct copy){.to = to, .from = from, .bytes = bytes}, stream);
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream)
{
    if (bytes > 0 && !gpusim_memory_is_device(to, bytes)) {
        fprintf(stderr, "gpusim: a fill of %zu bytes at %p: no device memory\n", bytes, to);
        return gpusim_error(cudaErrorInvalidValue);
    }
    return copy_queue((struct copy){.to = to, .value = value, .bytes = bytes}, stream);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, NULL);
    return error != cudaSuccess ? error : cudaStreamSynchronize(NULL);
}

cudaError_t cudaMemset(void *to, int value, size_t bytes)
{
    cudaError_t error = cudaMemsetAsync(to, value, bytes, NULL);
    return error != cudaSuccess ? error : cudaStreamSynchronize(NULL);
}
