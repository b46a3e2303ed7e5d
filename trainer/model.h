/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The model on one rank, Llama or GPT-2: its logical tensors, its step of arithmetic, sampling.
 *
 * A rank has all of a model or a part of it (struct train_part): a slice of every layer (tensor
 * parallel), some of the layers (pipeline). What is where:
 *
 *     flat order    the whole model as this tp rank has it, on borders of KERN_BLOCK (4,096)
 *                   | unit 0 embed | unit 1 layer 0 | unit 2 layer 1 | ... | unit L+1 norm, head |
 *
 *     local order   the units that this rank has, packed
 *                   | unit 1 layer 0 | unit 2 layer 1 |
 *
 *     params        local order, then a copy of the embedding when the head is tied to one
 *                   that lies on another stage
 *
 *     grads         local order, fp32, then on the rank that has a tied head the head's own region:
 *                   head and embedding keep separate accumulators through the lane tree and are
 *                   added once after it (train_model_tied_finish)
 *
 * Tensors start on blocks so that ZeRO borders cut at blocks never split one; the gaps hold zeros
 * (gradients: zeros; AdamW keeps them zero). Buffers are the caller's.
 *
 * Order of tensors, by the names that Hugging Face users know, each with its shape (rows are
 * outputs; the linear layers compute x w^T):
 *
 *     model.embed_tokens.weight                        [V, C]
 *     model.layers.L.input_layernorm.weight            [C]
 *     model.layers.L.self_attn.q_proj.weight           [C, C]
 *     model.layers.L.self_attn.k_proj.weight           [KV D, C]
 *     model.layers.L.self_attn.v_proj.weight           [KV D, C]
 *     model.layers.L.self_attn.o_proj.weight           [C, C]
 *     model.layers.L.post_attention_layernorm.weight   [C]
 *     model.layers.L.mlp.gate_proj.weight              [F, C]
 *     model.layers.L.mlp.up_proj.weight                [F, C]
 *     model.layers.L.mlp.down_proj.weight              [C, F]
 *     model.norm.weight                                [C]
 *     lm_head.weight                                   [V, C]   (not with a tied head)
 *
 * and of GPT-2 (the biases only with model.bias; P positions, model.context):
 *
 *     transformer.wte.weight                           [V, C]
 *     transformer.wpe.weight                           [P, C]
 *     transformer.h.L.ln_1.weight .bias                [C]
 *     transformer.h.L.attn.{q,k,v}_proj.weight         [C, C]
 *     transformer.h.L.attn.{q,k,v}_proj.bias           [C]
 *     transformer.h.L.attn.o_proj.weight .bias         [C, C] [C]
 *     transformer.h.L.ln_2.weight .bias                [C]
 *     transformer.h.L.mlp.up_proj.weight .bias         [F, C] [F]
 *     transformer.h.L.mlp.down_proj.weight .bias       [C, F] [C]
 *     transformer.ln_f.weight .bias                    [C]
 *     lm_head.weight                                   [V, C]   (not with a tied head)
 *
 * C dim, F hidden, V vocab, D = C / heads. Passes compute on a back end (kernels/backend.h), whose
 * storage type params, streams and activations have. The bits of a result depend on params, tokens,
 * shape and the back end's arithmetic only, on the CPU never on the pool.
 */
#ifndef TRAIN_TRAINER_MODEL_H
#define TRAIN_TRAINER_MODEL_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/extent.h"
#include "base/job.h"
#include "kernels/backend.h"
#include "kernels/kern.h"

/* Which part of the model a rank has. Zeroed but for tp, pp, chunks and sets of 1: all of it. */
struct train_part {
    uint32_t tp, tp_rank; /* slices of each layer, and which one */
    uint32_t pp, stage;   /* stages, and which one */
    uint32_t chunks;      /* of layers on each stage: chunk c is virtual stage c * pp + stage */
    uint32_t sets;        /* forward passes that may wait for their backward */
    uint32_t recompute;   /* enum bl_recompute: what backward makes again instead of keeping */
    uint32_t sequence;    /* tp > 1: between the products the stream is cut by rows */
    uint32_t head_chunk;  /* rows of logits at a time; 0, or more than there are: all. With several
                             chunks backward makes them again, and the head's gradient adds over
                             them in order: part of the function */
};
#define TRAIN_PART_WHOLE ((struct train_part){.tp = 1, .pp = 1, .chunks = 1, .sets = 1})

