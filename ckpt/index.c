/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Indexes. Little-endian, fixed header of 128 bytes, then chunk digests or frames, tensors,
 * extents, and the XXH3 of all that.
 */
#include "ckpt/index.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/codec_zstd.h"
#include "ckpt/part.h"

#define INDEX_HEADER_BYTES 128u
#define INDEX_TENSOR_FIXED 8u
#define INDEX_FRAME_BYTES  32u

static const char index_magic[8] = {'B', 'L', 'Y', 'I', 'D', 'X', '\r', '\n'};

static void put16(uint8_t *at, uint32_t value)
{
    at[0] = (uint8_t)value;
    at[1] = (uint8_t)(value >> 8);
}

static void put32(uint8_t *at, uint32_t value)
{
    put16(at, value & 0xffff);
    put16(at + 2, value >> 16);
}

static void put64(uint8_t *at, uint64_t value)
{
    put32(at, (uint32_t)value);
    put32(at + 4, (uint32_t)(value >> 32));
}

static uint32_t get32(const uint8_t *at)
{
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static uint64_t get64(const uint8_t *at)
{
    return get32(at) | (uint64_t)get32(at + 4) << 32;
}

void ckpt_index_close(struct ckpt_index *index)
{
    if (index == NULL) {
        return;
    }
    free(index->chunks);
    free(index->frames);
    free(index->layout);
    bl_extent_list_close(&index->held);
    memset(index, 0, sizeof(*index));
}

static size_t tensor_bytes(size_t name_bytes, uint32_t dims)
{
    return INDEX_TENSOR_FIXED + 8u * dims + ((name_bytes + 7) & ~(size_t)7);
}

static size_t extent_bytes(uint32_t dims)
{
    return 32 + 16u * dims;
}

uint64_t ckpt_index_bytes(const struct ckpt_index *index)
{
    uint64_t bytes = INDEX_HEADER_BYTES + 8;

    bytes += index->codec == CKPT_CODEC_ZSTD ? (uint64_t)index->frame_count * INDEX_FRAME_BYTES
                                             : (uint64_t)index->chunk_count * 8;

    for (uint32_t i = 0; i < index->held.tensor_count; i++) {
        const struct bl_tensor *tensor = &index->held.tensors[i];

        bytes += tensor_bytes(strlen(tensor->name), tensor->dims);
    }
    for (uint32_t i = 0; i < index->held.extent_count; i++) {
        bytes += extent_bytes(index->held.tensors[index->held.extents[i].tensor].dims);
    }
    return bytes;
}

static void encode_header(const struct ckpt_index *index, uint8_t *at, size_t bytes)
{
    memcpy(at, index_magic, 8);
    put32(at + 8, CKPT_INDEX_VERSION);
    put32(at + 12, index->codec);
    put64(at + 16, bytes);
    put64(at + 24, index->part_bytes);
    put64(at + 32, index->raw_bytes);
    put64(at + 40, index->data_offset);
    put32(at + 48, index->chunk_bytes);
    put32(at + 52, index->codec == CKPT_CODEC_ZSTD ? index->frame_count : index->chunk_count);
    put32(at + 56, index->held.tensor_count);
    put32(at + 60, index->held.extent_count);
    put64(at + 64, index->state.sum[0]);
    put64(at + 72, index->state.sum[1]);
}

static uint8_t *encode_frames(uint8_t *at, const struct ckpt_index *index)
{
    uint64_t raw = 0;

    for (uint32_t i = 0; i < index->frame_count; i++, at += INDEX_FRAME_BYTES) {
        const struct ckpt_frame *frame = &index->frames[i];

        put64(at, raw);
        put64(at + 8, frame->at);
        put32(at + 16, frame->stored);
        put32(at + 20, frame->bytes);
        put64(at + 24, frame->digest);
        raw += frame->bytes;
    }
    return at;
}

static uint8_t *encode_tensor(uint8_t *at, const struct bl_tensor *tensor)
{
    size_t name_bytes = strlen(tensor->name);

    put16(at, (uint32_t)name_bytes);
    at[2] = (uint8_t)tensor->kind;
    at[3] = (uint8_t)tensor->dtype;
    put32(at + 4, tensor->dims);
    for (uint32_t d = 0; d < tensor->dims; d++) {
        put64(at + INDEX_TENSOR_FIXED + 8u * d, tensor->shape[d]);
    }
    memcpy(at + INDEX_TENSOR_FIXED + 8u * tensor->dims, tensor->name, name_bytes);
    return at + tensor_bytes(name_bytes, tensor->dims);
}

static uint8_t *encode_extent(uint8_t *at, const struct bl_extent *extent, uint32_t dims)
{
    put32(at, extent->tensor);
    put64(at + 8, extent->offset);
    put64(at + 16, extent->flat_lo);
    put64(at + 24, extent->flat_hi);
    for (uint32_t d = 0; d < dims; d++) {
        put64(at + 32 + 16u * d, extent->lo[d]);
        put64(at + 40 + 16u * d, extent->hi[d]);
    }
    return at + extent_bytes(dims);
}

int ckpt_index_encode(const struct ckpt_index *index, uint8_t **ret_data, size_t *ret_bytes,
                      uint64_t *ret_digest, struct bl_errmsg *msg)
{
    uint64_t bytes = ckpt_index_bytes(index);
    uint8_t *data, *at;

    if (bytes > CKPT_INDEX_BYTES_MAX) {
        return bl_err(msg, BL_ELIMIT, "index of %llu bytes, at most %u are allowed",
                      (unsigned long long)bytes, CKPT_INDEX_BYTES_MAX);
    }
    if (index->held.tensor_count > CKPT_TENSORS_MAX ||
        index->held.extent_count > CKPT_EXTENTS_MAX) {
        return bl_err(msg, BL_ELIMIT, "index of %u tensors and %u extents, at most %d and %d",
                      index->held.tensor_count, index->held.extent_count, CKPT_TENSORS_MAX,
                      CKPT_EXTENTS_MAX);
    }
    data = calloc(1, bytes);
    if (data == NULL) {
        return bl_err_code(msg, -ENOMEM, "index of %llu bytes", (unsigned long long)bytes);
    }
    encode_header(index, data, bytes);
    at = data + INDEX_HEADER_BYTES;
    if (index->codec == CKPT_CODEC_ZSTD) {
        at = encode_frames(at, index);
    } else {
        for (uint32_t i = 0; i < index->chunk_count; i++, at += 8) {
            put64(at, index->chunks[i]);
        }
    }
    for (uint32_t i = 0; i < index->held.tensor_count; i++) {
        at = encode_tensor(at, &index->held.tensors[i]);
    }
    for (uint32_t i = 0; i < index->held.extent_count; i++) {
        const struct bl_extent *extent = &index->held.extents[i];

        at = encode_extent(at, extent, index->held.tensors[extent->tensor].dims);
    }
    BL_ASSERT(at + 8 == data + bytes);
    put64(at, bl_xxh3(data, bytes - 8));
    *ret_digest = bl_xxh3(data, bytes);
    *ret_data = data;
    *ret_bytes = bytes;
    return 0;
}

/* Chunk size, and chunks or frames against the `room` that is there for all lists. */
static int decode_counts(const struct ckpt_index *index, uint64_t room, struct bl_errmsg *msg)
{
    bool zstd = index->codec == CKPT_CODEC_ZSTD;
    uint64_t chunks = (index->part_bytes + index->chunk_bytes - 1u) /
                      (index->chunk_bytes == 0 ? 1 : index->chunk_bytes);

    if (index->chunk_bytes < CKPT_CHUNK_BYTES_MIN ||
        index->chunk_bytes > (zstd ? CKPT_ZSTD_CHUNK_BYTES_MAX : CKPT_CHUNK_BYTES_MAX) ||
        (index->chunk_bytes & (index->chunk_bytes - 1)) != 0) {
        return bl_err(msg, BL_EFORMAT, "index: chunks of %u bytes", index->chunk_bytes);
    }
    if (zstd && (index->frame_count == 0 || index->frame_count > room / INDEX_FRAME_BYTES)) {
        return bl_err(msg, BL_EFORMAT, "index: %u frames do not fit", index->frame_count);
    }
    if (!zstd && (chunks != index->chunk_count || chunks > room / 8)) {
        return bl_err(msg, BL_EFORMAT, "index: %u chunks do not fit", index->chunk_count);
    }
    return 0;
}

static int decode_header(struct ckpt_index *index, const uint8_t *at, size_t bytes,
                         uint32_t *ret_tensors, uint32_t *ret_extents, struct bl_errmsg *msg)
{
    if (bytes < INDEX_HEADER_BYTES + 8 || memcmp(at, index_magic, 8) != 0) {
        return bl_err(msg, BL_EFORMAT, "not an index file of Belay");
    }
    if (get64(at + bytes - 8) != bl_xxh3(at, bytes - 8)) {
        return bl_err(msg, BL_EDIGEST, "index: digest differs");
    }
    if (get32(at + 8) != CKPT_INDEX_VERSION) {
        return bl_err(msg, BL_EVERSION, "index of version %u; this program reads %u", get32(at + 8),
                      CKPT_INDEX_VERSION);
    }
    index->codec = get32(at + 12);
    index->part_bytes = get64(at + 24);
    index->raw_bytes = get64(at + 32);
    index->data_offset = get64(at + 40);
    index->chunk_bytes = get32(at + 48);
    index->chunk_count = index->codec == CKPT_CODEC_ZSTD ? 0 : get32(at + 52);
    index->frame_count = index->codec == CKPT_CODEC_ZSTD ? get32(at + 52) : 0;
    *ret_tensors = get32(at + 56);
    *ret_extents = get32(at + 60);
    index->state.sum[0] = get64(at + 64);
    index->state.sum[1] = get64(at + 72);
    if (index->codec != CKPT_CODEC_NONE && index->codec != CKPT_CODEC_ZSTD) {
        return bl_err(msg, BL_ENOTBUILT, "codec number %u is not built into this version",
                      index->codec);
    }
    for (uint32_t i = 80; i < INDEX_HEADER_BYTES; i++) {
        if (at[i] != 0) {
            return bl_err(msg, BL_EFORMAT, "index: reserved byte %u is not zero", i);
        }
    }
    if (get64(at + 16) != bytes || index->data_offset == 0 || index->data_offset % 4096 != 0 ||
        index->data_offset > index->raw_bytes || index->raw_bytes > INT64_MAX ||
        index->part_bytes > INT64_MAX ||
        (index->codec == CKPT_CODEC_NONE && index->raw_bytes != index->part_bytes)) {
        return bl_err(msg, BL_EFORMAT, "index: sizes do not fit together");
    }
    return decode_counts(index, bytes - INDEX_HEADER_BYTES - 8, msg);
}

static int decode_chunks(struct ckpt_index *index, const uint8_t **at, struct bl_errmsg *msg)
{
    index->chunks = malloc((size_t)index->chunk_count * 8 + 8);
    if (index->chunks == NULL) {
        return bl_err_code(msg, -ENOMEM, "index");
    }
    for (uint32_t i = 0; i < index->chunk_count; i++, *at += 8) {
        index->chunks[i] = get64(*at);
    }
    return 0;
}

/* The frames, once the extents have told where they must be. They stand one after the other, in the
 * file and decoded, none is larger than raw blocks would be, and behind them is only the tail. */
static int decode_frames(struct ckpt_index *index, const uint8_t *at, struct bl_errmsg *msg)
{
    uint64_t raw = 0, stored = 0;
    int rc = ckpt_index_layout(index, msg);

    for (uint32_t i = 0; rc == 0 && i < index->frame_count; i++, at += INDEX_FRAME_BYTES) {
        struct ckpt_frame *frame = &index->frames[i];

        frame->at = get64(at + 8);
        frame->stored = get32(at + 16);
        frame->digest = get64(at + 24);
        if (get64(at) != raw || frame->at != stored || get32(at + 20) != frame->bytes ||
            frame->stored == 0 || frame->stored > ckpt_zstd_raw_bytes(frame->bytes)) {
            rc = bl_err(msg, BL_EFORMAT, "index: frame %u does not fit", i);
        }
        raw += frame->bytes;
        stored += frame->stored;
    }
    if (rc == 0 && index->part_bytes != stored + ckpt_part_tail_bytes(index)) {
        rc = bl_err(msg, BL_EFORMAT, "index: its frames do not fill the part");
    }
    return rc;
}

/* Takes `bytes` from the rest; NULL when there are not so many. */
static const uint8_t *take(const uint8_t **at, const uint8_t *end, size_t bytes)
{
    const uint8_t *here = *at;

    if ((size_t)(end - here) < bytes) {
        return NULL;
    }
    *at = here + bytes;
    return here;
}

static bool name_is_plain(const char *name, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        unsigned char c = (unsigned char)name[i];

        if (c < 0x21 || c > 0x7e || c == '@' || c == '"' || c == '\\') {
            return false;
        }
    }
    return bytes > 0;
}

