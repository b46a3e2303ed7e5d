/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ckpt-tool from inside: one verb a file, each `int ckpt_tool_VERB(const struct ckpt_tool_args *)`
 * that returns the exit code: 0 good, 1 a finding, 2 usage, 3 could not.
 */
#ifndef TOOLS_CKPT_TOOL_H
#define TOOLS_CKPT_TOOL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "ckpt/ckpt.h"
#include "tools/progress.h"

enum ckpt_tool_exit { TOOL_GOOD = 0, TOOL_FINDING = 1, TOOL_USAGE = 2, TOOL_COULD_NOT = 3 };

struct ckpt_tool_args {
    const char *path; /* of a root or a checkpoint */
    bool json, fast, tensors;
};

/* The verbs; the exit code. */
int ckpt_tool_ls(const struct ckpt_tool_args *args);
int ckpt_tool_show(const struct ckpt_tool_args *args);
int ckpt_tool_verify(const struct ckpt_tool_args *args);

/* Opens the root that `path` is or lies in, for reading. `dir` becomes the checkpoint's name, or ""
 * when the path is a root. Prints the error and returns NULL when it cannot. */
struct ckpt_store *ckpt_tool_open(const char *path, char dir[CKPT_DIR_MAX]);

/* "ckpt-tool: TEXT" on standard error; TOOL_COULD_NOT. */
int ckpt_tool_fail(const char *fmt, ...) BL_PRINTF(1, 2);

/* "2026-11-30 14:03:22" (UTC), "-" for 0. Into `ret`, which is returned. */
const char *ckpt_tool_time(char ret[TOOL_TEXT_MAX], uint64_t unix_s);

const char *ckpt_tool_state(enum ckpt_state state); /* "good", "broken", ... */

/* Prints a jansson value as canonical JSON with a newline; takes it. The exit code. */
struct json_t;
int ckpt_tool_print_json(struct json_t *value, int exit_code);

#endif
