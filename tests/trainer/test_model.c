/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The model: gradients against fp64 central differences, bits against thread counts, accumulation,
 * ranges of initial weights, sampling.
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
#include "ref_model.h"
#include "trainer/model.h"
#include "trainer/schedule.h"

static const struct bl_job_model TINY = {.layers = 2,
                                         .dim = 16,
                                         .hidden = 20,
                                         .heads = 4,
                                         .kv_heads = 2,
                                         .vocab = 23,
                                         .tied = 0,
                                         .rope_theta = 100.0,
                                         .norm_eps = 1e-5};
/* ---- gradients ---- */

/* Larger weights than the initial ones, so that every term of a gradient counts. */
static void roughen(struct model_bench *b)
{
    uint32_t count;
    const struct train_tensor *t = train_model_tensors(b->model, &count);
    for (uint32_t i = 0; i < count; i++) {
        kern_rng_normal(NULL, b->params + t[i].offset, kern_rng_key(3, i), 0, t[i].elems, 0.3);
        for (uint64_t j = 0; j < t[i].elems && t[i].dims == 1; j++) {
            b->params[t[i].offset + j] += 1.0f;
        }
    }
}

#define LOSS_BOUND 1e-6 /* of the loss: fp32 against fp64 */

static int fault_is_possible(const struct bl_job_model *m, uint32_t fault)
{
    int gpt2 = m->arch == BL_ARCH_GPT2;
    switch ((enum ref_fault)fault) {
    case REF_ROPE_PAIRS:
    case REF_GATE_EXCHANGED:
        return !gpt2;
    case REF_ROPE_UNSCALED:
        return m->rope_factor > 1;
    case REF_KV_INTERLEAVED:
        return !gpt2 && m->kv_heads != 1 && m->kv_heads != m->heads;
    case REF_GELU_ERF:
        return gpt2;
    case REF_BIAS_FORGOTTEN:
        return m->bias != 0;
    default:
        return 1;
    }
}

/* The reference with any one operation changed is beyond the bound. */
static void check_faults_are_seen(const struct ref_model *right, const double *params,
                                  const double *head, const struct model_bench *b, double loss)
{
    for (uint32_t fault = REF_RIGHT + 1; fault < REF_FAULTS; fault++) {
        struct ref_model wrong = *right;
        wrong.fault = (enum ref_fault)fault;
        if (fault_is_possible(&wrong.config, fault)) {
            double other = ref_model_loss(&wrong, params, head, b->tokens, b->targets);
            assert_true(fabs(loss - other) > 5 * LOSS_BOUND * other);
        }
    }
}

static void check_gradient(const struct bl_job_model *config, uint32_t head_chunk)
{
    const uint32_t seq_len = 7, batch = 2;
    struct model_bench b;
    model_bench_init(&b, config, seq_len, batch, 2);
    model_bench_chunk(&b, seq_len, batch, head_chunk);
    roughen(&b);
    b.targets[3] = -1;
    struct ref_model ref = {.config = *config, .seq_len = seq_len, .batch = batch};
    ref.tensors = train_model_tensors(b.model, &ref.tensor_count);
    uint64_t counted;
    double loss = model_bench_pass(&b, 0, &counted);
    assert_int_equal(counted, seq_len * batch - 1);

    double *params = malloc((b.buffer_elems + b.grad_elems) * sizeof(double));
    assert_non_null(params);
    for (uint64_t i = 0; i < b.buffer_elems; i++) {
        params[i] = (double)b.params[i];
    }
    double *head = params + ref.tensors[ref.tensor_count - 1].offset;
    if (config->tied) { /* a copy, which stands where its gradient does */
        head = params + b.buffer_elems;
        memcpy(head, params, ref.tensors[0].elems * sizeof(double));
    }
    double expect = ref_model_loss(&ref, params, head, b.tokens, b.targets);
    printf("loss error %.2e\n", fabs(loss - expect) / expect);
    assert_true(fabs(loss - expect) < LOSS_BOUND * expect);
    check_faults_are_seen(&ref, params, head, &b, loss);

    double worst = 0, largest = 0;
    for (uint32_t i = 0; i <= ref.tensor_count; i++) {
        int extra = i == ref.tensor_count;
        if (extra && !config->tied) {
            break;
        }
        uint64_t at = extra ? b.buffer_elems : ref.tensors[i].offset;
        uint64_t elems = ref.tensors[extra ? 0 : i].elems;
        for (uint64_t j = at; j < at + elems; j++) {
            double keep = params[j], h = 1e-5;
            params[j] = keep + h;
            double above = ref_model_loss(&ref, params, head, b.tokens, b.targets);
            params[j] = keep - h;
            double below = ref_model_loss(&ref, params, head, b.tokens, b.targets);
            params[j] = keep;
            double gradient = (above - below) / (2 * h);
            worst = fmax(worst, fabs(gradient - (double)b.grads[j]));
            largest = fmax(largest, fabs(gradient));
        }
    }
    free(params);
    model_bench_close(&b);
    printf("largest gradient %g, worst error %g\n", largest, worst);
    assert_true(largest > 0.5);
    assert_true(worst < 2e-5 * largest);
}

