/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which part of a model a rank has: heads, hidden units and vocabulary by tensor parallel rank,
 * layers by virtual stage.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/model_internal.h"

static int check_shape(const struct train_model *model, struct bl_errmsg *msg)
{
    const struct bl_job_model *c = &model->config;
    if (c->layers == 0 || c->layers > MODEL_LAYERS_MAX) {
        return bl_err(msg, BL_ECONFIG, "model.layers %u: 1 to %u", c->layers, MODEL_LAYERS_MAX);
    }
    if (c->dim == 0 || c->dim > MODEL_DIM_MAX || c->hidden == 0 || c->hidden > 4 * MODEL_DIM_MAX) {
        return bl_err(msg, BL_ECONFIG, "model.dim %u, model.hidden %u: 1 to %u and %u", c->dim,
                      c->hidden, MODEL_DIM_MAX, 4 * MODEL_DIM_MAX);
    }
    if (c->vocab == 0 || c->vocab > MODEL_VOCAB_MAX) {
        return bl_err(msg, BL_ECONFIG, "model.vocab %u: 1 to %u", c->vocab, MODEL_VOCAB_MAX);
    }
    if (c->heads == 0 || c->dim % c->heads != 0 ||
        (!model_is_gpt2(model) && c->dim / c->heads % 2 != 0)) {
        return bl_err(msg, BL_ECONFIG, "model.dim %u must be model.heads %u times %s number",
                      c->dim, c->heads, model_is_gpt2(model) ? "a whole" : "an even");
    }
    if (model_is_gpt2(model) &&
        (c->kv_heads != c->heads || c->context < model->seq_len || c->context > MODEL_SEQ_MAX)) {
        return bl_err(msg, BL_ECONFIG,
                      "gpt2: model.kv_heads %u must be model.heads %u, model.context %u must be "
                      "train.seq_len %u to %u",
                      c->kv_heads, c->heads, c->context, model->seq_len, MODEL_SEQ_MAX);
    }
    if (c->kv_heads == 0 || c->heads % c->kv_heads != 0) {
        return bl_err(msg, BL_ECONFIG, "model.heads %u must be a multiple of model.kv_heads %u",
                      c->heads, c->kv_heads);
    }
    if (!(c->rope_theta > 0.0 && c->rope_theta < 1e12)) {
        return bl_err(msg, BL_ECONFIG, "model.rope_theta %g: above 0, below 1e12", c->rope_theta);
    }
    if (!(c->norm_eps >= 0.0 && c->norm_eps < 1.0)) {
        return bl_err(msg, BL_ECONFIG, "model.norm_eps %g: at least 0, below 1", c->norm_eps);
    }
    if (model->seq_len == 0 || model->seq_len > MODEL_SEQ_MAX || model->micro_batch == 0 ||
        model->micro_batch > MODEL_BATCH_MAX ||
        (uint64_t)model->seq_len * model->micro_batch > MODEL_SEQ_MAX) {
        return bl_err(msg, BL_ECONFIG,
                      "train.seq_len %u, train.micro_batch %u: at least 1, together at most %u",
                      model->seq_len, model->micro_batch, MODEL_SEQ_MAX);
    }
    uint64_t tasks = (uint64_t)model->micro_batch * c->heads * ((model->seq_len + 63) / 64);
    if (tasks > KERN_TASKS_MAX) {
        return bl_err(msg, BL_ECONFIG,
                      "model.heads %u is too many for train.micro_batch %u, train.seq_len %u",
                      c->heads, model->micro_batch, model->seq_len);
    }
    return 0;
}

/* ---- slices ---- */

static uint32_t share(uint32_t count, uint32_t part, uint32_t parts)
{
    return (uint32_t)((uint64_t)count * part / parts);
}

/* What of the model cannot be cut for so many tensor parallel ranks, with its size; NULL: all can.
 */
