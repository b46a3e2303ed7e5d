/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside of loading: one copy of a checkpoint, opened, and what a load leaves for the next one.
 *
 *     reader.c   which copies there are; what one could not give is asked of the next
 *     copy.c     opening one, with parts that are missing or damaged
 *     load.c     filling destinations from one
 *     holes.c    what it could not give
 */
#ifndef BL_CKPT_COPY_H
#define BL_CKPT_COPY_H

#include "base/extent_plan.h"
#include "ckpt/reader.h"
#include "ckpt/store.h"

struct ckpt_copy {
    struct ckpt_place place;
    /* parts[].held are views of the indexes' lists; of a bad part, the manifest's own. */
    struct ckpt_opened opened;
    char **bad;               /* owned: by part, NULL or why nothing can be had from it (owned) */
    int bad_rc;               /* of the first bad part */
    struct bl_holdings *good; /* owned: what the good parts hold */
    struct bl_holdings *lost; /* owned: what the bad parts would hold; NULL without any */
    bool tried, usable;
};

/* Opens `place` into a zeroed copy. With `tolerant`, parts without a good index or of a wrong size
 * are marked bad; else they are errors. With `like`, another run, step or state digest than its is
 * BL_EFOREIGN. ckpt_copy_close, also after an error. */
BL_MUST_CHECK int ckpt_copy_open(struct ckpt_copy *copy, const struct ckpt_place *place,
                                 bool tolerant, const struct ckpt_manifest *like,
                                 struct bl_errmsg *msg);
void ckpt_copy_close(struct ckpt_copy *copy);

/* The path of a part's file in the copy. */
BL_MUST_CHECK int ckpt_copy_path(const struct ckpt_copy *copy, uint32_t part,
                                 char ret[CKPT_PATH_MAX], struct bl_errmsg *msg);

/* Extents that one destination wants: its list's tensors (borrowed), offsets from base. */
struct ckpt_want {
    struct bl_extent_list list;
    uint8_t *base;
};

struct ckpt_range {
    uint64_t lo, hi;
};

/* Makes room for `count` elements in an owned array. -ENOMEM. */
BL_MUST_CHECK int ckpt_reserve(void **array, size_t *room, size_t count, size_t elem_bytes,
                               struct bl_errmsg *msg);

struct ckpt_hole { /* a place of a part that could not be read */
    uint32_t part, chunk;
    const char *tensor; /* view of the copy */
};

/* What a load could not give. */
struct ckpt_holes {
    struct ckpt_want *wants; /* owned, as many as the load's; extents owned, tensors borrowed */
    size_t *rooms;           /* owned: capacities of their extents */
    uint32_t want_count;
    struct ckpt_hole *at; /* owned */
    size_t count, room;
    int rc; /* of the first hole, with its text; 0: there are none */
    struct bl_errmsg why;
};
BL_MUST_CHECK int ckpt_holes_init(struct ckpt_holes *holes, const struct ckpt_want *wants,
                                  uint32_t want_count, struct bl_errmsg *msg);
void ckpt_holes_close(struct ckpt_holes *holes);
/* Notes a place that could not be read; the first says why. */
BL_MUST_CHECK int ckpt_holes_note(struct ckpt_holes *holes, const struct ckpt_hole *hole, int code,
                                  const char *why, struct bl_errmsg *msg);
/* Adds an extent of want `want` to those that the next copy is asked for, or joins it to the
 * newest. */
BL_MUST_CHECK int ckpt_holes_want(struct ckpt_holes *holes, uint32_t want,
                                  const struct bl_extent *extent, struct bl_errmsg *msg);

/* Fills the wants from one copy. What its files do not give goes into `holes` when it is not NULL,
 * else it is an error. */
BL_MUST_CHECK int ckpt_copy_load(const struct ckpt_copy *copy, const struct ckpt_want *wants,
                                 uint32_t want_count, const struct ckpt_reader_config *config,
                                 struct ckpt_holes *holes, struct ckpt_load_result *result,
                                 struct bl_errmsg *msg);

#endif
