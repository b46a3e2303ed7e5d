/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads ahead. The thread fills window after window, each a stretch of one part's elements; the
 * writer empties them in the same order. A window belongs to the thread while it is not full and to
 * the writer while it is; `full` changes hands under the lock.
 */
#include "ckpt/reshard_stream.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

#define WINDOWS 2u

struct window {
    uint8_t *data;              /* owned; window_bytes */
    struct bl_extent_list list; /* pieces of the part's extents; offsets in data */
    uint32_t part;
    uint64_t lo, bytes; /* of the part's elements, one behind the other */
    bool full;          /* the lock's */
};

struct reshard_stream {
    const struct ckpt_reshard_job *job;
    const bool *want;
    struct window windows[WINDOWS];
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    bool started;
    bool stop;             /* the lock's: the writer wants no more */
    int code;              /* the lock's: how the thread ended; 0: it goes on, or has read all */
    struct bl_errmsg text; /* of code */
    /* The thread's. */
    uint32_t next_extent; /* of the part that is being read */
    uint64_t next_elem, next_lo;
    uint64_t bytes_read;
    /* The writer's. */
    uint32_t current; /* window that is emptied */
    uint64_t taken;   /* bytes of the part that were taken */
    uint32_t taken_part;
};

static uint64_t each_of(const struct bl_extent_list *list, uint32_t extent)
{
    return bl_dtype_bytes(list->tensors[list->extents[extent].tensor].dtype);
}

/* Fills the window's list with what comes next of the part; false when the part is at its end. */
static bool window_plan(struct reshard_stream *stream, struct window *window, uint32_t part)
{
    const struct bl_extent_list *list = &stream->job->plan->parts[part].list;
    uint64_t room = stream->job->window_bytes;

    window->part = part;
    window->lo = stream->next_lo;
    window->bytes = 0;
    window->list.tensors = list->tensors; /* borrowed; closed without them */
    window->list.tensor_count = list->tensor_count;
    window->list.extent_count = 0;
    while (stream->next_extent < list->extent_count && room >= 8) {
        struct bl_extent piece = list->extents[stream->next_extent];
        uint64_t each = each_of(list, stream->next_extent);
        uint64_t left = bl_extent_elems(&piece) - stream->next_elem;
        uint64_t take = left <= room / each ? left : room / each;

        piece.flat_lo += stream->next_elem;
        piece.flat_hi = piece.flat_lo + take;
        piece.offset = window->bytes;
        if (bl_extent_list_add(&window->list, &piece) < 0) {
            break; /* no memory for more: a smaller window is as good, none is told below */
        }
        window->bytes += take * each;
        room -= take * each;
        stream->next_elem += take;
        if (take == left) {
            stream->next_extent++;
            stream->next_elem = 0;
        }
    }
    stream->next_lo += window->bytes;
    return window->bytes > 0 || stream->next_extent < list->extent_count;
}

static int window_read(struct reshard_stream *stream, struct window *window, struct bl_errmsg *msg)
{
    const struct ckpt_dest dest = {&window->list, window->data};
    struct ckpt_load_result result = {0};
    int rc = window->bytes == 0 ? bl_err_code(msg, -ENOMEM, "a window of extents")
                                : ckpt_reader_load(stream->job->reader, &dest, 1, &result, msg);

    stream->bytes_read += result.bytes_read;
    return rc;
}

/* Waits until the window is empty; false when the writer wants no more. */
static bool wait_empty(struct reshard_stream *stream, const struct window *window)
{
    bool go_on;

    pthread_mutex_lock(&stream->lock);
    while (window->full && !stream->stop) {
        pthread_cond_wait(&stream->changed, &stream->lock);
    }
    go_on = !stream->stop;
    pthread_mutex_unlock(&stream->lock);
    return go_on;
}

static void publish(struct reshard_stream *stream, struct window *window, int code,
                    const struct bl_errmsg *text)
{
    pthread_mutex_lock(&stream->lock);
    window->full = code == 0;
    if (code < 0) {
        stream->code = code;
        stream->text = *text;
    }
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
}

static void *read_ahead(void *arg)
{
    struct reshard_stream *stream = arg;
    struct bl_errmsg text = {0};
    uint32_t w = 0;

    for (uint32_t part = 0; part < stream->job->plan->part_count; part++) {
        if (!stream->want[part]) {
            continue;
        }
        stream->next_extent = 0;
        stream->next_elem = stream->next_lo = 0;
        for (;;) {
            struct window *window = &stream->windows[w];
            int rc;

            if (!wait_empty(stream, window)) {
                return NULL;
            }
            if (!window_plan(stream, window, part)) {
                break;
            }
            rc = window_read(stream, window, &text);
            publish(stream, window, rc, &text);
            if (rc < 0) {
                return NULL;
            }
            w = (w + 1) % WINDOWS;
        }
    }
    return NULL;
}

