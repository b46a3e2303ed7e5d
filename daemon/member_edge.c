/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Carries the member machine's effects out on this node, and tells it what pages and arenas say.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"
#include "daemon/daemon.h"
#include "daemon/engine_client.h"

void member_edge_arenas(struct run *run)
{
    static struct wire_arena_info infos[DAEMON_ARENAS_MAX]; /* the loop thread's only */
    uint32_t count = 0;

    for (uint32_t i = 0; i < run->arena_count; i++) {
        count += (uint32_t)arena_read(&run->arenas[i], &infos[count]);
    }
    core_member_on_arenas(run->member, infos, count, daemon_now_ms());
}

static uint64_t age_ms(uint64_t now_ns, uint64_t then_ns)
{
    return then_ns == 0 || then_ns > now_ns ? 0 : (now_ns - then_ns) / 1000000;
}

static void page_read(const struct wire_page *page, struct wire_beat *beat)
{
    uint64_t now = bl_now_ns();

    beat->section = atomic_load(&page->section);
    beat->waiting = atomic_load(&page->waiting);
    beat->step = atomic_load(&page->step);
    beat->collective = atomic_load(&page->collective);
    beat->progress_age_ms = age_ms(now, atomic_load(&page->progress_ns));
    beat->alive_age_ms = age_ms(now, atomic_load(&page->alive_ns));
}

void member_edge_beat(struct run *run)
{
    struct wire_beat beat;

    for (uint32_t i = 0; i < run->proc_count; i++) {
        if (run->procs[i]->page && run->procs[i]->state == PROC_LIVE) {
            page_read(run->procs[i]->page, &beat);
            core_member_on_beat(run->member, run->procs[i]->incarnation, &beat);
        }
    }
    member_edge_arenas(run);
}

static void epoch_remember(struct daemon *daemon, uint64_t epoch)
{
    char path[1100], text[32];
    struct bl_errmsg msg = {{0}};

    if (epoch <= daemon->head_epoch) {
        return;
    }
    daemon->head_epoch = epoch;
    snprintf(path, sizeof(path), "%s/epoch", daemon->config.state_dir);
    int n = snprintf(text, sizeof(text), "%llu\n", (unsigned long long)epoch);

    if (bl_file_write_atomic(path, text, (size_t)n, &msg) != 0) {
        bl_log(BL_LOG_ERROR, "member", "%s", msg.text);
    }
}

static void send_report(struct run *run)
{
    struct wire_report report;
    uint64_t now = daemon_now_ms();

    core_member_report(run->member, &report, now);
    if (run->leader) {
        core_leader_on_report(run->leader, &report, now);
    } else {
        control_send_report(run->daemon, &report);
    }
    wire_report_close(&report);
}

static void drop_arena(struct run *run, uint64_t id)
{
    struct arena *arena = arena_find(run, id);
    uint64_t incarnation = arena ? arena->incarnation : 0;

    arena_drop(run, id);
    struct proc *proc = proc_find(run, incarnation);

    if (proc && proc->released) {
        proc_release(run, incarnation);
    }
}

const char *member_edge_verdict(enum wire_verdict verdict)
{
    static const char *const names[] = {"none",        "finished",    "stopped",
                                        "save-failed", "no-progress", "refused"};

    return names[verdict];
}

/* On the head its leader has the last word: it waits for the other nodes too. */
static void member_done(struct run *run, enum wire_verdict verdict)
{
    if (!run->leader) {
        event(run->daemon->events, EVENT_JOB_ENDED, "job=%s verdict=%s", run->name,
              member_edge_verdict(verdict));
        run->verdict = verdict;
        run_close(run);
    }
}

void member_edge_effects(struct run *run, int *ret_any)
{
    struct core_member_effect effect;

    while (!run->closing && core_member_next_effect(run->member, &effect)) {
        *ret_any = 1;
        switch (effect.kind) {
        case CORE_MEMBER_NONE:
            break;
        case CORE_MEMBER_START:
            proc_start(run, effect.incarnation, effect.rank);
            break;
        case CORE_MEMBER_KILL:
            proc_kill(run, effect.incarnation, (int)effect.stacks);
            break;
        case CORE_MEMBER_RELEASE:
            proc_release(run, effect.incarnation);
            break;
        case CORE_MEMBER_DROP_ARENA:
            drop_arena(run, effect.arena);
            break;
        case CORE_MEMBER_SEND_RANK:
            rank_link_send(run, effect.incarnation);
            break;
        case CORE_MEMBER_SEND_REPORT:
            send_report(run);
            break;
        case CORE_MEMBER_ENGINE_WRITE:
            engine_write(run, effect.attempt);
            break;
        case CORE_MEMBER_ENGINE_CANCEL:
            engine_cancel(run, effect.attempt);
            break;
        case CORE_MEMBER_ENGINE_DONE:
            break; /* its descriptors were closed when the part was written */
        case CORE_MEMBER_ENGINE_PREPARE:
            engine_stage(run, effect.attempt, WIRE_ENGINE_PREPARE);
            break;
        case CORE_MEMBER_ENGINE_PUBLISH:
            engine_stage(run, effect.attempt, WIRE_ENGINE_PUBLISH);
            break;
        case CORE_MEMBER_ENGINE_RETAIN:
            engine_stage(run, effect.attempt, WIRE_ENGINE_RETAIN);
            break;
        case CORE_MEMBER_SCAN:
            engine_scan_own(run, effect.scan);
            break;
        case CORE_MEMBER_EPOCH:
            epoch_remember(run->daemon, effect.head_epoch);
            break;
        case CORE_MEMBER_DONE:
            member_done(run, effect.verdict);
            break;
        }
    }
}
