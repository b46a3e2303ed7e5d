/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Votes between ranks. A rank connects to a neighbour in the tree when it first has something to
 * say to it; a child's connection is used by its parent for the answer. The first frame names run,
 * generation, key and rank. When a connection of the generation in force breaks, that generation
 * failed: the peer is dead or has left.
 */
#include "wire/libbelay.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"

static struct lb_peer *peer_add(struct belay *b, int fd)
{
    struct lb_peer *peer = b->vote_peer_count < LB_PEERS_MAX ? calloc(1, sizeof(*peer)) : NULL;
    if (!peer) {
        close(fd);
        return NULL;
    }
    wire_sock_init(&peer->sock, fd);
    peer->since_ms = lb_now_ms();
    b->vote_peers[b->vote_peer_count++] = peer;
    return peer;
}

static void peer_remove(struct belay *b, uint32_t index)
{
    struct lb_peer *peer = b->vote_peers[index];
    wire_sock_close(&peer->sock);
    free(peer);
    b->vote_peer_count--;
    memmove(&b->vote_peers[index], &b->vote_peers[index + 1],
            (b->vote_peer_count - index) * sizeof(b->vote_peers[0]));
}

static void peer_failed(struct belay *b, uint64_t generation, uint32_t rank, int code)
{
    const struct wire_plan *plan = wire_session_plan(b->session, NULL);
    if (!plan || plan->generation != generation || rank >= plan->world) {
        return;
    }
    char text[WIRE_TEXT_MAX];
    snprintf(text, sizeof(text), "vote connection to rank %u on %s: %s", rank,
             plan->members[rank].node, bl_strerror(code));
    lb_fail(b, BL_EPEER, text);
    lb_pump(b);
}

/* ---- sending ---- */

static struct lb_peer *peer_find(struct belay *b, uint64_t generation, uint32_t rank)
{
    for (uint32_t i = 0; i < b->vote_peer_count; i++) {
        struct lb_peer *peer = b->vote_peers[i];
        if (peer->generation == generation && peer->rank == rank) {
            return peer;
        }
    }
    return NULL;
}

static struct lb_peer *peer_connect(struct belay *b, const struct wire_plan *plan, uint32_t own,
                                    uint32_t rank, int *ret_rc)
{
    int fd = wire_tcp_connect_begin(plan->members[rank].vote_addr, NULL);
    if (fd < 0) {
        *ret_rc = fd;
        return NULL;
    }
    struct lb_peer *peer = peer_add(b, fd);
    if (!peer) {
        *ret_rc = -ENOMEM;
        return NULL;
    }
    peer->generation = plan->generation;
    peer->rank = rank;
    peer->connecting = 1;
    struct wire_vote_hello hello = {
        .run = b->run,
        .generation = plan->generation,
        .comm_key = {plan->comm_key[0], plan->comm_key[1]},
        .rank = own,
    };
    *ret_rc = wire_sock_post(&peer->sock, WIRE_TYPE_VOTE_HELLO, &hello, plan->generation,
                             b->incarnation, NULL);
    lb_wake(b); /* the control thread has to poll one more */
    return peer;
}

void lb_votes_send(struct belay *b, uint32_t to, const struct wire_vote *vote)
{
    uint32_t own = 0;
    const struct wire_plan *plan = wire_session_plan(b->session, &own);
    if (!plan || to >= plan->world || vote->generation != plan->generation) {
        return;
    }
    int rc = 0;
    struct lb_peer *peer = peer_find(b, plan->generation, to);
    if (!peer) {
        peer = peer_connect(b, plan, own, to, &rc);
    }
    if (!rc) {
        rc = wire_sock_post(&peer->sock, WIRE_TYPE_VOTE, vote, vote->generation, b->incarnation,
                            NULL);
        if (!rc && peer->sock.out_bytes) {
            lb_wake(b);
        }
    }
    if (rc) {
        peer_failed(b, vote->generation, to, rc);
    }
}

