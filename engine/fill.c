/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Filling slots from a checkpoint. Ranks of a node ask at about the same time for parts of the same
 * one: their questions are answered by one load, so that what several of them want is read once.
 * Damage is healed from the copies that the questions name.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "ckpt/reader.h"
#include "engine/engine.h"
#include "engine/peers.h"

struct asked { /* one question */
    struct engine_task *task;
    void *map; /* of its arena; owned */
    size_t bytes;
    uint32_t dest; /* its number, when it could be mapped */
    int rc;
    struct bl_errmsg why;
};

struct healed {
    uint32_t count;
    char text[WIRE_REASON_MAX]; /* of the first */
};

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

static int asked_map(struct asked *asked)
{
    const struct wire_engine_load *message = asked->task->message;
    struct bl_errmsg *msg = &asked->why;
    int rc;

    if (asked->task->fd_count != 1) {
        return bl_err(msg, BL_EPROTO, "one descriptor expected");
    }
    rc = bl_memfd_check(asked->task->fds[0], 4096, &asked->bytes, msg);
    rc = rc < 0 ? rc : check_extents(message, asked->bytes, msg);
    if (rc < 0) {
        return rc;
    }
    asked->map = bl_mem_map(asked->task->fds[0], asked->bytes, 1);
    return asked->map != NULL ? 0
                              : bl_err_code(msg, -ENOMEM, "map of arena %016llx",
                                            (unsigned long long)message->arena);
}

static void tell_healed(struct healed *healed, const char *file, uint32_t chunk, const char *tensor,
                        const char *from)
{
    bl_log(BL_LOG_WARN, "engine", "%s: chunk %u (tensor %s) is damaged, taken from %s", file, chunk,
           tensor, from);
    if (healed->count++ == 0 &&
        snprintf(healed->text, sizeof(healed->text), "%s: chunk %u (tensor %s), taken from %s",
                 file, chunk, tensor, from) >= (int)sizeof(healed->text)) {
        memcpy(healed->text + sizeof(healed->text) - 4, "...", 4);
    }
}

/* Opens a root; a node that has none of its own yet makes it: its parts are on the others. */
static int place_open(struct ckpt_store **ret, struct engine_peers *peers,
                      const struct wire_engine_root *root, struct bl_errmsg *msg)
{
    struct wire_engine_root made = *root;

    engine_peers_root(peers, root);
    made.create = root->apart;
    return engine_root_open_io(ret, &peers->io, &made, msg);
}

/* Where a load reads: the question's root, then its copies, which are opened when they are needed:
 * one that hangs must not hang what does not need it. */
struct loading {
    const struct wire_engine_load *message;
    struct engine_peers *peers;
    struct healed *healed;
    struct ckpt_place places[WIRE_JOB_ROOTS + 1];
    const struct wire_engine_root *roots[WIRE_JOB_ROOTS + 1];
    struct ckpt_store *stores[WIRE_JOB_ROOTS + 1]; /* owned; NULL: not opened */
    uint32_t count;
};

static void on_healed(void *arg, const char *file, uint32_t chunk, const char *tensor,
                      const char *from)
{
    struct loading *loading = arg;

    tell_healed(loading->healed, file, chunk, tensor, from);
}

static int on_open(void *arg, uint32_t place, struct ckpt_store **ret, struct bl_errmsg *msg)
{
    struct loading *loading = arg;
    struct bl_errmsg why = {0};
    int rc = 0;

    if (loading->stores[place] == NULL) {
        rc = place_open(&loading->stores[place], loading->peers, loading->roots[place], &why);
    }
    if (rc < 0) {
        bl_log(BL_LOG_WARN, "engine", "%s cannot give a copy: %s", loading->roots[place]->path,
               why.text);
        return bl_err(msg, rc, "%s", why.text);
    }
    *ret = loading->stores[place];
    return 0;
}

/* The first root that can be opened comes first; those before it are passed over. */
static int places_fill(struct loading *loading, struct bl_errmsg *msg)
{
    const struct wire_engine_load *message = loading->message;
    struct bl_errmsg why = {0};
    int first = 0;

    for (uint32_t i = 0; i <= message->copy_count; i++) {
        struct ckpt_place *place = &loading->places[loading->count];
        int rc;

        loading->roots[loading->count] = i == 0 ? &message->root : &message->copies[i - 1].root;
        place->dir = i == 0 ? message->dir : message->copies[i - 1].dir;
        if (loading->count == 0) {
            rc = on_open(loading, 0, &place->store, &why);
            if (rc < 0) {
                first = i == 0 ? bl_err(msg, rc, "%s", why.text) : first;
                continue;
            }
        }
        loading->count++;
    }
    if (first < 0 && loading->count > 0) {
        tell_healed(loading->healed, message->root.path, 0, "all",
                    ckpt_store_path(loading->places[0].store));
    }
    return loading->count > 0 ? 0 : first;
}

