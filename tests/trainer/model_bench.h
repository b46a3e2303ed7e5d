/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model with buffers, a batch and a pool, for the tests of this folder.
 */
#ifndef TRAIN_TESTS_MODEL_BENCH_H
#define TRAIN_TESTS_MODEL_BENCH_H

#include <stdint.h>

#include "trainer/model.h"

/* Sizes with odd ends: more than one tile, query block and part of a vector. */
extern const struct bl_job_model MODEL_SMALL, MODEL_SMALL_GPT2;

/* A model with buffers and a batch. */
struct model_bench {
    const struct bl_job_model *config; /* kept */
    struct train_model *model;
    struct kern_pool *pool;
    struct kern *kern;
    float *params, *grads;
    int32_t *tokens, *targets;
    uint64_t buffer_elems, grad_elems;
};

/* Initial weights of seed 7, tokens from a counter, gradients full of NaN. Asserts. */
void model_bench_init(struct model_bench *b, const struct bl_job_model *config, uint32_t seq_len,
                      uint32_t batch, uint32_t threads);
void model_bench_close(struct model_bench *b);
/* Another model in its place, which makes logits so many rows at a time. */
void model_bench_chunk(struct model_bench *b, uint32_t seq_len, uint32_t batch,
                       uint32_t head_chunk);
/* A back end on the caller's thread, for tests of one thread; never closed. */
struct kern *model_bench_kern(void);
/* One train_model_forward_backward; returns the loss sum. */
double model_bench_pass(struct model_bench *b, int add, uint64_t *ret_tokens);
/* Three optimizer steps of two micro-batches; a digest of losses, gradients and parameters. */
uint64_t model_bench_digest(const struct bl_job_model *config, uint32_t seq_len, uint32_t batch,
                            uint32_t threads);

#endif
