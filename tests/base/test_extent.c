/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The planner against an oracle that knows, element by element, who holds what. Random tensors,
 * boxes, flat cuts, orders and gaps; set BL_TEST_SEED to repeat a run.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "base/extent.h"
#include "base/extent_plan.h"

#define TENSORS      3
#define SOURCES      4
#define BUFFER_WORDS 65536

static uint64_t seed;

static uint64_t draw(uint64_t bound)
{
    seed++;
    return bl_mix64(seed) % bound;
}

static struct bl_tensor random_tensor(uint32_t index)
{
    struct bl_tensor tensor = {.kind = BL_KIND_PARAM, .dtype = BL_F32};
    snprintf(tensor.name, sizeof(tensor.name), "layers.%u.w", index);
    tensor.dims = (uint32_t)draw(5);
    for (uint32_t d = 0; d < tensor.dims; d++) {
        tensor.shape[d] = 1 + draw(6);
    }
    return tensor;
}

/* A box anywhere, or the whole; a flat cut, or none. */
static struct bl_extent random_extent(const struct bl_tensor *tensor, uint32_t index)
{
    struct bl_extent extent = {.tensor = index};
    uint64_t elems = 1;
    int whole = draw(3) == 0;
    for (uint32_t d = 0; d < tensor->dims; d++) {
        extent.lo[d] = whole || draw(2) ? 0 : draw(tensor->shape[d]);
        extent.hi[d] = whole || draw(2) ? tensor->shape[d]
                                        : extent.lo[d] + 1 + draw(tensor->shape[d] - extent.lo[d]);
        elems *= extent.hi[d] - extent.lo[d];
    }
    extent.flat_hi = elems;
    if (draw(2)) {
        extent.flat_lo = draw(elems + 1);
        extent.flat_hi = extent.flat_lo + draw(elems - extent.flat_lo + 1);
    }
    return extent;
}

/* Row-major logical index of element `flat` of the extent's box. */
static uint64_t logical_index(const struct bl_extent *extent, const struct bl_tensor *tensor,
                              uint64_t flat)
{
    uint64_t coord[BL_TENSOR_DIMS_MAX];
    for (uint32_t d = tensor->dims; d-- > 0;) {
        uint64_t width = extent->hi[d] - extent->lo[d];
        coord[d] = extent->lo[d] + flat % width;
        flat /= width;
    }
    uint64_t index = 0;
    for (uint32_t d = 0; d < tensor->dims; d++) {
        index = index * tensor->shape[d] + coord[d];
    }
    return index;
}

struct holder {
    struct bl_extent_list list;
    uint32_t *words; /* its buffer */
    uint64_t used;   /* words */
};

static void holder_init(struct holder *holder, const struct bl_tensor *tensors, uint32_t extents)
{
    memset(holder, 0, sizeof(*holder));
    holder->words = calloc(BUFFER_WORDS, sizeof(uint32_t));
    assert_non_null(holder->words);
    uint32_t order = (uint32_t)draw(TENSORS);
    for (uint32_t e = 0; e < extents; e++) {
        uint32_t pick = (order + (uint32_t)draw(TENSORS)) % TENSORS;
        uint32_t index;
        assert_int_equal(bl_extent_list_tensor(&holder->list, &tensors[pick], &index, NULL), 0);
        struct bl_extent extent = random_extent(&tensors[pick], index);
        holder->used += draw(4);
        extent.offset = holder->used * 4;
        holder->used += bl_extent_elems(&extent);
        assert_true(holder->used <= BUFFER_WORDS);
        assert_int_equal(bl_extent_check(&extent, &tensors[pick], NULL), 0);
        assert_int_equal(bl_extent_list_add(&holder->list, &extent), 0);
    }
}

static void holder_close(struct holder *holder)
{
    bl_extent_list_close(&holder->list);
    free(holder->words);
}

/* The word that stands for element `index` of the tensor, as held by source `s`. */
static uint32_t word_of(const struct bl_tensor *tensor, uint64_t index, uint32_t s)
{
    return (uint32_t)(bl_xxh3(tensor->name, strlen(tensor->name)) + index * 16 + s) | 1;
}

static void holder_fill(struct holder *holder, uint32_t s)
{
    for (uint32_t e = 0; e < holder->list.extent_count; e++) {
        const struct bl_extent *extent = &holder->list.extents[e];
        const struct bl_tensor *tensor = &holder->list.tensors[extent->tensor];
        for (uint64_t f = extent->flat_lo; f < extent->flat_hi; f++) {
            holder->words[extent->offset / 4 + f - extent->flat_lo] =
                word_of(tensor, logical_index(extent, tensor, f), s);
        }
    }
}

