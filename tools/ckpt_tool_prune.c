/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ckpt-tool prune: retention by hand, by the very rules that the engine has. What no rule keeps is
 * moved to .trash, one directory after the other, and then unlinked; killed anywhere, each
 * checkpoint is there whole or gone, and the next run goes on.
 */
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/file.h"
#include "base/json.h"
#include "ckpt/retain.h"
#include "ckpt/store.h"
#include "tools/ckpt_tool.h"
#include "tools/ckpt_tool_work.h"

struct prune_options {
    uint64_t keep, keep_every, keep_best, bytes_max;
    bool dry_run, keep_trash;
};

#define AT(field) offsetof(struct prune_options, field)
static const struct ckpt_tool_option table[] = {
    {"--keep", "N", TOOL_COUNT, AT(keep), "keep the N newest, at least two"},
    {"--keep-every", "M", TOOL_COUNT, AT(keep_every), "keep those whose step is a multiple of M"},
    {"--keep-best", "N", TOOL_COUNT, AT(keep_best), "keep the N with the lowest loss"},
    {"--bytes-max", "B", TOOL_SIZE, AT(bytes_max), "of what is kept, let the oldest go beyond B"},
    {"--dry-run", NULL, TOOL_FLAG, AT(dry_run), "say what would go and why; change nothing"},
    {"--keep-trash", NULL, TOOL_FLAG, AT(keep_trash),
     "leave the files in .trash, where the next save takes its space from"},
};

struct prune {
    const struct ckpt_tool_call *call;
    const struct prune_options *options;
    struct ckpt_keep keep;
    struct ckpt_store *store;
    struct ckpt_scan scan;
    struct ckpt_decision *decisions; /* owned; one per entry */
    json_t *read_back;               /* names of those that were, or would be, verified first */
    uint64_t bytes_removed;
    uint32_t kept, removed;
    struct bl_progress progress;
    int code; /* TOOL_FINDING when a checkpoint did not read back */
};

static int decide(struct prune *prune)
{
    struct bl_errmsg why = {0};

    return ckpt_retain_decide(prune->decisions, prune->scan.entries, prune->scan.count,
                              &prune->keep, NULL, 0, &why) < 0
               ? ckpt_tool_fail("%s", why.text)
               : TOOL_GOOD;
}

/* Would anything go if all that looks good were verified? */
static bool has_work(struct prune *prune)
{
    uint64_t *before = calloc(prune->scan.count + 1u, sizeof(*before));
    bool any = before == NULL;

    for (uint32_t i = 0; before != NULL && i < prune->scan.count; i++) {
        before[i] = prune->scan.entries[i].verified_unix_s;
        prune->scan.entries[i].verified_unix_s = 1;
    }
    any = any || decide(prune) != TOOL_GOOD;
    for (uint32_t i = 0; before != NULL && i < prune->scan.count; i++) {
        prune->scan.entries[i].verified_unix_s = before[i];
        any = any || prune->decisions[i].remove;
    }
    free(before);
    return any;
}

/* Reads one back whole. Good: it is marked; else it counts as broken from here on. */
static int verify_entry(struct prune *prune, struct ckpt_entry *entry)
{
    struct tool_verify one = {
        .store = prune->store, .dir = entry->dir, .full = true, .progress = &prune->progress};
    struct bl_errmsg why = {0};
    const json_t *first;
    int code;

    bl_progress_start(&prune->progress, entry->dir, 0,
                      bl_progress_mode(prune->call->json, prune->call->progress));
    code = tool_verify_run(&one);
    bl_progress_finish(&prune->progress);
    if (code == TOOL_GOOD && !one.gone) {
        entry->verified_unix_s = (uint64_t)time(NULL);
        if (ckpt_verified_mark(prune->store, entry->dir, entry->manifest_digest, &why) < 0) {
            code = ckpt_tool_fail("%s", why.text);
        }
    } else if (code != TOOL_COULD_NOT) {
        first = json_array_get(one.findings, 0);
        entry->state = one.gone ? CKPT_LEFTOVER : CKPT_BROKEN;
        snprintf(entry->why, sizeof(entry->why), "%.*s", CKPT_WHY_MAX - 1,
                 first == NULL ? "retired meanwhile"
                               : json_string_value(json_object_get(first, "text")));
        if (code == TOOL_FINDING) {
            prune->code = TOOL_FINDING;
            ckpt_tool_fail("%s", entry->why);
        }
    }
    json_decref(one.findings);
    return code == TOOL_COULD_NOT ? code : TOOL_GOOD;
}

