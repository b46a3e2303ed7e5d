/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "base/error.h"

static void test_error_text_climbs_with_context_in_front(void **state)
{
    (void)state;
    struct bl_errmsg msg = {{0}};
    assert_int_equal(bl_err(&msg, BL_EDIGEST, "chunk %d", 17), BL_EDIGEST);
    assert_int_equal(bl_err_in(&msg, BL_EDIGEST, "part %d", 3), BL_EDIGEST);
    assert_int_equal(bl_err_in(&msg, BL_EDIGEST, "step %d", 1200), BL_EDIGEST);
    assert_string_equal(msg.text, "step 1200: part 3: chunk 17");
}

static void test_error_text_has_the_sentence_of_its_code(void **state)
{
    (void)state;
    struct bl_errmsg msg = {{0}};
    assert_int_equal(bl_err_code(&msg, -ENOENT, "open %s", "/x/y"), -ENOENT);
    assert_string_equal(msg.text, "open /x/y: No such file or directory");
    assert_int_equal(bl_err_code(&msg, BL_EGEN, "vote"), BL_EGEN);
    assert_string_equal(msg.text, "vote: a new generation was called");
}

static void test_error_context_without_inner_text_names_the_code(void **state)
{
    (void)state;
    struct bl_errmsg msg = {{0}};
    assert_int_equal(bl_err_in(&msg, -ENOSPC, "save"), -ENOSPC);
    assert_string_equal(msg.text, "save: No space left on device");
}

static void test_error_text_is_cut_when_too_long(void **state)
{
    (void)state;
    char big[2 * BL_ERRMSG_BYTES];
    memset(big, 'x', sizeof(big) - 1);
    big[sizeof(big) - 1] = '\0';
    struct bl_errmsg msg = {{0}};
    bl_err_code(&msg, -EIO, "%s", big);
    assert_int_equal(strlen(msg.text), BL_ERRMSG_BYTES - 1);
    bl_err_in(&msg, -EIO, "front");
    assert_int_equal(strlen(msg.text), BL_ERRMSG_BYTES - 1);
    assert_int_equal(strncmp(msg.text, "front: xxx", 10), 0);
}

static void test_error_message_may_be_null(void **state)
{
    (void)state;
    assert_int_equal(bl_err(NULL, -EIO, "x"), -EIO);
    assert_int_equal(bl_err_code(NULL, -EIO, "x"), -EIO);
    assert_int_equal(bl_err_in(NULL, -EIO, "x"), -EIO);
}

static void test_error_names_and_sentences_are_never_null(void **state)
{
    (void)state;
    assert_string_equal(bl_errname(BL_EDIGEST), "BL_EDIGEST");
    assert_string_equal(bl_errname(-ENOSPC), "ENOSPC");
    assert_string_equal(bl_errname(0), "OK");
    assert_string_equal(bl_errname(-777777), "UNKNOWN");
    for (int code = 10; code > -6000; code--) {
        assert_non_null(bl_strerror(code));
        assert_non_null(bl_errname(code));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_error_text_climbs_with_context_in_front),
        cmocka_unit_test(test_error_text_has_the_sentence_of_its_code),
        cmocka_unit_test(test_error_context_without_inner_text_names_the_code),
        cmocka_unit_test(test_error_text_is_cut_when_too_long),
        cmocka_unit_test(test_error_message_may_be_null),
        cmocka_unit_test(test_error_names_and_sentences_are_never_null),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
