/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers of tensors for people: any dtype as doubles, statistics, differences. Streaming: each
 * struct takes one slice after the other. */
#ifndef TOOLS_CKPT_TOOL_VALUES_H
#define TOOLS_CKPT_TOOL_VALUES_H

#include <stdbool.h>
#include <stdint.h>

#include "base/extent.h"

#define TOOL_SLICE_ELEMS (1u << 20) /* at most so many elements at once */

/* dest[count] from elements as they are stored; I64 beyond 2^53 is rounded. */
void tool_values(double *dest, const void *src, enum bl_dtype dtype, uint64_t count);

struct tool_stats {
    uint64_t count, finite, nan, inf, zero;
    double min, max, mean, m2; /* of the finite ones; m2: sum of squares about the mean */
};

/* Takes `count` (at most TOOL_SLICE_ELEMS) more values in. */
void tool_stats_add(struct tool_stats *stats, const double *values, uint64_t count);
/* Of the finite values; 0 when there are fewer than two. */
double tool_stats_std(const struct tool_stats *stats);

struct tool_difference {
    uint64_t count;      /* elements compared */
    uint64_t differing;  /* in their bits; of two dtypes: in their values */
    uint64_t unordered;  /* of those, where one is NaN or they are infinitely far apart */
    double max_abs;      /* of the others */
    double max_rel;      /* |a - b| / max(|a|, |b|) */
    uint64_t max_at;     /* element of max_abs */
    double sum_abs;      /* of the others */
    double sum_square;   /* of a - b */
    double sum_square_a; /* of a, finite ones */
};

/* Takes `count` more elements in, which begin at element `first`. The stored bytes of both are
 * given where both have one dtype (bits count then: -0 and 0 differ, a NaN is equal to itself),
 * else elem_bytes is 0. */
void tool_difference_add(struct tool_difference *difference, uint64_t first, const double *a,
                         const double *b, const void *a_bits, const void *b_bits,
                         uint32_t elem_bytes, uint64_t count);
double tool_difference_mean(const struct tool_difference *difference);     /* of |a - b| */
double tool_difference_relative(const struct tool_difference *difference); /* |a - b| / |a| */

#endif
