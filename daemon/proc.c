/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Processes of ranks, through their shims.
 *
 *      proc_start -> uv_spawn belay-shim -> connect (retried) -> Hello, Attach -> State: live
 *                                                                         | Exit: exited
 *      proc_adopt -----------------------^
 *
 * A shim that is gone takes its rank along (PDEATHSIG); see proc_attach.c for how that is made sure
 * of before anybody is told.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "daemon/proc.h"
#include "wire/belay.h"

/* A dying rank's memory goes before its status can be had, 60 to 90 ms per GiB. So long is waited
 * for the status; then the leader is told without it. */
#define PROC_SUSPECT_MS 20

void proc_path(const struct proc *proc, const char *suffix, char *ret, size_t bytes)
{
    snprintf(ret, bytes, "%s/%u.%016llx.%s", proc->run->dir, proc->rank,
             (unsigned long long)proc->incarnation, suffix);
}

struct proc *proc_find(struct run *run, uint64_t incarnation)
{
    for (uint32_t i = 0; i < run->proc_count; i++) {
        if (run->procs[i]->incarnation == incarnation) {
            return run->procs[i];
        }
    }
    return NULL;
}

static void on_freed(uv_handle_t *handle)
{
    free(handle);
}

struct proc *proc_new(struct run *run, uint64_t incarnation, uint32_t rank)
{
    struct proc *proc = calloc(1, sizeof(*proc));

    BL_ASSERT(proc != NULL && run->proc_count < DAEMON_PROCS_MAX);
    proc->run = run;
    proc->incarnation = incarnation;
    proc->rank = rank;
    proc->page_fd = proc->pidfd = -1;
    proc->timer = calloc(1, sizeof(*proc->timer));
    BL_ASSERT(proc->timer != NULL);
    uv_timer_init(run->daemon->loop, proc->timer);
    proc->timer->data = proc;
    run->procs[run->proc_count++] = proc;
    return proc;
}

void proc_free(struct proc *proc)
{
    struct run *run = proc->run;

    for (uint32_t i = 0; i < run->proc_count; i++) {
        if (run->procs[i] == proc) {
            run->procs[i] = run->procs[--run->proc_count];
        }
    }
    uv_close((uv_handle_t *)proc->timer, on_freed);
    if (proc->process) { /* reaped by libuv when it ends; nobody is told any more */
        proc->process->data = NULL;
    }
    conn_close(proc->shim_conn);
    conn_close(proc->rank_conn);
    if (proc->page) {
        bl_mem_free(proc->page, WIRE_PAGE_BYTES);
    }
    if (proc->page_fd >= 0) {
        close(proc->page_fd);
    }
    proc_watch_end(proc);
    free(proc);
}

/* ---- exits ---- */

void proc_exited(struct proc *proc, const struct wire_exit *status, const char *text)
{
    struct run *run = proc->run;
    char hex[17];

    if (proc->state == PROC_EXITED) {
        return;
    }
    uv_timer_stop(proc->timer);
    if (proc->state == PROC_STARTING && proc->adopted) {
        core_member_on_proc_adopted(run->member, proc->incarnation, proc->rank, 0, daemon_now_ms());
    }
    member_edge_beat(run); /* where it died is half of what tells one crash from another */
    proc->state = PROC_EXITED;
    proc->exit = *status;
    daemon_hex(proc->incarnation, hex);
    event(run->daemon->events, EVENT_PROC_EXITED,
          "job=%s rank=%u pid=%u incarnation=%s code=%d signal=%d core=%u by_us=%u", run->name,
          proc->rank, proc->pid, hex, status->code, status->signal, status->core, status->by_us);
    core_member_on_proc_exit(run->member, proc->incarnation, status, text, daemon_now_ms());
    if (run->adopting) {
        adopt_settled(run);
    }
    run_pump(run);
}

