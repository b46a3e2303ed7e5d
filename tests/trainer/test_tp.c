/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tensor and sequence parallel ranks (threads, over a real communicator) against one rank that has
 * the whole model: the same weights and micro-batches, losses and gradients within the bound that
 * docs/trainer.md states.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <errno.h>
#include <math.h>

#include "base/digest.h"
#include "comm_world.h"
#include "model_bench.h"
#include "trainer/model.h"

#define SEQ_LEN 36 /* over 3 ranks a slice of the rows is no whole sequence */
#define BATCH   2
#define ROWS    (SEQ_LEN * BATCH)
#define MICROS  2
#define TP_MAX  4

/* GQA with kv heads for all ranks and not, sizes that do not divide; tied, untied, biases. */
static const struct bl_job_model LLAMA = {.layers = 2,
                                          .dim = 96,
                                          .hidden = 301,
                                          .heads = 8,
                                          .kv_heads = 4,
                                          .vocab = 517,
                                          .rope_theta = 10000.0,
                                          .norm_eps = 1e-5};
static const struct bl_job_model LLAMA_SHARED = {.layers = 2,
                                                 .dim = 80,
                                                 .hidden = 203,
                                                 .heads = 10,
                                                 .kv_heads = 2,
                                                 .vocab = 259,
                                                 .tied = 1,
                                                 .rope_theta = 10000.0,
                                                 .norm_eps = 1e-5};
static const struct bl_job_model LLAMA_ONE_KV = {.layers = 1,
                                                 .dim = 56,
                                                 .hidden = 90,
                                                 .heads = 7,
                                                 .kv_heads = 1,
                                                 .vocab = 100,
                                                 .rope_theta = 10000.0,
                                                 .norm_eps = 1e-5};
static const struct bl_job_model GPT2_PLAIN = {.arch = BL_ARCH_GPT2,
                                               .layers = 2,
                                               .dim = 64,
                                               .hidden = 250,
                                               .heads = 4,
                                               .kv_heads = 4,
                                               .vocab = 130,
                                               .context = 40,
                                               .rope_theta = 1,
                                               .norm_eps = 1e-5};

struct tp_case {
    const struct bl_job_model *config;
    uint32_t tp, sequence, recompute, head_chunk;
};

/* What a rank found. */
struct answer {
    struct kern *kern;
    struct train_model *model;
    float *grads;
    double losses[MICROS], eval;
    uint64_t counted[MICROS];
};

static struct tp_case g_case;
static struct answer g_whole, g_ranks[TP_MAX];
static float *g_params;         /* of the whole model */
static float g_norm_factor = 1; /* of the final norm's weights */
static int32_t g_tokens[MICROS][ROWS], g_targets[MICROS][ROWS];

/* ---- one rank ---- */

/* The box of each tensor out of the whole model's weights. */
static void take_boxes(const struct train_model *model, float *params)
{
    uint32_t count;
    const struct train_tensor *own = train_model_tensors(model, &count);
    const struct train_tensor *all = train_model_tensors(g_whole.model, &count);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t width = own[i].hi[1] - own[i].lo[1];
        for (uint64_t row = own[i].lo[0]; row < own[i].hi[0]; row++) {
            memcpy(params + own[i].local + (row - own[i].lo[0]) * width,
                   g_params + all[i].local + row * all[i].shape[1] + own[i].lo[1],
                   width * sizeof(float));
        }
    }
}

/* Two micro-batches, forward and backward, into `ret`, and the first once more without backward. */
static int pass(struct answer *ret, struct comm_group *group, const float *params,
                struct bl_errmsg *msg)
{
    struct train_plain plain = {ret->model, kern_real_f32_view(params), ret->grads};
    struct train_hooks hooks = train_hooks_plain(&plain);
    uint64_t tokens;
    int rc = 0;
    hooks.tp = group;
    for (int m = 0; rc == 0 && m < MICROS; m++) {
        struct train_flow flow = {
            .tokens = g_tokens[m], .targets = g_targets[m], .loss = &ret->losses[m], .add = m != 0};
        rc = train_model_forward(ret->model, &flow, &hooks, &ret->counted[m], msg);
        rc = rc != 0 ? rc : train_model_backward(ret->model, &flow, &hooks, msg);
    }
    struct train_flow flow = {
        .tokens = g_tokens[0], .targets = g_targets[0], .loss = &ret->eval, .eval = 1};
    return rc != 0 ? rc : train_model_forward(ret->model, &flow, &hooks, &tokens, msg);
}

