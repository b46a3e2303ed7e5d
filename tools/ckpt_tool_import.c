/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ckpt-tool import: other people's weights become a root with one committed checkpoint. What is
 * written follows from the weights alone: the run's id is made of their digest, no time and no path
 * is kept, so that the same weights give the same files however they came.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "ckpt/part.h"
#include "tools/ckpt_tool_foreign.h"
#include "tools/replace.h"

struct import_options {
    const char *from, *out, *codec, *run;
    uint64_t step, vocab;
    bool dry_run, force;
    struct ckpt_tool_texts allow_missing, allow_extra;
};

#define AT(field) offsetof(struct import_options, field)
static const struct ckpt_tool_option import_table[] = {
    {"--from", "KIND", TOOL_TEXT, AT(from), "hf: a directory of Hugging Face's; llama2c: a file"},
    {"--out", "DIR", TOOL_TEXT, AT(out), "the root to make"},
    {"--codec", "NAME", TOOL_TEXT, AT(codec), "auto, none or zstd (default auto)"},
    {"--step", "N", TOOL_COUNT, AT(step), "step that the weights are of (default 0)"},
    {"--run", "ID", TOOL_TEXT, AT(run), "the root's run (default: made of the weights)"},
    {"--vocab", "N", TOOL_COUNT, AT(vocab), "rows of the vocabulary; those behind are padding"},
    {"--allow-missing", "NAME", TOOL_TEXTS, AT(allow_missing), "go without this tensor"},
    {"--allow-extra", "NAME", TOOL_TEXTS, AT(allow_extra), "leave this tensor out"},
    {"--dry-run", NULL, TOOL_FLAG, AT(dry_run), "look and tell, write nothing"},
    {"--force", NULL, TOOL_FLAG, AT(force), "replace an earlier import at DIR"},
};

struct import {
    const struct import_options *options;
    const struct ckpt_tool_call *call;
    const char *path, *codec;
    struct ckpt_model model;
    struct ckpt_view *theirs, *ours;
    struct ckpt_map_list maps;
    struct bl_extent_list list; /* what the part will hold, in file order */
    uint64_t bytes;             /* of it */
    struct bl_progress progress;
    /* What was made. */
    char dir[CKPT_DIR_MAX], run[CKPT_RUN_MAX], digest[BL_STATE_DIGEST_TEXT_BYTES];
    uint64_t stored;
};

/* ---- Looking ---- */

static int open_source(struct import *import, struct bl_errmsg *msg)
{
    const struct import_options *options = import->options;
    enum ckpt_naming naming = CKPT_NAMES_LLAMA2C;
    int rc;

    if (strcmp(options->from, "llama2c") == 0) {
        rc = ckpt_llama2c_open(&import->theirs, &import->model, import->path, msg);
    } else {
        rc = ckpt_foreign_model(&import->model, import->path, msg);
        if (rc == 0) {
            rc = ckpt_foreign_open(&import->theirs, import->path, msg);
        }
        if (rc == 0) {
            naming = ckpt_foreign_naming(import->theirs, import->model.arch);
        }
    }
    if (rc == 0 && options->vocab > 0) {
        int64_t at = ckpt_view_find(import->theirs, "model.embed_tokens.weight");

        at = at >= 0 ? at : ckpt_view_find(import->theirs, "transformer.wte.weight");
        at = at >= 0 ? at : ckpt_view_find(import->theirs, "wte.weight");
        import->model.vocab_padded =
            at >= 0 && import->theirs->tensors[at].shape[0] <= CKPT_MODEL_VOCAB_MAX
                ? (uint32_t)import->theirs->tensors[at].shape[0]
                : import->model.vocab;
        if (options->vocab > import->model.vocab_padded) {
            return bl_err(msg, BL_EFORMAT, "--vocab %llu: there are %u rows",
                          (unsigned long long)options->vocab, import->model.vocab_padded);
        }
        import->model.vocab = (uint32_t)options->vocab;
    }
    return rc < 0 ? rc : ckpt_map_make(&import->maps, &import->model, naming, msg);
}

/* Everything in the files is wanted and there, or waived by name. An exit code. */
static int check_tensors(struct import *import)
{
    struct tool_findings findings = {.allow_missing = &import->options->allow_missing,
                                     .allow_extra = &import->options->allow_extra};
    const char *unused;

    ckpt_map_compare(&import->maps, import->theirs, tool_findings_add, &findings);
    if (findings.count > 0) {
        return ckpt_tool_fail(
            "%s: %u finding%s; not imported%s", import->path, findings.count,
            findings.count == 1 ? "" : "s",
            findings.shape_vocab ? " (--vocab N: the vocabulary has padding behind N rows)" : "");
    }
    unused = tool_findings_unused(&findings);
    if (unused != NULL) {
        return ckpt_tool_usage("import", unused, "nothing to allow: it is as it should be");
    }
    return TOOL_GOOD;
}

