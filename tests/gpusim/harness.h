/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An operation of struct kern_ops on the simulated GPU against the CPU's.
 *
 *     static void call(struct harness_run *r)
 *     {
 *         const struct shape *s = r->arg;
 *         r->ops->swiglu_forward(r->k, r->p[0], r->p[1], r->p[2], s->count);
 *     }
 *     ...
 *     struct harness *h = harness_open(KERN_BF16, &OPS);
 *     harness_check(h, &(struct harness_case){
 *         .name = "swiglu_forward", .call = call, .arg = &shape,
 *         .arrays = {{HARNESS_OUT, HARNESS_REAL, count, .ulps = 2},
 *                    {HARNESS_IN, HARNESS_REAL, count, .stddev = 2},
 *                    {HARNESS_IN, HARNESS_REAL, count, .stddev = 1}}});
 *
 * `call` is called once with the CPU's arrays and table and, for each of several orders of threads,
 * with the GPU's. Every array is an allocation of its own, with bytes behind it that must not
 * change. Inputs are random; those of the storage type are rounded to it first, so that both sides
 * start from the same numbers. Outputs must be the same bits in every order, and within the bound
 * of the CPU's. Failures are cmocka's, after a line with the name, the element, both values.
 */
#ifndef GPUSIM_HARNESS_H
#define GPUSIM_HARNESS_H

#include <stdint.h>

#include "kernels/backend.h"

#define HARNESS_ARRAYS_MAX 16
#define HARNESS_ORDERS     3 /* orders of threads that are tried */

struct harness;

enum harness_role {
    HARNESS_NONE = 0, /* no array: the list ends */
    HARNESS_IN,
    HARNESS_OUT,     /* starts as NaNs */
    HARNESS_INOUT,   /* starts random */
    HARNESS_SCRATCH, /* starts as NaNs, is not compared */
};

enum harness_kind { HARNESS_REAL, HARNESS_F32, HARNESS_F64, HARNESS_I32 };

struct harness_array {
    enum harness_role role;
    enum harness_kind kind;
    uint64_t count;   /* elements; scratch: bytes */
    double stddev;    /* of random numbers, around `mean` */
    double mean;      /* */
    const void *from; /* instead of random numbers: count of float, double, int32_t (REAL: float) */
    /* |GPU - CPU| <= absolute + relative |CPU| + ulps of the array's type at the CPU's value; all
     * 0: the same bits (REAL of bf16: the CPU's, rounded). */
    double ulps, relative, absolute;
};

/* One call on one side. */
struct harness_run {
    struct kern *k;
    const struct kern_ops *ops;
    void *p[HARNESS_ARRAYS_MAX]; /* in the order of the case */
    const void *arg;
    struct harness *harness;
};

struct harness_case {
    const char *name;
    void (*call)(struct harness_run *run);
    const void *arg;
    uint64_t seed; /* of the random numbers */
    struct harness_array arrays[HARNESS_ARRAYS_MAX];
};

/* Both sides; `gpu` is the GPU's table, in which only what calls use must be filled; its close,
 * if there is one, ends what calls left in struct kern_cuda. Aborts when there is no memory. */
struct harness *harness_open(enum kern_type type, const struct kern_ops *gpu);
void harness_close(struct harness *h);

void harness_check(struct harness *h, const struct harness_case *c);

/* Memory of the side that runs, as NaNs, until the call is over; 0 bytes: NULL. */
void *harness_scratch(struct harness_run *run, uint64_t bytes);

#endif