static int answer_make(struct answer *ret, const struct train_part *part, struct bl_errmsg *msg)
{
    int rc = kern_cpu_open(&ret->kern, NULL, msg); /* each rank its own: they are threads */
    if (rc == 0) {
        rc = train_model_new_part(&ret->model, ret->kern, g_case.config, part, SEQ_LEN, BATCH, msg);
    }
    if (rc == 0) {
        uint64_t bytes = train_model_grad_elems(ret->model) * sizeof(float);
        ret->grads = malloc(bytes);
        memset(ret->grads, 0xff, bytes); /* NaN: all must be written */
    }
    return rc;
}

static void answer_close(struct answer *answer)
{
    train_model_free(answer->model);
    if (answer->kern != NULL) {
        answer->kern->ops->close(answer->kern);
    }
    free(answer->grads);
    memset(answer, 0, sizeof *answer);
}

static int rank_body(struct world *w, uint32_t rank)
{
    struct train_part part = TRAIN_PART_WHOLE;
    struct answer *ret = &g_ranks[rank];
    struct comm *comm;
    struct bl_errmsg msg = {0};
    part.tp = g_case.tp;
    part.tp_rank = rank;
    part.sequence = g_case.sequence;
    part.recompute = g_case.recompute;
    part.head_chunk = g_case.head_chunk;
    CHECK(join(&comm, w, rank) == 0);
    CHECK(answer_make(ret, &part, &msg) == 0);
    float *params = calloc(train_model_buffer_elems(ret->model), sizeof *params);
    take_boxes(ret->model, params);
    int rc = pass(ret, comm_everyone(comm), params, &msg);
    if (rc != 0) {
        fprintf(stderr, "rank %u: %s\n", rank, msg.text);
    }
    CHECK(rc == 0);
    free(params);
    comm_free(comm);
    return 0;
}

/* ---- the whole ---- */

/* Weights that are nowhere 0 or 1, so that each counts. */
static void whole_make(const struct bl_job_model *config)
{
    const struct train_part part = TRAIN_PART_WHOLE;
    uint32_t count;
    g_case = (struct tp_case){config, 1, 0, 0, 0};
    assert_int_equal(answer_make(&g_whole, &part, NULL), 0);
    uint64_t elems = train_model_buffer_elems(g_whole.model);
    g_params = malloc(elems * sizeof *g_params);
    train_model_init_params(g_whole.model, 7, g_params, 0, elems, NULL);
    const struct train_tensor *tensors = train_model_tensors(g_whole.model, &count);
    for (uint32_t i = 0; i < count; i++) {
        for (uint64_t k = 0; k < tensors[i].elems; k++) {
            g_params[tensors[i].local + k] +=
                0.1f * (float)(kern_rng_uniform(kern_rng_key(9, i), k) - 0.5);
            g_params[tensors[i].local + k] *=
                strcmp(tensors[i].name, "model.norm.weight") == 0 ? g_norm_factor : 1;
        }
    }
    for (uint32_t i = 0; i < MICROS * ROWS; i++) {
        g_tokens[i / ROWS][i % ROWS] = (int32_t)(kern_rng_bits(3, i) % config->vocab);
        g_targets[i / ROWS][i % ROWS] =
            i % 17 == 5 ? -1 : (int32_t)(kern_rng_bits(4, i) % config->vocab);
    }
    assert_int_equal(pass(&g_whole, NULL, g_params, NULL), 0);
}

static void whole_close(void)
{
    answer_close(&g_whole);
    free(g_params);
}

/* ---- against one another ---- */

/* The bound of docs/trainer.md, relative to the largest element of the gradient tensor. */
static double bound(const struct bl_job_model *c)
{
    uint32_t longest = c->vocab > c->hidden ? c->vocab : c->hidden;
    longest = c->dim > longest ? c->dim : longest;
    return (4 * c->layers + 3) * sqrt((double)longest) * 0x1p-24;
}

static double largest(const float *x, uint64_t count)
{
    double top = 0;
    for (uint64_t i = 0; i < count; i++) {
        top = fabs((double)x[i]) > top ? fabs((double)x[i]) : top;
    }
    return top;
}

/* What the errors of a tensor's gradient are measured by. The bias of k turns all scores of a
 * query alike, so its gradient is nothing but rounding of sums as large as that of v's bias. */
