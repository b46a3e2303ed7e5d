/* SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/ckpt/sample.h"

uint32_t sample_scale = 1;
const char *sample_codec = "none";

#define SAMPLE_TENSORS 7

static struct bl_tensor sample_tensor(uint32_t i)
{
    static const struct bl_tensor tensors[SAMPLE_TENSORS] = {
        {"tok_embeddings.weight", BL_KIND_PARAM, BL_F32, 2, {67, 48}},
        {"tok_embeddings.weight.m", BL_KIND_MOMENT1, BL_F32, 2, {67, 48}},
        {"tok_embeddings.weight.v", BL_KIND_MOMENT2, BL_F32, 2, {67, 48}},
        {"layers.0.attention.wq.weight", BL_KIND_PARAM, BL_BF16, 3, {4, 12, 48}},
        {"norm.weight", BL_KIND_PARAM, BL_F32, 1, {48}},
        {"schedule", BL_KIND_OTHER, BL_F64, 0, {0}},
        {"bytes", BL_KIND_OTHER, BL_U8, 1, {1003}},
    };
    struct bl_tensor tensor = tensors[i];

    for (uint32_t d = 0; d < tensor.dims; d++) {
        if (sample_scale == 0) {
            tensor.shape[d] = tensor.shape[d] / 64 + 2 + d;
        } else if (d == 0 && tensor.dims > 1) {
            tensor.shape[d] *= sample_scale;
        }
    }
    return tensor;
}

/* Floats have exponents near one another, as trained weights have: a codec finds some order. */
static uint64_t sample_bits(const struct bl_extent_list *list, const struct bl_extent *extent,
                            uint64_t elem, uint64_t step)
{
    uint64_t bits = bl_mix64(bl_mix64(extent->tensor * 1000003u + step * 7919u) + elem);
    uint64_t exponent = 110 + (bits >> 32) % 16;

    switch (list->tensors[extent->tensor].dtype) {
    case BL_F32:
        return (bits & 0x807fffff) | exponent << 23;
    case BL_BF16:
        return (bits & 0x807f) | exponent << 7;
    default:
        return bits;
    }
}

static uint64_t box_elems(const struct bl_extent *extent, const struct bl_tensor *tensor)
{
    uint64_t elems = 1;

    for (uint32_t d = 0; d < tensor->dims; d++) {
        elems *= extent->hi[d] - extent->lo[d];
    }
    return elems;
}

/* Row-major index in the tensor of element `flat` of the box. */
static uint64_t box_to_tensor(const struct bl_extent *extent, const struct bl_tensor *tensor,
                              uint64_t flat)
{
    uint64_t index = 0, weight = 1;

    for (uint32_t d = tensor->dims; d-- > 0;) {
        uint64_t width = extent->hi[d] - extent->lo[d];

        index += (extent->lo[d] + flat % width) * weight;
        flat /= width;
        weight *= tensor->shape[d];
    }
    return index;
}

static void cut_extent(struct bl_extent *extent, const struct bl_tensor *tensor, uint32_t index,
                       enum sample_cut cut, uint32_t world, uint32_t rank)
{
    uint64_t elems = bl_tensor_elems(tensor);
    uint32_t d = cut == SAMPLE_ROWS ? 0 : tensor->dims - 1;

    if (cut == SAMPLE_FLAT || tensor->dims < 2) {
        bl_extent_whole(extent, tensor, index, elems * rank / world, elems * (rank + 1) / world);
        return;
    }
    bl_extent_whole(extent, tensor, index, 0, elems);
    extent->lo[d] = tensor->shape[d] * rank / world;
    extent->hi[d] = tensor->shape[d] * (rank + 1) / world;
    extent->flat_hi = box_elems(extent, tensor);
}