static void test_gradient_equals_differences_untied(void **state)
{
    (void)state;
    check_gradient(&TINY, 0);
}

static void test_gradient_equals_differences_tied(void **state)
{
    (void)state;
    struct bl_job_model tied = TINY;
    tied.tied = 1;
    tied.kv_heads = 1;
    check_gradient(&tied, 0);
}

/* Wavelengths of theta 100 over 4 dimensions: 6.3 and 63; a context of 12 stretches both ways. */
static void test_gradient_equals_differences_stretched_positions(void **state)
{
    (void)state;
    struct bl_job_model stretched = TINY;
    stretched.rope_factor = 4;
    stretched.rope_low = 1;
    stretched.rope_high = 4;
    stretched.rope_context = 12;
    check_gradient(&stretched, 0);
}

static const struct bl_job_model TINY_GPT2 = {.arch = BL_ARCH_GPT2,
                                              .layers = 2,
                                              .dim = 15,
                                              .hidden = 20,
                                              .heads = 3,
                                              .kv_heads = 3,
                                              .vocab = 23,
                                              .tied = 1,
                                              .bias = 1,
                                              .context = 9,
                                              .rope_theta = 1,
                                              .norm_eps = 1e-5};

static void test_gradient_equals_differences_gpt2(void **state)
{
    (void)state;
    check_gradient(&TINY_GPT2, 0);
}

static void test_gradient_equals_differences_gpt2_untied_without_biases(void **state)
{
    (void)state;
    struct bl_job_model bare = TINY_GPT2;
    bare.tied = 0;
    bare.bias = 0;
    bare.context = 7;
    check_gradient(&bare, 0);
}

/* Five, five and four rows of logits. */
static void test_gradient_equals_differences_with_logits_in_chunks(void **state)
{
    (void)state;
    check_gradient(&TINY_GPT2, 5);
}

/* ---- bits ---- */

static void test_bits_are_the_same_with_any_thread_count(void **state)
{
    (void)state;
    uint64_t one = model_bench_digest(&MODEL_SMALL, 150, 4, 1);
    assert_int_equal(one, model_bench_digest(&MODEL_SMALL, 150, 4, 2));
    assert_int_equal(one, model_bench_digest(&MODEL_SMALL, 150, 4, 3));
    one = model_bench_digest(&MODEL_SMALL_GPT2, 150, 4, 1);
    assert_int_equal(one, model_bench_digest(&MODEL_SMALL_GPT2, 150, 4, 2));
    assert_int_equal(one, model_bench_digest(&MODEL_SMALL_GPT2, 150, 4, 3));
}

static void test_probe_is_the_same_with_any_thread_count(void **state)
{
    (void)state;
    struct kern_pool *pool;
    struct kern *one = model_bench_kern(), *three;
    uint64_t digest[2] = {0}, again = 0;
    assert_int_equal(kern_pool_new(&pool, 3, NULL), 0);
    assert_int_equal(kern_cpu_open(&three, pool, NULL), 0);
    for (uint32_t tp = 1; tp <= 2; tp++) { /* over 2 ranks the slices differ: 1 and 2 kv heads */
        assert_int_equal(train_model_probe(one, &MODEL_SMALL, tp, 64, 2, 0, &digest[tp - 1], NULL),
                         0);
        assert_int_equal(train_model_probe(three, &MODEL_SMALL, tp, 64, 2, 0, &again, NULL), 0);
        assert_int_equal(digest[tp - 1], again);
    }
    assert_true(digest[0] != 0 && digest[0] != digest[1]);
    assert_int_equal(train_model_probe(three, &MODEL_SMALL, 4, 64, 2, 0, &again, NULL), BL_ECONFIG);
    three->ops->close(three);
    kern_pool_free(pool);
}

/* ---- contract ---- */

