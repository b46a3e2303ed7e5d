/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a run says of its steps: a line for people, and metrics.jsonl for programs, one object a
 * line:
 *
 *     {"step":12,"loss":2.5,"loss_bits":"4004000000000000","grad_norm":..,"lr":..,
 *      "tokens_per_s":..,"eval_loss":..}
 *
 * Numbers have 17 digits, so they read back as the same bits; eval_loss is there at steps that
 * evaluated. A step that was done again after a recovery has a second line, equal but for
 * tokens_per_s.
 */
#ifndef TRAINER_REPORT_H
#define TRAINER_REPORT_H

#include <stdio.h>

#include "base/error.h"
#include "trainer/step.h"

struct train_report {
    FILE *out;          /* lines for people; borrowed; NULL: none */
    int metrics_fd;     /* -1: none */
    uint64_t before_ns; /* end of the step before */
    double tokens_per_s;
};

/* `metrics` NULL: no file; else opened for appending, its directory must be there. `report` is
 * caller's memory, ended by train_report_close. -errno names the path. */
BL_MUST_CHECK int train_report_open(struct train_report *report, FILE *out, const char *metrics,
                                    struct bl_errmsg *msg);
void train_report_close(struct train_report *report);

/* A step starts now, for tokens_per_s; without it the time since the last step counts. */
void train_report_begin(struct train_report *report);

/* One step is done; eval_loss NULL: not evaluated. Fills report->tokens_per_s. */
void train_report_step(struct train_report *report, const struct train_step_result *step,
                       const double *eval_loss);

#endif
