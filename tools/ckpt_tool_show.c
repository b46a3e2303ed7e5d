/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt-tool show: what one checkpoint holds. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "ckpt/part.h"
#include "tools/ckpt_tool.h"

/* An extent of some part, to be sorted by tensor. */
struct row {
    const struct ckpt_part *part;
    const struct bl_extent *extent;
    const struct bl_tensor *tensor;
};

static int row_order(const void *a_, const void *b_)
{
    const struct row *a = a_, *b = b_;

    return ckpt_extent_order(a->extent, a->tensor, b->extent, b->tensor);
}

static struct row *rows_make(const struct ckpt_manifest *manifest, size_t *ret_count)
{
    size_t count = 0;
    struct row *rows;

    for (uint32_t p = 0; p < manifest->part_count; p++) {
        count += manifest->parts[p].held.extent_count;
    }
    rows = calloc(count + 1, sizeof(*rows));
    count = 0;
    for (uint32_t p = 0; rows != NULL && p < manifest->part_count; p++) {
        const struct bl_extent_list *held = &manifest->parts[p].held;

        for (uint32_t e = 0; e < held->extent_count; e++) {
            rows[count++] = (struct row){&manifest->parts[p], &held->extents[e],
                                         &held->tensors[held->extents[e].tensor]};
        }
    }
    if (rows != NULL) {
        qsort(rows, count, sizeof(*rows), row_order);
    }
    *ret_count = count;
    return rows;
}

static bool row_is_new_tensor(const struct row *rows, size_t i)
{
    return i == 0 || strcmp(rows[i - 1].tensor->name, rows[i].tensor->name) != 0;
}

static const char *kind_name(enum bl_tensor_kind kind)
{
    static const char *const names[] = {"?", "param", "moment1", "moment2", "other"};

    return kind >= BL_KIND_PARAM && kind <= BL_KIND_OTHER ? names[kind] : names[0];
}

static void shape_text(const struct bl_tensor *tensor, char *ret, size_t room)
{
    int n = snprintf(ret, room, "[");

    for (uint32_t d = 0; d < tensor->dims; d++) {
        n += snprintf(ret + n, room - (size_t)n, "%s%llu", d == 0 ? "" : ",",
                      (unsigned long long)tensor->shape[d]);
    }
    snprintf(ret + n, room - (size_t)n, "]");
}

static uint32_t print_tensors(const struct ckpt_manifest *manifest, bool print)
{
    size_t count = 0;
    struct row *rows = rows_make(manifest, &count);
    uint32_t tensors = 0;

    for (size_t i = 0; rows != NULL && i < count; i++) {
        char shape[160], key[CKPT_KEY_MAX];

        tensors += row_is_new_tensor(rows, i);
        if (print && row_is_new_tensor(rows, i)) {
            shape_text(rows[i].tensor, shape, sizeof(shape));
            printf("  %-40s %-8s %-5s %s\n", rows[i].tensor->name, kind_name(rows[i].tensor->kind),
                   bl_dtype_name(rows[i].tensor->dtype), shape);
        }
        if (print) {
            ckpt_part_key(key, rows[i].extent, rows[i].tensor);
            printf("      %s: %s, at byte %llu\n", rows[i].part->name, key,
                   (unsigned long long)rows[i].extent->offset);
        }
    }
    free(rows);
    return tensors;
}

static void print_text(const struct ckpt_store *store, const char *dir,
                       const struct ckpt_manifest *manifest, bool tensors)
{
    char digest[BL_STATE_DIGEST_TEXT_BYTES], size[TOOL_TEXT_MAX], when[TOOL_TEXT_MAX];
    uint64_t bytes = 0;

    bl_state_digest_format(&manifest->state, digest);
    for (uint32_t p = 0; p < manifest->part_count; p++) {
        bytes += manifest->parts[p].bytes;
    }
    printf("%s/%s\n", ckpt_store_path(store), dir);
    printf("run           %s\n", manifest->run);
    printf("step          %llu (generation %llu, line %llu)\n", (unsigned long long)manifest->step,
           (unsigned long long)manifest->generation, (unsigned long long)manifest->line);
    printf("saved         %s UTC by %s\n", ckpt_tool_time(when, manifest->metrics.saved_unix_s),
           manifest->writer);
    if (isfinite(manifest->metrics.loss)) {
        printf("loss          %.6f\n", manifest->metrics.loss);
    }
    printf("consumed      %llu samples, %llu tokens\n", (unsigned long long)manifest->samples,
           (unsigned long long)manifest->metrics.tokens);
    printf("layout        %u ranks: dp %u, tp %u, pp %u, zero %u; %u lanes\n",
           manifest->layout.world, manifest->layout.dp, manifest->layout.tp, manifest->layout.pp,
           manifest->layout.zero, manifest->lanes);
    printf("state digest  %s\n", digest);
    printf("function      %016llx\n", (unsigned long long)manifest->function_id);
    printf("tensors       %u\n", print_tensors(manifest, false));
    printf("size          %s in %u part%s, codec %s\n", ckpt_tool_size(size, bytes),
           manifest->part_count, manifest->part_count == 1 ? "" : "s", manifest->codec);
    for (uint32_t p = 0; p < manifest->part_count; p++) {
        printf("  %-16s %10s  node %s\n", manifest->parts[p].name,
               ckpt_tool_size(size, manifest->parts[p].bytes), manifest->parts[p].node);
    }
    if (tensors) {
        print_tensors(manifest, true);
    }
}

