/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which steps are saved, and where to. Ranks pin a step when any root is due; when the pinned slots
 * of it are all seen, the step is decided: a save begins on each root that is due and free, one
 * that is still busy with an earlier step skips this one and counts it. After that the slots stay
 * pinned for as long as a save of the step is under way, and no longer.
 *
 *      steps        10    20    30    40    50
 *      local / 10   #--   #--   #--   #--   #--
 *      shared / 20        #----------          (40 is skipped)
 *      pinned       10    20    20,30 20,40 50
 */
#include "daemon/core/leader_state.h"

#include "base/share.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void leader_saves_decide(struct core_leader *l, uint64_t step)
{
    if (step > l->saves_through) {
        l->saves_through = step;
        leader_dirty_all(l);
    }
}

void leader_saves_tell(const struct core_leader *l, struct wire_directive *ret)
{
    uint32_t count = 0;

    ret->saves_through = l->saves_through;
    ret->unpin_through = l->saves_through; /* for ranks that do not know of kept steps */
    for (uint32_t i = 0; i < l->save_count; i++) {
        const struct leader_save *s = &l->saves[i];
        if (s->stage == LEADER_SAVE_ENDED || !leader_has_rule(l, WIRE_RULE_KEEP_SAVED)) {
            continue;
        }
        ret->saves_kept[count++] = s->save.step;
        if (s->save.step <= ret->unpin_through) {
            ret->unpin_through = s->save.step - 1;
        }
    }
    for (uint32_t i = 0; i < l->config.root_count; i++) {
        ret->every[i] = l->roots[i].interval;
    }
}

/* ---- which ---- */

/* The oldest pinned step that is not decided. 0 none. */
static uint64_t pinned_oldest(const struct core_leader *l)
{
    uint64_t oldest = 0;
    for (uint32_t n = 0; n < l->node_count; n++) {
        const struct wire_report *report = &l->nodes[n].report;
        for (uint32_t a = 0; l->nodes[n].connected && a < report->arena_count; a++) {
            for (uint32_t k = 0; k < report->arenas[a].slot_count; k++) {
                const struct wire_slot_info *slot = &report->arenas[a].slots[k];
                if (slot->state == WIRE_SLOT_SEALED && slot->pinned &&
                    slot->step > l->saves_through && (oldest == 0 || slot->step < oldest) &&
                    leader_copy_is_admissible(&l->record, slot->generation, slot->step)) {
                    oldest = slot->step;
                }
            }
        }
    }
    return oldest;
}

/* Have all members sealed this step or a later one? `away` counts those of nodes that are not
 * connected as if they had not. */
static int members_sealed(const struct core_leader *l, uint64_t step, int away)
{
    const struct wire_plan *plan = &l->record.plan;
    for (uint32_t i = 0; i < plan->world; i++) {
        const struct leader_proc *p = leader_proc_find(l, plan->members[i].incarnation);
        int is_here = p && l->nodes[p->node].connected;
        const struct wire_arena_info *arena =
            is_here ? leader_arena_find(l, p->node, p->report.arena) : NULL;
        uint64_t newest = 0;
        for (uint32_t k = 0; arena && k < arena->slot_count; k++) {
            if (arena->slots[k].state == WIRE_SLOT_SEALED &&
                arena->slots[k].generation == plan->generation && arena->slots[k].step > newest) {
                newest = arena->slots[k].step;
            }
        }
        if (newest < step && (away || (is_here && p->life == LEADER_LIVE))) {
            return 0;
        }
    }
    return 1;
}

/* Are they so far beyond the step that a pin of it can no longer appear? */
static int pin_is_stale(const struct core_leader *l, uint64_t step)
{
    return members_sealed(l, step + 2, 1);
}

/* Roots (bits) that want the step. One that no interval explains was asked for, and goes to all. */
static uint32_t roots_due(const struct core_leader *l, uint64_t step)
{
    uint32_t without = 0;
    uint32_t due = 0;

    for (uint32_t r = 0; r < l->config.root_count; r++) {
        uint64_t interval = l->roots[r].interval;
        without |= leader_root_next(l, r) <= step ? 1u << r : 0;
        due |= interval && step % interval == 0 ? 1u << r : 0;
    }
    if (due == 0 || (l->save_asked && step >= l->save_asked_step)) {
        return without;
    }
    return due & without;
}

