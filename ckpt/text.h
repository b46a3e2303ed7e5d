/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Text of files: a builder that grows, and a reader of JSON that pulls one value after the other.
 * The reader keeps nothing in memory but its place, does not recurse, and remembers the first
 * error, so that callers check once at the end of a group. Checkpoint headers can have a million
 * entries: a tree of them would cost ten times their bytes.
 */
#ifndef BL_CKPT_TEXT_H
#define BL_CKPT_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

struct ckpt_text {
    char *data; /* owned; NUL after the end */
    size_t bytes, room;
    bool failed; /* out of memory: all later calls do nothing */
};

void ckpt_text_close(struct ckpt_text *text);
void ckpt_text_add(struct ckpt_text *text, const void *data, size_t bytes);
void ckpt_text_printf(struct ckpt_text *text, const char *fmt, ...) BL_PRINTF(2, 3);
/* A JSON string with its quotes. */
void ckpt_text_string(struct ckpt_text *text, const char *value);
/* [1,2,3] */
void ckpt_text_u64s(struct ckpt_text *text, const uint64_t *values, uint32_t count);

#define CKPT_JSON_DEPTH_MAX 64u

struct ckpt_json {
    const char *at, *start, *end; /* borrowed */
    int code;                     /* 0, or the first error */
    char why[96];
};

void ckpt_json_init(struct ckpt_json *reader, const char *text, size_t bytes);
/* Remembers an error unless there is one already. */
void ckpt_json_fail(struct ckpt_json *reader, int code, const char *fmt, ...) BL_PRINTF(3, 4);
/* The remembered error with its text and the byte where it stands, or 0. */
BL_MUST_CHECK int ckpt_json_error(const struct ckpt_json *reader, struct bl_errmsg *msg);

/* Is `c` the next character (after white space)? Takes it then. False after an error. */
bool ckpt_json_is(struct ckpt_json *reader, char c);
/* Takes `c`, or fails. */
void ckpt_json_want(struct ckpt_json *reader, char c);
/* Takes a string into `ret` (room with the NUL); too long: BL_ELIMIT; a NUL inside: BL_EFORMAT. */
void ckpt_json_string(struct ckpt_json *reader, char *ret, size_t room);
/* Takes `"key":`, or fails. */
void ckpt_json_key(struct ckpt_json *reader, const char *key);
/* Takes a whole number of 0 to 2^64-1 without sign, point or leading zeros. */
uint64_t ckpt_json_u64(struct ckpt_json *reader);
uint32_t ckpt_json_u32(struct ckpt_json *reader);
/* Takes a number, or null as NaN. */
double ckpt_json_double(struct ckpt_json *reader);
/* Takes a string of exactly `digits` lower-case hex digits (at most 16). */
uint64_t ckpt_json_hex(struct ckpt_json *reader, uint32_t digits);
/* Takes [n, n, ...] of at most count_max numbers; returns how many. */
uint32_t ckpt_json_u64s(struct ckpt_json *reader, uint64_t *ret, uint32_t count_max);
/* Takes any one value; the text of it is from *ret_from to reader->at. */
void ckpt_json_skip(struct ckpt_json *reader, const char **ret_from);
/* Only white space is left? Else fails. */
void ckpt_json_finish(struct ckpt_json *reader);

#endif
