/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Roots that each node has for itself. No directory has a whole checkpoint; this leader puts
 * together what the connected nodes say that they have:
 *
 *      node a:  step 40, manifest M, part 0, final name      M of 2 parts: both there, one is named
 *      node b:  step 40, manifest M, part 1, attempt         so: committed; b is told to name it
 *      node a:  step 50, manifest N, part 0, attempt         N of 2 parts: one there, nobody named
 *                                                            it, not in the record: trash
 *
 * A manifest is committed when some node has it under its final name, or the record names it. It is
 * usable when all its parts are there under that name. O(n log n) in what the nodes have.
 */
#include "daemon/core/leader_state.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct apart_ref { /* what one node said */
    const struct wire_holding *holding;
    uint32_t node;
};

struct apart_group { /* of one manifest on one root */
    const struct apart_ref *refs;
    uint32_t count;
    uint32_t present;  /* parts */
    uint32_t final;    /* of them, under the final name */
    uint32_t verified; /* of them, marked */
    uint64_t attempt;  /* nonce of those that are not named yet; 0: all are */
    int is_committed;
};

struct leader_node *leader_head_node(struct core_leader *l)
{
    return l->node ? leader_node_find(l, l->node) : NULL;
}

int leader_has_apart(const struct core_leader *l)
{
    for (uint32_t i = 0; i < l->config.root_count; i++) {
        if (l->roots[i].apart) {
            return 1;
        }
    }
    return 0;
}

/* ---- asking ---- */

static void node_forget(struct leader_node *node)
{
    free(node->holdings);
    node->holdings = NULL;
    node->holding_count = 0;
    node->scan_id = 0;
    node->scan_failed = 0;
}

void leader_apart_close(struct core_leader *l)
{
    for (uint32_t i = 0; i < l->node_count; i++) {
        node_forget(&l->nodes[i]);
    }
    free(l->scan_found);
}

void leader_apart_scan(struct core_leader *l)
{
    l->scan_began_ms = l->now_ms;
    if (!leader_has_apart(l)) {
        return;
    }
    l->scan_id = leader_random(l);
    for (uint32_t i = 0; i < l->node_count; i++) {
        l->nodes[i].dirty = 1; /* what it said before tells still who may be asked for files */
    }
}

void leader_apart_report(struct core_leader *l, uint32_t index, struct wire_report *report)
{
    struct leader_node *node = &l->nodes[index];

    node->dirty |= report->scan_told; /* to acknowledge it */
    if (!report->scan_told || report->scan_id != l->scan_id || node->scan_id == l->scan_id) {
        return;
    }
    node_forget(node);
    node->scan_id = report->scan_id;
    node->scan_failed = report->scan_failed;
    node->holdings = report->holdings;
    node->holding_count = report->holding_count;
    report->holdings = NULL;
    report->holding_count = 0;
}

int leader_apart_is_scanned(const struct core_leader *l)
{
    if (!leader_has_apart(l) || l->now_ms - l->scan_began_ms >= l->config.deadlines.load) {
        return 1;
    }
    for (uint32_t i = 0; i < l->node_count; i++) {
        const struct leader_node *node = &l->nodes[i];
        if ((node->connected || node->up) && node->scan_id != l->scan_id) {
            return 0;
        }
    }
    return 1;
}

/* ---- putting together ---- */

static int ref_order(const void *a_, const void *b_)
{
    const struct apart_ref *a = a_, *b = b_;
    const struct wire_holding *x = a->holding, *y = b->holding;

    if (x->root != y->root) {
        return x->root < y->root ? -1 : 1;
    }
    if (x->manifest_digest != y->manifest_digest) {
        return x->manifest_digest < y->manifest_digest ? -1 : 1;
    }
    if (x->part != y->part) {
        return x->part < y->part ? -1 : 1;
    }
    if ((x->attempt == 0) != (y->attempt == 0)) {
        return x->attempt == 0 ? -1 : 1;
    }
    return a->node < b->node ? -1 : a->node > b->node;
}

static int node_has_answered(const struct core_leader *l, const struct leader_node *node)
{
    return node->connected && node->scan_id == l->scan_id;
}

static struct apart_ref *refs_gather(const struct core_leader *l, uint32_t *ret_count)
{
    struct apart_ref *refs = NULL;
    uint32_t count = 0;

    for (uint32_t n = 0; n < l->node_count; n++) {
        const struct leader_node *node = &l->nodes[n];
        for (uint32_t i = 0; node_has_answered(l, node) && i < node->holding_count; i++) {
            const struct wire_holding *holding = &node->holdings[i];
            if (holding->root < l->config.root_count && l->roots[holding->root].apart) {
                refs = core_grow(refs, count, sizeof(*refs));
                refs[count++] = (struct apart_ref){holding, n};
            }
        }
    }
    if (count) {
        qsort(refs, count, sizeof(*refs), ref_order);
    }
    *ret_count = count;
    return refs;
}

