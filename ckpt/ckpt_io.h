/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The border between the checkpoint library and the file system: every file operation goes through
 * a struct ckpt_io, so that tests can number the operations and let any one of them fail, come back
 * short, or be the last thing that the process does. Two implementations: the real one and the
 * faulty one (io_fault.c), which wraps the real one.
 *
 * Bulk data goes through a struct ckpt_queue (queue.h), which asks `gate` before each transfer.
 * Functions return -errno; the ckpt_io_* helpers at the end put operation and path into msg.
 */
#ifndef BL_CKPT_CKPT_IO_H
#define BL_CKPT_CKPT_IO_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/error.h"

#define CKPT_PATH_MAX 2048 /* bytes of any path built here, with the NUL */

enum ckpt_op { /* what is counted: operations that change the disk, and reads apart from them */
               CKPT_OP_CREATE = 1,
               CKPT_OP_WRITE,
               CKPT_OP_FSYNC,
               CKPT_OP_TRUNCATE,
               CKPT_OP_ALLOCATE,
               CKPT_OP_RENAME,
               CKPT_OP_LINK,
               CKPT_OP_MKDIR,
               CKPT_OP_UNLINK,
               CKPT_OP_RMDIR,
               CKPT_OP_READ
};

/* Entry names of a directory without "." and "..", in no order. */
struct ckpt_names {
    char **names; /* owned */
    uint32_t count;
};
void ckpt_names_close(struct ckpt_names *names);

struct ckpt_io;

/* Descriptors from here on are none of this system's: only an implementation's own pread reads
 * them.
 */
#define CKPT_FAR_FD (1 << 24)

struct ckpt_io_ops {
    /* A descriptor, or -errno. O_CLOEXEC is added. */
    int (*open)(struct ckpt_io *io, const char *path, int flags, mode_t mode);
    int (*close)(struct ckpt_io *io, int fd);
    int64_t (*pwrite)(struct ckpt_io *io, int fd, const void *data, size_t bytes, uint64_t offset);
    int64_t (*pread)(struct ckpt_io *io, int fd, void *data, size_t bytes, uint64_t offset);
    int (*fsync)(struct ckpt_io *io, int fd); /* files and directories */
    /* Begins to write back [offset, offset + bytes) of what stands in the page cache, and does not
     * wait: a hint that makes a later fsync short. NULL, -ENOSYS and the like: no such thing here.
     */
    int (*flush)(struct ckpt_io *io, int fd, uint64_t offset, uint64_t bytes);
    int (*truncate)(struct ckpt_io *io, int fd, uint64_t bytes);
    int (*allocate)(struct ckpt_io *io, int fd, uint64_t bytes); /* [0, bytes), size grows */
    int (*size)(struct ckpt_io *io, const char *path, uint64_t *ret_bytes); /* of a regular file */
    int (*rename)(struct ckpt_io *io, const char *from, const char *to);
    int (*link)(struct ckpt_io *io, const char *from, const char *to);
    int (*mkdir)(struct ckpt_io *io, const char *path, mode_t mode);
    int (*unlink)(struct ckpt_io *io, const char *path);
    int (*rmdir)(struct ckpt_io *io, const char *path);
    int (*list)(struct ckpt_io *io, const char *path, uint32_t count_max, struct ckpt_names *ret);
    /* Asked before each bulk transfer. 0: go on; negative: the transfer's result is this error;
     * positive: the first transfer of it moves only half of the bytes. NULL: always 0. */
    int (*gate)(struct ckpt_io *io, enum ckpt_op op);
};

#define CKPT_IO_NO_URING    1u /* ways that a test (or an operator) can switch off */
#define CKPT_IO_NO_DIRECT   2u
#define CKPT_IO_NO_REGISTER 4u

struct ckpt_io {
    const struct ckpt_io_ops *ops;
    unsigned disable;       /* CKPT_IO_NO_... */
    uint32_t queue_depth;   /* transfers in flight; 0: CKPT_QUEUE_DEPTH */
    uint32_t codec_threads; /* with the caller; 0: ckpt_crew_threads_default */
    uint64_t rate_max;   /* bytes/s of each queue's transfers, on average; 0: as fast as it goes */
    uint64_t sync_bytes; /* of a part's stream from one fsync to the next; 0: see part_stream.c */
    const atomic_int *cancel; /* NULL, or a wait for rate_max ends soon after it is non-zero */
};

/* The real one; shared, stateless, any thread. */
struct ckpt_io *ckpt_io_real(void);

/* ---- The faulty one ---- */

enum ckpt_fault_kind {
    CKPT_FAULT_NONE,  /* only counts */
    CKPT_FAULT_KILL,  /* SIGKILL to oneself instead of operation `at` */
    CKPT_FAULT_AFTER, /* SIGKILL right after operation `at` (a bulk write: once it is submitted) */
    CKPT_FAULT_ERROR, /* operation `at` fails with `error` and does nothing */
    CKPT_FAULT_FULL,  /* from operation `at` on, all that takes space fails with `error` */
    CKPT_FAULT_SHORT  /* write `at` moves only half */
};

struct ckpt_io_fault {
    struct ckpt_io io; /* give &fault.io to the library */
    enum ckpt_fault_kind kind;
    uint64_t at;      /* operations are counted from 1 */
    int error;        /* -errno */
    bool reads;       /* count reads instead of changes */
    uint64_t count;   /* operations seen so far */
    enum ckpt_op hit; /* the kind of the operation that was hit; 0: not reached */
    bool kill_after;  /* internal */
};

/* Prepares `fault` (the caller's memory) over the real one. One thread at a time. */
void ckpt_io_fault_init(struct ckpt_io_fault *fault, enum ckpt_fault_kind kind, uint64_t at,
                        int error);

/* ---- Helpers with texts ---- */

/* Joins with '/' into `ret` (CKPT_PATH_MAX bytes). `b` may be NULL. -ENAMETOOLONG. */
BL_MUST_CHECK int ckpt_path_join(char *ret, const char *dir, const char *a, const char *b,
                                 struct bl_errmsg *msg);

/* Creates `path` anew with these bytes and fsyncs it. An existing file is -EEXIST. */
BL_MUST_CHECK int ckpt_io_write_file(struct ckpt_io *io, const char *path, const void *data,
                                     size_t bytes, struct bl_errmsg *msg);

/* Reads a whole file of at most bytes_max (else BL_ELIMIT) into *ret_data, owned, NUL after the
 * end. */
BL_MUST_CHECK int ckpt_io_read_file(struct ckpt_io *io, const char *path, size_t bytes_max,
                                    char **ret_data, size_t *ret_bytes, struct bl_errmsg *msg);

BL_MUST_CHECK int ckpt_io_fsync_path(struct ckpt_io *io, const char *path, struct bl_errmsg *msg);
BL_MUST_CHECK int ckpt_io_rename(struct ckpt_io *io, const char *from, const char *to,
                                 struct bl_errmsg *msg);
/* An existing directory is fine. */
BL_MUST_CHECK int ckpt_io_mkdir(struct ckpt_io *io, const char *path, struct bl_errmsg *msg);

#endif
