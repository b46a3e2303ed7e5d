/* SPDX-License-Identifier: Apache-2.0 */
/* What proc.c and proc_spawn.c share. */
#ifndef DAEMON_PROC_H
#define DAEMON_PROC_H

#include "daemon/daemon.h"

/* A proc of the run, STARTING, with nothing open yet. Owned by the run. */
struct proc *proc_new(struct run *run, uint64_t incarnation, uint32_t rank);
/* STATE/jobs/JOB/RANK.INC.SUFFIX */
void proc_path(const struct proc *proc, const char *suffix, char *ret, size_t bytes);
/* Tries to reach its shim until it answers or the time is over. */
void proc_attach_begin(struct proc *proc);
/* It never came to be: an event, and an exit with code 3. May free nothing. */
void proc_start_failed(struct proc *proc, const char *reason);
/* libuv's callback for a shim that is our child. */
void proc_on_shim_exit(uv_process_t *process, int64_t status, int signal_number);

#endif
