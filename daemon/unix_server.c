/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The local socket: ranks and `belay`, of the same user or root. The hello says which.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "daemon/daemon.h"
#include "wire/sock.h"

struct unix_server {
    struct daemon *daemon;
    uv_poll_t *listener;
    int fd;
};

static void on_freed(uv_handle_t *handle)
{
    free(handle);
}

/* Before the hello the connection belongs to nobody. */
static void on_hello(struct conn *conn, void *arg, const struct wire_frame *frame)
{
    struct daemon *daemon = arg;
    struct wire_hello hello;

    if (frame->type != WIRE_TYPE_HELLO ||
        wire_hello_decode(&hello, frame->payload, frame->payload_bytes, NULL) != 0) {
        conn_close(conn);
        return;
    }
    if (hello.role == WIRE_ROLE_RANK) {
        rank_link_take(daemon, conn, &hello);
    } else if (hello.role == WIRE_ROLE_TOOL) {
        tool_link_take(daemon, conn);
    } else {
        conn_close(conn);
    }
    wire_hello_free(&hello);
}

static void on_closed(struct conn *conn, void *arg, const char *text)
{
    (void)conn;
    (void)arg;
    (void)text;
}

static const struct conn_ops hello_ops = {on_hello, on_closed};

static void on_accept(uv_poll_t *poll, int status, int events)
{
    struct unix_server *server = poll->data;
    struct bl_errmsg msg = {{0}};
    int fd;

    (void)events;
    while (status == 0 && (fd = wire_sock_accept(server->fd)) >= 0) {
        if (wire_unix_peer_check(fd, &msg) != 0) {
            bl_log(BL_LOG_WARN, "socket", "refused: %s", msg.text);
            close(fd);
        } else if (!conn_new(server->daemon->loop, fd, server->daemon->incarnation, &hello_ops,
                             server->daemon)) {
            bl_log(BL_LOG_ERROR, "socket", "out of memory");
        }
    }
}

int unix_server_open(struct daemon *daemon, struct bl_errmsg *msg)
{
    struct unix_server *server = calloc(1, sizeof(*server));

    if (!server || !(server->listener = calloc(1, sizeof(*server->listener)))) {
        free(server);
        return bl_err_code(msg, -ENOMEM, "socket");
    }
    server->daemon = daemon;
    server->fd = wire_unix_listen(daemon->config.socket, msg);
    if (server->fd < 0) {
        int rc = server->fd;

        free(server->listener);
        free(server);
        return rc;
    }
    uv_poll_init(daemon->loop, server->listener, server->fd);
    server->listener->data = server;
    uv_poll_start(server->listener, UV_READABLE, on_accept);
    daemon->unix_server = server;
    return 0;
}

void unix_server_close(struct daemon *daemon)
{
    struct unix_server *server = daemon->unix_server;

    if (server) {
        uv_close((uv_handle_t *)server->listener, on_freed);
        close(server->fd);
        unlink(daemon->config.socket);
        free(server);
        daemon->unix_server = NULL;
    }
}
