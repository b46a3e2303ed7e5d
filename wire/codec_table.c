/* SPDX-License-Identifier: Apache-2.0 */
/* The engine of codec_table.h: build, read, compare, free; all by table. */
#include "wire/codec_table.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define POOL_BLOCK_BYTES 16384u

/* ---- pool: blocks of zeroed memory, freed together ---- */

struct codec_block {
    struct codec_block *next;
    size_t used, bytes;
    max_align_t data[];
};

struct codec_pool {
    struct codec_block *blocks; /* the newest first */
};

struct codec_pool *codec_pool_new(void)
{
    return calloc(1, sizeof(struct codec_pool));
}

void codec_pool_free(struct codec_pool *pool)
{
    while (pool && pool->blocks) {
        struct codec_block *block = pool->blocks;
        pool->blocks = block->next;
        free(block);
    }
    free(pool);
}

static void *pool_take(struct codec_pool *pool, size_t bytes)
{
    size_t align = _Alignof(max_align_t);
    bytes = (bytes + align - 1) / align * align;
    struct codec_block *block = pool->blocks;
    if (!block || block->bytes - block->used < bytes) {
        size_t want = bytes > POOL_BLOCK_BYTES ? bytes : POOL_BLOCK_BYTES;
        block = calloc(1, sizeof(*block) + want);
        if (!block) {
            return NULL;
        }
        block->bytes = want;
        block->next = pool->blocks;
        pool->blocks = block;
    }
    void *taken = (char *)block->data + block->used;
    block->used += bytes;
    return taken;
}

/* ---- access ---- */

static uint32_t count_of(const struct codec_field *field, const void *message)
{
    uint32_t count;
    memcpy(&count, (const char *)message + field->count_offset, sizeof(count));
    return count;
}

static const void *pointer_of(const struct codec_field *field, const void *message)
{
    const void *pointer;
    memcpy(&pointer, (const char *)message + field->offset, sizeof(pointer));
    return pointer;
}

/* The elements of MSGS or MSGS_IN. */
static const char *elements_of(const struct codec_field *field, const void *message)
{
    return field->kind == CODEC_MSGS ? pointer_of(field, message)
                                     : (const char *)message + field->offset;
}

static size_t word_count(const struct codec_field *field, const void *message)
{
    size_t count = field->size / sizeof(uint64_t);
    const uint64_t *words = (const void *)((const char *)message + field->offset);
    while (count && !words[count - 1]) {
        count--;
    }
    return count;
}

/* ---- build ---- */

struct codec_build {
    struct codec_pool *pool;
    struct bl_errmsg *msg;
};

static int build_message(const struct codec_build *build, const struct codec_table *table,
                         const void *from, ProtobufCMessage **ret);

static int build_over(const struct codec_build *build, const struct codec_table *table,
                      const struct codec_field *field, uint64_t count)
{
    return bl_err(build->msg, BL_ELIMIT, "%s.%s: %llu, at most %u", table->name, field->name,
                  (unsigned long long)count, field->max);
}

static int build_messages(const struct codec_build *build, const struct codec_table *table,
                          const struct codec_field *field, const void *from, void *to,
                          size_t *to_count)
{
    uint32_t count = count_of(field, from);
    if (count > field->max) {
        return build_over(build, table, field, count);
    }
    if (!count) {
        return 0;
    }
    ProtobufCMessage **list = pool_take(build->pool, count * sizeof(ProtobufCMessage *));
    if (!list) {
        return -ENOMEM;
    }
    const char *elements = elements_of(field, from);
    for (uint32_t i = 0; i < count; i++) {
        int rc = build_message(build, field->sub, elements + i * field->sub->size, &list[i]);
        if (rc) {
            return rc;
        }
    }
    memcpy(to, &list, sizeof(list));
    *to_count = count;
    return 0;
}

static int build_text(const struct codec_build *build, const struct codec_table *table,
                      const struct codec_field *field, const void *from, void *to)
{
    const char *text;
    if (field->kind == CODEC_STR) {
        text = (const char *)from + field->offset;
        if (!memchr(text, 0, field->size)) {
            return bl_err(build->msg, BL_EFORMAT, "%s.%s has no end", table->name, field->name);
        }
    } else {
        text = pointer_of(field, from);
        if (!text) {
            return 0;
        }
        size_t bytes = strlen(text);
        if (bytes > field->max) {
            return build_over(build, table, field, bytes);
        }
    }
    memcpy(to, &text, sizeof(text));
    return 0;
}

