/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whose is the other end of a TCP connection on this machine? UNIX sockets have SO_PEERCRED; for
 * TCP on loopback the kernel is asked for the socket with the two addresses swapped: by
 * NETLINK_SOCK_DIAG, or where that is not built in, by /proc/net/tcp.
 *
 * A socket that its process has closed belongs to nobody and is reported as root's: it is refused,
 * else whoever writes and closes at once would pass for root.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "wire/sock.h"

#define PEER_WAIT_S 2 /* the kernel answers at once; after this /proc is asked */

union peer_addr {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
};

struct peer_owner {
    uint32_t uid;
    uint64_t inode; /* 0: no process has it open */
};

static void diag_address(const union peer_addr *addr, uint32_t to[4], uint16_t *ret_port)
{
    memset(to, 0, 4 * sizeof(*to));
    if (addr->any.sa_family == AF_INET) {
        to[0] = addr->v4.sin_addr.s_addr;
        *ret_port = addr->v4.sin_port;
    } else {
        memcpy(to, &addr->v6.sin6_addr, 16);
        *ret_port = addr->v6.sin6_port;
    }
}

/* `from` and `to` as the other end sees them. 0, -ENOENT (no such socket) or why it cannot tell. */
static int diag_ask(const union peer_addr *from, const union peer_addr *to, struct peer_owner *ret)
{
    struct {
        struct nlmsghdr header;
        struct inet_diag_req_v2 body;
    } question = {.header = {.nlmsg_len = sizeof(question),
                             .nlmsg_type = SOCK_DIAG_BY_FAMILY,
                             .nlmsg_flags = NLM_F_REQUEST},
                  .body = {.sdiag_family = (uint8_t)from->any.sa_family,
                           .sdiag_protocol = IPPROTO_TCP,
                           .idiag_states = ~0u}};
    union {
        struct nlmsghdr header;
        char bytes[4096];
    } answer;
    const struct timeval wait = {.tv_sec = PEER_WAIT_S};
    int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG);

    if (fd < 0) {
        return -errno;
    }
    diag_address(from, question.body.id.idiag_src, &question.body.id.idiag_sport);
    diag_address(to, question.body.id.idiag_dst, &question.body.id.idiag_dport);
    question.body.id.idiag_cookie[0] = INET_DIAG_NOCOOKIE;
    question.body.id.idiag_cookie[1] = INET_DIAG_NOCOOKIE;
    BL_IGNORE(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait)), "it answers at once");
    ssize_t n = send(fd, &question, sizeof(question), 0) < 0
                    ? -1
                    : recv(fd, answer.bytes, sizeof(answer.bytes), 0);
    int rc = n < 0 ? -errno : 0;
    close(fd);
    if (rc == 0 && n >= (ssize_t)NLMSG_LENGTH(sizeof(struct nlmsgerr)) &&
        answer.header.nlmsg_type == NLMSG_ERROR) {
        rc = ((const struct nlmsgerr *)NLMSG_DATA(&answer.header))->error;
        return rc < 0 ? rc : -EIO;
    }
    if (rc == 0 && (n < (ssize_t)NLMSG_LENGTH(sizeof(struct inet_diag_msg)) ||
                    answer.header.nlmsg_type != SOCK_DIAG_BY_FAMILY)) {
        return -EIO;
    }
    if (rc == 0) {
        const struct inet_diag_msg *found = NLMSG_DATA(&answer.header);

        *ret = (struct peer_owner){found->idiag_uid, found->idiag_inode};
    }
    return rc;
}

/* An address as /proc/net/tcp writes it: each 32-bit word as it lies, then the port. */
static void table_address(const union peer_addr *addr, char *out, size_t bytes)
{
    uint32_t words[4];
    uint16_t port;
    size_t at = 0;

    diag_address(addr, words, &port);
    for (int i = 0; i < (addr->any.sa_family == AF_INET ? 1 : 4); i++) {
        at += (size_t)snprintf(out + at, bytes - at, "%08X", words[i]);
    }
    snprintf(out + at, bytes - at, ":%04X", ntohs(port));
}

static int table_ask(const union peer_addr *from, const union peer_addr *to, struct peer_owner *ret)
{
    char want[2][64], have[2][64], line[512];
    unsigned uid;
    unsigned long inode;
    int rc = -ENOENT;
    FILE *file = fopen(from->any.sa_family == AF_INET ? "/proc/net/tcp" : "/proc/net/tcp6", "re");

    if (!file) {
        return -errno;
    }
    table_address(from, want[0], sizeof(want[0]));
    table_address(to, want[1], sizeof(want[1]));
    while (rc != 0 && fgets(line, sizeof(line), file)) {
        if (sscanf(line, " %*d: %63s %63s %*x %*s %*s %*x %u %*u %lu", have[0], have[1], &uid,
                   &inode) == 4 &&
            strcmp(have[0], want[0]) == 0 && strcmp(have[1], want[1]) == 0) {
            *ret = (struct peer_owner){uid, inode};
            rc = 0;
        }
    }
    fclose(file);
    return rc;
}

int wire_tcp_peer_check(int fd, struct bl_errmsg *msg)
{
    union peer_addr own, peer;
    socklen_t own_bytes = sizeof(own), peer_bytes = sizeof(peer);
    struct peer_owner owner = {0, 0};
    uid_t uid = geteuid();

    if (getsockname(fd, &own.any, &own_bytes) || getpeername(fd, &peer.any, &peer_bytes)) {
        return bl_err_code(msg, -errno, "address of a peer");
    }
    int rc = diag_ask(&peer, &own, &owner);

    if (rc != 0) {
        rc = table_ask(&peer, &own, &owner);
    }
    if (rc != 0) {
        return bl_err_code(msg, rc, "whose the other end of a connection is");
    }
    if (owner.inode == 0) {
        return bl_err(msg, BL_EPEER, "the other end was closed at once");
    }
    if (owner.uid != uid && owner.uid != 0) {
        return bl_err(msg, -EPERM, "a process of uid %u; this port belongs to uid %u", owner.uid,
                      uid);
    }
    return 0;
}
