/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt-tool ls: the checkpoints of a root. */
#include <math.h>
#include <stdio.h>

#include "base/json.h"
#include "tools/ckpt_tool.h"

static json_t *entry_json(const struct ckpt_entry *entry)
{
    char digest[BL_STATE_DIGEST_TEXT_BYTES];

    bl_state_digest_format(&entry->digest, digest);
    return json_pack("{ss ss sI sI sI sI sI sI si si so ss so ss}", "dir", entry->dir, "state",
                     ckpt_tool_state(entry->state), "step", (json_int_t)entry->step, "generation",
                     (json_int_t)entry->generation, "line", (json_int_t)entry->line, "samples",
                     (json_int_t)entry->samples, "bytes", (json_int_t)entry->bytes, "saved_unix_s",
                     (json_int_t)entry->saved_unix_s, "parts", (int)entry->part_count, "world",
                     (int)entry->world, "loss",
                     isfinite(entry->loss) ? json_real(entry->loss) : json_null(), "state_digest",
                     digest, "manifest_digest", bl_json_new_hex64(entry->manifest_digest), "why",
                     entry->why);
}

static int print_json(const struct ckpt_store *store, const struct ckpt_scan *scan)
{
    json_t *list = json_array();

    for (uint32_t i = scan->count; i-- > 0;) {
        json_array_append_new(list, entry_json(&scan->entries[i]));
    }
    return ckpt_tool_print_json(json_pack("{si ss ss so}", "schema", 1, "root",
                                          ckpt_store_path(store), "run", ckpt_store_run(store),
                                          "checkpoints", list),
                                TOOL_GOOD);
}

static void print_entry(const struct ckpt_entry *entry)
{
    char size[TOOL_TEXT_MAX], when[TOOL_TEXT_MAX], loss[TOOL_TEXT_MAX] = "-";

    if (entry->state == CKPT_GOOD || entry->state == CKPT_FORWARD) {
        if (isfinite(entry->loss)) {
            snprintf(loss, sizeof(loss), "%.4f", entry->loss);
        }
        printf("%12llu %5llu %8s %10s %5u  %-19s  %-10s  %s\n", (unsigned long long)entry->step,
               (unsigned long long)entry->generation, loss, ckpt_tool_size(size, entry->bytes),
               entry->part_count, ckpt_tool_time(when, entry->saved_unix_s),
               ckpt_tool_state(entry->state), entry->dir);
    } else {
        printf("%12llu %5llu %8s %10s %5s  %-19s  %-10s  %s\n", (unsigned long long)entry->step,
               (unsigned long long)entry->generation, "-", "-", "-", "-",
               ckpt_tool_state(entry->state), entry->dir);
        printf("%12s %s\n", "", entry->why);
    }
}

static int run(const struct ckpt_tool_call *call)
{
    char dir[CKPT_DIR_MAX];
    struct ckpt_store *store = ckpt_tool_open(call->paths[0], dir);
    struct bl_errmsg why = {0};
    struct ckpt_scan scan;
    int code = TOOL_GOOD;

    if (store == NULL) {
        return TOOL_COULD_NOT;
    }
    if (ckpt_scan(store, &scan, &why) < 0) {
        ckpt_store_close(store);
        return ckpt_tool_fail("%s", why.text);
    }
    if (call->json) {
        code = print_json(store, &scan);
    } else {
        printf("run %s%s%s\n", ckpt_store_run(store)[0] == '\0' ? "?" : ckpt_store_run(store),
               ckpt_store_damage(store)[0] == '\0' ? "" : "  ", ckpt_store_damage(store));
        printf("%12s %5s %8s %10s %5s  %-19s  %-10s  %s\n", "step", "gen", "loss", "size", "parts",
               "saved (UTC)", "state", "directory");
        for (uint32_t i = scan.count; i-- > 0;) {
            print_entry(&scan.entries[i]);
        }
    }
    ckpt_scan_close(&scan);
    ckpt_store_close(store);
    return code;
}

const struct ckpt_tool_verb ckpt_tool_verb_ls = {
    .name = "ls",
    .paths = "ROOT",
    .paths_min = 1,
    .paths_max = 1,
    .summary = "the checkpoints of a root, newest last",
    .text = "Lists the checkpoints of a root.",
    .examples = "  ckpt-tool ls /scratch/run7\n",
    .run = run,
};
