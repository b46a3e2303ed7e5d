/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt-tool repair: what is damaged in checkpoints is replaced from other copies of them. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "ckpt/repair.h"
#include "ckpt/store.h"
#include "tools/ckpt_tool.h"
#include "tools/ckpt_tool_work.h"

struct repair_options {
    struct ckpt_tool_texts from;
    const char *step;
    uint64_t memory;
    bool dry_run;
};

#define AT(field) offsetof(struct repair_options, field)
static const struct ckpt_tool_option table[] = {
    {"--from", "PATH", TOOL_TEXTS, AT(from),
     "a root or checkpoint with another copy; give it again for more"},
    {"--step", "N", TOOL_TEXT, AT(step), "of a root, only the checkpoint of that step"},
    {"--dry-run", NULL, TOOL_FLAG, AT(dry_run), "look at all, say what would be done"},
    {"--memory", "BYTES", TOOL_SIZE, AT(memory), "held at most (default 256M, at least 128M)"},
};

struct repair {
    const struct ckpt_tool_call *call;
    const struct repair_options *options;
    struct ckpt_store *store;
    struct ckpt_store *copies[TOOL_PATHS_MAX];    /* owned */
    char copy_dirs[TOOL_PATHS_MAX][CKPT_DIR_MAX]; /* "": the same name as here */
    json_t *list;                                 /* of checkpoints */
    json_t *actions;                              /* of the one at hand */
    const char *dir;
    struct bl_progress progress;
    uint64_t repaired, failed, bytes_written;
};

static void on_told(void *arg, const char *file, const char *text, bool done)
{
    struct repair *repair = arg;

    bl_progress_clear(&repair->progress);
    if (repair->call->json) {
        json_array_append_new(repair->actions, json_pack("{ss ss sb}", "file", file, "text", text,
                                                         "done", (int)done));
        return;
    }
    printf("%s/%s: %s: %s\n", repair->dir, file,
           !done                      ? "not repaired"
           : repair->options->dry_run ? "would be repaired"
                                      : "repaired",
           text);
    fflush(stdout);
}

static void on_progress(void *arg, uint64_t bytes_done, uint64_t bytes_all)
{
    struct repair *repair = arg;

    repair->progress.all = bytes_all;
    bl_progress_show(&repair->progress, bytes_done);
}

/* Reads back what was repaired; what is wrong yet counts as not repaired. */
static int check_result(struct repair *repair, struct ckpt_repair_result *result)
{
    struct tool_verify one = {
        .store = repair->store, .dir = repair->dir, .full = true, .progress = &repair->progress};
    struct ckpt_opened opened = {0};
    json_t *finding;
    size_t i;
    int code = tool_verify_run(&one);

    json_array_foreach(one.findings, i, finding)
    {
        result->failed++;
        on_told(repair, json_string_value(json_object_get(finding, "file")),
                json_string_value(json_object_get(finding, "text")), false);
    }
    json_decref(one.findings);
    /* What other nodes have too only the run marks, when all have read back theirs. */
    if (code == TOOL_GOOD && !one.gone && one.result.elsewhere == 0 &&
        ckpt_opened_manifest(repair->store, repair->dir, &opened, NULL) == 0) {
        BL_IGNORE(ckpt_verified_mark(repair->store, repair->dir, opened.manifest_digest, NULL),
                  "only a help for retention");
        ckpt_opened_close(&opened);
    }
    return code;
}

static void tell_one(struct repair *repair, const struct ckpt_repair_result *result)
{
    repair->repaired += result->repaired;
    repair->failed += result->failed;
    repair->bytes_written += result->bytes_written;
    if (repair->call->json) {
        json_array_append_new(repair->list,
                              json_pack("{ss sb si si sO}", "dir", repair->dir, "good",
                                        result->failed == 0, "repaired", (int)result->repaired,
                                        "failed", (int)result->failed, "actions", repair->actions));
    } else if (result->failed > 0) {
        printf("%s: %u not repaired\n", repair->dir, result->failed);
    } else if (result->repaired > 0) {
        printf("%s: %u %s\n", repair->dir, result->repaired,
               repair->options->dry_run ? "would be repaired" : "repaired; read back, all good");
    } else {
        printf("%s: good\n", repair->dir);
    }
}

