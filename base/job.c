/* SPDX-License-Identifier: Apache-2.0 */
/* The reader of job files: libyaml's events against the option table. */
#include "base/job.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

#include "base/file.h"
#include "base/job_options.h"

#define JOB_SECTIONS_MAX 32

struct job_reader {
    yaml_parser_t parser;
    yaml_event_t event; /* the current one, owned */
    int has_event;
    struct bl_job *job;
    const char *where;
    const char *base_dir;
    struct bl_errmsg *msg;
    struct job_marks marks;
    char sections[JOB_SECTIONS_MAX][BL_JOB_KEY_MAX]; /* already opened */
    uint32_t section_count;
};

/* Puts "where:line:column: " in front of what is in the message, at the current event. */
static int reader_fail_at(const struct job_reader *reader, int code, yaml_mark_t mark)
{
    return bl_err_in(reader->msg, code, "%s:%zu:%zu", reader->where, mark.line + 1,
                     mark.column + 1);
}

static int reader_fail(const struct job_reader *reader, int code)
{
    return reader_fail_at(reader, code, reader->event.start_mark);
}

/* The next event. What YAML has and a job needs not, is refused here. */
static int reader_next(struct job_reader *reader)
{
    if (reader->has_event) {
        yaml_event_delete(&reader->event);
        reader->has_event = 0;
    }
    if (!yaml_parser_parse(&reader->parser, &reader->event)) {
        if (reader->parser.error == YAML_MEMORY_ERROR) {
            return bl_err_code(reader->msg, -ENOMEM, "%s", reader->where);
        }
        yaml_mark_t mark = reader->parser.problem_mark;
        const char *problem = reader->parser.problem;
        if (reader->parser.error == YAML_READER_ERROR) { /* which counts bytes, not lines */
            return bl_err(reader->msg, BL_ECONFIG, "%s: byte %zu: %s", reader->where,
                          reader->parser.problem_offset, problem != NULL ? problem : "bad text");
        }
        bl_err(reader->msg, BL_ECONFIG, "%s", problem != NULL ? problem : "not YAML");
        return reader_fail_at(reader, BL_ECONFIG, mark);
    }
    reader->has_event = 1;
    const char *refused = NULL;
    const yaml_event_t *event = &reader->event;
    if (event->type == YAML_ALIAS_EVENT) {
        refused = "aliases are not allowed";
    } else if (event->type == YAML_SCALAR_EVENT &&
               (event->data.scalar.anchor != NULL || event->data.scalar.tag != NULL)) {
        refused = "anchors and tags are not allowed";
    } else if (event->type == YAML_MAPPING_START_EVENT &&
               (event->data.mapping_start.anchor != NULL ||
                event->data.mapping_start.tag != NULL)) {
        refused = "anchors and tags are not allowed";
    } else if (event->type == YAML_SEQUENCE_START_EVENT &&
               (event->data.sequence_start.anchor != NULL ||
                event->data.sequence_start.tag != NULL)) {
        refused = "anchors and tags are not allowed";
    } else if (event->type == YAML_SCALAR_EVENT &&
               strlen((const char *)event->data.scalar.value) != event->data.scalar.length) {
        refused = "a NUL character is not allowed";
    }
    if (refused != NULL) {
        bl_err(reader->msg, BL_ECONFIG, "%s", refused);
        return reader_fail(reader, BL_ECONFIG);
    }
    return 0;
}

static const char *reader_scalar(const struct job_reader *reader)
{
    return (const char *)reader->event.data.scalar.value;
}

/* Expects an event of that kind to be current. */
static int reader_expect(const struct job_reader *reader, yaml_event_type_t type, const char *key,
                         const char *wanted)
{
    if (reader->event.type == type) {
        return 0;
    }
    bl_err(reader->msg, BL_ECONFIG, "%s: must be %s", key, wanted);
    return reader_fail(reader, BL_ECONFIG);
}

static int reader_set(struct job_reader *reader, const struct job_option *option, void *base)
{
    int rc = reader_expect(reader, YAML_SCALAR_EVENT, option->key, "a single value");
    if (rc < 0) {
        return rc;
    }
    const char *text = reader_scalar(reader);
    /* An empty plain value is YAML's null: a key that was left without a value. */
    if (text[0] == '\0' && reader->event.data.scalar.style == YAML_PLAIN_SCALAR_STYLE) {
        bl_err(reader->msg, BL_ECONFIG, "%s: has no value", option->key);
        return reader_fail(reader, BL_ECONFIG);
    }
    rc = job_value_set(option, base, text, reader->base_dir, reader->msg);
    return rc < 0 ? reader_fail(reader, rc) : 0;
}

