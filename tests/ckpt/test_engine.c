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
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/mem.h"
#include "tests/ckpt/sample.h"
#include "wire/slot.h"
#include "wire/sock.h"

#define RUN        0x1122334455667788ull
#define WAIT_MS    20000
#define ATTEMPT_ID 0xfeedfacecafebeefull

static char root[256];
static struct wire_sock sock;
static pid_t engine_pid;

static int setup(void **state)
{
    char path[1024], number[16];
    int fds[2];
    struct wire_engine_hello hello;
    struct bl_errmsg why = {0};

    (void)state;
    sample_scale = 20;
    sample_dir_make(root, NULL);
    assert_non_null(getenv("BELAY_BUILD"));
    snprintf(path, sizeof(path), "%s/belay-engine", getenv("BELAY_BUILD"));
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    engine_pid = fork();
    assert_true(engine_pid >= 0);
    if (engine_pid == 0) {
        close(fds[0]);
        snprintf(number, sizeof(number), "%d", fds[1]);
        execl(path, path, "--fd", number, (char *)NULL);
        _exit(127);
    }
    close(fds[1]);
    wire_sock_init(&sock, fds[0]);
    if (wire_sock_expect(&sock, WIRE_TYPE_ENGINE_HELLO, &hello, WAIT_MS, &why) != 0) {
        fail_msg("hello: %s", why.text);
    }
    assert_int_equal(hello.pid, engine_pid);
    return 0;
}

static int teardown(void **state)
{
    int status = 0;

    (void)state;
    wire_sock_close(&sock);
    assert_int_equal(waitpid(engine_pid, &status, 0), engine_pid);
    sample_dir_remove(root);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : -1;
}

static void ask(enum wire_type type, const void *message, const int *fds, uint32_t fd_count,
                enum wire_type answer_type, void *answer)
{
    struct bl_errmsg why = {0};

    if (wire_sock_send(&sock, type, message, 0, 0, fds, fd_count, WAIT_MS, &why) != 0 ||
        wire_sock_expect(&sock, answer_type, answer, WAIT_MS, &why) != 0) {
        fail_msg("%s: %s", wire_type_name(type), why.text);
    }
}

/* A rank's arena whose slot 1 is sealed with `step`, or empty when `step` is 0. */
struct arena {
    int fd;
    void *map;
    uint64_t bytes;
    struct sample_shard shard;
};

static void arena_make(struct arena *arena, uint64_t id, uint32_t world, uint32_t rank,
                       uint64_t step)
{
    struct bl_state_digest digest = {{0, 0}};
    struct wire_arena_header *header;
    uint64_t table;

    sample_shard_init(&arena->shard, SAMPLE_FLAT, world, rank, step, step > 0);
    table = wire_arena_table_bytes(&arena->shard.list);
    arena->bytes = wire_arena_bytes(2, wire_arena_state_bytes(&arena->shard.list), table);
    assert_int_equal(bl_memfd_create("arena", arena->bytes, &arena->fd, NULL), 0);
    arena->map = bl_mem_map(arena->fd, arena->bytes, 1);
    assert_non_null(arena->map);
    assert_int_equal(
        wire_arena_format(arena->map, arena->bytes, RUN, 77, id, 2, &arena->shard.list, NULL), 0);
    header = arena->map;
    if (step > 0) {
        wire_slot_begin(&header->slots[1], RUN, 77, 3, 1, step);
        memcpy(wire_arena_slot(arena->map, 1), arena->shard.data, arena->shard.bytes);
        bl_extent_list_digest(&arena->shard.list, arena->shard.data, &digest);
        wire_slot_publish(&header->slots[1], &digest);
    }
}

static void arena_close(struct arena *arena)
{
    bl_mem_free(arena->map, arena->bytes);
    close(arena->fd);
    sample_shard_close(&arena->shard);
}