static int holder_has(const struct holder *holder, const char *name, uint64_t index)
{
    for (uint32_t e = 0; e < holder->list.extent_count; e++) {
        const struct bl_extent *extent = &holder->list.extents[e];
        const struct bl_tensor *tensor = &holder->list.tensors[extent->tensor];
        if (strcmp(tensor->name, name) != 0) {
            continue;
        }
        for (uint64_t f = extent->flat_lo; f < extent->flat_hi; f++) {
            if (logical_index(extent, tensor, f) == index) {
                return 1;
            }
        }
    }
    return 0;
}

/* Compares what the plan copied with what the nearest holder has; returns missing elements. */
static uint64_t check_copied(const struct holder *wanted, const struct holder *sources,
                             uint32_t source_count)
{
    uint64_t missing = 0;
    for (uint32_t e = 0; e < wanted->list.extent_count; e++) {
        const struct bl_extent *extent = &wanted->list.extents[e];
        const struct bl_tensor *tensor = &wanted->list.tensors[extent->tensor];
        for (uint64_t f = extent->flat_lo; f < extent->flat_hi; f++) {
            uint64_t index = logical_index(extent, tensor, f);
            uint32_t expect = 0;
            for (uint32_t s = 0; s < source_count && expect == 0; s++) {
                if (holder_has(&sources[s], tensor->name, index)) {
                    expect = word_of(tensor, index, s);
                }
            }
            missing += expect == 0;
            assert_int_equal(wanted->words[extent->offset / 4 + f - extent->flat_lo], expect);
        }
    }
    return missing;
}

static void check_runs(const struct bl_plan *plan, const struct holder *wanted)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < plan->run_count; i++) {
        const struct bl_run *run = &plan->runs[i];
        bytes += run->bytes;
        assert_true(run->bytes > 0);
        if (i > 0) {
            const struct bl_run *last = run - 1;
            assert_true(last->src < run->src ||
                        (last->src == run->src && last->src_offset <= run->src_offset));
            assert_false(last->src == run->src && last->src_extent == run->src_extent &&
                         last->dst_extent == run->dst_extent &&
                         last->src_offset + last->bytes == run->src_offset &&
                         last->dst_offset + last->bytes == run->dst_offset);
        }
    }
    uint64_t elems = 0;
    for (uint32_t e = 0; e < wanted->list.extent_count; e++) {
        elems += bl_extent_elems(&wanted->list.extents[e]);
    }
    assert_int_equal(bytes / 4 + plan->missing_elems, elems); /* each is read exactly once */
}

/* What a plan says is missing is what it did not fill, as extents of the wanted tensors. */
static void check_missing(const struct holder *wanted, const struct bl_extent_list **lists,
                          uint32_t source_count)
{
    struct bl_holdings *holdings = NULL;
    struct bl_spans spans = {.keep_missing = true};
    uint64_t missing = 0, spanned = 0, elems = 0;
    assert_int_equal(bl_holdings_new(&holdings, lists, source_count, NULL), 0);
    for (uint32_t e = 0; e < wanted->list.extent_count; e++) {
        assert_int_equal(bl_holdings_plan(holdings, &wanted->list, e, e + 1, &spans, NULL), 0);
        elems += bl_extent_elems(&wanted->list.extents[e]);
    }
    for (size_t i = 0; i < spans.missing_count; i++) {
        const struct bl_extent *hole = &spans.missing[i];
        assert_int_equal(bl_extent_check(hole, &wanted->list.tensors[hole->tensor], NULL), 0);
        missing += bl_extent_elems(hole);
        for (uint64_t w = 0; w < bl_extent_elems(hole); w++) {
            assert_int_equal(wanted->words[hole->offset / 4 + w], 0);
        }
    }
    for (size_t i = 0; i < spans.count; i++) {
        const struct bl_span *span = &spans.at[i];
        assert_true(span->rows == 1 || (span->src_stride >= span->bytes && span->dst_stride > 0));
        spanned += span->bytes / 4 * span->rows;
    }
    assert_int_equal(missing, spans.missing_elems);
    assert_int_equal(missing + spanned, elems);
    bl_spans_close(&spans);
    bl_holdings_free(holdings);
}

