/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/adamw.h"

#include <string.h>

#include "kernels/cpu/split.h"
#include "kernels/cpu/stream.h"
#include "kernels/fmath.h"

#define EACH (2U * KERN_BLOCK)

struct adamw_job {
    float *out_param, *out_m, *out_v;
    const float *param, *m, *v, *grad;
    const struct kern_adamw_step *step;
    float weight_decay;
    struct kern_split split;
    int stream;
};

void kern_adamw_step_init(struct kern_adamw_step *ret, uint64_t step, double lr, double beta1,
                          double beta2, double eps, float grad_scale)
{
    ret->lr = (float)lr;
    ret->beta1 = (float)beta1;
    ret->beta1_rest = (float)(1.0 - beta1);
    ret->beta2 = (float)beta2;
    ret->beta2_rest = (float)(1.0 - beta2);
    ret->bc1_inv = (float)(1.0 / (1.0 - kern_powi(beta1, step)));
    ret->bc2_inv = (float)(1.0 / (1.0 - kern_powi(beta2, step)));
    ret->eps = (float)eps;
    ret->grad_scale = grad_scale;
}

/* Elements pass through these, so that an output which is its own input does not hide from the
 * compiler that the loop has no dependence. */
#define CHUNK 64U

struct chunk {
    _Alignas(kern_v8f) float param[CHUNK];
    _Alignas(kern_v8f) float m[CHUNK];
    _Alignas(kern_v8f) float v[CHUNK];
    _Alignas(kern_v8f) float grad[CHUNK];
};

/* Outputs that are not their inputs go past the cache, which saves 12 of 40 bytes an element. */
KERN_INLINE void put(float *to, const float *from, size_t count, int stream)
{
    if (!stream || count != CHUNK) {
        memcpy(to, from, count * sizeof(float));
        return;
    }
    for (size_t i = 0; i < CHUNK; i += KERN_LANES) {
        kern_stream_store(to + i, kern_v8f_load(from + i));
    }
}

static void adamw_chunk(const struct adamw_job *job, size_t first, size_t count)
{
    struct chunk in, out;
    memcpy(in.param, job->param + first, count * sizeof(float));
    memcpy(in.m, job->m + first, count * sizeof(float));
    memcpy(in.v, job->v + first, count * sizeof(float));
    memcpy(in.grad, job->grad + first, count * sizeof(float));
    for (size_t i = 0; i < count; i++) {
        kern_adamw_element(&out.param[i], &out.m[i], &out.v[i], in.param[i], in.m[i], in.v[i],
                           in.grad[i], job->step, job->weight_decay);
    }
    put(job->out_param + first, out.param, count, job->stream);
    put(job->out_m + first, out.m, count, job->stream);
    put(job->out_v + first, out.v, count, job->stream);
}

static void adamw_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct adamw_job *job = arg;
    size_t i = kern_split_first(&job->split, task), end = kern_split_end(&job->split, task);
    for (; i + CHUNK <= end; i += CHUNK) {
        adamw_chunk(job, i, CHUNK);
    }
    adamw_chunk(job, i, end - i);
    kern_stream_end();
}

void kern_adamw(struct kern_pool *pool, float *out_param, float *out_m, float *out_v,
                const float *param, const float *m, const float *v, const float *grad, size_t count,
                const struct kern_adamw_step *step, float weight_decay)
{
    struct adamw_job job = {out_param, out_m, out_v, param,        m,
                            v,         grad,  step,  weight_decay, kern_split_make(count, EACH),
                            0};
    job.stream = count >= KERN_STREAM_MIN && out_param != param && out_m != m && out_v != v &&
                 kern_stream_fits(out_param) && kern_stream_fits(out_m) && kern_stream_fits(out_v);
    kern_pool_run(pool, adamw_task, &job, kern_split_tasks(&job.split));
}
