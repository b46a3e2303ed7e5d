/* SPDX-License-Identifier: Apache-2.0 */
/* The classes of a job's ranks, and what a rank of each takes. */
#include "trainer/dryrun.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/lanes.h"
#include "trainer/backend.h"
#include "trainer/comm_engine.h"
#include "trainer/dryrun_parts.h"
#include "trainer/lane_rounds.h"
#include "trainer/lane_sum.h"
#include "trainer/stage.h"
#include "trainer/step.h"

#define RING_BYTES          (256u * 1024) /* of a pair of ranks of one node, each direction */
#define PROCESS_BYTES       (4u << 20)    /* program, stacks, tables: measured */
#define DEVICE_PLACES_BYTES (1u << 20)    /* of a device: what begins on a border of 256 bytes */
#define OPS_MAX             (50u * 1000u * 1000) /* of schedules, before the formula does */

#define DRY_NAME(name, text, help) text,
const char *const train_dry_memory_names[] = {TRAIN_DRY_MEMORY(DRY_NAME)};
const char *const train_dry_wire_names[] = {TRAIN_DRY_WIRE(DRY_NAME)};
#undef DRY_NAME

/* ---- loads of lanes ---- */

static uint32_t pieces_of(const struct bl_lane_plan *plan, uint32_t d)
{
    return plan->rank_first[d + 1] - plan->rank_first[d];
}

/* What lane_sum.c keeps for a replica depends on these alone. */
static struct dry_load load_of(const struct train_dry *dry, uint32_t d)
{
    struct dry_load load = {.pieces = pieces_of(&dry->plan, d)};
    for (uint32_t k = 0; k < load.pieces; k++) {
        uint32_t n = dry->plan.pieces[dry->plan.rank_pieces[dry->plan.rank_first[d] + k]].n;
        uint32_t deep = k + bl_lanes_stack(n);
        load.lanes += n;
        load.depth = deep > load.depth ? deep : load.depth;
    }
    if (train_place_has_rounds(dry->job, dry->pp)) {
        load.lanes = dry->job->lanes / dry->dp + (d < dry->job->lanes % dry->dp);
    }
    return load;
}

static int plan_loads(struct train_dry *dry, struct bl_errmsg *msg)
{
    int rc = bl_lanes_plan(&dry->plan, dry->job->lanes, dry->dp, msg);
    dry->load_of = calloc(dry->dp, sizeof *dry->load_of);
    dry->loads = calloc(dry->dp, sizeof *dry->loads);
    if (rc == 0 && (dry->load_of == NULL || dry->loads == NULL)) {
        rc = bl_err_code(msg, -ENOMEM, "%u replicas", dry->dp);
    }
    for (uint32_t d = 0; rc == 0 && d < dry->dp; d++) {
        struct dry_load load = load_of(dry, d);
        uint32_t i = 0;
        while (i < dry->load_count && memcmp(&dry->loads[i], &load, sizeof load) != 0) {
            i++;
        }
        dry->loads[i] = load;
        dry->load_count += i == dry->load_count;
        dry->load_of[d] = i;
    }
    return rc;
}

/* ---- schedules ---- */

/* Sets of activations of each stage under each load, and how busy it is. */
static int plan_schedules(struct train_dry *dry, struct bl_errmsg *msg)
{
    uint32_t pp = dry->pp;
    int rc = 0;
    dry->schedules = calloc((size_t)dry->load_count * pp, sizeof *dry->schedules);
    if (dry->schedules == NULL) {
        return bl_err_code(msg, -ENOMEM, "schedules");
    }
    for (uint32_t i = 0; i < dry->load_count; i++) {
        uint64_t micros = (uint64_t)dry->loads[i].lanes * dry->micro_batches;
        uint64_t work = 2 * micros * dry->chunks * pp * pp * dry->load_count;
        int is_exact = work <= OPS_MAX && micros <= UINT32_MAX;
        for (uint32_t p = 0; rc == 0 && p < pp; p++) {
            struct dry_schedule *s = &dry->schedules[i * pp + p];
            struct train_pipeline line;
            uint64_t bound = train_pipeline_bound(pp, p, dry->chunks);
            s->sets = (uint32_t)(bound < micros * dry->chunks ? bound : micros * dry->chunks);
            if (!is_exact) {
                continue;
            }
            rc = train_pipeline_make(&line, pp, p, dry->chunks, (uint32_t)micros, 1, msg);
            if (rc == 0) {
                *s = (struct dry_schedule){line.sets, line.busy, line.span};
                train_pipeline_close(&line);
            }
        }
    }
    return rc;
}

