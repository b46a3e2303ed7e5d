/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/core/leader_layout.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "daemon/core/effects.h"
#include "wire/msg.h"

#define NOBODY UINT32_MAX

struct leader_layout leader_layout_shape(const struct leader_layout_job *job, uint32_t count)
{
    struct leader_layout shape = {.tp = job->tp, .pp = job->pp};
    uint64_t copy = (uint64_t)job->tp * job->pp;
    uint64_t dp = count / copy;

    shape.dp = dp < job->dp_max ? (uint32_t)dp : job->dp_max;
    if (shape.dp == 0) {
        shape.pp = count / job->tp;
        shape.dp = shape.pp >= job->pp_min && shape.pp > 0;
    }
    return shape;
}

/* ---- what is being seated ---- */

struct seats {
    struct leader_layout shape, former;
    const struct leader_layout_proc *procs;
    uint32_t count, world, groups;
    uint32_t *at;           /* [world] index of the process, or NOBODY; the caller's */
    uint8_t *is_used;       /* [count] */
    uint32_t *group_node;   /* [groups] node of the group's first member, or NOBODY */
    uint32_t *replica_node; /* [dp] the same of the replica */
};

static void seat_take(struct seats *s, uint32_t rank, uint32_t proc)
{
    s->at[rank] = proc;
    s->is_used[proc] = 1;
}

static void seats_nodes(struct seats *s)
{
    for (uint32_t g = 0; g < s->groups; g++) {
        s->group_node[g] = NOBODY;
    }
    for (uint32_t d = 0; d < s->shape.dp; d++) {
        s->replica_node[d] = NOBODY;
    }
    for (uint32_t rank = s->world; rank-- > 0;) { /* the first of each comes last */
        if (s->at[rank] != NOBODY) {
            uint32_t group = rank / s->shape.tp;
            s->group_node[group] = s->procs[s->at[rank]].node;
            s->replica_node[group / s->shape.pp] = s->procs[s->at[rank]].node;
        }
    }
}

/* ---- holes and who fits them: both sorted by one key ---- */

struct seats_item {
    uint64_t key;
    uint32_t node, index;
};

static int item_compare(const void *a, const void *b)
{
    const struct seats_item *x = a;
    const struct seats_item *y = b;
    if (x->key != y->key) {
        return x->key < y->key ? -1 : 1;
    }
    if (x->node != y->node) {
        return x->node < y->node ? -1 : 1;
    }
    return x->index < y->index ? -1 : x->index > y->index;
}

enum seats_rule {                           /* what a filler has in common with a hole */
                  SEATS_GROUP_NODE_PLACE,   /* the group's node, and the same (t, p) before */
                  SEATS_GROUP_NODE,         /* the group's node */
                  SEATS_REPLICA_NODE_PLACE, /* the replica's node, and the same (t, p) before */
                  SEATS_PLACE,              /* the same (t, p) before */
                  SEATS_REPLICA_NODE,       /* the replica's node */
                  SEATS_ANY
};

/* UINT64_MAX: the rule says nothing of this hole. */
static uint64_t hole_key(const struct seats *s, enum seats_rule rule, uint32_t rank)
{
    uint32_t group = rank / s->shape.tp;
    uint32_t near = s->group_node[group];
    uint32_t place = rank % (s->shape.pp * s->shape.tp);
    int is_place = rule == SEATS_GROUP_NODE_PLACE || rule == SEATS_REPLICA_NODE_PLACE;

    if (rule == SEATS_ANY) {
        return 0;
    }
    if (s->shape.tp > 1 && near == NOBODY) {
        return UINT64_MAX; /* a group that has nobody yet is seated whole */
    }
    if (rule == SEATS_PLACE) {
        return place;
    }
    if (rule == SEATS_REPLICA_NODE || rule == SEATS_REPLICA_NODE_PLACE) {
        near = s->replica_node[group / s->shape.pp];
    }
    if (near == NOBODY) {
        return UINT64_MAX;
    }
    return is_place ? (uint64_t)near << 32 | place : near;
}

