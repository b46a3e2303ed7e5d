/* SPDX-License-Identifier: Apache-2.0 */
#include "wire/sock.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"

#define SOCK_READ_BYTES 65536u

void wire_sock_init(struct wire_sock *sock, int fd)
{
    memset(sock, 0, sizeof(*sock));
    sock->fd = fd;
    wire_decoder_init(&sock->decoder, 0);
    int flags = fcntl(fd, F_GETFL);
    if (flags >= 0 && !(flags & O_NONBLOCK)) {
        BL_IGNORE(fcntl(fd, F_SETFL, flags | O_NONBLOCK), "cannot fail on an open socket");
    }
}

void wire_sock_close(struct wire_sock *sock)
{
    if (!sock) {
        return;
    }
    for (uint32_t i = 0; i < sock->fd_count; i++) {
        close(sock->fds[i]);
    }
    if (sock->fd >= 0) {
        close(sock->fd);
    }
    wire_decoder_close(&sock->decoder);
    free(sock->out);
    memset(sock, 0, sizeof(*sock));
    sock->fd = -1;
}

/* ---- receiving ---- */

/* Puts descriptors that came into the queue; those without room are closed. */
static int fds_collect(struct wire_sock *sock, struct msghdr *header)
{
    int rc = header->msg_flags & MSG_CTRUNC ? BL_EPROTO : 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(header); c; c = CMSG_NXTHDR(header, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) {
            continue;
        }
        size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(fd));
            if (sock->fd_count < sizeof(sock->fds) / sizeof(sock->fds[0])) {
                sock->fds[sock->fd_count++] = fd;
            } else {
                close(fd);
                rc = BL_EPROTO;
            }
        }
    }
    return rc;
}

