/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/status.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/json.h"
#include "daemon/replica.h"

static const char *phase_name(enum wire_phase phase)
{
    static const char *const names[] = {"none", "open", "planned", "running", "done"};

    return names[phase];
}

static const char *verdict_name(enum wire_verdict verdict)
{
    static const char *const names[] = {"none",        "finished",    "stopped",
                                        "save-failed", "no-progress", "refused"};

    return names[verdict];
}

static const char *rank_state_name(enum wire_rank_state state)
{
    static const char *const names[] = {"starting", "joined",  "parked",  "loading",
                                        "ready",    "running", "leaving", "exited"};

    return names[state];
}

static const char *section_name(uint32_t section)
{
    static const char *const names[] = {"init", "load", "step", "save", "eval", "leave"};

    return section < 6 ? names[section] : "?";
}

static const char *wait_name(enum core_wait wait)
{
    static const char *const names[] = {"nothing", "store", "nodes", "park", "join",  "fence",
                                        "state",   "scan",  "load",  "save", "leave", "hold"};

    return names[wait];
}

static void set(json_t *object, const char *key, json_t *value)
{
    BL_IGNORE(json_object_set_new(object, key, value) != 0, "out of memory shows as a gap");
}

static void set_u64(json_t *object, const char *key, uint64_t value)
{
    set(object, key, json_integer((json_int_t)value));
}

static void set_text(json_t *object, const char *key, const char *value)
{
    set(object, key, json_string(value));
}

static void set_hex(json_t *object, const char *key, uint64_t value)
{
    char text[17];

    daemon_hex(value, text);
    set(object, key, json_string(text));
}

/* UINT64_MAX is none: null. */
static void set_step(json_t *object, const char *key, uint64_t step)
{
    set(object, key, step == UINT64_MAX ? json_null() : json_integer((json_int_t)step));
}

/* What the newest page of this node's ranks says of training. */
static void metrics_add(json_t *object, const struct run *run)
{
    const struct wire_page *best = NULL;

    for (uint32_t i = 0; i < run->proc_count; i++) {
        const struct wire_page *page = run->procs[i]->page;

        if (page && page->metrics_step > 0 && (!best || page->metrics_step > best->metrics_step)) {
            best = page;
        }
    }
    if (best) {
        set_u64(object, "metrics_step", best->metrics_step);
        set(object, "loss",
            isfinite(best->metrics_loss) ? json_real(best->metrics_loss) : json_null());
        set(object, "lr", json_real(best->metrics_lr));
        set(object, "grad_norm",
            isfinite(best->metrics_grad_norm) ? json_real(best->metrics_grad_norm) : json_null());
        set(object, "tokens_per_s", json_real(best->metrics_tokens_per_s));
        set_u64(object, "samples", best->metrics_samples);
    }
}

static json_t *ranks_json(const struct core_status *status)
{
    json_t *array = json_array();

    for (uint32_t n = 0; n < status->node_count; n++) {
        const struct core_status_node *node = &status->nodes[n];

        for (uint32_t i = 0; i < node->proc_count; i++) {
            const struct core_status_proc *proc = &status->procs[node->proc_first + i];
            json_t *one = json_object();

            set(one, "rank",
                proc->rank == UINT32_MAX ? json_null() : json_integer((json_int_t)proc->rank));
            set_u64(one, "pid", proc->pid);
            set_text(one, "node", node->node);
            set_text(one, "state", rank_state_name(proc->state));
            set_u64(one, "step", proc->applied_step);
            set_text(one, "section", section_name(proc->beat.section));
            set_u64(one, "progress_age_ms", proc->beat.progress_age_ms);
            set_hex(one, "incarnation", proc->incarnation);
            json_array_append_new(array, one);
        }
    }
    return array;
}

