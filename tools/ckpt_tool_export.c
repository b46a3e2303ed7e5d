/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ckpt-tool export: the parameters of a checkpoint as a directory that transformers loads:
 * config.json, safetensors files of at most --max-shard bytes each, and the index that goes with
 * several. Streaming: one buffer of 16 MiB, and 128 MiB where tensors are transposed (GPT-2).
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/json.h"
#include "ckpt/text.h"
#include "tools/ckpt_tool_foreign.h"
#include "tools/replace.h"

#define BUFFER_BYTES  (16u * 1024 * 1024)
#define MAX_SHARD     5000000000ull /* as transformers */
#define MAX_SHARD_MIN 4096u
#define SHARDS_MAX    CKPT_FOREIGN_FILES_MAX

struct export_options {
    const char *to, *out, *dtype, *overflow, *step;
    uint64_t max_shard, pad_vocab, context;
    bool force;
    struct ckpt_tool_texts allow_missing, allow_extra;
};

#define AT(field) offsetof(struct export_options, field)
static const struct ckpt_tool_option export_table[] = {
    {"--to", "KIND", TOOL_TEXT, AT(to), "hf: a directory as Hugging Face's transformers read it"},
    {"--out", "DIR", TOOL_TEXT, AT(out), "the directory to make"},
    {"--step", "N", TOOL_TEXT, AT(step), "of a root: this step instead of the newest"},
    {"--dtype", "TYPE", TOOL_TEXT, AT(dtype), "fp32, bf16 or fp16 (default fp32)"},
    {"--overflow", "HOW", TOOL_TEXT, AT(overflow),
     "values too large for TYPE: refuse, clamp or inf (default refuse)"},
    {"--max-shard", "BYTES", TOOL_SIZE, AT(max_shard), "of a file (default 5000000000)"},
    {"--pad-vocab", "N", TOOL_COUNT, AT(pad_vocab),
     "zero rows behind the vocabulary, up to a multiple of N"},
    {"--context", "N", TOOL_COUNT, AT(context),
     "longest sequence, where the checkpoint does not say or says another"},
    {"--allow-missing", "NAME", TOOL_TEXTS, AT(allow_missing), "go without this tensor"},
    {"--allow-extra", "NAME", TOOL_TEXTS, AT(allow_extra), "leave this tensor out"},
    {"--force", NULL, TOOL_FLAG, AT(force), "replace an earlier export at DIR"},
};

/* A tensor of theirs, in the model's order. */
struct item {
    uint32_t tensor; /* in the view of theirs */
    uint32_t shard;
    uint64_t bytes;
};

struct export
{
    const struct export_options *options;
    const struct ckpt_tool_call *call;
    enum bl_dtype dtype;
    enum ckpt_overflow overflow;
    struct tool_source source;
    struct ckpt_model model;
    struct ckpt_map_list maps;
    struct ckpt_view *theirs;
    struct item *items; /* owned */
    uint32_t item_count, shard_count;
    uint64_t bytes; /* of all tensors */
    uint8_t *buffer;
    struct bl_progress progress;
};

/* ---- Looking ---- */

/* The checkpoint's parameters against those that the model has: findings by Belay's names. */
static void compare(const struct export *export, struct tool_findings *findings)
{
    const struct ckpt_view *ours = export->source.view;

    for (uint32_t i = 0; i < export->maps.count; i++) {
        const struct bl_tensor *want = &export->maps.maps[i].tensor;
        int64_t at = ckpt_view_find(ours, want->name);

        if (export->maps.maps[i].zeros) {
            continue;
        }
        if (at < 0) {
            tool_findings_add(findings, "missing", want->name, "is not in the checkpoint");
        } else if (ours->tensors[at].dtype != BL_F32) {
            tool_findings_add(findings, "dtype", want->name, "is not F32");
        } else if (ours->tensors[at].dims != want->dims ||
                   memcmp(ours->tensors[at].shape, want->shape,
                          want->dims * sizeof(*want->shape)) != 0) {
            tool_findings_add(findings, "shape", want->name, "is not that of the model's sizes");
        }
    }
    for (uint32_t i = 0; i < ours->tensor_count; i++) {
        const struct bl_tensor *tensor = &ours->tensors[i];

        if (tensor->kind == BL_KIND_PARAM && ckpt_map_find(&export->maps, tensor->name) == NULL) {
            tool_findings_add(findings, "extra", tensor->name, "is no tensor of such a model");
        }
    }
}

