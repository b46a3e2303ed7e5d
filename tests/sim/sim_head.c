/* SPDX-License-Identifier: Apache-2.0 */
/* The head: a leader, its store and the disk that all nodes share. */
#include "tests/sim/sim.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const sim_roots[] = {"/local", "/shared", "/far"};

struct sim_put { /* a compare-and-swap on its way */
    uint64_t leader, op, expected, epoch;
    struct wire_record record;
};

/* ---- leaders ---- */

struct sim_leader *sim_leader_at(struct sim *sim, uint32_t node)
{
    struct sim_leader *found = NULL;
    for (uint32_t i = 0; i < sim->leader_count; i++) {
        if (sim->leaders[i].in_use && sim->leaders[i].core && sim->leaders[i].node == node) {
            found = &sim->leaders[i];
        }
    }
    return found;
}

static struct sim_leader *leader_of(struct sim *sim, uint64_t id)
{
    for (uint32_t i = 0; i < sim->leader_count; i++) {
        if (sim->leaders[i].in_use && sim->leaders[i].core && sim->leaders[i].id == id) {
            return &sim->leaders[i];
        }
    }
    return NULL;
}

void sim_leader_stop(struct sim *sim, struct sim_leader *leader)
{
    (void)sim;
    core_leader_free(leader->core);
    leader->core = NULL;
    leader->in_use = 0;
}

static void on_leader_tick(struct sim *sim, struct sim_event *event)
{
    struct sim_leader *leader = leader_of(sim, event->a);
    if (leader) {
        for (uint32_t r = 0; r < sim->profile.roots; r++) {
            int is_stuck = sim_root_hangs(sim, r) && sim->now >= sim->hang_from[r] + SIM_STUCK_MS;
            core_leader_on_root(leader->core, r, is_stuck, "", sim->now);
        }
        core_leader_on_tick(leader->core, sim->now);
        sim_later(sim, 50, on_leader_tick, event->a, 0);
    }
}

void sim_leader_start(struct sim *sim, uint32_t node, uint64_t epoch)
{
    struct sim_leader *leader = sim_leader_at(sim, node);
    if (leader) {
        sim_leader_stop(sim, leader); /* a daemon has one */
    }
    leader = NULL;
    for (uint32_t i = 0; i < sim->leader_count && !leader; i++) {
        leader = sim->leaders[i].in_use ? NULL : &sim->leaders[i];
    }
    if (!leader) {
        BL_ASSERT(sim->leader_count < 16);
        leader = &sim->leaders[sim->leader_count++];
    }
    memset(leader, 0, sizeof(*leader));
    leader->node = node;
    leader->epoch = epoch;
    leader->incarnation = sim_random(sim);
    leader->id = ++sim->connections;
    sim->leaders_begun++;
    leader->in_use = 1;
    struct core_root roots[SIM_ROOTS_MAX];
    for (uint32_t r = 0; r < sim->profile.roots; r++) {
        roots[r] =
            (struct core_root){sim_roots[r], sim->profile.every[r], (uint32_t)sim_is_apart(sim, r)};
    }
    struct core_leader_config config = {.run = SIM_RUN,
                                        .name = "sim",
                                        .node = sim->nodes[node].name,
                                        .head_epoch = epoch,
                                        .incarnation = leader->incarnation,
                                        .seed = sim_random(sim),
                                        .secret = 1,
                                        .ranks = sim->ranks_wanted,
                                        .lanes = 64,
                                        .tp = sim->profile.tp,
                                        .pp = sim->profile.pp,
                                        .nodes_min = 1,
                                        .steps = sim->profile.steps,
                                        .deadlines = {.beat = 50,
                                                      .lease = 500,
                                                      .step_floor = 1000,
                                                      .step_ceil = 5000,
                                                      .init_floor = 2000,
                                                      .load = 2000,
                                                      .save = 3000,
                                                      .join = 2000,
                                                      .restart = 1500,
                                                      .grace = 800},
                                        .root_count = sim->profile.roots,
                                        .roots = roots,
                                        .job_json = "{}",
                                        .record = sim->store.version ? &sim->store.record : NULL,
                                        .record_version = sim->store.version,
                                        .resume = sim->resumed &&
                                                  sim->store.version == sim->resumed_version,
                                        .rules_off = sim->rules_off};
    leader->core = core_leader_new(&config, sim->now);
    BL_ASSERT(leader->core);
    sim_trace(sim, "n%u: leads, epoch %llu", node, (unsigned long long)epoch);
    sim_later(sim, 50, on_leader_tick, leader->id, 0);
}

