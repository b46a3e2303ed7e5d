/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt-tool reshard: a checkpoint in another layout, number of parts or codec. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/file.h"
#include "base/json.h"
#include "ckpt/reshard.h"
#include "tools/ckpt_tool.h"
#include "tools/ckpt_tool_work.h"

#define RULES_BYTES_MAX (1024u * 1024)

struct reshard_options {
    const char *out, *layout, *rules, *like, *codec, *step;
    struct ckpt_tool_texts from;
    uint64_t parts, memory;
    bool dry_run, force, no_verify;
};

#define AT(field) offsetof(struct reshard_options, field)
static const struct ckpt_tool_option table[] = {
    {"--out", "ROOT", TOOL_TEXT, AT(out), "root to write to, made when missing; not SRC's own"},
    {"--step", "N", TOOL_TEXT, AT(step), "the checkpoint of that step (default: the newest)"},
    {"--layout", "L", TOOL_TEXT, AT(layout),
     "cut for dp=,tp=,pp=,zero= (default: extents as they are); also vocab=N, a multiple to which "
     "each tp rank's vocabulary is padded, heads= and kv_heads= where the job does not say"},
    {"--rules", "FILE", TOOL_TEXT, AT(rules), "JSON: how tensors of other models are cut"},
    {"--like", "PATH", TOOL_TEXT, AT(like),
     "cut like another checkpoint: its extents, parts, codec"},
    {"--parts", "N", TOOL_COUNT, AT(parts), "files, of even size (default: as many as SRC has)"},
    {"--codec", "NAME", TOOL_TEXT, AT(codec), "none, zstd or auto (default: as SRC)"},
    {"--from", "PATH", TOOL_TEXTS, AT(from), "another copy of SRC, for what is damaged in it"},
    {"--memory", "BYTES", TOOL_SIZE, AT(memory), "held at most (default 256M, at least 128M)"},
    {"--no-verify", NULL, TOOL_FLAG, AT(no_verify), "do not read the result back"},
    {"--dry-run", NULL, TOOL_FLAG, AT(dry_run), "say what would be written"},
    {"--force", NULL, TOOL_FLAG, AT(force), "replace a checkpoint of that step in ROOT"},
};

struct reshard {
    const struct ckpt_tool_call *call;
    const struct reshard_options *options;
    struct tool_checkpoint source, like, copies[TOOL_PATHS_MAX];
    struct ckpt_reader *reader;
    struct ckpt_layout layout;
    struct ckpt_layout_model model;
    struct ckpt_layout_rule *rules;
    struct ckpt_reshard_plan plan;
    struct ckpt_store *out;
    uint64_t window, reader_memory;
    struct ckpt_reshard_result result;
    struct bl_progress progress;
    double seconds;
    uint64_t healed;
    bool verified;
};

static void on_progress(void *arg, uint64_t bytes_done)
{
    struct reshard *reshard = arg;

    bl_progress_show(&reshard->progress, bytes_done);
}

static void on_healed(void *arg, const char *file, uint32_t chunk, const char *tensor,
                      const char *from_path)
{
    struct reshard *reshard = arg; /* called in the thread that reads: only one at a time */

    reshard->healed++;
    fprintf(stderr, "ckpt-tool: %s: chunk %u (tensor %s) is damaged; taken from %s\n", file, chunk,
            tensor, from_path);
}

/* ---- Preparing ---- */

static int read_rules(struct reshard *reshard, struct bl_errmsg *msg)
{
    char *text = NULL;
    size_t bytes = 0;
    int rc;

    if (reshard->options->rules == NULL) {
        return 0;
    }
    rc = bl_file_read(reshard->options->rules, RULES_BYTES_MAX, &text, &bytes, msg);
    if (rc < 0) {
        return rc;
    }
    rc = ckpt_layout_rules_read(&reshard->rules, &reshard->model.rule_count, text, bytes, msg);
    free(text);
    reshard->model.rules = reshard->rules;
    return rc < 0 ? bl_err_in(msg, rc, "%s", reshard->options->rules) : 0;
}

