/* SPDX-License-Identifier: Apache-2.0 */
/* What goes wrong, when, drawn from the seed. */
#include "tests/sim/sim.h"

#include <signal.h>
#include <string.h>

static struct sim_rank *fault_rank(struct sim *sim)
{
    uint32_t alive = 0;
    for (uint32_t i = 0; i < sim->rank_count; i++) {
        alive += sim->ranks[i]->alive;
    }
    uint64_t pick = sim_below(sim, alive);
    for (uint32_t i = 0; i < sim->rank_count; i++) {
        if (sim->ranks[i]->alive && pick-- == 0) {
            return sim->ranks[i];
        }
    }
    return NULL;
}

static void on_daemon_start(struct sim *sim, struct sim_event *event)
{
    struct sim_node *node = &sim->nodes[event->a];
    node->up = 1;
    sim_daemon_start(sim, node);
    if (event->a == sim->head && !sim_leader_at(sim, sim->head)) {
        sim_leader_start(sim, sim->head, sim->store.epoch);
        sim_links(sim);
    }
}

static void on_go_on(struct sim *sim, struct sim_event *event)
{
    struct sim_rank *rank = sim->ranks[event->a];
    rank->stopped = 0;
    rank->hung = 0;
    (void)sim;
}

static void on_heal(struct sim *sim, struct sim_event *event)
{
    (void)event;
    memset(sim->cut, 0, sizeof(sim->cut));
    sim_trace(sim, "the partition heals");
    sim_links(sim);
    sim_barriers(sim);
}

/* The operator makes another node the head; the old leader does not know yet. */
static void on_promote(struct sim *sim, struct sim_event *event)
{
    uint32_t to = (uint32_t)event->a;
    struct sim_node *node = &sim->nodes[to];
    if (to == sim->head || !node->member || sim->finished || sim->leader_count > 12) {
        return;
    }
    sim->store.epoch = sim->store.epoch + 1;
    sim->head = to;
    sim_trace(sim, "n%u is promoted", to);
    sim_leader_start(sim, to, sim->store.epoch);
    sim_links(sim);
}

static void fault_partition(struct sim *sim)
{
    int is_aimed =
        sim_chance(sim, 300); /* the nodes with ranks on one side, all others on the other */
    for (uint32_t i = 0; i < sim->profile.nodes; i++) {
        sim->cut[i] = is_aimed ? 0 : (uint32_t)sim_below(sim, 2);
    }
    for (uint32_t i = 0; is_aimed && i < sim->rank_count; i++) {
        sim->cut[sim->ranks[i]->node] = sim->ranks[i]->alive;
    }
    sim_trace(sim, "partition: %u %u %u %u", sim->cut[0], sim->cut[1], sim->cut[2], sim->cut[3]);
    sim_later(sim, 50 + sim_below(sim, sim_chance(sim, 400) ? 8000 : 1500), on_heal, 0, 0);
    sim_links(sim);
}

static void fault_machine(struct sim *sim, struct sim_node *node)
{
    sim_machine_crash(sim, node);
    uint32_t often = sim->profile.is_tight ? 800 : 300;
    sim_later(sim, 300 + sim_below(sim, sim_chance(sim, often) ? 15000 : 3000), on_daemon_start,
              node->index, 0);
}

/* A rank that crashes by itself at one step again and again is rightly the end of a run, so chance
 * does it twice only; kills from outside do not count. */
static int fault_signal(struct sim *sim, const struct sim_rank *rank)
{
    if (sim_chance(sim, 800)) {
        return SIGKILL;
    }
    if (sim->crash_step != rank->step) {
        sim->crash_step = rank->step;
        sim->crashes = 0;
    }
    return ++sim->crashes > 2 ? SIGKILL : SIGSEGV;
}

static void fault_rank_do(struct sim *sim, uint32_t kind)
{
    struct sim_rank *rank = fault_rank(sim);
    if (!rank) {
        return;
    }
    if (kind == SIM_KILL || kind == SIM_KILL_TWO) {
        sim_rank_die(sim, rank, 0, fault_signal(sim, rank), 0);
        rank = kind == SIM_KILL_TWO ? fault_rank(sim) : NULL;
        if (rank) {
            sim_rank_die(sim, rank, 0, SIGKILL, 0);
        }
        return;
    }
    if (rank->stopped || rank->hung) {
        return;
    }
    sim_trace(sim, "n%u: %llx %s", rank->node, (unsigned long long)rank->incarnation,
              kind == SIM_STOP ? "is stopped" : "hangs");
    rank->stopped = kind == SIM_STOP;
    rank->hung = kind == SIM_HANG;
    rank->stopped_ms = sim->now;
    if (sim_chance(sim, 500)) {
        sim_later(sim, 50 + sim_below(sim, 2500), on_go_on, rank->index, 0);
    }
}

