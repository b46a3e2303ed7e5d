/* SPDX-License-Identifier: Apache-2.0 */
/* Lanes: a worker thread each, tasks in order; and the list of answers. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "engine/engine.h"

void engine_task_free(struct engine_task *task)
{
    if (task == NULL) {
        return;
    }
    for (uint32_t i = 0; i < task->fd_count; i++) {
        close(task->fds[i]);
    }
    for (uint32_t i = 0; i < task->arena_count; i++) {
        close(task->arenas[i].fd);
    }
    free(task->arenas);
    wire_message_close(task->type, task->message);
    free(task->message);
    free(task);
}

void engine_answer(struct engine *engine, enum wire_type type, const void *message)
{
    struct engine_answer *answer = calloc(1, sizeof(*answer));
    size_t bytes = wire_message_size(type);
    const uint64_t one = 1;

    BL_ASSERT(answer != NULL && bytes > 0);
    answer->type = type;
    answer->message = malloc(bytes);
    BL_ASSERT(answer->message != NULL); /* an engine without memory is started anew */
    memcpy(answer->message, message, bytes);
    pthread_mutex_lock(&engine->lock);
    if (engine->last == NULL) {
        engine->first = answer;
    } else {
        engine->last->next = answer;
    }
    engine->last = answer;
    pthread_mutex_unlock(&engine->lock);
    BL_IGNORE(write(engine->wake_fd, &one, sizeof(one)) < 0, "the counter is full: it wakes then");
}

void engine_text(char ret[WIRE_REASON_MAX], int rc, const struct bl_errmsg *why)
{
    const char *text = why->text[0] != '\0' ? why->text : bl_strerror(rc);

    snprintf(ret, WIRE_REASON_MAX, "%s", rc == 0 ? "" : text);
}

const char *engine_text_without(const char *text, const char *root)
{
    size_t bytes = strlen(root);

    return strncmp(text, root, bytes) == 0 && text[bytes] == '/' ? text + bytes + 1 : text;
}

struct engine_answer *engine_answer_take(struct engine *engine)
{
    struct engine_answer *answer;

    pthread_mutex_lock(&engine->lock);
    answer = engine->first;
    if (answer != NULL) {
        engine->first = answer->next;
        engine->last = engine->first == NULL ? NULL : engine->last;
    }
    pthread_mutex_unlock(&engine->lock);
    return answer;
}

void engine_answer_free(struct engine_answer *answer)
{
    wire_message_close(answer->type, answer->message);
    free(answer->message);
    free(answer);
}

static void work(struct engine *engine, struct engine_task *task)
{
    switch (task->type) {
    case WIRE_TYPE_ENGINE_WRITE:
        engine_write(engine, task);
        break;
    case WIRE_TYPE_ENGINE_COMMIT:
        engine_commit(engine, task);
        break;
    case WIRE_TYPE_ENGINE_CANCEL:
        engine_cancelled(engine, task);
        break;
    case WIRE_TYPE_ENGINE_SCAN:
        engine_scan(engine, task);
        break;
    case WIRE_TYPE_ENGINE_LOAD:
        engine_load(engine, task);
        break;
    default:
        BL_ASSERT(0); /* engine_submit takes no others */
    }
}

/* Do saves wait for it? Then verification stands still. */
static bool is_save(const struct engine_task *task)
{
    return task->type == WIRE_TYPE_ENGINE_WRITE || task->type == WIRE_TYPE_ENGINE_COMMIT;
}

static void *lane_main(void *arg)
{
    struct engine_lane *lane = arg;

    if (lane == &lane->engine->writer) {
        engine_thread_kind(ENGINE_NICE_WRITER, 0);
    }
    pthread_mutex_lock(&lane->lock);
    while (!lane->stop || lane->first != NULL) {
        struct engine_task *task = lane->first;

        if (task == NULL) {
            pthread_cond_wait(&lane->wake, &lane->lock);
            continue;
        }
        lane->first = task->next;
        lane->last = lane->first == NULL ? NULL : lane->last;
        lane->count--;
        lane->current = task;
        pthread_mutex_unlock(&lane->lock);
        work(lane->engine, task);
        if (is_save(task)) {
            engine_verifier_saves(lane->engine->verifier, -1);
        }
        pthread_mutex_lock(&lane->lock);
        lane->current = NULL;
        engine_task_free(task);
    }
    lane->done = true;
    pthread_mutex_unlock(&lane->lock);
    return NULL;
}

static bool is_same_load(const struct engine_task *a, const struct engine_task *b)
{
    const struct wire_engine_load *x = a->message, *y = b->message;

    return a->type == WIRE_TYPE_ENGINE_LOAD && b->type == WIRE_TYPE_ENGINE_LOAD &&
           x->root.run == y->root.run && strcmp(x->root.path, y->root.path) == 0 &&
           strcmp(x->dir, y->dir) == 0;
}

/* Moves at most `max` waiting tasks that are the same load to the end of `chain`; how many. */
static uint32_t lane_pick(struct engine_lane *lane, const struct engine_task *task, uint32_t max,
                          struct engine_task ***chain)
{
    struct engine_task **at = &lane->first;
    uint32_t picked = 0;

