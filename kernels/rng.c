/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random numbers as pure functions of a key and a counter: splitmix64's finaliser over a Weyl
 * sequence that starts at the key.
 */
#include "base/digest.h"
#include "kernels/cpu/split.h"
#include "kernels/fmath.h"

#define WEYL 0x9e3779b97f4a7c15ULL
#define EACH 4096U

struct normal_job {
    float *out;
    uint64_t key, first;
    double stddev;
    struct kern_split split;
};

uint64_t kern_rng_key(uint64_t seed, uint64_t name_hash)
{
    return bl_mix64(seed ^ bl_mix64(name_hash));
}

uint64_t kern_rng_bits(uint64_t key, uint64_t counter)
{
    return bl_mix64(key + counter * WEYL);
}

double kern_rng_uniform(uint64_t key, uint64_t counter)
{
    return (double)(kern_rng_bits(key, counter) >> 11) * 0x1.0p-53;
}

/* Numbers 2k and 2k + 1 of the stream. */
static void normal_pair(const struct normal_job *job, uint64_t even, float pair[2])
{
    double u = 1.0 - kern_rng_uniform(job->key, even);
    double angle = 6.283185307179586 * kern_rng_uniform(job->key, even + 1);
    double radius = __builtin_sqrt(-2.0 * kern_log(u));
    pair[0] = (float)((radius * kern_cos(angle)) * job->stddev);
    pair[1] = (float)((radius * kern_sin(angle)) * job->stddev);
}

static void normal_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct normal_job *job = arg;
    size_t i = kern_split_first(&job->split, task), end = kern_split_end(&job->split, task);
    while (i < end) {
        uint64_t number = job->first + i;
        float pair[2];
        normal_pair(job, number & ~1ULL, pair);
        for (uint64_t j = number & 1; j < 2 && i < end; j++) {
            job->out[i++] = pair[j];
        }
    }
}

void kern_rng_normal(struct kern_pool *pool, float *out, uint64_t key, uint64_t first, size_t count,
                     double stddev)
{
    struct normal_job job = {out, key, first, stddev, kern_split_make(count, EACH)};
    kern_pool_run(pool, normal_task, &job, kern_split_tasks(&job.split));
}