int wire_sock_read(struct wire_sock *sock)
{
    if (sock->fd < 0) {
        return BL_EPEER;
    }
    size_t space;
    uint8_t *at = wire_decoder_space(&sock->decoder, SOCK_READ_BYTES, &space);
    if (!at) {
        return -ENOMEM;
    }
    union {
        char bytes[CMSG_SPACE(sizeof(int) * WIRE_FDS_MAX)];
        struct cmsghdr align;
    } control;
    struct iovec vector = {at, space};
    struct msghdr header = {
        .msg_iov = &vector,
        .msg_iovlen = 1,
        .msg_control = control.bytes,
        .msg_controllen = sizeof(control.bytes),
    };
    ssize_t got;
    do {
        got = recvmsg(sock->fd, &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    } while (got < 0 && errno == EINTR);
    if (got < 0) {
        if (errno == EAGAIN || errno == EWOULDBLOCK) {
            return 0;
        }
        return errno == ECONNRESET || errno == EPIPE ? BL_EPEER : -errno;
    }
    int rc = fds_collect(sock, &header);
    if (rc) {
        return rc;
    }
    wire_decoder_filled(&sock->decoder, (size_t)got);
    return got ? 1 : BL_EPEER;
}

int wire_sock_next(struct wire_sock *sock, struct wire_frame *ret, struct bl_errmsg *msg)
{
    return wire_decoder_next(&sock->decoder, ret, msg);
}

int wire_sock_fds_take(struct wire_sock *sock, int *fds, uint32_t count)
{
    if (count > sock->fd_count) {
        return BL_EPROTO;
    }
    memcpy(fds, sock->fds, count * sizeof(int));
    sock->fd_count -= count;
    memmove(sock->fds, sock->fds + count, sock->fd_count * sizeof(int));
    return 0;
}

/* ---- sending ---- */

int wire_sock_flush(struct wire_sock *sock)
{
    if (sock->fd < 0) {
        return BL_EPEER;
    }
    while (sock->out_done < sock->out_bytes) {
        ssize_t sent = send(sock->fd, sock->out + sock->out_done, sock->out_bytes - sock->out_done,
                            MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0) {
            if (errno == EINTR) {
                continue;
            }
            if (errno == EAGAIN || errno == EWOULDBLOCK) {
                return 1;
            }
            return errno == EPIPE || errno == ECONNRESET ? BL_EPEER : -errno;
        }
        sock->out_done += (size_t)sent;
    }
    sock->out_bytes = sock->out_done = 0;
    return 0;
}

static int out_append(struct wire_sock *sock, const uint8_t *bytes, size_t count,
                      struct bl_errmsg *msg)
{
    if (sock->out_done) {
        memmove(sock->out, sock->out + sock->out_done, sock->out_bytes - sock->out_done);
        sock->out_bytes -= sock->out_done;
        sock->out_done = 0;
    }
    size_t want = sock->out_bytes + count;
    if (sock->out_bytes && want > WIRE_SOCK_WAITING_MAX) {
        return bl_err(msg, BL_ELIMIT, "the other side does not read: %zu bytes wait",
                      sock->out_bytes);
    }
    if (want > sock->out_capacity) {
        size_t grown = sock->out_capacity ? sock->out_capacity : 4096;
        while (grown < want) {
            grown *= 2;
        }
        uint8_t *moved = realloc(sock->out, grown);
        if (!moved) {
            return bl_err(msg, -ENOMEM, "out of memory for %zu bytes to send", want);
        }
        sock->out = moved;
        sock->out_capacity = grown;
    }
    memcpy(sock->out + sock->out_bytes, bytes, count);
    sock->out_bytes = want;
    return 0;
}

int wire_sock_post(struct wire_sock *sock, enum wire_type type, const void *message,
                   uint64_t generation, uint64_t incarnation, struct bl_errmsg *msg)
{
    uint8_t *bytes;
    size_t count;
    int rc = wire_message_frame(type, message, generation, incarnation, &bytes, &count, msg);
    if (rc) {
        return rc;
    }
    rc = out_append(sock, bytes, count, msg);
    free(bytes);
    if (rc) {
        return rc;
    }
    rc = wire_sock_flush(sock);
    return rc < 0 ? bl_err_code(msg, rc, "send %s", wire_type_name(type)) : 0;
}

/* ---- blocking ---- */

/* Waits for `events` until the deadline (ms of CLOCK_MONOTONIC). 0 or an error. */
static int sock_wait(const struct wire_sock *sock, short events, uint64_t deadline_ms)
{
    for (;;) {
        uint64_t now = bl_now_ns() / 1000000;
        if (now >= deadline_ms) {
            return BL_EDEADLINE;
        }
        uint64_t left = deadline_ms - now;
        struct pollfd ready = {.fd = sock->fd, .events = events};
        int rc = poll(&ready, 1, left > 1000000 ? 1000000 : (int)left);
        if (rc > 0) {
            return 0;
        }
        if (rc < 0 && errno != EINTR) {
            return -errno;
        }
    }
}

static uint64_t deadline_of(uint32_t timeout_ms)
{
    return bl_now_ns() / 1000000 + timeout_ms;
}

static int flush_wait(struct wire_sock *sock, uint64_t deadline_ms)
{
    int rc;
    while ((rc = wire_sock_flush(sock)) == 1) {
        rc = sock_wait(sock, POLLOUT, deadline_ms);
        if (rc) {
            return rc;
        }
    }
    return rc;
}

/* The first bytes with the descriptors beside them; the rest goes into the queue. */
static int send_first(struct wire_sock *sock, const uint8_t *bytes, size_t count, const int *fds,
                      uint32_t fd_count, uint64_t deadline_ms, struct bl_errmsg *msg)
{
    union {
        char bytes[CMSG_SPACE(sizeof(int) * WIRE_FDS_MAX)];
        struct cmsghdr align;
    } control;
    memset(&control, 0, sizeof(control));
    struct iovec vector = {(void *)(uintptr_t)bytes, count};
    struct msghdr header = {
        .msg_iov = &vector,
        .msg_iovlen = 1,
        .msg_control = control.bytes,
        .msg_controllen = CMSG_SPACE(sizeof(int) * fd_count),
    };
    struct cmsghdr *c = CMSG_FIRSTHDR(&header);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int) * fd_count);
    memcpy(CMSG_DATA(c), fds, sizeof(int) * fd_count);
    for (;;) {
        ssize_t sent = sendmsg(sock->fd, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent > 0) {
            return (size_t)sent < count ? out_append(sock, bytes + sent, count - (size_t)sent, msg)
                                        : 0;
        }
        if (errno == EAGAIN || errno == EWOULDBLOCK) {
            int rc = sock_wait(sock, POLLOUT, deadline_ms);
            if (rc) {
                return rc;
            }
        } else if (errno != EINTR) {
            return errno == EPIPE || errno == ECONNRESET ? BL_EPEER : -errno;
        }
    }
}

