/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/model_internal.h"

int train_model_probe(const struct train_model *model, struct kern_pool *pool, uint64_t *ret_digest,
                      struct bl_errmsg *msg)
{
    struct kern_matmul_shape shapes[MODEL_LAYER_TENSORS + 1];
    uint32_t count = 0;
    for (uint32_t i = 0; i < model->layer_tensors; i++) {
        const struct train_tensor *t = &model->tensors[model->before_layers + i];
        if (t->dims == 2) {
            shapes[count++] = (struct kern_matmul_shape){model->rows, (uint32_t)t->shape[1],
                                                         (uint32_t)t->shape[0]};
        }
    }
    shapes[count++] =
        (struct kern_matmul_shape){model->rows, model->config.dim, model->config.vocab};
    return kern_probe(pool, shapes, count, ret_digest, msg);
}
