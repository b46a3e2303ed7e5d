/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Arenas and slot headers.
 *
 * A header is published in this order: state WRITING (release) before the first byte of the slot
 * changes; the fields; the checksum; state SEALED (release) as the last store. A rank that dies
 * anywhere before that leaves WRITING or a checksum that does not fit: the slot counts as torn.
 *
 * The extent table in page 1.. is a plain encoding of bl_extent_list: counts, tensors, extents,
 * all little-endian integers of fixed width, its digest in the arena's header.
 */
#include "wire/slot.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define ARENA_PAGE       4096ull
#define ARENA_TABLE_MAX  (256ull << 20) /* no table of a sane state is larger */
#define ARENA_COUNT_MAX  (1u << 22)     /* tensors or extents of one arena */
#define ARENA_WORDS_TENS (2 + BL_TENSOR_DIMS_MAX + BL_TENSOR_NAME_MAX / 8)
#define ARENA_WORDS_EXT  (4 + 2 * BL_TENSOR_DIMS_MAX)

static uint64_t arena_round(uint64_t bytes, uint64_t align)
{
    return (bytes + align - 1) / align * align;
}

uint64_t wire_arena_bytes(uint32_t slot_count, uint64_t state_bytes, uint64_t table_bytes)
{
    if (slot_count == 0 || slot_count > WIRE_SLOTS_MAX || state_bytes > UINT64_MAX / 16 ||
        table_bytes > ARENA_TABLE_MAX) {
        return 0;
    }
    uint64_t head = arena_round(ARENA_PAGE + table_bytes, WIRE_SLOT_ALIGN);
    uint64_t slot = arena_round(state_bytes ? state_bytes : 1, WIRE_SLOT_ALIGN);
    uint64_t all = 0;
    if (__builtin_mul_overflow(slot, (uint64_t)slot_count, &all) ||
        __builtin_add_overflow(all, head, &all) || all > (uint64_t)INT64_MAX) {
        return 0;
    }
    return all;
}

uint64_t wire_arena_table_bytes(const struct bl_extent_list *extents)
{
    return 8 * (2 + (uint64_t)extents->tensor_count * ARENA_WORDS_TENS +
                (uint64_t)extents->extent_count * ARENA_WORDS_EXT);
}

uint64_t wire_arena_state_bytes(const struct bl_extent_list *extents)
{
    uint64_t end = 0;
    for (uint32_t i = 0; i < extents->extent_count; i++) {
        const struct bl_extent *extent = &extents->extents[i];
        uint64_t bytes =
            bl_extent_elems(extent) * bl_dtype_bytes(extents->tensors[extent->tensor].dtype);
        end = extent->offset + bytes > end ? extent->offset + bytes : end;
    }
    return end;
}

static void table_encode(uint64_t *out, const struct bl_extent_list *list)
{
    *out++ = list->tensor_count;
    *out++ = list->extent_count;
    for (uint32_t i = 0; i < list->tensor_count; i++) {
        const struct bl_tensor *tensor = &list->tensors[i];
        *out++ = (uint64_t)tensor->kind | (uint64_t)tensor->dtype << 32;
        *out++ = tensor->dims;
        memcpy(out, tensor->shape, sizeof(tensor->shape));
        out += BL_TENSOR_DIMS_MAX;
        char name[BL_TENSOR_NAME_MAX] = "";
        memcpy(name, tensor->name, strnlen(tensor->name, BL_TENSOR_NAME_MAX - 1));
        memcpy(out, name, sizeof(name));
        out += BL_TENSOR_NAME_MAX / 8;
    }
    for (uint32_t i = 0; i < list->extent_count; i++) {
        const struct bl_extent *extent = &list->extents[i];
        *out++ = extent->tensor;
        memcpy(out, extent->lo, sizeof(extent->lo));
        out += BL_TENSOR_DIMS_MAX;
        memcpy(out, extent->hi, sizeof(extent->hi));
        out += BL_TENSOR_DIMS_MAX;
        *out++ = extent->flat_lo;
        *out++ = extent->flat_hi;
        *out++ = extent->offset;
    }
}

