/* SPDX-License-Identifier: Apache-2.0 */
/* `belay-train --describe-layout`: who is where, and who owns what. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/human.h"
#include "trainer/dryrun_parts.h"
#include "trainer/options.h"
#include "trainer/shard.h"

struct layout {
    const struct bl_job *job;
    struct train_dry *dry;
    struct train_model **tables; /* [stage][slice] */
    uint32_t *first_layer;       /* of virtual stages, and the end */
};

struct layout_rank {
    struct train_grid grid;
    uint32_t megatron;
    const struct train_dry_rank *dry;
    struct train_shard shard;
};

/* ---- what is described ---- */

static int layout_open(struct layout *l, const struct bl_job *job, struct bl_errmsg *msg)
{
    *l = (struct layout){.job = job};
    int rc = train_dry_new(&l->dry, job, 0, 0, msg);
    if (rc != 0) {
        return rc;
    }
    uint32_t tp = l->dry->tp, pp = l->dry->pp, vstages = pp * l->dry->chunks;
    l->tables = calloc((size_t)tp * pp, sizeof *l->tables);
    l->first_layer = calloc((size_t)vstages + 1, sizeof *l->first_layer);
    if (l->tables == NULL || l->first_layer == NULL) {
        return bl_err_code(msg, -ENOMEM, "layout");
    }
    rc = train_cut(&job->model, job->train.seq_len, vstages, l->first_layer, msg);
    for (uint32_t i = 0; rc == 0 && i < tp * pp; i++) {
        const struct train_part part = {.tp = tp,
                                        .tp_rank = i % tp,
                                        .pp = pp,
                                        .stage = i / tp,
                                        .chunks = l->dry->chunks,
                                        .sets = 1,
                                        .recompute = job->train.recompute,
                                        .sequence = job->sequence};
        rc = train_model_new_table(&l->tables[i], &job->model, &part, job->train.seq_len,
                                   job->train.micro_batch, msg);
    }
    return rc;
}

static void layout_close(struct layout *l)
{
    for (uint32_t i = 0; l->tables != NULL && i < l->dry->tp * l->dry->pp; i++) {
        train_model_free(l->tables[i]);
    }
    free(l->tables);
    free(l->first_layer);
    train_dry_free(l->dry);
}

static int rank_open(struct layout_rank *r, struct layout *l, uint32_t rank, struct bl_errmsg *msg)
{
    memset(r, 0, sizeof *r);
    int rc = train_grid_make(&r->grid, rank, l->job->ranks, l->dry->tp, l->dry->pp, msg);
    if (rc == 0) {
        rc = train_dry_rank(l->dry, rank, &r->dry, msg);
    }
    if (rc == 0) {
        const struct train_grid *g = &r->grid;
        r->megatron = (g->p * g->dp + g->d) * g->tp + g->t; /* its order: tp, dp, pp */
        rc = train_shard_init(&r->shard, l->tables[g->p * g->tp + g->t], g, l->job->zero, msg);
    }
    return rc;
}

/* "0-3,8-11": the layers of a stage, chunk by chunk. */
static void layers_text(const struct layout *l, uint32_t p, char *text, size_t bytes_max)
{
    size_t used = 0;
    text[0] = 0;
    for (uint32_t c = 0; c < l->dry->chunks && used < bytes_max; c++) {
        uint32_t v = c * l->dry->pp + p, lo = l->first_layer[v], hi = l->first_layer[v + 1];
        const char *comma = c == 0 ? "" : ",";
        int n = hi - lo > 1 ? snprintf(text + used, bytes_max - used, "%s%u-%u", comma, lo, hi - 1)
                            : snprintf(text + used, bytes_max - used, "%s%u", comma, lo);
        used += (size_t)n;
    }
}

/* ---- text ---- */

/* "3", "0-3", "0,4..12": `count` ranks from `first`, each `step` behind the last. */
static void group_text(uint32_t first, uint32_t step, uint32_t count, char *text, size_t bytes_max)
{
    uint32_t last = first + step * (count - 1);
    if (count == 1) {
        snprintf(text, bytes_max, "%u", first);
    } else if (step == 1) {
        snprintf(text, bytes_max, "%u-%u", first, last);
    } else if (count == 2) {
        snprintf(text, bytes_max, "%u,%u", first, last);
    } else {
        snprintf(text, bytes_max, "%u,%u..%u", first, first + step, last);
    }
}

static void owns_text(const struct layout_rank *r, char *text, size_t bytes_max)
{
    uint32_t count = r->shard.extent_count, tensors;
    const struct train_tensor *table = train_model_tensors(r->shard.model, &tensors);
    if (count == 0) {
        snprintf(text, bytes_max, "-");
        return;
    }
    const struct train_extent *first = &r->shard.extents[0], *last = &r->shard.extents[count - 1];
    snprintf(text, bytes_max, "%s[%llu] to %s[%llu]", table[first->tensor].name,
             (unsigned long long)first->flat_lo, table[last->tensor].name,
             (unsigned long long)last->flat_hi - 1);
}

static uint64_t state_bytes(const struct layout_rank *r)
{
    uint64_t elems = 0;
    for (uint32_t i = 0; i < r->shard.extent_count; i++) {
        elems += r->shard.extents[i].flat_hi - r->shard.extents[i].flat_lo;
    }
    return elems * TRAIN_PARTS * sizeof(float);
}

