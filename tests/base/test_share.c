/* SPDX-License-Identifier: Apache-2.0 */
/* Shares of what several nodes hold: every element once, only what one holds, evenly. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/share.h"

static void tensor_make(struct bl_tensor *ret, uint32_t number, uint64_t rows, uint64_t cols)
{
    memset(ret, 0, sizeof(*ret));
    snprintf(ret->name, sizeof(ret->name), "layers.%05u.weight", number);
    ret->kind = BL_KIND_PARAM;
    ret->dtype = BL_F32;
    ret->dims = 2;
    ret->shape[0] = rows;
    ret->shape[1] = cols;
}

/* A list of one kind of extent: flat range `part` of `parts` of each of `count` tensors. */
static void list_add(struct bl_extent_list *list, uint32_t first, uint32_t count, uint64_t rows,
                     uint64_t cols, uint32_t part, uint32_t parts)
{
    for (uint32_t i = 0; i < count; i++) {
        struct bl_tensor tensor;
        struct bl_extent extent;
        uint64_t all = rows * cols;
        uint32_t index = 0;

        tensor_make(&tensor, first + i, rows, cols);
        assert_int_equal(bl_extent_list_tensor(list, &tensor, &index, NULL), 0);
        bl_extent_whole(&extent, &tensor, index, all * part / parts, all * (part + 1) / parts);
        assert_int_equal(bl_extent_list_add(list, &extent), 0);
    }
}

static uint64_t list_bytes(const struct bl_extent_list *list)
{
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < list->extent_count; i++) {
        bytes += bl_extent_elems(&list->extents[i]) *
                 bl_dtype_bytes(list->tensors[list->extents[i].tensor].dtype);
    }
    return bytes;
}

/* Every node's share lies in what it holds; all shares together are all that is held, once. */
static void check_shares(const struct bl_extent_list *shares, uint32_t node_count,
                         const struct bl_holding *holdings, uint32_t holding_count)
{
    const struct bl_extent_list **lists = calloc(node_count + holding_count, sizeof(*lists));
    struct bl_plan plan;
    uint64_t elems = 0, held = 0;

    assert_non_null(lists);
    for (uint32_t n = 0; n < node_count; n++) {
        uint32_t count = 0;

        for (uint32_t h = 0; h < holding_count; h++) {
            if (holdings[h].node == n) {
                lists[count++] = holdings[h].list;
            }
        }
        if (shares[n].extent_count > 0) {
            assert_int_equal(bl_plan_make(&plan, &shares[n], lists, count, NULL), 0);
            assert_true(plan.missing_elems == 0);
            bl_plan_close(&plan);
        }
        for (uint32_t i = 0; i < shares[n].extent_count; i++) {
            assert_true(shares[n].extents[i].offset == 0);
            elems += bl_extent_elems(&shares[n].extents[i]);
        }
    }
    for (uint32_t n = 0; n < node_count; n++) {
        lists[n] = &shares[n];
    }
    for (uint32_t h = 0; h < holding_count; h++) { /* all that is held is in some share */
        assert_int_equal(bl_plan_make(&plan, holdings[h].list, lists, node_count, NULL), 0);
        assert_true(plan.missing_elems == 0);
        bl_plan_close(&plan);
    }
    /* As many elements as the union: so none is in two shares. */
    for (uint32_t h = 0; h < holding_count; h++) {
        lists[h] = holdings[h].list;
    }
    for (uint32_t h = 0; h < holding_count; h++) { /* what no earlier holding has */
        uint64_t own = 0;

        for (uint32_t i = 0; i < holdings[h].list->extent_count; i++) {
            own += bl_extent_elems(&holdings[h].list->extents[i]);
        }
        if (h == 0) {
            held += own;
            continue;
        }
        assert_int_equal(bl_plan_make(&plan, holdings[h].list, lists, h, NULL), 0);
        held += plan.missing_elems;
        bl_plan_close(&plan);
    }
    assert_true(elems == held);
    free(lists);
}

static void bounds(const struct bl_extent_list *shares, uint32_t count, uint64_t *ret_least,
                   uint64_t *ret_most)
{
    *ret_least = UINT64_MAX;
    *ret_most = 0;
    for (uint32_t n = 0; n < count; n++) {
        uint64_t bytes = list_bytes(&shares[n]);

        *ret_least = bytes < *ret_least ? bytes : *ret_least;
        *ret_most = bytes > *ret_most ? bytes : *ret_most;
    }
}

static void close_all(struct bl_extent_list *lists, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        bl_extent_list_close(&lists[i]);
    }
}

static void test_share_gives_what_one_holds_to_it(void **state)
{
    struct bl_extent_list held[3] = {0}, shares[3];
    struct bl_holding holdings[3];

    (void)state;
    for (uint32_t i = 0; i < 3; i++) {
        list_add(&held[i], 0, 5, 64, 33, i, 3);
        holdings[i] = (struct bl_holding){i, &held[i]};
    }
    assert_int_equal(bl_share_make(shares, 3, holdings, 3, NULL), 0);
    for (uint32_t i = 0; i < 3; i++) {
        assert_true(bl_extent_list_equal(&shares[i], &held[i]));
    }
    close_all(shares, 3);
    close_all(held, 3);
}