static int tensor_decode(struct bl_tensor *ret, const uint64_t *in, struct bl_errmsg *msg)
{
    ret->kind = (enum bl_tensor_kind)(in[0] & UINT32_MAX);
    ret->dtype = (enum bl_dtype)(in[0] >> 32);
    ret->dims = (uint32_t)in[1];
    memcpy(ret->shape, in + 2, sizeof(ret->shape));
    memcpy(ret->name, in + 2 + BL_TENSOR_DIMS_MAX, BL_TENSOR_NAME_MAX);
    if (in[1] > BL_TENSOR_DIMS_MAX || bl_dtype_bytes(ret->dtype) == 0 ||
        !memchr(ret->name, 0, BL_TENSOR_NAME_MAX) || bl_tensor_elems(ret) == 0) {
        return bl_err(msg, BL_EFORMAT, "arena: a tensor's description is out of bounds");
    }
    return 0;
}

static int extent_decode(struct bl_extent *ret, const uint64_t *in, const struct bl_extent_list *of,
                         uint64_t slot_bytes, struct bl_errmsg *msg)
{
    ret->tensor = (uint32_t)in[0];
    memcpy(ret->lo, in + 1, sizeof(ret->lo));
    memcpy(ret->hi, in + 1 + BL_TENSOR_DIMS_MAX, sizeof(ret->hi));
    ret->flat_lo = in[1 + 2 * BL_TENSOR_DIMS_MAX];
    ret->flat_hi = in[2 + 2 * BL_TENSOR_DIMS_MAX];
    ret->offset = in[3 + 2 * BL_TENSOR_DIMS_MAX];
    if (in[0] >= of->tensor_count) {
        return bl_err(msg, BL_EFORMAT, "arena: an extent names no tensor");
    }
    const struct bl_tensor *tensor = &of->tensors[ret->tensor];
    int rc = bl_extent_check(ret, tensor, msg);
    if (rc < 0) {
        return bl_err_in(msg, rc, "arena");
    }
    uint64_t elem = bl_dtype_bytes(tensor->dtype);
    uint64_t elems = bl_extent_elems(ret);
    if (ret->offset > slot_bytes || elems > (slot_bytes - ret->offset) / elem) {
        return bl_err(msg, BL_EFORMAT, "arena: an extent of %s ends behind its slot", tensor->name);
    }
    return 0;
}

static int table_decode(struct bl_extent_list *ret, const uint64_t *in, uint64_t bytes,
                        uint64_t slot_bytes, struct bl_errmsg *msg)
{
    struct bl_extent_list list = {0};
    uint64_t tensors = in[0];
    uint64_t extents = in[1];
    int rc = 0;

    if (tensors > ARENA_COUNT_MAX || extents > ARENA_COUNT_MAX ||
        bytes != 8 * (2 + tensors * ARENA_WORDS_TENS + extents * ARENA_WORDS_EXT)) {
        return bl_err(msg, BL_EFORMAT, "arena: the extent table's counts do not fit its length");
    }
    in += 2;
    for (uint64_t i = 0; i < tensors && rc == 0; i++, in += ARENA_WORDS_TENS) {
        struct bl_tensor tensor;
        uint32_t index = 0;
        memset(&tensor, 0, sizeof(tensor));
        rc = tensor_decode(&tensor, in, msg);
        rc = rc < 0 ? rc : bl_extent_list_tensor(&list, &tensor, &index, msg);
        if (rc == 0 && index != i) {
            rc = bl_err(msg, BL_EFORMAT, "arena: %s is named twice", tensor.name);
        }
    }
    for (uint64_t i = 0; i < extents && rc == 0; i++, in += ARENA_WORDS_EXT) {
        struct bl_extent extent;
        memset(&extent, 0, sizeof(extent));
        rc = extent_decode(&extent, in, &list, slot_bytes, msg);
        rc = rc < 0 ? rc : bl_extent_list_add(&list, &extent);
    }
    if (rc < 0) {
        bl_extent_list_close(&list);
        return rc;
    }
    *ret = list;
    return 0;
}

static uint64_t arena_check(const struct wire_arena_header *header)
{
    return bl_xxh3(header, offsetof(struct wire_arena_header, check));
}

