/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The language of kernel files, for a C++ compiler of the CPU: what launch.cuh includes in place of
 * CUDA's headers when KERN_GPUSIM is defined. README.md tells what it proves and what not.
 *
 *     KERN_LAUNCH(...) -> gpusim_launch: arguments are copied, the launch goes to the stream's
 * queue worker thread    -> gpusim_grid_run: block by block; each thread of a block is a fibre
 *
 * One grid runs at a time in a process, so that shared memory is plain static memory.
 */
#ifndef GPUSIM_GPUSIM_H
#define GPUSIM_GPUSIM_H

#include <assert.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <new>
#include <tuple>
#include <utility>

#include "gpusim_run.h"

#define __global__       __attribute__((unused))
#define __device__       __attribute__((unused))
#define __host__         __attribute__((unused))
#define __forceinline__  inline __attribute__((always_inline))
#define __noinline__     __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __grid_constant__
#define __constant__ static
/* Poisoned between blocks by name, see gpusim_shared.cc. */
#define __shared__ static

#define threadIdx (gpusim_now->thread)
#define blockIdx  (gpusim_block_index)
#define blockDim  (gpusim_block_size)
#define gridDim   (gpusim_grid_size)
#define warpSize  32

#define KERN_UNPAREN(...)         __VA_ARGS__
#define KERN_SHARED_DYNAMIC(name) unsigned char *const name = gpusim_shared_dynamic()
#define KERN_LAUNCH(kernel, blocks, threads, shared_bytes, stream, ...)                            \
    gpusim_launch(#kernel, (kernel), dim3(blocks), dim3(threads), (shared_bytes), (stream),        \
                  ##__VA_ARGS__)

/* ---- launches ---- */

template <typename... P> struct gpusim_call {
    void (*kernel)(P...);
    std::tuple<P...> args;

    template <size_t... I> void call(std::index_sequence<I...>)
    {
        kernel(std::get<I>(args)...);
    }
    static void run(void *arg)
    {
        static_cast<gpusim_call *>(arg)->call(std::index_sequence_for<P...>());
    }
};

template <typename... P, typename... A>
static inline void gpusim_launch(const char *name, void (*kernel)(P...), dim3 blocks, dim3 threads,
                                 size_t shared_bytes, cudaStream_t stream, A... args)
{
    typedef gpusim_call<P...> call;
    void *memory = malloc(sizeof(call));
    if (!memory) {
        abort();
    }
    new (memory) call{kernel, std::tuple<P...>(static_cast<P>(args)...)};
    struct gpusim_grid grid = {};
    grid.name = name;
    grid.kernel = reinterpret_cast<const void *>(kernel);
    grid.blocks[0] = blocks.x;
    grid.blocks[1] = blocks.y;
    grid.blocks[2] = blocks.z;
    grid.threads[0] = threads.x;
    grid.threads[1] = threads.y;
    grid.threads[2] = threads.z;
    grid.shared_bytes = shared_bytes;
    grid.call = call::run;
    grid.arg = memory;
    gpusim_grid_submit(&grid, stream);
}

/* ---- threads of a block ---- */

#define __syncthreads()                    gpusim_block_sync(__LINE__)
#define __syncwarp(...)                    gpusim_warp_sync(gpusim_mask(__VA_ARGS__), __LINE__)
#define __ballot_sync(mask, predicate)     gpusim_ballot((mask), (predicate) != 0, __LINE__)
#define __any_sync(mask, predicate)        (gpusim_ballot((mask), (predicate) != 0, __LINE__) != 0)
#define __all_sync(mask, predicate)        (gpusim_ballot((mask), (predicate) == 0, __LINE__) == 0)
#define __shfl_sync(mask, value, ...)      gpusim_shfl<0>((mask), __LINE__, (value), __VA_ARGS__)
#define __shfl_up_sync(mask, value, ...)   gpusim_shfl<1>((mask), __LINE__, (value), __VA_ARGS__)
#define __shfl_down_sync(mask, value, ...) gpusim_shfl<2>((mask), __LINE__, (value), __VA_ARGS__)
#define __shfl_xor_sync(mask, value, ...)  gpusim_shfl<3>((mask), __LINE__, (value), __VA_ARGS__)
/* Every lane of the warp calls it: `all` gets 32 times `bytes`, in the order of lanes. */
#define gpusim_warp_exchange(mine, bytes, all) gpusim_exchange((mine), (bytes), (all), __LINE__)

static inline unsigned int gpusim_mask(unsigned int mask = 0xffffffffu)
{
    return mask;
}

/* Kind: 0 index, 1 up, 2 down, 3 xor; a lane whose source lies outside of its `width` keeps its
 * own. */
template <int Kind, typename T>
static inline T gpusim_shfl(unsigned int mask, int line, T value, int operand, int width = 32)
{
    int lane = static_cast<int>(gpusim_now->lane), first = lane & ~(width - 1);
    int source = Kind == 0   ? first + (operand & (width - 1))
                 : Kind == 1 ? lane - operand
                 : Kind == 2 ? lane + operand
                             : lane ^ operand;
    if (source < first || source >= first + width) {
        source = lane;
    }
    T got;
    gpusim_warp_read(mask, &value, sizeof value, source, &got, line);
    return got;
}

static inline void __threadfence()
{
}

static inline void __threadfence_block()
{
}

[[noreturn]] static inline void __trap()
{
    gpusim_fail("__trap()");
}

/* Whole numbers only: sums of floats in the order of arrival would differ from run to run. */
static inline unsigned int atomicAdd(unsigned int *to, unsigned int x)
{
    unsigned int old = *to;
    *to = old + x;
    return old;
}

static inline int atomicAdd(int *to, int x)
{
    int old = *to;
    *to = old + x;
    return old;
}

/* ---- arithmetic ---- */

/* Single operations, rounded to the nearest; the compiler may not fuse (-ffp-contract=off). */
static inline float __fadd_rn(float a, float b)
{
    return a + b;
}

static inline float __fsub_rn(float a, float b)
{
    return a - b;
}

static inline float __fmul_rn(float a, float b)
{
    return a * b;
}

static inline float __fdiv_rn(float a, float b)
{
    return a / b;
}

static inline float __frcp_rn(float a)
{
    return 1.0f / a;
}

static inline float __fsqrt_rn(float a)
{
    return sqrtf(a);
}

static inline float __fmaf_rn(float a, float b, float c)
{
    return fmaf(a, b, c);
}

static inline double __dadd_rn(double a, double b)
{
    return a + b;
}

static inline double __dsub_rn(double a, double b)
{
    return a - b;
}

static inline double __dmul_rn(double a, double b)
{
    return a * b;
}

static inline double __ddiv_rn(double a, double b)
{
    return a / b;
}

static inline double __dsqrt_rn(double a)
{
    return sqrt(a);
}

static inline double __fma_rn(double a, double b, double c)
{
    return fma(a, b, c);
}

/* The device's are approximate, these are better. The C library has functions of these names. */
#define __expf(x) expf(x)
#define __logf(x) logf(x)
#define __cosf(x) cosf(x)
#define __sinf(x) sinf(x)

static inline float __fdividef(float a, float b)
{
    return a / b;
}

static inline float rsqrtf(float x)
{
    return static_cast<float>(1.0 / sqrt(static_cast<double>(x)));
}

static inline double rsqrt(double x)
{
    return 1.0 / sqrt(x);
}

template <typename T> static inline T gpusim_min(T a, T b)
{
    return b < a ? b : a;
}

template <typename T> static inline T gpusim_max(T a, T b)
{
    return a < b ? b : a;
}

#define GPUSIM_MIN_MAX(type)                                                                       \
    static inline type min(type a, type b)                                                         \
    {                                                                                              \
        return gpusim_min<type>(a, b);                                                             \
    }                                                                                              \
    static inline type max(type a, type b)                                                         \
    {                                                                                              \
        return gpusim_max<type>(a, b);                                                             \
    }

GPUSIM_MIN_MAX(int)
GPUSIM_MIN_MAX(unsigned int)
GPUSIM_MIN_MAX(long)
GPUSIM_MIN_MAX(unsigned long)
GPUSIM_MIN_MAX(long long)
GPUSIM_MIN_MAX(unsigned long long)

/* fminf, fmaxf: a number before a NaN. */
static inline float min(float a, float b)
{
    return fminf(a, b);
}

static inline float max(float a, float b)
{
    return fmaxf(a, b);
}

/* ---- bits ---- */

template <typename To, typename From> static inline To gpusim_bits(From from)
{
    static_assert(sizeof(To) == sizeof(From), "the same size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

static inline unsigned int __float_as_uint(float x)
{
    return gpusim_bits<unsigned int>(x);
}

static inline int __float_as_int(float x)
{
    return gpusim_bits<int>(x);
}

static inline float __uint_as_float(unsigned int x)
{
    return gpusim_bits<float>(x);
}

static inline float __int_as_float(int x)
{
    return gpusim_bits<float>(x);
}

static inline long long __double_as_longlong(double x)
{
    return gpusim_bits<long long>(x);
}

static inline double __longlong_as_double(long long x)
{
    return gpusim_bits<double>(x);
}

static inline int __popc(unsigned int x)
{
    return __builtin_popcount(x);
}

static inline int __clz(int x)
{
    return x ? __builtin_clz(static_cast<unsigned int>(x)) : 32;
}

static inline int __ffs(int x)
{
    return __builtin_ffs(x);
}

static inline unsigned int __umulhi(unsigned int a, unsigned int b)
{
    return static_cast<unsigned int>((static_cast<unsigned long long>(a) * b) >> 32);
}

static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}

/* ---- loads and stores with a hint for the cache ---- */

template <typename T> static inline T __ldg(const T *p)
{
    return *p;
}

template <typename T> static inline T __ldcs(const T *p)
{
    return *p;
}

template <typename T> static inline T __ldcg(const T *p)
{
    return *p;
}

template <typename T> static inline void __stcs(T *p, T x)
{
    *p = x;
}

template <typename T> static inline void __stcg(T *p, T x)
{
    *p = x;
}

#endif