static double scale_of(const struct train_tensor *tensors, uint32_t count, uint32_t i)
{
    const struct train_tensor *t = &tensors[i];
    const char *end = strstr(t->name, "k_proj.bias");
    for (uint32_t k = 0; end != NULL && k < count; k++) {
        if (tensors[k].unit == t->unit && strstr(tensors[k].name, "v_proj.bias") != NULL) {
            t = &tensors[k];
        }
    }
    return largest(g_whole.grads + t->local, t->elems);
}

/* The largest difference of a rank's box [elems at `own`] to the whole's `all`. */
static double difference(const struct train_tensor *t, const float *own, const float *all)
{
    uint64_t width = t->hi[1] - t->lo[1];
    double top = 0;
    for (uint64_t k = 0; k < t->elems; k++) {
        double want = (double)all[(t->lo[0] + k / width) * t->shape[1] + t->lo[1] + k % width];
        double gap = fabs((double)own[k] - want);
        top = gap <= top ? top : gap; /* a NaN stays */
    }
    return top;
}

static void check_loss(double got, double want)
{
    assert_true(fabs(got - want) <= bound(g_case.config) * want);
}

/* Gradient of the rank against the whole's; the worst share of the bound. */
static double check_rank(uint32_t rank)
{
    const struct answer *a = &g_ranks[rank];
    uint32_t count;
    const struct train_tensor *own = train_model_tensors(a->model, &count);
    const struct train_tensor *all = train_model_tensors(g_whole.model, &count);
    double limit = bound(g_case.config), worst = 0;
    for (uint32_t i = 0; i < count; i++) {
        double gap = difference(&own[i], a->grads + own[i].local, g_whole.grads + all[i].local);
        double share = gap / (limit * scale_of(all, count, i));
        if (!(share <= 1)) {
            fail_msg("rank %u of %u: %s: %g of the bound", rank, g_case.tp, own[i].name, share);
        }
        worst = share > worst ? share : worst;
        if (own[i].owner != rank) { /* the bits of its owner */
            const struct answer *o = &g_ranks[own[i].owner];
            assert_memory_equal(a->grads + own[i].local,
                                o->grads + train_model_tensors(o->model, &count)[i].local,
                                own[i].elems * sizeof(float));
        }
    }
    if (g_case.config->tied) { /* the head's own region */
        struct train_tensor head = own[0];
        double gap = difference(&head, a->grads + train_model_local_elems(a->model),
                                g_whole.grads + train_model_local_elems(g_whole.model));
        assert_true(gap <= limit * largest(g_whole.grads + train_model_local_elems(g_whole.model),
                                           all[0].elems));
    }
    for (int m = 0; m < MICROS; m++) {
        check_loss(a->losses[m], g_whole.losses[m]);
        assert_true(a->losses[m] == g_ranks[0].losses[m]);
        assert_int_equal(a->counted[m], g_whole.counted[m]);
    }
    assert_true(a->eval == a->losses[0]);
    return worst;
}

static void ranks_close(void)
{
    for (uint32_t r = 0; r < TP_MAX; r++) {
        answer_close(&g_ranks[r]);
    }
}

static void run(uint32_t tp, uint32_t sequence, uint32_t recompute)
{
    static const char nodes[TP_MAX + 1] = "aaaa";
    g_case.tp = tp;
    g_case.sequence = sequence;
    g_case.recompute = recompute;
    run_threads(nodes + TP_MAX - tp, rank_body);
}

/* Of all that the ranks computed. */
static uint64_t digest_of_ranks(void)
{
    uint64_t digest = 0;
    for (uint32_t r = 0; r < g_case.tp; r++) {
        const struct answer *a = &g_ranks[r];
        digest ^= bl_xxh3(a->losses, sizeof a->losses);
        digest =
            bl_mix64(digest) ^ bl_xxh3(a->grads, train_model_grad_elems(a->model) * sizeof(float));
    }
    return digest;
}

static int is_norm(const struct train_tensor *t)
{
    return strstr(t->name, "norm") != NULL || strstr(t->name, ".ln_") != NULL;
}