static void test_eval_gives_the_bits_of_training_loss(void **state)
{
    (void)state;
    struct model_bench b;
    model_bench_init(&b, &MODEL_SMALL, 40, 2, 2);
    uint64_t tokens, eval_tokens;
    double eval, loss = model_bench_pass(&b, 0, &tokens);
    assert_int_equal(train_model_eval(b.model, kern_real_f32_view(b.params), b.tokens, b.targets,
                                      &eval, &eval_tokens, NULL),
                     0);
    assert_memory_equal(&eval, &loss, sizeof loss);
    assert_int_equal(tokens, eval_tokens);
    assert_true(fabs(loss / (double)tokens - log(517)) < 0.1);
    model_bench_close(&b);
}

/* The first micro-batch's NaN is overwritten and the second is added, in every chunk; losses of
 * training and evaluation are the same; one chunk of all rows changes nothing; memory is that of a
 * chunk. */
static void test_logits_in_chunks_give_losses_and_gradients_of_all_at_once(void **state)
{
    (void)state;
    struct model_bench b;
    struct train_memory all, some;
    struct train_part part = TRAIN_PART_WHOLE;
    uint64_t tokens;
    double eval;
    model_bench_init(&b, &MODEL_SMALL, 20, 2, 2);
    double loss = model_bench_pass(&b, 0, &tokens) + model_bench_pass(&b, 1, &tokens);
    float *want = malloc(b.grad_elems * sizeof *want);
    assert_non_null(want);
    memcpy(want, b.grads, b.grad_elems * sizeof *want);
    static const uint32_t chunks[] = {1000, 40, 39, 20, 7, 1};
    for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) {
        memset(b.grads, 0xff, b.grad_elems * sizeof(float));
        model_bench_chunk(&b, 20, 2, chunks[i]);
        double first = model_bench_pass(&b, 0, &tokens), got = first;
        got += model_bench_pass(&b, 1, &tokens);
        assert_true(fabs(got - loss) <= 1e-6 * loss);
        assert_true(chunks[i] < 40 || memcmp(b.grads, want, b.grad_elems * sizeof *want) == 0);
        for (uint64_t k = 0; k < b.grad_elems; k++) {
            assert_true(fabsf(b.grads[k] - want[k]) <= 1e-4f * fabsf(want[k]) + 1e-4f);
        }
        assert_int_equal(train_model_eval(b.model, kern_real_f32_view(b.params), b.tokens,
                                          b.targets, &eval, &tokens, NULL),
                         0);
        assert_memory_equal(&eval, &first, sizeof eval);
    }
    assert_int_equal(train_model_memory(&all, b.kern, &MODEL_SMALL, &part, 20, 2, NULL), 0);
    part.head_chunk = 8;
    assert_int_equal(train_model_memory(&some, b.kern, &MODEL_SMALL, &part, 20, 2, NULL), 0);
    assert_int_equal(all.logits - some.logits, 4 * (40 - 8) * 517);
    assert_int_equal(all.total - some.total, all.logits - some.logits);
    free(want);
    model_bench_close(&b);
}

static void test_gradient_doubles_when_a_micro_batch_is_added_twice(void **state)
{
    (void)state;
    struct model_bench b;
    uint64_t tokens;
    model_bench_init(&b, &MODEL_SMALL, 20, 2, 1);
    model_bench_pass(&b, 0, &tokens);
    float *once = malloc(b.grad_elems * sizeof *once);
    assert_non_null(once);
    memcpy(once, b.grads, b.grad_elems * sizeof *once);
    model_bench_pass(&b, 1, &tokens);
    for (uint64_t i = 0; i < b.grad_elems; i++) {
        assert_true(fabsf(b.grads[i] - 2.0f * once[i]) <= 1e-4f * fabsf(once[i]) + 1e-5f);
    }
    free(once);
    model_bench_close(&b);
}

static void test_initial_weights_of_a_range_equal_the_whole(void **state)
{
    (void)state;
    struct model_bench b;
    model_bench_init(&b, &MODEL_SMALL, 8, 1, 2);
    const uint64_t cuts[] = {0, 1, 4096, 37223, 40960, 300000, b.buffer_elems};
    for (size_t i = 0; i + 1 < sizeof cuts / sizeof *cuts; i++) {
        uint64_t count = cuts[i + 1] - cuts[i];
        float *part = malloc(count * sizeof *part);
        assert_non_null(part);
        train_model_init_params(b.model, 7, part, cuts[i], cuts[i + 1], NULL);
        assert_memory_equal(part, b.params + cuts[i], count * sizeof *part);
        free(part);
    }
    double square = 0;
    for (uint64_t i = 0; i < 517 * 72; i++) {
        square += (double)b.params[i] * (double)b.params[i];
    }
    assert_true(fabs(sqrt(square / (517 * 72)) - 0.02) < 0.0005);
    model_bench_close(&b);
}

