/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ranks' arenas that a part is written from: mapped, looked at before the bytes are read and
 * again after. What a write picks out of them (an extent that other nodes hold too) is planned as
 * copies and pulled by the part's writer, straight from the arenas.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "engine/engine.h"
#include "wire/slot.h"

struct engine_mapped_arena {
    void *map;
    size_t bytes;
    struct wire_arena_info info;
};

struct engine_pick {            /* what is written, and where it is copied from */
    struct bl_extent_list list; /* owned; offsets in a buffer that is never there: see plan */
    struct bl_plan plan;        /* owned; runs by dst_offset */
    const struct engine_mapped *mapped;
};

static int arena_is_sealed(const struct wire_arena_info *info,
                           const struct wire_engine_arena *arena,
                           const struct wire_engine_attempt *attempt, struct bl_errmsg *msg)
{
    const struct wire_slot_info *slot;

    if (info->arena != arena->arena || arena->slot >= info->slot_count) {
        return bl_err(msg, BL_EPROTO, "arena %016llx: the descriptor is of arena %016llx",
                      (unsigned long long)arena->arena, (unsigned long long)info->arena);
    }
    slot = &info->slots[arena->slot];
    if (slot->state != WIRE_SLOT_SEALED || slot->step != attempt->step ||
        slot->line != attempt->line) {
        return bl_err(msg, BL_ENOSTATE,
                      "arena %016llx, slot %u: holds line %llu, step %llu%s, not line %llu, step "
                      "%llu",
                      (unsigned long long)arena->arena, arena->slot, (unsigned long long)slot->line,
                      (unsigned long long)slot->step,
                      slot->state == WIRE_SLOT_SEALED ? "" : " (not sealed)",
                      (unsigned long long)attempt->line, (unsigned long long)attempt->step);
    }
    return 0;
}

/* Do all extents lie inside `bytes` from the slot's start? */
static int extents_fit(const struct bl_extent_list *list, uint64_t bytes, struct bl_errmsg *msg)
{
    for (uint32_t i = 0; i < list->extent_count; i++) {
        const struct bl_extent *extent = &list->extents[i];
        uint64_t size = 0;

        if (extent->tensor >= list->tensor_count ||
            bl_extent_check(extent, &list->tensors[extent->tensor], NULL) < 0 ||
            __builtin_mul_overflow(bl_extent_elems(extent),
                                   bl_dtype_bytes(list->tensors[extent->tensor].dtype), &size) ||
            size > bytes || extent->offset > bytes - size) {
            return bl_err(msg, BL_EPROTO, "extent %u lies outside its slot", i);
        }
    }
    return 0;
}

static int arena_map(struct engine_mapped_arena *ret, const struct engine_arena *arena,
                     const struct wire_engine_attempt *attempt, struct ckpt_source *source,
                     struct bl_errmsg *msg)
{
    uint64_t offset = 0;
    int rc = bl_memfd_check(arena->fd, 4096, &ret->bytes, msg);

    if (rc < 0) {
        return rc;
    }
    ret->map = bl_mem_map(arena->fd, ret->bytes, 0);
    if (ret->map == NULL) {
        return bl_err_code(msg, -ENOMEM, "map of arena %016llx",
                           (unsigned long long)arena->arena.arena);
    }
    rc = wire_arena_read(&ret->info, ret->map, ret->bytes, msg);
    if (rc == 0) {
        rc = arena_is_sealed(&ret->info, &arena->arena, attempt, msg);
    }
    rc =
        rc < 0 ? rc : wire_arena_slot_offset(ret->map, ret->bytes, arena->arena.slot, &offset, msg);
    rc = rc < 0 ? rc : extents_fit(&ret->info.extents, ret->bytes - offset, msg);
    if (rc == 0) {
        *source = (struct ckpt_source){.list = &ret->info.extents,
                                       .base = (const uint8_t *)ret->map + offset};
    }
    return rc;
}

