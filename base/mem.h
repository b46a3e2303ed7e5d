/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Large memory and randomness. Callable from any thread.
 */
#ifndef BL_BASE_MEM_H
#define BL_BASE_MEM_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

#define BL_HUGE_BYTES (2UL * 1024 * 1024)

/* `bytes` rounded up to a multiple of `align` (a power of two). Overflow stops the process. */
size_t bl_round_up(size_t bytes, size_t align);

/* Zeroed anonymous memory of `bytes` (at least 1), page-aligned; from 2 MiB on aligned to 2 MiB and
 * advised for huge pages. Owned: bl_mem_free with the same `bytes`. NULL when there is none. */
void *bl_mem_alloc(size_t bytes);
void bl_mem_free(void *memory, size_t bytes);

/* A memfd of `bytes` (a multiple of the page size), preallocated so that a later store cannot raise
 * SIGBUS for want of memory, and sealed against shrinking and growing. `name` shows in /proc. Owned
 * fd in *ret_fd, O_CLOEXEC. Returns -errno. */
BL_MUST_CHECK int bl_memfd_create(const char *name, size_t bytes, int *ret_fd,
                                  struct bl_errmsg *msg);

/* Checks that an fd that came from elsewhere is a memfd of at least `bytes_min` that can neither
 * shrink nor grow: mapping it is safe. Its size in *ret_bytes. BL_EFORMAT otherwise. */
BL_MUST_CHECK int bl_memfd_check(int fd, size_t bytes_min, size_t *ret_bytes,
                                 struct bl_errmsg *msg);

/* Maps `bytes` of `fd` from its start, shared; `writable` 0 or 1. Unmap by bl_mem_free. NULL and
 * errno on failure. */
void *bl_mem_map(int fd, size_t bytes, int writable);

/* Random bytes from the kernel. Never fails; waits only until the pool is ready after a boot. */
void bl_random_bytes(void *data, size_t bytes);
uint64_t bl_random_u64(void);

#endif
