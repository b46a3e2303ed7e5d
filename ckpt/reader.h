/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A checkpoint opened for loading: any layout, any number of times, from one copy of it or several.
 *
 *     ckpt_reader_open(&reader, places, count, &config, msg)
 *     ckpt_reader_manifest(reader)               what is there, with every part's extents
 *     ckpt_reader_load(reader, dests, n, ...)    as often as one likes
 *     ckpt_reader_close(reader)
 *
 * places[0] is read. What cannot be had from it - a chunk whose digest differs, a part or an index
 * that is missing, too short or unreadable - is taken from the first of the other places that has
 * it good: their parts may be cut otherwise, with another codec, but they hold the same state. Each
 * healing is told to the config's callback. Nothing is written anywhere.
 *
 * Threads: a reader belongs to one thread at a time.
 */
#ifndef BL_CKPT_READER_H
#define BL_CKPT_READER_H

#include <stdatomic.h>
#include <stdint.h>

#include "base/error.h"
#include "ckpt/ckpt.h"

#define CKPT_PLACES_MAX 64u

/* One copy of a checkpoint. Borrowed for the reader's life. */
struct ckpt_place {
    struct ckpt_store *store; /* NULL: config.open gives it once it is needed */
    const char *dir;          /* name in the root */
};

struct ckpt_reader_config {
    /* Bytes for plans and buffers; 0: 256 MiB. Buffers of transfers and codec (up to 64 MiB) are
     * taken however small it is; what is left says how much is planned at once. What the
     * checkpoint's own description takes (about 300 bytes an extent) comes on top. */
    uint64_t memory_max;
    /* NULL, or told after bytes of `chunk` of `file` (a path; the first bytes are of `tensor`) were
     * taken from `from_path` instead. A whole file counts as its chunk 0. In the caller's thread.
     */
    void (*healed)(void *arg, const char *file, uint32_t chunk, const char *tensor,
                   const char *from_path);
    /* NULL, or opens the store of a place after the first that has none: a copy that nobody needs
     * is not touched, and cannot hang who reads. The store stays the caller's. */
    int (*open)(void *arg, uint32_t place, struct ckpt_store **ret, struct bl_errmsg *msg);
    void *arg;
    const atomic_int *cancel; /* NULL, or BL_EABORTED soon after it is non-zero */
};

struct ckpt_reader;

/* Reads the manifest and the parts' indexes of places[0]. Places after the first are looked at only
 * when something has to be healed; one of another run, step or state digest is no copy. (Without a
 * good manifest in places[0]: of another run than its root's, or of another step than its name's.)
 * `config` may be NULL. *ret is owned: ckpt_reader_close. Errors as of ckpt_load. */
BL_MUST_CHECK int ckpt_reader_open(struct ckpt_reader **ret, const struct ckpt_place *places,
                                   uint32_t place_count, const struct ckpt_reader_config *config,
                                   struct bl_errmsg *msg);

/* View of the reader: its manifest, parts[].held with the offsets of the indexes. */
const struct ckpt_manifest *ckpt_reader_manifest(const struct ckpt_reader *reader);

/* Fills every destination. Each byte that anybody wants is read once and handed to all who want it.
 * Destinations are undefined after an error. BL_ENOSTATE names a tensor that is not there whole;
 * what no place has good is named by file, chunk and tensor (BL_EDIGEST, or why it could not be
 * read). */
BL_MUST_CHECK int ckpt_reader_load(struct ckpt_reader *reader, const struct ckpt_dest *dests,
                                   uint32_t dest_count, struct ckpt_load_result *ret,
                                   struct bl_errmsg *msg);

void ckpt_reader_close(struct ckpt_reader *reader);

#endif
