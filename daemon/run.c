/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One struct run per job on this node: its machines, processes and memory, and the pump that moves
 * effects out of the machines until there are none.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "daemon/daemon.h"

#define RUN_BEAT_MS_MIN 20

struct run *run_find(struct daemon *daemon, uint64_t id)
{
    for (uint32_t i = 0; i < daemon->run_count; i++) {
        if (daemon->runs[i]->id == id) {
            return daemon->runs[i];
        }
    }
    return NULL;
}

struct run *run_find_name(struct daemon *daemon, const char *name)
{
    for (uint32_t i = 0; i < daemon->run_count; i++) {
        if (strcmp(daemon->runs[i]->name, name) == 0) {
            return daemon->runs[i];
        }
    }
    return NULL;
}

struct bl_job *run_job_parse(const char *json, struct bl_errmsg *msg)
{
    struct bl_job *job = malloc(sizeof(*job));
    int rc = job ? bl_job_parse(job, json, strlen(json), "job", "/", msg) : -ENOMEM;

    if (rc != 0) {
        free(job);
        return NULL;
    }
    return job;
}

void run_remember(struct run *run)
{
    char path[1100], text[256];
    struct bl_errmsg msg = {{0}};

    snprintf(path, sizeof(path), "%s/job.json", run->dir);
    int rc = bl_file_write_atomic(path, run->job_json, strlen(run->job_json), &msg);
    int n =
        snprintf(text, sizeof(text),
                 "{\"schema\":1,\"run\":\"%016" PRIx64 "\",\"exe_digest\":\"%016" PRIx64 "\"}\n",
                 run->id, run->exe_digest);

    snprintf(path, sizeof(path), "%s/run.json", run->dir);
    rc = rc ? rc : bl_file_write_atomic(path, text, (size_t)n, &msg);
    if (rc != 0) {
        bl_log(BL_LOG_ERROR, "run", "%s", msg.text);
    }
}

/* ---- timers ---- */

static void on_timer(uv_timer_t *timer)
{
    run_pump(timer->data);
}

static void on_beat(uv_timer_t *timer)
{
    struct run *run = timer->data;

    member_edge_beat(run);
    run_pump(run);
}

void run_pump(struct run *run)
{
    uint64_t now = daemon_now_ms(), at, next;

    if (run->pumping || run->closing || run->adopting) {
        run->pump_again = 1;
        return;
    }
    run->pumping = 1;
    do {
        int any;

        run->pump_again = 0;
        next = core_member_on_tick(run->member, now);
        if (run->leader) {
            at = core_leader_on_tick(run->leader, now);
            next = at < next ? at : next;
        }
        do {
            any = 0;
            member_edge_effects(run, &any);
            leader_edge_effects(run, &any);
        } while (any);
    } while (run->pump_again && !run->closing);
    run->pumping = 0;
    if (run->closing) {
        run_close(run);
        return;
    }
    now = daemon_now_ms();
    uv_timer_start(&run->timer, on_timer, next > now ? next - now : 1, 0);
    tool_link_notify(run->daemon);
}

/* ---- opening and closing ---- */

static int run_dir_make(struct run *run, struct bl_errmsg *msg)
{
    int n = snprintf(run->dir, sizeof(run->dir), "%s/jobs/%s", run->daemon->config.state_dir,
                     run->name);

    if (n >= (int)sizeof(run->dir)) {
        return bl_err(msg, BL_ELIMIT, "the path of the job's directory is too long");
    }
    return bl_mkdir_p(run->dir, msg);
}

static struct core_member *run_member_new(struct run *run)
{
    struct daemon *daemon = run->daemon;
    struct core_member_config config = {.node = daemon->config.name,
                                        .run = run->id,
                                        .node_incarnation = daemon->incarnation,
                                        .ranks_max = daemon->config.ranks_max,
                                        .bulk_addr = daemon->bulk_addr,
                                        .beat_ms = bl_time_scaled_ms(run->job->deadlines.beat),
                                        .head_epoch_min = daemon->head_epoch};

    return core_member_new(&config);
}

int run_open(struct daemon *daemon, uint64_t id, const char *job_json, struct run **ret,
             struct bl_errmsg *msg)
{
    struct run *run = calloc(1, sizeof(*run));
    int rc = 0;

