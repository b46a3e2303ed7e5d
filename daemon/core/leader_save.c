/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Saves: from pinned slots to a committed checkpoint, each to one root.
 *
 *      pinned slots of a step that hold the whole state
 *        WRITING ---- all parts durable ---> STORING      (compare-and-swap COMMITTING)
 *           |                                   |
 *           | a part failed, too late,       COMMITTING   (the engine: manifest, rename)
 *           | void, node came back empty        |
 *           v                                RECORDING    (compare-and-swap COMMITTED)
 *         ENDED <-------------------------------+
 *
 * One at a time on each root; roots do not wait for each other, and a step's slots stay pinned
 * until all saves of it are over. Which arenas make the save is decided once and told with it; they
 * may be of ranks that died meanwhile. An ended save is told to its nodes until none of them names
 * it.
 *
 * Where each node has the root for itself (apart), no rename can be the commit: between COMMITTING
 * and RECORDING the manifest goes to all of them (PREPARING), COMMITTED in the store is the commit,
 * and an ended save is told on until the nodes have given it its final name, and have read back
 * what they have of it; then (VERIFIED) they may retire older ones.
 */
#include "daemon/core/leader_state.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void save_close(struct leader_save *s)
{
    for (uint32_t i = 0; i < s->part_count; i++) {
        free(s->parts[i].part_json);
        bl_extent_list_close(&s->parts[i].pick);
    }
    free(s->parts);
    wire_save_close(&s->save);
    memset(s, 0, sizeof(*s));
}

void leader_save_forget(struct core_leader *l, struct leader_save *s)
{
    leader_save_dirty(l, s);
    save_close(s);
    *s = l->saves[--l->save_count];
    memset(&l->saves[l->save_count], 0, sizeof(l->saves[0]));
}

struct leader_part *leader_part_find(const struct leader_save *s, uint32_t node)
{
    uint32_t lo = 0, hi = s->part_count;

    while (lo < hi) {
        uint32_t at = lo + (hi - lo) / 2;
        if (s->parts[at].node < node) {
            lo = at + 1;
        } else {
            hi = at;
        }
    }
    return lo < s->part_count && s->parts[lo].node == node ? &s->parts[lo] : NULL;
}

void leader_saves_close(struct core_leader *l)
{
    for (uint32_t i = 0; i < l->save_count; i++) {
        save_close(&l->saves[i]);
    }
    l->save_count = 0;
}

struct leader_save *leader_save_of(struct core_leader *l, uint32_t root)
{
    for (uint32_t i = 0; i < l->save_count; i++) {
        if (l->saves[i].stage != LEADER_SAVE_ENDED && l->saves[i].save.root == root) {
            return &l->saves[i];
        }
    }
    return NULL;
}

int leader_saves_any(const struct core_leader *l)
{
    for (uint32_t i = 0; i < l->save_count; i++) {
        if (l->saves[i].stage != LEADER_SAVE_ENDED) {
            return 1;
        }
    }
    return 0;
}

void leader_save_dirty(struct core_leader *l, const struct leader_save *s)
{
    for (uint32_t i = 0; i < s->part_count; i++) {
        l->nodes[s->parts[i].node].dirty = 1;
    }
}

int leader_save_holds(const struct core_leader *l, uint64_t arena)
{
    for (uint32_t i = 0; i < l->save_count; i++) {
        const struct leader_save *s = &l->saves[i];
        for (uint32_t k = 0; s->stage != LEADER_SAVE_ENDED && k < s->save.arena_count; k++) {
            if (s->save.arenas[k] == arena) {
                return 1;
            }
        }
    }
    return 0;
}

/* ---- ends ---- */

