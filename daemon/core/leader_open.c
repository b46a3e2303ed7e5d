/* SPDX-License-Identifier: Apache-2.0 */
/*
 * OPEN: the former generation is being ended. Kill what is hung, replace what is dead, wait until
 * everybody else is parked; then prove that the former generation is over (fence), find the newest
 * consistent step, and plan.
 *
 *      who                                   waited for         then
 *      live, not parked                      grace              killed, with stacks
 *      started, not joined                   init_floor         killed, another is started
 *      node away                             restart            lost: planned without it
 *      fewer than wanted, no room (start)    join               smaller world
 *      killed, does not die                  grace              its node takes no more ranks
 */
#include "daemon/core/leader_state.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OPEN_HOUR_MS (3600u * 1000u)
/* What failed twice before it ran may fail for ever: from then on a pause goes before each plan, so
 * that a person can read along and the disk is not filled with events. It doubles up to a length
 * that is still short beside a repair. */
#define OPEN_PAUSE_AFTER    2
#define OPEN_PAUSE_MS       100u
#define OPEN_PAUSE_MS_MAX   5000u
#define OPEN_STATE_RETRY_MS 5000u /* the roots are looked at again */

void leader_wait_set(struct core_leader *l, enum core_wait wait, const char *fmt, ...)
{
    int is_news = l->wait != (uint32_t)wait;
    va_list args;

    va_start(args, fmt);
    vsnprintf(l->wait_text, sizeof(l->wait_text), fmt, args);
    va_end(args);
    l->wait = (uint32_t)wait;
    if (is_news && (wait == CORE_WAIT_NODES || wait == CORE_WAIT_STATE)) {
        struct core_event *e = leader_event(l, CORE_EVENT_WAITING);
        snprintf(e->text, sizeof(e->text), "%s", l->wait_text);
    } else if (is_news && wait == CORE_WAIT_FENCE) {
        struct core_event *e = leader_event(l, CORE_EVENT_FENCE_WAIT);
        snprintf(e->text, sizeof(e->text), "%s", l->wait_text);
    }
}

void leader_cause(struct core_leader *l, uint64_t detect_ms, const char *fmt, ...)
{
    va_list args;
    if (l->cause_pending) {
        return; /* the first cause counts */
    }
    va_start(args, fmt);
    vsnprintf(l->cause, sizeof(l->cause), fmt, args);
    va_end(args);
    l->cause_pending = 1;
    l->cause_is_victims = 0;
    l->death[0] = 0;
    l->cause_ms = l->now_ms;
    l->cause_detect_ms = detect_ms;
}

void leader_cause_death(struct core_leader *l, const struct leader_proc *p)
{
    const struct wire_exit *x = &p->status;
    const char *name = x->signal ? sigabbrev_np(x->signal) : NULL;
    char text[WIRE_TEXT_MAX];

    snprintf(text, sizeof(text), "rank %u on %s %s%s", p->rank, l->nodes[p->node].name,
             name        ? "killed by SIG"
             : x->signal ? "killed by a signal"
                         : "ended",
             name ? name : "");
    if (x->signal == 0 && x->code >= 0) {
        size_t have = strlen(text);
        snprintf(text + have, sizeof(text) - have, " with exit code %d", x->code);
    }
    int is_behind_it = l->cause_is_victims != 0;

    if (l->record.phase != WIRE_PHASE_OPEN) {
        leader_cause(l, 0, "%s", text);
    }
    if (is_behind_it) {
        l->cause_is_victims = 0;
        memcpy(l->death, text, sizeof(l->death));
        memcpy(l->cause, text, sizeof(l->cause));
        if (l->record.phase == WIRE_PHASE_OPEN && l->record.generation == l->opened_generation) {
            memcpy(l->times.cause, text, sizeof(l->times.cause));
        }
    }
}

/* More recoveries in the last hour than a person wanted to see? */
static void open_brake(struct core_leader *l)
{
    const uint32_t ring = sizeof(l->recover_ms) / sizeof(l->recover_ms[0]);
    uint32_t recent = 0;

    l->recover_ms[l->recover_count++ % ring] = l->now_ms;
    for (uint32_t i = 0; i < ring && i < l->recover_count; i++) {
        recent += l->now_ms - l->recover_ms[i] < OPEN_HOUR_MS;
    }
    uint32_t limit = l->config.recoveries_per_hour;
    if (limit && recent > (limit < ring ? limit : ring - 1) && !l->hold) {
        l->hold = 1;
        leader_event(l, CORE_EVENT_HOLD)->count = recent;
    }
}

