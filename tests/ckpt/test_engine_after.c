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
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "tests/ckpt/test_engine_fixture.h"
#include "wire/slot.h"

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
        fixture_expect_verified(&verified, step, 0);
        assert_true(verified.attempt == fixture_attempt(step).attempt);
        assert_string_equal(verified.dir, committed.dir);
        assert_true(verified.bytes > 800000);
        assert_int_equal(verified.removed, step > 20 ? 1 : 0);
        snprintf(path, sizeof(path), "%s/%s/verified", fixture.root, committed.dir);
        assert_int_equal(access(path, F_OK), 0);
    }
    assert_int_equal(fixture_scan_count(&newest), 2);
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
    fixture_expect_verified(&verified, 30, 0);
    assert_int_equal(verified.removed, 0);
    fixture_expect_verified(&verified, 20, 0);
    assert_int_equal(verified.removed, 1);
    assert_int_equal(fixture_scan_count(&newest), 2);
}

static void test_engine_remembers_over_a_restart_what_was_read_back(void **state)
{
    struct wire_engine_committed committed;
    struct wire_engine_verified verified;
    uint64_t newest;

    (void)state;
    fixture_save(10, 1, &committed);
    fixture_expect_verified(&verified, 10, 0);
    fixture_save(20, 1, &committed);
    fixture_expect_verified(&verified, 20, 0);
    fixture_restart();
    fixture_save(30, 0, &committed);
    fixture_expect_verified(&verified, 30, 0); /* 20 need not be read again */
    assert_int_equal(verified.removed, 1);
    assert_int_equal(fixture_scan_count(&newest), 2);
}

static void test_engine_keeps_the_pace_of_its_root(void **state)
{
    struct wire_engine_committed committed;
    struct wire_engine_verified verified;
    struct wire_engine_written written;
    struct wire_engine_write write_message;
    struct fixture_parts parts;
    struct wire_engine_commit message;
    struct fixture_arena arena;
    uint64_t bytes;

    (void)state;
    sample_scale = 400; /* several transfers a part; the first of a file is never held back */
    fixture_parts_write(&parts, 10, 10);
    bytes = parts.written[0].bytes + parts.written[1].bytes;
    message = fixture_commit_of(&parts, 10);
    message.verify = 1;
    message.root.rate_max = bytes * 2;
    fixture_ask(WIRE_TYPE_ENGINE_COMMIT, &message, NULL, 0, WIRE_TYPE_ENGINE_COMMITTED, &committed);
    fixture_parts_close(&parts);
    assert_int_equal(committed.rc, 0);
    fixture_expect_verified(&verified, 10, 0);
    assert_in_range(verified.elapsed_ms, 200, FIXTURE_WAIT_MS); /* half a second at most is due */
    fixture_arena_make(&arena, 10, 1, 0, 20, 20);
    fixture_write_fill(&write_message, "n0", 20, &arena, 1);
    write_message.root.rate_max = bytes * 2;
    fixture_ask(WIRE_TYPE_ENGINE_WRITE, &write_message, &arena.fd, 1, WIRE_TYPE_ENGINE_WRITTEN,
                &written);
    assert_int_equal(written.rc, 0);
    assert_in_range(written.elapsed_ms, 200, FIXTURE_WAIT_MS);
    wire_engine_written_free(&written);
    fixture_arena_close(&arena);
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
    fixture_expect_verified(&verified, 10, 0);
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
    fixture_expect_verified(&verified, 10, 0);
    fixture_save(20, 1, &committed);
    fixture_expect_verified(&verified, 20, 0);
    fixture_save(30, 1, &committed); /* its reading begins 300 ms later */
    flip_byte(committed.dir, "part-n1.safetensors", 100000);
    fixture_expect_verified(&verified, 30, BL_EDIGEST);
    assert_non_null(strstr(verified.text, "part-n1.safetensors"));
    assert_non_null(strstr(verified.text, "tensor"));
    assert_int_equal(verified.removed, 0);
    snprintf(path, sizeof(path), "%s/%s/verified", fixture.root, committed.dir);
    assert_int_equal(access(path, F_OK), -1);
    assert_int_equal(fixture_scan_count(&newest), 3); /* it protects nobody: 10 and 20 stay */
    fixture_save(40, 1, &committed);
    fixture_expect_verified(&verified, 40, 0); /* 40 and 20 are enough */
    assert_int_equal(verified.removed, 1);
    assert_int_equal(fixture_scan_count(&newest), 3);
}

