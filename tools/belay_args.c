/* SPDX-License-Identifier: Apache-2.0 */
/* Arguments of all commands, by one table. */
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/belay.h"

enum value_kind { VALUE_NONE, VALUE_TEXT, VALUE_NUMBER };

struct option_row {
    const char *name, *value;
    enum tool_option option;
    enum value_kind kind;
};

static const struct option_row rows[] = {
    {"--socket", "PATH", TOOL_OPT_SOCKET, VALUE_TEXT},
    {"--json", NULL, TOOL_OPT_JSON, VALUE_NONE},
    {"--job", "NAME", TOOL_OPT_JOB, VALUE_TEXT},
    {"--detach", NULL, TOOL_OPT_DETACH, VALUE_NONE},
    {"--recover", "ROOT", TOOL_OPT_RECOVER, VALUE_TEXT},
    {"--replace-binary", NULL, TOOL_OPT_REPLACE_BINARY, VALUE_NONE},
    {"--accept-numerics-change", NULL, TOOL_OPT_ACCEPT_NUMERICS, VALUE_NONE},
    {"--since", "N", TOOL_OPT_SINCE, VALUE_NUMBER},
    {"--follow", NULL, TOOL_OPT_FOLLOW, VALUE_NONE},
    {"--abandon", NULL, TOOL_OPT_ABANDON, VALUE_NONE},
    {"--resume", NULL, TOOL_OPT_RESUME, VALUE_NONE},
    {"--prometheus", NULL, TOOL_OPT_PROMETHEUS, VALUE_NONE},
};
#define ROW_COUNT (sizeof rows / sizeof *rows)

#define WORD_MAX 32

/* Levenshtein's distance of two words of at most WORD_MAX bytes; WORD_MAX for longer ones. */
static size_t distance(const char *a, const char *b)
{
    size_t rows_of[WORD_MAX + 1];
    size_t n = strlen(a), m = strlen(b);
    if (n > WORD_MAX || m > WORD_MAX) {
        return WORD_MAX;
    }
    for (size_t j = 0; j <= m; j++) {
        rows_of[j] = j;
    }
    for (size_t i = 1; i <= n; i++) {
        size_t diagonal = rows_of[0];
        rows_of[0] = i;
        for (size_t j = 1; j <= m; j++) {
            size_t change = diagonal + (a[i - 1] != b[j - 1]);
            size_t best = rows_of[j] < rows_of[j - 1] ? rows_of[j] + 1 : rows_of[j - 1] + 1;
            diagonal = rows_of[j];
            rows_of[j] = best < change ? best : change;
        }
    }
    return rows_of[m];
}

const char *tool_nearest(const char *word, const char *const *names, size_t count)
{
    const char *best = NULL;
    size_t best_distance = WORD_MAX;
    for (size_t i = 0; i < count; i++) {
        size_t d = distance(word, names[i]);
        if (d < best_distance) {
            best_distance = d;
            best = names[i];
        }
    }
    /* More than a third wrong is another word. */
    return best != NULL && best_distance * 3 <= strlen(word) + 2 ? best : NULL;
}

static int unknown_option(const struct tool_command *command, const char *word, size_t bytes)
{
    const char *names[ROW_COUNT + 1];
    size_t count = 0;
    for (size_t i = 0; i < ROW_COUNT; i++) {
        if (command->options & rows[i].option) {
            names[count++] = rows[i].name;
        }
    }
    names[count++] = "--help";
    char cut[WORD_MAX + 1];
    snprintf(cut, sizeof cut, "%.*s", (int)(bytes < WORD_MAX ? bytes : WORD_MAX), word);
    const char *near = tool_nearest(cut, names, count);
    if (near != NULL) {
        tool_say(command, "unknown option '%s'; did you mean %s?", cut, near);
    } else {
        tool_say(command, "unknown option '%s' (belay %s --help lists them)", cut, command->name);
    }
    return TOOL_USAGE;
}

static int value_take(struct tool_args *args, const struct tool_command *command,
                      const struct option_row *row, const char *value)
{
    if (*value == '\0') {
        tool_say(command, "%s: the value is empty", row->name);
        return TOOL_USAGE;
    }
    if (row->kind == VALUE_NUMBER) {
        char *end;
        errno = 0;
        args->since = strtoull(value, &end, 10);
        if (errno != 0 || *value < '0' || *value > '9' || *end != '\0' || args->since > INT64_MAX) {
            tool_say(command, "%s %.60s: not a number", row->name, value);
            return TOOL_USAGE;
        }
    } else if (row->option == TOOL_OPT_SOCKET) {
        if (strlen(value) >= sizeof args->socket) {
            tool_say(command, "--socket: the path is too long");
            return TOOL_USAGE;
        }
        strcpy(args->socket, value); /* NOLINT: checked above */
    } else if (row->option == TOOL_OPT_JOB) {
        args->job = value;
    } else {
        args->recover = value;
    }
    return -1;
}

