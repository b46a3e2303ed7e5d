/* SPDX-License-Identifier: Apache-2.0 */
#include "wire/frame.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/digest.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "headers are copied as they lie");

struct frame_header {
    uint32_t magic;
    uint16_t version, type;
    uint32_t bytes, flags;
    uint64_t generation, incarnation, digest;
};
_Static_assert(sizeof(struct frame_header) == WIRE_FRAME_HEADER, "no padding");

const char *wire_type_name(uint32_t type)
{
#define FRAME_NAME(NAME, number, tag)                                                              \
    case number:                                                                                   \
        return #NAME;
    switch (type) {
        WIRE_MESSAGES(FRAME_NAME)
    default:
        return "?";
    }
#undef FRAME_NAME
}

static int type_known(uint32_t type)
{
    return wire_type_name(type)[0] != '?';
}

static size_t frame_count(size_t payload_bytes)
{
    return payload_bytes ? (payload_bytes + WIRE_FRAME_PAYLOAD_MAX - 1) / WIRE_FRAME_PAYLOAD_MAX
                         : 1;
}

size_t wire_frame_bytes(size_t payload_bytes)
{
    if (payload_bytes > WIRE_MESSAGE_BYTES_MAX) {
        return 0;
    }
    return payload_bytes + frame_count(payload_bytes) * WIRE_FRAME_HEADER;
}

int wire_frame_encode(const struct wire_frame *frame, uint8_t *out, struct bl_errmsg *msg)
{
    if (frame->payload_bytes > WIRE_MESSAGE_BYTES_MAX) {
        return bl_err(msg, BL_ELIMIT, "message of %zu bytes, at most %u", frame->payload_bytes,
                      WIRE_MESSAGE_BYTES_MAX);
    }
    size_t left = frame->payload_bytes;
    const uint8_t *from = frame->payload;
    do {
        uint32_t bytes = left > WIRE_FRAME_PAYLOAD_MAX ? WIRE_FRAME_PAYLOAD_MAX : (uint32_t)left;
        left -= bytes;
        struct frame_header header = {
            .magic = WIRE_FRAME_MAGIC,
            .version = WIRE_FRAME_VERSION,
            .type = frame->type,
            .bytes = bytes,
            .flags = (frame->flags & ~(uint32_t)WIRE_FRAME_MORE) | (left ? WIRE_FRAME_MORE : 0u),
            .generation = frame->generation,
            .incarnation = frame->incarnation,
            .digest = bl_xxh3(bytes ? from : (const uint8_t *)"", bytes),
        };
        memcpy(out, &header, sizeof(header));
        out += sizeof(header);
        if (bytes) {
            memcpy(out, from, bytes);
            out += bytes;
            from += bytes;
        }
    } while (left);
    return 0;
}

/* ---- decoding ---- */

void wire_decoder_init(struct wire_decoder *decoder, size_t message_max)
{
    memset(decoder, 0, sizeof(*decoder));
    decoder->message_max =
        message_max && message_max < WIRE_MESSAGE_BYTES_MAX ? message_max : WIRE_MESSAGE_BYTES_MAX;
}

void wire_decoder_close(struct wire_decoder *decoder)
{
    if (decoder) {
        free(decoder->bytes);
        free(decoder->parts);
        memset(decoder, 0, sizeof(*decoder));
    }
}

/* Room for `bytes` in a buffer that doubles; 0 or -ENOMEM. */
static int buffer_reserve(uint8_t **buffer, size_t *capacity, size_t bytes)
{
    if (bytes <= *capacity) {
        return 0;
    }
    size_t grown = *capacity ? *capacity : 4096;
    while (grown < bytes) {
        grown *= 2;
    }
    uint8_t *moved = realloc(*buffer, grown);
    if (!moved) {
        return -ENOMEM;
    }
    *buffer = moved;
    *capacity = grown;
    return 0;
}

uint8_t *wire_decoder_space(struct wire_decoder *decoder, size_t want, size_t *ret_space)
{
    if (decoder->taken) {
        memmove(decoder->bytes, decoder->bytes + decoder->taken, decoder->count - decoder->taken);
        decoder->count -= decoder->taken;
        decoder->taken = 0;
    }
    if (buffer_reserve(&decoder->bytes, &decoder->capacity, decoder->count + want)) {
        return NULL;
    }
    *ret_space = decoder->capacity - decoder->count;
    return decoder->bytes + decoder->count;
}

void wire_decoder_filled(struct wire_decoder *decoder, size_t bytes)
{
    BL_ASSERT(bytes <= decoder->capacity - decoder->count);
    decoder->count += bytes;
}

int wire_decoder_feed(struct wire_decoder *decoder, const void *bytes, size_t count)
{
    if (!count) {
        return 0;
    }
    size_t space;
    uint8_t *at = wire_decoder_space(decoder, count, &space);
    if (!at) {
        return -ENOMEM;
    }
    memcpy(at, bytes, count);
    wire_decoder_filled(decoder, count);
    return 0;
}

