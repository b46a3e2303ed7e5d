/* SPDX-License-Identifier: Apache-2.0 */
/*
 * GPT-2's byte-pair encoder: text to token numbers, from nothing but the list of merges.
 *
 * Text is cut into words, and no merge goes across the border of two: contractions, an optional
 * space with letters, with digits, or with other signs, and runs of white space without the last
 * (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; the rules are those
 * of https://github.com/openai/gpt-2, src/encoder.py). A word's bytes are then joined pair by pair,
 * the pair that stands first in the list of merges first, of equals the leftmost.
 *
 * Tokens 0 to 255 are single bytes: those that are printable in Latin-1 in ascending order, then
 * the others in ascending order. Token 256 + i is merge i of the list. The number after the last
 * merge is the end of a text.
 */
#ifndef TRAINER_BPE_H
#define TRAINER_BPE_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

#define BPE_MERGES_MAX     1000000u
#define BPE_FILE_BYTES_MAX (64u * 1024 * 1024)
#define BPE_WORD_BYTES_MAX (1u << 22) /* one word; it takes 52 times that while it is encoded */
#define BPE_CACHE_WORDS    32768u     /* memory: about 2 MiB */

struct bpe;

/* Reads a list of merges ("vocab.bpe", "merges.txt": a first line with "#version", then two words a
 * line, in the alphabet in which GPT-2 writes bytes). BL_ECONFIG names file and line: a character
 * that stands for no byte, a word that no line before made, a merge given twice. *ret is owned. */
BL_MUST_CHECK int bpe_open(struct bpe **ret, const char *path, struct bl_errmsg *msg);
void bpe_close(struct bpe *bpe); /* NULL is fine */

/* How many tokens there are, the end of text included; that is the last one. */
uint32_t bpe_vocab(const struct bpe *bpe);
uint32_t bpe_end_of_text(const struct bpe *bpe);

/* Takes a word's tokens; negative ends the encoding with that code. */
typedef int bpe_emit_fn(void *arg, const uint32_t *tokens, size_t count);

/* Encodes a text, which must be UTF-8: BL_EFORMAT says at which byte it is not. "<|endoftext|>" in
 * it is text like any other. Time n log n in the longest word. One thread at a time. */
BL_MUST_CHECK int bpe_encode(struct bpe *bpe, const char *text, size_t bytes, bpe_emit_fn *emit,
                             void *arg, struct bl_errmsg *msg);

/* The bytes of a token: a view of `bpe`; *ret_bytes 0 for the end of text. token < bpe_vocab. */
const uint8_t *bpe_token_bytes(const struct bpe *bpe, uint32_t token, uint32_t *ret_bytes);

#endif
