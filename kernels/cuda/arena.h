/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who has which part of one range of device memory that was taken at once. Numbers only: it never
 * touches the memory.
 *
 *     0        256     512                            bytes
 *     [ used  ][ gap  ][ used          ][ free ......  ]
 *
 * First fit, in the order of offsets, so the same calls give the same places in every run.
 */
#ifndef KERN_KERNELS_CUDA_ARENA_H
#define KERN_KERNELS_CUDA_ARENA_H

#include <stdint.h>

#define KERN_ARENA_ALIGN 256U /* what CUDA's own allocations have, and vector loads want */

struct kern_arena_part {
    uint64_t offset, bytes; /* both multiples of KERN_ARENA_ALIGN */
};

struct kern_arena {
    uint64_t bytes;                /* in all */
    uint64_t used;                 /* of these, with what rounding adds */
    uint64_t used_max;             /* the most that it ever was */
    struct kern_arena_part *parts; /* owned; ascending */
    uint32_t count, capacity;
};

void kern_arena_init(struct kern_arena *arena, uint64_t bytes);
void kern_arena_close(struct kern_arena *arena);
/* The first gap that holds `bytes` (0: as for 1). -ENOMEM: none does, or no host memory. */
int kern_arena_take(struct kern_arena *arena, uint64_t bytes, uint64_t *ret_offset);
/* A part that was taken; another offset is a broken invariant. */
void kern_arena_give(struct kern_arena *arena, uint64_t offset);

#endif
