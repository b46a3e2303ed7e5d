/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What `./bench train` measures inside one process, and the files that it gives to llm.c:
 *
 *     bench-train files DIR LAYERS DIM HEADS VOCAB
 *         random weights and tokens, in the layouts and under the names that train_gpt2 of llm.c
 *         opens in its working directory; the tokens are belay-train's too
 *     bench-train gemm LAYERS DIM HEADS VOCAB THREADS ROUNDS
 *         forward and backward of that GPT-2 (BATCH sequences of SEQ_LEN) beside its matrix
 * products alone, as the BLAS does them with threads, and as its single-threaded self does them on
 *         one tile a thread
 *     bench-train adamw THREADS ROUNDS
 *         bytes a second of the update beside plain streams through memory
 *
 * Prints one JSON object; times are medians over the rounds, wall clock.
 */
#include <cblas.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "base/clock.h"
#include "base/mem.h"
#include "trainer/model.h"

#define BATCH        4u
#define SEQ_LEN      64u
#define CONTEXT      1024u
#define ROUNDS_MAX   99u
#define TOKENS       70000u
#define LLMC_HEADER  256u
#define LLMC_WEIGHTS 20240326
#define LLMC_TOKENS  20240520
#define ADAMW_ELEMS  (32u << 20)

static void die(const char *what)
{
    fprintf(stderr, "bench-train: %s\n", what);
    exit(3);
}

static float *take(uint64_t elems)
{
    float *memory = bl_mem_alloc(elems * sizeof(float));
    if (memory == NULL) {
        die("no memory");
    }
    return memory;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, uint32_t count)
{
    qsort(values, count, sizeof *values, compare);
    return (values[(count - 1) / 2] + values[count / 2]) / 2;
}

static double ms_since(uint64_t begun)
{
    return (double)(bl_now_ns() - begun) / 1e6;
}

static void fill(float *x, uint64_t count, double stddev)
{
    kern_rng_normal(NULL, x, 1, 0, count, stddev);
}

/* ---- files ---- */

static FILE *open_at(const char *dir, const char *name)
{
    char path[BL_PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *file = fopen(path, "we");
    if (file == NULL) {
        die(path);
    }
    return file;
}

static void write_all(FILE *file, const void *data, size_t bytes)
{
    if (fwrite(data, 1, bytes, file) != bytes) {
        die("writing failed");
    }
}

/* The header's numbers are known from the layout; parameters are all small random numbers, which
 * is enough for the time of a step. */
static void write_weights(const char *dir, const struct bl_job_model *m)
{
    uint64_t c = m->dim, padded = (m->vocab + 127u) / 128u * 128u;
    uint64_t layer = 12 * c * c + 13 * c;
    uint64_t elems = (padded + CONTEXT + 2) * c + m->layers * layer;
    int32_t header[LLMC_HEADER] = {LLMC_WEIGHTS,
                                   3,
                                   CONTEXT,
                                   (int32_t)m->vocab,
                                   (int32_t)m->layers,
                                   (int32_t)m->heads,
                                   (int32_t)m->dim,
                                   (int32_t)padded};
    FILE *file = open_at(dir, "gpt2_124M.bin");
    static float part[1 << 20];
    fill(part, 1 << 20, 0.02);
    write_all(file, header, sizeof header);
    for (uint64_t at = 0; at < elems; at += 1 << 20) {
        uint64_t n = elems - at < (1 << 20) ? elems - at : 1 << 20;
        write_all(file, part, n * sizeof *part);
    }
    fclose(file);
}

static void write_tokens(const char *dir, const char *name, uint32_t vocab)
{
    int32_t header[LLMC_HEADER] = {LLMC_TOKENS, 1, (int32_t)TOKENS};
    FILE *file = open_at(dir, name);
    write_all(file, header, sizeof header);
    for (uint32_t i = 0; i < TOKENS; i++) {
        uint16_t token = (uint16_t)(kern_rng_bits(2, i) % vocab);
        write_all(file, &token, sizeof token);
    }
    fclose(file);
}

static void files(const char *dir, const struct bl_job_model *m)
{
    static const char *const parts[] = {"dev", "dev/data", "dev/data/tinyshakespeare"};
    char path[BL_PATH_MAX];
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", dir, parts[i]);
        mkdir(path, 0755);
    }
    write_weights(dir, m);
    write_tokens(dir, "dev/data/tinyshakespeare/tiny_shakespeare_train.bin", m->vocab);
    write_tokens(dir, "dev/data/tinyshakespeare/tiny_shakespeare_val.bin", m->vocab);
    printf("{}\n");
}