static json_t *u64s_json(const uint64_t *values, uint32_t count)
{
    json_t *list = json_array();

    for (uint32_t i = 0; i < count; i++) {
        json_array_append_new(list, json_integer((json_int_t)values[i]));
    }
    return list;
}

static json_t *tensors_json(const struct ckpt_manifest *manifest)
{
    size_t count = 0;
    struct row *rows = rows_make(manifest, &count);
    json_t *list = json_array(), *extents = NULL;

    for (size_t i = 0; rows != NULL && i < count; i++) {
        const struct bl_tensor *tensor = rows[i].tensor;
        const struct bl_extent *extent = rows[i].extent;
        char key[CKPT_KEY_MAX];

        if (row_is_new_tensor(rows, i)) {
            extents = json_array();
            json_array_append_new(list, json_pack("{ss ss ss so so}", "name", tensor->name, "kind",
                                                  kind_name(tensor->kind), "dtype",
                                                  bl_dtype_name(tensor->dtype), "shape",
                                                  u64s_json(tensor->shape, tensor->dims), "extents",
                                                  extents));
        }
        ckpt_part_key(key, extent, tensor);
        json_array_append_new(extents, json_pack("{ss ss sI so so so}", "part", rows[i].part->name,
                                                 "key", key, "offset", (json_int_t)extent->offset,
                                                 "lo", u64s_json(extent->lo, tensor->dims), "hi",
                                                 u64s_json(extent->hi, tensor->dims), "flat",
                                                 u64s_json(&extent->flat_lo, 2)));
    }
    free(rows);
    return list;
}

static json_t *parts_json(const struct ckpt_manifest *manifest)
{
    json_t *list = json_array();

    for (uint32_t p = 0; p < manifest->part_count; p++) {
        const struct ckpt_part *part = &manifest->parts[p];

        json_array_append_new(list,
                              json_pack("{ss ss sI so}", "name", part->name, "node", part->node,
                                        "bytes", (json_int_t)part->bytes, "index_digest",
                                        bl_json_new_hex64(part->index_digest)));
    }
    return list;
}

static int print_json(const struct ckpt_store *store, const char *dir,
                      const struct ckpt_manifest *manifest, bool tensors)
{
    char digest[BL_STATE_DIGEST_TEXT_BYTES], seed[24];
    const struct ckpt_layout *layout = &manifest->layout;
    json_t *value;

    bl_state_digest_format(&manifest->state, digest);
    snprintf(seed, sizeof(seed), "%llu", (unsigned long long)manifest->seed);
    value = json_pack(
        "{si ss ss ss sI sI sI ss so sI ss si s{si si si si si} so sI sI ss so so}", "schema", 1,
        "root", ckpt_store_path(store), "dir", dir, "run", manifest->run, "step",
        (json_int_t)manifest->step, "generation", (json_int_t)manifest->generation, "line",
        (json_int_t)manifest->line, "state_digest", digest, "function",
        bl_json_new_hex64(manifest->function_id), "samples", (json_int_t)manifest->samples, "seed",
        seed, "lanes", (int)manifest->lanes, "layout", "world", (int)layout->world, "dp",
        (int)layout->dp, "tp", (int)layout->tp, "pp", (int)layout->pp, "zero", (int)layout->zero,
        "loss", isfinite(manifest->metrics.loss) ? json_real(manifest->metrics.loss) : json_null(),
        "tokens", (json_int_t)manifest->metrics.tokens, "saved_unix_s",
        (json_int_t)manifest->metrics.saved_unix_s, "writer", manifest->writer, "parts",
        parts_json(manifest), "job", json_loads(manifest->job, 0, NULL));
    if (value != NULL && tensors) {
        json_object_set_new(value, "tensors", tensors_json(manifest));
    }
    return ckpt_tool_print_json(value, TOOL_GOOD);
}

/* The newest good checkpoint of a root into `dir`; false when there is none. */
static bool pick_newest(struct ckpt_store *store, char dir[CKPT_DIR_MAX])
{
    const struct ckpt_entry *newest;
    struct bl_errmsg why = {0};
    struct ckpt_scan scan;

    if (ckpt_scan(store, &scan, &why) < 0) {
        ckpt_tool_fail("%s", why.text);
        return false;
    }
    newest = ckpt_scan_newest(&scan, NULL, 0);
    if (newest == NULL) {
        ckpt_tool_fail("%s: no good checkpoint in it", ckpt_store_path(store));
    } else {
        snprintf(dir, CKPT_DIR_MAX, "%s", newest->dir);
    }
    ckpt_scan_close(&scan);
    return newest != NULL;
}

int ckpt_tool_show(const struct ckpt_tool_args *args)
{
    char dir[CKPT_DIR_MAX];
    struct ckpt_store *store = ckpt_tool_open(args->path, dir);
    struct ckpt_manifest manifest = {0};
    struct bl_errmsg why = {0};
    int code = TOOL_GOOD;

    if (store == NULL) {
        return TOOL_COULD_NOT;
    }
    if (dir[0] == '\0' && !pick_newest(store, dir)) {
        ckpt_store_close(store);
        return TOOL_COULD_NOT;
    }
    if (ckpt_manifest_load(store, dir, &manifest, &why) < 0) {
        ckpt_store_close(store);
        return ckpt_tool_fail("%s", why.text);
    }
    if (args->json) {
        code = print_json(store, dir, &manifest, args->tensors);
    } else {
        print_text(store, dir, &manifest, args->tensors);
    }
    ckpt_manifest_close(&manifest);
    ckpt_store_close(store);
    return code;
}