static void print_rank(const struct layout *l, const struct layout_rank *r)
{
    const struct train_grid *g = &r->grid;
    uint32_t tp = g->tp, pp = g->pp;
    char tp_text[48], pp_text[48], dp_text[48], layers[128], memory[BL_HUMAN_MAX],
        state[BL_HUMAN_MAX], owns[300];
    group_text(train_grid_at(g, 0, g->p, g->d), 1, tp, tp_text, sizeof tp_text);
    group_text(train_grid_at(g, g->t, 0, g->d), tp, pp, pp_text, sizeof pp_text);
    group_text(train_grid_at(g, g->t, g->p, 0), tp * pp, g->dp, dp_text, sizeof dp_text);
    layers_text(l, g->p, layers, sizeof layers);
    owns_text(r, owns, sizeof owns);
    printf("%6u %4u %4u %5u %8u  %-12s %-14s %-14s %-10s %10s %10s  %s\n", g->rank, g->t, g->p,
           g->d, r->megatron, tp_text, pp_text, dp_text, layers,
           bl_human_bytes(state, state_bytes(r)), bl_human_bytes(memory, r->dry->memory_sum), owns);
}

/* ---- JSON ---- */

static void json_group(const char *key, uint32_t first, uint32_t step, uint32_t count)
{
    printf("\"%s\":{\"first\":%u,\"step\":%u,\"count\":%u},", key, first, count == 1 ? 1 : step,
           count);
}

static void json_layers(const struct layout *l, uint32_t p)
{
    printf("\"layers\":[");
    for (uint32_t c = 0; c < l->dry->chunks; c++) {
        uint32_t v = c * l->dry->pp + p;
        printf("%s[%u,%u]", c == 0 ? "" : ",", l->first_layer[v], l->first_layer[v + 1]);
    }
    printf("],");
}

static void json_extents(const struct layout_rank *r)
{
    uint32_t tensors;
    const struct train_tensor *table = train_model_tensors(r->shard.model, &tensors);
    printf("\"extents\":[");
    for (uint32_t i = 0; i < r->shard.extent_count; i++) {
        const struct train_extent *e = &r->shard.extents[i];
        const struct train_tensor *x = &table[e->tensor];
        printf("%s{\"tensor\":\"%s\",\"box_lo\":[%llu,%llu],\"box_hi\":[%llu,%llu],\"lo\":%llu,"
               "\"hi\":%llu}",
               i == 0 ? "" : ",", x->name, (unsigned long long)x->lo[0],
               (unsigned long long)x->lo[1], (unsigned long long)x->hi[0],
               (unsigned long long)x->hi[1], (unsigned long long)e->flat_lo,
               (unsigned long long)e->flat_hi);
    }
    printf("],");
}

static void json_rank(const struct layout *l, const struct layout_rank *r)
{
    const struct train_grid *g = &r->grid;
    printf("%s{\"rank\":%u,\"t\":%u,\"p\":%u,\"d\":%u,\"megatron_rank\":%u,",
           g->rank == 0 ? "" : ",", g->rank, g->t, g->p, g->d, r->megatron);
    json_group("tp_group", train_grid_at(g, 0, g->p, g->d), 1, g->tp);
    json_group("pp_group", train_grid_at(g, g->t, 0, g->d), g->tp, g->pp);
    json_group("dp_group", train_grid_at(g, g->t, g->p, 0), g->tp * g->pp, g->dp);
    json_layers(l, g->p);
    json_extents(r);
    printf("\"state_bytes\":%llu,\"memory_bytes\":%llu}", (unsigned long long)state_bytes(r),
           (unsigned long long)r->dry->memory_sum);
}

/* ---- the command ---- */

static void print_head(const struct layout *l, int json)
{
    const struct bl_job *job = l->job;
    if (json) {
        printf("{\"schema\":1,\"job\":\"%s\",\"ranks\":%u,\"tp\":%u,\"pp\":%u,\"dp\":%u,"
               "\"zero\":%u,\"layout\":[",
               job->name, job->ranks, l->dry->tp, l->dry->pp, l->dry->dp, job->zero);
        return;
    }
    printf("job %s: %u ranks = tp %u x pp %u x dp %u, ZeRO %u; rank = (d * pp + p) * tp + t\n",
           job->name, job->ranks, l->dry->tp, l->dry->pp, l->dry->dp, job->zero);
    printf("%6s %4s %4s %5s %8s  %-12s %-14s %-14s %-10s %10s %10s  %s\n", "rank", "t", "p", "d",
           "megatron", "tp group", "pp group", "dp group", "layers", "state", "memory",
           "owns from and to");
}

static int describe(struct layout *l, int json, struct bl_errmsg *msg)
{
    int rc = 0;
    for (uint32_t rank = 0; rc == 0 && rank < l->job->ranks; rank++) {
        struct layout_rank r;
        rc = rank_open(&r, l, rank, msg);
        if (rc == 0 && json) {
            json_rank(l, &r);
        } else if (rc == 0) {
            print_rank(l, &r);
        }
        train_shard_close(&r.shard);
    }
    return rc;
}

int train_layout_main(const char *job_path, int json)
{
    struct bl_errmsg msg = {{0}};
    const struct bl_job *job = train_job_load(job_path);
    struct layout l;
    if (job == NULL) {
        return 2;
    }
    int rc = layout_open(&l, job, &msg);
    if (rc == 0) {
        print_head(&l, json);
        rc = describe(&l, json, &msg);
    }
    if (rc == 0 && json) {
        puts("]}");
    } else if (rc != 0) {
        fprintf(stderr, "belay-train: %s\n", msg.text);
        rc = rc == BL_ECONFIG ? 2 : 3;
    }
    layout_close(&l);
    return rc;
}
