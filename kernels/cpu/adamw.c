/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/adamw.h"

#include "kernels/cpu/split.h"
#include "kernels/fmath.h"

#define EACH (2U * KERN_BLOCK)

struct adamw_job {
    float *out_param, *out_m, *out_v;
    const float *param, *m, *v, *grad;
    const struct kern_adamw_step *step;
    float weight_decay;
    struct kern_split split;
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

static void adamw_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct adamw_job *job = arg;
    const struct kern_adamw_step step = *job->step;
    size_t end = kern_split_end(&job->split, task);
    float *out_param = job->out_param, *out_m = job->out_m, *out_v = job->out_v;
    const float *param = job->param, *m = job->m, *v = job->v, *grad = job->grad;
    for (size_t i = kern_split_first(&job->split, task); i < end; i++) {
        kern_adamw_element(out_param + i, out_m + i, out_v + i, param[i], m[i], v[i], grad[i],
                           &step, job->weight_decay);
    }
}

void kern_adamw(struct kern_pool *pool, float *out_param, float *out_m, float *out_v,
                const float *param, const float *m, const float *v, const float *grad, size_t count,
                const struct kern_adamw_step *step, float weight_decay)
{
    struct adamw_job job = {out_param, out_m, out_v, param,        m,
                            v,         grad,  step,  weight_decay, kern_split_make(count, EACH)};
    kern_pool_run(pool, adamw_task, &job, kern_split_tasks(&job.split));
}
