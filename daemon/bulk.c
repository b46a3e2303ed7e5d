/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Other nodes' ranks read this node's arenas here. Bulk traffic has its own port and threads, so
 * that beats never queue behind it: one thread accepts, each connection has one of its own, which
 * blocks as it likes, within deadlines. What they may read only the loop knows: they ask it.
 *
 *      connection thread --lookup--> loop: run, key, arena -> a duplicate of the memfd --> sendfile
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/sendfile.h>
#include <unistd.h>

#include "base/log.h"
#include "daemon/daemon.h"
#include "wire/sock.h"

#define BULK_CONNECTIONS_MAX 64
#define BULK_IDLE_MS         30000      /* a reader that asks nothing for so long is sent away */
#define BULK_SEND_MS         30000      /* without a byte going out: the reader is gone */
#define BULK_QUESTION_MAX    65536u     /* bytes of a hello or a question */
#define BULK_READ_MAX        (1u << 30) /* bytes of one request */

struct lookup { /* on the stack of a connection thread until it is answered */
    struct lookup *next;
    const struct wire_bulk_read *question;
    int done, rc, fd;
    char text[128];
};

struct bulk {
    struct daemon *daemon;
    int listen_fd, stop_fd;
    pthread_t thread;
    uv_async_t *async;
    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t answered, left;
    struct lookup *asked;
    uint32_t connections;
    int stopping;
};

struct reader { /* one connection */
    struct bulk *bulk;
    int fd;
};

/* ---- the loop's side ---- */

static void lookup_answer(struct bulk *bulk, struct lookup *lookup)
{
    const struct wire_bulk_read *question = lookup->question;
    struct run *run = run_find(bulk->daemon, question->run);
    struct arena *arena = run ? arena_find(run, question->arena) : NULL;

    lookup->fd = -1;
    if (!run || !core_member_has_key(run->member, question->generation, question->key)) {
        lookup->rc = -EACCES;
        snprintf(lookup->text, sizeof(lookup->text), "no such run, generation or key here");
    } else if (!arena) {
        lookup->rc = -ENOENT;
        snprintf(lookup->text, sizeof(lookup->text), "no such arena on this node");
    } else if (question->bytes > BULK_READ_MAX || question->offset > arena->bytes ||
               question->bytes > arena->bytes - question->offset) {
        lookup->rc = BL_ELIMIT;
        snprintf(lookup->text, sizeof(lookup->text), "not within the arena");
    } else {
        lookup->fd = fcntl(arena->fd, F_DUPFD_CLOEXEC, 3);
        lookup->rc = lookup->fd < 0 ? -errno : 0;
    }
}

static void on_async(uv_async_t *async)
{
    struct bulk *bulk = async->data;

    pthread_mutex_lock(&bulk->lock);
    for (struct lookup *lookup = bulk->asked; lookup; lookup = lookup->next) {
        lookup_answer(bulk, lookup);
        lookup->done = 1;
    }
    bulk->asked = NULL;
    pthread_cond_broadcast(&bulk->answered);
    pthread_mutex_unlock(&bulk->lock);
}

/* ---- a connection's thread ---- */

static void lookup_ask(struct bulk *bulk, struct lookup *lookup)
{
    pthread_mutex_lock(&bulk->lock);
    if (!bulk->stopping) {
        lookup->next = bulk->asked;
        bulk->asked = lookup;
        uv_async_send(bulk->async);
    }
    while (!lookup->done && !bulk->stopping) {
        pthread_cond_wait(&bulk->answered, &bulk->lock);
    }
    if (!lookup->done) {
        lookup->rc = BL_EABORTED;
        lookup->fd = -1;
    }
    pthread_mutex_unlock(&bulk->lock);
}

static int file_send(int sock, int fd, uint64_t offset, uint64_t bytes)
{
    off_t at = (off_t)offset;

    while (bytes > 0) {
        ssize_t n = sendfile(sock, fd, &at, bytes);

        if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
            struct pollfd wait = {.fd = sock, .events = POLLOUT};

            if (errno == EAGAIN && poll(&wait, 1, (int)bl_time_scaled_ms(BULK_SEND_MS)) == 0) {
                return BL_EDEADLINE;
            }
            continue;
        }
        if (n <= 0) {
            return n < 0 ? -errno : -EIO;
        }
        bytes -= (uint64_t)n;
    }
    return 0;
}

static int read_answer(struct reader *reader, struct wire_sock *sock,
                       const struct wire_frame *frame)
{
    struct wire_bulk_read question;
    struct wire_bulk_data answer = {0};
    struct lookup lookup = {.question = &question};
    int rc = wire_bulk_read_decode(&question, frame->payload, frame->payload_bytes, NULL);

    if (rc != 0) {
        return rc;
    }
    lookup_ask(reader->bulk, &lookup);
    answer.rc = lookup.rc;
    answer.bytes = lookup.rc ? 0 : question.bytes;
    snprintf(answer.text, sizeof(answer.text), "%s", lookup.text);
    rc = wire_sock_send(sock, WIRE_TYPE_BULK_DATA, &answer, question.generation,
                        reader->bulk->daemon->incarnation, NULL, 0,
                        (uint32_t)bl_time_scaled_ms(BULK_SEND_MS), NULL);
    if (rc == 0 && lookup.fd >= 0) {
        rc = file_send(sock->fd, lookup.fd, question.offset, question.bytes);
    }
    if (lookup.fd >= 0) {
        close(lookup.fd);
    }
    return rc;
}

