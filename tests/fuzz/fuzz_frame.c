/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target: what parts of codec zstd are made of. The first byte says which:
 *
 *     0: u32 size, a frame that should decode to so many bytes
 *     1: the end of a part: the index's frame and the seek table; the digest in the index is made
 *        right first. What the reader takes, the writer gives back byte for byte.
 *     2: u32 size, 4 x u32 stored, the four frames of a chunk of words of 4 bytes
 */
#include <stdlib.h>
#include <string.h>

#include "ckpt/codec.h"
#include "ckpt/codec_zstd.h"
#include "ckpt/part.h"
#include "tests/fuzz/fuzz.h"

#define CHUNK_MAX (1u << 20)

static uint32_t get32(const uint8_t *at)
{
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static void try_frame(struct ckpt_coder *coder, const uint8_t *data, size_t bytes)
{
    struct bl_errmsg why = {{0}};
    uint32_t size;
    uint8_t *out;

    if (bytes < 4) {
        return;
    }
    size = get32(data) % CHUNK_MAX + 1;
    out = malloc(size); /* exactly: a sanitizer sees a write behind it */
    BL_ASSERT(out != NULL);
    if (ckpt_codec_frame_decode(coder, data + 4, bytes - 4, out, size, &why) < 0) {
        BL_ASSERT(why.text[0] != '\0');
    }
    free(out);
}

static void try_chunk(struct ckpt_coder *coder, const uint8_t *data, size_t bytes)
{
    struct bl_errmsg why = {{0}};
    uint32_t size, stored[4];
    uint64_t sum = 0;
    uint8_t *out;

    if (bytes < 20) {
        return;
    }
    size = (get32(data) % CHUNK_MAX + 4) / 4 * 4;
    for (uint32_t p = 0; p < 4; p++) {
        stored[p] = get32(data + 4 + 4 * p);
        sum += stored[p];
    }
    if (size > CHUNK_MAX || sum > bytes - 20) {
        return; /* the index sees to that */
    }
    out = malloc(size);
    BL_ASSERT(out != NULL);
    if (ckpt_codec_chunk_decode(coder, data + 20, stored, 4, out, size, &why) < 0) {
        BL_ASSERT(why.text[0] != '\0');
    }
    free(out);
}

static void try_tail(const uint8_t *data, size_t bytes)
{
    struct bl_errmsg why = {{0}};
    struct ckpt_index index = {0};
    uint64_t file_bytes = bytes, tail_bytes = 0, digest;
    uint8_t *copy = malloc(bytes + 1), *again = NULL;
    size_t content, again_bytes = 0;

    BL_ASSERT(copy != NULL);
    memcpy(copy, data, bytes);
    if (bytes >= 8 + 40) {
        content = get32(copy + 4);
        file_bytes = get32(copy + 8 + 24) | (uint64_t)get32(copy + 8 + 28) << 32;
        if (content >= 8 && content <= bytes - 8) {
            digest = bl_xxh3(copy + 8, content - 8);
            memcpy(copy + content, &digest, 8);
        }
    }
    if (bytes >= CKPT_TAIL_PROBE_BYTES && ckpt_part_tail_find(copy + bytes - CKPT_TAIL_PROBE_BYTES,
                                                              file_bytes, &tail_bytes, &why) == 0) {
        BL_ASSERT(tail_bytes <= file_bytes);
    }
    if (ckpt_part_tail_decode(&index, copy, bytes, file_bytes, NULL, &why) < 0) {
        BL_ASSERT(why.text[0] != '\0');
    } else {
        for (uint32_t c = 0; c < index.chunk_count; c++) {
            BL_ASSERT(ckpt_index_chunk_tensor(&index, c) != NULL);
            BL_ASSERT(index.layout[c].frame + index.layout[c].planes <= index.frame_count);
        }
        BL_ASSERT(ckpt_part_tail_encode(&index, &again, &again_bytes, &digest, NULL) == 0);
        BL_ASSERT(again_bytes == bytes && memcmp(again, copy, bytes) == 0);
        free(again);
        ckpt_index_close(&index);
    }
    free(copy);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static struct ckpt_coder *coder; /* kept: making one costs more than most inputs */

    if (coder == NULL) {
        BL_ASSERT(ckpt_coder_new(&coder, CHUNK_MAX, NULL) == 0);
    }
    if (bytes == 0) {
        return 0;
    }
    if (data[0] == 1) {
        try_tail(data + 1, bytes - 1);
    } else if (data[0] == 2) {
        try_chunk(coder, data + 1, bytes - 1);
    } else {
        try_frame(coder, data + 1, bytes - 1);
    }
    return 0;
}
