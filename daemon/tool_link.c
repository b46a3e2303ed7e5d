/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Requests of `belay`. On the head they are answered here; a member passes them on. A request that
 * changes something has its answer kept, so that a repeat (after a broken connection) gets the
 * same. Followers (events, watch) get answers with `more` until their connection goes.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/log.h"
#include "daemon/status.h"
#include "daemon/tools.h"

static void on_freed(uv_handle_t *handle)
{
    free(handle);
}

/* ---- answers ---- */

void tools_answer(struct conn *conn, const uint64_t id[2], int rc, const char *text,
                  const char *json, uint32_t more)
{
    struct wire_answer answer = {
        .id = {id[0], id[1]}, .rc = rc, .json = (char *)(uintptr_t)json, .more = more};

    snprintf(answer.text, sizeof(answer.text), "%s", text ? text : "");
    BL_IGNORE(conn_send(conn, WIRE_TYPE_ANSWER, &answer, 0, NULL, 0) != 0,
              "a tool that is gone needs no answer");
}

static struct stored *stored_find(struct tools *tools, const uint64_t id[2])
{
    for (uint32_t i = 0; i < TOOLS_STORED_MAX; i++) {
        struct stored *stored = &tools->stored[i];

        if (stored->text && stored->id[0] == id[0] && stored->id[1] == id[1]) {
            return stored;
        }
    }
    return NULL;
}

static void stored_add(struct tools *tools, const uint64_t id[2], int rc, const char *text,
                       const char *json)
{
    struct stored *stored = &tools->stored[tools->stored_next++ % TOOLS_STORED_MAX];

    free(stored->text);
    free(stored->json);
    stored->id[0] = id[0];
    stored->id[1] = id[1];
    stored->rc = rc;
    stored->text = strdup(text ? text : "");
    stored->json = json ? strdup(json) : NULL;
}

void tool_link_reply(struct daemon *daemon, struct conn *conn, const uint64_t id[2], int rc,
                     const char *text, const char *json)
{
    stored_add(daemon->tools, id, rc, text, json);
    if (conn) {
        tools_answer(conn, id, rc, text, json, 0);
    }
}

/* ---- followers ---- */

/* {"events":[..],"next":n,"log":name} of those after `since`; *ret_since moves on. Owned. Numbers
 * count within one daemon's log: its name says when it is another's. */
static char *events_json(const struct daemon *daemon, uint64_t *ret_since)
{
    const struct events *events = daemon->events;
    json_t *array = json_array();
    uint64_t newest = events_newest(events);

    while (*ret_since < newest) {
        const char *line = events_line(events, ++*ret_since);
        json_t *one = line ? json_loads(line, 0, NULL) : NULL;

        if (one) {
            json_array_append_new(array, one);
        }
    }
    json_t *all = json_pack("{so sI ss}", "events", array, "next", (json_int_t)*ret_since, "log",
                            daemon->config.name);
    char *text = all ? bl_json_dump(all) : NULL;

    json_decref(all);
    return text;
}

static void events_tell(struct tools *tools, struct follower *follower)
{
    if (follower->since < events_newest(tools->daemon->events)) {
        char *json = events_json(tools->daemon, &follower->since);

        tools_answer(follower->conn, follower->id, 0, "", json, 1);
        free(json);
    }
}

static void status_tell(struct tools *tools, struct follower *follower)
{
    char *json = status_json(tools->daemon, NULL);

    tools_answer(follower->conn, follower->id, json ? 0 : -ENOMEM, "", json, 1);
    free(json);
}

static void on_notify(uv_timer_t *timer)
{
    struct tools *tools = timer->data;

    tools_wait_look(tools);
    for (uint32_t i = 0; i < tools->follower_count; i++) {
        if (conn_is_behind(tools->followers[i].conn)) { /* stopped: hears it when it reads again */
            uv_timer_start(timer, on_notify, TOOLS_BEHIND_MS, 0);
            continue;
        }
        if (tools->followers[i].verb == WIRE_VERB_EVENTS) {
            events_tell(tools, &tools->followers[i]);
        } else {
            status_tell(tools, &tools->followers[i]);
        }
    }
}

