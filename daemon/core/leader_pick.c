/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The inventory: which copies there are, and the newest step that they hold whole.
 *
 * A copy (g, n) is admissible if no plan of a later generation k resumed below n. Copies of
 * nodes that are connected count; what cannot be reached cannot be loaded. Steps are tried from the
 * newest down; coverage is the extent planner's sweep, O(E log E) in the extents of one step.
 */
#include "daemon/core/leader_state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct pick_copy {
    const struct wire_arena_info *arena;
    uint32_t slot, node;
    uint64_t step, generation;
    uint64_t key; /* of the extents: equal for equal layouts */
};

int leader_copy_is_admissible(const struct wire_record *record, uint64_t generation, uint64_t step)
{
    for (uint32_t i = record->line_end_count; i-- > 0;) {
        const struct wire_line_end *end = &record->line_ends[i];
        if (end->generation <= generation) {
            break; /* ascending in both: older ones concern older copies only */
        }
        if (step > end->step) {
            return 0;
        }
    }
    return 1;
}

static int pick_is_bad(const struct core_leader *l, uint64_t step)
{
    for (uint32_t i = 0; i < l->bad_step_count; i++) {
        if (l->bad_steps[i] == step) {
            return 1;
        }
    }
    return 0;
}

uint64_t leader_extents_key(const struct bl_extent_list *list)
{
    uint64_t key = list->extent_count;
    for (uint32_t i = 0; i < list->extent_count; i++) {
        const struct bl_extent *extent = &list->extents[i];
        const char *name = list->tensors[extent->tensor].name;
        uint64_t parts[4] = {key, bl_xxh3(name, strlen(name)), extent->flat_lo, extent->flat_hi};
        uint64_t box[2] = {bl_xxh3(extent->lo, sizeof(extent->lo)),
                           bl_xxh3(extent->hi, sizeof(extent->hi))};
        key = bl_xxh3(parts, sizeof(parts)) ^ bl_mix64(bl_xxh3(box, sizeof(box)));
    }
    return key;
}

uint64_t leader_arena_key(const struct core_leader *l, uint32_t node,
                          const struct wire_arena_info *arena)
{
    return l->nodes[node].keys[arena - l->nodes[node].report.arenas];
}

static int piece_compare(const void *a, const void *b)
{
    const struct leader_piece *x = a;
    const struct leader_piece *y = b;
    return x->key < y->key ? -1 : x->key > y->key;
}

int leader_pieces_sum(struct leader_piece *pieces, uint32_t count, struct bl_state_digest *ret)
{
    int agree = 1;
    memset(ret, 0, sizeof(*ret));
    if (count) {
        qsort(pieces, count, sizeof(*pieces), piece_compare);
    }
    for (uint32_t i = 0; i < count; i++) {
        if (i > 0 && pieces[i].key == pieces[i - 1].key) {
            agree &= bl_state_digest_equal(&pieces[i].digest, &pieces[i - 1].digest);
        } else {
            bl_state_digest_merge(ret, &pieces[i].digest);
        }
    }
    return agree;
}

static int copy_compare(const void *a, const void *b)
{
    const struct pick_copy *x = a;
    const struct pick_copy *y = b;
    if (x->step != y->step) {
        return x->step > y->step ? -1 : 1;
    }
    if (x->key != y->key) {
        return x->key < y->key ? -1 : 1;
    }
    if (x->arena->arena != y->arena->arena) {
        return x->arena->arena < y->arena->arena ? -1 : 1;
    }
    return x->generation > y->generation ? -1 : x->generation < y->generation;
}

/* All admissible sealed copies on connected nodes, newest step first, equal extents together. */
static struct pick_copy *pick_gather(const struct core_leader *l, uint32_t *ret_count,
                                     uint64_t only_step)
{
    struct pick_copy *copies = NULL;
    uint32_t count = 0;
    int rule = leader_has_rule(l, WIRE_RULE_LINE_END);

    for (uint32_t n = 0; n < l->node_count; n++) {
        const struct wire_report *report = &l->nodes[n].report;
        for (uint32_t a = 0; l->nodes[n].connected && a < report->arena_count; a++) {
            const struct wire_arena_info *arena = &report->arenas[a];
            for (uint32_t k = 0; arena->extents.extent_count && k < arena->slot_count; k++) {
                const struct wire_slot_info *slot = &arena->slots[k];
                if (slot->state != WIRE_SLOT_SEALED || slot->line != l->record.line ||
                    (only_step != UINT64_MAX && slot->step != only_step) ||
                    pick_is_bad(l, slot->step) ||
                    (rule &&
                     !leader_copy_is_admissible(&l->record, slot->generation, slot->step))) {
                    continue;
                }
                copies = core_grow(copies, count, sizeof(*copies));
                copies[count++] = (struct pick_copy){.arena = arena,
                                                     .slot = k,
                                                     .node = n,
                                                     .step = slot->step,
                                                     .generation = slot->generation,
                                                     .key = l->nodes[n].keys[a]};
            }
        }
    }
    if (count) {
        qsort(copies, count, sizeof(*copies), copy_compare);
    }
    *ret_count = count;
    return copies;
}