/* One option at argv[*index], with its value. -1 or an exit code. */
static int option_take(struct tool_args *args, const struct tool_command *command, int argc,
                       char **argv, int *index)
{
    const char *word = argv[*index];
    size_t bytes = strcspn(word, "=");
    const struct option_row *row = NULL;
    for (size_t i = 0; i < ROW_COUNT; i++) {
        if (strlen(rows[i].name) == bytes && strncmp(rows[i].name, word, bytes) == 0 &&
            (command->options & rows[i].option) != 0) {
            row = &rows[i];
        }
    }
    if (row == NULL) {
        return unknown_option(command, word, bytes);
    }
    args->given |= row->option;
    if (row->kind == VALUE_NONE) {
        if (word[bytes] == '=') {
            tool_say(command, "%s takes no value", row->name);
            return TOOL_USAGE;
        }
        return -1;
    }
    if (word[bytes] == '=') {
        return value_take(args, command, row, word + bytes + 1);
    }
    if (*index + 1 >= argc) {
        tool_say(command, "%s wants a value: %s %s", row->name, row->name, row->value);
        return TOOL_USAGE;
    }
    *index += 1;
    return value_take(args, command, row, argv[*index]);
}

/* The only socket in `dir`, for a daemon that has another name than the host. */
static bool socket_only(const char *dir, char *out, size_t bytes)
{
    DIR *stream = opendir(dir);
    if (stream == NULL) {
        return false;
    }
    uint32_t count = 0;
    for (struct dirent *entry; (entry = readdir(stream)) != NULL;) {
        size_t length = strlen(entry->d_name);
        if (length > 5 && strcmp(entry->d_name + length - 5, ".sock") == 0) {
            int n = snprintf(out, bytes, "%s/%s", dir, entry->d_name);
            count += n > 0 && (size_t)n < bytes;
        }
    }
    closedir(stream);
    return count == 1;
}

/* As belayd chooses it when it is given neither name nor socket. */
static void socket_default(char *out, size_t bytes)
{
    const char *path = getenv("BELAY_SOCKET_PATH");
    if (path != NULL && *path != '\0') {
        snprintf(out, bytes, "%s", path);
        return;
    }
    const char *runtime = getenv("XDG_RUNTIME_DIR");
    char dir[512], host[WIRE_NODE_MAX] = "localhost";
    if (geteuid() == 0 || runtime == NULL || *runtime == '\0') {
        snprintf(dir, sizeof dir, "/run/belay");
    } else {
        snprintf(dir, sizeof dir, "%s/belay", runtime);
    }
    if (gethostname(host, sizeof host) != 0) {
        snprintf(host, sizeof host, "localhost");
    }
    host[sizeof host - 1] = '\0';
    snprintf(out, bytes, "%s/%s.sock", dir, host);
    char only[1024];
    if (access(out, F_OK) != 0 && socket_only(dir, only, sizeof only)) {
        snprintf(out, bytes, "%s", only);
    }
}

int tool_args_parse(struct tool_args *ret, const struct tool_command *command, int argc,
                    char **argv)
{
    memset(ret, 0, sizeof *ret);
    bool only_words = false;
    for (int i = 0; i < argc; i++) {
        const char *word = argv[i];
        if (!only_words && strcmp(word, "--") == 0) {
            only_words = true;
        } else if (!only_words && (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0)) {
            fputs(command->help, stdout);
            return TOOL_DONE;
        } else if (!only_words && word[0] == '-' && word[1] != '\0') {
            int rc = option_take(ret, command, argc, argv, &i);
            if (rc >= 0) {
                return rc;
            }
        } else if (ret->word_count >= command->word_count) {
            tool_say(command, "'%.60s' is one argument too many (belay %s --help)", word,
                     command->name);
            return TOOL_USAGE;
        } else {
            ret->words[ret->word_count++] = word;
        }
    }
    if ((command->options & TOOL_OPT_SOCKET) != 0 && ret->socket[0] == '\0') {
        socket_default(ret->socket, sizeof ret->socket);
    }
    return -1;
}
