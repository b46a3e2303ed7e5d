/* SPDX-License-Identifier: Apache-2.0 */
/* A model's description: config.json as transformers writes it, and `model` of a frozen job. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "ckpt/hf.h"
#include "ckpt/text.h"

/* A number that may be missing or null: then `otherwise`. */
static int get_u32(const json_t *object, const char *key, uint32_t otherwise, uint32_t *ret,
                   struct bl_errmsg *msg)
{
    const json_t *value = json_object_get(object, key);

    if (value == NULL || json_is_null(value)) {
        *ret = otherwise;
        return 0;
    }
    return bl_json_u32(object, key, 0, UINT32_MAX, ret, msg);
}

static int get_real(const json_t *object, const char *key, double otherwise, double *ret,
                    struct bl_errmsg *msg)
{
    const json_t *value = json_object_get(object, key);

    if (value == NULL || json_is_null(value)) {
        *ret = otherwise;
        return 0;
    }
    if (!json_is_number(value)) {
        return bl_err(msg, BL_EFORMAT, "%s: must be a number", key);
    }
    *ret = json_number_value(value);
    return 0;
}

static int get_bool(const json_t *object, const char *key, bool otherwise, bool *ret,
                    struct bl_errmsg *msg)
{
    const json_t *value = json_object_get(object, key);

    if (value != NULL && !json_is_null(value) && !json_is_boolean(value)) {
        return bl_err(msg, BL_EFORMAT, "%s: must be true or false", key);
    }
    *ret = value == NULL || json_is_null(value) ? otherwise : json_is_true(value);
    return 0;
}

/* The string of a key that may be missing; never NULL. View of the object. */
static const char *get_text(const json_t *object, const char *key, const char *otherwise)
{
    const char *text = json_string_value(json_object_get(object, key));

    return text == NULL ? otherwise : text;
}

/* {"rope_type":"llama3","factor":..,...}, in `rope_scaling` or (newer) in `rope_parameters`. */
static int read_scaling(struct ckpt_model *model, const json_t *scaling, struct bl_errmsg *msg)
{
    struct ckpt_rope_scaling *ret = &model->rope_scaling;
    const char *type;
    int rc;

    if (!json_is_object(scaling)) {
        return 0;
    }
    type = get_text(scaling, "rope_type", get_text(scaling, "type", "default"));
    if (strcmp(type, "default") == 0) {
        return 0;
    }
    if (strcmp(type, "llama3") != 0) {
        return bl_err(msg, BL_ENOTBUILT, "rope scaling of type \"%.40s\": only llama3 is known",
                      type);
    }
    rc = get_real(scaling, "factor", 0, &ret->factor, msg);
    if (rc == 0) {
        rc = get_real(scaling, "low_freq_factor", 0, &ret->low, msg);
    }
    if (rc == 0) {
        rc = get_real(scaling, "high_freq_factor", 0, &ret->high, msg);
    }
    if (rc == 0) {
        rc = get_u32(scaling, "original_max_position_embeddings", 0, &ret->context, msg);
    }
    if (rc == 0 && !(ret->factor >= 1 && ret->low > 0 && ret->high > ret->low &&
                     ret->factor < 1e6 && ret->high < 1e6 && ret->context > 0)) {
        return bl_err(msg, BL_EFORMAT, "rope scaling: factor %g, low %g, high %g, context %u",
                      ret->factor, ret->low, ret->high, ret->context);
    }
    return rc;
}

/* What Belay's Llama cannot be. */
static int refuse_llama(const struct ckpt_model *model, const json_t *config, uint32_t head_dim,
                        struct bl_errmsg *msg)
{
    bool attention = false, mlp = false;
    int rc = get_bool(config, "attention_bias", false, &attention, msg);

