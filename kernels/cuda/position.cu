/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Learned positions: out[B,T,C] += weight[T,C]; backward adds over the sequences in order, so its
 * bits are those of the CPU. A warp takes a row of out, or of the weight.
 */
#include "kernels/cuda/pack.cuh"

namespace
{

template <typename T> struct position_forward {
    enum { W = kern_width<T>::W };
    T *out;
    const T *weight;
    uint32_t c, t_count, pos;
    int whole;

    __device__ __forceinline__ void row(uint64_t row, uint32_t lane) const
    {
        T *to = out + row * c;
        const T *from = weight + ((uint64_t)pos + (uint32_t)row % t_count) * c;
        for (uint64_t at = lane * W; at < c; at += KERN_WARP * W) {
            float v[W], w[W];
            kern_load_row(v, to, (uint32_t)at, c, whole, 0.0f);
            kern_load_row(w, from, (uint32_t)at, c, whole, 0.0f);
#pragma unroll
            for (int i = 0; i < W; i++) {
                v[i] += w[i];
            }
            kern_store_row(to, v, (uint32_t)at, c, whole);
        }
    }
};

template <typename T> struct position_backward {
    enum { W = kern_width<T>::W };
    float *dweight;
    const T *dout;
    uint32_t n, c, t_count;
    int add, whole;

    __device__ __forceinline__ void row(uint64_t t, uint32_t lane) const
    {
        float *to = dweight + t * c;
        for (uint64_t at = lane * W; at < c; at += KERN_WARP * W) {
            float sum[W];
            uint64_t row = t;
            if (add) {
                kern_load_row(sum, to, (uint32_t)at, c, whole, 0.0f);
            } else {
                kern_load_row(sum, dout + row * c, (uint32_t)at, c, whole, 0.0f);
                row += t_count;
            }
#pragma unroll 2
            for (; row < n; row += t_count) {
                float v[W];
                kern_load_row(v, dout + row * c, (uint32_t)at, c, whole, 0.0f);
#pragma unroll
                for (int i = 0; i < W; i++) {
                    sum[i] += v[i];
                }
            }
            kern_store_row(to, sum, (uint32_t)at, c, whole);
        }
    }
};

template <typename T>
void forward(struct kern *k, kern_real *out, const kern_real *weight, uint32_t n, uint32_t c,
             uint32_t t_count, uint32_t pos)
{
    position_forward<T> op = {(T *)out, (const T *)weight, c, t_count, pos, 0};
    op.whole = kern_is_whole_rows(op.out, c) && kern_is_whole(weight);
    kern_rows(k, "position_forward", op, n);
}

template <typename T>
void backward(struct kern *k, float *dweight, const kern_real *dout, uint32_t n, uint32_t c,
              uint32_t t_count, int add)
{
    position_backward<T> op = {dweight, (const T *)dout, n, c, t_count, add, 0};
    op.whole = kern_is_whole_rows(op.dout, c) && kern_is_whole(dweight);
    kern_rows(k, "position_backward", op, t_count < n ? t_count : n);
}

} // namespace

extern "C" void kern_cuda_position_forward(struct kern *k, kern_real *out, const kern_real *weight,
                                           uint32_t n, uint32_t c, uint32_t t_count, uint32_t pos)
{
    KERN_BY_TYPE(k, forward, k, out, weight, n, c, t_count, pos);
}

extern "C" void kern_cuda_position_backward(struct kern *k, float *dweight, const kern_real *dout,
                                            uint32_t n, uint32_t c, uint32_t t_count, uint32_t rows,
                                            int add)
{
    KERN_BY_TYPE(k, backward, k, dweight, dout, n, c, t_count, add);
    uint64_t rest = (uint64_t)(rows - t_count) * c * sizeof(float);
    if (!add && rest > 0) {
        kern_cuda_note(
            k, cudaMemsetAsync(dweight + (uint64_t)t_count * c, 0, rest, kern_cuda_of(k)->compute),
            "position_backward");
    }
}
