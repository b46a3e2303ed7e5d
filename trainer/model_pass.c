/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One micro-batch, forward and backward. Llama:
 *
 *     x = embed(tokens)
 *     layer:  mid = x + O(attention(rope(Q n), rope(K n), V n)),  n = norm1(x)
 *             x'  = mid + down(swiglu(gate m, up m)),              m = norm2(mid)
 *     loss = cross_entropy(head(norm(x)), targets)
 *
 * GPT-2 adds learned positions to x instead of turning Q and K, has gelu(up m) in the MLP,
 * LayerNorm for RMSNorm, and biases. Backward walks the same lines from the end; dx is the gradient
 * of the residual stream, to which each norm's backward adds.
 */
#include <string.h>

#include "base/failpoint.h"
#include "trainer/model_internal.h"

struct pass {
    struct train_model *model;
    const float *params;
    float *grads;
    int add;
    struct kern_pool *pool;
};

/* A tensor of a layer, in parameters and gradients. */
static const float *weight(const struct pass *p, uint32_t layer, enum model_layer_tensor which)
{
    return p->params + model_layer_at(p->model, layer, which);
}

static float *dweight(const struct pass *p, uint32_t layer, enum model_layer_tensor which)
{
    return p->grads + model_layer_at(p->model, layer, which);
}

/* Shape of the product that a layer's matrix does. */
static struct kern_matmul_shape shape_of(const struct train_model *model,
                                         enum model_layer_tensor which)
{
    const struct train_tensor *t = model_layer_tensor(model, 0, which);
    return (struct kern_matmul_shape){model->rows, (uint32_t)t->shape[1], (uint32_t)t->shape[0]};
}

static void forward_product(const struct pass *p, uint32_t layer, enum model_layer_tensor which,
                            float *y, const float *x)
{
    struct kern_matmul_shape shape = shape_of(p->model, which);
    enum model_layer_tensor bias = model_bias_of(which);
    kern_matmul_forward(p->pool, y, x, weight(p, layer, which), shape, 0);
    if (model_has(p->model, bias)) {
        kern_bias_forward(p->pool, y, weight(p, layer, bias), shape.n, shape.o);
    }
}

/* The gradients of a product: of its weight and bias as the pass says, of x overwritten or added.
 */
static void backward_product(const struct pass *p, uint32_t layer, enum model_layer_tensor which,
                             float *dx, int dx_add, const float *dy, const float *x)
{
    struct kern_matmul_shape shape = shape_of(p->model, which);
    enum model_layer_tensor bias = model_bias_of(which);
    kern_matmul_dw(p->pool, dweight(p, layer, which), dy, x, shape, p->add);
    if (model_has(p->model, bias)) {
        kern_bias_backward(p->pool, dweight(p, layer, bias), dy, shape.n, shape.o, p->add);
    }
    kern_matmul_dx(p->pool, dx, dy, weight(p, layer, which), shape, dx_add);
}

/* Either norm over all rows; bias NULL: none. */
static void forward_norm(const struct pass *p, float *out, float *mean, float *rstd, const float *x,
                         const float *w, const float *bias)
{
    const struct train_model *m = p->model;
    float eps = (float)m->config.norm_eps;
    if (model_is_gpt2(m)) {
        kern_layernorm_forward(p->pool, out, mean, rstd, x, w, bias, m->rows, m->config.dim, eps);
    } else {
        kern_rmsnorm_forward(p->pool, out, rstd, x, w, m->rows, m->config.dim, eps);
    }
}

static void backward_norm(const struct pass *p, float *dw, float *dbias, const float *x,
                          const float *w, const float *mean, const float *rstd)
{
    struct train_model *m = p->model;
    if (model_is_gpt2(m)) {
        kern_layernorm_backward(p->pool, m->dx, dw, dbias, m->dnorm, x, w, mean, rstd, m->rows,
                                m->config.dim, p->add);
    } else {
        kern_rmsnorm_backward(p->pool, m->dx, dw, m->dnorm, x, w, rstd, m->rows, m->config.dim,
                              p->add);
    }
}

