/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Codec zstd, one chunk at a time. Floats barely compress as they stand: the exponent's bits are
 * few and predictable, the mantissa's are noise, and a word mixes both. So a chunk of floats is
 * turned into byte planes first: each word is rotated left by one (the sign becomes the lowest bit,
 * the exponent a byte of its own), then plane p takes byte p of every word:
 *
 *     chunk of n words      w0 w1 w2 ...
 *     rotated, in bytes     a0 b0 c0 d0  a1 b1 c1 d1  a2 b2 c2 d2 ...       (F32; d: exponents)
 *     planes                a0 a1 a2 ... | b0 b1 b2 ... | c0 c1 c2 ... | d0 d1 d2 ...
 *
 * Each plane becomes one zstd frame, entropy-coded or of raw blocks, whichever is smaller. A chunk
 * that is no float's, or too small for planes to pay, is one frame of the bytes as they are.
 */
#ifndef BL_CKPT_CODEC_H
#define BL_CKPT_CODEC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/extent.h"

#define CKPT_PLANES_MAX      8u
#define CKPT_PLANE_BYTES_MIN 2048u /* a chunk with fewer words stays as it is */

/* Planes of a chunk of words of this dtype: 2, 4 or 8 for floats, 1 for others. */
uint32_t ckpt_codec_planes(enum bl_dtype dtype);

/* Splits `count` words of `planes` bytes each (2, 4, 8) into planes: plane p goes to to[p]. Any
 * alignment; no overlap. Any thread. */
void ckpt_planes_split(uint8_t *const *to, const void *words, size_t count, uint32_t planes);
/* The inverse: plane p is at from[p]. */
void ckpt_planes_join(void *words, const uint8_t *const *from, size_t count, uint32_t planes);

struct ckpt_coder; /* scratch memory and zstd's; one thread at a time */

/* For chunks of up to chunk_bytes_max. *ret is owned. Memory: chunk_bytes_max, and zstd's (about
 * 1 MiB). -ENOMEM. */
BL_MUST_CHECK int ckpt_coder_new(struct ckpt_coder **ret, uint32_t chunk_bytes_max,
                                 struct bl_errmsg *msg);
void ckpt_coder_free(struct ckpt_coder *coder);

/* At most so many bytes are stored for a chunk. */
size_t ckpt_codec_chunk_bound(uint32_t chunk_bytes, uint32_t planes);

/* Encodes a chunk of `bytes` (a multiple of `planes`; 1: as it stands) into frames at `to`
 * (ckpt_codec_chunk_bound bytes of room), one after the other; ret_stored[p] is the size of frame
 * p. With `raw` nothing is tried. Returns the bytes of all frames. Deterministic for one version of
 * zstd. */
size_t ckpt_codec_chunk_encode(struct ckpt_coder *coder, const void *chunk, uint32_t bytes,
                               uint32_t planes, bool raw, void *to,
                               uint32_t ret_stored[CKPT_PLANES_MAX]);

/* Decodes one frame of exactly `bytes` into `to`. BL_EFORMAT for anything else. */
BL_MUST_CHECK int ckpt_codec_frame_decode(struct ckpt_coder *coder, const void *frame,
                                          size_t stored, void *to, size_t bytes,
                                          struct bl_errmsg *msg);

/* Decodes a chunk of `bytes` from its frames, which stand one after the other at `frames`, straight
 * into `to`. BL_EFORMAT when a frame is not what it must be; `to` is undefined then. */
BL_MUST_CHECK int ckpt_codec_chunk_decode(struct ckpt_coder *coder, const void *frames,
                                          const uint32_t *stored, uint32_t planes, void *to,
                                          uint32_t bytes, struct bl_errmsg *msg);

#endif
