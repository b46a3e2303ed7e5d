/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Layouts: how a model's tensors are cut over ranks, and what of it goes into which part. Pure: no
 * I/O, the same answer everywhere.
 *
 * A *rule* says of the tensors that its pattern matches how tensor parallelism cuts them (the terms
 * are DeepSpeed's and Megatron's) and on which pipeline stage they live:
 *
 *     replicated          every tp rank holds it whole                  norms, position embeddings
 *     column parallel     cut along its output dimension, in pieces     q, k, v, gate, up
 *     row parallel        cut along its input dimension                 o, down
 *     vocabulary          cut along the vocabulary padded to a multiple of vocab_multiple * tp; the
 *                         padding is in no extent, so the last ranks hold less or nothing
 *
 * A cut goes between *units*: n units over tp ranks give rank r units [n r / tp, n (r + 1) / tp).
 * With fewer units than ranks (grouped-query attention with fewer kv heads than tp) rank r holds
 * unit floor(n r / tp), which others hold too. A fused tensor is several sub-parameters one behind
 * the other, each cut by itself:
 *
 *     qkv, 4 heads, 2 kv heads, tp 2:    q q q q k k v v       rank 0: q[0:2] k[0:1] v[0:1]
 *                                        0 0 1 1 0 1 0 1       rank 1: q[2:4] k[1:2] v[1:2]
 *
 * Data parallelism cuts flat (ZeRO): the boxes that one (tp, pp) place holds of one kind lie one
 * behind the other in table order, each tensor padded to CKPT_LAYOUT_BLOCK elements, and dp rank d
 * has blocks [n d / dp, n (d + 1) / dp): moments from stage 1 on, parameters in stage 3. What is
 * *stored* is cut so from stage 1 on for parameters too: each of the dp replicas writes its share.
 *
 * Ranks are numbered tp fastest, then pp, then dp.
 */
#ifndef BL_CKPT_LAYOUT_H
#define BL_CKPT_LAYOUT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "base/extent.h"
#include "ckpt/manifest.h"

#define CKPT_LAYOUT_BLOCK      4096u /* elements; ZeRO's borders lie on it, as the trainer's do */
#define CKPT_LAYOUT_PIECES_MAX 8u
#define CKPT_LAYOUT_RULES_MAX  256u
#define CKPT_LAYOUT_WORLD_MAX  65536u
/* A tensor larger than this that is cut in an inner dimension is stored in bands of whole rows, so
 * that whoever streams it passes over it once. */
#define CKPT_LAYOUT_BAND_BYTES (16u * 1024 * 1024)

enum ckpt_layout_cut {
    CKPT_CUT_REPLICATED = 0,
    CKPT_CUT_COLUMN,
    CKPT_CUT_ROW,
    CKPT_CUT_VOCABULARY
};

/* Units that a piece may be cut into, when not a number. */
#define CKPT_UNITS_ELEMS    0u
#define CKPT_UNITS_HEADS    UINT32_MAX
#define CKPT_UNITS_KV_HEADS (UINT32_MAX - 1)

struct ckpt_layout_piece {
    uint64_t share; /* of the dimension, relative to the other pieces' (CKPT_UNITS_...: so many) */
    uint32_t units; /* that it is made of: a number, or CKPT_UNITS_... */
};

enum ckpt_stage { CKPT_STAGE_FIRST = 0, CKPT_STAGE_LAST, CKPT_STAGE_BOTH };

struct ckpt_layout_rule {
    const char *match; /* the parameter's name; '*' stands for any run of characters */
    enum ckpt_layout_cut cut;
    uint32_t dim;          /* that is cut */
    enum ckpt_stage stage; /* of a tensor without a layer number in its name */
    uint32_t piece_count;  /* 0: one, cut anywhere */
    struct ckpt_layout_piece pieces[CKPT_LAYOUT_PIECES_MAX];
};

