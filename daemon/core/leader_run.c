/* SPDX-License-Identifier: Apache-2.0 */
/*
 * RUNNING: watch steps and members, carry requests into votes, take in ranks, and end the run when
 * all members leave with the same step and its save is committed.
 */
#include "daemon/core/leader_state.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- progress ---- */

/* Newest step that the member has sealed in this generation. */
static uint64_t member_step(const struct core_leader *l, const struct leader_proc *p)
{
    const struct wire_plan *plan = &l->record.plan;
    uint64_t step = plan->step;
    if (p->report.generation == plan->generation && p->report.applied_step > step &&
        (p->report.state == WIRE_RANK_RUNNING || p->report.state == WIRE_RANK_LEAVING)) {
        step = p->report.applied_step;
    }
    const struct wire_arena_info *arena = leader_arena_find(l, p->node, p->report.arena);
    for (uint32_t k = 0; arena && k < arena->slot_count; k++) {
        const struct wire_slot_info *slot = &arena->slots[k];
        if (slot->state == WIRE_SLOT_SEALED && slot->generation == plan->generation &&
            slot->step > step) {
            step = slot->step;
        }
    }
    return step;
}

static void run_first_step(struct core_leader *l)
{
    l->first_sealed = 1;
    leader_dirty_all(l);
    if (!l->opened_ms) {
        return;
    }
    l->opened_ms = 0;
    l->times.step_ms = l->now_ms - l->times.cause_ms;
    l->times.generation = l->record.generation;
    l->steps_lost += l->times.steps_lost;
    if (l->times.steps_lost) {
        leader_event(l, CORE_EVENT_STEPS_LOST)->count = l->times.steps_lost;
    }
    struct core_event *e = leader_event(l, l->begins ? CORE_EVENT_BEGUN : CORE_EVENT_RECOVERED);
    e->value_ms = l->times.step_ms;
    e->count = l->times.steps_lost;
    snprintf(e->text, sizeof(e->text), "%s", l->times.cause);
}

static void run_progress(struct core_leader *l)
{
    const struct wire_plan *plan = &l->record.plan;
    uint64_t step = UINT64_MAX;

    for (uint32_t i = 0; i < plan->world; i++) {
        const struct leader_proc *p = leader_proc_find(l, plan->members[i].incarnation);
        /* Steps are unanimous: of a node that is away the others' steps tell. */
        if (p && l->nodes[p->node].connected) {
            uint64_t own = member_step(l, p);
            step = own < step ? own : step;
        }
    }
    if (step == UINT64_MAX || step <= l->step) {
        return;
    }
    uint64_t each = (l->now_ms - l->step_ms) / (step - l->step);
    if (l->first_sealed) { /* the first one has loading and warming up in it */
        leader_interval_steps(l, step - l->step, l->now_ms - l->step_ms);
        l->step_times[l->step_time_count++ % LEADER_STEPS_LEARNED] = each;
    }
    l->step = step;
    l->step_ms = l->now_ms;
    l->step_hangs = 0;
    if (!l->first_sealed && step > plan->step) {
        run_first_step(l);
    }
}

/* Everybody's rank of the generation that runs now, and what became of the layout. */
static void run_ranks(struct core_leader *l)
{
    const struct wire_plan *plan = &l->record.plan;
    struct leader_layout_job job = leader_job_layout(l);
    struct leader_layout is = leader_plan_layout(l);
    struct leader_layout was = l->shape;
    struct leader_layout wanted = {job.dp_max, job.tp, job.pp};
    char to[LEADER_LAYOUT_TEXT], from[LEADER_LAYOUT_TEXT];

    for (uint32_t i = 0; i < plan->world; i++) {
        struct leader_proc *p = leader_proc_find(l, plan->members[i].incarnation);
        if (p) {
            p->rank = i;
            p->ran_generation = plan->generation;
        }
    }
    for (uint32_t i = 0; i < l->proc_count; i++) {
        struct leader_proc *p = &l->procs[i];
        if (p->ran_generation && p->ran_generation != plan->generation && p->life != LEADER_DEAD) {
            p->rank = CORE_NO_RANK; /* of a replica that was dissolved: a spare */
        }
    }
    l->ran_generation = plan->generation;
    l->shape = is;
    if (plan->world < leader_wanted(l)) {
        struct core_event *e = leader_event(l, CORE_EVENT_RESHAPED);
        e->count = plan->world;
        leader_layout_text(to, &is);
        leader_layout_text(from, was.dp ? &was : &wanted);
        snprintf(e->text, sizeof(e->text), "%s%s -> %s; %u of %u ranks", was.dp ? "" : "wanted ",
                 from, to, plan->world, leader_wanted(l));
    }
}

