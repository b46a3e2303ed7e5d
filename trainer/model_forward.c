/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One micro-batch forward through one chunk, unit by unit:
 *
 *     unit 0            x = embed(tokens), GPT-2: + positions
 *     units 1 + L       x = layer L(x)                          (model_layer.c)
 *     unit layers + 1   norm(x), and an untied head: loss = cross_entropy(head(norm), targets)
 *     unit layers + 2   a tied head
 *
 * A chunk without unit 0 begins with the stream that it is given, one without the last ends by
 * giving it on.
 */
#include "base/failpoint.h"
#include "trainer/model_internal.h"
#include "trainer/model_tp.h"

/* The learned positions of the stream's rows, from row `first` on: a stretch for each sequence. */
static void add_positions(const struct model_pass *p, kern_real *x, const kern_real *positions,
                          uint32_t first)
{
    const struct train_model *m = p->model;
    struct kern *k = p->kern;
    for (uint32_t done = 0; done < m->stream_rows;) {
        uint32_t pos = (first + done) % m->seq_len, left = m->stream_rows - done;
        uint32_t count = pos == 0 && left >= m->seq_len ? left / m->seq_len * m->seq_len
                         : left < m->seq_len - pos      ? left
                                                        : m->seq_len - pos;
        k->ops->position_forward(k, kern_real_at(k, x, (uint64_t)done * m->config.dim), positions,
                                 count, m->config.dim, m->seq_len, pos);
        done += count;
    }
}

static int embed_forward(const struct model_pass *p, struct bl_errmsg *msg)
{
    const struct train_model *m = p->model;
    const struct model_span *here = &m->span[MODEL_SPAN_VOCAB];
    struct kern *k = p->kern;
    kern_real *x = p->set->layers[0].x, *rows = m->part.sequence ? m->whole : x;
    k->ops->embedding_forward(k, rows, &p->set->tokens, p->weights, m->config.dim, here->lo,
                              here->hi);
    int rc = model_tp_sum(p, rows, msg);
    if (rc == 0 && m->part.sequence) {
        model_stream_copy(m, x, model_tp_own(m, rows));
    }
    if (rc == 0 && model_is_gpt2(m)) {
        uint64_t at = model_in_unit(m, &m->tensors[1]);
        add_positions(p, x, kern_real_view(k, p->weights, at), model_tp_first_row(m));
    }
    return rc;
}

/* Where the stream goes that a layer of the chunk has made. */
static kern_real *stream_after(const struct model_pass *p, uint32_t layer)
{
    const struct train_model *m = p->model;
    uint32_t first = m->first_layer[p->vstage], end = m->first_layer[p->vstage + 1];
    if (layer + 1 < end) {
        return p->set->layers[layer + 1 - first].x;
    }
    return p->vstage + 1 < m->vstages ? p->flow->out : p->set->x;
}

static int layer_forward(const struct model_pass *p, uint32_t layer, struct bl_errmsg *msg)
{
    const struct train_model *m = p->model;
    uint32_t first = m->first_layer[p->vstage], count = m->first_layer[p->vstage + 1] - first;
    if (!p->flow->eval && layer == first + count / 2) {
        BL_IGNORE(BL_FAILPOINT("mid-forward"), "it acts by itself");
    }
    return model_layer_forward(p, &p->set->layers[layer - first], stream_after(p, layer), msg);
}

static int norm_forward(const struct model_pass *p, struct bl_errmsg *msg)
{
    const struct train_model *m = p->model;
    const struct train_tensor *norm = &m->tensors[model_norm_index(m)];
    const struct model_set *set = p->set;
    const kern_real *weight = kern_real_view(p->kern, p->weights, model_in_unit(m, norm));
    const kern_real *bias =
        m->config.bias ? kern_real_view(p->kern, p->weights, model_in_unit(m, norm + 1)) : NULL;
    model_forward_norm(p, model_tp_own(m, set->norm), set->mean, set->rstd, set->x, weight, bias);
    return model_tp_gather(p, set->norm, msg);
}

uint32_t model_head_chunk(const struct train_model *model, uint32_t first)
{
    uint32_t left = model->rows - first;
    return left < model->head_rows ? left : model->head_rows;
}