static struct wire_engine_root root_of(const char *node)
{
    struct wire_engine_root ret = {
        .run = RUN, .nodes = 2, .shared = 1, .create = 1, .reserve_bytes = 65536};

    snprintf(ret.path, sizeof(ret.path), "%s", root);
    snprintf(ret.node, sizeof(ret.node), "%s", node);
    return ret;
}

static struct wire_engine_attempt attempt_of(uint64_t step)
{
    return (struct wire_engine_attempt){
        .attempt = ATTEMPT_ID, .step = step, .generation = 3, .line = 1, .count = 1};
}

/* Writes rank `rank` of 2 as a part of its own; the answer is the caller's. */
static void write_part(uint32_t rank, uint64_t slot_step, uint64_t step,
                       struct wire_engine_written *answer)
{
    struct wire_engine_write message = {.attempt = attempt_of(step), .arena_count = 1};
    struct arena arena;

    message.root = root_of(rank == 0 ? "n0" : "n1");
    snprintf(message.part, sizeof(message.part), "part-n%u", rank);
    snprintf(message.codec, sizeof(message.codec), "none");
    arena_make(&arena, 10 + rank, 2, rank, slot_step);
    message.arenas[0] = (struct wire_engine_arena){.arena = 10 + rank, .slot = 1, .fd_index = 0};
    ask(WIRE_TYPE_ENGINE_WRITE, &message, &arena.fd, 1, WIRE_TYPE_ENGINE_WRITTEN, answer);
    arena_close(&arena);
}

static void commit_two(uint64_t step, struct wire_engine_committed *answer)
{
    struct wire_engine_written written[2];
    struct wire_engine_part parts[2];
    struct wire_engine_commit message = {.root = root_of("n0"),
                                         .attempt = attempt_of(step),
                                         .keep = {.keep = 2},
                                         .part_count = 2,
                                         .parts = parts};
    struct bl_state_digest digest = sample_digest(step);
    char text[BL_STATE_DIGEST_TEXT_BYTES], json[512];

    for (uint32_t rank = 0; rank < 2; rank++) {
        write_part(rank, step, step, &written[rank]);
        assert_int_equal(written[rank].rc, 0);
        parts[rank].part_json = written[rank].part_json;
    }
    bl_state_digest_format(&digest, text);
    snprintf(json, sizeof(json),
             "{\"job\":{\"name\":\"x\"},\"layout\":{\"world\":2,\"dp\":2,\"tp\":1,\"pp\":1,"
             "\"zero\":1},\"lanes\":4,\"seed\":\"18446744073709551615\",\"samples\":80,"
             "\"metrics\":{\"loss\":2.25,\"tokens\":640},\"function\":\"00000000000000ff\","
             "\"state_digest\":\"%s\"}",
             text);
    message.manifest_json = json;
    ask(WIRE_TYPE_ENGINE_COMMIT, &message, NULL, 0, WIRE_TYPE_ENGINE_COMMITTED, answer);
    for (uint32_t rank = 0; rank < 2; rank++) {
        wire_engine_written_free(&written[rank]);
    }
}

