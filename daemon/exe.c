/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/digest.h"
#include "base/file.h"
#include "daemon/daemon.h"

/* The first executable of that name in PATH. */
static int path_search(const char *name, char *ret, size_t bytes)
{
    const char *at = getenv("PATH");

    while (at && *at) {
        size_t n = strcspn(at, ":");

        if (snprintf(ret, bytes, "%.*s/%s", (int)n, at, name) < (int)bytes &&
            access(ret, X_OK) == 0) {
            return 0;
        }
        at += n + (at[n] == ':');
    }
    return -ENOENT;
}

int exe_path(const struct bl_job *job, char *ret, size_t bytes, struct bl_errmsg *msg)
{
    char dir[1024];
    int rc;

    if (job->command_count == 0) {
        rc = bl_dir_of_exe(dir, sizeof(dir));
        if (rc == 0) {
            rc = bl_path_join(ret, bytes, dir, "belay-train");
        }
    } else if (strchr(job->command[0], '/')) {
        rc = snprintf(ret, bytes, "%s", job->command[0]) < (int)bytes ? 0 : BL_ELIMIT;
    } else {
        rc = path_search(job->command[0], ret, bytes);
    }
    if (rc == 0 && access(ret, X_OK) != 0) {
        rc = -errno;
    }
    return rc ? bl_err_code(msg, rc, "the trainer %s",
                            job->command_count ? job->command[0] : "belay-train beside belayd")
              : 0;
}

int exe_digest(const char *path, uint64_t *ret, struct bl_errmsg *msg)
{
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC), rc = 0;

    if (fd < 0 || fstat(fd, &st) != 0) {
        rc = -errno;
    } else if (st.st_size == 0) {
        *ret = bl_xxh3("", 0);
    } else {
        void *map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);

        if (map == MAP_FAILED) {
            rc = -errno;
        } else {
            *ret = bl_xxh3(map, (size_t)st.st_size);
            munmap(map, (size_t)st.st_size);
        }
    }
    if (fd >= 0) {
        close(fd);
    }
    return rc ? bl_err_code(msg, rc, "read %s", path) : 0;
}
