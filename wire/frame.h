/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frames: how a message lies in a stream of bytes.
 *
 *      0  "BLY1"                     16  u64 generation of the sender
 *      4  u16 version                24  u64 incarnation of the sender
 *      6  u16 type                   32  u64 XXH3 of the payload
 *      8  u32 payload bytes          40  payload: protobuf of wire/belay.proto
 *     12  u32 flags
 *
 * All little-endian. A frame's payload is at most 1 MiB; a longer message (the plan of many
 * thousand ranks) goes in several frames of one type, all but the last with WIRE_FRAME_MORE, and
 * nothing in between. The decoder puts them together again.
 *
 * What comes from a stream is hostile: sizes are checked before memory is taken, and memory grows
 * with bytes that came, never with a number that was claimed.
 */
#ifndef WIRE_FRAME_H
#define WIRE_FRAME_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

#define WIRE_FRAME_MAGIC       0x31594c42u /* "BLY1" */
#define WIRE_FRAME_VERSION     1u
#define WIRE_FRAME_HEADER      40u
#define WIRE_FRAME_PAYLOAD_MAX (1u << 20)
#define WIRE_MESSAGE_BYTES_MAX (64u << 20) /* of all parts of one message */

enum wire_frame_flag {
    WIRE_FRAME_SKIP = 1u << 0, /* a receiver that does not know the type passes over it */
    WIRE_FRAME_MORE = 1u << 1  /* the message goes on in the next frame */
};

/* Frame types: name, number, tag of the struct (struct wire_<tag>; the same in CamelCase is the
 * message of belay.proto). Numbers are never reused. */
#define WIRE_MESSAGES(X)                                                                           \
    X(HELLO, 1, hello)                                                                             \
    X(REPORT, 2, report)                                                                           \
    X(DIRECTIVE, 3, directive)                                                                     \
    X(RANK_REPORT, 4, rank_report)                                                                 \
    X(RANK_DIRECTIVE, 5, rank_directive)                                                           \
    X(VOTE, 6, vote)                                                                               \
    X(VOTE_HELLO, 7, vote_hello)                                                                   \
    X(RECORD, 8, record)                                                                           \
    X(STORE_REPLICA, 9, store_replica)                                                             \
    X(STORE_ACK, 10, store_ack)                                                                    \
    X(ARENA_MAKE, 16, arena_make)                                                                  \
    X(ARENA, 17, arena)                                                                            \
    X(ARENA_DROP, 18, arena_drop)                                                                  \
    X(COPY_OPEN, 19, copy_open)                                                                    \
    X(COPY_OPENED, 20, copy_opened)                                                                \
    X(DISK_LOAD, 21, disk_load)                                                                    \
    X(DISK_LOADED, 22, disk_loaded)                                                                \
    X(BULK_READ, 24, bulk_read)                                                                    \
    X(BULK_DATA, 25, bulk_data)                                                                    \
    X(BULK_FILE, 26, bulk_file)                                                                    \
    X(SHIM_ATTACH, 32, shim_attach)                                                                \
    X(SHIM_STATE, 33, shim_state)                                                                  \
    X(SHIM_KEEP, 34, shim_keep)                                                                    \
    X(SHIM_KEPT, 35, shim_kept)                                                                    \
    X(SHIM_KILL, 36, shim_kill)                                                                    \
    X(SHIM_STACKS, 37, shim_stacks)                                                                \
    X(SHIM_STACKED, 38, shim_stacked)                                                              \
    X(SHIM_RELEASE, 39, shim_release)                                                              \
    X(SHIM_EXIT, 40, shim_exit)                                                                    \
    X(SHIM_STARTED, 41, shim_started)                                                              \
    X(ENGINE_HELLO, 48, engine_hello)                                                              \
    X(ENGINE_WRITE, 49, engine_write)                                                              \
    X(ENGINE_WRITTEN, 50, engine_written)                                                          \
    X(ENGINE_COMMIT, 51, engine_commit)                                                            \
    X(ENGINE_COMMITTED, 52, engine_committed)                                                      \
    X(ENGINE_CANCEL, 53, engine_cancel)                                                            \
    X(ENGINE_CANCELLED, 54, engine_cancelled)                                                      \
    X(ENGINE_SCAN, 55, engine_scan)                                                                \
    X(ENGINE_SCANNED, 56, engine_scanned)                                                          \
    X(ENGINE_LOAD, 57, engine_load)                                                                \
    X(ENGINE_LOADED, 58, engine_loaded)                                                            \
    X(ENGINE_ARENAS, 59, engine_arenas)                                                            \
    X(ENGINE_VERIFIED, 60, engine_verified)                                                        \
    X(REQUEST, 64, request)                                                                        \
    X(ANSWER, 65, answer)