/* Opens what is read, and plans. An exit code. */
static int make_plan(struct reshard *reshard)
{
    const struct reshard_options *options = reshard->options;
    struct ckpt_place places[TOOL_PATHS_MAX + 1] = {{reshard->source.store, reshard->source.dir}};
    const struct ckpt_reader_config config = {
        .memory_max = reshard->reader_memory,
        .healed = on_healed,
        .arg = reshard,
        .cancel = &tool_cancel,
    };
    struct ckpt_reshard_how how = {.parts = (uint32_t)options->parts, .codec = options->codec};
    struct bl_errmsg why = {0};
    const struct ckpt_manifest *manifest;
    int rc;

    for (uint32_t i = 0; i < options->from.count; i++) {
        places[i + 1] = (struct ckpt_place){reshard->copies[i].store, reshard->copies[i].dir};
    }
    rc = ckpt_reader_open(&reshard->reader, places, options->from.count + 1, &config, &why);
    if (rc < 0) {
        return ckpt_tool_fail("%s", why.text);
    }
    manifest = ckpt_reader_manifest(reshard->reader);
    rc = ckpt_layout_model_read(&reshard->model, manifest->job, &why);
    rc = rc < 0 ? rc : read_rules(reshard, &why);
    if (rc == 0 && options->layout != NULL) {
        rc = ckpt_layout_parse(&reshard->layout, &reshard->model, options->layout, &why);
        if (rc < 0) {
            return ckpt_tool_usage("reshard", "--layout", why.text);
        }
        how.layout = &reshard->layout;
        how.model = &reshard->model;
    }
    if (rc == 0 && options->like != NULL) {
        how.like = &reshard->like.manifest;
    }
    rc = rc < 0 ? rc : ckpt_reshard_plan_make(&reshard->plan, manifest, &how, &why);
    return rc < 0 ? ckpt_tool_fail("%s", why.text) : TOOL_GOOD;
}

/* The root to write to must not be the one that is read: the same step is there already. */
static bool is_same_directory(const char *a, const char *b)
{
    struct stat a_st, b_st;

    return stat(a, &a_st) == 0 && stat(b, &b_st) == 0 && a_st.st_dev == b_st.st_dev &&
           a_st.st_ino == b_st.st_ino;
}

static int check_options(struct reshard *reshard)
{
    const struct reshard_options *options = reshard->options;
    struct bl_errmsg why = {0};

    if (options->out == NULL && !options->dry_run) {
        return ckpt_tool_usage("reshard", "--out", "the root to write to is missing");
    }
    if (options->like != NULL && (options->layout != NULL || options->parts != 0)) {
        return ckpt_tool_usage("reshard", "--like", "gives layout and parts already");
    }
    if (options->rules != NULL && options->layout == NULL) {
        return ckpt_tool_usage("reshard", "--rules", "goes with --layout");
    }
    if (options->parts > CKPT_PARTS_MAX) {
        return ckpt_tool_usage("reshard", "--parts", "more than 4096");
    }
    if (options->codec != NULL && strcmp(options->codec, "none") != 0 &&
        strcmp(options->codec, "zstd") != 0 && strcmp(options->codec, "auto") != 0) {
        return ckpt_tool_usage("reshard", "--codec", "none, zstd or auto");
    }
    if (ckpt_reshard_memory(options->memory, &reshard->window, &reshard->reader_memory, &why) < 0) {
        return ckpt_tool_usage("reshard", "--memory", why.text);
    }
    return TOOL_GOOD;
}

/* An exit code. */
static int open_all(struct reshard *reshard)
{
    const struct reshard_options *options = reshard->options;
    int code = tool_checkpoint_open(&reshard->source, reshard->call->paths[0], options->step);

    if (code == TOOL_GOOD && options->out != NULL &&
        is_same_directory(ckpt_store_path(reshard->source.store), options->out)) {
        return ckpt_tool_usage("reshard", "--out",
                               "SRC's own root; it has this step already, give another root");
    }
    for (uint32_t i = 0; code == TOOL_GOOD && i < options->from.count; i++) {
        code = tool_checkpoint_open_like(&reshard->copies[i], options->from.at[i],
                                         reshard->source.dir);
    }
    if (code == TOOL_GOOD && options->like != NULL) {
        code = tool_checkpoint_open(&reshard->like, options->like, NULL);
        code = code == TOOL_GOOD ? tool_checkpoint_manifest(&reshard->like) : code;
    }
    return code;
}

/* ---- Running ---- */

