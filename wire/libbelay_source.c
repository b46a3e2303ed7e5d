/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where state is loaded from: sealed slots in this node's memory (mapped for reading) and in that
 * of other nodes (read by ranges over TCP). A copy that cannot be read, or is not what the plan
 * says, is passed over: another may hold the same, and what is missing in the end is an error with
 * a name.
 */
#include "wire/libbelay.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "wire/bulk.h"

#define SOURCE_CHUNK_BYTES (64ull << 20) /* between two looks at whether to go on */

/* Errors that end a load at once instead of passing over one source. */
static int is_end(int rc)
{
    return rc == BL_EGEN || rc == BL_ESTOPPED || rc == BL_ECONFIG || rc == -ENOMEM;
}

static uint32_t bulk_ms(void)
{
    return (uint32_t)bl_time_scaled_ms(LB_BULK_MS);
}

void lb_sources_close(struct lb_sources *sources)
{
    for (uint32_t i = 0; i < sources->count; i++) {
        struct lb_source *source = &sources->items[i];
        bl_extent_list_close(&source->list);
        if (source->owned_map) {
            bl_mem_free(source->map, source->bytes);
        }
    }
    for (uint32_t i = 0; i < sources->bulk_count; i++) {
        wire_sock_close(&sources->bulks[i].sock);
    }
    free(sources->items);
    free(sources->bulks);
    memset(sources, 0, sizeof(*sources));
}

/* Is the slot in this arena what the plan says? Then its list moves to the source. `map` holds at
 * least header and table of the `bytes` bytes. */
static int source_check(const struct belay *b, struct lb_source *source, const void *map,
                        size_t bytes, struct bl_errmsg *msg)
{
    struct wire_arena_info info;
    int rc = wire_arena_read(&info, map, bytes, msg);
    if (rc) {
        return rc;
    }
    const struct wire_slot_info *slot =
        source->copy->slot < info.slot_count ? &info.slots[source->copy->slot] : NULL;
    if (info.arena != source->copy->arena || !slot || slot->state != WIRE_SLOT_SEALED ||
        slot->step != b->plan.step) {
        bl_extent_list_close(&info.extents);
        return bl_err(msg, BL_ENOSTATE, "arena %016llx has no sealed step %llu in slot %u",
                      (unsigned long long)source->copy->arena, (unsigned long long)b->plan.step,
                      source->copy->slot);
    }
    rc = wire_arena_slot_offset(map, bytes, source->copy->slot, &source->slot_offset, msg);
    if (rc) {
        bl_extent_list_close(&info.extents);
        return rc;
    }
    source->list = info.extents;
    return 0;
}

/* ---- this node ---- */

static int local_open(struct belay *b, struct lb_source *source, struct bl_errmsg *msg)
{
    if (source->copy->arena == b->arena.id) {
        source->map = b->arena.map;
        source->bytes = b->arena.bytes;
        return source_check(b, source, source->map, source->bytes, msg);
    }
    struct wire_copy_open question = {.arena = source->copy->arena};
    struct wire_copy_opened answer;
    int fd = -1;
    int rc =
        lb_link_ask(b, WIRE_TYPE_COPY_OPEN, &question, WIRE_TYPE_COPY_OPENED, &answer, &fd, msg);
    if (rc) {
        return rc;
    }
    rc = bl_memfd_check(fd, answer.bytes, &source->bytes, msg);
    if (!rc) {
        source->map = bl_mem_map(fd, source->bytes, 0);
        source->owned_map = source->map != NULL;
        rc = source->map ? source_check(b, source, source->map, source->bytes, msg)
                         : bl_err_code(msg, -errno, "map a copy of %zu bytes", source->bytes);
    }
    close(fd);
    return rc;
}

/* ---- other nodes ---- */

static int bulk_connect(const struct belay *b, struct lb_bulk *bulk, struct bl_errmsg *msg)
{
    struct wire_hello hello = {.run = b->run, .incarnation = b->incarnation};
    memcpy(hello.node, b->node, sizeof(hello.node));
    return wire_bulk_connect(&bulk->sock, bulk->addr, &hello, b->plan.generation, bulk_ms(), msg);
}

/* Waits a little; an error when this generation is over. */
static int bulk_pause(struct belay *b)
{
    pthread_mutex_lock(&b->lock);
    lb_wait(b, lb_now_ms() + LB_BULK_PAUSE_MS);
    int rc = lb_over(b);
    pthread_mutex_unlock(&b->lock);
    return rc;
}

/* A connection that broke (the server sends idle readers away) is made anew. A node that does
 * not know this generation's key yet will hear of it in a moment. */
