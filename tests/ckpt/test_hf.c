/* SPDX-License-Identifier: Apache-2.0 */
/* Names, orientations and configs, without any file: tables, mapped views over memory, texts. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/hf.h"
#include "ckpt/view.h"

static const struct ckpt_model llama = {.arch = CKPT_ARCH_LLAMA,
                                        .layers = 2,
                                        .dim = 24,
                                        .hidden = 40,
                                        .heads = 3,
                                        .kv_heads = 1,
                                        .vocab = 50,
                                        .context = 64,
                                        .tied = false,
                                        .rope_theta = 10000,
                                        .norm_eps = 1e-5};
static const struct ckpt_model gpt2 = {.arch = CKPT_ARCH_GPT2,
                                       .layers = 2,
                                       .dim = 12,
                                       .hidden = 48,
                                       .heads = 3,
                                       .kv_heads = 3,
                                       .vocab = 50,
                                       .context = 16,
                                       .tied = true,
                                       .norm_eps = 1e-5};

/* ---- A view over memory ---- */

/* Element i of the tensor at place p holds p * 4096 + i, as the dtype. */
struct memory_view {
    struct ckpt_view view;
    struct bl_tensor tensors[64];
};

static float element(uint32_t place, uint64_t index)
{
    return (float)((uint64_t)place * 4096 + index);
}

static int memory_read(struct ckpt_view *base, const struct bl_extent *extent, void *dest,
                       struct bl_errmsg *msg)
{
    const struct bl_tensor *tensor = &base->tensors[extent->tensor];
    uint64_t width = tensor->dims == 2 ? extent->hi[1] - extent->lo[1] : 1;
    uint64_t pitch = tensor->dims == 2 ? tensor->shape[1] : 1;
    uint32_t bytes = bl_dtype_bytes(tensor->dtype);

    (void)msg;
    for (uint64_t i = extent->flat_lo; i < extent->flat_hi; i++) {
        uint64_t row = extent->lo[0] + i / width;
        uint64_t column = tensor->dims == 2 ? extent->lo[1] + i % width : 0;
        float value = element(extent->tensor, row * pitch + column);

        assert_int_equal(ckpt_narrow((uint8_t *)dest + (i - extent->flat_lo) * bytes, tensor->dtype,
                                     &value, 1, CKPT_OVERFLOW_INF),
                         1);
    }
    return 0;
}

static void memory_close(struct ckpt_view *base)
{
    (void)base;
}

/* Their tensors (ours false) or ours of a model. */
static void memory_open(struct memory_view *view, const struct ckpt_map_list *maps, bool ours,
                        enum bl_dtype dtype)
{
    static const struct ckpt_view_ops ops = {memory_read, memory_close};
    struct bl_errmsg why = {0};

    memset(view, 0, sizeof(*view));
    view->view.ops = &ops;
    view->view.tensors = view->tensors;
    for (uint32_t i = 0; i < maps->count; i++) {
        const struct ckpt_map *map = &maps->maps[i];
        struct bl_tensor *tensor = &view->tensors[view->view.tensor_count];

        if (!ours && i > 0 && strcmp(map[-1].theirs, map->theirs) == 0) {
            continue;
        }
        assert_true(view->view.tensor_count < 64);
        *tensor = map->tensor;
        tensor->dtype = dtype;
        if (!ours) {
            snprintf(tensor->name, sizeof(tensor->name), "%s", map->theirs);
            tensor->dims = map->theirs_dims;
            memcpy(tensor->shape, map->theirs_shape, sizeof(map->theirs_shape));
        }
        view->view.tensor_count++;
    }
    assert_int_equal(ckpt_view_sort(&view->view, &why), 0);
}