static uint64_t list_elems(const struct bl_extent_list *list)
{
    uint64_t elems = 0;
    for (uint32_t i = 0; i < list->extent_count; i++) {
        elems += bl_extent_elems(&list->extents[i]);
    }
    return elems;
}

/* Adds the whole of every tensor that is not yet in `wanted`. 0, or an error (tables that differ).
 */
static int wanted_add(struct bl_extent_list *wanted, const struct bl_extent_list *from)
{
    for (uint32_t i = 0; i < from->tensor_count; i++) {
        uint32_t before = wanted->tensor_count;
        uint32_t index = 0;
        int rc = bl_extent_list_tensor(wanted, &from->tensors[i], &index, NULL);
        if (rc == 0 && wanted->tensor_count > before) {
            struct bl_extent extent;
            bl_extent_whole(&extent, &from->tensors[i], index, 0,
                            bl_tensor_elems(&from->tensors[i]));
            rc = bl_extent_list_add(wanted, &extent);
        }
        if (rc < 0) {
            return rc;
        }
    }
    return 0;
}

/* How many elements of the state the lists hold together, each counted once. */
static uint64_t pick_cover(const struct bl_extent_list *const *lists, uint32_t count)
{
    struct bl_extent_list wanted = {0};
    struct bl_plan plan;
    uint64_t covered = 0;
    int rc = 0;

    for (uint32_t i = 0; i < count && rc == 0; i++) {
        /* Most lists share one table: equal to the one before adds nothing. */
        if (i > 0 && lists[i]->tensor_count == lists[i - 1]->tensor_count &&
            memcmp(lists[i]->tensors, lists[i - 1]->tensors,
                   lists[i]->tensor_count * sizeof(*lists[i]->tensors)) == 0) {
            continue;
        }
        rc = wanted_add(&wanted, lists[i]);
    }
    if (rc == 0 && count && bl_plan_make(&plan, &wanted, lists, count, NULL) == 0) {
        covered = list_elems(&wanted) - plan.missing_elems;
        bl_plan_close(&plan);
    }
    bl_extent_list_close(&wanted);
    return covered;
}

/* One of each group of equal extents: `ret` has room for `count`. Sums elements and digests. */
static uint32_t pick_distinct(const struct pick_copy *copies, uint32_t count, uint64_t generation,
                              int pinned_only, const struct pick_copy **ret, uint64_t *ret_elems,
                              struct bl_state_digest *ret_digest)
{
    uint32_t kept = 0;
    *ret_elems = 0;
    memset(ret_digest, 0, sizeof(*ret_digest));
    for (uint32_t i = 0; i < count; i++) {
        const struct pick_copy *copy = &copies[i];
        if ((generation && copy->generation != generation) ||
            (pinned_only && !copy->arena->slots[copy->slot].pinned) ||
            (kept > 0 && ret[kept - 1]->key == copy->key)) {
            continue;
        }
        ret[kept++] = copy;
        *ret_elems += list_elems(&copy->arena->extents);
        bl_state_digest_merge(ret_digest, &copy->arena->slots[copy->slot].digest);
    }
    return kept;
}

static uint64_t distinct_cover(const struct pick_copy *const *copies, uint32_t count)
{
    const struct bl_extent_list **lists = core_alloc(count, sizeof(*lists));
    for (uint32_t i = 0; i < count; i++) {
        lists[i] = &copies[i]->arena->extents;
    }
    uint64_t covered = pick_cover(lists, count);
    free(lists);
    return covered;
}

/* Looks for a set among copies of one step that holds each element exactly once: over all
 * generations first, then within each. The set's size in `chosen`, 0 none. */
