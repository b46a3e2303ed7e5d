/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The job's roots as the leader knows them: what the record says is committed on each, what a scan
 * found, which of them do not answer.
 */
#include "daemon/core/leader_state.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A commit without an answer is nothing that anybody waits for, and a scan reads all roots. */
#define ROOT_SETTLE_RETRY_MS 10000u

static struct wire_record_root root_fresh(uint64_t path)
{
    return (struct wire_record_root){.path = path, .committed_step = UINT64_MAX};
}

/* The record's roots in the order of the job's, which may have changed since. A record of before
 * there were several has one set of fields, which is the first root's. */
static void roots_map(struct core_leader *l)
{
    struct wire_record *record = &l->record;
    struct wire_record_root roots[WIRE_JOB_ROOTS];

    for (uint32_t i = 0; i < l->config.root_count; i++) {
        uint64_t path = bl_xxh3(l->roots[i].path, strlen(l->roots[i].path));
        roots[i] = root_fresh(path);
        for (uint32_t k = 0; k < record->root_count; k++) {
            if (record->roots[k].path == path) {
                roots[i] = record->roots[k];
            }
        }
    }
    if (record->root_count == 0 && l->config.root_count > 0) {
        roots[0].committing_attempt = record->committing_attempt;
        roots[0].committing_step = record->committing_step;
        roots[0].committed_step = record->committed_step;
        roots[0].committed_generation = record->committed_generation;
        roots[0].committed_digest = record->committed_digest;
        memcpy(roots[0].committed_dir, record->committed_dir, sizeof(roots[0].committed_dir));
    }
    memcpy(record->roots, roots, l->config.root_count * sizeof(*roots));
    record->root_count = l->config.root_count;
}

void leader_roots_init(struct core_leader *l, const struct core_leader_config *config)
{
    l->config.root_count =
        config->root_count < WIRE_JOB_ROOTS ? config->root_count : WIRE_JOB_ROOTS;
    for (uint32_t i = 0; i < l->config.root_count; i++) {
        struct leader_root *root = &l->roots[i];
        root->path = strdup(config->roots[i].path);
        BL_ASSERT(root->path);
        root->every = config->roots[i].every;
        root->apart = config->roots[i].apart;
        root->verified_step = UINT64_MAX;
        root->verify_failed_step = UINT64_MAX;
    }
    l->config.roots = NULL;
    roots_map(l);
    for (uint32_t i = 0; i < l->config.root_count; i++) {
        uint64_t chosen = l->record.roots[i].every;
        l->roots[i].interval = l->roots[i].every != CORE_EVERY_AUTO ? l->roots[i].every
                               : chosen                             ? chosen
                                                                    : CORE_INTERVAL_FIRST;
    }
}

void leader_roots_close(struct core_leader *l)
{
    for (uint32_t i = 0; i < l->config.root_count; i++) {
        free(l->roots[i].path);
    }
}

uint64_t leader_root_next(const struct core_leader *l, uint32_t root)
{
    const struct wire_record_root *r = &l->record.roots[root];
    return r->committed_step != UINT64_MAX &&
                   leader_copy_is_admissible(&l->record, r->committed_generation, r->committed_step)
               ? r->committed_step + 1
               : 0;
}

void leader_record_newest(struct wire_record *record)
{
    const struct wire_record_root *newest = NULL;
    const struct wire_record_root *busy = NULL;

    for (uint32_t i = 0; i < record->root_count; i++) {
        const struct wire_record_root *r = &record->roots[i];
        if (!busy && r->committing_attempt) {
            busy = r;
        }
        if (r->committed_step != UINT64_MAX &&
            leader_copy_is_admissible(record, r->committed_generation, r->committed_step) &&
            (!newest || r->committed_step > newest->committed_step)) {
            newest = r;
        }
    }
    record->committing_attempt = busy ? busy->committing_attempt : 0;
    record->committing_step = busy ? busy->committing_step : 0;
    if (!newest && record->committed_step != UINT64_MAX &&
        leader_copy_is_admissible(record, record->committed_generation, record->committed_step)) {
        return; /* on a root that the job does not name any more: it stands all the same */
    }
    record->committed_step = newest ? newest->committed_step : UINT64_MAX;
    record->committed_generation = newest ? newest->committed_generation : 0;
    record->committed_digest = newest ? newest->committed_digest : 0;
    memset(record->committed_dir, 0, sizeof(record->committed_dir));
    if (newest) {
        memcpy(record->committed_dir, newest->committed_dir, sizeof(record->committed_dir));
    }
}