static int header_check(const struct wire_decoder *decoder, const struct frame_header *header,
                        struct bl_errmsg *msg)
{
    if (header->magic != WIRE_FRAME_MAGIC) {
        return bl_err(msg, BL_EFORMAT, "not a frame of Belay's (starts %08x)", header->magic);
    }
    if (header->version != WIRE_FRAME_VERSION) {
        return bl_err(msg, BL_EVERSION, "frame of version %u, this is %u", header->version,
                      WIRE_FRAME_VERSION);
    }
    if (header->bytes > WIRE_FRAME_PAYLOAD_MAX ||
        decoder->parts_bytes + header->bytes > decoder->message_max) {
        return bl_err(msg, BL_ELIMIT, "message %s of %zu bytes, at most %zu",
                      wire_type_name(header->type), decoder->parts_bytes + header->bytes,
                      decoder->message_max);
    }
    if (decoder->parts_type && decoder->parts_type != header->type) {
        return bl_err(msg, BL_EPROTO, "frame %u within a message %s", header->type,
                      wire_type_name(decoder->parts_type));
    }
    if ((header->flags & WIRE_FRAME_MORE) && !header->bytes) {
        return bl_err(msg, BL_EPROTO, "empty frame %u that is not the last", header->type);
    }
    if (!type_known(header->type) && !(header->flags & WIRE_FRAME_SKIP)) {
        return bl_err(msg, BL_EPROTO, "frame of unknown type %u", header->type);
    }
    return 0;
}

/* The next single frame in the buffer; 1, 0 or an error. */
static int frame_take(struct wire_decoder *decoder, struct frame_header *header,
                      const uint8_t **ret_payload, struct bl_errmsg *msg)
{
    size_t have = decoder->count - decoder->taken;
    if (have < WIRE_FRAME_HEADER) {
        return 0;
    }
    memcpy(header, decoder->bytes + decoder->taken, sizeof(*header));
    int rc = header_check(decoder, header, msg);
    if (rc) {
        return rc;
    }
    if (have - WIRE_FRAME_HEADER < header->bytes) {
        return 0;
    }
    *ret_payload = decoder->bytes + decoder->taken + WIRE_FRAME_HEADER;
    if (bl_xxh3(*ret_payload, header->bytes) != header->digest) {
        return bl_err(msg, BL_EDIGEST, "frame %s of %u bytes: digest differs",
                      wire_type_name(header->type), header->bytes);
    }
    decoder->taken += WIRE_FRAME_HEADER + header->bytes;
    return 1;
}

/* Adds a frame's payload to the message begun. */
static int parts_add(struct wire_decoder *decoder, const struct frame_header *header,
                     const uint8_t *payload, struct bl_errmsg *msg)
{
    size_t bytes = decoder->parts_bytes + header->bytes;
    if (buffer_reserve(&decoder->parts, &decoder->parts_capacity, bytes)) {
        return bl_err(msg, -ENOMEM, "out of memory for a message of %zu bytes", bytes);
    }
    if (header->bytes) {
        memcpy(decoder->parts + decoder->parts_bytes, payload, header->bytes);
    }
    decoder->parts_bytes = bytes;
    decoder->parts_type = header->type;
    return 0;
}

int wire_decoder_next(struct wire_decoder *decoder, struct wire_frame *ret, struct bl_errmsg *msg)
{
    if (decoder->failed) {
        return bl_err(msg, decoder->failed, "the stream broke before");
    }
    for (;;) {
        if (!decoder->parts_type && decoder->parts) { /* what the last call returned is over */
            free(decoder->parts);
            decoder->parts = NULL;
            decoder->parts_bytes = decoder->parts_capacity = 0;
        }
        struct frame_header header;
        const uint8_t *payload = NULL;
        int rc = frame_take(decoder, &header, &payload, msg);
        if (rc > 0 && (decoder->parts_type || (header.flags & WIRE_FRAME_MORE))) {
            int added = parts_add(decoder, &header, payload, msg);
            rc = added ? added : 1;
        }
        if (rc <= 0) {
            decoder->failed = rc;
            return rc;
        }
        if (header.flags & WIRE_FRAME_MORE) {
            continue;
        }
        int parts = decoder->parts_type != 0;
        size_t bytes = parts ? decoder->parts_bytes : header.bytes;
        decoder->parts_type = 0;
        decoder->parts_bytes = 0;
        if (!type_known(header.type)) {
            continue;
        }
        *ret = (struct wire_frame){
            .version = header.version,
            .type = header.type,
            .flags = header.flags,
            .generation = header.generation,
            .incarnation = header.incarnation,
            .payload = parts ? decoder->parts : payload,
            .payload_bytes = bytes,
        };
        return 1;
    }
}

size_t wire_decoder_raw(struct wire_decoder *decoder, void *out, size_t max)
{
    size_t have = decoder->count - decoder->taken;
    size_t bytes = have < max ? have : max;
    if (bytes) {
        memcpy(out, decoder->bytes + decoder->taken, bytes);
        decoder->taken += bytes;
    }
    return bytes;
}
