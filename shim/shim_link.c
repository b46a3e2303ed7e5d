/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The shim's socket. A client is a daemon of the same user (or root): Hello both ways, then attach,
 * which is answered by the state with all descriptors. Every attached client is told of each
 * change. A client that does not read is dropped: nothing here may hold the loop up.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "shim/shim.h"
#include "wire/codec.h"

struct shim_client {
    int fd;
    struct wire_decoder decoder;
    int fds[WIRE_FDS_MAX]; /* came, not yet taken */
    uint32_t fd_count;
    int greeted, attached;
    uint64_t came; /* in which order they came */
};

static uint64_t env_hex(const char *name)
{
    const char *text = getenv(name);

    return text ? strtoull(text, NULL, 16) : 0;
}

static void client_close(struct shim *shim, uint32_t index)
{
    struct shim_client *client = shim->clients[index];

    if (!client) {
        return;
    }
    for (uint32_t i = 0; i < client->fd_count; i++) {
        close(client->fds[i]);
    }
    wire_decoder_close(&client->decoder);
    close(client->fd);
    free(client);
    shim->clients[index] = NULL;
}

/* Sends at once or gives up: messages are small, a socket that is full has a dead reader. */
static int client_send(struct shim *shim, struct shim_client *client, enum wire_type type,
                       const void *message, const int *fds, uint32_t fd_count)
{
    uint8_t *bytes = NULL;
    size_t count = 0, sent = 0;
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int) * WIRE_FDS_MAX)];
    } control;
    int rc = wire_message_frame(type, message, 0, shim->options.incarnation, &bytes, &count, NULL);

    while (rc == 0 && sent < count) {
        struct iovec iov = {bytes + sent, count - sent};
        struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};

        if (sent == 0 && fd_count > 0) {
            msg.msg_control = control.bytes;
            msg.msg_controllen = CMSG_SPACE(sizeof(int) * fd_count);
            struct cmsghdr *cmsg = CMSG_FIRSTHDR(&msg);

            cmsg->cmsg_level = SOL_SOCKET;
            cmsg->cmsg_type = SCM_RIGHTS;
            cmsg->cmsg_len = CMSG_LEN(sizeof(int) * fd_count);
            memcpy(CMSG_DATA(cmsg), fds, sizeof(int) * fd_count);
        }
        ssize_t n = sendmsg(client->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);

        if (n < 0 && errno != EINTR) {
            rc = -errno;
        } else if (n > 0) {
            sent += (size_t)n;
        }
    }
    free(bytes);
    return rc;
}

static void state_fill(const struct shim *shim, struct wire_shim_state *state, int *fds,
                       uint32_t *fd_count)
{
    const char *rank = getenv("BELAY_RANK");

    state->run = env_hex("BELAY_RUN");
    state->incarnation = shim->options.incarnation;
    state->rank = rank ? (uint32_t)strtoul(rank, NULL, 10) : 0;
    state->shim_pid = (uint32_t)getpid();
    state->pid = (uint32_t)shim->pid;
    state->exited = (uint32_t)shim->exit.known;
    state->exit.code = shim->exit.code;
    state->exit.signal = shim->exit.signal;
    state->exit.core = shim->exit.core;
    state->exit.by_us = shim->exit.by_us;
    state->suspected = (uint32_t)shim->suspected;
    state->started_ms = shim_now_ms() - shim->started_ms;
    state->log_bytes = shim->log_bytes;
    state->log_dropped = shim_log_dropped(shim->log);
    fds[(*fd_count)++] = shim->options.page_fd;
    state->page_fd_index = 0;
    for (uint32_t i = 0; i < shim->keep_count; i++) {
        state->arenas[i].arena = shim->keeps[i].arena;
        state->arenas[i].fd_index = *fd_count;
        fds[(*fd_count)++] = shim->keeps[i].fd;
    }
    state->arena_count = shim->keep_count;
}

