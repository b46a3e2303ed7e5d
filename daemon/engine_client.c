/* SPDX-License-Identifier: Apache-2.0 */
/* The engines' processes, what they were asked, and their answers. */
#include "daemon/engine_state.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"

#define ENGINE_RESTART_MS     200
#define ENGINE_RESTART_MS_MAX 60000u /* doubles up to this while none says hello */

static void on_freed(uv_handle_t *handle)
{
    free(handle);
}

/* ---- questions under way ---- */

struct engine_pending *engine_pending_add(struct engine *engine, enum engine_question kind,
                                          uint64_t key, uint64_t run)
{
    for (uint32_t i = 0; i < ENGINE_PENDING_MAX; i++) {
        struct engine_pending *pending = &engine->pending[i];

        if (pending->kind == ENGINE_ASKED_NONE) {
            *pending = (struct engine_pending){.kind = kind, .key = key, .run = run};
            engine->asked++;
            return pending;
        }
    }
    return NULL;
}

static void pending_drop(struct engine *engine, struct engine_pending *pending)
{
    pending->kind = ENGINE_ASKED_NONE;
    engine->asked--;
}

int engine_pending_take(struct engine *engine, enum engine_question kind, uint64_t key,
                        struct engine_pending *ret)
{
    for (uint32_t i = 0; i < ENGINE_PENDING_MAX; i++) {
        if (engine->pending[i].kind == kind && engine->pending[i].key == key) {
            *ret = engine->pending[i];
            pending_drop(engine, &engine->pending[i]);
            return 1;
        }
    }
    return 0;
}

void engine_written_tell(struct engine *engine, const struct engine_pending *pending, int rc,
                         const struct wire_engine_written *answer, const char *text)
{
    struct run *run = run_find(engine->daemon, pending->run);

    if (!run) {
        return;
    }
    if (rc != 0) {
        event(engine->daemon->events, EVENT_PART_FAILED, "job=%s step=%llu reason=%s", run->name,
              (unsigned long long)pending->step, text);
    }
    core_member_on_engine_written(run->member, pending->key, rc, answer ? answer->part_json : NULL,
                                  text, answer ? answer->bytes : 0, answer ? answer->elapsed_ms : 0,
                                  daemon_now_ms());
    run_pump(run);
}

static void staged(struct engine *engine, const struct engine_pending *pending, int rc,
                   const char *text)
{
    struct run *run = run_find(engine->daemon, pending->run);

    if (run) {
        core_member_on_engine_stage(run->member, pending->key, rc, text, daemon_now_ms());
        run_pump(run);
    }
}

static void committed(struct engine *engine, const struct engine_pending *pending, int rc,
                      const char *text, uint64_t digest)
{
    struct run *run = run_find(engine->daemon, pending->run);

    if (run && run->leader) {
        core_leader_on_commit_done(run->leader, pending->key, rc, text, digest, daemon_now_ms());
        run_pump(run);
    }
}

void engine_pending_fail(struct engine *engine, const struct engine_pending *pending,
                         const char *text)
{
    switch (pending->kind) {
    case ENGINE_ASKED_WRITE:
        engine_written_tell(engine, pending, BL_EABORTED, NULL, text);
        break;
    case ENGINE_ASKED_COMMIT:
        committed(engine, pending, BL_EABORTED, text, 0);
        break;
    case ENGINE_ASKED_STAGE:
        staged(engine, pending, BL_EABORTED, text);
        break;
    case ENGINE_ASKED_SCAN:
        pending->scanned(pending->arg, NULL);
        break;
    case ENGINE_ASKED_LOAD:
        pending->loaded(pending->arg, BL_EABORTED, text);
        break;
    case ENGINE_ASKED_NONE:
        break;
    }
}

void engine_pending_fail_all(struct engine *engine, const char *text)
{
    char why[WIRE_REASON_MAX];

    snprintf(why, sizeof(why), "%s", text);
    for (uint32_t i = 0; i < ENGINE_PENDING_MAX; i++) {
        struct engine_pending pending = engine->pending[i];

        if (pending.kind != ENGINE_ASKED_NONE) {
            pending_drop(engine, &engine->pending[i]);
            engine_pending_fail(engine, &pending, why);
        }
    }
}

/* ---- answers ---- */

static int on_written(struct engine *engine, const struct wire_frame *frame)
{
    struct wire_engine_written answer;
    struct engine_pending pending;
    int rc = wire_engine_written_decode(&answer, frame->payload, frame->payload_bytes, NULL);

    if (rc == 0 && engine_pending_take(engine, ENGINE_ASKED_WRITE, answer.attempt, &pending)) {
        engine_written_tell(engine, &pending, answer.rc, &answer, answer.text);
    }
    if (rc == 0) {
        wire_engine_written_free(&answer);
    }
    return rc;
}

