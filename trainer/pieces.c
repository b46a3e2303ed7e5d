/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/pieces.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"

struct piece {
    const char *text; /* view of pieces->data */
    uint32_t bytes;
    float score;
    uint8_t byte; /* what a "<0x..>" writes */
    uint8_t is_byte;
};

struct pieces {
    char *data; /* owned */
    struct piece *pieces;
    uint32_t *sorted; /* tokens by text, of equal texts the lower first */
    uint32_t count;
};

void pieces_close(struct pieces *pieces)
{
    if (pieces != NULL) {
        free(pieces->data);
        free(pieces->pieces);
        free(pieces->sorted);
        free(pieces);
    }
}

static int compare_text(const char *a, uint32_t a_bytes, const char *b, uint32_t b_bytes)
{
    int order = memcmp(a, b, a_bytes < b_bytes ? a_bytes : b_bytes);
    return order != 0 ? order : (a_bytes > b_bytes) - (a_bytes < b_bytes);
}

static int order_tokens(const void *a_, const void *b_, void *opaque)
{
    const struct piece *pieces = opaque;
    uint32_t a = *(const uint32_t *)a_, b = *(const uint32_t *)b_;
    int order = compare_text(pieces[a].text, pieces[a].bytes, pieces[b].text, pieces[b].bytes);
    return order != 0 ? order : (a > b) - (a < b);
}

/* The lowest token of this text, or -1. */
static int32_t find(const struct pieces *p, const char *text, uint32_t bytes)
{
    uint32_t lo = 0, hi = p->count;
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;
        const struct piece *at = &p->pieces[p->sorted[mid]];
        if (compare_text(at->text, at->bytes, text, bytes) < 0) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    if (lo == p->count) {
        return -1;
    }
    const struct piece *at = &p->pieces[p->sorted[lo]];
    return compare_text(at->text, at->bytes, text, bytes) == 0 ? (int32_t)p->sorted[lo] : -1;
}

