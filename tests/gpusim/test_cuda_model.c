/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The model's passes on the CUDA back end over the stand-ins against those on the CPU: losses and
 * gradients of two micro-batches, sampling; and its own bits, which recomputation and the order of
 * threads do not change.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <dlfcn.h>

#include "base/digest.h"
#include "kernels/cuda/plugin.h"
#include "trainer/model.h"

#define SEQ_LEN 20
#define BATCH   2
#define ROWS    (SEQ_LEN * BATCH)
#define MICROS  2
#define ARENA   ((uint64_t)64 << 20)

static const struct bl_job_model LLAMA = {.layers = 2,
                                          .dim = 64,
                                          .hidden = 88,
                                          .heads = 4,
                                          .kv_heads = 2,
                                          .vocab = 131,
                                          .tied = 1,
                                          .rope_theta = 100.0,
                                          .norm_eps = 1e-5};
static const struct bl_job_model GPT2 = {.arch = BL_ARCH_GPT2,
                                         .layers = 2,
                                         .dim = 48,
                                         .hidden = 96,
                                         .heads = 3,
                                         .kv_heads = 3,
                                         .vocab = 131,
                                         .bias = 1,
                                         .context = 24,
                                         .rope_theta = 1,
                                         .norm_eps = 1e-5};

static const struct kern_plugin *g_plugin;
static int32_t g_tokens[MICROS][ROWS], g_targets[MICROS][ROWS];

/* What one back end makes of the micro-batches. */
struct side {
    struct kern *kern;
    struct train_model *model;
    kern_real *params; /* of the back end, rounded to its type */
    float *grads;      /* of the host */
    uint64_t elems, grad_elems;
    double losses[MICROS], eval;
};

static float *weights_make(const struct train_model *model)
{
    uint64_t elems = train_model_buffer_elems(model);
    uint32_t count;
    const struct train_tensor *tensors = train_model_tensors(model, &count);
    float *weights = malloc(elems * sizeof *weights);
    assert_non_null(weights);
    train_model_init_params(model, 7, weights, 0, elems, NULL);
    for (uint32_t i = 0; i < count; i++) { /* nowhere 0 or 1, so that each counts */
        for (uint64_t k = 0; k < tensors[i].elems; k++) {
            weights[tensors[i].local + k] +=
                0.2f * (float)(kern_rng_uniform(kern_rng_key(9, i), k) - 0.5);
        }
    }
    return weights;
}

static void *taken(struct kern *k, uint64_t bytes)
{
    void *memory = k->ops->alloc(k, bytes);
    assert_non_null(memory);
    return memory;
}

static void side_init(struct side *s, struct kern *kern, const struct bl_job_model *config,
                      const struct train_part *part)
{
    struct bl_errmsg msg = {{0}};
    memset(s, 0, sizeof *s);
    s->kern = kern;
    if (train_model_new_part(&s->model, kern, config, part, SEQ_LEN, BATCH, &msg) != 0) {
        fail_msg("%s", msg.text);
    }
    s->elems = train_model_buffer_elems(s->model);
    s->grad_elems = train_model_grad_elems(s->model);
    float *weights = weights_make(s->model);
    float *wide = taken(kern, s->elems * sizeof *wide);
    s->params = taken(kern, s->elems * kern->real_bytes);
    kern->ops->upload(kern, wide, weights, s->elems * sizeof *wide);
    kern->ops->round(kern, s->params, wide, s->elems);
    assert_int_equal(kern->ops->sync(kern, NULL), 0);
    kern->ops->free(kern, wide, s->elems * sizeof *wide);
    free(weights);
    s->grads = malloc(s->grad_elems * sizeof *s->grads);
    assert_non_null(s->grads);
}

static void side_close(struct side *s)
{
    train_model_free(s->model);
    free(s->grads);
    s->kern->ops->close(s->kern);
}

/* Forward and backward of all micro-batches, then the first loss once more. */
static void side_run(struct side *s)
{
    struct kern *k = s->kern;
    struct bl_errmsg msg = {{0}};
    uint64_t counted, bytes = s->grad_elems * sizeof *s->grads;
    float *grads = taken(k, bytes);
    memset(s->grads, 0xff, bytes); /* NaN: all must be written */
    k->ops->upload(k, grads, s->grads, bytes);
    int rc = 0;
    for (int m = 0; rc == 0 && m < MICROS; m++) {
        rc = train_model_forward_backward(s->model, s->params, g_tokens[m], g_targets[m], grads,
                                          m != 0, &s->losses[m], &counted, &msg);
        assert_int_equal(counted, ROWS - 1);
    }
    if (rc == 0) {
        rc = train_model_eval(s->model, s->params, g_tokens[0], g_targets[0], &s->eval, &counted,
                              &msg);
    }
    k->ops->download(k, s->grads, grads, bytes);
    if (rc != 0 || k->ops->sync(k, &msg) != 0) {
        fail_msg("%s", msg.text);
    }
    assert_memory_equal(&s->eval, &s->losses[0], sizeof s->eval);
    k->ops->free(k, grads, bytes);
}

static uint64_t side_digest(const struct side *s)
{
    return bl_xxh3(s->grads, s->grad_elems * sizeof *s->grads) ^
           bl_mix64(bl_xxh3(s->losses, sizeof s->losses));
}

static double length(const float *a, const float *b, uint64_t elems)
{
    double sum = 0;
    for (uint64_t i = 0; i < elems; i++) {
        double gap = (double)a[i] - (b == NULL ? 0.0 : (double)b[i]);
        sum += gap * gap;
    }
    return sqrt(sum);
}