/* ---- a class ---- */

/* What a class is computed from. */
struct dry_subject {
    const struct train_dry *dry;
    struct train_grid grid;
    struct train_part part;
    const struct dry_load *load;
    struct train_model *table;
    struct train_shard shard;
    uint64_t tokens, stream_elems; /* of a micro-batch */
    uint64_t micros;
};

static int subject_open(struct dry_subject *s, struct bl_errmsg *msg)
{
    const struct bl_job *job = s->dry->job;
    uint32_t load = s->dry->load_of[s->grid.d];
    s->load = &s->dry->loads[load];
    s->micros = (uint64_t)s->load->lanes * s->dry->micro_batches;
    s->tokens = (uint64_t)job->train.micro_batch * job->train.seq_len;
    s->stream_elems = s->tokens / (job->sequence ? s->grid.tp : 1) * job->model.dim;
    s->part = (struct train_part){.tp = s->grid.tp,
                                  .tp_rank = s->grid.t,
                                  .pp = s->grid.pp,
                                  .stage = s->grid.p,
                                  .chunks = s->dry->chunks,
                                  .sets = s->dry->schedules[load * s->grid.pp + s->grid.p].sets,
                                  .recompute = job->train.recompute,
                                  .sequence = job->sequence,
                                  .head_chunk = job->train.head_chunk};
    int rc = train_model_new_table(&s->table, &job->model, &s->part, job->train.seq_len,
                                   job->train.micro_batch, msg);
    if (rc == 0) {
        rc = train_shard_init(&s->shard, s->table, &s->grid, job->zero, msg);
    }
    if (rc == 0) {
        train_shard_layout(&s->shard);
    }
    return rc;
}

static void subject_close(struct dry_subject *s)
{
    train_shard_close(&s->shard);
    train_model_free(s->table);
}

/* Elements that tensor parallel ranks have alike: *ret_out go to the others, the rest comes. */
static uint64_t alike_elems(const struct dry_subject *s, uint64_t *ret_out)
{
    const struct bl_job_model *c = &s->dry->job->model;
    uint64_t all = 0;
    uint32_t count;
    const struct train_tensor *tensors = train_model_tensors(s->table, &count);
    *ret_out = 0;
    for (uint32_t i = 0; s->grid.tp > 1 && i < count; i++) {
        const struct train_tensor *x = &tensors[i];
        int is_whole = x->elems == x->shape[0] * x->shape[1];
        int is_kv = strstr(x->name, ".k_proj.") != NULL || strstr(x->name, ".v_proj.") != NULL;
        uint32_t sharers = is_whole                            ? s->grid.tp
                           : is_kv && c->kv_heads < s->grid.tp ? s->grid.tp / c->kv_heads
                                                               : 1;
        if (x->local == TRAIN_NOT_HERE || sharers == 1) {
            continue;
        }
        uint64_t elems = x->owner == s->grid.t ? (sharers - 1) * x->elems : x->elems;
        *ret_out += x->owner == s->grid.t ? elems : 0;
        all += elems;
    }
    return all;
}

/* What a device has of them: all but slots, tokens, the norm's sums on the host, and the process.
 */
