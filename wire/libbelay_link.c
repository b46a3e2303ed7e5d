/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libbelay's connection to its daemon. It breaks when the daemon is restarted; then it is made anew
 * with growing pauses, for ever: ranks train on meanwhile. Everything that was said is said again
 * (the protocol is level-triggered), and questions are asked again.
 */
#include "wire/libbelay.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"

static struct wire_hello hello_make(const struct belay *b)
{
    struct wire_hello hello = {
        .version = WIRE_FRAME_VERSION,
        .role = WIRE_ROLE_RANK,
        .run = b->run,
        .incarnation = b->incarnation,
        .pid = (uint32_t)getpid(),
    };
    snprintf(hello.build, sizeof(hello.build), "%s", BELAY_VERSION);
    snprintf(hello.job, sizeof(hello.job), "%s", b->job_name);
    return hello;
}

/* ---- the first connection ---- */

static int hello_exchange(struct belay *b, struct wire_hello *ret, struct bl_errmsg *msg)
{
    int fd = wire_unix_connect(b->socket_path, msg);
    if (fd < 0) {
        return fd;
    }
    wire_sock_init(&b->daemon, fd);
    struct wire_hello hello = hello_make(b);
    uint32_t wait_ms = (uint32_t)bl_time_scaled_ms(LB_HELLO_MS);
    int rc = wire_unix_peer_check(fd, msg);
    if (!rc) {
        rc = wire_sock_send(&b->daemon, WIRE_TYPE_HELLO, &hello, 0, b->incarnation, NULL, 0,
                            wait_ms, msg);
    }
    if (!rc) {
        rc = wire_sock_expect(&b->daemon, WIRE_TYPE_HELLO, ret, wait_ms, msg);
    }
    if (rc) {
        wire_sock_close(&b->daemon);
        b->daemon.fd = -1;
    }
    return rc;
}

int lb_link_join(struct belay *b, struct bl_errmsg *msg)
{
    struct wire_hello hello;
    uint64_t deadline = lb_now_ms() + bl_time_scaled_ms(LB_JOIN_MS);
    uint32_t pause_ms = LB_BACKOFF_MS;
    int rc;
    while ((rc = hello_exchange(b, &hello, msg)) != 0) {
        if (rc == -EPERM || rc == BL_EVERSION || lb_now_ms() + pause_ms >= deadline) {
            return bl_err_in(msg, rc, "no daemon at %s", b->socket_path);
        }
        struct timespec pause = {0, (long)pause_ms * 1000000};
        nanosleep(&pause, NULL);
        pause_ms = pause_ms * 2 < LB_BACKOFF_MAX_MS ? pause_ms * 2 : LB_BACKOFF_MAX_MS - 1;
    }
    if (b->run && hello.run != b->run) {
        rc = bl_err(msg, BL_EFOREIGN,
                    "the daemon at %s works for run %016llx, this rank for %016llx", b->socket_path,
                    (unsigned long long)hello.run, (unsigned long long)b->run);
    }
    b->run = hello.run;
    b->lanes = hello.lanes;
    b->load_deadline_ms = hello.load_deadline_ms;
    b->job_json = hello.job_json;
    hello.job_json = NULL;
    memcpy(b->node, hello.node, sizeof(b->node));
    wire_hello_free(&hello);
    b->link_up = 1;
    return rc;
}

/* ---- afterwards, under lock ---- */

static void link_down(struct belay *b, uint64_t now_ms)
{
    wire_sock_close(&b->daemon);
    b->link_up = b->link_broken = 0;
    b->backoff_ms = b->backoff_ms ? b->backoff_ms * 2 : LB_BACKOFF_MS;
    if (b->backoff_ms > LB_BACKOFF_MAX_MS) {
        b->backoff_ms = LB_BACKOFF_MAX_MS;
    }
    b->link_at_ms = now_ms + b->backoff_ms;
    if (b->ask) {
        b->ask->lost = 1;
    }
    pthread_cond_broadcast(&b->changed);
}

/* A post that failed: the control thread closes, since it may be polling just now. */
static void link_break(struct belay *b)
{
    b->link_broken = 1;
    lb_wake(b);
}