static int decode_tensor(struct bl_tensor *tensor, const uint8_t **at, const uint8_t *end,
                         struct bl_errmsg *msg)
{
    const uint8_t *fixed = take(at, end, INDEX_TENSOR_FIXED);
    const uint8_t *rest;
    uint32_t name_bytes;

    if (fixed == NULL) {
        return bl_err(msg, BL_EFORMAT, "index: ends inside its tensors");
    }
    memset(tensor, 0, sizeof(*tensor));
    name_bytes = get32(fixed) & 0xffff;
    tensor->kind = (enum bl_tensor_kind)fixed[2];
    tensor->dtype = (enum bl_dtype)fixed[3];
    tensor->dims = get32(fixed + 4);
    if (name_bytes >= BL_TENSOR_NAME_MAX || tensor->dims > BL_TENSOR_DIMS_MAX ||
        bl_dtype_bytes(tensor->dtype) == 0 || tensor->kind < BL_KIND_PARAM ||
        tensor->kind > BL_KIND_OTHER) {
        return bl_err(msg, BL_EFORMAT, "index: a tensor's name, dimensions, dtype or kind");
    }
    rest = take(at, end, tensor_bytes(name_bytes, tensor->dims) - INDEX_TENSOR_FIXED);
    if (rest == NULL) {
        return bl_err(msg, BL_EFORMAT, "index: ends inside its tensors");
    }
    for (uint32_t d = 0; d < tensor->dims; d++) {
        tensor->shape[d] = get64(rest + 8u * d);
    }
    memcpy(tensor->name, rest + 8u * tensor->dims, name_bytes);
    for (const uint8_t *pad = rest + 8u * tensor->dims + name_bytes; pad < *at; pad++) {
        if (*pad != 0) {
            return bl_err(msg, BL_EFORMAT, "index: padding of a name is not zero");
        }
    }
    if (!name_is_plain(tensor->name, name_bytes) || bl_tensor_elems(tensor) == 0) {
        return bl_err(msg, BL_EFORMAT, "index: a tensor's name or shape");
    }
    return 0;
}

