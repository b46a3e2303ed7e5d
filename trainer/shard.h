/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What one rank owns of the state, and where it lies.
 *
 * The rank's local order (its units of the model, model.h) is cut into dp ranges on borders of
 * KERN_BLOCK elements, as evenly as blocks go: *the cut*, along which gradients are reduced in
 * every ZeRO stage. With ZeRO 1 to 3 a rank owns weights and both moments of its range of the cut;
 * with ZeRO 0 each of the dp replicas owns all of the local order. What several tensor parallel
 * ranks have alike only its owner among them owns (train_tensor.owner). So over all ranks every
 * element of the state is owned once, or with ZeRO 0 by every replica alike.
 *
 * The own part is described by extents, flat ranges of the row-major order of a tensor's box. A
 * slot holds them as all weights, then all first moments, then all second moments:
 *
 *     local order   | tensor 0 ...gap| tensor 1 .....|gap| tensor 2 ...
 *                         | own_lo ............ own_hi |
 *     slot          | w0'| w1 | m0'| m1 | v0'| v1 |     offsets 64-aligned, by whoever makes slots
 */
#ifndef TRAINER_SHARD_H
#define TRAINER_SHARD_H

#include <stdint.h>

#include "base/digest.h"
#include "base/error.h"
#include "kernels/kern.h"
#include "trainer/grid.h"
#include "trainer/model.h"

enum train_state_part { TRAIN_WEIGHT = 0, TRAIN_MOMENT1 = 1, TRAIN_MOMENT2 = 2, TRAIN_PARTS = 3 };

struct train_extent {
    uint32_t tensor;              /* in the model's table */
    uint64_t flat_lo, flat_hi;    /* elements of that tensor's box */
    uint64_t at;                  /* of flat_lo in the local order, elements */
    uint64_t offset[TRAIN_PARTS]; /* bytes in a slot */
};

struct train_shard {
    const struct train_model *model; /* kept */
    struct train_grid grid;
    uint32_t zero;         /* ZeRO stage, 0 to 3 */
    uint64_t *bounds;      /* dp + 1: borders of the cut, elements of the local order */
    uint64_t *tied_bounds; /* dp + 1: the first stage's cut of a tied head's region; NULL without */
    uint64_t cut_lo, cut_hi;
    uint64_t own_lo, own_hi; /* the cut's, or everything */
    struct train_extent *extents;
    uint32_t extent_count;
    uint64_t slot_bytes; /* by train_shard_layout */
};

/* What the grid's rank owns of the model, which is its part. `shard` is caller's memory, ended by
 * train_shard_close. -ENOMEM. */
BL_MUST_CHECK int train_shard_init(struct train_shard *shard, const struct train_model *model,
                                   const struct train_grid *grid, uint32_t zero,
                                   struct bl_errmsg *msg);
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

/* Elements of a tied head's region, on every stage; 0 without a tied head. */
uint64_t train_shard_tied_elems(const struct train_model *model);

/* Writes the state of step 0: initial weights, zero moments. */
void train_shard_fresh(const struct train_shard *shard, void *slot, uint64_t seed,
                       struct kern_pool *pool);

/* Adds the state digest of what the slot holds. Of ZeRO 0's equal replicas one is enough. */
void train_shard_digest(const struct train_shard *shard, const void *slot,
                        struct bl_state_digest *digest);

#endif
