/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A trainer of two tensors whose state after n steps is known in closed form: the weight is cut
 * into boxes of columns, its moment flat (and described as trainers did before there were boxes).
 */
#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "tests/wire/fake_daemon.h"
#include "wire/belay.h"

static const char *const fake_names[2] = {"weight", "weight#m"};

void fake_state(float *out, int which, uint64_t step, uint64_t flat_lo, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        out[i] = (float)(flat_lo + i) * 0.25f + (float)step * (which ? 3.0f : 1.0f);
    }
}

struct bl_state_digest fake_state_digest(uint64_t step)
{
    static float elems[FAKE_ELEMS];
    struct bl_state_digest digest = {{0, 0}};
    for (int which = 0; which < 2; which++) {
        fake_state(elems, which, step, 0, FAKE_ELEMS);
        bl_state_digest_add(&digest, bl_xxh3(fake_names[which], strlen(fake_names[which])), 0,
                            elems, FAKE_ELEMS, sizeof(float));
    }
    return digest;
}

struct rank {
    struct fake_shared *shared;
    int index;
    struct belay *job;
    struct belay_plan plan;
    uint64_t offset[2];
    uint64_t lo[2], hi[2]; /* columns of the weight, flat elements of the moment */
};

static uint64_t elems_of(const struct rank *rank, int which)
{
    return (rank->hi[which] - rank->lo[which]) * (which ? 1 : FAKE_ROWS);
}

static void __attribute__((noreturn)) die(struct rank *rank, const char *what, int rc)
{
    fprintf(stderr, "rank %d: %s: %d: %s\n", rank->index, what, rc, belay_error(rank->job));
    _exit(3);
}

/* The next state from the one before, so that a wrong load shows in the end. */
static void apply(struct rank *rank, const void *from, void *to)
{
    for (int which = 0; which < 2; which++) {
        const float *old = (const void *)((const char *)from + rank->offset[which]);
        float *new = (void *)((char *)to + rank->offset[which]);
        for (uint64_t i = 0; i < elems_of(rank, which); i++) {
            new[i] = old[i] + (which ? 3.0f : 1.0f);
        }
    }
}

/* Odd ranks were built before plans had layouts: nothing is written behind their plan. */
static int is_old(int index)
{
    return index % 2;
}

static void describe(struct rank *rank, int which)
{
    struct belay_tensor_desc desc = {
        .size = which ? offsetof(struct belay_tensor_desc, box_lo) : sizeof(desc),
        .version = BELAY_VERSION_ABI,
        .name = fake_names[which],
        .kind = which ? BL_KIND_MOMENT1 : BL_KIND_PARAM,
        .dtype = BL_F32,
        .dims = which ? 1 : 2,
        .shape = {which ? FAKE_ELEMS : FAKE_ROWS, FAKE_COLUMNS},
        .flat_lo = which ? rank->lo[1] : 0,
        .flat_hi = which ? rank->hi[1] : elems_of(rank, 0),
        .box_lo = {0, rank->lo[0]},
        .box_hi = {FAKE_ROWS, rank->hi[0]}, /* not looked at with the size from before */
    };
    int rc = belay_tensor(rank->job, &desc, NULL);
    if (rc) {
        die(rank, "tensor", rc);
    }
    rank->offset[which] = desc.slot_offset;
}

/* The state before the first step. */
static void fill(const struct rank *rank, void *slot)
{
    float *weight = (void *)((char *)slot + rank->offset[0]);
    uint64_t columns = rank->hi[0] - rank->lo[0];
    for (uint64_t row = 0; row < FAKE_ROWS; row++) {
        fake_state(weight + row * columns, 0, 0, row * FAKE_COLUMNS + rank->lo[0], columns);
    }
    fake_state((void *)((char *)slot + rank->offset[1]), 1, 0, rank->lo[1], elems_of(rank, 1));
}