void proc_start_failed(struct proc *proc, const char *reason)
{
    struct wire_exit status = {.code = 3};

    /* What is longer is cut on purpose. */
    snprintf(proc->run->start_text, sizeof(proc->run->start_text), "%.*s",
             (int)sizeof(proc->run->start_text) - 1, reason);
    event(proc->run->daemon->events, EVENT_PROC_START_FAILED, "job=%s rank=%u reason=%s",
          proc->run->name, proc->rank, reason);
    proc_exited(proc, &status, reason);
}

static int json_int(json_t *json, const char *key, int otherwise)
{
    json_t *value = json_object_get(json, key);

    return json_is_integer(value) ? (int)json_integer_value(value) : otherwise;
}

/* The exit record, where the shim got to write one; else "killed, nobody knows by what". */
void proc_exit_record_read(const struct proc *proc, struct wire_exit *ret)
{
    char path[1200];

    proc_path(proc, "exit", path, sizeof(path));
    json_t *json = json_load_file(path, 0, NULL);

    *ret = (struct wire_exit){.code = json_int(json, "code", -1),
                              .signal = json_int(json, "signal", json ? 0 : SIGKILL),
                              .core = (uint32_t)json_int(json, "core", 0),
                              .by_us = (uint32_t)json_int(json, "by_us", 0)};
    json_decref(json);
}

/* ---- the shim's connection ---- */

/* It is dying and its memory takes long to go. What killed it the shim knows from /proc, where the
 * kernel says; a signal from outside is the usual reason. */
static void on_suspect_timer(uv_timer_t *timer)
{
    struct proc *proc = timer->data;
    struct wire_exit status = proc->exit;

    int is_leaving = proc->page && atomic_load(&proc->page->section) == BELAY_SECTION_LEAVE;

    if (status.code == 0 && status.signal == 0 && !is_leaving) {
        status = (struct wire_exit){.code = -1, .signal = SIGKILL};
    }
    if (proc->state == PROC_LIVE) {
        proc_exited(proc, &status, "dying; its memory is still being given back");
    }
}

static void proc_suspected(struct proc *proc)
{
    char hex[17];

    if (proc->suspected || proc->state == PROC_EXITED) {
        return;
    }
    proc->suspected = 1;
    daemon_hex(proc->incarnation, hex);
    event(proc->run->daemon->events, EVENT_PROC_SUSPECTED, "job=%s rank=%u pid=%u incarnation=%s",
          proc->run->name, proc->rank, proc->pid, hex);
    uv_timer_start(proc->timer, on_suspect_timer, PROC_SUSPECT_MS, 0);
}

static void proc_keep_send(struct proc *proc, struct arena *arena)
{
    struct wire_shim_keep keep = {.arena = arena->id};

    if (proc->shim_conn &&
        conn_send(proc->shim_conn, WIRE_TYPE_SHIM_KEEP, &keep, 0, &arena->fd, 1) == 0) {
        arena->is_kept = 1;
    }
}

void proc_keep(struct run *run, struct arena *arena)
{
    struct proc *proc = proc_find(run, arena->incarnation);

    if (proc) {
        proc_keep_send(proc, arena);
    }
}

void proc_drop(struct run *run, uint64_t incarnation, uint64_t arena)
{
    struct proc *proc = proc_find(run, incarnation);
    struct wire_shim_keep keep = {.arena = arena, .drop = 1};

    if (proc && proc->shim_conn) {
        BL_IGNORE(conn_send(proc->shim_conn, WIRE_TYPE_SHIM_KEEP, &keep, 0, NULL, 0) != 0,
                  "the shim is gone and with it the duplicate");
    }
}

void proc_kill_send(struct proc *proc)
{
    struct wire_shim_stacks stacks = {.request = 1};
    struct wire_shim_kill kill_message = {.signal = SIGKILL, .tree = 1};

    if (!proc->shim_conn || !proc->kill_wanted) {
        return;
    }
    if (proc->stacks_wanted) {
        BL_IGNORE(conn_send(proc->shim_conn, WIRE_TYPE_SHIM_STACKS, &stacks, 0, NULL, 0) != 0,
                  "then it is killed without");
    }
    BL_IGNORE(conn_send(proc->shim_conn, WIRE_TYPE_SHIM_KILL, &kill_message, 0, NULL, 0) != 0,
              "a shim that is gone has taken its rank along");
}

