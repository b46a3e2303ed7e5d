/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The life of a rank: what a job needs, what a place in the grid needs, what a generation needs.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/lanes.h"
#include "trainer/comm_staged.h"
#include "trainer/dryrun.h"
#include "trainer/step.h"

/* ---- a job ---- */

static int check_built(const struct bl_job *job, struct bl_errmsg *msg)
{
    if (job->train.reduction_fast) {
        return bl_err(msg, BL_ENOTBUILT, "this trainer has train.reduction exact only");
    }
    return 0;
}

/* The table of tensor parallel rank t of the whole model. */
static int new_table(struct train_model **ret, const struct bl_job *job, uint32_t t,
                     struct bl_errmsg *msg)
{
    struct train_part part = TRAIN_PART_WHOLE;
    part.tp = job->tp;
    part.tp_rank = t;
    part.recompute = job->train.recompute;
    part.sequence = job->sequence;
    return train_model_new_table(ret, &job->model, &part, job->train.seq_len,
                                 job->train.micro_batch, msg);
}

static int take_losses(struct train_rank *rank, struct bl_errmsg *msg)
{
    uint64_t bytes = rank->loss_count * sizeof *rank->losses;
    if (rank->losses == NULL) {
        rank->losses = malloc(bytes);
    }
    rank->pass_losses = rank->kern->ops->alloc(rank->kern, bytes);
    return rank->losses == NULL || rank->pass_losses == NULL ? bl_err_code(msg, -ENOMEM, "losses")
                                                             : 0;
}

/* Chooses the back end and opens it; a device without an arena, which is known with the place. */
static int open_backend(struct train_rank *rank, uint32_t local_rank, struct bl_errmsg *msg)
{
    int rc = train_backend_choose(&rank->backend, rank->job, local_rank, msg);
    if (rc == 0) {
        rc = train_backend_open(&rank->kern, &rank->backend, rank->pool, 0, msg);
    }
    return rc == 0 ? take_losses(rank, msg) : rc;
}

int train_rank_open(struct train_rank *rank, const struct bl_job *job, uint32_t local_rank,
                    uint32_t threads, struct bl_errmsg *msg)
{
    memset(rank, 0, sizeof *rank);
    rank->job = job;
    int rc = check_built(job, msg);
    if (rc != 0) {
        return rc;
    }
    uint32_t per_round = job->lanes * job->train.micro_batch;
    if (per_round == 0 || job->train.global_batch % per_round != 0) {
        return bl_err(msg, BL_ECONFIG,
                      "train.global_batch %u is not a multiple of lanes %u x "
                      "train.micro_batch %u",
                      job->train.global_batch, job->lanes, job->train.micro_batch);
    }
    rank->micro_batches = job->train.global_batch / per_round;
    threads = threads != 0 ? threads : job->threads;
    rank->threads = threads != 0 ? threads : 1;
    rank->loss_count = job->lanes > job->train.eval_batches ? job->lanes : job->train.eval_batches;
    rc = train_data_open(&rank->data, job, msg);
    if (rc == 0) {
        rc = kern_pool_new(&rank->pool, rank->threads, msg);
    }
    if (rc == 0) {
        rc = open_backend(rank, local_rank, msg);
    }
    return rc == 0 ? new_table(&rank->model, job, 0, msg) : rc;
}

/* Gives back what the place needs. Model and weights stay: the next place often has the same part,
 * and takes them as they are. */
static void leave_place(struct train_rank *rank)
{
    train_stage_free(rank->stage);
    rank->stage = NULL;
    lane_sum_free(rank->sum);
    lane_rounds_free(rank->rounds);
    rank->sum = NULL;
    rank->rounds = NULL;
    train_state_close(&rank->state);
    train_fetch_close(&rank->fetch);
    train_norm_close(&rank->norm);
    train_gather_close(&rank->gather);
    train_shard_close(&rank->shard);
    train_pipeline_close(&rank->pipeline);
}

