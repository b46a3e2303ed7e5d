/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An engine moves data that lies in a back end's own memory (a GPU's) between the ranks of a
 * communicator, beside the host's connections, which go on to carry what is small and the control.
 *
 *     comm (host): handshake, barrier, sum_u64, comm_abort --- engine: exchange, all-gather, sums
 *
 * Calls enqueue on the back end's queue and return; what they move is there for operations called
 * later. So an error may be told late: by the next call, or by check after a sync of the back end.
 * After any error, and after an abort, an engine only serves close. comm.h's calls on a group of
 * an engine (comm_group_on_engine), and its point-to-point calls on a communicator with one, come
 * here; errors are those of comm.h.
 */
#ifndef TRAINER_COMM_ENGINE_H
#define TRAINER_COMM_ENGINE_H

#include <stdint.h>

#include "base/error.h"
#include "kernels/backend.h"
#include "trainer/comm.h"

/* Memory of the back end that an engine takes at open in a world of several ranks: for the addends
 * of ordered sums, piece by piece. */
#define COMM_ENGINE_SCRATCH_BYTES (32u << 20)

struct comm_engine_group;

struct comm_engine_ops {
    const char *name;    /* "nccl" */
    const char *version; /* of the library in use, with its number */
    /* All ranks of the connected `comm` call it together; meets them within the deadline, which is
     * kept for later opens (BL_EDEADLINE names who did not come; BL_EVERSION: another library
     * there). Borrows kern and comm, which outlive it. *ret goes to comm_attach. */
    int (*open)(struct comm_engine **ret, struct kern *kern, struct comm *comm,
                uint32_t deadline_ms, struct bl_errmsg *msg);
    void (*close)(struct comm_engine *engine); /* after its groups; waits for what was enqueued */
    /* Any thread, any number of times; returns soon, whatever the peers do. */
    void (*abort)(struct comm_engine *engine);
    /* 0, or the error that ended it; after a sync of the back end: what was enqueued is good. */
    int (*check)(struct comm_engine *engine, struct bl_errmsg *msg);

    /* All members call it together, with the same list, ascending in world rank or not. */
    int (*group_open)(struct comm_engine *engine, const uint32_t *ranks, uint32_t count,
                      struct comm_engine_group **ret, struct bl_errmsg *msg);
    void (*group_close)(struct comm_engine_group *group);
    /* Of comm.h, on the back end's memory. */
    int (*exchange)(struct comm_engine_group *group, const struct comm_part *sends,
                    const struct comm_part *recvs, struct bl_errmsg *msg);
    int (*allgather)(struct comm_engine_group *group, void *base, const uint64_t *bounds,
                     struct bl_errmsg *msg);
    int (*broadcast)(struct comm_engine_group *group, uint32_t root, void *data, uint64_t bytes,
                     struct bl_errmsg *msg);
    /* Elements of `type` (enum kern_type) added in fp32 in the order of members, rounded once;
     * is_fast: in the library's own order. */
    int (*sum)(struct comm_engine_group *group, void *data, uint32_t type, uint64_t count,
               int is_fast, struct bl_errmsg *msg);
    int (*reduce_scatter)(struct comm_engine_group *group, void *data, uint32_t type,
                          const uint64_t *bounds, int is_fast, struct bl_errmsg *msg);

    /* Point to point. comm_channels_open; within a channel, sends and receives are called in the
     * same order on both sides, and never wait for one another across channels. *ret: a token for
     * wait, which makes the back end's queue wait, not the host. */
    int (*channels_open)(struct comm_engine *engine, const struct comm_channel *channels,
                         uint32_t count, struct bl_errmsg *msg);
    int (*send)(struct comm_engine *engine, uint32_t to, uint64_t tag, const void *data,
                uint64_t bytes, void **ret, struct bl_errmsg *msg);
    int (*recv)(struct comm_engine *engine, uint32_t from, uint64_t tag, void *data, uint64_t bytes,
                void **ret, struct bl_errmsg *msg);
    int (*wait)(struct comm_engine *engine, void *token, struct bl_errmsg *msg);
};

#endif
