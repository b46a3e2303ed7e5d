/* SPDX-License-Identifier: Apache-2.0 */
/*
 * SwiGLU, elementwise: out = gate sigmoid(gate) up.
 */
#include "kernels/kern.h"

#include "kernels/cpu/split.h"
#include "kernels/fmath.h"

#define EACH 8192

struct swiglu_job {
    float *out, *dgate, *dup;
    const float *dout, *gate, *up;
    struct kern_split split;
};

KERN_INLINE kern_v8f sigmoid(kern_v8f x)
{
    return kern_v8f_all(1.0f) / (kern_v8f_all(1.0f) + kern_v8f_exp(-x));
}

KERN_INLINE kern_v8f forward_lanes(kern_v8f gate, kern_v8f up)
{
    return (gate * sigmoid(gate)) * up;
}

KERN_INLINE void backward_lanes(kern_v8f *dgate, kern_v8f *dup, kern_v8f dout, kern_v8f gate,
                                kern_v8f up)
{
    kern_v8f one = kern_v8f_all(1.0f), s = sigmoid(gate);
    *dup = dout * (gate * s);
    *dgate = (dout * up) * (s * (one + gate * (one - s)));
}

static void forward_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct swiglu_job *job = arg;
    size_t i = kern_split_first(&job->split, task), end = kern_split_end(&job->split, task);
    for (; i + KERN_LANES <= end; i += KERN_LANES) {
        kern_v8f_store(job->out + i,
                       forward_lanes(kern_v8f_load(job->gate + i), kern_v8f_load(job->up + i)));
    }
    if (i < end) {
        kern_v8f out = forward_lanes(kern_v8f_load_part(job->gate + i, end - i, 0.0f),
                                     kern_v8f_load_part(job->up + i, end - i, 0.0f));
        kern_v8f_store_part(job->out + i, out, end - i);
    }
}

void kern_swiglu_forward(struct kern_pool *pool, float *out, const float *gate, const float *up,
                         size_t count)
{
    struct swiglu_job job = {
        .out = out, .gate = gate, .up = up, .split = kern_split_make(count, EACH)};
    kern_pool_run(pool, forward_task, &job, kern_split_tasks(&job.split));
}

static void backward_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct swiglu_job *job = arg;
    size_t i = kern_split_first(&job->split, task), end = kern_split_end(&job->split, task);
    kern_v8f dgate, dup;
    for (; i + KERN_LANES <= end; i += KERN_LANES) {
        backward_lanes(&dgate, &dup, kern_v8f_load(job->dout + i), kern_v8f_load(job->gate + i),
                       kern_v8f_load(job->up + i));
        kern_v8f_store(job->dgate + i, dgate);
        kern_v8f_store(job->dup + i, dup);
    }
    if (i < end) {
        size_t rest = end - i;
        backward_lanes(&dgate, &dup, kern_v8f_load_part(job->dout + i, rest, 0.0f),
                       kern_v8f_load_part(job->gate + i, rest, 0.0f),
                       kern_v8f_load_part(job->up + i, rest, 0.0f));
        kern_v8f_store_part(job->dgate + i, dgate, rest);
        kern_v8f_store_part(job->dup + i, dup, rest);
    }
}

void kern_swiglu_backward(struct kern_pool *pool, float *dgate, float *dup, const float *dout,
                          const float *gate, const float *up, size_t count)
{
    struct swiglu_job job = {.dgate = dgate,
                             .dup = dup,
                             .dout = dout,
                             .gate = gate,
                             .up = up,
                             .split = kern_split_make(count, EACH)};
    kern_pool_run(pool, backward_task, &job, kern_split_tasks(&job.split));
}
