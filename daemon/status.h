/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The status object, as `belay status --json` prints it: the daemon, its nodes, and each run with
 * its ranks. Runs that ended are kept, the newest few, so that whoever followed one learns how.
 */
#ifndef DAEMON_STATUS_H
#define DAEMON_STATUS_H

#include "daemon/daemon.h"

#define STATUS_ENDED_MAX 8

/* The answer to `status` (docs/protocol.md) for the job called `name` (NULL or "": the one that
 * runs, else the one that ended last); owned (free()), NULL when out of memory. A name that is not
 * known gives the verdict "idle". */
char *status_json(struct daemon *daemon, const char *name);
/* A run's leader goes: keeps its last status, in memory and in its directory. */
void status_keep(struct run *run);
/* Keeps what the store says of a run that ended, where this node has no better: a daemon may die
 * between the run's end and status_keep. */
void status_keep_record(struct daemon *daemon, const struct wire_record *record);
/* The last status of a run that ended, by id; view, NULL if it is not known. */
json_t *status_ended(const struct daemon *daemon, uint64_t run);
/* The same by name (NULL: the newest). */
json_t *status_ended_name(const struct daemon *daemon, const char *name);
/* Takes up what a former daemon kept. */
void status_load(struct daemon *daemon);
void status_close(struct daemon *daemon); /* forgets those kept */

/* ---- status_saves.c: parts of it, owned ---- */

json_t *status_saves(const struct core_status *status);
json_t *status_roots(const struct core_status *status);
/* The root that the newest checkpoint on disk is in. View. */
const char *status_disk_root(const struct core_status *status);
/* What a person must do about roots. */
void status_roots_need(const struct core_status *status, json_t *needs);

#endif