/* What was asked for is done when a checkpoint stands and no root is at it any more. */
static void save_asked_end(struct core_leader *l)
{
    for (uint32_t i = 0; i < l->save_count; i++) {
        if (l->saves[i].stage != LEADER_SAVE_ENDED && l->saves[i].save.step >= l->save_asked_step) {
            return;
        }
    }
    if (l->save_asked && l->save_asked_done) {
        l->save_asked = 0;
        l->save_asked_done = 0;
    } else if (l->save_asked && l->save_asked_tries >= LEADER_SAVE_TRIES * l->config.root_count) {
        l->save_asked = 0; /* a disk that is full stays full: whoever asked hears of it */
        struct core_event *e = leader_event(l, CORE_EVENT_SAVE_GIVEN_UP);
        e->step = l->save_asked_step;
        e->count = l->save_asked_tries;
        memcpy(e->text, l->save_failed_text, sizeof(e->text));
    }
}

static void save_end(struct core_leader *l, struct leader_save *s, enum wire_save_state state)
{
    s->stage = LEADER_SAVE_ENDED;
    s->save.state = state;
    leader_dirty_all(l); /* its pins may go */
    save_asked_end(l);
}

void leader_save_fail(struct core_leader *l, struct leader_save *s, const char *text)
{
    struct leader_root *root = &l->roots[s->save.root];

    if (s->save.apart) {
        root->cancelled = s->save.attempt; /* the nodes will drop it: it is never committed */
    } else if (s->stage == LEADER_SAVE_COMMITTING) {
        root->doubted = s->save.attempt;
        l->scan_done = 0; /* it may be there all the same: leader_roots_settle looks */
        l->scan_again = l->scan_pending;
    }
    l->saves_failed++;
    root->failed++;
    root->failing++;
    struct core_event *e = leader_event(l, CORE_EVENT_SAVE_FAILED);
    e->step = s->save.step;
    if (l->config.root_count > 1) {
        snprintf(e->text, sizeof(e->text), "%.90s: %.160s", root->path, text);
    } else {
        snprintf(e->text, sizeof(e->text), "%s", text);
    }
    memcpy(l->save_failed_text, e->text, sizeof(l->save_failed_text));
    l->save_asked_tries += l->save_asked && s->save.step >= l->save_asked_step;
    /* Else training is not held: the next save tries again. */
    root->tries += l->ended && s->save.step == l->end_step;
    /* While the record says that it commits, the next leader may commit what it finds prepared: the
     * nodes are told to drop it when the record no longer does. */
    int is_recorded =
        s->save.apart && l->record.roots[s->save.root].committing_attempt == s->save.attempt;
    save_end(l, s, is_recorded ? s->save.state : WIRE_SAVE_CANCELLED);
}

/* The record no longer says that it commits. */
static void saves_drop(struct core_leader *l, uint64_t attempt)
{
    for (uint32_t i = 0; i < l->save_count; i++) {
        struct leader_save *s = &l->saves[i];
        if (s->save.attempt == attempt && s->stage == LEADER_SAVE_ENDED) {
            s->save.state = WIRE_SAVE_CANCELLED;
            leader_save_dirty(l, s);
        }
    }
}

static uint32_t parts_bare(const struct leader_save *s)
{
    uint32_t bare = 0;
    for (uint32_t i = 0; i < s->part_count; i++) {
        bare += s->parts[i].bare;
    }
    return bare;
}

/* The new checkpoint, as a scan would find it. */
static void save_found(struct core_leader *l, const struct leader_save *s)
{
    struct core_checkpoint c = {.root = s->save.root,
                                .complete = 1,
                                .step = s->save.step,
                                .generation = s->save.generation,
                                .line = s->save.line,
                                .function_id = l->record.function_id,
                                .attempt = s->save.attempt,
                                .manifest_digest = s->manifest_digest,
                                .digest_known = 1,
                                .digest = s->digest,
                                .state_elems = l->record.state_elems};
    memcpy(c.dir, s->save.dir, sizeof(c.dir));
    leader_checkpoint_add(l, &c);
}

