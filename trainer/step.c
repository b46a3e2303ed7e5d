/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/step.h"

#include <math.h>
#include <string.h>

#include "base/failpoint.h"
#include "trainer/rank_hooks.h"
#include "trainer/schedule.h"

#define WORDS_AT_ONCE 64u /* of one comm_sum_u64 */

/* ---- gradient ---- */

struct step_work {
    struct train_rank *rank;
    uint64_t step;
    struct train_rank_hooks hooks;
};

/* The lane that a micro-batch of the replica is of. */
static uint32_t lane_of(const struct train_rank *rank, uint32_t micro)
{
    return train_rank_lane(rank, micro / rank->micro_batches);
}

/* The ledger has each sample once: from those who bring it into the model. */
static int read_batch(void *arg, uint32_t micro, uint32_t vstage, int32_t *tokens, int32_t *targets,
                      struct bl_errmsg *msg)
{
    struct step_work *work = arg;
    struct train_rank *rank = work->rank;
    const struct bl_job_train *t = &rank->job->train;
    uint32_t lane = lane_of(rank, micro);
    uint64_t in_lane = (uint64_t)(micro % rank->micro_batches) * t->micro_batch;
    uint64_t position = (work->step - 1) * t->global_batch +
                        (uint64_t)lane * rank->micro_batches * t->micro_batch + in_lane;
    int rc = 0;
    for (uint32_t row = 0; rc == 0 && row < t->micro_batch; row++) {
        uint64_t sample = train_data_at(rank->data, position + row);
        size_t at = (size_t)row * t->seq_len;
        rc = train_data_read(rank->data, sample, tokens + at, targets + at, msg);
        if (rc == 0 && rank->ledger != NULL && vstage == 0 && rank->grid.t == 0) {
            fprintf(rank->ledger, "%llu %u %llu\n", (unsigned long long)work->step, lane,
                    (unsigned long long)sample);
        }
    }
    return rc;
}

static int begin_pass(void *arg, const struct train_pipe_op *op, struct train_flow *flow,
                      struct bl_errmsg *msg)
{
    struct step_work *work = arg;
    struct train_rank *rank = work->rank;
    (void)msg;
    if (!op->backward) {
        flow->loss = train_rank_loss(rank, lane_of(rank, op->micro));
        return BL_FAILPOINT("mid-forward");
    }
    /* A lane's micro-batches in order, the first overwrites. */
    flow->add = op->micro % rank->micro_batches != 0;
    work->hooks.grads = rank->sum != NULL ? lane_sum_grads(rank->sum, op->chunk) : NULL;
    return 0;
}

static int end_pass(void *arg, const struct train_pipe_op *op, struct bl_errmsg *msg)
{
    struct step_work *work = arg;
    struct train_rank *rank = work->rank;
    (void)msg;
    if (!op->backward) {
        return 0;
    }
    if (rank->sum != NULL && (op->micro + 1) % rank->micro_batches == 0) {
        lane_sum_done(rank->sum, op->chunk);
    }
    return BL_FAILPOINT("mid-backward");
}

/* A device's copy of the last step may be complete. */
static int poke(void *arg, struct bl_errmsg *msg)
{
    struct train_rank *rank = ((struct step_work *)arg)->rank;
    return rank->slot_ready == NULL ? 0 : rank->slot_ready(rank->slot_ctx, 0, msg);
}

/* The own lanes' gradients, summed over all lanes. */
static int sum_lanes(struct train_rank *rank, uint64_t step, struct bl_errmsg *msg)
{
    struct step_work work = {.rank = rank, .step = step};
    const struct train_work calls = {.ctx = &work,
                                     .hooks = train_rank_hooks(&work.hooks, rank),
                                     .read = read_batch,
                                     .begin = begin_pass,
                                     .end = end_pass,
                                     .poke = poke};
    train_losses_begin(rank);
    if (rank->rounds != NULL) {
        lane_rounds_begin(rank->rounds);
    } else {
        lane_sum_begin(rank->sum);
    }
    int rc = train_stage_run(rank->stage, &rank->pipeline, &calls, rank->comm, msg);
    if (rc == 0 && train_rank_is_in_step(rank)) {
        uint32_t missing = train_rank_lanes_max(rank) - train_rank_lanes(rank);
        rc = train_rank_idle(rank, missing * rank->micro_batches, 1, msg);
    }
    if (rc == 0 && rank->rounds != NULL) {
        lane_rounds_finish(rank->rounds);
        return 0;
    }
    return rc == 0 ? lane_sum_finish(rank->sum, rank->dp, rank->comm, msg) : rc;
}

float *train_rank_slice(struct train_rank *rank)
{
    return rank->rounds != NULL ? lane_rounds_slice(rank->rounds) : lane_sum_slice(rank->sum);
}

