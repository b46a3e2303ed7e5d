/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/step.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/failpoint.h"
#include "base/mem.h"
#include "trainer/schedule.h"

#define WORDS_AT_ONCE 64u /* of one comm_sum_u64 */

/* ---- life ---- */

static int take_buffers(struct train_rank *rank, struct bl_errmsg *msg)
{
    const struct bl_job *job = rank->job;
    size_t batch_tokens = (size_t)job->train.micro_batch * job->train.seq_len;
    uint64_t elems = train_model_buffer_elems(rank->model);
    size_t losses = job->lanes > job->train.eval_batches ? job->lanes : job->train.eval_batches;
    rank->params_bytes = elems * sizeof(float);
    rank->params = bl_mem_alloc(rank->params_bytes);
    rank->tokens = calloc(batch_tokens, sizeof *rank->tokens);
    rank->targets = calloc(batch_tokens, sizeof *rank->targets);
    rank->block_sums = calloc(elems / KERN_BLOCK, sizeof *rank->block_sums);
    rank->losses = calloc(losses, sizeof *rank->losses);
    if (rank->params == NULL || rank->tokens == NULL || rank->targets == NULL ||
        rank->block_sums == NULL || rank->losses == NULL) {
        return bl_err_code(msg, -ENOMEM, "%llu bytes for weights",
                           (unsigned long long)rank->params_bytes);
    }
    return 0;
}

int train_rank_open(struct train_rank *rank, const struct bl_job *job, uint32_t threads,
                    struct bl_errmsg *msg)
{
    memset(rank, 0, sizeof *rank);
    rank->job = job;
    if (job->train.reduction_fast || job->zero != 1 || job->tp != 1 || job->pp != 1) {
        return bl_err(msg, BL_ENOTBUILT,
                      "this trainer has train.reduction exact, layout.zero 1, tp 1 and pp 1 only");
    }
    uint32_t per_round = job->lanes * job->train.micro_batch;
    if (per_round == 0 || job->train.global_batch % per_round != 0) {
        return bl_err(msg, BL_ECONFIG,
                      "train.global_batch %u is not a multiple of lanes %u x "
                      "train.micro_batch %u",
                      job->train.global_batch, job->lanes, job->train.micro_batch);
    }
    rank->micro_batches = job->train.global_batch / per_round;
    threads = threads != 0 ? threads : job->threads;
    threads = threads != 0 ? threads : 1;
    int rc = train_data_open(&rank->data, job, msg);
    if (rc == 0) {
        rc = kern_pool_new(&rank->pool, threads, msg);
    }
    if (rc == 0) {
        rc = train_model_new(&rank->model, &job->model, job->train.seq_len, job->train.micro_batch,
                             threads, msg);
    }
    return rc != 0 ? rc : take_buffers(rank, msg);
}

static void leave_place(struct train_rank *rank)
{
    lane_sum_free(rank->sum);
    rank->sum = NULL;
    train_shard_close(&rank->shard);
    free(rank->gather_bounds);
    free(rank->block_bounds);
    rank->gather_bounds = rank->block_bounds = NULL;
}

void train_rank_close(struct train_rank *rank)
{
    leave_place(rank);
    bl_mem_free(rank->params, rank->params_bytes);
    free(rank->tokens);
    free(rank->targets);
    free(rank->block_sums);
    free(rank->losses);
    train_model_free(rank->model);
    kern_pool_free(rank->pool);
    train_data_close(rank->data);
    memset(rank, 0, sizeof *rank);
}

int train_rank_place(struct train_rank *rank, uint32_t index, uint32_t world, struct bl_errmsg *msg)
{
    if (rank->sum != NULL && rank->shard.rank == index && rank->shard.world == world) {
        return 0;
    }
    leave_place(rank);
    int rc = train_shard_init(&rank->shard, rank->model, index, world, msg);
    if (rc == 0) {
        rc = lane_sum_new(&rank->sum, &rank->shard, rank->job->lanes, msg);
    }
    if (rc != 0) {
        return rc;
    }
    rank->gather_bounds = calloc((size_t)world + 1, sizeof *rank->gather_bounds);
    rank->block_bounds = calloc((size_t)world + 1, sizeof *rank->block_bounds);
    if (rank->gather_bounds == NULL || rank->block_bounds == NULL) {
        return bl_err_code(msg, -ENOMEM, "rank %u of %u", index, world);
    }
    for (uint32_t r = 0; r <= world; r++) {
        rank->gather_bounds[r] = rank->shard.bounds[r] * sizeof(float);
        rank->block_bounds[r] = rank->shard.bounds[r] / KERN_BLOCK * sizeof(double);
    }
    return 0;
}

/* ---- gradient ---- */

struct lane_ctx {
    struct train_rank *rank;
    uint64_t step;
};

