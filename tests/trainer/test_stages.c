/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model in parts: cut in virtual stages, with several micro-batches in flight, weights and
 * gradients unit by unit, recomputation: always loss and gradient of the whole model, bit for bit.
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

#define SEQ_LEN    9
#define BATCH      2
#define ROWS       (SEQ_LEN * BATCH)
#define MICROS     3 /* micro-batches of a lane */
#define VSTAGE_MAX 6
#define CALLS_MAX  256

static const struct bl_job_model LLAMA = {.layers = 6,
                                          .dim = 24,
                                          .hidden = 40,
                                          .heads = 4,
                                          .kv_heads = 2,
                                          .vocab = 53,
                                          .tied = 0,
                                          .rope_theta = 100.0,
                                          .norm_eps = 1e-5};
static const struct bl_job_model GPT2 = {.arch = BL_ARCH_GPT2,
                                         .layers = 6,
                                         .dim = 21,
                                         .hidden = 50,
                                         .heads = 3,
                                         .kv_heads = 3,
                                         .vocab = 211,
                                         .tied = 1,
                                         .bias = 1,
                                         .context = 12,
                                         .rope_theta = 1,
                                         .norm_eps = 1e-5};

/* The whole model's answers. */
struct whole {
    struct model_bench b;
    int32_t *tokens[MICROS], *targets[MICROS];
    double losses[MICROS];
    uint64_t counted[MICROS];
};

static void whole_init(struct whole *w, const struct bl_job_model *config)
{
    memset(w, 0, sizeof *w);
    model_bench_init(&w->b, config, SEQ_LEN, BATCH, 1);
    for (int m = 0; m < MICROS; m++) {
        w->tokens[m] = malloc(2 * ROWS * sizeof(int32_t));
        assert_non_null(w->tokens[m]);
        w->targets[m] = w->tokens[m] + ROWS;
        for (uint32_t i = 0; i < 2 * ROWS; i++) {
            w->tokens[m][i] =
                (int32_t)(kern_rng_bits(kern_rng_key(5, (uint64_t)m), i) % config->vocab);
        }
        w->targets[m][m] = -1;
        assert_int_equal(train_model_forward_backward(w->b.model, kern_real_f32_view(w->b.params),
                                                      w->tokens[m], w->targets[m], w->b.grads,
                                                      m != 0, &w->losses[m], &w->counted[m], NULL),
                         0);
    }
}

static void whole_close(struct whole *w)
{
    for (int m = 0; m < MICROS; m++) {
        free(w->tokens[m]);
    }
    model_bench_close(&w->b);
}

/* ---- hooks that lend one unit at a time ---- */

/* What is not lent is NaN: a pass that reads or writes outside its time changes the result. */
struct lender {
    const struct train_model *model;
    const struct train_unit *units;
    struct train_plain plain;
    float *weights, *grads; /* what is lent, or NULL */
    uint32_t grads_unit;
    int adds; /* the lane has begun: gradients are added */
    uint32_t calls[CALLS_MAX], call_count;
    int fail_at; /* the call that fails, from 1; 0: none */
};

static void lend_none(struct lender *l)
{
    free(l->weights); /* ASan sees a later use */
    l->weights = NULL;
    assert_null(l->grads);
}

static int note(struct lender *l, uint32_t kind, uint32_t unit)
{
    assert_true(l->call_count < CALLS_MAX);
    l->calls[l->call_count++] = kind << 16 | unit;
    return l->fail_at != 0 && (uint32_t)l->fail_at == l->call_count ? BL_EABORTED : 0;
}

static float *copy_of(const float *from, uint64_t elems)
{
    float *to = malloc(elems * sizeof *to);
    assert_non_null(to);
    memcpy(to, from, elems * sizeof *to);
    return to;
}

static int lend_weights(void *ctx, uint32_t unit, int backward, const kern_real **ret,
                        struct bl_errmsg *msg)
{
    struct lender *l = ctx;
    const struct train_hooks plain = train_hooks_plain(&l->plain);
    const kern_real *from;
    lend_none(l);
    assert_int_equal(plain.weights(plain.ctx, unit, backward, &from, msg), 0);
    l->weights = copy_of(kern_real_floats_view(from), l->units[unit].elems);
    *ret = kern_real_f32(l->weights);
    return note(l, backward ? 2 : 1, unit);
}