/* ---- products ---- */

/* The weights of one product and their gradient; there is one of each matrix of the model, so that
 * they come from memory as in a step. */
struct product {
    struct kern_matmul_shape shape;
    float *w, *dw;
};

struct products {
    struct product *list;
    uint32_t count, threads;
    struct kern_pool *pool;
    float *x, *dx, *y; /* [rows, widest] */
    double flops;      /* of one pass over all, forward and both backwards */
};

static void products_add(struct products *p, uint32_t i, uint32_t o)
{
    uint64_t elems = (uint64_t)i * o;
    struct product *to = &p->list[p->count++];
    *to = (struct product){{BATCH * SEQ_LEN, i, o}, take(elems), take(elems)};
    fill(to->w, elems, 0.02);
    memset(to->dw, 0, elems * sizeof *to->dw);
    p->flops += 6.0 * BATCH * SEQ_LEN * (double)elems;
}

static void products_make(struct products *p, const struct bl_job_model *m, uint32_t threads)
{
    uint64_t widest = m->vocab > 4 * m->dim ? m->vocab : 4 * m->dim;
    p->list = calloc(6 * (size_t)m->layers + 1, sizeof *p->list);
    p->threads = threads;
    p->x = take(BATCH * SEQ_LEN * widest);
    p->dx = take(BATCH * SEQ_LEN * widest);
    p->y = take(BATCH * SEQ_LEN * widest);
    fill(p->x, BATCH * SEQ_LEN * widest, 1.0);
    for (uint32_t layer = 0; layer < m->layers; layer++) {
        for (int i = 0; i < 4; i++) {
            products_add(p, m->dim, m->dim);
        }
        products_add(p, m->dim, 4 * m->dim);
        products_add(p, 4 * m->dim, m->dim);
    }
    products_add(p, m->dim, m->vocab);
}

struct gemm {
    CBLAS_TRANSPOSE ta, tb;
    uint32_t m, n, k, lda, ldb, tiles;
    const float *a, *b;
    float *c;
};

/* Tile `task` of so many along the longer side. */
static void gemm_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct gemm *g = arg;
    int rows = g->m > g->n;
    uint32_t extent = rows ? g->m : g->n;
    uint32_t lo = extent / g->tiles * task & ~15u;
    uint32_t hi = task + 1 == g->tiles ? extent : extent / g->tiles * (task + 1) & ~15u;
    uint32_t m0 = rows ? lo : 0, n0 = rows ? 0 : lo;
    cblas_sgemm(CblasRowMajor, g->ta, g->tb, (int)(rows ? hi - lo : g->m),
                (int)(rows ? g->n : hi - lo), (int)g->k, 1.0f,
                g->a + (g->ta == CblasNoTrans ? (size_t)m0 * g->lda : m0), (int)g->lda,
                g->b + (g->tb == CblasNoTrans ? n0 : (size_t)n0 * g->ldb), (int)g->ldb, 0.0f,
                g->c + (size_t)m0 * g->n + n0, (int)g->n);
}

/* y = x w^T, dx = y w, dw = y^T x; each cut into `tiles`. */
static void product_run(const struct products *p, const struct product *one, uint32_t tiles)
{
    uint32_t n = one->shape.n, i = one->shape.i, o = one->shape.o;
    struct gemm all[] = {
        {CblasNoTrans, CblasTrans, n, o, i, i, i, tiles, p->x, one->w, p->y},
        {CblasNoTrans, CblasNoTrans, n, i, o, o, i, tiles, p->y, one->w, p->dx},
        {CblasTrans, CblasNoTrans, o, i, n, o, i, tiles, p->y, p->x, one->dw},
    };
    for (int k = 0; k < 3; k++) {
        kern_pool_run(tiles > 1 ? p->pool : NULL, gemm_task, &all[k], tiles);
    }
}