/* ---- what is picked ---- */

static int run_order(const void *a_, const void *b_)
{
    const struct bl_run *a = a_, *b = b_;

    return a->dst_offset < b->dst_offset ? -1 : a->dst_offset > b->dst_offset;
}

/* Elements of a picked extent: the runs that lie in its bytes. */
static int pick_fetch(void *arg, uint32_t extent_index, uint64_t lo, uint64_t hi, void *dest,
                      struct bl_errmsg *msg)
{
    const struct engine_pick *pick = arg;
    const struct bl_extent *extent = &pick->list.extents[extent_index];
    uint64_t each = bl_dtype_bytes(pick->list.tensors[extent->tensor].dtype);
    uint64_t at = extent->offset + lo * each, end = extent->offset + hi * each;
    size_t first = 0, last = pick->plan.run_count;

    while (first < last) { /* the first run that does not end at or before `at` */
        size_t middle = first + (last - first) / 2;
        const struct bl_run *run = &pick->plan.runs[middle];

        if (run->dst_offset + run->bytes <= at) {
            first = middle + 1;
        } else {
            last = middle;
        }
    }
    for (size_t i = first; i < pick->plan.run_count && at < end; i++) {
        const struct bl_run *run = &pick->plan.runs[i];
        const uint8_t *from = pick->mapped->bases[run->src].base;
        uint64_t skip = at - run->dst_offset, bytes = run->bytes - skip;

        if (run->dst_offset > at) {
            break;
        }
        bytes = bytes < end - at ? bytes : end - at;
        memcpy(dest, from + run->src_offset + skip, (size_t)bytes);
        dest = (uint8_t *)dest + bytes;
        at += bytes;
    }
    return at == end ? 0 : bl_err(msg, BL_ENOSTATE, "is not whole in the arenas");
}

/* Plans the picked extents out of all arenas: one source, that pulls. */
static int pick_make(struct engine_mapped *mapped, const struct bl_extent_list *wanted,
                     struct bl_errmsg *msg)
{
    const struct bl_extent_list **lists = calloc(mapped->count + 1u, sizeof(*lists));
    struct engine_pick *pick = mapped->pick = calloc(1, sizeof(*pick));
    uint64_t offset = 0;
    int rc = lists == NULL || pick == NULL ? -ENOMEM : bl_extent_list_copy(&pick->list, wanted);

    if (rc < 0) {
        free(lists);
        return bl_err_code(msg, rc, "plan of a part");
    }
    pick->mapped = mapped;
    rc = extents_fit(&pick->list, UINT64_MAX, msg);
    for (uint32_t i = 0; rc == 0 && i < pick->list.extent_count; i++) {
        struct bl_extent *extent = &pick->list.extents[i];

        extent->offset = offset;
        offset +=
            bl_extent_elems(extent) * bl_dtype_bytes(pick->list.tensors[extent->tensor].dtype);
    }
    for (uint32_t i = 0; i < mapped->count; i++) {
        lists[i] = mapped->bases[i].list;
    }
    rc = rc < 0 ? rc : bl_plan_make(&pick->plan, &pick->list, lists, mapped->count, msg);
    free(lists);
    if (rc == 0 && pick->plan.missing_elems > 0) {
        rc = bl_err(msg, BL_ENOSTATE, "tensor %s is not whole in the arenas",
                    pick->plan.missing_name);
    }
    if (rc == 0 && pick->plan.run_count > 0) {
        qsort(pick->plan.runs, pick->plan.run_count, sizeof(*pick->plan.runs), run_order);
    }
    mapped->picked = (struct ckpt_source){.list = &pick->list, .fetch = pick_fetch, .arg = pick};
    mapped->sources = &mapped->picked;
    mapped->source_count = 1;
    return rc;
}

/* ---- all of a write ---- */

static int key_order(const void *a_, const void *b_)
{
    const uint64_t *a = a_, *b = b_;

    return *a < *b ? -1 : *a > *b;
}