void leader_open_send(struct core_leader *l)
{
    if (!l->cause_pending || !leader_change_is_free(l)) {
        return;
    }
    struct wire_record *next = leader_change_begin(l, LEADER_OPEN);
    uint64_t newest = next->generation;
    for (uint32_t i = 0; i < l->checkpoint_count; i++) {
        newest = l->checkpoints[i].generation > newest ? l->checkpoints[i].generation : newest;
    }
    if (next->phase == WIRE_PHASE_PLANNED || next->phase == WIRE_PHASE_DONE) {
        /* Its go never came, or all have left: nobody needs proof that it is over. */
        wire_plan_close(&next->plan);
    }
    if (!next->job_json) {
        next->job_json = strdup(l->job_json);
        BL_ASSERT(next->job_json);
    }
    next->generation = newest + 1;
    next->phase = WIRE_PHASE_OPEN;
    next->verdict = WIRE_VERDICT_NONE;
    snprintf(next->cause, sizeof(next->cause), "%s", l->cause);
    l->cause_pending = 0;
    leader_change_send(l);
}

/* ---- what OPEN does to processes and nodes ---- */

static void open_deaths(struct core_leader *l)
{
    for (uint32_t i = 0; i < l->proc_count; i++) {
        struct leader_proc *p = &l->procs[i];
        if (p->life == LEADER_DEAD && !p->counted) {
            p->counted = 1;
            leader_event_proc(l, CORE_EVENT_RANK_EXITED, p, p->report.failed_text);
            if (p->seat_generation == l->record.plan.generation && !p->kill) {
                leader_cause_death(l, p);
            }
            leader_death_judge(l, p);
        }
    }
}

static void open_lost(struct core_leader *l)
{
    for (uint32_t i = 0; i < l->node_count; i++) {
        struct leader_node *node = &l->nodes[i];
        if (!node->connected && !node->lost &&
            l->now_ms - node->away_ms >= l->config.deadlines.restart) {
            node->lost = 1;
            struct core_event *e = leader_event(l, CORE_EVENT_NODE_LOST);
            memcpy(e->node, node->name, sizeof(e->node));
            e->value_ms = l->now_ms - node->away_ms;
        }
    }
}

static int proc_has_joined(const struct leader_proc *p)
{
    return p->report.sequence > 0 && p->report.state != WIRE_RANK_STARTING;
}

/* How long this process could have parked or joined, and has not. */
static uint64_t proc_late(const struct core_leader *l, const struct leader_proc *p, uint64_t since)
{
    const struct leader_node *node = &l->nodes[p->node];
    since = since > l->phase_ms ? since : l->phase_ms;
    since = since > node->connected_ms ? since : node->connected_ms;
    return l->now_ms - since;
}

static void open_late(struct core_leader *l)
{
    const struct core_deadlines *d = &l->config.deadlines;
    for (uint32_t i = 0; i < l->proc_count; i++) {
        struct leader_proc *p = &l->procs[i];
        if (p->life == LEADER_DEAD || !l->nodes[p->node].connected || leader_proc_is_parked(l, p)) {
            continue;
        }
        if (p->kill) {
            if (p->life == LEADER_LIVE && l->now_ms - p->kill_ms >= d->grace) {
                /* It cannot die (device wait): no more of them there for a while. */
                l->nodes[p->node].fill_ms = l->now_ms + d->join;
            }
        } else if (proc_has_joined(p)) {
            if (proc_late(l, p, p->joined_ms) >= d->grace) {
                leader_event_proc(l, CORE_EVENT_RANK_HUNG, p, "it does not park");
                leader_proc_kill(l, p, 1);
            }
        } else if (l->now_ms - p->ordered_ms >= d->init_floor &&
                   proc_late(l, p, p->ordered_ms) >= d->grace) {
            leader_event_proc(l, CORE_EVENT_RANK_HUNG, p, "it does not join");
            leader_proc_kill(l, p, 1);
        }
    }
}

