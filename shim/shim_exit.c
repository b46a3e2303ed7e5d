/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "shim/shim.h"

static int write_durably(const char *path, const char *text, size_t bytes)
{
    char temp[1100], dir[1100];

    snprintf(temp, sizeof(temp), "%s.tmp", path);
    int fd = open(temp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0640);

    if (fd < 0) {
        return -errno;
    }
    int rc = write(fd, text, bytes) == (ssize_t)bytes && fsync(fd) == 0 ? 0 : -EIO;

    close(fd);
    if (rc != 0 || rename(temp, path) != 0) {
        return rc ? rc : -errno;
    }
    snprintf(dir, sizeof(dir), "%s", path);
    fd = open(dirname(dir), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) {
        return -errno;
    }
    rc = fsync(fd) == 0 ? 0 : -errno;
    close(fd);
    return rc;
}

/* The last number in /proc/PID/stat is the wait status, as soon as the process begins to die. */
void shim_exit_guess(struct shim *shim)
{
    char path[64], text[1024];
    int status = 0;

    snprintf(path, sizeof(path), "/proc/%d/stat", (int)shim->pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, text, sizeof(text) - 1) : 0;

    if (fd >= 0) {
        close(fd);
    }
    if (n > 0) {
        text[n] = '\0';
        const char *last = strrchr(text, ' ');

        status = last ? atoi(last + 1) : 0;
    }
    if (status != 0) {
        shim->exit.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
        shim->exit.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
        shim->exit.by_us = (uint32_t)shim->killed;
    }
}

void shim_exit_record(struct shim *shim, int status)
{
    struct shim_exit *ex = &shim->exit;
    struct timespec now;
    char text[512];

    clock_gettime(CLOCK_REALTIME, &now);
    ex->unix_ms = (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
    ex->code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    ex->signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    ex->core = WIFSIGNALED(status) && WCOREDUMP(status) ? 1 : 0;
    ex->by_us = (uint32_t)shim->killed;
    int n = snprintf(text, sizeof(text),
                     "{\"schema\":1,\"incarnation\":\"%016" PRIx64 "\",\"pid\":%d,\"code\":%d,"
                     "\"signal\":%d,\"core\":%u,\"by_us\":%u,\"unix_ms\":%" PRId64
                     ",\"log_dropped\":%" PRIu64 "}\n",
                     shim->options.incarnation, (int)shim->pid, ex->code, ex->signal, ex->core,
                     ex->by_us, ex->unix_ms, shim_log_dropped(shim->log));
    int rc = write_durably(shim->options.exit_path, text, (size_t)n);

    if (rc != 0) {
        shim_log_note(shim->log, "cannot write %s: %s; the daemon is told all the same",
                      shim->options.exit_path, bl_strerror(rc));
    }
    ex->known = 1;
}
