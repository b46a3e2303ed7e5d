/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What forward and backward passes share: their start, the calls of hooks without work, hooks over
 * whole buffers, and the whole model in one call.
 */
#include <errno.h>

#include "trainer/comm.h"
#include "trainer/model_internal.h"

int model_pass_init(struct model_pass *pass, struct train_model *model,
                    const struct train_flow *flow, const struct train_hooks *hooks,
                    struct bl_errmsg *msg)
{
    BL_ASSERT(model->arena != NULL);
    BL_ASSERT(flow->chunk < model->part.chunks && flow->set < model->part.sets);
    if (model->part.tp > 1 && (hooks->tp == NULL || comm_group_size(hooks->tp) != model->part.tp ||
                               comm_group_rank(hooks->tp) != model->part.tp_rank)) {
        return bl_err(msg, -EINVAL,
                      "a pass of rank %u of %u tensor parallel ranks, but not in "
                      "their group",
                      model->part.tp_rank, model->part.tp);
    }
    *pass = (struct model_pass){.model = model,
                                .flow = flow,
                                .hooks = hooks,
                                .kern = model->kern,
                                .set = &model->sets[flow->set],
                                .vstage = model_vstage(model, flow->chunk),
                                .add = flow->add};
    return 0;
}

void model_stream_copy(const struct train_model *model, kern_real *to, const kern_real *from)
{
    struct kern *k = model->kern;
    k->ops->copy(k, to, from, (uint64_t)model->stream_rows * model->config.dim * k->real_bytes);
}

int train_model_idle(const struct train_model *model, uint32_t chunk, int backward,
                     const struct train_hooks *hooks, struct bl_errmsg *msg)
{
    uint32_t vstage = model_vstage(model, chunk);
    uint32_t first = model_unit_first(model, vstage), end = model_unit_end(model, vstage);
    int rc = 0;
    for (uint32_t i = first; rc == 0 && i < end; i++) {
        uint32_t unit = backward ? first + end - 1 - i : i;
        const kern_real *weights;
        float *grads;
        rc = hooks->weights(hooks->ctx, unit, backward, &weights, msg);
        if (rc == 0 && backward) {
            rc = hooks->grads(hooks->ctx, unit, &grads, msg);
        }
        if (rc == 0 && backward) {
            rc = hooks->grads_done(hooks->ctx, unit, msg);
        }
        if (rc == 0 && hooks->poke != NULL) {
            rc = hooks->poke(hooks->ctx, msg);
        }
    }
    return rc;
}

/* ---- whole buffers ---- */

static int plain_weights(void *ctx, uint32_t unit, int backward, const kern_real **ret,
                         struct bl_errmsg *msg)
{
    const struct train_plain *plain = ctx;
    const struct train_model *m = plain->model;
    uint64_t at = m->units[unit].local;
    (void)backward, (void)msg;
    if (unit == m->config.layers + 2) { /* the embedding's, or their copy */
        at = m->units[0].local != TRAIN_NOT_HERE ? m->units[0].local : m->local_elems;
    }
    *ret = kern_real_view(m->kern, plain->params, at);
    return 0;
}

static int plain_grads(void *ctx, uint32_t unit, float **ret, struct bl_errmsg *msg)
{
    const struct train_plain *plain = ctx;
    (void)msg;
    *ret = plain->grads + plain->model->units[unit].local;
    return 0;
}

static int plain_grads_done(void *ctx, uint32_t unit, struct bl_errmsg *msg)
{
    (void)ctx, (void)unit, (void)msg;
    return 0;
}

struct train_hooks train_hooks_plain(struct train_plain *plain)
{
    return (struct train_hooks){.ctx = plain,
                                .weights = plain_weights,
                                .grads = plain_grads,
                                .grads_done = plain_grads_done};
}

/* Forward, with the loss on the host. */
static int forward_whole(struct train_model *model, struct train_flow flow,
                         const struct train_hooks *hooks, double *ret_loss_sum,
                         uint64_t *ret_tokens, struct bl_errmsg *msg)
{
    struct kern *k = model->kern;
    double loss;
    BL_ASSERT(model->vstages == 1);
    flow.loss = model->loss;
    k->ops->zero(k, model->loss, sizeof loss);
    int rc = train_model_forward(model, &flow, hooks, ret_tokens, msg);
    if (rc == 0) {
        k->ops->download(k, &loss, model->loss, sizeof loss);
        rc = k->ops->sync(k, msg);
    }
    if (rc == 0) {
        *ret_loss_sum = loss;
    }
    return rc;
}

int train_model_forward_backward(struct train_model *model, const kern_real *params,
                                 const int32_t *tokens, const int32_t *targets, float *grads,
                                 int add, double *ret_loss_sum, uint64_t *ret_tokens,
                                 struct bl_errmsg *msg)
{
    struct train_plain plain = {model, params, grads};
    const struct train_hooks hooks = train_hooks_plain(&plain);
    const struct train_flow flow = {.tokens = tokens, .targets = targets, .add = add};
    int rc = forward_whole(model, flow, &hooks, ret_loss_sum, ret_tokens, msg);
    if (rc == 0) {
        rc = train_model_backward(model, &flow, &hooks, msg);
    }
    return rc == 0 ? model->kern->ops->sync(model->kern, msg) : rc;
}

int train_model_eval(struct train_model *model, const kern_real *params, const int32_t *tokens,
                     const int32_t *targets, double *ret_loss_sum, uint64_t *ret_tokens,
                     struct bl_errmsg *msg)
{
    struct train_plain plain = {model, params, NULL};
    const struct train_hooks hooks = train_hooks_plain(&plain);
    const struct train_flow flow = {.tokens = tokens, .targets = targets, .eval = 1};
    return forward_whole(model, flow, &hooks, ret_loss_sum, ret_tokens, msg);
}

void train_model_tied_finish(struct kern *kern, float *embed, const float *head, uint64_t count)
{
    kern->ops->add(kern, embed, head, embed, count);
}
