/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Digests. Two kinds:
 *
 * - XXH3-64 of bytes, for files, chunks, messages and headers.
 * - The *state digest*, by which runs are compared. It is a sum over elements, so that any cut of
 *   the state over ranks, slots or files adds up to the same number without a gather:
 *
 *       D_k = sum over tensors t, elements i of  mix_k(XXH3(name_t), i, bits(t[i]))   mod 2^64
 *
 *   for k = 0, 1, where i is the row-major index in the logical (unsharded) tensor. With
 *
 *       S = 6a09e667f3bcc908, G = 3c6ef372fe94f82b (hexadecimal)
 *
 *       key   = (name_hash xor S) + i * G                mod 2^64
 *       x     = bits xor key
 *       f(z)  = low32(z) * high32(z) + rotl64(z, 32)     mod 2^64
 *       mix_0 = f(x) xor (f(x) >> 29)
 *       mix_1 = f(mix_0)
 *
 *   For elements of up to 32 bits f is one-to-one at each i: any change of one element shows in
 *   mix_0. The products are 32 x 32 bits, which vector units have.
 *
 *   Integers only, hence the same on every machine, compiler, vector width and device. It guards
 *   against mistakes and decay, not against someone who wants two states to look alike.
 */
#ifndef BL_BASE_DIGEST_H
#define BL_BASE_DIGEST_H

#include <stddef.h>
#include <stdint.h>

/* XXH3-64, seed 0. */
uint64_t bl_xxh3(const void *data, size_t bytes);

struct bl_state_digest {
    uint64_t sum[2];
};

/* Adds elements [first, first + count) of the logical tensor whose name hashes to `name_hash`
 * (bl_xxh3 of the name without its NUL). `bits` holds `count` elements of `elem_bytes` (1, 2, 4 or
 * 8) each, little-endian; a word is widened to 64 bits with zeros before it is mixed. Any thread.
 */
void bl_state_digest_add(struct bl_state_digest *digest, uint64_t name_hash, uint64_t first,
                         const void *bits, uint64_t count, uint32_t elem_bytes);

/* d += other, componentwise modulo 2^64. */
void bl_state_digest_merge(struct bl_state_digest *digest, const struct bl_state_digest *other);

int bl_state_digest_equal(const struct bl_state_digest *a, const struct bl_state_digest *b);

#define BL_STATE_DIGEST_TEXT_BYTES 33

/* 32 lower-case hex digits and a NUL. */
void bl_state_digest_format(const struct bl_state_digest *digest,
                            char text[BL_STATE_DIGEST_TEXT_BYTES]);

/* 64-bit finaliser of good quality (splitmix64's): a bijection, also the step of the generator
 * by which pure machines draw ids. */
uint64_t bl_mix64(uint64_t x);

#endif
