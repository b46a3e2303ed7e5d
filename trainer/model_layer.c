/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One layer, forward and backward. Llama:
 *
 *     mid = x + O(attention(rope(Q n), rope(K n), V n)),   n = norm1(x)
 *     x'  = mid + down(swiglu(gate m, up m)),               m = norm2(mid)
 *
 * GPT-2 does not turn Q and K, has gelu(up m) in the MLP, LayerNorm for RMSNorm, and biases.
 * Backward walks the same lines from the end; dx is the gradient of the residual stream, to which
 * each norm's backward adds.
 *
 * Recomputation runs the lines of forward again, with the same kernels and shapes, into memory that
 * all layers share: selective those of norms and of the MLP's activation, full all but the last
 * product.
 *
 * What tensor parallel ranks do together stands in model_tp.h; with one rank those calls do
 * nothing.
 */
#include "trainer/model_internal.h"
#include "trainer/model_tp.h"

/* A tensor of the layer in work, in weights and gradients. */
static const float *weight(const struct model_pass *p, enum model_layer_tensor which)
{
    return p->weights + model_in_unit(p->model, model_layer_tensor(p->model, 0, which));
}

static float *dweight(const struct model_pass *p, enum model_layer_tensor which)
{
    return p->grads + model_in_unit(p->model, model_layer_tensor(p->model, 0, which));
}

/* Shape of the product that a layer's matrix does. */
static struct kern_matmul_shape shape_of(const struct train_model *model,
                                         enum model_layer_tensor which)
{
    const struct train_tensor *t = model_layer_tensor(model, 0, which);
    return (struct kern_matmul_shape){model->rows, model_tensor_width(t, 1),
                                      model_tensor_width(t, 0)};
}

void model_forward_product(const struct model_pass *p, enum model_layer_tensor which, float *y,
                           const float *x)
{
    kern_matmul_forward(p->pool, y, x, weight(p, which), shape_of(p->model, which), 0);
}

void model_forward_bias(const struct model_pass *p, enum model_layer_tensor which, float *y,
                        uint32_t rows)
{
    enum model_layer_tensor bias = model_bias_of(which);
    if (model_has(p->model, bias)) {
        kern_bias_forward(p->pool, y, weight(p, bias), rows, shape_of(p->model, which).o);
    }
}

/* A column parallel product of all rows. */
static void forward_column(const struct model_pass *p, enum model_layer_tensor which, float *y,
                           const float *x)
{
    model_forward_product(p, which, y, x);
    model_forward_bias(p, which, y, p->model->rows);
}

/* The gradients of a product: of weight and bias as the pass says, of x overwritten or added. */
static void backward_weight(const struct model_pass *p, enum model_layer_tensor which,
                            const float *dy, const float *x)
{
    struct kern_matmul_shape shape = shape_of(p->model, which);
    enum model_layer_tensor bias = model_bias_of(which);
    kern_matmul_dw(p->pool, dweight(p, which), dy, x, shape, p->add);
    if (model_has(p->model, bias)) {
        kern_bias_backward(p->pool, dweight(p, bias), dy, shape.n, shape.o, p->add);
    }
}

static void backward_input(const struct model_pass *p, enum model_layer_tensor which, float *dx,
                           int dx_add, const float *dy)
{
    kern_matmul_dx(p->pool, dx, dy, weight(p, which), shape_of(p->model, which), dx_add);
}

void model_forward_norm(const struct model_pass *p, float *out, float *mean, float *rstd,
                        const float *x, const float *w, const float *bias)
{
    const struct train_model *m = p->model;
    uint32_t rows = m->stream_rows, dim = m->config.dim;
    float eps = (float)m->config.norm_eps;
    if (model_is_gpt2(m)) {
        kern_layernorm_forward(p->pool, out, mean, rstd, x, w, bias, rows, dim, eps);
    } else {
        kern_rmsnorm_forward(p->pool, out, rstd, x, w, rows, dim, eps);
    }
}

int model_backward_norm(const struct model_pass *p, float *dw, float *dbias, const float *x,
                        const float *w, const float *mean, const float *rstd, struct bl_errmsg *msg)
{
    struct train_model *m = p->model;
    uint32_t rows = m->stream_rows, dim = m->config.dim;
    int parted = m->part.sequence != 0, add = parted ? 0 : p->add;
    float *to = parted ? m->norm_parts : dw, *dout = model_tp_own(m, m->dnorm);
    float *bias_to = parted && dbias != NULL ? m->norm_parts + dim : dbias;
    if (model_is_gpt2(m)) {
        kern_layernorm_backward(p->pool, m->dx, to, bias_to, dout, x, w, mean, rstd, rows, dim,
                                add);
    } else {
        kern_rmsnorm_backward(p->pool, m->dx, to, dout, x, w, rstd, rows, dim, add);
    }
    return parted ? model_tp_norm_grads(p, dw, dbias, m->norm_parts, msg) : 0;
}