#define TRAIN_NOT_HERE UINT64_MAX

struct train_tensor {
    char name[BL_TENSOR_NAME_MAX];
    uint64_t name_hash; /* bl_xxh3 of the name */
    uint32_t dims;      /* 1 or 2 */
    uint64_t shape[2];  /* of the logical tensor; the second is 1 with one dimension */
    uint64_t lo[2];     /* box of it that this tp rank has: [lo, hi) of each dimension */
    uint64_t hi[2];
    uint64_t elems;  /* in the box; row-major in the buffers */
    uint64_t offset; /* of the box, elements in flat order; a multiple of KERN_BLOCK */
    uint64_t local;  /* in local order, or TRAIN_NOT_HERE */
    uint32_t unit;   /* that it lies in */
    uint32_t owner;  /* lowest tp rank with the same box: it alone owns the state */
    uint32_t decay;  /* 1: weight decay applies (matrices), 0: it does not (norms, biases) */
    double init_std; /* normal(0, init_std) at the start; 0: all are init_fill */
    float init_fill;
};

/* Tensors that come and go together: 0 the embedding (and positions), 1 + L layer L, layers + 1 the
 * final norm (and an untied head). With a tied head layers + 2 is a unit without state: its weights
 * are the embedding's [V, C], its gradient the head's own region. */
struct train_unit {
    uint64_t offset; /* in flat order; layers + 2: the end of it */
    uint64_t elems;  /* a multiple of KERN_BLOCK */
    uint64_t local;  /* in local order, and in grads; or TRAIN_NOT_HERE */
    uint32_t vstage; /* virtual stage that has it */
};

struct train_model; /* configuration, tensor table and activations; trainer/model_internal.h */

/* Bytes that a model takes: of the back end's memory, but for `host`. */
struct train_memory {
    uint64_t set;     /* activations of one set */
    uint64_t sets;    /* all of them */
    uint64_t logits;  /* of a chunk, with their gradient; on the last stage */
    uint64_t scratch; /* of a pass, shared by all sets */
    uint64_t total;   /* sets, logits, scratch */
    uint64_t host;    /* lists of what tensor parallel ranks exchange */
};

/* Makes a part of the model for sequences of seq_len tokens, micro_batch of them a pass, on a back
 * end, which is kept and outlives it, and takes all memory that passes will ever need. *ret is
 * owned; train_model_free. BL_ECONFIG with text for a shape or part that cannot be (dim not a
 * multiple of heads, odd head size, heads not a multiple of kv_heads, more stages than layers, more
 * slices than heads, zeros, over limits), -ENOMEM with the bytes wanted, BL_ENOTBUILT, errors of
 * the back end. */
BL_MUST_CHECK int train_model_new_part(struct train_model **ret, struct kern *kern,
                                       const struct bl_job_model *config,
                                       const struct train_part *part, uint32_t seq_len,
                                       uint32_t micro_batch, struct bl_errmsg *msg);
/* The whole model with one set. */
BL_MUST_CHECK int train_model_new(struct train_model **ret, struct kern *kern,
                                  const struct bl_job_model *config, uint32_t seq_len,
                                  uint32_t micro_batch, struct bl_errmsg *msg);
/* The table alone: tensors, units and sizes; passes need train_model_new_part. BL_ECONFIG as there,
 * -ENOMEM. */
BL_MUST_CHECK int train_model_new_table(struct train_model **ret, const struct bl_job_model *config,
                                        const struct train_part *part, uint32_t seq_len,
                                        uint32_t micro_batch, struct bl_errmsg *msg);
void train_model_free(struct train_model *model); /* NULL is fine */

/* What train_model_new_part would take, to the byte, and its errors but the back end's; takes
 * nothing. Of `kern` only sizes are asked. */
BL_MUST_CHECK int train_model_memory(struct train_memory *ret, struct kern *kern,
                                     const struct bl_job_model *config,
                                     const struct train_part *part, uint32_t seq_len,
                                     uint32_t micro_batch, struct bl_errmsg *msg);

/* Cuts the layers over `vstages` virtual stages: stage s has layers [ret[s], ret[s + 1]). The cost
 * of the most expensive stage is the least that can be, in multiply-adds of a token: of a layer
 * dim (2 dim + 2 kv_heads D) + (2 or 3) dim hidden + dim seq_len (causal attention), on the last
 * stage dim vocab for the head too. Pure. ret[vstages + 1]. BL_ECONFIG unless 1 <= vstages <=
 * layers. */
