/* SPDX-License-Identifier: Apache-2.0 */
/* The fake daemon as leader: generations and their plans. */
#include "tests/wire/fake_daemon.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "wire/slot.h"

static int all_state(struct fake *fake, uint64_t state)
{
    for (uint32_t i = 0; i < fake->rank_count; i++) {
        const struct fake_rank *rank = &fake->ranks[i];
        if (!rank->dead && (rank->report.state != (enum wire_rank_state)state ||
                            rank->report.generation < fake->generation)) {
            return 0;
        }
    }
    return 1;
}

void fake_generation_open(struct fake *fake)
{
    fake->generation++;
    fake->phase = WIRE_PHASE_OPEN;
    fake->leave = 0;
    fake_directive(fake);
}

/* Adds to the plan every sealed copy of `step`; the elements that they hold. */
static uint64_t copies_of(struct fake *fake, uint64_t step, struct wire_plan *plan)
{
    uint64_t elems = 0;
    for (uint32_t i = 0; i < fake->arena_count; i++) {
        struct wire_arena_info info;
        if (wire_arena_read(&info, fake->arenas[i].map, fake->arenas[i].bytes, NULL)) {
            continue;
        }
        for (uint32_t k = 0; k < info.slot_count; k++) {
            if (info.slots[k].state != WIRE_SLOT_SEALED || info.slots[k].step != step) {
                continue;
            }
            for (uint32_t e = 0; e < info.extents.extent_count; e++) {
                elems += bl_extent_elems(&info.extents.extents[e]);
            }
            struct wire_copy *copy = &plan->copies[plan->copy_count++];
            *copy = (struct wire_copy){.arena = fake->arenas[i].id, .slot = k};
            snprintf(copy->node, sizeof(copy->node), "%s", fake->copies_remote ? "there" : "here");
            snprintf(copy->bulk_addr, sizeof(copy->bulk_addr), "%s", fake->bulk_addr);
            break;
        }
        bl_extent_list_close(&info.extents);
    }
    return elems;
}

void fake_plan(struct fake *fake)
{
    struct wire_plan *plan = &fake->plan;
    wire_plan_close(plan);
    memset(plan, 0, sizeof(*plan));
    plan->generation = fake->generation;
    plan->line = 1;
    plan->members = calloc(FAKE_RANKS_MAX, sizeof(*plan->members));
    plan->copies = calloc(FAKE_ARENAS_MAX, sizeof(*plan->copies));
    plan->comm_key[0] = bl_random_u64();
    plan->comm_key[1] = bl_random_u64();
    for (uint32_t i = 0; i < fake->rank_count; i++) {
        const struct fake_rank *rank = &fake->ranks[i];
        if (rank->dead) {
            continue;
        }
        struct wire_member *member = &plan->members[plan->world++];
        member->incarnation = rank->incarnation;
        snprintf(member->node, sizeof(member->node), "here");
        memcpy(member->endpoint, rank->report.endpoint, sizeof(member->endpoint));
        memcpy(member->vote_addr, rank->report.vote_addr, sizeof(member->vote_addr));
    }
    plan->pp = plan->world; /* no tp: as what was stored before there were layouts */
    if (fake->disk_only) {
        plan->step = fake->disk_step;
        snprintf(plan->disk_root, sizeof(plan->disk_root), "/root");
        snprintf(plan->disk_dir, sizeof(plan->disk_dir), "step");
        fake->phase = WIRE_PHASE_PLANNED;
        return;
    }
    plan->fresh = 1;
    for (uint64_t step = fake->shared->steps + 1; plan->fresh && step > 0; step--) {
        plan->copy_count = 0;
        if (copies_of(fake, step - 1, plan) >= (uint64_t)2 * FAKE_ELEMS) {
            plan->step = step - 1;
            plan->fresh = 0;
        }
    }
    plan->copy_count = plan->fresh ? 0 : plan->copy_count;
    fake->phase = WIRE_PHASE_PLANNED;
}

void fake_generation_plan(struct fake *fake)
{
    fake_until(fake, all_state, WIRE_RANK_PARKED, "all parked");
    fake_plan(fake);
    fake_directive(fake);
}

void fake_generation_run(struct fake *fake)
{
    fake_generation_plan(fake);
    fake_until(fake, all_state, WIRE_RANK_READY, "all ready");
    struct bl_state_digest sum = {{0, 0}};
    for (uint32_t i = 0; i < fake->rank_count; i++) {
        if (!fake->ranks[i].dead) {
            bl_state_digest_merge(&sum, &fake->ranks[i].report.ready_digest);
        }
    }
    struct bl_state_digest want = fake_state_digest(fake->plan.step);
    assert_true(bl_state_digest_equal(&sum, &want));
    fake->phase = WIRE_PHASE_RUNNING;
    fake_directive(fake);
}
