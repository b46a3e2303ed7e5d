/* SPDX-License-Identifier: Apache-2.0 */
#include "train_bench.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define RUN_ALARM 120 /* seconds until a hang ends a run */

static void write_text(const char *path)
{
    static const char *const words[] = {"the ", "rope ",  "holds ", "a ",      "climber, ",
                                        "and ", "falls ", "end ",   "there.\n"};
    FILE *f = fopen(path, "we");
    assert_non_null(f);
    uint64_t bytes = 0;
    for (uint64_t i = 0; bytes < TRAIN_BENCH_TEXT; i++) {
        const char *word = words[bl_mix64(i) % 9];
        fputs(word, f);
        bytes += strlen(word);
    }
    assert_int_equal(fclose(f), 0);
}

void train_bench_open(struct train_bench *bench, uint32_t lanes, uint32_t tied)
{
    memset(bench, 0, sizeof *bench);
    snprintf(bench->dir, sizeof bench->dir, "/tmp/belay-train-XXXXXX");
    assert_non_null(mkdtemp(bench->dir));
    struct bl_job *job = &bench->job;
    snprintf(job->name, sizeof job->name, "bench");
    snprintf(job->run_dir, sizeof job->run_dir, "%s", bench->dir);
    snprintf(job->data_files[0], BL_PATH_MAX, "%s/text", bench->dir);
    snprintf(job->tokenizer, sizeof job->tokenizer, "bytes");
    write_text(job->data_files[0]);
    job->data_file_count = 1;
    job->ranks = 1;
    job->lanes = lanes;
    job->tp = job->pp = job->zero = 1;
    job->threads = 1;
    job->model = (struct bl_job_model){.layers = 2,
                                       .dim = 32,
                                       .hidden = 72,
                                       .heads = 4,
                                       .kv_heads = 2,
                                       .vocab = 256,
                                       .tied = tied,
                                       .rope_theta = 10000,
                                       .norm_eps = 1e-5};
    job->train = (struct bl_job_train){.global_batch = lanes * 2,
                                       .micro_batch = 1,
                                       .seq_len = 16,
                                       .steps = 4,
                                       .lr = 1e-2,
                                       .lr_min = 1e-3,
                                       .weight_decay = 0.1,
                                       .beta1 = 0.9,
                                       .beta2 = 0.95,
                                       .eps = 1e-8,
                                       .clip = 1.0,
                                       .warmup = 2,
                                       .seed = 7,
                                       .eval_every = 2,
                                       .eval_batches = 3,
                                       .eval_split = 0.05};
}

void train_bench_close(struct train_bench *bench)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", bench->dir);
    assert_int_equal(system(command), 0);
}

/* Runs in a child with `fd` (1 or 2) in a pipe; its exit status. */
static int run_child(const struct train_alone *how, int fd, char *text, size_t bytes_max)
{
    int ends[2], status;
    assert_int_equal(pipe(ends), 0);
    fflush(stdout);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        alarm(RUN_ALARM);
        dup2(ends[1], fd);
        close(ends[0]);
        close(ends[1]);
        int code = train_alone_run(how);
        fflush(stdout);
        _exit(code);
    }
    close(ends[1]);
    size_t used = 0;
    ssize_t n;
    while (used + 1 < bytes_max && (n = read(ends[0], text + used, bytes_max - used - 1)) > 0) {
        used += (size_t)n;
    }
    text[used] = 0;
    close(ends[0]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

void train_bench_run(const struct train_alone *how, char digest[BL_STATE_DIGEST_TEXT_BYTES],
                     char *losses, size_t bytes_max)
{
    static char text[65536];
    assert_int_equal(run_child(how, STDOUT_FILENO, text, sizeof text), 0);
    char *found = strstr(text, "digest ");
    assert_non_null(found);
    assert_int_equal(sscanf(found, "digest %32[0-9a-f]", digest), 1);
    *found = 0;
    if (losses != NULL) {
        losses[0] = 0;
        for (char *line = strtok(text, "\n"); line != NULL; line = strtok(NULL, "\n")) {
            char *speed = strstr(line, " tok/s ");
            assert_non_null(speed);
            char *eval = strstr(line, " eval ");
            *speed = 0;
            size_t used = strlen(losses);
            snprintf(losses + used, bytes_max - used, "%s%s\n", line, eval == NULL ? "" : eval);
        }
    }
}

int train_bench_fails(const struct train_alone *how, char *text, size_t bytes_max)
{
    return run_child(how, STDERR_FILENO, text, bytes_max);
}
