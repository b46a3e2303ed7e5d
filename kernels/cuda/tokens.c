/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tokens of a pass. The host sorts them by row of the table, keeping their order inside a row, so
 * that the embedding's gradient needs no atomics; then one copy takes all to the device.
 *
 * The copy reads from page-locked memory of a ring of buffers, each with an event behind its copy:
 * a buffer is taken again when its copy is over, which lets the host be RING calls ahead.
 */
#include "kernels/cuda/tokens.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/device.h"
#include "kernels/cuda/ops.h"

#define RING       16U
#define RADIX_BITS 8U
#define RADIX      (1U << RADIX_BITS)

struct buffer {
    void *host; /* page-locked; NULL: none yet */
    uint64_t bytes;
    cudaEvent_t copied; /* NULL: none yet */
};

struct kern_cuda_staging {
    struct buffer ring[RING];
    uint32_t next;
};

/* Row (from lo) above, number below: one word to sort. */
typedef uint64_t token_key;

static uint64_t upload_words(uint32_t n)
{
    return 4 * (uint64_t)n + 1;
}

/* Of the buffer: what goes up, then two arrays of keys to sort in. */
static uint64_t keys_at(uint32_t n)
{
    return (upload_words(n) * sizeof(uint32_t) + 15) & ~15ULL;
}

uint64_t kern_cuda_tokens_bytes(struct kern *k, uint32_t n)
{
    (void)k;
    return upload_words(n) * sizeof(uint32_t);
}

/* One pass by the digit at `shift`; keeps the order of equal digits. */
static void sort_digit(token_key *to, const token_key *from, uint32_t count, uint32_t shift)
{
    uint32_t at[RADIX + 1] = {0};
    for (uint32_t i = 0; i < count; i++) {
        at[((from[i] >> shift) & (RADIX - 1)) + 1]++;
    }
    for (uint32_t d = 1; d < RADIX; d++) {
        at[d] += at[d - 1];
    }
    for (uint32_t i = 0; i < count; i++) {
        to[at[(from[i] >> shift) & (RADIX - 1)]++] = from[i];
    }
}

/* Sorts by row; the result is returned, in `keys` or `other`. */
static const token_key *sort(token_key *keys, token_key *other, uint32_t count, uint32_t rows)
{
    for (uint32_t shift = 0; shift < 32 && (rows - 1) >> shift != 0; shift += RADIX_BITS) {
        sort_digit(other, keys, count, 32 + shift);
        token_key *sorted = other;
        other = keys;
        keys = sorted;
    }
    return keys;
}

/* Fills rows, starts, order from the tokens within [lo, hi); returns the number of segments. */
static uint32_t make_segments(const struct kern_cuda_tokens *t, token_key *keys, uint32_t n,
                              uint32_t lo, uint32_t hi)
{
    uint32_t here = 0, segments = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t token = (uint32_t)t->tokens[i];
        if (token >= lo && token < hi) {
            keys[here++] = (uint64_t)(token - lo) << 32 | i;
        }
    }
    if (here == 0) {
        return 0;
    }
    const token_key *sorted = sort(keys, keys + n, here, hi - lo);
    for (uint32_t i = 0; i < here; i++) {
        uint32_t row = (uint32_t)(sorted[i] >> 32);
        if (i == 0 || row != t->rows[segments - 1]) {
            t->rows[segments] = row;
            t->starts[segments++] = i;
        }
        t->order[i] = (uint32_t)sorted[i];
    }
    t->starts[segments] = here;
    return segments;
}

/* Makes the buffer free and large enough. */
static cudaError_t buffer_take(struct buffer *b, uint64_t bytes)
{
    cudaError_t error;
    if (b->copied == NULL) {
        error = cudaEventCreateWithFlags(&b->copied, cudaEventDisableTiming);
    } else {
        error = cudaEventSynchronize(b->copied);
    }
    if (error != cudaSuccess || b->bytes >= bytes) {
        return error;
    }
    if (b->host != NULL) {
        error = cudaFreeHost(b->host);
        b->host = NULL;
        b->bytes = 0;
    }
    if (error == cudaSuccess) {
        error = cudaMallocHost(&b->host, bytes);
    }
    b->bytes = error == cudaSuccess ? bytes : 0;
    return error;
}

static cudaError_t staging_take(struct kern_cuda *cuda, uint64_t bytes, struct buffer **ret)
{
    if (cuda->staging == NULL) {
        cuda->staging = calloc(1, sizeof *cuda->staging);
        if (cuda->staging == NULL) {
            return cudaErrorMemoryAllocation;
        }
    }
    *ret = &cuda->staging->ring[cuda->staging->next++ % RING];
    return buffer_take(*ret, bytes);
}

void kern_cuda_staging_close(struct kern_cuda *cuda)
{
    for (uint32_t i = 0; cuda->staging != NULL && i < RING; i++) {
        struct buffer *b = &cuda->staging->ring[i];
        if (b->copied != NULL) {
            (void)cudaEventDestroy(b->copied);
        }
        if (b->host != NULL) {
            (void)cudaFreeHost(b->host);
        }
    }
    free(cuda->staging);
    cuda->staging = NULL;
}

void kern_cuda_tokens_set(struct kern *k, struct kern_tokens *t, const int32_t *host, uint32_t n,
                          uint32_t lo, uint32_t hi)
{
    struct kern_cuda *cuda = kern_cuda_of(k);
    struct buffer *buffer = NULL;
    t->host = host;
    t->n = n;
    t->segments = 0;
    if (n == 0) {
        return;
    }
    cudaError_t error =
        staging_take(cuda, keys_at(n) + 2 * (uint64_t)n * sizeof(token_key), &buffer);
    if (error == cudaSuccess) {
        struct kern_cuda_tokens to = kern_cuda_tokens_at(buffer->host, n);
        memcpy(to.tokens, host, n * sizeof *host);
        t->segments =
            make_segments(&to, (token_key *)((char *)buffer->host + keys_at(n)), n, lo, hi);
        uint64_t words = t->segments > 0 ? upload_words(n) : n;
        error = cudaMemcpyAsync(t->memory, buffer->host, words * sizeof(uint32_t),
                                cudaMemcpyHostToDevice, cuda->compute);
    }
    if (error == cudaSuccess) {
        error = cudaEventRecord(buffer->copied, cuda->compute);
    }
    kern_cuda_note(k, error, "tokens_set");
}
