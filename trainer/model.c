/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Making a model: all memory that its passes need is counted once and taken once.
 */
#include "trainer/model.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/comm.h"
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

/* Arrays of a layer by how long recomputation lets them live: those that none keeps and selective
 * makes again, those that only full makes again, and the layer's input. */
static void lay_out_elementwise(const struct train_model *model, struct model_layer_acts *a,
                                struct arena_cursor *cursor)
{
    uint64_t n = model->rows, c = model->config.dim;
    a->norm1 = arena_take(cursor, n * c);
    a->norm2 = arena_take(cursor, n * c);
    a->act = arena_take(cursor, n * model->hidden);
}

static void lay_out_products(const struct train_model *model, struct model_layer_acts *a,
                             struct arena_cursor *cursor)
{
    uint64_t n = model->rows, stream = model->stream_rows, c = model->config.dim;
    int gpt2 = model_is_gpt2(model);
    a->rstd1 = arena_take(cursor, stream);
    a->mean1 = arena_take(cursor, gpt2 ? stream : 0);
    a->q = arena_take(cursor, n * model->q_dim);
    a->k = arena_take(cursor, n * model->kv_dim);
    a->v = arena_take(cursor, n * model->kv_dim);
    a->att = arena_take(cursor, n * model->q_dim);
    a->stats = arena_take(cursor, n * model->heads * 2);
    a->mid = arena_take(cursor, stream * c);
    a->rstd2 = arena_take(cursor, stream);
    a->mean2 = arena_take(cursor, gpt2 ? stream : 0);
    a->gate = arena_take(cursor, gpt2 ? 0 : n * model->hidden);
    a->up = arena_take(cursor, n * model->hidden);
}

static int has_head(const struct train_model *model)
{
    return model->part.stage + 1 == model->part.pp;
}

/* `shared`: what recomputation lets all layers use one after the other. */
static void lay_out_set(struct train_model *model, uint32_t index,
                        const struct model_layer_acts *shared, struct arena_cursor *cursor)
{
    struct model_set *set = &model->sets[index];
    uint64_t stream = model->stream_rows, c = model->config.dim;
    set->layers = &model->layers[(size_t)index * model->set_layers];
    for (uint32_t i = 0; i < model->set_layers; i++) {
        struct model_layer_acts *a = &set->layers[i];
        *a = *shared;
        a->x = arena_take(cursor, stream * c);
        if (model->part.recompute != BL_RECOMPUTE_FULL) {
            lay_out_products(model, a, cursor);
        }
        if (model->part.recompute == BL_RECOMPUTE_NONE) {
            lay_out_elementwise(model, a, cursor);
        }
    }
    if (has_head(model)) {
        set->x = arena_take(cursor, stream * c);
        set->norm = arena_take(cursor, (uint64_t)model->rows * c);
        set->rstd = arena_take(cursor, stream);
        set->mean = arena_take(cursor, model_is_gpt2(model) ? stream : 0);
    }
}

static void lay_out_scratch(struct train_model *model, struct model_layer_acts *shared,
                            struct arena_cursor *cursor)
{
    uint64_t n = model->rows, c = model->config.dim, f = model->hidden;
    int gpt2 = model_is_gpt2(model);
    if (model->part.recompute == BL_RECOMPUTE_FULL) {
        lay_out_products(model, shared, cursor);
    }
    if (model->part.recompute != BL_RECOMPUTE_NONE) {
        lay_out_elementwise(model, shared, cursor);
    }
    model->rope = arena_take(cursor, gpt2 ? 0 : (uint64_t)model->seq_len * model->head_dim);
    model->scratch = arena_take(cursor, kern_attention_scratch(&model->attention, model->threads));
    model->dx = arena_take(cursor, model->stream_rows * c);
    model->dnorm = arena_take(cursor, n * c);
    model->datt = arena_take(cursor, n * model->q_dim);
    model->dq = arena_take(cursor, n * model->q_dim);
    model->dk = arena_take(cursor, n * model->kv_dim);
    model->dv = arena_take(cursor, n * model->kv_dim);
    model->dgate = arena_take(cursor, gpt2 ? 0 : n * f);
    model->dup = arena_take(cursor, n * f);
    model->dact = arena_take(cursor, n * f);
}

