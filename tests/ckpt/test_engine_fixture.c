/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/ckpt/test_engine_fixture.h"

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/mem.h"
#include "wire/slot.h"

struct fixture fixture;
const char *fixture_codec = "none";
enum sample_cut fixture_cut = SAMPLE_FLAT;

static void engine_start(void)
{
    char path[1024], number[16];
    int fds[2];
    struct wire_engine_hello hello;

    assert_non_null(getenv("BELAY_BUILD"));
    snprintf(path, sizeof(path), "%s/belay-engine", getenv("BELAY_BUILD"));
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    fixture.pid = fork();
    assert_true(fixture.pid >= 0);
    if (fixture.pid == 0) {
        close(fds[0]);
        snprintf(number, sizeof(number), "%d", fds[1]);
        execl(path, path, "--fd", number, (char *)NULL);
        _exit(127);
    }
    close(fds[1]);
    wire_sock_init(&fixture.sock, fds[0]);
    fixture_expect(WIRE_TYPE_ENGINE_HELLO, &hello);
    assert_int_equal(hello.pid, fixture.pid);
}

static int engine_stop(void)
{
    int status = 0;

    wire_sock_close(&fixture.sock);
    if (waitpid(fixture.pid, &status, 0) != fixture.pid) {
        return -1;
    }
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : -1;
}

int fixture_setup(void **state)
{
    (void)state;
    sample_scale = 20;
    sample_dir_make(fixture.root, NULL);
    engine_start();
    return 0;
}

int fixture_setup_failing(const char *failpoints)
{
    int rc;

    setenv("BELAY_FAIL", failpoints, 1);
    rc = fixture_setup(NULL);
    unsetenv("BELAY_FAIL");
    return rc;
}

int fixture_teardown(void **state)
{
    int rc = engine_stop();

    (void)state;
    sample_dir_remove(fixture.root);
    return rc;
}

void fixture_restart(void)
{
    assert_int_equal(engine_stop(), 0);
    engine_start();
}

void fixture_send(enum wire_type type, const void *message, const int *fds, uint32_t fd_count)
{
    struct bl_errmsg why = {0};

    if (wire_sock_send(&fixture.sock, type, message, 0, 0, fds, fd_count, FIXTURE_WAIT_MS, &why) !=
        0) {
        fail_msg("%s: %s", wire_type_name(type), why.text);
    }
}

void fixture_expect(enum wire_type type, void *answer)
{
    struct bl_errmsg why = {0};

    if (wire_sock_expect(&fixture.sock, type, answer, FIXTURE_WAIT_MS, &why) != 0) {
        fail_msg("%s: %s", wire_type_name(type), why.text);
    }
}

void fixture_ask(enum wire_type type, const void *message, const int *fds, uint32_t fd_count,
                 enum wire_type answer_type, void *answer)
{
    fixture_send(type, message, fds, fd_count);
    fixture_expect(answer_type, answer);
}

void fixture_arena_make(struct fixture_arena *arena, uint64_t id, uint32_t world, uint32_t rank,
                        uint64_t step, uint64_t data_step)
{
    struct bl_state_digest digest = {{0, 0}};
    struct wire_arena_header *header;
    uint64_t table;

    arena->id = id;
    sample_shard_init(&arena->shard, fixture_cut, world, rank, data_step, step > 0);
    table = wire_arena_table_bytes(&arena->shard.list);
    arena->bytes = wire_arena_bytes(2, wire_arena_state_bytes(&arena->shard.list), table);
    assert_int_equal(bl_memfd_create("arena", arena->bytes, &arena->fd, NULL), 0);
    arena->map = bl_mem_map(arena->fd, arena->bytes, 1);
    assert_non_null(arena->map);
    assert_int_equal(wire_arena_format(arena->map, arena->bytes, FIXTURE_RUN, 77, id, 2,
                                       &arena->shard.list, NULL),
                     0);
    header = arena->map;
    if (step > 0) {
        wire_slot_begin(&header->slots[1], FIXTURE_RUN, 77, 3, 1, step);
        memcpy(wire_arena_slot(arena->map, 1), arena->shard.data, arena->shard.bytes);
        bl_extent_list_digest(&arena->shard.list, arena->shard.data, &digest);
        wire_slot_publish(&header->slots[1], &digest);
    }
}

void fixture_arena_close(struct fixture_arena *arena)
{
    bl_mem_free(arena->map, arena->bytes);
    close(arena->fd);
    sample_shard_close(&arena->shard);
}

struct wire_engine_root fixture_root(const char *node)
{
    struct wire_engine_root ret = {
        .run = FIXTURE_RUN, .nodes = 2, .shared = 1, .create = 1, .reserve_bytes = 65536};

