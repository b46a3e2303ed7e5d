/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads manifests: the digest first, then member by member in the one order there is. What the
 * digest guards was written by Belay, so anything unexpected is refused, never guessed.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/manifest.h"
#include "ckpt/part.h"
#include "ckpt/text.h"

struct decoder {
    struct ckpt_json reader;
    struct ckpt_manifest *manifest;
    struct bl_errmsg *msg;
    uint64_t extents; /* so far */
};

static enum bl_tensor_kind kind_parse(const char *name)
{
    static const char *const names[] = {"param", "moment1", "moment2", "other"};

    for (uint32_t i = 0; i < 4; i++) {
        if (strcmp(name, names[i]) == 0) {
            return (enum bl_tensor_kind)(BL_KIND_PARAM + (int)i);
        }
    }
    return 0;
}

/* ,"key": */
static void next_key(struct ckpt_json *reader, const char *key)
{
    ckpt_json_want(reader, ',');
    ckpt_json_key(reader, key);
}

static uint64_t next_u64(struct ckpt_json *reader, const char *key)
{
    next_key(reader, key);
    return ckpt_json_u64(reader);
}

static uint32_t next_u32(struct ckpt_json *reader, const char *key)
{
    next_key(reader, key);
    return ckpt_json_u32(reader);
}

static void next_string(struct ckpt_json *reader, const char *key, char *ret, size_t room)
{
    next_key(reader, key);
    ckpt_json_string(reader, ret, room);
}

static void decode_layout(struct ckpt_json *reader, struct ckpt_layout *layout)
{
    next_key(reader, "layout");
    ckpt_json_want(reader, '{');
    ckpt_json_key(reader, "world");
    layout->world = ckpt_json_u32(reader);
    layout->dp = next_u32(reader, "dp");
    layout->tp = next_u32(reader, "tp");
    layout->pp = next_u32(reader, "pp");
    layout->zero = next_u32(reader, "zero");
    ckpt_json_want(reader, '}');
}

static void decode_metrics(struct ckpt_json *reader, struct ckpt_metrics *metrics)
{
    next_key(reader, "metrics");
    ckpt_json_want(reader, '{');
    ckpt_json_key(reader, "loss");
    metrics->loss = ckpt_json_double(reader);
    metrics->tokens = next_u64(reader, "tokens");
    metrics->saved_unix_s = next_u64(reader, "saved_unix_s");
    ckpt_json_want(reader, '}');
}

static void decode_state(struct ckpt_json *reader, struct bl_state_digest *state)
{
    char text[BL_STATE_DIGEST_TEXT_BYTES], again[BL_STATE_DIGEST_TEXT_BYTES] = "";

    next_string(reader, "state_digest", text, sizeof(text));
    for (int k = 0; reader->code == 0 && k < 2; k++) {
        char half[17] = "";

        memcpy(half, strlen(text) == 32 ? text + 16 * k : "", strlen(text) == 32 ? 16 : 1);
        state->sum[k] = strtoull(half, NULL, 16);
    }
    bl_state_digest_format(state, again);
    if (reader->code == 0 && strcmp(text, again) != 0) {
        ckpt_json_fail(reader, BL_EFORMAT, "a state digest expected");
    }
}

static void decode_job(struct decoder *decoder)
{
    struct ckpt_json *reader = &decoder->reader;
    const char *from = NULL;
    size_t bytes;

    next_key(reader, "job");
    if (reader->code == 0 && (reader->at >= reader->end || *reader->at != '{')) {
        ckpt_json_fail(reader, BL_EFORMAT, "the frozen job is no object");
    }
    ckpt_json_skip(reader, &from);
    if (reader->code != 0) {
        return;
    }
    bytes = (size_t)(reader->at - from);
    if (bytes > CKPT_JOB_BYTES_MAX) {
        ckpt_json_fail(reader, BL_ELIMIT, "the frozen job is over %d bytes", CKPT_JOB_BYTES_MAX);
        return;
    }
    decoder->manifest->job = strndup(from, bytes);
    if (decoder->manifest->job == NULL) {
        ckpt_json_fail(reader, -ENOMEM, "out of memory");
    }
}

static void decode_facts(struct decoder *decoder)
{
    struct ckpt_json *reader = &decoder->reader;
    struct ckpt_manifest *manifest = decoder->manifest;
    char seed[24];
    struct ckpt_json number;

    next_string(reader, "run", manifest->run, sizeof(manifest->run));
    manifest->generation = next_u64(reader, "generation");
    manifest->line = next_u64(reader, "line");
    manifest->step = next_u64(reader, "step");
    next_key(reader, "function");
    manifest->function_id = ckpt_json_hex(reader, 16);
    manifest->samples = next_u64(reader, "samples");
    next_string(reader, "seed", seed, sizeof(seed));
    ckpt_json_init(&number, seed, strlen(seed));
    manifest->seed = ckpt_json_u64(&number);
    ckpt_json_finish(&number);
    if (number.code != 0) {
        ckpt_json_fail(reader, BL_EFORMAT, "a seed expected");
    }
    manifest->lanes = next_u32(reader, "lanes");
    next_string(reader, "codec", manifest->codec, sizeof(manifest->codec));
    if (reader->code == 0 && strcmp(manifest->codec, "none") != 0 &&
        strcmp(manifest->codec, "zstd") != 0) {
        ckpt_json_fail(reader, BL_ENOTBUILT, "codec \"%s\" is not built into this version",
                       manifest->codec);
    }
    decode_layout(reader, &manifest->layout);
    decode_metrics(reader, &manifest->metrics);
    decode_state(reader, &manifest->state);
    next_string(reader, "writer", manifest->writer, sizeof(manifest->writer));
    decode_job(decoder);
    if (!ckpt_name_is_plain(manifest->run)) {
        ckpt_json_fail(reader, BL_EFORMAT, "a run id expected");
    }
}

