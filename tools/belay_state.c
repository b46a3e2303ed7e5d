/* SPDX-License-Identifier: Apache-2.0 */
/* The answer to `status`, read strictly: members of a wrong type are an error, unknown ones are
 * not (later daemons say more). */
#include <math.h>
#include <string.h>

#include "base/json.h"
#include "tools/belay.h"

uint64_t tool_member_number(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    return json_is_integer(value) && json_integer_value(value) >= 0
               ? (uint64_t)json_integer_value(value)
               : TOOL_NUMBER_NONE;
}

const char *tool_member_text(const json_t *object, const char *key)
{
    const char *text = json_string_value(json_object_get(object, key));
    return text != NULL ? text : "";
}

/* Reads members one after another; after the first that is wrong, no more. */
struct reader {
    const json_t *object;
    const char *inside; /* for the error's text: "newest_disk." */
    struct bl_errmsg *msg;
    int rc;
};

static const json_t *member(struct reader *reader, const char *key)
{
    const json_t *value = reader->rc == 0 ? json_object_get(reader->object, key) : NULL;
    return json_is_null(value) ? NULL : value;
}

static void wrong(struct reader *reader, const char *key, const char *what)
{
    reader->rc = bl_err(reader->msg, BL_EFORMAT, "the daemon's status: %s%s: must be %s",
                        reader->inside, key, what);
}

static void number(struct reader *reader, const char *key, uint64_t *ret)
{
    const json_t *value = member(reader, key);
    *ret = TOOL_NUMBER_NONE;
    if (value != NULL && (!json_is_integer(value) || json_integer_value(value) < 0)) {
        wrong(reader, key, "a whole number or null");
    } else if (value != NULL) {
        *ret = (uint64_t)json_integer_value(value);
    }
}

static void real(struct reader *reader, const char *key, double *ret)
{
    const json_t *value = member(reader, key);
    *ret = (double)NAN;
    if (value != NULL && !json_is_number(value)) {
        wrong(reader, key, "a number or null");
    } else if (value != NULL) {
        *ret = json_number_value(value);
    }
}

static void text(struct reader *reader, const char *key, char *out, size_t bytes)
{
    const json_t *value = member(reader, key);
    out[0] = '\0';
    if (value != NULL && (!json_is_string(value) || json_string_length(value) >= bytes)) {
        wrong(reader, key, "a text, not as long as this, or null");
    } else if (value != NULL) {
        snprintf(out, bytes, "%s", json_string_value(value));
    }
}

static const json_t *container(struct reader *reader, const char *key, json_type type)
{
    const json_t *value = member(reader, key);
    if (value != NULL && json_typeof(value) != type) {
        wrong(reader, key, type == JSON_ARRAY ? "a list or null" : "an object or null");
        return NULL;
    }
    return value;
}

/* A list of objects, or of texts. */
static const json_t *list(struct reader *reader, const char *key, json_type of, size_t count_max)
{
    const json_t *value = container(reader, key, JSON_ARRAY);
    if (value != NULL && json_array_size(value) > count_max) {
        wrong(reader, key, "a shorter list");
        return NULL;
    }
    for (size_t i = 0; i < json_array_size(value); i++) {
        if (json_typeof(json_array_get(value, i)) != of) {
            wrong(reader, key, of == JSON_OBJECT ? "a list of objects" : "a list of texts");
            return NULL;
        }
    }
    return value;
}

static void point(struct reader *reader, const char *key, const char *inside,
                  struct tool_point *ret)
{
    struct reader inner = {container(reader, key, JSON_OBJECT), inside, reader->msg, reader->rc};
    number(&inner, "step", &ret->step);
    number(&inner, "age_ms", &ret->age_ms);
    text(&inner, "dir", ret->dir, sizeof ret->dir);
    text(&inner, "root", ret->root, sizeof ret->root);
    reader->rc = inner.rc;
}

