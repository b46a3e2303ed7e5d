/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/engine_life.h"

#include <ctype.h>
#include <dirent.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

uint64_t engine_life_io(uint32_t pid)
{
    char path[64], name[32];
    uint64_t value, sum = 0;

    snprintf(path, sizeof(path), "/proc/%u/io", pid);
    FILE *file = fopen(path, "re");

    while (file && fscanf(file, "%31[a-z_]: %" SCNu64 "\n", name, &value) == 2) {
        sum += strcmp(name, "syscr") != 0 && strcmp(name, "syscw") != 0 ? value : 0;
    }
    if (file) {
        fclose(file);
    }
    return sum;
}

/* What stands behind the name, which may hold anything, in a stat file of /proc; NULL: nothing. */
static const char *stat_read(const char *path, char *text, size_t room)
{
    FILE *file = fopen(path, "re");
    size_t bytes = file ? fread(text, 1, room - 1, file) : 0;

    if (file) {
        fclose(file);
    }
    text[bytes] = 0;
    const char *at = strrchr(text, ')');

    return at ? at + 1 : NULL;
}

uint64_t engine_life_cpu_ticks(uint32_t pid)
{
    char path[64], text[1024];
    unsigned long long user = 0, system = 0;

    snprintf(path, sizeof(path), "/proc/%u/stat", pid);
    const char *at = stat_read(path, text, sizeof(text));

    if (!at ||
        sscanf(at, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu", &user, &system) != 2) {
        return 0;
    }
    return user + system;
}

int engine_life_waits(uint32_t pid)
{
    char path[320], text[1024];
    const struct dirent *ent;
    int waits = 0;

    snprintf(path, sizeof(path), "/proc/%u/task", pid);
    DIR *dir = opendir(path);

    while (dir && !waits && (ent = readdir(dir)) != NULL) {
        if (isdigit((unsigned char)ent->d_name[0])) {
            snprintf(path, sizeof(path), "/proc/%u/task/%s/stat", pid, ent->d_name);
            const char *at = stat_read(path, text, sizeof(text));

            waits = at && strncmp(at, " D", 2) == 0;
        }
    }
    if (dir) {
        closedir(dir);
    }
    return waits;
}

/* How much of `path` the mount point covers, in bytes; -1: it does not. */
static int mount_covers(const char *mount, const char *path)
{
    size_t bytes = strlen(mount);

    if (bytes == 1) {
        return path[0] == mount[0] ? 1 : -1;
    }
    return strncmp(mount, path, bytes) == 0 && (path[bytes] == '/' || path[bytes] == 0) ? (int)bytes
                                                                                        : -1;
}

/* major:minor of what is mounted at `path`, the last of several in one place. 1: found. */
static int device_of(const char *path, const char *mountinfo, unsigned *major, unsigned *minor)
{
    char line[8192], mount[4096];
    FILE *file = fopen(mountinfo, "re");
    int covered = -1;

    while (file && fgets(line, sizeof(line), file)) {
        unsigned a, b;

        if (sscanf(line, "%*u %*u %u:%u %*s %4095s", &a, &b, mount) == 3 &&
            mount_covers(mount, path) >= 0 && mount_covers(mount, path) >= covered) {
            covered = mount_covers(mount, path);
            *major = a;
            *minor = b;
        }
    }
    if (file) {
        fclose(file);
    }
    return covered >= 0;
}

uint64_t engine_life_sectors(const char *path, const char *mountinfo, const char *sys)
{
    char name[512];
    unsigned major = 0, minor = 0;
    unsigned long long in = 0, out = 0;

    if (!device_of(path, mountinfo, &major, &minor)) {
        return 0;
    }
    snprintf(name, sizeof(name), "%s/%u:%u/stat", sys, major, minor);
    FILE *file = fopen(name, "re");
    int read = file ? fscanf(file, "%*u %*u %llu %*u %*u %*u %llu", &in, &out) : 0;

    if (file) {
        fclose(file);
    }
    return read == 2 ? in + out : 0;
}