/* Makes room for one more in an array that holds `count`; arrays double. */
static void *grow(struct ckpt_json *reader, void *array, uint32_t count, size_t each)
{
    void *grown = array;

    if ((count & (count - 1)) == 0) {
        grown = realloc(array, (count == 0 ? 1 : (size_t)count * 2) * each);
        if (grown == NULL) {
            ckpt_json_fail(reader, -ENOMEM, "out of memory");
            return array;
        }
    }
    return grown;
}

static void decode_part(struct ckpt_json *reader, struct ckpt_part *part)
{
    memset(part, 0, sizeof(*part));
    ckpt_json_want(reader, '{');
    ckpt_json_key(reader, "name");
    ckpt_json_string(reader, part->name, sizeof(part->name));
    next_string(reader, "node", part->node, sizeof(part->node));
    part->bytes = next_u64(reader, "bytes");
    part->raw_bytes = next_u64(reader, "raw_bytes");
    next_key(reader, "index");
    part->index_digest = ckpt_json_hex(reader, 16);
    ckpt_json_want(reader, '}');
    if (reader->code == 0 && (!ckpt_name_is_plain(part->name) || part->name[0] == '.' ||
                              strchr(part->name, '/') != NULL)) {
        ckpt_json_fail(reader, BL_EFORMAT, "a part's name expected");
    }
}

static void decode_parts(struct decoder *decoder)
{
    struct ckpt_json *reader = &decoder->reader;
    struct ckpt_manifest *manifest = decoder->manifest;

    next_key(reader, "parts");
    ckpt_json_want(reader, '[');
    if (ckpt_json_is(reader, ']')) {
        return;
    }
    while (reader->code == 0) {
        if (manifest->part_count >= CKPT_PARTS_MAX) {
            ckpt_json_fail(reader, BL_ELIMIT, "more than %d parts", CKPT_PARTS_MAX);
            return;
        }
        manifest->parts =
            grow(reader, manifest->parts, manifest->part_count, sizeof(*manifest->parts));
        if (reader->code != 0) {
            return;
        }
        decode_part(reader, &manifest->parts[manifest->part_count++]);
        if (!ckpt_json_is(reader, ',')) {
            ckpt_json_want(reader, ']');
            return;
        }
    }
}

/* Appends the extent to its part's list; the tensor too, unless it is the part's newest one. */
static void part_add(struct ckpt_json *reader, struct ckpt_part *part,
                     const struct bl_tensor *tensor, const struct bl_extent *extent)
{
    struct bl_extent_list *held = &part->held;

    if (held->tensor_count == 0 ||
        strcmp(held->tensors[held->tensor_count - 1].name, tensor->name) != 0) {
        held->tensors = grow(reader, held->tensors, held->tensor_count, sizeof(*tensor));
        if (reader->code != 0) {
            return;
        }
        held->tensors[held->tensor_count++] = *tensor;
    }
    held->extents = grow(reader, held->extents, held->extent_count, sizeof(*extent));
    if (reader->code != 0) {
        return;
    }
    held->extents[held->extent_count] = *extent;
    held->extents[held->extent_count++].tensor = held->tensor_count - 1;
}

static void decode_extent(struct decoder *decoder, const struct bl_tensor *tensor)
{
    struct ckpt_json *reader = &decoder->reader;
    struct bl_extent extent = {0};
    char key[CKPT_KEY_MAX], expect[CKPT_KEY_MAX];
    uint64_t flat[2] = {0, 0};
    uint32_t part, lo, hi, two;

    ckpt_json_want(reader, '{');
    ckpt_json_key(reader, "part");
    part = ckpt_json_u32(reader);
    next_string(reader, "key", key, sizeof(key));
    next_key(reader, "lo");
    lo = ckpt_json_u64s(reader, extent.lo, BL_TENSOR_DIMS_MAX);
    next_key(reader, "hi");
    hi = ckpt_json_u64s(reader, extent.hi, BL_TENSOR_DIMS_MAX);
    next_key(reader, "flat");
    two = ckpt_json_u64s(reader, flat, 2);
    ckpt_json_want(reader, '}');
    extent.flat_lo = flat[0];
    extent.flat_hi = flat[1];
    if (reader->code != 0) {
        return;
    }
    if (lo != tensor->dims || hi != tensor->dims || two != 2 ||
        part >= decoder->manifest->part_count || bl_extent_check(&extent, tensor, NULL) < 0 ||
        bl_extent_elems(&extent) == 0) {
        ckpt_json_fail(reader, BL_EFORMAT, "an extent does not fit its tensor or part");
        return;
    }
    ckpt_part_key(expect, &extent, tensor);
    if (strcmp(key, expect) != 0) {
        ckpt_json_fail(reader, BL_EFORMAT, "an extent's key does not fit it");
        return;
    }
    if (++decoder->extents > CKPT_EXTENTS_MAX) {
        ckpt_json_fail(reader, BL_ELIMIT, "more than %d extents", CKPT_EXTENTS_MAX);
        return;
    }
    part_add(reader, &decoder->manifest->parts[part], tensor, &extent);
}

