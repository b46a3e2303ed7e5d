/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Between daemons: the head listens, members connect and connect again for ever. Reports go up,
 * directives come down; requests of `belay` on a member go up too, their answers down.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "daemon/daemon.h"
#include "daemon/replica.h"
#include "wire/sock.h"

#define CONTROL_RETRY_MS 200 /* between attempts to reach the head */

struct peer {
    struct control *control;
    struct conn *conn;
    char node[WIRE_NODE_MAX]; /* "" before its hello */
    char addr[WIRE_ADDR_MAX];
};

struct control {
    struct daemon *daemon;
    int listen_fd;
    uv_poll_t *listener;
    uv_timer_t *retry;
    struct peer *peers[DAEMON_PEERS_MAX]; /* those that connected to us */
    uint32_t peer_count;
    struct conn *head; /* our connection to the head, hello exchanged or not */
    int head_greeted, head_told_away;
    uv_poll_t *connecting;
    int connecting_fd;
};

static void on_freed(uv_handle_t *handle)
{
    free(handle);
}

static void hello_send(struct daemon *daemon, struct conn *conn)
{
    struct wire_hello hello = {.version = WIRE_FRAME_VERSION,
                               .role = WIRE_ROLE_DAEMON,
                               .incarnation = daemon->incarnation,
                               .head_epoch = daemon->head_epoch,
                               .pid = (uint32_t)getpid()};

    snprintf(hello.build, sizeof(hello.build), "%s", BELAY_VERSION);
    snprintf(hello.node, sizeof(hello.node), "%s", daemon->config.name);
    snprintf(hello.addr, sizeof(hello.addr), "%s", daemon->listen_addr);
    BL_IGNORE(conn_send(conn, WIRE_TYPE_HELLO, &hello, 0, NULL, 0) != 0,
              "a broken connection is told by its closing");
}

/* ---- the head's side ---- */

static void peer_free(struct peer *peer)
{
    struct control *control = peer->control;

    for (uint32_t i = 0; i < control->peer_count; i++) {
        if (control->peers[i] == peer) {
            control->peers[i] = control->peers[--control->peer_count];
        }
    }
    free(peer);
}

static struct peer *peer_find(struct control *control, const char *node)
{
    for (uint32_t i = 0; i < control->peer_count; i++) {
        if (strcmp(control->peers[i]->node, node) == 0) {
            return control->peers[i];
        }
    }
    return NULL;
}

static void nodes_tell(struct daemon *daemon, const char *node, int up)
{
    for (uint32_t i = 0; i < daemon->run_count; i++) {
        struct run *run = daemon->runs[i];

        if (run->leader && up) {
            core_leader_on_node_up(run->leader, node, daemon_now_ms());
        } else if (run->leader) {
            core_leader_on_node_down(run->leader, node, daemon_now_ms());
        }
    }
    for (uint32_t i = daemon->run_count; i > 0; i--) {
        run_pump(daemon->runs[i - 1]);
    }
}

