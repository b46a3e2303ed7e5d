/* SPDX-License-Identifier: Apache-2.0 */
/* Names and keys, and the safetensors header: written for our parts, read from anybody's. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "ckpt/part.h"

int ckpt_codec_parse(const char *name, enum ckpt_codec *ret, struct bl_errmsg *msg)
{
    if (name == NULL || name[0] == '\0' || strcmp(name, "none") == 0) {
        *ret = CKPT_CODEC_NONE;
        return 0;
    }
    if (strcmp(name, "zstd") == 0 || strcmp(name, "auto") == 0) {
        *ret = CKPT_CODEC_ZSTD;
        return 0;
    }
    return bl_err(msg, BL_ENOTBUILT,
                  "codec \"%s\" is not built into this version; use none, zstd or auto", name);
}

void ckpt_part_file(char ret[CKPT_PART_FILE_MAX], const char *name, enum ckpt_codec codec)
{
    snprintf(ret, CKPT_PART_FILE_MAX, "%s%s", name,
             codec == CKPT_CODEC_ZSTD ? CKPT_PART_ZSTD_SUFFIX : CKPT_PART_SUFFIX);
}

void ckpt_part_index_file(char ret[CKPT_PART_FILE_MAX], const char *name, enum ckpt_codec codec)
{
    snprintf(ret, CKPT_PART_FILE_MAX, "%s%s", name,
             codec == CKPT_CODEC_ZSTD ? CKPT_PART_ZSTD_SUFFIX : CKPT_INDEX_SUFFIX);
}

static bool ends_in(const char *text, const char *suffix)
{
    size_t bytes = strlen(text), end = strlen(suffix);

    return bytes > end && strcmp(text + bytes - end, suffix) == 0;
}

bool ckpt_part_file_is(const char *file)
{
    return ends_in(file, CKPT_PART_SUFFIX) || ends_in(file, CKPT_PART_ZSTD_SUFFIX);
}

bool ckpt_extent_is_whole_box(const struct bl_extent *extent, const struct bl_tensor *tensor)
{
    for (uint32_t d = 0; d < tensor->dims; d++) {
        if (extent->lo[d] != 0 || extent->hi[d] != tensor->shape[d]) {
            return false;
        }
    }
    return true;
}

uint64_t ckpt_extent_box_elems(const struct bl_extent *extent, const struct bl_tensor *tensor)
{
    uint64_t elems = 1;

    for (uint32_t d = 0; d < tensor->dims; d++) {
        elems *= extent->hi[d] - extent->lo[d];
    }
    return elems;
}

bool ckpt_name_is_plain(const char *name)
{
    if (name[0] == '\0') {
        return false;
    }
    for (const unsigned char *c = (const unsigned char *)name; *c != '\0'; c++) {
        if (*c < 0x21 || *c > 0x7e || *c == '@' || *c == '"' || *c == '\\') {
            return false;
        }
    }
    return true;
}

void ckpt_part_key(char ret[CKPT_KEY_MAX], const struct bl_extent *extent,
                   const struct bl_tensor *tensor)
{
    int n = snprintf(ret, CKPT_KEY_MAX, "%s", tensor->name);

    if (!ckpt_extent_is_whole_box(extent, tensor)) {
        for (uint32_t d = 0; d < tensor->dims; d++) {
            n += snprintf(ret + n, CKPT_KEY_MAX - (size_t)n, "%s%llu:%llu", d == 0 ? "@[" : ",",
                          (unsigned long long)extent->lo[d], (unsigned long long)extent->hi[d]);
        }
        n += snprintf(ret + n, CKPT_KEY_MAX - (size_t)n, "]");
    }
    if (bl_extent_elems(extent) != ckpt_extent_box_elems(extent, tensor)) {
        n += snprintf(ret + n, CKPT_KEY_MAX - (size_t)n, "@%llu-%llu",
                      (unsigned long long)extent->flat_lo, (unsigned long long)extent->flat_hi);
    }
    BL_ASSERT(n < (int)CKPT_KEY_MAX); /* 127 + 6 * 42 + 45 */
}

