/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads parts, here without a codec: windows of whole chunks, several in flight, every chunk's
 * digest checked before anybody sees its bytes. Only chunks that are wanted are read.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/part.h"
#include "ckpt/part_read.h"
#include "ckpt/queue.h"

/* Reads bytes [offset, offset + bytes) of an open file. */
static int read_range(struct ckpt_io *io, int fd, uint64_t offset, uint8_t *data, uint64_t bytes,
                      struct bl_errmsg *msg)
{
    for (uint64_t done = 0; done < bytes;) {
        int64_t n = io->ops->pread(io, fd, data + done, (size_t)(bytes - done), offset + done);

        if (n < 0) {
            return bl_err_code(msg, (int)n, "read");
        }
        if (n == 0) {
            return bl_err(msg, BL_EFORMAT, "became shorter while it was read");
        }
        done += (uint64_t)n;
    }
    return 0;
}

/* The tail of a file of `size` bytes, owned by the caller. */
static int tail_read(struct ckpt_io *io, int fd, uint64_t size, uint8_t **ret_data,
                     uint64_t *ret_bytes, struct bl_errmsg *msg)
{
    uint8_t last[CKPT_TAIL_PROBE_BYTES] = {0}, *data;
    uint64_t bytes = 0;
    int rc = size < sizeof(last)
                 ? bl_err(msg, BL_EFORMAT, "%llu bytes are no part", (unsigned long long)size)
                 : read_range(io, fd, size - sizeof(last), last, sizeof(last), msg);

    if (rc == 0) {
        rc = ckpt_part_tail_find(last, size, &bytes, msg);
    }
    if (rc < 0) {
        return rc;
    }
    data = malloc((size_t)bytes);
    if (data == NULL) {
        return bl_err_code(msg, -ENOMEM, "index of %llu bytes", (unsigned long long)bytes);
    }
    rc = read_range(io, fd, size - bytes, data, bytes, msg);
    if (rc < 0) {
        free(data);
        return rc;
    }
    *ret_data = data;
    *ret_bytes = bytes;
    return 0;
}

/* The index out of a part of codec zstd. */
static int tail_load(struct ckpt_io *io, const char *path, const uint64_t *expect,
                     struct ckpt_index *ret, struct bl_errmsg *msg)
{
    uint64_t size = 0, bytes = 0;
    uint8_t *data = NULL;
    int fd, rc = io->ops->size(io, path, &size);

    if (rc < 0) {
        return bl_err_code(msg, rc, "open %s", path);
    }
    fd = io->ops->open(io, path, O_RDONLY, 0);
    if (fd < 0) {
        return bl_err_code(msg, fd, "open %s", path);
    }
    rc = tail_read(io, fd, size, &data, &bytes, msg);
    if (rc == 0) {
        rc = ckpt_part_tail_decode(ret, data, (size_t)bytes, size, expect, msg);
    }
    BL_IGNORE(io->ops->close(io, fd), "opened for reading");
    free(data);
    return rc < 0 ? bl_err_in(msg, rc, "%s", path) : 0;
}

/* The index in a file of its own. */
static int file_load(struct ckpt_io *io, const char *path, const uint64_t *expect,
                     struct ckpt_index *ret, struct bl_errmsg *msg)
{
    struct ckpt_index index = {0};
    char *data = NULL;
    size_t bytes = 0;
    int rc = ckpt_io_read_file(io, path, CKPT_INDEX_BYTES_MAX, &data, &bytes, msg);

    if (rc < 0) {
        return rc;
    }
    if (expect != NULL && bl_xxh3(data, bytes) != *expect) {
        rc = bl_err(msg, BL_EDIGEST, "digest differs from the manifest's");
    } else {
        rc = ckpt_index_decode(&index, (const uint8_t *)data, bytes, msg);
    }
    free(data);
    if (rc == 0 && index.codec != CKPT_CODEC_NONE) {
        ckpt_index_close(&index);
        rc = bl_err(msg, BL_EFORMAT, "index: codec number %u has no index file", index.codec);
    }
    if (rc < 0) {
        return bl_err_in(msg, rc, "%s", path);
    }
    *ret = index;
    return 0;
}

int ckpt_part_index_load(struct ckpt_io *io, const char *dir, const char *name,
                         enum ckpt_codec codec, const uint64_t *expect, struct ckpt_index *ret,
                         struct bl_errmsg *msg)
{
    char file[CKPT_PART_FILE_MAX], path[CKPT_PATH_MAX];
    int rc;

