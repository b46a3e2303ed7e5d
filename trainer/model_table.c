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
    if (c->heads == 0 || c->dim % c->heads != 0 || c->dim / c->heads % 2 != 0) {
        return bl_err(msg, BL_ECONFIG, "model.dim %u must be model.heads %u times an even number",
                      c->dim, c->heads);
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

static void add_tensor(struct train_model *model, uint32_t layer, const char *name, uint32_t rows,
                       uint32_t columns, double init_std)
{
    struct train_tensor *t = &model->tensors[model->tensor_count++];
    if (layer == UINT32_MAX) {
        snprintf(t->name, sizeof t->name, "%s", name);
    } else {
        snprintf(t->name, sizeof t->name, "model.layers.%u.%s", layer, name);
    }
    t->name_hash = bl_xxh3(t->name, strlen(t->name));
    t->dims = columns == 0 ? 1 : 2;
    t->shape[0] = rows;
    t->shape[1] = columns == 0 ? 1 : columns;
    t->elems = t->shape[0] * t->shape[1];
    t->offset = model->buffer_elems;
    t->decay = columns != 0;
    t->init_std = init_std;
    model->param_elems += t->elems;
    model->buffer_elems += block_align(t->elems);
}

static void add_layer(struct train_model *model, uint32_t layer)
{
    const struct bl_job_model *c = &model->config;
    double residual_std = INIT_STD / __builtin_sqrt(2.0 * c->layers);
    add_tensor(model, layer, "input_layernorm.weight", c->dim, 0, 0.0);
    add_tensor(model, layer, "self_attn.q_proj.weight", c->dim, c->dim, INIT_STD);
    add_tensor(model, layer, "self_attn.k_proj.weight", model->kv_dim, c->dim, INIT_STD);
    add_tensor(model, layer, "self_attn.v_proj.weight", model->kv_dim, c->dim, INIT_STD);
    add_tensor(model, layer, "self_attn.o_proj.weight", c->dim, c->dim, residual_std);
    add_tensor(model, layer, "post_attention_layernorm.weight", c->dim, 0, 0.0);
    add_tensor(model, layer, "mlp.gate_proj.weight", c->hidden, c->dim, INIT_STD);
    add_tensor(model, layer, "mlp.up_proj.weight", c->hidden, c->dim, INIT_STD);
    add_tensor(model, layer, "mlp.down_proj.weight", c->dim, c->hidden, residual_std);
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
    model->tensors = calloc(3 + (size_t)c->layers * MODEL_LAYER_TENSORS, sizeof *model->tensors);
    if (model->tensors == NULL) {
        return bl_err_code(msg, -ENOMEM, "table of tensors");
    }
    add_tensor(model, UINT32_MAX, "model.embed_tokens.weight", c->vocab, c->dim, INIT_STD);
    for (uint32_t layer = 0; layer < c->layers; layer++) {
        add_layer(model, layer);
    }
    add_tensor(model, UINT32_MAX, "model.norm.weight", c->dim, 0, 0.0);
    if (c->tied) {
        model->tied_elems = block_align(model->tensors[0].elems);
    } else {
        add_tensor(model, UINT32_MAX, "lm_head.weight", c->vocab, c->dim, INIT_STD);
    }
    return 0;
}

uint64_t model_embed_at(const struct train_model *model)
{
    return model->tensors[0].offset;
}

uint64_t model_layer_at(const struct train_model *model, uint32_t layer,
                        enum model_layer_tensor which)
{
    return model->tensors[1 + layer * MODEL_LAYER_TENSORS + which].offset;
}

uint64_t model_norm_at(const struct train_model *model)
{
    return model->tensors[1 + model->config.layers * MODEL_LAYER_TENSORS].offset;
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
                to[j] = 1.0f;
            }
        }
    }
}
