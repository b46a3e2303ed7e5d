/* SPDX-License-Identifier: Apache-2.0 */
/* Opening safetensors files: which files, their headers, the index that goes with them. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "ckpt/foreign.h"
#include "ckpt/part.h"
#include "ckpt/text.h"

#define SUFFIX     ".safetensors"
#define SINGLE     "model" SUFFIX
#define NAME_BYTES 256 /* of a file, with the NUL */

static bool is_plain_file_name(const char *name)
{
    size_t bytes = strlen(name), end = sizeof(SUFFIX) - 1;

    return bytes > end && bytes < NAME_BYTES && name[0] != '.' && strchr(name, '/') == NULL &&
           strcmp(name + bytes - end, SUFFIX) == 0;
}

/* ---- One file ---- */

struct header {
    struct ckpt_foreign *foreign;
    uint32_t file;
    uint64_t data, at; /* where the data begins; where the next tensor must begin in it */
    struct bl_errmsg *msg;
    bool told; /* msg is set */
};

static int take_entry(void *arg, const struct ckpt_st_entry *entry)
{
    struct header *header = arg;
    struct bl_tensor tensor = {.kind = BL_KIND_PARAM, .dtype = entry->dtype, .dims = entry->dims};
    int rc;

    header->told = true;
    if (strlen(entry->key) >= sizeof(tensor.name)) {
        return bl_err(header->msg, BL_ELIMIT, "a tensor's name is over %zu bytes",
                      sizeof(tensor.name) - 1);
    }
    memcpy(tensor.name, entry->key, strlen(entry->key) + 1);
    memcpy(tensor.shape, entry->shape, sizeof(tensor.shape));
    rc = ckpt_foreign_add(header->foreign, &tensor, header->file, header->data + entry->begin,
                          header->msg);
    header->told = rc < 0;
    return rc;
}

/* Order of a file's tensors by their place in it. */
static int order_by_place(const void *a_, const void *b_)
{
    const uint64_t *a = a_, *b = b_;

    return a[0] != b[0] ? (a[0] < b[0] ? -1 : 1) : (a[1] > b[1]) - (a[1] < b[1]);
}

/* Do the file's tensors, the last ones of the view from `first` on, lie one behind the other from
 * the beginning of the data to the end of the file? */
static int check_tiling(const struct header *header, uint32_t first, uint64_t file_bytes,
                        struct bl_errmsg *msg)
{
    const struct ckpt_view *view = &header->foreign->view;
    uint32_t count = view->tensor_count - first;
    uint64_t at = header->data;
    uint64_t(*ranges)[2] = calloc(count + 1u, sizeof(*ranges));
    int rc = ranges == NULL ? bl_err_code(msg, -ENOMEM, "safetensors header") : 0;

    for (uint32_t i = 0; rc == 0 && i < count; i++) {
        const struct bl_tensor *tensor = &view->tensors[first + i];
        uint64_t bytes = bl_dtype_bytes(tensor->dtype);

        for (uint32_t d = 0; d < tensor->dims; d++) {
            bytes *= tensor->shape[d]; /* fits: it was compared with its range */
        }
        ranges[i][0] = header->foreign->places[first + i].offset;
        ranges[i][1] = ranges[i][0] + bytes;
    }
    if (rc == 0) {
        qsort(ranges, count, sizeof(*ranges), order_by_place);
    }
    for (uint32_t i = 0; rc == 0 && i < count; i++) {
        if (ranges[i][0] != at) {
            rc = bl_err(msg, BL_EFORMAT, "tensors %s at byte %llu",
                        ranges[i][0] < at ? "share bytes" : "leave a gap", (unsigned long long)at);
        }
        at = ranges[i][1];
    }
    free(ranges);
    if (rc == 0 && at != file_bytes) {
        rc = bl_err(msg, BL_EFORMAT, "%llu bytes; its tensors end at byte %llu",
                    (unsigned long long)file_bytes, (unsigned long long)at);
    }
    return rc;
}

/* The header of an opened file of `file_bytes`, into owned memory. */
static int read_header(int fd, uint64_t file_bytes, uint8_t **ret, uint64_t *ret_bytes,
                       struct bl_errmsg *msg)
{
    uint8_t first[8] = {0}, *data;
    ssize_t n = pread(fd, first, sizeof(first), 0);
    uint64_t bytes;
    int rc;

    if (n != (ssize_t)sizeof(first)) {
        return n < 0 ? bl_err_code(msg, -errno, "read")
                     : bl_err(msg, BL_EFORMAT, "no safetensors file: shorter than its header");
    }
    rc = ckpt_st_header_bytes(first, file_bytes, &bytes, msg);
    if (rc < 0) {
        return rc;
    }
    data = malloc(bytes);
    if (data == NULL) {
        return bl_err_code(msg, -ENOMEM, "%llu bytes of header", (unsigned long long)bytes);
    }
    n = bl_fd_read_all(fd, data, bytes);
    if (n != (ssize_t)bytes) {
        free(data);
        return n < 0 ? bl_err_code(msg, (int)n, "read")
                     : bl_err(msg, BL_EFORMAT, "ends inside of its header");
    }
    *ret = data;
    *ret_bytes = bytes;
    return 0;
}

