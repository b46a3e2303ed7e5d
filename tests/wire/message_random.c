/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/wire/message_random.h"

#include <stdlib.h>
#include <string.h>

#include "base/digest.h"
#include "wire/codec_table.h"

#define MESSAGE_TYPE(NAME, number, tag) WIRE_TYPE_##NAME,
const enum wire_type message_types[] = {WIRE_MESSAGES(MESSAGE_TYPE)};
#undef MESSAGE_TYPE
const unsigned message_type_count = sizeof(message_types) / sizeof(message_types[0]);

uint64_t random_next(struct random_state *random)
{
    random->state += 0x9e3779b97f4a7c15ull;
    return bl_mix64(random->state);
}

uint64_t random_below(struct random_state *random, uint64_t bound)
{
    return random_next(random) % bound;
}

/* Small, large and full numbers alike: varints have many lengths. */
static uint64_t random_word(struct random_state *random)
{
    return random_next(random) >> random_below(random, 64);
}

static void text_random(char *out, size_t bytes, struct random_state *random)
{
    for (size_t i = 0; i < bytes; i++) {
        out[i] = (char)(' ' + random_below(random, 95));
    }
    out[bytes] = 0;
}

static void list_random(struct bl_extent_list *list, struct random_state *random)
{
    uint32_t count = (uint32_t)random_below(random, 5);
    for (uint32_t i = 0; i < count; i++) {
        struct bl_tensor tensor = {.kind = BL_KIND_PARAM, .dtype = BL_BF16, .dims = 2};
        tensor.kind += (uint32_t)random_below(random, 4);
        tensor.dtype = (enum bl_dtype)(1 + random_below(random, 7));
        tensor.name[0] = (char)('a' + i);
        tensor.shape[0] = 1 + random_below(random, 1000);
        tensor.shape[1] = 1 + random_below(random, 1000);
        uint32_t index;
        if (bl_extent_list_tensor(list, &tensor, &index, NULL)) {
            abort();
        }
        for (uint64_t k = random_below(random, 3); k > 0; k--) {
            struct bl_extent extent;
            uint64_t lo = random_below(random, tensor.shape[0] * tensor.shape[1]);
            bl_extent_whole(&extent, &tensor, index, lo,
                            lo + 1 + random_below(random, tensor.shape[0] * tensor.shape[1] - lo));
            extent.offset = 64 * random_below(random, 1000);
            if (bl_extent_list_add(list, &extent)) {
                abort();
            }
        }
    }
}

static void table_random(const struct codec_table *table, char *message,
                         struct random_state *random);

static void counted_random(const struct codec_field *field, char *message,
                           struct random_state *random)
{
    uint32_t max = field->max < 4 ? field->max : 4;
    uint32_t count = (uint32_t)random_below(random, max + 1u);
    size_t size = field->kind == CODEC_U64S ? sizeof(uint64_t) : field->sub->size;
    char *elements = message + field->offset;
    memcpy(message + field->count_offset, &count, sizeof(count));
    if (field->kind != CODEC_MSGS_IN) {
        elements = count ? calloc(count, size) : NULL;
        memcpy(message + field->offset, &elements, sizeof(elements));
    }
    for (uint32_t i = 0; i < count; i++) {
        if (field->kind == CODEC_U64S) {
            uint64_t word = random_word(random);
            memcpy(elements + i * size, &word, size);
        } else {
            table_random(field->sub, elements + i * size, random);
        }
    }
}

static void owned_random(const struct codec_field *field, char *message,
                         struct random_state *random)
{
    uint64_t bytes = random_below(random, 300);
    char *copy = bytes ? malloc(bytes + 1) : NULL;
    if (copy) {
        text_random(copy, bytes, random);
    }
    memcpy(message + field->offset, &copy, sizeof(copy));
    if (field->kind == CODEC_BLOB) {
        memcpy(message + field->count_offset, &bytes, sizeof(bytes));
    }
}

static void field_random(const struct codec_field *field, char *message,
                         struct random_state *random)
{
    char *at = message + field->offset;
    uint64_t word = random_word(random);
    switch (field->kind) {
    case CODEC_U32:
    case CODEC_I32: {
        uint32_t half = field->max ? (uint32_t)(word % (field->max + 1u)) : (uint32_t)word;
        memcpy(at, &half, sizeof(half));
        break;
    }
    case CODEC_U64:
        memcpy(at, &word, sizeof(word));
        break;
    case CODEC_STR:
        text_random(at, random_below(random, field->size), random);
        break;
    case CODEC_TEXT:
    case CODEC_BLOB:
        owned_random(field, message, random);
        break;
    case CODEC_WORDS:
        for (size_t i = 0; i < field->size; i += sizeof(word)) {
            word = random_below(random, 3) ? random_next(random) : 0;
            memcpy(at + i, &word, sizeof(word));
        }
        break;
    case CODEC_MSG:
        table_random(field->sub, at, random);
        break;
    case CODEC_U64S:
    case CODEC_MSGS:
    case CODEC_MSGS_IN:
        counted_random(field, message, random);
        break;
    }
}

static void table_random(const struct codec_table *table, char *message,
                         struct random_state *random)
{
    if (table == &codec_extent_list) {
        list_random((struct bl_extent_list *)(void *)message, random);
        return;
    }
    for (uint32_t i = 0; i < table->field_count; i++) {
        field_random(&table->fields[i], message, random);
    }
    if (strcmp(table->name, "wire_plan") == 0) { /* whole copies of tp x pp ranks */
        struct wire_plan *plan = (void *)message;
        plan->tp = plan->world % 2 ? plan->world : 0;
        plan->pp = plan->world % 2 ? 1 : plan->world;
    }
    if (table == &codec_rank_directive) { /* the rank must be one of the plan's */
        struct wire_rank_directive *directive = (void *)message;
        directive->has_plan = directive->plan.world != 0;
        directive->rank = directive->plan.world ? directive->rank % directive->plan.world : 0;
    }
}

void message_random(enum wire_type type, void *message, struct random_state *random)
{
    table_random(codec_table_find(type), message, random);
}