/* Two that are newer than whatever goes must be verified: reads back as many of the newest as that
 * takes. A dry run takes it for granted. */
static int verify_newest(struct prune *prune)
{
    uint32_t verified = 0;
    int code = TOOL_GOOD;

    for (uint32_t i = 0;
         code == TOOL_GOOD && i < prune->scan.count && verified < CKPT_RETAIN_VERIFIED_MIN; i++) {
        struct ckpt_entry *entry = &prune->scan.entries[i];

        if (entry->state != CKPT_GOOD) {
            continue;
        }
        if (entry->verified_unix_s == 0) {
            json_array_append_new(prune->read_back, json_string(entry->dir));
            if (prune->options->dry_run) {
                entry->verified_unix_s = 1;
            } else {
                code = verify_entry(prune, entry);
            }
        }
        verified += entry->verified_unix_s > 0;
    }
    return code;
}

/* ---- Removing ---- */

static int empty_trash(struct prune *prune, struct bl_errmsg *msg)
{
    struct ckpt_io *io = prune->store->io;
    struct ckpt_names names = {0};
    char trash[CKPT_PATH_MAX];
    int rc = ckpt_path_join(trash, prune->store->path, CKPT_TRASH_DIR, NULL, msg);

    rc = rc < 0 ? rc : io->ops->list(io, trash, CKPT_ENTRIES_MAX, &names);
    if (rc == -ENOENT) {
        return 0;
    }
    rc = rc < 0 ? bl_err_code(msg, rc, "read directory %s", trash) : 0;
    for (uint32_t i = 0; rc == 0 && i < names.count; i++) {
        rc = bl_rm_tree(trash, names.names[i], msg);
    }
    ckpt_names_close(&names);
    return rc;
}

static int remove_them(struct prune *prune)
{
    struct ckpt_retain_result result = {0};
    struct bl_errmsg why = {0};
    int rc = ckpt_retain_remove(prune->store, prune->scan.entries, prune->decisions,
                                prune->scan.count, &result, &why);

    prune->removed = result.removed;
    if (rc == 0 && !prune->options->keep_trash) {
        rc = empty_trash(prune, &why);
    }
    return rc < 0 ? ckpt_tool_fail("%s", why.text) : TOOL_GOOD;
}

/* ---- Telling ---- */

static bool is_checkpoint(const struct ckpt_entry *entry)
{
    return entry->state == CKPT_GOOD || entry->state == CKPT_BROKEN || entry->state == CKPT_FOREIGN;
}

static void print_text(const struct prune *prune)
{
    char size[BL_HUMAN_MAX];

    for (size_t i = 0; prune->options->dry_run && i < json_array_size(prune->read_back); i++) {
        printf("%-12s %s: before anything goes\n", "read back",
               json_string_value(json_array_get(prune->read_back, i)));
    }
    for (uint32_t i = 0; i < prune->scan.count; i++) {
        const struct ckpt_entry *entry = &prune->scan.entries[i];

        if (is_checkpoint(entry)) {
            printf("%-12s %s (%s): %s\n",
                   !prune->decisions[i].remove ? "keep"
                   : prune->options->dry_run   ? "would remove"
                                               : "removed",
                   entry->dir, bl_human_bytes(size, entry->bytes), prune->decisions[i].why);
        }
    }
    printf("%s: %u kept, %u %s, %s\n", ckpt_store_path(prune->store), prune->kept, prune->removed,
           prune->options->dry_run ? "would go" : "removed",
           bl_human_bytes(size, prune->bytes_removed));
}