/* One extent; `*expect` is where it has to lie, and is moved to its end. */
static int decode_extent(struct ckpt_index *index, struct bl_extent *extent, uint64_t *expect,
                         const uint8_t **at, const uint8_t *end, struct bl_errmsg *msg)
{
    const uint8_t *fixed = take(at, end, 32);
    const struct bl_tensor *tensor;
    const uint8_t *box;
    uint64_t bytes;
    int rc;

    memset(extent, 0, sizeof(*extent));
    if (fixed == NULL || get32(fixed) >= index->held.tensor_count || get32(fixed + 4) != 0) {
        return bl_err(msg, BL_EFORMAT, "index: ends inside its extents, or names no tensor");
    }
    extent->tensor = get32(fixed);
    extent->offset = get64(fixed + 8);
    extent->flat_lo = get64(fixed + 16);
    extent->flat_hi = get64(fixed + 24);
    tensor = &index->held.tensors[extent->tensor];
    box = take(at, end, 16u * tensor->dims);
    if (box == NULL) {
        return bl_err(msg, BL_EFORMAT, "index: ends inside its extents");
    }
    for (uint32_t d = 0; d < tensor->dims; d++) {
        extent->lo[d] = get64(box + 16u * d);
        extent->hi[d] = get64(box + 16u * d + 8);
    }
    rc = bl_extent_check(extent, tensor, msg);
    if (rc < 0) {
        return bl_err_in(msg, rc, "index");
    }
    bytes = bl_extent_elems(extent) * bl_dtype_bytes(tensor->dtype);
    if (extent->offset != *expect || *expect % bl_dtype_bytes(tensor->dtype) != 0 || bytes == 0 ||
        bytes > index->raw_bytes - *expect) {
        return bl_err(msg, BL_EFORMAT, "index: extent of %s lies at %llu, not at %llu",
                      tensor->name, (unsigned long long)extent->offset,
                      (unsigned long long)*expect);
    }
    *expect += bytes;
    return 0;
}