/* The digest without norms, whose gradients sequence parallel ranks add in another order. */
static uint64_t digest_without_norms(void)
{
    uint64_t digest = 0;
    for (uint32_t r = 0; r < g_case.tp; r++) {
        const struct answer *a = &g_ranks[r];
        uint32_t count;
        const struct train_tensor *tensors = train_model_tensors(a->model, &count);
        digest ^= bl_xxh3(a->losses, sizeof a->losses);
        for (uint32_t i = 0; i < count; i++) {
            if (!is_norm(&tensors[i])) {
                digest = bl_mix64(digest) ^
                         bl_xxh3(a->grads + tensors[i].local, tensors[i].elems * sizeof(float));
            }
        }
    }
    return digest;
}

/* Sequence parallel or not, with recomputation or without: all against the whole. */
static void check_ways(const struct bl_job_model *config, uint32_t tp)
{
    uint64_t rest[2];
    double worst = 0;
    whole_make(config);
    for (uint32_t sequence = 0; sequence <= 1; sequence++) {
        uint64_t digest = 0;
        for (uint32_t recompute = 0; recompute <= BL_RECOMPUTE_FULL; recompute++) {
            run(tp, sequence, recompute);
            for (uint32_t r = 0; recompute == 0 && r < tp; r++) {
                double share = check_rank(r);
                worst = share > worst ? share : worst;
            }
            assert_true(recompute == 0 || digest == digest_of_ranks());
            digest = digest_of_ranks();
            rest[sequence] = digest_without_norms();
            ranks_close();
        }
    }
    assert_int_equal(rest[0], rest[1]);
    printf("%s, tp %u: at most %.3f of the bound\n",
           config->arch == BL_ARCH_GPT2 ? "gpt2" : "llama", tp, worst);
    whole_close();
}

static void test_llama_in_slices_is_the_whole_within_the_bound(void **state)
{
    (void)state;
    for (uint32_t tp = 2; tp <= TP_MAX; tp++) {
        check_ways(&LLAMA, tp);
    }
}

static void test_llama_with_fewer_kv_heads_than_ranks_shares_them(void **state)
{
    (void)state;
    check_ways(&LLAMA_SHARED, 2);
    check_ways(&LLAMA_SHARED, 4);
    for (uint32_t tp = 2; tp <= TP_MAX; tp++) {
        check_ways(&LLAMA_ONE_KV, tp);
    }
}

static void test_gpt2_in_slices_is_the_whole_within_the_bound(void **state)
{
    (void)state;
    for (uint32_t tp = 2; tp <= TP_MAX; tp++) {
        check_ways(&MODEL_SMALL_GPT2, tp);
        check_ways(&GPT2_PLAIN, tp);
    }
}

/* Logits 25 rows at a time: 25, 25 and 22. */
static void test_slices_with_logits_in_chunks_are_the_whole_within_the_bound(void **state)
{
    (void)state;
    for (uint32_t sequence = 0; sequence <= 1; sequence++) {
        whole_make(&LLAMA);
        g_case.head_chunk = 25;
        run(2, sequence, BL_RECOMPUTE_FULL);
        for (uint32_t r = 0; r < 2; r++) {
            check_rank(r);
        }
        ranks_close();
        whole_close();
    }
}

/* Cores whose BLAS kernels are known (test_golden_bits.c), with the bits of three ranks there: the
 * order of every sum is part of what a run is. */
static const struct {
    const char *core;
    uint64_t llama, gpt2;
} GOLDEN[] = {
    {"Zen", 0xd59e3e235530f1c7, 0xceebf845aed9712e},
    {"Haswell", 0xd59e3e235530f1c7, 0xceebf845aed9712e},
};

static uint64_t golden_of(const struct bl_job_model *config)
{
    whole_make(config);
    run(3, 1, BL_RECOMPUTE_NONE);
    uint64_t digest = digest_of_ranks();
    ranks_close();
    whole_close();
    return digest;
}

static void test_bits_of_three_ranks_are_the_golden_ones(void **state)
{
    (void)state;
    uint64_t llama = golden_of(&LLAMA_ONE_KV), gpt2 = golden_of(&MODEL_SMALL_GPT2);
    printf("%s: %016llx %016llx\n", kern_build_name(), (unsigned long long)llama,
           (unsigned long long)gpt2);
    for (size_t i = 0; i < sizeof GOLDEN / sizeof *GOLDEN; i++) {
        if (strcmp(GOLDEN[i].core, kern_core_name()) == 0) {
            assert_int_equal(llama, GOLDEN[i].llama);
            assert_int_equal(gpt2, GOLDEN[i].gpt2);
        }
    }
}