static int on_committed(struct engine *engine, const struct wire_frame *frame)
{
    struct wire_engine_committed answer;
    struct engine_pending pending;
    int rc = wire_engine_committed_decode(&answer, frame->payload, frame->payload_bytes, NULL);

    if (rc == 0 && engine_pending_take(engine, ENGINE_ASKED_COMMIT, answer.attempt, &pending)) {
        const struct run *run = run_find(engine->daemon, pending.run);

        if (run && answer.rc == 0 && answer.warning[0]) {
            event(engine->daemon->events, EVENT_SAVE_WARNING, "job=%s dir=%s reason=%s", run->name,
                  answer.dir, answer.warning);
        }
        committed(engine, &pending, answer.rc, answer.text, answer.manifest_digest);
    } else if (rc == 0 &&
               engine_pending_take(engine, ENGINE_ASKED_STAGE, answer.attempt, &pending)) {
        staged(engine, &pending, answer.rc, answer.text);
    }
    return rc;
}

static int on_scanned(struct engine *engine, const struct wire_frame *frame)
{
    struct wire_engine_scanned answer;
    struct engine_pending pending;
    int rc = wire_engine_scanned_decode(&answer, frame->payload, frame->payload_bytes, NULL);

    if (rc == 0 && engine_pending_take(engine, ENGINE_ASKED_SCAN, answer.request, &pending)) {
        pending.scanned(pending.arg, &answer);
    }
    if (rc == 0) {
        wire_engine_scanned_free(&answer);
    }
    return rc;
}

static int on_loaded(struct engine *engine, const struct wire_frame *frame)
{
    struct wire_engine_loaded answer;
    struct engine_pending pending;
    int rc = wire_engine_loaded_decode(&answer, frame->payload, frame->payload_bytes, NULL);

    if (rc == 0 && engine_pending_take(engine, ENGINE_ASKED_LOAD, answer.request, &pending)) {
        const struct run *run = run_find(engine->daemon, pending.run);

        if (run && answer.healed > 0) {
            event(engine->daemon->events, EVENT_CHECKPOINT_HEALED,
                  "job=%s root=%s count=%u reason=%s", run->name, engine->path, answer.healed,
                  answer.healed_text);
        }
        pending.loaded(pending.arg, answer.rc, answer.text);
    }
    return rc;
}

/* Unasked: a checkpoint of this root was read back. */
static int on_verified(struct engine *engine, const struct wire_frame *frame)
{
    struct wire_engine_verified said;
    int rc = wire_engine_verified_decode(&said, frame->payload, frame->payload_bytes, NULL);

    for (uint32_t i = engine->daemon->run_count; rc == 0 && i > 0; i--) {
        struct run *run = engine->daemon->runs[i - 1];
        const struct wire_save *save =
            said.attempt ? core_member_save(run->member, said.attempt) : NULL;

        if (save && save->apart) {
            core_member_on_engine_verified(run->member, said.attempt, said.rc, said.text,
                                           daemon_now_ms());
            run_pump(run);
            continue; /* of a part: the leader hears of it in the report */
        }
        for (uint32_t r = 0; run->leader && r < run->job->root_count; r++) {
            if (strcmp(run->job->roots[r].path, engine->path) == 0) {
                core_leader_on_verified(run->leader, r, said.step, said.dir, said.rc, said.text,
                                        said.elapsed_ms, daemon_now_ms());
            }
        }
        run_pump(run);
    }
    return rc;
}

static void on_message(struct conn *conn, void *arg, const struct wire_frame *frame)
{
    struct engine *engine = arg;
    int rc = 0;

    engine_watch_moved(engine);
    if (frame->type != WIRE_TYPE_ENGINE_HELLO) {
        engine_watch_answered(engine);
    }
    switch ((enum wire_type)frame->type) {
    case WIRE_TYPE_ENGINE_HELLO:
        engine->greeted = 1;
        engine->stillborn = 0;
        event(engine->daemon->events, EVENT_ENGINE_STARTED, "pid=%u root=%s", engine->pid,
              engine->path);
        break;
    case WIRE_TYPE_ENGINE_WRITTEN:
        rc = on_written(engine, frame);
        break;
    case WIRE_TYPE_ENGINE_COMMITTED:
        rc = on_committed(engine, frame);
        break;
    case WIRE_TYPE_ENGINE_SCANNED:
        rc = on_scanned(engine, frame);
        break;
    case WIRE_TYPE_ENGINE_LOADED:
        rc = on_loaded(engine, frame);
        break;
    case WIRE_TYPE_ENGINE_VERIFIED:
        rc = on_verified(engine, frame);
        break;
    case WIRE_TYPE_ENGINE_CANCELLED:
        break;
    default:
        rc = BL_EPROTO;
        break;
    }
    if (rc != 0) {
        bl_log(BL_LOG_ERROR, "engine", "%s: %s", wire_type_name(frame->type), bl_strerror(rc));
        conn_close(conn);
        engine->conn = NULL;
        engine_pending_fail_all(engine, "the engine spoke nonsense");
    }
}

