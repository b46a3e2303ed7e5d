/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The stream of a part with codec zstd. Chunks go round a ring of slots:
 *
 *     owner: puts a chunk in (or points at it, where it lies in memory)
 *     crew:  planes, frames, digests, state digest
 *     owner: oldest first, appends the frames to the stream and notes where they went
 *
 * With `auto` the share of chunks that are compressed follows the target: while it takes bytes
 * faster than they come, more chunks go as raw blocks; while it is waited for, fewer do.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "ckpt/codec.h"
#include "ckpt/crew.h"
#include "ckpt/part_write.h"

#define SLOTS_PER_THREAD 2u
#define ESTIMATE_SAMPLES 4u
#define PACE_BYTES       (8u * 1024 * 1024) /* stored, between two looks at the pace */
#define PACE_ALL         8u
#define PACE_FADE        8u /* looks after which one counts for a third */

struct encode_slot {
    uint8_t *input, *output; /* owned; a chunk, and room for its frames */
    const uint8_t *data;     /* what is encoded: input, or where it lies */
    uint32_t chunk;
    bool raw;
    const struct ckpt_piece
        *piece; /* whose bytes from piece_lo on they are; NULL: no state digest */
    uint64_t piece_lo;
    /* What comes out. */
    uint32_t stored[CKPT_PLANES_MAX];
    uint64_t digests[CKPT_PLANES_MAX];
    size_t bytes;
    struct bl_state_digest state;
};

struct pace {
    bool adaptive;
    uint32_t share;            /* eighths of the chunks that are compressed */
    uint32_t turn;             /* eighths that are due */
    uint64_t bytes;            /* appended since the last look */
    uint64_t at_us, waited_us; /* at the last look */
    /* Over the last looks, older ones fading: disks take what is queued in batches, so that most
     * looks see no wait at all and a few a long one. */
    uint64_t elapsed_sum, waited_sum;
};

struct encoder {
    struct ckpt_part_writer *writer;
    struct ckpt_crew *crew;
    struct ckpt_coder *coders[CKPT_CREW_THREADS_MAX]; /* one a worker */
    struct encode_slot slots[CKPT_CREW_JOBS_MAX];
    uint32_t threads, slot_count;
    uint32_t piece;  /* the first that does not end before the next chunk */
    uint64_t stored; /* bytes of all frames so far */
    size_t input_bytes, output_bytes;
    struct pace pace;
};

/* A job of the crew. */
static void encode_work(void *arg, uint32_t job, uint32_t worker)
{
    struct encoder *encoder = arg;
    struct encode_slot *slot = &encoder->slots[job];
    const struct ckpt_chunk *chunk = &encoder->writer->index.layout[slot->chunk];
    const uint8_t *at = slot->output;

    slot->bytes = ckpt_codec_chunk_encode(encoder->coders[worker], slot->data, chunk->bytes,
                                          chunk->planes, slot->raw, slot->output, slot->stored);
    for (uint32_t p = 0; p < chunk->planes; p++) {
        slot->digests[p] = bl_xxh3(at, slot->stored[p]);
        at += slot->stored[p];
    }
    memset(&slot->state, 0, sizeof(slot->state));
    if (slot->piece != NULL) {
        ckpt_piece_digest(slot->piece, slot->piece_lo, chunk->bytes, slot->data, &slot->state);
    }
}

static uint64_t piece_end(const struct encoder *encoder, uint32_t piece)
{
    return encoder->writer->pieces.pieces[piece].at +
           ckpt_piece_bytes(&encoder->writer->pieces.pieces[piece]);
}

/* Gathers a chunk out of several small pieces, or pulls it out of one, into the slot. */
static int slot_gather(struct encoder *encoder, struct encode_slot *slot,
                       const struct ckpt_chunk *chunk, struct bl_errmsg *msg)
{
    const struct ckpt_part_writer *writer = encoder->writer;
    uint64_t at = chunk->offset, end = chunk->offset + chunk->bytes;
    int rc = 0;

    slot->data = slot->input;
    for (uint32_t i = encoder->piece; rc == 0 && at < end; i++) {
        const struct ckpt_piece *piece = &writer->pieces.pieces[i];
        uint64_t lo = at - piece->at;
        uint64_t to = piece_end(encoder, i) < end ? piece_end(encoder, i) : end;
        uint8_t *dest = slot->input + (at - chunk->offset);

        rc = ckpt_piece_take(piece, lo, to - at, dest, msg);
        if (rc < 0) {
            return bl_err_in(msg, rc, "%s", writer->job->name);
        }
        if (at == chunk->offset && to == end) { /* of one piece: the crew does it */
            slot->piece = piece;
            slot->piece_lo = lo;
        } else {
            ckpt_piece_digest(piece, lo, to - at, dest, &encoder->writer->index.state);
        }
        at = to;
    }
    return rc;
}

