/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine. A round gives every pair that has something to move one turn in each direction, of at
 * most COMM_TURN_BYTES, so that no pair starves another; a call makes rounds until what it waits
 * for is done. Rings are looked at in every round; sockets are under an edge-triggered epoll, so
 * that idle ones cost nothing: can_read and can_write of a link say what the last edge said.
 */
#include <errno.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/clock.h"
#include "trainer/comm_host.h"

#define COMM_TURN_BYTES  (256u * 1024) /* a pair's share of a round, each direction */
#define COMM_PIECE_BYTES (32u * 1024)  /* published at once: the peer copies while we go on */
#define COMM_EVENTS      64            /* taken from epoll at once */
#define COMM_LOOK_ROUNDS 16            /* of moving, until the sockets are looked at again */
#define COMM_BELL        UINT32_MAX    /* the doorbell's place among the peers */

/* ---- bytes ---- */

/* Bytes moved through the socket, 0 if it would block, BL_EPEER if the peer is gone. */
static int64_t socket_result(struct comm_link *link, ssize_t n, int *ret_can)
{
    if (n > 0) {
        return n;
    }
    if (n < 0 && errno == EINTR) {
        return 0;
    }
    *ret_can = 0;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        return 0;
    }
    link->eof = 1;
    return BL_EPEER;
}

static int64_t link_write(struct comm_link *link, struct comm_request *r)
{
    uint64_t head = sizeof r->frame;
    int in_head = r->done < head;
    uint8_t *piece = in_head ? (uint8_t *)&r->frame + r->done : r->data + (r->done - head);
    uint64_t bytes = in_head ? head - r->done : r->frame.bytes - (r->done - head);
    if (link->shared) {
        uint64_t n =
            comm_ring_write(link->tx, piece, bytes < COMM_PIECE_BYTES ? bytes : COMM_PIECE_BYTES);
        return n == 0 && link->eof ? BL_EPEER : (int64_t)n;
    }
    if (!link->can_write) {
        return link->eof ? BL_EPEER : 0;
    }
    struct iovec iov[2] = {{piece, bytes}, {r->data, in_head ? r->frame.bytes : 0}};
    struct msghdr mh = {.msg_iov = iov, .msg_iovlen = iov[1].iov_len > 0 ? 2 : 1};
    return socket_result(link, sendmsg(link->fd, &mh, MSG_NOSIGNAL), &link->can_write);
}

static int64_t link_read(struct comm_link *link, void *data, uint64_t bytes)
{
    if (link->shared) {
        uint64_t n =
            comm_ring_read(link->rx, data, bytes < COMM_PIECE_BYTES ? bytes : COMM_PIECE_BYTES);
        return n == 0 && link->eof ? BL_EPEER : (int64_t)n;
    }
    if (!link->can_read) {
        return link->eof ? BL_EPEER : 0;
    }
    return socket_result(link, recv(link->fd, data, bytes, 0), &link->can_read);
}

/* ---- one pair ---- */

/* Bytes that went out, or an error. */
static int64_t link_send(struct comm_link *link)
{
    uint64_t moved = 0;
    struct comm_request *r;
    while (moved < COMM_TURN_BYTES && (r = link->sends.first) != NULL) {
        int64_t n = link_write(link, r);
        if (n <= 0) {
            return moved > 0 ? (int64_t)moved : n;
        }
        moved += (uint64_t)n;
        r->done += (uint64_t)n;
        if (r->done == sizeof r->frame + r->frame.bytes) {
            comm_request_finish(&link->sends, r);
        }
    }
    return (int64_t)moved;
}

/* Whether nothing is missing of the header, whose bytes are counted in *moved. 0: not yet. */
static int64_t take_header(struct comm_link *link, uint64_t *moved)
{
    while (link->in_bytes < sizeof link->in) {
        int64_t n = link_read(link, (uint8_t *)&link->in + link->in_bytes,
                              sizeof link->in - link->in_bytes);
        if (n <= 0) {
            return n;
        }
        link->in_bytes += (uint64_t)n;
        *moved += (uint64_t)n;
    }
    return 1;
}

