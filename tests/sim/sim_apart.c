/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Roots that each node has for itself: what lies on each node's disk, and what its engine does. A
 * disk outlives the machine's memory; it is lost only when it is wiped. Files of other nodes are
 * read through their daemons, so only where both run and hear each other.
 */
#include "tests/sim/sim.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define APART_KEEP 3 /* newest ones that a node keeps */

struct apart_task { /* of a node's engine */
    uint32_t node;
    uint64_t incarnation, attempt, scan;
    enum core_member_effect_kind kind;
};

int sim_is_apart(const struct sim *sim, uint32_t root)
{
    return root == 0 && sim->profile.apart != 0;
}

static struct sim_own *own_find(struct sim *sim, uint32_t node, uint64_t attempt)
{
    for (uint32_t i = 0; i < sim->own_count; i++) {
        if (sim->owns[i].node == node && sim->owns[i].attempt == attempt) {
            return &sim->owns[i];
        }
    }
    return NULL;
}

static struct sim_own *own_get(struct sim *sim, uint32_t node, uint64_t attempt)
{
    struct sim_own *own = own_find(sim, node, attempt);

    if (!own) {
        sim->owns = realloc(sim->owns, (sim->own_count + 1) * sizeof(*sim->owns));
        BL_ASSERT(sim->owns);
        own = &sim->owns[sim->own_count++];
        memset(own, 0, sizeof(*own));
        own->node = node;
        own->attempt = attempt;
    }
    return own;
}

static void own_drop(struct sim *sim, uint32_t index)
{
    sim->owns[index] = sim->owns[--sim->own_count];
}

static struct sim_manifest *manifest_find(struct sim *sim, uint64_t digest)
{
    for (uint32_t i = 0; i < sim->manifest_count; i++) {
        if (digest && sim->manifests[i].digest == digest) {
            return &sim->manifests[i];
        }
    }
    return NULL;
}

void sim_apart_stored(struct sim *sim, const struct wire_record *record)
{
    for (uint32_t r = 0; r < record->root_count; r++) {
        struct sim_manifest *manifest = manifest_find(sim, record->roots[r].committed_digest);
        if (manifest && sim_is_apart(sim, r)) {
            manifest->is_committed = 1;
        }
    }
}

/* Can the engine of `at` read the disk of `of`? */
int sim_apart_can_read(const struct sim *sim, uint32_t at, uint32_t of)
{
    return at == of || (sim->nodes[of].member && sim_can_hear(sim, at, of));
}

void sim_apart_element(struct sim *sim, uint32_t node, uint64_t attempt, uint32_t elem,
                       uint64_t value)
{
    struct sim_own *own = own_get(sim, node, attempt);
    own->values[elem] = value;
    own->has[elem] = 1;
}

void sim_apart_written(struct sim *sim, uint32_t node, uint64_t attempt)
{
    own_get(sim, node, attempt)->is_written = 1;
}

/* ---- the head: the manifest ---- */

int sim_apart_compose(struct sim *sim, uint32_t head, const struct core_commit *commit,
                      uint64_t *ret_digest)
{
    struct sim_manifest manifest = {.attempt = commit->attempt};

    for (uint32_t i = 0; i < commit->part_count; i++) {
        uint32_t node = (uint32_t)strtoul(commit->parts[i].node + 1, NULL, 10);
        struct sim_own *own = own_find(sim, node, commit->attempt);
        if (!sim_apart_can_read(sim, head, node) || !own || !own->is_written) {
            return -EIO;
        }
        manifest.nodes[manifest.part_count++] = node;
    }
    if (sim->now < sim->faults_over_ms && sim_chance(sim, sim->profile.engine_fail)) {
        return -EIO;
    }
    manifest.digest = sim_random(sim) | 1;
    manifest.info = (struct core_checkpoint){.root = commit->root,
                                             .step = commit->step,
                                             .generation = commit->generation,
                                             .line = commit->line,
                                             .function_id = commit->function_id,
                                             .digest = commit->digest};
    snprintf(manifest.info.dir, sizeof(manifest.info.dir), "%s", commit->dir);
    sim->manifests = realloc(sim->manifests, (sim->manifest_count + 1) * sizeof(*sim->manifests));
    BL_ASSERT(sim->manifests);
    sim->manifests[sim->manifest_count++] = manifest;
    own_get(sim, head, commit->attempt)->manifest = manifest.digest;
    *ret_digest = manifest.digest;
    return 0;
}

/* ---- the nodes ---- */

static int node_prepare(struct sim *sim, uint32_t node, const struct wire_save *save)
{
    uint32_t from = (uint32_t)strtoul(save->source + 1, NULL, 10);
    struct sim_own *theirs = own_find(sim, from, save->attempt);
    struct sim_own *own;

    if (!sim_apart_can_read(sim, node, from) || !theirs ||
        theirs->manifest != save->manifest_digest) {
        return -ENOENT;
    }
    if (sim->now < sim->faults_over_ms && sim_chance(sim, sim->profile.engine_fail)) {
        return -EIO;
    }
    own = own_get(sim, node, save->attempt);
    own->manifest = save->manifest_digest;
    return 0;
}