/* What ours[row, column] must be, out of theirs, by the definition in ckpt/hf.h. */
static float wanted(const struct ckpt_map *map, const struct ckpt_view *theirs, uint64_t row,
                    uint64_t column)
{
    int64_t place = ckpt_view_find(theirs, map->theirs);
    uint64_t p = map->rotary_dim > 0 ? ckpt_rotary_to_pairs(row, map->rotary_dim) : row;
    uint64_t pitch = map->theirs_dims == 2 ? map->theirs_shape[1] : 1;

    assert_true(place >= 0);
    return element((uint32_t)place, map->transposed ? column * pitch + map->shift + p
                                                    : (map->shift + p) * pitch + column);
}

static void check_ours(const struct ckpt_model *model, enum ckpt_naming naming, enum bl_dtype dtype,
                       size_t panel_bytes)
{
    struct ckpt_map_list maps;
    struct memory_view theirs;
    struct ckpt_view *ours;
    struct bl_errmsg why = {0};

    assert_int_equal(ckpt_map_make(&maps, model, naming, &why), 0);
    memory_open(&theirs, &maps, false, dtype);
    assert_int_equal(ckpt_view_ours(&ours, &theirs.view, &maps, &why), 0);
    ckpt_view_panel(ours, panel_bytes);
    assert_int_equal(ours->tensor_count, maps.count);
    for (uint32_t i = 0; i < maps.count; i++) {
        const struct ckpt_map *map = &maps.maps[i];
        uint64_t columns = map->tensor.dims == 2 ? map->tensor.shape[1] : 1;
        uint64_t elems = bl_tensor_elems(&map->tensor), lo = elems / 3, hi = elems - elems / 7;
        int64_t at = ckpt_view_find(ours, map->tensor.name);
        float *values = calloc(elems, sizeof(*values));

        /* In two pieces that end inside of rows, and a third time from the middle. */
        assert_true(at >= 0 && values != NULL);
        assert_int_equal(ckpt_view_read_flat(ours, (uint32_t)at, 0, hi, values, &why), 0);
        assert_int_equal(ckpt_view_read_flat(ours, (uint32_t)at, hi, elems, values + hi, &why), 0);
        assert_int_equal(ckpt_view_read_flat(ours, (uint32_t)at, lo, hi, values + lo, &why), 0);
        for (uint64_t e = 0; e < elems; e++) {
            float want = wanted(map, &theirs.view, e / columns, e % columns), narrow = want;
            uint16_t bits;

            if (dtype != BL_F32) {
                assert_int_equal(ckpt_narrow(&bits, dtype, &want, 1, CKPT_OVERFLOW_INF), 1);
                ckpt_widen(&narrow, &bits, dtype, 1);
            }
            if (values[e] != narrow) {
                fail_msg("%s element %llu is %g, not %g", map->tensor.name, (unsigned long long)e,
                         (double)values[e], (double)narrow);
            }
        }
        free(values);
    }
    ckpt_view_close(ours);
    ckpt_map_close(&maps);
}

static void test_ours_are_the_rows_and_columns_of_theirs(void **state)
{
    (void)state;
    check_ours(&llama, CKPT_NAMES_HF, BL_F32, 4096);
    check_ours(&llama, CKPT_NAMES_LLAMA2C, BL_F32, 4096);
    check_ours(&llama, CKPT_NAMES_LLAMA2C, BL_BF16, 4096);
    check_ours(&gpt2, CKPT_NAMES_HF, BL_F32, 4096);
    check_ours(&gpt2, CKPT_NAMES_HF, BL_F32, 200);
    check_ours(&gpt2, CKPT_NAMES_HF, BL_F32, 1 << 20);
    check_ours(&gpt2, CKPT_NAMES_HF_BARE, BL_BF16, 4096);
    check_ours(&gpt2, CKPT_NAMES_HF, BL_F16, 4096);
}

