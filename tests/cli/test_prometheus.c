/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The metrics of `belay status --prometheus`, read by a strict parser of the text exposition
 * format: names, escapes, one HELP and one TYPE for each family and before its samples, families in
 * one piece, no series twice. With an argument the file of that name is read, of a live daemon.
 */
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
#include "tools/belay.h"

#define SERIES_MAX 2000u
#define LINE_MAX_  4096u

/* Stands beside main in the program. */
void tool_say(const struct tool_command *command, const char *format, ...)
{
    (void)command, (void)format;
    fail();
}

struct sample {
    char series[LINE_MAX_]; /* name and labels, as they stand */
    double value;
};

struct parsed {
    struct sample samples[SERIES_MAX];
    uint32_t count;
    char families[SERIES_MAX][128]; /* in order */
    uint32_t family_count;
};

static bool is_name_char(char c, bool first)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (c == ':') ||
           (!first && c >= '0' && c <= '9');
}

/* The length of a name at `at`; fails on none. */
static size_t name_take(const char *at)
{
    size_t bytes = 0;

    while (is_name_char(at[bytes], bytes == 0)) {
        bytes++;
    }
    if (bytes == 0) {
        fail_msg("no name: %s", at);
    }
    return bytes;
}

/* What stands behind the labels that begin at `at` ("{"). */
static const char *labels_take(const char *at)
{
    at++;
    for (;;) {
        at += name_take(at);
        assert_memory_equal(at, "=\"", 2);
        for (at += 2; *at != '"'; at++) {
            assert_int_not_equal(*at, '\0');
            if (*at == '\\') {
                at++;
                assert_true(*at == '\\' || *at == '"' || *at == 'n');
            }
        }
        at++;
        if (*at == '}') {
            return at + 1;
        }
        assert_int_equal(*at, ',');
        at++;
    }
}

static void line_sample(struct parsed *parsed, const char *line)
{
    struct sample *sample = &parsed->samples[parsed->count];
    size_t name = name_take(line);
    const char *at = line + name, *family = parsed->families[parsed->family_count - 1];
    char *end;

    assert_true(parsed->count < SERIES_MAX && parsed->family_count > 0);
    if (strlen(family) != name || strncmp(family, line, name) != 0) {
        fail_msg("a sample of another family than %s: %s", family, line);
    }
    at = *at == '{' ? labels_take(at) : at;
    assert_int_equal(*at, ' ');
    memcpy(sample->series, line, (size_t)(at - line));
    sample->series[at - line] = '\0';
    sample->value = strtod(at + 1, &end);
    assert_true(end > at + 1 && *end == '\0');
    for (uint32_t i = 0; i < parsed->count; i++) {
        if (strcmp(parsed->samples[i].series, sample->series) == 0) {
            fail_msg("twice: %s", line);
        }
    }
    parsed->count++;
}

/* "# HELP name text" begins a family, "# TYPE name gauge" must be the next line. */
static void line_comment(struct parsed *parsed, const char *line, bool *wants_type)
{
    bool type = strncmp(line, "# TYPE ", 7) == 0;
    size_t name;

    assert_true(type || strncmp(line, "# HELP ", 7) == 0);
    assert_int_equal(type, *wants_type);
    *wants_type = !type;
    line += 7;
    name = name_take(line);
    assert_int_equal(line[name], ' ');
    assert_int_not_equal(line[name + 1], '\0');
    if (type) {
        const char *family = parsed->families[parsed->family_count - 1];

        assert_true(strlen(family) == name && strncmp(family, line, name) == 0);
        assert_true(strcmp(line + name, " gauge") == 0 || strcmp(line + name, " counter") == 0);
        assert_int_equal(strcmp(line + name, " counter") == 0,
                         name > 6 && strcmp(family + name - 6, "_total") == 0);
        return;
    }
    for (uint32_t i = 0; i < parsed->family_count; i++) {
        if (strlen(parsed->families[i]) == name && strncmp(parsed->families[i], line, name) == 0) {
            fail_msg("a family in two pieces: %s", line);
        }
    }
    snprintf(parsed->families[parsed->family_count++], 128, "%.*s", (int)name, line);
}

static struct parsed *parse(FILE *file)
{
    static struct parsed parsed;
    char line[LINE_MAX_];
    bool wants_type = false;

    memset(&parsed, 0, sizeof(parsed));
    while (fgets(line, sizeof(line), file)) {
        size_t bytes = strlen(line);

        assert_true(bytes > 1 && line[bytes - 1] == '\n');
        line[bytes - 1] = '\0';
        if (line[0] == '#') {
            line_comment(&parsed, line, &wants_type);
        } else {
            assert_false(wants_type);
            line_sample(&parsed, line);
        }
    }
    return &parsed;
}