/* ---- the store ---- */

static void put_free(void *payload)
{
    struct sim_put *put = payload;
    wire_record_close(&put->record);
    free(put);
}

static void on_put(struct sim *sim, struct sim_event *event)
{
    struct sim_put *put = event->payload;
    struct sim_leader *leader = leader_of(sim, put->leader);
    struct sim_store *store = &sim->store;
    int rc = 0;

    if (!leader && sim_chance(sim, 500)) {
        return; /* the head crashed before it was durable */
    }
    if (put->epoch < store->epoch || put->expected != store->version) {
        rc = BL_ECONFLICT;
    } else if (leader && sim->now < sim->faults_over_ms && sim_chance(sim, 10)) {
        rc = -ENOSPC;
    } else {
        sim_check_running(sim, &store->record, &put->record);
        wire_record_close(&store->record);
        store->record = put->record;
        memset(&put->record, 0, sizeof(put->record));
        store->version++;
        sim_apart_stored(sim, &store->record);
        for (uint32_t i = 0; i < sim->attempt_count; i++) {
            for (uint32_t r = 0; r < store->record.root_count; r++) {
                sim->attempts[i].worded |=
                    sim->attempts[i].id == store->record.roots[r].committing_attempt;
            }
        }
        if (store->record.phase == WIRE_PHASE_RUNNING &&
            store->record.generation > store->running_generation) {
            store->running_generation = store->record.generation;
        }
        sim_trace(sim, "store %llu: generation %llu phase %d (%s) step %llu world %u",
                  (unsigned long long)store->version, (unsigned long long)store->record.generation,
                  (int)store->record.phase, store->record.cause,
                  (unsigned long long)store->record.plan.step, store->record.plan.world);
    }
    if (leader) {
        core_leader_on_store_done(leader->core, put->op, rc, store->version, sim->now);
    }
}

/* ---- the disk ---- */

struct sim_write {
    uint32_t node;
    uint64_t incarnation, attempt;
    struct core_member_write write;
    uint32_t was_hung;
};

static void write_free(void *payload)
{
    struct sim_write *w = payload;
    free(w->write.sources);
    free(w);
}

static struct sim_attempt *attempt_get(struct sim *sim, uint64_t id, uint64_t step)
{
    for (uint32_t i = 0; i < sim->attempt_count; i++) {
        if (sim->attempts[i].id == id) {
            return &sim->attempts[i];
        }
    }
    sim->attempts = realloc(sim->attempts, (sim->attempt_count + 1) * sizeof(*sim->attempts));
    BL_ASSERT(sim->attempts);
    struct sim_attempt *attempt = &sim->attempts[sim->attempt_count++];
    memset(attempt, 0, sizeof(*attempt));
    attempt->id = id;
    attempt->step = step;
    return attempt;
}

/* One source's elements from `half` on. -ENOENT when it is not there any more. */
static int write_source(struct sim *sim, const struct sim_write *w, uint32_t index, uint32_t half)
{
    const struct core_member_source *source = &w->write.sources[index];
    struct sim_arena *arena = sim_arena_find(sim, source->arena);
    struct sim_attempt *attempt = attempt_get(sim, w->attempt, w->write.step);
    if (!arena) {
        return -ENOENT;
    }
    struct wire_slot_info info;
    wire_slot_read(&arena->slots[source->slot], &info);
    if (info.state != WIRE_SLOT_SEALED || info.step != w->write.step ||
        !bl_state_digest_equal(&info.digest, &source->digest)) {
        return BL_EDIGEST;
    }
    uint32_t from = half ? arena->elems / 2 : 0;
    uint32_t to = half ? arena->elems : arena->elems / 2;
    for (uint32_t e = from; e < to; e++) {
        uint32_t logical = sim_arena_elem(arena, e);
        attempt->values[logical] = arena->data[source->slot][e];
        attempt->has[logical] = 1;
        if (w->write.apart) {
            sim_apart_element(sim, w->node, w->attempt, logical, attempt->values[logical]);
        }
    }
    return 0;
}