/* ---- receiving ---- */

void lb_votes_accept(struct belay *b, uint64_t now_ms)
{
    int fd;
    while ((fd = wire_sock_accept(b->listen_fd)) >= 0) {
        if (wire_tcp_peer_check(fd, NULL)) {
            close(fd); /* another user's: it must not fill the table either */
            continue;
        }
        struct lb_peer *peer = peer_add(b, fd);
        if (peer) {
            peer->since_ms = now_ms;
        }
    }
}

static int hello_take(struct belay *b, struct lb_peer *peer, const struct wire_frame *frame)
{
    struct wire_vote_hello hello;
    const struct wire_plan *plan = wire_session_plan(b->session, NULL);
    int rc = wire_vote_hello_decode(&hello, frame->payload, frame->payload_bytes, NULL);
    if (rc) {
        return rc;
    }
    if (!plan || hello.run != b->run || hello.generation != plan->generation ||
        hello.comm_key[0] != plan->comm_key[0] || hello.comm_key[1] != plan->comm_key[1] ||
        hello.rank >= plan->world) {
        return BL_EFOREIGN;
    }
    peer->generation = hello.generation;
    peer->rank = hello.rank;
    return 0;
}

static int peer_frame(struct belay *b, struct lb_peer *peer, const struct wire_frame *frame)
{
    if (!peer->generation) {
        return frame->type == WIRE_TYPE_VOTE_HELLO ? hello_take(b, peer, frame) : BL_EPROTO;
    }
    struct wire_vote vote;
    int rc = frame->type == WIRE_TYPE_VOTE
                 ? wire_vote_decode(&vote, frame->payload, frame->payload_bytes, NULL)
                 : BL_EPROTO;
    if (!rc && (vote.from != peer->rank || vote.generation != peer->generation)) {
        rc = BL_EPROTO;
    }
    if (!rc) {
        wire_session_on_vote(b->session, &vote, lb_now_ms());
        lb_pump(b);
    }
    return rc;
}

static int peer_read(struct belay *b, struct lb_peer *peer)
{
    int rc;
    while ((rc = wire_sock_read(&peer->sock)) > 0) {
        struct wire_frame frame;
        while ((rc = wire_sock_next(&peer->sock, &frame, NULL)) > 0) {
            rc = peer_frame(b, peer, &frame);
            if (rc < 0) {
                return rc;
            }
        }
        if (rc < 0) {
            return rc;
        }
    }
    return rc;
}

void lb_votes_read(struct belay *b, uint32_t index, short revents)
{
    struct lb_peer *peer = b->vote_peers[index];
    int rc = 0;
    if (peer->connecting) {
        rc = wire_tcp_connected(peer->sock.fd);
        peer->connecting = 0;
    }
    if (!rc && (revents & POLLOUT)) {
        rc = wire_sock_flush(&peer->sock);
    }
    if (rc >= 0 && (revents & (POLLIN | POLLHUP | POLLERR))) {
        rc = peer_read(b, peer);
    }
    if (rc < 0) {
        uint64_t generation = peer->generation;
        uint32_t rank = peer->rank;
        peer_remove(b, index);
        if (generation) {
            peer_failed(b, generation, rank, rc);
        }
    }
}

void lb_votes_tidy(struct belay *b, uint64_t now_ms)
{
    const struct wire_plan *plan = wire_session_plan(b->session, NULL);
    for (uint32_t i = b->vote_peer_count; i > 0; i--) {
        const struct lb_peer *peer = b->vote_peers[i - 1];
        if (peer->generation ? !plan || peer->generation != plan->generation
                             : now_ms - peer->since_ms > bl_time_scaled_ms(LB_STRANGER_MS)) {
            peer_remove(b, i - 1);
        }
    }
}

void lb_votes_close(struct belay *b)
{
    while (b->vote_peer_count) {
        peer_remove(b, b->vote_peer_count - 1);
    }
}
