/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The store: what must survive (runs, generations, plans, commits), as values under keys, each with
 * a revision that grows by one per change. Changes are compare-and-swaps on the revision. One
 * interface; store_sqlite.c is the embedded one.
 *
 * Callbacks: a submit that fails has none; a good one has exactly one, from the loop, never from
 * inside the submit. Answers come in the order of submits.
 */
#ifndef DAEMON_STORE_H
#define DAEMON_STORE_H

#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "base/error.h"

#define STORE_KEY_MAX     64
#define STORE_VALUE_MAX   (16u << 20)
#define STORE_PENDING_MAX 256 /* changes under way; more are refused with BL_ELIMIT */

struct store; /* opaque; loop thread only */

/* rc 0: durable, `revision` is the new one. BL_ECONFLICT: somebody else changed it first,
 * `revision` is what is there. -errno or BL_ELIBRARY: not stored (disk full, I/O error). */
typedef void (*store_done_fn)(void *arg, int rc, uint64_t revision, const char *text);

/* Called for every change after it is durable here and before its answer, to pass it on to a
 * standby; the answer waits until store_release. NULL value: the key was removed. */
typedef void (*store_replicate_fn)(void *arg, uint64_t ticket, const char *key, const void *value,
                                   size_t bytes, uint64_t revision);

/* Opens (makes) the database at `path`, WAL, synchronous=FULL, and starts its thread. Owned. */
BL_MUST_CHECK int store_open(struct store **ret, uv_loop_t *loop, const char *path,
                             struct bl_errmsg *msg);
/* Finishes what was submitted (their callbacks are not called any more), closes. `done` is called
 * from the loop when the handle is gone. NULL store is fine: done is called at once. */
void store_close(struct store *store, void (*done)(void *arg), void *arg);

/* NULL: changes count when they are durable here. */
void store_replicate(struct store *store, store_replicate_fn fn, void *arg);
/* The change of `ticket` is durable on the standby, or waiting for it was given up. */
void store_release(struct store *store, uint64_t ticket);

/* Sets `key` to `value` (copied) if its revision is `expect` (0: not there). */
BL_MUST_CHECK int store_swap(struct store *store, const char *key, uint64_t expect,
                             const void *value, size_t bytes, store_done_fn done, void *arg);

/* Sets `key` to `value` at `revision` whatever was there: a standby applying its head's changes. */
BL_MUST_CHECK int store_apply(struct store *store, const char *key, uint64_t revision,
                              const void *value, size_t bytes, store_done_fn done, void *arg);

/* Reads all keys that begin with `prefix`; blocks (only before the loop runs, or for a replica's
 * catch-up, where values are few). Returns what `each` returned if not 0; BL_EDIGEST when a value
 * is not what was written, and then gives it to nobody. */
typedef int (*store_each_fn)(void *arg, const char *key, uint64_t revision, const void *value,
                             size_t bytes);
BL_MUST_CHECK int store_each(struct store *store, const char *prefix, store_each_fn each, void *arg,
                             struct bl_errmsg *msg);

#endif