void leader_run_begin(struct core_leader *l)
{
    const struct wire_plan *plan = &l->record.plan;
    l->phase_ms = l->now_ms;
    l->step = plan->step;
    l->step_ms = l->now_ms;
    l->first_sealed = 0;
    l->ended = 0;
    l->load_hangs = 0;
    l->is_beginning = 0;
    l->planned = 0;
    l->failed_plans = 0;
    l->cause_is_victims = 0;
    l->fence_told = 0;
    l->wait = CORE_WAIT_NOTHING;
    l->wait_text[0] = 0;
    l->times.running_ms = l->now_ms - l->times.cause_ms;
    struct core_event *e = leader_event(l, CORE_EVENT_GENERATION_RUNNING);
    e->step = plan->step;
    e->count = plan->world;
    e->value_ms = l->times.running_ms;
    run_ranks(l);
    leader_saves_void(l, plan->step);
}

/* ---- deaths ---- */

void leader_death_judge(struct core_leader *l, struct leader_proc *p)
{
    struct leader_crash *crash = &l->crash;
    const struct wire_exit *x = &p->status;
    int is_unknown = x->code < 0 && x->signal == 0;

    if (x->by_us || p->kill || is_unknown || x->signal == SIGKILL || x->signal == SIGTERM ||
        p->refused || l->record.phase == WIRE_PHASE_DONE) {
        return; /* by us, or from outside */
    }
    int is_same = crash->count > 0 && crash->rank == p->rank && crash->code == x->code &&
                  crash->signal == x->signal && crash->section == p->beat.section &&
                  crash->step == p->report.applied_step;
    *crash = (struct leader_crash){.rank = p->rank,
                                   .section = p->beat.section,
                                   .code = x->code,
                                   .signal = x->signal,
                                   .step = p->report.applied_step,
                                   .count = is_same ? crash->count + 1 : 1};
    if (crash->count == 1) {
        snprintf(l->first_cause, sizeof(l->first_cause),
                 "rank %u on %s: %s %d at step %llu: %.100s", p->rank, l->nodes[p->node].name,
                 x->signal ? "signal" : "exit code", x->signal ? x->signal : x->code,
                 (unsigned long long)p->report.applied_step, p->report.failed_text);
    }
    if ((x->code == 2 || x->code == 3) && x->signal == 0) {
        leader_node_refuse(l, p->node, l->first_cause); /* trying again there is of no use */
        if (l->record.state_elems == 0) {
            leader_end_send(l, WIRE_VERDICT_REFUSED, l->first_cause);
        }
        return;
    }
    if (crash->count >= LEADER_CRASHES) {
        leader_end_send(l, WIRE_VERDICT_NO_PROGRESS, l->first_cause);
    }
}

static void watch_death(struct core_leader *l, struct leader_proc *p)
{
    p->counted = 1;
    leader_event_proc(l, CORE_EVENT_RANK_EXITED, p, p->report.failed_text);
    leader_death_judge(l, p);
    if (!l->ended) {
        leader_cause_death(l, p);
    }
}