static int lend_grads(void *ctx, uint32_t unit, float **ret, struct bl_errmsg *msg)
{
    struct lender *l = ctx;
    (void)msg;
    assert_null(l->grads);
    l->grads = copy_of(l->plain.grads + l->units[unit].local, l->units[unit].elems);
    if (!l->adds) {
        memset(l->grads, 0xff, l->units[unit].elems * sizeof(float));
    }
    l->grads_unit = unit;
    *ret = l->grads;
    return note(l, 3, unit);
}

static int lend_done(void *ctx, uint32_t unit, struct bl_errmsg *msg)
{
    struct lender *l = ctx;
    (void)msg;
    assert_int_equal(unit, l->grads_unit);
    memcpy(l->plain.grads + l->units[unit].local, l->grads, l->units[unit].elems * sizeof(float));
    free(l->grads);
    l->grads = NULL;
    lend_none(l);
    return note(l, 4, unit);
}

static int lend_poke(void *ctx, struct bl_errmsg *msg)
{
    (void)msg;
    lend_none(ctx);
    return note(ctx, 5, 0);
}

static struct train_hooks lender_hooks(struct lender *l)
{
    return (struct train_hooks){l, lend_weights, lend_grads, lend_done, lend_poke, NULL};
}

/* ---- a model in stages ---- */

struct stage {
    struct train_model *model;
    struct train_plain plain;
    struct lender lender;
    float *params, *grads;
};

struct cut {
    uint32_t pp, chunks, sets, recompute;
    int lend;
};

struct cut_run {
    struct whole *whole;
    struct cut cut;
    struct stage stages[VSTAGE_MAX];
    float *stream[MICROS][VSTAGE_MAX + 1]; /* after virtual stage v - 1; its gradient too */
};

static void stage_init(struct cut_run *r, uint32_t s)
{
    struct stage *st = &r->stages[s];
    struct model_bench *b = &r->whole->b;
    const struct bl_job_model *config = b->config;
    struct bl_errmsg msg = {0};
    const struct train_part part = {.tp = 1,
                                    .pp = r->cut.pp,
                                    .stage = s,
                                    .chunks = r->cut.chunks,
                                    .sets = r->cut.sets,
                                    .recompute = r->cut.recompute};
    assert_int_equal(train_model_new_part(&st->model, b->kern, config, &part, SEQ_LEN, BATCH, &msg),
                     0);
    uint64_t local = train_model_local_elems(st->model);
    st->params = malloc(train_model_buffer_elems(st->model) * sizeof(float));
    st->grads = malloc(train_model_grad_elems(st->model) * sizeof(float));
    assert_true(st->params != NULL && st->grads != NULL);
    memset(st->grads, 0xff, train_model_grad_elems(st->model) * sizeof(float));
    train_model_init_params(st->model, 7, st->params, 0, local, NULL);
    memcpy(st->params + local, b->params, train_model_copy_elems(st->model) * sizeof(float));
    st->plain = (struct train_plain){st->model, kern_real_f32(st->params), st->grads};
    uint32_t count;
    st->lender = (struct lender){
        .model = st->model, .units = train_model_units(st->model, &count), .plain = st->plain};
}

static struct train_hooks stage_hooks(struct cut_run *r, struct stage *st)
{
    return r->cut.lend ? lender_hooks(&st->lender) : train_hooks_plain(&st->plain);
}

/* The flow of a micro-batch through virtual stage v; backward overwrites the streams' memory with
 * their gradients. */
static struct train_flow flow_of(struct cut_run *r, uint32_t v, int micro, uint32_t set)
{
    uint32_t last = r->cut.pp * r->cut.chunks - 1;
    float *in = r->stream[micro][v], *out = r->stream[micro][v + 1];
    return (struct train_flow){.chunk = v / r->cut.pp,
                               .set = set,
                               .tokens = v == 0 ? r->whole->tokens[micro] : NULL,
                               .targets = v == last ? r->whole->targets[micro] : NULL,
                               .in = kern_real_f32(v == 0 ? NULL : in),
                               .out = kern_real_f32(v == last ? NULL : out),
                               .dout = kern_real_f32(v == last ? NULL : out),
                               .din = kern_real_f32(v == 0 ? NULL : in),
                               .add = micro != 0};
}

