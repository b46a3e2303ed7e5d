/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Models as other people name them. Belay's state is logical tensors: q, k, v, gate and up apart,
 * linear layers [outputs, inputs], vocabulary unpadded, rotary rows in halves. Here stands, as
 * tables without any I/O, which tensor of Belay's is where in a file of Hugging Face's (Llama,
 * GPT-2) or llama2.c's, and what config.json says about a model.
 *
 *     Belay                                    Hugging Face            orientation
 *     Llama: the same names                    the same                the same
 *     transformer.h.L.attn.q_proj.weight       h.L.attn.c_attn.weight  columns [0, C), transposed
 *     transformer.h.L.attn.k_proj.weight       the same                columns [C, 2C), transposed
 *     transformer.h.L.attn.v_proj.weight       the same                columns [2C, 3C), transposed
 *     transformer.h.L.attn.o_proj.weight       h.L.attn.c_proj.weight  transposed
 *     transformer.h.L.mlp.up_proj.weight       h.L.mlp.c_fc.weight     transposed
 *     transformer.h.L.mlp.down_proj.weight     h.L.mlp.c_proj.weight   transposed
 *     (biases likewise; wte, wpe, ln_1, ln_2, ln_f as they are)
 *
 * Rotary positions turn pairs of a head's D rows. Llama's authors and llama2.c pair rows (2i,
 * 2i+1); Hugging Face and Belay pair (i, i + D/2). One is a permutation of the other's rows, in q
 * and k alone.
 *
 * Any thread.
 */
#ifndef BL_CKPT_HF_H
#define BL_CKPT_HF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/extent.h"
#include "base/model_config.h"

enum ckpt_arch { CKPT_ARCH_LLAMA = 1, CKPT_ARCH_GPT2 = 2 };

/* Llama 3's stretching of the rotary positions; factor 0: none. */
struct ckpt_rope_scaling {
    double factor, low, high; /* low_freq_factor, high_freq_factor */
    uint32_t context;         /* original_max_position_embeddings */
};

struct ckpt_model {
    enum ckpt_arch arch;
    uint32_t layers, dim, hidden, heads, kv_heads, vocab;
    uint32_t context;      /* longest sequence; GPT-2: rows of wpe; 0: not known (Llama only) */
    uint32_t vocab_padded; /* rows of their embedding and head; 0: vocab, no padding */
    bool tied;             /* the head shares the embedding's weights */
    bool no_bias;          /* a GPT-2 without biases; theirs always has them: zeros */
    double rope_theta, norm_eps;
    struct ckpt_rope_scaling rope_scaling;
};

#define CKPT_MODEL_LAYERS_MAX  4096u
#define CKPT_MODEL_WIDTH_MAX   (1u << 20)
#define CKPT_MODEL_VOCAB_MAX   (1u << 24)
#define CKPT_CONFIG_BYTES_MAX  BL_MODEL_CONFIG_BYTES_MAX
#define CKPT_MAP_TENSORS_LAYER 16u /* at most so many tensors in a layer */

/* "llama", "gpt2"; "?" for another. */
const char *ckpt_arch_name(enum ckpt_arch arch);

/* Do the sizes fit one another and the bounds above? BL_EFORMAT names the field. */
BL_MUST_CHECK int ckpt_model_check(const struct ckpt_model *model, struct bl_errmsg *msg);
bool ckpt_model_equal(const struct ckpt_model *a, const struct ckpt_model *b);

/* bl_model_config_parse, and ckpt_model_check of what it says. */
BL_MUST_CHECK int ckpt_model_from_config(struct ckpt_model *ret, const char *text, size_t bytes,
                                         struct bl_errmsg *msg);
/* The text of a config.json that transformers reads; `dtype` is what the weights are written as.
 * Owned (free()); NULL when out of memory. Deterministic. */
char *ckpt_model_to_config(const struct ckpt_model *model, enum bl_dtype dtype);

/* Reads the model out of a frozen job: its `model`, and train.seq_len where model.context is
 * missing. BL_ENOSTATE when the job says nothing of a model. */
BL_MUST_CHECK int ckpt_model_from_job(struct ckpt_model *ret, const char *job,
                                      struct bl_errmsg *msg);
/* A job that holds a model and nothing else: what an imported checkpoint has. Owned (free()); NULL
 * when out of memory. */
char *ckpt_model_to_job(const struct ckpt_model *model);

/* ---- Which tensor is where ---- */

enum ckpt_naming {
    CKPT_NAMES_HF,      /* as transformers saves a model with its head */
    CKPT_NAMES_HF_BARE, /* GPT-2 without "transformer." in front, as the first ones were saved */
    CKPT_NAMES_LLAMA2C  /* Hugging Face's Llama names, q and k with their rows in pairs */
};

/* One tensor of Belay's in another's tensor. With r a row (or the index of a vector) and c a
 * column of Belay's, and p = ckpt_rotary_to_pairs(r, rotary_dim) when rotary_dim > 0, else r:
 *
 *     ours[r, c] = theirs[shift + p, c]      or, transposed,      theirs[c, shift + p]
 *
 * Rows of theirs that no map names are padding of the vocabulary: zeros when written.
 */
struct ckpt_map {
    struct bl_tensor tensor; /* Belay's: param, F32, one or two dimensions */
    char theirs[BL_TENSOR_NAME_MAX];
    uint32_t theirs_dims;
    uint64_t theirs_shape[2];
    uint64_t shift;
    uint32_t rotary_dim; /* rows of one head, or 0 */
    bool transposed;
    bool zeros; /* ours has no such tensor, theirs is all zeros: a GPT-2 without biases */
};

struct ckpt_map_list {
    struct ckpt_map *maps; /* owned; those of one of their tensors stand together, by shift */
    uint32_t count;
    struct ckpt_map **by_name; /* owned: views of maps, by Belay's names */
};

/* Every tensor of the model. *ret is the caller's to close. BL_EFORMAT (ckpt_model_check),
 * -ENOMEM. */
BL_MUST_CHECK int ckpt_map_make(struct ckpt_map_list *ret, const struct ckpt_model *model,
                                enum ckpt_naming naming, struct bl_errmsg *msg);
void ckpt_map_close(struct ckpt_map_list *list);
/* The map of Belay's tensor `name`, or NULL. View of the list. */
const struct ckpt_map *ckpt_map_find(const struct ckpt_map_list *list, const char *name);

/* A tensor that transformers keeps beside the weights and that follows from the sizes alone (masks
 * of attention, rotary frequencies): there or not, it is passed over. */
bool ckpt_hf_is_buffer(const char *name);

/* Where row `row` in the order of halves stands in the order of pairs, with heads of `dim` rows
 * (even), and back. */
uint64_t ckpt_rotary_to_pairs(uint64_t row, uint32_t dim);
uint64_t ckpt_rotary_to_halves(uint64_t row, uint32_t dim);

#endif
