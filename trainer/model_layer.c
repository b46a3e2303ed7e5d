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
static uint64_t in_unit(const struct model_pass *p, enum model_layer_tensor which)
{
    return model_in_unit(p->model, model_layer_tensor(p->model, 0, which));
}

static const kern_real *weight(const struct model_pass *p, enum model_layer_tensor which)
{
    return kern_real_view(p->kern, p->weights, in_unit(p, which));
}

static float *dweight(const struct model_pass *p, enum model_layer_tensor which)
{
    return p->grads + in_unit(p, which);
}

/* The weights of a bias; NULL where there is none. */
static const kern_real *bias_weight(const struct model_pass *p, enum model_layer_tensor which)
{
    enum model_layer_tensor bias = model_bias_of(which);
    return model_has(p->model, bias) ? weight(p, bias) : NULL;
}

/* Shape of the product that a layer's matrix does. */
static struct kern_matmul_shape shape_of(const struct train_model *model,
                                         enum model_layer_tensor which)
{
    const struct train_tensor *t = model_layer_tensor(model, 0, which);
    return (struct kern_matmul_shape){model->rows, model_tensor_width(t, 1),
                                      model_tensor_width(t, 0)};
}

void model_forward_product(const struct model_pass *p, enum model_layer_tensor which, kern_real *y,
                           const kern_real *x, int bias)
{
    p->kern->ops->matmul_forward(p->kern, y, x, weight(p, which),
                                 bias ? bias_weight(p, which) : NULL, shape_of(p->model, which));
}

void model_forward_bias(const struct model_pass *p, enum model_layer_tensor which, kern_real *y,
                        uint32_t rows)
{
    const kern_real *bias = bias_weight(p, which);
    if (bias != NULL) {
        p->kern->ops->bias_forward(p->kern, y, bias, rows, shape_of(p->model, which).o);
    }
}

/* The gradients of a product: of weight and bias as the pass says, of x overwritten or added. */
static void backward_weight(const struct model_pass *p, enum model_layer_tensor which,
                            const kern_real *dy, const kern_real *x)
{
    struct kern *k = p->kern;
    struct kern_matmul_shape shape = shape_of(p->model, which);
    enum model_layer_tensor bias = model_bias_of(which);
    k->ops->matmul_dw(k, dweight(p, which), dy, x, shape, p->add);
    if (model_has(p->model, bias)) {
        k->ops->bias_backward(k, dweight(p, bias), dy, p->model->scratch, shape.n, shape.o, p->add);
    }
}

static void backward_input(const struct model_pass *p, enum model_layer_tensor which, kern_real *dx,
                           int dx_add, const kern_real *dy)
{
    p->kern->ops->matmul_dx(p->kern, dx, dy, weight(p, which), shape_of(p->model, which), dx_add);
}

void model_forward_norm(const struct model_pass *p, kern_real *out, float *mean, float *rstd,
                        const kern_real *x, const kern_real *w, const kern_real *bias)
{
    const struct train_model *m = p->model;
    struct kern *k = p->kern;
    uint32_t rows = m->stream_rows, dim = m->config.dim;
    float eps = (float)m->config.norm_eps;
    if (model_is_gpt2(m)) {
        k->ops->layernorm_forward(k, out, mean, rstd, x, w, bias, rows, dim, eps);
    } else {
        k->ops->rmsnorm_forward(k, out, rstd, x, w, rows, dim, eps);
    }
}

int model_backward_norm(const struct model_pass *p, float *dw, float *dbias, const kern_real *x,
                        const kern_real *w, const float *mean, const float *rstd,
                        struct bl_errmsg *msg)
{
    struct train_model *m = p->model;
    struct kern *k = p->kern;
    uint32_t rows = m->stream_rows, dim = m->config.dim;
    int parted = m->part.sequence != 0, add = parted ? 0 : p->add;
    const kern_real *dout = model_tp_own(m, m->dnorm);
    float *to = parted ? m->norm_parts : dw;
    float *bias_to = parted && dbias != NULL ? m->norm_parts + dim : dbias;
    if (model_is_gpt2(m)) {
        k->ops->layernorm_backward(k, m->dx, to, bias_to, dout, x, w, mean, rstd, m->scratch, rows,
                                   dim, add);
    } else {
        k->ops->rmsnorm_backward(k, m->dx, to, dout, x, w, rstd, m->scratch, rows, dim, add);
    }
    return parted ? model_tp_norm_grads(p, dw, dbias, m->norm_parts, msg) : 0;
}

static void forward_layer_norm(const struct model_pass *p, enum model_layer_tensor which,
                               kern_real *out, float *mean, float *rstd, const kern_real *x)
{
    model_forward_norm(p, out, mean, rstd, x, weight(p, which), bias_weight(p, which));
}