static int build_field(const struct codec_build *build, const struct codec_table *table,
                       const struct codec_field *field, const void *from, void *to,
                       size_t *to_count)
{
    const char *at = (const char *)from + field->offset;
    switch (field->kind) {
    case CODEC_U32:
    case CODEC_I32:
        memcpy(to, at, sizeof(uint32_t));
        return 0;
    case CODEC_U64:
        memcpy(to, at, sizeof(uint64_t));
        return 0;
    case CODEC_STR:
    case CODEC_TEXT:
        return build_text(build, table, field, from, to);
    case CODEC_BLOB: {
        uint64_t bytes;
        memcpy(&bytes, (const char *)from + field->count_offset, sizeof(bytes));
        if (bytes > field->max) {
            return build_over(build, table, field, bytes);
        }
        ProtobufCBinaryData data = {(size_t)bytes, (uint8_t *)pointer_of(field, from)};
        memcpy(to, &data, sizeof(data));
        return 0;
    }
    case CODEC_WORDS:
        *to_count = word_count(field, from);
        memcpy(to, &at, sizeof(at));
        return 0;
    case CODEC_U64S:
        *to_count = count_of(field, from);
        if (*to_count > field->max) {
            return build_over(build, table, field, *to_count);
        }
        memcpy(to, at, sizeof(void *));
        return 0;
    case CODEC_MSG: {
        ProtobufCMessage *sub = NULL;
        int rc = build_message(build, field->sub, at, &sub);
        memcpy(to, &sub, sizeof(sub));
        return rc;
    }
    case CODEC_MSGS:
    case CODEC_MSGS_IN:
        return build_messages(build, table, field, from, to, to_count);
    }
    return BL_EFORMAT;
}

static int build_message(const struct codec_build *build, const struct codec_table *table,
                         const void *from, ProtobufCMessage **ret)
{
    ProtobufCMessage *message = pool_take(build->pool, table->pb->sizeof_message);
    if (!message) {
        return bl_err(build->msg, -ENOMEM, "out of memory for a %s", table->name);
    }
    protobuf_c_message_init(table->pb, message);
    for (uint32_t i = 0; i < table->field_count; i++) {
        const ProtobufCFieldDescriptor *field = &table->pb->fields[i];
        size_t unused;
        size_t *count = field->label == PROTOBUF_C_LABEL_REPEATED
                            ? (size_t *)((char *)message + field->quantifier_offset)
                            : &unused;
        int rc = build_field(build, table, &table->fields[i], from, (char *)message + field->offset,
                             count);
        if (rc) {
            return rc;
        }
    }
    *ret = message;
    return 0;
}

ProtobufCMessage *codec_table_build(const struct codec_table *table, const void *from,
                                    struct codec_pool *pool, int *ret_rc, struct bl_errmsg *msg)
{
    struct codec_build build = {pool, msg};
    ProtobufCMessage *built = NULL;
    *ret_rc = build_message(&build, table, from, &built);
    return *ret_rc ? NULL : built;
}

/* ---- read ---- */

static int read_message(const struct codec_table *table, const ProtobufCMessage *from, void *ret,
                        struct bl_errmsg *msg);

static int read_over(const struct codec_table *table, const struct codec_field *field,
                     unsigned long long count, struct bl_errmsg *msg)
{
    return bl_err(msg, BL_ELIMIT, "%s.%s: %llu is over its limit", table->name, field->name, count);
}

/* Zeroed array of `count` elements whose capacity is the power of two at or above it, as lists that
 * grow expect. Stored in the field with its count; so a failure later frees it. */
static void *read_array(const struct codec_field *field, size_t count, size_t size, void *ret)
{
    size_t capacity = 1;
    while (capacity < count) {
        capacity *= 2;
    }
    void *array = calloc(capacity, size);
    if (array) {
        uint32_t stored = (uint32_t)count;
        memcpy((char *)ret + field->offset, &array, sizeof(array));
        memcpy((char *)ret + field->count_offset, &stored, sizeof(stored));
    }
    return array;
}

