/* SPDX-License-Identifier: Apache-2.0 */
/* The commands of belay-train; each returns an exit code and speaks on standard error. */
#ifndef TRAINER_OPTIONS_H
#define TRAINER_OPTIONS_H

#include "trainer/alone.h"

/* `belay-train --check JOB`: job, data and memory, without starting anything. */
int train_check_main(const char *job_path);

/* `belay-train --probe --job JOB`: the identity of this machine for that job. */
int train_probe_main(const char *job_path, uint32_t threads);

/* `belay-train tokenize ...`; argv[0] is "tokenize". */
int train_tokenize_main(int argc, char **argv);

/* `belay-train sample ...`; argv[0] is "sample". */
int train_sample_main(int argc, char **argv);

/* Under a daemon: the life of a rank (supervised.c). `job_path` NULL: from the environment. */
int train_supervised_main(const char *job_path);

/* Loads a job into static memory; NULL after complaining. */
const struct bl_job *train_job_load(const char *path);

#endif