/* The state without descriptors goes to those attached; `with` also gets the descriptors. */
static int state_send(struct shim *shim, struct shim_client *client)
{
    struct wire_shim_state state = {0};
    int fds[WIRE_FDS_MAX];
    uint32_t fd_count = 0;

    state_fill(shim, &state, fds, &fd_count);
    return client_send(shim, client, WIRE_TYPE_SHIM_STATE, &state, fds, fd_count);
}

static void push_all(struct shim *shim, enum wire_type type, const void *message)
{
    for (uint32_t i = 0; i < SHIM_CLIENTS_MAX; i++) {
        struct shim_client *client = shim->clients[i];

        if (client && client->attached && client_send(shim, client, type, message, NULL, 0) != 0) {
            client_close(shim, i);
        }
    }
}

void shim_link_push_suspect(struct shim *shim)
{
    for (uint32_t i = 0; i < SHIM_CLIENTS_MAX; i++) {
        struct shim_client *client = shim->clients[i];

        if (client && client->attached && state_send(shim, client) != 0) {
            client_close(shim, i);
        }
    }
}

void shim_link_push_exit(struct shim *shim)
{
    struct wire_shim_exit ex = {
        .incarnation = shim->options.incarnation,
        .pid = (uint32_t)shim->pid,
        .exit = {shim->exit.code, shim->exit.signal, shim->exit.core, shim->exit.by_us},
        .log_bytes = shim->log_bytes,
        .log_dropped = shim_log_dropped(shim->log)};

    push_all(shim, WIRE_TYPE_SHIM_EXIT, &ex);
}

void shim_link_push_stacked(struct shim *shim, int rc, const char *text)
{
    struct wire_shim_stacked stacked = {.rc = rc};

    snprintf(stacked.text, sizeof(stacked.text), "%s", text ? text : "");
    push_all(shim, WIRE_TYPE_SHIM_STACKED, &stacked);
}

/* ---- what a client asks ---- */

static int take_fd(struct shim_client *client)
{
    if (client->fd_count == 0) {
        return -1;
    }
    int fd = client->fds[0];

    client->fd_count--;
    memmove(client->fds, client->fds + 1, client->fd_count * sizeof(int));
    return fd;
}

static struct shim_keep *keep_find(struct shim *shim, uint64_t arena)
{
    for (uint32_t i = 0; i < shim->keep_count; i++) {
        if (shim->keeps[i].arena == arena) {
            return &shim->keeps[i];
        }
    }
    return NULL;
}

static int on_keep(struct shim *shim, struct shim_client *client, const struct wire_frame *frame)
{
    struct wire_shim_keep keep;
    struct wire_shim_kept kept = {0};
    int rc = wire_shim_keep_decode(&keep, frame->payload, frame->payload_bytes, NULL);

    if (rc != 0) {
        return rc;
    }
    struct shim_keep *there = keep_find(shim, keep.arena);
    int fd = keep.drop ? -1 : take_fd(client);

    kept.arena = keep.arena;
    if (keep.drop) {
        if (there) {
            close(there->fd);
            *there = shim->keeps[--shim->keep_count];
        }
    } else if (fd < 0) {
        kept.rc = BL_EPROTO;
    } else if (there) {
        close(fd);
    } else if (shim->keep_count == SHIM_KEEP_MAX) {
        close(fd);
        kept.rc = BL_ELIMIT;
        snprintf(kept.text, sizeof(kept.text), "%d arenas are kept already", SHIM_KEEP_MAX);
    } else {
        shim->keeps[shim->keep_count].arena = keep.arena;
        shim->keeps[shim->keep_count++].fd = fd;
    }
    return client_send(shim, client, WIRE_TYPE_SHIM_KEPT, &kept, NULL, 0);
}

static int on_hello(struct shim *shim, struct shim_client *client)
{
    struct wire_hello hello = {.version = WIRE_FRAME_VERSION,
                               .role = WIRE_ROLE_SHIM,
                               .run = env_hex("BELAY_RUN"),
                               .incarnation = shim->options.incarnation,
                               .pid = (uint32_t)getpid()};

    snprintf(hello.build, sizeof(hello.build), "%s", BELAY_VERSION);
    client->greeted = 1;
    return client_send(shim, client, WIRE_TYPE_HELLO, &hello, NULL, 0);
}