/* An exit code. */
static int repair_one(struct repair *repair, const char *dir)
{
    struct ckpt_place places[TOOL_PATHS_MAX];
    struct ckpt_repair_job job = {.store = repair->store,
                                  .dir = dir,
                                  .copies = places,
                                  .dry_run = repair->options->dry_run,
                                  .memory_max = repair->options->memory,
                                  .told = on_told,
                                  .progress = on_progress,
                                  .arg = repair,
                                  .cancel = &tool_cancel};
    struct ckpt_repair_result result = {0};
    struct bl_errmsg why = {0};
    int code = TOOL_GOOD, rc;

    for (uint32_t i = 0; i < repair->options->from.count; i++) {
        const char *theirs = repair->copy_dirs[i][0] == '\0' ? dir : repair->copy_dirs[i];

        if (tool_is_there(repair->copies[i], theirs) && job.copy_count < CKPT_PLACES_MAX - 1) {
            places[job.copy_count++] = (struct ckpt_place){repair->copies[i], theirs};
        }
    }
    repair->dir = dir;
    repair->actions = json_array();
    bl_progress_start(&repair->progress, dir, 0,
                      bl_progress_mode(repair->call->json, repair->call->progress));
    rc = ckpt_repair(&job, &result, &why);
    if (rc < 0) {
        code = atomic_load(&tool_cancel) != 0 ? ckpt_tool_fail("interrupted; run it again")
                                              : ckpt_tool_fail("%s", why.text);
    } else if (result.repaired > 0 && !job.dry_run) {
        code = check_result(repair, &result);
    }
    bl_progress_finish(&repair->progress);
    if (code != TOOL_COULD_NOT) {
        tell_one(repair, &result);
    }
    json_decref(repair->actions);
    return code != TOOL_GOOD ? code : result.failed > 0 ? TOOL_FINDING : TOOL_GOOD;
}

/* ROOT/BELAY from a copy of the same run, when the manifests here say so too. */
static int repair_root_file(struct repair *repair)
{
    char path[CKPT_PATH_MAX], from[CKPT_PATH_MAX];
    struct bl_errmsg why = {0};
    struct ckpt_scan scan = {0};
    const char *damage = ckpt_store_damage(repair->store), *run = NULL;

    if (damage[0] == '\0') {
        return TOOL_GOOD;
    }
    repair->dir = ckpt_store_path(repair->store);
    repair->actions = json_array();
    for (uint32_t i = 0; run == NULL && i < repair->options->from.count; i++) {
        char *text = NULL;
        size_t bytes = 0;
        bool ours = true;

        if (ckpt_store_damage(repair->copies[i])[0] != '\0') {
            continue;
        }
        run = ckpt_store_run(repair->copies[i]);
        if (ckpt_scan(repair->store, &scan, &why) < 0) {
            return ckpt_tool_fail("%s", why.text);
        }
        for (uint32_t e = 0; e < scan.count; e++) {
            struct ckpt_opened opened = {0};

            if (ckpt_opened_manifest(repair->store, scan.entries[e].dir, &opened, NULL) == 0) {
                ours = ours && strcmp(opened.manifest.run, run) == 0;
                ckpt_opened_close(&opened);
            }
        }
        ckpt_scan_close(&scan);
        snprintf(path, sizeof(path), "%s/" CKPT_ROOT_FILE, ckpt_store_path(repair->store));
        snprintf(from, sizeof(from), "%s/" CKPT_ROOT_FILE, ckpt_store_path(repair->copies[i]));
        if (!ours || bl_file_read(from, CKPT_ROOT_FILE_MAX, &text, &bytes, NULL) < 0) {
            run = NULL;
        } else if (!repair->options->dry_run && bl_file_write_atomic(path, text, bytes, &why) < 0) {
            free(text);
            return ckpt_tool_fail("%s", why.text);
        }
        free(text);
    }
    on_told(repair, CKPT_ROOT_FILE, run == NULL ? damage : from, run != NULL);
    tell_one(repair, &(struct ckpt_repair_result){.repaired = run != NULL, .failed = run == NULL});
    json_decref(repair->actions);
    return run == NULL ? TOOL_FINDING : TOOL_GOOD;
}

static int repair_all(struct repair *repair, const uint64_t *step)
{
    struct bl_errmsg why = {0};
    struct ckpt_scan scan;
    int code = TOOL_GOOD, one;
    uint32_t looked_at = 0;

    if (ckpt_scan(repair->store, &scan, &why) < 0) {
        return ckpt_tool_fail("%s", why.text);
    }
    for (uint32_t i = 0; code != TOOL_COULD_NOT && i < scan.count; i++) {
        const struct ckpt_entry *entry = &scan.entries[i];

        if ((entry->state == CKPT_GOOD || entry->state == CKPT_BROKEN) &&
            (step == NULL || entry->step == *step)) {
            one = repair_one(repair, entry->dir);
            code = one > code ? one : code;
            looked_at++;
        }
    }
    ckpt_scan_close(&scan);
    return step != NULL && looked_at == 0
               ? ckpt_tool_fail("%s: no checkpoint of step %llu", ckpt_store_path(repair->store),
                                (unsigned long long)*step)
               : code;
}

