/* SPDX-License-Identifier: Apache-2.0 */
#include "base/file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mem.h"

static int file_wait(int fd, short events)
{
    struct pollfd pfd = {.fd = fd, .events = events};
    return poll(&pfd, 1, -1) < 0 && errno != EINTR ? -errno : 0;
}

int bl_fd_write_all(int fd, const void *data, size_t bytes)
{
    const char *at = data;
    while (bytes > 0) {
        ssize_t n = write(fd, at, bytes);
        if (n >= 0) {
            at += n;
            bytes -= (size_t)n;
        } else if (errno == EAGAIN) {
            int rc = file_wait(fd, POLLOUT);
            if (rc < 0) {
                return rc;
            }
        } else if (errno != EINTR) {
            return -errno;
        }
    }
    return 0;
}

ssize_t bl_fd_read_all(int fd, void *data, size_t bytes)
{
    char *at = data;
    size_t have = 0;
    while (have < bytes) {
        ssize_t n = read(fd, at + have, bytes - have);
        if (n == 0) {
            break;
        }
        if (n > 0) {
            have += (size_t)n;
        } else if (errno == EAGAIN) {
            int rc = file_wait(fd, POLLIN);
            if (rc < 0) {
                return rc;
            }
        } else if (errno != EINTR) {
            return -errno;
        }
    }
    return (ssize_t)have;
}

/* Reads to the end; the size is not trusted, as a file in /proc has none and one may grow. */
static int file_read_fd(int fd, size_t bytes_max, size_t hint, char **ret_data, size_t *ret_bytes)
{
    size_t capacity = hint + 1;
    size_t have = 0;
    char *data = malloc(capacity + 1);
    if (data == NULL) {
        return -ENOMEM;
    }
    for (;;) {
        ssize_t n = bl_fd_read_all(fd, data + have, capacity - have);
        if (n < 0) {
            free(data);
            return (int)n;
        }
        have += (size_t)n;
        if (have > bytes_max) {
            free(data);
            return BL_ELIMIT;
        }
        if (have < capacity) {
            break;
        }
        capacity = capacity * 2 < bytes_max + 1 ? capacity * 2 : bytes_max + 1;
        char *grown = realloc(data, capacity + 1);
        if (grown == NULL) {
            free(data);
            return -ENOMEM;
        }
        data = grown;
    }
    data[have] = '\0';
    *ret_data = data;
    *ret_bytes = have;
    return 0;
}

