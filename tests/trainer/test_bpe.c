/* SPDX-License-Identifier: Apache-2.0 */
/* The byte-pair encoder against its plain definition, its words, and the lists that it refuses. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "trainer/bpe.h"

#define MERGES 200

static char list_path[64];

static int setup(void **state)
{
    (void)state;
    snprintf(list_path, sizeof list_path, "/tmp/belay-bpe-XXXXXX");
    int fd = mkstemp(list_path);
    assert_true(fd >= 0);
    close(fd);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    return unlink(list_path);
}

static void write_list(const char *text, size_t bytes)
{
    FILE *f = fopen(list_path, "we");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, bytes, f), bytes);
    assert_int_equal(fclose(f), 0);
}

struct tokens {
    uint32_t at[4096];
    size_t count;
};

static int keep(void *arg, const uint32_t *tokens, size_t count)
{
    struct tokens *into = arg;
    assert_true(into->count + count <= sizeof into->at / sizeof *into->at);
    memcpy(into->at + into->count, tokens, count * sizeof *tokens);
    into->count += count;
    return 0;
}

static struct bpe *open_list(void)
{
    struct bpe *bpe;
    struct bl_errmsg msg = {{0}};
    if (bpe_open(&bpe, list_path, &msg) != 0) {
        fail_msg("%s", msg.text);
    }
    return bpe;
}

static void encode(struct bpe *bpe, const char *text, struct tokens *ret)
{
    struct bl_errmsg msg = {{0}};
    ret->count = 0;
    if (bpe_encode(bpe, text, strlen(text), keep, ret, &msg) != 0) {
        fail_msg("%s", msg.text);
    }
}

/* The definition: as long as any pair of neighbours is in the list, join all of the first such. */
static size_t plain_encode(const uint32_t pairs[MERGES][2], uint32_t *word, size_t count)
{
    for (;;) {
        uint32_t best = MERGES;
        for (size_t i = 0; i + 1 < count; i++) {
            for (uint32_t m = 0; m < best; m++) {
                if (pairs[m][0] == word[i] && pairs[m][1] == word[i + 1]) {
                    best = m;
                }
            }
        }
        if (best == MERGES) {
            return count;
        }
        size_t to = 0;
        for (size_t i = 0; i < count; to++) {
            int joins = i + 1 < count && word[i] == pairs[best][0] && word[i + 1] == pairs[best][1];
            word[to] = joins ? 256 + best : word[i];
            i += joins ? 2 : 1;
        }
        count = to;
    }
}

static void test_words_are_joined_as_the_definition_says(void **state)
{
    (void)state;
    uint32_t pairs[MERGES][2], count = 0;
    char texts[256 + MERGES][64], list[MERGES * 130];
    size_t used = 0;
    unsigned seed = 17;
    for (uint32_t t = 0; t < 256; t++) {
        texts[t][0] = (char)(t + '!'); /* token t is byte t + '!' while that is printable */
        texts[t][1] = 0;
    }
    while (count < MERGES) { /* random merges over four letters and what was made of them */
        uint32_t pick[2];
        for (int k = 0; k < 2; k++) {
            uint32_t r = (uint32_t)rand_r(&seed) % (4 + count);
            pick[k] = r < 4 ? 'a' - '!' + r : 256 + r - 4;
        }
        char joined[64];
        int n = snprintf(joined, sizeof joined, "%.31s%.31s", texts[pick[0]], texts[pick[1]]);
        int is_new = n < 20;
        for (uint32_t m = 0; m < count; m++) {
            is_new = is_new && strcmp(texts[256 + m], joined) != 0;
        }
        if (is_new) {
            used += (size_t)snprintf(list + used, sizeof list - used, "%s %s\n", texts[pick[0]],
                                     texts[pick[1]]);
            memcpy(texts[256 + count], joined, sizeof joined);
            memcpy(pairs[count++], pick, sizeof pick);
        }
    }
    write_list(list, used);
    struct bpe *bpe = open_list();
    struct tokens tokens;
    assert_int_equal(bpe_vocab(bpe), 256 + MERGES + 1);
    for (int round = 0; round < 3000; round++) {
        char text[64];
        uint32_t word[64];
        size_t length = 1 + (size_t)rand_r(&seed) % 60;
        for (size_t i = 0; i < length; i++) {
            text[i] = (char)('a' + rand_r(&seed) % 4);
            word[i] = (uint32_t)(text[i] - '!');
        }
        text[length] = 0;
        size_t want = plain_encode(pairs, word, length);
        for (int again = 0; again < 2; again++) { /* the second time from the cache */
            encode(bpe, text, &tokens);
            assert_int_equal(tokens.count, want);
            assert_memory_equal(tokens.at, word, want * sizeof *word);
        }
        size_t bytes = 0;
        for (size_t i = 0; i < want; i++) {
            uint32_t n;
            const uint8_t *part = bpe_token_bytes(bpe, tokens.at[i], &n);
            assert_memory_equal(text + bytes, part, n);
            bytes += n;
        }
        assert_int_equal(bytes, length);
    }
    bpe_close(bpe);
}

