/* SPDX-License-Identifier: Apache-2.0 */
/* Chunks into frames and back. */
#include "ckpt/codec.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "ckpt/codec_zstd.h"

struct ckpt_coder {
    struct ckpt_zstd *zstd; /* owned */
    uint8_t *planes;        /* owned; the planes of one chunk */
    uint32_t bytes_max;
};

uint32_t ckpt_codec_planes(enum bl_dtype dtype)
{
    switch (dtype) {
    case BL_F32:
        return 4;
    case BL_BF16:
    case BL_F16:
        return 2;
    case BL_F64:
        return 8;
    default:
        return 1;
    }
}

int ckpt_coder_new(struct ckpt_coder **ret, uint32_t chunk_bytes_max, struct bl_errmsg *msg)
{
    struct ckpt_coder *coder = calloc(1, sizeof(*coder));
    int rc;

    if (coder == NULL || chunk_bytes_max > CKPT_ZSTD_FRAME_BYTES_MAX) {
        free(coder);
        return bl_err_code(msg, coder == NULL ? -ENOMEM : BL_ELIMIT, "codec");
    }
    coder->bytes_max = chunk_bytes_max;
    coder->planes = bl_mem_alloc(chunk_bytes_max);
    rc = coder->planes == NULL ? bl_err_code(msg, -ENOMEM, "codec") : 0;
    if (rc == 0) {
        rc = ckpt_zstd_new(&coder->zstd, msg);
    }
    if (rc < 0) {
        ckpt_coder_free(coder);
        return rc;
    }
    *ret = coder;
    return 0;
}

void ckpt_coder_free(struct ckpt_coder *coder)
{
    if (coder == NULL) {
        return;
    }
    ckpt_zstd_free(coder->zstd);
    if (coder->planes != NULL) {
        bl_mem_free(coder->planes, coder->bytes_max);
    }
    free(coder);
}

size_t ckpt_codec_chunk_bound(uint32_t chunk_bytes, uint32_t planes)
{
    return planes * ckpt_zstd_raw_bytes(chunk_bytes / planes);
}

#define SAMPLE_SPANS 16u
#define SAMPLE_BYTES 256u /* of a span */

/* Whether trying can pay: the frequencies of the bytes in a sample of the plane, against those of
 * noise. With N bytes of noise chi^2 = 256 * sum(n^2) / N - N is 255 on average with a standard
 * deviation of 23; an entropy of 8 - e bits adds about 2 ln(2) N e. zstd keeps a block raw unless
 * it shrinks by a 64th, e = 0.125; from e = 0.09 on it is tried. */
static bool plane_may_shrink(const uint8_t *plane, size_t bytes)
{
    const uint64_t sampled = SAMPLE_SPANS * SAMPLE_BYTES;
    uint32_t counts[4][256] = {{0}};
    uint64_t squares = 0;
    size_t stride;

    if (bytes < 4 * sampled) {
        return true; /* small: trying costs little */
    }
    stride = (bytes - SAMPLE_BYTES) / (SAMPLE_SPANS - 1);
    for (size_t s = 0; s < SAMPLE_SPANS; s++) {
        const uint8_t *at = plane + s * stride;

        for (size_t i = 0; i < SAMPLE_BYTES; i += 4) { /* four tables: no wait for the last add */
            counts[0][at[i]]++;
            counts[1][at[i + 1]]++;
            counts[2][at[i + 2]]++;
            counts[3][at[i + 3]]++;
        }
    }
    for (size_t b = 0; b < 256; b++) {
        uint64_t n = counts[0][b] + counts[1][b] + counts[2][b] + counts[3][b];

        squares += n * n;
    }
    return 256 * squares / sampled - sampled > 255 + 500;
}

/* The planes of a chunk, split straight into frames of raw blocks. */
static size_t encode_raw(const uint8_t *chunk, uint32_t count, uint32_t planes, uint8_t *to,
                         uint32_t *ret_stored)
{
    size_t stored = ckpt_zstd_raw_bytes(count);

    for (uint32_t p = 0; p < planes; p++) {
        ret_stored[p] = (uint32_t)ckpt_zstd_raw_begin(to + p * stored, count);
    }
    for (uint32_t done = 0; done < count; done += CKPT_ZSTD_BLOCK_BYTES) {
        uint8_t *blocks[CKPT_PLANES_MAX];
        uint32_t left = count - done;

        for (uint32_t p = 0; p < planes; p++) {
            blocks[p] = to + p * stored + ckpt_zstd_raw_place(done / CKPT_ZSTD_BLOCK_BYTES);
        }
        ckpt_planes_split(blocks, chunk + (size_t)done * planes,
                          left < CKPT_ZSTD_BLOCK_BYTES ? left : CKPT_ZSTD_BLOCK_BYTES, planes);
    }
    return planes * stored;
}