static void on_closed(struct conn *conn, void *arg, const char *text)
{
    struct engine *engine = arg;

    (void)conn;
    (void)text;
    engine->conn = NULL;
    engine_pending_fail_all(engine, "the checkpoint engine ended");
}

static const struct conn_ops engine_ops = {on_message, on_closed};

/* ---- the child ---- */

static void on_restart(uv_timer_t *timer)
{
    struct engine *engine = timer->data;

    if (engine->is_stuck) {
        engine_watch_try(engine);
    } else {
        engine_start(engine);
    }
}

void engine_restart_in(struct engine *engine, uint64_t ms)
{
    uv_timer_start(engine->restart, on_restart, ms, 0);
}

/* The child ended: how long until the next. One that never said hello will hardly say it 200 ms
 * later: a library is missing, memory is short. It is told of once. */
static uint64_t engine_ended(struct engine *engine, int code, int signal_number)
{
    uint64_t pause = ENGINE_RESTART_MS;

    engine->stillborn += !engine->greeted;
    if (engine->stillborn <= 1) {
        event(engine->daemon->events, EVENT_ENGINE_LOST, "pid=%u code=%d signal=%d root=%s",
              engine->pid, code, signal_number, engine->path);
    }
    for (uint32_t i = 1; i < engine->stillborn && pause < ENGINE_RESTART_MS_MAX; i++) {
        pause *= 2;
    }
    return pause < ENGINE_RESTART_MS_MAX ? pause : ENGINE_RESTART_MS_MAX;
}

static void child_forget(struct engine *engine, const struct engine_child *child)
{
    for (struct engine_child **at = &engine->former; *at; at = &(*at)->next) {
        if (*at == child) {
            *at = child->next;
            return;
        }
    }
}

static void on_exit_child(uv_process_t *process, int64_t status, int signal_number)
{
    struct engine_child *child = (struct engine_child *)process;
    struct engine *engine = child->engine;

    if (engine && engine->child == child) {
        engine->child = NULL;
        conn_close(engine->conn);
        engine->conn = NULL;
        /* Armed before the failures are told: a save that is tried again revives it at once. */
        engine_restart_in(engine, engine_ended(engine, (int)status, signal_number));
        engine_pending_fail_all(engine, "the checkpoint engine ended");
    } else if (engine) {
        child_forget(engine, child);
    }
    uv_close((uv_handle_t *)process, on_freed);
}

static int engine_spawn(struct engine *engine, int fd)
{
    static char path[1200];
    static char *argv[] = {path, (char *)"--fd", (char *)"3", NULL};
    uv_stdio_container_t stdio[4] = {{.flags = UV_IGNORE},
                                     {.flags = UV_IGNORE},
                                     {.flags = UV_INHERIT_FD, .data.fd = 2},
                                     {.flags = UV_INHERIT_FD, .data.fd = fd}};
    uv_process_options_t options = {
        .exit_cb = on_exit_child, .file = path, .args = argv, .stdio_count = 4, .stdio = stdio};
    int rc = bl_dir_of_exe(path, sizeof(path) - 16);

    if (rc != 0) {
        return rc;
    }
    strcat(path, "/belay-engine");
    struct engine_child *child = calloc(1, sizeof(*child));

    BL_ASSERT(child != NULL);
    rc = uv_spawn(engine->daemon->loop, &child->process, &options);
    if (rc != 0) {
        bl_log(BL_LOG_ERROR, "engine", "start %s: %s", path, bl_strerror(rc));
        uv_close((uv_handle_t *)&child->process, on_freed);
        return rc;
    }
    child->engine = engine;
    engine->child = child;
    engine->greeted = 0;
    engine->pid = (uint32_t)child->process.pid;
    return 0;
}

void engine_start(struct engine *engine)
{
    int fds[2];

    if (engine->closing || engine->child ||
        socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) {
        return;
    }
    int rc = engine_spawn(engine, fds[1]);

    close(fds[1]);
    if (rc == 0) {
        engine->conn = conn_new(engine->daemon->loop, fds[0], engine->daemon->incarnation,
                                &engine_ops, engine);
    } else {
        close(fds[0]);
        engine_restart_in(engine, 10 * ENGINE_RESTART_MS);
    }
}