static int check_tensors(const struct export *export)
{
    struct tool_findings findings = {.allow_missing = &export->options->allow_missing,
                                     .allow_extra = &export->options->allow_extra};

    compare(export, &findings);
    if (findings.count > 0) {
        return ckpt_tool_fail("%s: %u finding%s; not exported", export->source.dir, findings.count,
                              findings.count == 1 ? "" : "s");
    }
    if (tool_findings_unused(&findings) != NULL) {
        return ckpt_tool_usage("export", tool_findings_unused(&findings),
                               "nothing to allow: it is as it should be");
    }
    return TOOL_GOOD;
}

static int read_model(struct export *export, struct bl_errmsg *msg)
{
    const struct export_options *options = export->options;
    const char *job = ckpt_view_manifest(export->source.view)->job;
    struct ckpt_model *model = &export->model;
    int rc = ckpt_model_from_job(model, job == NULL ? "{}" : job, msg);

    if (rc == 0 && options->context > 0) {
        if (options->context > CKPT_MODEL_VOCAB_MAX) {
            return bl_err(msg, BL_ELIMIT, "--context %llu: at most %u",
                          (unsigned long long)options->context, CKPT_MODEL_VOCAB_MAX);
        }
        model->context = (uint32_t)options->context;
    }
    if (rc == 0 && options->pad_vocab > 0) {
        uint64_t rows =
            options->pad_vocab > CKPT_MODEL_VOCAB_MAX
                ? UINT64_MAX
                : (model->vocab + options->pad_vocab - 1) / options->pad_vocab * options->pad_vocab;

        if (rows > CKPT_MODEL_VOCAB_MAX) {
            return bl_err(msg, BL_ELIMIT, "--pad-vocab %llu: at most %u rows",
                          (unsigned long long)options->pad_vocab, CKPT_MODEL_VOCAB_MAX);
        }
        model->vocab_padded = (uint32_t)rows;
    }
    return rc < 0 ? rc : ckpt_map_make(&export->maps, model, CKPT_NAMES_HF, msg);
}

/* Deals the tensors to files in the model's order. */
static int deal(struct export *export, struct bl_errmsg *msg)
{
    uint64_t max = export->options->max_shard > 0 ? export->options->max_shard : MAX_SHARD;
    uint64_t filled = 0;

    export->items = calloc(export->maps.count + 1u, sizeof(*export->items));
    export->buffer = malloc(BUFFER_BYTES);
    if (export->items == NULL || export->buffer == NULL) {
        return bl_err_code(msg, -ENOMEM, "export");
    }
    for (uint32_t i = 0; i < export->maps.count; i++) {
        const char *name = export->maps.maps[i].theirs;
        int64_t at = ckpt_view_find(export->theirs, name);
        struct item *item = &export->items[export->item_count];

        if (at < 0 || (i > 0 && strcmp(export->maps.maps[i - 1].theirs, name) == 0)) {
            continue; /* waived, or another piece of the one before */
        }
        item->tensor = (uint32_t)at;
        item->bytes = bl_tensor_elems(&export->theirs->tensors[at]) * bl_dtype_bytes(export->dtype);
        if (filled > 0 && filled + item->bytes > max) {
            export->shard_count++;
            filled = 0;
        }
        item->shard = export->shard_count;
        filled += item->bytes;
        export->bytes += item->bytes;
        export->item_count++;
    }
    export->shard_count++;
    if (export->shard_count > SHARDS_MAX) {
        return bl_err(msg, BL_ELIMIT, "%u files: at most %u; --max-shard is too small",
                      export->shard_count, SHARDS_MAX);
    }
    return export->item_count == 0 ? bl_err(msg, BL_ENOSTATE, "no tensor") : 0;
}

/* ---- Writing ---- */

static void shard_name(const struct export *export, uint32_t shard, char ret[64])
{
    if (export->shard_count == 1) {
        snprintf(ret, 64, "model.safetensors");
    } else {
        snprintf(ret, 64, "model-%05u-of-%05u.safetensors", shard + 1, export->shard_count);
    }
}