static void free_params(struct train_rank *rank)
{
    if (rank->params != NULL) {
        rank->kern->ops->free(rank->kern, rank->params, rank->params_bytes);
    }
    rank->params = NULL;
    rank->params_bytes = 0;
}

void train_rank_close(struct train_rank *rank)
{
    train_rank_leave(rank);
    leave_place(rank);
    free_params(rank);
    free(rank->losses);
    train_model_free(rank->model);
    if (rank->kern != NULL) {
        rank->kern->ops->close(rank->kern); /* pass_losses too */
    }
    train_backend_close(&rank->backend);
    kern_pool_free(rank->pool);
    train_data_close(rank->data);
    memset(rank, 0, sizeof *rank);
}

/* ---- the memory of a device ---- */

/* Everything that lies in it is given back, and it itself. */
static void drop_kern(struct train_rank *rank)
{
    leave_place(rank);
    train_model_free(rank->model);
    rank->model = NULL;
    rank->has_passes = 0;
    free_params(rank);
    rank->pass_losses = NULL;
    rank->kern->ops->close(rank->kern);
    rank->kern = NULL;
}

/* The arena of a device is what the dry run says of the place; a place that wants more gets a
 * larger one. */
static int place_arena(struct train_rank *rank, const struct train_grid *grid,
                       struct bl_errmsg *msg)
{
    uint64_t bytes = 0;
    if (rank->kern == NULL) { /* the last one failed */
        int rc = train_backend_open(&rank->kern, &rank->backend, rank->pool, 0, msg);
        if (rc != 0) {
            return rc;
        }
        rank->arena_bytes = 0;
    }
    if (!rank->kern->is_device) {
        return 0;
    }
    int rc = train_dry_device_bytes(rank->job, grid, rank->kern, &bytes, msg);
    if (rc != 0 || bytes <= rank->arena_bytes) {
        return rc;
    }
    drop_kern(rank);
    rank->arena_bytes = bytes;
    rc = train_backend_open(&rank->kern, &rank->backend, rank->pool, bytes, msg);
    return rc == 0 ? take_losses(rank, msg) : rc;
}

/* ---- a place ---- */

int train_place_has_rounds(const struct bl_job *job, uint32_t pp)
{
    uint32_t per_round = job->lanes * job->train.micro_batch;
    return job->zero >= 2 && pp == 1 && job->train.global_batch == per_round;
}

int train_place_has_fetch(const struct bl_job *job, uint32_t pp)
{
    return job->zero == 3 && pp == 1;
}

static int has_rounds(const struct train_rank *rank)
{
    return train_place_has_rounds(rank->job, rank->grid.pp);
}

static int has_fetch(const struct train_rank *rank)
{
    return train_place_has_fetch(rank->job, rank->grid.pp);
}

/* The order of passes, and from it the model's part. */
static int place_pipeline(struct train_rank *rank, struct train_part *part, struct bl_errmsg *msg)
{
    const struct bl_job *job = rank->job;
    const struct train_grid *g = &rank->grid;
    struct bl_lane_plan plan;
    uint32_t chunks = train_grid_chunks(g, job->interleave, job->model.layers);
    int rc = bl_lanes_plan(&plan, job->lanes, g->dp, msg);
    if (rc != 0) {
        return rc;
    }
    uint32_t dealt = job->lanes / g->dp + (g->d < job->lanes % g->dp);
    uint32_t lanes = has_rounds(rank) ? dealt : bl_lanes_load(&plan, g->d);
    uint64_t micros = (uint64_t)lanes * rank->micro_batches;
    bl_lanes_close(&plan);
    if (micros > UINT32_MAX) {
        return bl_err(msg, BL_ELIMIT, "%llu micro-batches of a replica in one step",
                      (unsigned long long)micros);
    }
    rc = train_pipeline_make(&rank->pipeline, g->pp, g->p, chunks, (uint32_t)micros, 1, msg);
    *part = (struct train_part){.tp = g->tp,
                                .tp_rank = g->t,
                                .pp = g->pp,
                                .stage = g->p,
                                .chunks = chunks,
                                .sets = rank->pipeline.sets,
                                .recompute = job->train.recompute,
                                .sequence = job->sequence,
                                .head_chunk = job->train.head_chunk};
    return rc;
}

