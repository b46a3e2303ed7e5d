/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/token_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/digest.h"

#define INDEX_HEAD_BYTES    34u
#define INDEX_SEQUENCES_MAX (1ull << 34) /* what a file of this size could hold is far less */

static const char index_magic[9] = "MMIDIDX\0\0";

/* The fields lie at any address. */
static uint64_t load_u64(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static uint32_t load_u32(const uint8_t *at)
{
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static uint32_t type_bytes(enum token_type type)
{
    switch (type) {
    case TOKEN_U8:
        return 1;
    case TOKEN_I16:
    case TOKEN_U16:
        return 2;
    case TOKEN_I32:
    case TOKEN_U32:
        return 4;
    case TOKEN_I64:
        return 8;
    }
    return 0;
}

static int map_file(struct token_file *file, struct bl_errmsg *msg)
{
    struct stat st;
    file->fd = open(file->path, O_RDONLY | O_CLOEXEC);
    if (file->fd < 0) {
        return bl_err(msg, BL_ECONFIG,
                      "data file %s: %s: the job names it, and it must be readable on every node",
                      file->path, strerror(errno));
    }
    if (fstat(file->fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        return bl_err(msg, BL_ECONFIG,
                      "data file %s: not a regular file: data.files takes files, no folders",
                      file->path);
    }
    file->map_bytes = (uint64_t)st.st_size;
    file->mtime_s = st.st_mtim.tv_sec;
    file->mtime_ns = st.st_mtim.tv_nsec;
    if (file->map_bytes > 0) {
        void *map = mmap(NULL, file->map_bytes, PROT_READ, MAP_PRIVATE, file->fd, 0);
        if (map == MAP_FAILED) {
            return bl_err(msg, BL_ECONFIG, "data file %s: map of %llu bytes: %s", file->path,
                          (unsigned long long)file->map_bytes, strerror(errno));
        }
        file->map = map;
    }
    return 0;
}

/* ---- llm.c ---- */

static int llmc_open(struct token_file *file, struct bl_errmsg *msg)
{
    if (file->map_bytes < TOKEN_LLMC_HEADER_BYTES) {
        return bl_err(msg, BL_ECONFIG,
                      "data file %s: %llu bytes are too few for a shard's header of %u", file->path,
                      (unsigned long long)file->map_bytes, TOKEN_LLMC_HEADER_BYTES);
    }
    uint32_t magic = load_u32(file->map), version = load_u32(file->map + 4);
    file->count = load_u32(file->map + 8);
    file->data_offset = TOKEN_LLMC_HEADER_BYTES;
    if (magic != TOKEN_LLMC_MAGIC_U16 && magic != TOKEN_LLMC_MAGIC_U32) {
        return bl_err(
            msg, BL_ECONFIG,
            "data file %s: offset 0: magic %u is none of a token shard (%u or %u), and no "
            "index (.idx) stands beside it; text needs data.tokenizer: bytes",
            file->path, magic, TOKEN_LLMC_MAGIC_U16, TOKEN_LLMC_MAGIC_U32);
    }
    file->type = magic == TOKEN_LLMC_MAGIC_U16 ? TOKEN_U16 : TOKEN_U32;
    if (version != (magic == TOKEN_LLMC_MAGIC_U16 ? 1u : 7u)) {
        return bl_err(msg, BL_ECONFIG, "data file %s: offset 4: version %u is not known",
                      file->path, version);
    }
    uint64_t want = TOKEN_LLMC_HEADER_BYTES + file->count * type_bytes(file->type);
    if (file->map_bytes != want) {
        return bl_err(msg, BL_ECONFIG,
                      "data file %s: offset 8: the header says %llu tokens, that is a file of %llu "
                      "bytes; there are %llu: %s",
                      file->path, (unsigned long long)file->count, (unsigned long long)want,
                      (unsigned long long)file->map_bytes,
                      file->map_bytes < want ? "it was cut" : "something was added");
    }
    return 0;
}

/* ---- Megatron-LM ---- */

static int index_head(struct token_file *file, const struct token_file *index,
                      uint64_t *ret_sequences, struct bl_errmsg *msg)
{
    if (index->map_bytes < INDEX_HEAD_BYTES) {
        return bl_err(msg, BL_ECONFIG, "data index %s: %llu bytes are too few for its head of %u",
                      index->path, (unsigned long long)index->map_bytes, INDEX_HEAD_BYTES);
    }
    const uint8_t *at = index->map;
    if (memcmp(at, index_magic, sizeof index_magic) != 0) {
        return bl_err(msg, BL_ECONFIG, "data index %s: offset 0: does not begin with MMIDIDX",
                      index->path);
    }
    if (load_u64(at + 9) != 1) {
        return bl_err(msg, BL_ECONFIG, "data index %s: offset 9: version %llu is not known",
                      index->path, (unsigned long long)load_u64(at + 9));
    }
    file->type = (enum token_type)at[17];
    if (type_bytes(file->type) == 0) {
        return bl_err(msg, BL_ECONFIG,
                      "data index %s: offset 17: tokens of type %u (1 u8, 3 i16, 4 i32, 5 i64 and "
                      "8 u16 are read)",
                      index->path, at[17]);
    }
    uint64_t sequences = load_u64(at + 18), documents = load_u64(at + 26);
    uint64_t left = index->map_bytes - INDEX_HEAD_BYTES;
    if (sequences > INDEX_SEQUENCES_MAX || documents > INDEX_SEQUENCES_MAX ||
        left < sequences * 12 + documents * 8) {
        return bl_err(
            msg, BL_ECONFIG,
            "data index %s: offset 18: says %llu sequences and %llu documents; %llu bytes "
            "follow, too few: it was cut",
            index->path, (unsigned long long)sequences, (unsigned long long)documents,
            (unsigned long long)left);
    }
    *ret_sequences = sequences;
    return 0;
}

/* The sequences must follow one another, so that the file of tokens is one stream. */
static int index_stream(struct token_file *file, const struct token_file *index, uint64_t sequences,
                        struct bl_errmsg *msg)
{
    const uint8_t *lengths = index->map + INDEX_HEAD_BYTES;
    const uint8_t *places = lengths + sequences * 4;
    uint32_t width = type_bytes(file->type);
    uint64_t place = 0;
    for (uint64_t i = 0; i < sequences; i++) {
        uint32_t length = load_u32(lengths + i * 4);
        if (length > INT32_MAX || load_u64(places + i * 8) != place) {
            return bl_err(msg, BL_ECONFIG,
                          "data index %s: offset %llu: sequence %llu does not begin where the one "
                          "before ends (byte %llu)",
                          index->path, (unsigned long long)(places + i * 8 - index->map),
                          (unsigned long long)i, (unsigned long long)place);
        }
        place += (uint64_t)length * width;
    }
    if (file->map_bytes != place) {
        return bl_err(msg, BL_ECONFIG, "data file %s: %llu bytes; its index says %llu: %s",
                      file->path, (unsigned long long)file->map_bytes, (unsigned long long)place,
                      file->map_bytes < place ? "it was cut" : "something was added");
    }
    file->count = place / width;
    return 0;
}

static int megatron_open(struct token_file *file, const char *index_path, struct bl_errmsg *msg)
{
    struct token_file index = {.fd = -1};
    uint64_t sequences = 0;
    snprintf(index.path, sizeof index.path, "%s", index_path);
    int rc = map_file(&index, msg);
    rc = rc != 0 ? rc : index_head(file, &index, &sequences, msg);
    rc = rc != 0 ? rc : map_file(file, msg);
    rc = rc != 0 ? rc : index_stream(file, &index, sequences, msg);
    token_file_close(&index);
    return rc;
}

/* ---- all ---- */

int token_file_open(struct token_file *ret, const char *path, int shard, struct bl_errmsg *msg)
{
    char index[BL_PATH_MAX];
    size_t length = strlen(path);
    *ret = (struct token_file){.fd = -1};
    if (length + 4 >= sizeof index) {
        return bl_err(msg, BL_ECONFIG, "data file %.60s...: the path is too long", path);
    }
    memcpy(ret->path, path, length + 1);
    memcpy(index, path, length + 1);
    if (!shard) {
        int rc = map_file(ret, msg);
        ret->type = TOKEN_U8;
        ret->count = ret->map_bytes;
        return rc;
    }
    if (length > 4 && strcmp(path + length - 4, ".idx") == 0) {
        memcpy(ret->path + length - 4, ".bin", 4);
        return megatron_open(ret, index, msg);
    }
    if (length > 4 && strcmp(path + length - 4, ".bin") == 0) {
        memcpy(index + length - 4, ".idx", 4);
        if (access(index, F_OK) == 0) {
            return megatron_open(ret, index, msg);
        }
    }
    int rc = map_file(ret, msg);
    return rc != 0 ? rc : llmc_open(ret, msg);
}

void token_file_close(struct token_file *file)
{
    if (file->map != NULL) {
        munmap((void *)(uintptr_t)file->map, file->map_bytes);
    }
    if (file->fd >= 0) {
        close(file->fd);
    }
    file->map = NULL;
    file->fd = -1;
}

uint32_t token_file_at(const struct token_file *file, uint64_t index)
{
    const uint8_t *at = file->map + file->data_offset + index * type_bytes(file->type);
    uint16_t half;
    switch (file->type) {
    case TOKEN_U8:
        return *at;
    case TOKEN_U16:
    case TOKEN_I16:
        memcpy(&half, at, sizeof half);
        return file->type == TOKEN_I16 && half > INT16_MAX ? UINT32_MAX : half;
    case TOKEN_U32:
    case TOKEN_I32:
        return load_u32(at) > INT32_MAX ? UINT32_MAX : load_u32(at);
    case TOKEN_I64:
        return load_u64(at) > INT32_MAX ? UINT32_MAX : (uint32_t)load_u64(at);
    }
    return UINT32_MAX;
}

int token_file_check(const struct token_file *file, uint32_t vocab, struct bl_errmsg *msg)
{
    if (file->type == TOKEN_U8 && vocab > UINT8_MAX) {
        return 0;
    }
    for (uint64_t i = 0; i < file->count; i++) {
        uint32_t token = token_file_at(file, i);
        if (token >= vocab) {
            char text[16] = "negative";
            if (token != UINT32_MAX) {
                snprintf(text, sizeof text, "%u", token);
            }
            return bl_err(msg, BL_ECONFIG,
                          "data file %s: offset %llu: token %llu is %s, outside the vocabulary of "
                          "%u (model.vocab)",
                          file->path,
                          (unsigned long long)(file->data_offset + i * type_bytes(file->type)),
                          (unsigned long long)i, text, vocab);
        }
    }
    return 0;
}

uint64_t token_file_digest(struct token_file *file)
{
    if (!file->digest_known) {
        file->digest = bl_xxh3(file->map, file->map_bytes);
        file->digest_known = 1;
    }
    return file->digest;
}

int token_file_unchanged(struct token_file *file, struct bl_errmsg *msg)
{
    struct stat st;
    if (fstat(file->fd, &st) != 0) {
        return bl_err(msg, BL_ECONFIG, "data file %s: %s", file->path, strerror(errno));
    }
    int same_size = (uint64_t)st.st_size == file->map_bytes;
    if (same_size && st.st_mtim.tv_sec == file->mtime_s && st.st_mtim.tv_nsec == file->mtime_ns) {
        return 0;
    }
    if (same_size && file->digest_known && bl_xxh3(file->map, file->map_bytes) == file->digest) {
        file->mtime_s = st.st_mtim.tv_sec;
        file->mtime_ns = st.st_mtim.tv_nsec;
        return 0;
    }
    return bl_err(msg, BL_ECONFIG,
                  "data file %s: changed under the run: %llu bytes when it began, %llu now%s: put "
                  "the old file back, or begin another run",
                  file->path, (unsigned long long)file->map_bytes, (unsigned long long)st.st_size,
                  same_size ? ", with others in them" : "");
}
