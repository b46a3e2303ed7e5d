/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads parts of codec zstd. Wanted chunks that stand near one another in the file are read
 * together, several such groups are in flight; a crew checks the frames' digests, decodes them and
 * joins the planes; the owner hands the chunks over in order.
 *
 *     groups  reading -> arrived (its chunks go to slots) -> all handed over: buffer given back
 *     slots   free -> in the crew's hands -> handed over -> free          (a ring, in chunk order)
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "ckpt/codec.h"
#include "ckpt/crew.h"
#include "ckpt/part_read.h"
#include "ckpt/queue.h"

#define SLOTS_PER_THREAD 2u
#define HOLE_BYTES_MAX                                                                             \
    (128u * 1024) /* unwanted bytes that are read rather than a new group begun */

struct group {
    uint32_t buffer; /* of the queue */
    const uint8_t *data;
    uint64_t offset; /* in the file; a multiple of what O_DIRECT wants */
    uint32_t bytes;
    uint32_t first, end; /* chunks, not all of them wanted */
    uint32_t open;       /* chunks in slots */
    bool arrived, spent; /* spent: all its chunks went to slots */
};

struct decode_slot {
    uint8_t *output; /* owned */
    uint32_t chunk;
    struct group *group;
    const uint8_t *frames;
    /* What comes out. */
    int rc;
    uint32_t bad_frame;
    struct bl_errmsg why;
};

struct decoder {
    const struct ckpt_part_reader *reader;
    struct ckpt_queue *queue;
    struct ckpt_crew *crew;
    struct ckpt_coder *coders[CKPT_CREW_THREADS_MAX];
    struct decode_slot slots[CKPT_CREW_JOBS_MAX];
    uint32_t threads, slot_count;
    uint32_t slot_first, slot_used; /* the ring */
    struct group groups[CKPT_QUEUE_DEPTH_MAX];
    uint32_t group_first, group_used; /* the ring; the first may be spent */
    uint8_t *wanted;                  /* owned; of each chunk that was asked for */
    uint32_t asked;                   /* chunks so far */
    int fd;
};

static uint64_t chunk_at(const struct ckpt_index *index, uint32_t chunk)
{
    return index->frames[index->layout[chunk].frame].at;
}

static uint64_t chunk_end(const struct ckpt_index *index, uint32_t chunk)
{
    const struct ckpt_chunk *place = &index->layout[chunk];
    const struct ckpt_frame *last = &index->frames[place->frame + place->planes - 1];

    return last->at + last->stored;
}

/* A job of the crew: one chunk. */
static void decode_work(void *arg, uint32_t job, uint32_t worker)
{
    struct decoder *decoder = arg;
    struct decode_slot *slot = &decoder->slots[job];
    const struct ckpt_index *index = decoder->reader->index;
    const struct ckpt_chunk *chunk = &index->layout[slot->chunk];
    const uint8_t *at = slot->frames;
    uint32_t stored[CKPT_PLANES_MAX];

    for (uint32_t p = 0; p < chunk->planes; p++) {
        const struct ckpt_frame *frame = &index->frames[chunk->frame + p];

        stored[p] = frame->stored;
        if (bl_xxh3(at, frame->stored) != frame->digest) {
            slot->bad_frame = chunk->frame + p;
            slot->rc = bl_err(&slot->why, BL_EDIGEST, "digest differs");
            return;
        }
        at += frame->stored;
    }
    slot->bad_frame = chunk->frame;
    slot->rc = ckpt_codec_chunk_decode(decoder->coders[worker], slot->frames, stored, chunk->planes,
                                       slot->output, chunk->bytes, &slot->why);
}

static bool is_wanted(struct decoder *decoder, uint32_t chunk)
{
    const struct ckpt_part_reader *reader = decoder->reader;
    const struct ckpt_chunk *place = &reader->index->layout[chunk];

    if (chunk >= decoder->asked) {
        decoder->wanted[chunk] =
            reader->wanted == NULL ||
            reader->wanted(reader->arg, place->offset, place->offset + place->bytes);
        decoder->asked = chunk + 1;
    }
    return decoder->wanted[chunk] != 0;
}

/* The next group from chunk `from` on: wanted chunks within the reach of a buffer, without large
 * holes. False at the end. */
static bool next_group(struct decoder *decoder, uint32_t from, struct group *ret)
{
    const struct ckpt_index *index = decoder->reader->index;
    uint64_t end;

    while (from < index->chunk_count && !is_wanted(decoder, from)) {
        from++;
    }
    if (from == index->chunk_count) {
        return false;
    }
    *ret = (struct group){.first = from, .end = from + 1};
    ret->offset = chunk_at(index, from) / CKPT_QUEUE_ALIGN * CKPT_QUEUE_ALIGN;
    end = chunk_end(index, from);
    for (uint32_t c = from + 1; c < index->chunk_count; c++) {
        uint64_t to = chunk_end(index, c);

        if (to - ret->offset > CKPT_QUEUE_BYTES || chunk_at(index, c) - end > HOLE_BYTES_MAX) {
            break;
        }
        if (is_wanted(decoder, c)) {
            ret->end = c + 1;
            end = to;
        }
    }
    ret->bytes = (uint32_t)(end - ret->offset);
    return true;
}