static uint32_t pick_exact(const struct pick_copy *copies, uint32_t count, uint64_t state_elems,
                           int pinned_only, const struct pick_copy **chosen,
                           struct bl_state_digest *digest)
{
    uint64_t elems = 0;
    uint32_t kept = pick_distinct(copies, count, 0, pinned_only, chosen, &elems, digest);
    if (elems == state_elems && distinct_cover(chosen, kept) == state_elems) {
        return kept;
    }
    uint64_t tried = UINT64_MAX; /* generations downward */
    for (;;) {
        uint64_t generation = 0;
        for (uint32_t i = 0; i < count; i++) {
            if (copies[i].generation < tried && copies[i].generation > generation) {
                generation = copies[i].generation;
            }
        }
        if (generation == 0) {
            return 0;
        }
        tried = generation;
        kept = pick_distinct(copies, count, generation, pinned_only, chosen, &elems, digest);
        if (elems == state_elems && distinct_cover(chosen, kept) == state_elems) {
            return kept;
        }
    }
}

static void pick_copies(const struct core_leader *l, const struct pick_copy *copies, uint32_t count,
                        struct leader_pick *ret)
{
    ret->copies = core_alloc(count, sizeof(*ret->copies));
    for (uint32_t i = 0; i < count; i++) {
        const struct leader_node *node = &l->nodes[copies[i].node];
        /* One of each arena, the newest: its owner needs its other slots. Those of one arena lie
         * together, newest first. */
        if (i > 0 && copies[i].arena == copies[i - 1].arena) {
            continue;
        }
        struct wire_copy *copy = &ret->copies[ret->copy_count++];
        copy->arena = copies[i].arena->arena;
        copy->slot = copies[i].slot;
        memcpy(copy->node, node->name, sizeof(copy->node));
        memcpy(copy->bulk_addr, node->report.bulk_addr, sizeof(copy->bulk_addr));
    }
}

/* The newest step that memory holds whole. */
static void pick_memory(const struct core_leader *l, struct leader_pick *ret)
{
    uint32_t count = 0;
    struct pick_copy *copies = pick_gather(l, &count, UINT64_MAX);
    const struct pick_copy **chosen = core_alloc(count, sizeof(struct pick_copy *));
    uint64_t state_elems = l->record.state_elems;

    for (uint32_t lo = 0, hi = 0; state_elems && lo < count && !ret->found; lo = hi) {
        uint64_t elems = 0;
        struct bl_state_digest digest;
        for (hi = lo; hi < count && copies[hi].step == copies[lo].step; hi++) {
        }
        uint32_t kept = pick_distinct(&copies[lo], hi - lo, 0, 0, chosen, &elems, &digest);
        if (elems < state_elems || distinct_cover(chosen, kept) != state_elems) {
            continue;
        }
        ret->found = 1;
        ret->from_memory = 1;
        ret->step = copies[lo].step;
        ret->state_elems = state_elems;
        ret->digest_known =
            pick_exact(&copies[lo], hi - lo, state_elems, 0, chosen, &ret->digest) > 0;
        pick_copies(l, &copies[lo], hi - lo, ret);
    }
    free(chosen);
    free(copies);
}

static int checkpoint_is_usable(const struct core_leader *l, const struct core_checkpoint *c)
{
    if (!c->complete || !leader_copy_is_admissible(&l->record, c->generation, c->step) ||
        (l->record.function_id && c->function_id && c->function_id != l->record.function_id)) {
        return 0;
    }
    return !leader_is_bad(l, c->root, c->dir);
}

/* The same state on other roots, for what cannot be read in the first. */
static void pick_others(const struct core_leader *l, struct leader_pick *ret)
{
    const struct core_checkpoint *first = ret->checkpoint;

    for (uint32_t i = 0; first && first->digest_known && i < l->checkpoint_count; i++) {
        const struct core_checkpoint *c = &l->checkpoints[i];
        if (c != first && c->root != first->root && c->step == first->step && c->digest_known &&
            checkpoint_is_usable(l, c) && bl_state_digest_equal(&c->digest, &first->digest) &&
            ret->other_count < WIRE_JOB_ROOTS - 1) {
            ret->others[ret->other_count++] = c;
        }
    }
}

void leader_pick_newest(const struct core_leader *l, struct leader_pick *ret)
{
    memset(ret, 0, sizeof(*ret));
    pick_memory(l, ret);
    for (uint32_t i = 0; i < l->checkpoint_count; i++) {
        const struct core_checkpoint *c = &l->checkpoints[i];
        if (!checkpoint_is_usable(l, c) || (ret->found && c->step < ret->step)) {
            continue;
        }
        if (ret->found && c->step == ret->step && ret->checkpoint &&
            ret->checkpoint->root <= c->root) {
            continue; /* earlier roots are nearer */
        }
        if (!ret->found || c->step > ret->step) {
            free(ret->copies);
            ret->copies = NULL;
            ret->copy_count = 0;
            ret->from_memory = 0;
            ret->digest_known = 0;
        }
        ret->found = 1;
        ret->step = c->step;
        ret->checkpoint = c;
        ret->state_elems = ret->state_elems ? ret->state_elems : c->state_elems;
        if (!ret->digest_known && c->digest_known) {
            ret->digest_known = 1;
            ret->digest = c->digest;
        }
    }
    pick_others(l, ret);
}

