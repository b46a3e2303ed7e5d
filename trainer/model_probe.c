/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which products a model does, for the back end to plan, and which a node must compute like the
 * others: those of all tensor parallel ranks, for a node does not know which of them it will be.
 */
#include <string.h>

#include "trainer/model_internal.h"

/* A dimension is cut into slices of two sizes at most, so two shapes for each matrix of a layer,
 * and of the head's chunks of rows, of which the last may be shorter. */
#define PROBE_SHAPES_MAX (2 * (MODEL_LAYER_TENSORS + 2))

struct probe_shapes {
    struct kern_matmul_shape at[PROBE_SHAPES_MAX];
    uint32_t count;
};

static void add_shape(struct probe_shapes *shapes, struct kern_matmul_shape shape)
{
    for (uint32_t i = 0; i < shapes->count; i++) {
        if (memcmp(&shapes->at[i], &shape, sizeof shape) == 0) {
            return;
        }
    }
    BL_ASSERT(shapes->count < PROBE_SHAPES_MAX);
    shapes->at[shapes->count++] = shape;
}

static void add_shapes(struct probe_shapes *shapes, const struct train_model *model, uint32_t rows)
{
    for (uint32_t i = 0; i < model->layer_tensors; i++) {
        const struct train_tensor *t = &model->tensors[model->before_layers + i];
        if (t->dims == 2) {
            add_shape(shapes, (struct kern_matmul_shape){rows, model_tensor_width(t, 1),
                                                         model_tensor_width(t, 0)});
        }
    }
    uint32_t chunk = rows < model->head_rows ? rows : model->head_rows;
    add_shape(shapes, (struct kern_matmul_shape){chunk, model->config.dim, model->vocab});
    if (rows % chunk != 0) {
        add_shape(shapes,
                  (struct kern_matmul_shape){rows % chunk, model->config.dim, model->vocab});
    }
}

int model_plan_products(const struct train_model *model, uint32_t rows, struct bl_errmsg *msg)
{
    struct probe_shapes shapes = {.count = 0};
    add_shapes(&shapes, model, rows);
    return model->kern->ops->matmul_plan(model->kern, shapes.at, shapes.count, msg);
}

int train_model_probe(struct kern *kern, const struct bl_job_model *config, uint32_t tp,
                      uint32_t seq_len, uint32_t micro_batch, uint32_t head_chunk,
                      uint64_t *ret_digest, struct bl_errmsg *msg)
{
    struct probe_shapes shapes = {.count = 0};
    struct train_part part = TRAIN_PART_WHOLE;
    struct bl_job_model one_layer = *config;
    int rc = 0;
    one_layer.layers = 1; /* they are alike */
    part.tp = tp;
    part.head_chunk = head_chunk;
    for (part.tp_rank = 0; rc == 0 && (part.tp_rank == 0 || part.tp_rank < tp); part.tp_rank++) {
        struct train_model *model = NULL;
        rc = train_model_new_table(&model, &one_layer, &part, seq_len, micro_batch, msg);
        if (rc == 0) {
            add_shapes(&shapes, model, model->rows);
        }
        train_model_free(model);
    }
    return rc < 0 ? rc : kern->ops->probe(kern, shapes.at, shapes.count, ret_digest, msg);
}
