/* SPDX-License-Identifier: Apache-2.0 */
#include "wire/bulk.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/sendfile.h>
#include <unistd.h>

#include "base/clock.h"
#include "wire/sock.h"

#define BULK_SEND_BYTES (4u << 20) /* per connection and round, so that all get their turn */

struct bulk_arena {
    uint64_t run, arena, bytes;
    int fd; /* owned */
};

struct bulk_key {
    uint64_t run, generation, key[2];
};

struct bulk_peer {
    struct wire_sock sock;
    int said_hello;
    int file; /* owned: of the read under way, -1 none */
    off_t offset;
    uint64_t left;
    uint64_t active_ms;
};

struct wire_bulk {
    int listener, wake_fd;
    char node[WIRE_NODE_MAX];
    pthread_t thread;
    struct bulk_peer *peers[WIRE_BULK_PEERS_MAX]; /* the thread's alone */
    uint32_t peer_count;

    pthread_mutex_t lock; /* of everything below */
    int quit;
    struct bulk_arena *arenas; /* owned */
    uint32_t arena_count, arena_capacity;
    struct bulk_key keys[WIRE_BULK_RUNS_MAX];
    uint32_t key_count;
};

/* ---- what is offered ---- */

static struct bulk_arena *arena_find(struct wire_bulk *bulk, uint64_t run, uint64_t arena)
{
    for (uint32_t i = 0; i < bulk->arena_count; i++) {
        if (bulk->arenas[i].arena == arena && bulk->arenas[i].run == run) {
            return &bulk->arenas[i];
        }
    }
    return NULL;
}

static int arena_room(struct wire_bulk *bulk)
{
    if (bulk->arena_count < bulk->arena_capacity) {
        return 0;
    }
    uint32_t capacity = bulk->arena_capacity ? bulk->arena_capacity * 2 : 16;
    if (capacity > WIRE_BULK_ARENAS_MAX) {
        return BL_ELIMIT;
    }
    struct bulk_arena *grown = realloc(bulk->arenas, capacity * sizeof(*grown));
    if (!grown) {
        return -ENOMEM;
    }
    bulk->arenas = grown;
    bulk->arena_capacity = capacity;
    return 0;
}

int wire_bulk_arena_add(struct wire_bulk *bulk, uint64_t run, uint64_t arena, int fd,
                        uint64_t bytes)
{
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (copy < 0) {
        return -errno;
    }
    pthread_mutex_lock(&bulk->lock);
    int rc = arena_find(bulk, run, arena) ? -EEXIST : arena_room(bulk);
    if (!rc) {
        bulk->arenas[bulk->arena_count++] =
            (struct bulk_arena){.run = run, .arena = arena, .bytes = bytes, .fd = copy};
    }
    pthread_mutex_unlock(&bulk->lock);
    if (rc) {
        close(copy);
    }
    return rc == -EEXIST ? 0 : rc;
}

void wire_bulk_arena_remove(struct wire_bulk *bulk, uint64_t run, uint64_t arena)
{
    pthread_mutex_lock(&bulk->lock);
    struct bulk_arena *found = arena_find(bulk, run, arena);
    if (found) {
        close(found->fd);
        *found = bulk->arenas[--bulk->arena_count];
    }
    pthread_mutex_unlock(&bulk->lock);
}

int wire_bulk_key_set(struct wire_bulk *bulk, uint64_t run, uint64_t generation,
                      const uint64_t key[2])
{
    int rc = 0;
    uint32_t i = 0;
    pthread_mutex_lock(&bulk->lock);
    while (i < bulk->key_count && bulk->keys[i].run != run) {
        i++;
    }
    if (i == WIRE_BULK_RUNS_MAX) {
        rc = BL_ELIMIT;
    } else if (!generation) {
        if (i < bulk->key_count) {
            bulk->keys[i] = bulk->keys[--bulk->key_count];
        }
    } else {
        bulk->keys[i] = (struct bulk_key){run, generation, {key[0], key[1]}};
        bulk->key_count += i == bulk->key_count;
    }
    pthread_mutex_unlock(&bulk->lock);
    return rc;
}

/* ---- one connection ---- */

static int key_fits(const struct wire_bulk *bulk, const struct wire_bulk_read *question)
{
    for (uint32_t i = 0; i < bulk->key_count; i++) {
        const struct bulk_key *key = &bulk->keys[i];
        if (key->run == question->run) {
            return key->generation == question->generation && key->key[0] == question->key[0] &&
                   key->key[1] == question->key[1];
        }
    }
    return 0;
}