/* Bytes that came in, or an error. */
static int64_t link_receive(struct comm *c, uint32_t peer, struct bl_errmsg *msg)
{
    struct comm_link *link = &c->links[peer];
    uint64_t moved = 0;
    while (moved < COMM_TURN_BYTES) {
        int64_t n = take_header(link, &moved);
        if (n <= 0) {
            return moved > 0 ? (int64_t)moved : n;
        }
        if (link->to == NULL) {
            int rc = comm_link_match(c, peer, msg);
            if (rc != 0 || link->is_stuck) {
                return rc != 0 ? rc : (int64_t)moved;
            }
        }
        struct comm_request *r = link->to;
        if (r->done < r->frame.bytes) {
            n = link_read(link, r->data + r->done, r->frame.bytes - r->done);
            if (n <= 0) {
                return moved > 0 ? (int64_t)moved : n;
            }
            moved += (uint64_t)n;
            r->done += (uint64_t)n;
        }
        if (r->done == r->frame.bytes) {
            comm_link_arrived(link);
        }
    }
    return (int64_t)moved;
}

void comm_link_push(struct comm *comm, uint32_t peer)
{
    struct comm_link *link = &comm->links[peer];
    if (link_send(link) > 0 && link->shared) {
        comm_bell_ring(link);
    }
}

static int is_ring_filled(const struct comm_link *link)
{
    return atomic_load(&link->rx->head) != atomic_load(&link->rx->tail);
}

/* Whether the pair needs no turn until something happens to it. */
static int is_idle(const struct comm_link *link)
{
    if (link->sends.first != NULL || link->recvs.first != NULL) {
        return 0;
    }
    return link->is_stuck || (link->shared ? !is_ring_filled(link) : !link->can_read);
}

void comm_link_wake(struct comm *comm, uint32_t peer)
{
    struct comm_link *link = &comm->links[peer];
    if (!link->is_busy && peer != comm->rank) {
        link->is_busy = 1;
        comm->busy[comm->busy_count++] = peer;
    }
}

/* One turn of a pair: 1 if bytes moved, 0, or an error. */
static int link_turn(struct comm *c, uint32_t peer, struct bl_errmsg *msg)
{
    struct comm_link *link = &c->links[peer];
    int64_t out = link_send(link);
    int64_t in = out < 0 || link->is_stuck ? 0 : link_receive(c, peer, msg);
    if (link->shared && (out > 0 || in > 0)) {
        comm_bell_ring(link);
    }
    if (out == BL_EPEER || in == BL_EPEER) {
        if (link->sends.first != NULL || link->recvs.first != NULL) {
            return bl_err_code(msg, BL_EPEER, "call %llu: rank %u", (unsigned long long)c->calls,
                               peer);
        }
        return 0; /* it left, and nobody waits for it */
    }
    if (in < 0) {
        return (int)in;
    }
    return out > 0 || in > 0;
}

/* ---- rounds ---- */

/* One turn for all that are busy: 1 if bytes moved, 0, or an error. */
static int engine_round(struct comm *c, struct bl_errmsg *msg)
{
    int moved = 0;
    for (uint32_t i = 0; i < c->shared_count; i++) {
        const struct comm_link *link = &c->links[c->shared[i]];
        if (!link->is_busy && !link->is_stuck && is_ring_filled(link)) {
            comm_link_wake(c, c->shared[i]);
        }
    }
    uint32_t count = c->busy_count;
    for (uint32_t k = 0; k < count; k++) {
        int rc = link_turn(c, c->busy[(c->busy_first + k) % count], msg);
        if (rc < 0) {
            return rc;
        }
        moved |= rc;
    }
    for (uint32_t i = c->busy_count; i-- > 0;) {
        struct comm_link *link = &c->links[c->busy[i]];
        if (is_idle(link)) {
            link->is_busy = 0;
            c->busy[i] = c->busy[--c->busy_count];
        }
    }
    c->busy_first = c->busy_count == 0 ? 0 : (c->busy_first + 1) % c->busy_count;
    return moved;
}

static void take_event(struct comm *c, const struct epoll_event *event)
{
    uint32_t peer = event->data.u32;
    if (peer == COMM_BELL) {
        comm_bell_drain(c->listener);
        return;
    }
    struct comm_link *link = &c->links[peer];
    if (link->shared) { /* the socket of such a pair only tells of the end */
        link->eof = 1;
        return;
    }
    if ((event->events & ~(uint32_t)EPOLLOUT) != 0) {
        link->can_read = 1;
        comm_link_wake(c, peer);
    }
    if ((event->events & ~(uint32_t)EPOLLIN) != 0) {
        link->can_write = 1;
    }
}

