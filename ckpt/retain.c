/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Retention. Three passes over the entries: the rules that keep, the limit of bytes, and last the
 * guard, which nothing overrides.
 */
#include "ckpt/retain.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/store.h"

enum held { /* why an entry is kept, the strongest reason last */
            HELD_NOT,
            HELD_NUMBER, /* one of the newest, or there is no limit */
            HELD_BEST,
            HELD_EVER,  /* every M-th */
            HELD_ALWAYS /* not ours to remove */
};

struct retainer {
    struct ckpt_decision *decisions;
    const struct ckpt_entry *entries;
    uint32_t count;
    const struct ckpt_keep *keep;
    uint32_t number; /* of newest ones kept; UINT32_MAX: all */
    bool *admitted;  /* owned: good and of the run's line */
    uint8_t *held;   /* owned: enum held */
};

bool ckpt_keep_is_on(const struct ckpt_keep *keep)
{
    return keep->keep > 0 || keep->keep_best > 0 || keep->keep_every > 0 || keep->bytes_max > 0;
}

bool ckpt_entry_admitted(const struct ckpt_entry *entry, const struct ckpt_cut *cuts,
                         uint32_t cut_count)
{
    for (uint32_t i = 0; i < cut_count; i++) {
        if (entry->generation < cuts[i].generation && entry->step > cuts[i].step) {
            return false;
        }
    }
    return entry->state == CKPT_GOOD || entry->state == CKPT_PARTIAL;
}

static void reason(struct retainer *r, uint32_t i, const char *fmt, ...) BL_PRINTF(3, 4);

static void reason(struct retainer *r, uint32_t i, const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    vsnprintf(r->decisions[i].why, sizeof(r->decisions[i].why), fmt, args);
    va_end(args);
}

static void hold(struct retainer *r, uint32_t i, enum held held)
{
    r->held[i] = (uint8_t)(held > r->held[i] ? held : r->held[i]);
}

/* ---- the best by loss ---- */

struct candidate {
    double loss;
    uint32_t index;
};

static int candidate_order(const void *a_, const void *b_)
{
    const struct candidate *a = a_, *b = b_;

    if (a->loss != b->loss) {
        return a->loss < b->loss ? -1 : 1;
    }
    return a->index < b->index ? -1 : a->index > b->index;
}

static int hold_best(struct retainer *r, struct bl_errmsg *msg)
{
    struct candidate *candidates;
    uint32_t found = 0;

    if (r->keep->keep_best == 0) {
        return 0;
    }
    candidates = calloc(r->count + 1u, sizeof(*candidates));
    if (candidates == NULL) {
        return bl_err_code(msg, -ENOMEM, "retention of %u checkpoints", r->count);
    }
    for (uint32_t i = 0; i < r->count; i++) {
        if (r->admitted[i] && isfinite(r->entries[i].loss)) {
            candidates[found++] = (struct candidate){r->entries[i].loss, i};
        }
    }
    qsort(candidates, found, sizeof(*candidates), candidate_order);
    for (uint32_t k = 0; k < found && k < r->keep->keep_best; k++) {
        hold(r, candidates[k].index, HELD_BEST);
        reason(r, candidates[k].index, "its loss of %.6g is one of the %u lowest",
               candidates[k].loss, r->keep->keep_best);
    }
    free(candidates);
    return 0;
}

/* ---- the other rules ---- */

static void hold_good(struct retainer *r, uint32_t i, uint32_t rank)
{
    uint64_t every = r->keep->keep_every;

    if (rank < r->number) {
        hold(r, i, HELD_NUMBER);
        if (r->number == UINT32_MAX) {
            reason(r, i, "there is no limit by number");
        } else {
            reason(r, i, "one of the %u newest", r->number);
        }
    } else {
        reason(r, i, "older than the %u newest", r->number);
    }
    if (every > 0 && r->entries[i].step % every == 0) {
        hold(r, i, HELD_EVER);
        reason(r, i, "its step is a multiple of %" PRIu64, every);
    }
}

/* Those that are not good, or not of the line. `rank` admitted ones are newer. */
static void hold_other(struct retainer *r, uint32_t i, uint32_t rank)
{
    switch (r->entries[i].state) {
    case CKPT_GOOD:
    case CKPT_PARTIAL:
        if (rank == 0) {
            hold(r, i, HELD_ALWAYS);
            reason(r, i, "of a line that ended, but none of the run's line is newer");
        } else {
            reason(r, i, "of a line that ended");
        }
        break;
    case CKPT_BROKEN:
        if (r->entries[i].unread) {
            hold(r, i, HELD_ALWAYS);
            reason(r, i, "cannot be read now");
        } else if (rank < r->number) {
            hold(r, i, HELD_ALWAYS);
            reason(r, i, "broken, left for a person to look at");
        } else {
            reason(r, i, "broken, and older than the %u newest", r->number);
        }
        break;
    case CKPT_FOREIGN:
        hold(r, i, HELD_ALWAYS);
        reason(r, i, "of another run");
        break;
    default:
        hold(r, i, HELD_ALWAYS);
        reason(r, i, "an attempt: it is being written, or the next save sweeps it");
        break;
    }
}

static int hold_by_rules(struct retainer *r, struct bl_errmsg *msg)
{
    uint32_t rank = 0; /* admitted ones so far */

    for (uint32_t i = 0; i < r->count; i++) {
        if (r->admitted[i]) {
            hold_good(r, i, rank++);
        } else {
            hold_other(r, i, rank);
        }
    }
    return hold_best(r, msg);
}

/* ---- bytes ---- */

