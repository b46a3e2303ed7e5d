/* SPDX-License-Identifier: Apache-2.0 */
/*
 * LayerNorm, x[N,C]: out = (x - mean) rstd weight + bias, rstd = 1 / sqrt(var + eps) for each row.
 * The variance is that of the differences from the mean, in a second pass: a large mean costs no
 * digits. Backward of x is cut by rows; that of weight and bias by columns, each of which adds over
 * the rows in order.
 */
#include "kernels/kern.h"

#include "kernels/cpu/split.h"
#include "kernels/vec.h"

#define COLUMNS 64

struct layernorm_job {
    float *out; /* forward: out; backward: dx */
    float *mean_out, *rstd_out;
    float *dweight, *dbias;
    const float *dout, *x, *weight, *bias, *mean, *rstd;
    uint32_t n, c;
    float eps;
    int add;
    struct kern_split split;
};

static float sum(const float *a, size_t count)
{
    kern_v8f lanes = kern_v8f_all(0.0f);
    size_t i = 0;
    for (; i + KERN_LANES <= count; i += KERN_LANES) {
        lanes += kern_v8f_load(a + i);
    }
    if (i < count) {
        lanes += kern_v8f_load_part(a + i, count - i, 0.0f);
    }
    return kern_v8f_sum(lanes);
}

/* sum (a - mean)^2 */
static float sum_squares(const float *a, float mean, size_t count)
{
    kern_v8f lanes = kern_v8f_all(0.0f), middle = kern_v8f_all(mean);
    size_t i = 0;
    for (; i + KERN_LANES <= count; i += KERN_LANES) {
        kern_v8f d = kern_v8f_load(a + i) - middle;
        lanes += d * d;
    }
    if (i < count) {
        kern_v8f d = kern_v8f_load_part(a + i, count - i, mean) - middle;
        lanes += d * d;
    }
    return kern_v8f_sum(lanes);
}

static void forward_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct layernorm_job *job = arg;
    size_t end = kern_split_end(&job->split, task), c = job->c;
    for (size_t row = kern_split_first(&job->split, task); row < end; row++) {
        const float *x = job->x + row * c;
        float *out = job->out + row * c;
        float mean = sum(x, c) / (float)c;
        float rstd = 1.0f / __builtin_sqrtf(sum_squares(x, mean, c) / (float)c + job->eps);
        for (size_t i = 0; i < c; i++) {
            float y = ((x[i] - mean) * rstd) * job->weight[i];
            out[i] = job->bias == NULL ? y : y + job->bias[i];
        }
        job->mean_out[row] = mean;
        job->rstd_out[row] = rstd;
    }
}

void kern_layernorm_forward(struct kern_pool *pool, float *out, float *mean, float *rstd,
                            const float *x, const float *weight, const float *bias, uint32_t n,
                            uint32_t c, float eps)
{
    struct layernorm_job job = {.out = out,
                                .mean_out = mean,
                                .rstd_out = rstd,
                                .x = x,
                                .weight = weight,
                                .bias = bias,
                                .n = n,
                                .c = c,
                                .eps = eps,
                                .split = kern_split_make(n, kern_split_rows(c))};
    kern_pool_run(pool, forward_task, &job, kern_split_tasks(&job.split));
}

static void backward_x_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct layernorm_job *job = arg;
    size_t end = kern_split_end(&job->split, task), c = job->c;
    for (size_t row = kern_split_first(&job->split, task); row < end; row++) {
        const float *x = job->x + row * c, *dout = job->dout + row * c;
        float *dx = job->out + row * c;
        float mean = job->mean[row], rstd = job->rstd[row];
        kern_v8f g_lanes = kern_v8f_all(0.0f), gh_lanes = kern_v8f_all(0.0f);
        for (size_t i = 0; i < c; i += KERN_LANES) {
            size_t rest = c - i;
            int whole = rest >= KERN_LANES;
            kern_v8f d = whole ? kern_v8f_load(dout + i) : kern_v8f_load_part(dout + i, rest, 0.0f);
            kern_v8f w = whole ? kern_v8f_load(job->weight + i)
                               : kern_v8f_load_part(job->weight + i, rest, 0.0f);
            kern_v8f v = whole ? kern_v8f_load(x + i) : kern_v8f_load_part(x + i, rest, mean);
            kern_v8f g = d * w;
            g_lanes += g;
            gh_lanes += g * ((v - kern_v8f_all(mean)) * kern_v8f_all(rstd));
        }
        float g_mean = kern_v8f_sum(g_lanes) / (float)c;
        float gh_mean = kern_v8f_sum(gh_lanes) / (float)c;
        for (size_t i = 0; i < c; i++) {
            float h = (x[i] - mean) * rstd;
            dx[i] += rstd * ((dout[i] * job->weight[i] - g_mean) - h * gh_mean);
        }
    }
}

static void backward_weight_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct layernorm_job *job = arg;
    size_t first = kern_split_first(&job->split, task);
    size_t width = kern_split_end(&job->split, task) - first;
    float dweight[COLUMNS] = {0}, dbias[COLUMNS] = {0};
    for (size_t row = 0; row < job->n; row++) {
        const float *x = job->x + row * job->c + first;
        const float *dout = job->dout + row * job->c + first;
        float mean = job->mean[row], rstd = job->rstd[row];
        for (size_t i = 0; i < width; i++) {
            dweight[i] += dout[i] * ((x[i] - mean) * rstd);
            dbias[i] += dout[i];
        }
    }
    for (size_t i = 0; i < width; i++) {
        float *to = job->dweight + first + i;
        *to = job->add ? *to + dweight[i] : dweight[i];
        if (job->dbias != NULL) {
            to = job->dbias + first + i;
            *to = job->add ? *to + dbias[i] : dbias[i];
        }
    }
}

void kern_layernorm_backward(struct kern_pool *pool, float *dx, float *dweight, float *dbias,
                             const float *dout, const float *x, const float *weight,
                             const float *mean, const float *rstd, uint32_t n, uint32_t c, int add)
{
    struct layernorm_job job = {.out = dx,
                                .dweight = dweight,
                                .dbias = dbias,
                                .dout = dout,
                                .x = x,
                                .weight = weight,
                                .mean = mean,
                                .rstd = rstd,
                                .n = n,
                                .c = c,
                                .add = add,
                                .split = kern_split_make(n, kern_split_rows(c))};
    kern_pool_run(pool, backward_x_task, &job, kern_split_tasks(&job.split));
    job.split = (struct kern_split){.count = c, .each = COLUMNS};
    kern_pool_run(pool, backward_weight_task, &job, kern_split_tasks(&job.split));
}
