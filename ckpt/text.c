/* SPDX-License-Identifier: Apache-2.0 */
/* The text builder and the JSON pull reader. */
#include "ckpt/text.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void ckpt_text_close(struct ckpt_text *text)
{
    free(text->data);
    memset(text, 0, sizeof(*text));
}

static bool text_reserve(struct ckpt_text *text, size_t more)
{
    size_t room = text->room == 0 ? 4096 : text->room;
    char *grown;

    if (text->failed) {
        return false;
    }
    while (room - text->bytes < more + 1) {
        room *= 2;
    }
    if (room != text->room) {
        grown = realloc(text->data, room);
        if (grown == NULL) {
            text->failed = true;
            return false;
        }
        text->data = grown;
        text->room = room;
    }
    return true;
}

void ckpt_text_add(struct ckpt_text *text, const void *data, size_t bytes)
{
    if (!text_reserve(text, bytes)) {
        return;
    }
    memcpy(text->data + text->bytes, data, bytes);
    text->bytes += bytes;
    text->data[text->bytes] = '\0';
}

void ckpt_text_printf(struct ckpt_text *text, const char *fmt, ...)
{
    char small[512];
    va_list args;
    int n;

    va_start(args, fmt);
    n = vsnprintf(small, sizeof(small), fmt, args);
    va_end(args);
    BL_ASSERT(n >= 0 && n < (int)sizeof(small)); /* long values go through the other calls */
    ckpt_text_add(text, small, (size_t)n);
}

void ckpt_text_string(struct ckpt_text *text, const char *value)
{
    ckpt_text_add(text, "\"", 1);
    for (const char *c = value; *c != '\0'; c++) {
        if (*c == '"' || *c == '\\') {
            ckpt_text_printf(text, "\\%c", *c);
        } else if ((unsigned char)*c < 0x20) {
            ckpt_text_printf(text, "\\u%04x", (unsigned)(unsigned char)*c);
        } else {
            ckpt_text_add(text, c, 1);
        }
    }
    ckpt_text_add(text, "\"", 1);
}

void ckpt_text_u64s(struct ckpt_text *text, const uint64_t *values, uint32_t count)
{
    ckpt_text_add(text, "[", 1);
    for (uint32_t i = 0; i < count; i++) {
        ckpt_text_printf(text, "%s%llu", i == 0 ? "" : ",", (unsigned long long)values[i]);
    }
    ckpt_text_add(text, "]", 1);
}

void ckpt_json_init(struct ckpt_json *reader, const char *text, size_t bytes)
{
    memset(reader, 0, sizeof(*reader));
    reader->at = reader->start = text;
    reader->end = text + bytes;
}

void ckpt_json_fail(struct ckpt_json *reader, int code, const char *fmt, ...)
{
    va_list args;

    if (reader->code != 0) {
        return;
    }
    reader->code = code;
    va_start(args, fmt);
    vsnprintf(reader->why, sizeof(reader->why), fmt, args);
    va_end(args);
}

int ckpt_json_error(const struct ckpt_json *reader, struct bl_errmsg *msg)
{
    if (reader->code == 0) {
        return 0;
    }
    return bl_err(msg, reader->code, "byte %zu: %s", (size_t)(reader->at - reader->start),
                  reader->why);
}

static void skip_space(struct ckpt_json *reader)
{
    while (reader->at < reader->end && (*reader->at == ' ' || *reader->at == '\n' ||
                                        *reader->at == '\t' || *reader->at == '\r')) {
        reader->at++;
    }
}

bool ckpt_json_is(struct ckpt_json *reader, char c)
{
    if (reader->code != 0) {
        return false;
    }
    skip_space(reader);
    if (reader->at < reader->end && *reader->at == c) {
        reader->at++;
        return true;
    }
    return false;
}

void ckpt_json_want(struct ckpt_json *reader, char c)
{
    if (!ckpt_json_is(reader, c)) {
        ckpt_json_fail(reader, BL_EFORMAT, "'%c' expected", c);
    }
}

static int hex_value(char c)
{
    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    if (c >= 'a' && c <= 'f') {
        return c - 'a' + 10;
    }
    if (c >= 'A' && c <= 'F') {
        return c - 'A' + 10;
    }
    return -1;
}

/* The four digits after \u, or -1. */
static int take_u16(struct ckpt_json *reader)
{
    int value = 0;

    if (reader->end - reader->at < 4) {
        return -1;
    }
    for (int i = 0; i < 4; i++) {
        int digit = hex_value(*reader->at++);

        if (digit < 0) {
            return -1;
        }
        value = value * 16 + digit;
    }
    return value;
}

