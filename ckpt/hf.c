/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tables of names. Sources of the facts: the modules of transformers (modeling_llama,
 * modeling_gpt2), whose attribute paths are the names in the files, and llama2.c's export.py.
 */
#include "ckpt/hf.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *ckpt_arch_name(enum ckpt_arch arch)
{
    return arch == CKPT_ARCH_LLAMA ? "llama" : arch == CKPT_ARCH_GPT2 ? "gpt2" : "?";
}

static int check_heads(const struct ckpt_model *m, struct bl_errmsg *msg)
{
    if (m->heads == 0 || m->dim % m->heads != 0) {
        return bl_err(msg, BL_EFORMAT, "width %u is no multiple of %u heads", m->dim, m->heads);
    }
    if (m->kv_heads == 0 || m->heads % m->kv_heads != 0) {
        return bl_err(msg, BL_EFORMAT, "%u heads are no multiple of %u key-value heads", m->heads,
                      m->kv_heads);
    }
    if (m->arch == CKPT_ARCH_LLAMA && m->dim / m->heads % 2 != 0) {
        return bl_err(msg, BL_EFORMAT, "heads of %u rows: rotary positions need an even number",
                      m->dim / m->heads);
    }
    if (m->arch == CKPT_ARCH_GPT2 && m->kv_heads != m->heads) {
        return bl_err(msg, BL_EFORMAT, "GPT-2 with %u heads and %u key-value heads", m->heads,
                      m->kv_heads);
    }
    return 0;
}

int ckpt_model_check(const struct ckpt_model *m, struct bl_errmsg *msg)
{
    const struct {
        const char *name;
        uint32_t value, min, max;
    } sizes[] = {
        {"layers", m->layers, 1, CKPT_MODEL_LAYERS_MAX},
        {"width", m->dim, 1, CKPT_MODEL_WIDTH_MAX},
        {"feed-forward width", m->hidden, 1, CKPT_MODEL_WIDTH_MAX},
        {"vocabulary", m->vocab, 1, CKPT_MODEL_VOCAB_MAX},
        {"context", m->context, m->arch == CKPT_ARCH_GPT2, CKPT_MODEL_VOCAB_MAX},
    };

    if (m->arch != CKPT_ARCH_LLAMA && m->arch != CKPT_ARCH_GPT2) {
        return bl_err(msg, BL_EFORMAT, "architecture %d is not known", (int)m->arch);
    }
    for (uint32_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        if (sizes[i].value < sizes[i].min || sizes[i].value > sizes[i].max) {
            return bl_err(msg, BL_EFORMAT, "%s of %u: %u to %u are possible", sizes[i].name,
                          sizes[i].value, sizes[i].min, sizes[i].max);
        }
    }
    if (m->vocab_padded != 0 &&
        (m->vocab_padded < m->vocab || m->vocab_padded > CKPT_MODEL_VOCAB_MAX)) {
        return bl_err(msg, BL_EFORMAT, "vocabulary of %u in %u rows: at least as many, at most %u",
                      m->vocab, m->vocab_padded, CKPT_MODEL_VOCAB_MAX);
    }
    if (!(m->norm_eps >= 0 && m->norm_eps < 1)) {
        return bl_err(msg, BL_EFORMAT, "norm epsilon of %g: at least 0, below 1", m->norm_eps);
    }
    if (m->arch == CKPT_ARCH_LLAMA && !(m->rope_theta > 0 && m->rope_theta < 1e12)) {
        return bl_err(msg, BL_EFORMAT, "rope theta of %g: above 0, below 1e12", m->rope_theta);
    }
    return check_heads(m, msg);
}

bool ckpt_model_equal(const struct ckpt_model *a, const struct ckpt_model *b)
{
    const struct ckpt_rope_scaling *s = &a->rope_scaling, *t = &b->rope_scaling;

    return a->arch == b->arch && a->layers == b->layers && a->dim == b->dim &&
           a->hidden == b->hidden && a->heads == b->heads && a->kv_heads == b->kv_heads &&
           a->vocab == b->vocab && a->context == b->context && a->tied == b->tied &&
           a->no_bias == b->no_bias && a->rope_theta == b->rope_theta &&
           a->norm_eps == b->norm_eps && s->factor == t->factor && s->low == t->low &&
           s->high == t->high && s->context == t->context;
}

uint64_t ckpt_rotary_to_pairs(uint64_t row, uint32_t dim)
{
    uint64_t in = row % dim, half = dim / 2;

    return row - in + (in < half ? 2 * in : 2 * (in - half) + 1);
}

uint64_t ckpt_rotary_to_halves(uint64_t row, uint32_t dim)
{
    uint64_t in = row % dim, half = dim / 2;

    return row - in + (in % 2) * half + in / 2;
}

bool ckpt_hf_is_buffer(const char *name)
{
    static const char *const ends[] = {".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"};
    size_t bytes = strlen(name);

    for (uint32_t i = 0; i < sizeof(ends) / sizeof(ends[0]); i++) {
        size_t end = strlen(ends[i]);

        if (bytes > end && strcmp(name + bytes - end, ends[i]) == 0) {
            return true;
        }
    }
    return false;
}