static const char *slices_obstacle(const struct bl_job_model *c, uint32_t tp, uint32_t *ret_size)
{
    uint64_t per = (c->vocab + tp - 1) / tp;
    if (c->hidden < tp) {
        *ret_size = c->hidden;
        return "hidden";
    }
    if (per * (tp - 1) >= c->vocab) {
        *ret_size = c->vocab;
        return "vocab";
    }
    if (tp > c->kv_heads && tp % c->kv_heads != 0) {
        *ret_size = c->kv_heads;
        return "kv_heads";
    }
    if (tp > c->heads) {
        *ret_size = c->heads;
        return "heads";
    }
    return NULL;
}

static int check_slices(const struct train_model *model, struct bl_errmsg *msg)
{
    const struct bl_job_model *c = &model->config;
    uint32_t tp = model->part.tp, size, other;
    const char *what = slices_obstacle(c, tp, &size);
    if (what == NULL) {
        return 0;
    }
    uint32_t below = tp - 1, above = tp + 1; /* 1 can always be, and nothing beyond heads */
    while (slices_obstacle(c, below, &other) != NULL) {
        below--;
    }
    while (above <= c->heads && slices_obstacle(c, above, &other) != NULL) {
        above++;
    }
    char or_above[32] = "";
    if (above <= c->heads) {
        snprintf(or_above, sizeof or_above, " or %u", above);
    }
    return bl_err(msg, BL_ECONFIG,
                  "layout.tp %u: model.%s %u cannot be cut into so many slices; %u%s can be", tp,
                  what, size, below, or_above);
}

/* Heads of this tp rank. Whole key and value heads with their queries where there are enough; else
 * tp / kv_heads ranks share one key and value head and cut its queries. */
static void cut_heads(struct train_model *model)
{
    const struct bl_job_model *c = &model->config;
    uint32_t tp = model->part.tp, r = model->part.tp_rank, d = model->head_dim;
    uint32_t group = c->heads / c->kv_heads;
    uint32_t kv_lo, kv_hi, q_lo, q_hi, kv_owner = r;
    model->kv_sharers = 1;
    if (c->kv_heads >= tp) {
        kv_lo = share(c->kv_heads, r, tp);
        kv_hi = share(c->kv_heads, r + 1, tp);
        q_lo = kv_lo * group;
        q_hi = kv_hi * group;
    } else {
        uint32_t sharers = tp / c->kv_heads;
        model->kv_sharers = sharers;
        kv_lo = r / sharers;
        kv_hi = kv_lo + 1;
        kv_owner = kv_lo * sharers;
        q_lo = kv_lo * group + share(group, r % sharers, sharers);
        q_hi = kv_lo * group + share(group, r % sharers + 1, sharers);
    }
    model->span[MODEL_SPAN_Q] = (struct model_span){c->heads * d, q_lo * d, q_hi * d, r};
    model->span[MODEL_SPAN_KV] =
        (struct model_span){c->kv_heads * d, kv_lo * d, kv_hi * d, kv_owner};
    model->heads = q_hi - q_lo;
    model->kv_heads = kv_hi - kv_lo;
    model->q_dim = model->heads * d;
    model->kv_dim = model->kv_heads * d;
}

static int cut_slices(struct train_model *model, struct bl_errmsg *msg)
{
    const struct bl_job_model *c = &model->config;
    uint32_t tp = model->part.tp, r = model->part.tp_rank;
    uint32_t per = (c->vocab + tp - 1) / tp;
    int rc = check_slices(model, msg);
    if (rc != 0) {
        return rc;
    }
    uint32_t vocab_end = r + 1 < tp ? per * (r + 1) : c->vocab;
    model->span[MODEL_SPAN_ONE] = (struct model_span){1, 0, 1, 0};
    model->span[MODEL_SPAN_DIM] = (struct model_span){c->dim, 0, c->dim, 0};
    model->span[MODEL_SPAN_POSITION] = (struct model_span){c->context, 0, c->context, 0};
    model->span[MODEL_SPAN_HIDDEN] =
        (struct model_span){c->hidden, share(c->hidden, r, tp), share(c->hidden, r + 1, tp), r};
    model->span[MODEL_SPAN_VOCAB] = (struct model_span){c->vocab, per * r, vocab_end, r};
    model->hidden = model->span[MODEL_SPAN_HIDDEN].hi - model->span[MODEL_SPAN_HIDDEN].lo;
    model->vocab = vocab_end - per * r;
    cut_heads(model);
    return 0;
}

