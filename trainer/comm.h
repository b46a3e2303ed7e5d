/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The communicator of one generation: the ranks of a plan, joined for collectives.
 *
 * Life: a process opens one listener and publishes its endpoint; for each generation it makes a
 * communicator (comm_new), connects it (comm_connect, with a deadline), runs collectives, and frees
 * it. comm_abort may come from any thread at any time and wakes a blocked call within milliseconds;
 * after it, and after any error, a communicator only serves comm_free.
 *
 * A group is a view of some of its ranks, over the same connections: its members call the same
 * collectives in the same order with sizes that agree; each has a number within its group that the
 * peers check, so a rank that went another way is an error, not a hang. Groups do not march
 * together; two that share two members are used in the same order by both. The communicator itself
 * is the group of all. Point to point, messages go by peer and tag, beside all that.
 *
 * One thread at a time uses a communicator (comm_abort: any). Bytes move inside its calls only, and
 * every call moves all that is under way: a long computation calls comm_poke now and then.
 *
 * Host back end (comm_host*.c): ranks of one node (equal node names) pass bytes through rings in
 * shared memory that leaves no name behind, and read large data where they lie in each other's
 * memory if all of a group can; ranks of different nodes use TCP, on one machine too.
 * Every pair holds a TCP connection, opened by a handshake keyed per generation: it proves that
 * both know the key before anything else is believed, and its end tells that the peer is gone. A
 * waiting call spins for at most COMM_SPIN_US, and not at all when the node has more ranks than
 * processors; then it sleeps in epoll_wait.
 *
 * Sums: floating-point numbers are added in the order of a group's members, ((r0 + r1) + r2) + ...,
 * whatever arrives first; a sum over lanes that must not know ranks (lane_sum.h) exchanges here and
 * adds by the lanes' tree.
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
#define COMM_EARLY_BYTES    (64u << 20) /* default of comm_config.early_bytes_max */

struct comm;
struct comm_engine; /* comm_engine.h */
struct comm_engine_ops;
struct comm_group;
struct comm_request;
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
    uint32_t op_deadline_ms;       /* for one call; 0: waits until an abort */
    uint64_t early_bytes_max;      /* of messages that came before their receives; 0: the default */
    int is_private; /* peers' memory is not read, nor this one's by them: all through rings */
    /* Flight recorder: call `sequence` is entered (waiting 1) or left (0); may be NULL. Every
     * collective of any group and every comm_wait or comm_wait_all is the next number of this rank.
     */
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

/* Any thread, any number of times: blocked and later calls return BL_EABORTED (or what ended the
 * engine before). Aborts the engine as well; what the back end's queue waits for then ends. */
void comm_abort(struct comm *comm);

/* Whether comm_abort was called. Any thread. */
int comm_is_aborted(const struct comm *comm);

/* NULL is fine. Not while another thread is inside a call of this communicator. Closes the engine.
 */
void comm_free(struct comm *comm);

uint32_t comm_rank(const struct comm *comm);
uint32_t comm_world(const struct comm *comm);
/* Whether the pair with `peer` passes bytes through shared memory (0: TCP). After comm_connect. */
int comm_is_shared(const struct comm *comm, uint32_t peer);

/*
 * Collectives of all ranks. All calls from here on return 0, BL_EABORTED, BL_EPEER (a peer is gone;
 * text says which), BL_EDEADLINE, BL_EPROTO (peers disagree about a message), BL_ELIMIT (more
 * arrived early than may be kept), or -ENOMEM. The first error is final: later calls return it too.
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

/*
 * Groups. Made without a message: every member makes it from the same list, and groups of the same
 * list in the same order. Entries of parts and bounds are by member, in the list's order.
 */

/* `ranks`: `count` ranks of the world, no two equal, this rank among them; copied. Needs no
 * connection yet. *ret is owned, and freed before its communicator. */
BL_MUST_CHECK int comm_group_new(struct comm_group **ret, struct comm *comm, const uint32_t *ranks,
                                 uint32_t count, struct bl_errmsg *msg);
void comm_group_free(struct comm_group *group); /* NULL is fine */
/* The group of all ranks, in their order; view, valid until comm_free. */
struct comm_group *comm_everyone(struct comm *comm);

/* As comm_group_new, and its exchange, all-gather, broadcast and sums move memory of the back end
 * by the attached engine; its sum_u64 stays on the host. All members call it together, groups that
 * share members in one order on all of them: it waits for the members. Errors of collectives. */
BL_MUST_CHECK int comm_group_on_engine(struct comm_group **ret, struct comm *comm,
                                       const uint32_t *ranks, uint32_t count,
                                       struct bl_errmsg *msg);
/* From now on the group's sums (comm_group_sum, comm_group_reduce_scatter) may be added in any
 * order, whichever is fastest: all members get the same bits, but the bits depend on the number of
 * members and, on an engine, on the library. Every member says it. */
void comm_group_set_fast(struct comm_group *group);

uint32_t comm_group_rank(const struct comm_group *group); /* this rank's place in the list */
uint32_t comm_group_size(const struct comm_group *group);

/* As comm_exchange, comm_allgather, comm_broadcast (root: a place in the list), comm_sum_u64. */
BL_MUST_CHECK int comm_group_exchange(struct comm_group *group, const struct comm_part *sends,
                                      const struct comm_part *recvs, struct bl_errmsg *msg);
BL_MUST_CHECK int comm_group_allgather(struct comm_group *group, void *base, const uint64_t *bounds,
                                       struct bl_errmsg *msg);
BL_MUST_CHECK int comm_group_broadcast(struct comm_group *group, uint32_t root, void *data,
                                       uint64_t bytes, struct bl_errmsg *msg);
