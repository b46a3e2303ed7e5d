/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loads from disk for the ranks of this node. A plan names every root that holds its step. The
 * engine of the first reads, and heals what is damaged there from the others; but a root that hangs
 * hangs its engine, here and perhaps only here. Then the next one's engine is asked, and a root
 * that is known to hang on this node is neither asked nor named as a copy: it would hang the other
 * engine too.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "daemon/engine_state.h"

struct place {     /* where the state is said to be */
    uint32_t root; /* of the job */
    char dir[WIRE_DIR_MAX];
    int tried;
};

struct load { /* a rank's question, until it is answered */
    struct daemon *daemon;
    uint64_t run, arena;
    uint32_t slot;
    struct bl_extent_list extents; /* owned */
    struct place places[WIRE_JOB_ROOTS];
    uint32_t place_count;
    engine_loaded_fn done;
    void *arg;
};

/* The number of a root of the job, or root_count. */
static uint32_t root_find(const struct run *run, const char *path)
{
    uint32_t root = 0;

    while (root < run->job->root_count && strcmp(run->job->roots[root].path, path) != 0) {
        root++;
    }
    return root;
}

static void place_add(struct load *load, const struct run *run, const char *path, const char *dir)
{
    uint32_t root = root_find(run, path);

    if (root < run->job->root_count && load->place_count < WIRE_JOB_ROOTS) {
        struct place *place = &load->places[load->place_count++];

        place->root = root;
        snprintf(place->dir, sizeof(place->dir), "%s", dir);
    }
}

/* Where the rank reads, and where else the plan says that this state is. */
static void places_fill(struct load *load, const struct run *run,
                        const struct wire_disk_load *asked)
{
    const struct wire_directive *directive = core_member_directive(run->member);
    const struct wire_plan *plan = directive ? &directive->plan : NULL;

    place_add(load, run, asked->root, asked->dir);
    if (!plan || strcmp(plan->disk_root, asked->root) != 0 ||
        strcmp(plan->disk_dir, asked->dir) != 0) {
        return;
    }
    for (uint32_t i = 0; i < plan->place_count; i++) {
        place_add(load, run, plan->places[i].root, plan->places[i].dir);
    }
}

static int place_is_stuck(const struct load *load, const struct run *run, uint32_t place)
{
    const struct engine *engine =
        engine_of(load->daemon, run->job->roots[load->places[place].root].path);

    return engine && engine->is_stuck;
}

/* The next place to be tried, one that hangs only when there is no other left; place_count: none.
 */
static uint32_t place_next(const struct load *load, const struct run *run)
{
    uint32_t hangs = load->place_count;

    for (uint32_t i = load->place_count; i > 0; i--) {
        if (!load->places[i - 1].tried && place_is_stuck(load, run, i - 1)) {
            hangs = i - 1;
        }
    }
    for (uint32_t i = 0; i < load->place_count; i++) {
        if (!load->places[i].tried && !place_is_stuck(load, run, i)) {
            return i;
        }
    }
    return hangs;
}

/* -ETIMEDOUT: no engine here answers, whatever is on the disk; the leader plans without that
 * checkpoint when it happens again. */
static void load_end(struct load *load, int rc, const char *text)
{
    load->done(load->arg, rc == BL_EABORTED ? -ETIMEDOUT : rc, text);
    bl_extent_list_close(&load->extents);
    free(load);
}

/* Who may have what this node's own roots do not have. */
static void load_peers(const struct run *run, struct wire_engine_load *message)
{
    const struct wire_directive *directive = core_member_directive(run->member);
    uint32_t count = directive ? directive->plan.holder_count : 0;

    engine_peers_open(run, count, &message->peers);
    for (uint32_t i = 0; i < count; i++) {
        const struct wire_holder *holder = &directive->plan.holders[i];

        engine_peers_add(run, &message->peers, holder->node, holder->bulk_addr);
    }
}