void sample_shard_init(struct sample_shard *shard, enum sample_cut cut, uint32_t world,
                       uint32_t rank, uint64_t step, bool filled)
{
    memset(shard, 0, sizeof(*shard));
    for (uint32_t i = 0; i < SAMPLE_TENSORS; i++) {
        struct bl_tensor tensor = sample_tensor(i);
        struct bl_extent extent;
        uint32_t index;

        assert_int_equal(bl_extent_list_tensor(&shard->list, &tensor, &index, NULL), 0);
        cut_extent(&extent, &tensor, index, cut, world, rank);
        if (bl_extent_elems(&extent) == 0) {
            continue;
        }
        shard->bytes = (shard->bytes + 63) / 64 * 64;
        extent.offset = shard->bytes;
        shard->bytes += bl_extent_elems(&extent) * bl_dtype_bytes(tensor.dtype);
        assert_int_equal(bl_extent_list_add(&shard->list, &extent), 0);
    }
    shard->data = calloc(1, shard->bytes + 1);
    assert_non_null(shard->data);
    for (uint32_t e = 0; filled && e < shard->list.extent_count; e++) {
        const struct bl_extent *extent = &shard->list.extents[e];
        const struct bl_tensor *tensor = &shard->list.tensors[extent->tensor];
        uint32_t each = bl_dtype_bytes(tensor->dtype);

        for (uint64_t k = 0; k < bl_extent_elems(extent); k++) {
            uint64_t bits = sample_bits(&shard->list, extent,
                                        box_to_tensor(extent, tensor, extent->flat_lo + k), step);

            memcpy(shard->data + extent->offset + k * each, &bits, each);
        }
    }
}

void sample_shard_close(struct sample_shard *shard)
{
    bl_extent_list_close(&shard->list);
    free(shard->data);
    memset(shard, 0, sizeof(*shard));
}

bool sample_shard_is(const struct sample_shard *shard, uint64_t step)
{
    for (uint32_t e = 0; e < shard->list.extent_count; e++) {
        const struct bl_extent *extent = &shard->list.extents[e];
        const struct bl_tensor *tensor = &shard->list.tensors[extent->tensor];
        uint32_t each = bl_dtype_bytes(tensor->dtype);

        for (uint64_t k = 0; k < bl_extent_elems(extent); k++) {
            uint64_t bits = sample_bits(&shard->list, extent,
                                        box_to_tensor(extent, tensor, extent->flat_lo + k), step);

            if (memcmp(shard->data + extent->offset + k * each, &bits, each) != 0) {
                return false;
            }
        }
    }
    return true;
}

void sample_shard_check(const struct sample_shard *shard, uint64_t step)
{
    assert_true(sample_shard_is(shard, step));
}

struct bl_state_digest sample_digest(uint64_t step)
{
    struct bl_state_digest digest = {{0, 0}};
    struct sample_shard shard;

    sample_shard_init(&shard, SAMPLE_FLAT, 1, 0, step, true);
    bl_extent_list_digest(&shard.list, shard.data, &digest);
    sample_shard_close(&shard);
    return digest;
}

void sample_dir_make(char *ret, const char *under)
{
    const char *temp = under != NULL ? under : getenv("TMPDIR");

    snprintf(ret, 256, "%s/belay-ckpt-XXXXXX", temp == NULL ? "/tmp" : temp);
    assert_non_null(mkdtemp(ret));
}

void sample_dir_remove(const char *path)
{
    DIR *dir = opendir(path);
    struct dirent *ent;
    char file[1024];
    struct stat st;

    while (dir != NULL && (ent = readdir(dir)) != NULL) {
        if (strcmp(ent->d_name, ".") == 0 || strcmp(ent->d_name, "..") == 0) {
            continue;
        }
        snprintf(file, sizeof(file), "%s/%s", path, ent->d_name);
        if (lstat(file, &st) == 0 && S_ISDIR(st.st_mode)) {
            sample_dir_remove(file);
        } else {
            unlink(file);
        }
    }
    if (dir != NULL) {
        closedir(dir);
    }
    rmdir(path);
}

int sample_open(struct ckpt_store **ret, const char *root, struct ckpt_io *io,
                struct bl_errmsg *msg)
{
    const struct ckpt_store_config config = {
        .path = root,
        .run = SAMPLE_RUN,
        .node = "n0",
        .create = true,
        .reserve_bytes = 256 * 1024,
        .io = io,
    };

    return ckpt_store_open(ret, &config, msg);
}

int sample_save_part(struct ckpt_store *store, const struct ckpt_attempt *attempt,
                     enum sample_cut cut, uint32_t world, uint32_t part_index,
                     struct ckpt_part *part, struct bl_errmsg *msg)
{
    struct sample_shard shards[2] = {0};
    struct ckpt_source sources[2];
    struct ckpt_part_job job = {.sources = sources, .codec = sample_codec};
    struct ckpt_part_result result = {0};
    char name[32];
    int rc;