BL_MUST_CHECK int comm_group_sum_u64(struct comm_group *group, uint64_t *values, uint32_t count,
                                     struct bl_errmsg *msg);

/* data[count], elements of `type` (enum kern_type), = the members' data added in fp32 in the list's
 * order, ((d0 + d1) + d2) + ..., and rounded to the type once; all members get the same bits. In
 * place. On the host KERN_F32 only (else BL_ENOTBUILT). */
BL_MUST_CHECK int comm_group_sum(struct comm_group *group, void *data, uint32_t type,
                                 uint64_t count, struct bl_errmsg *msg);
/* The same sums, of the own slice only: member m owns elements [bounds[m], bounds[m+1]) of data
 * (size + 1 entries, equal on all). The other elements are undefined afterwards. */
BL_MUST_CHECK int comm_group_reduce_scatter(struct comm_group *group, void *data, uint32_t type,
                                            const uint64_t *bounds, struct bl_errmsg *msg);

/* Of the host: data[count] = the members' data added element by element in the list's order, each
 * addition rounded to float: ((d0 + d1) + d2) + ...; all members get the same bits. In place. */
BL_MUST_CHECK int comm_group_sum_f32(struct comm_group *group, float *data, uint64_t count,
                                     struct bl_errmsg *msg);

/* The same sums, of the own slice only: member m owns elements [bounds[m], bounds[m+1]) of data
 * (size + 1 entries, equal on all). The other elements stay as they are. */
BL_MUST_CHECK int comm_group_reduce_scatter_f32(struct comm_group *group, float *data,
                                                const uint64_t *bounds, struct bl_errmsg *msg);

/*
 * The engine: who moves the memory of a back end that is not the host's.
 */

/* A direction between two ranks, for messages of the back end's memory: those whose tag has `kind`
 * in its upper 16 bits. */
struct comm_channel {
    uint32_t from, to, kind;
};
#define COMM_CHANNEL_FORWARD  0x0001u /* activations to the next stage */
#define COMM_CHANNEL_BACKWARD 0x0002u /* their gradients to the one before */
#define COMM_CHANNEL_EMBED    0x656du /* the embedding's weights, to a tied head */
#define COMM_CHANNEL_TIED     0x7469u /* the tied head's gradient, to the embedding */
#define COMM_CHANNEL_FETCH    0x6674u /* weights of a unit, between replicas */
static inline uint32_t comm_channel_kind(uint64_t tag)
{
    return (uint32_t)(tag >> 48);
}

/* After comm_connect, by all ranks. Takes `engine` (comm_free closes it), keeps `ops`. From now on
 * messages by tag move memory of the back end, through channels; groups made by
 * comm_group_on_engine too; everything else stays on the host. */
void comm_attach(struct comm *comm, const struct comm_engine_ops *ops, struct comm_engine *engine);
/* The engine's operations, or NULL. */
const struct comm_engine_ops *comm_engine_attached(const struct comm *comm);

/* Opens the channels that this rank is an end of, of a list that is the same on all ranks, and
 * meets their other ends. An engine must be attached. Errors of collectives. */
BL_MUST_CHECK int comm_channels_open(struct comm *comm, const struct comm_channel *channels,
                                     uint32_t count, struct bl_errmsg *msg);

/* After a sync of the back end: 0 when all that was called on the engine is good; else what ended
 * it. Errors of collectives; 0 without an engine. */
BL_MUST_CHECK int comm_check(struct comm *comm, struct bl_errmsg *msg);

/*
 * Point to point. A message of `to` is matched by the peer and its tag with a receive of the same
 * size, equal tags in the order of the calls. Starting never waits, and touches nobody that is not
 * ready. A message that arrives before its receive is kept, early_bytes_max bytes in all; beyond
 * that it waits at the sender's side, and a call that waits for something behind it is BL_ELIMIT.
 *
 * With an engine `data` is the back end's. All messages of a channel are sent and received in one
 * order, whatever their tags; nothing is kept early: a send stands in the channel's queue until the
 * receive is there. Starting makes the channel wait for what the back end was called to do before,
 * waiting makes the back end's queue wait for the message and returns at once.
 */

/* `data` is not written to, and must stay as it is until comm_wait. Done means handed over (copied
 * to the ring or the socket), not received. 0 bytes are a message as well. `to` is another rank.
 * *ret is given back to comm_wait, exactly once. */
BL_MUST_CHECK int comm_send_start(struct comm *comm, uint32_t to, uint64_t tag, const void *data,
                                  uint64_t bytes, struct comm_request **ret, struct bl_errmsg *msg);
/* `data` belongs to the receive until comm_wait. */
BL_MUST_CHECK int comm_recv_start(struct comm *comm, uint32_t from, uint64_t tag, void *data,
                                  uint64_t bytes, struct comm_request **ret, struct bl_errmsg *msg);

/* Waits until the request is done, and frees it; after an error comm_free does. NULL: done. */
BL_MUST_CHECK int comm_wait(struct comm *comm, struct comm_request *request, struct bl_errmsg *msg);
/* The same of `count` requests, none NULL, as one call, also of none: ranks whose numbers of
 * messages differ count the same calls. */
BL_MUST_CHECK int comm_wait_all(struct comm *comm, struct comm_request *const *requests,
                                uint32_t count, struct bl_errmsg *msg);
/* Whether comm_wait would return at once. Moves nothing. */
int comm_is_done(const struct comm_request *request);

/* Moves what goes without waiting. An error is kept for the next call that returns one. */
void comm_poke(struct comm *comm);
/* As comm_poke, and again until the request is done or nothing has moved for as long as a waiting
 * call spins. A message that is larger than a ring or a socket's buffer moves only while both sides
 * are in calls: this hands it over to a peer that waits for it. */
void comm_push(struct comm *comm, const struct comm_request *request);

#endif