static void test_tensors_start_on_blocks_and_gaps_hold_zeros(void **state)
{
    (void)state;
    struct model_bench b;
    uint64_t tokens, params = 0;
    uint32_t count;
    model_bench_init(&b, &MODEL_SMALL, 16, 1, 1);
    model_bench_pass(&b, 0, &tokens);
    const struct train_tensor *t = train_model_tensors(b.model, &count);
    assert_int_equal(count, 2 + 9 * 2);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t end = i + 1 < count ? t[i + 1].offset : b.buffer_elems;
        assert_int_equal(t[i].offset % KERN_BLOCK, 0);
        for (uint64_t j = t[i].offset + t[i].elems; j < end; j++) {
            assert_true(b.params[j] == 0.0f && b.grads[j] == 0.0f);
        }
        params += t[i].elems;
    }
    assert_int_equal(params, train_model_param_elems(b.model));
    assert_int_equal(b.buffer_elems % KERN_BLOCK, 0);
    assert_string_equal(t[10].name, "model.layers.1.input_layernorm.weight");
    model_bench_close(&b);
}

static void test_token_beyond_vocabulary_is_refused(void **state)
{
    (void)state;
    struct model_bench b;
    struct bl_errmsg msg = {0};
    double loss;
    uint64_t tokens;
    model_bench_init(&b, &TINY, 4, 1, 1);
    b.tokens[2] = 23;
    assert_int_equal(train_model_eval(b.model, kern_real_f32_view(b.params), b.tokens, b.targets,
                                      &loss, &tokens, &msg),
                     BL_ELIMIT);
    assert_string_equal(msg.text, "token 2 is 23: not in a vocabulary of 23");
    model_bench_close(&b);
}

static void test_shape_that_cannot_be_is_refused(void **state)
{
    (void)state;
    struct train_model *model;
    struct bl_errmsg msg = {0};
    struct bl_job_model bad = TINY;
    struct train_memory memory;
    struct kern *kern = model_bench_kern();
    const struct train_part whole = TRAIN_PART_WHOLE;
    bad.heads = 5;
    assert_int_equal(train_model_new(&model, kern, &bad, 8, 1, &msg), BL_ECONFIG);
    assert_string_equal(msg.text, "model.dim 16 must be model.heads 5 times an even number");
    bad = TINY;
    bad.kv_heads = 3;
    assert_int_equal(train_model_new(&model, kern, &bad, 8, 1, &msg), BL_ECONFIG);
    assert_int_equal(train_model_memory(&memory, kern, &bad, &whole, 8, 1, &msg), BL_ECONFIG);
    assert_int_equal(train_model_memory(&memory, kern, &TINY, &whole, 8, 1, &msg), 0);
    assert_true(memory.total > 0);
}

static void test_rate_warms_up_then_falls_along_a_cosine(void **state)
{
    (void)state;
    assert_true(train_lr_at(1, 100, 10, 1.0, 0.1) == 0.1);
    assert_true(train_lr_at(10, 100, 10, 1.0, 0.1) == 1.0);
    assert_true(fabs(train_lr_at(55, 100, 10, 1.0, 0.1) - 0.55) < 1e-12);
    assert_true(train_lr_at(100, 100, 10, 1.0, 0.1) == 0.1);
    assert_true(train_lr_at(1, 100, 0, 1.0, 0.1) > 0.99);
    assert_true(train_lr_at(7, 5, 9, 1.0, 0.1) == 7.0 / 9.0);
}

static void test_sample_is_the_same_for_a_seed(void **state)
{
    (void)state;
    struct model_bench b;
    struct train_model *other_model; /* on one thread */
    model_bench_init(&b, &TINY, 8, 1, 2);
    assert_int_equal(train_model_new(&other_model, model_bench_kern(), &TINY, 8, 1, NULL), 0);
    roughen(&b);
    const kern_real *params = kern_real_f32_view(b.params);
    const int32_t prompt[3] = {1, 2, 3};
    int32_t first[40], again[40], other[40];
    struct train_sample how = {.temperature = 1.0, .top_k = 10, .seed = 5};
    assert_int_equal(train_model_sample(b.model, params, prompt, 3, first, 40, &how, NULL), 0);
    assert_int_equal(train_model_sample(other_model, params, prompt, 3, again, 40, &how, NULL), 0);
    how.seed = 6;
    assert_int_equal(train_model_sample(other_model, params, prompt, 3, other, 40, &how, NULL), 0);
    assert_memory_equal(first, again, sizeof first);
    assert_memory_not_equal(first, other, sizeof first);
    assert_int_equal(train_model_sample(b.model, params, prompt, 0, first, 4, &how, NULL),
                     BL_ELIMIT);
    train_model_free(other_model);
    model_bench_close(&b);
}

