/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Makes a root with one checkpoint of a synthetic model, in any layout, of any size: what the tests
 * of resharding and their measurements begin with. Every element follows from its tensor's name and
 * its place, so that roots of one model are the same state in every layout.
 *
 *     layout_root ROOT STEP LAYOUT PARTS CODEC SHAPE
 *     LAYOUT  "dp=2,tp=2,zero=1"
 *     SHAPE   layers,dim,hidden,heads,kv_heads,vocab,tied,fused
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/extent_rows.h"
#include "base/file.h"
#include "ckpt/ckpt.h"
#include "tests/ckpt/layout_sample.h"

/* Small floats around 0, as weights are; other types take the bits. */
static void element(const struct bl_tensor *tensor, uint64_t hash, uint64_t index, void *to)
{
    uint64_t bits = bl_mix64(hash ^ index);

    if (tensor->dtype == BL_F32) {
        const float value = ((float)(bits >> 40) - 8388608.0f) / 8388608.0f * 0.04f;

        memcpy(to, &value, sizeof(value));
    } else {
        memcpy(to, &bits, bl_dtype_bytes(tensor->dtype));
    }
}

static int fetch(void *arg, uint32_t number, uint64_t lo, uint64_t hi, void *dest,
                 struct bl_errmsg *msg)
{
    const struct bl_extent_list *list = arg;
    struct bl_extent extent = list->extents[number];
    const struct bl_tensor *tensor = &list->tensors[extent.tensor];
    uint64_t hash = bl_xxh3(tensor->name, strlen(tensor->name));
    uint32_t each = bl_dtype_bytes(tensor->dtype);
    struct bl_extent_rows rows;
    struct bl_extent_row row;

    (void)msg;
    extent.flat_hi = extent.flat_lo + hi;
    extent.flat_lo += lo;
    bl_extent_rows_init(&rows, &extent, tensor, NULL, NULL);
    while (bl_extent_rows_next(&rows, &row)) {
        for (uint64_t i = 0; i < row.count; i++) {
            element(tensor, hash, row.logical + i, (uint8_t *)dest + (row.local + i) * each);
        }
    }
    return 0;
}

static int die(int rc, const struct bl_errmsg *why)
{
    if (rc < 0) {
        fprintf(stderr, "layout_root: %s\n", why->text);
        exit(1);
    }
    return rc;
}

static void save(struct ckpt_store *store, const struct ckpt_layout *layout,
                 struct bl_extent_list *parts, uint32_t part_count, const char *codec,
                 uint64_t step, const struct shape *shape)
{
    const struct ckpt_attempt attempt = {.step = step, .generation = 1, .attempt = 1, .nonce = 7};
    struct ckpt_manifest manifest = {
        .generation = 1,
        .line = 1,
        .step = step,
        .samples = step * 8,
        .seed = 5,
        .lanes = 4,
        .layout = *layout,
        .metrics = {.loss = 3.0 / (double)(step + 1), .saved_unix_s = 1700000000 + step}};
    struct ckpt_commit_result committed;
    struct bl_errmsg why = {0};
    char job[256];

    snprintf(job, sizeof(job), "{\"model\":{\"heads\":%u,\"kv_heads\":%u,\"tied\":%s}}",
             shape->heads, shape->kv_heads, shape->tied ? "true" : "false");
    snprintf(manifest.run, sizeof(manifest.run), "%s", ckpt_store_run(store));
    snprintf(manifest.codec, sizeof(manifest.codec), "%s", codec);
    manifest.job = strdup(job);
    manifest.parts = calloc(part_count, sizeof(*manifest.parts));
    die(ckpt_attempt_begin(store, &attempt, &why), &why);
    for (uint32_t p = 0; p < part_count; p++) {
        const struct ckpt_source source = {.list = &parts[p], .fetch = fetch, .arg = &parts[p]};
        char name[32];
        const struct ckpt_part_job one = {
            .name = name, .sources = &source, .source_count = 1, .codec = codec};
        struct ckpt_part_result result = {0};

        snprintf(name, sizeof(name), "part-n%u", p);
        die(ckpt_save_part(store, &attempt, &one, &result, &why), &why);
        snprintf(manifest.parts[p].name, sizeof(manifest.parts[p].name), "%s", name);
        snprintf(manifest.parts[p].node, sizeof(manifest.parts[p].node), "n%u", p);
        manifest.parts[p].bytes = result.bytes;
        manifest.parts[p].raw_bytes = result.raw_bytes;
        manifest.parts[p].index_digest = result.index_digest;
        manifest.part_count++;
    }
    die(ckpt_commit(store, &attempt, &manifest, &committed, &why), &why);
    ckpt_manifest_close(&manifest);
}

int main(int argc, char **argv)
{
    static struct model model;
    struct ckpt_store_config config = {
        .run = "00000000000000cc", .node = "n0", .create = true, .shared = true};
    struct ckpt_layout_cutter *cutter;
    struct ckpt_layout layout = {0};
    struct ckpt_store *store = NULL;
    struct bl_extent_list stored, *parts;
    struct bl_errmsg why = {0};
    struct shape shape = {0};
    unsigned tied = 0, fused = 0;
    uint32_t part_count;

    if (argc != 7 ||
        sscanf(argv[6], "%u,%u,%u,%u,%u,%u,%u,%u", &shape.layers, &shape.dim, &shape.hidden,
               &shape.heads, &shape.kv_heads, &shape.vocab, &tied, &fused) != 8) {
        fprintf(stderr, "usage: layout_root ROOT STEP LAYOUT PARTS CODEC SHAPE\n");
        return 2;
    }
    shape.tied = tied != 0;
    shape.fused = fused != 0;
    sample_llama(&model, &shape);
    part_count = (uint32_t)strtoul(argv[4], NULL, 10);
    parts = calloc(part_count, sizeof(*parts));
    die(ckpt_layout_parse(&layout, &model.about, argv[3], &why), &why);
    cutter = sample_cutter(&model, layout);
    die(ckpt_layout_stored(cutter, &stored, &why), &why);
    die(ckpt_layout_parts(&stored, part_count, parts, &why), &why);
    config.path = argv[1];
    die(bl_mkdir_p(argv[1], &why), &why);
    die(ckpt_store_open(&store, &config, &why), &why);
    save(store, &layout, parts, part_count, argv[5], strtoull(argv[2], NULL, 10), &shape);
    ckpt_store_close(store);
    for (uint32_t p = 0; p < part_count; p++) {
        bl_extent_list_close(&parts[p]);
    }
    free(parts);
    bl_extent_list_close(&stored);
    ckpt_layout_free(cutter);
    return 0;
}
