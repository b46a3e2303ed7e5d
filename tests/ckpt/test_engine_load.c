/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks of a node load together, from a root with a damaged file and another with a good one. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/ckpt/test_engine_fixture.h"
#include "wire/slot.h"

#define RANKS 3
#define DIR   "step-000000000010.g3"

static char copy_root[300];
static uint32_t wrong_rank = RANKS; /* that one asks for a tensor that nobody has */

static int setup(void **state)
{
    struct wire_engine_committed committed;
    char command[700];
    int rc = fixture_setup(state);

    fixture_save(10, 0, &committed);
    assert_string_equal(committed.dir, DIR);
    snprintf(copy_root, sizeof(copy_root), "%s-copy", fixture.root);
    snprintf(command, sizeof(command), "cp -a '%s' '%s'", fixture.root, copy_root);
    assert_int_equal(system(command), 0);
    return rc;
}

static int teardown(void **state)
{
    sample_dir_remove(copy_root);
    return fixture_teardown(state);
}

static void path_of(char ret[500], const char *root, const char *file)
{
    snprintf(ret, 500, "%s/" DIR "/%s", root, file);
}

static void flip(const char *root, const char *file, off_t at)
{
    char path[500];
    uint8_t byte;
    int fd;

    path_of(path, root, file);
    fd = open(path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, at), 1);
    byte ^= 4;
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    close(fd);
}

/* Sends the questions of three ranks at once (the engine sleeps until all are there); the answers,
 * by rank, and how many were healed. */
static uint32_t load_all(uint32_t copies, struct wire_engine_loaded answers[RANKS])
{
    struct fixture_arena arenas[RANKS];
    struct wire_engine_loaded answer;
    uint32_t healed = 0;

    assert_int_equal(kill(fixture.pid, SIGSTOP), 0);
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        struct wire_engine_load load = {.request = 100 + rank, .root = fixture_root("n0")};

        fixture_arena_make(&arenas[rank], 50 + rank, RANKS, rank, 0, 0);
        load.root.create = 0;
        load.arena = 50 + rank;
        snprintf(load.dir, sizeof(load.dir), DIR);
        load.data_offset = (uint64_t)((uint8_t *)wire_arena_slot(arenas[rank].map, 0) -
                                      (uint8_t *)arenas[rank].map);
        load.extents = arenas[rank].shard.list;
        if (rank == wrong_rank) {
            snprintf(load.extents.tensors[0].name, sizeof(load.extents.tensors[0].name),
                     "nowhere.weight");
        }
        load.copy_count = copies;
        load.copies[0].root = load.root;
        snprintf(load.copies[0].root.path, sizeof(load.copies[0].root.path), "%s", copy_root);
        snprintf(load.copies[0].dir, sizeof(load.copies[0].dir), DIR);
        fixture_send(WIRE_TYPE_ENGINE_LOAD, &load, &arenas[rank].fd, 1);
    }
    assert_int_equal(kill(fixture.pid, SIGCONT), 0);
    for (uint32_t i = 0; i < RANKS; i++) {
        fixture_expect(WIRE_TYPE_ENGINE_LOADED, &answer);
        assert_true(answer.request >= 100 && answer.request < 100 + RANKS);
        answers[answer.request - 100] = answer;
        healed += answer.healed;
    }
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        if (answers[rank].rc == 0) {
            memcpy(arenas[rank].shard.data, wire_arena_slot(arenas[rank].map, 0),
                   arenas[rank].shard.bytes);
            sample_shard_check(&arenas[rank].shard, 10);
            assert_true(answers[rank].bytes > 0 && answers[rank].bytes <= arenas[rank].shard.bytes);
        }
        fixture_arena_close(&arenas[rank]);
    }
    return healed;
}

static void test_engine_loads_heal_from_another_root_and_are_one(void **state)
{
    struct wire_engine_loaded answers[RANKS];

    (void)state;
    assert_int_equal(load_all(1, answers), 0);
    flip(fixture.root, "part-n0.safetensors", 6000);
    /* Each rank wants bytes of that chunk: one load of all three heals it once. */
    assert_int_equal(load_all(1, answers), 1);
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        assert_string_equal(answers[rank].text, "");
        assert_int_equal(answers[rank].rc, 0);
        if (answers[rank].healed > 0) {
            assert_non_null(strstr(answers[rank].healed_text, "part-n0.safetensors: chunk 0"));
            assert_non_null(strstr(answers[rank].healed_text, "tensor "));
            assert_non_null(strstr(answers[rank].healed_text, copy_root));
        }
    }
}

static void test_engine_load_names_file_chunk_and_tensor_when_nothing_heals(void **state)
{
    static const char begin[] = DIR "/part-n0.safetensors: chunk 0";
    struct wire_engine_loaded answers[RANKS];

    (void)state;
    flip(fixture.root, "part-n0.safetensors", 6000);
    flip(copy_root, "part-n0.safetensors", 6000);
    for (uint32_t copies = 0; copies < 2; copies++) {
        assert_int_equal(load_all(copies, answers), 0);
        assert_int_equal(answers[0].rc, BL_EDIGEST);
        assert_int_equal(strncmp(answers[0].text, begin, strlen(begin)), 0);
        assert_non_null(strstr(answers[0].text, "tensor "));
    }
}

