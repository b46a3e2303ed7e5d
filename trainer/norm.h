/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The norm of the reduced gradient, with the same bits in every layout of one tp.
 *
 * Squares are summed over blocks of KERN_BLOCK elements of the flat order, in fp64; then
 *
 *     sum of squares = tree over [t][block]
 *
 * with the blocks of all tensor parallel ranks one behind the other, zero for those that a rank has
 * but does not own (shard.h). Which rank has a block's gradient depends on the layout; where its
 * sum stands does not.
 */
#ifndef TRAIN_TRAINER_NORM_H
#define TRAIN_TRAINER_NORM_H

#include <stdint.h>

#include "base/error.h"
#include "kernels/backend.h"
#include "trainer/comm.h"
#include "trainer/shard.h"

struct train_norm {
    const struct train_shard *shard; /* kept */
    struct kern *kern;               /* kept */
    double *blocks;                  /* of a device: own blocks, before they are downloaded */
    uint64_t blocks_bytes;
    double *sums;           /* [tp][block] */
    double *plane;          /* [dp][pp] ranks' own blocks: as they are gathered */
    uint64_t *tp_bounds;    /* tp + 1: of sums, bytes */
    uint64_t *plane_bounds; /* dp * pp + 1: of plane, bytes */
    uint8_t *is_foreign;    /* by own block: 1: another tensor parallel rank counts it */
};

/* flat_elems[tp]: elements of each tensor parallel rank's flat order. Keeps `shard` and `kern`.
 * `norm` is caller's memory, ended by train_norm_close. -ENOMEM. */
BL_MUST_CHECK int train_norm_init(struct train_norm *norm, const struct train_shard *shard,
                                  struct kern *kern, const uint64_t *flat_elems,
                                  struct bl_errmsg *msg);
void train_norm_close(struct train_norm *norm); /* a zeroed one is fine */

/* Begins with this rank's slice[cut_hi - cut_lo], of the back end's memory; a sync of the back end
 * comes before train_norm_squares. */
void train_norm_begin(struct train_norm *norm, const float *slice);
/* *ret: the sum of squares over all ranks. `plane`: the group of all ranks of the same tensor
 * parallel place, ascending; `tp`: the tensor parallel group, both of the host; NULL where there is
 * one member. Errors of the communicator. */
BL_MUST_CHECK int train_norm_squares(struct train_norm *norm, struct comm_group *plane,
                                     struct comm_group *tp, double *ret, struct bl_errmsg *msg);

#endif
