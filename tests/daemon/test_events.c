/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "daemon/events.h"

struct fixture {
    struct events *events;
    char dir[64];
};

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof(*f));

    bl_log_set_stderr(0);
    strcpy(f->dir, "/tmp/belay-events-XXXXXX");
    assert_non_null(mkdtemp(f->dir));
    assert_int_equal(events_open(&f->events, f->dir, "n1", NULL), 0);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;

    events_close(f->events);
    assert_int_equal(bl_rm_tree("/tmp", f->dir + 5, NULL), 0);
    free(f);
    return 0;
}

static json_t *newest(struct fixture *f)
{
    const char *line = events_line(f->events, events_newest(f->events));
    json_t *json = NULL;

    assert_non_null(line);
    assert_int_equal(bl_json_parse(line, strlen(line), &json, NULL), 0);
    return json;
}

static void test_event_has_its_fields_when_texts_hold_blanks_and_quotes(void **state)
{
    struct fixture *f = *state;

    event(f->events, EVENT_JOB_REFUSED, "job=%s reason=%s", "a \"b\"", "no rank=3 here\n");
    json_t *json = newest(f), *fields = json_object_get(json, "fields");

    assert_string_equal(json_string_value(json_object_get(json, "code")), "BLY-211");
    assert_string_equal(json_string_value(json_object_get(fields, "job")), "a \"b\"");
    assert_string_equal(json_string_value(json_object_get(fields, "reason")), "no rank=3 here\n");
    json_decref(json);
}

static void test_numbers_are_numbers_and_incarnations_are_texts(void **state)
{
    struct fixture *f = *state;

    event(f->events, EVENT_PROC_STARTED, "job=%s rank=%u pid=%u incarnation=%s", "j", 3u, 77u,
          "0123456789012345");
    json_t *json = newest(f), *fields = json_object_get(json, "fields");

    assert_int_equal(json_integer_value(json_object_get(fields, "pid")), 77);
    assert_true(json_is_string(json_object_get(fields, "incarnation")));
    json_decref(json);
}

static void test_core_event_is_valid_json_when_every_field_is_long(void **state)
{
    struct fixture *f = *state;
    struct core_event core = {.code = CORE_EVENT_RANK_EXITED,
                              .generation = UINT64_MAX >> 1,
                              .step = 12,
                              .rank = 3,
                              .incarnation = UINT64_MAX,
                              .signal = 9,
                              .value_ms = 1,
                              .count = 2};

    memset(core.text, '"', sizeof(core.text) - 1);
    memset(core.node, '\\', sizeof(core.node) - 1);
    event_core(f->events, "job", 7, &core);
    json_t *json = newest(f), *fields = json_object_get(json, "fields");

    assert_string_equal(json_string_value(json_object_get(fields, "signal_name")), "KILL");
    assert_string_equal(json_string_value(json_object_get(json, "run")), "0000000000000007");
    json_decref(json);
}

static void test_sequence_goes_on_when_it_is_opened_again(void **state)
{
    struct fixture *f = *state;

    for (int i = 0; i < 3; i++) {
        event(f->events, EVENT_ENGINE_STARTED, "pid=%u", 1u);
    }
    events_close(f->events);
    assert_int_equal(events_open(&f->events, f->dir, "n1", NULL), 0);
    event(f->events, EVENT_ENGINE_STARTED, "pid=%u", 1u);
    assert_int_equal(events_newest(f->events), 4);
    assert_non_null(events_line(f->events, 4));
}

static void test_events_of_before_are_known_when_it_is_opened_again(void **state)
{
    struct fixture *f = *state;

    for (uint32_t i = 0; i < EVENTS_RING + 7; i++) {
        event(f->events, EVENT_ENGINE_STARTED, "pid=%u", i);
    }
    char *was = strdup(events_line(f->events, 100));

    assert_non_null(was);
    events_close(f->events);
    assert_int_equal(events_open(&f->events, f->dir, "n1", NULL), 0);
    assert_int_equal(events_newest(f->events), EVENTS_RING + 7);
    assert_string_equal(events_line(f->events, 100), was);
    assert_null(events_line(f->events, 7));
    free(was);
}

static void test_ring_forgets_the_oldest_when_it_is_full(void **state)
{
    struct fixture *f = *state;

    for (uint32_t i = 0; i < EVENTS_RING + 5; i++) {
        event(f->events, EVENT_ENGINE_STARTED, "pid=%u", i);
    }
    assert_null(events_line(f->events, 5));
    assert_non_null(events_line(f->events, 6));
    assert_null(events_line(f->events, EVENTS_RING + 6));
}

static void test_codes_are_unique_and_sorted_over_both_tables(void **state)
{
    struct event_row row;
    uint32_t last = 0;

    (void)state;
    for (uint32_t i = 0; event_row_at(i, &row) == 0; i++) {
        assert_true(row.code > last);
        assert_true(row.what[0] && row.does[0] && row.person[0]);
        last = row.code;
    }
    assert_true(last >= 250);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_event_has_its_fields_when_texts_hold_blanks_and_quotes),
        TEST(test_numbers_are_numbers_and_incarnations_are_texts),
        TEST(test_core_event_is_valid_json_when_every_field_is_long),
        TEST(test_sequence_goes_on_when_it_is_opened_again),
        TEST(test_events_of_before_are_known_when_it_is_opened_again),
        TEST(test_ring_forgets_the_oldest_when_it_is_full),
        TEST(test_codes_are_unique_and_sorted_over_both_tables)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