static int order_u64(uint64_t a, uint64_t b)
{
    return a < b ? -1 : a > b;
}

int ckpt_extent_order(const struct bl_extent *a, const struct bl_tensor *a_tensor,
                      const struct bl_extent *b, const struct bl_tensor *b_tensor)
{
    int order = strcmp(a_tensor->name, b_tensor->name);

    for (uint32_t d = 0; order == 0 && d < a_tensor->dims && d < b_tensor->dims; d++) {
        order = order_u64(a->lo[d], b->lo[d]);
        if (order == 0) {
            order = order_u64(a->hi[d], b->hi[d]);
        }
    }
    if (order == 0) {
        order = order_u64(a->flat_lo, b->flat_lo);
    }
    return order != 0 ? order : order_u64(a->flat_hi, b->flat_hi);
}

/* The shape that an extent has in the header: its box's, or flat when it is a range of one. */
static uint32_t header_shape(uint64_t *ret, const struct bl_extent *extent,
                             const struct bl_tensor *tensor)
{
    if (bl_extent_elems(extent) != ckpt_extent_box_elems(extent, tensor)) {
        ret[0] = bl_extent_elems(extent);
        return 1;
    }
    for (uint32_t d = 0; d < tensor->dims; d++) {
        ret[d] = extent->hi[d] - extent->lo[d];
    }
    return tensor->dims;
}

/* One entry: key, dtype, shape, and the next `bytes` of the data. */
static void add_entry(struct ckpt_text *text, const char *key, const char *dtype,
                      const uint64_t *shape, uint32_t dims, uint64_t *at, uint64_t bytes)
{
    uint64_t range[2] = {*at, *at + bytes};

    ckpt_text_add(text, ",", 1);
    ckpt_text_string(text, key);
    ckpt_text_printf(text, ":{\"dtype\":\"%s\",\"shape\":", dtype);
    ckpt_text_u64s(text, shape, dims);
    ckpt_text_printf(text, ",\"data_offsets\":");
    ckpt_text_u64s(text, range, 2);
    ckpt_text_add(text, "}", 1);
    *at += bytes;
}

/* The entries of an extent: as it is, or its chunks of planes and its tail. */
static void add_extent(struct ckpt_text *text, const struct bl_extent *extent,
                       const struct bl_tensor *tensor, enum ckpt_codec codec, uint32_t chunk_bytes,
                       uint64_t *at)
{
    uint64_t elems = bl_extent_elems(extent), shape[BL_TENSOR_DIMS_MAX];
    const char *dtype = bl_dtype_name(tensor->dtype);
    uint32_t width = bl_dtype_bytes(tensor->dtype);
    struct ckpt_cutting cut = {0};
    char key[CKPT_KEY_MAX];

    ckpt_part_key(key, extent, tensor);
    if (codec == CKPT_CODEC_ZSTD) {
        ckpt_index_cut(&cut, tensor->dtype, elems, chunk_bytes);
    }
    if (cut.chunks == 0) {
        uint32_t dims = header_shape(shape, extent, tensor);

        add_entry(text, key, dtype, shape, dims, at, elems * width);
        return;
    }
    shape[0] = cut.chunks;
    shape[1] = cut.planes;
    shape[2] = cut.each;
    add_entry(text, key, "U8", shape, 3, at, cut.chunks * cut.planes * cut.each);
    if (cut.tail > 0) {
        snprintf(key + strlen(key), CKPT_KEY_MAX - strlen(key), CKPT_KEY_TAIL);
        shape[0] = cut.tail_planes ? 1 : cut.tail;
        shape[2] = cut.tail;
        add_entry(text, key, cut.tail_planes ? "U8" : dtype, shape, cut.tail_planes ? 3 : 1, at,
                  (uint64_t)cut.tail * width);
    }
}

/* What people need to undo planes: "KEY":"F32[67,48]", dtype and shape of what KEY is the planes
 * of. */