/* ---- scans ---- */

void leader_scan_want(struct core_leader *l)
{
    l->scan_wanted |= !l->scan_pending;
}

int leader_roots_unscanned(const struct core_leader *l)
{
    for (uint32_t i = 0; i < l->config.root_count; i++) {
        if (l->roots[i].scan_failed || l->roots[i].incomplete) {
            return 1;
        }
    }
    return 0;
}

int leader_roots_answer(const struct core_leader *l)
{
    for (uint32_t i = 0; i < l->config.root_count; i++) {
        if (!l->roots[i].stuck) {
            return 1;
        }
    }
    return 0;
}

static int checkpoint_order(const void *a_, const void *b_)
{
    const struct core_checkpoint *a = a_, *b = b_;

    if (a->step != b->step) {
        return a->step > b->step ? -1 : 1;
    }
    if (a->root != b->root) {
        return a->root < b->root ? -1 : 1;
    }
    return a->generation > b->generation ? -1 : a->generation < b->generation;
}

/* What a scan found; of too many the newest that still stand, on whichever root. */
static void checkpoints_take(struct core_leader *l, const struct core_checkpoint *found,
                             uint32_t count)
{
    uint32_t kept = 0;

    l->checkpoints = core_alloc(count, sizeof(*l->checkpoints));
    for (uint32_t i = 0; i < count; i++) {
        if (count <= LEADER_CHECKPOINTS ||
            leader_copy_is_admissible(&l->record, found[i].generation, found[i].step)) {
            l->checkpoints[kept++] = found[i];
        }
    }
    if (kept > LEADER_CHECKPOINTS) {
        qsort(l->checkpoints, kept, sizeof(*l->checkpoints), checkpoint_order);
        kept = LEADER_CHECKPOINTS;
    }
    l->checkpoint_count = kept;
}

static void checkpoint_drop_oldest(struct core_leader *l)
{
    uint32_t oldest = 0;

    for (uint32_t i = 1; i < l->checkpoint_count; i++) {
        oldest = l->checkpoints[i].step < l->checkpoints[oldest].step ? i : oldest;
    }
    l->checkpoint_count--;
    memmove(&l->checkpoints[oldest], &l->checkpoints[oldest + 1],
            (l->checkpoint_count - oldest) * sizeof(*l->checkpoints));
    l->scan_from -= oldest < l->scan_from;
}

void leader_checkpoint_add(struct core_leader *l, const struct core_checkpoint *c)
{
    for (uint32_t i = 0; i < l->checkpoint_count; i++) {
        if (l->checkpoints[i].root == c->root && strcmp(l->checkpoints[i].dir, c->dir) == 0) {
            return;
        }
    }
    if (l->checkpoint_count == LEADER_CHECKPOINTS) {
        checkpoint_drop_oldest(l);
    }
    struct core_checkpoint *grown = core_alloc(l->checkpoint_count + 1, sizeof(*grown));
    if (l->checkpoint_count) {
        memcpy(grown, l->checkpoints, l->checkpoint_count * sizeof(*grown));
    }
    grown[l->checkpoint_count++] = *c;
    free(l->checkpoints);
    l->checkpoints = grown;
}

void core_leader_on_scan_done(struct core_leader *l, int rc, uint32_t failed,
                              const struct core_checkpoint *found, uint32_t count, uint64_t now_ms)
{
    l->now_ms = now_ms;
    if (!l->scan_pending || l->scan_answered) {
        return;
    }
    l->scan_answered = 1;
    l->scan_rc = rc;
    l->scan_failed = rc < 0 && failed == 0 ? UINT32_MAX : failed;
    free(l->scan_found);
    l->scan_found = NULL;
    l->scan_found_count = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (found[i].root < l->config.root_count) {
            l->scan_found = core_grow(l->scan_found, l->scan_found_count, sizeof(*found));
            l->scan_found[l->scan_found_count++] = found[i];
        }
    }
    leader_scan_finish(l);
    leader_stir(l);
}

