/* SPDX-License-Identifier: Apache-2.0 */
/* What belay-engine writes: many arenas, replicas, every codec; what it warns of and puts up with.
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/ckpt/test_engine_fixture.h"
#include "wire/slot.h"

/* ---- many arenas, replicas ---- */

static void commit_parts(struct wire_engine_written *written, uint32_t count, uint64_t step,
                         uint64_t data_step, struct wire_engine_committed *answer)
{
    struct wire_engine_part parts[8];
    struct wire_engine_commit message = {
        .root = fixture_root("n0"), .attempt = fixture_attempt(step), .parts = parts};
    struct bl_state_digest digest = sample_digest(data_step);
    char text[BL_STATE_DIGEST_TEXT_BYTES], json[128];

    bl_state_digest_format(&digest, text);
    snprintf(json, sizeof(json), "{\"state_digest\":\"%s\"}", text);
    message.manifest_json = json;
    message.part_count = count;
    for (uint32_t i = 0; i < count; i++) {
        assert_string_equal(written[i].text, "");
        parts[i].part_json = written[i].part_json;
    }
    fixture_ask(WIRE_TYPE_ENGINE_COMMIT, &message, NULL, 0, WIRE_TYPE_ENGINE_COMMITTED, answer);
    for (uint32_t i = 0; i < count; i++) {
        wire_engine_written_free(&written[i]);
    }
}

#define MANY 40

static void test_engine_writes_more_arenas_than_fit_beside_a_frame(void **state)
{
    struct fixture_arena arenas[MANY];
    struct wire_engine_written written;
    struct wire_engine_committed committed;
    struct ckpt_store *store;
    uint32_t sent = 0;

    (void)state;
    for (uint32_t i = 0; i < MANY; i++) {
        fixture_arena_make(&arenas[i], 100 + i, MANY, i, 10, 10);
    }
    for (; MANY - sent > WIRE_FDS_MAX; sent += WIRE_FDS_MAX) {
        struct wire_engine_arenas message = {.attempt = fixture_attempt(10).attempt,
                                             .arena_count = WIRE_FDS_MAX};
        int fds[WIRE_FDS_MAX];

        for (uint32_t i = 0; i < WIRE_FDS_MAX; i++) {
            message.arenas[i] =
                (struct wire_engine_arena){.arena = 100 + sent + i, .slot = 1, .fd_index = i};
            fds[i] = arenas[sent + i].fd;
        }
        fixture_send(WIRE_TYPE_ENGINE_ARENAS, &message, fds, WIRE_FDS_MAX);
    }
    fixture_write("n0", 10, &arenas[sent], MANY - sent, &written);
    commit_parts(&written, 1, 10, 10, &committed);
    assert_string_equal(committed.text, "");
    for (uint32_t i = 0; i < MANY; i++) {
        fixture_arena_close(&arenas[i]);
    }
    assert_int_equal(
        ckpt_store_open(&store, &(struct ckpt_store_config){.path = fixture.root}, NULL), 0);
    sample_load_check(store, committed.dir, SAMPLE_FLAT, 3, 10);
    ckpt_store_close(store);
}

static void test_engine_forgets_arenas_of_a_cancelled_write(void **state)
{
    struct wire_engine_arenas message = {.attempt = fixture_attempt(10).attempt, .arena_count = 1};
    struct wire_engine_cancel cancel = {.root = fixture_root("n0"), .attempt = fixture_attempt(10)};
    struct wire_engine_cancelled cancelled;
    struct fixture_arena arenas[2];
    struct wire_engine_written written[2];
    struct wire_engine_committed committed;

    (void)state;
    for (uint32_t i = 0; i < 2; i++) {
        fixture_arena_make(&arenas[i], 100 + i, 2, i, 10, 10);
    }
    message.arenas[0] = (struct wire_engine_arena){.arena = 100, .slot = 1};
    fixture_send(WIRE_TYPE_ENGINE_ARENAS, &message, &arenas[0].fd, 1);
    fixture_ask(WIRE_TYPE_ENGINE_CANCEL, &cancel, NULL, 0, WIRE_TYPE_ENGINE_CANCELLED, &cancelled);
    fixture_write("n1", 10, &arenas[1], 1, &written[1]); /* only this one is in it */
    fixture_write("n0", 10, &arenas[0], 1, &written[0]);
    commit_parts(written, 2, 10, 10, &committed);
    assert_string_equal(committed.text, "");
    for (uint32_t i = 0; i < 2; i++) {
        fixture_arena_close(&arenas[i]);
    }
}

