/* SPDX-License-Identifier: Apache-2.0 */
/* The host communicator: listener, life of a communicator, and the exchange that moves all bytes.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/clock.h"
#include "trainer/comm_host.h"

#define COMM_BACKLOG 128

/* ---- listener ---- */

static int listener_bind(struct comm_listener *l, const char *host, struct bl_errmsg *msg)
{
    struct sockaddr_in addr = {.sin_family = AF_INET};
    socklen_t len = sizeof addr;
    if (inet_pton(AF_INET, host, &addr.sin_addr) != 1) {
        return bl_err(msg, BL_ECONFIG, "communicator address %s is not an IPv4 address", host);
    }
    l->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (l->fd < 0 || bind(l->fd, (struct sockaddr *)&addr, len) != 0 ||
        listen(l->fd, COMM_BACKLOG) != 0 ||
        getsockname(l->fd, (struct sockaddr *)&addr, &len) != 0) {
        return bl_err_code(msg, -errno, "communicator listens on %s", host);
    }
    snprintf(l->endpoint, sizeof l->endpoint, "%s:%u", host, ntohs(addr.sin_port));
    return 0;
}

int comm_listener_open(struct comm_listener **ret, const char *host, struct bl_errmsg *msg)
{
    struct comm_listener *l = calloc(1, sizeof *l);
    if (l == NULL) {
        return bl_err_code(msg, -ENOMEM, "communicator");
    }
    l->fd = l->bell[0] = l->bell[1] = -1;
    int rc = pipe2(l->bell, O_CLOEXEC | O_NONBLOCK) == 0 ? 0 : -errno;
    if (rc != 0) {
        bl_err_code(msg, rc, "communicator's doorbell");
    } else {
        rc = listener_bind(l, host == NULL ? "127.0.0.1" : host, msg);
    }
    if (rc != 0) {
        comm_listener_close(l);
        return rc;
    }
    *ret = l;
    return 0;
}

const char *comm_listener_endpoint(const struct comm_listener *listener)
{
    return listener->endpoint;
}

void comm_listener_shut(struct comm_listener *listener)
{
    int *fds[3] = {&listener->fd, &listener->bell[0], &listener->bell[1]};
    for (int i = 0; i < 3; i++) {
        if (*fds[i] >= 0) {
            close(*fds[i]);
            *fds[i] = -1;
        }
    }
}

void comm_listener_close(struct comm_listener *listener)
{
    if (listener != NULL) {
        comm_listener_shut(listener);
        free(listener);
    }
}

/* ---- life ---- */

static int parse_endpoint(struct sockaddr_in *addr, const char *endpoint)
{
    char host[INET_ADDRSTRLEN];
    const char *colon = strchr(endpoint, ':');
    if (colon == NULL || (size_t)(colon - endpoint) >= sizeof host) {
        return BL_EFORMAT;
    }
    memcpy(host, endpoint, (size_t)(colon - endpoint));
    host[colon - endpoint] = 0;
    char *end;
    unsigned long port = strtoul(colon + 1, &end, 10);
    if (port == 0 || port > 65535 || (*end != 0 && *end != ';')) {
        return BL_EFORMAT;
    }
    memset(addr, 0, sizeof *addr);
    addr->sin_family = AF_INET;
    addr->sin_port = htons((uint16_t)port);
    return inet_pton(AF_INET, host, &addr->sin_addr) == 1 ? 0 : BL_EFORMAT;
}

static int take_memory(struct comm *c)
{
    size_t world = c->world;
    c->addrs = calloc(world, sizeof *c->addrs);
    c->local_index = calloc(world, sizeof *c->local_index);
    c->links = calloc(world, sizeof *c->links);
    c->polls = calloc(world + 1, sizeof *c->polls);
    c->bounds = calloc(world + 1, sizeof *c->bounds);
    c->parts = calloc(2 * world, sizeof *c->parts);
    c->words = calloc(64 * world, sizeof *c->words);
    if (c->addrs == NULL || c->local_index == NULL || c->links == NULL || c->polls == NULL ||
        c->bounds == NULL || c->parts == NULL || c->words == NULL) {
        return -ENOMEM;
    }
    for (size_t i = 0; i < world; i++) {
        c->links[i].fd = c->links[i].peer_bell = -1;
    }
    return 0;
}

