/* SPDX-License-Identifier: Apache-2.0 */
/* Single values of the job: text to field and back, by the option's type and bounds. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/job_options.h"
#include "base/utf8.h"

struct job_unit {
    const char *name;
    uint64_t factor;
};

static const struct job_unit size_units[] = {
    {"", 1},
    {"B", 1},
    {"KiB", 1ULL << 10},
    {"MiB", 1ULL << 20},
    {"GiB", 1ULL << 30},
    {"TiB", 1ULL << 40},
    {"kB", 1000},
    {"MB", 1000000},
    {"GB", 1000000000},
    {"TB", 1000000000000},
    {NULL, 0},
};

static const struct job_unit time_units[] = {
    {"ms", 1}, {"s", 1000}, {"m", 60000}, {"min", 60000}, {"h", 3600000}, {NULL, 0},
};

/* Digits and a unit of the table, nothing else. 0, -EINVAL or -ERANGE. */
static int value_parse_integer(const char *text, const struct job_unit *units, uint64_t *ret)
{
    uint64_t number = 0;
    size_t digits = strspn(text, "0123456789");
    if (digits == 0) {
        return -EINVAL;
    }
    for (size_t i = 0; i < digits; i++) {
        if (__builtin_mul_overflow(number, 10U, &number) ||
            __builtin_add_overflow(number, (uint64_t)(text[i] - '0'), &number)) {
            return -ERANGE;
        }
    }
    for (; units->name != NULL; units++) {
        if (strcmp(text + digits, units->name) == 0) {
            return __builtin_mul_overflow(number, units->factor, ret) ? -ERANGE : 0;
        }
    }
    return -EINVAL;
}

/* Place of `text` in "a|b|c", or -1. */
static int value_find_choice(const char *choices, const char *text)
{
    size_t bytes = strlen(text);
    int index = 0;
    for (const char *at = choices; at != NULL; index++) {
        const char *bar = strchr(at, '|');
        size_t n = bar != NULL ? (size_t)(bar - at) : strlen(at);
        if (n == bytes && memcmp(at, text, n) == 0) {
            return index;
        }
        at = bar != NULL ? bar + 1 : NULL;
    }
    return -1;
}

static int value_set_integer(const struct job_option *option, void *field, const char *text,
                             struct bl_errmsg *msg)
{
    static const struct job_unit plain[] = {{"", 1}, {NULL, 0}};
    const struct job_unit *units = plain;
    const char *wanted = "an integer";
    if (option->type == JOB_SIZE) {
        units = size_units;
        wanted = "a size such as 64MiB";
    } else if (option->type == JOB_MS) {
        units = time_units;
        wanted = "a time such as 500ms or 5s";
    }
    uint64_t number = 0;
    if (option->flags & JOB_AUTO) {
        wanted = "an integer or auto";
        if (strcmp(text, "auto") == 0) {
            *(uint64_t *)field = BL_JOB_AUTO;
            return 0;
        }
    }
    int rc = value_parse_integer(text, units, &number);
    if (rc == -EINVAL) {
        return bl_err(msg, BL_ECONFIG, "%s: must be %s, not '%.40s'", option->key, wanted, text);
    }
    if (rc < 0 || number < option->min || number > option->max) {
        const char *unit = option->type == JOB_MS ? "ms" : "";
        return bl_err(msg, BL_ECONFIG, "%s: %.40s is not within %" PRIu64 "%s and %" PRIu64 "%s",
                      option->key, text, option->min, unit, option->max, unit);
    }
    if (option->type == JOB_U32 || option->type == JOB_MS) {
        *(uint32_t *)field = (uint32_t)number;
    } else {
        *(uint64_t *)field = number;
    }
    return 0;
}

static int value_set_real(const struct job_option *option, double *field, const char *text,
                          struct bl_errmsg *msg)
{
    char *end = NULL;
    /* The character set keeps out hexadecimal, "inf" and "nan", which strtod would take. */
    int plain = text[0] != '\0' && strspn(text, "0123456789.eE+-") == strlen(text);
    double number = plain ? strtod(text, &end) : 0;
    if (!plain || end == text || *end != '\0' || !isfinite(number)) {
        return bl_err(msg, BL_ECONFIG, "%s: must be a number, not '%.40s'", option->key, text);
    }
    int below = (option->flags & JOB_BELOW) != 0;
    int above = (option->flags & JOB_ABOVE) != 0;
    if (number < option->real_min || number > option->real_max ||
        (below && number >= option->real_max) || (above && number <= option->real_min)) {
        return bl_err(msg, BL_ECONFIG, "%s: %.40s is not within %s%g and %s%g", option->key, text,
                      above ? "above " : "", option->real_min, below ? "below " : "",
                      option->real_max);
    }
    *field = number + 0.0; /* no negative zero: it would print otherwise than it compares */
    return 0;
}

/* Text must survive the way through JSON and YAML, on which the frozen job goes: no controls, none
 * of Unicode's line breaks, no byte order mark, valid UTF-8. */
