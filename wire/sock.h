/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sockets for those who have no event loop: UNIX sockets with descriptors beside the frames, TCP on
 * loopback. All descriptors are non-blocking and close-on-exec; the blocking calls wait in poll
 * with a deadline.
 *
 * Descriptors (SCM_RIGHTS) arrive in the order in which they were sent, not later than the last
 * byte of their frame; each message says by itself how many belong to it, and the receiver takes
 * that many.
 *
 * A connection belongs to one thread at a time.
 */
#ifndef WIRE_SOCK_H
#define WIRE_SOCK_H

#include <stddef.h>
#include <stdint.h>

#include "wire/codec.h"
#include "wire/frame.h"

#define WIRE_SOCK_WAITING_MAX (8u << 20) /* bytes queued for a peer that does not read */

/* ---- making sockets: a descriptor or an error ---- */

/* Listens at `path` (at most 107 bytes), mode 0600. A socket file without a listener is replaced; a
 * listener that answers: -EADDRINUSE. */
BL_MUST_CHECK int wire_unix_listen(const char *path, struct bl_errmsg *msg);
BL_MUST_CHECK int wire_unix_connect(const char *path, struct bl_errmsg *msg);
/* The other side must run as our own uid, or as root. -EPERM with both numbers in the text. */
BL_MUST_CHECK int wire_unix_peer_check(int fd, struct bl_errmsg *msg);

/* "127.0.0.1:7420", "[::1]:0", "localhost:1". An address that is not loopback is refused with
 * BL_ECONFIG: without TLS nothing is spoken across machines. Port 0 takes a free one; ret_addr (may
 * be NULL) is what came of it. */
BL_MUST_CHECK int wire_tcp_listen(const char *addr, char ret_addr[WIRE_ADDR_MAX],
                                  struct bl_errmsg *msg);
/* Waits for the connection at most `timeout_ms`. TCP_NODELAY is set. */
BL_MUST_CHECK int wire_tcp_connect(const char *addr, uint32_t timeout_ms, struct bl_errmsg *msg);
/* Begins to connect and does not wait: writable when done (wire_tcp_connected). */
BL_MUST_CHECK int wire_tcp_connect_begin(const char *addr, struct bl_errmsg *msg);
/* 0, or -errno of the connection attempt. */
BL_MUST_CHECK int wire_tcp_connected(int fd);
/* As wire_unix_peer_check, for an established TCP connection of this machine, either way. Also
 * BL_EPEER when the other end is closed already, -errno when the kernel does not tell. */
BL_MUST_CHECK int wire_tcp_peer_check(int fd, struct bl_errmsg *msg);
/* 0 when the address may be used, else BL_ECONFIG or BL_EFORMAT with text. */
BL_MUST_CHECK int wire_tcp_addr_check(const char *addr, struct bl_errmsg *msg);

/* The next connection of a listener, -EAGAIN without one. TCP_NODELAY is set on TCP. */
BL_MUST_CHECK int wire_sock_accept(int listener);

/* ---- a connection ---- */

struct wire_sock {
    int fd; /* owned; -1 closed */
    struct wire_decoder decoder;
    int fds[WIRE_FDS_MAX * 2]; /* owned: came, not yet taken */
    uint32_t fd_count;
    uint8_t *out; /* owned: queued for sending */
    size_t out_bytes, out_done, out_capacity;
};

/* Takes `fd` (>= 0) and makes it non-blocking. */
void wire_sock_init(struct wire_sock *sock, int fd);
/* Closes everything it owns; again is fine. */
void wire_sock_close(struct wire_sock *sock);

/* Reads once, without waiting. 1: bytes came, 0: none there, BL_EPEER: the other side closed,
 * -errno. */
BL_MUST_CHECK int wire_sock_read(struct wire_sock *sock);
/* 1 and a message out of what was read, 0, or an error (wire_decoder_next's). */
BL_MUST_CHECK int wire_sock_next(struct wire_sock *sock, struct wire_frame *ret,
                                 struct bl_errmsg *msg);
/* Moves the `count` oldest descriptors to `fds`, now the caller's. BL_EPROTO when fewer came; then
 * none moves. */
BL_MUST_CHECK int wire_sock_fds_take(struct wire_sock *sock, int *fds, uint32_t count);

/* Encodes and queues a message, then sends what goes without waiting. BL_ELIMIT when
 * WIRE_SOCK_WAITING_MAX is passed. */
BL_MUST_CHECK int wire_sock_post(struct wire_sock *sock, enum wire_type type, const void *message,
                                 uint64_t generation, uint64_t incarnation, struct bl_errmsg *msg);
/* Sends what is queued, without waiting. 0: all went, 1: some is left (poll for POLLOUT), error. */
BL_MUST_CHECK int wire_sock_flush(struct wire_sock *sock);

/* Blocking: sends a message with `fd_count` descriptors (borrowed; at most WIRE_FDS_MAX, UNIX
 * sockets only) after what is queued. BL_EDEADLINE, BL_EPEER, -errno. */
BL_MUST_CHECK int wire_sock_send(struct wire_sock *sock, enum wire_type type, const void *message,
                                 uint64_t generation, uint64_t incarnation, const int *fds,
                                 uint32_t fd_count, uint32_t timeout_ms, struct bl_errmsg *msg);
/* Blocking: the next message. *ret is a view until the next call. */
BL_MUST_CHECK int wire_sock_recv(struct wire_sock *sock, struct wire_frame *ret,
                                 uint32_t timeout_ms, struct bl_errmsg *msg);
/* Blocking: the next message must be of `type` and is decoded into `ret` (close it by
 * wire_message_close). Another type: BL_EPROTO. */
BL_MUST_CHECK int wire_sock_expect(struct wire_sock *sock, enum wire_type type, void *ret,
                                   uint32_t timeout_ms, struct bl_errmsg *msg);
/* Blocking: `bytes` raw bytes that follow the last message. */
BL_MUST_CHECK int wire_sock_recv_raw(struct wire_sock *sock, void *out, size_t bytes,
                                     uint32_t timeout_ms, struct bl_errmsg *msg);

#endif