static int peer_hello(struct peer *peer, const struct wire_frame *frame)
{
    struct daemon *daemon = peer->control->daemon;
    struct wire_hello hello;
    int rc = wire_hello_decode(&hello, frame->payload, frame->payload_bytes, NULL);

    if (rc != 0) {
        return rc;
    }
    if (hello.role != WIRE_ROLE_DAEMON || hello.node[0] == '\0' || peer->node[0] != '\0' ||
        strcmp(hello.node, daemon->config.name) == 0) {
        bl_log(BL_LOG_ERROR, "control", "refused: a peer that calls itself '%s'", hello.node);
        rc = BL_EPROTO;
    } else if (hello.head_epoch > daemon->head_epoch) {
        hello_send(daemon, peer->conn); /* so that it knows with whom it speaks */
        BL_IGNORE(daemon->is_head && promote_depose(daemon, hello.head_epoch, hello.addr) != 0,
                  "then it is told again by the next one");
        rc = BL_ECONFLICT;
    } else if (!daemon->is_head) {
        hello_send(daemon, peer->conn); /* a promoted head that calls, or a wrong --head */
        rc = -ECONNREFUSED;
    } else {
        struct peer *old = peer_find(peer->control, hello.node);

        if (old && old != peer) { /* it came back before its old connection was seen to close */
            conn_close(old->conn);
            peer_free(old);
        }
        conn_hello_came(peer->conn);
        snprintf(peer->node, sizeof(peer->node), "%s", hello.node);
        snprintf(peer->addr, sizeof(peer->addr), "%s", hello.addr);
        hello_send(daemon, peer->conn);
        event(daemon->events, EVENT_NODE_CONNECTED, "node=%s addr=%s", peer->node, peer->addr);
        replica_node_up(daemon, peer->node, peer->conn);
        nodes_tell(daemon, peer->node, 1);
    }
    wire_hello_free(&hello);
    return rc;
}

static int peer_report(struct peer *peer, const struct wire_frame *frame)
{
    struct wire_report report;
    int rc = wire_report_decode(&report, frame->payload, frame->payload_bytes, NULL);

    if (rc != 0) {
        return rc;
    }
    struct run *run = run_find(peer->control->daemon, report.run);

    if (run && run->leader && strcmp(report.node, peer->node) == 0) {
        core_leader_on_report(run->leader, &report, daemon_now_ms());
        run_pump(run);
    }
    wire_report_close(&report);
    return 0;
}

static void on_peer_message(struct conn *conn, void *arg, const struct wire_frame *frame)
{
    struct peer *peer = arg;
    struct daemon *daemon = peer->control->daemon;
    int rc;

    if (frame->type == WIRE_TYPE_HELLO) {
        rc = peer_hello(peer, frame);
    } else if (peer->node[0] == '\0') {
        rc = BL_EPROTO;
    } else if (frame->type == WIRE_TYPE_REPORT) {
        rc = peer_report(peer, frame);
    } else if (frame->type == WIRE_TYPE_REQUEST) {
        rc = tool_link_request(daemon, conn, frame);
    } else if (frame->type == WIRE_TYPE_STORE_ACK) {
        rc = replica_on_ack(daemon, peer->node, frame);
    } else {
        rc = frame->flags & WIRE_FRAME_SKIP ? 0 : BL_EPROTO;
    }
    if (rc != 0) {
        char node[WIRE_NODE_MAX];

        snprintf(node, sizeof(node), "%s", peer->node);
        /* These are told elsewhere, or strangers' nonsense. */
        if (rc != BL_ECONFLICT && rc != -ECONNREFUSED && node[0]) {
            bl_log(BL_LOG_WARN, "control", "%s of %s: %s", wire_type_name(frame->type), node,
                   bl_strerror(rc));
        }
        tool_link_gone(daemon, conn);
        conn_close(conn);
        peer_free(peer);
        if (node[0]) {
            replica_node_down(daemon, node);
            nodes_tell(daemon, node, 0);
        }
    }
}

static void on_peer_closed(struct conn *conn, void *arg, const char *text)
{
    struct peer *peer = arg;
    struct daemon *daemon = peer->control->daemon;
    char node[WIRE_NODE_MAX];

    snprintf(node, sizeof(node), "%s", peer->node);
    if (node[0]) { /* strangers may come by the thousand */
        bl_log(BL_LOG_INFO, "control", "connection of %s: %s", node, text);
    }
    tool_link_gone(daemon, conn);
    peer_free(peer);
    if (node[0]) {
        replica_node_down(daemon, node);
        nodes_tell(daemon, node, 0);
    }
}

static const struct conn_ops peer_ops = {on_peer_message, on_peer_closed};

