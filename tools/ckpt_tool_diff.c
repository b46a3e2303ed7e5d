/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ckpt-tool diff: two sets of tensors, element by element: checkpoints, safetensors files or
 * directories, llama2.c files, in any pair. Tensors are matched by name; files of a model that is
 * known by its config.json are seen under Belay's names when the other side is a checkpoint.
 * Streaming: two slices of a tensor in memory.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "tools/ckpt_tool_foreign.h"
#include "tools/ckpt_tool_values.h"

struct diff_options {
    const char *only;
};

static const struct ckpt_tool_option diff_table[] = {
    {"--only", "KIND", TOOL_TEXT, offsetof(struct diff_options, only),
     "params: parameters, not the optimizer's moments"},
};

struct diff {
    const struct ckpt_tool_call *call;
    struct tool_source sources[2];
    struct ckpt_view *views[2]; /* of the sources, or mapped */
    uint8_t *raw[2];
    double *values[2];
    json_t *list; /* with --json: what differs */
    bool params_only;
    uint64_t done;
    struct bl_progress progress;
    /* The sum. */
    uint32_t compared, equal, only[2];
    struct tool_difference all;
    char worst[BL_TENSOR_NAME_MAX]; /* the tensor of all.max_abs */
};

/* ---- One tensor ---- */

static void shape_text(const struct bl_tensor *tensor, char ret[160])
{
    int n = snprintf(ret, 160, "%s[", bl_dtype_name(tensor->dtype));

    for (uint32_t d = 0; d < tensor->dims; d++) {
        n += snprintf(ret + n, 160 - (size_t)n, "%s%llu", d == 0 ? "" : ",",
                      (unsigned long long)tensor->shape[d]);
    }
    snprintf(ret + n, 160 - (size_t)n, "]");
}

static void tell(struct diff *diff, const char *name, const char *what, const char *a,
                 const char *b)
{
    bl_progress_clear(&diff->progress);
    if (diff->list != NULL) {
        json_array_append_new(
            diff->list, json_pack("{ss ss ss* ss*}", "name", name, "what", what, "a", a, "b", b));
    } else if (a != NULL && b != NULL) {
        printf("%s: %s: %s, %s\n", name, what, a, b);
    } else {
        printf("%s: %s\n", name, what);
    }
}

static void tell_values(struct diff *diff, const char *name, const struct tool_difference *d)
{
    bl_progress_clear(&diff->progress);
    if (diff->list != NULL) {
        json_array_append_new(
            diff->list,
            json_pack("{ss ss sI sI sI sf sI sf sf sf}", "name", name, "what", "values", "elements",
                      (json_int_t)d->count, "differing", (json_int_t)d->differing, "unordered",
                      (json_int_t)d->unordered, "max_abs", d->max_abs, "max_at",
                      (json_int_t)d->max_at, "mean_abs", tool_difference_mean(d), "max_rel",
                      d->max_rel, "relative",
                      isfinite(tool_difference_relative(d)) ? tool_difference_relative(d) : -1.0));
        return;
    }
    printf("%s: %llu of %llu differ, max %.6g at %llu, mean %.6g, relative %.3g (max %.3g)", name,
           (unsigned long long)d->differing, (unsigned long long)d->count, d->max_abs,
           (unsigned long long)d->max_at, tool_difference_mean(d), tool_difference_relative(d),
           d->max_rel);
    if (d->unordered > 0) {
        printf(", %llu with a NaN or an infinity", (unsigned long long)d->unordered);
    }
    putchar('\n');
}

static int compare_values(struct diff *diff, const uint32_t index[2], struct tool_difference *ret,
                          struct bl_errmsg *msg)
{
    const struct bl_tensor *tensors[2] = {&diff->views[0]->tensors[index[0]],
                                          &diff->views[1]->tensors[index[1]]};
    uint32_t bytes = tensors[0]->dtype == tensors[1]->dtype ? bl_dtype_bytes(tensors[0]->dtype) : 0;
    uint64_t elems = tensors[0]->dims == 0 ? 1 : bl_tensor_elems(tensors[0]);
    int rc = 0;

