/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/engine_client.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"
#include "daemon/manifest.h"

#define ENGINE_RESTART_MS    200
#define ENGINE_RESERVE_BYTES (1u << 20) /* of each root, kept for the commit record */

enum pending_kind { PENDING_NONE, PENDING_WRITE, PENDING_COMMIT, PENDING_SCAN, PENDING_LOAD };

struct pending { /* a question under way; fails when the engine dies */
    enum pending_kind kind;
    uint64_t key; /* attempt or request */
    uint64_t run;
    engine_scanned_fn scanned;
    engine_loaded_fn loaded;
    void *arg;
};

struct engine {
    struct daemon *daemon;
    uv_process_t *process;
    uv_timer_t *restart;
    struct conn *conn;
    uint32_t pid;
    uint64_t next_request;
    struct pending pending[ENGINE_PENDING_MAX];
    int closing;
};

static void engine_start(struct engine *engine);

static void on_freed(uv_handle_t *handle)
{
    free(handle);
}

/* ---- questions under way ---- */

static struct pending *pending_add(struct engine *engine, enum pending_kind kind, uint64_t key,
                                   uint64_t run)
{
    for (uint32_t i = 0; i < ENGINE_PENDING_MAX; i++) {
        struct pending *pending = &engine->pending[i];

        if (pending->kind == PENDING_NONE) {
            *pending = (struct pending){.kind = kind, .key = key, .run = run};
            return pending;
        }
    }
    return NULL;
}

/* Takes the question out of the table: a copy in *ret. */
static int pending_take(struct engine *engine, enum pending_kind kind, uint64_t key,
                        struct pending *ret)
{
    for (uint32_t i = 0; i < ENGINE_PENDING_MAX; i++) {
        if (engine->pending[i].kind == kind && engine->pending[i].key == key) {
            *ret = engine->pending[i];
            engine->pending[i].kind = PENDING_NONE;
            return 1;
        }
    }
    return 0;
}

static void written(struct engine *engine, const struct pending *pending, int rc,
                    const char *part_json, const char *text)
{
    struct run *run = run_find(engine->daemon, pending->run);

    if (!run) {
        return;
    }
    if (rc != 0) {
        event(engine->daemon->events, EVENT_PART_FAILED, "job=%s step=%llu reason=%s", run->name,
              0ull, text);
    }
    core_member_on_engine_written(run->member, pending->key, rc, part_json, text, daemon_now_ms());
    run_pump(run);
}

static void committed(struct engine *engine, const struct pending *pending, int rc,
                      const char *text, uint64_t digest)
{
    struct run *run = run_find(engine->daemon, pending->run);

    if (run && run->leader) {
        core_leader_on_commit_done(run->leader, pending->key, rc, text, digest, daemon_now_ms());
        run_pump(run);
    }
}

static void pending_fail(struct engine *engine, const struct pending *pending, const char *text)
{
    switch (pending->kind) {
    case PENDING_WRITE:
        written(engine, pending, BL_EABORTED, NULL, text);
        break;
    case PENDING_COMMIT:
        committed(engine, pending, BL_EABORTED, text, 0);
        break;
    case PENDING_SCAN:
        pending->scanned(pending->arg, NULL);
        break;
    case PENDING_LOAD:
        pending->loaded(pending->arg, BL_EABORTED, text);
        break;
    case PENDING_NONE:
        break;
    }
}

static void fail_all(struct engine *engine, const char *text)
{
    for (uint32_t i = 0; i < ENGINE_PENDING_MAX; i++) {
        struct pending pending = engine->pending[i];

        engine->pending[i].kind = PENDING_NONE;
        if (pending.kind != PENDING_NONE) {
            pending_fail(engine, &pending, text);
        }
    }
}

/* ---- answers ---- */

static int on_written(struct engine *engine, const struct wire_frame *frame)
{
    struct wire_engine_written answer;
    struct pending pending;
    int rc = wire_engine_written_decode(&answer, frame->payload, frame->payload_bytes, NULL);

    if (rc == 0 && pending_take(engine, PENDING_WRITE, answer.attempt, &pending)) {
        written(engine, &pending, answer.rc, answer.part_json, answer.text);
    }
    if (rc == 0) {
        wire_engine_written_free(&answer);
    }
    return rc;
}

static int on_committed(struct engine *engine, const struct wire_frame *frame)
{
    struct wire_engine_committed answer;
    struct pending pending;
    int rc = wire_engine_committed_decode(&answer, frame->payload, frame->payload_bytes, NULL);

    if (rc == 0 && pending_take(engine, PENDING_COMMIT, answer.attempt, &pending)) {
        committed(engine, &pending, answer.rc, answer.text, answer.manifest_digest);
    }
    return rc;
}

