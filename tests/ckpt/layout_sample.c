/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/ckpt/layout_sample.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

void sample_add(struct model *model, enum bl_tensor_kind kind, enum bl_dtype dtype, uint64_t rows,
                uint64_t columns, const char *name)
{
    struct bl_tensor *tensor = &model->tensors[model->count++];

    assert_true(model->count <= TENSORS_MAX);
    memset(tensor, 0, sizeof(*tensor));
    snprintf(tensor->name, sizeof(tensor->name), "%s", name);
    tensor->kind = kind;
    tensor->dtype = dtype;
    tensor->dims = columns == 0 ? 1 : 2;
    tensor->shape[0] = rows;
    tensor->shape[1] = columns;
}

/* A parameter and its moments. */
void sample_add_param(struct model *model, uint64_t rows, uint64_t columns, const char *fmt,
                      uint32_t layer)
{
    static const char *const suffixes[] = {"", ".exp_avg", ".exp_avg_sq"};

    for (uint32_t i = 0; i < 3; i++) {
        char name[BL_TENSOR_NAME_MAX];
        int n = snprintf(name, sizeof(name), "model.layers.%u.", layer);

        snprintf(name + (layer == UINT32_MAX ? 0 : n),
                 sizeof(name) - (size_t)(layer == UINT32_MAX ? 0 : n), "%s%s", fmt, suffixes[i]);
        sample_add(model, (enum bl_tensor_kind)(BL_KIND_PARAM + i), BL_F32, rows, columns, name);
    }
}

void sample_llama(struct model *model, const struct shape *s)
{
    uint32_t head = s->dim / s->heads, kv = s->kv_heads * head;

    memset(model, 0, sizeof(*model));
    model->about.heads = s->heads;
    model->about.kv_heads = s->kv_heads;
    model->about.tied = s->tied;
    sample_add_param(model, s->vocab, s->dim, "model.embed_tokens.weight", NO_LAYER);
    for (uint32_t l = 0; l < s->layers; l++) {
        sample_add_param(model, s->dim, 0, "input_layernorm.weight", l);
        if (s->fused) {
            sample_add_param(model, s->dim + 2 * kv, s->dim, "self_attn.qkv_proj.weight", l);
            sample_add_param(model, 2 * s->hidden, s->dim, "mlp.gate_up_proj.weight", l);
        } else {
            sample_add_param(model, s->dim, s->dim, "self_attn.q_proj.weight", l);
            sample_add_param(model, kv, s->dim, "self_attn.k_proj.weight", l);
            sample_add_param(model, kv, s->dim, "self_attn.v_proj.weight", l);
            sample_add_param(model, kv, 0, "self_attn.v_proj.bias", l);
            sample_add_param(model, s->hidden, s->dim, "mlp.gate_proj.weight", l);
            sample_add_param(model, s->hidden, s->dim, "mlp.up_proj.weight", l);
        }
        sample_add_param(model, s->dim, s->dim, "self_attn.o_proj.weight", l);
        sample_add_param(model, s->dim, s->hidden, "mlp.down_proj.weight", l);
    }
    sample_add_param(model, s->dim, 0, "model.norm.weight", NO_LAYER);
    if (!s->tied) {
        sample_add_param(model, s->vocab, s->dim, "lm_head.weight", NO_LAYER);
    }
    sample_add(model, BL_KIND_OTHER, BL_I64, 3, 0, "random.counter");
    sample_add(model, BL_KIND_PARAM, BL_BF16, 7, 0,
               "adapter.scale"); /* of a name that no rule knows */
}

struct ckpt_layout sample_layout(uint32_t dp, uint32_t tp, uint32_t pp, uint32_t zero)
{
    return (struct ckpt_layout){.world = dp * tp * pp, .dp = dp, .tp = tp, .pp = pp, .zero = zero};
}

struct ckpt_layout_cutter *sample_cutter(const struct model *model, struct ckpt_layout layout)
{
    struct ckpt_layout_cutter *cutter = NULL;
    struct bl_errmsg why = {0};
    int rc = ckpt_layout_new(&cutter, &layout, &model->about, model->tensors, model->count, &why);

    if (rc < 0) {
        fail_msg("%s", why.text);
    }
    return cutter;
}

uint64_t sample_bytes(const struct bl_extent_list *list)
{
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < list->extent_count; i++) {
        bytes += bl_extent_elems(&list->extents[i]) *
                 bl_dtype_bytes(list->tensors[list->extents[i].tensor].dtype);
    }
    return bytes;
}