static int begin(struct rank *rank)
{
    const struct belay_plan *plan = &rank->plan;
    uint32_t tp = is_old(rank->index) ? 77 : 1;
    uint32_t pp = is_old(rank->index) ? 77 : plan->world;
    if (plan->tp != tp || plan->pp != pp) {
        die(rank, "layout of the plan", BL_EFORMAT);
    }
    for (int which = 0; which < 2; which++) {
        uint64_t all = which ? FAKE_ELEMS : FAKE_COLUMNS;
        rank->lo[which] = all * plan->rank / plan->world;
        rank->hi[which] = all * (plan->rank + 1) / plan->world;
        describe(rank, which);
    }
    int rc = belay_load(rank->job, plan->step);
    if (!rc && plan->fresh) {
        void *slot;
        rc = belay_slot_begin(rank->job, plan->step, &slot);
        if (!rc) {
            fill(rank, slot);
        }
        rc = rc ? rc : belay_slot_seal(rank->job, plan->step);
    }
    return rc ? rc : belay_ready(rank->job);
}

/* Computing: until the test lets this step go, or a new generation is called. */
static int compute(struct rank *rank, uint64_t step)
{
    struct pollfd event = {.fd = belay_event_fd(rank->job), .events = POLLIN};
    belay_beat(rank->job, BELAY_SECTION_STEP, step);
    while (atomic_load(&rank->shared->limit[rank->index]) < step) {
        if (poll(&event, 1, 1) > 0) {
            return BELAY_EGEN;
        }
    }
    return 0;
}

static int steps(struct rank *rank)
{
    struct fake_shared *shared = rank->shared;
    for (uint64_t n = rank->plan.step + 1; n <= shared->steps; n++) {
        const void *from;
        void *to = NULL;
        uint32_t result = 0;
        int rc = compute(rank, n);
        if (rc) {
            return rc;
        }
        uint64_t begin_ns = bl_now_ns();
        rc = belay_vote(rank->job, n, n == shared->steps ? BELAY_VOTE_FINAL : 0, &result);
        if (rc) {
            return rc;
        }
        atomic_fetch_add(&shared->vote_ns[rank->index], bl_now_ns() - begin_ns);
        atomic_fetch_add(&shared->votes[rank->index], 1);
        atomic_store(&shared->voted[rank->index], n);
        rc = belay_slot_data(rank->job, n - 1, &from);
        if (rc || (rc = belay_slot_begin(rank->job, n, &to)) != 0) {
            die(rank, "slots after a vote", rc);
        }
        apply(rank, from, to);
        rc = belay_slot_seal(rank->job, n);
        if (rc) {
            die(rank, "seal", rc);
        }
        if (result & (BELAY_VOTE_STOP | BELAY_VOTE_FINAL)) {
            return 0;
        }
    }
    return 0;
}

void fake_rank_main(struct fake_shared *shared, int index, uint64_t function_id)
{
    struct rank rank = {.shared = shared, .index = index};
    rank.plan.size = sizeof(rank.plan);
    if (is_old(index)) {
        rank.plan.size = offsetof(struct belay_plan, tp);
        rank.plan.tp = rank.plan.pp = 77;
    }
    char endpoint[32];
    snprintf(endpoint, sizeof(endpoint), "endpoint of %d", index);
    struct belay_config config = {.size = sizeof(config),
                                  .version = BELAY_VERSION_ABI,
                                  .function_id = function_id,
                                  .probe = 88,
                                  .endpoint = endpoint};
    int rc = belay_join(&config, &rank.job, &rank.plan);
    if (rc == BELAY_EREFUSED) {
        _exit(strstr(belay_error(NULL), "by the test") ? 2 : 4);
    }
    if (rc) {
        die(&rank, "join", rc);
    }
    for (;;) {
        rc = begin(&rank);
        rc = rc ? rc : steps(&rank);
        if (!rc || rc == BELAY_ESTOPPED) {
            rc = belay_leave(rank.job, 0);
            if (!rc) {
                _exit(0);
            }
        }
        if (rc != BELAY_EGEN) {
            die(&rank, "generation", rc);
        }
        atomic_fetch_add(&shared->egen[index], 1);
        rc = belay_next(rank.job, &rank.plan);
        if (rc && rc != BELAY_ESTOPPED) {
            die(&rank, "next", rc);
        }
    }
}
