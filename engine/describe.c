/* SPDX-License-Identifier: Apache-2.0 */
/* The JSON texts that go through the daemon: parts, and what a manifest needs beyond them. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/job.h"
#include "base/json.h"
#include "engine/engine.h"

/* The names of tensors that did not change, as a JSON list; NULL when out of memory. */
static json_t *unchanged_json(const struct engine_names *names)
{
    json_t *list = json_array();

    for (uint32_t i = 0; list != NULL && i < names->count; i++) {
        if (json_array_append_new(list, json_string(names->names[i])) != 0) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

char *engine_part_json(const struct ckpt_part_result *part, const char *node, const char *codec,
                       const struct engine_watch *watch)
{
    const char *stored = codec[0] == '\0' ? "none" : strcmp(codec, "auto") == 0 ? "zstd" : codec;
    json_t *object = json_object();
    char *text = NULL;

    if (object != NULL && json_object_set_new(object, "name", json_string(part->name)) == 0 &&
        json_object_set_new(object, "node", json_string(node)) == 0 &&
        json_object_set_new(object, "bytes", json_integer((json_int_t)part->bytes)) == 0 &&
        json_object_set_new(object, "index", bl_json_new_hex64(part->index_digest)) == 0 &&
        json_object_set_new(object, "codec", json_string(stored)) == 0 &&
        (watch->unchanged.count == 0 ||
         json_object_set_new(object, "unchanged", unchanged_json(&watch->unchanged)) == 0)) {
        text = bl_json_dump(object);
    }
    json_decref(object);
    return text;
}

static int take_unchanged(const json_t *object, struct engine_names *ret, struct bl_errmsg *msg)
{
    const json_t *list = json_object_get(object, "unchanged");
    size_t count = json_array_size(list);

    for (size_t i = 0; i < count && i < ENGINE_WATCH_NAMES_MAX; i++) {
        const char *name = json_string_value(json_array_get(list, i));

        if (name == NULL || strlen(name) >= BL_TENSOR_NAME_MAX) {
            return bl_err(msg, BL_EFORMAT, "unchanged: must be names of tensors");
        }
        if (engine_names_add(ret, name) < 0) {
            return bl_err_code(msg, -ENOMEM, "unchanged");
        }
    }
    return 0;
}

int engine_part_parse(struct ckpt_part *ret, struct engine_part_said *said, const char *json,
                      struct bl_errmsg *msg)
{
    struct ckpt_part part = {0};
    json_t *object = NULL;
    int rc = json == NULL ? bl_err(msg, BL_EPROTO, "a part without description")
                          : bl_json_parse(json, strlen(json), &object, msg);

    rc = rc < 0 ? rc : bl_json_copy_string(object, "name", part.name, sizeof(part.name), msg);
    rc = rc < 0 ? rc : bl_json_copy_string(object, "node", part.node, sizeof(part.node), msg);
    rc = rc < 0 ? rc : bl_json_u64(object, "bytes", 1, INT64_MAX, &part.bytes, msg);
    rc = rc < 0 ? rc : bl_json_hex64(object, "index", &part.index_digest, msg);
    rc = rc < 0 ? rc : bl_json_copy_string(object, "codec", said->codec, sizeof(said->codec), msg);
    rc = rc < 0 ? rc : take_unchanged(object, said->unchanged, msg);
    json_decref(object);
    if (rc < 0) {
        return bl_err_in(msg, rc, "part description");
    }
    *ret = part;
    return 0;
}

/* Takes an optional number: a JSON integer, or a string of digits (64 bits do not fit the former).
 */
static int take_u64(const json_t *object, const char *key, uint64_t *ret, struct bl_errmsg *msg)
{
    const json_t *value = json_object_get(object, key);
    const char *text;
    char *end = NULL;

    if (value == NULL) {
        return 0;
    }
    if (json_is_string(value)) {
        text = json_string_value(value);
        errno = 0;
        *ret = strtoull(text, &end, 10);
        return errno != 0 || *text < '0' || *text > '9' || *end != '\0'
                   ? bl_err(msg, BL_EFORMAT, "%s: must be a number", key)
                   : 0;
    }
    return bl_json_u64(object, key, 0, INT64_MAX, ret, msg);
}

static int take_u32(const json_t *object, const char *key, uint32_t *ret, struct bl_errmsg *msg)
{
    return json_object_get(object, key) == NULL ? 0
                                                : bl_json_u32(object, key, 0, UINT32_MAX, ret, msg);
}

/* What the job itself says, as far as it can be read. */
static void fill_from_job(struct ckpt_manifest *manifest)
{
    struct bl_job *job = calloc(1, sizeof(*job)); /* too large for a worker's stack */

    if (job != NULL &&
        bl_job_parse(job, manifest->job, strlen(manifest->job), "job", "/", NULL) == 0) {
        manifest->lanes = job->lanes;
        manifest->seed = job->train.seed;
        manifest->samples = manifest->step * job->train.global_batch;
        manifest->metrics.tokens = manifest->samples * job->train.seq_len;
        manifest->function_id = bl_job_function_digest(job);
        manifest->layout = (struct ckpt_layout){
            .world = job->ranks, .tp = job->tp, .pp = job->pp, .zero = job->zero};
    }
    free(job);
}

static int fill_job(struct ckpt_manifest *manifest, const json_t *object, struct bl_errmsg *msg)
{
    const json_t *job = json_object_get(object, "job");

    if (job == NULL) {
        return 0;
    }
    if (!json_is_object(job)) {
        return bl_err(msg, BL_EFORMAT, "job: must be an object");
    }
    manifest->job = bl_json_dump(job);
    if (manifest->job == NULL) {
        return bl_err_code(msg, -ENOMEM, "job");
    }
    fill_from_job(manifest);
    return 0;
}

static int fill_layout(struct ckpt_layout *layout, const json_t *object, struct bl_errmsg *msg)
{
    const json_t *from = json_object_get(object, "layout");
    int rc;

    if (from == NULL) {
        return 0;
    }
    rc = take_u32(from, "world", &layout->world, msg);
    rc = rc < 0 ? rc : take_u32(from, "dp", &layout->dp, msg);
    rc = rc < 0 ? rc : take_u32(from, "tp", &layout->tp, msg);
    rc = rc < 0 ? rc : take_u32(from, "pp", &layout->pp, msg);
    rc = rc < 0 ? rc : take_u32(from, "zero", &layout->zero, msg);
    return rc < 0 ? bl_err_in(msg, rc, "layout") : 0;
}

static int fill_metrics(struct ckpt_metrics *metrics, const json_t *object, struct bl_errmsg *msg)
{
    const json_t *from = json_object_get(object, "metrics");
    const json_t *loss = json_object_get(from, "loss");
    int rc = from == NULL ? 0 : take_u64(from, "tokens", &metrics->tokens, msg);

    metrics->loss = json_is_number(loss) ? json_number_value(loss) : (double)NAN;
    return rc < 0 ? bl_err_in(msg, rc, "metrics") : 0;
}

static int fill_digests(struct ckpt_manifest *manifest, const json_t *object, struct bl_errmsg *msg)
{
    const json_t *state = json_object_get(object, "state_digest");
    const char *text;
    int rc = 0;

    if (json_object_get(object, "function") != NULL) {
        rc = bl_json_hex64(object, "function", &manifest->function_id, msg);
    }
    if (rc == 0 && state != NULL) {
        text = json_is_string(state) ? json_string_value(state) : "";
        if (strlen(text) != 32 || sscanf(text, "%16" SCNx64 "%16" SCNx64, &manifest->state.sum[0],
                                         &manifest->state.sum[1]) != 2) {
            rc = bl_err(msg, BL_EFORMAT, "state_digest: must be 32 hex digits");
        }
    }
    return rc;
}

int engine_manifest_fill(struct ckpt_manifest *manifest, const char *json, struct bl_errmsg *msg)
{
    json_t *object = NULL;
    int rc;

    manifest->metrics.loss = (double)NAN;
    if (json == NULL || json[0] == '\0') {
        return 0;
    }
    rc = bl_json_parse(json, strlen(json), &object, msg);
    if (rc == 0 && !json_is_object(object)) {
        rc = bl_err(msg, BL_EFORMAT, "must be an object");
    }
    rc = rc < 0 ? rc : fill_job(manifest, object, msg);
    rc = rc < 0 ? rc : fill_layout(&manifest->layout, object, msg);
    rc = rc < 0 ? rc : fill_metrics(&manifest->metrics, object, msg);
    rc = rc < 0 ? rc : take_u32(object, "lanes", &manifest->lanes, msg);
    rc = rc < 0 ? rc : take_u64(object, "seed", &manifest->seed, msg);
    rc = rc < 0 ? rc : take_u64(object, "samples", &manifest->samples, msg);
    rc = rc < 0 ? rc : fill_digests(manifest, object, msg);
    json_decref(object);
    return rc < 0 ? bl_err_in(msg, rc, "manifest description") : 0;
}