static int load_dests(const struct engine *engine, const struct engine_task *first,
                      const struct ckpt_dest *dests, uint32_t count, struct healed *healed,
                      struct ckpt_load_result *result, struct bl_errmsg *msg)
{
    const struct wire_engine_load *message = first->message;
    struct loading loading = {.message = message, .healed = healed};
    const struct ckpt_reader_config config = {
        .memory_max = engine_load_bytes(engine->memory_bytes),
        .healed = on_healed,
        .open = on_open,
        .arg = &loading,
        .cancel = &first->cancel,
    };
    struct ckpt_reader *reader = NULL;
    int rc;

    loading.peers = calloc(1, sizeof(*loading.peers));
    rc = loading.peers == NULL
             ? bl_err_code(msg, -ENOMEM, "load")
             : engine_peers_init(loading.peers, &message->peers, message->root.run, msg);
    rc = rc < 0 ? rc : places_fill(&loading, msg);
    if (rc == 0) {
        rc = ckpt_reader_open(&reader, loading.places, loading.count, &config, msg);
    }
    if (rc == 0) {
        rc = ckpt_reader_load(reader, dests, count, result, msg);
    }
    ckpt_reader_close(reader);
    for (uint32_t i = 0; i < loading.count; i++) {
        ckpt_store_close(loading.stores[i]);
    }
    if (loading.peers != NULL) {
        engine_peers_close(loading.peers);
    }
    free(loading.peers);
    return rc;
}

static void answer_one(struct engine *engine, const struct asked *asked, int rc,
                       const struct bl_errmsg *why, const struct healed *healed,
                       const struct ckpt_load_result *result)
{
    const struct wire_engine_load *message = asked->task->message;
    struct wire_engine_loaded answer = {
        .request = message->request,
        .rc = rc,
        .elapsed_ms = result->elapsed_us / 1000,
        .healed = healed->count,
    };
    struct bl_errmsg text = {0};

    for (uint32_t i = 0; rc == 0 && i < message->extents.extent_count; i++) {
        const struct bl_extent *extent = &message->extents.extents[i];

        answer.bytes += bl_extent_elems(extent) *
                        bl_dtype_bytes(message->extents.tensors[extent->tensor].dtype);
    }
    if (rc < 0) {
        bl_log(BL_LOG_WARN, "engine", "load: %s", why->text);
    }
    snprintf(text.text, sizeof(text.text), "%s",
             engine_text_without(why->text, message->root.path));
    engine_text(answer.text, rc, &text);
    snprintf(answer.healed_text, sizeof(answer.healed_text), "%s", healed->text);
    engine_answer(engine, WIRE_TYPE_ENGINE_LOADED, &answer);
}

/* Maps all arenas; how many destinations that makes. */
static uint32_t dests_fill(struct asked *asked, uint32_t count, struct ckpt_dest *dests)
{
    uint32_t dest_count = 0;

    for (uint32_t i = 0; i < count; i++) {
        const struct wire_engine_load *message = asked[i].task->message;

        asked[i].rc = asked_map(&asked[i]);
        if (asked[i].rc == 0) {
            asked[i].dest = dest_count;
            dests[dest_count++] = (struct ckpt_dest){
                .list = &message->extents,
                .base = (uint8_t *)asked[i].map + message->data_offset,
            };
        }
    }
    return dest_count;
}

/* What one of them asks for may be missing or damaged; the others need not suffer for it. */
static void load_one_by_one(const struct engine *engine, struct asked *asked, uint32_t count,
                            const struct ckpt_dest *dests, struct healed *healed,
                            struct ckpt_load_result *result)
{
    for (uint32_t i = 0; i < count; i++) {
        if (asked[i].rc == 0) {
            asked[i].rc = load_dests(engine, asked[i].task, &dests[asked[i].dest], 1, healed,
                                     result, &asked[i].why);
        }
    }
}

void engine_load(struct engine *engine, struct engine_task *task)
{
    struct asked asked[ENGINE_QUEUE_MAX + 1] = {{.task = task}};
    struct ckpt_dest dests[ENGINE_QUEUE_MAX + 1];
    struct ckpt_load_result result = {0};
    struct healed healed = {0};
    struct bl_errmsg why = {0};
    uint32_t count = 1, dest_count;
    int rc = 0;

    for (struct engine_task *more = engine_loads_take(engine, task); more != NULL;
         more = more->next) {
        asked[count++].task = more;
    }
    dest_count = dests_fill(asked, count, dests);
    if (dest_count > 0) {
        rc = load_dests(engine, task, dests, dest_count, &healed, &result, &why);
    }
    if (rc < 0 && dest_count > 1 && rc != BL_EABORTED && rc != -ENOMEM) {
        load_one_by_one(engine, asked, count, dests, &healed, &result);
        rc = 0;
    }
    for (uint32_t i = 0; i < count; i++) {
        bool own = asked[i].rc < 0;

        if (asked[i].map != NULL) {
            bl_mem_free(asked[i].map, asked[i].bytes);
        }
        answer_one(engine, &asked[i], own ? asked[i].rc : rc, own ? &asked[i].why : &why, &healed,
                   &result);
        healed.count = 0; /* told once */
        healed.text[0] = '\0';
        if (asked[i].task != task) {
            engine_task_free(asked[i].task);
        }
    }
}