    ckpt_part_index_file(file, name, codec);
    rc = ckpt_path_join(path, dir, file, NULL, msg);
    if (rc < 0) {
        return rc;
    }
    return codec == CKPT_CODEC_ZSTD ? tail_load(io, path, expect, ret, msg)
                                    : file_load(io, path, expect, ret, msg);
}

/* A window in flight. */
struct window {
    uint32_t slot;
    uint32_t bytes;
    uint64_t offset;
    const uint8_t *data;
    uint8_t wanted[CKPT_QUEUE_BYTES / CKPT_CHUNK_BYTES_MIN / 8]; /* a bit for each chunk */
};

struct part_scan {
    const struct ckpt_part_reader *reader;
    struct ckpt_queue *queue;
    int fd;
    uint64_t next; /* first byte that was not looked at yet */
    struct window windows[CKPT_QUEUE_DEPTH_MAX];
    uint32_t first, count; /* a ring of windows in flight */
};

/* The next window with wanted chunks: from the first to the last wanted one within the reach of a
 * buffer. False at the end. */
static bool next_window(struct part_scan *scan, struct window *ret)
{
    const struct ckpt_part_reader *reader = scan->reader;
    const struct ckpt_index *index = reader->index;
    uint64_t end = index->part_bytes, from = UINT64_MAX, to = 0;

    memset(ret, 0, sizeof(*ret));
    while (scan->next < end) {
        uint64_t lo = scan->next;
        uint64_t hi = lo + index->chunk_bytes < end ? lo + index->chunk_bytes : end;

        if (from != UINT64_MAX && hi - from > CKPT_QUEUE_BYTES) {
            break;
        }
        scan->next = hi;
        if (reader->wanted == NULL || reader->wanted(reader->arg, lo, hi)) {
            from = from == UINT64_MAX ? lo : from;
            to = hi;
            ret->wanted[(lo - from) / index->chunk_bytes / 8] |=
                (uint8_t)(1u << ((lo - from) / index->chunk_bytes % 8));
        }
    }
    if (from == UINT64_MAX) {
        return false;
    }
    ret->offset = from;
    ret->bytes = (uint32_t)(to - from);
    return true;
}

static int read_error(const struct part_scan *scan, int code, struct bl_errmsg *msg)
{
    const struct ckpt_index *index = scan->reader->index;
    uint64_t at = 0;
    uint32_t chunk;

    BL_IGNORE(ckpt_queue_drain(scan->queue, &at), "only asks where it failed");
    chunk = (uint32_t)(at / index->chunk_bytes);
    return bl_err_code(msg, code, "read %s (chunk %u at byte %llu, tensor %s)", scan->reader->path,
                       chunk, (unsigned long long)at, ckpt_index_chunk_tensor(index, chunk));
}

/* Keeps as many reads in flight as there are buffers. */
static int read_ahead(struct part_scan *scan, struct bl_errmsg *msg)
{
    struct window window;
    void *data;
    int rc;

    while (scan->count < ckpt_queue_depth(scan->queue) && next_window(scan, &window)) {
        rc = ckpt_queue_take(scan->queue, &window.slot, &data);
        if (rc == 0) {
            window.data = data;
            rc = ckpt_queue_read(scan->queue, window.slot, scan->fd, window.bytes, window.offset);
        }
        if (rc < 0) {
            return read_error(scan, rc, msg);
        }
        scan->windows[(scan->first + scan->count) % CKPT_QUEUE_DEPTH_MAX] = window;
        scan->count++;
    }
    return 0;
}

/* Those that nobody wants, between others, may be what they are. */
static int check_chunks(const struct ckpt_part_reader *reader, const struct window *window,
                        struct bl_errmsg *msg)
{
    const struct ckpt_index *index = reader->index;
    int rc = 0;

