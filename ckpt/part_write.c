/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes a part: the extents of all sources, sorted and each once, as one stream of large aligned
 * writes; digests are taken of the very bytes that are written. Order on disk: the part and its
 * fsync, the index and its fsync, the directory's fsync.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ckpt/part.h"
#include "ckpt/part_write.h"
#include "ckpt/queue.h"

struct part_writer {
    struct ckpt_io *io;
    const struct ckpt_part_job *job;
    char path[CKPT_PATH_MAX];
    int fd;
    struct ckpt_pieces pieces; /* owned */
    struct ckpt_index index;
    struct ckpt_text header;
    struct ckpt_queue *queue;
    /* The stream: what is copied next, and the buffer it goes to. */
    uint32_t piece;      /* 0 is the header, then pieces + 1 */
    uint64_t piece_done; /* bytes of it */
    uint64_t written;    /* bytes given to the queue */
};

/* What was written is what the caller expected? */
static int expect_check(const struct part_writer *writer, struct bl_errmsg *msg)
{
    char found[BL_STATE_DIGEST_TEXT_BYTES], wanted[BL_STATE_DIGEST_TEXT_BYTES];
    const struct bl_state_digest *expect = writer->job->expect;

    if (expect == NULL || bl_state_digest_equal(&writer->index.state, expect)) {
        return 0;
    }
    bl_state_digest_format(&writer->index.state, found);
    bl_state_digest_format(expect, wanted);
    return bl_err(msg, BL_EDIGEST, "%s: the state to be saved has digest %s, not %s",
                  writer->job->name, found, wanted);
}

/* Puts the next bytes of the stream at `to`, at most `room` (a multiple of every element). */
static int stream_fill(struct part_writer *writer, uint8_t *to, uint32_t room, uint32_t *ret_filled,
                       struct bl_errmsg *msg)
{
    uint32_t filled = 0;
    int rc = 0;

    while (rc == 0 && filled < room && writer->piece <= writer->pieces.count) {
        const struct ckpt_piece *piece =
            writer->piece == 0 ? NULL : &writer->pieces.pieces[writer->piece - 1];
        uint64_t bytes = piece == NULL ? writer->header.bytes : ckpt_piece_bytes(piece);
        uint64_t more = bytes - writer->piece_done;

        more = more < room - filled ? more : room - filled;
        if (piece == NULL) {
            memcpy(to + filled, writer->header.data + writer->piece_done, (size_t)more);
        } else {
            rc = ckpt_piece_take(piece, writer->piece_done, more, to + filled, &writer->index.state,
                                 msg);
        }
        filled += (uint32_t)more;
        writer->piece_done += more;
        if (writer->piece_done == bytes) {
            writer->piece++;
            writer->piece_done = 0;
        }
    }
    *ret_filled = filled;
    return rc;
}

static int write_error(const struct part_writer *writer, int code, uint64_t at,
                       struct bl_errmsg *msg)
{
    return bl_err_code(msg, code, "write %s (at byte %llu of %llu)", writer->path,
                       (unsigned long long)at, (unsigned long long)writer->index.part_bytes);
}

/* Fills a buffer, digests its chunks, writes it. */
static int stream_write(struct part_writer *writer, struct bl_errmsg *msg)
{
    struct ckpt_index *index = &writer->index;
    uint32_t slot, filled, padded;
    uint64_t failed_at = writer->written;
    void *data;
    int rc = ckpt_queue_take(writer->queue, &slot, &data);

    if (rc == 0) {
        rc = stream_fill(writer, data, CKPT_QUEUE_BYTES, &filled, msg);
        if (rc < 0) { /* the source's error, not the disk's */
            return bl_err_in(msg, rc, "%s", writer->job->name);
        }
        padded = (filled + CKPT_QUEUE_ALIGN - 1) / CKPT_QUEUE_ALIGN * CKPT_QUEUE_ALIGN;
        memset((uint8_t *)data + filled, 0, padded - filled);
        for (uint32_t at = 0; at < filled; at += index->chunk_bytes) {
            uint32_t bytes = filled - at < index->chunk_bytes ? filled - at : index->chunk_bytes;

            index->chunks[(writer->written + at) / index->chunk_bytes] =
                bl_xxh3((uint8_t *)data + at, bytes);
        }
        rc = ckpt_queue_write(writer->queue, slot, writer->fd, padded, writer->written);
        writer->written += filled;
    }
    if (rc < 0) {
        BL_IGNORE(ckpt_queue_drain(writer->queue, &failed_at), "only asks where it failed");
        return write_error(writer, rc, failed_at, msg);
    }
    return 0;
}