int wire_arena_format(void *map, uint64_t bytes, uint64_t run, uint64_t incarnation, uint64_t arena,
                      uint32_t slot_count, const struct bl_extent_list *extents,
                      struct bl_errmsg *msg)
{
    struct wire_arena_header *header = map;
    uint64_t table = wire_arena_table_bytes(extents);
    uint64_t state = wire_arena_state_bytes(extents);
    uint64_t need = wire_arena_bytes(slot_count, state, table);

    if (need == 0 || need > bytes) {
        return bl_err(msg, -EINVAL, "arena: %llu bytes are too few", (unsigned long long)bytes);
    }
    memset(header, 0, sizeof(*header));
    header->magic = WIRE_ARENA_MAGIC;
    header->version = WIRE_ARENA_VERSION;
    header->slot_count = slot_count;
    header->run = run;
    header->incarnation = incarnation;
    header->arena = arena;
    header->slot_bytes = arena_round(state ? state : 1, WIRE_SLOT_ALIGN);
    header->table_offset = ARENA_PAGE;
    header->table_bytes = table;
    header->data_offset = arena_round(ARENA_PAGE + table, WIRE_SLOT_ALIGN);
    table_encode((uint64_t *)((char *)map + ARENA_PAGE), extents);
    header->table_digest = bl_xxh3((char *)map + ARENA_PAGE, table);
    header->check = arena_check(header);
    return 0;
}

static int arena_bounds(const struct wire_arena_header *header, uint64_t bytes,
                        struct bl_errmsg *msg)
{
    if (header->magic != WIRE_ARENA_MAGIC || header->check != arena_check(header)) {
        return bl_err(msg, BL_EFORMAT, "arena: its header is not one of ours");
    }
    if (header->version != WIRE_ARENA_VERSION) {
        return bl_err(msg, BL_EVERSION, "arena: version %u", header->version);
    }
    if (header->slot_count == 0 || header->slot_count > WIRE_SLOTS_MAX ||
        header->table_offset != ARENA_PAGE || header->table_bytes < 16 ||
        header->table_bytes > ARENA_TABLE_MAX || header->table_bytes % 8 != 0 ||
        header->data_offset > bytes || header->table_bytes > bytes - ARENA_PAGE ||
        header->slot_bytes > (bytes - header->data_offset) / header->slot_count) {
        return bl_err(msg, BL_EFORMAT, "arena: its header does not fit its %llu bytes",
                      (unsigned long long)bytes);
    }
    return 0;
}

int wire_arena_read(struct wire_arena_info *ret, const void *map, uint64_t bytes,
                    struct bl_errmsg *msg)
{
    if (bytes < 2 * ARENA_PAGE) {
        return bl_err(msg, BL_EFORMAT, "arena: only %llu bytes", (unsigned long long)bytes);
    }
    /* The owner could change its header under us: work on a copy. */
    struct wire_arena_header header;
    memcpy(&header, map, sizeof(header));
    int rc = arena_bounds(&header, bytes, msg);
    if (rc < 0) {
        return rc;
    }
    uint64_t *table = malloc(header.table_bytes);
    if (!table) {
        return bl_err_code(msg, -ENOMEM, "arena");
    }
    memcpy(table, (const char *)map + header.table_offset, header.table_bytes);
    struct wire_arena_info info = {
        .arena = header.arena, .incarnation = header.incarnation, .slot_count = header.slot_count};
    if (bl_xxh3(table, header.table_bytes) != header.table_digest) {
        rc = bl_err(msg, BL_EDIGEST, "arena: its extent table was changed");
    } else {
        rc = table_decode(&info.extents, table, header.table_bytes, header.slot_bytes, msg);
    }
    free(table);
    if (rc < 0) {
        return rc;
    }
    const struct wire_arena_header *shared = map;
    for (uint32_t i = 0; i < info.slot_count; i++) {
        wire_slot_read(&shared->slots[i], &info.slots[i]);
    }
    *ret = info;
    return 0;
}

