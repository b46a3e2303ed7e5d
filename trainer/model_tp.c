/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/model_tp.h"

#include <string.h>

#include "trainer/comm.h"

/* ---- the stream ---- */

uint32_t model_tp_first_row(const struct train_model *model)
{
    return model->part.sequence ? model->part.tp_rank * model->stream_rows : 0;
}

kern_real *model_tp_own(const struct train_model *model, kern_real *whole)
{
    return kern_real_at(model->kern, whole,
                        (uint64_t)model_tp_first_row(model) * model->config.dim);
}

/* Borders of the ranks' rows in an array [N,C], times `each`. */
static void row_bounds(const struct train_model *model, uint64_t each)
{
    for (uint32_t r = 0; r <= model->part.tp; r++) {
        model->tp_bounds[r] = (uint64_t)r * model->stream_rows * model->config.dim * each;
    }
}

int model_tp_sum(const struct model_pass *p, kern_real *parts, struct bl_errmsg *msg)
{
    const struct train_model *m = p->model;
    if (m->part.tp == 1) {
        return 0;
    }
    if (!m->part.sequence) {
        return comm_group_sum(p->hooks->tp, parts, p->kern->type, (uint64_t)m->rows * m->config.dim,
                              msg);
    }
    row_bounds(m, 1);
    return comm_group_reduce_scatter(p->hooks->tp, parts, p->kern->type, m->tp_bounds, msg);
}

int model_tp_gather(const struct model_pass *p, kern_real *whole, struct bl_errmsg *msg)
{
    if (!p->model->part.sequence) {
        return 0;
    }
    row_bounds(p->model, p->kern->real_bytes);
    return comm_group_allgather(p->hooks->tp, whole, p->model->tp_bounds, msg);
}

int model_tp_whole_dx(const struct model_pass *p, const kern_real **ret, struct bl_errmsg *msg)
{
    struct train_model *m = p->model;
    *ret = m->dx;
    if (!m->part.sequence) {
        return 0;
    }
    model_stream_copy(m, model_tp_own(m, m->whole), m->dx);
    *ret = m->whole;
    return model_tp_gather(p, m->whole, msg);
}

int model_tp_row_product(const struct model_pass *p, enum model_layer_tensor which, kern_real *y,
                         const kern_real *x, struct bl_errmsg *msg)
{
    const struct train_model *m = p->model;
    kern_real *parts = m->part.sequence ? m->whole : y;
    model_forward_product(p, which, parts, x, m->part.tp == 1);
    if (m->part.tp == 1) {
        return 0;
    }
    int rc = model_tp_sum(p, parts, msg);
    if (rc == 0 && m->part.sequence) {
        model_stream_copy(m, y, model_tp_own(m, parts));
    }
    if (rc == 0) {
        model_forward_bias(p, which, y, m->stream_rows);
    }
    return rc;
}

/* ---- gradients of what several ranks have ---- */

/* A sharer's slice of `count` elements: its border. */
static uint64_t slice_at(uint64_t count, uint32_t s, uint32_t ranks)
{
    uint64_t units = (count + MODEL_SLICE - 1) / MODEL_SLICE;
    uint64_t at = units * s / ranks * MODEL_SLICE;
    return at < count ? at : count;
}

/* dk or dv over the ranks that share a key and value head. */
static int sum_sharers(const struct model_pass *p, kern_real *data, uint64_t count,
                       struct bl_errmsg *msg)
{
    const struct train_model *m = p->model;
    struct kern *k = p->kern;
    uint32_t first = m->span[MODEL_SPAN_KV].owner, ranks = m->kv_sharers;
    uint32_t me = m->part.tp_rank - first;
    uint64_t lo = slice_at(count, me, ranks), mine = slice_at(count, me + 1, ranks) - lo;
    uint64_t mine_bytes = mine * k->real_bytes;
    memset(m->tp_parts, 0, 2 * (size_t)m->part.tp * sizeof *m->tp_parts);
    struct comm_part *sends = m->tp_parts, *recvs = sends + m->part.tp;
    for (uint32_t s = 0; s < ranks; s++) { /* the others' slices out, of ours what they have */
        uint64_t at = slice_at(count, s, ranks), end = slice_at(count, s + 1, ranks);
        if (s != me) {
            sends[first + s] =
                (struct comm_part){kern_real_at(k, data, at), (end - at) * k->real_bytes};
            recvs[first + s] = (struct comm_part){kern_real_at(k, m->shared, s * mine), mine_bytes};
        }
    }
    int rc = comm_group_exchange(p->hooks->tp, sends, recvs, msg);
    if (rc != 0) {
        return rc;
    }
    kern_real *own = kern_real_at(k, data, lo);
    k->ops->copy(k, kern_real_at(k, m->shared, me * mine), own, mine_bytes);
    k->ops->sum_parts(k, own, m->shared, k->type, ranks, mine);
    for (uint32_t s = 0; s < ranks; s++) { /* our sum out, theirs in */
        uint64_t at = slice_at(count, s, ranks), end = slice_at(count, s + 1, ranks);
        if (s != me) {
            sends[first + s] = (struct comm_part){own, mine_bytes};
            recvs[first + s] =
                (struct comm_part){kern_real_at(k, data, at), (end - at) * k->real_bytes};
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
        p->kern->ops->add(p->kern, to, to, from, dim);
    } else {
        p->kern->ops->copy(p->kern, to, from, dim * sizeof(float));
    }
}

int model_tp_norm_grads(const struct model_pass *p, float *dweight, float *dbias, float *parts,
                        struct bl_errmsg *msg)
{
    uint64_t dim = p->model->config.dim;
    int rc = comm_group_sum(p->hooks->tp, parts, KERN_F32, dbias == NULL ? dim : 2 * dim, msg);
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

int model_tp_cross_entropy(const struct model_pass *p, uint32_t first, uint32_t n, int backward,
                           struct bl_errmsg *msg)
{
    const struct train_model *m = p->model;
    const struct kern_tokens *targets = &p->set->targets;
    struct kern *k = p->kern;
    double *losses = m->losses + first;
    uint32_t tp = m->part.tp, me = m->part.tp_rank, lo = m->span[MODEL_SPAN_VOCAB].lo;
    if (tp == 1) {
        k->ops->cross_entropy(k, m->logits, losses, targets, first, n, m->vocab, backward);
        return 0;
    }
    k->ops->cross_entropy_top(k, m->tops + (size_t)me * n, m->logits, targets, first, n, m->vocab);
    int rc = gather_equal(p, m->tops, n * sizeof *m->tops, msg);
    if (rc == 0) {
        k->ops->tops_merge(k, m->tops, m->tops, tp, n);
        k->ops->cross_entropy_sum(k, m->sums + 2 * (size_t)me * n, m->logits, m->tops, targets,
                                  first, n, lo, m->vocab, backward);
        rc = gather_equal(p, m->sums, 2ULL * n * sizeof *m->sums, msg);
    }
    if (rc == 0) {
        k->ops->sums_merge(k, m->sums, m->sums, tp, 2 * n);
        k->ops->cross_entropy_finish(k, m->logits, losses, m->tops, m->sums, targets, first, n, lo,
                                     m->vocab, backward);
    }
    return rc;
}
