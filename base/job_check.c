/* SPDX-License-Identifier: Apache-2.0 */
/* What needs more than one option: derived defaults, sums that must be exact, deadlines that must
 * fit each other. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/job_options.h"

struct job_checker {
    struct bl_job *job;
    const struct job_marks *marks; /* may be NULL */
    struct bl_errmsg *msg;
};

/* An error at the place where `key` was given; one that was left to its default has no line. */
static int BL_PRINTF(4, 5)
    check_fail(const struct job_checker *checker, int code, const char *key, const char *fmt, ...)
{
    struct bl_errmsg text;
    va_list args;
    va_start(args, fmt);
    vsnprintf(text.text, sizeof(text.text), fmt, args);
    va_end(args);
    if (checker->marks == NULL) {
        return bl_err(checker->msg, code, "%s: %s", key, text.text);
    }
    const struct job_option *option = job_option_find(key);
    BL_ASSERT(option != NULL);
    const struct job_mark *mark = &checker->marks->at[option - job_options];
    if (mark->line == 0) {
        return bl_err(checker->msg, code, "%s: %s: %s", checker->marks->where, key, text.text);
    }
    return bl_err(checker->msg, code, "%s:%u:%u: %s: %s", checker->marks->where, mark->line,
                  mark->column, key, text.text);
}

/* Was the option in the file? Without a file (one option of a whole job is set) all were. */
static int was_given(const struct job_checker *checker, const char *key)
{
    const struct job_option *option = job_option_find(key);
    return checker->marks == NULL || checker->marks->at[option - job_options].line != 0;
}

static int check_name(const struct job_checker *checker)
{
    const char *name = checker->job->name;
    const char *allowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
    if (name[strspn(name, allowed)] != '\0' || name[0] == '.' || name[0] == '-') {
        return check_fail(checker, BL_ECONFIG, "name",
                          "'%s' has other characters than letters, digits, '.', '_', '-' or begins "
                          "with '.' or '-'",
                          name);
    }
    return 0;
}

static int check_layout(const struct job_checker *checker)
{
    struct bl_job *job = checker->job;
    uint32_t place = job->tp * job->pp; /* ranks that hold one copy of the model together */
    if (job->ranks % place != 0) {
        return check_fail(checker, BL_ECONFIG, "ranks",
                          "%u ranks are no whole number of copies of %u (layout.tp %u x layout.pp "
                          "%u): use %u",
                          job->ranks, place, job->tp, job->pp,
                          job->ranks < place ? place : job->ranks / place * place);
    }
    if (job->lanes == 0) {
        job->lanes = job->ranks / place;
    }
    if (job->lanes < job->ranks / place) {
        const char *who = place == 1 ? "rank" : "replica";
        return check_fail(checker, BL_ECONFIG, "lanes",
                          "%u lanes cannot feed %u %ss: each %s needs at least one", job->lanes,
                          job->ranks / place, who, who);
    }
    if ((uint64_t)job->pp * job->interleave > job->model.layers) {
        return check_fail(
            checker, BL_ECONFIG, job->interleave > 1 ? "layout.interleave" : "layout.pp",
            "%u stages x %u chunks are more than %u layers: at most %u stages", job->pp,
            job->interleave, job->model.layers, job->model.layers / job->interleave);
    }
    if (job->pp_min > job->pp) {
        return check_fail(checker, BL_ECONFIG, "layout.pp_min",
                          "%u stages at least are more than the run has (layout.pp %u)",
                          job->pp_min, job->pp);
    }
    if (job->interleave > 1 && job->pp == 1) {
        return check_fail(checker, BL_ECONFIG, "layout.interleave",
                          "%u chunks want more than one stage (layout.pp)", job->interleave);
    }
    if (job->sequence && job->tp == 1) {
        return check_fail(checker, BL_ECONFIG, "layout.sequence",
                          "wants tensor parallel ranks (layout.tp above 1)");
    }
    if (job->snapshot_every != 1) {
        return check_fail(checker, BL_ENOTBUILT, "snapshot.every",
                          "%" PRIu64 ": only 1 is built into this version", job->snapshot_every);
    }
    if (job->train.precision == BL_PRECISION_BF16 && strcmp(job->backend, "cpu") == 0) {
        return check_fail(checker, BL_ECONFIG, "train.precision",
                          "the CPU computes in fp32 (backend cuda has bf16)");
    }
    if (job->train.reduction_fast) {
        return check_fail(checker, BL_ENOTBUILT, "train.reduction",
                          "'fast' is not built into this version (use exact)");
    }
    return 0;
}

