/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A tokenizer in llama2.c's layout: int32 length of the longest piece, then for each token a float
 * score, an int32 length and so many bytes. Token 1 begins a text, tokens 3 to 258 are single bytes
 * (pieces "<0x00>" to "<0xFF>").
 *
 * Text becomes tokens as SentencePiece's BPE does it: a space in front, each character its piece or
 * else its bytes, and then, again and again, the pair of neighbours whose joined piece has the best
 * score becomes one, of equals the leftmost.
 */
#ifndef TRAIN_TRAINER_PIECES_H
#define TRAIN_TRAINER_PIECES_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

#define PIECES_BEGIN          1 /* the token in front of a text; as output it ends one */
#define PIECES_FIRST_BYTE     3
#define PIECES_FILE_BYTES_MAX (64u * 1024 * 1024)
#define PIECES_LENGTH_MAX     4096u
#define PIECES_TEXT_BYTES_MAX 65536u

struct pieces;

/* Reads a file that must hold exactly `vocab` pieces. BL_ECONFIG names file and token, also when
 * there are fewer or more. *ret is owned: pieces_close. */
BL_MUST_CHECK int pieces_open(struct pieces **ret, const char *path, uint32_t vocab,
                              struct bl_errmsg *msg);
/* The same out of memory; for tests. `data` is borrowed for the call. */
BL_MUST_CHECK int pieces_decode(struct pieces **ret, const void *data, size_t bytes, uint32_t vocab,
                                struct bl_errmsg *msg);
void pieces_close(struct pieces *pieces); /* NULL is fine */

/* The tokens of text[bytes], PIECES_BEGIN first, into tokens[bytes + 2]; how many in *ret_count.
 * BL_ELIMIT over PIECES_TEXT_BYTES_MAX; BL_ECONFIG when a byte has no token in so small a
 * vocabulary; -ENOMEM. */
BL_MUST_CHECK int pieces_encode(const struct pieces *pieces, const char *text, size_t bytes,
                                int32_t *tokens, uint32_t *ret_count, struct bl_errmsg *msg);

/* What `token` writes behind `before`: a view of *ret_bytes bytes. After PIECES_BEGIN the leading
 * space falls away; control characters other than white space write nothing. */
const char *pieces_text(const struct pieces *pieces, int32_t before, int32_t token,
                        size_t *ret_bytes);

#endif
