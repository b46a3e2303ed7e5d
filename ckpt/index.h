/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The index of a part: XXH3 of every chunk of the part's file (codec none) or of every frame (codec
 * zstd), and the tensors and extents that lie in it, each with its place. Binary, with its own
 * digest at the end; docs/format.md has the layout. The manifest names the digest of the whole
 * index, so one digest guards it all.
 *
 * Places are in *raw part space*, whatever the codec: the bytes of the part as plain safetensors.
 *
 *     raw     | header      | extent 0 (F32, large)     | extent 1 (small) | extent 2 ...
 *     chunks  | 0 (plain)   | 1 (planes) | 2 (planes)   | 3 (plain)        | ...
 *     frames  | 0           | 1 2 3 4    | 5 6 7 8      | 9                | ...
 *
 * With codec zstd the chunks follow from the extents: see ckpt_index_cut.
 */
#ifndef BL_CKPT_INDEX_H
#define BL_CKPT_INDEX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/digest.h"
#include "base/error.h"
#include "base/extent.h"

#define CKPT_INDEX_VERSION   1u
#define CKPT_INDEX_BYTES_MAX (256u * 1024 * 1024)
#define CKPT_CHUNK_BYTES     (1024u * 1024) /* of the part's file, from its first byte on */
#define CKPT_CHUNK_BYTES_MIN 4096u
#define CKPT_CHUNK_BYTES_MAX (4u * 1024 * 1024) /* one transfer buffer */
#define CKPT_ZSTD_CHUNK_BYTES_MAX                                                                  \
    (2u * 1024 * 1024) /* the frames of a chunk fit into a transfer buffer, whatever they hold */

enum ckpt_codec { CKPT_CODEC_NONE = 0, CKPT_CODEC_ZSTD = 1 };

struct ckpt_frame {  /* of codec zstd: one zstd frame, one plane of a chunk */
    uint64_t at;     /* place in the part's file */
    uint64_t digest; /* XXH3 of the stored bytes */
    uint32_t stored; /* bytes in the file */
    uint32_t bytes;  /* decoded */
};

struct ckpt_chunk {  /* of codec zstd: what is decoded at once */
    uint64_t offset; /* in raw part space */
    uint32_t bytes;
    uint32_t planes; /* frames; 1: the bytes as they stand */
    uint32_t frame;  /* the first */
};

struct ckpt_index {
    uint64_t part_bytes;  /* of the part's file */
    uint64_t raw_bytes;   /* without a codec; the same with none */
    uint64_t data_offset; /* where the safetensors data begins; a multiple of 4096 */
    uint32_t codec;
    uint32_t chunk_bytes;
    uint32_t chunk_count;         /* none: ceil(part_bytes / chunk_bytes); zstd: of `layout` */
    uint64_t *chunks;             /* none, owned: XXH3 of each chunk; the last may be short */
    uint32_t frame_count;         /* zstd */
    struct ckpt_frame *frames;    /* zstd, owned: they fill the file up to the index's own frame */
    struct ckpt_chunk *layout;    /* zstd, owned: chunks, which fill the raw part */
    struct bl_state_digest state; /* of the extents in the part */
    struct bl_extent_list held;   /* owned; offset: in raw part space; ascending, without
                                   * gaps, each a multiple of its element's size */
};

void ckpt_index_close(struct ckpt_index *index);

/* How codec zstd cuts an extent of `elems` elements: `chunks` chunks of `each` elements as planes,
 * then `tail` elements, which go as planes too if `tail_planes`, else as they stand, in one chunk
 * with what is plain before or behind. No chunk of planes: chunks is 0, and all is tail. */
struct ckpt_cutting {
    uint32_t planes, each;
    uint64_t chunks;
    uint32_t tail;
    bool tail_planes;
};
void ckpt_index_cut(struct ckpt_cutting *ret, enum bl_dtype dtype, uint64_t elems,
                    uint32_t chunk_bytes);

/* Makes `layout` and zeroed `frames` (with their decoded bytes) from data_offset, raw_bytes,
 * chunk_bytes and held. When frame_count is not 0 it must come out the same (BL_EFORMAT), which is
 * found before memory is taken. */
BL_MUST_CHECK int ckpt_index_layout(struct ckpt_index *index, struct bl_errmsg *msg);

/* Chunk `chunk` is bytes [*ret_lo, *ret_hi) of raw part space. */
void ckpt_index_chunk_range(const struct ckpt_index *index, uint32_t chunk, uint64_t *ret_lo,
                            uint64_t *ret_hi);

/* The bytes that the index takes, without those that stand around it in a file. */
uint64_t ckpt_index_bytes(const struct ckpt_index *index);

/* The bytes of an index file, owned (free()), and their XXH3. -ENOMEM, BL_ELIMIT. */
BL_MUST_CHECK int ckpt_index_encode(const struct ckpt_index *index, uint8_t **ret_data,
                                    size_t *ret_bytes, uint64_t *ret_digest, struct bl_errmsg *msg);

/* Reads one back: digest, version, every count against the bytes that are there before memory is
 * taken, every extent against its tensor, and that the extents fill the part exactly. */
BL_MUST_CHECK int ckpt_index_decode(struct ckpt_index *ret, const uint8_t *data, size_t bytes,
                                    struct bl_errmsg *msg);

/* Name of the first tensor with bytes in chunk `chunk`, or "header". View of the index. */
const char *ckpt_index_chunk_tensor(const struct ckpt_index *index, uint32_t chunk);

#endif
