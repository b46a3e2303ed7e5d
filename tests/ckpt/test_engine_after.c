/* SPDX-License-Identifier: Apache-2.0 */
/* What belay-engine does beside answering: reads back, retains, gives way, warns, shares. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "tests/ckpt/test_engine_fixture.h"
#include "wire/slot.h"

static void expect_verified(struct wire_engine_verified *answer, uint64_t step, int32_t rc)
{
    fixture_expect(WIRE_TYPE_ENGINE_VERIFIED, answer);
    assert_int_equal(answer->step, step);
    if (answer->rc != rc) {
        fail_msg("%d: %s", answer->rc, answer->text);
    }
}

/* How many good checkpoints there are, and the newest's step. */
static uint32_t scan_count(uint64_t *ret_newest)
{
    struct wire_engine_scan scan = {.request = 5, .root = fixture_root("n0")};
    struct wire_engine_scanned scanned;
    uint32_t count;

    fixture_ask(WIRE_TYPE_ENGINE_SCAN, &scan, NULL, 0, WIRE_TYPE_ENGINE_SCANNED, &scanned);
    assert_int_equal(scanned.rc, 0);
    count = scanned.checkpoint_count;
    *ret_newest = count == 0 ? 0 : scanned.checkpoints[0].step;
    wire_engine_scanned_free(&scanned);
    return count;
}

/* ---- reading back, retention ---- */

static void test_engine_reads_back_and_then_lets_older_ones_go(void **state)
{
    struct wire_engine_committed committed;
    struct wire_engine_verified verified;
    uint64_t newest;
    char path[512];

    (void)state;
    for (uint64_t step = 10; step <= 40; step += 10) {
        fixture_save(step, 1, &committed);
        expect_verified(&verified, step, 0);
        assert_true(verified.attempt == fixture_attempt(step).attempt);
        assert_string_equal(verified.dir, committed.dir);
        assert_true(verified.bytes > 800000);
        assert_int_equal(verified.removed, step > 20 ? 1 : 0);
        snprintf(path, sizeof(path), "%s/%s/verified", fixture.root, committed.dir);
        assert_int_equal(access(path, F_OK), 0);
    }
    assert_int_equal(scan_count(&newest), 2);
    assert_int_equal(newest, 40);
}

static void test_engine_reads_back_what_retention_waits_for(void **state)
{
    struct wire_engine_committed committed;
    struct wire_engine_verified verified;
    uint64_t newest;

    (void)state;
    fixture_save(10, 0, &committed); /* nobody asks for verification */
    fixture_save(20, 0, &committed);
    fixture_save(30, 0, &committed);
    expect_verified(&verified, 30, 0);
    assert_int_equal(verified.removed, 0);
    expect_verified(&verified, 20, 0);
    assert_int_equal(verified.removed, 1);
    assert_int_equal(scan_count(&newest), 2);
}

static void test_engine_remembers_over_a_restart_what_was_read_back(void **state)
{
    struct wire_engine_committed committed;
    struct wire_engine_verified verified;
    uint64_t newest;

    (void)state;
    fixture_save(10, 1, &committed);
    expect_verified(&verified, 10, 0);
    fixture_save(20, 1, &committed);
    expect_verified(&verified, 20, 0);
    fixture_restart();
    fixture_save(30, 0, &committed);
    expect_verified(&verified, 30, 0); /* 20 need not be read again */
    assert_int_equal(verified.removed, 1);
    assert_int_equal(scan_count(&newest), 2);
}

static void test_engine_paces_the_reading(void **state)
{
    struct wire_engine_committed committed;
    struct wire_engine_verified verified;
    struct fixture_parts parts;
    struct wire_engine_commit message;

    (void)state;
    fixture_parts_write(&parts, 10, 10);
    message = fixture_commit_of(&parts, 10);
    message.verify = 1;
    message.root.rate_max = (parts.written[0].bytes + parts.written[1].bytes) * 4;
    fixture_ask(WIRE_TYPE_ENGINE_COMMIT, &message, NULL, 0, WIRE_TYPE_ENGINE_COMMITTED, &committed);
    fixture_parts_close(&parts);
    assert_int_equal(committed.rc, 0);
    expect_verified(&verified, 10, 0);
    assert_in_range(verified.elapsed_ms, 230, FIXTURE_WAIT_MS);
}

