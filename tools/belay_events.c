/* SPDX-License-Identifier: Apache-2.0 */
/* belay events: what happened, what was done about it, what a person has to do. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/json.h"
#include "tools/belay.h"

static const char help[] =
    "Usage: belay events [--since N] [--follow] [--socket PATH] [--json]\n"
    "\n"
    "What happened, oldest first: time, severity, code (docs/runbook.md has each),\n"
    "name, what is known of it, and what a person has to do.\n"
    "\n"
    "  --since N       only those after number N\n"
    "  --follow        go on with those that come; ends with Ctrl-C. A restart of the\n"
    "                  daemon is waited for\n"
    "  --socket PATH   of the daemon\n"
    "  --json          one JSON object a line: seq, ms (since 1970), code, name,\n"
    "                  severity, text, todo, run, fields\n"
    "\n"
    "Examples:\n"
    "  belay events\n"
    "  belay events --follow\n"
    "  belay events --json --since 120 | jq -r .name\n"
    "\n"
    "Exit codes: 0 done, 2 usage, 3 the daemon cannot be reached.\n";

#define RETRY_MS 200 /* between looks at the signals, and at a daemon that is away */

static void event_print(const json_t *event, void *arg)
{
    const bool *as_json = arg;
    if (*as_json) {
        char *text = json_dumps(event, JSON_COMPACT | JSON_PRESERVE_ORDER);
        puts(text != NULL ? text : "{}");
        free(text);
        return;
    }
    char line[TOOL_TEXT_MAX];
    tool_format_event(event, line, sizeof line);
    puts(line);
    const char *todo = tool_member_text(event, "todo");
    if (*todo != '\0' && strcmp(todo, "nothing") != 0) {
        printf("         to do: %s\n", todo);
    }
}

json_t *tool_events_args(const struct tool_events_at *at, bool follows)
{
    json_t *asked = json_pack("{s:I,s:b}", "since", (json_int_t)at->since, "follow", follows);
    BL_ASSERT(asked != NULL);
    if (at->log[0] != '\0') {
        int rc = json_object_set_new(asked, "log", json_string(at->log));
        BL_ASSERT(rc == 0);
    }
    return asked;
}

/* Whose log is it? Numbers of another one begin anew; so do those of one that was thrown away. */
static void events_log(const json_t *answer, struct tool_events_at *at)
{
    const char *log = tool_member_text(answer, "log");
    bool is_known = at->log[0] != '\0' && *log != '\0';
    if (is_known && (strcmp(log, at->log) != 0 || tool_member_number(answer, "next") < at->since)) {
        at->since = 0;
    }
    snprintf(at->log, sizeof at->log, "%s", log);
}

int tool_events_read(const json_t *answer, struct tool_events_at *at,
                     void (*each)(const json_t *, void *), void *arg, struct bl_errmsg *msg)
{
    json_t *list;
    int rc = bl_json_array(answer, "events", TOOL_EVENTS_MAX, &list, msg);
    if (rc == 0) {
        events_log(answer, at);
    }
    for (size_t i = 0; rc == 0 && i < json_array_size(list); i++) {
        const json_t *event = json_array_get(list, i);
        uint64_t seq;
        rc = bl_json_u64(event, "seq", 0, INT64_MAX, &seq, msg);
        if (rc == 0 && seq > at->since) { /* a repeat after a reconnection is not news */
            at->since = seq;
            each(event, arg);
        }
    }
    return rc != 0 ? bl_err_in(msg, rc, "the daemon's events") : 0;
}

/* One request, to its last answer. `at` moves on. */
static int events_once(const struct tool_args *args, struct tool_link *link,
                       struct tool_events_at *at, struct bl_errmsg *msg)
{
    bool as_json = (args->given & TOOL_OPT_JSON) != 0;
    bool follows = (args->given & TOOL_OPT_FOLLOW) != 0;
    uint64_t id[2];
    struct tool_answer answer = {.more = true};
    json_t *asked = tool_events_args(at, follows);
    tool_link_id(id);
    int rc = tool_link_send(link, id, WIRE_VERB_EVENTS, asked, msg);
    json_decref(asked);
    while (rc == 0 && answer.more && tool_signal == 0) {
        rc = tool_link_wait(link, id, follows ? RETRY_MS : TOOL_ANSWER_MS, &answer, msg);
        if (rc == BL_EDEADLINE && follows) {
            answer.more = true;
            rc = 0;
            continue;
        }
        if (rc == 0 && answer.rc != 0) {
            rc = bl_err(msg, answer.rc, "%s", answer.text);
        }
        if (rc == 0 && answer.json != NULL) {
            rc = tool_events_read(answer.json, at, event_print, &as_json, msg);
            fflush(stdout);
        }
        tool_answer_close(&answer);
    }
    return rc;
}

static int events_run(const struct tool_args *args)
{
    bool follows = (args->given & TOOL_OPT_FOLLOW) != 0, was_there = false, said = false;
    struct tool_events_at at = {.since = args->since};
    struct tool_link link;
    if (follows) {
        tool_signals_catch();
    }
    for (;;) {
        struct bl_errmsg msg = {{0}};
        int rc = tool_link_open(&link, args->socket, &msg);
        if (rc != 0 && !was_there) {
            return tool_unreachable(&tool_events, args->socket, &msg);
        }
        if (rc == 0) {
            if (said) {
                tool_say(&tool_events, "the daemon is back");
            }
            was_there = true;
            said = false;
            rc = events_once(args, &link, &at, &msg);
            tool_link_close(&link);
        }
        if (tool_signal != 0 || (rc == 0 && !follows) || ferror(stdout)) {
            return TOOL_DONE;
        }
        if (rc != 0 && (!follows || !tool_link_is_away(rc))) {
            return tool_refused(&tool_events, args->socket, rc, &msg);
        }
        if (rc != 0 && !said) {
            tool_say(&tool_events, "the daemon is away (%s); waiting for it", msg.text);
            said = true;
        }
        nanosleep(&(struct timespec){0, RETRY_MS * 1000000L}, NULL);
    }
}

const struct tool_command tool_events = {
    .name = "events",
    .brief = "what happened and what to do about it",
    .help = help,
    .options = TOOL_OPT_SOCKET | TOOL_OPT_JSON | TOOL_OPT_SINCE | TOOL_OPT_FOLLOW,
    .run = events_run,
};