/* The extents that the part will hold: every tensor of ours, whole. */
static int make_list(struct import *import, struct bl_errmsg *msg)
{
    int rc = import->ours->tensor_count == 0 ? bl_err(msg, BL_ENOSTATE, "no tensor") : 0;

    for (uint32_t i = 0; rc == 0 && i < import->ours->tensor_count; i++) {
        const struct bl_tensor *tensor = &import->ours->tensors[i];
        uint64_t elems = bl_tensor_elems(tensor);
        struct bl_extent extent;
        uint32_t index;

        rc = bl_extent_list_tensor(&import->list, tensor, &index, msg);
        if (rc == 0) {
            bl_extent_whole(&extent, tensor, index, 0, elems);
            rc = bl_extent_list_add(&import->list, &extent);
            import->bytes += elems * sizeof(float);
        }
    }
    return rc < 0 ? rc : ckpt_part_sort(&import->list);
}

static void print_plan(const struct import *import)
{
    const struct ckpt_model *m = &import->model;
    char size[BL_HUMAN_MAX];

    printf("%s: %s, %u layers, width %u, feed-forward %u, heads %u (%u key-value), vocabulary %u, "
           "context %u, %s head\n",
           import->path, ckpt_arch_name(m->arch), m->layers, m->dim, m->hidden, m->heads,
           m->kv_heads, m->vocab, m->context, m->tied ? "tied" : "untied");
    printf("%u tensors, %s in F32\n", import->list.tensor_count,
           bl_human_bytes(size, import->bytes));
}

static void print_maps(const struct import *import)
{
    for (uint32_t i = 0; i < import->maps.count; i++) {
        const struct ckpt_map *map = &import->maps.maps[i];
        bool there = ckpt_view_find(import->ours, map->tensor.name) >= 0;

        printf("  %-48s %s %s%s%s", map->tensor.name, there ? "<-" : "without", map->theirs,
               map->transposed ? ", transposed" : "",
               map->rotary_dim > 0 ? ", pairs of rows to halves" : "");
        if (map->shift > 0) {
            printf(", from %llu on", (unsigned long long)map->shift);
        }
        putchar('\n');
    }
}

/* ---- Writing ---- */

static int fetch(void *arg, uint32_t extent, uint64_t lo, uint64_t hi, void *dest,
                 struct bl_errmsg *msg)
{
    struct import *import = arg;
    const struct bl_extent *e = &import->list.extents[extent];
    int64_t at = ckpt_view_find(import->ours, import->list.tensors[e->tensor].name);

    bl_progress_show(&import->progress, import->progress.done + (hi - lo) * sizeof(float));
    return ckpt_view_read_flat(import->ours, (uint32_t)at, lo, hi, dest, msg);
}

/* The digest of the whole state without writing anything: the run's id is made of it. */
static int digest_state(struct import *import, struct bl_state_digest *ret, struct bl_errmsg *msg)
{
    enum { SLICE = 1u << 18 };
    float *slice = malloc(SLICE * sizeof(*slice));
    int rc = slice == NULL ? bl_err_code(msg, -ENOMEM, "import") : 0;

    bl_progress_start(&import->progress, "reading", import->bytes,
                      bl_progress_mode(import->call->json, import->call->progress));
    for (uint32_t i = 0; rc == 0 && i < import->ours->tensor_count; i++) {
        const struct bl_tensor *tensor = &import->ours->tensors[i];
        uint64_t elems = bl_tensor_elems(tensor),
                 hash = bl_xxh3(tensor->name, strlen(tensor->name));

        for (uint64_t lo = 0, hi; rc == 0 && lo < elems; lo = hi) {
            hi = elems - lo < SLICE ? elems : lo + SLICE;
            rc = ckpt_view_read_flat(import->ours, i, lo, hi, slice, msg);
            if (rc == 0) {
                bl_state_digest_add(ret, hash, lo, slice, hi - lo, sizeof(*slice));
            }
            bl_progress_show(&import->progress, import->progress.done + (hi - lo) * sizeof(float));
        }
    }
    bl_progress_finish(&import->progress);
    free(slice);
    return rc;
}

