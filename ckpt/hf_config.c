/* SPDX-License-Identifier: Apache-2.0 */
/* A model's description: config.json as transformers writes it, and `model` of a frozen job. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/model_config.h"
#include "ckpt/hf.h"
#include "ckpt/text.h"

/* The string of a key that may be missing; never NULL. View of the object. */
static const char *get_text(const json_t *object, const char *key, const char *otherwise)
{
    const char *text = json_string_value(json_object_get(object, key));

    return text == NULL ? otherwise : text;
}

static struct ckpt_rope_scaling scaling_of(const struct bl_job_model *model)
{
    return (struct ckpt_rope_scaling){model->rope_factor, model->rope_low, model->rope_high,
                                      model->rope_context};
}

int ckpt_model_from_config(struct ckpt_model *ret, const char *text, size_t bytes,
                           struct bl_errmsg *msg)
{
    struct bl_job_model read;
    struct ckpt_model model;
    int rc = bl_model_config_parse(&read, text, bytes, msg);

    if (rc < 0) {
        return rc;
    }
    model =
        (struct ckpt_model){.arch = read.arch == BL_ARCH_GPT2 ? CKPT_ARCH_GPT2 : CKPT_ARCH_LLAMA,
                            .layers = read.layers,
                            .dim = read.dim,
                            .hidden = read.hidden,
                            .heads = read.heads,
                            .kv_heads = read.kv_heads,
                            .vocab = read.vocab,
                            .context = read.context,
                            .tied = read.tied != 0,
                            .rope_theta = read.rope_theta,
                            .norm_eps = read.norm_eps,
                            .rope_scaling = scaling_of(&read)};
    rc = ckpt_model_check(&model, msg);
    if (rc == 0) {
        *ret = model;
    }
    return rc;
}

/* ---- Writing ---- */

/* A real with as few digits as read back the same, and never looking like an integer. */
static void put_real(struct ckpt_text *text, double value)
{
    char digits[40];

    for (int precision = 6; precision <= 17; precision++) {
        snprintf(digits, sizeof(digits), "%.*g", precision, value);
        if (strtod(digits, NULL) == value) {
            break;
        }
    }
    ckpt_text_printf(text, "%s%s", digits, strpbrk(digits, ".en") == NULL ? ".0" : "");
}

static const char *torch_dtype(enum bl_dtype dtype)
{
    return dtype == BL_BF16 ? "bfloat16" : dtype == BL_F16 ? "float16" : "float32";
}