/* Logits hundreds apart: exponentials are of differences to the largest of all ranks'. */
static void test_logits_far_apart_give_the_loss_of_the_whole(void **state)
{
    (void)state;
    g_norm_factor = 3000;
    whole_make(&LLAMA);
    for (uint32_t tp = 2; tp <= TP_MAX; tp++) {
        run(tp, 0, BL_RECOMPUTE_NONE);
        for (uint32_t r = 0; r < tp; r++) {
            check_loss(g_ranks[r].eval, g_whole.eval);
        }
        ranks_close();
    }
    assert_true(g_whole.eval / ROWS > 100);
    whole_close();
    g_norm_factor = 1;
}

/* A rank makes of the first weights what it has: the same numbers as in the whole. */
static void test_first_weights_of_a_slice_are_those_of_the_whole(void **state)
{
    (void)state;
    whole_make(&LLAMA_SHARED);
    train_model_init_params(g_whole.model, 7, g_params, 0, train_model_local_elems(g_whole.model),
                            NULL);
    for (uint32_t r = 0; r < 4; r++) {
        struct train_part part = TRAIN_PART_WHOLE;
        part.tp = 4;
        part.tp_rank = r;
        assert_int_equal(answer_make(&g_ranks[r], &part, NULL), 0);
        uint64_t elems = train_model_local_elems(g_ranks[r].model);
        float *got = malloc(elems * sizeof *got), *want = calloc(elems, sizeof *want);
        train_model_init_params(g_ranks[r].model, 7, got, 0, elems, NULL);
        take_boxes(g_ranks[r].model, want);
        assert_memory_equal(got, want, elems * sizeof *got);
        free(got);
        free(want);
    }
    ranks_close();
    whole_close();
}

static void test_what_cannot_be_cut_is_refused_with_the_numbers(void **state)
{
    (void)state;
    struct train_part part = TRAIN_PART_WHOLE;
    struct train_model *model = NULL;
    struct bl_errmsg msg = {0};
    part.tp = 3;
    assert_int_equal(
        train_model_new_part(&model, model_bench_kern(), &LLAMA_SHARED, &part, SEQ_LEN, 1, &msg),
        BL_ECONFIG);
    assert_non_null(strstr(msg.text, "kv_heads 2"));
    part.sequence = 1;
    assert_int_equal(
        train_model_new_part(&model, model_bench_kern(), &LLAMA, &part, SEQ_LEN + 1, 1, &msg),
        BL_ECONFIG);
    assert_non_null(strstr(msg.text, "37"));
    assert_null(model);
}

static void test_a_slice_alone_neither_passes_nor_samples(void **state)
{
    (void)state;
    struct train_part part = TRAIN_PART_WHOLE;
    struct train_sample how = {.temperature = 0};
    struct answer alone = {0};
    struct bl_errmsg msg = {0};
    int32_t out[2];
    g_case = (struct tp_case){&LLAMA, 2, 0, 0, 0};
    part.tp = 2;
    assert_int_equal(answer_make(&alone, &part, NULL), 0);
    float *params = calloc(train_model_buffer_elems(alone.model), sizeof *params);
    assert_int_equal(pass(&alone, NULL, params, &msg), -EINVAL);
    assert_int_equal(train_model_sample(alone.model, kern_real_f32_view(params), g_tokens[0], 1,
                                        out, 2, &how, &msg),
                     -EINVAL);
    free(params);
    answer_close(&alone);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_first_weights_of_a_slice_are_those_of_the_whole),
        cmocka_unit_test(test_llama_in_slices_is_the_whole_within_the_bound),
        cmocka_unit_test(test_llama_with_fewer_kv_heads_than_ranks_shares_them),
        cmocka_unit_test(test_gpt2_in_slices_is_the_whole_within_the_bound),
        cmocka_unit_test(test_slices_with_logits_in_chunks_are_the_whole_within_the_bound),
        cmocka_unit_test(test_bits_of_three_ranks_are_the_golden_ones),
        cmocka_unit_test(test_logits_far_apart_give_the_loss_of_the_whole),
        cmocka_unit_test(test_what_cannot_be_cut_is_refused_with_the_numbers),
        cmocka_unit_test(test_a_slice_alone_neither_passes_nor_samples),
    };
    if (kern_start(NULL) < 0) {
        return 1;
    }
    return cmocka_run_group_tests_name("trainer/tp", tests, NULL, NULL);
}