size_t ckpt_codec_chunk_encode(struct ckpt_coder *coder, const void *chunk, uint32_t bytes,
                               uint32_t planes, bool raw, void *to,
                               uint32_t ret_stored[CKPT_PLANES_MAX])
{
    uint8_t *split[CKPT_PLANES_MAX] = {0}, *at = to;
    uint32_t count = bytes / planes;

    BL_ASSERT(bytes > 0 && bytes <= coder->bytes_max && bytes % planes == 0);
    if (planes == 1) {
        size_t stored = raw ? ckpt_zstd_raw_encode(to, chunk, bytes)
                            : ckpt_zstd_encode(coder->zstd, CKPT_ZSTD_MATCH, to, chunk, bytes);

        ret_stored[0] = (uint32_t)stored;
        return stored;
    }
    if (raw) {
        return encode_raw(chunk, count, planes, to, ret_stored);
    }
    for (uint32_t p = 0; p < planes; p++) {
        split[p] = coder->planes + (size_t)p * count;
    }
    ckpt_planes_split(split, chunk, count, planes);
    for (uint32_t p = 0; p < planes; p++) {
        size_t stored = plane_may_shrink(split[p], count)
                            ? ckpt_zstd_encode(coder->zstd, CKPT_ZSTD_ENTROPY, at, split[p], count)
                            : ckpt_zstd_raw_encode(at, split[p], count);

        ret_stored[p] = (uint32_t)stored;
        at += stored;
    }
    return (size_t)(at - (uint8_t *)to);
}

int ckpt_codec_frame_decode(struct ckpt_coder *coder, const void *frame, size_t stored, void *to,
                            size_t bytes, struct bl_errmsg *msg)
{
    return ckpt_zstd_decode(coder->zstd, to, bytes, frame, stored, msg);
}

/* Joins planes of `count` bytes block by block: those of raw blocks lie in their frames, the others
 * are decoded, in the coder's memory. */
static void join_blocks(const struct ckpt_coder *coder, const uint8_t *const *frames,
                        const bool *raw, uint32_t planes, uint8_t *to, uint32_t count)
{
    for (uint32_t done = 0; done < count; done += CKPT_ZSTD_BLOCK_BYTES) {
        const uint8_t *from[CKPT_PLANES_MAX];
        uint32_t left = count - done;

        for (uint32_t p = 0; p < planes; p++) {
            from[p] = raw[p] ? frames[p] + ckpt_zstd_raw_place(done / CKPT_ZSTD_BLOCK_BYTES)
                             : coder->planes + (size_t)p * count + done;
        }
        ckpt_planes_join(to + (size_t)done * planes, from,
                         left < CKPT_ZSTD_BLOCK_BYTES ? left : CKPT_ZSTD_BLOCK_BYTES, planes);
    }
}

int ckpt_codec_chunk_decode(struct ckpt_coder *coder, const void *frames, const uint32_t *stored,
                            uint32_t planes, void *to, uint32_t bytes, struct bl_errmsg *msg)
{
    const uint8_t *each[CKPT_PLANES_MAX], *at = frames;
    bool raw[CKPT_PLANES_MAX];
    uint32_t count = bytes / planes;

    BL_ASSERT(bytes <= coder->bytes_max && planes <= CKPT_PLANES_MAX && bytes % planes == 0);
    if (planes == 1) {
        return ckpt_zstd_decode(coder->zstd, to, bytes, frames, stored[0], msg);
    }
    for (uint32_t p = 0; p < planes; p++) {
        int rc = 0;

        each[p] = at;
        raw[p] = ckpt_zstd_raw_is(at, stored[p], count);
        if (!raw[p]) {
            rc = ckpt_zstd_decode(coder->zstd, coder->planes + (size_t)p * count, count, at,
                                  stored[p], msg);
        }
        if (rc < 0) {
            return bl_err_in(msg, rc, "plane %u", p);
        }
        at += stored[p];
    }
    join_blocks(coder, each, raw, planes, to, count);
    return 0;
}
