/* SPDX-License-Identifier: Apache-2.0 */
#include "model_bench.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/digest.h"
#include "trainer/schedule.h"

const struct bl_job_model MODEL_SMALL = {.layers = 2,
                                         .dim = 72,
                                         .hidden = 604,
                                         .heads = 6,
                                         .kv_heads = 3,
                                         .vocab = 517,
                                         .tied = 1,
                                         .rope_theta = 10000.0,
                                         .norm_eps = 1e-5};

const struct bl_job_model MODEL_SMALL_GPT2 = {.arch = BL_ARCH_GPT2,
                                              .layers = 2,
                                              .dim = 70,
                                              .hidden = 301,
                                              .heads = 5,
                                              .kv_heads = 5,
                                              .vocab = 517,
                                              .tied = 1,
                                              .bias = 1,
                                              .context = 160,
                                              .rope_theta = 1,
                                              .norm_eps = 1e-5};

void model_bench_init(struct model_bench *b, const struct bl_job_model *config, uint32_t seq_len,
                      uint32_t batch, uint32_t threads)
{
    struct bl_errmsg msg = {0};
    memset(b, 0, sizeof *b);
    b->config = config;
    assert_int_equal(kern_pool_new(&b->pool, threads, &msg), 0);
    assert_int_equal(kern_cpu_open(&b->kern, b->pool, &msg), 0);
    assert_int_equal(train_model_new(&b->model, b->kern, config, seq_len, batch, &msg), 0);
    b->buffer_elems = train_model_buffer_elems(b->model);
    b->grad_elems = train_model_grad_elems(b->model);
    b->params = malloc(b->buffer_elems * sizeof(float));
    b->grads = malloc(b->grad_elems * sizeof(float));
    b->tokens = malloc(2 * sizeof(int32_t) * seq_len * batch);
    assert_true(b->params != NULL && b->grads != NULL && b->tokens != NULL);
    b->targets = b->tokens + seq_len * batch;
    memset(b->grads, 0xff, b->grad_elems * sizeof(float)); /* NaN: all must be written */
    train_model_init_params(b->model, 7, b->params, 0, b->buffer_elems, b->pool);
    uint64_t key = kern_rng_key(1, 2);
    for (uint32_t i = 0; i < 2 * seq_len * batch; i++) {
        b->tokens[i] = (int32_t)(kern_rng_bits(key, i) % config->vocab);
    }
}

void model_bench_chunk(struct model_bench *b, uint32_t seq_len, uint32_t batch, uint32_t head_chunk)
{
    struct train_part part = TRAIN_PART_WHOLE;
    part.head_chunk = head_chunk;
    train_model_free(b->model);
    assert_int_equal(
        train_model_new_part(&b->model, b->kern, b->config, &part, seq_len, batch, NULL), 0);
}

void model_bench_close(struct model_bench *b)
{
    train_model_free(b->model);
    b->kern->ops->close(b->kern);
    kern_pool_free(b->pool);
    free(b->params);
    free(b->grads);
    free(b->tokens);
}

struct kern *model_bench_kern(void)
{
    static struct kern *kern;
    if (kern == NULL) {
        assert_int_equal(kern_cpu_open(&kern, NULL, NULL), 0);
    }
    return kern;
}

double model_bench_pass(struct model_bench *b, int add, uint64_t *ret_tokens)
{
    double loss = 0;
    assert_int_equal(train_model_forward_backward(b->model, kern_real_f32_view(b->params),
                                                  b->tokens, b->targets, b->grads, add, &loss,
                                                  ret_tokens, NULL),
                     0);
    return loss;
}

uint64_t model_bench_digest(const struct bl_job_model *config, uint32_t seq_len, uint32_t batch,
                            uint32_t threads)
{
    struct model_bench b;
    model_bench_init(&b, config, seq_len, batch, threads);
    float *m = calloc(2 * b.buffer_elems, sizeof *m), *v = m + b.buffer_elems;
    double *sums = malloc((b.buffer_elems / KERN_BLOCK) * sizeof *sums);
    assert_true(m != NULL && sums != NULL);
    uint64_t digest = 0, tokens;
    for (uint64_t step = 1; step <= 3; step++) {
        double loss = model_bench_pass(&b, 0, &tokens);
        loss += model_bench_pass(&b, 1, &tokens);
        uint64_t tied = train_model_tied_elems(b.model);
        train_model_tied_finish(b.kern, b.grads, b.grads + b.buffer_elems, tied);
        kern_scale(b.pool, b.grads, 1.0f / (float)(2 * tokens), b.buffer_elems);
        kern_sumsq_blocks(b.pool, sums, b.grads, b.buffer_elems);
        double norm = kern_tree_sum(sums, b.buffer_elems / KERN_BLOCK);
        struct kern_adamw_step adamw;
        kern_adamw_step_init(&adamw, step, train_lr_at(step, 10, 2, 1e-2, 1e-3), 0.9, 0.95, 1e-8,
                             1.0f);
        kern_adamw(b.pool, b.params, m, v, b.params, m, v, b.grads, b.buffer_elems, &adamw, 0.1f);
        struct {
            double loss, norm;
            uint64_t grads, params, before;
        } all = {loss, norm, bl_xxh3(b.grads, b.grad_elems * sizeof(float)),
                 bl_xxh3(b.params, b.buffer_elems * sizeof(float)), digest};
        digest = bl_xxh3(&all, sizeof all);
    }
    free(m);
    free(sums);
    model_bench_close(&b);
    return digest;
}