static double products_ms(const struct products *p, uint32_t tiles)
{
    uint64_t begun = bl_now_ns();
    for (uint32_t i = 0; i < p->count; i++) {
        product_run(p, &p->list[i], tiles);
    }
    return ms_since(begun);
}

/* With the BLAS's own threads, which spin after work for a while: not into what comes next. */
static double threaded_ms(const struct products *p)
{
    openblas_set_num_threads((int)p->threads);
    product_run(p, &p->list[0], 1);
    double ms = products_ms(p, 1);
    openblas_set_num_threads(1);
    struct timespec spin = {0, 200000000};
    nanosleep(&spin, NULL);
    return ms;
}

static struct train_model *model_make(const struct bl_job_model *config, struct kern *kern)
{
    struct bl_errmsg msg = {{0}};
    struct train_model *model;
    if (train_model_new(&model, kern, config, SEQ_LEN, BATCH, &msg) != 0) {
        die(msg.text);
    }
    return model;
}

static void gemm(const struct bl_job_model *config, uint32_t threads, uint32_t rounds)
{
    struct bl_errmsg msg = {{0}};
    struct products p = {0};
    if (kern_pool_new(&p.pool, threads, &msg) != 0) {
        die(msg.text);
    }
    struct kern *kern;
    if (kern_cpu_open(&kern, p.pool, &msg) != 0) {
        die(msg.text);
    }
    struct train_model *model = model_make(config, kern);
    float *params = take(train_model_buffer_elems(model));
    float *grads = take(train_model_grad_elems(model));
    train_model_init_params(model, 1, params, 0, train_model_buffer_elems(model), p.pool);
    products_make(&p, config, threads);
    int32_t tokens[BATCH * SEQ_LEN], targets[BATCH * SEQ_LEN];
    for (uint32_t i = 0; i < BATCH * SEQ_LEN; i++) {
        tokens[i] = (int32_t)(kern_rng_bits(3, i) % config->vocab);
        targets[i] = (int32_t)(kern_rng_bits(4, i) % config->vocab);
    }
    double pass[ROUNDS_MAX + 1], tiled[ROUNDS_MAX + 1], threaded[ROUNDS_MAX + 1], loss;
    uint64_t counted;
    for (uint32_t r = 0; r <= rounds; r++) { /* the first touches memory and does not count */
        uint32_t to = r == 0 ? rounds : r - 1;
        uint64_t begun = bl_now_ns();
        if (train_model_forward_backward(model, kern_real_f32_view(params), tokens, targets, grads,
                                         0, &loss, &counted, &msg) != 0) {
            die(msg.text);
        }
        pass[to] = ms_since(begun);
        tiled[to] = products_ms(&p, threads);
        threaded[to] = threaded_ms(&p);
    }
    double attention = 6.0 * config->layers * config->dim * SEQ_LEN * BATCH * SEQ_LEN; /* causal */
    printf("{\"pass_ms\": %.3f, \"tiled_ms\": %.3f, \"threaded_ms\": %.3f, \"gemm_flops\": %.0f, "
           "\"model_flops\": %.0f}\n",
           median(pass, rounds), median(tiled, rounds), median(threaded, rounds), p.flops,
           p.flops + attention);
}

/* ---- streams ---- */

struct stream {
    float *to;
    const float *from;
    uint64_t elems;
    uint32_t parts;
};

static void scale_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct stream *s = arg;
    uint64_t lo = s->elems * task / s->parts, hi = s->elems * (task + 1) / s->parts;
    for (uint64_t i = lo; i < hi; i++) {
        s->to[i] = s->from[i] * 0.9999f;
    }
}

static void copy_task(void *arg, uint32_t task, uint32_t worker)
{
    (void)worker;
    const struct stream *s = arg;
    uint64_t lo = s->elems * task / s->parts, hi = s->elems * (task + 1) / s->parts;
    memcpy(s->to + lo, s->from + lo, (hi - lo) * sizeof(float));
}