static void scan_failures(struct core_leader *l, uint32_t failed, int rc)
{
    for (uint32_t i = 0; i < l->config.root_count; i++) {
        struct leader_root *root = &l->roots[i];
        uint32_t is_failed = failed >> i & 1;
        if (is_failed && !root->scan_failed) {
            struct core_event *e = leader_event(l, CORE_EVENT_SCAN_FAILED);
            e->exit_code = rc;
            snprintf(e->text, sizeof(e->text), "%.250s", root->path);
        }
        root->scan_failed = is_failed;
    }
}

/* What was read back in an earlier leader's time is marked on the roots. */
static void scan_verified(struct core_leader *l, const struct core_checkpoint *found,
                          uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        const struct core_checkpoint *c = &found[i];
        struct leader_root *root = &l->roots[c->root];
        if (c->complete && c->verified && !leader_is_bad(l, c->root, c->dir) &&
            leader_copy_is_admissible(&l->record, c->generation, c->step) &&
            (root->verified_step == UINT64_MAX || c->step > root->verified_step)) {
            root->verified_step = c->step;
        }
    }
}

void leader_scan_finish(struct core_leader *l)
{
    if (!l->scan_pending || !l->scan_answered || !leader_apart_is_scanned(l)) {
        return;
    }
    l->scan_pending = 0;
    uint32_t failed =
        leader_apart_assemble(l, &l->scan_found, &l->scan_found_count) | l->scan_failed;
    scan_failures(l, failed, l->scan_rc ? l->scan_rc : -EIO);
    struct core_checkpoint *before = l->checkpoints;
    uint32_t before_count = l->checkpoint_count;
    checkpoints_take(l, l->scan_found, l->scan_found_count);
    scan_verified(l, l->scan_found, l->scan_found_count);
    free(l->scan_found);
    l->scan_found = NULL;
    l->scan_found_count = 0;
    for (uint32_t i = l->scan_from; i < before_count; i++) {
        leader_checkpoint_add(l, &before[i]); /* its root may have been read before its commit */
    }
    free(before);
    l->scan_done = !l->scan_again;
    l->scan_again = 0;
    l->scan_retry_ms = l->now_ms + (leader_roots_unscanned(l) ? LEADER_STORE_RETRY_MS : 0);
    l->settle_ms = l->now_ms + (leader_roots_unscanned(l) ? ROOT_SETTLE_RETRY_MS : 0);
    leader_stir(l);
}

int leader_scan_lacks(const struct core_leader *l, const struct leader_pick *pick)
{
    for (uint32_t i = 0; i < l->config.root_count; i++) {
        if (!l->roots[i].scan_failed && !l->roots[i].incomplete) {
            continue;
        }
        uint64_t next = leader_root_next(l, i);
        /* With nothing at all a run would begin anew over what may be there: never. Else what the
         * record knows of is waited for, as long as a load may take; then an older one is used. */
        if (!pick->found ||
            (next > pick->step + 1 && l->now_ms - l->phase_ms < l->config.deadlines.load)) {
            return (int)i;
        }
    }
    return -1;
}

void leader_scan_wait(struct core_leader *l, uint32_t root)
{
    const struct leader_root *r = &l->roots[root];

    if (r->scan_failed) {
        leader_wait_set(l, CORE_WAIT_SCAN, "root %.200s, which cannot be looked at", r->path);
    } else {
        leader_wait_set(l, CORE_WAIT_SCAN, "all parts of %.230s", r->lacks);
    }
    leader_scan_want(l);
}

/* ---- commits without an answer ---- */

