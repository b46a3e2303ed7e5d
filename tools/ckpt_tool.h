/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ckpt-tool from inside: one verb a file, each a struct ckpt_tool_verb with its help, its table of
 * options and its function, which returns the exit code: 0 good, 1 a finding, 2 usage, 3 could not.
 */
#ifndef TOOLS_CKPT_TOOL_H
#define TOOLS_CKPT_TOOL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "ckpt/ckpt.h"
#include "base/human.h"
#include "base/progress.h"

enum ckpt_tool_exit { TOOL_GOOD = 0, TOOL_FINDING = 1, TOOL_USAGE = 2, TOOL_COULD_NOT = 3 };

/* ---- Verbs and their options ---- */

#define TOOL_PATHS_MAX 64u /* paths on a command line; values of one option that repeats */

struct ckpt_tool_texts { /* of an option that may be given several times */
    const char *at[TOOL_PATHS_MAX];
    uint32_t count;
};

enum ckpt_tool_type {
    TOOL_FLAG,  /* bool */
    TOOL_TEXT,  /* const char *; NULL: not given */
    TOOL_TEXTS, /* struct ckpt_tool_texts */
    TOOL_COUNT, /* uint64_t: a whole number */
    TOOL_SIZE   /* uint64_t: bytes, as 1048576, 512M, 12.5GiB */
};

struct ckpt_tool_option {
    const char *name;  /* "--parts" */
    const char *value; /* what stands behind it in the help: "N"; NULL for a flag */
    enum ckpt_tool_type type;
    uint32_t offset; /* in the verb's own struct of options */
    const char *help;
};

struct ckpt_tool_call {
    const struct ckpt_tool_verb *verb;
    const char *const *paths;
    uint32_t path_count;
    bool json, progress; /* --json, --progress */
    const void *options; /* the verb's own struct, zeroed but for what was given */
};

struct ckpt_tool_verb {
    const char *name;
    const char *paths;                      /* "ROOT..." in the usage */
    uint32_t paths_min, paths_max;          /* how many of them */
    const char *summary;                    /* one line of ckpt-tool --help */
    const char *text;                       /* of ckpt-tool VERB --help, behind the usage */
    const char *examples;                   /* lines */
    const struct ckpt_tool_option *options; /* but for --json, --progress, --help */
    uint32_t option_count;
    uint32_t options_bytes; /* of the verb's own struct; at most TOOL_OPTIONS_BYTES_MAX */
    bool has_progress;      /* long work: takes --progress */
    int (*run)(const struct ckpt_tool_call *call);
};

#define TOOL_OPTIONS_BYTES_MAX 4096u
#define TOOL_PATHS_BYTES_MAX   16384u /* of "A,B,C" */

extern const struct ckpt_tool_verb ckpt_tool_verb_ls, ckpt_tool_verb_verify;
extern const struct ckpt_tool_verb ckpt_tool_verb_reshard, ckpt_tool_verb_prune,
    ckpt_tool_verb_repair;
extern const struct ckpt_tool_verb ckpt_tool_verb_import, ckpt_tool_verb_export,
    ckpt_tool_verb_diff, ckpt_tool_verb_show;

/* "ckpt-tool: WHAT: TEXT; see ckpt-tool VERB --help" on standard error (verb may be NULL);
 * TOOL_USAGE. */
int ckpt_tool_usage(const char *verb, const char *what, const char *text);

/* Parses "1048576", "512M", "12.5GiB" (suffixes are powers of 1024). False when it is no size. */
bool ckpt_tool_parse_size(const char *text, uint64_t *ret);
/* Parses a whole number without sign. */
bool ckpt_tool_parse_count(const char *text, uint64_t *ret);

/* ---- What verbs share ---- */

/* Opens the root that `path` is or lies in, for reading; of several nodes' roots, "A,B,C", all as
 * one (only A is listed). `dir` becomes the checkpoint's name, or "" when the path is a root.
 * Prints the error and returns NULL when it cannot. */
struct ckpt_store *ckpt_tool_open(const char *path, char dir[CKPT_DIR_MAX]);

/* "ckpt-tool: TEXT" on standard error; TOOL_COULD_NOT. */
int ckpt_tool_fail(const char *fmt, ...) BL_PRINTF(1, 2);

/* "2026-11-30 14:03:22" (UTC), "-" for 0. Into `ret`, which is returned. */
const char *ckpt_tool_time(char ret[BL_HUMAN_MAX], uint64_t unix_s);

const char *ckpt_tool_state(enum ckpt_state state); /* "good", "broken", ... */

/* Prints a jansson value as canonical JSON with a newline; takes it. The exit code. */
struct json_t;
int ckpt_tool_print_json(struct json_t *value, int exit_code);

#endif