static uint64_t filler_key(const struct seats *s, enum seats_rule rule, uint32_t proc)
{
    const struct leader_layout_proc *p = &s->procs[proc];
    uint32_t copy = s->former.pp * s->former.tp;

    switch (rule) {
    case SEATS_ANY:
        return 0;
    case SEATS_GROUP_NODE:
    case SEATS_REPLICA_NODE:
        return p->node;
    default:
        break;
    }
    if (!p->held || p->rank == LEADER_NO_RANK || s->former.pp != s->shape.pp) {
        return UINT64_MAX;
    }
    return rule == SEATS_PLACE ? p->rank % copy : (uint64_t)p->node << 32 | p->rank % copy;
}

static void seats_fill(struct seats *s, enum seats_rule rule)
{
    struct seats_item *holes = core_alloc(s->world, sizeof(*holes));
    struct seats_item *fillers = core_alloc(s->count, sizeof(*fillers));
    uint32_t hole_count = 0;
    uint32_t filler_count = 0;

    seats_nodes(s);
    for (uint32_t rank = 0; rank < s->world; rank++) {
        uint64_t key = s->at[rank] == NOBODY ? hole_key(s, rule, rank) : UINT64_MAX;
        if (key != UINT64_MAX) {
            holes[hole_count++] = (struct seats_item){key, 0, rank};
        }
    }
    for (uint32_t i = 0; hole_count && i < s->count; i++) {
        uint64_t key = s->is_used[i] ? UINT64_MAX : filler_key(s, rule, i);
        if (key != UINT64_MAX) {
            fillers[filler_count++] = (struct seats_item){key, s->procs[i].node, i};
        }
    }
    if (hole_count) {
        qsort(holes, hole_count, sizeof(*holes), item_compare);
        qsort(fillers, filler_count, sizeof(*fillers), item_compare);
    }
    for (uint32_t h = 0, f = 0; h < hole_count && f < filler_count;) {
        if (holes[h].key == fillers[f].key) {
            seat_take(s, holes[h++].index, fillers[f++].index);
        } else if (holes[h].key < fillers[f].key) {
            h++;
        } else {
            f++;
        }
    }
    free(holes);
    free(fillers);
}

/* ---- whole groups of those who are left over ---- */

/* Packs items (sorted by node) into sets of `size`, those of one node first; ret holds the items'
 * places, set after set. The number of sets; what is left over is in none. */
static uint32_t seats_pack(const struct seats_item *items, uint32_t count, uint32_t size,
                           uint32_t *ret)
{
    uint32_t *rest = core_alloc(count, sizeof(*rest));
    uint32_t rest_count = 0;
    uint32_t packed = 0;

    for (uint32_t lo = 0, hi = 0; lo < count; lo = hi) {
        for (hi = lo; hi < count && items[hi].node == items[lo].node; hi++) {
        }
        uint32_t whole = (hi - lo) / size * size;
        for (uint32_t i = 0; i < hi - lo; i++) {
            if (i < whole) {
                ret[packed++] = lo + i;
            } else {
                rest[rest_count++] = lo + i;
            }
        }
    }
    for (uint32_t i = 0; i < rest_count / size * size; i++) {
        ret[packed++] = rest[i];
    }
    free(rest);
    return packed / size;
}

/* Everybody who is left over, in whole groups, sorted by node, those of several nodes last.
 * ret_groups: of each group its node, and where its members begin in ret_members (both owned by the
 * caller). */