    snprintf(name, sizeof(name), "part-%04u", part_index);
    job.name = name;
    for (uint32_t rank = 2 * part_index; rank < world && rank < 2 * part_index + 2; rank++) {
        struct sample_shard *shard = &shards[job.source_count];

        sample_shard_init(shard, cut, world, rank, attempt->step, true);
        sources[job.source_count++] =
            (struct ckpt_source){.list = &shard->list, .base = shard->data};
    }
    rc = ckpt_save_part(store, attempt, &job, &result, msg);
    for (uint32_t i = 0; i < job.source_count; i++) {
        sample_shard_close(&shards[i]);
    }
    if (rc < 0) {
        return rc;
    }
    snprintf(part->name, sizeof(part->name), "%s", result.name);
    snprintf(part->node, sizeof(part->node), "n%u", part_index);
    part->bytes = result.bytes;
    part->index_digest = result.index_digest;
    return 0;
}

void sample_manifest_init(struct ckpt_manifest *manifest, const struct ckpt_attempt *attempt,
                          uint32_t world)
{
    uint64_t step = attempt->step;

    *manifest = (struct ckpt_manifest){
        .run = SAMPLE_RUN,
        .generation = attempt->generation,
        .line = 1,
        .step = step,
        .function_id = 0x1122334455667788,
        .samples = step * 8,
        .seed = 0xffffffffffffffff,
        .lanes = 4,
        .layout = {world, world, 1, 1, 1},
        .metrics = {2.5, step * 1024, 0},
        .job =
            strdup("{\"name\":\"sample\",\"lists\":[1,[2.5e3,null],{\"a\":{}}],\"t\":\"\\u00e9\"}"),
        .part_count = (world + 1) / 2,
    };
    manifest->parts = calloc(manifest->part_count, sizeof(*manifest->parts));
    assert_non_null(manifest->parts);
    snprintf(manifest->codec, sizeof(manifest->codec), "%s", sample_codec);
    manifest->state = sample_digest(step);
}

int sample_save(struct ckpt_store *store, enum sample_cut cut, uint32_t world, uint64_t step,
                uint64_t generation, uint32_t attempt_number, struct bl_errmsg *msg)
{
    const struct ckpt_attempt attempt = {step, generation, attempt_number, 0xabcdef0000 + step};
    struct ckpt_commit_result result = {0};
    struct ckpt_manifest manifest;
    int rc;

    sample_manifest_init(&manifest, &attempt, world);
    rc = ckpt_attempt_begin(store, &attempt, msg);
    for (uint32_t p = 0; rc == 0 && p < manifest.part_count; p++) {
        rc = sample_save_part(store, &attempt, cut, world, p, &manifest.parts[p], msg);
    }
    if (rc == 0) {
        rc = ckpt_commit(store, &attempt, &manifest, &result, msg);
    }
    ckpt_manifest_close(&manifest);
    return rc;
}

int sample_load(struct ckpt_store *store, const char *dir, enum sample_cut cut, uint32_t world,
                uint64_t step, struct bl_errmsg *msg)
{
    struct sample_shard shards[16];
    struct ckpt_dest dests[16];
    struct ckpt_load_result result;
    int rc;

    assert_true(world <= 16);
    for (uint32_t rank = 0; rank < world; rank++) {
        sample_shard_init(&shards[rank], cut, world, rank, 0, false);
        dests[rank] = (struct ckpt_dest){&shards[rank].list, shards[rank].data};
    }
    rc = ckpt_load(store, dir, dests, world, &result, msg);
    for (uint32_t rank = 0; rank < world; rank++) {
        if (rc == 0) {
            sample_shard_check(&shards[rank], step);
        }
        sample_shard_close(&shards[rank]);
    }
    return rc;
}

void sample_load_check(struct ckpt_store *store, const char *dir, enum sample_cut cut,
                       uint32_t world, uint64_t step)
{
    struct bl_errmsg msg = {0};
    int rc = sample_load(store, dir, cut, world, step, &msg);

    if (rc != 0) {
        fail_msg("load %s: %s", dir, msg.text);
    }
}
