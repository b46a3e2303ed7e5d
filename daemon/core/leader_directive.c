/* SPDX-License-Identifier: Apache-2.0 */
/* What each node is told, and when it is told again. */
#include "daemon/core/leader_state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- what may be dropped ---- */

/* Is the arena the present one of a live process, or of a member of the plan in force that just
 * died? What that one sealed is what the next plan loads from; OPEN for it may still be on its way
 * to the store. */
static int arena_is_present(const struct core_leader *l, const struct wire_arena_info *arena)
{
    const struct leader_proc *p = leader_proc_find(l, arena->incarnation);
    if (!p) {
        return 0;
    }
    int is_member = leader_proc_is_member(l, p);
    return (p->life != LEADER_DEAD || is_member) &&
           (p->report.arena == arena->arena || !is_member || p->report.arena == 0);
}

/* Does it hold a pinned slot of a step that is not decided? */
static int arena_is_pinned(const struct core_leader *l, const struct wire_arena_info *arena)
{
    for (uint32_t k = 0; k < arena->slot_count; k++) {
        const struct wire_slot_info *slot = &arena->slots[k];
        if (slot->state == WIRE_SLOT_SEALED && slot->pinned && slot->step > l->saves_through &&
            leader_copy_is_admissible(&l->record, slot->generation, slot->step)) {
            return 1;
        }
    }
    return 0;
}

static int arena_is_droppable(const struct core_leader *l, const struct wire_arena_info *arena)
{
    if (l->record.phase == WIRE_PHASE_DONE) {
        const struct leader_proc *p = leader_proc_find(l, arena->incarnation);
        return !p || p->life == LEADER_DEAD;
    }
    int keep_sources = leader_has_rule(l, WIRE_RULE_KEEP_SOURCES);
    if (keep_sources ? l->record.phase != WIRE_PHASE_RUNNING || !l->first_sealed || l->ended
                     : l->record.phase < WIRE_PHASE_PLANNED) {
        return 0;
    }
    return !arena_is_present(l, arena) && !leader_save_holds(l, arena->arena) &&
           !arena_is_pinned(l, arena);
}

static int node_has_arena_of(const struct leader_node *node, uint64_t incarnation)
{
    for (uint32_t i = 0; i < node->report.arena_count; i++) {
        if (node->report.arenas[i].incarnation == incarnation) {
            return 1;
        }
    }
    return 0;
}

void leader_drops_step(struct core_leader *l)
{
    for (uint32_t i = 0; i < l->node_count; i++) {
        struct leader_node *node = &l->nodes[i];
        uint64_t told = 0;
        for (uint32_t a = 0; node->connected && a < node->report.arena_count; a++) {
            if (arena_is_droppable(l, &node->report.arenas[a])) {
                told += bl_mix64(node->report.arenas[a].arena);
            }
        }
        if (told != node->drops_told) {
            node->drops_told = told;
            node->dirty |= told != 0;
        }
    }
    for (uint32_t i = 0; i < l->proc_count; i++) {
        struct leader_proc *p = &l->procs[i];
        if (p->life == LEADER_DEAD && p->counted && !p->forget &&
            !node_has_arena_of(&l->nodes[p->node], p->incarnation)) {
            p->forget = 1;
            l->nodes[p->node].dirty = 1;
        }
    }
}

/* ---- building ---- */

static void directive_orders(const struct core_leader *l, uint32_t node, struct wire_directive *d)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < l->proc_count; i++) {
        count += l->procs[i].node == node;
    }
    d->orders = core_alloc(count, sizeof(*d->orders));
    d->refused = core_alloc(count, sizeof(*d->refused));
    for (uint32_t i = 0; i < l->proc_count; i++) {
        const struct leader_proc *p = &l->procs[i];
        if (p->node != node) {
            continue;
        }
        if (p->refused) {
            d->refused[d->refused_count++] = p->incarnation;
        }
        if (p->life == LEADER_DEAD && !p->forget) {
            continue; /* nothing is wanted of it */
        }
        d->orders[d->order_count++] = (struct wire_proc_order){.incarnation = p->incarnation,
                                                               .rank = p->rank,
                                                               .kill = p->kill,
                                                               .stacks = p->stacks,
                                                               .forget = p->forget};
    }
}

