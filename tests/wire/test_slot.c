/* SPDX-License-Identifier: Apache-2.0 */
/* Arenas and slot headers: what is written is read, what is torn is not believed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "wire/slot.h"

static void table_make(struct bl_extent_list *list)
{
    static const char *const names[] = {"w.0", "w.1"};
    uint64_t offset = 0;
    memset(list, 0, sizeof(*list));
    for (uint32_t t = 0; t < 2; t++) {
        struct bl_tensor tensor = {
            .kind = BL_KIND_PARAM, .dtype = BL_F32, .dims = 2, .shape = {8, 16}};
        uint32_t index = 0;
        struct bl_extent extent;
        strcpy(tensor.name, names[t]);
        assert_int_equal(bl_extent_list_tensor(list, &tensor, &index, NULL), 0);
        bl_extent_whole(&extent, &tensor, index, 10, 90);
        extent.offset = offset;
        offset += 80 * 4;
        assert_int_equal(bl_extent_list_add(list, &extent), 0);
    }
}

static void *arena_make(const struct bl_extent_list *list, uint64_t *ret_bytes)
{
    uint64_t bytes =
        wire_arena_bytes(3, wire_arena_state_bytes(list), wire_arena_table_bytes(list));
    void *map = calloc(1, bytes);
    assert_non_null(map);
    assert_int_equal(wire_arena_format(map, bytes, 1, 2, 3, 3, list, NULL), 0);
    *ret_bytes = bytes;
    return map;
}

static void test_arena_reads_back_what_was_formatted(void **state)
{
    struct bl_extent_list list;
    struct wire_arena_info info;
    uint64_t bytes = 0;
    (void)state;
    table_make(&list);
    assert_int_equal(wire_arena_state_bytes(&list), 640);
    void *map = arena_make(&list, &bytes);
    assert_int_equal(wire_arena_read(&info, map, bytes, NULL), 0);
    assert_int_equal(info.arena, 3);
    assert_int_equal(info.incarnation, 2);
    assert_int_equal(info.slot_count, 3);
    assert_true(bl_extent_list_equal(&info.extents, &list));
    for (uint32_t k = 0; k < 3; k++) {
        assert_int_equal(info.slots[k].state, WIRE_SLOT_FREE);
        assert_int_equal(
            (uintptr_t)((char *)wire_arena_slot(map, k) - (char *)map) % WIRE_SLOT_ALIGN, 0);
    }
    bl_extent_list_close(&info.extents);
    bl_extent_list_close(&list);
    free(map);
}

static void test_arena_refuses_any_changed_byte_of_header_and_table(void **state)
{
    struct bl_extent_list list;
    struct wire_arena_info info;
    uint64_t bytes = 0;
    (void)state;
    table_make(&list);
    unsigned char *map = arena_make(&list, &bytes);
    uint64_t table = wire_arena_table_bytes(&list);
    for (uint64_t i = 0; i < 4096 + table; i++) {
        /* The part behind the checked header is reserved words and slots. */
        if (i >= offsetof(struct wire_arena_header, check) + 8 && i < 4096) {
            continue;
        }
        map[i] ^= 0x40;
        assert_true(wire_arena_read(&info, map, bytes, NULL) < 0);
        map[i] ^= 0x40;
    }
    assert_int_equal(wire_arena_read(&info, map, bytes, NULL), 0);
    bl_extent_list_close(&info.extents);
    assert_true(wire_arena_read(&info, map, 4096, NULL) < 0);
    assert_true(wire_arena_read(&info, map, bytes / 2, NULL) < 0);
    bl_extent_list_close(&list);
    free(map);
}

static void test_arena_bytes_overflow_to_zero(void **state)
{
    (void)state;
    assert_int_equal(wire_arena_bytes(0, 1, 1), 0);
    assert_int_equal(wire_arena_bytes(WIRE_SLOTS_MAX + 1, 1, 1), 0);
    assert_int_equal(wire_arena_bytes(3, UINT64_MAX / 2, 1), 0);
    assert_int_equal(wire_arena_bytes(3, 1, UINT64_MAX), 0);
}

static void test_slot_counts_as_sealed_only_when_published_whole(void **state)
{
    struct wire_slot_header slot;
    struct wire_slot_info info;
    struct bl_state_digest digest = {{7, 8}};
    (void)state;
    memset(&slot, 0, sizeof(slot));
    wire_slot_read(&slot, &info);
    assert_int_equal(info.state, WIRE_SLOT_FREE);
    wire_slot_begin(&slot, 1, 2, 3, 1, 5);
    wire_slot_read(&slot, &info);
    assert_int_equal(info.state, WIRE_SLOT_WRITING);
    wire_slot_publish(&slot, &digest);
    wire_slot_read(&slot, &info);
    assert_int_equal(info.state, WIRE_SLOT_SEALED);
    assert_int_equal(info.step, 5);
    assert_int_equal(info.generation, 3);
    assert_int_equal(info.digest.sum[1], 8);
    slot.step = 6; /* a header in the middle of a change */
    wire_slot_read(&slot, &info);
    assert_int_equal(info.state, WIRE_SLOT_WRITING);
    slot.step = 5;
    wire_slot_pin(&slot, 1);
    wire_slot_read(&slot, &info);
    assert_int_equal(info.state, WIRE_SLOT_SEALED);
    assert_int_equal(info.pinned, 1);
    wire_slot_free(&slot);
    wire_slot_read(&slot, &info);
    assert_int_equal(info.state, WIRE_SLOT_FREE);
    assert_int_equal(info.pinned, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_arena_reads_back_what_was_formatted),
        cmocka_unit_test(test_arena_refuses_any_changed_byte_of_header_and_table),
        cmocka_unit_test(test_arena_bytes_overflow_to_zero),
        cmocka_unit_test(test_slot_counts_as_sealed_only_when_published_whole),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
