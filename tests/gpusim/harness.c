/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpusim/harness.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#include "kernels/cuda/device.h"
#include "tests/gpusim/gpusim_device.h"

#define SCRATCH_MAX 8

struct harness {
    struct kern *cpu;
    struct kern_cuda gpu;
    void *scratch[SCRATCH_MAX];
    uint32_t scratch_count;
};

/* An array on both sides. */
struct pair {
    const struct harness_array *array;
    uint64_t cpu_bytes, gpu_bytes;
    void *cpu, *gpu;
    void *start; /* what the GPU's holds before each call */
    void *first; /* what it held after the first */
    void *now;
};

static void check_cuda(cudaError_t error, const char *what)
{
    if (error != cudaSuccess) {
        fail_msg("%s: %s", what, cudaGetErrorString(error));
    }
}

static void *take(uint64_t bytes)
{
    void *p = malloc(bytes ? bytes : 1);
    assert_non_null(p);
    gpusim_poison(p, bytes);
    return p;
}

struct harness *harness_open(enum kern_type type, const struct kern_ops *gpu)
{
    struct harness *h = calloc(1, sizeof *h);
    struct bl_errmsg msg;
    assert_non_null(h);
    assert_int_equal(kern_cpu_open(&h->cpu, NULL, &msg), 0);
    h->gpu.base = (struct kern){
        .ops = gpu, .type = type, .real_bytes = type == KERN_BF16 ? 2 : 4, .is_device = 1};
    h->gpu.sm_count = 132;
    check_cuda(cudaStreamCreateWithFlags(&h->gpu.compute, cudaStreamNonBlocking), "a stream");
    return h;
}

void harness_close(struct harness *h)
{
    if (!h) {
        return;
    }
    if (h->gpu.base.ops->close) {
        h->gpu.base.ops->close(&h->gpu.base);
    }
    h->cpu->ops->close(h->cpu);
    cudaStreamDestroy(h->gpu.compute);
    free(h);
}

static int is_on_gpu(const struct harness_run *run)
{
    return run->k == &run->harness->gpu.base;
}

void *harness_scratch(struct harness_run *run, uint64_t bytes)
{
    struct harness *h = run->harness;
    if (bytes == 0) {
        return NULL;
    }
    void *p = NULL;
    assert_true(h->scratch_count < SCRATCH_MAX);
    if (is_on_gpu(run)) {
        check_cuda(cudaMalloc(&p, bytes), "scratch");
    } else {
        p = take(bytes);
    }
    h->scratch[h->scratch_count++] = p;
    return p;
}

static void scratch_give(struct harness_run *run)
{
    struct harness *h = run->harness;
    while (h->scratch_count > 0) {
        void *p = h->scratch[--h->scratch_count];
        if (is_on_gpu(run)) {
            cudaFree(p);
        } else {
            free(p);
        }
    }
}

/* ---- elements ---- */

