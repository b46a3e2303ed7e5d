/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `every: auto`: measures what saves cost and chooses intervals by core/interval.h, rarely. The
 * leader decides; ranks hear of it with their directives. They may hear at different steps: the
 * result of a vote is the OR of what all say, so they save the same steps all the same.
 */
#include "daemon/core/interval.h"
#include "daemon/core/leader_state.h"

#include <stdio.h>

#define INTERVAL_FIRST_MS  1000u  /* looked at so often until something is measured */
#define INTERVAL_AGAIN_MS  30000u /* not chosen anew sooner; doubled while nothing changes */
#define INTERVAL_STEPS_MIN 8u     /* of each kind, before step times are compared */
#define INTERVAL_HALVE     4096u  /* steps counted; then old ones count half */

void leader_interval_steps(struct core_leader *l, uint64_t steps, uint64_t ms)
{
    int is_saving = leader_saves_any(l);

    if (!is_saving && !l->was_saving) {
        l->steps_calm += steps;
        l->ms_calm += ms;
        if (l->steps_calm > INTERVAL_HALVE) {
            l->steps_calm /= 2;
            l->ms_calm /= 2;
        }
    }
    for (uint32_t i = 0; i < l->config.root_count && is_saving && l->was_saving; i++) {
        struct leader_root *root = &l->roots[i];
        if (!leader_save_of(l, i)) {
            continue;
        }
        root->steps_saving += steps;
        root->ms_saving += ms;
        if (root->steps_saving > INTERVAL_HALVE) {
            root->steps_saving /= 2;
            root->ms_saving /= 2;
        }
    }
    l->was_saving = (uint32_t)is_saving;
}

void leader_interval_failure(struct core_leader *l)
{
    if (l->is_beginning || l->disk_failures_generation == l->opened_generation) {
        return; /* nothing failed, or it is counted */
    }
    l->disk_failures_generation = l->opened_generation;
    l->disk_failures++;
}

uint32_t leader_interval_inflation(const struct core_leader *l, uint32_t index)
{
    const struct leader_root *root = &l->roots[index];

    if (root->steps_saving < INTERVAL_STEPS_MIN || l->steps_calm < INTERVAL_STEPS_MIN ||
        l->ms_calm == 0) {
        return 0;
    }
    double calm = (double)l->ms_calm / (double)l->steps_calm;
    double saving = (double)root->ms_saving / (double)root->steps_saving;
    double ratio = saving / calm;
    return ratio > 1000 ? 1000000 : (uint32_t)(ratio * 1000);
}

/* 0: nothing is measured yet. */
static uint64_t root_choose(const struct core_leader *l, uint32_t index)
{
    const struct leader_root *root = &l->roots[index];
    uint64_t steps = l->steps_calm ? l->steps_calm : root->steps_saving;
    uint64_t ms = l->steps_calm ? l->ms_calm : root->ms_saving;

    if (root->committed == 0 || steps < INTERVAL_STEPS_MIN) {
        return 0;
    }
    struct core_interval_input in = {.save_s = (double)root->save_ms / 1000,
                                     .inflation = leader_interval_inflation(l, index) / 1000.0,
                                     .step_s = (double)ms / (double)steps / 1000,
                                     .run_s = (double)(l->now_ms - l->start_ms) / 1000,
                                     .failures = l->disk_failures};
    return core_interval_steps(&in);
}

/* A change that matters: others would only move the steps that people expect saves at. */
static int is_other(uint64_t was, uint64_t is)
{
    uint64_t apart = was > is ? was - is : is - was;
    return apart * 5 > was;
}

void leader_interval_step(struct core_leader *l)
{
    if (l->record.phase != WIRE_PHASE_RUNNING || l->now_ms < l->interval_ms ||
        !leader_change_is_free(l)) {
        return;
    }
    int is_changed = 0;
    int is_unknown = 0;
    l->interval_wait_ms = l->interval_wait_ms ? l->interval_wait_ms : INTERVAL_AGAIN_MS;
    for (uint32_t i = 0; i < l->config.root_count; i++) {
        struct leader_root *root = &l->roots[i];
        if (root->every != CORE_EVERY_AUTO) {
            continue;
        }
        uint64_t chosen = root_choose(l, i);
        is_unknown |= chosen == 0;
        if (chosen == 0 || chosen == root->interval || !is_other(root->interval, chosen)) {
            continue;
        }
        struct core_event *e = leader_event(l, CORE_EVENT_SAVE_INTERVAL);
        e->count = chosen;
        e->value_ms = root->save_ms;
        snprintf(e->text, sizeof(e->text), "%.180s: every %llu steps, until now %llu", root->path,
                 (unsigned long long)chosen, (unsigned long long)root->interval);
        root->interval = chosen;
        l->record.roots[i].every = chosen; /* durable with the next change */
        is_changed = 1;
    }
    if (is_changed) {
        leader_dirty_all(l);
        l->interval_wait_ms = INTERVAL_AGAIN_MS;
    } else if (!is_unknown && l->interval_wait_ms < 16 * INTERVAL_AGAIN_MS) {
        l->interval_wait_ms *= 2;
    }
    l->interval_ms = l->now_ms + (is_unknown ? INTERVAL_FIRST_MS : l->interval_wait_ms);
}