int sim_aimed(struct sim *sim, struct sim_rank *rank, enum sim_point point)
{
    if (sim->aim != (uint32_t)point || --sim->aim_left > 0) {
        return 0;
    }
    sim_trace(sim, "aimed: point %d", (int)point);
    sim->aim = SIM_AT_NONE;
    if (sim_chance(sim, 600) && sim->now < sim->faults_over_ms) {
        sim->aim = 1 + (uint32_t)sim_below(sim, SIM_POINTS - 1);
        sim->aim_left = 1 + (uint32_t)sim_below(sim, 5);
    }
    sim_rank_die(sim, rank, 0, SIGKILL, 0);
    return 1;
}

static void fault_root(struct sim *sim)
{
    uint32_t root = (uint32_t)sim_below(sim, sim->profile.roots);
    if (sim->profile.roots > 1 && sim_chance(sim, 250)) {
        if (!sim_is_apart(sim, root)) {
            sim_root_lose(sim, root);
        } else if (sim_disk_shared(sim) > 0) { /* else nothing may be left */
            sim_apart_wipe(sim, (uint32_t)sim_below(sim, sim->profile.nodes));
        }
        return;
    }
    if (sim_root_hangs(sim, root)) {
        return;
    }
    sim->hang_from[root] = sim->now;
    sim->hang_until[root] = sim->now + 100 + sim_below(sim, sim_chance(sim, 300) ? 6000 : 1500);
    sim_trace(sim, "root %u hangs for %llu ms", root,
              (unsigned long long)(sim->hang_until[root] - sim->now));
}

static void on_fault(struct sim *sim, struct sim_event *event)
{
    uint32_t first = sim->profile.is_tight; /* those with ranks */
    struct sim_node *node = &sim->nodes[first + sim_below(sim, sim->profile.nodes - first)];
    uint32_t kind = (uint32_t)event->a;
    struct sim_leader *leader = sim_leader_at(sim, sim->head);

    switch (kind) {
    case SIM_DAEMON:
        sim_daemon_crash(sim, node);
        sim_later(sim, 20 + sim_below(sim, sim_chance(sim, 200) ? 5000 : 600), on_daemon_start,
                  node->index, 0);
        break;
    case SIM_MACHINE:
        fault_machine(sim, node);
        break;
    case SIM_PARTITION:
        fault_partition(sim);
        break;
    case SIM_HEAD:
        sim_daemon_crash(sim, &sim->nodes[sim->head]);
        sim_later(sim, 20 + sim_below(sim, 400), on_daemon_start, sim->head, 0);
        break;
    case SIM_ROOT:
        fault_root(sim);
        break;
    case SIM_PROMOTE:
        sim_later(sim, 0, on_promote, sim_below(sim, sim->profile.nodes), 0);
        break;
    case SIM_SAVE:
        if (leader) {
            enum core_request request =
                sim->profile.stop_resume && !sim->resumed && sim_chance(sim, 700)
                    ? CORE_REQUEST_STOP
                    : CORE_REQUEST_SAVE;
            BL_IGNORE(core_leader_on_request(leader->core, request, sim->now),
                      "the run may be over");
        }
        break;
    case SIM_AIM:
        sim->aim = 1 + (uint32_t)sim_below(sim, SIM_POINTS - 1);
        sim->aim_left = 1 + (uint32_t)sim_below(sim, 8);
        break;
    default:
        fault_rank_do(sim, kind);
        break;
    }
}

void sim_faults_draw(struct sim *sim)
{
    for (uint32_t i = 0; i < sim->profile.faults; i++) {
        uint32_t kind = 0;
        for (int tries = 0; tries < 64 && !(kind & sim->profile.kinds); tries++) {
            kind = 1u << sim_below(sim, SIM_FAULTS);
        }
        if (kind & sim->profile.kinds) {
            sim_later(sim, 100 + sim_below(sim, sim->profile.fault_ms - 100), on_fault, kind, 0);
        }
    }
}