static void plan_once(void)
{
    struct bl_tensor tensors[TENSORS];
    for (uint32_t t = 0; t < TENSORS; t++) {
        tensors[t] = random_tensor(t);
    }
    struct holder wanted;
    struct holder sources[SOURCES];
    const struct bl_extent_list *lists[SOURCES];
    uint32_t source_count = (uint32_t)draw(SOURCES + 1);
    holder_init(&wanted, tensors, (uint32_t)draw(6));
    for (uint32_t s = 0; s < source_count; s++) {
        holder_init(&sources[s], tensors, (uint32_t)draw(8));
        holder_fill(&sources[s], s);
        lists[s] = &sources[s].list;
    }
    struct bl_plan plan;
    struct bl_errmsg msg = {{0}};
    assert_int_equal(bl_plan_make(&plan, &wanted.list, lists, source_count, &msg), 0);
    for (size_t i = 0; i < plan.run_count; i++) {
        const struct bl_run *run = &plan.runs[i];
        memcpy((char *)wanted.words + run->dst_offset,
               (char *)sources[run->src].words + run->src_offset, run->bytes);
    }
    uint64_t missing = check_copied(&wanted, sources, source_count);
    assert_int_equal(plan.missing_elems, missing);
    assert_int_equal(plan.missing_name[0] != '\0', missing > 0);
    check_runs(&plan, &wanted);
    check_missing(&wanted, lists, source_count);
    bl_plan_close(&plan);
    holder_close(&wanted);
    for (uint32_t s = 0; s < source_count; s++) {
        holder_close(&sources[s]);
    }
}

static void test_plan_copies_what_the_oracle_says_for_random_boxes_and_cuts(void **state)
{
    (void)state;
    const char *from = getenv("BL_TEST_SEED");
    seed = from != NULL ? strtoull(from, NULL, 0) : 20240817;
    for (int round = 0; round < 3000; round++) {
        uint64_t round_seed = seed;
        if (round % 500 == 0) {
            printf("seed %llu\n", (unsigned long long)round_seed);
        }
        plan_once();
    }
}

static struct bl_tensor matrix(const char *name, uint64_t rows, uint64_t cols)
{
    struct bl_tensor tensor = {
        .kind = BL_KIND_PARAM, .dtype = BL_F32, .dims = 2, .shape = {rows, cols}};
    snprintf(tensor.name, sizeof(tensor.name), "%s", name);
    return tensor;
}

static void list_with(struct bl_extent_list *list, const struct bl_tensor *tensor, uint64_t flat_lo,
                      uint64_t flat_hi)
{
    memset(list, 0, sizeof(*list));
    uint32_t index;
    struct bl_extent extent;
    assert_int_equal(bl_extent_list_tensor(list, tensor, &index, NULL), 0);
    bl_extent_whole(&extent, tensor, index, flat_lo, flat_hi);
    assert_int_equal(bl_extent_list_add(list, &extent), 0);
}

static void test_plan_takes_one_run_when_a_large_flat_cut_is_moved(void **state)
{
    (void)state;
    struct bl_tensor tensor = matrix("w", 1U << 20, 1U << 20);
    struct bl_extent_list wanted;
    struct bl_extent_list source;
    list_with(&wanted, &tensor, 1000, 1ULL << 39);
    list_with(&source, &tensor, 0, 1ULL << 40);
    const struct bl_extent_list *sources[] = {&source};
    struct bl_plan plan;
    assert_int_equal(bl_plan_make(&plan, &wanted, sources, 1, NULL), 0);
    assert_int_equal(plan.run_count, 1);
    assert_int_equal(plan.runs[0].src_offset, 4000);
    assert_int_equal(plan.runs[0].bytes, ((1ULL << 39) - 1000) * 4);
    assert_int_equal(plan.missing_elems, 0);
    bl_plan_close(&plan);
    bl_extent_list_close(&wanted);
    bl_extent_list_close(&source);
}