/* Does some extent lie in two arenas? It is written once, so their digests do not add up. */
static int find_repeats(struct engine_mapped *mapped, struct bl_errmsg *msg)
{
    size_t count = 0, filled = 0;
    uint64_t *keys;

    for (uint32_t i = 0; i < mapped->count; i++) {
        count += mapped->bases[i].list->extent_count;
    }
    keys = calloc(count + 1, sizeof(*keys));
    if (keys == NULL) {
        return bl_err_code(msg, -ENOMEM, "%zu extents", count);
    }
    for (uint32_t i = 0; i < mapped->count; i++) {
        const struct bl_extent_list *list = mapped->bases[i].list;

        for (uint32_t k = 0; k < list->extent_count; k++) {
            const struct bl_extent *extent = &list->extents[k];

            if (bl_extent_elems(extent) > 0) {
                keys[filled++] = engine_extent_key(extent, &list->tensors[extent->tensor]);
            }
        }
    }
    qsort(keys, filled, sizeof(*keys), key_order);
    for (size_t i = 1; i < filled; i++) {
        mapped->repeats = mapped->repeats || keys[i] == keys[i - 1];
    }
    free(keys);
    return 0;
}

int engine_mapped_open(struct engine_mapped *ret, const struct engine_task *task,
                       struct bl_errmsg *msg)
{
    const struct wire_engine_write *message = task->message;
    int rc = 0;

    memset(ret, 0, sizeof(*ret));
    ret->arenas = calloc(task->arena_count + 1u, sizeof(*ret->arenas));
    ret->bases = calloc(task->arena_count + 1u, sizeof(*ret->bases));
    if (ret->arenas == NULL || ret->bases == NULL) {
        return bl_err_code(msg, -ENOMEM, "%u arenas", task->arena_count);
    }
    for (uint32_t i = 0; rc == 0 && i < task->arena_count; i++) {
        const struct engine_arena *arena = &task->arenas[i];

        ret->count = i + 1;
        rc = arena_map(&ret->arenas[i], arena, &message->attempt, &ret->bases[i], msg);
        if (rc == 0) {
            bl_state_digest_merge(&ret->expect,
                                  &ret->arenas[i].info.slots[arena->arena.slot].digest);
        }
    }
    ret->sources = ret->bases;
    ret->source_count = ret->count;
    if (rc == 0 && message->pick.extent_count > 0) {
        return pick_make(ret, &message->pick, msg);
    }
    return rc < 0 ? rc : find_repeats(ret, msg);
}

int engine_mapped_recheck(const struct engine_mapped *mapped, const struct engine_task *task,
                          struct bl_errmsg *msg)
{
    const struct wire_engine_write *message = task->message;
    int rc = 0;

    for (uint32_t i = 0; rc == 0 && i < mapped->count; i++) {
        struct wire_arena_info info = {0};

        rc = wire_arena_read(&info, mapped->arenas[i].map, mapped->arenas[i].bytes, msg);
        if (rc == 0) {
            rc = arena_is_sealed(&info, &task->arenas[i].arena, &message->attempt, msg);
            bl_extent_list_close(&info.extents);
        }
    }
    return rc < 0 ? bl_err_in(msg, rc, "changed while it was saved") : 0;
}

void engine_mapped_close(struct engine_mapped *mapped)
{
    if (mapped->pick != NULL) {
        bl_extent_list_close(&mapped->pick->list);
        bl_plan_close(&mapped->pick->plan);
        free(mapped->pick);
    }
    for (uint32_t i = 0; i < mapped->count; i++) {
        bl_extent_list_close(&mapped->arenas[i].info.extents);
        if (mapped->arenas[i].map != NULL) {
            bl_mem_free(mapped->arenas[i].map, mapped->arenas[i].bytes);
        }
    }
    free(mapped->arenas);
    free(mapped->bases);
    memset(mapped, 0, sizeof(*mapped));
}
