/* SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "base/log.h"

static int fds[2];
static char got[1 << 20];

/* What has come out since the last call. */
static const char *drain(void)
{
    ssize_t n = read(fds[0], got, sizeof(got) - 1);
    got[n > 0 ? n : 0] = '\0';
    return got;
}

static int log_to_pipe(void **state)
{
    (void)state;
    if (pipe2(fds, O_CLOEXEC | O_NONBLOCK) < 0) {
        return -1;
    }
    bl_log_set_stderr(0);
    bl_log_set_fd(fds[1]);
    bl_log_set_level(BL_LOG_INFO);
    return 0;
}

static void test_log_line_has_time_level_room_and_text(void **state)
{
    (void)state;
    bl_log(BL_LOG_DEBUG, "daemon", "not this");
    bl_log(BL_LOG_WARN, "daemon", "rank %d\nis late", 3);
    const char *line = drain();
    assert_int_equal(line[4], '-');
    assert_int_equal(line[10], 'T');
    assert_string_equal(line + 24, " warn daemon: rank 3 is late\n");
}

static void test_log_line_is_cut_when_too_long(void **state)
{
    (void)state;
    char big[2 * BL_LOG_LINE_BYTES];
    memset(big, 'y', sizeof(big) - 1);
    big[sizeof(big) - 1] = '\0';
    bl_log(BL_LOG_ERROR, "test", "%s", big);
    const char *line = drain();
    assert_int_equal(strlen(line), BL_LOG_LINE_BYTES - 1);
    assert_int_equal(line[BL_LOG_LINE_BYTES - 2], '\n');
}

static void test_log_flood_is_held_back_and_told(void **state)
{
    (void)state;
    uint64_t before = bl_log_dropped();
    for (int i = 0; i < 5 * BL_LOG_BURST; i++) {
        bl_log(BL_LOG_INFO, "test", "flood");
    }
    drain();
    assert_true(bl_log_dropped() >= before + 3 * BL_LOG_BURST);
    bl_log(BL_LOG_ERROR, "test", "errors go through");
    const char *lines = drain();
    assert_non_null(strstr(lines, "lines were left out before this one\n"));
    assert_non_null(strstr(lines, "errors go through\n"));
}

static void test_log_full_sink_drops_and_never_blocks(void **state)
{
    (void)state;
    char fill[4096] = {0};
    while (write(fds[1], fill, sizeof(fill)) > 0) {
    }
    uint64_t before = bl_log_dropped();
    bl_log(BL_LOG_ERROR, "test", "nobody reads this");
    assert_true(bl_log_dropped() > before);
}

static void test_log_levels_have_names(void **state)
{
    (void)state;
    assert_int_equal(bl_log_level_parse("debug"), BL_LOG_DEBUG);
    assert_int_equal(bl_log_level_parse("error"), BL_LOG_ERROR);
    assert_int_equal(bl_log_level_parse("loud"), -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_log_line_has_time_level_room_and_text),
        cmocka_unit_test(test_log_line_is_cut_when_too_long),
        cmocka_unit_test(test_log_flood_is_held_back_and_told),
        cmocka_unit_test(test_log_full_sink_drops_and_never_blocks),
        cmocka_unit_test(test_log_levels_have_names),
    };
    return cmocka_run_group_tests(tests, log_to_pipe, NULL);
}