static void forward_layer_norm(const struct pass *p, uint32_t layer, enum model_layer_tensor which,
                               float *out, float *mean, float *rstd, const float *x)
{
    enum model_layer_tensor bias = model_bias_of(which);
    forward_norm(p, out, mean, rstd, x, weight(p, layer, which),
                 model_has(p->model, bias) ? weight(p, layer, bias) : NULL);
}

static void backward_layer_norm(const struct pass *p, uint32_t layer, enum model_layer_tensor which,
                                const float *x, const float *mean, const float *rstd)
{
    enum model_layer_tensor bias = model_bias_of(which);
    backward_norm(p, dweight(p, layer, which),
                  model_has(p->model, bias) ? dweight(p, layer, bias) : NULL, x,
                  weight(p, layer, which), mean, rstd);
}

static void rotate_forward(const struct pass *p, const struct model_layer_acts *a)
{
    const struct train_model *m = p->model;
    const struct bl_job_model *c = &m->config;
    if (!model_is_gpt2(m)) {
        kern_rope_forward(p->pool, a->q, m->rope, m->rows, m->seq_len, c->heads, m->head_dim, 0);
        kern_rope_forward(p->pool, a->k, m->rope, m->rows, m->seq_len, c->kv_heads, m->head_dim, 0);
    }
}

static void layer_forward(const struct pass *p, uint32_t layer, float *x_next)
{
    struct train_model *m = p->model;
    struct model_layer_acts *a = &m->layers[layer];
    size_t stream = (size_t)m->rows * m->config.dim, wide = (size_t)m->rows * m->config.hidden;

    forward_layer_norm(p, layer, MODEL_NORM1, a->norm1, a->mean1, a->rstd1, a->x);
    forward_product(p, layer, MODEL_Q, a->q, a->norm1);
    forward_product(p, layer, MODEL_K, a->k, a->norm1);
    forward_product(p, layer, MODEL_V, a->v, a->norm1);
    rotate_forward(p, a);
    kern_attention_forward(p->pool, a->att, a->stats, a->q, a->k, a->v, m->scratch, &m->attention);
    forward_product(p, layer, MODEL_O, a->mid, a->att);
    kern_add(p->pool, a->mid, a->x, a->mid, stream);

    forward_layer_norm(p, layer, MODEL_NORM2, a->norm2, a->mean2, a->rstd2, a->mid);
    forward_product(p, layer, MODEL_UP, a->up, a->norm2);
    if (model_is_gpt2(m)) {
        kern_gelu_forward(p->pool, a->act, a->up, wide);
    } else {
        forward_product(p, layer, MODEL_GATE, a->gate, a->norm2);
        kern_swiglu_forward(p->pool, a->act, a->gate, a->up, wide);
    }
    forward_product(p, layer, MODEL_DOWN, x_next, a->act);
    kern_add(p->pool, x_next, a->mid, x_next, stream);
}

static double forward(const struct pass *p, const int32_t *tokens, const int32_t *targets,
                      int backward, uint64_t *ret_tokens)
{
    struct train_model *m = p->model;
    const struct bl_job_model *c = &m->config;
    kern_embedding_forward(p->pool, m->layers[0].x, tokens, p->params + model_embed_at(m), m->rows,
                           c->dim);
    if (model_is_gpt2(m)) {
        kern_position_forward(p->pool, m->layers[0].x, p->params + model_positions_at(m), m->rows,
                              c->dim, m->seq_len, 0);
    }
    for (uint32_t layer = 0; layer < c->layers; layer++) {
        if (backward && layer == c->layers / 2) {
            BL_IGNORE(BL_FAILPOINT("mid-forward"), "it acts by itself");
        }
        layer_forward(p, layer, layer + 1 < c->layers ? m->layers[layer + 1].x : m->x);
    }
    forward_norm(p, m->norm, m->mean, m->rstd, m->x, p->params + model_norm_at(m),
                 c->bias ? p->params + model_norm_bias_at(m) : NULL);
    kern_matmul_forward(p->pool, m->logits, m->norm, p->params + model_head_at(m),
                        (struct kern_matmul_shape){m->rows, c->dim, c->vocab}, 0);
    return kern_cross_entropy(p->pool, m->logits, m->losses, targets, m->rows, c->vocab, backward,
                              ret_tokens);
}