static void watch_failure(struct core_leader *l, const struct leader_proc *p)
{
    const struct wire_plan *plan = &l->record.plan;
    int code = p->report.failed_code;

    leader_event_proc(l, CORE_EVENT_RANK_FAILED, p, p->report.failed_text);
    leader_cause(l, 0, "rank %u: %.200s", p->rank, p->report.failed_text);
    l->cause_is_victims = code == BL_EPEER;
    if (l->record.phase != WIRE_PHASE_PLANNED || plan->fresh ||
        (code != BL_EDIGEST && code != BL_EFORMAT && code != -ENOENT && code != -EIO &&
         code != -ETIMEDOUT)) {
        return;
    }
    /* What the plan named could not be loaded: a second time, not from there again. */
    if (l->digest_failed_step != plan->step + 1) {
        l->digest_failed_step = plan->step + 1;
        return;
    }
    if (plan->disk_dir[0] && plan->copy_count == 0 && l->bad_dir_count < LEADER_BAD_MAX) {
        leader_bad_add(l, plan->disk_root, plan->disk_dir);
        const char *failed = p->report.failed_text; /* file, chunk and tensor, where it knows */
        struct bl_errmsg why = {{0}};
        int named = strstr(failed, plan->disk_dir) != NULL;
        BL_IGNORE(
            bl_err(&why, code, "%s%s%s", named ? "" : plan->disk_dir, named ? "" : ": ", failed),
            "only its text is wanted");
        if (code != -ETIMEDOUT) { /* its root does not answer there: nothing is known of it */
            leader_event_proc(l, CORE_EVENT_CHECKPOINT_BAD, p, why.text);
        }
    } else if (plan->copy_count && l->bad_step_count < LEADER_BAD_MAX && code != -ENOENT &&
               code != -ETIMEDOUT) {
        l->bad_steps[l->bad_step_count++] = plan->step;
        leader_event_proc(l, CORE_EVENT_MEMORY_BAD, p, p->report.failed_text);
    }
    l->digest_failed_step = 0;
}

void leader_members_watch(struct core_leader *l)
{
    const struct wire_plan *plan = &l->record.plan;
    uint64_t lease = l->config.deadlines.lease;
    uint64_t still = l->now_ms - (l->record.phase == WIRE_PHASE_RUNNING ? l->step_ms : l->phase_ms);

    for (uint32_t i = 0; i < plan->world; i++) {
        struct leader_proc *p = leader_proc_find(l, plan->members[i].incarnation);
        if (!p) {
            leader_cause(l, 0, "rank %u is not known any more", i);
            continue;
        }
        const struct leader_node *node = &l->nodes[p->node];
        if (p->life == LEADER_DEAD && !p->counted) {
            watch_death(l, p);
        } else if (p->life == LEADER_DEAD && !l->ended && l->record.phase == WIRE_PHASE_PLANNED) {
            leader_cause(l, 0, "rank %u on %s ended before it was ready", i, node->name);
        } else if (p->life == LEADER_LIVE && !l->ended && !l->cause_pending &&
                   p->report.failed_generation == plan->generation) {
            watch_failure(l, p);
        } else if (p->life == LEADER_LIVE && !l->ended && p->report.generation > plan->generation) {
            leader_cause(l, 0, "rank %u has left the generation", i);
        } else if (!node->connected && !l->ended && l->now_ms - node->away_ms >= lease &&
                   still >= lease) {
            leader_cause(l, l->now_ms - node->away_ms, "node %s is away and no step progresses",
                         node->name);
        }
    }
}

/* ---- requests ---- */

/* Processes parked beside the generation that could be members. */
static uint32_t run_spares(const struct core_leader *l)
{
    uint32_t spares = 0;
    for (uint32_t i = 0; i < l->proc_count; i++) {
        const struct leader_proc *p = &l->procs[i];
        spares += leader_proc_is_reachable(l, p) && !p->refused &&
                  p->report.state == WIRE_RANK_PARKED && !leader_proc_is_member(l, p);
    }
    return spares;
}

/* What the members and the spares can form together. */
static struct leader_layout run_larger(const struct core_leader *l)
{
    struct leader_layout_job job = leader_job_layout(l);
    return leader_layout_shape(&job, l->record.plan.world + run_spares(l));
}

static void run_requests(struct core_leader *l)
{
    const struct wire_plan *plan = &l->record.plan;
    uint32_t flags = l->stop_asked ? BELAY_VOTE_STOP : 0;

    flags |= l->save_asked && leader_roots_answer(l) ? BELAY_VOTE_SAVE : 0;
    /* Before they are counted: a node with other arithmetic costs the run no generation. */
    leader_refuse(l, l->record.function_id, l->record.probe);
    struct leader_layout larger = run_larger(l);
    if (l->first_sealed && leader_layout_world(&larger) > plan->world) {
        flags |= BELAY_VOTE_GROW;
    }
    const struct leader_proc *root = leader_proc_find(l, plan->members[0].incarnation);
    int is_done = root && l->request_id && root->report.request_done == l->request_id;
    /* A save that was asked for and skipped is asked for again, when the one before is over. */
    int is_again = is_done && flags == BELAY_VOTE_SAVE && !leader_saves_any(l) &&
                   l->now_ms - l->request_ms >= 4 * l->config.deadlines.beat;

    if (flags == l->request_flags && l->request_generation == plan->generation && !is_again) {
        return;
    }
    l->request_flags = flags;
    l->request_generation = plan->generation;
    l->request_id = flags ? leader_random(l) : 0;
    l->request_ms = l->now_ms;
    leader_dirty_all(l);
}

