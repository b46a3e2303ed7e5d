/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two engines, each a process that writes its own part of one attempt; then one of them commits.
 * Either one is killed at every single operation of its part, and the committing one at every
 * single operation of the commit, after which the other takes the commit over.
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ckpt/store.h"
#include "tests/crash/scene.h"

#define OPERATIONS_MAX 500
#define WORLD          4u
#define ENGINES        2u
#define FIRST          4u /* steps saved before; the next has something to recycle */

static char root[256];
static struct ckpt_part *parts; /* ENGINES, shared with the children: what each engine reports */
static uint32_t attempts;
static uint64_t step; /* of the newest checkpoint */

static int setup(void **state)
{
    (void)state;
    sample_scale = 1;
    sample_dir_make(root, access("/dev/shm", W_OK) == 0 ? "/dev/shm" : NULL);
    parts = mmap(NULL, ENGINES * sizeof(*parts), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                 -1, 0);
    assert_true(parts != MAP_FAILED);
    attempts = 1;
    for (step = 1; step <= FIRST; step++) {
        assert_int_equal(scene_save(root, NULL, step, attempts, NULL, NULL), 0);
    }
    step = FIRST;
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    munmap(parts, ENGINES * sizeof(*parts));
    sample_dir_remove(root);
    return 0;
}

static struct ckpt_attempt next_attempt(void)
{
    attempts++;
    return (struct ckpt_attempt){step + 1, 1, attempts, 0xe2000000u + attempts};
}

static int open_engine(struct ckpt_store **ret, struct ckpt_io *io)
{
    return sample_open(ret, root, scene_io(io), NULL);
}

static int write_part(const struct ckpt_attempt *attempt, uint32_t engine, struct ckpt_io *io)
{
    struct ckpt_store *store = NULL;
    int rc = open_engine(&store, io);

    rc = rc < 0 ? rc : ckpt_attempt_begin(store, attempt, NULL);
    rc = rc < 0
             ? rc
             : sample_save_part(store, attempt, SAMPLE_FLAT, WORLD, engine, &parts[engine], NULL);
    ckpt_store_close(store);
    return rc;
}

static int commit(const struct ckpt_attempt *attempt, struct ckpt_io *io,
                  struct ckpt_commit_result *ret)
{
    struct ckpt_manifest manifest;
    struct ckpt_store *store = NULL;
    struct bl_errmsg why = {0};
    int rc = open_engine(&store, io);

    sample_manifest_init(&manifest, attempt, WORLD);
    memcpy(manifest.parts, parts, ENGINES * sizeof(*parts));
    rc = rc < 0 ? rc : ckpt_commit(store, attempt, &manifest, ret, &why);
    if (rc < 0) {
        fprintf(stderr, "commit: %s\n", why.text);
    }
    ckpt_manifest_close(&manifest);
    ckpt_store_close(store);
    return rc;
}

static void tidy(void)
{
    struct ckpt_store *store = NULL;
    struct bl_errmsg why = {0};
    char dir[CKPT_DIR_MAX];

    ckpt_dir_name(dir, step, 1);
    assert_int_equal(open_engine(&store, NULL), 0);
    if (scene_tidy(store, dir, &why) != 0) {
        fail_msg("%s", why.text);
    }
    ckpt_store_close(store);
    assert_int_equal(scene_attempts(root), 0); /* leftovers of dead engines are gone */
}

/* Runs an engine as a process; `at` of `doomed` is where it dies. */
static pid_t engine_start(const struct ckpt_attempt *attempt, uint32_t engine, uint64_t at)
{
    pid_t pid;

    fflush(NULL);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct ckpt_io_fault fault;

        ckpt_io_fault_init(&fault, at == 0 ? CKPT_FAULT_NONE : CKPT_FAULT_KILL, at, 0);
        _exit(write_part(attempt, engine, &fault.io) == 0 ? 0 : 1);
    }
    return pid;
}

/* True when it was killed. */
static bool engine_died(pid_t pid)
{
    int status = 0;

    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (WIFSIGNALED(status)) {
        assert_int_equal(WTERMSIG(status), SIGKILL);
        return true;
    }
    assert_int_equal(WEXITSTATUS(status), 0);
    return false;
}

/* Both engines at once; true when the doomed one died. */
static bool engines_run(const struct ckpt_attempt *attempt, uint32_t doomed, uint64_t at)
{
    pid_t pids[ENGINES];
    bool died = false;

    for (uint32_t e = 0; e < ENGINES; e++) {
        pids[e] = engine_start(attempt, e, e == doomed ? at : 0);
    }
    for (uint32_t e = 0; e < ENGINES; e++) {
        died = engine_died(pids[e]) || died;
    }
    return died;
}

