/* SPDX-License-Identifier: Apache-2.0 */
#include "base/human.h"

#include <stdio.h>

const char *bl_human_bytes(char ret[BL_HUMAN_MAX], uint64_t bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double value = (double)bytes;
    uint32_t unit = 0;

    while (value >= 1024 && unit < 6) {
        value /= 1024;
        unit++;
    }
    snprintf(ret, BL_HUMAN_MAX, unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
    return ret;
}

const char *bl_human_seconds(char ret[BL_HUMAN_MAX], double seconds)
{
    uint64_t whole = seconds < 1e15 ? (uint64_t)seconds : (uint64_t)1e15;

    if (seconds < 99.95) {
        snprintf(ret, BL_HUMAN_MAX, "%.1f s", seconds);
    } else if (whole < 6000) {
        snprintf(ret, BL_HUMAN_MAX, "%u min %02u s", (unsigned)(whole / 60),
                 (unsigned)(whole % 60));
    } else {
        snprintf(ret, BL_HUMAN_MAX, "%llu h %02u min", (unsigned long long)(whole / 3600),
                 (unsigned)(whole / 60 % 60));
    }
    return ret;
}
