/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/core/effects.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"

void *core_alloc(size_t count, size_t size)
{
    void *items = calloc(count ? count : 1, size);
    BL_ASSERT(items);
    return items;
}

void *core_grow(void *items, size_t count, size_t size)
{
    /* Full exactly when the count is 0 or a power of two from 8 up. */
    if (count != 0 && (count < 8 || (count & (count - 1)) != 0)) {
        return items;
    }
    size_t capacity = count == 0 ? 8 : count * 2;
    void *grown = realloc(items, capacity * size);
    BL_ASSERT(grown);
    return grown;
}

void core_ring_init(struct core_ring *ring, size_t size)
{
    memset(ring, 0, sizeof(*ring));
    ring->size = size;
}

void core_ring_close(struct core_ring *ring)
{
    free(ring->items);
    memset(ring, 0, sizeof(*ring));
}

void *core_ring_push(struct core_ring *ring)
{
    if (ring->count == ring->capacity) {
        size_t capacity = ring->capacity ? ring->capacity * 2 : 16;
        unsigned char *grown = core_alloc(capacity, ring->size);
        for (size_t i = 0; i < ring->count; i++) {
            memcpy(grown + i * ring->size,
                   ring->items + (ring->first + i) % ring->capacity * ring->size, ring->size);
        }
        free(ring->items);
        ring->items = grown;
        ring->capacity = capacity;
        ring->first = 0;
    }
    void *item = ring->items + (ring->first + ring->count) % ring->capacity * ring->size;
    ring->count++;
    memset(item, 0, ring->size);
    return item;
}

int core_ring_pop(struct core_ring *ring, void *ret)
{
    if (ring->count == 0) {
        return 0;
    }
    memcpy(ret, ring->items + ring->first * ring->size, ring->size);
    ring->first = (ring->first + 1) % ring->capacity;
    ring->count--;
    return 1;
}