void tool_link_notify(struct daemon *daemon)
{
    struct tools *tools = daemon->tools;

    if (tools && tools->follower_count + tools->waiting_count > 0 &&
        (!uv_is_active((uv_handle_t *)tools->timer) ||
         uv_timer_get_due_in(tools->timer) > TOOLS_NOTIFY_MS)) {
        uv_timer_start(tools->timer, on_notify, TOOLS_NOTIFY_MS, 0);
    }
}

static void follow(struct tools *tools, struct conn *conn, const struct wire_request *request,
                   uint64_t since)
{
    if (tools->follower_count == TOOLS_FOLLOWERS_MAX) {
        tools_answer(conn, request->id, BL_ELIMIT, "too many followers", NULL, 0);
        return;
    }
    tools->followers[tools->follower_count++] =
        (struct follower){conn, {request->id[0], request->id[1]}, request->verb, since};
    on_notify(tools->timer);
}

/* ---- requests ---- */

json_t *tools_args(const struct wire_request *request)
{
    json_t *args = NULL;
    const char *text = request->args ? request->args : "{}";

    return bl_json_parse(text, strlen(text), &args, NULL) == 0 ? args : json_object();
}

static void on_events(struct tools *tools, struct conn *conn, const struct wire_request *request)
{
    const struct daemon *daemon = tools->daemon;
    json_t *args = tools_args(request);
    uint64_t since = (uint64_t)json_integer_value(json_object_get(args, "since"));
    const char *log = json_string_value(json_object_get(args, "log"));
    int is_follow = json_is_true(json_object_get(args, "follow"));

    /* A number of another daemon's log, or of one that was thrown away, says nothing here. */
    if (log && (strcmp(log, daemon->config.name) != 0 || since > events_newest(daemon->events))) {
        since = 0;
    }
    json_decref(args);
    if (is_follow) {
        follow(tools, conn, request, since);
        return;
    }
    char *json = events_json(daemon, &since);

    tools_answer(conn, request->id, json ? 0 : -ENOMEM, "", json, 0);
    free(json);
}

/* The run that a request names, or the only one. */
static struct run *request_run(struct daemon *daemon, const struct wire_request *request,
                               struct bl_errmsg *msg)
{
    json_t *args = tools_args(request);
    const char *name = json_string_value(json_object_get(args, "job"));
    struct run *run = NULL;

    if (name) {
        run = run_find_name(daemon, name);
        if (!run) {
            bl_err(msg, -ENOENT, "no job called %s runs", name);
        }
    } else if (daemon->run_count == 1) {
        run = daemon->runs[0];
    } else {
        bl_err(msg, -ENOENT,
               daemon->run_count == 0 ? "no job runs" : "several jobs run: name one with --job");
    }
    if (run && !run->leader) {
        run = NULL;
        bl_err(msg, -ENOENT, "the job is led by no daemon at the moment");
    }
    json_decref(args);
    return run;
}

static void on_order(struct tools *tools, struct conn *conn, const struct wire_request *request,
                     enum core_request order, const char *verb)
{
    struct bl_errmsg msg = {{0}};
    struct run *run = request_run(tools->daemon, request, &msg);

    if (!run && order == CORE_REQUEST_STOP && tools_wait_stopped(tools, conn, request)) {
        return;
    }
    if (!run) {
        tool_link_reply(tools->daemon, conn, request->id, -ENOENT, msg.text, NULL);
        return;
    }
    event(tools->daemon->events, EVENT_REQUEST, "job=%s verb=%s", run->name, verb);
    int is_slow = order == CORE_REQUEST_SAVE || order == CORE_REQUEST_STOP;

    if (is_slow) {
        tools_wait_add(tools, conn, request, run);
    }
    int rc = core_leader_on_request(run->leader, order, daemon_now_ms());