static void link_try(struct belay *b, uint64_t now_ms)
{
    int fd = wire_unix_connect(b->socket_path, NULL);
    if (fd >= 0 && wire_unix_peer_check(fd, NULL)) {
        close(fd);
        fd = -1;
    }
    if (fd < 0) {
        link_down(b, now_ms);
        return;
    }
    wire_sock_init(&b->daemon, fd);
    struct wire_hello hello = hello_make(b);
    b->link_up = 1;
    if (wire_sock_post(&b->daemon, WIRE_TYPE_HELLO, &hello, 0, b->incarnation, NULL)) {
        link_down(b, now_ms);
        return;
    }
    wire_session_on_link_up(b->session);
    pthread_cond_broadcast(&b->changed);
}

void lb_link_report(struct belay *b)
{
    if (!b->link_up || b->link_broken) {
        return; /* again when the link is up */
    }
    struct wire_rank_report report;
    wire_session_report(b->session, &report);
    if (wire_sock_post(&b->daemon, WIRE_TYPE_RANK_REPORT, &report,
                       wire_session_generation(b->session), b->incarnation, NULL)) {
        link_break(b);
    } else if (b->daemon.out_bytes) {
        lb_wake(b);
    }
}

/* An answer that nobody waits for any more: its descriptor goes, and an arena that was made for it
 * is given back, since nobody will ever write its header. */
static void answer_drop(struct belay *b, const struct wire_frame *frame)
{
    for (int fd; b->daemon.fd_count && !wire_sock_fds_take(&b->daemon, &fd, 1);) {
        close(fd);
    }
    struct wire_arena arena;
    if (frame->type == WIRE_TYPE_ARENA &&
        !wire_arena_decode(&arena, frame->payload, frame->payload_bytes, NULL)) {
        if (!arena.rc) {
            lb_link_drop(b, arena.arena);
        }
        wire_arena_free(&arena);
    }
}

void lb_link_drop(struct belay *b, uint64_t arena)
{
    struct wire_arena_drop drop = {.arena = arena};
    if (b->link_up && !b->link_broken &&
        wire_sock_post(&b->daemon, WIRE_TYPE_ARENA_DROP, &drop, wire_session_generation(b->session),
                       b->incarnation, NULL)) {
        link_break(b);
    }
}

static int answer_take(struct belay *b, const struct wire_frame *frame)
{
    struct lb_ask *ask = b->ask;
    if (!ask || ask->answer_type != frame->type || ask->done) {
        answer_drop(b, frame);
        return 0;
    }
    int rc = wire_message_decode(frame->type, ask->answer, frame->payload, frame->payload_bytes,
                                 ask->msg);
    if (rc) {
        return rc;
    }
    /* Every answer begins with the number of its question, its rc and its text. */
    const struct wire_disk_loaded *head = ask->answer;
    int with_fd = frame->type != WIRE_TYPE_DISK_LOADED && head->rc == 0;
    if (with_fd && wire_sock_fds_take(&b->daemon, &ask->fd, 1)) {
        wire_message_close(frame->type, ask->answer);
        return BL_EPROTO;
    }
    if (head->request != ask->request) {
        if (ask->fd >= 0) {
            close(ask->fd);
            ask->fd = -1;
        }
        wire_message_close(frame->type, ask->answer);
        answer_drop(b, frame);
        return 0;
    }
    ask->done = 1;
    ask->rc = head->rc > 0 ? BL_EPROTO : head->rc;
    if (ask->rc) {
        bl_err(ask->msg, ask->rc, "%s", head->text);
    }
    pthread_cond_broadcast(&b->changed);
    return 0;
}

