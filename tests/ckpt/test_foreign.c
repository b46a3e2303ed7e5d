/* SPDX-License-Identifier: Apache-2.0 */
/* Other people's files, as they should be and as they should not: each lie is refused and named. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "ckpt/foreign.h"

static char g_dir[64];

static int setup(void **state)
{
    (void)state;
    snprintf(g_dir, sizeof(g_dir), "/tmp/belay-foreign-XXXXXX");
    return mkdtemp(g_dir) == NULL ? -1 : 0;
}

static int teardown(void **state)
{
    (void)state;
    return bl_rm_tree("/tmp", g_dir + strlen("/tmp/"), NULL);
}

static void path_of(char ret[256], const char *name)
{
    snprintf(ret, 256, "%s/%s", g_dir, name);
}

static void write_bytes(const char *name, const void *data, size_t bytes)
{
    char path[256];
    FILE *file;

    path_of(path, name);
    file = fopen(path, "we");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}

/* A safetensors file of this header and so many bytes of data: 0, 1, 2, ... */
static void write_safetensors(const char *name, const char *header, size_t data_bytes)
{
    uint8_t file[4096];
    size_t bytes = strlen(header);

    assert_true(8 + bytes + data_bytes <= sizeof(file));
    for (int i = 0; i < 8; i++) {
        file[i] = (uint8_t)((uint64_t)bytes >> (8 * i));
    }
    memcpy(file + 8, header, bytes);
    for (size_t i = 0; i < data_bytes; i++) {
        file[8 + bytes + i] = (uint8_t)i;
    }
    write_bytes(name, file, 8 + bytes + data_bytes);
}

static void empty_dir(void)
{
    static const char *const names[] = {"model.safetensors", "a.safetensors", "b.safetensors",
                                        "config.json",       "model.bin",     CKPT_HF_INDEX_FILE};
    char path[256];

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        path_of(path, names[i]);
        BL_IGNORE(unlink(path), "it may not be there");
    }
}

/* Opening g_dir must fail with this code and text. */
static void refused(int code, const char *text)
{
    struct ckpt_view *view = NULL;
    struct bl_errmsg why = {0};
    int rc = ckpt_foreign_open(&view, g_dir, &why);

    if (rc != code || strstr(why.text, text) == NULL) {
        fail_msg("%d \"%s\", not %d with \"%s\"", rc, why.text, code, text);
    }
}

static void test_boxes_of_a_tensor_are_read_from_its_file(void **state)
{
    struct ckpt_view *view;
    struct bl_errmsg why = {0};
    uint8_t out[60];
    const struct bl_extent box = {
        .tensor = 0, .lo = {1, 0, 2}, .hi = {3, 4, 4}, .flat_lo = 3, .flat_hi = 14};

    (void)state;
    empty_dir();
    write_safetensors("model.safetensors",
                      "{\"t\":{\"dtype\":\"U8\",\"shape\":[3,4,5],\"data_offsets\":[0,60]}}", 60);
    assert_int_equal(ckpt_foreign_open(&view, g_dir, &why), 0);
    assert_int_equal(view->tensor_count, 1);
    assert_int_equal(ckpt_view_read(view, &box, out, &why), 0);
    for (uint32_t i = 3; i < 14; i++) { /* element i of the box's own order */
        assert_int_equal(out[i - 3], (1 + i / 8) * 20 + i / 2 % 4 * 5 + 2 + i % 2);
    }
    assert_int_equal(ckpt_view_read_flat(view, 0, 7, 60, out, &why), 0);
    assert_int_equal(out[0], 7);
    assert_int_equal(out[52], 59);
    ckpt_view_close(view);
}

#define ENTRY(name, from, to)                                                                      \
    "\"" name "\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[" from "," to "]}"

