/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/weights.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

/* ---- Checkpoints ---- */

/* Splits ROOT/DIR; takes the newest good checkpoint if `path` is itself a root. */
static int open_checkpoint(struct train_weights *weights, const char *path, struct bl_errmsg *msg)
{
    char root[BL_PATH_MAX];
    struct ckpt_scan scan;
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] == '/') {
        length--;
    }
    if (length >= sizeof root) {
        return bl_err_code(msg, -ENAMETOOLONG, "%s", path);
    }
    memcpy(root, path, length);
    root[length] = 0;
    struct ckpt_store_config config = {.path = root};
    char *slash = strrchr(root, '/');
    const char *name = slash != NULL ? slash + 1 : root;
    if (strncmp(name, "step-", 5) == 0 && strlen(name) < CKPT_DIR_MAX) {
        memcpy(weights->dir, name, strlen(name) + 1);
        config.path = slash == NULL ? "." : slash == root ? "/" : root;
        if (slash != NULL) {
            *slash = 0;
        }
        return ckpt_store_open(&weights->store, &config, msg);
    }
    int rc = ckpt_store_open(&weights->store, &config, msg);
    if (rc != 0) {
        return rc;
    }
    rc = ckpt_scan(weights->store, &scan, msg);
    if (rc != 0) {
        return rc;
    }
    const struct ckpt_entry *newest = ckpt_scan_newest(&scan, NULL, 0);
    if (newest == NULL) {
        rc = bl_err(msg, BL_ENOSTATE, "%s: no good checkpoint", root);
    } else {
        memcpy(weights->dir, newest->dir, CKPT_DIR_MAX);
    }
    ckpt_scan_close(&scan);
    return rc;
}

int train_weights_want(struct bl_extent_list *list, const struct train_tensor *weight, uint64_t lo,
                       uint64_t hi, uint64_t offset, struct bl_errmsg *msg)
{
    struct bl_tensor tensor = {.kind = BL_KIND_PARAM, .dtype = BL_F32, .dims = weight->dims};
    struct bl_extent extent;
    uint32_t index;
    memcpy(tensor.name, weight->name, sizeof tensor.name);
    memcpy(tensor.shape, weight->shape, weight->dims * sizeof tensor.shape[0]);
    int rc = bl_extent_list_tensor(list, &tensor, &index, msg);
    if (rc == 0) {
        bl_extent_whole(&extent, &tensor, index, lo, hi);
        memcpy(extent.lo, weight->lo, weight->dims * sizeof extent.lo[0]);
        memcpy(extent.hi, weight->hi, weight->dims * sizeof extent.hi[0]);
        extent.offset = offset;
        rc = bl_extent_list_add(list, &extent);
    }
    return rc;
}

static int load_checkpoint(struct train_weights *weights, const struct train_model *model,
                           float *params, struct bl_errmsg *msg)
{
    struct bl_extent_list list = {0};
    struct ckpt_load_result result;
    uint32_t count;
    const struct train_tensor *tensors = train_model_tensors(model, &count);
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && i < count; i++) {
        rc = train_weights_want(&list, &tensors[i], 0, tensors[i].elems,
                                tensors[i].offset * sizeof(float), msg);
    }
    if (rc == 0) {
        const struct ckpt_dest dest = {.list = &list, .base = params};
        rc = ckpt_load(weights->store, weights->dir, &dest, 1, &result, msg);
    }
    bl_extent_list_close(&list);
    return rc;
}

/* ---- Models ---- */

static void take_model(struct train_weights *weights, const struct ckpt_model *model)
{
    int is_gpt2 = model->arch == CKPT_ARCH_GPT2;
    weights->context = model->context;
    weights->config = (struct bl_job_model){.arch = is_gpt2 ? BL_ARCH_GPT2 : BL_ARCH_LLAMA,
                                            .layers = model->layers,
                                            .dim = model->dim,
                                            .hidden = model->hidden,
                                            .heads = model->heads,
                                            .kv_heads = model->kv_heads,
                                            .vocab = model->vocab,
                                            .tied = model->tied,
                                            .bias = is_gpt2 && !model->no_bias,
                                            .context = is_gpt2 ? model->context : 0,
                                            .rope_theta = model->rope_theta,
                                            .rope_factor = model->rope_scaling.factor,
                                            .rope_low = model->rope_scaling.low,
                                            .rope_high = model->rope_scaling.high,
                                            .rope_context = model->rope_scaling.context,
                                            .norm_eps = model->norm_eps};
}

