/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target: frames and messages. The input is a stream as a hostile peer could send it: the
 * decoder gets it in pieces, every message that comes out is decoded, and a message that was
 * decoded comes back from its own encoding.
 *
 * Frames carry a digest, so a fuzzer that changes bytes would never get past it: where the first
 * byte of the input is odd, the rest is a type number and a payload without a frame.
 */
#include <stdlib.h>
#include <string.h>

#include "tests/fuzz/fuzz.h"
#include "wire/codec.h"
#include "wire/frame.h"

#define FUZZ_MESSAGE_MAX (4u << 20)

static void message_run(uint32_t type, const uint8_t *payload, size_t bytes)
{
    size_t size = wire_message_size((enum wire_type)type);
    if (!size) {
        return;
    }
    void *message = calloc(1, size);
    void *again = calloc(1, size);
    BL_ASSERT(message && again);
    struct bl_errmsg msg = {""};
    int rc = wire_message_decode((enum wire_type)type, message, payload, bytes, &msg);
    BL_ASSERT(!rc || msg.text[0]);
    if (!rc) {
        uint8_t *encoded;
        size_t count;
        rc = wire_message_encode((enum wire_type)type, message, &encoded, &count, &msg);
        BL_ASSERT(!rc);
        rc = wire_message_decode((enum wire_type)type, again, encoded, count, &msg);
        BL_ASSERT(!rc);
        BL_ASSERT(wire_message_equal((enum wire_type)type, message, again));
        free(encoded);
        wire_message_close((enum wire_type)type, again);
        wire_message_close((enum wire_type)type, message);
    }
    free(message);
    free(again);
}

static void stream_run(const uint8_t *data, size_t bytes)
{
    struct wire_decoder decoder;
    wire_decoder_init(&decoder, FUZZ_MESSAGE_MAX);
    int rc = 0;
    for (size_t at = 0; rc >= 0 && at < bytes;) {
        size_t piece = 1 + data[at] % 61u;
        piece = piece > bytes - at ? bytes - at : piece;
        rc = wire_decoder_feed(&decoder, data + at, piece);
        BL_ASSERT(!rc);
        at += piece;
        struct wire_frame frame;
        while ((rc = wire_decoder_next(&decoder, &frame, NULL)) > 0) {
            message_run(frame.type, frame.payload, frame.payload_bytes);
        }
    }
    wire_decoder_close(&decoder);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (bytes >= 2 && (data[0] & 1)) {
        message_run(data[1], data + 2, bytes - 2);
    } else if (bytes >= 1) {
        stream_run(data + 1, bytes - 1);
    }
    return 0;
}