static int place_model(struct train_rank *rank, const struct train_part *part,
                       struct bl_errmsg *msg)
{
    const struct bl_job *job = rank->job;
    if (rank->has_passes && memcmp(&rank->part, part, sizeof *part) == 0) {
        return 0;
    }
    rank->has_passes = 0; /* the old part's memory goes before the new one's is taken */
    train_model_free(rank->model);
    rank->model = NULL;
    free_params(rank);
    int rc = train_model_new_part(&rank->model, rank->kern, &job->model, part, job->train.seq_len,
                                  job->train.micro_batch, msg);
    if (rc != 0) {
        return rc;
    }
    rank->part = *part;
    rank->has_passes = 1;
    return 0;
}

/* The working buffer, if there is one. */
static int place_params(struct train_rank *rank, struct bl_errmsg *msg)
{
    struct kern *k = rank->kern;
    uint64_t bytes = train_model_buffer_elems(rank->model) * k->real_bytes;
    if (has_fetch(rank)) {
        free_params(rank);
        return 0;
    }
    if (rank->params != NULL && rank->params_bytes == bytes) {
        return 0;
    }
    free_params(rank);
    rank->params_bytes = bytes;
    rank->params = k->ops->alloc(k, bytes);
    if (rank->params == NULL) {
        return bl_err_code(msg, -ENOMEM, "%llu bytes for weights", (unsigned long long)bytes);
    }
    if (k->is_device) { /* what lies between tensors is gathered too; the host's is zero */
        k->ops->zero(k, rank->params, bytes);
    }
    return 0;
}

/* Of the rank's part. */
static struct train_stage_config stage_config(const struct train_rank *rank)
{
    const struct bl_job *job = rank->job;
    const struct train_part *part = &rank->part;
    uint64_t tokens = (uint64_t)job->train.micro_batch * job->train.seq_len;
    return (struct train_stage_config){.model = rank->model,
                                       .kern = rank->kern,
                                       .grid = rank->grid,
                                       .chunks = part->chunks,
                                       .sets = part->sets,
                                       .tokens = tokens,
                                       .stream_elems = tokens / (part->sequence ? part->tp : 1) *
                                                       job->model.dim};
}

static int place_stage(struct train_rank *rank, struct bl_errmsg *msg)
{
    const struct train_stage_config config = stage_config(rank);
    return train_stage_new(&rank->stage, &config, msg);
}

/* What depends on how the other tensor parallel ranks' slices look. */
static int place_slices(struct train_rank *rank, struct bl_errmsg *msg)
{
    uint32_t tp = rank->grid.tp;
    struct train_model **tables = calloc(tp, sizeof *tables);
    uint64_t *flat = calloc(tp, sizeof *flat);
    int rc =
        tables == NULL || flat == NULL ? bl_err_code(msg, -ENOMEM, "tables of %u slices", tp) : 0;
    for (uint32_t t = 0; rc == 0 && t < tp; t++) {
        struct train_part part = rank->part;
        part.tp_rank = t;
        rc = train_model_new_table(&tables[t], &rank->job->model, &part, rank->job->train.seq_len,
                                   rank->job->train.micro_batch, msg);
        flat[t] = rc == 0 ? train_model_flat_elems(tables[t]) : 0;
    }
    if (rc == 0) {
        rc = train_norm_init(&rank->norm, &rank->shard, rank->kern, flat, msg);
    }
    if (rc == 0) {
        rc = train_gather_init(&rank->gather, &rank->shard, rank->kern, tables, msg);
    }
    for (uint32_t t = 0; tables != NULL && t < tp; t++) {
        train_model_free(tables[t]);
    }
    free(tables);
    free(flat);
    return rc;
}

