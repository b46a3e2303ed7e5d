/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A part's writer from inside: what is to be written (part_gather.c), and the part's file with what
 * goes around it (part_write.c).
 */
#ifndef BL_CKPT_PART_WRITE_H
#define BL_CKPT_PART_WRITE_H

#include <stdint.h>

#include "ckpt/part.h"
#include "ckpt/queue.h"

/* An extent to be written, and where its bytes come from. */
struct ckpt_piece {
    const struct bl_tensor *tensor;
    const struct bl_extent *extent;
    const struct ckpt_source *source;
    uint32_t number; /* of the extent in the source's list */
};

struct ckpt_pieces {
    struct ckpt_piece *pieces; /* owned; in file order, each extent once */
    uint32_t count;
};
void ckpt_pieces_close(struct ckpt_pieces *pieces);

/* Gathers the non-empty extents of all sources of a job. BL_EFORMAT for an extent that does not fit
 * its tensor, a name that cannot stand in a checkpoint, a source without data. */
BL_MUST_CHECK int ckpt_pieces_gather(struct ckpt_pieces *ret, const struct ckpt_part_job *job,
                                     struct bl_errmsg *msg);

/* Fills `held` (zeroed before) with tensors and extents of the pieces, one extent for each, offsets
 * as they were. BL_EFORMAT when one name has two shapes. */
BL_MUST_CHECK int ckpt_pieces_describe(const struct ckpt_pieces *pieces,
                                       struct bl_extent_list *held, struct bl_errmsg *msg);

/* Bytes [lo, lo + bytes) of a piece, whole elements, copied or fetched to `dest`; adds them to the
 * state digest. */
BL_MUST_CHECK int ckpt_piece_take(const struct ckpt_piece *piece, uint64_t lo, uint64_t bytes,
                                  void *dest, struct bl_state_digest *state, struct bl_errmsg *msg);

/* Adds bytes [lo, lo + bytes) of a piece, which lie at data, to the state digest. Any thread. */
void ckpt_piece_digest(const struct ckpt_piece *piece, uint64_t lo, uint64_t bytes,
                       const void *data, struct bl_state_digest *state);

static inline uint64_t ckpt_piece_bytes(const struct ckpt_piece *piece)
{
    return bl_extent_elems(piece->extent) * bl_dtype_bytes(piece->tensor->dtype);
}

#endif
