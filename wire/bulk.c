/* SPDX-License-Identifier: Apache-2.0 */
#include "wire/bulk.h"

#include <errno.h>
#include <stdio.h>
#include <unistd.h>

int wire_bulk_connect(struct wire_sock *sock, const char *addr, struct wire_hello *hello,
                      uint64_t generation, uint32_t timeout_ms, struct bl_errmsg *msg)
{
    struct wire_hello answer;
    int fd = wire_tcp_connect(addr, timeout_ms, msg);

    if (fd < 0) {
        return fd;
    }
    wire_sock_init(sock, fd);
    hello->version = WIRE_FRAME_VERSION;
    hello->role = WIRE_ROLE_BULK;
    hello->pid = (uint32_t)getpid();
    snprintf(hello->build, sizeof(hello->build), "%s", BELAY_VERSION);
    int rc = wire_sock_send(sock, WIRE_TYPE_HELLO, hello, generation, hello->incarnation, NULL, 0,
                            timeout_ms, msg);
    if (!rc) {
        rc = wire_sock_expect(sock, WIRE_TYPE_HELLO, &answer, timeout_ms, msg);
    }
    if (!rc) {
        wire_hello_free(&answer);
    }
    return rc;
}

/* Our own ends are not for another to call. */
static int is_ours(int rc)
{
    return rc > 0 || rc == BL_EGEN || rc == BL_ESTOPPED || rc == BL_ECONFIG || rc == -ENOMEM;
}

int wire_bulk_ask(struct wire_sock *sock, struct wire_bulk_question *ask, void *out,
                  uint32_t timeout_ms, struct bl_errmsg *msg)
{
    struct wire_bulk_data answer;
    int rc = wire_sock_send(sock, ask->type, ask->question, ask->generation, ask->incarnation, NULL,
                            0, timeout_ms, msg);

    ask->refused = 0;
    if (!rc) {
        rc = wire_sock_expect(sock, WIRE_TYPE_BULK_DATA, &answer, timeout_ms, msg);
    }
    if (!rc && answer.rc) {
        ask->refused = 1;
        return bl_err(msg, is_ours(answer.rc) ? BL_EPROTO : answer.rc, "%s", answer.text);
    }
    if (!rc && answer.bytes != ask->bytes) {
        return bl_err(msg, BL_EPROTO, "%llu bytes instead of %llu",
                      (unsigned long long)answer.bytes, (unsigned long long)ask->bytes);
    }
    ask->file_bytes = rc ? 0 : answer.file_bytes;
    return rc || ask->bytes == 0 ? rc : wire_sock_recv_raw(sock, out, ask->bytes, timeout_ms, msg);
}