static void forward(struct cut_run *r, uint32_t v, int micro, uint32_t set)
{
    struct stage *st = &r->stages[v % r->cut.pp];
    const struct train_hooks hooks = stage_hooks(r, st);
    struct train_flow flow = flow_of(r, v, micro, set);
    double loss = 0;
    uint64_t tokens = 99;
    flow.loss = &loss;
    assert_int_equal(train_model_forward(st->model, &flow, &hooks, &tokens, NULL), 0);
    int last = v + 1 == r->cut.pp * r->cut.chunks;
    double expect = last ? r->whole->losses[micro] : 0;
    assert_memory_equal(&loss, &expect, sizeof loss);
    assert_int_equal(tokens, last ? r->whole->counted[micro] : 0);
}

static void backward(struct cut_run *r, uint32_t v, int micro, uint32_t set)
{
    struct stage *st = &r->stages[v % r->cut.pp];
    const struct train_hooks hooks = stage_hooks(r, st);
    const struct train_flow flow = flow_of(r, v, micro, set);
    st->lender.adds = micro != 0;
    assert_int_equal(train_model_backward(st->model, &flow, &hooks, NULL), 0);
}

/* Every unit's gradient is that of the whole model, the tied head's too. */
static void compare_gradients(struct cut_run *r)
{
    uint32_t count;
    const struct train_unit *all = train_model_units(r->whole->b.model, &count);
    uint64_t elems = 0;
    for (uint32_t s = 0; s < r->cut.pp; s++) {
        const struct train_unit *mine = train_model_units(r->stages[s].model, &count);
        for (uint32_t u = 0; u < count; u++) {
            assert_int_equal(mine[u].elems, all[u].elems);
            if (mine[u].local != TRAIN_NOT_HERE) {
                assert_memory_equal(r->stages[s].grads + mine[u].local,
                                    r->whole->b.grads + all[u].local,
                                    mine[u].elems * sizeof(float));
                elems += mine[u].elems;
            }
        }
    }
    assert_int_equal(elems, r->whole->b.grad_elems);
    for (uint64_t i = 0; i < elems; i++) {
        assert_true(isfinite(r->whole->b.grads[i])); /* gaps as well: they were NaN */
    }
}

static void cut_close(struct cut_run *r)
{
    for (uint32_t s = 0; s < r->cut.pp; s++) {
        lend_none(&r->stages[s].lender);
        train_model_free(r->stages[s].model);
        free(r->stages[s].params);
        free(r->stages[s].grads);
    }
    for (int m = 0; m < MICROS; m++) {
        for (uint32_t v = 0; v <= VSTAGE_MAX; v++) {
            free(r->stream[m][v]);
        }
    }
}

static void cut_init(struct cut_run *r, struct whole *w, struct cut cut)
{
    memset(r, 0, sizeof *r);
    r->whole = w;
    r->cut = cut;
    assert_true(cut.pp * cut.chunks <= VSTAGE_MAX);
    for (uint32_t s = 0; s < cut.pp; s++) {
        stage_init(r, s);
    }
    for (int m = 0; m < MICROS; m++) {
        for (uint32_t v = 0; v <= VSTAGE_MAX; v++) {
            r->stream[m][v] = malloc(ROWS * w->b.config->dim * sizeof(float));
            assert_non_null(r->stream[m][v]);
        }
    }
}

/* All micro-batches forward through all stages, then all backward: as many sets as passes wait. */
static void check_cut(struct whole *w, struct cut cut)
{
    struct cut_run r;
    uint32_t vstages = cut.pp * cut.chunks;
    cut.sets = MICROS * cut.chunks;
    cut_init(&r, w, cut);
    for (int m = 0; m < MICROS; m++) {
        for (uint32_t v = 0; v < vstages; v++) {
            forward(&r, v, m, (uint32_t)m * cut.chunks + v / cut.pp);
        }
    }
    for (int m = 0; m < MICROS; m++) {
        for (uint32_t v = vstages; v-- > 0;) {
            backward(&r, v, m, (uint32_t)m * cut.chunks + v / cut.pp);
        }
    }
    compare_gradients(&r);
    cut_close(&r);
}

