/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a part of a model is: layers by stage, boxes by tensor parallel rank, places in local order,
 * initial weights, memory to the byte.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "trainer/model.h"

static struct kern *g_kern;
static const struct bl_job_model LLAMA = {.layers = 6,
                                          .dim = 48,
                                          .hidden = 50,
                                          .heads = 12,
                                          .kv_heads = 4,
                                          .vocab = 93,
                                          .rope_theta = 100.0,
                                          .norm_eps = 1e-5};
static const struct bl_job_model GPT2 = {.arch = BL_ARCH_GPT2,
                                         .layers = 3,
                                         .dim = 32,
                                         .hidden = 50,
                                         .heads = 8,
                                         .kv_heads = 8,
                                         .vocab = 131,
                                         .tied = 1,
                                         .bias = 1,
                                         .context = 64,
                                         .rope_theta = 1,
                                         .norm_eps = 1e-5};

/* ---- layers by stage ---- */

/* The least possible cost of the most expensive stage, by trying all. */
static uint64_t best_cost(uint32_t layers, uint32_t stages, uint64_t layer, uint64_t head)
{
    if (stages == 1) {
        return layers * layer + head;
    }
    uint64_t best = UINT64_MAX;
    for (uint32_t first = 1; first + stages - 1 <= layers; first++) {
        uint64_t rest = best_cost(layers - first, stages - 1, layer, head);
        uint64_t most = rest > first * layer ? rest : first * layer;
        best = most < best ? most : best;
    }
    return best;
}

static void test_cut_makes_the_largest_stage_as_small_as_can_be(void **state)
{
    (void)state;
    for (uint32_t layers = 1; layers <= 12; layers++) {
        for (uint32_t vocab = 10; vocab <= 100000; vocab *= 10) {
            for (uint32_t stages = 1; stages <= layers; stages++) {
                struct bl_job_model config = LLAMA;
                uint32_t first[13];
                config.layers = layers;
                config.vocab = vocab;
                assert_int_equal(train_cut(&config, 64, stages, first, NULL), 0);
                uint64_t layer = 48 * (2 * 48 + 2 * 16) + 3 * 48 * 50 + 48 * 64, most = 0;
                uint64_t head = 48ULL * vocab;
                assert_int_equal(first[0], 0);
                assert_int_equal(first[stages], layers);
                for (uint32_t s = 0; s < stages; s++) {
                    assert_true(first[s] < first[s + 1]);
                    uint64_t cost = (first[s + 1] - first[s]) * layer;
                    cost += s + 1 == stages ? head : 0;
                    most = cost > most ? cost : most;
                }
                assert_int_equal(most, best_cost(layers, stages, layer, head));
            }
        }
    }
}

static void test_cut_leaves_fewer_layers_beside_a_large_head(void **state)
{
    (void)state;
    struct bl_job_model config = LLAMA;
    uint32_t first[7];
    struct bl_errmsg msg = {0};
    config.vocab = 600; /* about two layers */
    assert_int_equal(train_cut(&config, 64, 2, first, NULL), 0);
    assert_int_equal(first[1], 4);
    assert_int_equal(train_cut(&config, 64, 7, first, &msg), BL_ECONFIG);
    assert_string_equal(msg.text, "7 stages (layout.pp x layout.interleave) for 6 layers: 1 to 6");
    assert_int_equal(train_cut(&config, 64, 0, first, &msg), BL_ECONFIG);
}

/* ---- boxes ---- */

static struct train_model *part_of(const struct bl_job_model *config, uint32_t tp, uint32_t r)
{
    struct train_model *model = NULL;
    struct bl_errmsg msg = {0};
    const struct train_part part = {.tp = tp, .tp_rank = r, .pp = 1, .chunks = 1, .sets = 1};
    assert_int_equal(train_model_new_part(&model, g_kern, config, &part, 8, 1, &msg), 0);
    return model;
}

/* Marks the box of a tensor in `seen`, as many times as its state is owned. */
static void mark_box(const struct train_tensor *t, uint8_t *seen)
{
    for (uint64_t i = t->lo[0]; i < t->hi[0]; i++) {
        for (uint64_t j = t->lo[1]; j < t->hi[1]; j++) {
            seen[i * t->shape[1] + j]++;
        }
    }
}