static json_t *nodes_json(const struct core_status *status)
{
    json_t *array = json_array();

    for (uint32_t n = 0; n < status->node_count; n++) {
        const struct core_status_node *node = &status->nodes[n];
        json_t *one = json_object();

        set_text(one, "node", node->node);
        set(one, "connected", json_boolean(node->connected));
        set(one, "lost", json_boolean(node->lost));
        set_u64(one, "away_ms", node->away_ms);
        set_u64(one, "ranks_max", node->ranks_max);
        set_u64(one, "processes", node->proc_count);
        json_array_append_new(array, one);
    }
    return array;
}

static json_t *saves_json(const struct core_status *status)
{
    json_t *array = json_array();

    for (uint32_t i = 0; i < status->save_count; i++) {
        json_t *one = json_object();

        set_u64(one, "step", status->saves[i].step);
        set_hex(one, "attempt", status->saves[i].attempt);
        set_u64(one, "age_ms", status->saves[i].age_ms);
        set_u64(one, "nodes", status->saves[i].nodes);
        set_u64(one, "written", status->saves[i].written);
        json_array_append_new(array, one);
    }
    return array;
}

static json_t *times_json(const struct core_times *times)
{
    json_t *one = json_object();

    set_u64(one, "generation", times->generation);
    set_text(one, "cause", times->cause);
    set_u64(one, "detect_ms", times->detect_ms);
    set_u64(one, "open_ms", times->open_ms);
    set_u64(one, "parked_ms", times->parked_ms);
    set_u64(one, "planned_ms", times->planned_ms);
    set_u64(one, "ready_ms", times->ready_ms);
    set_u64(one, "running_ms", times->running_ms);
    set_u64(one, "step_ms", times->step_ms);
    set_u64(one, "steps_lost", times->steps_lost);
    return one;
}

static void leader_add(json_t *one, const struct core_status *status)
{
    set_text(one, "phase", phase_name(status->phase));
    set_text(one, "verdict", verdict_name(status->verdict));
    set_u64(one, "generation", status->generation);
    set_u64(one, "line", status->line);
    set_u64(one, "world", status->world);
    set_u64(one, "step", status->step);
    set_step(one, "memory_step", status->memory_step);
    set_step(one, "disk_step", status->disk_step);
    set_text(one, "disk_dir", status->disk_dir);
    set_text(one, "wait", wait_name(status->wait));
    set_text(one, "wait_text", status->wait_text);
    set(one, "stop_asked", json_boolean(status->stop_asked));
    set(one, "save_asked", json_boolean(status->save_asked));
    set_u64(one, "step_deadline_ms", status->step_deadline_ms);
    set_u64(one, "since_progress_ms", status->since_progress_ms);
    set_u64(one, "recoveries", status->recoveries);
    set_u64(one, "kills", status->kills);
    set_u64(one, "saves_committed", status->saves_committed);
    set_u64(one, "saves_failed", status->saves_failed);
    set_u64(one, "saves_skipped", status->saves_skipped);
    set_u64(one, "steps_lost", status->steps_lost);
    if (status->digest_known) {
        char digest[BL_STATE_DIGEST_TEXT_BYTES];

        bl_state_digest_format(&status->digest, digest);
        set_text(one, "digest", digest);
        set_u64(one, "digest_step", status->digest_step);
    }
    set_text(one, "text", status->text);
    set(one, "last_recovery", times_json(&status->last));
    set(one, "saves", saves_json(status));
    set(one, "nodes", nodes_json(status));
    set(one, "ranks", ranks_json(status));
}

/* A member that cannot ask its head shows what it has itself. */
static void member_add(json_t *one, const struct run *run)
{
    json_t *ranks = json_array();
    uint64_t step = 0;

    for (uint32_t i = 0; i < run->proc_count; i++) {
        const struct proc *proc = run->procs[i];
        json_t *rank = json_object();
        uint64_t at = proc->page ? atomic_load(&proc->page->step) : 0;

        step = at > step ? at : step;
        set_u64(rank, "rank", proc->rank);
        set_u64(rank, "pid", proc->pid);
        set_text(rank, "node", run->daemon->config.name);
        set_text(rank, "state", proc->state == PROC_EXITED ? "exited" : "running");
        set_u64(rank, "step", at);
        set_hex(rank, "incarnation", proc->incarnation);
        json_array_append_new(ranks, rank);
    }
    set_text(one, "phase", "unknown");
    set_text(one, "verdict", "none");
    set_u64(one, "step", step);
    set_text(one, "wait", "head");
    set_text(one, "wait_text", "the head's daemon is away; ranks train on");
    set(one, "ranks", ranks);
}