/* While the world is too small: start what there is room for. When it is full: end the others. */
static void run_spares_keep(struct core_leader *l)
{
    if (!l->first_sealed || l->ended || l->stop_asked) {
        return;
    }
    if (l->record.plan.world < leader_wanted(l)) {
        leader_fill(l);
    }
    for (uint32_t i = 0; i < l->proc_count; i++) {
        struct leader_proc *p = &l->procs[i];
        if (leader_proc_is_member(l, p)) {
            continue;
        }
        if (p->life == LEADER_DEAD && !p->counted) {
            p->counted = 1;
            leader_event_proc(l, CORE_EVENT_RANK_EXITED, p, p->report.failed_text);
            l->nodes[p->node].fill_ms = l->now_ms + l->config.deadlines.join;
            leader_death_judge(l, p);
        } else if (p->life == LEADER_LIVE && l->nodes[p->node].connected &&
                   l->record.plan.world >= leader_wanted(l)) {
            leader_proc_kill(l, p, 0);
        }
    }
}

/* ---- the end ---- */

/* Do all members leave, all with the same step? */
static int run_has_ended(struct core_leader *l)
{
    const struct wire_plan *plan = &l->record.plan;
    uint64_t step = 0;
    uint32_t flags = 0;

    for (uint32_t i = 0; i < plan->world; i++) {
        const struct leader_proc *p = leader_proc_find(l, plan->members[i].incarnation);
        if (!p || !p->was_leaving || !l->nodes[p->node].connected ||
            p->report.generation != plan->generation || p->report.leave_code != 0 ||
            (i > 0 && p->report.applied_step != step)) {
            return 0;
        }
        step = p->report.applied_step;
        flags |= p->report.stop_flags;
    }
    l->end_step = step;
    l->stop_flags = flags;
    return 1;
}

void leader_end_send(struct core_leader *l, enum wire_verdict verdict, const char *text)
{
    if (!leader_change_is_free(l) || l->record.phase == WIRE_PHASE_DONE) {
        return;
    }
    struct wire_record *next = leader_change_begin(l, LEADER_END);
    next->phase = WIRE_PHASE_DONE;
    next->verdict = verdict;
    for (uint32_t i = 0; i < next->root_count; i++) {
        next->roots[i].committing_attempt = 0;
    }
    leader_record_newest(next);
    struct leader_set set;
    next->end_step = l->ended ? l->end_step : l->step;
    next->end_digest_known = (uint32_t)leader_set_find(l, next->end_step, 0, &set);
    next->end_digest = set.digest;
    leader_set_close(&set);
    snprintf(next->cause, sizeof(next->cause), "%s", text);
    if (!next->job_json) {
        next->job_json = strdup(l->job_json);
        BL_ASSERT(next->job_json);
    }
    leader_change_send(l);
}

/* The run ends well; which root does not have the last step is said. */
static void run_end_well(struct core_leader *l, int is_final)
{
    const char *how = is_final ? "all steps are done" : "stopped by request";
    int lacks = leader_last_lacks(l);
    char text[WIRE_TEXT_MAX];

    snprintf(text, sizeof(text), "%s", how);
    if (lacks >= 0) {
        snprintf(text, sizeof(text), "%s; root %.150s does not have step %llu", how,
                 l->roots[lacks].path, (unsigned long long)l->end_step);
    }
    leader_end_send(l, is_final ? WIRE_VERDICT_FINISHED : WIRE_VERDICT_STOPPED, text);
}

/* The last step waits for its save. If memory that it needs is gone, it has to be done again,
 * unless one root has it. */
