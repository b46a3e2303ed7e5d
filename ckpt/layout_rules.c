/* SPDX-License-Identifier: Apache-2.0 */
/* Which rule a tensor follows: the built-in table, rules and layouts as text. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "ckpt/layout_internal.h"

/* clang-format off */
#define WHOLE(match, stage)        {match, CKPT_CUT_REPLICATED, 0, stage, 0, {{0, 0}}}
#define VOCABULARY(match, stage)   {match, CKPT_CUT_VOCABULARY, 0, stage, 0, {{0, 0}}}
#define PLAIN(match, cut, dim)     {match, cut, dim, CKPT_STAGE_FIRST, 0, {{0, 0}}}
#define BY(units, match, cut, dim) {match, cut, dim, CKPT_STAGE_FIRST, 1, {{1, units}}}
#define HALVES(match, dim)         {match, CKPT_CUT_COLUMN, dim, CKPT_STAGE_FIRST, 2, \
                                    {{1, CKPT_UNITS_ELEMS}, {1, CKPT_UNITS_ELEMS}}}
#define QKV(match, dim)            {match, CKPT_CUT_COLUMN, dim, CKPT_STAGE_FIRST, 3, \
                                    {{CKPT_UNITS_HEADS, CKPT_UNITS_HEADS},            \
                                     {CKPT_UNITS_KV_HEADS, CKPT_UNITS_KV_HEADS},      \
                                     {CKPT_UNITS_KV_HEADS, CKPT_UNITS_KV_HEADS}}}
/* clang-format on */

/* In the order of a model's table: first what comes before the layers, then a layer from top to
 * bottom, then what comes behind: the order of our trainer's own table. Names are those that
 * Hugging Face's Llama and GPT-2 have; c_attn, c_fc and c_proj there are stored [in, out]. */
static const struct ckpt_layout_rule builtin[] = {
    VOCABULARY("*embed_tokens.weight", CKPT_STAGE_FIRST),
    VOCABULARY("*wte.weight", CKPT_STAGE_FIRST),
    WHOLE("*wpe.weight", CKPT_STAGE_FIRST),
    WHOLE("*.input_layernorm.*", CKPT_STAGE_FIRST),
    WHOLE("*.ln_1.weight", CKPT_STAGE_FIRST),
    WHOLE("*.ln_1.bias", CKPT_STAGE_FIRST),
    BY(CKPT_UNITS_HEADS, "*.q_proj.weight", CKPT_CUT_COLUMN, 0),
    BY(CKPT_UNITS_KV_HEADS, "*.k_proj.weight", CKPT_CUT_COLUMN, 0),
    BY(CKPT_UNITS_KV_HEADS, "*.v_proj.weight", CKPT_CUT_COLUMN, 0),
    BY(CKPT_UNITS_HEADS, "*.q_proj.bias", CKPT_CUT_COLUMN, 0),
    BY(CKPT_UNITS_KV_HEADS, "*.k_proj.bias", CKPT_CUT_COLUMN, 0),
    BY(CKPT_UNITS_KV_HEADS, "*.v_proj.bias", CKPT_CUT_COLUMN, 0),
    QKV("*.qkv_proj.*", 0),
    QKV("*.c_attn.weight", 1),
    QKV("*.c_attn.bias", 0),
    BY(CKPT_UNITS_HEADS, "*.o_proj.weight", CKPT_CUT_ROW, 1),
    WHOLE("*.o_proj.bias", CKPT_STAGE_FIRST),
    BY(CKPT_UNITS_HEADS, "*.attn.c_proj.weight", CKPT_CUT_ROW, 0),
    WHOLE("*.attn.c_proj.bias", CKPT_STAGE_FIRST),
    WHOLE("*.post_attention_layernorm.*", CKPT_STAGE_FIRST),
    WHOLE("*.ln_2.weight", CKPT_STAGE_FIRST),
    WHOLE("*.ln_2.bias", CKPT_STAGE_FIRST),
    PLAIN("*.gate_proj.*", CKPT_CUT_COLUMN, 0),
    PLAIN("*.up_proj.weight", CKPT_CUT_COLUMN, 0),
    PLAIN("*.up_proj.bias", CKPT_CUT_COLUMN, 0),
    HALVES("*.gate_up_proj.*", 0),
    PLAIN("*.c_fc.weight", CKPT_CUT_COLUMN, 1),
    PLAIN("*.c_fc.bias", CKPT_CUT_COLUMN, 0),
    PLAIN("*.down_proj.weight", CKPT_CUT_ROW, 1),
    WHOLE("*.down_proj.bias", CKPT_STAGE_FIRST),
    PLAIN("*.mlp.c_proj.weight", CKPT_CUT_ROW, 0),
    WHOLE("*.mlp.c_proj.bias", CKPT_STAGE_FIRST),
    WHOLE("model.norm.*", CKPT_STAGE_LAST),
    WHOLE("*ln_f.weight", CKPT_STAGE_LAST),
    WHOLE("*ln_f.bias", CKPT_STAGE_LAST),
    VOCABULARY("*lm_head.weight", CKPT_STAGE_LAST),
};
#define BUILTIN_COUNT (sizeof(builtin) / sizeof(builtin[0]))

