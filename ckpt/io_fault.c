/* SPDX-License-Identifier: Apache-2.0 */
/* The faulty io: counts operations and makes one of them fail, come back short, or be the last. */
#include "ckpt/ckpt_io.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

static void die(void)
{
    kill(getpid(), SIGKILL);
    for (;;) {
        pause();
    }
}

static bool takes_space(enum ckpt_op op)
{
    return op == CKPT_OP_CREATE || op == CKPT_OP_WRITE || op == CKPT_OP_ALLOCATE ||
           op == CKPT_OP_MKDIR || op == CKPT_OP_LINK;
}

/* 0: do it; negative: fail so; 1: do half of it. */
static int fault_gate(struct ckpt_io *io, enum ckpt_op op)
{
    struct ckpt_io_fault *fault = (struct ckpt_io_fault *)(void *)io;

    if (fault->kill_after) {
        die();
    }
    if ((op == CKPT_OP_READ) != fault->reads) {
        return 0;
    }
    fault->count++;
    if (fault->kind == CKPT_FAULT_FULL && fault->count >= fault->at && takes_space(op)) {
        fault->hit = op;
        return fault->error;
    }
    if (fault->count != fault->at) {
        return 0;
    }
    switch (fault->kind) {
    case CKPT_FAULT_KILL:
        die();
        break;
    case CKPT_FAULT_AFTER:
        fault->kill_after = true;
        break;
    case CKPT_FAULT_ERROR:
        fault->hit = op;
        return fault->error;
    case CKPT_FAULT_SHORT:
        fault->hit = op;
        return op == CKPT_OP_WRITE || op == CKPT_OP_READ ? 1 : 0;
    case CKPT_FAULT_NONE:
    case CKPT_FAULT_FULL:
        break;
    }
    return 0;
}

static int done(struct ckpt_io *io, int rc)
{
    if (((struct ckpt_io_fault *)(void *)io)->kill_after) {
        die();
    }
    return rc;
}

static const struct ckpt_io_ops *real(void)
{
    return ckpt_io_real()->ops;
}

static int fault_open(struct ckpt_io *io, const char *path, int flags, mode_t mode)
{
    int rc = (flags & O_CREAT) != 0 ? fault_gate(io, CKPT_OP_CREATE) : 0;

    return rc < 0 ? rc : done(io, real()->open(io, path, flags, mode));
}

static int fault_close(struct ckpt_io *io, int fd)
{
    return real()->close(io, fd);
}

static int64_t fault_pwrite(struct ckpt_io *io, int fd, const void *data, size_t bytes,
                            uint64_t offset)
{
    int rc = fault_gate(io, CKPT_OP_WRITE);
    int64_t n;

    if (rc < 0) {
        return rc;
    }
    n = real()->pwrite(io, fd, data, rc > 0 && bytes > 1 ? bytes / 2 : bytes, offset);
    (void)done(io, 0);
    return n;
}

static int64_t fault_pread(struct ckpt_io *io, int fd, void *data, size_t bytes, uint64_t offset)
{
    int rc = fault_gate(io, CKPT_OP_READ);

    if (rc < 0) {
        return rc;
    }
    return real()->pread(io, fd, data, rc > 0 && bytes > 1 ? bytes / 2 : bytes, offset);
}

static int fault_fsync(struct ckpt_io *io, int fd)
{
    int rc = fault_gate(io, CKPT_OP_FSYNC);

    return rc < 0 ? rc : done(io, real()->fsync(io, fd));
}

static int fault_truncate(struct ckpt_io *io, int fd, uint64_t bytes)
{
    int rc = fault_gate(io, CKPT_OP_TRUNCATE);

    return rc < 0 ? rc : done(io, real()->truncate(io, fd, bytes));
}

static int fault_allocate(struct ckpt_io *io, int fd, uint64_t bytes)
{
    int rc = fault_gate(io, CKPT_OP_ALLOCATE);

    return rc < 0 ? rc : done(io, real()->allocate(io, fd, bytes));
}

static int fault_size(struct ckpt_io *io, const char *path, uint64_t *ret_bytes)
{
    return real()->size(io, path, ret_bytes);
}

static int fault_rename(struct ckpt_io *io, const char *from, const char *to)
{
    int rc = fault_gate(io, CKPT_OP_RENAME);

    return rc < 0 ? rc : done(io, real()->rename(io, from, to));
}

static int fault_link(struct ckpt_io *io, const char *from, const char *to)
{
    int rc = fault_gate(io, CKPT_OP_LINK);

    return rc < 0 ? rc : done(io, real()->link(io, from, to));
}

static int fault_mkdir(struct ckpt_io *io, const char *path, mode_t mode)
{
    int rc = fault_gate(io, CKPT_OP_MKDIR);

    return rc < 0 ? rc : done(io, real()->mkdir(io, path, mode));
}

static int fault_unlink(struct ckpt_io *io, const char *path)
{
    int rc = fault_gate(io, CKPT_OP_UNLINK);

    return rc < 0 ? rc : done(io, real()->unlink(io, path));
}

static int fault_rmdir(struct ckpt_io *io, const char *path)
{
    int rc = fault_gate(io, CKPT_OP_RMDIR);

    return rc < 0 ? rc : done(io, real()->rmdir(io, path));
}

static int fault_list(struct ckpt_io *io, const char *path, uint32_t count_max,
                      struct ckpt_names *ret)
{
    return real()->list(io, path, count_max, ret);
}

static const struct ckpt_io_ops fault_ops = {
    .open = fault_open,
    .close = fault_close,
    .pwrite = fault_pwrite,
    .pread = fault_pread,
    .fsync = fault_fsync,
    .truncate = fault_truncate,
    .allocate = fault_allocate,
    .size = fault_size,
    .rename = fault_rename,
    .link = fault_link,
    .mkdir = fault_mkdir,
    .unlink = fault_unlink,
    .rmdir = fault_rmdir,
    .list = fault_list,
    .gate = fault_gate,
};

void ckpt_io_fault_init(struct ckpt_io_fault *fault, enum ckpt_fault_kind kind, uint64_t at,
                        int error)
{
    memset(fault, 0, sizeof(*fault));
    fault->io.ops = &fault_ops;
    fault->kind = kind;
    fault->at = at;
    fault->error = error;
}