    snprintf(ret.path, sizeof(ret.path), "%s", fixture.root);
    snprintf(ret.node, sizeof(ret.node), "%s", node);
    return ret;
}

struct wire_engine_attempt fixture_attempt(uint64_t step)
{
    return (struct wire_engine_attempt){
        .attempt = 0xfeedfacecafebeefull, .step = step, .generation = 3, .line = 1, .count = 1};
}

void fixture_write_fill(struct wire_engine_write *ret, const char *node, uint64_t step,
                        const struct fixture_arena *arenas, uint32_t count)
{
    *ret = (struct wire_engine_write){.attempt = fixture_attempt(step), .arena_count = count};
    ret->root = fixture_root(node);
    snprintf(ret->part, sizeof(ret->part), "part-%.32s", node);
    snprintf(ret->codec, sizeof(ret->codec), "%s", fixture_codec);
    for (uint32_t i = 0; i < count; i++) {
        ret->arenas[i] =
            (struct wire_engine_arena){.arena = arenas[i].id, .slot = 1, .fd_index = i};
    }
}

void fixture_write(const char *node, uint64_t step, const struct fixture_arena *arenas,
                   uint32_t count, struct wire_engine_written *answer)
{
    struct wire_engine_write message;
    int fds[WIRE_FDS_MAX];

    fixture_write_fill(&message, node, step, arenas, count);
    for (uint32_t i = 0; i < count; i++) {
        fds[i] = arenas[i].fd;
    }
    fixture_ask(WIRE_TYPE_ENGINE_WRITE, &message, fds, count, WIRE_TYPE_ENGINE_WRITTEN, answer);
}

void fixture_parts_write(struct fixture_parts *ret, uint64_t step, uint64_t data_step)
{
    struct bl_state_digest digest = sample_digest(data_step);
    char text[BL_STATE_DIGEST_TEXT_BYTES];

    memset(ret, 0, sizeof(*ret));
    for (uint32_t rank = 0; rank < 2; rank++) {
        struct fixture_arena arena;

        fixture_arena_make(&arena, 10 + rank, 2, rank, step, data_step);
        fixture_write(rank == 0 ? "n0" : "n1", step, &arena, 1, &ret->written[rank]);
        fixture_arena_close(&arena);
        assert_string_equal(ret->written[rank].text, "");
        assert_int_equal(ret->written[rank].rc, 0);
        ret->parts[rank].part_json = ret->written[rank].part_json;
    }
    bl_state_digest_format(&digest, text);
    snprintf(ret->json, sizeof(ret->json),
             "{\"job\":{\"name\":\"x\"},\"layout\":{\"world\":2,\"dp\":2,\"tp\":1,\"pp\":1,"
             "\"zero\":1},\"lanes\":4,\"seed\":\"18446744073709551615\",\"samples\":80,"
             "\"metrics\":{\"loss\":2.25,\"tokens\":640},\"function\":\"00000000000000ff\","
             "\"state_digest\":\"%s\"}",
             text);
}

void fixture_parts_close(struct fixture_parts *parts)
{
    for (uint32_t rank = 0; rank < 2; rank++) {
        wire_engine_written_free(&parts->written[rank]);
    }
}

struct wire_engine_commit fixture_commit_of(struct fixture_parts *parts, uint64_t step)
{
    return (struct wire_engine_commit){.root = fixture_root("n0"),
                                       .attempt = fixture_attempt(step),
                                       .keep = {.keep = 2},
                                       .manifest_json = parts->json,
                                       .part_count = 2,
                                       .parts = parts->parts};
}

void fixture_save(uint64_t step, uint32_t verify, struct wire_engine_committed *answer)
{
    struct fixture_parts parts;
    struct wire_engine_commit message;

    fixture_parts_write(&parts, step, step);
    message = fixture_commit_of(&parts, step);
    message.verify = verify;
    fixture_ask(WIRE_TYPE_ENGINE_COMMIT, &message, NULL, 0, WIRE_TYPE_ENGINE_COMMITTED, answer);
    fixture_parts_close(&parts);
    assert_string_equal(answer->text, "");
    assert_int_equal(answer->rc, 0);
}

void fixture_expect_verified(struct wire_engine_verified *answer, uint64_t step, int32_t rc)
{
    fixture_expect(WIRE_TYPE_ENGINE_VERIFIED, answer);
    assert_int_equal(answer->step, step);
    if (answer->rc != rc) {
        fail_msg("%d: %s", answer->rc, answer->text);
    }
}

uint32_t fixture_scan_count(uint64_t *ret_newest)
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