/* A connection that has not said hello makes room for a new one. */
static void stranger_drop(struct control *control)
{
    for (uint32_t i = 0; i < control->peer_count; i++) {
        if (control->peers[i]->node[0] == '\0') {
            conn_close(control->peers[i]->conn);
            peer_free(control->peers[i]);
            return;
        }
    }
}

static void on_accept(uv_poll_t *poll, int status, int events)
{
    struct control *control = poll->data;
    int fd;

    (void)events;
    while (status == 0 && (fd = wire_sock_accept(control->listen_fd)) >= 0) {
        struct bl_errmsg msg = {{0}};

        if (wire_tcp_peer_check(fd, &msg) != 0) {
            bl_log(BL_LOG_WARN, "control", "refused: %s", msg.text);
            close(fd);
            continue;
        }
        if (control->peer_count == DAEMON_PEERS_MAX) {
            stranger_drop(control);
        }
        struct peer *peer =
            control->peer_count < DAEMON_PEERS_MAX ? calloc(1, sizeof(*peer)) : NULL;

        if (!peer) {
            close(fd);
            continue;
        }
        peer->control = control;
        peer->conn =
            conn_new(control->daemon->loop, fd, control->daemon->incarnation, &peer_ops, peer);
        if (!peer->conn) {
            free(peer);
            continue;
        }
        conn_hello_wait(peer->conn);
        control->peers[control->peer_count++] = peer;
    }
}

/* ---- a member's side ---- */

static void head_lost(struct control *control, const char *text)
{
    struct daemon *daemon = control->daemon;

    control->head = NULL;
    if (control->head_greeted || !control->head_told_away) {
        event(daemon->events, EVENT_HEAD_AWAY, "head=%s reason=%s", daemon->config.head, text);
        control->head_told_away = 1;
    }
    if (control->head_greeted) {
        control->head_greeted = 0;
        for (uint32_t i = daemon->run_count; i > 0; i--) {
            core_member_on_link_down(daemon->runs[i - 1]->member, daemon_now_ms());
            run_pump(daemon->runs[i - 1]);
        }
    }
    tool_link_head_lost(daemon);
}

void control_directive(struct daemon *daemon, const struct wire_directive *directive)
{
    struct run *run = run_find(daemon, directive->run);
    struct bl_errmsg msg = {{0}};

    if (!run) {
        if (directive->phase == WIRE_PHASE_DONE || !directive->job_json) {
            return;
        }
        if (run_open(daemon, directive->run, directive->job_json, &run, &msg) != 0) {
            bl_log(BL_LOG_ERROR, "control", "the head's job: %s", msg.text);
            return;
        }
        run_remember(run);
        run_begin(run);
    }
    if (directive->job_json && directive->phase != WIRE_PHASE_DONE &&
        run_job_set(run, directive->job_json, &msg) != 0) {
        bl_log(BL_LOG_ERROR, "control", "the head's job: %s", msg.text);
        return;
    }
    if (!run->adopting) { /* else it comes again */
        core_member_on_directive(run->member, directive, daemon_now_ms());
        run_pump(run);
    }
}

static int head_hello(struct control *control, const struct wire_frame *frame)
{
    struct daemon *daemon = control->daemon;
    struct wire_hello hello;
    int rc = wire_hello_decode(&hello, frame->payload, frame->payload_bytes, NULL);

    if (rc != 0) {
        return rc;
    }
    if (hello.head_epoch < daemon->head_epoch) {
        event(daemon->events, EVENT_OLD_HEAD, "head=%s epoch=%llu newest=%llu", daemon->config.head,
              (unsigned long long)hello.head_epoch, (unsigned long long)daemon->head_epoch);
        rc = BL_ECONFLICT;
    } else {
        control->head_greeted = 1;
        control->head_told_away = 0;
        event(daemon->events, EVENT_HEAD_CONNECTED, "head=%s epoch=%llu", daemon->config.head,
              (unsigned long long)hello.head_epoch);
        for (uint32_t i = daemon->run_count; i > 0; i--) {
            if (!daemon->runs[i - 1]->adopting) {
                core_member_on_link_up(daemon->runs[i - 1]->member, daemon_now_ms());
                run_pump(daemon->runs[i - 1]);
            }
        }
    }
    wire_hello_free(&hello);
    return rc;
}

