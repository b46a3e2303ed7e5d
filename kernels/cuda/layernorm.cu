/* SPDX-License-Identifier: Apache-2.0 */
/*
 * LayerNorm, x[N,C]: out = (x - mean) rstd weight + bias, rstd = 1 / sqrt(var + eps) for each row,
 * the variance from the differences. A warp takes a row, as in rmsnorm.cu; rsqrtf
 * is the device's (2 ulp); the gradients of weight
 * and bias are kern_columns: two passes.
 */
#include "kernels/cuda/columns.cuh"

namespace
{

template <typename T> struct layernorm_forward {
    enum { W = kern_width<T>::W };
    T *out;
    float *mean, *rstd;
    const T *x, *weight, *bias;
    uint32_t c;
    float c_inverse, eps;
    int whole;

    __device__ __forceinline__ float sum(const T *from, uint32_t lane) const
    {
        float sum = 0.0f;
#pragma unroll 4
        for (uint64_t at = lane * W; at < c; at += KERN_WARP * W) {
            float v[W];
            kern_load_row(v, from, (uint32_t)at, c, whole, 0.0f);
#pragma unroll
            for (int i = 0; i < W; i++) {
                sum += v[i];
            }
        }
        return kern_warp_sum(sum);
    }

    __device__ __forceinline__ float sum_squares(const T *from, float middle, uint32_t lane) const
    {
        float sum = 0.0f;
#pragma unroll 4
        for (uint64_t at = lane * W; at < c; at += KERN_WARP * W) {
            float v[W];
            kern_load_row(v, from, (uint32_t)at, c, whole, middle);
#pragma unroll
            for (int i = 0; i < W; i++) {
                sum += (v[i] - middle) * (v[i] - middle);
            }
        }
        return kern_warp_sum(sum);
    }

    __device__ __forceinline__ void row(uint64_t row, uint32_t lane) const
    {
        const T *from = x + row * c;
        T *to = out + row * c;
        float m = sum(from, lane) * c_inverse;
        float r = rsqrtf(sum_squares(from, m, lane) * c_inverse + eps);
        for (uint64_t at = lane * W; at < c; at += KERN_WARP * W) {
            float v[W], w[W], b[W] = {};
            kern_load_row(v, from, (uint32_t)at, c, whole, 0.0f);
            kern_load_row(w, weight, (uint32_t)at, c, whole, 0.0f);
            if (bias != NULL) {
                kern_load_row(b, bias, (uint32_t)at, c, whole, 0.0f);
            }
#pragma unroll
            for (int i = 0; i < W; i++) {
                v[i] = ((v[i] - m) * r) * w[i] + b[i];
            }
            kern_store_row(to, v, (uint32_t)at, c, whole);
        }
        if (lane == 0) {
            mean[row] = m;
            rstd[row] = r;
        }
    }
};

template <typename T> struct layernorm_dx {
    enum { W = kern_width<T>::W };
    T *dx;
    const T *dout, *x, *weight;
    const float *mean, *rstd;
    uint32_t c;
    float c_inverse;
    int whole;

    __device__ __forceinline__ void row(uint64_t row, uint32_t lane) const
    {
        const T *from = x + row * c, *d = dout + row * c;
        T *to = dx + row * c;
        float m = mean[row], r = rstd[row], sum_g = 0.0f, sum_gh = 0.0f;
#pragma unroll 2
        for (uint64_t at = lane * W; at < c; at += KERN_WARP * W) {
            float g[W], w[W], v[W];
            kern_load_row(g, d, (uint32_t)at, c, whole, 0.0f);
            kern_load_row(w, weight, (uint32_t)at, c, whole, 0.0f);
            kern_load_row(v, from, (uint32_t)at, c, whole, m);
#pragma unroll
            for (int i = 0; i < W; i++) {
                g[i] *= w[i];
                sum_g += g[i];
                sum_gh += g[i] * ((v[i] - m) * r);
            }
        }
        float g_mean = kern_warp_sum(sum_g) * c_inverse;
        float gh_mean = kern_warp_sum(sum_gh) * c_inverse;
        for (uint64_t at = lane * W; at < c; at += KERN_WARP * W) {
            float g[W], w[W], v[W], old[W];
            kern_load_row(g, d, (uint32_t)at, c, whole, 0.0f);
            kern_load_row(w, weight, (uint32_t)at, c, whole, 0.0f);
            kern_load_row(v, from, (uint32_t)at, c, whole, 0.0f);
            kern_load_row(old, to, (uint32_t)at, c, whole, 0.0f);
#pragma unroll
            for (int i = 0; i < W; i++) {
                float h = (v[i] - m) * r;
                old[i] += r * ((g[i] * w[i] - g_mean) - h * gh_mean);
            }
            kern_store_row(to, old, (uint32_t)at, c, whole);
        }
    }
};

template <typename T> struct layernorm_columns {
    enum { W = kern_width<T>::W, SUMS = 2 };
    const T *dout, *x;
    const float *mean, *rstd;
    uint32_t c;
    int whole;

    __device__ __forceinline__ void row(float (&sums)[SUMS][W], uint64_t row, uint32_t at) const
    {
        float d[W], v[W], m = mean[row], r = rstd[row];
        kern_load_row(d, dout + row * c, at, c, whole, 0.0f);
        kern_load_row(v, x + row * c, at, c, whole, 0.0f);
#pragma unroll
        for (int i = 0; i < W; i++) {
            sums[0][i] += d[i] * ((v[i] - m) * r);
            sums[1][i] += d[i];
        }
    }
};

template <typename T>
void forward(struct kern *k, kern_real *out, float *mean, float *rstd, const kern_real *x,
             const kern_real *weight, const kern_real *bias, uint32_t n, uint32_t c, float eps)
{
    layernorm_forward<T> op = {
        (T *)out,        mean, rstd, (const T *)x, (const T *)weight, (const T *)bias, c,
        1.0f / (float)c, eps,  0};
    op.whole = kern_is_whole_rows(op.out, c) && kern_is_whole(x) && kern_is_whole(weight) &&
               kern_is_whole(bias);
    kern_rows(k, "layernorm_forward", op, n);
}

template <typename T>
void backward(struct kern *k, kern_real *dx, float *const *outs, const kern_real *dout,
              const kern_real *x, const kern_real *weight, const float *mean, const float *rstd,
              void *scratch, uint32_t n, uint32_t c, int add)
{
    int whole = kern_is_whole_rows((const T *)x, c) && kern_is_whole(dout);
    layernorm_dx<T> to_x = {(T *)dx,
                            (const T *)dout,
                            (const T *)x,
                            (const T *)weight,
                            mean,
                            rstd,
                            c,
                            1.0f / (float)c,
                            whole && kern_is_whole(dx) && kern_is_whole(weight)};
    kern_rows(k, "layernorm_backward", to_x, n);
    layernorm_columns<T> columns = {(const T *)dout, (const T *)x, mean, rstd, c, whole};
    kern_columns(k, "layernorm_backward", columns, outs, scratch, n, c, add);
}

} // namespace

extern "C" uint64_t kern_cuda_norm_scratch(struct kern *k, uint32_t n, uint32_t c)
{
    (void)k;
    return (uint64_t)kern_chunks(n) * 2 * c * sizeof(float);
}

extern "C" void kern_cuda_layernorm_forward(struct kern *k, kern_real *out, float *mean,
                                            float *rstd, const kern_real *x,
                                            const kern_real *weight, const kern_real *bias,
                                            uint32_t n, uint32_t c, float eps)
{
    KERN_BY_TYPE(k, forward, k, out, mean, rstd, x, weight, bias, n, c, eps);
}

extern "C" void kern_cuda_layernorm_backward(struct kern *k, kern_real *dx, float *dweight,
                                             float *dbias, const kern_real *dout,
                                             const kern_real *x, const kern_real *weight,
                                             const float *mean, const float *rstd, void *scratch,
                                             uint32_t n, uint32_t c, int add)
{
    float *outs[] = {dweight, dbias};
    KERN_BY_TYPE(k, backward, k, dx, outs, dout, x, weight, mean, rstd, scratch, n, c, add);
}