BL_MUST_CHECK int train_cut(const struct bl_job_model *config, uint32_t seq_len, uint32_t vstages,
                            uint32_t *ret_first_layer, struct bl_errmsg *msg);

/* The tensor table: *ret_count entries, in the order of their offsets. A view, lives as long as the
 * model. */
const struct train_tensor *train_model_tensors(const struct train_model *model,
                                               uint32_t *ret_count);
/* The units, in flat order; *ret_count: layers + 2, one more with a tied head. A view as above. */
const struct train_unit *train_model_units(const struct train_model *model, uint32_t *ret_count);

uint64_t train_model_param_elems(const struct train_model *model); /* logical, of the whole model */
uint64_t train_model_flat_elems(const struct train_model *model); /* of the whole model, gaps too */
uint64_t train_model_local_elems(const struct train_model *model); /* of this rank's units */
/* Elements (a multiple of KERN_BLOCK) of the tied head's region in grads, behind the local order;
 * 0 without. Its element i belongs to element i of the embedding. */
uint64_t train_model_tied_elems(const struct train_model *model);
/* Elements of the embedding's copy in params, behind the local order: the head's weights where the
 * head is tied to an embedding on another stage; else 0. */
uint64_t train_model_copy_elems(const struct train_model *model);
uint64_t train_model_buffer_elems(const struct train_model *model); /* params: local + copy */
uint64_t train_model_grad_elems(const struct train_model *model);   /* grads: local + tied */

/* Writes elements [lo, hi) of the local order's initial weights to dst[0 .. hi - lo): normal(0,
 * 0.02), o_proj and down_proj divided by sqrt(2 layers), norms one, biases and gaps zero; a pure
 * function of (seed, tensor name, element of the logical tensor), so every rank makes just what it
 * owns. */
void train_model_init_params(const struct train_model *model, uint64_t seed, float *dst,
                             uint64_t lo, uint64_t hi, struct kern_pool *pool);

/* ---- passes ---- */

struct comm_group;

/* Where a pass finds weights and leaves gradients, unit by unit. A pass calls, in this order,
 *
 *     forward    for each unit of the chunk, ascending (a tied head's last):
 *                    weights(unit, 0), work, poke
 *     backward   for each unit of the chunk, descending (a tied head's first):
 *                    weights(unit, 1), grads(unit), work, grads_done(unit), poke
 *
 * and touches a unit's weights from weights() until the next call of any hook but grads, its
 * gradient between grads() and grads_done() only. The calls are a function of chunk and part alone
 * (never of data), so train_model_idle can make them on a rank that has nothing to compute. An
 * error ends the pass with it. Memory is the back end's: weights of its storage type, gradients
 * fp32. What a call of a pass has done is in the back end's queue when the next hook is called. */
struct train_hooks {
    void *ctx;
    /* *ret: the unit's first element, elems of them. */
    int (*weights)(void *ctx, uint32_t unit, int backward, const kern_real **ret,
                   struct bl_errmsg *msg);
    /* *ret: where the unit's gradient goes. With flow.add 0 all elements are overwritten (gaps with
     * zeros), with 1 added to. NULL where only forward passes are made. */
    int (*grads)(void *ctx, uint32_t unit, float **ret, struct bl_errmsg *msg);
    int (*grads_done)(void *ctx, uint32_t unit, struct bl_errmsg *msg);
    int (*poke)(void *ctx, struct bl_errmsg *msg); /* between units; may be NULL */
    struct comm_group *tp;                         /* with part.tp > 1; else NULL */
};

/* Hooks over whole buffers: params[buffer_elems], grads[grad_elems] (NULL: forward only). `plain`
 * is kept by the hooks. */
struct train_plain {
    const struct train_model *model;
    const kern_real *params;
    float *grads;
};
struct train_hooks train_hooks_plain(struct train_plain *plain);

/* One micro-batch through one chunk. rows: micro_batch * seq_len. All borrowed for the call; what
 * is the back end's is used in its queue. */