/* What tensor parallel ranks exchange. */
static void lay_out_tp(struct train_model *model, struct arena_cursor *cursor)
{
    uint64_t n = model->rows, c = model->config.dim, tp = model->part.tp;
    const uint64_t bound = sizeof *model->tp_bounds / sizeof(float);
    const uint64_t part = sizeof *model->tp_parts / sizeof(float);
    int sequence = model->part.sequence != 0;
    if (tp == 1) {
        return;
    }
    model->tp_bounds = (uint64_t *)(void *)arena_take(cursor, bound * (tp + 1));
    model->tp_parts = (struct comm_part *)(void *)arena_take(cursor, 2 * part * tp);
    model->whole = arena_take(cursor, sequence ? n * c : 0);
    model->norm_parts = arena_take(cursor, sequence ? 2 * c : 0);
    model->shared = arena_take(cursor, model->kv_sharers > 1 ? n * model->kv_dim + tp : 0);
}

/* Gives all arrays their places, and says how many bytes each kind takes. */
static void lay_out(struct train_model *model, float *arena)
{
    struct arena_cursor cursor = {arena, 0};
    struct model_layer_acts shared = {0};
    struct train_memory *memory = &model->memory;
    lay_out_scratch(model, &shared, &cursor);
    lay_out_tp(model, &cursor);
    memory->scratch = cursor.used * sizeof(float);
    if (has_head(model)) {
        model->logits = arena_take(&cursor, (uint64_t)model->rows * model->vocab);
        model->losses = (double *)(void *)arena_take(&cursor, 2ULL * model->rows);
        uint64_t others = model->part.tp > 1 ? (uint64_t)model->part.tp * model->rows : 0;
        model->tops = arena_take(&cursor, others);
        model->sums = (double *)(void *)arena_take(&cursor, 4 * others);
    }
    memory->logits = cursor.used * sizeof(float) - memory->scratch;
    for (uint32_t i = 0; i < model->part.sets; i++) {
        lay_out_set(model, i, &shared, &cursor);
    }
    memory->total = cursor.used * sizeof(float);
    memory->sets = memory->total - memory->logits - memory->scratch;
    memory->set = memory->sets / model->part.sets;
}

/* The sets and their layers, without memory behind them. */
static int take_sets(struct train_model *model, struct bl_errmsg *msg)
{
    for (uint32_t chunk = 0; chunk < model->part.chunks; chunk++) {
        uint32_t vstage = model_vstage(model, chunk);
        uint32_t layers = model->first_layer[vstage + 1] - model->first_layer[vstage];
        model->set_layers = layers > model->set_layers ? layers : model->set_layers;
    }
    model->logits_set = MODEL_NO_SET;
    model->sets = calloc(model->part.sets, sizeof *model->sets);
    model->layers = calloc((size_t)model->part.sets * model->set_layers, sizeof *model->layers);
    return model->sets == NULL || model->layers == NULL ? bl_err_code(msg, -ENOMEM, "model's sets")
                                                        : 0;
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
        rc = take_sets(model, msg);
    }
    if (rc < 0) {
        train_model_free(model);
        return rc;
    }
    lay_out(model, NULL);
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
    int rc = model_measure(&model, config, part, seq_len, micro_batch, threads, msg);
    if (rc < 0) {
        return rc;
    }
    void *arena = NULL;
    uint64_t bytes = model->memory.total;
    if (posix_memalign(&arena, 64, bytes) != 0) {
        train_model_free(model);
        return bl_err_code(msg, -ENOMEM, "model: %llu bytes of activations",
                           (unsigned long long)bytes);
    }
    model->arena = arena;
    lay_out(model, model->arena);
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
    free(model->sets);
    free(model->layers);
    free(model->tensors);
    free(model->units);
    free(model->first_layer);
    free(model);
}

int train_model_memory(struct train_memory *ret, const struct bl_job_model *config,
                       const struct train_part *part, uint32_t seq_len, uint32_t micro_batch,
                       uint32_t threads, struct bl_errmsg *msg)
{
    struct train_model *model = NULL;
    int rc = model_measure(&model, config, part, seq_len, micro_batch, threads, msg);
    if (rc == 0) {
        *ret = model->memory;
        train_model_free(model);
    }
    return rc;
}

uint64_t train_model_bytes(const struct bl_job_model *config, uint32_t seq_len,
                           uint32_t micro_batch, uint32_t threads)
{
    struct train_memory memory;
    int rc =
        train_model_memory(&memory, config, &TRAIN_PART_WHOLE, seq_len, micro_batch, threads, NULL);
    return rc == 0 ? memory.total : 0;
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