    if (rc == 0) {
        rc = get_bool(config, "mlp_bias", false, &mlp, msg);
    }
    if (rc < 0) {
        return rc;
    }
    if (attention || mlp) {
        return bl_err(msg, BL_ENOTBUILT, "%s: a Llama without biases is what Belay has",
                      attention ? "attention_bias" : "mlp_bias");
    }
    if (strcmp(get_text(config, "hidden_act", "silu"), "silu") != 0) {
        return bl_err(msg, BL_ENOTBUILT, "hidden_act \"%.40s\": Belay's Llama has silu",
                      get_text(config, "hidden_act", ""));
    }
    if (model->heads > 0 && head_dim != model->dim / model->heads) {
        return bl_err(msg, BL_ENOTBUILT,
                      "head_dim %u with hidden_size %u and %u heads: Belay's is "
                      "%u",
                      head_dim, model->dim, model->heads, model->dim / model->heads);
    }
    return 0;
}

static int read_llama(struct ckpt_model *model, const json_t *config, struct bl_errmsg *msg)
{
    const json_t *newer = json_object_get(config, "rope_parameters");
    uint32_t head_dim = 0;
    int rc = bl_json_u32(config, "num_hidden_layers", 0, UINT32_MAX, &model->layers, msg);

    if (rc == 0) {
        rc = bl_json_u32(config, "hidden_size", 0, UINT32_MAX, &model->dim, msg);
    }
    if (rc == 0) {
        rc = bl_json_u32(config, "intermediate_size", 0, UINT32_MAX, &model->hidden, msg);
    }
    if (rc == 0) {
        rc = bl_json_u32(config, "num_attention_heads", 0, UINT32_MAX, &model->heads, msg);
    }
    if (rc == 0) {
        rc = get_u32(config, "num_key_value_heads", model->heads, &model->kv_heads, msg);
    }
    if (rc == 0) {
        rc = get_u32(config, "max_position_embeddings", 2048, &model->context, msg);
    }
    if (rc == 0) {
        rc = get_u32(config, "head_dim", model->heads == 0 ? 0 : model->dim / model->heads,
                     &head_dim, msg);
    }
    if (rc == 0) {
        rc = get_real(config, "rms_norm_eps", 1e-6, &model->norm_eps, msg);
    }
    if (rc == 0) {
        rc = get_real(config, "rope_theta", 10000, &model->rope_theta, msg);
    }
    if (rc == 0 && json_is_object(newer)) {
        rc = get_real(newer, "rope_theta", model->rope_theta, &model->rope_theta, msg);
    }
    if (rc == 0) {
        rc = get_bool(config, "tie_word_embeddings", false, &model->tied, msg);
    }
    if (rc == 0) {
        rc = read_scaling(
            model, json_is_object(newer) ? newer : json_object_get(config, "rope_scaling"), msg);
    }
    return rc < 0 ? rc : refuse_llama(model, config, head_dim, msg);
}

static int read_gpt2(struct ckpt_model *model, const json_t *config, struct bl_errmsg *msg)
{
    const char *act = get_text(config, "activation_function", "gelu_new");
    int rc = bl_json_u32(config, "n_layer", 0, UINT32_MAX, &model->layers, msg);

    if (rc == 0) {
        rc = bl_json_u32(config, "n_embd", 0, CKPT_MODEL_WIDTH_MAX, &model->dim, msg);
    }
    if (rc == 0) {
        rc = bl_json_u32(config, "n_head", 0, UINT32_MAX, &model->heads, msg);
    }
    if (rc == 0) {
        rc = bl_json_u32(config, "n_positions", 0, UINT32_MAX, &model->context, msg);
    }
    if (rc == 0) {
        rc = get_u32(config, "n_inner", 4 * model->dim, &model->hidden, msg);
    }
    if (rc == 0) {
        rc = get_real(config, "layer_norm_epsilon", 1e-5, &model->norm_eps, msg);
    }
    if (rc == 0) {
        rc = get_bool(config, "tie_word_embeddings", true, &model->tied, msg);
    }
    model->kv_heads = model->heads;
    model->rope_theta = 10000; /* it has none; what a job says then */
    if (rc == 0 && strcmp(act, "gelu_new") != 0 && strcmp(act, "gelu_pytorch_tanh") != 0) {
        return bl_err(msg, BL_ENOTBUILT, "activation_function \"%.40s\": GPT-2's is gelu_new", act);
    }
    return rc;
}

