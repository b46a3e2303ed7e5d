/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The stream of a part's writer: transfer buffers are filled one after the other and sent, several
 * in flight. Each lies at a multiple of its size in the file; only the last one is short, padded to
 * what O_DIRECT wants (the file is truncated to its size at the end).
 *
 * An fsync shows no life while it lasts, and who watches over the writer must not take gigabytes in
 * a page cache, or in the cache of a disk, for a root that hangs. So the stream is synced as it
 * goes, and no fsync, the last one neither, covers more than a few hundred MiB.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <time.h>

#include "ckpt/part_write.h"

#define ALLOCATE_STEP    (64ull * 1024 * 1024)
#define FLUSH_STEP       (16ull * 1024 * 1024)   /* through the page cache: it begins to write */
#define SYNC_STEP_CACHED (256ull * 1024 * 1024)  /* at 60 s to be called stuck: 4.5 MB/s */
#define SYNC_STEP_DIRECT (1024ull * 1024 * 1024) /* only what a disk's own cache holds back */

uint64_t ckpt_now_us(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000u + (uint64_t)ts.tv_nsec / 1000u;
}

int ckpt_stream_check(const struct ckpt_part_writer *writer, struct bl_errmsg *msg)
{
    if (writer->job->cancel != NULL && atomic_load(writer->job->cancel) != 0) {
        return bl_err(msg, BL_EABORTED, "%s: cancelled", writer->path);
    }
    return 0;
}

int ckpt_stream_allocate(struct ckpt_part_writer *writer, uint64_t bytes, struct bl_errmsg *msg)
{
    uint64_t room = (bytes + CKPT_QUEUE_ALIGN - 1) / CKPT_QUEUE_ALIGN * CKPT_QUEUE_ALIGN;
    int rc;

    if (!writer->allocates || room <= writer->allocated) {
        return 0;
    }
    rc = writer->io->ops->allocate(writer->io, writer->fd, room);
    if (rc == -EOPNOTSUPP || rc == -ENOSYS) {
        writer->allocates = false;
        return 0;
    }
    if (rc < 0) {
        return bl_err_code(msg, rc, "allocate %llu bytes for %s", (unsigned long long)room,
                           writer->path);
    }
    writer->allocated = room;
    return 0;
}

static int write_error(struct ckpt_part_writer *writer, int code, struct bl_errmsg *msg)
{
    uint64_t at = writer->written;
    const struct ckpt_index *index = &writer->index;

    BL_IGNORE(ckpt_queue_drain(writer->queue, &at), "only asks where it failed");
    return bl_err_code(
        msg, code, "write %s (at byte %llu of %s%llu)", writer->path, (unsigned long long)at,
        index->part_bytes == 0 ? "at most " : "",
        (unsigned long long)(index->part_bytes == 0 ? index->raw_bytes : index->part_bytes));
}

/* A buffer to fill. */
static int stream_take(struct ckpt_part_writer *writer, struct bl_errmsg *msg)
{
    uint64_t from = ckpt_now_us();
    void *data;
    int rc = ckpt_queue_take(writer->queue, &writer->slot, &data);

    if (rc < 0) {
        return write_error(writer, rc, msg);
    }
    writer->data = data;
    writer->filled = 0;
    writer->waited_us += ckpt_now_us() - from;
    return 0;
}

static bool stream_is_cached(const struct ckpt_part_writer *writer)
{
    int flags = fcntl(writer->fd, F_GETFL);

    return flags >= 0 && (flags & O_DIRECT) == 0;
}

/* Has the disk take over what was written. Transfers in flight are left to the next time. */
static int stream_sync(struct ckpt_part_writer *writer, struct bl_errmsg *msg)
{
    struct ckpt_io *io = writer->io;
    bool cached = stream_is_cached(writer);
    uint64_t step = cached ? SYNC_STEP_CACHED : SYNC_STEP_DIRECT;
    int rc = 0;

    if (cached && writer->written - writer->flushed >= FLUSH_STEP && io->ops->flush != NULL) {
        rc = io->ops->flush(io, writer->fd, writer->flushed, writer->written - writer->flushed);
        if (rc == -ENOSYS || rc == -EOPNOTSUPP || rc == -EINVAL || rc == -ESPIPE) {
            rc = 0;
        }
        writer->flushed = writer->written;
    }
    if (rc == 0 && writer->written - writer->synced >= (io->sync_bytes ? io->sync_bytes : step)) {
        rc = io->ops->fsync(io, writer->fd);
        writer->synced = writer->written;
    }
    return rc < 0 ? bl_err_code(msg, rc, "fsync %s (at byte %llu)", writer->path,
                                (unsigned long long)writer->written)
                  : 0;
}

