/* SPDX-License-Identifier: Apache-2.0 */
#include "ref_model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct seq {
    const struct ref_model *ref;
    const double *params;
    double *x; /* [T,C] the residual stream */
};

static int is_wrong(const struct seq *s, enum ref_fault fault)
{
    return s->ref->fault == fault;
}

/* A tensor of a layer, or one of that very name; NULL: there is none. */
static const double *find(const struct seq *s, const char *layer_name, uint32_t layer)
{
    char name[BL_TENSOR_NAME_MAX];
    int gpt2 = s->ref->config.arch == BL_ARCH_GPT2;
    layer = is_wrong(s, REF_LAYERS_SWAPPED) ? s->ref->config.layers - 1 - layer : layer;
    snprintf(name, sizeof name, "%s.%u.%s", gpt2 ? "transformer.h" : "model.layers", layer,
             layer_name);
    for (uint32_t i = 0; i < s->ref->tensor_count; i++) {
        if (strcmp(s->ref->tensors[i].name, name) == 0 ||
            strcmp(s->ref->tensors[i].name, layer_name) == 0) {
            return s->params + s->ref->tensors[i].offset;
        }
    }
    return NULL;
}

static const double *named(const struct seq *s, const char *layer_name, uint32_t layer)
{
    const double *at = find(s, layer_name, layer);
    if (at == NULL) {
        abort();
    }
    return at;
}

static double *zeros(size_t count)
{
    double *p = calloc(count, sizeof *p);
    if (p == NULL) {
        abort();
    }
    return p;
}

/* x += y[T,C], the residual stream, or what is there without it */
static void join(struct seq *s, const double *y, enum ref_fault without)
{
    for (uint32_t i = 0; i < s->ref->seq_len * s->ref->config.dim; i++) {
        s->x[i] = (is_wrong(s, without) ? 0 : s->x[i]) + y[i];
    }
}

/* y[T,O] = x[T,I] w[O,I]^T */
static void product(double *y, const double *x, const double *w, uint32_t t_count, uint32_t in,
                    uint32_t out)
{
    for (uint32_t t = 0; t < t_count; t++) {
        for (uint32_t o = 0; o < out; o++) {
            double sum = 0;
            for (uint32_t i = 0; i < in; i++) {
                sum += x[t * in + i] * w[o * in + i];
            }
            y[t * out + o] = sum;
        }
    }
}

static void norm(double *y, const double *x, const double *w, const struct ref_model *ref)
{
    uint32_t c = ref->config.dim;
    for (uint32_t t = 0; t < ref->seq_len; t++) {
        double square = 0, mean = 0;
        for (uint32_t i = 0; i < c; i++) {
            square += x[t * c + i] * x[t * c + i] / c;
            mean += ref->fault == REF_NORM_KIND ? x[t * c + i] / c : 0;
        }
        for (uint32_t i = 0; i < c; i++) {
            y[t * c + i] =
                (x[t * c + i] - mean) / sqrt(square + (float)ref->config.norm_eps) * w[i];
        }
    }
}

/* Frequency i of a head, with Llama 3's stretching (kernels/kern.h says the formula). */
static double frequency(const struct ref_model *ref, uint32_t i, uint32_t d)
{
    const struct bl_job_model *m = &ref->config;
    double f = pow(m->rope_theta, -2.0 * i / d), turns = m->rope_context * f / (2 * M_PI);
    if (m->rope_factor <= 1 || ref->fault == REF_ROPE_UNSCALED || turns > m->rope_high) {
        return f;
    }
    double s = turns < m->rope_low ? 0 : (turns - m->rope_low) / (m->rope_high - m->rope_low);
    return (1 - s) * f / m->rope_factor + s * f;
}

static void rotate(double *x, const struct ref_model *ref, uint32_t heads, uint32_t d)
{
    int pairs = ref->fault == REF_ROPE_PAIRS;
    for (uint32_t t = 0; t < ref->seq_len && ref->fault != REF_NO_POSITIONS; t++) {
        for (uint32_t h = 0; h < heads; h++) {
            double *v = x + (t * heads + h) * d;
            for (uint32_t i = 0; i < d / 2; i++) {
                double angle = t * frequency(ref, i, d);
                double *a = v + (pairs ? 2 * i : i), *b = v + (pairs ? 2 * i + 1 : i + d / 2);
                double was = *a;
                *a = was * cos(angle) - *b * sin(angle);
                *b = *b * cos(angle) + was * sin(angle);
            }
        }
    }
}