/* ---- Tables ---- */

enum size { NONE, C, KV, F, V, T, C3 }; /* C3: three times C, q, k and v in one */

/* A row of a table; %u in a name is the layer. */
struct row {
    const char *ours, *theirs;
    enum size rows, columns; /* of ours */
    enum size fused;         /* NONE, or rows of theirs */
    uint8_t shift;           /* rows of ours that stand in front of it there */
    bool transposed, rotary;
};

#define PLAIN(name, rows, columns)                                                                 \
    {                                                                                              \
        name, name, rows, columns, NONE, 0, false, false                                           \
    }
#define ROTARY(name, rows)                                                                         \
    {                                                                                              \
        name, name, rows, C, NONE, 0, false, true                                                  \
    }

#define LLAMA "model.layers.%u."
static const struct row llama_first[] = {PLAIN("model.embed_tokens.weight", V, C)};
static const struct row llama_layer[] = {
    PLAIN(LLAMA "input_layernorm.weight", C, NONE),
    ROTARY(LLAMA "self_attn.q_proj.weight", C),
    ROTARY(LLAMA "self_attn.k_proj.weight", KV),
    PLAIN(LLAMA "self_attn.v_proj.weight", KV, C),
    PLAIN(LLAMA "self_attn.o_proj.weight", C, C),
    PLAIN(LLAMA "post_attention_layernorm.weight", C, NONE),
    PLAIN(LLAMA "mlp.gate_proj.weight", F, C),
    PLAIN(LLAMA "mlp.up_proj.weight", F, C),
    PLAIN(LLAMA "mlp.down_proj.weight", C, F),
};
static const struct row llama_last[] = {PLAIN("model.norm.weight", C, NONE)};

#define GPT2 "transformer.h.%u."
static const struct row gpt2_first[] = {
    PLAIN("transformer.wte.weight", V, C),
    PLAIN("transformer.wpe.weight", T, C),
};
static const struct row gpt2_layer[] = {
    PLAIN(GPT2 "ln_1.weight", C, NONE),
    PLAIN(GPT2 "ln_1.bias", C, NONE),
    {GPT2 "attn.q_proj.weight", GPT2 "attn.c_attn.weight", C, C, C3, 0, true, false},
    {GPT2 "attn.k_proj.weight", GPT2 "attn.c_attn.weight", C, C, C3, 1, true, false},
    {GPT2 "attn.v_proj.weight", GPT2 "attn.c_attn.weight", C, C, C3, 2, true, false},
    {GPT2 "attn.q_proj.bias", GPT2 "attn.c_attn.bias", C, NONE, C3, 0, false, false},
    {GPT2 "attn.k_proj.bias", GPT2 "attn.c_attn.bias", C, NONE, C3, 1, false, false},
    {GPT2 "attn.v_proj.bias", GPT2 "attn.c_attn.bias", C, NONE, C3, 2, false, false},
    {GPT2 "attn.o_proj.weight", GPT2 "attn.c_proj.weight", C, C, NONE, 0, true, false},
    {GPT2 "attn.o_proj.bias", GPT2 "attn.c_proj.bias", C, NONE, NONE, 0, false, false},
    PLAIN(GPT2 "ln_2.weight", C, NONE),
    PLAIN(GPT2 "ln_2.bias", C, NONE),
    {GPT2 "mlp.up_proj.weight", GPT2 "mlp.c_fc.weight", F, C, NONE, 0, true, false},
    {GPT2 "mlp.up_proj.bias", GPT2 "mlp.c_fc.bias", F, NONE, NONE, 0, false, false},
    {GPT2 "mlp.down_proj.weight", GPT2 "mlp.c_proj.weight", C, F, NONE, 0, true, false},
    {GPT2 "mlp.down_proj.bias", GPT2 "mlp.c_proj.bias", C, NONE, NONE, 0, false, false},
};
static const struct row gpt2_last[] = {
    PLAIN("transformer.ln_f.weight", C, NONE),
    PLAIN("transformer.ln_f.bias", C, NONE),
};

static const struct row head[] = {PLAIN("lm_head.weight", V, C)};

struct table {
    const struct row *rows;
    uint32_t count;
};
#define TABLE(rows)                                                                                \
    {                                                                                              \
        rows, sizeof(rows) / sizeof((rows)[0])                                                     \
    }
static const struct table tables[][3] = {
    [CKPT_ARCH_LLAMA] = {TABLE(llama_first), TABLE(llama_layer), TABLE(llama_last)},
    [CKPT_ARCH_GPT2] = {TABLE(gpt2_first), TABLE(gpt2_layer), TABLE(gpt2_last)},
};

static uint64_t size_of(enum size size, const struct ckpt_model *m)
{
    switch (size) {
    case NONE:
        return 1;
    case C:
        return m->dim;
    case KV:
        return (uint64_t)m->kv_heads * (m->dim / m->heads);
    case F:
        return m->hidden;
    case V:
        return m->vocab;
    case T:
        return m->context;
    case C3:
        return 3ull * m->dim;
    }
    return 1;
}