/* theirs(ours(theirs)) is theirs: of every tensor, with whole rows at a time. */
static void check_there_and_back(const struct ckpt_model *model, enum bl_dtype dtype)
{
    struct ckpt_map_list maps;
    struct memory_view theirs;
    struct ckpt_view *ours, *back;
    struct bl_errmsg why = {0};
    uint8_t is[64 * 1024], want[64 * 1024];

    assert_int_equal(ckpt_map_make(&maps, model, CKPT_NAMES_HF, &why), 0);
    memory_open(&theirs, &maps, false, dtype);
    assert_int_equal(ckpt_view_ours(&ours, &theirs.view, &maps, &why), 0);
    /* The middle view is read by boxes, which only a view over memory or files has. */
    if (model->arch == CKPT_ARCH_LLAMA) {
        assert_int_equal(ckpt_view_theirs(&back, ours, &maps, dtype, CKPT_OVERFLOW_REFUSE, &why),
                         0);
        assert_int_equal(back->tensor_count, theirs.view.tensor_count);
        for (uint32_t i = 0; i < back->tensor_count; i++) {
            const struct bl_tensor *tensor = &back->tensors[i];
            uint64_t elems = bl_tensor_elems(tensor), bytes = bl_dtype_bytes(dtype);

            assert_string_equal(tensor->name, theirs.view.tensors[i].name);
            assert_true(elems * bytes <= sizeof(is));
            assert_int_equal(ckpt_view_read_flat(back, i, 0, elems, is, &why), 0);
            assert_int_equal(ckpt_view_read_flat(&theirs.view, i, 0, elems, want, &why), 0);
            assert_memory_equal(is, want, elems * bytes);
        }
        ckpt_view_close(back);
    }
    ckpt_view_close(ours);
    ckpt_map_close(&maps);
}

/* theirs[.., shift + r] of GPT-2 is ours[r, ..]: by the definition, the other way round. */
static void check_theirs(const struct ckpt_model *model, uint32_t rows_at_once, size_t panel_bytes)
{
    struct ckpt_map_list maps;
    struct memory_view ours;
    struct ckpt_view *theirs;
    struct bl_errmsg why = {0};
    float values[8192];

    assert_int_equal(ckpt_map_make(&maps, model, CKPT_NAMES_HF, &why), 0);
    memory_open(&ours, &maps, true, BL_F32);
    assert_int_equal(
        ckpt_view_theirs(&theirs, &ours.view, &maps, BL_F32, CKPT_OVERFLOW_REFUSE, &why), 0);
    ckpt_view_panel(theirs, panel_bytes);
    for (uint32_t m = 0; m < maps.count; m++) {
        const struct ckpt_map *map = &maps.maps[m];
        int64_t at = ckpt_view_find(theirs, map->theirs);
        int64_t place = ckpt_view_find(&ours.view, map->tensor.name);
        uint64_t pitch = map->theirs_dims == 2 ? map->theirs_shape[1] : 1;
        uint64_t columns = map->tensor.dims == 2 ? map->tensor.shape[1] : 1;

        for (uint64_t row = 0; row < map->theirs_shape[0]; row += rows_at_once) {
            uint64_t end = row + rows_at_once < map->theirs_shape[0] ? row + rows_at_once
                                                                     : map->theirs_shape[0];

            assert_int_equal(ckpt_view_read_flat(theirs, (uint32_t)at, row * pitch, end * pitch,
                                                 values + row * pitch, &why),
                             0);
        }
        for (uint64_t e = 0; e < bl_tensor_elems(&map->tensor); e++) {
            uint64_t r = e / columns, c = e % columns;
            float is = map->transposed ? values[c * pitch + map->shift + r]
                                       : values[(map->shift + r) * pitch + c];

            assert_true(is == element((uint32_t)place, e));
        }
    }
    ckpt_view_close(theirs);
    ckpt_map_close(&maps);
}

static void test_theirs_are_made_of_ours_and_come_back(void **state)
{
    (void)state;
    check_there_and_back(&llama, BL_F32);
    check_there_and_back(&llama, BL_BF16);
    check_theirs(&llama, 7, 4096);
    check_theirs(&gpt2, 1, 4096);
    check_theirs(&gpt2, 5, 200);
    check_theirs(&gpt2, 1000, 200);
    check_theirs(&gpt2, 1000, 1 << 20);
}

