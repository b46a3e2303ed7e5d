/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Saves: from pinned slots to a committed checkpoint.
 *
 *      pinned slots of a step that hold the whole state
 *        WRITING ---- all parts durable ---> STORING      (compare-and-swap COMMITTING)
 *           |                                   |
 *           | a part failed, too late,       COMMITTING   (the engine: manifest, rename)
 *           | void, node came back empty        |
 *           v                                RECORDING    (compare-and-swap COMMITTED)
 *         ENDED <-------------------------------+
 *
 * One at a time. Which arenas make the save is decided once and told with it; they may be of
 * ranks that died meanwhile. An ended save is told to its nodes until none of them names it.
 */
#include "daemon/core/leader_state.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void save_close(struct leader_save *s)
{
    for (uint32_t i = 0; i < s->part_count; i++) {
        free(s->parts[i].part_json);
    }
    free(s->parts);
    free(s->save.arenas);
    memset(s, 0, sizeof(*s));
}

void leader_saves_close(struct core_leader *l)
{
    for (uint32_t i = 0; i < l->save_count; i++) {
        save_close(&l->saves[i]);
    }
    l->save_count = 0;
}

static struct leader_save *save_active(struct core_leader *l)
{
    for (uint32_t i = 0; i < l->save_count; i++) {
        if (l->saves[i].stage != LEADER_SAVE_ENDED) {
            return &l->saves[i];
        }
    }
    return NULL;
}

static void save_dirty(struct core_leader *l, const struct leader_save *s)
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

static void unpin_through(struct core_leader *l, uint64_t step)
{
    if (step > l->unpin_through) {
        l->unpin_through = step;
        leader_dirty_all(l);
    }
}

/* ---- ends ---- */

static void save_failed(struct core_leader *l, struct leader_save *s, const char *text)
{
    int is_last = l->ended && s->save.step == l->end_step;

    if (s->stage == LEADER_SAVE_COMMITTING) {
        l->scan_done = 0; /* it may be there all the same: saves_settle looks */
    }

    s->stage = LEADER_SAVE_ENDED;
    s->save.state = WIRE_SAVE_CANCELLED;
    l->saves_failed++;
    save_dirty(l, s);
    struct core_event *e = leader_event(l, CORE_EVENT_SAVE_FAILED);
    e->step = s->save.step;
    snprintf(e->text, sizeof(e->text), "%s", text);
    if (is_last) {
        l->last_save_failed = ++l->save_tries >= LEADER_SAVE_TRIES;
    } else {
        unpin_through(l, s->save.step); /* training is not held: the next save tries again */
    }
}