/* The header of a shard: length, JSON, spaces up to a multiple of 8. */
static int write_header(const struct export *export, uint32_t shard, int fd, struct bl_errmsg *msg)
{
    struct ckpt_text text = {0};
    uint64_t at = 0, bytes;
    uint8_t first[8] = {0};
    int rc;

    ckpt_text_add(&text, first, 8);
    ckpt_text_printf(&text, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (uint32_t i = 0; i < export->item_count; i++) {
        const struct item *item = &export->items[i];
        const struct bl_tensor *tensor = &export->theirs->tensors[item->tensor];
        uint64_t range[2] = {at, at + item->bytes};

        if (item->shard != shard) {
            continue;
        }
        ckpt_text_add(&text, ",", 1);
        ckpt_text_string(&text, tensor->name);
        ckpt_text_printf(&text, ":{\"dtype\":\"%s\",\"shape\":", bl_dtype_name(tensor->dtype));
        ckpt_text_u64s(&text, tensor->shape, tensor->dims);
        ckpt_text_printf(&text, ",\"data_offsets\":");
        ckpt_text_u64s(&text, range, 2);
        ckpt_text_add(&text, "}", 1);
        at += item->bytes;
    }
    ckpt_text_add(&text, "}", 1);
    while (!text.failed && text.bytes % 8 != 0) {
        ckpt_text_add(&text, " ", 1);
    }
    if (text.failed) {
        ckpt_text_close(&text);
        return bl_err_code(msg, -ENOMEM, "header");
    }
    bytes = text.bytes - 8;
    for (int i = 0; i < 8; i++) {
        text.data[i] = (char)(uint8_t)(bytes >> (8 * i));
    }
    rc = bl_fd_write_all(fd, text.data, text.bytes);
    ckpt_text_close(&text);
    return rc < 0 ? bl_err_code(msg, rc, "write") : 0;
}

static int write_tensor(struct export *export, const struct item *item, int fd,
                        struct bl_errmsg *msg)
{
    const struct bl_tensor *tensor = &export->theirs->tensors[item->tensor];
    uint32_t bytes = bl_dtype_bytes(export->dtype);
    /* Whole rows, which transposed tensors need; a row is at most 12 MiB. */
    uint64_t row = tensor->dims == 2 ? tensor->shape[1] : 1;
    uint64_t step = BUFFER_BYTES / (row * bytes) * row, elems = bl_tensor_elems(tensor);
    int rc = 0;

    for (uint64_t lo = 0, hi; rc == 0 && lo < elems; lo = hi) {
        hi = elems - lo < step ? elems : lo + step;
        rc = ckpt_view_read_flat(export->theirs, item->tensor, lo, hi, export->buffer, msg);
        if (rc == 0) {
            rc = bl_fd_write_all(fd, export->buffer, (hi - lo) * bytes);
            rc = rc < 0 ? bl_err_code(msg, rc, "write") : 0;
        }
        bl_progress_show(&export->progress, export->progress.done + (hi - lo) * bytes);
    }
    return rc;
}

static int write_shard(struct export *export, uint32_t shard, const char *dir,
                       struct bl_errmsg *msg)
{
    char path[TOOL_REPLACE_PATH_MAX], name[64];
    int fd, rc;

    shard_name(export, shard, name);
    rc = bl_path_join(path, sizeof(path), dir, name);
    if (rc < 0) {
        return bl_err_code(msg, rc, "%s", dir);
    }
    fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd < 0) {
        return bl_err_code(msg, -errno, "%s", path);
    }
    rc = write_header(export, shard, fd, msg);
    for (uint32_t i = 0; rc == 0 && i < export->item_count; i++) {
        if (export->items[i].shard == shard) {
            rc = write_tensor(export, &export->items[i], fd, msg);
        }
    }
    if (rc == 0 && fsync(fd) < 0) {
        rc = bl_err_code(msg, -errno, "fsync");
    }
    close(fd);
    return rc < 0 ? bl_err_in(msg, rc, "%s", name) : 0;
}

static int write_text(const char *dir, const char *name, const char *text, size_t bytes,
                      struct bl_errmsg *msg)
{
    char path[TOOL_REPLACE_PATH_MAX];
    int rc = bl_path_join(path, sizeof(path), dir, name);

