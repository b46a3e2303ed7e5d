/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stop that was asked for while no generation runs: the run ends with what there is.
 *
 *      the newest state is           then
 *      on disk, or of step 0         DONE
 *      in memory, whole              the engines save it from the arenas, then DONE
 *      in memory, not to be saved    ranks go on from it and stop after a step; when none can be
 *      without ranks                 had: DONE at the checkpoint, and which steps go is said
 */
#include "daemon/core/leader_state.h"

#include <stdio.h>

static void stop_end(struct core_leader *l, enum wire_verdict verdict, uint64_t step)
{
    char text[WIRE_TEXT_MAX] = "stopped by request";

    l->ended = 1;
    l->end_step = step;
    if (verdict == WIRE_VERDICT_SAVE_FAILED) {
        snprintf(text, sizeof(text), "the last save failed");
    } else if (l->step > step && l->config.root_count > 0) {
        snprintf(text, sizeof(text),
                 "stopped by request; steps %llu to %llu are given up: memory does not hold them "
                 "whole any more",
                 (unsigned long long)step + 1, (unsigned long long)l->step);
    }
    leader_end_send(l, verdict, text);
}

/* The last save, from the arenas of ranks that are parked or dead. 0 when their memory went. */
static int stop_save(struct core_leader *l)
{
    struct leader_set set;
    int is_whole = leader_set_find(l, l->end_step, 0, &set);

    leader_set_close(&set);
    enum leader_last last = leader_saves_last(l);

    if (last == LEADER_LAST_DONE) {
        stop_end(l, WIRE_VERDICT_STOPPED, l->end_step);
    } else if (last == LEADER_LAST_FAILED) {
        stop_end(l, WIRE_VERDICT_SAVE_FAILED, l->end_step);
    } else if (is_whole || l->save_count > 0) {
        l->end_ms = l->now_ms;
        leader_wait_set(l, CORE_WAIT_SAVE, "the last save, of step %llu",
                        (unsigned long long)l->end_step);
    } else if (l->now_ms - l->end_ms >= l->config.deadlines.restart) {
        l->stop_saving = 0;
        l->ended = 0;
        return 0;
    }
    return 1;
}

static void stop_save_begin(struct core_leader *l, uint64_t step)
{
    l->stop_saving = 1;
    l->ended = 1;
    l->end_step = step;
    l->end_ms = l->now_ms;
    leader_last_begin(l);
    leader_wait_set(l, CORE_WAIT_SAVE, "the last save, of step %llu", (unsigned long long)step);
    leader_stir(l); /* saves come first in a step */
}

/* The newest state is in memory alone. */
static int stop_memory(struct core_leader *l, uint64_t step, int is_stuck)
{
    uint64_t committed = l->record.committed_step == UINT64_MAX ? 0 : l->record.committed_step;
    struct leader_set set;
    int is_whole = leader_set_find(l, step, 0, &set);

    leader_set_close(&set);
    if (l->config.root_count == 0) {
        stop_end(l, WIRE_VERDICT_STOPPED, step);
    } else if (is_whole) {
        stop_save_begin(l, step);
    } else if (is_stuck) {
        stop_end(l, WIRE_VERDICT_STOPPED, committed);
    } else {
        return 0;
    }
    return 1;
}

int leader_stop_step(struct core_leader *l, int is_stuck)
{
    uint64_t committed = l->record.committed_step;
    struct leader_pick pick;
    int is_done = 1;

    if (l->stop_saving && stop_save(l)) {
        return 1;
    }
    l->ended = 0;
    leader_pick_newest(l, &pick);
    int is_behind = committed != UINT64_MAX && pick.step < committed;
    int lacks = l->scan_done && !pick.from_memory ? leader_scan_lacks(l, &pick) : -1;
    int is_late = l->now_ms - l->phase_ms >= l->config.deadlines.load;

    if ((!pick.found || !pick.from_memory || is_behind) && !l->scan_done) {
        leader_wait_set(l, CORE_WAIT_SCAN, "the scan of the roots");
        l->scan_wanted = !l->scan_pending;
    } else if (lacks >= 0 && !is_late) {
        leader_scan_wait(l, (uint32_t)lacks);
    } else if (leader_saves_committing(l) > pick.step) {
        leader_wait_set(l, CORE_WAIT_SAVE, "the commit of a newer step");
    } else if (pick.found && pick.from_memory && !pick.checkpoint && pick.step > 0) {
        is_done = stop_memory(l, pick.step, is_stuck);
    } else {
        uint64_t step = pick.found ? pick.step : 0;
        /* What a root holds that cannot be looked at is there still when the run is resumed. */
        if ((!pick.found || leader_roots_unscanned(l)) && committed != UINT64_MAX &&
            committed > step) {
            step = committed;
        }
        stop_end(l, WIRE_VERDICT_STOPPED, step);
    }
    leader_pick_close(&pick);
    return is_done;
}
