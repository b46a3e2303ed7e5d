/* SPDX-License-Identifier: Apache-2.0 */
#include "base/clock.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/error.h"

#define NS_PER_S 1000000000ULL

static uint64_t clock_read_ns(clockid_t id)
{
    struct timespec ts;
    int rc = clock_gettime(id, &ts);
    BL_ASSERT(rc == 0);
    return (uint64_t)ts.tv_sec * NS_PER_S + (uint64_t)ts.tv_nsec;
}

uint64_t bl_now_ns(void)
{
    return clock_read_ns(CLOCK_MONOTONIC);
}

uint64_t bl_boot_ns(void)
{
    return clock_read_ns(CLOCK_BOOTTIME);
}

uint64_t bl_wall_ms(void)
{
    return clock_read_ns(CLOCK_REALTIME) / 1000000;
}

uint64_t bl_time_scaled_ms(uint64_t ms)
{
    const char *text = getenv("BELAY_TIME_SCALE");
    if (text == NULL) {
        return ms;
    }
    char *end;
    double scale = strtod(text, &end);
    if (end == text || *end != '\0' || !isfinite(scale) || scale <= 0) {
        return ms;
    }
    double scaled = (double)ms * scale;
    if (scaled >= 1e15) {
        return (uint64_t)1e15;
    }
    /* A deadline never becomes nothing: 0 means "none" in places. */
    return scaled < 1 && ms > 0 ? 1 : (uint64_t)scaled;
}

void bl_wall_format(uint64_t wall_ms, char text[BL_CLOCK_TEXT_BYTES])
{
    struct tm tm;
    time_t seconds = (time_t)(wall_ms / 1000);
    char day[32] = "";
    if (gmtime_r(&seconds, &tm) != NULL && tm.tm_year < 8000) {
        strftime(day, sizeof(day), "%Y-%m-%dT%H:%M:%S", &tm);
    }
    snprintf(text, BL_CLOCK_TEXT_BYTES, "%.19s.%03uZ", day, (unsigned)(wall_ms % 1000));
}
