/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How ranges are cut into tasks: by their size alone, never by the number of threads.
 */
#ifndef KERN_KERNELS_CPU_SPLIT_H
#define KERN_KERNELS_CPU_SPLIT_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/kern.h"

struct kern_split {
    size_t count; /* things */
    size_t each;  /* things in a task; the last may have fewer */
};

/* Cuts `count` things into tasks of at least `each`, more when there would be over 2^16 tasks. */
static inline struct kern_split kern_split_make(size_t count, size_t each)
{
    struct kern_split split = {.count = count, .each = each == 0 ? 1 : each};
    while ((count + split.each - 1) / split.each > 65536) {
        split.each *= 2;
    }
    return split;
}

static inline uint32_t kern_split_tasks(const struct kern_split *split)
{
    return (uint32_t)((split->count + split->each - 1) / split->each);
}

static inline size_t kern_split_first(const struct kern_split *split, uint32_t task)
{
    return split->each * task;
}

static inline size_t kern_split_end(const struct kern_split *split, uint32_t task)
{
    size_t end = split->each * ((size_t)task + 1);
    return end < split->count ? end : split->count;
}

/* Rows of `elems` elements a task should have for about 16 Ki elements of work. */
static inline size_t kern_split_rows(size_t elems)
{
    size_t rows = 16384 / (elems == 0 ? 1 : elems);
    return rows == 0 ? 1 : rows;
}

#endif
