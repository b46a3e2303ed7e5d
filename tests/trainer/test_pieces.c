/* SPDX-License-Identifier: Apache-2.0 */
/* llama2.c's tokenizer: a small one made here, files that lie, and, with BELAY_TEST_DATA, a real
 * one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/pieces.h"

struct file {
    char data[16384];
    size_t bytes;
};

static void put(struct file *file, float score, const char *text)
{
    uint32_t bytes = (uint32_t)strlen(text);
    memcpy(file->data + file->bytes, &score, 4);
    memcpy(file->data + file->bytes + 4, &bytes, 4);
    memcpy(file->data + file->bytes + 8, text, bytes);
    file->bytes += 8 + bytes;
}

/* 0 to 2 special, 3 to 258 bytes, then letters and what they join to. */
static uint32_t make(struct file *file)
{
    static const struct {
        float score;
        const char *text;
    } more[] = {{-10, " "}, {-11, "a"},  {-12, "b"},     {-13, "c"},      {-1, "ab"},
                {-2, "bc"}, {-3, " ab"}, {-0.5f, "abc"}, {-9, "\xc3\xa9"}};
    char text[16];
    file->bytes = 4;
    memset(file->data, 0, 4);
    put(file, 0, "<unk>");
    put(file, 0, "\n<s>\n");
    put(file, 0, "\n</s>\n");
    for (int i = 0; i < 256; i++) {
        snprintf(text, sizeof text, "<0x%02X>", i);
        put(file, 0, text);
    }
    for (size_t i = 0; i < sizeof more / sizeof more[0]; i++) {
        put(file, more[i].score, more[i].text);
    }
    return 259 + sizeof more / sizeof more[0];
}

static void encodes(const struct pieces *pieces, const char *text, const int32_t *want,
                    uint32_t want_count)
{
    int32_t tokens[64];
    uint32_t count;
    assert_int_equal(pieces_encode(pieces, text, strlen(text), tokens, &count, NULL), 0);
    assert_int_equal(count, want_count);
    for (uint32_t i = 0; i < count; i++) {
        assert_int_equal(tokens[i], want[i]);
    }
}

static void test_neighbours_join_by_the_best_score(void **state)
{
    static struct file file;
    struct pieces *pieces;
    (void)state;
    uint32_t vocab = make(&file);
    assert_int_equal(pieces_decode(&pieces, file.data, file.bytes, vocab, NULL), 0);
    const int32_t nothing[] = {1}, abc[] = {1, 259, 266}, ab[] = {1, 265},
                  bc_first[] = {1, 259, 264, 264}, bytes[] = {1, 259, 3 + 'x', 267, 3 + 0xff};
    encodes(pieces, "", nothing, 1);
    encodes(pieces, "ab", ab, 2);   /* "ab" first, then " ab" */
    encodes(pieces, "abc", abc, 3); /* "ab" joins to "abc" before " ab", whose score is worse */
    encodes(pieces, "bcbc", bc_first, 4);
    encodes(pieces, "x\xc3\xa9\xff", bytes, 5);
    pieces_close(pieces);
}

static void writes(const struct pieces *pieces, int32_t before, int32_t token, const char *want)
{
    size_t bytes;
    const char *text = pieces_text(pieces, before, token, &bytes);
    assert_int_equal(bytes, strlen(want));
    assert_memory_equal(text, want, bytes);
}

static void test_pieces_are_written_without_the_first_space_and_without_controls(void **state)
{
    static struct file file;
    struct pieces *pieces;
    (void)state;
    uint32_t vocab = make(&file);
    assert_int_equal(pieces_decode(&pieces, file.data, file.bytes, vocab, NULL), 0);
    writes(pieces, 1, 265, "ab");
    writes(pieces, 260, 265, " ab");
    writes(pieces, 260, 3 + '\n', "\n");
    writes(pieces, 260, 3 + 'x', "x");
    writes(pieces, 260, 3 + 0xc3, "\xc3");
    writes(pieces, 260, 3 + 0x1b, "");
    writes(pieces, 260, 3 + 0x7f, "");
    pieces_close(pieces);
}

static void refused(const char *data, size_t bytes, uint32_t vocab, const char *text)
{
    struct pieces *pieces = NULL;
    struct bl_errmsg why = {{0}};
    assert_int_equal(pieces_decode(&pieces, data, bytes, vocab, &why), BL_ECONFIG);
    if (strstr(why.text, text) == NULL) {
        fail_msg("\"%s\" without \"%s\"", why.text, text);
    }
}

static void test_files_that_lie_are_refused(void **state)
{
    static struct file file;
    (void)state;
    uint32_t vocab = make(&file), nan = 0x7fc00000, huge = 0x7fffffff;
    refused(file.data, file.bytes, vocab - 1, "bytes are left after");
    refused(file.data, file.bytes, vocab + 1, "it ends before token");
    refused(file.data, file.bytes - 1, vocab, "a piece of 2 bytes");
    refused(file.data, file.bytes, UINT32_MAX, "cannot hold");
    refused(file.data, 3, 0, "no tokenizer");
    memcpy(file.data + 4, &nan, 4);
    refused(file.data, file.bytes, vocab, "token 0");
    make(&file);
    memcpy(file.data + 8, &huge, 4);
    refused(file.data, file.bytes, vocab, "token 0: a piece of 2147483647 bytes");
}

/* What is encoded is written again, whatever it is. */
static void test_a_real_tokenizer_gives_back_what_it_took(void **state)
{
    static const char text[] =
        "Once upon a time, Zo\xc3\xa9 had 3 dogs.\nShe \xf0\x9f\x90\xb6 them!";
    const char *data = getenv("BELAY_TEST_DATA");
    int32_t tokens[sizeof text + 2];
    char path[1024], out[4 * sizeof text];
    struct pieces *pieces;
    size_t at = 0;
    uint32_t count;
    (void)state;
    if (data == NULL) {
        skip();
    }
    snprintf(path, sizeof path, "%s/tok512.bin", data);
    assert_int_equal(pieces_open(&pieces, path, 512, NULL), 0);
    assert_int_equal(pieces_encode(pieces, text, sizeof text - 1, tokens, &count, NULL), 0);
    assert_true(count < sizeof text * 3 / 4);
    for (uint32_t i = 1; i < count; i++) {
        size_t bytes;
        const char *piece = pieces_text(pieces, tokens[i - 1], tokens[i], &bytes);
        memcpy(out + at, piece, bytes);
        at += bytes;
    }
    assert_int_equal(at, sizeof text - 1);
    assert_memory_equal(out, text, at);
    pieces_close(pieces);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_neighbours_join_by_the_best_score),
        cmocka_unit_test(test_pieces_are_written_without_the_first_space_and_without_controls),
        cmocka_unit_test(test_files_that_lie_are_refused),
        cmocka_unit_test(test_a_real_tokenizer_gives_back_what_it_took),
    };
    return cmocka_run_group_tests_name("trainer/pieces", tests, NULL, NULL);
}
