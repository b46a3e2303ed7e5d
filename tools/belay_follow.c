/* SPDX-License-Identifier: Apache-2.0 */
/* Watching a run to its end, over restarts of the daemon. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "tools/belay.h"

#define LOOK_MS  250  /* between two looks, on a terminal and elsewhere */
#define PLAIN_MS 5000 /* between two lines where there is no terminal */
/* A daemon that is there but knows nothing of the run: as long as a restarted one may need to take
 * it up again. Then it is lost, and the exit code is 3. */
#define UNKNOWN_MS 60000
#define RATE_LOOKS 40 /* steps of this many looks make the ETA */

struct follow {
    const struct tool_command *command;
    const struct tool_args *args;
    struct tool_link *link;
    const char *run, *name;
    struct tool_screen screen;
    struct tool_events_at at;
    uint64_t plain_ns, unknown_ns;
    bool is_away, was_read;
    char last_event[64];
    uint64_t look_ns[RATE_LOOKS], look_step[RATE_LOOKS]; /* a ring, for the ETA */
    uint32_t looks;
};

static void event_show(const json_t *event, void *arg)
{
    struct follow *follow = arg;
    char line[TOOL_TEXT_MAX];
    const char *job = tool_member_text(json_object_get(event, "fields"), "job");
    if (*job != '\0' && strcmp(job, follow->name) != 0) {
        return; /* another's */
    }
    snprintf(follow->last_event, sizeof follow->last_event, "%s", tool_member_text(event, "name"));
    if (follow->screen.is_terminal && !tool_event_is_news(event)) {
        return; /* the live line names it */
    }
    tool_format_event(event, line, sizeof line);
    tool_screen_line(&follow->screen, line);
}

static int events_show(struct follow *follow, struct bl_errmsg *msg)
{
    uint64_t id[2];
    struct tool_answer answer = {.more = true};
    json_t *asked = tool_events_args(&follow->at, false);
    tool_link_id(id);
    int rc = tool_link_send(follow->link, id, WIRE_VERB_EVENTS, asked, msg);
    json_decref(asked);
    while (rc == 0 && answer.more) {
        rc = tool_link_wait(follow->link, id, TOOL_ANSWER_MS, &answer, msg);
        if (rc == 0 && answer.rc != 0) {
            rc = bl_err(msg, answer.rc, "%s", answer.text);
        } else if (rc == 0 && answer.json != NULL) {
            rc = tool_events_read(answer.json, &follow->at, event_show, follow, msg);
        }
        tool_answer_close(&answer);
    }
    return rc;
}

/* Appends the time that the rest takes at the pace of the last looks. */
static void eta_append(struct follow *follow, const struct tool_state *state, char *out,
                       size_t bytes)
{
    if (state->step == TOOL_NUMBER_NONE || state->steps == TOOL_NUMBER_NONE) {
        return;
    }
    uint64_t now_ns = bl_now_ns();
    uint32_t slot = follow->looks % RATE_LOOKS;
    uint32_t oldest = follow->looks < RATE_LOOKS ? 0 : slot;
    uint64_t then_ns = follow->look_ns[oldest], then_step = follow->look_step[oldest];
    bool has_pace = follow->looks > 4 && state->step > then_step && state->steps >= state->step;
    follow->look_ns[slot] = now_ns;
    follow->look_step[slot] = state->step;
    follow->looks++;
    if (has_pace) {
        double ms = (double)(now_ns - then_ns) / 1e6 * (double)(state->steps - state->step) /
                    (double)(state->step - then_step);
        char text[32];
        tool_format_ms((uint64_t)ms, text, sizeof text);
        size_t have = strlen(out);
        snprintf(out + have, bytes - have, "  ETA %s", text);
    }
}

static void progress_show(struct follow *follow, const struct tool_state *state)
{
    char line[TOOL_TEXT_MAX];
    uint64_t now_ns = bl_now_ns();
    tool_format_progress(state, line, sizeof line);
    eta_append(follow, state, line, sizeof line);
    if (follow->last_event[0] != '\0') {
        size_t have = strlen(line);
        snprintf(line + have, sizeof line - have, "  %s", follow->last_event);
    }
    if (follow->screen.is_terminal) {
        tool_screen_live(&follow->screen, line);
    } else if (now_ns - follow->plain_ns >= PLAIN_MS * 1000000ull) {
        follow->plain_ns = now_ns;
        tool_screen_line(&follow->screen, line);
    }
}

