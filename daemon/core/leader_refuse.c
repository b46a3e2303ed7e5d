/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who may not be a member: a process of another function id or numeric probe. The function id has
 * the build of BLAS and the processor core that it picked in it: within one run, both say that the
 * node computes other bits. A node that was refused hosts nothing until its daemon is a new one.
 * When no node fits a run that begins, the run ends; a run under way waits.
 */
#include "daemon/core/leader_state.h"

#include <stdio.h>
#include <string.h>

#define REFUSE_WHY                                                                                 \
    "its BLAS or processor gives other bits than the run's; use the same kind of processor, or "   \
    "unset OPENBLAS_CORETYPE there"

int leader_proc_is_parked(const struct core_leader *l, const struct leader_proc *p)
{
    return p->report.state == WIRE_RANK_PARKED && p->report.generation >= l->record.generation;
}

void leader_node_refuse(struct core_leader *l, uint32_t node, const char *why)
{
    struct leader_node *n = &l->nodes[node];

    n->refused = 1;
    n->dirty = 1;
    snprintf(n->refused_text, sizeof(n->refused_text), "%s", why);
}

void leader_identity(const struct core_leader *l, uint64_t *function_id, uint64_t *probe)
{
    uint32_t best = 0;
    *function_id = l->record.function_id;
    *probe = l->record.probe;
    int is_known = l->record.function_id && l->record.probe;
    for (uint32_t i = 0; i < l->proc_count && !is_known; i++) {
        const struct leader_proc *p = &l->procs[i];
        uint32_t same = 0;
        if (l->record.function_id && p->report.function_id != l->record.function_id) {
            continue;
        }
        for (uint32_t k = 0; leader_proc_is_parked(l, p) && k < l->proc_count && best <= i; k++) {
            same += leader_proc_is_parked(l, &l->procs[k]) &&
                    l->procs[k].report.function_id == p->report.function_id &&
                    l->procs[k].report.probe == p->report.probe;
        }
        if (same > best) {
            best = same;
            *function_id = p->report.function_id;
            *probe = p->report.probe;
        }
        if (best * 2 > l->proc_count) {
            break;
        }
    }
}

void leader_refuse(struct core_leader *l, uint64_t function_id, uint64_t probe)
{
    for (uint32_t i = 0; i < l->proc_count; i++) {
        struct leader_proc *p = &l->procs[i];
        if (p->refused || p->life != LEADER_LIVE || !leader_proc_is_parked(l, p) ||
            (p->report.function_id == function_id && p->report.probe == probe)) {
            continue;
        }
        const char *why = p->report.probe != probe ? "numeric probe differs: " REFUSE_WHY
                                                   : "function id differs: " REFUSE_WHY;
        p->refused = 1;
        leader_node_refuse(l, p->node, why);
        leader_event_proc(l, CORE_EVENT_RANK_REFUSED, p, why);
    }
}

/* Nobody is a member, nobody comes: is that because the nodes that are there were refused? */
void leader_refuse_start(struct core_leader *l)
{
    const struct leader_node *refused = NULL;
    char text[WIRE_TEXT_MAX];

    for (uint32_t i = 0; i < l->node_count; i++) {
        refused = l->nodes[i].connected && l->nodes[i].refused ? &l->nodes[i] : refused;
    }
    if (!refused || !l->is_beginning || l->now_ms - l->phase_ms < l->config.deadlines.join) {
        return;
    }
    snprintf(text, sizeof(text), "no node fits: %.40s: %.190s", refused->name,
             refused->refused_text);
    leader_end_send(l, WIRE_VERDICT_REFUSED, text);
}