static void layer_backward(const struct pass *p, uint32_t layer)
{
    struct train_model *m = p->model;
    struct model_layer_acts *a = &m->layers[layer];
    const struct bl_job_model *c = &m->config;
    size_t wide = (size_t)m->rows * c->hidden;

    backward_product(p, layer, MODEL_DOWN, m->dact, 0, m->dx, a->act);
    if (model_is_gpt2(m)) {
        kern_gelu_backward(p->pool, m->dup, m->dact, a->up, wide);
        backward_product(p, layer, MODEL_UP, m->dnorm, 0, m->dup, a->norm2);
    } else {
        kern_swiglu_backward(p->pool, m->dgate, m->dup, m->dact, a->gate, a->up, wide);
        backward_product(p, layer, MODEL_GATE, m->dnorm, 0, m->dgate, a->norm2);
        backward_product(p, layer, MODEL_UP, m->dnorm, 1, m->dup, a->norm2);
    }
    backward_layer_norm(p, layer, MODEL_NORM2, a->mid, a->mean2, a->rstd2);

    backward_product(p, layer, MODEL_O, m->datt, 0, m->dx, a->att);
    kern_attention_backward(p->pool, m->dq, m->dk, m->dv, m->datt, a->att, a->stats, a->q, a->k,
                            a->v, m->scratch, &m->attention);
    if (!model_is_gpt2(m)) {
        kern_rope_backward(p->pool, m->dq, m->rope, m->rows, m->seq_len, c->heads, m->head_dim);
        kern_rope_backward(p->pool, m->dk, m->rope, m->rows, m->seq_len, c->kv_heads, m->head_dim);
    }
    backward_product(p, layer, MODEL_Q, m->dnorm, 0, m->dq, a->norm1);
    backward_product(p, layer, MODEL_K, m->dnorm, 1, m->dk, a->norm1);
    backward_product(p, layer, MODEL_V, m->dnorm, 1, m->dv, a->norm1);
    backward_layer_norm(p, layer, MODEL_NORM1, a->x, a->mean1, a->rstd1);
}

static void backward(const struct pass *p, const int32_t *tokens)
{
    struct train_model *m = p->model;
    const struct bl_job_model *c = &m->config;
    struct kern_matmul_shape head = {m->rows, c->dim, c->vocab};
    float *dhead = p->grads + (c->tied ? m->flat_elems : model_head_at(m));
    kern_matmul_dw(p->pool, dhead, m->logits, m->norm, head, p->add);
    kern_matmul_dx(p->pool, m->dnorm, m->logits, p->params + model_head_at(m), head, 0);
    memset(m->dx, 0, (size_t)m->rows * c->dim * sizeof *m->dx);
    backward_norm(p, p->grads + model_norm_at(m), c->bias ? p->grads + model_norm_bias_at(m) : NULL,
                  m->x, p->params + model_norm_at(m), m->mean, m->rstd);
    for (uint32_t layer = c->layers; layer-- > 0;) {
        layer_backward(p, layer);
        if (layer == c->layers / 2) {
            BL_IGNORE(BL_FAILPOINT("mid-backward"), "it acts by itself");
        }
    }
    if (model_is_gpt2(m)) {
        kern_position_backward(p->pool, p->grads + model_positions_at(m), m->dx, m->rows, c->dim,
                               m->seq_len, c->context, p->add);
    }
    kern_embedding_backward(p->pool, p->grads + model_embed_at(m), m->dx, tokens, m->rows, c->dim,
                            c->vocab, p->add);
}

