/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The model's logical tensors: names, shapes, places in the flat buffer, initial weights.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/digest.h"
#include "trainer/model_internal.h"

#define INIT_STD 0.02

static int check_shape(const struct train_model *model, struct bl_errmsg *msg)
{
    const struct bl_job_model *c = &model->config;
    if (c->layers == 0 || c->layers > MODEL_LAYERS_MAX) {
        return bl_err(msg, BL_ECONFIG, "model.layers %u: 1 to %u", c->layers, MODEL_LAYERS_MAX);
    }
    if (c->dim == 0 || c->dim > MODEL_DIM_MAX || c->hidden == 0 || c->hidden > 4 * MODEL_DIM_MAX) {
        return bl_err(msg, BL_ECONFIG, "model.dim %u, model.hidden %u: 1 to %u and %u", c->dim,
                      c->hidden, MODEL_DIM_MAX, 4 * MODEL_DIM_MAX);
    }
    if (c->vocab == 0 || c->vocab > MODEL_VOCAB_MAX) {
        return bl_err(msg, BL_ECONFIG, "model.vocab %u: 1 to %u", c->vocab, MODEL_VOCAB_MAX);
    }
    if (c->heads == 0 || c->dim % c->heads != 0 ||
        (!model_is_gpt2(model) && c->dim / c->heads % 2 != 0)) {
        return bl_err(msg, BL_ECONFIG, "model.dim %u must be model.heads %u times %s number",
                      c->dim, c->heads, model_is_gpt2(model) ? "a whole" : "an even");
    }
    if (model_is_gpt2(model) &&
        (c->kv_heads != c->heads || c->context < model->seq_len || c->context > MODEL_SEQ_MAX)) {
        return bl_err(msg, BL_ECONFIG,
                      "gpt2: model.kv_heads %u must be model.heads %u, model.context %u must be "
                      "train.seq_len %u to %u",
                      c->kv_heads, c->heads, c->context, model->seq_len, MODEL_SEQ_MAX);
    }
    if (c->kv_heads == 0 || c->heads % c->kv_heads != 0) {
        return bl_err(msg, BL_ECONFIG, "model.heads %u must be a multiple of model.kv_heads %u",
                      c->heads, c->kv_heads);
    }
    if (!(c->rope_theta > 0.0 && c->rope_theta < 1e12)) {
        return bl_err(msg, BL_ECONFIG, "model.rope_theta %g: above 0, below 1e12", c->rope_theta);
    }
    if (!(c->norm_eps >= 0.0 && c->norm_eps < 1.0)) {
        return bl_err(msg, BL_ECONFIG, "model.norm_eps %g: at least 0, below 1", c->norm_eps);
    }
    if (model->seq_len == 0 || model->seq_len > MODEL_SEQ_MAX || model->micro_batch == 0 ||
        model->micro_batch > MODEL_BATCH_MAX ||
        (uint64_t)model->seq_len * model->micro_batch > MODEL_SEQ_MAX) {
        return bl_err(msg, BL_ECONFIG,
                      "train.seq_len %u, train.micro_batch %u: at least 1, together at most %u",
                      model->seq_len, model->micro_batch, MODEL_SEQ_MAX);
    }
    uint64_t tasks = (uint64_t)model->micro_batch * c->heads * ((model->seq_len + 63) / 64);
    if (tasks > KERN_TASKS_MAX) {
        return bl_err(msg, BL_ECONFIG,
                      "model.heads %u is too many for train.micro_batch %u, train.seq_len %u",
                      c->heads, model->micro_batch, model->seq_len);
    }
    if (model->threads == 0 || model->threads > KERN_THREADS_MAX) {
        return bl_err(msg, BL_ECONFIG, "threads %u: 1 to %u", model->threads, KERN_THREADS_MAX);
    }
    return 0;
}

static uint64_t block_align(uint64_t elems)
{
    return (elems + KERN_BLOCK - 1) / KERN_BLOCK * KERN_BLOCK;
}

static void add_tensor(struct train_model *model, const char *name, uint32_t rows, uint32_t columns,
                       double init_std, float init_fill)
{
    struct train_tensor *t = &model->tensors[model->tensor_count++];
    snprintf(t->name, sizeof t->name, "%s", name);
    t->name_hash = bl_xxh3(t->name, strlen(t->name));
    t->dims = columns == 0 ? 1 : 2;
    t->shape[0] = rows;
    t->shape[1] = columns == 0 ? 1 : columns;
    t->elems = t->shape[0] * t->shape[1];
    t->offset = model->buffer_elems;
    t->decay = columns != 0;
    t->init_std = init_std;
    t->init_fill = init_fill;
    model->param_elems += t->elems;
    model->buffer_elems += block_align(t->elems);
}

