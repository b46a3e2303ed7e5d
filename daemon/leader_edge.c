/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Carries the leader machine's effects out, on the head: directives to members, the record to the
 * store, scans and commits to the engine.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/failpoint.h"
#include "base/log.h"
#include "base/mem.h"
#include "daemon/daemon.h"
#include "daemon/engine_client.h"
#include "daemon/status.h"

struct put { /* one STORE effect on its way */
    struct daemon *daemon;
    uint64_t run, op;
};

static void on_put_done(void *arg, int rc, uint64_t version, const char *text)
{
    struct put *put = arg;
    struct run *run = run_find(put->daemon, put->run);

    if (rc != 0) {
        bl_log(BL_LOG_ERROR, "leader", "%s", text);
    }
    if (run && run->leader) {
        if (rc == 0 && core_leader_record(run->leader)->phase == WIRE_PHASE_PLANNED) {
            BL_IGNORE(BL_FAILPOINT("planned-before-go"), "it acts by itself");
        }
        run->record_version = version;
        core_leader_on_store_done(run->leader, put->op, rc, version, daemon_now_ms());
        run_pump(run);
    }
    free(put);
}

static void store_put(struct run *run, uint64_t op, uint64_t expected)
{
    struct put *put = calloc(1, sizeof(*put));
    uint8_t *bytes = NULL;
    size_t count = 0;
    char key[STORE_KEY_MAX];
    int rc;

    BL_ASSERT(put != NULL);
    put->daemon = run->daemon;
    put->run = run->id;
    put->op = op;
    snprintf(key, sizeof(key), "run/%016llx", (unsigned long long)run->id);
    rc = wire_record_encode(core_leader_record(run->leader), &bytes, &count, NULL);
    rc = rc ? rc : store_swap(run->daemon->store, key, expected, bytes, count, on_put_done, put);
    free(bytes);
    if (rc != 0) {
        free(put);
        core_leader_on_store_done(run->leader, op, rc, expected, daemon_now_ms());
    }
}

static void send_directive(struct run *run, const char *node)
{
    struct wire_directive directive;

    core_leader_directive(run->leader, node, &directive);
    if (strcmp(node, run->daemon->config.name) == 0) {
        core_member_on_directive(run->member, &directive, daemon_now_ms());
    } else {
        control_send_directive(run->daemon, node, &directive);
    }
    wire_directive_close(&directive);
}

static void leader_finished(struct run *run, enum wire_verdict verdict)
{
    run->verdict = verdict;
    leader_edge_close(run);
    event(run->daemon->events, EVENT_JOB_ENDED, "job=%s verdict=%s", run->name,
          member_edge_verdict(verdict));
    run_close(run); /* in the pump: when it is through */
}

void leader_edge_effects(struct run *run, int *ret_any)
{
    struct core_leader_effect effect;

    while (run->leader && !run->closing && core_leader_next_effect(run->leader, &effect)) {
        *ret_any = 1;
        switch (effect.kind) {
        case CORE_LEADER_NONE:
        case CORE_LEADER_RETAIN: /* the engine retains after each commit */
            break;
        case CORE_LEADER_DIRECTIVE:
            send_directive(run, effect.node);
            break;
        case CORE_LEADER_STORE:
            store_put(run, effect.op, effect.expected);
            break;
        case CORE_LEADER_SCAN:
            engine_scan(run);
            break;
        case CORE_LEADER_COMMIT:
            engine_commit(run, effect.attempt);
            break;
        case CORE_LEADER_EVENT:
            if (effect.event.code == CORE_EVENT_SAVE_COMMITTED) {
                run->disk_ms = daemon_now_ms();
            }
            event_core(run->daemon->events, run->name, run->id, &effect.event);
            break;
        case CORE_LEADER_FINISHED:
            leader_finished(run, effect.verdict);
            break;
        case CORE_LEADER_DEPOSED:
            leader_edge_close(run);
            break;
        }
    }
}

static void deadlines_fill(struct core_deadlines *ret, const struct bl_job_deadlines *job)
{
    ret->beat = bl_time_scaled_ms(job->beat);
    ret->lease = bl_time_scaled_ms(job->lease);
    ret->step_floor = bl_time_scaled_ms(job->step_floor);
    ret->step_ceil = bl_time_scaled_ms(job->step_ceil);
    ret->init_floor = bl_time_scaled_ms(job->init_floor);
    ret->load = bl_time_scaled_ms(job->load);
    ret->save = bl_time_scaled_ms(job->save);
    ret->join = bl_time_scaled_ms(job->join);
    ret->restart = bl_time_scaled_ms(job->restart);
    ret->grace = bl_time_scaled_ms(job->grace);
}

_Static_assert(BL_JOB_ROOTS_MAX == WIRE_JOB_ROOTS, "as many roots in jobs as in messages");
_Static_assert(BL_JOB_AUTO == CORE_EVERY_AUTO, "one word for what Belay chooses");

int leader_edge_open(struct run *run, const struct wire_record *record, uint64_t version,
                     int resume, struct bl_errmsg *msg)
{
    struct daemon *daemon = run->daemon;
    const struct bl_job *job = run->job;
    struct core_root roots[BL_JOB_ROOTS_MAX];
    struct core_leader_config config = {.run = run->id,
                                        .name = run->name,
                                        .node = daemon->config.name,
                                        .head_epoch = daemon->head_epoch,
                                        .incarnation = daemon->incarnation,
                                        .seed = bl_random_u64(),
                                        .secret = bl_random_u64(),
                                        .ranks = job->ranks,
                                        .lanes = job->lanes,
                                        .nodes_min = job->nodes_min,
                                        .tp = job->tp,
                                        .pp = job->pp,
                                        .pp_min = job->pp_min,
                                        .steps = job->train.steps,
                                        .root_count = job->root_count,
                                        .roots = roots,
                                        .job_json = run->job_json,
                                        .record = record,
                                        .record_version = version,
                                        .resume = (uint32_t)resume};
    static char names[DAEMON_PEERS_MAX + 1][WIRE_NODE_MAX];

    for (uint32_t i = 0; i < job->root_count; i++) {
        roots[i] = (struct core_root){.path = job->roots[i].path,
                                      .every = job->roots[i].every,
                                      .apart = !job->roots[i].shared};
    }
    deadlines_fill(&config.deadlines, &job->deadlines);
    run->leader = core_leader_new(&config, daemon_now_ms());
    if (!run->leader) {
        return bl_err_code(msg, -ENOMEM, "leader");
    }
    run->record_version = version;
    engine_roots_tell(run);
    uint32_t count = control_nodes(daemon, names, DAEMON_PEERS_MAX + 1);

    for (uint32_t i = 0; i < count; i++) {
        core_leader_on_node_up(run->leader, names[i], daemon_now_ms());
    }
    return 0;
}

void leader_edge_close(struct run *run)
{
    if (run->leader) {
        status_keep(run);
        core_leader_free(run->leader);
        run->leader = NULL;
    }
}