    for (uint32_t at = 0; rc == 0 && at < window->bytes; at += index->chunk_bytes) {
        uint32_t left = window->bytes - at;
        uint32_t bytes = left < index->chunk_bytes ? left : index->chunk_bytes;
        uint32_t chunk = (uint32_t)((window->offset + at) / index->chunk_bytes);
        uint32_t number = at / index->chunk_bytes;

        if ((window->wanted[number / 8] >> number % 8 & 1) == 0 ||
            bl_xxh3(window->data + at, bytes) == index->chunks[chunk]) {
            continue;
        }
        if (reader->bad_chunk != NULL) {
            rc = reader->bad_chunk(reader->arg, chunk, "digest differs", msg);
        } else {
            rc = bl_err(msg, BL_EDIGEST,
                        "%s: chunk %u (bytes %llu to %llu, tensor %s): digest differs",
                        reader->path, chunk, (unsigned long long)(window->offset + at),
                        (unsigned long long)(window->offset + at + bytes),
                        ckpt_index_chunk_tensor(index, chunk));
        }
    }
    return rc;
}

/* Waits for the oldest window, checks it, hands it over. */
static int finish_window(struct part_scan *scan, struct bl_errmsg *msg)
{
    const struct ckpt_part_reader *reader = scan->reader;
    struct window window = scan->windows[scan->first];
    uint32_t bytes = 0;
    int rc = ckpt_queue_wait(scan->queue, window.slot, &bytes);

    if (rc < 0) {
        return read_error(scan, rc, msg);
    }
    if (bytes != window.bytes) {
        return bl_err(msg, BL_EFORMAT, "%s: became shorter while it was read", reader->path);
    }
    reader->result->bytes_read += bytes;
    rc = check_chunks(reader, &window, msg);
    if (rc == 0) {
        rc = reader->window(reader->arg, window.offset, window.data, window.bytes, msg);
    }
    ckpt_queue_give(scan->queue, window.slot);
    scan->first = (scan->first + 1) % CKPT_QUEUE_DEPTH_MAX;
    scan->count--;
    return rc;
}

int ckpt_part_read_open(const struct ckpt_part_reader *reader, int *ret_fd, bool *ret_direct,
                        struct bl_errmsg *msg)
{
    struct ckpt_io *io = reader->io;
    bool direct = (io->disable & CKPT_IO_NO_DIRECT) == 0;
    uint64_t size = 0;
    int fd, rc = io->ops->size(io, reader->path, &size);

    if (rc < 0) {
        return bl_err_code(msg, rc, "open %s", reader->path);
    }
    if (size != reader->index->part_bytes) {
        return bl_err(msg, BL_EFORMAT, "%s: %llu bytes, not %llu", reader->path,
                      (unsigned long long)size, (unsigned long long)reader->index->part_bytes);
    }
    fd = io->ops->open(io, reader->path, O_RDONLY | (direct ? O_DIRECT : 0), 0);
    if (fd == -EINVAL && direct) {
        direct = false;
        fd = io->ops->open(io, reader->path, O_RDONLY, 0);
    }
    if (fd < 0) {
        return bl_err_code(msg, fd, "open %s", reader->path);
    }
    *ret_fd = fd;
    *ret_direct = direct;
    return 0;
}

static int read_plain(const struct ckpt_part_reader *reader, struct bl_errmsg *msg)
{
    struct part_scan scan = {.reader = reader, .fd = -1};
    struct ckpt_queue_info info;
    bool direct = false;
    int rc = ckpt_part_read_open(reader, &scan.fd, &direct, msg);

    if (rc < 0) {
        return rc;
    }
    rc = ckpt_queue_new(&scan.queue, reader->io, msg);
    while (rc == 0) {
        if (reader->cancel != NULL && atomic_load(reader->cancel) != 0) {
            rc = bl_err(msg, BL_EABORTED, "%s: cancelled", reader->path);
            break;
        }
        rc = read_ahead(&scan, msg);
        if (rc < 0 || scan.count == 0) {
            break;
        }
        rc = finish_window(&scan, msg);
    }
    if (scan.queue != NULL) {
        ckpt_queue_info(scan.queue, &info);
        reader->result->path = info.path;
        reader->result->registered = info.registered;
        reader->result->direct = direct && info.direct;
    }
    ckpt_queue_free(scan.queue);
    BL_IGNORE(reader->io->ops->close(reader->io, scan.fd), "opened for reading");
    return rc;
}

int ckpt_part_read(const struct ckpt_part_reader *reader, struct bl_errmsg *msg)
{
    return reader->index->codec == CKPT_CODEC_ZSTD ? ckpt_part_read_zstd(reader, msg)
                                                   : read_plain(reader, msg);
}
