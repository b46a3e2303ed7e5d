/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Arenas and slots: where a rank's state lives, in a memfd that outlives the rank.
 *
 *      page 0   header: magic, version, run, incarnation, arena id, slot count, offsets, check
 *               slot headers, one per cache line pair
 *      page 1.. extent table (encoded bl_extent_list), length and digest in the header
 *      2 MiB    slot 0 | slot 1 | slot 2 ...   each 2 MiB-aligned
 *
 * A slot's header is published as the last store, release-ordered, with its own checksum: a reader
 * that finds a checksum that does not fit has met a header in the middle of a change and takes the
 * slot for being written. Little-endian. Only ever grows: readers accept a newer minor version.
 *
 * The beat page is a memfd of its own (one page, made when the process is): it must exist before
 * the size of the state is known.
 */
#ifndef WIRE_SLOT_H
#define WIRE_SLOT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "wire/msg.h"

#define WIRE_ARENA_MAGIC   0x31414e4552414c42ull /* "BLARENA1" */
#define WIRE_ARENA_VERSION 1u
#define WIRE_SLOT_ALIGN    (2ull << 20)

struct wire_slot_header {   /* two cache lines */
    _Atomic uint32_t state; /* enum wire_slot_state */
    _Atomic uint32_t pinned;
    uint64_t run, incarnation, generation, line, step;
    uint64_t digest[2];
    _Atomic uint64_t check; /* XXH3 of all above as published (pinned not counted) */
    uint64_t reserved[7];
};
_Static_assert(sizeof(struct wire_slot_header) == 128, "two cache lines");

struct wire_arena_header {
    uint64_t magic;
    uint32_t version, slot_count;
    uint64_t run, incarnation, arena;
    uint64_t slot_bytes;  /* of one slot, a multiple of WIRE_SLOT_ALIGN */
    uint64_t data_offset; /* of slot 0 */
    uint64_t table_offset, table_bytes, table_digest;
    uint64_t check; /* XXH3 of all above */
    uint64_t reserved[4];
    struct wire_slot_header slots[WIRE_SLOTS_MAX];
};

/* Bytes of a memfd for this many slots of `state_bytes` each with a table of `table_bytes`; 0 when
 * it overflows. */
uint64_t wire_arena_bytes(uint32_t slot_count, uint64_t state_bytes, uint64_t table_bytes);

/* Bytes of the encoded table of a list, and of one slot that holds all its extents (the largest
 * offset + length). What wire_arena_format will need: wire_arena_bytes of these two. */
uint64_t wire_arena_table_bytes(const struct bl_extent_list *extents);
uint64_t wire_arena_state_bytes(const struct bl_extent_list *extents);

/* Writes header, table and free slots into a fresh mapping of `bytes` bytes. */
BL_MUST_CHECK int wire_arena_format(void *map, uint64_t bytes, uint64_t run, uint64_t incarnation,
                                    uint64_t arena, uint32_t slot_count,
                                    const struct bl_extent_list *extents, struct bl_errmsg *msg);

/* Reads header, table and all slot headers of a mapping that anybody may be writing. Bounds are
 * checked before memory is taken. ret->extents is owned by the caller. */
BL_MUST_CHECK int wire_arena_read(struct wire_arena_info *ret, const void *map, uint64_t bytes,
                                  struct bl_errmsg *msg);

/* Where slot `index` starts in a mapping of `bytes` bytes that somebody else writes: from a copy of
 * its header, checked. BL_EFORMAT, BL_EVERSION, -EINVAL (no such slot). */
BL_MUST_CHECK int wire_arena_slot_offset(const void *map, uint64_t bytes, uint32_t index,
                                         uint64_t *ret_offset, struct bl_errmsg *msg);

/* The start of slot `index` in an arena of our own. */
void *wire_arena_slot(void *map, uint32_t index);

/* Header stores, by the owning rank only. publish sets SEALED with release order, last. */
void wire_slot_begin(struct wire_slot_header *slot, uint64_t run, uint64_t incarnation,
                     uint64_t generation, uint64_t line, uint64_t step);
void wire_slot_publish(struct wire_slot_header *slot, const struct bl_state_digest *digest);
void wire_slot_free(struct wire_slot_header *slot);
void wire_slot_pin(struct wire_slot_header *slot, int pinned);
/* A consistent view; any process. */
void wire_slot_read(const struct wire_slot_header *slot, struct wire_slot_info *ret);

#define WIRE_PAGE_MAGIC 0x3145474150594c42ull /* "BLYPAGE1" */
#define WIRE_PAGE_BYTES 4096

struct wire_page { /* the beat page: written by the rank, read by shim and daemon */
    uint64_t magic;
    uint32_t version, pid;
    _Atomic uint64_t alive_ns; /* CLOCK_MONOTONIC, by the control thread every 100 ms */
    _Atomic uint32_t section;
    _Atomic uint32_t waiting;
    _Atomic uint64_t step;
    _Atomic uint64_t collective;
    _Atomic uint64_t progress_ns;     /* CLOCK_MONOTONIC of the last change of the four above */
    _Atomic uint64_t metrics_version; /* odd while being written */
    uint64_t metrics_step, metrics_samples;
    double metrics_loss, metrics_lr, metrics_grad_norm, metrics_tokens_per_s;
    pthread_mutex_t
        life; /* robust, shared, made by the shim; held by the rank as long as it lives */
};
_Static_assert(sizeof(struct wire_page) <= WIRE_PAGE_BYTES, "one page");

#endif
