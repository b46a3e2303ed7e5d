/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The model's logical tensors: names, shapes, boxes, places in flat order, initial weights.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/digest.h"
#include "trainer/model_internal.h"

#define INIT_STD 0.02

uint64_t model_block_align(uint64_t elems)
{
    return (elems + KERN_BLOCK - 1) / KERN_BLOCK * KERN_BLOCK;
}

/* Appends a tensor of the unit; its columns are MODEL_SPAN_ONE with one dimension. */
static void add_tensor(struct train_model *model, uint32_t unit, const char *name,
                       enum model_span_name rows, enum model_span_name columns, double init_std,
                       float init_fill)
{
    struct train_tensor *t = &model->tensors[model->tensor_count++];
    const struct model_span *spans[2] = {&model->span[rows], &model->span[columns]};
    snprintf(t->name, sizeof t->name, "%s", name);
    t->name_hash = bl_xxh3(t->name, strlen(t->name));
    t->dims = columns == MODEL_SPAN_ONE ? 1 : 2;
    t->elems = 1;
    for (int i = 0; i < 2; i++) {
        t->shape[i] = spans[i]->size;
        t->lo[i] = spans[i]->lo;
        t->hi[i] = spans[i]->hi;
        t->elems *= spans[i]->hi - spans[i]->lo;
        t->owner = spans[i]->owner > t->owner ? spans[i]->owner : t->owner;
    }
    t->offset = model->table_end;
    t->unit = unit;
    t->decay = t->dims == 2;
    t->init_std = init_std;
    t->init_fill = init_fill;
    model->param_elems += t->shape[0] * t->shape[1];
    model->table_end += model_block_align(t->elems);
}

struct layer_row {
    enum model_layer_tensor which;
    const char *name; /* behind the layer's prefix */
    enum model_span_name rows, columns;
    enum init {
        INIT_ZERO,
        INIT_ONE,
        INIT_NORMAL,  /* INIT_STD */
        INIT_RESIDUAL /* INIT_STD / sqrt(2 layers): what is added to the residual stream */
    } init;
};

static const struct layer_row llama_layer[] = {
    {MODEL_NORM1, "input_layernorm.weight", MODEL_SPAN_DIM, MODEL_SPAN_ONE, INIT_ONE},
    {MODEL_Q, "self_attn.q_proj.weight", MODEL_SPAN_Q, MODEL_SPAN_DIM, INIT_NORMAL},
    {MODEL_K, "self_attn.k_proj.weight", MODEL_SPAN_KV, MODEL_SPAN_DIM, INIT_NORMAL},
    {MODEL_V, "self_attn.v_proj.weight", MODEL_SPAN_KV, MODEL_SPAN_DIM, INIT_NORMAL},
    {MODEL_O, "self_attn.o_proj.weight", MODEL_SPAN_DIM, MODEL_SPAN_Q, INIT_RESIDUAL},
    {MODEL_NORM2, "post_attention_layernorm.weight", MODEL_SPAN_DIM, MODEL_SPAN_ONE, INIT_ONE},
    {MODEL_GATE, "mlp.gate_proj.weight", MODEL_SPAN_HIDDEN, MODEL_SPAN_DIM, INIT_NORMAL},
    {MODEL_UP, "mlp.up_proj.weight", MODEL_SPAN_HIDDEN, MODEL_SPAN_DIM, INIT_NORMAL},
    {MODEL_DOWN, "mlp.down_proj.weight", MODEL_SPAN_DIM, MODEL_SPAN_HIDDEN, INIT_RESIDUAL},
};

static const struct layer_row gpt2_layer[] = {
    {MODEL_NORM1, "ln_1.weight", MODEL_SPAN_DIM, MODEL_SPAN_ONE, INIT_ONE},
    {MODEL_NORM1_BIAS, "ln_1.bias", MODEL_SPAN_DIM, MODEL_SPAN_ONE, INIT_ZERO},
    {MODEL_Q, "attn.q_proj.weight", MODEL_SPAN_Q, MODEL_SPAN_DIM, INIT_NORMAL},
    {MODEL_K, "attn.k_proj.weight", MODEL_SPAN_KV, MODEL_SPAN_DIM, INIT_NORMAL},
    {MODEL_V, "attn.v_proj.weight", MODEL_SPAN_KV, MODEL_SPAN_DIM, INIT_NORMAL},
    {MODEL_Q_BIAS, "attn.q_proj.bias", MODEL_SPAN_Q, MODEL_SPAN_ONE, INIT_ZERO},
    {MODEL_K_BIAS, "attn.k_proj.bias", MODEL_SPAN_KV, MODEL_SPAN_ONE, INIT_ZERO},
    {MODEL_V_BIAS, "attn.v_proj.bias", MODEL_SPAN_KV, MODEL_SPAN_ONE, INIT_ZERO},
    {MODEL_O, "attn.o_proj.weight", MODEL_SPAN_DIM, MODEL_SPAN_Q, INIT_RESIDUAL},
    {MODEL_O_BIAS, "attn.o_proj.bias", MODEL_SPAN_DIM, MODEL_SPAN_ONE, INIT_ZERO},
    {MODEL_NORM2, "ln_2.weight", MODEL_SPAN_DIM, MODEL_SPAN_ONE, INIT_ONE},
    {MODEL_NORM2_BIAS, "ln_2.bias", MODEL_SPAN_DIM, MODEL_SPAN_ONE, INIT_ZERO},
    {MODEL_UP, "mlp.up_proj.weight", MODEL_SPAN_HIDDEN, MODEL_SPAN_DIM, INIT_NORMAL},
    {MODEL_UP_BIAS, "mlp.up_proj.bias", MODEL_SPAN_HIDDEN, MODEL_SPAN_ONE, INIT_ZERO},
    {MODEL_DOWN, "mlp.down_proj.weight", MODEL_SPAN_DIM, MODEL_SPAN_HIDDEN, INIT_RESIDUAL},
    {MODEL_DOWN_BIAS, "mlp.down_proj.bias", MODEL_SPAN_DIM, MODEL_SPAN_ONE, INIT_ZERO},
};

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
        add_tensor(model, 1 + layer, name, row->rows, row->columns, std,
                   row->init == INIT_ONE ? 1.0f : 0.0f);
        model->place[row->which] = place++;
    }
    model->layer_tensors = (uint32_t)place;
}