static int decode_file(struct ckpt_foreign *foreign, int fd, uint64_t file_bytes,
                       struct bl_errmsg *msg)
{
    struct header header = {.foreign = foreign, .file = foreign->file_count - 1};
    struct bl_errmsg inner = {0}, outer = {0};
    uint32_t first = foreign->view.tensor_count;
    uint8_t *data = NULL;
    int rc = read_header(fd, file_bytes, &data, &header.data, msg);

    if (rc < 0) {
        return rc;
    }
    header.msg = &inner;
    rc = ckpt_st_header_decode(data, (size_t)header.data, file_bytes, take_entry, &header, &outer);
    free(data);
    if (rc < 0) {
        return bl_err(msg, rc, "%s", header.told ? inner.text : outer.text);
    }
    return check_tiling(&header, first, file_bytes, msg);
}

static int open_file(struct ckpt_foreign *foreign, const char *path, struct bl_errmsg *msg)
{
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), rc;

    if (fd < 0 || fstat(fd, &st) < 0) {
        rc = bl_err_code(msg, -errno, "%s", path);
    } else if (!S_ISREG(st.st_mode)) {
        rc = bl_err(msg, BL_EFORMAT, "%s: not a regular file", path);
    } else {
        rc = ckpt_foreign_add_file(foreign, path, msg);
        if (rc == 0) {
            rc = decode_file(foreign, fd, (uint64_t)st.st_size, msg);
            rc = rc < 0 ? bl_err_in(msg, rc, "%s", path) : 0;
        }
    }
    if (fd >= 0) {
        close(fd);
    }
    return rc;
}

/* ---- The index ---- */

static void decode_map(struct ckpt_json *json,
                       int (*entry)(void *arg, const char *tensor, const char *file), void *arg,
                       int *ret_rc)
{
    ckpt_json_want(json, '{');
    if (ckpt_json_is(json, '}')) {
        return;
    }
    while (json->code == 0) {
        char tensor[BL_TENSOR_NAME_MAX], file[NAME_BYTES];

        ckpt_json_string(json, tensor, sizeof(tensor));
        ckpt_json_want(json, ':');
        ckpt_json_string(json, file, sizeof(file));
        if (json->code == 0 && !is_plain_file_name(file)) {
            ckpt_json_fail(json, BL_EFORMAT, "a file's name is not plain, or not " SUFFIX);
        }
        if (json->code == 0) {
            *ret_rc = entry(arg, tensor, file);
            if (*ret_rc < 0) {
                return;
            }
        }
        if (!ckpt_json_is(json, ',')) {
            ckpt_json_want(json, '}');
            return;
        }
    }
}

int ckpt_hf_index_decode(const char *text, size_t bytes,
                         int (*entry)(void *arg, const char *tensor, const char *file), void *arg,
                         struct bl_errmsg *msg)
{
    struct ckpt_json json;
    const char *from;
    bool seen = false;
    int rc = 0;

    if (bytes > CKPT_HF_INDEX_BYTES_MAX) {
        return bl_err(msg, BL_ELIMIT, "%zu bytes: at most %u", bytes, CKPT_HF_INDEX_BYTES_MAX);
    }
    ckpt_json_init(&json, text, bytes);
    ckpt_json_want(&json, '{');
    while (json.code == 0) {
        char key[64];

        ckpt_json_string(&json, key, sizeof(key));
        ckpt_json_want(&json, ':');
        if (strcmp(key, "weight_map") == 0 && !seen) {
            seen = true;
            decode_map(&json, entry, arg, &rc);
            if (rc < 0) {
                return rc;
            }
        } else if (strcmp(key, "weight_map") == 0) {
            ckpt_json_fail(&json, BL_EFORMAT, "weight_map is there twice");
        } else {
            ckpt_json_skip(&json, &from);
        }
        if (!ckpt_json_is(&json, ',')) {
            ckpt_json_want(&json, '}');
            break;
        }
    }
    ckpt_json_finish(&json);
    rc = ckpt_json_error(&json, msg);
    return rc == 0 && !seen ? bl_err(msg, BL_EFORMAT, "weight_map is missing") : rc;
}

/* What an index says: tensor i lies in files[of[i]]. */
struct index {
    struct index_row {
        char tensor[BL_TENSOR_NAME_MAX];
        uint32_t file;
    } * rows;                  /* owned */
    char (*files)[NAME_BYTES]; /* owned, in the order of their first tensor */
    uint32_t count, room, file_count;
    struct bl_errmsg *msg;
};

