/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt-tool verify: checkpoints against their digests, and against another copy. */
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/json.h"
#include "tools/ckpt_tool.h"
#include "tools/ckpt_tool_work.h"

struct verify_options {
    const char *step, *against;
    bool fast;
};

#define AT(field) offsetof(struct verify_options, field)
static const struct ckpt_tool_option table[] = {
    {"--fast", NULL, TOOL_FLAG, AT(fast), "manifests, sizes and indexes; not the parts' bytes"},
    {"--step", "N", TOOL_TEXT, AT(step), "of a root, only the checkpoint of that step"},
    {"--against", "PATH", TOOL_TEXT, AT(against),
     "another copy, which is verified too: it must be the same state"},
};

struct verify {
    const struct ckpt_tool_call *call;
    const struct verify_options *options;
    struct ckpt_store *store, *other; /* other: of --against, or NULL */
    char other_dir[CKPT_DIR_MAX];     /* "": the same names as here */
    json_t *list;                     /* of checkpoints */
    struct bl_progress progress;
    uint64_t findings;
    uint32_t looked_at;
};

/* Adds what was found of one checkpoint to the JSON, or prints it. */
static void tell(struct verify *verify, const struct ckpt_store *store,
                 const struct tool_verify *one, double seconds)
{
    uint64_t findings = one->result.findings;
    char size[BL_HUMAN_MAX], took[BL_HUMAN_MAX];
    const char *root = ckpt_store_path(store);
    json_t *finding;
    size_t i;

    verify->findings += findings;
    if (verify->call->json) {
        json_array_append_new(
            verify->list,
            json_pack("{ss ss sb sb sI si si sI sO sf}", "root", root, "dir", one->dir, "good",
                      findings == 0, "gone", (int)one->gone, "bytes_read",
                      (json_int_t)one->result.bytes_read, "parts", (int)one->result.parts,
                      "parts_elsewhere", (int)one->result.elsewhere, "finding_count",
                      (json_int_t)findings, "findings", one->findings, "seconds", seconds));
        return;
    }
    json_array_foreach(one->findings, i, finding)
    {
        printf("%s\n", json_string_value(json_object_get(finding, "text")));
    }
    if (findings > json_array_size(one->findings)) {
        printf("... and %llu more\n",
               (unsigned long long)findings - json_array_size(one->findings));
    }
    if (verify->other != NULL) {
        printf("%s/", root);
    }
    if (one->gone) {
        printf("%s: retired meanwhile\n", one->dir);
    } else if (findings == 0 && one->result.elsewhere > 0) {
        printf("%s: good as far as it is here: %u of %u parts (%s read in %s%s); the others are on "
               "other nodes: give the roots of all nodes to see the whole\n",
               one->dir, one->result.parts - one->result.elsewhere, one->result.parts,
               bl_human_bytes(size, one->result.bytes_read), bl_human_seconds(took, seconds),
               verify->options->fast ? ", parts' bytes not looked at" : "");
    } else if (findings == 0) {
        printf("%s: good (%u part%s, %s read in %s%s)\n", one->dir, one->result.parts,
               one->result.parts == 1 ? "" : "s", bl_human_bytes(size, one->result.bytes_read),
               bl_human_seconds(took, seconds),
               verify->options->fast ? ", parts' bytes not looked at" : "");
    } else {
        printf("%s: %llu finding%s\n", one->dir, (unsigned long long)findings,
               findings == 1 ? "" : "s");
    }
    fflush(stdout);
}

/* Verifies a checkpoint of a store. An exit code. */
static int verify_one(struct verify *verify, struct ckpt_store *store, const char *dir)
{
    struct tool_verify one = {
        .store = store, .dir = dir, .full = !verify->options->fast, .progress = &verify->progress};
    int code;

    bl_progress_start(&verify->progress, dir, 0,
                      bl_progress_mode(verify->call->json, verify->call->progress));
    code = tool_verify_run(&one);
    if (code != TOOL_COULD_NOT) {
        tell(verify, store, &one, bl_progress_finish(&verify->progress));
    }
    json_decref(one.findings);
    verify->looked_at++;
    return code;
}

