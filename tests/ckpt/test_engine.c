/* SPDX-License-Identifier: Apache-2.0 */
/* The real belay-engine over a socket pair: what a daemon asks of it, and what it must refuse. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/ckpt/test_engine_fixture.h"
#include "wire/slot.h"

/* Writes rank `rank` of 2 as a part of its own; the answer is the caller's. */
static void write_part(uint32_t rank, uint64_t slot_step, uint64_t step,
                       struct wire_engine_written *answer)
{
    struct fixture_arena arena;

    fixture_arena_make(&arena, 10 + rank, 2, rank, slot_step, slot_step);
    fixture_write(rank == 0 ? "n0" : "n1", step, &arena, 1, answer);
    fixture_arena_close(&arena);
}

static void test_engine_saves_scans_and_loads_for_other_ranks(void **state)
{
    struct wire_engine_committed committed;
    struct wire_engine_scan scan = {.request = 5, .root = fixture_root("n0")};
    struct wire_engine_scanned scanned;
    struct bl_state_digest digest = sample_digest(20);

    (void)state;
    for (uint64_t step = 10; step <= 20; step += 10) {
        fixture_save(step, 0, &committed);
    }
    fixture_ask(WIRE_TYPE_ENGINE_SCAN, &scan, NULL, 0, WIRE_TYPE_ENGINE_SCANNED, &scanned);
    assert_int_equal(scanned.rc, 0);
    assert_int_equal(scanned.request, 5);
    assert_true(scanned.run == FIXTURE_RUN);
    assert_int_equal(scanned.checkpoint_count, 2);
    assert_int_equal(scanned.checkpoints[0].step, 20);
    assert_int_equal(scanned.checkpoints[0].function_id, 0xff);
    assert_true(scanned.checkpoints[0].manifest_digest == committed.manifest_digest);
    assert_true(bl_state_digest_equal(&scanned.checkpoints[0].digest, &digest));
    assert_string_equal(scanned.checkpoints[0].dir, committed.dir);
    assert_string_equal(scanned.checkpoints[0].job_json, "{\"name\":\"x\"}");
    for (uint32_t rank = 0; rank < 3; rank++) {
        struct fixture_arena arena;
        struct wire_engine_load load = {.request = 6 + rank, .root = fixture_root("n0"), .slot = 0};
        struct wire_engine_loaded loaded;

        fixture_arena_make(&arena, 30, 3, rank, 0, 0);
        load.arena = 30;
        snprintf(load.dir, sizeof(load.dir), "%s", scanned.checkpoints[0].dir);
        load.data_offset =
            (uint64_t)((uint8_t *)wire_arena_slot(arena.map, 0) - (uint8_t *)arena.map);
        load.extents = arena.shard.list;
        fixture_ask(WIRE_TYPE_ENGINE_LOAD, &load, &arena.fd, 1, WIRE_TYPE_ENGINE_LOADED, &loaded);
        assert_string_equal(loaded.text, "");
        assert_int_equal(loaded.rc, 0);
        memcpy(arena.shard.data, wire_arena_slot(arena.map, 0), arena.shard.bytes);
        sample_shard_check(&arena.shard, 20);
        fixture_arena_close(&arena);
    }
    wire_engine_scanned_free(&scanned);
}

static void test_engine_refuses_a_slot_of_another_step(void **state)
{
    struct wire_engine_written written;

    (void)state;
    write_part(0, 11, 12, &written);
    assert_int_equal(written.rc, BL_ENOSTATE);
    assert_non_null(strstr(written.text, "step 11"));
    wire_engine_written_free(&written);
}

static void test_engine_refuses_another_runs_root(void **state)
{
    struct wire_engine_committed committed;
    struct wire_engine_scan scan = {.request = 5, .root = fixture_root("n0")};
    struct wire_engine_scanned scanned;

    (void)state;
    fixture_save(10, 0, &committed);
    scan.root.run = 1;
    fixture_ask(WIRE_TYPE_ENGINE_SCAN, &scan, NULL, 0, WIRE_TYPE_ENGINE_SCANNED, &scanned);
    assert_int_equal(scanned.rc, BL_EFOREIGN);
    assert_string_equal(scanned.run_text, "1122334455667788");
    assert_true(scanned.run == FIXTURE_RUN);
    wire_engine_scanned_free(&scanned);
    scan.root.run = 0; /* whatever is there: for recover */
    fixture_ask(WIRE_TYPE_ENGINE_SCAN, &scan, NULL, 0, WIRE_TYPE_ENGINE_SCANNED, &scanned);
    assert_int_equal(scanned.rc, 0);
    assert_int_equal(scanned.checkpoint_count, 1);
    wire_engine_scanned_free(&scanned);
    snprintf(scan.root.path, sizeof(scan.root.path), "%s/none", fixture.root);
    scan.root.create = 0;
    fixture_ask(WIRE_TYPE_ENGINE_SCAN, &scan, NULL, 0, WIRE_TYPE_ENGINE_SCANNED, &scanned);
    assert_int_equal(scanned.rc, -ENOENT);
    wire_engine_scanned_free(&scanned);
}