static void test_padding_of_the_vocabulary_is_zeros_and_falls_away(void **state)
{
    struct ckpt_model padded = llama;
    struct ckpt_map_list maps;
    struct memory_view ours;
    struct ckpt_view *theirs;
    struct bl_errmsg why = {0};
    float values[64 * 24];
    int64_t at;

    (void)state;
    padded.vocab_padded = 64;
    assert_int_equal(ckpt_map_make(&maps, &padded, CKPT_NAMES_HF, &why), 0);
    memory_open(&ours, &maps, true, BL_F32);
    assert_int_equal(
        ckpt_view_theirs(&theirs, &ours.view, &maps, BL_F32, CKPT_OVERFLOW_REFUSE, &why), 0);
    at = ckpt_view_find(theirs, "lm_head.weight");
    assert_true(at >= 0);
    assert_int_equal(theirs->tensors[at].shape[0], 64);
    assert_int_equal(ckpt_view_read_flat(theirs, (uint32_t)at, 0, 64 * 24, values, &why), 0);
    for (uint32_t i = 0; i < 64 * 24; i++) {
        int64_t place = ckpt_view_find(&ours.view, "lm_head.weight");

        assert_true(values[i] == (i < 50 * 24 ? element((uint32_t)place, i) : 0));
    }
    ckpt_view_close(theirs);
    ckpt_map_close(&maps);
    check_ours(&padded, CKPT_NAMES_HF, BL_F32, 4096);
    padded.vocab_padded = 49;
    assert_int_equal(ckpt_map_make(&maps, &padded, CKPT_NAMES_HF, &why), BL_EFORMAT);
}

static void test_a_value_over_fp16_is_told_with_tensor_and_place(void **state)
{
    struct ckpt_model big = llama;
    struct ckpt_map_list maps;
    struct memory_view ours;
    struct ckpt_view *theirs;
    struct bl_errmsg why = {0};
    uint16_t values[50 * 24];
    int64_t at;

    (void)state;
    assert_int_equal(ckpt_map_make(&maps, &big, CKPT_NAMES_HF, &why), 0);
    memory_open(&ours, &maps, true, BL_F32); /* tensor 16 and on begin at 65536 */
    assert_int_equal(
        ckpt_view_theirs(&theirs, &ours.view, &maps, BL_F16, CKPT_OVERFLOW_REFUSE, &why), 0);
    at = ckpt_view_find(theirs, "model.norm.weight");
    assert_true(at >= 16);
    assert_int_equal(ckpt_view_read_flat(theirs, (uint32_t)at, 0, 24, values, &why), BL_ELIMIT);
    assert_non_null(strstr(why.text, "model.norm.weight: element [0] is "));
    ckpt_view_close(theirs);
    ckpt_map_close(&maps);
}

/* ---- Rotary ---- */

static void test_rotary_rows_go_to_halves_and_back(void **state)
{
    const uint64_t halves_of_8[8] = {0, 4, 1, 5, 2, 6, 3, 7};

    (void)state;
    for (uint64_t row = 0; row < 8; row++) {
        assert_int_equal(ckpt_rotary_to_halves(row, 8), halves_of_8[row]);
        assert_int_equal(ckpt_rotary_to_halves(8 + row, 8), 8 + halves_of_8[row]);
    }
    for (uint32_t dim = 2; dim <= 130; dim += 2) {
        for (uint64_t row = 0; row < 3ull * dim; row++) {
            assert_int_equal(ckpt_rotary_to_pairs(ckpt_rotary_to_halves(row, dim), dim), row);
            assert_int_equal(ckpt_rotary_to_halves(ckpt_rotary_to_pairs(row, dim), dim), row);
        }
    }
}

/* The permuted rows, turned as halves, are the rows turned as pairs, permuted: what the
 * permutation is for. */