    return rc < 0 ? bl_err_code(msg, rc, "%s", dir) : bl_file_write_atomic(path, text, bytes, msg);
}

static int write_index(const struct export *export, const char *dir, struct bl_errmsg *msg)
{
    struct ckpt_text text = {0};
    char name[64];
    int rc;

    ckpt_text_printf(&text, "{\n  \"metadata\": {\"total_size\": %llu},\n  \"weight_map\": {",
                     (unsigned long long)export->bytes);
    for (uint32_t i = 0; i < export->item_count; i++) {
        shard_name(export, export->items[i].shard, name);
        ckpt_text_printf(&text, "%s\n    ", i == 0 ? "" : ",");
        ckpt_text_string(&text, export->theirs->tensors[export->items[i].tensor].name);
        ckpt_text_printf(&text, ": \"%s\"", name);
    }
    ckpt_text_printf(&text, "\n  }\n}\n");
    rc = text.failed ? bl_err_code(msg, -ENOMEM, "index")
                     : write_text(dir, CKPT_HF_INDEX_FILE, text.data, text.bytes, msg);
    ckpt_text_close(&text);
    return rc;
}

static int write_all(struct export *export, const char *dir, struct bl_errmsg *msg)
{
    char *config = ckpt_model_to_config(&export->model, export->dtype);
    int rc = config == NULL ? bl_err_code(msg, -ENOMEM, "export")
                            : write_text(dir, CKPT_HF_CONFIG_FILE, config, strlen(config), msg);

    free(config);
    bl_progress_start(&export->progress, "export", export->bytes,
                      bl_progress_mode(export->call->json, export->call->progress));
    for (uint32_t shard = 0; rc == 0 && shard < export->shard_count; shard++) {
        rc = write_shard(export, shard, dir, msg);
    }
    bl_progress_finish(&export->progress);
    return rc < 0 || export->shard_count == 1 ? rc : write_index(export, dir, msg);
}

/* What an earlier export left at a place. */
static bool is_ours(const char *name)
{
    size_t bytes = strlen(name), end = strlen(".safetensors");

    return strcmp(name, CKPT_HF_CONFIG_FILE) == 0 || strcmp(name, CKPT_HF_INDEX_FILE) == 0 ||
           (strncmp(name, "model", 5) == 0 && bytes > end &&
            strcmp(name + bytes - end, ".safetensors") == 0);
}

/* ---- The verb ---- */

static const char *dtype_name(enum bl_dtype dtype)
{
    return dtype == BL_BF16 ? "bf16" : dtype == BL_F16 ? "fp16" : "fp32";
}

static int print_result(const struct export *export)
{
    char size[BL_HUMAN_MAX];

    if (export->call->json) {
        return ckpt_tool_print_json(
            json_pack("{si ss ss ss ss si si sI}", "schema", 1, "root",
                      ckpt_store_path(export->source.store), "dir", export->source.dir, "out",
                      export->options->out, "dtype", dtype_name(export->dtype), "tensors",
                      (int)export->item_count, "files", (int)export->shard_count, "bytes",
                      (json_int_t) export->bytes),
            TOOL_GOOD);
    }
    printf("%s: %s, %u tensors, %s in %s, %u file%s\n", export->options->out,
           ckpt_arch_name(export->model.arch), export->item_count,
           bl_human_bytes(size, export->bytes), dtype_name(export->dtype), export->shard_count,
           export->shard_count == 1 ? "" : "s");
    if (export->model.no_bias) {
        printf("the model has no biases; they were written as zeros\n");
    }
    return TOOL_GOOD;
}

static int run_export(struct export *export)
{
    const struct export_options *options = export->options;
    struct tool_replace replace = {.fd = -1};
    struct bl_errmsg why = {0};
    int rc = read_model(export, &why), code = TOOL_GOOD;

    if (rc == 0) {
        code = check_tensors(export);
    }
    if (rc < 0 || code != TOOL_GOOD) {
        return rc < 0 ? ckpt_tool_fail("%s: %s", export->source.dir, why.text) : code;
    }
    rc = ckpt_view_theirs(&export->theirs, export->source.view, &export->maps, export->dtype,
                          export->overflow, &why);
    if (rc == 0) {
        rc = deal(export, &why);
    }
    if (rc == 0) {
        rc = tool_replace_begin(&replace, options->out, options->force, is_ours, &why);
    }
    if (rc == 0) {
        rc = write_all(export, replace.temp, &why);
    }
    if (rc == 0) {
        rc = tool_replace_commit(&replace, &why);
    }
    tool_replace_close(&replace);
    if (rc < 0) {
        return ckpt_tool_fail("%s%s", why.text,
                              rc == BL_ELIMIT && export->overflow == CKPT_OVERFLOW_REFUSE &&
                                      export->dtype != BL_F32
                                  ? " (--overflow clamp or inf lets it)"
                                  : "");
    }
    return print_result(export);
}

