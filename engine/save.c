/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Saves: a node's part out of its ranks' sealed slots, and the leftovers of a cancelled attempt. A
 * slot counts only while its header says sealed, with the attempt's line and step: it is looked at
 * before the bytes are read and again after.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/failpoint.h"
#include "base/log.h"
#include "engine/engine.h"

static int root_open(struct ckpt_store **ret, struct ckpt_io *io,
                     const struct wire_engine_root *root, struct bl_errmsg *msg)
{
    char run[20];
    const struct ckpt_store_config config = {
        .path = root->path,
        .run = root->run == 0 ? NULL : run,
        .node = root->node[0] == '\0' ? "engine" : root->node,
        .create = root->create != 0 && root->run != 0,
        .shared = root->shared != 0,
        .apart = root->apart != 0,
        .reserve_bytes = root->reserve_bytes,
        .io = io,
    };

    snprintf(run, sizeof(run), "%016llx", (unsigned long long)root->run);
    return ckpt_store_open(ret, &config, msg);
}

int engine_root_open(struct ckpt_store **ret, const struct wire_engine_root *root,
                     struct bl_errmsg *msg)
{
    return root_open(ret, NULL, root, msg);
}

int engine_root_open_io(struct ckpt_store **ret, struct ckpt_io *io,
                        const struct wire_engine_root *root, struct bl_errmsg *msg)
{
    return root_open(ret, io, root, msg);
}

int engine_root_open_paced(struct ckpt_store **ret, struct ckpt_io *io,
                           const struct wire_engine_root *root, const atomic_int *cancel,
                           struct bl_errmsg *msg)
{
    *io = *ckpt_io_real();
    io->rate_max = root->rate_max;
    io->cancel = cancel;
    return root_open(ret, io, root, msg);
}

struct ckpt_attempt engine_attempt_of(const struct wire_engine_attempt *attempt)
{
    return (struct ckpt_attempt){.step = attempt->step,
                                 .generation = attempt->generation,
                                 .attempt = attempt->count,
                                 .nonce = attempt->attempt};
}

static int write_part(const struct wire_engine_write *message, struct engine_task *task,
                      const struct engine_mapped *mapped, struct ckpt_part_result *part,
                      struct bl_errmsg *msg)
{
    const struct ckpt_attempt attempt = engine_attempt_of(&message->attempt);
    bool adds_up = mapped->pick == NULL && !mapped->repeats;
    struct ckpt_store *store = NULL;
    struct ckpt_io io;
    const struct ckpt_part_job job = {
        .name = message->part,
        .sources = mapped->sources,
        .source_count = mapped->source_count,
        .codec = message->codec[0] == '\0' ? NULL : message->codec,
        .expect = adds_up ? &mapped->expect : NULL,
        .cancel = &task->cancel,
    };
    int rc = 0;

    if (atomic_load(&task->cancel) != 0) {
        return bl_err(msg, BL_EABORTED, "cancelled");
    }
    rc = engine_root_open_paced(&store, &io, &message->root, &task->cancel, msg);
    rc = rc < 0 ? rc : ckpt_attempt_begin(store, &attempt, msg);
    rc = rc < 0 ? rc : BL_FAILPOINT("save-begun");
    rc = rc < 0 ? rc : ckpt_save_part(store, &attempt, &job, part, msg);
    rc = rc < 0 ? rc : BL_FAILPOINT("save-written");
    ckpt_store_close(store);
    return rc;
}

static void log_written(const struct wire_engine_write *message,
                        const struct ckpt_part_result *part)
{
    bl_log(BL_LOG_INFO, "engine", "step %llu: %s, %llu bytes in %llu ms (%s%s%s%s%s)",
           (unsigned long long)message->attempt.step, part->name, (unsigned long long)part->bytes,
           (unsigned long long)part->elapsed_us / 1000,
           part->path == CKPT_IO_URING ? "io_uring" : "pwrite", part->direct ? ", direct" : "",
           part->registered ? ", registered" : "", part->recycled ? ", recycled" : "", part->note);
}

void engine_write(struct engine *engine, struct engine_task *task)
{
    const struct wire_engine_write *message = task->message;
    struct wire_engine_written answer = {.attempt = message->attempt.attempt};
    struct ckpt_part_result part = {0};
    struct engine_mapped mapped;
    struct bl_errmsg why = {0};

    answer.rc = engine_mapped_open(&mapped, task, &why);
    if (answer.rc == 0) {
        answer.rc = write_part(message, task, &mapped, &part, &why);
    }
    if (answer.rc == 0 && engine_watch_look(&engine->watch, message->attempt.step, mapped.bases,
                                            mapped.count, &why) < 0) {
        bl_log(BL_LOG_WARN, "engine", "%s", why.text);
    }
    answer.rc = answer.rc < 0 ? answer.rc : engine_mapped_recheck(&mapped, task, &why);
    engine_mapped_close(&mapped);
    if (answer.rc == 0) {
        answer.part_json =
            engine_part_json(&part, message->root.node, message->codec, &engine->watch);
        answer.bytes = part.bytes;
        answer.elapsed_ms = part.elapsed_us / 1000;
        log_written(message, &part);
    } else {
        bl_log(BL_LOG_WARN, "engine", "%s: %s", message->part, why.text);
    }
    engine_text(answer.text, answer.rc, &why);
    engine_answer(engine, WIRE_TYPE_ENGINE_WRITTEN, &answer);
}

void engine_cancelled(struct engine *engine, struct engine_task *task)
{
    const struct wire_engine_cancel *message = task->message;
    const struct ckpt_attempt attempt = engine_attempt_of(&message->attempt);
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