/* Columns wanted from rows: a span for each pair of boxes, however many rows they have. */
static void test_plan_makes_one_span_of_all_rows_that_two_boxes_share(void **state)
{
    (void)state;
    struct bl_tensor tensor = matrix("w", 4096, 64);
    struct bl_extent_list wanted = {0}, rows[4] = {{0}};
    const struct bl_extent_list *lists[4];
    struct bl_holdings *holdings = NULL;
    struct bl_spans spans = {0};
    for (uint32_t s = 0; s < 4; s++) {
        list_with(&rows[s], &tensor, 0, 1024 * 64);
        rows[s].extents[0].offset = 128;
        rows[s].extents[0].lo[0] = 1024 * (uint64_t)s;
        rows[s].extents[0].hi[0] = 1024 * (uint64_t)s + 1024;
        lists[s] = &rows[s];
    }
    list_with(&wanted, &tensor, 0, 4096 * 16);
    wanted.extents[0].lo[1] = 16;
    wanted.extents[0].hi[1] = 32;
    assert_int_equal(bl_holdings_new(&holdings, lists, 4, NULL), 0);
    assert_int_equal(bl_holdings_plan(holdings, &wanted, 0, 1, &spans, NULL), 0);
    assert_int_equal(spans.count, 4);
    for (uint32_t s = 0; s < 4; s++) {
        assert_int_equal(spans.at[s].src, s);
        assert_int_equal(spans.at[s].rows, 1024);
        assert_int_equal(spans.at[s].bytes, 64);
        assert_int_equal(spans.at[s].src_offset, 128 + 16 * 4);
        assert_int_equal(spans.at[s].src_stride, 64 * 4);
        assert_int_equal(spans.at[s].dst_stride, 64);
        bl_extent_list_close(&rows[s]);
    }
    bl_spans_close(&spans);
    bl_holdings_free(holdings);
    bl_extent_list_close(&wanted);
}

static void test_plan_refuses_a_shape_that_differs(void **state)
{
    (void)state;
    struct bl_tensor tensor = matrix("w", 4, 4);
    struct bl_tensor other = matrix("w", 4, 5);
    struct bl_extent_list wanted;
    struct bl_extent_list source;
    list_with(&wanted, &tensor, 0, 16);
    list_with(&source, &other, 0, 20);
    const struct bl_extent_list *sources[] = {&source};
    struct bl_plan plan;
    struct bl_errmsg msg = {{0}};
    assert_int_equal(bl_plan_make(&plan, &wanted, sources, 1, &msg), BL_EFORMAT);
    assert_string_equal(msg.text, "w: shape or dtype differs between the two sides");
    bl_extent_list_close(&wanted);
    bl_extent_list_close(&source);
}

static void test_plan_names_the_first_missing_tensor_in_wanted_order(void **state)
{
    (void)state;
    struct bl_tensor z = matrix("z", 2, 2);
    struct bl_tensor a = matrix("a", 2, 2);
    struct bl_extent_list wanted;
    list_with(&wanted, &z, 1, 4);
    uint32_t index;
    struct bl_extent extent;
    assert_int_equal(bl_extent_list_tensor(&wanted, &a, &index, NULL), 0);
    bl_extent_whole(&extent, &a, index, 0, 4);
    assert_int_equal(bl_extent_list_add(&wanted, &extent), 0);
    struct bl_plan plan;
    assert_int_equal(bl_plan_make(&plan, &wanted, NULL, 0, NULL), 0);
    assert_int_equal(plan.missing_elems, 7);
    assert_string_equal(plan.missing_name, "z");
    bl_plan_close(&plan);
    bl_extent_list_close(&wanted);
}

static void test_extent_check_refuses_what_does_not_fit(void **state)
{
    (void)state;
    struct bl_tensor tensor = matrix("w", 4, 6);
    struct bl_extent extent;
    bl_extent_whole(&extent, &tensor, 0, 0, 25);
    assert_int_equal(bl_extent_check(&extent, &tensor, NULL), BL_EFORMAT);
    bl_extent_whole(&extent, &tensor, 0, 5, 4);
    assert_int_equal(bl_extent_check(&extent, &tensor, NULL), BL_EFORMAT);
    bl_extent_whole(&extent, &tensor, 0, 0, 24);
    assert_int_equal(bl_extent_check(&extent, &tensor, NULL), 0);
    extent.hi[1] = 7;
    assert_int_equal(bl_extent_check(&extent, &tensor, NULL), BL_EFORMAT);
    extent.hi[1] = 6;
    extent.lo[0] = 4;
    assert_int_equal(bl_extent_check(&extent, &tensor, NULL), BL_EFORMAT);
    extent.lo[0] = 0;
    extent.offset = UINT64_MAX - 10;
    assert_int_equal(bl_extent_check(&extent, &tensor, NULL), BL_EFORMAT);
    struct bl_tensor huge = matrix("huge", UINT64_MAX, 3);
    bl_extent_whole(&extent, &huge, 0, 0, 1);
    assert_int_equal(bl_tensor_elems(&huge), 0);
    assert_int_equal(bl_extent_check(&extent, &huge, NULL), BL_EFORMAT);
}

