/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sampling: one token at a time through the same kernels, with keys and values of all earlier
 * positions kept.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/fmath.h"
#include "trainer/model_internal.h"

#define SAMPLE_LEN_MAX (1U << 20)

struct sampler {
    const struct train_model *model;
    const float *params;
    struct kern_pool *pool;
    uint32_t positions;               /* room in the cache */
    float *arena;                     /* owned: all that follows */
    float *keys, *values;             /* [L, positions, KV*D] */
    float *rope;                      /* [positions, 2, D/2] */
    float *x, *norm, *q, *att, *proj; /* [C] */
    float *mean, *rstd, *stats;       /* [1], [1], [H,2] */
    float *gate, *up;                 /* [F] */
    float *logits;                    /* [V] */
    float *scratch;
    uint32_t *order; /* [V], owned: tokens by logit */
};

static struct kern_attention_shape shape_at(const struct train_model *model, uint32_t length)
{
    struct kern_attention_shape shape = model->attention;
    shape.batch = 1;
    shape.q_len = 1;
    shape.kv_len = length;
    return shape;
}

static int sampler_init(struct sampler *s, struct bl_errmsg *msg)
{
    const struct train_model *m = s->model;
    const struct bl_job_model *c = &m->config;
    struct kern_attention_shape shape = shape_at(m, s->positions);
    uint64_t cache = (uint64_t)c->layers * s->positions * m->kv_dim;
    uint64_t rope = (uint64_t)s->positions * m->head_dim;
    uint64_t scratch = kern_attention_scratch(&shape, kern_pool_threads(s->pool));
    uint64_t elems = 2 * cache + rope + scratch + 5ULL * c->dim + 2ULL * c->hidden + c->vocab +
                     2ULL * c->heads + 2;
    s->arena = malloc(elems * sizeof(float));
    s->order = malloc(c->vocab * sizeof *s->order);
    if (s->arena == NULL || s->order == NULL) {
        return bl_err_code(msg, -ENOMEM, "sampling: %llu bytes",
                           (unsigned long long)(elems * sizeof(float)));
    }
    float *at = s->arena;
    s->keys = at, at += cache;
    s->values = at, at += cache;
    s->rope = at, at += rope;
    s->scratch = at, at += scratch;
    s->x = at, at += c->dim;
    s->norm = at, at += c->dim;
    s->q = at, at += c->dim;
    s->att = at, at += c->dim;
    s->proj = at, at += c->dim;
    s->gate = at, at += c->hidden;
    s->up = at, at += c->hidden;
    s->logits = at, at += c->vocab;
    s->stats = at, at += 2ULL * c->heads;
    s->rstd = at;
    s->mean = at + 1;
    if (!model_is_gpt2(m)) {
        model_rope_table(m, s->rope, s->positions);
    }
    return 0;
}

static const float *layer_weight(const struct sampler *s, uint32_t layer,
                                 enum model_layer_tensor which)
{
    return s->params + model_layer_at(s->model, layer, which);
}

static void product(const struct sampler *s, uint32_t layer, enum model_layer_tensor which,
                    float *y, const float *x)
{
    const struct train_tensor *t = model_layer_tensor(s->model, layer, which);
    enum model_layer_tensor bias = model_bias_of(which);
    uint32_t in = (uint32_t)t->shape[1], out = (uint32_t)t->shape[0];
    kern_matmul_forward(s->pool, y, x, layer_weight(s, layer, which),
                        (struct kern_matmul_shape){1, in, out}, 0);
    if (model_has(s->model, bias)) {
        kern_bias_forward(s->pool, y, layer_weight(s, layer, bias), 1, out);
    }
}

/* s->norm of s->x; bias NULL: none. */
static void norm(const struct sampler *s, const float *weight, const float *bias)
{
    uint32_t dim = s->model->config.dim;
    float eps = (float)s->model->config.norm_eps;
    if (model_is_gpt2(s->model)) {
        kern_layernorm_forward(s->pool, s->norm, s->mean, s->rstd, s->x, weight, bias, 1, dim, eps);
    } else {
        kern_rmsnorm_forward(s->pool, s->norm, s->rstd, s->x, weight, 1, dim, eps);
    }
}

