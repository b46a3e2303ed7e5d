/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "base/json.h"

static json_t *parse(const char *text)
{
    json_t *value = NULL;
    assert_int_equal(bl_json_parse(text, strlen(text), &value, NULL), 0);
    return value;
}

static void test_json_is_refused_with_line_and_column(void **state)
{
    (void)state;
    const char *bad[][2] = {
        {"", "1:0: "},
        {"{", "1:1: "},
        {"{\"a\": 1, \"a\": 2}", "1:12: duplicate object key"},
        {"{\"a\": 1} x", "1:10: end of file expected"},
        {"{\n \"a\": nul}", "2:9: invalid token"},
        {"[1e999]", "1:6: real number overflow"},
        {"[99999999999999999999]", "1:21: too big integer"},
        {"[\"\\u0000\"]", "1:9: \\u0000 is not allowed"},
        {"[\"\xff\"]", "1:2: unable to decode byte 0xff"},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        json_t *value = NULL;
        struct bl_errmsg msg = {{0}};
        assert_int_equal(bl_json_parse(bad[i][0], strlen(bad[i][0]), &value, &msg), BL_EFORMAT);
        assert_null(value);
        if (strncmp(msg.text, bad[i][1], strlen(bad[i][1])) != 0) {
            fail_msg("%s: got '%s', wanted '%s'", bad[i][0], msg.text, bad[i][1]);
        }
    }
}

static void test_json_deep_nesting_is_refused_before_it_is_built(void **state)
{
    (void)state;
    char text[2 * BL_JSON_DEPTH_MAX + 3];
    json_t *value = NULL;
    struct bl_errmsg msg = {{0}};
    memset(text, '[', BL_JSON_DEPTH_MAX);
    memset(text + BL_JSON_DEPTH_MAX, ']', BL_JSON_DEPTH_MAX);
    assert_int_equal(bl_json_parse(text, 2UL * BL_JSON_DEPTH_MAX, &value, NULL), 0);
    json_decref(value);
    value = NULL;
    memset(text, '[', BL_JSON_DEPTH_MAX + 1);
    memset(text + BL_JSON_DEPTH_MAX + 1, ']', BL_JSON_DEPTH_MAX + 1);
    assert_int_equal(bl_json_parse(text, 2UL * BL_JSON_DEPTH_MAX + 2, &value, &msg), BL_EFORMAT);
    assert_string_equal(msg.text, "nested deeper than 32 levels");
    /* Brackets in strings do not count, nor does an escaped quote end one. */
    value = parse("[\"[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[\\\"[[[[[[[\"]");
    json_decref(value);
}