/* The refs from the first on that are of one manifest. */
static void group_make(const struct core_leader *l, const struct apart_ref *refs, uint32_t count,
                       struct apart_group *ret)
{
    const struct wire_holding *first = refs[0].holding;
    const struct wire_record_root *root = &l->record.roots[first->root];
    uint32_t part = UINT32_MAX;

    memset(ret, 0, sizeof(*ret));
    ret->refs = refs;
    ret->is_committed = root->committed_step == first->step &&
                        root->committed_digest == first->manifest_digest &&
                        root->committed_generation == first->generation;
    for (uint32_t i = 0; i < count && refs[i].holding->root == first->root &&
                         refs[i].holding->manifest_digest == first->manifest_digest;
         i++) {
        const struct wire_holding *h = refs[i].holding;
        ret->count++;
        ret->is_committed |= h->attempt == 0;
        ret->attempt = h->attempt ? h->attempt : ret->attempt;
        if (h->part == UINT32_MAX || h->part == part) {
            continue; /* the manifest alone, or the same part once more */
        }
        part = h->part;
        ret->present++;
        ret->final += h->attempt == 0;
        ret->verified += h->attempt == 0 && h->verified;
    }
}

static int was_told(struct core_leader *l, uint64_t digest)
{
    uint32_t known = l->lacks_told_count < LEADER_BAD_MAX ? l->lacks_told_count : LEADER_BAD_MAX;
    for (uint32_t i = 0; i < known; i++) {
        if (l->lacks_told[i] == digest) {
            return 1;
        }
    }
    l->lacks_told[l->lacks_told_count++ % LEADER_BAD_MAX] = digest;
    return 0;
}

/* Says of a committed one that it is not whole; once. */
static void group_lacks(struct core_leader *l, const struct apart_group *g)
{
    const struct wire_holding *h = g->refs[0].holding;
    struct leader_root *root = &l->roots[h->root];
    const char *who = "";
    char text[WIRE_TEXT_MAX];

    for (uint32_t i = 0; i < g->count && !who[0]; i++) {
        const struct leader_node *node = leader_node_find(l, g->refs[i].holding->node);
        if (!node || node->scan_id != l->scan_id || node->holding_count == 0) {
            who = g->refs[i].holding->node;
        }
    }
    who = who[0] ? who : h->node;
    snprintf(text, sizeof(text), "%.80s/%.60s: %u of %u parts are there, missing is node %.48s's",
             root->path, h->dir, g->present, h->part_count, who);
    if (l->record.roots[h->root].committed_digest == h->manifest_digest) {
        memcpy(root->lacks, text, sizeof(root->lacks));
    }
    if (!leader_copy_is_admissible(&l->record, h->generation, h->step) ||
        was_told(l, h->manifest_digest)) {
        return;
    }
    struct core_event *e = leader_event(l, CORE_EVENT_CHECKPOINT_INCOMPLETE);
    e->step = h->step;
    e->count = h->part_count - g->present;
    snprintf(e->text, sizeof(e->text), "%s", text);
}

/* Nodes that have a committed one under the attempt's name are told to give it the final one. */
static void group_publish(struct core_leader *l, const struct apart_group *g)
{
    const struct wire_holding *h = g->refs[0].holding;

    for (uint32_t i = 0; i < l->save_count; i++) {
        if (l->saves[i].save.attempt == g->attempt) {
            return; /* they are being told */
        }
    }
    if (l->save_count == WIRE_SAVES_MAX) {
        return; /* the next scan finds it again */
    }
    struct leader_save *s = &l->saves[l->save_count++];
    memset(s, 0, sizeof(*s));
    s->started_ms = l->now_ms;
    s->digest = h->digest;
    s->manifest_digest = h->manifest_digest;
    s->stage = LEADER_SAVE_ENDED;
    s->is_found = 1;
    s->save = (struct wire_save){.attempt = g->attempt,
                                 .step = h->step,
                                 .generation = h->generation,
                                 .line = h->line,
                                 .root = h->root,
                                 .state = WIRE_SAVE_COMMITTED,
                                 .apart = 1,
                                 .manifest_digest = h->manifest_digest};
    snprintf(s->save.dir, sizeof(s->save.dir), "step-%012" PRIu64 ".g%" PRIu64, h->step,
             h->generation);
    s->parts = core_alloc(g->count, sizeof(*s->parts));
    for (uint32_t n = 0; n < l->node_count; n++) {
        int has_it = 0;
        for (uint32_t i = 0; i < g->count; i++) {
            has_it |= g->refs[i].node == n && g->refs[i].holding->attempt != 0;
        }
        if (has_it) {
            s->parts[s->part_count++] =
                (struct leader_part){.node = n, .written = 1, .prepared = 1};
            l->nodes[n].dirty = 1;
        }
    }
}

