/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Making a model: all memory that its passes need is counted once and taken once, from the back
 * end.
 */
#include "trainer/model.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "trainer/comm.h"
#include "trainer/model_internal.h"

/* Arrays start on so many bytes; a device reads whole lines. */
#define ARENA_ALIGN        64u
#define ARENA_ALIGN_DEVICE 256u

void *model_take(struct model_arena *arena, uint64_t bytes)
{
    char *at = arena->memory == NULL ? NULL : arena->memory + arena->used;
    arena->used += bl_round_up(bytes, arena->kern->is_device ? ARENA_ALIGN_DEVICE : ARENA_ALIGN);
    return at;
}

/* Arrays of a layer by how long recomputation lets them live: those that none keeps and selective
 * makes again, those that only full makes again, and the layer's input. */
static void lay_out_elementwise(const struct train_model *model, struct model_layer_acts *a,
                                struct model_arena *arena)
{
    uint64_t n = model->rows, c = model->config.dim;
    a->norm1 = model_take_real(arena, n * c);
    a->norm2 = model_take_real(arena, n * c);
    a->act = model_take_real(arena, n * model->hidden);
}

static void lay_out_products(const struct train_model *model, struct model_layer_acts *a,
                             struct model_arena *arena)
{
    uint64_t n = model->rows, stream = model->stream_rows, c = model->config.dim;
    int gpt2 = model_is_gpt2(model);
    a->rstd1 = model_take_f32(arena, stream);
    a->mean1 = model_take_f32(arena, gpt2 ? stream : 0);
    a->q = model_take_real(arena, n * model->q_dim);
    a->k = model_take_real(arena, n * model->kv_dim);
    a->v = model_take_real(arena, n * model->kv_dim);
    a->att = model_take_real(arena, n * model->q_dim);
    a->stats = model_take_f32(arena, n * model->heads * 2);
    a->mid = model_take_real(arena, stream * c);
    a->rstd2 = model_take_f32(arena, stream);
    a->mean2 = model_take_f32(arena, gpt2 ? stream : 0);
    a->gate = model_take_real(arena, gpt2 ? 0 : n * model->hidden);
    a->up = model_take_real(arena, n * model->hidden);
}

static int has_embedding(const struct train_model *model)
{
    return model->part.stage == 0;
}

static int has_head(const struct train_model *model)
{
    return model->part.stage + 1 == model->part.pp;
}

/* What the back end makes of tokens. */
static void lay_out_tokens(const struct train_model *model, struct kern_tokens *tokens, int is_here,
                           struct model_arena *arena)
{
    uint64_t bytes = is_here ? model->kern->ops->tokens_bytes(model->kern, model->rows) : 0;
    void *memory = model_take(arena, bytes);
    tokens->memory = bytes != 0 ? memory : NULL;
}

/* `shared`: what recomputation lets all layers use one after the other. */
static void lay_out_set(struct train_model *model, uint32_t index,
                        const struct model_layer_acts *shared, struct model_arena *arena)
{
    struct model_set *set = &model->sets[index];
    uint64_t stream = model->stream_rows, c = model->config.dim;
    set->layers = &model->layers[(size_t)index * model->set_layers];
    lay_out_tokens(model, &set->tokens, has_embedding(model), arena);
    lay_out_tokens(model, &set->targets, has_head(model), arena);
    for (uint32_t i = 0; i < model->set_layers; i++) {
        struct model_layer_acts *a = &set->layers[i];
        *a = *shared;
        a->x = model_take_real(arena, stream * c);
        if (model->part.recompute != BL_RECOMPUTE_FULL) {
            lay_out_products(model, a, arena);
        }
        if (model->part.recompute == BL_RECOMPUTE_NONE) {
            lay_out_elementwise(model, a, arena);
        }
    }
    if (has_head(model)) {
        set->x = model_take_real(arena, stream * c);
        set->norm = model_take_real(arena, (uint64_t)model->rows * c);
        set->rstd = model_take_f32(arena, stream);
        set->mean = model_take_f32(arena, model_is_gpt2(model) ? stream : 0);
    }
}

/* Of the operations that want scratch, one at a time, the one that wants most. */
static uint64_t scratch_bytes(const struct train_model *model)
{
    struct kern *k = model->kern;
    const uint32_t widths[] = {model->config.dim, model->q_dim, model->kv_dim, model->hidden};
    uint64_t most = k->ops->attention_scratch(k, &model->attention);
    for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++) {
        uint64_t bytes = k->ops->norm_scratch(k, model->rows, widths[i]);
        most = bytes > most ? bytes : most;
    }
    return most;
}