static int take_place(struct train_rank *rank, struct bl_errmsg *msg)
{
    const struct bl_job *job = rank->job;
    struct train_part part;
    int rc = place_pipeline(rank, &part, msg);
    if (rc == 0) {
        rc = place_model(rank, &part, msg);
    }
    if (rc == 0) {
        rc = place_params(rank, msg);
    }
    if (rc == 0) {
        rc = train_shard_init(&rank->shard, rank->model, &rank->grid, job->zero, msg);
    }
    if (rc == 0) {
        rc = place_stage(rank, msg);
    }
    if (rc == 0 && rank->kern->is_device) {
        rc = train_state_init(&rank->state, rank->kern, &rank->shard, msg);
    }
    if (rc == 0) {
        rc = place_slices(rank, msg);
    }
    if (rc == 0 && has_fetch(rank)) {
        rc = train_fetch_init(&rank->fetch, &rank->shard, rank->kern, &rank->gather, msg);
    }
    if (rc == 0 && has_rounds(rank)) { /* last: they tell that there is a place */
        rc = lane_rounds_new(&rank->rounds, &rank->shard, rank->kern, job->lanes, msg);
    } else if (rc == 0) {
        rc = lane_sum_new(&rank->sum, &rank->shard, rank->kern, job->lanes, rank->part.chunks, msg);
    }
    return rc;
}

static int has_place(const struct train_rank *rank)
{
    return rank->sum != NULL || rank->rounds != NULL;
}

int train_rank_place(struct train_rank *rank, const struct train_grid *grid, struct bl_errmsg *msg)
{
    BL_ASSERT(rank->comm == NULL);
    if (has_place(rank) && memcmp(&rank->grid, grid, sizeof *grid) == 0) {
        return 0;
    }
    leave_place(rank);
    rank->grid = *grid;
    int rc = place_arena(rank, grid, msg);
    if (rc == 0) {
        rc = take_place(rank, msg);
    }
    if (rc != 0) {
        leave_place(rank);
    }
    return rc;
}

uint64_t train_rank_early_bytes(const struct train_rank *rank)
{
    const struct train_stage_config config = stage_config(rank);
    return train_stage_early_bytes(&config);
}

/* ---- a generation ---- */

static int new_group(struct comm_group **ret, struct comm *comm, const uint32_t *ranks,
                     uint32_t count, struct bl_errmsg *msg)
{
    return count == 1 ? 0 : comm_group_new(ret, comm, ranks, count, msg);
}

/* A world's list of ranks, to be filled; NULL: no memory. */
static uint32_t *new_ranks(const struct train_grid *g, struct bl_errmsg *msg)
{
    uint32_t *ranks = calloc(g->world, sizeof *ranks);
    if (ranks == NULL) {
        bl_err_code(msg, -ENOMEM, "groups of %u ranks", g->world);
    }
    return ranks;
}

int train_rank_join(struct train_rank *rank, struct comm *comm, struct bl_errmsg *msg)
{
    const struct train_grid *g = &rank->grid;
    BL_ASSERT(has_place(rank) && rank->comm == NULL);
    if (comm == NULL) {
        BL_ASSERT(g->world == 1);
        return 0;
    }
    uint32_t *ranks = new_ranks(g, msg);
    if (ranks == NULL) {
        return -ENOMEM;
    }
    rank->comm = comm;
    train_grid_tp_group(g, ranks);
    int rc = new_group(&rank->tp_host, comm, ranks, g->tp, msg);
    if (rc == 0 && !rank->kern->is_device) { /* the host's memory is the back end's */
        rank->tp = rank->tp_host;
        train_grid_dp_group(g, ranks);
        rc = new_group(&rank->dp, comm, ranks, g->dp, msg);
    }
    if (rc == 0) {
        for (uint32_t i = 0; i < g->dp * g->pp; i++) {
            ranks[i] = train_grid_at(g, g->t, i % g->pp, i / g->pp);
        }
        rc = new_group(&rank->plane, comm, ranks, g->dp * g->pp, msg);
    }
    free(ranks);
    return rc;
}