/* Opens the root and the copies, repairs what belongs to the root. An exit code. */
static int open_all(struct repair *repair, char dir[CKPT_DIR_MAX])
{
    int code = TOOL_GOOD;

    repair->store = ckpt_tool_open(repair->call->paths[0], dir);
    if (repair->store == NULL) {
        return TOOL_COULD_NOT;
    }
    for (uint32_t i = 0; i < repair->options->from.count; i++) {
        repair->copies[i] = ckpt_tool_open(repair->options->from.at[i], repair->copy_dirs[i]);
        if (repair->copies[i] == NULL) {
            return TOOL_COULD_NOT;
        }
    }
    code = repair_root_file(repair);
    if (code == TOOL_GOOD && !repair->options->dry_run) {
        struct ckpt_store *fresh = NULL;
        struct bl_errmsg why = {0};
        const struct ckpt_store_config config = {.path = ckpt_store_path(repair->store)};

        if (ckpt_store_open(&fresh, &config, &why) < 0) { /* with its BELAY file as it is now */
            return ckpt_tool_fail("%s", why.text);
        }
        ckpt_store_close(repair->store);
        repair->store = fresh;
        code = tool_reopen_writing(&repair->store);
    }
    return code;
}

static int run(const struct ckpt_tool_call *call)
{
    static struct repair repair; /* large: names of copies */
    char dir[CKPT_DIR_MAX];
    uint64_t step = 0;
    int code;

    repair.call = call;
    repair.options = call->options;
    if (repair.options->from.count == 0) {
        return ckpt_tool_usage("repair", "--from", "another copy is missing");
    }
    if (repair.options->step != NULL && !ckpt_tool_parse_count(repair.options->step, &step)) {
        return ckpt_tool_usage("repair", "--step", "a whole number is wanted");
    }
    tool_cancel_on_signals();
    repair.list = json_array();
    code = open_all(&repair, dir);
    if (code == TOOL_GOOD && dir[0] != '\0' && !tool_is_there(repair.store, dir)) {
        code = ckpt_tool_fail("%s: no such checkpoint", call->paths[0]);
    } else if (code == TOOL_GOOD) {
        code = dir[0] != '\0' ? repair_one(&repair, dir)
                              : repair_all(&repair, repair.options->step == NULL ? NULL : &step);
    }
    if (call->json && code != TOOL_COULD_NOT) {
        code = ckpt_tool_print_json(
            json_pack("{si ss sb sI sI sI sO}", "schema", 1, "root", ckpt_store_path(repair.store),
                      "dry_run", (int)repair.options->dry_run, "repaired",
                      (json_int_t)repair.repaired, "failed", (json_int_t)repair.failed,
                      "bytes_written", (json_int_t)repair.bytes_written, "checkpoints",
                      repair.list),
            code);
    }
    json_decref(repair.list);
    ckpt_store_close(repair.store);
    for (uint32_t i = 0; i < repair.options->from.count; i++) {
        ckpt_store_close(repair.copies[i]);
    }
    return code;
}

const struct ckpt_tool_verb ckpt_tool_verb_repair = {
    .name = "repair",
    .paths = "PATH --from OTHER...",
    .paths_min = 1,
    .paths_max = 1,
    .summary = "replaces what is damaged by bytes of other copies",
    .text = "Reads a checkpoint, or all of a root, and replaces what is damaged from other\n"
            "copies: manifest, indexes, single chunks, whole parts. Nothing is taken that has\n"
            "not the digest it must have; copies may be cut another way. What was repaired is\n"
            "read back. Says what could not be repaired, and ends with 1 then.",
    .examples = "  ckpt-tool repair /scratch/run7 --from /archive/run7 --dry-run\n"
                "  ckpt-tool repair /scratch/run7 --step 1200 --from /archive/run7 "
                "--from /old\n",
    .options = table,
    .option_count = sizeof(table) / sizeof(table[0]),
    .options_bytes = sizeof(struct repair_options),
    .has_progress = true,
    .run = run,
};