/* ---- waiting ---- */

struct open_view {
    uint32_t parked, unparked, joining, dying, away;
    char name[WIRE_NODE_MAX]; /* of a node that is away */
};

static void open_look(const struct core_leader *l, struct open_view *v)
{
    memset(v, 0, sizeof(*v));
    for (uint32_t i = 0; i < l->proc_count; i++) {
        const struct leader_proc *p = &l->procs[i];
        const struct leader_node *node = &l->nodes[p->node];
        if (p->life == LEADER_DEAD || node->lost || p->refused) {
            continue;
        }
        if (!node->connected) {
            v->away++;
            memcpy(v->name, node->name, sizeof(v->name));
        } else if (p->kill) {
            v->dying +=
                p->life == LEADER_LIVE && l->now_ms - p->kill_ms < l->config.deadlines.grace;
        } else if (leader_proc_is_parked(l, p)) {
            v->parked++;
        } else if (proc_has_joined(p)) {
            v->unparked++;
        } else {
            v->joining++;
        }
    }
}

/* Is one of the former generation's processes known to be dead or to have left? (rule 7) */
static int open_is_fenced(const struct core_leader *l)
{
    const struct wire_plan *plan = &l->record.plan;
    if (plan->world == 0 || l->abandon || !leader_has_rule(l, WIRE_RULE_FENCE)) {
        return 1;
    }
    for (uint32_t i = 0; i < plan->world; i++) {
        const struct leader_proc *p = leader_proc_find(l, plan->members[i].incarnation);
        if (p && (p->life == LEADER_DEAD || p->report.generation > plan->generation)) {
            return 1;
        }
    }
    return 0;
}

/* Too few parked ranks for the smallest layout? Then there is nothing to plan. */
static int open_is_too_small(struct core_leader *l)
{
    struct leader_layout_job job = leader_job_layout(l);
    uint32_t have = 0;

    for (uint32_t i = 0; i < l->proc_count; i++) {
        have += (uint32_t)leader_plan_takes(l, &l->procs[i]);
    }
    if (leader_layout_shape(&job, have).dp > 0) {
        return 0;
    }
    leader_wait_set(l, CORE_WAIT_NODES,
                    "room for %u more ranks: %u are here, one replica takes %u at least (tp %u x "
                    "pp %u)",
                    leader_layout_least(&job) - have, have, leader_layout_least(&job), job.tp,
                    job.pp_min);
    return 1;
}

static int open_must_wait(struct core_leader *l, const struct open_view *v, uint32_t short_of)
{
    if (v->unparked || v->dying) {
        leader_wait_set(l, CORE_WAIT_PARK, "%u ranks to park, %u to die", v->unparked, v->dying);
    } else if (v->joining) {
        leader_wait_set(l, CORE_WAIT_JOIN, "%u started ranks to join", v->joining);
    } else if (v->away) {
        leader_wait_set(l, CORE_WAIT_NODES, "node %s, which is away", v->name);
    } else if (v->parked == 0) {
        leader_wait_set(l, CORE_WAIT_NODES, "a node with room for a rank");
    } else if (short_of && l->record.state_elems == 0 &&
               l->now_ms - l->phase_ms < l->config.deadlines.join) {
        leader_wait_set(l, CORE_WAIT_NODES, "room for %u more ranks", short_of);
    } else if (open_is_too_small(l)) {
        return 1;
    } else if (!open_is_fenced(l)) {
        leader_wait_set(l, CORE_WAIT_FENCE, "contact with a rank of generation %llu",
                        (unsigned long long)l->record.plan.generation);
    } else {
        return 0;
    }
    return 1;
}

static int open_pauses(struct core_leader *l)
{
    uint32_t doublings = l->failed_plans - OPEN_PAUSE_AFTER;
    uint64_t pause = OPEN_PAUSE_MS << (doublings < 6 ? doublings : 6);

    pause = pause < OPEN_PAUSE_MS_MAX ? pause : OPEN_PAUSE_MS_MAX;
    if (l->failed_plans < OPEN_PAUSE_AFTER || l->now_ms - l->phase_ms >= pause) {
        return 0;
    }
    leader_wait_set(l, CORE_WAIT_RETRY,
                    "a pause of %llu ms: %u generations in a row failed before they ran (%.120s)",
                    (unsigned long long)pause, l->failed_plans, l->record.cause);
    return 1;
}

