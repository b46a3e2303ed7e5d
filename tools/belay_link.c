/* SPDX-License-Identifier: Apache-2.0 */
/* A connection to belayd. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/json.h"
#include "tools/belay.h"

int tool_link_open(struct tool_link *ret, const char *path, struct bl_errmsg *msg)
{
    memset(ret, 0, sizeof *ret);
    int fd = wire_unix_connect(path, msg);
    if (fd < 0) {
        return fd;
    }
    int rc = wire_unix_peer_check(fd, msg);
    if (rc != 0) {
        close(fd);
        return rc;
    }
    wire_sock_init(&ret->sock, fd);
    ret->is_open = true;
    struct wire_hello hello = {.version = WIRE_FRAME_VERSION, .role = WIRE_ROLE_TOOL};
    snprintf(hello.build, sizeof hello.build, "%s", BELAY_VERSION);
    hello.pid = (uint32_t)getpid();
    rc = wire_sock_send(&ret->sock, WIRE_TYPE_HELLO, &hello, 0, 0, NULL, 0, TOOL_ANSWER_MS, msg);
    struct wire_hello answer;
    if (rc == 0) {
        rc = wire_sock_expect(&ret->sock, WIRE_TYPE_HELLO, &answer, TOOL_ANSWER_MS, msg);
    }
    if (rc == 0) {
        memcpy(ret->node, answer.node, sizeof ret->node);
        memcpy(ret->build, answer.build, sizeof ret->build);
        if (answer.version != WIRE_FRAME_VERSION) {
            rc = bl_err(msg, BL_EVERSION, "the daemon speaks protocol %u, this program %u",
                        answer.version, WIRE_FRAME_VERSION);
        }
        wire_hello_free(&answer);
    }
    if (rc != 0) {
        tool_link_close(ret);
    }
    return rc;
}

void tool_link_close(struct tool_link *link)
{
    if (link != NULL && link->is_open) {
        wire_sock_close(&link->sock);
        link->is_open = false;
    }
}

void tool_link_id(uint64_t ret[2])
{
    /* 16 bytes never come short; a kernel that is still without entropy is waited for. */
    ssize_t got = getrandom(ret, 2 * sizeof *ret, 0);
    BL_ASSERT(got == (ssize_t)(2 * sizeof *ret));
}

int tool_link_send(struct tool_link *link, const uint64_t id[2], enum wire_verb verb,
                   const json_t *args, struct bl_errmsg *msg)
{
    struct wire_request request = {.id = {id[0], id[1]}, .verb = verb};
    request.args = args != NULL ? bl_json_dump(args) : strdup("{}");
    if (request.args == NULL) {
        return bl_err_code(msg, -ENOMEM, "a request");
    }
    int rc = wire_sock_send(&link->sock, WIRE_TYPE_REQUEST, &request, 0, 0, NULL, 0, TOOL_ANSWER_MS,
                            msg);
    free(request.args);
    return rc;
}

/* Parses what the daemon sent as JSON. The frame's bound is also this text's. */
static int answer_json(struct tool_answer *ret, const char *text, struct bl_errmsg *msg)
{
    if (text == NULL || *text == '\0') {
        return 0;
    }
    int rc = bl_json_parse(text, strlen(text), &ret->json, msg);
    if (rc == 0 && !json_is_object(ret->json)) {
        json_decref(ret->json);
        ret->json = NULL;
        rc = bl_err(msg, BL_EFORMAT, "no object");
    }
    return rc != 0 ? bl_err_in(msg, rc, "the daemon's answer") : 0;
}

int tool_link_wait(struct tool_link *link, const uint64_t id[2], uint32_t timeout_ms,
                   struct tool_answer *ret, struct bl_errmsg *msg)
{
    uint64_t end_ns = bl_now_ns() + (uint64_t)timeout_ms * 1000000;
    memset(ret, 0, sizeof *ret);
    for (;;) {
        uint64_t now_ns = bl_now_ns();
        uint32_t left_ms = now_ns < end_ns ? (uint32_t)((end_ns - now_ns) / 1000000) : 0;
        struct wire_frame frame;
        int rc = wire_sock_recv(&link->sock, &frame, left_ms, msg);
        if (rc != 0) {
            return rc;
        }
        if (frame.type != WIRE_TYPE_ANSWER) {
            return bl_err(msg, BL_EPROTO, "%s came instead of an answer",
                          wire_type_name(frame.type));
        }
        struct wire_answer answer;
        rc = wire_answer_decode(&answer, frame.payload, frame.payload_bytes, msg);
        if (rc != 0) {
            return rc;
        }
        if (answer.id[0] != id[0] || answer.id[1] != id[1]) {
            wire_answer_free(&answer);
            continue;
        }
        ret->rc = answer.rc;
        ret->more = answer.more != 0;
        memcpy(ret->text, answer.text, sizeof ret->text);
        rc = answer_json(ret, answer.json, msg);
        wire_answer_free(&answer);
        return rc;
    }
}

void tool_answer_close(struct tool_answer *answer)
{
    json_decref(answer->json);
    answer->json = NULL;
}

int tool_link_ask(struct tool_link *link, const char *path, enum wire_verb verb, const json_t *args,
                  json_t **ret, struct bl_errmsg *msg)
{
    uint64_t id[2];
    struct tool_answer answer;
    int rc = link->is_open ? 0 : tool_link_open(link, path, msg);
    if (rc != 0) {
        return rc;
    }
    tool_link_id(id);
    rc = tool_link_send(link, id, verb, args, msg);
    if (rc == 0) {
        rc = tool_link_wait(link, id, verb == WIRE_VERB_SUBMIT ? TOOL_SUBMIT_MS : TOOL_ANSWER_MS,
                            &answer, msg);
    }
    if (rc != 0) {
        tool_link_close(link);
        return rc;
    }
    if (answer.rc != 0) {
        rc = bl_err(msg, answer.rc < 0 ? answer.rc : BL_EPROTO, "%s",
                    answer.text[0] != '\0' ? answer.text : bl_strerror(answer.rc));
    } else if (ret != NULL && answer.json == NULL) {
        rc = bl_err(msg, BL_EFORMAT, "the daemon's answer is empty");
    } else if (ret != NULL) {
        *ret = json_incref(answer.json);
    }
    tool_answer_close(&answer);
    return rc;
}

bool tool_link_is_away(int code)
{
    switch (code) {
    case BL_EPEER:
    case BL_EDEADLINE:
    case -ENOENT:
    case -ECONNREFUSED:
    case -ECONNRESET:
    case -EPIPE:
    case -EAGAIN: /* the listener's queue is full */
        return true;
    default:
        return false;
    }
}

int tool_unreachable(const struct tool_command *command, const char *path,
                     const struct bl_errmsg *msg)
{
    tool_say(command, "no daemon answers: %s", msg->text);
    fprintf(stderr,
            "Start one:        belayd --socket %s   (or systemctl start belayd)\n"
            "or name another:  --socket PATH\n",
            path);
    return TOOL_COULD_NOT;
}

int tool_refused(const struct tool_command *command, const char *path, int code,
                 const struct bl_errmsg *msg)
{
    if (tool_link_is_away(code) && access(path, F_OK) != 0) {
        return tool_unreachable(command, path, msg);
    }
    tool_say(command, "%s", msg->text);
    return TOOL_COULD_NOT;
}

json_t *tool_job_args(const char *job)
{
    json_t *args = json_object();
    if (args != NULL && job != NULL && json_object_set_new(args, "job", json_string(job)) != 0) {
        json_decref(args);
        args = NULL;
    }
    BL_ASSERT(args != NULL);
    return args;
}
