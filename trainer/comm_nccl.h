/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine over NCCL: what its files know of each other.
 *
 *     comm_nccl.c        open, groups, channels, close: meeting the others, ids, initialisation
 *     comm_nccl_guard.c  the lock, waiting for NCCL, the monitor and helper threads, the end
 *     comm_nccl_move.c   exchange, all-gather, broadcast, sums, messages
 *
 * It rests on facts of NCCL 2.28.
 *
 * Communicators are non-blocking, so that no call of NCCL waits for a peer: it returns
 * ncclInProgress, a thread of NCCL's goes on, and the caller polls ncclCommGetAsyncError until it
 * is over (nccl_settle), before anything else is put on the stream. A poll that takes longer than
 * the deadline ends the engine.
 *
 * Never are two threads inside NCCL: `inside` is held around every call, by the thread that calls
 * the engine, by the monitor that polls every 100 ms, and by the helper that aborts.
 *
 * ncclCommAbort waits for the kernels that are under way, which leave on its word, and for ever
 * where a peer of the same node hangs or a kernel of ours is stuck. So all communicators are
 * aborted in one group call, in the helper thread, and the monitor gives it NCCL_ABORT_MS: then the
 * process ends with NCCL_EXIT_STUCK, and its daemon starts another.
 *
 * What a kernel had in hand when it was aborted is garbage. After the end, `check` says so, and the
 * rank takes its state from sealed slots.
 *
 * NCCL does not notice that a peer died: whoever knows it says comm_abort (the daemon, through the
 * rank's watcher). Nor does it tell peers that a communicator was aborted.
 *
 * Ids: a communicator is joined by who has its ncclUniqueId, made new for each. Its first member
 * makes it and sends it over the host communicator, whose pairs have proved to each other that they
 * know the generation's key, which the daemon gave to the ranks of this generation alone. So an id
 * is known to those who would have had it from the daemon, no id outlives its generation, and the
 * message tells at the same time that the member has come: who has not is named at the deadline,
 * before NCCL is called.
 *
 * One communicator a group, of the compute stream: what a collective moves is there for what is
 * called later, so it may as well stand in that queue. Two ranks a channel, with a stream of its
 * own: a message neither waits for another channel's nor for kernels called behind it. Connections
 * of a channel are made when it is opened, by a message of nothing: the first real one could not
 * otherwise start before its receive.
 */
#ifndef TRAINER_COMM_NCCL_H
#define TRAINER_COMM_NCCL_H

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <pthread.h>
#include <stdint.h>

#include "kernels/cuda/device.h"
#include "trainer/comm_engine.h"
#include "trainer/comm_host.h"

#define NCCL_POLL_MS      100   /* between looks of the monitor */
#define NCCL_ABORT_MS     10000 /* for an abort to end; then the process does */
#define NCCL_FINALIZE_MS  3000  /* for a good end; then it is an abort */
#define NCCL_EXIT_STUCK   75    /* of a process whose communicators cannot be aborted */
#define NCCL_OLDEST       22800 /* the code of the oldest version that has what is used here */
#define NCCL_SUM_ALIGN    64u   /* elements; where slices of a sum begin */
#define NCCL_SMALL_BYTES  (256u * 1024) /* of all members' addends: each adds them itself */
#define NCCL_CHANNEL_CTAS 4 /* of a channel's kernels: several are under way beside computing */

struct nccl_token { /* a message that was called */
    struct nccl_token *next;
    cudaEvent_t done;
};

struct nccl_channel {
    struct comm_channel at;
    ncclComm_t comm;
    cudaStream_t stream;
    cudaEvent_t ready; /* compute's work that the message waits for */
};

struct comm_engine_group {
    struct comm_engine *engine;
    ncclComm_t comm;
    uint32_t count, me;
    struct comm_engine_group *next; /* of those that could not be joined */
};

struct comm_engine {
    struct kern *kern;
    struct comm *comm;
    cudaStream_t compute; /* kern's */
    int device;
    uint32_t deadline_ms;    /* of opening and of a poll */
    uint32_t op_deadline_ms; /* of what was enqueued; 0: none */
    void *scratch;           /* COMM_ENGINE_SCRATCH_BYTES; NULL with one rank */
    struct nccl_channel *channels;
    uint32_t channel_count;
    struct nccl_token *spare;           /* to use again */
    struct comm_engine_group *unjoined; /* kept: NCCL may write to `comm` until all is aborted */
    cudaEvent_t watched;                /* behind some call of the compute stream */

    pthread_mutex_t inside; /* held in every call of NCCL; guards the next two */
    ncclComm_t *comms;      /* all that are open or being opened */
    uint32_t comm_count;

    pthread_mutex_t lock; /* all below */
    pthread_cond_t changed;
    pthread_t monitor, helper;
    int has_threads;
    int is_asked;   /* abort */
    int is_aborted; /* all communicators are gone */
    int is_closing;
    int failed; /* the first error, 0: none */
    struct bl_errmsg why;
    uint64_t watched_ns; /* since when `watched` is waited for; 0: it is free */
};

/* ---- comm_nccl_guard.c ---- */

/* Starts both threads. */
int nccl_guard_start(struct comm_engine *e, struct bl_errmsg *msg);
/* Ends them. When asked to abort before, after that is done. */
void nccl_guard_stop(struct comm_engine *e);
/* Begins to use NCCL: 0 with the lock held, or the error that ended the engine. */
BL_MUST_CHECK int nccl_enter(struct comm_engine *e, struct bl_errmsg *msg);
void nccl_leave(struct comm_engine *e);
/* Keeps the first error and has everything aborted; returns what ended the engine, with its text.
 * Not with `inside` held. */
int nccl_fail(struct comm_engine *e, int rc, struct bl_errmsg *msg, const char *fmt, ...)
    BL_PRINTF(4, 5);
/* What ended the engine, or 0. */
int nccl_ended(struct comm_engine *e, struct bl_errmsg *msg);
/* After a call that returned `result` (with the lock free): waits until `comm` is done with it. */
BL_MUST_CHECK int nccl_settle(struct comm_engine *e, ncclComm_t comm, ncclResult_t result,
                              const char *what, struct bl_errmsg *msg);
/* The same of `count` communicators that one group call was of, within a deadline of its own. */
BL_MUST_CHECK int nccl_settle_all(struct comm_engine *e, const ncclComm_t *comms, uint32_t count,
                                  ncclResult_t result, const char *what, uint32_t deadline_ms,
                                  struct bl_errmsg *msg);
/* A call of CUDA's that failed ends the engine too. */
BL_MUST_CHECK int nccl_cuda(struct comm_engine *e, cudaError_t error, const char *what,
                            struct bl_errmsg *msg);
/* Has the compute stream's work so far watched for the op's deadline. */
void nccl_watch(struct comm_engine *e);
/* Flushes and frees all communicators; what does not end in NCCL_FINALIZE_MS is aborted. */
void nccl_finalize(struct comm_engine *e);
/* abort and check of struct comm_engine_ops. */
void nccl_abort(struct comm_engine *e);
int nccl_check(struct comm_engine *e, struct bl_errmsg *msg);

/* ---- comm_nccl_move.c: the operations of struct comm_engine_ops (comm_engine.h), whose shapes,
 * order and errors they have. One thread calls them; they enqueue on the compute stream. ---- */

/* exchange: one group call of sends and receives. */
int nccl_exchange(struct comm_engine_group *g, const struct comm_part *sends,
                  const struct comm_part *recvs, struct bl_errmsg *msg);
/* allgather: NCCL's where all parts have one size, else a group of broadcasts. */
int nccl_allgather(struct comm_engine_group *g, void *base, const uint64_t *bounds,
                   struct bl_errmsg *msg);
/* broadcast. */
int nccl_broadcast(struct comm_engine_group *g, uint32_t root, void *data, uint64_t bytes,
                   struct bl_errmsg *msg);
/* sum: in the members' order by sum_parts, in pieces that fit in the scratch; fast: NCCL's. */
int nccl_sum(struct comm_engine_group *g, void *data, uint32_t type, uint64_t count, int is_fast,
             struct bl_errmsg *msg);
/* reduce_scatter: the same. */
int nccl_reduce_scatter(struct comm_engine_group *g, void *data, uint32_t type,
                        const uint64_t *bounds, int is_fast, struct bl_errmsg *msg);
/* send, on its channel's stream, behind what compute was called to do. */
int nccl_send(struct comm_engine *e, uint32_t to, uint64_t tag, const void *data, uint64_t bytes,
              void **ret, struct bl_errmsg *msg);
/* recv, likewise. */
int nccl_recv(struct comm_engine *e, uint32_t from, uint64_t tag, void *data, uint64_t bytes,
              void **ret, struct bl_errmsg *msg);
/* wait: compute waits for the token's event, the host for nothing. */
int nccl_wait(struct comm_engine *e, void *token, struct bl_errmsg *msg);

/* The plug-in's export: the operations, with the version of the library in use. */
const struct comm_engine_ops *belay_cuda_comm(void);

#endif