static int reader_list(struct job_reader *reader, const struct job_option *option, yaml_mark_t mark)
{
    size_t stride = job_list_stride(option);
    size_t count_offset = job_list_count_offset(option);
    int rc = reader_expect(reader, YAML_SEQUENCE_START_EVENT, option->key, "a list");
    uint32_t count = 0;
    while (rc == 0) {
        rc = reader_next(reader);
        if (rc < 0 || reader->event.type == YAML_SEQUENCE_END_EVENT) {
            break;
        }
        if (count >= option->max) {
            bl_err(reader->msg, BL_ECONFIG, "%s: more than %" PRIu64 " items", option->key,
                   option->max);
            return reader_fail(reader, BL_ECONFIG);
        }
        rc = reader_set(reader, option, (char *)reader->job + count * stride);
        count++;
    }
    if (rc == 0 && count < option->min) {
        bl_err(reader->msg, BL_ECONFIG, "%s: %" PRIu32 " items, at least %" PRIu64 " are needed",
               option->key, count, option->min);
        return reader_fail_at(reader, BL_ECONFIG, mark);
    }
    if (rc == 0 && count_offset != JOB_NO_FIELD) {
        memcpy((char *)reader->job + count_offset, &count, sizeof(count));
    }
    return rc;
}

static int reader_unknown(const struct job_reader *reader, const char *key)
{
    char nearest[BL_JOB_KEY_MAX];
    const struct job_option *dotted = job_option_find(key);
    if (dotted != NULL && strchr(key, '.') != NULL) {
        bl_err(reader->msg, BL_ECONFIG, "unknown key '%s' (write '%s' under '%.*s:')", key,
               strrchr(key, '.') + 1, (int)strcspn(key, "."), key);
        return reader_fail(reader, BL_ECONFIG);
    }
    job_option_nearest(key, nearest);
    bl_err(reader->msg, BL_ECONFIG, "unknown key '%.60s' (nearest known: '%s')", key, nearest);
    return reader_fail(reader, BL_ECONFIG);
}

static int reader_mapping(struct job_reader *reader, const char *prefix, void *base,
                          struct job_mark *marks);

static int reader_root(struct job_reader *reader)
{
    struct job_mark marks[JOB_OPTIONS_MAX] = {{0, 0}};
    struct bl_job_root *root = &reader->job->roots[reader->job->root_count];
    yaml_mark_t mark = reader->event.start_mark;
    int rc = reader_expect(reader, YAML_MAPPING_START_EVENT, "roots[]",
                           "a list of mappings such as {path: DIR}");
    for (size_t i = 0; i < job_option_count && rc == 0; i++) {
        const struct job_option *option = &job_options[i];
        if (job_option_is_root(option) && option->fallback != NULL &&
            !(option->flags & JOB_ABSENT)) {
            rc = job_value_set(option, root, option->fallback, NULL, reader->msg);
        }
    }
    if (rc == 0) {
        rc = reader_mapping(reader, JOB_ROOT_PREFIX, root, marks);
    }
    if (rc == 0 && root->path[0] == '\0') {
        bl_err(reader->msg, BL_ECONFIG, "a root needs a path");
        return reader_fail_at(reader, BL_ECONFIG, mark);
    }
    for (size_t i = 0; i < job_option_count; i++) {
        if (marks[i].line != 0) {
            reader->marks.at[i] = marks[i];
        }
    }
    return rc;
}

static int reader_roots(struct job_reader *reader)
{
    int rc = reader_expect(reader, YAML_SEQUENCE_START_EVENT, "roots", "a list");
    while (rc == 0) {
        rc = reader_next(reader);
        if (rc < 0 || reader->event.type == YAML_SEQUENCE_END_EVENT) {
            break;
        }
        if (reader->job->root_count >= BL_JOB_ROOTS_MAX) {
            bl_err(reader->msg, BL_ECONFIG, "roots: more than %d items", BL_JOB_ROOTS_MAX);
            return reader_fail(reader, BL_ECONFIG);
        }
        rc = reader_root(reader);
        reader->job->root_count++;
    }
    return rc;
}

/* Notes that a section begins; a second one of its name is refused. */
static int reader_open_section(struct job_reader *reader, const char *key)
{
    for (uint32_t i = 0; i < reader->section_count; i++) {
        if (strcmp(reader->sections[i], key) == 0) {
            bl_err(reader->msg, BL_ECONFIG, "%s: given twice", key);
            return reader_fail(reader, BL_ECONFIG);
        }
    }
    BL_ASSERT(reader->section_count < JOB_SECTIONS_MAX);
    snprintf(reader->sections[reader->section_count++], BL_JOB_KEY_MAX, "%s", key);
    return 0;
}

