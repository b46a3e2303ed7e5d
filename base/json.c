/* SPDX-License-Identifier: Apache-2.0 */
#include "base/json.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"

/* Looks at the nesting alone, so that a deep text costs no stack and no memory. */
static int json_check_depth(const char *text, size_t bytes, struct bl_errmsg *msg)
{
    int depth = 0;
    int in_string = 0;
    for (size_t i = 0; i < bytes; i++) {
        char c = text[i];
        if (in_string) {
            if (c == '\\') {
                i++;
            } else if (c == '"') {
                in_string = 0;
            }
        } else if (c == '"') {
            in_string = 1;
        } else if (c == '{' || c == '[') {
            if (++depth > BL_JSON_DEPTH_MAX) {
                return bl_err(msg, BL_EFORMAT, "nested deeper than %d levels", BL_JSON_DEPTH_MAX);
            }
        } else if (c == '}' || c == ']') {
            depth--;
        }
    }
    return 0;
}

int bl_json_parse(const char *text, size_t bytes, json_t **ret, struct bl_errmsg *msg)
{
    int rc = json_check_depth(text, bytes, msg);
    if (rc < 0) {
        return rc;
    }
    json_error_t error;
    json_t *value = json_loadb(text, bytes, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &error);
    if (value == NULL) {
        if (json_error_code(&error) == json_error_out_of_memory) {
            return bl_err_code(msg, -ENOMEM, "JSON");
        }
        return bl_err(msg, BL_EFORMAT, "%d:%d: %s", error.line, error.column, error.text);
    }
    *ret = value;
    return 0;
}

int bl_json_load(const char *path, size_t bytes_max, json_t **ret, struct bl_errmsg *msg)
{
    char *text;
    size_t bytes;
    int rc = bl_file_read(path, bytes_max, &text, &bytes, msg);
    if (rc < 0) {
        return rc;
    }
    rc = bl_json_parse(text, bytes, ret, msg);
    free(text);
    return rc < 0 ? bl_err_in(msg, rc, "%s", path) : 0;
}

char *bl_json_dump(const json_t *value)
{
    return json_dumps(value,
                      JSON_SORT_KEYS | JSON_COMPACT | JSON_ENCODE_ANY | JSON_REAL_PRECISION(17));
}

/* The member, or NULL with the text set. */
static json_t *json_member(const json_t *object, const char *key, struct bl_errmsg *msg)
{
    if (!json_is_object(object)) {
        bl_err(msg, BL_EFORMAT, "%s: its parent is no object", key);
        return NULL;
    }
    json_t *value = json_object_get(object, key);
    if (value == NULL) {
        bl_err(msg, BL_EFORMAT, "%s: missing", key);
    }
    return value;
}

int bl_json_u64(const json_t *object, const char *key, uint64_t min, uint64_t max, uint64_t *ret,
                struct bl_errmsg *msg)
{
    const json_t *value = json_member(object, key, msg);
    if (value == NULL) {
        return BL_EFORMAT;
    }
    json_int_t number = json_integer_value(value);
    if (!json_is_integer(value) || number < 0 || (uint64_t)number < min || (uint64_t)number > max) {
        return bl_err(msg, BL_EFORMAT, "%s: must be an integer from %" PRIu64 " to %" PRIu64, key,
                      min, max);
    }
    *ret = (uint64_t)number;
    return 0;
}

int bl_json_u32(const json_t *object, const char *key, uint32_t min, uint32_t max, uint32_t *ret,
                struct bl_errmsg *msg)
{
    uint64_t wide = 0;
    int rc = bl_json_u64(object, key, min, max, &wide, msg);
    if (rc == 0) {
        *ret = (uint32_t)wide;
    }
    return rc;
}

int bl_json_real(const json_t *object, const char *key, double *ret, struct bl_errmsg *msg)
{
    const json_t *value = json_member(object, key, msg);
    if (value == NULL) {
        return BL_EFORMAT;
    }
    if (!json_is_number(value)) {
        return bl_err(msg, BL_EFORMAT, "%s: must be a number", key);
    }
    *ret = json_number_value(value);
    return 0;
}

