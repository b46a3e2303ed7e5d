/* SPDX-License-Identifier: Apache-2.0 */
/* Inside ckpt-tool: a command line read by its verb's table of options. */
#ifndef TOOLS_CKPT_TOOL_ARGS_H
#define TOOLS_CKPT_TOOL_ARGS_H

#include "tools/ckpt_tool.h"

struct ckpt_tool_parsed {
    struct ckpt_tool_call call; /* views into this and argv: do not move it */
    const char *paths[TOOL_PATHS_MAX];
    _Alignas(16) uint8_t options[TOOL_OPTIONS_BYTES_MAX];
};

/* Reads argv[1] and on (argv[0] is the verb). Values stand behind an option or after '='; "--" ends
 * options. TOOL_GOOD, or TOOL_USAGE with one line on standard error. */
int ckpt_tool_parse(struct ckpt_tool_parsed *parsed, const struct ckpt_tool_verb *verb, int argc,
                    char **argv);

/* ckpt-tool VERB --help, on standard output. */
void ckpt_tool_help_verb(const struct ckpt_tool_verb *verb);

#endif
