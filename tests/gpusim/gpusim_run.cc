/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Blocks, barriers and warps. All state is of the one grid that runs; who runs it holds the lock of
 * gpusim_grid_run.
 */
#include "gpusim_run.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "gpusim_device.h"
#include "gpusim_fibre.h"
#include "gpusim_shared.h"

#define WARP 32u

enum fibre_state { FIBRE_FREE, FIBRE_RUNS, FIBRE_IN_BARRIER, FIBRE_IN_WARP };

/* A fibre with the thread of the block that it plays. */
struct fibre {
    struct gpusim_thread now; /* first: gpusim_now points here */
    struct gpusim_context context;
    enum fibre_state state;
    int line; /* where it waits */
    /* What it waits for in its warp. */
    uint32_t mask;
    const void *value;
    void *got;
    size_t bytes;
    int source; /* a lane; -1: all of them */
};

struct gpusim_thread *gpusim_now;
uint3 gpusim_block_index;
dim3 gpusim_block_size, gpusim_grid_size;

/* The block that runs. */
static struct {
    const struct gpusim_grid *grid;
    struct gpusim_context host;
    uint32_t count, started, alive;
    uint32_t first, stride;                      /* order of starts: first + i * stride mod count */
    struct fibre *of_thread[GPUSIM_THREADS_MAX]; /* NULL: not started; kept after its end */
    uint8_t has_ended[GPUSIM_THREADS_MAX];
    struct fibre *ready[GPUSIM_THREADS_MAX];
    uint32_t ready_count;
    uint32_t in_barrier;
    uint8_t in_warp[GPUSIM_THREADS_MAX / WARP]; /* lanes that wait for their warp */
    int barrier_line;
    unsigned char *shared;
} block;

static struct fibre *all_fibres[GPUSIM_THREADS_MAX], *free_fibres[GPUSIM_THREADS_MAX];
static uint32_t all_count, free_count;
static uint64_t shuffle_state; /* 0: no shuffling */

/* xorshift64* */
static uint32_t shuffle_next(uint32_t below)
{
    shuffle_state ^= shuffle_state >> 12;
    shuffle_state ^= shuffle_state << 25;
    shuffle_state ^= shuffle_state >> 27;
    uint64_t x = (shuffle_state * UINT64_C(2685821657736338717)) >> 32;
    return static_cast<uint32_t>((x * below) >> 32);
}

/* A random walk through all of 0..count-1. */
static void shuffle_walk(uint32_t count, uint32_t *first, uint32_t *stride)
{
    *first = 0;
    *stride = 1;
    if (shuffle_state == 0 || count < 2) {
        return;
    }
    *first = shuffle_next(count);
    for (;;) {
        uint32_t a = 1 + shuffle_next(count - 1), b = count, candidate = a;
        while (b) {
            uint32_t rest = a % b;
            a = b;
            b = rest;
        }
        if (a == 1) {
            *stride = candidate;
            return;
        }
    }
}

[[noreturn]] static void fail_at(const struct gpusim_thread *t, const char *format, ...)
{
    fprintf(stderr, "gpusim: kernel %s, block (%u,%u,%u)", block.grid ? block.grid->name : "none",
            gpusim_block_index.x, gpusim_block_index.y, gpusim_block_index.z);
    if (t) {
        fprintf(stderr, ", thread (%u,%u,%u)", t->thread.x, t->thread.y, t->thread.z);
    }
    fprintf(stderr, ": ");
    va_list list;
    va_start(list, format);
    vfprintf(stderr, format, list);
    va_end(list);
    fprintf(stderr, "\n");
    fflush(stderr);
    abort();
}

void gpusim_fail(const char *what)
{
    fail_at(gpusim_now, "%s", what);
}

/* ---- fibres as threads ---- */

static void thread_begin(struct fibre *f, uint32_t index)
{
    uint32_t x = gpusim_block_size.x, y = gpusim_block_size.y;
    f->now.index = index;
    f->now.lane = index % WARP;
    f->now.thread = uint3{index % x, index / x % y, index / x / y};
    f->state = FIBRE_RUNS;
    block.of_thread[index] = f;
    gpusim_now = &f->now;
}

