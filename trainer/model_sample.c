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
    const kern_real *params;
    struct kern *kern;
    uint32_t positions; /* room in the cache */
    char *memory;       /* owned, of the back end: what follows but for `logits` */
    uint64_t memory_bytes;
    struct kern_tokens token;
    kern_real *keys, *values;             /* [L, positions, KV*D] */
    float *rope;                          /* [positions, 2, D/2] */
    kern_real *x, *norm, *q, *att, *proj; /* [C] */
    float *mean, *rstd, *stats;           /* [1], [1], [H,2] */
    kern_real *gate, *up;                 /* [F] */
    kern_real *scores;                    /* [V] */
    float *wide;                          /* [V]: the scores in fp32 */
    void *scratch;
    float *logits;   /* [V], owned, host */
    uint32_t *order; /* [V], owned, host: tokens by logit */
};

static struct kern_attention_shape shape_at(const struct train_model *model, uint32_t length)
{
    struct kern_attention_shape shape = model->attention;
    shape.batch = 1;
    shape.q_len = 1;
    shape.kv_len = length;
    return shape;
}

/* Gives all arrays their places; returns the bytes that they take. */
static uint64_t lay_out(struct sampler *s)
{
    const struct train_model *m = s->model;
    const struct bl_job_model *c = &m->config;
    const struct kern_attention_shape shape = shape_at(m, s->positions);
    struct kern *k = s->kern;
    struct model_arena cut = {k, s->memory, 0};
    uint64_t cache = (uint64_t)c->layers * s->positions * m->kv_dim;
    uint64_t token_bytes = k->ops->tokens_bytes(k, 1);
    void *token = model_take(&cut, token_bytes);
    s->token.memory = token_bytes != 0 ? token : NULL;
    s->keys = model_take_real(&cut, cache);
    s->values = model_take_real(&cut, cache);
    s->rope = model_take_f32(&cut, (uint64_t)s->positions * m->head_dim);
    s->scratch = model_take(&cut, k->ops->attention_scratch(k, &shape));
    s->x = model_take_real(&cut, c->dim);
    s->norm = model_take_real(&cut, c->dim);
    s->q = model_take_real(&cut, c->dim);
    s->att = model_take_real(&cut, c->dim);
    s->proj = model_take_real(&cut, c->dim);
    s->gate = model_take_real(&cut, c->hidden);
    s->up = model_take_real(&cut, c->hidden);
    s->scores = model_take_real(&cut, c->vocab);
    s->wide = model_take_f32(&cut, c->vocab);
    s->stats = model_take_f32(&cut, 2ULL * c->heads);
    s->rstd = model_take_f32(&cut, 1);
    s->mean = model_take_f32(&cut, 1);
    return cut.used;
}

static int sampler_init(struct sampler *s, struct bl_errmsg *msg)
{
    const struct train_model *m = s->model;
    uint32_t vocab = m->config.vocab;
    s->memory_bytes = lay_out(s);
    s->memory = s->kern->ops->alloc(s->kern, s->memory_bytes);
    s->logits = malloc(vocab * sizeof *s->logits);
    s->order = malloc(vocab * sizeof *s->order);
    if (s->memory == NULL || s->logits == NULL || s->order == NULL) {
        return bl_err_code(msg, -ENOMEM, "sampling: %llu bytes",
                           (unsigned long long)s->memory_bytes);
    }
    lay_out(s);
    int rc = model_plan_products(m, 1, msg);
    return rc != 0 ? rc : model_rope_upload(m, s->rope, s->positions, msg);
}

static void sampler_close(struct sampler *s)
{
    s->kern->ops->free(s->kern, s->memory, s->memory_bytes);
    free(s->logits);
    free(s->order);
}

static const kern_real *layer_weight(const struct sampler *s, uint32_t layer,
                                     enum model_layer_tensor which)
{
    return kern_real_view(s->kern, s->params, model_layer_at(s->model, layer, which));
}

/* Of a matrix or a norm's weight; NULL: none. */
static const kern_real *layer_bias(const struct sampler *s, uint32_t layer,
                                   enum model_layer_tensor which)
{
    enum model_layer_tensor bias = model_bias_of(which);
    return model_has(s->model, bias) ? layer_weight(s, layer, bias) : NULL;
}

static void product(const struct sampler *s, uint32_t layer, enum model_layer_tensor which,
                    kern_real *y, const kern_real *x)
{
    const struct train_tensor *t = model_layer_tensor(s->model, layer, which);
    uint32_t in = (uint32_t)t->shape[1], out = (uint32_t)t->shape[0];
    s->kern->ops->matmul_forward(s->kern, y, x, layer_weight(s, layer, which),
                                 layer_bias(s, layer, which),
                                 (struct kern_matmul_shape){1, in, out});
}

/* s->norm of s->x; bias NULL: none. */
static void norm(const struct sampler *s, const kern_real *weight, const kern_real *bias)
{
    struct kern *k = s->kern;
    uint32_t dim = s->model->config.dim;
    float eps = (float)s->model->config.norm_eps;
    if (model_is_gpt2(s->model)) {
        k->ops->layernorm_forward(k, s->norm, s->mean, s->rstd, s->x, weight, bias, 1, dim, eps);
    } else {
        k->ops->rmsnorm_forward(k, s->norm, s->rstd, s->x, weight, 1, dim, eps);
    }
}

