/* SPDX-License-Identifier: Apache-2.0 */
/* Reading: which checkpoints a root has, and filling a slot from one. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "engine/engine.h"

/* "0123456789abcdef" as a number; 0 for the id of somebody else's run. */
static uint64_t run_number(const char *text)
{
    char again[20];
    uint64_t run = 0;

    if (sscanf(text, "%16" SCNx64, &run) != 1) {
        return 0;
    }
    snprintf(again, sizeof(again), "%016" PRIx64, run);
    return strcmp(again, text) == 0 ? run : 0;
}

/* Whose root is it, when it is not ours? */
static void foreign_run(const struct wire_engine_root *root, struct wire_engine_scanned *answer)
{
    const struct ckpt_store_config config = {.path = root->path};
    struct ckpt_store *store = NULL;

    if (ckpt_store_open(&store, &config, NULL) == 0) {
        snprintf(answer->run_text, sizeof(answer->run_text), "%s", ckpt_store_run(store));
        answer->run = run_number(answer->run_text);
        ckpt_store_close(store);
    }
}

static int fill_checkpoint(struct ckpt_store *store, const struct ckpt_entry *entry, bool with_job,
                           struct wire_engine_checkpoint *ret, struct bl_errmsg *msg)
{
    struct ckpt_manifest manifest = {0};
    int rc;

    *ret = (struct wire_engine_checkpoint){
        .step = entry->step,
        .generation = entry->generation,
        .line = entry->line,
        .digest = entry->digest,
        .manifest_digest = entry->manifest_digest,
        .bytes = entry->bytes,
        .saved_unix_s = entry->saved_unix_s,
        .function_id = entry->function_id,
    };
    snprintf(ret->dir, sizeof(ret->dir), "%s", entry->dir);
    if (!with_job) {
        return 0;
    }
    rc = ckpt_manifest_load(store, entry->dir, &manifest, msg);
    if (rc == 0) {
        ret->job_json = manifest.job;
        manifest.job = NULL;
        ckpt_manifest_close(&manifest);
    }
    return rc;
}

static int scan(const struct wire_engine_scan *message, struct ckpt_store *store,
                struct wire_engine_scanned *answer, struct bl_errmsg *msg)
{
    struct ckpt_scan found = {0};
    int rc = ckpt_scan(store, &found, msg);

    if (rc < 0) {
        return rc;
    }
    snprintf(answer->run_text, sizeof(answer->run_text), "%s", ckpt_store_run(store));
    answer->run = run_number(answer->run_text);
    answer->checkpoints = calloc(found.count + 1u, sizeof(*answer->checkpoints));
    rc = answer->checkpoints == NULL ? bl_err_code(msg, -ENOMEM, "scan") : 0;
    for (uint32_t i = 0; rc == 0 && i < found.count; i++) {
        const struct ckpt_entry *entry = &found.entries[i];

        if (entry->state == CKPT_BROKEN || entry->state == CKPT_FOREIGN) {
            bl_log(BL_LOG_WARN, "engine", "%s/%s is passed over: %s", message->root.path,
                   entry->dir, entry->why);
        }
        if (entry->state != CKPT_GOOD || answer->checkpoint_count >= WIRE_CHECKPOINT_MAX) {
            continue;
        }
        rc = fill_checkpoint(store, entry, answer->checkpoint_count == 0,
                             &answer->checkpoints[answer->checkpoint_count], msg);
        answer->checkpoint_count += rc == 0;
    }
    ckpt_scan_close(&found);
    return rc;
}

void engine_scan(struct engine *engine, struct engine_task *task)
{
    const struct wire_engine_scan *message = task->message;
    struct wire_engine_scanned answer = {.request = message->request};
    struct ckpt_store *store = NULL;
    struct bl_errmsg why = {0};

    answer.rc = engine_root_open(&store, &message->root, &why);
    if (answer.rc == 0) {
        answer.rc = scan(message, store, &answer, &why);
    } else if (answer.rc == BL_EFOREIGN) {
        foreign_run(&message->root, &answer);
    }
    ckpt_store_close(store);
    engine_text(answer.text, answer.rc, &why);
    engine_answer(engine, WIRE_TYPE_ENGINE_SCANNED, &answer);
}

/* The extents lie between data_offset and the end of the arena? */
static int check_extents(const struct wire_engine_load *message, size_t bytes,
                         struct bl_errmsg *msg)
{
    const struct bl_extent_list *list = &message->extents;

    if (message->data_offset > bytes) {
        return bl_err(msg, BL_EPROTO, "the slot lies outside its arena");
    }
    for (uint32_t i = 0; i < list->extent_count; i++) {
        const struct bl_extent *extent = &list->extents[i];
        uint64_t size = 0, room = bytes - message->data_offset;

        if (extent->tensor >= list->tensor_count ||
            bl_extent_check(extent, &list->tensors[extent->tensor], NULL) < 0 ||
            __builtin_mul_overflow(bl_extent_elems(extent),
                                   bl_dtype_bytes(list->tensors[extent->tensor].dtype), &size) ||
            size > room || extent->offset > room - size) {
            return bl_err(msg, BL_EPROTO, "extent %u lies outside its slot", i);
        }
    }
    return 0;
}

static int load(const struct wire_engine_load *message, int fd, struct ckpt_load_result *result,
                struct bl_errmsg *msg)
{
    struct ckpt_store *store = NULL;
    struct ckpt_dest dest = {.list = &message->extents};
    size_t bytes = 0;
    void *map;
    int rc = bl_memfd_check(fd, 4096, &bytes, msg);

    rc = rc < 0 ? rc : check_extents(message, bytes, msg);
    rc = rc < 0 ? rc : engine_root_open(&store, &message->root, msg);
    if (rc < 0) {
        return rc;
    }
    map = bl_mem_map(fd, bytes, 1);
    if (map == NULL) {
        rc = bl_err_code(msg, -ENOMEM, "map of arena %016llx", (unsigned long long)message->arena);
    } else {
        dest.base = (uint8_t *)map + message->data_offset;
        rc = ckpt_load(store, message->dir, &dest, 1, result, msg);
        bl_mem_free(map, bytes);
    }
    ckpt_store_close(store);
    return rc;
}

void engine_load(struct engine *engine, struct engine_task *task)
{
    const struct wire_engine_load *message = task->message;
    struct wire_engine_loaded answer = {.request = message->request};
    struct ckpt_load_result result = {0};
    struct bl_errmsg why = {0};

    answer.rc = task->fd_count != 1 ? bl_err(&why, BL_EPROTO, "one descriptor expected")
                                    : load(message, task->fds[0], &result, &why);
    answer.bytes = result.bytes_wanted;
    answer.elapsed_ms = result.elapsed_us / 1000;
    engine_text(answer.text, answer.rc, &why);
    if (answer.rc < 0) {
        bl_log(BL_LOG_WARN, "engine", "load: %s", why.text);
    }
    engine_answer(engine, WIRE_TYPE_ENGINE_LOADED, &answer);
}