static uint32_t seats_groups(const struct seats *s, struct seats_item **ret_groups,
                             uint32_t **ret_members)
{
    struct seats_item *left = core_alloc(s->count, sizeof(*left));
    uint32_t *places = core_alloc(s->count, sizeof(*places));
    uint32_t tp = s->shape.tp;
    uint32_t count = 0;

    for (uint32_t i = 0; i < s->count; i++) {
        if (!s->is_used[i]) {
            /* By former ranks on a node: who had been neighbours stays so. */
            left[count++] = (struct seats_item){s->procs[i].rank, s->procs[i].node, i};
        }
    }
    for (uint32_t i = 0; i < count; i++) { /* node before rank */
        left[i].key = (uint64_t)left[i].node << 32 | left[i].key;
    }
    qsort(left, count, sizeof(*left), item_compare);
    uint32_t groups = seats_pack(left, count, tp, places);
    *ret_groups = core_alloc(groups, sizeof(**ret_groups));
    *ret_members = core_alloc(count, sizeof(**ret_members));
    for (uint32_t i = 0; i < groups * tp; i++) {
        (*ret_members)[i] = left[places[i]].index;
    }
    for (uint32_t g = 0; g < groups; g++) {
        uint32_t node = left[places[g * tp]].node;
        uint64_t is_torn = left[places[g * tp + tp - 1]].node != node; /* those come last */
        (*ret_groups)[g] = (struct seats_item){is_torn << 32 | node, node, g * tp};
    }
    qsort(*ret_groups, groups, sizeof(**ret_groups), item_compare);
    free(left);
    free(places);
    return groups;
}

static void group_take(struct seats *s, uint32_t group, const uint32_t *members)
{
    for (uint32_t t = 0; t < s->shape.tp; t++) {
        seat_take(s, group * s->shape.tp + t, members[t]);
    }
}

/* Groups that have nobody, of replicas that have somebody: from the replica's node. */
static void empties_near(struct seats *s, struct seats_item *groups, uint32_t count,
                         const uint32_t *members)
{
    struct seats_item *holes = core_alloc(s->groups, sizeof(*holes));
    uint32_t hole_count = 0;

    for (uint32_t g = 0; g < s->groups; g++) {
        uint32_t near = s->replica_node[g / s->shape.pp];
        if (s->group_node[g] == NOBODY && near != NOBODY) {
            holes[hole_count++] = (struct seats_item){near, 0, g};
        }
    }
    qsort(holes, hole_count, sizeof(*holes), item_compare);
    for (uint32_t h = 0, g = 0; h < hole_count && g < count;) {
        if (holes[h].key == groups[g].key) {
            group_take(s, holes[h++].index, &members[groups[g].index]);
            groups[g++].key = UINT64_MAX; /* taken */
        } else if (holes[h].key < groups[g].key) {
            h++;
        } else {
            g++;
        }
    }
    free(holes);
}

/* Seats whole groups where there is nobody: near their replica, then so that new replicas are on
 * few nodes. */
static void seats_empties(struct seats *s)
{
    struct seats_item *groups = NULL;
    uint32_t *members = NULL;
    uint32_t kept = 0;
    uint32_t next = 0;

    seats_nodes(s);
    uint32_t count = seats_groups(s, &groups, &members);
    uint32_t *order = core_alloc(count, sizeof(*order));
    empties_near(s, groups, count, members);
    for (uint32_t g = 0; g < count; g++) {
        if (groups[g].key != UINT64_MAX) {
            groups[kept++] = groups[g];
        }
    }
    uint32_t sets = seats_pack(groups, kept, s->shape.pp, order);
    uint8_t *is_taken = core_alloc(kept, 1);
    for (uint32_t i = 0; i < sets * s->shape.pp; i++) {
        is_taken[order[i]] = 1;
    }
    for (uint32_t g = 0, n = sets * s->shape.pp; g < kept; g++) { /* those in no set come last */
        if (!is_taken[g]) {
            order[n++] = g;
        }
    }
    /* New replicas take sets from the front, what is missing elsewhere comes from the back. */
    uint32_t back = kept;
    for (uint32_t g = 0; g < s->groups; g++) {
        if (s->at[g * s->shape.tp] != NOBODY || s->group_node[g] != NOBODY || next >= back) {
            continue;
        }
        int is_new = s->replica_node[g / s->shape.pp] == NOBODY;
        group_take(s, g, &members[groups[order[is_new ? next++ : --back]].index]);
    }
    free(is_taken);
    free(order);
    free(groups);
    free(members);
}

