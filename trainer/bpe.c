/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/bpe.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/digest.h"
#include "base/file.h"
#include "base/utf8.h"

/* Unicode's White_Space, spelled out: PCRE2's \s has one character more. */
#define SPACE                                                                                      \
    "\\t-\\r\\x20\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}"   \
    "\\x{3000}"
#define WORD                                                                                       \
    "'(?:[dmst]|ll|re|ve)|\\x20?+(?:\\p{L}++|\\p{N}++|[^\\p{L}\\p{N}" SPACE "]++)|[" SPACE         \
    "]+(?![^" SPACE "])|[" SPACE "]+"

#define CACHE_WORD_BYTES 24u
#define CACHE_TOKENS     7u
#define NONE             UINT32_MAX

struct merge { /* of a hash table; left NONE: free */
    uint32_t left, right, token;
};

struct token_text {
    uint64_t at; /* in the pool */
    uint32_t bytes;
};

struct cached {
    char word[CACHE_WORD_BYTES];
    uint8_t bytes, count; /* bytes 0: free */
    uint32_t tokens[CACHE_TOKENS];
};

struct symbol { /* of the word in work; a list through the symbols that are left */
    uint32_t token, before, after;
};

struct candidate {             /* of the heap: a pair that could be joined */
    uint32_t token, at, right; /* what it gives; the left symbol; the right one's token then */
};

struct bpe {
    uint32_t byte_token[256];
    uint32_t token_count; /* without the end of text */
    struct merge *merges; /* owned */
    uint32_t merge_mask;
    struct token_text *texts; /* owned */
    uint8_t *pool;            /* owned: the bytes of all tokens */
    uint64_t pool_bytes, pool_max;
    struct cached *cache;   /* owned */
    struct symbol *symbols; /* owned; work_max of them */
    struct candidate *heap; /* owned; 2 work_max */
    uint32_t *tokens;       /* owned; work_max */
    size_t work_max, heap_count;
    pcre2_code *pattern;
    pcre2_match_data *match;
};

/* ---- the alphabet ---- */

