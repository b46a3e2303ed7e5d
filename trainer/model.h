/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The model on one rank, Llama or GPT-2: its logical tensors, its step of arithmetic, sampling.
 *
 * Parameters live in one flat fp32 buffer of `buffer_elems`, owned by the caller. Every logical
 * tensor starts on a border of KERN_BLOCK (4,096) elements, so that ZeRO borders cut at blocks
 * never split one; the gaps hold zeros (gradients: zeros; AdamW keeps them zero). Gradients have
 * the same layout and, with a tied head, one more region at the end: head and embedding keep
 * separate accumulators through the lane tree and are added once after it
 * (train_model_tied_finish).
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
 * C dim, F hidden, V vocab, D = C / heads. The bits of a result depend on params, tokens and shape
 * only (kernels/kern.h), never on the pool.
 */
#ifndef TRAIN_TRAINER_MODEL_H
#define TRAIN_TRAINER_MODEL_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/extent.h"
#include "base/job.h"
#include "kernels/kern.h"

struct train_tensor {
    char name[BL_TENSOR_NAME_MAX];
    uint64_t name_hash; /* bl_xxh3 of the name */
    uint32_t dims;      /* 1 or 2 */
    uint64_t shape[2];
    uint64_t elems;  /* product of the shape */
    uint64_t offset; /* elements from the start of the flat buffer; a multiple of KERN_BLOCK */
    uint32_t decay;  /* 1: weight decay applies (matrices), 0: it does not (norms, biases) */
    double init_std; /* normal(0, init_std) at the start; 0: all are init_fill */
    float init_fill;
};

struct train_model; /* configuration, tensor table and activations; trainer/model_internal.h */

/* Makes the model for sequences of seq_len tokens, micro_batch of them a pass, and takes all memory
 * that passes will ever need, for a pool of up to `threads`. Owned; train_model_free. BL_ECONFIG
 * with text for a shape that cannot be (dim not a multiple of heads, odd head size, heads not a
 * multiple of kv_heads, zeros, over limits), -ENOMEM with the bytes wanted. */
BL_MUST_CHECK int train_model_new(struct train_model **ret, const struct bl_job_model *config,
                                  uint32_t seq_len, uint32_t micro_batch, uint32_t threads,
                                  struct bl_errmsg *msg);
void train_model_free(struct train_model *model); /* NULL is fine */

/* Bytes that train_model_new would take for activations and scratch; 0 for a refused shape. */
uint64_t train_model_bytes(const struct bl_job_model *config, uint32_t seq_len,
                           uint32_t micro_batch, uint32_t threads);

/* The tensor table: *ret_count entries, in the order of their offsets. A view, lives as long as the
 * model. */
const struct train_tensor *train_model_tensors(const struct train_model *model,
                                               uint32_t *ret_count);
uint64_t train_model_param_elems(const struct train_model *model);  /* without gaps */
uint64_t train_model_buffer_elems(const struct train_model *model); /* flat buffer with gaps */
/* Gradient buffer: buffer_elems, plus the tied head's region: the gradient of head element i is at
 * buffer_elems + i and belongs to parameter i (the embedding lies at offset 0). */
uint64_t train_model_grad_elems(const struct train_model *model);
/* Elements (a multiple of KERN_BLOCK) of the tied head's region; 0 with an untied head. */
uint64_t train_model_tied_elems(const struct train_model *model);

/* Writes elements [lo, hi) of the flat buffer's initial weights to dst[0 .. hi - lo): normal(0,
 * 0.02), o_proj and down_proj divided by sqrt(2 layers), norms one, biases and gaps zero; a pure
 * function of
 * (seed, tensor name, element), so every rank makes just what it owns. */
void train_model_init_params(const struct train_model *model, uint64_t seed, float *dst,
                             uint64_t lo, uint64_t hi, struct kern_pool *pool);

/* One micro-batch forward and backward. tokens and targets[micro_batch, seq_len] (a target below 0
 * does not count). grads[grad_elems]: the first micro-batch of a lane overwrites (add 0: every
 * element, gaps with zeros), later ones add (add 1). The backward seed is 1: gradients are of the
 * *sum* of token losses; the caller scales after the tree. *ret_loss_sum: that sum;
 * *ret_tokens: how many targets counted. BL_ELIMIT if a token or target is not below vocab: nothing
 * was written then. One caller at a time for a model. */
BL_MUST_CHECK int train_model_forward_backward(struct train_model *model, const float *params,
                                               const int32_t *tokens, const int32_t *targets,
                                               float *grads, int add, double *ret_loss_sum,
                                               uint64_t *ret_tokens, struct kern_pool *pool,
                                               struct bl_errmsg *msg);
/* Forward only: the same loss, bit for bit. */
BL_MUST_CHECK int train_model_eval(struct train_model *model, const float *params,
                                   const int32_t *tokens, const int32_t *targets,
                                   double *ret_loss_sum, uint64_t *ret_tokens,
                                   struct kern_pool *pool, struct bl_errmsg *msg);

/* After the lane tree, with a tied head: embed[i] = head[i] + embed[i] for a range of count
 * elements, given as pointers into the two regions of the reduced gradient. */
void train_model_tied_finish(struct kern_pool *pool, float *embed, const float *head,
                             uint64_t count);

struct train_sample {
    double temperature; /* 0: greedy */
    uint32_t top_k;     /* 0: all */
    double top_p;       /* of those only the likeliest that have more than this share; 0, 1: all */
    uint64_t seed;      /* draws are a pure function of (seed, position) */
};

/* Continues prompt[prompt_len] (1 or more tokens) by `count` tokens into out[count], with a key and
 * value cache of prompt_len + count positions. Ties go to the lowest token. BL_ELIMIT for a bad
 * token or an empty prompt, -ENOMEM. Needs no free memory of the model's but takes its own. */
BL_MUST_CHECK int train_model_sample(const struct train_model *model, const float *params,
                                     const int32_t *prompt, uint32_t prompt_len, int32_t *out,
                                     uint32_t count, const struct train_sample *how,
                                     struct kern_pool *pool, struct bl_errmsg *msg);

/* kern_probe over every matrix shape of this model. */
BL_MUST_CHECK int train_model_probe(const struct train_model *model, struct kern_pool *pool,
                                    uint64_t *ret_digest, struct bl_errmsg *msg);

#endif