static int goes_on_starting(void)
{
    if (block.started == block.count) {
        return 0;
    }
    /* Shuffled: now and then those who wait no longer go first. */
    return shuffle_state == 0 || block.ready_count == 0 || shuffle_next(4) != 0;
}

static struct fibre *fibre_pick(void);

/* Goes on with whoever can; comes back when it is this fibre's turn. */
static void fibre_leave(struct fibre *f)
{
    struct fibre *next = fibre_pick();
    if (next != f) {
        gpusim_context_switch(&f->context, next ? &next->context : &block.host);
    }
}

static void fibre_main(void *arg)
{
    struct fibre *f = static_cast<struct fibre *>(arg);
    gpusim_context_entered(&f->context);
    for (;;) {
        while (goes_on_starting()) {
            uint64_t i = block.started++;
            uint32_t index = static_cast<uint32_t>((block.first + i * block.stride) % block.count);
            thread_begin(f, index);
            block.grid->call(block.grid->arg);
            block.has_ended[index] = 1;
            block.of_thread[index] = NULL;
            block.alive--;
        }
        f->state = FIBRE_FREE;
        free_fibres[free_count++] = f;
        fibre_leave(f);
    }
}

static struct fibre *fibre_take(void)
{
    if (free_count > 0) {
        return free_fibres[--free_count];
    }
    struct fibre *f = static_cast<struct fibre *>(calloc(1, sizeof *f));
    if (!f || all_count == GPUSIM_THREADS_MAX) {
        abort();
    }
    all_fibres[all_count++] = f;
    gpusim_context_make(&f->context, fibre_main, f);
    return f;
}

/* Whose turn it is; a free fibre starts threads. NULL: nobody can go on. */
static struct fibre *fibre_pick(void)
{
    int starts = block.started < block.count;
    if (block.ready_count == 0 || (starts && shuffle_state && shuffle_next(2))) {
        return starts ? fibre_take() : NULL;
    }
    uint32_t i = --block.ready_count;
    if (shuffle_state && i > 0) {
        uint32_t other = shuffle_next(i + 1);
        struct fibre *f = block.ready[other];
        block.ready[other] = block.ready[i];
        block.ready[i] = f;
    }
    gpusim_now = &block.ready[i]->now;
    return block.ready[i];
}

static struct fibre *fibre_now(void)
{
    return reinterpret_cast<struct fibre *>(gpusim_now);
}

static void fibre_ready(struct fibre *f)
{
    f->state = FIBRE_RUNS;
    block.ready[block.ready_count++] = f;
}

/* ---- barriers ---- */

static void barrier_open(void)
{
    uint32_t first, stride;
    shuffle_walk(block.count, &first, &stride);
    /* The newest is taken first: pushed from the last to the first. */
    for (uint64_t i = block.count; i-- > 0;) {
        fibre_ready(block.of_thread[(first + i * stride) % block.count]);
    }
    block.in_barrier = 0;
}

void gpusim_block_sync(int line)
{
    struct fibre *f = fibre_now();
    if (block.in_barrier > 0 && line != block.barrier_line) {
        fail_at(gpusim_now, "barrier of line %d, while others wait at that of line %d", line,
                block.barrier_line);
    }
    if (block.count == 1) {
        return;
    }
    block.barrier_line = line;
    block.in_barrier++;
    f->line = line;
    f->state = FIBRE_IN_BARRIER;
    if (block.in_barrier == block.count) {
        barrier_open();
    }
    fibre_leave(f);
}

/* ---- warps ---- */

static struct fibre *lane_of(const struct fibre *f, uint32_t lane)
{
    uint32_t index = f->now.index - f->now.lane + lane;
    return index < block.count ? block.of_thread[index] : NULL;
}

static uint8_t popcount(uint32_t mask)
{
    return static_cast<uint8_t>(__builtin_popcount(mask));
}