/* Renames some part file of a retired checkpoint out of .trash to `path`; true when that worked. */
static bool recycle(struct ckpt_io *io, const char *trash, const char *path)
{
    struct ckpt_names dirs = {0}, files = {0};
    char dir[CKPT_PATH_MAX], file[CKPT_PATH_MAX];
    bool done = false;

    if (trash == NULL || io->ops->list(io, trash, CKPT_ENTRIES_MAX, &dirs) < 0) {
        return false;
    }
    for (uint32_t i = 0; i < dirs.count && !done; i++) {
        /* A cancelled attempt (".tmp" in its name) may have a writer yet; a checkpoint has not. */
        if (strncmp(dirs.names[i], "step-", 5) != 0 || strstr(dirs.names[i], ".tmp") != NULL ||
            ckpt_path_join(dir, trash, dirs.names[i], NULL, NULL) < 0 ||
            io->ops->list(io, dir, CKPT_ENTRIES_MAX, &files) < 0) {
            continue;
        }
        for (uint32_t k = 0; k < files.count && !done; k++) {
            done = ckpt_part_file_is(files.names[k]) &&
                   ckpt_path_join(file, dir, files.names[k], NULL, NULL) == 0 &&
                   io->ops->rename(io, file, path) == 0; /* another engine may be faster */
        }
        ckpt_names_close(&files);
    }
    ckpt_names_close(&dirs);
    return done;
}

/* Opens the part's file, anew or recycled, and allocates its space before anything counts on it. */
static int part_open(struct part_writer *writer, const char *trash, struct ckpt_part_result *ret,
                     struct bl_errmsg *msg)
{
    struct ckpt_io *io = writer->io;
    bool direct = (io->disable & CKPT_IO_NO_DIRECT) == 0;
    uint64_t size, room = (writer->index.part_bytes + CKPT_QUEUE_ALIGN - 1) / CKPT_QUEUE_ALIGN *
                          CKPT_QUEUE_ALIGN;
    int flags, rc;

    if (io->ops->size(io, writer->path, &size) != -ENOENT) {
        return bl_err_code(msg, -EEXIST, "create %s", writer->path);
    }
    ret->recycled = recycle(io, trash, writer->path);
    flags = O_WRONLY | (ret->recycled ? 0 : O_CREAT | O_EXCL);
    writer->fd = io->ops->open(io, writer->path, flags | (direct ? O_DIRECT : 0), 0644);
    if (writer->fd == -EINVAL && direct) { /* refused, but a new file may be there by now */
        direct = false;
        snprintf(ret->note, sizeof(ret->note), "no O_DIRECT here");
        writer->fd = io->ops->open(io, writer->path, flags & ~O_EXCL, 0644);
    }
    if (writer->fd < 0) {
        return bl_err_code(msg, writer->fd, "create %s", writer->path);
    }
    ret->direct = direct;
    rc = io->ops->allocate(io, writer->fd, room);
    ret->allocated = rc == 0;
    if (rc < 0 && rc != -EOPNOTSUPP && rc != -ENOSYS) {
        return bl_err_code(msg, rc, "allocate %llu bytes for %s", (unsigned long long)room,
                           writer->path);
    }
    return 0;
}

static int part_stream(struct part_writer *writer, struct ckpt_part_result *ret,
                       struct bl_errmsg *msg)
{
    struct ckpt_io *io = writer->io;
    struct ckpt_queue_info info;
    uint64_t failed_at = 0;
    int rc = ckpt_queue_new(&writer->queue, io, msg);

    while (rc == 0 && writer->written < writer->index.part_bytes) {
        if (writer->job->cancel != NULL && atomic_load(writer->job->cancel) != 0) {
            return bl_err(msg, BL_EABORTED, "%s: cancelled", writer->path);
        }
        rc = stream_write(writer, msg);
    }
    if (rc == 0) {
        rc = expect_check(writer, msg);
    }
    if (rc < 0) {
        return rc;
    }
    rc = ckpt_queue_drain(writer->queue, &failed_at);
    if (rc < 0) {
        return write_error(writer, rc, failed_at, msg);
    }
    ckpt_queue_info(writer->queue, &info);
    ret->path = info.path;
    ret->registered = info.registered;
    ret->direct = ret->direct && info.direct;
    if (info.note[0] != '\0') {
        memcpy(ret->note, info.note, sizeof(ret->note));
    }
    rc = io->ops->truncate(io, writer->fd, writer->index.part_bytes);
    if (rc < 0) {
        return bl_err_code(msg, rc, "truncate %s", writer->path);
    }
    rc = io->ops->fsync(io, writer->fd);
    return rc < 0 ? bl_err_code(msg, rc, "fsync %s", writer->path) : 0;
}

