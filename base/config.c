/* SPDX-License-Identifier: Apache-2.0 */
#include "base/config.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

#include "base/file.h"

#define CONFIG_KEYS_MAX 256

struct config_reader {
    yaml_parser_t parser;
    yaml_event_t event; /* the current one, owned */
    int has_event;
    const char *where;
    struct bl_errmsg *msg;
    char *keys[CONFIG_KEYS_MAX]; /* owned; seen so far */
    size_t key_count;
};

static int config_fail(const struct config_reader *reader, yaml_mark_t mark, const char *text)
{
    return bl_err(reader->msg, BL_ECONFIG, "%s:%zu:%zu: %s", reader->where, mark.line + 1,
                  mark.column + 1, text);
}

static int config_next(struct config_reader *reader)
{
    if (reader->has_event) {
        yaml_event_delete(&reader->event);
        reader->has_event = 0;
    }
    if (!yaml_parser_parse(&reader->parser, &reader->event)) {
        const char *problem = reader->parser.problem;
        return config_fail(reader, reader->parser.problem_mark,
                           problem != NULL ? problem : "not YAML");
    }
    reader->has_event = 1;
    return 0;
}

/* A plain word or quoted text without anchor, tag or NUL? */
static int config_is_value(const yaml_event_t *event)
{
    return event->type == YAML_SCALAR_EVENT && event->data.scalar.anchor == NULL &&
           event->data.scalar.tag == NULL &&
           strlen((const char *)event->data.scalar.value) == event->data.scalar.length;
}

/* Keeps the current event's text as a key. */
static int config_take_key(struct config_reader *reader)
{
    const char *key = (const char *)reader->event.data.scalar.value;
    for (size_t i = 0; i < reader->key_count; i++) {
        if (strcmp(reader->keys[i], key) == 0) {
            return config_fail(reader, reader->event.start_mark, "key given twice");
        }
    }
    if (reader->key_count == CONFIG_KEYS_MAX) {
        return config_fail(reader, reader->event.start_mark, "too many keys");
    }
    char *copy = strdup(key);
    if (copy == NULL) {
        return bl_err_code(reader->msg, -ENOMEM, "%s", reader->where);
    }
    reader->keys[reader->key_count++] = copy;
    return 0;
}

static int config_mapping(struct config_reader *reader, bl_config_take take, void *context)
{
    for (;;) {
        int rc = config_next(reader);
        if (rc < 0 || reader->event.type == YAML_MAPPING_END_EVENT) {
            return rc;
        }
        yaml_mark_t mark = reader->event.start_mark;
        if (!config_is_value(&reader->event)) {
            return config_fail(reader, mark, "a key is wanted here");
        }
        rc = config_take_key(reader);
        if (rc == 0) {
            rc = config_next(reader);
        }
        if (rc < 0) {
            return rc;
        }
        const char *value = (const char *)reader->event.data.scalar.value;
        if (!config_is_value(&reader->event) ||
            (value[0] == '\0' && reader->event.data.scalar.style == YAML_PLAIN_SCALAR_STYLE)) {
            return config_fail(reader, reader->event.start_mark, "a single value is wanted here");
        }
        rc = take(context, reader->keys[reader->key_count - 1], value, reader->msg);
        if (rc < 0) {
            return bl_err_in(reader->msg, rc, "%s:%zu:%zu", reader->where, mark.line + 1,
                             mark.column + 1);
        }
    }
}

static int config_document(struct config_reader *reader, bl_config_take take, void *context)
{
    int rc = config_next(reader); /* stream start */
    if (rc == 0) {
        rc = config_next(reader);
    }
    if (rc < 0 || reader->event.type == YAML_STREAM_END_EVENT) {
        return rc;
    }
    rc = config_next(reader); /* behind the document's start */
    if (rc == 0 && (reader->event.type != YAML_MAPPING_START_EVENT ||
                    reader->event.data.mapping_start.anchor != NULL ||
                    reader->event.data.mapping_start.tag != NULL)) {
        return config_fail(reader, reader->event.start_mark, "a mapping of keys is wanted here");
    }
    if (rc == 0) {
        rc = config_mapping(reader, take, context);
    }
    if (rc == 0) {
        rc = config_next(reader); /* document end */
    }
    if (rc == 0) {
        rc = config_next(reader);
    }
    if (rc == 0 && reader->event.type != YAML_STREAM_END_EVENT) {
        return config_fail(reader, reader->event.start_mark, "a second document is not allowed");
    }
    return rc;
}

int bl_config_parse(const char *text, size_t bytes, const char *where, bl_config_take take,
                    void *context, struct bl_errmsg *msg)
{
    struct bl_errmsg own = {{0}};
    struct config_reader *reader = calloc(1, sizeof(*reader));
    if (reader == NULL) {
        return bl_err_code(msg, -ENOMEM, "%s", where);
    }
    if (!yaml_parser_initialize(&reader->parser)) {
        free(reader);
        return bl_err_code(msg, -ENOMEM, "%s", where);
    }
    reader->where = where;
    reader->msg = msg != NULL ? msg : &own;
    yaml_parser_set_encoding(&reader->parser, YAML_UTF8_ENCODING);
    yaml_parser_set_input_string(&reader->parser, (const unsigned char *)text, bytes);
    int rc = config_document(reader, take, context);
    if (reader->has_event) {
        yaml_event_delete(&reader->event);
    }
    yaml_parser_delete(&reader->parser);
    for (size_t i = 0; i < reader->key_count; i++) {
        free(reader->keys[i]);
    }
    free(reader);
    return rc;
}

int bl_config_read(const char *path, size_t bytes_max, bl_config_take take, void *context,
                   struct bl_errmsg *msg)
{
    char *text;
    size_t bytes;
    int rc = bl_file_read(path, bytes_max, &text, &bytes, msg);
    if (rc < 0) {
        return rc;
    }
    rc = bl_config_parse(text, bytes, path, take, context, msg);
    free(text);
    return rc;
}
