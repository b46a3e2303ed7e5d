/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One file of training data, mapped into memory: text, whose bytes are its tokens, or a shard of
 * tokens in one of two layouts. All numbers are little-endian.
 *
 *     llm.c         NAME.bin  256 int32: magic 20240520, version 1, count; then count uint16
 *                             or magic 20240801, version 7, count; then count uint32
 *                   (https://github.com/karpathy/llm.c, dev/data/data_common.py)
 *     Megatron-LM   NAME.idx  "MMIDIDX\0\0", u64 version 1, u8 type, u64 sequences, u64 documents,
 *                             i32 lengths[sequences], i64 places[sequences], i64 documents[...]:
 *                             34 bytes of head, so the arrays lie unaligned
 *                   NAME.bin  the tokens, sequence after sequence
 *                   (https://github.com/NVIDIA/Megatron-LM,
 * megatron/core/datasets/indexed_dataset.py)
 *
 * A shard is Megatron's when NAME.idx stands beside it, or is what was named.
 */
#ifndef TRAINER_TOKEN_FILE_H
#define TRAINER_TOKEN_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/job.h" /* BL_PATH_MAX */

#define TOKEN_LLMC_HEADER_BYTES 1024u
#define TOKEN_LLMC_MAGIC_U16    20240520u
#define TOKEN_LLMC_MAGIC_U32    20240801u

enum token_type { /* of one token; the numbers are Megatron's */
                  TOKEN_U8 = 1,
                  TOKEN_I16 = 3,
                  TOKEN_I32 = 4,
                  TOKEN_I64 = 5,
                  TOKEN_U16 = 8,
                  TOKEN_U32 = 256 /* llm.c's */
};

struct token_file {
    char path[BL_PATH_MAX]; /* of the tokens */
    const uint8_t *map;     /* of the whole file; NULL when it is empty */
    uint64_t map_bytes;
    uint64_t data_offset; /* of the first token, in bytes */
    uint64_t count;       /* tokens */
    enum token_type type;
    int fd; /* keeps the file; -1: none */
    int64_t mtime_s, mtime_ns;
    uint64_t digest; /* XXH3 of the file's bytes, once token_file_digest made it */
    int digest_known;
};

/* Maps a text file (shard = 0) or a shard. BL_ECONFIG with one line that names file, offset and
 * what is wrong: magic, version, type, a size that is not what the header says, sequences that do
 * not follow one another. An empty text is fine. *ret is the caller's to close, also after an
 * error. */
BL_MUST_CHECK int token_file_open(struct token_file *ret, const char *path, int shard,
                                  struct bl_errmsg *msg);
void token_file_close(struct token_file *file); /* zeroed ones are fine after fd = -1 */

/* Token `index` (below count) as it is stored: UINT32_MAX for a negative one or one that is larger.
 * Any thread. */
uint32_t token_file_at(const struct token_file *file, uint64_t index);

/* Reads the whole file: every token below `vocab`? BL_ECONFIG names the first that is not, with its
 * byte offset. */
BL_MUST_CHECK int token_file_check(const struct token_file *file, uint32_t vocab,
                                   struct bl_errmsg *msg);

/* XXH3 of the whole file; reads all of it the first time. One thread at a time. */
uint64_t token_file_digest(struct token_file *file);

/* Is it still the file that was opened? Costs one system call; where only the time of change
 * differs and the digest is known, the bytes decide. BL_ECONFIG when not: what was trained on and
 * what is there now would be two things. One thread at a time. */
BL_MUST_CHECK int token_file_unchanged(struct token_file *file, struct bl_errmsg *msg);

#endif
