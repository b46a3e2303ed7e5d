/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/status.h"

#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "daemon/replica.h"

#define STATUS_BYTES_MAX (16u << 20)

static const char *phase_name(enum wire_phase phase)
{
    static const char *const names[] = {"none", "open", "planned", "running", "done"};

    return names[phase];
}

/* How a run stands that is over, and what `belay run` leaves with. */
static const char *verdict_ended(enum wire_verdict verdict, int *ret_exit)
{
    static const struct {
        const char *name;
        int code;
    } ends[] = {{"attention", 3}, {"done", 0},         {"stopped", 4},
                {"failed", 3},    {"no_progress", 93}, {"failed", 3}};

    *ret_exit = ends[verdict].code;
    return ends[verdict].name;
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

static json_t *nodes_json(const struct daemon *daemon, const struct core_status *status)
{
    json_t *array = json_array();

    for (uint32_t n = 0; n < status->node_count; n++) {
        const struct core_status_node *node = &status->nodes[n];
        json_t *one = json_object();

        set_text(one, "name", node->node);
        set(one, "head", json_boolean(strcmp(node->node, daemon->config.name) == 0));
        set_text(one, "state", node->connected ? "up" : node->lost ? "lost" : "away");
        set_u64(one, "away_ms", node->away_ms);
        set_u64(one, "procs", node->proc_count);
        set_text(one, "refused", node->refused ? node->refused_text : "");
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

static json_t *memory_json(const struct core_status *status)
{
    json_t *one = json_object();

    set_step(one, "step", status->memory_step);
    set_u64(one, "age_ms", status->since_progress_ms);
    return one;
}

static json_t *disk_json(const struct run *run, const struct core_status *status)
{
    json_t *one = json_object();

    set_step(one, "step", status->disk_step);
    set(one, "age_ms",
        run->disk_ms ? json_integer((json_int_t)(daemon_now_ms() - run->disk_ms)) : json_null());
    set_text(one, "dir", status->disk_dir);
    set_text(one, "root", status_disk_root(status));
    return one;
}

static const char *verdict_live(const struct core_status *status, size_t needs)
{
    switch (status->wait) {
    case CORE_WAIT_HOLD:
        return "held";
    case CORE_WAIT_NODES:
    case CORE_WAIT_FENCE:
    case CORE_WAIT_STATE:
    case CORE_WAIT_RETRY:
        return "waiting";
    default:
        break;
    }
    if (status->phase != WIRE_PHASE_RUNNING && status->phase != WIRE_PHASE_DONE) {
        return "recovering";
    }
    return needs > 0 ? "attention" : "healthy";
}

/* What a person must do. */
static json_t *needs_json(const struct run *run, const struct core_status *status)
{
    const struct daemon *daemon = run->daemon;
    json_t *needs = json_array();
    char text[128];

    if (run->start_text[0]) {
        json_array_append_new(needs, json_string(run->start_text));
    }
    if (status->phase == WIRE_PHASE_RUNNING && status->world < status->ranks) {
        snprintf(text, sizeof(text), "only %u of %u ranks run%s: belay events says why",
                 status->world, status->ranks,
                 status->pp < status->pp_wanted ? ", the pipeline cut to fewer stages" : "");
        json_array_append_new(needs, json_string(text));
    }
    for (uint32_t i = 0; i < status->node_count && status->phase != WIRE_PHASE_DONE; i++) {
        const struct core_status_node *node = &status->nodes[i];
        char why[sizeof(node->node) + sizeof(node->refused_text) + 32];

        if (node->refused) {
            snprintf(why, sizeof(why), "%s takes no ranks: %s", node->node, node->refused_text);
            json_array_append_new(needs, json_string(why));
        }
    }
    if (status->wait == CORE_WAIT_HOLD || status->wait == CORE_WAIT_NODES ||
        status->wait == CORE_WAIT_FENCE || status->wait == CORE_WAIT_STATE ||
        status->wait == CORE_WAIT_RETRY) {
        json_array_append_new(needs, json_string(status->wait_text));
    }
    if (status->wait == CORE_WAIT_SCAN && status->since_progress_ms > 5000) {
        char wait[sizeof(status->wait_text) + 32];

        snprintf(wait, sizeof(wait), "it waits for %s: see to it", status->wait_text);
        json_array_append_new(needs, json_string(wait));
    }
    if (status->wait == CORE_WAIT_STORE && status->since_progress_ms > 5000) {
        json_array_append_new(needs, json_string("the store takes no changes: see to the disk of "
                                                 "the state directory"));
    }
    if (strcmp(replica_state(daemon), "lost") == 0) {
        json_array_append_new(needs,
                              json_string("bring the standby back: the run's record has one copy"));
    }
    status_roots_need(status, needs);
    return needs;
}

static void leader_add(json_t *one, const struct run *run, const struct core_status *status)
{
    json_t *needs = needs_json(run, status);

    set_text(one, "phase", phase_name(status->phase));
    set_text(one, "verdict", verdict_live(status, json_array_size(needs)));
    set(one, "needs", needs);
    set_u64(one, "generation", status->generation);
    set_u64(one, "line", status->line);
    set_u64(one, "world", status->world);
    set(one, "layout",
        status->world ? json_pack("{si si si si si}", "dp", (int)status->dp, "tp", (int)status->tp,
                                  "pp", (int)status->pp, "dp_wanted", (int)status->dp_wanted,
                                  "pp_wanted", (int)status->pp_wanted)
                      : json_null());
    set_u64(one, "step", status->step);
    set(one, "newest_memory", memory_json(status));
    set(one, "newest_disk", disk_json(run, status));
    set_text(one, "waits_for", status->wait == CORE_WAIT_NOTHING ? "" : status->wait_text);
    set_u64(one, "step_deadline_ms", status->step_deadline_ms);
    set_u64(one, "recoveries", status->recoveries);
    set_u64(one, "kills", status->kills);
    set_u64(one, "steps_lost", status->steps_lost);
    if (status->digest_known) {
        char digest[BL_STATE_DIGEST_TEXT_BYTES];

        bl_state_digest_format(&status->digest, digest);
        set_text(one, "digest", digest);
        set_u64(one, "digest_step", status->digest_step);
    }
    set_text(one, "text", status->text);
    set(one, "last_recovery", status->last.generation ? times_json(&status->last) : json_null());
    set(one, "saves", status_saves(status));
    set(one, "roots", status_roots(status));
    set(one, "nodes", nodes_json(run->daemon, status));
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
    set_text(one, "verdict", "attention");
    set(one, "needs", json_pack("[s]", "the head's daemon is away; ranks train on"));
    set_u64(one, "step", step);
    set(one, "ranks", ranks);
}

static json_t *run_json(const struct run *run)
{
    json_t *one = json_object();
    struct core_status status;

    set_u64(one, "schema", 1);
    set_text(one, "name", run->name);
    set_hex(one, "run", run->id);
    set_text(one, "run_dir", run->job->run_dir);
    set(one, "exit_code", json_null());
    set_u64(one, "steps", run->job->train.steps);
    set_u64(one, "ranks_wanted", run->job->ranks);
    set_u64(one, "lanes", run->job->lanes);
    set_u64(one, "memory_bytes", arena_bytes_used(run));
    set_u64(one, "memory_bytes_max", run->job->snapshot_bytes_max);
    metrics_add(one, run);
    if (run->leader) {
        core_leader_status(run->leader, &status, daemon_now_ms());
        leader_add(one, run, &status);
        core_status_close(&status);
    } else {
        member_add(one, run);
    }
    return one;
}

/* ---- runs that ended ---- */

json_t *status_ended(const struct daemon *daemon, uint64_t run)
{
    char hex[17];
    json_t *one;
    size_t index;

    daemon_hex(run, hex);
    json_array_foreach(daemon->ended, index, one)
    {
        const char *text = json_string_value(json_object_get(one, "run"));

        if (text && strcmp(text, hex) == 0) {
            return one;
        }
    }
    return NULL;
}

json_t *status_ended_name(const struct daemon *daemon, const char *name)
{
    json_t *one, *found = NULL;
    size_t index;

    json_array_foreach(daemon->ended, index, one)
    {
        const char *text = json_string_value(json_object_get(one, "name"));

        if (!name || (text && strcmp(text, name) == 0)) {
            found = one; /* the newest stands last */
        }
    }
    return found;
}

static void ended_add(struct daemon *daemon, json_t *one)
{
    const char *name = json_string_value(json_object_get(one, "name"));

    if (!daemon->ended) {
        daemon->ended = json_array();
    }
    for (size_t i = json_array_size(daemon->ended); i > 0; i--) { /* an older end of the same */
        const char *old =
            json_string_value(json_object_get(json_array_get(daemon->ended, i - 1), "name"));

        if (old && name && strcmp(old, name) == 0) {
            json_array_remove(daemon->ended, i - 1);
        }
    }
    if (json_array_size(daemon->ended) == STATUS_ENDED_MAX) {
        json_array_remove(daemon->ended, 0);
    }
    json_array_append_new(daemon->ended, one);
}

void status_keep(struct run *run)
{
    json_t *one = run_json(run);
    char path[1200];
    int code;

    set_text(one, "verdict", verdict_ended(run->verdict, &code));
    set(one, "exit_code", json_integer(code));
    set_text(one, "phase", "done");
    if (run->verdict == WIRE_VERDICT_FINISHED || run->verdict == WIRE_VERDICT_STOPPED) {
        set(one, "needs", json_array());
    } else {
        const char *text = json_string_value(json_object_get(one, "text"));

        set(one, "needs", json_pack("[s]", text && text[0] ? text : "see belay events"));
    }
    snprintf(path, sizeof(path), "%s/ended.json", run->dir);
    char *text = bl_json_dump(one);

    if (text && bl_file_write_atomic(path, text, strlen(text), NULL) != 0) {
        bl_log(BL_LOG_WARN, "status", "cannot write %s", path);
    }
    free(text);
    ended_add(run->daemon, one);
}

void status_keep_record(struct daemon *daemon, const struct wire_record *record)
{
    json_t *known = status_ended(daemon, record->run);
    json_t *step = json_object_get(known, "step");
    char digest[BL_STATE_DIGEST_TEXT_BYTES];
    int code;

    if (json_is_integer(step) && (uint64_t)json_integer_value(step) >= record->end_step) {
        return;
    }
    json_t *one = json_object();

    set_text(one, "name", record->name);
    set_hex(one, "run", record->run);
    set_text(one, "verdict", verdict_ended(record->verdict, &code));
    set(one, "exit_code", json_integer(code));
    set_text(one, "phase", phase_name(WIRE_PHASE_DONE));
    set_text(one, "text", record->cause);
    set_u64(one, "generation", record->generation);
    set_u64(one, "step", record->end_step);
    if (record->end_digest_known) {
        bl_state_digest_format(&record->end_digest, digest);
        set_text(one, "digest", digest);
        set_u64(one, "digest_step", record->end_step);
    }
    set(one, "needs", code == 0 || code == 4 ? json_array() : json_pack("[s]", record->cause));
    ended_add(daemon, one);
}

void status_load(struct daemon *daemon)
{
    char path[1500];
    struct dirent *entry;

    snprintf(path, sizeof(path), "%s/jobs", daemon->config.state_dir);
    DIR *dir = opendir(path);

    while (dir && (entry = readdir(dir))) {
        json_t *one = NULL;

        snprintf(path, sizeof(path), "%s/jobs/%s/ended.json", daemon->config.state_dir,
                 entry->d_name);
        if (entry->d_name[0] != '.' && bl_json_load(path, STATUS_BYTES_MAX, &one, NULL) == 0) {
            ended_add(daemon, one);
        }
    }
    if (dir) {
        closedir(dir);
    }
}

void status_close(struct daemon *daemon)
{
    json_decref(daemon->ended);
    daemon->ended = NULL;
}

/* ---- the whole ---- */

static json_t *status_of(struct daemon *daemon, const char *name)
{
    struct run *run = name                ? run_find_name(daemon, name)
                      : daemon->run_count ? daemon->runs[daemon->run_count - 1]
                                          : NULL;

    if (run) {
        return run_json(run);
    }
    json_t *ended = status_ended_name(daemon, name);

    if (ended) {
        return json_copy(ended);
    }
    return json_pack("{si ss s[] sn ss ss}", "schema", 1, "verdict", "idle", "needs", "exit_code",
                     "phase", "none", "name", name ? name : "");
}

static json_t *daemons_json(struct daemon *daemon)
{
    static char names[DAEMON_PEERS_MAX + 1][WIRE_NODE_MAX];
    json_t *nodes = json_array();
    uint32_t count = control_nodes(daemon, names, DAEMON_PEERS_MAX + 1);

    for (uint32_t i = 0; i < count; i++) {
        json_array_append_new(nodes, json_string(names[i]));
    }
    return nodes;
}

char *status_json(struct daemon *daemon, const char *name)
{
    json_t *all = status_of(daemon, name && name[0] ? name : NULL), *jobs = json_array();
    const char *event = events_newest_line(daemon->events, CORE_NOTICE);
    json_t *one = event ? json_loads(event, 0, NULL) : NULL;
    json_t *store = json_object();

    set_text(all, "version", BELAY_VERSION);
    set_text(all, "node", daemon->config.name);
    set_u64(all, "pid", (uint64_t)getpid());
    set(all, "head", json_boolean(daemon->is_head));
    set(all, "head_connected", json_boolean(daemon->is_head || control_head(daemon)));
    set_u64(all, "head_epoch", daemon->head_epoch);
    set_text(all, "control", daemon->listen_addr);
    set_u64(all, "now_ms", bl_wall_ms());
    set_u64(all, "uptime_ms", daemon_now_ms() - daemon->started_ms);
    set(all, "daemons", daemons_json(daemon));
    set(all, "last_event", one ? one : json_null());
    set_u64(all, "events", events_newest(daemon->events));
    set(store, "standby",
        daemon->config.standby[0] ? json_string(daemon->config.standby) : json_null());
    set(store, "replicated", json_boolean(strcmp(replica_state(daemon), "in step") == 0));
    set(all, "store", store);
    for (uint32_t i = 0; i < daemon->run_count; i++) {
        json_array_append_new(jobs, json_string(daemon->runs[i]->name));
    }
    set(all, "jobs", jobs);
    char *text = bl_json_dump(all);

    json_decref(all);
    return text;
}