static int read_config(struct ckpt_model *model, const json_t *config, struct bl_errmsg *msg)
{
    const char *type = get_text(config, "model_type", NULL);
    int rc;

    if (!json_is_object(config)) {
        return bl_err(msg, BL_EFORMAT, "an object is expected");
    }
    if (type == NULL) {
        return bl_err(msg, BL_EFORMAT, "model_type: missing");
    }
    if (json_is_object(json_object_get(config, "quantization_config"))) {
        return bl_err(msg, BL_ENOTBUILT, "quantization_config: weights that are quantised");
    }
    if (strcmp(type, "llama") == 0) {
        model->arch = CKPT_ARCH_LLAMA;
    } else if (strcmp(type, "gpt2") == 0) {
        model->arch = CKPT_ARCH_GPT2;
    } else {
        return bl_err(msg, BL_ENOTBUILT, "model_type \"%.40s\": llama and gpt2 are known", type);
    }
    rc = bl_json_u32(config, "vocab_size", 0, UINT32_MAX, &model->vocab, msg);
    if (rc == 0) {
        rc = model->arch == CKPT_ARCH_LLAMA ? read_llama(model, config, msg)
                                            : read_gpt2(model, config, msg);
    }
    return rc < 0 ? rc : ckpt_model_check(model, msg);
}

int ckpt_model_from_config(struct ckpt_model *ret, const char *text, size_t bytes,
                           struct bl_errmsg *msg)
{
    struct ckpt_model model = {0};
    json_t *config = NULL;
    int rc = bytes > CKPT_CONFIG_BYTES_MAX
                 ? bl_err(msg, BL_ELIMIT, "%zu bytes: at most %u", bytes, CKPT_CONFIG_BYTES_MAX)
                 : bl_json_parse(text, bytes, &config, msg);

    if (rc == 0) {
        rc = read_config(&model, config, msg);
    }
    json_decref(config);
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
    int rc = get_real(model, "rope_factor", 1, &scaling.factor, msg);

    if (rc < 0 || scaling.factor == 1) {
        return rc;
    }
    rc = get_real(model, "rope_low", 1, &scaling.low, msg);
    if (rc == 0) {
        rc = get_real(model, "rope_high", 4, &scaling.high, msg);
    }
    if (rc == 0) {
        rc = get_u32(model, "rope_context", 8192, &scaling.context, msg);
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
    bool bias = true;
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
        rc = get_u32(model, "kv_heads", m->heads, &m->kv_heads, msg);
    }
    if (rc == 0) {
        rc = bl_json_u32(model, "vocab", 0, UINT32_MAX, &m->vocab, msg);
    }
    if (rc == 0) {
        rc = get_bool(model, "tied", false, &m->tied, msg);
    }
    if (rc == 0) {
        rc = get_real(model, "rope_theta", 10000, &m->rope_theta, msg);
    }
    if (rc == 0) {
        rc = get_real(model, "norm_eps", 1e-5, &m->norm_eps, msg);
    }
    if (rc == 0 && json_is_object(train)) {
        rc = get_u32(train, "seq_len", 0, &seq_len, msg);
    }
    if (rc == 0) {
        rc = get_u32(model, "context", 0, &m->context, msg);
        m->context = m->context == 0 ? seq_len : m->context;
    }
    if (rc == 0) {
        rc = get_bool(model, "bias", true, &bias, msg);
        m->no_bias = m->arch == CKPT_ARCH_GPT2 && !bias;
    }
    rc = rc < 0 ? rc : read_scaling(m, json_object_get(model, "rope_scaling"), msg);
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
