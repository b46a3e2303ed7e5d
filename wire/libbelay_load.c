/* SPDX-License-Identifier: Apache-2.0 */
/* belay.h: the layout of a rank's state, and filling it as the plan says. */
#include "wire/libbelay.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/failpoint.h"
#include "base/mem.h"

void lb_arena_close(struct lb_arena *arena)
{
    if (arena->map) {
        bl_mem_free(arena->map, arena->bytes);
    }
    if (arena->fd >= 0) {
        close(arena->fd);
    }
    bl_extent_list_close(&arena->list);
    memset(arena, 0, sizeof(*arena));
    arena->fd = -1;
}

/* ---- naming the layout ---- */

#define DESC_BYTES_FIRST offsetof(struct belay_tensor_desc, box_lo) /* before there were boxes */

/* The extent that a trainer describes, checked against its tensor. */
static int extent_of_desc(struct bl_extent *ret, const struct belay_tensor_desc *desc,
                          const struct bl_tensor *tensor, uint32_t index, struct bl_errmsg *msg)
{
    int boxed = 0;
    bl_extent_whole(ret, tensor, index, desc->flat_lo, desc->flat_hi);
    for (uint32_t d = 0; desc->size >= sizeof(*desc) && d < tensor->dims; d++) {
        boxed |= desc->box_hi[d] != 0;
    }
    for (uint32_t d = 0; boxed && d < tensor->dims; d++) {
        ret->lo[d] = desc->box_lo[d];
        ret->hi[d] = desc->box_hi[d];
    }
    return bl_extent_check(ret, tensor, msg);
}

static int wanted_add(struct belay *b, const struct bl_tensor *tensor,
                      const struct belay_tensor_desc *desc, void *ptr, uint64_t *ret_offset)
{
    struct bl_extent extent;
    uint32_t index;
    int rc = bl_extent_list_tensor(&b->wanted, tensor, &index, &b->error);
    if (!rc) {
        rc = extent_of_desc(&extent, desc, tensor, index, &b->error);
    }
    if (rc) {
        return rc;
    }
    extent.offset = b->wanted_bytes;
    struct lb_wanted *grown =
        realloc(b->wanted_at, (b->wanted.extent_count + 1u) * sizeof(*b->wanted_at));
    if (!grown || bl_extent_list_add(&b->wanted, &extent)) {
        b->wanted_at = grown ? grown : b->wanted_at;
        return bl_err(&b->error, -ENOMEM, "out of memory for extent %u", b->wanted.extent_count);
    }
    b->wanted_at = grown;
    b->wanted_at[b->wanted.extent_count - 1].ptr = ptr;
    b->wanted_bytes =
        bl_round_up(extent.offset + bl_extent_elems(&extent) * bl_dtype_bytes(tensor->dtype),
                    LB_SLOT_OFFSET_ALIGN);
    *ret_offset = extent.offset;
    return 0;
}

int belay_tensor(struct belay *job, struct belay_tensor_desc *desc, void *ptr)
{
    if (job->wanted_new) {
        bl_extent_list_close(&job->wanted);
        memset(&job->wanted, 0, sizeof(job->wanted));
        job->wanted_bytes = 0;
        job->wanted_new = 0;
    }
    if (desc->size < DESC_BYTES_FIRST) {
        return bl_err(&job->error, -EINVAL, "a tensor's description of %u bytes: at least %zu",
                      desc->size, DESC_BYTES_FIRST);
    }
    if (!desc->name || strlen(desc->name) >= BL_TENSOR_NAME_MAX || !*desc->name) {
        return bl_err(&job->error, -EINVAL, "a tensor's name has 1 to %d bytes",
                      BL_TENSOR_NAME_MAX - 1);
    }
    if (desc->dims > BL_TENSOR_DIMS_MAX || !bl_dtype_bytes((enum bl_dtype)desc->dtype) ||
        desc->kind < BL_KIND_PARAM || desc->kind > BL_KIND_OTHER) {
        return bl_err(&job->error, -EINVAL, "tensor %s: kind %u, dtype %u, %u dimensions",
                      desc->name, desc->kind, desc->dtype, desc->dims);
    }
    struct bl_tensor tensor = {
        .kind = (enum bl_tensor_kind)desc->kind,
        .dtype = (enum bl_dtype)desc->dtype,
        .dims = desc->dims,
    };
    memcpy(tensor.name, desc->name, strlen(desc->name));
    memcpy(tensor.shape, desc->shape, desc->dims * sizeof(desc->shape[0]));
    return wanted_add(job, &tensor, desc, ptr, &desc->slot_offset);
}

/* ---- the arena ---- */