/* '*' stands for any run of characters; no backtracking beyond the last one. */
static bool matches(const char *pattern, const char *name)
{
    const char *star = NULL, *retry = NULL;

    while (*name != '\0') {
        if (*pattern == '*') {
            star = ++pattern;
            retry = name;
        } else if (*pattern == *name) {
            pattern++;
            name++;
        } else if (star != NULL) {
            pattern = star;
            name = ++retry;
        } else {
            return false;
        }
    }
    while (*pattern == '*') {
        pattern++;
    }
    return *pattern == '\0';
}

const struct ckpt_layout_rule *layout_rule_find(const struct ckpt_layout_model *model,
                                                const char *name, uint32_t *ret_number)
{
    for (uint32_t i = 0; i < model->rule_count; i++) {
        if (matches(model->rules[i].match, name)) {
            *ret_number = i;
            return &model->rules[i];
        }
    }
    for (uint32_t i = 0; i < BUILTIN_COUNT; i++) {
        if (matches(builtin[i].match, name)) {
            *ret_number = model->rule_count + i;
            return &builtin[i];
        }
    }
    *ret_number = UINT32_MAX;
    return NULL;
}

uint32_t layout_layer_of(const char *name)
{
    while (*name != '\0') {
        size_t word = strcspn(name, "."), digits = strspn(name, "0123456789");

        if (digits > 0 && digits == word && digits < 10) {
            return (uint32_t)strtoul(name, NULL, 10);
        }
        name += word + (name[word] == '.');
    }
    return UINT32_MAX;
}

void layout_base_name(char ret[BL_TENSOR_NAME_MAX], const struct bl_tensor *tensor)
{
    static const char *const suffixes[] = {".exp_avg", ".exp_avg_sq"};
    size_t bytes = strlen(tensor->name);

    snprintf(ret, BL_TENSOR_NAME_MAX, "%s", tensor->name);
    if (tensor->kind != BL_KIND_MOMENT1 && tensor->kind != BL_KIND_MOMENT2) {
        return;
    }
    for (uint32_t i = 0; i < 2; i++) {
        size_t end = strlen(suffixes[i]);

        if (bytes > end && strcmp(ret + bytes - end, suffixes[i]) == 0) {
            ret[bytes - end] = '\0';
            return;
        }
    }
}

static uint64_t units_number(uint64_t units, const struct ckpt_layout_model *model)
{
    return units == CKPT_UNITS_HEADS      ? model->heads
           : units == CKPT_UNITS_KV_HEADS ? model->kv_heads
                                          : units;
}

static int refuse(const struct bl_tensor *tensor, uint32_t dim, struct bl_errmsg *msg,
                  const char *what, uint64_t number)
{
    return bl_err(msg, BL_ECONFIG, "layout: %s: dimension %u of %llu is not %llu %s", tensor->name,
                  dim, (unsigned long long)tensor->shape[dim], (unsigned long long)number, what);
}

