/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt-tool: looks at checkpoints. Arguments and what the verbs share. */
#include "tools/ckpt_tool.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "base/json.h"

static const char help_text[] =
    "usage: ckpt-tool VERB PATH [OPTION]...\n"
    "\n"
    "Looks at Belay's checkpoints: no daemon, no trainer, no GPU, little memory.\n"
    "PATH is a root (the directory with a BELAY file) or one checkpoint in it.\n"
    "\n"
    "verbs\n"
    "  ls ROOT          the checkpoints of a root, newest last\n"
    "  show PATH        what a checkpoint holds; of a root, the newest\n"
    "  verify PATH      reads every byte and compares the digests; of a root, all\n"
    "                   checkpoints in it\n"
    "\n"
    "options\n"
    "  --json           one JSON object on standard output\n"
    "  --tensors        show: every tensor and where it lies\n"
    "  --fast           verify: manifests, sizes, indexes; not the parts' bytes\n"
    "  --version        print the version\n"
    "  --help           print this\n"
    "\n"
    "exit status: 0 good, 1 a finding, 2 usage, 3 could not\n"
    "\n"
    "examples\n"
    "  ckpt-tool ls /scratch/run7\n"
    "  ckpt-tool verify /scratch/run7/step-000000001200.g7\n"
    "  ckpt-tool show /scratch/run7 --json | jq .state_digest\n";

static const struct {
    const char *name;
    int (*run)(const struct ckpt_tool_args *args); /* the shared options; both NULL: not built */
    int (*run_own)(int argc, char **argv);         /* parses its own options; argv[0]: the verb */
} verbs[] = {
    {"ls", ckpt_tool_ls, NULL}, {"show", ckpt_tool_show, NULL}, {"verify", ckpt_tool_verify, NULL},
    {"diff", NULL, NULL},       {"reshard", NULL, NULL},        {"export", NULL, NULL},
    {"import", NULL, NULL},     {"prune", NULL, NULL},          {"repair", NULL, NULL},
};

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

const char *ckpt_tool_time(char ret[TOOL_TEXT_MAX], uint64_t unix_s)
{
    time_t when = (time_t)unix_s;
    struct tm tm;

    if (unix_s == 0 || gmtime_r(&when, &tm) == NULL ||
        strftime(ret, TOOL_TEXT_MAX, "%Y-%m-%d %H:%M:%S", &tm) == 0) {
        snprintf(ret, TOOL_TEXT_MAX, "-");
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

struct ckpt_store *ckpt_tool_open(const char *path, char dir[CKPT_DIR_MAX])
{
    char root[4096];
    struct ckpt_store_config config = {.path = root};
    struct ckpt_store *store = NULL;
    struct bl_errmsg why = {0};
    size_t bytes = strlen(path);
    const char *name;

    while (bytes > 1 && path[bytes - 1] == '/') {
        bytes--;
    }
    if (bytes >= sizeof(root)) {
        ckpt_tool_fail("%.80s...: path too long", path);
        return NULL;
    }
    snprintf(root, sizeof(root), "%.*s", (int)bytes, path);
    name = strrchr(root, '/') == NULL ? root : strrchr(root, '/') + 1;
    dir[0] = '\0';
    if (is_checkpoint(root, name)) {
        if (strlen(name) >= CKPT_DIR_MAX) {
            ckpt_tool_fail("%.80s...: no name of a checkpoint", name);
            return NULL;
        }
        snprintf(dir, CKPT_DIR_MAX, "%s", name);
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

static int usage_error(const char *fmt, const char *what)
{
    fprintf(stderr, "ckpt-tool: %s: ", what);
    fprintf(stderr, "%s; see ckpt-tool --help\n", fmt);
    return TOOL_USAGE;
}

static int run_verb(const char *verb, const struct ckpt_tool_args *args)
{
    for (uint32_t i = 0; i < sizeof(verbs) / sizeof(verbs[0]); i++) {
        if (strcmp(verb, verbs[i].name) != 0) {
            continue;
        }
        if (verbs[i].run == NULL) {
            return ckpt_tool_fail("%s is not built into this version", verb);
        }
        return args->path == NULL ? usage_error("a path is missing", verb) : verbs[i].run(args);
    }
    return usage_error("unknown verb", verb);
}

int main(int argc, char **argv)
{
    struct ckpt_tool_args args = {0};
    const char *verb = NULL;

    for (uint32_t i = 0; argc > 1 && i < sizeof(verbs) / sizeof(verbs[0]); i++) {
        if (verbs[i].run_own != NULL && strcmp(argv[1], verbs[i].name) == 0) {
            return verbs[i].run_own(argc - 1, argv + 1);
        }
    }
    for (int i = 1; i < argc; i++) {
        const char *arg = argv[i];

        if (strcmp(arg, "--help") == 0) {
            fputs(help_text, stdout);
            return TOOL_GOOD;
        }
        if (strcmp(arg, "--version") == 0) {
            printf("ckpt-tool %s\n", BELAY_VERSION);
            return TOOL_GOOD;
        }
        if (strcmp(arg, "--json") == 0) {
            args.json = true;
        } else if (strcmp(arg, "--fast") == 0) {
            args.fast = true;
        } else if (strcmp(arg, "--tensors") == 0) {
            args.tensors = true;
        } else if (arg[0] == '-' && arg[1] != '\0') {
            return usage_error("unknown option", arg);
        } else if (verb == NULL) {
            verb = arg;
        } else if (args.path == NULL) {
            args.path = arg;
        } else {
            return usage_error("one path is enough", arg);
        }
    }
    if (verb == NULL) {
        return usage_error("a verb is missing", "usage");
    }
    return run_verb(verb, &args);
}
