/* SPDX-License-Identifier: Apache-2.0 */
/* Layouts: what tensor, pipeline and data parallelism make of a model's tensors. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/ckpt/layout_sample.h"

/* The extents of one tensor in a list as "[lo:hi,lo:hi]@lo-hi", one behind the other. */
static const char *texts_of(const struct bl_extent_list *list, const char *name)
{
    static char text[4096];
    size_t at = 0;

    text[0] = '\0';
    for (uint32_t i = 0; i < list->extent_count; i++) {
        const struct bl_extent *extent = &list->extents[i];
        const struct bl_tensor *tensor = &list->tensors[extent->tensor];
        uint64_t box = 1;

        if (strcmp(tensor->name, name) != 0) {
            continue;
        }
        for (uint32_t d = 0; d < tensor->dims; d++) {
            at += (size_t)snprintf(text + at, sizeof(text) - at, "%s%llu:%llu", d == 0 ? "[" : ",",
                                   (unsigned long long)extent->lo[d],
                                   (unsigned long long)extent->hi[d]);
            box *= extent->hi[d] - extent->lo[d];
        }
        at += (size_t)snprintf(text + at, sizeof(text) - at, "]");
        if (extent->flat_lo != 0 || extent->flat_hi != box) {
            at += (size_t)snprintf(text + at, sizeof(text) - at, "@%llu-%llu",
                                   (unsigned long long)extent->flat_lo,
                                   (unsigned long long)extent->flat_hi);
        }
    }
    return text;
}

static void rank_holds(const struct model *model, struct ckpt_layout layout, uint32_t rank,
                       const char *name, const char *expect)
{
    struct ckpt_layout_cutter *cutter = sample_cutter(model, layout);
    struct bl_extent_list list;

    assert_int_equal(ckpt_layout_rank(cutter, rank, &list, NULL, NULL), 0);
    assert_string_equal(texts_of(&list, name), expect);
    bl_extent_list_close(&list);
    ckpt_layout_free(cutter);
}

/* Heads go whole; o and down are cut along their input; norms are everywhere. */
static void test_layout_cuts_columns_and_rows_over_tp(void **state)
{
    const struct shape shape = {2, 16, 6, 4, 2, 10, false, false};
    const struct ckpt_layout tp2 = sample_layout(1, 2, 1, 0), tp4 = sample_layout(1, 4, 1, 0);
    struct model model;

    (void)state;
    sample_llama(&model, &shape);
    rank_holds(&model, tp2, 0, "model.layers.1.self_attn.q_proj.weight", "[0:8,0:16]");
    rank_holds(&model, tp2, 1, "model.layers.1.self_attn.q_proj.weight", "[8:16,0:16]");
    rank_holds(&model, tp2, 1, "model.layers.0.self_attn.k_proj.weight", "[4:8,0:16]");
    rank_holds(&model, tp2, 1, "model.layers.0.self_attn.v_proj.bias", "[4:8]");
    rank_holds(&model, tp2, 1, "model.layers.0.self_attn.o_proj.weight", "[0:16,8:16]");
    rank_holds(&model, tp2, 1, "model.layers.0.mlp.gate_proj.weight", "[3:6,0:16]");
    rank_holds(&model, tp2, 1, "model.layers.0.mlp.down_proj.weight", "[0:16,3:6]");
    rank_holds(&model, tp2, 1, "model.layers.0.input_layernorm.weight", "[0:16]");
    rank_holds(&model, tp2, 1, "model.layers.0.mlp.down_proj.weight.exp_avg_sq", "[0:16,3:6]");
    rank_holds(&model, tp2, 1, "adapter.scale", "[0:7]");
    /* 6 over 4 does not divide: 1, 2, 1, 2. */
    rank_holds(&model, tp4, 0, "model.layers.0.mlp.gate_proj.weight", "[0:1,0:16]");
    rank_holds(&model, tp4, 1, "model.layers.0.mlp.gate_proj.weight", "[1:3,0:16]");
    rank_holds(&model, tp4, 3, "model.layers.0.mlp.down_proj.weight", "[0:16,4:6]");
}