/* Does the leader still count on this attempt? Then its slots must be as they were. */
static int attempt_is_wanted(struct sim *sim, uint64_t attempt)
{
    struct sim_leader *leader = sim_leader_at(sim, sim->head);
    struct core_status status;
    int is_wanted = 0;

    if (!leader) {
        return 0;
    }
    core_leader_status(leader->core, &status, sim->now);
    for (uint32_t i = 0; i < status.save_count; i++) {
        is_wanted |= status.saves[i].attempt == attempt;
    }
    core_status_close(&status);
    return is_wanted;
}

static void on_write(struct sim *sim, struct sim_event *event)
{
    struct sim_write *w = event->payload;
    struct sim_node *node = &sim->nodes[w->node];
    int rc = 0;

    if (!node->member || node->incarnation != w->incarnation) {
        return; /* the engine died with its daemon */
    }
    if (sim_root_hangs(sim, w->write.root) && !w->was_hung) {
        w->was_hung = 1;
        struct sim_write *again = sim_alloc(1, sizeof(*again));
        *again = *w;
        w->write.sources = NULL;
        sim_later_with(sim, SIM_STUCK_MS, on_write, 0, 0, 0, again, write_free);
        return;
    }
    for (uint32_t i = 0; i < w->write.source_count && rc == 0; i++) {
        rc = write_source(sim, w, i, 1);
    }
    if (rc == BL_EDIGEST && attempt_is_wanted(sim, w->attempt)) {
        sim_fail(sim, "rule 4: a slot of step %llu is reused while root %u's save reads it",
                 (unsigned long long)w->write.step, w->write.root);
    }
    if (rc == 0 && sim->now < sim->faults_over_ms && sim_chance(sim, sim->profile.engine_fail)) {
        rc = -EIO;
    }
    rc = w->was_hung ? -ETIMEDOUT : rc;
    if (rc == 0 && w->write.apart) {
        sim_apart_written(sim, w->node, w->attempt);
    }
    core_member_on_engine_written(node->member, w->attempt, rc, "{}", rc ? "no luck" : "", 1, 1,
                                  sim->now);
    sim_member_drain(sim, node);
}

void sim_engine_write(struct sim *sim, struct sim_node *node, uint64_t attempt)
{
    struct sim_write *w = sim_alloc(1, sizeof(*w));
    int rc = core_member_write(node->member, attempt, &w->write);
    w->node = node->index;
    w->incarnation = node->incarnation;
    w->attempt = attempt;
    for (uint32_t i = 0; i < w->write.source_count && rc == 0; i++) {
        rc = write_source(sim, w, i, 0);
    }
    uint64_t delay = 5 + sim_below(sim, sim_chance(sim, 200) ? 600 : 60);
    delay *= rc == 0 ? sim->profile.root_slow[w->write.root] : 1;
    delay = delay < 1500 ? delay : 1500; /* within the deadline of a save */
    sim_later_with(sim, delay, on_write, 0, 0, 0, w, write_free);
}

static void disk_add(struct sim *sim, const struct sim_checkpoint *c)
{
    sim->disk = realloc(sim->disk, (sim->disk_count + 1) * sizeof(*sim->disk));
    BL_ASSERT(sim->disk);
    sim->disk[sim->disk_count++] = *c;
    sim->commits++;
    sim_trace(sim, "disk: %s committed on root %u", c->info.dir, c->info.root);
}

/* The rename of a hung root's commit, done when it answers again: nobody waits for it any more. */
static void on_late_commit(struct sim *sim, struct sim_event *event)
{
    disk_add(sim, event->payload);
}

static void on_commit_stuck(struct sim *sim, struct sim_event *event)
{
    struct sim_leader *leader = leader_of(sim, event->a);
    if (leader) {
        core_leader_on_commit_done(leader->core, event->b, -ETIMEDOUT, "the root hangs", 0,
                                   sim->now);
    }
}