    for (uint64_t lo = 0, hi; rc == 0 && lo < elems; lo = hi) {
        hi = elems - lo < TOOL_SLICE_ELEMS ? elems : lo + TOOL_SLICE_ELEMS;
        for (int side = 0; rc == 0 && side < 2; side++) {
            rc = ckpt_view_read_flat(diff->views[side], index[side], lo, hi, diff->raw[side], msg);
            if (rc == 0) {
                tool_values(diff->values[side], diff->raw[side], tensors[side]->dtype, hi - lo);
                diff->done += (hi - lo) * bl_dtype_bytes(tensors[side]->dtype);
            }
        }
        if (rc == 0) {
            tool_difference_add(ret, lo, diff->values[0], diff->values[1], diff->raw[0],
                                diff->raw[1], bytes, hi - lo);
            bl_progress_show(&diff->progress, diff->done);
        }
    }
    return rc;
}

static void add_up(struct diff *diff, const char *name, const struct tool_difference *d)
{
    struct tool_difference *all = &diff->all;

    if (d->max_abs > all->max_abs) {
        all->max_abs = d->max_abs;
        all->max_at = d->max_at;
        snprintf(diff->worst, sizeof(diff->worst), "%s", name);
    }
    all->max_rel = d->max_rel > all->max_rel ? d->max_rel : all->max_rel;
    all->count += d->count;
    all->differing += d->differing;
    all->unordered += d->unordered;
    all->sum_abs += d->sum_abs;
    all->sum_square += d->sum_square;
    all->sum_square_a += d->sum_square_a;
}

static int compare_tensor(struct diff *diff, const uint32_t index[2], struct bl_errmsg *msg)
{
    const struct bl_tensor *a = &diff->views[0]->tensors[index[0]];
    const struct bl_tensor *b = &diff->views[1]->tensors[index[1]];
    struct tool_difference d = {0};
    char a_text[160], b_text[160];
    int rc;

    diff->compared++;
    shape_text(a, a_text);
    shape_text(b, b_text);
    if (a->dims != b->dims || memcmp(a->shape, b->shape, a->dims * sizeof(*a->shape)) != 0) {
        tell(diff, a->name, "shape", a_text, b_text);
        return 0;
    }
    if (a->dtype != b->dtype) {
        tell(diff, a->name, "dtype", a_text, b_text);
    }
    rc = compare_values(diff, index, &d, msg);
    if (rc < 0) {
        return rc;
    }
    add_up(diff, a->name, &d);
    if (d.differing > 0) {
        tell_values(diff, a->name, &d);
    }
    diff->equal += d.differing == 0 && a->dtype == b->dtype;
    return 0;
}

/* ---- All of them ---- */

/* The next tensor of a side that counts, from *at on; false at the end. */
static bool next_tensor(const struct diff *diff, int side, uint32_t *at)
{
    const struct ckpt_view *view = diff->views[side];

    while (*at < view->tensor_count && diff->params_only &&
           view->tensors[*at].kind != BL_KIND_PARAM) {
        ++*at;
    }
    return *at < view->tensor_count;
}

static int compare_all(struct diff *diff, struct bl_errmsg *msg)
{
    uint32_t at[2] = {0, 0};
    int rc = 0;

    while (rc == 0) {
        bool has[2] = {next_tensor(diff, 0, &at[0]), next_tensor(diff, 1, &at[1])};
        int order;

        if (!has[0] && !has[1]) {
            return 0;
        }
        order = !has[0]   ? 1
                : !has[1] ? -1
                          : strcmp(diff->views[0]->tensors[at[0]].name,
                                   diff->views[1]->tensors[at[1]].name);
        if (order == 0) {
            rc = compare_tensor(diff, at, msg);
            at[0]++;
            at[1]++;
        } else {
            int side = order > 0;

            tell(diff, diff->views[side]->tensors[at[side]].name,
                 side == 0 ? "only in the first" : "only in the second", NULL, NULL);
            diff->only[side]++;
            at[side]++;
        }
    }
    return rc;
}

static uint64_t bytes_of(const struct diff *diff)
{
    uint64_t bytes = 0;

    for (int side = 0; side < 2; side++) {
        for (uint32_t at = 0; next_tensor(diff, side, &at); at++) {
            const struct bl_tensor *tensor = &diff->views[side]->tensors[at];

            bytes += bl_tensor_elems(tensor) * bl_dtype_bytes(tensor->dtype);
        }
    }
    return bytes;
}

/* ---- The verb ---- */

static bool is_same(const struct diff *diff)
{
    return diff->equal == diff->compared && diff->only[0] == 0 && diff->only[1] == 0 &&
           diff->sources[0].findings == 0 && diff->sources[1].findings == 0;
}