static void test_headers_that_lie_are_refused(void **state)
{
    char path[256];

    (void)state;
    empty_dir();
    refused(-ENOENT, "no .safetensors file in it");
    write_bytes("model.safetensors", "\1\0\0", 3);
    refused(BL_EFORMAT, "shorter than its header");
    write_bytes("model.safetensors", "\377\377\377\377\377\377\377\177{}", 10);
    refused(BL_ELIMIT, "safetensors header of 9223372036854775807 bytes");
    write_bytes("model.safetensors", "\100\0\0\0\0\0\0\0{}", 10);
    refused(BL_EFORMAT, "header of 64 bytes in a file of 10");
    write_safetensors("model.safetensors", "{" ENTRY("a", "0", "4") "," ENTRY("b", "4", "8") "}",
                      7);
    refused(BL_EFORMAT, "do not fit shape or file");
    write_safetensors("model.safetensors", "{" ENTRY("a", "0", "4") "," ENTRY("b", "5", "9") "}",
                      9);
    refused(BL_EFORMAT, "leave a gap at byte");
    write_safetensors("model.safetensors", "{" ENTRY("a", "0", "4") "," ENTRY("b", "2", "6") "}",
                      6);
    refused(BL_EFORMAT, "share bytes at byte");
    write_safetensors("model.safetensors", "{" ENTRY("a", "0", "4") "}", 5);
    refused(BL_EFORMAT, "its tensors end at byte");
    write_safetensors("model.safetensors", "{" ENTRY("a", "0", "4") "," ENTRY("a", "4", "8") "}",
                      8);
    refused(BL_EFORMAT, "tensor \"a\" is there twice");
    write_safetensors(
        "model.safetensors",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0);
    refused(BL_EFORMAT, "a shape over 64 bits");
    write_safetensors("model.safetensors",
                      "{\"a\":{\"dtype\":\"F8_E4M3\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4);
    refused(BL_EFORMAT, "unknown dtype");
    path_of(path, "model.safetensors");
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkdir(path, 0755), 0);
    refused(BL_EFORMAT, "not a regular file");
    assert_int_equal(rmdir(path), 0);
}

static void test_a_file_that_shrinks_is_named_while_it_is_read(void **state)
{
    struct ckpt_view *view;
    struct bl_errmsg why = {0};
    uint8_t out[4];
    char path[256];

    (void)state;
    empty_dir();
    write_safetensors("model.safetensors", "{" ENTRY("a", "0", "4") "}", 4);
    assert_int_equal(ckpt_foreign_open(&view, g_dir, &why), 0);
    path_of(path, "model.safetensors");
    assert_int_equal(truncate(path, 20), 0);
    assert_int_equal(ckpt_view_read_flat(view, 0, 0, 4, out, &why), BL_EFORMAT);
    assert_non_null(strstr(why.text, "while it is read"));
    ckpt_view_close(view);
}

static void write_text(const char *name, const char *text)
{
    write_bytes(name, text, strlen(text));
}

static void test_index_and_files_must_agree(void **state)
{
    struct ckpt_view *view;
    struct bl_errmsg why = {0};
    uint8_t out[4];

    (void)state;
    empty_dir();
    write_safetensors("a.safetensors", "{" ENTRY("a", "0", "4") "}", 4);
    write_safetensors("b.safetensors",
                      "{\"__metadata__\":{\"format\":\"pt\"}," ENTRY("b", "0", "4") "}", 4);
    write_text(CKPT_HF_INDEX_FILE,
               "{\"metadata\":{\"total_size\":8},\n \"weight_map\":{\"b\":\"b.safetensors\","
               "\"a\":\"a.safetensors\"}}");
    assert_int_equal(ckpt_foreign_open(&view, g_dir, &why), 0);
    assert_int_equal(view->tensor_count, 2);
    assert_int_equal(ckpt_view_read_flat(view, 1, 1, 3, out, &why), 0);
    assert_int_equal(out[1], 2);
    ckpt_view_close(view);

    write_text(CKPT_HF_INDEX_FILE, "{\"weight_map\":{\"a\":\"a.safetensors\"}}");
    assert_int_equal(ckpt_foreign_open(&view, g_dir, &why), 0); /* b's file is not of it */
    ckpt_view_close(view);
    write_text(CKPT_HF_INDEX_FILE,
               "{\"weight_map\":{\"a\":\"a.safetensors\",\"b\":\"a.safetensors\"}}");
    refused(BL_EFORMAT, "it puts \"b\" into a.safetensors, which has no such tensor");
    write_text(CKPT_HF_INDEX_FILE, "{\"weight_map\":{\"c\":\"a.safetensors\"}}");
    refused(BL_EFORMAT, "it puts \"c\" into a.safetensors");
    write_text(CKPT_HF_INDEX_FILE,
               "{\"weight_map\":{\"a\":\"a.safetensors\",\"a\":\"a.safetensors\"}}");
    refused(BL_EFORMAT, "tensor \"a\" is there twice");
    write_safetensors("a.safetensors", "{" ENTRY("a", "0", "4") "," ENTRY("z", "4", "8") "}", 8);
    write_text(CKPT_HF_INDEX_FILE, "{\"weight_map\":{\"a\":\"a.safetensors\"}}");
    refused(BL_EFORMAT, "tensor \"z\" of a.safetensors is not in it");
    write_text(CKPT_HF_INDEX_FILE, "{\"weight_map\":{\"a\":\"../a.safetensors\"}}");
    refused(BL_EFORMAT, "a file's name is not plain");
    write_text(CKPT_HF_INDEX_FILE, "{\"weight_map\":{\"a\":\"c.safetensors\"}}");
    refused(-ENOENT, "c.safetensors");
    write_text(CKPT_HF_INDEX_FILE, "{\"metadata\":{}}");
    refused(BL_EFORMAT, "weight_map is missing");
    write_text(CKPT_HF_INDEX_FILE, "{\"weight_map\":{}} x");
    refused(BL_EFORMAT, CKPT_HF_INDEX_FILE);
}

