/* SPDX-License-Identifier: Apache-2.0 */
/* Sums over a dry run's ranks, the model's numbers, and what is refused. */
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "base/human.h"
#include "trainer/dryrun_parts.h"
#include "trainer/model.h"
#include "trainer/pipeline.h"

#define TRIES_MAX 1024u /* values of tp and pp that are tried for one that works */

/* ---- sums ---- */

/* Of the load with the most lanes: share of all stages' time. */
static void sum_bubble(const struct train_dry *dry, struct train_dry_sum *ret)
{
    uint32_t most = 0;
    for (uint32_t i = 1; i < dry->load_count; i++) {
        most = dry->loads[i].lanes > dry->loads[most].lanes ? i : most;
    }
    uint64_t busy = 0, span = 0;
    for (uint32_t p = 0; p < dry->pp; p++) {
        busy += dry->schedules[most * dry->pp + p].busy;
        span += dry->schedules[most * dry->pp + p].span;
    }
    ret->micros_max = dry->loads[most].lanes * dry->micro_batches;
    ret->is_bubble_exact = span != 0;
    double work = (double)ret->micros_max * dry->chunks, idle = (double)dry->pp - 1;
    ret->bubble = span != 0 ? 1 - (double)busy / (double)span : idle / (work + idle);
}

int train_dry_sum(struct train_dry *dry, struct train_dry_sum *ret, struct bl_errmsg *msg)
{
    struct train_dry_sum sum = {
        .per_node = dry->per_node, .slots = dry->slots, .chunks = dry->chunks};
    uint64_t rank_bytes = 0, node_bytes = 0;
    for (uint32_t rank = 0; rank < dry->job->ranks; rank++) {
        const struct train_dry_rank *r;
        int rc = train_dry_rank(dry, rank, &r, msg);
        if (rc != 0) {
            return rc;
        }
        node_bytes = (rank % dry->per_node == 0 ? 0 : node_bytes) + r->memory_sum - r->device_sum;
        if (node_bytes > sum.node_bytes) {
            sum.node_bytes = node_bytes;
            sum.node_max = rank / dry->per_node;
        }
        if (r->memory_sum > rank_bytes) {
            rank_bytes = r->memory_sum;
            sum.rank_max = rank;
        }
        sum.all_bytes += r->memory_sum;
        sum.wire_all += r->wire_sum;
        sum.wire_max = r->wire_sum > sum.wire_max ? r->wire_sum : sum.wire_max;
    }
    sum_bubble(dry, &sum);
    *ret = sum;
    return 0;
}

/* ---- the model ---- */

static uint64_t *module_of(struct train_dry_model *m, const char *name)
{
    static const struct {
        const char *part;
        size_t at;
    } modules[] = {
        {"embed_tokens", offsetof(struct train_dry_model, embedding)},
        {".wte.", offsetof(struct train_dry_model, embedding)},
        {".wpe.", offsetof(struct train_dry_model, positions)},
        {"norm", offsetof(struct train_dry_model, norms)},
        {".ln_", offsetof(struct train_dry_model, norms)},
        {"attn", offsetof(struct train_dry_model, attention)},
        {".mlp.", offsetof(struct train_dry_model, mlp)},
    };
    for (size_t i = 0; i < sizeof modules / sizeof *modules; i++) {
        if (strstr(name, modules[i].part) != NULL) {
            return (uint64_t *)(void *)((char *)m + modules[i].at);
        }
    }
    return &m->head;
}

int train_dry_has_chunks(const struct bl_job *job)
{
    uint64_t rows = (uint64_t)job->train.micro_batch * job->train.seq_len;
    return job->train.head_chunk != 0 && job->train.head_chunk < rows;
}