static void put_llama(struct ckpt_text *text, const struct ckpt_model *m)
{
    const struct ckpt_rope_scaling *scaling = &m->rope_scaling;

    ckpt_text_printf(text,
                     "  \"architectures\": [\"LlamaForCausalLM\"],\n"
                     "  \"model_type\": \"llama\",\n"
                     "  \"hidden_act\": \"silu\",\n"
                     "  \"hidden_size\": %u,\n"
                     "  \"intermediate_size\": %u,\n"
                     "  \"num_hidden_layers\": %u,\n"
                     "  \"num_attention_heads\": %u,\n"
                     "  \"num_key_value_heads\": %u,\n"
                     "  \"head_dim\": %u,\n"
                     "  \"attention_bias\": false,\n"
                     "  \"mlp_bias\": false,\n",
                     m->dim, m->hidden, m->layers, m->heads, m->kv_heads, m->dim / m->heads);
    if (m->context > 0) {
        ckpt_text_printf(text, "  \"max_position_embeddings\": %u,\n", m->context);
    }
    ckpt_text_printf(text, "  \"rms_norm_eps\": ");
    put_real(text, m->norm_eps);
    ckpt_text_printf(text, ",\n  \"rope_theta\": ");
    put_real(text, m->rope_theta);
    if (scaling->factor > 0) {
        ckpt_text_printf(text, ",\n  \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": ");
        put_real(text, scaling->factor);
        ckpt_text_printf(text, ", \"low_freq_factor\": ");
        put_real(text, scaling->low);
        ckpt_text_printf(text, ", \"high_freq_factor\": ");
        put_real(text, scaling->high);
        ckpt_text_printf(text, ", \"original_max_position_embeddings\": %u}", scaling->context);
    } else {
        ckpt_text_printf(text, ",\n  \"rope_scaling\": null");
    }
}

static void put_gpt2(struct ckpt_text *text, const struct ckpt_model *m)
{
    ckpt_text_printf(text,
                     "  \"architectures\": [\"GPT2LMHeadModel\"],\n"
                     "  \"model_type\": \"gpt2\",\n"
                     "  \"activation_function\": \"gelu_new\",\n"
                     "  \"n_embd\": %u,\n"
                     "  \"n_inner\": %u,\n"
                     "  \"n_layer\": %u,\n"
                     "  \"n_head\": %u,\n"
                     "  \"n_positions\": %u,\n"
                     "  \"layer_norm_epsilon\": ",
                     m->dim, m->hidden, m->layers, m->heads, m->context);
    put_real(text, m->norm_eps);
}

char *ckpt_model_to_config(const struct ckpt_model *model, enum bl_dtype dtype)
{
    struct ckpt_text text = {0};

    ckpt_text_printf(&text, "{\n");
    if (model->arch == CKPT_ARCH_GPT2) {
        put_gpt2(&text, model);
    } else {
        put_llama(&text, model);
    }
    ckpt_text_printf(&text,
                     ",\n  \"tie_word_embeddings\": %s,\n  \"torch_dtype\": \"%s\",\n"
                     "  \"vocab_size\": %u\n}\n",
                     model->tied ? "true" : "false", torch_dtype(dtype),
                     model->vocab_padded != 0 ? model->vocab_padded : model->vocab);
    if (text.failed) {
        ckpt_text_close(&text);
        return NULL;
    }
    return text.data;
}

/* ---- The frozen job ---- */

/* The trainer's own keys for the same. */
static int read_job_scaling(struct ckpt_model *m, const json_t *model, struct bl_errmsg *msg)
{
    struct ckpt_rope_scaling scaling = {0};
    int rc = bl_json_real_or(model, "rope_factor", 1, &scaling.factor, msg);

    if (rc < 0 || scaling.factor == 1) {
        return rc;
    }
    rc = bl_json_real_or(model, "rope_low", 1, &scaling.low, msg);
    if (rc == 0) {
        rc = bl_json_real_or(model, "rope_high", 4, &scaling.high, msg);
    }
    if (rc == 0) {
        rc = bl_json_u32_or(model, "rope_context", 8192, &scaling.context, msg);
    }
    m->rope_scaling = scaling;
    return rc;
}

static int read_job_model(struct ckpt_model *m, const json_t *job, const json_t *model,
                          struct bl_errmsg *msg)
{
    const char *arch = get_text(model, "arch", "llama");
    const json_t *train = json_object_get(job, "train");
    uint32_t seq_len = 0;
    int tied = 0, bias = 1;
    struct bl_job_model theirs = {0};
    int rc = bl_json_u32(model, "layers", 0, UINT32_MAX, &m->layers, msg);

    if (strcmp(arch, "llama") != 0 && strcmp(arch, "gpt2") != 0) {
        return bl_err(msg, BL_ENOTBUILT, "arch \"%.40s\"", arch);
    }
    m->arch = strcmp(arch, "gpt2") == 0 ? CKPT_ARCH_GPT2 : CKPT_ARCH_LLAMA;
    if (rc == 0) {
        rc = bl_json_u32(model, "dim", 0, UINT32_MAX, &m->dim, msg);
    }
    if (rc == 0) {
        rc = bl_json_u32(model, "hidden", 0, UINT32_MAX, &m->hidden, msg);
    }
    if (rc == 0) {
        rc = bl_json_u32(model, "heads", 0, UINT32_MAX, &m->heads, msg);
    }
    if (rc == 0) {
        rc = bl_json_u32_or(model, "kv_heads", m->heads, &m->kv_heads, msg);
    }
    if (rc == 0) {
        rc = bl_json_u32(model, "vocab", 0, UINT32_MAX, &m->vocab, msg);
    }
    if (rc == 0) {
        rc = bl_json_bool_or(model, "tied", 0, &tied, msg);
        m->tied = tied != 0;
    }
    if (rc == 0) {
        rc = bl_json_real_or(model, "rope_theta", 10000, &m->rope_theta, msg);
    }
    if (rc == 0) {
        rc = bl_json_real_or(model, "norm_eps", 1e-5, &m->norm_eps, msg);
    }
    if (rc == 0 && json_is_object(train)) {
        rc = bl_json_u32_or(train, "seq_len", 0, &seq_len, msg);
    }
    if (rc == 0) {
        rc = bl_json_u32_or(model, "context", 0, &m->context, msg);
        m->context = m->context == 0 ? seq_len : m->context;
    }
    if (rc == 0) {
        rc = bl_json_bool_or(model, "bias", 1, &bias, msg);
        m->no_bias = m->arch == CKPT_ARCH_GPT2 && !bias;
    }
    if (rc == 0) { /* of an import */
        rc = bl_model_config_scaling(&theirs, json_object_get(model, "rope_scaling"), msg);
        m->rope_scaling = scaling_of(&theirs);
    }
    return rc < 0 ? rc : read_job_scaling(m, model, msg);
}

int ckpt_model_from_job(struct ckpt_model *ret, const char *job_text, struct bl_errmsg *msg)
{
    struct ckpt_model model = {0};
    json_t *job = NULL;
    int rc = bl_json_parse(job_text, strlen(job_text), &job, msg);

    if (rc == 0 && !json_is_object(json_object_get(job, "model"))) {
        rc = bl_err(msg, BL_ENOSTATE, "it says nothing of a model");
    }
    if (rc == 0) {
        rc = read_job_model(&model, job, json_object_get(job, "model"), msg);
    }
    if (rc == 0) {
        rc = ckpt_model_check(&model, msg);
    }
    json_decref(job);
    if (rc == 0) {
        *ret = model;
    }
    return rc < 0 ? bl_err_in(msg, rc, "the frozen job's model") : 0;
}

char *ckpt_model_to_job(const struct ckpt_model *m)
{
    const struct ckpt_rope_scaling *scaling = &m->rope_scaling;
    json_t *model =
        json_pack("{ss sI sI sI sI sI sI sI sb}", "arch", ckpt_arch_name(m->arch), "layers",
                  (json_int_t)m->layers, "dim", (json_int_t)m->dim, "hidden", (json_int_t)m->hidden,
                  "heads", (json_int_t)m->heads, "kv_heads", (json_int_t)m->kv_heads, "vocab",
                  (json_int_t)m->vocab, "context", (json_int_t)m->context, "tied", m->tied);
    json_t *job = json_pack("{so}", "model", model);
    char *text = NULL;

    if (job != NULL && json_object_set_new(model, "norm_eps", json_real(m->norm_eps)) == 0 &&
        (m->arch != CKPT_ARCH_GPT2 ||
         json_object_set_new(model, "bias", json_boolean(!m->no_bias)) == 0) &&
        (m->arch != CKPT_ARCH_LLAMA ||
         json_object_set_new(model, "rope_theta", json_real(m->rope_theta)) == 0) &&
        (scaling->factor <= 0 ||
         json_object_set_new(
             model, "rope_scaling",
             json_pack("{ss sf sf sf sI}", "rope_type", "llama3", "factor", scaling->factor,
                       "low_freq_factor", scaling->low, "high_freq_factor", scaling->high,
                       "original_max_position_embeddings", (json_int_t)scaling->context)) == 0)) {
        text = bl_json_dump(job);
    }
    json_decref(job);
    return text;
}
