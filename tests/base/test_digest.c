/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>
#include <xxhash.h>

#include "base/digest.h"
#include "base/digest_simd.h"

#define ELEMS 1000

static uint64_t words[ELEMS];

static void words_fill(uint64_t seed)
{
    for (uint64_t i = 0; i < ELEMS; i++) {
        words[i] = bl_mix64(seed + i);
    }
}

static uint64_t digest_f(uint64_t z)
{
    uint64_t low = z & 0xffffffffU;
    uint64_t high = z >> 32;
    return low * high + (low << 32) + high;
}

/* The formula of digest.h, written a second time in the plainest way. */
static struct bl_state_digest digest_oracle(uint64_t name, uint64_t first, const void *bits,
                                            uint64_t count, uint32_t elem_bytes)
{
    struct bl_state_digest ret = {{0, 0}};
    for (uint64_t i = 0; i < count; i++) {
        uint64_t word = 0;
        const unsigned char *p = (const unsigned char *)bits + i * elem_bytes;
        for (uint32_t b = 0; b < elem_bytes; b++) {
            word |= (uint64_t)p[b] << (8 * b);
        }
        uint64_t key = (name ^ 0x6a09e667f3bcc908ULL) + (first + i) * 0x3c6ef372fe94f82bULL;
        uint64_t f = digest_f(word ^ key);
        uint64_t mix = f ^ (f >> 29);
        ret.sum[0] += mix;
        ret.sum[1] += digest_f(mix);
    }
    return ret;
}

static void test_digest_matches_its_formula_for_each_element_size(void **state)
{
    (void)state;
    words_fill(7);
    const uint32_t sizes[] = {1, 2, 4, 8};
    for (size_t s = 0; s < 4; s++) {
        struct bl_state_digest got = {{0, 0}};
        bl_state_digest_add(&got, 0x1234, 1ULL << 40, words, ELEMS, sizes[s]);
        struct bl_state_digest want = digest_oracle(0x1234, 1ULL << 40, words, ELEMS, sizes[s]);
        assert_true(bl_state_digest_equal(&got, &want));
    }
}

static void test_digest_is_the_same_with_and_without_vectors(void **state)
{
    (void)state;
    words_fill(17);
    const uint32_t sizes[] = {1, 2, 4, 8};
    for (size_t s = 0; s < 4; s++) {
        /* Odd counts and addresses: the vector path leaves a rest, and reads unaligned. */
        for (uint64_t count = 0; count < 70; count++) {
            const unsigned char *bits = (const unsigned char *)words + count;
            struct bl_state_digest fast = {{0, 0}};
            struct bl_state_digest plain = {{0, 0}};
            bl_state_digest_add(&fast, 3, count, bits, count, sizes[s]);
            bl_digest_add_scalar(&plain, (3 ^ BL_DIGEST_SEED) + count * BL_DIGEST_STEP, bits, count,
                                 sizes[s]);
            assert_true(bl_state_digest_equal(&fast, &plain));
        }
    }
}

static void test_digest_adds_up_whatever_the_cut(void **state)
{
    (void)state;
    words_fill(11);
    struct bl_state_digest whole = {{0, 0}};
    bl_state_digest_add(&whole, 99, 0, words, ELEMS, 8);
    for (uint64_t cut = 0; cut <= ELEMS; cut += 37) {
        struct bl_state_digest tail = {{0, 0}};
        struct bl_state_digest head = {{0, 0}};
        bl_state_digest_add(&tail, 99, cut, words + cut, ELEMS - cut, 8);
        bl_state_digest_add(&head, 99, 0, words, cut, 8);
        bl_state_digest_merge(&tail, &head);
        assert_true(bl_state_digest_equal(&whole, &tail));
    }
}

