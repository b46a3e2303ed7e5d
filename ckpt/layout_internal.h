/* SPDX-License-Identifier: Apache-2.0 */
/* Inside of layouts: the rules that are built in, and a tensor with its rule applied. */
#ifndef BL_CKPT_LAYOUT_INTERNAL_H
#define BL_CKPT_LAYOUT_INTERNAL_H

#include "ckpt/layout.h"

struct layout_span { /* one sub-parameter along the dimension that is cut */
    uint64_t lo, width, unit;
    bool heads; /* its units are few and named: no rank goes without one */
};

struct layout_tensor {
    struct bl_tensor tensor;
    enum ckpt_layout_cut cut;
    uint32_t dim;
    enum ckpt_stage stage;
    uint32_t layer; /* UINT32_MAX: none in its name */
    uint32_t rule;  /* which one: the order inside of a layer */
    uint32_t span_count;
    struct layout_span spans[CKPT_LAYOUT_PIECES_MAX];
    uint64_t padded; /* vocabulary: rows with the padding */
};

/* The rule for a parameter's name: the caller's first, then the built-in ones; its number in
 * *ret_number grows in the order of the table. NULL: none, replicated. */
const struct ckpt_layout_rule *layout_rule_find(const struct ckpt_layout_model *model,
                                                const char *name, uint32_t *ret_number);

/* The number in "model.layers.17.mlp": the first component that is all digits. UINT32_MAX: none. */
uint32_t layout_layer_of(const char *name);

/* The parameter that a tensor belongs to: its name without ".exp_avg" or ".exp_avg_sq". */
void layout_base_name(char ret[BL_TENSOR_NAME_MAX], const struct bl_tensor *tensor);

/* Fills `ret` from the tensor and its rule. BL_ECONFIG when its shape does not fit. */
BL_MUST_CHECK int layout_tensor_resolve(struct layout_tensor *ret, const struct bl_tensor *tensor,
                                        const struct ckpt_layout *layout,
                                        const struct ckpt_layout_model *model,
                                        struct bl_errmsg *msg);

#endif
