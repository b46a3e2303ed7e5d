/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How the pairs are made. The higher rank calls the lower one's listener; both prove that they know
 * the generation's key before anything else is believed:
 *
 *     caller                                 answerer
 *     hello {ranks, generation, nonce}  ->
 *                                       <-   challenge {status, nonce, mac}
 *     proof {offer of memory, mac}      ->
 *                                       <-   offer {offer of memory, could open yours, mac}
 *     done {could open yours, mac}      ->
 *
 * A mac is SipHash over a label and everything said before it. A pair goes through shared memory if
 * both could open the other's, else it stays on TCP. Ranks call in the order of ranks and answer
 * after that, so waits go downwards only and cannot close a circle. Whoever calls with another
 * generation is turned away and tries again: one of the two has not heard of the new one yet.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "trainer/comm_host.h"

#define JOIN_MAGIC   0x314e494f4a594c42ull
#define JOIN_VERSION 1u

enum join_status { JOIN_OK = 1, JOIN_NOT_NOW = 2, JOIN_REFUSED = 3 };

struct join_hello {
    uint64_t magic;
    uint32_t version, from, to, world;
    uint64_t generation;
    uint64_t nonce[2];
};

struct join_challenge {
    uint64_t status;
    uint64_t nonce[2];
    uint64_t mac;
};

struct join_offer {
    int32_t pid, shm_fd, bell_fd;
    uint32_t opened; /* could open the other's memory */
    uint64_t shm_nonce[2];
    uint64_t mac;
};

struct join_talk { /* what the macs cover */
    uint64_t label;
    struct join_hello hello;
    uint64_t nonce[2]; /* the answerer's */
    struct join_offer offer;
};

static uint64_t talk_mac(const struct comm *c, struct join_talk *talk, uint64_t label,
                         const struct join_offer *offer)
{
    talk->label = label;
    memset(&talk->offer, 0, sizeof talk->offer);
    if (offer != NULL) {
        talk->offer = *offer;
        talk->offer.mac = 0;
    }
    return comm_siphash(c->key, talk, sizeof *talk);
}

/* Waits for `events` on fd (-1: only for time to pass), an abort or the deadline. */
static int join_wait(struct comm *c, int fd, short events, uint64_t deadline_ns)
{
    for (;;) {
        if (atomic_load(&c->aborted)) {
            return BL_EABORTED;
        }
        uint64_t now = bl_now_ns();
        if (now >= deadline_ns) {
            return BL_EDEADLINE;
        }
        struct pollfd p[2] = {{.fd = c->listener->bell[0], .events = POLLIN},
                              {.fd = fd, .events = events}};
        uint64_t left_ms = (deadline_ns - now) / 1000000u + 1;
        int n = poll(p, 2, left_ms > 1000000u ? 1000000 : (int)left_ms);
        if (n > 0 && p[0].revents != 0) {
            comm_bell_drain(c->listener);
        }
        if (n > 0 && p[1].revents != 0) {
            return 0;
        }
    }
}

static int join_move(struct comm *c, int fd, void *data, size_t bytes, int sending,
                     uint64_t deadline_ns)
{
    size_t done = 0;
    while (done < bytes) {
        ssize_t n = sending ? send(fd, (char *)data + done, bytes - done, MSG_NOSIGNAL)
                            : recv(fd, (char *)data + done, bytes - done, 0);
        if (n > 0) {
            done += (size_t)n;
            continue;
        }
        if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
            return BL_EPEER;
        }
        int rc = join_wait(c, fd, sending ? POLLOUT : POLLIN, deadline_ns);
        if (rc != 0) {
            return rc;
        }
    }
    return 0;
}

static void offer_fill(const struct comm *c, struct join_offer *offer)
{
    memset(offer, 0, sizeof *offer);
    offer->pid = getpid();
    offer->shm_fd = c->shm_fd;
    offer->bell_fd = c->listener->bell[1];
    if (c->shm != NULL) {
        memcpy(offer->shm_nonce, c->shm->nonce, sizeof offer->shm_nonce);
    }
}

static void link_reset(struct comm_link *link)
{
    comm_shm_drop(link);
    if (link->fd >= 0) {
        close(link->fd);
        link->fd = -1;
    }
}

