/* SPDX-License-Identifier: Apache-2.0 */
/* Safetensors headers and JSON from strangers: what is taken, and what is refused with which code.
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/part.h"
#include "ckpt/text.h"

static int count_entry(void *arg, const struct ckpt_st_entry *entry)
{
    (void)entry;
    ++*(uint32_t *)arg;
    return 0;
}

/* Decodes a header with this JSON in a file with `data_bytes` after it. */
static int decode(const char *json, uint64_t data_bytes, uint32_t *ret_count, struct bl_errmsg *why)
{
    size_t n = strlen(json);
    uint8_t *data = malloc(n + 8); /* exactly: a sanitizer sees a read beyond */
    int rc;

    assert_non_null(data);
    for (int i = 0; i < 8; i++) {
        data[i] = (uint8_t)(n >> (8 * i));
    }
    memcpy(data + 8, json, n);
    *ret_count = 0;
    rc = ckpt_st_header_decode(data, n + 8, n + 8 + data_bytes, count_entry, ret_count, why);
    free(data);
    return rc;
}

static void test_header_takes_what_the_format_allows(void **state)
{
    static const struct {
        const char *json;
        uint32_t entries;
    } good[] = {
        {"{}", 0},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[0,16]}}", 1},
        {"{ \"a\" : { \"data_offsets\" : [ 0 , 16 ] , \"shape\":[4],\"dtype\":\"F32\"} }   ", 1},
        {"{\"__metadata__\":{\"x\":\"\\u00e9\\ud83d\\ude00\\n\"},"
         "\"a\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[3,4]},"
         "\"b\":{\"dtype\":\"BF16\",\"shape\":[0,7],\"data_offsets\":[16,16]}}",
         2},
    };

    (void)state;
    for (uint32_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        struct bl_errmsg why = {0};
        uint32_t count = 0;

        if (decode(good[i].json, 16, &count, &why) != 0) {
            fail_msg("%s: %s", good[i].json, why.text);
        }
        assert_int_equal(count, good[i].entries);
    }
}

static void test_header_refuses_hostile_ones(void **state)
{
#define E(fields) "{\"a\":{" fields "}}"
    static const struct {
        const char *json;
        int code;
    } bad[] = {
        {"[]", BL_EFORMAT},
        {"{}x", BL_EFORMAT},
        {"{\"a\"}", BL_EFORMAT},
        {"{\"a\":1}", BL_EFORMAT},
        {"{\"a\":{}}", BL_EFORMAT},
        {"{\"a\":{\"dtype\"", BL_EFORMAT},
        {"{\"a", BL_EFORMAT},
        {"{\"a\\", BL_EFORMAT},
        {"{\"\\u12", BL_EFORMAT},
        {"{\"\\u0000\":{}}", BL_EFORMAT},
        {"{\"\\ud800\":{}}", BL_EFORMAT},
        {"{\"\\udc00\":{}}", BL_EFORMAT},
        {"{\"a\nb\":{}}", BL_EFORMAT},
        {E("\"dtype\":\"F31\",\"shape\":[4],\"data_offsets\":[0,16]"), BL_EFORMAT},
        {E("\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,15]"), BL_EFORMAT},
        {E("\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[4,20]"), BL_EFORMAT},
        {E("\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[16,0]"), BL_EFORMAT},
        {E("\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0]"), BL_EFORMAT},
        {E("\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16,16]"), BL_ELIMIT},
        {E("\"dtype\":\"F32\",\"shape\":[-4],\"data_offsets\":[0,16]"), BL_EFORMAT},
        {E("\"dtype\":\"F32\",\"shape\":[4.0],\"data_offsets\":[0,16]"), BL_EFORMAT},
        {E("\"dtype\":\"F32\",\"shape\":[04],\"data_offsets\":[0,16]"), BL_EFORMAT},
        {E("\"dtype\":\"F32\",\"shape\":[4e0],\"data_offsets\":[0,16]"), BL_EFORMAT},
        {E("\"dtype\":\"F32\",\"shape\":[18446744073709551616],\"data_offsets\":[0,16]"),
         BL_EFORMAT},
        {E("\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]"),
         BL_EFORMAT},
        {E("\"dtype\":\"F32\",\"shape\":[4611686018427387905],\"data_offsets\":[0,4]"), BL_EFORMAT},
        {E("\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1],\"data_offsets\":[0,4]"), BL_ELIMIT},
        {E("\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]"),
         BL_EFORMAT},
        {E("\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16],\"more\":1"), BL_EFORMAT},
        {E("\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16],"), BL_EFORMAT},
        {E("\"dtype\":\"F32AAAAAAAAAAAAAAAAAAAAAA\",\"shape\":[4],\"data_offsets\":[0,16]"),
         BL_ELIMIT},
        {"{\"__metadata__\":nul}", BL_EFORMAT},
        {"{\"__metadata__\":{\"x\":[1,]}}", BL_EFORMAT},
        {"{\"__metadata__\":{\"x\":01}}", BL_EFORMAT},
        {"{\"__metadata__\":{\"x\"}}", BL_EFORMAT},
    };

    (void)state;
    for (uint32_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct bl_errmsg why = {0};
        uint32_t count = 0;
        int rc = decode(bad[i].json, 16, &count, &why);

        if (rc != bad[i].code || why.text[0] == '\0') {
            fail_msg("%s: %d %s", bad[i].json, rc, why.text);
        }
    }
}

