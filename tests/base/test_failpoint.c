/* SPDX-License-Identifier: Apache-2.0 */
/* Each case forks: failpoints are read once per process and mostly end it. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

#include "base/clock.h"
#include "base/failpoint.h"
#include "base/file.h"

#define SURVIVED 40 /* the child's exit code: plus the number of -EIO it saw */

static int run(const char *fail, const char *rank, const char *once_dir, int hits)
{
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct rlimit none = {0, 0};
        setrlimit(RLIMIT_CORE, &none);
        setenv("BELAY_FAIL", fail, 1);
        unsetenv("BELAY_RANK");
        unsetenv("BELAY_FAIL_ONCE_DIR");
        if (rank != NULL) {
            setenv("BELAY_RANK", rank, 1);
        }
        if (once_dir != NULL) {
            setenv("BELAY_FAIL_ONCE_DIR", once_dir, 1);
        }
        int errors = 0;
        for (int i = 0; i < hits; i++) {
            errors += bl_failpoint_hit("mid-apply") == -EIO;
            errors += bl_failpoint_hit("other") != 0;
        }
        _exit(SURVIVED + errors);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, WUNTRACED), pid);
    if (WIFSTOPPED(status)) {
        kill(pid, SIGKILL);
        int last;
        assert_int_equal(waitpid(pid, &last, 0), pid);
    }
    return status;
}

static int exited(int status)
{
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void test_failpoint_does_nothing_without_the_environment(void **state)
{
    (void)state;
    assert_int_equal(exited(run("", NULL, NULL, 5)), SURVIVED);
}

static void test_failpoint_acts_at_the_counted_hit_only(void **state)
{
    (void)state;
    assert_int_equal(exited(run("mid-apply:error:3", NULL, NULL, 2)), SURVIVED);
    assert_int_equal(exited(run("mid-apply:error:3", NULL, NULL, 9)), SURVIVED + 1);
    assert_int_equal(exited(run("mid-apply:error:1,mid-apply:error:4", NULL, NULL, 9)),
                     SURVIVED + 2);
}

static void test_failpoint_acts_at_each_hit_when_the_count_is_zero(void **state)
{
    (void)state;
    assert_int_equal(exited(run("mid-apply:error:0", NULL, "/nowhere", 5)), SURVIVED + 5);
}

static void test_failpoint_kills_stops_crashes_and_exits(void **state)
{
    (void)state;
    int status = run("mid-apply:kill:2", NULL, NULL, 5);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    status = run("x:exit:1,mid-apply:segv:1", NULL, NULL, 5);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    status = run("mid-apply:stop:1", NULL, NULL, 5);
    assert_true(WIFSTOPPED(status) && WSTOPSIG(status) == SIGSTOP);
    assert_int_equal(exited(run("mid-apply:exit:1", NULL, NULL, 5)), 1);
    assert_int_equal(exited(run("mid-apply:exit_0:1", NULL, NULL, 5)), 0);
}

static void test_failpoint_delays(void **state)
{
    (void)state;
    uint64_t start = bl_now_ns();
    assert_int_equal(exited(run("mid-apply:delay_50:1", NULL, NULL, 2)), SURVIVED);
    assert_true(bl_now_ns() - start >= 50000000ULL);
}

static void test_failpoint_acts_only_in_the_rank_it_names(void **state)
{
    (void)state;
    assert_int_equal(exited(run("mid-apply@2:error:1", "1", NULL, 2)), SURVIVED);
    assert_int_equal(exited(run("mid-apply@2:error:1", "2", NULL, 2)), SURVIVED + 1);
    assert_int_equal(exited(run("mid-apply@2:error:1", NULL, NULL, 2)), SURVIVED);
}

static void test_failpoint_acts_once_over_all_processes_with_markers(void **state)
{
    (void)state;
    char dir[] = "/tmp/belay-fail-XXXXXX";
    assert_non_null(mkdtemp(dir));
    int status = run("mid-apply@1:kill:1", "1", dir, 2);
    assert_true(WIFSIGNALED(status));
    char path[64];
    snprintf(path, sizeof(path), "%s/mid-apply@1", dir);
    assert_int_equal(access(path, F_OK), 0);
    assert_int_equal(exited(run("mid-apply@1:kill:1", "1", dir, 2)), SURVIVED);
    assert_int_equal(bl_rm_tree("/tmp", dir + 5, NULL), 0);
}

static void test_failpoint_refuses_what_it_cannot_read(void **state)
{
    (void)state;
    const char *bad[] = {"mid-apply",        "mid-apply:kill",   "mid-apply:kill:-1",
                         "mid-apply:kill:x", "mid-apply:burn:1", "mid-apply:kill:1:2",
                         "a/b:kill:1",       "x:delay_:1",       "x:delay_-5:1",
                         "x:exit_256:1"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(exited(run(bad[i], NULL, NULL, 1)), 2);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_failpoint_does_nothing_without_the_environment),
        cmocka_unit_test(test_failpoint_acts_at_the_counted_hit_only),
        cmocka_unit_test(test_failpoint_acts_at_each_hit_when_the_count_is_zero),
        cmocka_unit_test(test_failpoint_kills_stops_crashes_and_exits),
        cmocka_unit_test(test_failpoint_delays),
        cmocka_unit_test(test_failpoint_acts_only_in_the_rank_it_names),
        cmocka_unit_test(test_failpoint_acts_once_over_all_processes_with_markers),
        cmocka_unit_test(test_failpoint_refuses_what_it_cannot_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
