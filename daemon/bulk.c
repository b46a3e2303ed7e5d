/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Other nodes' ranks read this node's arenas here, and their engines the files of checkpoints that
 * lie in its own roots. Bulk traffic has its own port and threads, so that beats never queue behind
 * it: one thread accepts, each connection has one of its own, which blocks as it likes, within
 * deadlines. What they may read only the loop knows: they ask it.
 *
 *      connection thread --lookup--> loop: run, key, arena -> a duplicate of the memfd --> sendfile
 *                                    loop: run, key, root  -> its path, opened here    --> sendfile
 *
 * A disk that hangs keeps those threads that read from it; so many at most, the others stay for
 * memory.
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
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "daemon/daemon.h"
#include "daemon/engine_client.h"
#include "wire/sock.h"

#define BULK_CONNECTIONS_MAX 64
#define BULK_FILES_MAX       32         /* connections that are at a file */
#define BULK_IDLE_MS         30000      /* a reader that asks nothing for so long is sent away */
#define BULK_SEND_MS         30000      /* without a byte going out: the reader is gone */
#define BULK_QUESTION_MAX    65536u     /* bytes of a hello or a question */
#define BULK_READ_MAX        (1u << 30) /* bytes of one request */

struct lookup { /* on the stack of a connection thread until it is answered */
    struct lookup *next;
    const struct wire_bulk_read *question; /* of memory, or: */
    const struct wire_bulk_file *file;
    int done, rc, fd;
    char root[WIRE_ROOT_MAX]; /* of a file: where the root lies */
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
    uint32_t connections, at_files;
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

static void lookup_root(struct bulk *bulk, struct lookup *lookup)
{
    const struct wire_bulk_file *file = lookup->file;
    struct run *run = run_find(bulk->daemon, file->run);

    lookup->fd = -1;
    if (!run || !core_member_has_file_key(run->member, file->key)) {
        lookup->rc = -EACCES;
        snprintf(lookup->text, sizeof(lookup->text), "no such run or key here");
    } else if (file->root >= run->job->root_count || run->job->roots[file->root].shared) {
        lookup->rc = -ENOENT;
        snprintf(lookup->text, sizeof(lookup->text), "no root of this node's own");
    } else {
        lookup->rc = engine_root_path(bulk->daemon->config.name, run->job->roots[file->root].path,
                                      lookup->root, sizeof(lookup->root));
    }
}

static void on_async(uv_async_t *async)
{
    struct bulk *bulk = async->data;

    pthread_mutex_lock(&bulk->lock);
    for (struct lookup *lookup = bulk->asked; lookup; lookup = lookup->next) {
        if (lookup->file) {
            lookup_root(bulk, lookup);
        } else {
            lookup_answer(bulk, lookup);
        }
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

/* ---- files ---- */

/* A name of letters, digits, '.', '-' and '_' that begins as checkpoints', attempts' and their
 * files do; so it names nothing above or beside them. */
static int name_is_plain(const char *name, const char *const *begins)
{
    int is_one = 0;

    for (; *begins; begins++) {
        is_one |= strncmp(name, *begins, strlen(*begins)) == 0;
    }
    return is_one && name[strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                       "0123456789.-_")] == '\0';
}

static int file_open(const char *root, const struct wire_bulk_file *file, uint64_t *ret_bytes)
{
    static const char *const dirs[] = {"step-", ".step-", NULL};
    static const char *const files[] = {"part-", "manifest.json", NULL};
    struct stat st;

    if (!name_is_plain(file->dir, dirs) || !name_is_plain(file->file, files)) {
        return -EACCES;
    }
    int at = open(root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int dir =
        at < 0 ? -errno : openat(at, file->dir, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);

    dir = at >= 0 && dir < 0 ? -errno : dir;
    if (at >= 0) {
        close(at);
    }
    if (dir < 0) {
        return dir;
    }
    int fd = openat(dir, file->file, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);

    fd = fd < 0 ? -errno : fd;
    close(dir);
    if (fd >= 0 && (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode))) {
        close(fd);
        return -EACCES;
    }
    *ret_bytes = fd >= 0 ? (uint64_t)st.st_size : 0;
    return fd;
}

/* Opens what is asked for; the answer says why not. */
static int file_find(const struct lookup *lookup, struct wire_bulk_data *answer)
{
    const struct wire_bulk_file *file = lookup->file;
    int fd = file_open(lookup->root, file, &answer->file_bytes);

    if (fd < 0) {
        answer->rc = fd == -EACCES ? -EPERM : fd; /* the first means the key */
        snprintf(answer->text, sizeof(answer->text), "%.90s/%.90s: %s", file->dir, file->file,
                 bl_strerror(fd));
    } else if (file->bytes > BULK_READ_MAX || file->offset > answer->file_bytes ||
               file->bytes > answer->file_bytes - file->offset) {
        answer->rc = BL_ELIMIT;
        snprintf(answer->text, sizeof(answer->text), "not within the file");
    }
    return fd;
}

/* Room for one more at a file? */
static int files_enter(struct bulk *bulk)
{
    pthread_mutex_lock(&bulk->lock);
    int is_in = bulk->at_files < BULK_FILES_MAX;

    bulk->at_files += (uint32_t)is_in;
    pthread_mutex_unlock(&bulk->lock);
    return is_in;
}

static void files_leave(struct bulk *bulk)
{
    pthread_mutex_lock(&bulk->lock);
    bulk->at_files--;
    pthread_mutex_unlock(&bulk->lock);
}

static int file_answer(struct reader *reader, struct wire_sock *sock,
                       const struct wire_frame *frame)
{
    struct bulk *bulk = reader->bulk;
    struct wire_bulk_file question;
    struct wire_bulk_data answer = {0};
    struct lookup lookup = {.file = &question};
    int fd = -1;
    int rc = wire_bulk_file_decode(&question, frame->payload, frame->payload_bytes, NULL);

    if (rc != 0) {
        return rc;
    }
    lookup_ask(bulk, &lookup);
    answer.rc = lookup.rc;
    snprintf(answer.text, sizeof(answer.text), "%s", lookup.text);
    int is_in = answer.rc == 0 && files_enter(bulk);

    if (answer.rc == 0 && !is_in) {
        answer.rc = -EBUSY;
        snprintf(answer.text, sizeof(answer.text), "%u read files here already", BULK_FILES_MAX);
    } else if (is_in) {
        fd = file_find(&lookup, &answer);
    }
    answer.bytes = answer.rc ? 0 : question.bytes;
    rc = wire_sock_send(sock, WIRE_TYPE_BULK_DATA, &answer, 0, bulk->daemon->incarnation, NULL, 0,
                        (uint32_t)bl_time_scaled_ms(BULK_SEND_MS), NULL);
    if (rc == 0 && answer.bytes > 0) {
        rc = file_send(sock->fd, fd, question.offset, question.bytes);
    }
    if (fd >= 0) {
        close(fd);
    }
    if (is_in) {
        files_leave(bulk);
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
            rc = frame.type == WIRE_TYPE_BULK_READ   ? read_answer(reader, &sock, &frame)
                 : frame.type == WIRE_TYPE_BULK_FILE ? file_answer(reader, &sock, &frame)
                                                     : BL_EPROTO;
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