/* Finding of a comparison: printed, or in a row of its own. */
static int differs(struct verify *verify, const char *dir, const char *text)
{
    verify->findings++;
    if (verify->call->json) {
        json_array_append_new(
            verify->list, json_pack("{ss ss sb s[{ss ss}]}", "root", ckpt_store_path(verify->other),
                                    "dir", dir, "good", 0, "findings", "file", dir, "text", text));
    } else {
        printf("%s: %s\n", dir, text);
    }
    return TOOL_FINDING;
}

/* Is the other copy, which verifies too, the same state? */
static int compare(struct verify *verify, const char *dir)
{
    const char *other_dir = verify->other_dir[0] == '\0' ? dir : verify->other_dir;
    struct ckpt_manifest ours = {0}, theirs = {0};
    struct bl_errmsg why = {0};
    char text[2 * CKPT_DIR_MAX + 4200], ours_text[BL_STATE_DIGEST_TEXT_BYTES];
    char theirs_text[BL_STATE_DIGEST_TEXT_BYTES];
    int code = TOOL_GOOD;

    if (!tool_is_there(verify->other, other_dir)) {
        snprintf(text, sizeof(text), "%s has no such checkpoint", ckpt_store_path(verify->other));
        return differs(verify, dir, text);
    }
    code = verify_one(verify, verify->other, other_dir);
    if (code == TOOL_COULD_NOT) {
        return code;
    }
    if (ckpt_manifest_load(verify->store, dir, &ours, &why) < 0 ||
        ckpt_manifest_load(verify->other, other_dir, &theirs, &why) < 0) {
        code = TOOL_FINDING; /* told by the verification of the one that is broken */
    } else if (!bl_state_digest_equal(&ours.state, &theirs.state)) {
        bl_state_digest_format(&ours.state, ours_text);
        bl_state_digest_format(&theirs.state, theirs_text);
        snprintf(text, sizeof(text), "state digest %s, in %s/%s %s", ours_text,
                 ckpt_store_path(verify->other), other_dir, theirs_text);
        code = differs(verify, dir, text);
    } else if (code == TOOL_GOOD && !verify->call->json) {
        printf("%s: the same state as %s/%s\n", dir, ckpt_store_path(verify->other), other_dir);
    }
    ckpt_manifest_close(&ours);
    ckpt_manifest_close(&theirs);
    return code;
}

static int verify_and_compare(struct verify *verify, const char *dir)
{
    int code = verify_one(verify, verify->store, dir), other;

    if (code == TOOL_COULD_NOT || verify->other == NULL) {
        return code;
    }
    other = compare(verify, dir);
    return other > code ? other : code;
}

/* All checkpoints of the root, or that of one step. */
static int verify_all(struct verify *verify, const uint64_t *step)
{
    struct bl_errmsg why = {0};
    struct ckpt_scan scan;
    int code = TOOL_GOOD, one;

    if (ckpt_scan(verify->store, &scan, &why) < 0) {
        return ckpt_tool_fail("%s", why.text);
    }
    for (uint32_t i = 0; code != TOOL_COULD_NOT && i < scan.count; i++) {
        if (scan.entries[i].state == CKPT_LEFTOVER) {
            continue; /* being written, or of a save that never ended: no checkpoint */
        }
        if (step == NULL || scan.entries[i].step == *step) {
            one = verify_and_compare(verify, scan.entries[i].dir);
            code = one > code ? one : code;
        }
    }
    ckpt_scan_close(&scan);
    if (step != NULL && verify->looked_at == 0) {
        return ckpt_tool_fail("%s: no checkpoint of step %llu", ckpt_store_path(verify->store),
                              (unsigned long long)*step);
    }
    return code;
}

