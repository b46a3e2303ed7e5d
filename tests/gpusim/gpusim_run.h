/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How grids run on the CPU: what kernel code calls while it is a thread of a block.
 *
 * Threads of a block are started one after the other in one fibre; a thread that has to wait (a
 * barrier, an exchange in its warp) keeps that fibre, and another fibre goes on starting threads.
 * So a kernel without barriers is a plain loop.
 *
 *     GPUSIM_SEED=n   another order of blocks, of threads and of who goes on first behind a
 *                     barrier; 0: ascending. gpusim_seed sets it too.
 *
 * What no kernel may do ends the process by abort, with one line that names kernel, block and
 * thread: a barrier that not all threads of the block reach, a warp operation that a lane of its
 * mask does not take part in, threads that wait for each other for ever, writing beyond the dynamic
 * shared memory.
 */
#ifndef GPUSIM_GPUSIM_RUN_H
#define GPUSIM_GPUSIM_RUN_H

#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

#define GPUSIM_THREADS_MAX    1024u
#define GPUSIM_SHARED_DEFAULT 49152u  /* bytes of a block without cudaFuncSetAttribute */
#define GPUSIM_SHARED_MAX     232448u /* with it: 227 KiB */

/* A launch: kernel, shape, and how to call it with its copied arguments. */
struct gpusim_grid {
    const char *name; /* as written in the launch */
    const void *kernel;
    uint32_t blocks[3], threads[3];
    size_t shared_bytes;
    void (*call)(void *arg);
    void *arg; /* malloc'ed; freed when it has run */
};

/* A thread that runs or waits. */
struct gpusim_thread {
    uint3 thread;   /* threadIdx */
    uint32_t index; /* in the block */
    uint32_t lane;  /* of its warp */
};

extern struct gpusim_thread *gpusim_now;
extern uint3 gpusim_block_index;
extern dim3 gpusim_block_size, gpusim_grid_size;

/* From a launch: errors come out of cudaGetLastError. Takes grid->arg. */
void gpusim_grid_submit(const struct gpusim_grid *grid, cudaStream_t stream);

/* ---- of threads of a block; line: in the source of the kernel ---- */

void gpusim_block_sync(int line);
void gpusim_warp_sync(uint32_t mask, int line);
/* `got` becomes the `value` of lane `source`, which must be in `mask`. */
void gpusim_warp_read(uint32_t mask, const void *value, size_t bytes, int source, void *got,
                      int line);
void gpusim_exchange(const void *mine, size_t bytes, void *all, int line);
uint32_t gpusim_ballot(uint32_t mask, bool predicate, int line);
unsigned char *gpusim_shared_dynamic(void);
[[noreturn]] void gpusim_fail(const char *what);

#endif