static void check_model(const struct bl_job_model *config)
{
    static const struct cut cuts[] = {
        {.pp = 1, .chunks = 1},
        {.pp = 2, .chunks = 1, .lend = 1},
        {.pp = 3, .chunks = 1},
        {.pp = 4, .chunks = 1},
        {.pp = 2, .chunks = 2, .lend = 1},
        {.pp = 2, .chunks = 3},
        {.pp = 3, .chunks = 2},
        {.pp = 1, .chunks = 4},
        {.pp = 6, .chunks = 1},
    };
    struct whole w;
    whole_init(&w, config);
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        for (uint32_t recompute = 0; recompute <= BL_RECOMPUTE_FULL; recompute++) {
            struct cut cut = cuts[i];
            cut.recompute = recompute;
            check_cut(&w, cut);
        }
    }
    whole_close(&w);
}

static void test_stages_give_the_bits_of_the_whole_llama(void **state)
{
    (void)state;
    struct bl_job_model tied = LLAMA;
    tied.tied = 1;
    check_model(&LLAMA);
    check_model(&tied);
}

static void test_stages_give_the_bits_of_the_whole_gpt2(void **state)
{
    (void)state;
    struct bl_job_model bare = GPT2;
    bare.tied = 0;
    bare.bias = 0;
    check_model(&GPT2);
    check_model(&bare);
}

/* 1F1B on two stages with two sets, interleaved chunks: each stage keeps few passes. The logits of
 * a waiting set are overwritten by the next one's and made again. */
static void test_few_sets_serve_chunks_in_any_order(void **state)
{
    (void)state;
    static const struct {
        char what;
        uint8_t vstage, micro, set;
    } ops[] = {
        {'f', 0, 0, 0}, {'f', 1, 0, 0}, {'f', 2, 0, 1}, {'f', 0, 1, 2}, {'f', 3, 0, 1},
        {'f', 1, 1, 2}, {'f', 2, 1, 3}, {'f', 3, 1, 3}, {'b', 3, 0, 1}, {'b', 2, 0, 1},
        {'b', 3, 1, 3}, {'f', 0, 2, 1}, {'b', 1, 0, 0}, {'f', 1, 2, 1}, {'b', 0, 0, 0},
        {'f', 2, 2, 0}, {'b', 2, 1, 3}, {'b', 1, 1, 2}, {'f', 3, 2, 0}, {'b', 3, 2, 0},
        {'b', 0, 1, 2}, {'b', 2, 2, 0}, {'b', 1, 2, 1}, {'b', 0, 2, 1},
    };
    const struct bl_job_model *configs[] = {&LLAMA, &GPT2};
    for (size_t i = 0; i < 2; i++) {
        struct whole w;
        struct cut_run r;
        whole_init(&w, configs[i]);
        cut_init(&r, &w, (struct cut){.pp = 2, .chunks = 2, .sets = 4, .lend = 1});
        for (size_t k = 0; k < sizeof ops / sizeof *ops; k++) {
            (ops[k].what == 'f' ? forward : backward)(&r, ops[k].vstage, ops[k].micro, ops[k].set);
        }
        compare_gradients(&r);
        cut_close(&r);
        whole_close(&w);
    }
}

static void test_evaluation_between_does_not_disturb_a_waiting_set(void **state)
{
    (void)state;
    struct whole w;
    struct cut_run r;
    whole_init(&w, &GPT2);
    cut_init(&r, &w, (struct cut){.pp = 1, .chunks = 1, .sets = 2, .lend = 1});
    for (int m = 0; m < MICROS; m++) {
        const struct train_hooks hooks = stage_hooks(&r, &r.stages[0]);
        struct train_flow flow = flow_of(&r, 0, (m + 1) % MICROS, 1);
        double loss = 0;
        uint64_t tokens;
        flow.eval = 1;
        flow.loss = &loss;
        forward(&r, 0, m, 0);
        assert_int_equal(train_model_forward(r.stages[0].model, &flow, &hooks, &tokens, NULL), 0);
        assert_memory_equal(&loss, &w.losses[(m + 1) % MICROS], sizeof loss);
        backward(&r, 0, m, 0);
    }
    compare_gradients(&r);
    cut_close(&r);
    whole_close(&w);
}

