/* SPDX-License-Identifier: Apache-2.0 */
/* belay promote and belay version. */
#include "base/json.h"
#include "tools/belay.h"

static const char promote_help[] =
    "Usage: belay promote [--socket PATH] [--json]\n"
    "\n"
    "Makes the daemon at this socket the head, from its copy of the store. For a head\n"
    "that is lost: ask the standby. All daemons refuse the former head from then on;\n"
    "when it comes back it is a member.\n"
    "\n"
    "  --socket PATH   of the standby's daemon\n"
    "  --json          {\"schema\":1,\"head_epoch\":N}\n"
    "\n"
    "Example:\n"
    "  belay promote --socket /run/belay/node1.sock\n"
    "\n"
    "Exit codes: 0 done, 2 usage, 3 could not (no copy of the store here, or the\n"
    "daemon is the head already).\n";

static int promote_run(const struct tool_args *args)
{
    struct bl_errmsg msg = {{0}};
    struct tool_link link = {.is_open = false};
    json_t *answer = NULL;
    uint64_t epoch = 0;
    int rc = tool_link_ask(&link, args->socket, WIRE_VERB_PROMOTE, NULL, &answer, &msg);
    tool_link_close(&link);
    if (rc == 0) {
        rc = bl_json_u64(answer, "head_epoch", 0, INT64_MAX, &epoch, &msg);
    }
    json_decref(answer);
    if (rc != 0) {
        return tool_refused(&tool_promote, args->socket, rc, &msg);
    }
    bool as_json = (args->given & TOOL_OPT_JSON) != 0;
    printf("%s%llu%s\n",
           as_json ? "{\"schema\":1,\"head_epoch\":" : "this daemon is the head, epoch ",
           (unsigned long long)epoch, as_json ? "}" : "");
    return TOOL_DONE;
}

static const char version_help[] =
    "Usage: belay version [--json]\n"
    "\n"
    "This program's version, and that of the protocol that it speaks.\n"
    "\n"
    "  --json          {\"schema\":1,\"version\":\"..\",\"protocol\":N}\n"
    "\n"
    "Example:\n"
    "  belay version\n"
    "\n"
    "Exit code: 0.\n";

static int version_run(const struct tool_args *args)
{
    if (args->given & TOOL_OPT_JSON) {
        printf("{\"schema\":1,\"version\":\"%s\",\"protocol\":%u}\n", BELAY_VERSION,
               WIRE_FRAME_VERSION);
    } else {
        printf("belay %s, protocol %u\n", BELAY_VERSION, WIRE_FRAME_VERSION);
    }
    return TOOL_DONE;
}

const struct tool_command tool_promote = {
    .name = "promote",
    .brief = "makes this daemon the head, from its copy of the store",
    .help = promote_help,
    .options = TOOL_OPT_SOCKET | TOOL_OPT_JSON,
    .run = promote_run,
};

const struct tool_command tool_version = {
    .name = "version",
    .brief = "of this program",
    .help = version_help,
    .options = TOOL_OPT_JSON,
    .run = version_run,
};
