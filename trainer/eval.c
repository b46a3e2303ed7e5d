/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Evaluation and the state digest: what all ranks do together besides steps.
 */
#include <errno.h>
#include <stdlib.h>

#include "trainer/rank_hooks.h"

struct eval_work {
    struct train_rank *rank;
    struct train_rank_hooks hooks;
    uint32_t *batches; /* of this replica, ascending */
};

static int eval_read(void *arg, uint32_t micro, uint32_t vstage, int32_t *tokens, int32_t *targets,
                     struct bl_errmsg *msg)
{
    struct eval_work *work = arg;
    struct train_rank *rank = work->rank;
    const struct bl_job_train *t = &rank->job->train;
    uint64_t first = train_data_samples(rank->data);
    uint64_t held_out = train_data_eval_samples(rank->data);
    int rc = 0;
    (void)vstage;
    for (uint32_t row = 0; rc == 0 && row < t->micro_batch; row++) {
        uint64_t at = (uint64_t)work->batches[micro] * t->micro_batch + row;
        size_t place = (size_t)row * t->seq_len;
        rc = train_data_read(rank->data, first + at % held_out, tokens + place, targets + place,
                             msg);
    }
    return rc;
}

static int eval_begin(void *arg, const struct train_pipe_op *op, struct train_flow *flow,
                      struct bl_errmsg *msg)
{
    struct eval_work *work = arg;
    (void)msg;
    flow->loss = train_rank_loss(work->rank, work->batches[op->micro]);
    return 0;
}

static int eval_end(void *arg, const struct train_pipe_op *op, struct bl_errmsg *msg)
{
    (void)arg;
    (void)op;
    (void)msg;
    return 0;
}

/* The replica's batches, forward only. */
static int eval_run(struct eval_work *work, uint32_t count, struct bl_errmsg *msg)
{
    struct train_rank *rank = work->rank;
    const struct train_grid *g = &rank->grid;
    const struct train_work calls = {.ctx = work,
                                     .hooks = train_rank_hooks(&work->hooks, rank),
                                     .read = eval_read,
                                     .begin = eval_begin,
                                     .end = eval_end};
    struct train_pipeline pipeline = {0};
    if (count == 0) {
        return 0;
    }
    int rc = train_pipeline_make(&pipeline, g->pp, g->p, rank->part.chunks, count, 0, msg);
    if (rc == 0) {
        rc = train_stage_run(rank->stage, &pipeline, &calls, rank->comm, msg);
    }
    train_pipeline_close(&pipeline);
    return rc;
}

/* Batches of the replica that has most. */
static uint32_t most_batches(const struct train_rank *rank)
{
    uint32_t most = 0;
    for (uint32_t d = 0; d < rank->grid.dp; d++) {
        uint32_t count = 0;
        for (uint32_t batch = 0; batch < rank->job->train.eval_batches; batch++) {
            count += train_rank_has_lane(rank, d, batch % rank->job->lanes) != 0;
        }
        most = count > most ? count : most;
    }
    return most;
}

int train_eval(struct train_rank *rank, double *ret_loss, struct bl_errmsg *msg)
{
    const struct bl_job_train *t = &rank->job->train;
    struct eval_work work = {.rank = rank};
    uint32_t count = 0;
    work.batches = calloc((size_t)t->eval_batches + 1, sizeof *work.batches);
    if (work.batches == NULL) {
        return bl_err_code(msg, -ENOMEM, "%u batches", t->eval_batches);
    }
    for (uint32_t batch = 0; batch < t->eval_batches; batch++) {
        if (train_rank_has_lane(rank, rank->grid.d, batch % rank->job->lanes)) {
            work.batches[count++] = batch;
        }
    }
    train_losses_begin(rank);
    int rc = eval_run(&work, count, msg);
    if (rc == 0 && train_rank_is_in_step(rank)) {
        rc = train_rank_idle(rank, most_batches(rank) - count, 0, msg);
    }
    free(work.batches);
    if (rc == 0) {
        rc = train_losses_end(rank, t->eval_batches, msg);
    }
    if (rc == 0) {
        rc = train_share_losses(rank, t->eval_batches, msg);
    }
    if (rc == 0) {
        double tokens = (double)t->eval_batches * t->micro_batch * t->seq_len;
        *ret_loss = kern_tree_sum(rank->losses, t->eval_batches) / tokens;
    }
    return rc;
}

int train_digest(struct train_rank *rank, const void *slot, struct bl_state_digest *ret,
                 struct bl_errmsg *msg)
{
    struct bl_state_digest digest = {{0, 0}};
    if (rank->shard.zero != 0 || rank->grid.d == 0) { /* equal replicas count once */
        train_shard_digest(&rank->shard, slot, &digest);
    }
    int rc = rank->comm == NULL ? 0 : comm_sum_u64(rank->comm, digest.sum, 2, msg);
    if (rc == 0) {
        *ret = digest;
    }
    return rc;
}
