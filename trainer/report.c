/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/report.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/human.h"
#include "trainer/dryrun.h"

int train_report_open(struct train_report *report, FILE *out, const char *metrics,
                      const char *tensorboard, struct bl_errmsg *msg)
{
    memset(report, 0, sizeof *report);
    report->out = out;
    report->metrics_fd = -1;
    report->before_ns = bl_now_ns();
    int rc = 0;
    if (metrics != NULL) {
        report->metrics_fd = open(metrics, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
        if (report->metrics_fd < 0) {
            rc = bl_err_code(msg, -errno, "metrics %s", metrics);
        }
    }
    return rc != 0 || tensorboard == NULL ? rc : tb_events_open(&report->events, tensorboard, msg);
}

void train_report_close(struct train_report *report)
{
    if (report->metrics_fd >= 0) {
        close(report->metrics_fd);
        report->metrics_fd = -1;
    }
    tb_events_close(report->events);
    report->events = NULL;
}

void train_report_ranks(struct train_report *report, const struct bl_job *job, uint32_t ranks)
{
    struct train_dry_model model;
    report->mfu_per_token = 0;
    if (job->peak_flops > 0 && train_dry_model(&model, job, NULL) == 0) {
        report->mfu_per_token = model.flops / job->peak_flops / ranks;
    }
}

void train_report_begin(struct train_report *report)
{
    report->before_ns = bl_now_ns();
}

static double mfu(const struct train_report *report)
{
    return report->tokens_per_s * report->mfu_per_token;
}

static void write_metrics(const struct train_report *report, const struct train_step_result *s,
                          const double *eval_loss)
{
    char line[512];
    uint64_t bits;
    memcpy(&bits, &s->loss, sizeof bits);
    int n = snprintf(line, sizeof line,
                     "{\"step\":%llu,\"loss\":%.17g,\"loss_bits\":\"%016llx\","
                     "\"grad_norm\":%.17g,\"lr\":%.17g,\"tokens_per_s\":%.6g",
                     (unsigned long long)s->step, s->loss, (unsigned long long)bits, s->grad_norm,
                     s->lr, report->tokens_per_s);
    if (report->mfu_per_token > 0) {
        n += snprintf(line + n, sizeof line - (size_t)n, ",\"mfu\":%.6g", mfu(report));
    }
    if (s->idle > 0) {
        n += snprintf(line + n, sizeof line - (size_t)n, ",\"pipeline_idle\":%.4f", s->idle);
    }
    if (eval_loss != NULL) {
        n += snprintf(line + n, sizeof line - (size_t)n, ",\"eval_loss\":%.17g", *eval_loss);
    }
    n += snprintf(line + n, sizeof line - (size_t)n, "}\n");
    ssize_t written = write(report->metrics_fd, line, (size_t)n);
    (void)written; /* a full disk must not stop training; the line is lost */
}

static void write_events(const struct train_report *report, const struct train_step_result *s,
                         const double *eval_loss)
{
    struct tb_scalar scalars[6] = {{"train/loss", s->loss},
                                   {"train/grad_norm", s->grad_norm},
                                   {"train/lr", s->lr},
                                   {"train/tokens_per_s", report->tokens_per_s}};
    uint32_t count = 4;
    if (report->mfu_per_token > 0) {
        scalars[count++] = (struct tb_scalar){"train/mfu", mfu(report)};
    }
    if (eval_loss != NULL) {
        scalars[count++] = (struct tb_scalar){"eval/loss", *eval_loss};
    }
    tb_events_write(report->events, s->step, scalars, count);
}

void train_report_step(struct train_report *report, const struct train_step_result *step,
                       uint64_t steps, const double *eval_loss)
{
    uint64_t now = bl_now_ns();
    double seconds = (double)(now - report->before_ns) / 1e9;
    report->before_ns = now;
    report->tokens_per_s = seconds > 0 ? (double)step->tokens / seconds : 0;
    report->step_s =
        report->step_s > 0 ? report->step_s + (seconds - report->step_s) / 10 : seconds;
    if (report->out != NULL) {
        char left[BL_HUMAN_MAX];
        uint64_t to_do = steps > step->step ? steps - step->step : 0;
        fprintf(report->out, "step %llu/%llu loss %.6f lr %.3e norm %.4f tok/s %.0f",
                (unsigned long long)step->step, (unsigned long long)steps, step->loss, step->lr,
                step->grad_norm, report->tokens_per_s);
        if (report->mfu_per_token > 0) {
            fprintf(report->out, " mfu %.1f%%", 100 * mfu(report));
        }
        fprintf(report->out, " left %s", bl_human_seconds(left, report->step_s * (double)to_do));
        if (eval_loss != NULL) {
            fprintf(report->out, " eval %.6f", *eval_loss);
        }
        fputc('\n', report->out);
        fflush(report->out);
    }
    if (report->metrics_fd >= 0) {
        write_metrics(report, step, eval_loss);
    }
    if (report->events != NULL) {
        write_events(report, step, eval_loss);
    }
}
