/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/alone.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "trainer/dryrun.h"
#include "trainer/report.h"
#include "trainer/start.h"
#include "trainer/step.h"

#define ALONE_RANKS_MAX  64u
#define ALONE_JOIN_MS    60000u  /* until all ranks have joined; then they end */
#define ALONE_OP_MS      600000u /* one collective; a rank that died is noticed at once without it */
#define ALONE_NODE_BYTES 16
#define ALONE_SLOTS      2 /* of the last step and of the one in work */

struct alone_group {
    const struct train_alone *how;
    uint32_t world;
    uint64_t key[2];
    struct comm_listener *listeners[ALONE_RANKS_MAX];
    struct comm_peer peers[ALONE_RANKS_MAX];
    char nodes[ALONE_RANKS_MAX][ALONE_NODE_BYTES];
};

static int exit_code(int rc)
{
    return rc == 0 ? 0 : rc == BL_ECONFIG || rc == BL_ENOTBUILT ? 2 : 3;
}

static void complain(uint32_t rank, uint32_t world, const struct bl_errmsg *msg)
{
    if (world > 1) {
        fprintf(stderr, "belay-train: rank %u: %s\n", rank, msg->text);
    } else {
        fprintf(stderr, "belay-train: %s\n", msg->text);
    }
}

/* ---- one rank ---- */

struct alone_rank {
    const struct alone_group *group;
    uint32_t index;
    struct train_rank rank;
    struct comm *comm; /* NULL in a world of one */
    struct train_report report;
    void *slots[ALONE_SLOTS];
    uint64_t slot_bytes;
};

static int rank_join(struct alone_rank *a, struct bl_errmsg *msg)
{
    const struct alone_group *g = a->group;
    if (g->world == 1) {
        return train_rank_join(&a->rank, NULL, msg);
    }
    const struct comm_config config = {
        .rank = a->index,
        .world = g->world,
        .generation = 1,
        .key = {g->key[0], g->key[1]},
        .peers = g->peers,
        .op_deadline_ms = (uint32_t)bl_time_scaled_ms(ALONE_OP_MS),
        .early_bytes_max = train_rank_early_bytes(&a->rank),
    };
    int rc = comm_new(&a->comm, g->listeners[a->index], &config, msg);
    if (rc == 0) {
        rc = train_rank_join(&a->rank, a->comm, msg);
    }
    uint32_t deadline_ms = (uint32_t)bl_time_scaled_ms(ALONE_JOIN_MS);
    rc = rc != 0 ? rc : comm_connect(a->comm, deadline_ms, msg);
    return rc != 0 ? rc : train_rank_attach(&a->rank, deadline_ms, msg);
}

static int rank_open(struct alone_rank *a, struct bl_errmsg *msg)
{
    const struct train_alone *how = a->group->how;
    struct train_grid grid;
    int rc = train_rank_open(&a->rank, how->job, a->index, how->threads, msg);
    if (rc == 0 && a->index == 0 && how->job->backend[0] != 0) {
        fprintf(stderr, "belay-train: %s\n", a->rank.backend.why);
    }
    if (rc == 0) {
        rc = train_grid_make(&grid, a->index, a->group->world, how->job->tp, how->job->pp, msg);
    }
    if (rc == 0) {
        rc = train_rank_place(&a->rank, &grid, msg);
    }
    if (rc != 0) {
        return rc;
    }
    train_shard_layout(&a->rank.shard);
    a->slot_bytes = a->rank.shard.slot_bytes + 1; /* a rank may own nothing */
    for (int i = 0; i < ALONE_SLOTS; i++) {
        a->slots[i] = bl_mem_alloc(a->slot_bytes);
        if (a->slots[i] == NULL) {
            return bl_err_code(msg, -ENOMEM, "%llu bytes for the state",
                               (unsigned long long)a->slot_bytes);
        }
    }
    if (how->ledger != NULL) {
        char path[BL_PATH_MAX + 16];
        snprintf(path, sizeof path, "%s.%u", how->ledger, a->index);
        a->rank.ledger = fopen(path, "we");
        if (a->rank.ledger == NULL) {
            return bl_err_code(msg, -errno, "ledger %s", path);
        }
    }
    int first = a->index == 0;
    return train_report_open(&a->report, first ? stdout : NULL, first ? how->metrics : NULL,
                             first ? how->tensorboard : NULL, msg);
}