/* Greedy sampling, one position at a time with a cache, against the fp64 model over the whole text:
 * no other token may be likelier by more than rounding. */
static void check_sample(const struct bl_job_model *config)
{
    struct model_bench b;
    model_bench_init(&b, config, 7, 1, 1);
    roughen(&b);
    const struct train_sample greedy = {.temperature = 0};
    int32_t text[7] = {4, 9};
    assert_int_equal(train_model_sample(b.model, kern_real_f32_view(b.params), text, 2, text + 2, 5,
                                        &greedy, NULL),
                     0);
    struct ref_model ref = {.config = *config, .seq_len = 7, .batch = 1};
    ref.tensors = train_model_tensors(b.model, &ref.tensor_count);
    double *params = malloc(b.buffer_elems * sizeof(double));
    assert_non_null(params);
    for (uint64_t i = 0; i < b.buffer_elems; i++) {
        params[i] = (double)b.params[i];
    }
    const double *head = params + (config->tied ? 0 : ref.tensors[ref.tensor_count - 1].offset);
    for (int at = 1; at < 6; at++) { /* position `at` decides text[at + 1] */
        int32_t targets[7] = {-1, -1, -1, -1, -1, -1, -1};
        double chosen = 0, best = 1e9;
        for (int32_t token = 0; token < (int32_t)config->vocab; token++) {
            targets[at] = token;
            double loss = ref_model_loss(&ref, params, head, text, targets);
            chosen = token == text[at + 1] ? loss : chosen;
            best = loss < best ? loss : best;
        }
        assert_true(chosen < best + 1e-4);
    }
    free(params);
    model_bench_close(&b);
}

static void test_sample_is_what_the_whole_model_says(void **state)
{
    (void)state;
    struct model_bench b;
    struct bl_errmsg msg = {0};
    const struct train_sample greedy = {.temperature = 0};
    int32_t prompt[1] = {1}, out[9];
    check_sample(&TINY);
    check_sample(&TINY_GPT2);
    model_bench_init(&b, &TINY_GPT2, 7, 1, 1);
    assert_int_equal(
        train_model_sample(b.model, kern_real_f32_view(b.params), prompt, 1, out, 9, &greedy, &msg),
        BL_ELIMIT);
    assert_non_null(strstr(msg.text, "the model knows 9 positions"));
    model_bench_close(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gradient_equals_differences_untied),
        cmocka_unit_test(test_gradient_equals_differences_tied),
        cmocka_unit_test(test_gradient_equals_differences_stretched_positions),
        cmocka_unit_test(test_gradient_equals_differences_gpt2),
        cmocka_unit_test(test_gradient_equals_differences_gpt2_untied_without_biases),
        cmocka_unit_test(test_sample_is_what_the_whole_model_says),
        cmocka_unit_test(test_bits_are_the_same_with_any_thread_count),
        cmocka_unit_test(test_probe_is_the_same_with_any_thread_count),
        cmocka_unit_test(test_eval_gives_the_bits_of_training_loss),
        cmocka_unit_test(test_gradient_equals_differences_with_logits_in_chunks),
        cmocka_unit_test(test_logits_in_chunks_give_losses_and_gradients_of_all_at_once),
        cmocka_unit_test(test_gradient_doubles_when_a_micro_batch_is_added_twice),
        cmocka_unit_test(test_initial_weights_of_a_range_equal_the_whole),
        cmocka_unit_test(test_tensors_start_on_blocks_and_gaps_hold_zeros),
        cmocka_unit_test(test_token_beyond_vocabulary_is_refused),
        cmocka_unit_test(test_shape_that_cannot_be_is_refused),
        cmocka_unit_test(test_rate_warms_up_then_falls_along_a_cosine),
        cmocka_unit_test(test_sample_is_the_same_for_a_seed),
    };
    return cmocka_run_group_tests_name("trainer/model", tests, NULL, NULL);
}