static uint64_t on_device(const struct dry_subject *s, const struct train_memory *model,
                          const struct train_dry_rank *r, const struct train_stage_config *stage)
{
    static const enum train_dry_memory whole[] = {TRAIN_DRY_WEIGHTS,     TRAIN_DRY_TIED_COPY,
                                                  TRAIN_DRY_STATE,       TRAIN_DRY_GRADIENTS,
                                                  TRAIN_DRY_ACTIVATIONS, TRAIN_DRY_LOGITS};
    const struct bl_job *job = s->dry->job;
    uint64_t out,
        losses = job->lanes > job->train.eval_batches ? job->lanes : job->train.eval_batches;
    uint64_t bytes = model->scratch + train_stage_bytes(stage) +
                     alike_elems(s, &out) * s->dry->kern->real_bytes +
                     ((s->shard.cut_hi - s->shard.cut_lo) / KERN_BLOCK + 1) * sizeof(double) +
                     losses * sizeof(double) + (job->ranks > 1 ? COMM_ENGINE_SCRATCH_BYTES : 0) +
                     DEVICE_PLACES_BYTES;
    for (size_t i = 0; i < sizeof whole / sizeof *whole; i++) {
        bytes += r->memory[whole[i]];
    }
    return bytes;
}

static int fill_memory(struct dry_subject *s, struct train_dry_rank *r, struct bl_errmsg *msg)
{
    const struct train_dry *dry = s->dry;
    const struct bl_job *job = dry->job;
    struct train_memory model;
    uint64_t out, *m = r->memory, flat = train_model_flat_elems(s->table);
    uint64_t real = dry->kern->real_bytes;
    uint32_t near = dry->per_node < job->ranks ? dry->per_node : job->ranks;
    int is_device = dry->kern->is_device != 0;
    const struct train_stage_config stage = {.model = s->table,
                                             .kern = dry->kern,
                                             .grid = s->grid,
                                             .chunks = s->part.chunks,
                                             .sets = s->part.sets,
                                             .tokens = s->tokens,
                                             .stream_elems = s->stream_elems};
    int rc = train_model_memory(&model, dry->kern, &job->model, &s->part, job->train.seq_len,
                                job->train.micro_batch, msg);
    if (rc != 0) {
        return rc;
    }
    int is_fetched = train_place_has_fetch(job, s->grid.pp);
    m[TRAIN_DRY_WEIGHTS] =
        (is_fetched ? train_fetch_elems(s->table, s->grid.dp) : train_model_local_elems(s->table)) *
        real;
    m[TRAIN_DRY_TIED_COPY] = is_fetched ? 0 : train_model_copy_elems(s->table) * real;
    m[TRAIN_DRY_STATE] = is_device ? train_state_bytes(&s->shard) : 0;
    m[TRAIN_DRY_SLOTS] = dry->slots * s->shard.slot_bytes;
    m[TRAIN_DRY_GRADIENTS] = train_place_has_rounds(job, s->grid.pp)
                                 ? lane_rounds_bytes(&s->shard, job->lanes)
                                 : lane_sum_bytes(&s->shard, job->lanes);
    m[TRAIN_DRY_MESSAGES] = train_stage_bytes(&stage) + train_stage_token_bytes(&stage) +
                            (s->grid.pp > 1 ? train_stage_early_bytes(&stage) : 0);
    m[TRAIN_DRY_GATHER] =
        alike_elems(s, &out) * real + (s->grid.tp + 1) * (flat / KERN_BLOCK) * sizeof(double);
    m[TRAIN_DRY_ACTIVATIONS] = model.sets;
    m[TRAIN_DRY_LOGITS] = model.logits;
    m[TRAIN_DRY_SCRATCH] = model.scratch + model.host;
    m[TRAIN_DRY_COMM] = job->ranks == 1 ? 0 : 2ull * (near - 1) * RING_BYTES;
    m[TRAIN_DRY_PROCESS] = PROCESS_BYTES;
    if (is_device) {
        m[TRAIN_DRY_COMM] += job->ranks == 1 ? 0 : COMM_ENGINE_SCRATCH_BYTES;
        m[TRAIN_DRY_SCRATCH] += DEVICE_PLACES_BYTES;
        r->device_sum = on_device(s, &model, r, &stage);
    }
    for (int i = 0; i < TRAIN_DRY_MEMORY_COUNT; i++) {
        r->memory_sum += m[i];
    }
    return 0;
}