    if (rc == -EALREADY && order == CORE_REQUEST_STOP) {
        rc = 0; /* it is on its way out: the answer comes when it is there */
    }
    if (rc != 0 || !is_slow) {
        tools_wait_forget(tools, request->id);
        tool_link_reply(tools->daemon, conn, request->id, rc,
                        rc == -EALREADY ? "the run is over already" : bl_strerror(rc),
                        rc ? NULL : "{}");
    }
    run_pump(run);
}

static void request_run_verb(struct tools *tools, struct conn *conn,
                             const struct wire_request *request)
{
    struct daemon *daemon = tools->daemon;
    json_t *json_args;
    char *json;

    switch (request->verb) {
    case WIRE_VERB_SUBMIT:
        submit_request(daemon, request->args ? request->args : "{}", conn, request->id);
        break;
    case WIRE_VERB_STATUS:
        json_args = tools_args(request);
        json = status_json(daemon, json_string_value(json_object_get(json_args, "job")));
        json_decref(json_args);
        tools_answer(conn, request->id, json ? 0 : -ENOMEM, "", json, 0);
        free(json);
        break;
    case WIRE_VERB_WATCH:
        follow(tools, conn, request, 0);
        break;
    case WIRE_VERB_EVENTS:
        on_events(tools, conn, request);
        break;
    case WIRE_VERB_SAVE:
        on_order(tools, conn, request, CORE_REQUEST_SAVE, "save");
        break;
    case WIRE_VERB_STOP:
        on_order(tools, conn, request, CORE_REQUEST_STOP, "stop");
        break;
    case WIRE_VERB_PROMOTE: /* it says that it is the head already */
        promote_request(daemon, conn, request->id);
        break;
    case WIRE_VERB_RECOVER: {
        json_t *args = tools_args(request);
        int abandon = json_is_true(json_object_get(args, "abandon"));

        json_decref(args);
        on_order(tools, conn, request, abandon ? CORE_REQUEST_ABANDON : CORE_REQUEST_RESUME,
                 "recover");
        break;
    }
    default:
        tools_answer(conn, request->id, BL_ENOTBUILT, "not built into this version", NULL, 0);
        break;
    }
}

/* A member's: status and events of its own when there is no head; all else goes up. */
static void request_pass(struct tools *tools, struct conn *conn, const struct wire_request *request)
{
    struct conn *head = control_head(tools->daemon);

    if (request->verb == WIRE_VERB_PROMOTE) {
        promote_request(tools->daemon, conn, request->id);
    } else if (head && tools->passed_count < TOOLS_PASSED_MAX) {
        tools->passed[tools->passed_count++] =
            (struct passed){conn, {request->id[0], request->id[1]}};
        BL_IGNORE(conn_send(head, WIRE_TYPE_REQUEST, request, 0, NULL, 0) != 0,
                  "told when the head's connection closes");
    } else if (request->verb == WIRE_VERB_STATUS || request->verb == WIRE_VERB_EVENTS ||
               request->verb == WIRE_VERB_WATCH) {
        request_run_verb(tools, conn, request);
    } else {
        tools_answer(conn, request->id, BL_EPEER,
                     "the head's daemon is away: try again, or belay promote", NULL, 0);
    }
}

int tool_link_request(struct daemon *daemon, struct conn *conn, const struct wire_frame *frame)
{
    struct tools *tools = daemon->tools;
    struct wire_request request;
    int rc = wire_request_decode(&request, frame->payload, frame->payload_bytes, NULL);

    if (rc != 0) {
        return rc;
    }
    struct stored *stored = stored_find(tools, request.id);

    if (stored) {
        tools_answer(conn, request.id, stored->rc, stored->text, stored->json, 0);
    } else if (daemon->is_head) {
        request_run_verb(tools, conn, &request);
    } else {
        request_pass(tools, conn, &request);
    }
    wire_request_free(&request);
    return 0;
}