static void save_committed(struct core_leader *l, struct leader_save *s)
{
    s->stage = LEADER_SAVE_ENDED;
    s->save.state = WIRE_SAVE_COMMITTED;
    l->saves_committed++;
    save_dirty(l, s);
    unpin_through(l, s->save.step);
    if (l->save_asked && s->save.step >= l->save_asked_step) {
        l->save_asked = 0;
    }
    struct core_event *e = leader_event(l, CORE_EVENT_SAVE_COMMITTED);
    e->step = s->save.step;
    e->value_ms = l->now_ms - s->started_ms;
    e->count = s->part_count;
    snprintf(e->text, sizeof(e->text), "%s", s->save.dir);
    ((struct core_leader_effect *)core_ring_push(&l->effects))->kind = CORE_LEADER_RETAIN;
    if (l->checkpoint_count == LEADER_CHECKPOINTS) {
        memmove(l->checkpoints, l->checkpoints + 1,
                (LEADER_CHECKPOINTS - 1) * sizeof(*l->checkpoints));
        l->checkpoint_count--;
    }
    struct core_checkpoint *grown = core_alloc(l->checkpoint_count + 1, sizeof(*grown));
    if (l->checkpoint_count) {
        memcpy(grown, l->checkpoints, l->checkpoint_count * sizeof(*grown));
    }
    free(l->checkpoints);
    l->checkpoints = grown;
    struct core_checkpoint *c = &grown[l->checkpoint_count++];
    *c = (struct core_checkpoint){.root = s->save.root,
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
    memcpy(c->dir, s->save.dir, sizeof(c->dir));
}

void leader_saves_void(struct core_leader *l, uint64_t step)
{
    for (uint32_t i = 0; i < l->save_count; i++) {
        struct leader_save *s = &l->saves[i];
        if ((s->stage == LEADER_SAVE_WRITING || s->stage == LEADER_SAVE_STORING) &&
            s->save.step > step && s->save.generation < l->record.generation &&
            leader_has_rule(l, WIRE_RULE_COMMIT_NEEDS_GENERATION)) {
            s->stage = LEADER_SAVE_ENDED;
            s->save.state = WIRE_SAVE_CANCELLED;
            save_dirty(l, s);
        }
    }
}

/* ---- start ---- */

/* Newest pinned step that is sealed, admissible and not committed. 0 none. */
static uint64_t pinned_newest(const struct core_leader *l)
{
    uint64_t newest = 0;
    uint64_t committed = l->record.committed_step;
    for (uint32_t n = 0; n < l->node_count; n++) {
        const struct wire_report *report = &l->nodes[n].report;
        for (uint32_t a = 0; l->nodes[n].connected && a < report->arena_count; a++) {
            for (uint32_t k = 0; k < report->arenas[a].slot_count; k++) {
                const struct wire_slot_info *slot = &report->arenas[a].slots[k];
                if (slot->state == WIRE_SLOT_SEALED && slot->pinned && slot->step > newest &&
                    slot->step > l->unpin_through &&
                    (committed == UINT64_MAX || slot->step > committed) &&
                    leader_copy_is_admissible(&l->record, slot->generation, slot->step)) {
                    newest = slot->step;
                }
            }
        }
    }
    return newest;
}

/* Have all members sealed steps so far beyond that a pin of this step can no longer appear? */
static int pin_is_stale(const struct core_leader *l, uint64_t step)
{
    const struct wire_plan *plan = &l->record.plan;
    for (uint32_t i = 0; i < plan->world; i++) {
        const struct leader_proc *p = leader_proc_find(l, plan->members[i].incarnation);
        const struct wire_arena_info *arena = p && l->nodes[p->node].connected
                                                  ? leader_arena_find(l, p->node, p->report.arena)
                                                  : NULL;
        uint64_t newest = 0;
        for (uint32_t k = 0; arena && k < arena->slot_count; k++) {
            if (arena->slots[k].state == WIRE_SLOT_SEALED &&
                arena->slots[k].generation == plan->generation && arena->slots[k].step > newest) {
                newest = arena->slots[k].step;
            }
        }
        if (newest < step + 2) {
            return 0;
        }
    }
    return 1;
}

static void save_parts(struct leader_save *s, const struct leader_set *set)
{
    s->parts = core_alloc(set->arena_count, sizeof(*s->parts));
    for (uint32_t i = 0; i < set->arena_count; i++) {
        struct leader_part *part = NULL;
        for (uint32_t k = 0; k < s->part_count; k++) {
            part = s->parts[k].node == set->nodes[i] ? &s->parts[k] : part;
        }
        if (!part) {
            part = &s->parts[s->part_count++];
            part->node = set->nodes[i];
        }
        part->arena_count++;
    }
}

static void save_start(struct core_leader *l, uint64_t step, struct leader_set *set)
{
    struct leader_save *s = &l->saves[l->save_count++];
    memset(s, 0, sizeof(*s));
    s->started_ms = l->now_ms;
    s->digest = set->digest;
    s->world = l->record.plan.world ? l->record.plan.world : set->arena_count;
    s->save = (struct wire_save){.attempt = leader_random(l),
                                 .step = step,
                                 .generation = set->generation,
                                 .line = l->record.line,
                                 .state = WIRE_SAVE_WRITE,
                                 .arena_count = set->arena_count,
                                 .arenas = set->arenas};
    set->arenas = NULL; /* the save's now */
    snprintf(s->save.dir, sizeof(s->save.dir), "step-%012" PRIu64 ".g%" PRIu64, step,
             set->generation);
    save_parts(s, set);
    save_dirty(l, s);
    struct core_event *e = leader_event(l, CORE_EVENT_SAVE_STARTED);
    e->step = step;
    e->count = s->part_count;
}

static void saves_start(struct core_leader *l)
{
    int is_phase = l->record.phase == WIRE_PHASE_RUNNING || l->stop_saving;

    if (!is_phase || save_active(l) || l->save_count >= 4 || l->config.root_count == 0 ||
        l->last_save_failed) {
        return;
    }
    uint64_t committed = l->record.committed_step;
    uint64_t step = pinned_newest(l);
    struct leader_set set;

    if (l->ended && (committed == UINT64_MAX || l->end_step > committed)) {
        step = l->end_step; /* nobody reuses a slot any more: pinned or not */
    }
    if (step == 0) {
        return;
    }
    if (leader_set_find(l, step, !l->ended, &set)) {
        save_start(l, step, &set);
    } else if (!l->ended && pin_is_stale(l, step)) {
        l->saves_skipped++;
        unpin_through(l, step);
    }
    leader_set_close(&set);
}

/* ---- progress ---- */

/* Does the node still hold what it is to write? A machine that came back does not. */
static int part_has_arenas(const struct core_leader *l, const struct leader_save *s,
                           const struct leader_part *part)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < s->save.arena_count; i++) {
        count += leader_arena_find(l, part->node, s->save.arenas[i]) != NULL;
    }
    return count >= part->arena_count;
}

