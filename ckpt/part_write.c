/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes a part: the extents of all sources, sorted and each once, as one stream of large aligned
 * writes; digests are taken of the very bytes that are written. Order on disk: the part and its
 * fsync, the index (unless it is in the part) and its fsync, the directory's fsync.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>

#include "ckpt/part.h"
#include "ckpt/part_write.h"
#include "ckpt/queue.h"

/* What was written is what the caller expected? */
static int expect_check(const struct ckpt_part_writer *writer, struct bl_errmsg *msg)
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

/* The directories that say that what lies in .trash was retired are durable? Another engine may
 * have moved it there just now: else, after a power loss, it could stand under its old name with
 * our bytes. */
static bool trash_is_durable(struct ckpt_io *io, const char *trash)
{
    char root[CKPT_PATH_MAX];
    char *slash;

    snprintf(root, sizeof(root), "%s", trash);
    slash = strrchr(root, '/');
    if (slash == NULL || slash == root) {
        return false;
    }
    *slash = '\0';
    return ckpt_io_fsync_path(io, trash, NULL) == 0 && ckpt_io_fsync_path(io, root, NULL) == 0;
}

/* Renames a file; an error after which it stands there nevertheless (a network file system repeats
 * a request) is none. */
static bool rename_file(struct ckpt_io *io, const char *from, const char *to)
{
    uint64_t size;
    int rc = io->ops->rename(io, from, to);

    return rc == 0 || (rc != -ENOENT && io->ops->size(io, to, &size) == 0);
}

/* Renames some part file of a retired checkpoint out of .trash to `path`; true when that worked. */
static bool recycle(struct ckpt_io *io, const char *trash, const char *path)
{
    struct ckpt_names dirs = {0}, files = {0};
    char dir[CKPT_PATH_MAX], file[CKPT_PATH_MAX];
    bool done = false, durable = false;

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
            if (!ckpt_part_file_is(files.names[k])) {
                continue;
            }
            durable = durable || trash_is_durable(io, trash);
            done = durable && ckpt_path_join(file, dir, files.names[k], NULL, NULL) == 0 &&
                   rename_file(io, file, path); /* another engine may be faster */
        }
        ckpt_names_close(&files);
    }
    ckpt_names_close(&dirs);
    return done;
}

/* May the file be written over? Not when somebody keeps it under another name (cp -al is a cheap
 * way to keep a checkpoint), and not when a repair, which took it for a checkpoint's, has it open.
 * The lock is held as long as the descriptor. */
