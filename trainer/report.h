/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a run says of its steps: a line for people, with the time that is left; TensorBoard's event
 * files, where they are wanted; and metrics.jsonl for programs, one object a line:
 *
 *     {"step":12,"loss":2.5,"loss_bits":"4004000000000000","grad_norm":..,"lr":..,
 *      "tokens_per_s":..,"mfu":..,"pipeline_idle":..,"eval_loss":..}
 *
 * Numbers have 17 digits, so they read back as the same bits; eval_loss is there at steps that
 * evaluated, pipeline_idle with more than one stage: the share of the passes' time in which the
 * first stage waited. mfu, where the job says peak_flops, is the model FLOPs utilization: FLOPs of
 * a token (train_dry_model; what is computed again does not count) x tokens_per_s / (ranks x
 * peak_flops), Chowdhery et al. 2022, arXiv:2204.02311. A step that was done again after a recovery
 * has a second line, equal but for tokens_per_s, mfu and pipeline_idle.
 */
#ifndef TRAINER_REPORT_H
#define TRAINER_REPORT_H

#include <stdio.h>

#include "base/error.h"
#include "trainer/step.h"
#include "trainer/tb_events.h"

struct train_report {
    FILE *out;          /* lines for people; borrowed; NULL: none */
    int metrics_fd;     /* -1: none */
    uint64_t before_ns; /* end of the step before */
    double tokens_per_s;
    double mfu_per_token;     /* of one token a second; 0: not known */
    double step_s;            /* a running mean of the last ten or so; 0: not known yet */
    struct tb_events *events; /* owned; NULL: none */
};

/* `metrics` NULL: no file; else opened for appending, its directory must be there. `tensorboard`
 * NULL: no events; else the directory they go to. `report` is caller's memory, ended by
 * train_report_close, also after an error, which leaves out what could not be opened. -errno names
 * the path. */
BL_MUST_CHECK int train_report_open(struct train_report *report, FILE *out, const char *metrics,
                                    const char *tensorboard, struct bl_errmsg *msg);
void train_report_close(struct train_report *report);

/* `ranks` work on the job from now on: for mfu. */
void train_report_ranks(struct train_report *report, const struct bl_job *job, uint32_t ranks);

/* A step starts now, for tokens_per_s; without it the time since the last step counts. */
void train_report_begin(struct train_report *report);

/* One step of `steps` is done; eval_loss NULL: not evaluated. Fills report->tokens_per_s. */
void train_report_step(struct train_report *report, const struct train_step_result *step,
                       uint64_t steps, const double *eval_loss);

#endif