static int setup_first_late(void **state)
{
    (void)state;
    return fixture_setup_failing("verify-begin:delay_500:1");
}

static void test_engine_takes_the_newest_first_when_commits_wait(void **state)
{
    struct wire_engine_committed committed;
    struct wire_engine_verified verified;
    struct fixture_parts parts[4];
    uint64_t newest, before = UINT64_MAX;
    uint32_t removed = 0, seen = 0;

    (void)state;
    for (uint32_t i = 0; i < 4; i++) {
        fixture_parts_write(&parts[i], 10 + 10 * i, 10 + 10 * i);
    }
    for (uint32_t i = 0; i < 4; i++) { /* all at once; the first reading begins late */
        struct wire_engine_commit message = fixture_commit_of(&parts[i], 10 + 10 * i);

        message.verify = 1;
        fixture_send(WIRE_TYPE_ENGINE_COMMIT, &message, NULL, 0);
    }
    for (uint32_t i = 0; i < 4; i++) {
        fixture_expect(WIRE_TYPE_ENGINE_COMMITTED, &committed);
        assert_int_equal(committed.rc, 0);
        fixture_parts_close(&parts[i]);
    }
    /* The first is the one whose reading had begun; what waited then comes newest first. */
    for (uint32_t i = 0; seen != 3; i++) {
        fixture_expect(WIRE_TYPE_ENGINE_VERIFIED, &verified);
        assert_int_equal(verified.rc, 0);
        assert_true(verified.attempt == fixture_attempt(verified.step).attempt);
        assert_true(verified.step < before);
        before = i == 0 ? UINT64_MAX : verified.step;
        seen |= verified.step == 40 ? 1 : verified.step == 30 ? 2 : 0;
        removed += verified.removed;
    }
    assert_int_equal(removed, 2);
    assert_int_equal(fixture_scan_count(&newest),
                     2); /* and nothing is said of those that are gone */
    fixture_save(50, 1, &committed);
    fixture_expect_verified(&verified, 50, 0);
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

/* ---- memory ---- */

static void test_engine_refuses_to_start_where_memory_is_short(void **state)
{
    char path[1024], text[512] = "";
    int ends[2], pipes[2], status = 0;
    ssize_t bytes = 0, more;
    pid_t pid;

    (void)state;
    snprintf(path, sizeof(path), "%s/belay-engine", getenv("BELAY_BUILD"));
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    assert_int_equal(pipe(pipes), 0);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        dup2(ends[1], 3);
        dup2(pipes[1], 2);
        execl(path, path, "--memory", "1000000000", (char *)NULL);
        _exit(127);
    }
    close(ends[1]);
    close(pipes[1]);
    while ((more = read(pipes[0], text + bytes, sizeof(text) - 1 - (size_t)bytes)) > 0) {
        bytes += more;
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 3);
    if (strstr(text, "needs 1000000000 MiB of memory (save 96, verify 64, load ") == NULL ||
        strstr(text, "are available") == NULL) {
        fail_msg("%s", text);
    }
    close(ends[0]);
    close(pipes[0]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define WITH(name, setup) cmocka_unit_test_setup_teardown(name, setup, fixture_teardown)
        WITH(test_engine_reads_back_and_then_lets_older_ones_go, fixture_setup),
        WITH(test_engine_reads_back_what_retention_waits_for, fixture_setup),
        WITH(test_engine_remembers_over_a_restart_what_was_read_back, fixture_setup),
        WITH(test_engine_keeps_the_pace_of_its_root, fixture_setup),
        cmocka_unit_test(test_engine_refuses_to_start_where_memory_is_short),
        WITH(test_engine_threads_are_kind_to_the_ranks, fixture_setup),
#ifdef BELAY_FAILPOINTS
        WITH(test_engine_gives_saves_precedence_over_reading_back, setup_slow_second),
        WITH(test_engine_takes_the_newest_first_when_commits_wait, setup_first_late),
        WITH(test_engine_removes_nothing_for_a_damaged_one, setup_late_reading),
        WITH(test_engine_leaves_in_the_middle_of_reading_back, setup_leaving),
#endif
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
