/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include "base/config.h"

static char seen[256];

static int take(void *context, const char *key, const char *value, struct bl_errmsg *msg)
{
    (void)context;
    if (strcmp(key, "bad") == 0) {
        return bl_err(msg, BL_ECONFIG, "no option '%s'", key);
    }
    size_t used = strlen(seen);
    snprintf(seen + used, sizeof(seen) - used, "%s=%s;", key, value);
    return 0;
}

static int parse(const char *text, struct bl_errmsg *msg)
{
    seen[0] = '\0';
    memset(msg, 0, sizeof(*msg));
    return bl_config_parse(text, strlen(text), "belayd.yaml", take, NULL, msg);
}

static void test_config_pairs_come_in_order(void **state)
{
    (void)state;
    struct bl_errmsg msg;
    assert_int_equal(parse("# c\nname: n1\nstate-dir: \"/a b\"\nhead: ''\n", &msg), 0);
    assert_string_equal(seen, "name=n1;state-dir=/a b;head=;");
    assert_int_equal(parse("", &msg), 0);
    assert_int_equal(parse("# only a comment\n", &msg), 0);
    assert_string_equal(seen, "");
}

static void test_config_is_refused_with_line_and_column(void **state)
{
    (void)state;
    const char *bad[][2] = {
        {"a: 1\nbad: 2\n", "belayd.yaml:2:1: no option 'bad'"},
        {"a: 1\na: 2\n", "belayd.yaml:2:1: key given twice"},
        {"a: [1]\n", "belayd.yaml:1:4: a single value is wanted here"},
        {"a:\n", "belayd.yaml:1:3: a single value is wanted here"},
        {"a: &x 1\n", "belayd.yaml:1:4: a single value is wanted here"},
        {"a: \"x\\0y\"\n", "belayd.yaml:1:4: a single value is wanted here"},
        {"a: 1\nb: *x\n", "belayd.yaml:2:4: a single value is wanted here"},
        {"? [a]\n: b\n", "belayd.yaml:1:3: a key is wanted here"},
        {"- a\n", "belayd.yaml:1:1: a mapping of keys is wanted here"},
        {"a: 1\n---\nb: 2\n", "belayd.yaml:2:1: a second document is not allowed"},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct bl_errmsg msg;
        assert_int_equal(parse(bad[i][0], &msg), BL_ECONFIG);
        assert_string_equal(msg.text, bad[i][1]);
    }
    struct bl_errmsg msg;
    assert_int_equal(parse("a: {b: 1", &msg), BL_ECONFIG);
    assert_int_equal(strncmp(msg.text, "belayd.yaml:1:", 14), 0);
    assert_int_equal(bl_config_parse("- a", 3, "x", take, NULL, NULL), BL_ECONFIG);
    assert_int_equal(bl_config_read("/nowhere", 100, take, NULL, &msg), -ENOENT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_config_pairs_come_in_order),
        cmocka_unit_test(test_config_is_refused_with_line_and_column),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
