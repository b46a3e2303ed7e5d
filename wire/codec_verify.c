/* SPDX-License-Identifier: Apache-2.0 */
/* Does a table say all of its struct, and the same as belay.proto? Asked by the tests. */
#include "wire/codec_table.h"

#include <string.h>

static int type_fits(const struct codec_field *field, const ProtobufCFieldDescriptor *pb)
{
    int repeated = pb->label == PROTOBUF_C_LABEL_REPEATED;
    int word = pb->type == PROTOBUF_C_TYPE_UINT64 || pb->type == PROTOBUF_C_TYPE_FIXED64;
    switch (field->kind) {
    case CODEC_U32:
        return !repeated && pb->type == PROTOBUF_C_TYPE_UINT32 && field->size == 4;
    case CODEC_I32:
        return !repeated && pb->type == PROTOBUF_C_TYPE_SINT32 && field->size == 4;
    case CODEC_U64:
        return !repeated && word && field->size == 8;
    case CODEC_STR:
        return !repeated && pb->type == PROTOBUF_C_TYPE_STRING && field->size > 8;
    case CODEC_TEXT:
        return !repeated && pb->type == PROTOBUF_C_TYPE_STRING && field->size == sizeof(char *);
    case CODEC_BLOB:
        return !repeated && pb->type == PROTOBUF_C_TYPE_BYTES;
    case CODEC_WORDS:
        return repeated && word && field->size % 8 == 0;
    case CODEC_U64S:
        return repeated && word && field->size == sizeof(void *);
    case CODEC_MSG:
        return !repeated && pb->type == PROTOBUF_C_TYPE_MESSAGE &&
               pb->descriptor == field->sub->pb && field->size == field->sub->size;
    case CODEC_MSGS:
        return repeated && pb->type == PROTOBUF_C_TYPE_MESSAGE && pb->descriptor == field->sub->pb;
    case CODEC_MSGS_IN:
        return repeated && pb->type == PROTOBUF_C_TYPE_MESSAGE &&
               pb->descriptor == field->sub->pb && field->size == field->max * field->sub->size;
    }
    return 0;
}

static size_t kind_align(const struct codec_field *field)
{
    size_t align = 1;
    switch (field->kind) {
    case CODEC_STR:
        return 1;
    case CODEC_U32:
    case CODEC_I32:
        return 4;
    case CODEC_MSG:
    case CODEC_MSGS_IN: /* as its strictest member */
        for (uint32_t i = 0; i < field->sub->field_count; i++) {
            size_t member = kind_align(&field->sub->fields[i]);
            align = member > align ? member : align;
        }
        return align;
    default:
        return 8;
    }
}

/* Every member of the struct is a field or the count of one: walks the bytes and finds the member
 * that lies next, or padding before it. */
static int cover_verify(const struct codec_table *table, struct bl_errmsg *msg)
{
    size_t at = 0;
    for (int found = 1; found;) {
        found = 0;
        for (uint32_t i = 0; i < table->field_count && !found; i++) {
            const struct codec_field *field = &table->fields[i];
            size_t align = kind_align(field);
            size_t count_bytes = field->kind == CODEC_BLOB ? 8 : 4;
            if (field->offset >= at && field->offset == (at + align - 1) / align * align) {
                at = field->offset + field->size;
                found = 1;
            } else if (field->max && field->kind >= CODEC_BLOB && field->count_offset >= at &&
                       field->count_offset == (at + count_bytes - 1) / count_bytes * count_bytes) {
                at = field->count_offset + count_bytes;
                found = 1;
            }
        }
    }
    return (at + 7) / 8 * 8 >= table->size
               ? 0
               : bl_err(msg, BL_EFORMAT, "%s: the member at byte %zu of %zu is in no table",
                        table->name, at, table->size);
}

int codec_table_verify(const struct codec_table *table, struct bl_errmsg *msg)
{
    if (table->field_count != table->pb->n_fields) {
        return bl_err(msg, BL_EFORMAT, "%s: %u fields here, %u in belay.proto", table->name,
                      table->field_count, table->pb->n_fields);
    }
    for (uint32_t i = 0; i < table->field_count; i++) {
        const struct codec_field *field = &table->fields[i];
        const ProtobufCFieldDescriptor *pb = &table->pb->fields[i];
        if (strcmp(field->name, pb->name) || pb->id != i + 1) {
            return bl_err(msg, BL_EFORMAT, "%s: field %u is %s, in belay.proto %s = %u",
                          table->name, i + 1, field->name, pb->name, pb->id);
        }
        if (!type_fits(field, pb)) {
            return bl_err(msg, BL_EFORMAT, "%s.%s: type does not fit", table->name, field->name);
        }
        if (field->sub) {
            int rc = codec_table_verify(field->sub, msg);
            if (rc) {
                return rc;
            }
        }
    }
    return cover_verify(table, msg);
}
