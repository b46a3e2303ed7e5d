/* SPDX-License-Identifier: Apache-2.0 */
/* belay save: a checkpoint now. */
#include <stdlib.h>

#include "tools/belay.h"

static const char help[] =
    "Usage: belay save [--job NAME] [--socket PATH] [--json]\n"
    "\n"
    "Asks for a checkpoint after the step under way and waits until it is committed:\n"
    "all parts durable and the manifest in place. Training goes on meanwhile. Ctrl-C\n"
    "ends the waiting, not the save.\n"
    "\n"
    "  --job NAME      of several jobs\n"
    "  --socket PATH   of the daemon\n"
    "  --json          {\"schema\":1,\"committed\":STEP}\n"
    "\n"
    "Examples:\n"
    "  belay save\n"
    "  belay save --json | jq .committed\n"
    "\n"
    "Exit codes: 0 committed, 2 usage, 3 could not, 130 no longer waiting.\n";

static int save_run(const struct tool_args *args)
{
    json_t *answer = NULL;
    int rc = tool_wait(&tool_save, args, WIRE_VERB_SAVE, "saving", &answer);
    if (rc != 0) {
        return rc;
    }
    uint64_t step = tool_member_number(answer, "committed");
    json_decref(answer);
    if (step == TOOL_NUMBER_NONE) {
        tool_say(&tool_save, "the daemon does not say which step it committed (belay events does)");
        return TOOL_COULD_NOT;
    }
    const char *json = "{\"schema\":1,\"committed\":";
    bool as_json = (args->given & TOOL_OPT_JSON) != 0;
    printf("%s%llu%s\n", as_json ? json : "committed: step ", (unsigned long long)step,
           as_json ? "}" : "");
    return TOOL_DONE;
}

const struct tool_command tool_save = {
    .name = "save",
    .brief = "a checkpoint now; waits until it is committed",
    .help = help,
    .options = TOOL_OPT_SOCKET | TOOL_OPT_JSON | TOOL_OPT_JOB,
    .run = save_run,
};