static int read_messages(const struct codec_table *table, const struct codec_field *field,
                         const ProtobufCMessage *const *list, size_t count, void *ret,
                         struct bl_errmsg *msg)
{
    if (count > field->max) {
        return read_over(table, field, count, msg);
    }
    if (!count) {
        return 0;
    }
    char *elements;
    if (field->kind == CODEC_MSGS) {
        elements = read_array(field, count, field->sub->size, ret);
        if (!elements) {
            return bl_err(msg, -ENOMEM, "out of memory for %zu %s", count, field->name);
        }
    } else {
        uint32_t stored = (uint32_t)count;
        memcpy((char *)ret + field->count_offset, &stored, sizeof(stored));
        elements = (char *)ret + field->offset;
    }
    for (size_t i = 0; i < count; i++) {
        int rc = read_message(field->sub, list[i], elements + i * field->sub->size, msg);
        if (rc) {
            return bl_err_in(msg, rc, "%s %zu", field->name, i);
        }
    }
    return 0;
}

static int read_text(const struct codec_table *table, const struct codec_field *field,
                     const char *text, void *ret, struct bl_errmsg *msg)
{
    size_t bytes = text ? strlen(text) : 0;
    size_t max = field->kind == CODEC_STR ? field->size - 1 : field->max;
    if (bytes > max) {
        return read_over(table, field, bytes, msg);
    }
    if (!bytes) {
        return 0;
    }
    char *at = (char *)ret + field->offset;
    if (field->kind == CODEC_TEXT) {
        char *copy = malloc(bytes + 1);
        if (!copy) {
            return bl_err(msg, -ENOMEM, "out of memory for %s", field->name);
        }
        memcpy(at, &copy, sizeof(copy));
        at = copy;
    }
    memcpy(at, text, bytes + 1);
    return 0;
}

static int read_blob(const struct codec_table *table, const struct codec_field *field,
                     const ProtobufCBinaryData *data, void *ret, struct bl_errmsg *msg)
{
    if (data->len > field->max) {
        return read_over(table, field, data->len, msg);
    }
    if (!data->len) {
        return 0;
    }
    uint8_t *copy = malloc(data->len);
    if (!copy) {
        return bl_err(msg, -ENOMEM, "out of memory for %s", field->name);
    }
    memcpy(copy, data->data, data->len);
    uint64_t bytes = data->len;
    memcpy((char *)ret + field->offset, &copy, sizeof(copy));
    memcpy((char *)ret + field->count_offset, &bytes, sizeof(bytes));
    return 0;
}

static int read_words(const struct codec_table *table, const struct codec_field *field,
                      const uint64_t *words, size_t count, void *ret, struct bl_errmsg *msg)
{
    if (field->kind == CODEC_WORDS) {
        if (count > field->size / sizeof(uint64_t)) {
            return read_over(table, field, count, msg);
        }
        if (count) {
            memcpy((char *)ret + field->offset, words, count * sizeof(uint64_t));
        }
        return 0;
    }
    if (count > field->max) {
        return read_over(table, field, count, msg);
    }
    if (!count) {
        return 0;
    }
    uint64_t *copy = read_array(field, count, sizeof(uint64_t), ret);
    if (!copy) {
        return bl_err(msg, -ENOMEM, "out of memory for %zu %s", count, field->name);
    }
    memcpy(copy, words, count * sizeof(uint64_t));
    return 0;
}

static int read_field(const struct codec_table *table, const struct codec_field *field,
                      const void *at, size_t count, void *ret, struct bl_errmsg *msg)
{
    char *to = (char *)ret + field->offset;
    switch (field->kind) {
    case CODEC_U32: {
        uint32_t value = *(const uint32_t *)at;
        if (field->max && value > field->max) {
            return bl_err(msg, BL_EFORMAT, "%s.%s: no such value: %u", table->name, field->name,
                          value);
        }
        memcpy(to, &value, sizeof(value));
        return 0;
    }
    case CODEC_I32:
        memcpy(to, at, sizeof(int32_t));
        return 0;
    case CODEC_U64:
        memcpy(to, at, sizeof(uint64_t));
        return 0;
    case CODEC_STR:
    case CODEC_TEXT:
        return read_text(table, field, *(char *const *)at, ret, msg);
    case CODEC_BLOB:
        return read_blob(table, field, at, ret, msg);
    case CODEC_WORDS:
    case CODEC_U64S:
        return read_words(table, field, *(uint64_t *const *)at, count, ret, msg);
    case CODEC_MSG: {
        const ProtobufCMessage *sub = *(ProtobufCMessage *const *)at;
        return sub ? read_message(field->sub, sub, to, msg) : 0;
    }
    case CODEC_MSGS:
    case CODEC_MSGS_IN:
        return read_messages(table, field, *(const ProtobufCMessage *const *const *)at, count, ret,
                             msg);
    }
    return BL_EFORMAT;
}

