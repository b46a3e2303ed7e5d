/* SPDX-License-Identifier: Apache-2.0 */
/* The transfer queue by itself: its rate, its memory, and what it does when little may be locked.
 */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

#include "base/clock.h"
#include "ckpt/queue.h"

#define NOBODY 65534
#define SKIP   77

static int file_open(void)
{
    const char *temp = getenv("TMPDIR");
    char path[256];
    int fd;

    snprintf(path, sizeof(path), "%s/belay-queue-XXXXXX", temp == NULL ? "/tmp" : temp);
    fd = mkstemp(path);
    assert_true(fd >= 0);
    unlink(path);
    return fd;
}

/* Writes `count` buffers of `bytes`, each filled with its number. 0, or what failed. */
static int buffers_write(struct ckpt_queue *queue, int fd, uint32_t count, uint32_t bytes)
{
    int rc = 0;

    for (uint32_t i = 0; rc == 0 && i < count; i++) {
        uint32_t slot;
        void *data;

        rc = ckpt_queue_take(queue, &slot, &data);
        if (rc == 0) {
            memset(data, (int)i, bytes);
            rc = ckpt_queue_write(queue, slot, fd, bytes, (uint64_t)i * bytes);
        }
    }
    return rc == 0 ? ckpt_queue_drain(queue, NULL) : rc;
}

static void test_queue_keeps_its_rate(void **state)
{
    struct ckpt_io io = *ckpt_io_real();
    struct ckpt_queue *queue = NULL;
    struct ckpt_queue_info info;
    uint64_t from;
    int fd = file_open();

    (void)state;
    io.rate_max = 4 << 20;
    assert_int_equal(ckpt_queue_new(&queue, &io, NULL), 0);
    from = bl_now_ns();
    assert_int_equal(buffers_write(queue, fd, 5, 256 << 10), 0);
    /* The first goes at once, the others wait for the one before them: 4 x 62.5 ms. */
    assert_true(bl_now_ns() - from >= 249000000u);
    ckpt_queue_info(queue, &info);
    assert_true(info.held_us > 0);
    ckpt_queue_free(queue);
    close(fd);
}

static void test_queue_stops_waiting_for_its_rate_when_cancelled(void **state)
{
    atomic_int cancel = 1;
    struct ckpt_io io = *ckpt_io_real();
    struct ckpt_queue *queue = NULL;
    uint64_t from = bl_now_ns();
    int fd = file_open();

    (void)state;
    io.rate_max = 1; /* 48 days for what follows */
    io.cancel = &cancel;
    assert_int_equal(ckpt_queue_new(&queue, &io, NULL), 0);
    assert_int_equal(buffers_write(queue, fd, 2, CKPT_QUEUE_BYTES), 0);
    assert_true(bl_now_ns() - from < 60000000000u);
    ckpt_queue_free(queue);
    close(fd);
}

static long resident_bytes(void)
{
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "re");

    assert_non_null(file);
    assert_int_equal(fscanf(file, "%*s %ld", &pages), 1);
    fclose(file);
    return pages * sysconf(_SC_PAGESIZE);
}

static void test_queue_takes_memory_only_as_it_is_used(void **state)
{
    struct ckpt_io io = *ckpt_io_real();
    struct ckpt_queue *queue = NULL;
    long before = resident_bytes();
    int fd = file_open();

    (void)state;
    io.queue_depth = CKPT_QUEUE_DEPTH_MAX;
    assert_int_equal(ckpt_queue_new(&queue, &io, NULL), 0);
    assert_int_equal(buffers_write(queue, fd, 1, 4096), 0);
    assert_true(resident_bytes() - before < 8l * CKPT_QUEUE_BYTES);
    ckpt_queue_free(queue);
    close(fd);
}

/* In a process of its own, that may lock one buffer and a bit. Its exit status. */
static int little_locked(int fd)
{
    const struct rlimit limit = {CKPT_QUEUE_BYTES * 3 / 2, CKPT_QUEUE_BYTES * 3 / 2};
    struct ckpt_io io = *ckpt_io_real();
    struct ckpt_queue *queue = NULL;
    struct ckpt_queue_info info;
    static uint8_t back[CKPT_QUEUE_BYTES];
    int code = 0;

    if (setrlimit(RLIMIT_MEMLOCK, &limit) < 0 || (geteuid() == 0 && setuid(NOBODY) < 0)) {
        return SKIP;
    }
    if (ckpt_queue_new(&queue, &io, NULL) < 0 ||
        buffers_write(queue, fd, 12, CKPT_QUEUE_BYTES) < 0) {
        return 1;
    }
    ckpt_queue_info(queue, &info);
    ckpt_queue_free(queue);
    if (info.path != CKPT_IO_URING) {
        return SKIP;
    }
    if (info.registered || strstr(info.note, "RLIMIT_MEMLOCK") == NULL) {
        fprintf(stderr, "registered %d, note '%s'\n", info.registered, info.note);
        return 2;
    }
    for (uint32_t i = 0; i < 12 && code == 0; i++) {
        code =
            pread(fd, back, sizeof(back), (off_t)i * CKPT_QUEUE_BYTES) != (ssize_t)sizeof(back) ||
                    back[0] != i || back[sizeof(back) - 1] != i
                ? 3
                : 0;
    }
    return code;
}

static void test_queue_writes_all_when_only_one_buffer_can_be_locked(void **state)
{
    int fd = file_open(), status = 0;
    pid_t child = fork();

    (void)state;
    assert_true(child >= 0);
    if (child == 0) {
        _exit(little_locked(fd));
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    close(fd);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == SKIP) {
        print_message("skipped: no io_uring here, or no other user to be\n");
        skip();
    }
    assert_int_equal(WEXITSTATUS(status), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_queue_keeps_its_rate),
        cmocka_unit_test(test_queue_stops_waiting_for_its_rate_when_cancelled),
        cmocka_unit_test(test_queue_takes_memory_only_as_it_is_used),
        cmocka_unit_test(test_queue_writes_all_when_only_one_buffer_can_be_locked),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
