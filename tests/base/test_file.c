/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

#include "base/file.h"

static char root[] = "/tmp/belay-file-XXXXXX";

static const char *under(const char *name)
{
    static char path[4096];
    assert_int_equal(bl_path_join(path, sizeof(path), root, name), 0);
    return path;
}

static int root_make(void **state)
{
    (void)state;
    return mkdtemp(root) == NULL ? -1 : 0;
}

static int root_remove(void **state)
{
    (void)state;
    return bl_rm_tree("/tmp", strrchr(root, '/') + 1, NULL);
}

static void test_file_comes_back_as_written_and_replaced(void **state)
{
    (void)state;
    char *data;
    size_t bytes;
    assert_int_equal(bl_file_write_atomic(under("a"), "one", 3, NULL), 0);
    assert_int_equal(bl_file_write_atomic(under("a"), "three", 5, NULL), 0);
    assert_int_equal(bl_file_read(under("a"), 5, &data, &bytes, NULL), 0);
    assert_int_equal(bytes, 5);
    assert_string_equal(data, "three");
    free(data);
    assert_int_equal(bl_file_write_atomic(under("empty"), "", 0, NULL), 0);
    assert_int_equal(bl_file_read(under("empty"), 0, &data, &bytes, NULL), 0);
    assert_int_equal(bytes, 0);
    free(data);
}

static void test_file_read_refuses_too_large_missing_and_not_a_file(void **state)
{
    (void)state;
    char *data;
    size_t bytes;
    struct bl_errmsg msg = {{0}};
    assert_int_equal(bl_file_write_atomic(under("big"), "123456", 6, NULL), 0);
    assert_int_equal(bl_file_read(under("big"), 5, &data, &bytes, &msg), BL_ELIMIT);
    assert_non_null(strstr(msg.text, "larger than 5 bytes"));
    assert_int_equal(bl_file_read(under("nowhere"), 5, &data, &bytes, &msg), -ENOENT);
    assert_non_null(strstr(msg.text, "nowhere: No such file"));
    assert_int_equal(bl_file_read(root, 5, &data, &bytes, &msg), -EISDIR);
    assert_int_equal(mkfifo(under("fifo"), 0600), 0);
    assert_int_equal(bl_file_read(under("fifo"), 5, &data, &bytes, &msg), -EINVAL);
}

static void test_file_read_takes_a_file_without_a_size(void **state)
{
    (void)state;
    char *data;
    size_t bytes;
    assert_int_equal(bl_file_read("/proc/self/status", 1 << 20, &data, &bytes, NULL), 0);
    assert_true(bytes > 100);
    assert_int_equal(strlen(data), bytes);
    free(data);
}

static void test_file_write_leaves_nothing_behind_when_it_fails(void **state)
{
    (void)state;
    struct bl_errmsg msg = {{0}};
    assert_int_equal(bl_mkdir_p(under("d/target"), NULL), 0);
    assert_int_equal(bl_file_write_atomic(under("d/target"), "x", 1, &msg), -EISDIR);
    assert_non_null(strstr(msg.text, "d/target: Is a directory"));
    assert_int_equal(rmdir(under("d/target")), 0);
    assert_int_equal(rmdir(under("d")), 0); /* only when no temporary file is left */
}

static void test_mkdir_makes_all_and_is_content_when_there(void **state)
{
    (void)state;
    struct stat st;
    assert_int_equal(bl_mkdir_p(under("x/y/z"), NULL), 0);
    assert_int_equal(bl_mkdir_p(under("x/y/z/"), NULL), 0);
    assert_int_equal(stat(under("x/y/z"), &st), 0);
    struct bl_errmsg msg = {{0}};
    assert_int_equal(bl_file_write_atomic(under("x/file"), "", 0, NULL), 0);
    assert_int_equal(bl_mkdir_p(under("x/file/z"), &msg), -ENOTDIR);
}

