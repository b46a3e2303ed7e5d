/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The loop puts whole lines into the ring; the writer takes what is there in one write. A line that
 * does not fit is dropped whole, so that what is in the file is always made of whole lines. A line
 * equal to the one before it is counted instead of kept; the count goes out before the next other
 * line, or when the rank falls silent.
 */
#include "shim/shim_log.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct shim_log {
    char path[1024];
    int fd;                              /* writer thread only, after start */
    uint64_t file_bytes, file_bytes_max; /* writer thread only */
    pthread_t thread;
    pthread_mutex_t lock; /* guards ring, head, count, stop, dropped */
    pthread_cond_t filled;
    char *ring;
    size_t head, count; /* bytes; the oldest is at head */
    int stop;
    uint64_t dropped, dropped_told;
    /* The loop's own: */
    char line[SHIM_LOG_LINE_MAX];
    size_t line_bytes;
    char last[SHIM_LOG_LINE_MAX];
    size_t last_bytes;
    uint64_t repeats;
    int continued; /* the line began with a piece that is out already */
};

static void log_rotate(struct shim_log *log)
{
    char from[1100], to[1100];

    for (int i = SHIM_LOG_FILES - 1; i >= 1; i--) {
        if (i == 1) {
            snprintf(from, sizeof(from), "%s", log->path);
        } else {
            snprintf(from, sizeof(from), "%s.%d", log->path, i - 1);
        }
        snprintf(to, sizeof(to), "%s.%d", log->path, i);
        BL_IGNORE(rename(from, to), "a gap in the row of old files is harmless");
    }
    int fd = open(log->path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0640);

    if (fd >= 0) { /* else the old file goes on: too long a log is better than none */
        close(log->fd);
        log->fd = fd;
        log->file_bytes = 0;
    }
}

static void log_write(struct shim_log *log, const char *data, size_t bytes)
{
    if (log->file_bytes + bytes > log->file_bytes_max && log->file_bytes > 0) {
        log_rotate(log);
    }
    while (bytes > 0) {
        ssize_t n = write(log->fd, data, bytes);

        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) { /* disk full or broken: what cannot be written is counted */
            pthread_mutex_lock(&log->lock);
            log->dropped += bytes;
            pthread_mutex_unlock(&log->lock);
            return;
        }
        data += n;
        bytes -= (size_t)n;
        log->file_bytes += (size_t)n;
    }
}

/* Takes up to `max` bytes, as they lie, out of the ring. Lock held. */
static size_t ring_take(struct shim_log *log, char *dst, size_t max)
{
    size_t n = log->count < max ? log->count : max;
    size_t first = SHIM_LOG_RING_BYTES - log->head;

    if (first > n) {
        first = n;
    }
    memcpy(dst, log->ring + log->head, first);
    memcpy(dst + first, log->ring, n - first);
    log->head = (log->head + n) % SHIM_LOG_RING_BYTES;
    log->count -= n;
    return n;
}

/* 0 when it does not fit. Lock held. */
static int ring_put(struct shim_log *log, const char *src, size_t bytes)
{
    if (SHIM_LOG_RING_BYTES - log->count < bytes) {
        return 0;
    }
    size_t at = (log->head + log->count) % SHIM_LOG_RING_BYTES;
    size_t first = SHIM_LOG_RING_BYTES - at;

    if (first > bytes) {
        first = bytes;
    }
    memcpy(log->ring + at, src, first);
    memcpy(log->ring, src + first, bytes - first);
    log->count += bytes;
    return 1;
}

static void *log_main(void *arg)
{
    struct shim_log *log = arg;
    static char chunk[65536];

    pthread_mutex_lock(&log->lock);
    for (;;) {
        while (log->count == 0 && !log->stop) {
            pthread_cond_wait(&log->filled, &log->lock);
        }
        if (log->count == 0) {
            break;
        }
        size_t n = ring_take(log, chunk, sizeof(chunk));

        pthread_mutex_unlock(&log->lock);
        log_write(log, chunk, n);
        pthread_mutex_lock(&log->lock);
    }
    pthread_mutex_unlock(&log->lock);
    return NULL;
}

static void log_emit(struct shim_log *log, const char *data, size_t bytes)
{
    char told[96];

    pthread_mutex_lock(&log->lock);
    if (log->dropped > log->dropped_told) {
        int n = snprintf(told, sizeof(told), "belay-shim: %llu bytes of output dropped\n",
                         (unsigned long long)(log->dropped - log->dropped_told));

        if (ring_put(log, told, (size_t)n)) {
            log->dropped_told = log->dropped;
        }
    }
    if (!ring_put(log, data, bytes)) {
        log->dropped += bytes;
    }
    pthread_cond_signal(&log->filled);
    pthread_mutex_unlock(&log->lock);
}

