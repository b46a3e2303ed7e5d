/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/clock.h"
#include "tests/wire/message_random.h"
#include "wire/codec.h"
#include "wire/codec_table.h"

#define ROUNDS 60

static uint64_t seed_print(const char *test)
{
    const char *text = getenv("BELAY_TEST_SEED");
    uint64_t seed = text ? strtoull(text, NULL, 0) : bl_now_ns();
    printf("%s: BELAY_TEST_SEED=0x%llx\n", test, (unsigned long long)seed);
    return seed;
}

static void test_every_table_fits_its_struct_and_its_proto(void **state)
{
    (void)state;
    for (unsigned i = 0; i < message_type_count; i++) {
        struct bl_errmsg msg = {""};
        const struct codec_table *table = codec_table_find(message_types[i]);
        assert_non_null(table);
        if (codec_table_verify(table, &msg)) {
            fail_msg("%s", msg.text);
        }
        assert_int_equal(table->size, wire_message_size(message_types[i]));
    }
}

static void test_every_message_comes_back_when_filled_at_random(void **state)
{
    (void)state;
    struct random_state random = {seed_print("round trip")};
    for (unsigned i = 0; i < message_type_count * ROUNDS; i++) {
        enum wire_type type = message_types[i % message_type_count];
        void *out = calloc(1, wire_message_size(type));
        void *back = calloc(1, wire_message_size(type));
        uint8_t *bytes;
        size_t count;
        struct bl_errmsg msg = {""};
        message_random(type, out, &random);
        if (wire_message_encode(type, out, &bytes, &count, &msg) ||
            wire_message_decode(type, back, bytes, count, &msg)) {
            fail_msg("%s: %s", wire_type_name(type), msg.text);
        }
        if (!wire_message_equal(type, out, back)) {
            fail_msg("%s differs after the round trip", wire_type_name(type));
        }
        wire_message_close(type, out);
        wire_message_close(type, back);
        free(bytes);
        free(out);
        free(back);
    }
}

static void test_a_zeroed_message_comes_back(void **state)
{
    (void)state;
    for (unsigned i = 0; i < message_type_count; i++) {
        enum wire_type type = message_types[i];
        void *out = calloc(1, wire_message_size(type));
        void *back = calloc(1, wire_message_size(type));
        uint8_t *bytes;
        size_t count;
        assert_int_equal(wire_message_encode(type, out, &bytes, &count, NULL), 0);
        assert_int_equal(wire_message_decode(type, back, bytes, count, NULL), 0);
        assert_true(wire_message_equal(type, out, back));
        wire_message_close(type, back);
        free(bytes);
        free(out);
        free(back);
    }
}

static void test_a_plan_of_all_ranks_is_encoded_and_one_more_is_refused(void **state)
{
    (void)state;
    struct wire_rank_directive out = {.has_plan = 1, .rank = WIRE_RANKS_MAX - 1};
    struct wire_rank_directive back;
    uint8_t *bytes;
    size_t count;
    struct bl_errmsg msg = {""};
    out.plan.world = WIRE_RANKS_MAX;
    out.plan.members = calloc(WIRE_RANKS_MAX + 1, sizeof(*out.plan.members));
    for (uint32_t i = 0; i < WIRE_RANKS_MAX; i++) {
        struct wire_member *member = &out.plan.members[i];
        member->incarnation = bl_mix64(i);
        snprintf(member->node, sizeof(member->node), "node-%04u", i / 8);
        snprintf(member->endpoint, sizeof(member->endpoint), "127.0.0.1:%u/shm-%016u", i, i);
        snprintf(member->vote_addr, sizeof(member->vote_addr), "127.0.0.1:%u", i);
    }
    assert_int_equal(wire_rank_directive_encode(&out, &bytes, &count, &msg), 0);
    assert_true(count > WIRE_FRAME_PAYLOAD_MAX);
    assert_int_equal(wire_rank_directive_decode(&back, bytes, count, &msg), 0);
    assert_true(wire_message_equal(WIRE_TYPE_RANK_DIRECTIVE, &out, &back));
    wire_rank_directive_free(&back);
    free(bytes);
    out.plan.world++;
    assert_int_equal(wire_rank_directive_encode(&out, &bytes, &count, &msg), BL_ELIMIT);
    assert_non_null(strstr(msg.text, "members"));
    wire_rank_directive_free(&out);
}