static int on_scanned(struct engine *engine, const struct wire_frame *frame)
{
    struct wire_engine_scanned answer;
    struct pending pending;
    int rc = wire_engine_scanned_decode(&answer, frame->payload, frame->payload_bytes, NULL);

    if (rc == 0 && pending_take(engine, PENDING_SCAN, answer.request, &pending)) {
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
    struct pending pending;
    int rc = wire_engine_loaded_decode(&answer, frame->payload, frame->payload_bytes, NULL);

    if (rc == 0 && pending_take(engine, PENDING_LOAD, answer.request, &pending)) {
        pending.loaded(pending.arg, answer.rc, answer.text);
    }
    return rc;
}

static void on_message(struct conn *conn, void *arg, const struct wire_frame *frame)
{
    struct engine *engine = arg;
    int rc = 0;

    switch ((enum wire_type)frame->type) {
    case WIRE_TYPE_ENGINE_HELLO:
        event(engine->daemon->events, EVENT_ENGINE_STARTED, "pid=%u", engine->pid);
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
    case WIRE_TYPE_ENGINE_CANCELLED:
    case WIRE_TYPE_ENGINE_VERIFIED:
        break;
    default:
        rc = BL_EPROTO;
        break;
    }
    if (rc != 0) {
        bl_log(BL_LOG_ERROR, "engine", "%s: %s", wire_type_name(frame->type), bl_strerror(rc));
        conn_close(conn);
        engine->conn = NULL;
        fail_all(engine, "the engine spoke nonsense");
    }
}

static void on_closed(struct conn *conn, void *arg, const char *text)
{
    struct engine *engine = arg;

    (void)conn;
    (void)text;
    engine->conn = NULL;
    fail_all(engine, "the checkpoint engine ended");
}

static const struct conn_ops engine_ops = {on_message, on_closed};

/* ---- the child ---- */

static void on_restart(uv_timer_t *timer)
{
    engine_start(timer->data);
}

static void on_exit_child(uv_process_t *process, int64_t status, int signal_number)
{
    struct engine *engine = process->data;

    uv_close((uv_handle_t *)process, on_freed);
    if (!engine) {
        return;
    }
    engine->process = NULL;
    event(engine->daemon->events, EVENT_ENGINE_LOST, "pid=%u code=%d signal=%d", engine->pid,
          (int)status, signal_number);
    conn_close(engine->conn);
    engine->conn = NULL;
    /* Armed before the failures are told: a save that is tried again revives it at once. */
    uv_timer_start(engine->restart, on_restart, ENGINE_RESTART_MS, 0);
    fail_all(engine, "the checkpoint engine ended");
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
    engine->process = calloc(1, sizeof(*engine->process));
    BL_ASSERT(engine->process != NULL);
    engine->process->data = engine;
    rc = uv_spawn(engine->daemon->loop, engine->process, &options);
    if (rc != 0) {
        bl_log(BL_LOG_ERROR, "engine", "start %s: %s", path, bl_strerror(rc));
        engine->process->data = NULL;
        uv_close((uv_handle_t *)engine->process, on_freed);
        engine->process = NULL;
        return rc;
    }
    engine->pid = (uint32_t)engine->process->pid;
    return 0;
}

static void engine_start(struct engine *engine)
{
    int fds[2];

    if (engine->closing || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) {
        return;
    }
    int rc = engine_spawn(engine, fds[1]);

    close(fds[1]);
    if (rc == 0) {
        engine->conn = conn_new(engine->daemon->loop, fds[0], engine->daemon->incarnation,
                                &engine_ops, engine);
    } else {
        close(fds[0]);
        uv_timer_start(engine->restart, on_restart, 10 * ENGINE_RESTART_MS, 0);
    }
}

int engine_open(struct daemon *daemon, struct bl_errmsg *msg)
{
    struct engine *engine = calloc(1, sizeof(*engine));

    if (!engine || !(engine->restart = calloc(1, sizeof(*engine->restart)))) {
        free(engine);
        return bl_err_code(msg, -ENOMEM, "engine");
    }
    engine->daemon = daemon;
    uv_timer_init(daemon->loop, engine->restart);
    engine->restart->data = engine;
    daemon->engine = engine;
    engine_start(engine);
    return 0;
}

void engine_close(struct daemon *daemon)
{
    struct engine *engine = daemon->engine;

    if (!engine) {
        return;
    }
    engine->closing = 1;
    conn_close(engine->conn); /* it ends by itself when its socket closes */
    if (engine->process) {
        engine->process->data = NULL;
        uv_process_kill(engine->process, SIGTERM);
        uv_unref((uv_handle_t *)engine->process);
    }
    uv_close((uv_handle_t *)engine->restart, on_freed);
    free(engine);
    daemon->engine = NULL;
}

/* ---- questions ---- */

void engine_root_fill(const struct run *run, uint32_t index, int create,
                      struct wire_engine_root *ret)
{
    const struct bl_job_root *root = &run->job->roots[index];

    memset(ret, 0, sizeof(*ret));
    snprintf(ret->path, sizeof(ret->path), "%s", root->path);
    ret->run = run->id;
    snprintf(ret->node, sizeof(ret->node), "%s", run->daemon->config.name);
    ret->nodes = run->job->nodes_min;
    ret->shared = root->shared;
    ret->create = (uint32_t)create;
    ret->reserve_bytes = create ? ENGINE_RESERVE_BYTES : 0;
}

/* A question does not wait for the timer: without an engine, another is started at once. One whose
 * end was seen on the socket but not yet as a process is left to die by itself. */
static void engine_revive(struct engine *engine)
{
    if (engine->process) {
        uv_process_kill(engine->process, SIGKILL);
        engine->process->data = NULL;
        engine->process = NULL;
        event(engine->daemon->events, EVENT_ENGINE_LOST, "pid=%u code=%d signal=%d", engine->pid, 0,
              SIGKILL);
    }
    uv_timer_stop(engine->restart);
    engine_start(engine);
}

static void ask(struct engine *engine, struct pending *pending, enum wire_type type,
                const void *message, const int *fds, uint32_t fd_count)
{
    struct pending copy = *pending;

    if (!engine->conn) {
        engine_revive(engine);
    }
    int rc = engine->conn ? conn_send(engine->conn, type, message, 0, fds, fd_count) : -EPIPE;

    if (rc != 0) {
        pending->kind = PENDING_NONE;
        pending_fail(engine, &copy, engine->conn ? bl_strerror(rc) : "no checkpoint engine runs");
    }
}

void engine_write(struct run *run, uint64_t attempt)
{
    struct engine *engine = run->daemon->engine;
    struct core_member_write write_job;
    struct wire_engine_write message = {0};
    int fds[WIRE_FDS_MAX];
    struct pending *pending = pending_add(engine, PENDING_WRITE, attempt, run->id);
    struct pending none = {.kind = PENDING_WRITE, .key = attempt, .run = run->id};

    if (!pending || core_member_write(run->member, attempt, &write_job) != 0) {
        if (pending) {
            pending->kind = PENDING_NONE;
        }
        written(engine, &none, BL_ELIMIT, NULL, "too many saves under way");
        return;
    }
    engine_root_fill(run, write_job.root, 1, &message.root);
    message.attempt = (struct wire_engine_attempt){.attempt = attempt,
                                                   .step = write_job.step,
                                                   .generation = write_job.generation,
                                                   .line = write_job.line,
                                                   .count = 1};
    snprintf(message.attempt.dir, sizeof(message.attempt.dir), "%s", write_job.dir);
    snprintf(message.part, sizeof(message.part), "part-%.56s", run->daemon->config.name);
    snprintf(message.codec, sizeof(message.codec), "none");
    for (uint32_t i = 0; i < write_job.source_count && i < WIRE_FDS_MAX; i++) {
        struct arena *arena = arena_find(run, write_job.sources[i].arena);

        if (arena) {
            uint32_t at = message.arena_count++;

            message.arenas[at].arena = arena->id;
            message.arenas[at].slot = write_job.sources[i].slot;
            message.arenas[at].fd_index = at;
            fds[at] = arena->fd;
        }
    }
    int fits = message.arena_count == write_job.source_count;

    free(write_job.sources);
    if (!fits) {
        pending->kind = PENDING_NONE;
        written(engine, &none, BL_ENOSTATE, NULL,
                "more arenas than fit in one part, or one is gone");
        return;
    }
    ask(engine, pending, WIRE_TYPE_ENGINE_WRITE, &message, fds, message.arena_count);
}

void engine_cancel(struct run *run, uint64_t attempt)
{
    struct engine *engine = run->daemon->engine;
    const struct wire_directive *directive = core_member_directive(run->member);
    struct wire_engine_cancel message = {0};
    struct pending pending;

    BL_IGNORE(pending_take(engine, PENDING_WRITE, attempt, &pending) == 0, "it was done already");
    for (uint32_t i = 0; directive && i < directive->save_count; i++) {
        const struct wire_save *save = &directive->saves[i];

        if (save->attempt == attempt && save->root < run->job->root_count) {
            engine_root_fill(run, save->root, 0, &message.root);
            message.attempt = (struct wire_engine_attempt){.attempt = attempt,
                                                           .step = save->step,
                                                           .generation = save->generation,
                                                           .line = save->line,
                                                           .count = 1};
            snprintf(message.attempt.dir, sizeof(message.attempt.dir), "%s", save->dir);
            BL_IGNORE(engine->conn && conn_send(engine->conn, WIRE_TYPE_ENGINE_CANCEL, &message, 0,
                                                NULL, 0) != 0,
                      "the next save sweeps");
        }
    }
}

void engine_commit(struct run *run, uint64_t attempt)
{
    struct engine *engine = run->daemon->engine;
    struct core_commit commit;
    struct wire_engine_commit message = {0};
    struct pending *pending = pending_add(engine, PENDING_COMMIT, attempt, run->id);

    if (!pending || core_leader_commit(run->leader, attempt, &commit) != 0) {
        if (pending) {
            pending->kind = PENDING_NONE;
        }
        core_leader_on_commit_done(run->leader, attempt, BL_EABORTED, "too many saves", 0,
                                   daemon_now_ms());
        return;
    }
    engine_root_fill(run, commit.root, 0, &message.root);
    message.attempt = (struct wire_engine_attempt){.attempt = attempt,
                                                   .step = commit.step,
                                                   .generation = commit.generation,
                                                   .line = commit.line,
                                                   .count = 1};
    snprintf(message.attempt.dir, sizeof(message.attempt.dir), "%s", commit.dir);
    message.manifest_json = manifest_json(run, &commit);
    message.keep.keep = run->job->roots[commit.root].keep;
    message.part_count = commit.part_count;
    message.parts = calloc(commit.part_count ? commit.part_count : 1, sizeof(*message.parts));
    BL_ASSERT(message.parts != NULL);
    for (uint32_t i = 0; i < commit.part_count; i++) {
        message.parts[i].part_json = strdup(commit.parts[i].part_json);
    }
    free(commit.parts);
    ask(engine, pending, WIRE_TYPE_ENGINE_COMMIT, &message, NULL, 0);
    wire_engine_commit_free(&message);
}

void engine_scan_root(struct daemon *daemon, const struct wire_engine_root *root,
                      engine_scanned_fn done, void *arg)
{
    struct engine *engine = daemon->engine;
    struct wire_engine_scan message = {.request = ++engine->next_request, .root = *root};
    struct pending *pending = pending_add(engine, PENDING_SCAN, message.request, 0);

    if (!pending) {
        done(arg, NULL);
        return;
    }
    pending->scanned = done;
    pending->arg = arg;
    ask(engine, pending, WIRE_TYPE_ENGINE_SCAN, &message, NULL, 0);
}

void engine_load(struct run *run, struct arena *arena, const struct wire_disk_load *load,
                 engine_loaded_fn done, void *arg)
{
    struct engine *engine = run->daemon->engine;
    struct bl_errmsg msg = {{0}};
    struct wire_engine_load message = {.request = ++engine->next_request,
                                       .arena = arena->id,
                                       .slot = load->slot,
                                       .extents = load->extents};
    uint32_t root = 0;

    while (root < run->job->root_count && strcmp(run->job->roots[root].path, load->root) != 0) {
        root++;
    }
    if (root == run->job->root_count) { /* a rank reads where its job says, and nowhere else */
        done(arg, BL_EFOREIGN, "not a root of this job");
        return;
    }
    int rc =
        wire_arena_slot_offset(arena->map, arena->bytes, load->slot, &message.data_offset, &msg);

    if (rc != 0) {
        done(arg, rc, msg.text);
        return;
    }
    struct pending *pending = pending_add(engine, PENDING_LOAD, message.request, run->id);

    if (!pending) {
        done(arg, BL_ELIMIT, "too many loads under way");
        return;
    }
    pending->loaded = done;
    pending->arg = arg;
    snprintf(message.root.path, sizeof(message.root.path), "%s", load->root);
    message.root.run = run->id;
    snprintf(message.root.node, sizeof(message.root.node), "%s", run->daemon->config.name);
    message.root.nodes = run->job->nodes_min;
    message.root.shared = 1;
    snprintf(message.dir, sizeof(message.dir), "%s", load->dir);
    ask(engine, pending, WIRE_TYPE_ENGINE_LOAD, &message, &arena->fd, 1);
}
