/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rank's log. Output comes in by shim_log_put from the loop, which never blocks: bytes go into
 * a ring in memory, a thread of its own writes them out. When the disk is slower than the rank the
 * ring fills up, whole lines are dropped, and a line in the log says how many bytes.
 *
 *      pipe -> lines -> fold repeats -> ring (1 MiB) -> writer thread -> FILE, FILE.1, FILE.2, ...
 */
#ifndef SHIM_SHIM_LOG_H
#define SHIM_SHIM_LOG_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

#define SHIM_LOG_FILE_BYTES (64u << 20) /* a file is rotated before it grows over this */
#define SHIM_LOG_FILES      4           /* kept, the one being written included */
#define SHIM_LOG_RING_BYTES (1u << 20)
#define SHIM_LOG_LINE_MAX   8192 /* longer lines go out in pieces */

struct shim_log; /* opaque */

/* Opens (appends to) `path` and starts the writer thread. *ret is owned: shim_log_close. */
BL_MUST_CHECK int shim_log_open(struct shim_log **ret, const char *path, uint64_t file_bytes,
                                struct bl_errmsg *msg);

/* Takes `bytes` bytes of output. Never blocks on the disk. One thread. */
void shim_log_put(struct shim_log *log, const void *data, size_t bytes);

/* Lets a partial line and a pending count of repeats out: called when the rank is silent. */
void shim_log_flush(struct shim_log *log);

/* A line of the shim's own, marked "belay-shim: ". */
void shim_log_note(struct shim_log *log, const char *fmt, ...) BL_PRINTF(2, 3);

/* Bytes dropped since the start. */
uint64_t shim_log_dropped(struct shim_log *log);

/* Writes out what is left, ends the thread, frees. NULL is fine. */
void shim_log_close(struct shim_log *log);

#endif
