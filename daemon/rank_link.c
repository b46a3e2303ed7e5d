/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A rank's connection over the UNIX socket: reports in, directives out, and its requests for
 * memory: arenas of its own, copies of others, loads from disk.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "daemon/daemon.h"
#include "daemon/engine_client.h"

void rank_link_send(struct run *run, uint64_t incarnation)
{
    struct proc *proc = proc_find(run, incarnation);
    struct wire_rank_directive directive;

    if (!proc || !proc->rank_conn || conn_is_behind(proc->rank_conn) ||
        core_member_rank_directive(run->member, incarnation, &directive) != 0) {
        return;
    }
    BL_IGNORE(conn_send(proc->rank_conn, WIRE_TYPE_RANK_DIRECTIVE, &directive, directive.generation,
                        NULL, 0) != 0,
              "the machine repeats it");
    wire_rank_directive_close(&directive);
}

static int on_report(struct proc *proc, const struct wire_frame *frame)
{
    struct wire_rank_report report;
    int rc = wire_rank_report_decode(&report, frame->payload, frame->payload_bytes, NULL);

    if (rc != 0) {
        return rc;
    }
    if (report.incarnation == proc->incarnation && report.run == proc->run->id) {
        member_edge_arenas(proc->run);
        core_member_on_rank_report(proc->run->member, &report, daemon_now_ms());
        run_pump(proc->run);
    }
    wire_rank_report_free(&report);
    return 0;
}

static int on_arena_make(struct proc *proc, const struct wire_frame *frame)
{
    struct wire_arena_make make;
    struct wire_arena answer = {0};
    struct bl_errmsg msg = {{0}};
    struct arena *arena = NULL;
    struct run *run = proc->run;
    int rc = wire_arena_make_decode(&make, frame->payload, frame->payload_bytes, NULL);

    if (rc != 0) {
        return rc;
    }
    answer.request = make.request;
    uint64_t bytes =
        wire_arena_bytes(make.slot_count, make.state_bytes, wire_arena_table_bytes(&make.extents));

    answer.rc = bytes == 0 ? bl_err(&msg, BL_ELIMIT, "%u slots of %llu bytes are too much",
                                    make.slot_count, (unsigned long long)make.state_bytes)
                           : arena_make(run, proc->incarnation, bytes, &arena, &msg);
    if (answer.rc == 0) {
        answer.arena = arena->id;
        answer.bytes = arena->bytes;
        proc_keep(run, arena);
    } else {
        snprintf(answer.text, sizeof(answer.text), "%s", msg.text);
        event(run->daemon->events, EVENT_MEMORY_REFUSED,
              "job=%s rank=%u asked=%llu budget=%llu used=%llu", run->name, proc->rank,
              (unsigned long long)bytes, (unsigned long long)run->job->snapshot_bytes_max,
              (unsigned long long)arena_bytes_used(run));
    }
    rc = conn_send(proc->rank_conn, WIRE_TYPE_ARENA, &answer, 0, arena ? &arena->fd : NULL,
                   arena ? 1 : 0);
    wire_arena_make_free(&make);
    return rc;
}

static int on_arena_drop(struct proc *proc, const struct wire_frame *frame)
{
    struct wire_arena_drop drop;
    int rc = wire_arena_drop_decode(&drop, frame->payload, frame->payload_bytes, NULL);

    if (rc == 0) {
        struct arena *arena = arena_find(proc->run, drop.arena);

        if (arena && arena->incarnation == proc->incarnation) {
            arena_drop(proc->run, drop.arena);
        }
    }
    return rc;
}

static int on_copy_open(struct proc *proc, const struct wire_frame *frame)
{
    struct wire_copy_open open_message;
    struct wire_copy_opened answer = {0};
    int rc = wire_copy_open_decode(&open_message, frame->payload, frame->payload_bytes, NULL);

    if (rc != 0) {
        return rc;
    }
    struct arena *arena = arena_find(proc->run, open_message.arena);

    answer.request = open_message.request;
    answer.arena = open_message.arena;
    if (arena) {
        answer.bytes = arena->bytes;
    } else {
        answer.rc = -ENOENT;
        snprintf(answer.text, sizeof(answer.text), "no such arena on this node");
    }
    return conn_send(proc->rank_conn, WIRE_TYPE_COPY_OPENED, &answer, 0, arena ? &arena->fd : NULL,
                     arena ? 1 : 0);
}

struct disk_load { /* a load under way; the rank may die meanwhile */
    struct daemon *daemon;
    uint64_t run, incarnation, request;
};