/* GB/s of a stream that reads and writes each element once. */
static double stream_rate(struct kern_pool *pool, kern_task_fn *fn, float *to, const float *from,
                          uint32_t parts)
{
    struct stream s = {to, from, ADAMW_ELEMS, parts};
    uint64_t begun = bl_now_ns();
    kern_pool_run(pool, fn, &s, parts);
    return 8.0 * ADAMW_ELEMS / ms_since(begun) / 1e6;
}

static void adamw(uint32_t threads, uint32_t rounds)
{
    struct bl_errmsg msg = {{0}};
    struct kern_pool *pool;
    if (kern_pool_new(&pool, threads, &msg) != 0) {
        die(msg.text);
    }
    float *a[7];
    for (int i = 0; i < 7; i++) {
        a[i] = take(ADAMW_ELEMS);
        memset(a[i], 0, ADAMW_ELEMS * sizeof(float));
    }
    fill(a[6], ADAMW_ELEMS, 1.0);
    struct kern_adamw_step step;
    double update[ROUNDS_MAX + 1], copy[ROUNDS_MAX + 1], scale[ROUNDS_MAX + 1],
        place[ROUNDS_MAX + 1];
    for (uint32_t r = 0; r <= rounds; r++) {
        uint32_t to = r == 0 ? rounds : r - 1;
        kern_adamw_step_init(&step, r + 1, 1e-4, 0.9, 0.95, 1e-8, 1.0f);
        uint64_t begun = bl_now_ns();
        kern_adamw(pool, a[0], a[1], a[2], a[3], a[4], a[5], a[6], ADAMW_ELEMS, &step, 0.1f);
        update[to] = 28.0 * ADAMW_ELEMS / ms_since(begun) / 1e6;
        copy[to] = stream_rate(pool, copy_task, a[0], a[3], threads);
        scale[to] = stream_rate(pool, scale_task, a[1], a[4], threads);
        place[to] = stream_rate(pool, scale_task, a[2], a[2], threads);
    }
    printf(
        "{\"adamw_gbs\": %.2f, \"copy_gbs\": %.2f, \"scale_gbs\": %.2f, \"in_place_gbs\": %.2f}\n",
        median(update, rounds), median(copy, rounds), median(scale, rounds), median(place, rounds));
}

static struct bl_job_model gpt2(char **argv)
{
    struct bl_job_model m = {.arch = BL_ARCH_GPT2, .tied = 1, .bias = 1, .context = CONTEXT};
    m.layers = (uint32_t)atoi(argv[0]);
    m.dim = (uint32_t)atoi(argv[1]);
    m.hidden = 4 * m.dim;
    m.heads = m.kv_heads = (uint32_t)atoi(argv[2]);
    m.vocab = (uint32_t)atoi(argv[3]);
    m.rope_theta = 10000;
    m.norm_eps = 1e-5;
    return m;
}

int main(int argc, char **argv)
{
    uint32_t threads = argc > 3 ? (uint32_t)atoi(argv[argc - 2]) : 0;
    uint32_t rounds = argc > 3 ? (uint32_t)atoi(argv[argc - 1]) : 0;
    int timed = threads > 0 && threads <= KERN_THREADS_MAX && rounds > 0 && rounds <= ROUNDS_MAX;
    if (argc == 7 && strcmp(argv[1], "files") == 0) {
        struct bl_job_model m = gpt2(argv + 3);
        files(argv[2], &m);
    } else if (argc == 8 && timed && strcmp(argv[1], "gemm") == 0) {
        struct bl_job_model m = gpt2(argv + 2);
        gemm(&m, threads, rounds);
    } else if (argc == 4 && timed && strcmp(argv[1], "adamw") == 0) {
        adamw(threads, rounds);
    } else {
        fprintf(stderr, "bench-train: files DIR LAYERS DIM HEADS VOCAB | gemm LAYERS DIM HEADS "
                        "VOCAB THREADS ROUNDS | adamw THREADS ROUNDS\n");
        return 2;
    }
    return 0;
}
