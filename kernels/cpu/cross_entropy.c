/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Cross-entropy over rows of logits[N,V]: loss = log(sum exp(x - top)) - (x[target] - top); the
 * gradient softmax - onehot replaces the logits. A row goes in three phases, between which ranks
 * that have slices of the vocabulary exchange what they found:
 *
 *     top      the largest logit
 *     sum      the sum of exponentials, and the target's logit, both given the top
 *     finish   loss and gradient, given the sums
 */
#include "kernels/kern.h"

#include <math.h>
#include <string.h>

#include "kernels/cpu/split.h"
#include "kernels/fmath.h"

struct cross_entropy_job {
    float *logits; /* [N, columns] */
    const int32_t *targets;
    uint32_t lo, columns; /* of the vocabulary, here */
    int backward;
    const float *seen; /* logits, of top */
    float *ret_tops;
    const float *tops;
    double *ret_sums; /* [N,2] */
    const double *sums;
    double *losses;
    struct kern_split split;
};

static float row_top(const float *x, size_t count)
{
    kern_v8f top = kern_v8f_all(count > 0 ? x[0] : -INFINITY);
    size_t i = 0;
    for (; i + KERN_LANES <= count; i += KERN_LANES) {
        top = kern_v8f_max(kern_v8f_load(x + i), top);
    }
    if (i < count) {
        top = kern_v8f_max(kern_v8f_load_part(x + i, count - i, x[0]), top);
    }
    return kern_v8f_top(top);
}

/* Sum of exp(x - top) over at most KERN_BLOCK elements, in lanes; stored over x if `store`. */
static float block_exp(float *x, size_t count, float top, int store)
{
    kern_v8f sum = kern_v8f_all(0.0f), vtop = kern_v8f_all(top);
    size_t i = 0;
    for (; i + KERN_LANES <= count; i += KERN_LANES) {
        kern_v8f e = kern_v8f_exp(kern_v8f_load(x + i) - vtop);
        sum += e;
        if (store) {
            kern_v8f_store(x + i, e);
        }
    }
    if (i < count) {
        kern_v8f e = kern_v8f_exp(kern_v8f_load_part(x + i, count - i, 0.0f) - vtop);
        for (size_t j = 0; i + j < count; j++) {
            sum[j] += e[j];
            if (store) {
                x[i + j] = e[j];
            }
        }
    }
    return kern_v8f_sum(sum);
}

/* The place of a target in the row's slice, or -1. */
static int64_t place_of(const struct cross_entropy_job *job, size_t n)
{
    int64_t at = (int64_t)job->targets[n] - job->lo;
    return job->targets[n] >= 0 && at >= 0 && at < job->columns ? at : -1;
}

static void row_sum(const struct cross_entropy_job *job, size_t n, float top, double ret[2])
{
    float *x = job->logits + n * job->columns;
    int64_t target = place_of(job, n);
    double sum = 0.0;
    ret[1] = target < 0 ? 0.0 : (double)(x[target] - top);
    for (size_t i = 0; i < job->columns; i += KERN_BLOCK) {
        size_t rest = job->columns - i;
        sum += (double)block_exp(x + i, rest < KERN_BLOCK ? rest : KERN_BLOCK, top, job->backward);
    }
    ret[0] = sum;
}

static void row_finish(const struct cross_entropy_job *job, size_t n, const double sums[2])
{
    float *x = job->logits + n * job->columns;
    int64_t target = place_of(job, n);
    if (job->backward) {
        float inverse = (float)(1.0 / sums[0]);
        for (size_t i = 0; i < job->columns; i++) {
            x[i] *= inverse;
        }
        if (target >= 0) {
            x[target] -= 1.0f;
        }
    }
    job->losses[n] = kern_log(sums[0]) - sums[1];
}

/* A row whose target does not count. */
static void row_ignore(const struct cross_entropy_job *job, size_t n)
{
    job->losses[n] = 0.0;
    if (job->backward) {
        memset(job->logits + n * job->columns, 0, job->columns * sizeof *job->logits);
    }
}

