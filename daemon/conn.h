/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One connection of the daemon's loop: frames in, frames out, file descriptors beside them. For
 * UNIX sockets (ranks, shims, the engine, `belay`) and for TCP between daemons alike: libuv's own
 * streams cannot pass memfds, so this is a non-blocking socket under uv_poll.
 *
 * Callbacks come from the loop, never from inside a call of this file. After on_closed the conn is
 * gone. A peer that does not read fills the queue up to CONN_QUEUE_BYTES and is then closed; who
 * sends views that are repeated anyway looks at conn_is_behind first.
 */
#ifndef DAEMON_CONN_H
#define DAEMON_CONN_H

#include <stdint.h>
#include <uv.h>

#include "wire/codec.h"

#define CONN_QUEUE_BYTES  (72u << 20) /* the longest message and a little more */
#define CONN_BEHIND_BYTES (1u << 20)  /* unsent: more views would only lie in memory */
#define CONN_FDS_MAX      64          /* received and not yet taken */
#define CONN_HELLO_MS     5000        /* a connection that says no hello is closed */
#define CONN_HELLO_BYTES  65536       /* of a message before the hello */

struct conn;

struct conn_ops {
    /* A message of the peer. It may close the conn; it may send. */
    void (*on_message)(struct conn *conn, void *arg, const struct wire_frame *frame);
    /* The connection ended; text says why. Not called after conn_close. */
    void (*on_closed)(struct conn *conn, void *arg, const char *text);
};

/* Takes `fd` (a connected stream socket) in any case; `incarnation` (the sender's) is stamped on
 * every frame. NULL when out of memory. */
struct conn *conn_new(uv_loop_t *loop, int fd, uint64_t incarnation, const struct conn_ops *ops,
                      void *arg);
/* Lets what is queued out if the socket takes it at once, closes; no callback after this. */
void conn_close(struct conn *conn);
/* Of a connection that came in: until conn_hello_came messages are short, and after CONN_HELLO_MS
 * it ends (on_closed). */
void conn_hello_wait(struct conn *conn);
void conn_hello_came(struct conn *conn);
/* Descriptors are taken from this peer (conn_take_fd); from others they are closed at once. */
void conn_fds_allow(struct conn *conn);
void conn_arg_set(struct conn *conn, const struct conn_ops *ops, void *arg);

/* Encodes and queues a message; `fds` are duplicated. Errors: BL_ELIMIT (the queue is full: the
 * connection ends), -ENOMEM; a broken connection is no error here, it comes as on_closed. */
int conn_send(struct conn *conn, enum wire_type type, const void *message, uint64_t generation,
              const int *fds, uint32_t fd_count);
/* The peer has not read what was sent long ago. */
int conn_is_behind(const struct conn *conn);
/* The oldest received descriptor not yet taken, owned by the caller; -1 none. Messages that carry
 * descriptors take them in their handler, in order. */
int conn_take_fd(struct conn *conn);

#endif
