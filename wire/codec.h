/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Structs <-> protobuf, for every message of WIRE_MESSAGES (frame.h). The only file that knows
 * protobuf-c. One table per struct (codec_*.c) names its fields, their kinds and bounds; one engine
 * (codec.c) encodes, decodes, frees and compares by the tables.
 *
 * For each message NAME with struct wire_TAG there are
 *
 *     int  wire_TAG_encode(const struct wire_TAG *, uint8_t **ret, size_t *ret_bytes, msg)
 *     int  wire_TAG_decode(struct wire_TAG *ret, const uint8_t *bytes, size_t count, msg)
 *     void wire_TAG_free(struct wire_TAG *)           what it owns, not itself; NULL is fine
 *
 * Decoding trusts nothing: counts, text lengths, enum values, extents are checked, and memory is
 * bounded by the payload's length. BL_EFORMAT (not such a message), BL_ELIMIT (a count or a text
 * over its bound), -ENOMEM. On error *ret is zeroed. Any thread.
 */
#ifndef WIRE_CODEC_H
#define WIRE_CODEC_H

#include "wire/edge.h"
#include "wire/engine_msg.h"
#include "wire/frame.h"
#include "wire/msg.h"

#define WIRE_TENSORS_MAX 65536u      /* of a list in a message */
#define WIRE_EXTENTS_MAX 262144u     /* the same */
#define WIRE_COPIES_MAX  65536u      /* of a plan */
#define WIRE_PROCS_MAX   4096u       /* of a node */
#define WIRE_ARENAS_MAX  8192u       /* of a node */
#define WIRE_LINES_MAX   1048576u    /* ends of lines of a run */
#define WIRE_JSON_MAX    (32u << 20) /* bytes of a JSON text */

/* By type number; `message` points to the type's struct. ret_bytes may be 0 and then *ret is a
 * block of one byte; *ret is owned, free(). */
BL_MUST_CHECK int wire_message_encode(enum wire_type type, const void *message, uint8_t **ret,
                                      size_t *ret_bytes, struct bl_errmsg *msg);
BL_MUST_CHECK int wire_message_decode(enum wire_type type, void *ret, const uint8_t *bytes,
                                      size_t count, struct bl_errmsg *msg);
/* sizeof its struct; 0 for an unknown type. */
size_t wire_message_size(enum wire_type type);
/* Frees what the struct owns and zeroes it. NULL is fine. */
void wire_message_close(enum wire_type type, void *message);
/* Equal in everything that travels. */
int wire_message_equal(enum wire_type type, const void *a, const void *b);

/* The whole frame (or frames) of a message, owned by the caller. */
BL_MUST_CHECK int wire_message_frame(enum wire_type type, const void *message, uint64_t generation,
                                     uint64_t incarnation, uint8_t **ret, size_t *ret_bytes,
                                     struct bl_errmsg *msg);

#define WIRE_CODEC_DECLARE(NAME, number, tag)                                                      \
    static inline BL_MUST_CHECK int wire_##tag##_encode(                                           \
        const struct wire_##tag *message, uint8_t **ret, size_t *ret_bytes, struct bl_errmsg *msg) \
    {                                                                                              \
        return wire_message_encode(WIRE_TYPE_##NAME, message, ret, ret_bytes, msg);                \
    }                                                                                              \
    static inline BL_MUST_CHECK int wire_##tag##_decode(                                           \
        struct wire_##tag *ret, const uint8_t *bytes, size_t count, struct bl_errmsg *msg)         \
    {                                                                                              \
        return wire_message_decode(WIRE_TYPE_##NAME, ret, bytes, count, msg);                      \
    }                                                                                              \
    static inline void wire_##tag##_free(struct wire_##tag *message)                               \
    {                                                                                              \
        wire_message_close(WIRE_TYPE_##NAME, message);                                             \
    }
WIRE_MESSAGES(WIRE_CODEC_DECLARE)
#undef WIRE_CODEC_DECLARE

#endif