static int take_peers(struct comm *c, const struct comm_peer *peers, struct bl_errmsg *msg)
{
    for (uint32_t i = 0; i < c->world; i++) {
        if (i != c->rank && parse_endpoint(&c->addrs[i], peers[i].endpoint) != 0) {
            return bl_err(msg, BL_EFORMAT, "rank %u has the endpoint \"%.60s\", not ADDRESS:PORT",
                          i, peers[i].endpoint);
        }
        int local = strcmp(peers[i].node, peers[c->rank].node) == 0;
        c->local_index[i] = local ? c->local_count++ : UINT32_MAX;
    }
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    c->spin_us = cpus > 0 && c->local_count <= (uint64_t)cpus ? COMM_SPIN_US : 0;
    return 0;
}

int comm_new(struct comm **ret, struct comm_listener *listener, const struct comm_config *config,
             struct bl_errmsg *msg)
{
    if (config->world == 0 || config->world > COMM_RANKS_MAX || config->rank >= config->world) {
        return bl_err(msg, BL_ELIMIT, "rank %u of %u: at most %u ranks", config->rank,
                      config->world, COMM_RANKS_MAX);
    }
    struct comm *c = calloc(1, sizeof *c);
    if (c == NULL) {
        return bl_err_code(msg, -ENOMEM, "communicator");
    }
    c->listener = listener;
    c->rank = config->rank;
    c->world = config->world;
    c->generation = config->generation;
    c->key[0] = config->key[0];
    c->key[1] = config->key[1];
    c->op_deadline_ms = config->op_deadline_ms;
    c->note = config->note;
    c->note_ctx = config->note_ctx;
    c->shm_fd = -1;
    int rc = take_memory(c);
    if (rc != 0) {
        bl_err_code(msg, rc, "communicator of %u ranks", config->world);
    } else {
        rc = take_peers(c, config->peers, msg);
    }
    if (rc != 0) {
        comm_free(c);
        return rc;
    }
    *ret = c;
    return 0;
}

int comm_connect(struct comm *comm, uint32_t deadline_ms, struct bl_errmsg *msg)
{
    uint64_t deadline_ns = bl_now_ns() + (uint64_t)deadline_ms * 1000000u;
    int rc = comm->world == 1 ? 0 : comm_shm_make(comm, msg);
    if (rc == 0 && comm->world > 1) {
        rc = comm_join_all(comm, deadline_ns, msg);
    }
    comm->broken = rc;
    return rc;
}

void comm_abort(struct comm *comm)
{
    atomic_store(&comm->aborted, 1);
    ssize_t n = write(comm->listener->bell[1], "", 1);
    (void)n; /* a full pipe wakes as well */
}

int comm_is_aborted(const struct comm *comm)
{
    return atomic_load(&comm->aborted);
}

void comm_free(struct comm *comm)
{
    if (comm == NULL) {
        return;
    }
    for (uint32_t i = 0; comm->links != NULL && i < comm->world; i++) {
        comm_shm_drop(&comm->links[i]);
        if (comm->links[i].fd >= 0) {
            close(comm->links[i].fd);
        }
    }
    if (comm->shm != NULL) {
        munmap(comm->shm, comm->shm_bytes);
    }
    if (comm->shm_fd >= 0) {
        close(comm->shm_fd);
    }
    free(comm->addrs);
    free(comm->local_index);
    free(comm->links);
    free(comm->polls);
    free(comm->bounds);
    free(comm->parts);
    free(comm->words);
    free(comm);
}

uint32_t comm_rank(const struct comm *comm)
{
    return comm->rank;
}

uint32_t comm_world(const struct comm *comm)
{
    return comm->world;
}

int comm_is_shared(const struct comm *comm, uint32_t peer)
{
    return peer < comm->world && comm->links[peer].shared;
}

/* ---- the exchange ---- */

static void flow_set(struct comm_flow *flow, const struct comm_part *part, uint64_t sequence)
{
    flow->frame.sequence = sequence;
    flow->frame.bytes = part->bytes;
    flow->data = part->data;
    flow->total = part->bytes == 0 ? 0 : part->bytes + sizeof flow->frame;
    flow->done = 0;
}

/* The next contiguous piece of a flow; its length. */
static uint64_t flow_piece(struct comm_flow *flow, uint8_t **piece)
{
    uint64_t head = sizeof flow->frame;
    if (flow->done < head) {
        *piece = (uint8_t *)&flow->frame + flow->done;
        return head - flow->done;
    }
    *piece = flow->data + (flow->done - head);
    return flow->total - flow->done;
}