/* The sub-parameters of a column- or row-parallel tensor. */
static int resolve_spans(struct layout_tensor *ret, const struct ckpt_layout_rule *rule,
                         const struct ckpt_layout_model *model, struct bl_errmsg *msg)
{
    static const struct ckpt_layout_piece whole = {1, CKPT_UNITS_ELEMS};
    const struct ckpt_layout_piece *pieces = rule->piece_count == 0 ? &whole : rule->pieces;
    uint64_t length = ret->tensor.shape[ret->dim], all = 0, at = 0;

    ret->span_count = rule->piece_count == 0 ? 1 : rule->piece_count;
    for (uint32_t i = 0; i < ret->span_count; i++) {
        uint64_t share = units_number(pieces[i].share, model);

        if (share == 0) { /* fused by heads, and nobody said how many */
            return bl_err(msg, BL_ECONFIG,
                          "layout: %s is fused: give heads= and kv_heads= to cut it",
                          ret->tensor.name);
        }
        if (__builtin_add_overflow(all, share, &all)) {
            return bl_err(msg, BL_ECONFIG, "layout: %s: widths too large", ret->tensor.name);
        }
    }
    if (length % all != 0) {
        return refuse(&ret->tensor, ret->dim, msg, "parts of equal size", all);
    }
    for (uint32_t i = 0; i < ret->span_count; i++) {
        struct layout_span *span = &ret->spans[i];
        uint64_t units = units_number(pieces[i].units, model);

        span->lo = at;
        span->width = length / all * units_number(pieces[i].share, model);
        if (units > 0 && span->width % units != 0) {
            return refuse(&ret->tensor, ret->dim, msg, "heads of equal size", units);
        }
        span->unit = units == 0 ? 1 : span->width / units;
        span->heads = units > 0;
        at += span->width;
    }
    return 0;
}

int layout_tensor_resolve(struct layout_tensor *ret, const struct bl_tensor *tensor,
                          const struct ckpt_layout *layout, const struct ckpt_layout_model *model,
                          struct bl_errmsg *msg)
{
    const struct ckpt_layout_rule *rule;
    char name[BL_TENSOR_NAME_MAX];
    uint64_t multiple = (model->vocab_multiple == 0 ? 1 : model->vocab_multiple);
    uint64_t rows;

    memset(ret, 0, sizeof(*ret));
    ret->tensor = *tensor;
    layout_base_name(name, tensor);
    ret->layer = layout_layer_of(name);
    ret->rule = UINT32_MAX;
    rule = layout_rule_find(model, name, &ret->rule);
    if (rule == NULL || tensor->kind == BL_KIND_OTHER) {
        return 0; /* replicated, on the first stage or its layer's */
    }
    ret->cut = rule->cut;
    ret->dim = rule->dim;
    ret->stage = rule->stage;
    if (rule->cut == CKPT_CUT_VOCABULARY && rule->stage == CKPT_STAGE_FIRST && model->tied) {
        ret->stage = CKPT_STAGE_BOTH;
    }
    if (layout->tp == 1) {
        ret->cut = CKPT_CUT_REPLICATED;
    }
    if (ret->cut == CKPT_CUT_REPLICATED) {
        return 0;
    }
    if (rule->dim >= tensor->dims) {
        return bl_err(msg, BL_ECONFIG, "layout: %s has %u dimensions, dimension %u is to be cut",
                      tensor->name, tensor->dims, rule->dim);
    }
    if (rule->cut != CKPT_CUT_VOCABULARY) {
        return resolve_spans(ret, rule, model, msg);
    }
    rows = tensor->shape[rule->dim];
    multiple *= layout->tp;
    if (rows > UINT64_MAX - multiple) {
        return bl_err(msg, BL_ECONFIG, "layout: %s: vocabulary too large", tensor->name);
    }
    ret->padded = (rows + multiple - 1) / multiple * multiple;
    return 0;
}

/* ---- As text ---- */

