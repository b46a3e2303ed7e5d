/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where things lie in the memory of a struct kern_tokens, for n tokens of which `here` lie within
 * [lo, hi):
 *
 *     tokens[n]  rows[n]       starts[n + 1]        order[n]
 *                of segments   of segments, in      numbers of the tokens that are here, sorted by
 *                              order; the end       row, then by number
 *
 * Segment s is row rows[s] (counted from lo) and the tokens order[starts[s]] to
 * order[starts[s + 1] - 1].
 */
#ifndef KERN_KERNELS_CUDA_TOKENS_H
#define KERN_KERNELS_CUDA_TOKENS_H

#include "kernels/backend.h"

struct kern_cuda_tokens {
    int32_t *tokens;
    uint32_t *rows, *starts, *order;
};

/* `memory` is laid out for n tokens. */
static inline struct kern_cuda_tokens kern_cuda_tokens_at(void *memory, uint32_t n)
{
    struct kern_cuda_tokens t;
    t.tokens = (int32_t *)memory;
    t.rows = (uint32_t *)memory + n;
    t.starts = t.rows + n;
    t.order = t.starts + n + 1;
    return t;
}

#endif