/* ---- stages ---- */

int train_cut(const struct bl_job_model *config, uint32_t seq_len, uint32_t vstages,
              uint32_t *ret_first_layer, struct bl_errmsg *msg)
{
    uint32_t layers = config->layers;
    if (vstages == 0 || vstages > layers) {
        return bl_err(msg, BL_ECONFIG,
                      "%u stages (layout.pp x layout.interleave) for %u layers: 1 to %u", vstages,
                      layers, layers);
    }
    uint64_t dim = config->dim, kv = dim / config->heads * config->kv_heads;
    uint64_t mlp = (config->arch == BL_ARCH_GPT2 ? 2 : 3) * dim * config->hidden;
    uint64_t layer = dim * (2 * dim + 2 * kv) + mlp + dim * seq_len;
    uint64_t head = dim * config->vocab;
    uint64_t least = UINT64_MAX;
    uint32_t last = 0, before = vstages - 1; /* layers of the last stage; stages before it */
    for (uint32_t k = 1; k <= layers - before; k++) {
        uint32_t most = before == 0 ? 0 : (layers - k + before - 1) / before;
        uint64_t cost = most * layer > k * layer + head ? most * layer : k * layer + head;
        if ((before != 0 || k == layers) && cost <= least) {
            least = cost;
            last = k;
        }
    }
    for (uint32_t s = 0; s < before; s++) { /* the later ones get what is over: they hold less */
        ret_first_layer[s] = share(layers - last, s, before);
    }
    ret_first_layer[before] = layers - last;
    ret_first_layer[vstages] = layers;
    return 0;
}

static int check_part(struct train_model *model, struct bl_errmsg *msg)
{
    struct train_part *p = &model->part;
    if (p->tp == 0 || p->tp > MODEL_TP_MAX || p->tp_rank >= p->tp) {
        return bl_err(msg, BL_ECONFIG, "rank %u of layout.tp %u: 1 to %u ranks", p->tp_rank, p->tp,
                      MODEL_TP_MAX);
    }
    if (p->pp == 0 || p->stage >= p->pp || p->chunks == 0 ||
        (uint64_t)p->pp * p->chunks > model->config.layers) {
        return bl_err(
            msg, BL_ECONFIG,
            "stage %u of layout.pp %u with layout.interleave %u: at most a stage for each "
            "of %u layers",
            p->stage, p->pp, p->chunks, model->config.layers);
    }
    if (p->sets == 0 || p->sets > MODEL_SETS_MAX) {
        return bl_err(msg, BL_ECONFIG, "%u sets of activations: 1 to %u", p->sets, MODEL_SETS_MAX);
    }
    if (p->recompute > BL_RECOMPUTE_FULL) {
        return bl_err(msg, BL_ECONFIG, "train.recompute %u: 0 to 2", p->recompute);
    }
    p->sequence = p->sequence && p->tp > 1;
    if (p->sequence && model->rows % p->tp != 0) {
        return bl_err(msg, BL_ECONFIG,
                      "layout.sequence: train.micro_batch x train.seq_len, %u, is no multiple of "
                      "layout.tp %u",
                      model->rows, p->tp);
    }
    model->head_rows =
        p->head_chunk != 0 && p->head_chunk < model->rows ? p->head_chunk : model->rows;
    model->stream_rows = p->sequence ? model->rows / p->tp : model->rows;
    return 0;
}