void engine_child_abandon(struct engine *engine)
{
    struct engine_child *child = engine->child;

    conn_close(engine->conn);
    engine->conn = NULL;
    engine->child = NULL;
    if (child) {
        uv_process_kill(&child->process, SIGKILL);
        uv_unref((uv_handle_t *)&child->process);
        child->next = engine->former;
        engine->former = child;
    }
}

/* A question does not wait for the timer: without an engine, another is started at once, unless the
 * last ones died before they said a word. One whose end was seen on the socket but not yet as a
 * process is left to die by itself. */
static void engine_revive(struct engine *engine)
{
    if (engine->child) {
        uint64_t pause = engine_ended(engine, 0, SIGKILL);

        engine_child_abandon(engine);
        engine_restart_in(engine, pause);
    }
    if (engine->stillborn <= 1) {
        uv_timer_stop(engine->restart);
        engine_start(engine);
    }
}

void engine_ask(struct engine *engine, struct engine_pending *pending, enum wire_type type,
                const void *message, const int *fds, uint32_t fd_count)
{
    struct engine_pending copy = *pending;

    if (engine->is_stuck) {
        pending_drop(engine, pending);
        engine_pending_fail(engine, &copy, engine_watch_text(engine));
        return;
    }
    if (!engine->conn) {
        engine_revive(engine);
    }
    int rc = engine->conn ? conn_send(engine->conn, type, message, 0, fds, fd_count) : -EPIPE;

    if (rc != 0) {
        pending_drop(engine, pending);
        engine_pending_fail(engine, &copy,
                            engine->conn            ? bl_strerror(rc)
                            : engine->stillborn > 1 ? "belay-engine ends before it says hello"
                                                    : "no checkpoint engine runs");
        return;
    }
    engine_watch_begin(engine);
}

/* ---- engines ---- */

static void engine_end(struct engine *engine)
{
    struct engine_child *child = engine->child;

    engine->closing = 1;
    conn_close(engine->conn); /* it ends by itself when its socket closes */
    if (child) {
        child->engine = NULL;
        uv_process_kill(&child->process, SIGTERM);
        uv_unref((uv_handle_t *)&child->process);
    }
    for (child = engine->former; child; child = child->next) {
        child->engine = NULL;
    }
    uv_close((uv_handle_t *)engine->restart, on_freed);
    uv_close((uv_handle_t *)engine->watch, on_freed);
    free(engine);
}

static int engine_has_run(const struct engine *engine)
{
    for (uint32_t i = 0; i < engine->daemon->run_count; i++) {
        const struct bl_job *job = engine->daemon->runs[i]->job;

        for (uint32_t r = 0; r < job->root_count; r++) {
            if (strcmp(job->roots[r].path, engine->path) == 0) {
                return 1;
            }
        }
    }
    return 0;
}

/* Room for one more: of those that nobody uses the one that was asked longest ago goes. */
static int engines_make_room(struct daemon *daemon)
{
    struct engine **oldest = NULL;
    uint32_t count = 0;

    for (struct engine **at = &daemon->engines; *at; at = &(*at)->next) {
        count++;
        if (!engine_has_run(*at) && (*at)->asked == 0 &&
            (!oldest || (*at)->used_ms < (*oldest)->used_ms)) {
            oldest = at;
        }
    }
    if (count < ENGINES_MAX) {
        return 1;
    }
    if (!oldest) {
        return 0;
    }
    struct engine *engine = *oldest;

    *oldest = engine->next;
    engine_end(engine);
    return 1;
}

struct engine *engine_of(struct daemon *daemon, const char *path)
{
    for (struct engine *engine = daemon->engines; engine; engine = engine->next) {
        if (strcmp(engine->path, path) == 0) {
            return engine;
        }
    }
    if (!engines_make_room(daemon)) {
        return NULL;
    }
    struct engine *engine = calloc(1, sizeof(*engine));

    BL_ASSERT(engine != NULL);
    engine->restart = calloc(1, sizeof(*engine->restart));
    engine->watch = calloc(1, sizeof(*engine->watch));
    BL_ASSERT(engine->restart && engine->watch);
    engine->daemon = daemon;
    snprintf(engine->path, sizeof(engine->path), "%s", path);
    uv_timer_init(daemon->loop, engine->restart);
    uv_timer_init(daemon->loop, engine->watch);
    engine->restart->data = engine->watch->data = engine;
    engine->next = daemon->engines;
    daemon->engines = engine;
    return engine;
}

void engine_close(struct daemon *daemon)
{
    while (daemon->engines) {
        struct engine *engine = daemon->engines;

        daemon->engines = engine->next;
        engine_end(engine);
    }
}
