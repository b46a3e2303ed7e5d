/* SPDX-License-Identifier: Apache-2.0 */
/* `belay-train --dry-run`: what a job will take, for people and for programs. */
#include <stdio.h>

#include "base/human.h"
#include "trainer/data.h"
#include "trainer/dryrun_parts.h"
#include "trainer/options.h"

/* All that is printed. */
struct dry_report {
    const struct bl_job *job;
    struct train_dry *dry;
    struct train_dry_sum sum;
    struct train_dry_model model;
    struct train_dry_rank top; /* the rank with the most memory */
    uint64_t samples;          /* 0: the data are not here */
    struct bl_errmsg no_data;
};

static int report_open(struct dry_report *r, const struct bl_job *job, uint32_t per_node,
                       struct bl_errmsg *msg)
{
    const struct train_dry_rank *top;
    struct train_data *data;
    *r = (struct dry_report){.job = job};
    int rc = train_dry_new(&r->dry, job, per_node, 0, msg);
    if (rc == 0) {
        rc = train_dry_model(&r->model, job, msg);
    }
    if (rc == 0) {
        rc = train_dry_sum(r->dry, &r->sum, msg);
    }
    if (rc == 0) {
        rc = train_dry_rank(r->dry, r->sum.rank_max, &top, msg);
    }
    if (rc != 0) {
        return rc;
    }
    r->top = *top;
    if (train_data_open(&data, job, &r->no_data) == 0) {
        r->samples = train_data_samples(data);
        train_data_close(data);
    }
    return 0;
}

static uint32_t node_ranks(const struct dry_report *r)
{
    uint32_t ranks = r->job->ranks;
    return r->sum.per_node < ranks ? r->sum.per_node : ranks;
}

static double tokens_of_step(const struct bl_job *job)
{
    return (double)job->train.global_batch * job->train.seq_len;
}

/* ---- text ---- */

static void print_rows(const char *const *names, const uint64_t *bytes, int count, uint64_t sum)
{
    char text[BL_HUMAN_MAX];
    for (int i = 0; i < count; i++) {
        if (bytes[i] != 0) {
            printf("  %-16s %12s\n", names[i], bl_human_bytes(text, bytes[i]));
        }
    }
    printf("  %-16s %12s\n", "sum", bl_human_bytes(text, sum));
}

static void print_model(const struct dry_report *r)
{
    const struct train_dry_model *m = &r->model;
    const uint64_t elems[] = {m->embedding, m->positions, m->attention, m->mlp, m->norms, m->head};
    static const char *const names[] = {"embedding", "positions", "attention",
                                        "mlp",       "norms",     "head"};
    printf("model: %llu parameters, %.4g FLOPs a token", (unsigned long long)m->elems, m->flops);
    if (m->flops_again > 0) {
        printf(", %.4g more to recompute", m->flops_again);
    }
    printf("\n");
    for (int i = 0; i < 6; i++) {
        if (elems[i] != 0) {
            printf("  %-16s %12llu\n", names[i], (unsigned long long)elems[i]);
        }
    }
}

static void print_batch(const struct dry_report *r)
{
    const struct bl_job *job = r->job;
    printf("batch: %u lanes x %u micro-batches x %u sequences = %u, %.4g tokens, %.4g FLOPs a "
           "step\n",
           job->lanes, r->dry->micro_batches, job->train.micro_batch, job->train.global_batch,
           tokens_of_step(job), tokens_of_step(job) * (r->model.flops + r->model.flops_again));
    if (r->samples == 0) {
        printf("data: not here: %s\n", r->no_data.text);
        return;
    }
    printf("data: %llu samples of %u; an epoch is %.1f steps, %llu steps are %.2f epochs\n",
           (unsigned long long)r->samples, job->train.seq_len,
           (double)r->samples / job->train.global_batch, (unsigned long long)job->train.steps,
           (double)job->train.steps * job->train.global_batch / (double)r->samples);
}

static void print_memory(const struct train_dry_sum *sum, const struct train_dry_rank *top,
                         uint32_t ranks)
{
    char node[BL_HUMAN_MAX], all[BL_HUMAN_MAX], machine[BL_HUMAN_MAX];
    uint64_t machine_bytes = train_dry_machine_bytes();
    printf("memory of rank %u, the most of all, with %u slots and %u sets of activations:\n",
           sum->rank_max, sum->slots, top->sets);
    print_rows(train_dry_memory_names, top->memory, TRAIN_DRY_MEMORY_COUNT, top->memory_sum);
    if (top->device_sum != 0) {
        printf("  %-16s %12s\n", "on the device", bl_human_bytes(node, top->device_sum));
    }
    printf("memory of a node of %u ranks: %s (node %u, the most); all ranks: %s\n",
           sum->per_node < ranks ? sum->per_node : ranks, bl_human_bytes(node, sum->node_bytes),
           sum->node_max, bl_human_bytes(all, sum->all_bytes));
    if (machine_bytes != 0 && sum->node_bytes > machine_bytes) {
        printf("this machine has %s: too little for such a node\n",
               bl_human_bytes(machine, machine_bytes));
    }
}

int train_dry_print_memory(struct train_dry *dry, struct bl_errmsg *msg)
{
    struct train_dry_sum sum;
    const struct train_dry_rank *top;
    int rc = train_dry_sum(dry, &sum, msg);
    if (rc == 0) {
        rc = train_dry_rank(dry, sum.rank_max, &top, msg);
    }
    if (rc == 0) {
        print_memory(&sum, top, dry->job->ranks);
    }
    return rc;
}

