/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cuda/arena.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"

void kern_arena_init(struct kern_arena *arena, uint64_t bytes)
{
    memset(arena, 0, sizeof *arena);
    arena->bytes = bytes / KERN_ARENA_ALIGN * KERN_ARENA_ALIGN;
}

void kern_arena_close(struct kern_arena *arena)
{
    free(arena->parts);
    memset(arena, 0, sizeof *arena);
}

static int make_room(struct kern_arena *arena)
{
    if (arena->count < arena->capacity) {
        return 0;
    }
    uint32_t capacity = arena->capacity == 0 ? 64 : 2 * arena->capacity;
    struct kern_arena_part *parts = realloc(arena->parts, capacity * sizeof *parts);
    if (parts == NULL) {
        return -ENOMEM;
    }
    arena->parts = parts;
    arena->capacity = capacity;
    return 0;
}

int kern_arena_take(struct kern_arena *arena, uint64_t bytes, uint64_t *ret_offset)
{
    uint64_t offset = 0;
    uint32_t at;
    bytes = bytes == 0 ? 1 : bytes;
    if (bytes > arena->bytes - arena->used) {
        return -ENOMEM;
    }
    bytes = (bytes + KERN_ARENA_ALIGN - 1) / KERN_ARENA_ALIGN * KERN_ARENA_ALIGN;
    for (at = 0; at < arena->count && arena->parts[at].offset - offset < bytes; at++) {
        offset = arena->parts[at].offset + arena->parts[at].bytes;
    }
    if (arena->bytes - offset < bytes || make_room(arena) != 0) {
        return -ENOMEM;
    }
    memmove(&arena->parts[at + 1], &arena->parts[at], (arena->count - at) * sizeof *arena->parts);
    arena->parts[at] = (struct kern_arena_part){offset, bytes};
    arena->count++;
    arena->used += bytes;
    arena->used_max = arena->used > arena->used_max ? arena->used : arena->used_max;
    *ret_offset = offset;
    return 0;
}

void kern_arena_give(struct kern_arena *arena, uint64_t offset)
{
    uint32_t at = 0;
    while (at < arena->count && arena->parts[at].offset != offset) {
        at++;
    }
    BL_ASSERT(at < arena->count);
    arena->used -= arena->parts[at].bytes;
    arena->count--;
    memmove(&arena->parts[at], &arena->parts[at + 1], (arena->count - at) * sizeof *arena->parts);
}