static void save_committed(struct core_leader *l, struct leader_save *s)
{
    struct leader_root *root = &l->roots[s->save.root];
    struct core_event *e = leader_event(l, CORE_EVENT_SAVE_COMMITTED);

    e->step = s->save.step;
    e->value_ms = l->now_ms - s->started_ms;
    e->count = s->part_count - parts_bare(s);
    if (l->config.root_count > 1) {
        snprintf(e->text, sizeof(e->text), "%.120s/%.128s", root->path, s->save.dir);
    } else {
        snprintf(e->text, sizeof(e->text), "%s", s->save.dir);
    }
    l->saves_committed++;
    root->committed++;
    root->failing = 0;
    root->last_ms = l->now_ms - s->started_ms;
    root->save_ms = root->save_ms ? (3 * root->save_ms + root->last_ms) / 4 : root->last_ms;
    root->last_raw_bytes = s->raw_bytes;
    root->last_bytes = 0;
    for (uint32_t i = 0; i < s->part_count; i++) {
        root->last_bytes += s->parts[i].bytes;
    }
    l->save_asked_done |= l->save_asked && s->save.step >= l->save_asked_step;
    if (!s->save.apart) { /* else a scan tells when the nodes have given it its name */
        save_found(l, s);
    }
    ((struct core_leader_effect *)core_ring_push(&l->effects))->kind = CORE_LEADER_RETAIN;
    save_end(l, s, WIRE_SAVE_COMMITTED);
}

void leader_saves_void(struct core_leader *l, uint64_t step)
{
    for (uint32_t i = 0; i < l->save_count; i++) {
        struct leader_save *s = &l->saves[i];
        if ((s->stage == LEADER_SAVE_WRITING || s->stage == LEADER_SAVE_STORING) &&
            s->save.step > step && s->save.generation < l->record.generation &&
            leader_has_rule(l, WIRE_RULE_COMMIT_NEEDS_GENERATION)) {
            save_end(l, s, WIRE_SAVE_CANCELLED);
        }
    }
}

/* ---- progress ---- */

static void save_commit(struct core_leader *l, struct leader_save *s)
{
    s->stage = LEADER_SAVE_COMMITTING;
    struct core_leader_effect *e = core_ring_push(&l->effects);
    e->kind = CORE_LEADER_COMMIT;
    e->attempt = s->save.attempt;
}

static void save_written(struct core_leader *l, struct leader_save *s)
{
    if (!leader_has_rule(l, WIRE_RULE_COMMIT_NEEDS_GENERATION)) {
        save_commit(l, s);
        return;
    }
    /* An earlier commit to this root of which nobody knows yet how it ended: the scan comes first.
     */
    if (!leader_change_is_free(l) || l->record.roots[s->save.root].committing_attempt) {
        return;
    }
    struct wire_record *next = leader_change_begin(l, LEADER_COMMITTING);
    next->roots[s->save.root].committing_attempt = s->save.attempt;
    next->roots[s->save.root].committing_step = s->save.step;
    leader_record_newest(next);
    l->change_root = s->save.root;
    s->stage = LEADER_SAVE_STORING;
    leader_change_send(l);
}

static void save_record(struct core_leader *l, struct leader_save *s)
{
    if (!leader_change_is_free(l)) {
        return;
    }
    struct wire_record *next = leader_change_begin(l, LEADER_COMMITTED);
    struct wire_record_root *root = &next->roots[s->save.root];
    root->committing_attempt = 0;
    root->committing_step = 0;
    root->committed_step = s->save.step;
    root->committed_generation = s->save.generation;
    root->committed_digest = s->manifest_digest;
    memcpy(root->committed_dir, s->save.dir, sizeof(root->committed_dir));
    leader_record_newest(next);
    l->change_root = s->save.root;
    leader_change_send(l);
}

/* The manifest lies at the head: the nodes take it from there. */
static void save_prepare(struct core_leader *l, struct leader_save *s)
{
    const struct leader_node *head = leader_head_node(l);

    s->save.state = WIRE_SAVE_PREPARE;
    s->save.manifest_digest = s->manifest_digest;
    if (head) {
        memcpy(s->save.source, head->report.bulk_addr, sizeof(s->save.source));
    }
    leader_save_dirty(l, s);
}

