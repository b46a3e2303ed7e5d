/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A Llama that others trained (stories260K, in llama2.c's layout) must continue the empty prompt
 * byte for byte as llama2.c itself does at temperature 0. Needs BELAY_TEST_DATA, else 77.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "trainer/model.h"

#define STEPS      200
#define FILE_MAX   (4U << 20)
#define TEXT_BYTES 4096
#define BOS        1

static const char *g_data;

/* The whole file (owned), its size in *ret_bytes. */
static char *slurp(const char *name, size_t *ret_bytes)
{
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", g_data, name);
    FILE *file = fopen(path, "rbe");
    char *data = calloc(1, FILE_MAX);
    assert_true(file != NULL && data != NULL);
    *ret_bytes = fread(data, 1, FILE_MAX - 1, file);
    fclose(file);
    return data;
}

/* One kind of tensor, stored for all layers in a row; heads > 0: rows of a head come in pairs that
 * rotate together, here they go to the head's two halves. */
static const float *take(const struct train_model *model, float *params, uint32_t first,
                         uint32_t layers, uint32_t heads, const float *from)
{
    uint32_t count;
    const struct train_tensor *tensors = train_model_tensors(model, &count);
    for (uint32_t layer = 0; layer < layers; layer++) {
        const struct train_tensor *t = &tensors[first + 9 * layer];
        size_t rows = t->shape[0], columns = t->shape[1];
        size_t d = heads == 0 ? rows : rows / heads;
        for (size_t row = 0; row < rows; row++) {
            size_t in_head = row % d;
            size_t to = heads == 0 ? row : row - in_head + in_head % 2 * (d / 2) + in_head / 2;
            memcpy(params + t->offset + to * columns, from, columns * sizeof(float));
            from += columns;
        }
    }
    return from;
}

static float *load(struct train_model **ret_model, struct kern *kern)
{
    size_t bytes;
    char *data = slurp("stories260K.bin", &bytes);
    int32_t head[7];
    memcpy(head, data, sizeof head);
    struct bl_job_model config = {.dim = (uint32_t)head[0],
                                  .hidden = (uint32_t)head[1],
                                  .layers = (uint32_t)head[2],
                                  .heads = (uint32_t)head[3],
                                  .kv_heads = (uint32_t)head[4],
                                  .vocab = (uint32_t)head[5],
                                  .tied = 1,
                                  .rope_theta = 10000.0,
                                  .norm_eps = 1e-5};
    struct bl_errmsg msg = {0};
    uint32_t layers = config.layers;
    assert_int_equal(train_model_new(ret_model, kern, &config, 64, 1, &msg), 0);
    float *params = calloc(train_model_buffer_elems(*ret_model), sizeof *params);
    assert_non_null(params);
    /* llama2.c: embedding, norm1, q, k, v, o, norm2, gate, down, up, final norm. */
    const float *from = (const float *)(void *)(data + sizeof head);
    from = take(*ret_model, params, 0, 1, 0, from);
    from = take(*ret_model, params, 1, layers, 0, from);
    from = take(*ret_model, params, 2, layers, config.heads, from);
    from = take(*ret_model, params, 3, layers, config.kv_heads, from);
    from = take(*ret_model, params, 4, layers, 0, from);
    from = take(*ret_model, params, 5, layers, 0, from);
    from = take(*ret_model, params, 6, layers, 0, from);
    from = take(*ret_model, params, 7, layers, 0, from);
    from = take(*ret_model, params, 9, layers, 0, from);
    from = take(*ret_model, params, 8, layers, 0, from);
    from = take(*ret_model, params, 1 + 9 * layers, 1, 0, from);
    assert_true((const char *)from <= data + bytes);
    free(data);
    return params;
}

/* Appends the piece of `token`; the tokenizer file holds float score, int32 length, bytes each. */
static void append_piece(char *text, const char *tokenizer, int32_t token, int32_t before)
{
    const char *at = tokenizer + sizeof(int32_t);
    int32_t length;
    for (int32_t i = 0;; i++) {
        memcpy(&length, at + sizeof(float), sizeof length);
        if (i == token) {
            break;
        }
        at += sizeof(float) + sizeof length + (size_t)length;
    }
    char piece[64] = {0};
    assert_true(length < (int32_t)sizeof piece);
    memcpy(piece, at + sizeof(float) + sizeof length, (size_t)length);
    unsigned byte;
    if (sscanf(piece, "<0x%02X>", &byte) == 1) {
        snprintf(piece, sizeof piece, "%c", (char)byte);
    }
    const char *shown = before == BOS && piece[0] == ' ' ? piece + 1 : piece;
    size_t used = strlen(text);
    snprintf(text + used, TEXT_BYTES - used, "%s", shown);
}

static void test_greedy_text_equals_the_oracle(void **state)
{
    (void)state;
    struct kern_pool *pool;
    struct kern *kern;
    struct train_model *model;
    size_t bytes;
    assert_int_equal(kern_pool_new(&pool, 2, NULL), 0);
    assert_int_equal(kern_cpu_open(&kern, pool, NULL), 0);
    float *params = load(&model, kern);
    char *tokenizer = slurp("tok512.bin", &bytes),
         *expect = slurp("stories260K.greedy200.txt", &bytes);
    int32_t prompt = BOS, out[STEPS];
    struct train_sample greedy = {0};
    assert_int_equal(train_model_sample(model, kern_real_f32_view(params), &prompt, 1, out, STEPS,
                                        &greedy, NULL),
                     0);
    char text[TEXT_BYTES] = "";
    for (int i = 0; i < STEPS && out[i] != BOS; i++) {
        append_piece(text, tokenizer, out[i], i == 0 ? BOS : out[i - 1]);
    }
    while (bytes > 0 && expect[bytes - 1] == '\n') {
        expect[--bytes] = '\0';
    }
    printf("%s\n", text);
    assert_string_equal(text, expect);
    free(tokenizer);
    free(expect);
    free(params);
    train_model_free(model);
    kern->ops->close(kern);
    kern_pool_free(pool);
}

int main(void)
{
    g_data = getenv("BELAY_TEST_DATA");
    if (g_data == NULL) {
        printf("skipped: BELAY_TEST_DATA is not set\n");
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_greedy_text_equals_the_oracle),
    };
    return cmocka_run_group_tests_name("trainer/stories", tests, NULL, NULL);
}
