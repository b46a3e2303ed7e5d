/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Flat operations: copies, add and scale of the lane tree, block sums of the norm, the tree over
 * numbers.
 */
#include "kernels/kern.h"

#include <string.h>

#include "kernels/cpu/split.h"
#include "kernels/cpu/stream.h"
#include "kernels/vec.h"

#define EACH (4U * KERN_BLOCK)

struct flat_job {
    float *out;
    const float *a, *b;
    double *sums;
    float factor;
    struct kern_split split;
    int stream; /* a copy goes past the cache */
};

static void copy_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct flat_job *job = arg;
    size_t i = kern_split_first(&job->split, task), end = kern_split_end(&job->split, task);
    for (; job->stream && i + KERN_LANES <= end; i += KERN_LANES) {
        kern_stream_store(job->out + i,
                          job->a == NULL ? kern_v8f_all(0.0f) : kern_v8f_load(job->a + i));
    }
    kern_stream_end();
    if (job->a == NULL) {
        memset(job->out + i, 0, (end - i) * sizeof(float));
    } else {
        memcpy(job->out + i, job->a + i, (end - i) * sizeof(float));
    }
}

void kern_copy(struct kern_pool *pool, float *out, const float *a, size_t count)
{
    struct flat_job job = {.out = out,
                           .a = a,
                           .split = kern_split_make(count, EACH),
                           .stream = count >= KERN_STREAM_MIN && kern_stream_fits(out)};
    kern_pool_run(pool, copy_task, &job, kern_split_tasks(&job.split));
}

void kern_zero(struct kern_pool *pool, float *out, size_t count)
{
    kern_copy(pool, out, NULL, count);
}

static void add_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct flat_job *job = arg;
    size_t i = kern_split_first(&job->split, task), end = kern_split_end(&job->split, task);
    for (; i + KERN_LANES <= end; i += KERN_LANES) {
        kern_v8f_store(job->out + i, kern_v8f_load(job->a + i) + kern_v8f_load(job->b + i));
    }
    for (; i < end; i++) {
        job->out[i] = job->a[i] + job->b[i];
    }
}

void kern_add(struct kern_pool *pool, float *out, const float *a, const float *b, size_t count)
{
    struct flat_job job = {.out = out, .a = a, .b = b, .split = kern_split_make(count, EACH)};
    kern_pool_run(pool, add_task, &job, kern_split_tasks(&job.split));
}

static void scale_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct flat_job *job = arg;
    size_t end = kern_split_end(&job->split, task);
    for (size_t i = kern_split_first(&job->split, task); i < end; i++) {
        job->out[i] *= job->factor;
    }
}

void kern_scale(struct kern_pool *pool, float *x, float factor, size_t count)
{
    struct flat_job job = {.out = x, .factor = factor, .split = kern_split_make(count, EACH)};
    kern_pool_run(pool, scale_task, &job, kern_split_tasks(&job.split));
}

/* fp64 sum of squares in eight lanes, held as two halves of four. */
static double block_sumsq(const float *x, size_t count)
{
    kern_v4d low = {0, 0, 0, 0}, high = {0, 0, 0, 0};
    size_t i = 0;
    for (; i + KERN_LANES <= count; i += KERN_LANES) {
        kern_v4d a = kern_v4d_load_f32(x + i), b = kern_v4d_load_f32(x + i + 4);
        low += a * a;
        high += b * b;
    }
    for (size_t j = 0; i + j < count; j++) {
        double v = (double)x[i + j];
        if (j < 4) {
            low[j] += v * v;
        } else {
            high[j - 4] += v * v;
        }
    }
    kern_v4d s = low + high;
    return (s[0] + s[2]) + (s[1] + s[3]);
}

static void sumsq_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct flat_job *job = arg;
    size_t end = kern_split_end(&job->split, task);
    for (size_t i = kern_split_first(&job->split, task); i < end; i += KERN_BLOCK) {
        size_t rest = end - i;
        job->sums[i / KERN_BLOCK] = block_sumsq(job->a + i, rest < KERN_BLOCK ? rest : KERN_BLOCK);
    }
}

void kern_sumsq_blocks(struct kern_pool *pool, double *sums, const float *x, size_t count)
{
    struct flat_job job = {.a = x, .sums = sums, .split = kern_split_make(count, EACH)};
    kern_pool_run(pool, sumsq_task, &job, kern_split_tasks(&job.split));
}

double kern_tree_sum(const double *values, size_t count)
{
    if (count <= 1) {
        return count == 0 ? 0.0 : values[0];
    }
    size_t p = 1;
    while (p * 2 < count) {
        p *= 2;
    }
    return kern_tree_sum(values, p) + kern_tree_sum(values + p, count - p);
}
