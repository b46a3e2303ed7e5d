/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ckpt-tool show: what one checkpoint, or other people's files, hold. Statistics are made in one
 * pass over each tensor, a slice at a time.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "ckpt/part.h"
#include "tools/ckpt_tool_foreign.h"
#include "tools/ckpt_tool_values.h"

struct show_options {
    bool tensors, stats;
    const char *step;
};

static const struct ckpt_tool_option show_table[] = {
    {"--tensors", NULL, TOOL_FLAG, offsetof(struct show_options, tensors),
     "every tensor and where it lies"},
    {"--stats", NULL, TOOL_FLAG, offsetof(struct show_options, stats),
     "of every tensor: min, max, mean, standard deviation, NaN and infinite values"},
    {"--step", "N", TOOL_TEXT, offsetof(struct show_options, step),
     "of a root: this step instead of the newest"},
};

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
    char digest[BL_STATE_DIGEST_TEXT_BYTES], size[BL_HUMAN_MAX], when[BL_HUMAN_MAX];
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
    printf("size          %s in %u part%s, codec %s\n", bl_human_bytes(size, bytes),
           manifest->part_count, manifest->part_count == 1 ? "" : "s", manifest->codec);
    for (uint32_t p = 0; p < manifest->part_count; p++) {
        printf("  %-16s %10s  node %s\n", manifest->parts[p].name,
               bl_human_bytes(size, manifest->parts[p].bytes), manifest->parts[p].node);
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

static json_t *checkpoint_json(const struct ckpt_store *store, const char *dir,
                               const struct ckpt_manifest *manifest)
{
    char digest[BL_STATE_DIGEST_TEXT_BYTES], seed[24];
    const struct ckpt_layout *layout = &manifest->layout;

    bl_state_digest_format(&manifest->state, digest);
    snprintf(seed, sizeof(seed), "%llu", (unsigned long long)manifest->seed);
    return json_pack(
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
}

/* ---- Statistics ---- */

static int stats_of(struct ckpt_view *view, uint32_t index, void *raw, double *values,
                    struct tool_stats *ret, struct bl_errmsg *msg)
{
    const struct bl_tensor *tensor = &view->tensors[index];
    uint64_t elems = tensor->dims == 0 ? 1 : bl_tensor_elems(tensor);
    int rc = 0;

    for (uint64_t lo = 0, hi; rc == 0 && lo < elems; lo = hi) {
        hi = elems - lo < TOOL_SLICE_ELEMS ? elems : lo + TOOL_SLICE_ELEMS;
        rc = ckpt_view_read_flat(view, index, lo, hi, raw, msg);
        if (rc == 0) {
            tool_values(values, raw, tensor->dtype, hi - lo);
            tool_stats_add(ret, values, hi - lo);
        }
    }
    return rc;
}

/* A number of finite values, or null when there are none. */
static json_t *finite_json(const struct tool_stats *stats, double value)
{
    return stats->finite > 0 ? json_real(value) : json_null();
}

static json_t *stats_json(const struct bl_tensor *tensor, const struct tool_stats *stats)
{
    return json_pack("{ss ss ss so sI so so so so sI sI sI}", "name", tensor->name, "kind",
                     kind_name(tensor->kind), "dtype", bl_dtype_name(tensor->dtype), "shape",
                     u64s_json(tensor->shape, tensor->dims), "elements", (json_int_t)stats->count,
                     "min", finite_json(stats, stats->min), "max", finite_json(stats, stats->max),
                     "mean", finite_json(stats, stats->mean), "std",
                     finite_json(stats, tool_stats_std(stats)), "nan", (json_int_t)stats->nan,
                     "inf", (json_int_t)stats->inf, "zero", (json_int_t)stats->zero);
}

static void stats_print(const struct bl_tensor *tensor, const struct tool_stats *stats)
{
    char shape[160];

    shape_text(tensor, shape, sizeof(shape));
    printf("  %-48s %-5s %-16s %12.5g %12.5g %12.5g %12.5g %6llu %6llu\n", tensor->name,
           bl_dtype_name(tensor->dtype), shape, stats->min, stats->max, stats->mean,
           tool_stats_std(stats), (unsigned long long)stats->nan, (unsigned long long)stats->inf);
}

/* Every tensor of a view: into `list`, or printed. */
static int stats_all(const struct ckpt_tool_call *call, struct ckpt_view *view, json_t *list,
                     struct bl_errmsg *msg)
{
    struct bl_progress progress;
    uint64_t bytes = 0;
    void *raw = malloc(TOOL_SLICE_ELEMS * sizeof(double));
    double *values = malloc(TOOL_SLICE_ELEMS * sizeof(double));
    int rc = raw == NULL || values == NULL ? bl_err(msg, -ENOMEM, "out of memory") : 0;

    for (uint32_t i = 0; i < view->tensor_count; i++) {
        bytes += bl_tensor_elems(&view->tensors[i]) * bl_dtype_bytes(view->tensors[i].dtype);
    }
    bl_progress_start(&progress, "show", bytes, bl_progress_mode(call->json, call->progress));
    if (rc == 0 && list == NULL) {
        printf("  %-48s %-5s %-16s %12s %12s %12s %12s %6s %6s\n", "tensor", "dtype", "shape",
               "min", "max", "mean", "std", "nan", "inf");
    }
    for (uint32_t i = 0; rc == 0 && i < view->tensor_count; i++) {
        const struct bl_tensor *tensor = &view->tensors[i];
        struct tool_stats stats = {0};

        rc = stats_of(view, i, raw, values, &stats, msg);
        bl_progress_show(&progress,
                         progress.done + bl_tensor_elems(tensor) * bl_dtype_bytes(tensor->dtype));
        if (rc == 0 && list != NULL) {
            json_array_append_new(list, stats_json(tensor, &stats));
        } else if (rc == 0) {
            bl_progress_clear(&progress);
            stats_print(tensor, &stats);
        }
    }
    bl_progress_finish(&progress);
    free(raw);
    free(values);
    return rc;
}

/* ---- The verb ---- */

static int show_checkpoint(const struct ckpt_tool_call *call, struct tool_source *source)
{
    const struct show_options *options = call->options;
    const struct ckpt_manifest *manifest = ckpt_view_manifest(source->view);
    json_t *list = NULL, *value;
    struct bl_errmsg why = {0};
    int rc = 0;

    if (!call->json) {
        print_text(source->store, source->dir, manifest, options->tensors);
        rc = options->stats ? stats_all(call, source->view, NULL, &why) : 0;
        return rc < 0 ? ckpt_tool_fail("%s", why.text) : TOOL_GOOD;
    }
    value = checkpoint_json(source->store, source->dir, manifest);
    if (value != NULL && options->tensors) {
        json_object_set_new(value, "tensors", tensors_json(manifest));
    }
    if (value != NULL && options->stats) {
        list = json_array();
        rc = stats_all(call, source->view, list, &why);
        json_object_set_new(value, "stats", list);
    }
    if (rc < 0) {
        json_decref(value);
        return ckpt_tool_fail("%s", why.text);
    }
    return ckpt_tool_print_json(value, TOOL_GOOD);
}

/* Other people's files: tensors, or their statistics. */
static int show_files(const struct ckpt_tool_call *call, struct tool_source *source)
{
    const struct show_options *options = call->options;
    struct ckpt_view *view = source->view;
    json_t *list = call->json ? json_array() : NULL;
    struct bl_errmsg why = {0};
    int rc = 0;

    if (options->stats) {
        rc = stats_all(call, view, list, &why);
    }
    for (uint32_t i = 0; !options->stats && i < view->tensor_count; i++) {
        const struct bl_tensor *tensor = &view->tensors[i];
        char shape[160];

        shape_text(tensor, shape, sizeof(shape));
        if (list == NULL) {
            printf("  %-48s %-5s %s\n", tensor->name, bl_dtype_name(tensor->dtype), shape);
        } else {
            json_array_append_new(list, json_pack("{ss ss so}", "name", tensor->name, "dtype",
                                                  bl_dtype_name(tensor->dtype), "shape",
                                                  u64s_json(tensor->shape, tensor->dims)));
        }
    }
    if (rc < 0) {
        json_decref(list);
        return ckpt_tool_fail("%s", why.text);
    }
    return list == NULL
               ? TOOL_GOOD
               : ckpt_tool_print_json(json_pack("{si ss so}", "schema", 1, "path", call->paths[0],
                                                options->stats ? "stats" : "tensors", list),
                                      TOOL_GOOD);
}

static int run(const struct ckpt_tool_call *call)
{
    const struct show_options *options = call->options;
    struct tool_source source;
    uint64_t step = 0;
    int code;

    if (options->step != NULL && !ckpt_tool_parse_count(options->step, &step)) {
        return ckpt_tool_usage("show", options->step, "--step is a whole number");
    }
    if (!tool_source_open(&source, call->paths[0], options->step == NULL ? NULL : &step)) {
        return TOOL_COULD_NOT;
    }
    code = source.store != NULL ? show_checkpoint(call, &source) : show_files(call, &source);
    tool_source_close(&source);
    return code;
}

const struct ckpt_tool_verb ckpt_tool_verb_show = {
    .name = "show",
    .paths = "PATH",
    .paths_min = 1,
    .paths_max = 1,
    .summary = "what a checkpoint holds; of a root, the newest",
    .text = "Shows what one checkpoint holds: run, step, digest, layout, parts. Of a root,\n"
            "the newest good one. PATH may also be a safetensors file or directory, or a\n"
            "llama2.c file: then its tensors are shown.\n",
    .examples = "  ckpt-tool show /scratch/run7 --json | jq .state_digest\n"
                "  ckpt-tool show /scratch/run7 --stats\n",
    .options = show_table,
    .option_count = sizeof(show_table) / sizeof(show_table[0]),
    .options_bytes = sizeof(struct show_options),
    .has_progress = true,
    .run = run,
};