int tool_link_answer(struct daemon *daemon, const struct wire_frame *frame)
{
    struct tools *tools = daemon->tools;
    struct wire_answer answer;
    int rc = wire_answer_decode(&answer, frame->payload, frame->payload_bytes, NULL);

    if (rc != 0) {
        return rc;
    }
    for (uint32_t i = 0; i < tools->passed_count; i++) {
        struct passed *passed = &tools->passed[i];

        if (passed->id[0] == answer.id[0] && passed->id[1] == answer.id[1]) {
            tools_answer(passed->conn, answer.id, answer.rc, answer.text, answer.json, answer.more);
            if (!answer.more) {
                *passed = tools->passed[--tools->passed_count];
            }
            break;
        }
    }
    wire_answer_free(&answer);
    return 0;
}

void tool_link_head_lost(struct daemon *daemon)
{
    struct tools *tools = daemon->tools;

    while (tools && tools->passed_count > 0) {
        struct passed passed = tools->passed[--tools->passed_count];

        tools_answer(passed.conn, passed.id, BL_EPEER,
                     "the connection to the head's daemon is gone", NULL, 0);
    }
}

void tool_link_gone(struct daemon *daemon, struct conn *conn)
{
    struct tools *tools = daemon->tools;

    for (uint32_t i = tools->follower_count; i > 0; i--) {
        if (tools->followers[i - 1].conn == conn) {
            tools->followers[i - 1] = tools->followers[--tools->follower_count];
        }
    }
    for (uint32_t i = tools->passed_count; i > 0; i--) {
        if (tools->passed[i - 1].conn == conn) {
            tools->passed[i - 1] = tools->passed[--tools->passed_count];
        }
    }
    tools_wait_gone(tools, conn);
    submit_gone(daemon, conn);
}

/* ---- connections ---- */

static void on_message(struct conn *conn, void *arg, const struct wire_frame *frame)
{
    struct daemon *daemon = arg;
    int rc = frame->type == WIRE_TYPE_REQUEST ? tool_link_request(daemon, conn, frame) : BL_EPROTO;

    if (rc != 0) {
        tool_link_gone(daemon, conn);
        conn_close(conn);
    }
}

static void on_closed(struct conn *conn, void *arg, const char *text)
{
    (void)text;
    tool_link_gone(arg, conn);
}

static const struct conn_ops tool_ops = {on_message, on_closed};

void tool_link_take(struct daemon *daemon, struct conn *conn)
{
    struct wire_hello hello = {.version = WIRE_FRAME_VERSION,
                               .role = WIRE_ROLE_DAEMON,
                               .incarnation = daemon->incarnation,
                               .head_epoch = daemon->head_epoch};

    snprintf(hello.build, sizeof(hello.build), "%s", BELAY_VERSION);
    snprintf(hello.node, sizeof(hello.node), "%s", daemon->config.name);
    conn_arg_set(conn, &tool_ops, daemon);
    BL_IGNORE(conn_send(conn, WIRE_TYPE_HELLO, &hello, 0, NULL, 0) != 0,
              "a tool that is gone needs no hello");
}

static void on_event(void *arg)
{
    tool_link_notify(arg);
}

int tools_open(struct daemon *daemon, struct bl_errmsg *msg)
{
    struct tools *tools = calloc(1, sizeof(*tools));

    if (!tools || !(tools->timer = calloc(1, sizeof(*tools->timer)))) {
        free(tools);
        return bl_err_code(msg, -ENOMEM, "tools");
    }
    tools->daemon = daemon;
    uv_timer_init(daemon->loop, tools->timer);
    tools->timer->data = tools;
    daemon->tools = tools;
    events_listen(daemon->events, on_event, daemon);
    return 0;
}

void tools_close(struct daemon *daemon)
{
    struct tools *tools = daemon->tools;

    if (!tools) {
        return;
    }
    events_listen(daemon->events, NULL, NULL);
    for (uint32_t i = 0; i < TOOLS_STORED_MAX; i++) {
        free(tools->stored[i].text);
        free(tools->stored[i].json);
    }
    uv_close((uv_handle_t *)tools->timer, on_freed);
    free(tools);
    daemon->tools = NULL;
}
