/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The life of a rank under belayd. Generation by generation: own a part of the state, load it, join
 * the peers, step; when a new generation is called, or communication fails, park and ask for the
 * next plan. A rank never exits for what others did.
 *
 * Failpoints, in the order of a generation: (mid-load, in libbelay), mid-gather, (before-ready),
 * mid-forward, mid-backward, before-vote, voted-unapplied, mid-apply, mid-gather again.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/failpoint.h"
#include "trainer/identity.h"
#include "trainer/options.h"
#include "trainer/report.h"
#include "trainer/start.h"
#include "trainer/step.h"
#include "trainer/watcher.h"
#include "wire/belay.h"

#define EXIT_NUMERIC  1  /* a step whose gradient is not finite: started again, or no progress */
#define EXIT_CONFIG   2  /* not started again */
#define EXIT_COULDNOT 3  /* the same */
#define EXIT_RETRY    75 /* asks to be started again */

/* How a generation ended, beside error codes. */
#define LIFE_DONE 1 /* the last step is sealed */

struct life {
    struct belay *belay;
    struct belay_plan plan;
    const struct bl_job *job;
    struct train_rank rank;
    struct train_identity identity;
    struct train_report report;
    int has_metrics; /* report writes to the run's metrics.jsonl */
    struct comm_listener *listener;
    struct comm *comm;
    struct train_watcher watcher;
    struct comm_peer *peers; /* world entries */
    uint64_t unsealed;       /* step whose slot is not complete yet (a device copies); 0: none */
};

/* An error of libbelay as ours: the numbers are the same, the text is in the handle. */
static int belay_fail(struct life *life, int rc, const char *doing, struct bl_errmsg *msg)
{
    return rc >= 0 ? rc : bl_err(msg, rc, "%s: %s", doing, belay_error(life->belay));
}

/* ---- seals ---- */

/* Seals the newest slot once it is complete; `must`: waits for it. After an error of the device it
 * never is: then this process is of no more use. */
static int seal_newest(void *ctx, int must, struct bl_errmsg *msg)
{
    struct life *life = ctx;
    uint64_t step = life->unsealed;
    if (step == 0 || (!must && !train_rank_is_out(&life->rank))) {
        return 0;
    }
    int rc = train_rank_wait(&life->rank, msg);
    if (rc != 0) {
        return bl_err_in(msg, rc, "slot of step %llu", (unsigned long long)step);
    }
    life->unsealed = 0;
    return belay_fail(life, belay_slot_seal(life->belay, step), "seal", msg);
}

/* ---- a generation's start ---- */

/* Names the extents in the order in which slots hold them. */
static int name_extents(struct life *life, struct bl_errmsg *msg)
{
    struct train_shard *shard = &life->rank.shard;
    uint32_t tensor_count;
    const struct train_tensor *tensors = train_model_tensors(life->rank.model, &tensor_count);
    static const uint32_t kinds[TRAIN_PARTS] = {BL_KIND_PARAM, BL_KIND_MOMENT1, BL_KIND_MOMENT2};
    for (int part = 0; part < TRAIN_PARTS; part++) {
        for (uint32_t i = 0; i < shard->extent_count; i++) {
            struct train_extent *e = &shard->extents[i];
            const struct train_tensor *t = &tensors[e->tensor];
            char name[BL_TENSOR_NAME_MAX];
            train_part_name(name, t, (enum train_state_part)part);
            struct belay_tensor_desc desc = {.size = sizeof desc,
                                             .version = BELAY_VERSION_ABI,
                                             .name = name,
                                             .kind = kinds[part],
                                             .dtype = BL_F32,
                                             .dims = t->dims,
                                             .flat_lo = e->flat_lo,
                                             .flat_hi = e->flat_hi};
            memcpy(desc.shape, t->shape, t->dims * sizeof desc.shape[0]);
            memcpy(desc.box_lo, t->lo, t->dims * sizeof desc.box_lo[0]);
            memcpy(desc.box_hi, t->hi, t->dims * sizeof desc.box_hi[0]);
            int rc = belay_tensor(life->belay, &desc, NULL);
            if (rc != 0) {
                return belay_fail(life, rc, name, msg);
            }
            e->offset[part] = desc.slot_offset;
        }
    }
    return 0;
}