static int node_publish(struct sim *sim, uint32_t node, const struct wire_save *save)
{
    struct sim_own *own = own_find(sim, node, save->attempt);
    const struct sim_manifest *manifest = manifest_find(sim, save->manifest_digest);

    if (!own || own->manifest != save->manifest_digest || !manifest) {
        return -ENOENT;
    }
    if (!manifest->is_committed) {
        sim_fail(sim, "n%u: step %llu gets its final name without the store's word", node,
                 (unsigned long long)save->step);
    }
    if (!own->is_final && sim->now < sim->faults_over_ms &&
        sim_chance(sim, sim->profile.engine_fail)) {
        return -EIO;
    }
    own->is_final = 1;
    sim->commits++;
    /* The sweep: attempts of before are trash. */
    for (uint32_t i = sim->own_count; i-- > 0;) {
        const struct sim_own *other = &sim->owns[i];
        const struct sim_manifest *m = manifest_find(sim, other->manifest);
        if (other->node == node && !other->is_final && m && m->info.step <= save->step &&
            m->info.generation <= save->generation) {
            own_drop(sim, i);
        }
    }
    return 0;
}

static int is_admissible(const struct wire_save *save, const struct core_checkpoint *info)
{
    for (uint32_t i = 0; i < save->line_end_count; i++) {
        if (info->generation < save->line_ends[i].generation &&
            info->step > save->line_ends[i].step) {
            return 0;
        }
    }
    return 1;
}

/* Newer ones of the run's line that this node knows to be good everywhere. */
static uint32_t verified_newer(struct sim *sim, uint32_t node, const struct wire_save *save,
                               const struct core_checkpoint *than, uint32_t *ret_newer)
{
    uint32_t verified = 0;

    *ret_newer = 0;
    for (uint32_t i = 0; i < sim->own_count; i++) {
        const struct sim_manifest *m = manifest_find(sim, sim->owns[i].manifest);
        if (sim->owns[i].node == node && sim->owns[i].is_final && m && m->info.step > than->step &&
            is_admissible(save, &m->info)) {
            ++*ret_newer;
            verified += sim->owns[i].is_verified;
        }
    }
    return verified;
}

static void node_retain(struct sim *sim, uint32_t node, const struct wire_save *save)
{
    struct sim_own *own = own_find(sim, node, save->attempt);
    uint32_t newer;

    if (own) {
        own->is_verified = 1;
    }
    for (uint32_t i = sim->own_count; i-- > 0;) {
        const struct sim_manifest *m = manifest_find(sim, sim->owns[i].manifest);
        if (sim->owns[i].node == node && sim->owns[i].is_final && m &&
            verified_newer(sim, node, save, &m->info, &newer) >= 2 && newer >= APART_KEEP) {
            sim_trace(sim, "n%u: %s is retired", node, m->info.dir);
            own_drop(sim, i);
        }
    }
}

static void node_cancel(struct sim *sim, uint32_t node, uint64_t attempt)
{
    struct sim_own *own = own_find(sim, node, attempt);

    if (own && !own->is_final) {
        const struct sim_manifest *manifest = manifest_find(sim, own->manifest);
        if (manifest && manifest->is_committed) {
            sim_fail(sim, "n%u: step %llu is committed, and its attempt is dropped", node,
                     (unsigned long long)manifest->info.step);
        }
        own_drop(sim, (uint32_t)(own - sim->owns));
    }
}

static void node_scan(struct sim *sim, struct sim_node *node, uint64_t scan)
{
    struct wire_holding *holdings =
        sim_alloc(sim->own_count + sim->disk_count + 1, sizeof(*holdings));
    uint32_t count = 0;
    uint32_t failed = sim_root_hangs(sim, 0) ? 1 : 0;

    for (uint32_t i = 0; i < sim->own_count && !failed; i++) {
        const struct sim_own *own = &sim->owns[i];
        const struct sim_manifest *m = manifest_find(sim, own->manifest);
        if (own->node != node->index || !m) {
            continue;
        }
        struct wire_holding *h = &holdings[count++];
        *h = (struct wire_holding){.root = m->info.root,
                                   .attempt = own->is_final ? 0 : own->attempt,
                                   .step = m->info.step,
                                   .generation = m->info.generation,
                                   .line = m->info.line,
                                   .function_id = m->info.function_id,
                                   .digest = m->info.digest,
                                   .manifest_digest = m->digest,
                                   .part = UINT32_MAX,
                                   .part_count = m->part_count,
                                   .verified = own->is_verified};
        snprintf(h->dir, sizeof(h->dir), "%s", m->info.dir);
        for (uint32_t p = 0; p < m->part_count; p++) {
            h->part = m->nodes[p] == node->index ? p : h->part;
        }
    }
    /* Saves of the head's ranks alone are whole there. */
    for (uint32_t i = 0; i < sim->disk_count && !failed; i++) {
        const struct core_checkpoint *c = &sim->disk[i].info;
        if (sim_is_apart(sim, c->root) && sim->disk[i].node == node->index) {
            holdings[count++] = (struct wire_holding){.root = c->root,
                                                      .step = c->step,
                                                      .generation = c->generation,
                                                      .line = c->line,
                                                      .function_id = c->function_id,
                                                      .digest = c->digest,
                                                      .manifest_digest = c->manifest_digest,
                                                      .part_count = 1};
            snprintf(holdings[count - 1].dir, sizeof(c->dir), "%s", c->dir);
        }
    }
    core_member_on_scanned(node->member, scan, failed, holdings, count, sim->now);
    free(holdings);
}