/* A first micro-batch overwrites all: the gaps between tensors too. */
static void zero_gaps(const struct train_model *model, float *grads)
{
    for (uint32_t i = 0; i < model->tensor_count; i++) {
        const struct train_tensor *t = &model->tensors[i];
        uint64_t end = i + 1 < model->tensor_count ? t[1].offset : model->flat_elems;
        uint64_t filled = t->offset + t->elems;
        memset(grads + filled, 0, (end - filled) * sizeof *grads);
    }
    if (model->tied_elems > 0) {
        uint64_t filled = model->tensors[0].elems;
        memset(grads + model->flat_elems + filled, 0, (model->tied_elems - filled) * sizeof *grads);
    }
}

static int check_inputs(const struct train_model *model, const int32_t *tokens,
                        const int32_t *targets, const struct kern_pool *pool, struct bl_errmsg *msg)
{
    BL_ASSERT(kern_pool_threads(pool) <= model->threads);
    if (model->part.tp != 1) {
        return bl_err(msg, BL_ENOTBUILT, "passes over %u tensor parallel ranks", model->part.tp);
    }
    int rc = model_tokens_check(model, tokens, model->rows, 0, "token", msg);
    if (rc < 0) {
        return rc;
    }
    return model_tokens_check(model, targets, model->rows, INT32_MIN, "target", msg);
}

int train_model_forward_backward(struct train_model *model, const float *params,
                                 const int32_t *tokens, const int32_t *targets, float *grads,
                                 int add, double *ret_loss_sum, uint64_t *ret_tokens,
                                 struct kern_pool *pool, struct bl_errmsg *msg)
{
    int rc = check_inputs(model, tokens, targets, pool, msg);
    if (rc < 0) {
        return rc;
    }
    struct pass pass = {model, params, grads, add, pool};
    *ret_loss_sum = forward(&pass, tokens, targets, 1, ret_tokens);
    backward(&pass, tokens);
    if (!add) {
        zero_gaps(model, grads);
    }
    return 0;
}

int train_model_eval(struct train_model *model, const float *params, const int32_t *tokens,
                     const int32_t *targets, double *ret_loss_sum, uint64_t *ret_tokens,
                     struct kern_pool *pool, struct bl_errmsg *msg)
{
    int rc = check_inputs(model, tokens, targets, pool, msg);
    if (rc < 0) {
        return rc;
    }
    struct pass pass = {model, params, NULL, 0, pool};
    *ret_loss_sum = forward(&pass, tokens, targets, 0, ret_tokens);
    return 0;
}

void train_model_tied_finish(struct kern_pool *pool, float *embed, const float *head,
                             uint64_t count)
{
    kern_add(pool, embed, head, embed, count);
}

/* ---- by flow and hooks: not built yet ---- */

struct train_hooks train_hooks_plain(struct train_plain *plain)
{
    return (struct train_hooks){.ctx = plain};
}

int train_model_forward(struct train_model *model, const struct train_flow *flow,
                        const struct train_hooks *hooks, double *ret_loss, uint64_t *ret_tokens,
                        struct kern_pool *pool, struct bl_errmsg *msg)
{
    (void)model, (void)flow, (void)hooks, (void)ret_loss, (void)ret_tokens, (void)pool;
    return bl_err(msg, BL_ENOTBUILT, "forward by flow");
}

int train_model_backward(struct train_model *model, const struct train_flow *flow,
                         const struct train_hooks *hooks, struct kern_pool *pool,
                         struct bl_errmsg *msg)
{
    (void)model, (void)flow, (void)hooks, (void)pool;
    return bl_err(msg, BL_ENOTBUILT, "backward by flow");
}

int train_model_idle(const struct train_model *model, uint32_t chunk, int backward,
                     const struct train_hooks *hooks, struct bl_errmsg *msg)
{
    (void)model, (void)chunk, (void)backward, (void)hooks;
    return bl_err(msg, BL_ENOTBUILT, "calls of a pass");
}