static void on_commit(struct sim *sim, struct sim_event *event)
{
    struct sim_leader *leader = leader_of(sim, event->a);
    struct core_commit commit;
    if (!leader || core_leader_commit(leader->core, event->b, &commit) < 0) {
        return;
    }
    struct sim_attempt *attempt = attempt_get(sim, commit.attempt, commit.step);
    sim_check_commit(sim, &commit, attempt, leader->epoch);
    if (commit.apart) {
        uint64_t digest = 0;
        int rc = sim_root_hangs(sim, commit.root)
                     ? -ETIMEDOUT
                     : sim_apart_compose(sim, leader->node, &commit, &digest);
        free(commit.parts);
        core_leader_on_commit_done(leader->core, event->b, rc, "no luck", digest, sim->now);
        return;
    }
    struct sim_checkpoint *c = sim_alloc(1, sizeof(*c));
    c->info = (struct core_checkpoint){.root = commit.root,
                                       .complete = 1,
                                       .step = commit.step,
                                       .generation = commit.generation,
                                       .line = commit.line,
                                       .function_id = commit.function_id,
                                       .attempt = commit.attempt,
                                       .manifest_digest = commit.attempt,
                                       .digest_known = 1,
                                       .digest = commit.digest,
                                       .state_elems = commit.state_elems};
    snprintf(c->info.dir, sizeof(c->info.dir), "%s", commit.dir);
    memcpy(c->values, attempt->values, sizeof(c->values));
    c->node = leader->node;
    free(commit.parts);
    if (sim_root_hangs(sim, commit.root)) {
        sim_later(sim, SIM_STUCK_MS, on_commit_stuck, leader->id, event->b);
        if (sim_chance(sim, 500)) {
            uint64_t until = sim->hang_until[commit.root] - sim->now;
            sim_later_with(sim, until + sim_below(sim, 50), on_late_commit, 0, 0, 0, c, free);
        } else {
            free(c);
        }
        return;
    }
    disk_add(sim, c);
    free(c);
    if (!sim_chance(sim, 30) || sim->now > sim->faults_over_ms) { /* else the answer is lost */
        core_leader_on_commit_done(leader->core, event->b, 0, "", commit.attempt, sim->now);
    }
}

static void on_scan(struct sim *sim, struct sim_event *event)
{
    struct sim_leader *leader = leader_of(sim, event->a);
    uint32_t failed = 0;
    uint32_t count = 0;
    for (uint32_t r = 0; r < sim->profile.roots; r++) {
        failed |= sim_root_hangs(sim, r) && !sim_is_apart(sim, r) ? 1u << r : 0;
    }
    if (failed && !event->b) {
        sim_later(sim, SIM_STUCK_MS, on_scan, event->a, 1);
        return;
    }
    if (!leader) {
        return;
    }
    struct core_checkpoint *found = sim_alloc(sim->disk_count, sizeof(*found));
    for (uint32_t i = 0; i < sim->disk_count; i++) {
        uint32_t root = sim->disk[i].info.root;
        if (!(failed >> root & 1) && !sim_is_apart(sim, root)) {
            found[count++] = sim->disk[i].info;
        }
    }
    core_leader_on_scan_done(leader->core, failed ? -ETIMEDOUT : 0, failed, found, count, sim->now);
    free(found);
}

void sim_disk_load(struct sim *sim, const struct wire_plan *plan, struct sim_arena *arena,
                   uint32_t slot, int *ret_rc)
{
    int is_apart = sim_is_apart(sim, 0) && strcmp(plan->disk_root, sim_roots[0]) == 0 &&
                   !sim_root_hangs(sim, 0);
    for (uint32_t e = 0; is_apart && e < arena->elems; e++) {
        if (sim_apart_load(sim, arena->node, plan->disk_dir, sim_arena_elem(arena, e),
                           &arena->data[slot][e]) < 0) {
            is_apart = 0; /* one node had it for itself, as checkpoints of the head alone are */
        }
    }
    if (is_apart) {
        return;
    }
    for (uint32_t i = 0; i < sim->disk_count; i++) {
        const struct sim_checkpoint *c = &sim->disk[i];
        if (strcmp(c->info.dir, plan->disk_dir) == 0 &&
            strcmp(sim_roots[c->info.root], plan->disk_root) == 0 &&
            (!sim_is_apart(sim, c->info.root) || sim_apart_can_read(sim, arena->node, c->node)) &&
            !sim_root_hangs(sim, c->info.root)) {
            for (uint32_t e = 0; e < arena->elems; e++) {
                arena->data[slot][e] = c->values[sim_arena_elem(arena, e)];
            }
            return;
        }
    }
    *ret_rc = -ENOENT;
}

