/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/conn.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"

#define CONN_READ_BYTES     (256u << 10)
#define CONN_STRANGER_BYTES 4096u /* read at once before the hello: it may never come */

struct out { /* one message on its way */
    struct out *next;
    uint8_t *bytes;
    size_t count, sent;
    int fds[WIRE_FDS_MAX];
    uint32_t fd_count; /* not yet sent */
};

struct conn {
    uv_poll_t poll;
    uv_timer_t hello; /* only with has_hello */
    int fd, has_hello, handles;
    int is_stranger; /* its hello has not come */
    uint64_t incarnation;
    const struct conn_ops *ops;
    void *arg;
    struct wire_decoder decoder;
    struct out *first, *last;
    size_t queued;
    int fds[CONN_FDS_MAX];
    uint32_t fd_count;
    int closing, broken, takes_fds;
};

static void out_free(struct out *out)
{
    for (uint32_t i = 0; i < out->fd_count; i++) {
        close(out->fds[i]);
    }
    free(out->bytes);
    free(out);
}

static void on_handle_closed(uv_handle_t *handle)
{
    struct conn *conn = handle->data;

    if (--conn->handles > 0) {
        return;
    }
    while (conn->first) {
        struct out *out = conn->first;

        conn->first = out->next;
        out_free(out);
    }
    for (uint32_t i = 0; i < conn->fd_count; i++) {
        close(conn->fds[i]);
    }
    close(conn->fd);
    wire_decoder_close(&conn->decoder);
    free(conn);
}

static void conn_end(struct conn *conn)
{
    if (!conn->closing) {
        conn->closing = 1;
        uv_poll_stop(&conn->poll);
        uv_close((uv_handle_t *)&conn->poll, on_handle_closed);
        if (conn->has_hello) {
            uv_close((uv_handle_t *)&conn->hello, on_handle_closed);
        }
    }
}

/* 0 sent all, 1 the socket is full, negative: broken. */
static int conn_flush(struct conn *conn)
{
    while (conn->first) {
        struct out *out = conn->first;
        struct iovec iov = {out->bytes + out->sent, out->count - out->sent};
        union {
            struct cmsghdr header;
            char bytes[CMSG_SPACE(sizeof(int) * WIRE_FDS_MAX)];
        } control;
        struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};

        if (out->fd_count > 0) {
            msg.msg_control = control.bytes;
            msg.msg_controllen = CMSG_SPACE(sizeof(int) * out->fd_count);
            struct cmsghdr *cmsg = CMSG_FIRSTHDR(&msg);

            cmsg->cmsg_level = SOL_SOCKET;
            cmsg->cmsg_type = SCM_RIGHTS;
            cmsg->cmsg_len = CMSG_LEN(sizeof(int) * out->fd_count);
            memcpy(CMSG_DATA(cmsg), out->fds, sizeof(int) * out->fd_count);
        }
        ssize_t n = sendmsg(conn->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);

        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            return 1;
        }
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            return -errno;
        }
        for (; out->fd_count > 0; out->fd_count--) {
            close(out->fds[out->fd_count - 1]);
        }
        out->sent += (size_t)n;
        conn->queued -= (size_t)n;
        if (out->sent == out->count) {
            conn->first = out->next;
            if (!conn->first) {
                conn->last = NULL;
            }
            out_free(out);
        }
    }
    return 0;
}

static void on_poll(uv_poll_t *poll, int status, int events);

static void conn_arm(struct conn *conn)
{
    if (!conn->closing) {
        uv_poll_start(&conn->poll,
                      conn->first || conn->broken ? UV_READABLE | UV_WRITABLE : UV_READABLE,
                      on_poll);
    }
}

static void conn_fail(struct conn *conn, int rc, const char *text)
{
    if (conn->closing) {
        return;
    }
    conn_end(conn);
    conn->ops->on_closed(conn, conn->arg, text ? text : bl_strerror(rc));
}

static void take_fds(struct conn *conn, struct msghdr *msg)
{
    for (struct cmsghdr *c = CMSG_FIRSTHDR(msg); c; c = CMSG_NXTHDR(msg, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) {
            continue;
        }
        size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);

        for (size_t i = 0; i < count; i++) {
            int fd;

            memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
            if (conn->takes_fds && conn->fd_count < CONN_FDS_MAX) {
                conn->fds[conn->fd_count++] = fd;
            } else {
                close(fd);
            }
        }
    }
}

int conn_take_fd(struct conn *conn)
{
    if (conn->fd_count == 0) {
        return -1;
    }
    int fd = conn->fds[0];

    conn->fd_count--;
    memmove(conn->fds, conn->fds + 1, conn->fd_count * sizeof(int));
    return fd;
}

/* 1 came something, 0 nothing there, negative broken (-EPIPE: end of stream). */
static int conn_receive(struct conn *conn)
{
    size_t space, want = conn->is_stranger ? CONN_STRANGER_BYTES : CONN_READ_BYTES;
    uint8_t *at = wire_decoder_space(&conn->decoder, want, &space);
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int) * CONN_FDS_MAX)];
    } control;

    if (!at) {
        return -ENOMEM;
    }
    struct iovec iov = {at, space};
    struct msghdr msg = {.msg_iov = &iov,
                         .msg_iovlen = 1,
                         .msg_control = control.bytes,
                         .msg_controllen = sizeof(control.bytes)};
    ssize_t n = recvmsg(conn->fd, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

    if (n < 0) {
        return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -errno;
    }
    take_fds(conn, &msg);
    wire_decoder_filled(&conn->decoder, (size_t)n);
    return n == 0 ? -EPIPE : 1;
}

