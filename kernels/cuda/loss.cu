/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is made of rows' losses: their sum in the order of n, and what tensor parallel ranks
 * gathered, merged. fp64 additions in the CPU's order: the bits are the CPU's.
 */
#include "kernels/cuda/pack.cuh"

namespace
{

constexpr uint32_t BATCH = 2048;

/* One thread adds, all fetch. */
__global__ void __launch_bounds__(KERN_THREADS)
    total_kernel(double *total, const double *losses, uint32_t n, int add)
{
    __shared__ double batch[BATCH];
    double sum = 0.0;
    for (uint64_t first = 0; first < n; first += BATCH) {
        uint32_t here = n - first < BATCH ? (uint32_t)(n - first) : BATCH;
        for (uint32_t i = threadIdx.x; i < here; i += KERN_THREADS) {
            batch[i] = losses[first + i];
        }
        __syncthreads();
        if (threadIdx.x == 0) {
#pragma unroll 16
            for (uint32_t i = 0; i < here; i++) {
                sum += batch[i];
            }
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        *total = (add ? *total : 0.0) + sum;
    }
}

struct tops {
    enum { W = 1 };
    float *out;
    const float *parts;
    uint32_t count, n;

    template <int N> __device__ __forceinline__ void run(uint64_t at) const
    {
        float top = parts[at];
        for (uint32_t j = 1; j < count; j++) {
            top = fmaxf(top, parts[(uint64_t)j * n + at]);
        }
        out[at] = top;
    }
};

struct sums {
    enum { W = 1 };
    double *out;
    const double *parts;
    uint32_t count, n;

    template <int N> __device__ __forceinline__ void run(uint64_t at) const
    {
        double sum = parts[at];
        for (uint32_t j = 1; j < count; j++) {
            sum += parts[(uint64_t)j * n + at];
        }
        out[at] = sum;
    }
};

} // namespace

extern "C" void kern_cuda_loss_total(struct kern *k, double *total, const double *losses,
                                     uint32_t n, int add)
{
    KERN_LAUNCH(total_kernel, 1, KERN_THREADS, 0, kern_cuda_of(k)->compute, total, losses, n, add);
    kern_cuda_launched(k, "loss_total");
}

extern "C" void kern_cuda_tops_merge(struct kern *k, float *tops, const float *parts,
                                     uint32_t count, uint32_t n)
{
    struct tops op = {tops, parts, count, n};
    kern_map(k, "tops_merge", op, count == 0 ? 0 : n, 0);
}

extern "C" void kern_cuda_sums_merge(struct kern *k, double *sums, const double *parts,
                                     uint32_t count, uint32_t n)
{
    struct sums op = {sums, parts, count, n};
    kern_map(k, "sums_merge", op, count == 0 ? 0 : n, 0);
}