static int print_sum(struct diff *diff)
{
    const struct tool_difference *all = &diff->all;
    int code = is_same(diff) ? TOOL_GOOD : TOOL_FINDING;

    if (diff->list != NULL) {
        json_t *list = diff->list;

        diff->list = NULL;
        return ckpt_tool_print_json(
            json_pack("{si ss ss sb si si si si sI sI sf sf so}", "schema", 1, "a",
                      diff->call->paths[0], "b", diff->call->paths[1], "equal", is_same(diff),
                      "tensors", (int)diff->compared, "tensors_equal", (int)diff->equal, "only_a",
                      (int)diff->only[0], "only_b", (int)diff->only[1], "elements",
                      (json_int_t)all->count, "differing", (json_int_t)all->differing, "max_abs",
                      all->max_abs, "mean_abs", tool_difference_mean(all), "differences", list),
            code);
    }
    printf(
        "%u tensors in both, %u equal bit for bit; %u only in the first, %u only in the second\n",
        diff->compared, diff->equal, diff->only[0], diff->only[1]);
    if (all->differing > 0) {
        printf("%llu of %llu elements differ, max %.6g (%s), mean %.6g, relative %.3g\n",
               (unsigned long long)all->differing, (unsigned long long)all->count, all->max_abs,
               diff->worst[0] == '\0' ? "-" : diff->worst, tool_difference_mean(all),
               tool_difference_relative(all));
    }
    return code;
}

static int compare(struct diff *diff)
{
    struct bl_errmsg why = {0};
    int rc;

    for (int side = 0; side < 2; side++) {
        diff->raw[side] = malloc(TOOL_SLICE_ELEMS * sizeof(double));
        diff->values[side] = malloc(TOOL_SLICE_ELEMS * sizeof(double));
        if (diff->raw[side] == NULL || diff->values[side] == NULL) {
            return ckpt_tool_fail("out of memory");
        }
    }
    bl_progress_start(&diff->progress, "diff", bytes_of(diff),
                      bl_progress_mode(diff->call->json, diff->call->progress));
    rc = compare_all(diff, &why);
    bl_progress_finish(&diff->progress);
    return rc < 0 ? ckpt_tool_fail("%s", why.text) : print_sum(diff);
}

static int run(const struct ckpt_tool_call *call)
{
    const struct diff_options *options = call->options;
    struct diff diff = {.call = call, .params_only = options->only != NULL};
    bool good;
    int code;

    if (options->only != NULL && strcmp(options->only, "params") != 0) {
        return ckpt_tool_usage("diff", options->only, "--only is params");
    }
    good = tool_source_open(&diff.sources[0], call->paths[0], NULL) &&
           tool_source_open(&diff.sources[1], call->paths[1], NULL);
    for (int side = 0; good && side < 2; side++) {
        const struct tool_source *other = &diff.sources[1 - side];

        diff.views[side] = diff.sources[side].view;
        if (other->store != NULL || other->ours != NULL || diff.sources[side].ours != NULL) {
            good = tool_source_ours(&diff.sources[side], &diff.views[side]);
        }
    }
    diff.list = call->json ? json_array() : NULL;
    code = good ? compare(&diff) : TOOL_COULD_NOT;
    json_decref(diff.list);
    for (int side = 0; side < 2; side++) {
        free(diff.raw[side]);
        free(diff.values[side]);
        tool_source_close(&diff.sources[side]);
    }
    return code;
}

const struct ckpt_tool_verb ckpt_tool_verb_diff = {
    .name = "diff",
    .paths = "A B",
    .paths_min = 2,
    .paths_max = 2,
    .summary = "compares two checkpoints, or one and other people's files",
    .text = "Compares tensors by name: shapes, dtypes, every element. A and B are checkpoints\n"
            "(of a root the newest good one), safetensors files or directories, or llama2.c\n"
            "files. Prints what differs: how many elements, the largest and mean absolute\n"
            "difference, the relative one (of the norms) and its largest element.\n"
            "Exit status 0: equal bit for bit; 1: they differ.\n",
    .examples = "  ckpt-tool diff /scratch/run7/step-000000001200.g7 /backup/run7 --only params\n"
                "  ckpt-tool diff /scratch/run7 Llama-3.2-1B --json\n",
    .options = diff_table,
    .option_count = sizeof(diff_table) / sizeof(diff_table[0]),
    .options_bytes = sizeof(struct diff_options),
    .has_progress = true,
    .run = run,
};
