/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Saves: a node's part out of its ranks' sealed slots, the commit of all parts, and the leftovers
 * of a cancelled attempt. A slot counts only while its header says sealed, with the attempt's line
 * and step: it is looked at before the bytes are read and again after.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/failpoint.h"
#include "base/log.h"
#include "base/mem.h"
#include "engine/engine.h"
#include "wire/slot.h"

int engine_root_open(struct ckpt_store **ret, const struct wire_engine_root *root,
                     struct bl_errmsg *msg)
{
    char run[20];
    const struct ckpt_store_config config = {
        .path = root->path,
        .run = root->run == 0 ? NULL : run,
        .node = root->node[0] == '\0' ? "engine" : root->node,
        .create = root->create != 0 && root->run != 0,
        .shared = root->shared != 0,
        .nodes = root->nodes,
        .reserve_bytes = root->reserve_bytes,
    };

    snprintf(run, sizeof(run), "%016llx", (unsigned long long)root->run);
    return ckpt_store_open(ret, &config, msg);
}

static struct ckpt_attempt attempt_of(const struct wire_engine_attempt *attempt)
{
    return (struct ckpt_attempt){.step = attempt->step,
                                 .generation = attempt->generation,
                                 .attempt = attempt->count,
                                 .nonce = attempt->attempt};
}

/* The ranks' arenas of one write, mapped. */
struct mapped {
    void *map;
    size_t bytes;
    struct wire_arena_info info;
};

static void mapped_close(struct mapped *mapped)
{
    bl_extent_list_close(&mapped->info.extents);
    if (mapped->map != NULL) {
        bl_mem_free(mapped->map, mapped->bytes);
    }
}

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

static int arena_map(struct mapped *ret, int fd, const struct wire_engine_arena *arena,
                     const struct wire_engine_attempt *attempt, struct ckpt_source *source,
                     struct bl_errmsg *msg)
{
    uint64_t offset = 0;
    int rc = bl_memfd_check(fd, 4096, &ret->bytes, msg);

    if (rc < 0) {
        return rc;
    }
    ret->map = bl_mem_map(fd, ret->bytes, 0);
    if (ret->map == NULL) {
        return bl_err_code(msg, -ENOMEM, "map of arena %016llx", (unsigned long long)arena->arena);
    }
    rc = wire_arena_read(&ret->info, ret->map, ret->bytes, msg);
    if (rc == 0) {
        rc = arena_is_sealed(&ret->info, arena, attempt, msg);
    }
    rc = rc < 0 ? rc : wire_arena_slot_offset(ret->map, ret->bytes, arena->slot, &offset, msg);
    rc = rc < 0 ? rc : extents_fit(&ret->info.extents, ret->bytes - offset, msg);
    if (rc == 0) {
        *source = (struct ckpt_source){.list = &ret->info.extents,
                                       .base = (const uint8_t *)ret->map + offset};
    }
    return rc;
}

/* The slots must be what they were all the while. */
static int recheck(struct mapped *mapped, const struct wire_engine_write *message,
                   struct bl_errmsg *msg)
{
    int rc = 0;

    for (uint32_t i = 0; rc == 0 && i < message->arena_count; i++) {
        struct wire_arena_info info = {0};

        rc = wire_arena_read(&info, mapped[i].map, mapped[i].bytes, msg);
        if (rc == 0) {
            rc = arena_is_sealed(&info, &message->arenas[i], &message->attempt, msg);
            bl_extent_list_close(&info.extents);
        }
    }
    return rc < 0 ? bl_err_in(msg, rc, "changed while it was saved") : 0;
}

static int write_part(const struct wire_engine_write *message, struct engine_task *task,
                      struct mapped *mapped, struct ckpt_part_result *part, struct bl_errmsg *msg)
{
    const struct ckpt_attempt attempt = attempt_of(&message->attempt);
    struct ckpt_source sources[WIRE_FDS_MAX];
    struct bl_state_digest expect = {{0, 0}};
    struct ckpt_store *store = NULL;
    const struct ckpt_part_job job = {
        .name = message->part,
        .sources = sources,
        .source_count = message->arena_count,
        .codec = message->codec[0] == '\0' ? NULL : message->codec,
        .expect = &expect,
        .cancel = &task->cancel,
    };
    int rc = 0;

    for (uint32_t i = 0; rc == 0 && i < message->arena_count; i++) {
        uint32_t fd_index = message->arenas[i].fd_index;

        rc = fd_index >= task->fd_count
                 ? bl_err(msg, BL_EPROTO, "descriptor %u did not come", fd_index)
                 : arena_map(&mapped[i], task->fds[fd_index], &message->arenas[i],
                             &message->attempt, &sources[i], msg);
        if (rc == 0) {
            bl_state_digest_merge(&expect, &mapped[i].info.slots[message->arenas[i].slot].digest);
        }
    }
    if (rc == 0 && atomic_load(&task->cancel) != 0) {
        rc = bl_err(msg, BL_EABORTED, "cancelled");
    }
    rc = rc < 0 ? rc : engine_root_open(&store, &message->root, msg);
    rc = rc < 0 ? rc : ckpt_attempt_begin(store, &attempt, msg);
    rc = rc < 0 ? rc : BL_FAILPOINT("save-begun");
    rc = rc < 0 ? rc : ckpt_save_part(store, &attempt, &job, part, msg);
    rc = rc < 0 ? rc : BL_FAILPOINT("save-written");
    rc = rc < 0 ? rc : recheck(mapped, message, msg);
    ckpt_store_close(store);
    return rc;
}