/* Saves that stand and are still read back make room for new ones: verification is not worth a
 * checkpoint. */
static void root_make_room(struct core_leader *l, uint32_t root)
{
    struct leader_save *oldest = NULL;

    for (uint32_t i = 0; i < l->save_count; i++) {
        struct leader_save *s = &l->saves[i];
        if (s->save.root == root && s->stage == LEADER_SAVE_ENDED && s->save.apart &&
            s->save.state == WIRE_SAVE_COMMITTED &&
            (!oldest || s->started_ms < oldest->started_ms)) {
            oldest = s;
        }
    }
    if (oldest) {
        leader_save_forget(l, oldest);
    }
}

static uint32_t root_saves(const struct core_leader *l, uint32_t root)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < l->save_count; i++) {
        count += l->saves[i].save.root == root;
    }
    return count;
}

/* May a save to this root begin now? */
static int root_is_free(struct core_leader *l, uint32_t root)
{
    if (l->save_count == WIRE_SAVES_MAX ||
        root_saves(l, root) >= WIRE_SAVES_MAX / l->config.root_count) {
        root_make_room(l, root);
    }
    return !leader_save_of(l, root) && l->save_count < WIRE_SAVES_MAX &&
           root_saves(l, root) < WIRE_SAVES_MAX / l->config.root_count &&
           !l->record.roots[root].committing_attempt;
}

/* ---- start ---- */

static uint64_t set_bytes(const struct core_leader *l, const struct leader_set *set)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < set->arena_count; i++) {
        const struct wire_arena_info *arena = leader_arena_find(l, set->nodes[i], set->arenas[i]);
        for (uint32_t k = 0; arena && k < arena->extents.extent_count; k++) {
            const struct bl_extent *extent = &arena->extents.extents[k];
            bytes += bl_extent_elems(extent) *
                     bl_dtype_bytes(arena->extents.tensors[extent->tensor].dtype);
        }
    }
    return bytes;
}

static int part_order(const void *a, const void *b)
{
    uint32_t x = ((const struct leader_part *)a)->node, y = ((const struct leader_part *)b)->node;
    return x < y ? -1 : x > y;
}

/* A part for each node that has arenas of these, and the save's arenas by node. */
static void save_parts(const struct core_leader *l, struct leader_save *s, const uint64_t *arenas,
                       const uint32_t *nodes, uint32_t count)
{
    uint32_t *counts = core_alloc(l->node_count + 1, sizeof(*counts)); /* then: where they begin */

    for (uint32_t i = 0; i < count; i++) {
        counts[nodes[i] + 1]++;
    }
    s->save.arenas = core_alloc(count, sizeof(*s->save.arenas));
    s->save.arena_count = count;
    s->parts = core_alloc(count + 1, sizeof(*s->parts)); /* one more: the head's */
    for (uint32_t n = 0; n < l->node_count; n++) {
        if (counts[n + 1]) {
            s->parts[s->part_count++] =
                (struct leader_part){.node = n, .first = counts[n], .arena_count = counts[n + 1]};
        }
        counts[n + 1] += counts[n];
    }
    for (uint32_t i = 0; i < count; i++) {
        s->save.arenas[counts[nodes[i]]++] = arenas[i];
    }
    free(counts);
}

/* Gives each part what it is to write of what several hold. Parts with nothing to write go. */
static int parts_share(const struct core_leader *l, struct leader_save *s)
{
    struct bl_holding *holdings = core_alloc(s->save.arena_count, sizeof(*holdings));
    struct bl_extent_list *shares = core_alloc(s->part_count, sizeof(*shares));
    uint32_t count = 0, kept = 0;
    int rc = 0;

    for (uint32_t p = 0; p < s->part_count; p++) {
        const struct leader_part *part = &s->parts[p];
        for (uint32_t i = 0; i < part->arena_count; i++) {
            const struct wire_arena_info *arena =
                leader_arena_find(l, part->node, s->save.arenas[part->first + i]);
            holdings[count++] = (struct bl_holding){p, arena ? &arena->extents : NULL};
            rc = arena ? rc : -ENOENT;
        }
    }
    rc = rc < 0 ? rc : bl_share_make(shares, s->part_count, holdings, count, NULL);
    for (uint32_t p = 0; rc == 0 && p < s->part_count; p++) {
        if (shares[p].extent_count == 0) {
            bl_extent_list_close(&shares[p]);
            continue;
        }
        s->parts[kept] = s->parts[p];
        s->parts[kept++].pick = shares[p];
    }
    s->part_count = rc == 0 ? kept : s->part_count;
    free(shares);
    free(holdings);
    return rc;
}