static void check_owned_once(const struct bl_job_model *config, uint32_t tp)
{
    struct train_model *models[12] = {NULL};
    uint32_t count, other;
    for (uint32_t r = 0; r < tp; r++) {
        models[r] = part_of(config, tp, r);
    }
    const struct train_tensor *first = train_model_tensors(models[0], &count);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t elems = first[i].shape[0] * first[i].shape[1];
        uint8_t *seen = calloc(elems, 1);
        assert_non_null(seen);
        for (uint32_t r = 0; r < tp; r++) {
            const struct train_tensor *t = &train_model_tensors(models[r], &other)[i];
            const struct train_tensor *o = &train_model_tensors(models[t->owner], &other)[i];
            assert_string_equal(t->name, first[i].name);
            assert_memory_equal(t->shape, first[i].shape, sizeof t->shape);
            assert_int_equal(t->elems, (t->hi[0] - t->lo[0]) * (t->hi[1] - t->lo[1]));
            assert_true(t->elems > 0 && t->owner <= r && t->offset % KERN_BLOCK == 0);
            assert_memory_equal(t->lo, o->lo, 4 * sizeof t->lo[0]); /* and hi: the same box */
            if (t->owner == r) {
                mark_box(t, seen);
            }
        }
        for (uint64_t k = 0; k < elems; k++) {
            assert_int_equal(seen[k], 1);
        }
        free(seen);
    }
    for (uint32_t r = 0; r < tp; r++) {
        train_model_free(models[r]);
    }
}

static void test_every_element_is_owned_by_one_tensor_parallel_rank(void **state)
{
    (void)state;
    static const uint32_t llama[] = {1, 2, 3, 4, 8, 12}; /* above 4 kv heads are shared */
    for (size_t i = 0; i < sizeof llama / sizeof *llama; i++) {
        check_owned_once(&LLAMA, llama[i]);
    }
    for (uint32_t tp = 1; tp <= 8; tp++) {
        check_owned_once(&GPT2, tp);
    }
}

static void test_queries_lie_beside_their_keys(void **state)
{
    (void)state;
    for (uint32_t tp = 1; tp <= 12; tp = tp == 4 ? 8 : tp == 8 ? 12 : tp + 1) {
        for (uint32_t r = 0; r < tp; r++) {
            struct train_model *model = part_of(&LLAMA, tp, r);
            uint32_t count;
            const struct train_tensor *t = train_model_tensors(model, &count);
            const struct train_tensor *q = &t[2], *k = &t[3], *v = &t[4], *o = &t[5];
            assert_non_null(strstr(q->name, "q_proj"));
            assert_memory_equal(k->lo, v->lo, 4 * sizeof k->lo[0]);
            assert_true(q->lo[0] == o->lo[1] && q->hi[0] == o->hi[1]);
            /* heads of 4, three queries to a key */
            assert_true(q->lo[0] / 12 == k->lo[0] / 4);
            assert_true((q->hi[0] + 11) / 12 == k->hi[0] / 4);
            train_model_free(model);
        }
    }
}

static void test_slices_that_cannot_be_are_refused(void **state)
{
    (void)state;
    struct train_model *model;
    struct bl_errmsg msg = {0};
    struct train_part part = {.tp = 6, .pp = 1, .chunks = 1, .sets = 1};
    assert_int_equal(train_model_new_part(&model, g_kern, &LLAMA, &part, 8, 1, &msg), BL_ECONFIG);
    assert_string_equal(
        msg.text, "layout.tp 6: model.kv_heads 4 cannot be cut into so many slices; 4 or 8 can be");
    part.tp = 16;
    assert_int_equal(train_model_new_part(&model, g_kern, &LLAMA, &part, 8, 1, &msg), BL_ECONFIG);
    assert_string_equal(
        msg.text, "layout.tp 16: model.heads 12 cannot be cut into so many slices; 12 can be");
    part.tp = 4;
    part.sequence = 1;
    assert_int_equal(train_model_new_part(&model, g_kern, &LLAMA, &part, 9, 1, &msg), BL_ECONFIG);
    assert_non_null(strstr(msg.text, "9, is no multiple of layout.tp 4"));
    part = (struct train_part){.tp = 1, .pp = 4, .stage = 1, .chunks = 2, .sets = 1};
    assert_int_equal(train_model_new_part(&model, g_kern, &LLAMA, &part, 8, 1, &msg), BL_ECONFIG);
    assert_non_null(strstr(msg.text, "layout.pp 4 with layout.interleave 2"));
}

/* ---- initial weights ---- */