static int index_file(struct index *index, const char *file, uint32_t *ret)
{
    void *more;

    for (uint32_t i = index->file_count; i-- > 0;) { /* the last one, mostly */
        if (strcmp(index->files[i], file) == 0) {
            *ret = i;
            return 0;
        }
    }
    if (index->file_count >= CKPT_FOREIGN_FILES_MAX) {
        return bl_err(index->msg, BL_ELIMIT, "more than %u files", CKPT_FOREIGN_FILES_MAX);
    }
    more = realloc(index->files, (index->file_count + 1u) * sizeof(*index->files));
    if (more == NULL) {
        return bl_err_code(index->msg, -ENOMEM, "index");
    }
    index->files = more;
    snprintf(index->files[index->file_count], NAME_BYTES, "%s", file);
    *ret = index->file_count++;
    return 0;
}

static int index_entry(void *arg, const char *tensor, const char *file)
{
    struct index *index = arg;
    struct index_row *row;
    int rc;

    if (index->count >= CKPT_FOREIGN_TENSORS_MAX) {
        return bl_err(index->msg, BL_ELIMIT, "more than %u tensors", CKPT_FOREIGN_TENSORS_MAX);
    }
    if (index->count == index->room) {
        uint32_t room = index->room == 0 ? 256 : 2 * index->room;
        void *more = realloc(index->rows, room * sizeof(*index->rows));

        if (more == NULL) {
            return bl_err_code(index->msg, -ENOMEM, "index");
        }
        index->rows = more;
        index->room = room;
    }
    row = &index->rows[index->count];
    rc = index_file(index, file, &row->file);
    if (rc == 0) {
        snprintf(row->tensor, sizeof(row->tensor), "%s", tensor);
        index->count++;
    }
    return rc;
}

/* Index and files name the same tensors in the same files? The view is sorted. */
static int index_check(const struct index *index, const struct ckpt_foreign *foreign,
                       struct bl_errmsg *msg)
{
    const struct ckpt_view *view = &foreign->view;
    uint8_t *named = calloc(view->tensor_count + 1u, 1);
    int rc = named == NULL ? bl_err_code(msg, -ENOMEM, "index") : 0;

    for (uint32_t i = 0; rc == 0 && i < index->count; i++) {
        const char *tensor = index->rows[i].tensor, *file = index->files[index->rows[i].file];
        int64_t at = ckpt_view_find(view, tensor);

        if (at < 0 || foreign->places[at].file != index->rows[i].file) {
            rc = bl_err(msg, BL_EFORMAT, "it puts \"%s\" into %s, which has no such tensor", tensor,
                        file);
        } else if (named[at]++ != 0) {
            rc = bl_err(msg, BL_EFORMAT, "tensor \"%s\" is there twice", tensor);
        }
    }
    for (uint32_t i = 0; rc == 0 && i < view->tensor_count; i++) {
        if (named[i] == 0) {
            rc = bl_err(msg, BL_EFORMAT, "tensor \"%s\" of %s is not in it", view->tensors[i].name,
                        index->files[foreign->places[i].file]);
        }
    }
    free(named);
    return rc;
}

static int open_index(struct ckpt_foreign *foreign, const char *dir, const char *path,
                      struct bl_errmsg *msg)
{
    struct index index = {.msg = msg};
    char *text = NULL, file[CKPT_PATH_MAX];
    size_t bytes;
    int rc = bl_file_read(path, CKPT_HF_INDEX_BYTES_MAX, &text, &bytes, msg);

    if (rc < 0) {
        return rc;
    }
    rc = ckpt_hf_index_decode(text, bytes, index_entry, &index, msg);
    rc = rc < 0 ? bl_err_in(msg, rc, "%s", path) : 0;
    free(text);
    for (uint32_t i = 0; rc == 0 && i < index.file_count; i++) {
        rc = bl_path_join(file, sizeof(file), dir, index.files[i]);
        rc = rc < 0 ? bl_err_code(msg, rc, "%s", dir) : open_file(foreign, file, msg);
    }
    if (rc == 0) {
        rc = ckpt_foreign_finish(foreign, msg);
    }
    if (rc == 0) {
        rc = index_check(&index, foreign, msg);
        rc = rc < 0 ? bl_err_in(msg, rc, "%s", path) : 0;
    }
    free(index.rows);
    free(index.files);
    return rc;
}

/* ---- Directories ---- */

static int order_by_text(const void *a, const void *b)
{
    return strcmp(a, b);
}