static void test_a_text_without_its_end_is_not_sent(void **state)
{
    (void)state;
    struct wire_shim_kept kept = {.arena = 1};
    uint8_t *bytes;
    size_t count;
    memset(kept.text, 'x', sizeof(kept.text));
    assert_int_equal(wire_shim_kept_encode(&kept, &bytes, &count, NULL), BL_EFORMAT);
}

/* Hand-made protobuf: `field` of wire type 2 with `bytes`. */
static size_t put_bytes(uint8_t *out, uint32_t field, const void *bytes, size_t count)
{
    size_t at = 0;
    out[at++] = (uint8_t)(field << 3 | 2);
    for (size_t left = count;; left >>= 7) {
        out[at++] = (uint8_t)((left & 127) | (left > 127 ? 128 : 0));
        if (left <= 127) {
            break;
        }
    }
    memcpy(out + at, bytes, count);
    return at + count;
}

static void test_hostile_payloads_are_refused_with_a_reason(void **state)
{
    (void)state;
    static uint8_t bytes[1 << 20];
    char text[400];
    struct bl_errmsg msg = {""};
    struct wire_rank_directive directive;
    struct wire_hello hello;
    struct wire_report report;

    /* A text longer than its field. */
    memset(text, 'n', sizeof(text));
    size_t count = put_bytes(bytes, 5, text, sizeof(text));
    assert_int_equal(wire_hello_decode(&hello, bytes, count, &msg), BL_ELIMIT);
    assert_non_null(strstr(msg.text, "node"));

    /* An enum value that is none. */
    const uint8_t role[] = {3 << 3, 99};
    assert_int_equal(wire_hello_decode(&hello, role, sizeof(role), &msg), BL_EFORMAT);

    /* A rank outside its plan. */
    const uint8_t has_plan[] = {6 << 3, 1, 7 << 3, 5};
    assert_int_equal(wire_rank_directive_decode(&directive, has_plan, sizeof(has_plan), &msg),
                     BL_EFORMAT);

    /* An extent of a tensor that is not there: report.arenas[0].extents.extents[0]. */
    const uint8_t extent[] = {10 << 3 | 2, 6, 4 << 3 | 2, 4, 2 << 3 | 2, 2, 1 << 3, 7};
    assert_int_equal(wire_report_decode(&report, extent, sizeof(extent), &msg), BL_EFORMAT);

    /* Half a million empty processes in a megabyte. */
    for (size_t i = 0; i < sizeof(bytes); i += 2) {
        bytes[i] = 9 << 3 | 2;
        bytes[i + 1] = 0;
    }
    assert_int_equal(wire_report_decode(&report, bytes, sizeof(bytes), &msg), BL_ELIMIT);

    /* No protobuf at all. */
    memset(bytes, 0xff, sizeof(bytes));
    assert_int_equal(wire_report_decode(&report, bytes, sizeof(bytes), &msg), BL_EFORMAT);
}

static void test_a_damaged_message_is_refused_or_still_within_bounds(void **state)
{
    (void)state;
    struct random_state random = {seed_print("damage")};
    for (unsigned i = 0; i < message_type_count * ROUNDS; i++) {
        enum wire_type type = message_types[i % message_type_count];
        void *out = calloc(1, wire_message_size(type));
        uint8_t *bytes;
        size_t count;
        message_random(type, out, &random);
        assert_int_equal(wire_message_encode(type, out, &bytes, &count, NULL), 0);
        wire_message_close(type, out);
        for (uint64_t k = 0; count && k < 1 + random_below(&random, 8); k++) {
            bytes[random_below(&random, count)] = (uint8_t)random_next(&random);
        }
        count -= count ? random_below(&random, 3) % count : 0;
        if (!wire_message_decode(type, out, bytes, count, NULL)) {
            wire_message_close(type, out);
        }
        free(bytes);
        free(out);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_table_fits_its_struct_and_its_proto),
        cmocka_unit_test(test_every_message_comes_back_when_filled_at_random),
        cmocka_unit_test(test_a_zeroed_message_comes_back),
        cmocka_unit_test(test_a_plan_of_all_ranks_is_encoded_and_one_more_is_refused),
        cmocka_unit_test(test_a_text_without_its_end_is_not_sent),
        cmocka_unit_test(test_hostile_payloads_are_refused_with_a_reason),
        cmocka_unit_test(test_a_damaged_message_is_refused_or_still_within_bounds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