static int check_model(const struct job_checker *checker)
{
    struct bl_job_model *model = &checker->job->model;
    int is_gpt2 = model->arch == BL_ARCH_GPT2;
    if (model->kv_heads == 0) {
        model->kv_heads = model->heads;
    }
    if (model->hidden == 0) {
        model->hidden = is_gpt2 ? 4 * model->dim : (model->dim * 8 / 3 + 31) / 32 * 32;
    }
    if (is_gpt2 && !was_given(checker, "model.tied")) {
        model->tied = 1;
    }
    if (is_gpt2 && model->context == 0) {
        model->context = checker->job->train.seq_len;
    }
    if (!is_gpt2) {
        model->bias = 0;
    }
    if (model->dim % model->heads != 0) {
        return check_fail(checker, BL_ECONFIG, "model.heads", "%u does not divide dim (%u)",
                          model->heads, model->dim);
    }
    if (!is_gpt2 && model->dim / model->heads % 2 != 0) {
        return check_fail(checker, BL_ECONFIG, "model.heads",
                          "a head of %u (dim %u / heads %u) is odd: rotary positions need pairs",
                          model->dim / model->heads, model->dim, model->heads);
    }
    if (model->heads % model->kv_heads != 0) {
        return check_fail(checker, BL_ECONFIG, "model.kv_heads", "%u does not divide heads (%u)",
                          model->kv_heads, model->heads);
    }
    if (is_gpt2 && model->kv_heads != model->heads) {
        return check_fail(checker, BL_ECONFIG, "model.kv_heads",
                          "%u: gpt2 has as many as heads (%u)", model->kv_heads, model->heads);
    }
    if (is_gpt2 && model->context < checker->job->train.seq_len) {
        return check_fail(checker, BL_ECONFIG, "model.context",
                          "%u positions are too few for train.seq_len %u", model->context,
                          checker->job->train.seq_len);
    }
    if (!is_gpt2 && model->context != 0) {
        return check_fail(checker, BL_ECONFIG, "model.context",
                          "%u: llama's rotary positions have no end (leave it out)",
                          model->context);
    }
    if (model->rope_high <= model->rope_low) {
        return check_fail(checker, BL_ECONFIG, "model.rope_high", "%g must be above rope_low (%g)",
                          model->rope_high, model->rope_low);
    }
    if (strcmp(checker->job->tokenizer, "bytes") == 0 && model->vocab < 256) {
        return check_fail(checker, BL_ECONFIG, "model.vocab",
                          "%u is too few for the tokenizer 'bytes', which has 256", model->vocab);
    }
    return 0;
}

static int check_data(const struct job_checker *checker)
{
    const struct bl_job *job = checker->job;
    if (job->data_weight_count != 0 && job->data_weight_count != job->data_file_count) {
        return check_fail(checker, BL_ECONFIG, "data.weights[]",
                          "%u weights for %u files: give one for each file, or none",
                          job->data_weight_count, job->data_file_count);
    }
    return 0;
}

static int check_train(const struct job_checker *checker)
{
    const struct bl_job *job = checker->job;
    const struct bl_job_train *train = &job->train;
    uint64_t unit = (uint64_t)job->lanes * train->micro_batch;
    if (train->global_batch % unit != 0) {
        uint64_t below = train->global_batch / unit * unit;
        char near[64];
        if (below > 0) {
            snprintf(near, sizeof(near), "%" PRIu64 " or %" PRIu64, below, below + unit);
        } else {
            snprintf(near, sizeof(near), "%" PRIu64, unit);
        }
        return check_fail(checker, BL_ECONFIG, "train.global_batch",
                          "%u is no multiple of lanes x micro_batch (%u x %u = %" PRIu64
                          "); near it: %s",
                          train->global_batch, job->lanes, train->micro_batch, unit, near);
    }
    if (train->lr_min > train->lr) {
        return check_fail(checker, BL_ECONFIG, "train.lr_min", "%g is above lr (%g)", train->lr_min,
                          train->lr);
    }
    if (train->warmup > train->steps) {
        return check_fail(checker, BL_ECONFIG, "train.warmup",
                          "%" PRIu64 " is above steps (%" PRIu64 ")", train->warmup, train->steps);
    }
    if (train->eval_every > 0 && train->eval_split <= 0 && job->eval_file_count == 0) {
        return check_fail(checker, BL_ECONFIG, "train.eval_every",
                          "evaluation needs an eval_split above 0, or data.eval_files");
    }
    return 0;
}

