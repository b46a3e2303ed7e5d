/* SPDX-License-Identifier: Apache-2.0 */
/* The job's canonical text, the function digest, and what differs between two jobs. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/digest.h"
#include "base/job_options.h"
#include "base/json.h"

static json_t *text_value(const struct job_option *option, const void *base)
{
    char text[BL_PATH_MAX];
    job_value_format(option, base, text, sizeof(text));
    switch (option->type) {
    case JOB_BOOL:
        return json_boolean(strcmp(text, "true") == 0);
    case JOB_U32:
    case JOB_U64:
    case JOB_SIZE:
        if (strcmp(text, "auto") == 0) {
            break;
        }
        return json_integer((json_int_t)strtoull(text, NULL, 10));
    case JOB_REAL:
        return json_real(strtod(text, NULL));
    case JOB_TEXT:
    case JOB_PATH:
    case JOB_CHOICE:
    case JOB_INDEX:
    case JOB_MS:
        break;
    }
    return json_string(text);
}

static uint32_t list_count(const struct job_option *option, const struct bl_job *job)
{
    size_t at = job_list_count_offset(option);
    uint32_t count = (uint32_t)option->max;
    if (at != JOB_NO_FIELD) {
        memcpy(&count, (const char *)job + at, sizeof(count));
    }
    return count;
}

static json_t *text_list(const struct job_option *option, const struct bl_job *job)
{
    json_t *list = json_array();
    uint32_t count = list_count(option, job);
    size_t stride = job_list_stride(option);
    for (uint32_t i = 0; i < count && list != NULL; i++) {
        if (json_array_append_new(list, text_value(option, (const char *)job + i * stride)) < 0) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

/* Sets `key`, which may be "section.name", in `object`. Takes `value`. */
static int text_put(json_t *object, const char *key, json_t *value)
{
    const char *dot = strchr(key, '.');
    if (dot != NULL) {
        char section[BL_JOB_KEY_MAX];
        snprintf(section, sizeof(section), "%.*s", (int)(dot - key), key);
        json_t *inner = json_object_get(object, section);
        if (inner == NULL) {
            inner = json_object();
            if (json_object_set_new(object, section, inner) < 0) {
                json_decref(value);
                return -1;
            }
        }
        object = inner;
        key = dot + 1;
    }
    char name[BL_JOB_KEY_MAX];
    snprintf(name, sizeof(name), "%.*s", (int)strcspn(key, "["), key);
    return json_object_set_new(object, name, value);
}

static json_t *text_roots(const struct bl_job *job)
{
    json_t *list = json_array();
    for (uint32_t r = 0; r < job->root_count; r++) {
        json_t *root = json_object();
        for (size_t i = 0; i < job_option_count; i++) {
            const struct job_option *option = &job_options[i];
            if (job_option_is_root(option) && !(option->flags & JOB_ABSENT) &&
                text_put(root, option->key + strlen(JOB_ROOT_PREFIX),
                         text_value(option, &job->roots[r])) < 0) {
                json_decref(root);
                json_decref(list);
                return NULL;
            }
        }
        if (json_array_append_new(list, root) < 0) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

/* All options, or with `function_only` those that the arithmetic depends on. NULL: no memory. */
static json_t *text_build(const struct bl_job *job, int function_only)
{
    json_t *object = json_object();
    int rc = object != NULL ? 0 : -1;
    for (size_t i = 0; i < job_option_count && rc == 0; i++) {
        const struct job_option *option = &job_options[i];
        if ((option->flags & JOB_ABSENT) || job_option_is_root(option) ||
            (function_only && !(option->flags & JOB_FUNCTION))) {
            continue;
        }
        rc =
            text_put(object, option->key,
                     job_option_is_list(option) ? text_list(option, job) : text_value(option, job));
    }
    if (rc == 0 && !function_only) {
        rc = json_object_set_new(object, "roots", text_roots(job));
    }
    if (rc < 0) {
        json_decref(object);
        return NULL;
    }
    return object;
}

char *bl_job_to_json(const struct bl_job *job)
{
    json_t *object = text_build(job, 0);
    char *text = object != NULL ? bl_json_dump(object) : NULL;
    json_decref(object);
    return text;
}

uint64_t bl_job_function_digest(const struct bl_job *job)
{
    json_t *object = text_build(job, 1);
    char *text = object != NULL ? bl_json_dump(object) : NULL;
    BL_ASSERT(text != NULL);
    uint64_t digest = bl_xxh3(text, strlen(text));
    json_decref(object);
    free(text);
    return digest;
}

static int frozen_differs(const struct job_option *option, const struct bl_job *a,
                          const struct bl_job *b)
{
    char text_a[BL_PATH_MAX];
    char text_b[BL_PATH_MAX];
    uint32_t count = 1;
    size_t stride = 0;
    if (job_option_is_list(option)) {
        count = list_count(option, a);
        stride = job_list_stride(option);
        if (count != list_count(option, b)) {
            return 1;
        }
    }
    for (uint32_t i = 0; i < count; i++) {
        job_value_format(option, (const char *)a + i * stride, text_a, sizeof(text_a));
        job_value_format(option, (const char *)b + i * stride, text_b, sizeof(text_b));
        if (strcmp(text_a, text_b) != 0) {
            return 1;
        }
    }
    return 0;
}

const char *bl_job_frozen_difference(const struct bl_job *a, const struct bl_job *b)
{
    for (size_t i = 0; i < job_option_count; i++) {
        const struct job_option *option = &job_options[i];
        if (option->change == JOB_FROZEN && !(option->flags & JOB_ABSENT) &&
            frozen_differs(option, a, b)) {
            return option->key;
        }
    }
    return NULL;
}
