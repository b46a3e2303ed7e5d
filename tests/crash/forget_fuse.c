/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Serves the disk's one file to the kernel: the few requests of the FUSE protocol (linux/fuse.h)
 * that a loop device makes of a file with direct_io. No library: it would bring more code than it
 * saves.
 */
#include <errno.h>
#include <linux/fuse.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "base/error.h"
#include "tests/crash/forget_disk.h"

#define NODE_FILE    2u /* the root is 1 */
#define REQUEST_ROOM (FORGET_WRITE_MAX + 8192)

struct server {
    struct forget_disk *disk;
    int fd;
    uint8_t *request; /* REQUEST_ROOM */
};

static int reply(struct server *server, const struct fuse_in_header *in, int error,
                 const void *data, size_t bytes)
{
    struct fuse_out_header out = {
        .len = (uint32_t)(sizeof(out) + (error < 0 ? 0 : bytes)),
        .error = error < 0 ? error : 0,
        .unique = in->unique,
    };
    struct iovec parts[2] = {
        {&out, sizeof(out)},
        {(void *)(uintptr_t)data, error < 0 ? 0 : bytes},
    };
    ssize_t n = writev(server->fd, parts, 2);

    return n < 0 && errno != ENOENT ? -errno : 0; /* ENOENT: the request was interrupted */
}

static struct fuse_attr attributes(const struct server *server, uint64_t node)
{
    struct fuse_attr attr = {.ino = node, .nlink = 1, .blksize = 4096};

    if (node == NODE_FILE) {
        attr.mode = S_IFREG | 0600;
        attr.size = server->disk->bytes;
        attr.blocks = attr.size / 512;
    } else {
        attr.mode = S_IFDIR | 0700;
    }
    return attr;
}

static int do_init(struct server *server, const struct fuse_in_header *in,
                   const struct fuse_init_in *init)
{
    struct fuse_init_out out = {
        .major = FUSE_KERNEL_VERSION,
        .minor = init->minor < FUSE_KERNEL_MINOR_VERSION ? init->minor : FUSE_KERNEL_MINOR_VERSION,
        .max_readahead = init->max_readahead,
        .flags = init->flags & (FUSE_BIG_WRITES | FUSE_MAX_PAGES),
        .max_background = 16,
        .congestion_threshold = 12,
        .max_write = FORGET_WRITE_MAX,
        .max_pages = FORGET_WRITE_MAX / 4096,
    };

    return reply(server, in, init->major == FUSE_KERNEL_VERSION ? 0 : -EPROTO, &out, sizeof(out));
}

/* The power is there for one more operation? */
static int power(struct forget_shared *shared)
{
    uint64_t count = atomic_fetch_add(&shared->count, 1) + 1;

    if (count == atomic_load(&shared->at)) {
        atomic_store(&shared->dark, true);
    }
    if (atomic_load(&shared->dark)) {
        return -EIO;
    }
    return count == atomic_load(&shared->fail) ? -EIO : 0;
}

/* All that was written is durable now. */
static void flush(struct forget_disk *disk)
{
    struct forget_shared *shared = disk->shared;

    for (uint32_t i = 0; i < shared->write_count; i++) {
        const struct forget_write *write = &shared->writes[i];

        memcpy(disk->safe + write->offset, disk->log + write->at, write->bytes);
    }
    shared->write_count = 0;
    shared->log_bytes = 0;
}

static int do_write(struct server *server, const struct fuse_in_header *in,
                    const struct fuse_write_in *write, const uint8_t *data)
{
    struct forget_disk *disk = server->disk;
    struct forget_shared *shared = disk->shared;
    struct fuse_write_out out = {.size = write->size};
    struct timespec delay = {0, (long)atomic_load(&shared->write_delay_us) * 1000};
    bool was_dark = atomic_load(&shared->dark);
    int rc = power(shared);

    if (write->size > FORGET_WRITE_MAX || write->offset > disk->bytes ||
        write->size > disk->bytes - write->offset) {
        return reply(server, in, -EFBIG, NULL, 0);
    }
    if (delay.tv_nsec > 0) {
        nanosleep(&delay, NULL);
    }
    /* The write during which the power went may be on the disk in part. */
    if (rc == 0 || (!was_dark && atomic_load(&shared->dark))) {
        if (shared->write_count == FORGET_LOG_WRITES ||
            shared->log_bytes + write->size > FORGET_LOG_BYTES) {
            atomic_store(&shared->overflowed, true);
            flush(disk);
        }
        shared->writes[shared->write_count++] =
            (struct forget_write){write->offset, shared->log_bytes, write->size};
        memcpy(disk->log + shared->log_bytes, data, write->size);
        shared->log_bytes += write->size;
        memcpy(disk->now + write->offset, data, write->size);
    }
    return reply(server, in, rc, &out, sizeof(out));
}