#ifdef BELAY_FAILPOINTS
/* The second write takes long; so does every reading begin late. */
static int setup_slow_second(void **state)
{
    (void)state;
    return fixture_setup_failing("save-begun:delay_400:3");
}

static void test_engine_gives_saves_precedence_over_reading_back(void **state)
{
    struct wire_engine_committed committed;
    struct wire_engine_written written;
    struct wire_engine_verified verified;
    struct wire_engine_write write_message;
    struct wire_engine_commit commit_message;
    struct fixture_parts parts;
    struct fixture_arena arena;

    (void)state;
    fixture_parts_write(&parts, 10, 10);
    commit_message = fixture_commit_of(&parts, 10);
    commit_message.verify = 1;
    fixture_arena_make(&arena, 10, 2, 0, 20, 20);
    fixture_write_fill(&write_message, "n0", 20, &arena, 1);
    /* Both at once: the write waits already when the commit is done. */
    fixture_send(WIRE_TYPE_ENGINE_COMMIT, &commit_message, NULL, 0);
    fixture_send(WIRE_TYPE_ENGINE_WRITE, &write_message, &arena.fd, 1);
    fixture_expect(WIRE_TYPE_ENGINE_COMMITTED, &committed);
    fixture_expect(WIRE_TYPE_ENGINE_WRITTEN, &written);
    assert_int_equal(written.rc, 0);
    wire_engine_written_free(&written);
    expect_verified(&verified, 10, 0);
    fixture_arena_close(&arena);
    fixture_parts_close(&parts);
}

static int setup_late_reading(void **state)
{
    (void)state;
    return fixture_setup_failing("verify-begin:delay_300:3,verify-begin:delay_300:4");
}

static void flip_byte(const char *dir, const char *file, long at)
{
    char path[512];
    FILE *stream;
    int byte;

    snprintf(path, sizeof(path), "%s/%s/%s", fixture.root, dir, file);
    stream = fopen(path, "r+");
    assert_non_null(stream);
    assert_int_equal(fseek(stream, at, SEEK_SET), 0);
    byte = fgetc(stream);
    assert_int_equal(fseek(stream, at, SEEK_SET), 0);
    fputc(byte ^ 1, stream);
    fclose(stream);
}

static void test_engine_removes_nothing_for_a_damaged_one(void **state)
{
    struct wire_engine_committed committed;
    struct wire_engine_verified verified;
    uint64_t newest;
    char path[512];

    (void)state;
    fixture_save(10, 1, &committed);
    expect_verified(&verified, 10, 0);
    fixture_save(20, 1, &committed);
    expect_verified(&verified, 20, 0);
    fixture_save(30, 1, &committed); /* its reading begins 300 ms later */
    flip_byte(committed.dir, "part-n1.safetensors", 100000);
    expect_verified(&verified, 30, BL_EDIGEST);
    assert_non_null(strstr(verified.text, "part-n1.safetensors"));
    assert_non_null(strstr(verified.text, "tensor"));
    assert_int_equal(verified.removed, 0);
    snprintf(path, sizeof(path), "%s/%s/verified", fixture.root, committed.dir);
    assert_int_equal(access(path, F_OK), -1);
    assert_int_equal(scan_count(&newest), 3); /* it protects nobody: 10 and 20 stay */
    fixture_save(40, 1, &committed);
    expect_verified(&verified, 40, 0); /* 40 and 20 are enough */
    assert_int_equal(verified.removed, 1);
    assert_int_equal(scan_count(&newest), 3);
}

