/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside of the model: what the passes and the sampler share.
 */
#ifndef TRAIN_TRAINER_MODEL_INTERNAL_H
#define TRAIN_TRAINER_MODEL_INTERNAL_H

#include "trainer/model.h"

#define MODEL_DIM_MAX    65536U
#define MODEL_LAYERS_MAX 1024U
#define MODEL_VOCAB_MAX  (1U << 20)
#define MODEL_SEQ_MAX    (1U << 18)
#define MODEL_BATCH_MAX  4096U

/* The tensors that a layer may have; which of them, and in which order, is the architecture's. */
enum model_layer_tensor {
    MODEL_NORM1,
    MODEL_NORM1_BIAS,
    MODEL_Q,
    MODEL_K,
    MODEL_V,
    MODEL_Q_BIAS,
    MODEL_K_BIAS,
    MODEL_V_BIAS,
    MODEL_O,
    MODEL_O_BIAS,
    MODEL_NORM2,
    MODEL_NORM2_BIAS,
    MODEL_GATE,
    MODEL_UP,
    MODEL_UP_BIAS,
    MODEL_DOWN,
    MODEL_DOWN_BIAS,
    MODEL_LAYER_TENSORS,
    MODEL_NONE = MODEL_LAYER_TENSORS
};

/* Activations of one layer that backward reads; N = micro_batch * seq_len rows. */
struct model_layer_acts {
    float *x;               /* [N,C] the layer's input on the residual stream */
    float *norm1;           /* [N,C] */
    float *mean1, *rstd1;   /* [N]; GPT-2 has the mean */
    float *q;               /* [N,C] after rotation */
    float *k, *v;           /* [N,KV*D], k after rotation */
    float *att;             /* [N,C] */
    float *stats;           /* [B,H,T,2] */
    float *mid;             /* [N,C] the residual stream between attention and MLP */
    float *norm2;           /* [N,C] */
    float *mean2, *rstd2;   /* [N] */
    float *gate, *up, *act; /* [N,F]; GPT-2 has no gate */
};

struct train_model {
    struct bl_job_model config;
    uint32_t seq_len, micro_batch, threads;
    uint32_t rows;                /* N */
    uint32_t head_dim;            /* D */
    uint32_t kv_dim;              /* KV heads * D */
    struct train_tensor *tensors; /* owned */
    uint32_t tensor_count;
    uint32_t before_layers;            /* tensors before those of layer 0 */
    uint32_t layer_tensors;            /* that a layer has */
    int8_t place[MODEL_LAYER_TENSORS]; /* among a layer's tensors; -1: it has none such */
    uint64_t param_elems, buffer_elems, tied_elems;
    struct kern_attention_shape attention;

    float *arena; /* owned: all that follows */
    uint64_t arena_elems;
    struct model_layer_acts *layers; /* owned array */
    float *rope;                     /* [T, 2, D/2] */
    float *x;                        /* [N,C] the stream after the last layer */
    float *norm, *mean, *rstd;       /* [N,C], [N], [N] final norm */
    float *logits;                   /* [N,V], then their gradient */
    double *losses;                  /* [N] */
    float *scratch;                  /* attention */
    float *dx, *dnorm, *datt;        /* [N,C] */
    float *dq, *dk, *dv;             /* [N,C], [N,KV*D] */
    float *dgate, *dup, *dact;       /* [N,F] */
};

static inline int model_is_gpt2(const struct train_model *model)
{
    return model->config.arch == BL_ARCH_GPT2;
}

/* The rotary table of `positions`, as the config has it. */
void model_rope_table(const struct train_model *model, float *table, uint32_t positions);

/* The layer has such a tensor? */
static inline int model_has(const struct train_model *model, enum model_layer_tensor which)
{
    return which != MODEL_NONE && model->place[which] >= 0;
}

/* Entry of a layer's tensor in the table. */
const struct train_tensor *model_layer_tensor(const struct train_model *model, uint32_t layer,
                                              enum model_layer_tensor which);
/* The bias of a matrix or a norm's weight, MODEL_NONE for the gate. */
enum model_layer_tensor model_bias_of(enum model_layer_tensor which);

/* Offsets in the flat buffer. */
uint64_t model_embed_at(const struct train_model *model);
uint64_t model_layer_at(const struct train_model *model, uint32_t layer,
                        enum model_layer_tensor which);
uint64_t model_positions_at(const struct train_model *model); /* GPT-2 */
uint64_t model_norm_at(const struct train_model *model);
uint64_t model_norm_bias_at(const struct train_model *model); /* GPT-2 with biases */
uint64_t model_head_at(const struct train_model *model);      /* tied: the embedding's */

/* Checks the shape and fills the table, offsets and sums of a zeroed model whose config, seq_len,
 * micro_batch and threads are set. */
BL_MUST_CHECK int model_table_init(struct train_model *model, struct bl_errmsg *msg);

/* BL_ELIMIT unless all tokens are in [0, vocab). `what` names them in the text. */
BL_MUST_CHECK int model_tokens_check(const struct train_model *model, const int32_t *tokens,
                                     uint64_t count, int32_t lowest, const char *what,
                                     struct bl_errmsg *msg);

#endif
