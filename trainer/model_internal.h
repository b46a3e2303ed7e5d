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
#define MODEL_TP_MAX     1024U
#define MODEL_SETS_MAX   4096U /* with these, bytes of activations stay below 2^64 */
#define MODEL_SLICE      16U   /* elements: what ranks sum together is cut on multiples of it */

/* Hands out arrays of one piece of the back end's memory, or only counts while `memory` is NULL. */
struct model_arena {
    const struct kern *kern;
    char *memory;
    uint64_t used; /* bytes */
};

/* Memory that has no type yet. */
void *model_take(struct model_arena *arena, uint64_t bytes);

static inline kern_real *model_take_real(struct model_arena *arena, uint64_t elems)
{
    return (kern_real *)model_take(arena, elems * arena->kern->real_bytes);
}

static inline float *model_take_f32(struct model_arena *arena, uint64_t elems)
{
    return (float *)model_take(arena, elems * sizeof(float));
}

static inline double *model_take_f64(struct model_arena *arena, uint64_t elems)
{
    return (double *)model_take(arena, elems * sizeof(double));
}

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

/* Activations of one layer that backward reads; N = micro_batch * seq_len rows. What recomputation
 * makes again lies in memory that all layers and sets share. */
struct model_layer_acts {
    kern_real *x;               /* [N,C] the layer's input on the residual stream */
    kern_real *norm1;           /* [N,C] */
    float *mean1, *rstd1;       /* [N]; GPT-2 has the mean */
    kern_real *q;               /* [N,H*D] after rotation */
    kern_real *k, *v;           /* [N,KV*D], k after rotation */
    kern_real *att;             /* [N,H*D] */
    float *stats;               /* [B,H,T,2] */
    kern_real *mid;             /* [N,C] the residual stream between attention and MLP */
    kern_real *norm2;           /* [N,C] */
    float *mean2, *rstd2;       /* [N] */
    kern_real *gate, *up, *act; /* [N,F]; GPT-2 has no gate */
};

/* What one forward pass keeps for its backward. */
struct model_set {
    struct model_layer_acts *layers;    /* [model->set_layers], a view */
    struct kern_tokens tokens, targets; /* [N]: first, last virtual stage */
    kern_real *x;       /* last virtual stage: [N,C] the stream after the last layer */
    kern_real *norm;    /* [N,C] the final norm's output */
    float *mean, *rstd; /* [N] of the final norm */
};

/* What tensors are cut by: a dimension of a logical tensor and the part that this tp rank has. */
enum model_span_name {
    MODEL_SPAN_ONE, /* no second dimension */
    MODEL_SPAN_DIM,
    MODEL_SPAN_POSITION,
    MODEL_SPAN_Q,
    MODEL_SPAN_KV,
    MODEL_SPAN_HIDDEN,
    MODEL_SPAN_VOCAB,
    MODEL_SPANS
};
struct model_span {
    uint32_t size, lo, hi;
    uint32_t owner; /* lowest tp rank with the same part */
};

struct train_model {
    struct bl_job_model config;
    struct train_part part;
    struct kern *kern; /* kept; NULL: the table alone */
    uint32_t seq_len, micro_batch;
    uint32_t rows;        /* N */
    uint32_t stream_rows; /* of the residual stream on this tp rank: N, or N / tp with sequence */
    uint32_t head_rows;   /* of a chunk of logits: N, or part.head_chunk */
    uint32_t head_dim;    /* D */
    /* Of this tp rank: */
    struct model_span span[MODEL_SPANS];
    uint32_t heads, kv_heads;     /* H, KV */
    uint32_t kv_sharers;          /* tp ranks that have the same key and value head */
    uint32_t q_dim, kv_dim;       /* H * D, KV * D */
    uint32_t hidden;              /* F */
    uint32_t vocab;               /* V */
    uint32_t vstages;             /* virtual stages of the whole model */
    uint32_t *first_layer;        /* [vstages + 1], owned */
    struct train_unit *units;     /* owned */
    uint32_t unit_count;          /* layers + 2, and a tied head's */
    struct train_tensor *tensors; /* owned */
    uint32_t tensor_count;
    uint32_t before_layers;            /* tensors before those of layer 0 */
    uint32_t layer_tensors;            /* that a layer has */
    int8_t place[MODEL_LAYER_TENSORS]; /* among a layer's tensors; -1: it has none such */
    uint64_t table_end;                /* of the flat order while the table is made */
    uint64_t param_elems, flat_elems, local_elems, tied_elems, copy_elems;
    struct kern_attention_shape attention;