static void on_disk_loaded(void *arg, int rc, const char *text)
{
    struct disk_load *load = arg;
    struct run *run = run_find(load->daemon, load->run);
    struct proc *proc = run ? proc_find(run, load->incarnation) : NULL;
    struct wire_disk_loaded answer = {.request = load->request, .rc = rc};

    snprintf(answer.text, sizeof(answer.text), "%s", text);
    if (proc && proc->rank_conn) {
        BL_IGNORE(conn_send(proc->rank_conn, WIRE_TYPE_DISK_LOADED, &answer, 0, NULL, 0) != 0,
                  "a rank that is gone needs no answer");
    }
    free(load);
}

static int on_disk_load(struct proc *proc, const struct wire_frame *frame)
{
    struct wire_disk_load load;
    struct disk_load *pending;
    int rc = wire_disk_load_decode(&load, frame->payload, frame->payload_bytes, NULL);

    if (rc != 0) {
        return rc;
    }
    struct arena *arena = arena_find(proc->run, load.arena);

    pending = calloc(1, sizeof(*pending));
    BL_ASSERT(pending != NULL);
    *pending =
        (struct disk_load){proc->run->daemon, proc->run->id, proc->incarnation, load.request};
    if (!arena || arena->incarnation != proc->incarnation) {
        on_disk_loaded(pending, -ENOENT, "no such arena of this rank");
    } else {
        engine_load(proc->run, arena, &load, on_disk_loaded, pending);
    }
    wire_disk_load_free(&load);
    return 0;
}

static void on_message(struct conn *conn, void *arg, const struct wire_frame *frame)
{
    struct proc *proc = arg;
    int rc;

    switch ((enum wire_type)frame->type) {
    case WIRE_TYPE_RANK_REPORT:
        rc = on_report(proc, frame);
        break;
    case WIRE_TYPE_ARENA_MAKE:
        rc = on_arena_make(proc, frame);
        break;
    case WIRE_TYPE_ARENA_DROP:
        rc = on_arena_drop(proc, frame);
        break;
    case WIRE_TYPE_COPY_OPEN:
        rc = on_copy_open(proc, frame);
        break;
    case WIRE_TYPE_DISK_LOAD:
        rc = on_disk_load(proc, frame);
        break;
    default:
        rc = BL_EPROTO;
        break;
    }
    if (rc != 0) {
        bl_log(BL_LOG_ERROR, "rank", "%s of rank %u: %s", wire_type_name(frame->type), proc->rank,
               bl_strerror(rc));
        conn_close(conn);
        proc->rank_conn = NULL;
    }
}

static void on_closed(struct conn *conn, void *arg, const char *text)
{
    struct proc *proc = arg;

    (void)conn;
    (void)text; /* its exit is told by its shim; a rank that lives connects again */
    proc->rank_conn = NULL;
}

static const struct conn_ops rank_ops = {on_message, on_closed};

void rank_link_take(struct daemon *daemon, struct conn *conn, const struct wire_hello *hello)
{
    struct run *run = run_find_name(daemon, hello->job);
    struct proc *proc = run ? proc_find(run, hello->incarnation) : NULL;
    struct wire_hello answer = {.version = WIRE_FRAME_VERSION, .role = WIRE_ROLE_DAEMON};

    if (!proc || proc->state == PROC_EXITED || run->adopting) {
        conn_close(conn); /* it tries again */
        return;
    }
    if (proc->rank_conn) {
        conn_close(proc->rank_conn);
    }
    proc->rank_conn = conn;
    conn_arg_set(conn, &rank_ops, proc);
    snprintf(answer.build, sizeof(answer.build), "%s", BELAY_VERSION);
    answer.run = run->id;
    snprintf(answer.node, sizeof(answer.node), "%s", daemon->config.name);
    answer.incarnation = daemon->incarnation;
    answer.head_epoch = daemon->head_epoch;
    snprintf(answer.job, sizeof(answer.job), "%s", run->name);
    answer.job_json = run->job_json;
    answer.beat_ms = (uint32_t)bl_time_scaled_ms(run->job->deadlines.beat);
    answer.lanes = run->job->lanes;
    answer.load_deadline_ms = (uint32_t)bl_time_scaled_ms(run->job->deadlines.load);
    BL_IGNORE(conn_send(conn, WIRE_TYPE_HELLO, &answer, 0, NULL, 0) != 0,
              "a broken connection is told by its closing");
    core_member_on_rank_up(run->member, proc->incarnation, daemon_now_ms());
    run_pump(run);
}