struct ckpt_layout_model {
    uint32_t heads, kv_heads;             /* 0: not known; then cut anywhere */
    uint32_t vocab_multiple;              /* 0 is 1: the vocabulary is padded to a multiple of tp */
    bool tied;                            /* the first stage's embedding is the last one's head */
    const struct ckpt_layout_rule *rules; /* borrowed; looked at before the built-in ones */
    uint32_t rule_count;
};

/* What the job in a manifest says of the model ("{}" or NULL: nothing); rules stay as they are.
 * BL_EFORMAT when it is no JSON object. */
BL_MUST_CHECK int ckpt_layout_model_read(struct ckpt_layout_model *ret, const char *job,
                                         struct bl_errmsg *msg);

/* "dp=2,tp=4,pp=1,zero=1", any of them, each once; also vocab=N (multiple to pad to), heads=N,
 * kv_heads=N. What is not named is 1 (zero: 0), or the model's as it was. BL_ECONFIG names what is
 * wrong. */
BL_MUST_CHECK int ckpt_layout_parse(struct ckpt_layout *ret, struct ckpt_layout_model *model,
                                    const char *text, struct bl_errmsg *msg);

/* Rules out of a JSON text, for models that the built-in ones do not know:
 *     [{"match":"*.attn.qkv.weight","cut":"column","dim":0,"pieces":[[4096,32],[512,4],[512,4]]}]
 * with a piece as [width, units] and "stage":"last" or "both" where it is not the first. *ret_rules
 * and the patterns are owned: ckpt_layout_rules_free. */
BL_MUST_CHECK int ckpt_layout_rules_read(struct ckpt_layout_rule **ret_rules, uint32_t *ret_count,
                                         const char *text, size_t bytes, struct bl_errmsg *msg);
void ckpt_layout_rules_free(struct ckpt_layout_rule *rules, uint32_t count);

struct ckpt_layout_cutter; /* a model's table of tensors, with a layout */

/* Prepares a cut of `tensors` (copied). Everything is checked here: that world = dp * tp * pp
 * (world 0 is set to it), that dimensions are whole units. BL_ECONFIG names tensor and reason. *ret
 * is owned. */
BL_MUST_CHECK int ckpt_layout_new(struct ckpt_layout_cutter **ret, const struct ckpt_layout *layout,
                                  const struct ckpt_layout_model *model,
                                  const struct bl_tensor *tensors, uint32_t tensor_count,
                                  struct bl_errmsg *msg);
void ckpt_layout_free(struct ckpt_layout_cutter *cutter);

/* What rank `rank` holds, copies that others hold too included, in table order; offsets count from
 * 0, each a multiple of 64. *ret_bytes (may be NULL): how much memory that is. */
BL_MUST_CHECK int ckpt_layout_rank(const struct ckpt_layout_cutter *cutter, uint32_t rank,
                                   struct bl_extent_list *ret, uint64_t *ret_bytes,
                                   struct bl_errmsg *msg);

/* What all ranks store together: every element once, in file order. Cost: near linear in the
 * extents. */
BL_MUST_CHECK int ckpt_layout_stored(const struct ckpt_layout_cutter *cutter,
                                     struct bl_extent_list *ret, struct bl_errmsg *msg);

/* Deals a list in file order out to `part_count` parts, one stretch for each, as even in bytes as
 * blocks of CKPT_LAYOUT_BLOCK elements go; an extent that lies across a border is cut flat. `ret`:
 * part_count lists, uninitialised; some are empty when there is too little. All closed on error. */
BL_MUST_CHECK int ckpt_layout_parts(const struct bl_extent_list *list, uint32_t part_count,
                                    struct bl_extent_list *ret, struct bl_errmsg *msg);

/* The tensors of a manifest, each once, by name. Owned (free()). */
BL_MUST_CHECK int ckpt_layout_tensors(const struct ckpt_manifest *manifest, struct bl_tensor **ret,
                                      uint32_t *ret_count, struct bl_errmsg *msg);

#endif
