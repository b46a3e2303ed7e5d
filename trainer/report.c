/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/report.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"

int train_report_open(struct train_report *report, FILE *out, const char *metrics,
                      struct bl_errmsg *msg)
{
    memset(report, 0, sizeof *report);
    report->out = out;
    report->metrics_fd = -1;
    report->before_ns = bl_now_ns();
    if (metrics != NULL) {
        report->metrics_fd = open(metrics, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
        if (report->metrics_fd < 0) {
            return bl_err_code(msg, -errno, "metrics %s", metrics);
        }
    }
    return 0;
}

void train_report_close(struct train_report *report)
{
    if (report->metrics_fd >= 0) {
        close(report->metrics_fd);
        report->metrics_fd = -1;
    }
}

void train_report_begin(struct train_report *report)
{
    report->before_ns = bl_now_ns();
}

static void write_metrics(int fd, const struct train_step_result *s, const double *eval_loss,
                          double tokens_per_s)
{
    char line[512];
    uint64_t bits;
    memcpy(&bits, &s->loss, sizeof bits);
    int n = snprintf(line, sizeof line,
                     "{\"step\":%llu,\"loss\":%.17g,\"loss_bits\":\"%016llx\","
                     "\"grad_norm\":%.17g,\"lr\":%.17g,\"tokens_per_s\":%.6g",
                     (unsigned long long)s->step, s->loss, (unsigned long long)bits, s->grad_norm,
                     s->lr, tokens_per_s);
    if (eval_loss != NULL) {
        n += snprintf(line + n, sizeof line - (size_t)n, ",\"eval_loss\":%.17g", *eval_loss);
    }
    n += snprintf(line + n, sizeof line - (size_t)n, "}\n");
    ssize_t written = write(fd, line, (size_t)n);
    (void)written; /* a full disk must not stop training; the line is lost */
}

void train_report_step(struct train_report *report, const struct train_step_result *step,
                       const double *eval_loss)
{
    uint64_t now = bl_now_ns();
    double seconds = (double)(now - report->before_ns) / 1e9;
    report->before_ns = now;
    report->tokens_per_s = seconds > 0 ? (double)step->tokens / seconds : 0;
    if (report->out != NULL) {
        fprintf(report->out, "step %llu loss %.6f lr %.3e norm %.4f tok/s %.0f",
                (unsigned long long)step->step, step->loss, step->lr, step->grad_norm,
                report->tokens_per_s);
        if (eval_loss != NULL) {
            fprintf(report->out, " eval %.6f", *eval_loss);
        }
        fputc('\n', report->out);
        fflush(report->out);
    }
    if (report->metrics_fd >= 0) {
        write_metrics(report->metrics_fd, step, eval_loss, report->tokens_per_s);
    }
}
