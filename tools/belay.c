/* SPDX-License-Identifier: Apache-2.0 */
/* belay: finds the command and runs it. */
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "tools/belay.h"

static const struct tool_command *const commands[] = {
    &tool_run,     &tool_status, &tool_events,  &tool_save,   &tool_stop,
    &tool_recover, &tool_resume, &tool_promote, &tool_doctor, &tool_version,
};
#define COMMAND_COUNT (sizeof commands / sizeof *commands)

/* Names that later versions will know. */
static const char *const later[] = {"top", "drain", "undrain", "hold",
                                    "set", "plan",  "bench",   "sim"};
#define LATER_COUNT (sizeof later / sizeof *later)

void tool_say(const struct tool_command *command, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "belay%s%s: ", command != NULL ? " " : "",
            command != NULL ? command->name : "");
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
}

static void help_print(void)
{
    puts("Usage: belay COMMAND [OPTION...]\n"
         "\n"
         "Starts, watches and steers training runs by the belayd of this node.\n");
    for (size_t i = 0; i < COMMAND_COUNT; i++) {
        printf("  %-9s %s\n", commands[i]->name, commands[i]->brief);
    }
    puts("\n"
         "  --socket PATH   of the daemon. Default: $BELAY_SOCKET_PATH, else HOST.sock in\n"
         "                  $XDG_RUNTIME_DIR/belay or, as root, /run/belay\n"
         "  --help          of a command: what it does, its options, examples\n"
         "  --version\n"
         "\n"
         "Examples:\n"
         "  belay run job.yaml             start a run, or resume it, and watch it\n"
         "  belay status                   how it stands\n"
         "  belay events --follow          what happens\n"
         "  belay stop                     save and end; belay run resumes it\n"
         "\n"
         "Exit codes: belay COMMAND --help says what they mean.");
}

static const struct tool_command *command_find(const char *name)
{
    for (size_t i = 0; i < COMMAND_COUNT; i++) {
        if (strcmp(commands[i]->name, name) == 0) {
            return commands[i];
        }
    }
    return NULL;
}

/* A name that is no command: one line, and the exit code. */
static int command_unknown(const char *name)
{
    for (size_t i = 0; i < LATER_COUNT; i++) {
        if (strcmp(later[i], name) == 0) {
            tool_say(NULL, "'%s' is not built into this version", name);
            return TOOL_COULD_NOT;
        }
    }
    const char *names[COMMAND_COUNT];
    for (size_t i = 0; i < COMMAND_COUNT; i++) {
        names[i] = commands[i]->name;
    }
    const char *near = tool_nearest(name, names, COMMAND_COUNT);
    const char *kind = name[0] == '-' ? "option" : "command";
    if (near != NULL) {
        tool_say(NULL, "unknown %s '%.60s'; did you mean %s?", kind, name, near);
    } else {
        tool_say(NULL, "unknown %s '%.60s' (belay --help lists them)", kind, name);
    }
    return TOOL_USAGE;
}

int main(int argc, char **argv)
{
    signal(SIGPIPE, SIG_IGN);
    if (argc < 2) {
        tool_say(NULL, "which command? (belay --help lists them)");
        return TOOL_USAGE;
    }
    const char *name = argv[1];
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) {
        help_print();
        return TOOL_DONE;
    }
    if (strcmp(name, "--version") == 0) {
        name = "version";
    }
    bool wants_help = strcmp(name, "help") == 0;
    if (wants_help && argc < 3) {
        help_print();
        return TOOL_DONE;
    }
    name = wants_help ? argv[2] : name;
    const struct tool_command *command = command_find(name);
    if (command == NULL) {
        return command_unknown(name);
    }
    if (wants_help) {
        fputs(command->help, stdout);
        return TOOL_DONE;
    }
    struct tool_args args;
    int rc = tool_args_parse(&args, command, argc - 2, argv + 2);
    return rc >= 0 ? rc : command->run(&args);
}
