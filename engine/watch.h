/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A watch on tensors that never change. A trainer that hands the same buffer over again and again,
 * or a slot that nobody writes, gives checkpoints that are whole, verified, and worthless; nothing
 * else here would notice. Extents of parameters and moments are compared with what they were in the
 * save before: small ones by the digest of all their bytes, large ones by that of some of them, and
 * only where those are equal by that of all. So a save costs a few pages of each extent, and what
 * is named did not change in a single bit.
 */
#ifndef ENGINE_WATCH_H
#define ENGINE_WATCH_H

#include <stdint.h>

#include "base/error.h"
#include "ckpt/ckpt.h"

#define ENGINE_WATCH_MAX       1000000u /* extents; of more than these none is watched */
#define ENGINE_WATCH_SMALL     65536u   /* bytes up to which an extent is digested whole */
#define ENGINE_WATCH_BLOCK     4096u    /* of larger ones, ENGINE_WATCH_BLOCKS of these */
#define ENGINE_WATCH_BLOCKS    16u
#define ENGINE_WATCH_NAMES_MAX 64u /* tensors named in one part */

struct engine_names {                  /* tensors */
    char (*names)[BL_TENSOR_NAME_MAX]; /* owned */
    uint32_t count;
};
void engine_names_close(struct engine_names *names);
/* A copy of `name` at the end. -ENOMEM. */
BL_MUST_CHECK int engine_names_add(struct engine_names *names, const char *name);

/* One number for name, box and range; the same number: the same elements. */
uint64_t engine_extent_key(const struct bl_extent *extent, const struct bl_tensor *tensor);

struct engine_watched; /* one extent */

struct engine_watch {
    uint64_t step;
    struct engine_watched *extents; /* owned; by key */
    uint32_t count;
    struct engine_names unchanged; /* of the last look, at most ENGINE_WATCH_NAMES_MAX */
};

void engine_watch_close(struct engine_watch *watch);

/* Looks at the state of `step`: sources with `base` (others are passed over). unchanged names the
 * tensors of which every extent here has the bytes that it had at the last look, which was at an
 * earlier step. A first look, one that goes back, or a change of layout names none; a look at the
 * same step again changes nothing. Errors (-ENOMEM) end the watch until the next look. One thread
 * at a time. */
BL_MUST_CHECK int engine_watch_look(struct engine_watch *watch, uint64_t step,
                                    const struct ckpt_source *sources, uint32_t source_count,
                                    struct bl_errmsg *msg);

#endif