/* 1: all lanes of the mask are there, and mean the same. */
static int warp_is_complete(const struct fibre *f)
{
    for (uint32_t lane = 0; lane < WARP; lane++) {
        if (!(f->mask >> lane & 1)) {
            continue;
        }
        uint32_t index = f->now.index - f->now.lane + lane;
        if (index >= block.count || block.has_ended[index]) {
            fail_at(&f->now, "line %d: lane %u of mask %08x %s", f->line, lane, f->mask,
                    index >= block.count ? "does not exist" : "has ended");
        }
        const struct fibre *other = block.of_thread[index];
        if (!other || other->state != FIBRE_IN_WARP || other->mask != f->mask ||
            other->line != f->line || other->bytes != f->bytes) {
            return 0; /* if it never comes here, all will wait for ever, and that is told */
        }
    }
    return 1;
}

static void warp_deliver(const struct fibre *f)
{
    for (uint32_t lane = 0; lane < WARP; lane++) {
        if (!(f->mask >> lane & 1)) {
            continue;
        }
        struct fibre *to = lane_of(f, lane);
        if (to->bytes == 0) {
            continue;
        }
        if (to->source >= 0) {
            memcpy(to->got, lane_of(f, static_cast<uint32_t>(to->source))->value, to->bytes);
            continue;
        }
        for (uint32_t from = 0; from < WARP; from++) {
            char *at = static_cast<char *>(to->got) + from * to->bytes;
            if (f->mask >> from & 1) {
                memcpy(at, lane_of(f, from)->value, to->bytes);
            } else {
                memset(at, 0, to->bytes);
            }
        }
    }
}

static void warp_meet(uint32_t mask, const void *value, size_t bytes, int source, void *got,
                      int line)
{
    struct fibre *f = fibre_now();
    if (!(mask >> f->now.lane & 1)) {
        fail_at(&f->now, "line %d: the lane is not in its mask %08x", line, mask);
    }
    if (source >= 0 && !(mask >> source & 1)) {
        fail_at(&f->now, "line %d: reads lane %d, which is not in mask %08x", line, source, mask);
    }
    f->mask = mask;
    f->value = value;
    f->bytes = bytes;
    f->source = source;
    f->got = got;
    f->line = line;
    f->state = FIBRE_IN_WARP;
    uint8_t *waiting = &block.in_warp[f->now.index / WARP], all = popcount(mask);
    if (++*waiting >= all && warp_is_complete(f)) {
        *waiting = static_cast<uint8_t>(*waiting - all);
        warp_deliver(f);
        uint32_t first, stride;
        shuffle_walk(WARP, &first, &stride);
        for (uint32_t i = WARP; i-- > 0;) {
            uint32_t lane = (first + i * stride) % WARP;
            if (mask >> lane & 1) {
                fibre_ready(lane_of(f, lane));
            }
        }
    }
    fibre_leave(f);
}

void gpusim_warp_sync(uint32_t mask, int line)
{
    warp_meet(mask, NULL, 0, 0, NULL, line);
}

void gpusim_warp_read(uint32_t mask, const void *value, size_t bytes, int source, void *got,
                      int line)
{
    warp_meet(mask, value, bytes, source, got, line);
}

void gpusim_exchange(const void *mine, size_t bytes, void *all, int line)
{
    warp_meet(0xffffffffu, mine, bytes, -1, all, line);
}

uint32_t gpusim_ballot(uint32_t mask, bool predicate, int line)
{
    uint8_t mine = predicate, all[WARP];
    warp_meet(mask, &mine, 1, -1, all, line);
    uint32_t votes = 0;
    for (uint32_t lane = 0; lane < WARP; lane++) {
        votes |= static_cast<uint32_t>(all[lane]) << lane;
    }
    return votes;
}

unsigned char *gpusim_shared_dynamic(void)
{
    return block.shared;
}

/* ---- blocks and grids ---- */

