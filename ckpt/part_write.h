/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A part's writer from inside: what is to be written (part_gather.c), the stream of large aligned
 * writes and what goes into it without a codec (part_stream.c) or with one (part_encode.c), and the
 * part's file with what goes around it (part_write.c).
 */
#ifndef BL_CKPT_PART_WRITE_H
#define BL_CKPT_PART_WRITE_H

#include <stdint.h>

#include "ckpt/part.h"
#include "ckpt/queue.h"

/* An extent to be written, and where its bytes come from. */
struct ckpt_piece {
    const struct bl_tensor *tensor;
    const struct bl_extent *extent;
    const struct ckpt_source *source;
    uint32_t number; /* of the extent in the source's list */
    uint64_t at;     /* where its bytes stand in raw part space */
};

struct ckpt_pieces {
    struct ckpt_piece *pieces; /* owned; in file order, each extent once */
    uint32_t count;
};
void ckpt_pieces_close(struct ckpt_pieces *pieces);

/* Gathers the non-empty extents of all sources of a job. BL_EFORMAT for an extent that does not fit
 * its tensor, a name that cannot stand in a checkpoint, a source without data. */
BL_MUST_CHECK int ckpt_pieces_gather(struct ckpt_pieces *ret, const struct ckpt_part_job *job,
                                     struct bl_errmsg *msg);

/* Fills `held` (zeroed before) with tensors and extents of the pieces; what several ranks hold of a
 * tensor is one extent where it goes on from one to the next. BL_EFORMAT when one name has two
 * shapes. */
BL_MUST_CHECK int ckpt_pieces_describe(const struct ckpt_pieces *pieces,
                                       struct bl_extent_list *held, struct bl_errmsg *msg);

/* Bytes [lo, lo + bytes) of a piece, whole elements, copied or fetched to `dest`. */
BL_MUST_CHECK int ckpt_piece_take(const struct ckpt_piece *piece, uint64_t lo, uint64_t bytes,
                                  void *dest, struct bl_errmsg *msg);

/* Adds bytes [lo, lo + bytes) of a piece, which lie at data, to the state digest. Any thread. */
void ckpt_piece_digest(const struct ckpt_piece *piece, uint64_t lo, uint64_t bytes,
                       const void *data, struct bl_state_digest *state);

static inline uint64_t ckpt_piece_bytes(const struct ckpt_piece *piece)
{
    return bl_extent_elems(piece->extent) * bl_dtype_bytes(piece->tensor->dtype);
}

struct ckpt_part_writer {
    struct ckpt_io *io;
    const struct ckpt_part_job *job;
    char path[CKPT_PATH_MAX];
    int fd;
    struct ckpt_pieces pieces; /* owned */
    struct ckpt_index index;   /* owned */
    struct ckpt_text header;   /* owned */
    bool allocates;            /* the file system can */
    uint64_t allocated;        /* bytes of the file that are there for certain */
    /* The stream: the buffer that is being filled, and what went before. */
    struct ckpt_queue *queue;
    uint32_t slot, filled;
    uint8_t *data;      /* NULL: no buffer is taken */
    uint64_t written;   /* bytes given to the queue */
    uint64_t waited_us; /* for the target */
    uint64_t flushed;   /* bytes that the file system was told to write back */
    uint64_t synced;    /* bytes that an fsync was behind */
};

/* Monotonic time in microseconds. */
uint64_t ckpt_now_us(void);

/* Allocates the first `bytes` of the file, in steps; a file system that cannot is fine. */
BL_MUST_CHECK int ckpt_stream_allocate(struct ckpt_part_writer *writer, uint64_t bytes,
                                       struct bl_errmsg *msg);
/* Appends bytes to the part. */
BL_MUST_CHECK int ckpt_stream_append(struct ckpt_part_writer *writer, const void *data,
                                     size_t bytes, struct bl_errmsg *msg);
/* Sends what is left and waits until all is written. */
BL_MUST_CHECK int ckpt_stream_finish(struct ckpt_part_writer *writer, struct bl_errmsg *msg);
/* BL_EABORTED when the job says so. */
BL_MUST_CHECK int ckpt_stream_check(const struct ckpt_part_writer *writer, struct bl_errmsg *msg);

/* Header and pieces as they stand; fills index.chunks and state. */
BL_MUST_CHECK int ckpt_stream_plain(struct ckpt_part_writer *writer, struct bl_errmsg *msg);

/* Header and pieces as frames; fills index.frames and state. Memory: per thread 4 chunks of input
 * and output and zstd's, about 6 MiB. */
BL_MUST_CHECK int ckpt_stream_encode(struct ckpt_part_writer *writer, struct bl_errmsg *msg);

#endif
