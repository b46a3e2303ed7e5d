/* SPDX-License-Identifier: Apache-2.0 */
/*
 * JSON over jansson: bounded and strict in, canonical out. Values are jansson's (json_t, reference
 * counted); the getters here are views into their object, and their errors name the key:
 * "step: missing", "world.ranks: must be an integer from 1 to 16384". Any thread, one at a time per
 * object.
 */
#ifndef BL_BASE_JSON_H
#define BL_BASE_JSON_H

#include <jansson.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

#define BL_JSON_DEPTH_MAX 32

/* Parses exactly one value in `bytes` of text. Refused with BL_EFORMAT and line and column: syntax,
 * duplicate keys, more than BL_JSON_DEPTH_MAX levels (looked at before anything is built), NUL in a
 * string, anything behind the value. *ret is owned (json_decref). */
BL_MUST_CHECK int bl_json_parse(const char *text, size_t bytes, json_t **ret,
                                struct bl_errmsg *msg);

/* Reads a file of at most `bytes_max` and parses it; the text of an error names the file. */
BL_MUST_CHECK int bl_json_load(const char *path, size_t bytes_max, json_t **ret,
                               struct bl_errmsg *msg);

/* The canonical text: sorted keys, no white space, reals with 17 digits. Equal values give equal
 * text. Owned (free()); NULL when out of memory or not encodable. */
char *bl_json_dump(const json_t *value);

/* Members of `object`. All return BL_EFORMAT when the key is missing, of another type or out of
 * bounds; *ret is a view (strings, containers) or a copy, untouched on failure. */
BL_MUST_CHECK int bl_json_u64(const json_t *object, const char *key, uint64_t min, uint64_t max,
                              uint64_t *ret, struct bl_errmsg *msg);
BL_MUST_CHECK int bl_json_u32(const json_t *object, const char *key, uint32_t min, uint32_t max,
                              uint32_t *ret, struct bl_errmsg *msg);
BL_MUST_CHECK int bl_json_real(const json_t *object, const char *key, double *ret,
                               struct bl_errmsg *msg);
BL_MUST_CHECK int bl_json_bool(const json_t *object, const char *key, int *ret,
                               struct bl_errmsg *msg);
/* The same of members that may be missing or null: then *ret is `otherwise`. */
BL_MUST_CHECK int bl_json_u32_or(const json_t *object, const char *key, uint32_t otherwise,
                                 uint32_t *ret, struct bl_errmsg *msg);
BL_MUST_CHECK int bl_json_real_or(const json_t *object, const char *key, double otherwise,
                                  double *ret, struct bl_errmsg *msg);
BL_MUST_CHECK int bl_json_bool_or(const json_t *object, const char *key, int otherwise, int *ret,
                                  struct bl_errmsg *msg);
/* At most `bytes_max` bytes with the NUL. */
BL_MUST_CHECK int bl_json_string(const json_t *object, const char *key, size_t bytes_max,
                                 const char **ret, struct bl_errmsg *msg);
/* The same, copied into `out` of `out_bytes`. */
BL_MUST_CHECK int bl_json_copy_string(const json_t *object, const char *key, char *out,
                                      size_t out_bytes, struct bl_errmsg *msg);
/* 64 bits as a string of 16 lower-case hex digits: JSON integers end at 2^63. */
BL_MUST_CHECK int bl_json_hex64(const json_t *object, const char *key, uint64_t *ret,
                                struct bl_errmsg *msg);
BL_MUST_CHECK int bl_json_object(const json_t *object, const char *key, json_t **ret,
                                 struct bl_errmsg *msg);
BL_MUST_CHECK int bl_json_array(const json_t *object, const char *key, size_t count_max,
                                json_t **ret, struct bl_errmsg *msg);

/* A new string value of 16 hex digits. Owned; NULL when out of memory. */
json_t *bl_json_new_hex64(uint64_t value);

/* Refuses members that are not among `keys` (a list that ends with NULL). */
BL_MUST_CHECK int bl_json_only(const json_t *object, const char *const *keys,
                               struct bl_errmsg *msg);

#endif
