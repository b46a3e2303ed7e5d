/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside base: the option table of the job and what reads and writes single values by it.
 */
#ifndef BL_BASE_JOB_OPTIONS_H
#define BL_BASE_JOB_OPTIONS_H

#include <stddef.h>
#include <stdint.h>

#include "base/job.h"

enum job_type {
    JOB_TEXT,   /* char[capacity] */
    JOB_PATH,   /* char[capacity], made absolute */
    JOB_CHOICE, /* char[capacity], one of `choices`; without a field only the default is allowed */
    JOB_INDEX,  /* uint32_t: place in `choices` */
    JOB_BOOL,   /* uint32_t: 0 or 1 */
    JOB_U32,
    JOB_U64,
    JOB_SIZE, /* uint64_t, bytes; "64MiB" */
    JOB_MS,   /* uint32_t, milliseconds; "500ms", "5s" */
    JOB_REAL, /* double */
};

enum job_change {
    JOB_FROZEN, /* for the life of a run */
    JOB_RESUME, /* may differ when a run is resumed */
    JOB_LIVE,   /* may change while it runs */
};

#define JOB_NO_FIELD SIZE_MAX
/* Flags of an option. */
#define JOB_FUNCTION 1U  /* the arithmetic depends on it */
#define JOB_BELOW    2U  /* real_max itself is not allowed */
#define JOB_ABSENT   4U  /* a plan of later versions: any value is BL_ENOTBUILT */
#define JOB_ABOVE    8U  /* real_min itself is not allowed */
#define JOB_AUTO     16U /* of JOB_U64: "auto" is allowed too, and is BL_JOB_AUTO */
#define JOB_EMPTY    32U /* of JOB_PATH: may be empty */

struct job_option {
    const char *key; /* "train.lr", "data.files[]" (a list), "roots[].path" */
    enum job_type type;
    enum job_change change;
    unsigned flags;
    size_t offset;   /* in struct bl_job; behind "roots[]." in struct bl_job_root */
    size_t capacity; /* bytes of one text */
    uint64_t min;    /* of integers; of a list, items */
    uint64_t max;
    double real_min;
    double real_max;
    const char *fallback; /* as one would write it; NULL: must be given */
    const char *choices;  /* "a|b" */
    const char *planned;  /* choices of later versions: BL_ENOTBUILT */
    const char *help;
};

extern const struct job_option job_options[];
extern const size_t job_option_count;
#define JOB_OPTIONS_MAX 96 /* checked against the table */

#define JOB_ROOT_PREFIX "roots[]."

/* The option of that key, or NULL. */
const struct job_option *job_option_find(const char *key);

/* Is `key` a section, that is, does an option begin with it and a dot? */
int job_section_exists(const char *key);

#define BL_JOB_KEY_MAX 48 /* bytes of the longest key, with the NUL */

/* The key or section that looks most like `key`; those of the same section come first. */
void job_option_nearest(const char *key, char out[BL_JOB_KEY_MAX]);

/* Is it a list of values ("data.files[]")? */
int job_option_is_list(const struct job_option *option);

/* Of a list: bytes from one item to the next. */
size_t job_list_stride(const struct job_option *option);
/* Of a list: where struct bl_job has the uint32_t count of its items; JOB_NO_FIELD: always `max`.
 */
size_t job_list_count_offset(const struct job_option *option);

/* Does it belong to an item of roots? */
int job_option_is_root(const struct job_option *option);

/* Reads `text` into the option's field at `base` (the job, a root, or one item's place less the
 * offset). Paths are taken from base_dir. BL_ECONFIG or BL_ENOTBUILT with text, which begins with
 * the key. */
BL_MUST_CHECK int job_value_set(const struct job_option *option, void *base, const char *text,
                                const char *base_dir, struct bl_errmsg *msg);

/* The field at `base` as one would write it: sizes in bytes, times in ms. `out_bytes` at least
 * BL_PATH_MAX. */
void job_value_format(const struct job_option *option, const void *base, char *out,
                      size_t out_bytes);

/* Where each option was given; line 0: not given. */
struct job_mark {
    uint32_t line;
    uint32_t column;
};

struct job_marks {
    const char *where;
    struct job_mark at[JOB_OPTIONS_MAX]; /* by index in the table */
};

/* Sets what the file of model.config says, if the job names one, and takes its name out of the job.
 * `marks` may be NULL; options that it sets are marked where model.config stands. BL_ECONFIG,
 * BL_ENOTBUILT. */
BL_MUST_CHECK int job_config_apply(struct bl_job *job, struct job_marks *marks,
                                   const char *base_dir, struct bl_errmsg *msg);

/* Derives what depends on other options (lanes, hidden, kv_heads), then checks all that needs more
 * than one option. Errors stand at the option that must change. */
BL_MUST_CHECK int job_check(struct bl_job *job, const struct job_marks *marks,
                            struct bl_errmsg *msg);

#endif
