/* SPDX-License-Identifier: Apache-2.0 */
/* What the working verbs of ckpt-tool share: opening by step, verifying, stopping on a signal. */
#ifndef TOOLS_CKPT_TOOL_WORK_H
#define TOOLS_CKPT_TOOL_WORK_H

#include <jansson.h>
#include <stdatomic.h>

#include "ckpt/ckpt.h"
#include "tools/ckpt_tool.h"

/* Non-zero once SIGINT, SIGTERM or SIGHUP came, after tool_cancel_on_signals; a second signal ends
 * the program at once. */
extern atomic_int tool_cancel;
void tool_cancel_on_signals(void);

/* A checkpoint that was found. */
struct tool_checkpoint {
    struct ckpt_store *store; /* owned */
    char dir[CKPT_DIR_MAX];
    struct ckpt_manifest manifest; /* owned; filled by tool_checkpoint_manifest */
};

/* Opens the checkpoint at `path`; of a root the one of step `step` (text; NULL: the newest good
 * one). An exit code; the error is printed. */
int tool_checkpoint_open(struct tool_checkpoint *source, const char *path, const char *step);
/* The same of a copy: of a root the one named `dir`. */
int tool_checkpoint_open_like(struct tool_checkpoint *source, const char *path, const char *dir);
int tool_checkpoint_manifest(struct tool_checkpoint *source);
void tool_checkpoint_close(struct tool_checkpoint *source);

/* Opens a root by its path, for writing as node "ckpt-tool" or for reading. An exit code; the error
 * is printed. */
int tool_open_root(struct ckpt_store **ret, const char *path, bool writing);
/* Opens the store at hand again for writing; the one for reading is closed. */
int tool_reopen_writing(struct ckpt_store **store);

/* Is a directory of the root still there? */
bool tool_is_there(const struct ckpt_store *store, const char *dir);

#define TOOL_FINDINGS_MAX 10000u /* kept of one checkpoint; more are only counted */

struct tool_verify {
    struct ckpt_store *store;
    const char *dir;
    bool full;
    struct bl_progress *progress; /* NULL, or started; its `all` is filled in */
    /* Out. */
    json_t *findings; /* owned: [{"file","text"}] */
    struct ckpt_verify_result result;
    bool gone; /* retention took it away meanwhile: what was found then counts for nothing */
    /* Inside. */
    atomic_int stop;
};

/* Verifies one checkpoint. TOOL_GOOD, TOOL_FINDING, or TOOL_COULD_NOT with the error printed. */
int tool_verify_run(struct tool_verify *verify);

/* {"world","dp","tp","pp","zero"} */
json_t *tool_layout_json(const struct ckpt_layout *layout);

#endif