/* The last words. */
static int end_show(struct follow *follow, const struct tool_state *state)
{
    int code = state->exit_code <= 255 ? (int)state->exit_code : TOOL_COULD_NOT;
    char line[TOOL_TEXT_MAX * 2];
    size_t index;
    json_t *need;
    snprintf(line, sizeof line, "%s: step %lld of %s%s%s%s%s", state->verdict,
             state->step != TOOL_NUMBER_NONE ? (long long)state->step : 0ll, follow->name,
             state->digest[0] != '\0' ? ", digest " : "", state->digest,
             state->disk.dir[0] != '\0' ? ", newest checkpoint " : "", state->disk.dir);
    tool_screen_line(&follow->screen, line);
    json_array_foreach((json_t *)state->needs, index, need)
    {
        tool_screen_line(&follow->screen, json_string_value(need));
    }
    if (code == TOOL_STOPPED) {
        tool_screen_line(&follow->screen, "belay run with the same job resumes it");
    }
    if (follow->args->given & TOOL_OPT_JSON) {
        json_t *end = json_pack(
            "{s:i,s:s,s:I,s:s,s:i,s:s,s:s}", "schema", 1, "verdict", state->verdict, "step",
            (json_int_t)(state->step != TOOL_NUMBER_NONE ? state->step : 0), "digest",
            state->digest, "exit_code", code, "run", follow->run, "name", follow->name);
        BL_ASSERT(end != NULL);
        const json_t *disk = json_object_get(state->json, "newest_disk");
        const json_t *needs = json_object_get(state->json, "needs");
        BL_ASSERT(json_object_set(end, "checkpoint", disk ? (json_t *)disk : json_null()) == 0);
        BL_ASSERT(json_object_set(end, "needs", needs ? (json_t *)needs : json_null()) == 0);
        char *text = json_dumps(end, JSON_COMPACT | JSON_PRESERVE_ORDER);
        json_decref(end);
        BL_ASSERT(text != NULL);
        puts(text);
        free(text);
    }
    return code;
}

static void away(struct follow *follow, const struct bl_errmsg *msg)
{
    char line[TOOL_TEXT_MAX * 2];
    tool_link_close(follow->link);
    follow->unknown_ns = 0;
    if (!follow->is_away) {
        snprintf(line, sizeof line,
                 "the daemon is away (%s); the ranks train on, and it is waited for", msg->text);
        tool_screen_line(&follow->screen, line);
        follow->is_away = true;
    }
}

/* The daemon answers, but knows no such run. -1: wait; else an exit code. */
static int unknown(struct follow *follow, const char *text)
{
    uint64_t now_ns = bl_now_ns();
    if (follow->unknown_ns == 0) {
        follow->unknown_ns = now_ns;
    }
    if (now_ns - follow->unknown_ns < UNKNOWN_MS * 1000000ull) {
        return -1;
    }
    tool_screen_clear(&follow->screen);
    tool_say(follow->command, "the daemon no longer knows run %s: %s", follow->run, text);
    return TOOL_COULD_NOT;
}

/* One look. -1: go on; else the exit code. */
static int look(struct follow *follow)
{
    struct bl_errmsg msg = {{0}};
    struct tool_state state;
    int rc = tool_state_ask(&state, follow->link, follow->args->socket, follow->name, &msg);
    if (rc != 0 && !follow->link->is_open) {
        away(follow, &msg);
        return -1;
    }
    if (rc != 0) {
        return unknown(follow, msg.text);
    }
    if (follow->is_away) {
        tool_screen_line(&follow->screen, "the daemon is back");
        follow->is_away = false;
    }
    if (strcmp(state.run, follow->run) != 0) {
        tool_state_close(&state);
        return unknown(follow, "it has none of this name");
    }
    follow->unknown_ns = 0;
    rc = events_show(follow, &msg);
    int code = -1;
    if (state.exit_code != TOOL_NUMBER_NONE) {
        code = end_show(follow, &state);
    } else if (rc != 0) {
        away(follow, &msg);
    } else {
        progress_show(follow, &state);
    }
    tool_state_close(&state);
    return code;
}

static int detached(struct follow *follow)
{
    tool_screen_clear(&follow->screen);
    fprintf(stderr,
            "No longer watching: the run goes on.\n"
            "  how it stands:  belay status --socket %s\n"
            "  stop it:        belay stop --socket %s\n",
            follow->args->socket, follow->args->socket);
    return TOOL_DETACHED;
}

int tool_follow(const struct tool_command *command, const struct tool_args *args,
                struct tool_link *link, const char *run, const char *name,
                const struct tool_events_at *at)
{
    struct follow follow = {
        .command = command, .args = args, .link = link, .run = run, .name = name, .at = *at};
    tool_screen_init(&follow.screen, (args->given & TOOL_OPT_JSON) ? stderr : stdout);
    follow.plain_ns = bl_now_ns();
    tool_signals_catch();
    for (;;) {
        int code = look(&follow);
        if (code >= 0) {
            return code;
        }
        if (tool_signal == 0) {
            nanosleep(&(struct timespec){0, LOOK_MS * 1000000L}, NULL);
        }
        if (tool_signal != 0) {
            return detached(&follow);
        }
    }
}