static void add_metadata(struct ckpt_text *text, const struct bl_extent_list *held,
                         enum ckpt_codec codec, uint32_t chunk_bytes)
{
    ckpt_text_printf(text,
                     "{\"__metadata__\":{\"format\":\"belay\",\"belay_part\":\"%d\","
                     "\"codec\":\"%s\"",
                     CKPT_FORMAT_VERSION, codec == CKPT_CODEC_ZSTD ? "zstd" : "none");
    for (uint32_t i = 0; codec == CKPT_CODEC_ZSTD && i < held->extent_count && !text->failed; i++) {
        const struct bl_extent *extent = &held->extents[i];
        const struct bl_tensor *tensor = &held->tensors[extent->tensor];
        uint64_t shape[BL_TENSOR_DIMS_MAX];
        uint32_t dims = header_shape(shape, extent, tensor);
        struct ckpt_cutting cut;
        char key[CKPT_KEY_MAX];

        ckpt_index_cut(&cut, tensor->dtype, bl_extent_elems(extent), chunk_bytes);
        if (cut.chunks == 0) {
            continue;
        }
        ckpt_part_key(key, extent, tensor);
        ckpt_text_add(text, ",", 1);
        ckpt_text_string(text, key);
        ckpt_text_printf(text, ":\"%s", bl_dtype_name(tensor->dtype));
        ckpt_text_u64s(text, shape, dims);
        ckpt_text_add(text, "\"", 1);
    }
    ckpt_text_add(text, "}", 1);
}

int ckpt_part_header(struct bl_extent_list *held, enum ckpt_codec codec, uint32_t chunk_bytes,
                     struct ckpt_text *ret, uint64_t *ret_raw_bytes, struct bl_errmsg *msg)
{
    struct ckpt_text text = {0};
    uint64_t at = 0, json_bytes;
    uint8_t first[8] = {0};

    ckpt_text_add(&text, first, 8);
    add_metadata(&text, held, codec, chunk_bytes);
    for (uint32_t i = 0; i < held->extent_count && !text.failed; i++) {
        struct bl_extent *extent = &held->extents[i];

        extent->offset = at;
        add_extent(&text, extent, &held->tensors[extent->tensor], codec, chunk_bytes, &at);
    }
    ckpt_text_add(&text, "}", 1);
    while (!text.failed && text.bytes % 4096 != 0) {
        ckpt_text_add(&text, " ", 1);
    }
    if (text.failed || text.bytes > CKPT_HEADER_BYTES_MAX) {
        int code = text.failed ? -ENOMEM : BL_ELIMIT;

        ckpt_text_close(&text);
        return bl_err_code(msg, code, "header of %u extents", held->extent_count);
    }
    json_bytes = text.bytes - 8;
    for (int i = 0; i < 8; i++) {
        text.data[i] = (char)(uint8_t)(json_bytes >> (8 * i));
    }
    for (uint32_t i = 0; i < held->extent_count; i++) {
        held->extents[i].offset += text.bytes;
    }
    *ret_raw_bytes = text.bytes + at;
    *ret = text;
    return 0;
}

int ckpt_st_header_bytes(const uint8_t first[8], uint64_t file_bytes, uint64_t *ret_bytes,
                         struct bl_errmsg *msg)
{
    uint64_t n = 0;

    for (int i = 7; i >= 0; i--) {
        n = n << 8 | first[i];
    }
    if (n < 2 || n > CKPT_HEADER_BYTES_MAX) {
        return bl_err(msg, n < 2 ? BL_EFORMAT : BL_ELIMIT,
                      "safetensors header of %llu bytes (2 to %u are allowed)",
                      (unsigned long long)n, CKPT_HEADER_BYTES_MAX);
    }
    if (file_bytes < 8 || n > file_bytes - 8) {
        return bl_err(msg, BL_EFORMAT, "safetensors header of %llu bytes in a file of %llu",
                      (unsigned long long)n, (unsigned long long)file_bytes);
    }
    *ret_bytes = n + 8;
    return 0;
}

