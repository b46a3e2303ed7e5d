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

#define UNIX_STRANGERS_MAX 64 /* connections that have not said hello; the oldest makes room */

struct unix_server {
    struct daemon *daemon;
    uv_poll_t *listener;
    int fd;
    struct conn *strangers[UNIX_STRANGERS_MAX];
    uint32_t stranger_count;
};

static void on_freed(uv_handle_t *handle)
{
    free(handle);
}

static void stranger_forget(struct unix_server *server, const struct conn *conn)
{
    for (uint32_t i = 0; server && i < server->stranger_count; i++) {
        if (server->strangers[i] == conn) {
            server->stranger_count--;
            memmove(&server->strangers[i], &server->strangers[i + 1],
                    (server->stranger_count - i) * sizeof(server->strangers[0]));
            return;
        }
    }
}

/* Before the hello the connection belongs to nobody. */
static void on_hello(struct conn *conn, void *arg, const struct wire_frame *frame)
{
    struct daemon *daemon = arg;
    struct wire_hello hello;

    stranger_forget(daemon->unix_server, conn);
    if (frame->type != WIRE_TYPE_HELLO ||
        wire_hello_decode(&hello, frame->payload, frame->payload_bytes, NULL) != 0) {
        conn_close(conn);
        return;
    }
    conn_hello_came(conn);
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
    struct daemon *daemon = arg;

    (void)text;
    stranger_forget(daemon->unix_server, conn);
}

static const struct conn_ops hello_ops = {on_hello, on_closed};

static void stranger_take(struct unix_server *server, int fd)
{
    struct conn *conn;

    if (server->stranger_count == UNIX_STRANGERS_MAX) {
        conn = server->strangers[0];
        stranger_forget(server, conn);
        conn_close(conn);
    }
    conn =
        conn_new(server->daemon->loop, fd, server->daemon->incarnation, &hello_ops, server->daemon);
    if (!conn) {
        bl_log(BL_LOG_ERROR, "socket", "out of memory");
        return;
    }
    conn_hello_wait(conn);
    server->strangers[server->stranger_count++] = conn;
}

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
        } else {
            stranger_take(server, fd);
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
        for (uint32_t i = 0; i < server->stranger_count; i++) {
            conn_close(server->strangers[i]);
        }
        uv_close((uv_handle_t *)server->listener, on_freed);
        close(server->fd);
        unlink(daemon->config.socket);
        free(server);
        daemon->unix_server = NULL;
    }
}