/* Two kv heads on four ranks: each is held by two, and stored once. */
static void test_layout_shares_kv_heads_when_there_are_fewer_than_tp(void **state)
{
    const struct shape shape = {1, 16, 8, 4, 2, 10, false, false};
    const struct ckpt_layout tp4 = sample_layout(1, 4, 1, 0), tp8 = sample_layout(1, 8, 1, 0);
    struct ckpt_layout_cutter *cutter;
    struct bl_extent_list list;
    struct model model;

    (void)state;
    sample_llama(&model, &shape);
    rank_holds(&model, tp4, 0, "model.layers.0.self_attn.k_proj.weight", "[0:4,0:16]");
    rank_holds(&model, tp4, 1, "model.layers.0.self_attn.k_proj.weight", "[0:4,0:16]");
    rank_holds(&model, tp4, 2, "model.layers.0.self_attn.k_proj.weight", "[4:8,0:16]");
    rank_holds(&model, tp4, 3, "model.layers.0.self_attn.q_proj.weight", "[12:16,0:16]");
    rank_holds(&model, tp8, 7, "model.layers.0.self_attn.v_proj.weight", "[4:8,0:16]");
    cutter = sample_cutter(&model, tp4);
    assert_int_equal(ckpt_layout_stored(cutter, &list, NULL), 0);
    assert_string_equal(texts_of(&list, "model.layers.0.self_attn.k_proj.weight"),
                        "[0:4,0:16][4:8,0:16]");
    bl_extent_list_close(&list);
    ckpt_layout_free(cutter);
}

/* 10 rows padded to 4 * 4 = 16: the last rank has padding alone, and so nothing. */
static void test_layout_leaves_padding_of_the_vocabulary_out(void **state)
{
    const struct shape shape = {1, 16, 8, 4, 4, 10, false, false};
    const struct ckpt_layout tp4 = sample_layout(1, 4, 1, 0);
    struct model model;

    (void)state;
    sample_llama(&model, &shape);
    model.about.vocab_multiple = 4;
    rank_holds(&model, tp4, 0, "model.embed_tokens.weight", "[0:4,0:16]");
    rank_holds(&model, tp4, 2, "model.embed_tokens.weight", "[8:10,0:16]");
    rank_holds(&model, tp4, 3, "model.embed_tokens.weight", "");
    rank_holds(&model, tp4, 2, "lm_head.weight.exp_avg", "[8:10,0:16]");
}

static void test_layout_cuts_each_part_of_a_fused_tensor(void **state)
{
    const struct shape shape = {1, 16, 8, 4, 2, 10, false, true};
    const struct ckpt_layout tp2 = sample_layout(1, 2, 1, 0);
    struct model model;

    (void)state;
    sample_llama(&model, &shape);
    rank_holds(&model, tp2, 0, "model.layers.0.self_attn.qkv_proj.weight",
               "[0:8,0:16][16:20,0:16][24:28,0:16]");
    rank_holds(&model, tp2, 1, "model.layers.0.self_attn.qkv_proj.weight",
               "[8:16,0:16][20:24,0:16][28:32,0:16]");
    rank_holds(&model, tp2, 1, "model.layers.0.mlp.gate_up_proj.weight", "[4:8,0:16][12:16,0:16]");
    memset(&model, 0, sizeof(model));
    model.about.heads = model.about.kv_heads = 4; /* GPT-2, as Hugging Face stores it */
    sample_add_param(&model, 8, 24, "transformer.h.0.attn.c_attn.weight", NO_LAYER);
    rank_holds(&model, tp2, 1, "transformer.h.0.attn.c_attn.weight",
               "[0:8,4:8][0:8,12:16][0:8,20:24]");
}

/* Layers are dealt out evenly; embedding first, head last; a tied one on both, stored once. */
static void test_layout_deals_layers_to_stages(void **state)
{
    const struct shape shape = {5, 16, 8, 4, 4, 10, true, false};
    const struct ckpt_layout pp2 = sample_layout(1, 1, 2, 0);
    struct ckpt_layout_cutter *cutter;
    struct bl_extent_list list;
    struct model model;

    (void)state;
    sample_llama(&model, &shape);
    rank_holds(&model, pp2, 0, "model.layers.1.input_layernorm.weight", "[0:16]");
    rank_holds(&model, pp2, 1, "model.layers.1.input_layernorm.weight", "");
    rank_holds(&model, pp2, 0, "model.layers.2.input_layernorm.weight", "");
    rank_holds(&model, pp2, 1, "model.layers.2.input_layernorm.weight", "[0:16]");
    rank_holds(&model, pp2, 0, "model.norm.weight", "");
    rank_holds(&model, pp2, 1, "model.norm.weight", "[0:16]");
    rank_holds(&model, pp2, 0, "model.embed_tokens.weight", "[0:10,0:16]");
    rank_holds(&model, pp2, 1, "model.embed_tokens.weight", "[0:10,0:16]");
    cutter = sample_cutter(&model, pp2);
    assert_int_equal(ckpt_layout_stored(cutter, &list, NULL), 0);
    assert_string_equal(texts_of(&list, "model.embed_tokens.weight"), "[0:10,0:16]");
    bl_extent_list_close(&list);
    ckpt_layout_free(cutter);
    model.about.tied = false;
    rank_holds(&model, pp2, 1, "model.embed_tokens.weight", "");
}

