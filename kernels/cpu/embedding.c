/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Embedding: out[N,C] = weight[token[n],:]; backward adds rows back in the order of n. Backward is
 * cut by columns, so that rows of one token meet in one task.
 */
#include "kernels/kern.h"

#include <string.h>

#include "kernels/cpu/split.h"

#define COLUMNS 64

struct embedding_job {
    float *out; /* forward: out, backward: dweight */
    const float *in;
    const int32_t *tokens;
    uint32_t n, c;
    uint32_t lo, hi; /* rows of the table that are here */
    struct kern_split split;
};

static int is_here(const struct embedding_job *job, size_t n)
{
    uint32_t token = (uint32_t)job->tokens[n];
    return token >= job->lo && token < job->hi;
}

static size_t row_of(const struct embedding_job *job, size_t n)
{
    return (size_t)((uint32_t)job->tokens[n] - job->lo) * job->c;
}

static void forward_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct embedding_job *job = arg;
    size_t end = kern_split_end(&job->split, task), bytes = job->c * sizeof(float);
    for (size_t i = kern_split_first(&job->split, task); i < end; i++) {
        if (is_here(job, i)) {
            memcpy(job->out + i * job->c, job->in + row_of(job, i), bytes);
        } else {
            memset(job->out + i * job->c, 0, bytes);
        }
    }
}

void kern_embedding_slice_forward(struct kern_pool *pool, float *out, const int32_t *tokens,
                                  const float *weight, uint32_t n, uint32_t c, uint32_t lo,
                                  uint32_t hi)
{
    struct embedding_job job = {out, weight, tokens, n,
                                c,   lo,     hi,     kern_split_make(n, kern_split_rows(c))};
    kern_pool_run(pool, forward_task, &job, kern_split_tasks(&job.split));
}

void kern_embedding_forward(struct kern_pool *pool, float *out, const int32_t *tokens,
                            const float *weight, uint32_t n, uint32_t c)
{
    kern_embedding_slice_forward(pool, out, tokens, weight, n, c, 0, UINT32_MAX);
}

static void backward_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct embedding_job *job = arg;
    size_t first = kern_split_first(&job->split, task), end = kern_split_end(&job->split, task);
    for (size_t i = 0; i < job->n; i++) {
        if (!is_here(job, i)) {
            continue;
        }
        float *to = job->out + row_of(job, i);
        const float *from = job->in + i * job->c;
        for (size_t j = first; j < end; j++) {
            to[j] += from[j];
        }
    }
}

void kern_embedding_slice_backward(struct kern_pool *pool, float *dweight, const float *dout,
                                   const int32_t *tokens, uint32_t n, uint32_t c, uint32_t lo,
                                   uint32_t hi, int add)
{
    if (!add) {
        kern_zero(pool, dweight, (size_t)(hi - lo) * c);
    }
    struct embedding_job job = {dweight, dout, tokens, n, c, lo, hi, kern_split_make(c, COLUMNS)};
    kern_pool_run(pool, backward_task, &job, kern_split_tasks(&job.split));
}

void kern_embedding_backward(struct kern_pool *pool, float *dweight, const float *dout,
                             const int32_t *tokens, uint32_t n, uint32_t c, uint32_t vocab, int add)
{
    kern_embedding_slice_backward(pool, dweight, dout, tokens, n, c, 0, vocab, add);
}