static void layer_norm(const struct sampler *s, uint32_t layer, enum model_layer_tensor which)
{
    enum model_layer_tensor bias = model_bias_of(which);
    norm(s, layer_weight(s, layer, which),
         model_has(s->model, bias) ? layer_weight(s, layer, bias) : NULL);
}

static void layer_step(struct sampler *s, uint32_t layer, uint32_t position)
{
    const struct train_model *m = s->model;
    const struct bl_job_model *c = &m->config;
    float *keys = s->keys + (size_t)layer * s->positions * m->kv_dim;
    float *values = s->values + (size_t)layer * s->positions * m->kv_dim;
    float *k = keys + (size_t)position * m->kv_dim, *v = values + (size_t)position * m->kv_dim;
    struct kern_attention_shape shape = shape_at(m, position + 1);

    layer_norm(s, layer, MODEL_NORM1);
    product(s, layer, MODEL_Q, s->q, s->norm);
    product(s, layer, MODEL_K, k, s->norm);
    product(s, layer, MODEL_V, v, s->norm);
    if (!model_is_gpt2(m)) {
        kern_rope_forward(s->pool, s->q, s->rope, 1, 1, c->heads, m->head_dim, position);
        kern_rope_forward(s->pool, k, s->rope, 1, 1, c->kv_heads, m->head_dim, position);
    }
    kern_attention_forward(s->pool, s->att, s->stats, s->q, keys, values, s->scratch, &shape);
    product(s, layer, MODEL_O, s->proj, s->att);
    kern_add(s->pool, s->x, s->x, s->proj, c->dim);

    layer_norm(s, layer, MODEL_NORM2);
    product(s, layer, MODEL_UP, s->up, s->norm);
    if (model_is_gpt2(m)) {
        kern_gelu_forward(s->pool, s->gate, s->up, c->hidden);
    } else {
        product(s, layer, MODEL_GATE, s->gate, s->norm);
        kern_swiglu_forward(s->pool, s->gate, s->gate, s->up, c->hidden);
    }
    product(s, layer, MODEL_DOWN, s->proj, s->gate);
    kern_add(s->pool, s->x, s->x, s->proj, c->dim);
}

/* The logits after `token` at `position`, into s->logits. */
static void token_step(struct sampler *s, int32_t token, uint32_t position)
{
    const struct train_model *m = s->model;
    const struct bl_job_model *c = &m->config;
    kern_embedding_forward(s->pool, s->x, &token, s->params + model_embed_at(m), 1, c->dim);
    if (model_is_gpt2(m)) {
        kern_position_forward(s->pool, s->x, s->params + model_positions_at(m), 1, c->dim, 1,
                              position);
    }
    for (uint32_t layer = 0; layer < c->layers; layer++) {
        layer_step(s, layer, position);
    }
    norm(s, s->params + model_norm_at(m), c->bias ? s->params + model_norm_bias_at(m) : NULL);
    kern_matmul_forward(s->pool, s->logits, s->norm, s->params + model_head_at(m),
                        (struct kern_matmul_shape){1, c->dim, c->vocab}, 0);
}

struct by_logit {
    const float *logits;
};

/* Larger logit first, then lower token: a total order as long as no logit is NaN. */
static int order_tokens(const void *a, const void *b, void *opaque)
{
    const struct by_logit *by = opaque;
    uint32_t i = *(const uint32_t *)a, j = *(const uint32_t *)b;
    if (by->logits[i] != by->logits[j]) {
        return by->logits[i] > by->logits[j] ? -1 : 1;
    }
    return i < j ? -1 : i > j;
}

static int32_t pick_greedy(const float *logits, uint32_t vocab)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < vocab; i++) {
        if (logits[i] > logits[best]) {
            best = i;
        }
    }
    return (int32_t)best;
}