static void test_rotary_positions_turn_the_same_pairs(void **state)
{
    enum { DIM = 16, HALF = DIM / 2 };
    double pairs[DIM], halves[DIM], pairs_turned[DIM], halves_turned[DIM];

    (void)state;
    for (uint32_t r = 0; r < DIM; r++) {
        pairs[r] = 1.0 + r * r;
    }
    for (uint32_t r = 0; r < DIM; r++) {
        halves[r] = pairs[ckpt_rotary_to_pairs(r, DIM)];
    }
    for (uint32_t i = 0; i < HALF; i++) {
        double angle = 5 * pow(10000.0, -2.0 * i / DIM), c = cos(angle), s = sin(angle);

        pairs_turned[2 * i] = pairs[2 * i] * c - pairs[2 * i + 1] * s;
        pairs_turned[2 * i + 1] = pairs[2 * i] * s + pairs[2 * i + 1] * c;
        halves_turned[i] = halves[i] * c - halves[i + HALF] * s;
        halves_turned[i + HALF] = halves[i] * s + halves[i + HALF] * c;
    }
    for (uint32_t r = 0; r < DIM; r++) {
        assert_true(halves_turned[r] == pairs_turned[ckpt_rotary_to_pairs(r, DIM)]);
    }
}

/* ---- Tables ---- */

static void test_tables_name_what_transformers_names(void **state)
{
    struct ckpt_map_list maps;
    struct bl_errmsg why = {0};
    const struct ckpt_map *map;

    (void)state;
    assert_int_equal(ckpt_map_make(&maps, &llama, CKPT_NAMES_HF, &why), 0);
    assert_int_equal(maps.count, 1 + 2 * 9 + 1 + 1);
    for (uint32_t i = 0; i < maps.count; i++) { /* Llama's are Belay's */
        assert_string_equal(maps.maps[i].tensor.name, maps.maps[i].theirs);
        assert_false(maps.maps[i].transposed);
    }
    map = ckpt_map_find(&maps, "model.layers.1.self_attn.k_proj.weight");
    assert_non_null(map);
    assert_int_equal(map->tensor.shape[0], 8);
    assert_int_equal(map->tensor.shape[1], 24);
    assert_null(ckpt_map_find(&maps, "model.layers.2.self_attn.k_proj.weight"));
    ckpt_map_close(&maps);

    assert_int_equal(ckpt_map_make(&maps, &gpt2, CKPT_NAMES_HF_BARE, &why), 0);
    assert_int_equal(maps.count, 2 + 2 * 16 + 2);
    map = ckpt_map_find(&maps, "transformer.h.1.attn.v_proj.weight");
    assert_non_null(map);
    assert_string_equal(map->theirs, "h.1.attn.c_attn.weight");
    assert_true(map->transposed);
    assert_int_equal(map->shift, 24);
    assert_int_equal(map->theirs_shape[0], 12);
    assert_int_equal(map->theirs_shape[1], 36);
    map = ckpt_map_find(&maps, "transformer.h.0.mlp.up_proj.weight");
    assert_non_null(map);
    assert_string_equal(map->theirs, "h.0.mlp.c_fc.weight");
    assert_int_equal(map->tensor.shape[0], 48);
    assert_int_equal(map->theirs_shape[1], 48);
    ckpt_map_close(&maps);
    assert_true(ckpt_hf_is_buffer("h.0.attn.bias") && ckpt_hf_is_buffer("h.11.attn.masked_bias"));
    assert_false(ckpt_hf_is_buffer("h.0.attn.c_attn.bias"));
    assert_false(ckpt_hf_is_buffer(".attn.bias"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ours_are_the_rows_and_columns_of_theirs),
        cmocka_unit_test(test_theirs_are_made_of_ours_and_come_back),
        cmocka_unit_test(test_padding_of_the_vocabulary_is_zeros_and_falls_away),
        cmocka_unit_test(test_a_value_over_fp16_is_told_with_tensor_and_place),
        cmocka_unit_test(test_rotary_rows_go_to_halves_and_back),
        cmocka_unit_test(test_rotary_positions_turn_the_same_pairs),
        cmocka_unit_test(test_tables_name_what_transformers_names),
    };
    return cmocka_run_group_tests_name("ckpt/hf", tests, NULL, NULL);
}
