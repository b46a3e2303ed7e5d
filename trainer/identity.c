/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/identity.h"

#include <stdio.h>
#include <string.h>

#include "base/digest.h"
#include "trainer/start.h"

#define TRAIN_ARITHMETIC "belay-train-1" /* changes when the trainer's own order of sums does */

int train_identity(struct train_rank *rank, struct train_identity *ret, struct bl_errmsg *msg)
{
    int rc = kern_start(msg);
    if (rc == 0) {
        rc = train_model_probe(rank->kern, &rank->job->model, rank->job->tp,
                               rank->job->train.seq_len, rank->job->train.micro_batch,
                               rank->job->train.head_chunk, &ret->probe, msg);
    }
    if (rc != 0) {
        return rc;
    }
    ret->job_digest = bl_job_function_digest(rank->job);
    rc = train_data_digest(rank->data, &ret->data_digest, msg);
    if (rc != 0) {
        return rc;
    }
    struct bl_state_digest init;
    rc = train_start_digest(rank->job, &init, msg);
    if (rc != 0) {
        return rc;
    }
    ret->build = rank->kern->ops->build_name(rank->kern);
    char text[1024];
    int n = snprintf(text, sizeof text, "%s job %016llx data %016llx build %s", TRAIN_ARITHMETIC,
                     (unsigned long long)ret->job_digest, (unsigned long long)ret->data_digest,
                     ret->build);
    BL_ASSERT(n > 0 && (size_t)n < sizeof text);
    if (rank->kern->is_device) { /* train.precision auto is resolved */
        n += snprintf(text + n, sizeof text - (size_t)n, " on %s in %s", rank->kern->ops->name,
                      rank->kern->type == KERN_BF16 ? "bf16" : "fp32");
        BL_ASSERT((size_t)n < sizeof text);
    }
    if (rank->job->train.init[0] != 0) {
        n += snprintf(text + n, sizeof text - (size_t)n, " init %016llx%016llx",
                      (unsigned long long)init.sum[0], (unsigned long long)init.sum[1]);
        BL_ASSERT((size_t)n < sizeof text);
    }
    ret->function_id = bl_xxh3(text, (size_t)n);
    return 0;
}