/* ---- bytes on the wire ---- */

static uint64_t tp_bytes(const struct dry_subject *s)
{
    const struct bl_job *job = s->dry->job;
    uint64_t tp = s->grid.tp, out;
    uint64_t real = s->dry->kern->real_bytes;
    uint64_t sum = 2 * (tp - 1) * (s->tokens * job->model.dim / tp) * real;
    /* Sums of a layer; a recomputed one does without its last. */
    uint32_t passes = job->train.recompute == BL_RECOMPUTE_FULL ? 5 : 4;
    uint32_t layers = s->dry->layers_of[s->grid.p];
    uint64_t micro = layers * passes * sum;
    int is_first = s->grid.p == 0, is_last = s->grid.p + 1 == s->grid.pp;
    micro += is_first ? sum : 0;
    /* Largest logits and two sums of a row; again when chunks of them are made again. */
    uint64_t row = (tp - 1) * (sizeof(float) + 2 * sizeof(double));
    micro += is_last ? sum + (train_dry_has_chunks(job) ? 2 : 1) * row * s->tokens : 0;
    alike_elems(s, &out);
    return s->micros * micro + out * real;
}

static uint64_t pp_bytes(const struct dry_subject *s)
{
    int is_first = s->grid.p == 0, is_last = s->grid.p + 1 == s->grid.pp;
    uint64_t streams = 2 * s->part.chunks - is_first - is_last;
    uint64_t real = s->dry->kern->real_bytes;
    uint64_t bytes = s->micros * streams * s->stream_elems * real;
    if (s->shard.tied_bounds != NULL &&
        s->grid.pp > 1) { /* the tied head's gradient, its weights */
        uint32_t d = s->grid.d;
        uint64_t tied = s->shard.tied_bounds[d + 1] - s->shard.tied_bounds[d];
        bytes += is_last ? tied * sizeof(float) : 0;
        bytes += is_first ? train_shard_tied_elems(s->table) * real : 0;
    }
    return s->grid.pp == 1 ? 0 : bytes;
}

static void fill_wire(const struct dry_subject *s, struct train_dry_rank *r)
{
    const struct bl_job *job = s->dry->job;
    uint64_t cut = s->shard.cut_hi - s->shard.cut_lo, others = s->grid.dp - 1;
    uint64_t grads = train_model_grad_elems(s->table), tied = 0;
    int is_rounds = train_place_has_rounds(job, s->grid.pp);
    if (train_model_tied_elems(s->table) != 0 && s->shard.tied_bounds != NULL) {
        tied = s->shard.tied_bounds[s->grid.d + 1] - s->shard.tied_bounds[s->grid.d];
    }
    uint64_t sent = (is_rounds ? s->load->lanes : s->load->pieces) * (grads - cut - tied);
    uint64_t gathers = 1;
    if (train_place_has_fetch(job, s->grid.pp)) { /* before each forward and each backward */
        uint64_t rounds = is_rounds ? (job->lanes + s->grid.dp - 1) / s->grid.dp
                                    : s->dry->plan.load_max * (uint64_t)s->dry->micro_batches;
        gathers = 2 * rounds;
    }
    r->wire[TRAIN_DRY_WIRE_DP_GRADIENTS] =
        others == 0 ? 0 : (sent + (job->zero == 0 ? cut * others : 0)) * sizeof(float);
    r->wire[TRAIN_DRY_WIRE_DP_WEIGHTS] =
        job->zero == 0 ? 0 : gathers * cut * others * s->dry->kern->real_bytes;
    r->wire[TRAIN_DRY_WIRE_TP] = s->grid.tp == 1 ? 0 : tp_bytes(s);
    r->wire[TRAIN_DRY_WIRE_PP] = pp_bytes(s);
    for (int i = 0; i < TRAIN_DRY_WIRE_COUNT; i++) {
        r->wire_sum += r->wire[i];
    }
}