static void lay_out_scratch(struct train_model *model, struct model_layer_acts *shared,
                            struct model_arena *arena)
{
    uint64_t n = model->rows, c = model->config.dim, f = model->hidden;
    int gpt2 = model_is_gpt2(model);
    if (model->part.recompute == BL_RECOMPUTE_FULL) {
        lay_out_products(model, shared, arena);
    }
    if (model->part.recompute != BL_RECOMPUTE_NONE) {
        lay_out_elementwise(model, shared, arena);
    }
    model->rope = model_take_f32(arena, gpt2 ? 0 : (uint64_t)model->seq_len * model->head_dim);
    model->scratch = model_take(arena, scratch_bytes(model));
    model->dx = model_take_real(arena, model->stream_rows * c);
    model->dnorm = model_take_real(arena, n * c);
    model->datt = model_take_real(arena, n * model->q_dim);
    model->dq = model_take_real(arena, n * model->q_dim);
    model->dk = model_take_real(arena, n * model->kv_dim);
    model->dv = model_take_real(arena, n * model->kv_dim);
    model->dgate = model_take_real(arena, gpt2 ? 0 : n * f);
    model->dup = model_take_real(arena, n * f);
    model->dact = model_take_real(arena, n * f);
}

/* What tensor parallel ranks exchange. */
static void lay_out_tp(struct train_model *model, struct model_arena *arena)
{
    uint64_t n = model->rows, c = model->config.dim, tp = model->part.tp;
    int sequence = model->part.sequence != 0;
    if (tp == 1) {
        return;
    }
    model->whole = model_take_real(arena, sequence ? n * c : 0);
    model->norm_parts = model_take_f32(arena, sequence ? 2 * c : 0);
    model->shared =
        model_take_real(arena, model->kv_sharers > 1 ? n * model->kv_dim + MODEL_SLICE * tp : 0);
}

static void lay_out_head(struct train_model *model, struct model_arena *arena)
{
    uint64_t n = model->head_rows, parts = model->part.tp > 1 ? model->part.tp * n : 0;
    model->logits = model_take_real(arena, n * model->vocab);
    model->losses = model_take_f64(arena, model->rows);
    model->loss = model_take_f64(arena, 1);
    model->tops = model_take_f32(arena, parts);
    model->sums = model_take_f64(arena, 2 * parts);
}