/* Where replicas hold the same (ZeRO 0), each byte is written once, by some node that holds it. */
static void save_share(const struct core_leader *l, struct leader_save *s,
                       const struct leader_set *set)
{
    uint32_t count = set->arena_count + set->twin_count;
    uint64_t *arenas = core_alloc(count, sizeof(*arenas));
    uint32_t *nodes = core_alloc(count, sizeof(*nodes));

    memcpy(arenas, set->arenas, set->arena_count * sizeof(*arenas));
    memcpy(nodes, set->nodes, set->arena_count * sizeof(*nodes));
    if (set->twin_count) {
        memcpy(&arenas[set->arena_count], set->twins, set->twin_count * sizeof(*arenas));
        memcpy(&nodes[set->arena_count], set->twin_nodes, set->twin_count * sizeof(*nodes));
    }
    save_parts(l, s, arenas, nodes, count);
    if (set->twin_count && parts_share(l, s) < 0) { /* without sharing it is as good */
        free(s->parts);
        free(s->save.arenas);
        s->part_count = 0;
        save_parts(l, s, arenas, nodes, set->arena_count);
    }
    free(arenas);
    free(nodes);
}

/* Do its parts lie on nodes that have the root for themselves, and not on the head alone? Then the
 * head gets the manifest too. */
static void save_spread(struct core_leader *l, struct leader_save *s)
{
    struct leader_node *head = leader_head_node(l);
    uint32_t node = head ? (uint32_t)(head - l->nodes) : UINT32_MAX;

    if (!l->roots[s->save.root].apart || (s->part_count == 1 && s->parts[0].node == node)) {
        return;
    }
    s->save.apart = 1;
    if (head && !leader_part_find(s, node)) {
        s->parts[s->part_count++] = (struct leader_part){.node = node, .bare = 1, .written = 1};
        qsort(s->parts, s->part_count, sizeof(*s->parts), part_order);
    }
}

static void save_start(struct core_leader *l, uint32_t root, uint64_t step,
                       const struct leader_set *set)
{
    struct leader_save *s = &l->saves[l->save_count++];
    memset(s, 0, sizeof(*s));
    s->started_ms = l->now_ms;
    s->digest = set->digest;
    s->raw_bytes = set_bytes(l, set);
    s->world = l->record.plan.world ? l->record.plan.world : set->arena_count;
    s->layout = l->record.plan.world ? leader_plan_layout(l) : l->shape;
    s->save = (struct wire_save){.attempt = leader_random(l),
                                 .step = step,
                                 .generation = set->generation,
                                 .line = l->record.line,
                                 .root = root,
                                 .state = WIRE_SAVE_WRITE};
    snprintf(s->save.dir, sizeof(s->save.dir), "step-%012" PRIu64 ".g%" PRIu64, step,
             set->generation);
    save_share(l, s, set);
    save_spread(l, s);
    leader_save_dirty(l, s);
    struct core_event *e = leader_event(l, CORE_EVENT_SAVE_STARTED);
    e->step = step;
    e->count = s->part_count;
    snprintf(e->text, sizeof(e->text), "%.250s", l->roots[root].path);
}

static void root_skips(struct core_leader *l, uint32_t root, uint64_t step, const char *why)
{
    l->saves_skipped++;
    l->roots[root].skipped++;
    struct core_event *e = leader_event(l, CORE_EVENT_SAVE_SKIPPED);
    e->step = step;
    snprintf(e->text, sizeof(e->text), "%.120s: %s", l->roots[root].path, why);
}

/* The slots of the step are all there. */
static void step_decide(struct core_leader *l, uint64_t step, const struct leader_set *set)
{
    uint32_t due = roots_due(l, step);

    for (uint32_t r = 0; r < l->config.root_count; r++) {
        if (!(due & 1u << r)) {
            continue;
        }
        if (l->roots[r].stuck) { /* said once, when it was found */
            l->saves_skipped++;
            l->roots[r].skipped++;
        } else if (root_is_free(l, r)) {
            save_start(l, r, step, set);
        } else {
            root_skips(l, r, step, "the one before is still being written");
        }
    }
    leader_saves_decide(l, step);
}

