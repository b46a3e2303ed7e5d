/* SPDX-License-Identifier: Apache-2.0 */
/* A request whose answer takes as long as a save. */
#include <errno.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "tools/belay.h"

#define SLICE_MS 250  /* between two looks at the progress */
#define PLAIN_MS 5000 /* between two lines where there is no terminal */

struct waiting {
    const struct tool_command *command;
    const struct tool_args *args;
    const char *doing;
    struct tool_link link, watch; /* the request's, and one for status */
    struct tool_screen screen;
    uint64_t id[2], begun_ns, plain_ns;
    bool sent, said_away;
    bool was_quiet; /* a whole slice without an answer: the request was taken */
};

static void progress(struct waiting *waiting)
{
    struct tool_state state;
    struct bl_errmsg msg = {{0}};
    char line[TOOL_TEXT_MAX], age[32], text[TOOL_TEXT_MAX + 64];
    uint64_t now_ns = bl_now_ns();
    bool plain = now_ns - waiting->plain_ns >= PLAIN_MS * 1000000ull;
    if (!waiting->screen.is_terminal && !plain) {
        return;
    }
    waiting->plain_ns = plain ? now_ns : waiting->plain_ns;
    if (tool_state_ask(&state, &waiting->watch, waiting->args->socket, waiting->args->job, &msg) !=
        0) {
        return;
    }
    tool_format_progress(&state, line, sizeof line);
    tool_format_ms((now_ns - waiting->begun_ns) / 1000000, age, sizeof age);
    snprintf(text, sizeof text, "%s, %s: %s", waiting->doing, age, line);
    if (waiting->screen.is_terminal) {
        tool_screen_live(&waiting->screen, text);
    } else {
        tool_screen_line(&waiting->screen, text);
    }
    tool_state_close(&state);
}

/* Opens the connection when needed and sends the request, the same as before. */
static int request_send(struct waiting *waiting, enum wire_verb verb, struct bl_errmsg *msg)
{
    if (waiting->link.is_open) {
        return 0;
    }
    int rc = tool_link_open(&waiting->link, waiting->args->socket, msg);
    if (rc != 0) {
        return rc;
    }
    json_t *args = tool_job_args(waiting->args->job);
    rc = tool_link_send(&waiting->link, waiting->id, verb, args, msg);
    json_decref(args);
    waiting->sent = waiting->sent || rc == 0;
    if (rc == 0 && waiting->said_away) {
        tool_screen_line(&waiting->screen, "the daemon is back; asked again");
        waiting->said_away = false;
    }
    return rc;
}

/* After a lost connection: says so once; the code stays when waiting is of no use. */
static int request_lost(struct waiting *waiting, int rc, const struct bl_errmsg *msg)
{
    char text[TOOL_TEXT_MAX * 2];
    tool_link_close(&waiting->link);
    tool_link_close(&waiting->watch);
    if (!waiting->sent || !tool_link_is_away(rc)) {
        return rc;
    }
    if (!waiting->said_away) {
        snprintf(text, sizeof text, "the daemon is away (%s); waiting for it", msg->text);
        tool_screen_line(&waiting->screen, text);
        waiting->said_away = true;
    }
    nanosleep(&(struct timespec){0, SLICE_MS * 1000000L}, NULL);
    return 0;
}

static int wait_loop(struct waiting *waiting, enum wire_verb verb, struct tool_answer *answer,
                     struct bl_errmsg *msg)
{
    for (;;) {
        if (tool_signal != 0) {
            return BL_EABORTED;
        }
        int rc = request_send(waiting, verb, msg);
        if (rc == 0) {
            rc = tool_link_wait(&waiting->link, waiting->id, SLICE_MS, answer, msg);
        }
        if (rc == 0 && answer->rc == BL_EPEER && waiting->was_quiet) {
            /* A member's word for a head that went away while we waited. */
            rc = bl_err(msg, BL_EPEER, "%s", answer->text);
            tool_answer_close(answer);
            tool_link_id(waiting->id); /* what was refused would be refused again */
        }
        if (rc == 0 && !answer->more) {
            return 0;
        }
        waiting->was_quiet = waiting->was_quiet || rc == BL_EDEADLINE;
        if (rc == 0) {
            tool_answer_close(answer);
        } else if (rc != BL_EDEADLINE || !waiting->link.is_open) {
            rc = request_lost(waiting, rc, msg);
            if (rc != 0) {
                return rc;
            }
            continue;
        }
        progress(waiting);
    }
}

int tool_wait(const struct tool_command *command, const struct tool_args *args, enum wire_verb verb,
              const char *doing, json_t **ret)
{
    struct bl_errmsg msg = {{0}};
    struct tool_answer answer = {.json = NULL};
    struct waiting waiting = {.command = command, .args = args, .doing = doing};
    tool_screen_init(&waiting.screen, stderr);
    tool_link_id(waiting.id);
    waiting.begun_ns = waiting.plain_ns = bl_now_ns();
    tool_signals_catch();
    int rc = wait_loop(&waiting, verb, &answer, &msg);
    tool_screen_clear(&waiting.screen);
    tool_link_close(&waiting.link);
    tool_link_close(&waiting.watch);
    if (rc == BL_EABORTED) {
        tool_say(command, "no longer waiting; what was asked for goes on (belay status)");
        return TOOL_DETACHED;
    }
    if (rc != 0) {
        return waiting.sent ? tool_refused(command, args->socket, rc, &msg)
                            : tool_unreachable(command, args->socket, &msg);
    }
    if (answer.rc != 0) {
        tool_say(command, "%s", answer.text[0] != '\0' ? answer.text : bl_strerror(answer.rc));
        tool_answer_close(&answer);
        return TOOL_COULD_NOT;
    }
    *ret = answer.json != NULL ? answer.json : json_object();
    return 0;
}