int bl_file_read(const char *path, size_t bytes_max, char **ret_data, size_t *ret_bytes,
                 struct bl_errmsg *msg)
{
    BL_ASSERT(bytes_max < SIZE_MAX / 4);
    /* O_NONBLOCK: a FIFO in the place of a file must not hang us. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        int rc = -errno;
        return bl_err_code(msg, rc, "open %s", path);
    }
    struct stat st;
    int rc = fstat(fd, &st) < 0 ? -errno : 0;
    if (rc == 0 && !S_ISREG(st.st_mode)) {
        rc = S_ISDIR(st.st_mode) ? -EISDIR : -EINVAL;
    }
    if (rc == 0 && (uint64_t)st.st_size > bytes_max) {
        rc = BL_ELIMIT;
    }
    if (rc == 0) {
        rc = file_read_fd(fd, bytes_max, (size_t)st.st_size, ret_data, ret_bytes);
    }
    close(fd);
    if (rc == BL_ELIMIT) {
        return bl_err(msg, rc, "%s: larger than %zu bytes", path, bytes_max);
    }
    return rc < 0 ? bl_err_code(msg, rc, "read %s", path) : 0;
}

/* Opens the directory that `path` lies in. */
static int file_open_parent(const char *path)
{
    const char *slash = strrchr(path, '/');
    char dir[PATH_MAX];
    if (slash == NULL) {
        return open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    }
    size_t bytes = slash == path ? 1 : (size_t)(slash - path);
    if (bytes >= sizeof(dir)) {
        errno = ENAMETOOLONG;
        return -1;
    }
    memcpy(dir, path, bytes);
    dir[bytes] = '\0';
    return open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

/* Writes and syncs the temporary file; the caller removes it if this fails. */
static int file_write_temp(int dir_fd, const char *temp, const void *data, size_t bytes)
{
    int fd = openat(dir_fd, temp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd < 0) {
        return -errno;
    }
    int rc = bl_fd_write_all(fd, data, bytes);
    if (rc == 0 && fsync(fd) < 0) {
        rc = -errno;
    }
    if (close(fd) < 0 && rc == 0) {
        rc = -errno;
    }
    return rc;
}

int bl_file_write_atomic(const char *path, const void *data, size_t bytes, struct bl_errmsg *msg)
{
    const char *slash = strrchr(path, '/');
    const char *name = slash != NULL ? slash + 1 : path;
    char temp[NAME_MAX + 1];
    int n = snprintf(temp, sizeof(temp), ".%.200s.%016llx.tmp", name,
                     (unsigned long long)bl_random_u64());
    BL_ASSERT(n > 0 && (size_t)n < sizeof(temp));
    int dir_fd = file_open_parent(path);
    if (dir_fd < 0) {
        int rc = -errno;
        return bl_err_code(msg, rc, "write %s", path);
    }
    int rc = file_write_temp(dir_fd, temp, data, bytes);
    if (rc == 0 && renameat(dir_fd, temp, dir_fd, name) < 0) {
        rc = -errno;
    }
    if (rc < 0) {
        unlinkat(dir_fd, temp, 0);
    } else if (fsync(dir_fd) < 0) {
        rc = -errno;
    }
    close(dir_fd);
    return rc < 0 ? bl_err_code(msg, rc, "write %s", path) : 0;
}

int bl_mkdir_p(const char *path, struct bl_errmsg *msg)
{
    char part[PATH_MAX];
    size_t bytes = strlen(path);
    if (bytes == 0 || bytes >= sizeof(part)) {
        return bl_err_code(msg, -ENAMETOOLONG, "make directory %.100s", path);
    }
    memcpy(part, path, bytes + 1);
    for (size_t i = 1; i <= bytes; i++) {
        if (part[i] != '/' && part[i] != '\0') {
            continue;
        }
        char keep = part[i];
        part[i] = '\0';
        struct stat st;
        int rc = mkdir(part, 0755) < 0 ? -errno : 0;
        /* Read-only or forbidden parents answer otherwise than EEXIST, yet may be there. */
        if (rc < 0 && stat(part, &st) == 0) {
            rc = S_ISDIR(st.st_mode) ? 0 : -ENOTDIR;
        }
        if (rc < 0) {
            return bl_err_code(msg, rc, "make directory %s", part);
        }
        part[i] = keep;
    }
    return 0;
}

static int rm_entry(int dir_fd, const char *name, dev_t dev, int depth);

static int rm_children(int dir_fd, dev_t dev, int depth)
{
    DIR *dir = fdopendir(dir_fd);
    if (dir == NULL) {
        int rc = -errno;
        close(dir_fd);
        return rc;
    }
    int rc = 0;
    while (rc == 0) {
        errno = 0;
        const struct dirent *entry = readdir(dir);
        if (entry == NULL) {
            rc = -errno;
            break;
        }
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
            rc = rm_entry(dirfd(dir), entry->d_name, dev, depth + 1);
        }
    }
    closedir(dir);
    return rc;
}

/* Bounded recursion: depth is checked against BL_RM_TREE_DEPTH_MAX. */
static int rm_entry(int dir_fd, const char *name, dev_t dev, int depth)
{
    struct stat st;
    if (depth > BL_RM_TREE_DEPTH_MAX) {
        return BL_ELIMIT;
    }
    if (fstatat(dir_fd, name, &st, AT_SYMLINK_NOFOLLOW) < 0) {
        return errno == ENOENT ? 0 : -errno;
    }
    if (st.st_dev != dev) {
        return -EXDEV;
    }
    if (!S_ISDIR(st.st_mode)) {
        return unlinkat(dir_fd, name, 0) < 0 && errno != ENOENT ? -errno : 0;
    }
    int fd = openat(dir_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) {
        return errno == ENOENT ? 0 : -errno;
    }
    int rc = rm_children(fd, dev, depth);
    if (rc == 0 && unlinkat(dir_fd, name, AT_REMOVEDIR) < 0 && errno != ENOENT) {
        rc = -errno;
    }
    return rc;
}

int bl_rm_tree(const char *inside, const char *name, struct bl_errmsg *msg)
{
    if (name[0] == '\0' || strchr(name, '/') != NULL || strcmp(name, ".") == 0 ||
        strcmp(name, "..") == 0) {
        return bl_err_code(msg, -EINVAL, "remove '%s' in %s", name, inside);
    }
    int dir_fd = open(inside, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir_fd < 0) {
        int rc = -errno;
        return bl_err_code(msg, rc, "open %s", inside);
    }
    struct stat st;
    int rc = fstat(dir_fd, &st) < 0 ? -errno : rm_entry(dir_fd, name, st.st_dev, 0);
    close(dir_fd);
    return rc < 0 ? bl_err_code(msg, rc, "remove %s/%s", inside, name) : 0;
}

int bl_fsync_dir(const char *path, struct bl_errmsg *msg)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int rc = fd < 0 || fsync(fd) < 0 ? -errno : 0;
    if (fd >= 0) {
        close(fd);
    }
    return rc < 0 ? bl_err_code(msg, rc, "fsync %s", path) : 0;
}

int bl_path_join(char *out, size_t out_bytes, const char *dir, const char *name)
{
    int n;
    if (name[0] == '/' || dir[0] == '\0') {
        n = snprintf(out, out_bytes, "%s", name);
    } else {
        const char *slash = dir[strlen(dir) - 1] == '/' ? "" : "/";
        n = snprintf(out, out_bytes, "%s%s%s", dir, slash, name);
    }
    return n < 0 || (size_t)n >= out_bytes ? BL_ELIMIT : 0;
}

int bl_dir_of_exe(char *out, size_t out_bytes)
{
    char path[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", path, sizeof(path) - 1);
    if (n < 0) {
        return -errno;
    }
    path[n] = '\0';
    char *slash = strrchr(path, '/');
    if (slash == NULL) {
        return -ENOENT;
    }
    slash[slash == path ? 1 : 0] = '\0';
    return bl_path_join(out, out_bytes, "", path);
}
