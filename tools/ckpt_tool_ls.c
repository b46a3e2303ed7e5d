/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt-tool ls: the checkpoints of roots. */
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/json.h"
#include "tools/ckpt_tool.h"
#include "tools/ckpt_tool_work.h"

struct ls_options {
    bool all;
};

static const struct ckpt_tool_option table[] = {
    {"--all", NULL, TOOL_FLAG, offsetof(struct ls_options, all),
     "also what saves in progress or cut off have left"},
};

static bool is_complete(const struct ckpt_entry *entry)
{
    return entry->state == CKPT_GOOD || entry->state == CKPT_FORWARD ||
           entry->state == CKPT_PARTIAL || entry->state == CKPT_PREPARED;
}

static bool is_shown(const struct ckpt_entry *entry, const struct ls_options *options)
{
    return entry->state != CKPT_LEFTOVER || options->all;
}

static json_t *entry_json(const struct ckpt_entry *entry, uint64_t now_s)
{
    char digest[BL_STATE_DIGEST_TEXT_BYTES];
    json_t *value;

    bl_state_digest_format(&entry->digest, digest);
    value = json_pack("{ss ss sI sI sI sI sI sI si si so ss so ss}", "dir", entry->dir, "state",
                      ckpt_tool_state(entry->state), "step", (json_int_t)entry->step, "generation",
                      (json_int_t)entry->generation, "line", (json_int_t)entry->line, "samples",
                      (json_int_t)entry->samples, "bytes", (json_int_t)entry->bytes, "saved_unix_s",
                      (json_int_t)entry->saved_unix_s, "parts", (int)entry->part_count, "world",
                      (int)entry->world, "loss",
                      isfinite(entry->loss) ? json_real(entry->loss) : json_null(), "state_digest",
                      digest, "manifest_digest", bl_json_new_hex64(entry->manifest_digest), "why",
                      entry->why);
    if (value != NULL && is_complete(entry)) {
        json_object_set_new(value, "parts_here", json_integer((json_int_t)entry->parts_here));
        json_object_set_new(value, "codec", json_string(entry->codec));
        json_object_set_new(value, "layout", tool_layout_json(&entry->layout));
        json_object_set_new(value, "age_s",
                            json_integer(now_s > entry->saved_unix_s
                                             ? (json_int_t)(now_s - entry->saved_unix_s)
                                             : 0));
        json_object_set_new(value, "verified_unix_s",
                            json_integer((json_int_t)entry->verified_unix_s));
    }
    return value;
}

static json_t *root_json(const struct ckpt_store *store, const struct ckpt_scan *scan,
                         const struct ls_options *options, uint64_t now_s)
{
    json_t *list = json_array();

    for (uint32_t i = 0; i < scan->count; i++) {
        if (is_shown(&scan->entries[i], options)) {
            json_array_append_new(list, entry_json(&scan->entries[i], now_s));
        }
    }
    return json_pack("{ss ss ss so}", "root", ckpt_store_path(store), "run", ckpt_store_run(store),
                     "root_damage", ckpt_store_damage(store), "checkpoints", list);
}

/* "12 s", "3 min", "5 h", "12 d": one number is enough for an age. */
static const char *age_text(char ret[BL_HUMAN_MAX], uint64_t saved_s, uint64_t now_s)
{
    uint64_t age = now_s > saved_s ? now_s - saved_s : 0;

    if (saved_s == 0) {
        snprintf(ret, BL_HUMAN_MAX, "-");
    } else if (age < 120) {
        snprintf(ret, BL_HUMAN_MAX, "%llu s", (unsigned long long)age);
    } else if (age < 7200) {
        snprintf(ret, BL_HUMAN_MAX, "%llu min", (unsigned long long)age / 60);
    } else if (age < 2 * 86400) {
        snprintf(ret, BL_HUMAN_MAX, "%llu h", (unsigned long long)age / 3600);
    } else {
        snprintf(ret, BL_HUMAN_MAX, "%llu d", (unsigned long long)age / 86400);
    }
    return ret;
}

/* "dp4,zero1", "dp2,tp4,pp2": what is not 1 (zero: not 0). */
static const char *layout_text(char ret[BL_HUMAN_MAX], const struct ckpt_layout *layout)
{
    const struct {
        const char *name;
        uint32_t value, plain;
    } axes[] = {{"dp", layout->dp, 1},
                {"tp", layout->tp, 1},
                {"pp", layout->pp, 1},
                {"zero", layout->zero, 0}};
    int at = 0;

    ret[0] = '\0';
    for (uint32_t i = 0; i < 4 && at < BL_HUMAN_MAX - 1; i++) {
        if (axes[i].value != axes[i].plain) {
            at += snprintf(ret + at, (size_t)(BL_HUMAN_MAX - at), "%s%s%u", at == 0 ? "" : ",",
                           axes[i].name, axes[i].value);
        }
    }
    if (at == 0) {
        snprintf(ret, BL_HUMAN_MAX, "%u rank%s", layout->world, layout->world == 1 ? "" : "s");
    }
    return ret;
}

