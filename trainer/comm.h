/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The communicator of one generation: the ranks of a plan, joined for collectives.
 *
 * Life: a process opens one listener and publishes its endpoint; for each generation it makes a
 * communicator (comm_new), connects it (comm_connect, with a deadline), runs collectives, and frees
 * it. comm_abort may come from any thread at any time and wakes a blocked call within milliseconds;
 * after it, and after any error, a communicator only serves comm_free.
 *
 * Every rank calls the same collectives in the same order with sizes that agree; each exchange has
 * a sequence number that the peers check, so a rank that went another way is an error, not a hang.
 *
 * Host back end (comm_host*.c): ranks of one node (equal node names) pass bytes through rings in
 * shared memory that leaves no name behind; ranks of different nodes use TCP, on one machine too.
 * Every pair holds a TCP connection, opened by a handshake keyed per generation: it proves that
 * both know the key before anything else is believed, and its end tells that the peer is gone. A
 * waiting call spins for at most COMM_SPIN_US, and not at all when the node has more ranks than
 * processors; then it sleeps in poll.
 *
 * Sums: nothing here adds floating-point numbers in an order that depends on ranks. The ordered
 * reduce-scatter (lane_sum.h) exchanges slices here and adds them by the lanes' tree.
 */
#ifndef TRAINER_COMM_H
#define TRAINER_COMM_H

#include <stdint.h>

#include "base/error.h"

#define COMM_RANKS_MAX 1024
#define COMM_SPIN_US   50 /* of busy waiting before a call sleeps */
#define COMM_HANDSHAKE_MS                                                                          \
    3000 /* for one stranger or slow peer to prove itself, then it is dropped */
#define COMM_RETRY_MS       10 /* until a peer that is not in this generation yet is tried again */
#define COMM_ENDPOINT_BYTES 64

struct comm;
struct comm_listener;

/* Listens on `host` (an IPv4 address; NULL: 127.0.0.1) at a free port. *ret is owned. */
BL_MUST_CHECK int comm_listener_open(struct comm_listener **ret, const char *host,
                                     struct bl_errmsg *msg);
/* "127.0.0.1:PORT", all that the peers need; view, valid until close. A listener may be opened
 * before a fork and used in the child. */
const char *comm_listener_endpoint(const struct comm_listener *listener);
/* After a fork, in a process that does not use it: closes its descriptors, keeps the text. */
void comm_listener_shut(struct comm_listener *listener);
void comm_listener_close(struct comm_listener *listener); /* NULL is fine */

struct comm_peer {
    const char *endpoint; /* of that rank's listener */
    const char *node;     /* equal names share memory */
};

struct comm_config {
    uint32_t rank, world;
    uint64_t generation;
    uint64_t key[2];               /* secret of the generation, known to its ranks only */
    const struct comm_peer *peers; /* world entries; borrowed by comm_new, copied */
    uint32_t op_deadline_ms;       /* for one collective; 0: waits until an abort */
    /* Flight recorder: collective `sequence` is entered (waiting 1) or left (0); may be NULL. */
    void (*note)(void *ctx, uint64_t sequence, uint32_t waiting);
    void *note_ctx;
};

/* Makes an unconnected communicator; touches no peer. Keeps `listener` until comm_free; one
 * communicator at a time per listener. *ret is owned. */
BL_MUST_CHECK int comm_new(struct comm **ret, struct comm_listener *listener,
                           const struct comm_config *config, struct bl_errmsg *msg);

/* Joins all peers within deadline_ms. BL_EDEADLINE names the peer that did not come; BL_EFOREIGN: a
 * peer refused our key; BL_EABORTED. */
BL_MUST_CHECK int comm_connect(struct comm *comm, uint32_t deadline_ms, struct bl_errmsg *msg);

/* Any thread, any number of times: blocked and later calls return BL_EABORTED. */
void comm_abort(struct comm *comm);

/* Whether comm_abort was called. Any thread. */
int comm_is_aborted(const struct comm *comm);

/* NULL is fine. Not while another thread is inside a call of this communicator. */
void comm_free(struct comm *comm);

uint32_t comm_rank(const struct comm *comm);
uint32_t comm_world(const struct comm *comm);
/* Whether the pair with `peer` passes bytes through shared memory (0: TCP). After comm_connect. */
int comm_is_shared(const struct comm *comm, uint32_t peer);

/*
 * Collectives. All return 0, BL_EABORTED, BL_EPEER (a peer is gone; text says which), BL_EDEADLINE,
 * or BL_EPROTO (peers disagree about the collective).
 */

struct comm_part {
    void *data; /* sends are not written to */
    uint64_t bytes;
};

/* Sends sends[r] to every rank r and fills recvs[r] from it; `world` entries each, bytes 0:
 * nothing. The own entries are ignored. What r sends here and what is received there must agree. */
BL_MUST_CHECK int comm_exchange(struct comm *comm, const struct comm_part *sends,
                                const struct comm_part *recvs, struct bl_errmsg *msg);

/* In place: rank r owns bytes [bounds[r], bounds[r+1]) of `base`; afterwards all have all. `bounds`
 * has world + 1 entries, equal on all ranks. */
BL_MUST_CHECK int comm_allgather(struct comm *comm, void *base, const uint64_t *bounds,
                                 struct bl_errmsg *msg);

/* Afterwards all have what `root` had in data[bytes]. */
BL_MUST_CHECK int comm_broadcast(struct comm *comm, uint32_t root, void *data, uint64_t bytes,
                                 struct bl_errmsg *msg);

/* values[i] = sum over ranks modulo 2^64; any order gives the same. At most 64 values. */
BL_MUST_CHECK int comm_sum_u64(struct comm *comm, uint64_t *values, uint32_t count,
                               struct bl_errmsg *msg);

/* Returns after every rank has entered. */
BL_MUST_CHECK int comm_barrier(struct comm *comm, struct bl_errmsg *msg);

#endif
