/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A real belay-engine that gets EIO at each operation that it does to its disk, in turn, one in the
 * life of a process: it answers with an error that names the path, or the save is good; it lives,
 * the checkpoints before are whole, and its next save is good.
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/ckpt/test_engine_fixture.h"
#include "wire/codec.h"

#define OPERATIONS_MAX 400
#define STRIDE         3u

static uint64_t step;
static char hits[256], hit[300]; /* the failpoint leaves a file there when it acts */

static bool was_hit(void)
{
    return access(hit, F_OK) == 0;
}

/* Does this answer say that it failed? Then it must name the root. */
static bool has_failed(int32_t rc, const char *text, uint64_t at)
{
    if (rc == 0 && text[0] == '\0') {
        return false;
    }
    if (strstr(text, fixture.root) == NULL) {
        fail_msg("operation %llu: %d, no path in: %s", (unsigned long long)at, rc, text);
    }
    return true;
}

/* The answer to what was sent; that something was read back may come before it. */
static void answer(enum wire_type type, void *ret)
{
    struct bl_errmsg why = {0};
    struct wire_frame frame;

    do {
        if (wire_sock_recv(&fixture.sock, &frame, FIXTURE_WAIT_MS, &why) != 0) {
            fail_msg("%s: %s", wire_type_name(type), why.text);
        }
        assert_true(frame.type == (uint32_t)type || frame.type == WIRE_TYPE_ENGINE_VERIFIED);
    } while (frame.type != (uint32_t)type);
    assert_int_equal(wire_message_decode(type, ret, frame.payload, frame.payload_bytes, &why), 0);
}

static bool write_part(struct fixture_parts *parts, uint32_t rank, uint64_t at)
{
    struct wire_engine_write message;
    struct fixture_arena arena;

    fixture_arena_make(&arena, 10 + rank, 2, rank, step, step);
    fixture_write_fill(&message, rank == 0 ? "n0" : "n1", step, &arena, 1);
    fixture_send(WIRE_TYPE_ENGINE_WRITE, &message, &arena.fd, 1);
    answer(WIRE_TYPE_ENGINE_WRITTEN, &parts->written[rank]);
    fixture_arena_close(&arena);
    parts->parts[rank].part_json = parts->written[rank].part_json;
    return !has_failed(parts->written[rank].rc, parts->written[rank].text, at);
}

/* Saves the next step; true when it was committed. */
static bool save(uint64_t at)
{
    struct bl_state_digest digest = sample_digest(++step);
    char text[BL_STATE_DIGEST_TEXT_BYTES];
    struct wire_engine_committed committed;
    struct wire_engine_commit message;
    struct fixture_parts parts = {0};
    bool good;

    bl_state_digest_format(&digest, text);
    snprintf(parts.json, sizeof(parts.json), "{\"state_digest\":\"%s\"}", text);
    good = write_part(&parts, 0, at) && write_part(&parts, 1, at);
    if (good) {
        message = fixture_commit_of(&parts, step);
        fixture_send(WIRE_TYPE_ENGINE_COMMIT, &message, NULL, 0);
        answer(WIRE_TYPE_ENGINE_COMMITTED, &committed);
        good = !has_failed(committed.rc, committed.text, at);
    }
    fixture_parts_close(&parts);
    return good;
}

/* Every good checkpoint in the root is whole, and the newest is `newest` or the next. */
static void check(uint64_t newest, uint64_t at)
{
    const struct ckpt_store_config config = {.path = fixture.root};
    const struct ckpt_verify_job job = {.full = true};
    struct ckpt_verify_result result;
    struct ckpt_store *store;
    struct ckpt_scan scan;
    uint64_t found = 0;

    assert_int_equal(ckpt_store_open(&store, &config, NULL), 0);
    assert_int_equal(ckpt_scan(store, &scan, NULL), 0);
    for (uint32_t i = 0; i < scan.count; i++) {
        const struct ckpt_entry *entry = &scan.entries[i];

        assert_true(entry->state != CKPT_BROKEN && entry->state != CKPT_FOREIGN);
        if (entry->state == CKPT_GOOD && found == 0) {
            found = entry->step;
            assert_int_equal(ckpt_verify(store, entry->dir, &job, &result, NULL), 0);
            assert_int_equal(result.findings, 0);
            sample_load_check(store, entry->dir, SAMPLE_ROWS, 3, found);
        }
    }
    if (found < newest || found > step) {
        fail_msg("operation %llu: step %llu is the newest, not %llu", (unsigned long long)at,
                 (unsigned long long)found, (unsigned long long)newest);
    }
    ckpt_scan_close(&scan);
    ckpt_store_close(store);
}

/* One engine with EIO at operation `at`; false when it does not get that far. */
static bool try(uint64_t at, uint32_t *failed)
{
    uint64_t newest = step;
    char text[64];
    bool good;

    BL_IGNORE(unlink(hit), "it need not be there");
    snprintf(text, sizeof(text), "disk-op:error:%llu", (unsigned long long)at);
    setenv("BELAY_FAIL", text, 1);
    setenv("BELAY_FAIL_ONCE_DIR", hits, 1);
    fixture_restart();
    unsetenv("BELAY_FAIL");
    unsetenv("BELAY_FAIL_ONCE_DIR");
    good = save(at);
    newest = good ? step : newest;
    check(newest, at);
    *failed += !good;
    if (!was_hit()) {
        return false;
    }
    if (!save(at)) {
        fail_msg("operation %llu: the next save failed too", (unsigned long long)at);
    }
    check(step, at);
    return true;
}

static int setup(void **state)
{
    int rc;

    if (access("/dev/shm", W_OK) == 0) {
        setenv("TMPDIR", "/dev/shm", 1);
    }
    rc = fixture_setup(state);
    sample_scale = 1;
    sample_dir_make(hits, NULL);
    snprintf(hit, sizeof(hit), "%s/disk-op", hits);
    return rc;
}

static int teardown(void **state)
{
    sample_dir_remove(hits);
    return fixture_teardown(state);
}

static void test_engine_lives_through_eio_at_any_operation(void **state)
{
    uint32_t failed = 0, tried = 0;
    uint64_t at;

    (void)state;
    for (step = 0; step < 3;) {
        assert_true(save(0));
    }
    for (at = 1; at < OPERATIONS_MAX && try(at, &failed); at += STRIDE) {
        tried++;
    }
    printf("%s: up to operation %llu, %u tried, %u saves failed\n", fixture_codec,
           (unsigned long long)at, tried, failed);
    assert_true(tried > 6 && at < OPERATIONS_MAX && failed > 4);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_engine_lives_through_eio_at_any_operation, setup,
                                        teardown),
    };

    fixture_codec = argc > 1 ? argv[1] : "none";
    sample_codec = fixture_codec;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
