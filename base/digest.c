/* SPDX-License-Identifier: Apache-2.0 */
#include "base/digest.h"

#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#include "base/error.h"

/* Constants of the state digest; digest.h gives the formula. Never change them: digests are
 * stored. They are the fractional bits of sqrt(2), and of sqrt(5) made odd. */
#define DIGEST_SEED 0x6a09e667f3bcc908ULL
#define DIGEST_STEP 0x3c6ef372fe94f82bULL

uint64_t bl_xxh3(const void *data, size_t bytes)
{
    return XXH3_64bits(data, bytes);
}

uint64_t bl_mix64(uint64_t x)
{
    x += 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

/* The loop for one element size; `elem_bytes` is a constant in each of its inlined copies. */
static inline __attribute__((always_inline)) void
digest_add_sized(struct bl_state_digest *digest, uint64_t name_hash, uint64_t first,
                 const unsigned char *bits, uint64_t count, size_t elem_bytes)
{
    uint64_t key = (name_hash ^ DIGEST_SEED) + first * DIGEST_STEP;
    uint64_t sum0 = 0;
    uint64_t sum1 = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t word = 0;
        memcpy(&word, bits + i * elem_bytes, elem_bytes);
        uint64_t factor = ((key << 32) | (key >> 32)) | 1;
        /* One wide multiply per element bounds the speed: both sums live on it. */
        unsigned __int128 product = (unsigned __int128)(word ^ key) * factor;
        uint64_t low = (uint64_t)product;
        uint64_t high = (uint64_t)(product >> 64);
        sum0 += low ^ high;
        sum1 += low ^ ((high << 32) | (high >> 32));
        key += DIGEST_STEP;
    }
    digest->sum[0] += sum0;
    digest->sum[1] += sum1;
}

void bl_state_digest_add(struct bl_state_digest *digest, uint64_t name_hash, uint64_t first,
                         const void *bits, uint64_t count, uint32_t elem_bytes)
{
    switch (elem_bytes) {
    case 1:
        digest_add_sized(digest, name_hash, first, bits, count, 1);
        break;
    case 2:
        digest_add_sized(digest, name_hash, first, bits, count, 2);
        break;
    case 4:
        digest_add_sized(digest, name_hash, first, bits, count, 4);
        break;
    case 8:
        digest_add_sized(digest, name_hash, first, bits, count, 8);
        break;
    default:
        BL_ASSERT(elem_bytes == 8); /* 1, 2, 4 or 8: nothing else */
    }
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