static void on_head_message(struct conn *conn, void *arg, const struct wire_frame *frame)
{
    struct control *control = arg;
    int rc;

    if (frame->type == WIRE_TYPE_HELLO) {
        rc = head_hello(control, frame);
    } else if (frame->type == WIRE_TYPE_DIRECTIVE && control->head_greeted) {
        struct wire_directive directive;

        rc = wire_directive_decode(&directive, frame->payload, frame->payload_bytes, NULL);
        if (rc == 0) {
            control_directive(control->daemon, &directive);
            wire_directive_close(&directive);
        }
    } else if (frame->type == WIRE_TYPE_ANSWER) {
        rc = tool_link_answer(control->daemon, frame);
    } else if (frame->type == WIRE_TYPE_STORE_REPLICA) {
        rc = replica_on_change(control->daemon, conn, frame);
    } else {
        rc = frame->flags & WIRE_FRAME_SKIP ? 0 : BL_EPROTO;
    }
    if (rc != 0) {
        conn_close(conn);
        head_lost(control, bl_strerror(rc));
    }
}

static void on_head_closed(struct conn *conn, void *arg, const char *text)
{
    (void)conn;
    head_lost(arg, text);
}

static const struct conn_ops head_ops = {on_head_message, on_head_closed};

/* ---- a promoted head that calls the old one ---- */

static void on_old_message(struct conn *conn, void *arg, const struct wire_frame *frame)
{
    struct control *control = arg;
    struct wire_hello hello;

    if (frame->type == WIRE_TYPE_HELLO &&
        wire_hello_decode(&hello, frame->payload, frame->payload_bytes, NULL) == 0) {
        if (hello.head_epoch >= control->daemon->head_epoch) {
            uv_timer_stop(control->retry); /* it knows */
        }
        wire_hello_free(&hello);
    }
    conn_close(conn);
    control->head = NULL;
}

static void on_old_closed(struct conn *conn, void *arg, const char *text)
{
    struct control *control = arg;

    (void)conn;
    (void)text;
    control->head = NULL;
}

static const struct conn_ops old_ops = {on_old_message, on_old_closed};

static void on_connecting(uv_poll_t *poll, int status, int events)
{
    struct control *control = poll->data;
    int fd = control->connecting_fd;
    int rc = wire_tcp_connected(fd); /* says more than the status, which libuv makes of POLLERR */
    struct bl_errmsg msg = {{0}};

    if (rc == 0) {
        rc = wire_tcp_peer_check(fd, &msg);
    }

    (void)status;
    (void)events;
    uv_poll_stop(poll);
    uv_close((uv_handle_t *)poll, on_freed);
    control->connecting = NULL;
    if (rc != 0) {
        close(fd);
        if (!control->head_told_away && !control->daemon->is_head) {
            head_lost(control, msg.text[0] ? msg.text : bl_strerror(rc));
        }
        return;
    }
    control->head = conn_new(control->daemon->loop, fd, control->daemon->incarnation,
                             control->daemon->is_head ? &old_ops : &head_ops, control);
    if (control->head) {
        hello_send(control->daemon, control->head);
    }
}

static void on_retry(uv_timer_t *timer)
{
    struct control *control = timer->data;
    struct bl_errmsg msg = {{0}};

    if (control->head || control->connecting) {
        return;
    }
    int fd = wire_tcp_connect_begin(control->daemon->config.head, &msg);

    if (fd < 0) {
        if (!control->head_told_away && !control->daemon->is_head) {
            head_lost(control, msg.text);
        }
        return;
    }
    control->connecting = calloc(1, sizeof(*control->connecting));
    BL_ASSERT(control->connecting != NULL);
    control->connecting_fd = fd;
    uv_poll_init(control->daemon->loop, control->connecting, fd);
    control->connecting->data = control;
    uv_poll_start(control->connecting, UV_WRITABLE, on_connecting);
}