/* Looks the question up; with rc 0 the peer's read is begun. */
static void read_begin(struct wire_bulk *bulk, struct bulk_peer *peer,
                       const struct wire_bulk_read *question, struct wire_bulk_data *answer)
{
    pthread_mutex_lock(&bulk->lock);
    const struct bulk_arena *arena = arena_find(bulk, question->run, question->arena);
    if (!key_fits(bulk, question)) {
        answer->rc = BL_EGEN;
        snprintf(answer->text, sizeof(answer->text), "generation %llu is not in force here",
                 (unsigned long long)question->generation);
    } else if (!arena) {
        answer->rc = -ENOENT;
        snprintf(answer->text, sizeof(answer->text), "no arena %016llx on %s",
                 (unsigned long long)question->arena, bulk->node);
    } else if (question->bytes > arena->bytes ||
               question->offset > arena->bytes - question->bytes) {
        answer->rc = -EINVAL;
        snprintf(answer->text, sizeof(answer->text), "arena %016llx has %llu bytes",
                 (unsigned long long)question->arena, (unsigned long long)arena->bytes);
    } else {
        peer->file = fcntl(arena->fd, F_DUPFD_CLOEXEC, 3);
        answer->rc = peer->file < 0 ? -errno : 0;
    }
    pthread_mutex_unlock(&bulk->lock);
    if (!answer->rc) {
        answer->bytes = question->bytes;
        peer->offset = (off_t)question->offset;
        peer->left = question->bytes;
    }
}

static int peer_frame(struct wire_bulk *bulk, struct bulk_peer *peer,
                      const struct wire_frame *frame)
{
    if (!peer->said_hello) {
        struct wire_hello hello;
        int rc = frame->type == WIRE_TYPE_HELLO
                     ? wire_hello_decode(&hello, frame->payload, frame->payload_bytes, NULL)
                     : BL_EPROTO;
        if (rc) {
            return rc;
        }
        rc = hello.role == WIRE_ROLE_BULK ? 0 : BL_EPROTO;
        wire_hello_free(&hello);
        struct wire_hello answer = {.version = WIRE_FRAME_VERSION, .role = WIRE_ROLE_BULK};
        snprintf(answer.build, sizeof(answer.build), "%s", BELAY_VERSION);
        memcpy(answer.node, bulk->node, sizeof(answer.node));
        peer->said_hello = 1;
        return rc ? rc : wire_sock_post(&peer->sock, WIRE_TYPE_HELLO, &answer, 0, 0, NULL);
    }
    struct wire_bulk_read question;
    struct wire_bulk_data answer = {0};
    int rc = frame->type == WIRE_TYPE_BULK_READ
                 ? wire_bulk_read_decode(&question, frame->payload, frame->payload_bytes, NULL)
                 : BL_EPROTO;
    if (!rc) {
        read_begin(bulk, peer, &question, &answer);
        rc =
            wire_sock_post(&peer->sock, WIRE_TYPE_BULK_DATA, &answer, question.generation, 0, NULL);
    }
    return rc;
}

/* Sends the answer's head, then bytes of the read under way. */
static int peer_write(struct bulk_peer *peer)
{
    int rc = wire_sock_flush(&peer->sock);
    uint64_t budget = BULK_SEND_BYTES;
    while (!rc && peer->file >= 0 && peer->left && budget) {
        size_t want = peer->left < budget ? (size_t)peer->left : (size_t)budget;
        ssize_t sent = sendfile(peer->sock.fd, peer->file, &peer->offset, want);
        if (sent > 0) {
            peer->left -= (uint64_t)sent;
            budget -= (uint64_t)sent;
        } else if (sent < 0 && errno == EINTR) {
            continue;
        } else if (sent < 0 && errno == EAGAIN) {
            break;
        } else {
            return sent < 0 ? -errno : BL_EPROTO;
        }
    }
    if (rc >= 0 && peer->file >= 0 && !peer->left) {
        close(peer->file);
        peer->file = -1;
    }
    return rc < 0 ? rc : 0;
}

/* Questions come one at a time: the next one is looked at when the last answer is out. */
static int peer_serve(struct wire_bulk *bulk, struct bulk_peer *peer, short revents)
{
    int rc = peer_write(peer);
    if (!rc && (revents & (POLLIN | POLLHUP | POLLERR)) && peer->file < 0) {
        rc = wire_sock_read(&peer->sock);
    }
    while (rc >= 0 && peer->file < 0) {
        struct wire_frame frame;
        rc = wire_sock_next(&peer->sock, &frame, NULL);
        if (rc <= 0) {
            break;
        }
        rc = peer_frame(bulk, peer, &frame);
        if (!rc) {
            rc = peer_write(peer);
        }
    }
    return rc < 0 ? rc : 0;
}

/* ---- the thread ---- */

static void peer_close(struct wire_bulk *bulk, uint32_t index)
{
    struct bulk_peer *peer = bulk->peers[index];
    if (peer->file >= 0) {
        close(peer->file);
    }
    wire_sock_close(&peer->sock);
    free(peer);
    bulk->peers[index] = bulk->peers[--bulk->peer_count];
}

