/* SPDX-License-Identifier: Apache-2.0 */
/* A job whose model is described by Hugging Face's config.json. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

#include "base/job.h"

static struct bl_job job, other;
static char dir[64];

static const char llama[] =
    "{\"model_type\": \"llama\", \"num_hidden_layers\": 3, \"hidden_size\": 64,\n"
    " \"intermediate_size\": 176, \"num_attention_heads\": 8, \"num_key_value_heads\": 2,\n"
    " \"vocab_size\": 512, \"rms_norm_eps\": 1e-05, \"rope_theta\": 500000.0,\n"
    " \"max_position_embeddings\": 2048, \"tie_word_embeddings\": true, \"hidden_act\": \"silu\",\n"
    " \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8.0, \"low_freq_factor\": 1.0,\n"
    "  \"high_freq_factor\": 4.0, \"original_max_position_embeddings\": 1024}}\n";
static const char gpt2[] =
    "{\"model_type\": \"gpt2\", \"n_layer\": 2, \"n_embd\": 48, \"n_head\": 3,\n"
    " \"n_positions\": 128, \"vocab_size\": 300}\n";

static void write_file(const char *name, const char *text)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "we");
    assert_non_null(f);
    fputs(text, f);
    assert_int_equal(fclose(f), 0);
}

/* A job with these lines in its model. */
static int parse(const char *model, struct bl_errmsg *msg)
{
    char text[600];
    *msg = (struct bl_errmsg){{0}};
    snprintf(text, sizeof text,
             "name: tiny\nranks: 1\nmodel:\n%sdata: {files: [a.txt]}\n"
             "train: {global_batch: 4, seq_len: 64, steps: 10}\n",
             model);
    return bl_job_parse(&job, text, strlen(text), "job.yaml", dir, msg);
}

static void test_llama_of_a_config_is_that_of_the_options(void **state)
{
    (void)state;
    struct bl_errmsg msg;
    write_file("llama.json", llama);
    assert_int_equal(parse("  config: llama.json\n", &msg), 0);
    other = job;
    assert_int_equal(
        parse("  {layers: 3, dim: 64, hidden: 176, heads: 8, kv_heads: 2, vocab: 512,\n"
              "   tied: true, norm_eps: 1e-5, rope_theta: 500000, rope_factor: 8,\n"
              "   rope_low: 1, rope_high: 4, rope_context: 1024}\n",
              &msg),
        0);
    assert_memory_equal(&job, &other, sizeof job);
    assert_int_equal(bl_job_function_digest(&job), bl_job_function_digest(&other));
}

static void test_gpt2_of_a_directory(void **state)
{
    (void)state;
    struct bl_errmsg msg;
    char sub[80];
    snprintf(sub, sizeof sub, "%s/gpt2", dir);
    assert_int_equal(mkdir(sub, 0755), 0);
    write_file("gpt2/config.json", gpt2);
    assert_int_equal(parse("  config: gpt2\n", &msg), 0);
    assert_int_equal(job.model.arch, BL_ARCH_GPT2);
    assert_int_equal(job.model.hidden, 192);
    assert_int_equal(job.model.context, 128);
    assert_true(job.model.tied && job.model.bias);
    /* The frozen job needs the file no more. */
    char *text = bl_job_to_json(&job);
    assert_non_null(text);
    assert_int_equal(bl_job_parse(&other, text, strlen(text), "frozen", "/", &msg), 0);
    assert_memory_equal(&job, &other, sizeof job);
    free(text);
}

static void test_option_beside_the_config_is_refused(void **state)
{
    (void)state;
    struct bl_errmsg msg;
    write_file("llama.json", llama);
    assert_int_equal(parse("  config: llama.json\n  dim: 32\n", &msg), BL_ECONFIG);
    assert_string_equal(
        msg.text, "job.yaml:5:8: model.dim: model.config says it already, 64: give one of them");
    /* what it does not say may be said */
    assert_int_equal(parse("  config: llama.json\n  context: 0\n", &msg), 0);
}

static void test_config_that_cannot_be_is_refused_with_its_place(void **state)
{
    (void)state;
    struct bl_errmsg msg;
    assert_int_equal(parse("  config: nowhere.json\n", &msg), BL_ECONFIG);
    assert_non_null(strstr(msg.text, "job.yaml:4:11: model.config: open "));
    write_file("bad.json", "{\"model_type\": \"bert\", \"vocab_size\": 10}");
    assert_int_equal(parse("  config: bad.json\n", &msg), BL_ENOTBUILT);
    assert_non_null(strstr(msg.text, "bad.json: model_type \"bert\": llama and gpt2 are known"));
    write_file("bad.json", "{\"model_type\": \"gpt2\", \"n_layer\": 5000, \"n_embd\": 48, "
                           "\"n_head\": 3, \"n_positions\": 128, \"vocab_size\": 300}");
    assert_int_equal(parse("  config: bad.json\n", &msg), BL_ECONFIG);
    assert_string_equal(msg.text, "job.yaml:4:11: model.config: model.layers: 5000 is not within 1 "
                                  "and 1024");
    write_file("bad.json", "{\"model_type\": \"gpt2\", \"n_layer\": 2, \"n_embd\": 48, "
                           "\"n_head\": 5, \"n_positions\": 128, \"vocab_size\": 300}");
    assert_int_equal(parse("  config: bad.json\n", &msg), BL_ECONFIG);
    assert_string_equal(msg.text, "job.yaml:4:11: model.heads: 5 does not divide dim (48)");
    write_file("bad.json", "{");
    assert_int_equal(parse("  config: bad.json\n", &msg), BL_ECONFIG);
    assert_non_null(strstr(msg.text, "bad.json: "));
}

static int remove_files(void **state)
{
    (void)state;
    char command[100];
    snprintf(command, sizeof command, "rm -rf '%s'", dir);
    return system(command);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_llama_of_a_config_is_that_of_the_options),
        cmocka_unit_test(test_gpt2_of_a_directory),
        cmocka_unit_test(test_option_beside_the_config_is_refused),
        cmocka_unit_test(test_config_that_cannot_be_is_refused_with_its_place),
    };
    snprintf(dir, sizeof dir, "/tmp/belay-job-XXXXXX");
    if (mkdtemp(dir) == NULL) {
        return 1;
    }
    return cmocka_run_group_tests(tests, NULL, remove_files);
}
