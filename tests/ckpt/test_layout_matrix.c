/* SPDX-License-Identifier: Apache-2.0 */
/* A matrix of models and layouts: each element once, every rank served, there and back. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/extent_rows.h"
#include "base/mem.h"
#include "ckpt/ckpt.h"
#include "tests/ckpt/layout_sample.h"

struct painted {
    uint8_t *counts[TENSORS_MAX];
};

static uint32_t index_of(const struct model *model, const char *name)
{
    for (uint32_t i = 0; i < model->count; i++) {
        if (strcmp(model->tensors[i].name, name) == 0) {
            return i;
        }
    }
    fail_msg("tensor %s", name);
    return 0;
}

static void paint(struct painted *painted, const struct model *model,
                  const struct bl_extent_list *list)
{
    for (uint32_t i = 0; i < list->extent_count; i++) {
        const struct bl_tensor *tensor = &list->tensors[list->extents[i].tensor];
        uint8_t *counts = painted->counts[index_of(model, tensor->name)];
        struct bl_extent_rows rows;
        struct bl_extent_row row;

        assert_int_equal(bl_extent_check(&list->extents[i], tensor, NULL), 0);
        assert_true(bl_extent_elems(&list->extents[i]) > 0);
        bl_extent_rows_init(&rows, &list->extents[i], tensor, NULL, NULL);
        while (bl_extent_rows_next(&rows, &row)) {
            for (uint64_t e = 0; e < row.count; e++) {
                if (counts[row.logical + e] < 255) {
                    counts[row.logical + e]++;
                }
            }
        }
    }
}

static void painted_open(struct painted *painted, const struct model *model)
{
    for (uint32_t i = 0; i < model->count; i++) {
        painted->counts[i] = calloc(bl_tensor_elems(&model->tensors[i]), 1);
        assert_non_null(painted->counts[i]);
    }
}

static void painted_close(struct painted *painted, const struct model *model, uint8_t min,
                          uint8_t max)
{
    for (uint32_t i = 0; i < model->count; i++) {
        for (uint64_t e = 0; e < bl_tensor_elems(&model->tensors[i]); e++) {
            if (painted->counts[i][e] < min || painted->counts[i][e] > max) {
                fail_msg("%s: element %llu is there %u times", model->tensors[i].name,
                         (unsigned long long)e, painted->counts[i][e]);
            }
        }
        free(painted->counts[i]);
    }
}

/* Parts together are what is stored, in its order, and even. */
static void check_parts(const struct model *model, const struct bl_extent_list *stored,
                        uint32_t count)
{
    struct bl_extent_list *parts = calloc(count, sizeof(*parts));
    uint64_t all = sample_bytes(stored), largest = 0;
    struct painted painted;

    assert_non_null(parts);
    painted_open(&painted, model);
    assert_int_equal(ckpt_layout_parts(stored, count, parts, NULL), 0);
    for (uint32_t p = 0; p < count; p++) {
        struct bl_extent_list copy;

        paint(&painted, model, &parts[p]);
        largest = sample_bytes(&parts[p]) > largest ? sample_bytes(&parts[p]) : largest;
        assert_int_equal(bl_extent_list_copy(&copy, &parts[p]), 0);
        assert_int_equal(ckpt_part_sort(&copy), 0);
        assert_true(bl_extent_list_equal(&copy, &parts[p])); /* in file order already */
        bl_extent_list_close(&copy);
    }
    painted_close(&painted, model, 1, 1);
    assert_true(largest <= all / count + 2 * 8 * CKPT_LAYOUT_BLOCK);
    for (uint32_t p = 0; p < count; p++) {
        bl_extent_list_close(&parts[p]);
    }
    free(parts);
}

/* Can every rank be filled from what is stored, and do all ranks together hold everything? */
static void check_ranks(const struct model *model, const struct ckpt_layout_cutter *cutter,
                        const struct bl_extent_list *stored, uint32_t world)
{
    struct painted painted;

    painted_open(&painted, model);
    for (uint32_t rank = 0; rank < world; rank++) {
        struct bl_extent_list held;
        struct bl_plan plan = {0};
        uint64_t bytes = 0;

        assert_int_equal(ckpt_layout_rank(cutter, rank, &held, &bytes, NULL), 0);
        assert_int_equal(bl_plan_make(&plan, &held, &stored, 1, NULL), 0);
        assert_int_equal(plan.missing_elems, 0);
        assert_true(bytes >= sample_bytes(&held));
        paint(&painted, model, &held);
        bl_plan_close(&plan);
        bl_extent_list_close(&held);
    }
    painted_close(&painted, model, 1, 255);
}

static const struct shape shapes[] = {
    {3, 16, 24, 4, 2, 37, false, false},    /* 37 and 24 over 4, 5, ... do not divide */
    {2, 96, 130, 8, 1, 101, true, false},   /* one kv head, tied */
    {1, 64, 100, 4, 4, 1000, false, true},  /* fused */
    {4, 24, 33, 3, 3, 50, false, false},    /* three heads over 2, 4 ranks */
    {2, 128, 344, 8, 4, 1031, true, false}, /* several blocks a tensor */
};
#define SHAPES (sizeof(shapes) / sizeof(shapes[0]))

static const uint32_t matrix[][4] = {
    /* dp, tp, pp, zero */
    {1, 1, 1, 0}, {2, 1, 1, 1}, {3, 1, 1, 1}, {7, 1, 1, 3}, {1, 2, 1, 0},
    {1, 3, 1, 0}, {1, 4, 1, 2}, {1, 8, 1, 0}, {2, 4, 1, 1}, {1, 1, 2, 0},
    {3, 2, 2, 1}, {2, 5, 3, 3}, {1, 1, 9, 1}, {5, 4, 2, 2}, {1, 16, 1, 1},
};
#define LAYOUTS (sizeof(matrix) / sizeof(matrix[0]))

