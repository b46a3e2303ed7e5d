/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Is a root stuck? A save may rightly take an hour, so that a question's age says nothing. What
 * says something is that the engine was asked and neither reads, writes nor computes: the counters
 * of /proc/PID/io and its processor time stand still, nor does its disk move anything while it
 * waits for it. After deadlines.root of that the root is stuck.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "daemon/engine_life.h"
#include "daemon/engine_state.h"

#define WATCH_DEADLINE_MS 60000u /* of roots of no job (a submit looks at one) */
#define WATCH_LOOKS       8u     /* in a deadline */
#define WATCH_LOOK_MIN_MS 50u
#define WATCH_PAUSE_MS    1000u   /* after the first time; doubles */
#define WATCH_PAUSE_MAX   300000u /* still soon after somebody mended it */
#define WATCH_FORMER_MAX  4u      /* children that cannot die; no more are put beside them */
#define WATCH_BUSY_SHARE  20u     /* 1/20 of the time on a processor is work; less are timers */
/* So many deadlines long the disk's own movement counts for an engine that waits in the kernel: an
 * fsync behind all that others have written takes minutes, what takes longer is a hang on a disk
 * that others use. */
#define WATCH_DISK_DEADLINES 10u

static uint64_t watch_deadline_ms(const struct engine *engine)
{
    uint64_t deadline = UINT64_MAX;

    for (uint32_t i = 0; i < engine->daemon->run_count; i++) {
        const struct bl_job *job = engine->daemon->runs[i]->job;

        for (uint32_t r = 0; r < job->root_count; r++) {
            if (strcmp(job->roots[r].path, engine->path) == 0 && job->deadlines.root < deadline) {
                deadline = job->deadlines.root;
            }
        }
    }
    return bl_time_scaled_ms(deadline == UINT64_MAX ? WATCH_DEADLINE_MS : (uint32_t)deadline);
}

static void roots_tell(const struct engine *engine)
{
    for (uint32_t i = engine->daemon->run_count; i > 0; i--) {
        struct run *run = engine->daemon->runs[i - 1];

        for (uint32_t r = 0; run->leader && r < run->job->root_count; r++) {
            if (strcmp(run->job->roots[r].path, engine->path) == 0) {
                core_leader_on_root(run->leader, r, engine->is_stuck, "", daemon_now_ms());
            }
        }
        run_pump(run);
    }
}

const char *engine_watch_text(const struct engine *engine)
{
    static char text[WIRE_REASON_MAX];

    snprintf(text, sizeof(text), "root %.400s does not answer", engine->path);
    return text;
}

static void watch_stuck(struct engine *engine, uint64_t still_ms)
{
    uint64_t pause = (uint64_t)WATCH_PAUSE_MS
                     << (engine->stuck_count < 10 ? engine->stuck_count : 10);

    pause = bl_time_scaled_ms((uint32_t)(pause < WATCH_PAUSE_MAX ? pause : WATCH_PAUSE_MAX));
    if (!engine->is_stuck) {
        event(engine->daemon->events, EVENT_ENGINE_STUCK, "pid=%u root=%s still_ms=%llu asked=%u",
              engine->pid, engine->path, (unsigned long long)still_ms, engine->asked);
    }
    engine->is_stuck = 1;
    engine->stuck_count++;
    uv_timer_stop(engine->watch);
    engine_child_abandon(engine);
    engine_restart_in(engine, pause);
    engine_pending_fail_all(engine, engine_watch_text(engine));
    roots_tell(engine);
}

/* What the disk below the root of this node has moved. */
static uint64_t watch_sectors(const struct engine *engine)
{
    char path[WIRE_ROOT_MAX];

    return engine_root_path(engine->daemon->config.name, engine->path, path, sizeof(path)) == 0
               ? engine_life_sectors(path, "/proc/self/mountinfo", "/sys/dev/block")
               : 0;
}