void engine_write(struct engine *engine, struct engine_task *task)
{
    const struct wire_engine_write *message = task->message;
    struct wire_engine_written answer = {.attempt = message->attempt.attempt};
    struct mapped mapped[WIRE_FDS_MAX] = {0};
    struct ckpt_part_result part = {0};
    struct bl_errmsg why = {0};

    answer.rc = write_part(message, task, mapped, &part, &why);
    for (uint32_t i = 0; i < message->arena_count; i++) {
        mapped_close(&mapped[i]);
    }
    if (answer.rc == 0) {
        answer.part_json = engine_part_json(&part, message->root.node);
        answer.bytes = part.bytes;
        answer.elapsed_ms = part.elapsed_us / 1000;
        bl_log(BL_LOG_INFO, "engine", "step %llu: %s, %llu bytes in %llu ms (%s%s%s%s%s)",
               (unsigned long long)message->attempt.step, part.name, (unsigned long long)part.bytes,
               (unsigned long long)answer.elapsed_ms,
               part.path == CKPT_IO_URING ? "io_uring" : "pwrite", part.direct ? ", direct" : "",
               part.registered ? ", registered" : "", part.recycled ? ", recycled" : "", part.note);
    } else {
        bl_log(BL_LOG_WARN, "engine", "%s: %s", message->part, why.text);
    }
    engine_text(answer.text, answer.rc, &why);
    engine_answer(engine, WIRE_TYPE_ENGINE_WRITTEN, &answer);
}

static int commit(const struct wire_engine_commit *message, struct ckpt_store *store,
                  struct ckpt_commit_result *result, struct bl_errmsg *msg)
{
    const struct ckpt_attempt attempt = attempt_of(&message->attempt);
    struct ckpt_manifest manifest = {
        .generation = attempt.generation, .line = message->attempt.line, .step = attempt.step};
    int rc = 0;

    snprintf(manifest.run, sizeof(manifest.run), "%s", ckpt_store_run(store));
    manifest.parts = calloc(message->part_count + 1u, sizeof(*manifest.parts));
    if (manifest.parts == NULL) {
        rc = bl_err_code(msg, -ENOMEM, "commit");
    }
    for (uint32_t i = 0; rc == 0 && i < message->part_count; i++) {
        rc = engine_part_parse(&manifest.parts[i], message->parts[i].part_json, msg);
        manifest.part_count = i + (rc == 0);
    }
    rc = rc < 0 ? rc : engine_manifest_fill(&manifest, message->manifest_json, msg);
    rc = rc < 0 ? rc : ckpt_commit(store, &attempt, &manifest, result, msg);
    ckpt_manifest_close(&manifest);
    return rc;
}

/* After the answer: what is new is read back whole before anything older goes. */
static void tidy(const struct wire_engine_commit *message, struct ckpt_store *store,
                 const char *dir, struct engine_task *task)
{
    const struct ckpt_verify_job job = {.full = true, .cancel = &task->cancel};
    struct ckpt_verify_result verified = {0};
    struct ckpt_retain_result retained = {0};
    struct bl_errmsg why = {0};
    int rc = ckpt_sweep(store, message->attempt.generation, message->attempt.step, &why);

    if (rc == 0 && message->keep.keep > 0) {
        rc = ckpt_verify(store, dir, &job, &verified, &why);
        if (rc == 0 && verified.findings > 0) {
            rc = BL_EDIGEST;
        }
        if (rc == 0) {
            rc = ckpt_retain(store, message->keep.keep, NULL, 0, &retained, &why);
        }
        if (rc == 0 && retained.removed > 0) {
            rc = ckpt_sweep(store, message->attempt.generation, message->attempt.step, &why);
        }
    }
    if (rc < 0 && rc != BL_EABORTED) {
        bl_log(BL_LOG_ERROR, "engine", "%s/%s: after the commit: %s", message->root.path, dir,
               why.text);
    }
}

void engine_commit(struct engine *engine, struct engine_task *task)
{
    const struct wire_engine_commit *message = task->message;
    struct wire_engine_committed answer = {.attempt = message->attempt.attempt};
    struct ckpt_commit_result result = {0};
    struct ckpt_store *store = NULL;
    struct bl_errmsg why = {0};

    answer.rc = engine_root_open(&store, &message->root, &why);
    if (answer.rc == 0) {
        answer.rc = commit(message, store, &result, &why);
    }
    answer.manifest_digest = result.manifest_digest;
    snprintf(answer.dir, sizeof(answer.dir), "%s", result.dir);
    engine_text(answer.text, answer.rc, &why);
    if (answer.rc == 0) {
        bl_log(BL_LOG_INFO, "engine", "step %llu: committed as %s",
               (unsigned long long)message->attempt.step, result.dir);
    } else {
        bl_log(BL_LOG_WARN, "engine", "commit: %s", answer.text);
    }
    engine_answer(engine, WIRE_TYPE_ENGINE_COMMITTED, &answer);
    if (answer.rc == 0) {
        tidy(message, store, result.dir, task);
    }
    ckpt_store_close(store);
}

void engine_cancelled(struct engine *engine, struct engine_task *task)
{
    const struct wire_engine_cancel *message = task->message;
    const struct ckpt_attempt attempt = attempt_of(&message->attempt);
    struct wire_engine_cancelled answer = {.attempt = message->attempt.attempt};
    struct ckpt_store *store = NULL;
    struct bl_errmsg why = {0};

    answer.rc = engine_root_open(&store, &message->root, &why);
    if (answer.rc == 0) {
        answer.rc = ckpt_attempt_drop(store, &attempt, &why);
    }
    ckpt_store_close(store);
    engine_text(answer.text, answer.rc, &why);
    engine_answer(engine, WIRE_TYPE_ENGINE_CANCELLED, &answer);
}