/* ---- classes ---- */

static int compute(const struct train_dry *dry, uint32_t rank, struct train_dry_rank *r,
                   struct bl_errmsg *msg)
{
    struct dry_subject s = {.dry = dry};
    memset(r, 0, sizeof *r);
    int rc = train_grid_make(&s.grid, rank, dry->job->ranks, dry->tp, dry->pp, msg);
    if (rc == 0) {
        rc = subject_open(&s, msg);
    }
    if (rc == 0) {
        rc = fill_memory(&s, r, msg);
    }
    if (rc == 0) {
        fill_wire(&s, r);
        r->lanes = s.load->lanes;
        r->sets = s.part.sets;
        for (uint32_t i = 0; i < s.shard.extent_count; i++) {
            r->own_elems += s.shard.extents[i].flat_hi - s.shard.extents[i].flat_lo;
        }
    }
    subject_close(&s);
    return rc;
}

/* The class of a rank, computed when it is asked for first. Replicas differ by the load of lanes,
 * and by whether floor(N d / dp) rounds up for their cut. */
int train_dry_rank(struct train_dry *dry, uint32_t rank, const struct train_dry_rank **ret,
                   struct bl_errmsg *msg)
{
    uint32_t place = rank % (dry->tp * dry->pp), d = rank / (dry->tp * dry->pp);
    uint64_t blocks = dry->blocks[place];
    uint64_t cut = blocks * (d + 1) / dry->dp - blocks * d / dry->dp;
    size_t at =
        ((size_t)place * dry->load_count + dry->load_of[d]) * 2 + (cut > blocks / dry->dp ? 1 : 0);
    int rc = 0;
    if (!dry->has_class[at]) {
        rc = compute(dry, rank, &dry->classes[at], msg);
        dry->has_class[at] = rc == 0;
    }
    *ret = &dry->classes[at];
    return rc;
}

/* Blocks of each place's local order; layers of each stage. */
static int plan_places(struct train_dry *dry, struct bl_errmsg *msg)
{
    const struct bl_job *job = dry->job;
    uint32_t places = dry->tp * dry->pp;
    size_t classes = (size_t)places * dry->load_count * 2;
    uint32_t *first = calloc((size_t)dry->pp * dry->chunks + 1, sizeof *first);
    dry->layers_of = calloc(dry->pp, sizeof *dry->layers_of);
    dry->blocks = calloc(places, sizeof *dry->blocks);
    dry->classes = calloc(classes, sizeof *dry->classes);
    dry->has_class = calloc(classes, 1);
    int rc = first == NULL || dry->layers_of == NULL || dry->blocks == NULL ||
                     dry->classes == NULL || dry->has_class == NULL
                 ? bl_err_code(msg, -ENOMEM, "classes of ranks")
                 : train_cut(&job->model, job->train.seq_len, dry->pp * dry->chunks, first, msg);
    for (uint32_t v = 0; rc == 0 && v < dry->pp * dry->chunks; v++) {
        dry->layers_of[v % dry->pp] += first[v + 1] - first[v];
    }
    free(first);
    for (uint32_t i = 0; rc == 0 && i < places; i++) {
        struct train_model *table = NULL;
        const struct train_part part = {.tp = dry->tp,
                                        .tp_rank = i % dry->tp,
                                        .pp = dry->pp,
                                        .stage = i / dry->tp,
                                        .chunks = dry->chunks,
                                        .sets = 1,
                                        .recompute = job->train.recompute,
                                        .sequence = job->sequence};
        rc = train_model_new_table(&table, &job->model, &part, job->train.seq_len,
                                   job->train.micro_batch, msg);
        dry->blocks[i] = rc == 0 ? train_model_local_elems(table) / KERN_BLOCK : 0;
        train_model_free(table);
    }
    return rc;
}