/* Copies a name, the first %u of it replaced by the layer. */
static void name_put(char ret[BL_TENSOR_NAME_MAX], const char *name, uint32_t layer)
{
    const char *mark = strstr(name, "%u");

    if (mark == NULL) {
        snprintf(ret, BL_TENSOR_NAME_MAX, "%s", name);
    } else {
        snprintf(ret, BL_TENSOR_NAME_MAX, "%.*s%u%s", (int)(mark - name), name, layer, mark + 2);
    }
}

static bool is_bias(const char *name)
{
    size_t bytes = strlen(name);

    return bytes > 5 && strcmp(name + bytes - 5, ".bias") == 0;
}

static void map_put(struct ckpt_map *map, const struct row *row, const struct ckpt_model *model,
                    enum ckpt_naming naming, uint32_t layer)
{
    static const char front[] = "transformer.";
    const char *theirs = row->theirs;
    uint64_t rows = size_of(row->rows, model), columns = size_of(row->columns, model);
    uint64_t fused = row->fused != NONE                           ? size_of(row->fused, model)
                     : row->rows == V && model->vocab_padded != 0 ? model->vocab_padded
                                                                  : rows;

    memset(map, 0, sizeof(*map));
    map->tensor.kind = BL_KIND_PARAM;
    map->tensor.dtype = BL_F32;
    map->tensor.dims = map->theirs_dims = row->columns == NONE ? 1 : 2;
    map->tensor.shape[0] = rows;
    map->tensor.shape[1] = row->columns == NONE ? 0 : columns;
    map->theirs_shape[0] = row->transposed ? columns : fused;
    map->theirs_shape[1] = row->columns == NONE ? 0 : row->transposed ? fused : columns;
    map->shift = row->shift * rows;
    map->transposed = row->transposed;
    if (row->rotary && naming == CKPT_NAMES_LLAMA2C) {
        map->rotary_dim = model->dim / model->heads;
    }
    map->zeros = model->no_bias && is_bias(row->ours);
    if (naming == CKPT_NAMES_HF_BARE && strncmp(theirs, front, sizeof(front) - 1) == 0) {
        theirs += sizeof(front) - 1;
    }
    name_put(map->tensor.name, row->ours, layer);
    name_put(map->theirs, theirs, layer);
}

static void table_put(struct ckpt_map_list *list, const struct table *table,
                      const struct ckpt_model *model, enum ckpt_naming naming, uint32_t layer)
{
    for (uint32_t i = 0; i < table->count; i++) {
        map_put(&list->maps[list->count++], &table->rows[i], model, naming, layer);
    }
}

static int order_by_name(const void *a_, const void *b_)
{
    const struct ckpt_map *const *a = a_, *const *b = b_;

    return strcmp((*a)->tensor.name, (*b)->tensor.name);
}

int ckpt_map_make(struct ckpt_map_list *ret, const struct ckpt_model *model,
                  enum ckpt_naming naming, struct bl_errmsg *msg)
{
    static const struct table head_table = TABLE(head);
    struct ckpt_map_list list = {0};
    int rc = ckpt_model_check(model, msg);

    if (rc < 0) {
        return rc;
    }
    list.maps = calloc((size_t)(model->layers + 1) * CKPT_MAP_TENSORS_LAYER, sizeof(*list.maps));
    if (list.maps == NULL) {
        return bl_err_code(msg, -ENOMEM, "table of tensors");
    }
    table_put(&list, &tables[model->arch][0], model, naming, 0);
    for (uint32_t layer = 0; layer < model->layers; layer++) {
        table_put(&list, &tables[model->arch][1], model, naming, layer);
    }
    table_put(&list, &tables[model->arch][2], model, naming, 0);
    if (!model->tied) {
        table_put(&list, &head_table, model, naming, 0);
    }
    list.by_name = calloc(list.count, sizeof(*list.by_name));
    if (list.by_name == NULL) {
        ckpt_map_close(&list);
        return bl_err_code(msg, -ENOMEM, "table of tensors");
    }
    for (uint32_t i = 0; i < list.count; i++) {
        list.by_name[i] = &list.maps[i];
    }
    qsort(list.by_name, list.count, sizeof(*list.by_name), order_by_name);
    *ret = list;
    return 0;
}

void ckpt_map_close(struct ckpt_map_list *list)
{
    if (list != NULL) {
        free(list->maps);
        free(list->by_name);
        memset(list, 0, sizeof(*list));
    }
}

static int order_of_name(const void *name, const void *map_)
{
    const struct ckpt_map *const *map = map_;

    return strcmp(name, (*map)->tensor.name);
}

const struct ckpt_map *ckpt_map_find(const struct ckpt_map_list *list, const char *name)
{
    struct ckpt_map *const *found =
        bsearch(name, list->by_name, list->count, sizeof(*list->by_name), order_of_name);

    return found == NULL ? NULL : *found;
}