/* One query row of one head: o[D] = softmax(q k^T / sqrt(D)) v over keys 0..t. */
static void attend(const struct seq *s, double *o, const double *q, const double *k,
                   const double *v, uint32_t t, uint32_t stride, uint32_t d)
{
    double *p = zeros(t + 2), sum = 0;
    double scale = is_wrong(s, REF_ATTENTION_SCALE) ? d : sqrt(d);
    t += is_wrong(s, REF_ATTENTION_AHEAD) && t + 1 < s->ref->seq_len;
    for (uint32_t j = 0; j <= t; j++) {
        for (uint32_t i = 0; i < d; i++) {
            p[j] += q[i] * k[j * stride + i] / scale;
        }
        p[j] = exp(p[j]);
        sum += p[j];
    }
    for (uint32_t i = 0; i < d; i++) {
        o[i] = 0;
        for (uint32_t j = 0; j <= t; j++) {
            o[i] += p[j] / sum * v[j * stride + i];
        }
    }
    free(p);
}

static void attention(struct seq *s, uint32_t layer)
{
    const struct bl_job_model *m = &s->ref->config;
    uint32_t t_count = s->ref->seq_len, c = m->dim, d = c / m->heads, kv = d * m->kv_heads;
    double *n = zeros(t_count * c), *q = zeros(t_count * c), *k = zeros(t_count * kv);
    double *v = zeros(t_count * kv), *o = zeros(t_count * c), *y = zeros(t_count * c);
    const char *first = "input_layernorm.weight", *second = "post_attention_layernorm.weight";
    norm(n, s->x, named(s, is_wrong(s, REF_NORM_EXCHANGED) ? second : first, layer), s->ref);
    product(q, n, named(s, "self_attn.q_proj.weight", layer), t_count, c, c);
    product(k, n, named(s, "self_attn.k_proj.weight", layer), t_count, c, kv);
    product(v, n, named(s, "self_attn.v_proj.weight", layer), t_count, c, kv);
    rotate(q, s->ref, m->heads, d);
    rotate(k, s->ref, m->kv_heads, d);
    for (uint32_t t = 0; t < t_count; t++) {
        for (uint32_t h = 0; h < m->heads; h++) {
            uint32_t group = m->heads / m->kv_heads;
            uint32_t shared = (is_wrong(s, REF_KV_INTERLEAVED) ? h % m->kv_heads : h / group) * d;
            attend(s, o + t * c + h * d, q + t * c + h * d, k + shared, v + shared, t, kv, d);
        }
    }
    product(y, o, named(s, "self_attn.o_proj.weight", layer), t_count, c, c);
    join(s, y, REF_ATTENTION_NO_RESIDUAL);
    free(n), free(q), free(k), free(v), free(o), free(y);
}

static void mlp(struct seq *s, uint32_t layer)
{
    const struct bl_job_model *m = &s->ref->config;
    uint32_t t_count = s->ref->seq_len, c = m->dim, f = m->hidden;
    double *n = zeros(t_count * c), *gate = zeros(t_count * f), *up = zeros(t_count * f);
    double *y = zeros(t_count * c);
    norm(n, s->x, named(s, "post_attention_layernorm.weight", layer), s->ref);
    product(gate, n, named(s, "mlp.gate_proj.weight", layer), t_count, c, f);
    product(up, n, named(s, "mlp.up_proj.weight", layer), t_count, c, f);
    for (uint32_t i = 0; i < t_count * f; i++) {
        double a = is_wrong(s, REF_GATE_EXCHANGED) ? up[i] : gate[i];
        gate[i] = 1 / (1 + exp(-a)) * gate[i] * up[i];
    }
    product(y, gate, named(s, "mlp.down_proj.weight", layer), t_count, f, c);
    join(s, y, REF_MLP_NO_RESIDUAL);
    free(n), free(gate), free(up), free(y);
}

/* ---- GPT-2 ---- */

/* y += the bias of that name, if there is one */
static void add_bias(const struct seq *s, double *y, const char *name, uint32_t layer, uint32_t out)
{
    const double *bias = find(s, name, layer);
    for (uint32_t i = 0; bias != NULL && i < s->ref->seq_len * out; i++) {
        y[i] += bias[i % out];
    }
}

static void layer_norm(const struct seq *s, double *y, const char *weight, const char *bias,
                       uint32_t layer)
{
    uint32_t c = s->ref->config.dim;
    const double *w = named(s, weight, layer);
    for (uint32_t t = 0; t < s->ref->seq_len; t++) {
        const double *x = s->x + t * c;
        double mean = 0, var = 0;
        for (uint32_t i = 0; i < c; i++) {
            mean += is_wrong(s, REF_NORM_KIND) ? 0 : x[i] / c;
        }
        for (uint32_t i = 0; i < c; i++) {
            var += (x[i] - mean) * (x[i] - mean) / c;
        }
        for (uint32_t i = 0; i < c; i++) {
            y[t * c + i] = (x[i] - mean) / sqrt(var + (float)s->ref->config.norm_eps) * w[i];
        }
    }
    add_bias(s, y, bias, layer, c);
}

