/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt-tool's arguments by a verb's table of options, and the help that the same table gives. */
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/ckpt_tool_args.h"

#define HELP_COLUMN 22 /* where an option's text begins */
#define HELP_WIDTH  79

int ckpt_tool_usage(const char *verb, const char *what, const char *text)
{
    fprintf(stderr, "ckpt-tool: %s: %s; see ckpt-tool %s%s--help\n", what, text,
            verb == NULL ? "" : verb, verb == NULL ? "" : " ");
    return TOOL_USAGE;
}

bool ckpt_tool_parse_count(const char *text, uint64_t *ret)
{
    char *end = NULL;
    unsigned long long value;

    if (!isdigit((unsigned char)text[0])) {
        return false;
    }
    errno = 0;
    value = strtoull(text, &end, 10);
    if (errno != 0 || *end != '\0') {
        return false;
    }
    *ret = value;
    return true;
}

bool ckpt_tool_parse_size(const char *text, uint64_t *ret)
{
    static const char units[] = "KMGTP";
    const char *unit;
    char *end = NULL;
    double value;
    uint32_t shift = 0;

    if (!isdigit((unsigned char)text[0]) || text[1] == 'x' || text[1] == 'X') {
        return false;
    }
    if (ckpt_tool_parse_count(text, ret)) {
        return true; /* exact, above 2^53 too */
    }
    value = strtod(text, &end);
    unit = *end == '\0' ? NULL : strchr(units, toupper((unsigned char)*end));
    if (unit != NULL) {
        shift = 10 * (uint32_t)(unit - units + 1);
        end++;
        end += end[0] == 'i' && end[1] == 'B' ? 2 : end[0] == 'B' ? 1 : 0;
    } else {
        end += end[0] == 'B' ? 1 : 0;
    }
    if (*end != '\0' || value * (double)(1ull << shift) >= 1.8e19) {
        return false;
    }
    *ret = (uint64_t)(value * (double)(1ull << shift));
    return true;
}

/* The words of `text`, wrapped at HELP_WIDTH; every line begins at column `indent`. */
static void print_wrapped(const char *text, uint32_t indent)
{
    uint32_t at = indent;

    for (uint32_t word; (word = (uint32_t)strcspn(text, " ")) > 0; text += strspn(text, " ")) {
        if (at > indent && at + 1 + word > HELP_WIDTH) {
            printf("\n%*s", (int)indent, "");
            at = indent;
        } else if (at > indent) {
            putchar(' ');
            at++;
        }
        printf("%.*s", (int)word, text);
        at += word;
        text += word;
    }
    putchar('\n');
}

static void print_option(const char *name, const char *value, const char *help)
{
    int n = printf("  %s%s%s", name, value == NULL ? "" : " ", value == NULL ? "" : value);

    if (n + 2 > HELP_COLUMN) {
        putchar('\n');
        n = 0;
    }
    printf("%*s", HELP_COLUMN - n, "");
    print_wrapped(help, HELP_COLUMN);
}

void ckpt_tool_help_verb(const struct ckpt_tool_verb *verb)
{
    size_t bytes = strlen(verb->text);

    printf("usage: ckpt-tool %s %s [OPTION]...\n\n%s%s\noptions\n", verb->name, verb->paths,
           verb->text, bytes > 0 && verb->text[bytes - 1] == '\n' ? "" : "\n");
    for (uint32_t i = 0; i < verb->option_count; i++) {
        print_option(verb->options[i].name, verb->options[i].value, verb->options[i].help);
    }
    print_option("--json", NULL, "one JSON object on standard output");
    if (verb->has_progress) {
        print_option("--progress", NULL, "show how far it is, also where there is no terminal");
    }
    printf("\nexit status: 0 good, 1 a finding, 2 usage, 3 could not\n\nexamples\n%s",
           verb->examples);
}

static const struct ckpt_tool_option *find_option(const struct ckpt_tool_verb *verb,
                                                  const char *arg, size_t bytes)
{
    for (uint32_t i = 0; i < verb->option_count; i++) {
        const char *name = verb->options[i].name;

        if (strlen(name) == bytes && strncmp(name, arg, bytes) == 0) {
            return &verb->options[i];
        }
    }
    return NULL;
}

