/* SPDX-License-Identifier: Apache-2.0 */
/* From frames to tasks: decodes a question, takes its descriptors, queues it. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/engine.h"
#include "wire/sock.h"

/* How many descriptors belong to a message. */
static uint32_t fds_of(enum wire_type type, const void *message)
{
    switch (type) {
    case WIRE_TYPE_ENGINE_WRITE:
        return ((const struct wire_engine_write *)message)->arena_count;
    case WIRE_TYPE_ENGINE_ARENAS:
        return ((const struct wire_engine_arenas *)message)->arena_count;
    case WIRE_TYPE_ENGINE_LOAD:
        return 1;
    default:
        return 0;
    }
}

static bool is_question(uint32_t type)
{
    return type == WIRE_TYPE_ENGINE_ARENAS || type == WIRE_TYPE_ENGINE_WRITE ||
           type == WIRE_TYPE_ENGINE_COMMIT || type == WIRE_TYPE_ENGINE_CANCEL ||
           type == WIRE_TYPE_ENGINE_SCAN || type == WIRE_TYPE_ENGINE_LOAD;
}

void engine_collected_close(struct engine_collected *collected)
{
    for (uint32_t i = 0; i < collected->count; i++) {
        close(collected->arenas[i].fd);
    }
    free(collected->arenas);
    memset(collected, 0, sizeof(*collected));
}

/* Appends the arenas of one frame, with the task's descriptors, which are the collection's then. */
static int collect(struct engine_collected *collected, uint64_t attempt,
                   const struct wire_engine_arena *arenas, uint32_t count, struct engine_task *task,
                   struct bl_errmsg *msg)
{
    struct engine_arena *grown;

    if (collected->attempt != attempt) {
        engine_collected_close(collected); /* of an attempt that was given up */
        collected->attempt = attempt;
    }
    for (uint32_t i = 0; i < count; i++) {
        if (arenas[i].fd_index != i) { /* one each, in order: so none is taken twice */
            return bl_err(msg, BL_EPROTO, "arena %u has descriptor %u", i, arenas[i].fd_index);
        }
    }
    if (collected->count + count > ENGINE_ARENAS_MAX) {
        return bl_err(msg, BL_ELIMIT, "%u arenas in one write, at most %u",
                      collected->count + count, ENGINE_ARENAS_MAX);
    }
    grown = realloc(collected->arenas, (collected->count + count + 1u) * sizeof(*grown));
    if (grown == NULL) {
        return bl_err_code(msg, -ENOMEM, "arenas");
    }
    collected->arenas = grown;
    for (uint32_t i = 0; i < count; i++) {
        grown[collected->count++] = (struct engine_arena){arenas[i], task->fds[i]};
    }
    task->fd_count = 0;
    return 0;
}

/* Everything that the type needs beyond its message. 1: the task is complete, 0: it was one that
 * only brings something, negative: an error. */
static int complete(struct engine *engine, struct engine_collected *collected,
                    struct engine_task *task, struct bl_errmsg *msg)
{
    const struct wire_engine_arenas *arenas = task->message;
    const struct wire_engine_write *write_message = task->message;
    const struct wire_engine_cancel *cancel = task->message;
    int rc;

    switch (task->type) {
    case WIRE_TYPE_ENGINE_ARENAS:
        return collect(collected, arenas->attempt, arenas->arenas, arenas->arena_count, task, msg);
    case WIRE_TYPE_ENGINE_WRITE:
        rc = collect(collected, write_message->attempt.attempt, write_message->arenas,
                     write_message->arena_count, task, msg);
        task->arenas = rc == 0 ? collected->arenas : NULL;
        task->arena_count = rc == 0 ? collected->count : 0;
        if (rc == 0) {
            memset(collected, 0, sizeof(*collected));
        }
        return rc < 0 ? rc : 1;
    case WIRE_TYPE_ENGINE_CANCEL:
        if (collected->attempt == cancel->attempt.attempt) {
            engine_collected_close(collected);
        }
        engine_cancel(engine, cancel->attempt.attempt);
        return 1;
    default:
        return 1;
    }
}

int engine_question(struct engine *engine, struct engine_collected *collected,
                    struct wire_sock *sock, const struct wire_frame *frame, struct bl_errmsg *msg)
{
    enum wire_type type = (enum wire_type)frame->type;
    struct engine_task *task;
    uint32_t fd_count;
    int rc;

    if (!is_question(frame->type)) {
        return bl_err(msg, BL_EPROTO, "%s is no question to an engine",
                      wire_type_name(frame->type));
    }
    task = calloc(1, sizeof(*task));
    if (task == NULL || (task->message = calloc(1, wire_message_size(type))) == NULL) {
        free(task);
        return bl_err_code(msg, -ENOMEM, "task");
    }
    task->type = type;
    rc = wire_message_decode(type, task->message, frame->payload, frame->payload_bytes, msg);
    if (rc == 0) {
        fd_count = fds_of(type, task->message);
        rc = fd_count > WIRE_FDS_MAX ? BL_ELIMIT : wire_sock_fds_take(sock, task->fds, fd_count);
        task->fd_count = rc == 0 ? fd_count : 0;
        rc = rc < 0 ? bl_err_code(msg, rc, "descriptors of %s", wire_type_name(type)) : 0;
    }
    rc = rc < 0 ? rc : complete(engine, collected, task, msg);
    if (rc <= 0) {
        engine_task_free(task);
        return rc;
    }
    rc = engine_submit(engine, task);
    return rc < 0 ? bl_err_code(msg, rc, "too many questions at once") : 0;
}