static int engine_group(struct comm_group **ret, struct comm *comm, const uint32_t *ranks,
                        uint32_t count, struct bl_errmsg *msg)
{
    return count == 1 ? 0 : comm_group_on_engine(ret, comm, ranks, count, msg);
}

static void add_channel(struct comm_channel *list, uint32_t *count, uint32_t from, uint32_t to,
                        uint32_t kind)
{
    list[(*count)++] = (struct comm_channel){from, to, kind};
}

/* Between the stages of all replicas and slices. */
static int open_channels(struct train_rank *rank, struct bl_errmsg *msg)
{
    const struct train_grid *g = &rank->grid;
    int is_tied = rank->shard.tied_bounds != NULL, is_ring = rank->part.chunks > 1;
    uint32_t count = 0, columns = g->tp * g->dp;
    struct comm_channel *list = calloc((size_t)columns * (2 * g->pp + 2), sizeof *list);
    if (list == NULL) {
        return bl_err_code(msg, -ENOMEM, "channels of %u stages", g->pp);
    }
    for (uint32_t i = 0; i < columns; i++) {
        uint32_t t = i % g->tp, d = i / g->tp;
        uint32_t first = train_grid_at(g, t, 0, d), last = train_grid_at(g, t, g->pp - 1, d);
        for (uint32_t p = 0; p + !is_ring < g->pp; p++) {
            uint32_t here = train_grid_at(g, t, p, d);
            uint32_t next = train_grid_at(g, t, (p + 1) % g->pp, d);
            add_channel(list, &count, here, next, COMM_CHANNEL_FORWARD);
            add_channel(list, &count, next, here, COMM_CHANNEL_BACKWARD);
        }
        if (is_tied) {
            add_channel(list, &count, first, last, COMM_CHANNEL_EMBED);
            add_channel(list, &count, last, first, COMM_CHANNEL_TIED);
        }
    }
    int rc = comm_channels_open(rank->comm, list, count, msg);
    free(list);
    return rc;
}

int train_rank_attach(struct train_rank *rank, uint32_t deadline_ms, struct bl_errmsg *msg)
{
    const struct train_grid *g = &rank->grid;
    const struct comm_engine_ops *ops = rank->backend.engine;
    ops = ops != NULL ? ops : comm_staged_ops();
    struct comm_engine *engine;
    if (rank->comm == NULL || !rank->kern->is_device) {
        return 0;
    }
    uint32_t *ranks = new_ranks(g, msg);
    if (ranks == NULL) {
        return -ENOMEM;
    }
    int rc = ops->open(&engine, rank->kern, rank->comm, deadline_ms, msg);
    if (rc == 0) {
        comm_attach(rank->comm, ops, engine);
        train_grid_tp_group(g, ranks);
        rc = engine_group(&rank->tp, rank->comm, ranks, g->tp, msg);
    }
    if (rc == 0) {
        train_grid_dp_group(g, ranks);
        rc = engine_group(&rank->dp, rank->comm, ranks, g->dp, msg);
    }
    if (rc == 0 && g->pp > 1) {
        rc = open_channels(rank, msg);
    }
    free(ranks);
    return rc;
}

void train_rank_leave(struct train_rank *rank)
{
    if (rank->tp != rank->tp_host) {
        comm_group_free(rank->tp);
    }
    comm_group_free(rank->tp_host);
    comm_group_free(rank->dp);
    comm_group_free(rank->plane);
    rank->tp = rank->tp_host = rank->dp = rank->plane = NULL;
    rank->comm = NULL;
}