static void test_engine_saves_scans_and_loads_for_other_ranks(void **state)
{
    struct wire_engine_committed committed;
    struct wire_engine_scan scan = {.request = 5, .root = root_of("n0")};
    struct wire_engine_scanned scanned;
    struct bl_state_digest digest = sample_digest(20);

    (void)state;
    for (uint64_t step = 10; step <= 20; step += 10) {
        commit_two(step, &committed);
        assert_string_equal(committed.text, "");
        assert_int_equal(committed.rc, 0);
    }
    ask(WIRE_TYPE_ENGINE_SCAN, &scan, NULL, 0, WIRE_TYPE_ENGINE_SCANNED, &scanned);
    assert_int_equal(scanned.rc, 0);
    assert_int_equal(scanned.request, 5);
    assert_true(scanned.run == RUN);
    assert_int_equal(scanned.checkpoint_count, 2);
    assert_int_equal(scanned.checkpoints[0].step, 20);
    assert_int_equal(scanned.checkpoints[0].function_id, 0xff);
    assert_true(scanned.checkpoints[0].manifest_digest == committed.manifest_digest);
    assert_true(bl_state_digest_equal(&scanned.checkpoints[0].digest, &digest));
    assert_string_equal(scanned.checkpoints[0].dir, committed.dir);
    assert_string_equal(scanned.checkpoints[0].job_json, "{\"name\":\"x\"}");
    for (uint32_t rank = 0; rank < 3; rank++) {
        struct arena arena;
        struct wire_engine_load load = {.request = 6 + rank, .root = root_of("n0"), .slot = 0};
        struct wire_engine_loaded loaded;

        arena_make(&arena, 30, 3, rank, 0);
        load.arena = 30;
        snprintf(load.dir, sizeof(load.dir), "%s", scanned.checkpoints[0].dir);
        load.data_offset =
            (uint64_t)((uint8_t *)wire_arena_slot(arena.map, 0) - (uint8_t *)arena.map);
        load.extents = arena.shard.list;
        ask(WIRE_TYPE_ENGINE_LOAD, &load, &arena.fd, 1, WIRE_TYPE_ENGINE_LOADED, &loaded);
        assert_string_equal(loaded.text, "");
        assert_int_equal(loaded.rc, 0);
        memcpy(arena.shard.data, wire_arena_slot(arena.map, 0), arena.shard.bytes);
        sample_shard_check(&arena.shard, 20);
        arena_close(&arena);
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
    struct wire_engine_scan scan = {.request = 5, .root = root_of("n0")};
    struct wire_engine_scanned scanned;

    (void)state;
    commit_two(10, &committed);
    assert_int_equal(committed.rc, 0);
    scan.root.run = 1;
    ask(WIRE_TYPE_ENGINE_SCAN, &scan, NULL, 0, WIRE_TYPE_ENGINE_SCANNED, &scanned);
    assert_int_equal(scanned.rc, BL_EFOREIGN);
    assert_string_equal(scanned.run_text, "1122334455667788");
    assert_true(scanned.run == RUN);
    wire_engine_scanned_free(&scanned);
    scan.root.run = 0; /* whatever is there: for recover */
    ask(WIRE_TYPE_ENGINE_SCAN, &scan, NULL, 0, WIRE_TYPE_ENGINE_SCANNED, &scanned);
    assert_int_equal(scanned.rc, 0);
    assert_int_equal(scanned.checkpoint_count, 1);
    wire_engine_scanned_free(&scanned);
    snprintf(scan.root.path, sizeof(scan.root.path), "%s/none", root);
    scan.root.create = 0;
    ask(WIRE_TYPE_ENGINE_SCAN, &scan, NULL, 0, WIRE_TYPE_ENGINE_SCANNED, &scanned);
    assert_int_equal(scanned.rc, -ENOENT);
    wire_engine_scanned_free(&scanned);
}

static void test_engine_cancel_removes_what_the_attempt_left(void **state)
{
    struct wire_engine_written written;
    struct wire_engine_cancel cancel = {.root = root_of("n0"), .attempt = attempt_of(10)};
    struct wire_engine_cancelled cancelled;
    char path[512];

    (void)state;
    write_part(0, 10, 10, &written);
    assert_int_equal(written.rc, 0);
    wire_engine_written_free(&written);
    snprintf(path, sizeof(path), "%s/.step-000000000010.g3.a1.feedfacecafebeef.tmp", root);
    assert_int_equal(access(path, F_OK), 0);
    for (int i = 0; i < 2; i++) { /* again is fine */
        ask(WIRE_TYPE_ENGINE_CANCEL, &cancel, NULL, 0, WIRE_TYPE_ENGINE_CANCELLED, &cancelled);
        assert_int_equal(cancelled.rc, 0);
        assert_int_equal(access(path, F_OK), -1);
    }
}

static void test_engine_says_that_a_commit_is_incomplete(void **state)
{
    struct wire_engine_written written;
    struct wire_engine_part part;
    struct wire_engine_commit message = {
        .root = root_of("n0"), .attempt = attempt_of(10), .part_count = 1, .parts = &part};
    struct wire_engine_committed committed;

    (void)state;
    write_part(0, 10, 10, &written);
    part.part_json = written.part_json;
    ask(WIRE_TYPE_ENGINE_COMMIT, &message, NULL, 0, WIRE_TYPE_ENGINE_COMMITTED, &committed);
    assert_int_equal(committed.rc, BL_ENOSTATE);
    assert_non_null(strstr(committed.text, "in no part"));
    wire_engine_written_free(&written);
}

#ifdef BELAY_FAILPOINTS
static int setup_slow(void **state)
{
    int rc;

    setenv("BELAY_FAIL", "save-begun:delay_400:1", 1);
    rc = setup(state);
    unsetenv("BELAY_FAIL");
    return rc;
}

/* Asks for a write and does not wait. */
static void write_begin(uint64_t step)
{
    struct wire_engine_write message = {
        .root = root_of("n0"), .attempt = attempt_of(step), .arena_count = 1};
    struct arena arena;

    snprintf(message.part, sizeof(message.part), "part-n0");
    arena_make(&arena, 10, 2, 0, step);
    message.arenas[0] = (struct wire_engine_arena){.arena = 10, .slot = 1, .fd_index = 0};
    assert_int_equal(
        wire_sock_send(&sock, WIRE_TYPE_ENGINE_WRITE, &message, 0, 0, &arena.fd, 1, WAIT_MS, NULL),
        0);
    arena_close(&arena);
}

static void test_engine_cancels_a_write_under_way(void **state)
{
    struct wire_engine_cancel cancel = {.root = root_of("n0"), .attempt = attempt_of(10)};
    struct wire_engine_written written;
    struct wire_engine_cancelled cancelled;
    struct wire_engine_scan scan = {.request = 5, .root = root_of("n0")};
    struct wire_engine_scanned scanned;

    (void)state;
    write_begin(10);
    /* A question to the other lane is answered meanwhile. */
    ask(WIRE_TYPE_ENGINE_SCAN, &scan, NULL, 0, WIRE_TYPE_ENGINE_SCANNED, &scanned);
    assert_int_equal(scanned.checkpoint_count, 0);
    wire_engine_scanned_free(&scanned);
    assert_int_equal(
        wire_sock_send(&sock, WIRE_TYPE_ENGINE_CANCEL, &cancel, 0, 0, NULL, 0, WAIT_MS, NULL), 0);
    assert_int_equal(wire_sock_expect(&sock, WIRE_TYPE_ENGINE_WRITTEN, &written, WAIT_MS, NULL), 0);
    assert_int_equal(written.rc, BL_EABORTED);
    assert_non_null(strstr(written.text, "cancelled"));
    wire_engine_written_free(&written);
    assert_int_equal(wire_sock_expect(&sock, WIRE_TYPE_ENGINE_CANCELLED, &cancelled, WAIT_MS, NULL),
                     0);
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
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
        TEST(test_engine_saves_scans_and_loads_for_other_ranks),
        TEST(test_engine_refuses_a_slot_of_another_step),
        TEST(test_engine_refuses_another_runs_root),
        TEST(test_engine_cancel_removes_what_the_attempt_left),
        TEST(test_engine_says_that_a_commit_is_incomplete),
#ifdef BELAY_FAILPOINTS
        cmocka_unit_test_setup_teardown(test_engine_cancels_a_write_under_way, setup_slow,
                                        teardown),
        cmocka_unit_test_setup_teardown(
            test_engine_leaves_when_its_daemon_goes_in_the_middle_of_a_write, setup_slow, teardown),
#endif
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