/* Losses and every tensor's gradient, the tied head's too; gaps are zeros. */
static void compare(const struct side *got, const struct side *want, double bound)
{
    uint32_t count;
    const struct train_tensor *tensors = train_model_tensors(want->model, &count);
    double whole = length(want->grads, NULL, want->grad_elems), worst = 0;
    for (int m = 0; m < MICROS; m++) {
        double gap = fabs(got->losses[m] - want->losses[m]) / want->losses[m];
        assert_true(gap <= bound);
    }
    for (uint32_t i = 0; i < count; i++) {
        const struct train_tensor *t = &tensors[i];
        /* k's bias moves all of a row's scores alike: its gradient is rounding */
        double size = fmax(length(want->grads + t->local, NULL, t->elems), 1e-3 * whole);
        double gap = length(got->grads + t->local, want->grads + t->local, t->elems) / size;
        worst = gap <= worst ? worst : gap;
        if (!(gap <= bound)) {
            fail_msg("%s: off by %g of its length", t->name, gap);
        }
        for (uint64_t at = t->elems; at % KERN_BLOCK != 0; at++) {
            assert_true(got->grads[t->local + at] == 0.0f);
        }
    }
    uint64_t tied = train_model_tied_elems(want->model), at = want->grad_elems - tied;
    double gap = length(got->grads + at, want->grads + at, tied);
    assert_true(tied == 0 || gap <= bound * length(want->grads + at, NULL, tied));
    printf("worst gradient off by %.2g of its length\n", worst);
}

static struct kern *open_sim(enum kern_type type)
{
    struct kern *kern = NULL;
    struct bl_errmsg msg = {{0}};
    if (g_plugin->open(&kern, 0, type, ARENA, &msg) != 0) {
        fail_msg("%s", msg.text);
    }
    return kern;
}

static void check(const struct bl_job_model *config, uint32_t head_chunk, enum kern_type type)
{
    struct side cpu, sim;
    struct kern *kern;
    struct train_part part = TRAIN_PART_WHOLE;
    uint64_t digest = 0;
    part.head_chunk = head_chunk;
    assert_int_equal(kern_cpu_open(&kern, NULL, NULL), 0);
    side_init(&cpu, kern, config, &part);
    side_run(&cpu);
    for (uint32_t again = BL_RECOMPUTE_NONE; again <= BL_RECOMPUTE_FULL; again += 2) {
        part.recompute = again;
        side_init(&sim, open_sim(type), config, &part);
        side_run(&sim);
        compare(&sim, &cpu, type == KERN_F32 ? 2e-5 : 4e-2);
        assert_true(again == 0 || side_digest(&sim) == digest);
        digest = side_digest(&sim);
        side_close(&sim);
    }
    side_close(&cpu);
}

static void test_llama_on_cuda_is_that_of_the_cpu(void **state)
{
    (void)state;
    check(&LLAMA, 0, KERN_F32);
    check(&LLAMA, 11, KERN_BF16);
}

static void test_gpt2_on_cuda_is_that_of_the_cpu(void **state)
{
    (void)state;
    check(&GPT2, 16, KERN_F32);
    check(&GPT2, 0, KERN_BF16);
}

/* Draws need the likelihoods alone, which are the CPU's within rounding. */
static void test_samples_on_cuda_are_those_of_the_cpu(void **state)
{
    (void)state;
    struct side cpu, sim;
    struct kern *kern;
    const struct train_part part = TRAIN_PART_WHOLE;
    const struct train_sample how = {.temperature = 1.0, .top_k = 20, .seed = 5};
    const int32_t prompt[3] = {1, 2, 3};
    int32_t want[8], got[8];
    struct bl_errmsg msg = {{0}};
    assert_int_equal(kern_cpu_open(&kern, NULL, NULL), 0);
    side_init(&cpu, kern, &LLAMA, &part);
    side_init(&sim, open_sim(KERN_F32), &LLAMA, &part);
    assert_int_equal(train_model_sample(cpu.model, cpu.params, prompt, 3, want, 8, &how, &msg), 0);
    if (train_model_sample(sim.model, sim.params, prompt, 3, got, 8, &how, &msg) != 0) {
        fail_msg("%s", msg.text);
    }
    assert_memory_equal(got, want, sizeof got);
    side_close(&cpu);
    side_close(&sim);
}

static int load(void **state)
{
    const char *path = getenv("BELAY_CUDA_SIM");
    (void)state;
    void *handle = path == NULL ? NULL : dlopen(path, RTLD_NOW | RTLD_LOCAL);
    union {
        void *object;
        const struct kern_plugin *(*function)(void);
    } symbol = {.object = handle == NULL ? NULL : dlsym(handle, KERN_PLUGIN_KERNELS)};
    if (symbol.object == NULL) {
        fprintf(stderr, "%s\n", path == NULL ? "no BELAY_CUDA_SIM" : dlerror());
        return -1;
    }
    g_plugin = symbol.function();
    for (uint32_t i = 0; i < MICROS * ROWS; i++) {
        g_tokens[i / ROWS][i % ROWS] = (int32_t)(kern_rng_bits(3, i) % LLAMA.vocab);
        g_targets[i / ROWS][i % ROWS] =
            i % ROWS == 5 ? -1 : (int32_t)(kern_rng_bits(4, i) % LLAMA.vocab);
    }
    return kern_start(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_llama_on_cuda_is_that_of_the_cpu),
        cmocka_unit_test(test_gpt2_on_cuda_is_that_of_the_cpu),
        cmocka_unit_test(test_samples_on_cuda_are_those_of_the_cpu),
    };
    return cmocka_run_group_tests(tests, load, NULL);
}