/* Puts chunk `number` into a slot. Asked in ascending order. */
static int slot_fill(struct encoder *encoder, struct encode_slot *slot, uint32_t number,
                     struct bl_errmsg *msg)
{
    const struct ckpt_part_writer *writer = encoder->writer;
    const struct ckpt_chunk *chunk = &writer->index.layout[number];
    const struct ckpt_piece *piece;
    uint64_t lo;

    slot->chunk = number;
    slot->piece = NULL;
    if (chunk->offset < writer->index.data_offset) {
        slot->data = (const uint8_t *)writer->header.data + chunk->offset;
        return 0;
    }
    while (piece_end(encoder, encoder->piece) <= chunk->offset) {
        encoder->piece++;
    }
    piece = &writer->pieces.pieces[encoder->piece];
    lo = chunk->offset - piece->at;
    if (piece->source->base == NULL ||
        chunk->offset + chunk->bytes > piece_end(encoder, encoder->piece)) {
        return slot_gather(encoder, slot, chunk, msg);
    }
    slot->data = (const uint8_t *)piece->source->base + piece->extent->offset + lo;
    slot->piece = piece;
    slot->piece_lo = lo;
    return 0;
}

/* Whether the next chunk goes raw. */
static bool pace_is_raw(struct pace *pace)
{
    if (!pace->adaptive) {
        return false;
    }
    pace->turn += pace->share;
    if (pace->turn >= PACE_ALL) {
        pace->turn -= PACE_ALL;
        return false;
    }
    return true;
}

/* Looks whether the target was waited for. A queue that is not full yet tells nothing. */
static void pace_step(struct encoder *encoder, size_t bytes)
{
    const struct ckpt_part_writer *writer = encoder->writer;
    struct pace *pace = &encoder->pace;
    uint64_t now;

    pace->bytes += bytes;
    if (pace->bytes < PACE_BYTES) {
        return;
    }
    now = ckpt_now_us();
    pace->elapsed_sum += now - pace->at_us - pace->elapsed_sum / PACE_FADE;
    pace->waited_sum += writer->waited_us - pace->waited_us - pace->waited_sum / PACE_FADE;
    if (writer->written >= (uint64_t)ckpt_queue_depth(writer->queue) * CKPT_QUEUE_BYTES) {
        if (pace->waited_sum * 16 > pace->elapsed_sum) {
            pace->share += pace->share < PACE_ALL;
        } else {
            pace->share /= 2;
        }
    }
    pace->bytes = 0;
    pace->at_us = now;
    pace->waited_us = writer->waited_us;
}

/* Appends the frames of a slot that is done. */
static int slot_append(struct encoder *encoder, const struct encode_slot *slot,
                       struct bl_errmsg *msg)
{
    struct ckpt_index *index = &encoder->writer->index;
    const struct ckpt_chunk *chunk = &index->layout[slot->chunk];

    for (uint32_t p = 0; p < chunk->planes; p++) {
        struct ckpt_frame *frame = &index->frames[chunk->frame + p];

        frame->at = encoder->stored;
        frame->stored = slot->stored[p];
        frame->digest = slot->digests[p];
        encoder->stored += slot->stored[p];
    }
    bl_state_digest_merge(&index->state, &slot->state);
    pace_step(encoder, slot->bytes);
    return ckpt_stream_append(encoder->writer, slot->output, slot->bytes, msg);
}

/* Allocates what the part will take, by the ratio of a few chunks where they can be looked at
 * beforehand; what is missing comes in steps while it is written. */
static int allocate_estimate(struct encoder *encoder, struct bl_errmsg *msg)
{
    const struct ckpt_index *index = &encoder->writer->index;
    uint64_t raw = 0, stored = 0;
    bool pulled = false;

    for (uint32_t s = 0; s < encoder->writer->job->source_count; s++) {
        pulled = pulled || encoder->writer->job->sources[s].base == NULL;
    }
    for (uint32_t s = 0; !pulled && s < ESTIMATE_SAMPLES; s++) {
        struct encode_slot *slot = &encoder->slots[0];
        uint32_t number = (uint32_t)((uint64_t)index->chunk_count * (2 * s + 1) / 8);
        int rc = slot_fill(encoder, slot, number, msg);

        if (rc < 0) {
            return rc;
        }
        if (slot->piece == NULL) {
            continue; /* header or small ones */
        }
        raw += index->layout[number].bytes;
        stored += ckpt_codec_chunk_encode(encoder->coders[0], slot->data,
                                          index->layout[number].bytes, index->layout[number].planes,
                                          false, slot->output, slot->stored);
    }
    encoder->piece = 0;
    memset(&encoder->writer->index.state, 0, sizeof(encoder->writer->index.state));
    stored = raw == 0 ? index->raw_bytes - index->raw_bytes / 8
                      : (uint64_t)((double)index->raw_bytes * (double)stored / (double)raw);
    return ckpt_stream_allocate(encoder->writer, stored + ckpt_part_tail_bytes(index), msg);
}

