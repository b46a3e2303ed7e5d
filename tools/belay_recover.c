/* SPDX-License-Identifier: Apache-2.0 */
/* belay recover and belay resume: what a person decides when a run waits for one. */
#include "tools/belay.h"

static const char recover_help[] =
    "Usage: belay recover --abandon [--job NAME] [--socket PATH]\n"
    "       belay recover --resume  [--job NAME] [--socket PATH]\n"
    "\n"
    "  --abandon       go on although nothing proves that the ranks of the lost nodes\n"
    "                  are gone. Only when those machines are surely off or cut off:\n"
    "                  else two runs may write the same checkpoints\n"
    "  --resume        the same as belay resume: release a run that is held\n"
    "  --job NAME      of several jobs\n"
    "  --socket PATH   of the daemon\n"
    "\n"
    "Examples:\n"
    "  belay status                   says what is waited for\n"
    "  belay recover --abandon        after the dead rack was switched off\n"
    "\n"
    "To begin again from a checkpoint alone: belay run --recover ROOT.\n"
    "\n"
    "Exit codes: 0 done, 2 usage, 3 could not.\n";

static const char resume_help[] =
    "Usage: belay resume [--job NAME] [--socket PATH]\n"
    "\n"
    "Releases a run that is held (too many recoveries in an hour). First look for the\n"
    "cause: belay status, belay events, the ranks' logs.\n"
    "\n"
    "  --job NAME      of several jobs\n"
    "  --socket PATH   of the daemon\n"
    "\n"
    "Example:\n"
    "  belay resume\n"
    "\n"
    "Exit codes: 0 done, 2 usage, 3 could not.\n";

static int ask(const struct tool_command *command, const struct tool_args *args, bool abandon)
{
    struct bl_errmsg msg = {{0}};
    struct tool_link link = {.is_open = false};
    json_t *asked = tool_job_args(args->job);
    BL_ASSERT(json_object_set_new(asked, "abandon", json_boolean(abandon)) == 0);
    int rc = tool_link_ask(&link, args->socket, WIRE_VERB_RECOVER, asked, NULL, &msg);
    json_decref(asked);
    tool_link_close(&link);
    if (rc != 0) {
        return tool_refused(command, args->socket, rc, &msg);
    }
    puts(abandon ? "the lost ranks are given up; the run goes on" : "the run is released");
    return TOOL_DONE;
}

static int recover_run(const struct tool_args *args)
{
    bool abandon = (args->given & TOOL_OPT_ABANDON) != 0;
    if (abandon == ((args->given & TOOL_OPT_RESUME) != 0)) {
        tool_say(&tool_recover, "say which: --abandon or --resume (belay recover --help)");
        return TOOL_USAGE;
    }
    return ask(&tool_recover, args, abandon);
}

static int resume_run(const struct tool_args *args)
{
    return ask(&tool_resume, args, false);
}

const struct tool_command tool_recover = {
    .name = "recover",
    .brief = "--abandon: go on without ranks that nobody can reach",
    .help = recover_help,
    .options = TOOL_OPT_SOCKET | TOOL_OPT_JOB | TOOL_OPT_ABANDON | TOOL_OPT_RESUME,
    .run = recover_run,
};

const struct tool_command tool_resume = {
    .name = "resume",
    .brief = "releases a run that is held",
    .help = resume_help,
    .options = TOOL_OPT_SOCKET | TOOL_OPT_JOB,
    .run = resume_run,
};
