/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the codec: a table per struct, which one engine walks to encode, decode, compare and free.
 * Entry i of a table is the message's i-th field in order of field numbers; names are the same on
 * both sides (a test compares every table with protoc-c's descriptor).
 *
 *        struct wire_plan            codec_plan                      belay__plan__descriptor
 *        world, *members   <--->  {"members", MSGS, offsets, ...} <--->  n_members, **members
 */
#ifndef WIRE_CODEC_TABLE_H
#define WIRE_CODEC_TABLE_H

#include <protobuf-c/protobuf-c.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "wire/frame.h"

enum codec_kind {
    CODEC_U32,    /* uint32_t or an enum; max: greatest value allowed, 0 any */
    CODEC_I32,    /* int32_t */
    CODEC_U64,    /* uint64_t, varint or fixed64 on the wire */
    CODEC_STR,    /* char[size], NUL-terminated */
    CODEC_TEXT,   /* char *, owned, NULL when empty; max: bytes */
    CODEC_BLOB,   /* uint8_t *, owned, with a uint64_t count; max: bytes */
    CODEC_WORDS,  /* uint64_t[size / 8] in place; trailing zeros do not travel */
    CODEC_U64S,   /* uint64_t *, owned, with a uint32_t count; max: count */
    CODEC_MSG,    /* a struct in place */
    CODEC_MSGS,   /* struct *, owned, with a uint32_t count; max: count */
    CODEC_MSGS_IN /* struct[max] in place, with a uint32_t count */
};

struct codec_table;

struct codec_field {
    const char *name;
    enum codec_kind kind;
    uint32_t offset, size, count_offset; /* in the struct; size of the member */
    uint32_t max;
    const struct codec_table *sub; /* of MSG, MSGS, MSGS_IN */
};

struct codec_table {
    const char *name; /* for error texts */
    size_t size;      /* of the struct */
    const ProtobufCMessageDescriptor *pb;
    const struct codec_field *fields;
    uint32_t field_count;
    /* What the kinds cannot say; NULL for none. */
    int (*check)(const void *message, struct bl_errmsg *msg);
};

#define CODEC_PLAIN(s, f, k, m)                                                                    \
    {                                                                                              \
#f, k, offsetof(struct s, f), sizeof(((struct s *)0)->f), 0, m, 0                          \
    }
#define CODEC_COUNTED(s, f, c, k, m, t)                                                            \
    {                                                                                              \
#f, k, offsetof(struct s, f), sizeof(((struct s *)0)->f), offsetof(struct s, c), m, t      \
    }

#define F_U32(s, f)              CODEC_PLAIN(s, f, CODEC_U32, 0)
#define F_ENUM(s, f, m)          CODEC_PLAIN(s, f, CODEC_U32, m)
#define F_I32(s, f)              CODEC_PLAIN(s, f, CODEC_I32, 0)
#define F_U64(s, f)              CODEC_PLAIN(s, f, CODEC_U64, 0)
#define F_STR(s, f)              CODEC_PLAIN(s, f, CODEC_STR, 0)
#define F_TEXT(s, f, m)          CODEC_PLAIN(s, f, CODEC_TEXT, m)
#define F_WORDS(s, f)            CODEC_PLAIN(s, f, CODEC_WORDS, 0)
#define F_BLOB(s, f, c, m)       CODEC_COUNTED(s, f, c, CODEC_BLOB, m, 0)
#define F_U64S(s, f, c, m)       CODEC_COUNTED(s, f, c, CODEC_U64S, m, 0)
#define F_MSGS(s, f, c, m, t)    CODEC_COUNTED(s, f, c, CODEC_MSGS, m, t)
#define F_MSGS_IN(s, f, c, m, t) CODEC_COUNTED(s, f, c, CODEC_MSGS_IN, m, t)
#define F_MSG(s, f, t)                                                                             \
    {                                                                                              \
#f, CODEC_MSG, offsetof(struct s, f), sizeof(((struct s *)0)->f), 0, 0, t                  \
    }

/* Table `codec_<var>` of struct `s` with protoc-c's message `p`, from `fields_<var>`. */
#define CODEC_TABLE(var, s, p, chk)                                                                \
    const struct codec_table codec_##var = {                                                       \
        #s,                                                                                        \
        sizeof(struct s),                                                                          \
        &belay__##p##__descriptor,                                                                 \
        fields_##var,                                                                              \
        sizeof(fields_##var) / sizeof(fields_##var[0]),                                            \
        chk,                                                                                       \
    }

/* Tables that more than one file uses. */
#define CODEC_TABLE_EXTERN(NAME, number, tag) extern const struct codec_table codec_##tag;
WIRE_MESSAGES(CODEC_TABLE_EXTERN)
#undef CODEC_TABLE_EXTERN
extern const struct codec_table codec_extent_list, codec_exit, codec_holder, codec_line_end;

/* The table of a type number, NULL for an unknown one. */
const struct codec_table *codec_table_find(uint32_t type);

/* Does the table fit its descriptor, field by field? 0, or BL_EFORMAT naming what differs. For the
 * tests. */
BL_MUST_CHECK int codec_table_verify(const struct codec_table *table, struct bl_errmsg *msg);

/* The engine, by table. */
int codec_table_equal(const struct codec_table *table, const void *a, const void *b);
void codec_table_free(const struct codec_table *table, void *message);
/* Fills a descriptor's struct `ret` (zeroed here) from an unpacked message. */
BL_MUST_CHECK int codec_table_read(const struct codec_table *table, const ProtobufCMessage *from,
                                   void *ret, struct bl_errmsg *msg);

struct codec_pool; /* memory of one encoding */
struct codec_pool *codec_pool_new(void);
void codec_pool_free(struct codec_pool *pool);

/* Builds a message from a struct; views of the struct's texts inside. NULL: error in *ret_rc. */
ProtobufCMessage *codec_table_build(const struct codec_table *table, const void *from,
                                    struct codec_pool *pool, int *ret_rc, struct bl_errmsg *msg);

#endif
