/* SPDX-License-Identifier: Apache-2.0 */
/* `--check` and `--probe`: what a job will do here, without starting it. */
#include <stdio.h>
#include <string.h>

#include "trainer/dryrun.h"
#include "trainer/identity.h"
#include "trainer/options.h"
#include "trainer/step.h"

const struct bl_job *train_job_load(const char *path)
{
    static struct bl_job job; /* over 100 KiB, too much for a stack */
    struct bl_errmsg msg = {{0}};
    if (bl_job_load(&job, path, &msg) != 0) {
        fprintf(stderr, "belay-train: %s\n", msg.text);
        return NULL;
    }
    return &job;
}

static int fail(int rc, const struct bl_errmsg *msg)
{
    fprintf(stderr, "belay-train: %s\n", msg->text);
    return rc == BL_ECONFIG || rc == BL_ENOTBUILT ? 2 : 3;
}

int train_check_main(const char *job_path)
{
    struct bl_errmsg msg = {{0}};
    const struct bl_job *job = train_job_load(job_path);
    if (job == NULL) {
        return 2;
    }
    struct train_rank rank;
    struct train_dry *dry = NULL;
    int rc = train_rank_open(&rank, job, 0, 1, &msg);
    if (rc == 0) {
        rc = train_dry_new(&dry, job, 0, 0, &msg);
    }
    if (rc == 0) {
        uint64_t digest; /* reads every token once */
        rc = train_data_digest(rank.data, &digest, &msg);
    }
    if (rc == 0) {
        uint64_t samples = train_data_samples(rank.data);
        printf("job %s: %llu parameters, %u ranks, %u lanes\n", job->name,
               (unsigned long long)train_model_param_elems(rank.model), job->ranks, job->lanes);
        printf("data: %llu tokens, %llu samples of %u for training, %llu held out\n",
               (unsigned long long)train_data_tokens(rank.data), (unsigned long long)samples,
               job->train.seq_len, (unsigned long long)train_data_eval_samples(rank.data));
        printf(
            "batch: %u lanes x %u micro-batches x %u sequences = %u; %llu steps are %.2f epochs\n",
            job->lanes, rank.micro_batches, job->train.micro_batch, job->train.global_batch,
            (unsigned long long)job->train.steps,
            (double)job->train.steps * job->train.global_batch / (double)samples);
        printf("%s\n", rank.backend.why);
        rc = train_dry_print_memory(dry, &msg);
    }
    train_dry_free(dry);
    train_rank_close(&rank);
    return rc == 0 ? 0 : fail(rc, &msg);
}

int train_probe_main(const char *job_path, uint32_t threads)
{
    struct bl_errmsg msg = {{0}};
    const struct bl_job *job = train_job_load(job_path);
    if (job == NULL) {
        return 2;
    }
    struct train_rank rank;
    struct train_identity id;
    int rc = train_rank_open(&rank, job, 0, threads, &msg);
    if (rc == 0) {
        rc = train_identity(&rank, &id, &msg);
    }
    if (rc == 0) {
        printf("function %016llx\njob %016llx\ndata %016llx\nprobe %016llx\nbuild %s\n",
               (unsigned long long)id.function_id, (unsigned long long)id.job_digest,
               (unsigned long long)id.data_digest, (unsigned long long)id.probe, id.build);
    }
    train_rank_close(&rank);
    return rc == 0 ? 0 : fail(rc, &msg);
}