void core_leader_on_commit_done(struct core_leader *l, uint64_t attempt, int rc, const char *text,
                                uint64_t manifest_digest, uint64_t now_ms)
{
    l->now_ms = now_ms;
    for (uint32_t i = 0; i < l->save_count; i++) {
        struct leader_save *s = &l->saves[i];
        if (s->save.attempt != attempt || s->stage != LEADER_SAVE_COMMITTING) {
            continue;
        }
        if (rc < 0) {
            leader_save_fail(l, s, text ? text : "");
        } else {
            s->manifest_digest = manifest_digest;
            s->stage = s->save.apart ? LEADER_SAVE_PREPARING : LEADER_SAVE_RECORDING;
        }
        if (s->stage == LEADER_SAVE_PREPARING) {
            save_prepare(l, s);
        }
        leader_stir(l);
    }
}

/* A scan found what counted as failed: its commit had been made, and only the answer was lost. */
static void save_settled(struct core_leader *l)
{
    struct leader_root *root = &l->roots[l->change_root];
    const struct wire_record_root *r = &l->record.roots[l->change_root];

    if (!root->doubted) {
        return;
    }
    root->doubted = 0;
    root->failed--;
    root->failing = 0;
    root->committed++;
    l->saves_failed--;
    l->saves_committed++;
    l->save_asked_tries -= l->save_asked_tries > 0;
    l->save_asked_done |= l->save_asked && r->committed_step >= l->save_asked_step;
    struct core_event *e = leader_event(l, CORE_EVENT_SAVE_COMMITTED);
    e->step = r->committed_step;
    snprintf(e->text, sizeof(e->text), "%.100s/%.100s (its answer was lost)", root->path,
             r->committed_dir);
    save_asked_end(l);
}

void leader_saves_stored(struct core_leader *l, enum leader_change change)
{
    struct leader_save *s = leader_save_of(l, l->change_root);
    int is_ours = s && s->stage == LEADER_SAVE_RECORDING;

    if (change == LEADER_COMMITTED && !is_ours) {
        save_settled(l);
        return;
    }
    if (change == LEADER_COMMIT_FAILED) {
        l->roots[l->change_root].doubted = 0;
        saves_drop(l, l->roots[l->change_root].cancelled);
    }
    if (s && change == LEADER_COMMITTING && s->stage == LEADER_SAVE_STORING) {
        save_commit(l, s);
    } else if (s && change == LEADER_COMMITTED && s->stage == LEADER_SAVE_RECORDING) {
        save_committed(l, s);
    }
}

void leader_saves_unstored(struct core_leader *l, enum leader_change change)
{
    struct leader_save *s = leader_save_of(l, l->change_root);
    if (s && change == LEADER_COMMITTING && s->stage == LEADER_SAVE_STORING) {
        s->stage = LEADER_SAVE_WRITING;
    }
}

uint64_t leader_saves_committing(const struct core_leader *l)
{
    uint64_t newest = 0;
    for (uint32_t i = 0; i < l->save_count; i++) {
        const struct leader_save *s = &l->saves[i];
        if (s->stage != LEADER_SAVE_WRITING && s->stage != LEADER_SAVE_ENDED &&
            s->save.step > newest) {
            newest = s->save.step;
        }
    }
    return newest;
}

/* Does a connected node still name it? */
static int save_is_named(const struct core_leader *l, const struct leader_save *s)
{
    for (uint32_t i = 0; i < s->part_count; i++) {
        const struct leader_node *node = &l->nodes[s->parts[i].node];
        for (uint32_t k = 0; node->connected && k < node->report.save_count; k++) {
            if (node->report.saves[k].attempt == s->save.attempt) {
                return 1;
            }
        }
    }
    return 0;
}

static void saves_sweep(struct core_leader *l)
{
    for (uint32_t i = l->save_count; i-- > 0;) {
        struct leader_save *s = &l->saves[i];
        if (s->stage == LEADER_SAVE_ENDED && !save_is_named(l, s) &&
            l->now_ms - s->started_ms >= l->config.deadlines.beat) {
            save_close(s);
            l->saves[i] = l->saves[--l->save_count];
            memset(&l->saves[l->save_count], 0, sizeof(l->saves[0]));
        }
    }
}

