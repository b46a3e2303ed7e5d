/* SPDX-License-Identifier: Apache-2.0 */
/* belay stop: saves, and ends the run so that it can be resumed. */
#include <stdlib.h>

#include "tools/belay.h"

static const char help[] =
    "Usage: belay stop [--job NAME] [--socket PATH] [--json]\n"
    "\n"
    "Ends the run after the step under way: its state is saved and committed, then\n"
    "the ranks leave. Nothing is lost; belay run with the same job resumes it, also\n"
    "with another number of ranks. Ctrl-C ends the waiting, not the stop.\n"
    "\n"
    "  --job NAME      of several jobs\n"
    "  --socket PATH   of the daemon\n"
    "  --json          {\"schema\":1,\"step\":STEP}\n"
    "\n"
    "Examples:\n"
    "  belay stop\n"
    "  belay stop --job llama-1b && belay run llama-1b.yaml\n"
    "\n"
    "Exit codes: 0 stopped and safe, 2 usage, 3 could not (also: the last save\n"
    "failed), 130 no longer waiting.\n";

static int stop_run(const struct tool_args *args)
{
    json_t *answer = NULL;
    int rc = tool_wait(&tool_stop, args, WIRE_VERB_STOP, "stopping", &answer);
    if (rc != 0) {
        return rc;
    }
    uint64_t step = tool_member_number(answer, "step");
    json_decref(answer);
    if (step == TOOL_NUMBER_NONE) {
        tool_say(&tool_stop,
                 "the daemon does not say at which step it stopped (belay status does)");
        return TOOL_COULD_NOT;
    }
    bool as_json = (args->given & TOOL_OPT_JSON) != 0;
    printf("%s%llu%s\n", as_json ? "{\"schema\":1,\"step\":" : "stopped at step ",
           (unsigned long long)step, as_json ? "}" : ", state saved; belay run resumes it");
    return TOOL_DONE;
}

const struct tool_command tool_stop = {
    .name = "stop",
    .brief = "saves and ends the run; belay run resumes it",
    .help = help,
    .options = TOOL_OPT_SOCKET | TOOL_OPT_JSON | TOOL_OPT_JOB,
    .run = stop_run,
};