static int load_state(struct life *life, struct bl_errmsg *msg)
{
    const struct belay_plan *plan = &life->plan;
    struct train_grid grid; /* a plan that does not say has the job's layout */
    int rc = train_grid_make(&grid, plan->rank, plan->world, plan->tp ? plan->tp : life->job->tp,
                             plan->pp ? plan->pp : life->job->pp, msg);
    if (rc == 0) {
        rc = train_rank_place(&life->rank, &grid, msg);
    }
    if (rc == 0) {
        rc = name_extents(life, msg);
    }
    if (rc != 0) {
        return rc;
    }
    train_rank_forget(&life->rank); /* the slots may be others from now on */
    rc = belay_load(life->belay, life->plan.step);
    if (rc != 0 || !life->plan.fresh) {
        return belay_fail(life, rc, "load", msg);
    }
    void *slot;
    rc = belay_slot_begin(life->belay, 0, &slot);
    if (rc == 0) {
        rc = train_start(&life->rank, slot, msg);
        if (rc != 0) {
            return rc;
        }
        rc = belay_slot_seal(life->belay, 0);
    }
    return belay_fail(life, rc, "first state", msg);
}

static void note_collective(void *ctx, uint64_t sequence, uint32_t waiting)
{
    struct life *life = ctx;
    BL_IGNORE(belay_beat_collective(life->belay, sequence, waiting), "a beat is only a hint");
}

static int join_peers(struct life *life, struct bl_errmsg *msg)
{
    const struct belay_plan *plan = &life->plan;
    free(life->peers);
    life->peers = calloc(plan->world, sizeof *life->peers);
    if (life->peers == NULL) {
        return bl_err_code(msg, -ENOMEM, "%u peers", plan->world);
    }
    for (uint32_t r = 0; r < plan->world; r++) {
        life->peers[r].endpoint = plan->peers[r].endpoint;
        life->peers[r].node = plan->peers[r].node;
    }
    /* The daemon calls a rank hung long before; this only bounds a wait that nobody watches. */
    uint64_t op_ms = bl_time_scaled_ms(life->job->deadlines.step_ceil);
    const struct comm_config config = {
        .rank = plan->rank,
        .world = plan->world,
        .generation = plan->generation,
        .key = {plan->comm_key[0], plan->comm_key[1]},
        .peers = life->peers,
        .op_deadline_ms = op_ms < UINT32_MAX ? (uint32_t)op_ms : UINT32_MAX,
        .early_bytes_max = train_rank_early_bytes(&life->rank),
        .note = note_collective,
        .note_ctx = life,
    };
    int rc = comm_new(&life->comm, life->listener, &config, msg);
    if (rc != 0) {
        return rc;
    }
    train_watcher_guard(&life->watcher, life->comm);
    rc = train_rank_join(&life->rank, life->comm, msg);
    rc = rc != 0 ? rc : comm_connect(life->comm, plan->load_deadline_ms, msg);
    return rc != 0 ? rc : train_rank_attach(&life->rank, plan->load_deadline_ms, msg);
}

static void leave_peers(struct life *life)
{
    train_watcher_guard(&life->watcher, NULL);
    train_rank_leave(&life->rank);
    comm_free(life->comm);
    life->comm = NULL;
}