/* ---- config.json ---- */

#define LLAMA(more)                                                                                \
    "{\"model_type\":\"llama\",\"hidden_size\":64,\"intermediate_size\":172,"                      \
    "\"num_hidden_layers\":5,\"num_attention_heads\":8,\"num_key_value_heads\":4,"                 \
    "\"vocab_size\":512,\"max_position_embeddings\":512" more "}"
#define GPT2(more)                                                                                 \
    "{\"model_type\":\"gpt2\",\"n_embd\":48,\"n_layer\":3,\"n_head\":4,\"n_positions\":64,"        \
    "\"vocab_size\":100" more "}"

static void test_configs_are_read_and_their_lies_refused(void **state)
{
    static const struct {
        const char *text;
        int code;
        const char *why;
    } cases[] = {
        {LLAMA(""), 0, ""},
        {LLAMA(",\"rope_scaling\":null,\"attention_bias\":false,\"torch_dtype\":\"bfloat16\""), 0,
         ""},
        {LLAMA(",\"head_dim\":8,\"num_local_experts\":null,\"eos_token_id\":[1,2]"), 0, ""},
        {GPT2(",\"n_inner\":null,\"n_ctx\":64"), 0, ""},
        {"", BL_EFORMAT, ""},
        {"[]", BL_EFORMAT, "object"},
        {"{}", BL_EFORMAT, "model_type: missing"},
        {"{\"model_type\":\"mixtral\"}", BL_ENOTBUILT, "model_type \"mixtral\""},
        {"{\"model_type\":\"llama\"}", BL_EFORMAT, "vocab_size"},
        {LLAMA(",\"quantization_config\":{}"), BL_ENOTBUILT, "quantised"},
        {LLAMA(",\"attention_bias\":true"), BL_ENOTBUILT, "attention_bias"},
        {LLAMA(",\"mlp_bias\":true"), BL_ENOTBUILT, "mlp_bias"},
        {LLAMA(",\"hidden_act\":\"gelu\""), BL_ENOTBUILT, "hidden_act"},
        {LLAMA(",\"head_dim\":16"), BL_ENOTBUILT, "head_dim 16"},
        {LLAMA(",\"rope_scaling\":{\"type\":\"linear\",\"factor\":2}"), BL_ENOTBUILT, "linear"},
        {LLAMA(",\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":0}"), BL_EFORMAT, "factor"},
        {LLAMA(",\"rope_theta\":\"10000\""), BL_EFORMAT, "rope_theta"},
        {LLAMA(",\"rope_theta\":-1"), BL_EFORMAT, "rope theta of -1"},
        {LLAMA(",\"tie_word_embeddings\":1"), BL_EFORMAT, "tie_word_embeddings"},
        {LLAMA(",\"hidden_size\":64"), BL_EFORMAT, "duplicate"},
        {GPT2(",\"activation_function\":\"relu\""), BL_ENOTBUILT, "activation_function"},
        {"{\"model_type\":\"llama\",\"hidden_size\":64,\"intermediate_size\":172,"
         "\"num_hidden_layers\":5,\"num_attention_heads\":0,\"vocab_size\":512}",
         BL_EFORMAT, "heads"},
        {"{\"model_type\":\"llama\",\"hidden_size\":66,\"intermediate_size\":172,"
         "\"num_hidden_layers\":5,\"num_attention_heads\":8,\"vocab_size\":512}",
         BL_EFORMAT, "no multiple of 8 heads"},
        {"{\"model_type\":\"llama\",\"hidden_size\":64,\"intermediate_size\":172,"
         "\"num_hidden_layers\":4000000000,\"num_attention_heads\":8,\"vocab_size\":512}",
         BL_EFORMAT, "layers of 4000000000"},
        {"{\"model_type\":\"llama\",\"hidden_size\":-64,\"intermediate_size\":172,"
         "\"num_hidden_layers\":4,\"num_attention_heads\":8,\"vocab_size\":512}",
         BL_EFORMAT, "hidden_size"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct ckpt_model model;
        struct bl_errmsg why = {0};
        int rc = ckpt_model_from_config(&model, cases[i].text, strlen(cases[i].text), &why);

        if (rc != cases[i].code || strstr(why.text, cases[i].why) == NULL) {
            fail_msg("%s: %d \"%s\"", cases[i].text, rc, why.text);
        }
    }
}

static void test_models_come_back_from_config_and_job(void **state)
{
    static const struct ckpt_model models[] = {
        {.arch = CKPT_ARCH_LLAMA,
         .layers = 16,
         .dim = 2048,
         .hidden = 8192,
         .heads = 32,
         .kv_heads = 8,
         .vocab = 128256,
         .context = 131072,
         .tied = true,
         .rope_theta = 500000,
         .norm_eps = 1e-5,
         .rope_scaling = {32, 1, 4, 8192}},
        {.arch = CKPT_ARCH_LLAMA,
         .layers = 1,
         .dim = 2,
         .hidden = 1,
         .heads = 1,
         .kv_heads = 1,
         .vocab = 1,
         .context = 1,
         .rope_theta = 1.0 / 3,
         .norm_eps = 0.1234567890123456},
        {.arch = CKPT_ARCH_GPT2,
         .layers = 12,
         .dim = 768,
         .hidden = 3072,
         .heads = 12,
         .kv_heads = 12,
         .vocab = 50257,
         .context = 1024,
         .tied = true,
         .norm_eps = 1e-5},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(models) / sizeof(models[0]); i++) {
        char *config = ckpt_model_to_config(&models[i], BL_F32);
        char *job = ckpt_model_to_job(&models[i]);
        struct bl_errmsg why = {0};
        struct ckpt_model back;

        assert_non_null(config);
        assert_non_null(job);
        assert_int_equal(ckpt_model_from_config(&back, config, strlen(config), &why), 0);
        if (back.arch == CKPT_ARCH_GPT2) {
            back.rope_theta = models[i].rope_theta;
        }
        assert_true(ckpt_model_equal(&back, &models[i]));
        assert_int_equal(ckpt_model_from_job(&back, job, &why), 0);
        if (back.arch == CKPT_ARCH_GPT2) {
            back.rope_theta = models[i].rope_theta;
        }
        assert_true(ckpt_model_equal(&back, &models[i]));
        free(config);
        free(job);
    }
}

/* ---- llama2.c ---- */

static void put_header(uint8_t ret[28], const int32_t numbers[7])
{
    for (int i = 0; i < 28; i++) {
        ret[i] = (uint8_t)((uint32_t)numbers[i / 4] >> (8 * (i % 4)));
    }
}

static void test_llama2c_headers_are_checked_against_the_size(void **state)
{
    /* 16*8 + 2*(8 + 64+32+32+64 + 8 + 3*12*8) + 8 + 32*4 = 1256 floats; untied 128 more */
    static const struct {
        int32_t numbers[7];
        uint64_t bytes;
        int code;
        const char *why;
    } cases[] = {
        {{8, 12, 2, 2, 1, 16, 32}, 28 + 4 * 1256, 0, ""},
        {{8, 12, 2, 2, 1, -16, 32}, 28 + 4 * 1384, 0, ""},
        {{8, 12, 2, 2, 1, 16, 32}, 27 + 4 * 1256, BL_EFORMAT, "makes it 5052"},
        {{8, 12, 2, 2, 1, 16, 32}, 28 + 4 * 1384, BL_EFORMAT, "makes it 5052"},
        {{0, 12, 2, 2, 1, 16, 32}, 5052, BL_EFORMAT, "number 1 of the header is 0"},
        {{8, 12, 2, 2, -1, 16, 32}, 5052, BL_EFORMAT, "number 5 of the header is -1"},
        {{8, 12, 2, 2, 1, INT32_MIN, 32}, 5052, BL_EFORMAT, "number 6"},
        {{8, 12, 2, 3, 1, 16, 32}, 5052, BL_EFORMAT, "no multiple of 3 heads"},
        {{INT32_MAX, 12, 2, 1, 1, 16, 32}, 5052, BL_EFORMAT, "width of 2147483647"},
        {{1048576, 1048576, 4096, 2, 1, 16777216, 16777216}, 5052, BL_EFORMAT, "makes it"},
        {{0x616b3432, 1, 0, 0, 0, 0, 0}, 5052, BL_ENOTBUILT, "version 1"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct bl_errmsg why = {0};
        struct ckpt_model model;
        uint8_t first[28];
        int rc;

        put_header(first, cases[i].numbers);
        rc = ckpt_llama2c_decode(&model, first, cases[i].bytes, &why);
        if (rc != cases[i].code || strstr(why.text, cases[i].why) == NULL) {
            fail_msg("case %zu: %d \"%s\"", i, rc, why.text);
        }
        if (rc == 0) {
            assert_true(model.vocab == 16 && model.tied == (cases[i].numbers[5] > 0));
        }
    }
}

static void test_llama2c_tensors_stand_in_its_order(void **state)
{
    enum { FLOATS = 1384 };
    static const struct {
        const char *name;
        uint32_t first; /* float of the file behind the header */
    } places[] = {
        {"model.embed_tokens.weight", 0},
        {"model.layers.0.input_layernorm.weight", 128},
        {"model.layers.1.input_layernorm.weight", 136},
        {"model.layers.0.self_attn.q_proj.weight", 144},
        {"model.layers.0.self_attn.k_proj.weight", 272},
        {"model.layers.1.self_attn.v_proj.weight", 368},
        {"model.layers.0.self_attn.o_proj.weight", 400},
        {"model.layers.0.post_attention_layernorm.weight", 528},
        {"model.layers.0.mlp.gate_proj.weight", 544},
        {"model.layers.0.mlp.down_proj.weight", 736},
        {"model.layers.1.mlp.up_proj.weight", 1024},
        {"model.norm.weight", 1120},
        {"lm_head.weight", 1256},
    };
    static const int32_t numbers[7] = {8, 12, 2, 2, 1, -16, 32};
    static uint8_t file[28 + 4 * FLOATS];
    struct bl_errmsg why = {0};
    struct ckpt_model model;
    struct ckpt_view *view;
    char path[256];
    float value;

    (void)state;
    put_header(file, numbers);
    for (uint32_t i = 0; i < FLOATS; i++) {
        value = (float)i;
        memcpy(file + 28 + 4 * i, &value, sizeof(value));
    }
    write_bytes("model.bin", file, sizeof(file));
    path_of(path, "model.bin");
    assert_int_equal(ckpt_llama2c_open(&view, &model, path, &why), 0);
    assert_int_equal(view->tensor_count, 1 + 2 * 9 + 1 + 1);
    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
        int64_t at = ckpt_view_find(view, places[i].name);

        assert_true(at >= 0);
        assert_int_equal(ckpt_view_read_flat(view, (uint32_t)at, 0, 1, &value, &why), 0);
        if (value != (float)places[i].first) {
            fail_msg("%s begins with %g", places[i].name, (double)value);
        }
    }
    ckpt_view_close(view);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_boxes_of_a_tensor_are_read_from_its_file),
        cmocka_unit_test(test_headers_that_lie_are_refused),
        cmocka_unit_test(test_a_file_that_shrinks_is_named_while_it_is_read),
        cmocka_unit_test(test_index_and_files_must_agree),
        cmocka_unit_test(test_configs_are_read_and_their_lies_refused),
        cmocka_unit_test(test_models_come_back_from_config_and_job),
        cmocka_unit_test(test_llama2c_headers_are_checked_against_the_size),
        cmocka_unit_test(test_llama2c_tensors_stand_in_its_order),
    };
    return cmocka_run_group_tests_name("ckpt/foreign", tests, setup, teardown);
}