static int frame_take(struct belay *b, const struct wire_frame *frame, uint64_t now_ms)
{
    int rc;
    switch (frame->type) {
    case WIRE_TYPE_HELLO: {
        struct wire_hello hello;
        rc = wire_hello_decode(&hello, frame->payload, frame->payload_bytes, NULL);
        if (!rc) {
            rc = hello.run == b->run ? 0 : BL_EFOREIGN;
            memcpy(b->node, hello.node, sizeof(b->node));
            wire_hello_free(&hello);
        }
        b->backoff_ms = rc ? b->backoff_ms : 0;
        return rc;
    }
    case WIRE_TYPE_RANK_DIRECTIVE: {
        struct wire_rank_directive directive;
        rc = wire_rank_directive_decode(&directive, frame->payload, frame->payload_bytes, NULL);
        if (!rc) {
            wire_session_on_directive(b->session, &directive, now_ms);
            wire_rank_directive_free(&directive);
            lb_pump(b);
        }
        return rc;
    }
    case WIRE_TYPE_ARENA:
    case WIRE_TYPE_COPY_OPENED:
    case WIRE_TYPE_DISK_LOADED:
        return answer_take(b, frame);
    default:
        return 0;
    }
}

static int frames_take(struct belay *b, uint64_t now_ms)
{
    struct wire_frame frame;
    int rc;
    while ((rc = wire_sock_next(&b->daemon, &frame, NULL)) > 0) {
        rc = frame_take(b, &frame, now_ms);
        if (rc < 0) {
            return rc;
        }
    }
    return rc;
}

/* What is there already comes first: the read that brought the hello of lb_link_join may have
 * brought the first directive too, and poll does not tell of bytes that were read. */
static int link_read(struct belay *b, uint64_t now_ms)
{
    int rc;
    do {
        rc = frames_take(b, now_ms);
    } while (!rc && (rc = wire_sock_read(&b->daemon)) > 0);
    return rc;
}

uint64_t lb_link_tick(struct belay *b, uint64_t now_ms, short revents)
{
    if (!b->link_up) {
        if (now_ms >= b->link_at_ms) {
            link_try(b, now_ms);
            lb_pump(b);
        }
        return b->link_up ? UINT64_MAX : b->link_at_ms;
    }
    int rc = b->link_broken ? BL_EPEER : 0;
    if (!rc && (revents & (POLLIN | POLLHUP | POLLERR))) {
        rc = link_read(b, now_ms);
    }
    if (!rc && (revents & POLLOUT)) {
        rc = wire_sock_flush(&b->daemon);
    }
    if (rc < 0) {
        link_down(b, now_ms);
        return b->link_at_ms;
    }
    return UINT64_MAX;
}

int lb_link_ask(struct belay *b, enum wire_type type, void *question, enum wire_type answer_type,
                void *answer, int *fd, struct bl_errmsg *msg)
{
    uint64_t deadline =
        lb_now_ms() + (b->load_deadline_ms ? b->load_deadline_ms : bl_time_scaled_ms(LB_JOIN_MS));
    struct lb_ask ask = {.answer_type = answer_type, .answer = answer, .fd = -1, .msg = msg};
    int rc = 0;
    pthread_mutex_lock(&b->lock);
    while (!ask.done && !(rc = lb_over(b))) {
        uint64_t now = lb_now_ms();
        if (now >= deadline) {
            rc = bl_err_code(msg, BL_EDEADLINE, "%s to the daemon", wire_type_name(type));
            break;
        }
        if (b->link_up && !b->link_broken && (!b->ask || ask.lost)) {
            ask.request = ++b->request;
            ask.lost = 0;
            memcpy(question, &ask.request, sizeof(ask.request));
            b->ask = &ask;
            rc = wire_sock_post(&b->daemon, type, question, wire_session_generation(b->session),
                                b->incarnation, msg);
            if (rc == BL_ELIMIT || rc == BL_EFORMAT || rc == -ENOMEM) {
                break;
            }
            if (rc) {
                ask.lost = 1;
                link_break(b);
            } else if (b->daemon.out_bytes) {
                lb_wake(b);
            }
        }
        lb_wait(b, deadline);
    }
    b->ask = NULL;
    pthread_mutex_unlock(&b->lock);
    if (rc) {
        if (ask.done) {
            wire_message_close(answer_type, answer);
        }
        if (ask.fd >= 0) {
            close(ask.fd);
        }
        return rc;
    }
    if (fd) {
        *fd = ask.fd;
    }
    return ask.rc;
}