static void linear(const struct seq *s, double *y, const double *x, const char *name,
                   uint32_t layer, uint32_t in, uint32_t out)
{
    char full[64];
    snprintf(full, sizeof full, "%s.weight", name);
    product(y, x, named(s, full, layer), s->ref->seq_len, in, out);
    snprintf(full, sizeof full, "%s.bias", name);
    if (!is_wrong(s, REF_BIAS_FORGOTTEN) || strcmp(name, "mlp.down_proj") != 0) {
        add_bias(s, y, full, layer, out);
    }
}

static void gpt2_layer(struct seq *s, uint32_t layer)
{
    const struct bl_job_model *m = &s->ref->config;
    uint32_t t_count = s->ref->seq_len, c = m->dim, f = m->hidden, d = c / m->heads;
    double *n = zeros(t_count * c), *q = zeros(t_count * c), *k = zeros(t_count * c);
    double *v = zeros(t_count * c), *o = zeros(t_count * c), *y = zeros(t_count * c);
    double *u = zeros(t_count * f);
    layer_norm(s, n, is_wrong(s, REF_NORM_EXCHANGED) ? "ln_2.weight" : "ln_1.weight", "ln_1.bias",
               layer);
    linear(s, q, n, "attn.q_proj", layer, c, c);
    linear(s, k, n, "attn.k_proj", layer, c, c);
    linear(s, v, n, "attn.v_proj", layer, c, c);
    for (uint32_t t = 0; t < t_count; t++) {
        for (uint32_t h = 0; h < m->heads; h++) {
            attend(s, o + t * c + h * d, q + t * c + h * d, k + h * d, v + h * d, t, c, d);
        }
    }
    linear(s, y, o, "attn.o_proj", layer, c, c);
    join(s, y, REF_ATTENTION_NO_RESIDUAL);
    layer_norm(s, n, "ln_2.weight", "ln_2.bias", layer);
    linear(s, u, n, "mlp.up_proj", layer, c, f);
    for (uint32_t i = 0; i < t_count * f; i++) {
        double x = u[i];
        u[i] = is_wrong(s, REF_GELU_ERF)
                   ? x / 2 * (1 + erf(x / sqrt(2)))
                   : x / 2 * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    }
    linear(s, y, u, "mlp.down_proj", layer, f, c);
    join(s, y, REF_MLP_NO_RESIDUAL);
    free(n), free(q), free(k), free(v), free(o), free(y), free(u);
}

static double sequence_loss(struct seq *s, const double *head, const int32_t *tokens,
                            const int32_t *targets)
{
    const struct bl_job_model *m = &s->ref->config;
    uint32_t t_count = s->ref->seq_len, c = m->dim;
    for (uint32_t t = 0; t < t_count; t++) {
        memcpy(s->x + t * c, s->params + (size_t)tokens[t] * c, c * sizeof(double));
    }
    int gpt2 = m->arch == BL_ARCH_GPT2;
    const double *positions = gpt2 ? named(s, "transformer.wpe.weight", 0) : NULL;
    for (uint32_t i = 0; gpt2 && i < t_count * c && !is_wrong(s, REF_NO_POSITIONS); i++) {
        s->x[i] += positions[i];
    }
    for (uint32_t layer = 0; layer < m->layers; layer++) {
        if (gpt2) {
            gpt2_layer(s, layer);
        } else {
            attention(s, layer);
            mlp(s, layer);
        }
    }
    double *n = zeros(t_count * c), *logits = zeros(t_count * m->vocab), loss = 0;
    if (is_wrong(s, REF_NO_FINAL_NORM)) {
        memcpy(n, s->x, t_count * c * sizeof *n);
    } else if (gpt2) {
        layer_norm(s, n, "transformer.ln_f.weight", "transformer.ln_f.bias", 0);
    } else {
        norm(n, s->x, named(s, "model.norm.weight", 0), s->ref);
    }
    product(logits, n, head, t_count, c, m->vocab);
    for (uint32_t t = 0; t < t_count; t++) {
        double sum = 0;
        for (uint32_t i = 0; i < m->vocab; i++) {
            sum += exp(logits[t * m->vocab + i]);
        }
        uint32_t target = (uint32_t)(is_wrong(s, REF_TARGETS_SHIFTED) ? tokens[t] : targets[t]);
        loss += targets[t] < 0 ? 0 : log(sum) - logits[t * m->vocab + target];
    }
    free(n), free(logits);
    return loss;
}

double ref_model_loss(const struct ref_model *ref, const double *params, const double *head,
                      const int32_t *tokens, const int32_t *targets)
{
    struct seq s = {ref, params, zeros((size_t)ref->seq_len * ref->config.dim)};
    double loss = 0;
    for (uint32_t b = 0; b < ref->batch; b++) {
        loss += sequence_loss(&s, head, tokens + b * ref->seq_len, targets + b * ref->seq_len);
    }
    free(s.x);
    return loss;
}