static void forward_layer_norm(const struct model_pass *p, enum model_layer_tensor which,
                               float *out, float *mean, float *rstd, const float *x)
{
    enum model_layer_tensor bias = model_bias_of(which);
    model_forward_norm(p, out, mean, rstd, x, weight(p, which),
                       model_has(p->model, bias) ? weight(p, bias) : NULL);
}

/* From model->dnorm, parts of the gradient of the norm's output. */
static int backward_layer_norm(const struct model_pass *p, enum model_layer_tensor which,
                               const float *x, const float *mean, const float *rstd,
                               struct bl_errmsg *msg)
{
    enum model_layer_tensor bias = model_bias_of(which);
    float *dbias = model_has(p->model, bias) ? dweight(p, bias) : NULL;
    int rc = model_tp_sum(p, p->model->dnorm, msg);
    return rc != 0 ? rc
                   : model_backward_norm(p, dweight(p, which), dbias, x, weight(p, which), mean,
                                         rstd, msg);
}

/* ---- forward ---- */

static int norm1_forward(const struct model_pass *p, const struct model_layer_acts *a,
                         struct bl_errmsg *msg)
{
    float *own = model_tp_own(p->model, a->norm1);
    forward_layer_norm(p, MODEL_NORM1, own, a->mean1, a->rstd1, a->x);
    return model_tp_gather(p, a->norm1, msg);
}

static int norm2_forward(const struct model_pass *p, const struct model_layer_acts *a,
                         struct bl_errmsg *msg)
{
    float *own = model_tp_own(p->model, a->norm2);
    forward_layer_norm(p, MODEL_NORM2, own, a->mean2, a->rstd2, a->mid);
    return model_tp_gather(p, a->norm2, msg);
}

static void activation_forward(const struct model_pass *p, const struct model_layer_acts *a)
{
    size_t wide = (size_t)p->model->rows * p->model->hidden;
    if (model_is_gpt2(p->model)) {
        kern_gelu_forward(p->pool, a->act, a->up, wide);
    } else {
        kern_swiglu_forward(p->pool, a->act, a->gate, a->up, wide);
    }
}

/* x to mid. */
static int attention_forward(const struct model_pass *p, const struct model_layer_acts *a,
                             struct bl_errmsg *msg)
{
    const struct train_model *m = p->model;
    int rc = norm1_forward(p, a, msg);
    if (rc != 0) {
        return rc;
    }
    forward_column(p, MODEL_Q, a->q, a->norm1);
    forward_column(p, MODEL_K, a->k, a->norm1);
    forward_column(p, MODEL_V, a->v, a->norm1);
    if (!model_is_gpt2(m)) {
        kern_rope_forward(p->pool, a->q, m->rope, m->rows, m->seq_len, m->heads, m->head_dim, 0);
        kern_rope_forward(p->pool, a->k, m->rope, m->rows, m->seq_len, m->kv_heads, m->head_dim, 0);
    }
    kern_attention_forward(p->pool, a->att, a->stats, a->q, a->k, a->v, m->scratch, &m->attention);
    rc = model_tp_row_product(p, MODEL_O, a->mid, a->att, msg);
    if (rc == 0) {
        kern_add(p->pool, a->mid, a->x, a->mid, (size_t)m->stream_rows * m->config.dim);
    }
    return rc;
}

/* mid to act: the MLP but for its last product. */
static int mlp_inner_forward(const struct model_pass *p, const struct model_layer_acts *a,
                             struct bl_errmsg *msg)
{
    int rc = norm2_forward(p, a, msg);
    if (rc != 0) {
        return rc;
    }
    forward_column(p, MODEL_UP, a->up, a->norm2);
    if (!model_is_gpt2(p->model)) {
        forward_column(p, MODEL_GATE, a->gate, a->norm2);
    }
    activation_forward(p, a);
    return 0;
}

