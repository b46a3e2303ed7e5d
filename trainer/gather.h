/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The weights that the owners' slots hold, brought into the working buffer of all who compute with
 * them:
 *
 *     own extents      from the slot, or a device's state; rounded to the back end's storage type
 *     the cut          all-gather among the replicas' ranks of the same part (not with ZeRO 0)
 *     replicated       what tensor parallel ranks have alike, from its owner among them
 *     tied head        the embedding, from the first stage to the last one's copy
 */
#ifndef TRAIN_TRAINER_GATHER_H
#define TRAIN_TRAINER_GATHER_H

#include <stdint.h>

#include "base/error.h"
#include "kernels/backend.h"
#include "trainer/comm.h"
#include "trainer/shard.h"
#include "trainer/state.h"

struct train_gather {
    const struct train_shard *shard; /* kept */
    struct kern *kern;               /* kept */
    uint64_t *bounds;                /* dp + 1: the cut, bytes */
    /* What tensor parallel ranks give each other: by peer r, tensors [to[r], to[r + 1]) of `lists`
     * go to it and [from[r], from[r + 1]) come from it. */
    uint32_t *lists, *to, *from;
    kern_real *pack; /* of the back end: first what goes, then what comes */
    uint64_t pack_elems;
    struct comm_part *parts; /* 2 * tp */
};

/* tables[tp]: the model as each tensor parallel rank has it; borrowed. Keeps `shard` and `kern`.
 * `gather` is caller's memory, ended by train_gather_close. -ENOMEM. */
BL_MUST_CHECK int train_gather_init(struct train_gather *gather, const struct train_shard *shard,
                                    struct kern *kern, struct train_model *const *tables,
                                    struct bl_errmsg *msg);
void train_gather_close(struct train_gather *gather); /* a zeroed one is fine */

/* Fills params[buffer_elems], of the back end's memory, with the weights that `state` has where it
 * is in use, else `slot`. The groups of this rank, which move the back end's memory, NULL where
 * there is one member; `comm` NULL in a world of one. Errors of the communicator and of the
 * failpoint mid-gather. */
BL_MUST_CHECK int train_gather_weights(struct train_gather *gather, const struct train_state *state,
                                       const void *slot, kern_real *params, struct comm_group *dp,
                                       struct comm_group *tp, struct comm *comm,
                                       struct bl_errmsg *msg);

/* The tensors of one unit that tensor parallel ranks have alike, into unit_params, where the unit
 * lies. */
BL_MUST_CHECK int train_gather_unit(struct train_gather *gather, uint32_t unit,
                                    kern_real *unit_params, struct comm_group *tp,
                                    struct bl_errmsg *msg);

#endif