int bl_json_bool(const json_t *object, const char *key, int *ret, struct bl_errmsg *msg)
{
    const json_t *value = json_member(object, key, msg);
    if (value == NULL) {
        return BL_EFORMAT;
    }
    if (!json_is_boolean(value)) {
        return bl_err(msg, BL_EFORMAT, "%s: must be true or false", key);
    }
    *ret = json_is_true(value);
    return 0;
}

static int is_left_out(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    return value == NULL || json_is_null(value);
}

int bl_json_u32_or(const json_t *object, const char *key, uint32_t otherwise, uint32_t *ret,
                   struct bl_errmsg *msg)
{
    if (is_left_out(object, key)) {
        *ret = otherwise;
        return 0;
    }
    return bl_json_u32(object, key, 0, UINT32_MAX, ret, msg);
}

int bl_json_real_or(const json_t *object, const char *key, double otherwise, double *ret,
                    struct bl_errmsg *msg)
{
    if (is_left_out(object, key)) {
        *ret = otherwise;
        return 0;
    }
    return bl_json_real(object, key, ret, msg);
}

int bl_json_bool_or(const json_t *object, const char *key, int otherwise, int *ret,
                    struct bl_errmsg *msg)
{
    if (is_left_out(object, key)) {
        *ret = otherwise;
        return 0;
    }
    return bl_json_bool(object, key, ret, msg);
}

int bl_json_string(const json_t *object, const char *key, size_t bytes_max, const char **ret,
                   struct bl_errmsg *msg)
{
    const json_t *value = json_member(object, key, msg);
    if (value == NULL) {
        return BL_EFORMAT;
    }
    if (!json_is_string(value)) {
        return bl_err(msg, BL_EFORMAT, "%s: must be a string", key);
    }
    if (json_string_length(value) >= bytes_max) {
        return bl_err(msg, BL_EFORMAT, "%s: longer than %zu bytes", key, bytes_max - 1);
    }
    *ret = json_string_value(value);
    return 0;
}

int bl_json_copy_string(const json_t *object, const char *key, char *out, size_t out_bytes,
                        struct bl_errmsg *msg)
{
    const char *text = NULL;
    int rc = bl_json_string(object, key, out_bytes, &text, msg);
    if (rc == 0) {
        memcpy(out, text, strlen(text) + 1);
    }
    return rc;
}

int bl_json_hex64(const json_t *object, const char *key, uint64_t *ret, struct bl_errmsg *msg)
{
    const char *text = NULL;
    int rc = bl_json_string(object, key, SIZE_MAX, &text, msg);
    if (rc < 0) {
        return rc;
    }
    if (strlen(text) != 16 || strspn(text, "0123456789abcdef") != 16) {
        return bl_err(msg, BL_EFORMAT, "%s: must be 16 lower-case hex digits", key);
    }
    *ret = strtoull(text, NULL, 16);
    return 0;
}

int bl_json_object(const json_t *object, const char *key, json_t **ret, struct bl_errmsg *msg)
{
    json_t *value = json_member(object, key, msg);
    if (value == NULL) {
        return BL_EFORMAT;
    }
    if (!json_is_object(value)) {
        return bl_err(msg, BL_EFORMAT, "%s: must be an object", key);
    }
    *ret = value;
    return 0;
}

int bl_json_array(const json_t *object, const char *key, size_t count_max, json_t **ret,
                  struct bl_errmsg *msg)
{
    json_t *value = json_member(object, key, msg);
    if (value == NULL) {
        return BL_EFORMAT;
    }
    if (!json_is_array(value) || json_array_size(value) > count_max) {
        return bl_err(msg, BL_EFORMAT, "%s: must be an array of at most %zu", key, count_max);
    }
    *ret = value;
    return 0;
}

json_t *bl_json_new_hex64(uint64_t value)
{
    char text[17];
    snprintf(text, sizeof(text), "%016" PRIx64, value);
    return json_string(text);
}

int bl_json_only(const json_t *object, const char *const *keys, struct bl_errmsg *msg)
{
    const char *key;
    json_t *value;
    /* jansson's iteration takes no const, and changes nothing. */
    json_object_foreach((json_t *)(uintptr_t)object, key, value)
    {
        size_t i = 0;
        while (keys[i] != NULL && strcmp(keys[i], key) != 0) {
            i++;
        }
        if (keys[i] == NULL) {
            return bl_err(msg, BL_EFORMAT, "%s: unknown key", key);
        }
    }
    return 0;
}