/* Takes what epoll tells within timeout_ms (-1: for ever). Whether it told anything: the edge is
 * used up, so a round must follow before the next sleep. */
static int take_events(struct comm *c, int timeout_ms)
{
    struct epoll_event events[COMM_EVENTS];
    int n = epoll_wait(c->epoll_fd, events, COMM_EVENTS, timeout_ms);
    for (int i = 0; i < n; i++) {
        take_event(c, &events[i]);
    }
    return n > 0;
}

int comm_progress_open(struct comm *comm, struct bl_errmsg *msg)
{
    comm->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (comm->epoll_fd < 0) {
        return bl_err_code(msg, -errno, "communicator's epoll");
    }
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = COMM_BELL};
    int rc = epoll_ctl(comm->epoll_fd, EPOLL_CTL_ADD, comm->listener->bell[0], &event);
    for (uint32_t i = 0; rc == 0 && i < comm->world; i++) {
        struct comm_link *link = &comm->links[i];
        if (i == comm->rank) {
            continue;
        }
        link->can_read = link->can_write = !link->shared;
        event.data.u32 = i;
        event.events = EPOLLRDHUP | EPOLLET;
        if (link->shared) {
            comm->shared[comm->shared_count++] = i;
        } else {
            event.events |= EPOLLIN | EPOLLOUT;
            comm->socket_count++;
        }
        rc = epoll_ctl(comm->epoll_fd, EPOLL_CTL_ADD, link->fd, &event);
    }
    return rc == 0 ? 0 : bl_err_code(msg, -errno, "communicator's epoll");
}

/* ---- waiting ---- */

/* Whether a pair that goes through rings could move now. */
static int can_ring_move(const struct comm_link *link)
{
    if (!link->is_stuck && is_ring_filled(link)) {
        return 1;
    }
    return link->sends.first != NULL &&
           atomic_load(&link->tx->head) - atomic_load(&link->tx->tail) < COMM_RING_BYTES;
}

/* Whether a lost peer of the rings has yet to be told of. */
static int can_end_tell(const struct comm_link *link)
{
    return link->eof && (link->sends.first != NULL || link->recvs.first != NULL);
}

static const struct comm_request *first_wanted(const struct comm_queue *queue)
{
    const struct comm_request *r = queue->first;
    while (r != NULL && !r->is_wanted) {
        r = r->next;
    }
    return r;
}

static int deadline_error(struct comm *c, struct bl_errmsg *msg)
{
    for (uint32_t k = 0; k < c->busy_count; k++) {
        const struct comm_link *link = &c->links[c->busy[k]];
        if (first_wanted(&link->recvs) != NULL || first_wanted(&link->sends) != NULL) {
            return bl_err_code(msg, BL_EDEADLINE, "call %llu waits for rank %u",
                               (unsigned long long)c->calls, c->busy[k]);
        }
    }
    return bl_err_code(msg, BL_EDEADLINE, "call %llu", (unsigned long long)c->calls);
}

/* A message that this call waits for stands behind one that nobody takes: no turn can help. */
static int stuck_error(struct comm *c, struct bl_errmsg *msg)
{
    for (uint32_t k = 0; k < c->busy_count; k++) {
        const struct comm_link *link = &c->links[c->busy[k]];
        if (link->is_stuck == COMM_FULL && first_wanted(&link->recvs) != NULL) {
            return bl_err(msg, BL_ELIMIT,
                          "rank %u sent %llu bytes before their receive, and %llu of at most %llu "
                          "bytes are kept already: start receives earlier, or raise "
                          "early_bytes_max",
                          c->busy[k], (unsigned long long)link->in.bytes,
                          (unsigned long long)c->early_bytes,
                          (unsigned long long)c->early_bytes_max);
        }
    }
    return 0;
}

