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
#include "wire/frame.h"

static uint8_t *encode(uint16_t type, uint32_t flags, const void *payload, size_t bytes,
                       size_t *ret_count)
{
    struct wire_frame frame = {.type = type,
                               .flags = flags,
                               .generation = 7,
                               .incarnation = 9,
                               .payload = payload,
                               .payload_bytes = bytes};
    uint8_t *out = malloc(wire_frame_bytes(bytes));
    assert_int_equal(wire_frame_encode(&frame, out, NULL), 0);
    *ret_count = wire_frame_bytes(bytes);
    return out;
}

static void test_header_lies_as_the_protocol_says(void **state)
{
    (void)state;
    size_t count;
    uint8_t *out = encode(WIRE_TYPE_VOTE, WIRE_FRAME_SKIP, "abc", 3, &count);
    const uint8_t head[] = {'B', 'L', 'Y', '1', 1, 0, 6, 0, 3, 0, 0, 0, 1, 0, 0, 0,
                            7,   0,   0,   0,   0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0};
    assert_int_equal(count, WIRE_FRAME_HEADER + 3);
    assert_memory_equal(out, head, sizeof(head));
    assert_memory_equal(out + WIRE_FRAME_HEADER, "abc", 3);
    free(out);
}

static void test_frames_come_out_when_bytes_come_in_any_pieces(void **state)
{
    (void)state;
    struct random_state random = {bl_now_ns()};
    printf("pieces: seed 0x%llx\n", (unsigned long long)random.state);
    static uint8_t payload[3 * WIRE_FRAME_PAYLOAD_MAX + 5];
    for (size_t i = 0; i < sizeof(payload); i++) {
        payload[i] = (uint8_t)random_next(&random);
    }
    const size_t sizes[] = {
        0, 1, 100, WIRE_FRAME_PAYLOAD_MAX, WIRE_FRAME_PAYLOAD_MAX + 1, sizeof(payload), 17};
    struct wire_decoder decoder;
    wire_decoder_init(&decoder, 0);
    for (size_t k = 0; k < sizeof(sizes) / sizeof(sizes[0]); k++) {
        size_t count;
        uint8_t *out = encode(WIRE_TYPE_REPORT, 0, payload, sizes[k], &count);
        struct wire_frame frame;
        int got = 0;
        for (size_t at = 0; at < count;) {
            size_t piece = 1 + random_below(&random, sizes[k] < 1000 ? 30 : 300000);
            piece = piece > count - at ? count - at : piece;
            assert_int_equal(got, 0);
            assert_int_equal(wire_decoder_feed(&decoder, out + at, piece), 0);
            at += piece;
            got = wire_decoder_next(&decoder, &frame, NULL);
        }
        assert_int_equal(got, 1);
        assert_int_equal(frame.type, WIRE_TYPE_REPORT);
        assert_int_equal(frame.generation, 7);
        assert_int_equal(frame.incarnation, 9);
        assert_int_equal(frame.payload_bytes, sizes[k]);
        if (sizes[k]) {
            assert_memory_equal(frame.payload, payload, sizes[k]);
        }
        assert_int_equal(wire_decoder_next(&decoder, &frame, NULL), 0);
        free(out);
    }
    wire_decoder_close(&decoder);
}

static void test_raw_bytes_follow_a_frame(void **state)
{
    (void)state;
    struct wire_decoder decoder;
    struct wire_frame frame;
    char raw[16] = "";
    size_t count;
    uint8_t *out = encode(WIRE_TYPE_BULK_DATA, 0, "x", 1, &count);
    wire_decoder_init(&decoder, 0);
    assert_int_equal(wire_decoder_feed(&decoder, out, count), 0);
    assert_int_equal(wire_decoder_feed(&decoder, "raw bytes", 9), 0);
    assert_int_equal(wire_decoder_next(&decoder, &frame, NULL), 1);
    assert_int_equal(wire_decoder_raw(&decoder, raw, 4), 4);
    assert_int_equal(wire_decoder_raw(&decoder, raw + 4, 10), 5);
    assert_string_equal(raw, "raw bytes");
    wire_decoder_close(&decoder);
    free(out);
}

