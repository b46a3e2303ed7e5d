/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside of NCCL's stand-in: nccl_sim.c has communicators and groups of calls, nccl_sim_run.c what
 * their kernels do.
 *
 * A communicator is memory that its ranks share: a memfd of whoever made the id, which names it by
 * process and descriptor, with a ring for each ordered pair of ranks. A group of calls becomes one
 * operation on a stream, which moves all that was called side by side, as a kernel of NCCL's does,
 * and leaves its buffers spoilt when it is aborted. As with NCCL, nothing is on the stream before
 * ncclCommGetAsyncError has said that the call is over.
 */
#ifndef GPUSIM_NCCL_NCCL_SIM_H
#define GPUSIM_NCCL_NCCL_SIM_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "nccl.h"

#define SIM_RANKS_MAX  16u
#define SIM_RING_BYTES 65536u
#define SIM_OPS_MAX    256u

enum sim_kind {
    SIM_SEND,
    SIM_RECV,
    SIM_BROADCAST,
    SIM_ALLGATHER,
    SIM_ALLREDUCE,
    SIM_REDUCESCATTER,
    SIM_REDUCE
};

struct sim_ring {
    _Alignas(64) _Atomic uint64_t head;
    _Alignas(64) _Atomic uint64_t tail;
    uint8_t data[SIM_RING_BYTES];
};

struct sim_shared {
    _Atomic uint32_t arrived; /* a bit a rank */
    _Atomic uint32_t nranks;
    struct sim_ring rings[SIM_RANKS_MAX * SIM_RANKS_MAX]; /* [from][to] */
};

struct sim_op {
    enum sim_kind kind;
    const uint8_t *from;
    uint8_t *to;
    uint64_t count; /* elements */
    uint32_t type;
    int peer; /* or root */
};

struct sim_batch {
    ncclComm_t comm;
    cudaStream_t stream;
    struct sim_op ops[SIM_OPS_MAX];
    uint32_t count;
};

struct ncclComm {
    struct sim_shared *shared;
    uint32_t rank, nranks;
    _Atomic int is_aborted;
    _Atomic int state;   /* ncclResult_t of what went wrong asynchronously */
    _Atomic int running; /* batches on streams */
    int is_joined, is_finalized;
    int polls;               /* until what was called is over */
    struct sim_batch *batch; /* called, not yet on its stream */
    char text[200];          /* of the error */
};

/* Operation of a stream; drop comes behind it, also where it did not run. */
void sim_batch_run(void *arg);
void sim_batch_drop(void *arg);
int sim_fault(const char *name);

#endif