static void on_poll(uv_poll_t *poll, int status, int events)
{
    struct conn *conn = poll->data;
    struct wire_frame frame;
    struct bl_errmsg msg = {{0}};

    if (status < 0) { /* libuv's word for POLLERR: reading tells what it is */
        events = UV_READABLE;
    }
    int rc = conn->broken;

    if (rc == 0 && events & UV_WRITABLE) {
        rc = conn_flush(conn);
    }
    if (rc < 0) {
        conn_fail(conn, rc, NULL);
        return;
    }
    int got = events & (UV_READABLE | UV_DISCONNECT) ? conn_receive(conn) : 0;

    if (got < 0 && got != -EPIPE) {
        conn_fail(conn, got, NULL);
        return;
    }
    while (!conn->closing && (rc = wire_decoder_next(&conn->decoder, &frame, &msg)) == 1) {
        conn->ops->on_message(conn, conn->arg, &frame);
    }
    if (!conn->closing && rc < 0) {
        conn_fail(conn, rc, msg.text);
    } else if (got == -EPIPE) {
        conn_fail(conn, 0, "closed by the other side");
    } else {
        conn_arm(conn);
    }
}

struct conn *conn_new(uv_loop_t *loop, int fd, uint64_t incarnation, const struct conn_ops *ops,
                      void *arg)
{
    struct conn *conn = calloc(1, sizeof(*conn));

    if (!conn || uv_poll_init(loop, &conn->poll, fd) != 0) {
        free(conn);
        close(fd);
        return NULL;
    }
    conn->poll.data = conn;
    conn->handles = 1;
    conn->incarnation = incarnation;
    conn->fd = fd;
    conn->ops = ops;
    conn->arg = arg;
    wire_decoder_init(&conn->decoder, 0);
    conn_arm(conn);
    return conn;
}

static void on_hello_late(uv_timer_t *timer)
{
    conn_fail(timer->data, BL_EDEADLINE, "no hello in time");
}

void conn_hello_wait(struct conn *conn)
{
    uv_timer_init(conn->poll.loop, &conn->hello);
    conn->hello.data = conn;
    conn->has_hello = conn->is_stranger = 1;
    conn->handles++;
    uv_timer_start(&conn->hello, on_hello_late, bl_time_scaled_ms(CONN_HELLO_MS), 0);
    conn->decoder.message_max = CONN_HELLO_BYTES;
}

void conn_hello_came(struct conn *conn)
{
    if (conn->has_hello) {
        uv_timer_stop(&conn->hello);
        conn->is_stranger = 0;
    }
    conn->decoder.message_max = WIRE_MESSAGE_BYTES_MAX;
}

void conn_fds_allow(struct conn *conn)
{
    conn->takes_fds = 1;
}

int conn_is_behind(const struct conn *conn)
{
    return conn->queued > CONN_BEHIND_BYTES;
}

void conn_arg_set(struct conn *conn, const struct conn_ops *ops, void *arg)
{
    conn->ops = ops;
    conn->arg = arg;
}

void conn_close(struct conn *conn)
{
    if (conn && !conn->closing) {
        BL_IGNORE(conn_flush(conn) != 0, "what the socket does not take at once is lost");
        conn_end(conn);
    }
}

int conn_send(struct conn *conn, enum wire_type type, const void *message, uint64_t generation,
              const int *fds, uint32_t fd_count)
{
    struct out *out;
    int rc;

    if (conn->closing) {
        return -EPIPE;
    }
    if (conn->queued > CONN_QUEUE_BYTES) { /* told from the loop, as the end of the stream */
        conn->broken = BL_ELIMIT;
        BL_IGNORE(shutdown(conn->fd, SHUT_RDWR) != 0, "then it is broken already");
        return BL_ELIMIT;
    }
    if (fd_count > WIRE_FDS_MAX) {
        return BL_ELIMIT;
    }
    out = calloc(1, sizeof(*out));
    if (!out) {
        return -ENOMEM;
    }
    rc = wire_message_frame(type, message, generation, conn->incarnation, &out->bytes, &out->count,
                            NULL);
    for (uint32_t i = 0; rc == 0 && i < fd_count; i++) {
        out->fds[i] = fcntl(fds[i], F_DUPFD_CLOEXEC, 3);
        if (out->fds[i] < 0) {
            rc = -errno;
        } else {
            out->fd_count++;
        }
    }
    if (rc != 0) {
        out_free(out);
        return rc;
    }
    if (conn->last) {
        conn->last->next = out;
    } else {
        conn->first = out;
    }
    conn->last = out;
    conn->queued += out->count;
    rc = conn_flush(conn);
    if (rc < 0) { /* told from the loop: the socket is writable (it fails at once) */
        conn->broken = rc;
    }
    conn_arm(conn);
    return 0;
}