[[noreturn]] static void fail_deadlock(void)
{
    const struct fibre *waits = NULL;
    for (uint32_t i = 0; i < block.count && !waits; i++) {
        waits = block.of_thread[i];
    }
    if (waits->state == FIBRE_IN_WARP) {
        warp_is_complete(waits); /* names the lane that has ended */
    }
    for (uint32_t i = 0; i < block.count; i++) {
        if (block.has_ended[i]) {
            fail_at(&waits->now, "waits at the %s of line %d for thread %u, which has ended",
                    waits->state == FIBRE_IN_BARRIER ? "barrier" : "warp operation", waits->line,
                    i);
        }
    }
    for (uint32_t i = 0; i < block.count; i++) {
        const struct fibre *f = block.of_thread[i];
        if (f->state != waits->state || f->line != waits->line) {
            fail_at(&waits->now,
                    "waits at the %s of line %d, while thread %u waits at the %s of line %d",
                    waits->state == FIBRE_IN_BARRIER ? "barrier" : "warp operation", waits->line, i,
                    f->state == FIBRE_IN_BARRIER ? "barrier" : "warp operation", f->line);
        }
    }
    fail_at(&waits->now, "waits for ever at line %d", waits->line);
}

static void block_run(void)
{
    block.started = 0;
    block.alive = block.count;
    block.ready_count = 0;
    block.in_barrier = 0;
    memset(block.in_warp, 0, sizeof block.in_warp);
    memset(block.has_ended, 0, block.count);
    shuffle_walk(block.count, &block.first, &block.stride);
    while (block.alive > 0) {
        struct fibre *f = fibre_pick();
        if (!f) {
            fail_deadlock();
        }
        gpusim_context_switch(&block.host, &f->context);
    }
}

static void blocks_run(const struct gpusim_grid *grid)
{
    uint64_t count = static_cast<uint64_t>(grid->blocks[0]) * grid->blocks[1] * grid->blocks[2];
    uint32_t first, stride, kernel = gpusim_shared_find(grid->kernel, grid->name);
    /* More than 2^32 blocks do not finish here anyway. */
    shuffle_walk(count > UINT32_MAX ? 1 : static_cast<uint32_t>(count), &first, &stride);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t b = count > UINT32_MAX ? i : (first + i * stride) % count;
        gpusim_block_index = uint3{static_cast<uint32_t>(b % grid->blocks[0]),
                                   static_cast<uint32_t>(b / grid->blocks[0] % grid->blocks[1]),
                                   static_cast<uint32_t>(b / grid->blocks[0] / grid->blocks[1])};
        gpusim_shared_poison(kernel, block.shared, grid->shared_bytes);
        block_run();
        if (!gpusim_shared_is_whole(block.shared, grid->shared_bytes)) {
            fail_at(NULL, "wrote beyond its %zu bytes of dynamic shared memory",
                    grid->shared_bytes);
        }
    }
}

void gpusim_grid_run(const struct gpusim_grid *grid, uint64_t seed)
{
#if defined(__x86_64__)
    /* Kernels are built with -ftz=true: subnormals are zero, as on the CPU's threads. */
    unsigned int csr = _mm_getcsr();
    _mm_setcsr(0x9fc0);
#endif
    gpusim_context_host(&block.host);
    block.grid = grid;
    block.count = grid->threads[0] * grid->threads[1] * grid->threads[2];
    block.shared = gpusim_shared_take(grid->shared_bytes);
    gpusim_block_size = dim3(grid->threads[0], grid->threads[1], grid->threads[2]);
    gpusim_grid_size = dim3(grid->blocks[0], grid->blocks[1], grid->blocks[2]);
    shuffle_state = seed ? seed * UINT64_C(0x9e3779b97f4a7c15) | 1 : 0;
    memset(block.of_thread, 0, sizeof block.of_thread);
    blocks_run(grid);
    gpusim_shared_give(block.shared, grid->shared_bytes);
    gpusim_now = NULL;
    block.grid = NULL;
#if defined(__x86_64__)
    _mm_setcsr(csr);
#endif
}
