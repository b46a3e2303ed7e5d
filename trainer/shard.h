/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What one rank owns of the state (ZeRO-1), and where it lies.
 *
 * The flat parameter buffer is cut into `world` ranges on borders of KERN_BLOCK elements, as evenly
 * as blocks go. A rank owns weights and both moments of its range, described by extents of logical
 * tensors. A slot holds them as all weights, then all first moments, then all second moments:
 *
 *     flat buffer   | tensor 0 ...gap| tensor 1 .....|gap| tensor 2 ...
 *                         | own_lo ............ own_hi |
 *     slot          | w0'| w1 | m0'| m1 | v0'| v1 |     offsets 64-aligned, by whoever makes slots
 */
#ifndef TRAINER_SHARD_H
#define TRAINER_SHARD_H

#include <stdint.h>

#include "base/digest.h"
#include "base/error.h"
#include "kernels/kern.h"
#include "trainer/model.h"

enum train_state_part { TRAIN_WEIGHT = 0, TRAIN_MOMENT1 = 1, TRAIN_MOMENT2 = 2, TRAIN_PARTS = 3 };

struct train_extent {
    uint32_t tensor;              /* in the model's table */
    uint64_t flat_lo, flat_hi;    /* elements of that tensor */
    uint64_t at;                  /* of flat_lo in the flat buffer, elements */
    uint64_t offset[TRAIN_PARTS]; /* bytes in a slot */
};

struct train_shard {
    const struct train_model *model; /* kept */
    uint32_t rank, world;
    uint64_t *bounds; /* world + 1: borders of the ranks' ranges, elements of the flat buffer */
    uint64_t own_lo, own_hi;
    struct train_extent *extents;
    uint32_t extent_count;
    uint64_t slot_bytes; /* by train_shard_layout */
};

/* Cuts the model for a rank. `shard` is caller's memory, ended by train_shard_close. -ENOMEM. */
BL_MUST_CHECK int train_shard_init(struct train_shard *shard, const struct train_model *model,
                                   uint32_t rank, uint32_t world, struct bl_errmsg *msg);
void train_shard_close(struct train_shard *shard); /* a zeroed one is fine */

/* The name of a part of a tensor: the tensor's own, or with ".exp_avg", ".exp_avg_sq". */
void train_part_name(char name[BL_TENSOR_NAME_MAX], const struct train_tensor *tensor,
                     enum train_state_part part);

/* Gives every extent its place in a slot of our own. (libbelay gives them under belayd.) */
void train_shard_layout(struct train_shard *shard);

/* The part of an extent in a slot. */
float *train_extent_data(void *slot, const struct train_extent *extent, enum train_state_part part);
const float *train_extent_view(const void *slot, const struct train_extent *extent,
                               enum train_state_part part);

/* Writes the state of step 0: initial weights, zero moments. */
void train_shard_fresh(const struct train_shard *shard, void *slot, uint64_t seed,
                       struct kern_pool *pool);

/* Adds the state digest of what the slot holds. */
void train_shard_digest(const struct train_shard *shard, const void *slot,
                        struct bl_state_digest *digest);

#endif