static uint64_t newest_after(const char *who, uint64_t at)
{
    char what[64];

    snprintf(what, sizeof(what), "%s, operation %llu", who, (unsigned long long)at);
    return scene_newest(root, what);
}

static void enumerate_engine(uint32_t doomed)
{
    struct ckpt_commit_result result;
    uint64_t at;

    for (at = 1; at < OPERATIONS_MAX; at++) {
        struct ckpt_attempt attempt = next_attempt();
        bool died = engines_run(&attempt, doomed, at);

        assert_int_equal(newest_after("an engine died", at), step); /* nobody committed */
        if (died) { /* another engine is started, all write again */
            attempt = next_attempt();
            assert_false(engines_run(&attempt, doomed, 0));
        }
        assert_int_equal(commit(&attempt, NULL, &result), 0);
        step++;
        assert_int_equal(newest_after("committed", at), step);
        tidy();
        if (!died) {
            break;
        }
    }
    printf("engine %u: %llu operations\n", doomed, (unsigned long long)at - 1);
    assert_true(at > 10 && at < OPERATIONS_MAX);
}

static void test_engine_killed_anywhere_in_its_part_leaves_the_old_checkpoint(void **state)
{
    (void)state;
    for (uint32_t doomed = 0; doomed < ENGINES; doomed++) {
        enumerate_engine(doomed);
    }
}

/* A child commits and dies at `at`; true when it did. */
static bool commit_dies(const struct ckpt_attempt *attempt, enum ckpt_fault_kind kind, uint64_t at)
{
    pid_t pid;

    fflush(NULL);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct ckpt_commit_result result;
        struct ckpt_io_fault fault;

        ckpt_io_fault_init(&fault, kind, at, 0);
        _exit(commit(attempt, &fault.io, &result) == 0 ? 0 : 1);
    }
    return engine_died(pid);
}

/* `look_first`: a scan stands between the crash and the next commit, as after a restart. */
static void enumerate_commit(enum ckpt_fault_kind kind, bool look_first)
{
    uint64_t at, old_seen = 0;
    struct ckpt_commit_result result;

    for (at = 1; at < OPERATIONS_MAX; at++) {
        struct ckpt_attempt attempt = next_attempt();
        uint64_t newest = 0;
        bool died;

        assert_false(engines_run(&attempt, 0, 0));
        died = commit_dies(&attempt, kind, at);
        if (look_first) {
            newest = newest_after("the commit died", at);
            assert_true(newest == step || newest == step + 1);
            old_seen += newest == step;
        }
        if (commit(&attempt, NULL, &result) != 0) {
            fail_msg("the commit was cut at operation %llu and cannot be taken over",
                     (unsigned long long)at);
        }
        assert_true(newest != step + 1 || result.already);
        step++;
        assert_int_equal(newest_after("taken over", at), step);
        tidy();
        if (!died) {
            assert_true(result.already);
            break;
        }
    }
    printf("%llu operations, %llu times the old one\n", (unsigned long long)at - 1,
           (unsigned long long)old_seen);
    assert_true(at > 5 && at < OPERATIONS_MAX);
    assert_true(!look_first || old_seen > 2);
}

static void test_commit_killed_anywhere_is_taken_over_by_another_engine(void **state)
{
    (void)state;
    enumerate_commit(CKPT_FAULT_KILL, true);
    enumerate_commit(CKPT_FAULT_AFTER, true);
}

static void test_commit_killed_anywhere_is_taken_over_at_once(void **state)
{
    (void)state;
    enumerate_commit(CKPT_FAULT_KILL, false);
}

/* An engine that was given up as dead commits at the same moment as its successor. */
static void test_commit_of_two_engines_at_once_is_one_checkpoint(void **state)
{
    struct ckpt_commit_result result;
    pid_t pid;

    (void)state;
    for (uint32_t round = 0; round < 20; round++) {
        struct ckpt_attempt attempt = next_attempt();
        int rc;

        assert_false(engines_run(&attempt, 0, 0));
        fflush(NULL);
        pid = fork();
        assert_true(pid >= 0);
        if (pid == 0) {
            _exit(commit(&attempt, NULL, &result) == 0 ? 0 : 1);
        }
        rc = commit(&attempt, NULL, &result);
        assert_false(engine_died(pid));
        assert_int_equal(rc, 0);
        step++;
        assert_int_equal(newest_after("two commits, round", round), step);
        tidy();
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
        TEST(test_engine_killed_anywhere_in_its_part_leaves_the_old_checkpoint),
        TEST(test_commit_killed_anywhere_is_taken_over_by_another_engine),
        TEST(test_commit_killed_anywhere_is_taken_over_at_once),
        TEST(test_commit_of_two_engines_at_once_is_one_checkpoint),
    };

    if (!scene_has_codec(argc, argv)) {
        return 77;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
