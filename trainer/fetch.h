/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Weights of ZeRO 3, unit by unit: gathered from the owners' slots when a pass needs them. For one
 * stage. Owners send their parts and ask for the others', by tag, so that the next unit of the pass
 * can be under way while this one is in use:
 *
 *     fetch(u)    wait for u (asked for at the unit before; else ask now); ask for the next
 *     buffers     | unit in use | unit on its way |
 *
 * All ranks of a dp group fetch the same units in the same order, hence ask and send alike. On a
 * device a unit's parts are exchanged by the group instead, in the queue.
 */
#ifndef TRAIN_TRAINER_FETCH_H
#define TRAIN_TRAINER_FETCH_H

#include <stdint.h>

#include "base/error.h"
#include "kernels/backend.h"
#include "trainer/comm.h"
#include "trainer/gather.h"
#include "trainer/shard.h"

struct train_fetch {
    const struct train_shard *shard; /* kept */
    struct train_gather *gather;     /* kept: what tensor parallel ranks have alike */
    struct kern *kern;               /* kept */
    const struct train_state *state; /* borrowed: the weights, where it is in use, */
    const void *slot;                /* else borrowed: the step whose weights are used */
    kern_real *memory;               /* of the back end: the buffers; NULL: not in use */
    uint64_t buffer_elems, memory_bytes;
    uint32_t *ranks;                /* dp: the group in the world */
    struct comm_request **requests; /* 2 * dp: of the unit on its way */
    uint32_t request_count;
    struct comm_part *parts; /* 2 * dp */
    uint32_t next;           /* the unit on its way; UINT32_MAX: none */
    uint32_t turn;           /* which buffer is the next */
    uint64_t sequence;       /* of fetches: their tags */
};

/* Elements of its buffers: the largest unit, twice where there are others to wait for. */
uint64_t train_fetch_elems(const struct train_model *model, uint32_t dp);

/* Keeps shard, kern and gather. `fetch` is caller's memory, ended by train_fetch_close. -ENOMEM. */
BL_MUST_CHECK int train_fetch_init(struct train_fetch *fetch, const struct train_shard *shard,
                                   struct kern *kern, struct train_gather *gather,
                                   struct bl_errmsg *msg);
void train_fetch_close(struct train_fetch *fetch); /* a zeroed one is fine */

/* A new communicator, or another step's slot: nothing is under way. */
void train_fetch_begin(struct train_fetch *fetch, const struct train_state *state,
                       const void *slot);

/* *ret: the unit's first element, until the next call. `backward`: which unit comes next in the
 * pass. `comm` NULL in a world of one; `dp` and `tp` (which move the back end's memory) NULL where
 * there is one member. All ranks of both
 * groups fetch the same units in the same order. Errors of the communicator. */
BL_MUST_CHECK int train_fetch_unit(struct train_fetch *fetch, uint32_t unit, int backward,
                                   struct comm *comm, struct comm_group *dp, struct comm_group *tp,
                                   const kern_real **ret, struct bl_errmsg *msg);

#endif
