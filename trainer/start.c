/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/start.h"

#include <string.h>

#include "trainer/weights.h"

static int rope_is_stretched(const struct bl_job_model *model)
{
    return model->rope_factor > 1;
}

static int rope_differs(const struct bl_job_model *a, const struct bl_job_model *b)
{
    if (rope_is_stretched(a) != rope_is_stretched(b)) {
        return 1;
    }
    return rope_is_stretched(a) &&
           (a->rope_factor != b->rope_factor || a->rope_low != b->rope_low ||
            a->rope_high != b->rope_high || a->rope_context != b->rope_context);
}

/* The first option of the model that differs, or NULL. */
static const char *model_difference(const struct bl_job_model *a, const struct bl_job_model *b)
{
    return a->arch != b->arch               ? "arch"
           : a->layers != b->layers         ? "layers"
           : a->dim != b->dim               ? "dim"
           : a->hidden != b->hidden         ? "hidden"
           : a->heads != b->heads           ? "heads"
           : a->kv_heads != b->kv_heads     ? "kv_heads"
           : a->vocab != b->vocab           ? "vocab"
           : a->tied != b->tied             ? "tied"
           : a->bias != b->bias             ? "bias"
           : a->context != b->context       ? "context"
           : a->rope_theta != b->rope_theta ? "rope_theta"
           : rope_differs(a, b)             ? "rope_factor"
           : a->norm_eps != b->norm_eps     ? "norm_eps"
                                            : NULL;
}

static int open_init(struct train_weights *weights, const struct bl_job *job, struct bl_errmsg *msg)
{
    int rc = train_weights_open(weights, job->train.init, NULL, msg);
    if (rc == 0 && weights->store == NULL) {
        rc = bl_err(msg, BL_ECONFIG, "it is no checkpoint of Belay's: ckpt-tool import makes one");
    }
    const char *difference = rc == 0 ? model_difference(&job->model, &weights->config) : NULL;
    if (difference != NULL) {
        rc = bl_err(msg, BL_ECONFIG, "it is of another model: model.%s differs", difference);
    }
    return rc != 0 ? bl_err_in(msg, rc, "train.init %s", job->train.init) : 0;
}

/* The rank's weights as extents, where the slot has them. */
static int wanted(const struct train_shard *shard, struct bl_extent_list *list,
                  struct bl_errmsg *msg)
{
    uint32_t count;
    const struct train_tensor *tensors = train_model_tensors(shard->model, &count);
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && i < shard->extent_count; i++) {
        const struct train_extent *e = &shard->extents[i];
        rc = train_weights_want(list, &tensors[e->tensor], e->flat_lo, e->flat_hi,
                                e->offset[TRAIN_WEIGHT], msg);
    }
    return rc;
}

int train_start(const struct train_rank *rank, void *slot, struct bl_errmsg *msg)
{
    struct train_weights weights = {0};
    struct bl_extent_list list = {0};
    struct ckpt_load_result result;
    /* Zero moments; the weights are written over where there are others. */
    train_shard_fresh(&rank->shard, slot, rank->job->train.seed, rank->pool);
    if (rank->job->train.init[0] == 0) {
        return 0;
    }
    int rc = open_init(&weights, rank->job, msg);
    if (rc == 0) {
        rc = wanted(&rank->shard, &list, msg);
    }
    if (rc == 0 && list.extent_count > 0) { /* a rank may own nothing */
        const struct ckpt_dest dest = {.list = &list, .base = slot};
        rc = ckpt_load(weights.store, weights.dir, &dest, 1, &result, msg);
        rc = rc != 0 ? bl_err_in(msg, rc, "train.init %s", rank->job->train.init) : 0;
    }
    bl_extent_list_close(&list);
    train_weights_close(&weights);
    return rc;
}

int train_start_digest(const struct bl_job *job, struct bl_state_digest *ret, struct bl_errmsg *msg)
{
    struct train_weights weights = {0};
    struct ckpt_manifest manifest = {0};
    memset(ret, 0, sizeof *ret);
    if (job->train.init[0] == 0) {
        return 0;
    }
    int rc = open_init(&weights, job, msg);
    if (rc == 0) {
        rc = ckpt_manifest_load(weights.store, weights.dir, &manifest, msg);
    }
    if (rc == 0) {
        *ret = manifest.state;
    }
    ckpt_manifest_close(&manifest);
    train_weights_close(&weights);
    return rc;
}