static void layer_norm(const struct sampler *s, uint32_t layer, enum model_layer_tensor which)
{
    norm(s, layer_weight(s, layer, which), layer_bias(s, layer, which));
}

static void layer_step(struct sampler *s, uint32_t layer, uint32_t position)
{
    const struct train_model *m = s->model;
    const struct bl_job_model *c = &m->config;
    struct kern *k = s->kern;
    uint64_t cache = (uint64_t)layer * s->positions * m->kv_dim;
    uint64_t own = (uint64_t)position * m->kv_dim;
    kern_real *keys = kern_real_at(k, s->keys, cache), *values = kern_real_at(k, s->values, cache);
    kern_real *key = kern_real_at(k, keys, own), *value = kern_real_at(k, values, own);
    struct kern_attention_shape shape = shape_at(m, position + 1);

    layer_norm(s, layer, MODEL_NORM1);
    product(s, layer, MODEL_Q, s->q, s->norm);
    product(s, layer, MODEL_K, key, s->norm);
    product(s, layer, MODEL_V, value, s->norm);
    if (!model_is_gpt2(m)) {
        k->ops->rope_forward(k, s->q, s->rope, 1, 1, c->heads, m->head_dim, position);
        k->ops->rope_forward(k, key, s->rope, 1, 1, c->kv_heads, m->head_dim, position);
    }
    k->ops->attention_forward(k, s->att, s->stats, s->q, keys, values, s->scratch, &shape);
    product(s, layer, MODEL_O, s->proj, s->att);
    k->ops->add_real(k, s->x, s->x, s->proj, c->dim);

    layer_norm(s, layer, MODEL_NORM2);
    product(s, layer, MODEL_UP, s->up, s->norm);
    if (model_is_gpt2(m)) {
        k->ops->gelu_forward(k, s->gate, s->up, c->hidden);
    } else {
        product(s, layer, MODEL_GATE, s->gate, s->norm);
        k->ops->swiglu_forward(k, s->gate, s->gate, s->up, c->hidden);
    }
    product(s, layer, MODEL_DOWN, s->proj, s->gate);
    k->ops->add_real(k, s->x, s->x, s->proj, c->dim);
}

static const kern_real *weight_at(const struct sampler *s, uint64_t offset)
{
    return kern_real_view(s->kern, s->params, offset);
}

/* The logits after `token` at `position`, into s->scores. */
static void token_step(struct sampler *s, const int32_t *token, uint32_t position)
{
    const struct train_model *m = s->model;
    const struct bl_job_model *c = &m->config;
    struct kern *k = s->kern;
    k->ops->tokens_set(k, &s->token, token, 1, 0, c->vocab);
    k->ops->embedding_forward(k, s->x, &s->token, weight_at(s, model_embed_at(m)), c->dim, 0,
                              c->vocab);
    if (model_is_gpt2(m)) {
        k->ops->position_forward(k, s->x, weight_at(s, model_positions_at(m)), 1, c->dim, 1,
                                 position);
    }
    for (uint32_t layer = 0; layer < c->layers; layer++) {
        layer_step(s, layer, position);
    }
    norm(s, weight_at(s, model_norm_at(m)), c->bias ? weight_at(s, model_norm_bias_at(m)) : NULL);
    k->ops->matmul_forward(k, s->scores, s->norm, weight_at(s, model_head_at(m)), NULL,
                           (struct kern_matmul_shape){1, c->dim, c->vocab});
}

/* Waits; the scores are on the host then. */
static int fetch_logits(struct sampler *s, struct bl_errmsg *msg)
{
    struct kern *k = s->kern;
    uint32_t vocab = s->model->config.vocab;
    k->ops->widen(k, s->wide, s->scores, vocab);
    k->ops->download(k, s->logits, s->wide, vocab * sizeof *s->logits);
    return k->ops->sync(k, msg);
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
    uint64_t counted;
    return model_tokens_check(model, prompt, prompt_len, 0, "prompt token", &counted, msg);
}

int train_model_sample(const struct train_model *model, const kern_real *params,
                       const int32_t *prompt, uint32_t prompt_len, int32_t *out, uint32_t count,
                       const struct train_sample *how, struct bl_errmsg *msg)
{
    int rc = check_prompt(model, prompt, prompt_len, count, msg);
    if (rc < 0) {
        return rc;
    }
    struct sampler s = {
        .model = model, .params = params, .kern = model->kern, .positions = prompt_len + count};
    rc = sampler_init(&s, msg);
    for (uint32_t i = 0; rc == 0 && i + 1 < prompt_len + count; i++) {
        token_step(&s, i < prompt_len ? &prompt[i] : &out[i - prompt_len], i);
        if (i + 1 >= prompt_len) {
            rc = fetch_logits(&s, msg);
            out[i + 1 - prompt_len] = rc == 0 ? pick(&s, how, i + 1) : 0;
        }
    }
    sampler_close(&s);
    return rc;
}