static int bulk_read(struct belay *b, struct lb_source *source, uint64_t offset, uint64_t bytes,
                     void *out, struct bl_errmsg *msg)
{
    struct lb_bulk *bulk = source->bulk;
    struct wire_bulk_read question = {
        .run = b->run,
        .generation = b->plan.generation,
        .key = {b->plan.comm_key[0], b->plan.comm_key[1]},
        .arena = source->copy->arena,
        .offset = offset,
        .bytes = bytes,
    };
    struct wire_bulk_question ask = {.type = WIRE_TYPE_BULK_READ,
                                     .question = &question,
                                     .bytes = bytes,
                                     .generation = b->plan.generation,
                                     .incarnation = b->incarnation};
    uint64_t patience = lb_now_ms() + bl_time_scaled_ms(LB_BULK_KEY_MS);
    int breaks = 0;
    for (;;) {
        ask.refused = 0;
        int rc = bulk->sock.fd >= 0 ? 0 : bulk_connect(b, bulk, msg);
        if (!rc) {
            rc = wire_bulk_ask(&bulk->sock, &ask, out, bulk_ms(), msg);
        }
        if (!rc) {
            return 0;
        }
        if (!ask.refused) {
            wire_sock_close(&bulk->sock);
        }
        breaks += !ask.refused;
        int again =
            ask.refused ? rc == -EACCES && lb_now_ms() < patience : breaks <= LB_BULK_BREAKS;
        int over = again && ask.refused ? bulk_pause(b) : 0;
        if (over) {
            return over;
        }
        if (!again) {
            return bl_err_in(msg, rc, "bulk read from %s", bulk->addr);
        }
    }
}

static struct lb_bulk *bulk_of(struct lb_sources *sources, const char *addr)
{
    for (uint32_t i = 0; i < sources->bulk_count; i++) {
        if (!strcmp(sources->bulks[i].addr, addr)) {
            return &sources->bulks[i];
        }
    }
    struct lb_bulk *bulk = &sources->bulks[sources->bulk_count++];
    bulk->addr = addr;
    bulk->sock.fd = -1;
    return bulk;
}

/* Reads header and table; where the slot lies is known by them. */
static int remote_open(struct belay *b, struct lb_source *source, struct bl_errmsg *msg)
{
    struct wire_arena_header header;
    int rc = bulk_read(b, source, 0, sizeof(header), &header, msg);
    if (rc) {
        return rc;
    }
    if (header.magic != WIRE_ARENA_MAGIC || header.slot_count > WIRE_SLOTS_MAX ||
        header.data_offset > SOURCE_CHUNK_BYTES || header.data_offset < sizeof(header) ||
        header.slot_bytes > UINT64_MAX / 16) {
        return bl_err(msg, BL_EFORMAT, "arena %016llx: not an arena",
                      (unsigned long long)source->copy->arena);
    }
    uint64_t bytes = header.data_offset + header.slot_bytes * header.slot_count;
    char *head = malloc(header.data_offset);
    if (!head) {
        return bl_err(msg, -ENOMEM, "out of memory for a header");
    }
    rc = bulk_read(b, source, 0, header.data_offset, head, msg);
    if (!rc) {
        rc = source_check(b, source, head, bytes, msg);
    }
    free(head);
    return rc;
}

/* ---- both ---- */

static int source_is_open(const struct lb_sources *sources, const struct wire_copy *copy)
{
    for (uint32_t i = 0; i < sources->count; i++) {
        if (sources->items[i].copy == copy) {
            return 1;
        }
    }
    return 0;
}

int lb_sources_open(struct belay *b, struct lb_sources *sources, int remote, struct bl_errmsg *msg)
{
    int left = remote ? remote : INT32_MAX;
    if (!sources->items) {
        sources->items = calloc(b->plan.copy_count + 1u, sizeof(*sources->items));
        sources->bulks = calloc(b->plan.copy_count + 1u, sizeof(*sources->bulks));
        if (!sources->items || !sources->bulks) {
            return bl_err(msg, -ENOMEM, "out of memory for %u copies", b->plan.copy_count);
        }
    }
    for (uint32_t i = 0; i < b->plan.copy_count && left > 0; i++) {
        const struct wire_copy *copy = &b->plan.copies[i];
        int local = !strcmp(copy->node, b->node) || copy->arena == b->arena.id;
        if (local == (remote != 0) || source_is_open(sources, copy)) {
            continue;
        }
        struct lb_source *source = &sources->items[sources->count];
        memset(source, 0, sizeof(*source));
        source->copy = copy;
        source->bulk = local ? NULL : bulk_of(sources, copy->bulk_addr);
        int rc = local ? local_open(b, source, msg) : remote_open(b, source, msg);
        sources->count++; /* also a failed one: it is not tried again, and closed with the others */
        left--;
        if (is_end(rc)) {
            return rc;
        }
    }
    return 0;
}

int lb_source_copy(struct belay *b, struct lb_source *source, const struct bl_run *run, void *dst,
                   struct bl_errmsg *msg)
{
    for (uint64_t done = 0; done < run->bytes;) {
        uint64_t bytes = run->bytes - done;
        pthread_mutex_lock(&b->lock);
        int rc = lb_over(b);
        pthread_mutex_unlock(&b->lock);
        if (rc) {
            return rc;
        }
        bytes = bytes > SOURCE_CHUNK_BYTES ? SOURCE_CHUNK_BYTES : bytes;
        uint64_t from = source->slot_offset + run->src_offset + done;
        char *to = (char *)dst + run->dst_offset + done;
        if (source->map) {
            memcpy(to, (const char *)source->map + from, bytes);
        } else {
            rc = bulk_read(b, source, from, bytes, to, msg);
            if (rc) {
                return rc;
            }
        }
        done += bytes;
    }
    return 0;
}