static uint32_t offer_open(struct comm *c, uint32_t peer, const struct join_offer *offer)
{
    return comm_shm_open(c, peer, offer->pid, offer->shm_fd, offer->bell_fd, offer->shm_nonce) == 0;
}

static void link_settle(struct comm_link *link, uint32_t both)
{
    if (both) {
        link->shared = 1;
    } else {
        comm_shm_drop(link);
    }
}

/* The caller's side on a connected socket. BL_EPEER: turned away, try again. */
static int call_talk(struct comm *c, uint32_t peer, int fd, uint64_t deadline_ns)
{
    struct join_talk talk = {.hello = {.magic = JOIN_MAGIC,
                                       .version = JOIN_VERSION,
                                       .from = c->rank,
                                       .to = peer,
                                       .world = c->world,
                                       .generation = c->generation}};
    struct join_challenge challenge;
    struct join_offer mine, theirs;
    if (getrandom(talk.hello.nonce, sizeof talk.hello.nonce, 0) < 0) {
        return -errno;
    }
    int rc = join_move(c, fd, &talk.hello, sizeof talk.hello, 1, deadline_ns);
    if (rc == 0) {
        rc = join_move(c, fd, &challenge, sizeof challenge, 0, deadline_ns);
    }
    if (rc != 0 || challenge.status == JOIN_NOT_NOW) {
        return rc != 0 ? rc : BL_EPEER;
    }
    memcpy(talk.nonce, challenge.nonce, sizeof talk.nonce);
    if (challenge.status != JOIN_OK || challenge.mac != talk_mac(c, &talk, 1, NULL)) {
        return BL_EFOREIGN;
    }
    offer_fill(c, &mine);
    mine.mac = talk_mac(c, &talk, 2, &mine);
    rc = join_move(c, fd, &mine, sizeof mine, 1, deadline_ns);
    if (rc == 0) {
        rc = join_move(c, fd, &theirs, sizeof theirs, 0, deadline_ns);
    }
    if (rc != 0) {
        return rc;
    }
    if (theirs.mac != talk_mac(c, &talk, 3, &theirs)) {
        return BL_EFOREIGN;
    }
    mine.opened = offer_open(c, peer, &theirs);
    mine.mac = talk_mac(c, &talk, 4, &mine);
    link_settle(&c->links[peer], mine.opened && theirs.opened);
    return join_move(c, fd, &mine, sizeof mine, 1, deadline_ns);
}

static int call_once(struct comm *c, uint32_t peer, uint64_t deadline_ns)
{
    int one = 1;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        return -errno;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    int rc = connect(fd, (struct sockaddr *)&c->addrs[peer], sizeof c->addrs[peer]);
    if (rc != 0 && errno == EINPROGRESS) {
        rc = join_wait(c, fd, POLLOUT, deadline_ns);
    } else if (rc != 0) {
        rc = BL_EPEER;
    }
    if (rc == 0) {
        int error = 0;
        socklen_t len = sizeof error;
        getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &len);
        rc = error == 0 ? call_talk(c, peer, fd, deadline_ns) : BL_EPEER;
    }
    if (rc != 0) {
        comm_shm_drop(&c->links[peer]);
        close(fd);
        return rc;
    }
    c->links[peer].fd = fd;
    return 0;
}

static int call_peer(struct comm *c, uint32_t peer, uint64_t deadline_ns, struct bl_errmsg *msg)
{
    for (;;) {
        int rc = call_once(c, peer, deadline_ns);
        if (rc == 0) {
            return 0;
        }
        if (rc == BL_EPEER) { /* not there yet, or not in this generation yet */
            uint64_t until = bl_now_ns() + COMM_RETRY_MS * 1000000ull;
            rc = join_wait(c, -1, 0, until < deadline_ns ? until : deadline_ns);
            if (rc == BL_EDEADLINE && bl_now_ns() < deadline_ns) {
                continue;
            }
        }
        if (rc == BL_EFOREIGN) {
            return bl_err(msg, rc, "rank %u does not share the key of generation %llu", peer,
                          (unsigned long long)c->generation);
        }
        return bl_err_code(msg, rc, "rank %u does not answer", peer);
    }
}

