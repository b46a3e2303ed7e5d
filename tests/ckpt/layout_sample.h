/* SPDX-License-Identifier: Apache-2.0 */
/* Models for the tests of layouts: tables of tensors as a trainer would have them. */
#ifndef TESTS_CKPT_LAYOUT_SAMPLE_H
#define TESTS_CKPT_LAYOUT_SAMPLE_H

#include "ckpt/layout.h"

#define TENSORS_MAX 256
#define NO_LAYER    UINT32_MAX

struct model {
    struct bl_tensor tensors[TENSORS_MAX];
    uint32_t count;
    struct ckpt_layout_model about;
};

struct shape {
    uint32_t layers, dim, hidden, heads, kv_heads, vocab;
    bool tied, fused;
};

/* Adds a tensor; one dimension when `columns` is 0. */
void sample_add(struct model *model, enum bl_tensor_kind kind, enum bl_dtype dtype, uint64_t rows,
                uint64_t columns, const char *name);
/* Adds a parameter and its moments; "model.layers.N." stands in front unless it is NO_LAYER. */
void sample_add_param(struct model *model, uint64_t rows, uint64_t columns, const char *name,
                      uint32_t layer);
/* A Llama of that shape, and two tensors besides that no rule knows. */
void sample_llama(struct model *model, const struct shape *shape);

struct ckpt_layout sample_layout(uint32_t dp, uint32_t tp, uint32_t pp, uint32_t zero);
/* Ends the test with the reason when it is refused. */
struct ckpt_layout_cutter *sample_cutter(const struct model *model, struct ckpt_layout layout);

uint64_t sample_bytes(const struct bl_extent_list *list);

#endif