    lane->last = NULL;
    while (*at != NULL) {
        struct engine_task *one = *at;

        if (picked == max || !is_same_load(one, task)) {
            lane->last = one;
            at = &one->next;
            continue;
        }
        *at = one->next;
        one->next = NULL;
        **chain = one;
        *chain = &one->next;
        lane->count--;
        picked++;
    }
    return picked;
}

struct engine_task *engine_loads_take(struct engine *engine, const struct engine_task *task)
{
    struct engine_lane *lane = &engine->reader;
    struct engine_task *first = NULL, **chain = &first;
    uint32_t count = 0;
    int rc = 0;

    pthread_mutex_lock(&lane->lock);
    while (rc == 0 && !lane->stop && count < ENGINE_QUEUE_MAX) {
        struct timespec until;

        count += lane_pick(lane, task, ENGINE_QUEUE_MAX - count, &chain);
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += (long)ENGINE_GATHER_MS * 1000000;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        rc = pthread_cond_timedwait(&lane->wake, &lane->lock, &until);
    }
    pthread_mutex_unlock(&lane->lock);
    return first;
}

static int lane_start(struct engine_lane *lane, struct engine *engine, struct bl_errmsg *msg)
{
    int rc;

    lane->engine = engine;
    pthread_mutex_init(&lane->lock, NULL);
    pthread_cond_init(&lane->wake, NULL);
    rc = pthread_create(&lane->thread, NULL, lane_main, lane);
    return rc != 0 ? bl_err_code(msg, -rc, "thread") : 0;
}

int engine_start(struct engine *engine, struct bl_errmsg *msg)
{
    int rc;

    pthread_mutex_init(&engine->lock, NULL);
    engine->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (engine->wake_fd < 0) {
        return bl_err_code(msg, -errno, "eventfd");
    }
    rc = engine_verifier_start(engine, msg);
    rc = rc < 0 ? rc : lane_start(&engine->writer, engine, msg);
    return rc < 0 ? rc : lane_start(&engine->reader, engine, msg);
}

int engine_submit(struct engine *engine, struct engine_task *task)
{
    bool reads = task->type == WIRE_TYPE_ENGINE_SCAN || task->type == WIRE_TYPE_ENGINE_LOAD;
    struct engine_lane *lane = reads ? &engine->reader : &engine->writer;
    int rc = 0;

    if (is_save(task)) {
        engine_verifier_saves(engine->verifier, 1);
    }
    pthread_mutex_lock(&lane->lock);
    if (lane->count >= ENGINE_QUEUE_MAX) {
        rc = BL_ELIMIT;
    } else {
        if (lane->last == NULL) {
            lane->first = task;
        } else {
            lane->last->next = task;
        }
        lane->last = task;
        lane->count++;
        pthread_cond_signal(&lane->wake);
    }
    pthread_mutex_unlock(&lane->lock);
    if (rc < 0) {
        if (is_save(task)) {
            engine_verifier_saves(engine->verifier, -1);
        }
        engine_task_free(task);
    }
    return rc;
}

static void cancel_if(struct engine_task *task, uint64_t attempt)
{
    const struct wire_engine_write *write_message = task->message;

    if (task->type == WIRE_TYPE_ENGINE_WRITE && write_message->attempt.attempt == attempt) {
        atomic_store(&task->cancel, 1);
    }
}

void engine_cancel(struct engine *engine, uint64_t attempt)
{
    struct engine_lane *lane = &engine->writer;

    pthread_mutex_lock(&lane->lock);
    if (lane->current != NULL) {
        cancel_if(lane->current, attempt);
    }
    for (struct engine_task *task = lane->first; task != NULL; task = task->next) {
        cancel_if(task, attempt);
    }
    pthread_mutex_unlock(&lane->lock);
}

static void lane_stop(struct engine_lane *lane)
{
    pthread_mutex_lock(&lane->lock);
    while (lane->first != NULL) { /* nobody waits for the answers any more */
        struct engine_task *task = lane->first;

        lane->first = task->next;
        engine_task_free(task);
    }
    lane->last = NULL;
    if (lane->current != NULL) {
        atomic_store(&lane->current->cancel, 1);
    }
    lane->stop = true;
    pthread_cond_signal(&lane->wake);
    pthread_mutex_unlock(&lane->lock);
}

static bool lane_is_done(struct engine_lane *lane)
{
    bool done;

    pthread_mutex_lock(&lane->lock);
    done = lane->done;
    pthread_mutex_unlock(&lane->lock);
    return done;
}

bool engine_stop(struct engine *engine)
{
    const struct timespec pause = {0, 2 * 1000000};

    lane_stop(&engine->writer);
    lane_stop(&engine->reader);
    engine_verifier_stop(engine->verifier);
    for (uint64_t waited = 0; waited < bl_time_scaled_ms(ENGINE_LEAVE_MS); waited += 2) {
        if (lane_is_done(&engine->writer) && lane_is_done(&engine->reader) &&
            engine_verifier_is_done(engine->verifier)) {
            pthread_join(engine->writer.thread, NULL);
            pthread_join(engine->reader.thread, NULL);
            engine_verifier_join(engine->verifier);
            engine_watch_close(&engine->watch);
            return true;
        }
        nanosleep(&pause, NULL);
    }
    return false;
}
