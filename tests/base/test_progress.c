/* SPDX-License-Identifier: Apache-2.0 */
/* What long work shows, on a terminal and in a log. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/human.h"
#include "base/progress.h"

#define MIB (1024u * 1024)
#define GIB (1024ull * MIB)
#define SEC 1000000000ull

struct screen {
    char *text;
    size_t bytes;
};

static void screen_start(struct screen *screen, struct bl_progress *progress, bool terminal)
{
    bl_progress_start(progress, "work", 4 * GIB, BL_PROGRESS_LINES);
    progress->out = open_memstream(&screen->text, &screen->bytes);
    assert_non_null(progress->out);
    progress->terminal = terminal;
    progress->shown = terminal ? 0 : progress->started;
}

static void screen_close(struct screen *screen, struct bl_progress *progress)
{
    fclose(progress->out);
    free(screen->text);
}

static void test_progress_shows_share_rate_and_time_left(void **state)
{
    struct bl_progress progress;
    struct screen screen = {0};
    uint64_t t0;

    (void)state;
    screen_start(&screen, &progress, true);
    t0 = progress.started;
    bl_progress_show_at(&progress, 0, t0);
    assert_string_equal(screen.text, "\r\033[Kwork: 0 %, 0 B of 4.0 GiB");
    for (uint64_t i = 1; i <= 100; i++) { /* 100 MiB/s for 10 s */
        bl_progress_show_at(&progress, i * 10 * MIB, t0 + i * SEC / 10);
    }
    assert_non_null(
        strstr(screen.text, "work: 24 %, 1000.0 MiB of 4.0 GiB, 100.0 MiB/s, 31.0 s left"));
    /* Half as fast: after 30 s the average of the last seconds says so, that of all would not. */
    for (uint64_t i = 1; i <= 300; i++) {
        bl_progress_show_at(&progress, 1000 * MIB + i * 5 * MIB, t0 + 10 * SEC + i * SEC / 10);
    }
    assert_non_null(strstr(screen.text, "2.4 GiB of 4.0 GiB, 50.0 MiB/s, 31.9 s left"));
    bl_progress_clear(&progress);
    assert_memory_equal(screen.text + screen.bytes - 4, "\r\033[K", 4);
    screen_close(&screen, &progress);
}

static void test_progress_draws_ten_times_a_second_at_most(void **state)
{
    struct bl_progress progress;
    struct screen screen = {0};
    uint32_t lines = 0;

    (void)state;
    screen_start(&screen, &progress, true);
    for (uint64_t i = 0; i <= 100000; i++) {
        bl_progress_show_at(&progress, i, progress.started + i * SEC / 100000);
    }
    for (const char *at = screen.text; (at = strstr(at, "work:")) != NULL; at++) {
        lines++;
    }
    assert_in_range(lines, 9, 11);
    screen_close(&screen, &progress);
}

static void test_progress_in_a_log_is_plain_lines(void **state)
{
    struct bl_progress progress;
    struct screen screen = {0};
    uint32_t lines = 0;

    (void)state;
    screen_start(&screen, &progress, false);
    for (uint64_t i = 1; i <= 120; i++) {
        bl_progress_show_at(&progress, i * MIB, progress.started + i * SEC / 10);
    }
    assert_true(bl_progress_finish(&progress) >= 0);
    assert_true(bl_progress_finish(&progress) >= 0); /* twice is fine and prints nothing more */
    for (const char *at = screen.text; (at = strchr(at, '\n')) != NULL; at++) {
        lines++;
    }
    assert_int_equal(lines, 3); /* at 5 s, at 10 s, at the end */
    assert_null(strchr(screen.text, '\r'));
    assert_null(strchr(screen.text, '\033'));
    screen_close(&screen, &progress);
}

static void test_progress_never_passes_its_end(void **state)
{
    struct bl_progress progress;
    struct screen screen = {0};

    (void)state;
    screen_start(&screen, &progress, true);
    bl_progress_show_at(&progress, 5 * GIB, progress.started + SEC);
    assert_non_null(strstr(screen.text, "work: 100 %, 4.0 GiB of 4.0 GiB"));
    assert_null(strstr(screen.text, "left"));
    screen_close(&screen, &progress);
}

static void test_progress_is_silent_with_json_and_without_a_terminal(void **state)
{
    struct bl_progress progress;

    (void)state;
    assert_int_equal(bl_progress_mode(true, true), BL_PROGRESS_NONE);
    assert_int_equal(bl_progress_mode(false, true), BL_PROGRESS_LINES);
    assert_int_equal(bl_progress_mode(false, false), BL_PROGRESS_AUTO);
    bl_progress_start(&progress, "work", GIB, BL_PROGRESS_NONE);
    assert_false(progress.on);
    memset(&progress, 0, sizeof(progress));
    assert_true(bl_progress_finish(&progress) == 0); /* never started */
}

static void test_progress_texts_are_for_people(void **state)
{
    char text[BL_HUMAN_MAX];

    (void)state;
    assert_string_equal(bl_human_bytes(text, 1023), "1023 B");
    assert_string_equal(bl_human_bytes(text, 13314398617ull), "12.4 GiB");
    assert_string_equal(bl_human_bytes(text, UINT64_MAX), "16.0 EiB");
    assert_string_equal(bl_human_seconds(text, 1.84), "1.8 s");
    assert_string_equal(bl_human_seconds(text, 99.97), "1 min 39 s");
    assert_string_equal(bl_human_seconds(text, 200), "3 min 20 s");
    assert_string_equal(bl_human_seconds(text, 7500), "2 h 05 min");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_progress_shows_share_rate_and_time_left),
        cmocka_unit_test(test_progress_draws_ten_times_a_second_at_most),
        cmocka_unit_test(test_progress_in_a_log_is_plain_lines),
        cmocka_unit_test(test_progress_never_passes_its_end),
        cmocka_unit_test(test_progress_is_silent_with_json_and_without_a_terminal),
        cmocka_unit_test(test_progress_texts_are_for_people),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