static const char *asked_job; /* by --job */

static struct parsed *parse_status(const char *text)
{
    json_t *status = NULL;
    FILE *file = tmpfile();
    struct parsed *parsed;

    assert_non_null(file);
    if (text) {
        assert_int_equal(bl_json_parse(text, strlen(text), &status, NULL), 0);
    }
    tool_prometheus_print(file, status, asked_job);
    json_decref(status);
    rewind(file);
    parsed = parse(file);
    fclose(file);
    return parsed;
}

static void expect(const struct parsed *parsed, const char *series, double value)
{
    for (uint32_t i = 0; i < parsed->count; i++) {
        if (strcmp(parsed->samples[i].series, series) == 0) {
            assert_true(parsed->samples[i].value == value);
            return;
        }
    }
    fail_msg("not there: %s", series);
}

static bool has(const struct parsed *parsed, const char *part)
{
    for (uint32_t i = 0; i < parsed->count; i++) {
        if (strstr(parsed->samples[i].series, part) != NULL) {
            return true;
        }
    }
    return false;
}

static const char status_full[] =
    "{\"schema\":1,\"verdict\":\"attention\",\"needs\":[\"root stuck\",\"x\"],\"exit_code\":null,"
    "\"run\":\"00aa\",\"name\":\"a\\\"b\\\\c\\nd\",\"phase\":\"running\",\"generation\":3,"
    "\"world\":4,\"ranks_wanted\":8,\"layout\":{\"dp\":2,\"tp\":2,\"pp\":1,\"dp_wanted\":4,"
    "\"pp_wanted\":1},\"step\":1200,\"steps\":9007199254740993,\"loss\":2.5,\"lr\":0.0003,"
    "\"grad_norm\":null,\"tokens_per_s\":12345.5,\"newest_memory\":{\"step\":1200,\"age_ms\":250},"
    "\"newest_disk\":{\"step\":1100,\"age_ms\":1500,\"dir\":\"d\",\"root\":\"r\"},"
    "\"saves\":{\"committed\":7,\"failed\":1,\"skipped\":0,\"writing\":1200,\"under_way\":["
    "{\"root\":\"/r 1\",\"step\":1200,\"state\":\"staged\",\"age_ms\":1250,\"parts\":2,"
    "\"written\":1}]},\"roots\":[{\"path\":\"/r 1\",\"state\":\"stuck\",\"every\":100,"
    "\"auto\":true,\"step\":1100,\"dir\":\"d\",\"checkpoint\":\"verified\",\"replicated\":false,"
    "\"verified_step\":1100,\"damaged_step\":null,\"committed\":7,\"failed\":1,\"skipped\":0,"
    "\"last\":{\"duration_ms\":1500,\"bytes\":10,\"raw_bytes\":12,\"ratio\":1.2,"
    "\"step_inflation\":null,\"stall_ms\":5}},{\"path\":\"/r\\\\2\",\"state\":\"good\","
    "\"every\":0,\"auto\":false,\"step\":null,\"checkpoint\":\"none\",\"last\":null}],"
    "\"nodes\":[{\"name\":\"n0\",\"head\":true,\"state\":\"up\",\"procs\":2},{\"name\":\"n1\","
    "\"head\":false,\"state\":\"away\",\"procs\":0}],\"ranks\":[{\"rank\":0,\"node\":\"n0\","
    "\"pid\":5,\"incarnation\":\"ab\",\"state\":\"running\",\"step\":1200,\"section\":\"step\"},"
    "{\"rank\":null,\"node\":\"n0\",\"pid\":6,\"incarnation\":\"ac\",\"state\":\"spare\","
    "\"step\":0,\"section\":\"\"}],\"last_recovery\":{\"cause\":\"rank 1\",\"detect_ms\":130,"
    "\"steps_lost\":1,\"cause_ms\":9},\"last_event\":null,\"digest\":\"00\","
    "\"store\":{\"standby\":null,\"replicated\":false}}";

#define JOB "job=\"a\\\"b\\\\c\\nd\""

