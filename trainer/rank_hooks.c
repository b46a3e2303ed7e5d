/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/rank_hooks.h"

static int rank_weights(void *ctx, uint32_t unit, int backward, const kern_real **ret,
                        struct bl_errmsg *msg)
{
    struct train_rank_hooks *h = ctx;
    struct train_rank *rank = h->rank;
    if (rank->fetch.memory != NULL) {
        return train_fetch_unit(&rank->fetch, unit, backward, rank->comm, rank->dp, rank->tp, ret,
                                msg);
    }
    h->plain.params = rank->params;
    const struct train_hooks plain = train_hooks_plain(&h->plain);
    return plain.weights(plain.ctx, unit, backward, ret, msg);
}

static int rank_grads(void *ctx, uint32_t unit, float **ret, struct bl_errmsg *msg)
{
    struct train_rank_hooks *h = ctx;
    if (h->rank->rounds != NULL) {
        *ret = lane_rounds_grads(h->rank->rounds);
        return 0;
    }
    if (h->grads == NULL) {
        *ret = NULL;
        return 0;
    }
    h->plain.grads = h->grads;
    const struct train_hooks plain = train_hooks_plain(&h->plain);
    return plain.grads(plain.ctx, unit, ret, msg);
}

static int rank_grads_done(void *ctx, uint32_t unit, struct bl_errmsg *msg)
{
    struct train_rank *rank = ((struct train_rank_hooks *)ctx)->rank;
    return rank->rounds == NULL ? 0 : lane_rounds_done(rank->rounds, unit, rank->dp, msg);
}

struct train_hooks train_rank_hooks(struct train_rank_hooks *state, struct train_rank *rank)
{
    *state = (struct train_rank_hooks){.rank = rank, .plain = {.model = rank->model}};
    return (struct train_hooks){.ctx = state,
                                .weights = rank_weights,
                                .grads = rank_grads,
                                .grads_done = rank_grads_done,
                                .tp = rank->tp};
}

int train_rank_is_in_step(const struct train_rank *rank)
{
    return rank->rounds != NULL || rank->fetch.memory != NULL;
}

int train_rank_idle(struct train_rank *rank, uint32_t count, int backward, struct bl_errmsg *msg)
{
    struct train_rank_hooks state;
    const struct train_hooks hooks = train_rank_hooks(&state, rank);
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && i < count; i++) {
        rc = train_model_idle(rank->model, 0, 0, &hooks, msg);
        if (rc == 0 && backward) {
            rc = train_model_idle(rank->model, 0, 1, &hooks, msg);
        }
    }
    return rc;
}

/* ---- lanes ---- */

uint32_t train_rank_lanes(const struct train_rank *rank)
{
    return rank->pipeline.micros / rank->micro_batches;
}

uint32_t train_rank_lanes_max(const struct train_rank *rank)
{
    return (rank->job->lanes + rank->grid.dp - 1) / rank->grid.dp;
}

uint32_t train_rank_lane(const struct train_rank *rank, uint32_t k)
{
    return rank->rounds != NULL ? k * rank->grid.dp + rank->grid.d : lane_sum_lane(rank->sum, k);
}

int train_rank_has_lane(const struct train_rank *rank, uint32_t d, uint32_t lane)
{
    return rank->rounds != NULL ? lane % rank->grid.dp == d : lane_sum_has(rank->sum, d, lane);
}