static int value_check_text(const struct job_option *option, const char *text,
                            struct bl_errmsg *msg)
{
    const uint8_t *at = (const uint8_t *)text, *end = at + strlen(text);
    while (at < end) {
        uint32_t c = bl_utf8_next(&at, end);
        if (c == BL_UTF8_BAD) {
            return bl_err(msg, BL_ECONFIG, "%s: is not valid UTF-8", option->key);
        }
        if (c < 0x20 || (c >= 0x7f && c < 0xa0) || c == 0x2028 || c == 0x2029 || c == 0xfeff ||
            c == 0xfffe || c == 0xffff) {
            return bl_err(msg, BL_ECONFIG, "%s: has a control character", option->key);
        }
    }
    return 0;
}

static int value_set_text(const struct job_option *option, char *field, const char *text,
                          const char *base_dir, struct bl_errmsg *msg)
{
    int is_item = option->type == JOB_TEXT && job_option_is_list(option);
    if (text[0] == '\0' && (option->flags & JOB_EMPTY) != 0) {
        memset(field, 0, option->capacity);
        return 0;
    }
    if (text[0] == '\0' && !is_item) {
        return bl_err(msg, BL_ECONFIG, "%s: must not be empty", option->key);
    }
    memset(field, 0, option->capacity); /* equal jobs are equal byte by byte */
    const char *dir = option->type == JOB_PATH && base_dir != NULL ? base_dir : "";
    if (bl_path_join(field, option->capacity, dir, text) < 0) {
        return bl_err(msg, BL_ECONFIG, "%s: longer than %zu bytes", option->key,
                      option->capacity - 1);
    }
    return value_check_text(option, field, msg);
}

static int value_set_choice(const struct job_option *option, void *field, const char *text,
                            struct bl_errmsg *msg)
{
    int index = value_find_choice(option->choices, text);
    if (index < 0 && value_find_choice(option->planned, text) >= 0) {
        return bl_err(msg, BL_ENOTBUILT, "%s: '%s' is not built into this version (there is: %s)",
                      option->key, text, option->choices);
    }
    if (index < 0) {
        return bl_err(msg, BL_ECONFIG, "%s: '%.40s' is unknown (there is: %s)", option->key, text,
                      option->choices);
    }
    if (option->type == JOB_INDEX) {
        *(uint32_t *)field = (uint32_t)index;
    } else if (option->offset != JOB_NO_FIELD) {
        memset(field, 0, option->capacity);
        snprintf(field, option->capacity, "%s", text);
    }
    return 0;
}

int job_value_set(const struct job_option *option, void *base, const char *text,
                  const char *base_dir, struct bl_errmsg *msg)
{
    char *field = option->offset != JOB_NO_FIELD ? (char *)base + option->offset : NULL;
    switch (option->type) {
    case JOB_TEXT:
    case JOB_PATH:
        return value_set_text(option, field, text, base_dir, msg);
    case JOB_CHOICE:
    case JOB_INDEX:
        return value_set_choice(option, field, text, msg);
    case JOB_BOOL: {
        int index = value_find_choice("false|true", text);
        if (index < 0) {
            return bl_err(msg, BL_ECONFIG, "%s: must be true or false, not '%.40s'", option->key,
                          text);
        }
        *(uint32_t *)(void *)field = (uint32_t)index;
        return 0;
    }
    case JOB_REAL:
        return value_set_real(option, (double *)(void *)field, text, msg);
    case JOB_U32:
    case JOB_U64:
    case JOB_SIZE:
    case JOB_MS:
        return value_set_integer(option, field, text, msg);
    }
    return bl_err(msg, BL_ECONFIG, "%s: has no type", option->key);
}

void job_value_format(const struct job_option *option, const void *base, char *out,
                      size_t out_bytes)
{
    if (option->offset == JOB_NO_FIELD) {
        snprintf(out, out_bytes, "%s", option->fallback);
        return;
    }
    const char *field = (const char *)base + option->offset;
    uint32_t word;
    uint64_t wide;
    double real;
    switch (option->type) {
    case JOB_TEXT:
    case JOB_PATH:
    case JOB_CHOICE:
        snprintf(out, out_bytes, "%s", field);
        break;
    case JOB_INDEX:
    case JOB_BOOL: {
        memcpy(&word, field, sizeof(word));
        const char *at = option->type == JOB_BOOL ? "false|true" : option->choices;
        for (uint32_t i = 0; i < word && strchr(at, '|') != NULL; i++) {
            at = strchr(at, '|') + 1;
        }
        snprintf(out, out_bytes, "%.*s", (int)strcspn(at, "|"), at);
        break;
    }
    case JOB_U32:
    case JOB_MS:
        memcpy(&word, field, sizeof(word));
        snprintf(out, out_bytes, "%" PRIu32 "%s", word, option->type == JOB_MS ? "ms" : "");
        break;
    case JOB_U64:
    case JOB_SIZE:
        memcpy(&wide, field, sizeof(wide));
        if (option->flags & JOB_AUTO && wide == BL_JOB_AUTO) {
            snprintf(out, out_bytes, "auto");
            break;
        }
        snprintf(out, out_bytes, "%" PRIu64, wide);
        break;
    case JOB_REAL:
        memcpy(&real, field, sizeof(real));
        snprintf(out, out_bytes, "%.17g", real);
        break;
    }
}