/* Sizes by letter: C dim, K kv_dim, F hidden, 0 none. */
struct layer_row {
    enum model_layer_tensor which;
    const char *name; /* behind the layer's prefix */
    char rows, columns;
    enum init {
        INIT_ZERO,
        INIT_ONE,
        INIT_NORMAL,  /* INIT_STD */
        INIT_RESIDUAL /* INIT_STD / sqrt(2 layers): what is added to the residual stream */
    } init;
};

static const struct layer_row llama_layer[] = {
    {MODEL_NORM1, "input_layernorm.weight", 'C', '0', INIT_ONE},
    {MODEL_Q, "self_attn.q_proj.weight", 'C', 'C', INIT_NORMAL},
    {MODEL_K, "self_attn.k_proj.weight", 'K', 'C', INIT_NORMAL},
    {MODEL_V, "self_attn.v_proj.weight", 'K', 'C', INIT_NORMAL},
    {MODEL_O, "self_attn.o_proj.weight", 'C', 'C', INIT_RESIDUAL},
    {MODEL_NORM2, "post_attention_layernorm.weight", 'C', '0', INIT_ONE},
    {MODEL_GATE, "mlp.gate_proj.weight", 'F', 'C', INIT_NORMAL},
    {MODEL_UP, "mlp.up_proj.weight", 'F', 'C', INIT_NORMAL},
    {MODEL_DOWN, "mlp.down_proj.weight", 'C', 'F', INIT_RESIDUAL},
};

static const struct layer_row gpt2_layer[] = {
    {MODEL_NORM1, "ln_1.weight", 'C', '0', INIT_ONE},
    {MODEL_NORM1_BIAS, "ln_1.bias", 'C', '0', INIT_ZERO},
    {MODEL_Q, "attn.q_proj.weight", 'C', 'C', INIT_NORMAL},
    {MODEL_K, "attn.k_proj.weight", 'C', 'C', INIT_NORMAL},
    {MODEL_V, "attn.v_proj.weight", 'C', 'C', INIT_NORMAL},
    {MODEL_Q_BIAS, "attn.q_proj.bias", 'C', '0', INIT_ZERO},
    {MODEL_K_BIAS, "attn.k_proj.bias", 'C', '0', INIT_ZERO},
    {MODEL_V_BIAS, "attn.v_proj.bias", 'C', '0', INIT_ZERO},
    {MODEL_O, "attn.o_proj.weight", 'C', 'C', INIT_RESIDUAL},
    {MODEL_O_BIAS, "attn.o_proj.bias", 'C', '0', INIT_ZERO},
    {MODEL_NORM2, "ln_2.weight", 'C', '0', INIT_ONE},
    {MODEL_NORM2_BIAS, "ln_2.bias", 'C', '0', INIT_ZERO},
    {MODEL_UP, "mlp.up_proj.weight", 'F', 'C', INIT_NORMAL},
    {MODEL_UP_BIAS, "mlp.up_proj.bias", 'F', '0', INIT_ZERO},
    {MODEL_DOWN, "mlp.down_proj.weight", 'C', 'F', INIT_RESIDUAL},
    {MODEL_DOWN_BIAS, "mlp.down_proj.bias", 'C', '0', INIT_ZERO},
};

static uint32_t letter_size(const struct train_model *model, char letter)
{
    return letter == 'C'   ? model->config.dim
           : letter == 'K' ? model->kv_dim
           : letter == 'F' ? model->config.hidden
                           : 0;
}

static int is_bias(const struct layer_row *row)
{
    size_t length = strlen(row->name);
    return length > 5 && strcmp(row->name + length - 5, ".bias") == 0;
}

static void add_layer(struct train_model *model, uint32_t layer)
{
    const struct bl_job_model *c = &model->config;
    int gpt2 = model_is_gpt2(model);
    const struct layer_row *rows = gpt2 ? gpt2_layer : llama_layer;
    size_t count = gpt2 ? sizeof gpt2_layer / sizeof *rows : sizeof llama_layer / sizeof *rows;
    int8_t place = 0;
    for (size_t i = 0; i < count; i++) {
        const struct layer_row *row = &rows[i];
        char name[BL_TENSOR_NAME_MAX];
        if (is_bias(row) && !c->bias) {
            continue;
        }
        double std = row->init == INIT_RESIDUAL ? INIT_STD / __builtin_sqrt(2.0 * c->layers)
                     : row->init == INIT_NORMAL ? INIT_STD
                                                : 0.0;
        snprintf(name, sizeof name, "%s.%u.%s", gpt2 ? "transformer.h" : "model.layers", layer,
                 row->name);
        add_tensor(model, name, letter_size(model, row->rows), letter_size(model, row->columns),
                   std, row->init == INIT_ONE ? 1.0f : 0.0f);
        model->place[row->which] = place++;
    }
    model->layer_tensors = (uint32_t)place;
}

