/* SPDX-License-Identifier: Apache-2.0 */
/* Making sockets: addresses, listeners, connections. */
#include "wire/sock.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define SOCK_BACKLOG 512

/* ---- UNIX ---- */

static int unix_address(const char *path, struct sockaddr_un *ret, struct bl_errmsg *msg)
{
    memset(ret, 0, sizeof(*ret));
    ret->sun_family = AF_UNIX;
    size_t bytes = strlen(path);
    if (!bytes || bytes >= sizeof(ret->sun_path)) {
        return bl_err(msg, BL_ECONFIG, "socket path of %zu bytes, at most %zu: %s", bytes,
                      sizeof(ret->sun_path) - 1, path);
    }
    memcpy(ret->sun_path, path, bytes + 1);
    return 0;
}

static int unix_socket(struct bl_errmsg *msg)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    return fd >= 0 ? fd : bl_err_code(msg, -errno, "socket");
}

int wire_unix_connect(const char *path, struct bl_errmsg *msg)
{
    struct sockaddr_un address;
    int rc = unix_address(path, &address, msg);
    if (rc) {
        return rc;
    }
    int fd = unix_socket(msg);
    if (fd < 0) {
        return fd;
    }
    /* -EAGAIN: the backlog of the listener is full. */
    if (connect(fd, (struct sockaddr *)&address, sizeof(address))) {
        rc = -errno;
        close(fd);
        return bl_err_code(msg, rc, "connect to %s", path);
    }
    return fd;
}

int wire_unix_listen(const char *path, struct bl_errmsg *msg)
{
    struct sockaddr_un address;
    int rc = unix_address(path, &address, msg);
    if (rc) {
        return rc;
    }
    struct stat status;
    if (!lstat(path, &status) && S_ISSOCK(status.st_mode)) {
        int other = wire_unix_connect(path, NULL);
        if (other >= 0 || other == -EAGAIN) {
            if (other >= 0) {
                close(other);
            }
            return bl_err(msg, -EADDRINUSE, "%s: another process listens there", path);
        }
        if (unlink(path) && errno != ENOENT) {
            return bl_err_code(msg, -errno, "remove %s", path);
        }
    }
    int fd = unix_socket(msg);
    if (fd < 0) {
        return fd;
    }
    /* The mode must be right from birth; fchmod before bind gives the file this mode on Linux. */
    if (fchmod(fd, 0600) || bind(fd, (struct sockaddr *)&address, sizeof(address)) ||
        chmod(path, 0600) || listen(fd, SOCK_BACKLOG)) {
        rc = -errno;
        close(fd);
        return bl_err_code(msg, rc, "listen at %s", path);
    }
    return fd;
}

int wire_unix_peer_check(int fd, struct bl_errmsg *msg)
{
    struct ucred peer;
    socklen_t bytes = sizeof(peer);
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes)) {
        return bl_err_code(msg, -errno, "peer credentials");
    }
    uid_t own = geteuid();
    if (peer.uid != own && peer.uid != 0) {
        return bl_err(msg, -EPERM, "process %d of uid %u; this socket belongs to uid %u",
                      (int)peer.pid, peer.uid, own);
    }
    return 0;
}

/* ---- TCP ---- */

struct tcp_address {
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    };
    socklen_t bytes;
};

/* Splits "host:port" or "[host]:port". */
static int tcp_split(const char *addr, char host[WIRE_ADDR_MAX], uint16_t *ret_port,
                     struct bl_errmsg *msg)
{
    const char *colon = strrchr(addr, ':');
    const char *begin = addr;
    const char *end = colon;
    if (colon && *addr == '[') {
        begin = addr + 1;
        end = colon > addr && colon[-1] == ']' ? colon - 1 : NULL;
    }
    char *rest = NULL;
    errno = 0;
    unsigned long port = colon ? strtoul(colon + 1, &rest, 10) : 0;
    if (!colon || !end || end <= begin || (size_t)(end - begin) >= WIRE_ADDR_MAX ||
        colon[1] < '0' || colon[1] > '9' || *rest || errno || port > 65535) {
        return bl_err(msg, BL_EFORMAT, "\"%s\" is not ADDRESS:PORT", addr);
    }
    memcpy(host, begin, (size_t)(end - begin));
    host[end - begin] = 0;
    *ret_port = (uint16_t)port;
    return 0;
}