/* From model->dnorm, parts of the gradient of the norm's output. */
static int backward_layer_norm(const struct model_pass *p, enum model_layer_tensor which,
                               const kern_real *x, const float *mean, const float *rstd,
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
    kern_real *own = model_tp_own(p->model, a->norm1);
    forward_layer_norm(p, MODEL_NORM1, own, a->mean1, a->rstd1, a->x);
    return model_tp_gather(p, a->norm1, msg);
}

static int norm2_forward(const struct model_pass *p, const struct model_layer_acts *a,
                         struct bl_errmsg *msg)
{
    kern_real *own = model_tp_own(p->model, a->norm2);
    forward_layer_norm(p, MODEL_NORM2, own, a->mean2, a->rstd2, a->mid);
    return model_tp_gather(p, a->norm2, msg);
}

static void activation_forward(const struct model_pass *p, const struct model_layer_acts *a)
{
    struct kern *k = p->kern;
    uint64_t wide = (uint64_t)p->model->rows * p->model->hidden;
    if (model_is_gpt2(p->model)) {
        k->ops->gelu_forward(k, a->act, a->up, wide);
    } else {
        k->ops->swiglu_forward(k, a->act, a->gate, a->up, wide);
    }
}

/* x to mid. */
static int attention_forward(const struct model_pass *p, const struct model_layer_acts *a,
                             struct bl_errmsg *msg)
{
    const struct train_model *m = p->model;
    struct kern *k = p->kern;
    int rc = norm1_forward(p, a, msg);
    if (rc != 0) {
        return rc;
    }
    model_forward_product(p, MODEL_Q, a->q, a->norm1, 1);
    model_forward_product(p, MODEL_K, a->k, a->norm1, 1);
    model_forward_product(p, MODEL_V, a->v, a->norm1, 1);
    if (!model_is_gpt2(m)) {
        k->ops->rope_forward(k, a->q, m->rope, m->rows, m->seq_len, m->heads, m->head_dim, 0);
        k->ops->rope_forward(k, a->k, m->rope, m->rows, m->seq_len, m->kv_heads, m->head_dim, 0);
    }
    k->ops->attention_forward(k, a->att, a->stats, a->q, a->k, a->v, m->scratch, &m->attention);
    rc = model_tp_row_product(p, MODEL_O, a->mid, a->att, msg);
    if (rc == 0) {
        k->ops->add_real(k, a->mid, a->x, a->mid, (uint64_t)m->stream_rows * m->config.dim);
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
    model_forward_product(p, MODEL_UP, a->up, a->norm2, 1);
    if (!model_is_gpt2(p->model)) {
        model_forward_product(p, MODEL_GATE, a->gate, a->norm2, 1);
    }
    activation_forward(p, a);
    return 0;
}

int model_layer_forward(const struct model_pass *p, const struct model_layer_acts *a,
                        kern_real *x_next, struct bl_errmsg *msg)
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
        p->kern->ops->add_real(p->kern, x_next, a->mid, x_next,
                               (uint64_t)m->stream_rows * m->config.dim);
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
    struct kern *k = p->kern;
    uint64_t wide = (uint64_t)m->rows * m->hidden;
    const kern_real *dx;
    int rc = model_tp_whole_dx(p, &dx, msg);
    if (rc != 0) {
        return rc;
    }
    backward_weight(p, MODEL_DOWN, dx, a->act);
    backward_input(p, MODEL_DOWN, m->dact, 0, dx);
    if (model_is_gpt2(m)) {
        k->ops->gelu_backward(k, m->dup, m->dact, a->up, wide);
        backward_weight(p, MODEL_UP, m->dup, a->norm2);
        backward_input(p, MODEL_UP, m->dnorm, 0, m->dup);
    } else {
        k->ops->swiglu_backward(k, m->dgate, m->dup, m->dact, a->gate, a->up, wide);
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
    struct kern *k = p->kern;
    const kern_real *dx;
    int rc = model_tp_whole_dx(p, &dx, msg);
    if (rc != 0) {
        return rc;
    }
    backward_weight(p, MODEL_O, dx, a->att);
    backward_input(p, MODEL_O, m->datt, 0, dx);
    k->ops->attention_backward(k, m->dq, m->dk, m->dv, m->datt, a->att, a->stats, a->q, a->k, a->v,
                               m->scratch, &m->attention);
    if (!model_is_gpt2(m)) {
        k->ops->rope_backward(k, m->dq, m->rope, m->rows, m->seq_len, m->heads, m->head_dim);
        k->ops->rope_backward(k, m->dk, m->rope, m->rows, m->seq_len, m->kv_heads, m->head_dim);
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
