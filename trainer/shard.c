/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/shard.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SLOT_ALIGN 64u

static const char *const part_suffix[TRAIN_PARTS] = {"", ".exp_avg", ".exp_avg_sq"};

static uint64_t max_u64(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static uint64_t min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

uint64_t train_shard_tied_elems(const struct train_model *model)
{
    uint32_t count;
    const struct train_unit *units = train_model_units(model, &count);
    /* A tied head's unit stands behind the flat order. */
    return units[count - 1].offset == train_model_flat_elems(model) ? units[count - 1].elems : 0;
}

/* Elements that the first stage has. */
static uint64_t first_stage_elems(const struct train_model *model, uint32_t pp)
{
    uint32_t count;
    const struct train_unit *units = train_model_units(model, &count);
    uint64_t elems = 0;
    for (uint32_t u = 0; u < count; u++) {
        if (units[u].vstage % pp == 0 && units[u].offset < train_model_flat_elems(model)) {
            elems += units[u].elems;
        }
    }
    return elems;
}

static uint64_t cut_at(uint64_t elems, uint32_t d, uint32_t dp)
{
    return elems / KERN_BLOCK * d / dp * KERN_BLOCK;
}

static void list_extents(struct train_shard *shard)
{
    uint32_t tensor_count;
    const struct train_tensor *tensors = train_model_tensors(shard->model, &tensor_count);
    for (uint32_t i = 0; i < tensor_count; i++) {
        const struct train_tensor *t = &tensors[i];
        if (t->local == TRAIN_NOT_HERE || t->owner != shard->grid.t) {
            continue;
        }
        uint64_t lo = max_u64(shard->own_lo, t->local);
        uint64_t hi = min_u64(shard->own_hi, t->local + t->elems);
        if (lo < hi) {
            shard->extents[shard->extent_count++] = (struct train_extent){
                .tensor = i, .flat_lo = lo - t->local, .flat_hi = hi - t->local, .at = lo};
        }
    }
}

int train_shard_init(struct train_shard *shard, const struct train_model *model,
                     const struct train_grid *grid, uint32_t zero, struct bl_errmsg *msg)
{
    uint32_t tensor_count, dp = grid->dp;
    uint64_t local = train_model_local_elems(model), tied = train_shard_tied_elems(model);
    uint64_t first = first_stage_elems(model, grid->pp);
    train_model_tensors(model, &tensor_count);
    memset(shard, 0, sizeof *shard);
    shard->model = model;
    shard->grid = *grid;
    shard->zero = zero;
    shard->bounds = calloc((size_t)dp + 1, sizeof *shard->bounds);
    shard->tied_bounds = tied != 0 ? calloc((size_t)dp + 1, sizeof *shard->tied_bounds) : NULL;
    shard->extents = calloc(tensor_count, sizeof *shard->extents);
    if (shard->bounds == NULL || shard->extents == NULL ||
        (tied != 0 && shard->tied_bounds == NULL)) {
        train_shard_close(shard);
        return bl_err_code(msg, -ENOMEM, "shard of rank %u", grid->rank);
    }
    for (uint32_t d = 0; d <= dp; d++) {
        shard->bounds[d] = cut_at(local, d, dp);
        if (tied != 0) { /* the embedding is the first of the first stage */
            shard->tied_bounds[d] = min_u64(cut_at(first, d, dp), tied);
        }
    }
    shard->cut_lo = shard->bounds[grid->d];
    shard->cut_hi = shard->bounds[grid->d + 1];
    shard->own_lo = zero == 0 ? 0 : shard->cut_lo;
    shard->own_hi = zero == 0 ? local : shard->cut_hi;
    list_extents(shard);
    return 0;
}

void train_shard_close(struct train_shard *shard)
{
    free(shard->bounds);
    free(shard->tied_bounds);
    free(shard->extents);
    memset(shard, 0, sizeof *shard);
}

void train_part_name(char name[BL_TENSOR_NAME_MAX], const struct train_tensor *tensor,
                     enum train_state_part part)
{
    size_t used = strnlen(tensor->name, BL_TENSOR_NAME_MAX);
    size_t suffix = strlen(part_suffix[part]);
    BL_ASSERT(used + suffix < BL_TENSOR_NAME_MAX);
    memcpy(name, tensor->name, used);
    memcpy(name + used, part_suffix[part], suffix + 1);
}

void train_shard_layout(struct train_shard *shard)
{
    uint64_t at = 0;
    for (int part = 0; part < TRAIN_PARTS; part++) {
        for (uint32_t i = 0; i < shard->extent_count; i++) {
            struct train_extent *e = &shard->extents[i];
            e->offset[part] = at;
            at += (e->flat_hi - e->flat_lo) * sizeof(float);
            at = (at + SLOT_ALIGN - 1) / SLOT_ALIGN * SLOT_ALIGN;
        }
    }
    shard->slot_bytes = at;
}

float *train_extent_data(void *slot, const struct train_extent *extent, enum train_state_part part)
{
    return (float *)(void *)((char *)slot + extent->offset[part]);
}

const float *train_extent_view(const void *slot, const struct train_extent *extent,
                               enum train_state_part part)
{
    return (const float *)(const void *)((const char *)slot + extent->offset[part]);
}

void train_shard_fresh(const struct train_shard *shard, void *slot, uint64_t seed,
                       struct kern_pool *pool)
{
    for (uint32_t i = 0; i < shard->extent_count; i++) {
        const struct train_extent *e = &shard->extents[i];
        uint64_t count = e->flat_hi - e->flat_lo;
        train_model_init_params(shard->model, seed, train_extent_data(slot, e, TRAIN_WEIGHT), e->at,
                                e->at + count, pool);
        memset(train_extent_data(slot, e, TRAIN_MOMENT1), 0, count * sizeof(float));
        memset(train_extent_data(slot, e, TRAIN_MOMENT2), 0, count * sizeof(float));
    }
}

/* Elements [lo, hi) of a tensor's box, row by row of the logical tensor. */
static void digest_box(const struct train_tensor *t, uint64_t name_hash, const float *data,
                       uint64_t lo, uint64_t hi, struct bl_state_digest *digest)
{
    uint64_t width = t->hi[1] - t->lo[1]; /* 1 with one dimension */
    uint64_t run = width == t->shape[1] ? hi - lo : 0;
    for (uint64_t at = lo; at < hi; at += run) {
        uint64_t row = at / width, column = at % width;
        uint64_t first = (t->lo[0] + row) * t->shape[1] + t->lo[1] + column;
        if (width != t->shape[1]) {
            run = min_u64(width - column, hi - at);
        }
        bl_state_digest_add(digest, name_hash, first, data + (at - lo), run, sizeof(float));
    }
}

void train_shard_digest(const struct train_shard *shard, const void *slot,
                        struct bl_state_digest *digest)
{
    uint32_t tensor_count;
    const struct train_tensor *tensors = train_model_tensors(shard->model, &tensor_count);
    char name[BL_TENSOR_NAME_MAX];
    for (uint32_t i = 0; i < shard->extent_count; i++) {
        const struct train_extent *e = &shard->extents[i];
        for (int part = 0; part < TRAIN_PARTS; part++) {
            train_part_name(name, &tensors[e->tensor], (enum train_state_part)part);
            digest_box(&tensors[e->tensor], bl_xxh3(name, strlen(name)),
                       train_extent_view(slot, e, (enum train_state_part)part), e->flat_lo,
                       e->flat_hi, digest);
        }
    }
}