static uint16_t narrow(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (isnan(x)) {
        return 0x7fff;
    }
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static float wide(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}

/* Bytes of an element: of the host's mirror and the CPU's side, where REAL is fp32, or the GPU's.
 */
static uint64_t element_bytes(const struct harness_array *a, const struct kern *k)
{
    if (a->role == HARNESS_SCRATCH) {
        return 1;
    }
    return a->kind == HARNESS_F64 ? 8 : a->kind == HARNESS_REAL ? k->real_bytes : 4;
}

static double element_at(const struct harness_array *a, const struct kern *k, const void *p,
                         uint64_t i)
{
    if (a->kind == HARNESS_I32) {
        return ((const int32_t *)p)[i];
    }
    if (a->kind == HARNESS_F64) {
        return ((const double *)p)[i];
    }
    if (a->kind == HARNESS_REAL && k->real_bytes == 2) {
        return (double)wide(((const uint16_t *)p)[i]);
    }
    return (double)((const float *)p)[i];
}

/* ---- arrays ---- */

/* Numbers of both sides. */
static void pair_fill(struct pair *pair, const struct harness *h, uint64_t seed, uint32_t index)
{
    const struct harness_array *a = pair->array;
    int is_bf16 = a->kind == HARNESS_REAL && h->gpu.base.real_bytes == 2;
    if (a->role != HARNESS_IN && a->role != HARNESS_INOUT) {
        return;
    }
    if (a->from) {
        memcpy(pair->cpu, a->from, pair->cpu_bytes);
    } else {
        float *random = take(a->count * sizeof *random);
        kern_rng_normal(NULL, random, seed * 64 + index, 0, a->count, 1);
        for (uint64_t i = 0; i < a->count; i++) {
            double x = a->mean + a->stddev * (double)random[i];
            if (a->kind == HARNESS_F64) {
                ((double *)pair->cpu)[i] = x;
            } else if (a->kind == HARNESS_I32) {
                ((int32_t *)pair->cpu)[i] = (int32_t)x;
            } else {
                ((float *)pair->cpu)[i] = (float)x;
            }
        }
        free(random);
    }
    if (!is_bf16) {
        memcpy(pair->start, pair->cpu, pair->gpu_bytes);
        return;
    }
    for (uint64_t i = 0; i < a->count; i++) {
        uint16_t bits = narrow(((float *)pair->cpu)[i]);
        ((uint16_t *)pair->start)[i] = bits;
        ((float *)pair->cpu)[i] = wide(bits);
    }
}

static void pair_open(struct pair *pair, const struct harness *h, const struct harness_array *a,
                      uint64_t seed, uint32_t index)
{
    *pair = (struct pair){.array = a};
    pair->cpu_bytes = a->count * element_bytes(a, h->cpu);
    pair->gpu_bytes = a->count * element_bytes(a, &h->gpu.base);
    pair->cpu = take(pair->cpu_bytes);
    pair->start = take(pair->gpu_bytes);
    pair->first = take(pair->gpu_bytes);
    pair->now = take(pair->gpu_bytes);
    if (pair->gpu_bytes > 0) {
        check_cuda(cudaMalloc(&pair->gpu, pair->gpu_bytes), "an array");
    }
    pair_fill(pair, h, seed, index);
}

static void pair_close(struct pair *pair)
{
    free(pair->cpu);
    free(pair->start);
    free(pair->first);
    free(pair->now);
    cudaFree(pair->gpu);
}

/* One unit of the last place of the type at |x|. */
static double ulp_of(const struct harness_array *a, const struct kern *k, double x)
{
    int bits = a->kind == HARNESS_F64 ? 52 : a->kind == HARNESS_REAL && k->real_bytes == 2 ? 7 : 23;
    int least = a->kind == HARNESS_F64 ? -1022 : -126, exponent = ilogb(x);
    return ldexp(1, (x == 0 || exponent < least ? least : exponent) - bits);
}

static void pair_compare(const struct pair *pair, const struct harness *h, const char *name,
                         uint32_t index)
{
    const struct harness_array *a = pair->array;
    const struct kern *gpu = &h->gpu.base;
    int is_exact = a->ulps == 0 && a->relative == 0 && a->absolute == 0;
    for (uint64_t i = 0; i < a->count; i++) {
        double want = element_at(a, h->cpu, pair->cpu, i);
        double got = element_at(a, gpu, pair->first, i);
        double bound = a->absolute + a->relative * fabs(want) + a->ulps * ulp_of(a, gpu, want);
        if (is_exact && a->kind == HARNESS_REAL && gpu->real_bytes == 2) {
            want = (double)wide(narrow((float)want));
        }
        if (got == want || (isnan(got) && isnan(want)) || fabs(got - want) <= bound) {
            continue;
        }
        fail_msg("%s: array %u, element %llu of %llu: GPU %.17g, CPU %.17g, difference %g, "
                 "bound %g",
                 name, index, (unsigned long long)i, (unsigned long long)a->count, got, want,
                 got - want, is_exact ? 0 : bound);
    }
}

/* ---- one case ---- */

static void run_gpu(struct harness *h, const struct harness_case *c, struct pair *pairs,
                    uint32_t count, uint64_t order)
{
    struct harness_run run = {
        .k = &h->gpu.base, .ops = h->gpu.base.ops, .arg = c->arg, .harness = h};
    for (uint32_t i = 0; i < count; i++) {
        run.p[i] = pairs[i].gpu;
        if (pairs[i].gpu_bytes > 0) {
            memcpy(pairs[i].gpu, pairs[i].start, pairs[i].gpu_bytes);
        }
    }
    gpusim_seed(order);
    c->call(&run);
    check_cuda(cudaStreamSynchronize(h->gpu.compute), c->name);
    check_cuda(h->gpu.failed, c->name);
    for (uint32_t i = 0; i < count; i++) {
        const struct harness_array *a = pairs[i].array;
        if (a->role == HARNESS_SCRATCH || pairs[i].gpu_bytes == 0) {
            continue;
        }
        memcpy(pairs[i].now, pairs[i].gpu, pairs[i].gpu_bytes);
        if (order == 0) {
            memcpy(pairs[i].first, pairs[i].now, pairs[i].gpu_bytes);
        }
        const void *same = a->role == HARNESS_IN ? pairs[i].start : pairs[i].first;
        if (memcmp(same, pairs[i].now, pairs[i].gpu_bytes) != 0) {
            fail_msg("%s: array %u %s", c->name, i,
                     a->role == HARNESS_IN ? "is an input and was changed"
                                           : "has other bits in another order of threads");
        }
    }
    scratch_give(&run);
}

void harness_check(struct harness *h, const struct harness_case *c)
{
    struct pair pairs[HARNESS_ARRAYS_MAX];
    struct harness_run run = {.k = h->cpu, .ops = h->cpu->ops, .arg = c->arg, .harness = h};
    uint32_t count = 0;
    while (count < HARNESS_ARRAYS_MAX && c->arrays[count].role != HARNESS_NONE) {
        pair_open(&pairs[count], h, &c->arrays[count], c->seed, count);
        run.p[count] = pairs[count].cpu;
        count++;
    }
    c->call(&run);
    scratch_give(&run);
    for (uint64_t order = 0; order < HARNESS_ORDERS; order++) {
        run_gpu(h, c, pairs, count, order);
    }
    for (uint32_t i = 0; i < count; i++) {
        if (c->arrays[i].role == HARNESS_OUT || c->arrays[i].role == HARNESS_INOUT) {
            pair_compare(&pairs[i], h, c->name, i);
        }
        pair_close(&pairs[i]);
    }
}