int ckpt_layout_model_read(struct ckpt_layout_model *ret, const char *job, struct bl_errmsg *msg)
{
    json_t *object = NULL, *model;
    int rc;

    if (job == NULL) {
        return 0;
    }
    rc = bl_json_parse(job, strlen(job), &object, msg);
    if (rc < 0) {
        return bl_err_in(msg, rc, "job");
    }
    model = json_object_get(object, "model");
    if (json_is_object(model)) {
        BL_IGNORE(bl_json_u32(model, "heads", 1, 1u << 20, &ret->heads, NULL), "may be missing");
        ret->kv_heads = ret->heads;
        BL_IGNORE(bl_json_u32(model, "kv_heads", 1, 1u << 20, &ret->kv_heads, NULL),
                  "may be missing");
        ret->tied = json_is_true(json_object_get(model, "tied")) ||
                    json_integer_value(json_object_get(model, "tied")) == 1;
    }
    json_decref(object);
    return 0;
}

int ckpt_layout_parse(struct ckpt_layout *ret, struct ckpt_layout_model *model, const char *text,
                      struct bl_errmsg *msg)
{
    struct ckpt_layout layout = {.dp = 1, .tp = 1, .pp = 1};
    const struct {
        const char *name;
        uint32_t *at, min, max;
    } keys[] = {
        {"dp", &layout.dp, 1, CKPT_LAYOUT_WORLD_MAX},
        {"tp", &layout.tp, 1, 65536},
        {"pp", &layout.pp, 1, 65536},
        {"zero", &layout.zero, 0, 3},
        {"vocab", &model->vocab_multiple, 1, 1u << 20},
        {"heads", &model->heads, 1, 1u << 20},
        {"kv_heads", &model->kv_heads, 1, 1u << 20},
    };
    uint32_t seen = 0;

    while (*text != '\0') {
        size_t word = strcspn(text, ","), name = strcspn(text, "=");
        uint32_t i = 0;
        unsigned long value;
        char *end = NULL;

        while (i < sizeof(keys) / sizeof(keys[0]) &&
               (strlen(keys[i].name) != name || strncmp(keys[i].name, text, name) != 0)) {
            i++;
        }
        if (i == sizeof(keys) / sizeof(keys[0]) || name >= word || (seen & 1u << i) != 0) {
            return bl_err(msg, BL_ECONFIG,
                          "layout: \"%.*s\": dp=, tp=, pp=, zero=, vocab=, heads=, kv_heads=, "
                          "each at most once",
                          (int)word, text);
        }
        value = strtoul(text + name + 1, &end, 10);
        if (end != text + word || text[name + 1] < '0' || text[name + 1] > '9' ||
            value < keys[i].min || value > keys[i].max) {
            return bl_err(msg, BL_ECONFIG, "layout: \"%.*s\": a number from %u to %u", (int)word,
                          text, keys[i].min, keys[i].max);
        }
        *keys[i].at = (uint32_t)value;
        seen |= 1u << i;
        text += word + (text[word] == ',');
    }
    if ((uint64_t)layout.dp * layout.tp * layout.pp > CKPT_LAYOUT_WORLD_MAX) {
        return bl_err(msg, BL_ECONFIG, "layout: dp * tp * pp is more than %u",
                      CKPT_LAYOUT_WORLD_MAX);
    }
    layout.world = layout.dp * layout.tp * layout.pp;
    *ret = layout;
    return 0;
}

static int rule_word(const json_t *object, const char *key, const char *const *words,
                     uint32_t count, uint32_t *ret, struct bl_errmsg *msg)
{
    const char *text = NULL;
    int rc = bl_json_string(object, key, 32, &text, msg);

    for (uint32_t i = 0; rc == 0 && i < count; i++) {
        if (strcmp(text, words[i]) == 0) {
            *ret = i;
            return 0;
        }
    }
    return rc < 0 ? rc : bl_err(msg, BL_EFORMAT, "%s: \"%s\" is not known", key, text);
}