/* Page and arenas come as descriptors, in the order of their index. Only the first state of a
 * connection is looked at: later ones repeat them. */
static void state_take_fds(struct proc *proc, const struct wire_shim_state *state, int first)
{
    struct run *run = proc->run;
    struct bl_errmsg msg = {{0}};

    for (uint32_t i = 0; i <= state->arena_count; i++) {
        int fd = conn_take_fd(proc->shim_conn);

        if (fd < 0) {
            return;
        }
        if (!first || (i == state->page_fd_index && proc->page)) {
            close(fd);
        } else if (i == state->page_fd_index) {
            proc->page_fd = fd;
            proc->page = bl_mem_map(fd, WIRE_PAGE_BYTES, 1);
        } else {
            for (uint32_t k = 0; k < state->arena_count; k++) {
                if (state->arenas[k].fd_index == i &&
                    arena_adopt(run, proc->incarnation, state->arenas[k].arena, fd, &msg) != 0) {
                    bl_log(BL_LOG_WARN, "proc", "an arena of rank %u: %s", proc->rank, msg.text);
                }
            }
        }
    }
}

static void proc_attached(struct proc *proc, const struct wire_shim_state *state)
{
    struct run *run = proc->run;
    char hex[17];

    uv_timer_stop(proc->timer);
    daemon_hex(proc->incarnation, hex);
    proc->pid = state->pid;
    proc->shim_pid = state->shim_pid;
    proc->state = PROC_LIVE;
    if (!state->exited) {
        proc_watch_open(proc);
    }
    if (proc->adopted) {
        event(run->daemon->events, EVENT_PROC_ADOPTED,
              "job=%s rank=%u pid=%u incarnation=%s exited=%u", run->name, proc->rank, proc->pid,
              hex, state->exited);
        core_member_on_proc_adopted(run->member, proc->incarnation, proc->rank, proc->pid,
                                    daemon_now_ms());
    } else {
        run->start_text[0] = '\0';
        event(run->daemon->events, EVENT_PROC_STARTED, "job=%s rank=%u pid=%u incarnation=%s",
              run->name, proc->rank, proc->pid, hex);
        core_member_on_proc_started(run->member, proc->incarnation, proc->pid, daemon_now_ms());
    }
    for (uint32_t i = 0; i < run->arena_count; i++) {
        if (run->arenas[i].incarnation == proc->incarnation && !run->arenas[i].is_kept) {
            proc_keep_send(proc, &run->arenas[i]);
        }
    }
    proc_kill_send(proc);
}

/* The connection broke and the shim was there still: what was under way is said again. */
static void proc_attached_again(struct proc *proc)
{
    struct run *run = proc->run;

    proc->reattaching = 0;
    uv_timer_stop(proc->timer);
    for (uint32_t i = 0; i < run->arena_count; i++) {
        if (run->arenas[i].incarnation == proc->incarnation) {
            proc_keep_send(proc, &run->arenas[i]);
        }
    }
    proc_kill_send(proc);
}

static void on_state(struct proc *proc, const struct wire_shim_state *state)
{
    struct run *run = proc->run;
    int first = proc->state == PROC_STARTING;

    state_take_fds(proc, state, first);
    if (state->rc != 0) {
        proc_start_failed(proc, state->text);
        return;
    }
    if (first) {
        proc_attached(proc, state);
    } else if (proc->reattaching) {
        proc_attached_again(proc);
    }
    if (state->suspected && !state->exited) {
        proc->exit = state->exit;
        proc_suspected(proc);
    }
    if (state->exited) { /* the proc may be released and freed in there */
        proc_exited(proc, &state->exit, "");
        return;
    }
    if (first && run->adopting) {
        adopt_settled(run);
    }
    run_pump(run);
}

