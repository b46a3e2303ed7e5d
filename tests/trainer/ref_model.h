/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The forward pass again, in fp64 and as plainly as it can be written: the oracle of the
 * model's loss and, by central differences, of its gradients. Shares nothing with the kernels.
 */
#ifndef TRAIN_TESTS_REF_MODEL_H
#define TRAIN_TESTS_REF_MODEL_H

#include <stdint.h>

#include "trainer/model.h"

struct ref_model {
    struct bl_job_model config;
    uint32_t seq_len, batch;
    const struct train_tensor *tensors; /* view: places in params */
    uint32_t tensor_count;
};

/* The sum of the token losses with parameters in the model's flat layout. `head` is where the
 * head's weights lie: its own place, or apart from the embedding to vary a tied head alone. */
double ref_model_loss(const struct ref_model *ref, const double *params, const double *head,
                      const int32_t *tokens, const int32_t *targets);

#endif