static int run_plan(struct reshard *reshard)
{
    const struct reshard_options *options = reshard->options;
    const struct ckpt_store_config config = {.path = options->out,
                                             .run = reshard->plan.manifest.run,
                                             .node = "ckpt-tool",
                                             .create = true,
                                             .shared = true};
    struct ckpt_reshard_job job = {
        .plan = &reshard->plan,
        .reader = reshard->reader,
        .window_bytes = reshard->window,
        .force = options->force,
        .progress = on_progress,
        .arg = reshard,
        .cancel = &tool_cancel,
    };
    struct bl_errmsg why = {0};
    int rc = bl_mkdir_p(options->out, &why);

    rc = rc < 0 ? rc : ckpt_store_open(&reshard->out, &config, &why);
    if (rc == 0) {
        bl_progress_start(&reshard->progress, "reshard", reshard->plan.bytes,
                          bl_progress_mode(reshard->call->json, reshard->call->progress));
        job.out = reshard->out;
        rc = ckpt_reshard_run(&job, &reshard->result, &why);
        reshard->seconds = bl_progress_finish(&reshard->progress);
    }
    if (rc == BL_EABORTED) {
        return ckpt_tool_fail("interrupted; the same command goes on from here");
    }
    return rc < 0 ? ckpt_tool_fail("%s", why.text) : TOOL_GOOD;
}

static int verify_result(struct reshard *reshard)
{
    struct tool_verify verify = {.store = reshard->out, .dir = reshard->result.dir, .full = true};
    int code;

    if (reshard->options->no_verify) {
        return TOOL_GOOD;
    }
    bl_progress_start(&reshard->progress, "verify", 0,
                      bl_progress_mode(reshard->call->json, reshard->call->progress));
    verify.progress = &reshard->progress;
    code = tool_verify_run(&verify);
    reshard->seconds += bl_progress_finish(&reshard->progress);
    for (size_t i = 0; i < json_array_size(verify.findings); i++) {
        ckpt_tool_fail(
            "%s", json_string_value(json_object_get(json_array_get(verify.findings, i), "text")));
    }
    json_decref(verify.findings);
    reshard->verified = code == TOOL_GOOD;
    return code == TOOL_FINDING ? ckpt_tool_fail("%s/%s: what was written does not read back",
                                                 reshard->options->out, reshard->result.dir)
                                : code;
}

/* ---- Telling ---- */

static json_t *parts_json(const struct ckpt_reshard_plan *plan)
{
    json_t *list = json_array();

    for (uint32_t p = 0; p < plan->part_count; p++) {
        json_array_append_new(list, json_pack("{ss sI si}", "name", plan->parts[p].name, "bytes",
                                              (json_int_t)plan->parts[p].bytes, "extents",
                                              (int)plan->parts[p].list.extent_count));
    }
    return list;
}

static int print_json(const struct reshard *reshard)
{
    const struct ckpt_manifest *manifest = &reshard->plan.manifest;
    const struct ckpt_reshard_result *result = &reshard->result;
    char digest[BL_STATE_DIGEST_TEXT_BYTES];

    bl_state_digest_format(&manifest->state, digest);
    return ckpt_tool_print_json(
        json_pack("{si sb ss ss ss* ss sI ss ss so sI sI so sb sb si sI sI sI sf}", "schema", 1,
                  "dry_run", (int)reshard->options->dry_run, "root",
                  ckpt_store_path(reshard->source.store), "from", reshard->source.dir, "out",
                  reshard->options->out, "dir", result->dir, "step", (json_int_t)manifest->step,
                  "state_digest", digest, "codec", manifest->codec, "layout",
                  tool_layout_json(&manifest->layout), "bytes", (json_int_t)reshard->plan.bytes,
                  "scratch_bytes", (json_int_t)reshard->plan.scratch_bytes, "parts",
                  parts_json(&reshard->plan), "already", (int)result->already, "verified",
                  (int)reshard->verified, "parts_kept", (int)result->parts_kept, "chunks_healed",
                  (json_int_t)reshard->healed, "bytes_read", (json_int_t)result->bytes_read,
                  "bytes_written", (json_int_t)result->bytes_written, "seconds", reshard->seconds),
        TOOL_GOOD);
}