static void run_end_check(struct core_leader *l, int is_final)
{
    struct leader_set set;
    int is_whole = leader_set_find(l, l->end_step, 0, &set);

    leader_set_close(&set);
    if (is_whole || l->save_count > 0) {
        l->end_ms = l->now_ms;
    } else if (l->now_ms - l->end_ms < l->config.deadlines.restart) {
        return;
    } else if (l->record.committed_step == l->end_step) {
        run_end_well(l, is_final);
    } else {
        l->ended = 0;
        leader_cause(l, l->now_ms - l->end_ms, "the last step's state is gone before it was saved");
        leader_open_send(l);
    }
}

static void run_end(struct core_leader *l)
{
    int is_final = (l->stop_flags & BELAY_VOTE_FINAL) != 0 ||
                   (l->config.steps && l->end_step >= l->config.steps);
    enum leader_last last = leader_saves_last(l);

    if (last == LEADER_LAST_DONE) {
        run_end_well(l, is_final);
    } else if (last == LEADER_LAST_FAILED) {
        leader_end_send(l, WIRE_VERDICT_SAVE_FAILED, "the last save failed");
    } else {
        leader_wait_set(l, CORE_WAIT_SAVE, "the last save, of step %llu",
                        (unsigned long long)l->end_step);
        run_end_check(l, is_final);
    }
}

/* Nodes that have not said yet that nothing of the run is left there. */
static uint32_t end_nodes_left(const struct core_leader *l)
{
    uint32_t left = 0;
    for (uint32_t i = 0; i < l->node_count; i++) {
        const struct leader_node *node = &l->nodes[i];
        left += node->connected && (node->report.proc_count || !leader_node_has_newest(l, node));
    }
    return left;
}

/* DONE is stored: processes leave, their daemons forget them, the verdict goes out. */
void leader_end_step(struct core_leader *l)
{
    uint32_t left = 0;
    uint64_t since = l->now_ms - l->phase_ms;

    for (uint32_t i = 0; i < l->proc_count; i++) {
        struct leader_proc *p = &l->procs[i];
        if (p->life == LEADER_DEAD) {
            p->counted = 1;
            continue;
        }
        left += l->nodes[p->node].connected;
        if (since >= l->config.deadlines.grace) {
            leader_proc_kill(l, p, 0);
        }
    }
    leader_wait_set(l, left ? CORE_WAIT_LEAVE : CORE_WAIT_NOTHING, "%u ranks to leave", left);
    if ((left == 0 && end_nodes_left(l) == 0) || since >= 3 * l->config.deadlines.grace) {
        l->finished = 1;
        struct core_leader_effect *e = core_ring_push(&l->effects);
        e->kind = CORE_LEADER_FINISHED;
        e->verdict = l->record.verdict;
    }
}

static uint32_t run_grow_seen(const struct core_leader *l)
{
    const struct wire_plan *plan = &l->record.plan;
    for (uint32_t i = 0; i < plan->world; i++) {
        const struct leader_proc *p = leader_proc_find(l, plan->members[i].incarnation);
        if (p && p->report.generation == plan->generation &&
            p->report.stop_flags & BELAY_VOTE_GROW &&
            !(p->report.stop_flags & (BELAY_VOTE_STOP | BELAY_VOTE_FINAL))) {
            return 1;
        }
    }
    return 0;
}

static void run_grows(struct core_leader *l)
{
    struct leader_layout larger = run_larger(l);
    char to[LEADER_LAYOUT_TEXT], from[LEADER_LAYOUT_TEXT];
    struct core_event *e = leader_event(l, CORE_EVENT_GROWN);

    e->count = run_spares(l);
    leader_layout_text(from, &l->shape);
    leader_layout_text(to, &larger);
    snprintf(e->text, sizeof(e->text), "%s -> %s", from, to);
}

void leader_run_step(struct core_leader *l)
{
    run_progress(l);
    if (!l->ended && !l->cause_pending && run_has_ended(l)) {
        l->ended = 1;
        l->end_ms = l->now_ms;
        leader_last_begin(l);
    }
    leader_members_watch(l);
    if (l->ended) {
        run_end(l);
        return;
    }
    if (!l->cause_pending && run_grow_seen(l)) {
        run_grows(l);
        leader_cause(l, 0, "ranks are taken in");
    }
    if (!l->cause_pending) {
        leader_hang_step(l);
    }
    if (l->cause_pending) {
        leader_open_send(l);
        return;
    }
    run_requests(l);
    run_spares_keep(l);
}
