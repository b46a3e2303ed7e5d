/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The real file operations, and the helpers that put operation and path into errors.
 *
 * Each operation that changes the disk is one hit of the failpoint `disk-op` before it happens, and
 * each read one of `disk-read`, so that tests can stop whole programs at any of them. (A bulk
 * transfer without io_uring hits twice: once when it is asked for, once when it is done.)
 */
#include "ckpt/ckpt_io.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/failpoint.h"

static int io_res(int rc)
{
    return rc < 0 ? -errno : rc;
}

static int real_open(struct ckpt_io *io, const char *path, int flags, mode_t mode)
{
    int fd = (flags & O_CREAT) != 0 ? BL_FAILPOINT("disk-op") : 0;

    (void)io;
    if (fd < 0) {
        return fd;
    }
    do {
        fd = open(path, flags | O_CLOEXEC, mode);
    } while (fd < 0 && errno == EINTR);
    return io_res(fd);
}

static int real_close(struct ckpt_io *io, int fd)
{
    (void)io;
    return io_res(close(fd));
}

static int64_t real_pwrite(struct ckpt_io *io, int fd, const void *data, size_t bytes,
                           uint64_t offset)
{
    ssize_t n = BL_FAILPOINT("disk-op");

    (void)io;
    if (n < 0) {
        return n;
    }
    do {
        n = pwrite(fd, data, bytes, (off_t)offset);
    } while (n < 0 && errno == EINTR);
    return n < 0 ? -errno : n;
}

static int64_t real_pread(struct ckpt_io *io, int fd, void *data, size_t bytes, uint64_t offset)
{
    ssize_t n = BL_FAILPOINT("disk-read");

    (void)io;
    if (n < 0) {
        return n;
    }
    do {
        n = pread(fd, data, bytes, (off_t)offset);
    } while (n < 0 && errno == EINTR);
    return n < 0 ? -errno : n;
}

static int real_fsync(struct ckpt_io *io, int fd)
{
    int rc = BL_FAILPOINT("disk-op");

    (void)io;
    return rc < 0 ? rc : io_res(fsync(fd));
}

/* No failpoint: nothing is promised by it. */
static int real_flush(struct ckpt_io *io, int fd, uint64_t offset, uint64_t bytes)
{
    (void)io;
    return io_res(sync_file_range(fd, (off_t)offset, (off_t)bytes, SYNC_FILE_RANGE_WRITE));
}

static int real_truncate(struct ckpt_io *io, int fd, uint64_t bytes)
{
    int rc = BL_FAILPOINT("disk-op");

    (void)io;
    return rc < 0 ? rc : io_res(ftruncate(fd, (off_t)bytes));
}

static int real_allocate(struct ckpt_io *io, int fd, uint64_t bytes)
{
    int rc = BL_FAILPOINT("disk-op");

    (void)io;
    if (rc < 0) {
        return rc;
    }
    do {
        rc = fallocate(fd, 0, 0, (off_t)bytes);
    } while (rc < 0 && errno == EINTR);
    return io_res(rc);
}

static int real_size(struct ckpt_io *io, const char *path, uint64_t *ret_bytes)
{
    struct stat st;

    (void)io;
    if (stat(path, &st) < 0) {
        return -errno;
    }
    if (!S_ISREG(st.st_mode)) {
        return S_ISDIR(st.st_mode) ? -EISDIR : -EINVAL;
    }
    *ret_bytes = (uint64_t)st.st_size;
    return 0;
}

static int real_rename(struct ckpt_io *io, const char *from, const char *to)
{
    int rc = BL_FAILPOINT("disk-op");

    (void)io;
    return rc < 0 ? rc : io_res(rename(from, to));
}

static int real_link(struct ckpt_io *io, const char *from, const char *to)
{
    int rc = BL_FAILPOINT("disk-op");

    (void)io;
    return rc < 0 ? rc : io_res(link(from, to));
}

