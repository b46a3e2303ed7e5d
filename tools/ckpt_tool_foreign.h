/* SPDX-License-Identifier: Apache-2.0 */
/* What import, export, diff and show --stats share: paths of any kind opened as views. */
#ifndef TOOLS_CKPT_TOOL_FOREIGN_H
#define TOOLS_CKPT_TOOL_FOREIGN_H

#include <stdbool.h>
#include <stdint.h>

#include "ckpt/ckpt_io.h"
#include "ckpt/foreign.h"
#include "ckpt/view.h"
#include "tools/ckpt_tool.h"

/* An opened path: a checkpoint (of a root the newest good one), or safetensors files. */
struct tool_source {
    struct ckpt_view *view;    /* owned: with the names of the path's own */
    struct ckpt_view *ours;    /* owned: with Belay's names, once asked for */
    struct ckpt_map_list maps; /* owned: of `ours` */
    uint32_t findings;         /* tensors of the files that `ours` does not show; were printed */
    char path[CKPT_PATH_MAX];
    struct ckpt_store *store; /* owned; NULL for files */
    char dir[CKPT_DIR_MAX];   /* the checkpoint's name in the root, or "" */
};

/* Opens `path`, also a llama2.c file; `step`: of a root, this step instead (NULL: the newest).
 * Prints the error and returns false when it cannot. tool_source_close. */
bool tool_source_open(struct tool_source *ret, const char *path, const uint64_t *step);
void tool_source_close(struct tool_source *source);

/* Gives the source under Belay's names: a view of the source, which is that of a checkpoint, or of
 * files of a Llama or without a config.json, as they are. Prints the error and returns false when
 * it cannot. */
bool tool_source_ours(struct tool_source *source, struct ckpt_view **ret);

/* Findings that a name may waive; printed together at the end, each a line. */
struct tool_findings {
    const struct ckpt_tool_texts *allow_missing, *allow_extra; /* may be NULL */
    uint32_t count;                                            /* that nobody waived */
    uint32_t waived;                                           /* by name */
    uint64_t used[2]; /* bits: which names of allow_missing, allow_extra waived something */
    bool shape_vocab; /* one is of an embedding or head with more rows than the vocabulary */
};

/* Callback for ckpt_map_compare: prints what is not waived (the first 100) on standard error. */
void tool_findings_add(void *findings, const char *kind, const char *name, const char *text);

/* A name of --allow-missing or --allow-extra that waived nothing, or NULL. */
const char *tool_findings_unused(const struct tool_findings *findings);

/* Opens the newest good checkpoint's name, or that of `step`, into `dir`. */
bool tool_pick(struct ckpt_store *store, const uint64_t *step, char dir[CKPT_DIR_MAX]);

#endif
