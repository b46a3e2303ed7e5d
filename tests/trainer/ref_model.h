/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The forward pass again, in fp64 and as plainly as it can be written: the oracle of the
 * model's loss and, by central differences, of its gradients. Shares nothing with the kernels.
 */
#ifndef TRAIN_TESTS_REF_MODEL_H
#define TRAIN_TESTS_REF_MODEL_H

#include <stdint.h>

#include "trainer/model.h"

/* One wrong operation, by which a test shows that it would see it. */
enum ref_fault {
    REF_RIGHT,
    REF_LAYERS_SWAPPED,
    REF_NO_POSITIONS,    /* Q and K not turned; GPT-2: no position embedding */
    REF_ROPE_PAIRS,      /* neighbours turned against each other instead of halves */
    REF_ROPE_UNSCALED,   /* Llama 3's stretching forgotten */
    REF_KV_INTERLEAVED,  /* head h reads kv head h mod KV */
    REF_ATTENTION_AHEAD, /* a query sees one key too many */
    REF_ATTENTION_SCALE, /* divided by D instead of its root */
    REF_ATTENTION_NO_RESIDUAL,
    REF_MLP_NO_RESIDUAL,
    REF_NORM_KIND,      /* RMSNorm takes the mean away, LayerNorm does not */
    REF_NORM_EXCHANGED, /* the second norm's weights in both places */
    REF_NO_FINAL_NORM,
    REF_GATE_EXCHANGED,  /* silu of up times gate */
    REF_GELU_ERF,        /* the exact GELU instead of the tanh form */
    REF_BIAS_FORGOTTEN,  /* of the last product of a layer */
    REF_TARGETS_SHIFTED, /* each position predicts itself */
    REF_FAULTS
};

struct ref_model {
    enum ref_fault fault;
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
