/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The asking side of a bulk connection, blocking: hello both ways, then questions (BULK_READ,
 * BULK_FILE), each answered by BULK_DATA and the bytes. A connection belongs to one thread at a
 * time.
 */
#ifndef WIRE_BULK_H
#define WIRE_BULK_H

#include "wire/sock.h"

/* Connects `sock` (closed before; wire_sock_close after an error too) and says hello, with role and
 * version filled in here. */
BL_MUST_CHECK int wire_bulk_connect(struct wire_sock *sock, const char *addr,
                                    struct wire_hello *hello, uint64_t generation,
                                    uint32_t timeout_ms, struct bl_errmsg *msg);

/* What one question asked: fill `type`, `question` and `bytes` (raw bytes that are to come). */
struct wire_bulk_question {
    enum wire_type type;
    const void *question; /* of the type; borrowed */
    uint64_t bytes;
    uint64_t generation, incarnation; /* of the frame */
    int refused;                      /* set: the error is the server's answer, and the connection
                                         is good still */
    uint64_t file_bytes;              /* set: as the answer says */
};

/* Asks and waits; the raw bytes go to `out`. Errors: the answer's code with its text, but codes
 * that end generations or programs here come as BL_EPROTO; BL_EDEADLINE, BL_EPEER, -errno. */
BL_MUST_CHECK int wire_bulk_ask(struct wire_sock *sock, struct wire_bulk_question *ask, void *out,
                                uint32_t timeout_ms, struct bl_errmsg *msg);

#endif