static void test_metrics_have_what_status_has(void **state)
{
    const struct parsed *parsed = parse_status(status_full);

    (void)state;
    expect(parsed, "belay_daemon_up", 1);
    expect(parsed, "belay_verdict{" JOB ",verdict=\"attention\"}", 1);
    expect(parsed, "belay_verdict{" JOB ",verdict=\"healthy\"}", 0);
    expect(parsed, "belay_step{" JOB "}", 1200);
    expect(parsed, "belay_loss{" JOB "}", 2.5);
    expect(parsed, "belay_needs{" JOB "}", 2);
    expect(parsed, "belay_layout{" JOB ",axis=\"tp\"}", 2);
    expect(parsed, "belay_layout_wanted{" JOB ",axis=\"dp\"}", 4);
    expect(parsed, "belay_newest_age_seconds{" JOB ",where=\"disk\"}", 1.5);
    expect(parsed, "belay_saves_total{" JOB ",result=\"committed\"}", 7);
    expect(parsed, "belay_save_state{" JOB ",root=\"/r 1\",step=\"1200\",state=\"staged\"}", 1);
    expect(parsed, "belay_save_state{" JOB ",root=\"/r 1\",step=\"1200\",state=\"written\"}", 0);
    expect(parsed, "belay_save_age_seconds{" JOB ",root=\"/r 1\",step=\"1200\"}", 1.25);
    expect(parsed, "belay_root_state{" JOB ",root=\"/r 1\",state=\"stuck\"}", 1);
    expect(parsed, "belay_root_checkpoint{" JOB ",root=\"/r 1\",checkpoint=\"verified\"}", 1);
    expect(parsed, "belay_root_checkpoint{" JOB ",root=\"/r 1\",checkpoint=\"replicated\"}", 0);
    expect(parsed, "belay_root_checkpoint{" JOB ",root=\"/r\\\\2\",checkpoint=\"none\"}", 1);
    expect(parsed, "belay_root_interval_auto{" JOB ",root=\"/r 1\"}", 1);
    expect(parsed, "belay_root_last_save_ratio{" JOB ",root=\"/r 1\"}", 1.2);
    expect(parsed, "belay_node_state{" JOB ",node=\"n1\",state=\"away\"}", 1);
    expect(parsed, "belay_node_head{" JOB ",node=\"n0\"}", 1);
    expect(parsed, "belay_rank_step{" JOB ",rank=\"0\",node=\"n0\",incarnation=\"ab\"}", 1200);
    expect(parsed,
           "belay_rank_info{" JOB ",rank=\"\",node=\"n0\",incarnation=\"ac\",state=\"spare\","
           "section=\"\"}",
           1);
    expect(parsed, "belay_last_recovery_seconds{" JOB ",phase=\"detect\"}", 0.13);
    expect(parsed, "belay_store_replicated{" JOB "}", 0);
    /* What is null has no sample. */
    assert_false(has(parsed, "belay_gradient_norm"));
    assert_false(has(parsed, "belay_exit_code"));
    assert_false(has(parsed, "belay_root_damaged_step"));
    assert_false(has(parsed, "phase=\"cause\""));
}

static void test_metrics_are_all_in_the_documentation(void **state)
{
    const struct parsed *parsed = parse_status(status_full);
    const char *source = getenv("BELAY_SOURCE");
    char path[1024], name[140], *text = NULL;
    size_t bytes = 0;

    (void)state;
    if (source == NULL) {
        skip();
    }
    snprintf(path, sizeof(path), "%s/docs/metrics.md", source);
    assert_int_equal(bl_file_read(path, 1 << 20, &text, &bytes, NULL), 0);
    for (uint32_t i = 0; i < parsed->family_count; i++) {
        snprintf(name, sizeof(name), "| `%s` |", parsed->families[i]);
        if (strstr(text, name) == NULL) {
            fail_msg("%s: not in docs/metrics.md", parsed->families[i]);
        }
    }
    free(text);
}

static void test_metrics_say_that_nobody_answers(void **state)
{
    const struct parsed *parsed = parse_status(NULL);

    (void)state;
    assert_int_equal(parsed->count, 1);
    expect(parsed, "belay_daemon_up", 0);
    asked_job = "a\"b";
    expect(parse_status(NULL), "belay_daemon_up{job=\"a\\\"b\"}", 0);
    asked_job = NULL;
}

static void test_metrics_of_an_idle_daemon_and_of_nonsense(void **state)
{
    (void)state;
    expect(parse_status("{\"schema\":1,\"verdict\":\"idle\",\"nodes\":[]}"),
           "belay_verdict{job=\"\",verdict=\"idle\"}", 1);
    expect(parse_status("{\"name\":5,\"roots\":{\"a\":1},\"ranks\":[1],\"saves\":[],"
                        "\"verdict\":[],\"last_recovery\":\"x\"}"),
           "belay_daemon_up", 1);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_metrics_have_what_status_has),
        cmocka_unit_test(test_metrics_are_all_in_the_documentation),
        cmocka_unit_test(test_metrics_say_that_nobody_answers),
        cmocka_unit_test(test_metrics_of_an_idle_daemon_and_of_nonsense),
    };

    if (argc == 2) { /* of a live daemon: how many series, or an abort */
        FILE *file = fopen(argv[1], "re");

        if (file == NULL) {
            return 1;
        }
        printf("%u series\n", parse(file)->count);
        fclose(file);
        return 0;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