/* Puts the value of an option into its place; false when it is none. */
static bool set_option(const struct ckpt_tool_option *option, uint8_t *options, const char *value)
{
    void *at = options + option->offset;
    struct ckpt_tool_texts *texts = at;

    switch (option->type) {
    case TOOL_FLAG:
        *(bool *)at = true;
        return true;
    case TOOL_TEXT:
        *(const char **)at = value;
        return true;
    case TOOL_TEXTS:
        if (texts->count == TOOL_PATHS_MAX) {
            return false;
        }
        texts->at[texts->count++] = value;
        return true;
    case TOOL_COUNT:
        return ckpt_tool_parse_count(value, at);
    case TOOL_SIZE:
        return ckpt_tool_parse_size(value, at);
    }
    return false;
}

/* Takes option argv[i], with its value behind it or after a '='. How many arguments it took, or a
 * negative exit code. */
static int take_option(struct ckpt_tool_parsed *parsed, int argc, char **argv, int i)
{
    const struct ckpt_tool_verb *verb = parsed->call.verb;
    size_t bytes = strcspn(argv[i], "=");
    const char *value = argv[i][bytes] == '=' ? argv[i] + bytes + 1 : NULL;
    const struct ckpt_tool_option *option = find_option(verb, argv[i], bytes);
    char text[128];
    int taken = 1;

    if (strcmp(argv[i], "--json") == 0) {
        parsed->call.json = true;
        return 1;
    }
    if (verb->has_progress && strcmp(argv[i], "--progress") == 0) {
        parsed->call.progress = true;
        return 1;
    }
    if (option == NULL) {
        return -ckpt_tool_usage(verb->name, argv[i], "unknown option");
    }
    if ((option->value == NULL) != (option->type == TOOL_FLAG) ||
        (option->value == NULL && value != NULL)) {
        return -ckpt_tool_usage(verb->name, argv[i], "takes no value");
    }
    if (option->value != NULL && value == NULL) {
        if (i + 1 >= argc) {
            snprintf(text, sizeof(text), "%s is missing", option->value);
            return -ckpt_tool_usage(verb->name, argv[i], text);
        }
        value = argv[i + 1];
        taken = 2;
    }
    if (!set_option(option, parsed->options, value)) {
        snprintf(text, sizeof(text), "\"%.64s\" is no %s", value,
                 option->type == TOOL_SIZE    ? "size (as 512M, 12.5GiB)"
                 : option->type == TOOL_COUNT ? "whole number"
                                              : "value that fits any more");
        return -ckpt_tool_usage(verb->name, option->name, text);
    }
    return taken;
}

int ckpt_tool_parse(struct ckpt_tool_parsed *parsed, const struct ckpt_tool_verb *verb, int argc,
                    char **argv)
{
    bool only_paths = false;

    memset(parsed, 0, sizeof(*parsed));
    BL_ASSERT(verb->options_bytes <= sizeof(parsed->options));
    parsed->call =
        (struct ckpt_tool_call){.verb = verb, .paths = parsed->paths, .options = parsed->options};
    for (int i = 1; i < argc;) {
        if (!only_paths && strcmp(argv[i], "--") == 0) {
            only_paths = true;
            i++;
        } else if (!only_paths && argv[i][0] == '-' && argv[i][1] != '\0') {
            int taken = take_option(parsed, argc, argv, i);

            if (taken < 0) {
                return -taken;
            }
            i += taken;
        } else if (parsed->call.path_count == verb->paths_max) {
            return ckpt_tool_usage(verb->name, argv[i],
                                   verb->paths_max == 1 ? "one path is enough" : "too many paths");
        } else {
            parsed->paths[parsed->call.path_count++] = argv[i++];
        }
    }
    if (parsed->call.path_count < verb->paths_min) {
        return ckpt_tool_usage(verb->name, verb->name, "a path is missing");
    }
    return TOOL_GOOD;
}