int model_table_init(struct train_model *model, struct bl_errmsg *msg)
{
    int rc = model_part_init(model, msg);
    if (rc < 0) {
        return rc;
    }
    const struct bl_job_model *c = &model->config;
    model->tensors = calloc(5 + (size_t)c->layers * MODEL_LAYER_TENSORS, sizeof *model->tensors);
    if (model->tensors == NULL) {
        return bl_err_code(msg, -ENOMEM, "table of tensors");
    }
    memset(model->place, -1, sizeof model->place);
    int gpt2 = model_is_gpt2(model);
    uint32_t last = c->layers + 1;
    add_tensor(model, 0, gpt2 ? "transformer.wte.weight" : "model.embed_tokens.weight",
               MODEL_SPAN_VOCAB, MODEL_SPAN_DIM, INIT_STD, 0);
    if (gpt2) {
        add_tensor(model, 0, "transformer.wpe.weight", MODEL_SPAN_POSITION, MODEL_SPAN_DIM,
                   INIT_STD, 0);
    }
    model->before_layers = model->tensor_count;
    for (uint32_t layer = 0; layer < c->layers; layer++) {
        add_layer(model, layer);
    }
    add_tensor(model, last, gpt2 ? "transformer.ln_f.weight" : "model.norm.weight", MODEL_SPAN_DIM,
               MODEL_SPAN_ONE, 0, 1);
    if (c->bias) {
        add_tensor(model, last, "transformer.ln_f.bias", MODEL_SPAN_DIM, MODEL_SPAN_ONE, 0, 0);
    }
    if (!c->tied) {
        add_tensor(model, last, "lm_head.weight", MODEL_SPAN_VOCAB, MODEL_SPAN_DIM, INIT_STD, 0);
    }
    return model_units_init(model, msg);
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

uint32_t model_norm_index(const struct train_model *model)
{
    return model->before_layers + model->config.layers * model->layer_tensors;
}

uint64_t model_norm_at(const struct train_model *model)
{
    return model->tensors[model_norm_index(model)].offset;
}

uint64_t model_norm_bias_at(const struct train_model *model)
{
    return model->tensors[model_norm_index(model) + 1].offset;
}

uint64_t model_head_at(const struct train_model *model)
{
    return model->config.tied ? model_embed_at(model)
                              : model->tensors[model->tensor_count - 1].offset;
}

uint64_t model_in_unit(const struct train_model *model, const struct train_tensor *tensor)
{
    return tensor->offset - model->units[tensor->unit].offset;
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

/* ---- initial weights ---- */

/* Elements [lo, hi) of the tensor's box: their number is that in the logical tensor. */
static void init_normal(const struct train_tensor *t, uint64_t seed, float *to, uint64_t lo,
                        uint64_t hi, struct kern_pool *pool)
{
    uint64_t key = kern_rng_key(seed, t->name_hash);
    uint64_t width = t->hi[1] - t->lo[1];
    if (width == t->shape[1]) { /* whole rows */
        kern_rng_normal(pool, to, key, t->lo[0] * width + lo, hi - lo, t->init_std);
        return;
    }
    while (lo < hi) {
        uint64_t row = lo / width, column = lo % width;
        uint64_t count = width - column < hi - lo ? width - column : hi - lo;
        uint64_t first = (t->lo[0] + row) * t->shape[1] + t->lo[1] + column;
        kern_rng_normal(pool, to, key, first, count, t->init_std);
        to += count;
        lo += count;
    }
}

void train_model_init_params(const struct train_model *model, uint64_t seed, float *dst,
                             uint64_t lo, uint64_t hi, struct kern_pool *pool)
{
    BL_ASSERT(lo <= hi && hi <= model->local_elems);
    memset(dst, 0, (hi - lo) * sizeof *dst);
    for (uint32_t i = 0; i < model->tensor_count; i++) {
        const struct train_tensor *t = &model->tensors[i];
        if (t->local == TRAIN_NOT_HERE) {
            continue;
        }
        uint64_t first = lo > t->local ? lo : t->local;
        uint64_t end = hi < t->local + t->elems ? hi : t->local + t->elems;
        if (first >= end) {
            continue;
        }
        float *to = dst + (first - lo);
        if (t->init_std > 0.0) {
            init_normal(t, seed, to, first - t->local, end - t->local, pool);
        } else {
            for (uint64_t j = 0; j < end - first; j++) {
                to[j] = t->init_fill;
            }
        }
    }
}