static int setup_leaving(void **state)
{
    (void)state;
    return fixture_setup_failing("verify-begin:delay_300:1");
}

static void test_engine_leaves_in_the_middle_of_reading_back(void **state)
{
    struct wire_engine_committed committed;

    (void)state;
    fixture_save(10, 1, &committed);
    /* teardown closes the socket and wants exit code 0 */
}
#endif

/* ---- kindness ---- */

#define NICE_FIELD 19 /* of /proc/PID/task/TID/stat */

static long nice_of(const char *task)
{
    char path[300], text[1024] = "", *at;
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%d/task/%.32s/stat", (int)fixture.pid, task);
    file = fopen(path, "r");
    if (file == NULL || fgets(text, sizeof(text), file) == NULL) {
        text[0] = '\0';
    }
    if (file != NULL) {
        fclose(file);
    }
    at = strrchr(text, ')'); /* ends field 2 */
    for (int field = 2; at != NULL && field < NICE_FIELD; field++) {
        at = strchr(at + 1, ' ');
    }
    return at == NULL ? -1 : strtol(at, NULL, 10);
}

static void test_engine_threads_are_kind_to_the_ranks(void **state)
{
    uint64_t deadline = bl_now_ns() + FIXTURE_WAIT_MS * 1000000ull;
    int own = nice(0);
    int kind[20] = {0};
    bool idle = false;

    (void)state;
    while (kind[19] == 0 || kind[10] == 0 || !idle) { /* threads that start */
        char path[64];
        DIR *dir;

        assert_true(bl_now_ns() < deadline);
        memset(kind, 0, sizeof(kind));
        snprintf(path, sizeof(path), "/proc/%d/task", (int)fixture.pid);
        dir = opendir(path);
        assert_non_null(dir);
        for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
            long nice_value = entry->d_name[0] == '.' ? -1 : nice_of(entry->d_name);

            if (nice_value >= 0 && nice_value < 20) {
                kind[nice_value]++;
            }
            if (nice_value == 19) {
                idle = syscall(SYS_ioprio_get, 1, atoi(entry->d_name)) >> 13 == 3;
            }
        }
        closedir(dir);
    }
    if (own < 10) {
        assert_in_range(kind[own], 2, 8); /* main and reader: a recovery waits for them */
    }
}

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
    assert_int_equal(scan_count(&newest), 2);
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
    assert_int_equal(scan_count(&newest), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define WITH(name, setup) cmocka_unit_test_setup_teardown(name, setup, fixture_teardown)
        WITH(test_engine_reads_back_and_then_lets_older_ones_go, fixture_setup),
        WITH(test_engine_reads_back_what_retention_waits_for, fixture_setup),
        WITH(test_engine_remembers_over_a_restart_what_was_read_back, fixture_setup),
        WITH(test_engine_paces_the_reading, fixture_setup),
        WITH(test_engine_threads_are_kind_to_the_ranks, fixture_setup),
        WITH(test_engine_writes_more_arenas_than_fit_beside_a_frame, fixture_setup),
        WITH(test_engine_forgets_arenas_of_a_cancelled_write, fixture_setup),
        WITH(test_engine_replicas_are_written_once_and_shared, fixture_setup),
        WITH(test_engine_refuses_to_pick_what_no_arena_holds, fixture_setup),
        WITH(test_engine_warns_when_every_save_holds_the_same_bytes, fixture_setup),
        WITH(test_engine_commits_when_the_hint_cannot_be_written, fixture_setup),
        WITH(test_engine_saves_a_step_that_is_there_as_if_it_were_new, fixture_setup),
#ifdef BELAY_FAILPOINTS
        WITH(test_engine_gives_saves_precedence_over_reading_back, setup_slow_second),
        WITH(test_engine_removes_nothing_for_a_damaged_one, setup_late_reading),
        WITH(test_engine_leaves_in_the_middle_of_reading_back, setup_leaving),
#endif
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