static void test_no_merge_goes_across_words(void **state)
{
    (void)state;
    /* The alphabet writes a space as U+0120. */
    static const char list[] = "#version: 0.2\na b\nb \xc4\xa0\n\xc4\xa0 a\n1 a\n' s\n";
    struct tokens tokens;
    write_list(list, sizeof list - 1);
    struct bpe *bpe = open_list();
    encode(bpe, "ab ab 1a it's  b", &tokens);
    /* ab | Ġ ab | Ġ 1 | a | Ġ i t | 's | Ġ | Ġ b: 1a is a merge, but "a" is another word */
    static const uint32_t space = 220;
    const uint32_t want[] = {256,       space,     256, space, '1' - '!', 'a' - '!', space,
                             'i' - '!', 't' - '!', 260, space, space,     'b' - '!'};
    assert_int_equal(tokens.count, sizeof want / sizeof *want);
    assert_memory_equal(tokens.at, want, sizeof want);
    bpe_close(bpe);
}

static int count_up(void *arg, const uint32_t *tokens, size_t n)
{
    (void)tokens;
    *(uint64_t *)arg += n;
    return 0;
}

static void test_a_long_word_takes_no_quadratic_time(void **state)
{
    (void)state;
    static const char list[] = "a a\naa aa\naaaa aaaa\n";
    struct bl_errmsg msg = {{0}};
    const size_t bytes = 1u << 20;
    char *text = malloc(bytes);
    assert_non_null(text);
    memset(text, 'a', bytes);
    write_list(list, sizeof list - 1);
    struct bpe *bpe = open_list();
    uint64_t count = 0;
    uint64_t begun = bl_now_ns();
    assert_int_equal(bpe_encode(bpe, text, bytes, count_up, &count, &msg), 0);
    assert_int_equal(count, bytes / 8);
    assert_true(bl_now_ns() - begun < 60000000000); /* quadratic: hours */
    bpe_close(bpe);
    free(text);
}

static void test_bad_lists_and_texts_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *list, *part;
    } bad[] = {
        {"a b\nab\n", ":2: not two words"},
        {"a b c\n", ":1: not two words"},
        {"#version: 0.2\na b\na b\n", ":3: the merge was given before"},
        {"ab c\n", ":1: a word that no line before this one makes"},
        {"a \xc2\xad\n", ":1: a character that stands for no byte"},
        {"a \xe2\x82\xac\n", ":1: a character that stands for no byte"},
        {"a \xc4\n", ":1: a character that stands for no byte"},
        {"a \n", ":1: a character that stands for no byte, or an empty word"},
    };
    struct bpe *bpe;
    struct bl_errmsg msg = {{0}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        write_list(bad[i].list, strlen(bad[i].list));
        assert_int_equal(bpe_open(&bpe, list_path, &msg), BL_ECONFIG);
        if (strstr(msg.text, bad[i].part) == NULL) {
            fail_msg("\"%s\" does not say \"%s\"", msg.text, bad[i].part);
        }
    }
    static const struct {
        const char *text;
        const char *part;
    } texts[] = {{"ab\xff", "byte 2"},           {"\xc3", "byte 0"},
                 {"a\xed\xa0\x80", "byte 1"},    {"\xc0\x80", "byte 0"},
                 {"\xf4\x90\x80\x80", "byte 0"}, {"\xe0\x80\x80", "byte 0"}};
    write_list("a b\n", 4);
    bpe = open_list();
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        struct tokens tokens = {.count = 0};
        assert_int_equal(bpe_encode(bpe, texts[i].text, strlen(texts[i].text), keep, &tokens, &msg),
                         BL_EFORMAT);
        assert_non_null(strstr(msg.text, texts[i].part));
        assert_int_equal(tokens.count, 0);
    }
    bpe_close(bpe);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_words_are_joined_as_the_definition_says, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_no_merge_goes_across_words, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_long_word_takes_no_quadratic_time, setup, teardown),
        cmocka_unit_test_setup_teardown(test_bad_lists_and_texts_are_refused, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
