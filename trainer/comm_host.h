/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside of the host communicator; only comm_host*.c include this.
 *
 *     comm_host.c       listener, life of a communicator, the exchange that moves all bytes
 *     comm_host_join.c  the keyed handshake that makes the pairs
 *     comm_host_shm.c   rings in shared memory, doorbells
 *     comm_host_key.c   SipHash-2-4, by which a peer proves that it knows the key
 *     comm_ops.c        the collectives, on comm_exchange alone
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
#include <stdatomic.h>
#include <stdint.h>

#include "trainer/comm.h"

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
    uint64_t sequence, bytes;
};

struct comm_flow { /* one direction of a pair within one exchange */
    struct comm_frame frame;
    uint8_t *data;
    uint64_t total; /* frame and data; 0: nothing to do */
    uint64_t done;
};

struct comm_link {             /* the pair with one peer */
    int fd;                    /* TCP; -1 for oneself */
    int eof;                   /* the peer's end is closed */
    int shared;                /* bytes go through the rings, the socket only tells of the end */
    struct comm_shm *peer_shm; /* mapping of the peer's memory; NULL without */
    uint64_t peer_shm_bytes;
    struct comm_ring *tx, *rx; /* tx lies in the peer's memory, rx in ours */
    int peer_bell;             /* the peer's doorbell, or -1 */
    struct comm_flow send, recv;
};

struct comm {
    struct comm_listener *listener; /* kept */
    uint32_t rank, world;
    uint64_t generation, key[2];
    uint32_t op_deadline_ms;
    void (*note)(void *ctx, uint64_t sequence, uint32_t waiting);
    void *note_ctx;
    struct sockaddr_in *addrs; /* of all ranks' listeners */
    uint32_t *local_index;     /* position among the ranks of this node; UINT32_MAX: another node */
    uint32_t local_count;
    int shm_fd; /* own memory; -1: no peers on this node */
    struct comm_shm *shm;
    uint64_t shm_bytes;
    struct comm_link *links; /* world */
    struct pollfd *polls;    /* world + 1 */
    uint64_t *bounds;        /* world + 1; scratch of the collectives */
    struct comm_part *parts; /* 2 * world; the same */
    uint64_t *words;         /* 64 * world; the same */
    uint64_t sequence;       /* of the newest collective */
    uint32_t spin_us;
    int broken; /* the first error; later calls return it */
    _Atomic int aborted;
};

/* SipHash-2-4 of `bytes` bytes under a 128-bit key (Aumasson and Bernstein, 2012). */
uint64_t comm_siphash(const uint64_t key[2], const void *data, uint64_t bytes);

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

#endif