int wire_sock_send(struct wire_sock *sock, enum wire_type type, const void *message,
                   uint64_t generation, uint64_t incarnation, const int *fds, uint32_t fd_count,
                   uint32_t timeout_ms, struct bl_errmsg *msg)
{
    BL_ASSERT(fd_count <= WIRE_FDS_MAX);
    uint64_t deadline_ms = deadline_of(timeout_ms);
    uint8_t *bytes;
    size_t count;
    int rc = wire_message_frame(type, message, generation, incarnation, &bytes, &count, msg);
    if (rc) {
        return rc;
    }
    if (fd_count) {
        rc = flush_wait(sock, deadline_ms);
        if (!rc) {
            rc = send_first(sock, bytes, count, fds, fd_count, deadline_ms, msg);
        }
    } else {
        rc = out_append(sock, bytes, count, msg);
    }
    free(bytes);
    if (!rc) {
        rc = flush_wait(sock, deadline_ms);
    }
    return rc ? bl_err_code(msg, rc, "send %s", wire_type_name(type)) : 0;
}

int wire_sock_recv(struct wire_sock *sock, struct wire_frame *ret, uint32_t timeout_ms,
                   struct bl_errmsg *msg)
{
    uint64_t deadline_ms = deadline_of(timeout_ms);
    for (;;) {
        int rc = wire_sock_next(sock, ret, msg);
        if (rc) {
            return rc > 0 ? 0 : rc;
        }
        rc = wire_sock_read(sock);
        if (rc < 0) {
            return bl_err_code(msg, rc, "receive");
        }
        if (!rc) {
            rc = sock_wait(sock, POLLIN, deadline_ms);
            if (rc) {
                return bl_err_code(msg, rc, "receive");
            }
        }
    }
}

int wire_sock_expect(struct wire_sock *sock, enum wire_type type, void *ret, uint32_t timeout_ms,
                     struct bl_errmsg *msg)
{
    struct wire_frame frame;
    int rc = wire_sock_recv(sock, &frame, timeout_ms, msg);
    if (rc) {
        return bl_err_in(msg, rc, "waiting for %s", wire_type_name(type));
    }
    if (frame.type != type) {
        return bl_err(msg, BL_EPROTO, "%s came instead of %s", wire_type_name(frame.type),
                      wire_type_name(type));
    }
    return wire_message_decode(type, ret, frame.payload, frame.payload_bytes, msg);
}

int wire_sock_recv_raw(struct wire_sock *sock, void *out, size_t bytes, uint32_t timeout_ms,
                       struct bl_errmsg *msg)
{
    uint64_t deadline_ms = deadline_of(timeout_ms);
    char *at = out;
    size_t had = wire_decoder_raw(&sock->decoder, at, bytes);
    at += had;
    bytes -= had;
    while (bytes) {
        /* Not recv(): only what read() takes counts in /proc/PID/io, by which the daemon sees that
         * an engine that loads from other nodes moves. */
        ssize_t got = read(sock->fd, at, bytes);
        if (got > 0) {
            at += got;
            bytes -= (size_t)got;
            continue;
        }
        int rc = got == 0                                  ? BL_EPEER
                 : errno == EINTR                          ? 0
                 : errno == EAGAIN || errno == EWOULDBLOCK ? sock_wait(sock, POLLIN, deadline_ms)
                                                           : -errno;
        if (rc) {
            return bl_err_code(msg, rc, "%zu bytes were to come", bytes);
        }
    }
    return 0;
}