static void test_share_cuts_a_large_replica_between_its_holders(void **state)
{
    struct bl_extent_list held[4] = {0}, shares[4];
    struct bl_holding holdings[8];
    uint64_t least, most;

    (void)state;
    for (uint32_t i = 0; i < 4; i++) {
        list_add(&held[i], 0, 1, 4096, 4096, 0, 1); /* 64 MiB, the same everywhere */
        holdings[2 * i] = (struct bl_holding){i, &held[i]};
        holdings[2 * i + 1] = (struct bl_holding){i, &held[i]}; /* two ranks on each node */
    }
    assert_int_equal(bl_share_make(shares, 4, holdings, 8, NULL), 0);
    check_shares(shares, 4, holdings, 8);
    bounds(shares, 4, &least, &most);
    assert_true(most - least <= 3 * 4096);
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(shares[i].extent_count, 1);
    }
    close_all(shares, 4);
    close_all(held, 4);
}

/* ZeRO 1: weights everywhere, moments cut; the last node has twice the moments. */
static void test_share_evens_out_what_cannot_be_moved(void **state)
{
    struct bl_extent_list held[4] = {0}, shares[4];
    struct bl_holding holdings[4];
    uint64_t least, most;

    (void)state;
    for (uint32_t i = 0; i < 4; i++) {
        list_add(&held[i], 0, 50, 512, 700, 0, 1);
        list_add(&held[i], 1000, 10, 512, 1000, i, 5);
        if (i == 3) {
            list_add(&held[i], 2000, 10, 512, 1000, 4, 5);
        }
        holdings[i] = (struct bl_holding){i, &held[i]};
    }
    assert_int_equal(bl_share_make(shares, 4, holdings, 4, NULL), 0);
    check_shares(shares, 4, holdings, 4);
    bounds(shares, 4, &least, &most);
    assert_true(most - least <= 2 * BL_SHARE_BYTES_MIN);
    close_all(shares, 4);
    close_all(held, 4);
}

static uint64_t seed;

static uint64_t below(uint64_t bound)
{
    seed += 0x9e3779b97f4a7c15ull;
    return bl_mix64(seed) % bound;
}

/* Any overlaps: flat ranges of whole tensors, boxes of rows, on few nodes. */
static void random_holdings(struct bl_extent_list *held, struct bl_holding *holdings,
                            uint32_t count, uint32_t node_count)
{
    for (uint32_t h = 0; h < count; h++) {
        memset(&held[h], 0, sizeof(held[h]));
        for (uint32_t i = 0; i < below(12); i++) {
            uint32_t number = (uint32_t)below(6), index = 0;
            uint64_t rows = 8 * (number + 1), cols = number == 5 ? 65536 : 7, a, b, elems;
            struct bl_tensor tensor;
            struct bl_extent extent;

            tensor_make(&tensor, number, rows, cols);
            assert_int_equal(bl_extent_list_tensor(&held[h], &tensor, &index, NULL), 0);
            bl_extent_whole(&extent, &tensor, index, 0, rows * cols);
            if (number % 2 == 1) { /* tensors of odd numbers come in boxes of half the rows */
                extent.lo[0] = below(2) * rows / 2;
                extent.hi[0] = extent.lo[0] + rows / 2;
            }
            elems = (extent.hi[0] - extent.lo[0]) * cols;
            a = below(elems + 1);
            b = below(elems + 1);
            extent.flat_lo = a < b ? a : b;
            extent.flat_hi = a < b ? b : a;
            if (below(3) == 0) {
                extent.flat_lo = 0;
                extent.flat_hi = elems;
            }
            assert_int_equal(bl_extent_list_add(&held[h], &extent), 0);
        }
        holdings[h] = (struct bl_holding){(uint32_t)below(node_count), &held[h]};
    }
}

/* Extents of one list may overlap here, so the union is counted by hand. */
static void check_once(const struct bl_extent_list *shares, uint32_t node_count,
                       const struct bl_holding *holdings, uint32_t holding_count)
{
    static uint8_t written[6][48 * 65536], held[6][48 * 65536];

    memset(written, 0, sizeof(written));
    memset(held, 0, sizeof(held));
    for (uint32_t l = 0; l < node_count + holding_count; l++) {
        const struct bl_extent_list *list =
            l < node_count ? &shares[l] : holdings[l - node_count].list;

        for (uint32_t i = 0; i < list->extent_count; i++) {
            const struct bl_extent *extent = &list->extents[i];
            const struct bl_tensor *tensor = &list->tensors[extent->tensor];
            uint32_t number = (uint32_t)strtoul(tensor->name + 7, NULL, 10);
            uint64_t base = extent->lo[0] * tensor->shape[1];

            for (uint64_t at = extent->flat_lo; at < extent->flat_hi; at++) {
                uint8_t *mark = l < node_count ? &written[number][base + at] /* boxes of rows */
                                               : &held[number][base + at];

                *mark = (uint8_t)(l < node_count ? *mark + 1 : 1);
            }
        }
    }
    assert_memory_equal(written, held, sizeof(held));
}

