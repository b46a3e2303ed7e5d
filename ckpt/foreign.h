/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tensors in other people's files, as a view (ckpt/view.h): one safetensors file, or a directory of
 * them with or without Hugging Face's model.safetensors.index.json; and a llama2.c file.
 *
 * Nothing is believed: headers are bounded and checked against the files' sizes before memory is
 * taken, tensors of one file must lie one behind the other without gaps up to its end, an index and
 * the files must name the same tensors. Names over BL_TENSOR_NAME_MAX are refused. Memory: about
 * 220 bytes a tensor and, while a file is opened, its header.
 */
#ifndef BL_CKPT_FOREIGN_H
#define BL_CKPT_FOREIGN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "ckpt/view.h"

#define CKPT_FOREIGN_TENSORS_MAX 262144u
#define CKPT_FOREIGN_FILES_MAX   4096u
#define CKPT_HF_INDEX_FILE       "model.safetensors.index.json"
#define CKPT_HF_INDEX_BYTES_MAX  (64u * 1024 * 1024)
#define CKPT_HF_CONFIG_FILE      "config.json"

/* Is there something at `path` that ckpt_foreign_open takes: a file, or a directory with a
 * safetensors file or an index in it, and no checkpoint of Belay's? */
bool ckpt_foreign_is(const char *path);

/* Opens a safetensors file or a directory: by its index if it has one, else model.safetensors, else
 * every *.safetensors in it. *ret is owned: ckpt_view_close. Errors name file and tensor. */
BL_MUST_CHECK int ckpt_foreign_open(struct ckpt_view **ret, const char *path,
                                    struct bl_errmsg *msg);

/* The model of a directory's config.json. -ENOENT when it has none. */
BL_MUST_CHECK int ckpt_foreign_model(struct ckpt_model *ret, const char *dir,
                                     struct bl_errmsg *msg);

/* How the files name things: CKPT_NAMES_HF_BARE for a GPT-2 without "transformer.". */
enum ckpt_naming ckpt_foreign_naming(const struct ckpt_view *view, enum ckpt_arch arch);

/* Reads an index's text: calls `entry` for each tensor with its file's name, which is plain (no
 * '/', no leading dot, ends in .safetensors). Bounded, non-recursive. A negative return ends it. */
BL_MUST_CHECK int ckpt_hf_index_decode(const char *text, size_t bytes,
                                       int (*entry)(void *arg, const char *tensor,
                                                    const char *file),
                                       void *arg, struct bl_errmsg *msg);

/* ---- llama2.c ---- */

#define CKPT_LLAMA2C_HEADER_BYTES 28u

/* The model of a llama2.c file of `file_bytes`, from its first bytes (7 int32: dim, hidden, layers,
 * heads, kv_heads, vocab (negative: untied head), context). The file must have exactly the size
 * that follows. Newer layouts of its export.py (magic "ak42") are BL_ENOTBUILT. */
BL_MUST_CHECK int ckpt_llama2c_decode(struct ckpt_model *ret,
                                      const uint8_t first[CKPT_LLAMA2C_HEADER_BYTES],
                                      uint64_t file_bytes, struct bl_errmsg *msg);

/* Opens such a file. Its tensors have Hugging Face's names (CKPT_NAMES_LLAMA2C). */
BL_MUST_CHECK int ckpt_llama2c_open(struct ckpt_view **ret, struct ckpt_model *ret_model,
                                    const char *path, struct bl_errmsg *msg);

/* ---- For the implementations ---- */

struct ckpt_foreign_place {
    uint32_t file;
    uint64_t offset; /* bytes in the file */
};

/* A view over files. Built by adding files and tensors, then ckpt_foreign_finish. */
struct ckpt_foreign {
    struct ckpt_view view;
    struct ckpt_foreign_place *places; /* owned; parallel to view.tensors */
    uint32_t room;                     /* of both */
    char **files;                      /* owned paths */
    uint32_t file_count;
    int fd; /* of files[fd_file], or -1 */
    uint32_t fd_file;
};

BL_MUST_CHECK int ckpt_foreign_new(struct ckpt_foreign **ret, struct bl_errmsg *msg);
BL_MUST_CHECK int ckpt_foreign_add_file(struct ckpt_foreign *foreign, const char *path,
                                        struct bl_errmsg *msg);
BL_MUST_CHECK int ckpt_foreign_add(struct ckpt_foreign *foreign, const struct bl_tensor *tensor,
                                   uint32_t file, uint64_t offset, struct bl_errmsg *msg);
/* Sorts; a name that is there twice is BL_EFORMAT. */
BL_MUST_CHECK int ckpt_foreign_finish(struct ckpt_foreign *foreign, struct bl_errmsg *msg);

#endif