static int index_write(struct part_writer *writer, const char *dir, char *path,
                       struct ckpt_part_result *ret, struct bl_errmsg *msg)
{
    uint8_t *data = NULL;
    size_t bytes = 0;
    int rc = ckpt_index_encode(&writer->index, &data, &bytes, &ret->index_digest, msg);

    if (rc == 0) {
        rc = ckpt_io_write_file(writer->io, path, data, bytes, msg);
    }
    free(data);
    return rc < 0 ? rc : ckpt_io_fsync_path(writer->io, dir, msg);
}

/* All that is known before the first byte is written. */
static int part_prepare(struct part_writer *writer, struct bl_errmsg *msg)
{
    const struct ckpt_part_job *job = writer->job;
    struct ckpt_index *index = &writer->index;
    int rc;

    if (job->codec != NULL && strcmp(job->codec, "none") != 0) {
        return bl_err(msg, BL_ENOTBUILT, "codec \"%s\" is not built into this version; use none",
                      job->codec);
    }
    if (!ckpt_name_is_plain(job->name) || strlen(job->name) >= CKPT_PART_NAME_MAX ||
        strchr(job->name, '/') != NULL || job->name[0] == '.') {
        return bl_err(msg, BL_EFORMAT, "\"%s\" cannot be a part's name", job->name);
    }
    rc = ckpt_pieces_gather(&writer->pieces, job, msg);
    if (rc == 0) {
        rc = ckpt_pieces_describe(&writer->pieces, &index->held, msg);
    }
    if (rc == 0) {
        rc = ckpt_part_header(&index->held, &writer->header, &index->part_bytes, msg);
    }
    if (rc < 0) {
        return rc;
    }
    index->raw_bytes = index->part_bytes;
    index->data_offset = writer->header.bytes;
    index->chunk_bytes = CKPT_CHUNK_BYTES;
    index->chunk_count = (uint32_t)((index->part_bytes + CKPT_CHUNK_BYTES - 1) / CKPT_CHUNK_BYTES);
    index->chunks = calloc(index->chunk_count + 1u, sizeof(uint64_t));
    if (index->chunks == NULL) {
        return bl_err_code(msg, -ENOMEM, "index of %u chunks", index->chunk_count);
    }
    return 0;
}

static uint64_t now_us(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000u + (uint64_t)ts.tv_nsec / 1000u;
}

static void part_result(const struct part_writer *writer, struct ckpt_part_result *ret)
{
    snprintf(ret->name, sizeof(ret->name), "%s", writer->job->name);
    ret->bytes = writer->index.part_bytes;
    ret->raw_bytes = writer->index.raw_bytes;
    ret->state = writer->index.state;
    ret->extent_count = writer->pieces.count;
}

int ckpt_part_write(struct ckpt_io *io, const char *dir, const char *trash,
                    const struct ckpt_part_job *job, struct ckpt_part_result *ret,
                    struct bl_errmsg *msg)
{
    struct part_writer writer = {.io = io, .job = job, .fd = -1};
    struct ckpt_part_result result = {0};
    char index_path[CKPT_PATH_MAX], file[CKPT_PART_NAME_MAX + 16];
    uint64_t started = now_us();
    bool made = false, indexed = false;
    int rc = part_prepare(&writer, msg);

    if (rc == 0) {
        snprintf(file, sizeof(file), "%s" CKPT_PART_SUFFIX, job->name);
        rc = ckpt_path_join(writer.path, dir, file, NULL, msg);
        snprintf(file, sizeof(file), "%s" CKPT_INDEX_SUFFIX, job->name);
    }
    if (rc == 0) {
        rc = ckpt_path_join(index_path, dir, file, NULL, msg);
    }
    if (rc == 0) {
        rc = part_open(&writer, trash, &result, msg);
        made = writer.fd >= 0;
    }
    if (rc == 0) {
        rc = part_stream(&writer, &result, msg);
    }
    ckpt_queue_free(writer.queue); /* nothing is in flight from here on */
    if (writer.fd >= 0) {
        int closed = io->ops->close(io, writer.fd);

        rc = rc == 0 && closed < 0 ? bl_err_code(msg, closed, "close %s", writer.path) : rc;
    }
    if (rc == 0) {
        indexed = true;
        rc = index_write(&writer, dir, index_path, &result, msg);
    }
    if (rc == 0) {
        part_result(&writer, &result);
        result.elapsed_us = now_us() - started;
        *ret = result;
    } else if (made) {
        BL_IGNORE(io->ops->unlink(io, writer.path), "the attempt is dropped with it");
        if (indexed) {
            BL_IGNORE(io->ops->unlink(io, index_path), "the attempt is dropped with it");
        }
    }
    ckpt_pieces_close(&writer.pieces);
    ckpt_index_close(&writer.index);
    ckpt_text_close(&writer.header);
    return rc;
}