static int real_mkdir(struct ckpt_io *io, const char *path, mode_t mode)
{
    int rc = BL_FAILPOINT("disk-op");

    (void)io;
    return rc < 0 ? rc : io_res(mkdir(path, mode));
}

static int real_unlink(struct ckpt_io *io, const char *path)
{
    int rc = BL_FAILPOINT("disk-op");

    (void)io;
    return rc < 0 ? rc : io_res(unlink(path));
}

static int real_rmdir(struct ckpt_io *io, const char *path)
{
    int rc = BL_FAILPOINT("disk-op");

    (void)io;
    return rc < 0 ? rc : io_res(rmdir(path));
}

/* Appends a copy of `name`; the array doubles. */
static int names_add(struct ckpt_names *names, const char *name)
{
    if ((names->count & (names->count - 1)) == 0) { /* 0, 1, 2, 4, ...: full */
        size_t room = names->count == 0 ? 1 : (size_t)names->count * 2;
        char **grown = realloc(names->names, room * sizeof(*grown));

        if (grown == NULL) {
            return -ENOMEM;
        }
        names->names = grown;
    }
    names->names[names->count] = strdup(name);
    if (names->names[names->count] == NULL) {
        return -ENOMEM;
    }
    names->count++;
    return 0;
}

static int real_list(struct ckpt_io *io, const char *path, uint32_t count_max,
                     struct ckpt_names *ret)
{
    struct ckpt_names names = {0};
    struct dirent *ent;
    int rc = 0;
    DIR *dir = opendir(path);

    (void)io;
    if (dir == NULL) {
        return -errno;
    }
    while (rc == 0) {
        errno = 0;
        ent = readdir(dir);
        if (ent == NULL) {
            rc = -errno;
            break;
        }
        if (strcmp(ent->d_name, ".") == 0 || strcmp(ent->d_name, "..") == 0) {
            continue;
        }
        rc = names.count >= count_max ? BL_ELIMIT : names_add(&names, ent->d_name);
    }
    closedir(dir);
    if (rc < 0) {
        ckpt_names_close(&names);
        return rc;
    }
    *ret = names;
    return 0;
}

void ckpt_names_close(struct ckpt_names *names)
{
    if (names == NULL) {
        return;
    }
    for (uint32_t i = 0; i < names->count; i++) {
        free(names->names[i]);
    }
    free(names->names);
    memset(names, 0, sizeof(*names));
}

static int real_gate(struct ckpt_io *io, enum ckpt_op op)
{
    (void)io;
    return op == CKPT_OP_READ ? BL_FAILPOINT("disk-read") : BL_FAILPOINT("disk-op");
}

static const struct ckpt_io_ops real_ops = {
    .open = real_open,
    .close = real_close,
    .pwrite = real_pwrite,
    .pread = real_pread,
    .fsync = real_fsync,
    .flush = real_flush,
    .truncate = real_truncate,
    .allocate = real_allocate,
    .size = real_size,
    .rename = real_rename,
    .link = real_link,
    .mkdir = real_mkdir,
    .unlink = real_unlink,
    .rmdir = real_rmdir,
    .list = real_list,
    .gate = real_gate,
};

struct ckpt_io *ckpt_io_real(void)
{
    static struct ckpt_io real = {.ops = &real_ops};

    return &real;
}

int ckpt_path_join(char *ret, const char *dir, const char *a, const char *b, struct bl_errmsg *msg)
{
    int n = b == NULL ? snprintf(ret, CKPT_PATH_MAX, "%s/%s", dir, a)
                      : snprintf(ret, CKPT_PATH_MAX, "%s/%s/%s", dir, a, b);

    if (n < 0 || n >= CKPT_PATH_MAX) {
        return bl_err(msg, -ENAMETOOLONG, "path too long: %.100s/%.100s...", dir, a);
    }
    return 0;
}

static int write_all(struct ckpt_io *io, int fd, const char *path, const char *data, size_t bytes,
                     struct bl_errmsg *msg)
{
    size_t done = 0;