/* Two nodes of two ranks each; every rank holds the whole state, as replicas do. Each node writes
 * its half, picked; inside a node what both ranks hold is written once. */
static void test_engine_replicas_are_written_once_and_shared(void **state)
{
    struct fixture_arena arenas[4];
    struct sample_shard half;
    struct wire_engine_written written[2];
    struct wire_engine_committed committed;
    struct ckpt_store *store;
    uint64_t bytes[2];

    (void)state;
    for (uint32_t i = 0; i < 4; i++) {
        fixture_arena_make(&arenas[i], 100 + i, 1, 0, 10, 10);
    }
    for (uint32_t node = 0; node < 2; node++) {
        struct wire_engine_write message;
        int fds[2] = {arenas[2 * node].fd, arenas[2 * node + 1].fd};

        sample_shard_init(&half, SAMPLE_ROWS, 2, node, 10, false);
        fixture_write_fill(&message, node == 0 ? "n0" : "n1", 10, &arenas[2 * node], 2);
        message.pick = half.list;
        fixture_ask(WIRE_TYPE_ENGINE_WRITE, &message, fds, 2, WIRE_TYPE_ENGINE_WRITTEN,
                    &written[node]);
        bytes[node] = written[node].bytes;
        sample_shard_close(&half);
    }
    commit_parts(written, 2, 10, 10, &committed);
    assert_string_equal(committed.text, "");
    assert_true(bytes[0] + bytes[1] < arenas[0].shard.bytes + 65536);
    assert_int_equal(
        ckpt_store_open(&store, &(struct ckpt_store_config){.path = fixture.root}, NULL), 0);
    sample_load_check(store, committed.dir, SAMPLE_FLAT, 3, 10);
    ckpt_store_close(store);
    fixture_write("n0", 10, arenas, 2, &written[0]); /* unpicked: all of it, once */
    assert_int_equal(written[0].rc, 0);
    assert_true(written[0].bytes < arenas[0].shard.bytes + 65536);
    wire_engine_written_free(&written[0]);
    for (uint32_t i = 0; i < 4; i++) {
        fixture_arena_close(&arenas[i]);
    }
}

/* Fills an empty arena of `cut` from the checkpoint, through the engine. */
static void load_into(const char *dir, enum sample_cut cut, uint32_t world, uint32_t rank,
                      uint64_t step)
{
    struct wire_engine_load load = {.request = 7, .root = fixture_root("n0"), .arena = 300};
    struct wire_engine_loaded answer;
    struct fixture_arena arena;

    fixture_cut = cut;
    fixture_arena_make(&arena, 300, world, rank, 0, 0);
    load.root.create = 0;
    snprintf(load.dir, sizeof(load.dir), "%s", dir);
    load.data_offset = (uint64_t)((uint8_t *)wire_arena_slot(arena.map, 0) - (uint8_t *)arena.map);
    load.extents = arena.shard.list;
    fixture_ask(WIRE_TYPE_ENGINE_LOAD, &load, &arena.fd, 1, WIRE_TYPE_ENGINE_LOADED, &answer);
    assert_string_equal(answer.text, "");
    memcpy(arena.shard.data, wire_arena_slot(arena.map, 0), arena.shard.bytes);
    sample_shard_check(&arena.shard, step);
    fixture_arena_close(&arena);
}

/* Tensor parallel ranks hold boxes of rows or of columns: four of them in two parts, read by three
 * of the other cut. */
