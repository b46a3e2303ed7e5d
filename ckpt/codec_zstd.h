/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The border to libzstd: single frames, compressed with as little search as possible, or of raw
 * blocks (RFC 8878). Only codec_zstd.c includes zstd's header.
 */
#ifndef BL_CKPT_CODEC_ZSTD_H
#define BL_CKPT_CODEC_ZSTD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

/* A frame holds at most so many bytes. */
#define CKPT_ZSTD_FRAME_BYTES_MAX (4u * 1024 * 1024)

struct ckpt_zstd; /* compressor and decompressor; one thread at a time */

/* *ret is owned. -ENOMEM. */
BL_MUST_CHECK int ckpt_zstd_new(struct ckpt_zstd **ret, struct bl_errmsg *msg);
void ckpt_zstd_free(struct ckpt_zstd *zstd);

/* How a frame is tried: ENTROPY only codes bytes by their frequencies (byte planes hold only chance
 * matches, so the search would cost and bring nothing); MATCH looks for repetitions as well. */
enum ckpt_zstd_way { CKPT_ZSTD_ENTROPY, CKPT_ZSTD_MATCH };

/* Bytes of a frame of raw blocks that holds `bytes`; no frame that is written here is larger. */
size_t ckpt_zstd_raw_bytes(size_t bytes);
/* Writes one (ckpt_zstd_raw_bytes of room) and returns its size. */
size_t ckpt_zstd_raw_encode(void *to, const void *from, size_t bytes);

/* The same without a copy of the bytes: writes all headers, and the caller puts byte i at
 * to + ckpt_zstd_raw_place(i / CKPT_ZSTD_BLOCK_BYTES) + i % CKPT_ZSTD_BLOCK_BYTES. */
#define CKPT_ZSTD_BLOCK_BYTES (128u * 1024)
size_t ckpt_zstd_raw_begin(void *to, size_t bytes);
/* Where the bytes of a block are in a frame of raw blocks. */
size_t ckpt_zstd_raw_place(size_t block);
/* Is the frame what ckpt_zstd_raw_begin writes for `bytes`? Then its bytes can be taken from where
 * they are. */
bool ckpt_zstd_raw_is(const void *frame, size_t stored, size_t bytes);

/* Writes a frame of `bytes` (1 to CKPT_ZSTD_FRAME_BYTES_MAX) at `to`, with room for
 * ckpt_zstd_raw_bytes; compressed when that is smaller, else of raw blocks. Returns its size. */
size_t ckpt_zstd_encode(struct ckpt_zstd *zstd, enum ckpt_zstd_way way, void *to, const void *from,
                        size_t bytes);

/* Decodes one frame of `stored` bytes that holds exactly `bytes`. No more than `bytes` are written
 * whatever the frame says. BL_EFORMAT with zstd's sentence. */
BL_MUST_CHECK int ckpt_zstd_decode(struct ckpt_zstd *zstd, void *to, size_t bytes,
                                   const void *frame, size_t stored, struct bl_errmsg *msg);

#endif