static int read_error(const struct decoder *decoder, int code, struct bl_errmsg *msg)
{
    const struct ckpt_index *index = decoder->reader->index;
    uint64_t at = 0;
    uint32_t chunk = 0;

    BL_IGNORE(ckpt_queue_drain(decoder->queue, &at), "only asks where it failed");
    while (chunk + 1 < index->chunk_count && chunk_end(index, chunk) <= at) {
        chunk++;
    }
    return bl_err_code(msg, code, "read %s (chunk %u at byte %llu, tensor %s)",
                       decoder->reader->path, chunk, (unsigned long long)at,
                       ckpt_index_chunk_tensor(index, chunk));
}

static struct group *group_of(struct decoder *decoder, uint32_t number)
{
    return &decoder->groups[(decoder->group_first + number) % CKPT_QUEUE_DEPTH_MAX];
}

/* Keeps as many reads in flight as there are buffers. */
static int read_ahead(struct decoder *decoder, struct bl_errmsg *msg)
{
    struct group group;
    void *data;
    int rc;

    while (decoder->group_used < ckpt_queue_depth(decoder->queue)) {
        uint32_t from = decoder->group_used == 0 ? decoder->asked
                                                 : group_of(decoder, decoder->group_used - 1)->end;

        if (!next_group(decoder, from, &group)) {
            return 0;
        }
        rc = ckpt_queue_take(decoder->queue, &group.buffer, &data);
        if (rc == 0) {
            group.data = data;
            rc = ckpt_queue_read(decoder->queue, group.buffer, decoder->fd, group.bytes,
                                 group.offset);
        }
        if (rc < 0) {
            return read_error(decoder, rc, msg);
        }
        *group_of(decoder, decoder->group_used) = group;
        decoder->group_used++;
    }
    return 0;
}

/* Gives chunks of a group to the crew while there are slots. */
static void group_submit(struct decoder *decoder, struct group *group)
{
    const struct ckpt_index *index = decoder->reader->index;

    while (group->first < group->end && decoder->slot_used < decoder->slot_count) {
        uint32_t chunk = group->first++;
        uint32_t number = (decoder->slot_first + decoder->slot_used) % decoder->slot_count;
        struct decode_slot *slot = &decoder->slots[number];

        if (!is_wanted(decoder, chunk)) {
            continue;
        }
        slot->chunk = chunk;
        slot->group = group;
        slot->frames = group->data + (chunk_at(index, chunk) - group->offset);
        slot->rc = 0;
        group->open++;
        decoder->slot_used++;
        ckpt_crew_submit(decoder->crew, number);
    }
    group->spent = group->first == group->end;
}

/* Fills the slots from the groups, waiting for reads where needed. */
static int submit_chunks(struct decoder *decoder, struct bl_errmsg *msg)
{
    for (uint32_t g = 0; g < decoder->group_used && decoder->slot_used < decoder->slot_count; g++) {
        struct group *group = group_of(decoder, g);
        uint32_t bytes = 0;
        int rc;

        if (!group->arrived) {
            rc = ckpt_queue_wait(decoder->queue, group->buffer, &bytes);
            if (rc < 0) {
                return read_error(decoder, rc, msg);
            }
            if (bytes != group->bytes) {
                return bl_err(msg, BL_EFORMAT, "%s: became shorter while it was read",
                              decoder->reader->path);
            }
            group->arrived = true;
            decoder->reader->result->bytes_read += bytes;
        }
        if (!group->spent) {
            group_submit(decoder, group);
        }
    }
    return 0;
}

static int bad_chunk(const struct decoder *decoder, const struct decode_slot *slot,
                     struct bl_errmsg *msg)
{
    const struct ckpt_part_reader *reader = decoder->reader;
    const struct ckpt_frame *frame = &reader->index->frames[slot->bad_frame];

    if (reader->bad_chunk != NULL) {
        return reader->bad_chunk(reader->arg, slot->chunk, slot->why.text, msg);
    }
    return bl_err(msg, slot->rc, "%s: chunk %u (bytes %llu to %llu, tensor %s): %s", reader->path,
                  slot->chunk, (unsigned long long)frame->at,
                  (unsigned long long)(frame->at + frame->stored),
                  ckpt_index_chunk_tensor(reader->index, slot->chunk), slot->why.text);
}

