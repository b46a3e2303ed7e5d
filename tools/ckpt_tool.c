/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt-tool: looks at checkpoints and works on them. The verbs, and what they share. */
#include "tools/ckpt_tool.h"

#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "base/json.h"
#include "ckpt/io_roots.h"
#include "tools/ckpt_tool_args.h"

#define TOOL_ROOTS_MAX 64u /* of one checkpoint, given together */

static const struct ckpt_tool_verb *const verbs[] = {
    &ckpt_tool_verb_ls,      &ckpt_tool_verb_show,   &ckpt_tool_verb_verify,
    &ckpt_tool_verb_diff,    &ckpt_tool_verb_import, &ckpt_tool_verb_export,
    &ckpt_tool_verb_reshard, &ckpt_tool_verb_prune,  &ckpt_tool_verb_repair,
};
#define VERB_COUNT (sizeof(verbs) / sizeof(verbs[0]))

static const char help_head[] =
    "usage: ckpt-tool VERB PATH... [OPTION]...\n"
    "\n"
    "Looks at Belay's checkpoints and works on them: no daemon, no trainer, no GPU,\n"
    "little memory whatever the checkpoint's size. PATH is a root (the directory\n"
    "with a BELAY file) or one checkpoint in it.\n"
    "\n"
    "verbs\n";

static const char help_tail[] = "\n"
                                "ckpt-tool VERB --help tells its options.\n"
                                "\n"
                                "  --version        print the version\n"
                                "  --help           print this\n"
                                "\n"
                                "exit status: 0 good, 1 a finding, 2 usage, 3 could not\n"
                                "\n"
                                "examples\n"
                                "  ckpt-tool ls /scratch/run7\n"
                                "  ckpt-tool verify /scratch/run7/step-000000001200.g7\n"
                                "  ckpt-tool show /scratch/run7 --json | jq .state_digest\n";

static void print_help(void)
{
    fputs(help_head, stdout);
    for (uint32_t i = 0; i < VERB_COUNT; i++) {
        printf("  %-16s %s\n", verbs[i]->name, verbs[i]->summary);
    }
    fputs(help_tail, stdout);
}

int ckpt_tool_fail(const char *fmt, ...)
{
    va_list args;

    fputs("ckpt-tool: ", stderr);
    va_start(args, fmt);
    vfprintf(stderr, fmt, args);
    va_end(args);
    fputc('\n', stderr);
    return TOOL_COULD_NOT;
}

const char *ckpt_tool_time(char ret[BL_HUMAN_MAX], uint64_t unix_s)
{
    time_t when = (time_t)unix_s;
    struct tm tm;

    if (unix_s == 0 || gmtime_r(&when, &tm) == NULL ||
        strftime(ret, BL_HUMAN_MAX, "%Y-%m-%d %H:%M:%S", &tm) == 0) {
        snprintf(ret, BL_HUMAN_MAX, "-");
    }
    return ret;
}

const char *ckpt_tool_state(enum ckpt_state state)
{
    switch (state) {
    case CKPT_GOOD:
        return "good";
    case CKPT_BROKEN:
        return "broken";
    case CKPT_FOREIGN:
        return "foreign";
    case CKPT_FORWARD:
        return "committing";
    case CKPT_LEFTOVER:
        return "unfinished";
    case CKPT_PARTIAL:
        return "partial";
    case CKPT_PREPARED:
        return "prepared";
    }
    return "?";
}

int ckpt_tool_print_json(struct json_t *value, int exit_code)
{
    char *text = value == NULL ? NULL : bl_json_dump(value);

    json_decref(value);
    if (text == NULL) {
        return ckpt_tool_fail("out of memory");
    }
    puts(text);
    free(text);
    return exit_code;
}

/* Is it a directory of a checkpoint, rather than a root? By name, or by what is in it. */
static bool is_checkpoint(const char *path, const char *name)
{
    char file[4200];
    struct stat st;

    if (strncmp(name, "step-", 5) == 0 || strncmp(name, ".step-", 6) == 0) {
        return true;
    }
    snprintf(file, sizeof(file), "%s/manifest.json", path);
    return stat(file, &st) == 0;
}

/* Roots of several nodes, seen as one. They live as long as the program: stores keep them. */
struct tool_roots {
    struct ckpt_io_roots io;
    const char *paths[TOOL_ROOTS_MAX];
    char *text; /* owned: the paths */
    struct tool_roots *next;
};
static struct tool_roots *all_roots;

