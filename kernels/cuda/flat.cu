/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Flat operations: types, sums of two and of many arrays, scale, block sums of the norm. Each
 * element is a sequence of single rounded operations, and each block sum adds in the order of
 * kernels/cpu/flat.c, so the bits are those of the CPU.
 */
#include "kernels/cuda/pack.cuh"

namespace
{

/* ---- round, widen ---- */

template <typename To, typename From> struct convert {
    enum { W = kern_width<kern_bf16>::W };
    To *out;
    const From *a;

    template <int N> __device__ __forceinline__ void run(uint64_t at) const
    {
        float v[N];
        kern_load(v, a + at);
        kern_store(out + at, v);
    }
};

template <typename To, typename From>
void convert_all(struct kern *k, const char *name, void *out, const void *a, uint64_t count)
{
    convert<To, From> op = {(To *)out, (const From *)a};
    kern_map(k, name, op, count, kern_is_whole(out) && kern_is_whole(a));
}

/* ---- out = a + b ---- */

template <typename T> struct add {
    enum { W = kern_width<T>::W };
    T *out;
    const T *a, *b;

    template <int N> __device__ __forceinline__ void run(uint64_t at) const
    {
        float v[N], w[N];
        kern_load(v, a + at);
        kern_load(w, b + at);
#pragma unroll
        for (int i = 0; i < N; i++) {
            v[i] = __fadd_rn(v[i], w[i]);
        }
        kern_store(out + at, v);
    }
};

template <typename T>
void add_all(struct kern *k, const char *name, void *out, const void *a, const void *b,
             uint64_t count)
{
    add<T> op = {(T *)out, (const T *)a, (const T *)b};
    kern_map(k, name, op, count, kern_is_whole(out) && kern_is_whole(a) && kern_is_whole(b));
}

/* ---- x *= factor ---- */

struct scale {
    enum { W = kern_width<float>::W };
    float *x;
    float factor;

    template <int N> __device__ __forceinline__ void run(uint64_t at) const
    {
        float v[N];
        kern_load(v, x + at);
#pragma unroll
        for (int i = 0; i < N; i++) {
            v[i] = __fmul_rn(v[i], factor);
        }
        kern_store(x + at, v);
    }
};

/* ---- out = ((parts[0] + parts[1]) + parts[2]) + ... ---- */

template <typename T> struct sum_parts {
    enum { W = kern_width<T>::W };
    T *out;
    const T *parts;
    uint64_t n;
    uint32_t count;

    template <int N> __device__ __forceinline__ void run(uint64_t at) const
    {
        float sum[N];
        kern_load(sum, parts + at);
        const T *part = parts + at;
#pragma unroll 4
        for (uint32_t j = 1; j < count; j++) {
            float v[N];
            part += n;
            kern_load(v, part);
#pragma unroll
            for (int i = 0; i < N; i++) {
                sum[i] = __fadd_rn(sum[i], v[i]);
            }
        }
        kern_store(out + at, sum);
    }
};

template <typename T>
void sum_all(struct kern *k, void *out, const void *parts, uint32_t count, uint64_t n)
{
    sum_parts<T> op = {(T *)out, (const T *)parts, n, count};
    kern_map(k, "sum_parts", op, count == 0 ? 0 : n,
             kern_is_whole(out) && kern_is_whole(parts) &&
                 (count <= 1 || n % kern_width<T>::W == 0));
}

/* ---- fp64 sums of squares over KERN_BLOCK elements: eight lanes, a thread each. The square of an
 * fp32 is exact in fp64, so a fused multiply-add rounds as the CPU's two operations do. ---- */

enum { LANES = 8, STEP = 16 };

__global__ void __launch_bounds__(KERN_THREADS)
    sumsq_kernel(double *sums, const float *x, uint64_t count, uint64_t blocks)
{
    uint64_t stride = (uint64_t)gridDim.x * (KERN_THREADS / LANES);
    uint64_t block = (uint64_t)blockIdx.x * (KERN_THREADS / LANES) + threadIdx.x / LANES;
    unsigned lane = threadIdx.x % LANES;
    /* All threads of a warp go round equally often: they meet in the shuffles. */
    for (uint64_t base = block - block % (KERN_WARP / LANES); base < blocks;
         base += stride, block += stride) {
        uint64_t first = block * KERN_BLOCK, rest = block < blocks ? count - first : 0;
        unsigned here = rest < KERN_BLOCK ? (unsigned)rest : KERN_BLOCK;
        const float *from = x + first;
        double sum = 0.0;
        unsigned i = lane;
        for (; i + (STEP - 1) * LANES < here; i += STEP * LANES) {
            float v[STEP];
#pragma unroll
            for (int j = 0; j < STEP; j++) {
                v[j] = from[i + j * LANES];
            }
#pragma unroll
            for (int j = 0; j < STEP; j++) {
                sum = __fma_rn((double)v[j], (double)v[j], sum);
            }
        }
        for (; i < here; i += LANES) {
            sum = __fma_rn((double)from[i], (double)from[i], sum);
        }
        /* ((0+4)+(2+6)) + ((1+5)+(3+7)) */
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) {
            sum = __dadd_rn(sum, __shfl_xor_sync(KERN_FULL, sum, step));
        }
        if (lane == 0 && block < blocks) {
            sums[block] = sum;
        }
    }
}

} // namespace

extern "C" void kern_cuda_round(struct kern *k, kern_real *out, const float *a, uint64_t count)
{
    if (k->type == KERN_BF16) {
        convert_all<kern_bf16, float>(k, "round", out, a, count);
    } else {
        convert_all<float, float>(k, "round", out, a, count);
    }
}

extern "C" void kern_cuda_widen(struct kern *k, float *out, const kern_real *a, uint64_t count)
{
    if (k->type == KERN_BF16) {
        convert_all<float, kern_bf16>(k, "widen", out, a, count);
    } else {
        convert_all<float, float>(k, "widen", out, a, count);
    }
}

extern "C" void kern_cuda_add_real(struct kern *k, kern_real *out, const kern_real *a,
                                   const kern_real *b, uint64_t count)
{
    KERN_BY_TYPE(k, add_all, k, "add_real", out, a, b, count);
}

extern "C" void kern_cuda_add(struct kern *k, float *out, const float *a, const float *b,
                              uint64_t count)
{
    add_all<float>(k, "add", out, a, b, count);
}

extern "C" void kern_cuda_scale(struct kern *k, float *x, float factor, uint64_t count)
{
    struct scale op = {x, factor};
    kern_map(k, "scale", op, count, kern_is_whole(x));
}

extern "C" void kern_cuda_sum_parts(struct kern *k, void *out, const void *parts, uint32_t type,
                                    uint32_t count, uint64_t n)
{
    if (type == KERN_BF16) {
        sum_all<kern_bf16>(k, out, parts, count, n);
    } else {
        sum_all<float>(k, out, parts, count, n);
    }
}

extern "C" void kern_cuda_sumsq_blocks(struct kern *k, double *sums, const float *x, uint64_t count)
{
    uint64_t blocks = (count + KERN_BLOCK - 1) / KERN_BLOCK;
    uint64_t launch = (blocks + KERN_THREADS / LANES - 1) / (KERN_THREADS / LANES);
    if (count == 0) {
        return;
    }
    KERN_LAUNCH(sumsq_kernel, (unsigned)(launch < KERN_BLOCKS_MAX ? launch : KERN_BLOCKS_MAX),
                KERN_THREADS, 0, kern_cuda_of(k)->compute, sums, x, count, blocks);
    kern_cuda_launched(k, "sumsq_blocks");
}