static void test_engine_cancel_removes_what_the_attempt_left(void **state)
{
    struct wire_engine_written written;
    struct wire_engine_cancel cancel = {.root = fixture_root("n0"), .attempt = fixture_attempt(10)};
    struct wire_engine_cancelled cancelled;
    char path[512];

    (void)state;
    write_part(0, 10, 10, &written);
    assert_int_equal(written.rc, 0);
    wire_engine_written_free(&written);
    snprintf(path, sizeof(path), "%s/.step-000000000010.g3.a1.feedfacecafebeef.tmp", fixture.root);
    assert_int_equal(access(path, F_OK), 0);
    for (int i = 0; i < 2; i++) { /* again is fine */
        fixture_ask(WIRE_TYPE_ENGINE_CANCEL, &cancel, NULL, 0, WIRE_TYPE_ENGINE_CANCELLED,
                    &cancelled);
        assert_int_equal(cancelled.rc, 0);
        assert_int_equal(access(path, F_OK), -1);
    }
}

static void test_engine_says_that_a_commit_is_incomplete(void **state)
{
    struct wire_engine_written written;
    struct wire_engine_part part;
    struct wire_engine_commit message = {.root = fixture_root("n0"),
                                         .attempt = fixture_attempt(10),
                                         .part_count = 1,
                                         .parts = &part};
    struct wire_engine_committed committed;

    (void)state;
    write_part(0, 10, 10, &written);
    part.part_json = written.part_json;
    fixture_ask(WIRE_TYPE_ENGINE_COMMIT, &message, NULL, 0, WIRE_TYPE_ENGINE_COMMITTED, &committed);
    assert_int_equal(committed.rc, BL_ENOSTATE);
    assert_non_null(strstr(committed.text, "in no part"));
    wire_engine_written_free(&written);
}

#ifdef BELAY_FAILPOINTS
static int setup_slow(void **state)
{
    (void)state;
    return fixture_setup_failing("save-begun:delay_400:1");
}

/* Asks for a write and does not wait. */
static void write_begin(uint64_t step)
{
    struct wire_engine_write message;
    struct fixture_arena arena;

    fixture_arena_make(&arena, 10, 2, 0, step, step);
    fixture_write_fill(&message, "n0", step, &arena, 1);
    fixture_send(WIRE_TYPE_ENGINE_WRITE, &message, &arena.fd, 1);
    fixture_arena_close(&arena);
}

static void test_engine_cancels_a_write_under_way(void **state)
{
    struct wire_engine_cancel cancel = {.root = fixture_root("n0"), .attempt = fixture_attempt(10)};
    struct wire_engine_written written;
    struct wire_engine_cancelled cancelled;
    struct wire_engine_scan scan = {.request = 5, .root = fixture_root("n0")};
    struct wire_engine_scanned scanned;

    (void)state;
    write_begin(10);
    /* A question to the other lane is answered meanwhile. */
    fixture_ask(WIRE_TYPE_ENGINE_SCAN, &scan, NULL, 0, WIRE_TYPE_ENGINE_SCANNED, &scanned);
    assert_int_equal(scanned.checkpoint_count, 0);
    wire_engine_scanned_free(&scanned);
    fixture_send(WIRE_TYPE_ENGINE_CANCEL, &cancel, NULL, 0);
    fixture_expect(WIRE_TYPE_ENGINE_WRITTEN, &written);
    assert_int_equal(written.rc, BL_EABORTED);
    assert_non_null(strstr(written.text, "cancelled"));
    wire_engine_written_free(&written);
    fixture_expect(WIRE_TYPE_ENGINE_CANCELLED, &cancelled);
    assert_int_equal(cancelled.rc, 0);
}

static void test_engine_leaves_when_its_daemon_goes_in_the_middle_of_a_write(void **state)
{
    (void)state;
    write_begin(10);
    /* teardown closes the socket and wants exit code 0 */
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)
        TEST(test_engine_saves_scans_and_loads_for_other_ranks),
        TEST(test_engine_refuses_a_slot_of_another_step),
        TEST(test_engine_refuses_another_runs_root),
        TEST(test_engine_cancel_removes_what_the_attempt_left),
        TEST(test_engine_says_that_a_commit_is_incomplete),
#ifdef BELAY_FAILPOINTS
        cmocka_unit_test_setup_teardown(test_engine_cancels_a_write_under_way, setup_slow,
                                        fixture_teardown),
        cmocka_unit_test_setup_teardown(
            test_engine_leaves_when_its_daemon_goes_in_the_middle_of_a_write, setup_slow,
            fixture_teardown),
#endif
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