static void directive_saves(const struct core_leader *l, uint32_t node, struct wire_directive *d)
{
    for (uint32_t i = 0; i < l->save_count && d->save_count < WIRE_SAVES_MAX; i++) {
        const struct leader_save *s = &l->saves[i];
        const struct leader_part *part = leader_part_find(s, node);
        if (!part || (part->bare && s->save.state == WIRE_SAVE_WRITE)) {
            continue;
        }
        struct wire_save *save = &d->saves[d->save_count++];
        *save = s->save;
        save->arena_count = part->arena_count;
        save->arenas = core_alloc(part->arena_count, sizeof(*save->arenas));
        if (part->arena_count) {
            memcpy(save->arenas, &s->save.arenas[part->first],
                   part->arena_count * sizeof(*save->arenas));
        }
        if (s->save.state == WIRE_SAVE_WRITE && part->pick.extent_count) {
            int rc = bl_extent_list_copy(&save->pick, &part->pick);
            BL_ASSERT(rc == 0);
        }
        if (s->save.state == WIRE_SAVE_VERIFIED) {
            save->line_end_count = l->record.line_end_count;
            save->line_ends = core_alloc(save->line_end_count, sizeof(*save->line_ends));
            memcpy(save->line_ends, l->record.line_ends,
                   save->line_end_count * sizeof(*save->line_ends));
        }
    }
}

static void directive_drops(const struct core_leader *l, uint32_t node, struct wire_directive *d)
{
    const struct wire_report *report = &l->nodes[node].report;
    d->drop_arenas = core_alloc(report->arena_count, sizeof(*d->drop_arenas));
    for (uint32_t a = 0; a < report->arena_count; a++) {
        if (arena_is_droppable(l, &report->arenas[a])) {
            d->drop_arenas[d->drop_count++] = report->arenas[a].arena;
        }
    }
}

void core_leader_directive(struct core_leader *l, const char *name, struct wire_directive *ret)
{
    struct leader_node *node = leader_node_get(l, name);
    uint32_t index = (uint32_t)(node - l->nodes);
    const struct wire_record *said = leader_said(l);

    memset(ret, 0, sizeof(*ret));
    ret->run = l->config.run;
    ret->head_epoch = l->config.head_epoch;
    ret->leader_incarnation = l->config.incarnation;
    ret->sequence = ++node->sequence;
    ret->generation = said->generation;
    ret->phase = said->phase;
    ret->verdict = said->verdict;
    ret->node_incarnation = node->incarnation;
    ret->report_sequence = node->has_report ? node->report.sequence : 0;
    if (said->phase == WIRE_PHASE_PLANNED || said->phase == WIRE_PHASE_RUNNING) {
        int rc = wire_plan_copy(&ret->plan, &said->plan);
        BL_ASSERT(rc == 0);
    }
    if (said->phase == WIRE_PHASE_RUNNING && l->request_generation == said->generation) {
        ret->request_id = l->request_id;
        ret->request_flags = l->request_flags;
    }
    leader_saves_tell(l, ret);
    ret->scan_id = l->scan_id;
    memcpy(ret->file_key, l->file_key, sizeof(ret->file_key));
    ret->leave = said->phase == WIRE_PHASE_DONE;
    directive_orders(l, index, ret);
    directive_saves(l, index, ret);
    directive_drops(l, index, ret);
    snprintf(ret->text, sizeof(ret->text), "%s", said->cause);
    ret->job_json = strdup(said->job_json ? said->job_json : l->job_json);
    BL_ASSERT(ret->job_json);
}

/* ---- when ---- */

int leader_node_has_newest(const struct core_leader *l, const struct leader_node *node)
{
    return !node->dirty && node->need != 0 &&
           node->report.leader_incarnation == l->config.incarnation &&
           node->report.directive_sequence >= node->need;
}

int leader_directive_due(struct core_leader *l, char name[WIRE_NODE_MAX])
{
    /* Before there is a record, and before a run is taken up again, nothing is decided: members are
     * told that there is a run. */
    int is_unborn = l->version == 0 || l->record.phase == WIRE_PHASE_NONE;
    int may_speak = l->claimed || is_unborn || !leader_has_rule(l, WIRE_RULE_CAS_FIRST);
    for (uint32_t i = 0; may_speak && !l->deposed && i < l->node_count; i++) {
        struct leader_node *node = &l->nodes[i];
        int is_late = !leader_node_has_newest(l, node) &&
                      l->now_ms - node->sent_ms >= l->config.deadlines.beat;
        /* A daemon that is there may not know of the run: it cannot report before it is told. */
        if ((!node->connected && !node->up) || (!node->dirty && !is_late)) {
            continue;
        }
        if (node->dirty) {
            node->need = node->sequence + 1;
            node->dirty = 0;
        }
        node->sent_ms = l->now_ms;
        memcpy(name, node->name, WIRE_NODE_MAX);
        return 1;
    }
    return 0;
}
