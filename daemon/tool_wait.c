/* SPDX-License-Identifier: Apache-2.0 */
/* Saves and stops: requests that are answered when what was asked for is done. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "daemon/status.h"
#include "daemon/tools.h"

static void wait_answer(struct tools *tools, uint32_t index, int rc, const char *text,
                        const char *key, uint64_t step)
{
    struct waiting waiting = tools->waiting[index];
    char json[64];

    tools->waiting[index] = tools->waiting[--tools->waiting_count];
    snprintf(json, sizeof(json), "{\"%s\":%llu}", key, (unsigned long long)step);
    tool_link_reply(tools->daemon, waiting.conn, waiting.id, rc, text, rc ? NULL : json);
}

/* The run is over: what does that mean to who waits? */
static void wait_ended(struct tools *tools, uint32_t index, const json_t *ended)
{
    const struct waiting *waiting = &tools->waiting[index];
    const char *verdict = json_string_value(json_object_get(ended, "verdict"));
    uint64_t step = (uint64_t)json_integer_value(json_object_get(ended, "step"));
    uint64_t committed =
        (uint64_t)json_integer_value(json_object_get(json_object_get(ended, "saves"), "committed"));
    const char *why = json_string_value(json_object_get(ended, "text"));
    int is_safe = verdict && (strcmp(verdict, "done") == 0 || strcmp(verdict, "stopped") == 0);

    if (waiting->verb == WIRE_VERB_STOP) {
        wait_answer(tools, index, is_safe ? 0 : -EIO,
                    is_safe         ? ""
                    : why && why[0] ? why
                                    : "the last save failed: belay events says why",
                    "step", step);
    } else if (committed > waiting->committed) {
        wait_answer(tools, index, 0, "", "committed", step);
    } else {
        wait_answer(tools, index, BL_ESTOPPED, "the run ended before the save was committed",
                    "committed", 0);
    }
}

/* Does no root answer? */
static int wait_roots_stuck(const struct core_status *status)
{
    uint32_t stuck = 0;

    for (uint32_t i = 0; i < status->root_count; i++) {
        stuck += status->roots[i].stuck;
    }
    return stuck > 0 && stuck == status->root_count;
}

void tools_wait_look(struct tools *tools)
{
    for (uint32_t i = tools->waiting_count; i > 0; i--) {
        const struct waiting *waiting = &tools->waiting[i - 1];
        const struct run *run = run_find(tools->daemon, waiting->run);
        struct core_status status;

        if (!run) {
            wait_ended(tools, i - 1, status_ended(tools->daemon, waiting->run));
        } else if (waiting->verb == WIRE_VERB_SAVE && run->leader) {
            core_leader_status(run->leader, &status, daemon_now_ms());
            if (status.saves_committed > waiting->committed && !status.save_asked) {
                wait_answer(tools, i - 1, 0, "", "committed", status.disk_step);
            } else if (status.saves_failed > waiting->failed && !status.save_asked) {
                char text[WIRE_TEXT_MAX + 64];

                snprintf(text, sizeof(text), "the save failed, again and again: %s",
                         status.save_failed_text);
                wait_answer(tools, i - 1, -EIO, text, "committed", 0);
            } else if (status.save_asked && status.save_count == 0 && wait_roots_stuck(&status)) {
                wait_answer(tools, i - 1, -EIO,
                            "no root answers: see to its disk or mount; it is saved when one does",
                            "committed", 0);
            }
            core_status_close(&status);
        }
    }
}

void tools_wait_add(struct tools *tools, struct conn *conn, const struct wire_request *request,
                    const struct run *run)
{
    struct core_status status;

    if (tools->waiting_count == TOOLS_FOLLOWERS_MAX) {
        tools_answer(conn, request->id, BL_ELIMIT, "too many requests under way", NULL, 0);
        return;
    }
    core_leader_status(run->leader, &status, daemon_now_ms());
    tools->waiting[tools->waiting_count++] =
        (struct waiting){.conn = conn,
                         .id = {request->id[0], request->id[1]},
                         .run = run->id,
                         .verb = request->verb,
                         .committed = status.saves_committed,
                         .failed = status.saves_failed};
    core_status_close(&status);
}

void tools_wait_forget(struct tools *tools, const uint64_t id[2])
{
    for (uint32_t i = tools->waiting_count; i > 0; i--) {
        if (tools->waiting[i - 1].id[0] == id[0] && tools->waiting[i - 1].id[1] == id[1]) {
            tools->waiting[i - 1] = tools->waiting[--tools->waiting_count];
        }
    }
}

/* A stop that is asked again after the run has stopped gets the answer that the first one missed.
 */
int tools_wait_stopped(struct tools *tools, struct conn *conn, const struct wire_request *request)
{
    json_t *args = tools_args(request);
    const char *name = json_string_value(json_object_get(args, "job"));
    json_t *ended =
        name && !run_find_name(tools->daemon, name) ? status_ended_name(tools->daemon, name) : NULL;

    json_decref(args);
    if (!ended || tools->waiting_count == TOOLS_FOLLOWERS_MAX) {
        return 0;
    }
    tools->waiting[tools->waiting_count++] = (struct waiting){
        .conn = conn, .id = {request->id[0], request->id[1]}, .verb = WIRE_VERB_STOP};
    wait_ended(tools, tools->waiting_count - 1, ended);
    return 1;
}

void tools_wait_gone(struct tools *tools, const struct conn *conn)
{
    for (uint32_t i = tools->waiting_count; i > 0; i--) {
        if (tools->waiting[i - 1].conn == conn) {
            tools->waiting[i - 1] = tools->waiting[--tools->waiting_count];
        }
    }
}
