/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/manifest.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"

double manifest_loss(const struct run *run, uint64_t step)
{
    for (uint32_t i = 0; i < run->proc_count; i++) {
        const struct wire_page *page = run->procs[i]->page;

        if (page && page->metrics_step == step) {
            return page->metrics_loss;
        }
    }
    return NAN;
}

char *manifest_json(const struct run *run, const struct core_commit *commit)
{
    const struct bl_job *job = run->job;
    uint64_t samples = commit->step * job->train.global_batch;
    double loss = manifest_loss(run, commit->step);
    char digest[BL_STATE_DIGEST_TEXT_BYTES], seed[24];
    int is_known = commit->dp > 0; /* else nothing has run since the leader began */
    uint32_t pp = is_known ? commit->pp : job->pp;
    uint32_t whole = commit->world / (job->tp * pp);
    uint32_t dp = is_known ? commit->dp : whole ? whole : 1;

    bl_state_digest_format(&commit->digest, digest);
    snprintf(seed, sizeof(seed), "%llu", (unsigned long long)job->train.seed);
    json_t *json =
        json_pack("{so sI sI sI so sI ss si ss s{si si si si si} s{so sI} ss so}", "run",
                  bl_json_new_hex64(run->id), "generation", (json_int_t)commit->generation, "line",
                  (json_int_t)commit->line, "step", (json_int_t)commit->step, "function",
                  bl_json_new_hex64(commit->function_id), "samples", (json_int_t)samples, "seed",
                  seed, "lanes", (int)job->lanes, "codec", job->codec, "layout", "world",
                  (int)commit->world, "dp", (int)dp, "tp", (int)job->tp, "pp", (int)pp, "zero",
                  (int)job->zero, "metrics", "loss", isfinite(loss) ? json_real(loss) : json_null(),
                  "tokens", (json_int_t)(samples * job->train.seq_len), "state_digest", digest,
                  "job", json_loads(run->job_json, 0, NULL));
    char *text = json ? bl_json_dump(json) : NULL;

    json_decref(json);
    return text;
}