    while (done < bytes) {
        int64_t n = io->ops->pwrite(io, fd, data + done, bytes - done, done);

        if (n <= 0) {
            return bl_err_code(msg, n == 0 ? -EIO : (int)n, "write %s (%zu of %zu bytes done)",
                               path, done, bytes);
        }
        done += (size_t)n;
    }
    return 0;
}

int ckpt_io_write_file(struct ckpt_io *io, const char *path, const void *data, size_t bytes,
                       struct bl_errmsg *msg)
{
    int fd = io->ops->open(io, path, O_WRONLY | O_CREAT | O_EXCL, 0644);
    int rc, closed;

    if (fd < 0) {
        return bl_err_code(msg, fd, "create %s", path);
    }
    rc = write_all(io, fd, path, data, bytes, msg);
    if (rc == 0) {
        rc = io->ops->fsync(io, fd);
        if (rc < 0) {
            rc = bl_err_code(msg, rc, "fsync %s", path);
        }
    }
    closed = io->ops->close(io, fd);
    if (rc == 0 && closed < 0) {
        rc = bl_err_code(msg, closed, "close %s", path);
    }
    return rc;
}

int ckpt_io_read_file(struct ckpt_io *io, const char *path, size_t bytes_max, char **ret_data,
                      size_t *ret_bytes, struct bl_errmsg *msg)
{
    uint64_t size = 0, done = 0;
    char *data = NULL;
    int fd = -1;
    int rc = io->ops->size(io, path, &size);

    if (rc < 0) {
        return bl_err_code(msg, rc, "open %s", path);
    }
    if (size > bytes_max) {
        return bl_err(msg, BL_ELIMIT, "%s: %llu bytes, at most %zu are read", path,
                      (unsigned long long)size, bytes_max);
    }
    fd = io->ops->open(io, path, O_RDONLY, 0);
    if (fd < 0) {
        return bl_err_code(msg, fd, "open %s", path);
    }
    data = malloc((size_t)size + 1);
    if (data == NULL) {
        rc = bl_err_code(msg, -ENOMEM, "read %s", path);
    }
    while (rc == 0 && done < size) {
        int64_t n = io->ops->pread(io, fd, data + done, (size_t)(size - done), done);

        if (n <= 0) {
            rc = n < 0 ? bl_err_code(msg, (int)n, "read %s", path)
                       : bl_err(msg, BL_EFORMAT, "%s: became shorter while it was read", path);
            break;
        }
        done += (uint64_t)n;
    }
    BL_IGNORE(io->ops->close(io, fd), "nothing was written");
    if (rc < 0) {
        free(data);
        return rc;
    }
    data[size] = '\0';
    *ret_data = data;
    *ret_bytes = (size_t)size;
    return 0;
}

int ckpt_io_fsync_path(struct ckpt_io *io, const char *path, struct bl_errmsg *msg)
{
    int fd = io->ops->open(io, path, O_RDONLY, 0);
    int rc;

    if (fd < 0) {
        return bl_err_code(msg, fd, "open %s", path);
    }
    rc = io->ops->fsync(io, fd);
    BL_IGNORE(io->ops->close(io, fd), "opened for fsync only");
    return rc < 0 ? bl_err_code(msg, rc, "fsync %s", path) : 0;
}

int ckpt_io_rename(struct ckpt_io *io, const char *from, const char *to, struct bl_errmsg *msg)
{
    int rc = io->ops->rename(io, from, to);

    return rc < 0 ? bl_err_code(msg, rc, "rename %s to %s", from, to) : 0;
}

int ckpt_io_mkdir(struct ckpt_io *io, const char *path, struct bl_errmsg *msg)
{
    int rc = io->ops->mkdir(io, path, 0755);

    return rc < 0 && rc != -EEXIST ? bl_err_code(msg, rc, "mkdir %s", path) : 0;
}