void leader_saves_report(struct core_leader *l, uint32_t node)
{
    const struct wire_report *report = &l->nodes[node].report;
    struct leader_save *s = save_active(l);

    for (uint32_t k = 0; s && s->stage == LEADER_SAVE_WRITING && k < s->part_count; k++) {
        if (s->parts[k].node == node && !s->parts[k].written &&
            !part_has_arenas(l, s, &s->parts[k])) {
            save_failed(l, s, "a node lost the memory that it was to write");
            return;
        }
    }
    for (uint32_t i = 0; s && i < report->save_count; i++) {
        const struct wire_save *part = &report->saves[i];
        if (part->attempt != s->save.attempt || s->stage != LEADER_SAVE_WRITING) {
            continue;
        }
        if (part->state == WIRE_SAVE_FAILED) {
            save_failed(l, s, part->text);
            return;
        }
        for (uint32_t k = 0; k < s->part_count; k++) {
            if (s->parts[k].node == node && part->state == WIRE_SAVE_WRITTEN &&
                !s->parts[k].written) {
                s->parts[k].written = 1;
                s->parts[k].part_json = strdup(part->part_json ? part->part_json : "{}");
                BL_ASSERT(s->parts[k].part_json);
            }
        }
    }
}

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
    if (!leader_change_is_free(l)) {
        return;
    }
    struct wire_record *next = leader_change_begin(l, LEADER_COMMITTING);
    next->committing_attempt = s->save.attempt;
    next->committing_step = s->save.step;
    s->stage = LEADER_SAVE_STORING;
    leader_change_send(l);
}

static void save_record(struct core_leader *l, struct leader_save *s)
{
    if (!leader_change_is_free(l)) {
        return;
    }
    struct wire_record *next = leader_change_begin(l, LEADER_COMMITTED);
    next->committing_attempt = 0;
    next->committing_step = 0;
    next->committed_step = s->save.step;
    next->committed_generation = s->save.generation;
    next->committed_digest = s->manifest_digest;
    memcpy(next->committed_dir, s->save.dir, sizeof(next->committed_dir));
    leader_change_send(l);
}

void core_leader_on_commit_done(struct core_leader *l, uint64_t attempt, int rc, const char *text,
                                uint64_t manifest_digest, uint64_t now_ms)
{
    struct leader_save *s = save_active(l);
    l->now_ms = now_ms;
    if (!s || s->save.attempt != attempt || s->stage != LEADER_SAVE_COMMITTING) {
        return;
    }
    if (rc < 0) {
        save_failed(l, s, text ? text : "");
    } else {
        s->manifest_digest = manifest_digest;
        s->stage = LEADER_SAVE_RECORDING;
    }
    leader_stir(l);
}