static void test_extent_list_copy_is_deep_and_equal(void **state)
{
    (void)state;
    struct bl_tensor tensor = matrix("w", 3, 3);
    struct bl_extent_list list;
    struct bl_extent_list copy;
    list_with(&list, &tensor, 0, 9);
    assert_int_equal(bl_extent_list_copy(&copy, &list), 0);
    assert_true(bl_extent_list_equal(&list, &copy));
    for (uint32_t i = 0; i < 40; i++) { /* growth after a copy keeps to the same capacity rule */
        struct bl_extent extent;
        bl_extent_whole(&extent, &tensor, 0, 0, 1);
        assert_int_equal(bl_extent_list_add(&copy, &extent), 0);
    }
    assert_false(bl_extent_list_equal(&list, &copy));
    uint32_t index;
    tensor.kind = BL_KIND_MOMENT1;
    assert_int_equal(bl_extent_list_tensor(&list, &tensor, &index, NULL), BL_EFORMAT);
    bl_extent_list_close(&list);
    bl_extent_list_close(&copy);
}

static void test_extent_digest_is_the_same_for_any_cut(void **state)
{
    (void)state;
    struct bl_tensor tensor = matrix("layers.0.wq", 8, 10);
    float whole[80];
    for (int i = 0; i < 80; i++) {
        whole[i] = (float)i * 0.25F;
    }
    struct bl_extent_list list;
    list_with(&list, &tensor, 0, 80);
    struct bl_state_digest want = {{0, 0}};
    bl_extent_list_digest(&list, whole, &want);
    bl_extent_list_close(&list);

    /* Two column boxes; the second cut flat in two: three holders' extents in one buffer. */
    float parts[80];
    memset(&list, 0, sizeof(list));
    uint32_t index;
    assert_int_equal(bl_extent_list_tensor(&list, &tensor, &index, NULL), 0);
    struct bl_extent cuts[3] = {
        {.lo = {0, 0}, .hi = {8, 3}, .flat_lo = 0, .flat_hi = 24, .offset = 0},
        {.lo = {0, 3}, .hi = {8, 10}, .flat_lo = 0, .flat_hi = 25, .offset = 24 * 4},
        {.lo = {0, 3}, .hi = {8, 10}, .flat_lo = 25, .flat_hi = 56, .offset = 49 * 4},
    };
    for (int c = 0; c < 3; c++) {
        for (uint64_t f = cuts[c].flat_lo; f < cuts[c].flat_hi; f++) {
            parts[cuts[c].offset / 4 + f - cuts[c].flat_lo] =
                whole[logical_index(&cuts[c], &tensor, f)];
        }
        assert_int_equal(bl_extent_list_add(&list, &cuts[c]), 0);
    }
    struct bl_state_digest got = {{0, 0}};
    bl_extent_list_digest(&list, parts, &got);
    assert_true(bl_state_digest_equal(&want, &got));
    bl_extent_list_close(&list);
}

static void test_dtype_names_go_there_and_back(void **state)
{
    (void)state;
    for (int d = BL_F32; d <= BL_I64; d++) {
        assert_int_equal(bl_dtype_parse(bl_dtype_name((enum bl_dtype)d)), d);
        assert_true(bl_dtype_bytes((enum bl_dtype)d) > 0);
    }
    assert_int_equal(bl_dtype_parse("F8"), 0);
    assert_null(bl_dtype_name((enum bl_dtype)99));
    assert_int_equal(bl_dtype_bytes((enum bl_dtype)0), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plan_copies_what_the_oracle_says_for_random_boxes_and_cuts),
        cmocka_unit_test(test_plan_takes_one_run_when_a_large_flat_cut_is_moved),
        cmocka_unit_test(test_plan_makes_one_span_of_all_rows_that_two_boxes_share),
        cmocka_unit_test(test_plan_refuses_a_shape_that_differs),
        cmocka_unit_test(test_plan_names_the_first_missing_tensor_in_wanted_order),
        cmocka_unit_test(test_extent_check_refuses_what_does_not_fit),
        cmocka_unit_test(test_extent_list_copy_is_deep_and_equal),
        cmocka_unit_test(test_extent_digest_is_the_same_for_any_cut),
        cmocka_unit_test(test_dtype_names_go_there_and_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
