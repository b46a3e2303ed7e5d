/* SPDX-License-Identifier: Apache-2.0 */
/* Signs of life of an engine: of this process and a child, and of devices made up in files. */
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
#include "daemon/engine_life.h"

static char dir[64], mounts[128];

static void write_text(const char *path, const char *text)
{
    FILE *file = fopen(path, "we");

    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

/* /sys/dev/block/NAME/stat as a kernel writes it, with these sectors read and written. */
static void device_make(const char *name, unsigned in, unsigned out)
{
    char path[256], text[256];

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    mkdir(path, 0755);
    snprintf(path, sizeof(path), "%s/%s/stat", dir, name);
    snprintf(text, sizeof(text), "  5  6  %u  7  8  9  %u  10  0  11  12  0 0 0 0\n", in, out);
    write_text(path, text);
}

static int setup(void **state)
{
    (void)state;
    strcpy(dir, "/tmp/belay-life-XXXXXX");
    assert_non_null(mkdtemp(dir));
    snprintf(mounts, sizeof(mounts), "%s/mountinfo", dir);
    write_text(mounts, "21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/a rw\n"
                       "22 21 0:5 / /proc rw - proc proc rw\n"
                       "23 21 8:2 / /data rw - xfs /dev/b rw\n"
                       "24 23 8:3 /sub /data/fast rw - ext4 /dev/c rw\n"
                       "25 21 0:40 / /nfs rw - nfs4 host:/x rw\n"
                       "26 21 8:4 / /twice rw - ext4 /dev/d rw\n"
                       "27 21 8:5 / /twice rw - ext4 /dev/e rw\n");
    device_make("8:1", 100, 1);
    device_make("8:2", 200, 2);
    device_make("8:3", 300, 3);
    device_make("8:5", 500, 5);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    return bl_rm_tree("/tmp", dir + 5, NULL);
}

static void test_sectors_are_those_of_the_device_below_a_path(void **state)
{
    (void)state;
    assert_int_equal(engine_life_sectors("/home/x", mounts, dir), 101);
    assert_int_equal(engine_life_sectors("/data", mounts, dir), 202);
    assert_int_equal(engine_life_sectors("/data/slow", mounts, dir), 202);
    assert_int_equal(engine_life_sectors("/data/fast", mounts, dir), 303);
    assert_int_equal(engine_life_sectors("/data/fast/root", mounts, dir), 303);
    assert_int_equal(engine_life_sectors("/data/faster/root", mounts, dir), 202);
    assert_int_equal(engine_life_sectors("/twice/root", mounts, dir), 505); /* the last hides it */
    assert_int_equal(engine_life_sectors("/nfs/root", mounts, dir), 0);     /* no device */
    assert_int_equal(engine_life_sectors("relative", mounts, dir), 0);
    assert_int_equal(engine_life_sectors("/x", "/nowhere", dir), 0);
}

static void test_own_counters_move_when_something_is_read(void **state)
{
    uint64_t before = engine_life_io((uint32_t)getpid());
    char text[64];
    FILE *file = fopen(mounts, "re");

    (void)state;
    assert_non_null(file);
    assert_true(fread(text, 1, sizeof(text), file) == sizeof(text));
    fclose(file);
    assert_true(engine_life_io((uint32_t)getpid()) > before);
    assert_int_equal(engine_life_io(UINT32_MAX), 0);
    assert_int_equal(engine_life_cpu_ticks(UINT32_MAX), 0);
}

/* A parent in vfork waits in state D for its child, which looks at it: a wait in the kernel that
 * every machine has. */
static void test_wait_in_the_kernel_is_seen(void **state)
{
    uint32_t us = (uint32_t)getpid();
    volatile int waits = 0;
    pid_t child;

    (void)state;
    assert_false(engine_life_waits(us));
    child = vfork(); /* NOLINT: a wait in state D is what this is about */
    if (child == 0) {
        waits = engine_life_waits(us);
        _exit(0);
    }
    assert_true(child > 0);
    assert_true(waits);
    assert_false(engine_life_waits(UINT32_MAX));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_sectors_are_those_of_the_device_below_a_path, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_own_counters_move_when_something_is_read, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_wait_in_the_kernel_is_seen, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