/* Gives all arrays their places, and says how many bytes each kind takes. */
static void lay_out(struct train_model *model, char *arena)
{
    struct model_arena cut = {model->kern, arena, 0};
    struct model_layer_acts shared = {0};
    struct train_memory *memory = &model->memory;
    lay_out_scratch(model, &shared, &cut);
    lay_out_tp(model, &cut);
    memory->scratch = cut.used;
    if (has_head(model)) {
        lay_out_head(model, &cut);
    }
    memory->logits = cut.used - memory->scratch;
    for (uint32_t i = 0; i < model->part.sets; i++) {
        lay_out_set(model, i, &shared, &cut);
    }
    memory->total = cut.used;
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

/* Lists of what tensor parallel ranks exchange, on the host. */
static int take_lists(struct train_model *model, struct bl_errmsg *msg)
{
    size_t tp = model->part.tp;
    if (tp == 1) {
        return 0;
    }
    model->memory.host = (tp + 1) * sizeof *model->tp_bounds + 2 * tp * sizeof *model->tp_parts;
    model->tp_bounds = calloc(tp + 1, sizeof *model->tp_bounds);
    model->tp_parts = calloc(2 * tp, sizeof *model->tp_parts);
    return model->tp_bounds == NULL || model->tp_parts == NULL
               ? bl_err_code(msg, -ENOMEM, "lists of %zu tensor parallel ranks", tp)
               : 0;
}

int train_model_new_table(struct train_model **ret, const struct bl_job_model *config,
                          const struct train_part *part, uint32_t seq_len, uint32_t micro_batch,
                          struct bl_errmsg *msg)
{
    struct train_model *model = calloc(1, sizeof *model);
    if (model == NULL) {
        return bl_err_code(msg, -ENOMEM, "model");
    }
    model->config = *config;
    model->part = *part;
    model->seq_len = seq_len;
    model->micro_batch = micro_batch;
    int rc = model_table_init(model, msg);
    if (rc < 0) {
        train_model_free(model);
        return rc;
    }
    *ret = model;
    return 0;
}

/* Table and sizes on a back end, without the arena. */
static int model_measure(struct train_model **ret, struct kern *kern,
                         const struct bl_job_model *config, const struct train_part *part,
                         uint32_t seq_len, uint32_t micro_batch, struct bl_errmsg *msg)
{
    struct train_model *model = NULL;
    int rc = train_model_new_table(&model, config, part, seq_len, micro_batch, msg);
    if (rc < 0) {
        return rc;
    }
    model->kern = kern;
    rc = take_sets(model, msg);
    if (rc == 0) {
        rc = take_lists(model, msg);
    }
    if (rc < 0) {
        train_model_free(model);
        return rc;
    }
    lay_out(model, NULL);
    *ret = model;
    return 0;
}

static void rope_table(const struct train_model *model, float *table, uint32_t positions)
{
    const struct bl_job_model *c = &model->config;
    const struct kern_rope_scaling scaling = {c->rope_factor, c->rope_low, c->rope_high,
                                              c->rope_context};
    kern_rope_table(table, positions, model->head_dim, c->rope_theta,
                    c->rope_factor > 1.0 ? &scaling : NULL);
}

int train_model_new(struct train_model **ret, struct kern *kern, const struct bl_job_model *config,
                    uint32_t seq_len, uint32_t micro_batch, struct bl_errmsg *msg)
{
    return train_model_new_part(ret, kern, config, &TRAIN_PART_WHOLE, seq_len, micro_batch, msg);
}

int model_rope_upload(const struct train_model *model, float *table, uint32_t positions,
                      struct bl_errmsg *msg)
{
    struct kern *k = model->kern;
    uint64_t bytes = (uint64_t)positions * model->head_dim * sizeof(float);
    if (model_is_gpt2(model)) {
        return 0;
    }
    float *host = malloc(bytes);
    if (host == NULL) {
        return bl_err_code(msg, -ENOMEM, "rotary table of %u positions", positions);
    }
    rope_table(model, host, positions);
    k->ops->upload(k, table, host, bytes);
    int rc = k->ops->sync(k, msg);
    free(host);
    return rc;
}

int train_model_new_part(struct train_model **ret, struct kern *kern,
                         const struct bl_job_model *config, const struct train_part *part,
                         uint32_t seq_len, uint32_t micro_batch, struct bl_errmsg *msg)
{
    struct train_model *model = NULL;
    int rc = model_measure(&model, kern, config, part, seq_len, micro_batch, msg);
    if (rc < 0) {
        return rc;
    }
    uint64_t bytes = model->memory.total;
    model->arena = kern->ops->alloc(kern, bytes);
    if (model->arena == NULL) {
        train_model_free(model);
        return bl_err_code(msg, -ENOMEM, "model: %llu bytes of activations",
                           (unsigned long long)bytes);
    }
    lay_out(model, model->arena);
    rc = model_rope_upload(model, model->rope, seq_len, msg);
    if (rc == 0) {
        rc = model_plan_products(model, model->rows, msg);
    }
    if (rc < 0) {
        train_model_free(model);
        return rc;
    }
    *ret = model;
    return 0;
}

void train_model_free(struct train_model *model)
{
    if (model == NULL) {
        return;
    }
    if (model->kern != NULL) {
        model->kern->ops->free(model->kern, model->arena, model->memory.total);
    }
    free(model->tp_bounds);
    free(model->tp_parts);
    free(model->sets);
    free(model->layers);
    free(model->tensors);
    free(model->units);
    free(model->first_layer);
    free(model);
}

int train_model_memory(struct train_memory *ret, struct kern *kern,
                       const struct bl_job_model *config, const struct train_part *part,
                       uint32_t seq_len, uint32_t micro_batch, struct bl_errmsg *msg)
{
    struct train_model *model = NULL;
    int rc = model_measure(&model, kern, config, part, seq_len, micro_batch, msg);
    if (rc == 0) {
        *ret = model->memory;
        model->kern = NULL; /* it has sizes only */
        train_model_free(model);
    }
    return rc;
}

int model_tokens_check(const struct train_model *model, const int32_t *tokens, uint64_t count,
                       int32_t lowest, const char *what, uint64_t *ret_count, struct bl_errmsg *msg)
{
    uint64_t counted = 0;
    for (uint64_t i = 0; i < count; i++) {
        if (tokens[i] < lowest || tokens[i] >= (int32_t)model->config.vocab) {
            return bl_err(msg, BL_ELIMIT, "%s %llu is %d: not in a vocabulary of %u", what,
                          (unsigned long long)i, tokens[i], model->config.vocab);
        }
        counted += tokens[i] >= 0;
    }
    *ret_count = counted;
    return 0;
}
