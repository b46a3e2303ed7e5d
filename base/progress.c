/* SPDX-License-Identifier: Apache-2.0 */
#include "base/progress.h"

#include <math.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/human.h"

#define TERMINAL_EVERY_NS 100000000ull  /* how often the line on a terminal is drawn */
#define LINES_EVERY_NS    5000000000ull /* how often a line is added elsewhere */
#define RATE_EVERY_NS     100000000ull  /* shorter stretches would be noise */
#define RATE_HALF_S       3.0           /* a stretch counts half after so many seconds */

enum bl_progress_mode bl_progress_mode(bool json, bool asked)
{
    return json ? BL_PROGRESS_NONE : asked ? BL_PROGRESS_LINES : BL_PROGRESS_AUTO;
}

void bl_progress_start(struct bl_progress *progress, const char *what, uint64_t bytes_all,
                       enum bl_progress_mode mode)
{
    memset(progress, 0, sizeof(*progress));
    progress->what = what;
    progress->all = bytes_all;
    progress->out = stderr;
    progress->terminal = mode != BL_PROGRESS_NONE && isatty(STDERR_FILENO) == 1;
    progress->on = progress->terminal || mode == BL_PROGRESS_LINES;
    progress->started = progress->rate_at = bl_now_ns();
    progress->shown = progress->terminal ? 0 : progress->started;
}

/* The older the average, the more a new stretch counts. */
static void rate_update(struct bl_progress *progress, uint64_t now_ns)
{
    double stretch, old;

    if (now_ns < progress->rate_at + RATE_EVERY_NS) {
        return;
    }
    stretch = (double)(now_ns - progress->rate_at) / 1e9;
    old = progress->rate == 0 ? 0 : pow(0.5, stretch / RATE_HALF_S);
    progress->rate =
        old * progress->rate + (1 - old) * (double)(progress->done - progress->rate_was) / stretch;
    progress->rate_at = now_ns;
    progress->rate_was = progress->done;
}

static void line_print(struct bl_progress *progress)
{
    char done[BL_HUMAN_MAX], text[BL_HUMAN_MAX];

    fprintf(progress->out, "%s%s: ", progress->terminal ? "\r\033[K" : "", progress->what);
    if (progress->all > 0) {
        fprintf(progress->out, "%.0f %%, %s of %s",
                floor(100 * (double)progress->done / (double)progress->all),
                bl_human_bytes(done, progress->done), bl_human_bytes(text, progress->all));
    } else {
        fputs(bl_human_bytes(done, progress->done), progress->out);
    }
    if (progress->rate >= 1) {
        fprintf(progress->out, ", %s/s", bl_human_bytes(text, (uint64_t)progress->rate));
    }
    if (progress->rate >= 1 && progress->all > progress->done) {
        fprintf(progress->out, ", %s left",
                bl_human_seconds(text, (double)(progress->all - progress->done) / progress->rate));
    }
    fputs(progress->terminal ? "" : "\n", progress->out);
    fflush(progress->out);
    progress->drawn = progress->terminal;
}

void bl_progress_show_at(struct bl_progress *progress, uint64_t bytes_done, uint64_t now_ns)
{
    uint64_t every = progress->terminal ? TERMINAL_EVERY_NS : LINES_EVERY_NS;

    /* Work that was done twice, or more than was thought, never shows as 101 %. */
    progress->done = progress->all > 0 && bytes_done > progress->all ? progress->all : bytes_done;
    if (progress->done < progress->rate_was) {
        progress->rate_was = progress->done;
    }
    if (!progress->on) {
        return;
    }
    rate_update(progress, now_ns);
    if (now_ns >= progress->shown + every) {
        progress->shown = now_ns;
        line_print(progress);
    }
}

void bl_progress_show(struct bl_progress *progress, uint64_t bytes_done)
{
    bl_progress_show_at(progress, bytes_done, bl_now_ns());
}

void bl_progress_clear(struct bl_progress *progress)
{
    if (progress->drawn) {
        fputs("\r\033[K", progress->out);
        fflush(progress->out);
        progress->drawn = false;
        progress->shown = 0;
    }
}

double bl_progress_finish(struct bl_progress *progress)
{
    double seconds;

    if (progress->out == NULL) {
        return 0;
    }
    seconds = (double)(bl_now_ns() - progress->started) / 1e9;
    bl_progress_clear(progress);
    if (progress->on && !progress->terminal) {
        /* The rate of the whole: what remains of the work in a log. */
        progress->rate = seconds > 0 ? (double)progress->done / seconds : 0;
        line_print(progress);
    }
    progress->on = false;
    return seconds;
}
