/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Arenas: memfds made here, written by ranks, kept when their rank is dead. Within the job's budget
 * of node memory.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "daemon/daemon.h"

struct arena *arena_find(struct run *run, uint64_t id)
{
    for (uint32_t i = 0; i < run->arena_count; i++) {
        if (run->arenas[i].id == id) {
            return &run->arenas[i];
        }
    }
    return NULL;
}

uint64_t arena_bytes_used(const struct run *run)
{
    uint64_t sum = 0;

    for (uint32_t i = 0; i < run->arena_count; i++) {
        sum += run->arenas[i].bytes;
    }
    return sum;
}

uint32_t arena_count_of(const struct run *run, uint64_t incarnation)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < run->arena_count; i++) {
        count += run->arenas[i].incarnation == incarnation;
    }
    return count;
}

static int arena_add(struct run *run, uint64_t incarnation, uint64_t id, int fd, uint64_t bytes,
                     struct arena **ret, struct bl_errmsg *msg)
{
    if (run->arena_count == DAEMON_ARENAS_MAX) {
        return bl_err_code(msg, BL_ELIMIT, "%d arenas are held already", DAEMON_ARENAS_MAX);
    }
    void *map = bl_mem_map(fd, bytes, 0);

    if (!map) {
        return bl_err_code(msg, -errno, "map an arena of %llu bytes", (unsigned long long)bytes);
    }
    struct arena *arena = &run->arenas[run->arena_count++];

    memset(arena, 0, sizeof(*arena));
    arena->id = id;
    arena->incarnation = incarnation;
    arena->bytes = bytes;
    arena->fd = fd;
    arena->map = map;
    *ret = arena;
    return 0;
}

int arena_make(struct run *run, uint64_t incarnation, uint64_t bytes, struct arena **ret,
               struct bl_errmsg *msg)
{
    uint64_t budget = run->job->snapshot_bytes_max, used = arena_bytes_used(run);
    int fd;

    if (budget > 0 && (bytes > budget || used > budget - bytes)) {
        return bl_err(msg, BL_ELIMIT,
                      "snapshot slots need %llu MiB, %llu MiB of %llu MiB are in use on this node: "
                      "raise snapshot.bytes_max or run fewer ranks here",
                      (unsigned long long)(bytes >> 20), (unsigned long long)(used >> 20),
                      (unsigned long long)(budget >> 20));
    }
    int rc = bl_memfd_create("belay-arena", bytes, &fd, msg);

    if (rc == 0) {
        rc = arena_add(run, incarnation, bl_random_u64(), fd, bytes, ret, msg);
        if (rc != 0) {
            close(fd);
        }
    }
    return rc;
}

int arena_adopt(struct run *run, uint64_t incarnation, uint64_t id, int fd, struct bl_errmsg *msg)
{
    struct arena *arena;
    size_t bytes;
    int rc = arena_find(run, id) ? -EEXIST : bl_memfd_check(fd, 1, &bytes, msg);

    if (rc == 0) {
        rc = arena_add(run, incarnation, id, fd, bytes, &arena, msg);
    }
    if (rc == 0) {
        arena->is_kept = 1;
    } else {
        close(fd);
    }
    return rc == -EEXIST ? 0 : rc;
}

void arena_drop(struct run *run, uint64_t id)
{
    struct arena *arena = arena_find(run, id);

    if (!arena) {
        return;
    }
    if (arena->is_kept) {
        proc_drop(run, arena->incarnation, id);
    }
    bl_mem_free(arena->map, arena->bytes);
    close(arena->fd);
    bl_extent_list_close(&arena->info.extents);
    *arena = run->arenas[--run->arena_count];
}

int arena_read(struct arena *arena, struct wire_arena_info *ret)
{
    const struct wire_arena_header *header = arena->map;

    if (!arena->has_info) {
        if (wire_arena_read(&arena->info, arena->map, arena->bytes, NULL) != 0) {
            return 0; /* not formatted yet */
        }
        arena->has_info = 1;
    } else {
        for (uint32_t i = 0; i < arena->info.slot_count; i++) {
            wire_slot_read(&header->slots[i], &arena->info.slots[i]);
        }
    }
    *ret = arena->info;
    ret->arena = arena->id;
    memset(&ret->extents, 0, sizeof(ret->extents));
    return bl_extent_list_copy(&ret->extents, &arena->info.extents) == 0;
}