/* ---- losses ---- */

void train_losses_begin(struct train_rank *rank)
{
    rank->kern->ops->zero(rank->kern, rank->pass_losses,
                          rank->loss_count * sizeof *rank->pass_losses);
}

double *train_rank_loss(struct train_rank *rank, uint32_t at)
{
    BL_ASSERT(at < rank->loss_count);
    return rank->grid.t == 0 ? rank->pass_losses + at : NULL;
}

int train_losses_end(struct train_rank *rank, uint32_t count, struct bl_errmsg *msg)
{
    struct kern *k = rank->kern;
    k->ops->download(k, rank->losses, rank->pass_losses, count * sizeof *rank->losses);
    return train_rank_sync(rank, msg);
}

int train_rank_sync(struct train_rank *rank, struct bl_errmsg *msg)
{
    struct kern *k = rank->kern;
    /* First: the daemon's digest of the last slot runs while this waits. */
    int rc =
        k->is_device && rank->slot_ready != NULL ? rank->slot_ready(rank->slot_ctx, 1, msg) : 0;
    rc = rc == 0 ? k->ops->sync(k, msg) : rc;
    return rc == 0 && k->is_device && rank->comm != NULL ? comm_check(rank->comm, msg) : rc;
}

/* The sum of bits with zeros is the bits. */
int train_share_losses(struct train_rank *rank, uint32_t count, struct bl_errmsg *msg)
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

int train_step_gradient(struct train_rank *rank, uint64_t step, struct train_step_result *ret,
                        struct bl_errmsg *msg)
{
    const struct bl_job_train *t = &rank->job->train;
    int rc = sum_lanes(rank, step, msg);
    if (rc == 0) {
        rc = train_data_unchanged(rank->data, msg); /* what was read is what was opened */
    }
    if (rc == 0) { /* all that the host wants of the step, with one wait */
        const float *slice = train_rank_slice(rank);
        train_norm_begin(&rank->norm, slice + (rank->shard.cut_lo - rank->shard.own_lo));
        rc = train_losses_end(rank, rank->job->lanes, msg);
    }
    if (rc == 0) {
        rc = train_share_losses(rank, rank->job->lanes, msg);
    }
    double squares = 0;
    if (rc == 0) {
        rc = train_norm_squares(&rank->norm, rank->plane, rank->tp_host, &squares, msg);
    }
    if (rc != 0) {
        return rc;
    }
    ret->step = step;
    ret->idle = train_stage_idle(rank->stage);
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

/* ---- state ---- */

static int has_state(const struct train_rank *rank)
{
    return rank->state.kern != NULL;
}

int train_rank_load(struct train_rank *rank, const void *slot, struct bl_errmsg *msg)
{
    return has_state(rank) ? train_state_load(&rank->state, slot, msg) : 0;
}

void train_rank_forget(struct train_rank *rank)
{
    if (has_state(rank)) {
        train_state_forget(&rank->state);
    }
}

int train_rank_wait(struct train_rank *rank, struct bl_errmsg *msg)
{
    return has_state(rank) ? train_state_wait(&rank->state, msg) : 0;
}

int train_rank_is_out(struct train_rank *rank)
{
    return !has_state(rank) || train_state_is_out(&rank->state);
}

/* ---- apply ---- */

/* In place, in two halves with the failpoint between them. */
static void apply_on_device(struct train_rank *rank, const struct kern_adamw_step *k, void *to)
{
    uint32_t count = rank->shard.extent_count;
    float decay = (float)rank->job->train.weight_decay;
    train_state_apply(&rank->state, k, decay, train_rank_slice(rank), 0, count / 2);
    BL_IGNORE(BL_FAILPOINT("mid-apply"), "an update is never cut short by an error");
    train_state_apply(&rank->state, k, decay, train_rank_slice(rank), count / 2, count);
    train_state_publish(&rank->state, to);
}

static void apply_range(struct train_rank *rank, const struct kern_adamw_step *k,
                        const struct train_extent *e, uint64_t lo, uint64_t hi, const void *from,
                        void *to)
{
    uint32_t tensor_count;
    const struct train_tensor *tensor = &train_model_tensors(rank->model, &tensor_count)[e->tensor];
    const float *grad = train_rank_slice(rank) + (e->at - rank->shard.own_lo);
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
    if (has_state(rank)) {
        apply_on_device(rank, &k, to);
        return;
    }
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
    if (rank->fetch.memory != NULL) {
        train_fetch_begin(&rank->fetch, &rank->state, slot);
        return BL_FAILPOINT("mid-gather");
    }
    return train_gather_weights(&rank->gather, &rank->state, slot, rank->params, rank->dp, rank->tp,
                                rank->comm, msg);
}
