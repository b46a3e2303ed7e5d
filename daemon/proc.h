/* SPDX-License-Identifier: Apache-2.0 */
/* What proc.c, proc_attach.c and proc_spawn.c share. */
#ifndef DAEMON_PROC_H
#define DAEMON_PROC_H

#include "daemon/daemon.h"

/* A proc of the run, STARTING, with nothing open yet. Owned by the run. */
struct proc *proc_new(struct run *run, uint64_t incarnation, uint32_t rank);
/* STATE/jobs/JOB/RANK.INC.SUFFIX */
void proc_path(const struct proc *proc, const char *suffix, char *ret, size_t bytes);
/* Its end is known: tells everybody, once. May free the proc and close the run. */
void proc_exited(struct proc *proc, const struct wire_exit *status, const char *text);
/* The exit record, where the shim got to write one; else "killed, nobody knows by what". */
void proc_exit_record_read(const struct proc *proc, struct wire_exit *ret);
/* Asks the shim for a kill that is wanted. */
void proc_kill_send(struct proc *proc);
extern const struct conn_ops proc_shim_ops; /* of the connection to a shim */

/* ---- proc_attach.c ---- */

/* Tries to reach its shim until it answers or the time is over. */
void proc_attach_begin(struct proc *proc);
/* Kills the shim that listens at `path`, and so its rank. Its pid, 0 when nobody listens. */
uint32_t proc_shim_end(const char *path);
/* conn_ops.on_closed of a shim's connection. */
void proc_shim_closed(struct conn *conn, void *arg, const char *text);
/* A descriptor of the living rank, by which its end can be waited for without its shim. */
void proc_watch_open(struct proc *proc);
void proc_watch_end(struct proc *proc);

/* It never came to be: an event, and an exit with code 3. May free nothing. */
void proc_start_failed(struct proc *proc, const char *reason);
/* libuv's callback for a shim that is our child. */
void proc_on_shim_exit(uv_process_t *process, int64_t status, int signal_number);

#endif