static void test_header_length_is_checked_before_memory_is_taken(void **state)
{
    static const uint8_t lengths[][8] = {
        {0},
        {1},
        {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff},
        {0, 0, 0, 0, 1},
        {0, 0xe2, 0xf5, 0x05}, /* just over the limit */
        {100},                 /* longer than the file */
    };
    uint64_t bytes;

    (void)state;
    for (uint32_t i = 0; i < 6; i++) {
        int rc = ckpt_st_header_bytes(lengths[i], 50, &bytes, NULL);

        assert_true(rc == BL_EFORMAT || rc == BL_ELIMIT);
    }
    assert_int_equal(ckpt_st_header_bytes((const uint8_t[8]){42}, 50, &bytes, NULL), 0);
    assert_int_equal(bytes, 50);
}

static void test_reader_does_not_recurse_on_deep_input(void **state)
{
    struct ckpt_json reader;
    const char *from;
    char *deep = malloc(2000001);

    (void)state;
    assert_non_null(deep);
    memset(deep, '[', 2000000);
    ckpt_json_init(&reader, deep, 2000000);
    ckpt_json_skip(&reader, &from);
    assert_int_equal(reader.code, BL_ELIMIT);
    free(deep);
}

static void test_reader_takes_numbers_by_the_grammar(void **state)
{
    static const char *const good[] = {"0", "-0", "1.5", "1e5", "-1.25E-3", "null"};
    static const char *const bad[] = {"", "-", "+1", "01", "1.", ".5", "1e", "nan", "0x1"};
    struct ckpt_json reader;

    (void)state;
    for (uint32_t i = 0; i < 6; i++) {
        ckpt_json_init(&reader, good[i], strlen(good[i]));
        assert_true(i == 5 ? isnan(ckpt_json_double(&reader)) != 0
                           : ckpt_json_double(&reader) == strtod(good[i], NULL));
        ckpt_json_finish(&reader);
        assert_int_equal(reader.code, 0);
    }
    for (uint32_t i = 0; i < 9; i++) {
        ckpt_json_init(&reader, bad[i], strlen(bad[i]));
        (void)ckpt_json_double(&reader);
        ckpt_json_finish(&reader);
        assert_int_equal(reader.code, BL_EFORMAT);
    }
    ckpt_json_init(&reader, "18446744073709551615", 20);
    assert_true(ckpt_json_u64(&reader) == UINT64_MAX);
}

static void test_text_strings_come_back_as_they_were(void **state)
{
    static const char value[] = "a\"b\\c\n\t\x01 \xc3\xa9";
    struct ckpt_text text = {0};
    struct ckpt_json reader;
    char back[64];

    (void)state;
    ckpt_text_string(&text, value);
    ckpt_json_init(&reader, text.data, text.bytes);
    ckpt_json_string(&reader, back, sizeof(back));
    ckpt_json_finish(&reader);
    assert_int_equal(reader.code, 0);
    assert_string_equal(back, value);
    ckpt_text_close(&text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_header_takes_what_the_format_allows),
        cmocka_unit_test(test_header_refuses_hostile_ones),
        cmocka_unit_test(test_header_length_is_checked_before_memory_is_taken),
        cmocka_unit_test(test_reader_does_not_recurse_on_deep_input),
        cmocka_unit_test(test_reader_takes_numbers_by_the_grammar),
        cmocka_unit_test(test_text_strings_come_back_as_they_were),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