static void test_rm_tree_removes_all_but_follows_no_link(void **state)
{
    (void)state;
    struct stat st;
    assert_int_equal(bl_mkdir_p(under("keep"), NULL), 0);
    assert_int_equal(bl_file_write_atomic(under("keep/me"), "", 0, NULL), 0);
    assert_int_equal(bl_mkdir_p(under("gone/a/b"), NULL), 0);
    assert_int_equal(bl_file_write_atomic(under("gone/a/f"), "", 0, NULL), 0);
    char target[4096];
    snprintf(target, sizeof(target), "%s", under("keep"));
    assert_int_equal(symlink(target, under("gone/a/link")), 0);
    assert_int_equal(bl_rm_tree(root, "gone", NULL), 0);
    assert_int_equal(stat(under("gone"), &st), -1);
    assert_int_equal(stat(under("keep/me"), &st), 0);
    assert_int_equal(bl_rm_tree(root, "gone", NULL), 0);
}

static void test_rm_tree_refuses_to_leave_its_directory_and_too_deep(void **state)
{
    (void)state;
    assert_int_equal(bl_rm_tree(root, "..", NULL), -EINVAL);
    assert_int_equal(bl_rm_tree(root, ".", NULL), -EINVAL);
    assert_int_equal(bl_rm_tree(root, "", NULL), -EINVAL);
    assert_int_equal(bl_rm_tree(root, "a/b", NULL), -EINVAL);
    char path[512] = "deep";
    for (int i = 0; i < BL_RM_TREE_DEPTH_MAX + 1; i++) {
        strcat(path, "/d");
    }
    assert_int_equal(bl_mkdir_p(under(path), NULL), 0);
    assert_int_equal(bl_rm_tree(root, "deep", NULL), BL_ELIMIT);
    assert_int_equal(bl_rm_tree(under("deep"), "d", NULL), 0);
}

static void test_fd_reads_and_writes_go_through_a_small_nonblocking_pipe(void **state)
{
    (void)state;
    int fds[2];
    assert_int_equal(pipe2(fds, O_CLOEXEC | O_NONBLOCK), 0);
    pid_t pid = fork();
    static char data[1 << 20];
    if (pid == 0) {
        memset(data, 'x', sizeof(data));
        close(fds[0]);
        _exit(bl_fd_write_all(fds[1], data, sizeof(data)) == 0 ? 0 : 1);
    }
    close(fds[1]);
    assert_int_equal(bl_fd_read_all(fds[0], data, sizeof(data)), sizeof(data));
    assert_int_equal(data[sizeof(data) - 1], 'x');
    assert_int_equal(bl_fd_read_all(fds[0], data, 10), 0);
    close(fds[0]);
}

static void test_path_join_is_bounded(void **state)
{
    (void)state;
    char out[8];
    assert_int_equal(bl_path_join(out, sizeof(out), "/a", "b"), 0);
    assert_string_equal(out, "/a/b");
    assert_int_equal(bl_path_join(out, sizeof(out), "/a/", "b"), 0);
    assert_string_equal(out, "/a/b");
    assert_int_equal(bl_path_join(out, sizeof(out), "/a", "/b"), 0);
    assert_string_equal(out, "/b");
    assert_int_equal(bl_path_join(out, sizeof(out), "/abc", "def"), BL_ELIMIT);
}

static void test_dir_of_exe_is_where_the_test_lies(void **state)
{
    (void)state;
    char dir[4096];
    assert_int_equal(bl_dir_of_exe(dir, sizeof(dir)), 0);
    assert_int_equal(dir[0], '/');
    assert_int_equal(bl_dir_of_exe(dir, 3), BL_ELIMIT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_file_comes_back_as_written_and_replaced),
        cmocka_unit_test(test_file_read_refuses_too_large_missing_and_not_a_file),
        cmocka_unit_test(test_file_read_takes_a_file_without_a_size),
        cmocka_unit_test(test_file_write_leaves_nothing_behind_when_it_fails),
        cmocka_unit_test(test_mkdir_makes_all_and_is_content_when_there),
        cmocka_unit_test(test_rm_tree_removes_all_but_follows_no_link),
        cmocka_unit_test(test_rm_tree_refuses_to_leave_its_directory_and_too_deep),
        cmocka_unit_test(test_fd_reads_and_writes_go_through_a_small_nonblocking_pipe),
        cmocka_unit_test(test_path_join_is_bounded),
        cmocka_unit_test(test_dir_of_exe_is_where_the_test_lies),
    };
    return cmocka_run_group_tests(tests, root_make, root_remove);
}
