/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One micro-batch backward through one chunk: the units of model_forward.c from the end. model->dx
 * is the gradient of the stream between them.
 */
#include "base/failpoint.h"
#include "trainer/model_internal.h"
#include "trainer/model_tp.h"

/* The head, chunk by chunk: of its weight, and of the norm's output into model->dnorm. The gradient
 * of the logits is there if one chunk has all rows, unless another set used its memory since. */
static int head_backward(const struct model_pass *p, struct bl_errmsg *msg)
{
    struct train_model *m = p->model;
    struct kern *k = p->kern;
    uint64_t at = model_head_in_unit(m), dim = m->config.dim;
    int rc = 0;
    for (uint32_t first = 0; rc == 0 && first < m->rows; first += m->head_rows) {
        uint32_t n = model_head_chunk(m, first);
        struct kern_matmul_shape shape = {n, m->config.dim, m->vocab};
        if (m->logits_set != p->flow->set) {
            rc = model_head_forward(p, first, n, 1, msg);
        }
        if (rc == 0) {
            k->ops->matmul_dw(k, p->grads + at, m->logits,
                              kern_real_view(k, p->set->norm, first * dim), shape,
                              p->add || first != 0);
            k->ops->matmul_dx(k, kern_real_at(k, m->dnorm, first * dim), m->logits,
                              kern_real_view(k, p->weights, at), shape, 0);
        }
    }
    m->logits_set = MODEL_NO_SET;
    return rc;
}

/* The final norm: the stream's gradient begins here. */
static int norm_backward(const struct model_pass *p, struct bl_errmsg *msg)
{
    struct train_model *m = p->model;
    struct kern *k = p->kern;
    const struct train_tensor *norm = &m->tensors[model_norm_index(m)];
    const struct model_set *set = p->set;
    uint64_t at = model_in_unit(m, norm);
    float *dbias = m->config.bias ? p->grads + model_in_unit(m, norm + 1) : NULL;
    k->ops->zero(k, m->dx, (uint64_t)m->stream_rows * m->config.dim * k->real_bytes);
    int rc = model_tp_sum(p, m->dnorm, msg);
    return rc != 0
               ? rc
               : model_backward_norm(p, p->grads + at, dbias, set->x,
                                     kern_real_view(k, p->weights, at), set->mean, set->rstd, msg);
}

static int layer_backward(const struct model_pass *p, uint32_t layer, struct bl_errmsg *msg)
{
    const struct train_model *m = p->model;
    uint32_t first = m->first_layer[p->vstage], count = m->first_layer[p->vstage + 1] - first;
    int rc = model_layer_backward(p, &p->set->layers[layer - first], msg);
    if (rc == 0 && layer == first + count / 2) {
        BL_IGNORE(BL_FAILPOINT("mid-backward"), "it acts by itself");
    }
    return rc;
}

static int embed_backward(const struct model_pass *p, struct bl_errmsg *msg)
{
    const struct train_model *m = p->model;
    const struct model_span *here = &m->span[MODEL_SPAN_VOCAB];
    struct kern *k = p->kern;
    uint32_t dim = m->config.dim;
    const kern_real *dx;
    int rc = model_tp_whole_dx(p, &dx, msg);
    if (rc == 0 && model_is_gpt2(m)) {
        float *positions = p->grads + model_in_unit(m, &m->tensors[1]);
        k->ops->position_backward(k, positions, dx, m->rows, dim, m->seq_len, m->config.context,
                                  p->add);
    }
    if (rc == 0) {
        k->ops->embedding_backward(k, p->grads, dx, &p->set->tokens, dim, here->lo, here->hi,
                                   p->add);
    }
    return rc;
}

/* A first micro-batch overwrites all: the gaps behind the unit's tensors too. */
static void zero_gap(const struct model_pass *p, uint64_t filled, uint64_t end)
{
    if (end > filled) {
        p->kern->ops->zero(p->kern, p->grads + filled, (end - filled) * sizeof *p->grads);
    }
}

static void zero_gaps(const struct model_pass *p, uint32_t unit)
{
    const struct train_model *m = p->model;
    uint64_t end = m->units[unit].elems;
    for (uint32_t i = m->tensor_count; i-- > 0;) {
        const struct train_tensor *t = &m->tensors[i];
        if (t->unit == unit) {
            zero_gap(p, model_in_unit(m, t) + t->elems, end);
            end = model_in_unit(m, t);
        }
    }
    if (unit == m->config.layers + 2) { /* a tied head is as long as the embedding */
        zero_gap(p, m->tensors[0].elems, end);
    }
}

static int unit_backward(const struct model_pass *p, uint32_t unit, struct bl_errmsg *msg)
{
    const struct bl_job_model *c = &p->model->config;
    int rc = 0;
    if (unit == c->layers + 1 + (c->tied != 0)) {
        rc = head_backward(p, msg);
    }
    if (rc == 0 && unit == c->layers + 1) {
        rc = norm_backward(p, msg);
    } else if (rc == 0 && unit == 0) {
        rc = embed_backward(p, msg);
    } else if (rc == 0 && unit <= c->layers) {
        rc = layer_backward(p, unit - 1, msg);
    }
    if (rc == 0 && !p->add) {
        zero_gaps(p, unit);
    }
    return rc;
}

int train_model_backward(struct train_model *model, const struct train_flow *flow,
                         const struct train_hooks *hooks, struct bl_errmsg *msg)
{
    struct model_pass pass;
    int rc = model_pass_init(&pass, model, flow, hooks, msg);
    if (rc < 0) {
        return rc;
    }
    if (pass.vstage + 1 < model->vstages) {
        model_stream_copy(model, model->dx, flow->dout);
    }
    uint32_t first = model_unit_first(model, pass.vstage);
    for (uint32_t unit = model_unit_end(model, pass.vstage); rc == 0 && unit-- > first;) {
        rc = hooks->weights(hooks->ctx, unit, 1, &pass.weights, msg);
        if (rc == 0) {
            rc = hooks->grads(hooks->ctx, unit, &pass.grads, msg);
        }
        if (rc == 0) {
            rc = unit_backward(&pass, unit, msg);
        }
        if (rc == 0) {
            rc = hooks->grads_done(hooks->ctx, unit, msg);
        }
        if (rc == 0 && hooks->poke != NULL) {
            rc = hooks->poke(hooks->ctx, msg);
        }
    }
    if (rc == 0 && pass.vstage != 0) {
        model_stream_copy(model, flow->din, model->dx);
    }
    return rc;
}