/* Was a node given up that has not written its part? Ranks go on without it, and so do saves. */
static int save_lacks_node(const struct core_leader *l, const struct leader_save *s)
{
    for (uint32_t i = 0; i < s->part_count; i++) {
        int is_done =
            s->stage == LEADER_SAVE_WRITING ? (int)s->parts[i].written : (int)s->parts[i].prepared;
        if (!is_done && l->nodes[s->parts[i].node].lost) {
            return 1;
        }
    }
    return 0;
}

static void save_step(struct core_leader *l, struct leader_save *s)
{
    if ((s->stage == LEADER_SAVE_WRITING || s->stage == LEADER_SAVE_PREPARING) &&
        save_lacks_node(l, s)) {
        leader_save_fail(l, s, "a node was lost before its part was safe");
        return;
    }
    if (s->stage == LEADER_SAVE_WRITING) {
        uint32_t written = 0;
        for (uint32_t i = 0; i < s->part_count; i++) {
            written += s->parts[i].written;
        }
        if (written == s->part_count) {
            save_written(l, s);
        }
    }
    if (s->stage == LEADER_SAVE_PREPARING) {
        uint32_t prepared = 0;
        for (uint32_t i = 0; i < s->part_count; i++) {
            prepared += s->parts[i].prepared;
        }
        if (prepared == s->part_count) {
            s->stage = LEADER_SAVE_RECORDING;
        }
    }
    if (s->stage == LEADER_SAVE_RECORDING) {
        save_record(l, s);
    }
    if ((s->stage == LEADER_SAVE_WRITING || s->stage == LEADER_SAVE_COMMITTING ||
         s->stage == LEADER_SAVE_PREPARING) &&
        l->now_ms - s->started_ms >= l->config.deadlines.save) {
        leader_save_fail(l, s, "not done within its deadline");
    }
}

void leader_saves_step(struct core_leader *l)
{
    leader_roots_settle(l);
    leader_saves_skipped(l);
    for (uint32_t i = 0; i < l->save_count; i++) {
        save_step(l, &l->saves[i]);
    }
    saves_sweep(l);
    leader_saves_start(l);
    leader_interval_step(l);
}

int core_leader_commit(const struct core_leader *l, uint64_t attempt, struct core_commit *ret)
{
    const struct leader_save *s = NULL;
    for (uint32_t i = 0; i < l->save_count; i++) {
        if (l->saves[i].save.attempt == attempt && l->saves[i].stage == LEADER_SAVE_COMMITTING) {
            s = &l->saves[i];
        }
    }
    if (!s) {
        return -ENOENT;
    }
    *ret = (struct core_commit){.attempt = attempt,
                                .step = s->save.step,
                                .generation = s->save.generation,
                                .line = s->save.line,
                                .root = s->save.root,
                                .root_path = l->roots[s->save.root].path,
                                .dir = s->save.dir,
                                .digest = s->digest,
                                .state_elems = l->record.state_elems,
                                .function_id = l->record.function_id,
                                .world = s->world,
                                .dp = s->layout.dp,
                                .tp = s->layout.tp,
                                .pp = s->layout.pp,
                                .apart = s->save.apart,
                                .line_end_count = l->record.line_end_count,
                                .line_ends = l->record.line_ends};
    ret->parts = core_alloc(s->part_count, sizeof(*ret->parts));
    for (uint32_t i = 0; i < s->part_count; i++) {
        const struct leader_node *node = &l->nodes[s->parts[i].node];
        if (s->parts[i].bare) {
            continue;
        }
        struct core_commit_part *part = &ret->parts[ret->part_count++];
        memcpy(part->node, node->name, sizeof(part->node));
        memcpy(part->bulk_addr, node->report.bulk_addr, sizeof(part->bulk_addr));
        part->part_json = s->parts[i].part_json;
    }
    return 0;
}