    if (!run || daemon->run_count == DAEMON_RUNS_MAX) {
        free(run);
        return bl_err(msg, BL_ELIMIT, "%d jobs are on this node already", DAEMON_RUNS_MAX);
    }
    run->daemon = daemon;
    run->id = id;
    run->job_json = strdup(job_json);
    run->job = run_job_parse(job_json, msg);
    if (!run->job) {
        rc = BL_ECONFIG;
        goto fail;
    }
    snprintf(run->name, sizeof(run->name), "%s", run->job->name);
    if (run_find_name(daemon, run->name)) {
        rc = bl_err(msg, -EEXIST, "a job called %s is on this node already", run->name);
        goto fail;
    }
    rc = run_dir_make(run, msg);
    char path[1200];

    snprintf(path, sizeof(path), "%s/ended.json", run->dir);
    unlink(path); /* how it ended before is of no interest any more */
    run->member = rc == 0 ? run_member_new(run) : NULL;
    if (!run->member) {
        rc = rc ? rc : -ENOMEM;
        goto fail;
    }
    uv_timer_init(daemon->loop, &run->timer);
    uv_timer_init(daemon->loop, &run->beat);
    run->timer.data = run->beat.data = run;
    uint64_t beat = bl_time_scaled_ms(run->job->deadlines.beat) / 2;

    uv_timer_start(&run->beat, on_beat, beat > RUN_BEAT_MS_MIN ? beat : RUN_BEAT_MS_MIN,
                   beat > RUN_BEAT_MS_MIN ? beat : RUN_BEAT_MS_MIN);
    daemon->runs[daemon->run_count++] = run;
    *ret = run;
    return 0;
fail:
    free(run->job);
    free(run->job_json);
    free(run);
    return rc;
}

int run_job_set(struct run *run, const char *job_json, struct bl_errmsg *msg)
{
    if (strcmp(run->job_json, job_json) == 0) {
        return 0;
    }
    struct bl_job *job = run_job_parse(job_json, msg);
    char *copy = strdup(job_json);

    if (!job || !copy) {
        free(job);
        free(copy);
        return job ? bl_err_code(msg, -ENOMEM, "job") : BL_ECONFIG;
    }
    free(run->job);
    free(run->job_json);
    run->job = job;
    run->job_json = copy;
    run_remember(run);
    return 0;
}

void run_begin(struct run *run)
{
    core_member_start(run->member, daemon_now_ms());
    if (run->leader || control_head(run->daemon)) {
        core_member_on_link_up(run->member, daemon_now_ms());
    }
    run_pump(run);
}

static void on_handle_closed(uv_handle_t *handle)
{
    struct run *run = handle->data;

    if (--run->handles_open > 0) {
        return;
    }
    free(run->job);
    free(run->job_json);
    free(run);
}

/* What the next daemon would look at goes, what people look at stays. */
static void run_forget(const struct run *run)
{
    static const char *const files[] = {"run.json", "job.json"};
    char path[1200];

    for (size_t i = 0; i < 2; i++) {
        snprintf(path, sizeof(path), "%s/%s", run->dir, files[i]);
        unlink(path);
    }
}

void run_close(struct run *run)
{
    struct daemon *daemon = run->daemon;

    if (run->pumping) { /* the pump does it when it is through */
        run->closing = 1;
        return;
    }
    run->closing = 1;
    for (uint32_t i = 0; i < daemon->run_count; i++) {
        if (daemon->runs[i] == run) {
            daemon->runs[i] = daemon->runs[--daemon->run_count];
        }
    }
    if (daemon->stopping) {
        proc_detach_all(run);
    } else {
        run_forget(run);
        proc_release_all(run);
    }
    while (run->arena_count > 0) {
        run->arenas[0].is_kept = 0;
        arena_drop(run, run->arenas[0].id);
    }
    leader_edge_close(run);
    core_member_free(run->member);
    run->handles_open = 2;
    uv_close((uv_handle_t *)&run->timer, on_handle_closed);
    uv_close((uv_handle_t *)&run->beat, on_handle_closed);
    tool_link_notify(daemon);
}