/* Every *.safetensors of a directory, by name. */
static int open_all(struct ckpt_foreign *foreign, const char *dir, struct bl_errmsg *msg)
{
    char(*names)[NAME_BYTES] = calloc(CKPT_FOREIGN_FILES_MAX, sizeof(*names));
    char path[CKPT_PATH_MAX];
    DIR *list = names == NULL ? NULL : opendir(dir);
    const struct dirent *entry;
    uint32_t count = 0;
    int rc = names == NULL  ? bl_err_code(msg, -ENOMEM, "%s", dir)
             : list == NULL ? bl_err_code(msg, -errno, "%s", dir)
                            : 0;

    while (rc == 0 && (entry = readdir(list)) != NULL) {
        if (!is_plain_file_name(entry->d_name)) {
            continue;
        }
        if (count == CKPT_FOREIGN_FILES_MAX) {
            rc = bl_err(msg, BL_ELIMIT, "%s: more than %u files", dir, CKPT_FOREIGN_FILES_MAX);
        } else {
            snprintf(names[count++], NAME_BYTES, "%s", entry->d_name);
        }
    }
    if (list != NULL) {
        closedir(list);
    }
    if (rc == 0 && count == 0) {
        rc = bl_err(msg, -ENOENT, "%s: no " SUFFIX " file in it", dir);
    }
    if (rc == 0) {
        qsort(names, count, sizeof(*names), order_by_text);
    }
    for (uint32_t i = 0; rc == 0 && i < count; i++) {
        rc = bl_path_join(path, sizeof(path), dir, names[i]);
        rc = rc < 0 ? bl_err_code(msg, rc, "%s", dir) : open_file(foreign, path, msg);
    }
    free(names);
    return rc < 0 ? rc : ckpt_foreign_finish(foreign, msg);
}

/* Is there `dir`/`name`? Its path into `path`. */
static bool has(char path[CKPT_PATH_MAX], const char *dir, const char *name)
{
    return bl_path_join(path, CKPT_PATH_MAX, dir, name) == 0 && access(path, F_OK) == 0;
}

static int open_path(struct ckpt_foreign *foreign, const char *path, struct bl_errmsg *msg)
{
    char file[CKPT_PATH_MAX];
    struct stat st;
    int rc;

    if (stat(path, &st) < 0) {
        return bl_err_code(msg, -errno, "%s", path);
    }
    if (S_ISDIR(st.st_mode) && has(file, path, CKPT_HF_INDEX_FILE)) {
        return open_index(foreign, path, file, msg);
    }
    if (S_ISDIR(st.st_mode) && !has(file, path, SINGLE)) {
        return open_all(foreign, path, msg);
    }
    rc = open_file(foreign, S_ISDIR(st.st_mode) ? file : path, msg);
    return rc < 0 ? rc : ckpt_foreign_finish(foreign, msg);
}

int ckpt_foreign_open(struct ckpt_view **ret, const char *path, struct bl_errmsg *msg)
{
    struct ckpt_foreign *foreign = NULL;
    int rc = ckpt_foreign_new(&foreign, msg);

    if (rc < 0) {
        return rc;
    }
    rc = open_path(foreign, path, msg);
    if (rc < 0) {
        ckpt_view_close(&foreign->view);
        return rc;
    }
    *ret = &foreign->view;
    return 0;
}

bool ckpt_foreign_is(const char *path)
{
    char file[CKPT_PATH_MAX];
    const struct dirent *entry;
    bool found = false;
    struct stat st;
    DIR *list;

    if (stat(path, &st) < 0 || !S_ISDIR(st.st_mode)) {
        return stat(path, &st) == 0;
    }
    if (has(file, path, "manifest.json") || has(file, path, "BELAY")) {
        return false;
    }
    list = opendir(path);
    while (list != NULL && !found && (entry = readdir(list)) != NULL) {
        found = is_plain_file_name(entry->d_name) || strcmp(entry->d_name, CKPT_HF_INDEX_FILE) == 0;
    }
    if (list != NULL) {
        closedir(list);
    }
    return found;
}

int ckpt_foreign_model(struct ckpt_model *ret, const char *dir, struct bl_errmsg *msg)
{
    char path[CKPT_PATH_MAX], *text = NULL;
    size_t bytes;
    int rc = bl_path_join(path, sizeof(path), dir, CKPT_HF_CONFIG_FILE);

    rc = rc < 0 ? bl_err_code(msg, rc, "%s", dir)
                : bl_file_read(path, CKPT_CONFIG_BYTES_MAX, &text, &bytes, msg);
    if (rc < 0) {
        return rc;
    }
    rc = ckpt_model_from_config(ret, text, bytes, msg);
    free(text);
    return rc < 0 ? bl_err_in(msg, rc, "%s", path) : 0;
}

enum ckpt_naming ckpt_foreign_naming(const struct ckpt_view *view, enum ckpt_arch arch)
{
    return arch == CKPT_ARCH_GPT2 && ckpt_view_find(view, "transformer.wte.weight") < 0
               ? CKPT_NAMES_HF_BARE
               : CKPT_NAMES_HF;
}