static void on_stacked(struct proc *proc, const struct wire_shim_stacked *stacked)
{
    char path[1200], hex[17];

    proc_path(proc, "stacks", path, sizeof(path));
    daemon_hex(proc->incarnation, hex);
    event(proc->run->daemon->events, EVENT_STACKS_SAVED,
          "job=%s rank=%u incarnation=%s path=%s note=%s", proc->run->name, proc->rank, hex, path,
          stacked->text);
}

static void on_shim_message(struct conn *conn, void *arg, const struct wire_frame *frame)
{
    struct proc *proc = arg;
    int rc = 0;

    if (frame->type == WIRE_TYPE_SHIM_STATE) {
        struct wire_shim_state state;

        rc = wire_shim_state_decode(&state, frame->payload, frame->payload_bytes, NULL);
        if (rc == 0) {
            on_state(proc, &state);
        }
    } else if (frame->type == WIRE_TYPE_SHIM_EXIT) {
        struct wire_shim_exit ex;

        rc = wire_shim_exit_decode(&ex, frame->payload, frame->payload_bytes, NULL);
        if (rc == 0) {
            proc_exited(proc, &ex.exit, "");
        }
    } else if (frame->type == WIRE_TYPE_SHIM_STACKED) {
        struct wire_shim_stacked stacked;

        rc = wire_shim_stacked_decode(&stacked, frame->payload, frame->payload_bytes, NULL);
        if (rc == 0) {
            on_stacked(proc, &stacked);
            wire_shim_stacked_free(&stacked);
        }
    }
    if (rc != 0) {
        bl_log(BL_LOG_ERROR, "proc", "a message of a shim (%s): %s", wire_type_name(frame->type),
               bl_strerror(rc));
        conn_close(conn);
        proc_shim_closed(conn, proc, "it spoke nonsense");
    }
}

const struct conn_ops proc_shim_ops = {on_shim_message, proc_shim_closed};

void proc_on_shim_exit(uv_process_t *process, int64_t status, int signal_number)
{
    struct proc *proc = process->data;

    if (proc) {
        proc->process = NULL;
        if (proc->state == PROC_STARTING && !proc->shim_conn && !proc->adopted) {
            char text[128];

            uv_timer_stop(proc->timer);
            snprintf(text, sizeof(text), "its shim ended with code %d, signal %d", (int)status,
                     signal_number);
            proc_start_failed(proc, text);
        }
    }
    uv_close((uv_handle_t *)process, on_freed);
}

void proc_adopt(struct run *run, uint64_t incarnation, uint32_t rank)
{
    struct proc *proc = proc_new(run, incarnation, rank);

    proc->adopted = 1;
    proc_attach_begin(proc);
}

void proc_kill(struct run *run, uint64_t incarnation, int stacks)
{
    struct proc *proc = proc_find(run, incarnation);

    if (proc && proc->state != PROC_EXITED) {
        proc->kill_wanted = 1;
        proc->stacks_wanted = stacks;
        proc_kill_send(proc);
    }
}

static void release_send(struct proc *proc)
{
    struct wire_shim_release release = {.kill = proc->state != PROC_EXITED};
    char path[1200];

    if (proc->shim_conn) {
        BL_IGNORE(conn_send(proc->shim_conn, WIRE_TYPE_SHIM_RELEASE, &release, 0, NULL, 0) != 0,
                  "it leaves by itself when its socket is gone");
    }
    proc_path(proc, "sock", path, sizeof(path));
    unlink(path);
    proc_free(proc);
}

/* The shim stays as long as it keeps memory that may still be wanted by a daemon to come. */
void proc_release(struct run *run, uint64_t incarnation)
{
    struct proc *proc = proc_find(run, incarnation);

    if (!proc || proc->state != PROC_EXITED) {
        return;
    }
    proc->released = 1;
    if (arena_count_of(run, incarnation) == 0) {
        release_send(proc);
    }
}

void proc_release_all(struct run *run)
{
    while (run->proc_count > 0) {
        release_send(run->procs[0]);
    }
}

void proc_detach_all(struct run *run)
{
    while (run->proc_count > 0) {
        proc_free(run->procs[0]);
    }
}
