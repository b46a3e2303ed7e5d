/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Making a model: all memory that its passes need is counted once and taken once.
 */
#include "trainer/model.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/model_internal.h"

/* Arrays start on 64 bytes. */
#define ARENA_ALIGN 16U

/* Hands out the arena, or only counts while `arena` is NULL. */
struct arena_cursor {
    float *arena;
    uint64_t used; /* elements */
};

static float *arena_take(struct arena_cursor *cursor, uint64_t elems)
{
    float *at = cursor->arena == NULL ? NULL : cursor->arena + cursor->used;
    cursor->used += (elems + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN;
    return at;
}

static void lay_out_layer(struct train_model *model, struct model_layer_acts *a,
                          struct arena_cursor *cursor)
{
    uint64_t n = model->rows, c = model->config.dim, f = model->config.hidden;
    int gpt2 = model_is_gpt2(model);
    a->x = arena_take(cursor, n * c);
    a->norm1 = arena_take(cursor, n * c);
    a->rstd1 = arena_take(cursor, n);
    a->mean1 = arena_take(cursor, gpt2 ? n : 0);
    a->q = arena_take(cursor, n * c);
    a->k = arena_take(cursor, n * model->kv_dim);
    a->v = arena_take(cursor, n * model->kv_dim);
    a->att = arena_take(cursor, n * c);
    a->stats = arena_take(cursor, n * model->config.heads * 2);
    a->mid = arena_take(cursor, n * c);
    a->norm2 = arena_take(cursor, n * c);
    a->rstd2 = arena_take(cursor, n);
    a->mean2 = arena_take(cursor, gpt2 ? n : 0);
    a->gate = arena_take(cursor, gpt2 ? 0 : n * f);
    a->up = arena_take(cursor, n * f);
    a->act = arena_take(cursor, n * f);
}

static void lay_out(struct train_model *model, struct arena_cursor *cursor)
{
    uint64_t n = model->rows, c = model->config.dim, f = model->config.hidden;
    for (uint32_t layer = 0; layer < model->config.layers; layer++) {
        lay_out_layer(model, &model->layers[layer], cursor);
    }
    int gpt2 = model_is_gpt2(model);
    model->rope = arena_take(cursor, gpt2 ? 0 : (uint64_t)model->seq_len * model->head_dim);
    model->x = arena_take(cursor, n * c);
    model->norm = arena_take(cursor, n * c);
    model->rstd = arena_take(cursor, n);
    model->mean = arena_take(cursor, gpt2 ? n : 0);
    model->logits = arena_take(cursor, n * model->config.vocab);
    model->losses = (double *)(void *)arena_take(cursor, 2 * n);
    model->scratch = arena_take(cursor, kern_attention_scratch(&model->attention, model->threads));
    model->dx = arena_take(cursor, n * c);
    model->dnorm = arena_take(cursor, n * c);
    model->datt = arena_take(cursor, n * c);
    model->dq = arena_take(cursor, n * c);
    model->dk = arena_take(cursor, n * model->kv_dim);
    model->dv = arena_take(cursor, n * model->kv_dim);
    model->dgate = arena_take(cursor, gpt2 ? 0 : n * f);
    model->dup = arena_take(cursor, n * f);
    model->dact = arena_take(cursor, n * f);
}

/* Table and sizes, without the arena. */
static int model_measure(struct train_model **ret, const struct bl_job_model *config,
                         const struct train_part *part, uint32_t seq_len, uint32_t micro_batch,
                         uint32_t threads, struct bl_errmsg *msg)
{
    struct train_model *model = calloc(1, sizeof *model);
    if (model == NULL) {
        return bl_err_code(msg, -ENOMEM, "model");
    }
    model->config = *config;
    model->part = *part;
    model->seq_len = seq_len;
    model->micro_batch = micro_batch;
    model->threads = threads;
    int rc = model_table_init(model, msg);
    if (rc == 0) {
        model->layers = calloc(config->layers, sizeof *model->layers);
        rc = model->layers == NULL ? bl_err_code(msg, -ENOMEM, "model's layers") : 0;
    }
    if (rc < 0) {
        train_model_free(model);
        return rc;
    }
    struct arena_cursor count = {NULL, 0};
    lay_out(model, &count);
    model->arena_elems = count.used;
    *ret = model;
    return 0;
}

void model_rope_table(const struct train_model *model, float *table, uint32_t positions)
{
    const struct bl_job_model *c = &model->config;
    const struct kern_rope_scaling scaling = {c->rope_factor, c->rope_low, c->rope_high,
                                              c->rope_context};
    kern_rope_table(table, positions, model->head_dim, c->rope_theta,
                    c->rope_factor > 1.0 ? &scaling : NULL);
}

int train_model_new(struct train_model **ret, const struct bl_job_model *config, uint32_t seq_len,
                    uint32_t micro_batch, uint32_t threads, struct bl_errmsg *msg)
{
    return train_model_new_part(ret, config, &TRAIN_PART_WHOLE, seq_len, micro_batch, threads, msg);
}

int train_model_new_part(struct train_model **ret, const struct bl_job_model *config,
                         const struct train_part *part, uint32_t seq_len, uint32_t micro_batch,
                         uint32_t threads, struct bl_errmsg *msg)
{
    struct train_model *model = NULL;
    if (part->pp * part->chunks != 1 || part->sets != 1 || part->recompute != 0) {
        return bl_err(msg, BL_ENOTBUILT, "the model has one stage, one set, no recomputation yet");
    }
    int rc = model_measure(&model, config, part, seq_len, micro_batch, threads, msg);
    if (rc < 0) {
        return rc;
    }
    void *arena = NULL;
    uint64_t bytes = model->arena_elems * sizeof(float);
    if (posix_memalign(&arena, 64, bytes) != 0) {
        train_model_free(model);
        return bl_err_code(msg, -ENOMEM, "model: %llu bytes of activations",
                           (unsigned long long)bytes);
    }
    model->arena = arena;
    struct arena_cursor cursor = {model->arena, 0};
    lay_out(model, &cursor);
    if (!model_is_gpt2(model)) {
        model_rope_table(model, model->rope, seq_len);
    }
    *ret = model;
    return 0;
}

int train_model_new_table(struct train_model **ret, const struct bl_job_model *config,
                          const struct train_part *part, uint32_t seq_len, uint32_t micro_batch,
                          uint32_t threads, struct bl_errmsg *msg)
{
    return model_measure(ret, config, part, seq_len, micro_batch, threads, msg);
}

void train_model_free(struct train_model *model)
{
    if (model == NULL) {
        return;
    }
    free(model->arena);
    free(model->layers);
    free(model->tensors);
    free(model->units);
    free(model->first_layer);
    free(model);
}

uint64_t train_model_bytes(const struct bl_job_model *config, uint32_t seq_len,
                           uint32_t micro_batch, uint32_t threads)
{
    struct train_model *model = NULL;
    if (model_measure(&model, config, &TRAIN_PART_WHOLE, seq_len, micro_batch, threads, NULL) < 0) {
        return 0;
    }
    uint64_t bytes = model->arena_elems * sizeof(float);
    train_model_free(model);
    return bytes;
}

int model_tokens_check(const struct train_model *model, const int32_t *tokens, uint64_t count,
                       int32_t lowest, const char *what, struct bl_errmsg *msg)
{
    for (uint64_t i = 0; i < count; i++) {
        if (tokens[i] < lowest || tokens[i] >= (int32_t)model->config.vocab) {
            return bl_err(msg, BL_ELIMIT, "%s %llu is %d: not in a vocabulary of %u", what,
                          (unsigned long long)i, tokens[i], model->config.vocab);
        }
    }
    return 0;
}

int train_model_memory(struct train_memory *ret, const struct bl_job_model *config,
                       const struct train_part *part, uint32_t seq_len, uint32_t micro_batch,
                       uint32_t threads, struct bl_errmsg *msg)
{
    struct train_model *model = NULL;
    int rc = model_measure(&model, config, part, seq_len, micro_batch, threads, msg);
    train_model_free(model);
    (void)ret;
    return rc < 0 ? rc : bl_err(msg, BL_ENOTBUILT, "memory by kind");
}