/* Rank 0 keeps the run's metrics; who that is may change with the generation. */
static void choose_reporter(struct life *life)
{
    struct bl_errmsg msg = {{0}};
    int is_first = life->plan.rank == 0;
    if (is_first && !life->has_metrics) {
        char path[BL_PATH_MAX + 16], events[BL_PATH_MAX + 16];
        BL_IGNORE(mkdir(life->job->run_dir, 0755), "it is usually there");
        snprintf(path, sizeof path, "%s/metrics.jsonl", life->job->run_dir);
        snprintf(events, sizeof events, "%s/tensorboard", life->job->run_dir);
        train_report_close(&life->report);
        if (train_report_open(&life->report, stdout, path, life->job->tensorboard ? events : NULL,
                              &msg) != 0) {
            fprintf(stderr, "belay-train: %s\n", msg.text); /* training goes on without */
        }
        life->has_metrics = 1;
    } else if (!is_first && life->has_metrics) {
        train_report_close(&life->report);
        life->has_metrics = 0;
    }
    life->report.out = is_first ? stdout : NULL;
    train_report_ranks(&life->report, life->job, life->plan.world);
    train_report_begin(&life->report);
}

/* ---- steps ---- */

static void set_metrics(struct life *life, const struct train_step_result *step)
{
    const struct belay_metrics metrics = {.size = sizeof metrics,
                                          .version = BELAY_VERSION_ABI,
                                          .step = step->step,
                                          .loss = step->loss,
                                          .lr = step->lr,
                                          .grad_norm = step->grad_norm,
                                          .tokens_per_s = life->report.tokens_per_s,
                                          .samples = step->step * life->job->train.global_batch};
    BL_IGNORE(belay_metrics_set(life->belay, &metrics), "numbers for people");
}

/* From the unanimous vote to the sealed slot: never cut short. */
static int take_step(struct life *life, const struct train_step_result *step, const void **ret_slot,
                     struct bl_errmsg *msg)
{
    const void *from;
    void *to;
    BL_IGNORE(BL_FAILPOINT("voted-unapplied"), "a voted step is applied");
    int rc = belay_slot_data(life->belay, step->step - 1, &from);
    if (rc == 0) {
        rc = belay_slot_begin(life->belay, step->step, &to);
    }
    if (rc != 0) {
        return belay_fail(life, rc, "slot", msg);
    }
    train_step_apply(&life->rank, step, from, to);
    *ret_slot = to;
    life->unsealed = step->step; /* complete at once on the CPU */
    return seal_newest(life, 0, msg);
}

static int evaluate(struct life *life, uint64_t step, double *ret_loss, struct bl_errmsg *msg)
{
    BL_IGNORE(belay_beat(life->belay, BELAY_SECTION_EVAL, step), "a beat is only a hint");
    return train_eval(&life->rank, ret_loss, msg);
}

/* 0: go on; LIFE_DONE; or an error. */
static int one_step(struct life *life, uint64_t n, struct bl_errmsg *msg)
{
    const struct bl_job_train *t = &life->job->train;
    struct train_step_result step;
    uint32_t flags = n == t->steps ? BELAY_VOTE_FINAL : 0, result = 0;
    const void *slot = NULL;
    double eval_loss;
    BL_IGNORE(belay_beat(life->belay, BELAY_SECTION_STEP, n), "a beat is only a hint");
    int rc = train_step_gradient(&life->rank, n, &step, msg);
    if (rc == 0) {
        rc = seal_newest(life, 1, msg);
    }
    if (rc == 0) {
        rc = BL_FAILPOINT("before-vote");
    }
    if (rc != 0) {
        return rc;
    }
    if (life->rank.ledger != NULL) {
        fflush(life->rank.ledger);
    }
    rc = belay_vote(life->belay, n, flags, &result);
    if (rc != 0) {
        return belay_fail(life, rc, "vote", msg);
    }
    rc = take_step(life, &step, &slot, msg);
    int last = (result & (BELAY_VOTE_STOP | BELAY_VOTE_FINAL)) != 0;
    int eval = t->eval_every != 0 && n % t->eval_every == 0;
    if (rc == 0 && (eval || !last)) {
        rc = train_step_gather(&life->rank, slot, msg);
    }
    if (rc == 0 && eval) {
        rc = evaluate(life, n, &eval_loss, msg);
    }
    /* The step stands, whatever came after it; when it is done again its line is written again. */
    train_report_step(&life->report, &step, life->job->train.steps,
                      rc == 0 && eval ? &eval_loss : NULL);
    if (life->plan.rank == 0) {
        set_metrics(life, &step);
    }
    return rc != 0 ? rc : last ? LIFE_DONE : 0;
}