struct train_flow {
    uint32_t chunk, set;   /* below the part's; a set serves any chunk */
    const int32_t *tokens; /* forward, host: [micro_batch, seq_len], unchanged until the backward;
                              first virtual stage, else unused */
    const int32_t
        *targets;          /* as tokens, below 0: does not count; last virtual stage, else unused */
    double *loss;          /* forward, back end: the sum of the token losses is added to it; last
                              virtual stage; NULL: not wanted */
    const kern_real *in;   /* [rows, C] the residual stream; NULL on the first virtual stage */
    kern_real *out;        /* [rows, C]; NULL on the last */
    const kern_real *dout; /* [rows, C] backward: gradient of out; NULL on the last */
    kern_real *din;        /* [rows, C] backward: gradient of in; NULL on the first */
    int add;               /* backward: 0 overwrites the gradient, 1 adds to it */
    int eval;              /* forward: no backward will come */
};

/* Forward keeps in flow.set what the backward of the same chunk needs; until then nothing else may
 * use that set. *ret_tokens: how many targets counted; 0 but on the last virtual stage. BL_ELIMIT
 * if a token or target is not below vocab: nothing was called or written then. One caller at a time
 * for a model. Errors of hooks come through; the set is undefined then. Those of the back end come
 * out of its sync. */
BL_MUST_CHECK int train_model_forward(struct train_model *model, const struct train_flow *flow,
                                      const struct train_hooks *hooks, uint64_t *ret_tokens,
                                      struct bl_errmsg *msg);
/* Of the tokens and targets of the forward pass. The backward seed is 1: gradients are of the *sum*
 * of token losses; the caller scales after the tree. */
BL_MUST_CHECK int train_model_backward(struct train_model *model, const struct train_flow *flow,
                                       const struct train_hooks *hooks, struct bl_errmsg *msg);
/* The calls of hooks of a forward (backward 0) or backward pass of a chunk, without the work. */
BL_MUST_CHECK int train_model_idle(const struct train_model *model, uint32_t chunk, int backward,
                                   const struct train_hooks *hooks, struct bl_errmsg *msg);

/* The whole model (tp 1, pp 1, chunks 1), set 0, whole buffers: forward and backward. Waits for the
 * back end: *ret_loss_sum is on the host. */
BL_MUST_CHECK int train_model_forward_backward(struct train_model *model, const kern_real *params,
                                               const int32_t *tokens, const int32_t *targets,
                                               float *grads, int add, double *ret_loss_sum,
                                               uint64_t *ret_tokens, struct bl_errmsg *msg);
/* Forward only: the same loss, bit for bit. */
BL_MUST_CHECK int train_model_eval(struct train_model *model, const kern_real *params,
                                   const int32_t *tokens, const int32_t *targets,
                                   double *ret_loss_sum, uint64_t *ret_tokens,
                                   struct bl_errmsg *msg);

/* After the lane tree, with a tied head: embed[i] = head[i] + embed[i] for a range of count
 * elements, given as pointers into the two regions of the reduced gradient. */
void train_model_tied_finish(struct kern *kern, float *embed, const float *head, uint64_t count);

struct train_sample {
    double temperature; /* 0: greedy */
    uint32_t top_k;     /* 0: all */
    double top_p;       /* of those only the likeliest that have more than this share; 0, 1: all */
    uint64_t seed;      /* draws are a pure function of (seed, position) */
};

/* Continues prompt[prompt_len] (1 or more tokens) by `count` tokens into out[count], with a key and
 * value cache of prompt_len + count positions. Ties go to the lowest token. BL_ELIMIT for a bad
 * token or an empty prompt, -EINVAL for a part of a model, -ENOMEM, errors of the back end. Needs
 * no free memory of the model's but takes its own; waits for the back end at every token. */
BL_MUST_CHECK int train_model_sample(const struct train_model *model, const kern_real *params,
                                     const int32_t *prompt, uint32_t prompt_len, int32_t *out,
                                     uint32_t count, const struct train_sample *how,
                                     struct bl_errmsg *msg);

/* The back end's probe over every matrix shape of the model's slices on all of `tp` ranks: the same
 * number for each of them. Errors as train_model_new_part. */
BL_MUST_CHECK int train_model_probe(struct kern *kern, const struct bl_job_model *config,
                                    uint32_t tp, uint32_t seq_len, uint32_t micro_batch,
                                    uint32_t head_chunk, uint64_t *ret_digest,
                                    struct bl_errmsg *msg);

#endif