/* ---- the same cut: places stay ---- */

struct seats_replica {
    uint32_t index, held, present;
};

/* Those that lost least first. */
static int replica_compare(const void *a, const void *b)
{
    const struct seats_replica *x = a;
    const struct seats_replica *y = b;
    if (x->held != y->held) {
        return x->held > y->held ? -1 : 1;
    }
    if (x->present != y->present) {
        return x->present > y->present ? -1 : 1;
    }
    return x->index < y->index ? -1 : x->index > y->index;
}

static int replica_by_index(const void *a, const void *b)
{
    const struct seats_replica *x = a;
    const struct seats_replica *y = b;
    return x->index < y->index ? -1 : x->index > y->index;
}

static int seat_has_place(const struct leader_layout_proc *p, int hints_count)
{
    return p->rank < WIRE_RANKS_MAX && (p->held || hints_count);
}

/* Who had which rank: [*ret_replicas * pp * tp], owned by the caller. */
static uint32_t *seats_former(const struct seats *s, int hints_count, uint32_t *ret_replicas)
{
    uint32_t copy = s->shape.pp * s->shape.tp;
    uint32_t replicas = 0;

    for (uint32_t i = 0; i < s->count; i++) {
        const struct leader_layout_proc *p = &s->procs[i];
        if (seat_has_place(p, hints_count) && p->rank / copy >= replicas) {
            replicas = p->rank / copy + 1;
        }
    }
    uint32_t *was = core_alloc((size_t)replicas * copy, sizeof(*was));
    for (uint32_t i = 0; i < replicas * copy; i++) {
        was[i] = NOBODY;
    }
    for (uint32_t i = 0; i < s->count; i++) {
        const struct leader_layout_proc *p = &s->procs[i];
        if (!seat_has_place(p, hints_count)) {
            continue;
        }
        uint32_t *seat = &was[p->rank];
        if (*seat == NOBODY || (p->held && !s->procs[*seat].held)) {
            *seat = i;
        }
    }
    *ret_replicas = replicas;
    return was;
}

/* The replicas that stay, and everybody of them in place. */
static void seats_keep(struct seats *s, int hints_count)
{
    uint32_t copy = s->shape.pp * s->shape.tp;
    uint32_t replicas = 0;
    uint32_t *was = seats_former(s, hints_count, &replicas);
    struct seats_replica *order = core_alloc(replicas, sizeof(*order));

    for (uint32_t d = 0; d < replicas; d++) {
        order[d].index = d;
        for (uint32_t i = 0; i < copy; i++) {
            uint32_t proc = was[d * copy + i];
            order[d].present += proc != NOBODY;
            order[d].held += proc != NOBODY && s->procs[proc].held;
        }
    }
    qsort(order, replicas, sizeof(*order), replica_compare);
    uint32_t kept = replicas < s->shape.dp ? replicas : s->shape.dp;
    qsort(order, kept, sizeof(*order), replica_by_index);
    for (uint32_t d = 0; d < kept; d++) {
        for (uint32_t i = 0; i < copy; i++) {
            uint32_t proc = was[order[d].index * copy + i];
            if (proc != NOBODY) {
                seat_take(s, d * copy + i, proc);
            }
        }
    }
    free(order);
    free(was);
}

/* ---- another cut: groups that are whole keep their order along the pipeline ---- */

