/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Byte planes: words rotated left by one, then plane p takes byte p of each. For each width a
 * scalar form, which says what is meant, and for the widths of training an AVX2 form of the same.
 */
#include "ckpt/codec.h"

#include <string.h>

static void split_scalar(uint8_t *const *to, const uint8_t *from, size_t first, size_t count,
                         uint32_t planes)
{
    for (size_t i = first; i < count; i++) {
        uint64_t word = 0;

        memcpy(&word, from + i * planes, planes); /* little-endian, as all of Belay */
        word = word << 1 | word >> (8 * planes - 1);
        for (uint32_t p = 0; p < planes; p++) {
            to[p][i] = (uint8_t)(word >> (8 * p));
        }
    }
}

static void join_scalar(uint8_t *to, const uint8_t *const *from, size_t first, size_t count,
                        uint32_t planes)
{
    for (size_t i = first; i < count; i++) {
        uint64_t word = 0;

        for (uint32_t p = 0; p < planes; p++) {
            word |= (uint64_t)from[p][i] << (8 * p);
        }
        word = word >> 1 | word << (8 * planes - 1);
        memcpy(to + i * planes, &word, planes);
    }
}

#if defined(__x86_64__)

#include <immintrin.h>

#define AVX2 static __attribute__((target("avx2")))

#define LOAD(at)         _mm256_loadu_si256((const __m256i *)(const void *)(at))
#define STORE(at, value) _mm256_storeu_si256((__m256i *)(void *)(at), (value))

/* In each 128-bit lane: the four bytes 0, the four bytes 1, ... of four words. Its own inverse. */
#define BYTES4                                                                                     \
    _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12, 1, 5, 9,   \
                     13, 2, 6, 10, 14, 3, 7, 11, 15)
/* The eight bytes 0, then the eight bytes 1 of eight words; and back. */
#define BYTES2                                                                                     \
    _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15, 0, 2, 4, 6, 8, 10, 12,  \
                     14, 1, 3, 5, 7, 9, 11, 13, 15)
#define WORDS2                                                                                     \
    _mm256_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15, 0, 8, 1, 9, 2, 10, 3,   \
                     11, 4, 12, 5, 13, 6, 14, 7, 15)

/* 32 words at a time: rotate, gather bytes within lanes, transpose 4 x 4 groups of four bytes, put
 * the halves of the lanes in order. Returns how many words were done. */
AVX2 size_t split4(uint8_t *const *to, const uint8_t *from, size_t count)
{
    const __m256i bytes = BYTES4, order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    size_t whole = count & ~(size_t)31;

    for (size_t i = 0; i < whole; i += 32) {
        __m256i v[4], t[4];

        for (int k = 0; k < 4; k++) {
            __m256i w = LOAD(from + 4 * i + 32 * (size_t)k);

            w = _mm256_or_si256(_mm256_slli_epi32(w, 1), _mm256_srli_epi32(w, 31));
            v[k] = _mm256_shuffle_epi8(w, bytes);
        }
        t[0] = _mm256_unpacklo_epi32(v[0], v[1]);
        t[1] = _mm256_unpackhi_epi32(v[0], v[1]);
        t[2] = _mm256_unpacklo_epi32(v[2], v[3]);
        t[3] = _mm256_unpackhi_epi32(v[2], v[3]);
        STORE(to[0] + i, _mm256_permutevar8x32_epi32(_mm256_unpacklo_epi64(t[0], t[2]), order));
        STORE(to[1] + i, _mm256_permutevar8x32_epi32(_mm256_unpackhi_epi64(t[0], t[2]), order));
        STORE(to[2] + i, _mm256_permutevar8x32_epi32(_mm256_unpacklo_epi64(t[1], t[3]), order));
        STORE(to[3] + i, _mm256_permutevar8x32_epi32(_mm256_unpackhi_epi64(t[1], t[3]), order));
    }
    return whole;
}