static void print_entry(const struct ckpt_entry *entry, uint64_t now_s)
{
    char size[BL_HUMAN_MAX], age[BL_HUMAN_MAX], layout[BL_HUMAN_MAX];
    char loss[BL_HUMAN_MAX] = "-", line[BL_HUMAN_MAX], parts[BL_HUMAN_MAX];

    if (!is_complete(entry)) {
        printf("%12llu  %-10s %10s %7s %8s %5s %5s %5s  %-14s  %s\n",
               (unsigned long long)entry->step, ckpt_tool_state(entry->state), "-", "-", "-", "-",
               "-", "-", "-", entry->dir);
        printf("%12s  %s\n", "", entry->why);
        return;
    }
    if (isfinite(entry->loss)) {
        snprintf(loss, sizeof(loss), "%.4f", entry->loss);
    }
    snprintf(line, sizeof(line), "%llu", (unsigned long long)entry->line);
    snprintf(parts, sizeof(parts), "%u", entry->part_count);
    printf("%12llu  %-10s %10s %7s %8s %5s %5s %5s  %-14s  %s\n", (unsigned long long)entry->step,
           entry->state == CKPT_GOOD && entry->verified_unix_s > 0 ? "verified"
                                                                   : ckpt_tool_state(entry->state),
           bl_human_bytes(size, entry->bytes), age_text(age, entry->saved_unix_s, now_s), loss,
           line, parts, entry->codec, layout_text(layout, &entry->layout), entry->dir);
    if (entry->lacks[0] != '\0') {
        printf("%12s  %u of %u parts %s here; node %s%s\n", "", entry->parts_here,
               entry->part_count, entry->parts_here == 1 ? "is" : "are", entry->lacks,
               entry->state == CKPT_PREPARED
                   ? " has others, and only the run knows whether it is committed"
                   : " has others: give the roots of all nodes together, A,B,C");
    }
}

static void print_root(const struct ckpt_store *store, const struct ckpt_scan *scan,
                       const struct ls_options *options, uint64_t now_s)
{
    uint64_t bytes = 0;
    uint32_t count = 0;
    char size[BL_HUMAN_MAX];

    for (uint32_t i = 0; i < scan->count; i++) {
        count += is_complete(&scan->entries[i]);
        bytes += scan->entries[i].bytes;
    }
    printf("run %s  %s: %u checkpoint%s, %s%s%s\n",
           ckpt_store_run(store)[0] == '\0' ? "?" : ckpt_store_run(store), ckpt_store_path(store),
           count, count == 1 ? "" : "s", bl_human_bytes(size, bytes),
           ckpt_store_damage(store)[0] == '\0' ? "" : "; ", ckpt_store_damage(store));
    if (ckpt_store_owner(store)[0] != '\0') {
        printf(
            "node %s has this root for itself: checkpoints over several nodes are here in part\n",
            ckpt_store_owner(store));
    }
    printf("%12s  %-10s %10s %7s %8s %5s %5s %5s  %-14s  %s\n", "step", "state", "size", "age",
           "loss", "line", "parts", "codec", "layout", "directory");
    for (uint32_t i = 0; i < scan->count; i++) {
        if (is_shown(&scan->entries[i], options)) {
            print_entry(&scan->entries[i], now_s);
        }
    }
}

/* One root, which may be given by a checkpoint in it. An exit code. */
static int list_root(const struct ckpt_tool_call *call, const char *path, json_t *roots)
{
    uint64_t now_s = (uint64_t)time(NULL);
    char dir[CKPT_DIR_MAX];
    struct ckpt_store *store = ckpt_tool_open(path, dir);
    struct bl_errmsg why = {0};
    struct ckpt_scan scan;

    if (store == NULL) {
        return TOOL_COULD_NOT;
    }
    if (ckpt_scan(store, &scan, &why) < 0) {
        ckpt_store_close(store);
        return ckpt_tool_fail("%s", why.text);
    }
    if (call->json) {
        json_array_append_new(roots, root_json(store, &scan, call->options, now_s));
    } else {
        print_root(store, &scan, call->options, now_s);
    }
    ckpt_scan_close(&scan);
    ckpt_store_close(store);
    return TOOL_GOOD;
}

static int run(const struct ckpt_tool_call *call)
{
    json_t *roots = json_array();
    int code = TOOL_GOOD, one;

    for (uint32_t i = 0; i < call->path_count; i++) {
        if (i > 0 && !call->json) {
            putchar('\n');
        }
        one = list_root(call, call->paths[i], roots);
        code = one > code ? one : code;
    }
    if (call->json && json_array_size(roots) > 0) {
        return ckpt_tool_print_json(json_pack("{si so}", "schema", 1, "roots", roots), code);
    }
    json_decref(roots);
    return code;
}

const struct ckpt_tool_verb ckpt_tool_verb_ls = {
    .name = "ls",
    .paths = "ROOT...",
    .paths_min = 1,
    .paths_max = TOOL_PATHS_MAX,
    .summary = "the checkpoints of roots, newest first",
    .text = "Lists the checkpoints of one or more roots, newest first: step, state, size,\n"
            "age, loss, line, parts, codec and layout. States: good (manifest, sizes and\n"
            "indexes check out), verified (every byte was read back too), broken (with the\n"
            "reason), committing (its commit was cut off and will be finished), foreign (of\n"
            "another run); with --all also unfinished (being written, or left by a crash).",
    .examples = "  ckpt-tool ls /scratch/run7 /archive/run7\n"
                "  ckpt-tool ls --json /scratch/run7 | jq -r '.roots[0].checkpoints[0].dir'\n",
    .options = table,
    .option_count = sizeof(table) / sizeof(table[0]),
    .options_bytes = sizeof(struct ls_options),
    .run = run,
};