/* Gives up what is held no stronger than `held`, oldest first, until `total` fits. */
static uint64_t shed(struct retainer *r, uint64_t total, enum held held)
{
    for (uint32_t i = r->count; i-- > 0 && total > r->keep->bytes_max;) {
        if (r->admitted[i] && r->held[i] != HELD_NOT && r->held[i] <= held) {
            r->held[i] = HELD_NOT;
            total -= r->entries[i].bytes;
            reason(r, i, "over the limit of %" PRIu64 " bytes", r->keep->bytes_max);
        }
    }
    return total;
}

static void guarded(struct retainer *r, uint32_t i)
{
    reason(r, i, "%s",
           r->admitted[i] && r->entries[i].verified_unix_s > 0
               ? "one of the two newest that were read back"
               : "fewer than two newer ones were read back yet");
}

/* What the guard will keep counts against the limit first, or others would stay in its place. */
static void limit_bytes(struct retainer *r)
{
    uint32_t verified = 0;
    uint64_t total = 0;

    if (r->keep->bytes_max == 0) {
        return;
    }
    for (uint32_t i = 0; i < r->count && verified < CKPT_RETAIN_VERIFIED_MIN; i++) {
        if (r->admitted[i]) {
            if (r->held[i] == HELD_NOT) {
                guarded(r, i);
            }
            hold(r, i, HELD_ALWAYS);
            verified += r->entries[i].verified_unix_s > 0;
        }
    }
    for (uint32_t i = 0; i < r->count; i++) {
        if (r->admitted[i] && r->held[i] != HELD_NOT &&
            __builtin_add_overflow(total, r->entries[i].bytes, &total)) {
            total = UINT64_MAX;
        }
    }
    total = shed(r, total, HELD_NUMBER);
    shed(r, total, HELD_BEST);
}

/* ---- the guard ---- */

static void guard(struct retainer *r)
{
    uint32_t newer = 0; /* verified */

    for (uint32_t i = 0; i < r->count; i++) {
        if (r->held[i] == HELD_NOT) {
            r->decisions[i].remove = newer >= CKPT_RETAIN_VERIFIED_MIN;
            if (!r->decisions[i].remove) {
                r->decisions[i].waits = true;
                guarded(r, i);
            }
        }
        newer += r->admitted[i] && r->entries[i].verified_unix_s > 0;
    }
}

int ckpt_retain_decide(struct ckpt_decision *ret, const struct ckpt_entry *entries, uint32_t count,
                       const struct ckpt_keep *keep, const struct ckpt_cut *cuts,
                       uint32_t cut_count, struct bl_errmsg *msg)
{
    struct retainer r = {.decisions = ret, .entries = entries, .count = count, .keep = keep};
    int rc = 0;

    memset(ret, 0, count * sizeof(*ret));
    r.number = keep->keep == 0 ? UINT32_MAX : keep->keep < 2 ? 2 : keep->keep;
    r.admitted = calloc(count + 1u, sizeof(*r.admitted));
    r.held = calloc(count + 1u, sizeof(*r.held));
    if (r.admitted == NULL || r.held == NULL) {
        rc = bl_err_code(msg, -ENOMEM, "retention of %u checkpoints", count);
    }
    for (uint32_t i = 0; rc == 0 && i < count; i++) {
        r.admitted[i] = ckpt_entry_admitted(&entries[i], cuts, cut_count);
    }
    if (rc == 0 && ckpt_keep_is_on(keep)) {
        rc = hold_by_rules(&r, msg);
        if (rc == 0) {
            limit_bytes(&r);
            guard(&r);
        }
    } else {
        for (uint32_t i = 0; rc == 0 && i < count; i++) {
            reason(&r, i, "everything is kept");
        }
    }
    free(r.admitted);
    free(r.held);
    return rc;
}

int ckpt_retain_remove(struct ckpt_store *store, const struct ckpt_entry *entries,
                       const struct ckpt_decision *decisions, uint32_t count,
                       struct ckpt_retain_result *ret, struct bl_errmsg *msg)
{
    struct ckpt_retain_result result = {0};
    int rc = ckpt_store_writable(store, msg);

    for (uint32_t i = count; rc == 0 && i-- > 0;) {
        if (decisions[i].remove) {
            rc = ckpt_trash_move(store, entries[i].dir, msg);
            result.removed += rc == 0;
        } else {
            result.kept += entries[i].state == CKPT_GOOD || entries[i].state == CKPT_PARTIAL;
        }
    }
    if (ret != NULL) {
        *ret = result;
    }
    return rc;
}

int ckpt_retain(struct ckpt_store *store, uint32_t keep, const struct ckpt_cut *cuts,
                uint32_t cut_count, struct ckpt_retain_result *ret, struct bl_errmsg *msg)
{
    const struct ckpt_keep rules = {.keep = keep < 2 ? 2 : keep};
    struct ckpt_decision *decisions = NULL;
    struct ckpt_scan scan = {0};
    int rc = ckpt_store_writable(store, msg);

    rc = rc < 0 ? rc : ckpt_scan(store, &scan, msg);
    if (rc < 0) {
        return rc;
    }
    decisions = calloc(scan.count + 1u, sizeof(*decisions));
    rc = decisions == NULL ? bl_err_code(msg, -ENOMEM, "retention") : 0;
    for (uint32_t i = 0; i < scan.count; i++) {
        scan.entries[i].verified_unix_s = 1; /* the caller's word, see ckpt.h */
    }
    if (rc == 0) {
        rc = ckpt_retain_decide(decisions, scan.entries, scan.count, &rules, cuts, cut_count, msg);
    }
    if (rc == 0) {
        rc = ckpt_retain_remove(store, scan.entries, decisions, scan.count, ret, msg);
    }
    free(decisions);
    ckpt_scan_close(&scan);
    return rc;
}
