/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The state digest four words at a time. Chosen at run time, so that one binary runs on any x86-64;
 * integer arithmetic only, hence no difference to the scalar path but speed.
 */
#include "base/digest_simd.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#define AVX2_INLINE static inline __attribute__((always_inline, target("avx2")))

/* Four elements, widened with zeros. */
AVX2_INLINE __m256i simd_load(const unsigned char *at, size_t elem_bytes)
{
    int word;
    switch (elem_bytes) {
    case 1:
        memcpy(&word, at, sizeof(word));
        return _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(word));
    case 2:
        return _mm256_cvtepu16_epi64(_mm_loadl_epi64((const __m128i *)(const void *)at));
    case 4:
        return _mm256_cvtepu32_epi64(_mm_loadu_si128((const __m128i *)(const void *)at));
    default:
        return _mm256_loadu_si256((const __m256i *)(const void *)at);
    }
}

/* low32(z) * high32(z) + rotl64(z, 32) */
AVX2_INLINE __m256i simd_f(__m256i z)
{
    __m256i turned = _mm256_shuffle_epi32(z, 0xb1);
    return _mm256_add_epi64(_mm256_mul_epu32(z, turned), turned);
}

AVX2_INLINE uint64_t simd_sum(__m256i v)
{
    uint64_t lanes[4];
    _mm256_storeu_si256((__m256i *)(void *)lanes, v);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

AVX2_INLINE uint64_t simd_add_sized(struct bl_state_digest *digest, uint64_t key,
                                    const unsigned char *bits, uint64_t count, size_t elem_bytes)
{
    uint64_t start[4];
    for (uint64_t i = 0; i < 4; i++) {
        start[i] = key + i * BL_DIGEST_STEP;
    }
    __m256i keys = _mm256_loadu_si256((const __m256i *)(const void *)start);
    const __m256i step = _mm256_set1_epi64x((long long)(4 * BL_DIGEST_STEP));
    __m256i sum0 = _mm256_setzero_si256();
    __m256i sum1 = _mm256_setzero_si256();
    uint64_t whole = count & ~(uint64_t)3;
    for (uint64_t i = 0; i < whole; i += 4) {
        __m256i f = simd_f(_mm256_xor_si256(simd_load(bits + i * elem_bytes, elem_bytes), keys));
        __m256i mix = _mm256_xor_si256(f, _mm256_srli_epi64(f, 29));
        sum0 = _mm256_add_epi64(sum0, mix);
        sum1 = _mm256_add_epi64(sum1, simd_f(mix));
        keys = _mm256_add_epi64(keys, step);
    }
    digest->sum[0] += simd_sum(sum0);
    digest->sum[1] += simd_sum(sum1);
    return whole;
}

static __attribute__((target("avx2"))) uint64_t simd_add_avx2(struct bl_state_digest *digest,
                                                              uint64_t key,
                                                              const unsigned char *bits,
                                                              uint64_t count, uint32_t elem_bytes)
{
    switch (elem_bytes) {
    case 1:
        return simd_add_sized(digest, key, bits, count, 1);
    case 2:
        return simd_add_sized(digest, key, bits, count, 2);
    case 4:
        return simd_add_sized(digest, key, bits, count, 4);
    case 8:
        return simd_add_sized(digest, key, bits, count, 8);
    default:
        return 0;
    }
}

uint64_t bl_digest_add_simd(struct bl_state_digest *digest, uint64_t key, const void *bits,
                            uint64_t count, uint32_t elem_bytes)
{
    if (count < 4 || !__builtin_cpu_supports("avx2")) {
        return 0;
    }
    return simd_add_avx2(digest, key, bits, count, elem_bytes);
}

#else

uint64_t bl_digest_add_simd(struct bl_state_digest *digest, uint64_t key, const void *bits,
                            uint64_t count, uint32_t elem_bytes)
{
    (void)digest;
    (void)key;
    (void)bits;
    (void)count;
    (void)elem_bytes;
    return 0;
}

#endif