static void test_digest_differs_for_one_bit_a_swap_a_name_and_an_index(void **state)
{
    (void)state;
    words_fill(13);
    struct bl_state_digest whole = {{0, 0}};
    bl_state_digest_add(&whole, 5, 0, words, ELEMS, 8);
    for (unsigned bit = 0; bit < 64; bit++) {
        struct bl_state_digest other = {{0, 0}};
        words[bit * 7] ^= 1ULL << bit;
        bl_state_digest_add(&other, 5, 0, words, ELEMS, 8);
        words[bit * 7] ^= 1ULL << bit;
        assert_true(other.sum[0] != whole.sum[0] && other.sum[1] != whole.sum[1]);
    }
    struct bl_state_digest swapped = {{0, 0}};
    uint64_t keep = words[3];
    words[3] = words[4];
    words[4] = keep;
    bl_state_digest_add(&swapped, 5, 0, words, ELEMS, 8);
    assert_false(bl_state_digest_equal(&whole, &swapped));
    words_fill(13);
    struct bl_state_digest renamed = {{0, 0}};
    bl_state_digest_add(&renamed, 6, 0, words, ELEMS, 8);
    assert_false(bl_state_digest_equal(&whole, &renamed));
    struct bl_state_digest moved = {{0, 0}};
    bl_state_digest_add(&moved, 5, 1, words, ELEMS, 8);
    assert_false(bl_state_digest_equal(&whole, &moved));
}

static void test_digest_sees_zeros_and_small_opposite_changes(void **state)
{
    (void)state;
    memset(words, 0, sizeof(words));
    struct bl_state_digest zeros = {{0, 0}};
    bl_state_digest_add(&zeros, 5, 0, words, 3, 8);
    struct bl_state_digest fewer = {{0, 0}};
    bl_state_digest_add(&fewer, 5, 0, words, 2, 8);
    assert_false(bl_state_digest_equal(&zeros, &fewer));
    /* +1, -2, +1 on neighbours cancels in any sum that is linear in the bits. */
    words[0] = words[2] = 1001;
    words[1] = 998;
    struct bl_state_digest bent = {{0, 0}};
    bl_state_digest_add(&bent, 5, 0, words, 3, 8);
    words[0] = words[1] = words[2] = 1000;
    struct bl_state_digest flat = {{0, 0}};
    bl_state_digest_add(&flat, 5, 0, words, 3, 8);
    assert_true(bent.sum[0] != flat.sum[0] && bent.sum[1] != flat.sum[1]);
}

/* Golden: these numbers are in stored manifests. */
static void test_digest_keeps_its_golden_values(void **state)
{
    (void)state;
    assert_int_equal(bl_xxh3("abc", 3), 0x78af5f94892f3950ULL);
    assert_int_equal(bl_mix64(0), 0xe220a8397b1dcdafULL);
    const float values[4] = {1.0F, -2.5F, 0.0F, 1e-20F};
    struct bl_state_digest digest = {{0, 0}};
    bl_state_digest_add(&digest, bl_xxh3("tok_embeddings", 14), 0, values, 4, 4);
    char text[BL_STATE_DIGEST_TEXT_BYTES];
    bl_state_digest_format(&digest, text);
    assert_string_equal(text, "73dbc42045f42e0d4c9531e33dc7dc0e");
}

/* The library's XXH3 is the reference; ours is the same source with other instructions. */
static void test_xxh3_is_the_library_s_at_every_length_with_and_without_vectors(void **state)
{
    static unsigned char bytes[70001];

    (void)state;
    for (size_t i = 0; i < sizeof(bytes); i++) {
        bytes[i] = (unsigned char)bl_mix64(i);
    }
    for (size_t n = 0; n <= sizeof(bytes) - 1; n += n < 2100 ? 1 : 997) {
        uint64_t want = XXH3_64bits(bytes + 1, n), got = 0;

        assert_int_equal(bl_xxh3(bytes + 1, n), want);
        assert_true(bl_xxh3_simd(bytes + 1, n, &got) == 0 || got == want);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_digest_matches_its_formula_for_each_element_size),
        cmocka_unit_test(test_digest_is_the_same_with_and_without_vectors),
        cmocka_unit_test(test_digest_adds_up_whatever_the_cut),
        cmocka_unit_test(test_digest_differs_for_one_bit_a_swap_a_name_and_an_index),
        cmocka_unit_test(test_digest_sees_zeros_and_small_opposite_changes),
        cmocka_unit_test(test_digest_keeps_its_golden_values),
        cmocka_unit_test(test_xxh3_is_the_library_s_at_every_length_with_and_without_vectors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