static void root_settle(struct core_leader *l, uint32_t root)
{
    const struct wire_record_root *r = &l->record.roots[root];
    const struct core_checkpoint *found = NULL;

    for (uint32_t i = 0; i < l->checkpoint_count; i++) {
        const struct core_checkpoint *c = &l->checkpoints[i];
        int is_there = c->complete || (c->prepared && c->attempt == r->committing_attempt);
        if (c->root == root && is_there && c->step == r->committing_step &&
            leader_copy_is_admissible(&l->record, c->generation, c->step)) {
            found = c;
        }
    }
    if (r->committing_attempt == l->roots[root].cancelled) {
        found = NULL; /* the nodes were told to drop it: whatever one of them still had then */
    }
    struct wire_record *next =
        leader_change_begin(l, found ? LEADER_COMMITTED : LEADER_COMMIT_FAILED);
    struct wire_record_root *to = &next->roots[root];
    to->committing_attempt = 0;
    to->committing_step = 0;
    if (found) {
        to->committed_step = found->step;
        to->committed_generation = found->generation;
        to->committed_digest = found->manifest_digest;
        memcpy(to->committed_dir, found->dir, sizeof(to->committed_dir));
    }
    leader_record_newest(next);
    l->change_root = root;
    leader_change_send(l);
}

/* Is this commit the one that a save of ours is at? */
static int root_has_commit(struct core_leader *l, uint32_t root)
{
    const struct leader_save *s = leader_save_of(l, root);
    return s && s->save.attempt == l->record.roots[root].committing_attempt;
}

void leader_roots_settle(struct core_leader *l)
{
    for (uint32_t i = 0; i < l->config.root_count; i++) {
        if (!l->record.roots[i].committing_attempt || root_has_commit(l, i) || l->roots[i].stuck ||
            !leader_change_is_free(l)) {
            continue;
        }
        if (l->record.roots[i].committing_attempt == l->roots[i].cancelled) {
            root_settle(l, i);
            continue;
        }
        if (!l->scan_done) {
            leader_scan_want(l);
            continue;
        }
        if (l->roots[i].scan_failed) {
            if (l->now_ms >= l->settle_ms) {
                leader_scan_want(l);
            }
            continue;
        }
        root_settle(l, i);
    }
}

/* ---- what is never loaded again ---- */

void leader_bad_add(struct core_leader *l, const char *root, const char *dir)
{
    if (l->bad_dir_count == LEADER_BAD_MAX) {
        return;
    }
    struct leader_bad *bad = &l->bad_dirs[l->bad_dir_count];
    bad->root = UINT32_MAX;
    for (uint32_t i = 0; i < l->config.root_count; i++) {
        bad->root = strcmp(l->roots[i].path, root) == 0 ? i : bad->root;
    }
    snprintf(bad->dir, sizeof(bad->dir), "%s", dir);
    l->bad_dir_count += !leader_is_bad(l, bad->root, dir);
}

int leader_is_bad(const struct core_leader *l, uint32_t root, const char *dir)
{
    for (uint32_t i = 0; i < l->bad_dir_count; i++) {
        if (l->bad_dirs[i].root == root && strcmp(l->bad_dirs[i].dir, dir) == 0) {
            return 1;
        }
    }
    return 0;
}

/* It was mended, or what was read was wrong. */
static void bad_remove(struct core_leader *l, uint32_t root, const char *dir)
{
    for (uint32_t i = 0; i < l->bad_dir_count; i++) {
        if (l->bad_dirs[i].root == root && strcmp(l->bad_dirs[i].dir, dir) == 0) {
            l->bad_dirs[i] = l->bad_dirs[--l->bad_dir_count];
            return;
        }
    }
}

void core_leader_on_verified(struct core_leader *l, uint32_t root, uint64_t step, const char *dir,
                             int rc, const char *text, uint64_t elapsed_ms, uint64_t now_ms)
{
    l->now_ms = now_ms;
    if (root >= l->config.root_count) {
        return;
    }
    struct leader_root *r = &l->roots[root];
    if (rc == -ENOENT && step < r->verified_step + 1) {
        return; /* newer ones are verified: it was removed by the root's rules meanwhile */
    }
    struct core_event *e =
        leader_event(l, rc == 0 ? CORE_EVENT_SAVE_VERIFIED : CORE_EVENT_VERIFY_FAILED);
    e->step = step;
    e->value_ms = elapsed_ms;
    e->exit_code = rc;
    if (rc == 0) {
        if (r->verified_step == UINT64_MAX || step > r->verified_step ||
            step == l->record.roots[root].committed_step) {
            r->verified_step = step; /* older ones may be read back later */
        }
        if (r->verify_failed_step == step) {
            r->verify_failed_step = UINT64_MAX;
            bad_remove(l, root, dir);
        }
        snprintf(e->text, sizeof(e->text), "%.120s/%.120s", r->path, dir);
        return;
    }
    r->verify_failed_step = step;
    snprintf(e->text, sizeof(e->text), "%.100s/%.48s: %.100s", r->path, dir, text ? text : "");
    if (rc == BL_EDIGEST || rc == BL_EFORMAT) {
        leader_bad_add(l, r->path, dir);
    }
}

