/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The status object, as `belay status --json` prints it: the daemon, its nodes, and each run with
 * its ranks. Runs that ended are kept, the newest few, so that whoever followed one learns how.
 */
#ifndef DAEMON_STATUS_H
#define DAEMON_STATUS_H

#include "daemon/daemon.h"

#define STATUS_ENDED_MAX 8

/* {"schema":1,"node":..,"head":..,"runs":[..]}; owned (free()), NULL when out of memory. `name`:
 * only that job's run; NULL all. */
char *status_json(struct daemon *daemon, const char *name);
/* A run's leader goes: keeps its last status. */
void status_keep(struct run *run);
void status_close(struct daemon *daemon); /* forgets those kept */

#endif