static void rank_close(struct alone_rank *a)
{
    if (a->rank.ledger != NULL) {
        fclose(a->rank.ledger);
        a->rank.ledger = NULL;
    }
    train_rank_leave(&a->rank);
    comm_free(a->comm);
    a->comm = NULL;
    train_report_close(&a->report);
    train_rank_close(&a->rank); /* waits for what is still copied into a slot, and unlocks it */
    for (int i = 0; i < ALONE_SLOTS; i++) {
        bl_mem_free(a->slots[i], a->slot_bytes);
    }
}

static int rank_step(struct alone_rank *a, uint64_t step, struct bl_errmsg *msg)
{
    const struct bl_job_train *t = &a->rank.job->train;
    struct train_step_result result;
    double eval_loss;
    int rc = train_step_gradient(&a->rank, step, &result, msg);
    if (rc == 0) {
        rc = train_rank_wait(&a->rank, msg); /* the last step's slot */
    }
    if (rc == 0) {
        void *to = a->slots[step % ALONE_SLOTS];
        train_step_apply(&a->rank, &result, a->slots[(step - 1) % ALONE_SLOTS], to);
        rc = train_step_gather(&a->rank, to, msg);
    }
    int evaluate = t->eval_every != 0 && step % t->eval_every == 0;
    if (rc == 0 && evaluate) {
        rc = train_eval(&a->rank, &eval_loss, msg);
    }
    if (rc == 0) {
        train_report_step(&a->report, &result, t->steps, evaluate ? &eval_loss : NULL);
    }
    return rc;
}

static int rank_train(struct alone_rank *a, struct bl_errmsg *msg)
{
    const struct train_alone *how = a->group->how;
    uint64_t steps =
        how->steps != 0 && how->steps < how->job->train.steps ? how->steps : how->job->train.steps;
    int rc = train_start(&a->rank, a->slots[0], msg);
    if (rc == 0) {
        rc = train_rank_load(&a->rank, a->slots[0], msg);
    }
    if (rc == 0) {
        rc = train_step_gather(&a->rank, a->slots[0], msg);
    }
    train_report_ranks(&a->report, a->rank.job, a->group->world);
    train_report_begin(&a->report);
    for (uint64_t step = 1; rc == 0 && step <= steps; step++) {
        rc = rank_step(a, step, msg);
    }
    struct bl_state_digest digest;
    if (rc == 0) {
        rc = train_rank_wait(&a->rank, msg);
    }
    if (rc == 0 && how->digest) {
        rc = train_digest(&a->rank, a->slots[steps % ALONE_SLOTS], &digest, msg);
    }
    if (rc == 0 && how->digest && a->index == 0) {
        char text[BL_STATE_DIGEST_TEXT_BYTES];
        bl_state_digest_format(&digest, text);
        printf("digest %s\n", text);
    }
    return rc;
}

static int rank_main(const struct alone_group *group, uint32_t index)
{
    struct bl_errmsg msg = {{0}};
    struct alone_rank a = {.group = group, .index = index, .report.metrics_fd = -1};
    int rc = rank_open(&a, &msg);
    if (rc == 0) {
        rc = rank_join(&a, &msg);
    }
    if (rc == 0) {
        rc = rank_train(&a, &msg);
    }
    rank_close(&a);
    if (rc != 0) {
        complain(index, group->world, &msg);
    }
    return exit_code(rc);
}

/* ---- the group ---- */