static int byte_is_printable(unsigned byte)
{
    return (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
}

/* Characters of the alphabet are below 0x144: printable bytes are their own, the others follow from
 * 0x100 on in their order. -1 for none. */
static int char_byte(uint32_t c)
{
    if (c < 0x100) {
        return byte_is_printable(c) ? (int)c : -1;
    }
    uint32_t place = 0x100;
    for (int byte = 0; byte < 0x100; byte++) {
        if (!byte_is_printable((unsigned)byte) && place++ == c) {
            return byte;
        }
    }
    return -1;
}

static uint64_t pair_slot(uint32_t left, uint32_t right, uint32_t mask)
{
    return bl_mix64((uint64_t)left << 32 | right) & mask;
}

static uint32_t merge_find(const struct bpe *bpe, uint32_t left, uint32_t right)
{
    for (uint64_t i = pair_slot(left, right, bpe->merge_mask);; i = (i + 1) & bpe->merge_mask) {
        const struct merge *merge = &bpe->merges[i];
        if (merge->left == NONE) {
            return NONE;
        }
        if (merge->left == left && merge->right == right) {
            return merge->token;
        }
    }
}

/* ---- reading the list ---- */

struct reader {
    struct bpe *bpe;
    const char *path;
    unsigned line;
    uint32_t *by_text; /* hash table over texts: token or NONE */
    uint32_t mask;
    struct bl_errmsg *msg;
};

static int reader_fail(const struct reader *reader, const char *what)
{
    return bl_err(reader->msg, BL_ECONFIG, "%s:%u: %s", reader->path, reader->line, what);
}

/* The place of a text in the table: its token's, or the free one where it belongs. */
static uint32_t *text_place(const struct reader *reader, const uint8_t *text, uint32_t bytes)
{
    const struct bpe *bpe = reader->bpe;
    uint64_t i = bl_xxh3(text, bytes) & reader->mask;
    for (;; i = (i + 1) & reader->mask) {
        uint32_t token = reader->by_text[i];
        if (token == NONE || (bpe->texts[token].bytes == bytes &&
                              memcmp(bpe->pool + bpe->texts[token].at, text, bytes) == 0)) {
            return &reader->by_text[i];
        }
    }
}

/* Appends a token; its text is already at the end of the pool. */
static void token_add(const struct reader *reader, uint32_t bytes)
{
    struct bpe *bpe = reader->bpe;
    uint32_t *place = text_place(reader, bpe->pool + bpe->pool_bytes, bytes);
    bpe->texts[bpe->token_count] = (struct token_text){bpe->pool_bytes, bytes};
    if (*place == NONE) { /* two merges may give one text; the first is found by it */
        *place = bpe->token_count;
    }
    bpe->pool_bytes += bytes;
    bpe->token_count++;
}

/* Decodes the alphabet's characters up to `end` to bytes at `to`; their number, or 0. */
static uint32_t word_decode(const uint8_t *from, const uint8_t *end, uint8_t *to)
{
    uint32_t bytes = 0;
    while (from < end) {
        int byte = char_byte(bl_utf8_next(&from, end)); /* BL_UTF8_BAD stands for none */
        if (byte < 0) {
            return 0;
        }
        to[bytes++] = (uint8_t)byte;
    }
    return bytes;
}

static int line_read(const struct reader *reader, const uint8_t *line, const uint8_t *end)
{
    struct bpe *bpe = reader->bpe;
    const uint8_t *space = memchr(line, ' ', (size_t)(end - line));
    if (space == NULL || memchr(space + 1, ' ', (size_t)(end - space - 1)) != NULL) {
        return reader_fail(reader, "not two words with a space between them");
    }
    if ((uint64_t)(end - line) > bpe->pool_max - bpe->pool_bytes) {
        return reader_fail(reader, "the list is too long");
    }
    uint8_t *text = bpe->pool + bpe->pool_bytes;
    uint32_t left_bytes = word_decode(line, space, text);
    uint32_t right_bytes = word_decode(space + 1, end, text + left_bytes);
    if (left_bytes == 0 || right_bytes == 0) {
        return reader_fail(reader, "a character that stands for no byte, or an empty word");
    }
    uint32_t left = *text_place(reader, text, left_bytes);
    uint32_t right = *text_place(reader, text + left_bytes, right_bytes);
    if (left == NONE || right == NONE) {
        return reader_fail(reader, "a word that no line before this one makes");
    }
    if (merge_find(bpe, left, right) != NONE) {
        return reader_fail(reader, "the merge was given before");
    }
    uint64_t i = pair_slot(left, right, bpe->merge_mask);
    while (bpe->merges[i].left != NONE) {
        i = (i + 1) & bpe->merge_mask;
    }
    bpe->merges[i] = (struct merge){left, right, bpe->token_count};
    token_add(reader, left_bytes + right_bytes);
    return 0;
}

static void alphabet_add(const struct reader *reader)
{
    struct bpe *bpe = reader->bpe;
    for (int printable = 1; printable >= 0; printable--) {
        for (unsigned byte = 0; byte < 256; byte++) {
            if (byte_is_printable(byte) == printable) {
                bpe->byte_token[byte] = bpe->token_count;
                bpe->pool[bpe->pool_bytes] = (uint8_t)byte;
                token_add(reader, 1);
            }
        }
    }
}

static int list_read(struct bpe *bpe, const char *path, const uint8_t *data, size_t bytes,
                     struct bl_errmsg *msg)
{
    uint32_t lines = 0, slots = 1024;
    for (size_t i = 0; i < bytes; i++) {
        lines += data[i] == '\n';
    }
    if (lines > BPE_MERGES_MAX) {
        return bl_err(msg, BL_ECONFIG, "%s: %u lines, at most %u are read", path, lines,
                      BPE_MERGES_MAX);
    }
    while (slots < 3 * (lines + 256)) {
        slots *= 2;
    }
    struct reader reader = {.bpe = bpe, .path = path, .mask = slots - 1, .msg = msg};
    bpe->merge_mask = slots - 1;
    bpe->pool_max = bytes + 256;
    bpe->pool = malloc(bpe->pool_max);
    bpe->texts = malloc((lines + 257) * sizeof *bpe->texts);
    bpe->merges = malloc(slots * sizeof *bpe->merges);
    reader.by_text = malloc(slots * sizeof *reader.by_text);
    if (bpe->pool == NULL || bpe->texts == NULL || bpe->merges == NULL || reader.by_text == NULL) {
        free(reader.by_text);
        return bl_err_code(msg, -ENOMEM, "%s", path);
    }
    memset(bpe->merges, 0xff, slots * sizeof *bpe->merges); /* NONE */
    memset(reader.by_text, 0xff, slots * sizeof *reader.by_text);
    alphabet_add(&reader);
    int rc = 0;
    for (const uint8_t *at = data, *end = data + bytes; rc == 0 && at < end;) {
        const uint8_t *line_end = memchr(at, '\n', (size_t)(end - at));
        line_end = line_end == NULL ? end : line_end;
        const uint8_t *text_end = line_end > at && line_end[-1] == '\r' ? line_end - 1 : line_end;
        reader.line++;
        int is_version = reader.line == 1 && text_end - at >= 8 && memcmp(at, "#version", 8) == 0;
        if (text_end > at && !is_version) {
            rc = line_read(&reader, at, text_end);
        }
        at = line_end + 1;
    }
    free(reader.by_text);
    return rc;
}

static int pattern_make(struct bpe *bpe, struct bl_errmsg *msg)
{
    int code;
    PCRE2_SIZE at;
    bpe->pattern = pcre2_compile((PCRE2_SPTR)WORD, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP,
                                 &code, &at, NULL);
    if (bpe->pattern == NULL) {
        return bl_err(msg, BL_EFORMAT, "PCRE2 of this system: error %d at %zu of the pattern", code,
                      (size_t)at);
    }
    pcre2_jit_compile(bpe->pattern, PCRE2_JIT_COMPLETE); /* without it only slower */
    bpe->match = pcre2_match_data_create(1, NULL);
    return bpe->match == NULL ? bl_err_code(msg, -ENOMEM, "pattern") : 0;
}

int bpe_open(struct bpe **ret, const char *path, struct bl_errmsg *msg)
{
    char *data = NULL;
    size_t bytes = 0;
    struct bpe *bpe = calloc(1, sizeof *bpe);
    if (bpe == NULL) {
        return bl_err_code(msg, -ENOMEM, "%s", path);
    }
    int rc = bl_file_read(path, BPE_FILE_BYTES_MAX, &data, &bytes, msg);
    rc = rc != 0 ? rc : list_read(bpe, path, (const uint8_t *)data, bytes, msg);
    free(data);
    rc = rc != 0 ? rc : pattern_make(bpe, msg);
    bpe->cache = calloc(BPE_CACHE_WORDS, sizeof *bpe->cache);
    if (rc == 0 && bpe->cache == NULL) {
        rc = bl_err_code(msg, -ENOMEM, "%s", path);
    }
    if (rc != 0) {
        bpe_close(bpe);
        return rc;
    }
    *ret = bpe;
    return 0;
}

void bpe_close(struct bpe *bpe)
{
    if (bpe == NULL) {
        return;
    }
    pcre2_match_data_free(bpe->match);
    pcre2_code_free(bpe->pattern);
    free(bpe->merges);
    free(bpe->texts);
    free(bpe->pool);
    free(bpe->cache);
    free(bpe->symbols);
    free(bpe->heap);
    free(bpe->tokens);
    free(bpe);
}

uint32_t bpe_vocab(const struct bpe *bpe)
{
    return bpe->token_count + 1;
}

uint32_t bpe_end_of_text(const struct bpe *bpe)
{
    return bpe->token_count;
}

const uint8_t *bpe_token_bytes(const struct bpe *bpe, uint32_t token, uint32_t *ret_bytes)
{
    *ret_bytes = token < bpe->token_count ? bpe->texts[token].bytes : 0;
    return token < bpe->token_count ? bpe->pool + bpe->texts[token].at : bpe->pool;
}

/* ---- a word ---- */

static int candidate_before(const struct candidate *a, const struct candidate *b)
{
    return a->token != b->token ? a->token < b->token : a->at < b->at;
}

static void heap_push(struct bpe *bpe, struct candidate candidate)
{
    size_t i = bpe->heap_count++;
    for (; i > 0 && candidate_before(&candidate, &bpe->heap[(i - 1) / 2]); i = (i - 1) / 2) {
        bpe->heap[i] = bpe->heap[(i - 1) / 2];
    }
    bpe->heap[i] = candidate;
}

static struct candidate heap_pop(struct bpe *bpe)
{
    struct candidate top = bpe->heap[0], last = bpe->heap[--bpe->heap_count];
    size_t i = 0;
    for (size_t child = 1; child < bpe->heap_count; child = 2 * i + 1) {
        child += child + 1 < bpe->heap_count &&
                 candidate_before(&bpe->heap[child + 1], &bpe->heap[child]);
        if (!candidate_before(&bpe->heap[child], &last)) {
            break;
        }
        bpe->heap[i] = bpe->heap[child];
        i = child;
    }
    bpe->heap[i] = last;
    return top;
}

static void consider(struct bpe *bpe, uint32_t at)
{
    const struct symbol *left = &bpe->symbols[at];
    if (left->after == NONE) {
        return;
    }
    uint32_t right = bpe->symbols[left->after].token;
    uint32_t token = merge_find(bpe, left->token, right);
    if (token != NONE) {
        heap_push(bpe, (struct candidate){token, at, right});
    }
}

static int work_grow(struct bpe *bpe, size_t bytes, struct bl_errmsg *msg)
{
    if (bytes > BPE_WORD_BYTES_MAX) {
        return bl_err(msg, BL_EFORMAT, "a word of %zu bytes; at most %u are taken", bytes,
                      BPE_WORD_BYTES_MAX);
    }
    if (bytes <= bpe->work_max) {
        return 0;
    }
    size_t want = bytes < 1024 ? 1024 : bytes;
    free(bpe->symbols);
    free(bpe->heap);
    free(bpe->tokens);
    bpe->symbols = malloc(want * sizeof *bpe->symbols);
    bpe->heap = malloc(3 * want * sizeof *bpe->heap); /* one pair a byte, two more a merge */
    bpe->tokens = malloc(want * sizeof *bpe->tokens);
    int ok = bpe->symbols != NULL && bpe->heap != NULL && bpe->tokens != NULL;
    bpe->work_max = ok ? want : 0;
    return ok ? 0 : bl_err_code(msg, -ENOMEM, "a word of %zu bytes", bytes);
}

/* Encodes one word into bpe->tokens; room is there. Returns their number. */
static size_t word_encode(struct bpe *bpe, const uint8_t *word, size_t bytes)
{
    size_t count = 0;
    bpe->heap_count = 0;
    for (uint32_t i = 0; i < bytes; i++) {
        bpe->symbols[i] = (struct symbol){.token = bpe->byte_token[word[i]],
                                          .before = i == 0 ? NONE : i - 1,
                                          .after = i + 1 == bytes ? NONE : i + 1};
    }
    for (uint32_t i = 0; i + 1 < bytes; i++) {
        consider(bpe, i);
    }
    while (bpe->heap_count > 0) {
        struct candidate c = heap_pop(bpe);
        struct symbol *left = &bpe->symbols[c.at];
        if (left->token == NONE || left->after == NONE ||
            bpe->symbols[left->after].token != c.right ||
            merge_find(bpe, left->token, c.right) != c.token) {
            continue; /* one of the two was joined with something else meanwhile */
        }
        struct symbol *right = &bpe->symbols[left->after];
        right->token = NONE;
        left->token = c.token;
        left->after = right->after;
        if (left->after != NONE) {
            bpe->symbols[left->after].before = c.at;
        }
        consider(bpe, c.at);
        if (left->before != NONE) {
            consider(bpe, left->before);
        }
    }
    for (uint32_t i = 0; i != NONE; i = bpe->symbols[i].after) {
        bpe->tokens[count++] = bpe->symbols[i].token;
    }
    return count;
}

static int word_emit(struct bpe *bpe, const char *word, size_t bytes, bpe_emit_fn *emit, void *arg,
                     struct bl_errmsg *msg)
{
    struct cached *cached = NULL;
    if (bytes <= CACHE_WORD_BYTES) {
        cached = &bpe->cache[bl_xxh3(word, bytes) % BPE_CACHE_WORDS];
        if (cached->bytes == bytes && memcmp(cached->word, word, bytes) == 0) {
            return emit(arg, cached->tokens, cached->count);
        }
    }
    int rc = work_grow(bpe, bytes, msg);
    if (rc != 0) {
        return rc;
    }
    size_t count = word_encode(bpe, (const uint8_t *)word, bytes);
    if (cached != NULL && count <= CACHE_TOKENS) {
        memcpy(cached->word, word, bytes);
        memcpy(cached->tokens, bpe->tokens, count * sizeof *bpe->tokens);
        cached->bytes = (uint8_t)bytes;
        cached->count = (uint8_t)count;
    }
    return emit(arg, bpe->tokens, count);
}

/* ---- a text ---- */

int bpe_encode(struct bpe *bpe, const char *text, size_t bytes, bpe_emit_fn *emit, void *arg,
               struct bl_errmsg *msg)
{
    const uint8_t *first = (const uint8_t *)text, *end = first + bytes;
    for (const uint8_t *at = first; at < end;) {
        if (bl_utf8_next(&at, end) == BL_UTF8_BAD) {
            return bl_err(msg, BL_EFORMAT, "byte %zu: not UTF-8", (size_t)(at - first));
        }
    }
    for (size_t at = 0; at < bytes;) {
        int rc = pcre2_match(bpe->pattern, first, bytes, at, PCRE2_NO_UTF_CHECK | PCRE2_ANCHORED,
                             bpe->match, NULL);
        if (rc < 0) {
            return bl_err(msg, BL_EFORMAT, "byte %zu: PCRE2 error %d", at, rc);
        }
        size_t word_end = pcre2_get_ovector_pointer(bpe->match)[1];
        rc = word_emit(bpe, text + at, word_end - at, emit, arg, msg);
        if (rc != 0) {
            return rc;
        }
        at = word_end;
    }
    return 0;
}