/* Blocks of 4096 of the flat order, each tensor padded to a block: as the trainer cuts. */
static void test_layout_cuts_flat_over_dp_on_block_borders(void **state)
{
    const struct ckpt_layout zero1 = sample_layout(2, 1, 1, 1), zero3 = sample_layout(2, 1, 1, 3);
    struct model model;

    (void)state;
    memset(&model, 0, sizeof(model));
    sample_add_param(&model, 100, 100, "a", NO_LAYER); /* 3 blocks */
    sample_add_param(&model, 300, 100, "b", NO_LAYER); /* 8 blocks: 11 in all, rank 0 has 5 */
    rank_holds(&model, zero1, 0, "a.exp_avg", "[0:100,0:100]");
    rank_holds(&model, zero1, 1, "a.exp_avg", "");
    rank_holds(&model, zero1, 0, "b.exp_avg", "[0:300,0:100]@0-8192");
    rank_holds(&model, zero1, 1, "b.exp_avg", "[0:300,0:100]@8192-30000");
    rank_holds(&model, zero1, 1, "b", "[0:300,0:100]");
    rank_holds(&model, zero3, 1, "b", "[0:300,0:100]@8192-30000");
}

static void refused(const struct model *model, struct ckpt_layout layout, const char *expect)
{
    struct ckpt_layout_cutter *cutter = NULL;
    struct bl_errmsg why = {0};

    assert_int_equal(
        ckpt_layout_new(&cutter, &layout, &model->about, model->tensors, model->count, &why),
        BL_ECONFIG);
    assert_null(cutter);
    if (strstr(why.text, expect) == NULL) {
        fail_msg("\"%s\" does not say \"%s\"", why.text, expect);
    }
}

static void test_layout_refuses_shapes_that_do_not_fit(void **state)
{
    const struct shape shape = {1, 16, 8, 4, 2, 10, false, false};
    struct ckpt_layout layout = sample_layout(1, 2, 1, 0);
    struct model model;

    (void)state;
    sample_llama(&model, &shape);
    model.about.heads = 3;
    refused(&model, layout,
            "model.layers.0.self_attn.q_proj.weight: dimension 0 of 16 is not 3 heads");
    model.about.heads = 4;
    layout.world = 3;
    refused(&model, layout, "3 ranks as dp 1, tp 2, pp 1");
    layout = sample_layout(1, 2, 1, 4);
    refused(&model, layout, "zero 4");
    memset(&model, 0, sizeof(model));
    sample_add_param(&model, 24, 8, "self_attn.qkv_proj.weight", 0);
    refused(&model, sample_layout(1, 2, 1, 0), "is fused: give heads= and kv_heads=");
    memset(&model, 0, sizeof(model));
    sample_add_param(&model, 24, 0, "self_attn.o_proj.weight", 0);
    refused(&model, sample_layout(1, 2, 1, 0), "has 1 dimensions, dimension 1 is to be cut");
}

/* ---- Bands, rules, texts ---- */

/* 4096 x 8192 floats, 128 MiB, cut along its input: bands of 512 rows, each over both boxes. */
static void test_layout_bands_large_strided_tensors(void **state)
{
    struct ckpt_layout_cutter *cutter;
    struct bl_extent_list list;
    struct model model;

    (void)state;
    memset(&model, 0, sizeof(model));
    sample_add(&model, BL_KIND_PARAM, BL_F32, 4096, 8192, "model.layers.0.mlp.down_proj.weight");
    cutter = sample_cutter(&model, sample_layout(1, 2, 1, 0));
    assert_int_equal(ckpt_layout_stored(cutter, &list, NULL), 0);
    assert_int_equal(list.extent_count, 16);
    for (uint32_t i = 0; i < 16; i++) {
        assert_int_equal(list.extents[i].lo[0], i / 2 * 512);
        assert_int_equal(list.extents[i].hi[0], i / 2 * 512 + 512);
        assert_int_equal(list.extents[i].lo[1], i % 2 * 4096);
    }
    bl_extent_list_close(&list);
    ckpt_layout_free(cutter);
    /* Cut flat too: 4096 blocks over 3; the pieces of rows at the borders are boxes of a row. */
    cutter = sample_cutter(&model, sample_layout(3, 2, 1, 1));
    assert_int_equal(ckpt_layout_stored(cutter, &list, NULL), 0);
    assert_int_equal(sample_bytes(&list), 4096ull * 8192 * 4);
    for (uint32_t i = 0; i < list.extent_count; i++) {
        assert_int_equal(bl_extent_check(&list.extents[i], &list.tensors[0], NULL), 0);
        assert_true(list.extents[i].hi[0] - list.extents[i].lo[0] <= 512);
    }
    bl_extent_list_close(&list);
    ckpt_layout_free(cutter);
}

