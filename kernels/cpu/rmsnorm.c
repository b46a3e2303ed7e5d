/* SPDX-License-Identifier: Apache-2.0 */
/*
 * RMSNorm, x[N,C]: out = x rstd weight, rstd = 1 / sqrt(mean(x^2) + eps) for each row.
 * Backward of x is cut by rows; that of weight by columns, each of which adds over the rows in
 * order.
 */
#include "kernels/kern.h"

#include "kernels/cpu/split.h"
#include "kernels/vec.h"

#define COLUMNS 64

struct rmsnorm_job {
    float *out; /* forward: out; backward: dx */
    float *rstd_out;
    float *dweight;
    const float *dout, *x, *weight, *rstd;
    uint32_t n, c;
    float eps;
    int add;
    struct kern_split split;
};

/* sum a b (lanes) */
static float dot(const float *a, const float *b, size_t count)
{
    kern_v8f sum = kern_v8f_all(0.0f);
    size_t i = 0;
    for (; i + KERN_LANES <= count; i += KERN_LANES) {
        sum += kern_v8f_load(a + i) * kern_v8f_load(b + i);
    }
    if (i < count) {
        sum +=
            kern_v8f_load_part(a + i, count - i, 0.0f) * kern_v8f_load_part(b + i, count - i, 0.0f);
    }
    return kern_v8f_sum(sum);
}

/* sum a b w (lanes), the product taken as (a w) b */
static float dot3(const float *a, const float *w, const float *b, size_t count)
{
    kern_v8f sum = kern_v8f_all(0.0f);
    size_t i = 0;
    for (; i + KERN_LANES <= count; i += KERN_LANES) {
        sum += (kern_v8f_load(a + i) * kern_v8f_load(w + i)) * kern_v8f_load(b + i);
    }
    if (i < count) {
        size_t rest = count - i;
        sum += (kern_v8f_load_part(a + i, rest, 0.0f) * kern_v8f_load_part(w + i, rest, 0.0f)) *
               kern_v8f_load_part(b + i, rest, 0.0f);
    }
    return kern_v8f_sum(sum);
}

static void forward_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct rmsnorm_job *job = arg;
    size_t end = kern_split_end(&job->split, task), c = job->c;
    for (size_t row = kern_split_first(&job->split, task); row < end; row++) {
        const float *x = job->x + row * c;
        float *out = job->out + row * c;
        float mean = dot(x, x, c) / (float)c;
        float rstd = 1.0f / __builtin_sqrtf(mean + job->eps);
        for (size_t i = 0; i < c; i++) {
            out[i] = (x[i] * rstd) * job->weight[i];
        }
        job->rstd_out[row] = rstd;
    }
}

void kern_rmsnorm_forward(struct kern_pool *pool, float *out, float *rstd, const float *x,
                          const float *weight, uint32_t n, uint32_t c, float eps)
{
    struct rmsnorm_job job = {.out = out,
                              .rstd_out = rstd,
                              .x = x,
                              .weight = weight,
                              .n = n,
                              .c = c,
                              .eps = eps,
                              .split = kern_split_make(n, kern_split_rows(c))};
    kern_pool_run(pool, forward_task, &job, kern_split_tasks(&job.split));
}

static void backward_x_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct rmsnorm_job *job = arg;
    size_t end = kern_split_end(&job->split, task), c = job->c;
    for (size_t row = kern_split_first(&job->split, task); row < end; row++) {
        const float *x = job->x + row * c, *dout = job->dout + row * c;
        float *dx = job->out + row * c;
        float rstd = job->rstd[row];
        /* sum g h / C, with h = x rstd taken out of the sum */
        float mean = (dot3(dout, job->weight, x, c) * rstd) / (float)c;
        for (size_t i = 0; i < c; i++) {
            dx[i] += rstd * (dout[i] * job->weight[i] - (x[i] * rstd) * mean);
        }
    }
}

static void backward_weight_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct rmsnorm_job *job = arg;
    size_t first = kern_split_first(&job->split, task);
    size_t width = kern_split_end(&job->split, task) - first;
    float sum[COLUMNS] = {0};
    for (size_t row = 0; row < job->n; row++) {
        const float *x = job->x + row * job->c + first;
        const float *dout = job->dout + row * job->c + first;
        float rstd = job->rstd[row];
        if (width == COLUMNS) {
            for (size_t i = 0; i < COLUMNS; i++) {
                sum[i] += dout[i] * (x[i] * rstd);
            }
        } else {
            for (size_t i = 0; i < width; i++) {
                sum[i] += dout[i] * (x[i] * rstd);
            }
        }
    }
    float *dweight = job->dweight + first;
    for (size_t i = 0; i < width; i++) {
        dweight[i] = job->add ? dweight[i] + sum[i] : sum[i];
    }
}

void kern_rmsnorm_backward(struct kern_pool *pool, float *dx, float *dweight, const float *dout,
                           const float *x, const float *weight, const float *rstd, uint32_t n,
                           uint32_t c, int add)
{
    struct rmsnorm_job job = {.out = dx,
                              .dweight = dweight,
                              .dout = dout,
                              .x = x,
                              .weight = weight,
                              .rstd = rstd,
                              .n = n,
                              .c = c,
                              .add = add,
                              .split = kern_split_make(n, kern_split_rows(c))};
    kern_pool_run(pool, backward_x_task, &job, kern_split_tasks(&job.split));
    job.split = (struct kern_split){.count = c, .each = COLUMNS};
    kern_pool_run(pool, backward_weight_task, &job, kern_split_tasks(&job.split));
}
