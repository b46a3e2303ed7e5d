/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/ckpt_tool_values.h"

#include <math.h>
#include <string.h>

#include "ckpt/convert.h"

void tool_values(double *dest, const void *src, enum bl_dtype dtype, uint64_t count)
{
    const uint8_t *at = src;
    uint32_t bytes = bl_dtype_bytes(dtype);

    for (uint64_t i = 0; i < count; i++, at += bytes) {
        int64_t i64;
        int32_t i32;
        float f32;

        switch (dtype) {
        case BL_F64:
            memcpy(&dest[i], at, sizeof(dest[i]));
            break;
        case BL_U8:
            dest[i] = *at;
            break;
        case BL_I32:
            memcpy(&i32, at, sizeof(i32));
            dest[i] = i32;
            break;
        case BL_I64:
            memcpy(&i64, at, sizeof(i64));
            dest[i] = (double)i64;
            break;
        case BL_F32:
        case BL_BF16:
        case BL_F16:
            ckpt_widen(&f32, at, dtype, 1);
            dest[i] = (double)f32;
            break;
        }
    }
}

void tool_stats_add(struct tool_stats *stats, const double *values, uint64_t count)
{
    double sum = 0, mean, m2 = 0, delta;
    uint64_t finite = 0;

    for (uint64_t i = 0; i < count; i++) {
        double value = values[i];

        if (!isfinite(value)) {
            stats->nan += isnan(value);
            stats->inf += !isnan(value);
            continue;
        }
        stats->min = stats->finite + finite == 0 || value < stats->min ? value : stats->min;
        stats->max = stats->finite + finite == 0 || value > stats->max ? value : stats->max;
        stats->zero += value == 0;
        sum += value;
        finite++;
    }
    stats->count += count;
    if (finite == 0) {
        return;
    }
    mean = sum / (double)finite;
    for (uint64_t i = 0; i < count; i++) {
        m2 += isfinite(values[i]) ? (values[i] - mean) * (values[i] - mean) : 0;
    }
    /* Two sets joined: Chan, Golub, LeVeque, "Updating formulae", 1979. */
    delta = mean - stats->mean;
    stats->m2 += m2 + delta * delta * (double)stats->finite * (double)finite /
                          (double)(stats->finite + finite);
    stats->finite += finite;
    stats->mean += delta * (double)finite / (double)stats->finite;
}

double tool_stats_std(const struct tool_stats *stats)
{
    return stats->finite < 2 ? 0 : sqrt(stats->m2 / (double)stats->finite);
}

static void add_differing(struct tool_difference *difference, uint64_t at, double a, double b)
{
    double apart = fabs(a - b), size = fabs(a) > fabs(b) ? fabs(a) : fabs(b);

    difference->differing++;
    if (!isfinite(apart)) {
        difference->unordered++;
        return;
    }
    if (apart > difference->max_abs) {
        difference->max_abs = apart;
        difference->max_at = at;
    }
    if (size > 0 && apart / size > difference->max_rel) {
        difference->max_rel = apart / size;
    }
    difference->sum_abs += apart;
    difference->sum_square += apart * apart;
}

void tool_difference_add(struct tool_difference *difference, uint64_t first, const double *a,
                         const double *b, const void *a_bits, const void *b_bits,
                         uint32_t elem_bytes, uint64_t count)
{
    const uint8_t *a_at = a_bits, *b_at = b_bits;
    bool same = elem_bytes > 0 && memcmp(a_bits, b_bits, count * elem_bytes) == 0;

    difference->count += count;
    for (uint64_t i = 0; i < count; i++) {
        difference->sum_square_a += isfinite(a[i]) ? a[i] * a[i] : 0;
        if (same) {
            continue;
        }
        if (elem_bytes > 0 ? memcmp(a_at + i * elem_bytes, b_at + i * elem_bytes, elem_bytes) != 0
                           : !(a[i] == b[i] || (isnan(a[i]) && isnan(b[i])))) {
            add_differing(difference, first + i, a[i], b[i]);
        }
    }
}

double tool_difference_mean(const struct tool_difference *difference)
{
    uint64_t count = difference->count - difference->unordered;

    return count == 0 ? 0 : difference->sum_abs / (double)count;
}

double tool_difference_relative(const struct tool_difference *difference)
{
    if (difference->sum_square == 0) {
        return 0;
    }
    return difference->sum_square_a == 0 ? INFINITY
                                         : sqrt(difference->sum_square / difference->sum_square_a);
}