/* Bytes moved through the socket, 0 if it would block, negative if the peer is gone. */
static int64_t socket_move(struct comm_link *link, struct comm_flow *flow, int sending)
{
    uint8_t *piece;
    uint64_t bytes = flow_piece(flow, &piece);
    struct iovec iov[2] = {{piece, bytes}, {NULL, 0}};
    struct msghdr mh = {.msg_iov = iov, .msg_iovlen = 1};
    if (sending && flow->done < sizeof flow->frame) { /* header and data in one packet */
        iov[1] = (struct iovec){flow->data, flow->total - sizeof flow->frame};
        mh.msg_iovlen = 2;
    }
    ssize_t n = sending ? sendmsg(link->fd, &mh, MSG_NOSIGNAL) : recvmsg(link->fd, &mh, 0);
    if (n > 0) {
        return n;
    }
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
        return 0;
    }
    return BL_EPEER;
}

static int64_t ring_move(struct comm_link *link, struct comm_flow *flow, int sending)
{
    uint8_t *piece;
    uint64_t bytes = flow_piece(flow, &piece);
    uint64_t n =
        sending ? comm_ring_write(link->tx, piece, bytes) : comm_ring_read(link->rx, piece, bytes);
    if (n == 0 && link->eof) {
        return BL_EPEER;
    }
    return (int64_t)n;
}

/* Moves what goes in one direction; 1 if something moved, 0, or an error. */
static int flow_move(struct comm_link *link, struct comm_flow *flow, int sending, uint64_t sequence,
                     uint64_t bytes)
{
    int moved = 0;
    while (flow->done < flow->total) {
        int64_t n =
            link->shared ? ring_move(link, flow, sending) : socket_move(link, flow, sending);
        if (n < 0) {
            return (int)n;
        }
        if (n == 0) {
            break;
        }
        uint64_t before = flow->done;
        flow->done += (uint64_t)n;
        moved = 1;
        if (!sending && before < sizeof flow->frame && flow->done >= sizeof flow->frame &&
            (flow->frame.sequence != sequence || flow->frame.bytes != bytes)) {
            return BL_EPROTO;
        }
    }
    if (moved && link->shared) {
        comm_bell_ring(link);
    }
    return moved;
}

static int is_pending(const struct comm_flow *flow)
{
    return flow->done < flow->total;
}

/* One round over all pairs. *ret_open counts those not done. 1 if bytes moved, 0, or an error. */
static int exchange_round(struct comm *c, uint32_t *ret_open, struct bl_errmsg *msg)
{
    int moved = 0;
    uint32_t open = 0;
    for (uint32_t k = 1; k < c->world; k++) {
        uint32_t peer = (c->rank + k) % c->world;
        struct comm_link *link = &c->links[peer];
        uint64_t want = link->recv.total == 0 ? 0 : link->recv.total - sizeof link->recv.frame;
        int rc = flow_move(link, &link->send, 1, 0, 0);
        if (rc >= 0) {
            moved |= rc;
            rc = flow_move(link, &link->recv, 0, c->sequence, want);
        }
        if (rc == BL_EPROTO) {
            return bl_err(msg, rc,
                          "rank %u sent collective %llu of %llu bytes, expected %llu of %llu", peer,
                          (unsigned long long)link->recv.frame.sequence,
                          (unsigned long long)link->recv.frame.bytes,
                          (unsigned long long)c->sequence, (unsigned long long)want);
        }
        if (rc < 0) {
            return bl_err_code(msg, rc, "collective %llu: rank %u", (unsigned long long)c->sequence,
                               peer);
        }
        moved |= rc;
        open += is_pending(&link->send) || is_pending(&link->recv);
    }
    *ret_open = open;
    return moved;
}

/* Whether a pair that goes through rings could move now. */
static int can_ring_move(const struct comm_link *link)
{
    if (!link->shared) {
        return 0;
    }
    if (is_pending(&link->recv) && atomic_load(&link->rx->head) != atomic_load(&link->rx->tail)) {
        return 1;
    }
    return is_pending(&link->send) &&
           atomic_load(&link->tx->head) - atomic_load(&link->tx->tail) < COMM_RING_BYTES;
}

