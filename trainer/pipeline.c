/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/pipeline.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define COST_FORWARD  1u
#define COST_BACKWARD 2u

/* The order of a stage's forwards, or of its backwards, walked one by one. */
struct pipe_walk {
    uint32_t first, size; /* of the group of micro-batches */
    uint32_t chunk;       /* counted from the side where the walk begins */
    uint32_t in_group;
    uint64_t done;
};

/* One stage in the run. */
struct pipe_stage {
    struct pipe_walk forward, backward;
    uint64_t until; /* when the operation in work ends; 0: none is */
    uint32_t chunk; /* of it */
    int is_backward;
};

struct pipe_run {
    uint32_t pp, chunks, micros;
    int backward;
    struct pipe_stage *stages;              /* pp */
    uint32_t *forward_done, *backward_done; /* by virtual stage: micro-batches that went through */
    uint64_t now, left;                     /* operations that are not done */
    struct train_pipeline *out;             /* where the operations of out->stage go */
    uint32_t *free_sets, *set_of;           /* a stack; by chunk and micro-batch mod bound */
    uint32_t free_count, bound;
};

uint32_t train_pipeline_bound(uint32_t pp, uint32_t stage, uint32_t chunks)
{
    return chunks == 1 ? pp - stage : 2 * (pp - stage - 1) + (chunks - 1) * pp + 1;
}

double train_pipeline_bubble(const struct train_pipeline *pipeline)
{
    return pipeline->span == 0 ? 0 : 1.0 - (double)pipeline->busy / (double)pipeline->span;
}

static void walk_begin(const struct pipe_run *run, struct pipe_walk *walk, uint32_t first)
{
    uint32_t left = run->micros - first;
    walk->first = first;
    walk->size = left < run->pp ? left : run->pp;
    walk->chunk = walk->in_group = 0;
}

static void walk_on(const struct pipe_run *run, struct pipe_walk *walk)
{
    walk->done++;
    if (++walk->in_group < walk->size) {
        return;
    }
    walk->in_group = 0;
    if (++walk->chunk == run->chunks) {
        walk_begin(run, walk, walk->first + walk->size);
    }
}

static int walk_is_over(const struct pipe_run *run, const struct pipe_walk *walk)
{
    return walk->done == (uint64_t)run->chunks * run->micros;
}

/* ---- what may begin ---- */

static int can_forward(const struct pipe_run *run, uint32_t stage)
{
    const struct pipe_stage *s = &run->stages[stage];
    uint32_t v = s->forward.chunk * run->pp + stage, micro = s->forward.first + s->forward.in_group;
    if (walk_is_over(run, &s->forward)) {
        return 0;
    }
    if (run->backward &&
        s->forward.done - s->backward.done >= train_pipeline_bound(run->pp, stage, run->chunks)) {
        return 0;
    }
    return v == 0 || run->forward_done[v - 1] > micro;
}

static int can_backward(const struct pipe_run *run, uint32_t stage)
{
    const struct pipe_stage *s = &run->stages[stage];
    uint32_t chunk = run->chunks - 1 - s->backward.chunk;
    uint32_t v = chunk * run->pp + stage, micro = s->backward.first + s->backward.in_group;
    if (!run->backward || walk_is_over(run, &s->backward) || run->forward_done[v] <= micro) {
        return 0;
    }
    return v + 1 == run->pp * run->chunks || run->backward_done[v + 1] > micro;
}

/* ---- the operations of the wanted stage ---- */

static void note(struct pipe_run *run, uint32_t micro, uint32_t chunk, int backward)
{
    struct train_pipeline *out = run->out;
    uint32_t set = 0;
    if (run->backward) {
        uint32_t *kept = &run->set_of[(uint64_t)chunk * run->bound + micro % run->bound];
        if (backward) {
            set = *kept;
            run->free_sets[run->free_count++] = set;
        } else {
            set = run->free_count > 0 ? run->free_sets[--run->free_count] : out->sets++;
            *kept = set;
        }
    }
    out->ops[out->op_count++] = (struct train_pipe_op){
        .micro = micro, .chunk = (uint16_t)chunk, .backward = backward != 0, .set = set};
    out->busy += backward ? COST_BACKWARD : COST_FORWARD;
}

/* ---- the run ---- */

static void finish(struct pipe_run *run, uint32_t stage)
{
    struct pipe_stage *s = &run->stages[stage];
    uint32_t v = s->chunk * run->pp + stage;
    if (s->is_backward) {
        run->backward_done[v]++;
    } else {
        run->forward_done[v]++;
    }
    s->until = 0;
    run->left--;
}