static bool recycled_is_ours(int fd)
{
    struct stat st;

    return fstat(fd, &st) == 0 && st.st_nlink == 1 &&
           (flock(fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK);
}

/* Opens the file, without O_DIRECT where that is refused. */
static int file_open(struct ckpt_io *io, const char *path, int flags, bool *direct)
{
    int fd = io->ops->open(io, path, flags | (*direct ? O_DIRECT : 0), 0644);

    if (fd == -EINVAL && *direct) { /* refused, but a new file may be there by now */
        *direct = false;
        fd = io->ops->open(io, path, flags & ~O_EXCL, 0644);
    }
    return fd;
}

/* Opens the part's file, anew or recycled. */
static int part_open(struct ckpt_part_writer *writer, const char *trash,
                     struct ckpt_part_result *ret, struct bl_errmsg *msg)
{
    struct ckpt_io *io = writer->io;
    bool direct = (io->disable & CKPT_IO_NO_DIRECT) == 0, wanted = direct;
    uint64_t size;
    int rc;

    if (io->ops->size(io, writer->path, &size) != -ENOENT) {
        return bl_err_code(msg, -EEXIST, "create %s", writer->path);
    }
    if (recycle(io, trash, writer->path)) {
        writer->fd = file_open(io, writer->path, O_WRONLY, &direct);
        ret->recycled = writer->fd >= 0 && recycled_is_ours(writer->fd);
        if (!ret->recycled) { /* then it only goes from here */
            if (writer->fd >= 0) {
                BL_IGNORE(io->ops->close(io, writer->fd), "nothing was written");
            }
            rc = io->ops->unlink(io, writer->path);
            if (rc < 0 && rc != -ENOENT) {
                writer->fd = -1;
                return bl_err_code(msg, rc, "unlink %s", writer->path);
            }
        }
    }
    if (!ret->recycled) {
        direct = wanted;
        writer->fd = file_open(io, writer->path, O_WRONLY | O_CREAT | O_EXCL, &direct);
    }
    if (writer->fd < 0) {
        return bl_err_code(msg, writer->fd, "create %s", writer->path);
    }
    if (direct != wanted) {
        snprintf(ret->note, sizeof(ret->note), "no O_DIRECT here");
    }
    ret->direct = direct;
    return 0;
}

/* The index, behind the frames or in its file (part_write). */
static int tail_write(struct ckpt_part_writer *writer, struct ckpt_part_result *ret,
                      struct bl_errmsg *msg)
{
    struct ckpt_index *index = &writer->index;
    uint8_t *data = NULL;
    size_t bytes = 0;
    int rc;

    index->part_bytes = writer->written + writer->filled + ckpt_part_tail_bytes(index);
    rc = ckpt_part_tail_encode(index, &data, &bytes, &ret->index_digest, msg);
    if (rc == 0) {
        rc = ckpt_stream_append(writer, data, bytes, msg);
    }
    free(data);
    return rc;
}

static int part_stream(struct ckpt_part_writer *writer, struct ckpt_part_result *ret,
                       struct bl_errmsg *msg)
{
    bool zstd = writer->index.codec == CKPT_CODEC_ZSTD;
    struct ckpt_io *io = writer->io;
    struct ckpt_queue_info info;
    int rc = ckpt_queue_new(&writer->queue, io, msg);

    if (rc == 0) {
        rc = zstd ? ckpt_stream_encode(writer, msg) : ckpt_stream_plain(writer, msg);
    }
    if (rc == 0) {
        rc = expect_check(writer, msg);
    }
    if (rc == 0 && zstd) {
        rc = tail_write(writer, ret, msg);
    }
    if (rc == 0) {
        rc = ckpt_stream_finish(writer, msg);
    }
    if (rc < 0) {
        return rc;
    }
    ret->allocated = writer->allocates;
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

static int index_write(struct ckpt_part_writer *writer, const char *path,
                       struct ckpt_part_result *ret, struct bl_errmsg *msg)
{
    uint8_t *data = NULL;
    size_t bytes = 0;
    int rc = ckpt_index_encode(&writer->index, &data, &bytes, &ret->index_digest, msg);

    if (rc == 0) {
        rc = ckpt_io_write_file(writer->io, path, data, bytes, msg);
    }
    free(data);
    return rc;
}

/* Pieces stand in file order without gaps. */
static void pieces_place(struct ckpt_pieces *pieces, uint64_t from, uint64_t end)
{
    for (uint32_t i = 0; i < pieces->count; i++) {
        pieces->pieces[i].at = from;
        from += ckpt_piece_bytes(&pieces->pieces[i]);
    }
    BL_ASSERT(from == end);
}

/* All that is known before the first byte is written. */
static int part_prepare(struct ckpt_part_writer *writer, struct bl_errmsg *msg)
{
    const struct ckpt_part_job *job = writer->job;
    struct ckpt_index *index = &writer->index;
    enum ckpt_codec codec = CKPT_CODEC_NONE;
    int rc;

    if (!ckpt_name_is_plain(job->name) || strlen(job->name) >= CKPT_PART_NAME_MAX ||
        strchr(job->name, '/') != NULL || job->name[0] == '.') {
        return bl_err(msg, BL_EFORMAT, "\"%s\" cannot be a part's name", job->name);
    }
    rc = ckpt_codec_parse(job->codec, &codec, msg);
    if (rc == 0) {
        rc = ckpt_pieces_gather(&writer->pieces, job, msg);
    }
    if (rc == 0) {
        rc = ckpt_pieces_describe(&writer->pieces, &index->held, msg);
    }
    if (rc == 0) {
        rc = ckpt_part_header(&index->held, codec, CKPT_CHUNK_BYTES, &writer->header,
                              &index->raw_bytes, msg);
    }
    if (rc < 0) {
        return rc;
    }
    pieces_place(&writer->pieces, writer->header.bytes, index->raw_bytes);
    index->codec = codec;
    index->data_offset = writer->header.bytes;
    index->chunk_bytes = CKPT_CHUNK_BYTES;
    if (codec == CKPT_CODEC_ZSTD) {
        return ckpt_index_layout(index, msg);
    }
    index->part_bytes = index->raw_bytes;
    index->chunk_count = (uint32_t)((index->part_bytes + CKPT_CHUNK_BYTES - 1) / CKPT_CHUNK_BYTES);
    index->chunks = calloc(index->chunk_count + 1u, sizeof(uint64_t));
    return index->chunks == NULL
               ? bl_err_code(msg, -ENOMEM, "index of %u chunks", index->chunk_count)
               : 0;
}

static void part_result(const struct ckpt_part_writer *writer, struct ckpt_part_result *ret)
{
    snprintf(ret->name, sizeof(ret->name), "%s", writer->job->name);
    ret->bytes = writer->index.part_bytes;
    ret->raw_bytes = writer->index.raw_bytes;
    ret->state = writer->index.state;
    ret->extent_count = writer->index.held.extent_count;
}

int ckpt_part_write(struct ckpt_io *io, const char *dir, const char *trash,
                    const struct ckpt_part_job *job, struct ckpt_part_result *ret,
                    struct bl_errmsg *msg)
{
    struct ckpt_part_writer writer = {.io = io, .job = job, .fd = -1, .allocates = true};
    struct ckpt_part_result result = {0};
    char index_path[CKPT_PATH_MAX], file[CKPT_PART_FILE_MAX];
    uint64_t started = ckpt_now_us();
    bool made = false, indexed = false;
    int rc = part_prepare(&writer, msg);

    if (rc == 0) {
        ckpt_part_file(file, job->name, writer.index.codec);
        rc = ckpt_path_join(writer.path, dir, file, NULL, msg);
        ckpt_part_index_file(file, job->name, writer.index.codec);
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
    if (rc == 0 && writer.index.codec == CKPT_CODEC_NONE) {
        indexed = true;
        rc = index_write(&writer, index_path, &result, msg);
    }
    if (rc == 0) {
        rc = ckpt_io_fsync_path(io, dir, msg);
    }
    if (rc == 0) {
        part_result(&writer, &result);
        result.elapsed_us = ckpt_now_us() - started;
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