#define ROOT_RATE_LEAST (1u << 20)

static int check_roots(const struct job_checker *checker)
{
    const struct bl_job *job = checker->job;
    for (uint32_t i = 0; i < job->root_count; i++) {
        uint64_t rate = job->roots[i].rate_max;

        if (job->roots[i].shared && strstr(job->roots[i].path, "{node}") != NULL) {
            return check_fail(checker, BL_ECONFIG, "roots[].path",
                              "'%s' has {node} in it, so it is not the same directory on all "
                              "nodes: leave shared: true out",
                              job->roots[i].path);
        }
        if (rate != 0 && rate < ROOT_RATE_LEAST) {
            return check_fail(checker, BL_ECONFIG, "roots[].rate_max",
                              "%" PRIu64 " bytes a second is less than 1 MiB: between two buffers "
                              "such a root looks stuck",
                              rate);
        }
        for (uint32_t j = 0; j < i; j++) {
            if (strcmp(job->roots[i].path, job->roots[j].path) == 0) {
                return check_fail(checker, BL_ECONFIG, "roots[].path", "'%s' is listed twice",
                                  job->roots[i].path);
            }
        }
    }
    return 0;
}

/* `small` must come before `large`, or both at once where `equal`; why stands in the error. */
struct deadline_rule {
    const char *small;
    const char *large;
    size_t small_offset;
    size_t large_offset;
    int equal;
    const char *why;
};

#define DEADLINE(a, b, equal, why)                                                                 \
    {                                                                                              \
        "deadlines." #a, "deadlines." #b, offsetof(struct bl_job_deadlines, a),                    \
            offsetof(struct bl_job_deadlines, b), equal, why                                       \
    }

static const struct deadline_rule deadline_rules[] = {
    DEADLINE(beat, lease, 0, "a node would be lost between two beats"),
    DEADLINE(beat, step_floor, 0, "a step would be called hung between two beats"),
    DEADLINE(step_floor, step_ceil, 1, "no step could be allowed"),
    DEADLINE(lease, join, 0, "a generation would be given up before a lost node is noticed"),
    DEADLINE(grace, join, 0,
             "a generation would be given up before ranks that do not park are killed"),
    DEADLINE(restart, join, 1, "a generation would be given up while it waits for a daemon"),
    DEADLINE(init_floor, join, 1, "a generation would be given up while a rank starts"),
};

static uint32_t deadline_at(const struct bl_job *job, size_t offset)
{
    uint32_t ms;
    memcpy(&ms, (const char *)&job->deadlines + offset, sizeof(ms));
    return ms;
}

static int check_deadlines(const struct job_checker *checker)
{
    for (size_t i = 0; i < sizeof(deadline_rules) / sizeof(deadline_rules[0]); i++) {
        const struct deadline_rule *rule = &deadline_rules[i];
        uint32_t small = deadline_at(checker->job, rule->small_offset);
        uint32_t large = deadline_at(checker->job, rule->large_offset);
        if (small < large || (rule->equal && small == large)) {
            continue;
        }
        /* At the one that was given. */
        const struct job_option *option = job_option_find(rule->small);
        const char *key = rule->small;
        if (checker->marks != NULL && checker->marks->at[option - job_options].line == 0) {
            key = rule->large;
        }
        return check_fail(checker, BL_ECONFIG, key,
                          "%s (%" PRIu32 "ms) must be %s %s (%" PRIu32 "ms), or %s", rule->small,
                          small, rule->equal ? "at most" : "below", rule->large, large, rule->why);
    }
    return 0;
}

int job_check(struct bl_job *job, const struct job_marks *marks, struct bl_errmsg *msg)
{
    static int (*const checks[])(const struct job_checker *) = {
        check_name,  check_layout, check_model,     check_data,
        check_train, check_roots,  check_deadlines,
    };
    struct job_checker checker = {job, marks, msg};
    for (size_t i = 0; i < sizeof(checks) / sizeof(checks[0]); i++) {
        int rc = checks[i](&checker);
        if (rc < 0) {
            return rc;
        }
    }
    return 0;
}
