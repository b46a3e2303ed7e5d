/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libzstd as an entropy coder. At a very low level its search steps over nearly everything, so that
 * what it does is Huffman coding of small blocks; that this is done although the level is low
 * must be asked for. A zstd without that parameter gets level 1 instead.
 */
#define ZSTD_STATIC_LINKING_ONLY /* ZSTD_c_literalCompressionMode; values only, no functions */
#include "ckpt/codec_zstd.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <zstd.h>

#define FRAME_MAGIC 0xfd2fb528u
/* Descriptor of a frame: one segment, content size in 4 bytes, no checksum, no dictionary. */
#define FRAME_DESCRIPTOR   0xa0u
#define FRAME_HEADER_BYTES 9u
#define ENTROPY_LEVEL      (-131072) /* the lowest there is: steps over 128 KiB at once */
/* Blocks of 16 KiB: the scale of moments and rows changes within a plane, and a code that fits its
 * place pays for its table (measured on a trained state: 1.209, with 128 KiB 1.181). */
#define ENTROPY_BLOCK_LOG 14

struct ckpt_zstd {
    ZSTD_CCtx *entropy, *match; /* owned */
    ZSTD_DCtx *decoder;         /* owned */
};

static ZSTD_CCtx *compressor_new(enum ckpt_zstd_way way)
{
    ZSTD_CCtx *ctx = ZSTD_createCCtx();
    bool huffman;

    if (ctx == NULL) {
        return NULL;
    }
    huffman = way == CKPT_ZSTD_ENTROPY &&
              !ZSTD_isError(ZSTD_CCtx_setParameter(ctx, ZSTD_c_literalCompressionMode,
                                                   (int)ZSTD_lcm_huffman));
    /* What cannot be set is refused again when a frame is made; that frame is of raw blocks. */
    (void)ZSTD_CCtx_setParameter(ctx, ZSTD_c_compressionLevel, huffman ? ENTROPY_LEVEL : 1);
    (void)ZSTD_CCtx_setParameter(ctx, ZSTD_c_checksumFlag, 0);
    (void)ZSTD_CCtx_setParameter(ctx, ZSTD_c_contentSizeFlag, 1);
    if (way == CKPT_ZSTD_ENTROPY) { /* it also bounds a block, and so what one code is made for */
        (void)ZSTD_CCtx_setParameter(ctx, ZSTD_c_windowLog, ENTROPY_BLOCK_LOG);
    }
    if (huffman) { /* a table that is hardly used is cleared for each frame */
        (void)ZSTD_CCtx_setParameter(ctx, ZSTD_c_hashLog, ZSTD_HASHLOG_MIN);
    }
    return ctx;
}

int ckpt_zstd_new(struct ckpt_zstd **ret, struct bl_errmsg *msg)
{
    struct ckpt_zstd *zstd = calloc(1, sizeof(*zstd));

    if (zstd != NULL) {
        zstd->entropy = compressor_new(CKPT_ZSTD_ENTROPY);
        zstd->match = compressor_new(CKPT_ZSTD_MATCH);
        zstd->decoder = ZSTD_createDCtx();
    }
    if (zstd == NULL || zstd->entropy == NULL || zstd->match == NULL || zstd->decoder == NULL) {
        ckpt_zstd_free(zstd);
        return bl_err_code(msg, -ENOMEM, "zstd");
    }
    *ret = zstd;
    return 0;
}

void ckpt_zstd_free(struct ckpt_zstd *zstd)
{
    if (zstd == NULL) {
        return;
    }
    (void)ZSTD_freeCCtx(zstd->entropy);
    (void)ZSTD_freeCCtx(zstd->match);
    (void)ZSTD_freeDCtx(zstd->decoder);
    free(zstd);
}

size_t ckpt_zstd_raw_bytes(size_t bytes)
{
    size_t blocks = (bytes + CKPT_ZSTD_BLOCK_BYTES - 1) / CKPT_ZSTD_BLOCK_BYTES;

    return FRAME_HEADER_BYTES + 3 * blocks + bytes;
}

static void put24(uint8_t *at, uint32_t value)
{
    at[0] = (uint8_t)value;
    at[1] = (uint8_t)(value >> 8);
    at[2] = (uint8_t)(value >> 16);
}

size_t ckpt_zstd_raw_place(size_t block)
{
    return FRAME_HEADER_BYTES + block * (3 + CKPT_ZSTD_BLOCK_BYTES) + 3;
}