int model_head_forward(const struct model_pass *p, uint32_t first, uint32_t n, int backward,
                       struct bl_errmsg *msg)
{
    struct train_model *m = p->model;
    struct kern *k = p->kern;
    const kern_real *norm = kern_real_view(k, p->set->norm, (uint64_t)first * m->config.dim);
    k->ops->matmul_forward(k, m->logits, norm, kern_real_view(k, p->weights, model_head_in_unit(m)),
                           NULL, (struct kern_matmul_shape){n, m->config.dim, m->vocab});
    m->logits_set = backward && n == m->rows ? p->flow->set : MODEL_NO_SET;
    return model_tp_cross_entropy(p, first, n, backward, msg);
}

uint64_t model_head_in_unit(const struct train_model *model)
{
    return model->config.tied ? 0 : model_in_unit(model, &model->tensors[model->tensor_count - 1]);
}

/* The head, and the loss: with the logits' gradient where there is room for all of them. */
static int head_forward(const struct model_pass *p, struct bl_errmsg *msg)
{
    struct train_model *m = p->model;
    int backward = !p->flow->eval && m->head_rows == m->rows, rc = 0;
    for (uint32_t first = 0; rc == 0 && first < m->rows; first += m->head_rows) {
        rc = model_head_forward(p, first, model_head_chunk(m, first), backward, msg);
    }
    if (rc == 0 && p->flow->loss != NULL) {
        p->kern->ops->loss_total(p->kern, p->flow->loss, m->losses, m->rows, 1);
    }
    return rc;
}

static int unit_forward(const struct model_pass *p, uint32_t unit, struct bl_errmsg *msg)
{
    const struct bl_job_model *c = &p->model->config;
    int rc = 0;
    if (unit == 0) {
        return embed_forward(p, msg);
    }
    if (unit <= c->layers) {
        return layer_forward(p, unit - 1, msg);
    }
    if (unit == c->layers + 1) {
        rc = norm_forward(p, msg);
    }
    if (rc == 0 && unit == c->layers + 1 + (c->tied != 0)) {
        rc = head_forward(p, msg);
    }
    return rc;
}

/* The pass's tokens and targets, checked and given to the back end. */
static int take_tokens(const struct model_pass *p, uint64_t *ret_counted, struct bl_errmsg *msg)
{
    const struct train_model *m = p->model;
    const struct model_span *here = &m->span[MODEL_SPAN_VOCAB];
    int is_first = p->vstage == 0, is_last = p->vstage + 1 == m->vstages, rc = 0;
    *ret_counted = 0;
    if (is_first) {
        rc = model_tokens_check(m, p->flow->tokens, m->rows, 0, "token", ret_counted, msg);
        *ret_counted = 0;
    }
    if (rc == 0 && is_last) {
        rc =
            model_tokens_check(m, p->flow->targets, m->rows, INT32_MIN, "target", ret_counted, msg);
    }
    if (rc == 0 && is_first) {
        p->kern->ops->tokens_set(p->kern, &p->set->tokens, p->flow->tokens, m->rows, here->lo,
                                 here->hi);
    }
    if (rc == 0 && is_last) { /* they add to no rows */
        p->kern->ops->tokens_set(p->kern, &p->set->targets, p->flow->targets, m->rows, 0, 0);
    }
    return rc;
}

int train_model_forward(struct train_model *model, const struct train_flow *flow,
                        const struct train_hooks *hooks, uint64_t *ret_tokens,
                        struct bl_errmsg *msg)
{
    struct model_pass pass;
    uint64_t counted = 0;
    int rc = model_pass_init(&pass, model, flow, hooks, msg);
    if (rc == 0) {
        rc = take_tokens(&pass, &counted, msg);
    }
    if (rc < 0) {
        return rc;
    }
    if (pass.vstage != 0) {
        model_stream_copy(model, pass.set->layers[0].x, flow->in);
    }
    uint32_t end = model_unit_end(model, pass.vstage);
    for (uint32_t unit = model_unit_first(model, pass.vstage); rc == 0 && unit < end; unit++) {
        rc = hooks->weights(hooks->ctx, unit, 0, &pass.weights, msg);
        if (rc == 0) {
            rc = unit_forward(&pass, unit, msg);
        }
        if (rc == 0 && hooks->poke != NULL) {
            rc = hooks->poke(hooks->ctx, msg);
        }
    }
    if (rc == 0) {
        *ret_tokens = counted;
    }
    return rc;
}