int sim_root_hangs(const struct sim *sim, uint32_t root)
{
    return sim->now >= sim->hang_from[root] && sim->now < sim->hang_until[root];
}

void sim_root_lose(struct sim *sim, uint32_t root)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < sim->disk_count; i++) {
        kept += sim->disk[i].info.root != root;
    }
    if (kept == 0) {
        return;
    }
    kept = 0;
    for (uint32_t i = 0; i < sim->disk_count; i++) {
        if (sim->disk[i].info.root != root) {
            sim->disk[kept++] = sim->disk[i];
        }
    }
    sim->disk_count = kept;
    sim_trace(sim, "root %u is wiped", root);
}

/* ---- messages ---- */

void sim_on_report(struct sim *sim, struct sim_event *event)
{
    struct sim_leader *leader = sim_leader_at(sim, (uint32_t)event->a);
    const struct sim_node *node = &sim->nodes[event->c];
    if (leader && leader->id == event->b && node->connection == event->b) {
        core_leader_on_report(leader->core, event->payload, sim->now);
    }
}

static void directive_free(void *payload)
{
    wire_directive_close(payload);
    free(payload);
}

static void *directive_copy(const void *from)
{
    struct wire_directive *copy = sim_alloc(1, sizeof(*copy));
    int rc = wire_directive_copy(copy, from);
    BL_ASSERT(rc == 0);
    return copy;
}

static void on_directive(struct sim *sim, struct sim_event *event)
{
    struct sim_node *node = &sim->nodes[event->a];
    if (node->member && node->incarnation == event->b) {
        core_member_on_directive(node->member, event->payload, sim->now);
        sim_member_drain(sim, node);
    }
}

static void leader_send(struct sim *sim, struct sim_leader *leader, const char *name)
{
    uint32_t index = (uint32_t)strtoul(name + 1, NULL, 10);
    struct wire_directive *d = sim_alloc(1, sizeof(*d));
    core_leader_directive(leader->core, name, d);
    sim_send(sim, leader->node, index, on_directive, index, sim->nodes[index].incarnation, 0, d,
             directive_copy, directive_free);
}

static void leader_store(struct sim *sim, struct sim_leader *leader,
                         const struct core_leader_effect *e)
{
    struct sim_put *put = sim_alloc(1, sizeof(*put));
    put->leader = leader->id;
    put->op = e->op;
    put->expected = e->expected;
    put->epoch = leader->epoch;
    int rc = wire_record_copy(&put->record, core_leader_record(leader->core));
    BL_ASSERT(rc == 0);
    sim_later_with(sim, 1 + sim_below(sim, 6), on_put, 0, 0, 0, put, put_free);
}

void sim_leader_drain(struct sim *sim, struct sim_leader *leader)
{
    struct core_leader_effect e;
    while (leader->core && core_leader_next_effect(leader->core, &e)) {
        switch (e.kind) {
        case CORE_LEADER_DIRECTIVE:
            leader_send(sim, leader, e.node);
            break;
        case CORE_LEADER_STORE:
            leader_store(sim, leader, &e);
            break;
        case CORE_LEADER_SCAN:
            sim_later(sim, 5 + sim_below(sim, 30), on_scan, leader->id, 0);
            break;
        case CORE_LEADER_COMMIT:
            sim_later(sim, 2 + sim_below(sim, 20), on_commit, leader->id, e.attempt);
            break;
        case CORE_LEADER_EVENT: {
            const struct core_event_info *info = core_event_find(e.event.code);
            if (e.event.code == CORE_EVENT_RANK_HUNG) {
                sim_check_hung(sim, &e.event);
            }
            sim_trace(sim, "event %s g%llu step %llu rank %d %s %s", info ? info->name : "?",
                      (unsigned long long)e.event.generation, (unsigned long long)e.event.step,
                      (int)e.event.rank, e.event.node, e.event.text);
            break;
        }
        case CORE_LEADER_FINISHED:
            sim->finished = 1;
            sim->verdict = e.verdict;
            break;
        case CORE_LEADER_DEPOSED:
            sim_leader_stop(sim, leader);
            sim_links(sim);
            return;
        case CORE_LEADER_RETAIN:
        case CORE_LEADER_NONE:
            break;
        }
    }
}