static uint32_t extent_width(const struct ckpt_index *index, uint32_t extent)
{
    return bl_dtype_bytes(index->held.tensors[index->held.extents[extent].tensor].dtype);
}

static int decode_lists(struct ckpt_index *index, uint32_t tensors, uint32_t extents,
                        const uint8_t *at, const uint8_t *end, struct bl_errmsg *msg)
{
    uint64_t expect = index->data_offset;
    uint64_t least = (uint64_t)tensors * tensor_bytes(1, 0) + (uint64_t)extents * extent_bytes(0);
    int rc = 0;

    /* In memory a tensor takes a dozen times what it takes here at least. */
    if (least > (size_t)(end - at) || tensors > CKPT_TENSORS_MAX || extents > CKPT_EXTENTS_MAX) {
        return bl_err(msg, BL_EFORMAT, "index: %u tensors and %u extents do not fit", tensors,
                      extents);
    }
    index->held.tensors = calloc(tensors + 1u, sizeof(struct bl_tensor));
    index->held.extents = calloc(extents + 1u, sizeof(struct bl_extent));
    if (index->held.tensors == NULL || index->held.extents == NULL) {
        return bl_err_code(msg, -ENOMEM, "index");
    }
    for (uint32_t i = 0; rc == 0 && i < tensors; i++) {
        rc = decode_tensor(&index->held.tensors[i], &at, end, msg);
        index->held.tensor_count = i + (rc == 0);
    }
    for (uint32_t i = 0; rc == 0 && i < extents; i++) {
        rc = decode_extent(index, &index->held.extents[i], &expect, &at, end, msg);
        if (rc == 0 && i > 0 && index->codec == CKPT_CODEC_ZSTD &&
            extent_width(index, i) > extent_width(index, i - 1)) { /* no word lies in two chunks */
            rc = bl_err(msg, BL_EFORMAT, "index: extent %u is wider than the one before", i);
        }
        index->held.extent_count = i + (rc == 0);
    }
    if (rc == 0 && (at != end || expect != index->raw_bytes)) {
        rc = bl_err(msg, BL_EFORMAT, "index: its extents do not fill the part");
    }
    return rc;
}

int ckpt_index_decode(struct ckpt_index *ret, const uint8_t *data, size_t bytes,
                      struct bl_errmsg *msg)
{
    struct ckpt_index index = {0};
    uint32_t tensors = 0, extents = 0;
    const uint8_t *at;
    int rc = decode_header(&index, data, bytes, &tensors, &extents, msg);

    if (rc < 0) {
        return rc;
    }
    at = data + INDEX_HEADER_BYTES;
    if (index.codec == CKPT_CODEC_NONE) {
        rc = decode_chunks(&index, &at, msg);
    } else {
        at += (size_t)index.frame_count * INDEX_FRAME_BYTES;
    }
    if (rc == 0) {
        rc = decode_lists(&index, tensors, extents, at, data + bytes - 8, msg);
    }
    if (rc == 0 && index.codec == CKPT_CODEC_ZSTD) {
        rc = decode_frames(&index, data + INDEX_HEADER_BYTES, msg);
    }
    if (rc < 0) {
        ckpt_index_close(&index);
        return rc;
    }
    *ret = index;
    return 0;
}
