/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The logger: the only global there is, and for programs only; libraries return errors.
 *
 *     2026-01-31T23:59:59.123Z warn daemon: root /data/ckpt is stuck
 *
 * A line goes out by one write() to standard error and, when set, to a second fd. A full or broken
 * sink never blocks or stops the program: the line is dropped and counted, and the count is told
 * before the next line that goes through. Floods are held back: at most BL_LOG_BURST lines a second
 * below BL_LOG_ERROR, what is left out is counted and told.
 *
 * Set-up is for one thread before others run; bl_log may be called from any thread.
 */
#ifndef BL_BASE_LOG_H
#define BL_BASE_LOG_H

#include <stdint.h>

#include "base/error.h"

enum bl_log_level { BL_LOG_DEBUG = 0, BL_LOG_INFO = 1, BL_LOG_WARN = 2, BL_LOG_ERROR = 3 };

#define BL_LOG_LINE_BYTES 2048 /* longer lines are cut */
#define BL_LOG_BURST      200

/* Lines below `level` are left out from now on. Default: info, or what BELAY_LOG names (debug,
 * info, warn, error). */
void bl_log_set_level(enum bl_log_level level);

/* A second sink, borrowed until replaced; -1 for none. */
void bl_log_set_fd(int fd);

/* 0 silences standard error (the second sink goes on); default 1. */
void bl_log_set_stderr(int on);

/* The level of a name, or -1. */
int bl_log_level_parse(const char *name);

/* Writes one line. `room` says who speaks ("daemon"). Line breaks in the text become spaces. Not
 * for signal handlers. Keeps errno. */
void bl_log(enum bl_log_level level, const char *room, const char *fmt, ...) BL_PRINTF(3, 4);

/* Lines dropped since the start, by a full sink or by the rate. */
uint64_t bl_log_dropped(void);

#endif
