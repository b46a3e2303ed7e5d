/* SPDX-License-Identifier: Apache-2.0 */
/*
 * GELU in its tanh form, elementwise. As (1 + tanh u) / 2 = sigmoid(2 u), it is x sigmoid(2 u) with
 * u = sqrt(2 / pi) (x + 0.044715 x^3).
 */
#include "kernels/kern.h"

#include "kernels/cpu/split.h"
#include "kernels/fmath.h"

#define EACH 8192

#define TWO_ROOT 1.59576912f /* 2 sqrt(2 / pi) */
#define CUBIC    0.044715f

struct gelu_job {
    float *out;
    const float *dout, *x;
    struct kern_split split;
};

KERN_INLINE kern_v8f gate(kern_v8f x)
{
    kern_v8f u = (x + kern_v8f_all(CUBIC) * (x * (x * x))) * kern_v8f_all(TWO_ROOT);
    return kern_v8f_all(1.0f) / (kern_v8f_all(1.0f) + kern_v8f_exp(-u));
}

KERN_INLINE kern_v8f backward_lanes(kern_v8f dout, kern_v8f x)
{
    kern_v8f one = kern_v8f_all(1.0f), s = gate(x);
    kern_v8f slope = (one + kern_v8f_all(3.0f * CUBIC) * (x * x)) * kern_v8f_all(TWO_ROOT);
    return dout * (s + (x * slope) * (s * (one - s)));
}

static void forward_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct gelu_job *job = arg;
    size_t i = kern_split_first(&job->split, task), end = kern_split_end(&job->split, task);
    for (; i + KERN_LANES <= end; i += KERN_LANES) {
        kern_v8f x = kern_v8f_load(job->x + i);
        kern_v8f_store(job->out + i, x * gate(x));
    }
    if (i < end) {
        kern_v8f x = kern_v8f_load_part(job->x + i, end - i, 0.0f);
        kern_v8f_store_part(job->out + i, x * gate(x), end - i);
    }
}

void kern_gelu_forward(struct kern_pool *pool, float *out, const float *x, size_t count)
{
    struct gelu_job job = {.out = out, .x = x, .split = kern_split_make(count, EACH)};
    kern_pool_run(pool, forward_task, &job, kern_split_tasks(&job.split));
}

static void backward_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct gelu_job *job = arg;
    size_t i = kern_split_first(&job->split, task), end = kern_split_end(&job->split, task);
    for (; i + KERN_LANES <= end; i += KERN_LANES) {
        kern_v8f_store(job->out + i,
                       backward_lanes(kern_v8f_load(job->dout + i), kern_v8f_load(job->x + i)));
    }
    if (i < end) {
        kern_v8f dx = backward_lanes(kern_v8f_load_part(job->dout + i, end - i, 0.0f),
                                     kern_v8f_load_part(job->x + i, end - i, 0.0f));
        kern_v8f_store_part(job->out + i, dx, end - i);
    }
}

void kern_gelu_backward(struct kern_pool *pool, float *dx, const float *dout, const float *x,
                        size_t count)
{
    struct gelu_job job = {.out = dx, .dout = dout, .x = x, .split = kern_split_make(count, EACH)};
    kern_pool_run(pool, backward_task, &job, kern_split_tasks(&job.split));
}