static void print_text(const struct dry_report *r)
{
    const struct bl_job *job = r->job;
    char text[BL_HUMAN_MAX];
    printf("job %s: %u ranks = tp %u x pp %u x dp %u, ZeRO %u, %u chunk%s a stage\n", job->name,
           job->ranks, r->dry->tp, r->dry->pp, r->dry->dp, job->zero, r->sum.chunks,
           r->sum.chunks == 1 ? "" : "s");
    print_model(r);
    print_batch(r);
    print_memory(&r->sum, &r->top, job->ranks);
    printf("sent in a step by rank %u (the busiest sends %s):\n", r->sum.rank_max,
           bl_human_bytes(text, r->sum.wire_max));
    print_rows(train_dry_wire_names, r->top.wire, TRAIN_DRY_WIRE_COUNT, r->top.wire_sum);
    printf("sent in a step by all: %s\n", bl_human_bytes(text, r->sum.wire_all));
    printf("pipeline: %u micro-batches a replica, predicted bubble %.1f%%%s\n", r->sum.micros_max,
           100 * r->sum.bubble, r->sum.is_bubble_exact ? "" : " (by the formula)");
}

/* ---- JSON ---- */

static void json_rows(const char *key, const char *const *names, const uint64_t *bytes, int count,
                      uint64_t sum)
{
    printf("\"%s\":{", key);
    for (int i = 0; i < count; i++) {
        printf("\"%s\":%llu,", names[i], (unsigned long long)bytes[i]);
    }
    printf("\"sum\":%llu}", (unsigned long long)sum);
}

static void json_model(const struct train_dry_model *m)
{
    printf("\"model\":{\"parameters\":%llu,\"modules\":{\"embedding\":%llu,\"positions\":%llu,"
           "\"attention\":%llu,\"mlp\":%llu,\"norms\":%llu,\"head\":%llu},"
           "\"flops_per_token\":%.17g,\"recompute_flops_per_token\":%.17g},",
           (unsigned long long)m->elems, (unsigned long long)m->embedding,
           (unsigned long long)m->positions, (unsigned long long)m->attention,
           (unsigned long long)m->mlp, (unsigned long long)m->norms, (unsigned long long)m->head,
           m->flops, m->flops_again);
}

/* Names of jobs hold letters, digits and a few signs that JSON takes as they are. */
static void print_json(const struct dry_report *r)
{
    const struct bl_job *job = r->job;
    printf("{\"schema\":1,\"job\":\"%s\",\"ranks\":%u,\"tp\":%u,\"pp\":%u,\"dp\":%u,\"zero\":%u,"
           "\"chunks\":%u,\"lanes\":%u,",
           job->name, job->ranks, r->dry->tp, r->dry->pp, r->dry->dp, job->zero, r->sum.chunks,
           job->lanes);
    json_model(&r->model);
    printf("\"tokens_per_step\":%.17g,\"steps\":%llu,\"steps_per_epoch\":", tokens_of_step(job),
           (unsigned long long)job->train.steps);
    if (r->samples == 0) {
        printf("null,");
    } else {
        printf("%.17g,", (double)r->samples / job->train.global_batch);
    }
    printf("\"rank\":{\"rank\":%u,\"slots\":%u,\"sets\":%u,", r->sum.rank_max, r->sum.slots,
           r->top.sets);
    json_rows("memory_bytes", train_dry_memory_names, r->top.memory, TRAIN_DRY_MEMORY_COUNT,
              r->top.memory_sum);
    printf(",\"device_bytes\":%llu},\"node\":{\"node\":%u,\"ranks\":%u,\"memory_bytes\":%llu},"
           "\"memory_bytes\":%llu,"
           "\"machine_bytes\":%llu,\"wire_bytes_per_step\":{",
           (unsigned long long)r->top.device_sum, r->sum.node_max, node_ranks(r),
           (unsigned long long)r->sum.node_bytes, (unsigned long long)r->sum.all_bytes,
           (unsigned long long)train_dry_machine_bytes());
    json_rows("rank", train_dry_wire_names, r->top.wire, TRAIN_DRY_WIRE_COUNT, r->top.wire_sum);
    printf(",\"busiest\":%llu,\"all\":%llu},\"pipeline\":{\"bubble\":%.17g,\"exact\":%s,"
           "\"micro_batches\":%u}}\n",
           (unsigned long long)r->sum.wire_max, (unsigned long long)r->sum.wire_all, r->sum.bubble,
           r->sum.is_bubble_exact ? "true" : "false", r->sum.micros_max);
}

int train_dryrun_main(const char *job_path, uint32_t per_node, int json)
{
    struct bl_errmsg msg = {{0}};
    const struct bl_job *job = train_job_load(job_path);
    struct dry_report r;
    if (job == NULL) {
        return 2;
    }
    int rc = report_open(&r, job, per_node, &msg), code = 0;
    if (rc != 0) {
        fprintf(stderr, "belay-train: %s\n", msg.text);
        code = rc == BL_ECONFIG ? 2 : 3;
    } else if (json) {
        print_json(&r);
    } else {
        print_text(&r);
    }
    train_dry_free(r.dry);
    return code;
}