/* Sorted by (p, d): groups of the former layout all of whose members hold their state. */
static uint32_t recut_whole(const struct seats *s, struct seats_item **ret, uint32_t **ret_members)
{
    uint32_t tp = s->former.tp;
    uint32_t count = 0;
    uint32_t whole = 0;
    struct seats_item *held = core_alloc(s->count, sizeof(*held));

    for (uint32_t i = 0; i < s->count; i++) {
        const struct leader_layout_proc *p = &s->procs[i];
        if (p->held && p->rank < WIRE_RANKS_MAX) {
            uint32_t group = p->rank / tp;
            uint64_t stage = group % s->former.pp;
            held[count++] = (struct seats_item){stage << 32 | group, p->rank % tp, i};
        }
    }
    qsort(held, count, sizeof(*held), item_compare);
    *ret = core_alloc(count, sizeof(**ret));
    *ret_members = core_alloc(count, sizeof(**ret_members));
    for (uint32_t lo = 0, hi = 0; lo < count; lo = hi) {
        uint32_t have = 0;
        for (hi = lo; hi < count && held[hi].key == held[lo].key; hi++) {
            if (held[hi].node == have && have < tp) { /* t, each once */
                (*ret_members)[whole * tp + have++] = held[hi].index;
            }
        }
        if (have == tp) {
            (*ret)[whole] = (struct seats_item){held[lo].key >> 32, 0, whole * tp};
            whole++;
        }
    }
    free(held);
    return whole;
}

/* Groups go to the stage that has most of what they hold; the replica is the first. */
static void seats_recut(struct seats *s)
{
    struct seats_item *whole = NULL;
    uint32_t *members = NULL;
    uint32_t count = recut_whole(s, &whole, &members);
    uint32_t pp = s->shape.pp;
    uint32_t next = 0;

    count = count < pp ? count : pp;
    for (uint32_t g = 0; g < count; g++) {
        uint64_t middle = 2 * whole[g].key + 1;
        uint32_t stage = (uint32_t)(middle * pp / (2 * (uint64_t)s->former.pp));
        uint32_t last = pp - (count - g); /* so that the others have room behind it */
        stage = stage > next ? stage : next;
        stage = stage < last ? stage : last;
        group_take(s, stage, &members[whole[g].index]);
        next = stage + 1;
    }
    free(whole);
    free(members);
}

void leader_layout_seats(const struct leader_layout_job *job, const struct leader_layout *former,
                         const struct leader_layout *shape, const struct leader_layout_proc *procs,
                         uint32_t count, uint32_t *ret_seats)
{
    struct seats s = {.shape = *shape,
                      .former = *former,
                      .procs = procs,
                      .count = count,
                      .world = leader_layout_world(shape),
                      .groups = shape->dp * shape->pp,
                      .at = ret_seats};
    BL_ASSERT(s.world > 0 && s.world <= count && former->tp == shape->tp && former->pp > 0);
    s.is_used = core_alloc(count, 1);
    s.group_node = core_alloc(s.groups, sizeof(*s.group_node));
    s.replica_node = core_alloc(shape->dp, sizeof(*s.replica_node));
    for (uint32_t rank = 0; rank < s.world; rank++) {
        ret_seats[rank] = NOBODY;
    }
    if (former->pp == shape->pp) {
        seats_keep(&s, shape->pp == job->pp);
        if (shape->tp > 1) {
            seats_fill(&s, SEATS_GROUP_NODE_PLACE);
            seats_fill(&s, SEATS_GROUP_NODE);
        }
        seats_fill(&s, SEATS_REPLICA_NODE_PLACE);
        seats_fill(&s, SEATS_PLACE);
    } else {
        seats_recut(&s);
    }
    seats_empties(&s);
    seats_fill(&s, SEATS_REPLICA_NODE);
    seats_fill(&s, SEATS_ANY);
    for (uint32_t rank = 0; rank < s.world; rank++) {
        BL_ASSERT(ret_seats[rank] != NOBODY);
    }
    free(s.is_used);
    free(s.group_node);
    free(s.replica_node);
}