/* Sleeps until something may move, the abort, or the deadline (0: none). */
static int engine_sleep(struct comm *c, uint64_t deadline_ns, struct bl_errmsg *msg)
{
    int rc = stuck_error(c, msg);
    if (rc != 0) {
        return rc;
    }
    if (c->shm != NULL) {
        atomic_store(&c->shm->sleeping, 1);
    }
    int timeout_ms = -1;
    if (deadline_ns != 0) {
        uint64_t now = bl_now_ns();
        if (now >= deadline_ns) {
            return deadline_error(c, msg);
        }
        uint64_t left_ms = (deadline_ns - now) / 1000000u + 1;
        timeout_ms = left_ms > 1000000u ? 1000000 : (int)left_ms;
    }
    for (uint32_t i = 0; i < c->shared_count; i++) {
        const struct comm_link *link = &c->links[c->shared[i]];
        if (can_ring_move(link) || can_end_tell(link)) {
            timeout_ms = 0;
        }
    }
    take_events(c, timeout_ms);
    if (c->shm != NULL) {
        atomic_store(&c->shm->sleeping, 0);
    }
    return 0;
}

static int drive(struct comm *c, int (*is_over)(void *ctx, struct bl_errmsg *msg), void *ctx,
                 struct bl_errmsg *msg)
{
    uint64_t deadline_ns =
        c->op_deadline_ms == 0 ? 0 : bl_now_ns() + (uint64_t)c->op_deadline_ms * 1000000u;
    uint64_t spin_until = 0;
    for (uint32_t round = 1;; round++) {
        if (atomic_load(&c->aborted)) {
            return comm_aborted_error(c, msg);
        }
        int over = is_over(ctx, msg);
        if (over != 0) {
            return over < 0 ? over : 0;
        }
        int moved = engine_round(c, msg);
        if (moved < 0) {
            return moved;
        }
        if (c->socket_count > 0 && (!moved || round % COMM_LOOK_ROUNDS == 0)) {
            moved |= take_events(c, 0);
        }
        if (moved) {
            spin_until = 0;
            continue;
        }
        uint64_t now = bl_now_ns();
        if (spin_until == 0) {
            spin_until = now + (uint64_t)c->spin_us * 1000u;
        }
        int rc = now < spin_until ? 0 : engine_sleep(c, deadline_ns, msg);
        if (rc != 0) {
            return rc;
        }
    }
}

/* ---- calls ---- */

int comm_broken(const struct comm *comm, struct bl_errmsg *msg)
{
    if (comm->broken != 0) {
        return bl_err(msg, comm->broken, "%s", comm->why.text);
    }
    return 0;
}

int comm_fail(struct comm *comm, int rc, const struct bl_errmsg *why, struct bl_errmsg *msg)
{
    comm->broken = rc;
    comm->why = *why;
    return comm_broken(comm, msg);
}

int comm_drive(struct comm *comm, int (*is_over)(void *ctx, struct bl_errmsg *msg), void *ctx,
               struct bl_errmsg *msg)
{
    struct bl_errmsg why = {{0}};
    int rc = comm_broken(comm, msg);
    if (rc != 0) {
        return rc;
    }
    comm->calls++;
    if (comm->note != NULL) {
        comm->note(comm->note_ctx, comm->calls, 1);
    }
    rc = drive(comm, is_over, ctx, &why);
    if (rc != 0) {
        return comm_fail(comm, rc, &why, msg);
    }
    if (comm->note != NULL) {
        comm->note(comm->note_ctx, comm->calls, 0);
    }
    return 0;
}

/* 1: bytes moved, 0, or -1: nothing ever will. */
static int poke(struct comm *comm)
{
    struct bl_errmsg why = {{0}};
    int moved = 1, any = 0;
    if (comm->broken != 0 || atomic_load(&comm->aborted)) {
        return -1;
    }
    if (comm->socket_count > 0) {
        take_events(comm, 0);
    }
    for (uint32_t round = 0; moved > 0 && round < COMM_LOOK_ROUNDS; round++) {
        moved = engine_round(comm, &why);
        any |= moved > 0;
    }
    if (moved < 0) {
        BL_IGNORE(comm_fail(comm, moved, &why, NULL), "the next call tells");
        return -1;
    }
    return any;
}

void comm_poke(struct comm *comm)
{
    BL_IGNORE(poke(comm), "it moved what it could");
}

void comm_push(struct comm *comm, const struct comm_request *request)
{
    uint64_t quiet_ns = 0; /* since when nothing moves */
    while (!comm_is_done(request)) {
        int moved = poke(comm);
        uint64_t now = bl_now_ns();
        if (moved > 0 || quiet_ns == 0) {
            quiet_ns = now;
        }
        if (moved < 0 || now - quiet_ns >= (uint64_t)comm->spin_us * 1000u) {
            return;
        }
    }
}