/* {"dtype":..,"shape":..,"data_offsets":..} in any order, each once. */
static void decode_entry(struct ckpt_json *reader, struct ckpt_st_entry *entry, uint64_t data_bytes)
{
    unsigned seen = 0;
    uint64_t range[2] = {0, 0}, bytes;

    ckpt_json_want(reader, '{');
    while (reader->code == 0) {
        char field[32], dtype[16];
        unsigned bit = 0;

        ckpt_json_string(reader, field, sizeof(field));
        ckpt_json_want(reader, ':');
        if (strcmp(field, "dtype") == 0) {
            bit = 1;
            ckpt_json_string(reader, dtype, sizeof(dtype));
            entry->dtype = bl_dtype_parse(dtype);
        } else if (strcmp(field, "shape") == 0) {
            bit = 2;
            entry->dims = ckpt_json_u64s(reader, entry->shape, BL_TENSOR_DIMS_MAX);
        } else if (strcmp(field, "data_offsets") == 0) {
            bit = 4;
            if (ckpt_json_u64s(reader, range, 2) != 2) {
                ckpt_json_fail(reader, BL_EFORMAT, "two data_offsets expected");
            }
        }
        if (bit == 0 || (seen & bit) != 0) {
            ckpt_json_fail(reader, BL_EFORMAT, "an entry's field is unknown or there twice");
        }
        seen |= bit;
        if (!ckpt_json_is(reader, ',')) {
            ckpt_json_want(reader, '}');
            break;
        }
    }
    if (seen != 7 || bl_dtype_bytes(entry->dtype) == 0) {
        ckpt_json_fail(reader, BL_EFORMAT, "an entry lacks a field or has an unknown dtype");
        return;
    }
    entry->begin = range[0];
    entry->end = range[1];
    bytes = bl_dtype_bytes(entry->dtype);
    for (uint32_t d = 0; d < entry->dims; d++) {
        if (__builtin_mul_overflow(bytes, entry->shape[d], &bytes)) {
            ckpt_json_fail(reader, BL_EFORMAT, "a shape over 64 bits");
        }
    }
    if (range[0] > range[1] || range[1] > data_bytes || range[1] - range[0] != bytes) {
        ckpt_json_fail(reader, BL_EFORMAT, "data_offsets do not fit shape or file");
    }
}

int ckpt_st_header_decode(const uint8_t *data, size_t header_bytes, uint64_t file_bytes,
                          int (*entry_fn)(void *arg, const struct ckpt_st_entry *entry), void *arg,
                          struct bl_errmsg *msg)
{
    struct ckpt_json reader;
    struct ckpt_st_entry entry;
    uint64_t expect = 0;
    const char *from;
    int rc;

    rc = header_bytes < 8 ? bl_err(msg, BL_EFORMAT, "safetensors header cut short")
                          : ckpt_st_header_bytes(data, file_bytes, &expect, msg);
    if (rc < 0) {
        return rc;
    }
    if (expect != header_bytes) {
        return bl_err(msg, BL_EFORMAT, "safetensors header cut short");
    }
    ckpt_json_init(&reader, (const char *)data + 8, header_bytes - 8);
    ckpt_json_want(&reader, '{');
    if (!ckpt_json_is(&reader, '}')) {
        while (reader.code == 0) {
            memset(&entry, 0, sizeof(entry));
            ckpt_json_string(&reader, entry.key, sizeof(entry.key));
            ckpt_json_want(&reader, ':');
            if (strcmp(entry.key, "__metadata__") == 0) {
                ckpt_json_skip(&reader, &from);
            } else {
                decode_entry(&reader, &entry, file_bytes - header_bytes);
                rc = reader.code == 0 ? entry_fn(arg, &entry) : 0;
                if (rc < 0) {
                    return bl_err(msg, rc, "safetensors header: entry \"%.200s\"", entry.key);
                }
            }
            if (!ckpt_json_is(&reader, ',')) {
                ckpt_json_want(&reader, '}');
                break;
            }
        }
    }
    ckpt_json_finish(&reader);
    rc = ckpt_json_error(&reader, msg);
    return rc < 0 ? bl_err_in(msg, rc, "safetensors header") : 0;
}