AVX2 size_t join4(uint8_t *to, const uint8_t *const *from, size_t count)
{
    const __m256i bytes = BYTES4, order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    size_t whole = count & ~(size_t)31;

    for (size_t i = 0; i < whole; i += 32) {
        __m256i q[4], t[4], v[4];

        for (int p = 0; p < 4; p++) {
            q[p] = _mm256_permutevar8x32_epi32(LOAD(from[p] + i), order);
        }
        t[0] = _mm256_unpacklo_epi32(q[0], q[1]);
        t[1] = _mm256_unpackhi_epi32(q[0], q[1]);
        t[2] = _mm256_unpacklo_epi32(q[2], q[3]);
        t[3] = _mm256_unpackhi_epi32(q[2], q[3]);
        v[0] = _mm256_unpacklo_epi64(t[0], t[2]);
        v[1] = _mm256_unpackhi_epi64(t[0], t[2]);
        v[2] = _mm256_unpacklo_epi64(t[1], t[3]);
        v[3] = _mm256_unpackhi_epi64(t[1], t[3]);
        for (int k = 0; k < 4; k++) {
            __m256i w = _mm256_shuffle_epi8(v[k], bytes);

            w = _mm256_or_si256(_mm256_srli_epi32(w, 1), _mm256_slli_epi32(w, 31));
            STORE(to + 4 * i + 32 * (size_t)k, w);
        }
    }
    return whole;
}

AVX2 size_t split2(uint8_t *const *to, const uint8_t *from, size_t count)
{
    const __m256i bytes = BYTES2;
    size_t whole = count & ~(size_t)31;

    for (size_t i = 0; i < whole; i += 32) {
        __m256i v[2];

        for (int k = 0; k < 2; k++) {
            __m256i w = LOAD(from + 2 * i + 32 * (size_t)k);

            w = _mm256_or_si256(_mm256_slli_epi16(w, 1), _mm256_srli_epi16(w, 15));
            v[k] = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(w, bytes), 0xd8);
        }
        STORE(to[0] + i, _mm256_permute2x128_si256(v[0], v[1], 0x20));
        STORE(to[1] + i, _mm256_permute2x128_si256(v[0], v[1], 0x31));
    }
    return whole;
}

AVX2 size_t join2(uint8_t *to, const uint8_t *const *from, size_t count)
{
    const __m256i words = WORDS2;
    size_t whole = count & ~(size_t)31;

    for (size_t i = 0; i < whole; i += 32) {
        __m256i low = LOAD(from[0] + i), high = LOAD(from[1] + i), v[2];

        v[0] = _mm256_permute2x128_si256(low, high, 0x20);
        v[1] = _mm256_permute2x128_si256(low, high, 0x31);
        for (int k = 0; k < 2; k++) {
            __m256i w = _mm256_shuffle_epi8(_mm256_permute4x64_epi64(v[k], 0xd8), words);

            w = _mm256_or_si256(_mm256_srli_epi16(w, 1), _mm256_slli_epi16(w, 15));
            STORE(to + 2 * i + 32 * (size_t)k, w);
        }
    }
    return whole;
}

static size_t split_simd(uint8_t *const *to, const uint8_t *from, size_t count, uint32_t planes)
{
    if (planes == 8 || !__builtin_cpu_supports("avx2")) {
        return 0;
    }
    return planes == 4 ? split4(to, from, count) : split2(to, from, count);
}

static size_t join_simd(uint8_t *to, const uint8_t *const *from, size_t count, uint32_t planes)
{
    if (planes == 8 || !__builtin_cpu_supports("avx2")) {
        return 0;
    }
    return planes == 4 ? join4(to, from, count) : join2(to, from, count);
}

#else

static size_t split_simd(uint8_t *const *to, const uint8_t *from, size_t count, uint32_t planes)
{
    (void)to;
    (void)from;
    (void)count;
    (void)planes;
    return 0;
}

static size_t join_simd(uint8_t *to, const uint8_t *const *from, size_t count, uint32_t planes)
{
    (void)to;
    (void)from;
    (void)count;
    (void)planes;
    return 0;
}

#endif

void ckpt_planes_split(uint8_t *const *to, const void *words, size_t count, uint32_t planes)
{
    size_t done;

    BL_ASSERT(planes == 2 || planes == 4 || planes == 8);
    done = split_simd(to, words, count, planes);
    switch (planes) { /* constants: the loops unroll */
    case 2:
        split_scalar(to, words, done, count, 2);
        break;
    case 4:
        split_scalar(to, words, done, count, 4);
        break;
    default:
        split_scalar(to, words, done, count, 8);
        break;
    }
}

void ckpt_planes_join(void *words, const uint8_t *const *from, size_t count, uint32_t planes)
{
    size_t done;

    BL_ASSERT(planes == 2 || planes == 4 || planes == 8);
    done = join_simd(words, from, count, planes);
    switch (planes) {
    case 2:
        join_scalar(words, from, done, count, 2);
        break;
    case 4:
        join_scalar(words, from, done, count, 4);
        break;
    default:
        join_scalar(words, from, done, count, 8);
        break;
    }
}
