/* SPDX-License-Identifier: Apache-2.0 */
/* The engine's memory against what the node has, and priorities of its threads. */
#include "engine/budget.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

/* linux/ioprio.h is not there on all systems that have the call. */
#define IOPRIO_WHO_PROCESS 1
#define IOPRIO_BEST_EFFORT ((2 << 13) | 7) /* its lowest level */
#define IOPRIO_IDLE        (3 << 13)

void engine_process_kind(int nice)
{
    char text[8];
    ssize_t bytes = snprintf(text, sizeof(text), "%d", nice);
    int fd;

    BL_IGNORE(setsid() < 0, "it may lead a group already");
    fd = open("/proc/self/autogroup", O_WRONLY | O_CLOEXEC);
    if (fd >= 0) { /* else there are no such shares, and nice counts by itself */
        BL_IGNORE(write(fd, text, (size_t)bytes) < 0, "only kinder to the ranks");
        close(fd);
    }
}

void engine_thread_kind(int nice, int idle)
{
    id_t thread = (id_t)syscall(SYS_gettid);

    BL_IGNORE(setpriority(PRIO_PROCESS, thread, nice) < 0, "only kinder to the ranks");
    BL_IGNORE(
        syscall(SYS_ioprio_set, IOPRIO_WHO_PROCESS, 0, idle ? IOPRIO_IDLE : IOPRIO_BEST_EFFORT) < 0,
        "only kinder to the ranks");
}

/* The number that follows `key` in a small file of the kernel's; UINT64_MAX when it is not there.
 */
static uint64_t number_of(const char *path, const char *key)
{
    char text[8192];
    FILE *file = fopen(path, "re");
    size_t bytes = file == NULL ? 0 : fread(text, 1, sizeof(text) - 1, file);
    const char *at;
    char *end = NULL;
    uint64_t value;

    if (file != NULL) {
        fclose(file);
    }
    text[bytes] = '\0';
    at = strstr(text, key);
    if (at == NULL) {
        return UINT64_MAX;
    }
    at += strlen(key);
    value = strtoull(at, &end, 10);
    return end == at ? UINT64_MAX : value; /* "max" is no limit */
}

/* What the control group leaves, at the place where a container sees it. */
static uint64_t group_left(void)
{
    uint64_t limit = number_of("/sys/fs/cgroup/memory.max", "");
    uint64_t used = number_of("/sys/fs/cgroup/memory.current", "");
    uint64_t cache = number_of("/sys/fs/cgroup/memory.stat", "\nfile ");
    uint64_t shared = number_of("/sys/fs/cgroup/memory.stat", "\nshmem ");

    if (limit == UINT64_MAX || used == UINT64_MAX) {
        return UINT64_MAX;
    }
    if (cache != UINT64_MAX && shared != UINT64_MAX && shared <= cache && cache - shared <= used) {
        used -= cache - shared; /* the kernel gives it up */
    }
    return limit > used ? limit - used : 0;
}

int engine_budget_check(uint64_t bytes, struct bl_errmsg *msg)
{
    uint64_t left = number_of("/proc/meminfo", "MemAvailable:");
    uint64_t group = group_left();

    left = left == UINT64_MAX ? left : left * 1024;
    left = group < left ? group : left;
    if (bytes <= left) {
        return 0;
    }
    return bl_err(msg, BL_ELIMIT,
                  "needs %llu MiB of memory (save %llu, verify %llu, load %llu), but %llu MiB are "
                  "available",
                  (unsigned long long)(bytes >> 20), ENGINE_SAVE_BYTES >> 20,
                  ENGINE_VERIFY_BYTES >> 20, (unsigned long long)(engine_load_bytes(bytes) >> 20),
                  (unsigned long long)(left >> 20));
}
