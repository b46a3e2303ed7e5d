/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Repairing a checkpoint from other copies of it. What is wrong is found as verification finds it
 * and replaced, each thing only by bytes that have the digest they must have:
 *
 *     manifest.json     from a copy whose manifest names the very indexes that are here
 *     chunk, frame      in place, from a copy's part with the same index; it was bad before
 *     index             from a copy with the same digest
 *     whole part        written again from the elements of any copies, cut as they may be, beside
 *                       the checkpoint, then renamed into place
 *
 * Killed anywhere, nothing is worse than it was, and the next run goes on.
 */
#ifndef BL_CKPT_REPAIR_H
#define BL_CKPT_REPAIR_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "ckpt/ckpt.h"
#include "ckpt/reader.h"

struct ckpt_repair_job {
    struct ckpt_store *store; /* opened for writing, but for a dry run */
    const char *dir;
    const struct ckpt_place *copies; /* other copies; those that are none are passed over */
    uint32_t copy_count;             /* at most CKPT_PLACES_MAX - 1 */
    bool dry_run;                    /* look, read the copies, write nothing */
    uint64_t memory_max;             /* 0: 256 MiB */
    /* Told of everything that is wrong: `done`: it was (dry run: would be) repaired; `text` says
     * with what, or why it cannot be. */
    void (*told)(void *arg, const char *file, const char *text, bool done);
    void (*progress)(void *arg, uint64_t bytes_done, uint64_t bytes_all); /* NULL, or of reading */
    void *arg;
    const atomic_int *cancel; /* NULL, or BL_EABORTED soon after it is non-zero */
};

struct ckpt_repair_result {
    uint32_t repaired, failed; /* things told */
    uint64_t bytes_written;
};

/* Repairs one checkpoint. 0: looked at all of it (see failed); else it could not look: -errno,
 * BL_ECONFLICT when another repair works on it. That all is well afterwards is for ckpt_verify. */
BL_MUST_CHECK int ckpt_repair(const struct ckpt_repair_job *job, struct ckpt_repair_result *ret,
                              struct bl_errmsg *msg);

#endif