static void on_task(struct sim *sim, struct sim_event *event)
{
    const struct apart_task *task = event->payload;
    struct sim_node *node = &sim->nodes[task->node];
    const struct wire_save *save;
    int rc = sim_root_hangs(sim, 0) ? -ETIMEDOUT : 0;

    if (!node->member || node->incarnation != task->incarnation) {
        return; /* the engine died with its daemon */
    }
    save = core_member_save(node->member, task->attempt);
    if (task->kind == CORE_MEMBER_ENGINE_CANCEL) {
        node_cancel(sim, task->node, task->attempt);
    } else if (task->kind == CORE_MEMBER_SCAN) {
        node_scan(sim, node, task->scan);
    } else if (task->kind == CORE_MEMBER_ENGINE_RETAIN && save) {
        node_retain(sim, task->node, save);
    } else if (task->kind == CORE_MEMBER_NONE) {
        core_member_on_engine_verified(node->member, task->attempt, 0, "", sim->now);
    } else if (save && task->kind == CORE_MEMBER_ENGINE_PREPARE) {
        rc = rc ? rc : node_prepare(sim, task->node, save);
        core_member_on_engine_stage(node->member, task->attempt, rc, "no luck", sim->now);
    } else if (save && task->kind == CORE_MEMBER_ENGINE_PUBLISH) {
        rc = rc ? rc : node_publish(sim, task->node, save);
        core_member_on_engine_stage(node->member, task->attempt, rc, "no luck", sim->now);
        struct core_member_effect later = {.kind = CORE_MEMBER_NONE, .attempt = task->attempt};
        sim_apart_effect(sim, node, &later);
    }
    sim_member_drain(sim, node);
}

void sim_apart_effect(struct sim *sim, struct sim_node *node, const struct core_member_effect *e)
{
    struct apart_task *task = sim_alloc(1, sizeof(*task));

    *task = (struct apart_task){node->index, node->incarnation, e->attempt, e->scan, e->kind};
    uint64_t delay = 2 + sim_below(sim, sim_chance(sim, 100) ? 300 : 25);
    sim_later_with(sim, delay, on_task, 0, 0, 0, task, free);
}

/* ---- loading, and losing ---- */

int sim_apart_load(struct sim *sim, uint32_t at, const char *dir, uint32_t elem, uint64_t *ret)
{
    for (uint32_t i = 0; i < sim->own_count; i++) {
        const struct sim_own *own = &sim->owns[i];
        const struct sim_manifest *m = manifest_find(sim, own->manifest);
        if (own->is_final && own->has[elem] && m && strcmp(m->info.dir, dir) == 0 &&
            sim_apart_can_read(sim, at, own->node)) {
            *ret = own->values[elem];
            return 0;
        }
    }
    return -ENOENT;
}

uint32_t sim_disk_shared(const struct sim *sim)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < sim->disk_count; i++) {
        count += !sim_is_apart(sim, sim->disk[i].info.root);
    }
    return count;
}

void sim_apart_wipe(struct sim *sim, uint32_t node)
{
    for (uint32_t i = sim->own_count; i-- > 0;) {
        if (sim->owns[i].node == node) {
            own_drop(sim, i);
        }
    }
    for (uint32_t i = sim->disk_count; i-- > 0;) {
        if (sim_is_apart(sim, sim->disk[i].info.root) && sim->disk[i].node == node) {
            sim->disk[i] = sim->disk[--sim->disk_count];
        }
    }
    sim_trace(sim, "n%u: its own root is wiped", node);
}

/* At the end: what is called committed on the nodes' roots is there, right, unless it was wiped. */
void sim_apart_check_end(struct sim *sim)
{
    for (uint32_t i = 0; i < sim->own_count; i++) {
        const struct sim_own *own = &sim->owns[i];
        const struct sim_manifest *m = manifest_find(sim, own->manifest);
        for (uint32_t e = 0; own->is_final && m && e < sim->profile.elems; e++) {
            if (own->has[e] && own->values[e] != sim_value(sim, m->info.step, e)) {
                sim_fail(sim, "n%u: its part of %s holds other bytes", own->node, m->info.dir);
                return;
            }
        }
    }
}
