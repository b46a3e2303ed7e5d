/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/model_tp.h"

#include <string.h>

#include "trainer/comm.h"

/* ---- the stream ---- */

uint32_t model_tp_first_row(const struct train_model *model)
{
    return model->part.sequence ? model->part.tp_rank * model->stream_rows : 0;
}

float *model_tp_own(const struct train_model *model, float *whole)
{
    return whole + (size_t)model_tp_first_row(model) * model->config.dim;
}

/* Borders of the ranks' rows in an array [N,C], times `each`. */
static void row_bounds(const struct train_model *model, uint64_t each)
{
    for (uint32_t r = 0; r <= model->part.tp; r++) {
        model->tp_bounds[r] = (uint64_t)r * model->stream_rows * model->config.dim * each;
    }
}

int model_tp_sum(const struct model_pass *p, float *parts, struct bl_errmsg *msg)
{
    const struct train_model *m = p->model;
    if (m->part.tp == 1) {
        return 0;
    }
    if (!m->part.sequence) {
        return comm_group_sum_f32(p->hooks->tp, parts, (uint64_t)m->rows * m->config.dim, msg);
    }
    row_bounds(m, 1);
    return comm_group_reduce_scatter_f32(p->hooks->tp, parts, m->tp_bounds, msg);
}

int model_tp_gather(const struct model_pass *p, float *whole, struct bl_errmsg *msg)
{
    if (!p->model->part.sequence) {
        return 0;
    }
    row_bounds(p->model, sizeof(float));
    return comm_group_allgather(p->hooks->tp, whole, p->model->tp_bounds, msg);
}

int model_tp_whole_dx(const struct model_pass *p, const float **ret, struct bl_errmsg *msg)
{
    struct train_model *m = p->model;
    *ret = m->dx;
    if (!m->part.sequence) {
        return 0;
    }
    size_t bytes = (size_t)m->stream_rows * m->config.dim * sizeof(float);
    memcpy(model_tp_own(m, m->whole), m->dx, bytes);
    *ret = m->whole;
    return model_tp_gather(p, m->whole, msg);
}

int model_tp_row_product(const struct model_pass *p, enum model_layer_tensor which, float *y,
                         const float *x, struct bl_errmsg *msg)
{
    const struct train_model *m = p->model;
    float *parts = m->part.sequence ? m->whole : y;
    model_forward_product(p, which, parts, x);
    int rc = model_tp_sum(p, parts, msg);
    if (rc == 0 && m->part.sequence) {
        size_t bytes = (size_t)m->stream_rows * m->config.dim * sizeof(float);
        memcpy(y, model_tp_own(m, parts), bytes);
    }
    if (rc == 0) {
        model_forward_bias(p, which, y, m->stream_rows);
    }
    return rc;
}

/* ---- gradients of what several ranks have ---- */

/* [dk, dv] side by side in memory that the sum slices. */
static int sum_sharers(const struct model_pass *p, float *data, uint64_t count,
                       struct bl_errmsg *msg)
{
    const struct train_model *m = p->model;
    uint32_t first = m->span[MODEL_SPAN_KV].owner, ranks = m->kv_sharers;
    uint32_t me = m->part.tp_rank - first;
    uint64_t lo = count * me / ranks, mine = count * (me + 1) / ranks - lo;
    memset(m->tp_parts, 0, 2 * (size_t)m->part.tp * sizeof *m->tp_parts);
    struct comm_part *sends = m->tp_parts, *recvs = sends + m->part.tp;
    for (uint32_t s = 0; s < ranks; s++) { /* the others' slices out, of ours what they have */
        uint64_t at = count * s / ranks, end = count * (s + 1) / ranks;
        if (s != me) {
            sends[first + s] = (struct comm_part){data + at, (end - at) * sizeof(float)};
            recvs[first + s] = (struct comm_part){m->shared + s * mine, mine * sizeof(float)};
        }
    }
    int rc = comm_group_exchange(p->hooks->tp, sends, recvs, msg);
    if (rc != 0) {
        return rc;
    }
    memcpy(m->shared + me * mine, data + lo, mine * sizeof(float));
    memcpy(data + lo, m->shared, mine * sizeof(float));
    for (uint32_t s = 1; s < ranks; s++) {
        kern_add(p->pool, data + lo, data + lo, m->shared + s * mine, mine);
    }
    for (uint32_t s = 0; s < ranks; s++) { /* our sum out, theirs in */
        uint64_t at = count * s / ranks, end = count * (s + 1) / ranks;
        if (s != me) {
            sends[first + s] = (struct comm_part){data + lo, mine * sizeof(float)};
            recvs[first + s] = (struct comm_part){data + at, (end - at) * sizeof(float)};
        }
    }
    return comm_group_exchange(p->hooks->tp, sends, recvs, msg);
}