static uint32_t put_utf8(char *out, uint32_t code)
{
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    if (code < 0x800) {
        out[0] = (char)(0xc0 | (code >> 6));
        out[1] = (char)(0x80 | (code & 0x3f));
        return 2;
    }
    if (code < 0x10000) {
        out[0] = (char)(0xe0 | (code >> 12));
        out[1] = (char)(0x80 | ((code >> 6) & 0x3f));
        out[2] = (char)(0x80 | (code & 0x3f));
        return 3;
    }
    out[0] = (char)(0xf0 | (code >> 18));
    out[1] = (char)(0x80 | ((code >> 12) & 0x3f));
    out[2] = (char)(0x80 | ((code >> 6) & 0x3f));
    out[3] = (char)(0x80 | (code & 0x3f));
    return 4;
}

/* What follows a backslash, as UTF-8 in out; 0 when it is wrong. */
static uint32_t take_escape(struct ckpt_json *reader, char out[4])
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const char *known;
    int high, low;
    char c;

    if (reader->at >= reader->end) {
        return 0;
    }
    c = *reader->at++;
    known = c == '\0' ? NULL : strchr(from, c);
    if (known != NULL) {
        out[0] = to[known - from];
        return 1;
    }
    high = c == 'u' ? take_u16(reader) : -1;
    if (high <= 0 || (high >= 0xdc00 && high <= 0xdfff)) {
        return 0;
    }
    if (high < 0xd800 || high > 0xdbff) {
        return put_utf8(out, (uint32_t)high);
    }
    if (reader->end - reader->at < 6 || reader->at[0] != '\\' || reader->at[1] != 'u') {
        return 0;
    }
    reader->at += 2;
    low = take_u16(reader);
    if (low < 0xdc00 || low > 0xdfff) {
        return 0;
    }
    return put_utf8(out, 0x10000u + (((uint32_t)high - 0xd800) << 10) + ((uint32_t)low - 0xdc00));
}

/* Takes a string; `ret` NULL only skips it. */
static void take_string(struct ckpt_json *reader, char *ret, size_t room)
{
    size_t bytes = 0;

    ckpt_json_want(reader, '"');
    while (reader->code == 0) {
        char piece[4];
        uint32_t count = 1;

        if (reader->at >= reader->end || (unsigned char)*reader->at < 0x20) {
            ckpt_json_fail(reader, BL_EFORMAT, "a string does not end");
            break;
        }
        piece[0] = *reader->at++;
        if (piece[0] == '"') {
            break;
        }
        if (piece[0] == '\\') {
            count = take_escape(reader, piece);
            if (count == 0) {
                ckpt_json_fail(reader, BL_EFORMAT, "a wrong escape in a string");
                break;
            }
        }
        if (ret == NULL) {
            continue;
        }
        if (bytes + count >= room) {
            ckpt_json_fail(reader, BL_ELIMIT, "a string of more than %zu bytes", room - 1);
            break;
        }
        memcpy(ret + bytes, piece, count);
        bytes += count;
    }
    if (ret != NULL) {
        ret[reader->code == 0 ? bytes : 0] = '\0';
    }
}

void ckpt_json_string(struct ckpt_json *reader, char *ret, size_t room)
{
    take_string(reader, ret, room);
}

void ckpt_json_key(struct ckpt_json *reader, const char *key)
{
    char found[64];

    take_string(reader, found, sizeof(found));
    if (reader->code == 0 && strcmp(found, key) != 0) {
        ckpt_json_fail(reader, BL_EFORMAT, "\"%s\" expected", key);
    }
    ckpt_json_want(reader, ':');
}

uint64_t ckpt_json_u64(struct ckpt_json *reader)
{
    uint64_t value = 0;
    const char *from;

    if (reader->code != 0) {
        return 0;
    }
    skip_space(reader);
    from = reader->at;
    while (reader->at < reader->end && *reader->at >= '0' && *reader->at <= '9') {
        uint64_t digit = (uint64_t)(*reader->at - '0');

        if (value > (UINT64_MAX - digit) / 10) {
            ckpt_json_fail(reader, BL_EFORMAT, "a number over 64 bits");
            return 0;
        }
        value = value * 10 + digit;
        reader->at++;
    }
    if (reader->at == from || (*from == '0' && reader->at - from > 1) ||
        (reader->at < reader->end && strchr(".eE", *reader->at) != NULL)) {
        ckpt_json_fail(reader, BL_EFORMAT, "a whole number expected");
        return 0;
    }
    return value;
}

uint32_t ckpt_json_u32(struct ckpt_json *reader)
{
    uint64_t value = ckpt_json_u64(reader);

    if (value > UINT32_MAX) {
        ckpt_json_fail(reader, BL_EFORMAT, "a number over 32 bits");
        return 0;
    }
    return (uint32_t)value;
}

/* Takes digits; how many. */
static size_t take_digits(struct ckpt_json *reader)
{
    const char *from = reader->at;

    while (reader->at < reader->end && *reader->at >= '0' && *reader->at <= '9') {
        reader->at++;
    }
    return (size_t)(reader->at - from);
}