static int reader_section(struct job_reader *reader, const char *key)
{
    char prefix[BL_JOB_KEY_MAX + 1];
    int rc = reader_open_section(reader, key);
    if (rc == 0) {
        rc = reader_next(reader);
    }
    if (rc < 0) {
        return rc;
    }
    if (strcmp(key, "roots") == 0) {
        return reader_roots(reader);
    }
    snprintf(prefix, sizeof(prefix), "%s.", key);
    rc = reader_expect(reader, YAML_MAPPING_START_EVENT, key, "a mapping");
    return rc < 0 ? rc : reader_mapping(reader, prefix, reader->job, reader->marks.at);
}

/* One key and its value. The key is the current event. */
static int reader_pair(struct job_reader *reader, const char *prefix, void *base,
                       struct job_mark *marks)
{
    char key[BL_JOB_KEY_MAX];
    char list_key[BL_JOB_KEY_MAX + 2];
    int rc = reader_expect(reader, YAML_SCALAR_EVENT, "a key", "a single word");
    if (rc < 0) {
        return rc;
    }
    const char *name = reader_scalar(reader);
    int n = snprintf(key, sizeof(key), "%s%s", prefix, name);
    if (n < 0 || (size_t)n >= sizeof(key) || strpbrk(name, ".[]") != NULL || name[0] == '\0') {
        return reader_unknown(reader, key);
    }
    snprintf(list_key, sizeof(list_key), "%s[]", key);
    const struct job_option *option = job_option_find(key);
    if (option == NULL) {
        option = job_option_find(list_key);
    }
    if (option == NULL) {
        /* Sections lie at the top only: the depth of the file is bounded by the table. */
        if (prefix[0] == '\0' && (job_section_exists(key) || strcmp(key, "roots") == 0)) {
            return reader_section(reader, key);
        }
        return reader_unknown(reader, key);
    }
    if (option->flags & JOB_ABSENT) {
        bl_err(reader->msg, BL_ENOTBUILT, "%s: not built into this version", key);
        return reader_fail(reader, BL_ENOTBUILT);
    }
    yaml_mark_t mark = reader->event.start_mark;
    struct job_mark *seen = &marks[option - job_options];
    if (seen->line != 0) {
        bl_err(reader->msg, BL_ECONFIG, "%s: given twice, first on line %u", key, seen->line);
        return reader_fail(reader, BL_ECONFIG);
    }
    rc = reader_next(reader);
    if (rc < 0) {
        return rc;
    }
    *seen = (struct job_mark){(uint32_t)reader->event.start_mark.line + 1,
                              (uint32_t)reader->event.start_mark.column + 1};
    if (job_option_is_list(option)) {
        return reader_list(reader, option, mark);
    }
    return reader_set(reader, option, base);
}

/* A mapping whose start is the current event; ends with its end as the current event. */
static int reader_mapping(struct job_reader *reader, const char *prefix, void *base,
                          struct job_mark *marks)
{
    for (;;) {
        int rc = reader_next(reader);
        if (rc < 0 || reader->event.type == YAML_MAPPING_END_EVENT) {
            return rc;
        }
        rc = reader_pair(reader, prefix, base, marks);
        if (rc < 0) {
            return rc;
        }
    }
}

static int reader_document(struct job_reader *reader)
{
    int rc = reader_next(reader); /* stream start */
    if (rc == 0) {
        rc = reader_next(reader);
    }
    if (rc == 0) {
        rc = reader_expect(reader, YAML_DOCUMENT_START_EVENT, "the job", "a mapping, it is empty");
    }
    if (rc == 0) {
        rc = reader_next(reader);
    }
    if (rc == 0) {
        rc = reader_expect(reader, YAML_MAPPING_START_EVENT, "the job", "a mapping of keys");
    }
    if (rc == 0) {
        rc = reader_mapping(reader, "", reader->job, reader->marks.at);
    }
    if (rc == 0) {
        rc = reader_next(reader); /* document end */
    }
    if (rc == 0) {
        rc = reader_next(reader);
    }
    if (rc == 0 && reader->event.type != YAML_STREAM_END_EVENT) {
        bl_err(reader->msg, BL_ECONFIG, "a second document is not allowed");
        return reader_fail(reader, BL_ECONFIG);
    }
    return rc;
}

static int job_set_defaults(struct bl_job *job, const char *base_dir, struct bl_errmsg *msg)
{
    memset(job, 0, sizeof(*job));
    for (size_t i = 0; i < job_option_count; i++) {
        const struct job_option *option = &job_options[i];
        if (option->fallback == NULL || job_option_is_list(option) || job_option_is_root(option) ||
            (option->flags & JOB_ABSENT)) {
            continue;
        }
        int rc = job_value_set(option, job, option->fallback, base_dir, msg);
        if (rc < 0) {
            return rc;
        }
    }
    /* The only list with a default. */
    job->train.beta1 = 0.9;
    job->train.beta2 = 0.95;
    return 0;
}