static void decode_tensor(struct decoder *decoder, struct bl_tensor *tensor)
{
    struct ckpt_json *reader = &decoder->reader;
    char kind[16], dtype[16];

    memset(tensor, 0, sizeof(*tensor));
    ckpt_json_want(reader, '{');
    ckpt_json_key(reader, "name");
    ckpt_json_string(reader, tensor->name, sizeof(tensor->name));
    next_string(reader, "kind", kind, sizeof(kind));
    next_string(reader, "dtype", dtype, sizeof(dtype));
    next_key(reader, "shape");
    tensor->dims = ckpt_json_u64s(reader, tensor->shape, BL_TENSOR_DIMS_MAX);
    if (reader->code != 0) {
        return;
    }
    tensor->kind = kind_parse(kind);
    tensor->dtype = bl_dtype_parse(dtype);
    if (tensor->kind == 0 || bl_dtype_bytes(tensor->dtype) == 0 ||
        !ckpt_name_is_plain(tensor->name) || bl_tensor_elems(tensor) == 0) {
        ckpt_json_fail(reader, BL_EFORMAT, "a tensor's name, kind, dtype or shape");
    }
    next_key(reader, "extents");
    ckpt_json_want(reader, '[');
    while (reader->code == 0) {
        decode_extent(decoder, tensor);
        if (!ckpt_json_is(reader, ',')) {
            ckpt_json_want(reader, ']');
            break;
        }
    }
    ckpt_json_want(reader, '}');
}

static void decode_tensors(struct decoder *decoder)
{
    struct ckpt_json *reader = &decoder->reader;
    struct bl_tensor tensor;
    char last[BL_TENSOR_NAME_MAX] = "";
    uint32_t count = 0;

    next_key(reader, "tensors");
    ckpt_json_want(reader, '[');
    if (ckpt_json_is(reader, ']')) {
        return;
    }
    while (reader->code == 0) {
        decode_tensor(decoder, &tensor);
        if (reader->code == 0 && strcmp(last, tensor.name) >= 0) {
            ckpt_json_fail(reader, BL_EFORMAT, "tensors are not in the order of their names");
        }
        memcpy(last, tensor.name, sizeof(last));
        if (++count > CKPT_TENSORS_MAX) {
            ckpt_json_fail(reader, BL_ELIMIT, "more than %d tensors", CKPT_TENSORS_MAX);
        }
        if (!ckpt_json_is(reader, ',')) {
            ckpt_json_want(reader, ']');
            break;
        }
    }
}

int ckpt_manifest_decode(struct ckpt_manifest *ret, const char *text, size_t bytes,
                         struct bl_errmsg *msg)
{
    struct ckpt_manifest manifest = {0};
    struct decoder decoder = {.manifest = &manifest, .msg = msg};
    struct ckpt_json *reader = &decoder.reader;
    uint64_t digest;
    int rc;

    memset(ret, 0, sizeof(*ret));
    if (bytes > CKPT_MANIFEST_BYTES_MAX) {
        return bl_err(msg, BL_ELIMIT, "manifest of %zu bytes", bytes);
    }
    rc = ckpt_manifest_digest(text, bytes, &digest, msg);
    if (rc < 0) {
        return rc;
    }
    ckpt_json_init(reader, text, bytes);
    ckpt_json_want(reader, '{');
    ckpt_json_key(reader, "belay_manifest");
    if (ckpt_json_u64(reader) != CKPT_FORMAT_VERSION) {
        ckpt_json_fail(reader, BL_EVERSION, "manifest of another version; this program reads %d",
                       CKPT_FORMAT_VERSION);
    }
    decode_facts(&decoder);
    decode_parts(&decoder);
    decode_tensors(&decoder);
    next_key(reader, "digest");
    BL_IGNORE(ckpt_json_hex(reader, 16) == 0, "checked above over the bytes");
    ckpt_json_want(reader, '}');
    ckpt_json_finish(reader);
    rc = ckpt_json_error(reader, msg);
    if (rc < 0) {
        ckpt_manifest_close(&manifest);
        return bl_err_in(msg, rc, "manifest");
    }
    *ret = manifest;
    return 0;
}
