/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Matrix products on the single-threaded BLAS. The result is cut into a grid of tiles by its shape
 * alone; the inner dimension is never cut, so every element's sum is one BLAS call's.
 */
#include "kernels/kern.h"

#include <cblas.h>

/* Sides of a tile. Up to 256 x 256 its part of the output (256 KiB) stays in the cache between the
 * BLAS's pass that clears it and the one that adds to it, and packing the operands is cheap beside
 * multiplying them: tiles of 64 x 192, that is 16 of each product, ran at 0.85 of the speed. Fewer
 * than TILES_MIN are halved on, down to half that size. */
#define TILE_MAX  256U
#define TILES_MIN 4U
#define TILES_MAX 65536U

struct matmul_job {
    CBLAS_TRANSPOSE ta, tb;
    uint32_t m, n, k;
    const float *a, *b;
    uint32_t lda, ldb;
    float *c;
    float beta;
    uint32_t grid_m, grid_n; /* tiles */
};

/* Parts of `extent` by halving until none is longer than `most`. */
static uint32_t parts_of(uint32_t extent, uint32_t most)
{
    uint32_t parts = 1;
    while ((extent + parts - 1) / parts > most) {
        parts *= 2;
    }
    return parts;
}

/* Halves each side until tiles are small enough, then the longer until there are enough. */
static void make_grid(struct matmul_job *job)
{
    uint32_t most = TILE_MAX;
    do {
        job->grid_m = parts_of(job->m, most);
        job->grid_n = parts_of(job->n, most);
        most *= 2;
    } while ((uint64_t)job->grid_m * job->grid_n > TILES_MAX);
    while (job->grid_m * job->grid_n < TILES_MIN) {
        uint32_t rows = job->m / job->grid_m, columns = job->n / job->grid_n;
        if (rows < TILE_MAX && columns < TILE_MAX) {
            return;
        }
        if (rows > columns) {
            job->grid_m *= 2;
        } else {
            job->grid_n *= 2;
        }
    }
}

/* Start of part `index` of `count` of an extent, on multiples of 16 (the micro-kernels' width). */
static uint32_t border(uint32_t extent, uint32_t index, uint32_t count)
{
    if (index == count) {
        return extent;
    }
    return (uint32_t)((uint64_t)extent * index / count) & ~15U;
}

static void matmul_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct matmul_job *job = arg;
    uint32_t tm = task / job->grid_n, tn = task % job->grid_n;
    uint32_t m0 = border(job->m, tm, job->grid_m), m1 = border(job->m, tm + 1, job->grid_m);
    uint32_t n0 = border(job->n, tn, job->grid_n), n1 = border(job->n, tn + 1, job->grid_n);
    const float *a = job->a + (job->ta == CblasNoTrans ? (size_t)m0 * job->lda : m0);
    const float *b = job->b + (job->tb == CblasNoTrans ? n0 : (size_t)n0 * job->ldb);
    cblas_sgemm(CblasRowMajor, job->ta, job->tb, (int)(m1 - m0), (int)(n1 - n0), (int)job->k, 1.0f,
                a, (int)job->lda, b, (int)job->ldb, job->beta, job->c + (size_t)m0 * job->n + n0,
                (int)job->n);
}

static void matmul(struct kern_pool *pool, struct matmul_job *job, int add)
{
    if (job->m == 0 || job->n == 0) {
        return;
    }
    job->beta = add ? 1.0f : 0.0f;
    make_grid(job);
    kern_pool_run(pool, matmul_task, job, job->grid_m * job->grid_n);
}

void kern_matmul_forward(struct kern_pool *pool, float *y, const float *x, const float *w,
                         struct kern_matmul_shape shape, int add)
{
    struct matmul_job job = {.ta = CblasNoTrans,
                             .tb = CblasTrans,
                             .m = shape.n,
                             .n = shape.o,
                             .k = shape.i,
                             .a = x,
                             .lda = shape.i,
                             .b = w,
                             .ldb = shape.i,
                             .c = y};
    matmul(pool, &job, add);
}

void kern_matmul_dx(struct kern_pool *pool, float *dx, const float *dy, const float *w,
                    struct kern_matmul_shape shape, int add)
{
    struct matmul_job job = {.ta = CblasNoTrans,
                             .tb = CblasNoTrans,
                             .m = shape.n,
                             .n = shape.i,
                             .k = shape.o,
                             .a = dy,
                             .lda = shape.o,
                             .b = w,
                             .ldb = shape.i,
                             .c = dx};
    matmul(pool, &job, add);
}

void kern_matmul_dw(struct kern_pool *pool, float *dw, const float *dy, const float *x,
                    struct kern_matmul_shape shape, int add)
{
    struct matmul_job job = {.ta = CblasTrans,
                             .tb = CblasNoTrans,
                             .m = shape.o,
                             .n = shape.i,
                             .k = shape.n,
                             .a = dy,
                             .lda = shape.o,
                             .b = x,
                             .ldb = shape.i,
                             .c = dw};
    matmul(pool, &job, add);
}