/* Takes a number by JSON's grammar. */
static bool take_number(struct ckpt_json *reader)
{
    const char *from;

    if (reader->at < reader->end && *reader->at == '-') {
        reader->at++;
    }
    from = reader->at;
    if (take_digits(reader) == 0 || (*from == '0' && reader->at - from > 1)) {
        return false;
    }
    if (reader->at < reader->end && *reader->at == '.') {
        reader->at++;
        if (take_digits(reader) == 0) {
            return false;
        }
    }
    if (reader->at < reader->end && (*reader->at == 'e' || *reader->at == 'E')) {
        reader->at++;
        if (reader->at < reader->end && (*reader->at == '+' || *reader->at == '-')) {
            reader->at++;
        }
        return take_digits(reader) > 0;
    }
    return true;
}

static bool take_word(struct ckpt_json *reader, const char *word)
{
    size_t bytes = strlen(word);

    if ((size_t)(reader->end - reader->at) < bytes || memcmp(reader->at, word, bytes) != 0) {
        return false;
    }
    reader->at += bytes;
    return true;
}

double ckpt_json_double(struct ckpt_json *reader)
{
    char number[64];
    const char *from;

    if (reader->code != 0) {
        return 0;
    }
    skip_space(reader);
    if (take_word(reader, "null")) {
        return (double)NAN;
    }
    from = reader->at;
    if (!take_number(reader) || (size_t)(reader->at - from) >= sizeof(number)) {
        ckpt_json_fail(reader, BL_EFORMAT, "a number expected");
        return 0;
    }
    memcpy(number, from, (size_t)(reader->at - from));
    number[reader->at - from] = '\0';
    return strtod(number, NULL);
}

uint64_t ckpt_json_hex(struct ckpt_json *reader, uint32_t digits)
{
    char text[17];
    uint64_t value = 0;

    take_string(reader, text, sizeof(text));
    for (const char *c = text; reader->code == 0 && *c != '\0'; c++) {
        if (hex_value(*c) < 0 || (*c >= 'A' && *c <= 'F')) {
            ckpt_json_fail(reader, BL_EFORMAT, "lower-case hex digits expected");
            return 0;
        }
        value = value << 4 | (uint64_t)hex_value(*c);
    }
    if (reader->code == 0 && strlen(text) != digits) {
        ckpt_json_fail(reader, BL_EFORMAT, "%u hex digits expected", digits);
        return 0;
    }
    return value;
}

uint32_t ckpt_json_u64s(struct ckpt_json *reader, uint64_t *ret, uint32_t count_max)
{
    uint32_t count = 0;

    ckpt_json_want(reader, '[');
    if (ckpt_json_is(reader, ']')) {
        return 0;
    }
    while (reader->code == 0) {
        if (count >= count_max) {
            ckpt_json_fail(reader, BL_ELIMIT, "more than %u numbers in a list", count_max);
            break;
        }
        ret[count++] = ckpt_json_u64(reader);
        if (!ckpt_json_is(reader, ',')) {
            ckpt_json_want(reader, ']');
            break;
        }
    }
    return reader->code == 0 ? count : 0;
}

static void take_scalar(struct ckpt_json *reader)
{
    if (reader->at < reader->end && *reader->at == '"') {
        take_string(reader, NULL, 0);
    } else if (!take_word(reader, "true") && !take_word(reader, "false") &&
               !take_word(reader, "null") && !take_number(reader)) {
        ckpt_json_fail(reader, BL_EFORMAT, "a value expected");
    }
}

/* Without recursion: a stack of the closing brackets that are due. After a value, either a comma
 * (and, in an object, a key) or the bracket follows. */
void ckpt_json_skip(struct ckpt_json *reader, const char **ret_from)
{
    char due[CKPT_JSON_DEPTH_MAX];
    uint32_t depth = 0;

    skip_space(reader);
    *ret_from = reader->at;
    while (reader->code == 0) {
        bool object = ckpt_json_is(reader, '{');

        if (object || ckpt_json_is(reader, '[')) {
            if (depth == CKPT_JSON_DEPTH_MAX) {
                ckpt_json_fail(reader, BL_ELIMIT, "nested deeper than %u", depth);
                return;
            }
            due[depth++] = object ? '}' : ']';
            if (!ckpt_json_is(reader, due[depth - 1])) {
                if (object) {
                    take_string(reader, NULL, 0);
                    ckpt_json_want(reader, ':');
                }
                continue;
            }
            depth--;
        } else {
            take_scalar(reader);
        }
        while (depth > 0 && !ckpt_json_is(reader, ',') && reader->code == 0) {
            ckpt_json_want(reader, due[depth - 1]);
            depth--;
        }
        if (depth == 0) {
            return;
        }
        if (due[depth - 1] == '}') {
            take_string(reader, NULL, 0);
            ckpt_json_want(reader, ':');
        }
    }
}

void ckpt_json_finish(struct ckpt_json *reader)
{
    if (reader->code != 0) {
        return;
    }
    skip_space(reader);
    if (reader->at != reader->end) {
        ckpt_json_fail(reader, BL_EFORMAT, "something after the end");
    }
}