#define WIRE_TYPE_ENUM(name, number, tag) WIRE_TYPE_##name = number,
enum wire_type { WIRE_TYPE_NONE = 0, WIRE_MESSAGES(WIRE_TYPE_ENUM) };
#undef WIRE_TYPE_ENUM

/* "HELLO"; "?" for an unknown number. */
const char *wire_type_name(uint32_t type);

struct wire_frame { /* one whole message */
    uint16_t version, type;
    uint32_t flags;
    uint64_t generation, incarnation;
    const uint8_t *payload; /* view; of the decoder until its next call */
    size_t payload_bytes;
};

/* Bytes on the stream of a message with this payload, headers included; 0 when it is too long. */
size_t wire_frame_bytes(size_t payload_bytes);

/* Writes the message's frame or frames to `out`, which has wire_frame_bytes() bytes. Uses type,
 * flags (without MORE), generation, incarnation and payload; version is ours. BL_ELIMIT when the
 * payload is longer than WIRE_MESSAGE_BYTES_MAX. */
BL_MUST_CHECK int wire_frame_encode(const struct wire_frame *frame, uint8_t *out,
                                    struct bl_errmsg *msg);

/* ---- decoding ---- */

struct wire_decoder {
    uint8_t *bytes; /* owned: what came and was not yet taken */
    size_t count, capacity;
    size_t taken;       /* bytes before this belong to frames returned */
    size_t message_max; /* bytes of one message */
    uint8_t *parts;     /* owned: payload of a message in several frames */
    size_t parts_bytes, parts_capacity;
    uint32_t parts_type; /* 0: none begun */
    int failed;          /* the code after which the stream is of no use */
};

/* `message_max` bytes of payload per message at most (0: WIRE_MESSAGE_BYTES_MAX). */
void wire_decoder_init(struct wire_decoder *decoder, size_t message_max);
void wire_decoder_close(struct wire_decoder *decoder);

/* Room for at least `want` more bytes (1 to 1 MiB): *ret_space is a view, valid until the next
 * call. NULL when out of memory. The caller reads from its socket into it and says how much by
 * filled. */
uint8_t *wire_decoder_space(struct wire_decoder *decoder, size_t want, size_t *ret_space);
void wire_decoder_filled(struct wire_decoder *decoder, size_t bytes);

/* The same with a copy, for callers that have the bytes. */
BL_MUST_CHECK int wire_decoder_feed(struct wire_decoder *decoder, const void *bytes, size_t count);

/* 1 and a message, 0 when more bytes are needed, or an error after which the connection is to be
 * closed: BL_EFORMAT (not our frames), BL_EVERSION, BL_ELIMIT (too long), BL_EDIGEST. Types that
 * are unknown and marked SKIP are passed over, others are BL_EPROTO. */
BL_MUST_CHECK int wire_decoder_next(struct wire_decoder *decoder, struct wire_frame *ret,
                                    struct bl_errmsg *msg);

/* Bytes that came after the last message returned: raw data of a bulk answer begins there. Moves up
 * to `max` of them to `out`; returns how many. */
size_t wire_decoder_raw(struct wire_decoder *decoder, void *out, size_t max);

#endif
