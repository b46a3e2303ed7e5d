/* SPDX-License-Identifier: Apache-2.0 */
/* What `belay status` shows. */
#include "daemon/core/leader_state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Digest at the end, as the store has it; else of l->step over all members, where the newest
 * reports hold all their slots of it. */
static void status_digest(const struct core_leader *l, struct core_status *ret)
{
    const struct wire_plan *plan = &l->record.plan;
    uint64_t step = l->ended || l->record.phase == WIRE_PHASE_DONE ? l->end_step : l->step;
    struct bl_state_digest sum = {{0, 0}};
    struct leader_piece *pieces = NULL;
    uint32_t found = 0;

    if (l->record.phase == WIRE_PHASE_DONE && l->record.end_digest_known) {
        /* A leader that takes over an ended run has no reports yet. */
        ret->digest_known = 1;
        ret->digest_step = l->record.end_step;
        ret->digest = l->record.end_digest;
        return;
    }
    pieces = core_alloc(plan->world, sizeof(*pieces));
    for (uint32_t i = 0; i < plan->world; i++) {
        const struct leader_proc *p = leader_proc_find(l, plan->members[i].incarnation);
        const struct wire_arena_info *arena =
            p ? leader_arena_find(l, p->node, p->report.arena) : NULL;
        for (uint32_t k = 0; arena && k < arena->slot_count; k++) {
            const struct wire_slot_info *slot = &arena->slots[k];
            if (slot->state == WIRE_SLOT_SEALED && slot->step == step &&
                leader_copy_is_admissible(&l->record, slot->generation, step)) {
                pieces[found++] =
                    (struct leader_piece){leader_arena_key(l, p->node, arena), slot->digest};
                break;
            }
        }
    }
    int agree = leader_pieces_sum(pieces, found, &sum);
    free(pieces);
    if (plan->world && found == plan->world && agree) {
        ret->digest_known = 1;
        ret->digest_step = step;
        ret->digest = sum;
        return;
    }
    for (uint32_t i = 0; i < l->checkpoint_count; i++) {
        if (l->checkpoints[i].step == step && l->checkpoints[i].digest_known) {
            ret->digest_known = 1;
            ret->digest_step = step;
            ret->digest = l->checkpoints[i].digest;
        }
    }
}

static void status_proc(const struct core_leader *l, const struct leader_proc *p,
                        struct core_status_proc *ret)
{
    ret->incarnation = p->incarnation;
    ret->pid = p->pid;
    ret->member = (uint32_t)leader_proc_is_member(l, p);
    ret->rank = ret->member ? p->seat : p->rank;
    ret->state = p->life == LEADER_DEAD ? WIRE_RANK_EXITED : p->report.state;
    ret->beat = p->beat;
    ret->applied_step = p->report.applied_step;
}

static void status_nodes(const struct core_leader *l, struct core_status *ret, uint64_t now_ms)
{
    ret->nodes = core_alloc(l->node_count, sizeof(*ret->nodes));
    ret->procs = core_alloc(l->proc_count, sizeof(*ret->procs));
    ret->node_count = l->node_count;
    for (uint32_t i = 0; i < l->node_count; i++) {
        const struct leader_node *node = &l->nodes[i];
        struct core_status_node *out = &ret->nodes[i];
        memcpy(out->node, node->name, sizeof(out->node));
        out->incarnation = node->incarnation;
        out->connected = node->connected;
        out->lost = node->lost;
        out->refused = node->refused;
        memcpy(out->refused_text, node->refused_text, sizeof(out->refused_text));
        out->away_ms = node->connected ? 0 : now_ms - node->away_ms;
        out->ranks_max = node->report.ranks_max;
        out->proc_first = ret->proc_count;
        for (uint32_t k = 0; k < l->proc_count; k++) {
            if (l->procs[k].node == i) {
                status_proc(l, &l->procs[k], &ret->procs[ret->proc_count++]);
                out->proc_count++;
            }
        }
    }
}

void core_leader_status(const struct core_leader *l, struct core_status *ret, uint64_t now_ms)
{
    struct leader_pick pick;
    int is_running = l->record.phase == WIRE_PHASE_RUNNING;

    memset(ret, 0, sizeof(*ret));
    ret->phase = l->record.phase;
    ret->verdict = l->record.verdict;
    ret->generation = l->record.generation;
    ret->line = l->record.line;
    ret->world = l->record.phase >= WIRE_PHASE_PLANNED ? l->record.plan.world : 0;
    struct leader_layout layout = leader_plan_layout(l);
    struct leader_layout_job job = leader_job_layout(l);
    ret->dp = ret->world ? layout.dp : 0;
    ret->tp = ret->world ? layout.tp : 0;
    ret->pp = ret->world ? layout.pp : 0;
    ret->dp_wanted = job.dp_max;
    ret->pp_wanted = job.pp;
    ret->ranks = l->config.ranks;
    ret->lanes = l->config.lanes;
    ret->step = l->ended ? l->end_step : l->step;
    leader_pick_newest(l, &pick);
    ret->memory_step = pick.found && pick.from_memory ? pick.step : UINT64_MAX;
    leader_pick_close(&pick);
    /* Reports come at different moments and rarely name one step that all hold. Of a run under way
     * all members have sealed `step`; of one that is over it is what memory held last. */
    int has_memory = is_running || (l->record.phase == WIRE_PHASE_DONE && !l->is_beginning);
    if (has_memory && (ret->memory_step == UINT64_MAX || ret->memory_step < ret->step)) {
        ret->memory_step = ret->step;
    }
    ret->disk_step = l->record.committed_step;
    memcpy(ret->disk_dir, l->record.committed_dir, sizeof(ret->disk_dir));
    ret->wait = (enum core_wait)l->wait;
    memcpy(ret->wait_text, l->wait_text, sizeof(ret->wait_text));
    if (l->store_failed) {
        ret->wait = CORE_WAIT_STORE;
        snprintf(ret->wait_text, sizeof(ret->wait_text), "the store to take a change");
    }
    ret->stop_asked = l->stop_asked;
    ret->save_asked = l->save_asked;
    memcpy(ret->save_failed_text, l->save_failed_text, sizeof(ret->save_failed_text));
    ret->step_deadline_ms = leader_step_deadline(l);
    ret->since_progress_ms = is_running ? now_ms - l->step_ms : now_ms - l->phase_ms;
    ret->last = l->times;
    ret->recoveries = l->recoveries;
    ret->kills = l->kills;
    ret->saves_committed = l->saves_committed;
    ret->saves_failed = l->saves_failed;
    ret->saves_skipped = l->saves_skipped;
    ret->steps_lost = l->steps_lost;
    status_digest(l, ret);
    leader_roots_status(l, ret, now_ms);
    status_nodes(l, ret, now_ms);
    snprintf(ret->text, sizeof(ret->text), "%s",
             l->record.phase == WIRE_PHASE_DONE ? l->record.cause : l->first_cause);
}

void core_status_close(struct core_status *status)
{
    if (status) {
        free(status->nodes);
        free(status->procs);
        memset(status, 0, sizeof(*status));
    }
}