static int read_message(const struct codec_table *table, const ProtobufCMessage *from, void *ret,
                        struct bl_errmsg *msg)
{
    for (uint32_t i = 0; i < table->field_count; i++) {
        const ProtobufCFieldDescriptor *field = &table->pb->fields[i];
        size_t count = field->label == PROTOBUF_C_LABEL_REPEATED
                           ? *(const size_t *)((const char *)from + field->quantifier_offset)
                           : 0;
        int rc = read_field(table, &table->fields[i], (const char *)from + field->offset, count,
                            ret, msg);
        if (rc) {
            return rc;
        }
    }
    return table->check ? table->check(ret, msg) : 0;
}

int codec_table_read(const struct codec_table *table, const ProtobufCMessage *from, void *ret,
                     struct bl_errmsg *msg)
{
    memset(ret, 0, table->size);
    return read_message(table, from, ret, msg);
}

/* ---- free, compare ---- */

void codec_table_free(const struct codec_table *table, void *message)
{
    for (uint32_t i = 0; i < table->field_count; i++) {
        const struct codec_field *field = &table->fields[i];
        char *at = (char *)message + field->offset;
        switch (field->kind) {
        case CODEC_TEXT:
        case CODEC_BLOB:
        case CODEC_U64S:
            free((void *)pointer_of(field, message));
            break;
        case CODEC_MSG:
            codec_table_free(field->sub, at);
            break;
        case CODEC_MSGS:
        case CODEC_MSGS_IN: {
            char *elements = (char *)elements_of(field, message);
            uint32_t count = count_of(field, message);
            for (uint32_t k = 0; elements && k < count; k++) {
                codec_table_free(field->sub, elements + k * field->sub->size);
            }
            if (field->kind == CODEC_MSGS) {
                free(elements);
            }
            break;
        }
        default:
            break;
        }
    }
}

static int field_equal(const struct codec_field *field, const void *a, const void *b)
{
    const char *at_a = (const char *)a + field->offset;
    const char *at_b = (const char *)b + field->offset;
    switch (field->kind) {
    case CODEC_STR:
        return !strcmp(at_a, at_b);
    case CODEC_TEXT: {
        const char *text_a = pointer_of(field, a);
        const char *text_b = pointer_of(field, b);
        return !strcmp(text_a ? text_a : "", text_b ? text_b : "");
    }
    case CODEC_BLOB:
    case CODEC_U64S: {
        uint64_t bytes_a = 0;
        uint64_t bytes_b = 0;
        size_t width = field->kind == CODEC_BLOB ? sizeof(uint64_t) : sizeof(uint32_t);
        size_t size = field->kind == CODEC_BLOB ? 1 : sizeof(uint64_t);
        memcpy(&bytes_a, (const char *)a + field->count_offset, width);
        memcpy(&bytes_b, (const char *)b + field->count_offset, width);
        return bytes_a == bytes_b &&
               (!bytes_a || !memcmp(pointer_of(field, a), pointer_of(field, b), bytes_a * size));
    }
    case CODEC_MSG:
        return codec_table_equal(field->sub, at_a, at_b);
    case CODEC_MSGS:
    case CODEC_MSGS_IN: {
        uint32_t count = count_of(field, a);
        int equal = count == count_of(field, b);
        for (uint32_t i = 0; equal && i < count; i++) {
            equal = codec_table_equal(field->sub, elements_of(field, a) + i * field->sub->size,
                                      elements_of(field, b) + i * field->sub->size);
        }
        return equal;
    }
    default:
        return !memcmp(at_a, at_b, field->size);
    }
}

int codec_table_equal(const struct codec_table *table, const void *a, const void *b)
{
    for (uint32_t i = 0; i < table->field_count; i++) {
        if (!field_equal(&table->fields[i], a, b)) {
            return 0;
        }
    }
    return 1;
}
