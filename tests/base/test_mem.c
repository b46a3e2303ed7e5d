/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

#include "base/clock.h"
#include "base/mem.h"

static void test_mem_large_buffers_are_zero_and_huge_page_aligned(void **state)
{
    (void)state;
    const size_t sizes[] = {1, 4096, BL_HUGE_BYTES - 1, BL_HUGE_BYTES, 3 * BL_HUGE_BYTES + 1};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        unsigned char *memory = bl_mem_alloc(sizes[i]);
        assert_non_null(memory);
        assert_int_equal((uintptr_t)memory % (sizes[i] >= BL_HUGE_BYTES ? BL_HUGE_BYTES : 4096), 0);
        assert_int_equal(memory[0] | memory[sizes[i] - 1], 0);
        memset(memory, 1, sizes[i]);
        bl_mem_free(memory, sizes[i]);
    }
    assert_null(bl_mem_alloc(0));
    assert_null(bl_mem_alloc(SIZE_MAX - 5));
    bl_mem_free(NULL, 5);
}

static void test_memfd_is_sealed_allocated_and_shared(void **state)
{
    (void)state;
    int fd;
    assert_int_equal(bl_memfd_create("belay-test", 1 << 20, &fd, NULL), 0);
    struct stat st;
    assert_int_equal(fstat(fd, &st), 0);
    assert_int_equal(st.st_size, 1 << 20);
    assert_true(st.st_blocks * 512 >= 1 << 20);
    assert_int_equal(ftruncate(fd, 1 << 19), -1);
    assert_int_equal(errno, EPERM);
    assert_int_equal(ftruncate(fd, 1 << 21), -1);
    assert_int_equal(fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    size_t bytes;
    assert_int_equal(bl_memfd_check(fd, 1 << 20, &bytes, NULL), 0);
    assert_int_equal(bytes, 1 << 20);
    assert_int_equal(bl_memfd_check(fd, (1 << 20) + 1, &bytes, NULL), BL_EFORMAT);
    char *a = bl_mem_map(fd, bytes, 1);
    char *b = bl_mem_map(fd, bytes, 0);
    assert_non_null(a);
    assert_non_null(b);
    a[12345] = 'x';
    assert_int_equal(b[12345], 'x');
    bl_mem_free(a, bytes);
    bl_mem_free(b, bytes);
    close(fd);
}

static void test_memfd_refuses_odd_sizes_and_foreign_fds(void **state)
{
    (void)state;
    int fd = -1;
    size_t bytes;
    assert_int_equal(bl_memfd_create("belay-test", 1000, &fd, NULL), -EINVAL);
    assert_int_equal(bl_memfd_create("belay-test", 0, &fd, NULL), -EINVAL);
    int file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    assert_int_equal(bl_memfd_check(file, 1, &bytes, NULL), BL_EFORMAT);
    close(file);
}

static void test_random_words_differ(void **state)
{
    (void)state;
    unsigned char data[1000] = {0};
    bl_random_bytes(data, sizeof(data));
    int zeros = 0;
    for (size_t i = 0; i < sizeof(data); i++) {
        zeros += data[i] == 0;
    }
    assert_true(zeros < 100);
    assert_true(bl_random_u64() != bl_random_u64());
}

static void test_clock_goes_forward_and_prints_utc(void **state)
{
    (void)state;
    uint64_t a = bl_now_ns();
    assert_true(bl_now_ns() >= a);
    assert_true(bl_boot_ns() > 0);
    assert_true(bl_wall_ms() > 1700000000000ULL);
    char text[BL_CLOCK_TEXT_BYTES];
    bl_wall_format(1769903999123ULL, text);
    assert_string_equal(text, "2026-01-31T23:59:59.123Z");
}

static void test_time_scale_multiplies_and_ignores_nonsense(void **state)
{
    (void)state;
    unsetenv("BELAY_TIME_SCALE");
    assert_int_equal(bl_time_scaled_ms(500), 500);
    setenv("BELAY_TIME_SCALE", "2.5", 1);
    assert_int_equal(bl_time_scaled_ms(500), 1250);
    setenv("BELAY_TIME_SCALE", "0.0001", 1);
    assert_int_equal(bl_time_scaled_ms(500), 1);
    assert_int_equal(bl_time_scaled_ms(0), 0);
    setenv("BELAY_TIME_SCALE", "fast", 1);
    assert_int_equal(bl_time_scaled_ms(500), 500);
    setenv("BELAY_TIME_SCALE", "-1", 1);
    assert_int_equal(bl_time_scaled_ms(500), 500);
    unsetenv("BELAY_TIME_SCALE");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mem_large_buffers_are_zero_and_huge_page_aligned),
        cmocka_unit_test(test_memfd_is_sealed_allocated_and_shared),
        cmocka_unit_test(test_memfd_refuses_odd_sizes_and_foreign_fds),
        cmocka_unit_test(test_random_words_differ),
        cmocka_unit_test(test_clock_goes_forward_and_prints_utc),
        cmocka_unit_test(test_time_scale_multiplies_and_ignores_nonsense),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
