/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A directory that appears whole or not at all: written beside its place under a temporary name,
 * synced, renamed. Another run of the same work is kept out by a lock on the temporary directory;
 * what a killed run left there is removed by the next.
 *
 *     /data/out                     the place
 *     /data/.out.belay-tmp/         being written
 *     /data/.out.belay-old/         what was there before, between the renames (with --force)
 */
#ifndef TOOLS_REPLACE_H
#define TOOLS_REPLACE_H

#include <stdbool.h>

#include "base/error.h"

#define TOOL_REPLACE_PATH_MAX 2048

struct tool_replace {
    char place[TOOL_REPLACE_PATH_MAX], temp[TOOL_REPLACE_PATH_MAX];
    char parent[TOOL_REPLACE_PATH_MAX]; /* of both */
    char name[256], temp_name[300];     /* of both in it */
    int fd;                             /* of temp, locked; -1: closed */
    bool occupied;                      /* something is there that is to be replaced */
};

/* Prepares `path`: makes the directories above it and an empty, locked temporary directory
 * (replace->temp). When something is at `path` already: -EEXIST, unless `force` and each entry in
 * it is one that `is_ours` knows (NULL entries: an empty directory is always fine); an entry that
 * it does not know is named by BL_EFOREIGN and nothing is touched. Close after any result but an
 * error here. */
BL_MUST_CHECK int tool_replace_begin(struct tool_replace *replace, const char *path, bool force,
                                     bool (*is_ours)(const char *name), struct bl_errmsg *msg);

/* The same checks without touching anything. */
BL_MUST_CHECK int tool_replace_check(const char *path, bool force,
                                     bool (*is_ours)(const char *name), struct bl_errmsg *msg);

/* Syncs the temporary directory and renames it to its place; files in it were synced by the caller.
 * What was there is removed. */
BL_MUST_CHECK int tool_replace_commit(struct tool_replace *replace, struct bl_errmsg *msg);

/* Removes what is left of the temporary directory and unlocks. After a commit only that. */
void tool_replace_close(struct tool_replace *replace);

#endif