/* One generation from its plan to its end: LIFE_DONE or an error. */
static int generation_run(struct life *life, struct bl_errmsg *msg)
{
    const void *slot;
    BL_IGNORE(belay_beat(life->belay, BELAY_SECTION_LOAD, life->plan.step), "only a hint");
    int rc = load_state(life, msg);
    if (rc == 0) {
        rc = join_peers(life, msg);
    }
    if (rc == 0) {
        rc = belay_fail(life, belay_slot_data(life->belay, life->plan.step, &slot), "slot", msg);
    }
    if (rc == 0) {
        rc = train_rank_load(&life->rank, slot, msg);
    }
    if (rc == 0) {
        rc = train_step_gather(&life->rank, slot, msg);
    }
    if (rc == 0) { /* the failpoint before-ready is in there */
        rc = belay_fail(life, belay_ready(life->belay), "ready", msg);
    }
    if (rc != 0) {
        return rc;
    }
    choose_reporter(life);
    for (uint64_t n = life->plan.step + 1; rc == 0 && n <= life->job->train.steps; n++) {
        rc = one_step(life, n, msg);
    }
    return rc == 0 ? LIFE_DONE : rc; /* a run that was at its end already */
}

/* ---- generations ---- */

/* Gives up this generation and waits for the next plan. */
static int next_generation(struct life *life, int rc, const struct bl_errmsg *why,
                           struct bl_errmsg *msg)
{
    if (life->comm !=
        NULL) { /* a device's queue may stand in front of a message that never comes */
        comm_abort(life->comm);
    }
    leave_peers(life);
    fprintf(stderr, "belay-train: generation %llu: %s; parks\n",
            (unsigned long long)life->plan.generation, why->text);
    if (rc != BL_EGEN && rc != BL_EABORTED) { /* those two are news from the daemon itself */
        BL_IGNORE(belay_comm_failed(life->belay, why->text), "the next call tells as well");
    }
    rc = seal_newest(life, 1, msg); /* what was applied counts in the inventory */
    if (rc != 0) {
        return rc;
    }
    life->plan.size = sizeof life->plan;
    rc = belay_next(life->belay, &life->plan);
    if (rc == 0) {
        train_watcher_arm(&life->watcher, belay_event_fd(life->belay));
    }
    return belay_fail(life, rc, "next generation", msg);
}

/* This rank's work is done. 0: the daemon let go, and the handle is gone; BL_EGEN: what it holds is
 * wanted in one more generation. */
static int leave(struct life *life, struct bl_errmsg *msg)
{
    BL_IGNORE(belay_beat(life->belay, BELAY_SECTION_LEAVE, 0), "a beat is only a hint");
    int rc = seal_newest(life, 1, msg);
    if (rc != 0) {
        return rc;
    }
    rc = belay_leave(life->belay, 0);
    if (rc == 0) {
        life->belay = NULL;
        return 0;
    }
    return belay_fail(life, rc, "leave", msg);
}

/* Until the daemon lets this rank go: an exit code. */
static int live(struct life *life)
{
    for (;;) {
        struct bl_errmsg msg = {{0}};
        int rc = generation_run(life, &msg);
        if (rc == BL_ENUMERIC || rc == BL_EDEVICE) {
            fprintf(stderr, "belay-train: %s\n", msg.text);
            return rc == BL_ENUMERIC ? EXIT_NUMERIC : EXIT_RETRY;
        }
        do {
            struct bl_errmsg why = msg;
            rc = rc == LIFE_DONE || rc == BL_ESTOPPED ? leave(life, &msg)
                                                      : next_generation(life, rc, &why, &msg);
            if (rc == 0 && life->belay == NULL) {
                return 0;
            }
        } while (rc == BL_EGEN || rc == BL_ESTOPPED);
        if (rc != 0) {
            fprintf(stderr, "belay-train: %s\n", msg.text);
            return rc == BELAY_EREFUSED ? EXIT_CONFIG : EXIT_RETRY;
        }
    }
}