/* ---- the calls of hooks ---- */

static void test_idle_rank_makes_the_calls_of_a_working_one(void **state)
{
    (void)state;
    struct whole w;
    struct cut_run r;
    whole_init(&w, &GPT2);
    cut_init(&r, &w, (struct cut){.pp = 2, .chunks = 2, .sets = 4, .lend = 1});
    for (uint32_t v = 0; v < 4; v++) {
        forward(&r, v, 0, v);
    }
    for (uint32_t v = 4; v-- > 0;) {
        backward(&r, v, 0, v);
    }
    for (uint32_t s = 0; s < 2; s++) {
        struct stage *st = &r.stages[s];
        struct lender idle = st->lender;
        const struct train_hooks hooks = lender_hooks(&idle);
        idle.call_count = 0;
        assert_int_equal(train_model_idle(st->model, 0, 0, &hooks, NULL), 0);
        assert_int_equal(train_model_idle(st->model, 1, 0, &hooks, NULL), 0);
        assert_int_equal(train_model_idle(st->model, 1, 1, &hooks, NULL), 0);
        assert_int_equal(train_model_idle(st->model, 0, 1, &hooks, NULL), 0);
        assert_int_equal(idle.call_count, st->lender.call_count);
        assert_memory_equal(idle.calls, st->lender.calls, idle.call_count * sizeof *idle.calls);
        lend_none(&idle);
    }
    /* the last chunk of the last stage, as the header says */
    static const uint32_t expect[] = {1 << 16 | 6, 5 << 16,     1 << 16 | 7,
                                      5 << 16,     1 << 16 | 8, 5 << 16};
    assert_memory_equal(r.stages[1].lender.calls + 4, expect, sizeof expect);
    cut_close(&r);
    whole_close(&w);
}

static void test_error_of_any_hook_ends_the_pass(void **state)
{
    (void)state;
    struct whole w;
    struct cut_run r;
    whole_init(&w, &LLAMA);
    cut_init(&r, &w, (struct cut){.pp = 1, .chunks = 1, .sets = 1, .lend = 1});
    struct stage *st = &r.stages[0];
    const struct train_hooks hooks = lender_hooks(&st->lender);
    const struct train_flow flow = flow_of(&r, 0, 0, 0);
    const int forward_calls = 2 * 8, backward_calls = 4 * 8;
    for (int at = 1; at <= forward_calls + backward_calls; at++) {
        uint64_t tokens = 99;
        st->lender.call_count = 0;
        st->lender.fail_at = at;
        int rc = train_model_forward(st->model, &flow, &hooks, &tokens, NULL);
        assert_int_equal(rc, at <= forward_calls ? BL_EABORTED : 0);
        assert_true((tokens == 99) == (rc != 0));
        if (rc == 0) {
            rc = train_model_backward(st->model, &flow, &hooks, NULL);
            assert_int_equal(rc, BL_EABORTED);
        }
        assert_int_equal(st->lender.call_count, at);
        free(st->lender.grads);
        st->lender.grads = NULL;
    }
    cut_close(&r);
    whole_close(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stages_give_the_bits_of_the_whole_llama),
        cmocka_unit_test(test_stages_give_the_bits_of_the_whole_gpt2),
        cmocka_unit_test(test_few_sets_serve_chunks_in_any_order),
        cmocka_unit_test(test_evaluation_between_does_not_disturb_a_waiting_set),
        cmocka_unit_test(test_idle_rank_makes_the_calls_of_a_working_one),
        cmocka_unit_test(test_error_of_any_hook_ends_the_pass),
    };
    return cmocka_run_group_tests_name("trainer/stages", tests, NULL, NULL);
}