int model_layer_forward(const struct model_pass *p, const struct model_layer_acts *a, float *x_next,
                        struct bl_errmsg *msg)
{
    const struct train_model *m = p->model;
    int rc = attention_forward(p, a, msg);
    if (rc == 0) {
        rc = mlp_inner_forward(p, a, msg);
    }
    if (rc == 0) {
        rc = model_tp_row_product(p, MODEL_DOWN, x_next, a->act, msg);
    }
    if (rc == 0) {
        kern_add(p->pool, x_next, a->mid, x_next, (size_t)m->stream_rows * m->config.dim);
    }
    return rc;
}

/* ---- backward ---- */

/* Makes what forward did not keep. */
static int recompute(const struct model_pass *p, const struct model_layer_acts *a,
                     struct bl_errmsg *msg)
{
    int rc = 0;
    switch ((enum bl_recompute)p->model->part.recompute) {
    case BL_RECOMPUTE_NONE:
        break;
    case BL_RECOMPUTE_SELECTIVE:
        rc = norm1_forward(p, a, msg);
        if (rc == 0) {
            rc = norm2_forward(p, a, msg);
        }
        activation_forward(p, a);
        break;
    case BL_RECOMPUTE_FULL:
        rc = attention_forward(p, a, msg);
        if (rc == 0) {
            rc = mlp_inner_forward(p, a, msg);
        }
        break;
    }
    return rc;
}

static int mlp_backward(const struct model_pass *p, const struct model_layer_acts *a,
                        struct bl_errmsg *msg)
{
    struct train_model *m = p->model;
    size_t wide = (size_t)m->rows * m->hidden;
    const float *dx;
    int rc = model_tp_whole_dx(p, &dx, msg);
    if (rc != 0) {
        return rc;
    }
    backward_weight(p, MODEL_DOWN, dx, a->act);
    backward_input(p, MODEL_DOWN, m->dact, 0, dx);
    if (model_is_gpt2(m)) {
        kern_gelu_backward(p->pool, m->dup, m->dact, a->up, wide);
        backward_weight(p, MODEL_UP, m->dup, a->norm2);
        backward_input(p, MODEL_UP, m->dnorm, 0, m->dup);
    } else {
        kern_swiglu_backward(p->pool, m->dgate, m->dup, m->dact, a->gate, a->up, wide);
        backward_weight(p, MODEL_GATE, m->dgate, a->norm2);
        backward_input(p, MODEL_GATE, m->dnorm, 0, m->dgate);
        backward_weight(p, MODEL_UP, m->dup, a->norm2);
        backward_input(p, MODEL_UP, m->dnorm, 1, m->dup);
    }
    return backward_layer_norm(p, MODEL_NORM2, a->mid, a->mean2, a->rstd2, msg);
}

static int attention_backward(const struct model_pass *p, const struct model_layer_acts *a,
                              struct bl_errmsg *msg)
{
    struct train_model *m = p->model;
    const float *dx;
    int rc = model_tp_whole_dx(p, &dx, msg);
    if (rc != 0) {
        return rc;
    }
    backward_weight(p, MODEL_O, dx, a->att);
    backward_input(p, MODEL_O, m->datt, 0, dx);
    kern_attention_backward(p->pool, m->dq, m->dk, m->dv, m->datt, a->att, a->stats, a->q, a->k,
                            a->v, m->scratch, &m->attention);
    if (!model_is_gpt2(m)) {
        kern_rope_backward(p->pool, m->dq, m->rope, m->rows, m->seq_len, m->heads, m->head_dim);
        kern_rope_backward(p->pool, m->dk, m->rope, m->rows, m->seq_len, m->kv_heads, m->head_dim);
    }
    backward_weight(p, MODEL_Q, m->dq, a->norm1);
    backward_input(p, MODEL_Q, m->dnorm, 0, m->dq);
    /* Of the input each rank takes its own share: the sum over tp has all. */
    backward_input(p, MODEL_K, m->dnorm, 1, m->dk);
    backward_input(p, MODEL_V, m->dnorm, 1, m->dv);
    rc = model_tp_sum_shared(p, msg);
    if (rc != 0) {
        return rc;
    }
    backward_weight(p, MODEL_K, m->dk, a->norm1);
    backward_weight(p, MODEL_V, m->dv, a->norm1);
    return backward_layer_norm(p, MODEL_NORM1, a->x, a->mean1, a->rstd1, msg);
}

int model_layer_backward(const struct model_pass *p, const struct model_layer_acts *a,
                         struct bl_errmsg *msg)
{
    int rc = recompute(p, a, msg);
    if (rc == 0) {
        rc = mlp_backward(p, a, msg);
    }
    return rc != 0 ? rc : attention_backward(p, a, msg);
}