static int print_json(const struct prune *prune)
{
    json_t *list = json_array();

    for (uint32_t i = 0; i < prune->scan.count; i++) {
        const struct ckpt_entry *entry = &prune->scan.entries[i];

        if (is_checkpoint(entry)) {
            json_array_append_new(
                list, json_pack("{ss sI ss sI sb ss}", "dir", entry->dir, "step",
                                (json_int_t)entry->step, "state", ckpt_tool_state(entry->state),
                                "bytes", (json_int_t)entry->bytes, "remove",
                                (int)prune->decisions[i].remove, "why", prune->decisions[i].why));
        }
    }
    return ckpt_tool_print_json(
        json_pack("{si ss sb si si sI sO so}", "schema", 1, "root", ckpt_store_path(prune->store),
                  "dry_run", (int)prune->options->dry_run, "kept", (int)prune->kept, "removed",
                  (int)prune->removed, "bytes_removed", (json_int_t)prune->bytes_removed,
                  "read_back", prune->read_back, "checkpoints", list),
        prune->code);
}

/* Decides, carries out unless it is a dry run, tells. An exit code. */
static int prune_root(struct prune *prune)
{
    struct bl_errmsg why = {0};
    int code;

    if (ckpt_scan(prune->store, &prune->scan, &why) < 0) {
        return ckpt_tool_fail("%s", why.text);
    }
    prune->decisions = calloc(prune->scan.count + 1u, sizeof(*prune->decisions));
    if (prune->decisions == NULL) {
        return ckpt_tool_fail("out of memory");
    }
    code = has_work(prune) ? verify_newest(prune) : TOOL_GOOD;
    code = code == TOOL_GOOD ? decide(prune) : code;
    if (code != TOOL_GOOD) {
        return code;
    }
    for (uint32_t i = 0; i < prune->scan.count; i++) {
        bool removed = prune->decisions[i].remove;

        prune->bytes_removed += removed ? prune->scan.entries[i].bytes : 0;
        prune->removed += removed;
        prune->kept += !removed && prune->scan.entries[i].state == CKPT_GOOD;
    }
    code = prune->options->dry_run ? TOOL_GOOD : remove_them(prune);
    if (code != TOOL_GOOD) {
        return code;
    }
    if (prune->call->json) {
        return print_json(prune);
    }
    print_text(prune);
    return prune->code;
}

static int run(const struct ckpt_tool_call *call)
{
    struct prune prune = {.call = call, .options = call->options};
    const struct prune_options *options = call->options;
    int code;

    if (options->keep > UINT32_MAX || options->keep_best > UINT32_MAX) {
        return ckpt_tool_usage("prune", "--keep", "too large a number");
    }
    prune.keep = (struct ckpt_keep){.keep = (uint32_t)options->keep,
                                    .keep_best = (uint32_t)options->keep_best,
                                    .keep_every = options->keep_every,
                                    .bytes_max = options->bytes_max};
    if (!ckpt_keep_is_on(&prune.keep)) {
        return ckpt_tool_usage("prune", "prune",
                               "says nothing of what to keep: --keep, --keep-every, --keep-best "
                               "or --bytes-max");
    }
    tool_cancel_on_signals();
    code = tool_open_root(&prune.store, call->paths[0], !options->dry_run);
    if (code != TOOL_GOOD) {
        return code;
    }
    prune.read_back = json_array();
    code = prune_root(&prune);
    json_decref(prune.read_back);
    free(prune.decisions);
    ckpt_scan_close(&prune.scan);
    ckpt_store_close(prune.store);
    return code;
}

const struct ckpt_tool_verb ckpt_tool_verb_prune = {
    .name = "prune",
    .paths = "ROOT",
    .paths_min = 1,
    .paths_max = 1,
    .summary = "removes old checkpoints by the rules of retention",
    .text = "Removes the checkpoints of a root that no rule keeps; what any rule keeps stays.\n"
            "Whatever the rules say, nothing goes unless two newer ones stay that were read\n"
            "back whole; where they were not yet, that is done first. --dry-run lists exactly\n"
            "what would go, and why.",
    .examples = "  ckpt-tool prune /scratch/run7 --keep 3 --keep-every 10000 --dry-run\n"
                "  ckpt-tool prune /archive/run7 --bytes-max 2T --keep-best 1\n",
    .options = table,
    .option_count = sizeof(table) / sizeof(table[0]),
    .options_bytes = sizeof(struct prune_options),
    .has_progress = true,
    .run = run,
};