void sim_profile_draw(struct sim *sim, uint32_t ranks, uint32_t nodes)
{
    static const uint32_t kinds[] = {SIM_KILL,
                                     SIM_AIM,
                                     SIM_AIM,
                                     SIM_AIM | SIM_KILL | SIM_SAVE,
                                     SIM_KILL | SIM_KILL_TWO,
                                     SIM_STOP | SIM_HANG,
                                     SIM_DAEMON | SIM_HEAD | SIM_KILL,
                                     SIM_MACHINE | SIM_KILL,
                                     SIM_PARTITION | SIM_KILL,
                                     SIM_PARTITION | SIM_MACHINE,
                                     SIM_HEAD | SIM_PROMOTE | SIM_KILL,
                                     SIM_PROMOTE | SIM_PARTITION | SIM_HEAD,
                                     SIM_ROOT | SIM_KILL,
                                     SIM_ROOT | SIM_MACHINE | SIM_HEAD,
                                     SIM_ROOT | SIM_PROMOTE | SIM_SAVE,
                                     SIM_ALL,
                                     SIM_ALL,
                                     SIM_ALL};
    struct sim_profile *p = &sim->profile;
    p->ranks = ranks ? ranks : 1 + (uint32_t)sim_below(sim, 6);
    p->nodes = nodes ? nodes : 2 + (uint32_t)sim_below(sim, 4);
    p->steps = 20 + (uint32_t)sim_below(sim, 60);
    p->elems = 12 + (uint32_t)sim_below(sim, 40);
    p->roots = sim_chance(sim, 500) ? 1 : 2 + sim_chance(sim, 300);
    for (uint32_t r = 0; r < p->roots; r++) {
        p->every[r] = sim_chance(sim, 800) ? 2 + (uint32_t)sim_below(sim, 9) : 0;
        p->root_slow[r] = sim_chance(sim, 300) ? 2 + (uint32_t)sim_below(sim, 10) : 1;
    }
    p->head_ranks = sim_chance(sim, 500) ? p->ranks : 0;
    p->loss = sim_chance(sim, 500) ? (uint32_t)sim_below(sim, 150) : 0;
    p->repeat = sim_chance(sim, 500) ? (uint32_t)sim_below(sim, 150) : 0;
    p->late = sim_chance(sim, 500) ? (uint32_t)sim_below(sim, 150) : 0;
    p->late_ms = sim_chance(sim, 300) ? 1500 : 400;
    p->engine_fail = sim_chance(sim, 300) ? 100 : 0;
    p->stop_resume = sim_chance(sim, 250);
    p->fault_ms = 1500 + sim_below(sim, 3000);
    p->kinds = kinds[sim_below(sim, sizeof(kinds) / sizeof(kinds[0]))] |
               (sim_chance(sim, 300) || p->stop_resume ? SIM_SAVE : 0);
    p->slow = sim_chance(sim, 300) ? 2 + (uint32_t)sim_below(sim, 6) : 1;
    if (!ranks && !nodes && sim_chance(sim, 120)) {
        /* All ranks on nodes that the head does not hear, and spare nodes that it does. */
        p->nodes = 4 + (uint32_t)sim_below(sim, 2);
        p->ranks = 1 + (uint32_t)sim_below(sim, 2);
        p->steps = 120;
        p->slow = 5;
        p->head_ranks = 0;
        p->kinds = SIM_PARTITION;
        p->fault_ms = 3000;
    }
    if (!ranks && sim_chance(sim, 120)) {
        /* Votes that arrive in the generation after theirs. */
        p->ranks = 3 + (uint32_t)sim_below(sim, 8);
        p->vote_late = 150;
        p->late = 0;
        p->loss = 0;
        p->kinds = SIM_AIM | SIM_KILL;
        p->steps = 90;
    }
    p->tp = p->pp = 1;
    p->faults = sim_chance(sim, 100) ? 0 : 1 + (uint32_t)sim_below(sim, 8);
    int is_plain = ranks || p->vote_late || p->fault_ms == 3000 || bl_mix64(~sim->seed) % 10 >= 4;
    if (sim->only_hybrids || !is_plain) {
        p->vote_late = 0;
        sim_hybrid_draw(sim);
    }
    /* No draw: the other seeds stay what they were. */
    p->apart = !p->only_hangs && bl_mix64(sim->seed ^ 0xa9a27) % 2;
}
