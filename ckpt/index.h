/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The index beside a part: XXH3 of every chunk of the part's file, and the tensors and extents that
 * lie in it, each with its place. Binary, with its own digest at the end; docs/format.md has the
 * layout. The manifest names the digest of the whole index file, so one digest guards it all.
 */
#ifndef BL_CKPT_INDEX_H
#define BL_CKPT_INDEX_H

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

enum ckpt_codec { CKPT_CODEC_NONE = 0, CKPT_CODEC_ZSTD = 1 };

struct ckpt_index {
    uint64_t part_bytes;  /* of the part's file */
    uint64_t raw_bytes;   /* without a codec; the same with none */
    uint64_t data_offset; /* where the safetensors data begins; a multiple of 4096 */
    uint32_t codec;
    uint32_t chunk_bytes;
    uint32_t chunk_count;         /* ceil(part_bytes / chunk_bytes) */
    uint64_t *chunks;             /* owned: XXH3 of each chunk; the last may be short */
    struct bl_state_digest state; /* of the extents in the part */
    struct bl_extent_list held;   /* owned; offset: in the part's file; ascending, without
                                   * gaps, each a multiple of its element's size */
};

void ckpt_index_close(struct ckpt_index *index);

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
