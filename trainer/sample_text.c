/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/sample_text.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "trainer/data.h"

/* GPT-2's lists of merges are text; llama2.c's file begins with a small number. */
static int is_merges(const char *path)
{
    char first[9] = {0};
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return 0;
    }
    size_t bytes = fread(first, 1, sizeof first - 1, file);
    fclose(file);
    return bytes == 8 && memcmp(first, "#version", 8) == 0;
}

static int open_tokenizer(struct sample_text *text, const char *path, uint32_t vocab,
                          struct bl_errmsg *msg)
{
    if (!is_merges(path)) {
        text->end = PIECES_BEGIN;
        return pieces_open(&text->pieces, path, vocab, msg);
    }
    int rc = bpe_open(&text->bpe, path, msg);
    if (rc == 0 && bpe_vocab(text->bpe) > vocab) {
        rc = bl_err(msg, BL_ECONFIG, "%s has %u tokens, the model %u", path, bpe_vocab(text->bpe),
                    vocab);
    }
    text->end = rc == 0 ? (int32_t)bpe_end_of_text(text->bpe) : -1;
    return rc;
}

static int take_tokens(void *arg, const uint32_t *tokens, size_t count)
{
    struct sample_text *text = arg;
    for (size_t i = 0; i < count; i++) {
        text->prompt[text->prompt_len++] = (int32_t)tokens[i];
    }
    return 0;
}

/* Tokens are never more than bytes, and one in front. */
static int encode(struct sample_text *text, const char *prompt, size_t bytes, struct bl_errmsg *msg)
{
    if (text->pieces != NULL) {
        int rc = pieces_encode(text->pieces, prompt, bytes, text->prompt, &text->prompt_len, msg);
        text->given = rc == 0 ? text->prompt_len - 1 : 0;
        return rc;
    }
    if (text->bpe != NULL) {
        text->prompt[text->prompt_len++] = text->end;
        int rc = bpe_encode(text->bpe, prompt, bytes, take_tokens, text, msg);
        text->given = text->prompt_len - 1;
        return rc;
    }
    for (size_t i = 0; i < bytes; i++) {
        text->prompt[i] = (uint8_t)prompt[i];
    }
    text->prompt_len = text->given = (uint32_t)bytes;
    return 0;
}

int sample_text_open(struct sample_text *text, const char *tokenizer, const char *prompt,
                     uint32_t vocab, int any_vocab, struct bl_errmsg *msg)
{
    memset(text, 0, sizeof *text);
    text->end = -1;
    if (prompt == NULL) {
        prompt = tokenizer != NULL ? "" : "\n";
    }
    if (tokenizer == NULL && vocab != TRAIN_BYTE_VOCAB && !any_vocab) {
        return bl_err(msg, BL_ECONFIG, "a vocabulary of %u tokens: --tokenizer FILE is missing",
                      vocab);
    }
    int rc = tokenizer == NULL ? 0 : open_tokenizer(text, tokenizer, vocab, msg);
    size_t bytes = strlen(prompt);
    text->prompt = calloc(bytes + 2, sizeof *text->prompt);
    if (rc == 0 && text->prompt == NULL) {
        rc = bl_err_code(msg, -ENOMEM, "sample");
    }
    if (rc == 0) {
        rc = encode(text, prompt, bytes, msg);
        rc = rc != 0 ? bl_err_in(msg, rc, "--prompt") : 0;
    }
    return rc;
}

int sample_text_room(struct sample_text *text, uint32_t tokens, uint32_t steps,
                     struct bl_errmsg *msg)
{
    text->out_len = tokens != 0 ? tokens : text->given < steps ? steps - text->given : 0;
    text->out = calloc((size_t)text->out_len + 1, sizeof *text->out);
    return text->out == NULL ? bl_err_code(msg, -ENOMEM, "sample") : 0;
}

static void write_token(const struct sample_text *text, int32_t before, int32_t token)
{
    if (text->pieces != NULL) {
        size_t bytes;
        const char *piece = pieces_text(text->pieces, before, token, &bytes);
        fwrite(piece, 1, bytes, stdout);
    } else if (text->bpe != NULL && token < (int32_t)bpe_vocab(text->bpe)) {
        uint32_t bytes;
        const uint8_t *piece = bpe_token_bytes(text->bpe, (uint32_t)token, &bytes);
        fwrite(piece, 1, bytes, stdout);
    } else if (text->bpe == NULL) {
        putchar(token < (int32_t)TRAIN_BYTE_VOCAB ? token : '?');
    }
}

void sample_text_write(const struct sample_text *text)
{
    int is_bytes = text->pieces == NULL && text->bpe == NULL;
    uint32_t first = text->prompt_len - text->given, all = text->prompt_len + text->out_len;
    for (uint32_t i = first; i < all; i++) {
        int32_t token = i < text->prompt_len ? text->prompt[i] : text->out[i - text->prompt_len];
        if (token == text->end && i >= text->prompt_len) {
            break;
        }
        int32_t before = i == 0                  ? -1
                         : i <= text->prompt_len ? text->prompt[i - 1]
                                                 : text->out[i - 1 - text->prompt_len];
        write_token(text, before, token);
    }
    if (is_bytes || isatty(STDOUT_FILENO)) {
        putchar('\n');
    }
}

void sample_text_close(struct sample_text *text)
{
    pieces_close(text->pieces);
    bpe_close(text->bpe);
    free(text->prompt);
    free(text->out);
    memset(text, 0, sizeof *text);
}