/* A root to load from. One that each node has for itself may not be here yet: then it is made. */
static void load_root_fill(const struct run *run, uint32_t root, struct wire_engine_root *ret)
{
    const struct wire_directive *directive = core_member_directive(run->member);
    uint32_t count = directive ? directive->plan.holder_count : 0;

    engine_root_fill(run, root, 0, ret);
    for (uint32_t i = 0; !ret->shared && i < count; i++) {
        ret->apart |= strcmp(directive->plan.holders[i].node, run->daemon->config.name) != 0;
    }
    ret->shared = !ret->apart;
}

static void load_copies(const struct load *load, const struct run *run, uint32_t main_place,
                        struct wire_engine_load *message)
{
    for (uint32_t i = 0; i < load->place_count; i++) {
        struct wire_engine_copy *copy = &message->copies[message->copy_count];

        if (i == main_place || load->places[i].tried || place_is_stuck(load, run, i)) {
            continue;
        }
        load_root_fill(run, load->places[i].root, &copy->root);
        snprintf(copy->dir, sizeof(copy->dir), "%s", load->places[i].dir);
        message->copy_count++;
    }
}

static void on_answer(void *arg, int rc, const char *text);

/* Asks the engine of one place. Without an answer on_answer may be called from here. */
static void load_ask(struct load *load, struct run *run, uint32_t place)
{
    const struct arena *arena = arena_find(run, load->arena);
    struct wire_engine_load message = {
        .arena = load->arena, .slot = load->slot, .extents = load->extents};
    const char *path = run->job->roots[load->places[place].root].path;
    struct bl_errmsg msg = {{0}};
    int rc = arena ? wire_arena_slot_offset(arena->map, arena->bytes, load->slot,
                                            &message.data_offset, &msg)
                   : bl_err(&msg, -ENOENT, "the rank's memory is gone");

    if (rc != 0) {
        load_end(load, rc, msg.text);
        return;
    }
    struct engine *engine = engine_of(load->daemon, path);

    message.request = engine ? ++engine->next_request : 0;
    struct engine_pending *pending =
        engine ? engine_pending_add(engine, ENGINE_ASKED_LOAD, message.request, run->id) : NULL;

    if (!pending) {
        load_end(load, BL_ELIMIT, "too many loads under way");
        return;
    }
    load->places[place].tried = 1;
    pending->loaded = on_answer;
    pending->arg = load;
    load_root_fill(run, load->places[place].root, &message.root);
    snprintf(message.dir, sizeof(message.dir), "%s", load->places[place].dir);
    load_copies(load, run, place, &message);
    load_peers(run, &message);
    engine_ask(engine, pending, WIRE_TYPE_ENGINE_LOAD, &message, &arena->fd, 1);
    free(message.peers.peers);
}

/* BL_EABORTED: no engine answered, the next place's may. Whatever else an engine answers holds for
 * all places: it had the others as copies. */
static void on_answer(void *arg, int rc, const char *text)
{
    struct load *load = arg;
    struct run *run = run_find(load->daemon, load->run);
    uint32_t next = run && rc == BL_EABORTED ? place_next(load, run) : load->place_count;

    if (next == load->place_count) {
        load_end(load, rc, text);
        return;
    }
    event(load->daemon->events, EVENT_LOAD_ELSEWHERE, "job=%s root=%s reason=%s", run->name,
          run->job->roots[load->places[next].root].path, text);
    load_ask(load, run, next);
}

void engine_load(struct run *run, struct arena *arena, const struct wire_disk_load *asked,
                 engine_loaded_fn done, void *arg)
{
    if (root_find(run, asked->root) == run->job->root_count) {
        done(arg, BL_EFOREIGN, "not a root of this job"); /* a rank reads where its job says */
        return;
    }
    struct load *load = calloc(1, sizeof(*load));

    BL_ASSERT(load != NULL);
    *load = (struct load){.daemon = run->daemon,
                          .run = run->id,
                          .arena = arena->id,
                          .slot = asked->slot,
                          .done = done,
                          .arg = arg};
    BL_ASSERT(bl_extent_list_copy(&load->extents, &asked->extents) == 0);
    places_fill(load, run, asked);
    load_ask(load, run, place_next(load, run));
}
