/* SPDX-License-Identifier: Apache-2.0 */
/* Weights to sample with or to begin from, wherever they lie: which model they are of, and the
 * weights. */
#ifndef TRAIN_TRAINER_WEIGHTS_H
#define TRAIN_TRAINER_WEIGHTS_H

#include <stdint.h>

#include "ckpt/foreign.h"
#include "ckpt/view.h"
#include "trainer/model.h"

struct train_weights {
    struct bl_job_model config;
    uint32_t context;          /* longest sequence that the model was made for; 0: not known */
    struct ckpt_store *store;  /* owned; of a checkpoint */
    char dir[CKPT_DIR_MAX];    /* its name */
    struct ckpt_view *theirs;  /* owned; of other people's files */
    struct ckpt_map_list maps; /* owned */
};

/* Opens `path`: a checkpoint, a root (its newest good one is taken), a directory of Hugging Face's
 * or a llama2.c file, and finds out the model. `config` NULL: the model that the files say; else it
 * is that one, and only checkpoints can be opened. BL_EFORMAT for files that do not hold the model
 * that they say. Close also after an error. */
BL_MUST_CHECK int train_weights_open(struct train_weights *weights, const char *path,
                                     const struct bl_job_model *config, struct bl_errmsg *msg);

/* Fills params[train_model_buffer_elems] of the whole model, which the caller zeroed. */
BL_MUST_CHECK int train_weights_load(struct train_weights *weights, const struct train_model *model,
                                     float *params, struct bl_errmsg *msg);

/* Adds flat elements [lo, hi) of a weight's box to what a load wants; they go to `offset` bytes
 * from its base. -ENOMEM. */
BL_MUST_CHECK int train_weights_want(struct bl_extent_list *list, const struct train_tensor *weight,
                                     uint64_t lo, uint64_t hi, uint64_t offset,
                                     struct bl_errmsg *msg);

void train_weights_close(struct train_weights *weights);

#endif