void core_leader_on_root(struct core_leader *l, uint32_t root, int is_stuck, const char *text,
                         uint64_t now_ms)
{
    l->now_ms = now_ms;
    if (root >= l->config.root_count || l->roots[root].stuck == (uint32_t)(is_stuck != 0)) {
        return;
    }
    l->roots[root].stuck = is_stuck != 0;
    struct core_event *e = leader_event(l, is_stuck ? CORE_EVENT_ROOT_STUCK : CORE_EVENT_ROOT_BACK);
    snprintf(e->text, sizeof(e->text), "%.120s%s%.120s", l->roots[root].path,
             text && text[0] ? ": " : "", text ? text : "");
    leader_stir(l);
}

/* ---- status ---- */

static int is_replicated(const struct core_leader *l, uint32_t root)
{
    for (uint32_t i = 0; i < l->config.root_count; i++) {
        if (i != root && leader_root_next(l, i) &&
            l->roots[i].verify_failed_step != l->record.roots[i].committed_step &&
            leader_root_next(l, i) == leader_root_next(l, root)) {
            return 1;
        }
    }
    return 0;
}

static void root_status(const struct core_leader *l, uint32_t index, struct core_status_root *ret)
{
    const struct leader_root *root = &l->roots[index];
    const struct wire_record_root *r = &l->record.roots[index];
    uint64_t next = leader_root_next(l, index); /* one of a line that ended is none */

    snprintf(ret->path, sizeof(ret->path), "%s", root->path);
    ret->every = root->interval;
    ret->is_auto = root->every == CORE_EVERY_AUTO;
    ret->stuck = root->stuck;
    ret->committed_step = next ? next - 1 : UINT64_MAX;
    memset(ret->dir, 0, sizeof(ret->dir));
    if (next) {
        memcpy(ret->dir, r->committed_dir, sizeof(ret->dir));
    }
    ret->replicated = (uint32_t)is_replicated(l, index);
    ret->verified_step = root->verified_step;
    ret->verify_failed_step = root->verify_failed_step;
    ret->committed = root->committed;
    ret->failed = root->failed;
    ret->failing = root->failing;
    ret->skipped = root->skipped;
    ret->last_ms = root->last_ms;
    ret->last_bytes = root->last_bytes;
    ret->last_raw_bytes = root->last_raw_bytes;
    ret->inflation = leader_interval_inflation(l, index);
    ret->stall_ms =
        ret->inflation > 1000 ? root->save_ms * (ret->inflation - 1000) / ret->inflation : 0;
}

static enum core_save_state save_state(const struct leader_save *s)
{
    uint32_t written = 0;
    for (uint32_t i = 0; i < s->part_count; i++) {
        written += s->parts[i].written;
    }
    return s->stage == LEADER_SAVE_WRITING && written < s->part_count ? CORE_SAVE_STAGED
                                                                      : CORE_SAVE_WRITTEN;
}

void leader_roots_status(const struct core_leader *l, struct core_status *ret, uint64_t now_ms)
{
    ret->root_count = l->config.root_count;
    for (uint32_t i = 0; i < l->config.root_count; i++) {
        root_status(l, i, &ret->roots[i]);
    }
    for (uint32_t i = 0; i < l->save_count; i++) {
        const struct leader_save *s = &l->saves[i];
        if (s->stage == LEADER_SAVE_ENDED) {
            continue;
        }
        struct core_status_save *out = &ret->saves[ret->save_count++];
        out->attempt = s->save.attempt;
        out->step = s->save.step;
        out->root = s->save.root;
        out->state = save_state(s);
        out->age_ms = now_ms - s->started_ms;
        out->nodes = s->part_count;
        for (uint32_t k = 0; k < s->part_count; k++) {
            out->written += s->parts[k].written;
        }
    }
}
