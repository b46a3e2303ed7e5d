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

static const double *named(const struct seq *s, const char *layer_name, uint32_t layer)
{
    char name[BL_TENSOR_NAME_MAX];
    snprintf(name, sizeof name, "model.layers.%u.%s.weight", layer, layer_name);
    for (uint32_t i = 0; i < s->ref->tensor_count; i++) {
        if (strcmp(s->ref->tensors[i].name, name) == 0 ||
            strcmp(s->ref->tensors[i].name, layer_name) == 0) {
            return s->params + s->ref->tensors[i].offset;
        }
    }
    abort();
}

static double *zeros(size_t count)
{
    double *p = calloc(count, sizeof *p);
    if (p == NULL) {
        abort();
    }
    return p;
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
        double mean = 0;
        for (uint32_t i = 0; i < c; i++) {
            mean += x[t * c + i] * x[t * c + i] / c;
        }
        for (uint32_t i = 0; i < c; i++) {
            y[t * c + i] = x[t * c + i] / sqrt(mean + (float)ref->config.norm_eps) * w[i];
        }
    }
}

static void rotate(double *x, uint32_t t_count, uint32_t heads, uint32_t d, double theta)
{
    for (uint32_t t = 0; t < t_count; t++) {
        for (uint32_t h = 0; h < heads; h++) {
            double *v = x + (t * heads + h) * d;
            for (uint32_t i = 0; i < d / 2; i++) {
                double angle = t * pow(theta, -2.0 * i / d);
                double a = v[i], b = v[i + d / 2];
                v[i] = a * cos(angle) - b * sin(angle);
                v[i + d / 2] = b * cos(angle) + a * sin(angle);
            }
        }
    }
}

/* One query row of one head: o[D] = softmax(q k^T / sqrt(D)) v over keys 0..t. */
static void attend(double *o, const double *q, const double *k, const double *v, uint32_t t,
                   uint32_t stride, uint32_t d)
{
    double *p = zeros(t + 1), sum = 0;
    for (uint32_t j = 0; j <= t; j++) {
        for (uint32_t i = 0; i < d; i++) {
            p[j] += q[i] * k[j * stride + i] / sqrt(d);
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
    norm(n, s->x, named(s, "input_layernorm", layer), s->ref);
    product(q, n, named(s, "self_attn.q_proj", layer), t_count, c, c);
    product(k, n, named(s, "self_attn.k_proj", layer), t_count, c, kv);
    product(v, n, named(s, "self_attn.v_proj", layer), t_count, c, kv);
    rotate(q, t_count, m->heads, d, m->rope_theta);
    rotate(k, t_count, m->kv_heads, d, m->rope_theta);
    for (uint32_t t = 0; t < t_count; t++) {
        for (uint32_t h = 0; h < m->heads; h++) {
            uint32_t shared = h / (m->heads / m->kv_heads) * d;
            attend(o + t * c + h * d, q + t * c + h * d, k + shared, v + shared, t, kv, d);
        }
    }
    product(y, o, named(s, "self_attn.o_proj", layer), t_count, c, c);
    for (uint32_t i = 0; i < t_count * c; i++) {
        s->x[i] += y[i];
    }
    free(n), free(q), free(k), free(v), free(o), free(y);
}

static void mlp(struct seq *s, uint32_t layer)
{
    const struct bl_job_model *m = &s->ref->config;
    uint32_t t_count = s->ref->seq_len, c = m->dim, f = m->hidden;
    double *n = zeros(t_count * c), *gate = zeros(t_count * f), *up = zeros(t_count * f);
    double *y = zeros(t_count * c);
    norm(n, s->x, named(s, "post_attention_layernorm", layer), s->ref);
    product(gate, n, named(s, "mlp.gate_proj", layer), t_count, c, f);
    product(up, n, named(s, "mlp.up_proj", layer), t_count, c, f);
    for (uint32_t i = 0; i < t_count * f; i++) {
        gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i];
    }
    product(y, gate, named(s, "mlp.down_proj", layer), t_count, f, c);
    for (uint32_t i = 0; i < t_count * c; i++) {
        s->x[i] += y[i];
    }
    free(n), free(gate), free(up), free(y);
}

static double sequence_loss(struct seq *s, const double *head, const int32_t *tokens,
                            const int32_t *targets)
{
    const struct bl_job_model *m = &s->ref->config;
    uint32_t t_count = s->ref->seq_len, c = m->dim;
    for (uint32_t t = 0; t < t_count; t++) {
        memcpy(s->x + t * c, s->params + (size_t)tokens[t] * c, c * sizeof(double));
    }
    for (uint32_t layer = 0; layer < m->layers; layer++) {
        attention(s, layer);
        mlp(s, layer);
    }
    double *n = zeros(t_count * c), *logits = zeros(t_count * m->vocab), loss = 0;
    norm(n, s->x, named(s, "model.norm.weight", 0), s->ref);
    product(logits, n, head, t_count, c, m->vocab);
    for (uint32_t t = 0; t < t_count; t++) {
        double sum = 0;
        for (uint32_t i = 0; i < m->vocab; i++) {
            sum += exp(logits[t * m->vocab + i]);
        }
        loss += targets[t] < 0 ? 0 : log(sum) - logits[t * m->vocab + (uint32_t)targets[t]];
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