static void on_watch(uv_timer_t *timer)
{
    struct engine *engine = timer->data;
    uint64_t now = daemon_now_ms();

    if (engine->asked == 0) {
        uv_timer_stop(timer);
        return;
    }
    uint64_t io = engine_life_io(engine->pid), cpu = engine_life_cpu_ticks(engine->pid);
    uint64_t sectors = watch_sectors(engine);
    uint64_t gap = now - engine->looked_ms;

    if (gap > 3 * uv_timer_get_repeat(timer)) { /* we did not look: stopped, or the machine slept */
        engine->moved_ms = engine->alone_ms = now;
    }
    uint64_t cpu_ms = (cpu - engine->cpu_ticks) * 1000 / (uint64_t)sysconf(_SC_CLK_TCK);

    if (io != engine->io_count || (cpu > engine->cpu_ticks && cpu_ms * WATCH_BUSY_SHARE >= gap)) {
        engine->moved_ms = engine->alone_ms = now;
    } else if (sectors != engine->sectors && engine_life_waits(engine->pid) &&
               now - engine->alone_ms < WATCH_DISK_DEADLINES * watch_deadline_ms(engine)) {
        engine->moved_ms = now;
    }
    engine->io_count = io;
    engine->sectors = sectors;
    engine->cpu_ticks = cpu;
    engine->looked_ms = now;
    if (now - engine->moved_ms >= watch_deadline_ms(engine)) {
        watch_stuck(engine, now - engine->moved_ms);
    }
}

void engine_watch_begin(struct engine *engine)
{
    uint64_t every = watch_deadline_ms(engine) / WATCH_LOOKS;
    int is_on = uv_is_active((uv_handle_t *)engine->watch);

    every = every > WATCH_LOOK_MIN_MS ? every : WATCH_LOOK_MIN_MS;
    engine->used_ms = daemon_now_ms();
    if (is_on && uv_timer_get_repeat(engine->watch) == every) {
        return;
    }
    if (!is_on) {
        engine->moved_ms = engine->alone_ms = engine->used_ms;
    }
    engine->looked_ms = engine->used_ms;
    uv_timer_start(engine->watch, on_watch, every, every);
}

void engine_watch_moved(struct engine *engine)
{
    engine->moved_ms = engine->alone_ms = daemon_now_ms();
}

void engine_watch_answered(struct engine *engine)
{
    engine_watch_moved(engine);
    if (!engine->is_stuck) {
        return;
    }
    engine->is_stuck = 0;
    engine->stuck_count = 0;
    event(engine->daemon->events, EVENT_ENGINE_BACK, "pid=%u root=%s", engine->pid, engine->path);
    roots_tell(engine);
}

/* What is there is of no interest, that it answers is. */
static void on_tried(void *arg, const struct wire_engine_scanned *scanned)
{
    (void)arg;
    (void)scanned;
}

void engine_watch_try(struct engine *engine)
{
    uint32_t former = 0;

    for (const struct engine_child *child = engine->former; child; child = child->next) {
        former++;
    }
    if (former >= WATCH_FORMER_MAX) { /* they wait in the kernel, and so would this one */
        watch_stuck(engine, 0);
        return;
    }
    struct wire_engine_scan message = {.request = ++engine->next_request};
    struct engine_pending *pending =
        engine_pending_add(engine, ENGINE_ASKED_SCAN, message.request, 0);

    BL_IGNORE(engine_root_path(engine->daemon->config.name, engine->path, message.root.path,
                               sizeof(message.root.path)),
              "it fitted before");
    snprintf(message.root.node, sizeof(message.root.node), "%s", engine->daemon->config.name);
    message.root.nodes = 1;
    message.root.shared = 1;
    BL_ASSERT(pending != NULL);
    pending->scanned = on_tried;
    engine_start(engine);
    if (engine->conn && conn_send(engine->conn, WIRE_TYPE_ENGINE_SCAN, &message, 0, NULL, 0) == 0) {
        engine_watch_begin(engine);
    } else {
        watch_stuck(engine, 0);
    }
}

void engine_roots_tell(struct run *run)
{
    for (const struct engine *engine = run->daemon->engines; engine; engine = engine->next) {
        for (uint32_t r = 0; run->leader && engine->is_stuck && r < run->job->root_count; r++) {
            if (strcmp(run->job->roots[r].path, engine->path) == 0) {
                core_leader_on_root(run->leader, r, 1, "", daemon_now_ms());
            }
        }
    }
}