static int on_attach(struct shim *shim, struct shim_client *client, const struct wire_frame *frame)
{
    struct wire_shim_attach attach;
    struct wire_shim_state refusal = {.rc = BL_EFOREIGN};
    int rc = wire_shim_attach_decode(&attach, frame->payload, frame->payload_bytes, NULL);

    if (rc != 0) {
        return rc;
    }
    if (attach.incarnation != 0 && attach.incarnation != shim->options.incarnation) {
        snprintf(refusal.text, sizeof(refusal.text), "this shim belongs to another incarnation");
        return client_send(shim, client, WIRE_TYPE_SHIM_STATE, &refusal, NULL, 0);
    }
    client->attached = 1;
    return state_send(shim, client);
}

static void on_kill(struct shim *shim)
{
    shim->killed = 1;
    if (shim->stacks_pid != 0) {
        shim->kill_after_stacks = 1; /* within the stacks' deadline */
    } else {
        shim_rank_kill(shim);
    }
}

static int on_release(struct shim *shim, const struct wire_frame *frame)
{
    struct wire_shim_release release;
    int rc = wire_shim_release_decode(&release, frame->payload, frame->payload_bytes, NULL);

    if (rc == 0) {
        shim->released = 1;
        if (release.kill) {
            on_kill(shim);
        }
    }
    return rc;
}

static int on_frame(struct shim *shim, struct shim_client *client, const struct wire_frame *frame)
{
    if (frame->type == WIRE_TYPE_HELLO) {
        return on_hello(shim, client);
    }
    if (!client->greeted) {
        return BL_EPROTO;
    }
    switch ((enum wire_type)frame->type) {
    case WIRE_TYPE_SHIM_ATTACH:
        return on_attach(shim, client, frame);
    case WIRE_TYPE_SHIM_KEEP:
        return client->attached ? on_keep(shim, client, frame) : BL_EPROTO;
    case WIRE_TYPE_SHIM_KILL:
        if (client->attached) {
            on_kill(shim);
        }
        return client->attached ? 0 : BL_EPROTO;
    case WIRE_TYPE_SHIM_STACKS:
        if (client->attached) {
            shim_stacks_begin(shim, 0);
        }
        return client->attached ? 0 : BL_EPROTO;
    case WIRE_TYPE_SHIM_RELEASE:
        return client->attached ? on_release(shim, frame) : BL_EPROTO;
    default:
        return frame->flags & WIRE_FRAME_SKIP ? 0 : BL_EPROTO;
    }
}

/* ---- the socket ---- */

static int client_receive(struct shim_client *client)
{
    size_t space;
    uint8_t *at = wire_decoder_space(&client->decoder, 16384, &space);
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int) * WIRE_FDS_MAX)];
    } control;

    if (!at) {
        return -ENOMEM;
    }
    struct iovec iov = {at, space};
    struct msghdr msg = {.msg_iov = &iov,
                         .msg_iovlen = 1,
                         .msg_control = control.bytes,
                         .msg_controllen = sizeof(control.bytes)};
    ssize_t n = recvmsg(client->fd, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

    if (n < 0) {
        return errno == EAGAIN || errno == EINTR ? 0 : -errno;
    }
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c)) {
        size_t count = c->cmsg_type == SCM_RIGHTS ? (c->cmsg_len - CMSG_LEN(0)) / sizeof(int) : 0;

        for (size_t i = 0; i < count; i++) {
            int fd;

            memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
            if (client->fd_count < WIRE_FDS_MAX) {
                client->fds[client->fd_count++] = fd;
            } else {
                close(fd);
            }
        }
    }
    wire_decoder_filled(&client->decoder, (size_t)n);
    return n == 0 ? -EPIPE : 0;
}

