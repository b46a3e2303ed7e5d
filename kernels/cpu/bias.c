/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is the same for each row or for each sequence: biases y[N,O] += b[O], and learned positions
 * out[B,T,C] += weight[T,C]. Backward adds over rows, or over sequences, in order; it is cut by
 * columns.
 */
#include "kernels/kern.h"

#include <string.h>

#include "kernels/cpu/split.h"

#define COLUMNS 64

struct bias_job {
    float *out; /* forward: y; backward: the gradient of `in` */
    const float *in;
    uint32_t n, c;
    uint32_t first, period; /* row n adds row first + n mod period of `in` */
    int add;
    struct kern_split split;
};

static void forward_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct bias_job *job = arg;
    size_t end = kern_split_end(&job->split, task);
    for (size_t row = kern_split_first(&job->split, task); row < end; row++) {
        const float *in = job->in + (size_t)(job->first + row % job->period) * job->c;
        float *out = job->out + row * job->c;
        for (size_t i = 0; i < job->c; i++) {
            out[i] += in[i];
        }
    }
}

void kern_bias_forward(struct kern_pool *pool, float *y, const float *bias, uint32_t n, uint32_t o)
{
    kern_position_forward(pool, y, bias, n, o, 1, 0);
}

void kern_position_forward(struct kern_pool *pool, float *out, const float *weight, uint32_t n,
                           uint32_t c, uint32_t t_count, uint32_t pos)
{
    struct bias_job job = {.out = out,
                           .in = weight,
                           .n = n,
                           .c = c,
                           .first = pos,
                           .period = t_count,
                           .split = kern_split_make(n, kern_split_rows(c))};
    kern_pool_run(pool, forward_task, &job, kern_split_tasks(&job.split));
}

static void bias_backward_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct bias_job *job = arg;
    size_t first = kern_split_first(&job->split, task);
    size_t width = kern_split_end(&job->split, task) - first;
    float sum[COLUMNS] = {0};
    for (size_t row = 0; row < job->n; row++) {
        const float *in = job->in + row * job->c + first;
        for (size_t i = 0; i < width; i++) {
            sum[i] += in[i];
        }
    }
    for (size_t i = 0; i < width; i++) {
        float *to = job->out + first + i;
        *to = job->add ? *to + sum[i] : sum[i];
    }
}

void kern_bias_backward(struct kern_pool *pool, float *dbias, const float *dy, uint32_t n,
                        uint32_t o, int add)
{
    struct bias_job job = {
        .out = dbias, .in = dy, .n = n, .c = o, .add = add, .split = {.count = o, .each = COLUMNS}};
    kern_pool_run(pool, bias_backward_task, &job, kern_split_tasks(&job.split));
}

static void position_backward_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct bias_job *job = arg;
    size_t end = kern_split_end(&job->split, task);
    for (size_t t = kern_split_first(&job->split, task); t < end; t++) {
        float *to = job->out + t * job->c;
        for (size_t row = t; row < job->n; row += job->period) {
            const float *in = job->in + row * job->c;
            for (size_t i = 0; i < job->c; i++) {
                to[i] = row == t && !job->add ? in[i] : to[i] + in[i];
            }
        }
    }
}

void kern_position_backward(struct kern_pool *pool, float *dweight, const float *dout, uint32_t n,
                            uint32_t c, uint32_t t_count, uint32_t rows, int add)
{
    struct bias_job job = {.out = dweight,
                           .in = dout,
                           .n = n,
                           .c = c,
                           .period = t_count,
                           .add = add,
                           .split = kern_split_make(t_count, kern_split_rows(c))};
    kern_pool_run(pool, position_backward_task, &job, kern_split_tasks(&job.split));
    if (!add) {
        memset(dweight + (size_t)t_count * c, 0, (size_t)(rows - t_count) * c * sizeof(float));
    }
}