/* ---- both ---- */

void control_head_seek(struct daemon *daemon)
{
    struct control *control = daemon->control;
    uint64_t every = bl_time_scaled_ms(CONTROL_RETRY_MS);

    conn_close(control->head);
    control->head = NULL;
    control->head_greeted = 0;
    uv_timer_start(control->retry, on_retry, every, every);
}

struct conn *control_head(struct daemon *daemon)
{
    struct control *control = daemon->control;

    return control && control->head_greeted ? control->head : NULL;
}

void control_send_report(struct daemon *daemon, const struct wire_report *report)
{
    struct conn *head = control_head(daemon);

    if (head && !conn_is_behind(head)) {
        BL_IGNORE(conn_send(head, WIRE_TYPE_REPORT, report, report->generation, NULL, 0) != 0,
                  "the machine repeats it");
    }
}

void control_send_directive(struct daemon *daemon, const char *node,
                            const struct wire_directive *directive)
{
    struct peer *peer = peer_find(daemon->control, node);

    if (peer && !conn_is_behind(peer->conn)) {
        BL_IGNORE(conn_send(peer->conn, WIRE_TYPE_DIRECTIVE, directive, directive->generation, NULL,
                            0) != 0,
                  "the machine repeats it");
    }
}

uint32_t control_nodes(struct daemon *daemon, char names[][WIRE_NODE_MAX], uint32_t max)
{
    struct control *control = daemon->control;
    uint32_t count = 0;

    snprintf(names[count++], WIRE_NODE_MAX, "%s", daemon->config.name);
    for (uint32_t i = 0; control && i < control->peer_count && count < max; i++) {
        if (control->peers[i]->node[0]) {
            snprintf(names[count++], WIRE_NODE_MAX, "%s", control->peers[i]->node);
        }
    }
    return count;
}

int control_open(struct daemon *daemon, struct bl_errmsg *msg)
{
    struct control *control = calloc(1, sizeof(*control));
    int fd = control ? wire_tcp_listen(daemon->config.listen, daemon->listen_addr, msg) : -ENOMEM;

    if (fd == -EADDRINUSE) {
        bl_err(msg, fd,
               "%s is in use: end what listens there, or use another --listen (port 0 takes a free "
               "one)",
               daemon->config.listen);
    }
    if (fd < 0) {
        free(control);
        return fd;
    }
    control->daemon = daemon;
    control->listen_fd = fd;
    control->listener = calloc(1, sizeof(*control->listener));
    control->retry = calloc(1, sizeof(*control->retry));
    BL_ASSERT(control->listener != NULL && control->retry != NULL);
    uv_poll_init(daemon->loop, control->listener, fd);
    control->listener->data = control;
    uv_poll_start(control->listener, UV_READABLE, on_accept);
    uv_timer_init(daemon->loop, control->retry);
    control->retry->data = control;
    if (daemon->config.head[0]) {
        uv_timer_start(control->retry, on_retry, 1, bl_time_scaled_ms(CONTROL_RETRY_MS));
    }
    daemon->control = control;
    return 0;
}

void control_close(struct daemon *daemon)
{
    struct control *control = daemon->control;

    if (!control) {
        return;
    }
    while (control->peer_count > 0) {
        conn_close(control->peers[0]->conn);
        peer_free(control->peers[0]);
    }
    conn_close(control->head);
    if (control->connecting) {
        uv_close((uv_handle_t *)control->connecting, on_freed);
        close(control->connecting_fd);
    }
    uv_close((uv_handle_t *)control->listener, on_freed);
    uv_close((uv_handle_t *)control->retry, on_freed);
    close(control->listen_fd);
    free(control);
    daemon->control = NULL;
}
