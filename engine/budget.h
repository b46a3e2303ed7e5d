/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the engine may take of the node: memory, processor, disk. Training comes first.
 */
#ifndef ENGINE_BUDGET_H
#define ENGINE_BUDGET_H

#include <stdint.h>

#include "base/error.h"

/*
 * Memory, in three shares that can be in use at once; descriptions of the state (some 300 bytes an
 * extent) come on top. The ranks' arenas are theirs, and only mapped here. What --memory gives
 * beyond the first two is for loads.
 */
#define ENGINE_SAVE_BYTES       (96ull << 20) /* transfer buffers, chunks being compressed */
#define ENGINE_VERIFY_BYTES     (64ull << 20) /* transfer buffers, a chunk being decompressed */
#define ENGINE_LOAD_BYTES       (256ull << 20)
#define ENGINE_LOAD_BYTES_MIN   (64ull << 20)
#define ENGINE_MEMORY_BYTES     (ENGINE_SAVE_BYTES + ENGINE_VERIFY_BYTES + ENGINE_LOAD_BYTES)
#define ENGINE_MEMORY_BYTES_MIN (ENGINE_SAVE_BYTES + ENGINE_VERIFY_BYTES + ENGINE_LOAD_BYTES_MIN)

/* What loads may take of `memory_bytes`. */
static inline uint64_t engine_load_bytes(uint64_t memory_bytes)
{
    return memory_bytes - ENGINE_SAVE_BYTES - ENGINE_VERIFY_BYTES;
}

/* Processor: 0 is what the ranks have. */
#define ENGINE_NICE_WRITER   10
#define ENGINE_NICE_VERIFIER 19

/* Does the node have `bytes` to give, now? BL_ELIMIT with the sum in the text when it does not; 0
 * also where the system does not tell. */
BL_MUST_CHECK int engine_budget_check(uint64_t bytes, struct bl_errmsg *msg);

/* Linux gives each session of processes an equal share of the processor (sched_autogroup), and nice
 * counts only inside one; the ranks have sessions of their own. So this gives the process a session
 * whose share is `nice`'s. What the system refuses is let be. */
void engine_process_kind(int nice);

/* Makes the calling thread as kind as `nice` says; idle: its transfers wait for all others'. What
 * the system refuses is let be. */
void engine_thread_kind(int nice, int idle);

#endif
