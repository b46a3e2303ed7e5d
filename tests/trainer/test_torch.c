/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loss and gradients against PyTorch's, of models as transformers has them (torch_fixtures.py made
 * the fixtures, in fp64). Bounds: the loss within 1e-6 of itself, each element of a gradient within
 * 1e-5 of its tensor's largest (measured: 4e-9 and 3e-6).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#include "model_bench.h"
#include "trainer/model.h"

#define BATCH      2
#define SEQ_LEN    9
#define VOCAB      13
#define LOSS_BOUND 1e-6
#define GRAD_BOUND 1e-5

/* In [-0.5, 0.5), the same in torch_fixtures.py: an element of tensor number `tensor`. */
static float number(uint32_t tensor, uint32_t element)
{
    uint32_t h = element * 0x9E3779B1U + (tensor + 1) * 0x85EBCA77U;
    h ^= h >> 15;
    h *= 0x2C1B3C6DU;
    h ^= h >> 13;
    return (float)(h >> 8) / 16777216.0f - 0.5f;
}

static void make_inputs(struct model_bench *b)
{
    uint32_t count;
    const struct train_tensor *t = train_model_tensors(b->model, &count);
    for (uint32_t i = 0; i < count; i++) {
        float around = t[i].init_fill; /* 1 for norms' weights */
        for (uint32_t j = 0; j < t[i].elems; j++) {
            b->params[t[i].local + j] = number(i, j) + around;
        }
    }
    for (uint32_t i = 0; i < BATCH * SEQ_LEN; i++) {
        uint32_t at = i / SEQ_LEN * (SEQ_LEN + 1) + i % SEQ_LEN;
        b->tokens[i] = (int32_t)((number(1000, at) + 0.5f) * VOCAB);
        b->targets[i] = (int32_t)((number(1000, at + 1) + 0.5f) * VOCAB);
    }
    b->targets[3] = -1;
}

/* Reads a tensor's gradient from the fixture; returns the largest error over the largest element.
 */
static double tensor_error(FILE *f, const struct train_tensor *t, const float *grads)
{
    char name[BL_TENSOR_NAME_MAX];
    unsigned long long elems;
    double worst = 0, largest = 0;
    assert_int_equal(fscanf(f, "%127s %llu", name, &elems), 2);
    assert_string_equal(name, t->name);
    assert_int_equal(elems, t->elems);
    for (uint64_t i = 0; i < elems; i++) {
        double expect;
        assert_int_equal(fscanf(f, "%lf", &expect), 1);
        worst = fmax(worst, fabs((double)grads[t->local + i] - expect));
        largest = fmax(largest, fabs(expect));
    }
    /* A bias of keys moves all scores of a query alike: nothing depends on it. */
    assert_true((largest > 1e-3) != (strstr(name, "k_proj.bias") != NULL));
    return largest > 1e-3 ? worst / largest : worst;
}

static void check_model(const char *name, const struct bl_job_model *config)
{
    char path[1200], line[200];
    const char *source = getenv("BELAY_SOURCE");
    struct model_bench b;
    uint64_t counted;
    uint32_t count;
    double expect;
    snprintf(path, sizeof path, "%s/tests/trainer/fixtures/%s.grad", source == NULL ? "." : source,
             name);
    FILE *f = fopen(path, "re");
    assert_non_null(f);
    model_bench_init(&b, config, SEQ_LEN, BATCH, 1);
    make_inputs(&b);
    double loss = model_bench_pass(&b, 0, &counted);
    assert_int_equal(counted, BATCH * SEQ_LEN - 1);
    train_model_tied_finish(b.kern, b.grads, b.grads + b.buffer_elems,
                            train_model_tied_elems(b.model));
    assert_non_null(fgets(line, sizeof line, f)); /* who made it */
    assert_int_equal(fscanf(f, "loss %lf", &expect), 1);
    printf("%s: loss error %.2e of itself, ", name, fabs(loss - expect) / expect);
    assert_true(fabs(loss - expect) <= LOSS_BOUND * expect);
    const struct train_tensor *t = train_model_tensors(b.model, &count);
    double worst = 0;
    for (uint32_t i = 0; i < count; i++) {
        worst = fmax(worst, tensor_error(f, &t[i], b.grads));
    }
    printf("gradient error %.2e of its tensor's largest; %s", worst, line + 2);
    assert_true(worst <= GRAD_BOUND);
    assert_int_equal(fscanf(f, "%199s", line), EOF);
    fclose(f);
    model_bench_close(&b);
}

static void test_llama_is_that_of_transformers(void **state)
{
    (void)state;
    const struct bl_job_model llama = {.layers = 2,
                                       .dim = 16,
                                       .hidden = 10,
                                       .heads = 4,
                                       .kv_heads = 2,
                                       .vocab = VOCAB,
                                       .rope_theta = 100.0,
                                       .rope_factor = 4,
                                       .rope_low = 1,
                                       .rope_high = 4,
                                       .rope_context = 12,
                                       .norm_eps = 1e-5};
    check_model("llama", &llama);
}

static void test_gpt2_is_that_of_transformers(void **state)
{
    (void)state;
    const struct bl_job_model gpt2 = {.arch = BL_ARCH_GPT2,
                                      .layers = 2,
                                      .dim = 12,
                                      .hidden = 20,
                                      .heads = 3,
                                      .kv_heads = 3,
                                      .vocab = VOCAB,
                                      .tied = 1,
                                      .bias = 1,
                                      .context = 11,
                                      .rope_theta = 1,
                                      .norm_eps = 1e-5};
    check_model("gpt2", &gpt2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_llama_is_that_of_transformers),
        cmocka_unit_test(test_gpt2_is_that_of_transformers),
    };
    return cmocka_run_group_tests_name("trainer/torch", tests, NULL, NULL);
}