int train_dry_model(struct train_dry_model *ret, const struct bl_job *job, struct bl_errmsg *msg)
{
    const struct bl_job_model *c = &job->model;
    struct train_model *table;
    struct train_dry_model m = {0};
    const struct train_part whole = TRAIN_PART_WHOLE;
    int rc =
        train_model_new_table(&table, c, &whole, job->train.seq_len, job->train.micro_batch, msg);
    if (rc != 0) {
        return rc;
    }
    uint32_t count;
    const struct train_tensor *tensors = train_model_tensors(table, &count);
    for (uint32_t i = 0; i < count; i++) {
        *module_of(&m, tensors[i].name) += tensors[i].shape[0] * tensors[i].shape[1];
    }
    train_model_free(table);
    m.elems = m.embedding + m.positions + m.attention + m.mlp + m.norms + m.head;
    /* Multiply-adds of a token as train_cut has them: two operations each, forward once, backward
     * twice. */
    double dim = c->dim, kv = dim / c->heads * c->kv_heads;
    double mlp = (c->arch == BL_ARCH_GPT2 ? 2 : 3) * dim * c->hidden;
    double layers = c->layers * (dim * (2 * dim + 2 * kv) + mlp + dim * job->train.seq_len);
    m.flops = 6 * (layers + dim * c->vocab);
    m.flops_again = job->train.recompute == BL_RECOMPUTE_FULL ? 2 * layers : 0;
    m.flops_again += train_dry_has_chunks(job) ? 2 * dim * c->vocab : 0;
    *ret = m;
    return 0;
}

/* ---- what cannot be ---- */

/* Whether every slice and stage of a layout can be made; threads and the machine aside. */
static int try_layout(const struct bl_job *job, uint32_t tp, uint32_t pp, struct bl_errmsg *msg)
{
    struct train_grid grid;
    int rc = train_grid_make(&grid, 0, job->ranks, tp, pp, msg);
    if (rc == 0 && grid.dp > job->lanes) {
        rc = bl_err(msg, BL_ECONFIG, "%u replicas for %u lanes", grid.dp, job->lanes);
    }
    for (uint32_t end = 0; rc == 0 && end < 2; end++) { /* the first and the last of each */
        struct train_model *table = NULL;
        const struct train_part part = {
            .tp = tp,
            .tp_rank = end ? tp - 1 : 0,
            .pp = pp,
            .stage = end ? pp - 1 : 0,
            .chunks = train_grid_chunks(&grid, job->interleave, job->model.layers),
            .sets = 1,
            .recompute = job->train.recompute,
            .sequence = tp > 1 && job->sequence};
        rc = train_model_new_table(&table, &job->model, &part, job->train.seq_len,
                                   job->train.micro_batch, msg);
        train_model_free(table);
    }
    return rc;
}

/* The nearest value of tp (or pp) below and above that works, the other one kept; 0: none. */
static void nearest(const struct bl_job *job, int is_tp, uint32_t ret[2])
{
    uint32_t now = is_tp ? job->tp : job->pp;
    ret[0] = ret[1] = 0;
    for (uint32_t v = 1; v <= TRIES_MAX && v <= job->ranks && ret[1] == 0; v++) {
        uint32_t tp = is_tp ? v : job->tp, pp = is_tp ? job->pp : v;
        if (v == now || job->ranks % (tp * pp) != 0 || try_layout(job, tp, pp, NULL) != 0) {
            continue;
        }
        ret[v > now] = v;
    }
}

int train_dry_check_layout(const struct bl_job *job, struct bl_errmsg *msg)
{
    struct bl_errmsg why = {{0}};
    char text[160] = "";
    size_t used = 0;
    int rc = try_layout(job, job->tp, job->pp, &why);
    if (rc != BL_ECONFIG) {
        return rc == 0 ? 0 : bl_err(msg, rc, "%s", why.text);
    }
    for (int is_tp = 1; is_tp >= 0; is_tp--) {
        uint32_t near[2];
        nearest(job, is_tp, near);
        for (int i = 0; i < 2; i++) {
            if (near[i] != 0) {
                used += (size_t)snprintf(text + used, sizeof text - used, "%slayout.%s %u",
                                         used == 0 ? "" : " or ", is_tp ? "tp" : "pp", near[i]);
            }
        }
    }
    return used == 0
               ? bl_err(msg, rc, "%s", why.text)
               : bl_err(msg, rc, "%s (with %u ranks %s would work)", why.text, job->ranks, text);
}

