/* SPDX-License-Identifier: Apache-2.0 */
#include "base/log.h"

#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"

static const char *const level_names[] = {"debug", "info", "warn", "error"};

static struct {
    pthread_mutex_t lock; /* guards all below */
    int level;            /* -1 until first used */
    int fd;
    int to_stderr;
    uint64_t second; /* of the monotonic clock, to which `lines` belongs */
    uint32_t lines;
    uint64_t dropped; /* in all */
    uint64_t told;    /* of these, already told */
} logger = {.lock = PTHREAD_MUTEX_INITIALIZER, .level = -1, .fd = -1, .to_stderr = 1};

int bl_log_level_parse(const char *name)
{
    for (int i = 0; i <= BL_LOG_ERROR; i++) {
        if (strcmp(name, level_names[i]) == 0) {
            return i;
        }
    }
    return -1;
}

/* Under the lock. */
static int log_level(void)
{
    if (logger.level < 0) {
        const char *name = getenv("BELAY_LOG");
        int level = name != NULL ? bl_log_level_parse(name) : -1;
        logger.level = level >= 0 ? level : BL_LOG_INFO;
    }
    return logger.level;
}

void bl_log_set_level(enum bl_log_level level)
{
    pthread_mutex_lock(&logger.lock);
    logger.level = (int)level;
    pthread_mutex_unlock(&logger.lock);
}

void bl_log_set_fd(int fd)
{
    pthread_mutex_lock(&logger.lock);
    logger.fd = fd;
    pthread_mutex_unlock(&logger.lock);
}

void bl_log_set_stderr(int on)
{
    pthread_mutex_lock(&logger.lock);
    logger.to_stderr = on;
    pthread_mutex_unlock(&logger.lock);
}

uint64_t bl_log_dropped(void)
{
    pthread_mutex_lock(&logger.lock);
    uint64_t dropped = logger.dropped;
    pthread_mutex_unlock(&logger.lock);
    return dropped;
}

/* Is the line to be written, by level and rate? Under the lock. */
static int log_admit(enum bl_log_level level)
{
    if ((int)level < log_level()) {
        return 0;
    }
    uint64_t second = bl_now_ns() / 1000000000ULL;
    if (second != logger.second) {
        logger.second = second;
        logger.lines = 0;
    }
    if (level < BL_LOG_ERROR && logger.lines >= BL_LOG_BURST) {
        logger.dropped++;
        return 0;
    }
    logger.lines++;
    return 1;
}

/* One write: a line that does not go out whole at once counts as dropped. Under the lock. */
static void log_write(int fd, const char *line, size_t bytes)
{
    ssize_t n;
    do {
        n = write(fd, line, bytes);
    } while (n < 0 && errno == EINTR);
    if (n != (ssize_t)bytes) {
        logger.dropped++;
    }
}

static void log_sinks(const char *line, size_t bytes)
{
    if (logger.to_stderr) {
        log_write(STDERR_FILENO, line, bytes);
    }
    if (logger.fd >= 0) {
        log_write(logger.fd, line, bytes);
    }
}

/* Formats into `line`, always ending in a newline; returns its bytes. */
static size_t log_format(char line[BL_LOG_LINE_BYTES], enum bl_log_level level, const char *room,
                         const char *text)
{
    char when[BL_CLOCK_TEXT_BYTES];
    bl_wall_format(bl_wall_ms(), when);
    int n =
        snprintf(line, BL_LOG_LINE_BYTES - 1, "%s %s %s: %s", when, level_names[level], room, text);
    size_t bytes = n < 0 ? 0 : (size_t)n;
    if (bytes > BL_LOG_LINE_BYTES - 2) {
        bytes = BL_LOG_LINE_BYTES - 2;
    }
    for (size_t i = 0; i < bytes; i++) {
        if (line[i] == '\n' || line[i] == '\r') {
            line[i] = ' ';
        }
    }
    line[bytes] = '\n';
    return bytes + 1;
}

void bl_log(enum bl_log_level level, const char *room, const char *fmt, ...)
{
    int saved = errno;
    pthread_mutex_lock(&logger.lock);
    if (log_admit(level)) {
        char text[BL_LOG_LINE_BYTES];
        char line[BL_LOG_LINE_BYTES];
        if (logger.dropped > logger.told) {
            snprintf(text, sizeof(text), "%llu lines were left out before this one",
                     (unsigned long long)(logger.dropped - logger.told));
            logger.told = logger.dropped;
            log_sinks(line, log_format(line, BL_LOG_WARN, "log", text));
        }
        va_list args;
        va_start(args, fmt);
        errno = saved; /* for %m */
        vsnprintf(text, sizeof(text), fmt, args);
        va_end(args);
        log_sinks(line, log_format(line, level, room, text));
    }
    pthread_mutex_unlock(&logger.lock);
    errno = saved;
}