/* Reads the options that are words. An exit code. */
static int read_options(struct export *export, uint64_t *ret_step)
{
    const struct export_options *o = export->options;

    if (o->to == NULL || strcmp(o->to, "hf") != 0) {
        return ckpt_tool_usage("export", o->to == NULL ? "--to" : o->to, "--to is hf");
    }
    if (o->out == NULL) {
        return ckpt_tool_usage("export", "--out", "missing");
    }
    export->dtype = o->dtype == NULL || strcmp(o->dtype, "fp32") == 0 ? BL_F32
                    : strcmp(o->dtype, "bf16") == 0                   ? BL_BF16
                    : strcmp(o->dtype, "fp16") == 0                   ? BL_F16
                                                                      : 0;
    if (export->dtype == 0) {
        return ckpt_tool_usage("export", o->dtype, "--dtype is fp32, bf16 or fp16");
    }
    if (o->overflow != NULL && strcmp(o->overflow, "refuse") != 0) {
        if (strcmp(o->overflow, "clamp") != 0 && strcmp(o->overflow, "inf") != 0) {
            return ckpt_tool_usage("export", o->overflow, "--overflow is refuse, clamp or inf");
        }
        export->overflow =
            strcmp(o->overflow, "clamp") == 0 ? CKPT_OVERFLOW_CLAMP : CKPT_OVERFLOW_INF;
    }
    if (o->max_shard > 0 && o->max_shard < MAX_SHARD_MIN) {
        return ckpt_tool_usage("export", "--max-shard", "at least 4096 bytes");
    }
    if (o->step != NULL && !ckpt_tool_parse_count(o->step, ret_step)) {
        return ckpt_tool_usage("export", o->step, "--step is a whole number");
    }
    return TOOL_GOOD;
}

static int run(const struct ckpt_tool_call *call)
{
    struct export export = {.options = call->options, .call = call};
    struct bl_errmsg why = {0};
    uint64_t step = 0;
    int code = read_options(&export, &step);

    if (code != TOOL_GOOD) {
        return code;
    }
    if (tool_replace_check(export.options->out, export.options->force, is_ours, &why) < 0) {
        return ckpt_tool_fail("%s", why.text);
    }
    if (ckpt_foreign_is(call->paths[0])) {
        return ckpt_tool_fail("%s is no checkpoint of Belay's", call->paths[0]);
    }
    if (!tool_source_open(&export.source, call->paths[0],
                          export.options->step == NULL ? NULL : &step)) {
        return TOOL_COULD_NOT;
    }
    code = run_export(&export);
    ckpt_view_close(export.theirs);
    ckpt_map_close(&export.maps);
    free(export.items);
    free(export.buffer);
    tool_source_close(&export.source);
    return code;
}

const struct ckpt_tool_verb ckpt_tool_verb_export = {
    .name = "export",
    .paths = "PATH",
    .paths_min = 1,
    .paths_max = 1,
    .summary = "writes the parameters for Hugging Face's transformers",
    .text = "Writes the parameters of a checkpoint (of a root, the newest good one) as a\n"
            "directory that transformers loads: config.json and safetensors files, with an\n"
            "index when there are several. 16-bit types round to the nearest, ties to even.\n"
            "The directory appears whole or not at all; a killed export is started again.\n",
    .examples = "  ckpt-tool export /scratch/run7 --to hf --dtype bf16 --out model\n"
                "  ckpt-tool export /scratch/run7 --step 1200 --to hf --max-shard 2G --out m\n",
    .options = export_table,
    .option_count = sizeof(export_table) / sizeof(export_table[0]),
    .options_bytes = sizeof(struct export_options),
    .has_progress = true,
    .run = run,
};