int reshard_stream_start(struct reshard_stream **ret, const struct ckpt_reshard_job *job,
                         const bool *want, struct bl_errmsg *msg)
{
    struct reshard_stream *stream = calloc(1, sizeof(*stream));
    sigset_t all, before;
    int rc = stream == NULL ? bl_err_code(msg, -ENOMEM, "windows") : 0;

    if (rc < 0) {
        return rc;
    }
    stream->job = job;
    stream->want = want;
    stream->taken_part = UINT32_MAX;
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->changed, NULL);
    for (uint32_t w = 0; rc == 0 && w < WINDOWS; w++) {
        stream->windows[w].data = bl_mem_alloc(job->window_bytes);
        rc = stream->windows[w].data == NULL ? bl_err_code(msg, -ENOMEM, "a window of %llu bytes",
                                                           (unsigned long long)job->window_bytes)
                                             : 0;
    }
    if (rc == 0) {
        sigfillset(&all); /* signals are the program's main thread's */
        pthread_sigmask(SIG_SETMASK, &all, &before);
        rc = -pthread_create(&stream->thread, NULL, read_ahead, stream);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        stream->started = rc == 0;
        rc = rc < 0 ? bl_err_code(msg, rc, "start a thread") : 0;
    }
    if (rc < 0) {
        reshard_stream_stop(stream, NULL);
        return rc;
    }
    *ret = stream;
    return 0;
}

/* Waits for the next window; the reader's error when it ended before. */
static int wait_full(struct reshard_stream *stream, struct window *window, struct bl_errmsg *msg)
{
    int rc = 0;

    pthread_mutex_lock(&stream->lock);
    while (!window->full && stream->code == 0) {
        pthread_cond_wait(&stream->changed, &stream->lock);
    }
    if (!window->full) {
        rc = bl_err(msg, stream->code, "%s", stream->text.text);
    }
    pthread_mutex_unlock(&stream->lock);
    return rc;
}

int reshard_stream_take(struct reshard_stream *stream, uint32_t part, uint32_t extent, uint64_t lo,
                        uint64_t hi, void *dest, struct bl_errmsg *msg)
{
    const struct bl_extent_list *list = &stream->job->plan->parts[part].list;
    uint64_t bytes = (hi - lo) * each_of(list, extent);
    uint8_t *to = dest;

    if (part != stream->taken_part) {
        stream->taken_part = part;
        stream->taken = 0;
    }
    while (bytes > 0) {
        struct window *window = &stream->windows[stream->current];
        uint64_t at, more;
        int rc = wait_full(stream, window, msg);

        if (rc < 0) {
            return rc;
        }
        BL_ASSERT(window->part == part && stream->taken >= window->lo &&
                  stream->taken < window->lo + window->bytes);
        at = stream->taken - window->lo;
        more = window->bytes - at < bytes ? window->bytes - at : bytes;
        memcpy(to, window->data + at, more);
        to += more;
        bytes -= more;
        stream->taken += more;
        if (at + more == window->bytes) {
            pthread_mutex_lock(&stream->lock);
            window->full = false;
            pthread_cond_broadcast(&stream->changed);
            pthread_mutex_unlock(&stream->lock);
            stream->current = (stream->current + 1) % WINDOWS;
        }
    }
    return 0;
}

void reshard_stream_stop(struct reshard_stream *stream, uint64_t *ret_bytes_read)
{
    if (stream == NULL) {
        return;
    }
    if (stream->started) {
        pthread_mutex_lock(&stream->lock);
        stream->stop = true;
        pthread_cond_broadcast(&stream->changed);
        pthread_mutex_unlock(&stream->lock);
        pthread_join(stream->thread, NULL);
    }
    if (ret_bytes_read != NULL) {
        *ret_bytes_read += stream->bytes_read;
    }
    for (uint32_t w = 0; w < WINDOWS; w++) {
        free(stream->windows[w].list.extents);
        if (stream->windows[w].data != NULL) {
            bl_mem_free(stream->windows[w].data, stream->job->window_bytes);
        }
    }
    pthread_cond_destroy(&stream->changed);
    pthread_mutex_destroy(&stream->lock);
    free(stream);
}