static int arena_map(struct lb_arena *ret, const struct belay *b, const struct wire_arena *answer,
                     int fd, struct bl_errmsg *msg)
{
    *ret = (struct lb_arena){.id = answer->arena, .fd = fd};
    size_t bytes = 0;
    int rc = bl_memfd_check(fd, answer->bytes, &bytes, msg);
    if (!rc) {
        ret->bytes = bytes;
        ret->map = bl_mem_map(fd, bytes, 1);
        rc = ret->map ? 0 : bl_err_code(msg, -errno, "map an arena of %zu bytes", bytes);
    }
    if (!rc) {
        rc = bl_extent_list_copy(&ret->list, &b->wanted);
    }
    if (!rc) {
        rc = wire_arena_format(ret->map, bytes, b->run, b->incarnation, ret->id, b->slot_count,
                               &ret->list, msg);
    }
    if (rc) {
        lb_arena_close(ret);
    }
    return rc;
}

static void session_tell(struct belay *b, const struct lb_arena *arena)
{
    struct wire_arena_header *header = arena->map;
    pthread_mutex_lock(&b->lock);
    wire_session_arena_set(b->session, arena->id, header->slots, header->slot_count);
    lb_pump(b);
    pthread_mutex_unlock(&b->lock);
}

/* The arena for the layout named: the present one when it fits, else a new one. The old one is
 * unmapped here; the daemon keeps it as long as the leader wants it. */
static int arena_ready(struct belay *b, struct bl_errmsg *msg)
{
    if (b->arena.map && !b->arena_dirty && bl_extent_list_equal(&b->arena.list, &b->wanted)) {
        session_tell(b, &b->arena);
        return 0;
    }
    if (b->plan.slots > b->slot_count && b->plan.slots <= WIRE_SLOTS_MAX) {
        b->slot_count = b->plan.slots; /* one for each root's save */
    }
    struct wire_arena_make make = {
        .slot_count = b->slot_count,
        .state_bytes = wire_arena_state_bytes(&b->wanted),
        .extents = b->wanted,
    };
    struct wire_arena answer;
    int fd = -1;
    int rc = lb_link_ask(b, WIRE_TYPE_ARENA_MAKE, &make, WIRE_TYPE_ARENA, &answer, &fd, msg);
    if (rc) {
        return rc;
    }
    struct lb_arena arena;
    rc = arena_map(&arena, b, &answer, fd, msg);
    if (rc) {
        pthread_mutex_lock(&b->lock);
        lb_link_drop(b, answer.arena);
        pthread_mutex_unlock(&b->lock);
        return bl_err_in(msg, rc, "the daemon's arena");
    }
    session_tell(b, &arena);
    lb_arena_close(&b->arena);
    b->arena = arena;
    b->arena_dirty = 0;
    return 0;
}

/* ---- filling ---- */

static int plan_make(struct bl_plan *ret, const struct belay *b, const struct lb_sources *sources,
                     struct bl_errmsg *msg)
{
    const struct bl_extent_list **lists = calloc(sources->count + 1u, sizeof(*lists));
    if (!lists) {
        return bl_err(msg, -ENOMEM, "out of memory for %u sources", sources->count);
    }
    for (uint32_t i = 0; i < sources->count; i++) {
        lists[i] = &sources->items[i].list;
    }
    int rc = bl_plan_make(ret, &b->wanted, lists, sources->count, msg);
    free(lists);
    return rc;
}

/* Opens sources, nearest first, until nothing is missing. */
static int plan_complete(struct belay *b, struct lb_sources *sources, struct bl_plan *ret,
                         struct bl_errmsg *msg)
{
    int rc = lb_sources_open(b, sources, 0, msg);
    if (!rc) {
        rc = plan_make(ret, b, sources, msg);
    }
    for (int batch = 8; !rc && ret->missing_elems; batch *= 2) {
        uint32_t before = sources->count;
        rc = lb_sources_open(b, sources, batch, msg);
        if (rc || sources->count == before) {
            break;
        }
        bl_plan_close(ret);
        rc = plan_make(ret, b, sources, msg);
    }
    return rc;
}

static int disk_load(struct belay *b, uint32_t slot, struct bl_errmsg *msg)
{
    struct wire_disk_load load = {.arena = b->arena.id, .slot = slot, .extents = b->wanted};
    memcpy(load.root, b->plan.disk_root, sizeof(load.root));
    memcpy(load.dir, b->plan.disk_dir, sizeof(load.dir));
    struct wire_disk_loaded answer;
    int rc = lb_link_ask(b, WIRE_TYPE_DISK_LOAD, &load, WIRE_TYPE_DISK_LOADED, &answer, NULL, msg);
    if (rc) {
        b->arena_dirty = 1; /* an engine may be writing there still */
        return rc == BL_EGEN || strstr(msg->text, load.dir)
                   ? rc
                   : bl_err_in(msg, rc, "%s/%s", load.root, load.dir);
    }
    return 0;
}

static int copy_runs(struct belay *b, const struct lb_sources *sources, const struct bl_plan *plan,
                     void *dst, struct bl_errmsg *msg)
{
    int rc = 0;
    for (size_t i = 0; !rc && i < plan->run_count; i++) {
        if (i == plan->run_count / 2 && BL_FAILPOINT("mid-copy")) {
            return bl_err(msg, -EIO, "failpoint mid-copy");
        }
        rc = lb_source_copy(b, &sources->items[plan->runs[i].src], &plan->runs[i], dst, msg);
    }
    return rc;
}