/* Hands the oldest chunk over; gives its buffer back when it was the last of its group. */
static int deliver(struct decoder *decoder, struct bl_errmsg *msg)
{
    const struct ckpt_part_reader *reader = decoder->reader;
    struct decode_slot *slot = &decoder->slots[decoder->slot_first];
    const struct ckpt_chunk *chunk = &reader->index->layout[slot->chunk];
    int rc;

    ckpt_crew_wait(decoder->crew, decoder->slot_first);
    rc = slot->rc < 0 ? bad_chunk(decoder, slot, msg)
                      : reader->window(reader->arg, chunk->offset, slot->output, chunk->bytes, msg);
    slot->group->open--;
    decoder->slot_first = (decoder->slot_first + 1) % decoder->slot_count;
    decoder->slot_used--;
    while (decoder->group_used > 0 && group_of(decoder, 0)->spent &&
           group_of(decoder, 0)->open == 0) {
        ckpt_queue_give(decoder->queue, group_of(decoder, 0)->buffer);
        decoder->group_first = (decoder->group_first + 1) % CKPT_QUEUE_DEPTH_MAX;
        decoder->group_used--;
    }
    return rc;
}

static int decode_all(struct decoder *decoder, struct bl_errmsg *msg)
{
    const struct ckpt_part_reader *reader = decoder->reader;
    int rc = 0;

    while (rc == 0) {
        if (reader->cancel != NULL && atomic_load(reader->cancel) != 0) {
            return bl_err(msg, BL_EABORTED, "%s: cancelled", reader->path);
        }
        rc = read_ahead(decoder, msg);
        rc = rc < 0 ? rc : submit_chunks(decoder, msg);
        if (rc < 0 || decoder->slot_used == 0) {
            return rc;
        }
        rc = deliver(decoder, msg);
    }
    return rc;
}

static int decoder_open(struct decoder *decoder, struct bl_errmsg *msg)
{
    const struct ckpt_index *index = decoder->reader->index;
    uint32_t threads = decoder->reader->io->codec_threads;
    int rc = ckpt_queue_new(&decoder->queue, decoder->reader->io, msg);

    threads = threads == 0 ? ckpt_crew_threads_default() : threads;
    decoder->threads = threads < CKPT_CREW_THREADS_MAX ? threads : CKPT_CREW_THREADS_MAX;
    decoder->slot_count = decoder->threads == 1 ? 1 : SLOTS_PER_THREAD * decoder->threads;
    decoder->wanted = calloc(index->chunk_count + 1u, 1);
    if (rc == 0 && decoder->wanted == NULL) {
        rc = bl_err_code(msg, -ENOMEM, "list of %u chunks", index->chunk_count);
    }
    for (uint32_t t = 0; rc == 0 && t < decoder->threads; t++) {
        rc = ckpt_coder_new(&decoder->coders[t], index->chunk_bytes, msg);
    }
    for (uint32_t s = 0; rc == 0 && s < decoder->slot_count; s++) {
        decoder->slots[s].output = bl_mem_alloc(index->chunk_bytes);
        if (decoder->slots[s].output == NULL) {
            rc = bl_err_code(msg, -ENOMEM, "buffers of the codec");
        }
    }
    if (rc == 0) {
        rc = ckpt_crew_new(&decoder->crew, decoder->threads, decoder->slot_count, decode_work,
                           decoder, msg);
    }
    return rc;
}

static void decoder_close(struct decoder *decoder)
{
    ckpt_crew_free(decoder->crew); /* nobody looks at slots and buffers from here on */
    ckpt_queue_free(decoder->queue);
    for (uint32_t s = 0; s < decoder->slot_count; s++) {
        if (decoder->slots[s].output != NULL) {
            bl_mem_free(decoder->slots[s].output, decoder->reader->index->chunk_bytes);
        }
    }
    for (uint32_t t = 0; t < decoder->threads; t++) {
        ckpt_coder_free(decoder->coders[t]);
    }
    free(decoder->wanted);
    free(decoder);
}

int ckpt_part_read_zstd(const struct ckpt_part_reader *reader, struct bl_errmsg *msg)
{
    struct decoder *decoder = calloc(1, sizeof(*decoder));
    struct ckpt_queue_info info;
    bool direct = false;
    int fd = -1, rc;

    if (decoder == NULL) {
        return bl_err_code(msg, -ENOMEM, "codec");
    }
    decoder->reader = reader;
    rc = ckpt_part_read_open(reader, &fd, &direct, msg);
    decoder->fd = fd;
    if (rc == 0) {
        rc = decoder_open(decoder, msg);
    }
    if (rc == 0) {
        rc = decode_all(decoder, msg);
    }
    if (decoder->queue != NULL) {
        ckpt_queue_info(decoder->queue, &info);
        reader->result->path = info.path;
        reader->result->registered = info.registered;
        reader->result->direct = direct && info.direct;
    }
    decoder_close(decoder);
    if (fd >= 0) {
        BL_IGNORE(reader->io->ops->close(reader->io, fd), "opened for reading");
    }
    return rc;
}