/* The id of the run: that which was asked for, or one that the weights and the model determine. */
static void name_run(const struct import *import, const struct bl_state_digest *state,
                     const char *job, char ret[CKPT_RUN_MAX])
{
    uint64_t words[3] = {state->sum[0], state->sum[1], bl_xxh3(job, strlen(job))};

    if (import->options->run != NULL) {
        snprintf(ret, CKPT_RUN_MAX, "%s", import->options->run);
    } else {
        snprintf(ret, CKPT_RUN_MAX, "%016llx", (unsigned long long)bl_xxh3(words, sizeof(words)));
    }
}

static int write_part(struct import *import, struct ckpt_store *store,
                      const struct ckpt_attempt *attempt, const struct bl_state_digest *state,
                      struct ckpt_part *ret, struct bl_errmsg *msg)
{
    const struct ckpt_source source = {.list = &import->list, .fetch = fetch, .arg = import};
    const struct ckpt_part_job job = {.name = "part-0000",
                                      .sources = &source,
                                      .source_count = 1,
                                      .codec = import->codec,
                                      .expect = state};
    struct ckpt_part_result result;
    int rc;

    bl_progress_start(&import->progress, "import", import->bytes,
                      bl_progress_mode(import->call->json, import->call->progress));
    rc = ckpt_save_part(store, attempt, &job, &result, msg);
    bl_progress_finish(&import->progress);
    if (rc < 0) {
        return rc;
    }
    snprintf(ret->name, sizeof(ret->name), "%s", result.name);
    snprintf(ret->node, sizeof(ret->node), "import");
    ret->bytes = result.bytes;
    ret->raw_bytes = result.raw_bytes;
    ret->index_digest = result.index_digest;
    return 0;
}

static int write_root(struct import *import, const char *root, struct bl_errmsg *msg)
{
    /* Generation 0: no run's, so that what an import made is told from what a run saved. */
    const struct ckpt_attempt attempt = {.step = import->options->step, .attempt = 1, .nonce = 1};
    struct ckpt_part part = {0};
    struct ckpt_manifest manifest = {
        .step = attempt.step,
        .lanes = 1,
        .layout = {1, 1, 1, 1, 0},
        .metrics = {.loss = NAN, .saved_unix_s = CKPT_SAVED_UNKNOWN},
        .parts = &part,
        .part_count = 1,
    };
    struct ckpt_store_config config = {
        .path = root, .run = manifest.run, .node = "import", .create = true, .shared = true};
    struct ckpt_commit_result result;
    struct ckpt_store *store = NULL;
    int rc;

    snprintf(manifest.codec, sizeof(manifest.codec), "%s", import->codec);
    manifest.job = ckpt_model_to_job(&import->model);
    rc = manifest.job == NULL ? bl_err_code(msg, -ENOMEM, "import")
                              : digest_state(import, &manifest.state, msg);
    if (rc == 0) {
        name_run(import, &manifest.state, manifest.job, manifest.run);
        rc = ckpt_store_open(&store, &config, msg);
    }
    if (rc == 0) {
        rc = ckpt_attempt_begin(store, &attempt, msg);
    }
    if (rc == 0) {
        rc = write_part(import, store, &attempt, &manifest.state, &part, msg);
    }
    if (rc == 0) {
        rc = ckpt_commit(store, &attempt, &manifest, &result, msg);
    }
    if (rc == 0) {
        snprintf(import->dir, sizeof(import->dir), "%s", result.dir);
        snprintf(import->run, sizeof(import->run), "%s", manifest.run);
        bl_state_digest_format(&manifest.state, import->digest);
        import->stored = part.bytes;
    }
    ckpt_store_close(store);
    bl_extent_list_close(&part.held);
    free(manifest.job);
    return rc;
}

/* What an earlier import left at a place. */
static bool is_ours(const char *name)
{
    size_t bytes = strlen(name);

    return strcmp(name, "BELAY") == 0 || strcmp(name, "latest") == 0 ||
           strncmp(name, ".trash", 6) == 0 || strncmp(name, ".reserve-", 9) == 0 ||
           (strncmp(name, "step-", 5) == 0 && bytes > 3 && strcmp(name + bytes - 3, ".g0") == 0);
}

/* ---- The verb ---- */

/* The codec that is meant, or NULL. Time is not short here, and the files must follow from the
 * weights alone: auto is zstd. */
static const char *codec_of(const char *name)
{
    if (name == NULL || strcmp(name, "auto") == 0 || strcmp(name, "zstd") == 0) {
        return "zstd";
    }
    return strcmp(name, "none") == 0 ? "none" : NULL;
}

