/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rotary positions on x[B,T,H,D], halves rotated: (a, b) -> (a cos - b sin, b cos + a sin) with a =
 * x[i], b = x[i + D/2]; backward rotates by the negative angle.
 */
#include "kernels/kern.h"

#include "kernels/cpu/split.h"
#include "kernels/fmath.h"

struct rope_job {
    float *x;
    const float *table;
    uint32_t t_count, heads, head_dim, pos;
    float sign; /* 1 forward, -1 backward */
    struct kern_split split;
};

static double scaled(double frequency, const struct kern_rope_scaling *scaling)
{
    double waves = scaling->context * frequency / (2.0 * 3.14159265358979323846);
    if (waves < scaling->low) {
        return frequency / scaling->factor;
    }
    if (waves > scaling->high) {
        return frequency;
    }
    double s = (waves - scaling->low) / (scaling->high - scaling->low);
    return (1.0 - s) * frequency / scaling->factor + s * frequency;
}

/* The table's two planes for one position: D/2 cosines, then D/2 sines. */
void kern_rope_table(float *table, uint32_t t_count, uint32_t head_dim, double theta,
                     const struct kern_rope_scaling *scaling)
{
    uint32_t half = head_dim / 2;
    double log_theta = kern_log(theta);
    for (uint32_t i = 0; i < half; i++) {
        double frequency = kern_exp(-((2.0 * i) / head_dim) * log_theta);
        if (scaling != NULL && scaling->factor != 1.0) {
            frequency = scaled(frequency, scaling);
        }
        for (uint32_t t = 0; t < t_count; t++) {
            float *row = table + (size_t)t * head_dim;
            row[i] = (float)kern_cos(t * frequency);
            row[half + i] = (float)kern_sin(t * frequency);
        }
    }
}

static void rotate_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct rope_job *job = arg;
    size_t end = kern_split_end(&job->split, task), half = job->head_dim / 2;
    for (size_t row = kern_split_first(&job->split, task); row < end; row++) {
        size_t position = job->pos + row % job->t_count;
        const float *cosine = job->table + position * job->head_dim, *sine = cosine + half;
        for (size_t head = 0; head < job->heads; head++) {
            float *a = job->x + (row * job->heads + head) * job->head_dim, *b = a + half;
            for (size_t i = 0; i < half; i++) {
                float s = sine[i] * job->sign;
                float low = a[i] * cosine[i] - b[i] * s;
                float high = b[i] * cosine[i] + a[i] * s;
                a[i] = low;
                b[i] = high;
            }
        }
    }
}

static void rotate(struct kern_pool *pool, struct rope_job *job, uint32_t n)
{
    job->split = kern_split_make(n, kern_split_rows((size_t)job->heads * job->head_dim));
    kern_pool_run(pool, rotate_task, job, kern_split_tasks(&job->split));
}

void kern_rope_forward(struct kern_pool *pool, float *x, const float *table, uint32_t n,
                       uint32_t t_count, uint32_t heads, uint32_t head_dim, uint32_t pos)
{
    struct rope_job job = {x, table, t_count, heads, head_dim, pos, 1.0f, {0, 1}};
    rotate(pool, &job, n);
}

void kern_rope_backward(struct kern_pool *pool, float *dx, const float *table, uint32_t n,
                        uint32_t t_count, uint32_t heads, uint32_t head_dim)
{
    struct rope_job job = {dx, table, t_count, heads, head_dim, 0, -1.0f, {0, 1}};
    rotate(pool, &job, n);
}