static void test_engine_loads_from_a_copy_when_the_root_is_gone(void **state)
{
    struct wire_engine_loaded answers[RANKS];
    char away[400];

    (void)state;
    snprintf(away, sizeof(away), "%s-away", fixture.root);
    assert_int_equal(rename(fixture.root, away), 0);
    assert_true(load_all(1, answers) >= 1);
    assert_int_equal(answers[0].rc, 0);
    assert_int_equal(load_all(0, answers), 0);
    assert_int_equal(answers[0].rc, -ENOENT);
    assert_int_equal(rename(away, fixture.root), 0);
}

static void test_engine_scan_tells_of_what_it_passes_over(void **state)
{
    struct wire_engine_scan scan = {.request = 5, .root = fixture_root("n0")};
    struct wire_engine_committed committed;
    struct wire_engine_scanned scanned;
    char path[500];

    (void)state;
    path_of(path, fixture.root, "part-n1.safetensors");
    assert_int_equal(truncate(path, 5000), 0);
    fixture_ask(WIRE_TYPE_ENGINE_SCAN, &scan, NULL, 0, WIRE_TYPE_ENGINE_SCANNED, &scanned);
    assert_int_equal(scanned.checkpoint_count, 0);
    assert_int_equal(scanned.passed_count, 1);
    assert_string_equal(scanned.passed[0].dir, DIR);
    assert_non_null(strstr(scanned.passed[0].text, DIR "/part-n1.safetensors: 5000 bytes"));
    wire_engine_scanned_free(&scanned);
    fixture_save(20, 0, &committed); /* a newer one is good: nobody need know */
    fixture_ask(WIRE_TYPE_ENGINE_SCAN, &scan, NULL, 0, WIRE_TYPE_ENGINE_SCANNED, &scanned);
    assert_int_equal(scanned.checkpoint_count, 1);
    assert_int_equal(scanned.passed_count, 0);
    wire_engine_scanned_free(&scanned);
}

/* One rank asks for a tensor that is not there: it alone is refused, the others of the batch have
 * what they asked for. */
static void test_engine_load_of_one_wrong_rank_fails_no_other(void **state)
{
    struct wire_engine_loaded answers[RANKS];

    (void)state;
    wrong_rank = 1;
    assert_int_equal(load_all(1, answers), 0);
    wrong_rank = RANKS;
    assert_int_equal(answers[0].rc, 0);
    assert_int_equal(answers[1].rc, BL_ENOSTATE);
    assert_non_null(strstr(answers[1].text, "nowhere.weight"));
    assert_int_equal(answers[2].rc, 0);
}

static int setup_stopping(void **state)
{
    (void)state;
    /* The delay is for the signal: a thread runs on for a moment after it has stopped itself. */
    return fixture_setup_failing("scan-listed:stop:1,scan-listed:delay_100:1");
}

/* Between the list of a scan and its look at the newest that one is retired: there is a newer one.
 */
static void test_engine_scan_goes_on_when_the_newest_is_retired_meanwhile(void **state)
{
    struct wire_engine_scan scan = {.request = 5, .root = fixture_root("n0")};
    struct wire_engine_committed committed;
    struct wire_engine_scanned scanned;
    char from[500], to[500];
    int status;

    (void)state;
    fixture_save(10, 0, &committed);
    fixture_save(20, 0, &committed);
    fixture_send(WIRE_TYPE_ENGINE_SCAN, &scan, NULL, 0);
    assert_int_equal(waitpid(fixture.pid, &status, WUNTRACED), fixture.pid);
    assert_true(WIFSTOPPED(status));
    snprintf(from, sizeof(from), "%s/%s", fixture.root, committed.dir);
    snprintf(to, sizeof(to), "%s/away", fixture.root);
    assert_int_equal(rename(from, to), 0);
    assert_int_equal(kill(fixture.pid, SIGCONT), 0);
    fixture_expect(WIRE_TYPE_ENGINE_SCANNED, &scanned);
    assert_int_equal(scanned.rc, 0);
    assert_int_equal(scanned.checkpoint_count, 1);
    assert_int_equal(scanned.checkpoints[0].step, 10);
    assert_non_null(scanned.checkpoints[0].job_json);
    wire_engine_scanned_free(&scanned);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_engine_loads_heal_from_another_root_and_are_one),
        TEST(test_engine_load_names_file_chunk_and_tensor_when_nothing_heals),
        TEST(test_engine_loads_from_a_copy_when_the_root_is_gone),
        TEST(test_engine_scan_tells_of_what_it_passes_over),
        TEST(test_engine_load_of_one_wrong_rank_fails_no_other),
        cmocka_unit_test_setup_teardown(
            test_engine_scan_goes_on_when_the_newest_is_retired_meanwhile, setup_stopping,
            fixture_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