/* Puts sequence `row` of micro-batch `micro` of a lane into the batch. */
static int read_row(struct train_rank *rank, uint64_t step, uint32_t lane, uint32_t micro,
                    uint32_t row, struct bl_errmsg *msg)
{
    const struct bl_job_train *t = &rank->job->train;
    uint64_t in_lane = (uint64_t)micro * t->micro_batch + row;
    uint64_t position = (step - 1) * t->global_batch +
                        (uint64_t)lane * rank->micro_batches * t->micro_batch + in_lane;
    uint64_t sample = train_data_at(rank->data, position);
    size_t at = (size_t)row * t->seq_len;
    int rc = train_data_read(rank->data, sample, rank->tokens + at, rank->targets + at, msg);
    if (rc == 0 && rank->ledger != NULL) {
        fprintf(rank->ledger, "%llu %u %llu\n", (unsigned long long)step, lane,
                (unsigned long long)sample);
    }
    return rc;
}

/* One lane: its micro-batches in order, the first overwrites. */
static int lane_gradient(void *arg, uint32_t lane, float *grads, struct bl_errmsg *msg)
{
    struct lane_ctx *ctx = arg;
    struct train_rank *rank = ctx->rank;
    double loss = 0;
    for (uint32_t micro = 0; micro < rank->micro_batches; micro++) {
        if (rank->comm != NULL && comm_is_aborted(rank->comm)) {
            return bl_err_code(msg, BL_EABORTED, "step %llu", (unsigned long long)ctx->step);
        }
        int rc = 0;
        for (uint32_t row = 0; rc == 0 && row < rank->job->train.micro_batch; row++) {
            rc = read_row(rank, ctx->step, lane, micro, row, msg);
        }
        double sum;
        uint64_t tokens;
        rc = rc != 0 ? rc : BL_FAILPOINT("mid-forward");
        if (rc == 0) {
            rc =
                train_model_forward_backward(rank->model, rank->params, rank->tokens, rank->targets,
                                             grads, micro != 0, &sum, &tokens, rank->pool, msg);
        }
        if (rc == 0) {
            rc = BL_FAILPOINT("mid-backward");
        }
        if (rc != 0) {
            return rc;
        }
        loss += sum;
    }
    rank->losses[lane] = loss;
    return 0;
}

/* Makes each rank's losses everybody's. Those of other ranks are zero here, and the sum of bits
 * with zeros is the bits. */
static int share_losses(struct train_rank *rank, uint32_t count, struct bl_errmsg *msg)
{
    uint64_t words[WORDS_AT_ONCE];
    for (uint32_t at = 0; rank->comm != NULL && at < count; at += WORDS_AT_ONCE) {
        uint32_t n = count - at < WORDS_AT_ONCE ? count - at : WORDS_AT_ONCE;
        memcpy(words, rank->losses + at, n * sizeof *words);
        int rc = comm_sum_u64(rank->comm, words, n, msg);
        if (rc != 0) {
            return rc;
        }
        memcpy(rank->losses + at, words, n * sizeof *words);
    }
    return 0;
}

/* Sum of squares over the whole reduced gradient. */
static int sum_squares(struct train_rank *rank, double *ret, struct bl_errmsg *msg)
{
    const struct train_shard *shard = &rank->shard;
    kern_sumsq_blocks(rank->pool, rank->block_sums + shard->own_lo / KERN_BLOCK,
                      lane_sum_slice(rank->sum), shard->own_hi - shard->own_lo);
    int rc = rank->comm == NULL
                 ? 0
                 : comm_allgather(rank->comm, rank->block_sums, rank->block_bounds, msg);
    if (rc == 0) {
        *ret = kern_tree_sum(rank->block_sums, shard->bounds[shard->world] / KERN_BLOCK);
    }
    return rc;
}

int train_step_gradient(struct train_rank *rank, uint64_t step, struct train_step_result *ret,
                        struct bl_errmsg *msg)
{
    const struct bl_job_train *t = &rank->job->train;
    struct lane_ctx ctx = {rank, step};
    memset(rank->losses, 0, rank->job->lanes * sizeof *rank->losses);
    int rc = lane_sum_run(rank->sum, lane_gradient, &ctx, rank->comm, rank->pool, msg);
    if (rc == 0) {
        rc = train_data_unchanged(rank->data, msg); /* what was read is what was opened */
    }
    if (rc == 0) {
        rc = share_losses(rank, rank->job->lanes, msg);
    }
    double squares = 0;
    if (rc == 0) {
        rc = sum_squares(rank, &squares, msg);
    }
    if (rc != 0) {
        return rc;
    }
    ret->step = step;
    ret->tokens = (uint64_t)t->global_batch * t->seq_len;
    ret->lr = train_lr_at(step, t->steps, t->warmup, t->lr, t->lr_min);
    ret->grad_norm = sqrt(squares) / (double)ret->tokens;
    double factor = t->clip > 0 && ret->grad_norm > t->clip ? t->clip / ret->grad_norm : 1.0;
    ret->grad_scale = (float)(factor / (double)ret->tokens);
    ret->loss = kern_tree_sum(rank->losses, rank->job->lanes) / (double)ret->tokens;
    if (!isfinite(squares) || !isfinite(ret->loss)) {
        return bl_err(msg, BL_ENUMERIC,
                      "step %llu: loss %g, gradient norm %g: not finite, the step is not taken",
                      (unsigned long long)step, ret->loss, ret->grad_norm);
    }
    return 0;
}