static void group_found(const struct apart_group *g, struct core_checkpoint *ret)
{
    const struct wire_holding *h = g->refs[0].holding;
    int is_whole = g->is_committed && g->final == h->part_count;

    *ret = (struct core_checkpoint){.root = h->root,
                                    .complete = (uint32_t)is_whole,
                                    .prepared = (uint32_t)!is_whole,
                                    .step = h->step,
                                    .generation = h->generation,
                                    .line = h->line,
                                    .function_id = h->function_id,
                                    .attempt = g->attempt,
                                    .manifest_digest = h->manifest_digest,
                                    .digest_known = 1,
                                    .digest = h->digest,
                                    .verified = is_whole && g->verified == h->part_count};
    snprintf(ret->dir, sizeof(ret->dir), "step-%012" PRIu64 ".g%" PRIu64, h->step, h->generation);
}

/* Before the groups are looked at: the newest committed one of each root lacks everything. */
static void roots_doubt(struct core_leader *l)
{
    for (uint32_t r = 0; r < l->config.root_count; r++) {
        struct leader_root *root = &l->roots[r];
        root->incomplete = root->apart && leader_root_next(l, r) != 0;
        snprintf(root->lacks, sizeof(root->lacks), "%.80s/%.60s: no node has it", root->path,
                 l->record.roots[r].committed_dir);
    }
}

/* Steps + 1 of the newest whole ones of each root, 0 none: what older ones lack, as retention is
 * not at the same moment everywhere, concerns nobody. */
static void wholes_find(const struct core_leader *l, const struct apart_ref *refs, uint32_t count,
                        uint64_t ret[WIRE_JOB_ROOTS])
{
    struct apart_group g;

    memset(ret, 0, WIRE_JOB_ROOTS * sizeof(*ret));
    for (uint32_t at = 0; at < count; at += g.count) {
        group_make(l, &refs[at], count - at, &g);
        const struct wire_holding *h = g.refs[0].holding;
        if (g.is_committed && g.present == h->part_count && h->step >= ret[h->root] &&
            leader_copy_is_admissible(&l->record, h->generation, h->step)) {
            ret[h->root] = h->step + 1;
        }
    }
}

uint32_t leader_apart_assemble(struct core_leader *l, struct core_checkpoint **found,
                               uint32_t *count)
{
    uint32_t ref_count = 0;
    uint32_t failed = 0;
    struct apart_ref *refs = refs_gather(l, &ref_count);
    uint64_t wholes[WIRE_JOB_ROOTS];
    struct apart_group g;

    roots_doubt(l);
    wholes_find(l, refs, ref_count, wholes);
    for (uint32_t at = 0; at < ref_count; at += g.count) {
        group_make(l, &refs[at], ref_count - at, &g);
        const struct wire_holding *h = g.refs[0].holding;
        int is_newest = l->record.roots[h->root].committed_digest == h->manifest_digest;
        if (g.is_committed && g.attempt) {
            group_publish(l, &g);
        }
        if (g.present == h->part_count) {
            *found = core_grow(*found, *count, sizeof(**found));
            group_found(&g, &(*found)[*count]);
            l->roots[h->root].incomplete &= !(is_newest && (*found)[*count].complete);
            (*count)++;
        } else if (g.is_committed && h->step >= wholes[h->root]) {
            group_lacks(l, &g);
        }
        if (is_newest && g.present == h->part_count && l->roots[h->root].incomplete) {
            snprintf(l->roots[h->root].lacks, WIRE_TEXT_MAX, "%.80s/%.60s: its commit is finished",
                     l->roots[h->root].path, h->dir);
        }
    }
    free(refs);
    for (uint32_t i = 0; i < l->node_count; i++) {
        failed |= node_has_answered(l, &l->nodes[i]) ? l->nodes[i].scan_failed : 0;
    }
    return failed;
}

uint32_t leader_apart_holders(const struct core_leader *l, struct wire_holder **ret)
{
    uint32_t count = 0;

    *ret = NULL;
    for (uint32_t i = 0; leader_has_apart(l) && i < l->node_count; i++) {
        const struct leader_node *node = &l->nodes[i];
        if (node->connected && node->holding_count && count < WIRE_HOLDERS_MAX) {
            *ret = core_grow(*ret, count, sizeof(**ret));
            struct wire_holder *holder = &(*ret)[count++];
            memset(holder, 0, sizeof(*holder));
            memcpy(holder->node, node->name, sizeof(holder->node));
            memcpy(holder->bulk_addr, node->report.bulk_addr, sizeof(holder->bulk_addr));
        }
    }
    return count;
}