/* ---- the machine ---- */

/* A number of a file, or 0. `key`: behind it, else at the start. */
static uint64_t number_in(const char *path, const char *key)
{
    char line[256];
    uint64_t value = 0;
    FILE *f = fopen(path, "re");
    while (f != NULL && value == 0 && fgets(line, sizeof line, f) != NULL) {
        if (strncmp(line, key, strlen(key)) == 0) {
            unsigned long long got = 0;
            value = sscanf(line + strlen(key), "%llu", &got) == 1 ? got : 0;
        }
    }
    if (f != NULL) {
        fclose(f);
    }
    return value;
}

uint64_t train_dry_machine_bytes(void)
{
    uint64_t all = number_in("/proc/meminfo", "MemTotal:") * 1024;
    uint64_t group = number_in("/sys/fs/cgroup/memory.max", ""); /* "max": 0 */
    return group != 0 && group < all ? group : all;
}

/* Bytes that `ranks` ranks take with a change; UINT64_MAX: cannot be. */
static uint64_t bytes_with(const struct bl_job *job, uint32_t ranks, uint32_t slots)
{
    struct train_dry *dry = NULL;
    struct train_dry_sum sum;
    uint64_t bytes = UINT64_MAX;
    if (train_dry_new(&dry, job, ranks, slots, NULL) == 0 && train_dry_sum(dry, &sum, NULL) == 0) {
        bytes = sum.node_bytes;
    }
    train_dry_free(dry);
    return bytes;
}

/* What would fit: a higher ZeRO stage, recomputing, both, one sequence at a time. */
static void suggest(struct bl_job *job, uint32_t slots, uint64_t available, char *text,
                    size_t bytes_max)
{
    const uint32_t zero = job->zero, recompute = job->train.recompute;
    const struct {
        uint32_t zero, recompute, micro_batch;
    } ways[] = {
        {1, recompute, job->train.micro_batch},
        {2, recompute, job->train.micro_batch},
        {3, recompute, job->train.micro_batch},
        {zero, BL_RECOMPUTE_FULL, job->train.micro_batch},
        {3, BL_RECOMPUTE_FULL, job->train.micro_batch},
        {3, BL_RECOMPUTE_FULL, 1},
    };
    snprintf(text, bytes_max, "no ZeRO stage and no recomputing makes it fit");
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        char human[BL_HUMAN_MAX];
        job->zero = ways[i].zero > zero ? ways[i].zero : zero;
        job->train.recompute = ways[i].recompute;
        job->train.micro_batch = ways[i].micro_batch;
        uint64_t bytes = bytes_with(job, job->ranks, slots);
        if (bytes <= available) {
            snprintf(text, bytes_max, "with layout.zero %u%s%s it is %s", job->zero,
                     ways[i].recompute == BL_RECOMPUTE_FULL ? ", train.recompute full" : "",
                     i == 5 ? ", train.micro_batch 1" : "", bl_human_bytes(human, bytes));
            return;
        }
    }
}

int train_dry_fits(const struct bl_job *job, uint32_t ranks, uint32_t slots, uint64_t available,
                   struct bl_errmsg *msg)
{
    static struct bl_job here; /* too large for a stack */
    char needed[BL_HUMAN_MAX], has[BL_HUMAN_MAX], way[160];
    struct train_dry *dry = NULL;
    struct train_dry_sum sum;
    here = *job;
    here.ranks = ranks;
    int rc = train_dry_new(&dry, &here, ranks, slots, msg);
    if (rc == 0) {
        rc = train_dry_sum(dry, &sum, msg);
    }
    train_dry_free(dry);
    if (rc != 0 || available == 0 || sum.node_bytes <= available) {
        return rc;
    }
    suggest(&here, slots, available, way, sizeof way);
    return bl_err(msg, BL_ECONFIG, "%u ranks need %s of memory, this machine has %s; %s", ranks,
                  bl_human_bytes(needed, sum.node_bytes), bl_human_bytes(has, available), way);
}