static void peers_accept(struct wire_bulk *bulk, uint64_t now_ms)
{
    int fd;
    while ((fd = wire_sock_accept(bulk->listener)) >= 0) {
        struct bulk_peer *peer =
            bulk->peer_count < WIRE_BULK_PEERS_MAX ? calloc(1, sizeof(*peer)) : NULL;
        if (!peer) {
            close(fd);
            continue;
        }
        wire_sock_init(&peer->sock, fd);
        wire_decoder_close(&peer->sock.decoder);
        wire_decoder_init(&peer->sock.decoder, WIRE_FRAME_PAYLOAD_MAX);
        peer->file = -1;
        peer->active_ms = now_ms;
        bulk->peers[bulk->peer_count++] = peer;
    }
}

static nfds_t poll_fill(const struct wire_bulk *bulk, struct pollfd *fds)
{
    fds[0] = (struct pollfd){.fd = bulk->wake_fd, .events = POLLIN};
    fds[1] = (struct pollfd){.fd = bulk->listener, .events = POLLIN};
    for (uint32_t i = 0; i < bulk->peer_count; i++) {
        const struct bulk_peer *peer = bulk->peers[i];
        int writing = peer->file >= 0 || peer->sock.out_done < peer->sock.out_bytes;
        fds[2 + i] = (struct pollfd){.fd = peer->sock.fd, .events = writing ? POLLOUT : POLLIN};
    }
    return 2 + bulk->peer_count;
}

static void *bulk_main(void *arg)
{
    struct wire_bulk *bulk = arg;
    struct pollfd fds[2 + WIRE_BULK_PEERS_MAX];
    for (int quit = 0; !quit;) {
        nfds_t count = poll_fill(bulk, fds);
        if (poll(fds, count, 1000) < 0) {
            continue;
        }
        uint64_t now_ms = bl_now_ns() / 1000000;
        for (uint32_t i = (uint32_t)count - 2; i > 0; i--) {
            struct bulk_peer *peer = bulk->peers[i - 1];
            int rc = fds[1 + i].revents ? peer_serve(bulk, peer, fds[1 + i].revents) : 0;
            peer->active_ms = fds[1 + i].revents ? now_ms : peer->active_ms;
            if (rc || now_ms - peer->active_ms > WIRE_BULK_IDLE_MS) {
                peer_close(bulk, i - 1);
            }
        }
        peers_accept(bulk, now_ms);
        pthread_mutex_lock(&bulk->lock);
        quit = bulk->quit;
        pthread_mutex_unlock(&bulk->lock);
    }
    return NULL;
}

static void bulk_free(struct wire_bulk *bulk)
{
    while (bulk->peer_count) {
        peer_close(bulk, bulk->peer_count - 1);
    }
    for (uint32_t i = 0; i < bulk->arena_count; i++) {
        close(bulk->arenas[i].fd);
    }
    if (bulk->listener >= 0) {
        close(bulk->listener);
    }
    if (bulk->wake_fd >= 0) {
        close(bulk->wake_fd);
    }
    pthread_mutex_destroy(&bulk->lock);
    free(bulk->arenas);
    free(bulk);
}

int wire_bulk_start(struct wire_bulk **ret, const char *addr, const char *node,
                    char ret_addr[WIRE_ADDR_MAX], struct bl_errmsg *msg)
{
    struct wire_bulk *bulk = calloc(1, sizeof(*bulk));
    if (!bulk) {
        return bl_err(msg, -ENOMEM, "out of memory for the bulk server");
    }
    pthread_mutex_init(&bulk->lock, NULL);
    snprintf(bulk->node, sizeof(bulk->node), "%s", node);
    bulk->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    bulk->listener = wire_tcp_listen(addr, ret_addr, msg);
    int rc = bulk->listener < 0  ? bulk->listener
             : bulk->wake_fd < 0 ? bl_err_code(msg, -EMFILE, "eventfd")
                                 : 0;
    if (!rc) {
        sigset_t all;
        sigset_t old;
        sigfillset(&all); /* signals stay with the program's own threads */
        pthread_sigmask(SIG_SETMASK, &all, &old);
        rc = pthread_create(&bulk->thread, NULL, bulk_main, bulk);
        pthread_sigmask(SIG_SETMASK, &old, NULL);
        rc = rc ? bl_err_code(msg, -rc, "start the bulk server's thread") : 0;
    }
    if (rc) {
        bulk_free(bulk);
        return rc;
    }
    *ret = bulk;
    return 0;
}

void wire_bulk_stop(struct wire_bulk *bulk)
{
    if (!bulk) {
        return;
    }
    uint64_t one = 1;
    pthread_mutex_lock(&bulk->lock);
    bulk->quit = 1;
    pthread_mutex_unlock(&bulk->lock);
    BL_IGNORE(write(bulk->wake_fd, &one, sizeof(one)) < 0, "then it sees it within a second");
    pthread_join(bulk->thread, NULL);
    bulk_free(bulk);
}
