/* SPDX-License-Identifier: Apache-2.0 */
/*
 * llama2.c's first layout (its export.py, version 0, and run.c read it): 7 int32, then fp32:
 *
 *     embedding [V,C]; for all layers each: norm1 [C], q [C,C], k [KV,C], v [KV,C], o [C,C],
 *     norm2 [C], gate [F,C], down [C,F], up [F,C]; final norm [C]; two tables of rotary
 *     frequencies [T, D/2], not needed; and, with a negative vocabulary, the head [V,C]
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "ckpt/foreign.h"

#define MAGIC_NEWER 0x616b3432u /* "ak42": versions 1 and 2 */

/* The order in the file: the table's row of a Llama's layer in that of ckpt/hf.c. */
static const char *const layer_order[] = {
    "input_layernorm.weight",  "self_attn.q_proj.weight", "self_attn.k_proj.weight",
    "self_attn.v_proj.weight", "self_attn.o_proj.weight", "post_attention_layernorm.weight",
    "mlp.gate_proj.weight",    "mlp.down_proj.weight",    "mlp.up_proj.weight",
};

static int32_t int_at(const uint8_t *data, uint32_t index)
{
    const uint8_t *at = data + 4 * index;

    return (int32_t)((uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 |
                     (uint32_t)at[3] << 24);
}

/* Sizes are below 2^20 each and layers below 2^12, so that no product here is near 2^64. */
static uint64_t file_bytes_of(const struct ckpt_model *m)
{
    uint64_t dim = m->dim, kv = (uint64_t)m->kv_heads * (m->dim / m->heads);
    uint64_t layer = 2 * dim + 2 * dim * dim + 2 * kv * dim + 3 * (uint64_t)m->hidden * dim;
    uint64_t elems = m->vocab * dim * (m->tied ? 1 : 2) + m->layers * layer + dim +
                     (uint64_t)m->context * (m->dim / m->heads);

    return CKPT_LLAMA2C_HEADER_BYTES + elems * sizeof(float);
}

int ckpt_llama2c_decode(struct ckpt_model *ret, const uint8_t first[CKPT_LLAMA2C_HEADER_BYTES],
                        uint64_t file_bytes, struct bl_errmsg *msg)
{
    struct ckpt_model model = {.arch = CKPT_ARCH_LLAMA, .rope_theta = 10000, .norm_eps = 1e-5};
    uint32_t *const sizes[] = {&model.dim,      &model.hidden, &model.layers, &model.heads,
                               &model.kv_heads, &model.vocab,  &model.context};
    uint64_t want;
    int rc;

    if ((uint32_t)int_at(first, 0) == MAGIC_NEWER) {
        return bl_err(msg, BL_ENOTBUILT,
                      "a newer layout of llama2.c (version %d): export it with version 0",
                      int_at(first, 1));
    }
    for (uint32_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        int32_t value = int_at(first, i);

        if (sizes[i] == &model.vocab) {
            model.tied = value > 0;
            value = value < 0 && value > INT32_MIN ? -value : value;
        }
        if (value <= 0) {
            return bl_err(msg, BL_EFORMAT, "no llama2.c file: number %u of the header is %d", i + 1,
                          int_at(first, i));
        }
        *sizes[i] = (uint32_t)value;
    }
    rc = ckpt_model_check(&model, msg);
    if (rc < 0) {
        return bl_err_in(msg, rc, "no llama2.c file");
    }
    want = file_bytes_of(&model);
    if (file_bytes != want) {
        return bl_err(
            msg, BL_EFORMAT,
            "%llu bytes; the header (dim %u, hidden %u, layers %u, heads %u, kv heads %u, "
            "vocabulary %d, context %u) makes it %llu",
            (unsigned long long)file_bytes, model.dim, model.hidden, model.layers, model.heads,
            model.kv_heads, int_at(first, 5), model.context, (unsigned long long)want);
    }
    *ret = model;
    return 0;
}

/* Adds the tensor `name` of the table at *at and moves on. */
static int add(struct ckpt_foreign *foreign, const struct ckpt_map_list *maps, const char *name,
               uint64_t *at, struct bl_errmsg *msg)
{
    const struct ckpt_map *map = ckpt_map_find(maps, name);
    int rc;

    BL_ASSERT(map != NULL);
    rc = ckpt_foreign_add(foreign, &map->tensor, 0, *at, msg);
    *at += bl_tensor_elems(&map->tensor) * sizeof(float);
    return rc;
}

static int add_all(struct ckpt_foreign *foreign, const struct ckpt_map_list *maps,
                   const struct ckpt_model *model, struct bl_errmsg *msg)
{
    uint64_t at = CKPT_LLAMA2C_HEADER_BYTES;
    int rc = add(foreign, maps, "model.embed_tokens.weight", &at, msg);

    for (uint32_t i = 0; i < sizeof(layer_order) / sizeof(layer_order[0]); i++) {
        for (uint32_t layer = 0; rc == 0 && layer < model->layers; layer++) {
            char name[BL_TENSOR_NAME_MAX];

            snprintf(name, sizeof(name), "model.layers.%u.%s", layer, layer_order[i]);
            rc = add(foreign, maps, name, &at, msg);
        }
    }
    if (rc == 0) {
        rc = add(foreign, maps, "model.norm.weight", &at, msg);
    }
    at += (uint64_t)model->context * (model->dim / model->heads) * sizeof(float);
    return rc < 0 || model->tied ? rc : add(foreign, maps, "lm_head.weight", &at, msg);
}

/* Header and size of the file. */
static int read_header(const char *path, uint8_t first[CKPT_LLAMA2C_HEADER_BYTES],
                       uint64_t *ret_bytes, struct bl_errmsg *msg)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat st;
    ssize_t n;

    if (fd < 0 || fstat(fd, &st) < 0) {
        int rc = -errno;

        if (fd >= 0) {
            close(fd);
        }
        return bl_err_code(msg, rc, "%s", path);
    }
    n = S_ISREG(st.st_mode) ? bl_fd_read_all(fd, first, CKPT_LLAMA2C_HEADER_BYTES) : 0;
    close(fd);
    if (n != (ssize_t)CKPT_LLAMA2C_HEADER_BYTES) {
        return n < 0
                   ? bl_err_code(msg, (int)n, "%s", path)
                   : bl_err(msg, BL_EFORMAT, "%s: no llama2.c file: shorter than its header", path);
    }
    *ret_bytes = (uint64_t)st.st_size;
    return 0;
}