/* Was there a checkpoint, and is now nothing at all? A root that is not mounted looks so. To begin
 * anew would end the line of what it holds: never by itself. */
static int open_lacks_state(struct core_leader *l, const struct leader_pick *pick)
{
    if (pick->found || l->record.committed_step == UINT64_MAX) {
        return 0;
    }
    leader_wait_set(l, CORE_WAIT_STATE,
                    "a checkpoint: that of step %llu was committed and no root has any; mount or "
                    "mend the roots (another name begins anew)",
                    (unsigned long long)l->record.committed_step);
    if (!l->scan_wanted && !l->scan_pending) {
        l->scan_wanted = 1;
        l->scan_retry_ms = l->now_ms + OPEN_STATE_RETRY_MS;
    }
    /* Nothing else is left: what could not be loaded is tried again, ever more rarely. */
    if (l->now_ms - l->phase_ms >= (uint64_t)OPEN_STATE_RETRY_MS
                                       << (l->failed_plans < 6 ? l->failed_plans : 6)) {
        l->bad_dir_count = 0;
        leader_stir(l);
    }
    return 1;
}

/* Chooses the step and sends the plan. */
static void open_plan(struct core_leader *l, uint64_t function_id)
{
    struct leader_pick pick;
    leader_pick_newest(l, &pick);
    uint64_t committed = l->record.committed_step;
    int is_behind = committed != UINT64_MAX && pick.step < committed;

    if ((!pick.found || !pick.from_memory || is_behind) && !l->scan_done) {
        leader_wait_set(l, CORE_WAIT_SCAN, "the scan of the roots");
        l->scan_wanted = !l->scan_pending;
        leader_pick_close(&pick);
        return;
    }
    int lacks = l->scan_done && !pick.from_memory ? leader_scan_lacks(l, &pick) : -1;
    if (lacks >= 0) {
        leader_scan_wait(l, (uint32_t)lacks);
        leader_pick_close(&pick);
        return;
    }
    if (leader_saves_committing(l) > pick.step) {
        leader_wait_set(l, CORE_WAIT_SAVE, "the commit of a newer step");
        leader_pick_close(&pick);
        return;
    }
    for (uint32_t i = 0; !pick.found && !l->record.state_elems && i < l->checkpoint_count; i++) {
        const struct core_checkpoint *c = &l->checkpoints[i];
        if (c->complete && c->function_id && c->function_id != function_id) {
            leader_end_send(l, WIRE_VERDICT_REFUSED,
                            "the roots hold checkpoints of another function (model, data or "
                            "training options differ)");
            leader_pick_close(&pick);
            return;
        }
    }
    if (!open_lacks_state(l, &pick)) {
        leader_plan_send(l, &pick, !pick.found);
    }
    leader_pick_close(&pick);
}

/* Neither here nor awaited. */
static int open_nobody_comes(const struct open_view *v)
{
    return v->parked + v->unparked + v->joining + v->dying + v->away == 0;
}

/* A stop was asked for: 1 when no further generation is needed for it. */
static int open_stop(struct core_leader *l)
{
    struct open_view view;

    open_look(l, &view);
    if (view.unparked + view.dying + view.away > 0 || !open_is_fenced(l)) {
        return 0;
    }
    return leader_stop_step(l, l->hold || l->failed_plans >= OPEN_PAUSE_AFTER);
}

