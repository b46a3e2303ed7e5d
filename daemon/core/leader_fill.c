/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Starting processes: which ranks are missing, and on which node each is started.
 *
 * A rank comes back to its former node while there is room. New ones go to nodes a tensor-parallel
 * group at a time: beside what is there of the group, else on the node of the group before until
 * that has its share of the run, else on the emptiest node with room for all of it. Only where no
 * node has room for a whole group is one torn apart.
 */
#include "daemon/core/leader_state.h"

#include <stdlib.h>

struct fill {
    struct core_leader *l;
    uint32_t tp, wanted;
    uint32_t share;   /* processes of a node when all have alike */
    uint32_t *node;   /* [wanted] of the process that has the rank; UINT32_MAX: nobody has it */
    uint32_t *former; /* [wanted] of the rank's dead process; UINT32_MAX: none */
    uint32_t *loads;  /* [nodes] */
    uint32_t have;    /* processes that count */
};

uint32_t leader_wanted(const struct core_leader *l)
{
    struct leader_layout_job job = leader_job_layout(l);
    return job.dp_max * job.tp * job.pp;
}

/* Does this process count towards the wanted ones? */
static int proc_counts(const struct core_leader *l, const struct leader_proc *p)
{
    const struct leader_node *node = &l->nodes[p->node];
    return p->life != LEADER_DEAD && !p->kill && !p->refused && !node->lost;
}

static void fill_open(struct fill *f, struct core_leader *l)
{
    struct leader_layout_job job = leader_job_layout(l);
    uint32_t nodes = 0;

    *f = (struct fill){.l = l, .tp = job.tp, .wanted = leader_wanted(l)};
    f->node = core_alloc(f->wanted, sizeof(*f->node));
    f->former = core_alloc(f->wanted, sizeof(*f->former));
    f->loads = core_alloc(l->node_count, sizeof(*f->loads));
    for (uint32_t rank = 0; rank < f->wanted; rank++) {
        f->node[rank] = UINT32_MAX;
        f->former[rank] = UINT32_MAX;
    }
    for (uint32_t i = 0; i < l->node_count; i++) {
        const struct leader_node *n = &l->nodes[i];
        nodes += n->connected && n->has_report && !n->refused && n->report.ranks_max > 0;
    }
    f->share = nodes ? (f->wanted + nodes - 1) / nodes : f->wanted;
    f->share = (f->share + f->tp - 1) / f->tp * f->tp;
}

static void fill_close(struct fill *f)
{
    free(f->node);
    free(f->former);
    free(f->loads);
}

/* Who is there. Members of the generation that ran last have their rank before others. */
static void fill_look(struct fill *f)
{
    struct core_leader *l = f->l;

    for (int members = 1; members >= 0; members--) {
        for (uint32_t i = 0; i < l->proc_count; i++) {
            struct leader_proc *p = &l->procs[i];
            int ran = l->ran_generation && p->ran_generation == l->ran_generation;
            if (ran != members) {
                continue;
            }
            f->loads[p->node] += p->life != LEADER_DEAD;
            if (p->life == LEADER_DEAD && p->rank < f->wanted) {
                f->former[p->rank] = p->node;
            }
            if (!proc_counts(l, p)) {
                continue;
            }
            f->have++;
            if (p->rank < f->wanted && f->node[p->rank] == UINT32_MAX) {
                f->node[p->rank] = p->node;
            } else {
                p->rank = CORE_NO_RANK;
            }
        }
    }
}

static int node_has_room(const struct fill *f, uint32_t node, uint32_t more)
{
    const struct leader_node *n = &f->l->nodes[node];
    return n->connected && n->has_report && !n->refused && f->l->now_ms >= n->fill_ms &&
           f->loads[node] + more <= n->report.ranks_max;
}

/* -1 none */
static int fill_emptiest(const struct fill *f, uint32_t more)
{
    int best = -1;
    for (uint32_t i = 0; i < f->l->node_count; i++) {
        if (node_has_room(f, i, more) && (best < 0 || f->loads[i] < f->loads[best])) {
            best = (int)i;
        }
    }
    return best;
}

/* The node for `missing` ranks of the group that begins at rank `first`, or -1: no node has room
 * for all. */
static int fill_group_node(const struct fill *f, uint32_t first, uint32_t missing)
{
    for (uint32_t t = 0; t < f->tp && missing < f->tp; t++) {
        uint32_t node = f->node[first + t];
        if (node != UINT32_MAX && node_has_room(f, node, missing)) {
            return (int)node;
        }
    }
    uint32_t before = first > 0 ? f->node[first - 1] : UINT32_MAX;
    if (before != UINT32_MAX && f->loads[before] + missing <= f->share &&
        node_has_room(f, before, missing)) {
        return (int)before;
    }
    return fill_emptiest(f, missing);
}

/* 0: no room. */
static int fill_start(struct fill *f, uint32_t rank, int node)
{
    if (node < 0) {
        return 0;
    }
    leader_proc_start(f->l, (uint32_t)node, rank);
    f->node[rank] = (uint32_t)node;
    f->loads[node]++;
    f->have++;
    return 1;
}

/* Starts what is missing of a group; 0: no room for somebody. */
static int fill_group(struct fill *f, uint32_t first)
{
    uint32_t missing = 0;
    for (uint32_t rank = first; rank < first + f->tp && f->have < f->wanted; rank++) {
        uint32_t former = f->node[rank] == UINT32_MAX ? f->former[rank] : UINT32_MAX;
        if (former != UINT32_MAX && node_has_room(f, former, 1)) {
            fill_start(f, rank, (int)former);
        }
        missing += f->node[rank] == UINT32_MAX;
    }
    missing = missing < f->wanted - f->have ? missing : f->wanted - f->have;
    int node = missing ? fill_group_node(f, first, missing) : -1;
    for (uint32_t rank = first; rank < first + f->tp && f->have < f->wanted; rank++) {
        if (f->node[rank] == UINT32_MAX &&
            !fill_start(f, rank, node >= 0 ? node : fill_emptiest(f, 1))) {
            return 0;
        }
    }
    return 1;
}

uint32_t leader_fill(struct core_leader *l)
{
    struct fill f;
    uint32_t short_of = 0;

    fill_open(&f, l);
    fill_look(&f);
    for (uint32_t first = 0; first < f.wanted && f.have < f.wanted && !short_of; first += f.tp) {
        short_of = fill_group(&f, first) ? 0 : f.wanted - f.have;
    }
    fill_close(&f);
    return short_of;
}