static void whole_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct cross_entropy_job *job = arg;
    size_t end = kern_split_end(&job->split, task);
    for (size_t n = kern_split_first(&job->split, task); n < end; n++) {
        if (job->targets[n] < 0) {
            row_ignore(job, n);
            continue;
        }
        double sums[2];
        row_sum(job, n, row_top(job->logits + n * job->columns, job->columns), sums);
        row_finish(job, n, sums);
    }
}

static void top_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct cross_entropy_job *job = arg;
    size_t end = kern_split_end(&job->split, task);
    for (size_t n = kern_split_first(&job->split, task); n < end; n++) {
        job->ret_tops[n] =
            job->targets[n] < 0 ? 0.0f : row_top(job->seen + n * job->columns, job->columns);
    }
}

static void sum_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct cross_entropy_job *job = arg;
    size_t end = kern_split_end(&job->split, task);
    for (size_t n = kern_split_first(&job->split, task); n < end; n++) {
        job->ret_sums[2 * n] = job->ret_sums[2 * n + 1] = 0.0;
        if (job->targets[n] >= 0) {
            row_sum(job, n, job->tops[n], job->ret_sums + 2 * n);
        }
    }
}

static void finish_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct cross_entropy_job *job = arg;
    size_t end = kern_split_end(&job->split, task);
    for (size_t n = kern_split_first(&job->split, task); n < end; n++) {
        if (job->targets[n] < 0) {
            row_ignore(job, n);
        } else {
            row_finish(job, n, job->sums + 2 * n);
        }
    }
}

static void run(struct kern_pool *pool, kern_task_fn *fn, struct cross_entropy_job *job, uint32_t n)
{
    job->split = kern_split_make(n, kern_split_rows(job->columns));
    kern_pool_run(pool, fn, job, kern_split_tasks(&job->split));
}

static double losses_sum(const double *losses, const int32_t *targets, uint32_t n,
                         uint64_t *ret_count)
{
    double sum = 0.0;
    uint64_t count = 0;
    for (uint32_t i = 0; i < n; i++) {
        sum += losses[i];
        count += targets[i] >= 0;
    }
    *ret_count = count;
    return sum;
}

double kern_cross_entropy(struct kern_pool *pool, float *logits, double *losses,
                          const int32_t *targets, uint32_t n, uint32_t vocab, int backward,
                          uint64_t *ret_count)
{
    struct cross_entropy_job job = {.logits = logits,
                                    .targets = targets,
                                    .columns = vocab,
                                    .backward = backward,
                                    .losses = losses};
    run(pool, whole_task, &job, n);
    return losses_sum(losses, targets, n, ret_count);
}

void kern_cross_entropy_top(struct kern_pool *pool, float *tops, const float *logits,
                            const int32_t *targets, uint32_t n, uint32_t columns)
{
    struct cross_entropy_job job = {
        .seen = logits, .targets = targets, .columns = columns, .ret_tops = tops};
    run(pool, top_task, &job, n);
}

void kern_cross_entropy_sum(struct kern_pool *pool, double *sums, float *logits, const float *tops,
                            const int32_t *targets, uint32_t n, uint32_t lo, uint32_t columns,
                            int backward)
{
    struct cross_entropy_job job = {.logits = logits,
                                    .targets = targets,
                                    .lo = lo,
                                    .columns = columns,
                                    .backward = backward,
                                    .tops = tops,
                                    .ret_sums = sums};
    run(pool, sum_task, &job, n);
}

double kern_cross_entropy_finish(struct kern_pool *pool, float *logits, double *losses,
                                 const double *sums, const int32_t *targets, uint32_t n,
                                 uint32_t lo, uint32_t columns, int backward, uint64_t *ret_count)
{
    struct cross_entropy_job job = {.logits = logits,
                                    .targets = targets,
                                    .lo = lo,
                                    .columns = columns,
                                    .backward = backward,
                                    .sums = sums,
                                    .losses = losses};
    run(pool, finish_task, &job, n);
    return losses_sum(losses, targets, n, ret_count);
}
