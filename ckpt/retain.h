/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Retention: which checkpoints of a root stay. A pure function over what a scan found, so that
 * `prune --dry-run` shows the very decisions that the engine would carry out, each with its reason.
 *
 *     entries, newest first          kept because
 *     step 400.g3  good              one of the 2 newest
 *     step 300.g3  good, verified    one of the 2 newest
 *     step 250.g2  good              - (of a line that ended)          removed when two verified
 *     step 200.g2  good, verified    step is a multiple of 200         ones are newer, else kept
 *     step 100.g1  broken            -
 *
 * What any rule keeps is kept. Whatever the rules say, nothing is removed unless two checkpoints
 * that are newer, good, of the run's line and verified (read back whole) stay.
 */
#ifndef BL_CKPT_RETAIN_H
#define BL_CKPT_RETAIN_H

#include <stdbool.h>
#include <stdint.h>

#include "ckpt/ckpt.h"

#define CKPT_RETAIN_VERIFIED_MIN                                                                   \
    2u                        /* one that is verified is no protection against its own loss        \
                               */
#define CKPT_DECISION_MAX 160 /* bytes of a reason, with the NUL */

struct ckpt_keep { /* all 0: everything is kept */
    uint32_t keep; /* newest good ones of the run's line, at least two; 0: no limit by number */
    uint32_t keep_best;  /* those with the lowest loss; of equal ones the newest */
    uint64_t keep_every; /* those whose step is a multiple of it: for ever, whatever bytes_max */
    uint64_t bytes_max;  /* of all that is kept; beyond it the oldest go, the best ones last */
};

struct ckpt_decision {
    bool remove;
    bool waits; /* no rule keeps it; it goes once two newer ones are verified */
    char why[CKPT_DECISION_MAX];
};

/* Good, and not beyond the end of a line? */
bool ckpt_entry_admitted(const struct ckpt_entry *entry, const struct ckpt_cut *cuts,
                         uint32_t cut_count);

/* Does anything at all follow from the rules? */
bool ckpt_keep_is_on(const struct ckpt_keep *keep);

/* Decides for each of `count` entries, in the order of a scan (newest first), into ret[count]. An
 * entry with verified_unix_s > 0 counts as verified. Broken ones go with the good ones around them:
 * they are removed when they are older than the `keep` newest, unless they could only not be read;
 * good ones that `cuts` do not admit when a newer good one is there; entries of other runs and
 * attempts are never touched. Pure, any thread, O(n log n). -ENOMEM. */
BL_MUST_CHECK int ckpt_retain_decide(struct ckpt_decision *ret, const struct ckpt_entry *entries,
                                     uint32_t count, const struct ckpt_keep *keep,
                                     const struct ckpt_cut *cuts, uint32_t cut_count,
                                     struct bl_errmsg *msg);

/* Moves what the decisions remove to .trash, oldest first. `ret` (may be NULL) counts good ones
 * kept, and all removed, also those before an error. */
BL_MUST_CHECK int ckpt_retain_remove(struct ckpt_store *store, const struct ckpt_entry *entries,
                                     const struct ckpt_decision *decisions, uint32_t count,
                                     struct ckpt_retain_result *ret, struct bl_errmsg *msg);

#endif