static void test_engine_saves_boxes_and_fills_other_boxes(void **state)
{
    struct wire_engine_written written[2];
    struct wire_engine_committed committed;

    (void)state;
    for (enum sample_cut cut = SAMPLE_ROWS; cut <= SAMPLE_COLS; cut++) {
        struct fixture_arena arenas[4];
        uint64_t step = 10 + cut;

        fixture_cut = cut;
        for (uint32_t i = 0; i < 4; i++) {
            fixture_arena_make(&arenas[i], 100 + i, 4, i, step, step);
        }
        for (uint32_t node = 0; node < 2; node++) {
            fixture_write(node == 0 ? "n0" : "n1", step, &arenas[2 * node], 2, &written[node]);
        }
        commit_parts(written, 2, step, step, &committed);
        assert_string_equal(committed.text, "");
        for (uint32_t i = 0; i < 4; i++) {
            fixture_arena_close(&arenas[i]);
        }
        for (uint32_t rank = 0; rank < 3; rank++) {
            load_into(committed.dir, SAMPLE_ROWS + SAMPLE_COLS - cut, 3, rank, step);
            load_into(committed.dir, SAMPLE_FLAT, 3, rank, step);
        }
    }
    fixture_cut = SAMPLE_FLAT;
}

static void test_engine_refuses_to_pick_what_no_arena_holds(void **state)
{
    struct fixture_arena arena;
    struct sample_shard other;
    struct wire_engine_write message;
    struct wire_engine_written written;

    (void)state;
    fixture_arena_make(&arena, 100, 2, 0, 10, 10);
    sample_shard_init(&other, SAMPLE_FLAT, 2, 1, 10, false);
    fixture_write_fill(&message, "n0", 10, &arena, 1);
    message.pick = other.list;
    fixture_ask(WIRE_TYPE_ENGINE_WRITE, &message, &arena.fd, 1, WIRE_TYPE_ENGINE_WRITTEN, &written);
    assert_int_equal(written.rc, BL_ENOSTATE);
    assert_non_null(strstr(written.text, "not whole"));
    wire_engine_written_free(&written);
    sample_shard_close(&other);
    fixture_arena_close(&arena);
}

/* ---- warnings, hints, repeats ---- */

/* Saves `step` from one node with the data of `data_step`; the warning is in the answer. */
static void save_as(uint64_t step, uint64_t data_step, struct wire_engine_committed *answer)
{
    struct fixture_arena arenas[2];
    struct wire_engine_written written;

    for (uint32_t i = 0; i < 2; i++) {
        fixture_arena_make(&arenas[i], 100 + i, 2, i, step, data_step);
    }
    fixture_write("n0", step, arenas, 2, &written);
    commit_parts(&written, 1, step, data_step, answer);
    assert_string_equal(answer->text, "");
    for (uint32_t i = 0; i < 2; i++) {
        fixture_arena_close(&arenas[i]);
    }
}

static void test_engine_warns_when_every_save_holds_the_same_bytes(void **state)
{
    struct wire_engine_committed committed;
    unsigned all, small;

    (void)state;
    save_as(10, 10, &committed);
    assert_string_equal(committed.warning, "");
    save_as(20, 20, &committed);
    assert_string_equal(committed.warning, "");
    save_as(30, 20, &committed); /* small tensors are known at once */
    assert_int_equal(sscanf(committed.warning, "%u tensors that should change", &small), 1);
    save_as(40, 20, &committed); /* large ones are read whole first */
    assert_int_equal(sscanf(committed.warning, "%u tensors that should change", &all), 1);
    assert_true(all > small);
    save_as(50, 50, &committed); /* and all is well again */
    assert_string_equal(committed.warning, "");
}

static void test_engine_commits_when_the_hint_cannot_be_written(void **state)
{
    struct wire_engine_committed committed;
    uint64_t newest;
    char path[512];

    (void)state;
    snprintf(path, sizeof(path), "%s/latest", fixture.root);
    assert_int_equal(mkdir(path, 0755), 0); /* nothing can be renamed over it */
    fixture_save(10, 0, &committed);
    fixture_save(20, 0, &committed);
    assert_int_equal(fixture_scan_count(&newest), 2);
    assert_int_equal(newest, 20);
    assert_int_equal(rmdir(path), 0);
}

