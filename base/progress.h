/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Progress of long work on standard error: how much of how much, how fast, how long yet.
 *
 *     reshard: 37 %, 1.5 GiB of 4.0 GiB, 612.3 MiB/s, 4.2 s left
 *
 * On a terminal one line that is written over, ten times a second at most; elsewhere, when it was
 * asked for, a line of its own every five seconds and one at the end. The rate is that of the last
 * seconds (an average that forgets by half every three), so that the time left follows a disk that
 * gets slower. One thread at a time; nothing is allocated. For programs: libraries call back
 * instead.
 */
#ifndef BL_BASE_PROGRESS_H
#define BL_BASE_PROGRESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum bl_progress_mode {
    BL_PROGRESS_AUTO,  /* when standard error is a terminal */
    BL_PROGRESS_LINES, /* asked for: also where it is none, as plain lines */
    BL_PROGRESS_NONE   /* never: --json */
};

struct bl_progress {
    const char *what;           /* borrowed until the end: stands in front of each line */
    uint64_t done, all;         /* bytes */
    uint64_t started, shown;    /* ns, monotonic */
    uint64_t rate_at, rate_was; /* when the rate was brought up to date, and `done` then */
    double rate;                /* bytes per second; 0: not known yet */
    bool on, terminal, drawn;   /* drawn: a line without its end stands on the terminal */
    FILE *out;                  /* standard error; tests put their own here after the start */
};

/* The mode of a verb that was given --json or --progress. */
enum bl_progress_mode bl_progress_mode(bool json, bool asked);

/* Begins work of `bytes_all` bytes (0: not known, then neither share nor time left is shown). */
void bl_progress_start(struct bl_progress *progress, const char *what, uint64_t bytes_all,
                       enum bl_progress_mode mode);

/* `bytes_done` bytes are done; may be called as often as one likes. */
void bl_progress_show(struct bl_progress *progress, uint64_t bytes_done);
/* The same at a moment of the monotonic clock, in ns; for tests. */
void bl_progress_show_at(struct bl_progress *progress, uint64_t bytes_done, uint64_t now_ns);

/* Takes the line away, so that something else can be printed; the next show draws it again. */
void bl_progress_clear(struct bl_progress *progress);

/* The end: takes the line away on a terminal, elsewhere a last line. Seconds since the start. May
 * be called without a start, and twice. */
double bl_progress_finish(struct bl_progress *progress);

#endif