/* "A,B,C", where no file of that name is there, without slashes at their ends: the first stays in
 * `path`, and *ret is what a store on it is given; NULL where there is but one. */
static int roots_split(char *path, struct ckpt_io **ret)
{
    struct tool_roots *roots;
    struct stat st;
    uint32_t count = 0;
    char *rest;

    *ret = NULL;
    if (strchr(path, ',') == NULL || stat(path, &st) == 0) {
        return TOOL_GOOD;
    }
    roots = calloc(1, sizeof(*roots));
    if (roots == NULL || (roots->text = strdup(path)) == NULL) {
        free(roots);
        return ckpt_tool_fail("out of memory");
    }
    roots->next = all_roots;
    all_roots = roots;
    for (char *one = strtok_r(roots->text, ",", &rest); one != NULL;
         one = strtok_r(NULL, ",", &rest)) {
        size_t bytes = strlen(one);

        while (bytes > 1 && one[bytes - 1] == '/') {
            one[--bytes] = '\0';
        }
        if (count == TOOL_ROOTS_MAX) {
            return ckpt_tool_fail("more than %u roots", TOOL_ROOTS_MAX);
        }
        if (stat(one, &st) < 0) {
            return ckpt_tool_fail("%s: %s", one, strerror(errno));
        }
        roots->paths[count++] = one;
    }
    if (count == 0) {
        return ckpt_tool_fail("%s: no root", path);
    }
    strcpy(path, roots->paths[0]);
    ckpt_io_roots_init(&roots->io, roots->paths, count);
    *ret = &roots->io.io;
    return TOOL_GOOD;
}

struct ckpt_store *ckpt_tool_open(const char *path, char dir[CKPT_DIR_MAX])
{
    char root[TOOL_PATHS_BYTES_MAX];
    struct ckpt_store_config config = {.path = root};
    struct ckpt_store *store = NULL;
    struct bl_errmsg why = {0};
    size_t bytes = strlen(path);
    const char *name, *slash;

    while (bytes > 1 && path[bytes - 1] == '/') {
        bytes--;
    }
    if (bytes >= sizeof(root)) {
        ckpt_tool_fail("%.80s...: path too long", path);
        return NULL;
    }
    snprintf(root, sizeof(root), "%.*s", (int)bytes, path);
    if (roots_split(root, &config.io) != TOOL_GOOD) {
        return NULL;
    }
    slash = strrchr(root, '/');
    name = slash == NULL ? root : slash + 1;
    dir[0] = '\0';
    if (is_checkpoint(root, name)) {
        if (strlen(name) >= CKPT_DIR_MAX) {
            ckpt_tool_fail("%.80s...: no name of a checkpoint", name);
            return NULL;
        }
        memcpy(dir, name, strlen(name) + 1);
        if (name == root) {
            snprintf(root, sizeof(root), ".");
        } else {
            root[name - root > 1 ? name - root - 1 : 1] = '\0';
        }
    }
    if (ckpt_store_open(&store, &config, &why) < 0) {
        ckpt_tool_fail("%s", why.text);
        return NULL;
    }
    return store;
}

static int run_verb(const struct ckpt_tool_verb *verb, int argc, char **argv)
{
    struct ckpt_tool_parsed parsed;
    int code;

    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (strcmp(argv[i], "--help") == 0) {
            ckpt_tool_help_verb(verb);
            return TOOL_GOOD;
        }
    }
    code = ckpt_tool_parse(&parsed, verb, argc, argv);
    return code == TOOL_GOOD ? verb->run(&parsed.call) : code;
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "--help") == 0) {
        print_help();
        return TOOL_GOOD;
    }
    if (argc > 1 && strcmp(argv[1], "--version") == 0) {
        printf("ckpt-tool %s\n", BELAY_VERSION);
        return TOOL_GOOD;
    }
    if (argc < 2) {
        return ckpt_tool_usage(NULL, "usage", "a verb is missing");
    }
    for (uint32_t i = 0; i < VERB_COUNT; i++) {
        if (strcmp(argv[1], verbs[i]->name) == 0) {
            return run_verb(verbs[i], argc - 1, argv + 1);
        }
    }
    return ckpt_tool_usage(NULL, argv[1], argv[1][0] == '-' ? "unknown option" : "unknown verb");
}
