/* SPDX-License-Identifier: Apache-2.0 */
/* The tokens of a prompt, and the text of what was sampled. */
#ifndef TRAIN_TRAINER_SAMPLE_TEXT_H
#define TRAIN_TRAINER_SAMPLE_TEXT_H

#include <stdint.h>

#include "base/error.h"
#include "trainer/bpe.h"
#include "trainer/pieces.h"

struct sample_text {
    struct pieces *pieces;      /* owned; llama2.c's tokenizer */
    struct bpe *bpe;            /* owned; GPT-2's. Both NULL: tokens are bytes */
    int32_t *prompt;            /* owned */
    uint32_t prompt_len, given; /* given: of those the text's own, without a token in front */
    int32_t *out;               /* owned, by sample_text_room */
    uint32_t out_len;
    int32_t end; /* token that ends a text, or -1 */
};

/* Opens the tokenizer (NULL: bytes, then the vocabulary must be that of bytes unless `any_vocab`)
 * and encodes the prompt (NULL: nothing, with bytes a line break). With a tokenizer the first token
 * is the one that begins a text. BL_ECONFIG when tokenizer and vocabulary do not fit. Close also
 * after an error. */
BL_MUST_CHECK int sample_text_open(struct sample_text *text, const char *tokenizer,
                                   const char *prompt, uint32_t vocab, int any_vocab,
                                   struct bl_errmsg *msg);
/* Takes room for `tokens` more, or when that is 0 for what `steps` leaves behind the prompt. */
BL_MUST_CHECK int sample_text_room(struct sample_text *text, uint32_t tokens, uint32_t steps,
                                   struct bl_errmsg *msg);
/* Prompt and output on standard output, up to the token that ends a text. A line break at the end
 * only for bytes and on a terminal. */
void sample_text_write(const struct sample_text *text);
void sample_text_close(struct sample_text *text);

#endif