void leader_pick_close(struct leader_pick *pick)
{
    free(pick->copies);
    memset(pick, 0, sizeof(*pick));
}

/* Further copies of what was chosen, on other nodes: the same extents with the same bytes. Both
 * lists are in the order of keys. */
static void pick_twins(const struct pick_copy *copies, uint32_t count, int pinned_only,
                       const struct pick_copy *const *chosen, uint32_t kept, struct leader_set *ret)
{
    ret->twins = core_alloc(count, sizeof(*ret->twins));
    ret->twin_nodes = core_alloc(count, sizeof(*ret->twin_nodes));
    for (uint32_t i = 0, c = 0; i < count && c < kept; i++) {
        while (c < kept && chosen[c]->key < copies[i].key) {
            c++;
        }
        if (c == kept || chosen[c]->key != copies[i].key || chosen[c] == &copies[i]) {
            continue;
        }
        const struct wire_slot_info *own = &chosen[c]->arena->slots[chosen[c]->slot];
        const struct wire_slot_info *slot = &copies[i].arena->slots[copies[i].slot];
        if (copies[i].node != chosen[c]->node && (!pinned_only || slot->pinned) &&
            bl_state_digest_equal(&own->digest, &slot->digest)) {
            ret->twins[ret->twin_count] = copies[i].arena->arena;
            ret->twin_nodes[ret->twin_count++] = copies[i].node;
        }
    }
}

int leader_set_find(const struct core_leader *l, uint64_t step, int pinned_only,
                    struct leader_set *ret)
{
    uint32_t count = 0;
    struct pick_copy *copies = pick_gather(l, &count, step);
    const struct pick_copy **chosen = core_alloc(count, sizeof(struct pick_copy *));
    uint32_t kept = 0;

    memset(ret, 0, sizeof(*ret));
    if (l->record.state_elems) {
        kept = pick_exact(copies, count, l->record.state_elems, pinned_only, chosen, &ret->digest);
    }
    if (kept) {
        ret->arenas = core_alloc(kept, sizeof(*ret->arenas));
        ret->nodes = core_alloc(kept, sizeof(*ret->nodes));
        ret->arena_count = kept;
        ret->elems = l->record.state_elems;
        for (uint32_t i = 0; i < kept; i++) {
            ret->arenas[i] = chosen[i]->arena->arena;
            ret->nodes[i] = chosen[i]->node;
            ret->generation =
                chosen[i]->generation > ret->generation ? chosen[i]->generation : ret->generation;
        }
        pick_twins(copies, count, pinned_only, chosen, kept, ret);
    }
    free(chosen);
    free(copies);
    return kept > 0;
}

void leader_set_close(struct leader_set *set)
{
    free(set->arenas);
    free(set->nodes);
    free(set->twins);
    free(set->twin_nodes);
    memset(set, 0, sizeof(*set));
}

struct pick_list {
    uint64_t key;
    const struct bl_extent_list *list;
};

static int list_compare(const void *a, const void *b)
{
    const struct pick_list *x = a;
    const struct pick_list *y = b;
    return x->key < y->key ? -1 : x->key > y->key;
}

uint64_t leader_members_elems(const struct core_leader *l, uint64_t *ret_named)
{
    const struct wire_plan *plan = &l->record.plan;
    struct pick_list *found = core_alloc(plan->world, sizeof(*found));
    const struct bl_extent_list **lists = core_alloc(plan->world, sizeof(*lists));
    uint32_t count = 0;
    uint32_t kept = 0;

    *ret_named = 0;
    for (uint32_t i = 0; i < plan->world; i++) {
        const struct leader_proc *p = leader_proc_find(l, plan->members[i].incarnation);
        const struct wire_arena_info *arena =
            p ? leader_arena_find(l, p->node, p->report.arena) : NULL;
        if (arena && arena->extents.extent_count) {
            found[count++] =
                (struct pick_list){leader_arena_key(l, p->node, arena), &arena->extents};
        }
    }
    if (count) {
        qsort(found, count, sizeof(*found), list_compare);
    }
    for (uint32_t i = 0; i < count; i++) {
        if (i == 0 || found[i].key != found[i - 1].key) {
            lists[kept++] = found[i].list;
            *ret_named += list_elems(found[i].list);
        }
    }
    uint64_t elems = count == plan->world ? pick_cover(lists, kept) : 0;
    free(lists);
    free(found);
    return elems;
}