/* How many of the `kept` largest have more than `share` together; their sum in *ret_sum. */
static uint32_t nucleus(const struct sampler *s, const struct train_sample *how, uint32_t kept,
                        double share, double *ret_sum)
{
    double top = (double)s->logits[s->order[0]], sum = 0.0;
    uint32_t count = 0;
    while (count < kept && sum <= share) {
        sum += kern_exp(((double)s->logits[s->order[count++]] - top) / how->temperature);
    }
    *ret_sum = sum;
    return count;
}

/* Draws from softmax(logits / temperature) over the top_k largest, in the order of their size. */
static int32_t pick(struct sampler *s, const struct train_sample *how, uint32_t position)
{
    uint32_t vocab = s->model->config.vocab;
    if (!(how->temperature > 0.0)) {
        return pick_greedy(s->logits, vocab);
    }
    for (uint32_t i = 0; i < vocab; i++) {
        s->order[i] = i;
    }
    struct by_logit by = {s->logits};
    qsort_r(s->order, vocab, sizeof *s->order, order_tokens, &by);
    uint32_t kept = how->top_k == 0 || how->top_k > vocab ? vocab : how->top_k;
    double top = (double)s->logits[s->order[0]], sum = 0.0;
    for (uint32_t i = 0; i < kept; i++) {
        sum += kern_exp(((double)s->logits[s->order[i]] - top) / how->temperature);
    }
    if (how->top_p > 0.0 && how->top_p < 1.0) {
        kept = nucleus(s, how, kept, how->top_p * sum, &sum);
    }
    double left = sum * kern_rng_uniform(kern_rng_key(how->seed, 0), position);
    for (uint32_t i = 0; i < kept; i++) {
        left -= kern_exp(((double)s->logits[s->order[i]] - top) / how->temperature);
        if (left < 0.0) {
            return (int32_t)s->order[i];
        }
    }
    return (int32_t)s->order[kept - 1];
}

static int check_prompt(const struct train_model *model, const int32_t *prompt, uint32_t prompt_len,
                        uint32_t count, struct bl_errmsg *msg)
{
    if (model->part.tp != 1 || model->part.pp != 1) {
        return bl_err(msg, -EINVAL,
                      "sampling takes the whole model, this is rank %u of %u, stage "
                      "%u of %u",
                      model->part.tp_rank, model->part.tp, model->part.stage, model->part.pp);
    }
    if (prompt_len == 0 || prompt_len > SAMPLE_LEN_MAX || count > SAMPLE_LEN_MAX) {
        return bl_err(msg, BL_ELIMIT, "a prompt of %u tokens, %u to add: at least 1, at most %u",
                      prompt_len, count, SAMPLE_LEN_MAX);
    }
    if (model_is_gpt2(model) && prompt_len + count > model->config.context) {
        return bl_err(msg, BL_ELIMIT,
                      "a prompt of %u tokens, %u to add: the model knows %u positions "
                      "(model.context)",
                      prompt_len, count, model->config.context);
    }
    return model_tokens_check(model, prompt, prompt_len, 0, "prompt token", msg);
}

int train_model_sample(const struct train_model *model, const float *params, const int32_t *prompt,
                       uint32_t prompt_len, int32_t *out, uint32_t count,
                       const struct train_sample *how, struct kern_pool *pool,
                       struct bl_errmsg *msg)
{
    int rc = check_prompt(model, prompt, prompt_len, count, msg);
    if (rc < 0) {
        return rc;
    }
    struct sampler s = {
        .model = model, .params = params, .pool = pool, .positions = prompt_len + count};
    rc = sampler_init(&s, msg);
    for (uint32_t i = 0; rc == 0 && i + 1 < prompt_len + count; i++) {
        token_step(&s, i < prompt_len ? prompt[i] : out[i - prompt_len], i);
        if (i + 1 >= prompt_len) {
            out[i + 1 - prompt_len] = pick(&s, how, i + 1);
        }
    }
    free(s.arena);
    free(s.order);
    return rc;
}