static int encoder_open(struct encoder *encoder, struct bl_errmsg *msg)
{
    uint32_t threads = encoder->writer->io->codec_threads;
    uint32_t chunk_bytes = encoder->writer->index.chunk_bytes;
    int rc = 0;

    threads = threads == 0 ? ckpt_crew_threads_default() : threads;
    encoder->threads = threads < CKPT_CREW_THREADS_MAX ? threads : CKPT_CREW_THREADS_MAX;
    encoder->slot_count = encoder->threads == 1 ? 1 : SLOTS_PER_THREAD * encoder->threads;
    encoder->input_bytes = chunk_bytes;
    encoder->output_bytes = ckpt_codec_chunk_bound(chunk_bytes, CKPT_PLANES_MAX);
    for (uint32_t t = 0; rc == 0 && t < encoder->threads; t++) {
        rc = ckpt_coder_new(&encoder->coders[t], chunk_bytes, msg);
    }
    for (uint32_t s = 0; rc == 0 && s < encoder->slot_count; s++) {
        encoder->slots[s].input = bl_mem_alloc(encoder->input_bytes);
        encoder->slots[s].output = bl_mem_alloc(encoder->output_bytes);
        if (encoder->slots[s].input == NULL || encoder->slots[s].output == NULL) {
            rc = bl_err_code(msg, -ENOMEM, "buffers of the codec");
        }
    }
    if (rc == 0) {
        rc = ckpt_crew_new(&encoder->crew, encoder->threads, encoder->slot_count, encode_work,
                           encoder, msg);
    }
    return rc;
}

static void encoder_close(struct encoder *encoder)
{
    ckpt_crew_free(encoder->crew); /* nobody looks at slots from here on */
    for (uint32_t s = 0; s < encoder->slot_count; s++) {
        if (encoder->slots[s].input != NULL) {
            bl_mem_free(encoder->slots[s].input, encoder->input_bytes);
        }
        if (encoder->slots[s].output != NULL) {
            bl_mem_free(encoder->slots[s].output, encoder->output_bytes);
        }
    }
    for (uint32_t t = 0; t < encoder->threads; t++) {
        ckpt_coder_free(encoder->coders[t]);
    }
    free(encoder);
}

static int encode_all(struct encoder *encoder, struct bl_errmsg *msg)
{
    uint32_t count = encoder->writer->index.chunk_count, next = 0;
    int rc = 0;

    for (uint32_t done = 0; rc == 0 && done < count; done++) {
        rc = ckpt_stream_check(encoder->writer, msg);
        while (rc == 0 && next < count && next - done < encoder->slot_count) {
            struct encode_slot *slot = &encoder->slots[next % encoder->slot_count];

            slot->raw = pace_is_raw(&encoder->pace);
            rc = slot_fill(encoder, slot, next, msg);
            if (rc == 0) {
                ckpt_crew_submit(encoder->crew, next % encoder->slot_count);
                next++;
            }
        }
        if (rc == 0) {
            ckpt_crew_wait(encoder->crew, done % encoder->slot_count);
            rc = slot_append(encoder, &encoder->slots[done % encoder->slot_count], msg);
        }
    }
    return rc;
}

int ckpt_stream_encode(struct ckpt_part_writer *writer, struct bl_errmsg *msg)
{
    struct encoder *encoder = calloc(1, sizeof(*encoder));
    int rc;

    if (encoder == NULL) {
        return bl_err_code(msg, -ENOMEM, "codec");
    }
    encoder->writer = writer;
    encoder->pace.adaptive = strcmp(writer->job->codec, "auto") == 0;
    encoder->pace.share = PACE_ALL;
    rc = encoder_open(encoder, msg);
    if (rc == 0) {
        rc = allocate_estimate(encoder, msg);
    }
    encoder->pace.at_us = ckpt_now_us();
    if (rc == 0) {
        rc = encode_all(encoder, msg);
    }
    encoder_close(encoder);
    return rc;
}