/* Fills a new slot from memory, or where that does not hold all, from disk. */
static int slot_fill(struct belay *b, uint64_t step, struct bl_state_digest *ret_digest,
                     struct bl_errmsg *msg)
{
    struct lb_sources sources = {0};
    struct bl_plan plan = {0};
    uint32_t slot = 0;
    int rc = plan_complete(b, &sources, &plan, msg);
    int disk = !rc && plan.missing_elems;
    if (disk && !*b->plan.disk_root) {
        rc = bl_err(msg, BL_ENOSTATE, "no copy of %llu elements of step %llu (%s and more)",
                    (unsigned long long)plan.missing_elems, (unsigned long long)step,
                    plan.missing_name);
    }
    if (!rc) {
        pthread_mutex_lock(&b->lock);
        rc = wire_session_slot_begin(b->session, step, &slot);
        pthread_mutex_unlock(&b->lock);
    }
    if (!rc) {
        void *dst = wire_arena_slot(b->arena.map, slot);
        rc = disk ? disk_load(b, slot, msg) : copy_runs(b, &sources, &plan, dst, msg);
        if (!rc) {
            bl_extent_list_digest(&b->wanted, dst, ret_digest);
            pthread_mutex_lock(&b->lock);
            rc = wire_session_sealed(b->session, step, ret_digest);
            lb_pump(b);
            pthread_mutex_unlock(&b->lock);
        }
    }
    bl_plan_close(&plan);
    lb_sources_close(&sources);
    return rc;
}

/* The slot of the plan's step may be in our own arena, from before: then only its digest is
 * checked. */
static int slot_ready(struct belay *b, uint64_t step, struct bl_state_digest *ret_digest,
                      struct bl_errmsg *msg)
{
    pthread_mutex_lock(&b->lock);
    int index = wire_session_slot_find(b->session, step);
    pthread_mutex_unlock(&b->lock);
    if (BL_FAILPOINT("mid-load")) {
        return bl_err(msg, -EIO, "failpoint mid-load");
    }
    if (index < 0) {
        return slot_fill(b, step, ret_digest, msg);
    }
    struct wire_slot_info info;
    const struct wire_arena_header *header = b->arena.map;
    wire_slot_read(&header->slots[index], &info);
    bl_extent_list_digest(&b->wanted, wire_arena_slot(b->arena.map, (uint32_t)index), ret_digest);
    return bl_state_digest_equal(ret_digest, &info.digest)
               ? 0
               : bl_err(msg, BL_EDIGEST, "slot %d of step %llu changed since it was sealed", index,
                        (unsigned long long)step);
}

static void pointers_fill(struct belay *b, uint64_t step)
{
    const void *data;
    if (belay_slot_data(b, step, &data)) {
        return;
    }
    for (uint32_t i = 0; i < b->wanted.extent_count; i++) {
        const struct bl_extent *extent = &b->wanted.extents[i];
        if (b->wanted_at[i].ptr) {
            memcpy(b->wanted_at[i].ptr, (const char *)data + extent->offset,
                   bl_extent_elems(extent) *
                       bl_dtype_bytes(b->wanted.tensors[extent->tensor].dtype));
        }
    }
}

/* Reports what went wrong; the trainer parks and joins the next generation. */
static int load_failed(struct belay *b, int rc)
{
    char text[WIRE_TEXT_MAX];
    pthread_mutex_lock(&b->lock);
    if (rc != BL_EGEN && rc != BL_ESTOPPED && rc != BL_ECONFIG) {
        snprintf(text, sizeof(text), "load: %.240s", b->error.text);
        lb_fail(b, rc, text);
        lb_pump(b);
        rc = BL_EGEN;
    }
    pthread_mutex_unlock(&b->lock);
    return rc;
}

int belay_load(struct belay *job, uint64_t step)
{
    if (step != job->plan.step || job->wanted_new || job->loaded) {
        return bl_err(&job->error, -EINVAL,
                      "belay_load of step %llu: the plan's is %llu, and belay_tensor comes first",
                      (unsigned long long)step, (unsigned long long)job->plan.step);
    }
    struct bl_state_digest digest = {{0, 0}};
    pthread_mutex_lock(&job->lock);
    lb_wait_seal(job);
    pthread_mutex_unlock(&job->lock);
    job->writing_index = -1;
    int rc = arena_ready(job, &job->error);
    if (!rc && job->plan.fresh) {
        return 0; /* belay_ready reports what the trainer seals */
    }
    if (!rc) {
        rc = slot_ready(job, step, &digest, &job->error);
    }
    if (!rc) {
        pthread_mutex_lock(&job->lock);
        rc = wire_session_loaded(job->session, 0, NULL, &digest);
        lb_pump(job);
        pthread_mutex_unlock(&job->lock);
    }
    if (rc) {
        return load_failed(job, rc);
    }
    job->loaded = 1;
    pointers_fill(job, step);
    return 0;
}