static void step_given_up(struct core_leader *l, uint64_t step)
{
    uint32_t due = roots_due(l, step);
    for (uint32_t r = 0; r < l->config.root_count; r++) {
        if (due & 1u << r) {
            l->saves_skipped++;
            l->roots[r].skipped++;
        }
    }
    leader_saves_decide(l, step);
}

/* The run's last step: on every root, pinned or not, as nobody reuses a slot any more. */
static void last_start(struct core_leader *l)
{
    struct leader_set set;

    if (leader_saves_last(l) != LEADER_LAST_WAITS) {
        return;
    }
    int is_whole = leader_set_find(l, l->end_step, 0, &set);
    for (uint32_t r = 0; is_whole && r < l->config.root_count; r++) {
        const struct leader_root *root = &l->roots[r];
        if (leader_root_next(l, r) != l->end_step + 1 && root->tries < LEADER_SAVE_TRIES &&
            !root->stuck && root_is_free(l, r)) {
            save_start(l, r, l->end_step, &set);
        }
    }
    leader_set_close(&set);
}

void leader_saves_start(struct core_leader *l)
{
    int is_phase = l->record.phase == WIRE_PHASE_RUNNING || l->stop_saving;
    struct leader_set set;

    if (!is_phase || l->config.root_count == 0) {
        return;
    }
    if (l->ended) {
        last_start(l);
        return;
    }
    uint64_t step = pinned_oldest(l);
    if (step == 0) {
        return;
    }
    /* One replica may hold it whole before the others have sealed it: they write a share too. */
    if (l->record.phase == WIRE_PHASE_RUNNING && !members_sealed(l, step, 0)) {
        return;
    }
    if (leader_set_find(l, step, 1, &set)) {
        step_decide(l, step, &set);
        leader_stir(l); /* there may be a newer one */
    } else if (pin_is_stale(l, step)) {
        step_given_up(l, step);
    }
    leader_set_close(&set);
}

void leader_saves_skipped(struct core_leader *l)
{
    const struct wire_plan *plan = &l->record.plan;
    const struct leader_proc *p =
        plan->world ? leader_proc_find(l, plan->members[0].incarnation) : NULL;

    if (!p || p->report.skipped_save <= l->skipped_told) {
        return;
    }
    l->skipped_told = p->report.skipped_save;
    uint32_t due = roots_due(l, l->skipped_told);
    for (uint32_t r = 0; r < l->config.root_count; r++) {
        if (due & 1u << r) {
            root_skips(l, r, l->skipped_told, "every slot for saves is taken");
        }
    }
}

void leader_last_begin(struct core_leader *l)
{
    for (uint32_t r = 0; r < l->config.root_count; r++) {
        l->roots[r].tries = 0;
    }
    l->last_ms = l->now_ms;
}

/* Does it not answer, or fail whoever looks how a commit there ended? */
static int root_is_away(const struct core_leader *l, uint32_t root)
{
    const struct leader_root *r = &l->roots[root];
    return r->stuck || (r->scan_failed && l->record.roots[root].committing_attempt &&
                        !leader_save_of((struct core_leader *)l, root));
}

int leader_last_lacks(const struct core_leader *l)
{
    for (uint32_t r = 0; r < l->config.root_count; r++) {
        if (leader_root_next(l, r) != l->end_step + 1) {
            return (int)r;
        }
    }
    return -1;
}

enum leader_last leader_saves_last(const struct core_leader *l)
{
    uint32_t done = 0;
    uint32_t open = 0;
    uint32_t stuck = 0;

    for (uint32_t r = 0; r < l->config.root_count; r++) {
        if (leader_root_next(l, r) == l->end_step + 1) {
            done++;
        } else if (root_is_away(l, r)) {
            stuck++;
        } else if (l->roots[r].tries < LEADER_SAVE_TRIES) {
            open++;
        }
    }
    /* With the state safe nowhere, a root that hangs is worth waiting for. */
    int is_patient = l->now_ms - l->last_ms < l->config.deadlines.save;
    if (open || (stuck && !done && is_patient)) {
        return LEADER_LAST_WAITS;
    }
    return done || l->config.root_count == 0 ? LEADER_LAST_DONE : LEADER_LAST_FAILED;
}
