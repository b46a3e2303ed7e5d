/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/norm.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Blocks of the local order of stage p. */
static uint64_t stage_blocks(const struct train_shard *shard, uint32_t p)
{
    uint32_t count;
    const struct train_unit *units = train_model_units(shard->model, &count);
    uint64_t elems = 0;
    for (uint32_t u = 0; u < count; u++) {
        if (units[u].vstage % shard->grid.pp == p &&
            units[u].offset < train_model_flat_elems(shard->model)) {
            elems += units[u].elems;
        }
    }
    return elems / KERN_BLOCK;
}

static void mark_foreign(struct train_norm *norm)
{
    const struct train_shard *shard = norm->shard;
    uint32_t count;
    const struct train_tensor *tensors = train_model_tensors(shard->model, &count);
    for (uint32_t i = 0; i < count; i++) {
        const struct train_tensor *t = &tensors[i];
        if (t->local == TRAIN_NOT_HERE || t->owner == shard->grid.t) {
            continue;
        }
        for (uint64_t at = t->local; at < t->local + t->elems; at += KERN_BLOCK) {
            if (at >= shard->cut_lo && at < shard->cut_hi) {
                norm->is_foreign[(at - shard->cut_lo) / KERN_BLOCK] = 1;
            }
        }
    }
}

int train_norm_init(struct train_norm *norm, const struct train_shard *shard, struct kern *kern,
                    const uint64_t *flat_elems, struct bl_errmsg *msg)
{
    const struct train_grid *g = &shard->grid;
    uint64_t own = (shard->cut_hi - shard->cut_lo) / KERN_BLOCK, blocks = 0;
    memset(norm, 0, sizeof *norm);
    norm->shard = shard;
    norm->kern = kern;
    for (uint32_t t = 0; t < g->tp; t++) {
        blocks += flat_elems[t] / KERN_BLOCK;
    }
    norm->sums = calloc(blocks, sizeof *norm->sums);
    norm->plane = calloc(flat_elems[g->t] / KERN_BLOCK, sizeof *norm->plane);
    norm->tp_bounds = calloc((size_t)g->tp + 1, sizeof *norm->tp_bounds);
    norm->plane_bounds = calloc((size_t)g->dp * g->pp + 1, sizeof *norm->plane_bounds);
    norm->is_foreign = calloc(own + 1, 1);
    if (kern->is_device) {
        norm->blocks_bytes = (own + 1) * sizeof *norm->blocks;
        norm->blocks = kern->ops->alloc(kern, norm->blocks_bytes);
    }
    if ((kern->is_device && norm->blocks == NULL) || norm->sums == NULL || norm->plane == NULL ||
        norm->tp_bounds == NULL || norm->plane_bounds == NULL || norm->is_foreign == NULL) {
        train_norm_close(norm);
        return bl_err_code(msg, -ENOMEM, "%llu sums of squares", (unsigned long long)blocks);
    }
    for (uint32_t t = 0; t < g->tp; t++) {
        norm->tp_bounds[t + 1] =
            norm->tp_bounds[t] + flat_elems[t] / KERN_BLOCK * sizeof *norm->sums;
    }
    for (uint32_t i = 0; i < g->dp * g->pp; i++) {
        uint64_t all = stage_blocks(shard, i % g->pp), d = i / g->pp;
        uint64_t mine = all * (d + 1) / g->dp - all * d / g->dp; /* as train_shard_init cuts */
        norm->plane_bounds[i + 1] = norm->plane_bounds[i] + mine * sizeof *norm->plane;
    }
    mark_foreign(norm);
    return 0;
}

void train_norm_close(struct train_norm *norm)
{
    if (norm->blocks != NULL) {
        norm->kern->ops->free(norm->kern, norm->blocks, norm->blocks_bytes);
    }
    free(norm->sums);
    free(norm->plane);
    free(norm->tp_bounds);
    free(norm->plane_bounds);
    free(norm->is_foreign);
    memset(norm, 0, sizeof *norm);
}

/* Puts the blocks of stage p, which the plane holds replica by replica, where they stand in flat
 * order: those of a stage follow one another through its units. */
static void place_stage(const struct train_norm *norm, uint32_t p, double *flat)
{
    const struct train_grid *g = &norm->shard->grid;
    uint32_t count, d = 0;
    const struct train_unit *units = train_model_units(norm->shard->model, &count);
    const double *from = NULL, *end = NULL;
    for (uint32_t u = 0; u < count; u++) {
        if (units[u].vstage % g->pp != p ||
            units[u].offset >= train_model_flat_elems(norm->shard->model)) {
            continue;
        }
        uint64_t first = units[u].offset / KERN_BLOCK;
        for (uint64_t b = first; b < first + units[u].elems / KERN_BLOCK; b++) {
            while (from == end) { /* a replica may have none */
                uint32_t i = d++ * g->pp + p;
                from = norm->plane + norm->plane_bounds[i] / sizeof *from;
                end = norm->plane + norm->plane_bounds[i + 1] / sizeof *from;
            }
            flat[b] = *from++;
        }
    }
}

/* Where the own blocks stand in what the plane gathers. */
static double *own_blocks(const struct train_norm *norm)
{
    const struct train_grid *g = &norm->shard->grid;
    return norm->plane + norm->plane_bounds[g->d * g->pp + g->p] / sizeof *norm->plane;
}

void train_norm_begin(struct train_norm *norm, const float *slice)
{
    struct kern *k = norm->kern;
    uint64_t own = norm->shard->cut_hi - norm->shard->cut_lo;
    double *mine = own_blocks(norm);
    k->ops->sumsq_blocks(k, k->is_device ? norm->blocks : mine, slice, own);
    if (k->is_device && own != 0) {
        k->ops->download(k, mine, norm->blocks, own / KERN_BLOCK * sizeof *mine);
    }
}

int train_norm_squares(struct train_norm *norm, struct comm_group *plane, struct comm_group *tp,
                       double *ret, struct bl_errmsg *msg)
{
    const struct train_shard *shard = norm->shard;
    const struct train_grid *g = &shard->grid;
    uint64_t own = shard->cut_hi - shard->cut_lo;
    double *mine = own_blocks(norm);
    for (uint64_t b = 0; b < own / KERN_BLOCK; b++) {
        mine[b] = norm->is_foreign[b] ? 0.0 : mine[b];
    }
    int rc = plane == NULL ? 0 : comm_group_allgather(plane, norm->plane, norm->plane_bounds, msg);
    if (rc != 0) {
        return rc;
    }
    for (uint32_t p = 0; p < g->pp; p++) {
        place_stage(norm, p, norm->sums + norm->tp_bounds[g->t] / sizeof *norm->sums);
    }
    rc = tp == NULL ? 0 : comm_group_allgather(tp, norm->sums, norm->tp_bounds, msg);
    if (rc == 0) {
        *ret = kern_tree_sum(norm->sums, norm->tp_bounds[g->tp] / sizeof *norm->sums);
    }
    return rc;
}