/* The answerer's side. Any error but an abort only drops this caller. */
static int answer_talk(struct comm *c, int fd, uint64_t deadline_ns, uint32_t *ret_peer)
{
    struct join_talk talk;
    struct join_challenge challenge = {.status = JOIN_OK};
    struct join_offer mine, theirs;
    memset(&talk, 0, sizeof talk);
    int rc = join_move(c, fd, &talk.hello, sizeof talk.hello, 0, deadline_ns);
    if (rc != 0) {
        return rc;
    }
    const struct join_hello *h = &talk.hello;
    if (h->magic != JOIN_MAGIC || h->version != JOIN_VERSION) {
        return BL_EPROTO;
    }
    if (h->generation != c->generation || h->to != c->rank || h->world != c->world ||
        h->from <= c->rank || h->from >= c->world) {
        challenge.status = JOIN_NOT_NOW;
        rc = join_move(c, fd, &challenge, sizeof challenge, 1, deadline_ns);
        return rc != 0 ? rc : BL_EPROTO;
    }
    if (getrandom(talk.nonce, sizeof talk.nonce, 0) < 0) {
        return -errno;
    }
    memcpy(challenge.nonce, talk.nonce, sizeof talk.nonce);
    challenge.mac = talk_mac(c, &talk, 1, NULL);
    rc = join_move(c, fd, &challenge, sizeof challenge, 1, deadline_ns);
    if (rc == 0) {
        rc = join_move(c, fd, &theirs, sizeof theirs, 0, deadline_ns);
    }
    if (rc != 0 || theirs.mac != talk_mac(c, &talk, 2, &theirs)) {
        return rc != 0 ? rc : BL_EFOREIGN;
    }
    uint32_t peer = h->from;
    link_reset(&c->links[peer]); /* a peer that calls again gave up the pair it had */
    *ret_peer = peer;
    offer_fill(c, &mine);
    mine.opened = offer_open(c, peer, &theirs);
    mine.mac = talk_mac(c, &talk, 3, &mine);
    rc = join_move(c, fd, &mine, sizeof mine, 1, deadline_ns);
    if (rc == 0) {
        rc = join_move(c, fd, &theirs, sizeof theirs, 0, deadline_ns);
    }
    if (rc != 0 || theirs.mac != talk_mac(c, &talk, 4, &theirs)) {
        return rc != 0 ? rc : BL_EFOREIGN;
    }
    link_settle(&c->links[peer], mine.opened && theirs.opened);
    return 0;
}

/* Answers one caller. */
static int answer_one(struct comm *c, uint64_t deadline_ns)
{
    int rc = join_wait(c, c->listener->fd, POLLIN, deadline_ns);
    if (rc != 0) {
        return rc;
    }
    int fd = accept4(c->listener->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) {
        return 0; /* the caller went away again */
    }
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    uint64_t until = bl_now_ns() + COMM_HANDSHAKE_MS * 1000000ull;
    uint32_t peer = UINT32_MAX;
    rc = answer_talk(c, fd, until < deadline_ns ? until : deadline_ns, &peer);
    if (rc != 0) {
        if (peer != UINT32_MAX) {
            comm_shm_drop(&c->links[peer]);
        }
        close(fd);
        return rc == BL_EABORTED ? rc : 0;
    }
    c->links[peer].fd = fd;
    return 0;
}

static uint32_t first_missing(const struct comm *c)
{
    uint32_t r = c->rank + 1;
    while (r < c->world && c->links[r].fd >= 0) {
        r++;
    }
    return r;
}

int comm_join_all(struct comm *comm, uint64_t deadline_ns, struct bl_errmsg *msg)
{
    for (uint32_t peer = 0; peer < comm->rank; peer++) {
        int rc = call_peer(comm, peer, deadline_ns, msg);
        if (rc != 0) {
            return rc;
        }
    }
    for (uint32_t peer = first_missing(comm); peer < comm->world; peer = first_missing(comm)) {
        int rc = answer_one(comm, deadline_ns);
        if (rc != 0) {
            return bl_err_code(msg, rc, "rank %u did not call", peer);
        }
    }
    return 0;
}
