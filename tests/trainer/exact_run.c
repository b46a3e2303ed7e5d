/* SPDX-License-Identifier: Apache-2.0 */
#include "exact_run.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <string.h>

#include "train_bench.h"

#define LOSSES_MAX 4096

static const struct bl_job_model gpt2 = {.arch = BL_ARCH_GPT2,
                                         .layers = 5,
                                         .dim = 36,
                                         .hidden = 144,
                                         .heads = 4,
                                         .kv_heads = 4,
                                         .vocab = 256,
                                         .tied = 1,
                                         .bias = 1,
                                         .context = 24,
                                         .rope_theta = 1,
                                         .norm_eps = 1e-5};

static const struct bl_job_model llama = {.layers = 5,
                                          .dim = 32,
                                          .hidden = 72,
                                          .heads = 4,
                                          .kv_heads = 2,
                                          .vocab = 256,
                                          .tied = 1,
                                          .rope_theta = 10000,
                                          .norm_eps = 1e-5};

const struct bl_job_model *exact_gpt2(void)
{
    return &gpt2;
}

const struct bl_job_model *exact_llama(void)
{
    return &llama;
}

/* The lines of metrics.jsonl, which have all bits, without speeds. */
static void read_metrics(const char *path, char *text)
{
    char line[512];
    size_t used = 0;
    FILE *f = fopen(path, "re");
    assert_non_null(f);
    while (fgets(line, sizeof line, f) != NULL) {
        char *speed = strstr(line, ",\"tokens_per_s\""), *eval = strstr(line, ",\"eval_loss\"");
        assert_non_null(speed);
        *speed = 0;
        used += (size_t)snprintf(text + used, LOSSES_MAX - used, "%s%s\n", line,
                                 eval != NULL ? eval : "");
        assert_true(used < LOSSES_MAX);
    }
    fclose(f);
    assert_true(used > 0);
}

static void run_layout(struct train_bench *bench, const struct exact_layout *l,
                       char digest[BL_STATE_DIGEST_TEXT_BYTES], char losses[LOSSES_MAX])
{
    struct bl_job *job = &bench->job;
    char metrics[128];
    snprintf(metrics, sizeof metrics, "%s/metrics.jsonl", bench->dir);
    remove(metrics);
    job->tp = l->tp != 0 ? l->tp : 1;
    job->pp = l->pp;
    job->interleave = l->interleave;
    job->zero = l->zero;
    job->sequence = l->sequence;
    job->train.recompute = l->recompute;
    job->train.head_chunk = l->head_chunk;
    const struct train_alone how = {.job = job,
                                    .ranks = l->dp * l->pp * job->tp,
                                    .threads = l->threads,
                                    .nodes = l->nodes,
                                    .metrics = metrics,
                                    .digest = 1};
    printf("lanes %u: dp %u pp %u x %u tp %u zero %u recompute %u threads %u nodes %d:", job->lanes,
           l->dp, l->pp, l->interleave, job->tp, l->zero, l->recompute, l->threads, l->nodes);
    fflush(stdout);
    train_bench_run(&how, digest, NULL, 0);
    read_metrics(metrics, losses);
    printf(" %s\n", digest);
}

void exact_compare(const struct bl_job_model *model, uint32_t lanes, uint32_t tied, uint32_t micros,
                   const struct exact_layout *layouts, size_t count)
{
    struct train_bench bench;
    char first[BL_STATE_DIGEST_TEXT_BYTES] = "", digest[BL_STATE_DIGEST_TEXT_BYTES];
    static char first_losses[LOSSES_MAX], losses[LOSSES_MAX];
    train_bench_open(&bench, lanes, tied);
    if (model != NULL) {
        bench.job.model = *model;
    }
    bench.job.train.global_batch = lanes * micros * bench.job.train.micro_batch;
    for (size_t i = 0; i < count; i++) {
        run_layout(&bench, &layouts[i], digest, losses);
        if (i == 0) {
            memcpy(first, digest, sizeof first);
            memcpy(first_losses, losses, sizeof first_losses);
        }
        assert_string_equal(digest, first);
        assert_string_equal(losses, first_losses);
    }
    train_bench_close(&bench);
}