static void test_json_getters_name_the_key(void **state)
{
    (void)state;
    json_t *value =
        parse("{\"n\": 5, \"s\": \"abc\", \"b\": true, \"r\": 1.5, \"o\": {}, \"a\": [1, 2],"
              " \"h\": \"00ff00ff00ff00ff\", \"m\": -1}");
    struct bl_errmsg msg = {{0}};
    uint64_t u64 = 0;
    uint32_t u32 = 0;
    const char *text = NULL;
    json_t *inner = NULL;
    double real = 0;
    int flag = 0;
    char copy[4];
    assert_int_equal(bl_json_u64(value, "n", 0, 5, &u64, NULL), 0);
    assert_int_equal(u64, 5);
    assert_int_equal(bl_json_u32(value, "n", 6, 9, &u32, &msg), BL_EFORMAT);
    assert_string_equal(msg.text, "n: must be an integer from 6 to 9");
    assert_int_equal(bl_json_u64(value, "m", 0, 9, &u64, NULL), BL_EFORMAT);
    assert_int_equal(bl_json_u64(value, "s", 0, 9, &u64, NULL), BL_EFORMAT);
    assert_int_equal(bl_json_u64(value, "none", 0, 9, &u64, &msg), BL_EFORMAT);
    assert_string_equal(msg.text, "none: missing");
    assert_int_equal(bl_json_string(value, "s", 4, &text, NULL), 0);
    assert_string_equal(text, "abc");
    assert_int_equal(bl_json_string(value, "s", 3, &text, &msg), BL_EFORMAT);
    assert_string_equal(msg.text, "s: longer than 2 bytes");
    assert_int_equal(bl_json_copy_string(value, "s", copy, sizeof(copy), NULL), 0);
    assert_int_equal(bl_json_bool(value, "b", &flag, NULL), 0);
    assert_int_equal(flag, 1);
    assert_int_equal(bl_json_bool(value, "n", &flag, NULL), BL_EFORMAT);
    assert_int_equal(bl_json_real(value, "r", &real, NULL), 0);
    assert_true(real == 1.5);
    assert_int_equal(bl_json_real(value, "s", &real, NULL), BL_EFORMAT);
    assert_int_equal(bl_json_object(value, "o", &inner, NULL), 0);
    assert_int_equal(bl_json_object(value, "a", &inner, NULL), BL_EFORMAT);
    assert_int_equal(bl_json_array(value, "a", 2, &inner, NULL), 0);
    assert_int_equal(bl_json_array(value, "a", 1, &inner, &msg), BL_EFORMAT);
    assert_string_equal(msg.text, "a: must be an array of at most 1");
    assert_int_equal(bl_json_hex64(value, "h", &u64, NULL), 0);
    assert_int_equal(u64, 0x00ff00ff00ff00ffULL);
    assert_int_equal(bl_json_hex64(value, "s", &u64, NULL), BL_EFORMAT);
    assert_int_equal(bl_json_u64(inner, "x", 0, 1, &u64, NULL), BL_EFORMAT);
    json_decref(value);
}

static void test_json_only_refuses_other_keys(void **state)
{
    (void)state;
    json_t *value = parse("{\"a\": 1, \"b\": 2}");
    const char *both[] = {"b", "a", NULL};
    const char *one[] = {"a", NULL};
    struct bl_errmsg msg = {{0}};
    assert_int_equal(bl_json_only(value, both, NULL), 0);
    assert_int_equal(bl_json_only(value, one, &msg), BL_EFORMAT);
    assert_string_equal(msg.text, "b: unknown key");
    json_decref(value);
}

static void test_json_dump_is_canonical(void **state)
{
    (void)state;
    json_t *a = parse("{\"b\": 0.1, \"a\": [1, true, null]}");
    json_t *b = parse("{ \"a\":[1,true,null],\"b\":0.1 }");
    json_object_set_new(a, "h", bl_json_new_hex64(255));
    json_object_set_new(b, "h", bl_json_new_hex64(255));
    char *text_a = bl_json_dump(a);
    char *text_b = bl_json_dump(b);
    assert_string_equal(text_a, text_b);
    assert_string_equal(text_a, "{\"a\":[1,true,null],\"b\":0.10000000000000001,"
                                "\"h\":\"00000000000000ff\"}");
    free(text_a);
    free(text_b);
    json_decref(a);
    json_decref(b);
}

static void test_json_load_names_the_file(void **state)
{
    (void)state;
    json_t *value = NULL;
    struct bl_errmsg msg = {{0}};
    assert_int_equal(bl_json_load("/proc/self/cmdline", 4096, &value, &msg), BL_EFORMAT);
    assert_int_equal(strncmp(msg.text, "/proc/self/cmdline: 1:", 22), 0);
    assert_int_equal(bl_json_load("/nowhere", 4096, &value, &msg), -ENOENT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_json_is_refused_with_line_and_column),
        cmocka_unit_test(test_json_deep_nesting_is_refused_before_it_is_built),
        cmocka_unit_test(test_json_getters_name_the_key),
        cmocka_unit_test(test_json_only_refuses_other_keys),
        cmocka_unit_test(test_json_dump_is_canonical),
        cmocka_unit_test(test_json_load_names_the_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
