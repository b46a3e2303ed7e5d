/* SPDX-License-Identifier: Apache-2.0 */
/* Inside of the dry run; only dryrun*.c include this. */
#ifndef TRAINER_DRYRUN_PARTS_H
#define TRAINER_DRYRUN_PARTS_H

#include "base/lanes.h"
#include "kernels/backend.h"
#include "trainer/dryrun.h"

struct dry_load { /* of a replica */
    uint32_t lanes, pieces;
    uint32_t depth; /* whole gradients at once */
};

struct dry_schedule { /* of a stage under a load */
    uint32_t sets;
    uint64_t busy, span; /* 0: too large to run through */
};

struct train_dry {
    const struct bl_job *job; /* kept */
    struct kern *kern;        /* of it sizes are asked: owned, or */
    struct kern *open_kern;   /* this one of the caller's; NULL: none */
    uint32_t tp, pp, dp, chunks, per_node, slots;
    uint32_t micro_batches; /* of a lane */
    struct bl_lane_plan plan;
    struct dry_load *loads; /* load_count, all different */
    uint32_t load_count;
    uint32_t *load_of;              /* dp: index of a replica's load */
    struct dry_schedule *schedules; /* [load][stage] */
    uint32_t *layers_of;            /* pp */
    uint64_t *blocks;               /* [stage][slice]: of the local order */
    struct train_dry_rank *classes; /* [stage][slice][load][cut is rounded up] */
    uint8_t *has_class;
};

/* Whether the head's logits are made chunk by chunk, and again in backward. */
int train_dry_has_chunks(const struct bl_job *job);

/* BL_ECONFIG, with the nearest layouts that work, for one that does not. */
BL_MUST_CHECK int train_dry_check_layout(const struct bl_job *job, struct bl_errmsg *msg);

#endif
