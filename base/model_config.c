/* SPDX-License-Identifier: Apache-2.0 */
#include "base/model_config.h"

#include <string.h>

#include "base/json.h"

#define WIDTH_MAX (1u << 20) /* four times as much is a number still */

/* The string of a key that may be missing; NULL only if `otherwise` is. View of the object. */
static const char *get_text(const json_t *object, const char *key, const char *otherwise)
{
    const char *text = json_string_value(json_object_get(object, key));

    return text == NULL ? otherwise : text;
}

/* {"rope_type":"llama3","factor":..,...}, in `rope_scaling` or (newer) in `rope_parameters`. */
int bl_model_config_scaling(struct bl_job_model *ret, const json_t *scaling, struct bl_errmsg *msg)
{
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
    rc = bl_json_real_or(scaling, "factor", 0, &ret->rope_factor, msg);
    if (rc == 0) {
        rc = bl_json_real_or(scaling, "low_freq_factor", 0, &ret->rope_low, msg);
    }
    if (rc == 0) {
        rc = bl_json_real_or(scaling, "high_freq_factor", 0, &ret->rope_high, msg);
    }
    if (rc == 0) {
        rc =
            bl_json_u32_or(scaling, "original_max_position_embeddings", 0, &ret->rope_context, msg);
    }
    if (rc == 0 && !(ret->rope_factor >= 1 && ret->rope_low > 0 && ret->rope_high > ret->rope_low &&
                     ret->rope_factor < 1e6 && ret->rope_high < 1e6 && ret->rope_context > 0)) {
        return bl_err(msg, BL_EFORMAT, "rope scaling: factor %g, low %g, high %g, context %u",
                      ret->rope_factor, ret->rope_low, ret->rope_high, ret->rope_context);
    }
    return rc;
}

/* What Belay's Llama cannot be. */
static int refuse_llama(const struct bl_job_model *model, const json_t *config, uint32_t head_dim,
                        struct bl_errmsg *msg)
{
    int attention = 0, mlp = 0;
    int rc = bl_json_bool_or(config, "attention_bias", 0, &attention, msg);

    if (rc == 0) {
        rc = bl_json_bool_or(config, "mlp_bias", 0, &mlp, msg);
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

static int read_llama(struct bl_job_model *model, const json_t *config, struct bl_errmsg *msg)
{
    const json_t *newer = json_object_get(config, "rope_parameters");
    uint32_t head_dim = 0;
    int tied = 0;
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
        rc = bl_json_u32_or(config, "num_key_value_heads", model->heads, &model->kv_heads, msg);
    }
    if (rc == 0) {
        rc = bl_json_u32_or(config, "max_position_embeddings", 2048, &model->context, msg);
    }
    if (rc == 0) {
        rc = bl_json_u32_or(config, "head_dim", model->heads == 0 ? 0 : model->dim / model->heads,
                            &head_dim, msg);
    }
    if (rc == 0) {
        rc = bl_json_real_or(config, "rms_norm_eps", 1e-6, &model->norm_eps, msg);
    }
    if (rc == 0) {
        rc = bl_json_real_or(config, "rope_theta", 10000, &model->rope_theta, msg);
    }
    if (rc == 0 && json_is_object(newer)) {
        rc = bl_json_real_or(newer, "rope_theta", model->rope_theta, &model->rope_theta, msg);
    }
    if (rc == 0) {
        rc = bl_json_bool_or(config, "tie_word_embeddings", 0, &tied, msg);
    }
    if (rc == 0) {
        rc = bl_model_config_scaling(
            model, json_is_object(newer) ? newer : json_object_get(config, "rope_scaling"), msg);
    }
    model->tied = (uint32_t)tied;
    return rc < 0 ? rc : refuse_llama(model, config, head_dim, msg);
}

static int read_gpt2(struct bl_job_model *model, const json_t *config, struct bl_errmsg *msg)
{
    const char *act = get_text(config, "activation_function", "gelu_new");
    int tied = 0;
    int rc = bl_json_u32(config, "n_layer", 0, UINT32_MAX, &model->layers, msg);

    if (rc == 0) {
        rc = bl_json_u32(config, "n_embd", 0, WIDTH_MAX, &model->dim, msg);
    }
    if (rc == 0) {
        rc = bl_json_u32(config, "n_head", 0, UINT32_MAX, &model->heads, msg);
    }
    if (rc == 0) {
        rc = bl_json_u32(config, "n_positions", 0, UINT32_MAX, &model->context, msg);
    }
    if (rc == 0) {
        rc = bl_json_u32_or(config, "n_inner", 4 * model->dim, &model->hidden, msg);
    }
    if (rc == 0) {
        rc = bl_json_real_or(config, "layer_norm_epsilon", 1e-5, &model->norm_eps, msg);
    }
    if (rc == 0) {
        rc = bl_json_bool_or(config, "tie_word_embeddings", 1, &tied, msg);
    }
    model->tied = (uint32_t)tied;
    model->bias = 1;
    model->kv_heads = model->heads;
    model->rope_theta = 10000; /* it has none; what a job says then */
    if (rc == 0 && strcmp(act, "gelu_new") != 0 && strcmp(act, "gelu_pytorch_tanh") != 0) {
        return bl_err(msg, BL_ENOTBUILT, "activation_function \"%.40s\": GPT-2's is gelu_new", act);
    }
    return rc;
}

static int read_config(struct bl_job_model *model, const json_t *config, struct bl_errmsg *msg)
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
        model->arch = BL_ARCH_LLAMA;
    } else if (strcmp(type, "gpt2") == 0) {
        model->arch = BL_ARCH_GPT2;
    } else {
        return bl_err(msg, BL_ENOTBUILT, "model_type \"%.40s\": llama and gpt2 are known", type);
    }
    rc = bl_json_u32(config, "vocab_size", 0, UINT32_MAX, &model->vocab, msg);
    if (rc == 0) {
        rc = model->arch == BL_ARCH_LLAMA ? read_llama(model, config, msg)
                                          : read_gpt2(model, config, msg);
    }
    return rc;
}

int bl_model_config_parse(struct bl_job_model *ret, const char *text, size_t bytes,
                          struct bl_errmsg *msg)
{
    struct bl_job_model model = {0};
    json_t *config = NULL;
    int rc = bytes > BL_MODEL_CONFIG_BYTES_MAX
                 ? bl_err(msg, BL_ELIMIT, "%zu bytes: at most %u", bytes, BL_MODEL_CONFIG_BYTES_MAX)
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