static nfds_t fill_polls(struct comm *c)
{
    nfds_t count = 0;
    c->polls[count++] = (struct pollfd){.fd = c->listener->bell[0], .events = POLLIN};
    for (uint32_t i = 0; i < c->world; i++) {
        struct comm_link *link = &c->links[i];
        short events = 0;
        if (is_pending(&link->recv)) {
            events |= POLLIN | POLLRDHUP;
        }
        if (is_pending(&link->send)) {
            events |= POLLOUT;
        }
        if (events != 0 && link->shared) {
            events = POLLRDHUP;
        }
        if (events != 0 && !link->eof) {
            c->polls[count++] = (struct pollfd){.fd = link->fd, .events = events};
        }
    }
    return count;
}

/* After poll: a closed end on a pair that goes through rings is noted, the sockets of the others
 * tell by themselves. */
static void note_ends(struct comm *c, nfds_t count)
{
    for (uint32_t i = 0; i < c->world; i++) {
        struct comm_link *link = &c->links[i];
        for (nfds_t k = 1; link->shared && !link->eof && k < count; k++) {
            if (c->polls[k].fd == link->fd && c->polls[k].revents != 0) {
                link->eof = 1;
            }
        }
    }
}

static int deadline_error(struct comm *c, struct bl_errmsg *msg)
{
    for (uint32_t i = 0; i < c->world; i++) {
        if (is_pending(&c->links[i].recv) || is_pending(&c->links[i].send)) {
            return bl_err_code(msg, BL_EDEADLINE, "collective %llu waits for rank %u",
                               (unsigned long long)c->sequence, i);
        }
    }
    return BL_EDEADLINE;
}

/* Sleeps until something may move, the abort, or the deadline (0: none). */
static int exchange_sleep(struct comm *c, uint64_t deadline_ns, struct bl_errmsg *msg)
{
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
    for (uint32_t i = 0; i < c->world; i++) {
        if (can_ring_move(&c->links[i])) {
            timeout_ms = 0;
        }
    }
    nfds_t count = fill_polls(c);
    int n = poll(c->polls, count, timeout_ms);
    if (c->shm != NULL) {
        atomic_store(&c->shm->sleeping, 0);
    }
    if (n > 0) {
        note_ends(c, count);
        if (c->polls[0].revents != 0) {
            comm_bell_drain(c->listener);
        }
    }
    return 0;
}

static int exchange_run(struct comm *c, struct bl_errmsg *msg)
{
    uint64_t deadline_ns =
        c->op_deadline_ms == 0 ? 0 : bl_now_ns() + (uint64_t)c->op_deadline_ms * 1000000u;
    uint64_t spin_until = 0;
    for (;;) {
        if (atomic_load(&c->aborted)) {
            return bl_err_code(msg, BL_EABORTED, "collective %llu",
                               (unsigned long long)c->sequence);
        }
        uint32_t open = 0;
        int rc = exchange_round(c, &open, msg);
        if (rc < 0 || open == 0) {
            return rc < 0 ? rc : 0;
        }
        if (rc > 0) {
            spin_until = 0;
            continue;
        }
        uint64_t now = bl_now_ns();
        if (spin_until == 0) {
            spin_until = now + (uint64_t)c->spin_us * 1000u;
        }
        if (now < spin_until) {
            continue;
        }
        rc = exchange_sleep(c, deadline_ns, msg);
        if (rc != 0) {
            return rc;
        }
    }
}

int comm_exchange(struct comm *comm, const struct comm_part *sends, const struct comm_part *recvs,
                  struct bl_errmsg *msg)
{
    static const struct comm_part nothing;
    if (comm->broken != 0) {
        return bl_err_code(msg, comm->broken, "communicator is broken");
    }
    comm->sequence++;
    for (uint32_t i = 0; i < comm->world; i++) {
        int self = i == comm->rank;
        flow_set(&comm->links[i].send, self ? &nothing : &sends[i], comm->sequence);
        flow_set(&comm->links[i].recv, self ? &nothing : &recvs[i], comm->sequence);
    }
    if (comm->note != NULL) {
        comm->note(comm->note_ctx, comm->sequence, 1);
    }
    comm->broken = exchange_run(comm, msg);
    if (comm->note != NULL && comm->broken == 0) {
        comm->note(comm->note_ctx, comm->sequence, 0);
    }
    return comm->broken;
}