static int check_options(const struct import_options *options)
{
    if (options->from == NULL ||
        (strcmp(options->from, "hf") != 0 && strcmp(options->from, "llama2c") != 0)) {
        return ckpt_tool_usage("import", options->from == NULL ? "--from" : options->from,
                               "--from is hf or llama2c");
    }
    if (options->out == NULL && !options->dry_run) {
        return ckpt_tool_usage("import", "--out", "missing");
    }
    if (codec_of(options->codec) == NULL) {
        return ckpt_tool_usage("import", options->codec, "--codec is auto, none or zstd");
    }
    if (options->run != NULL &&
        (strlen(options->run) >= CKPT_RUN_MAX || !ckpt_name_is_plain(options->run))) {
        return ckpt_tool_usage("import", "--run", "up to 63 plain characters");
    }
    return TOOL_GOOD;
}

static int import_all(struct import *import, struct bl_errmsg *msg)
{
    struct tool_replace replace = {.fd = -1};
    int rc =
        tool_replace_begin(&replace, import->options->out, import->options->force, is_ours, msg);

    if (rc == 0) {
        rc = write_root(import, replace.temp, msg);
    }
    if (rc == 0) {
        rc = tool_replace_commit(&replace, msg);
    }
    tool_replace_close(&replace);
    return rc;
}

static int print_result(const struct import *import)
{
    char size[BL_HUMAN_MAX];

    if (import->call->json) {
        return ckpt_tool_print_json(
            json_pack("{si ss ss ss ss ss si sI sI}", "schema", 1, "root", import->options->out,
                      "dir", import->dir, "run", import->run, "state_digest", import->digest,
                      "codec", import->codec, "tensors", (int)import->list.tensor_count, "bytes",
                      (json_int_t)import->bytes, "stored", (json_int_t)import->stored),
            TOOL_GOOD);
    }
    printf("%s/%s: %s, codec %s, state digest %s\n", import->options->out, import->dir,
           bl_human_bytes(size, import->stored), import->codec, import->digest);
    return TOOL_GOOD;
}

static int run_import(struct import *import)
{
    const struct import_options *options = import->options;
    struct bl_errmsg why = {0};
    int rc =
        options->out == NULL ? 0 : tool_replace_check(options->out, options->force, is_ours, &why);
    int code = TOOL_GOOD;

    rc = rc < 0 ? rc : open_source(import, &why);
    if (rc == 0) {
        code = check_tensors(import);
    }
    if (rc == 0 && code == TOOL_GOOD) {
        rc = ckpt_view_ours(&import->ours, import->theirs, &import->maps, &why);
    }
    if (rc == 0 && code == TOOL_GOOD) {
        rc = make_list(import, &why);
    }
    if (rc == 0 && code == TOOL_GOOD) {
        if (!import->call->json) {
            print_plan(import);
        }
        if (options->dry_run) {
            print_maps(import);
        } else {
            rc = import_all(import, &why);
            code = rc < 0 ? code : print_result(import);
        }
    }
    return rc < 0 ? ckpt_tool_fail("%s", why.text) : code;
}

static int run(const struct ckpt_tool_call *call)
{
    struct import import = {.options = call->options, .call = call, .path = call->paths[0]};
    int code = check_options(import.options);

    if (code != TOOL_GOOD) {
        return code;
    }
    import.codec = codec_of(import.options->codec);
    code = run_import(&import);
    ckpt_view_close(import.ours);
    ckpt_view_close(import.theirs);
    ckpt_map_close(&import.maps);
    bl_extent_list_close(&import.list);
    return code;
}

const struct ckpt_tool_verb ckpt_tool_verb_import = {
    .name = "import",
    .paths = "PATH",
    .paths_min = 1,
    .paths_max = 1,
    .summary = "makes a root of other people's weights",
    .text = "Makes a root with one committed checkpoint of the weights at PATH: a directory\n"
            "of Hugging Face's (config.json and safetensors files, Llama or GPT-2), or a\n"
            "llama2.c file. All tensors must be there, none too many, each with the shape\n"
            "that the sizes of the model give. Weights of 16 bits become F32.\n"
            "The root appears whole or not at all; a killed import is started again.\n",
    .examples = "  ckpt-tool import --from hf Llama-3.2-1B --out /scratch/llama\n"
                "  ckpt-tool import --from llama2c stories15M.bin --out stories --codec none\n",
    .options = import_table,
    .option_count = sizeof(import_table) / sizeof(import_table[0]),
    .options_bytes = sizeof(struct import_options),
    .has_progress = true,
    .run = run,
};