static int tcp_parse(const char *addr, struct tcp_address *ret, struct bl_errmsg *msg)
{
    char host[WIRE_ADDR_MAX];
    uint16_t port;
    int rc = tcp_split(addr, host, &port, msg);
    if (rc) {
        return rc;
    }
    memset(ret, 0, sizeof(*ret));
    if (!strcmp(host, "localhost")) {
        memcpy(host, "127.0.0.1", sizeof("127.0.0.1"));
    }
    int loopback;
    if (inet_pton(AF_INET, host, &ret->v4.sin_addr) == 1) {
        ret->v4.sin_family = AF_INET;
        ret->v4.sin_port = htons(port);
        ret->bytes = sizeof(ret->v4);
        loopback = (ntohl(ret->v4.sin_addr.s_addr) >> 24) == 127;
    } else if (inet_pton(AF_INET6, host, &ret->v6.sin6_addr) == 1) {
        ret->v6.sin6_family = AF_INET6;
        ret->v6.sin6_port = htons(port);
        ret->bytes = sizeof(ret->v6);
        loopback = IN6_IS_ADDR_LOOPBACK(&ret->v6.sin6_addr);
    } else {
        return bl_err(msg, BL_EFORMAT, "\"%s\" is not ADDRESS:PORT", addr);
    }
    return loopback ? 0
                    : bl_err(msg, BL_ECONFIG,
                             "%s is not a loopback address: this version speaks TCP without TLS, "
                             "hence on 127.0.0.1 only; TLS between machines comes later",
                             addr);
}

int wire_tcp_addr_check(const char *addr, struct bl_errmsg *msg)
{
    struct tcp_address address;
    return tcp_parse(addr, &address, msg);
}

static void tcp_no_delay(int fd)
{
    int on = 1;
    BL_IGNORE(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)),
              "slower, but correct; and on a UNIX socket it cannot be set");
}

static void tcp_format(const struct tcp_address *address, char out[WIRE_ADDR_MAX])
{
    char host[INET6_ADDRSTRLEN] = "";
    if (address->any.sa_family == AF_INET) {
        inet_ntop(AF_INET, &address->v4.sin_addr, host, sizeof(host));
        snprintf(out, WIRE_ADDR_MAX, "%s:%u", host, ntohs(address->v4.sin_port));
    } else {
        inet_ntop(AF_INET6, &address->v6.sin6_addr, host, sizeof(host));
        snprintf(out, WIRE_ADDR_MAX, "[%s]:%u", host, ntohs(address->v6.sin6_port));
    }
}

int wire_tcp_listen(const char *addr, char ret_addr[WIRE_ADDR_MAX], struct bl_errmsg *msg)
{
    struct tcp_address address;
    int rc = tcp_parse(addr, &address, msg);
    if (rc) {
        return rc;
    }
    int fd = socket(address.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        return bl_err_code(msg, -errno, "socket");
    }
    int on = 1;
    BL_IGNORE(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)),
              "then a port in TIME_WAIT is an error of bind, which is reported");
    if (bind(fd, &address.any, address.bytes) || listen(fd, SOCK_BACKLOG) ||
        getsockname(fd, &address.any, &address.bytes)) {
        rc = -errno;
        close(fd);
        return bl_err_code(msg, rc, "listen at %s", addr);
    }
    if (ret_addr) {
        tcp_format(&address, ret_addr);
    }
    return fd;
}

int wire_tcp_connect_begin(const char *addr, struct bl_errmsg *msg)
{
    struct tcp_address address;
    int rc = tcp_parse(addr, &address, msg);
    if (rc) {
        return rc;
    }
    int fd = socket(address.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        return bl_err_code(msg, -errno, "socket");
    }
    tcp_no_delay(fd);
    if (connect(fd, &address.any, address.bytes) && errno != EINPROGRESS) {
        rc = -errno;
        close(fd);
        return bl_err_code(msg, rc, "connect to %s", addr);
    }
    return fd;
}

int wire_tcp_connected(int fd)
{
    int error = 0;
    socklen_t bytes = sizeof(error);
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &bytes)) {
        return -errno;
    }
    return -error;
}

int wire_tcp_connect(const char *addr, uint32_t timeout_ms, struct bl_errmsg *msg)
{
    int fd = wire_tcp_connect_begin(addr, msg);
    if (fd < 0) {
        return fd;
    }
    struct pollfd ready = {.fd = fd, .events = POLLOUT};
    int rc;
    do {
        rc = poll(&ready, 1, (int)timeout_ms);
    } while (rc < 0 && errno == EINTR);
    rc = rc > 0 ? wire_tcp_connected(fd) : rc < 0 ? -errno : BL_EDEADLINE;
    if (rc) {
        close(fd);
        return bl_err_code(msg, rc, "connect to %s", addr);
    }
    return fd;
}

int wire_sock_accept(int listener)
{
    int fd;
    do {
        fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    } while (fd < 0 && (errno == EINTR || errno == ECONNABORTED));
    if (fd < 0) {
        return -errno;
    }
    tcp_no_delay(fd);
    return fd;
}