static uint32_t u32_at(const char *data)
{
    const unsigned char *at = (const unsigned char *)data;
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static int hex_digit(char c)
{
    const char *digits = "0123456789ABCDEF", *at = c == 0 ? NULL : strchr(digits, c);
    return at == NULL ? -1 : (int)(at - digits);
}

/* Is the piece "<0xHH>"? */
static void see_byte(struct piece *piece)
{
    if (piece->bytes == 6 && memcmp(piece->text, "<0x", 3) == 0 && piece->text[5] == '>') {
        int high = hex_digit(piece->text[3]), low = hex_digit(piece->text[4]);
        piece->is_byte = high >= 0 && low >= 0;
        piece->byte = (uint8_t)(16 * high + low);
    }
}

static int read_pieces(struct pieces *p, size_t bytes, struct bl_errmsg *msg)
{
    size_t at = 4;
    if (bytes < 4) {
        return bl_err(msg, BL_ECONFIG, "no tokenizer of llama2.c: %zu bytes", bytes);
    }
    for (uint32_t i = 0; i < p->count; i++) {
        struct piece *piece = &p->pieces[i];
        if (bytes - at < 8) {
            return bl_err(msg, BL_ECONFIG, "it ends before token %u of %u", i, p->count);
        }
        uint32_t score = u32_at(p->data + at);
        memcpy(&piece->score, &score, sizeof score);
        piece->bytes = u32_at(p->data + at + 4);
        at += 8;
        if (piece->bytes > PIECES_LENGTH_MAX || piece->bytes > bytes - at || isnan(piece->score)) {
            return bl_err(msg, BL_ECONFIG, "token %u: a piece of %u bytes, score %g", i,
                          piece->bytes, (double)piece->score);
        }
        piece->text = p->data + at;
        at += piece->bytes;
        see_byte(piece);
    }
    if (at != bytes) {
        return bl_err(msg, BL_ECONFIG, "%zu bytes are left after %u tokens: of another model?",
                      bytes - at, p->count);
    }
    return 0;
}

/* Takes `data`. */
static int make(struct pieces **ret, char *data, size_t bytes, uint32_t vocab,
                struct bl_errmsg *msg)
{
    struct pieces *p = calloc(1, sizeof *p);
    if (p == NULL) {
        free(data);
        return bl_err_code(msg, -ENOMEM, "tokenizer");
    }
    p->data = data;
    p->count = vocab;
    /* Each piece takes 8 bytes of the file: the memory is bounded by it. */
    int rc = vocab > bytes / 8
                 ? bl_err(msg, BL_ECONFIG, "%zu bytes cannot hold %u tokens", bytes, vocab)
                 : 0;
    if (rc == 0) {
        p->pieces = calloc(vocab + 1, sizeof *p->pieces);
        p->sorted = calloc(vocab + 1, sizeof *p->sorted);
        rc = p->pieces == NULL || p->sorted == NULL ? bl_err_code(msg, -ENOMEM, "tokenizer")
                                                    : read_pieces(p, bytes, msg);
    }
    if (rc != 0) {
        pieces_close(p);
        return rc;
    }
    for (uint32_t i = 0; i < vocab; i++) {
        p->sorted[i] = i;
    }
    qsort_r(p->sorted, vocab, sizeof *p->sorted, order_tokens, p->pieces);
    *ret = p;
    return 0;
}

int pieces_decode(struct pieces **ret, const void *data, size_t bytes, uint32_t vocab,
                  struct bl_errmsg *msg)
{
    char *copy = malloc(bytes + 1);
    if (copy == NULL) {
        return bl_err_code(msg, -ENOMEM, "tokenizer");
    }
    memcpy(copy, data, bytes);
    return make(ret, copy, bytes, vocab, msg);
}

int pieces_open(struct pieces **ret, const char *path, uint32_t vocab, struct bl_errmsg *msg)
{
    char *data = NULL;
    size_t bytes;
    int rc = bl_file_read(path, PIECES_FILE_BYTES_MAX, &data, &bytes, msg);
    if (rc == 0) {
        rc = make(ret, data, bytes, vocab, msg);
        rc = rc != 0 ? bl_err_in(msg, rc, "%s", path) : 0;
    }
    return rc;
}

/* ---- Encoding ---- */

/* Bytes of the character at `at`: one that is cut or wrong counts as one byte. */
static uint32_t char_bytes(const char *at, size_t left)
{
    unsigned char first = (unsigned char)*at;
    uint32_t bytes = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : first >= 0xc0 ? 2 : 1;
    for (uint32_t i = 1; i < bytes; i++) {
        if (i >= left || ((unsigned char)at[i] & 0xc0) != 0x80) {
            return 1;
        }
    }
    return bytes;
}

struct joiner {
    const struct pieces *pieces;
    int32_t *tokens;
    int32_t *joined; /* [count]: the token of tokens[i] and its right neighbour, or -1 */
    uint32_t count;
    char *text; /* room for two pieces */
};

static void join_look(struct joiner *j, uint32_t i)
{
    j->joined[i] = -1;
    if (i + 1 < j->count) {
        const struct piece *a = &j->pieces->pieces[j->tokens[i]];
        const struct piece *b = &j->pieces->pieces[j->tokens[i + 1]];
        memcpy(j->text, a->text, a->bytes);
        memcpy(j->text + a->bytes, b->text, b->bytes);
        j->joined[i] = find(j->pieces, j->text, a->bytes + b->bytes);
    }
}

static void join_all(struct joiner *j)
{
    for (uint32_t i = 0; i < j->count; i++) {
        join_look(j, i);
    }
    for (;;) {
        uint32_t best = j->count;
        for (uint32_t i = 0; i < j->count; i++) {
            if (j->joined[i] >= 0 &&
                (best == j->count || j->pieces->pieces[j->joined[i]].score >
                                         j->pieces->pieces[j->joined[best]].score)) {
                best = i;
            }
        }
        if (best == j->count) {
            return;
        }
        j->tokens[best] = j->joined[best];
        uint32_t rest = --j->count - best - 1;
        memmove(j->tokens + best + 1, j->tokens + best + 2, rest * sizeof *j->tokens);
        memmove(j->joined + best + 1, j->joined + best + 2, rest * sizeof *j->joined);
        join_look(j, best);
        if (best > 0) {
            join_look(j, best - 1);
        }
    }
}

/* One token a character, or its bytes'. */
static int first_tokens(const struct pieces *p, const char *text, size_t bytes, int32_t *tokens,
                        uint32_t *ret_count, struct bl_errmsg *msg)
{
    uint32_t count = 0;
    int32_t space = find(p, " ", 1);
    if (bytes > 0 && space >= 0) {
        tokens[count++] = space;
    }
    for (size_t at = 0; at < bytes;) {
        uint32_t n = char_bytes(text + at, bytes - at);
        int32_t token = find(p, text + at, n);
        if (token >= 0) {
            tokens[count++] = token;
        }
        for (uint32_t i = 0; token < 0 && i < n; i++) {
            uint32_t byte = (unsigned char)text[at + i] + PIECES_FIRST_BYTE;
            if (byte >= p->count) {
                return bl_err(msg, BL_ECONFIG, "byte %zu of the text has no token", at + i);
            }
            tokens[count++] = (int32_t)byte;
        }
        at += n;
    }
    *ret_count = count;
    return 0;
}

int pieces_encode(const struct pieces *p, const char *text, size_t bytes, int32_t *tokens,
                  uint32_t *ret_count, struct bl_errmsg *msg)
{
    if (bytes > PIECES_TEXT_BYTES_MAX) {
        return bl_err(msg, BL_ELIMIT, "a text of %zu bytes: at most %u", bytes,
                      PIECES_TEXT_BYTES_MAX);
    }
    struct joiner j = {.pieces = p, .tokens = tokens + 1};
    int rc = first_tokens(p, text, bytes, j.tokens, &j.count, msg);
    if (rc != 0) {
        return rc;
    }
    j.joined = calloc(j.count + 1, sizeof *j.joined);
    j.text = malloc(2 * PIECES_LENGTH_MAX);
    if (j.joined == NULL || j.text == NULL) {
        rc = bl_err_code(msg, -ENOMEM, "tokens of %zu bytes", bytes);
    } else {
        join_all(&j);
        tokens[0] = PIECES_BEGIN;
        *ret_count = j.count + 1;
    }
    free(j.joined);
    free(j.text);
    return rc;
}

const char *pieces_text(const struct pieces *p, int32_t before, int32_t token, size_t *ret_bytes)
{
    const struct piece *piece = &p->pieces[token];
    const char *text = piece->text;
    size_t bytes = piece->bytes;
    if (before == PIECES_BEGIN && bytes > 0 && text[0] == ' ') {
        text++;
        bytes--;
    }
    if (piece->is_byte) {
        text = (const char *)&piece->byte;
        bytes = 1;
    }
    if (bytes == 1) {
        unsigned char c = (unsigned char)text[0];
        if (c == 0x7f || (c < 0x20 && !(c >= '\t' && c <= '\r'))) {
            bytes = 0;
        }
    }
    *ret_bytes = bytes;
    return text;
}
