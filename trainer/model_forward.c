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
#include <string.h>

#include "base/failpoint.h"
#include "trainer/model_internal.h"
#include "trainer/model_tp.h"

/* The learned positions of the stream's rows, from row `first` on: a stretch for each sequence. */
static void add_positions(const struct model_pass *p, float *x, const float *positions,
                          uint32_t first)
{
    const struct train_model *m = p->model;
    for (uint32_t done = 0; done < m->stream_rows;) {
        uint32_t pos = (first + done) % m->seq_len, left = m->stream_rows - done;
        uint32_t count = pos == 0 && left >= m->seq_len ? left / m->seq_len * m->seq_len
                         : left < m->seq_len - pos      ? left
                                                        : m->seq_len - pos;
        kern_position_forward(p->pool, x + (size_t)done * m->config.dim, positions, count,
                              m->config.dim, m->seq_len, pos);
        done += count;
    }
}

static int embed_forward(const struct model_pass *p, struct bl_errmsg *msg)
{
    const struct train_model *m = p->model;
    const struct model_span *here = &m->span[MODEL_SPAN_VOCAB];
    float *x = p->set->layers[0].x, *rows = m->part.sequence ? m->whole : x;
    kern_embedding_slice_forward(p->pool, rows, p->flow->tokens, p->weights, m->rows, m->config.dim,
                                 here->lo, here->hi);
    int rc = model_tp_sum(p, rows, msg);
    if (rc == 0 && m->part.sequence) {
        memcpy(x, model_tp_own(m, rows), (size_t)m->stream_rows * m->config.dim * sizeof *x);
    }
    if (rc == 0 && model_is_gpt2(m)) {
        add_positions(p, x, p->weights + model_in_unit(m, &m->tensors[1]), model_tp_first_row(m));
    }
    return rc;
}

/* Where the stream goes that a layer of the chunk has made. */
static float *stream_after(const struct model_pass *p, uint32_t layer)
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
    const float *bias = m->config.bias ? p->weights + model_in_unit(m, norm + 1) : NULL;
    model_forward_norm(p, model_tp_own(m, set->norm), set->mean, set->rstd, set->x,
                       p->weights + model_in_unit(m, norm), bias);
    return model_tp_gather(p, set->norm, msg);
}

int model_head_forward(const struct model_pass *p, const float *weight, int backward,
                       double *ret_loss, uint64_t *ret_tokens, struct bl_errmsg *msg)
{
    struct train_model *m = p->model;
    kern_matmul_forward(p->pool, m->logits, p->set->norm, weight,
                        (struct kern_matmul_shape){m->rows, m->config.dim, m->vocab}, 0);
    m->logits_set = backward ? p->flow->set : MODEL_NO_SET;
    return model_tp_cross_entropy(p, backward, ret_loss, ret_tokens, msg);
}

const float *model_head_weight(const struct model_pass *p)
{
    const struct train_model *m = p->model;
    return m->config.tied ? p->weights
                          : p->weights + model_in_unit(m, &m->tensors[m->tensor_count - 1]);
}

static int unit_forward(const struct model_pass *p, uint32_t unit, double *ret_loss,
                        uint64_t *ret_tokens, struct bl_errmsg *msg)
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
        rc = model_head_forward(p, model_head_weight(p), !p->flow->eval, ret_loss, ret_tokens, msg);
    }
    return rc;
}

static int check_tokens(const struct train_model *model, const struct train_flow *flow,
                        uint32_t vstage, struct bl_errmsg *msg)
{
    int rc = 0;
    if (vstage == 0) {
        rc = model_tokens_check(model, flow->tokens, model->rows, 0, "token", msg);
    }
    if (rc == 0 && vstage + 1 == model->vstages) {
        rc = model_tokens_check(model, flow->targets, model->rows, INT32_MIN, "target", msg);
    }
    return rc;
}

int train_model_forward(struct train_model *model, const struct train_flow *flow,
                        const struct train_hooks *hooks, double *ret_loss, uint64_t *ret_tokens,
                        struct kern_pool *pool, struct bl_errmsg *msg)
{
    struct model_pass pass;
    int rc = model_pass_init(&pass, model, flow, hooks, pool, msg);
    if (rc == 0) {
        rc = check_tokens(model, flow, pass.vstage, msg);
    }
    if (rc < 0) {
        return rc;
    }
    if (pass.vstage != 0) {
        size_t stream = (size_t)model->stream_rows * model->config.dim;
        memcpy(pass.set->layers[0].x, flow->in, stream * sizeof(float));
    }
    double loss = 0;
    uint64_t tokens = 0;
    uint32_t end = model_unit_end(model, pass.vstage);
    for (uint32_t unit = model_unit_first(model, pass.vstage); rc == 0 && unit < end; unit++) {
        rc = hooks->weights(hooks->ctx, unit, 0, &pass.weights, msg);
        if (rc == 0) {
            rc = unit_forward(&pass, unit, &loss, &tokens, msg);
        }
        if (rc == 0 && hooks->poke != NULL) {
            rc = hooks->poke(hooks->ctx, msg);
        }
    }
    if (rc == 0) {
        *ret_loss = loss;
        *ret_tokens = tokens;
    }
    return rc;
}