static json_t *run_json(const struct run *run)
{
    json_t *one = json_object();
    struct core_status status;

    set_text(one, "name", run->name);
    set_hex(one, "run", run->id);
    set_text(one, "run_dir", run->job->run_dir);
    set_u64(one, "steps", run->job->train.steps);
    set_u64(one, "ranks_wanted", run->job->ranks);
    set_u64(one, "lanes", run->job->lanes);
    set(one, "roots", json_integer((json_int_t)run->job->root_count));
    set_u64(one, "memory_bytes", arena_bytes_used(run));
    set_u64(one, "memory_bytes_max", run->job->snapshot_bytes_max);
    metrics_add(one, run);
    if (run->leader) {
        core_leader_status(run->leader, &status, daemon_now_ms());
        leader_add(one, &status);
        core_status_close(&status);
    } else {
        member_add(one, run);
    }
    return one;
}

void status_keep(struct run *run)
{
    struct daemon *daemon = run->daemon;
    json_t *one = run_json(run);

    set_text(one, "verdict", verdict_name(run->verdict));
    set_text(one, "phase", "done");
    set(one, "ended", json_true());
    if (!daemon->ended) {
        daemon->ended = json_array();
    }
    for (size_t i = json_array_size(daemon->ended); i > 0; i--) { /* an older end of the same */
        json_t *old = json_array_get(daemon->ended, i - 1);
        const char *name = json_string_value(json_object_get(old, "name"));

        if ((name && strcmp(name, run->name) == 0) || i > STATUS_ENDED_MAX) {
            json_array_remove(daemon->ended, i - 1);
        }
    }
    json_array_append_new(daemon->ended, one);
}

void status_close(struct daemon *daemon)
{
    json_decref(daemon->ended);
    daemon->ended = NULL;
}

char *status_json(struct daemon *daemon, const char *name)
{
    json_t *all = json_object(), *runs = json_array();
    static char names[DAEMON_PEERS_MAX + 1][WIRE_NODE_MAX];
    json_t *nodes = json_array(), *old;
    size_t index;

    set_u64(all, "schema", 1);
    set_text(all, "version", BELAY_VERSION);
    set_text(all, "node", daemon->config.name);
    set_u64(all, "pid", (uint64_t)getpid());
    set(all, "head", json_boolean(daemon->is_head));
    set(all, "head_connected", json_boolean(daemon->is_head || control_head(daemon)));
    set_u64(all, "head_epoch", daemon->head_epoch);
    set_text(all, "standby", replica_state(daemon));
    set_text(all, "control", daemon->listen_addr);
    set_u64(all, "now_ms", bl_wall_ms());
    set_u64(all, "uptime_ms", daemon_now_ms() - daemon->started_ms);
    uint32_t count = control_nodes(daemon, names, DAEMON_PEERS_MAX + 1);

    for (uint32_t i = 0; i < count; i++) {
        json_array_append_new(nodes, json_string(names[i]));
    }
    set(all, "nodes", nodes);
    set_text(all, "last_event", events_newest_text(daemon->events, CORE_NOTICE));
    set_u64(all, "events", events_newest(daemon->events));
    for (uint32_t i = 0; i < daemon->run_count; i++) {
        if (!name || strcmp(name, daemon->runs[i]->name) == 0) {
            json_array_append_new(runs, run_json(daemon->runs[i]));
        }
    }
    set(all, "runs", runs);
    json_t *ended = json_array();

    json_array_foreach(daemon->ended, index, old)
    {
        json_array_append(ended, old);
    }
    set(all, "ended", ended);
    char *text = bl_json_dump(all);

    json_decref(all);
    return text;
}