int model_table_init(struct train_model *model, struct bl_errmsg *msg)
{
    int rc = check_shape(model, msg);
    if (rc < 0) {
        return rc;
    }
    const struct bl_job_model *c = &model->config;
    model->rows = model->seq_len * model->micro_batch;
    model->head_dim = c->dim / c->heads;
    model->kv_dim = c->kv_heads * model->head_dim;
    model->attention = (struct kern_attention_shape){.batch = model->micro_batch,
                                                     .q_len = model->seq_len,
                                                     .kv_len = model->seq_len,
                                                     .heads = c->heads,
                                                     .kv_heads = c->kv_heads,
                                                     .head_dim = model->head_dim};
    model->tensors = calloc(5 + (size_t)c->layers * MODEL_LAYER_TENSORS, sizeof *model->tensors);
    if (model->tensors == NULL) {
        return bl_err_code(msg, -ENOMEM, "table of tensors");
    }
    memset(model->place, -1, sizeof model->place);
    int gpt2 = model_is_gpt2(model);
    add_tensor(model, gpt2 ? "transformer.wte.weight" : "model.embed_tokens.weight", c->vocab,
               c->dim, INIT_STD, 0);
    if (gpt2) {
        add_tensor(model, "transformer.wpe.weight", c->context, c->dim, INIT_STD, 0);
    }
    model->before_layers = model->tensor_count;
    for (uint32_t layer = 0; layer < c->layers; layer++) {
        add_layer(model, layer);
    }
    add_tensor(model, gpt2 ? "transformer.ln_f.weight" : "model.norm.weight", c->dim, 0, 0, 1);
    if (c->bias) {
        add_tensor(model, "transformer.ln_f.bias", c->dim, 0, 0, 0);
    }
    if (c->tied) {
        model->tied_elems = block_align(model->tensors[0].elems);
    } else {
        add_tensor(model, "lm_head.weight", c->vocab, c->dim, INIT_STD, 0);
    }
    return 0;
}

uint64_t model_embed_at(const struct train_model *model)
{
    return model->tensors[0].offset;
}

uint64_t model_positions_at(const struct train_model *model)
{
    return model->tensors[1].offset;
}

const struct train_tensor *model_layer_tensor(const struct train_model *model, uint32_t layer,
                                              enum model_layer_tensor which)
{
    BL_ASSERT(model_has(model, which));
    return &model->tensors[model->before_layers + layer * model->layer_tensors +
                           (uint32_t)model->place[which]];
}

enum model_layer_tensor model_bias_of(enum model_layer_tensor which)
{
    switch (which) {
    case MODEL_Q:
        return MODEL_Q_BIAS;
    case MODEL_K:
        return MODEL_K_BIAS;
    case MODEL_V:
        return MODEL_V_BIAS;
    case MODEL_NORM1:
    case MODEL_O:
    case MODEL_NORM2:
    case MODEL_UP:
    case MODEL_DOWN:
        return which + 1;
    default:
        return MODEL_NONE;
    }
}

uint64_t model_layer_at(const struct train_model *model, uint32_t layer,
                        enum model_layer_tensor which)
{
    return model_layer_tensor(model, layer, which)->offset;
}

uint64_t model_norm_at(const struct train_model *model)
{
    return model->tensors[model->before_layers + model->config.layers * model->layer_tensors]
        .offset;
}

uint64_t model_norm_bias_at(const struct train_model *model)
{
    return model->tensors[model->before_layers + model->config.layers * model->layer_tensors + 1]
        .offset;
}

uint64_t model_head_at(const struct train_model *model)
{
    return model->config.tied ? model_embed_at(model)
                              : model->tensors[model->tensor_count - 1].offset;
}

const struct train_tensor *train_model_tensors(const struct train_model *model, uint32_t *ret_count)
{
    *ret_count = model->tensor_count;
    return model->tensors;
}

uint64_t train_model_param_elems(const struct train_model *model)
{
    return model->param_elems;
}

uint64_t train_model_buffer_elems(const struct train_model *model)
{
    return model->buffer_elems;
}

uint64_t train_model_grad_elems(const struct train_model *model)
{
    return model->buffer_elems + model->tied_elems;
}

uint64_t train_model_tied_elems(const struct train_model *model)
{
    return model->tied_elems;
}

void train_model_init_params(const struct train_model *model, uint64_t seed, float *dst,
                             uint64_t lo, uint64_t hi, struct kern_pool *pool)
{
    BL_ASSERT(lo <= hi && hi <= model->buffer_elems);
    memset(dst, 0, (hi - lo) * sizeof *dst);
    for (uint32_t i = 0; i < model->tensor_count; i++) {
        const struct train_tensor *t = &model->tensors[i];
        uint64_t first = lo > t->offset ? lo : t->offset;
        uint64_t end = hi < t->offset + t->elems ? hi : t->offset + t->elems;
        if (first >= end) {
            continue;
        }
        float *to = dst + (first - lo);
        if (t->init_std > 0.0) {
            kern_rng_normal(pool, to, kern_rng_key(seed, t->name_hash), first - t->offset,
                            end - first, t->init_std);
        } else {
            for (uint64_t j = 0; j < end - first; j++) {
                to[j] = t->init_fill;
            }
        }
    }
}
