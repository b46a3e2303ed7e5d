/* SPDX-License-Identifier: Apache-2.0 */
/* Inside base: the two ways to run each digest's formula. Both give the same bits. */
#ifndef BL_BASE_DIGEST_SIMD_H
#define BL_BASE_DIGEST_SIMD_H

#include <stddef.h>
#include <stdint.h>

#include "base/digest.h"

/* Constants of the formula in digest.h. Never change them: digests are stored. They are the
 * fractional bits of sqrt(2), and of sqrt(5) made odd. */
#define BL_DIGEST_SEED 0x6a09e667f3bcc908ULL
#define BL_DIGEST_STEP 0x3c6ef372fe94f82bULL

/* Adds `count` elements, the first of which has `key`. */
void bl_digest_add_scalar(struct bl_state_digest *digest, uint64_t key, const void *bits,
                          uint64_t count, uint32_t elem_bytes);

/* Adds as many of the elements, from the first, as suit the machine's vectors (none without AVX2)
 * and returns how many. */
uint64_t bl_digest_add_simd(struct bl_state_digest *digest, uint64_t key, const void *bits,
                            uint64_t count, uint32_t elem_bytes);

/* XXH3-64 with AVX2. 0: there is none here, *ret_digest untouched; else 1. */
int bl_xxh3_simd(const void *data, size_t bytes, uint64_t *ret_digest);

#endif