static void test_share_gives_each_element_once_for_any_overlap(void **state)
{
    const char *given = getenv("BELAY_SEED");
    uint64_t first = given != NULL ? strtoull(given, NULL, 0) : (uint64_t)getpid() * 1000003u;

    (void)state;
    printf("seeds from %llu (BELAY_SEED repeats)\n", (unsigned long long)first);
    for (uint32_t trial = 0; trial < 40; trial++) {
        struct bl_extent_list held[10], shares[5];
        struct bl_holding holdings[10];
        uint32_t count, node_count;

        seed = first + trial;
        count = (uint32_t)below(10) + 1;
        node_count = (uint32_t)below(5) + 1;
        random_holdings(held, holdings, count, node_count);
        assert_int_equal(bl_share_make(shares, node_count, holdings, count, NULL), 0);
        check_once(shares, node_count, holdings, count);
        for (uint32_t n = 0; n < node_count; n++) { /* only what the node holds */
            const struct bl_extent_list *lists[10];
            uint32_t own = 0;
            struct bl_plan plan;

            for (uint32_t h = 0; h < count; h++) {
                if (holdings[h].node == n) {
                    lists[own++] = &held[h];
                }
            }
            if (shares[n].extent_count > 0) {
                assert_true(own > 0);
                assert_int_equal(bl_plan_make(&plan, &shares[n], lists, own, NULL), 0);
                assert_true(plan.missing_elems == 0);
                bl_plan_close(&plan);
            }
        }
        close_all(shares, node_count);
        close_all(held, count);
    }
}

static void test_share_refuses_two_shapes_of_one_name(void **state)
{
    struct bl_extent_list held[2] = {0}, shares[2];
    struct bl_holding holdings[2] = {{0, &held[0]}, {1, &held[1]}};
    struct bl_errmsg why = {0};

    (void)state;
    list_add(&held[0], 0, 1, 8, 8, 0, 1);
    list_add(&held[1], 0, 1, 8, 9, 0, 1);
    assert_int_equal(bl_share_make(shares, 2, holdings, 2, &why), BL_EFORMAT);
    assert_non_null(strstr(why.text, "layers.00000.weight"));
    close_all(held, 2);
}

#define MANY    10000u
#define GROUPS  50u /* of tensors: each is replicated over MANY / GROUPS ranks */
#define TENSORS 60u

/* 10,000 ranks on as many nodes: weights in groups of 200 replicas, moments cut over all. */
static void test_share_of_10000_ranks_is_made_at_once(void **state)
{
    struct bl_extent_list *held = calloc(MANY, sizeof(*held));
    struct bl_extent_list *shares = calloc(MANY, sizeof(*shares));
    struct bl_holding *holdings = calloc(MANY, sizeof(*holdings));
    uint64_t began, took_ms, least, most, total = 0;

    (void)state;
    assert_non_null(held);
    assert_non_null(shares);
    assert_non_null(holdings);
    for (uint32_t r = 0; r < MANY; r++) {
        list_add(&held[r], r % GROUPS * TENSORS, TENSORS, 2048, 4096, 0, 1);
        list_add(&held[r], 900000, 1, 100000, 4096, r, MANY);
        holdings[r] = (struct bl_holding){r, &held[r]};
    }
    began = bl_now_ns();
    assert_int_equal(bl_share_make(shares, MANY, holdings, MANY, NULL), 0);
    took_ms = (bl_now_ns() - began) / 1000000;
    bounds(shares, MANY, &least, &most);
    for (uint32_t r = 0; r < MANY; r++) {
        total += list_bytes(&shares[r]);
    }
    printf("%u ranks, %u extents: %llu ms; %llu to %llu KiB each\n", MANY, MANY * (TENSORS + 1),
           (unsigned long long)took_ms, (unsigned long long)least >> 10,
           (unsigned long long)most >> 10);
    assert_true(total == (GROUPS * TENSORS * 2048ull * 4096 + 100000ull * 4096) * 4);
    assert_true(most - least <= 2 * BL_SHARE_BYTES_MIN);
    assert_true(took_ms < 60000); /* n log n, not n * n, on any machine */
    close_all(shares, MANY);
    close_all(held, MANY);
    free(held);
    free(shares);
    free(holdings);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_share_gives_what_one_holds_to_it),
        cmocka_unit_test(test_share_cuts_a_large_replica_between_its_holders),
        cmocka_unit_test(test_share_evens_out_what_cannot_be_moved),
        cmocka_unit_test(test_share_gives_each_element_once_for_any_overlap),
        cmocka_unit_test(test_share_refuses_two_shapes_of_one_name),
        cmocka_unit_test(test_share_of_10000_ranks_is_made_at_once),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