static void print_plan(const struct reshard *reshard)
{
    const struct ckpt_reshard_plan *plan = &reshard->plan;
    const struct ckpt_layout *layout = &plan->manifest.layout;
    char size[BL_HUMAN_MAX], scratch[BL_HUMAN_MAX];

    printf("%s: step %llu, %s as dp %u, tp %u, pp %u, zero %u, codec %s; needs up to %s\n",
           reshard->source.dir, (unsigned long long)plan->manifest.step,
           bl_human_bytes(size, plan->bytes), layout->dp, layout->tp, layout->pp, layout->zero,
           plan->manifest.codec, bl_human_bytes(scratch, plan->scratch_bytes));
    for (uint32_t p = 0; p < plan->part_count; p++) {
        printf("  %-16s %10s  %u extents\n", plan->parts[p].name,
               bl_human_bytes(size, plan->parts[p].bytes), plan->parts[p].list.extent_count);
    }
}

static void print_result(const struct reshard *reshard)
{
    const struct ckpt_reshard_result *result = &reshard->result;
    char size[BL_HUMAN_MAX], took[BL_HUMAN_MAX], kept[64] = "";
    uint32_t parts = reshard->plan.part_count;

    if (result->already) {
        printf("%s/%s: there already, in that layout\n", reshard->options->out, result->dir);
        return;
    }
    if (result->parts_kept > 0) {
        snprintf(kept, sizeof(kept), ", %u kept of an earlier try", result->parts_kept);
    }
    printf("%s/%s: %u part%s%s, %s written in %s%s\n", reshard->options->out, result->dir, parts,
           parts == 1 ? "" : "s", kept, bl_human_bytes(size, result->bytes_written),
           bl_human_seconds(took, reshard->seconds),
           reshard->verified ? ", read back and verified" : "");
}

static void reshard_close(struct reshard *reshard)
{
    ckpt_reader_close(reshard->reader);
    ckpt_reshard_plan_close(&reshard->plan);
    ckpt_layout_rules_free(reshard->rules, reshard->model.rule_count);
    ckpt_store_close(reshard->out);
    tool_checkpoint_close(&reshard->source);
    tool_checkpoint_close(&reshard->like);
    for (uint32_t i = 0; i < reshard->options->from.count; i++) {
        tool_checkpoint_close(&reshard->copies[i]);
    }
}

static int run(const struct ckpt_tool_call *call)
{
    struct reshard reshard = {.call = call, .options = call->options};
    int code = check_options(&reshard);

    if (code != TOOL_GOOD) {
        return code;
    }
    tool_cancel_on_signals();
    code = open_all(&reshard);
    code = code == TOOL_GOOD ? make_plan(&reshard) : code;
    if (code == TOOL_GOOD && !reshard.options->dry_run) {
        code = run_plan(&reshard);
        code = code == TOOL_GOOD ? verify_result(&reshard) : code;
    }
    if (code == TOOL_GOOD && call->json) {
        code = print_json(&reshard);
    } else if (code == TOOL_GOOD && reshard.options->dry_run) {
        print_plan(&reshard);
    } else if (code == TOOL_GOOD) {
        print_result(&reshard);
    }
    reshard_close(&reshard);
    return code;
}

const struct ckpt_tool_verb ckpt_tool_verb_reshard = {
    .name = "reshard",
    .paths = "SRC --out ROOT",
    .paths_min = 1,
    .paths_max = 1,
    .summary = "a checkpoint in another layout, number of parts or codec",
    .text = "Writes a checkpoint again, the same state bit for bit, cut for other ranks, in\n"
            "another number of parts or with another codec, into another root. SRC is a\n"
            "checkpoint or a root. It streams: memory is bounded by --memory, and the disk\n"
            "space is allocated first. When it is stopped, the same command goes on where\n"
            "it stood. The result is committed like a save, then read back and verified.",
    .examples = "  ckpt-tool reshard /scratch/run7 --out /scratch/wide --layout dp=8,tp=2,zero=1\n"
                "  ckpt-tool reshard /scratch/run7 --step 1200 --out /archive --codec zstd\n"
                "  ckpt-tool reshard /scratch/wide --out /scratch/back --like /scratch/run7\n",
    .options = table,
    .option_count = sizeof(table) / sizeof(table[0]),
    .options_bytes = sizeof(struct reshard_options),
    .has_progress = true,
    .run = run,
};