    struct train_memory memory;
    char *arena;            /* owned, of the back end: the arrays of all that follows */
    uint32_t set_layers;    /* of the rank's largest chunk */
    struct model_set *sets; /* [part.sets], owned */
    struct model_layer_acts
        *layers;                   /* [part.sets * set_layers], owned: views of these are in sets */
    float *rope;                   /* [T, 2, D/2] */
    kern_real *logits;             /* [head rows,V], then their gradient */
    uint32_t logits_set;           /* whose gradient that is, of all rows; MODEL_NO_SET */
    double *losses;                /* [N] */
    double *loss;                  /* [1]: of the calls that return it */
    void *scratch;                 /* attention, norms and biases */
    kern_real *dx, *dnorm, *datt;  /* [N,C], [N,C], [N,H*D] */
    kern_real *dq, *dk, *dv;       /* [N,H*D], [N,KV*D] */
    kern_real *dgate, *dup, *dact; /* [N,F] */
    /* With tp > 1 (model_tp.h): */
    kern_real *whole;           /* sequence: [N,C] all rows of a part of the stream */
    float *norm_parts;          /* sequence: [2,C] */
    kern_real *shared;          /* what the sharers of a kv head have of a slice of dk or dv */
    float *tops;                /* [tp,head rows] */
    double *sums;               /* [tp,head rows,2] */
    uint64_t *tp_bounds;        /* [tp + 1], owned, host */
    struct comm_part *tp_parts; /* [2,tp], owned, host */
};
#define MODEL_NO_SET UINT32_MAX

/* One pass through one chunk. */
struct model_pass {
    struct train_model *model;
    const struct train_flow *flow;
    const struct train_hooks *hooks;
    struct kern *kern;
    struct model_set *set;
    uint32_t vstage;
    int add;
    /* Of the unit in work: */
    const kern_real *weights;
    float *grads; /* backward only */
};

static inline int model_is_gpt2(const struct train_model *model)
{
    return model->config.arch == BL_ARCH_GPT2;
}

/* The rotary table of `positions`, as the config has it, to the back end's memory; GPT-2: nothing.
 * -ENOMEM, its errors. */
BL_MUST_CHECK int model_rope_upload(const struct train_model *model, float *table,
                                    uint32_t positions, struct bl_errmsg *msg);

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
uint32_t model_norm_index(const struct train_model *model);   /* in the table */
uint64_t model_norm_at(const struct train_model *model);
uint64_t model_norm_bias_at(const struct train_model *model); /* GPT-2 with biases */
uint64_t model_head_at(const struct train_model *model);      /* tied: the embedding's */

/* Elements of the tensor's box in one dimension. */
static inline uint32_t model_tensor_width(const struct train_tensor *tensor, uint32_t dim)
{
    return (uint32_t)(tensor->hi[dim] - tensor->lo[dim]);
}

/* Of a tensor in its unit. */
uint64_t model_in_unit(const struct train_model *model, const struct train_tensor *tensor);

/* The virtual stage that a chunk of this rank is. */
static inline uint32_t model_vstage(const struct train_model *model, uint32_t chunk)
{
    return chunk * model->part.pp + model->part.stage;
}
/* The units of a virtual stage: [first, end), a tied head's pseudo-unit too. */
uint32_t model_unit_first(const struct train_model *model, uint32_t vstage);
uint32_t model_unit_end(const struct train_model *model, uint32_t vstage);