static int open_ledger(struct train_rank *rank, struct bl_errmsg *msg)
{
    const char *prefix = getenv("BELAY_TRAIN_LEDGER");
    if (prefix == NULL) {
        return 0;
    }
    char path[BL_PATH_MAX + 32];
    snprintf(path, sizeof path, "%s.%d", prefix, (int)getpid());
    rank->ledger = fopen(path, "ae");
    return rank->ledger != NULL ? 0 : bl_err_code(msg, -errno, "ledger %s", path);
}

/* All that needs no daemon. */
static int prepare(struct life *life, struct bl_errmsg *msg)
{
    life->report.metrics_fd = -1;
    const char *local = getenv("BELAY_LOCAL_RANK");
    uint32_t local_rank = local != NULL ? (uint32_t)strtoul(local, NULL, 10) : 0;
    int rc = train_rank_open(&life->rank, life->job, local_rank, 0, msg);
    if (rc == 0) {
        fprintf(stderr, "belay-train: %s\n", life->rank.backend.why);
    }
    life->rank.slot_ready = seal_newest;
    life->rank.slot_ctx = life;
    if (rc == 0) {
        rc = open_ledger(&life->rank, msg);
    }
    if (rc == 0) {
        rc = train_identity(&life->rank, &life->identity, msg);
    }
    if (rc == 0) {
        rc = comm_listener_open(&life->listener, getenv("BELAY_COMM_ADDRESS"), msg);
    }
    return rc == 0 ? train_watcher_start(&life->watcher, msg) : rc;
}

static int join_run(struct life *life)
{
    const struct belay_config config = {.size = sizeof config,
                                        .version = BELAY_VERSION_ABI,
                                        .function_id = life->identity.function_id,
                                        .probe = life->identity.probe,
                                        .endpoint = comm_listener_endpoint(life->listener)};
    life->plan.size = sizeof life->plan;
    life->plan.version = BELAY_VERSION_ABI;
    int rc = belay_join(&config, &life->belay, &life->plan);
    if (rc != 0) {
        fprintf(stderr, "belay-train: join: %s\n", belay_error(life->belay));
        return rc;
    }
    train_watcher_arm(&life->watcher, belay_event_fd(life->belay));
    return 0;
}

int train_supervised_main(const char *job_path)
{
    static struct life life;
    struct bl_errmsg msg = {{0}};
    const char *path = job_path != NULL ? job_path : getenv("BELAY_JOB_FILE");
    if (path == NULL) {
        fputs("belay-train: neither --job nor BELAY_JOB_FILE names the job\n", stderr);
        return EXIT_CONFIG;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    life.job = train_job_load(path);
    if (life.job == NULL) {
        return EXIT_CONFIG;
    }
    int rc = prepare(&life, &msg);
    if (rc != 0) {
        fprintf(stderr, "belay-train: %s\n", msg.text);
        return rc == BL_ECONFIG || rc == BL_ENOTBUILT ? EXIT_CONFIG : EXIT_COULDNOT;
    }
    rc = join_run(&life);
    if (rc == BELAY_ESTOPPED && life.belay != NULL) { /* the run ended before this rank began */
        rc = leave(&life, &msg);
        return rc == 0 ? 0 : EXIT_RETRY;
    }
    if (rc != 0) {
        return rc == BELAY_EREFUSED ? EXIT_CONFIG : EXIT_RETRY;
    }
    int code = live(&life);
    train_watcher_stop(&life.watcher);
    leave_peers(&life);
    return code;
}
