/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside of the host communicator; only comm*.c include this.
 *
 *     comm_host.c       listener, life of a communicator
 *     comm_host_join.c  the keyed handshake that makes the pairs
 *     comm_host_shm.c   rings in shared memory, doorbells
 *     comm_host_key.c   SipHash-2-4, by which a peer proves that it knows the key
 *     comm_progress.c   the engine: moves the bytes of all pairs, spins, sleeps, tells of ends
 *     comm_request.c    one message: queues, matching, early ones; point to point
 *     comm_group.c      groups and the collectives that add nothing but integers
 *     comm_sum.c        ordered sums of floats
 *     comm_direct.c     reading a peer's memory where it lies
 *
 * On a pair, each direction is a stream of messages, header (struct comm_frame) and bytes, in the
 * order in which they were started. A message belongs to a channel: the tagged ones, or those of a
 * group. The receiver reads a header, looks for the receive that was started for it and lets the
 * bytes go to their place. Without one, a tagged message is kept (early); one of a collective stays
 * where it is until this rank comes to that collective, or until it stands before a receive.
 *
 * Shared memory of a rank, a memfd opened by its peers as /proc/PID/fd/N:
 *
 *     +--------+------------------+------------------+---
 *     | header | ring from peer 0 | ring from peer 1 | ...   (peers of this node, by rank)
 *     +--------+------------------+------------------+---
 *
 * A ring has one producer (the peer) and one consumer (the owner). `sleeping` in the header says
 * that the owner is about to poll; who then makes progress possible for it (bytes in, or room in a
 * ring of another's that the owner fills) clears the flag and writes to the owner's doorbell, a
 * pipe. Flag and ring positions are sequentially consistent on both sides, so no wake-up is lost.
 */
#ifndef TRAINER_COMM_HOST_H
#define TRAINER_COMM_HOST_H

#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "trainer/comm.h"
#include "trainer/comm_engine.h"

#define COMM_RING_BYTES (256 * 1024) /* a power of two; small, so that it stays in the cache */
#define COMM_SHM_MAGIC  0x424c5953484d3031ull

struct comm_ring {
    _Alignas(64) _Atomic uint64_t head; /* bytes ever written */
    _Alignas(64) _Atomic uint64_t tail; /* bytes ever read */
    _Alignas(64) uint8_t data[COMM_RING_BYTES];
};

struct comm_shm {
    uint64_t magic;
    uint64_t nonce[2]; /* random: proves that the right file was opened */
    _Alignas(64) _Atomic uint32_t sleeping;
    _Alignas(64) struct comm_ring rings[]; /* one for each peer of this node */
};

struct comm_listener {
    int fd;
    int bell[2]; /* own doorbell: a pipe; [0] polled here, [1] opened by peers */
    uint16_t port;
    char endpoint[COMM_ENDPOINT_BYTES];
};

/* Header before the bytes of each message. */
struct comm_frame {
    uint64_t channel; /* COMM_TAGGED, or a group's */
    uint64_t tag;     /* of a collective: its number in the group * COMM_STREAMS + stream */
    uint64_t bytes;
};
#define COMM_TAGGED  0u
#define COMM_STREAMS 2u /* within a collective, each in its own order */

struct comm_request {          /* one message, on its way out or in */
    struct comm_request *next; /* in its queue, or spare */
    struct comm_request *made; /* of point to point: all that were ever made */
    struct comm_frame frame;
    uint8_t *data;
    uint64_t done;  /* bytes moved; of a send with its header */
    uint32_t *open; /* counted down when done; may be NULL */
    uint32_t peer;
    uint8_t is_done;
    uint8_t is_wanted; /* the call that runs waits for it */
    uint8_t is_early;
    uint8_t is_engines; /* `token` is the engine's, and nothing else counts */
    void *token;
};

struct comm_queue {
    struct comm_request *first, **last;
};

enum comm_stuck {
    COMM_MOVES = 0,
    COMM_AHEAD, /* the peer is in a collective that this rank comes to */
    COMM_FULL   /* it does not fit in early_bytes_max */
};

struct comm_link {             /* the pair with one peer */
    int fd;                    /* TCP; -1 for oneself */
    int eof;                   /* the peer's end is closed */
    int shared;                /* bytes go through the rings, the socket only tells of the end */
    struct comm_shm *peer_shm; /* mapping of the peer's memory; NULL without */
    uint64_t peer_shm_bytes;
    struct comm_ring *tx, *rx; /* tx lies in the peer's memory, rx in ours */
    int peer_bell;             /* the peer's doorbell, or -1 */
    int can_read, can_write;   /* the socket did not say that it would block */
    int is_busy;               /* in comm.busy */
    enum comm_stuck is_stuck;  /* the message at the head has no receive and is not kept */
    struct comm_queue sends;   /* the first one is on its way */
    struct comm_queue recvs;   /* started, not done */
    struct comm_queue early;   /* without a receive, their bytes are our own memory */
    struct comm_frame in;      /* header of the message that comes in */
    uint64_t in_bytes;         /* of that header so far */
    struct comm_request *to;   /* where its bytes go; NULL: header not complete or not matched */
};

struct comm_group {
    struct comm *comm;
    uint32_t *ranks; /* count */
    uint32_t count, me;
    uint64_t channel;
    uint64_t sequence;                /* of the newest collective */
    uint32_t open;                    /* messages of the running one that are not done */
    struct comm_request *outs;        /* count */
    struct comm_request *ins;         /* count */
    uint64_t *bounds;                 /* count + 1; scratch of the collectives */
    struct comm_part *parts;          /* 2 * count; the same */
    uint64_t *words;                  /* COMM_WORDS_MAX * count; the same */
    struct comm_direct *direct;       /* count: where the members' data lie; NULL before a trial */
    int is_direct;                    /* 1: they can be read there; -1: not; 0: untried */
    struct comm_sum *sum;             /* memory of the sums of floats; NULL before the first */
    int is_fast;                      /* sums in any order */
    int is_engines;                   /* data is the back end's */
    struct comm_engine_group *engine; /* NULL with one member */
};

#define COMM_WORDS_MAX 64u /* of one sum of integers */

struct comm {
    struct comm_listener *listener; /* kept */
    uint32_t rank, world;
    uint64_t generation, key[2];
    uint32_t op_deadline_ms;
    int is_private;
    void (*note)(void *ctx, uint64_t sequence, uint32_t waiting);
    void *note_ctx;
    struct sockaddr_in *addrs; /* of all ranks' listeners */
    uint32_t *local_index;     /* position among the ranks of this node; UINT32_MAX: another node */
    uint32_t local_count;
    int shm_fd; /* own memory; -1: no peers on this node */
    struct comm_shm *shm;
    uint64_t shm_bytes;
    struct comm_link *links; /* world */
    int epoll_fd;            /* the sockets of all pairs, and the doorbell; -1 before the join */
    uint32_t socket_count;   /* pairs whose bytes go through sockets */
    uint32_t *shared;        /* peers whose bytes go through rings */
    uint32_t shared_count;
    uint32_t *busy; /* peers with something to move; a list in no order */
    uint32_t busy_count, busy_first;
    struct comm_group *everyone;
    uint64_t *channels; /* of all groups that were ever made */
    uint32_t channel_count;
    struct comm_request *spare; /* to use again */
    struct comm_request *made;
    uint64_t early_bytes, early_bytes_max;
    uint64_t calls; /* of the flight recorder */
    uint32_t spin_us;
    int broken; /* the first error; later calls return it */
    struct bl_errmsg why;
    pthread_mutex_t engine_lock; /* an abort finds the engine whole */
    const struct comm_engine_ops *ops;
    struct comm_engine *engine; /* NULL: none; set once */
    _Atomic int aborted;
};

/* SipHash-2-4 of `bytes` bytes under a 128-bit key (Aumasson and Bernstein, 2012). */
uint64_t comm_siphash(const uint64_t key[2], const void *data, uint64_t bytes);

/* ---- comm_host_shm.c ---- */

/* Makes the own memory with a ring for each other rank of the node. */
int comm_shm_make(struct comm *comm, struct bl_errmsg *msg);
/* Opens a peer's memory and doorbell by its process id and descriptor numbers; checks the nonce. On
 * success the link has its rings. Negative: not possible, the pair stays on TCP. */
int comm_shm_open(struct comm *comm, uint32_t peer, int pid, int shm_fd, int bell_fd,
                  const uint64_t nonce[2]);
void comm_shm_drop(struct comm_link *link);
/* Moves what goes; bytes moved. */
uint64_t comm_ring_write(struct comm_ring *ring, const uint8_t *data, uint64_t bytes);
uint64_t comm_ring_read(struct comm_ring *ring, uint8_t *data, uint64_t bytes);
/* Wakes the link's peer if it sleeps. */
void comm_bell_ring(struct comm_link *link);
/* Empties the own doorbell. */
void comm_bell_drain(struct comm_listener *listener);

/* Sets up the pair with `peer`: by calling it (peer < rank), or by answering whoever calls. */
int comm_join_all(struct comm *comm, uint64_t deadline_ns, struct bl_errmsg *msg);

/* ---- comm_progress.c ---- */

/* After the join: puts all pairs under the engine. */
int comm_progress_open(struct comm *comm, struct bl_errmsg *msg);
/* Moves bytes until is_over(ctx) says 1, or a negative error; is_over may start messages. The
 * call's frame: refuses a broken communicator, tells the flight recorder, keeps the first error. */
int comm_drive(struct comm *comm, int (*is_over)(void *ctx, struct bl_errmsg *msg), void *ctx,
               struct bl_errmsg *msg);
/* Notes that the pair with `peer` has something to move. */
void comm_link_wake(struct comm *comm, uint32_t peer);
/* Sends what goes at once to `peer`; an end shows in the next call. */
void comm_link_push(struct comm *comm, uint32_t peer);
/* Returns the communicator's first error with its text, or 0. */
int comm_broken(const struct comm *comm, struct bl_errmsg *msg);
/* Makes `rc` with the text `why` the first error, and returns it. */
int comm_fail(struct comm *comm, int rc, const struct bl_errmsg *why, struct bl_errmsg *msg);

/* ---- comm_attach.c: calls that go to the engine ---- */

/* Whatever is to be said of an aborted communicator: what ended the engine, or the abort. */
int comm_aborted_error(struct comm *comm, struct bl_errmsg *msg);
int comm_attached_exchange(struct comm_group *group, const struct comm_part *sends,
                           const struct comm_part *recvs, struct bl_errmsg *msg);
int comm_attached_allgather(struct comm_group *group, void *base, const uint64_t *bounds,
                            struct bl_errmsg *msg);
int comm_attached_broadcast(struct comm_group *group, uint32_t root, void *data, uint64_t bytes,
                            struct bl_errmsg *msg);
int comm_attached_send(struct comm *comm, uint32_t to, struct comm_request *request,
                       struct bl_errmsg *msg);
int comm_attached_recv(struct comm *comm, uint32_t from, struct comm_request *request,
                       struct bl_errmsg *msg);
int comm_attached_wait(struct comm *comm, struct comm_request *const *requests, uint32_t count,
                       struct bl_errmsg *msg);

/* ---- comm_request.c ---- */

/* comm_send_start and comm_recv_start of the host's memory, with an engine attached or not. */
BL_MUST_CHECK int comm_host_send(struct comm *comm, uint32_t to, uint64_t tag, const void *data,
                                 uint64_t bytes, struct comm_request **ret, struct bl_errmsg *msg);
BL_MUST_CHECK int comm_host_recv(struct comm *comm, uint32_t from, uint64_t tag, void *data,
                                 uint64_t bytes, struct comm_request **ret, struct bl_errmsg *msg);

void comm_queue_init(struct comm_queue *queue);
/* Starts a message: channel, tag, bytes, data, peer, open and is_wanted are set by the caller, and
 * the request stays until it is done. */
void comm_send_post(struct comm *comm, struct comm_request *request);
BL_MUST_CHECK int comm_recv_post(struct comm *comm, struct comm_request *request,
                                 struct bl_errmsg *msg);
/* The header at the head of a link is complete: sets link->to, or link->is_stuck. */
BL_MUST_CHECK int comm_link_match(struct comm *comm, uint32_t peer, struct bl_errmsg *msg);
/* All bytes of link->to are there. */
void comm_link_arrived(struct comm_link *link);
/* Takes a message off its queue: it is done. */
void comm_request_finish(struct comm_queue *queue, struct comm_request *request);
void comm_requests_free(struct comm *comm);

/* ---- comm_group.c ---- */

/* comm_group_exchange of the host's memory, whoever moves the group's own. */
int comm_host_exchange(struct comm_group *group, const struct comm_part *sends,
                       const struct comm_part *recvs, struct bl_errmsg *msg);

/* A collective begins: the next number of the group. */
void comm_group_begin(struct comm_group *group);
/* As comm_group_allgather, by messages whatever the size: what reading directly is made of, and all
 * that has its bounds or its data in the group's own memory, which that overwrites. */
int comm_group_gather_sent(struct comm_group *group, void *base, const uint64_t *bounds,
                           struct bl_errmsg *msg);
/* Fills a message of the running collective; *open counts it. */
void comm_group_message(struct comm_group *group, struct comm_request *request, uint32_t member,
                        uint32_t stream, void *data, uint64_t bytes);

/* ---- comm_direct.c ---- */

#define COMM_DIRECT_BYTES                                                                          \
    (256u * 1024) /* of a collective, from which on it is worth the meetings */

/* A collective: all members tell where their data lie. *ret_is_direct: all can read them there,
 * until the members' next collective. */
int comm_direct_meet(struct comm_group *group, const void *data, int *ret_is_direct,
                     struct bl_errmsg *msg);
/* After the last read: a collective that ends when all have come to it. */
int comm_direct_part(struct comm_group *group, struct bl_errmsg *msg);
/* `bytes` bytes from `offset` of the member's data. */
int comm_direct_read(struct comm_group *group, uint32_t member, uint64_t offset, void *to,
                     uint64_t bytes, struct bl_errmsg *msg);

/* ---- comm_sum.c ---- */

void comm_sum_free(struct comm_sum *sum); /* NULL is fine */

#endif