int model_tp_sum_shared(const struct model_pass *p, struct bl_errmsg *msg)
{
    const struct train_model *m = p->model;
    uint64_t count = (uint64_t)m->rows * m->kv_dim;
    if (m->kv_sharers == 1) {
        return 0;
    }
    int rc = sum_sharers(p, m->dk, count, msg);
    return rc != 0 ? rc : sum_sharers(p, m->dv, count, msg);
}

static void put_grads(const struct model_pass *p, float *to, const float *from)
{
    uint32_t dim = p->model->config.dim;
    if (p->add) {
        kern_add(p->pool, to, to, from, dim);
    } else {
        memcpy(to, from, dim * sizeof(float));
    }
}

int model_tp_norm_grads(const struct model_pass *p, float *dweight, float *dbias, float *parts,
                        struct bl_errmsg *msg)
{
    uint64_t dim = p->model->config.dim;
    int rc = comm_group_sum_f32(p->hooks->tp, parts, dbias == NULL ? dim : 2 * dim, msg);
    if (rc == 0) {
        put_grads(p, dweight, parts);
    }
    if (rc == 0 && dbias != NULL) {
        put_grads(p, dbias, parts + dim);
    }
    return rc;
}

/* ---- the loss ---- */

/* Everybody's `bytes` from ours, one behind the other, which lie in their place. */
static int gather_equal(const struct model_pass *p, void *all, uint64_t bytes,
                        struct bl_errmsg *msg)
{
    const struct train_model *m = p->model;
    for (uint32_t r = 0; r <= m->part.tp; r++) {
        m->tp_bounds[r] = r * bytes;
    }
    return comm_group_allgather(p->hooks->tp, all, m->tp_bounds, msg);
}

int model_tp_cross_entropy(const struct model_pass *p, int backward, double *ret_loss,
                           uint64_t *ret_tokens, struct bl_errmsg *msg)
{
    const struct train_model *m = p->model;
    const int32_t *targets = p->flow->targets;
    uint32_t n = m->rows, tp = m->part.tp, me = m->part.tp_rank, lo = m->span[MODEL_SPAN_VOCAB].lo;
    float *tops = m->tops;
    double *sums = m->sums;
    if (tp == 1) {
        *ret_loss = kern_cross_entropy(p->pool, m->logits, m->losses, targets, n, m->vocab,
                                       backward, ret_tokens);
        return 0;
    }
    kern_cross_entropy_top(p->pool, tops + (size_t)me * n, m->logits, targets, n, m->vocab);
    int rc = gather_equal(p, tops, n * sizeof *tops, msg);
    for (size_t i = n; rc == 0 && i < (size_t)tp * n; i++) {
        tops[i % n] = tops[i] > tops[i % n] ? tops[i] : tops[i % n];
    }
    if (rc == 0) {
        kern_cross_entropy_sum(p->pool, sums + 2 * (size_t)me * n, m->logits, tops, targets, n, lo,
                               m->vocab, backward);
        rc = gather_equal(p, sums, 2ULL * n * sizeof *sums, msg);
    }
    for (size_t i = 2 * (size_t)n; rc == 0 && i < 2 * (size_t)tp * n; i++) {
        sums[i % (2 * (size_t)n)] += sums[i];
    }
    if (rc == 0) {
        *ret_loss = kern_cross_entropy_finish(p->pool, m->logits, m->losses, sums, targets, n, lo,
                                              m->vocab, backward, ret_tokens);
    }
    return rc;
}