/* The root's own file. */
static int verify_root(struct verify *verify, int code)
{
    if (ckpt_store_damage(verify->store)[0] == '\0') {
        return code;
    }
    verify->findings++;
    if (!verify->call->json) {
        printf("%s\n", ckpt_store_damage(verify->store));
    }
    return code == TOOL_GOOD ? TOOL_FINDING : code;
}

/* The roots of several nodes, as one. */
static struct ckpt_store *open_together(const struct ckpt_tool_call *call, char dir[CKPT_DIR_MAX])
{
    char paths[TOOL_PATHS_BYTES_MAX] = "";
    size_t at = 0;

    for (uint32_t i = 0; i < call->path_count && at < sizeof(paths); i++) {
        at += (size_t)snprintf(paths + at, sizeof(paths) - at, "%s%s", i > 0 ? "," : "",
                               call->paths[i]);
    }
    if (at >= sizeof(paths)) {
        ckpt_tool_fail("paths too long");
        return NULL;
    }
    return ckpt_tool_open(paths, dir);
}

static int run(const struct ckpt_tool_call *call)
{
    struct verify verify = {.call = call, .options = call->options};
    char dir[CKPT_DIR_MAX];
    uint64_t step = 0;
    int code = TOOL_GOOD;

    if (verify.options->step != NULL && !ckpt_tool_parse_count(verify.options->step, &step)) {
        return ckpt_tool_usage("verify", "--step", "a whole number is wanted");
    }
    tool_cancel_on_signals();
    verify.store = open_together(call, dir);
    if (verify.store == NULL) {
        return TOOL_COULD_NOT;
    }
    if (verify.options->against != NULL) {
        verify.other = ckpt_tool_open(verify.options->against, verify.other_dir);
        code = verify.other == NULL ? TOOL_COULD_NOT : code;
    }
    verify.list = json_array();
    if (code == TOOL_GOOD && dir[0] != '\0' && !tool_is_there(verify.store, dir)) {
        code = ckpt_tool_fail("%s: no such checkpoint", call->paths[0]);
    } else if (code == TOOL_GOOD) {
        code = dir[0] != '\0' ? verify_and_compare(&verify, dir)
                              : verify_all(&verify, verify.options->step == NULL ? NULL : &step);
    }
    code = code == TOOL_COULD_NOT ? code : verify_root(&verify, code);
    if (call->json && code != TOOL_COULD_NOT) {
        code = ckpt_tool_print_json(
            json_pack("{si ss sb ss sO}", "schema", 1, "root", ckpt_store_path(verify.store),
                      "good", verify.findings == 0, "root_damage", ckpt_store_damage(verify.store),
                      "checkpoints", verify.list),
            code);
    }
    json_decref(verify.list);
    ckpt_store_close(verify.store);
    ckpt_store_close(verify.other);
    return code;
}

const struct ckpt_tool_verb ckpt_tool_verb_verify = {
    .name = "verify",
    .paths = "PATH...",
    .paths_min = 1,
    .paths_max = 64,
    .summary = "reads and compares every byte; of a root, of all in it",
    .text = "Reads every byte of a checkpoint, or of all in a root, and compares digests: of\n"
            "each chunk, of indexes and manifest, of headers against indexes, and of the\n"
            "whole state. It goes on after a finding; each names file, chunk and tensor.\n"
            "Beside a running job a checkpoint that retention takes away is no finding.\n"
            "Roots that nodes have for themselves hold parts: one alone is checked as far as\n"
            "it goes; several, given together, as the whole. Other verbs take them as A,B,C.",
    .examples = "  ckpt-tool verify /scratch/run7\n"
                "  ckpt-tool verify /a/run7 /b/run7 /c/run7\n"
                "  ckpt-tool verify --fast /scratch/run7/step-000000001200.g7\n"
                "  ckpt-tool verify /scratch/run7 --step 1200 --against /archive/run7\n",
    .options = table,
    .option_count = sizeof(table) / sizeof(table[0]),
    .options_bytes = sizeof(struct verify_options),
    .has_progress = true,
    .run = run,
};
