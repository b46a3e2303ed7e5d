/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Encoding and decoding by table.
 *
 *     encode: struct --build--> protobuf-c message in a pool --pack--> bytes
 *     decode: bytes --unpack, with a bounded allocator--> message --read--> struct
 *
 * The bound of the allocator: a payload of n bytes may take CODEC_SPREAD * n + CODEC_BASE bytes of
 * messages. Honest messages take a tenth of it; two bytes that claim to be a large empty message,
 * repeated, meet it.
 */
#include "wire/codec.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "wire/codec_table.h"

#define CODEC_SPREAD 64u
#define CODEC_BASE   65536u

const struct codec_table *codec_table_find(uint32_t type)
{
#define CODEC_CASE(NAME, number, tag)                                                              \
    case number:                                                                                   \
        return &codec_##tag;
    switch (type) {
        WIRE_MESSAGES(CODEC_CASE)
    default:
        return NULL;
    }
#undef CODEC_CASE
}

/* ---- the allocator of a decoding ---- */

struct codec_bound {
    size_t left;
    int over;
};

static void *bound_alloc(void *data, size_t size)
{
    struct codec_bound *bound = data;
    if (size > bound->left) {
        bound->over = 1;
        return NULL;
    }
    bound->left -= size;
    return malloc(size ? size : 1);
}

static void bound_free(void *data, void *pointer)
{
    (void)data;
    free(pointer);
}

/* ---- by type ---- */

size_t wire_message_size(enum wire_type type)
{
    const struct codec_table *table = codec_table_find(type);
    return table ? table->size : 0;
}

void wire_message_close(enum wire_type type, void *message)
{
    const struct codec_table *table = codec_table_find(type);
    if (table && message) {
        codec_table_free(table, message);
        memset(message, 0, table->size);
    }
}

int wire_message_equal(enum wire_type type, const void *a, const void *b)
{
    const struct codec_table *table = codec_table_find(type);
    BL_ASSERT(table);
    return codec_table_equal(table, a, b);
}

int wire_message_encode(enum wire_type type, const void *message, uint8_t **ret, size_t *ret_bytes,
                        struct bl_errmsg *msg)
{
    const struct codec_table *table = codec_table_find(type);
    BL_ASSERT(table);
    struct codec_pool *pool = codec_pool_new();
    if (!pool) {
        return bl_err(msg, -ENOMEM, "out of memory for a %s", table->name);
    }
    uint8_t *bytes = NULL;
    size_t count = 0;
    int rc = 0;
    ProtobufCMessage *built = codec_table_build(table, message, pool, &rc, msg);
    if (built) {
        count = protobuf_c_message_get_packed_size(built);
        bytes = malloc(count ? count : 1);
        rc = bytes ? 0 : bl_err(msg, -ENOMEM, "out of memory for a %s", table->name);
    }
    if (!rc && count > WIRE_MESSAGE_BYTES_MAX) {
        rc = bl_err(msg, BL_ELIMIT, "%s of %zu bytes, at most %u", table->name, count,
                    WIRE_MESSAGE_BYTES_MAX);
    }
    if (rc) {
        free(bytes);
    } else {
        protobuf_c_message_pack(built, bytes);
        *ret = bytes;
        *ret_bytes = count;
    }
    codec_pool_free(pool);
    return rc;
}

int wire_message_decode(enum wire_type type, void *ret, const uint8_t *bytes, size_t count,
                        struct bl_errmsg *msg)
{
    const struct codec_table *table = codec_table_find(type);
    BL_ASSERT(table);
    memset(ret, 0, table->size);
    if (count > WIRE_MESSAGE_BYTES_MAX) {
        return bl_err(msg, BL_ELIMIT, "%s of %zu bytes, at most %u", table->name, count,
                      WIRE_MESSAGE_BYTES_MAX);
    }
    struct codec_bound bound = {.left = CODEC_BASE + CODEC_SPREAD * count};
    ProtobufCAllocator allocator = {bound_alloc, bound_free, &bound};
    static const uint8_t nothing[1];
    ProtobufCMessage *from =
        protobuf_c_message_unpack(table->pb, &allocator, count, count ? bytes : nothing);
    if (!from) {
        return bound.over ? bl_err(msg, BL_ELIMIT, "%s: %zu bytes take too much memory",
                                   table->name, count)
                          : bl_err(msg, BL_EFORMAT, "not a %s (%zu bytes)", table->name, count);
    }
    int rc = codec_table_read(table, from, ret, msg);
    protobuf_c_message_free_unpacked(from, &allocator);
    if (rc) {
        codec_table_free(table, ret);
        memset(ret, 0, table->size);
    }
    return rc;
}

int wire_message_frame(enum wire_type type, const void *message, uint64_t generation,
                       uint64_t incarnation, uint8_t **ret, size_t *ret_bytes,
                       struct bl_errmsg *msg)
{
    uint8_t *payload;
    size_t payload_bytes;
    int rc = wire_message_encode(type, message, &payload, &payload_bytes, msg);
    if (rc) {
        return rc;
    }
    struct wire_frame frame = {
        .type = (uint16_t)type,
        .generation = generation,
        .incarnation = incarnation,
        .payload = payload,
        .payload_bytes = payload_bytes,
    };
    size_t bytes = wire_frame_bytes(payload_bytes);
    uint8_t *out = malloc(bytes);
    rc = out ? wire_frame_encode(&frame, out, msg)
             : bl_err(msg, -ENOMEM, "out of memory for a frame of %zu bytes", bytes);
    free(payload);
    if (rc) {
        free(out);
        return rc;
    }
    *ret = out;
    *ret_bytes = bytes;
    return 0;
}
