/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A growing ring of fixed-size effects, and the memory rule of the machines: out of memory asserts.
 */
#ifndef CORE_EFFECTS_H
#define CORE_EFFECTS_H

#include <stddef.h>
#include <stdint.h>

struct core_ring {
    unsigned char *items; /* owned */
    size_t size;          /* of one item */
    size_t first, count, capacity;
};

void core_ring_init(struct core_ring *ring, size_t size);
void core_ring_close(struct core_ring *ring);
/* The new last item, zeroed; valid until the next push. */
void *core_ring_push(struct core_ring *ring);
/* 1 and the first item, which is taken out, or 0. */
int core_ring_pop(struct core_ring *ring, void *ret);

/* calloc and realloc that assert. */
void *core_alloc(size_t count, size_t size);
/* `items` with room for one more of `size` bytes behind `count`: capacity is a function of count.
 */
void *core_grow(void *items, size_t count, size_t size);

#endif