static int group_open(struct alone_group *g, struct bl_errmsg *msg)
{
    int nodes = g->how->nodes > 0 ? g->how->nodes : 1;
    bl_random_bytes(g->key, sizeof g->key);
    for (uint32_t i = 0; i < g->world; i++) {
        int rc = comm_listener_open(&g->listeners[i], NULL, msg);
        if (rc != 0) {
            return rc;
        }
        snprintf(g->nodes[i], sizeof g->nodes[i], "node%u",
                 (uint32_t)((uint64_t)i * (uint32_t)nodes / g->world));
        g->peers[i].endpoint = comm_listener_endpoint(g->listeners[i]);
        g->peers[i].node = g->nodes[i];
    }
    return 0;
}

static void group_close(struct alone_group *g)
{
    for (uint32_t i = 0; i < g->world; i++) {
        comm_listener_close(g->listeners[i]);
    }
}

/* In the child: keeps only what is its own, and ends with its parent. */
static int child_main(struct alone_group *g, uint32_t index, pid_t parent)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) {
        return 3;
    }
    for (uint32_t i = 0; i < g->world; i++) {
        if (i != index) { /* the endpoint strings must stay, so only the descriptors go */
            comm_listener_shut(g->listeners[i]);
        }
    }
    int code = rank_main(g, index);
    fflush(stdout);
    return code;
}

/* Waits for all; after the first that failed the others are ended. Its code. */
static int wait_children(pid_t *pids, uint32_t count)
{
    int code = 0;
    for (uint32_t left = count; left > 0;) {
        int status;
        pid_t pid = wait(&status);
        if (pid < 0) {
            return errno == EINTR ? 3 : code;
        }
        uint32_t who = 0;
        while (who < count && pids[who] != pid) {
            who++;
        }
        if (who == count) {
            continue;
        }
        pids[who] = 0;
        left--;
        if (code == 0 && status != 0) {
            code = WIFEXITED(status) ? WEXITSTATUS(status) : 3;
            if (WIFSIGNALED(status)) {
                fprintf(stderr, "belay-train: rank %u: killed by signal %d\n", who,
                        WTERMSIG(status));
            }
            for (uint32_t i = 0; i < count; i++) {
                if (pids[i] != 0) {
                    kill(pids[i], SIGKILL);
                }
            }
        }
    }
    return code;
}

static int group_run(struct alone_group *g, struct bl_errmsg *msg)
{
    pid_t pids[ALONE_RANKS_MAX] = {0}, parent = getpid();
    fflush(stdout);
    for (uint32_t i = 0; i < g->world; i++) {
        pids[i] = fork();
        if (pids[i] == 0) {
            _exit(child_main(g, i, parent));
        }
        if (pids[i] < 0) {
            bl_err_code(msg, -errno, "fork");
            complain(i, g->world, msg);
            for (uint32_t k = 0; k < i; k++) {
                kill(pids[k], SIGKILL);
            }
            wait_children(pids, i);
            return 3;
        }
    }
    return wait_children(pids, g->world);
}

int train_alone_run(const struct train_alone *how)
{
    struct bl_errmsg msg = {{0}};
    struct alone_group g = {.how = how, .world = how->ranks != 0 ? how->ranks : how->job->ranks};
    uint32_t copy = how->job->tp * how->job->pp;
    if (g.world > ALONE_RANKS_MAX || g.world > (uint64_t)how->job->lanes * copy) {
        bl_err(&msg, BL_ECONFIG, "%u ranks: at most %u for each of %u lanes, and %u in all",
               g.world, copy, how->job->lanes, ALONE_RANKS_MAX);
        complain(0, 1, &msg);
        return 2;
    }
    int rc = train_dry_fits(how->job, g.world, ALONE_SLOTS, train_dry_machine_bytes(), &msg);
    if (rc != 0) {
        complain(0, 1, &msg);
        return exit_code(rc);
    }
    if (g.world == 1) {
        return rank_main(&g, 0);
    }
    rc = group_open(&g, &msg);
    int code = exit_code(rc);
    if (rc != 0) {
        complain(0, 1, &msg);
    } else {
        code = group_run(&g, &msg);
    }
    group_close(&g);
    return code;
}