int tool_state_read(struct tool_state *ret, json_t *json, struct bl_errmsg *msg)
{
    memset(ret, 0, sizeof *ret);
    ret->json = json;
    struct reader reader = {json, "", msg, 0};
    uint64_t schema;
    number(&reader, "schema", &schema);
    if (reader.rc == 0 && schema != 1) {
        wrong(&reader, "schema", "1");
    }
    text(&reader, "verdict", ret->verdict, sizeof ret->verdict);
    if (reader.rc == 0 && ret->verdict[0] == '\0') {
        wrong(&reader, "verdict", "there");
    }
    text(&reader, "run", ret->run, sizeof ret->run);
    text(&reader, "name", ret->name, sizeof ret->name);
    text(&reader, "phase", ret->phase, sizeof ret->phase);
    text(&reader, "digest", ret->digest, sizeof ret->digest);
    number(&reader, "exit_code", &ret->exit_code);
    number(&reader, "generation", &ret->generation);
    number(&reader, "world", &ret->world);
    number(&reader, "ranks_wanted", &ret->ranks_wanted);
    struct reader layout = {container(&reader, "layout", JSON_OBJECT), "layout.", msg, reader.rc};
    number(&layout, "dp", &ret->dp);
    number(&layout, "tp", &ret->tp);
    number(&layout, "pp", &ret->pp);
    number(&layout, "dp_wanted", &ret->dp_wanted);
    number(&layout, "pp_wanted", &ret->pp_wanted);
    reader.rc = layout.rc;
    number(&reader, "step", &ret->step);
    number(&reader, "steps", &ret->steps);
    real(&reader, "loss", &ret->loss);
    real(&reader, "tokens_per_s", &ret->tokens_per_s);
    point(&reader, "newest_memory", "newest_memory.", &ret->memory);
    point(&reader, "newest_disk", "newest_disk.", &ret->disk);
    struct reader saves = {container(&reader, "saves", JSON_OBJECT), "saves.", msg, reader.rc};
    number(&saves, "committed", &ret->saves_committed);
    number(&saves, "failed", &ret->saves_failed);
    number(&saves, "skipped", &ret->saves_skipped);
    number(&saves, "writing", &ret->save_writing);
    ret->under_way = list(&saves, "under_way", JSON_OBJECT, WIRE_SAVES_MAX);
    reader.rc = saves.rc;
    ret->roots = list(&reader, "roots", JSON_OBJECT, WIRE_JOB_ROOTS);
    ret->nodes = list(&reader, "nodes", JSON_OBJECT, WIRE_RANKS_MAX);
    ret->ranks = list(&reader, "ranks", JSON_OBJECT, WIRE_RANKS_MAX * 2);
    ret->needs = list(&reader, "needs", JSON_STRING, 1024);
    ret->last_recovery = container(&reader, "last_recovery", JSON_OBJECT);
    ret->last_event = container(&reader, "last_event", JSON_OBJECT);
    ret->store = container(&reader, "store", JSON_OBJECT);
    if (reader.rc != 0) {
        tool_state_close(ret);
    }
    return reader.rc;
}

void tool_state_close(struct tool_state *state)
{
    if (state != NULL) {
        json_decref(state->json);
        memset(state, 0, sizeof *state);
    }
}

int tool_state_ask(struct tool_state *ret, struct tool_link *link, const char *path,
                   const char *job, struct bl_errmsg *msg)
{
    json_t *args = tool_job_args(job), *json = NULL;
    int rc = tool_link_ask(link, path, WIRE_VERB_STATUS, args, &json, msg);
    json_decref(args);
    return rc != 0 ? rc : tool_state_read(ret, json, msg);
}

bool tool_state_needs_attention(const struct tool_state *state)
{
    static const char *const bad[] = {"waiting", "held", "attention", "failed", "no_progress"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        if (strcmp(state->verdict, bad[i]) == 0) {
            return true;
        }
    }
    return json_array_size(state->needs) > 0;
}