/* A stream's rows of this rank [stream rows,C], from one array to another. */
void model_stream_copy(const struct train_model *model, kern_real *to, const kern_real *from);

/* Starts a pass. -EINVAL without the group of a tensor parallel model's ranks. */
BL_MUST_CHECK int model_pass_init(struct model_pass *pass, struct train_model *model,
                                  const struct train_flow *flow, const struct train_hooks *hooks,
                                  struct bl_errmsg *msg);

/* Plans the back end's products of `rows` rows for the model's shapes. Its errors. */
BL_MUST_CHECK int model_plan_products(const struct train_model *model, uint32_t rows,
                                      struct bl_errmsg *msg);

/* A layer's matrix product, of all rows: y[N,O] = x[N,I] w^T, with `bias` plus the matrix's, if it
 * has one; and that alone, of the first `rows` of y. */
void model_forward_product(const struct model_pass *p, enum model_layer_tensor which, kern_real *y,
                           const kern_real *x, int bias);
void model_forward_bias(const struct model_pass *p, enum model_layer_tensor which, kern_real *y,
                        uint32_t rows);

/* Either norm over the rows of the stream; bias NULL: none. Backward adds the own rows of
 * model->dnorm, through the norm, to model->dx. */
void model_forward_norm(const struct model_pass *p, kern_real *out, float *mean, float *rstd,
                        const kern_real *x, const kern_real *weight, const kern_real *bias);
BL_MUST_CHECK int model_backward_norm(const struct model_pass *p, float *dweight, float *dbias,
                                      const kern_real *x, const kern_real *weight,
                                      const float *mean, const float *rstd, struct bl_errmsg *msg);

/* One layer, whose unit is in work. Forward writes x_next; backward turns model->dx from the
 * gradient of the layer's output into that of its input. */
BL_MUST_CHECK int model_layer_forward(const struct model_pass *p, const struct model_layer_acts *a,
                                      kern_real *x_next, struct bl_errmsg *msg);
BL_MUST_CHECK int model_layer_backward(const struct model_pass *p, const struct model_layer_acts *a,
                                       struct bl_errmsg *msg);

/* The head's product and the losses of rows [first, first + n), n at most model->head_rows, whose
 * unit is in work: set->norm to model->logits, or to their gradient if `backward`, and to
 * model->losses. */
BL_MUST_CHECK int model_head_forward(const struct model_pass *p, uint32_t first, uint32_t n,
                                     int backward, struct bl_errmsg *msg);
/* Rows of the chunk that begins at `first`. */
uint32_t model_head_chunk(const struct train_model *model, uint32_t first);
/* Where the head's weights are in the unit in work. */
uint64_t model_head_in_unit(const struct train_model *model);

/* Rounded up to a multiple of KERN_BLOCK. */
uint64_t model_block_align(uint64_t elems);

/* Steps of model_table_init: checks shape and part, and what this rank has of each dimension and of
 * the layers; then, with the tensors listed, the units and places in local order. */
BL_MUST_CHECK int model_part_init(struct train_model *model, struct bl_errmsg *msg);
BL_MUST_CHECK int model_units_init(struct train_model *model, struct bl_errmsg *msg);

/* Checks the shape and fills the table, offsets and sums of a zeroed model whose config, part,
 * seq_len and micro_batch are set. */
BL_MUST_CHECK int model_table_init(struct train_model *model, struct bl_errmsg *msg);

/* BL_ELIMIT unless all tokens are in [lowest, vocab). `what` names them in the text. *ret_count:
 * how many are not below 0. */
BL_MUST_CHECK int model_tokens_check(const struct train_model *model, const int32_t *tokens,
                                     uint64_t count, int32_t lowest, const char *what,
                                     uint64_t *ret_count, struct bl_errmsg *msg);

#endif
