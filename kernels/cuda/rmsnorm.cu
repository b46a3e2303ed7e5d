/* SPDX-License-Identifier: Apache-2.0 */
/*
 * RMSNorm, x[N,C]: out = x rstd weight, rstd = 1 / sqrt(mean(x^2) + eps) for each row. A warp takes
 * a row: lane l adds the packs l, l + 32, ... element by element, then the lanes add as
 * kern_warp_sum does; rsqrtf is the device's (2 ulp). The weight's gradient is kern_columns: two
 * passes.
 */
#include "kernels/cuda/columns.cuh"

namespace
{

template <typename T> struct rmsnorm_forward {
    enum { W = kern_width<T>::W };
    T *out;
    float *rstd;
    const T *x, *weight;
    uint32_t c;
    float c_inverse, eps;
    int whole;

    __device__ __forceinline__ void row(uint64_t row, uint32_t lane) const
    {
        const T *from = x + row * c;
        T *to = out + row * c;
        float sum = 0.0f;
#pragma unroll 4
        for (uint64_t at = lane * W; at < c; at += KERN_WARP * W) {
            float v[W];
            kern_load_row(v, from, (uint32_t)at, c, whole, 0.0f);
#pragma unroll
            for (int i = 0; i < W; i++) {
                sum += v[i] * v[i];
            }
        }
        float r = rsqrtf(kern_warp_sum(sum) * c_inverse + eps);
#pragma unroll 4
        for (uint64_t at = lane * W; at < c; at += KERN_WARP * W) {
            float v[W], w[W];
            kern_load_row(v, from, (uint32_t)at, c, whole, 0.0f);
            kern_load_row(w, weight, (uint32_t)at, c, whole, 0.0f);
#pragma unroll
            for (int i = 0; i < W; i++) {
                v[i] = (v[i] * r) * w[i];
            }
            kern_store_row(to, v, (uint32_t)at, c, whole);
        }
        if (lane == 0) {
            rstd[row] = r;
        }
    }
};

template <typename T> struct rmsnorm_dx {
    enum { W = kern_width<T>::W };
    T *dx;
    const T *dout, *x, *weight;
    const float *rstd;
    uint32_t c;
    float c_inverse;
    int whole;

    __device__ __forceinline__ void row(uint64_t row, uint32_t lane) const
    {
        const T *from = x + row * c, *d = dout + row * c;
        T *to = dx + row * c;
        float r = rstd[row], sum = 0.0f;
#pragma unroll 2
        for (uint64_t at = lane * W; at < c; at += KERN_WARP * W) {
            float g[W], w[W], v[W];
            kern_load_row(g, d, (uint32_t)at, c, whole, 0.0f);
            kern_load_row(w, weight, (uint32_t)at, c, whole, 0.0f);
            kern_load_row(v, from, (uint32_t)at, c, whole, 0.0f);
#pragma unroll
            for (int i = 0; i < W; i++) {
                sum += (g[i] * w[i]) * v[i];
            }
        }
        /* sum g h / C, with h = x rstd taken out of the sum */
        float mean = (kern_warp_sum(sum) * r) * c_inverse;
        for (uint64_t at = lane * W; at < c; at += KERN_WARP * W) {
            float g[W], w[W], v[W], old[W];
            kern_load_row(g, d, (uint32_t)at, c, whole, 0.0f);
            kern_load_row(w, weight, (uint32_t)at, c, whole, 0.0f);
            kern_load_row(v, from, (uint32_t)at, c, whole, 0.0f);
            kern_load_row(old, to, (uint32_t)at, c, whole, 0.0f);
#pragma unroll
            for (int i = 0; i < W; i++) {
                old[i] += r * (g[i] * w[i] - (v[i] * r) * mean);
            }
            kern_store_row(to, old, (uint32_t)at, c, whole);
        }
    }
};

template <typename T> struct rmsnorm_dweight {
    enum { W = kern_width<T>::W, SUMS = 1 };
    const T *dout, *x;
    const float *rstd;
    uint32_t c;
    int whole;

    __device__ __forceinline__ void row(float (&sums)[SUMS][W], uint64_t row, uint32_t at) const
    {
        float d[W], v[W], r = rstd[row];
        kern_load_row(d, dout + row * c, at, c, whole, 0.0f);
        kern_load_row(v, x + row * c, at, c, whole, 0.0f);
#pragma unroll
        for (int i = 0; i < W; i++) {
            sums[0][i] += d[i] * (v[i] * r);
        }
    }
};

template <typename T>
void forward(struct kern *k, kern_real *out, float *rstd, const kern_real *x,
             const kern_real *weight, uint32_t n, uint32_t c, float eps)
{
    rmsnorm_forward<T> op = {(T *)out, rstd, (const T *)x, (const T *)weight, c, 1.0f / (float)c,
                             eps,      0};
    op.whole = kern_is_whole_rows(op.out, c) && kern_is_whole(x) && kern_is_whole(weight);
    kern_rows(k, "rmsnorm_forward", op, n);
}

template <typename T>
void backward(struct kern *k, kern_real *dx, float *dweight, const kern_real *dout,
              const kern_real *x, const kern_real *weight, const float *rstd, void *scratch,
              uint32_t n, uint32_t c, int add)
{
    int whole = kern_is_whole_rows((const T *)x, c) && kern_is_whole(dout);
    rmsnorm_dx<T> to_x = {(T *)dx,
                          (const T *)dout,
                          (const T *)x,
                          (const T *)weight,
                          rstd,
                          c,
                          1.0f / (float)c,
                          whole && kern_is_whole(dx) && kern_is_whole(weight)};
    kern_rows(k, "rmsnorm_backward", to_x, n);
    rmsnorm_dweight<T> to_weight = {(const T *)dout, (const T *)x, rstd, c, whole};
    float *outs[] = {dweight};
    kern_columns(k, "rmsnorm_backward", to_weight, outs, scratch, n, c, add);
}

} // namespace

extern "C" void kern_cuda_rmsnorm_forward(struct kern *k, kern_real *out, float *rstd,
                                          const kern_real *x, const kern_real *weight, uint32_t n,
                                          uint32_t c, float eps)
{
    KERN_BY_TYPE(k, forward, k, out, rstd, x, weight, n, c, eps);
}

extern "C" void kern_cuda_rmsnorm_backward(struct kern *k, kern_real *dx, float *dweight,
                                           const kern_real *dout, const kern_real *x,
                                           const kern_real *weight, const float *rstd,
                                           void *scratch, uint32_t n, uint32_t c, int add)
{
    KERN_BY_TYPE(k, backward, k, dx, dweight, dout, x, weight, rstd, scratch, n, c, add);
}