void shim_link_event(struct shim *shim, uint32_t index, short events)
{
    struct shim_client *client = shim->clients[index];
    struct wire_frame frame;
    struct bl_errmsg msg = {{0}};

    if (!client || !events) {
        return;
    }
    int rc = client_receive(client), got = 1;

    while (got == 1) {
        got = wire_decoder_next(&client->decoder, &frame, &msg);
        if (got == 1) {
            int bad = on_frame(shim, client, &frame);

            if (bad != 0) {
                got = bad;
            }
        }
    }
    if (rc < 0 || got < 0) {
        client_close(shim, index);
    }
}

/* A free place. A daemon must always find one: the oldest that has not attached makes room, else
 * the oldest. */
static uint32_t client_place(struct shim *shim)
{
    uint32_t best = 0;

    for (uint32_t i = 0; i < SHIM_CLIENTS_MAX; i++) {
        const struct shim_client *client = shim->clients[i], *other = shim->clients[best];

        if (!client) {
            return i;
        }
        if (client->attached < other->attached ||
            (client->attached == other->attached && client->came < other->came)) {
            best = i;
        }
    }
    client_close(shim, best);
    return best;
}

void shim_link_accept(struct shim *shim)
{
    struct ucred peer;
    socklen_t bytes = sizeof(peer);
    int fd = accept4(shim->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

    if (fd < 0) {
        return;
    }
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0 ||
        (peer.uid != geteuid() && peer.uid != 0)) {
        close(fd);
        return;
    }
    uint32_t at = client_place(shim);

    shim->clients[at] = calloc(1, sizeof(struct shim_client));
    if (!shim->clients[at]) {
        close(fd);
        return;
    }
    shim->clients[at]->fd = fd;
    shim->clients[at]->came = ++shim->client_count;
    wire_decoder_init(&shim->clients[at]->decoder, 65536);
}

/* A socket's path has 107 bytes at most; longer ones go through the directory's descriptor. */
static int path_fit(const char *path, struct sockaddr_un *addr, int *ret_dir)
{
    char dir[1024];
    const char *slash = strrchr(path, '/');

    addr->sun_family = AF_UNIX;
    *ret_dir = -1;
    if (strlen(path) < sizeof(addr->sun_path)) {
        snprintf(addr->sun_path, sizeof(addr->sun_path), "%s", path);
        return 0;
    }
    if (!slash || (size_t)(slash - path) >= sizeof(dir)) {
        return -ENAMETOOLONG;
    }
    snprintf(dir, sizeof(dir), "%.*s", (int)(slash - path), path);
    *ret_dir = open(dir, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (*ret_dir < 0) {
        return -errno;
    }
    int n = snprintf(addr->sun_path, sizeof(addr->sun_path), "/proc/self/fd/%d/%s", *ret_dir,
                     slash + 1);

    return n < (int)sizeof(addr->sun_path) ? 0 : -ENAMETOOLONG;
}

int shim_link_listen(struct shim *shim, struct bl_errmsg *msg)
{
    struct sockaddr_un addr = {0};
    const char *path = shim->options.socket_path;
    int dir, rc = path_fit(path, &addr, &dir);

    if (rc == 0) {
        unlink(addr.sun_path);
        shim->listen_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        mode_t old = umask(0177);

        if (shim->listen_fd < 0 ||
            bind(shim->listen_fd, (struct sockaddr *)&addr, sizeof(addr)) != 0 ||
            listen(shim->listen_fd, 8) != 0) {
            rc = -errno;
        }
        umask(old);
    }
    if (dir >= 0) {
        close(dir);
    }
    return rc ? bl_err_code(msg, rc, "listen on %s", path) : 0;
}

uint32_t shim_link_poll(struct shim *shim, struct pollfd *fds, uint32_t *ret_index)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < SHIM_CLIENTS_MAX; i++) {
        if (shim->clients[i]) {
            fds[count].fd = shim->clients[i]->fd;
            fds[count].events = POLLIN;
            ret_index[count++] = i;
        }
    }
    return count;
}

void shim_link_close(struct shim *shim)
{
    for (uint32_t i = 0; i < SHIM_CLIENTS_MAX; i++) {
        client_close(shim, i);
    }
    unlink(shim->options.socket_path);
}