static void test_layout_takes_rules_for_other_models(void **state)
{
    static const char text[] =
        "[{\"match\":\"blk.*.attn_qkv.weight\",\"cut\":\"column\",\"pieces\":[[16,4],[8,2],[8,2]]},"
        "{\"match\":\"out.weight\",\"cut\":\"vocabulary\",\"stage\":\"last\"}]";
    struct ckpt_layout_rule *rules = NULL;
    struct bl_errmsg why = {0};
    struct model model;

    (void)state;
    memset(&model, 0, sizeof(model));
    assert_int_equal(
        ckpt_layout_rules_read(&rules, &model.about.rule_count, text, strlen(text), &why), 0);
    model.about.rules = rules;
    sample_add_param(&model, 32, 5, "blk.0.attn_qkv.weight", NO_LAYER);
    sample_add_param(&model, 9, 5, "out.weight", NO_LAYER);
    rank_holds(&model, sample_layout(1, 2, 1, 0), 1, "blk.0.attn_qkv.weight",
               "[8:16,0:5][20:24,0:5][28:32,0:5]");
    rank_holds(&model, sample_layout(1, 2, 2, 0), 3, "out.weight", "[5:9,0:5]");
    rank_holds(&model, sample_layout(1, 2, 2, 0), 1, "out.weight", "");
    ckpt_layout_rules_free(rules, model.about.rule_count);
    rules = NULL;
    assert_int_equal(ckpt_layout_rules_read(&rules, &model.about.rule_count,
                                            "[{\"match\":\"x\",\"cut\":\"diagonal\"}]", 32, &why),
                     BL_EFORMAT);
    assert_string_equal(why.text, "rule 0: cut: \"diagonal\" is not known");
    assert_null(rules);
}

static void test_layout_reads_its_text_and_the_job(void **state)
{
    struct ckpt_layout_model model = {0};
    struct ckpt_layout layout = {0};
    struct bl_errmsg why = {0};

    (void)state;
    assert_int_equal(ckpt_layout_parse(&layout, &model, "tp=4,dp=2,zero=1,vocab=128", &why), 0);
    assert_int_equal(layout.world, 8);
    assert_int_equal(layout.pp, 1);
    assert_int_equal(model.vocab_multiple, 128);
    assert_int_equal(ckpt_layout_parse(&layout, &model, "tp=4,tp=2", &why), BL_ECONFIG);
    assert_int_equal(ckpt_layout_parse(&layout, &model, "tp=0", &why), BL_ECONFIG);
    assert_int_equal(ckpt_layout_parse(&layout, &model, "tp", &why), BL_ECONFIG);
    assert_int_equal(ckpt_layout_parse(&layout, &model, "cp=2", &why), BL_ECONFIG);
    assert_int_equal(ckpt_layout_parse(&layout, &model, "zero=4", &why), BL_ECONFIG);
    assert_string_equal(why.text, "layout: \"zero=4\": a number from 0 to 3");
    assert_int_equal(ckpt_layout_parse(&layout, &model, "dp=60000,tp=60000", &why), BL_ECONFIG);
    assert_int_equal(layout.world, 8); /* untouched */
    assert_int_equal(ckpt_layout_model_read(
                         &model, "{\"model\":{\"heads\":8,\"kv_heads\":2,\"tied\":true}}", &why),
                     0);
    assert_int_equal(model.heads, 8);
    assert_int_equal(model.kv_heads, 2);
    assert_true(model.tied);
    assert_int_equal(ckpt_layout_model_read(&model, "{}", &why), 0);
    assert_int_equal(ckpt_layout_model_read(&model, "{", &why), BL_EFORMAT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layout_cuts_columns_and_rows_over_tp),
        cmocka_unit_test(test_layout_shares_kv_heads_when_there_are_fewer_than_tp),
        cmocka_unit_test(test_layout_leaves_padding_of_the_vocabulary_out),
        cmocka_unit_test(test_layout_cuts_each_part_of_a_fused_tensor),
        cmocka_unit_test(test_layout_deals_layers_to_stages),
        cmocka_unit_test(test_layout_cuts_flat_over_dp_on_block_borders),
        cmocka_unit_test(test_layout_refuses_shapes_that_do_not_fit),
        cmocka_unit_test(test_layout_bands_large_strided_tensors),
        cmocka_unit_test(test_layout_takes_rules_for_other_models),
        cmocka_unit_test(test_layout_reads_its_text_and_the_job),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
