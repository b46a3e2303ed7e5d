/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Resharding: a checkpoint written again with other extents, parts or codec, byte for byte the same
 * state. A plan says which extent goes into which part; running it streams the source through a
 * bounded window into the parts of an attempt and commits it as a save does:
 *
 *     source --reader thread--> window 0 | window 1 --caller's thread--> part, index --> commit
 *
 * The attempt's name follows from the plan. So a run that was killed is taken up where it stood by
 * running the same plan again: parts that are complete and read back right are kept. All the space
 * that the parts need is allocated before the first byte is read.
 */
#ifndef BL_CKPT_RESHARD_H
#define BL_CKPT_RESHARD_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "ckpt/ckpt.h"
#include "ckpt/layout.h"
#include "ckpt/reader.h"

#define CKPT_RESHARD_MEMORY     (256ull * 1024 * 1024) /* when nobody says */
#define CKPT_RESHARD_MEMORY_MIN (128ull * 1024 * 1024) /* less is refused */

struct ckpt_reshard_part {
    char name[CKPT_PART_NAME_MAX];
    char node[CKPT_NODE_MAX];
    struct bl_extent_list list; /* owned; in file order */
    uint64_t bytes;             /* of its elements */
};

struct ckpt_reshard_plan {
    struct ckpt_manifest manifest;   /* owned: what will be committed, without parts */
    struct ckpt_reshard_part *parts; /* owned */
    uint32_t part_count;
    uint64_t bytes;         /* of all elements */
    uint64_t scratch_bytes; /* space that it needs at most */
    uint64_t nonce;         /* of the attempt: from source and plan */
};

struct ckpt_reshard_how {
    const struct ckpt_layout *layout;      /* NULL: the extents as they are */
    const struct ckpt_layout_model *model; /* with layout */
    const struct ckpt_manifest *like;      /* instead of both: its extents, parts and layout */
    uint32_t parts;                        /* 0: as many as the source has */
    const char *codec;                     /* NULL: that of `like`, else the source's */
};

/* Plans: pure. `source` is a manifest with its parts' extents. BL_ECONFIG or BL_EFORMAT when the
 * layout or the other checkpoint does not fit the tensors. ckpt_reshard_plan_close. */
BL_MUST_CHECK int ckpt_reshard_plan_make(struct ckpt_reshard_plan *ret,
                                         const struct ckpt_manifest *source,
                                         const struct ckpt_reshard_how *how, struct bl_errmsg *msg);
void ckpt_reshard_plan_close(struct ckpt_reshard_plan *plan);

struct ckpt_reshard_job {
    const struct ckpt_reshard_plan *plan;
    struct ckpt_reader *reader; /* of the source; used by a thread of the run while that lasts */
    struct ckpt_store *out;     /* the root, opened for writing */
    uint64_t window_bytes;      /* two of these are held; see ckpt_reshard_memory */
    bool force;                 /* a checkpoint of that step that is there already is replaced */
    void (*progress)(void *arg, uint64_t bytes_done); /* NULL, or in the caller's thread */
    void *arg;
    const atomic_int *cancel; /* NULL, or BL_EABORTED soon after it is non-zero */
};

struct ckpt_reshard_result {
    char dir[CKPT_DIR_MAX]; /* name in the root */
    uint64_t manifest_digest;
    uint64_t bytes_written; /* files of the parts written now */
    uint64_t bytes_read;    /* from the source */
    uint32_t parts_kept;    /* of an earlier run of the same plan */
    bool already;           /* it was there, complete: nothing was done */
};

/* How `memory_max` is shared out: *ret_window for the job, *ret_reader for the reader's config.
 * BL_ECONFIG when it is too little. */
BL_MUST_CHECK int ckpt_reshard_memory(uint64_t memory_max, uint64_t *ret_window,
                                      uint64_t *ret_reader, struct bl_errmsg *msg);

/* Runs a plan to the commit; the commit checks that the parts' state digests add up to the source's
 * and that every element is there. BL_ECONFLICT: another checkpoint of that step is there, or
 * somebody else runs the same plan. -ENOSPC before anything is read when there is no room. What was
 * done is kept for the next try. */
BL_MUST_CHECK int ckpt_reshard_run(const struct ckpt_reshard_job *job,
                                   struct ckpt_reshard_result *ret, struct bl_errmsg *msg);

#endif