static void matrix_model(struct model *model, uint32_t s)
{
    sample_llama(model, &shapes[s]);
    model->about.vocab_multiple = s % 2 == 0 ? 8 : 0;
}

static void test_layout_stores_every_element_once_in_every_layout(void **state)
{
    (void)state;
    for (uint32_t s = 0; s < SHAPES; s++) {
        struct model model;

        matrix_model(&model, s);
        for (uint32_t m = 0; m < LAYOUTS; m++) {
            struct ckpt_layout layout =
                sample_layout(matrix[m][0], matrix[m][1], matrix[m][2], matrix[m][3]);
            struct ckpt_layout_cutter *cutter = sample_cutter(&model, layout);
            struct bl_extent_list stored;
            struct painted painted;

            assert_int_equal(ckpt_layout_stored(cutter, &stored, NULL), 0);
            painted_open(&painted, &model);
            paint(&painted, &model, &stored);
            painted_close(&painted, &model, 1, 1);
            check_ranks(&model, cutter, &stored, layout.world);
            check_parts(&model, &stored, 1 + (s + m) % 5);
            bl_extent_list_close(&stored);
            ckpt_layout_free(cutter);
        }
    }
}

/* ---- There and back, in memory ---- */

struct image { /* what is stored, in memory: the parts' lists, and bytes for each */
    struct bl_extent_list parts[8];
    uint8_t *bytes[8];
    uint64_t sizes[8];
    uint32_t count;
};

static void image_open(struct image *image, const struct model *model, uint32_t layout,
                       uint32_t parts)
{
    struct ckpt_layout_cutter *cutter =
        sample_cutter(model, sample_layout(matrix[layout][0], matrix[layout][1], matrix[layout][2],
                                           matrix[layout][3]));
    struct bl_extent_list stored;

    image->count = parts;
    assert_int_equal(ckpt_layout_stored(cutter, &stored, NULL), 0);
    assert_int_equal(ckpt_layout_parts(&stored, parts, image->parts, NULL), 0);
    for (uint32_t p = 0; p < parts; p++) {
        struct bl_extent_list *list = &image->parts[p];
        uint64_t at = 0;

        for (uint32_t i = 0; i < list->extent_count; i++) {
            list->extents[i].offset = at;
            at += bl_extent_elems(&list->extents[i]) *
                  bl_dtype_bytes(list->tensors[list->extents[i].tensor].dtype);
        }
        image->sizes[p] = at;
        image->bytes[p] = calloc(at + 1, 1);
        assert_non_null(image->bytes[p]);
    }
    bl_extent_list_close(&stored);
    ckpt_layout_free(cutter);
}

static void image_close(struct image *image)
{
    for (uint32_t p = 0; p < image->count; p++) {
        bl_extent_list_close(&image->parts[p]);
        free(image->bytes[p]);
    }
}

static struct bl_state_digest image_digest(const struct image *image)
{
    struct bl_state_digest digest = {{0, 0}};

    for (uint32_t p = 0; p < image->count; p++) {
        bl_extent_list_digest(&image->parts[p], image->bytes[p], &digest);
    }
    return digest;
}

static void image_fill(struct image *to, const struct image *from)
{
    const struct bl_extent_list *sources[8];

    for (uint32_t p = 0; p < from->count; p++) {
        sources[p] = &from->parts[p];
    }
    for (uint32_t p = 0; p < to->count; p++) {
        struct bl_plan plan = {0};

        assert_int_equal(bl_plan_make(&plan, &to->parts[p], sources, from->count, NULL), 0);
        assert_int_equal(plan.missing_elems, 0);
        for (size_t r = 0; r < plan.run_count; r++) {
            const struct bl_run *run = &plan.runs[r];

            memcpy(to->bytes[p] + run->dst_offset, from->bytes[run->src] + run->src_offset,
                   run->bytes);
        }
        bl_plan_close(&plan);
    }
}

static void test_layout_there_and_back_is_the_same_bytes(void **state)
{
    (void)state;
    for (uint32_t s = 0; s < SHAPES; s++) {
        struct model model;

        matrix_model(&model, s);
        for (uint32_t m = 0; m < LAYOUTS; m++) {
            struct image first = {0}, there = {0}, back = {0};
            struct bl_state_digest digest, again;

            image_open(&first, &model, m, 1 + m % 3);
            for (uint32_t p = 0; p < first.count; p++) {
                bl_random_bytes(first.bytes[p], first.sizes[p]);
            }
            digest = image_digest(&first);
            image_open(&there, &model, (uint32_t)((m * 7 + 3) % LAYOUTS), 1 + (m + s) % 4);
            image_fill(&there, &first);
            again = image_digest(&there);
            assert_true(bl_state_digest_equal(&digest, &again));
            image_open(&back, &model, m, 1 + m % 3);
            image_fill(&back, &there);
            for (uint32_t p = 0; p < first.count; p++) {
                assert_true(bl_extent_list_equal(&first.parts[p], &back.parts[p]));
                assert_memory_equal(first.bytes[p], back.bytes[p], first.sizes[p]);
            }
            image_close(&first);
            image_close(&there);
            image_close(&back);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layout_stores_every_element_once_in_every_layout),
        cmocka_unit_test(test_layout_there_and_back_is_the_same_bytes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