static void check_initial_weights(const struct bl_job_model *config, uint32_t tp, uint32_t pp)
{
    struct train_model *whole = part_of(config, 1, 0);
    uint32_t count;
    uint64_t elems = train_model_buffer_elems(whole);
    float *all = malloc(elems * sizeof *all);
    assert_non_null(all);
    train_model_init_params(whole, 3, all, 0, elems, NULL);
    const struct train_tensor *w = train_model_tensors(whole, &count);
    for (uint32_t rank = 0; rank < tp * pp; rank++) {
        const struct train_part part = {
            .tp = tp, .tp_rank = rank % tp, .pp = pp, .stage = rank / tp, .chunks = 1, .sets = 1};
        struct train_model *model;
        assert_int_equal(train_model_new_part(&model, g_kern, config, &part, 8, 1, NULL), 0);
        uint64_t local = train_model_local_elems(model), cut = local / 3 + 7;
        float *mine = malloc(local * sizeof *mine);
        assert_non_null(mine);
        train_model_init_params(model, 3, mine, 0, cut, NULL);
        train_model_init_params(model, 3, mine + cut, cut, local, NULL);
        const struct train_tensor *t = train_model_tensors(model, &count);
        for (uint32_t i = 0; i < count; i++) {
            uint64_t width = t[i].hi[1] - t[i].lo[1];
            for (uint64_t row = t[i].lo[0]; t[i].local != TRAIN_NOT_HERE && row < t[i].hi[0];
                 row++) {
                assert_memory_equal(mine + t[i].local + (row - t[i].lo[0]) * width,
                                    all + w[i].local + row * t[i].shape[1] + t[i].lo[1],
                                    width * sizeof *mine);
            }
        }
        free(mine);
        train_model_free(model);
    }
    free(all);
    train_model_free(whole);
}

static void test_initial_weights_of_a_part_are_those_of_the_whole(void **state)
{
    (void)state;
    check_initial_weights(&LLAMA, 3, 2);
    check_initial_weights(&LLAMA, 8, 1);
    check_initial_weights(&GPT2, 5, 3);
}

/* ---- memory ---- */

static uint64_t g_taken;
void *__wrap_bl_mem_alloc(size_t bytes);
void *__real_bl_mem_alloc(size_t bytes);
void *__wrap_bl_mem_alloc(size_t bytes)
{
    g_taken += bytes;
    return __real_bl_mem_alloc(bytes);
}

static struct train_memory memory_of(const struct bl_job_model *config, struct train_part part)
{
    struct train_memory memory;
    struct train_model *model;
    assert_int_equal(train_model_memory(&memory, g_kern, config, &part, 64, 2, NULL), 0);
    g_taken = 0;
    assert_int_equal(train_model_new_part(&model, g_kern, config, &part, 64, 2, NULL), 0);
    assert_int_equal(g_taken, memory.total);
    assert_int_equal(memory.sets, memory.set * part.sets);
    assert_int_equal(memory.total, memory.sets + memory.logits + memory.scratch);
    train_model_free(model);
    return memory;
}

static void test_memory_said_is_memory_taken(void **state)
{
    (void)state;
    const uint64_t n = 128, c = 48, f = 50, kv = 16, h = 12, layers = 6;
    struct train_part part = TRAIN_PART_WHOLE;
    struct train_memory none = memory_of(&LLAMA, part);
    uint64_t layer = n * (6 * c + 2 * kv + 3 * f + 2 * h + 2), end = n * (2 * c + 1);
    assert_int_equal(none.set, 4 * (layers * layer + end));
    assert_int_equal(none.logits, 4 * n * (93 + 2) + 64); /* the loss */

    part.recompute = BL_RECOMPUTE_SELECTIVE;
    struct train_memory selective = memory_of(&LLAMA, part);
    assert_int_equal(selective.set, none.set - 4 * layers * n * (2 * c + f));
    assert_int_equal(selective.scratch, none.scratch + 4 * n * (2 * c + f));

    part.recompute = BL_RECOMPUTE_FULL;
    struct train_memory full = memory_of(&LLAMA, part);
    assert_int_equal(full.set, 4 * (layers * n * c + end));
    assert_int_equal(full.scratch, none.scratch + 4 * (layer - n * c));
    assert_true(full.total < selective.total && selective.total < none.total);

    part = (struct train_part){.tp = 1, .pp = 3, .stage = 1, .chunks = 1, .sets = 5};
    struct train_memory middle = memory_of(&LLAMA, part);
    assert_int_equal(middle.logits, 0);
    assert_int_equal(middle.set, 4 * 2 * layer);
    part.recompute = BL_RECOMPUTE_FULL;
    assert_int_equal(memory_of(&LLAMA, part).set, 4 * 2 * n * c);
    memory_of(&GPT2, TRAIN_PART_WHOLE);
}

int main(void)
{
    if (kern_cpu_open(&g_kern, NULL, NULL) != 0) {
        return 1;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cut_makes_the_largest_stage_as_small_as_can_be),
        cmocka_unit_test(test_cut_leaves_fewer_layers_beside_a_large_head),
        cmocka_unit_test(test_every_element_is_owned_by_one_tensor_parallel_rank),
        cmocka_unit_test(test_queries_lie_beside_their_keys),
        cmocka_unit_test(test_slices_that_cannot_be_are_refused),
        cmocka_unit_test(test_initial_weights_of_a_part_are_those_of_the_whole),
        cmocka_unit_test(test_memory_said_is_memory_taken),
    };
    return cmocka_run_group_tests_name("trainer/part", tests, NULL, NULL);
}