static void log_tell_repeats(struct shim_log *log)
{
    char told[96];

    if (log->repeats == 0) {
        return;
    }
    int n = snprintf(told, sizeof(told), "belay-shim: last line repeated %llu times\n",
                     (unsigned long long)log->repeats);

    log->repeats = 0;
    log_emit(log, told, (size_t)n);
}

/* A whole line (with its newline), or a piece of a long one. */
static void log_line(struct shim_log *log, int whole)
{
    if (whole && !log->continued && log->line_bytes > 1 && log->line_bytes == log->last_bytes &&
        memcmp(log->line, log->last, log->line_bytes) == 0) {
        log->repeats++;
        log->line_bytes = 0;
        return;
    }
    log_tell_repeats(log);
    log_emit(log, log->line, log->line_bytes);
    if (whole && !log->continued) {
        memcpy(log->last, log->line, log->line_bytes);
        log->last_bytes = log->line_bytes;
    } else {
        log->last_bytes = 0;
    }
    log->continued = !whole;
    log->line_bytes = 0;
}

void shim_log_put(struct shim_log *log, const void *data, size_t bytes)
{
    const char *at = data;

    while (bytes > 0) {
        const char *end = memchr(at, '\n', bytes);
        size_t want = end ? (size_t)(end - at) + 1 : bytes;
        size_t room = SHIM_LOG_LINE_MAX - log->line_bytes;
        size_t n = want < room ? want : room;

        memcpy(log->line + log->line_bytes, at, n);
        log->line_bytes += n;
        at += n;
        bytes -= n;
        if (log->line[log->line_bytes - 1] == '\n') {
            log_line(log, 1);
        } else if (log->line_bytes == SHIM_LOG_LINE_MAX) {
            log_line(log, 0);
        }
    }
}

void shim_log_flush(struct shim_log *log)
{
    log_tell_repeats(log);
    if (log->line_bytes > 0) {
        log_line(log, 0);
    }
}

void shim_log_note(struct shim_log *log, const char *fmt, ...)
{
    char text[512];
    va_list ap;

    shim_log_flush(log);
    int n = snprintf(text, sizeof(text), "%sbelay-shim: ", log->continued ? "\n" : "");

    va_start(ap, fmt);
    int m = vsnprintf(text + n, sizeof(text) - (size_t)n - 1, fmt, ap);
    va_end(ap);
    n += m < (int)sizeof(text) - n - 2 ? m : (int)sizeof(text) - n - 2;
    text[n++] = '\n';
    log->continued = 0;
    log_emit(log, text, (size_t)n);
}

uint64_t shim_log_dropped(struct shim_log *log)
{
    pthread_mutex_lock(&log->lock);
    uint64_t dropped = log->dropped;

    pthread_mutex_unlock(&log->lock);
    return dropped;
}

int shim_log_open(struct shim_log **ret, const char *path, uint64_t file_bytes,
                  struct bl_errmsg *msg)
{
    struct shim_log *log = calloc(1, sizeof(*log));
    struct stat st;
    int rc = 0;

    if (!log || !(log->ring = malloc(SHIM_LOG_RING_BYTES))) {
        free(log);
        return bl_err_code(msg, -ENOMEM, "log %s", path);
    }
    snprintf(log->path, sizeof(log->path), "%s", path);
    log->file_bytes_max = file_bytes;
    log->fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0640);
    if (log->fd < 0 || fstat(log->fd, &st) != 0) {
        rc = bl_err_code(msg, -errno, "open %s", path);
        goto fail;
    }
    log->file_bytes = (uint64_t)st.st_size;
    pthread_mutex_init(&log->lock, NULL);
    pthread_cond_init(&log->filled, NULL);
    rc = -pthread_create(&log->thread, NULL, log_main, log);
    if (rc != 0) {
        bl_err_code(msg, rc, "start the log's thread");
        goto fail;
    }
    *ret = log;
    return 0;
fail:
    if (log->fd >= 0) {
        close(log->fd);
    }
    free(log->ring);
    free(log);
    return rc;
}

void shim_log_close(struct shim_log *log)
{
    if (!log) {
        return;
    }
    shim_log_flush(log);
    pthread_mutex_lock(&log->lock);
    log->stop = 1;
    pthread_cond_signal(&log->filled);
    pthread_mutex_unlock(&log->lock);
    pthread_join(log->thread, NULL);
    close(log->fd);
    free(log->ring);
    free(log);
}
