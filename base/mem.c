/* SPDX-License-Identifier: Apache-2.0 */
#include "base/mem.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

static size_t page_bytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

size_t bl_round_up(size_t bytes, size_t align)
{
    BL_ASSERT(align != 0 && (align & (align - 1)) == 0 && bytes <= SIZE_MAX - align);
    return (bytes + align - 1) & ~(align - 1);
}

/* Maps more than is needed and gives the ends back, so that the rest begins on a huge page. */
static void *mem_map_aligned(size_t bytes)
{
    size_t spare = bytes + BL_HUGE_BYTES;
    char *whole = mmap(NULL, spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (whole == MAP_FAILED) {
        return NULL;
    }
    char *start = (char *)bl_round_up((size_t)whole, BL_HUGE_BYTES);
    size_t before = (size_t)(start - whole);
    size_t after = spare - before - bytes;
    if (before > 0) {
        munmap(whole, before);
    }
    if (after > 0) {
        munmap(start + bytes, after);
    }
    madvise(start, bytes, MADV_HUGEPAGE); /* advice: slower without, never wrong */
    return start;
}

void *bl_mem_alloc(size_t bytes)
{
    if (bytes == 0 || bytes > SIZE_MAX / 2) {
        return NULL;
    }
    bytes = bl_round_up(bytes, page_bytes());
    if (bytes >= BL_HUGE_BYTES) {
        return mem_map_aligned(bytes);
    }
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

void bl_mem_free(void *memory, size_t bytes)
{
    if (memory != NULL) {
        int rc = munmap(memory, bl_round_up(bytes, page_bytes()));
        BL_ASSERT(rc == 0);
    }
}

int bl_memfd_create(const char *name, size_t bytes, int *ret_fd, struct bl_errmsg *msg)
{
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) {
        int rc = -errno;
        return bl_err_code(msg, rc, "memfd %s", name);
    }
    int rc = 0;
    if (bytes == 0 || bytes > INT64_MAX || bytes % page_bytes() != 0) {
        rc = -EINVAL;
    } else if (ftruncate(fd, (off_t)bytes) < 0) {
        rc = -errno;
    } else {
        do {
            rc = fallocate(fd, 0, 0, (off_t)bytes) < 0 ? -errno : 0;
        } while (rc == -EINTR);
    }
    if (rc == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0) {
        rc = -errno;
    }
    if (rc < 0) {
        close(fd);
        return bl_err_code(msg, rc, "memfd %s of %zu bytes", name, bytes);
    }
    *ret_fd = fd;
    return 0;
}

int bl_memfd_check(int fd, size_t bytes_min, size_t *ret_bytes, struct bl_errmsg *msg)
{
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || fstat(fd, &st) < 0) {
        return bl_err_code(msg, BL_EFORMAT, "fd %d is no memfd", fd);
    }
    if ((seals & F_SEAL_SHRINK) == 0 || (seals & F_SEAL_GROW) == 0) {
        return bl_err_code(msg, BL_EFORMAT, "memfd is not sealed against shrinking and growing");
    }
    if (st.st_size < 0 || (size_t)st.st_size < bytes_min) {
        return bl_err_code(msg, BL_EFORMAT, "memfd has %lld bytes, wanted %zu",
                           (long long)st.st_size, bytes_min);
    }
    *ret_bytes = (size_t)st.st_size;
    return 0;
}

void *bl_mem_map(int fd, size_t bytes, int writable)
{
    int prot = PROT_READ | (writable ? PROT_WRITE : 0);
    void *memory = mmap(NULL, bytes, prot, MAP_SHARED, fd, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

void bl_random_bytes(void *data, size_t bytes)
{
    unsigned char *at = data;
    while (bytes > 0) {
        ssize_t n = getrandom(at, bytes < 256 ? bytes : 256, 0);
        if (n < 0) {
            BL_ASSERT(errno == EINTR);
            continue;
        }
        at += n;
        bytes -= (size_t)n;
    }
}

uint64_t bl_random_u64(void)
{
    uint64_t word;
    bl_random_bytes(&word, sizeof(word));
    return word;
}