/* ---- apply ---- */

static void apply_range(struct train_rank *rank, const struct kern_adamw_step *k,
                        const struct train_extent *e, uint64_t lo, uint64_t hi, const void *from,
                        void *to)
{
    uint32_t tensor_count;
    const struct train_tensor *tensor = &train_model_tensors(rank->model, &tensor_count)[e->tensor];
    const float *grad = lane_sum_slice(rank->sum) + (e->at - rank->shard.own_lo);
    kern_adamw(rank->pool, train_extent_data(to, e, TRAIN_WEIGHT) + lo,
               train_extent_data(to, e, TRAIN_MOMENT1) + lo,
               train_extent_data(to, e, TRAIN_MOMENT2) + lo,
               train_extent_view(from, e, TRAIN_WEIGHT) + lo,
               train_extent_view(from, e, TRAIN_MOMENT1) + lo,
               train_extent_view(from, e, TRAIN_MOMENT2) + lo, grad + lo, hi - lo, k,
               tensor->decay ? (float)rank->job->train.weight_decay : 0.0f);
}

void train_step_apply(struct train_rank *rank, const struct train_step_result *step,
                      const void *from, void *to)
{
    const struct bl_job_train *t = &rank->job->train;
    struct kern_adamw_step k;
    kern_adamw_step_init(&k, step->step, step->lr, t->beta1, t->beta2, t->eps, step->grad_scale);
    for (uint32_t i = 0; i < rank->shard.extent_count; i++) {
        const struct train_extent *e = &rank->shard.extents[i];
        uint64_t count = e->flat_hi - e->flat_lo;
        uint64_t middle = i == rank->shard.extent_count / 2 ? count / 2 : count;
        apply_range(rank, &k, e, 0, middle, from, to);
        if (middle != count) {
            BL_IGNORE(BL_FAILPOINT("mid-apply"), "an update is never cut short by an error");
            apply_range(rank, &k, e, middle, count, from, to);
        }
    }
}

int train_step_gather(struct train_rank *rank, const void *slot, struct bl_errmsg *msg)
{
    for (uint32_t i = 0; i < rank->shard.extent_count; i++) {
        const struct train_extent *e = &rank->shard.extents[i];
        memcpy(rank->params + e->at, train_extent_view(slot, e, TRAIN_WEIGHT),
               (e->flat_hi - e->flat_lo) * sizeof(float));
    }
    int rc = BL_FAILPOINT("mid-gather");
    if (rc != 0 || rank->comm == NULL) {
        return rc;
    }
    return comm_allgather(rank->comm, rank->params, rank->gather_bounds, msg);
}

/* ---- evaluation, digest ---- */

int train_eval(struct train_rank *rank, double *ret_loss, struct bl_errmsg *msg)
{
    const struct bl_job_train *t = &rank->job->train;
    uint64_t first = train_data_samples(rank->data);
    uint64_t held_out = train_data_eval_samples(rank->data);
    memset(rank->losses, 0, t->eval_batches * sizeof *rank->losses);
    for (uint32_t batch = 0; batch < t->eval_batches; batch++) {
        if (!lane_sum_has(rank->sum, batch % rank->job->lanes)) {
            continue;
        }
        int rc = 0;
        for (uint32_t row = 0; rc == 0 && row < t->micro_batch; row++) {
            uint64_t sample = first + ((uint64_t)batch * t->micro_batch + row) % held_out;
            size_t at = (size_t)row * t->seq_len;
            rc = train_data_read(rank->data, sample, rank->tokens + at, rank->targets + at, msg);
        }
        double sum;
        uint64_t tokens;
        if (rc == 0) {
            rc = train_model_eval(rank->model, rank->params, rank->tokens, rank->targets, &sum,
                                  &tokens, rank->pool, msg);
        }
        if (rc != 0) {
            return rc;
        }
        rank->losses[batch] = sum;
    }
    int rc = share_losses(rank, t->eval_batches, msg);
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
    train_shard_digest(&rank->shard, slot, &digest);
    int rc = rank->comm == NULL ? 0 : comm_sum_u64(rank->comm, digest.sum, 2, msg);
    if (rc == 0) {
        *ret = digest;
    }
    return rc;
}
