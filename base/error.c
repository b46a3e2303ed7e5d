/* SPDX-License-Identifier: Apache-2.0 */
#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

BL_PRINTF(2, 0) static void error_format(struct bl_errmsg *msg, const char *fmt, va_list args)
{
    int n = vsnprintf(msg->text, sizeof(msg->text), fmt, args);
    if (n < 0) {
        msg->text[0] = '\0';
    }
}

/* Adds `tail` after what is there; what does not fit is cut. */
static void error_append(struct bl_errmsg *msg, const char *tail)
{
    size_t used = strnlen(msg->text, sizeof(msg->text) - 1);
    size_t left = sizeof(msg->text) - 1 - used;
    size_t take = strnlen(tail, left);
    memcpy(msg->text + used, tail, take);
    msg->text[used + take] = '\0';
}

int bl_err(struct bl_errmsg *msg, int code, const char *fmt, ...)
{
    if (msg != NULL) {
        va_list args;
        va_start(args, fmt);
        error_format(msg, fmt, args);
        va_end(args);
    }
    return code;
}

int bl_err_code(struct bl_errmsg *msg, int code, const char *fmt, ...)
{
    if (msg != NULL) {
        va_list args;
        va_start(args, fmt);
        error_format(msg, fmt, args);
        va_end(args);
        error_append(msg, ": ");
        error_append(msg, bl_strerror(code));
    }
    return code;
}

int bl_err_in(struct bl_errmsg *msg, int code, const char *fmt, ...)
{
    if (msg != NULL) {
        struct bl_errmsg inner = *msg;
        inner.text[sizeof(inner.text) - 1] = '\0';
        va_list args;
        va_start(args, fmt);
        error_format(msg, fmt, args);
        va_end(args);
        error_append(msg, ": ");
        error_append(msg, inner.text[0] != '\0' ? inner.text : bl_strerror(code));
    }
    return code;
}

struct error_entry {
    int code;
    const char *name;
    const char *text;
};

#define BL_ERROR_ENTRY(name, number, text) {number, #name, text},
static const struct error_entry error_table[] = {BL_ERROR_CODES(BL_ERROR_ENTRY)};
#undef BL_ERROR_ENTRY

static const struct error_entry *error_find(int code)
{
    for (size_t i = 0; i < sizeof(error_table) / sizeof(error_table[0]); i++) {
        if (error_table[i].code == code) {
            return &error_table[i];
        }
    }
    return NULL;
}

const char *bl_strerror(int code)
{
    if (code == 0) {
        return "success";
    }
    const struct error_entry *entry = error_find(code);
    if (entry != NULL) {
        return entry->text;
    }
    /* Not strerror(): its buffer is shared between threads for unknown numbers. */
    const char *text = code < 0 && code > -4096 ? strerrordesc_np(-code) : NULL;
    return text != NULL ? text : "unknown error";
}

const char *bl_errname(int code)
{
    if (code == 0) {
        return "OK";
    }
    const struct error_entry *entry = error_find(code);
    if (entry != NULL) {
        return entry->name;
    }
    const char *name = code < 0 && code > -4096 ? strerrorname_np(-code) : NULL;
    return name != NULL ? name : "UNKNOWN";
}

void bl_assert_failed(const char *cond, const char *file, int line, const char *func)
{
    fprintf(stderr, "belay: invariant broken: %s (%s:%d, %s)\n", cond, file, line, func);
    fflush(stderr);
    abort();
}
