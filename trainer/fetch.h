/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Weights of ZeRO 3, unit by unit: gathered from the owners' slots just before a pass needs them,
 * into the place of the unit before. For one stage.
 */
#ifndef TRAIN_TRAINER_FETCH_H
#define TRAIN_TRAINER_FETCH_H

#include <stdint.h>

#include "base/error.h"
#include "trainer/comm.h"
#include "trainer/gather.h"
#include "trainer/shard.h"

struct train_fetch {
    const struct train_shard *shard; /* kept */
    struct train_gather *gather;     /* kept: what tensor parallel ranks have alike */
    const void *slot;                /* borrowed: the step whose weights are used */
    float *unit;                     /* the weights in use */
    uint64_t unit_bytes;
    uint64_t *bounds; /* dp + 1: scratch */
};

/* Keeps shard and gather. `fetch` is caller's memory, ended by train_fetch_close. -ENOMEM. */
BL_MUST_CHECK int train_fetch_init(struct train_fetch *fetch, const struct train_shard *shard,
                                   struct train_gather *gather, struct bl_errmsg *msg);
void train_fetch_close(struct train_fetch *fetch); /* a zeroed one is fine */

/* *ret: the unit's first element, until the next call. All ranks of both groups fetch the same
 * units in the same order. Errors of the communicator. */
BL_MUST_CHECK int train_fetch_unit(struct train_fetch *fetch, uint32_t unit, struct comm_group *dp,
                                   struct comm_group *tp, const float **ret, struct bl_errmsg *msg);

#endif