static void frame_header(uint8_t *at, size_t bytes)
{
    put24(at, FRAME_MAGIC & 0xffffffu);
    at[3] = (uint8_t)(FRAME_MAGIC >> 24);
    at[4] = FRAME_DESCRIPTOR;
    put24(at + 5, (uint32_t)bytes);
    at[8] = 0;
}

/* Of the block that begins at byte `done`. Bit 0: the last block. Bits 1 and 2: kind 0, raw. */
static void block_header(uint8_t *at, size_t done, size_t bytes)
{
    size_t left = bytes - done;
    size_t block = left < CKPT_ZSTD_BLOCK_BYTES ? left : CKPT_ZSTD_BLOCK_BYTES;

    put24(at, (uint32_t)block << 3 | (done + block == bytes));
}

size_t ckpt_zstd_raw_begin(void *to, size_t bytes)
{
    BL_ASSERT(bytes > 0 && bytes <= CKPT_ZSTD_FRAME_BYTES_MAX);
    frame_header(to, bytes);
    for (size_t done = 0; done < bytes; done += CKPT_ZSTD_BLOCK_BYTES) {
        block_header((uint8_t *)to + ckpt_zstd_raw_place(done / CKPT_ZSTD_BLOCK_BYTES) - 3, done,
                     bytes);
    }
    return ckpt_zstd_raw_bytes(bytes);
}

bool ckpt_zstd_raw_is(const void *frame, size_t stored, size_t bytes)
{
    const uint8_t *at = frame;
    uint8_t header[FRAME_HEADER_BYTES];

    if (bytes == 0 || stored != ckpt_zstd_raw_bytes(bytes)) {
        return false;
    }
    frame_header(header, bytes);
    if (memcmp(at, header, sizeof(header)) != 0) {
        return false;
    }
    at += FRAME_HEADER_BYTES;
    for (size_t done = 0; done < bytes; done += CKPT_ZSTD_BLOCK_BYTES) {
        block_header(header, done, bytes);
        if (memcmp(at, header, 3) != 0) {
            return false;
        }
        at += 3 + CKPT_ZSTD_BLOCK_BYTES;
    }
    return true;
}

size_t ckpt_zstd_raw_encode(void *to, const void *from, size_t bytes)
{
    size_t stored = ckpt_zstd_raw_begin(to, bytes);

    for (size_t done = 0; done < bytes; done += CKPT_ZSTD_BLOCK_BYTES) {
        size_t left = bytes - done;

        memcpy((uint8_t *)to + ckpt_zstd_raw_place(done / CKPT_ZSTD_BLOCK_BYTES),
               (const uint8_t *)from + done,
               left < CKPT_ZSTD_BLOCK_BYTES ? left : CKPT_ZSTD_BLOCK_BYTES);
    }
    return stored;
}

size_t ckpt_zstd_encode(struct ckpt_zstd *zstd, enum ckpt_zstd_way way, void *to, const void *from,
                        size_t bytes)
{
    ZSTD_CCtx *ctx = way == CKPT_ZSTD_ENTROPY ? zstd->entropy : zstd->match;
    size_t raw = ckpt_zstd_raw_bytes(bytes);
    size_t stored = ZSTD_compress2(ctx, to, raw, from, bytes); /* too large for `to`: an error */

    return ZSTD_isError(stored) || stored >= raw ? ckpt_zstd_raw_encode(to, from, bytes) : stored;
}

int ckpt_zstd_decode(struct ckpt_zstd *zstd, void *to, size_t bytes, const void *frame,
                     size_t stored, struct bl_errmsg *msg)
{
    size_t found;

    /* The decoder takes several frames in a row, and skips; here it must be one. */
    if (ZSTD_findFrameCompressedSize(frame, stored) != stored) {
        return bl_err(msg, BL_EFORMAT, "not one zstd frame of %zu bytes", stored);
    }
    found = ZSTD_decompressDCtx(zstd->decoder, to, bytes, frame, stored);
    if (ZSTD_isError(found)) {
        return bl_err(msg, BL_EFORMAT, "zstd: %s", ZSTD_getErrorName(found));
    }
    if (found != bytes) {
        return bl_err(msg, BL_EFORMAT, "a frame of %zu bytes, not %zu", found, bytes);
    }
    return 0;
}