void leader_saves_stored(struct core_leader *l, enum leader_change change)
{
    struct leader_save *s = save_active(l);
    if (s && change == LEADER_COMMITTING && s->stage == LEADER_SAVE_STORING) {
        save_commit(l, s);
    } else if (s && change == LEADER_COMMITTED && s->stage == LEADER_SAVE_RECORDING) {
        save_committed(l, s);
    } else if (change == LEADER_COMMITTED) {
        unpin_through(l, l->record.committed_step); /* settled by a scan */
    }
}

void leader_saves_unstored(struct core_leader *l, enum leader_change change)
{
    struct leader_save *s = save_active(l);
    if (s && change == LEADER_COMMITTING && s->stage == LEADER_SAVE_STORING) {
        s->stage = LEADER_SAVE_WRITING;
    }
}

uint64_t leader_saves_committing(const struct core_leader *l)
{
    for (uint32_t i = 0; i < l->save_count; i++) {
        const struct leader_save *s = &l->saves[i];
        if (s->stage == LEADER_SAVE_STORING || s->stage == LEADER_SAVE_COMMITTING ||
            s->stage == LEADER_SAVE_RECORDING) {
            return s->save.step;
        }
    }
    return 0;
}

/* A commit that an earlier leader, or a save given up, left in the record: the disk knows. */
static void saves_settle(struct core_leader *l)
{
    uint64_t attempt = l->record.committing_attempt;
    if (!attempt || save_active(l) || !leader_change_is_free(l)) {
        return;
    }
    if (!l->scan_done) {
        l->scan_wanted |= !l->scan_pending;
        return;
    }
    const struct core_checkpoint *found = NULL;
    for (uint32_t i = 0; i < l->checkpoint_count; i++) {
        const struct core_checkpoint *c = &l->checkpoints[i];
        if (c->complete && c->step == l->record.committing_step &&
            leader_copy_is_admissible(&l->record, c->generation, c->step)) {
            found = c;
        }
    }
    struct wire_record *next =
        leader_change_begin(l, found ? LEADER_COMMITTED : LEADER_COMMIT_FAILED);
    next->committing_attempt = 0;
    next->committing_step = 0;
    if (found) {
        next->committed_step = found->step;
        next->committed_generation = found->generation;
        next->committed_digest = found->manifest_digest;
        memcpy(next->committed_dir, found->dir, sizeof(next->committed_dir));
    }
    leader_change_send(l);
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

static void saves_skipped(struct core_leader *l)
{
    const struct wire_plan *plan = &l->record.plan;
    const struct leader_proc *p =
        plan->world ? leader_proc_find(l, plan->members[0].incarnation) : NULL;
    if (p && p->report.skipped_save > l->skipped_told) {
        l->skipped_told = p->report.skipped_save;
        l->saves_skipped++;
        leader_event(l, CORE_EVENT_SAVE_SKIPPED)->step = l->skipped_told;
    }
}

void leader_saves_step(struct core_leader *l)
{
    struct leader_save *s = save_active(l);

    saves_settle(l);
    saves_skipped(l);
    if (s && s->stage == LEADER_SAVE_WRITING) {
        uint32_t written = 0;
        for (uint32_t i = 0; i < s->part_count; i++) {
            written += s->parts[i].written;
        }
        if (written == s->part_count) {
            save_written(l, s);
        }
    }
    if (s && s->stage == LEADER_SAVE_RECORDING) {
        save_record(l, s);
    }
    if (s && (s->stage == LEADER_SAVE_WRITING || s->stage == LEADER_SAVE_COMMITTING) &&
        l->now_ms - s->started_ms >= l->config.deadlines.save) {
        save_failed(l, s, "not done within its deadline");
    }
    saves_sweep(l);
    saves_start(l);
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
                                .root_path = l->roots[s->save.root],
                                .dir = s->save.dir,
                                .digest = s->digest,
                                .state_elems = l->record.state_elems,
                                .function_id = l->record.function_id,
                                .world = s->world,
                                .part_count = s->part_count};
    ret->parts = core_alloc(s->part_count, sizeof(*ret->parts));
    for (uint32_t i = 0; i < s->part_count; i++) {
        memcpy(ret->parts[i].node, l->nodes[s->parts[i].node].name, sizeof(ret->parts[i].node));
        ret->parts[i].part_json = s->parts[i].part_json;
    }
    return 0;
}