int model_part_init(struct train_model *model, struct bl_errmsg *msg)
{
    int rc = check_shape(model, msg);
    if (rc < 0) {
        return rc;
    }
    model->rows = model->seq_len * model->micro_batch;
    model->head_dim = model->config.dim / model->config.heads;
    rc = check_part(model, msg);
    if (rc == 0) {
        rc = cut_slices(model, msg);
    }
    if (rc < 0) {
        return rc;
    }
    model->attention = (struct kern_attention_shape){.batch = model->micro_batch,
                                                     .q_len = model->seq_len,
                                                     .kv_len = model->seq_len,
                                                     .heads = model->heads,
                                                     .kv_heads = model->kv_heads,
                                                     .head_dim = model->head_dim};
    model->vstages = model->part.pp * model->part.chunks;
    model->first_layer = calloc((size_t)model->vstages + 1, sizeof *model->first_layer);
    if (model->first_layer == NULL) {
        return bl_err_code(msg, -ENOMEM, "stages of a model");
    }
    return train_cut(&model->config, model->seq_len, model->vstages, model->first_layer, msg);
}

/* ---- units ---- */

static int is_here(const struct train_model *model, uint32_t vstage)
{
    return vstage % model->part.pp == model->part.stage;
}

int model_units_init(struct train_model *model, struct bl_errmsg *msg)
{
    uint32_t layers = model->config.layers, last = model->vstages - 1, stage = 0;
    model->unit_count = layers + 2 + (model->config.tied != 0);
    model->units = calloc(model->unit_count, sizeof *model->units);
    if (model->units == NULL) {
        return bl_err_code(msg, -ENOMEM, "units of a model");
    }
    for (uint32_t i = 0; i < model->tensor_count; i++) {
        const struct train_tensor *t = &model->tensors[i];
        model->units[t->unit].elems += model_block_align(t->elems);
    }
    for (uint32_t u = 0; u < layers + 2; u++) {
        struct train_unit *unit = &model->units[u];
        while (u >= 1 && u <= layers && u - 1 >= model->first_layer[stage + 1]) {
            stage++;
        }
        unit->vstage = u == 0 ? 0 : u <= layers ? stage : last;
        unit->offset = model->flat_elems;
        unit->local = is_here(model, unit->vstage) ? model->local_elems : TRAIN_NOT_HERE;
        model->flat_elems += unit->elems;
        model->local_elems += unit->local != TRAIN_NOT_HERE ? unit->elems : 0;
    }
    for (uint32_t i = 0; i < model->tensor_count; i++) {
        struct train_tensor *t = &model->tensors[i];
        const struct train_unit *unit = &model->units[t->unit];
        t->local = unit->local == TRAIN_NOT_HERE ? TRAIN_NOT_HERE
                                                 : unit->local + (t->offset - unit->offset);
    }
    if (model->config.tied) {
        int head = is_here(model, last);
        uint64_t elems = model_block_align(model->tensors[0].elems);
        model->units[layers + 2] = (struct train_unit){
            model->flat_elems, elems, head ? model->local_elems : TRAIN_NOT_HERE, last};
        model->tied_elems = head ? elems : 0;
        model->copy_elems = head && !is_here(model, 0) ? elems : 0;
    }
    return 0;
}

uint32_t model_unit_first(const struct train_model *model, uint32_t vstage)
{
    return vstage == 0 ? 0 : 1 + model->first_layer[vstage];
}

uint32_t model_unit_end(const struct train_model *model, uint32_t vstage)
{
    return vstage + 1 == model->vstages ? model->unit_count : 1 + model->first_layer[vstage + 1];
}

const struct train_unit *train_model_units(const struct train_model *model, uint32_t *ret_count)
{
    *ret_count = model->unit_count;
    return model->units;
}

uint64_t train_model_flat_elems(const struct train_model *model)
{
    return model->flat_elems;
}

uint64_t train_model_local_elems(const struct train_model *model)
{
    return model->local_elems;
}

uint64_t train_model_tied_elems(const struct train_model *model)
{
    return model->tied_elems;
}

uint64_t train_model_copy_elems(const struct train_model *model)
{
    return model->copy_elems;
}

uint64_t train_model_buffer_elems(const struct train_model *model)
{
    return model->local_elems + model->copy_elems;
}

uint64_t train_model_grad_elems(const struct train_model *model)
{
    return model->local_elems + model->tied_elems;
}
