/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/progress.h"

#include <math.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"

#define TERMINAL_EVERY_NS 100000000ull  /* how often the line on a terminal is drawn */
#define LINES_EVERY_NS    5000000000ull /* how often a line is added elsewhere */
#define RATE_EVERY_NS     100000000ull  /* shorter stretches would be noise */
#define RATE_HALF_S       3.0           /* a stretch counts half after so many seconds */

const char *ckpt_tool_size(char ret[TOOL_TEXT_MAX], uint64_t bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double value = (double)bytes;
    uint32_t unit = 0;

    while (value >= 1024 && unit < 6) {
        value /= 1024;
        unit++;
    }
    snprintf(ret, TOOL_TEXT_MAX, unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
    return ret;
}

const char *ckpt_tool_seconds(char ret[TOOL_TEXT_MAX], double seconds)
{
    uint64_t whole = seconds < 1e15 ? (uint64_t)seconds : (uint64_t)1e15;

    if (seconds < 99.95) {
        snprintf(ret, TOOL_TEXT_MAX, "%.1f s", seconds);
    } else if (whole < 6000) {
        snprintf(ret, TOOL_TEXT_MAX, "%u min %02u s", (unsigned)(whole / 60),
                 (unsigned)(whole % 60));
    } else {
        snprintf(ret, TOOL_TEXT_MAX, "%llu h %02u min", (unsigned long long)(whole / 3600),
                 (unsigned)(whole / 60 % 60));
    }
    return ret;
}

enum tool_progress_mode tool_progress_mode(bool json, bool asked)
{
    return json ? TOOL_PROGRESS_NONE : asked ? TOOL_PROGRESS_LINES : TOOL_PROGRESS_AUTO;
}

void tool_progress_start(struct tool_progress *progress, const char *what, uint64_t bytes_all,
                         enum tool_progress_mode mode)
{
    memset(progress, 0, sizeof(*progress));
    progress->what = what;
    progress->all = bytes_all;
    progress->out = stderr;
    progress->terminal = mode != TOOL_PROGRESS_NONE && isatty(STDERR_FILENO) == 1;
    progress->on = progress->terminal || mode == TOOL_PROGRESS_LINES;
    progress->started = progress->rate_at = bl_now_ns();
    progress->shown = progress->terminal ? 0 : progress->started;
}

/* The older the average, the more a new stretch counts. */
static void rate_update(struct tool_progress *progress, uint64_t now_ns)
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

static void line_print(struct tool_progress *progress)
{
    char done[TOOL_TEXT_MAX], text[TOOL_TEXT_MAX];

    fprintf(progress->out, "%s%s: ", progress->terminal ? "\r\033[K" : "", progress->what);
    if (progress->all > 0) {
        fprintf(progress->out, "%.0f %%, %s of %s",
                floor(100 * (double)progress->done / (double)progress->all),
                ckpt_tool_size(done, progress->done), ckpt_tool_size(text, progress->all));
    } else {
        fputs(ckpt_tool_size(done, progress->done), progress->out);
    }
    if (progress->rate >= 1) {
        fprintf(progress->out, ", %s/s", ckpt_tool_size(text, (uint64_t)progress->rate));
    }
    if (progress->rate >= 1 && progress->all > progress->done) {
        fprintf(progress->out, ", %s left",
                ckpt_tool_seconds(text, (double)(progress->all - progress->done) / progress->rate));
    }
    fputs(progress->terminal ? "" : "\n", progress->out);
    fflush(progress->out);
    progress->drawn = progress->terminal;
}

void tool_progress_show_at(struct tool_progress *progress, uint64_t bytes_done, uint64_t now_ns)
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

void tool_progress_show(struct tool_progress *progress, uint64_t bytes_done)
{
    tool_progress_show_at(progress, bytes_done, bl_now_ns());
}

void tool_progress_clear(struct tool_progress *progress)
{
    if (progress->drawn) {
        fputs("\r\033[K", progress->out);
        fflush(progress->out);
        progress->drawn = false;
        progress->shown = 0;
    }
}

double tool_progress_finish(struct tool_progress *progress)
{
    double seconds;

    if (progress->out == NULL) {
        return 0;
    }
    seconds = (double)(bl_now_ns() - progress->started) / 1e9;
    tool_progress_clear(progress);
    if (progress->on && !progress->terminal) {
        /* The rate of the whole: what remains of the work in a log. */
        progress->rate = seconds > 0 ? (double)progress->done / seconds : 0;
        line_print(progress);
    }
    progress->on = false;
    return seconds;
}