static void begin(struct pipe_run *run, uint32_t stage)
{
    struct pipe_stage *s = &run->stages[stage];
    s->is_backward = !can_forward(run, stage);
    if (s->is_backward && !can_backward(run, stage)) {
        return;
    }
    struct pipe_walk *walk = s->is_backward ? &s->backward : &s->forward;
    s->chunk = s->is_backward ? run->chunks - 1 - walk->chunk : walk->chunk;
    s->until = run->now + (s->is_backward ? COST_BACKWARD : COST_FORWARD);
    if (stage == run->out->stage) {
        note(run, walk->first + walk->in_group, s->chunk, s->is_backward);
    }
    walk_on(run, walk);
}

/* Ends what ends now, then begins what can; moves to the next end. */
static void tick(struct pipe_run *run)
{
    uint64_t next = UINT64_MAX;
    for (uint32_t stage = 0; stage < run->pp; stage++) {
        if (run->stages[stage].until == run->now && run->now != 0) {
            finish(run, stage);
        }
    }
    for (uint32_t stage = 0; stage < run->pp; stage++) {
        struct pipe_stage *s = &run->stages[stage];
        if (s->until == 0) {
            begin(run, stage);
        }
        if (s->until != 0 && s->until < next) {
            next = s->until;
        }
    }
    BL_ASSERT(next != UINT64_MAX || run->left == 0); /* the head of pipeline.h says why */
    run->now = run->left == 0 ? run->now : next;
}

static int run_take(struct pipe_run *run, uint64_t ops, struct bl_errmsg *msg)
{
    uint64_t virtual_stages = (uint64_t)run->pp * run->chunks;
    run->stages = calloc(run->pp, sizeof *run->stages);
    run->forward_done = calloc(virtual_stages, sizeof *run->forward_done);
    run->backward_done = calloc(virtual_stages, sizeof *run->backward_done);
    run->free_sets = calloc(run->bound, sizeof *run->free_sets);
    run->set_of = calloc((uint64_t)run->bound * run->chunks, sizeof *run->set_of);
    run->out->ops = calloc(ops, sizeof *run->out->ops);
    if (run->stages == NULL || run->forward_done == NULL || run->backward_done == NULL ||
        run->free_sets == NULL || run->set_of == NULL || run->out->ops == NULL) {
        return bl_err_code(msg, -ENOMEM, "schedule of %llu operations", (unsigned long long)ops);
    }
    return 0;
}

static void run_close(struct pipe_run *run)
{
    free(run->stages);
    free(run->forward_done);
    free(run->backward_done);
    free(run->free_sets);
    free(run->set_of);
}

int train_pipeline_make(struct train_pipeline *ret, uint32_t pp, uint32_t stage, uint32_t chunks,
                        uint32_t micros, int backward, struct bl_errmsg *msg)
{
    uint64_t per_stage = (uint64_t)chunks * micros * (backward ? 2 : 1);
    if (pp == 0 || stage >= pp || chunks == 0 || micros == 0 ||
        (uint64_t)pp * chunks > TRAIN_PIPELINE_STAGES_MAX || per_stage > TRAIN_PIPELINE_OPS_MAX) {
        return bl_err(msg, BL_ELIMIT,
                      "a pipeline of %u stages x %u chunks for %u micro-batches: at most %u chunks "
                      "in all, and %u operations of a stage",
                      pp, chunks, micros, TRAIN_PIPELINE_STAGES_MAX, TRAIN_PIPELINE_OPS_MAX);
    }
    struct train_pipeline out = {
        .pp = pp, .stage = stage, .chunks = chunks, .micros = micros, .sets = backward ? 0 : 1};
    struct pipe_run run = {.pp = pp,
                           .chunks = chunks,
                           .micros = micros,
                           .backward = backward,
                           .left = per_stage * pp,
                           .out = &out,
                           .bound = train_pipeline_bound(pp, stage, chunks)};
    int rc = run_take(&run, per_stage, msg);
    if (rc != 0) {
        free(out.ops);
    } else {
        for (uint32_t i = 0; i < pp; i++) {
            walk_begin(&run, &run.stages[i].forward, 0);
            walk_begin(&run, &run.stages[i].backward, 0);
        }
        while (run.left > 0) {
            tick(&run);
        }
        out.span = run.now;
        *ret = out;
    }
    run_close(&run);
    return rc;
}

void train_pipeline_close(struct train_pipeline *pipeline)
{
    free(pipeline->ops);
    memset(pipeline, 0, sizeof *pipeline);
}
