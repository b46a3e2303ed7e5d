/* SPDX-License-Identifier: Apache-2.0 */
/* Every character goes there and back; every sequence of two bytes, and what RFC 3629 forbids. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

#include "base/utf8.h"

static size_t encode(uint8_t *to, uint32_t c)
{
    if (c < 0x80) {
        to[0] = (uint8_t)c;
        return 1;
    }
    size_t bytes = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    static const uint8_t lead[] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (size_t i = bytes; i-- > 0; c >>= 6) {
        to[i] = (uint8_t)(i == 0 ? lead[bytes] | c : 0x80 | (c & 0x3f));
    }
    return bytes;
}

static void test_every_character_comes_back(void **state)
{
    (void)state;
    for (uint32_t c = 0; c < 0x110000; c++) {
        uint8_t text[4];
        size_t bytes = encode(text, c);
        const uint8_t *at = text;
        if (c >= 0xd800 && c < 0xe000) {
            assert_int_equal(bl_utf8_next(&at, text + bytes), BL_UTF8_BAD);
            assert_ptr_equal(at, text);
            continue;
        }
        assert_int_equal(bl_utf8_next(&at, text + bytes), c);
        assert_ptr_equal(at, text + bytes);
        for (size_t cut = 1; cut < bytes; cut++) { /* nothing is read behind the end */
            at = text;
            assert_int_equal(bl_utf8_next(&at, text + cut), BL_UTF8_BAD);
        }
    }
}

static void test_what_is_no_character_is_refused(void **state)
{
    (void)state;
    static const char *const bad[] = {"\x80",
                                      "\xbf",
                                      "\xc0\x80",
                                      "\xc1\xbf",
                                      "\xc3(",
                                      "\xe0\x80\x80",
                                      "\xe0\x9f\xbf",
                                      "\xe2(\xa1",
                                      "\xe2\x82(",
                                      "\xf0\x80\x80\x80",
                                      "\xf0\x8f\xbf\xbf",
                                      "\xf4\x90\x80\x80",
                                      "\xf5\x80\x80\x80",
                                      "\xff",
                                      "\xf0\x9f\x98("};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const uint8_t *at = (const uint8_t *)bad[i];
        assert_int_equal(bl_utf8_next(&at, at + strlen(bad[i])), BL_UTF8_BAD);
        assert_ptr_equal(at, bad[i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_character_comes_back),
        cmocka_unit_test(test_what_is_no_character_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
