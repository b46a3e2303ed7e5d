/* SPDX-License-Identifier: Apache-2.0 */
/*
 * GELU in its tanh form, elementwise, as kernels/cpu/gelu.c has it: (1 + tanh u) / 2 = sigmoid(2 u)
 * with u = sqrt(2 / pi) (x + 0.044715 x^3). expf is the device's (2 ulp); no tanh is needed.
 */
#include "kernels/cuda/pack.cuh"

#define TWO_ROOT 1.59576912f /* 2 sqrt(2 / pi) */
#define CUBIC    0.044715f

namespace
{

__device__ __forceinline__ float gate_of(float x)
{
    return 1.0f / (1.0f + expf(-((x + CUBIC * (x * (x * x))) * TWO_ROOT)));
}

template <typename T> struct gelu_forward {
    enum { W = kern_width<T>::W };
    T *out;
    const T *x;

    template <int N> __device__ __forceinline__ void run(uint64_t at) const
    {
        float v[N];
        kern_load(v, x + at);
#pragma unroll
        for (int i = 0; i < N; i++) {
            v[i] = v[i] * gate_of(v[i]);
        }
        kern_store(out + at, v);
    }
};

template <typename T> struct gelu_backward {
    enum { W = kern_width<T>::W };
    T *dx;
    const T *dout, *x;

    template <int N> __device__ __forceinline__ void run(uint64_t at) const
    {
        float d[N], v[N];
        kern_load(d, dout + at);
        kern_load(v, x + at);
#pragma unroll
        for (int i = 0; i < N; i++) {
            float s = gate_of(v[i]);
            float slope = (1.0f + (3.0f * CUBIC) * (v[i] * v[i])) * TWO_ROOT;
            d[i] = d[i] * (s + (v[i] * slope) * (s * (1.0f - s)));
        }
        kern_store(dx + at, d);
    }
};

template <typename T>
void forward(struct kern *k, kern_real *out, const kern_real *x, uint64_t count)
{
    gelu_forward<T> op = {(T *)out, (const T *)x};
    kern_map(k, "gelu_forward", op, count, kern_is_whole(out) && kern_is_whole(x));
}

template <typename T>
void backward(struct kern *k, kern_real *dx, const kern_real *dout, const kern_real *x,
              uint64_t count)
{
    gelu_backward<T> op = {(T *)dx, (const T *)dout, (const T *)x};
    kern_map(k, "gelu_backward", op, count,
             kern_is_whole(dx) && kern_is_whole(dout) && kern_is_whole(x));
}

} // namespace

extern "C" void kern_cuda_gelu_forward(struct kern *k, kern_real *out, const kern_real *x,
                                       uint64_t count)
{
    KERN_BY_TYPE(k, forward, k, out, x, count);
}

extern "C" void kern_cuda_gelu_backward(struct kern *k, kern_real *dx, const kern_real *dout,
                                        const kern_real *x, uint64_t count)
{
    KERN_BY_TYPE(k, backward, k, dx, dout, x, count);
}