static int do_read(struct server *server, const struct fuse_in_header *in,
                   const struct fuse_read_in *read)
{
    const struct forget_disk *disk = server->disk;
    uint64_t left = read->offset < disk->bytes ? disk->bytes - read->offset : 0;

    return reply(server, in, atomic_load(&disk->shared->dark) ? -EIO : 0, disk->now + read->offset,
                 read->size < left ? read->size : left);
}

static int do_fsync(struct server *server, const struct fuse_in_header *in)
{
    int rc = power(server->disk->shared);

    if (rc == 0) {
        flush(server->disk);
    }
    return reply(server, in, rc, NULL, 0);
}

static int do_lookup(struct server *server, const struct fuse_in_header *in, const char *name)
{
    struct fuse_entry_out out = {
        .nodeid = NODE_FILE,
        .entry_valid = 3600,
        .attr_valid = 3600,
        .attr = attributes(server, NODE_FILE),
    };

    return reply(server, in, strcmp(name, "disk") == 0 ? 0 : -ENOENT, &out, sizeof(out));
}

static int do_other(struct server *server, const struct fuse_in_header *in)
{
    struct fuse_attr_out attr = {.attr_valid = 3600, .attr = attributes(server, in->nodeid)};
    struct fuse_open_out opened = {.fh = 1, .open_flags = FOPEN_DIRECT_IO};
    struct fuse_statfs_out statfs = {.st = {.bsize = 4096, .frsize = 4096, .namelen = 255}};

    switch (in->opcode) {
    case FUSE_FORGET:
    case FUSE_BATCH_FORGET:
    case FUSE_INTERRUPT:
        return 0; /* these want no answer */
    case FUSE_GETATTR:
    case FUSE_SETATTR:
        return reply(server, in, 0, &attr, sizeof(attr));
    case FUSE_OPEN:
        atomic_fetch_add(&server->disk->shared->opens, 1);
        return reply(server, in, 0, &opened, sizeof(opened));
    case FUSE_RELEASE:
        atomic_fetch_sub(&server->disk->shared->opens, 1);
        return reply(server, in, 0, NULL, 0);
    case FUSE_STATFS:
        return reply(server, in, 0, &statfs, sizeof(statfs));
    case FUSE_FLUSH: /* of close(2): says nothing about durability */
    case FUSE_DESTROY:
        return reply(server, in, 0, NULL, 0);
    default:
        return reply(server, in, -ENOSYS, NULL, 0);
    }
}

static int serve_one(struct server *server)
{
    const struct fuse_in_header *in = (const void *)server->request;
    const uint8_t *body = server->request + sizeof(*in);

    switch (in->opcode) {
    case FUSE_INIT:
        return do_init(server, in, (const void *)body);
    case FUSE_LOOKUP:
        return do_lookup(server, in, (const char *)body);
    case FUSE_READ:
        return do_read(server, in, (const void *)body);
    case FUSE_WRITE:
        return do_write(server, in, (const void *)body, body + sizeof(struct fuse_write_in));
    case FUSE_FSYNC:
        return do_fsync(server, in);
    default:
        return do_other(server, in);
    }
}

int forget_fuse_serve(struct forget_disk *disk, int fd)
{
    struct server server = {disk, fd, aligned_alloc(4096, REQUEST_ROOM)};
    int rc = server.request == NULL ? -ENOMEM : 0;

    while (rc == 0) {
        ssize_t n = read(fd, server.request, REQUEST_ROOM);

        if (n >= (ssize_t)sizeof(struct fuse_in_header)) {
            rc = serve_one(&server);
        } else if (n < 0 && errno != EINTR && errno != EAGAIN && errno != ENOENT) {
            rc = errno == ENODEV ? 1 : -errno; /* ENODEV: unmounted */
        }
    }
    free(server.request);
    return rc < 0 ? rc : 0;
}
