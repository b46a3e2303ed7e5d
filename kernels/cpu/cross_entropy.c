/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Cross-entropy over rows of logits[N,V]: loss = log(sum exp(x - top)) - (x[target] - top); the
 * gradient softmax - onehot replaces the logits.
 */
#include "kernels/kern.h"

#include <string.h>

#include "kernels/cpu/split.h"
#include "kernels/fmath.h"

struct cross_entropy_job {
    float *logits;
    double *losses;
    const int32_t *targets;
    uint32_t vocab;
    int backward;
    struct kern_split split;
};

static float row_top(const float *x, size_t count)
{
    kern_v8f top = kern_v8f_all(x[0]);
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

static double row_loss(float *x, size_t vocab, int32_t target, int backward)
{
    float top = row_top(x, vocab);
    float at_target = x[target] - top;
    double sum = 0.0;
    for (size_t i = 0; i < vocab; i += KERN_BLOCK) {
        size_t rest = vocab - i;
        sum += (double)block_exp(x + i, rest < KERN_BLOCK ? rest : KERN_BLOCK, top, backward);
    }
    if (backward) {
        float inverse = (float)(1.0 / sum);
        for (size_t i = 0; i < vocab; i++) {
            x[i] *= inverse;
        }
        x[target] -= 1.0f;
    }
    return kern_log(sum) - (double)at_target;
}

static void cross_entropy_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct cross_entropy_job *job = arg;
    size_t end = kern_split_end(&job->split, task);
    for (size_t n = kern_split_first(&job->split, task); n < end; n++) {
        float *x = job->logits + n * job->vocab;
        job->losses[n] = 0.0;
        if (job->targets[n] >= 0) {
            job->losses[n] = row_loss(x, job->vocab, job->targets[n], job->backward);
        } else if (job->backward) {
            memset(x, 0, job->vocab * sizeof *x);
        }
    }
}

double kern_cross_entropy(struct kern_pool *pool, float *logits, double *losses,
                          const int32_t *targets, uint32_t n, uint32_t vocab, int backward,
                          uint64_t *ret_count)
{
    struct cross_entropy_job job = {logits, losses,   targets,
                                    vocab,  backward, kern_split_make(n, kern_split_rows(vocab))};
    kern_pool_run(pool, cross_entropy_task, &job, kern_split_tasks(&job.split));
    double sum = 0.0;
    uint64_t count = 0;
    for (uint32_t i = 0; i < n; i++) {
        sum += losses[i];
        count += targets[i] >= 0;
    }
    *ret_count = count;
    return sum;
}
