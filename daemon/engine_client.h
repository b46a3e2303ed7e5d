/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The daemon's side of belay-engine: for each checkpoint root a child of its own with a socket
 * pair, so that a root that hangs or crashes holds up neither a beat nor another root. It is
 * started by the first question about its root. When it dies another is started, and what was under
 * way counts as failed.
 *
 *               answers                 asked, and nothing moved for deadlines.root
 *      fine <--------------- trying    ------------------------------------------+
 *        |                      ^                                                v
 *        +--------------------- | --------------------------------------------> stuck
 *                               +---- a pause that doubles, 1 s to 5 min --------+
 *
 * Stuck: the child is killed (one that waits in the kernel dies when that ends), its questions have
 * failed, further ones fail at once. After the pause another child is asked what is there.
 */
#ifndef DAEMON_ENGINE_CLIENT_H
#define DAEMON_ENGINE_CLIENT_H

#include "daemon/daemon.h"

#define ENGINE_PENDING_MAX 64
#define ENGINES_MAX        64 /* roots of all jobs of a daemon, and of those that ended lately */

/* Ends all children and frees. */
void engine_close(struct daemon *daemon);

/* Writes this node's part of the attempt (core_member_write); core_member_on_engine_written. */
void engine_write(struct run *run, uint64_t attempt);
/* Stops writing it and removes what it left. No answer. */
void engine_cancel(struct run *run, uint64_t attempt);
/* Manifest and rename of the attempt (core_leader_commit); core_leader_on_commit_done. */
void engine_commit(struct run *run, uint64_t attempt);
/* What a save that lies on several nodes needs here next; core_member_on_engine_stage. */
void engine_stage(struct run *run, uint64_t attempt, enum wire_engine_stage stage);
/* Lists the checkpoints of all roots that every node sees, all at once; core_leader_on_scan_done.
 */
void engine_scan(struct run *run);
/* Lists what this node has in the roots that are its own; core_member_on_scanned. */
void engine_scan_own(struct run *run, uint64_t scan);

/* Scans one root for a caller of its own (a submit). `path` is as jobs name it, which tells the
 * engines apart. `own`: parts of checkpoints are wanted too. `done` gets NULL when the engine
 * failed. */
typedef void (*engine_scanned_fn)(void *arg, const struct wire_engine_scanned *scanned);
void engine_scan_root(struct daemon *daemon, const char *path, const struct wire_engine_root *root,
                      int own, engine_scanned_fn done, void *arg);

/* Root `index` of the run's job, as a question to the engine names it. */
void engine_root_fill(const struct run *run, uint32_t index, int create,
                      struct wire_engine_root *ret);
/* The path of a root on this node: "{node}" in it is the node's name. BL_ELIMIT: too long. */
BL_MUST_CHECK int engine_root_path(const char *node, const char *path, char *ret, size_t bytes);

/* Fills a slot of `arena` from disk, from one of the job's roots, or, where its engine here does
 * not answer, from another one that the plan names; `done` as the engine answered, or with
 * -ETIMEDOUT when none did. */
typedef void (*engine_loaded_fn)(void *arg, int rc, const char *text);
void engine_load(struct run *run, struct arena *arena, const struct wire_disk_load *load,
                 engine_loaded_fn done, void *arg);

/* Tells a leader that begins which of its roots are stuck. */
void engine_roots_tell(struct run *run);

#endif