static void test_engine_saves_a_step_that_is_there_as_if_it_were_new(void **state)
{
    struct wire_engine_committed committed, again;
    struct fixture_parts parts;
    struct wire_engine_commit message;
    uint64_t newest;

    (void)state;
    fixture_save(10, 0, &committed);
    fixture_save(10, 0, &again); /* the same attempt's name */
    assert_true(again.manifest_digest == committed.manifest_digest);
    assert_string_equal(again.dir, committed.dir);
    fixture_parts_write(&parts, 10, 11); /* another state: never instead of the one there */
    message = fixture_commit_of(&parts, 10);
    fixture_ask(WIRE_TYPE_ENGINE_COMMIT, &message, NULL, 0, WIRE_TYPE_ENGINE_COMMITTED, &again);
    fixture_parts_close(&parts);
    assert_int_equal(again.rc, BL_ECONFLICT);
    assert_int_equal(fixture_scan_count(&newest), 1);
}

/* ---- codecs ---- */

static void save_with(uint64_t step, const char *codec, struct wire_engine_committed *answer)
{
    struct fixture_parts parts;
    struct wire_engine_commit message;

    fixture_codec = codec;
    fixture_parts_write(&parts, step, step);
    fixture_codec = "none";
    message = fixture_commit_of(&parts, step);
    message.verify = 1;
    fixture_ask(WIRE_TYPE_ENGINE_COMMIT, &message, NULL, 0, WIRE_TYPE_ENGINE_COMMITTED, answer);
    fixture_parts_close(&parts);
    assert_string_equal(answer->text, "");
}

static void test_engine_saves_with_every_codec(void **state)
{
    static const char *codecs[] = {"none", "zstd", "auto"};
    struct ckpt_store *store;

    (void)state;
    for (uint32_t i = 0; i < 3; i++) {
        struct wire_engine_committed committed;
        struct wire_engine_verified verified;
        char path[512];

        save_with(10 + i, codecs[i], &committed);
        fixture_expect_verified(&verified, 10 + i, 0);
        snprintf(path, sizeof(path), "%s/%s/part-n0.safetensors%s", fixture.root, committed.dir,
                 i == 0 ? "" : ".zst");
        assert_int_equal(access(path, F_OK), 0);
        assert_int_equal(
            ckpt_store_open(&store, &(struct ckpt_store_config){.path = fixture.root}, NULL), 0);
        sample_load_check(store, committed.dir, SAMPLE_ROWS, 3, 10 + i);
        ckpt_store_close(store);
    }
}

static void test_engine_refuses_parts_of_two_codecs(void **state)
{
    struct wire_engine_committed committed;
    struct fixture_parts parts, others;
    struct wire_engine_commit message;

    (void)state;
    fixture_parts_write(&parts, 10, 10);
    message = fixture_commit_of(&parts, 10);
    fixture_codec = "zstd";
    message.attempt.attempt++;
    fixture_parts_write(&others, 11, 11);
    fixture_codec = "none";
    message.parts[1] = others.parts[1];
    fixture_ask(WIRE_TYPE_ENGINE_COMMIT, &message, NULL, 0, WIRE_TYPE_ENGINE_COMMITTED, &committed);
    assert_int_equal(committed.rc, BL_EPROTO);
    assert_non_null(strstr(committed.text, "codec zstd"));
    fixture_parts_close(&parts);
    fixture_parts_close(&others);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)
        TEST(test_engine_saves_with_every_codec),
        TEST(test_engine_refuses_parts_of_two_codecs),
        TEST(test_engine_writes_more_arenas_than_fit_beside_a_frame),
        TEST(test_engine_forgets_arenas_of_a_cancelled_write),
        TEST(test_engine_replicas_are_written_once_and_shared),
        TEST(test_engine_saves_boxes_and_fills_other_boxes),
        TEST(test_engine_refuses_to_pick_what_no_arena_holds),
        TEST(test_engine_warns_when_every_save_holds_the_same_bytes),
        TEST(test_engine_commits_when_the_hint_cannot_be_written),
        TEST(test_engine_saves_a_step_that_is_there_as_if_it_were_new),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