/* Changes `width` bytes at `at` of a good frame; what the decoder says. */
static int damaged(size_t at, uint64_t value, size_t width, size_t message_max)
{
    struct wire_decoder decoder;
    struct wire_frame frame;
    size_t count;
    uint8_t *out = encode(WIRE_TYPE_VOTE, 0, "payload", 7, &count);
    memcpy(out + at, &value, width);
    wire_decoder_init(&decoder, message_max);
    assert_int_equal(wire_decoder_feed(&decoder, out, count), 0);
    int rc = wire_decoder_next(&decoder, &frame, NULL);
    if (rc < 0) { /* and it stays broken */
        assert_int_equal(wire_decoder_next(&decoder, &frame, NULL), rc);
    }
    wire_decoder_close(&decoder);
    free(out);
    return rc;
}

static void test_bad_frames_break_the_stream(void **state)
{
    (void)state;
    assert_int_equal(damaged(0, 'X', 1, 0), BL_EFORMAT);
    assert_int_equal(damaged(4, 2, 2, 0), BL_EVERSION);
    assert_int_equal(damaged(6, 9999, 2, 0), BL_EPROTO);
    assert_int_equal(damaged(8, WIRE_FRAME_PAYLOAD_MAX + 1, 4, 0), BL_ELIMIT);
    assert_int_equal(damaged(8, 0xffffffff, 4, 0), BL_ELIMIT);
    assert_int_equal(damaged(32, 1, 8, 0), BL_EDIGEST);
    assert_int_equal(damaged(45, 'X', 1, 0), BL_EDIGEST);
    assert_int_equal(damaged(0, 'B', 1, 6), BL_ELIMIT);
    assert_int_equal(damaged(0, 'B', 1, 7), 1);
}

static void test_an_unknown_type_is_passed_over_when_it_says_so(void **state)
{
    (void)state;
    struct wire_decoder decoder;
    struct wire_frame frame;
    size_t count;
    size_t more;
    static uint8_t large[WIRE_FRAME_PAYLOAD_MAX + 10];
    uint8_t *unknown = encode(9999, WIRE_FRAME_SKIP, large, sizeof(large), &count);
    uint8_t *known = encode(WIRE_TYPE_VOTE, 0, "v", 1, &more);
    wire_decoder_init(&decoder, 0);
    assert_int_equal(wire_decoder_feed(&decoder, unknown, count), 0);
    assert_int_equal(wire_decoder_next(&decoder, &frame, NULL), 0);
    assert_int_equal(wire_decoder_feed(&decoder, known, more), 0);
    assert_int_equal(wire_decoder_next(&decoder, &frame, NULL), 1);
    assert_int_equal(frame.type, WIRE_TYPE_VOTE);
    wire_decoder_close(&decoder);
    free(unknown);
    free(known);
}

static void test_another_type_within_a_message_breaks_the_stream(void **state)
{
    (void)state;
    struct wire_decoder decoder;
    struct wire_frame frame;
    size_t count;
    size_t more;
    static uint8_t large[WIRE_FRAME_PAYLOAD_MAX + 10];
    uint8_t *first = encode(WIRE_TYPE_REPORT, 0, large, sizeof(large), &count);
    uint8_t *other = encode(WIRE_TYPE_VOTE, 0, "v", 1, &more);
    wire_decoder_init(&decoder, 0);
    assert_int_equal(wire_decoder_feed(&decoder, first, WIRE_FRAME_HEADER + WIRE_FRAME_PAYLOAD_MAX),
                     0);
    assert_int_equal(wire_decoder_next(&decoder, &frame, NULL), 0);
    assert_int_equal(wire_decoder_feed(&decoder, other, more), 0);
    assert_int_equal(wire_decoder_next(&decoder, &frame, NULL), BL_EPROTO);
    wire_decoder_close(&decoder);
    free(first);
    free(other);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_header_lies_as_the_protocol_says),
        cmocka_unit_test(test_frames_come_out_when_bytes_come_in_any_pieces),
        cmocka_unit_test(test_raw_bytes_follow_a_frame),
        cmocka_unit_test(test_bad_frames_break_the_stream),
        cmocka_unit_test(test_an_unknown_type_is_passed_over_when_it_says_so),
        cmocka_unit_test(test_another_type_within_a_message_breaks_the_stream),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