static int reader_hello(const struct reader *reader, struct wire_sock *sock)
{
    const struct daemon *daemon = reader->bulk->daemon;
    uint32_t wait_ms = (uint32_t)bl_time_scaled_ms(BULK_IDLE_MS);
    struct wire_hello hello;
    int rc = wire_sock_expect(sock, WIRE_TYPE_HELLO, &hello, wait_ms, NULL);

    if (rc != 0) {
        return rc;
    }
    rc = hello.role == WIRE_ROLE_BULK ? 0 : BL_EPROTO;
    wire_hello_free(&hello);
    memset(&hello, 0, sizeof(hello));
    hello.version = WIRE_FRAME_VERSION;
    hello.role = WIRE_ROLE_DAEMON;
    hello.incarnation = daemon->incarnation;
    snprintf(hello.node, sizeof(hello.node), "%s", daemon->config.name);
    snprintf(hello.build, sizeof(hello.build), "%s", BELAY_VERSION);
    return rc ? rc
              : wire_sock_send(sock, WIRE_TYPE_HELLO, &hello, 0, daemon->incarnation, NULL, 0,
                               wait_ms, NULL);
}

static void *reader_main(void *arg)
{
    struct reader *reader = arg;
    struct bulk *bulk = reader->bulk;
    struct wire_sock sock;
    struct wire_frame frame;

    wire_sock_init(&sock, reader->fd);
    wire_decoder_init(&sock.decoder, BULK_QUESTION_MAX);
    int rc = reader_hello(reader, &sock);

    while (rc == 0 && !__atomic_load_n(&bulk->stopping, __ATOMIC_RELAXED)) {
        rc = wire_sock_recv(&sock, &frame, (uint32_t)bl_time_scaled_ms(BULK_IDLE_MS), NULL);
        if (rc == 0) {
            rc = frame.type == WIRE_TYPE_BULK_READ ? read_answer(reader, &sock, &frame) : BL_EPROTO;
        }
    }
    wire_sock_close(&sock);
    free(reader);
    pthread_mutex_lock(&bulk->lock);
    bulk->connections--;
    pthread_cond_signal(&bulk->left);
    pthread_mutex_unlock(&bulk->lock);
    return NULL;
}

static void reader_start(struct bulk *bulk, int fd)
{
    struct reader *reader = calloc(1, sizeof(*reader));
    pthread_t thread;

    pthread_mutex_lock(&bulk->lock);
    int is_full = !reader || bulk->connections >= BULK_CONNECTIONS_MAX;

    bulk->connections += !is_full;
    pthread_mutex_unlock(&bulk->lock);
    if (!is_full) {
        *reader = (struct reader){bulk, fd};
        if (pthread_create(&thread, NULL, reader_main, reader) == 0) {
            pthread_detach(thread);
            return;
        }
        pthread_mutex_lock(&bulk->lock);
        bulk->connections--;
        pthread_mutex_unlock(&bulk->lock);
    }
    bl_log(BL_LOG_WARN, "bulk", "a reader was refused: %u are served already", bulk->connections);
    close(fd);
    free(reader);
}

static void *accept_main(void *arg)
{
    struct bulk *bulk = arg;
    struct pollfd fds[2] = {{.fd = bulk->listen_fd, .events = POLLIN},
                            {.fd = bulk->stop_fd, .events = POLLIN}};

    for (;;) {
        if (poll(fds, 2, -1) < 0 && errno != EINTR) {
            return NULL;
        }
        if (fds[1].revents) {
            return NULL;
        }
        int fd = fds[0].revents ? wire_sock_accept(bulk->listen_fd) : -1;
        struct bl_errmsg msg = {{0}};

        if (fd >= 0 && wire_tcp_peer_check(fd, &msg) != 0) {
            bl_log(BL_LOG_WARN, "bulk", "refused: %s", msg.text);
            close(fd);
        } else if (fd >= 0) {
            reader_start(bulk, fd);
        }
    }
}

/* ---- start and end ---- */

int bulk_open(struct daemon *daemon, struct bl_errmsg *msg)
{
    struct bulk *bulk = calloc(1, sizeof(*bulk));
    int fd = bulk ? wire_tcp_listen(daemon->config.bulk, daemon->bulk_addr, msg) : -ENOMEM;

    if (fd < 0) {
        free(bulk);
        return fd;
    }
    bulk->daemon = daemon;
    bulk->listen_fd = fd;
    bulk->stop_fd = eventfd(0, EFD_CLOEXEC);
    bulk->async = calloc(1, sizeof(*bulk->async));
    BL_ASSERT(bulk->stop_fd >= 0 && bulk->async != NULL);
    pthread_mutex_init(&bulk->lock, NULL);
    pthread_cond_init(&bulk->answered, NULL);
    pthread_cond_init(&bulk->left, NULL);
    uv_async_init(daemon->loop, bulk->async, on_async);
    uv_unref((uv_handle_t *)bulk->async);
    bulk->async->data = bulk;
    BL_ASSERT(pthread_create(&bulk->thread, NULL, accept_main, bulk) == 0);
    daemon->bulk = bulk;
    return 0;
}

/* Connection threads may still be in a send; the process ends anyway, so that nothing of theirs is
 * freed: they only ever touch `bulk` and their own. */
void bulk_close(struct daemon *daemon)
{
    struct bulk *bulk = daemon->bulk;
    uint64_t one = 1;

    if (!bulk) {
        return;
    }
    pthread_mutex_lock(&bulk->lock);
    __atomic_store_n(&bulk->stopping, 1, __ATOMIC_RELAXED);
    pthread_cond_broadcast(&bulk->answered);
    pthread_mutex_unlock(&bulk->lock);
    BL_IGNORE(write(bulk->stop_fd, &one, sizeof(one)) < 0, "an eventfd takes a one");
    pthread_join(bulk->thread, NULL);
    close(bulk->listen_fd);
    daemon->bulk = NULL;
}
