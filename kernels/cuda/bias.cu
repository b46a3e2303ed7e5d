/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is the same for each row: biases y[N,O] += b[O]. Backward is kern_columns: two passes.
 */
#include "kernels/cuda/columns.cuh"

namespace
{

template <typename T> struct bias_forward {
    enum { W = kern_width<T>::W };
    T *y;
    const T *bias;
    uint32_t o;
    int whole;

    __device__ __forceinline__ void row(uint64_t row, uint32_t lane) const
    {
        T *to = y + row * o;
        for (uint64_t at = lane * W; at < o; at += KERN_WARP * W) {
            float v[W], b[W];
            kern_load_row(v, to, (uint32_t)at, o, whole, 0.0f);
            kern_load_row(b, bias, (uint32_t)at, o, whole, 0.0f);
#pragma unroll
            for (int i = 0; i < W; i++) {
                v[i] += b[i];
            }
            kern_store_row(to, v, (uint32_t)at, o, whole);
        }
    }
};

template <typename T> struct bias_backward {
    enum { W = kern_width<T>::W, SUMS = 1 };
    const T *dy;
    uint32_t o;
    int whole;

    __device__ __forceinline__ void row(float (&sums)[SUMS][W], uint64_t row, uint32_t at) const
    {
        float v[W];
        kern_load_row(v, dy + row * o, at, o, whole, 0.0f);
#pragma unroll
        for (int i = 0; i < W; i++) {
            sums[0][i] += v[i];
        }
    }
};

template <typename T>
void forward(struct kern *k, kern_real *y, const kern_real *bias, uint32_t n, uint32_t o)
{
    bias_forward<T> op = {(T *)y, (const T *)bias, o,
                          kern_is_whole_rows((const T *)y, o) && kern_is_whole(bias)};
    kern_rows(k, "bias_forward", op, n);
}

template <typename T>
void backward(struct kern *k, float *dbias, const kern_real *dy, void *scratch, uint32_t n,
              uint32_t o, int add)
{
    bias_backward<T> op = {(const T *)dy, o, kern_is_whole_rows((const T *)dy, o)};
    float *outs[] = {dbias};
    kern_columns(k, "bias_backward", op, outs, scratch, n, o, add);
}

} // namespace

extern "C" void kern_cuda_bias_forward(struct kern *k, kern_real *y, const kern_real *bias,
                                       uint32_t n, uint32_t o)
{
    KERN_BY_TYPE(k, forward, k, y, bias, n, o);
}

extern "C" void kern_cuda_bias_backward(struct kern *k, float *dbias, const kern_real *dy,
                                        void *scratch, uint32_t n, uint32_t o, int add)
{
    KERN_BY_TYPE(k, backward, k, dbias, dy, scratch, n, o, add);
}