static int model_of_checkpoint(struct train_weights *weights, struct bl_errmsg *msg)
{
    struct ckpt_manifest manifest = {0};
    struct ckpt_model model;
    int rc = ckpt_manifest_load(weights->store, weights->dir, &manifest, msg);
    if (rc == 0) {
        rc = ckpt_model_from_job(&model, manifest.job == NULL ? "{}" : manifest.job, msg);
        if (rc == 0) {
            take_model(weights, &model);
        }
        ckpt_manifest_close(&manifest);
    }
    return rc != 0 ? bl_err_in(msg, rc, "%s", weights->dir) : 0;
}

/* ---- Other people's files ---- */

struct findings {
    uint32_t count;
    char first[256];
};

static void note_finding(void *arg, const char *kind, const char *name, const char *text)
{
    struct findings *findings = arg;
    (void)kind;
    if (findings->count++ == 0) {
        snprintf(findings->first, sizeof findings->first, "%.120s %.130s", name, text);
    }
}

static int open_files(struct train_weights *weights, const char *path, struct bl_errmsg *msg)
{
    static const char suffix[] = ".safetensors";
    size_t bytes = strlen(path), end = sizeof suffix - 1;
    enum ckpt_naming naming = CKPT_NAMES_LLAMA2C;
    struct findings findings = {0};
    struct ckpt_model model;
    struct stat st;
    int is_dir = stat(path, &st) == 0 && S_ISDIR(st.st_mode);
    int rc;
    if (!is_dir && bytes > end && strcmp(path + bytes - end, suffix) == 0) {
        return bl_err(msg, BL_ECONFIG, "%s: give the directory, with its config.json", path);
    }
    rc = is_dir ? ckpt_foreign_model(&model, path, msg) : 0;
    if (rc == 0) {
        rc = is_dir ? ckpt_foreign_open(&weights->theirs, path, msg)
                    : ckpt_llama2c_open(&weights->theirs, &model, path, msg);
    }
    if (rc == 0) {
        naming = is_dir ? ckpt_foreign_naming(weights->theirs, model.arch) : naming;
        take_model(weights, &model);
    }
    if (rc == 0) {
        rc = ckpt_map_make(&weights->maps, &model, naming, msg);
    }
    if (rc != 0) {
        return rc;
    }
    ckpt_map_compare(&weights->maps, weights->theirs, note_finding, &findings);
    return findings.count == 0
               ? 0
               : bl_err(msg, BL_EFORMAT, "%s: %u tensors are not as they should be, the first: %s",
                        path, findings.count, findings.first);
}

static int load_files(struct train_weights *weights, const struct train_model *model, float *params,
                      struct bl_errmsg *msg)
{
    uint32_t count;
    const struct train_tensor *tensors = train_model_tensors(model, &count);
    struct ckpt_view *ours = NULL;
    int rc = ckpt_view_ours(&ours, weights->theirs, &weights->maps, msg);
    for (uint32_t i = 0; rc == 0 && i < count; i++) {
        int64_t at = ckpt_view_find(ours, tensors[i].name);
        rc = at < 0 ? bl_err(msg, BL_ENOSTATE, "%s: is not there", tensors[i].name)
                    : ckpt_view_read_flat(ours, (uint32_t)at, 0, tensors[i].elems,
                                          params + tensors[i].offset, msg);
    }
    ckpt_view_close(ours);
    return rc;
}

int train_weights_open(struct train_weights *weights, const char *path,
                       const struct bl_job_model *config, struct bl_errmsg *msg)
{
    memset(weights, 0, sizeof *weights);
    if (config == NULL && ckpt_foreign_is(path)) {
        return open_files(weights, path, msg);
    }
    int rc = open_checkpoint(weights, path, msg);
    if (rc == 0 && config != NULL) {
        weights->config = *config;
    }
    return rc != 0 || config != NULL ? rc : model_of_checkpoint(weights, msg);
}

int train_weights_load(struct train_weights *weights, const struct train_model *model,
                       float *params, struct bl_errmsg *msg)
{
    return weights->theirs != NULL ? load_files(weights, model, params, msg)
                                   : load_checkpoint(weights, model, params, msg);
}

void train_weights_close(struct train_weights *weights)
{
    ckpt_view_close(weights->theirs);
    ckpt_map_close(&weights->maps);
    ckpt_store_close(weights->store);
    memset(weights, 0, sizeof *weights);
}