int ckpt_llama2c_open(struct ckpt_view **ret, struct ckpt_model *ret_model, const char *path,
                      struct bl_errmsg *msg)
{
    uint8_t first[CKPT_LLAMA2C_HEADER_BYTES];
    struct ckpt_foreign *foreign = NULL;
    struct ckpt_map_list maps = {0};
    struct ckpt_model model;
    uint64_t bytes = 0;
    int rc = read_header(path, first, &bytes, msg);

    if (rc < 0) {
        return rc;
    }
    rc = ckpt_llama2c_decode(&model, first, bytes, msg);
    if (rc < 0) {
        return bl_err_in(msg, rc, "%s", path);
    }
    rc = ckpt_foreign_new(&foreign, msg);
    if (rc == 0) {
        rc = ckpt_foreign_add_file(foreign, path, msg);
    }
    if (rc == 0) {
        rc = ckpt_map_make(&maps, &model, CKPT_NAMES_LLAMA2C, msg);
    }
    if (rc == 0) {
        rc = add_all(foreign, &maps, &model, msg);
    }
    if (rc == 0) {
        rc = ckpt_foreign_finish(foreign, msg);
    }
    ckpt_map_close(&maps);
    if (rc < 0) {
        ckpt_view_close(foreign == NULL ? NULL : &foreign->view);
        return bl_err_in(msg, rc, "%s", path);
    }
    *ret = &foreign->view;
    *ret_model = model;
    return 0;
}
