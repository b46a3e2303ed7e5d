/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The end of a part of codec zstd, in two skippable frames, which zstd passes over:
 *
 *     | 184D2A5B | size | index |  | 184D2A5E | size | stored, decoded of each frame | count 00
 * 8F92EAB1 |
 *
 * The second is the seek table of zstd's seekable format. Its last entry is the index's frame, with
 * 0 bytes decoded, so the end of the file tells where the index is.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/part.h"

#define SKIPPABLE_INDEX      0x184d2a5bu
#define SKIPPABLE_SEEK_TABLE 0x184d2a5eu
#define SEEK_TABLE_MAGIC     0x8f92eab1u
#define SKIPPABLE_BYTES      8u /* magic and size before the content */
#define SEEK_ENTRY_BYTES     8u
#define SEEK_FOOTER_BYTES    9u /* count, descriptor, magic */

static void put32(uint8_t *at, uint64_t value)
{
    for (int i = 0; i < 4; i++) {
        at[i] = (uint8_t)(value >> (8 * i));
    }
}

static uint32_t get32(const uint8_t *at)
{
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static uint64_t table_bytes(uint64_t entries)
{
    return SKIPPABLE_BYTES + SEEK_ENTRY_BYTES * entries + SEEK_FOOTER_BYTES;
}

uint64_t ckpt_part_tail_bytes(const struct ckpt_index *index)
{
    return SKIPPABLE_BYTES + ckpt_index_bytes(index) + table_bytes(index->frame_count + 1ull);
}

static void table_encode(const struct ckpt_index *index, uint64_t index_frame_bytes, uint8_t *at)
{
    uint64_t entries = index->frame_count + 1ull;

    put32(at, SKIPPABLE_SEEK_TABLE);
    put32(at + 4, table_bytes(entries) - SKIPPABLE_BYTES);
    at += SKIPPABLE_BYTES;
    for (uint32_t i = 0; i < index->frame_count; i++, at += SEEK_ENTRY_BYTES) {
        put32(at, index->frames[i].stored);
        put32(at + 4, index->frames[i].bytes);
    }
    put32(at, index_frame_bytes);
    put32(at + 4, 0);
    at += SEEK_ENTRY_BYTES;
    put32(at, entries);
    at[4] = 0; /* no checksums: the index has better ones */
    put32(at + 5, SEEK_TABLE_MAGIC);
}

int ckpt_part_tail_encode(const struct ckpt_index *index, uint8_t **ret_data, size_t *ret_bytes,
                          uint64_t *ret_digest, struct bl_errmsg *msg)
{
    uint64_t bytes = ckpt_part_tail_bytes(index);
    uint8_t *content = NULL, *data;
    size_t content_bytes = 0;
    int rc = ckpt_index_encode(index, &content, &content_bytes, ret_digest, msg);

    if (rc < 0) {
        return rc;
    }
    data = malloc((size_t)bytes);
    if (data == NULL) {
        free(content);
        return bl_err_code(msg, -ENOMEM, "index of %llu bytes", (unsigned long long)bytes);
    }
    put32(data, SKIPPABLE_INDEX);
    put32(data + 4, content_bytes);
    memcpy(data + SKIPPABLE_BYTES, content, content_bytes);
    free(content);
    table_encode(index, SKIPPABLE_BYTES + content_bytes, data + SKIPPABLE_BYTES + content_bytes);
    *ret_data = data;
    *ret_bytes = (size_t)bytes;
    return 0;
}

int ckpt_part_tail_find(const uint8_t *last, uint64_t file_bytes, uint64_t *ret_bytes,
                        struct bl_errmsg *msg)
{
    const uint8_t *footer = last + CKPT_TAIL_PROBE_BYTES - SEEK_FOOTER_BYTES;
    uint64_t entries = get32(footer), index_bytes = get32(last), bytes;

    if (file_bytes < CKPT_TAIL_PROBE_BYTES || get32(footer + 5) != SEEK_TABLE_MAGIC ||
        footer[4] != 0 || get32(last + 4) != 0) {
        return bl_err(msg, BL_EFORMAT, "does not end in a seek table");
    }
    bytes = index_bytes + table_bytes(entries);
    /* Each frame has 32 bytes in the index: one bounds the other. */
    if (index_bytes < SKIPPABLE_BYTES || index_bytes - SKIPPABLE_BYTES > CKPT_INDEX_BYTES_MAX ||
        entries == 0 || (entries - 1) * 32 > index_bytes || bytes > file_bytes) {
        return bl_err(msg, BL_EFORMAT, "a seek table of %llu frames and an index of %llu bytes",
                      (unsigned long long)entries, (unsigned long long)index_bytes);
    }
    *ret_bytes = bytes;
    return 0;
}

int ckpt_part_tail_decode(struct ckpt_index *ret, const uint8_t *data, size_t bytes,
                          uint64_t file_bytes, const uint64_t *expect, struct bl_errmsg *msg)
{
    struct ckpt_index index = {0};
    size_t content;
    uint8_t *table;
    int rc;

    if (bytes < SKIPPABLE_BYTES || get32(data) != SKIPPABLE_INDEX ||
        get32(data + 4) > bytes - SKIPPABLE_BYTES) {
        return bl_err(msg, BL_EFORMAT, "its index has no frame");
    }
    content = get32(data + 4);
    if (expect != NULL && bl_xxh3(data + SKIPPABLE_BYTES, content) != *expect) {
        return bl_err(msg, BL_EDIGEST, "index: digest differs from the manifest's");
    }
    rc = ckpt_index_decode(&index, data + SKIPPABLE_BYTES, content, msg);
    if (rc < 0) {
        return rc;
    }
    table = malloc((size_t)table_bytes(index.frame_count + 1ull));
    if (table == NULL) {
        rc = bl_err_code(msg, -ENOMEM, "seek table");
    } else if (index.codec != CKPT_CODEC_ZSTD || index.part_bytes != file_bytes ||
               ckpt_part_tail_bytes(&index) != bytes) {
        rc = bl_err(msg, BL_EFORMAT, "%llu bytes, not %llu", (unsigned long long)file_bytes,
                    (unsigned long long)index.part_bytes);
    } else {
        table_encode(&index, SKIPPABLE_BYTES + content, table);
        if (memcmp(table, data + SKIPPABLE_BYTES + content, bytes - SKIPPABLE_BYTES - content) !=
            0) {
            rc = bl_err(msg, BL_EFORMAT, "its seek table is not what the index makes it");
        }
    }
    free(table);
    if (rc < 0) {
        ckpt_index_close(&index);
        return rc;
    }
    *ret = index;
    return 0;
}