/* Sends the buffer. */
static int stream_send(struct ckpt_part_writer *writer, struct bl_errmsg *msg)
{
    uint32_t padded = (writer->filled + CKPT_QUEUE_ALIGN - 1) / CKPT_QUEUE_ALIGN * CKPT_QUEUE_ALIGN;
    uint64_t from = ckpt_now_us(), end = writer->written + padded;
    int rc = end <= writer->allocated ? 0 : ckpt_stream_allocate(writer, end + ALLOCATE_STEP, msg);

    if (rc < 0) {
        return rc;
    }
    memset(writer->data + writer->filled, 0, padded - writer->filled);
    rc = ckpt_queue_write(writer->queue, writer->slot, writer->fd, padded, writer->written);
    writer->data = NULL;
    if (rc < 0) {
        return write_error(writer, rc, msg);
    }
    writer->written += writer->filled;
    writer->filled = 0;
    rc = stream_sync(writer, msg);
    writer->waited_us += ckpt_now_us() - from;
    return rc;
}

int ckpt_stream_append(struct ckpt_part_writer *writer, const void *data, size_t bytes,
                       struct bl_errmsg *msg)
{
    const uint8_t *from = data;
    int rc = 0;

    while (rc == 0 && bytes > 0) {
        size_t more = CKPT_QUEUE_BYTES - writer->filled;

        if (writer->data == NULL) {
            rc = stream_take(writer, msg);
            continue;
        }
        more = more < bytes ? more : bytes;
        memcpy(writer->data + writer->filled, from, more);
        writer->filled += (uint32_t)more;
        from += more;
        bytes -= more;
        if (writer->filled == CKPT_QUEUE_BYTES) {
            rc = stream_send(writer, msg);
        }
    }
    return rc;
}

int ckpt_stream_finish(struct ckpt_part_writer *writer, struct bl_errmsg *msg)
{
    int rc = writer->filled > 0 ? stream_send(writer, msg) : 0;

    if (rc < 0) {
        return rc;
    }
    rc = ckpt_queue_drain(writer->queue, NULL);
    return rc < 0 ? write_error(writer, rc, msg) : 0;
}

/* Without a codec: what is put into the buffers next. */
struct plain {
    uint32_t piece; /* 0 is the header, then pieces + 1 */
    uint64_t done;  /* bytes of it */
};

/* Puts the next bytes into the buffer, which has room for a multiple of every element. */
static int plain_fill(struct ckpt_part_writer *writer, struct plain *plain, struct bl_errmsg *msg)
{
    int rc = 0;

    while (rc == 0 && writer->filled < CKPT_QUEUE_BYTES && plain->piece <= writer->pieces.count) {
        const struct ckpt_piece *piece =
            plain->piece == 0 ? NULL : &writer->pieces.pieces[plain->piece - 1];
        uint64_t bytes = piece == NULL ? writer->header.bytes : ckpt_piece_bytes(piece);
        uint64_t more = bytes - plain->done;
        uint8_t *to = writer->data + writer->filled;

        more = more < CKPT_QUEUE_BYTES - writer->filled ? more : CKPT_QUEUE_BYTES - writer->filled;
        if (piece == NULL) {
            memcpy(to, writer->header.data + plain->done, (size_t)more);
        } else {
            rc = ckpt_piece_take(piece, plain->done, more, to, msg);
            if (rc < 0) { /* the source's error, not the disk's */
                return bl_err_in(msg, rc, "%s", writer->job->name);
            }
            ckpt_piece_digest(piece, plain->done, more, to, &writer->index.state);
        }
        writer->filled += (uint32_t)more;
        plain->done += more;
        if (plain->done == bytes) {
            plain->piece++;
            plain->done = 0;
        }
    }
    return rc;
}

int ckpt_stream_plain(struct ckpt_part_writer *writer, struct bl_errmsg *msg)
{
    struct ckpt_index *index = &writer->index;
    struct plain plain = {0};
    int rc = ckpt_stream_allocate(writer, index->part_bytes, msg);

    while (rc == 0 && writer->written < index->part_bytes) {
        rc = ckpt_stream_check(writer, msg);
        rc = rc < 0 ? rc : stream_take(writer, msg);
        rc = rc < 0 ? rc : plain_fill(writer, &plain, msg);
        for (uint32_t at = 0; rc == 0 && at < writer->filled; at += index->chunk_bytes) {
            uint32_t left = writer->filled - at;

            index->chunks[(writer->written + at) / index->chunk_bytes] =
                bl_xxh3(writer->data + at, left < index->chunk_bytes ? left : index->chunk_bytes);
        }
        rc = rc < 0 ? rc : stream_send(writer, msg);
    }
    return rc;
}