/* Sizes of the back end that the job would have here; of a device, which is not asked, the CPU's
 * with its storage type. */
static int open_sizes(struct train_dry *dry, struct bl_errmsg *msg)
{
    const struct bl_job *job = dry->job;
    if (dry->open_kern != NULL) {
        dry->kern = dry->open_kern;
        return 0;
    }
    int rc = kern_cpu_open_sizes(&dry->kern, job->threads != 0 ? job->threads : 1, msg);
    if (rc == 0 && !train_backend_is_cpu(job)) {
        dry->kern->is_device = 1;
        dry->kern->type = job->train.precision == BL_PRECISION_FP32 ? KERN_F32 : KERN_BF16;
        dry->kern->real_bytes = dry->kern->type == KERN_F32 ? 4 : 2;
    }
    return rc;
}

static int dry_new(struct train_dry **ret, const struct bl_job *job, uint32_t per_node,
                   uint32_t slots, struct kern *kern, struct bl_errmsg *msg)
{
    struct train_grid grid;
    int rc = train_grid_make(&grid, 0, job->ranks, job->tp, job->pp, msg);
    if (rc == 0) {
        rc = train_dry_check_layout(job, msg);
    }
    if (rc != 0) {
        return rc;
    }
    struct train_dry *dry = calloc(1, sizeof *dry);
    if (dry == NULL) {
        return bl_err_code(msg, -ENOMEM, "dry run");
    }
    uint32_t nodes = job->nodes_min != 0 ? job->nodes_min : 1;
    dry->job = job;
    dry->tp = grid.tp;
    dry->pp = grid.pp;
    dry->dp = grid.dp;
    dry->per_node = per_node != 0 ? per_node : (job->ranks + nodes - 1) / nodes;
    dry->slots = slots != 0 ? slots : 2 + (job->root_count != 0 ? job->root_count : 1);
    dry->chunks = train_grid_chunks(&grid, job->interleave, job->model.layers);
    dry->micro_batches = job->train.global_batch / (job->lanes * job->train.micro_batch);
    dry->open_kern = kern;
    rc = open_sizes(dry, msg);
    if (rc == 0) {
        rc = plan_loads(dry, msg);
    }
    if (rc == 0) {
        rc = plan_schedules(dry, msg);
    }
    if (rc == 0) {
        rc = plan_places(dry, msg);
    }
    if (rc != 0) {
        train_dry_free(dry);
        return rc;
    }
    *ret = dry;
    return 0;
}

int train_dry_new(struct train_dry **ret, const struct bl_job *job, uint32_t per_node,
                  uint32_t slots, struct bl_errmsg *msg)
{
    return dry_new(ret, job, per_node, slots, NULL, msg);
}

int train_dry_device_bytes(const struct bl_job *job, const struct train_grid *grid,
                           struct kern *kern, uint64_t *ret, struct bl_errmsg *msg)
{
    static struct bl_job here; /* too large for a stack */
    struct train_dry *dry = NULL;
    const struct train_dry_rank *rank;
    here = *job;
    here.ranks = grid->world;
    here.tp = grid->tp;
    here.pp = grid->pp;
    int rc = dry_new(&dry, &here, 0, 0, kern, msg);
    if (rc == 0) {
        rc = train_dry_rank(dry, grid->rank, &rank, msg);
    }
    *ret = rc == 0 ? rank->device_sum : 0;
    train_dry_free(dry);
    return rc;
}

void train_dry_free(struct train_dry *dry)
{
    if (dry != NULL) {
        if (dry->kern != NULL && dry->kern != dry->open_kern) {
            dry->kern->ops->close(dry->kern);
        }
        bl_lanes_close(&dry->plan);
        free(dry->loads);
        free(dry->load_of);
        free(dry->schedules);
        free(dry->layers_of);
        free(dry->blocks);
        free(dry->classes);
        free(dry->has_class);
        free(dry);
    }
}
