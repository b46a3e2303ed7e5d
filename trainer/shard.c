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

int train_shard_init(struct train_shard *shard, const struct train_model *model, uint32_t rank,
                     uint32_t world, struct bl_errmsg *msg)
{
    uint32_t tensor_count;
    const struct train_tensor *tensors = train_model_tensors(model, &tensor_count);
    uint64_t blocks = train_model_buffer_elems(model) / KERN_BLOCK;
    memset(shard, 0, sizeof *shard);
    shard->model = model;
    shard->rank = rank;
    shard->world = world;
    shard->bounds = calloc((size_t)world + 1, sizeof *shard->bounds);
    shard->extents = calloc(tensor_count, sizeof *shard->extents);
    if (shard->bounds == NULL || shard->extents == NULL) {
        train_shard_close(shard);
        return bl_err_code(msg, -ENOMEM, "shard of rank %u", rank);
    }
    for (uint32_t r = 0; r <= world; r++) {
        shard->bounds[r] = blocks * r / world * KERN_BLOCK;
    }
    shard->own_lo = shard->bounds[rank];
    shard->own_hi = shard->bounds[rank + 1];
    for (uint32_t t = 0; t < tensor_count; t++) {
        uint64_t lo = max_u64(shard->own_lo, tensors[t].offset);
        uint64_t hi = min_u64(shard->own_hi, tensors[t].offset + tensors[t].elems);
        if (lo < hi) {
            shard->extents[shard->extent_count++] = (struct train_extent){
                .tensor = t,
                .flat_lo = lo - tensors[t].offset,
                .flat_hi = hi - tensors[t].offset,
                .at = lo,
            };
        }
    }
    return 0;
}

void train_shard_close(struct train_shard *shard)
{
    free(shard->bounds);
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
            bl_state_digest_add(digest, bl_xxh3(name, strlen(name)), e->flat_lo,
                                train_extent_view(slot, e, (enum train_state_part)part),
                                e->flat_hi - e->flat_lo, sizeof(float));
        }
    }
}