static int reader_check_required(const struct job_reader *reader)
{
    for (size_t i = 0; i < job_option_count; i++) {
        const struct job_option *option = &job_options[i];
        if (option->fallback == NULL && !job_option_is_root(option) &&
            reader->marks.at[i].line == 0) {
            size_t bytes = strlen(option->key) - (job_option_is_list(option) ? 2 : 0);
            return bl_err(reader->msg, BL_ECONFIG, "%s: missing key '%.*s' (%s)", reader->where,
                          (int)bytes, option->key, option->help);
        }
    }
    return 0;
}

int bl_job_parse(struct bl_job *ret, const char *text, size_t bytes, const char *where,
                 const char *base_dir, struct bl_errmsg *msg)
{
    if (bytes > BL_JOB_BYTES_MAX) {
        return bl_err(msg, BL_ECONFIG, "%s: larger than %d bytes", where, BL_JOB_BYTES_MAX);
    }
    int rc = job_set_defaults(ret, base_dir, msg);
    if (rc < 0) {
        return bl_err_in(msg, BL_ECONFIG, "%s", where);
    }
    struct job_reader *reader = calloc(1, sizeof(*reader));
    if (reader == NULL) {
        return bl_err_code(msg, -ENOMEM, "%s", where);
    }
    if (!yaml_parser_initialize(&reader->parser)) {
        free(reader);
        return bl_err_code(msg, -ENOMEM, "%s", where);
    }
    /* Callers may pass msg NULL; the places are put in front of it all the same. */
    struct bl_errmsg own = {{0}};
    reader->job = ret;
    reader->where = where;
    reader->base_dir = base_dir;
    reader->msg = msg != NULL ? msg : &own;
    reader->marks.where = where;
    yaml_parser_set_encoding(&reader->parser, YAML_UTF8_ENCODING);
    yaml_parser_set_input_string(&reader->parser, (const unsigned char *)text, bytes);
    rc = reader_document(reader);
    if (rc == 0) {
        rc = job_config_apply(ret, &reader->marks, base_dir, reader->msg);
    }
    if (rc == 0) {
        rc = reader_check_required(reader);
    }
    if (rc == 0) {
        rc = job_check(ret, &reader->marks, reader->msg);
    }
    if (reader->has_event) {
        yaml_event_delete(&reader->event);
    }
    yaml_parser_delete(&reader->parser);
    free(reader);
    return rc;
}

int bl_job_load(struct bl_job *ret, const char *path, struct bl_errmsg *msg)
{
    char *text;
    size_t bytes;
    int rc = bl_file_read(path, BL_JOB_BYTES_MAX, &text, &bytes, msg);
    if (rc < 0) {
        return rc;
    }
    /* The directory as named, not where a link to the file leads. */
    char dir[PATH_MAX];
    char full[PATH_MAX];
    const char *slash = strrchr(path, '/');
    int n = slash == NULL ? snprintf(dir, sizeof(dir), ".")
                          : snprintf(dir, sizeof(dir), "%.*s/", (int)(slash - path), path);
    if (n < 0 || (size_t)n >= sizeof(dir) || realpath(dir, full) == NULL) {
        rc = -errno;
        free(text);
        return bl_err_code(msg, rc < 0 ? rc : -ENAMETOOLONG, "%s", path);
    }
    rc = bl_job_parse(ret, text, bytes, path, full, msg);
    free(text);
    return rc;
}

int bl_job_set(struct bl_job *job, const char *key, const char *value, const char *base_dir,
               struct bl_errmsg *msg)
{
    const struct job_option *option = job_option_find(key);
    if (option == NULL || job_option_is_list(option) || job_option_is_root(option)) {
        char nearest[BL_JOB_KEY_MAX];
        job_option_nearest(key, nearest);
        return bl_err(msg, BL_ECONFIG, "unknown key '%.60s' (nearest known: '%s')", key, nearest);
    }
    if (option->flags & JOB_ABSENT) {
        return bl_err(msg, BL_ENOTBUILT, "%s: not built into this version", key);
    }
    struct bl_job *changed = malloc(sizeof(*changed));
    if (changed == NULL) {
        return bl_err_code(msg, -ENOMEM, "%s", key);
    }
    *changed = *job;
    int rc = job_value_set(option, changed, value, base_dir, msg);
    if (rc == 0) {
        rc = job_config_apply(changed, NULL, base_dir, msg);
    }
    if (rc == 0) {
        rc = job_check(changed, NULL, msg);
    }
    if (rc == 0) {
        *job = *changed;
    }
    free(changed);
    return rc;
}