int wire_arena_slot_offset(const void *map, uint64_t bytes, uint32_t index, uint64_t *ret_offset,
                           struct bl_errmsg *msg)
{
    struct wire_arena_header header;
    if (bytes < 2 * ARENA_PAGE) {
        return bl_err(msg, BL_EFORMAT, "arena: only %llu bytes", (unsigned long long)bytes);
    }
    memcpy(&header, map, sizeof(header));
    int rc = arena_bounds(&header, bytes, msg);
    if (rc == 0 && index >= header.slot_count) {
        rc = bl_err(msg, -EINVAL, "arena: slot %u of %u", index, header.slot_count);
    }
    if (rc == 0) {
        *ret_offset = header.data_offset + header.slot_bytes * index;
    }
    return rc;
}

void *wire_arena_slot(void *map, uint32_t index)
{
    const struct wire_arena_header *header = map;
    return (char *)map + header->data_offset + header->slot_bytes * index;
}

/* Over the fields as published; `pinned` changes on its own and is left out. */
static uint64_t slot_check(const struct wire_slot_header *slot)
{
    uint64_t words[8] = {WIRE_SLOT_SEALED, slot->run,  slot->incarnation, slot->generation,
                         slot->line,       slot->step, slot->digest[0],   slot->digest[1]};
    return bl_xxh3(words, sizeof(words));
}

void wire_slot_begin(struct wire_slot_header *slot, uint64_t run, uint64_t incarnation,
                     uint64_t generation, uint64_t line, uint64_t step)
{
    atomic_store_explicit(&slot->state, WIRE_SLOT_WRITING, memory_order_release);
    atomic_store_explicit(&slot->check, 0, memory_order_release);
    /* No byte of the slot, and no field, may change before the two stores above are seen. */
    atomic_thread_fence(memory_order_seq_cst);
    atomic_store_explicit(&slot->pinned, 0, memory_order_relaxed);
    slot->run = run;
    slot->incarnation = incarnation;
    slot->generation = generation;
    slot->line = line;
    slot->step = step;
    slot->digest[0] = 0;
    slot->digest[1] = 0;
}

void wire_slot_publish(struct wire_slot_header *slot, const struct bl_state_digest *digest)
{
    slot->digest[0] = digest->sum[0];
    slot->digest[1] = digest->sum[1];
    atomic_store_explicit(&slot->check, slot_check(slot), memory_order_release);
    atomic_store_explicit(&slot->state, WIRE_SLOT_SEALED, memory_order_release);
}

void wire_slot_free(struct wire_slot_header *slot)
{
    atomic_store_explicit(&slot->state, WIRE_SLOT_FREE, memory_order_release);
    atomic_store_explicit(&slot->check, 0, memory_order_release);
    atomic_store_explicit(&slot->pinned, 0, memory_order_release);
}

void wire_slot_pin(struct wire_slot_header *slot, int pinned)
{
    atomic_store_explicit(&slot->pinned, pinned ? 1 : 0, memory_order_release);
}

void wire_slot_read(const struct wire_slot_header *slot, struct wire_slot_info *ret)
{
    struct wire_slot_info info = {0};
    uint32_t state = atomic_load_explicit(&slot->state, memory_order_acquire);
    uint64_t check = atomic_load_explicit(&slot->check, memory_order_acquire);

    info.state = state == WIRE_SLOT_FREE ? WIRE_SLOT_FREE : WIRE_SLOT_WRITING;
    info.pinned = atomic_load_explicit(&slot->pinned, memory_order_acquire);
    info.generation = slot->generation;
    info.line = slot->line;
    info.step = slot->step;
    info.digest.sum[0] = slot->digest[0];
    info.digest.sum[1] = slot->digest[1];
    /* Sealed only if the fields are those that the checksum was made of, and nothing began
     * meanwhile. */
    atomic_thread_fence(memory_order_acquire);
    if (state == WIRE_SLOT_SEALED && check == slot_check(slot) &&
        atomic_load_explicit(&slot->state, memory_order_acquire) == WIRE_SLOT_SEALED &&
        atomic_load_explicit(&slot->check, memory_order_acquire) == check) {
        info.state = WIRE_SLOT_SEALED;
    }
    *ret = info;
}
