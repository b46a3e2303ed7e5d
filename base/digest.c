/* SPDX-License-Identifier: Apache-2.0 */
#include "base/digest.h"

#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#include "base/digest_simd.h"
#include "base/error.h"

/* Up to here XXH3 is scalar arithmetic anyway. */
#define BL_XXH3_SHORT 240

uint64_t bl_xxh3(const void *data, size_t bytes)
{
    uint64_t digest;

    return bytes > BL_XXH3_SHORT && bl_xxh3_simd(data, bytes, &digest) ? digest
                                                                       : XXH3_64bits(data, bytes);
}

uint64_t bl_mix64(uint64_t x)
{
    x += 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

/* mix_0 and mix_1 of one word under its key; digest.h gives the formula. */
static inline __attribute__((always_inline)) void digest_mix(uint64_t word, uint64_t key,
                                                             uint64_t sum[2])
{
    uint64_t x = word ^ key;
    uint64_t q = (x & UINT32_MAX) * (x >> 32) + ((x << 32) | (x >> 32));
    uint64_t m = q ^ (q >> 29);
    sum[0] += m;
    sum[1] += (m & UINT32_MAX) * (m >> 32) + ((m << 32) | (m >> 32));
}

/* The loop for one element size; `elem_bytes` is a constant in each of its inlined copies. */
static inline __attribute__((always_inline)) void
digest_add_sized(struct bl_state_digest *digest, uint64_t key, const unsigned char *bits,
                 uint64_t count, size_t elem_bytes)
{
    uint64_t sum[2] = {0, 0};
    for (uint64_t i = 0; i < count; i++) {
        uint64_t word = 0;
        memcpy(&word, bits + i * elem_bytes, elem_bytes);
        digest_mix(word, key, sum);
        key += BL_DIGEST_STEP;
    }
    digest->sum[0] += sum[0];
    digest->sum[1] += sum[1];
}

void bl_digest_add_scalar(struct bl_state_digest *digest, uint64_t key, const void *bits,
                          uint64_t count, uint32_t elem_bytes)
{
    switch (elem_bytes) {
    case 1:
        digest_add_sized(digest, key, bits, count, 1);
        break;
    case 2:
        digest_add_sized(digest, key, bits, count, 2);
        break;
    case 4:
        digest_add_sized(digest, key, bits, count, 4);
        break;
    default:
        BL_ASSERT(elem_bytes == 8);
        digest_add_sized(digest, key, bits, count, 8);
        break;
    }
}

void bl_state_digest_add(struct bl_state_digest *digest, uint64_t name_hash, uint64_t first,
                         const void *bits, uint64_t count, uint32_t elem_bytes)
{
    uint64_t key = (name_hash ^ BL_DIGEST_SEED) + first * BL_DIGEST_STEP;
    uint64_t done = bl_digest_add_simd(digest, key, bits, count, elem_bytes);
    bl_digest_add_scalar(digest, key + done * BL_DIGEST_STEP,
                         (const unsigned char *)bits + done * elem_bytes, count - done, elem_bytes);
}

void bl_state_digest_merge(struct bl_state_digest *digest, const struct bl_state_digest *other)
{
    digest->sum[0] += other->sum[0];
    digest->sum[1] += other->sum[1];
}

int bl_state_digest_equal(const struct bl_state_digest *a, const struct bl_state_digest *b)
{
    return a->sum[0] == b->sum[0] && a->sum[1] == b->sum[1];
}

void bl_state_digest_format(const struct bl_state_digest *digest,
                            char text[BL_STATE_DIGEST_TEXT_BYTES])
{
    snprintf(text, BL_STATE_DIGEST_TEXT_BYTES, "%016llx%016llx", (unsigned long long)digest->sum[0],
             (unsigned long long)digest->sum[1]);
}