void leader_open_step(struct core_leader *l)
{
    struct open_view view;
    uint64_t function_id = 0;
    uint64_t probe = 0;

    open_deaths(l);
    open_lost(l);
    open_late(l);
    if (l->hold && !l->stop_asked) {
        leader_wait_set(l, CORE_WAIT_HOLD, "a person: too many recoveries in an hour");
        return;
    }
    if (!leader_change_is_free(l)) {
        return;
    }
    if (l->cause_pending) {
        l->cause_pending = 0; /* it is being ended already */
    }
    if (l->stop_asked && open_stop(l)) {
        return;
    }
    uint32_t short_of = leader_fill(l);
    leader_identity(l, &function_id, &probe);
    leader_refuse(l, function_id, probe);
    open_look(l, &view);
    if (!open_must_wait(l, &view, short_of)) {
        if (!open_pauses(l)) {
            open_plan(l, function_id);
        }
    } else if (open_nobody_comes(&view)) {
        if (l->stop_asked) {
            BL_IGNORE(leader_stop_step(l, 1), "if it cannot end now it waits on");
        } else {
            leader_refuse_start(l);
        }
    }
}

/* The change is durable: what begins with it. */
static void open_begin(struct core_leader *l)
{
    l->phase_ms = l->now_ms;
    l->wait = CORE_WAIT_NOTHING;
    /* Before there is any state, the scan at the start is as good. */
    l->scan_done = l->config.root_count == 0 || (l->scan_done && l->record.state_elems == 0);
    l->ended = 0;
    l->stop_saving = 0;
    l->request_id = 0;
    l->failed_plans += l->planned;
    l->planned = 0;
    if (l->opened_ms == 0) {
        l->opened_ms = l->now_ms;
        l->begins = l->is_beginning;
        l->times = (struct core_times){.cause_ms = l->cause_ms, .detect_ms = l->cause_detect_ms};
        l->opened_generation = l->record.generation;
        snprintf(l->times.cause, sizeof(l->times.cause), "%s",
                 l->death[0] ? l->death : l->record.cause);
        l->times.open_ms = l->now_ms - l->cause_ms;
        l->lost_from = l->step;
        if (l->record.state_elems) {
            l->recoveries++;
            open_brake(l);
        }
    }
    struct core_event *e = leader_event(l, CORE_EVENT_GENERATION_OPEN);
    snprintf(e->text, sizeof(e->text), "%s", l->record.cause);
    e->value_ms = l->cause_detect_ms;
}

void leader_change_done(struct core_leader *l)
{
    switch (l->change) {
    case LEADER_CLAIM:
        l->phase_ms = l->now_ms;
        l->step = l->record.plan.step;
        l->step_ms = l->now_ms;
        break;
    case LEADER_OPEN:
        open_begin(l);
        break;
    case LEADER_PLAN: {
        l->phase_ms = l->now_ms;
        l->planned = 1;
        l->times.planned_ms = l->now_ms - l->times.cause_ms;
        leader_plan_seat(l);
        /* Steps are done again from here on, and are to be decided again. */
        l->saves_through =
            l->saves_through < l->record.plan.step ? l->saves_through : l->record.plan.step;
        leader_saves_void(l, l->record.plan.step);
        if (l->record.plan.disk_dir[0] && l->record.plan.copy_count == 0) {
            leader_interval_failure(l);
        }
        struct core_event *e = leader_event(l, CORE_EVENT_GENERATION_PLANNED);
        e->step = l->record.plan.step;
        e->count = l->record.plan.world;
        snprintf(e->text, sizeof(e->text), "%s", l->record.plan.disk_dir);
        break;
    }
    case LEADER_GO:
        leader_run_begin(l);
        break;
    case LEADER_COMMITTING:
    case LEADER_COMMITTED:
    case LEADER_COMMIT_FAILED:
        leader_saves_stored(l, l->change);
        break;
    case LEADER_END: {
        l->phase_ms = l->now_ms;
        static const enum core_event_code codes[] = {
            [WIRE_VERDICT_NONE] = CORE_EVENT_FINISHED,
            [WIRE_VERDICT_FINISHED] = CORE_EVENT_FINISHED,
            [WIRE_VERDICT_STOPPED] = CORE_EVENT_STOPPED,
            [WIRE_VERDICT_SAVE_FAILED] = CORE_EVENT_LAST_SAVE_FAILED,
            [WIRE_VERDICT_NO_PROGRESS] = CORE_EVENT_NO_PROGRESS,
            [WIRE_VERDICT_REFUSED] = CORE_EVENT_REFUSED};
        struct core_event *e = leader_event(l, codes[l->record.verdict]);
        snprintf(e->text, sizeof(e->text), "%s", l->record.cause);
        break;
    }
    }
}