static int rule_pieces(struct ckpt_layout_rule *rule, const json_t *object, struct bl_errmsg *msg)
{
    json_t *list = NULL;
    int rc = bl_json_array(object, "pieces", CKPT_LAYOUT_PIECES_MAX, &list, msg);

    for (size_t i = 0; rc == 0 && i < json_array_size(list); i++) {
        json_t *piece = json_array_get(list, i);
        json_int_t width = json_integer_value(json_array_get(piece, 0));
        json_int_t units = json_integer_value(json_array_get(piece, 1));

        if (!json_is_array(piece) || json_array_size(piece) != 2 || width < 1 || units < 0 ||
            units > (1 << 20) || width > (json_int_t)1 << 48) {
            return bl_err(msg, BL_EFORMAT, "pieces: each is [width, units]");
        }
        rule->pieces[i] = (struct ckpt_layout_piece){(uint64_t)width, (uint32_t)units};
        rule->piece_count = (uint32_t)i + 1;
    }
    return rc;
}

static int rule_read(struct ckpt_layout_rule *rule, const json_t *object, struct bl_errmsg *msg)
{
    static const char *const keys[] = {"match", "cut", "dim", "stage", "pieces", NULL};
    static const char *const cuts[] = {"replicated", "column", "row", "vocabulary"};
    static const char *const stages[] = {"first", "last", "both"};
    const char *match = NULL;
    uint32_t cut = 0, stage = 0;
    int rc = json_is_object(object) ? 0 : bl_err(msg, BL_EFORMAT, "not an object");

    rc = rc < 0 ? rc : bl_json_only(object, keys, msg);
    rc = rc < 0 ? rc : bl_json_string(object, "match", BL_TENSOR_NAME_MAX, &match, msg);
    rc = rc < 0 ? rc : rule_word(object, "cut", cuts, 4, &cut, msg);
    if (rc == 0 && json_object_get(object, "stage") != NULL) {
        rc = rule_word(object, "stage", stages, 3, &stage, msg);
    }
    if (rc == 0 && json_object_get(object, "dim") != NULL) {
        rc = bl_json_u32(object, "dim", 0, BL_TENSOR_DIMS_MAX - 1, &rule->dim, msg);
    }
    if (rc == 0 && json_object_get(object, "pieces") != NULL) {
        rc = rule_pieces(rule, object, msg);
    }
    if (rc < 0) {
        return rc;
    }
    rule->cut = (enum ckpt_layout_cut)cut;
    rule->stage = (enum ckpt_stage)stage;
    rule->match = strdup(match);
    return rule->match == NULL ? bl_err_code(msg, -ENOMEM, "rules") : 0;
}

int ckpt_layout_rules_read(struct ckpt_layout_rule **ret_rules, uint32_t *ret_count,
                           const char *text, size_t bytes, struct bl_errmsg *msg)
{
    struct ckpt_layout_rule *rules;
    json_t *list = NULL;
    uint32_t count = 0;
    int rc = bl_json_parse(text, bytes, &list, msg);

    if (rc < 0) {
        return rc;
    }
    if (!json_is_array(list) || json_array_size(list) > CKPT_LAYOUT_RULES_MAX) {
        json_decref(list);
        return bl_err(msg, BL_EFORMAT, "a list of at most %u rules is wanted",
                      CKPT_LAYOUT_RULES_MAX);
    }
    rules = calloc(json_array_size(list) + 1, sizeof(*rules));
    rc = rules == NULL ? bl_err_code(msg, -ENOMEM, "rules") : 0;
    while (rc == 0 && count < json_array_size(list)) {
        rc = rule_read(&rules[count], json_array_get(list, count), msg);
        rc = rc < 0 ? bl_err_in(msg, rc, "rule %u", count) : 0;
        count += rc == 0;
    }
    json_decref(list);
    if (rc < 0) {
        ckpt_layout_rules_free(rules, count);
        return rc;
    }
    *ret_rules = rules;
    *ret_count = count;
    return 0;
}

void ckpt_layout_rules_free(struct ckpt_layout_rule *rules, uint32_t count)
{
    for (uint32_t i = 0; rules != NULL && i < count; i++) {
        free((void *)(uintptr_t)rules[i].match);
    }
    free(rules);
}
